"""Sources of the library, from which ``single_file`` cuts parts: their imports, definitions and other statements."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import Any

PACKAGE = "accel_train"

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class NotSelfContainedError(ValueError):
    """The sources cannot be joined to one file. An error of whoever wrote them, not of the user."""


@dataclass(frozen=True)
class Import:
    """Meaning of an imported name: ``attribute`` of ``module``, or the module itself."""

    module: str
    attribute: str | None

    @property
    def submodule(self) -> str | None:
        """Name of the library's module that is imported as a whole, or None for any other import."""
        name = self.module if self.attribute is None else f"{self.module}.{self.attribute}"
        if self.module.split(".")[0] != PACKAGE or not _is_module(name):
            return None
        return name


@dataclass
class Source:
    """The source of one module and the parts of it that the file needs."""

    name: str
    text: str
    wanted: set[str] = field(default_factory=set[str])
    """Names of its definitions that are needed."""
    as_namespace: set[str] = field(default_factory=set[str])
    """Names of its definitions that other modules read as attributes of the module."""

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> list[str]:
        # Split as Python counts lines: a form feed does not end one.
        return self.text.split("\n")

    def refuse_other_statements(self) -> None:
        """Raise ``NotSelfContainedError`` for statements at the top of the module other than imports and definitions.

        They would be missing from the file, which could then compute something else.
        """
        for node in self.tree.body:
            if not _is_understood(node):
                raise NotSelfContainedError(
                    f"{self.name}, line {node.lineno}: {shown(node)!r} is not an import, function, class or assignment "
                    "to one name, so the file would lack it"
                )

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        """The definitions at the top of the module, by name."""
        found: dict[str, Definition] = {}
        for node in self.tree.body:
            for name in names_defined(node):
                if name in found:
                    raise NotSelfContainedError(f"{self.name}: {name} is defined twice")
                assert isinstance(node, Definition)
                found[name] = node
        return found

    @cached_property
    def conditional(self) -> set[str]:
        """Names that the module binds under TYPE_CHECKING other than by an import, or differently at run time."""
        found: set[str] = set()
        for node in self.tree.body:
            if isinstance(node, ast.If):
                for each in (*node.body, *node.orelse):
                    found.update(names_defined(each))
                    if node.orelse and isinstance(each, (ast.Import, ast.ImportFrom)):
                        found.update(alias.asname or alias.name.split(".")[0] for alias in each.names)
        return found

    @cached_property
    def imports(self) -> dict[str, Import]:
        """The imports at the top of the module, by the name that they bind."""
        found: dict[str, Import] = {}
        statements = [*self.tree.body]
        for node in self.tree.body:
            # Annotations name these types, so the file has to have them like any other.
            if isinstance(node, ast.If) and not node.orelse:  # TYPE_CHECKING
                statements += node.body
        for node in statements:
            if isinstance(node, ast.ImportFrom) and node.module != "__future__":
                for alias in node.names:
                    found[alias.asname or alias.name] = Import(str(node.module), alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    bound = alias.asname or alias.name.split(".")[0]
                    found[bound] = Import(alias.name if alias.asname else bound, None)
        return found


def _is_understood(node: ast.stmt) -> bool:
    """Return True for a statement at the top of a module that ``Source`` understands."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.ImportFrom):
        return node.level == 0 and node.names[0].name != "*"
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) for target in node.targets)
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name)
    return isinstance(node, (ast.Import, ast.FunctionDef, ast.ClassDef)) or is_text(node)


def shown(node: ast.AST) -> str:
    """Return the beginning of a statement, for a message."""
    return ast.unparse(node).partition("\n")[0][:60]


def _is_module(name: str) -> bool:
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:  # a part of the name is no package
        return False
    return spec is not None


def names_defined(node: ast.stmt) -> list[str]:
    """Return the names bound by a definition or an assignment."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def refuse_library(source: Source, node: ast.Import | ast.ImportFrom) -> None:
    """Raise ``NotSelfContainedError`` for an import of the library inside a definition: the file would keep it."""
    modules = (
        [alias.name for alias in node.names] if isinstance(node, ast.Import) else ["." * node.level + str(node.module)]
    )
    if any(module.split(".")[0] in ("", PACKAGE) for module in modules):
        raise NotSelfContainedError(f"{source.name}, line {node.lineno}: import {modules[0]} at the top of the module")


def is_text(node: ast.stmt | None) -> bool:
    """Return True for a docstring, including one below an assignment."""
    value: Any = getattr(node, "value", None)
    if not (isinstance(node, ast.Expr) and isinstance(value, ast.Constant)):
        return False
    return isinstance(value.value, str)

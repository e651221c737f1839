"""Write one Python file with some classes and functions of the library, and all that they use.

The file is cut out of the sources, so there is no second copy of a model to maintain. It imports the standard library
and torch. Left out are methods, and class attributes of a ``nn.Module``, whose names are nowhere in the file, not even
as a string. So are the mixin for the Hub and the bounds of a number, ``Annotated[int, ...]``. No module of the library
is imported or run to find this out. Statements at a module's top other than imports and definitions are refused.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from accel_train.export import sources
from accel_train.export.sources import (
    Definition,
    Import,
    NotSelfContainedError,
    Source,
    is_text,
    names_defined,
    refuse_library,
    shown,
)

AVAILABLE = sys.stdlib_module_names | {"torch"}
"""Packages that the file may import."""
DROPPED_BASES = {"PyTorchModelHubMixin"}
OVERRIDES = frozenset(dir(nn.Module))
"""Methods that torch may call. Nothing in the file names them."""


def _is_module_of_torch(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base) == "nn.Module" for base in node.bases)


def _refuse_keywords(source: Source, node: Definition) -> None:
    """Raise ``NotSelfContainedError`` for keywords of a class, except for those that belong to a dropped base."""
    if not isinstance(node, ast.ClassDef):
        return
    has_dropped = any(ast.unparse(base) in DROPPED_BASES for base in node.bases)
    for keyword in node.keywords:
        if not has_dropped or keyword.arg in (None, "metaclass"):
            raise NotSelfContainedError(
                f"{source.name}, line {node.lineno}: {shown(node)!r} has keywords, which the file would lack"
            )


def _unannotated(node: ast.stmt) -> ast.expr | None:
    """Return ``T`` of ``X = Annotated[T, ...]``."""
    value = node.value if isinstance(node, ast.Assign) else None
    if isinstance(value, ast.Subscript) and ast.unparse(value.value) == "Annotated":
        assert isinstance(value.slice, ast.Tuple)
        return value.slice.elts[0]
    return None


class SingleFile:
    """The closure of some definitions over the modules of the library."""

    def __init__(self, roots: Sequence[tuple[str, str]]) -> None:
        """Find everything that ``roots``, pairs of a module and a name in it, use."""
        self.sources: dict[str, Source] = {}
        self.external: dict[str, Import] = {}
        self.attributes: set[str] = set()
        """Every attribute that the file reads."""
        before = -1
        # A name that occurs keeps the method of that name, whose body may name others.
        while before != self._size():
            before = self._size()
            for source in list(self.sources.values()):
                for name in sorted(source.wanted):
                    self._read(source, name)
            for module, name in roots:
                self._want(self._source(module), name)
        # One file has a single namespace, where each module had its own.
        self._refuse_collisions()

    def text(self) -> str:
        """Return the body of the file: imports, then the modules in the order of their imports."""
        parts = [self._imports()]
        for source in self._ordered():
            rule = f"# {source.name} ".ljust(120, "-")
            definitions = list(self._definitions(source))
            parts.append("\n\n\n".join([rule, *definitions]) if definitions else rule)
        return "\n\n\n".join(parts) + "\n"

    # ------------------------------------------------------------------------------------------------- what is needed
    def _size(self) -> int:
        wanted = 0
        for source in self.sources.values():
            wanted += len(source.wanted) + len(source.as_namespace)
        return wanted + len(self.external) + len(self.attributes)

    def _source(self, module: str) -> Source:
        if module not in self.sources:
            spec = find_spec(module)
            assert spec is not None
            assert spec.origin is not None
            self.sources[module] = Source(module, Path(spec.origin).read_text("utf-8"))
            self.sources[module].refuse_other_statements()
        return self.sources[module]

    def _want(self, source: Source, name: str) -> None:
        if name not in source.definitions:
            raise NotSelfContainedError(f"{source.name} has no definition of {name} at its top")
        source.wanted.add(name)

    def _read(self, source: Source, name: str) -> None:
        """Note all that one definition uses."""
        definition = source.definitions[name]
        _refuse_keywords(source, definition)
        for part in self._parts(definition):
            for node in ast.walk(part):
                if isinstance(node, ast.Attribute):
                    self.attributes.add(node.attr)
                    if isinstance(node.value, ast.Name):
                        self._read_attribute(source, node.value.id, node.attr)
                elif isinstance(node, ast.Name):
                    self._read_name(source, node.id)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                    self.attributes.add(node.value)  # as in getattr(model, "scale")
                elif isinstance(node, (ast.Import, ast.ImportFrom)):
                    refuse_library(source, node)

    def _parts(self, definition: Definition) -> Iterator[ast.AST]:
        """Yield the parts of a definition that the file keeps."""
        if isinstance(definition, ast.ClassDef):
            yield from definition.decorator_list
            yield from (base for base in definition.bases if ast.unparse(base) not in DROPPED_BASES)
            dropped = self._dropped(definition)
            yield from (member for member in definition.body if member not in dropped)
        else:
            yield _unannotated(definition) or definition

    def _dropped(self, definition: ast.ClassDef) -> list[ast.stmt]:
        """Return the members of a class that nothing in the file names, as far as is known by now."""
        dropped: list[ast.stmt] = []
        body = definition.body
        for member, following in zip(body, [*body[1:], None], strict=True):
            if isinstance(member, ast.FunctionDef):
                special = member.name.startswith("__") or member.name in OVERRIDES
                needed = special or member.name in self.attributes
            else:
                names = names_defined(member)
                needed = not names or not _is_module_of_torch(definition) or bool(self.attributes & {*names})
            if not needed:
                dropped.append(member)
                if not isinstance(member, ast.FunctionDef) and is_text(following):
                    assert following is not None
                    dropped.append(following)
        return dropped

    def _read_attribute(self, source: Source, name: str, attribute: str) -> None:
        imported = source.imports.get(name)
        if imported is not None and imported.submodule is not None and name not in source.definitions:
            target = self._source(imported.submodule)
            self._want(target, attribute)
            target.as_namespace.add(attribute)

    def _read_name(self, source: Source, name: str) -> None:
        if name in source.definitions:
            source.wanted.add(name)
            return
        if name in source.conditional:
            raise NotSelfContainedError(f"{source.name}: {name} depends on TYPE_CHECKING; define it in one place")
        imported = source.imports.get(name)
        if imported is None:  # a local name, or one of Python's own
            return
        top = imported.module.split(".")[0]
        if top == sources.PACKAGE:
            if imported.submodule is not None:
                # The file defines the namespace under the module's own name, so an alias would not be found.
                if imported.submodule.rpartition(".")[2] != name:
                    raise NotSelfContainedError(f"{source.name}: import {imported.submodule} under its own name")
                return
            if imported.attribute != name:
                raise NotSelfContainedError(f"{source.name}: import {imported.attribute} under its own name")
            self._want(self._source(imported.module), name)
        elif top not in AVAILABLE:
            raise NotSelfContainedError(
                f"{source.name}: uses {name} of {imported.module}, which the file cannot import"
            )
        elif self.external.setdefault(name, imported) != imported:
            raise NotSelfContainedError(f"{source.name}: {name} is imported from two places")

    def _refuse_collisions(self) -> None:
        owners: dict[str, str] = {}
        for name, imported in self.external.items():
            owners[name] = f"an import of {imported.module}"
        for source in self.sources.values():
            names = {*source.wanted}
            if source.as_namespace:
                names.add(source.name.rpartition(".")[2])
            for name in sorted(names):
                if name in owners:
                    raise NotSelfContainedError(f"{name} is in {owners[name]} and in {source.name}: rename one of them")
                owners[name] = source.name

    # ------------------------------------------------------------------------------------------------ how it is written
    def _ordered(self) -> list[Source]:
        """Return the sources, each after those that it imports."""
        ordered: list[Source] = []

        def visit(source: Source) -> None:
            if source in ordered:
                return
            for imported in source.imports.values():
                below = self.sources.get(imported.submodule or imported.module)
                if below is not None and below is not source:
                    visit(below)
            ordered.append(source)

        for name in sorted(self.sources):
            visit(self.sources[name])
        return [source for source in ordered if source.wanted]

    def _imports(self) -> str:
        plain: list[str] = []
        named: dict[str, list[str]] = {}
        for name, imported in self.external.items():
            if imported.attribute is not None:
                alias = imported.attribute if imported.attribute == name else f"{imported.attribute} as {name}"
                named.setdefault(imported.module, []).append(alias)
            else:
                plain.append(f"import {imported.module}" + (f" as {name}" if imported.module != name else ""))
        if any(source.as_namespace for source in self.sources.values()):
            named.setdefault("types", []).append("SimpleNamespace")
        lines = [*plain, *(f"from {module} import {', '.join(sorted(names))}" for module, names in named.items())]
        return "\n".join(sorted(lines, key=_import_order))

    def _definitions(self, source: Source) -> Iterator[str]:
        done: set[int] = set()
        body = source.tree.body
        for node, following in zip(body, [*body[1:], None], strict=True):
            names = names_defined(node)
            if not source.wanted & {*names} or id(node) in done:
                continue
            done.add(id(node))
            simple = _unannotated(node)
            if simple is not None:
                yield f"{names[0]} = {ast.unparse(simple)}"
                continue
            text = self._text_of(source, node)
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and is_text(following):
                assert following is not None
                docstring = source.lines[following.lineno - 1 : following.end_lineno]
                text += "\n" + "\n".join(docstring)
            yield text
        if source.as_namespace:
            members = ", ".join(f"{name}={name}" for name in sorted(source.as_namespace))
            yield f"{source.name.rpartition('.')[2]} = SimpleNamespace({members})"

    def _text_of(self, source: Source, node: ast.stmt) -> str:
        """Return the lines of a definition with the comments above it, without the dropped members of a class."""
        first = _first_line(source, node)
        lines: list[str | None] = [*source.lines[first - 1 : node.end_lineno]]
        if isinstance(node, ast.ClassDef):
            for member in self._dropped(node):
                for number in range(_first_line(source, member), (member.end_lineno or 0) + 1):
                    lines[number - first] = None
            kept = [base for base in node.bases if ast.unparse(base) not in DROPPED_BASES]
            if len(kept) < len(node.bases):
                bases = ", ".join(map(ast.unparse, kept))
                for number in range(node.lineno, _first_line(source, node.body[0])):
                    lines[number - first] = None
                lines[node.lineno - first] = f"class {node.name}({bases}):"
        return "\n".join(_without_double_blanks([line for line in lines if line is not None]))


def _first_line(source: Source, node: ast.stmt) -> int:
    """Return the first line of a definition: its decorators, and the comments right above it."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    while first > 1:
        above = source.lines[first - 2].strip()
        # A rule between sections belongs to no definition.
        if not above.startswith("#") or above.startswith("# ---"):
            break
        first -= 1
    return first


def _without_double_blanks(lines: list[str]) -> list[str]:
    """Remove the blank lines that dropped members leave: repeated ones, and those at the end."""
    kept: list[str] = []
    for line in lines:
        if line.strip() or (kept and kept[-1].strip()):
            kept.append(line)
    while kept and not kept[-1].strip():
        kept.pop()
    return kept


def _import_order(line: str) -> tuple[bool, bool, str]:
    module = line.split()[1]
    return module.split(".")[0] == "torch", line.startswith("from"), line


def single_file(*roots: Any) -> str:
    """Return the source of one file with the classes and functions ``roots`` and all that they use.

    Raises ``NotSelfContainedError`` if they need more than the standard library and torch, or if two different things
    have one name.
    """
    return SingleFile([(root.__module__, root.__qualname__) for root in roots]).text()

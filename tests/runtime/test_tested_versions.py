"""The table of private names is complete, each name exists, and a package newer than tested is named."""

from __future__ import annotations

import ast
import importlib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from accel_train.runtime import tested_versions
from accel_train.runtime.tested_versions import TESTED

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "accel_train").rglob("*.py"), *(ROOT / "recipes").glob("*.py")])
COMMENT_LINES = 2
DOCUMENTED = {"_current_frames", "_exit", "_asdict", "_make", "_replace", "_no_split_modules"}
"""Of sys and os, and of named tuples; what transformers asks of a model."""


@cache
def nodes() -> list[ast.AST]:
    return [node for path in FILES for node in ast.walk(ast.parse(path.read_text()))]


def is_called(node: ast.Call, *names: str) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id in names


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names() -> set[str]:
    """Private names that the library gives to things of its own."""
    found: set[str] = set()
    for node in nodes():
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def foreign_names() -> set[str]:
    """Private attributes and imports in the library that are not its own, by their last part."""
    found: set[str] = set()
    for node in nodes():
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found.update(alias.name for alias in node.names)
            if any(map(is_private, str(node.module).split("."))):
                found.update(f"_{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and is_called(node, "getattr", "hasattr", "setattr"):
            found.update(str(word.value) for word in node.args[1:2] if isinstance(word, ast.Constant))
    return {name for name in found if is_private(name)} - own_names() - DOCUMENTED


def test_every_private_name_is_in_the_table() -> None:
    known: set[str] = set()
    for tested in TESTED.values():
        for name in tested.private:
            last = name.split(".")[-1]
            known |= {last, f"_{last}"}
    assert foreign_names() - known == set()


def test_no_name_in_the_table_is_unused() -> None:
    text = "\n".join(path.read_text() for path in FILES if path.name != "tested_versions.py")
    assert not [name for tested in TESTED.values() for name in tested.private if name.split(".")[-1] not in text]


@pytest.mark.parametrize("name", [n for tested in TESTED.values() for n in tested.private if "." in n])
def test_a_dotted_name_exists(name: str) -> None:
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return
    pytest.fail(f"no module of {name}")


def test_the_table_agrees_with_the_constraints_of_ci() -> None:
    """A release is raised in both: ``.ci/run`` passes with the one, users are told of the other."""
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    constraints = {r.name.replace("_", "-"): r.specifier for r in map(Requirement, lines[COMMENT_LINES:])}
    for name, tested in TESTED.items():
        newest = Version(tested.newest)
        following = f"{newest.major}.{newest.minor + 1}"
        assert not constraints[name].contains(following), f"{name}: raise TESTED or lower .ci/constraints.txt"
        pinned = [clause.version for clause in constraints[name] if clause.operator == "=="]
        assert all(Version(one).release[:2] == newest.release[:2] for one in pinned), name


def test_a_newer_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = {name: tested.newest for name, tested in TESTED.items()}
    monkeypatch.setattr(tested_versions, "version", newest.__getitem__)
    assert tested_versions.notice() is None
    monkeypatch.setitem(newest, "torch", "99.1.0")
    assert tested_versions.newer_than_tested() == [f"torch 99.1.0 (tested up to {TESTED['torch'].newest})"]
    assert "torch 99.1.0" in str(tested_versions.notice())


def test_a_patch_release_is_taken_to_be_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested_versions, "version", lambda name: f"{TESTED[name].newest}.99+cu130")
    assert tested_versions.notice() is None

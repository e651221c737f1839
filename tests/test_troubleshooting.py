"""docs/troubleshooting.md quotes messages that the code prints, and names options and commands that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from accel_train.cli.arguments import build_parser
from accel_train.options.tree import option_names
from recipes import causal_lm, lora, mmdit, pde

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
VALUE = "\0"
"""Stands for what a message fills in."""


@cache
def messages() -> tuple[str, ...]:
    """Every text of the library, with VALUE for what an f-string or a format fills in."""
    found: list[str] = []
    for path in (ROOT / "accel_train").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            found.extend(_text(node))
    return tuple(found)


def _text(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield re.sub(r"%(\.\d)?[sdf]", VALUE, node.value)


def is_printed(quote: str) -> bool:
    """True if one message holds the parts of ``quote`` between its ``...``, in order."""
    parts = [part.strip() for part in quote.split("...")]
    pattern = re.compile(".*".join(re.escape(part) for part in parts if part), re.DOTALL)
    return any(pattern.search(text) for text in messages())


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[0] != "What you see"]


def quotes() -> list[str]:
    """The quoted messages: code of the first column with a space in it, and of the others with a colon as well."""
    found: list[str] = []
    for row in rows():
        found += [code for code in re.findall(r"`([^`]+)`", row[0]) if " " in code]
        found += [code for code in re.findall(r"`([^`]+)`", " ".join(row[1:])) if re.match(r"[\w-]+: ", code)]
    return found


def test_the_page_has_its_rows() -> None:
    assert 30 <= len(rows()) <= 55  # with what only several hosts show
    assert len(quotes()) >= 30
    for row in rows():
        assert len(row) == 3, row


@pytest.mark.parametrize("quote", quotes())
def test_every_quoted_message_is_printed(quote: str) -> None:
    assert is_printed(quote), quote


def test_a_message_that_nothing_prints_is_found() -> None:
    assert not is_printed("the disk of ... is full of cheese")
    assert not is_printed("contains a different ... experiment output_dir")  # in another order


def test_every_option_exists() -> None:
    known = {name for module in (mmdit, pde, causal_lm, lora) for name in option_names(module.Config)}
    known |= {"help"}
    text = PAGE.read_text()
    fences = "".join(re.findall(r"```\n(.*?)```", text, re.DOTALL))
    used = set(re.findall(r"--([a-z][\w.]*)", text.replace(fences, "")))  # tests/test_docs.py tries the fences
    # Options of `accel-train`, which follow a command in the same code.
    of_commands = set(re.findall(r"`accel-train [^`]*--([a-z][\w.]*)", text))
    assert len(used) > 20
    assert not used - known - of_commands, used - known - of_commands


def test_every_command_exists() -> None:
    commands = set(re.findall(r"`accel-train ([^`]+)`", PAGE.read_text()))
    assert len(commands) > 8
    for command in commands:
        words = command.split()
        with pytest.raises(SystemExit) as ended:
            build_parser().parse_args([*words, "--help"])
        assert ended.value.code == 0, command

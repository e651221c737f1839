"""Change values in a user's YAML file and nothing else: comments, order and spaces stay."""

from __future__ import annotations

import difflib
import itertools
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from accel_train.config import UsageError
from accel_train.options.strict_yaml import YamlError, compose, parse_yaml
from accel_train.options.tree import flatten, tree_text
from accel_train.store.atomic_files import replace_file

BYTE_ORDER_MARK = "\ufeff"


class _NoPlaceError(ValueError):
    """The value cannot be changed by editing its line."""


def with_values(path: Path, text: str, changes: Mapping[str, object]) -> str:
    """Return the text of a YAML file with the values of dotted options changed.

    The result is parsed again and compared. Raises ``UsageError`` if an option cannot be changed by editing its line.
    """
    for option, value in changes.items():
        try:
            # Parsed again after each edit: an edit that changes anything else is refused, and the user has to make it.
            edited = _with_value(text, option.split("."), value)
            expected = flatten(parse_yaml(path, text).values) | {option: value}
            if flatten(parse_yaml(path, edited).values) != expected:
                raise _NoPlaceError
        except (_NoPlaceError, YamlError) as error:
            raise UsageError(
                f"{path}: {option} cannot be changed by editing one line, because of how the file is written; "
                f"write {option}: {_written(value)} by hand"
            ) from error
        text = edited
    return text


def _with_value(text: str, parts: Sequence[str], value: object) -> str:
    node: yaml.Node = compose(text)
    for depth, part in enumerate(parts):
        if not isinstance(node, yaml.MappingNode):
            raise _NoPlaceError
        child = _child(node, part)
        if child is None:
            return _with_entry(text, node, _entry(parts[depth:], value))
        node = child
    # A block list or mapping has no end of its own: it ends where the next key begins.
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        raise _NoPlaceError
    start = node.start_mark.index
    end = node.end_mark.index
    written = _written(value)
    # An empty value begins directly after its colon.
    if text[start - 1] == ":":
        written = f" {written}"
    return text[:start] + written + text[end:]


def _child(node: yaml.MappingNode, key: str) -> yaml.Node | None:
    for key_node, value_node in node.value:
        if key_node.value == key:
            return value_node
    return None


def _entry(parts: Sequence[str], value: object) -> str:
    """Write ``a: {b: value}`` for an option whose group the file does not have yet."""
    # In braces, so that missing groups take one line, whatever the indentation around it.
    entry = f"{parts[-1]}: {_written(value)}"
    for group in reversed(parts[:-1]):
        entry = f"{group}: {{{entry}}}"
    return entry


def _written(value: object) -> str:
    if isinstance(value, (list, tuple)):
        # In brackets, because a block list would take several lines.
        return f"[{', '.join(_written(item) for item in value)}]"
    # Through a mapping, because the config writer, which quotes values, writes whole mappings only.
    return tree_text({"k": value}).removeprefix("k:").strip()


def _with_entry(text: str, node: yaml.MappingNode, entry: str) -> str:
    """Add an entry to a mapping: first if it is in braces, else on its own line after the last entry."""
    if node.flow_style:
        start = node.start_mark.index + 1
        separator = ", " if node.value else ""
        return text[:start] + entry + separator + text[start:]
    # A file from Windows keeps its line ends.
    newline = "\r\n" if "\r\n" in text else "\n"
    first_key, _ = node.value[0]
    indent = " " * first_key.start_mark.column
    # The end of the line, so that a comment after the last value stays with it.
    end = text.find(newline, _end_of(node))
    if end == -1:
        end = len(text)
    return text[:end] + newline + indent + entry + text[end:]


def _end_of(node: yaml.Node) -> int:
    """Return the end offset of the last value of a node. The end mark of a block is after the comments below it."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style:
        # A block collection is never empty: YAML writes an empty one in flow style.
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return node.end_mark.index


def unused_copy(path: Path) -> Path:
    """Return an unused path for the original file: ``FILE.orig``, or ``FILE.orig.1`` and so on after earlier fixes."""
    # Resolved, so that a link stays a link.
    first = path.resolve().with_name(f"{path.resolve().name}.orig")
    later = (first.with_name(f"{first.name}.{number}") for number in itertools.count(1))
    return next(place for place in itertools.chain([first], later) if not place.exists())


def fix_file(path: Path, changes: Mapping[str, object], copy: Path) -> str:
    """Change values in a file, keep the original as ``copy``, and return the diff.

    Each file is written atomically. If ``copy`` exists already, the changes are made to its content. Raises the errors
    of ``with_values``, before anything is written.
    """
    path = path.resolve()
    has_copy = copy.exists()
    # Bytes, because reading as text would change the ends of lines.
    before = copy.read_bytes() if has_copy else path.read_bytes()
    text = before.decode("utf-8")
    # The YAML reader drops the byte order mark of Windows editors, so the edit does too, and it is put back.
    mark = BYTE_ORDER_MARK if text.startswith(BYTE_ORDER_MARK) else ""
    after = mark + with_values(path, text.removeprefix(mark), changes)
    # The copy first: a crash between the two writes leaves the original content twice and never loses it.
    if not has_copy:
        replace_file(copy, before)
        # A replaced file is a new one, with default permissions.
        shutil.copymode(path, copy)
    replace_file(path, after.encode())
    shutil.copymode(copy, path)
    lines = difflib.unified_diff(text.splitlines(), after.splitlines(), str(copy), str(path), lineterm="")
    return "\n".join(lines)


def undo(path: Path, copy: Path) -> None:
    """Put the copy of ``fix_file`` back, if there is one."""
    if copy.exists():
        copy.replace(path.resolve())

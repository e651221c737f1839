"""Strict reader of YAML and JSON settings. Ambiguous input is an error with its position.

Scalars follow YAML 1.2, unlike PyYAML's 1.1: `1e-4` is a float, and `no`, `on`, `12:30`, `1_000`, `0o17` and
`2024-01-01` stay text. `017` is refused, because parsers read it as 15 or 17. Also refused: duplicate keys, non-text
keys, aliases, tags of programming languages, several documents, tabs, other encodings, and very large files. Nothing
in a file can run code.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

MAX_BYTES = 256 * 1024
"""A settings file has a few KiB. A larger one is a data file given by mistake."""

_TAG = "tag:yaml.org,2002:"
# The core schema of YAML 1.2, except for octal numbers.
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")


_Places = dict[tuple[str, ...], tuple[int, int]]
Places = Mapping[tuple[str, ...], tuple[int, int]]
"""Line and column (from 1) of each key, by its path from the top."""


class YamlError(ValueError):
    """The file cannot be read as settings. The text is `file:line:column: problem; remedy`."""


@dataclass(frozen=True)
class Document:
    """Values of a file, and the position of each key."""

    values: dict[str, object]
    places: Places
    """Empty for JSON."""


def place_of(file: str | Path, places: Places, path: Sequence[str]) -> str:
    """Return `file:line:column` of a key or its nearest known parent, by default the file alone."""
    for end in range(len(path), 0, -1):
        place = places.get(tuple(path[:end]))
        if place is not None:
            line, column = place
            return f"{file}:{line}:{column}"
    return str(file)


def read_yaml(path: Path) -> dict[str, object]:
    """Return the mapping in a YAML file, or in JSON if its name ends in .json. Raises `YamlError`."""
    return read_document(path).values


def read_document(path: Path) -> Document:
    """Return the mapping with the position of every key, for errors to point at."""
    text = _read_text(path)
    if not text.strip():
        raise YamlError(f"{path}: the file is empty; write `key: value` lines, or give another file")
    if path.suffix.lower() == ".json":
        return Document(_parse_json(path, text), {})
    return parse_yaml(path, text)


def compose(text: str) -> yaml.MappingNode:
    """Return the nodes of a text that ``parse_yaml`` accepts, whose marks say where each value begins and ends."""
    root = yaml.compose(text, Loader=_Loader)
    assert isinstance(root, yaml.MappingNode)
    return root


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            # No more than the limit, whatever the size of the file.
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise YamlError(f"{path}: cannot be read: {reason}; give the path of a YAML or JSON file") from error
    if len(data) > MAX_BYTES:
        raise YamlError(
            f"{path}: larger than {MAX_BYTES // 1024} KiB, the limit for a settings file; "
            "give the settings file, not a data file"
        )
    try:
        # Editors on Windows begin a file with a byte order mark.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line = before.count(b"\n") + 1
        column = error.start - (before.rfind(b"\n") + 1) + 1
        raise YamlError(
            f"{path}:{line}:{column}: byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from error


class _Loader(yaml.BaseLoader):
    """PyYAML's composer with the scalars of YAML 1.2. Never constructs an object itself."""

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        event = self.peek_event()
        # An alias can name the node that it is in, or repeat one until no memory is left.
        if isinstance(event, yaml.AliasEvent):
            problem = f"alias `*{event.anchor}` is not supported; write the value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)  # type: ignore[arg-type]


for _name, _pattern in {
    "null": r"~|null|Null|NULL|",
    "bool": "|".join(_BOOLS),
    "int": _INT.pattern,
    "float": _FLOAT.pattern,
}.items():
    # BaseLoader takes every word for text. \Z, because PyYAML matches the beginning of a word only.
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), None)


def parse_yaml(path: Path, text: str) -> Document:
    """Return the mapping in a text, with the position of every key. ``path`` is for errors."""
    try:
        root = yaml.compose(text, Loader=_Loader)  # not load: values alone have lost their positions
        places: _Places = {}
        return Document(_top_mapping(path, root, places), places)
    except yaml.reader.ReaderError as error:
        line, column = _position(text, error.position)
        character = ord(text[error.position])
        raise YamlError(
            f"{path}:{line}:{column}: character U+{character:04X} is not allowed in YAML; delete it"
        ) from error
    except yaml.MarkedYAMLError as error:
        raise YamlError(_syntax(path, error)) from error
    except RecursionError as error:
        raise YamlError(f"{path}: nested too deeply; settings are two or three levels deep") from error
    except YamlError:  # also a ValueError, but with a complete text
        raise
    except (OverflowError, ValueError) as error:
        # PyYAML raises these on escapes such as "\\UFFFFFFFF".
        raise YamlError(f"{path}: an escape in quotes names no character; correct it") from error


def _top_mapping(path: Path, root: yaml.Node | None, places: _Places) -> dict[str, object]:
    if root is None or root.tag == _TAG + "null":
        raise YamlError(f"{path}: the file is empty (comments only); write `key: value` lines, or give another file")
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise YamlError(f"{path}: the top is {kind}, not a mapping; write `key: value` lines")
    return _mapping(root, (), places)


def _syntax(path: Path, error: yaml.MarkedYAMLError) -> str:
    """Return the message for an error of PyYAML, with its position and a remedy."""
    where = str(path)
    mark = error.problem_mark or error.context_mark
    if mark:
        where = f"{path}:{mark.line + 1}:{mark.column + 1}"
    problem = error.problem or error.context or "not YAML"
    # PyYAML's own messages are recognised by fragments. Any other message is quoted below.
    if "\\t" in problem:
        return f"{where}: a tab, which YAML does not allow here; indent with spaces"
    if problem.startswith("but found another document"):
        return f"{where}: a second document begins (`---`); keep one document in the file"
    if ";" in problem:
        # Raised by `_refuse` or the loader above, with a remedy.
        return f"{where}: {problem}"
    context = ""
    if error.context and error.problem:
        context = f" {error.context}"
    return f"{where}: not valid YAML: {problem}{context}; correct the line (or the one before it)"


def _refuse(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _refuse_tag(node: yaml.Node) -> yaml.MarkedYAMLError:
    tag = node.tag.replace(_TAG, "!!")
    return _refuse(node, f"unsupported tag `{tag}`; remove it, settings are plain values")


def _mapping(node: yaml.MappingNode, path: tuple[str, ...], places: _Places) -> dict[str, object]:
    if node.tag != _TAG + "map":
        raise _refuse_tag(node)
    result: dict[str, object] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise _refuse(key_node, "key a list or mapping is not text; write a name, or quote it")
        key = str(key_node.value)
        # A bare number or null is a key too, but not text.
        if key_node.tag != _TAG + "str":
            raise _refuse(key_node, f"key {key!r} is not text; write a name, or quote it")
        here = (*path, key)
        if here in places:
            name = ".".join(here)
            raise _refuse(key_node, f"key `{name}` is given twice, first at line {places[here][0]}; keep one")
        mark = key_node.start_mark
        places[here] = (mark.line + 1, mark.column + 1)
        result[key] = _value(value_node, here, places)
    return result


def _value(node: yaml.Node, path: tuple[str, ...], places: _Places) -> object:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, places)
    if isinstance(node, yaml.SequenceNode):
        if node.tag != _TAG + "seq":
            raise _refuse_tag(node)
        values: list[object] = []
        for index, item in enumerate(node.value):
            at = (*path, str(index))
            values.append(_value(item, at, places))
        return values
    return _scalar(node)


def _scalar(node: yaml.Node) -> object:
    text = str(node.value)
    kind = node.tag.removeprefix(_TAG)
    if not node.tag.startswith(_TAG) or kind not in _SCALARS:
        raise _refuse_tag(node)
    # PyYAML decodes a lone surrogate escape to text that cannot be written.
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _refuse(node, "half of a character (a lone surrogate escape); write the character itself")
    if kind == "int" and _LEADING_ZERO.fullmatch(text):
        raise _refuse(node, f"number `{text}` begins with 0, which may mean octal; drop the 0, or quote it")
    try:
        value = _SCALARS[kind](text)
    except (ValueError, KeyError) as error:
        raise _refuse(node, f"`{text[:40]}` is not of type {kind}; correct it, or quote it") from error
    if isinstance(value, float) and math.isinf(value) and "inf" not in text.lower():
        raise _refuse(node, f"number `{text}` is too large for a float; write a smaller one, or `.inf`")
    return value


def _integer(text: str) -> int:
    if not _INT.fullmatch(text):
        raise ValueError(text)
    return int(text, 0)


def _float(text: str) -> float:
    if not (_FLOAT.fullmatch(text) or _INT.fullmatch(text)):
        raise ValueError(text)
    if text.lower().endswith(("inf", "nan")):
        # Python reads inf and nan without YAML's dot.
        text = text.replace(".", "", 1)
    return float(text)


def read_number(text: str) -> int | float | None:
    """Return the number a bare word stands for in a file, or None. Gives flags the same meaning as files."""
    if _INT.fullmatch(text) and not _LEADING_ZERO.fullmatch(text):
        return _integer(text)
    if _FLOAT.fullmatch(text):
        return _float(text)
    return None


def _none(text: str) -> None:
    if text not in ("", "~", "null", "Null", "NULL"):
        raise ValueError(text)


_SCALARS: dict[str, Callable[[str], object]] = {
    "str": str,
    "int": _integer,
    "float": _float,
    "bool": _BOOLS.__getitem__,
    "null": _none,
}


def _parse_json(path: Path, text: str) -> dict[str, object]:
    def unique_keys(items: list[tuple[str, object]]) -> dict[str, object]:
        result: dict[str, object] = {}
        for key, value in items:
            if key in result:
                raise YamlError(f"{path}: key `{key}` is given twice in one mapping; keep one")
            result[key] = value
        return result

    def finite_float(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise YamlError(f"{path}: number `{digits}` is not a finite float; write another")
        return value

    try:
        values = json.loads(
            text,
            object_pairs_hook=unique_keys,  # by default the last of two equal keys wins silently
            parse_constant=finite_float,  # NaN, Infinity
            parse_float=finite_float,
        )
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise YamlError(f"{where}: not valid JSON: {error.msg}; correct it") from error
    except YamlError:  # raised by the two functions above
        raise
    except (RecursionError, ValueError) as error:
        raise YamlError(f"{path}: not valid JSON: {error}; correct the file") from error
    if not isinstance(values, dict):
        raise YamlError(f'{path}: the top is not a mapping; write `{{"key": value}}`')
    return values


def _position(text: str, offset: int) -> tuple[int, int]:
    """Return the line and column of a character, both from 1."""
    line = text.count("\n", 0, offset) + 1
    column = offset - text.rfind("\n", 0, offset)
    return line, column

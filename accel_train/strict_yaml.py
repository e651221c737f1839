"""Read a YAML or JSON file of settings without surprises: what is ambiguous is an error with its position.

Scalars follow YAML 1.2 where PyYAML follows 1.1: `1e-4` is a float; `no`, `on`, `12:30`, `1_000`, `0o17` and
`2024-01-01` stay text; `017` is refused, because it is 15 to one parser and 17 to another. Refused as well:
duplicate keys, keys that are not text, aliases, tags of programming languages, several documents, tabs, other
encodings, files of absurd size. Nothing in a file can run code.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

MAX_BYTES = 256 * 1024
"""A settings file is a few KiB; a larger one is a data file given by mistake."""

_TAG = "tag:yaml.org,2002:"
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_TAG_REFUSED = "unsupported tag `{}`; remove it, settings are plain values"
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")


_Places = dict[tuple[str, ...], tuple[int, int]]
Places = Mapping[tuple[str, ...], tuple[int, int]]
"""Line and column (from 1) of each key, by its path from the top."""


class YamlError(ValueError):
    """The file cannot be read as settings; the text is `file:line:column: what is wrong; what to do`."""


@dataclass(frozen=True)
class Document:
    """The values of a file, and where each key stands."""

    values: dict[str, object]
    places: Places
    """Empty for JSON."""

    @property
    def lines(self) -> dict[tuple[str, ...], int]:
        """The line of each key."""
        return {path: line for path, (line, _) in self.places.items()}


def read_yaml(path: Path) -> dict[str, object]:
    """The mapping in a YAML file (JSON where the name ends in .json); `YamlError` where it is not one."""
    return read_document(path).values


def read_document(path: Path) -> Document:
    """`read_yaml`, with the place of every key, for errors that point at it."""
    text = _read_text(path)
    if not text.strip():
        raise YamlError(f"{path}: the file is empty; write `key: value` lines, or give another file")
    if path.suffix.lower() == ".json":
        return Document(_parse_json(path, text), {})
    return _parse_yaml(path, text)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
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
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1
        raise YamlError(
            f"{path}:{line}:{column}: byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from error


class _Loader(yaml.BaseLoader):
    """PyYAML's composer with the scalars of YAML 1.2; it never constructs an object itself."""

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        event = self.peek_event()
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
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), None)


def _parse_yaml(path: Path, text: str) -> Document:
    try:
        root = yaml.compose(text, Loader=_Loader)
        if root is None or root.tag == _TAG + "null":
            raise YamlError(
                f"{path}: the file is empty (comments only); write `key: value` lines, or give another file"
            )
        if not isinstance(root, yaml.MappingNode):
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            raise YamlError(f"{path}: the top is {kind}, not a mapping; write `key: value` lines")
        places: _Places = {}
        return Document(_mapping(root, (), places), places)
    except yaml.reader.ReaderError as error:
        line, column = _position(text, error.position)
        raise YamlError(
            f"{path}:{line}:{column}: character U+{ord(text[error.position]):04X} is not allowed in YAML; delete it"
        ) from error
    except yaml.MarkedYAMLError as error:
        raise YamlError(_syntax(path, error)) from error
    except RecursionError as error:
        raise YamlError(f"{path}: nested too deeply; settings are two or three levels deep") from error
    except YamlError:
        raise
    except (OverflowError, ValueError) as error:  # PyYAML on "\\UFFFFFFFF"
        raise YamlError(f"{path}: an escape in quotes names no character; correct it") from error


def _syntax(path: Path, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else f"{path}"
    problem = error.problem or error.context or "not YAML"
    if "\\t" in problem:
        return f"{where}: a tab, which YAML does not allow here; indent with spaces"
    if problem.startswith("but found another document"):
        return f"{where}: a second document begins (`---`); keep one document in the file"
    if ";" in problem:  # our own text, which says what to do
        return f"{where}: {problem}"
    context = f" {error.context}" if error.context and error.problem else ""
    return f"{where}: not valid YAML: {problem}{context}; correct the line (or the one before it)"


def _refuse(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _mapping(node: yaml.MappingNode, path: tuple[str, ...], places: _Places) -> dict[str, object]:
    if node.tag != _TAG + "map":
        raise _refuse(node, _TAG_REFUSED.format(node.tag.replace(_TAG, "!!")))
    result: dict[str, object] = {}
    for key_node, value_node in node.value:
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str) or key_node.tag != _TAG + "str":
            shown = repr(key) if isinstance(key, str) else "a list or mapping"
            raise _refuse(key_node, f"key {shown} is not text; write a name, or quote it")
        here = (*path, key)
        if here in places:
            name = ".".join(here)
            raise _refuse(key_node, f"key `{name}` is given twice, first at line {places[here][0]}; keep one")
        places[here] = key_node.start_mark.line + 1, key_node.start_mark.column + 1
        result[key] = _value(value_node, here, places)
    return result


def _value(node: yaml.Node, path: tuple[str, ...], places: _Places) -> object:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, places)
    if isinstance(node, yaml.SequenceNode):
        if node.tag != _TAG + "seq":
            raise _refuse(node, _TAG_REFUSED.format(node.tag.replace(_TAG, "!!")))
        return [_value(item, (*path, str(index)), places) for index, item in enumerate(node.value)]
    return _scalar(node)


def _scalar(node: yaml.Node) -> object:
    text = str(node.value)
    kind = node.tag.removeprefix(_TAG)
    read = _SCALARS.get(kind) if node.tag.startswith(_TAG) else None
    if read is None:
        raise _refuse(node, _TAG_REFUSED.format(node.tag.replace(_TAG, "!!")))
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _refuse(node, "half of a character (a lone surrogate escape); write the character itself")
    if kind == "int" and _LEADING_ZERO.fullmatch(text):
        raise _refuse(node, f"number `{text}` begins with 0, which may mean octal; drop the 0, or quote it")
    try:
        value = read(text)
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
    return float(text.replace(".", "", 1) if text.lower().endswith(("inf", "nan")) else text)


def read_number(text: str) -> int | float | None:
    """The number that a bare word of a file is, so that a flag means what the file means; None for other words."""
    if _INT.fullmatch(text) and not _LEADING_ZERO.fullmatch(text):
        return _integer(text)
    return _float(text) if _FLOAT.fullmatch(text) else None


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
    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        result: dict[str, object] = {}
        for key, value in items:
            if key in result:
                raise YamlError(f"{path}: key `{key}` is given twice in one mapping; keep one")
            result[key] = value
        return result

    def number(digits: str) -> float:
        if math.isfinite(value := float(digits)):
            return value
        raise YamlError(f"{path}: number `{digits}` is not a finite float; write another")

    try:
        values = json.loads(text, object_pairs_hook=pairs, parse_constant=number, parse_float=number)
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise YamlError(f"{where}: not valid JSON: {error.msg}; correct it") from error
    except YamlError:
        raise
    except (RecursionError, ValueError) as error:
        raise YamlError(f"{path}: not valid JSON: {error}; correct the file") from error
    if not isinstance(values, dict):
        raise YamlError(f'{path}: the top is not a mapping; write `{{"key": value}}`')
    return values


def _position(text: str, offset: int) -> tuple[int, int]:
    """Line and column, both from 1, of a character."""
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)

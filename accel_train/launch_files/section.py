"""One mapping of a launch file: its known keys, and typed reading with the position in every error.

The known keys come from Accelerate itself (`ClusterConfig` and the parser of `accelerate launch`), so they follow its
version.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from accel_train.config import UsageError
from accel_train.options.strict_yaml import Document, Places, place_of
from accel_train.wording import did_you_mean, nearest

_GROUPS = {
    "fsdp_config": "FSDP Arguments",
    "deepspeed_config": "DeepSpeed Arguments",
    "parallelism_config": "ParallelismConfig Arguments",
    "megatron_lm_config": "Megatron-LM Arguments",
    "fp8_config": "FP8 Arguments",
    "mpirun_config": "MPI Arguments",
    "dynamo_config": "Resource Selection Arguments",
}
"""Sections of the file, each with the group of launcher flags for its keys."""
_PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
"""Prefixes added by the launcher to keys without them, in these three sections only."""
_NO_FLAG = {
    # Accelerate reads it with getattr, without a flag.
    "fsdp_config": {"fsdp_ignored_modules": str},
    # `accelerate config` writes them, and the launcher ignores them.
    "fp8_config": {
        "fp8_amax_history_length": int,
        "fp8_amax_compute_algorithm": str,
        "fp8_optimization_level": str,
    },
}
_DROPPED = {"ipex_config"}
"""Sections that `accelerate config` wrote once. The installed Accelerate refuses a file that has one."""
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


class KnownKey(NamedTuple):
    """A key known to Accelerate."""

    kind: object
    """Type of its flag. None for a key without a type check."""
    null_allowed: bool


@dataclass(frozen=True)
class Section:
    """Values of one mapping and their positions. Readers return the default for an absent key."""

    file: Path
    name: str
    """'' for the top of the file."""
    values: dict[str, object]
    places: Places
    """Positions in the whole file. Keys without their prefix are listed under their full names."""
    flags: frozenset[str] = frozenset()
    """Keys whose values are those of flags of the command line."""

    def label(self, key: str) -> str:
        """Return the key with the names of the sections around it."""
        return f"{self.name}.{key}" if self.name else key

    def where(self, key: str) -> str:
        """Return `file:line:column` of the key, or of its section."""
        path = [key]
        if self.name:
            path = [*self.name.split("."), key]
        return place_of(self.file, self.places, path)

    def refuse(self, key: str, required: str, remedy: str) -> UsageError:
        """Return the error for a key: its position or its flag, its value, the required value, the remedy."""
        if key in self.flags:
            return UsageError(f"--{key} {shown(self.values[key])}: must be {required}; {remedy}")
        where = self.where(key)
        label = self.label(key)
        if key not in self.values:
            return UsageError(f"{where}: `{label}` is missing; it must be {required}; {remedy}")
        return UsageError(f"{where}: `{label}: {shown(self.values[key])}`: must be {required}; {remedy}")

    def text(self, key: str, default: str | None = None) -> str | None:
        """Read text. Null and an absent key give the default."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or not value.strip():
            raise self.refuse(key, "text", "write it in quotes, or delete the line")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """Read true or false, or one of YAML 1.1's other words for them, which Accelerate takes too."""
        value = self.values.get(key)
        if isinstance(value, bool):
            return value
        if value is None:
            return default
        if isinstance(value, str) and value.lower() in _TRUE:
            return True
        if isinstance(value, str) and value.lower() in _FALSE:
            return False
        raise self.refuse(key, "true or false", f"write `{key}: true` or `{key}: false`")

    def integer(self, key: str, default: int, low: int, high: int | None = None) -> int:
        """Read a whole number from `low` to `high`."""
        value = self.values.get(key, default)
        required = f"a whole number, {low} or more"
        if high is not None:
            required = f"a whole number, {low} to {high}"
        # A bool is an int in Python, and would pass for 0 or 1.
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(key, required, "write digits only, without quotes")
        if value < low or (high is not None and value > high):
            raise self.refuse(key, required, "correct it, or delete the line")
        return value

    def choice(self, key: str, options: Iterable[str], default: str | None) -> str | None:
        """Read one of `options` in any case, and return the spelling of `options`."""
        value = self.values.get(key)
        if value is None:
            return default
        if value is False:
            # YAML 1.1 reads `no` as false, and a file converted to JSON keeps it so.
            value = "no"
        known = {option.lower(): option for option in options}
        if not isinstance(value, str) or value.lower() not in known:
            meant = nearest(str(value), known.values())
            remedy = did_you_mean(meant, bare=True) or "write one of them"
            raise self.refuse(key, f"one of {', '.join(known.values())}", remedy)
        return known[value.lower()]


def shown(value: object) -> str:
    """Format a value as in the file, shortened. Text that looks like a number, or is blank, keeps its quotes."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{...}"
    if isinstance(value, str) and re.fullmatch(r"\s*|\s*[-+.\d][-+.,\deE]*\s*", value):
        return repr(value)[:60]
    return str(value)[:60]


@functools.cache
def known_keys() -> Mapping[str, Mapping[str, KnownKey]]:
    """Return the known keys of each section. The empty name is the top of the file."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    top: dict[str, KnownKey] = {}
    for field in fields(ClusterConfig):
        # Some fields are None by default against their annotation, such as `tpu_vm: list[str] = None`.
        optional = field.default is None or "Optional" in str(field.type)
        top[field.name] = KnownKey(None, optional)
    # Annotated as text, but the launcher takes null for `no`.
    top["mixed_precision"] = KnownKey(None, True)
    result = {"": top}
    # argparse has no public list of the options in a group.
    groups = {group.title: group for group in launch_command_parser()._action_groups}
    for section, title in _GROUPS.items():
        keys: dict[str, KnownKey] = {}
        for action in groups[title]._group_actions:
            # The group of dynamo_config holds flags of other kinds as well.
            if section != "dynamo_config" or action.dest.startswith("dynamo_"):
                keys[action.dest] = KnownKey(action.type or str, action.default is None)
        for key, kind in _NO_FLAG.get(section, {}).items():
            keys[key] = KnownKey(kind, True)
        result[section] = keys
    return result


def read_sections(path: Path, document: Document) -> tuple[Section, dict[str, Section]]:
    """Read the top and all sections, empty if absent. Refuses unknown keys, and null where it is not allowed."""
    values = dict(document.values)
    top = Section(path, "", values, document.places)
    if "fp16" in values:
        raise top.refuse("fp16", "absent: it belongs to an old version", "write `mixed_precision: fp16`, or nothing")
    sections = {name: _section(path, document, name) for name in _GROUPS}
    if "dynamo_backend" in values:
        # Files of 2022 have it at the top. Accelerate moves it as well.
        sections["dynamo_config"].values["dynamo_backend"] = values.pop("dynamo_backend")
    for section in (top, *sections.values()):
        _check_keys(section)
    return top, sections


def _section(path: Path, document: Document, name: str) -> Section:
    raw = document.values.get(name)
    if raw is not None and not isinstance(raw, dict):
        top = Section(path, "", {name: raw}, document.places)
        raise top.refuse(name, "a mapping", f"indent `key: value` lines under `{name}:`")
    values: dict[str, object] = {}
    places = dict(document.places)
    written: dict[str, object] = raw or {}
    for key, value in written.items():
        full = _full_key(name, key)
        if full in values:
            second = Section(path, name, {key: value}, document.places)
            raise second.refuse(key, f"given once, but `{full}` is there too", "keep one")
        values[full] = value
        if (name, key) in document.places:
            places[name, full] = document.places[name, key]
    return Section(path, name, values, places)


def _full_key(section: str, key: str) -> str:
    """Add the launcher's prefix to a key without it."""
    prefix = _PREFIXES.get(section, "")
    # As in Accelerate, a bare `fsdp` or `fp8` counts as the prefix, without the underscore.
    has_prefix = key.startswith(prefix.rstrip("_"))
    if not has_prefix and prefix + key in known_keys()[section]:
        return prefix + key
    return key


def _check_keys(section: Section) -> None:
    known = known_keys()[section.name]
    for key in section.values:
        if key not in known:
            raise _unknown(section, key)
        _check_value(section, key, known[key])


def _check_value(section: Section, key: str, known: KnownKey) -> None:
    value = section.values[key]
    if value is None and not known.null_allowed:
        raise section.refuse(key, "a value", "write one, or delete the line")
    # `auto` is for a DeepSpeed value that is filled in later. Keys that do not allow it refuse it when they are read.
    if value is None or value == "auto":
        return
    if known.kind is int:
        # Only the type is checked. If a key is interpreted here, its reader checks the range.
        section.integer(key, 0, low=-(2**62))
    elif known.kind is float:
        if not _is_finite_number(value):
            raise section.refuse(key, "a finite number", "write digits without quotes, or delete the line")
    elif known.kind is not None and isinstance(value, list | dict) and key != "fp8_override_linear_precision":
        # The exception takes three booleans, one for each of fprop, dgrad and wgrad.
        raise section.refuse(key, "a single value, not a list or mapping", "write names with commas, as a,b")


def _is_finite_number(value: object) -> bool:
    # In Python a bool is an int.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def _unknown(section: Section, key: str) -> UsageError:
    """Return the error for an unknown key, with the section or key probably meant."""
    known = list(known_keys()[section.name])
    with_key = [name for name, keys in known_keys().items() if key in keys]
    others = [name for name in with_key if name != section.name]
    without_prefix = [name for name in known if name.endswith(f"_{key}")]
    if key in _DROPPED:
        remedy = "newer releases of Accelerate have dropped this section: delete it"
    # The empty name stands for the top of the file.
    elif others and others[0]:
        remedy = f"it belongs under {others[0]}"
    elif others:
        remedy = "it belongs at the top of the file, not indented"
    elif without_prefix:
        remedy = did_you_mean(without_prefix[0], bare=True)
    else:
        prefix = _PREFIXES.get(section.name, "")
        meant = nearest(key, known) or nearest(prefix + key, known)
        remedy = did_you_mean(meant, bare=True) or "delete it; `accelerate launch --help` lists all of them"
    what = f"unknown key `{section.label(key)}`: every key must be one that accelerate knows"
    return UsageError(f"{section.where(key)}: {what}; {remedy}")

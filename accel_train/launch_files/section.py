"""One mapping of a launch file: which keys Accelerate knows there, and typed reading with errors that point.

The known keys are asked of Accelerate itself (`ClusterConfig` and the parser of `accelerate launch`), so that
a new version brings its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from accel_train.config import UsageError
from accel_train.strict_yaml import Document, Places, place_of
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
"""Sections of the file, and the group of launcher flags that each one is copied over."""
_PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
"""The launcher adds these to a key that lacks them, in these three sections only."""
_NO_FLAG = {
    # read with getattr, without a flag
    "fsdp_config": {"fsdp_ignored_modules": str},
    # what `accelerate config` writes, and the launcher then copies to nowhere
    "fp8_config": {
        "fp8_amax_history_length": int,
        "fp8_amax_compute_algorithm": str,
        "fp8_optimization_level": str,
    },
}
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True)
class Section:
    """The values of one mapping and where they stand. Readers return the default where the key is absent."""

    file: Path
    name: str
    """'' for the top of the file."""
    values: dict[str, object]
    places: Places
    """Of the whole file; keys that the file gives without their prefix stand under their full names."""

    def label(self, key: str) -> str:
        """The key with the names of the sections that hold it."""
        return f"{self.name}.{key}" if self.name else key

    def where(self, key: str) -> str:
        """`file:line:column` of the key, or of its section."""
        return place_of(self.file, self.places, (*self.name.split("."), key) if self.name else (key,))

    def refuse(self, key: str, required: str, remedy: str) -> UsageError:
        """The error for a key: where and what it is, what it must be, what to do."""
        where, label = self.where(key), self.label(key)
        if key not in self.values:
            return UsageError(f"{where}: `{label}` is missing; it must be {required}; {remedy}")
        return UsageError(f"{where}: `{label}: {shown(self.values[key])}`: must be {required}; {remedy}")

    def text(self, key: str, default: str | None = None) -> str | None:
        """Text; null and absent are the default."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or not value.strip():
            raise self.refuse(key, "text", "write it in quotes, or delete the line")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """true or false; also the words that YAML 1.1, and so Accelerate, reads as such."""
        value = self.values.get(key)
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _TRUE + _FALSE:
            return value.lower() in _TRUE
        if value is None:
            return default
        raise self.refuse(key, "true or false", f"write `{key}: true` or `{key}: false`")

    def integer(self, key: str, default: int, low: int, high: int | None = None) -> int:
        """A whole number from `low` to `high`."""
        value = self.values.get(key, default)
        limits = f"{low} or more" if high is None else f"{low} to {high}"
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(key, f"a whole number, {limits}", "write digits only, without quotes")
        if value < low or (high is not None and value > high):
            raise self.refuse(key, f"a whole number, {limits}", "correct it, or delete the line")
        return value

    def choice(self, key: str, options: Iterable[str], default: str | None) -> str | None:
        """One of `options` in any case, returned as the option is spelt."""
        value = self.values.get(key)
        value = "no" if value is False else value  # a JSON or quoted form of YAML 1.1's `no`
        if value is None:
            return default
        known = {option.lower(): option for option in options}
        if not isinstance(value, str) or value.lower() not in known:
            remedy = did_you_mean(nearest(str(value), known.values()), before="") or "write one of them"
            raise self.refuse(key, f"one of {', '.join(known.values())}", remedy)
        return known[value.lower()]


def shown(value: object) -> str:
    """A value as a person would write it in the file, shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{...}"
    return "null" if value is None else str(value)[:60]


@functools.cache
def known_keys() -> Mapping[str, Mapping[str, tuple[object, bool]]]:
    """section -> key -> (the type its flag converts to, whether null is allowed); '' is the top."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    top: dict[str, tuple[object, bool]] = {
        field.name: (None, field.default is None or "Optional" in str(field.type)) for field in fields(ClusterConfig)
    }
    top["mixed_precision"] = (None, True)
    result: dict[str, dict[str, tuple[object, bool]]] = {"": top}
    groups = {group.title: group for group in launch_command_parser()._action_groups}
    for section, title in _GROUPS.items():
        actions = groups[title]._group_actions
        if section == "dynamo_config":
            actions = [action for action in actions if action.dest.startswith("dynamo_")]
        keys: dict[str, tuple[object, bool]] = {
            action.dest: (action.type or str, action.default is None) for action in actions
        }
        result[section] = keys | {key: (kind, True) for key, kind in _NO_FLAG.get(section, {}).items()}
    return result


def read_sections(path: Path, document: Document) -> tuple[Section, dict[str, Section]]:
    """The top and every section (empty where absent): all keys known, no null where a value must be."""
    values = dict(document.values)
    top = Section(path, "", values, document.places)
    if "fp16" in values:
        raise top.refuse("fp16", "absent, it is of an old version", "write `mixed_precision: fp16`, or nothing")
    sections = {name: _section(path, document, name) for name in _GROUPS}
    if "dynamo_backend" in values:  # how files of 2022 say it; accelerate moves it as well
        sections["dynamo_config"].values["dynamo_backend"] = values.pop("dynamo_backend")
    for section in (top, *sections.values()):
        _check_keys(section)
    return top, sections


def _section(path: Path, document: Document, name: str) -> Section:
    raw = document.values.get(name)
    if raw is not None and not isinstance(raw, dict):
        raise Section(path, "", {name: raw}, document.places).refuse(
            name, "a mapping", f"indent `key: value` lines under `{name}:`"
        )
    prefix = _PREFIXES.get(name, "")
    values: dict[str, object] = {}
    places = dict(document.places)
    written: dict[str, object] = raw or {}
    for key, value in written.items():
        full = key if key.startswith(prefix.rstrip("_")) or key not in _bare(name, prefix) else prefix + key
        if full in values:
            written_so = Section(path, name, {key: value}, document.places)
            raise written_so.refuse(key, f"given once, but `{full}` is there", "keep one")
        values[full] = value
        if (name, key) in document.places:
            places[name, full] = document.places[name, key]
    return Section(path, name, values, places)


def _bare(name: str, prefix: str) -> set[str]:
    return {key.removeprefix(prefix) for key in known_keys()[name]}


def _check_keys(section: Section) -> None:
    known = known_keys()[section.name]
    for key, value in section.values.items():
        if key not in known:
            raise _unknown(section, key)
        kind, null_allowed = known[key]
        if value is None and not null_allowed:
            raise section.refuse(key, "a value", "write one, or delete the line")
        if kind is int and value is not None and value != "auto":
            section.integer(key, 0, low=-(2**62))
        elif kind is float and value is not None and value != "auto":
            number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
            if not math.isfinite(number):
                raise section.refuse(key, "a finite number", "write digits without quotes, or delete the line")
        elif kind is not None and isinstance(value, list | dict) and key != "fp8_override_linear_precision":
            raise section.refuse(key, "a single value, not a list or mapping", "write names with commas, as a,b")


def _unknown(section: Section, key: str) -> UsageError:
    known = list(known_keys()[section.name])
    others = [name for name, keys in known_keys().items() if key in keys and name != section.name]
    without_prefix = [name for name in known if name.endswith(f"_{key}")]
    if others:
        remedy = f"it belongs under {others[0]}" if others[0] else "it belongs at the top of the file, not indented"
    elif without_prefix:
        remedy = did_you_mean(without_prefix[0], before="")
    else:
        meant = nearest(key, known) or nearest(_PREFIXES.get(section.name, "") + key, known)
        remedy = did_you_mean(meant, before="")
    remedy = remedy or "delete it; `accelerate launch --help` lists what there is"
    what = f"unknown key `{section.label(key)}`: every key must be one that accelerate knows"
    return UsageError(f"{section.where(key)}: {what}; {remedy}")

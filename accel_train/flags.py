"""Flags as values: ``--optimizer.lr 2e-4`` means what ``optimizer: {lr: 2e-4}`` means in a file, word for word.

Numbers are those of ``strict_yaml``; ``true``, ``false``, ``none`` and ``null`` are known in any case; everything else
is text. ``refusal`` then holds values of files and flags alike against the type of their option.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from accel_train.strict_yaml import read_number

WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "none": None, "null": None}
TRUTHS = ("true", "false", "yes", "no", "on", "off")
"""Words that a yes-or-no option is given; all but the first two are refused, as in a file."""

NAMES_OF_OTHER_SCRIPTS = {
    "train_batch_size": "--micro_batch_size (samples per process per forward) and --global_batch_size",
    "per_device_train_batch_size": "--micro_batch_size (samples per process per forward)",
    "gradient_accumulation_steps": "--global_batch_size and --micro_batch_size: accumulation is derived from them",
    "accumulation_steps": "--global_batch_size and --micro_batch_size: accumulation is derived from them",
    "learning_rate": "--optimizer.lr",
    "max_train_steps": "--max_steps",
    "num_train_epochs": "--max_epochs",
    "checkpointing_steps": "--checkpoints.save_every",
    "save_steps": "--checkpoints.save_every",
    "checkpoints_total_limit": "--checkpoints.keep_last",
    "save_total_limit": "--checkpoints.keep_last",
    "resume_from_checkpoint": "--resume auto|must|never|PATH (it resumes by itself)",
    "report_to": "--log.trackers",
    "mixed_precision": "--precision fp32|bf16|fp16",
    "lr_scheduler": "--schedule.kind",
    "lr_scheduler_type": "--schedule.kind",
    "lr_warmup_steps": "--schedule.warmup_steps",
    "warmup_steps": "--schedule.warmup_steps",
    "gradient_checkpointing": "--activation_checkpointing.mode full",
    "dataloader_num_workers": "--loader.num_workers",
    "max_grad_norm": "--optimizer.max_grad_norm",
    "weight_decay": "--optimizer.weight_decay",
    "hub_token": "the HF_TOKEN environment variable (a flag is readable by every user of the machine)",
}
"""Options of the diffusers and transformers scripts, refused with the name used here (not with a guess)."""


class FlagError(ValueError):
    """The command line cannot be read; the text says which word, and what to write instead."""


def read_flags(kinds: Mapping[str, Any], arguments: Sequence[str], presets: Sequence[str]) -> dict[str, Any]:
    """Dotted option -> value; of an option given twice the last counts. ``kinds`` are the types of all options."""
    values: dict[str, Any] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise FlagError(stray(word, words, list(kinds), presets))
        flag, equals, given = word.partition("=")
        name = flag[2:].replace("-", "_")
        if (positive := _negated(name, kinds)) is not None and not equals:
            values[positive] = False
            continue
        if name not in kinds:
            raise FlagError(f"{flag}{_unknown(name, list(kinds))}")
        values[name] = _value(flag, kinds[name], [given] if equals else _following(words, kinds[name]))
    return values


def _negated(name: str, kinds: Mapping[str, Any]) -> str | None:
    """The yes-or-no option that ``group.no_leaf`` switches off."""
    group, dot, leaf = name.rpartition(".")
    positive = f"{group}{dot}{leaf.removeprefix('no_')}"
    return positive if leaf.startswith("no_") and kinds.get(positive) is bool else None


def _following(words: list[str], kind: Any) -> list[str]:
    """Take the values of an option from the words that follow it."""
    taken: list[str] = []
    while words and not words[0].startswith("--"):
        if kind is bool and words[0].lower() not in TRUTHS:
            break
        taken.append(words.pop(0))
        if not takes_several(kind):
            break
    return taken


def _value(flag: str, kind: Any, words: Sequence[str]) -> Any:
    scalars = scalar_types(kind)
    if takes_several(kind):
        if type(None) in scalars and [word.lower() for word in words] in (["none"], ["null"]):
            return None
        return [_scalar(word, scalars - {type(None)}) for word in words]
    if kind is bool and not words:
        return True
    if not words:
        raise FlagError(f"{flag} has no value; write {flag} VALUE")
    return _scalar(words[0], scalars)


def _scalar(word: str, scalars: set[type]) -> Any:
    """The word as the option's type reads it: text only where nothing else is meant, or nothing else is taken."""
    value: Any = WORDS.get(word.lower(), word)
    if value is word and (number := _number(word)) is not None:
        value = number
    return word if str in scalars and type(value) not in scalars else value


def _number(word: str) -> int | float | None:
    try:
        return read_number(word)
    except ValueError:  # thousands of digits
        return None


def parts_of(kind: Any) -> Iterator[Any]:
    """The types that a union joins, or the type itself."""
    if get_origin(kind) is Union or type(kind).__name__ == "UnionType":
        for part in get_args(kind):
            yield from parts_of(part)
    else:
        yield kind


def takes_several(kind: Any) -> bool:
    """Whether an option of this type is a list."""
    return any(get_origin(part) is tuple for part in parts_of(kind))


def scalar_types(kind: Any) -> set[type]:
    """What a value of the option, or of its elements, may be in a file."""
    found: set[type] = set()
    for part in parts_of(kind):
        if get_origin(part) is Literal:
            found |= {type(value) for value in get_args(part)}
        elif get_origin(part) is tuple:
            found |= {scalar for inner in get_args(part) if inner is not Ellipsis for scalar in scalar_types(inner)}
        else:
            found |= {int, float} if part is float else {part}
    return found


def refusal(kind: Any, value: Any) -> str | None:
    """Why a value of a file or flag has the wrong type for its option, with what is required; None where it fits.

    Stricter than pydantic, which takes the text "8" and the number 8.0 for 8, and "yes" for true.
    """
    items = value if isinstance(value, (list, tuple)) and takes_several(kind) else [value]
    for item in items:
        if not isinstance(item, (list, tuple, dict)) and not _fits(kind, item):
            shown = str(item).lower() if isinstance(item, bool) else "null" if item is None else repr(item)
            return f"{shown} is refused: {_wanted(kind)} is required{_hint(kind, item)}"
    return None


def _fits(kind: Any, value: Any) -> bool:
    for part in parts_of(kind):
        if get_origin(part) is Literal:
            fits = any(type(choice) is type(value) and choice == value for choice in get_args(part))
        elif get_origin(part) is tuple:
            fits = any(_fits(inner, value) for inner in get_args(part) if inner is not Ellipsis)
        else:
            fits = type(value) in ((int, float) if part is float else (part,))
        if fits:
            return True
    return False


_NAMES = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "null"}


def _wanted(kind: Any) -> str:
    names: list[str] = []
    for part in parts_of(kind):
        if get_origin(part) is Literal:
            names += [str(choice).lower() if isinstance(choice, bool) else repr(choice) for choice in get_args(part)]
        elif get_origin(part) is tuple:
            names.append(f"a list with {_wanted(get_args(part)[0])} for each element")
        else:
            names.append(_NAMES[part])
    return " or ".join(dict.fromkeys(names))


def _hint(kind: Any, value: Any) -> str:
    """What was probably meant."""
    if isinstance(value, float) and value.is_integer() and _fits(kind, int(value)):
        return f" (write {int(value)})"
    if not isinstance(value, str):
        return ""
    if (number := _number(value)) is not None and _fits(kind, number):
        return " (leave the quotes out)"
    if value.lower() in TRUTHS and _fits(kind, True):
        return " (write true or false, without quotes)"
    choices = [c for part in parts_of(kind) if get_origin(part) is Literal for c in get_args(part)]
    meant = difflib.get_close_matches(value, [c for c in choices if isinstance(c, str)], n=1, cutoff=0.6)
    return f" (did you mean {meant[0]!r}?)" if meant else ""


def stray(word: str, after: Sequence[str], known: Sequence[str], presets: Sequence[str]) -> str:
    """Why a word that belongs to no flag is refused, and what was probably meant."""
    name, equals, value = word.partition("=")
    name = name.lstrip("-").replace("-", "_")
    if name in known or (name and name[0].isalpha() and (equals or word.startswith("-")) and nearest(name, known)):
        meant = name if name in known else nearest(name, known)
        rest = value if equals else next((f"{w}" for w in after[:1] if not w.startswith("-")), "")
        quoted = shlex.quote(rest) if rest else ""
        return f"{word!r}: an option begins with two dashes; write --{meant} {quoted}".rstrip()
    if word in presets or word.endswith((".yaml", ".yml")):
        first = shlex.quote(word)
        return f"{word!r}: the preset or file comes first, before every flag; write {first} --flag value ..."
    return f"{word!r} belongs to no option: most take one value (--help shows which take more); quote text with spaces"


def _unknown(name: str, known: Sequence[str]) -> str:
    other = NAMES_OF_OTHER_SCRIPTS.get(name.rsplit(".", 1)[-1])
    if other is not None:
        return f" is a name of other scripts; here use {other}"
    if group := [key for key in known if key.startswith(f"{name}.")]:
        return f" is a group of options and no option; write --{group[0]} VALUE"
    meant = nearest(name, known)
    return ": unknown option" + (f": did you mean --{meant}?" if meant else "; --help lists all")


def nearest(key: str, known: Sequence[str]) -> str | None:
    """The option that was probably meant: nearly the same, or the right name in no group or a wrong one."""
    if found := difflib.get_close_matches(key, known, n=1, cutoff=0.6):
        return found[0]
    by_leaf = {k.rsplit(".", 1)[-1]: k for k in known}
    found = difflib.get_close_matches(key.rsplit(".", 1)[-1], list(by_leaf), n=1, cutoff=0.7)
    return by_leaf[found[0]] if found else None

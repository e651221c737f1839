"""Flags as values: ``--optimizer.lr 2e-4`` means the same as ``optimizer: {lr: 2e-4}`` in a file.

Numbers follow ``strict_yaml``. ``true``, ``false``, ``none`` and ``null`` are recognised in any case. Other words are
text. ``refusal`` checks the values of files and flags alike against the type of their option.
"""

from __future__ import annotations

import inspect
import numbers
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Union, cast, get_args, get_origin

from accel_train.config import UsageError
from accel_train.options.other_scripts import NAMES_OF_OTHER_SCRIPTS, in_this_recipe
from accel_train.options.strict_yaml import read_number
from accel_train.options.tree import option_types
from accel_train.wording import did_you_mean, nearest, shortened

WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "none": None, "null": None}
BOOLEAN_WORDS = ("true", "false", "yes", "no", "on", "off")
"""Words read as the value of a boolean option. All but the first two are then refused, as in a file."""


class FlagError(ValueError):
    """The command line cannot be read. The text names the word and its correction."""


def words_of(argv: Sequence[object]) -> list[str]:
    """Convert the arguments of a ``main`` to words. A notebook may pass numbers and paths among them.

    Raises ``UsageError`` for a value of any other type.
    """
    if isinstance(argv, str):
        raise UsageError(
            f"{argv!r}: one string is given, and a list of words is required, as in main(['--max_steps', '5'])"
        )
    words: list[str] = []
    for place, given in enumerate(argv):
        word = given
        if isinstance(given, os.PathLike):
            word = os.fspath(cast("os.PathLike[str]", given))
        if not isinstance(word, (str, numbers.Real)):
            before = "".join(f" behind {each}" for each in words[-1:])
            raise UsageError(
                f"argument {place + 1}{before} is {word!r} of type {type(word).__name__}: text, a number, True, False "
                "or a path is required, as in main(['--max_steps', 5])"
            )
        words.append(str(word))
    return words


def read_flags(
    kinds: Mapping[str, Any], arguments: Sequence[str], presets: Callable[[], Sequence[str]]
) -> dict[str, Any]:
    """Parse flags to a mapping from dotted option to value.

    If an option is given twice, the last value wins, but a list is refused. ``kinds`` has the type of every option.
    ``presets`` lists the presets for an error message, which takes 0.1 s. Raises ``FlagError``.
    """
    values: dict[str, Any] = {}
    words = list(arguments)
    flag = name = ""
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            problem = stray(word, words, list(kinds), presets)
            if kinds.get(name) is bool:
                problem += f"; {flag} before it takes true, false or no value"
            raise FlagError(problem)
        flag, equals, attached = word.partition("=")
        name = flag[2:].replace("-", "_")
        negated = _negated_option(name, kinds)
        # --no_flag takes no value.
        if negated is not None and not equals:
            values[negated] = False
            continue
        if name not in kinds:
            raise FlagError(f"{flag}{_unknown(name, list(kinds))}")
        kind = kinds[name]
        if name in values and _has_any_length(kind):
            raise FlagError(f"{flag} is given twice; write all its values after one {flag}")
        given = [attached] if equals else _take_values(words, kind)
        values[name] = _value(flag, kind, given)
    return values


def _negated_option(name: str, kinds: Mapping[str, Any]) -> str | None:
    """Return the boolean option switched off by ``group.no_leaf``, or None."""
    group, dot, leaf = name.rpartition(".")
    positive = f"{group}{dot}{leaf.removeprefix('no_')}"
    if leaf.startswith("no_") and kinds.get(positive) is bool:
        return positive
    return None


def _take_values(words: list[str], kind: Any) -> list[str]:
    """Remove and return the values of an option at the start of ``words``."""
    taken: list[str] = []
    # A single dash may begin a negative number.
    while words and not words[0].startswith("--"):
        # A boolean flag needs no value, so any other word belongs to something else.
        if kind is bool and words[0].lower() not in BOOLEAN_WORDS:
            break
        taken.append(words.pop(0))
        if not is_list(kind):
            break
    return taken


def _value(flag: str, kind: Any, words: Sequence[str]) -> Any:
    scalars = scalar_types(kind)
    if is_list(kind):
        is_none = len(words) == 1 and words[0].lower() in ("none", "null")
        if is_none and type(None) in scalars:
            return None
        # An element is never null.
        return [_scalar(word, scalars - {type(None)}) for word in words]
    # --flag alone switches a boolean option on.
    if kind is bool and not words:
        return True
    if not words:
        raise FlagError(f"{flag} has no value; write {flag} VALUE")
    return _scalar(words[0], scalars)


def _scalar(word: str, scalars: set[type]) -> Any:
    """Convert a word to one of the option's types. It stays text if the option takes text and not the other type."""
    value: Any = word
    number = _number(word)
    if word.lower() in WORDS:
        value = WORDS[word.lower()]
    elif number is not None:
        value = number
    if str in scalars and type(value) not in scalars:  # such as a run that is named 2024
        return word
    return value


def _number(word: str) -> int | float | None:
    try:
        return read_number(word)
    except ValueError:
        # Python refuses integers of thousands of digits.
        return None


def union_members(kind: Any) -> Iterator[Any]:
    """Yield the members of a union, or the type itself."""
    if get_origin(kind) is Union or type(kind).__name__ == "UnionType":
        for part in get_args(kind):
            yield from union_members(part)
    else:
        yield kind


def is_list(kind: Any) -> bool:
    """Check if options of this type take a list."""
    return any(get_origin(part) is tuple for part in union_members(kind))


def _has_any_length(kind: Any) -> bool:
    return any(Ellipsis in get_args(part) for part in union_members(kind))


def scalar_types(kind: Any) -> set[type]:
    """Collect the Python types of the option's values in a file, or of their elements."""
    types: set[type] = set()
    for part in union_members(kind):
        if get_origin(part) is Literal:
            types |= {type(value) for value in get_args(part)}
        elif get_origin(part) is tuple:
            for element in _element_types(part):
                types |= scalar_types(element)
        elif part is float:
            # A whole number is a valid float.
            types |= {int, float}
        else:
            types.add(part)
    return types


def _element_types(kind: Any) -> list[Any]:
    """Return the element types of ``tuple[X, ...]`` or ``tuple[X, Y]``."""
    return [element for element in get_args(kind) if element is not Ellipsis]


def refusal(kind: Any, value: Any) -> str | None:
    """Return a message if a value of a file or flag does not fit its option's type, None if it fits.

    Stricter than pydantic, which accepts the text "8" and the number 8.0 as 8, and "yes" as true.
    """
    items = [value]
    if isinstance(value, (list, tuple)) and is_list(kind):
        items = list(cast("Sequence[Any]", value))
    for item in items:
        # pydantic refuses lists and mappings in the wrong place by itself.
        if not isinstance(item, (list, tuple, dict)) and not _fits(kind, item):
            return f"{_shown(item)} is refused: {_requirement(kind)} is required{_hint(kind, item)}"
    return None


def _shown(value: Any) -> str:
    """Write a value as in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def _fits(kind: Any, value: Any) -> bool:
    return any(_fits_part(part, value) for part in union_members(kind))


def _fits_part(part: Any, value: Any) -> bool:
    # Types are compared exactly: True is an instance of int, and equal to 1.
    if get_origin(part) is Literal:
        return any(type(choice) is type(value) and choice == value for choice in get_args(part))
    if get_origin(part) is tuple:
        return any(_fits(element, value) for element in _element_types(part))
    if part is float:
        return type(value) in (int, float)
    return type(value) is part


_NAMES = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
}


def refuse_other_fields(cls: type) -> None:
    """Raise ``UsageError`` for fields that are no options, for want of ``@dataclass`` or by their type."""
    if "__dataclass_params__" not in vars(cls):
        fields = [name for name, kind in inspect.get_annotations(cls).items() if "ClassVar" not in str(kind)]
        if fields:
            raise UsageError(
                f"{cls.__name__}: {shortened(fields, 3)} would be no options: a dataclass is required; write "
                "@dataclass(frozen=True) above the class"
            )
    for name, kind in option_types(cls).items():
        for part in union_members(kind):
            if isinstance(part, type) and get_origin(part) is None and part not in _NAMES:
                raise UsageError(
                    f"{cls.__name__}: the option {name} has the type {part.__name__}: int, float, str, bool, Literal, "
                    "None or a tuple of such values, as in tuple[int, ...], is required, or a group of options; write "
                    "@dataclass(frozen=True) above the class of a group"
                )


def _requirement(kind: Any) -> str:
    """Describe the values of a type, for an error."""
    names: list[str] = []
    for part in union_members(kind):
        if get_origin(part) is Literal:
            names += [_shown(choice) for choice in get_args(part)]
        elif get_origin(part) is tuple:
            names.append(f"a list with {_requirement(get_args(part)[0])} for each element")
        else:
            names.append(_NAMES[part])
    # Each name once, in order.
    return " or ".join(dict.fromkeys(names))


def _hint(kind: Any, value: Any) -> str:
    """Guess the intended value, for the end of an error."""
    if isinstance(value, float) and value.is_integer() and _fits(kind, int(value)):
        return f" (write {int(value)})"
    if not isinstance(value, str):
        return ""
    if value.lower().lstrip("+-.") in ("inf", "infinity", "nan") and _fits(kind, 0.0):
        return " (a finite one)"
    number = _number(value)
    if number is not None and _fits(kind, number):
        return " (leave the quotes out)"
    if value.lower() in BOOLEAN_WORDS and _fits(kind, True):
        return " (write true or false, without quotes)"
    choices: list[str] = []
    for part in union_members(kind):
        if get_origin(part) is Literal:
            choices += [choice for choice in get_args(part) if isinstance(choice, str)]
    return did_you_mean(nearest(value, choices))


def stray(word: str, after: Sequence[str], known: Sequence[str], presets: Callable[[], Sequence[str]]) -> str:
    """Return the error for a word without a flag, with the probable meaning."""
    name, equals, value = word.partition("=")
    name = name.lstrip("-").replace("-", "_")
    is_option = name in known
    meant = name if is_option else nearest_option(name, known)
    looks_like_a_flag = name[:1].isalpha() and (equals or word.startswith("-"))
    if is_option or (meant and looks_like_a_flag):
        if not equals and after and not after[0].startswith("-"):
            value = after[0]
        flag = f"--{meant} {shlex.quote(value)}" if value else f"--{meant}"
        return f"{word!r}: an option begins with two dashes; write {flag}"
    if word in presets() or word.endswith((".yaml", ".yml")):
        first = shlex.quote(word)
        return f"{word!r}: the preset or file comes first, before every flag; write {first} --flag value ..."
    return (
        f"{word!r} belongs to no option: most take one value (--help all shows which take more); quote text with spaces"
    )


def _unknown(name: str, known: Sequence[str]) -> str:
    """Return the error for an unknown option, to be appended to its flag."""
    group = [key for key in known if key.startswith(f"{name}.")]
    if group:
        return f" is a group of options, not an option; write --{group[0]} VALUE"
    other = NAMES_OF_OTHER_SCRIPTS.get(name.rsplit(".", 1)[-1])
    if other is not None:
        return f" is a name from other scripts; here {in_this_recipe(other, known)}"
    meant = nearest_option(name, known)
    namesakes = [option for option in known if option.rpartition(".")[2] == name]
    if meant in namesakes:
        return ": unknown option (did you mean " + " or ".join(f"'--{option}'" for option in namesakes) + "?)"
    if meant:
        return ": unknown option" + did_you_mean(f"--{meant}")
    if related := related_options(name, known):
        return ": unknown option (did you mean " + " or ".join(f"'--{option}'" for option in related) + "?)"
    return ": unknown option; --help all lists all"


MOST_RELATED = 3
NEAR = 0.8
"""Minimum similarity of an option worth proposing. Less similar names mostly mean something else."""


def related_options(key: str, known: Sequence[str]) -> list[str]:
    """Return options whose last name contains that of ``key`` in whole words, or is contained in it.

    Such as --smoothing for --label_smoothing. Empty if there are more than ``MOST_RELATED``: the word is too common.
    """
    group, _, last = key.rpartition(".")
    siblings = [option for option in known if group and option.startswith(f"{group}.")]
    related: list[str] = []
    for option in siblings or known:
        leaf = f"_{option.rpartition('.')[2]}_"
        if leaf in f"_{last}_" or f"_{last}_" in leaf:
            related.append(option)
    if len(related) > MOST_RELATED:
        return []
    return related


def nearest_option(key: str, known: Sequence[str]) -> str | None:
    """Guess the intended option: a similar name, the end of one, or the same leaf without its group or in another."""
    group, _, last = key.rpartition(".")
    # In a group that exists, an option of the same name in another group means something else.
    siblings = [option for option in known if group and option.startswith(f"{group}.")]
    meant = None if siblings else nearest(key, known, NEAR)
    # Such as --steps for --max_steps.
    ending = [option for option in known if option.endswith(f"_{key}") and "." not in option]
    if meant or ending:
        return meant or ending[0]
    # The last of several options with the same leaf wins.
    by_leaf = {option.rsplit(".", 1)[-1]: option for option in siblings or known}
    # Two swapped letters, as in model.szie, cost a short name much similarity. A group has few names, so less suffices.
    leaf = nearest(last, by_leaf, 0.7 if siblings else NEAR)
    if leaf is None:
        return None
    return by_leaf[leaf]

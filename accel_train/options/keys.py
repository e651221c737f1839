"""Unknown keys of a YAML file or mapping, and the options that were probably meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from accel_train.config import UsageError
from accel_train.options.flags import nearest_option, related_options
from accel_train.options.other_scripts import NAMES_OF_OTHER_SCRIPTS, in_this_recipe
from accel_train.options.strict_yaml import Places, place_of
from accel_train.options.tree import field_types, flatten, is_group, option_names
from accel_train.wording import did_you_mean

NOWHERE: Places = MappingProxyType({})
"""Positions of values that are from no file: none."""
MAY_BE_EMPTY = ("data.default_caption", "data.prior.caption")
"""Options for which empty text has a meaning."""


def check_keys(cls: type, tree: Mapping[str, Any], where: str, places: Places = NOWHERE) -> None:
    """Refuse unknown keys, with their position in the file and the nearest option."""
    for path, value, is_group_key in invalid_keys(cls, tree, ()):
        key = ".".join(path)
        where_key = place_of(where, places, path)
        if is_group_key:
            raise UsageError(f"{where_key}: {key}: {value!r} must be a mapping of options, such as {key}: {{...}}")
        raise UsageError(f"{where_key}: unknown option {key!r}: {value!r}; {_key_remedy(key, option_names(cls))}")


def _key_remedy(key: str, known: Sequence[str]) -> str:
    if key in known:
        # A single key with a dot in it.
        group, _, leaf = key.rpartition(".")
        return f"in a file groups are mappings: {group}: {{{leaf}: ...}}"
    other = NAMES_OF_OTHER_SCRIPTS.get(key.rsplit(".", 1)[-1])
    if other:
        return in_this_recipe(other, known)
    meant = nearest_option(key, known)
    if meant is None and (related := related_options(key, known)):
        return f"remove it or correct it (did you mean {' or '.join(map(repr, related))}?)"
    if meant is None:
        return "this recipe has no such option: remove it, or find its present name with --help all"
    return "remove it or correct it" + did_you_mean(meant)


class InvalidKey(NamedTuple):
    """An unknown key of a file, or a group with a value other than a mapping."""

    path: tuple[str, ...]
    value: Any
    is_group: bool
    """True if the key names a group, but its value is not a mapping."""


def invalid_keys(cls: type, tree: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[InvalidKey]:
    """Yield the unknown keys of a tree, and the groups without a mapping."""
    kinds = field_types(cls)
    for key, value in tree.items():
        kind = kinds.get(key)
        path = (*above, key)
        if is_group(kind):
            if isinstance(value, Mapping):
                yield from invalid_keys(kind, cast(Mapping[str, Any], value), path)
            else:
                yield InvalidKey(path, value, is_group=True)
        elif isinstance(value, Mapping):
            # No option takes a mapping, so the unknown key is one inside it.
            yield _first_leaf(path, cast(Mapping[str, Any], value))
        elif kind is None:
            yield InvalidKey(path, value, is_group=False)


def _first_leaf(path: tuple[str, ...], value: Mapping[str, Any]) -> InvalidKey:
    """Return the first option inside an unknown mapping: it says more than the name of its group."""
    if not value:
        return InvalidKey(path, value, is_group=False)
    key, leaf = next(iter(flatten(value).items()))
    return InvalidKey((*path, *key.split(".")), leaf, is_group=False)

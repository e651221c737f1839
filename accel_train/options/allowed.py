"""Checks of names of options and groups: those that may differ at a resume, and those that a recipe declares."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accel_train.config import UsageError
from accel_train.options.tree import option_names
from accel_train.wording import did_you_mean, nearest


def is_covered(key: str, names: Iterable[str]) -> bool:
    """Return True if one of ``names`` is the option ``key`` or a group around it."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def refuse_unknown_allowed(allow: Iterable[str], experiment: Iterable[str]) -> None:
    """Raise ``UsageError`` for a name in ``allow`` that is neither an option of the experiment nor a group of them."""
    known = list(experiment)
    for name in allow:
        if any(is_covered(key, [name]) for key in known):
            continue
        raise UsageError(
            f"allow: {name!r} is not an option of this experiment{did_you_mean(_meant(name, known))}; name the option "
            "that has changed"
        )


def refuse_undeclared(cls: type) -> None:
    """Raise ``UsageError`` for a name that a recipe declares and that is no option of its config.

    ``free_to_change`` may also name groups. Values of ``--smoke`` that are a function are checked when it is called.
    """
    recipe: Any = getattr(cls, "recipe", None)
    known = option_names(cls)
    free = getattr(recipe, "free_to_change", ())
    if isinstance(free, str):
        raise UsageError(
            f"free_to_change: {free!r} is text: a tuple is required; write free_to_change=({free!r},) with its comma"
        )
    for name in free:
        if not any(is_covered(key, [name]) for key in known):
            raise UsageError(
                f"free_to_change: {name!r} is neither an option of {cls.__name__} nor a group of them"
                f"{did_you_mean(_meant(name, known))}; correct it in experiment.Recipe(free_to_change=...)"
            )
    smoke = getattr(recipe, "smoke", {})
    # A function needs the values of the config, which are read later.
    if not callable(smoke):
        refuse_unknown_smoke(cls, smoke)


def refuse_unknown_smoke(cls: type, names: Iterable[str]) -> None:
    """Raise ``UsageError`` for a value of ``--smoke`` that is of no option of the config ``cls``."""
    known = option_names(cls)
    for name in names:
        if name not in known:
            raise UsageError(
                f"smoke: {name!r} is no option of {cls.__name__}{did_you_mean(_meant(name, known))}; correct it in "
                "experiment.Recipe(smoke=...)"
            )


def _meant(name: str, known: list[str]) -> str | None:
    """Return the option with this last name in some group, or else the most similar option or group, or None."""
    groups = {key.rpartition(".")[0] for key in known} - {""}
    same_leaf = (key for key in known if key.endswith(f".{name}"))
    return next(same_leaf, None) or nearest(name, [*known, *sorted(groups)])

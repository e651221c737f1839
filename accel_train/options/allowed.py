"""Names of options and of groups that may differ from those of the run at a resume."""

from __future__ import annotations

from collections.abc import Iterable

from accel_train.config import UsageError
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
        groups = {key.rpartition(".")[0] for key in known} - {""}
        # An option without its group, then a similar name.
        same_leaf = (key for key in known if key.endswith(f".{name}"))
        meant = next(same_leaf, None) or nearest(name, [*known, *sorted(groups)])
        raise UsageError(
            f"allow: {name!r} is no option of this experiment{did_you_mean(meant)}; name the option that has changed"
        )

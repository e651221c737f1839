"""``RUN@STEP`` and ``RUN@best``: a checkpoint of a run, named by its step or by the best metric."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from accel_train.config import UsageError
from accel_train.options.strict_yaml import YamlError, read_yaml
from accel_train.store import manifest

CHOICE = re.compile(r"(.+)@(best|\d+)")
"""End of a path that chooses a checkpoint of a run."""


class Choice(NamedTuple):
    """A path with the word that chooses one of its checkpoints."""

    run: Path
    word: str
    """``best`` or a step."""


def choice_of(path: Path) -> Choice | None:
    """Take a path apart that ends with ``@STEP`` or ``@best``. Returns None for others, and for one that exists."""
    found = CHOICE.fullmatch(path.name)
    if found is None or path.exists():
        return None
    return Choice(path.with_name(found[1]), found[2])


def find_chosen(chosen: Choice, run: Path | None, checkpoints: Sequence[Path]) -> Path:
    """Return the checkpoint of a step, or the best one by ``checkpoints.best_metric`` of the run. Raises
    ``UsageError``."""
    if chosen.word == "best":
        path = best_of(run, checkpoints)
        if path is None:
            raise UsageError(
                f"{chosen.run}@best: a run with checkpoints.best_metric in its config.yaml, and a checkpoint with that "
                f"metric, is required; name a step, as in {chosen.run}@1200 (accel-train checkpoints ls shows them)"
            )
        return path
    by_step = {facts.step: facts.path for facts in _facts(checkpoints)}
    if int(chosen.word) not in by_step:
        steps = ", ".join(map(str, by_step)) or "none"
        raise UsageError(f"{chosen.run}@{chosen.word}: there is no checkpoint of this step; there are {steps}")
    return by_step[int(chosen.word)]


def best_of(run: Path | None, checkpoints: Sequence[Path]) -> Path | None:
    """Return the best checkpoint by ``checkpoints.best_metric`` of the run, None without the option or the metric."""
    metric, mode = best_metric(run)
    # The newest first, which counts among equal ones.
    best = manifest.ranked(_facts(checkpoints)[::-1], metric, mode)
    return best[0].path if best else None


def _facts(checkpoints: Sequence[Path]) -> list[manifest.CheckpointFacts]:
    """Return the facts of the readable checkpoints, oldest first."""
    found = ((path, manifest.read_if_valid(path)) for path in checkpoints)
    return [manifest.facts_from_manifest(path, facts) for path, facts in found if facts is not None]


def best_metric(run: Path | None) -> tuple[str | None, str]:
    """Return ``checkpoints.best_metric`` and ``best_mode`` of a run. None without, or beside an unreadable config."""
    options: dict[str, Any] = {}
    if run is not None:
        # Listing checkpoints also works beside a config.yaml that cannot be read.
        with suppress(UsageError):
            options = options_of(run, "checkpoints")
    return options.get("best_metric"), str(options.get("best_mode", "min"))


def options_of(run: Path, group: str) -> dict[str, Any]:
    """Return a group of options from the run's config.yaml, empty if there is none. Raises ``UsageError``."""
    path = run / "config.yaml"
    if not path.is_file():
        return {}
    try:
        options: Any = read_yaml(path).get(group)
    except YamlError as error:
        raise UsageError(str(error)) from None
    # Somebody may have edited it by hand.
    return options if isinstance(options, dict) else {}

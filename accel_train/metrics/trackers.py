"""Accelerate's trackers, asked for strictly before training and forgiven while it runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_train.config import UsageError, flatten
from accel_train.metrics.records import plain
from accel_train.wording import did_you_mean, nearest

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

INSTALL = {
    "tensorboard": '"accel-train[tensorboard]"',
    "trackio": '"accel-train[trackio]"',
    "wandb": '"accel-train[wandb]"',
    "mlflow": '"accel-train[mlflow]"',
    "swanlab": '"accel-train[swanlab]"',
    "aim": '"aim<4"',
    "clearml": "clearml",
    "comet_ml": "comet_ml",
    "dvclive": "dvclive",
}
"""What ``pip install`` takes for each tracker that Accelerate knows."""

MAX_FAILURES = 3
"""Failures in a row after which a tracker is left alone."""

Scalar = bool | int | float | str


def resolve_trackers(names: Sequence[str]) -> tuple[str, ...]:
    """The trackers asked for, once each, all of them known and installed; else ``UsageError``.

    Call it before anything is built: Accelerate drops a known tracker whose package is missing without a
    word. Trackers made known by ``accelerate.tracking.register_tracker_class`` are accepted. Every process
    may call it and gets the same answer on equal installations.
    """
    if not names:
        return ()
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    available = {str(tracker) for tracker in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise UsageError(
                f"log.trackers: {name!r} is not a tracker{did_you_mean(nearest(name, LOGGER_TYPE_TO_CLASS))}; "
                f"Accelerate offers {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}; name one or more of them, or none: "
                "metrics.jsonl is always written"
            )
        if name in INSTALL and name not in available:
            raise UsageError(
                f"log.trackers: {name!r} needs a package that is not installed, or not in a version that "
                f"Accelerate takes; pip install {INSTALL[name]}, or leave {name!r} out"
            )
    return tuple(dict.fromkeys(names))


def flatten_config(config: Mapping[str, Any]) -> dict[str, Scalar]:
    """Nested options as ``{"optimizer.lr": 2e-4}``, every value one that each tracker takes.

    TensorBoard refuses lists, None and nested mappings: lists become JSON text, None becomes "none".
    """
    flat: dict[str, Scalar] = {}
    for key, value in flatten(config).items():
        simple = plain(value)
        if simple is None:
            simple = "none"
        flat[key] = simple if isinstance(simple, (bool, int, float, str)) else json.dumps(simple)
    return flat


@dataclass(frozen=True)
class RunName:
    """How trackers show a run; with ``run_id``, W&B goes on with the same run after a restart."""

    project: str
    run: str
    run_id: str | None = None


class Trackers:
    """The trackers of one run. Main process only; on the others it is made without names and does nothing."""

    def __init__(
        self,
        accelerator: Accelerator,
        names: Sequence[str],
        output_dir: Path,
        *,
        run: RunName,
        config: Mapping[str, Any],
    ) -> None:
        """Starts them, which may reach the network; one that cannot start is a ``UsageError``."""
        self._accelerator = accelerator
        self._failures: dict[str, int] = {}
        if not names:
            return
        folder = output_dir / "trackers"
        folder.mkdir(parents=True, exist_ok=True)
        accelerator.project_configuration.logging_dir = str(folder)
        chosen: list[Any] = list(names)
        accelerator.log_with = chosen
        try:
            accelerator.init_trackers(
                run.project, config=flatten_config(config), init_kwargs=_init_arguments(run, str(folder))
            )
        except Exception as error:
            raise UsageError(
                f"log.trackers: {', '.join(names)} could not start: {type(error).__name__}: {error}. "
                "Set up its account or offline mode, or leave it out (--log.trackers with no name)"
            ) from error

    def log(self, values: Mapping[str, object], step: int) -> None:
        """Send the numbers among ``values``; the rest stays in ``metrics.jsonl``. Never raises.

        A tracker that fails ``MAX_FAILURES`` times in a row is left alone from then on, with one warning.
        """
        numbers = {k: v for k, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
        for tracker in list(self._accelerator.trackers):
            try:
                tracker.log(numbers, step=step)
                self._failures[tracker.name] = 0
            except Exception as error:
                self._count_failure(tracker, error)

    def _count_failure(self, tracker: Any, error: Exception) -> None:
        failures = self._failures.get(tracker.name, 0) + 1
        self._failures[tracker.name] = failures
        if failures >= MAX_FAILURES:
            self._accelerator.trackers.remove(tracker)
            logger.warning(
                "tracker %s failed %d times in a row and is switched off for this run (%s: %s); "
                "metrics.jsonl has everything",
                tracker.name,
                failures,
                type(error).__name__,
                error,
            )

    def close(self) -> None:
        """Finish what still works, and leave nothing for ``accelerator.end_training`` to finish twice."""
        for tracker in list(self._accelerator.trackers):
            try:
                tracker.finish()
            except Exception as error:
                logger.warning("tracker %s did not finish: %s: %s", tracker.name, type(error).__name__, error)
        self._accelerator.trackers.clear()


def _init_arguments(run: RunName, folder: str) -> dict[str, dict[str, object]]:
    """What each tracker calls the name of a run, and where it keeps its files."""
    same_run: dict[str, object] = {"id": run.run_id, "resume": "allow"} if run.run_id else {}
    return {
        "wandb": {"name": run.run, "dir": folder, **same_run},
        "trackio": {"name": run.run},
        "mlflow": {"run_name": run.run},
        "swanlab": {"experiment_name": run.run, "logdir": folder},
    }

"""Accelerate's trackers. Errors stop the run before training, but are only logged during training."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_train.config import UsageError
from accel_train.metrics.records import plain
from accel_train.metrics.tracking.report_files import ReportFile
from accel_train.metrics.tracking.sending import send
from accel_train.options.tree import flatten
from accel_train.wording import did_you_mean, nearest

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

# Argument of pip install for each tracker of Accelerate.
INSTALL = {
    "tensorboard": '"accel-train[tensorboard]"',
    "trackio": '"accel-train[trackio]"',
    "wandb": '"accel-train[wandb]"',
    "mlflow": '"accel-train[mlflow]"',
    "swanlab": '"accel-train[swanlab]"',
    "aim": '"aim<4"',  # Accelerate treats a newer version as missing
    "clearml": "clearml",
    "comet_ml": "comet_ml",
    "dvclive": "dvclive",
}

# Consecutive failures before a tracker is switched off.
MAX_FAILURES = 3

Scalar = bool | int | float | str


def resolve_trackers(names: Sequence[str]) -> tuple[str, ...]:
    """Return the requested trackers without duplicates. Raises ``UsageError`` for an unknown or missing one.

    Call it before anything is built, because Accelerate silently drops a known tracker without its package. Trackers
    registered by ``accelerate.tracking.register_tracker_class`` are accepted. No collective: processes with equal
    installations get the same result.
    """
    if not names:  # saves the import of accelerate
        return ()
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    available = {str(tracker) for tracker in get_available_trackers()}
    # All are checked before the first is started, so that an error leaves none half started.
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
                f"Accelerate supports; pip install {INSTALL[name]}, or leave {name!r} out"
            )
    # A tracker listed twice would log every value twice.
    return tuple(dict.fromkeys(names))


def flatten_config(config: Mapping[str, Any]) -> dict[str, Scalar]:
    """Flatten nested options to ``{"optimizer.lr": 2e-4}`` with values accepted by every tracker.

    TensorBoard refuses lists and None. Lists become JSON text, and None becomes "none".
    """
    flat: dict[str, Scalar] = {}
    for key, value in flatten(config).items():
        simple = plain(value)
        if simple is None:
            flat[key] = "none"
        elif isinstance(simple, (bool, int, float, str)):
            flat[key] = simple
        else:
            flat[key] = json.dumps(simple)
    return flat


@dataclass(frozen=True)
class RunName:
    """Name of a run in the trackers. With ``run_id``, W&B continues the same run after a restart."""

    project: str
    run: str
    run_id: str | None = None


class Trackers:
    """Trackers of one run, on the main process only. Without names it does nothing."""

    def __init__(
        self,
        accelerator: Accelerator,
        names: Sequence[str],
        output_dir: Path,
        *,
        run: RunName,
        config: Mapping[str, Any],
    ) -> None:
        """Start the trackers, possibly over the network. Raises ``UsageError`` if one cannot start."""
        self._accelerator = accelerator
        self._failures: dict[str, int] = {}
        self._file_failures: dict[str, int] = {}
        self._told: set[str] = set()
        if not names:
            return
        folder = output_dir / "trackers"
        folder.mkdir(parents=True, exist_ok=True)
        # Accelerate passes it to the trackers that write files.
        accelerator.project_configuration.logging_dir = str(folder)
        chosen: list[Any] = list(names)
        accelerator.log_with = chosen
        try:
            accelerator.init_trackers(
                run.project, config=flatten_config(config), init_kwargs=_init_arguments(run, str(folder))
            )
        except Exception as error:  # from a network, an account or a package, each with its own types
            raise UsageError(
                f"log.trackers: {', '.join(names)} could not start: {type(error).__name__}: {error}. "
                "Set up its account or offline mode, or leave it out (--log.trackers with no name)"
            ) from error

    def log(self, values: Mapping[str, object], step: int) -> None:
        """Send the numbers in ``values``. The rest is in ``metrics.jsonl`` only. Never raises.

        After ``MAX_FAILURES`` consecutive failures a tracker is switched off with one warning.
        """
        numbers = {name: value for name, value in values.items() if _is_number(value)}
        for tracker in list(self._accelerator.trackers):  # a copy, because a failure may remove one
            try:
                # One by one: in `Accelerator.log` a failing tracker would keep the values from those after it.
                tracker.log(numbers, step=step)
                self._failures[tracker.name] = 0
            except Exception as error:  # each tracker has exceptions of its own
                self._count_failure(tracker, error)

    def _count_failure(self, tracker: Any, error: Exception) -> None:
        failures = self._failures.get(tracker.name, 0) + 1
        self._failures[tracker.name] = failures
        if failures >= MAX_FAILURES:
            self._accelerator.trackers.remove(tracker)
            self._warn(tracker, "is switched off for this run", error, "metrics.jsonl has everything")

    def send(self, files: Sequence[ReportFile], step: int) -> None:
        """Send pictures and texts of an evaluation. Never raises.

        After failing for ``MAX_FAILURES`` evaluations in a row, a tracker gets no more of them, with one warning. It
        still gets the numbers, whose failures are counted separately.
        """
        for tracker in self._accelerator.trackers:
            name = tracker.name
            if self._file_failures.get(name, 0) >= MAX_FAILURES:
                continue
            try:
                for file in files:
                    if not send(tracker, file, step):
                        self._tell_once(f"tracker {name} does not accept {file.kind}: the report has them")
                self._file_failures[name] = 0
            except Exception as error:  # each tracker has exceptions of its own
                failures = self._file_failures.get(name, 0) + 1
                self._file_failures[name] = failures
                if failures == MAX_FAILURES:
                    self._warn(tracker, "no longer gets pictures and texts", error, "report/ has them")

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.info("%s", text)

    def _warn(self, tracker: Any, outcome: str, error: Exception, remains: str) -> None:
        logger.warning(
            "tracker %s failed %d times in a row and %s (%s: %s); %s",
            tracker.name,
            MAX_FAILURES,
            outcome,
            type(error).__name__,
            error,
            remains,
        )

    def close(self) -> None:
        """Finish the remaining trackers and clear the list, so that ``end_training`` does not finish them again."""
        for tracker in list(self._accelerator.trackers):
            try:
                tracker.finish()
            except Exception as error:
                logger.warning("tracker %s did not finish: %s: %s", tracker.name, type(error).__name__, error)
        self._accelerator.trackers.clear()


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _init_arguments(run: RunName, folder: str) -> dict[str, dict[str, object]]:
    """Return the init arguments of each tracker for the run name and the folder."""
    wandb: dict[str, object] = {"name": run.run, "dir": folder}
    if run.run_id:
        wandb |= {"id": run.run_id, "resume": "allow"}
    return {
        "wandb": wandb,
        "trackio": {"name": run.run},
        "mlflow": {"run_name": run.run},
        "swanlab": {"experiment_name": run.run, "logdir": folder},
    }

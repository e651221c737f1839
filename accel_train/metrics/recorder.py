"""What a run records: ``metrics.jsonl``, trackers and progress, written by the main process alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from accel_train.config import PositiveInt
from accel_train.metrics.curves import plot_curves
from accel_train.metrics.environment import describe_environment
from accel_train.metrics.progress import Progress
from accel_train.metrics.records import EVENTS, TRAIN_FIELDS, LineWriter, repair_metrics, write_json
from accel_train.metrics.trackers import RunName, Trackers, resolve_trackers
from accel_train.runtime import step_overhead

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.optim import Optimizer

logger = logging.getLogger(__name__)

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class LogConfig:
    """What is written about a run, and how often."""

    log_every: PositiveInt = 10
    """Optimizer steps between two training lines. Only at a log point does the host wait for the device, so 1
    costs speed on a GPU."""

    trackers: tuple[str, ...] = ()
    """Trackers to send to beside metrics.jsonl: tensorboard, wandb, trackio, mlflow, swanlab, or another that
    Accelerate knows. Each needs its package; one that is missing stops the run before training."""

    project: str = "accel_train"
    """Project under which trackers show the run."""

    run_name: str | None = None
    """Name of the run in trackers. None: the name of the output directory."""

    progress_bar: Literal["auto", "on", "off"] = "auto"
    """auto: a bar on a terminal, one plain line per log point elsewhere. on: always the bar. off: lines."""


class Compiled(Protocol):
    """What is recorded of compilation."""

    def fields(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class RunInfo:
    """What is recorded of a run beside losses and throughput."""

    facts: Mapping[str, Any]
    """Once, at the start."""
    compiled: Compiled
    optimizer: Optimizer
    """Its groups know whether they are frozen (``training.optimizers``)."""
    global_batch_size: int

    def fields(self, epoch: float) -> dict[str, Any]:
        """At log points: learning rate, epoch, batch, and what compilation has cost. Does not wait for the device."""
        groups = self.optimizer.param_groups
        trained = next((group for group in groups if not group["frozen"]), groups[0])
        place = {"lr": trained["lr"], "epoch": epoch}
        return self.compiled.fields() | place | {"global_batch_size": self.global_batch_size}


class Saved(Protocol):
    """What is recorded of a checkpoint."""

    @property
    def path(self) -> Path: ...
    @property
    def step(self) -> int: ...


class Recorder:
    """One run's records. Made and called on every process; all but the main one do nothing.

    No method is collective, and none raises for a full disk or a tracker out of reach: training goes on.
    Values are numbers of the host, already reduced over processes. A context manager, or call ``close``.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        output_dir: Path,
        options: LogConfig,
        *,
        max_steps: int,
        start_step: int = 0,
        config: Mapping[str, Any] = NOTHING,
        facts: Mapping[str, object] = NOTHING,
    ) -> None:
        """Make ``metrics.jsonl`` that of a run which stands at ``start_step`` (training and evaluation lines
        beyond it are dropped: not for looking at an older checkpoint), write the environment, the config and,
        if ``start_step`` > 0, a resume line; start the trackers, which may raise ``UsageError``.

        ``config`` is the resolved config, nested. ``facts`` are added to the environment line, over what is
        found here; a ``run_id`` among them lets W&B go on with the same run.
        """
        self._every = options.log_every
        self._max_steps = max_steps
        self._step = start_step
        self._main = accelerator.is_main_process
        self._accelerator, self._directory = accelerator, output_dir
        self._started = time.perf_counter()
        names = resolve_trackers(options.trackers)
        if not self._main:
            return
        self._writer = _open_metrics(output_dir, start_step)
        self.record("environment", describe_environment(accelerator) | dict(facts))
        if config:
            self.record("config", {"config": config})
        if start_step:
            self.record("resume", step=start_step)
        name = options.run_name or output_dir.resolve().name
        run = RunName(options.project, name, str(facts["run_id"]) if facts.get("run_id") else None)
        self._trackers = Trackers(accelerator, names, output_dir, run=run, config=config)
        self._progress = Progress(options.progress_bar, max_steps, start_step)

    def due(self, step: int) -> bool:
        """Whether ``step`` is a log point: a function of the step, so the same on every process."""
        return step % self._every == 0 or step in (1, self._max_steps)

    def advance(self, step: int) -> None:
        """After every step: moves the bar. Host only."""
        self._step = step
        if self._main:
            self._progress.advance(step)

    def train(self, step: int, fields: Mapping[str, object]) -> None:
        """One training line, to file, trackers and console. Raises ``ValueError`` where a field of
        ``TRAIN_FIELDS`` is missing, which is the recipe's mistake and shows at its first log point."""
        if missing := [name for name in TRAIN_FIELDS if name not in fields]:
            raise ValueError(f"the training line of step {step} lacks {', '.join(missing)}; add them")
        if self._main:
            self.record("train", fields, step=step)
            self._trackers.log({f"train/{k}": v for k, v in fields.items()}, step)
            self._progress.show(step, fields)
        step_overhead.collect_garbage()  # here the host has waited for the device anyway

    def evaluation(self, step: int, values: Mapping[str, object]) -> None:
        """One evaluation line, to file, trackers and console; and the report, whose picture has this evaluation."""
        if self._main:
            self.record("evaluation", values, step=step)
            write_report(self._accelerator, self._directory, step, values)
            self._trackers.log({f"evaluation/{k}": v for k, v in values.items()}, step)
            numbers = [f"{k} {v:.4g}" for k, v in values.items() if isinstance(v, (int, float))]
            logger.info("evaluation at step %d: %s", step, "  ".join(numbers))

    def saved(self, checkpoint: Saved) -> None:
        """A committed checkpoint: ``on_commit`` of the saver."""
        self.record("checkpoint", {"path": checkpoint.path}, step=checkpoint.step)

    def record(self, event: str, fields: Mapping[str, object] = NOTHING, *, step: int | None = None) -> None:
        """Any event of the schema (``EVENTS``), to the file alone."""
        if event not in EVENTS:
            raise ValueError(f"event {event!r} is not in the schema; use one of {', '.join(EVENTS)}")
        if self._main:
            head: dict[str, object] = {"event": event} if step is None else {"event": event, "step": step}
            elapsed = time.perf_counter() - self._started
            head |= {"time": time.time(), "elapsed_seconds": elapsed, "processor_seconds": time.process_time()}
            self._writer.write({**head, **fields, **head})

    def close(self) -> None:
        """Finish trackers and bar; may be called twice."""
        if self._main:
            self._progress.close()
            self._trackers.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        reason = "finished" if self._step >= self._max_steps else "stopped"  # asked to stop, and saved
        self.record("end", {"reason": kind.__name__ if kind else reason}, step=self._step)
        self.close()


def _open_metrics(output_dir: Path, start_step: int) -> LineWriter:
    path = output_dir / "metrics.jsonl"
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        if dropped := repair_metrics(path, start_step):
            logger.info("%s: dropped %d lines that are torn or beyond step %d", path, dropped, start_step)
    except OSError as error:
        text = "%s could not be repaired (%s); lines beyond step %d stay in it"
        logger.warning(text, path, error, start_step)
    return LineWriter(path)


def write_report(accelerator: Accelerator, directory: Path, step: int, figures: Mapping[str, object]) -> None:
    """Write ``evaluation.json`` and, where there are metrics, ``curves.png``. Any process; the main one writes."""
    if not accelerator.is_main_process:
        return
    try:
        write_json(directory / "evaluation.json", {"step": step, **figures})
        if (directory / "metrics.jsonl").exists():
            plot_curves(directory / "metrics.jsonl", directory / "curves.png")
    except OSError as error:
        logger.warning("the report in %s could not be written (%s); training is not affected", directory, error)

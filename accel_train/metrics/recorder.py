"""Records of a run: ``metrics.jsonl``, trackers and progress. Only the main process writes."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from accel_train.config import UsageError
from accel_train.metrics.curves import plot_curves
from accel_train.metrics.environment import describe_environment
from accel_train.metrics.panels import HEAD
from accel_train.metrics.progress import BY_TIME, OWN, Labels, LogConfig, Progress
from accel_train.metrics.records import EVENTS, TRAIN_FIELDS, LineWriter, repair_metrics, write_json
from accel_train.metrics.tracking.report_files import ReportFiles
from accel_train.metrics.tracking.trackers import RunName, Trackers, resolve_trackers
from accel_train.store.atomic_files import replace_file
from accel_train.store.names import EVALUATION_FILE, METRICS_FILE, REPORT, STEP, files_of_steps
from accel_train.wording import FILE_ONLY

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.optim import Optimizer

logger = logging.getLogger(__name__)

NOTHING: Mapping[str, Any] = MappingProxyType({})
NO_LABELS = Labels()
OF_A_KIND = ("loss", "grad_norm", OWN)
"""Name prefixes of the fields whose values depend on the kind of loss of their step."""


class Compiled(Protocol):
    """Cost of compilation, for training lines."""

    def fields(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class RunInfo:
    """Recorded values of a run beside losses and throughput."""

    facts: Mapping[str, Any]
    """Recorded once, at the start."""
    compiled: Compiled
    optimizer: Optimizer
    """Each of its groups has the key ``frozen`` (``training.optimizers``)."""

    def fields(self, epoch: float, global_batch_size: int) -> dict[str, Any]:
        """Return learning rate, epoch, batch size and cost of compilation. Does not wait for the device."""
        groups = self.optimizer.param_groups
        # A frozen group has learning rate 0, which says nothing about the schedule.
        trained = next((group for group in groups if not group["frozen"]), groups[0])
        return {
            **self.compiled.fields(),
            "lr": trained["lr"],
            "epoch": epoch,
            "global_batch_size": global_batch_size,
        }


class Saved(Protocol):
    """Recorded attributes of a checkpoint."""

    @property
    def path(self) -> Path: ...
    @property
    def step(self) -> int: ...


class Recorder:
    """Records of one run. Built and called on every process, with effect on the main process only.

    No method is a collective. A full disk or an unreachable tracker never raises, so training continues. Values are
    host numbers, already reduced over processes. Use it as a context manager or call ``close``.
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
        labels: Labels = NO_LABELS,
    ) -> None:
        """Rewind ``metrics.jsonl`` to ``start_step``, write the first lines, and start the trackers.

        Training and evaluation lines beyond ``start_step`` are dropped, so an older checkpoint must not be inspected
        with a recorder. The first lines are the environment, the config and, after a resume, a resume line. ``config``
        is the nested, resolved config. ``facts`` extend and override the environment line. Their ``run_id`` lets W&B
        continue the same run. ``labels`` are kept in that line for drawing curves. Raises ``UsageError`` if a tracker
        cannot start.
        """
        self._every = options.log_every
        self._max_steps = max_steps
        self._step = start_step
        self._main = accelerator.is_main_process
        self._accelerator = accelerator
        self._directory = output_dir
        self._started = time.perf_counter()
        # On every process: if one alone raised, the others would wait for it in their next collective.
        names = resolve_trackers(options.trackers)
        if not self._main:
            return
        # Before anything else writes a line: the repair replaces the file.
        self._writer = _open_metrics(output_dir, start_step)
        environment = describe_environment(accelerator) | dict(facts)
        if labels != NO_LABELS:
            environment["labels"] = asdict(labels)
        self.record("environment", environment)
        if config:
            self.record("config", {"config": config})
        if start_step:
            self.record("resume", step=start_step)
        run = _run_name(options, output_dir, facts)
        self._trackers = Trackers(accelerator, names, output_dir, run=run, config=config)
        self._report_files = ReportFiles(output_dir / REPORT) if names else None
        self._progress = Progress(options.progress_bar, max_steps, start_step, labels.loss_of)
        self._own_summary = labels.own_summary
        self._loss_of = labels.loss_of

    def due(self, step: int) -> bool:
        """Return True if ``step`` is a log point. It depends on the step alone, so all processes agree."""
        # Also the first step, to show a run that goes wrong at once, and the last, to complete the curves.
        return step % self._every == 0 or step in (1, self._max_steps)

    def end(self) -> None:
        """Make the step reached so far the last one, so that the end line of a run that stops early says finished."""
        self._max_steps = self._step

    def advance(self, step: int) -> None:
        """Move the bar after every step. Does not wait for the device."""
        self._step = step
        if self._main:
            self._progress.advance(step)

    def train(self, step: int, fields: Mapping[str, object], more: Mapping[str, object] = NOTHING) -> None:
        """Write a training line to file, trackers and console. ``more`` are a recipe's own fields.

        Raises ``ValueError`` if one of ``TRAIN_FIELDS`` is missing, and ``UsageError`` if one of ``more`` has the name
        of another field.
        """
        for name in more:
            # Metrics of the GPU are in the main process's lines only, and all processes must refuse the name.
            if name in fields or name in HEAD or name.startswith("gpu_"):
                raise UsageError(
                    f"training.report(..., {name}=...): training lines have a field {name!r} of their own; give the "
                    f"recipe's another name, such as my_{name}"
                )
        fields = {**fields, **more}
        missing = [name for name in TRAIN_FIELDS if name not in fields]
        if missing:
            raise ValueError(f"the training line of step {step} lacks {', '.join(missing)}; add them")
        if self._main:
            self.record("train", fields, step=step)
            self._trackers.log(tracked(fields, self._loss_of), step)
            self._progress.show(step, fields)
        # Imported here because it imports accelerate, which reading a run does not need.
        from accel_train.runtime import step_overhead

        # The device is idle now, since the host has just waited for the loss.
        step_overhead.collect_garbage()

    def evaluation(self, step: int, values: Mapping[str, object]) -> None:
        """Write an evaluation line to file, trackers and console, and update the report.

        Trackers also get the pictures and texts in the report that were written since the last evaluation.
        """
        if self._main:
            # The record comes first, because the curves in the report are drawn from the file.
            self.record("evaluation", values, step=step)
            write_report(self._accelerator, self._directory / REPORT, step, values)
            named = {f"evaluation/{name}": value for name, value in values.items()}
            self._trackers.log(named, step)
            if self._report_files is not None:  # the recipe has written them in its evaluation
                self._trackers.send(self._report_files.take_written(), step)
            log_evaluation(step, values, own_summary=self._own_summary)

    def saved(self, checkpoint: Saved) -> None:
        """Record a committed checkpoint. The saver calls it as ``on_commit``."""
        self.record("checkpoint", {"path": checkpoint.path}, step=checkpoint.step)

    def record(self, event: str, fields: Mapping[str, object] = NOTHING, *, step: int | None = None) -> None:
        """Write an event of the schema (``EVENTS``), to the file only."""
        if event not in EVENTS:
            raise ValueError(f"event {event!r} is not in the schema; use one of {', '.join(EVENTS)}")
        if self._main:
            self._writer.write(self._line(event, fields, step))

    def out_of_memory(self, step: int, fields: Mapping[str, object]) -> None:
        """Write the event of running out of memory, on whichever process met it: the main one may never know."""
        # A writer of its own, since only the main process keeps one.
        writer = LineWriter(self._directory / METRICS_FILE)
        named = {**fields, "process": self._accelerator.process_index}
        writer.write(self._line("out_of_memory", named, step))

    def _line(self, event: str, fields: Mapping[str, object], step: int | None) -> dict[str, object]:
        head: dict[str, object] = {"event": event}
        if step is not None:
            head["step"] = step
        head["time"] = time.time()
        head["elapsed_seconds"] = time.perf_counter() - self._started
        head["processor_seconds"] = time.process_time()
        # Twice: the first sets the order of the keys, the second overrides fields of the same name.
        return {**head, **fields, **head}

    def close(self) -> None:
        """Finish trackers and bar. A second call has no effect."""
        if self._main:
            self._progress.close()
            self._trackers.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # The class alone: a message may have paths and data in it, and this file is shared.
            reason = kind.__name__
        elif self._step >= self._max_steps:
            reason = "finished"
        else:
            reason = "stopped"  # a stop request, after its save
        # Also written after an error, so that a file without an end line is that of a run that was killed.
        self.record("end", {"reason": reason}, step=self._step)
        self.close()


def tracked(fields: Mapping[str, object], loss_of: str | None) -> dict[str, object]:
    """Return the values of a training line by their names in trackers.

    Losses and gradient norms of different kinds are not comparable, so each kind has its own series.
    """
    named = {f"train/{name}": value for name, value in fields.items()}
    if loss_of is None or loss_of not in fields:
        return named
    for name in fields:
        # Losses by time are means over the steps of all kinds since the last line.
        if name.startswith(OF_A_KIND) and not BY_TIME.search(name):
            named[f"train/{name}_{fields[loss_of]}"] = named.pop(f"train/{name}")
    return named


def _run_name(options: LogConfig, output_dir: Path, facts: Mapping[str, object]) -> RunName:
    name = options.run_name or output_dir.resolve().name
    run_id = None
    if facts.get("run_id"):
        run_id = str(facts["run_id"])
    return RunName(options.project, name, run_id)


def _open_metrics(output_dir: Path, start_step: int) -> LineWriter:
    path = output_dir / METRICS_FILE
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        dropped = repair_metrics(path, start_step)
        if dropped:
            logger.info("%s: dropped %d lines that are torn or beyond step %d", path, dropped, start_step)
    except OSError as error:
        text = "%s could not be repaired (%s); lines beyond step %d stay in it"
        logger.warning(text, path, error, start_step)
    return LineWriter(path)


def log_evaluation(step: int, values: Mapping[str, object], *, own_summary: bool) -> None:
    """Log the numbers of an evaluation in one line, to the file only if the recipe logs its own summary."""
    numbers: list[str] = []
    for name, value in values.items():
        if isinstance(value, (int, float)):
            numbers.append(f"{name} {value:.4g}")
    logger.info("evaluation at step %d: %s", step, "  ".join(numbers), extra={FILE_ONLY: own_summary})


def write_report(
    accelerator: Accelerator,
    report: Path,
    step: int,
    metrics: Mapping[str, object],
    measured_on: Mapping[str, object] = NOTHING,
) -> None:
    """Write ``evaluation.json``, and ``curves.png`` if there are metrics of a run around ``report``.

    ``measured_on`` has the options of the evaluated data, if they are not the data of the run. Every process may call
    it. Only the main process writes.
    """
    if not accelerator.is_main_process:
        return
    records = report.parent / METRICS_FILE
    content: dict[str, object] = {"step": step}
    if measured_on:
        content["measured_on"] = measured_on
    try:
        report.mkdir(parents=True, exist_ok=True)
        write_json(report / EVALUATION_FILE, content | dict(metrics))
        if records.exists():
            plot_curves(records, report / "curves.png")
    except OSError as error:
        logger.warning("%s could not be written (%s); training is not affected", report, error)


def write_markdown(path: Path, lines: Sequence[str]) -> None:
    """Write a page of the report, for people. Call it on the main process. A write error is logged as a warning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, "\n".join(lines).encode("utf-8", "replace"))
    except OSError as error:
        logger.warning("%s could not be written (%s); training is not affected", path, error)


def write_page_of_step(report: Path, name: str, lines: Sequence[str], step: int) -> None:
    """Write a page of an evaluation as ``NAME.md``, and keep it as ``NAME/step_STEP.md``. Main process.

    Pages of later steps come from training that a resume has discarded, and are deleted.
    """
    write_markdown(report / f"{name}.md", lines)
    folder = report / name
    with suppress(OSError):  # writing the page below logs the same error
        folder.mkdir(parents=True, exist_ok=True)
        for other, page in files_of_steps(folder, ".md").items():
            if other > step:
                page.unlink()
    write_markdown(folder / f"{STEP}{step:08d}.md", lines)


def quoted(text: str) -> str:
    """Return a text of any number of lines as one quoted line of Markdown."""
    # Escaped, or a literal `&lt;` would be shown as `<`. Markdown shows any other `&` as it is.
    words = re.sub(r"&(?=#?\w+;)", "&amp;", " ".join(text.split()))
    # Escaped, or `<think>` and the like would be read as HTML and not shown.
    words = words.replace("<", "&lt;")
    return f"> {words or '(empty)'}"

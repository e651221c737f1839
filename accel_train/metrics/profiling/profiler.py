"""Profile a range of training steps on the main process, and write the results into the report."""

from __future__ import annotations

import gzip
import json
import logging
import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from accel_train.metrics.logs import info
from accel_train.metrics.profiling import memory_history
from accel_train.metrics.profiling.advice import Setting, advise
from accel_train.metrics.profiling.names import DATA_WAIT, STEP
from accel_train.metrics.profiling.options import StepRange
from accel_train.metrics.profiling.shares import events_of, measure
from accel_train.metrics.profiling.summary import summarise
from accel_train.store.atomic_files import replace_file
from accel_train.store.names import REPORT

logger = logging.getLogger(__name__)
TRACE = "profile_trace.json.gz"
OPERATORS = "profile_operators.txt"
SUMMARY = "profile.md"
ROWS = 30


class Step(Protocol):
    """Batches of a step, with the attributes that the profile needs."""

    @property
    def done(self) -> int: ...


S = TypeVar("S", bound=Step)
Pause = Callable[[], AbstractContextManager[None]]
"""Leaves the time of its body out of the throughput."""


def profiled(
    steps: Generator[S], wanted: StepRange, setting: Setting, start_step: int, device: torch.device, pause: Pause
) -> Generator[S]:
    """Yield ``steps`` and profile those in ``wanted``, each with its wait for data. Main process only.

    A run that resumes within the range profiles the rest of it. A run that resumes past it profiles nothing, and one
    that ends within it writes nothing. No collective: while this process writes the profile, the others wait for it in
    their next reduction.
    """
    with closing(steps):
        done = start_step
        # Without the profiler, since even an idle one slows the steps down.
        while done < wanted.start:
            batches = next(steps, None)
            if batches is None:
                return
            yield batches
            done = batches.done
        if done < wanted.stop:
            yield from _measured(steps, wanted, setting, device, pause)
        yield from steps


def _measured(
    steps: Generator[S], wanted: StepRange, setting: Setting, device: torch.device, pause: Pause
) -> Generator[S]:
    profiler = _profiler(device)
    # Paused, because the first start of torch's profiler takes a second. The pause also waits for earlier kernels.
    with pause():
        profiler.start()
        if setting.records_memory:
            memory_history.start()
    finished = False
    try:
        while not finished:
            with record_function(STEP):
                with record_function(DATA_WAIT):
                    batches = next(steps, None)
                if batches is None:
                    return
                yield batches
                finished = batches.done == wanted.stop
                # Kernels that are still queued belong to the profiled steps.
                if finished:
                    _wait(device)
    finally:
        with pause():
            profiler.stop()
            if setting.records_memory:
                _end_memory_history(setting, finished)
        if not finished:
            logger.warning("the run ended before step %d: its profile is not written", wanted.stop)
    with pause():
        _write(profiler, wanted, setting)


def _profiler(device: torch.device) -> profile:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, acc_events=True)


def _end_memory_history(setting: Setting, finished: bool) -> None:
    path = setting.directory / REPORT / memory_history.SNAPSHOT
    # Written before the recording stops, which discards it.
    if finished and memory_history.write(path):
        info(logger, f"written: {path}, for https://pytorch.org/memory_viz")
    memory_history.stop()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _write(profiler: profile, wanted: StepRange, setting: Setting) -> None:
    """Write the trace, the operators and the summary. An error, such as a full disk, is logged as a warning."""
    report = setting.directory / REPORT
    try:
        # Before its first evaluation a run may have no report folder.
        report.mkdir(exist_ok=True)
        trace = _write_trace(profiler, report / TRACE)
        shares = measure(events_of(trace))
        # Self time, because the total of an operator includes the operators it calls.
        order = "self_cuda_time_total" if shares.on_device else "self_cpu_time_total"
        table: str = profiler.key_averages().table(sort_by=order, row_limit=ROWS)
        replace_file(report / OPERATORS, table.encode())
        lines = summarise(wanted, shares, advise(shares, setting), setting)
        replace_file(report / SUMMARY, ("\n".join(lines) + "\n").encode())
    except (OSError, EOFError, ValueError) as error:
        logger.warning("the profile could not be written into %s (%s); training is not affected", report, error)
        return
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.parts.items())
    info(logger, f"profile of steps {wanted}: {parts}; written: {report / SUMMARY}")


def _write_trace(profiler: profile, path: Path) -> dict[str, Any]:
    # The profiler writes in place, so the file gets its final name once it is complete.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".profile-") as folder:
        written = Path(folder) / TRACE
        profiler.export_chrome_trace(str(written))
        with gzip.open(written, "rt", encoding="utf-8") as file:
            trace: dict[str, Any] = json.load(file)
        os.replace(written, path)
    return trace

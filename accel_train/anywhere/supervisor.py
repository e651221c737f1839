"""Start a run again and again: with another layout when the devices change, with the same one after a failure.

torchrun inside each start watches its own processes. This module watches the number of devices and the checkpoints, so
that a run saves and stops while it can, and continues with the devices that are left.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from accel_train.anywhere import record
from accel_train.anywhere.devices import Devices, ListedDevices, VisibleDevices
from accel_train.anywhere.flags import Request
from accel_train.anywhere.layouts import Layout, Layouts
from accel_train.commands.bundled import find_recipe
from accel_train.compare.runs import kill_family, read_config
from accel_train.config import UsageError, expand_path
from accel_train.launch_files.parents import tied_to_parent
from accel_train.runtime.exiting import EXIT_PREEMPTED, STARTED_AGAIN_VARIABLE
from accel_train.store import manifest

SECONDS_BETWEEN_LOOKS = 1.0
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def run_anywhere(request: Request) -> int:
    """Train to the end and return the exit code: 0 done, 2 usage error, 75 stopped, else that of the last failure."""
    recipe = find_recipe(request.recipe)
    with tempfile.TemporaryDirectory(prefix="accel-train-run-") as folder, Stops() as stops:
        try:
            options = read_config(recipe, request.arguments)
            devices = VisibleDevices() if request.devices is None else ListedDevices(request.devices)
        except UsageError:
            # Ctrl-C ends the processes that print the options and count the devices as well.
            if not stops.requested:
                raise
            _say(f"stopped before the first start; the same command continues (exit code {EXIT_PREEMPTED})")
            return EXIT_PREEMPTED
        layouts = Layouts(request, options, Path(folder), on_cpu=_has_no_accelerator())
        supervisor = Supervisor(
            request, layouts, devices, stops, expand_path(str(options["output_dir"])), str(options["precision"])
        )
        return supervisor.run()


def _has_no_accelerator() -> bool:
    import torch

    return not torch.accelerator.is_available()


class Stops:
    """Notes a signal to this process. ``Supervisor`` then sends SIGTERM to the child, which saves and exits with 75."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Stops:
        # nohup makes the process ignore SIGHUP, and a shell makes one in the background ignore SIGINT.
        heard = [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, *_: object) -> None:
        # Nothing more, because the handler may interrupt a start that is half made.
        self.requested = True


@dataclass(frozen=True)
class _Ended:
    code: int
    reason: str
    changed: bool
    """True if the start was asked to stop because the devices changed."""


@dataclass
class Supervisor:
    """One run over all its starts."""

    request: Request
    layouts: Layouts
    devices: Devices
    stops: Stops
    directory: Path
    precision: str
    segments: list[record.Segment] = field(default_factory=list[record.Segment])
    _failures: int = 0
    _newest: int = -1
    """Newest checkpoint at the last failure."""
    _before: str | None = None
    """Id of the run in the directory before this command, which --overwrite may replace."""

    def run(self) -> int:
        """Start the run until it is finished, stopped or given up, and return the exit code."""
        self._before = record.run_id(self.directory)
        self.segments = record.load(self.directory)
        while True:
            count = self._wait_for_devices()
            if self.stops.requested:
                return self._stopped()
            layout = self._choose(count)
            if layout is None:
                return self._stopped()
            ended = self._start(layout)
            # The devices are counted again after any end, because they may be the reason.
            code = self._code_to_return(ended)
            if code is not None:
                return code

    def _choose(self, count: int) -> Layout | None:
        """Return the layout for ``count`` devices, None if this process was asked to stop. Raises ``UsageError``."""
        try:
            layout = self.layouts.choose(count)
        except UsageError:
            # Ctrl-C ends a search for a plan as well, and nothing is wrong with what was asked for.
            if not self.stops.requested:
                raise
            return None
        return None if self.stops.requested else layout

    def _wait_for_devices(self) -> int:
        count = self.devices.count()
        if self.layouts.processes(count) == 0:
            _say(f"{count} device(s), and {self.layouts.least} are required; waiting for more")
        while self.layouts.processes(count) == 0 and not self.stops.requested:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            count = self.devices.count()
        return count

    def _start(self, layout: Layout) -> _Ended:
        """Launch once, wait for the end and record it."""
        # A resume removes the lines that it is going to repeat, so they are read before.
        seen = record.Observed.read(self.directory)
        _say(f"starting {layout}")
        began = time.monotonic()
        child = subprocess.Popen(
            # If this process is killed, the launcher gets SIGTERM and saves.
            tied_to_parent(self._command(layout)),
            env=os.environ | self._environment(),
            # Ctrl-C then reaches this process alone, which asks for one stop and not for two.
            start_new_session=True,
        )
        ended = self._watch(child, layout)
        segment = record.segment_of(
            self.directory,
            seen,
            layout=str(layout),
            processes=layout.processes,
            ended=ended.reason,
            seconds=time.monotonic() - began,
        )
        self._record(segment)
        return ended

    def _command(self, layout: Layout) -> list[str]:
        command = "rehearse" if self.request.rehearse else "launch"
        launcher = [sys.executable, "-m", "accel_train.cli", command, "--config_file", str(layout.file)]
        return [*launcher, "--num_processes", str(layout.processes), self.request.recipe, *layout.arguments]

    def _environment(self) -> dict[str, str]:
        """Say that --overwrite is obeyed, once it is: the directory then holds another run than before."""
        present = record.run_id(self.directory)
        if present is None or present == self._before:
            return {}
        return {STARTED_AGAIN_VARIABLE: "1"}

    def _watch(self, child: subprocess.Popen[bytes], layout: Layout) -> _Ended:
        """Wait for the end of ``child``. Ask it to stop on a signal or a change of devices."""
        asked: str | None = None
        deadline = math.inf
        candidate = layout.processes
        while True:
            # Only the timeout is suppressed: the child has not ended yet.
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(SECONDS_BETWEEN_LOOKS)
                return _Ended(code, _reason(code, asked), changed=asked is not None and not self.stops.requested)
            if time.monotonic() > deadline:
                _say(f"it has not ended {self.request.grace_seconds:g} s after it was asked to stop; killing it")
                kill_family(child)
            if asked is not None:
                continue
            wanted = self.layouts.processes(self.devices.count())
            if self.stops.requested:
                asked = "stopped"
            elif wanted == candidate != layout.processes:
                # Counted twice, because devices may come or go one after the other.
                asked = f"stopped for {wanted} process(es)"
            candidate = wanted
            if asked is not None:
                _say(f"asking it to save and stop: {asked}")
                deadline = time.monotonic() + self.request.grace_seconds
                child.send_signal(signal.SIGTERM)

    def _record(self, segment: record.Segment) -> None:
        # --overwrite has replaced the run of the earlier ones.
        if self._before not in (None, segment.run_id):
            self.segments = [old for old in self.segments if old.run_id != self._before]
        self.segments.append(segment)
        # A start that was refused may have made no directory.
        if self.directory.is_dir():
            record.save(self.directory, self.segments, self.precision)

    def _code_to_return(self, ended: _Ended) -> int | None:
        """Return the exit code of the command, or None to start again."""
        if ended.code == 0:
            return self._finish()
        if self.stops.requested or (ended.code == EXIT_PREEMPTED and not ended.changed):
            return self._stopped()
        # The same command would be refused again.
        if ended.code == 2:
            return 2
        if ended.code == EXIT_PREEMPTED:
            return None
        # A run that makes progress between failures is worth a new start, however many there were.
        newest = self._newest_step()
        self._failures = 1 if newest > self._newest else self._failures + 1
        self._newest = newest
        if self._failures > self.request.max_restarts:
            _say(f"failed {self._failures} times in a row without a new checkpoint (--max_restarts)")
            # The code of a killed process is its negative signal.
            return max(ended.code, 1)
        _say(f"exit code {ended.code}; starting again from the newest checkpoint")
        return None

    def _newest_step(self) -> int:
        return max((step for step, _ in manifest.committed(self.directory / "checkpoints")), default=-1)

    def _stopped(self) -> int:
        """Print how to continue, after the reports of the launchers, and return exit code 75."""
        newest = self._newest_step()
        saved = "nothing is saved" if newest < 0 else f"step {newest} is saved"
        without = " without --overwrite" if "--overwrite" in self.request.arguments else ""
        _say(f"stopped, {saved} in {self.directory}; the same command{without} continues (exit code {EXIT_PREEMPTED})")
        return EXIT_PREEMPTED

    def _finish(self) -> int:
        verdict = record.save(self.directory, self.segments, self.precision)
        _say(f"{record.describe(verdict)} {self.directory / record.REPORT / record.PAGE}")
        return 1 if verdict.problems else 0


def _reason(code: int, asked: str | None) -> str:
    if code == 0:
        return "finished"
    if code == EXIT_PREEMPTED:
        return asked or "stopped"
    if code < 0:
        return f"killed by signal {-code}"
    return f"failed with exit code {code}"


def _say(text: str) -> None:
    print(f"accel-train run: {text}", file=sys.stderr, flush=True)

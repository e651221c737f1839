"""When to stop: signals and a ``STOP`` file become one decision that every process takes at the same step.

Until the first step of a start is done there is nothing to save, and a stop ends the process at once
(``early_stop``). From then on a handler sets a flag and nothing else. At every step boundary the processes reduce
one small vector on the host and read it a step late, so nobody waits: the device goes on computing, and all save the
same step and leave together. An evaluation asks between two forwards.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from accel_train.runtime import early_stop
from accel_train.runtime.early_stop import STOP_FILE, end_with_the_launcher, leave, listened

SAME_REQUEST_SECONDS = 2.0
"""A terminal and torchrun both pass on one Ctrl-C; what follows that soon is the same request."""
STUCK = ("Timed out waiting", "timed out after", "Wait timeout", "Application timeout")
GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "Connection timed out",
    "No route to host",
    "Network is unreachable",
    "Host is down",
)
"""How gloo and NCCL say it."""


class StopRequests:
    """Signals and the ``STOP`` file of one process. Build it on the main thread; ``close`` gives the signals back.

    SIGTERM, SIGUSR1, SIGHUP (unless it is ignored, as under nohup) and the first SIGINT ask to save and stop; a
    second signal ends the process at once. Under a launcher the launcher's death counts as SIGTERM: ``accelerate
    launch`` passes none on to a single process. It is never the second: Ctrl-C kills the launcher too, sooner or later.

    With ``alone`` (one process) the first signal ends the process at once until ``begin`` is called, if a recipe was
    started by ``run_main``: the first step may compile for minutes, and there is nothing to save.
    """

    def __init__(self, directory: Path, *, main: bool, alone: bool = False) -> None:
        global _last
        self.reason: str | None = None
        self.begun = False
        """Whether this start has done something that can be lost."""
        self._leaves = alone and early_stop.EARLY.installed
        self._since: float | None = None
        self._file = directory / STOP_FILE if main else None
        self._looked = 0.0
        self._parent = os.getppid()
        early_stop.EARLY.end()
        self._before: dict[int, Any] = {number: signal.signal(number, self._on_signal) for number in listened()}
        end_with_the_launcher()
        _last = self

    def begin(self) -> None:
        """From now on there is something to save. Cheap; after every step."""
        self.begun = True

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._leaves and not self.begun:
            leave(number)
        now = time.monotonic()
        orphaned = os.getppid() != self._parent
        self._parent = os.getppid()
        if orphaned and self._since is not None:
            return
        if self._since is not None and now - self._since > SAME_REQUEST_SECONDS:
            os.write(2, b"second signal: stopping at once; the last committed checkpoint stands\n")
            os._exit(128 + number)
        if self._since is None:
            self._since = now
            self.reason = signal.Signals(number).name

    @property
    def requested(self) -> bool:
        """Whether this process has been asked to stop. Looks for the file once a second, on the main process."""
        now = time.monotonic()
        if self.reason is None and self._file is not None and now - self._looked > 1.0:
            self._looked = now
            if self._file.exists():
                self.reason = f"the file {self._file}"
        return self.reason is not None

    def close(self) -> None:
        """Give the signals back, and take the ``STOP`` file away if it was obeyed: the next start is to train."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._file is not None and self.reason is not None:
            self._file.unlink(missing_ok=True)


_last: StopRequests | None = None


def stopped_before_the_first_step() -> bool:
    """Whether this start was asked to stop before it had done anything: an error after that is the stop's doing, such
    as a collective whose other processes have left."""
    return _last is not None and _last.reason is not None and not _last.begun


class Agreement:
    """Named integers that all processes agree on at a step boundary, without waiting for one another.

    Built on every rank. ``reductions`` names the values and says of each whether the largest (``max``) or the smallest
    (``min``) over the ranks counts. Messages go over gloo between hosts, never over the device.
    """

    def __init__(
        self, accelerator: Accelerator, reductions: Mapping[str, Callable[..., int]], timeout_seconds: float
    ) -> None:
        self._world_size = accelerator.num_processes
        self._signs = {name: -1 if reduction is min else 1 for name, reduction in reductions.items()}
        self.group: Any = None
        """gloo over all processes, for host tensors; None on one process."""
        self._pending: tuple[Any, torch.Tensor] | None = None
        if self._world_size > 1:
            interface = os.environ.get("NCCL_SOCKET_IFNAME", "")
            if interface.replace(",", "").isalnum():  # not NCCL's own patterns; gloo reads a variable of its own
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            try:
                self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
            except RuntimeError as error:
                error.add_note("processes also talk over gloo: name the hosts' interface in GLOO_SOCKET_IFNAME")
                raise

    def exchange(self, values: Mapping[str, int]) -> Mapping[str, int] | None:
        """Give this rank's values; return the reduced ones of the last call, on one process these. Every rank, once a
        step. None at the first call of several processes."""
        assert values.keys() == self._signs.keys()
        if self._world_size == 1:
            return values
        agreed = None
        if self._pending is not None:
            work, reduced = self._pending
            work.wait()
            reduced_values = zip(self._signs.items(), reduced.tolist(), strict=True)
            agreed = {name: sign * value for (name, sign), value in reduced_values}
        # One reduction for all of them: the smallest is the largest of the negated.
        mine = torch.tensor([sign * values[name] for name, sign in self._signs.items()], dtype=torch.int64)
        self._pending = (dist.all_reduce(mine, dist.ReduceOp.MAX, group=self.group, async_op=True), mine)
        return agreed

    def any(self, flag: bool) -> bool:
        """Whether any rank's flag is set. Every rank; waits for all of them, on the host."""
        if self._world_size == 1:
            return flag
        mine = torch.tensor([int(flag)])
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=self.group)
        return bool(mine)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank. Waits for all of them."""
        if self._world_size == 1:
            return [value]
        values: list[Any] = [None] * self._world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def close(self) -> None:
        """Take the last answer, which every rank has been promised."""
        if self._pending is not None:
            self._pending[0].wait()
            self._pending = None


def explain(error: BaseException | None) -> None:
    """Add a note to the error of a collective: which one it was, what it means and what to do. Others stay as they are.

    torch names neither the operation nor the option, and the process that reports is the one that waited in vain.
    """
    frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)] if error else []
    if error is None or not frames:
        return
    own = next(((f, n) for f, n, _ in reversed(frames) if "site-packages" not in f), frames[0][:2])
    where = f"{frames[-1][2]}, called at {own[0]}:{own[1]},"
    text = str(error)
    if any(words in text for words in STUCK):
        error.add_note(
            f"{where} waited in vain for another process, which is stuck or slow: its logs/rank_N.log ends with what "
            "it did last, and `py-spy dump --pid PID` shows where it is. If it was only slow, give a larger "
            "--collective_timeout_seconds."
        )
    elif any(words in text for words in GONE):
        error.add_note(
            f"{where} failed because another process has ended or its host is gone; its logs/rank_N.log has the error "
            "to look for."
        )

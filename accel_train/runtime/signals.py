"""Stop requests: signals and a ``STOP`` file become one decision, taken by every process at the same step.

Before the first step of a start is done there is nothing to save, and a stop ends the process at once
(``early_stop``). From then on a handler only sets a flag. At every step boundary the processes reduce one small vector
on the host and read it one step later, so that nobody waits: the device continues computing, and all processes save the
same step and exit together. An evaluation checks between two forwards.
"""

from __future__ import annotations

import os
import signal
import time
import weakref
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
"""A terminal and torchrun both forward one Ctrl-C. A signal this soon after the first is the same request."""


class StopRequests:
    """Signals and the ``STOP`` file of one process. Built on the main thread. ``close`` restores the handlers.

    SIGTERM, SIGUSR1, SIGHUP (unless it is ignored, as under nohup) and the first SIGINT ask to save and stop. A second
    signal ends the process at once. The launcher's death counts as SIGTERM, because ``accelerate launch`` forwards none
    to a single process. It never counts as the second signal: Ctrl-C kills the launcher too, sooner or later.

    With ``alone`` (one process) and a recipe started by ``run_main``, the first signal ends the process at once until
    ``begin`` is called. The first step may compile for minutes, and there is nothing to save.
    """

    def __init__(self, directory: Path, *, main: bool, alone: bool = False) -> None:
        global _last
        self.reason: str | None = None
        self.begun = False
        """True once this start has done work that can be lost."""
        self._leaves = alone and early_stop.EARLY.installed
        self._since: float | None = None
        self._file = directory / STOP_FILE if main else None
        self._looked = 0.0
        self._parent = os.getppid()
        # Its thread would end the process at a signal, and from here on there may be work to save.
        early_stop.EARLY.end()
        self._previous: dict[int, Any] = {}
        for number in listened():
            self._previous[number] = signal.signal(number, self._on_signal)
        end_with_the_launcher()
        _last = self

    def begin(self) -> None:
        """Note that there is something to save. Called after every step, and cheap."""
        if not self.begun:
            early_stop.EARLY.begin()
        self.begun = True

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._leaves and not self.begun:
            leave(number)
        now = time.monotonic()
        # The kernel sends a signal when the launcher dies. By then the process has a new parent.
        orphaned = os.getppid() != self._parent
        self._parent = os.getppid()
        if self._since is None:
            self._since = now
            self.reason = signal.Signals(number).name
        elif not orphaned and now - self._since > SAME_REQUEST_SECONDS:
            # A print is not safe in a handler.
            os.write(2, b"second signal: stopping at once; the last committed checkpoint stands\n")
            os._exit(128 + number)

    @property
    def requested(self) -> bool:
        """True once this process has been asked to stop. The main process looks for the file once a second."""
        now = time.monotonic()
        if self.reason is None and self._file is not None and now - self._looked > 1.0:
            # Not at every step: the directory may be on a slow network disk.
            self._looked = now
            if self._file.exists():
                self.reason = f"the file {self._file}"
        return self.reason is not None

    def close(self) -> None:
        """Restore the signal handlers, and delete the ``STOP`` file after a stop."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        # A file that stays would stop the next start.
        if self._file is not None and self.reason is not None:
            self._file.unlink(missing_ok=True)


_last: StopRequests | None = None


def stopped_before_the_first_step() -> bool:
    """Return True if this start was asked to stop before it had done any work.

    A later error is then a consequence of the stop, such as a collective without the processes that have left.
    """
    if early_stop.EARLY.leaving:
        return True
    return _last is not None and _last.reason is not None and not _last.begun


class Agreement:
    """Named integers, reduced over all processes at a step boundary without waiting.

    Built on every rank. ``reductions`` gives each name ``max`` or ``min``, taken over the ranks. Messages go over gloo
    between hosts, never over the device.
    """

    def __init__(
        self, accelerator: Accelerator, reductions: Mapping[str, Callable[..., int]], timeout_seconds: float
    ) -> None:
        self._world_size = accelerator.num_processes
        self._signs: dict[str, int] = {}
        for name, reduction in reductions.items():
            self._signs[name] = -1 if reduction is min else 1
        self.group: Any = None
        """gloo group of all processes, for host tensors. None on one process."""
        self._pending: tuple[Any, torch.Tensor] | None = None
        if self._world_size > 1:
            self.group = host_group(timeout_seconds)

    def exchange(self, values: Mapping[str, int]) -> Mapping[str, int] | None:
        """Start the reduction of ``values`` and return the result of the previous call. Every rank, once per step.

        Returns None at the first call. One process gets its own ``values`` back.
        """
        # The vector has no names, so all ranks must mean the same value by each position.
        assert values.keys() == self._signs.keys()
        if self._world_size == 1:
            return values
        agreed: dict[str, int] | None = None
        if self._pending is not None:
            work, reduced = self._pending
            # Begun a step ago, so it has long been done and this does not block.
            work.wait()
            agreed = {}
            values_of_all = reduced.tolist()
            for (name, sign), value in zip(self._signs.items(), values_of_all, strict=True):
                agreed[name] = sign * value
        # One reduction serves all of them: the minimum is the negated maximum of the negated values.
        signed = [sign * values[name] for name, sign in self._signs.items()]
        mine = torch.tensor(signed, dtype=torch.int64)
        work = dist.all_reduce(mine, dist.ReduceOp.MAX, group=self.group, async_op=True)
        # The reduction writes into `mine`, so nobody may touch it before the next call.
        self._pending = (work, mine)
        return agreed

    def any(self, flag: bool) -> bool:
        """Return True if the flag of any rank is set. Every rank calls it and waits for all others, on the host."""
        if self._world_size == 1:
            return flag
        mine = torch.tensor([int(flag)])
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=self.group)
        return bool(mine)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks in rank order. Every rank calls it and waits for all others, on the host."""
        if self._world_size == 1:
            return [value]
        values: list[Any] = [None] * self._world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def close(self) -> None:
        """Wait for the last reduction: the other ranks take part in it too."""
        if self._pending is not None:
            work, _ = self._pending
            work.wait()
            self._pending = None


_host_groups = weakref.WeakKeyDictionary[Any, Any]()
"""Our gloo group for each default group. Held weakly: a group that outlives `destroy_process_group` aborts the exit."""


def host_group(timeout_seconds: float = 1800.0) -> Any:
    """Return the gloo group of all processes, for messages between hosts that wait for no device.

    The first call opens it with ``timeout_seconds`` and is a collective. Later calls ignore the argument.
    """
    default = dist.group.WORLD
    if dist.get_backend() == "fake":
        # A simulation has no other processes.
        return default
    group = _host_groups.get(default, lambda: None)()
    if group is None:
        group = _open_gloo(timeout_seconds)
        _host_groups[default] = weakref.ref(group)
    return group


def _open_gloo(timeout_seconds: float) -> Any:
    try:
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        error.add_note("processes also talk over gloo: name the hosts' interface in GLOO_SOCKET_IFNAME")
        raise

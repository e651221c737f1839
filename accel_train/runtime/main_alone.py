"""Run a task on one process for all: every process gets its result, or raises its error."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator

from accel_train import simulated
from accel_train.runtime import signals

T = TypeVar("T")

PREPARATION_LIMIT = timedelta(hours=24)
"""Longest wait for a process that prepares alone. Reading a large dataset takes hours, and starts over if interrupted.
A process that dies closes its connections, which ends the wait at once."""


class OtherProcessError(RuntimeError):
    """Error of another process, with the text of the original."""


def on_main(accelerator: Accelerator, act: Callable[[], T], *, training: bool = False) -> T:
    """Call ``act`` on the main process and return its result on every process. Collective.

    The others wait on the host for up to ``PREPARATION_LIMIT``; while ``training``, as long as for any collective.

    An error of ``act`` is raised on every process, so that none waits in a collective that the main process never
    reaches. The others get an exception of the same type if it can be pickled. Otherwise, and for ``SystemExit`` and
    ``KeyboardInterrupt``, they get ``OtherProcessError`` with its text.
    """
    if accelerator.num_processes == 1:
        return act()
    result: Any = None
    message: Any = None
    failed: BaseException | None = None
    if accelerator.is_main_process:
        # BaseException: the others must not wait for a process that ends by SystemExit or KeyboardInterrupt.
        try:
            result = act()
            message = {"result": pickle.dumps(result)}
        except BaseException as error:
            failed = error
            message = {"error": _portable(error)}
    if not training:
        _meet()
    messages = [message]
    dist.broadcast_object_list(messages, src=0, group=signals.host_group())
    message = messages[0]
    # The main process keeps the original error with its traceback.
    if failed is not None:
        raise failed
    if "error" in message:
        raise message["error"]
    if accelerator.is_main_process:
        return result
    return pickle.loads(message["result"])


def connect_hosts(accelerator: Accelerator, timeout_seconds: float) -> None:
    """Open the group for waits on the host, before one process works alone: it fails now if a host is out of reach.

    Collective. ``timeout_seconds`` is the timeout of its collectives.
    """
    if accelerator.num_processes > 1:
        signals.host_group(timeout_seconds)


def place_among_workers(accelerator: Accelerator) -> tuple[int, int]:
    """Return the rank of this process, and the number of processes, for the shared preparation of data.

    In a simulation one process prepares everything, because the others do not exist.
    """
    if simulated.active() is not None:
        return 0, 1
    return accelerator.process_index, accelerator.num_processes


@contextmanager
def failing_together(accelerator: Accelerator) -> Generator[Callable[[], None]]:
    """Yield a barrier for work that every process does. An error of one process is raised on all.

    A failing process reports to the others at their next barrier, or at the end of the block. All processes must enter
    the block and, unless one fails, call the barrier equally often. It waits for up to ``PREPARATION_LIMIT``.
    """
    if accelerator.num_processes == 1:
        yield lambda: None
        return
    reported: list[Exception] = []

    def meet(own: Exception | None = None) -> None:
        report = None
        if own is not None:
            report = _portable(own, accelerator.process_index)
        reported.extend(error for error in gather_on_hosts(report) if error is not None)
        if reported and own is None:
            raise reported[0]

    try:
        yield meet
    except Exception as error:
        # An error that came from the barrier is known to all.
        if error not in reported:
            meet(error)
        raise
    meet()


def _meet() -> None:
    """Wait on the host until every process is here, for up to ``PREPARATION_LIMIT``.

    A collective would only wait as long as its group's timeout, and NCCL's watchdog would end the process.
    """
    group = signals.host_group()
    sign = torch.zeros(1)
    others = range(1, dist.get_world_size())
    if dist.get_rank() > 0:
        _wait(dist.isend(sign, 0, group))
        _wait(dist.irecv(sign, 0, group))
        return
    for rank in others:
        _wait(dist.irecv(sign, rank, group))
    for rank in others:
        _wait(dist.isend(sign, rank, group))


def gather_on_hosts(value: Any) -> list[Any]:
    """Return the values of all processes by rank, once all are here: within ``PREPARATION_LIMIT``. Collective.

    They are pickled and sent from host to host. For several processes only.
    """
    _meet()
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=signals.host_group())
    return values


def _wait(work: dist.Work | None) -> None:
    assert work is not None, "every process is in the group"
    work.wait(PREPARATION_LIMIT)


def _portable(error: BaseException, rank: int = 0) -> Exception:
    """Return the error itself if it survives pickling, else an ``OtherProcessError``."""
    if isinstance(error, Exception):
        # Pickle fails on an exception whose class cannot be built from `args`.
        with suppress(Exception):
            copy = pickle.loads(pickle.dumps(error))
            if type(copy) is type(error):
                return error
    return OtherProcessError(f"process {rank}: {type(error).__name__}: {error}")

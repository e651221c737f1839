"""What one process does and the others depend on: all get its result, or all end with its error."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

T = TypeVar("T")


class OtherProcessError(RuntimeError):
    """Another process could not do its part; the text is that of its error."""


def on_main(accelerator: Accelerator, act: Callable[[], T]) -> T:
    """Call ``act`` on the main process; returns its result on every process. Collective.

    Whatever it raises is raised on every process: an exception of the same type where it can be pickled, else, and for
    what ends a process (``SystemExit``, ``KeyboardInterrupt``), ``OtherProcessError`` with its text. So no process is
    left waiting in a collective that the main one never reaches.
    """
    if accelerator.num_processes == 1:
        return act()
    result: Any = None
    sent: Any = None
    failed: BaseException | None = None
    if accelerator.is_main_process:
        try:
            result = act()
            sent = {"result": pickle.dumps(result)}
        except (
            BaseException
        ) as error:  # KeyboardInterrupt and SystemExit too: nobody is to wait for a process that ends
            failed, sent = error, {"error": _portable(error)}
    sent = broadcast_object_list([sent])[0]
    if failed is not None:
        raise failed
    if "error" in sent:
        raise sent["error"]
    return result if accelerator.is_main_process else pickle.loads(sent["result"])


@contextmanager
def failing_together(accelerator: Accelerator) -> Generator[Callable[[], None]]:
    """Give a barrier to what every process does inside; an error of any process leaves the block on all of them.

    A process that fails meets the others at their next barrier, or at the end of the block, and tells them. All
    processes must enter the block and, unless one fails, call the barrier equally often.
    """
    if accelerator.num_processes == 1:
        yield lambda: None
        return
    heard: list[Exception] = []

    def meet(own: Exception | None = None) -> None:
        told = gather_object([_portable(own, accelerator.process_index) if own is not None else None])
        heard.extend(error for error in told if error is not None)
        if heard and own is None:
            raise heard[0]

    try:
        yield meet
    except Exception as error:
        if error not in heard:
            meet(error)
        raise
    meet()


def _portable(error: BaseException, rank: int = 0) -> Exception:
    try:
        if isinstance(error, Exception) and type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # of a class that cannot be built from its arguments
        pass
    return OtherProcessError(f"process {rank}: {type(error).__name__}: {error}")

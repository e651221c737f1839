"""What the main process does alone and every process depends on: all get its result, or all end with its error."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

T = TypeVar("T")


class MainProcessError(RuntimeError):
    """The main process could not do its part; the text is that of its error."""


def on_main(accelerator: Accelerator, act: Callable[[], T]) -> T:
    """Call ``act`` on the main process; returns its result on every process. Collective.

    Whatever it raises is raised on every process, of the same type where it can be pickled: no process is left waiting
    in a collective that the main one never reaches.
    """
    if accelerator.num_processes == 1:
        return act()
    told: Any = None
    failed: Exception | None = None
    if accelerator.is_main_process:
        try:
            told = {"result": act()}
        except Exception as error:
            failed, told = error, {"error": _portable(error)}
    told = broadcast_object_list([told])[0]
    if failed is not None:
        raise failed
    if "error" in told:
        raise told["error"]
    return told["result"]


def _portable(error: Exception) -> Exception:
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):  # noqa: S301: our own bytes
            return error
    except Exception:  # of a class that cannot be built from its arguments
        pass
    return MainProcessError(f"process 0: {type(error).__name__}: {error}")

"""Keep overhead of Python and Accelerate out of the steps of the training loop.

Python's garbage collector runs only where the loop waits anyway. A collection walks over every container of the
process. With torch and a model loaded a full one takes 0.1 to 0.5 s, at an arbitrary step that differs between
processes, so that all wait for each one. Objects outside of cycles are still freed by their reference counts.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

from accelerate import optimizer


@contextmanager
def garbage_frozen() -> Generator[None]:
    """Disable the garbage collector in the body, except for ``collect_garbage``.

    Every process enters it, once everything is built. Existing objects are collected once and then frozen, so that
    later collections only look at newer ones. Does nothing if the collector is already disabled, by an outer body or by
    the user.
    """
    if not gc.isenabled():
        yield
        return
    # First, because garbage that is frozen is never freed.
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def collect_garbage() -> int:
    """Free unreachable cycles created since ``garbage_frozen`` and return the number of objects.

    Called at log points, where the host has waited for the device. Does nothing if the collector is enabled.
    """
    if gc.isenabled():
        return 0
    return gc.collect()


def remember_lookups() -> bool:
    """Cache the look-ups of Accelerate's optimizer in every step, and return True if it was not cached before.

    Accelerate 1.15 searches all of ``sys.path`` for ``lomo_optim`` twice per step, 27 us each time, about half of its
    overhead. Its ``zero_grad`` inspects the signature of the optimizer's, another 9 us. Any process may call it, any
    number of times.
    """
    module: Any = optimizer
    # Other versions of Accelerate may not do these look-ups at all.
    if getattr(module, "inspect", None) is inspect:
        module.inspect = SimpleNamespace(signature=_signature)
    look_up = getattr(module, "is_lomo_available", None)
    if look_up is None or hasattr(look_up, "cache_info"):
        return False
    # Installed packages do not change while a process trains.
    module.is_lomo_available = cache(look_up)
    return True


def _signature(method: Any) -> inspect.Signature:
    # A bound method is a new object at every access, so the cache is keyed by its function.
    return _signature_of_function(getattr(method, "__func__", method))


@cache
def _signature_of_function(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)

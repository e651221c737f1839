"""Work of Python and of Accelerate that is kept out of the steps of the training loop.

Python's garbage collector runs where the loop waits anyway. A collection walks over every container of the process.
With torch and a model loaded a full one takes 0.1 to 0.5 s, at a step that nobody chose, and on another step on every
process, so that all wait for each. Objects that are not in a cycle are freed as always, by their reference counts.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

from accelerate import optimizer


@contextmanager
def garbage_frozen() -> Generator[None]:
    """In the body nothing is collected but by ``collect_garbage``. Enter it once everything is built; every process.

    What exists by then is collected once, then set aside, so that later collections are short: they look at what came
    after. Nothing changes where the collector has been disabled already, by a body around this one or by the user.
    """
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def collect_garbage() -> int:
    """Free what has become unreachable in cycles since ``garbage_frozen``; return the number of objects.

    At log points, where the host has waited for the device. Does nothing where the collector runs by itself.
    """
    return 0 if gc.isenabled() else gc.collect()


def remember_lookups() -> bool:
    """Let Accelerate's optimizer ask once whether ``lomo_optim`` is installed, and not twice in every step.

    Each time it searches all of ``sys.path``: 27 us, about half of what Accelerate adds to a step (1.15). What is
    installed does not change while a process trains. Every process may call it, any number of times; returns whether
    there was something to remember.
    """
    module: Any = optimizer
    look = getattr(module, "is_lomo_available", None)
    if look is None or hasattr(look, "cache_info"):
        return False
    module.is_lomo_available = cache(look)
    return True

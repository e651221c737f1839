"""Python's garbage collector kept out of the training loop: it runs where the loop waits anyway.

A collection walks over every container of the process. With torch and a model loaded a full one takes 0.1 to 0.5 s, at
a step that nobody chose, and on another step on every process, so that all wait for each. Objects that are not in a
cycle are freed as always, by their reference counts.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def frozen() -> Generator[None]:
    """In the body nothing is collected but by ``collect``. Enter it once everything is built; every process.

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


def collect() -> int:
    """Free what has become unreachable in cycles since ``frozen``; returns how many objects. At log points, where the
    host has waited for the device. Does nothing where the collector runs by itself."""
    return 0 if gc.isenabled() else gc.collect()

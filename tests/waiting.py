"""Wait for events, not for times. A deadline only ends a hang, so a machine with six jobs a core meets it too."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_SECONDS = 600.0
"""How long a test waits for what must come. Longer than anything takes under load, shorter than the limit of a test."""

Value = TypeVar("Value")


def until(condition: Callable[[], Value], what: Callable[[], str] = str, seconds: float = PATIENCE_SECONDS) -> Value:
    """The first true answer of ``condition``; fails with the text of ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"did not come about in {seconds:g} s. {what()}"
        time.sleep(0.01)
    return answer


def free_port() -> int:
    """A port that nobody listens on, outside the range from which outgoing connections take theirs meanwhile."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port

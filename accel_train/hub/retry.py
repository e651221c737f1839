"""Retry calls of the Hub with a growing wait, as long as another attempt may help."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable
from typing import TypeVar

from accel_train.config import UsageError
from accel_train.hub.errors import NotPushableError, Problem, describe

T = TypeVar("T")

BACKOFF_VARIABLE = "ACCEL_TRAIN_HUB_BACKOFF_SECONDS"
"""Seconds to wait after the first failure. The wait doubles with every consecutive failure."""
BACKOFF_SECONDS = 2.0
LONGEST_BACKOFF_SECONDS = 300.0


class GaveUpError(Exception):
    """The last attempt failed, or another cannot help. ``__cause__`` is the error of the Hub."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.reason)
        self.problem = problem


def retried(
    call: Callable[[], T],
    *,
    attempts: int | None = None,
    seconds: float = math.inf,
    longest_wait: float = math.inf,
    waiting: Callable[[float, Problem], None] = lambda seconds, problem: None,
) -> T:
    """Call until it succeeds, at most ``attempts`` times, and start no wait ending after ``seconds``.

    ``waiting`` is called before each wait with its length and its reason. Raises ``GaveUpError``. Another attempt
    cannot cure ``UsageError`` and ``NotPushableError``, so they are raised unchanged.
    """
    deadline = time.monotonic() + seconds
    failures = 0
    while True:
        try:
            return call()
        except (UsageError, NotPushableError):
            raise
        except Exception as error:
            failures += 1
            problem = describe(error)
            wait = min(backoff_seconds(failures, problem), longest_wait)
            if not problem.retry or failures == attempts or time.monotonic() + wait > deadline:
                raise GaveUpError(problem) from error
        waiting(wait, problem)
        time.sleep(wait)


def backoff_seconds(failures: int, problem: Problem) -> float:
    """Compute the wait after ``failures`` consecutive failures.

    At most five minutes, unless the Hub asks for a longer wait.
    """
    base = float(os.environ.get(BACKOFF_VARIABLE, BACKOFF_SECONDS))
    # Far above the limit already. After enough failures, 2.0**1024 would raise OverflowError.
    doublings = min(failures - 1, 30)
    wait = min(base * 2.0**doublings, LONGEST_BACKOFF_SECONDS)
    # Jitter spreads the requests of many runs over time, even of those with the same seed.
    jittered = wait * random.SystemRandom().uniform(0.5, 1.0)
    return max(jittered, problem.retry_after_seconds)

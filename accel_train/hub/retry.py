"""Calls of the Hub, tried again with a growing wait while its trouble may pass."""

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
"""The first wait after a failure, in seconds; it doubles with every failure in a row."""
BACKOFF_SECONDS = 2.0
LONGEST_BACKOFF_SECONDS = 300.0


class GaveUpError(Exception):
    """The last try failed, or another cannot help. Its cause is the error of the Hub."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.reason)
        self.problem = problem


def retried(
    call: Callable[[], T],
    *,
    attempts: int | None = None,
    seconds: float = math.inf,
    longest_wait: float = LONGEST_BACKOFF_SECONDS,
    waiting: Callable[[float, Problem], None] = lambda seconds, problem: None,
) -> T:
    """Call until it succeeds, at most ``attempts`` times and with no wait that ends after ``seconds``.

    ``waiting`` is told each wait and its reason. Raises ``GaveUpError``; ``UsageError`` and ``NotPushableError``, which
    no other try can help, are raised as they are.
    """
    deadline, failures = time.monotonic() + seconds, 0
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
    """How long to wait after so many failures in a row: at least what the Hub asks for, at most five minutes else."""
    base = float(os.environ.get(BACKOFF_VARIABLE, BACKOFF_SECONDS))
    wait = min(base * 2.0 ** min(failures - 1, 30), LONGEST_BACKOFF_SECONDS)
    return max(wait * random.uniform(0.5, 1.0), problem.retry_after_seconds)  # jitter: many runs, one Hub

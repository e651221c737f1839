"""A bar on a terminal, a plain line every few seconds elsewhere, nothing where it is over at once."""

import sys
import time
from types import TracebackType
from typing import Any

SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Counts samples done; a disabled one is silent (processes other than the main one)."""

    def __init__(self, label: str, total: int, enabled: bool) -> None:
        self.label, self.total, self.enabled = label, total, enabled
        self.done = 0
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        self._started = self._last_line = time.monotonic()
        if self.enabled and sys.stdout.isatty():
            from tqdm import tqdm

            # leave=None: stays where it is the only bar, goes where it was drawn below that of training
            self._bar = tqdm(total=self.total, desc=self.label, unit="sample", file=sys.stdout, delay=1, leave=None)
        return self

    def update(self, count: int) -> None:
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self.enabled and time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            rate = self.done / (self._last_line - self._started)
            left = (self.total - self.done) / rate
            print(f"{self.label}: {self.done} of {self.total} samples, {rate:.0f}/s, {left:.0f} s left", flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

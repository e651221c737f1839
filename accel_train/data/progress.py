"""Progress of long work: a bar on a terminal, else a line every few seconds. Short work prints nothing."""

import sys
import time
from types import TracebackType
from typing import Any

SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Counter of finished samples. Silent unless enabled, which is meant for the main process alone."""

    def __init__(self, label: str, total: int, enabled: bool) -> None:
        self.label = label
        self.total = total
        self.enabled = enabled
        self.done = 0
        self._bar: Any = None
        self._first: tuple[float, int] | None = None
        """Time and count of the first update."""

    def __enter__(self) -> "Progress":
        self._started = time.monotonic()
        self._last_line = self._started
        if self.enabled and sys.stdout.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=self.total,
                desc=self.label,
                unit="sample",
                file=sys.stdout,
                delay=1,
                leave=None,  # remove the bar if it was drawn below that of training
            )
        return self

    def update(self, count: int) -> None:
        """Count finished samples, and show them where there is no bar, at most every few seconds."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
            return
        now = time.monotonic()
        if self._first is None:
            self._first = (now, self.done)
        # In a file, each redraw of a bar would be a line.
        if self.enabled and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            try:
                print(f"{self.label}: {self.done} of {self.total} samples{self._estimate(now)}", flush=True)
            except BrokenPipeError:
                # `recipe | head`: the work goes on without a reader.
                self.enabled = False

    def _estimate(self, now: float) -> str:
        """Return samples per second and the time left. Empty until there is enough to estimate from."""
        assert self._first is not None, "update sets it"
        # Measured from the first samples on, which wait for workers to start and files to be opened.
        began, before = self._first
        if self.done == before or now - began < SECONDS_BETWEEN_LINES:
            return ""
        samples_per_second = (self.done - before) / (now - began)
        digits = ".0f" if samples_per_second >= 10 else ".2g"
        seconds_left = (self.total - self.done) / samples_per_second
        return f", {samples_per_second:{digits}}/s, {seconds_left:.0f} s left"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

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
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        # Where a bar would be written to a file, each of its redraws would be a line.
        elif self.enabled and time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            samples_per_second = self.done / (self._last_line - self._started)
            seconds_left = (self.total - self.done) / samples_per_second
            text = f"{self.label}: {self.done} of {self.total} samples, {samples_per_second:.0f}/s, "
            try:
                print(f"{text}{seconds_left:.0f} s left", flush=True)
            except BrokenPipeError:
                # `recipe | head`: the work goes on without a reader.
                self.enabled = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

"""Count the devices that are available now."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

from accel_train.config import UsageError, expand_path

LARGEST = 1024
COUNT = "import torch; print(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)"
MEMORY = """
import torch
cuda = torch.cuda
print(min((cuda.get_device_properties(i).total_memory for i in range(cuda.device_count())), default=0))
"""
SECONDS_BETWEEN_COUNTS = 60.0
LONGEST_SECONDS = 60.0
"""Time for one count. A driver may hang, and the run is not watched meanwhile."""
LOOKS_BEFORE_A_WORD = 3
GIB = 2**30


class Devices(Protocol):
    """A source of the number of devices."""

    def count(self) -> int:
        """Return the number of devices now. Cheap: it is called every second."""
        ...


class ListedDevices:
    """Number of devices read from a file, which a scheduler, a hook or a person writes."""

    def __init__(self, path: str) -> None:
        """Read the file for the first time. Raises ``UsageError`` if it holds no number."""
        self.path = expand_path(path)
        found = _number_in(self.path)
        if found is None:
            raise UsageError(
                f"devices: {self.path}: a file with one number from 0 to {LARGEST}, the devices to use, is required; "
                f"write it, as with: echo 4 > {self.path}"
            )
        self._last = found
        self._misses = 0

    def count(self) -> int:
        """Return the number in the file. While the file is absent or half written, the last number counts."""
        found = _number_in(self.path)
        self._misses = self._misses + 1 if found is None else 0
        if found is not None:
            self._last = found
        # Not after the first miss, because the file may just be being written.
        if self._misses == LOOKS_BEFORE_A_WORD:
            print(
                f"accel-train run: {self.path} no longer has a number from 0 to {LARGEST}; continuing with "
                f"{self._last} until it has one",
                file=sys.stderr,
                flush=True,
            )
        return self._last


def _number_in(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    # isdigit alone accepts digits that int refuses.
    if not text.isascii() or not text.isdigit() or int(text) > LARGEST:
        return None
    return int(text)


class VisibleDevices:
    """The accelerators visible to torch, or one CPU if there has never been one."""

    def __init__(self) -> None:
        """Count for the first time. Raises ``UsageError`` if that fails."""
        found = _printed_number(COUNT)
        if found is None:
            raise UsageError(
                "devices: a process that counts the accelerators with torch failed or took longer than "
                f"{LONGEST_SECONDS:g} s; fix that, or give the number in a file with --devices"
            )
        self._last = found
        self._is_cpu = found == 0
        self._counted = time.monotonic()

    def count(self) -> int:
        """Return the number of accelerators, counted once a minute. A machine without any counts as 1.

        While no count succeeds, the last number is returned.
        """
        if self._is_cpu:
            return 1
        if time.monotonic() - self._counted > SECONDS_BETWEEN_COUNTS:
            found = _printed_number(COUNT)
            # A change stops the run, so it takes two counts: one may meet a driver that is busy.
            if found not in (None, self._last) and found == _printed_number(COUNT):
                self._last = found
            self._counted = time.monotonic()
        return self._last


def visible_vram_gib() -> float:
    """Return the memory in GiB of the smallest GPU visible to torch, 0 without any."""
    return (_printed_number(MEMORY) or 0) / GIB


def _printed_number(program: str) -> int | None:
    """Return the number that a program prints, None if it fails or takes too long."""
    # In a separate process: a driver gives the same process always the same number, and counting may take memory of
    # the devices, which belongs to the run.
    command = [sys.executable, "-c", program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    lines = done.stdout.split()
    if done.returncode or not lines or not lines[-1].isdigit():
        return None
    return int(lines[-1])

"""A stand-in for copies beside the kernels: on a CPU, each made as late as the order of waits allows."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

POISON = 0xFF
"""Of every byte of a memory that is not valid: no number in any dtype of floats."""


class LateTransfers:
    """Copies are made when something waits for them, or for a later one, and not before.

    So a source that is given up too early has been overwritten by then, and a target that is read without a wait is
    poison. Memory that was sent is poisoned as soon as nobody here holds it, whoever else might still read it, unless
    ``poison`` is False, for models that do hold it.
    """

    def __init__(self, *, poison: bool = True) -> None:
        self._poison = poison
        self.device = torch.device("cpu")
        self.log: list[str] = []
        """What was asked for, in order. Each send has a number, which the later words repeat."""
        self.hosts: list[bytearray] = []
        self.overwritten = 0
        """Copies to memory that belonged to others by then."""
        self._free: list[int] = []
        self._queue: list[Callable[[], None]] = []
        self._done = 0
        self._names: dict[int, str] = {}
        self._sent = 0

    def send(self, source: Tensor) -> tuple[tuple[int, int], Any]:
        """Queue a copy to the host."""
        number = self._sent
        self._sent += 1
        memory = source.untyped_storage()
        size = memory.nbytes()
        if self._poison:
            weakref.finalize(source, memory.fill_, POISON)
        place = self._place(size)
        # Weak: memory that was given up belongs to others.
        reference = weakref.ref(source)

        def copy() -> None:
            alive = reference()
            values = bytes([POISON]) * size if alive is None else alive.numpy().tobytes()
            self.hosts[place][:size] = values

        return (place, number), self._ask(f"send {number}", copy)

    def _place(self, size: int) -> int:
        for place in self._free:
            if len(self.hosts[place]) >= size:
                self._free.remove(place)
                return place
        self.hosts.append(bytearray(size))
        return len(self.hosts) - 1

    def fetch(self, host: tuple[int, int], target: Tensor) -> Any:
        """Queue a copy to the device."""
        place, number = host
        target.fill_(POISON)
        reference = weakref.ref(target)

        def copy() -> None:
            alive = reference()
            if alive is None:
                self.overwritten += 1
                return
            values = torch.frombuffer(self.hosts[place][: len(alive)], dtype=torch.uint8)
            alive.copy_(values)

        return self._ask(f"fetch {number}", copy)

    def wait(self, event: int) -> None:
        """Make the copies up to this one, in order."""
        self.log.append(f"wait {self._names[event]}")
        for copy in self._queue[self._done : event + 1]:
            copy()
        self._done = max(self._done, event + 1)

    def free(self, host: tuple[int, int]) -> None:
        """Take the place back. The copies queued so far still read it."""
        place, number = host
        self.log.append(f"free {number}")
        self._free.append(place)

    @property
    def free_places(self) -> int:
        """Number of host buffers that nothing uses."""
        return len(self._free)

    def _ask(self, name: str, copy: Callable[[], None]) -> int:
        self._queue.append(copy)
        self.log.append(name)
        self._names[len(self._queue) - 1] = name
        return len(self._queue) - 1

"""Bounded cache of decoded blocks: the least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class BlockCache(Generic[T]):
    """Values of at most `limit_bytes` in total. The newest is kept whatever its size. Empty after unpickling."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self._values: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()

    def __reduce__(self) -> tuple[type[BlockCache[T]], tuple[int]]:
        # A worker reads for itself, so a copy of the blocks would be of no use to it.
        return BlockCache, (self.limit_bytes,)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, read: Callable[[], T], size_of: Callable[[T], int]) -> T:
        """Return the value of `key`, or `read` it and drop others until it has room."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key][0]
        value = read()
        size = size_of(value)
        self._values[key] = value, size
        self.bytes += size
        while self.bytes > self.limit_bytes and len(self._values) > 1:
            _, (_, dropped) = self._values.popitem(last=False)
            self.bytes -= dropped
        return value

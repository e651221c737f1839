"""Count reads of a tensor's values by the host. On a GPU each of them waits for all the work before it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

TAKES_A_NUMBER: dict[Any, str] = {
    getattr(Tensor, name): name
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")
}
aten = torch.ops.aten
TAKES_A_SIZE: dict[Any, str] = {
    aten._local_scalar_dense.default: "_local_scalar_dense",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten._unique2.default: "unique",
    aten.unique_dim.default: "unique",
    aten.equal.default: "equal",
    aten.bincount.default: "bincount",
}
"""Operators that read from the device, for Python or because the shape of the result depends on values."""
BY_INDEX = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
"""Operators that read only if an index is a mask, which ``nonzero`` first turns into positions."""
NOT_THE_CALLER = (str(Path(torch.__file__).parent), __file__)


class HostReads(TorchFunctionMode):
    """Context manager that counts reads, in `counts` by call and in `places` by call and the line that made it.

    `_local_scalar_dense` is a read by torch itself, below Python. On CPU tensors `tolist`, `cpu` and `numpy` dispatch
    no operator, so the calls themselves are counted. Not seen are `.to("cpu")` of a CPU tensor and other threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self._below = _Below(self)
        self._paused = False

    @contextmanager
    def paused(self) -> Generator[None]:
        """Count nothing in the body, for reads of tensors that are in host memory on purpose."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def count(self, name: str) -> None:
        """Count one read, with the code that called torch."""
        if self._paused:
            return
        self.counts[name] += 1
        self.places[f"{name} {_caller()}"] += 1

    def __enter__(self) -> HostReads:
        self._below.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._below.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = TAKES_A_NUMBER.get(func)
        if name is None:
            return func(*args, **(kwargs or {}))
        self.count(name)
        with torch._C.DisableTorchFunctionSubclass(), _Quietly(self._below):
            return func(*args, **(kwargs or {}))


class _Below(TorchDispatchMode):
    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads
        self.quiet = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = TAKES_A_SIZE.get(func)
        if name is None and func in BY_INDEX and _by_mask(*args):
            name = "mask"
        if name is not None and not self.quiet:
            self.reads.count(name)
        return func(*args, **(kwargs or {}))


def _by_mask(_: Tensor, indices: Any, values: Tensor | None = None, *rest: Any) -> bool:
    """Return True if an index is a mask, except for writing one value: that is ``masked_fill``, without positions."""
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    return bool(masks) and (values is None or values.numel() != 1)


def _caller() -> str:
    """Return ``folder/file.py:line`` of the innermost frame outside torch and this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_THE_CALLER):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"


class _Quietly:
    """Silences operators in the body, so that a read counted as a call is not counted twice."""

    def __init__(self, below: _Below) -> None:
        self.below = below

    def __enter__(self) -> None:
        self.below.quiet = True

    def __exit__(self, *_: object) -> None:
        self.below.quiet = False

"""Counts what takes a number from a tensor to the host: on a GPU each is a wait for all the work before it."""

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
"""Operators that need a number of the device: for Python, or because the shape of the result depends on values."""
BY_INDEX = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
"""A mask among the indices is made into positions first, by ``nonzero``."""
NOT_THE_CALLER = (str(Path(torch.__file__).parent), __file__)


class HostReads(TorchFunctionMode):
    """A context manager; `counts` by the name of the call, `places` by the name and the line of code that made it.

    `_local_scalar_dense` is torch's own, below Python. On CPU tensors `tolist`, `cpu` and `numpy` dispatch no operator,
    so the calls themselves are counted. Not seen: `.to("cpu")` of a tensor that is there, work of other threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self._below = _Below(self)
        self._paused = False

    @contextmanager
    def paused(self) -> Generator[None]:
        """Read what is meant for the host and lives there: nothing of the body is counted."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def count(self, name: str) -> None:
        """One read, by what called torch."""
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
    """One value written where a mask says so is ``masked_fill``, which needs no positions."""
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    return bool(masks) and (values is None or values.numel() != 1)


def _caller() -> str:
    """``folder/file.py:line`` of the innermost frame that is neither torch's nor of this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_THE_CALLER):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"


class _Quietly:
    """The same read is not counted twice."""

    def __init__(self, below: _Below) -> None:
        self.below = below

    def __enter__(self) -> None:
        self.below.quiet = True

    def __exit__(self, *_: object) -> None:
        self.below.quiet = False

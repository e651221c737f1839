"""Counts what takes a number from a tensor to the host: on a GPU each is a wait for all the work before it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

TAKES_A_NUMBER: dict[Any, str] = {
    getattr(Tensor, name): name
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")
}


class HostReads(TorchFunctionMode):
    """A context manager; `counts` by the name of the call. `_local_scalar_dense` is torch's own, below Python.

    On CPU tensors `tolist`, `cpu` and `numpy` dispatch no operator, so the calls themselves are counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._below = _Below(self.counts)

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
        self.counts[name] += 1
        with torch._C.DisableTorchFunctionSubclass(), _Quietly(self._below):
            return func(*args, **(kwargs or {}))


class _Below(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts
        self.quiet = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and not self.quiet:
            self.counts["_local_scalar_dense"] += 1
        return func(*args, **(kwargs or {}))


class _Quietly:
    """The same read is not counted twice."""

    def __init__(self, below: _Below) -> None:
        self.below = below

    def __enter__(self) -> None:
        self.below.quiet = True

    def __exit__(self, *_: object) -> None:
        self.below.quiet = False

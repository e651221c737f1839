"""Tensors without memory: the model and the batches are fake, small numbers of the host stay real.

A recipe computes a few numbers on the host before a step (its mode, its learning rate), and reads them. Inside of
``FakeTensorMode`` that is impossible, so only the model is built in it. Later an operator is fake if one of its inputs
is, and a tensor made from nothing is fake inside of forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.ops.prim.device.default
"""The question for a tensor's device, which the C++ of torch asks of a fake one more often than all else together."""
HOST_BYTES = 2**20
"""A tensor made from nothing outside of forward and backward is real below this size."""


class FakeWhereNeeded(TorchDispatchMode):
    """Decide for each operator whether it runs on fake tensors."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake
        self.computing = 0
        """Nesting depth of the running forwards."""
        self._reads_zero = 0

    def __enter__(self) -> FakeWhereNeeded:
        # DTensor looks here for the mode of its local tensors, to compute the shapes of results with it.
        self._context = tracing(TracingContext(self.fake))
        self._context.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._context.__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is DEVICE:
            return args[0].device
        kwargs = kwargs or {}
        if self._reads_zero and func is torch.ops.aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else 0
        if any(not issubclass(kind, (FakeTensor, nn.Parameter)) for kind in types if kind is not Tensor):
            # A DTensor or another wrapper first comes apart into its local tensors.
            return NotImplemented
        if any(issubclass(kind, FakeTensor) for kind in types) or _has_tensor(args):
            # A fake input makes the result fake by itself.
            return func(*args, **kwargs)
        if self._inside():
            with self.fake:
                return func(*args, **kwargs)
        return self._from_nothing(func, args, kwargs)

    @contextmanager
    def without_values(self) -> Generator[None]:
        """Make every tensor of the body fake, and let it read zeros from them."""
        self.computing += 1
        self._reads_zero += 1
        try:
            yield
        finally:
            self.computing -= 1
            self._reads_zero -= 1

    def _inside(self) -> bool:
        return self.computing > 0 or in_backward()

    def _from_nothing(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return a real tensor if it is small."""
        # Made fake first, to learn its size without memory for it.
        with self.fake:
            made = func(*args, **kwargs)
        if isinstance(made, Tensor) and made.numel() * made.element_size() < HOST_BYTES:
            return func(*args, **kwargs)
        return made


def in_backward() -> bool:
    """Return True while autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


def _has_tensor(values: Any) -> bool:
    return next(tensors_in(list(values)), None) is not None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a result or of arguments: one, or several in lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


def build_fake(fake: FakeTensorMode, build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model of ``build`` with fake parameters, each with an address of its own.

    Accelerate finds the sharded form of an optimizer's parameter by the address of its memory. Fake ones have none.
    """
    with fake, mock.patch.object(nn.Module, "_apply", apply_in_place):
        model = build()
    # From 1: 0 is the address of tensors without memory.
    for number, parameter in enumerate(model.parameters(), 1):
        setattr(parameter, "data_ptr", _constant(number))  # noqa: B010  shadows the method of the class
    return model


def apply_in_place(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Do what ``module.to`` and its like do. torch swaps a fake parameter for another one, and cannot."""
    for part in module.modules() if recurse else [module]:
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            tensor.data = change(tensor.data)
    return module


def _constant(number: int) -> Callable[[], int]:
    # A function of its own: a lambda in the loop would return the last number for all.
    return lambda: number


def fake_batch(fake: FakeTensorMode, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch of the same shapes without values."""
    return {name: fake.from_tensor(value) for name, value in batch.items()}

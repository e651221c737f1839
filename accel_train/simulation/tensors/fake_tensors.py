"""Tensors without memory: the model and the batches are fake, and small tensors on the host stay real.

A recipe computes a few numbers on the host before a step, such as its mode and learning rate, and reads them. Inside
``FakeTensorMode`` that is impossible, so only the model is built in it. Afterwards, an operator is fake if one of its
inputs is, and a tensor created without tensor inputs is fake inside forward and backward.
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
"""Operator that returns a tensor's device. torch's C++ calls it for fake tensors more often than all others."""
HOST_BYTES = 2**20
"""Size below which a tensor that is created without tensor inputs, outside forward and backward, is real."""


class FakeWhereNeeded(TorchDispatchMode):
    """Dispatch mode that decides for each operator whether it runs on fake tensors."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake
        self.computing = 0
        """Nesting depth of the running forwards."""
        self._reads_zero = 0

    def __enter__(self) -> FakeWhereNeeded:
        # DTensor takes the fake mode of its local tensors from this context, to compute the shapes of results.
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
            # A DTensor or another wrapper first unwraps itself into its local tensors.
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
        """Make every tensor that the body creates fake, and let the body read zeros from fake tensors."""
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
        """Run an operator without tensor inputs. Its result is real if it is small, and otherwise fake."""
        # Run on fake tensors first, to learn the size without allocating memory.
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
    """Yield the tensors in a result or in arguments, also from nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


def build_fake(fake: FakeTensorMode, build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model of ``build`` with fake parameters, each with its own made-up address.

    Accelerate finds the sharded form of an optimizer's parameter by its memory address, which fake tensors do not have.
    """
    with fake, mock.patch.object(nn.Module, "_apply", apply_in_place):
        model = build()
    # From 1, because 0 is the address of tensors without memory.
    for number, parameter in enumerate(model.parameters(), 1):
        setattr(parameter, "data_ptr", _constant(number))  # noqa: B010  shadows the method of the class
    return model


def apply_in_place(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Stand in for ``nn.Module._apply``, behind ``module.to``. torch's swaps parameters, which fails for fake ones."""
    for part in module.modules() if recurse else [module]:
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            tensor.data = change(tensor.data)
    return module


def _constant(number: int) -> Callable[[], int]:
    # A separate function: a lambda in the loop would return the last number for all parameters.
    return lambda: number


def fake_batch(fake: FakeTensorMode, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch of fake tensors with the same shapes."""
    return {name: fake.from_tensor(value) for name, value in batch.items()}

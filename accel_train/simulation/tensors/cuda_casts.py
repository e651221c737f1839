"""CUDA's behaviour on CPU tensors where the two differ: the casts of autocast, and RMSNorm in one kernel.

A simulation computes on the CPU, whose autocast leaves norms and softmax in bf16. CUDA's autocast runs these operators
in fp32, inputs and outputs included, so a model takes more memory on a GPU than the CPU's autocast shows.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from accel_train.simulation.tensors.fused_norm import rms_norm

NORMS = {"layer_norm", "group_norm", "rms_norm"}
OTHERS = {"mse_loss", "l1_loss", "norm", "pow", "__pow__", "square", "rsqrt", "reciprocal", "exp", "log", "softplus"}
WITH_DTYPE = {"softmax", "log_softmax", "sum", "prod", "cumsum"}
"""Operators that are given a dtype for their result instead of a cast copy of their input."""


@contextmanager
def cuda_casts() -> Generator[None]:
    """Run in fp32 what CUDA's autocast runs in fp32, wherever the CPU's autocast is on, and RMSNorm as on CUDA."""
    run_backward = torch.autograd._engine_run_backward  # pyright: ignore[reportPrivateUsage]

    def with_casts(*arguments: Any, **named: Any) -> Any:
        # torch disables modes during the backward, in which activation checkpointing recomputes forwards.
        with _Casts():
            return run_backward(*arguments, **named)

    with mock.patch.object(torch.autograd, "_engine_run_backward", with_casts), _Casts():
        yield


class _Casts(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in NORMS | OTHERS | WITH_DTYPE and torch.is_autocast_enabled("cpu"):
            if name not in WITH_DTYPE:
                args = [_widened(value) for value in args]
                kwargs = {key: _widened(value) for key, value in kwargs.items()}
            elif _is_narrow(args[0] if args else kwargs["input"]) and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float32
        if name == "rms_norm" and _in_one_type(args, kwargs):
            func = rms_norm
        return func(*args, **kwargs)


def _in_one_type(args: Any, kwargs: Any) -> bool:
    """Return True if all tensors have one dtype. Only then does CUDA use its fused kernel for RMSNorm."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return len({tensor.dtype for tensor in tensors}) == 1


def _is_narrow(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _widened(value: Any) -> Any:
    return value.float() if _is_narrow(value) else value

"""Replacements for the few places where DeepSpeed reads memory or compiles, which fails on fake tensors.

All the rest is DeepSpeed's own code: partitions and their padding, buckets, reductions, and the order in which stage 3
prefetches weights. ``tests/simulation`` compares each stage with real processes.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from accel_train.simulation.tensors.fake_tensors import FakeWhereNeeded, apply_in_place

ENOUGH = 2**60
"""Bytes reported as free memory. With too little, DeepSpeed would flatten the weights on the host."""


@contextmanager
def connecting() -> Generator[None]:
    """Let DeepSpeed connect without its C++ communication, which takes minutes to compile and needs other processes.

    Does nothing unless the launch uses DeepSpeed and it is installed. ``build_accelerator`` refuses a missing one.
    """
    asked = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if not asked or find_spec("deepspeed") is None:
        yield
        return
    # DeepSpeed reads this variable when it is imported.
    os.environ["DS_ACCELERATOR"] = "cpu"
    from accel_train.runtime import rehearsal

    # By module name, because the attribute `deepspeed.comm.torch` is torch itself.
    communication = importlib.import_module("deepspeed.comm.torch")
    with (
        mock.patch.object(rehearsal, "load_communication", return_value=None),
        mock.patch.object(communication, "build_shm_op", return_value=None),
    ):
        yield


@contextmanager
def engine_without_memory(where: FakeWhereNeeded) -> Generator[None]:
    """Let DeepSpeed engines be built and step on fake tensors in the body."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.engine import DeepSpeedEngine

    with ExitStack() as patches:
        for owner, name, changed in (
            # Fake weights have no values to broadcast.
            (DeepSpeedEngine, "_broadcast_model", mock.Mock(return_value=None)),
            (nn.Module, "_apply", apply_in_place),
            # The engine checks the alignment of its partitions by their addresses.
            (FakeTensor, "data_ptr", lambda tensor: 0),
            (type(get_accelerator()), "available_memory", mock.Mock(return_value=ENOUGH)),
            (DeepSpeedEngine, "__init__", _inside(where, DeepSpeedEngine.__init__)),
            (DeepSpeedEngine, "backward", _inside(where, DeepSpeedEngine.backward)),
            (DeepSpeedEngine, "step", _inside(where, DeepSpeedEngine.step)),
            # Accelerate reads the norm after the step.
            (DeepSpeedEngine, "get_global_grad_norm", mock.Mock(return_value=0.0)),
        ):
            patches.enter_context(mock.patch.object(owner, name, changed))
        yield


def _inside(where: FakeWhereNeeded, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that it reads zeros from fake tensors: no overflow, and a finite norm."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with where.without_values():
            return method(*args, **kwargs)

    return call

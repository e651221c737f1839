"""Collectives of gloo, without two of its own uses of memory: a simulation has neither, and nor has NCCL.

A reduce-scatter of gloo works on a copy of its input. And the thread of gloo drops its references to the tensors of a
collective some time after the process that waits for the collective goes on: the last reference of all, if FSDP2 frees
the tensor meanwhile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from accel_train.simulation.ledger import Ledger, Record
from tests.waiting import PATIENCE_SECONDS

# Those of FSDP2, which torch 2.13 has renamed, and of ZeRO.
NAMES = ("all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


@contextmanager
def without_its_own_memory() -> Generator[None]:
    """Let the collectives of FSDP2 and ZeRO return once gloo holds nothing any more, in the body."""
    with ExitStack() as patches:
        for name in NAMES:
            if hasattr(dist, name):
                patches.enter_context(mock.patch.object(dist, name, _released(getattr(dist, name))))
        yield


def _released(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        before = _references(tensors)
        with mock.patch.object(Ledger, "_see", _see_known):
            work = collective(*args, **kwargs)
            if work is not None:
                # DeepSpeed's own references, until it waits as well.
                work.wait()
                return work
            deadline = time.monotonic() + PATIENCE_SECONDS
            while _references(tensors) > before:
                assert time.monotonic() < deadline, "gloo holds the tensors of a collective that has ended"
                # Lets the thread of gloo run.
                time.sleep(0)
        return None

    return call


def _references(tensors: list[Tensor]) -> int:
    """Count all references: of C++ and of Python, to the tensors and to their storages."""
    count = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        # C++ counts down before it has Python's lock, and Python's object lives until then.
        count += tensor._use_count() + sys.getrefcount(tensor)
        count += torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)
    return count


def _see_known(ledger: Ledger, storage: Any, phase: str, place: str) -> Record:
    """Take the place of ``Ledger._see``: a storage that is new belongs to gloo."""
    del place
    return ledger._records.get(storage._cdata) or Record(phase)

"""One real step without the ledger, as the machine counts it. Started like a recipe: ``machine.py RECIPE [flags]``.

COUNT says how: ``allocator`` by the events of torch's own allocator, ``resident`` by the memory of the process as the
system counts it, ``limit`` with no more address space (RLIMIT_AS) than LIMIT_BYTES of tensors need.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import resource
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from accel_train.commands.bundled import find_recipe, import_recipe
from accel_train.simulated import simulating
from accel_train.simulation.ledger import BLOCK, plain
from accel_train.simulation.step import FakeStep, StepCounter, Steps
from accel_train.simulation.strategies import gradients_of_step
from accel_train.speed.out_of_memory import is_out_of_memory
from tests.simulation.gloo import NAMES, without_its_own_memory

STEP, OF_GLOO = "the counted step", "a collective"
WARM_UP = 2
"""Runs of one micro-batch before the step: DDP divides its buckets anew in the second."""
PYTHON_BYTES = 1 << 20
"""Address space for what is no tensor: autograd's graph, Python's objects, the rounding of each tensor to pages."""


class MachineStep(FakeStep):
    """A real step, counted in one of the ways of COUNT."""

    def __init__(self, count: str) -> None:
        super().__init__(real=True)
        self.found: dict[str, Any] = {}
        self._count = count
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def build_model(self, accelerator: Any, build: Callable[[], nn.Module]) -> nn.Module:
        self._resident = psutil.Process().memory_info().rss
        if self._count == "allocator":
            self._profiler.start()
        return super().build_model(accelerator, build)

    @contextmanager
    def training(self, opened: Any, prepared: Any, dataset: Any, order: Any) -> Generator[Any]:
        with super().training(opened, prepared, dataset, order) as steps:
            yield MachineSteps(steps, getattr(self, f"_by_{self._count}"))

    @contextmanager
    def _by_allocator(self, at_rest: int) -> Generator[None]:
        with record_function(STEP):
            yield
        self._profiler.stop()
        self.found = {"at_rest": at_rest, **allocated(self._profiler)}

    @contextmanager
    def _by_resident(self, at_rest: int) -> Generator[None]:
        # Forgets the largest size that the process had so far.
        Path("/proc/self/clear_refs").write_text("5")
        before = psutil.Process().memory_info().rss
        yield
        peak = int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
        self.found = {"at_rest": at_rest, "growth": peak - self._resident, "growth_in_step": peak - before}

    @contextmanager
    def _by_limit(self, at_rest: int) -> Generator[None]:
        room = int(os.environ["LIMIT_BYTES"]) - at_rest + PYTHON_BYTES
        ctypes.CDLL(None).malloc_trim(0)
        limit_address_space(psutil.Process().memory_info().vms + room)
        yield
        limit_address_space(None)
        self.found = {"fits": True}


def limit_address_space(size: int | None) -> None:
    """Let the system refuse this process more than ``size`` bytes. None lifts the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard if size is None else size, hard))


class StepEnded(BaseException):
    """Leaves a recipe's ``main``."""


class MachineSteps(Steps):
    """The step, after a warm-up in which optimizers, kernels and gloo allocate what they keep."""

    def __init__(self, steps: Steps, counting: Callable[[int], Any]) -> None:
        super().__init__(steps._opened, steps._prepared, steps._batches, steps._of_the_step, steps._blocks)
        self._counting = counting

    def __iter__(self) -> Iterator[Any]:
        first = replace(self._batches, micro_batches=self._batches.micro_batches[:1])
        gradients: list[Tensor] = []
        for _ in range(WARM_UP):
            with gradients_of_step(self._prepared.model) as found:
                yield first
            gradients = found
        # Only DDP keeps them, as views of its buckets.
        keeps = isinstance(self._prepared.model, nn.parallel.DistributedDataParallel)
        buckets = list(gradients) if keeps else []
        gradients.clear()
        gc.collect()
        kept = StepCounter(self._prepared)._states(buckets)  # pyright: ignore[reportPrivateUsage]
        held = [tensor for each in kept for tensor in each.tensors]
        held += [value for batch in self._batches.micro_batches for value in batch.values()]
        at_rest = bytes_of(held)
        del held, kept, buckets
        with self._counting(at_rest):
            yield self._batches
        raise StepEnded


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the storages, each rounded up to a block of the allocator."""
    sizes: dict[int, int] = {}
    for tensor in plain(tensors):
        storage: Any = tensor.untyped_storage()
        sizes[storage._cdata] = -(-storage.nbytes() // BLOCK) * BLOCK
    return sum(sizes.values())


def ran_out(error: BaseException) -> bool:
    """Return True for an error of memory, of torch, of Python or of the C++ library."""
    return is_out_of_memory(error) or isinstance(error, MemoryError) or "bad_alloc" in str(error)


def allocated(profiler: Any) -> dict[str, int]:
    """Return the bytes of the allocator before the step, and the most of them in it.

    Left out is what gloo allocates in a collective, such as a copy of what it reduces: its own thread frees that, which
    a profiler does not see.
    """
    bindings: Any = torch._C
    kinds = bindings._profiler._EventType
    events = list(every_event(profiler.profiler.kineto_results.experimental_event_tree()))
    named = [event for event in events if event.typed[0] == kinds.TorchOp]
    (step,) = [event for event in named if event.name == STEP]
    windows = [(event.start_time_ns, event.end_time_ns) for event in named if event.name == OF_GLOO]
    of_gloo: set[int] = set()
    held = before = most = 0
    for event in events:
        kind, block = event.typed
        at = event.start_time_ns
        if kind != kinds.Allocation or at > step.end_time_ns:
            continue
        if block.alloc_size > 0 and any(start <= at <= end for start, end in windows):
            of_gloo.add(block.ptr)
            continue
        if block.alloc_size > 0:
            # An address that gloo's thread has freed unseen.
            of_gloo.discard(block.ptr)
        elif block.ptr in of_gloo:
            of_gloo.remove(block.ptr)
            continue
        held += block.alloc_size
        if at < step.start_time_ns:
            before = held
        most = max(most, held) if at >= step.start_time_ns else held
    return {"before": before, "peak": most}


def every_event(roots: Sequence[Any]) -> Iterator[Any]:
    """Yield all events of a tree, in the order of their start."""
    found = list(roots)
    for event in found:
        found.extend(event.children)
    yield from sorted(found, key=lambda event: event.start_time_ns)


@contextmanager
def collectives_named() -> Generator[None]:
    """Record the collectives of FSDP2, so that gloo's own tensors can be told from the others."""

    def named(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function(OF_GLOO):
                return collective(*args, **kwargs)

        return call

    with ExitStack() as patches:
        for name in NAMES:
            if hasattr(dist, name):
                patches.enter_context(mock.patch.object(dist, name, named(getattr(dist, name))))
        yield


def main(argv: Sequence[str]) -> None:
    module = import_recipe(find_recipe(argv[0]))
    step = MachineStep(os.environ["COUNT"])
    try:
        with simulating(step), without_its_own_memory(), collectives_named():
            module.main(argv[1:])
    except StepEnded:
        pass
    except (RuntimeError, MemoryError) as error:
        limit_address_space(None)
        if not ran_out(error):
            raise
        step.found = {"fits": False, "error": str(error)[:200]}
    if os.environ.get("RANK", "0") == "0":
        print("RESULT " + json.dumps(step.found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Choice of the micro-batches whose gradients are reduced, under each strategy."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from accel_train.training.parameters import require_prepared

SyncPolicy = Literal["auto", "last", "every"]
FLUSHES = ("_flush_coalesced_reduction_zero12", "_flush_coalesced_reduction_zero3")
"""Methods of DeepSpeed's engine that reduce the gradients of several backwards."""


def resolve_sync(policy: SyncPolicy, accelerator: Accelerator) -> tuple[Literal["last", "every"], str]:
    """Choose the micro-batches with a gradient reduction, and return the reason.

    ZeRO-2 and -3 hold only a shard of the gradient, so they reduce every micro-batch unless told to keep whole
    local gradients (``last``: one reduction, more memory).
    """
    stage = zero_stage_of(accelerator)
    when = when_to_reduce(policy, stage)
    if policy == "every":
        return when, "as requested: gradients are reduced on every micro-batch"
    if policy == "last":
        return when, "as requested: gradients are reduced on the last micro-batch"
    if when == "every":
        return when, f"ZeRO-{stage} keeps only a shard of the gradient, so every micro-batch is reduced"
    return when, "one reduction per optimizer step, on the last micro-batch"


def when_to_reduce(policy: SyncPolicy, zero_stage: int) -> Literal["last", "every"]:
    """Return the micro-batches after which a policy reduces gradients."""
    if policy != "auto":
        return policy
    return "every" if zero_stage >= 2 else "last"


@contextmanager
def no_sync(accelerator: Accelerator, model: nn.Module) -> Generator[None]:
    """Keep gradients local: no reduction in the body. It must contain the forward as well as the backward.

    Takes one module from ``accelerator.prepare``. A list would silently reduce every time (diffusers#10553), and an
    unprepared module has no reduction to suppress. Both raise ``TypeError``.
    """
    require_prepared(accelerator, model)
    accelerator.sync_gradients = False  # accelerator.backward passes it to DeepSpeed as the boundary
    try:
        with accelerator.no_sync(model):
            yield
    finally:
        # While it is False, Accelerate's optimizer silently skips its step.
        accelerator.sync_gradients = True


def zero_stage_of(accelerator: Accelerator) -> int:
    """Return the stage of ZeRO, 0 under any other strategy."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return 0
    plugin: Any = accelerator.state.deepspeed_plugin
    return int(plugin.zero_stage)


@contextmanager
def reduce_without_step(accelerator: Accelerator) -> Generator[None]:
    """Let ZeRO's engine reduce this micro-batch, but not step yet (policy ``every``)."""
    accelerator.sync_gradients = False
    try:
        yield
    finally:
        accelerator.sync_gradients = True


@contextmanager
def reduce_once(engine: Any) -> Generator[None]:
    """Keep the gradients of the body local under ZeRO-2 and -3, and reduce them at its end, but not after an error.

    DeepSpeed's own context also reduces after an error, and waits for processes that have not met it.
    """
    with ExitStack() as left, engine.coalesce_grad_reduction():
        try:
            yield
        except BaseException:
            # An error in the caller's loop closes the window's generator, so it arrives here as a `GeneratorExit`.
            for name in FLUSHES:
                setattr(engine, name, lambda _: None)
                left.callback(delattr, engine, name)
            raise


def will_rebuild_buckets(model: Any, processes: int) -> bool:
    """Return True before the first backward of DDP, after which torch's ``Reducer`` rebuilds its buckets.

    The position of an element in its bucket decides the order of its summation over three or more processes. The first
    step after a start would therefore differ in its last bits from the same step within a run, and a resume would not
    be exact.
    """
    if processes <= 2 or not isinstance(model, nn.parallel.DistributedDataParallel):
        return False
    return not model._has_rebuilt_buckets  # pyright: ignore[reportPrivateUsage]

"""Steer a short run of a recipe, and measure it inside its process.

It is entered through ``loop.observed``, once the model is prepared. It puts hooks on the optimizer and replaces the
iterator of steps. The recipe's own lines run unchanged.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel_train.data.loader import StepBatches, iterate_steps
from accel_train.data.sampler import BatchShard
from accel_train.metrics.records import write_json
from accel_train.verification.facts import Deviation, Facts

if TYPE_CHECKING:
    from accel_train.data.datasets import Batch, MapDataset
    from accel_train.loop import Training
    from accel_train.train_state import TrainState

OTHER_STATE = 20_231
"""Seed of the global generators in the run that must not depend on them. Any number unlikely as a recipe's seed."""


@contextmanager
def observing(
    deviation: Deviation, path: Path, training: Training, prepared: TrainState, dataset: MapDataset
) -> Generator[None]:
    """Observe a training loop, and write its facts to ``path`` when it ends without an error."""
    facts = Facts()
    _choose_evaluations(training, deviation, facts)
    # By identity, since groups hold parameters without names.
    names = {id(p): name for name, p in _trained(prepared.model).items()}
    for group in prepared.optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is not None:
                facts.groups_of[name] = facts.groups_of.get(name, 0) + 1
    facts.groups_of = {name: facts.groups_of.get(name, 0) for name in names.values()}
    reductions = _count_reductions(prepared.model)
    _hook_optimizer(prepared, names, facts)
    # After the model is built, so its initial weights stay those of the reference.
    if deviation.disturbs_generators:
        torch.manual_seed(OTHER_STATE)
        np.random.seed(OTHER_STATE)
        random.seed(OTHER_STATE)
    steps = _steps(training.steps, training, deviation, dataset)
    training.steps = _watched(steps, prepared, facts, reductions)
    yield
    # Not after an error: facts of half a run would mislead.
    if training.opened.accelerator.is_main_process:
        write_json(path, vars(facts))


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    # Names of the model itself, the same under each wrapper.
    inner: Any = getattr(model, "module", model)
    return {name: p for name, p in inner.named_parameters() if p.requires_grad}


def _choose_evaluations(training: Training, deviation: Deviation, facts: Facts) -> None:
    """Count the evaluations, and skip them unless the run is about them."""
    evaluate = training.evaluate

    def counted(evaluation: Any) -> Any:
        if not deviation.evaluates:
            return {}
        facts.evaluations += 1
        return evaluate(evaluation)

    # The recipe calls the method of this one object.
    setattr(training, "evaluate", counted)  # noqa: B010


def _steps(
    steps: Iterator[StepBatches], training: Training, deviation: Deviation, dataset: MapDataset
) -> Iterator[StepBatches]:
    """Yield the steps of the run, reversed or continued as the deviation says."""
    yield from _arranged(steps, deviation)
    opened = training.opened
    if deviation.continues_to is None:
        return
    accelerator = opened.accelerator
    shard = BatchShard(accelerator.process_index, accelerator.num_processes, opened.micro_batch_size)
    more = iterate_steps(
        dataset,
        training.order,
        shard,
        start_step=opened.max_steps,
        max_steps=deviation.continues_to,
        device=accelerator.device,
        config=opened.config.loader,
    )
    # Closing it also ends the workers of the loader.
    with closing(more):
        yield from _arranged(more, deviation)


def _arranged(steps: Iterator[StepBatches], deviation: Deviation) -> Iterator[StepBatches]:
    for batches in steps:
        if deviation.reverses_samples:
            reversed_batches = [_reversed(batch) for batch in batches.micro_batches]
            yield StepBatches(batches.step, reversed_batches, batches.data_wait_seconds)
        else:
            yield batches


def _reversed(batch: Batch) -> Batch:
    # Every field has the samples in its first dimension.
    return {name: value.flip(0) for name, value in batch.items()}


def _watched(
    steps: Iterator[StepBatches], prepared: TrainState, facts: Facts, reductions: list[float] | None
) -> Iterator[StepBatches]:
    """Yield the steps, and read learning rates and frozen groups after each."""
    names = {id(p): name for name, p in _trained(prepared.model).items()}
    frozen = set(names.values())
    for batches in steps:
        if reductions is not None:
            reductions.clear()
        yield batches
        # Here the recipe has run the lines of this step and asks for the next one.
        groups = prepared.optimizer.param_groups
        facts.learning_rates.append([float(group["lr"]) for group in groups])
        if reductions is not None:
            facts.reduced.append(sum(reductions))
        for group in groups:
            if not group.get("frozen"):
                frozen.difference_update(names.get(id(p), "") for p in group["params"])
        # A parameter in no group has its own check.
        facts.always_frozen = [name for name in sorted(frozen) if facts.groups_of[name]]


def _count_reductions(model: nn.Module) -> list[float] | None:
    """Return a list that grows by the share of the parameters in each reduction of DDP. None if it cannot count them.

    The hook reduces as DDP does without one.
    """
    if not isinstance(model, DistributedDataParallel):
        return None
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    # Frozen parameters are in no bucket.
    total = sum(p.numel() for p in model.parameters() if p.requires_grad)

    shares: list[float] = []

    def counted(bucket: Any) -> Any:
        shares.append(bucket.buffer().numel() / total)
        return allreduce_hook(None, bucket)  # pyright: ignore[reportArgumentType]  # None: all processes

    try:
        # A lambda, because DDP compares annotations, which are text in this file.
        model.register_comm_hook(None, lambda _, bucket: counted(bucket))
    except RuntimeError:
        # DDP takes one hook only, and the recipe has its own.
        return None
    return shares


def _hook_optimizer(prepared: TrainState, names: dict[int, str], facts: Facts) -> None:
    """Measure the gradient before each step of the optimizer, and whether the first step moves the weights."""
    inner: Any = getattr(prepared.optimizer, "optimizer", prepared.optimizer)
    # DeepSpeed's optimizer is stepped by its engine.
    if not isinstance(inner, torch.optim.Optimizer) or not hasattr(inner, "register_step_pre_hook"):
        return
    parameters = _trained(prepared.model)
    before: dict[str, Tensor] = {}

    def in_front(optimizer: torch.optim.Optimizer, *_: object) -> None:
        gradients = {name: _whole(p.grad) for name, p in parameters.items() if p.grad is not None}
        # Counted all the same, because norms are paired with log lines by their number.
        if not gradients:
            facts.clipped_norms.append(0.0)
            return
        # In float64, so this sum adds no rounding to the comparison.
        norm = torch.linalg.vector_norm(torch.stack([g.double().norm() for g in gradients.values()]))
        facts.clipped_norms.append(float(norm))
        for name, gradient in gradients.items():
            # `max` raises for a tensor without elements.
            largest = float(gradient.abs().max()) if gradient.numel() else 0.0
            facts.largest_gradients[name] = max(facts.largest_gradients.get(name, 0.0), largest)
        moves = any(group["lr"] > 0 for group in optimizer.param_groups)
        if moves and facts.first_moving_step is None:
            facts.first_moving_step = len(facts.clipped_norms) - 1
            # For one step only: the copy needs the memory of a second model.
            before.update({name: _whole(p).clone() for name, p in parameters.items()})

    def behind(*_: object) -> None:
        for name, value in before.items():
            facts.moved += not torch.equal(value, _whole(parameters[name]))
        before.clear()

    inner.register_step_pre_hook(in_front)
    inner.register_step_post_hook(behind)


def _whole(tensor: Tensor) -> Tensor:
    """Return the tensor, whole if it is a shard of FSDP2. Collective under FSDP2."""
    value: Any = tensor.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value

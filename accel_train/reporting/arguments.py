"""Checks that the arguments of a training loop match the opened experiment. A mismatch would otherwise silently train
or record something else.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from accel_train.config import UsageError
from accel_train.data import sampler
from accel_train.data.datasets import MapDataset, refuse_other_than_map_style
from accel_train.data.sampler import Sampler, StepSampler
from accel_train.training.shards import plain_module

if TYPE_CHECKING:
    from accel_train.train_state import Experiment, TrainState

logger = logging.getLogger(__name__)


def check_arguments(opened: Experiment, prepared: TrainState, dataset: MapDataset, order: Sampler) -> None:
    """Raise ``UsageError`` for data or an order that differ from the experiment's. Warns of a model in eval mode.

    Not collective: each process checks its own arguments, and the main process warns.
    """
    refuse_other_than_map_style(dataset)
    sampler.refuse_other_data(order, len(dataset))
    _refuse_other_epoch(opened, len(dataset))
    _refuse_other_batches(opened, order)
    _warn_of_eval_mode(prepared)


def _refuse_other_epoch(opened: Experiment, size: int) -> None:
    said = opened.history.samples
    if said != size:
        raise UsageError(
            f"dataset_size: {said}: the dataset given to loop.training has {size} samples, and the two must be equal, "
            "because the steps of max_epochs follow from them; pass open_experiment(..., dataset_size=len(data)) with "
            "the data that loop.training gets"
        )


def _refuse_other_batches(opened: Experiment, order: Sampler) -> None:
    """Raise ``UsageError`` for an order whose batch sizes differ from those of the options."""
    schedule = opened.batch_schedule
    has_its_own = isinstance(order, StepSampler) and bool(order.schedule.steps)
    given = order
    if not has_its_own:
        given = sampler.scheduled(order, schedule)
    steps = {opened.start_step, opened.max_steps - 1, *schedule.steps}
    if isinstance(given, StepSampler):
        steps.update(given.schedule.steps)
    for step in sorted(steps):
        asked = opened.batch_size(step)
        found = given.batch_size(step)
        if found != asked or order.global_batch_size != opened.config.global_batch_size:
            raise UsageError(
                f"global_batch_size: {asked}: the order given to loop.training, a {type(order).__name__}, has {found} "
                f"samples in step {step + 1}, and {asked} are required, because every record counts them; pass "
                "config.global_batch_size, as in StepSampler(len(data), config.global_batch_size, config.seed), and "
                "give other batches by --batch_schedule.steps and --batch_schedule.sizes"
            )


def _warn_of_eval_mode(prepared: TrainState) -> None:
    # The unwrapped model, because DDP's wrapper has its own mode. Submodules may be in eval mode on purpose.
    if prepared.accelerator.is_main_process and not plain_module(prepared.model).training:
        logger.warning(
            "the model is in eval mode, as from_pretrained of transformers and diffusers returns it, and stays in it: "
            "its dropout is off, and its batch norms keep their statistics; call model.train() before "
            "preparation.prepare to train it in train mode"
        )

"""Balanced sampling of several tasks, one task per step: a function of (seed, step).

The dataset is [task 0 | task 1 | ...]. Samples of different tasks may differ in shape, so each batch has one task.
"""

from dataclasses import dataclass, field

import torch

from accel_train import rng
from accel_train.config import UsageError
from accel_train.data.sampler import Draw, StepSampler


@dataclass(frozen=True)
class TaskSampler:
    """`StepSampler` for several tasks. Stateless, with random access to any step.

    Steps come in blocks: one step of every task, or `weights[k]` of task k, in an order drawn from (seed, block).
    Within a task the order is a `StepSampler` over its samples alone: each of its epochs has each of its samples once.
    Refuses a task smaller than one global batch.
    """

    sizes: tuple[int, ...]
    global_batch_size: int
    seed: int
    weights: tuple[int, ...] | None = None
    """Steps of each task in a block, at least 1. None: 1 of each."""
    _samplers: tuple[StepSampler, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        weights = self._weights()
        if not self.sizes or len(weights) != len(self.sizes) or min(weights) < 1:
            raise UsageError(
                f"task_weights {list(weights)} for {len(self.sizes)} task(s): at least one task is required, and for "
                "each a whole number of steps, 1 or more. Give one for each of data.tasks, in its order; leave a task "
                "without steps out of data.tasks, or leave task_weights out for one step of each."
            )
        self.refuse_small_data()
        samplers = tuple(self._sampler(task) for task in range(len(self.sizes)))
        object.__setattr__(self, "_samplers", samplers)  # the dataclass is frozen

    def refuse_small_data(self) -> None:
        """Raise `UsageError` for a task of fewer samples than a global batch. A simulation skips this check."""
        for task, size in enumerate(self.sizes):
            if size < self.global_batch_size:
                raise UsageError(
                    f"global_batch_size: {self.global_batch_size}: task {task + 1} of {len(self.sizes)} has {size} "
                    f"samples, but at least one global batch of each task is required; lower it to {min(self.sizes)} "
                    "or less, or use more data"
                )

    @property
    def dataset_size(self) -> int:
        """Number of samples of all tasks."""
        return sum(self.sizes)

    def task_of_step(self, step: int) -> int:
        """Return the index of the task of `step`, the same on every process."""
        task, _ = self._locate(step)
        return task

    def batch_size(self, step: int) -> int:
        """Return the number of samples of a step, the same for every step."""
        return self.global_batch_size

    def draws(self, step: int) -> list[Draw]:
        """Return the global batch of optimizer step `step`, in the order of positions."""
        task, task_step = self._locate(step)
        draws = self._samplers[task].draws(task_step)
        return self._in_dataset(task, draws)

    def epoch(self, step: int) -> float:
        """Return the samples drawn before `step` divided by the samples of all tasks.

        Small tasks have completed more epochs than this.
        """
        return step * self.global_batch_size / self.dataset_size

    def micro_batches(
        self,
        step: int,
        rank: int,
        world_size: int,
        micro_batch_size: int,
    ) -> list[list[Draw]]:
        """Return the share of `rank` in `step`, as `StepSampler.micro_batches` does."""
        task, task_step = self._locate(step)
        micro_batches = self._samplers[task].micro_batches(task_step, rank, world_size, micro_batch_size)
        return [self._in_dataset(task, draws) for draws in micro_batches]

    def _weights(self) -> tuple[int, ...]:
        if self.weights is None:
            return (1,) * len(self.sizes)
        return self.weights

    def _sampler(self, task: int) -> StepSampler:
        # Task 0 keeps the seed: alone, it equals a StepSampler to the last bit.
        seed = self.seed
        if task > 0:
            # Tasks of equal size would otherwise share one order.
            seed = rng.key(self.seed, "task", task) & 0xFFFFFFFF
        return StepSampler(self.sizes[task], self.global_batch_size, seed)

    def _locate(self, step: int) -> tuple[int, int]:
        """Return the task of a step and the number of earlier steps of that task, from the step's block alone."""
        weights = self._weights()
        tasks: list[int] = []
        for task, weight in enumerate(weights):
            tasks += [task] * weight
        block, slot = divmod(step, len(tasks))
        # Only the slots up to this one are permuted.
        places = torch.arange(slot + 1, device="cpu")
        # Keyed by the block: any step is found without drawing the blocks before it.
        key = rng.key(self.seed, "tasks", block)
        order = rng.permute(places, len(tasks), key)
        chosen = [tasks[place] for place in order.tolist()]
        task = chosen[slot]
        earlier_in_block = chosen[:slot].count(task)
        return task, block * weights[task] + earlier_in_block

    def _in_dataset(self, task: int, draws: list[Draw]) -> list[Draw]:
        """Renumber a task's samples as in the dataset of all tasks. occurrence is epoch * dataset_size + sample."""
        offset = sum(self.sizes[:task])
        renumbered: list[Draw] = []
        for draw in draws:
            epoch = draw.occurrence // self.sizes[task]
            # Random draws are keyed by the occurrence, which must differ between tasks.
            sample = offset + draw.sample
            occurrence = epoch * self.dataset_size + sample
            renumbered.append(draw._replace(sample=sample, occurrence=occurrence))
        return renumbered

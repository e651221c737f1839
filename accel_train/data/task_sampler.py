"""Steps that belong to one of several tasks each, balanced: a function of (seed, step) and of nothing else.

The dataset is [task 0 | task 1 | ...]. Samples of different tasks may differ in shape, so that a batch is of one task.
"""

from dataclasses import dataclass, field

import torch

from accel_train import rng
from accel_train.config import UsageError
from accel_train.data.sampler import Draw, StepSampler


@dataclass(frozen=True)
class TaskSampler:
    """What `StepSampler` is for one task, for several. Keeps no position and may be asked for any step.

    Steps come in blocks: one step of every task, or `weights[k]` of task k, in an order drawn from (seed, block).
    Within a task the order is that of a `StepSampler` over its samples alone, so that each of its epochs holds each of
    its samples once. Refuses a task smaller than one global batch.
    """

    sizes: tuple[int, ...]
    global_batch_size: int
    seed: int
    weights: tuple[int, ...] | None = None
    """Steps of each task in a block, 1 or more; None: 1 of each."""
    _samplers: tuple[StepSampler, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        weights = self._weights()
        if not self.sizes or len(weights) != len(self.sizes) or min(weights) < 1:
            raise UsageError(
                f"task_weights {list(weights)} for {len(self.sizes)} task(s): at least one task is required, and for "
                "each a whole number of steps, 1 or more. Give one for each of data.tasks, in its order; leave a task "
                "without steps out of data.tasks, or leave task_weights out for one step of each."
            )
        for task, size in enumerate(self.sizes):
            if size < self.global_batch_size:
                raise UsageError(
                    f"global_batch_size={self.global_batch_size}: task {task + 1} of {len(self.sizes)} has {size} "
                    "samples, at least one global batch of each task is needed. Lower it to "
                    f"{min(self.sizes)} or less, or use more data."
                )
        object.__setattr__(self, "_samplers", tuple(self._sampler(task) for task in range(len(self.sizes))))

    @property
    def dataset_size(self) -> int:
        """Samples of all tasks together."""
        return sum(self.sizes)

    def task_of_step(self, step: int) -> int:
        """Index of the task that `step` trains: the same on every process."""
        return self._place(step)[0]

    def draws(self, step: int) -> list[Draw]:
        """The global batch of optimizer step `step`, in the order of positions."""
        task, own = self._place(step)
        return self._in_dataset(task, self._samplers[task].draws(own))

    def epoch(self, step: int) -> float:
        """Samples drawn before `step` over those of all tasks. Small tasks are passed over more often than this."""
        return step * self.global_batch_size / self.dataset_size

    def micro_batches(self, step: int, rank: int, world_size: int, micro_batch_size: int) -> list[list[Draw]]:
        """What `rank` computes in `step`: see `StepSampler.micro_batches`."""
        task, own = self._place(step)
        pieces = self._samplers[task].micro_batches(own, rank, world_size, micro_batch_size)
        return [self._in_dataset(task, piece) for piece in pieces]

    def _weights(self) -> tuple[int, ...]:
        return self.weights if self.weights is not None else (1,) * len(self.sizes)

    def _sampler(self, task: int) -> StepSampler:
        # Tasks of one size would else be read in one order. Task 0 alone is a StepSampler to the last bit.
        seed = rng.key(self.seed, "task", task) & 0xFFFFFFFF if task else self.seed
        return StepSampler(self.sizes[task], self.global_batch_size, seed)

    def _place(self, step: int) -> tuple[int, int]:
        """The task of a step, and how many steps of that task come before it: the work of one block."""
        weights = self._weights()
        tasks = [task for task, weight in enumerate(weights) for _ in range(weight)]
        block, slot = divmod(step, len(tasks))
        order = rng.permute(torch.arange(slot + 1, device="cpu"), len(tasks), rng.key(self.seed, "tasks", block))
        chosen = [tasks[place] for place in order.tolist()]
        task = chosen[slot]
        return task, block * weights[task] + chosen[:slot].count(task)

    def _in_dataset(self, task: int, draws: list[Draw]) -> list[Draw]:
        """The same samples as numbered in the dataset of all tasks; an occurrence is epoch * dataset_size + sample."""
        before, size, total = sum(self.sizes[:task]), self.sizes[task], self.dataset_size
        return [
            draw._replace(
                sample=before + draw.sample, occurrence=draw.occurrence // size * total + before + draw.sample
            )
            for draw in draws
        ]

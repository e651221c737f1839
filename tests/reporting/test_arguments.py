"""What loop.training is given agrees with the experiment that was opened, or is refused."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.data.grouping.task_sampler import TaskSampler
from accel_train.data.options import ONE_BATCH_SIZE, BatchScheduleConfig
from accel_train.data.sampler import Sampler, StepSampler
from accel_train.reporting.arguments import check_arguments

GROWING = BatchScheduleConfig((3, 6), (8, 12))


class Rows:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor(float(index))}


@dataclass(frozen=True)
class Doubled(StepSampler):
    """An order of one's own, whose later steps are larger."""

    def batch_size(self, step: int) -> int:
        return self.global_batch_size * (1 + (step > 5))


def opened(samples: int = 40, schedule: BatchScheduleConfig = ONE_BATCH_SIZE) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(global_batch_size=4),
        history=SimpleNamespace(samples=samples),
        start_step=2,
        max_steps=10,
        batch_schedule=schedule,
        batch_size=lambda step: schedule.size(4, step),
    )


def check(experiment: Any, order: Sampler, model: nn.Module | None = None) -> None:
    prepared: Any = SimpleNamespace(accelerator=Accelerator(cpu=True), model=model or nn.Linear(1, 1))
    check_arguments(experiment, prepared, Rows(), order)


def test_orders_of_the_options_pass() -> None:
    check(opened(), StepSampler(40, 4, 0))
    check(opened(), TaskSampler((20, 20), 4, 0))
    check(opened(schedule=GROWING), StepSampler(40, 4, 0))
    check(opened(schedule=GROWING), StepSampler(40, 4, 0, schedule=GROWING))


@pytest.mark.parametrize(
    "order",
    [
        StepSampler(40, 2, 0),
        TaskSampler((20, 20), 2, 0),
        StepSampler(40, 4, 0, schedule=GROWING),
        Doubled(40, 4, 0),
    ],
)
def test_other_batches_than_those_of_the_options_are_refused(order: Sampler) -> None:
    with pytest.raises(
        UsageError, match=rf"global_batch_size: 4: the order .* {type(order).__name__}, has \d+ samples"
    ):
        check(opened(), order)


def test_a_schedule_of_the_order_alone_is_refused_beside_that_of_the_options() -> None:
    other = BatchScheduleConfig((3,), (20,))
    with pytest.raises(UsageError, match=r"has 20 samples in step 4, and 8 are required"):
        check(opened(schedule=GROWING), StepSampler(40, 4, 0, schedule=other))


def test_another_length_is_refused() -> None:
    with pytest.raises(UsageError, match=r"order: it is for 39 samples, but the dataset has 40; pass the length"):
        check(opened(), StepSampler(39, 4, 0))
    with pytest.raises(UsageError, match=r"dataset_size: 30: .* has 40 samples.* dataset_size=len\(data\)"):
        check(opened(samples=30), StepSampler(40, 4, 0))


def test_a_model_in_eval_mode_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    model[1].eval()  # a frozen part
    check(opened(), StepSampler(40, 4, 0), model)
    assert not caplog.records
    # DDP's wrapper is in train mode all the same.
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = model.eval()
    check(opened(), StepSampler(40, 4, 0), wrapped)
    [record] = caplog.records
    assert "the model is in eval mode" in record.message
    assert "call model.train() before preparation.prepare" in record.message

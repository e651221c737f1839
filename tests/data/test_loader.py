"""Steps on the device: the same samples and the same noise for every cut, worker count and start."""

import logging
import multiprocessing
import random
import time
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from accel_train.config import UsageError
from accel_train.data import loader
from accel_train.data.datasets import fingerprint_of
from accel_train.data.heldout import heldout_batches
from accel_train.data.loader import StepBatches, iterate_steps
from accel_train.data.options import LoaderConfig, resolve_loader
from accel_train.data.sampler import BatchShard, StepSampler
from tests.waiting import until

CPU = torch.device("cpu")
WHOLE = BatchShard(rank=0, world_size=1, micro_batch_size=4)
# Python 3.12 and later warn of any fork in a process with threads
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


class Noisy:
    """Each sample tells its index and draws from the three global generators, twice."""

    def __init__(self, size: int, seconds: float = 0.0) -> None:
        self.size, self.seconds = size, seconds
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read.append(index)
        time.sleep(self.seconds)
        noise = [random.random(), np.random.normal(), float(torch.randn(())), random.random()]
        return {"value": torch.tensor(index), "noise": torch.tensor(noise)}


class Counted(Noisy):
    """Counts what is read in any process."""

    def __init__(self, size: int, seconds: float) -> None:
        super().__init__(size, seconds)
        self.count = multiprocessing.Value("i", 0)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        self.count.value += 1
        return sample


def collect(
    cut: BatchShard = WHOLE,
    *,
    workers: int = 0,
    start: int = 0,
    stop: int = 6,
    batch: int = 14,
    dataset: Noisy | None = None,
) -> list[StepBatches]:
    dataset = dataset or Noisy(40)
    sampler = StepSampler(len(dataset), batch, seed=5)
    config = LoaderConfig(num_workers=workers)
    return list(iterate_steps(dataset, sampler, cut, start_step=start, max_steps=stop, device=CPU, config=config))


def assert_same(first: list[StepBatches], second: list[StepBatches]) -> None:
    assert [step.step for step in first] == [step.step for step in second]
    for a, b in zip(first, second, strict=True):
        assert len(a.micro_batches) == len(b.micro_batches)
        for x, y in zip(a.micro_batches, b.micro_batches, strict=True):
            assert x.keys() == y.keys()
            assert all(torch.equal(x[name], y[name]) for name in x)


def counted_draws(steps: list[StepBatches]) -> Counter[tuple[int, int, int, int]]:
    """(step, sample, occurrence, position) of the samples that count."""
    return Counter(
        (step.step, *draw)
        for step in steps
        for batch in step.micro_batches
        for *draw, weight in zip(
            *(batch[name].tolist() for name in ("sample", "occurrence", "position", "weight")), strict=True
        )
        if weight
    )


def noise_by_occurrence(steps: list[StepBatches]) -> dict[int, tuple[float, ...]]:
    batches = [batch for step in steps for batch in step.micro_batches]
    return {
        occurrence: tuple(noise)
        for batch in batches
        for occurrence, noise in zip(batch["occurrence"].tolist(), batch["noise"].tolist(), strict=True)
    }


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch_size", [16, 3, 1])
def test_every_cut_reads_the_same(world_size, micro_batch_size):
    ranks = [collect(BatchShard(rank, world_size, micro_batch_size)) for rank in range(world_size)]
    sampler = StepSampler(40, 14, seed=5)
    expected = Counter((step, *draw[:3]) for step in range(6) for draw in sampler.draws(step))
    assert sum((counted_draws(steps) for steps in ranks), Counter()) == expected
    together = [step for steps in ranks for step in steps]
    assert noise_by_occurrence(together) == noise_by_occurrence(collect())
    for step in together:
        assert len(step.micro_batches) == len(ranks[0][0].micro_batches)
        for batch in step.micro_batches:
            assert torch.equal(batch["value"], batch["sample"])  # content and label of a row belong together
            assert batch["weight"].dtype == torch.float32
            assert batch["sample"].dtype == batch["occurrence"].dtype == batch["position"].dtype == torch.int64
    for step in range(6):
        assert sum(float(b["weight"].sum()) for steps in ranks for b in steps[step].micro_batches) == 14


def test_workers_change_nothing():
    cut = BatchShard(1, 3, 2)
    assert_same(collect(cut), collect(cut, workers=2))


@pytest.mark.parametrize("workers", [0, 1])
def test_resume_equals_and_reads_nothing_of_earlier_steps(workers):
    dataset = Noisy(40)
    later = collect(start=4, workers=workers, dataset=dataset)
    assert_same(collect()[4:], later)
    sampler = StepSampler(40, 14, seed=5)
    expected = [draw.sample for step in (4, 5) for draw in sampler.draws(step)]
    assert dataset.read == (expected if workers == 0 else [])  # or else read in the worker's copy


def test_noise_differs_between_samples_and_epochs():
    noise = noise_by_occurrence(collect(stop=12))
    assert len(noise) == 12 * 14
    for column in range(4):
        assert len({values[column] for values in noise.values()}) == 12 * 14
    assert noise[0] != noise[40]  # sample 0 in the first and in the second epoch


@pytest.mark.parametrize("workers", [0, 1])
def test_global_generators_are_left_alone(workers):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    np.random.normal()  # leaves a second normal number waiting in numpy's state
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    collect(workers=workers)
    assert random.getstate() == before[0]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before[1], strict=True))
    assert torch.equal(torch.get_rng_state(), before[2])


def test_nothing_left_to_do():
    assert collect(start=6, stop=6) == []
    assert collect(start=9, stop=6) == []


def test_data_wait_is_what_the_loop_waited():
    slow = collect(stop=2, dataset=Noisy(40, seconds=0.005))
    assert all(step.data_wait_seconds >= 14 * 0.005 for step in slow)
    dataset = Counted(40, seconds=0.03)
    config = LoaderConfig(num_workers=1, prefetch_factor=4)
    waits: list[float] = []
    arguments = {"start_step": 0, "max_steps": 3, "device": CPU, "config": config}
    for step in iterate_steps(dataset, StepSampler(40, 14, seed=0), BatchShard(0, 1, 14), **arguments):
        waits.append(step.data_wait_seconds)
        until(lambda: dataset.count.value == 3 * 14)  # the worker has read the next steps meanwhile
    assert max(waits[1:]) < 14 * 0.03


class Collating(Noisy):
    """Collates its samples itself."""

    def collate(self, samples):
        return {"twice": default_collate([2 * sample["value"] for sample in samples])}


def test_a_dataset_may_collate_its_samples_in_training_and_evaluation():
    sampler = StepSampler(40, 8, seed=0)
    steps = iterate_steps(Collating(40), sampler, BatchShard(0, 1, 8), start_step=0, max_steps=1, device=CPU)
    [batch] = next(steps).micro_batches
    assert torch.equal(batch["twice"], 2 * batch["sample"])
    [heldout] = heldout_batches(Collating(40), 4, 4, 0, 1, CPU)
    assert torch.equal(heldout["twice"], 2 * heldout["sample"])


class Ragged(Noisy):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"fixed": torch.zeros(2), "text": torch.zeros(1 + index)}


def test_samples_of_several_shapes_name_their_field():
    steps = iterate_steps(Ragged(4), StepSampler(4, 4, seed=0), WHOLE, start_step=0, max_steps=1, device=CPU)
    with pytest.raises(UsageError, match=r"\(1,\).* in the field 'text': one shape is required; pad them .* collate\("):
        next(steps)


def test_another_dataset_than_the_sampler_was_made_for():
    with pytest.raises(UsageError, match="for 39 samples, but the dataset has 40"):
        iterate_steps(Noisy(40), StepSampler(39, 8, seed=0), BatchShard(0, 1, 8), start_step=0, max_steps=1, device=CPU)


class Stream(IterableDataset):
    """A dataset without an index, whose class has one that raises."""

    def __iter__(self):
        return iter(range(8))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (DataLoader(list(range(8)), batch_size=1), "a DataLoader was given, .*pass the dataset itself"),
        (Stream(), "a Stream was given, .*read it into a list"),
        (iter(range(8)), "a range_iterator was given, but a map-style dataset is required"),
    ],
)
def test_data_without_an_index_are_refused_in_training_and_evaluation(given, words):
    shard = BatchShard(0, 1, 4)
    readers = (
        lambda: iterate_steps(given, StepSampler(8, 4, 0), shard, start_step=0, max_steps=1, device=CPU),
        lambda: next(heldout_batches(given, 8, 4, 0, 1, CPU)),
        lambda: fingerprint_of(given),
    )
    for read in readers:
        with pytest.raises(UsageError, match=words):
            read()


def test_auto_settings():
    cpu = resolve_loader(LoaderConfig(), CPU)
    assert (cpu.num_workers, cpu.pin_memory) == (0, False)
    assert "CPU" in cpu.reason


def test_auto_workers_share_the_cores(monkeypatch):
    monkeypatch.setattr("accel_train.data.options.usable_cores", lambda: (24, "affinity"))
    cuda = torch.device("cuda")
    assert resolve_loader(LoaderConfig(), cuda).num_workers == 8
    assert resolve_loader(LoaderConfig(), cuda).pin_memory
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    settings = resolve_loader(LoaderConfig(prefetch_factor=3, timeout_seconds=7), cuda)
    assert settings[:4] == (5, 3, True, 7)
    assert "24 cores for 4" in settings.reason
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "24")
    assert resolve_loader(LoaderConfig(), cuda).num_workers == 0


def test_workers_live_through_epochs():
    steps = iterate_steps(
        Noisy(10),
        StepSampler(10, 8, seed=0),
        BatchShard(0, 1, 4),
        start_step=0,
        max_steps=8,
        device=CPU,
        config=LoaderConfig(num_workers=2),
    )
    pids = [sorted(p.pid for p in multiprocessing.active_children()) for step in steps if step.step < 5]
    assert len(pids) == 5  # four epochs
    assert len(pids[0]) == 2
    assert all(each == pids[0] for each in pids)


@pytest.mark.parametrize(
    ("device", "options", "words"),
    [
        (CPU, {}, ["0 workers (auto: training on the CPU keeps the cores busy), pin_memory=False"]),
        (
            CPU,
            {"num_workers": 3, "prefetch_factor": 5},
            ["3 workers (num_workers as asked), each 5 micro-batches ahead"],
        ),
        (
            torch.device("cuda"),
            {},
            ["cores for 1 training processes", "pin_memory=True", "copied to the device during"],
        ),
    ],
)
def test_the_choice_is_printed(caplog, device, options, words):
    with caplog.at_level(logging.INFO, "accel_train.data.loader"):
        iterate_steps(
            Noisy(40),
            StepSampler(40, 8, seed=0),
            BatchShard(0, 1, 8),
            start_step=0,
            max_steps=1,
            device=device,
            config=LoaderConfig(**options),
        )
    assert all(word in caplog.text for word in words), caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"num_workers": 0, "prefetch_factor": 4},
            ["loader.prefetch_factor: 4", "loader.num_workers: 0", "--loader.num_workers 1 or more"],
        ),
        ({"num_workers": 0, "timeout_seconds": 9.0}, ["loader.timeout_seconds: 9:", "loader.num_workers: 0"]),
        ({"prefetch_factor": 4}, ["loader.prefetch_factor: 4", "loader.num_workers: auto, which chose 0"]),
        ({"pin_memory": True}, ["loader.pin_memory: True", "on cpu", "auto or False"]),
    ],
)
def test_options_are_obeyed_or_refused(options, words):
    with pytest.raises(UsageError) as error:
        resolve_loader(LoaderConfig(**options), CPU)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workers", [0, 2])
def test_prefetch_on_cuda_gives_the_same(workers):
    sampler, cut, cuda = StepSampler(40, 14, seed=5), BatchShard(0, 1, 4), torch.device("cuda")
    config = LoaderConfig(num_workers=workers)
    steps: list[StepBatches] = []
    for step in iterate_steps(Noisy(40), sampler, cut, start_step=0, max_steps=6, device=cuda, config=config):
        torch.cuda._sleep(10_000_000)  # copies must be ordered against work that is still queued
        batches = [{name: tensor.clone() for name, tensor in b.items()} for b in step.micro_batches]
        steps.append(StepBatches(step.step, batches, step.data_wait_seconds))
    assert all(tensor.is_cuda for step in steps for batch in step.micro_batches for tensor in batch.values())
    on_host = [[{n: t.cpu() for n, t in b.items()} for b in step.micro_batches] for step in steps]
    assert_same(collect(), [StepBatches(i, batches, 0.0) for i, batches in enumerate(on_host)])


def test_waits_of_steps_that_are_read_ahead_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step two are waited for, and before the last none. Without a device, whose copies cost nothing
    here."""

    def await_copy(step: StepBatches, copied: None, device: torch.device, seconds: float) -> StepBatches:
        return StepBatches(step.step, [], seconds)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(loader, "_start_copy", lambda host, stream, device: (host, None))
    monkeypatch.setattr(loader, "_await_copy", await_copy)
    read = (StepBatches(step, [], seconds) for step, seconds in enumerate((1.0, 2.0, 4.0, 8.0)))
    waits = [(step.step, step.data_wait_seconds) for step in loader._copy_ahead(read, torch.device("cuda"))]
    assert waits == [(0, 3.0), (1, 4.0), (2, 8.0), (3, 0.0)]


def test_more_workers_than_the_cores_can_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_train.data.options.usable_cores", lambda: (4, "affinity"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert resolve_loader(LoaderConfig(num_workers=16), torch.device("cpu")).num_workers == 16
    with pytest.raises(UsageError, match=r"num_workers: 17: .* 34 .*, on 4 core.*at most 32.* 16 or less"):
        resolve_loader(LoaderConfig(num_workers=17), torch.device("cpu"))

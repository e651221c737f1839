"""What goes wrong while samples are read, and that no worker is left behind."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accel_train.config import MendedError, UsageError
from accel_train.data.datasets import MapDataset, fingerprint_of
from accel_train.data.loader import StepBatches, iterate_steps
from accel_train.data.options import LoaderConfig
from accel_train.data.reading import LoadingError
from accel_train.data.sampler import BatchShard, StepSampler

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

SAMPLER = StepSampler(40, 8, seed=0)
BAD = SAMPLER.draws(3)[5].sample
"""Read in step 3, second micro-batch of two. Micro-batches alternate between two workers: worker 1 reads it."""

FIRST = SAMPLER.draws(0)[4].sample
"""The first that worker 1 reads."""


def lock_of_the_dataloader() -> AbstractContextManager[object]:
    """In a worker: the lock that it takes in every turn of torch's own loop to look whether it should end."""
    frame = sys._getframe()
    while "done_event" not in frame.f_locals:
        frame = frame.f_back
    return getattr(frame.f_locals["done_event"], "_cond", nullcontext())


class Faulty:
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == BAD and self.fault == "raise":
            raise OSError(f"cannot read file {index}.png")
        if index == BAD and self.fault == "usage":
            raise UsageError("entry 7: damaged. Start the run again")
        if index == BAD and self.fault == "mended":
            raise MendedError("entry 7: damaged and deleted. Start the run again")
        if index == BAD and self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == FIRST and self.fault == "kill first":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == BAD and self.fault == "kill holding the DataLoader's lock":
            with lock_of_the_dataloader():
                os.kill(os.getpid(), signal.SIGKILL)
        if index == BAD and self.fault == "hang":
            time.sleep(600)
        if self.fault == "field":
            return {"weight": torch.zeros(())}
        if self.fault == "text":
            return {"caption": "a cat"}
        return {"value": torch.tensor(index)}


class Whole(Faulty):
    """Reads a micro-batch at once; its own single samples are what it falls back to when that fails."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index)

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        if BAD in indices and self.fault == "batch":
            raise ValueError("cannot stack")
        if self.fault != "batch":
            for index in indices:
                super().__getitem__(index)
        return {"value": torch.tensor(indices), "at_once": torch.ones(len(indices))}


def steps_of(dataset: MapDataset, **options) -> Generator[StepBatches, None, None]:
    config = LoaderConfig(**options)
    return iterate_steps(
        dataset, SAMPLER, BatchShard(0, 1, 4), start_step=0, max_steps=5, device=torch.device("cpu"), config=config
    )


@pytest.fixture(autouse=True)
def no_worker_is_left():
    yield
    left = multiprocessing.active_children()
    for process in left:
        process.kill()
        process.join()
    assert left == []


@pytest.mark.fault(
    "F54", injected="a sample that raises", outcome="the error names the sample, the step and the worker"
)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_names_the_sample(workers):
    seen: list[int] = []
    with pytest.raises(LoadingError) as error:
        seen.extend(step.step for step in steps_of(Faulty("raise"), num_workers=workers))
    text = str(error.value)
    assert text.startswith(f"sample {BAD} of step 4, micro-batch 2 (samples ")
    assert f"OSError: cannot read file {BAD}.png" in text
    assert ("worker 1 (pid " if workers else "the training process") in text
    assert seen == [0, 1, 2]
    if workers:
        assert "in __getitem__" in text  # where in the dataset
        assert multiprocessing.active_children() == []  # although the error is still held here
    else:
        assert isinstance(error.value.__cause__, OSError)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_usage_error_stays_one_and_has_no_traceback(workers):
    with pytest.raises(UsageError) as error:
        list(steps_of(Faulty("usage"), num_workers=workers))
    reader = r"worker 1 \(pid \d+\)" if workers else "the training process"
    place = rf"sample {BAD} of step 4, micro-batch 2 \(samples [\d, ]+\), in {reader}"
    assert re.fullmatch(f"{place}: entry 7: damaged. Start the run again", str(error.value)), str(error.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_defect_that_the_next_start_mends_is_still_known_as_one(workers):
    with pytest.raises(MendedError, match=f"sample {BAD} of step 4.*: entry 7: damaged and deleted"):
        list(steps_of(Faulty("mended"), num_workers=workers))


@pytest.mark.fault(
    "F54",
    injected="SIGKILL of a loader worker while it reads",
    outcome="an error with worker and sample; no worker is left",
)
def test_a_worker_killed_while_it_reads():
    with pytest.raises(LoadingError) as error:
        list(steps_of(Faulty("kill"), num_workers=2))
    text = str(error.value)
    # what the worker had read before and not yet handed over is lost with it
    assert re.match(r"step [1234], micro-batch [12] \(samples \d+, \d+, \d+, \d+\) did not arrive: ", text), text
    assert re.search(rf"It was worker 1 \(pid \d+\), reading sample {BAD} of step 4\.", text), text
    assert "lower loader.num_workers" in text
    assert multiprocessing.active_children() == []


class Sent:
    """Has micro-batches that a worker can read and cannot send."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.zeros(2**21)}  # 8 MiB

    def fingerprint(self) -> str:
        return "sent"


class SentAtOnce(Sent):
    """torch shares its micro-batches in a thread that sends them, and not while they are collated."""

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        return {"x": torch.zeros(len(indices), 2**21)}


@pytest.mark.parametrize(
    ("kind", "begins"),
    [
        ("Sent", "collating of step 1, micro-batch 1 "),
        ("SentAtOnce", r"worker 0 \(pid \d+\) has read a micro-batch but could not hand it over: RuntimeError: "),
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="a /dev/shm of its own needs root")
def test_a_full_dev_shm_is_named_at_once(kind, begins):
    code = f"from tests.data.test_reading import {kind}, steps_of; list(steps_of({kind}(), num_workers=2))"
    small = 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", small, "sh", sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    if "unshare: " in ended.stderr or "mount: " in ended.stderr:
        pytest.skip(ended.stderr)
    line = next(line for line in ended.stderr.splitlines() if "LoadingError: " in line)
    assert re.search(f"LoadingError: {begins}", line)
    assert "/dev/shm has 4 MiB, of which " in line
    assert "--shm-size=16g" in line


def test_a_worker_killed_before_it_sent_anything():
    started = time.monotonic()
    with pytest.raises(LoadingError, match=rf"^step 1, micro-batch 2 .*worker 1 .*reading sample {FIRST} of step 1"):
        list(steps_of(Faulty("kill first"), num_workers=2))
    assert time.monotonic() - started < 200  # not the 300 seconds of the timeout


@pytest.mark.fault("F54", injected="SIGKILL of a worker that holds a lock", outcome="the same, and no hang")
@pytest.mark.timeout(120)  # without its own context, the DataLoader waits forever
def test_a_worker_killed_while_it_holds_a_lock():
    with pytest.raises(LoadingError, match=rf"worker 1 \(pid \d+\), reading sample {BAD} of step 4"):
        list(steps_of(Faulty("kill holding the DataLoader's lock"), num_workers=2))


def test_a_worker_killed_while_the_training_does_something_else():
    steps = steps_of(Faulty("none"), num_workers=2, prefetch_factor=1)
    next(steps)
    victim = multiprocessing.active_children()[0]
    os.kill(victim.pid, signal.SIGKILL)
    time.sleep(0.3)  # no exception from a signal handler in here
    with pytest.raises(LoadingError, match=rf"step \d, micro-batch \d .*worker \d \(pid {victim.pid}\)"):
        list(steps)


@pytest.mark.fault(
    "F54", injected="a worker that hangs", outcome="an error after loader.timeout_seconds with its sample"
)
def test_a_worker_that_hangs(monkeypatch):
    # torch's own wait for a worker that ignores SIGTERM, which is killed after it.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    started = time.monotonic()
    with pytest.raises(LoadingError) as error:
        list(steps_of(Faulty("hang"), num_workers=2, timeout_seconds=5.0))
    text = str(error.value)
    assert text.startswith("loader.timeout_seconds: 5: step 4, micro-batch 2 (samples ")
    assert f"reading sample {BAD} of step 4" in text
    assert "from worker 1 (pid " in text
    assert 5.0 <= time.monotonic() - started < 300  # not the 600 seconds of the sample


def test_a_slow_worker_is_waited_for_longer_than_one_poll(monkeypatch):
    monkeypatch.setattr("accel_train.data.workers.POLL_SECONDS", 0.05)
    slow = Faulty("none")
    monkeypatch.setattr(Faulty, "__getitem__", lambda self, index: (time.sleep(0.05), {"v": torch.tensor(index)})[1])
    steps = list(steps_of(slow, num_workers=2))
    assert [step.step for step in steps] == [0, 1, 2, 3, 4]
    for step in steps:
        assert [n for batch in step.micro_batches for n in batch["v"].tolist()] == [
            draw.sample for draw in SAMPLER.draws(step.step)
        ]


def test_closing_ends_the_workers():
    steps = steps_of(Faulty("none"), num_workers=2)
    next(steps)
    assert len(multiprocessing.active_children()) == 2
    steps.close()
    assert multiprocessing.active_children() == []


def test_a_generator_that_is_dropped_or_never_used():
    steps_of(Faulty("none"), num_workers=2)
    for step in steps_of(Faulty("none"), num_workers=2):
        if step.step == 1:
            break


def test_the_signal_handler_of_the_process_stays():
    before = signal.getsignal(signal.SIGCHLD)
    steps = steps_of(Faulty("none"), num_workers=1)
    next(steps)
    assert signal.getsignal(signal.SIGCHLD) == before
    steps.close()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("field", "field 'weight' is added by the loader"),
        ("text", "leading dimension 4 is required, got a list. Encode it as numbers, or leave it out"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_fields_that_no_batch_can_have(fault, words, workers):
    with pytest.raises(UsageError, match=f"collating of step 1, micro-batch 1.*{words}"):
        next(steps_of(Faulty(fault), num_workers=workers))


class Pairs(list[tuple[Tensor, int]]):
    """Samples as torchvision has them."""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_is_no_dict_is_refused(workers):
    pairs = Pairs([(torch.zeros(3), 1)] * len(Faulty("none")))
    with pytest.raises(UsageError, match=r"dataset\[\d+\] must be a dict of tensors, got a tuple; name its values"):
        next(steps_of(pairs, num_workers=workers))


def test_a_fingerprint_is_that_of_every_sample() -> None:
    class Jittered(list[int]):
        """Samples that draw random numbers."""

        def __getitem__(self, index: Any) -> Any:
            return {"value": super().__getitem__(index), "noise": torch.rand(3)}

    state = torch.get_rng_state()
    found = fingerprint_of(Jittered([1, 2, 3]))
    assert found == fingerprint_of(Jittered([1, 2, 3]))
    assert torch.equal(torch.get_rng_state(), state)
    assert len({found, fingerprint_of(Jittered([1, 2, 4])), fingerprint_of(Jittered([1, 2]))}) == 3


def test_a_fingerprint_of_a_field_without_numbers_names_it() -> None:
    class Captioned(list[str]):
        def __getitem__(self, index: Any) -> Any:
            return {"value": index, "caption": super().__getitem__(index)}

    with pytest.raises(UsageError, match=r"dataset\[0\]: field 'caption': a tensor is required, got a str\. Encode"):
        fingerprint_of(Captioned(["a cat"]))


# ---------------------------------------------------------------------------------------- a whole micro-batch at once
@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_reads_whole_batches_is_asked_for_them(workers):
    for step in steps_of(Whole("none"), num_workers=workers):
        for batch in step.micro_batches:
            assert torch.equal(batch["value"], batch["sample"])
            assert batch["at_once"].all()


@pytest.mark.parametrize("workers", [0, 2])
def test_where_reading_at_once_fails_the_sample_is_named(workers):
    state = torch.get_rng_state()
    with pytest.raises(LoadingError) as error:
        list(steps_of(Whole("raise"), num_workers=workers))
    text = str(error.value)
    assert text.startswith(f"sample {BAD} of step 4, micro-batch 2 (samples ")
    assert f"OSError: cannot read file {BAD}.png" in text
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("workers", [0, 2])
def test_where_no_sample_is_to_blame_the_batch_is(workers):
    with pytest.raises(LoadingError, match=r"^reading of step 4, micro-batch 2 \(samples .*ValueError: cannot stack"):
        list(steps_of(Whole("batch"), num_workers=workers))


@pytest.mark.slow  # one that hangs in a sample is quick
def test_a_worker_that_hangs_in_a_whole_batch():
    with pytest.raises(
        LoadingError, match=r"^loader\.timeout_seconds: 5: step 4, micro-batch 2 .*a micro-batch of step 4 at once"
    ):
        list(steps_of(Whole("hang"), num_workers=2, timeout_seconds=5.0))


class Augmented(Whole):
    """Samples of its own over an inherited `batch`, which knows nothing of them."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"value": torch.tensor(-index)}


def test_an_inherited_batch_does_not_hide_the_samples_of_a_class():
    [first, _] = next(steps_of(Augmented("none"), num_workers=0)).micro_batches
    assert torch.equal(first["value"], -first["sample"])

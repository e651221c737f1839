"""A training step that does not fit: the run continues with half of the micro-batch, and its mathematics stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from accel_train.config import UsageError
from accel_train.experiment_options import ExperimentConfig
from accel_train.metrics.records import read_metrics
from accel_train.opened import double_micro_batch
from accel_train.options.loading import load_config
from accel_train.speed import out_of_memory
from accel_train.store import failpoints
from accel_train.store.names import MICRO_BATCH_FILE
from accel_train.watching.html_report.events import events_of
from tests import zygote
from tests.distributed.launching import LAUNCH_FILES, ROOT, environment
from tests.waiting import PATIENCE_SECONDS, free_port

SMALL_DEVICE = ROOT / "tests" / "faults" / "small_device.py"
SHORT = (
    "--global_batch_size 16 --micro_batch_size 16 --max_steps 8 --log.log_every 1 --checkpoints.save_every 3 "
    "--log.progress_bar off --schedule.warmup_steps 2"
).split()


def run(directory: Path, *flags: str, launcher: tuple[str, ...] = (), **room: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *launcher, str(SMALL_DEVICE), *SHORT, *flags, "--output_dir", str(directory)]
    return zygote.run(words, env=environment(PYTHONPATH=str(ROOT), **room))


def weights(directory: Path, step: int = 8) -> dict[str, torch.Tensor]:
    return load_file(directory / "checkpoints" / f"checkpoint_{step:08d}" / "model.safetensors")


def losses(directory: Path) -> dict[int, float]:
    lines = read_metrics(directory / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if line["event"] == "train"}


def ran_out(directory: Path) -> list[tuple[int, ...]]:
    """Step, micro-batch, next micro-batch and process of each event."""
    lines = read_metrics(directory / "metrics.jsonl")
    names = ("step", "micro_batch_size", "next_micro_batch_size", "process")
    return [tuple(line[name] for name in names) for line in lines if line["event"] == "out_of_memory"]


def assert_memory_is_told(directory: Path, output: str) -> None:
    """Each start has its memory by category, and so has each event of running out."""
    lines = read_metrics(directory / "metrics.jsonl")
    starts = [line for line in lines if line["event"] == "memory"]
    assert [line["step"] for line in starts] == [1, 4, 4], "each later start goes on after the save of step 3"
    sizes = [line["held_bytes"] for line in lines if line["event"] in ("memory", "out_of_memory")]
    assert all(held["weights"] == held["ema"] == starts[0]["held_bytes"]["weights"] for held in sizes)
    assert output.count("memory of this process: weights ") == 2


def sizes_of_starts(directory: Path) -> list[int]:
    lines = read_metrics(directory / "metrics.jsonl")
    return [line["config"]["micro_batch_size"] for line in lines if line["event"] == "config"]


def kinds(directory: Path) -> list[str]:
    return [event.kind for event in events_of(read_metrics(directory / "metrics.jsonl")) if event.kind != "save"]


def largest_difference(a: Path, b: Path) -> float:
    one, other = weights(a), weights(b)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def with_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that had small micro-batches from the start."""
    directory = tmp_path_factory.mktemp("reference") / "four"
    done = run(directory, "--micro_batch_size", "4", ROOM="16")
    assert done.returncode == 0, done.stdout
    return directory


@pytest.mark.fault("F51", injected="out of memory in forward", outcome="half the micro-batch, twice; same weights")
def test_before_the_first_save_it_is_the_run_with_small_micro_batches(tmp_path: Path, with_four: Path) -> None:
    directory = tmp_path / "a run"
    done = run(directory, ROOM="4")
    assert done.returncode == 0, done.stdout
    assert "step 1 ran out of memory with micro_batch_size 16; the next start" in done.stdout
    assert "step 1 ran out of memory with micro_batch_size 8; the next start" in done.stdout
    assert "micro_batch_size: 4 instead of 16, because step 1 ran out of memory" in done.stdout
    # From step 0 again, so there is no rounding to tell the two apart.
    assert largest_difference(directory, with_four) == 0
    assert losses(directory) == losses(with_four)


@pytest.mark.fault("F51", injected="out of memory after a save", outcome="continues from the newest checkpoint")
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_after_a_save_it_goes_on_from_there(tmp_path: Path, with_four: Path, place: str) -> None:
    directory = tmp_path / "run"
    done = run(directory, ROOM="4", ROOM_FROM="5", ROOM_IN=place)
    assert done.returncode == 0, done.stdout
    assert "step 6 ran out of memory with micro_batch_size 16" in done.stdout
    assert "resuming" in done.stdout
    found, expected = losses(directory), losses(with_four)
    assert found.keys() == expected.keys()
    assert max(abs(found[step] - expected[step]) for step in found) < 1e-6
    assert 0 < largest_difference(directory, with_four) < 1e-6
    assert ran_out(directory) == [(6, 16, 8, 0), (6, 8, 4, 0)]
    assert_memory_is_told(directory, done.stdout)
    assert sizes_of_starts(directory) == [16, 8, 4]
    rerun = ["out of memory", "restart"]
    assert kinds(directory) == ["start", *rerun, *rerun, "evaluation", "end"], "the report knows no crash"
    # The next start knows it, and somebody who asks for another size is obeyed.
    assert out_of_memory.recorded(directory, 16) == (16, 4, 6, 0, 6)
    assert out_of_memory.recorded(directory, 12) is None


@pytest.mark.fault("F51", injected="out of memory for a few steps only", outcome="doubled again at a save")
def test_it_grows_again_where_there_is_room(tmp_path: Path, with_four: Path) -> None:
    directory = tmp_path / "run"
    done = run(directory, "--regrow_after", "3", ROOM="4", ROOM_FROM="2", ROOM_UNTIL="4")
    assert done.returncode == 0, done.stdout
    assert "3 steps have had room with micro_batch_size 4; the next start continues from step 6" in done.stdout
    assert sizes_of_starts(directory) == [16, 8, 4, 8]
    assert losses(directory).keys() == losses(with_four).keys()
    assert largest_difference(directory, with_four) < 1e-6
    # The next try would come twice as many steps later.
    assert out_of_memory.recorded(directory, 16) == (16, 8, 3, 1, 6)
    assert done.stdout.count("8 instead of 16, because step 3 ran out of memory") == 2


def test_it_does_not_grow_again_and_again(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    flags = ("--regrow_after", "2", "--max_steps", "14", "--checkpoints.save_every", "2")
    done = run(directory, *flags, ROOM="4", ROOM_FROM="5")
    assert done.returncode == 0, done.stdout
    # Out in step 6, once more in step 9, and four steps later are step 14, the last.
    assert sizes_of_starts(directory) == [16, 8, 4, 8, 4]
    assert [(step, size) for step, size, *_ in ran_out(directory)] == [(6, 16), (6, 8), (9, 8)]


def test_it_does_not_grow_where_nothing_was_saved(tmp_path: Path) -> None:
    """The next start would train the same steps again, out of an older checkpoint or from the beginning."""
    directory = tmp_path / "run"
    flags = ("--regrow_after", "3", "--checkpoints.on_error", "continue")
    failing = {failpoints.VARIABLE: "after_mkdir#2=ENOSPC"}
    done = run(directory, *flags, ROOM="4", ROOM_FROM="2", ROOM_UNTIL="4", **failing)
    assert done.returncode == 0, done.stdout
    assert "checkpoint of step 6 was not saved" in done.stdout
    assert sizes_of_starts(directory) == [16, 8, 4]


def test_it_does_not_grow_beyond_a_whole_step(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    flags = ("--regrow_after", "1", "--micro_batch_size", "64", "--checkpoints.save_every", "1")
    done = run(directory, *flags, ROOM="8", ROOM_FROM="1", ROOM_UNTIL="2")
    assert done.returncode == 0, done.stdout
    # All 16 of a step: 32 would be the same.
    assert sizes_of_starts(directory) == [64, 8, 16]


def test_a_record_that_cannot_be_written_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, accelerator: Accelerator
) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    @dataclass(frozen=True)
    class Config(ExperimentConfig):
        max_steps: int | None = 8
        output_dir: str = str(tmp_path)
        regrow_after: int = 1

    out_of_memory.record_half(tmp_path, 64, 64, 1)
    monkeypatch.setattr(out_of_memory, "record_double", fails)
    config = Config()
    opened: Any = SimpleNamespace(
        config=config, accelerator=accelerator, max_steps=8, share_of=lambda size: size, batch_size=lambda _: 64
    )
    opened.run = SimpleNamespace(directory=tmp_path)
    double_micro_batch(opened, 4, lambda _: True)
    assert "the larger micro-batch could not be recorded" in caplog.text


@pytest.mark.distributed
def test_two_processes_grow_again_together(tmp_path: Path, with_four: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(f"num_machines: 1\nnum_processes: 2\n{LAUNCH_FILES['ddp']}")
    launcher = ("-m", "accel_train.cli", "rehearse", "--config_file", str(file))
    directory = tmp_path / "run"
    room = {"ROOM": "4", "ROOM_FROM": "2", "ROOM_UNTIL": "4", "ROOM_RANK": "1"}
    done = run(directory, "--regrow_after", "3", "--micro_batch_size", "auto", launcher=launcher, **room)
    assert done.returncode == 0, done.stdout
    assert "micro_batch_size: 8 (auto: all that a process has of 16 samples; halved if" in done.stdout
    # Half of the global batch at first.
    assert sizes_of_starts(directory) == [8, 4, 8]
    assert largest_difference(directory, with_four) < 1e-6


def test_auto_is_the_share_of_a_process_halved_until_it_fits(tmp_path: Path, with_four: Path) -> None:
    directory = tmp_path / "run"
    done = run(directory, "--micro_batch_size", "auto", ROOM="4")
    assert done.returncode == 0, done.stdout
    assert sizes_of_starts(directory) == [16, 8, 4]
    assert largest_difference(directory, with_four) == 0


def test_auto_follows_the_flags_and_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Config(ExperimentConfig):
        max_steps: int | None = 4

    def size(*flags: str) -> int:
        return load_config(Config, [str(file), *flags], presets=tmp_path).config.micro_batch_size

    file = tmp_path / "mine.yaml"
    file.write_text("micro_batch_size: auto\nglobal_batch_size: 24\n")
    assert size() == 24
    assert size("--global_batch_size", "40") == 40
    assert size("--micro_batch_size", "5") == 5
    monkeypatch.setenv("WORLD_SIZE", "7")
    assert size() == 4
    with pytest.raises(UsageError, match="micro_batch_size: auto: out_of_memory: halve is required"):
        size("--out_of_memory", "stop")
    with pytest.raises(UsageError, match="regrow_after: 3: has no effect with out_of_memory: stop"):
        size("--micro_batch_size", "5", "--out_of_memory", "stop", "--regrow_after", "3")
    with pytest.raises(UsageError, match="micro_batch_size"):
        size("--micro_batch_size", "automatic")


@pytest.mark.slow
def test_overwrite_is_obeyed_once(tmp_path: Path, with_four: Path) -> None:
    directory = tmp_path / "run"
    run(directory, ROOM="16")
    done = run(directory, "--overwrite", ROOM="4", ROOM_FROM="5")
    assert done.returncode == 0, done.stdout
    assert "resuming" in done.stdout, "the second start deleted what the first had saved"
    # A later start with --overwrite begins with the size that it asks for.
    again = run(directory, "--overwrite", ROOM="16")
    assert "instead of 16" not in again.stdout
    assert not (directory / MICRO_BATCH_FILE).exists()


def test_a_used_directory_is_refused_once(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    done = run(directory, "--resume", "never", ROOM="8", ROOM_FROM="5")
    assert done.returncode == 0, done.stdout
    assert run(directory, "--resume", "never", ROOM="8").returncode == 2


@pytest.mark.fault("F51", injected="out of memory with one sample", outcome="exit code 1, with other means")
def test_one_sample_that_does_not_fit_ends_the_run(tmp_path: Path) -> None:
    done = run(tmp_path / "run", ROOM="0")
    assert done.returncode == 1
    assert (
        "step 1 ran out of memory with a micro-batch of one sample: use --activation_checkpointing.mode" in done.stdout
    )


def test_stop_ends_with_the_error_and_a_remedy(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    done = run(directory, "--out_of_memory", "stop", ROOM="8", ROOM_FROM="5")
    assert done.returncode == 1
    assert "step 6 ran out of memory with micro_batch_size 16: give --micro_batch_size 8" in done.stdout
    assert not (directory / MICRO_BATCH_FILE).exists()


@pytest.mark.fault("F51", injected="out of memory in an evaluation", outcome="exit code 1; the step is saved")
def test_an_evaluation_that_does_not_fit_leaves_the_micro_batch(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    done = run(directory, ROOM="8", ROOM_IN="evaluation")
    assert done.returncode == 1
    assert "the evaluation after step 8 ran out of memory" in done.stdout
    assert not (directory / MICRO_BATCH_FILE).exists()
    assert weights(directory)


@pytest.mark.distributed
@pytest.mark.fault("F52", injected="out of memory on one rank of two", outcome="accel-train launch starts again")
@pytest.mark.parametrize("place", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        # The same mechanism under every strategy, and DDP covers it in seconds.
        pytest.param("fsdp2", marks=pytest.mark.slow),
        pytest.param("zero2", marks=pytest.mark.slow),
    ],
)
def test_one_of_two_processes(tmp_path: Path, with_four: Path, strategy: str, place: str) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(f"num_machines: 1\nnum_processes: 2\n{LAUNCH_FILES[strategy]}")
    launcher = ("-m", "accel_train.cli", "rehearse", "--config_file", str(file))
    directory = tmp_path / "run"
    room = {"ROOM": "4", "ROOM_FROM": "5", "ROOM_RANK": "1", "ROOM_IN": place}
    done = run(directory, launcher=launcher, **room)
    assert done.returncode == 0, done.stdout
    assert "accel-train launch: starting again" in done.stdout
    assert "micro_batch_size: 4 instead of 16, because step 6 ran out of memory" in done.stdout
    # By the process that ran out: the main one has failed in a reduction. Half of the global batch is 8.
    assert ran_out(directory) == [(6, 8, 4, 1)]
    assert kinds(directory)[:2] == ["start", "out of memory"]
    assert "crash" not in kinds(directory)
    found, expected = losses(directory), losses(with_four)
    assert max(abs(found[step] - expected[step]) for step in expected) < 1e-6
    assert largest_difference(directory, with_four) < 1e-6


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.fault("F52", injected="the same under torchrun --max-restarts", outcome="torchrun starts again")
def test_torchrun_starts_again(tmp_path: Path, with_four: Path) -> None:
    directory = tmp_path / "run"
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--max-restarts", "1")
    room = {"ROOM": "4", "ROOM_FROM": "5", "ROOM_RANK": "1", "ACCELERATE_USE_CPU": "true"}
    words = [sys.executable, *launcher, "--master_port", str(free_port()), str(SMALL_DEVICE), *SHORT]
    done = subprocess.run(
        [*words, "--output_dir", str(directory)],
        env=environment(PYTHONPATH=str(ROOT), **room),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert largest_difference(directory, with_four) < 1e-6


def test_a_record_that_cannot_be_read_counts_as_none(tmp_path: Path) -> None:
    file = tmp_path / MICRO_BATCH_FILE
    assert out_of_memory.recorded(tmp_path, 8) is None
    assert out_of_memory.record_half(tmp_path, 8, 8, 3) == (8, 4, 3, 0, 3)
    assert out_of_memory.record_half(tmp_path, 8, 4, 5) == (8, 2, 5, 0, 5)
    assert out_of_memory.recorded(tmp_path, 8) == (8, 2, 5, 0, 5)
    for text in ("", "[]", "{}", json.dumps({"asked": 8, "used": 0, "step": 1}), json.dumps({"asked": 8, "used": "a"})):
        file.write_text(text)
        assert out_of_memory.recorded(tmp_path, 8) is None
    file.unlink()
    os.mkfifo(file)
    assert out_of_memory.recorded(tmp_path, 8) is None


def test_the_error_of_the_cpu_allocator_is_recognised() -> None:
    size = 1 << 60
    with pytest.raises(RuntimeError) as failed:
        torch.empty(size, dtype=torch.uint8)
    assert out_of_memory.is_out_of_memory(failed.value)
    assert out_of_memory.is_out_of_memory(
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    )
    assert not out_of_memory.is_out_of_memory(RuntimeError("out of luck"))


def test_a_record_of_an_earlier_version_counts_from_its_step(tmp_path: Path) -> None:
    """It does not say since when the run has trained well."""
    written = {"asked": 16, "used": 8, "step": 10_000, "tries": 0}
    (tmp_path / MICRO_BATCH_FILE).write_text(json.dumps(written))
    record = out_of_memory._read(tmp_path, 16)
    assert record is not None
    assert record.since == 10_000
    assert not out_of_memory.is_time_to_double(record, 100, 10_099)
    assert out_of_memory.is_time_to_double(record, 100, 10_100)

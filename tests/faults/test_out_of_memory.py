"""A training step that does not fit: the run continues with half of the micro-batch, and its mathematics stays."""

from __future__ import annotations

import errno
import json
import os
import re
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

from accel_train.checkpoints import background
from accel_train.config import UsageError
from accel_train.experiment_options import ExperimentConfig
from accel_train.metrics.records import read_metrics
from accel_train.options.loading import load_config
from accel_train.runtime.exiting import StartAgain
from accel_train.speed import out_of_memory
from accel_train.store import commit, failpoints, manifest
from accel_train.store.names import MICRO_BATCH_FILE
from accel_train.train_state import double_micro_batch, in_use
from accel_train.watching.html_report.events import events_of
from tests import compiling, zygote
from tests.distributed.launching import LAUNCH_FILES, ROOT, SMALL, environment
from tests.waiting import PATIENCE_SECONDS, free_port

SMALL_DEVICE = ROOT / "tests" / "faults" / "small_device.py"
SHORT = (
    "--global_batch_size 16 --micro_batch_size 16 --max_steps 8 --log.log_every 1 --checkpoints.save_every 3 "
    "--log.progress_bar off --schedule.warmup_steps 2 --log.per_sample true"
).split()


def run(directory: Path, *flags: str, launcher: tuple[str, ...] = (), **room: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *launcher, str(SMALL_DEVICE), *SHORT, *flags, "--output_dir", str(directory)]
    return zygote.run(words, env=environment(PYTHONPATH=str(ROOT), **room))


def weights(directory: Path, step: int = 8) -> dict[str, torch.Tensor]:
    return load_file(directory / "checkpoints" / f"checkpoint_{step:08d}" / "model.safetensors")


def losses(directory: Path) -> dict[int, float]:
    lines = read_metrics(directory / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if line["event"] == "train"}


def events(directory: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(directory / "metrics.jsonl") if line["event"] == "out_of_memory"]


def ran_out(directory: Path) -> list[tuple[int, ...]]:
    """Step, micro-batch, next micro-batch and process of each event, all of which are of training steps."""
    found = events(directory)
    assert {line["during"] for line in found} <= {"step"}
    names = ("step", "micro_batch_size", "next_micro_batch_size", "process")
    return [tuple(line[name] for name in names) for line in found]


def ended_in(directory: Path) -> set[tuple[str, int, int]]:
    """What ended the run, at which step and on which processes: nothing was halved for it."""
    found = [line for line in events(directory) if "next_micro_batch_size" not in line]
    assert all("held_bytes" in line for line in found)
    return {(line["during"], line["step"], line["process"]) for line in found}


def samples(directory: Path) -> list[tuple[int, int]]:
    """Step and number of every sample trained on, in the order of the log."""
    lines = read_metrics(directory / "sample_losses.jsonl")
    return [(line["step"], line["sample"]) for line in lines]


def learning_rates(directory: Path) -> dict[int, float]:
    lines = read_metrics(directory / "metrics.jsonl")
    return {line["step"]: line["lr"] for line in lines if line["event"] == "train"}


def assert_same_run(directory: Path, reference: Path) -> float:
    """Return the largest difference of a weight, below 1e-6 as that of a loss. Samples and learning rates are equal."""
    trained_on = samples(directory)
    assert len(trained_on) == 8 * 16, "each step once"
    assert trained_on == samples(reference)
    assert learning_rates(directory) == learning_rates(reference)
    found, expected = losses(directory), losses(reference)
    assert found.keys() == expected.keys()
    assert max(abs(found[step] - expected[step]) for step in found) < 1e-6
    difference = largest_difference(directory, reference)
    print(f"largest difference of a weight: {difference:.1e}")
    assert difference < 1e-6
    return difference


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


def launcher(folder: Path, strategy: str = "ddp") -> tuple[str, ...]:
    """The launcher of two processes."""
    if strategy.startswith("zero"):
        compiling.skip_without_deepspeed()
    file = folder / "two.yaml"
    file.write_text(f"num_machines: 1\nnum_processes: 2\n{LAUNCH_FILES[strategy]}")
    return ("-m", "accel_train.cli", "rehearse", "--config_file", str(file))


@pytest.fixture(scope="module")
def with_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that had small micro-batches from the start, evaluated after steps 4 and 8."""
    directory = tmp_path_factory.mktemp("reference") / "four"
    done = run(directory, "--micro_batch_size", "4", ROOM="16", EVALUATE_EVERY="4")
    assert done.returncode == 0, done.stdout
    return directory


@pytest.fixture(scope="module")
def with_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with still smaller ones."""
    directory = tmp_path_factory.mktemp("reference") / "two"
    done = run(directory, "--micro_batch_size", "2", ROOM="16")
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
    assert assert_same_run(directory, with_four) == 0
    assert losses(directory) == losses(with_four)


@pytest.mark.fault("F51", injected="out of memory after a save", outcome="continues from the newest checkpoint")
# Two processes run out in the backward below.
@pytest.mark.parametrize("place", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_after_a_save_it_goes_on_from_there(tmp_path: Path, with_four: Path, place: str) -> None:
    directory = tmp_path / "run"
    done = run(directory, ROOM="4", ROOM_FROM="5", ROOM_IN=place)
    assert done.returncode == 0, done.stdout
    assert "step 6 ran out of memory with micro_batch_size 16" in done.stdout
    assert "resuming" in done.stdout
    assert assert_same_run(directory, with_four) > 0
    assert ran_out(directory) == [(6, 16, 8, 0), (6, 8, 4, 0)]
    assert_memory_is_told(directory, done.stdout)
    assert sizes_of_starts(directory) == [16, 8, 4]
    rerun = ["out of memory", "restart"]
    assert kinds(directory) == ["start", *rerun, *rerun, "evaluation", "end"], "the report knows no crash"
    # The next start knows it, and somebody who asks for another size is obeyed.
    assert out_of_memory.recorded(directory, 16) == (16, 4, 6, 0, 6)
    assert out_of_memory.recorded(directory, 12) is None


@pytest.mark.slow  # two processes grow again below
@pytest.mark.fault("F51", injected="out of memory for a few steps only", outcome="doubled again at a save")
def test_it_grows_again_where_there_is_room(tmp_path: Path, with_four: Path) -> None:
    directory = tmp_path / "run"
    done = run(directory, "--regrow_after", "3", ROOM="4", ROOM_FROM="2", ROOM_UNTIL="4")
    assert done.returncode == 0, done.stdout
    assert "3 steps have had room with micro_batch_size 4; the next start continues from step 6" in done.stdout
    assert sizes_of_starts(directory) == [16, 8, 4, 8]
    assert_same_run(directory, with_four)
    # The next try would come twice as many steps later.
    assert out_of_memory.recorded(directory, 16) == (16, 8, 3, 1, 6)
    assert done.stdout.count("8 instead of 16, because step 3 ran out of memory") == 2


@pytest.mark.slow  # two processes grow once below
def test_it_does_not_grow_again_and_again(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    flags = ("--regrow_after", "2", "--max_steps", "14", "--checkpoints.save_every", "2")
    done = run(directory, *flags, ROOM="4", ROOM_FROM="5")
    assert done.returncode == 0, done.stdout
    # Out in step 6, once more in step 9, and four steps later are step 14, the last.
    assert sizes_of_starts(directory) == [16, 8, 4, 8, 4]
    assert [(step, size) for step, size, *_ in ran_out(directory)] == [(6, 16), (6, 8), (9, 8)]


@pytest.mark.slow  # of the function that would let it grow, below
def test_it_does_not_grow_where_nothing_was_saved(tmp_path: Path) -> None:
    """The next start would train the same steps again, out of an older checkpoint or from the beginning."""
    directory = tmp_path / "run"
    flags = ("--regrow_after", "3", "--checkpoints.on_error", "continue")
    failing = {failpoints.VARIABLE: "after_mkdir#2=ENOSPC"}
    done = run(directory, *flags, ROOM="4", ROOM_FROM="2", ROOM_UNTIL="4", **failing)
    assert done.returncode == 0, done.stdout
    assert "checkpoint of step 6 was not saved" in done.stdout
    assert sizes_of_starts(directory) == [16, 8, 4]


@pytest.mark.slow  # of the function that would let it grow, below
def test_it_does_not_grow_beyond_a_whole_step(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    flags = ("--regrow_after", "1", "--micro_batch_size", "64", "--checkpoints.save_every", "1")
    done = run(directory, *flags, ROOM="8", ROOM_FROM="1", ROOM_UNTIL="2")
    assert done.returncode == 0, done.stdout
    # All 16 of a step: 32 would be the same.
    assert sizes_of_starts(directory) == [64, 8, 16]


def opened_with_half(directory: Path, accelerator: Accelerator) -> Any:
    """What a run of 8 steps has open, in whose first step 16 samples fitted in place of 64."""

    @dataclass(frozen=True)
    class Config(ExperimentConfig):
        max_steps: int | None = 8
        output_dir: str = str(directory)
        micro_batch_size: int = 64
        regrow_after: int = 3

    for size in (64, 32):
        out_of_memory.record_half(directory, 64, size, 1)
    return SimpleNamespace(
        config=Config(),
        accelerator=accelerator,
        max_steps=8,
        share_of=lambda size: size,
        batch_size=lambda _: 64,
        run=SimpleNamespace(directory=directory),
    )


def test_it_grows_after_a_save_and_up_to_a_whole_step(tmp_path: Path, accelerator: Accelerator) -> None:
    opened = opened_with_half(tmp_path, accelerator)
    double_micro_batch(opened, 3, lambda _: True)  # too early
    double_micro_batch(opened, 8, lambda _: True)  # the last step
    # The next start would go on from an older checkpoint.
    double_micro_batch(opened, 4, lambda _: False)
    opened.batch_size = lambda _: 16  # all of a step: 32 would be the same
    double_micro_batch(opened, 4, lambda _: True)
    assert out_of_memory.recorded(tmp_path, 64) == (64, 16, 1, 0, 1)
    opened.batch_size = lambda _: 64
    with pytest.raises(StartAgain, match="3 steps have had room with micro_batch_size 16; the next start continues"):
        double_micro_batch(opened, 4, lambda _: True)
    # The next try would come twice as many steps later.
    assert out_of_memory.recorded(tmp_path, 64) == (64, 32, 1, 1, 4)


def test_a_record_that_cannot_be_written_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, accelerator: Accelerator
) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    opened = opened_with_half(tmp_path, accelerator)
    monkeypatch.setattr(out_of_memory, "record_double", fails)
    double_micro_batch(opened, 4, lambda _: True)
    assert "the larger micro-batch could not be recorded" in caplog.text


@pytest.mark.distributed
def test_two_processes_grow_again_together(tmp_path: Path, with_four: Path) -> None:
    directory = tmp_path / "run"
    room = {"ROOM": "4", "ROOM_FROM": "2", "ROOM_UNTIL": "4", "ROOM_RANK": "1"}
    done = run(directory, "--regrow_after", "3", "--micro_batch_size", "auto", launcher=launcher(tmp_path), **room)
    assert done.returncode == 0, done.stdout
    assert "micro_batch_size: 8 (auto: a process's whole share of 16 samples; halved if" in done.stdout
    # Half of the global batch at first.
    assert sizes_of_starts(directory) == [8, 4, 8]
    assert_same_run(directory, with_four)


@pytest.mark.slow  # the first test of this file halves so, and two processes with auto are below
def test_auto_is_the_share_of_a_process_halved_until_it_fits(tmp_path: Path, with_four: Path) -> None:
    directory = tmp_path / "run"
    done = run(directory, "--micro_batch_size", "auto", ROOM="4")
    assert done.returncode == 0, done.stdout
    assert sizes_of_starts(directory) == [16, 8, 4]
    assert assert_same_run(directory, with_four) == 0


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


@pytest.mark.slow  # of the config alone, below
def test_a_run_that_has_halved_to_one_sample_starts_again(tmp_path: Path) -> None:
    """A check of what was asked for refuses to let a micro-batch of one grow."""
    directory = tmp_path / "run"
    done = run(directory, "--regrow_after", "50", "--micro_batch_size", "4", ROOM="1", ROOM_FROM="2")
    assert done.returncode == 0, done.stdout
    assert sizes_of_starts(directory) == [4, 2, 1]


def test_checks_of_what_was_asked_for_are_not_of_what_is_in_use(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Config(ExperimentConfig):
        extra: int = 0

    config = Config(output_dir=str(tmp_path), global_batch_size=4, micro_batch_size=2, regrow_after=3, max_steps=2)
    used = in_use(config, 1, config.schedule)
    assert (used.micro_batch_size, used.regrow_after, config.micro_batch_size) == (1, 3, 2)
    assert type(used) is Config


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


@pytest.mark.slow  # the first test of this file starts again as well; here, that --resume never is obeyed once
def test_a_used_directory_is_refused_once(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    done = run(directory, "--resume", "never", ROOM="8", ROOM_FROM="5")
    assert done.returncode == 0, done.stdout
    assert run(directory, "--resume", "never", ROOM="8").returncode == 2


@pytest.mark.fault("F51", injected="out of memory with one sample", outcome="exit code 1, with other means")
def test_one_sample_that_does_not_fit_ends_the_run(tmp_path: Path) -> None:
    done = run(tmp_path / "run", "--micro_batch_size", "1", ROOM="0")
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


STRATEGIES = [
    "ddp",
    # The same mechanism under every strategy, and DDP covers it in seconds.
    pytest.param("fsdp2", marks=pytest.mark.slow),
    pytest.param("zero2", marks=pytest.mark.slow),
]


@pytest.mark.fault("F51", injected="out of memory in an evaluation", outcome="exit code 1; the step is saved")
def test_an_evaluation_that_does_not_fit_leaves_the_micro_batch(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    done = run(directory, ROOM="8", ROOM_IN="evaluation")
    assert done.returncode == 1
    assert "the evaluation after step 8 ran out of memory" in done.stdout
    assert not (directory / MICRO_BATCH_FILE).exists()
    assert weights(directory)
    assert ended_in(directory) == {("evaluation", 8, 0)}
    assert kinds(directory) == ["start", "out of memory", "crash"]


def evaluations(directory: Path) -> dict[int, float]:
    lines = read_metrics(directory / "metrics.jsonl")
    return {line["step"]: line["heldout_loss"] for line in lines if line["event"] == "evaluation"}


INJECTED = "out of memory in an evaluation between two steps, one and two processes"


@pytest.mark.fault("F51", injected=INJECTED, outcome="with a smaller evaluation batch the same weights and figures")
@pytest.mark.slow  # that it ends with its step saved is tested above, and the next start is a resume as any other
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2", "zero2"])
def test_with_a_smaller_evaluation_the_run_goes_on(tmp_path: Path, with_four: Path, strategy: str) -> None:
    directory = tmp_path / "run"
    several = () if strategy == "single" else launcher(tmp_path, strategy)
    rank = len(several) > 0
    room = {"ROOM": "4", "ROOM_IN": "evaluation", "ROOM_RANK": str(int(rank)), "EVALUATE_EVERY": "4"}
    done = run(directory, launcher=several, **room)
    assert done.returncode == 1, done.stdout
    assert "the evaluation after step 4 ran out of memory; have it take fewer samples at once" in done.stdout
    assert "starting again" not in done.stdout
    assert ended_in(directory) == {("evaluation", 4, int(rank))}
    assert not (directory / MICRO_BATCH_FILE).exists()
    # The scaffold evaluates as many at once as it trains on.
    done = run(directory, "--micro_batch_size", "4", launcher=several, **room)
    assert done.returncode == 0, done.stdout
    assert "resuming" in done.stdout
    assert_same_run(directory, with_four)
    found, expected = evaluations(directory), evaluations(with_four)
    assert found.keys() == expected.keys() == {4, 8}
    assert max(abs(found[step] - expected[step]) for step in found) < 1e-6


def assert_save_ended_the_run(directory: Path, output: str, step: int, process: int = 0) -> None:
    """The error names the save, nothing was halved, and what was saved before is whole."""
    assert f"the save of step {step} ran out of " in output
    assert "A smaller micro-batch would not make it smaller, so nothing was halved" in output
    assert "starting again" not in output
    assert ended_in(directory) == {("save", step, process)}
    assert "out of memory" in kinds(directory)
    assert not (directory / MICRO_BATCH_FILE).exists()
    for _, path in manifest.committed(directory / "checkpoints"):
        commit.verify(path)


@pytest.mark.fault("F51", injected="out of memory during a save", outcome="exit code 1; the last checkpoint stands")
def test_a_save_that_does_not_fit_halves_nothing(tmp_path: Path, with_four: Path) -> None:
    directory = tmp_path / "run"
    flags = ("--micro_batch_size", "4")
    done = run(directory, *flags, ROOM="16", ROOM_FROM="5", ROOM_IN="save")
    assert done.returncode == 1, done.stdout
    assert "the save of step 6 ran out of device memory" in done.stdout
    assert re.search(r"a snapshot needs room for up to [\d,]+ bytes on the device", done.stdout)
    assert_save_ended_the_run(directory, done.stdout, 6)
    assert "--checkpoints.save_state false" in (directory / "logs" / "rank_0.log").read_text()
    assert kinds(directory) == ["start", "out of memory", "crash"]
    assert [step for step, _ in manifest.committed(directory / "checkpoints")] == [3]
    done = run(directory, *flags, ROOM="16")
    assert done.returncode == 0, done.stdout
    assert sizes_of_starts(directory) == [4, 4]
    assert assert_same_run(directory, with_four) == 0


@pytest.mark.fault("F51", injected="no host memory for a save", outcome="exit code 1, with the bytes and other means")
def test_a_save_without_host_memory_halves_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    done = run(directory, ROOM="16", ROOM_IN="host_save")
    assert done.returncode == 1, done.stdout
    assert "the save of step 3 ran out of host memory" in done.stdout
    assert re.search(r"a snapshot takes [\d,]+ bytes of host memory in this process", done.stdout)
    assert "fewer processes on this host" in done.stdout
    assert_save_ended_the_run(directory, done.stdout, 3)
    assert manifest.committed(directory / "checkpoints") == []


def test_the_save_of_a_stopped_evaluation_is_a_save(tmp_path: Path) -> None:
    """The evaluation has ended by then, and is not what takes too much."""
    directory = tmp_path / "run"
    room = {"ROOM": "16", "ROOM_IN": "save", "ROOM_FROM": "3", "ROOM_UNTIL": "4"}
    done = run(directory, EVALUATE_EVERY="4", STOP_IN_EVALUATION="1", **room)
    assert done.returncode == 1, done.stdout
    assert "asked to stop: the evaluation after step 4 is interrupted" in done.stdout
    assert_save_ended_the_run(directory, done.stdout, 4)
    assert [step for step, _ in manifest.committed(directory / "checkpoints")] == [3]


@pytest.mark.slow  # the save of one process is quick, and so is a step of one of two
@pytest.mark.distributed
@pytest.mark.fault("F52", injected="out of memory during a save on one rank of two", outcome="exit code 1; no halving")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_a_save_of_one_of_two_processes(tmp_path: Path, with_four: Path, strategy: str) -> None:
    """Under FSDP2 the other process waits for what it would have sent."""
    directory = tmp_path / "run"
    flags = ("--micro_batch_size", "4")
    several = launcher(tmp_path, strategy)
    done = run(directory, *flags, launcher=several, ROOM="16", ROOM_FROM="5", ROOM_IN="save", ROOM_RANK="1")
    assert done.returncode == 1, done.stdout
    assert_save_ended_the_run(directory, done.stdout, 6, process=1)
    assert [step for step, _ in manifest.committed(directory / "checkpoints")] == [3]
    done = run(directory, *flags, launcher=several, ROOM="16")
    assert done.returncode == 0, done.stdout
    assert sizes_of_starts(directory) == [4, 4]
    assert_same_run(directory, with_four)


def test_the_kernel_refuses_a_snapshot_that_is_too_large() -> None:
    size = 1 << 60
    with pytest.raises(OSError, match="Cannot allocate memory") as failed:
        background.Writer(size)
    assert failed.value.__notes__ == [
        f"a snapshot takes {size:,} bytes of host memory in this process, allocated at the first save and kept for "
        "later ones"
    ]
    assert out_of_memory.ran_out(failed.value, "save")
    # Of a step it would be an error of a loader or a file.
    assert not out_of_memory.ran_out(failed.value, "step")
    assert not out_of_memory.ran_out(OSError(errno.ENOSPC, "No space left on device"), "save")
    assert out_of_memory.ran_out(MemoryError(), "save")


@pytest.mark.distributed
@pytest.mark.fault("F52", injected="out of memory on one rank of two", outcome="accel-train launch starts again")
@pytest.mark.parametrize("place", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_of_two_processes(tmp_path: Path, with_four: Path, strategy: str, place: str) -> None:
    directory = tmp_path / "run"
    room = {"ROOM": "4", "ROOM_FROM": "5", "ROOM_RANK": "1", "ROOM_IN": place}
    done = run(directory, launcher=launcher(tmp_path, strategy), **room)
    assert done.returncode == 0, done.stdout
    assert "accel-train launch: starting again" in done.stdout
    assert "micro_batch_size: 4 instead of 16, because step 6 ran out of memory" in done.stdout
    # By the process that ran out: the main one has failed in a reduction. Half of the global batch is 8.
    assert ran_out(directory) == [(6, 8, 4, 1)]
    assert kinds(directory)[:2] == ["start", "out of memory"]
    assert "crash" not in kinds(directory)
    assert_same_run(directory, with_four)


@pytest.mark.slow  # one of two is quick, and each process records the same
@pytest.mark.distributed
@pytest.mark.fault("F52", injected="out of memory on all ranks, in one step", outcome="one half, started again once")
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_all_processes_at_once(tmp_path: Path, with_four: Path, strategy: str, place: str) -> None:
    directory = tmp_path / "run"
    done = run(directory, launcher=launcher(tmp_path, strategy), ROOM="4", ROOM_FROM="5", ROOM_IN=place)
    assert done.returncode == 0, done.stdout
    # The launcher may end one of them before it has written its event.
    found = ran_out(directory)
    assert found
    assert set(found) <= {(6, 8, 4, 0), (6, 8, 4, 1)}
    assert sizes_of_starts(directory) == [16, 4]
    assert_same_run(directory, with_four)


@pytest.mark.slow  # one process halves twice in its first step, and each launch above starts two again
@pytest.mark.distributed
@pytest.mark.fault("F52", injected="the first step, twice in a row, on one rank of two", outcome="as from the start")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_in_the_first_step_twice(tmp_path: Path, with_two: Path, strategy: str) -> None:
    directory = tmp_path / "run"
    done = run(directory, launcher=launcher(tmp_path, strategy), ROOM="2", ROOM_RANK="1", ROOM_IN="backward")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("accel-train launch: starting again") == 2
    assert "resuming" not in done.stdout
    assert ran_out(directory) == [(1, 8, 4, 1), (1, 4, 2, 1)]
    assert sizes_of_starts(directory) == [16, 4, 2]
    assert_same_run(directory, with_two)


@pytest.mark.slow  # two processes of the largest recipe
@pytest.mark.distributed
@pytest.mark.fault("F52", injected="out of memory on one rank, diffusion of text and latents", outcome="same noise")
def test_the_noise_of_each_sample_stays(tmp_path: Path) -> None:
    def lines(flags: list[str], words: tuple[str, ...] = (), **room: str) -> list[dict[str, Any]]:
        directory = tmp_path / f"run-{len(words)}"
        command = [sys.executable, *words, str(SMALL_DEVICE), "demo", *SMALL, *flags, "--output_dir", str(directory)]
        done = zygote.run(command, env=environment(PYTHONPATH=str(ROOT), RECIPE="mmdit.py", **room))
        assert done.returncode == 0, done.stdout
        assert sizes_of_starts(directory)[-1] == 4
        return read_metrics(directory / "sample_losses.jsonl")

    flags = "--max_steps 6 --checkpoints.save_every 3 --log.per_sample true --micro_batch_size".split()
    expected = lines([*flags, "4"], ROOM="16")
    found = lines([*flags, "8"], launcher(tmp_path), ROOM="4", ROOM_FROM="4", ROOM_RANK="1", ROOM_IN="window")
    assert [line["sample"] for line in found] == [line["sample"] for line in expected]
    assert {line["step"] for line in found} == set(range(1, 7))
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        times = [name for name in one if name.startswith("time_")]
        assert times, "masked or noised, each sample has its time"
        assert [one[name] for name in times] == [other[name] for name in times]
        errors = [name for name in one if name.startswith("loss_")]
        assert [one[name] for name in errors] == pytest.approx([other[name] for name in errors], rel=1e-5)


@pytest.mark.slow  # DeepSpeed
@pytest.mark.distributed
@pytest.mark.fault(
    "F52", injected="out of memory under ZeRO-2 with --sync last", outcome="no reduction by the failed rank"
)
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_gradients_kept_for_one_reduction_are_not_reduced(tmp_path: Path, with_two: Path, place: str) -> None:
    """DeepSpeed would reduce them while the error leaves the step, and wait for the other process."""
    directory = tmp_path / "run"
    flags = ("--sync", "last", "--micro_batch_size", "4", "--collective_timeout_seconds", "60")
    room = {"ROOM": "2", "ROOM_FROM": "5", "ROOM_RANK": "1", "ROOM_IN": place}
    done = run(directory, *flags, launcher=launcher(tmp_path, "zero2"), **room)
    assert done.returncode == 0, done.stdout
    assert "Timed out" not in done.stdout
    assert ran_out(directory) == [(6, 4, 2, 1)]
    assert sizes_of_starts(directory) == [4, 2]
    assert_same_run(directory, with_two)


@pytest.mark.slow  # four starts of two processes
@pytest.mark.distributed
@pytest.mark.fault("F52", injected="one rank of two has no room for one sample", outcome="exit code 1, other means")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_two_processes_down_to_one_sample(tmp_path: Path, strategy: str) -> None:
    directory = tmp_path / "run"
    done = run(directory, launcher=launcher(tmp_path, strategy), ROOM="0", ROOM_RANK="1")
    assert done.returncode == 1, done.stdout
    text = "step 1 ran out of memory with a micro-batch of one sample: use --activation_checkpointing.mode full"
    assert text in done.stdout
    assert sizes_of_starts(directory) == [16, 4, 2, 1]
    assert ended_in(directory) == {("step", 1, 1)}
    assert kinds(directory).count("out of memory") == 4


@pytest.mark.distributed
@pytest.mark.fault("F52", injected="a reducing backward of one rank, no launcher", outcome="the other ends by itself")
def test_without_a_launcher_the_other_process_ends_too(tmp_path: Path, with_four: Path) -> None:
    """Nobody ends it: it waits for gradients of the process that ran out, at most for the collective timeout."""
    directory = tmp_path / "run"
    flags = [*SHORT, "--collective_timeout_seconds", "60", "--output_dir", str(directory)]
    room = {"ROOM": "4", "ROOM_FROM": "5", "ROOM_RANK": "1", "ROOM_IN": "backward", "ACCELERATE_USE_CPU": "true"}

    def codes() -> list[int]:
        same = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
        same |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        started: list[zygote.Child] = []
        for rank in ("0", "1"):
            env = environment(**same, **room, RANK=rank, LOCAL_RANK=rank)
            started.append(zygote.start([sys.executable, str(SMALL_DEVICE), *flags], tmp_path / "output.txt", env=env))
        try:
            return [process.wait(PATIENCE_SECONDS) for process in started]
        finally:
            for process in started:
                process.kill()

    assert codes() == [1, 75], (tmp_path / "output.txt").read_text()
    assert ran_out(directory) == [(6, 8, 4, 1)]
    assert codes() == [0, 0], (tmp_path / "output.txt").read_text()
    assert sizes_of_starts(directory) == [16, 4]
    assert_same_run(directory, with_four)


@pytest.mark.slow  # torchrun itself, which imports everything anew
@pytest.mark.distributed
@pytest.mark.fault("F52", injected="the same under torchrun --max-restarts", outcome="torchrun starts again")
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_torchrun_starts_again(tmp_path: Path, with_four: Path, place: str) -> None:
    directory = tmp_path / "run"
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--max-restarts", "1")
    room = {"ROOM": "4", "ROOM_FROM": "5", "ROOM_RANK": "1", "ROOM_IN": place, "ACCELERATE_USE_CPU": "true"}
    words = [sys.executable, *launcher, "--master_port", str(free_port()), str(SMALL_DEVICE), *SHORT]
    words += ["--collective_timeout_seconds", "60"]
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
    assert ran_out(directory) == [(6, 8, 4, 1)]
    assert sizes_of_starts(directory) == [16, 4]
    assert_same_run(directory, with_four)


def test_a_record_that_cannot_be_read_counts_as_none(tmp_path: Path) -> None:
    file = tmp_path / MICRO_BATCH_FILE
    assert out_of_memory.recorded(tmp_path, 8) is None
    assert out_of_memory.record_half(tmp_path, 8, 8, 3) == (8, 4, 3, 0, 3)
    assert out_of_memory.record_half(tmp_path, 8, 4, 5) == (8, 2, 5, 0, 5)
    assert out_of_memory.recorded(tmp_path, 8) == (8, 2, 5, 0, 5)
    whole = json.loads(file.read_text())
    without = [{name: value for name, value in whole.items() if name != left} for left in whole]
    for text in ("", "[]", "{}", *map(json.dumps, (whole | {"used": 0}, whole | {"used": "a"}, *without))):
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
    for text in (
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    ):
        assert out_of_memory.is_out_of_memory(RuntimeError(text))
    assert not out_of_memory.is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not out_of_memory.is_out_of_memory(RuntimeError("out of luck"))

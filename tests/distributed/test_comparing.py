"""Processes compared with each other, on real ones: weights that differ end the run, and a slow process is named."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from accel_train.metrics.records import read_metrics
from tests.distributed.launching import DEMOS, ROOT, Finished, Layout, command, fork

pytestmark = pytest.mark.distributed
WORKER = ROOT / "tests" / "distributed" / "comparing_worker.py"
HOST = socket.gethostname()


def train(layout: Layout, folder: Path, *flags: str, recipe: str = "", **environment: str) -> Finished:
    """A run of 12 steps that saves every fourth."""
    run = folder / "run"
    words = ["--output_dir", str(run), "--max_steps", "12", "--checkpoints.save_every", "4", *flags]
    if recipe:
        preset, small = DEMOS[recipe]
        words = [preset, *small, *words]
        environment["RECIPE"] = recipe
    folder.mkdir(exist_ok=True)
    done = fork(layout, command(layout, words, folder, WORKER), PYTHONPATH=str(ROOT), **environment)
    return Finished(run, done.stdout, done.returncode)


def events(run: Finished, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run.directory / "metrics.jsonl") if line["event"] == kind]


def saved(run: Finished) -> list[str]:
    return sorted(path.name for path in (run.directory / "checkpoints").iterdir())


CASES = [
    pytest.param(  # two processes, of which nobody can tell the right one, are quick in the next two tests
        *(Layout("ddp", 2), "flip", "weight|bias", r"processes 0 \(.*\), 1 \(.*\) differ, and no majority", [0, 1]),
        marks=pytest.mark.slow,
    ),
    pytest.param(  # two processes compare the same weights, and three find the majority of the next
        *(Layout("ddp", 3), "flip", "weight|bias", r"process 1 \(.*\) differs from the majority", [1]),
        marks=pytest.mark.slow,
    ),
    (Layout("ddp", 3), "flip_ema", "EMA of (weight|bias)", r"process 1 \(.*\) differs from the majority", [1]),
    # Copies of the weights as under DDP, which is a quick test.
    pytest.param(
        *(Layout("zero2", 3), "flip", "weight|bias", r"process 1 \(.*\) differs from the majority", [1]),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.fault(
    "F59", injected="one bit of a weight flips on one process", outcome="exit 1 with its name, nothing saved after it"
)
@pytest.mark.parametrize(("layout", "fault", "name", "who", "processes"), CASES, ids=lambda value: str(value)[:12])
def test_a_flipped_bit_is_named_within_the_steps_of_the_option(
    layout: Layout, fault: str, name: str, who: str, processes: list[int], tmp_path: Path
) -> None:
    # ZeRO writes the weights anew in every step, from its masters.
    at = "6" if layout.strategy == "zero2" else "5"
    run = train(layout, tmp_path, "--health.check_replicas_every", "2", FAULT=fault, AT=at)
    assert run.code == 1, run.output[-4000:]
    assert re.search(f"after step 6 the processes no longer hold the same weights: ({name}): {who}", run.output)
    assert saved(run) == ["checkpoint_00000004"]
    (found,) = events(run, "replicas_differ")
    assert (found["step"], found["processes"]) == (6, processes)
    assert re.fullmatch(name, *found["parameters"])
    # The checkpoint before it is sound.
    assert train(layout, tmp_path, "--health.check_replicas_every", "2").code == 0


def test_diverged_weights_are_not_saved_where_no_check_is_due(tmp_path: Path) -> None:
    run = train(Layout("ddp", 2), tmp_path, FAULT="flip", AT="7")
    assert run.code == 1, run.output[-4000:]
    assert "after step 8 the processes no longer hold the same weights" in run.output
    assert saved(run) == ["checkpoint_00000004"]
    off = train(Layout("ddp", 2), tmp_path, "--health.check_replicas_every", "0", FAULT="flip", AT="7")
    assert off.code == 0
    assert saved(off)[-1] == "checkpoint_00000012"


def test_a_replica_of_shards_that_differs_is_named(tmp_path: Path) -> None:
    run = train(Layout("hsdp", 4), tmp_path, recipe="mmdit", FAULT="flip", AT="3", ON="2")
    assert run.code == 1, run.output[-4000:]
    # Processes 0 and 2 hold the same half, and the others the other one.
    assert re.search(r"after step 4 .*: processes 0 \(.*\), 2 \(.*\) differ, and no majority", run.output)
    assert not saved(run)


@pytest.mark.slow  # the flipped bits end with runs that are compared and have none
@pytest.mark.parametrize(
    "layout",
    [
        Layout("ddp", 2),
        Layout("zero2", 2),
        Layout("hsdp", 4),
    ],
    ids=str,
)
def test_no_alarm_without_a_fault(layout: Layout, tmp_path: Path) -> None:
    run = train(layout, tmp_path, "--health.check_replicas_every", "1", recipe="mmdit")
    assert run.code == 0, run.output[-4000:]
    assert not events(run, "replicas_differ")


def test_nothing_is_compared_where_every_process_holds_its_own_shard(tmp_path: Path) -> None:
    """Nor by default, which test_invariance.py trains with under FSDP2."""
    asked = train(
        Layout("fsdp2", 2), tmp_path / "asked", "--health.check_replicas_every", "5", "--max_steps", "2", recipe="mmdit"
    )
    assert asked.code == 0, asked.output[-4000:]
    assert (
        "health.check_replicas_every: 5: nothing to compare, because no weight is on more than one process"
        in asked.output
    )


@pytest.mark.parametrize(
    ("measure", "factor"),
    [("data", 1.5), pytest.param("forward", 4.0, marks=pytest.mark.slow)],  # compared as the other measure
)
def test_a_slow_process_is_named_once(measure: str, factor: float, tmp_path: Path) -> None:
    # Far below what is planted, so that a busy machine in between is no recovery.
    flags = ["--health.compare_every", "2", "--health.slow_factor", str(factor), "--loader.num_workers", "0"]
    layout = Layout("ddp", 3)
    run = train(layout, tmp_path, *flags, FAULT=measure, ON="2")
    assert run.code == 0, run.output[-4000:]
    found = [event for event in events(run, "straggler") if event["measure"] == measure and not event["recovered"]]
    assert [(event["process"], event["step"], event["host"]) for event in found] == [(2, 4, HOST)]
    assert found[0]["seconds"] > 0.05 > found[0]["median_seconds"]
    assert found[0]["factor"] > factor
    words = {"data": "it waits .* ms per step for data", "forward": "it takes .* ms per step for the forward"}
    assert len(re.findall(rf"warning: step 4: process 2 \({HOST}\) is slower .*{words[measure]}", run.output)) == 1

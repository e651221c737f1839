"""Bytes at 8 to 1,024 processes follow the closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.domains.models.mmdit import ModelConfig, MultimodalMMDiT
from accel_train.simulation.collectives import sent_bytes
from tests.distributed.launching import LAUNCH_FILES, Layout, hsdp_file
from tests.simulation import closed_forms
from tests.simulation.counting import counted, simulated, total_work

# The largest is among the quick tests of FSDP2, and the smallest among those of the others.
LARGE = [*(pytest.param(n, marks=pytest.mark.slow) for n in (8, 64, 512)), 1024]
SMALL = [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (64, 512, 1024))]
# Replicas and shards. They differ, because a norm is added up over the shards.
GROUPED = [(2, 4), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((16, 4), (64, 8), (128, 8)))]


def shapes_of_model() -> dict[str, torch.Size]:
    """The parameters of the small demo of ``tests.distributed.launching``."""
    with torch.device("meta"):
        model = MultimodalMMDiT(ModelConfig(size="demo", depth=2, heads=8).multimodal(512, 32, (1, 64), None))
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def of_kind(found: dict[str, Any], kind: str) -> tuple[int, int]:
    """Count and bytes of the collectives of a kind."""
    rows = [row for row in found["collectives"] if row["kind"] == kind]
    return sum(row["count"] for row in rows), sum(row["size"] for row in rows)


def padded_values(processes: int) -> tuple[int, int]:
    """Values of all parameters and of the root's, each padded to whole rows for every one of the processes."""
    shapes = shapes_of_model()
    padded = {name: processes * closed_forms.shard_values(shape, processes) for name, shape in shapes.items()}
    return sum(padded.values()), sum(values for name, values in padded.items() if ".blocks." not in name)


def assert_states(found: dict[str, Any], states: closed_forms.States, counters: int = 0) -> None:
    """``counters`` tensors of the optimizer count its steps in 4 bytes each."""
    held = found["held"]
    assert (held["parameters"], held["gradients"], held["EMA"]) == (states.parameters, states.gradients, states.ema)
    assert held["optimizer state"] == states.optimizer + 4 * counters


@pytest.mark.parametrize("processes", LARGE)
def test_fsdp2_follows_its_closed_forms(processes: int, tmp_path: Path) -> None:
    found = counted(Layout("fsdp2", processes), tmp_path, "--global_batch_size", str(max(16, processes)))
    shapes = shapes_of_model()
    assert sum(shape.numel() for shape in shapes.values()) == found["values"]
    assert_states(found, closed_forms.fsdp2(shapes.values(), processes, ema=True), len(shapes))

    traffic = closed_forms.fsdp2_traffic(*padded_values(processes), processes, micro_batches=1)
    assert of_kind(found, "all-gather") == (5, traffic.gathered)
    assert of_kind(found, "reduce-scatter") == (3, traffic.scattered)
    sent = sum(row["sent"] for row in found["collectives"] if row["kind"] != "all-reduce")
    assert sent == pytest.approx(traffic.sent, rel=1e-6)


# Slow: accumulation does not depend on the number of processes, and test_exact.py counts it on two every day.
@pytest.mark.parametrize(
    ("processes", "micro_batches", "sync"),
    [
        pytest.param(8, 2, "last", marks=pytest.mark.slow),
        pytest.param(8, 4, "last", marks=pytest.mark.slow),
        pytest.param(8, 2, "every", marks=pytest.mark.slow),
        pytest.param(8, 4, "every", marks=pytest.mark.slow),
        *(pytest.param(n, 2, "last", marks=pytest.mark.slow) for n in (64, 512, 1024)),
        *(pytest.param(n, 2, "every", marks=pytest.mark.slow) for n in (64, 512, 1024)),
    ],
)
def test_accumulation_under_fsdp2_multiplies_gathers(
    processes: int, micro_batches: int, sync: str, tmp_path: Path
) -> None:
    """Reductions only with ``sync: every``."""
    size = str(micro_batches * processes)
    flags = ("--global_batch_size", size, "--micro_batch_size", "1", "--sync", sync)
    found = counted(Layout("fsdp2", processes), tmp_path, *flags)
    assert found["micro_batches"] == micro_batches
    reductions = micro_batches if sync == "every" else 1
    traffic = closed_forms.fsdp2_traffic(
        *padded_values(processes), processes, micro_batches=micro_batches, reductions=reductions
    )
    assert of_kind(found, "all-gather") == (5 * micro_batches, traffic.gathered)
    assert of_kind(found, "reduce-scatter") == (3 * reductions, traffic.scattered)
    sent = sum(row["sent"] for row in found["collectives"] if row["kind"] != "all-reduce")
    assert sent == pytest.approx(traffic.sent, rel=1e-6)


# Slow: torch's own option, and all else is as above.
@pytest.mark.slow
@pytest.mark.parametrize("processes", [8, 64, 512, 1024])
def test_fsdp2_without_resharding_gathers_once(processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    option = "fsdp_reshard_after_forward: "
    text = LAUNCH_FILES["fsdp2"]
    assert f"{option}true" in text
    monkeypatch.setitem(LAUNCH_FILES, "fsdp2", text.replace(f"{option}true", f"{option}false"))
    found = counted(Layout("fsdp2", processes), tmp_path, "--global_batch_size", str(max(16, processes)))
    traffic = closed_forms.fsdp2_traffic(*padded_values(processes), processes, micro_batches=1, gathers=1)
    assert of_kind(found, "all-gather") == (3, traffic.gathered)
    assert of_kind(found, "reduce-scatter") == (3, traffic.scattered)


@pytest.mark.parametrize(("replicas", "shards"), GROUPED)
def test_hsdp_follows_its_closed_forms(
    replicas: int, shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum over both dimensions: FSDP2's within a group, and DDP's of each shard between the groups."""
    monkeypatch.setitem(LAUNCH_FILES, "hsdp", hsdp_file(replicas, shards))
    processes = replicas * shards
    size = str(2 * processes)
    flags = ("--global_batch_size", size, "--micro_batch_size", "1")
    found = counted(Layout("hsdp", processes), tmp_path, *flags)
    shapes = shapes_of_model()
    assert_states(found, closed_forms.fsdp2(shapes.values(), shards, ema=True), len(shapes))
    traffic = closed_forms.hsdp_traffic(*padded_values(shards), replicas, shards, micro_batches=found["micro_batches"])
    assert found["micro_batches"] == 2
    assert of_kind(found, "all-gather") == (10, traffic.gathered)
    assert of_kind(found, "reduce-scatter") == (3, traffic.scattered)
    between = [row for row in found["collectives"] if (row["kind"], row["group_size"]) == ("all-reduce", replicas)]
    assert sum(row["size"] for row in between) == traffic.reduced
    inside = [row for row in found["collectives"] if row["kind"] in ("all-gather", "reduce-scatter")]
    assert {row["group_size"] for row in inside} == {shards}
    assert sum(row["sent"] for row in inside + between) == pytest.approx(traffic.sent, rel=1e-6)


@pytest.mark.parametrize("processes", SMALL)
def test_ddp_follows_its_closed_forms(processes: int, tmp_path: Path) -> None:
    found = counted(Layout("ddp", processes), tmp_path, "--global_batch_size", str(max(16, processes)))
    assert_states(found, closed_forms.replicated(found["values"], ema=True), len(shapes_of_model()))
    assert_reduced(found, closed_forms.ddp_traffic(found["values"], processes))


# Slow: the count of DDP without accumulation is quick.
@pytest.mark.slow
@pytest.mark.parametrize("sync", ["last", "every"])
def test_accumulation_under_ddp_does_not_multiply_reductions(sync: str, tmp_path: Path) -> None:
    """Unless ``sync: every`` asks for it."""
    flags = ("--global_batch_size", "32", "--micro_batch_size", "1", "--sync", sync)
    found = counted(Layout("ddp", 8), tmp_path, *flags)
    assert found["micro_batches"] == 4
    assert_reduced(found, closed_forms.ddp_traffic(found["values"], 8, reductions=4 if sync == "every" else 1))


def assert_reduced(found: dict[str, Any], traffic: closed_forms.Traffic) -> None:
    """All of it in all-reduces."""
    count, size = of_kind(found, "all-reduce")
    # Two of them add up weights and losses.
    assert count > 2
    assert traffic.reduced < size < traffic.reduced + 100
    (row,) = found["collectives"]
    assert row["sent"] == pytest.approx(traffic.sent, rel=1e-5)


# Of DeepSpeed's own code, which makes lists of all processes: minutes at 1,024.
SIZES = (8, *(pytest.param(n, marks=pytest.mark.slow) for n in (64, 512, 1024)))
PERSISTENT = 100_000
"""``stage3_param_persistence_threshold`` of DeepSpeed."""
GROUPS = 2
"""With and without weight decay."""


@pytest.mark.slow  # that of its offload is a quick test
@pytest.mark.parametrize("processes", SIZES)
def test_zero_2_follows_its_closed_forms(processes: int, tmp_path: Path) -> None:
    batch = 2 * max(8, processes)
    flags = ("--global_batch_size", str(batch), "--micro_batch_size", "1")
    found = counted(Layout("zero2", processes), tmp_path, *flags)
    assert found["overlap_comm"] is False
    held = found["held"]
    # Each group is padded so that every process has a multiple of two values.
    padded = held["parameters"] // closed_forms.FP32
    assert padded % (2 * processes) == 0
    assert 0 <= padded - found["values"] < GROUPS * 2 * processes
    states = closed_forms.zero_12(padded, processes, ema=True)
    assert (held["master weights"], held["EMA"]) == (states.gradients, states.ema)
    assert held["optimizer state"] == states.optimizer + 4 * GROUPS
    # Beside it the engine's own partitions of all groups.
    assert states.gradients <= held["gradients"] < 2.2 * states.gradients + 2**20

    traffic = closed_forms.zero_12_traffic(padded, processes, reductions=found["micro_batches"])
    assert found["micro_batches"] == 2
    assert of_kind(found, "all-gather") == (GROUPS, traffic.gathered)
    _, size = of_kind(found, "all-reduce")
    # Gradients have no padding. Weights, losses and the norm are a few numbers.
    assert traffic.reduced - 2 * GROUPS * 2 * processes * closed_forms.FP32 <= size < traffic.reduced + 100
    assert sum(row["sent"] for row in found["collectives"]) == pytest.approx(traffic.sent, rel=0.01)


@pytest.mark.parametrize("processes", SIZES)
def test_zero_3_follows_its_closed_forms(processes: int, tmp_path: Path) -> None:
    found = counted(Layout("zero3", processes), tmp_path, "--global_batch_size", str(max(16, processes)))
    assert found["overlap_comm"] is True
    shapes = shapes_of_model()
    assert sum(shape.numel() for shape in shapes.values()) == found["values"]
    padded = [processes * -(-shape.numel() // processes) for shape in shapes.values()]
    small = [shape.numel() for shape in shapes.values() if shape.numel() <= PERSISTENT]
    small_padded = sum(processes * -(-size // processes) for size in small)
    held = found["held"]
    states = closed_forms.zero_3(sum(padded), sum(small), processes, ema=True)
    assert (held["master weights"], held["EMA"]) == (states.gradients, states.ema)
    assert held["optimizer state"] == states.optimizer + 4 * GROUPS
    # A small weight gathered alone keeps its padding, and together with others it has none.
    padding = closed_forms.FP32 * (small_padded - sum(small))
    assert 0 <= held["parameters"] - states.parameters <= padding

    traffic = closed_forms.zero_3_traffic(sum(padded), small_padded, processes, micro_batches=1)
    count, gathered = of_kind(found, "all-gather")
    assert 1 < count < len(shapes)
    assert gathered == traffic.gathered
    assert of_kind(found, "reduce-scatter") == (1, traffic.scattered)
    sent = sum(row["sent"] for row in found["collectives"] if row["kind"] != "all-reduce")
    assert sent == pytest.approx(traffic.sent, rel=1e-6)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("micro_batches", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_an_offload_of_zero_2_follows_its_closed_forms(micro_batches: int, precision: str, tmp_path: Path) -> None:
    flags = ("--global_batch_size", str(micro_batches), "--micro_batch_size", "1", "--precision", precision)
    found = counted(Layout("zero2_offload", 1), tmp_path, *flags)
    weight_bytes = 2 if precision == "bf16" else 4
    masters, averages = (found["host"][name] // closed_forms.FP32 for name in ("master weights", "EMA"))
    assert 0 <= masters - found["values"] < GROUPS * 2
    expected = closed_forms.zero_2_offload(masters, averages, weight_bytes=weight_bytes)
    # A count of steps for each group.
    assert total_work(found, "on_host") == pytest.approx(expected, abs=16 * GROUPS)
    copied = closed_forms.zero_2_copies(
        found["values"], masters, micro_batches=micro_batches, weight_bytes=weight_bytes
    )
    assert total_work(found, "copied") == copied


@pytest.mark.slow  # a simulation of a quarter of a minute; that of stage 2 is a quick test
def test_an_offload_of_zero_3_copies_its_weights_to_the_device(tmp_path: Path) -> None:
    flags = ("--global_batch_size", "16", "--micro_batch_size", "8", "--precision", "bf16")
    report = simulated(Layout("zero3_offload", 1), tmp_path, *flags)
    found = report["counted"]
    values, persistent = found["values"], found["held"]["parameters"] // 2
    copied = closed_forms.zero_3_copies(values, persistent, micro_batches=2, weight_bytes=2)
    assert total_work(found, "copied") == copied
    on_host = closed_forms.zero_2_offload(values, values, weight_bytes=2)
    assert total_work(found, "on_host") == pytest.approx(on_host, abs=16 * GROUPS)
    # They are beside the shards, which are in host memory.
    assert found["host"]["parameters"] == 2 * values
    gathered = 2 * (values - persistent)
    assert 0.9 * gathered < max(point["gathered weights"] for point in report["curve"]) <= gathered


def test_a_ring_reduces_in_two_passes() -> None:
    assert sent_bytes("all-reduce", 4, 1000) == 1500
    assert sent_bytes("all-gather", 4, 1000) == 750
    assert sent_bytes("broadcast", 1, 1000) == 0


def test_a_small_parameter_is_not_divided_evenly() -> None:
    """3 rows over 2 processes: two on the first. None over 1,024 is less than one row."""
    assert closed_forms.shard_values((3, 5), 2) == 10
    assert closed_forms.shard_values((192,), 1024) == 1
    assert closed_forms.shard_values((), 8) == 1

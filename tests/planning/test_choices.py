"""What a plan chooses from, its limits in memory, its refusals and its reasons."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from accel_train.config import UsageError
from accel_train.cost_model.devices import find_device, is_cpu, rated
from accel_train.data.options import ONE_BATCH_SIZE, BatchScheduleConfig
from accel_train.planning import command, report
from accel_train.planning.candidates import MICRO_BATCH, MODE, Candidate, divisors, on_a_cpu, space_of
from accel_train.planning.command import budget_of
from accel_train.planning.flags import Goal, Options, add_flags, read_arguments
from accel_train.planning.memory import GIB, Budget
from accel_train.planning.plan import Plan, make_plan
from accel_train.planning.probe import Probe
from accel_train.planning.search import search
from accel_train.speed.options import ActivationCheckpointingConfig, MemoryConfig
from tests.planning.made_up import made_up, space


def config(**changed: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "global_batch_size": 96,
        "micro_batch_size": 16,
        "activation_checkpointing": ActivationCheckpointingConfig("full"),
        "memory": MemoryConfig(),
        "batch_schedule": ONE_BATCH_SIZE,
        "precision": "fp32",
        "compile": SimpleNamespace(mode="off"),
        "sync": "auto",
    }
    return SimpleNamespace(**values | changed)


def flags(*words: str) -> tuple[list[str], Options]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return read_arguments(words, parser.parse_args([]))


def made_plan(limit: float, gpus: int = 8, batch: int = 512, goal: Any = "speed") -> Plan:
    given = space(gpus, batch)
    budget = Budget(limit, 0.0, gpus)
    chains = search(given, goal, budget, lambda candidate: made_up(candidate, given.micro_batches(candidate)))
    return make_plan("mmdit", goal, given, budget, chains, config())


@pytest.mark.parametrize("gpus", [1, 2, 3, 8, 32, 96])
def test_every_micro_batch_keeps_the_global_batch(gpus: int) -> None:
    given = space_of(config(), {}, gpus)
    for size in given.sizes:
        candidate = Candidate("ddp", "none", size)
        assert size * gpus * given.micro_batches(candidate) == 96
    expected = [size for size in range(1, 97) if 96 % (size * gpus) == 0]
    assert list(given.sizes) == expected


def test_a_number_of_gpus_that_does_not_divide_the_batch_is_refused() -> None:
    with pytest.raises(UsageError, match=r"gpus: 7: .*global_batch_size 96 exactly.*give --gpus 6 or 8"):
        space_of(config(), {}, 7)
    with pytest.raises(UsageError, match="give --gpus 96, or another"):
        space_of(config(), {}, 100)


def test_flags_of_the_recipe_are_obeyed() -> None:
    origins = {"micro_batch_size": "command line", "activation_checkpointing.mode": "command line"}
    given = space_of(config(), origins, 2)
    assert (given.sizes, given.modes) == ((16,), ("full",))
    with pytest.raises(UsageError, match=r"micro_batch_size: 10: .*48 of 96 samples.*1, 2, 3, 4, 6, 8, 12, 16, 24, 48"):
        space_of(config(micro_batch_size=10), origins, 2)


@pytest.mark.parametrize(
    ("schedule", "largest"),
    [
        (BatchScheduleConfig(steps=(10,), sizes=(192,)), "192"),
        (BatchScheduleConfig(steps=(10,), sizes=(48,)), "96"),
        (BatchScheduleConfig(noise_factor=1.0, max_size=1024), "1024"),
    ],
)
def test_a_batch_that_changes_is_planned_by_its_largest(schedule: BatchScheduleConfig, largest: str) -> None:
    with pytest.raises(UsageError, match=f"batch_schedule: .*give --global_batch_size {largest}:"):
        space_of(config(batch_schedule=schedule), {}, 2)


def test_divisors_are_all_of_them() -> None:
    for number in (1, 2, 12, 49, 360):
        assert list(divisors(number)) == [size for size in range(1, number + 1) if number % size == 0]


def test_the_limit_in_tensors_is_the_limit_in_gib() -> None:
    for processes in (1, 8):
        budget = Budget(24.0, 1.5, processes, 0.8)
        assert budget.needed_gib(round(budget.tensor_bytes())) == pytest.approx(budget.limit_gib)
    assert Budget(24.0, 0.0, 8).needed_gib(0) > Budget(24.0, 0.0, 1).needed_gib(0)


def test_the_goal_and_the_margin_make_the_limit() -> None:
    assert budget_of(Options(1, 80.0)).limit_gib == pytest.approx(76.0)
    assert budget_of(Options(1, 80.0, margin_gib=2.0)).limit_gib == pytest.approx(78.0)
    assert budget_of(Options(1, 80.0, goal="balanced")).limit_gib == pytest.approx(60.8)


@pytest.mark.parametrize(
    ("given", "installed", "written"),
    [(None, True, 31.5), (None, False, None), (64.0, True, 64.0), (64.0, False, 64.0)],
)
def test_the_command_in_the_files_plans_the_same_on_another_machine(
    given: float | None, installed: bool, written: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "host_bytes", lambda: 31.5 * GIB)
    monkeypatch.setattr(command, "has_deepspeed", lambda: installed)
    _, options = flags(*command._flags(Options(2, 80.0, host_gib=given)))
    assert options.host_gib == written


def test_flags_may_stand_behind_the_recipe() -> None:
    rest, options = flags("base", "--gpus", "8", "--micro_batch_size", "4", "--vram_gib", "80", "--goal", "memory")
    assert rest == ["base", "--micro_batch_size", "4"]
    assert (options.gpus, options.vram_gib, options.goal) == (8, 80.0, "memory")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--vram_gib", "80"), "gpus: not given: .*give --gpus 8"),
        (("--gpus", "0", "--vram_gib", "80"), "gpus: 0: "),
        (("--gpus", "8", "--vram_gib", "nan"), "vram_gib: nan: "),
        (("--gpus", "8", "--vram_gib", "inf"), "vram_gib: inf: "),
        (("--gpus", "8"), "vram_gib: not given: .*give --vram_gib 80"),
        (("--gpus", "8", "--vram_gib", "8", "--margin_gib", "9"), "margin_gib: 9: from 0 to less than --vram_gib 8"),
    ],
)
def test_missing_and_impossible_flags_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        flags(*words)


def test_a_device_is_known_and_has_units_of_the_precision() -> None:
    with pytest.raises(UsageError, match=r"device: h100: .*h100-sxm.*did you mean"):
        find_device("h100", "bf16")
    with pytest.raises(UsageError, match=r"did you mean one of h100-sxm, h100-pcie, h100-nvl\?"):
        find_device("H100", "bf16")
    with pytest.raises(UsageError, match=r"did you mean 'v100-sxm'\?"):
        find_device("V100", "bf16")
    with pytest.raises(UsageError, match=r"did you mean one of a100-80gb-sxm, a100-80gb-pcie\?"):
        find_device("NVIDIA A100 80GB", "bf16")
    with pytest.raises(UsageError, match=r"device: t4: .*precision bf16"):
        find_device("t4", "bf16")


@pytest.mark.parametrize(
    "name",
    ["l40", "NVIDIA L40", "h20", "NVIDIA A100-PCIE-40GB", "Tesla V100-SXM2-16GB", "NVIDIA RTX A6000", "rtx-4080", ""],
)
def test_another_model_is_no_proposal_for_one_that_is_not_known(name: str) -> None:
    with pytest.raises(
        UsageError, match=r"v100-sxm, .* rtx-5090; .* measure another one with accel-train cal"
    ) as error:
        find_device(name, "bf16")
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb-sxm"),
        ("Tesla T4", "t4"),
    ],
)
def test_a_device_has_the_name_that_nvidia_smi_shows_as_well(name: str, known: str) -> None:
    assert rated(name, "fp32", 1) == rated(known, "fp32", 1)
    assert rated(name, "fp32", 1).name == known
    assert not is_cpu(name)


@pytest.mark.parametrize(
    ("name", "teraflops"), [("h100-sxm", 67.0), ("a100-80gb-sxm", 19.5), ("t4", 8.1), ("rtx-4090", 82.6)]
)
def test_fp32_is_timed_without_tf32(name: str, teraflops: float) -> None:
    assert find_device(name, "fp32")[1] == pytest.approx(teraflops * 1e12)
    assert rated(name, "fp32", 1).origins["products"] == f"65% of {teraflops:g} TFLOP/s"


def test_nothing_fits_says_the_smallest_and_what_helps() -> None:
    with pytest.raises(UsageError) as error:
        made_plan(3.0)
    text = str(error.value)
    assert "nothing fits into 3.00 GiB" in text
    # 2 GiB of states, 0.125 of one sample and 2 of gradients; a twentieth more, and the rules for 8 processes.
    assert f"needs {4.125 * 1.05 + 1.0625:.2f} GiB (fsdp2, activation_checkpointing.mode full" in text
    assert "more --gpus than 8" in text
    assert "--precision bf16" in text


def test_nothing_fits_where_the_rules_alone_exceed_the_memory() -> None:
    with pytest.raises(UsageError) as error:
        made_plan(0.3, gpus=1)
    text = str(error.value)
    assert "CUDA context 0.50, workspaces 0.06, fragmentation 0.51" in text
    assert re.search(r"What helps: a GPU of [0-9.]+ GiB$", text)


def test_more_gpus_are_proposed_only_where_they_can_help() -> None:
    # One sample has 0.125 GiB, and several processes have NCCL's buffers. A single micro-batch adds up no gradients.
    enough = 0.125 * 1.05 + 1.0625
    for limit, helps in ((enough - 0.01, False), (enough + 0.01, True)):
        with pytest.raises(UsageError) as error:
            made_plan(limit, gpus=1)
        assert ("more --gpus than 1" in str(error.value)) == helps
    with pytest.raises(UsageError) as error:
        made_plan(2.0, gpus=8, batch=8)
    assert "more --gpus" not in str(error.value), "each GPU has one sample already"


@pytest.mark.parametrize(("margin", "goal"), [(None, "speed"), (0.5, "speed"), (None, "balanced")])
def test_the_gpu_that_helps_is_large_enough(margin: float | None, goal: Goal) -> None:
    given = space(8, 512)

    def planned(gib: float) -> Plan:
        budget = budget_of(Options(8, gib, margin_gib=margin, goal=goal))
        chains = search(given, goal, budget, lambda candidate: made_up(candidate, given.micro_batches(candidate)))
        return make_plan("mmdit", goal, given, budget, chains, config())

    with pytest.raises(UsageError, match="What helps: a GPU of") as error:
        planned(3.0)
    found = re.search(r"a GPU of ([0-9.]+) GiB", str(error.value))
    assert found is not None
    enough = float(found[1])
    assert planned(enough).chosen.candidate.strategy == "fsdp2"
    with pytest.raises(UsageError):
        planned(enough - 0.1)
    assert ("--goal speed" in str(error.value)) == (goal == "balanced")


def test_a_flag_at_its_smallest_value_is_not_to_blame() -> None:
    sizes = dataclasses.replace(space(8, 512), sizes=(1,), modes=("none",), fixed=frozenset({MICRO_BATCH, MODE}))
    budget = Budget(2.0, 0.0, 8)
    chains = search(sizes, "speed", budget, lambda candidate: made_up(candidate, sizes.micro_batches(candidate)))
    with pytest.raises(UsageError, match=f"without --{MODE} a smaller value is tried") as error:
        make_plan("mmdit", "speed", sizes, budget, chains, config())
    assert f"without --{MICRO_BATCH}" not in str(error.value)


def test_fewer_checkpointed_blocks_than_all_are_named_where_nothing_fits() -> None:
    partly = dataclasses.replace(space(8, 512), sizes=(1,), modes=("full",), blocks=2, fixed=frozenset({MODE}))
    chains = search(partly, "speed", Budget(2.0, 0.0, 8), lambda one: made_up(one, partly.micro_batches(one)))
    with pytest.raises(UsageError, match=r"without --activation_checkpointing\.blocks 2 all blocks are checkpointed"):
        make_plan("mmdit", "speed", partly, Budget(2.0, 0.0, 8), chains, config())


def test_a_cpu_has_rules_of_its_own() -> None:
    budget = Budget(16.0, 0.0, 1, on_cpu=True)
    assert set(budget.parts_gib(GIB)) == {"process", "fragmentation"}
    assert budget.machine() == "1 process(es) on a CPU, 16 GiB for each"
    assert on_a_cpu(space(2, 8, offloads=True)).strategies == ("fsdp2", "ddp")
    found = made_plan(24.0, gpus=1, batch=8)
    on_cpu = dataclasses.replace(found, budget=dataclasses.replace(found.budget, on_cpu=True))
    text = report.describe(on_cpu, None, explain=False)
    assert "GPU" not in text.partition("not considered")[0]


def test_one_sample_for_each_gpu_leaves_nothing_to_choose() -> None:
    reason = made_plan(100.0, batch=8, goal="memory").reasons()["micro_batch_size"]
    assert reason == "the whole share of a process: nothing is accumulated"


def test_a_plan_gives_the_reason_of_each_value() -> None:
    found = made_plan(10.0)
    reasons = found.reasons()
    assert found.chosen.candidate == Candidate("fsdp2", "full", 32)
    assert reasons["launch file"].startswith("ddp: ")
    assert reasons["micro_batch_size"].startswith("the largest that fits: 64 needs 11.56 GiB, 1.56 too much")
    assert "none: " in reasons["activation_checkpointing.mode"]


def test_a_larger_size_that_fits_may_be_slower() -> None:
    small = dataclasses.replace(space(1, 8), modes=("none",))
    budget = Budget(16.0, 0.0, 8)  # for 4 samples

    def slower_with_4(candidate: Candidate) -> Probe:
        made = made_up(candidate, small.micro_batches(candidate))
        slow = dataclasses.replace(made.time, products=10.0)
        return dataclasses.replace(made, time=slow) if candidate.micro_batch_size == 4 else made

    chains = search(small, "speed", budget, slower_with_4)
    found = make_plan("mmdit", "speed", small, budget, chains, config())
    assert found.chosen.candidate.micro_batch_size < 4
    assert found.reasons()[MICRO_BATCH] == "faster than 4, which needs 15.76 GiB and fits too"


def test_what_is_not_considered_and_what_does_not_fit_is_listed() -> None:
    found = made_plan(10.0)
    listed = report.as_json(found, rated("h100-sxm", "bf16", 8))
    json.dumps(listed)
    assert "DeepSpeed ZeRO (zero2_offload.yaml, zero3_offload.yaml)" in listed["not_considered"]
    assert listed["plan"]["needed_gib"] <= listed["limit_gib"]
    assert {probe["fits"] for probe in listed["others"]} == {True, False}
    over = [probe.needed_gib(found.budget) - found.budget.limit_gib for probe in found.exceeding()]
    assert over == sorted(over)
    assert all(gib > 0 for gib in over)
    assert listed["plan"]["bytes_in_blocks"] <= 10 * GIB


def test_what_a_plan_varies_is_not_fixed_in_part() -> None:
    partly = config(activation_checkpointing=ActivationCheckpointingConfig("full", blocks=2))
    with pytest.raises(UsageError, match=r"blocks: 2: .* give --activation_checkpointing\.mode full to plan"):
        space_of(partly, {}, 1)
    assert space_of(partly, {MODE: "command line"}, 1).modes == ("full",)
    with pytest.raises(UsageError, match=r"memory\.fraction: 0\.5: .* from --vram_gib"):
        space_of(config(memory=MemoryConfig(fraction=0.5)), {}, 1)

"""Plans with the file of ``accel-train calibrate`` in the place of a data sheet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel_train.config import UsageError
from accel_train.cost_model import record
from accel_train.cost_model.devices import COPIES, rated
from accel_train.cost_model.rates import LINK_SHARE
from accel_train.cost_model.steps import timing_of
from accel_train.cost_model.work import Work
from tests.calibration.made_up import VALUES, made_up
from tests.planning.test_command import plan


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "c.json"


def test_rates_are_those_of_the_file(path: Path) -> None:
    record.write(path, made_up())
    found = rated(str(path), "fp32", 2)
    assert (found.rates.products, found.rates.attention) == (VALUES["products"], VALUES["attention"])
    assert found.rates.moved == VALUES["operators"]
    assert found.rates.host_seconds == pytest.approx(1 / VALUES["host"])
    assert (found.rates.on_host, found.rates.copied) == (VALUES["adamw"], VALUES["transfer"])
    assert found.rates.serial
    work = Work(sent=10**9, collectives=10, gathered=10**9, gathers=10)
    assert found.rates.communication_seconds(work) == pytest.approx(10 * 2e-4 + 1e9 / 5e8)
    assert set(found.origins) == {*("products", "attention", "moved", "host", "link", "latency", "copied", "on_host")}
    assert all(origin.endswith("measured by calibrate on 2026-11-26") for origin in found.origins.values())
    assert found.notes == ()


def test_another_precision_is_refused(path: Path) -> None:
    record.write(path, made_up())
    with pytest.raises(UsageError, match=r"measured in fp32, and the step is in precision bf16.*calibrate --precision"):
        rated(str(path), "bf16", 2)


def test_links_that_were_not_measured_are_by_a_rule(path: Path) -> None:
    record.write(path, made_up(processes=1))
    found = rated(str(path), "fp32", 2)
    assert found.rates.links["all-reduce"].bytes_per_second == VALUES["copy"] / COPIES
    assert found.origins["link"] == "5 GB/s, a rule, not measured: a quarter of a copy"
    assert found.notes == (
        "measured with one process, so its links are by a rule, and 2 share its rate of host memory: calibrate with 2 "
        "processes",
    )
    assert rated(str(path), "fp32", 1).notes == ()


@pytest.mark.parametrize(("measured", "gpus", "share"), [(1, 8, 1 / 8), (2, 8, 1 / 4), (2, 1, 1)])
def test_more_processes_than_measured_share_the_rate_of_host_memory(
    path: Path, measured: int, gpus: int, share: float
) -> None:
    record.write(path, made_up(processes=measured))
    assert rated(str(path), "fp32", gpus).rates.on_host == pytest.approx(VALUES["adamw"] * share)


def test_a_launch_file_for_gpus_is_not_written_from_the_rates_of_a_cpu(path: Path, tmp_path: Path) -> None:
    record.write(path, made_up())
    done = plan("--gpus", "2", "--vram_gib", "24", "--device", str(path), "--write", str(tmp_path / "files"))
    assert done.returncode == 2
    assert f"{path} was measured on a CPU, and the launch file of 2 processes would ask for GPUs" in done.stderr
    assert "simulated" not in done.stderr


def test_the_rule_for_a_known_gpu_is_its_data_sheet(path: Path) -> None:
    record.write(path, made_up(processes=1, device="NVIDIA H200", device_type="cuda", precision="bf16"))
    found = rated(str(path), "bf16", 8)
    assert found.rates.links["all-gather"].bytes_per_second == pytest.approx(450e9 * LINK_SHARE)
    assert found.origins["link"] == "360 GB/s, a rule, not measured: 80% of NVLink 4"
    assert not found.rates.serial


@pytest.mark.parametrize(
    ("measured", "threads", "clock", "share"),
    [(1, 1, "thread", 0.25), (8, 1, "thread", 0.25), (8, 1, "wall", 1), (4, 1, "wall", 0.5), (1, 4, "wall", 0.125)],
)
def test_processes_on_a_cpu_share_its_cores(path: Path, measured: int, threads: int, clock: str, share: float) -> None:
    """Eight of them on two cores."""
    record.write(path, made_up(processes=measured, threads=threads, clock=clock))
    rates = rated(str(path), "fp32", 8).rates
    assert (rates.products, rates.moved) == pytest.approx((VALUES["products"] * share, VALUES["operators"] * share))
    assert rates.host_seconds == pytest.approx(1 / VALUES["host"] / share)


def test_processes_on_gpus_do_not_share_cores(path: Path) -> None:
    record.write(path, made_up(device_type="cuda"))
    assert rated(str(path), "fp32", 8).rates.products == VALUES["products"]


def test_a_calibration_over_machines_takes_no_link_between_them(path: Path) -> None:
    record.write(path, made_up(num_machines=2))
    assert rated(str(path), "fp32", 2).notes == ("measured over 2 machines, so its links are those between them",)
    with pytest.raises(UsageError, match=r"link: roce-100: .*over 2 machines.*leave --link out and .*_per_machine 2"):
        timing_of(str(path), "roce-100", 8)
    record.write(path, made_up())
    assert timing_of(str(path), "roce-100", 8).is_cpu


def test_other_processes_and_noise_are_notices(path: Path) -> None:
    record.write(path, made_up(spread=0.3))
    processes, cores, noise = rated(str(path), "fp32", 8).notes
    assert processes == "measured with 2 processes at once, and used for 8: their rates may differ"
    assert cores == "8 processes of 1 thread(s) share 2 core(s), so each computes at 25% of what was measured"
    assert noise.startswith("the machine was not quiet when measured: products, attention, operators, copy, host")


@pytest.mark.slow  # two plans; the tests above have the rates and their origins
def test_a_plan_names_the_origin_of_each_figure(path: Path) -> None:
    record.write(path, made_up())
    flags = ("--gpus", "2", "--vram_gib", "24", "--micro_batch_size", "8", "--activation_checkpointing.mode", "none")
    done = plan(*flags, "--device", str(path), "--json")
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    assert listed["rates"]["figures"]["products"] == {
        "value": VALUES["products"],
        "origin": "80 GFLOP/s, measured by calibrate on 2026-11-26",
    }
    seconds, work = listed["plan"]["seconds"], listed["plan"]["work"]
    assert seconds["products"] == pytest.approx(work["products"] / VALUES["products"])
    parts = ("products", "attention", "moved", "host", "communication")
    assert seconds["total"] == pytest.approx(sum(seconds[name] for name in parts))

    done = plan(*flags, "--device", str(path))
    text = done.stdout.partition("time of a step")[2]
    for name in ("products", "attention", "other operators", "host", "communication"):
        line = next(line for line in text.splitlines() if line.strip().startswith(name))
        assert line.endswith("measured by calibrate on 2026-11-26"), line
    # Of processes without a GPU.
    assert "on 2 process(es) on a CPU, 24 GiB for each" in done.stdout
    assert "memory of a process at its peak" in done.stdout
    assert not any(word in done.stdout for word in ("CUDA", "NCCL", "workspaces", "GPU(s)"))
    assert "data sheet" not in text
    assert "nothing measured" not in text


def test_a_file_that_is_not_there_is_refused_before_the_search() -> None:
    done = plan("--gpus", "1", "--vram_gib", "24", "--device", "none.json")
    assert done.returncode == 2
    assert "none.json: it does not exist" in done.stderr
    assert "simulated" not in done.stderr

"""The model of time against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from accel_train.cost_model import times
from accel_train.cost_model.devices import DEVICES, find_device
from accel_train.cost_model.rates import LINKS, Link, Rates
from accel_train.cost_model.times import rates_of, step_time, step_work
from accel_train.cost_model.work import Work
from tests.simulation.closed_forms import ddp_traffic, fsdp2_traffic

UNIT = Rates(
    products=1e3,
    attention=1e2,
    moved=1e1,
    host_seconds=times.HOST_SECONDS,
    links=dict.fromkeys(LINKS, Link(times.LATENCY_SECONDS, 1.0)),
    on_host=5.0,
    copied=4.0,
)
MEASURED = replace(
    UNIT,
    links={"all-reduce": Link(0.5, 10.0), "all-gather": Link(0.25, 20.0), "reduce-scatter": Link(0.125, 40.0)},
)
CPU = replace(UNIT, host_seconds=0.5, serial=True)


def test_products_attention_and_other_operators_add_up() -> None:
    time = step_time(Work(products=3000, attention=200, moved=50), Work(), Work(), "single", UNIT)
    assert time.total == 3.0 + 2.0 + 5.0


def test_small_kernels_wait_for_the_host() -> None:
    time = step_time(Work(products=1000, kernels=2_000_000), Work(), Work(), "single", UNIT)
    assert time.total == pytest.approx(2_000_000 * times.HOST_SECONDS)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3_offload"])
@pytest.mark.parametrize(("gathered", "exposed"), [(1, 0.0), (2, 4.0)])
def test_gathers_are_hidden_beside_their_own_micro_batch(gathered: int, exposed: float, strategy: str) -> None:
    """Four of a second each, and nothing beside the half second of the optimizer."""
    part = Work(products=1000, sent=gathered, gathered=gathered)
    end = Work(moved=5)
    time = step_time(part.times(4) + end, part, end, strategy, UNIT)
    assert (time.exposed, time.total) == pytest.approx((exposed, 4.5 + exposed))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize(("scattered", "exposed"), [(2, 0.0), (5, 3.0), (8, 6.0)])
def test_the_last_micro_batch_alone_hides_its_reductions(scattered: int, exposed: float, strategy: str) -> None:
    """Beside the two seconds of its backward, however many others there are."""
    last = Work(products=3000, sent=scattered, scattered=scattered)
    total = Work(products=3000).times(7) + last
    assert step_time(total, last, Work(), strategy, UNIT).exposed == pytest.approx(exposed)


def test_steps_that_wait_for_the_link_are_equal() -> None:
    """Whatever they compute beside it, to the last bit: a plan then takes the larger micro-batch."""
    rates = replace(UNIT, products=7e3, links=dict.fromkeys(LINKS, Link(0.0, 3.0)))
    steps = [Work(products=products, sent=1, gathered=1) for products in range(100, 900, 37)]
    totals = [step_time(work, work, Work(), "fsdp2", rates).total for work in steps]
    assert len(set(totals)) == 1


def test_gathers_and_reductions_of_a_micro_batch_take_one_link() -> None:
    """Of three seconds, two hide the reductions; gathers of two more seconds exceed the third."""
    last = Work(products=3000, sent=4, gathered=2, gathers=0, scattered=2)
    assert step_time(last, last, Work(), "fsdp2", UNIT).exposed == pytest.approx(1.0)


def test_nothing_hides_the_collectives_of_the_optimizer() -> None:
    """Muon's, which wait for each other, and the gathers of ZeRO-1 and -2."""
    end = Work(products=5000, sent=2)
    assert step_time(Work(products=1000) + end, Work(products=1000), end, "fsdp2", UNIT).exposed == 2.0


@pytest.mark.parametrize(
    ("strategy", "overlap_comm", "exposed"),
    [("zero2", None, 2.0), ("zero2", True, 0.0), ("zero3", None, 0.0), ("zero3", False, 2.0)],
)
def test_overlap_comm_is_that_of_the_engine(strategy: str, overlap_comm: bool | None, exposed: float) -> None:
    work = Work(products=3000, sent=2)
    assert step_time(work, work, Work(), strategy, UNIT, overlap_comm).exposed == pytest.approx(exposed)


@pytest.mark.parametrize("rates", [UNIT, CPU], ids=["gpu", "cpu"])
def test_nothing_runs_beside_an_offload(rates: Rates) -> None:
    """A second of products; then 8 bytes over the link, 15 on the host and 3 sent, none of it hidden under ZeRO-2."""
    work = Work(products=1000, sent=3, copied=8, on_host=15)
    time = step_time(work, work, Work(), "zero2_offload", rates)
    assert (time.computation, time.exposed, time.copied, time.on_host) == (1.0, 3.0, 2.0, 3.0)
    assert time.total == 9.0


def test_the_host_starts_each_copy() -> None:
    time = step_time(Work(copied=4, copies=3), Work(), Work(), "zero2_offload", CPU)
    assert time.copied == pytest.approx(1.0 + 3 * 0.5)


def test_the_gpus_of_a_machine_share_the_memory_of_its_host() -> None:
    """7 billion parameters: 16 bytes read and 12 written of each by AdamW, at 60 % of 307 GB/s."""
    device, peak = find_device("h100-sxm", "bf16")
    work = Work(on_host=28 * 7 * 10**9 // 8, copied=2 * 7 * 10**9)
    time = step_time(work, work, Work(), "zero2_offload", rates_of(device, peak, 8))
    assert time.on_host == pytest.approx(28 * 7e9 / (0.6 * 307.2e9))
    # Each has lanes of its own.
    assert time.copied == pytest.approx(2 * 7e9 / (0.8 * 64e9))


@pytest.mark.parametrize(("sent", "exposed"), [(2, 0.0), (4, 2.0)])
def test_ddp_hides_them_beside_the_last_backward(sent: int, exposed: float) -> None:
    last = Work(products=2000, moved=10, sent=sent)
    time = step_time(Work(products=6000) + last, last, Work(), "ddp", UNIT)
    assert time.total == pytest.approx(9.0 + exposed)


@pytest.mark.parametrize(("sent", "exposed"), [(2, 0.0), (3, 8.0)])
def test_ddp_that_reduces_in_each_micro_batch_hides_them_beside_each_backward(sent: int, exposed: float) -> None:
    """Eight of them, each with a backward of two seconds."""
    part = Work(products=3000, sent=sent)
    assert step_time(part.times(8), part, Work(), "ddp", UNIT).exposed == pytest.approx(exposed, abs=1e-3)


@pytest.mark.parametrize(("strategy", "exposed"), [("fsdp2", 4.0), ("ddp", 12.0)])
def test_collectives_run_beside_kernels_that_wait_for_the_host(strategy: str, exposed: float) -> None:
    """Ten seconds of the host, of which the last micro-batch has three and the optimizer four."""
    kernels = round(1 / times.HOST_SECONDS)
    end = Work(moved=5, kernels=4 * kernels)
    before = last = Work(products=1000, kernels=3 * kernels, sent=5, gathered=5)
    if strategy == "ddp":
        before = Work(products=1000, kernels=3 * kernels)
        last = replace(before, sent=14)
    assert step_time(before + last + end, last, end, strategy, UNIT).total == pytest.approx(10.0 + exposed)


def test_each_collective_has_its_latency() -> None:
    time = step_time(Work(sent=2, collectives=100), Work(), Work(), "ddp", UNIT)
    assert time.communication == pytest.approx(2.0 + 100 * times.LATENCY_SECONDS)


def test_each_kind_of_collective_has_its_own_link() -> None:
    """Of 6 calls and 600 bytes, 3 and 100 are gathered, 2 and 200 scattered; the rest is reduced."""
    work = Work(sent=600, collectives=6, gathered=100, gathers=3, scattered=200, scatters=2)
    time = step_time(work, Work(), Work(), "fsdp2", MEASURED)
    assert time.communication == pytest.approx((0.5 + 300 / 10) + (3 * 0.25 + 100 / 20) + (2 * 0.125 + 200 / 40))
    assert MEASURED.latency_seconds(work) == pytest.approx(0.5 + 3 * 0.25 + 2 * 0.125)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2"])
def test_on_a_cpu_nothing_runs_beside_anything_else(strategy: str) -> None:
    work = Work(products=3000, attention=200, moved=50, kernels=8, sent=2)
    assert step_time(work, work, Work(), strategy, CPU).total == pytest.approx(3.0 + 2.0 + 5.0 + 4.0 + 2.0)


def test_seven_billion_parameters_by_hand() -> None:
    """6 P FLOPs for each of 4,096 tokens on H100s; FSDP2 gathers twice in bf16 and scatters once in fp32."""
    values = 7 * 10**9
    device, peak = find_device("h100-sxm", "bf16")
    traffic = fsdp2_traffic(values, 0, 8, micro_batches=1, bytes_each=2)
    work = Work(products=6 * values * 4096, sent=round(traffic.sent))
    time = step_time(work, work, Work(), "fsdp2", rates_of(device, peak))
    assert time.products == pytest.approx(6 * 7e9 * 4096 / (989.4e12 * 0.65))
    # 4 P + 4 P bytes, seven eighths of them sent.
    assert time.communication == pytest.approx(8 * 7e9 * 7 / 8 / (450e9 * 0.8))
    assert time.total == pytest.approx(max(time.products, time.communication))
    replicated = step_time(Work(sent=round(ddp_traffic(values, 8).sent)), Work(), Work(), "ddp", rates_of(device, peak))
    assert replicated.total == pytest.approx(2 * 4 * 7e9 * 7 / 8 / (450e9 * 0.8))


def test_the_work_of_many_micro_batches_follows_from_three() -> None:
    before = Work(moved=30, collectives=1)
    simulated = [Work(products=5, moved=1), Work(products=5, moved=3), Work(products=5, moved=10, sent=7)]
    parts = [before, *simulated, Work(moved=1000)]
    assert step_work(parts, 3) == Work(products=15, moved=1044, sent=7, collectives=1)
    assert step_work(parts, 10) == Work(products=50, moved=100 + 1 + 8 * 3 + 10 + 1000, sent=7, collectives=1)


def test_every_device_of_the_table_has_a_peak_and_a_source() -> None:
    for name, device in DEVICES.items():
        _, peak = find_device(name, "fp32")
        assert peak > 1e12, name
        assert device.memory_gbs > device.link_gbs > 0, name
        assert device.source, name
        assert device.host.memory_gbs > device.host.link_gbs > 0, name
        if "PCIe" in device.link:
            assert device.link == device.host.link, name

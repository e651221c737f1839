"""Links between machines, step times over several of them, and efficiency, against figures by hand."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import pytest

from accel_train.config import UsageError
from accel_train.cost_model.devices import DEVICES, Rated, rated
from accel_train.cost_model.networks import NETWORKS, Machines, Network, machines_of
from accel_train.cost_model.rates import LINK_SHARE, LINKS, Link, Rates
from accel_train.cost_model.scaling import Point, Scaling, gain
from accel_train.cost_model.steps import timed
from accel_train.cost_model.times import step_time
from accel_train.cost_model.work import Work

RATES = Rates(1e3, 1e2, 1e1, 0.0, dict.fromkeys(LINKS, Link(0.5, 100.0)), on_host=5.0, copied=4.0)
"""A device of 1,000 FLOP/s, with a link of 100 B/s within a machine."""
DEVICE = Rated("made up", RATES, {}, "by hand")
SLOW = Network(8e-9 * 10 / LINK_SHARE, 1, "by hand", 2.0, 0.25, tree_step_seconds=5.0, tree_inside_seconds=0.125)
"""10 B/s for each GPU, of what collectives reach."""
INFINITE = Network(math.inf, 1, "by hand", 0.0, 0.0, tree_step_seconds=0.0, tree_inside_seconds=0.0)
ALL_REDUCE, ALL_GATHER, SCATTER = LINKS


def counted(
    processes: int, sent: int, *, strategy: str = "fsdp2", products: int = 3000, batch: int = 64
) -> dict[str, Any]:
    """A step of 3 seconds that gathers once."""
    gathered = Work(products=products, sent=sent, collectives=1, gathered=sent, gathers=1)
    return {
        "processes": processes,
        "global_batch_size": batch,
        "strategy": strategy,
        "work": [asdict(part) for part in (Work(), gathered, Work())],
        "collectives": [
            {"kind": ALL_GATHER, "group_size": processes, "count": 1, "size": sent, "sent": sent, "stride": 1}
        ],
    }


def pays_up_to(scaling: Scaling) -> tuple[Point, Point | None, float]:
    found = scaling.pays_up_to()
    assert found is not None
    return found


def test_one_machine_takes_the_device_s_own_link() -> None:
    link = Machines(4, "slow", SLOW).link(ALL_GATHER, 4, 1, RATES)
    assert link == RATES.links[ALL_GATHER]


def test_two_machines_against_one() -> None:
    """Ten seconds of bytes on one machine are 25 by four ports of 10 B/s each, and the ring passes a second machine."""
    one, two = (timed(counted(n, 1000), DEVICE, Machines(4, "slow", SLOW)) for n in (4, 8))
    assert (one.time.communication, one.latency) == pytest.approx((0.5 + 10.0, 0.5))
    further = 2.0 + 3 * 0.25
    assert (two.time.communication, two.latency) == pytest.approx((0.5 + further + 25.0, 0.5 + further))
    assert two.time.exposed == pytest.approx(two.time.communication - 3.0)
    assert two.time.total == pytest.approx(two.time.communication)
    assert not one.between
    assert "slow between machines of 4 GPUs" in two.between


def test_a_faster_network_than_the_device_s_link_is_not_used_up() -> None:
    fast = SLOW._replace(gbits=8e-9 * 1000)
    assert Machines(4, "fast", fast).link(ALL_GATHER, 8, 1, RATES).bytes_per_second == 100.0


@pytest.mark.parametrize(("kind", "steps"), [(ALL_GATHER, 7 * (2.0 + 0.75)), (SCATTER, 7 * (2.0 + 0.75))])
def test_a_ring_passes_every_machine(kind: str, steps: float) -> None:
    link = Machines(4, "slow", SLOW).link(kind, 32, 1, RATES)
    assert link.latency_seconds == pytest.approx(0.5 + steps)


@pytest.mark.parametrize("kind", [ALL_REDUCE, "broadcast"])
def test_a_tree_has_the_logarithm_of_them_twice(kind: str) -> None:
    link = Machines(4, "slow", SLOW).link(kind, 32, 1, RATES)
    assert link.latency_seconds == pytest.approx(0.5 + 2 * (3 * 5.0 + 3 * 0.125))


def test_replicas_of_hsdp_have_one_port_each() -> None:
    """Four machines of four GPUs: shards of a machine, and a group over machines for each of its GPUs."""
    machines = Machines(4, "slow", SLOW)
    assert machines.divisions(4, 1, 16) == {(4, 1)}
    assert machines.divisions(4, 4, 16) == {(1, 4)}
    assert machines.divisions(8, 2, 16) == {(2, 4)}
    assert machines.link(ALL_REDUCE, 4, 4, RATES).bytes_per_second == pytest.approx(10.0)
    assert machines.link(ALL_REDUCE, 8, 2, RATES).bytes_per_second == pytest.approx(20.0)


def test_a_step_waits_for_the_group_with_the_fewest_ports() -> None:
    """Shards of three on machines of four: 0 to 2 lie in one, 3 to 5 in two, with one process in the first."""
    machines = Machines(4, "slow", SLOW)
    assert machines.divisions(3, 1, 12) == {(3, 1), (1, 2)}
    assert machines.link(ALL_GATHER, 3, 1, RATES) == RATES.links[ALL_GATHER]
    found = machines.link(ALL_GATHER, 3, 1, RATES, 12)
    assert found.bytes_per_second == pytest.approx(10.0)
    assert found.latency_seconds == pytest.approx(0.5 + 2.0 + 0.5 * 0.25)
    step = counted(12, 30)
    step["collectives"][0]["group_size"] = 3
    assert timed(step, DEVICE, machines).time.communication == pytest.approx(found.latency_seconds + 3.0)


def test_latencies_are_those_of_nccl() -> None:
    """hwLat of its tuning.cc, LL128: 4.0 and 1.9 us in a ring, 8.5 and 1.25 in a tree."""
    network = NETWORKS["infiniband-ndr"]
    machines = Machines(8, "infiniband-ndr", network)
    free = replace(RATES, links=dict.fromkeys(LINKS, Link(0.0, 1e12)))
    assert machines.link(ALL_GATHER, 32, 1, free).latency_seconds == pytest.approx(3 * (4.0e-6 + 7 * 1.9e-6))
    assert machines.link(ALL_REDUCE, 32, 1, free).latency_seconds == pytest.approx(2 * (2 * 8.5e-6 + 7 * 1.25e-6))


def test_gpus_share_ports() -> None:
    assert NETWORKS["infiniband-ndr"].bytes_per_second(8) == 50e9
    assert NETWORKS["roce-100"].bytes_per_second(8) == 6.25e9
    assert NETWORKS["ethernet-25"].bytes_per_second(8) == pytest.approx(25e9 / 64)
    assert all(network.source and network.step_seconds > network.inside_seconds for network in NETWORKS.values())


@pytest.mark.parametrize(
    ("processes", "sent", "exposed"), [(4, 200, 0.0), (4, 350, 1.0), (8, 100, 2.75 + 0.5 + 2.5 - 3)]
)
def test_exposed_is_what_the_computation_does_not_hide(processes: int, sent: int, exposed: float) -> None:
    found = timed(counted(processes, sent), DEVICE, Machines(4, "slow", SLOW))
    assert (found.time.exposed, found.time.total) == pytest.approx((exposed, 3.0 + exposed))


def test_groups_of_one_kind_take_each_its_own_link() -> None:
    """HSDP: 400 bytes within a machine of 100 B/s, and as many to another one of 10 B/s."""
    step = counted(8, 0)
    rows = [(ALL_REDUCE, 4, 1, 400), (ALL_REDUCE, 2, 4, 400)]
    names = ("kind", "group_size", "stride", "sent")
    step["collectives"] = [dict(zip(names, row, strict=True)) | {"count": 1, "size": 0} for row in rows]
    step["work"][1] |= asdict(Work(sent=800, collectives=2))
    found = timed(step, DEVICE, Machines(4, "slow", SLOW))
    assert found.time.communication == pytest.approx(4.0 + 40.0 + found.latency)


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_zero_1_and_2_hide_nothing(strategy: str) -> None:
    work = Work(products=1000, sent=200)
    assert step_time(work, work, Work(), strategy, RATES).exposed == pytest.approx(2.0)


def test_a_step_on_one_machine_takes_what_a_plan_says() -> None:
    """The planner sums bytes by kind, without their groups."""
    device = rated("h100-sxm", "bf16", 8)
    step = counted(8, 10**9, products=10**12)
    work = Work(products=10**12, sent=10**9, collectives=1, gathered=10**9, gathers=1)
    planned = step_time(work, work, Work(), "fsdp2", device.rates)
    assert timed(step, device, Machines()).time == planned


def test_efficiency_is_one_with_an_infinite_link() -> None:
    infinite = replace(DEVICE, rates=replace(RATES, links=dict.fromkeys(LINKS, Link(0.0, math.inf))))
    machines = Machines(4, "infinite", INFINITE)
    steps = [timed(counted(n, 1000, batch=8 * n), infinite, machines) for n in (4, 64, 1024)]
    scaling = Scaling([step.point for step in steps], is_weak=True)
    assert [scaling.efficiency(step.point) for step in steps] == [1.0, 1.0, 1.0]
    assert scaling.describe() == "pays up to 1,024 processes, the most that were compared"


def test_efficiency_is_of_one_process() -> None:
    """Eight times the processes are five times as fast, in any order of the points."""
    points = [Point(64, 256, 1.0), Point(8, 256, 5.0)]
    scaling = Scaling(points, is_weak=False)
    assert scaling.efficiency(points[0]) == pytest.approx(5 / 8)
    assert gain(points[1], points[0]) == pytest.approx(5 ** (1 / 3) - 1)


@pytest.mark.parametrize(("second", "paying"), [(1.5, 16), (1.499, 8)])
def test_half_of_an_ideal_doubling_still_pays(second: float, paying: int) -> None:
    scaling = Scaling([Point(8, 256, 3.0), Point(16, 256, 3.0 / second)], is_weak=False)
    last, following, found = pays_up_to(scaling)
    assert last.processes == paying
    assert (following is None) == (paying == 16)
    if following is not None:
        assert found == pytest.approx(0.499)
        assert "pays up to 8 processes: beyond, doubling them gains less than 50% in samples" in scaling.describe()
        assert scaling.as_json()["next"] == 16


def test_a_larger_number_that_pays_again_does_not_count() -> None:
    points = [Point(8, 256, 8.0), Point(16, 256, 8.0), Point(32, 256, 1.0)]
    assert pays_up_to(Scaling(points, is_weak=False))[0].processes == 8


def test_another_global_batch_is_another_experiment() -> None:
    """With more processes than samples a simulation enlarges the batch, which a run refuses."""
    points = [Point(8, 256, 3.0), Point(16, 256, 1.6), Point(512, 16384, 3.0, is_another=True)]
    strong = Scaling(points, is_weak=False)
    assert [strong.is_another(point) for point in points] == [False, False, True]
    assert pays_up_to(strong)[0].processes == 16
    assert pays_up_to(Scaling(points, is_weak=True))[0].processes == 512


def test_without_a_point_of_the_experiment_nothing_is_said_to_pay() -> None:
    """All numbers of processes are larger than the global batch."""
    points = [Point(512, 16384, 3.0, is_another=True), Point(1024, 32768, 3.0, is_another=True)]
    strong = Scaling(points, is_weak=False)
    assert strong.pays_up_to() is None
    assert strong.describe().startswith("what pays: unknown")
    assert strong.as_json()["pays_up_to"] is None


def test_a_gpu_has_no_more_than_its_port() -> None:
    """Two GPUs of a DGX-1 share a port, and one alone has it for itself."""
    network = NETWORKS["roce-100"]
    assert [network.bytes_per_second(gpus) for gpus in (8, 2, 1)] == [6.25e9, 6.25e9, 12.5e9]


@pytest.mark.parametrize(
    ("processes", "gpus", "link", "message"),
    [
        (
            12,
            8,
            "roce-100",
            r"gpus_per_machine: 8: 12 processes do not fill .*--gpus_per_machine 6, or --num_processes 8",
        ),
        (16, 8, None, r"link: not given: 16 processes fill 2 machines of 8 GPUs.*--link infiniband-ndr"),
    ],
)
def test_processes_fill_machines_with_a_link(processes: int, gpus: int, link: str | None, message: str) -> None:
    machines_of(link, gpus).refuse(gpus // 2)
    with pytest.raises(UsageError, match=message):
        machines_of(link, gpus).refuse(processes)


def test_an_unknown_link_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"link: infiniband_ndr: .*did you mean 'infiniband-ndr'\?"):
        machines_of("infiniband_ndr", 8)


def test_a_step_without_parts_has_no_time() -> None:
    with pytest.raises(UsageError, match=r"device: made up: .*different numbers of forwards.*leave --device out"):
        timed(counted(4, 1) | {"work": []}, DEVICE, Machines())


def test_every_link_is_slower_than_nvlink() -> None:
    """Or machines would not matter."""
    nvlink = min(device.link_gbs for device in DEVICES.values() if "NVLink" in device.link)
    assert all(network.bytes_per_second(8) < nvlink * 1e9 for network in NETWORKS.values())

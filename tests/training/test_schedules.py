"""Learning-rate factors against closed forms, torch, transformers and diffusers."""

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_train.config import UsageError
from accel_train.training.schedules import (
    ScheduleConfig,
    learning_rate_factor,
    notices,
    remedy_when_finished,
    resolve_decay_steps,
    shortened,
)

TOTAL = 97
TORCH = torch.optim.lr_scheduler


def curve(config: ScheduleConfig, steps: int = TOTAL, max_steps: int = TOTAL) -> list[float]:
    decay_steps = resolve_decay_steps(config, max_steps)
    return [learning_rate_factor(config, step, decay_steps) for step in range(steps)]


def reference(build: Callable[[torch.optim.Optimizer], TORCH.LRScheduler], steps: int = TOTAL) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build(optimizer)
    factors: list[float] = []
    for _ in range(steps):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's composed schedulers warn about their own use
            scheduler.step()
    return factors


def test_an_end_elsewhere_than_that_of_the_schedule_is_said() -> None:
    linear = ScheduleConfig(kind="linear", warmup_steps=0)
    (shorter,) = notices(linear, 100, 75)
    assert re.search(r"at step 75 the learning rate is still 0\.25 of the peak; .*--schedule\.decay_steps 75", shorter)
    (longer,) = notices(linear, 100, 150)
    assert re.search(r"from there to step 150 the learning rate is 0, .*--schedule\.decay_steps 150", longer)
    assert notices(linear, 100, 100) == []
    assert notices(ScheduleConfig(kind="constant"), 100, 75) == []
    # Given by the user, who knows.
    assert notices(replace(linear, decay_steps=100), 100, 75) == []


def test_a_finished_run_is_told_what_it_takes_to_learn_more() -> None:
    """More steps alone would be trained with a learning rate of 0."""
    cosine = ScheduleConfig(kind="cosine")
    flags = "--schedule.decay_steps STEPS --schedule.warmup_steps 5 and --allow schedule.decay_steps"
    said = remedy_when_finished(cosine, 30, 30, " --schedule.warmup_steps 5")
    assert said == f", with {flags}, because the learning rate has decayed"
    assert remedy_when_finished(cosine, 100, 30) == ""
    assert remedy_when_finished(ScheduleConfig(kind="constant"), 30, 30) == ""


@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("library", ["transformers", "diffusers"])
def test_equals_transformers_and_diffusers(library, kind, warmup):
    build = getattr(import_module(f"{library}.optimization"), f"get_{kind}_schedule_with_warmup")
    total = () if kind == "constant" else (TOTAL,)
    theirs = reference(lambda optimizer: build(optimizer, warmup, *total))
    ours = curve(ScheduleConfig(kind=kind, warmup_steps=warmup), steps=TOTAL + 20)
    assert ours[:TOTAL] == pytest.approx(theirs, abs=1e-12)
    assert set(ours[TOTAL:]) == ({1.0} if kind == "constant" else {0.0})


def test_a_warm_up_to_the_end_of_the_schedule_is_followed_by_the_floor() -> None:
    config = ScheduleConfig(kind="cosine", warmup_steps=4, floor=0.25)
    assert curve(config, steps=6, max_steps=4) == [0.0, 0.25, 0.5, 0.75, 0.25, 0.25]


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("library", ["transformers", "diffusers"])
def test_restarts_equal_transformers_and_diffusers(library, warmup):
    build = import_module(f"{library}.optimization").get_cosine_with_hard_restarts_schedule_with_warmup
    total = warmup + 90
    theirs = reference(lambda optimizer: build(optimizer, warmup, total, num_cycles=3), total)
    ours = curve(ScheduleConfig(kind="cosine_restarts", warmup_steps=warmup, cycles=3), total, total)
    differing = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if abs(a - b) > 1e-12]
    # (cycles * progress) % 1.0 in floating point can fall just short of a restart; integers cannot
    assert set(differing) <= {warmup + 30, warmup + 60}
    assert ours[warmup] == ours[warmup + 30] == ours[warmup + 60] == 1.0


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("multiplier", [1, 2])
def test_cycle_steps_equal_torch_warm_restarts(floor, multiplier):
    config = ScheduleConfig(
        kind="cosine_restarts", floor=floor, cycle_steps=7, cycle_multiplier=multiplier, decay_steps=1000
    )
    theirs = reference(lambda o: TORCH.CosineAnnealingWarmRestarts(o, 7, multiplier, eta_min=floor), 300)
    assert curve(config, 300) == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_floors_equal_torch_and_transformers(floor):
    from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup, get_wsd_schedule

    linear = reference(lambda o: TORCH.LinearLR(o, 1.0, floor, TOTAL), TOTAL + 10)
    assert curve(ScheduleConfig(kind="linear", floor=floor), TOTAL + 10) == pytest.approx(linear, abs=1e-9)
    cosine = reference(lambda o: TORCH.CosineAnnealingLR(o, TOTAL, eta_min=floor))
    assert curve(ScheduleConfig(kind="cosine", floor=floor)) == pytest.approx(cosine, abs=1e-9)
    cosine = reference(lambda o: get_cosine_with_min_lr_schedule_with_warmup(o, 10, TOTAL, min_lr_rate=floor))
    ours = curve(ScheduleConfig(kind="cosine", floor=floor, warmup_steps=10))
    assert ours == pytest.approx(cosine, abs=1e-12)
    # transformers starts this warm-up at the floor, so it is compared without one
    wsd = reference(lambda o: get_wsd_schedule(o, 0, 20, 100, decay_type="linear", min_lr_ratio=floor), 120)
    assert curve(ScheduleConfig(kind="wsd", floor=floor), 120, 100) == pytest.approx(wsd, abs=1e-12)


def test_inverse_sqrt_equals_transformers_and_stops_at_its_floor():
    from transformers.optimization import get_inverse_sqrt_schedule

    config = ScheduleConfig(kind="inverse_sqrt", warmup_steps=10)
    theirs = reference(lambda o: get_inverse_sqrt_schedule(o, 10), 500)
    assert curve(config, 500) == pytest.approx(theirs, abs=1e-12)
    with_floor = ScheduleConfig(kind="inverse_sqrt", warmup_steps=10, floor=0.5)
    expected = [max(f, 0.5) if i > 10 else f for i, f in enumerate(theirs)]
    assert curve(with_floor, 500) == pytest.approx(expected)


def test_growing_cycles_end_at_decay_steps():
    # 1 + 2 + 4 parts of 70 steps: cycles of 10, 20 and 40
    config = ScheduleConfig(kind="cosine_restarts", warmup_steps=5, cycles=3, cycle_multiplier=2, floor=0.25)
    factors = curve(config, 90, 75)
    assert [i for i, f in enumerate(factors) if f == 1.0] == [5, 15, 35]
    assert factors[10] == pytest.approx(0.625)
    assert factors[55] == pytest.approx(0.625)
    assert factors[75:] == [0.25] * 15


def test_wsd_decay_is_a_part_of_all_steps():
    config = ScheduleConfig(kind="wsd", warmup_steps=10, wsd_decay_fraction=0.257, floor=0.5)
    factors = curve(config, 110, 100)  # 25.7 steps, rounded to 26: from step 74 to step 100
    assert factors[10:75] == [1.0] * 65
    assert factors[75:100] == pytest.approx([1 - 0.5 * i / 26 for i in range(1, 26)])
    assert factors[100:] == [0.5] * 10


CONFIGS = st.one_of(
    st.builds(
        ScheduleConfig,
        kind=st.sampled_from(["linear", "cosine", "wsd"]),
        warmup_steps=st.integers(0, 50),
        floor=st.floats(0, 1),
    ),
    st.builds(
        ScheduleConfig,
        kind=st.just("cosine_restarts"),
        warmup_steps=st.integers(0, 50),
        floor=st.floats(0, 1),
        cycles=st.integers(2, 5),
        cycle_multiplier=st.integers(1, 3),
    ),
    st.builds(ScheduleConfig, kind=st.just("cosine_restarts"), warmup_steps=st.integers(0, 50), cycles=st.just(1)),
)


@settings(deadline=None)
@given(CONFIGS, st.integers(64, 2000))
def test_exact_at_the_ends(config, decay_steps):
    warmup = config.warmup_steps
    assert learning_rate_factor(config, warmup, decay_steps) == 1.0
    if warmup:
        assert learning_rate_factor(config, 0, decay_steps) == 0.0
    for step in (decay_steps, decay_steps + 1, 10 * decay_steps):
        assert learning_rate_factor(config, step, decay_steps) == config.floor
    for step in range(warmup, decay_steps, 7):
        assert config.floor <= learning_rate_factor(config, step, decay_steps) <= 1.0


@settings(deadline=None)
@given(st.integers(2, 10_000), st.integers(1, 2_000))
def test_linear_is_the_exact_fraction(decay_steps, step):
    config = ScheduleConfig(kind="linear")
    exact = max(Fraction(0), 1 - Fraction(step, decay_steps))
    assert math.isclose(learning_rate_factor(config, step, decay_steps), exact, abs_tol=1e-15)


def test_raising_max_steps_does_not_stretch_the_schedule():
    config = ScheduleConfig(kind="cosine", floor=0.1)
    saved = resolve_decay_steps(config, max_steps=100)
    assert saved == 100
    assert learning_rate_factor(config, 150, saved) == 0.1
    assert resolve_decay_steps(ScheduleConfig(decay_steps=80), max_steps=100) == 80


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"cycles": 20}, "2"),
        ({"cycles": 40, "warmup_steps": 4}, "0.9"),
        ({"cycles": 4, "cycle_multiplier": 2}, "2.7"),
        ({"cycles": 10}, None),
        ({"cycles": 10, "warmup_steps": 40}, None),
        ({"cycle_steps": 3}, "3"),
        ({"cycle_steps": 3, "cycle_multiplier": 2}, "3"),
    ],
)
def test_cycles_without_a_shape_are_named(options: dict[str, int], steps: str | None):
    found = notices(ScheduleConfig(kind="cosine_restarts", **options), 40, 40)
    assert [text.partition(" steps")[0] for text in found] == (
        [f"the first cycle of the schedule has {steps}"] if steps else []
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "constant", "floor": 0.1}, ["floor: 0.1", "kind: constant", "default is 0)"]),
        ({"kind": "constant", "decay_steps": 10}, ["decay_steps: 10", "kind: constant"]),
        ({"kind": "inverse_sqrt", "warmup_steps": 1, "decay_steps": 10}, ["decay_steps: 10"]),
        ({"kind": "inverse_sqrt"}, ["schedule.warmup_steps: 0", "at least 1"]),
        ({"kind": "cosine", "cycles": 2}, ["cycles: 2", "--schedule.kind cosine_restarts"]),
        ({"kind": "cosine", "wsd_decay_fraction": 0.1}, ["wsd_decay_fraction: 0.1", "--schedule.kind wsd"]),
        ({"kind": "cosine_restarts"}, ["exactly one"]),
        ({"kind": "cosine_restarts", "cycles": 2, "cycle_steps": 3}, ["exactly one"]),
        ({"floor": 1.5}, ["floor: 1.5", "0 to 1"]),
        ({"floor": -0.1}, ["floor: -0.1"]),
        ({"floor": math.nan}, ["floor: nan"]),
        ({"warmup_steps": 11, "decay_steps": 10}, ["schedule.warmup_steps: 11", "schedule.decay_steps: 10"]),
        ({"kind": "wsd", "warmup_steps": 9, "decay_steps": 10}, ["wsd_decay_fraction: 0.2", "2 steps"]),
    ],
)
def test_refusals(options, words):
    with pytest.raises(UsageError) as error:
        ScheduleConfig(**options)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup_steps": 101}, ["schedule.warmup_steps: 101", "max_steps: 100"]),
        ({"kind": "constant", "warmup_steps": 101}, ["warmup_steps: 101", "max_steps: 100"]),
        ({"kind": "wsd", "warmup_steps": 90}, ["warmup_steps: 90", "20 steps", "max_steps: 100"]),
        ({"kind": "cosine_restarts", "warmup_steps": 1, "cycle_steps": 100}, ["schedule.cycle_steps: 100", "to 99"]),
        ({"kind": "cosine_restarts", "cycles": 101}, ["schedule.cycles: 101", "max_steps: 100", "fewer cycles"]),
        ({"kind": "cosine_restarts", "cycles": 2**53}, [f"schedule.cycles: {2**53}"]),
        (
            {"kind": "cosine_restarts", "cycles": 7, "cycle_multiplier": 2},
            ["cycle_multiplier: 2", "shorter than a step"],
        ),
        ({"kind": "cosine_restarts", "cycles": 2**53, "cycle_multiplier": 2**53}, [f"cycle_multiplier: {2**53}"]),
    ],
)
def test_lengths_are_checked_against_max_steps(options, words):
    config = ScheduleConfig(**options)
    with pytest.raises(UsageError) as error:
        resolve_decay_steps(config, max_steps=100)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        ({"kind": "cosine", "warmup_steps": 20}, 6, {"warmup_steps": 0}),
        ({"kind": "cosine", "warmup_steps": 20}, 20, {}),
        ({"kind": "inverse_sqrt", "warmup_steps": 20}, 6, {"warmup_steps": 1}),
        ({"kind": "cosine_restarts", "warmup_steps": 20, "cycle_steps": 8}, 10, {"warmup_steps": 1}),
        (
            {"kind": "cosine_restarts", "warmup_steps": 20, "cycle_steps": 80},
            10,
            {"warmup_steps": 1, "cycle_steps": 9},
        ),
        ({"kind": "wsd", "warmup_steps": 40, "wsd_decay_fraction": 0.95}, 25, {"warmup_steps": 1}),
        ({"kind": "wsd", "warmup_steps": 40, "wsd_decay_fraction": 1.0}, 25, {"warmup_steps": 0}),
    ],
)
def test_what_is_free_is_shortened_until_it_fits(options, steps, expected):
    config = ScheduleConfig(**options)
    found = shortened(config, steps, ["warmup_steps", "cycle_steps"])
    assert found == replace(config, **expected)
    assert resolve_decay_steps(found, steps) == steps
    if expected:
        assert shortened(config, steps, []) == config


def test_a_cycle_without_any_room_is_left_to_be_refused():
    config = ScheduleConfig(kind="cosine_restarts", warmup_steps=10, cycle_steps=20)
    assert shortened(config, 10, ["cycle_steps"]) == config

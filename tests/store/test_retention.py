"""What retention keeps, by properties of every plan, and that no instant of its work leaves half a checkpoint."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_train.checkpoints import policy
from accel_train.checkpoints.writer import Retention
from accel_train.store import commit, manifest, retention
from accel_train.store.retention import CheckpointFacts, Plan
from tests.store.test_commit import lost, unreadable


@dataclass(frozen=True)
class Options:
    keep_last: int = 3
    keep_best: int = 0
    best_metric: str | None = "loss"
    best_mode: Literal["min", "max"] = "min"
    keep_every: int = 0
    keep_window_steps: int = 0
    keep_window_epochs: float = 0.0
    pinned: tuple[str, ...] = ()
    keep_state_last: int = 0


def name(step: int) -> str:
    return f"checkpoint_{step:08d}"


def make(directory: Path, step: int, *, state: bool = True, **more: Any) -> Path:
    """A committed checkpoint, written with nothing of the code under test."""
    path = directory / name(step)
    contents = {"model.safetensors": f"weights {step}", "config.json": "{}", "assets/tokenizer.json": "[]"}
    if state:
        contents |= {
            f"optimizer/{f}": f"{f} {step}" for f in ("index.json", "exp_avg.safetensors", "master.safetensors")
        }
        contents["trainer_state.json"] = "{}"
    files = {}
    for file, text in contents.items():
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_text(text)
        files[file] = {"size": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    facts = {"step": step, "epoch": step / 100, "state": state, "metrics": {}, "files": files} | more
    (path / "manifest.json").write_text(json.dumps(manifest.sealed(facts)))
    return path


def damage(path: Path) -> Path:
    (path / "model.safetensors").write_text("other")
    return path


def steps_in(directory: Path) -> list[int]:
    return [step for step, _ in manifest.committed(directory)]


def prune(directory: Path, keep: Options, newest: int, busy: Collection[str] = ()) -> Plan:
    return retention.prune(directory, keep, newest, busy, {})


# ------------------------------------------------------------------------------------------------ properties of plans
figures = st.one_of(st.none(), st.sampled_from([0.5, 1.0, 1, math.nan, math.inf, -math.inf, "0.1", True]), st.floats())


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[CheckpointFacts], list[Path], Options, int, list[str]]:
    steps = draw(st.lists(st.integers(0, 40), min_size=1, max_size=14, unique=True))
    verified: list[CheckpointFacts] = []
    damaged: list[Path] = []
    for step in steps:
        if draw(st.integers(0, 3)) == 0:
            damaged.append(Path(name(step)))
            continue
        figure = draw(figures)
        metrics = {} if figure is None else {"loss": figure}
        verified.append(
            CheckpointFacts(Path(name(step)), step, step / 7, metrics, draw(st.booleans()), draw(st.booleans()))
        )
    names = st.lists(st.sampled_from([name(s) for s in [*steps, 999]]), max_size=3)
    keep = Options(
        keep_last=draw(st.integers(0, 5)),
        keep_best=draw(st.integers(0, 3)),
        best_metric=draw(st.sampled_from(["loss", "absent", None])),
        best_mode=draw(st.sampled_from(["min", "max"])),
        keep_every=draw(st.sampled_from([0, 0, 1, 5, 7])),
        keep_window_steps=draw(st.sampled_from([0, 0, 3, 10])),
        keep_window_epochs=draw(st.sampled_from([0.0, 0.0, 1.0, 2.5])),
        pinned=tuple(draw(names)),
        keep_state_last=draw(st.integers(0, 3)),
    )
    candidates = [one.step for one in verified] * 5 + steps
    return verified, damaged, keep, draw(st.sampled_from(candidates)), draw(names)


def ranked_before(one: CheckpointFacts, other: CheckpointFacts, mode: str) -> bool:
    """Whether ``other`` is a better or an equal but earlier one, both with finite figures."""
    sign = 1 if mode == "min" else -1
    return (sign * other.metrics["loss"], other.step) < (sign * one.metrics["loss"], one.step)


def finite(one: CheckpointFacts) -> bool:
    value = one.metrics.get("loss")
    return type(value) in (int, float) and math.isfinite(value)


def expected_to_stay(
    one: CheckpointFacts, past: Sequence[CheckpointFacts], keep: Options, newest: CheckpointFacts
) -> bool:
    """The rules said again, one checkpoint at a time and without sorting."""
    newer = sum(other.step > one.step for other in past)
    better = [other for other in past if finite(other) and finite(one) and ranked_before(one, other, keep.best_mode)]
    return (
        one is newest
        or keep.keep_last == 0
        or newer < keep.keep_last
        or (keep.best_metric == "loss" and finite(one) and len(better) < keep.keep_best)
        or (keep.keep_every > 0 and one.step % keep.keep_every == 0)
        or (keep.keep_window_steps > 0 and one.step >= newest.step - keep.keep_window_steps)
        or (keep.keep_window_epochs > 0 and newest.epoch - one.epoch <= keep.keep_window_epochs + 1e-6)
    )


@settings(max_examples=400, deadline=None)
@given(situations())
def test_every_plan_keeps_what_it_must_and_nothing_else(situation: Any) -> None:
    verified, damaged, keep, newest, busy = situation
    plan = retention.plan(verified, damaged, keep, newest=newest, busy=busy)
    removed = {p.name for p in plan.remove}
    everything = {h.path.name for h in verified} | {p.name for p in damaged}
    assert removed | set(plan.reasons) == everything
    assert not removed & set(plan.reasons)
    assert all(plan.reasons.values())
    committed = [h for h in verified if h.step == newest]
    if not committed:
        assert not plan.remove
        assert not plan.strip
        return
    past = [h for h in verified if h.step <= newest]
    protected = {*keep.pinned, *busy}
    for one in verified:
        stays = not one.state
        if one.step <= newest:
            stays = expected_to_stay(one, past, keep, committed[0])
        assert (one.path.name in plan.reasons) == (stays or one.path.name in protected), one
    kept = [h for h in past if h.path.name not in removed]
    assert len(kept) >= min(keep.keep_last or len(past), len(past))
    for path in damaged:
        step = int(path.name.split("_")[1])
        newer = sum(h.step > step for h in past)
        may_go = step > newest or (0 < keep.keep_last <= newer)
        every = keep.keep_every > 0 and step % keep.keep_every == 0 and step <= newest
        assert (path.name in removed) == (may_go and not every and path.name not in protected), path


@settings(max_examples=200, deadline=None)
@given(situations())
def test_what_cannot_be_read_now_always_stays_and_does_not_count(situation: Any) -> None:
    verified, paths, keep, newest, busy = situation
    reason = "model.safetensors cannot be read now: Input/output error"
    unreadable = dict.fromkeys(paths, reason)
    plan = retention.plan(verified, [], keep, newest=newest, busy=busy, unreadable=unreadable)
    assert all(plan.reasons[path.name] == reason for path in paths)
    assert plan.unreadable == dict.fromkeys((path.name for path in paths), reason)
    without = retention.plan(verified, [], keep, newest=newest, busy=busy)
    assert (plan.remove, plan.strip) == (without.remove, without.strip)


@settings(max_examples=300, deadline=None)
@given(situations())
def test_state_goes_from_the_oldest_only(situation: Any) -> None:
    verified, damaged, keep, newest, busy = situation
    plan = retention.plan(verified, damaged, keep, newest=newest, busy=busy)
    stripped = {p.name for p in plan.strip}
    assert stripped <= set(plan.reasons) - {*keep.pinned, *busy}
    if all(h.step != newest for h in verified):
        return
    past = [h for h in verified if h.step <= newest]
    for one in past:
        newer_with_state = sum(other.state and other.step > one.step for other in past)
        surplus = one.state and 0 < keep.keep_state_last <= newer_with_state
        unfinished = one.leftover and not one.state
        stays = one.path.name in plan.reasons and one.path.name not in {*keep.pinned, *busy}
        assert (one.path.name in stripped) == (stays and (surplus or unfinished)), one


@settings(max_examples=200, deadline=None)
@given(situations(), st.randoms(use_true_random=False))
def test_a_plan_is_final_and_does_not_depend_on_the_order_of_its_arguments(situation: Any, order: Any) -> None:
    verified, damaged, keep, newest, busy = situation
    first = retention.plan(verified, damaged, keep, newest=newest, busy=busy)
    shuffled, mixed = list(verified), list(damaged)
    order.shuffle(shuffled)
    order.shuffle(mixed)
    assert retention.plan(shuffled, mixed, keep, newest=newest, busy=busy) == first
    left = [
        replace(h, state=False, leftover=False) if h.path in first.strip else h
        for h in verified
        if h.path not in first.remove
    ]
    again = retention.plan(left, [p for p in damaged if p not in first.remove], keep, newest=newest, busy=busy)
    assert (again.remove, again.strip) == ((), ())
    assert again.reasons == first.reasons


def test_of_equal_figures_the_earlier_is_the_best() -> None:
    held = [
        CheckpointFacts(Path(name(s)), s, 0.0, {"loss": v})
        for s, v in ((1, 2.0), (2, 1.0), (3, 1.0), (4, 5.0), (5, 6.0))
    ]
    plan = retention.plan(held, [], Options(keep_last=1, keep_best=1), newest=5)
    assert plan.reasons == {name(2): "best 1 by loss", name(5): "newest, last 1"}
    plan = retention.plan(held, [], Options(keep_last=1, keep_best=1, best_mode="max"), newest=5)
    assert plan.reasons == {name(5): "newest, last 1, best 1 by loss"}


def test_windows_include_their_ends() -> None:
    held = [CheckpointFacts(Path(name(s)), s, s / 10) for s in (9, 10, 15, 20)]
    steps = retention.plan(held, [], Options(keep_last=1, keep_window_steps=10), newest=20)
    assert steps.reasons[name(10)] == "within 10 steps"
    epochs = retention.plan(held, [], Options(keep_last=1, keep_window_epochs=1.0), newest=20)
    assert epochs.reasons[name(10)] == "within 1 epochs"
    assert [p.name for p in steps.remove] == [p.name for p in epochs.remove] == [name(9)]


def test_what_is_no_figure_is_never_the_best() -> None:
    odd = [math.nan, math.inf, -math.inf, True, "0.1", None]
    held = [CheckpointFacts(Path(name(s)), s, 0.0, {"loss": v}) for s, v in enumerate([9.0, *odd, 10.0])]
    for mode in ("min", "max"):
        plan = retention.plan(held, [], Options(keep_last=1, keep_best=8, best_mode=mode), newest=7)
        assert set(plan.reasons) == {name(0), name(7)}


def test_the_future_goes_first() -> None:
    """An interruption in between must not leave the next start a future to go on from."""
    held = [CheckpointFacts(Path(name(s)), s) for s in (1, 2, 3, 8, 9)]
    plan = retention.plan(held, [Path(name(7))], Options(keep_last=1), newest=3)
    assert [p.name for p in plan.remove] == [name(s) for s in (7, 8, 9, 1, 2)]


def test_names_that_no_checkpoint_has() -> None:
    good = ["checkpoint_00000100", "checkpoint_123456789"]
    bad = ["checkpoint_100", "step_100", "", "checkpoint_0000000100", "checkpoint_00000100/", "../checkpoint_00000100"]
    assert policy.invalid_pins([*good, *bad]) == bad


# ----------------------------------------------------------------------------------------------------- on the disk
@pytest.mark.parametrize(
    ("keep", "left"), [(0, [1, 2, 3, 4]), (1, [4]), (3, [2, 3, 4]), (5, [1, 2, 3, 4]), (9, [1, 2, 3, 4])]
)
def test_the_last_are_kept(tmp_path: Path, keep: int, left: list[int]) -> None:
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    plan = prune(tmp_path, Options(keep), 4)
    assert steps_in(tmp_path) == left
    assert len(list(tmp_path.iterdir())) == len(left)
    assert set(plan.reasons) == {name(step) for step in left}
    assert not plan.failed


def test_a_future_that_was_gone_back_from_takes_no_place(tmp_path: Path) -> None:
    """Gone back to 200 because 300 was damaged, then 250 was saved: 250 is what must stay."""
    make(tmp_path, 200)
    damage(make(tmp_path, 300))
    make(tmp_path, 400)
    make(tmp_path, 250)
    prune(tmp_path, Options(keep_last=1, keep_every=100), 250)
    assert steps_in(tmp_path) == [200, 250]


def test_a_copy_under_the_name_of_another_step_stays(tmp_path: Path) -> None:
    """Such as of the 1st of August 2026: it is somebody's, and neither damaged nor of an abandoned future."""
    make(tmp_path, 100)
    for step in (7, 20260801):
        shutil.copytree(tmp_path / name(100), tmp_path / name(step))
    for step in (200, 300):
        make(tmp_path, step)
    plan = prune(tmp_path, Options(keep_last=1), 300)
    assert steps_in(tmp_path) == [7, 300, 20260801]
    assert "its step is 100, but the directory's name says 20260801" in plan.reasons[name(20260801)]


def test_weights_alone_of_a_later_step_stay(tmp_path: Path) -> None:
    """A run of weights only went on with save_state: the start resumed from the last with state, at 50."""
    make(tmp_path, 50)
    make(tmp_path, 100, state=False)
    make(tmp_path, 60)
    plan = prune(tmp_path, Options(keep_last=0), 60)
    assert steps_in(tmp_path) == [50, 60, 100]
    assert plan.reasons[name(100)] == "weights alone of a later step"


def test_a_damaged_one_takes_no_place_and_goes_when_it_is_old(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        make(tmp_path, step)
    damage(tmp_path / name(4))
    damage(tmp_path / name(1))
    plan = prune(tmp_path, Options(keep_last=3), 5)
    assert steps_in(tmp_path) == [2, 3, 4, 5]
    assert plan.reasons[name(4)] == "damaged, newer than the oldest that keep_last keeps"


@pytest.mark.fault(
    "R2", injected="the best checkpoint cannot be read for a while (ESTALE)", outcome="kept, with a warning"
)
def test_a_disk_that_fails_for_a_while_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, loss in ((100, 0.1), (200, 0.2), (300, 0.3)):
        make(tmp_path, step, metrics={"loss": loss})
    keep = Options(keep_last=1, keep_best=1)
    with monkeypatch.context() as patch:
        lost(tmp_path / name(100) / "model.safetensors", patch, errno.ESTALE)
        plan = prune(tmp_path, keep, 300)
    assert steps_in(tmp_path) == [100, 200, 300]
    assert plan.reasons[name(100)] == "model.safetensors cannot be read now: Stale file handle"
    assert prune(tmp_path, keep, 300).reasons == {name(100): "best 1 by loss", name(300): "newest, last 1"}
    assert steps_in(tmp_path) == [100, 300]
    # The manifest of a checkpoint that the options would not keep.
    make(tmp_path, 50)
    unreadable(tmp_path / name(50) / "manifest.json")
    plan = prune(tmp_path, keep, 300)
    assert plan.reasons[name(50)] == "manifest.json cannot be read now: Input/output error"
    assert steps_in(tmp_path) == [50, 100, 300]


def test_nothing_goes_while_the_newest_does_not_verify(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    damage(tmp_path / name(3))
    plan = prune(tmp_path, Options(keep_last=1, keep_state_last=1), 3)
    assert (steps_in(tmp_path), plan.remove, plan.strip) == ([1, 2, 3], (), ())
    assert plan.reasons[name(1)] == "step 3 does not verify, so nothing is deleted"


def test_times_of_files_and_of_clocks_decide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    for step in (100, 900, 1000, 100_000_000, 20):
        make(tmp_path, step, written_at=f"{draw.randrange(1970, 2100)}-01-01T00:00:00Z")
    for path in tmp_path.rglob("*"):
        stamp = draw.uniform(0, 4e9)
        os.utime(path, (stamp, stamp))
    for clock in ("time", "time_ns", "monotonic"):
        monkeypatch.setattr(time, clock, lambda: -1e9)
    prune(tmp_path, Options(keep_last=2), 100_000_000)
    assert steps_in(tmp_path) == [1000, 100_000_000]


def test_pinned_and_pushed_are_left_alone(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    damage(tmp_path / name(1))
    keep = Options(keep_last=1, keep_state_last=1, pinned=(name(1), name(2)))
    plan = prune(tmp_path, keep, 4, busy=[name(3)])
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    assert not plan.strip
    assert plan.reasons == {name(1): "pinned", name(2): "pinned", name(3): "being pushed", name(4): "newest, last 1"}


def test_manifests_say_what_is_held(tmp_path: Path) -> None:
    make(tmp_path, 5, metrics={"loss": 2.5})
    make(tmp_path, 7, state=False)
    (tmp_path / name(7) / "optimizer").mkdir()
    assert not manifest.list_facts(tmp_path)[1].leftover  # an empty folder is what a save without state leaves
    (tmp_path / name(7) / "optimizer" / "exp_avg.safetensors").write_text("")
    old = make(tmp_path, 9)
    content = json.loads((old / "manifest.json").read_text())
    (old / "manifest.json").write_text(json.dumps(manifest.sealed({k: content[k] for k in ("step", "files")})))
    (make(tmp_path, 11) / "manifest.json").write_text("{")
    (make(tmp_path, 12) / "manifest.json").write_text('{"schema": 2, "step": 12, "files": {"a": 3}}')
    five, seven, nine = manifest.list_facts(tmp_path)
    assert five == CheckpointFacts(tmp_path / name(5), 5, 0.05, {"loss": 2.5}, state=True)
    assert (seven.state, seven.leftover) == (False, True)
    assert (nine.step, nine.state, nine.metrics) == (9, True, {})
    assert math.isnan(nine.epoch)
    assert [s for s, _ in manifest.committed(tmp_path)] == [5, 7, 9, 11, 12]
    prune(tmp_path, Options(keep_last=1, keep_window_epochs=1.0), 9)  # no window reaches 5 from an unknown epoch
    assert steps_in(tmp_path) == [9]


def test_state_is_stripped_and_what_is_left_verifies(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step, state=step != 2)
    plan = prune(tmp_path, Options(keep_last=3, keep_state_last=1), 3)
    assert [p.name for p in plan.strip] == [name(1)]
    found = commit.verify(tmp_path / name(1))
    assert found.manifest["state"] is False
    assert found.manifest["epoch"] == 0.01
    files = sorted(p.relative_to(found.path).as_posix() for p in found.path.rglob("*") if p.is_file())
    assert files == ["assets/tokenizer.json", "config.json", "manifest.json", "model.safetensors"]
    assert not (found.path / "optimizer").exists()
    assert prune(tmp_path, Options(keep_last=3, keep_state_last=1), 3).strip == ()


def test_state_stays_where_newer_checkpoints_have_none(tmp_path: Path) -> None:
    """After save_state was turned off the last one to resume from must not lose its state."""
    for step in (1, 2, 3):
        make(tmp_path, step, state=step == 1)
    assert prune(tmp_path, Options(keep_last=3, keep_state_last=1), 3).strip == ()


# ---------------------------------------------------------------------------------------------- interrupted anywhere
class Crash(BaseException):
    """The process ends here: nothing catches it."""


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, at: int, error: Callable[[], BaseException]) -> Iterator[list[int]]:
    """The ``at``-th of the calls that change a directory, and none after it, happens; counts them all."""
    calls = [0]
    with monkeypatch.context() as patch:
        for function in ("rename", "replace", "unlink", "rmdir", "fsync", "open"):
            original = getattr(os, function)

            def counted(*arguments: Any, original: Any = original, **more: Any) -> Any:
                calls[0] += 1
                if calls[0] > at:
                    raise error()
                return original(*arguments, **more)

            patch.setattr(os, function, counted)
        yield calls


def interrupted_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Callable[[], BaseException]
) -> Iterator[tuple[Path, Plan | None]]:
    """A fresh copy of one situation, pruned with ``error`` at each instant in turn, until it runs through."""
    source = tmp_path / "source"
    for step in (1, 2, 3, 4, 5, 6):
        make(source, step, metrics={"loss": abs(step - 2)})
    damage(source / name(1))
    keep = Options(keep_last=2, keep_best=1, keep_state_last=1)
    verified, damaged, _ = retention.survey(source, {})
    for at in range(1000):
        copy = tmp_path / f"at_{at}"
        shutil.copytree(source, copy)
        plan = retention.plan(
            [replace(h, path=copy / h.path.name) for h in verified],
            [copy / p.name for p in damaged],
            keep,
            newest=5,
        )
        done: Plan | None = None
        with failing(monkeypatch, at, error) as calls, suppress(Crash):
            done = retention.apply(plan)
        yield copy, done
        finished = prune(copy, keep, 5)  # the next save, undisturbed, ends where one without a crash ends
        assert steps_in(copy) == [2, 4, 5]
        assert [h.state for h in manifest.list_facts(copy)] == [False, False, True]
        assert not finished.failed
        assert not list((copy / name(2) / "optimizer").glob("*"))
        assert not (copy / name(2) / "trainer_state.json").exists()
        assert not list(copy.glob(f"{name(2)}/.*"))
        if calls[0] <= at:
            return
    raise AssertionError("never ran through")


def assert_all_verify(directory: Path) -> None:
    """Every final name verifies, but for 1, which was damaged before; what must stay is there."""
    steps = steps_in(directory)
    assert {2, 4, 5} <= set(steps)
    for step in steps:
        if step != 1:
            commit.verify(directory / name(step))


def test_a_crash_at_any_instant_leaves_only_checkpoints_that_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0
    for directory, done in interrupted_copies(tmp_path, monkeypatch, Crash):
        assert_all_verify(directory)
        count += done is None
    assert count > 40, "few instants were tried: the functions that change the disk are not the patched ones"


def test_an_error_at_any_instant_is_told_and_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = 0
    for directory, done in interrupted_copies(tmp_path, monkeypatch, lambda: OSError(30, "Read-only file system")):
        assert done is not None
        assert_all_verify(directory)
        failures += bool(done.failed)
        assert all("Read-only file system" in reason for reason in done.failed.values())
    assert failures > 40


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """One that this process may not rename: told, and the others go."""
    for step in (1, 2, 3):
        make(tmp_path / "checkpoints", step)
    if os.geteuid() == 0:
        blocked = tmp_path / "checkpoints" / name(1)
        subprocess.run(["chattr", "+i", str(blocked)], check=False, capture_output=True)
        probe = _is_immutable(blocked)
        if not probe:
            pytest.skip("root, and the file system knows no immutable flag")
        try:
            plan = prune(tmp_path / "checkpoints", Options(keep_last=1), 3)
        finally:
            subprocess.run(["chattr", "-i", str(blocked)], check=False, capture_output=True)
        assert steps_in(tmp_path / "checkpoints") == [1, 3]
        assert list(plan.failed) == [name(1)]
        return
    (tmp_path / "checkpoints").chmod(0o555)
    try:
        plan = prune(tmp_path / "checkpoints", Options(keep_last=1), 3)
    finally:
        (tmp_path / "checkpoints").chmod(0o755)
    assert set(plan.failed) == {name(1), name(2)}


def _is_immutable(path: Path) -> bool:
    try:
        (path / "probe").write_text("")
    except OSError:
        return True
    (path / "probe").unlink()
    return False


# ------------------------------------------------------------------------------------------------- verified only once
@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files hashed so far."""
    names: list[str] = []
    original = hashlib.file_digest

    def counted(file: Any, algorithm: Any) -> Any:
        names.append(Path(file.name).name)
        return original(file, algorithm)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    return names


def test_only_what_has_changed_is_hashed_again(tmp_path: Path, hashed: list[str]) -> None:
    path, cache = make(tmp_path, 1), {}
    assert commit.verify_cached(cache, path) == commit.verify(path)
    hashed.clear()
    commit.verify_cached(cache, path)
    assert hashed == []
    content = (path / "config.json").read_bytes()
    (path / "config.json").unlink()
    (path / "config.json").write_bytes(content)  # another inode, the same content
    commit.verify_cached(cache, path)
    assert hashed == ["config.json"]
    hashed.clear()
    retention.strip_state(path)
    assert commit.verify_cached(cache, path).manifest["state"] is False
    assert hashed == []


def test_what_is_hashed_ahead_is_not_hashed_by_the_next_prune(tmp_path: Path, hashed: list[str]) -> None:
    path, cache = make(tmp_path, 1), {}
    assert len(list(retention.hash_ahead(tmp_path, cache))) == 7  # a piece of each file
    assert list(retention.hash_ahead(tmp_path, cache)) == []
    content = (path / "config.json").read_bytes()
    (path / "config.json").unlink()
    (path / "config.json").write_bytes(content)
    assert len(list(retention.hash_ahead(tmp_path, cache))) == 1
    commit.verify_cached(cache, path)
    assert hashed == []


@pytest.mark.parametrize("keep_times", [False, True])
def test_a_file_changed_on_disk_is_found(tmp_path: Path, keep_times: bool) -> None:
    path, cache = make(tmp_path, 1), {}
    commit.verify_cached(cache, path)
    file = path / "model.safetensors"
    before = file.stat()
    with file.open("r+b") as opened:
        opened.write(b"W")
    if keep_times:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ValueError, match="sha256 differs"):
        commit.verify_cached(cache, path)
    with pytest.raises(ValueError, match="sha256 differs"):
        commit.verify_cached(cache, path)
    with file.open("r+b") as opened:
        opened.write(b"w")
    assert commit.verify_cached(cache, path).step == 1


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda p: (p / "config.json").unlink(), "config.json is missing"),
        (lambda p: (p / "config.json").write_text("{ }"), "3 bytes, the manifest says 2"),
        (lambda p: (p / "manifest.json").unlink(), "no manifest.json"),
        (lambda p: (p / "manifest.json").write_text('{"schema": 9}'), "schema 9"),
        (lambda p: (p / "manifest.json").write_text('{"schema": 2, "step": 1, "files": [1]}'), "cannot be read"),
    ],
)
def test_the_reasons_are_those_of_verify(tmp_path: Path, harm: Callable[[Path], object], reason: str) -> None:
    path, cache = make(tmp_path, 1), {}
    commit.verify_cached(cache, path)
    harm(path)
    with pytest.raises(ValueError, match=reason):
        commit.verify_cached(cache, path)


def test_a_run_hashes_each_checkpoint_once(tmp_path: Path, hashed: list[str]) -> None:
    cache: commit.VerifyCache = {}
    for step in range(1, 8):
        path = make(tmp_path, step)
        commit.remember(cache, path)
        retention.prune(tmp_path, Options(keep_last=2), step, (), cache)
    assert hashed == []
    assert set(cache) == {tmp_path / name(6), tmp_path / name(7)}
    retention.prune(tmp_path, Options(keep_last=2), 7, (), {})
    assert hashed.count("model.safetensors") == 2


def test_keeping_all_reads_nothing(tmp_path: Path, hashed: list[str]) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    assert prune(tmp_path, Options(keep_last=0), 3).reasons == dict.fromkeys(
        (name(1), name(2), name(3)), "keep_last: 0 keeps all"
    )
    assert hashed == []
    prune(tmp_path, Options(keep_last=0), 2)
    assert steps_in(tmp_path) == [1, 2]


def test_the_module_needs_the_standard_library_only() -> None:
    code = "import sys, accel_train.store.retention\nprint(*sorted({m.split('.')[0] for m in sys.modules}))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert not {"torch", "numpy", "accelerate", "safetensors", "pydantic", "yaml"} & set(done.stdout.split())


# ------------------------------------------------------------------------------------- after a commit, behind it
def job_of(path: Path, keep: Options) -> dict[str, Any]:
    manifest = {"step": retention.step_of(path)}
    return {"final": str(path), "manifest": manifest, "keep": asdict(keep), "queue": str(path.parent / "queue")}


def test_what_is_left_after_a_commit_gives_way_and_hurries(tmp_path: Path) -> None:
    """Nothing goes before the old ones are hashed; in a hurry they are not, and stay; a later call ends the work."""
    for step in (1, 2, 3):
        newest = make(tmp_path, step)
    left = Retention()
    left.begin(job_of(newest, Options(keep_last=1)))
    assert left.step()  # a piece of an older one
    assert steps_in(tmp_path) == [1, 2, 3]
    left.finish(hurry=True)
    assert left.waiting
    assert steps_in(tmp_path) == [1, 2, 3]
    left.finish(hurry=False)
    assert not left.waiting
    assert steps_in(tmp_path) == [3]
    left.begin(job_of(make(tmp_path, 4), Options(keep_last=1)))
    left.finish(hurry=True)  # everything is known: there is nothing to hash
    assert steps_in(tmp_path) == [4]
    assert left.notices == []


def test_what_could_not_go_is_told_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "not yours", str(path))

    monkeypatch.setattr(commit, "remove", refuse)
    paths = [make(tmp_path, step) for step in (1, 2)]
    left = Retention()
    left.begin(job_of(paths[-1], Options(keep_last=1)))
    left.advance(60)
    (notice,) = left.notices
    assert notice.startswith("an old checkpoint could not be deleted: checkpoint_00000001: PermissionError")


def test_what_cannot_be_read_now_is_told_once(tmp_path: Path) -> None:
    unreadable(make(tmp_path, 1) / "manifest.json")
    left = Retention()
    for step in (2, 3, 4):
        left.begin(job_of(make(tmp_path, step), Options(keep_last=1)))
        left.finish(hurry=False)
    assert steps_in(tmp_path) == [1, 4]
    assert left.notices == [
        f"{name(1)} is kept whatever the options say: manifest.json cannot be read now: Input/output error"
    ]


def test_a_new_checkpoint_that_cannot_be_read_back_is_committed_all_the_same(tmp_path: Path) -> None:
    cache: commit.VerifyCache = {}
    path = make(tmp_path, 1)
    unreadable(path / "manifest.json")
    commit.remember(cache, path)
    assert cache == {}

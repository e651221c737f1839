"""The saver on one process: forms, policies, metrics, errors, and that what it wrote is what it had."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from accel_train import preparation
from accel_train.checkpoints import background, contents, restore, saver
from accel_train.checkpoints.policy import CheckpointConfig, warn_about_grace
from accel_train.checkpoints.run import Run
from accel_train.checkpoints.saver import Saver
from accel_train.checkpoints.snapshot import Snapshot
from accel_train.commands import export
from accel_train.config import UsageError
from accel_train.hub.options import HubConfig
from accel_train.rng import preserve_random_states
from accel_train.store import atomic_files, commit, failpoints, manifest
from accel_train.store.commit import CheckpointWriteError
from accel_train.store.manifest import Checkpoint
from accel_train.training.ema import Ema, EmaConfig
from accel_train.training.optimizer_classes.fused_adamw import FusedAdamW
from accel_train.training.shards import Shards, persistent_buffers
from tests.waiting import until


def write_config(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


class Toy:
    """A model that trains on nothing in particular, and everything a saver wants."""

    def __init__(self, out: Path, seed: int = 0) -> None:
        AcceleratorState._reset_state(True)
        self.accelerator = Accelerator(cpu=True)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.average = Ema(EmaConfig(0.5), Shards(self.model, self.optimizer))
        self.run = Run(out, "toy", None, "", {"experiment": {"global_batch_size": 4}, "resolved": {}})
        self.run.checkpoints.mkdir(parents=True, exist_ok=True)
        atomic_files.write_json_in_place(out / "run.json", {})
        self.committed: list[int] = []

    def step(self, number: int) -> None:
        self.model(torch.full((2, 6), float(number))).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update(number)

    def saver(self, config: CheckpointConfig, write_extras: Any = write_config) -> Saver:
        return Saver(
            self.accelerator,
            self.run,
            self.average,
            config,
            HubConfig(),
            write_extras,
            epoch=lambda step: step / 4,
            on_commit=lambda saved: self.committed.append(saved.step),
        )

    def train(self, config: CheckpointConfig, steps: int, metric: Any = lambda step: {}) -> list[int]:
        with self.saver(config) as saver:
            for step in range(1, steps + 1):
                self.step(step)
                assert not saver.boundary(step)
                if saver.due(step, steps):
                    saver.save(step, metric(step))
        return [step for step, _ in manifest.committed(self.run.checkpoints)]

    def state(self) -> dict[str, torch.Tensor]:
        view = self.average.shards
        found = {f"model/{n}": view.master(n).clone() for n in view.parameters}
        found |= {f"ema/{n}": t.clone() for n, t in self.average.averages.items()}
        for key in view.state_names():
            found |= {f"{key}/{n}": view.state(n, key).clone() for n in view.parameters}
        return found


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[Toy]:
    yield Toy(tmp_path / "run")
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"save_every": 3}, [3, 6, 9, 10]),
        ({"save_every_epochs": 1.0}, [4, 8, 10]),
        ({"save_every_epochs": 0.5, "save_every": 5}, [2, 4, 5, 6, 8, 10]),
        ({}, [10]),
        ({"save_every_minutes": 1e-9}, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ({"save_every_minutes": 60.0}, [10]),
    ],
)
def test_when_it_saves(toy: Toy, options: dict[str, Any], steps: list[int]) -> None:
    assert toy.train(CheckpointConfig(keep_last=0, **options), 10) == steps
    assert toy.committed == steps


def test_the_clock_begins_anew_with_every_save(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps of 25 seconds the third passes a minute. One saved for another reason counts as well."""
    clock = count(0, 25)
    seconds = [next(clock)]
    monkeypatch.setattr(saver, "time", SimpleNamespace(monotonic=lambda: seconds[-1]))
    with toy.saver(CheckpointConfig(keep_last=0, save_every=7, save_every_minutes=1.0)) as saving:
        for step in range(1, 11):
            toy.step(step)
            seconds.append(next(clock))
            saving.boundary(step)
            if saving.due(step, 100):
                saving.save(step)
    assert toy.committed == [3, 6, 7, 10]


@pytest.mark.parametrize(
    ("options", "minutes"),
    [({}, 10), ({"save_every": 5}, 0), ({"save_every_epochs": 1.0}, 0), ({"save_every_minutes": 0.0}, 0)],
)
def test_a_long_run_saves_by_the_clock_unless_told_otherwise(options: dict[str, Any], minutes: float) -> None:
    assert CheckpointConfig(**options).minutes == minutes


def test_the_clock_asks_for_one_save_where_processes_hear_of_it_a_step_late(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with several processes. It is always time, so one save in two steps is all that this can give."""
    with toy.saver(CheckpointConfig(keep_last=0, save_every_minutes=1e-9)) as saver:
        late: list[dict[str, int] | None] = [None]
        monkeypatch.setattr(saver._agreement, "exchange", lambda values: late.append(dict(values)) or late[-2])
        asked: list[int] = []
        for step in range(1, 10):
            toy.step(step)
            saver.boundary(step)
            if saver.due(step, 100):
                asked.append(step)
                saver.save(step)
    assert asked == [2, 4, 6, 8]


def test_a_resume_whose_optimizer_was_not_restored_is_refused(toy: Toy, tmp_path: Path) -> None:
    toy.train(CheckpointConfig(), steps=2)
    again = Toy(tmp_path / "run")
    again.run = replace(again.run, checkpoint=commit.verify(toy.run.checkpoints / manifest.checkpoint_name(2)))
    with pytest.raises(UsageError, match=r"checkpoint_00000002: the run resumes from it, .* call restore\("):
        again.saver(CheckpointConfig())
    restore.restore(again.run, again.accelerator, again.average.shards, again.average)
    with again.saver(CheckpointConfig()):
        pass


def test_the_save_under_way_is_finished_and_none_is_skipped(toy: Toy) -> None:
    """A save at every step: each waits for the one before, and all are there."""
    assert toy.train(CheckpointConfig(keep_last=0, save_every=1), 12) == list(range(1, 13))


def test_a_snapshot_holds_the_step_it_was_asked_at(toy: Toy, tmp_path: Path) -> None:
    with toy.saver(CheckpointConfig()) as saver:
        toy.step(1)
        expected = toy.state()
        saver.save(1)
        for step in range(2, 6):
            toy.step(step)
    path = toy.run.checkpoints / "checkpoint_00000001"
    for stem, key in (("model", "model"), ("ema", "ema"), ("optimizer/exp_avg", "exp_avg")):
        for name, tensor in load_file(path / f"{stem}.safetensors").items():
            assert torch.equal(tensor, expected[f"{key}/{name}"])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_exported_precision_still_resumes_bit_for_bit(tmp_path: Path, precision: Any) -> None:
    first = Toy(tmp_path / "run")
    first.train(CheckpointConfig(save_precision=precision), 5)
    expected = first.state()
    saved = commit.verify(first.run.checkpoints / "checkpoint_00000005")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    for stem in ("model", "ema"):
        assert {t.dtype for t in load_file(saved.file(f"{stem}.safetensors")).values()} == {dtype}
    second = Toy(tmp_path / "run", seed=1)
    run = replace(second.run, checkpoint=saved)
    assert restore.restore(run, second.accelerator, second.average.shards, second.average) == 5
    found = second.state()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[k], expected[k]) for k in expected)


@pytest.mark.parametrize(
    ("saved", "exact", "exact_ema", "read"),
    [
        ("ema.safetensors", "master", "master_ema", "master_ema"),
        ("ema.safetensors", "master", None, "ema"),  # rounded, and nearer to the EMA than the exact weights
        ("model.safetensors", "master", None, "master"),
        ("model.safetensors", None, None, "model"),
    ],
)
def test_the_ema_is_restored_from_what_is_nearest_to_it(
    monkeypatch: pytest.MonkeyPatch, saved: str, exact: str | None, exact_ema: str | None, read: str
) -> None:
    numbers = {"master": 1.0, "master_ema": 2.0, "ema": 3.0, "model": 4.0}
    checkpoint: Any = SimpleNamespace(manifest={"files": {saved: {}}})
    shards: Any = SimpleNamespace(shard_of=lambda name, whole: whole)
    ema: Any = SimpleNamespace(averages={"weight": torch.zeros(())})
    monkeypatch.setattr(restore, "_weight_map", lambda checkpoint, stem, shards: {"weight": stem})
    monkeypatch.setattr(
        restore, "_read_tensors", lambda _, files: [(name, torch.tensor(numbers[file])) for name, file in files.items()]
    )
    given = [None if file is None else {"weight": file} for file in (exact, exact_ema)]
    restore._restore_ema(checkpoint, shards, ema, exact=given[0], exact_ema=given[1])
    assert float(ema.averages["weight"]) == numbers[read]


def saved_with(toy: Toy, write_extras: Callable[[Path], None]) -> Checkpoint:
    """Train a step and save it with these files. Nothing that is left out may lie in the checkpoint."""
    saver = toy.saver(CheckpointConfig())
    saver._write_extras = write_extras
    with saver:
        toy.step(1)
        saver.save(1)
    saved = commit.verify(toy.run.checkpoints / "checkpoint_00000001")
    assert commit.unlisted(saved) == []
    return saved


def extra_that(fault: str) -> Any:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        if fault == "raises":
            Path("/nope/x").read_text()
        elif fault == "disk":
            raise OSError(errno.ENOSPC, "No space left on device")
        elif fault == "disk of safetensors":
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        else:
            (folder / fault).write_text("")

    return {"signature": lambda: None, "value": "config.json"}.get(fault, write)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("raises", "No such file or directory: '/nope/x'"),
        ("signature", "takes 0 positional arguments but 1 was given"),
        ("value", "'str' object is not callable"),
        ("model.safetensors", "write_extras: it has written model.safetensors, which every save writes itself"),
        ("model-00001-of-00002.safetensors", "write_extras: it has written model-00001-of-00002.safetensors, which"),
        ("trainer_state.json", "write_extras: it has written trainer_state.json, which every save writes itself"),
    ],
)
def test_a_fault_in_write_extras_is_found_before_the_first_step(toy: Toy, fault: str, error: str) -> None:
    with pytest.raises(Exception, match=re.escape(error)) as raised:
        toy.saver(CheckpointConfig(), extra_that(fault))
    assert "write_extras" in "".join(traceback.format_exception(raised.value, chain=False))
    assert not list(toy.run.checkpoints.iterdir())


@pytest.mark.parametrize("fault", ["disk", "disk of safetensors"])
def test_a_full_disk_at_the_trial_of_write_extras_is_left_to_the_first_save(toy: Toy, fault: str) -> None:
    with toy.saver(CheckpointConfig(), extra_that(fault)) as saver:
        toy.step(1)
        with pytest.raises(CheckpointWriteError, match=r"no space left for a checkpoint .*; raised in write_extras"):
            saver.save(1)


def test_the_trial_of_write_extras_changes_no_random_number_and_leaves_no_file(toy: Toy) -> None:
    tried: list[Path] = []
    before = torch.get_rng_state()
    saver = toy.saver(CheckpointConfig(), lambda folder: tried.append(folder) or torch.rand(3))
    assert len(tried) == 1
    assert torch.equal(torch.get_rng_state(), before)
    with saver:
        assert not list(toy.run.checkpoints.iterdir())


def test_a_saver_needs_no_write_extras(toy: Toy) -> None:
    with toy.saver(CheckpointConfig(), None) as saver:
        toy.step(1)
        saver.save(1)
    assert "config.json" not in commit.verify(toy.run.checkpoints / "checkpoint_00000001").manifest["files"]


def test_an_extra_file_whose_name_no_manifest_can_hold_is_left_out(toy: Toy, caplog: pytest.LogCaptureFixture) -> None:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "at 3\u202fPM.png").write_text("")

    saved_with(toy, write)
    assert r"left out of the checkpoint: 'at 3\u202fPM.png'" in caplog.text


def test_a_pickle_among_the_extra_files_is_left_out_and_all_else_is_saved(
    toy: Toy, caplog: pytest.LogCaptureFixture
) -> None:
    def write(folder: Path) -> None:
        (folder / "assets").mkdir()
        (folder / "config.json").write_text("{}")
        save_file({"mean": torch.zeros(2)}, folder / "assets" / "norm.safetensors")
        torch.save({"mean": torch.zeros(2)}, folder / "assets" / "norm.pt")
        torch.save({"mean": torch.zeros(2)}, folder / "norm.state")
        (folder / "assets" / "tokenizer.bin").write_bytes(b"\x00\x01a table")

    saved = saved_with(toy, write)
    names = {*saved.manifest["files"]}
    assert {"config.json", "assets/norm.safetensors", "model.safetensors", "optimizer/index.json"} <= names
    assert "assets/tokenizer.bin" in names
    assert not names & {"assets/norm.pt", "norm.state"}
    remedy = (
        r"a pickle, and .*; in write_extras, write tensors with safetensors\.torch\.save_file, and the rest as JSON"
    )
    for name in ("assets/norm.pt", "norm.state"):
        assert re.search(rf"left out of the checkpoint: '{name}', {remedy}", caplog.text)


def test_optimizer_state_that_is_missing_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As of a parameter that was frozen when the checkpoint was written."""
    first = Toy(tmp_path / "run")
    first.train(CheckpointConfig(), 2)
    saved = commit.verify(first.run.checkpoints / "checkpoint_00000002")
    again = Toy(tmp_path / "run")
    run = replace(again.run, checkpoint=saved)
    restore.restore(run, again.accelerator, again.average.shards, again.average)
    assert "optimizer state is missing" not in caplog.text
    index = saved.json("optimizer/index.json")
    del index["state"]["exp_avg"]["0.bias"]
    atomic_files.write_json_in_place(saved.file("optimizer/index.json"), index)
    restore.restore(run, again.accelerator, again.average.shards, again.average)
    assert "optimizer state is missing (exp_avg of 0.bias) and starts afresh" in caplog.text


@pytest.mark.parametrize("saved_at", [1, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_a_parameter_without_gradient_in_some_steps_resumes_exactly(tmp_path: Path, saved_at: int, fused: bool) -> None:
    """AdamW corrects a bias by the steps of each parameter. A head that only some tasks use has fewer."""

    def build() -> Toy:
        toy = Toy(tmp_path / "run")
        if fused:
            adamw = FusedAdamW([{"params": list(toy.model.parameters())}], lr=0.1, betas=(0.9, 0.95), eps=1e-8)
            toy.optimizer = toy.accelerator.prepare(adamw)
            toy.average = Ema(EmaConfig(0.5), Shards(toy.model, toy.optimizer))
        return toy

    def step(toy: Toy, number: int) -> None:
        toy.model(torch.full((2, 6), float(number))).square().mean().backward()
        if number < 3:
            toy.model[0].bias.grad = None
        toy.optimizer.step()
        toy.optimizer.zero_grad()
        toy.average.update(number)

    first = build()
    with first.saver(CheckpointConfig()) as saver:
        for number in range(1, saved_at + 1):
            step(first, number)
        saver.save(saved_at)
    saved = commit.verify(first.run.checkpoints / f"checkpoint_{saved_at:08d}")
    steps = saved.json("optimizer/index.json").get("steps", {})
    assert steps == ({"0.bias": 1} if saved_at == 3 else {})
    again = build()
    again.run = replace(again.run, checkpoint=saved)
    restore.load_initial_weights(again.model, again.run)
    restore.restore(again.run, again.accelerator, again.average.shards, again.average)
    for number in range(saved_at + 1, 6):
        step(first, number)
        step(again, number)
    expected = first.state()
    assert all(torch.equal(found, expected[name]) for name, found in again.state().items())


def test_weights_only_is_said_and_cannot_be_resumed(toy: Toy) -> None:
    toy.train(CheckpointConfig(save_state=False), 3)
    path = toy.run.checkpoints / "checkpoint_00000003"
    saved = commit.verify(path)
    assert not saved.manifest["state"]
    assert sorted(saved.manifest["files"]) == ["config.json", "ema.safetensors", "model.safetensors"]
    found, reasons = commit.newest_verified(toy.run.checkpoints, with_state=True)
    assert found is None
    assert "--init_from" in reasons[0]


def test_the_best_by_a_metric_stay_beside_the_last(toy: Toy) -> None:
    figures = {2: 0.5, 4: 0.1, 6: float("nan"), 8: 0.3, 10: 0.9, 12: 0.8}
    config = CheckpointConfig(save_every=2, keep_last=1, keep_best=2, best_metric="loss")
    assert toy.train(config, 12, lambda step: {"loss": figures[step]}) == [4, 8, 12]


def test_pinned_and_every_kth_stay(toy: Toy) -> None:
    config = CheckpointConfig(save_every=1, keep_last=1, keep_every=5, pinned=("checkpoint_00000003",))
    assert toy.train(config, 12) == [3, 5, 10, 12]


def test_old_optimizer_state_goes_before_the_weights(toy: Toy) -> None:
    config = CheckpointConfig(save_every=2, keep_last=3, keep_state_last=1)
    assert toy.train(config, 8) == [4, 6, 8]
    found = [commit.verify(path) for _, path in manifest.committed(toy.run.checkpoints)]
    assert [c.manifest["state"] for c in found] == [False, False, True]
    assert [(c.path / "optimizer" / "index.json").exists() for c in found] == [False, False, True]
    assert [p for c in found for p in c.path.rglob("*") if p.is_dir()] == [found[-1].path / "optimizer"]


def test_without_a_background_the_save_is_committed_when_it_returns(toy: Toy) -> None:
    with toy.saver(CheckpointConfig(asynchronous=False)) as saver:
        toy.step(1)
        saver.save(1)
        assert [s for s, _ in manifest.committed(toy.run.checkpoints)] == [1]


def test_a_step_is_saved_once(toy: Toy) -> None:
    with toy.saver(CheckpointConfig()) as saver:
        toy.step(1)
        saver.save(1)
        saver.save(1)
    assert toy.committed == [1]


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_failed_write_is_heard_within_a_step(toy: Toy, monkeypatch: pytest.MonkeyPatch, policy: Any) -> None:
    monkeypatch.setenv("ACCEL_TRAIN_FAILPOINTS", "before_seal#1=EIO")
    config = CheckpointConfig(on_error=policy)
    with toy.saver(config) as saver:
        toy.step(1)
        saver.save(1)
        assert saver._writer is not None
        until(saver._writer._connection.poll)
        if policy == "stop":
            with pytest.raises(CheckpointWriteError, match=r"rank 0: .*Input/output error"):
                saver.boundary(1)
        else:
            saver.boundary(1)
            saver.save(2)
    assert toy.committed == ([] if policy == "stop" else [2])
    assert [p.name for p in toy.run.checkpoints.iterdir()] == ([] if policy == "stop" else ["checkpoint_00000002"])


def no_file_left(*_: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def fail_to_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first writer cannot start."""
    original = background._allocate
    failures = iter([no_file_left])
    monkeypatch.setattr(background, "_allocate", lambda *given: next(failures, original)(*given))


def fail_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first copy of the state fails."""
    monkeypatch.setenv(failpoints.VARIABLE, "after_snapshot#1=EMFILE")
    failpoints._passages.clear()


@pytest.mark.parametrize("fail", [fail_to_allocate, fail_to_copy])
@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_save_that_cannot_begin_is_an_error_of_a_save(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, policy: Any, fail: Any
) -> None:
    fail(monkeypatch)
    reason = r"rank 0: checkpoint in .*/checkpoints could not be written: OSError: \[Errno 24\] Too many open files"
    with toy.saver(CheckpointConfig(on_error=policy)) as saver:
        toy.step(1)
        if policy == "stop":
            with pytest.raises(CheckpointWriteError, match=reason):
                saver.save(1)
        else:
            assert not saver.save(1)
            assert re.search(rf"checkpoint of step 1 was not saved; training continues: {reason}", caplog.text)
        assert list(toy.run.checkpoints.iterdir()) == []
        saver.save(1)
    assert toy.committed == [1]
    commit.verify(toy.run.checkpoints / "checkpoint_00000001")


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_save_without_memory_keeps_its_own_error_and_advice(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, policy: Any
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with toy.saver(CheckpointConfig(on_error=policy)) as saver:
        toy.step(1)
        with monkeypatch.context() as patch:
            patch.setattr(Snapshot, "_shard", fail)
            if policy == "stop":
                # The loop records it, and adds advice.
                with pytest.raises(torch.OutOfMemoryError) as failed:
                    saver.save(1)
                assert "a snapshot needs room for up to" in failed.value.__notes__[0]
            else:
                saver.save(1)
                assert "training continues: rank 0: the save of step 1 ran out of device memory" in caplog.text
                assert "a snapshot needs room for up to" in caplog.text
        assert list(toy.run.checkpoints.iterdir()) == []
        saver.save(1)
    assert toy.committed == [1]


def test_a_save_before_the_first_step_leaves_the_next_its_state(toy: Toy) -> None:
    with toy.saver(CheckpointConfig(keep_last=0)) as saver:
        saver.save(0)
        toy.step(1)
        expected = toy.state()
        saver.save(1)
    first, second = (commit.verify(path) for _, path in manifest.committed(toy.run.checkpoints))
    assert not first.json("optimizer/index.json")["state"]
    assert set(second.json("optimizer/index.json")["state"]) == {"exp_avg", "exp_avg_sq"}
    for name, tensor in load_file(second.file("optimizer/exp_avg.safetensors")).items():
        assert torch.equal(tensor, expected[f"exp_avg/{name}"])


@pytest.mark.parametrize("processes", [1, 2])
def test_random_states_go_on_unless_the_number_of_processes_is_another(toy: Toy, processes: int) -> None:
    toy.train(CheckpointConfig(), 1)
    saved = commit.verify(toy.run.checkpoints / "checkpoint_00000001")
    state = saved.json("trainer_state.json")
    state["random_state"] *= processes
    atomic_files.write_json_in_place(saved.file("trainer_state.json"), state)
    torch.manual_seed(int.from_bytes(bytes.fromhex(state["random_state"][0]["torch"])[:4], "little") + 1)
    random.seed(1)
    np.random.seed(1)
    before = contents.random_state()
    restore.restore(replace(toy.run, checkpoint=saved), toy.accelerator, toy.average.shards, toy.average)
    goes_on = contents.random_state() == json.loads(json.dumps(state["random_state"][0]))
    stays = contents.random_state() == before
    assert (goes_on, stays) == (processes == 1, processes == 2)


def test_each_global_generator_goes_on_after_a_resume(toy: Toy) -> None:
    # Its second half is what the next draw returns.
    np.random.standard_normal()
    toy.train(CheckpointConfig(), 1)
    drawn = (np.random.standard_normal(3), np.random.random(700), random.random(), torch.rand(3))
    saved = commit.verify(toy.run.checkpoints / "checkpoint_00000001")
    run = replace(toy.run, checkpoint=saved)
    restore.restore(run, toy.accelerator, toy.average.shards, toy.average)
    again = (np.random.standard_normal(3), np.random.random(700), random.random(), torch.rand(3))
    for before, after in zip(drawn, again, strict=True):
        assert np.array_equal(before, after)


def test_another_generator_of_numpy_goes_on_or_is_left_out_with_a_notice(
    toy: Toy, caplog: pytest.LogCaptureFixture
) -> None:
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        toy.train(CheckpointConfig(), 1)
        drawn = np.random.random(5)
        saved = commit.verify(toy.run.checkpoints / "checkpoint_00000001")
        run = replace(toy.run, checkpoint=saved)
        restore.restore(run, toy.accelerator, toy.average.shards, toy.average)
        assert np.array_equal(np.random.random(5), drawn)
        with preserve_random_states():
            np.random.random(5)
    finally:
        np.random.set_bit_generator(usual)
    assert "numpy" not in caplog.text
    restore.restore(run, toy.accelerator, toy.average.shards, toy.average)
    assert "numpy's global generator is MT19937 and was PCG64 when the checkpoint was saved" in caplog.text


def test_a_manifest_tells_what_a_lost_run_json_told(toy: Toy) -> None:
    toy.run = replace(toy.run, saved={"experiment": {"global_batch_size": 4}, "resolved": {"decay_steps": 7}})
    toy.train(CheckpointConfig(), 1)
    saved = commit.verify(toy.run.checkpoints / "checkpoint_00000001").manifest
    assert (saved["run_id"], saved["experiment"], saved["resolved"]) == (
        "toy",
        {"global_batch_size": 4},
        {"decay_steps": 7},
    )


def test_the_last_save_never_fails_in_silence(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TRAIN_FAILPOINTS", "before_seal=EIO")
    with pytest.raises(CheckpointWriteError), toy.saver(CheckpointConfig(on_error="continue")) as saver:
        toy.step(1)
        saver.save(1)


def test_an_error_of_the_loop_is_not_hidden_and_the_save_before_it_stands(toy: Toy) -> None:
    def train() -> None:
        with toy.saver(CheckpointConfig()) as saver:
            toy.step(1)
            saver.save(1)
            raise KeyError("the user's own")

    with pytest.raises(KeyError):
        train()
    assert toy.committed == [1]


def test_metrics_in_the_manifest_are_valid_json(toy: Toy) -> None:
    toy.train(CheckpointConfig(), 1, lambda _: {"good": 1.5, "bad": float("nan")})
    text = (toy.run.checkpoints / "checkpoint_00000001" / "manifest.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["metrics"] == {"good": 1.5}


def test_a_short_grace_period_is_said(toy: Toy, caplog: pytest.LogCaptureFixture) -> None:
    toy.train(CheckpointConfig(), 1)
    saved = commit.verify(toy.run.checkpoints / "checkpoint_00000001")
    slow = replace(saved, manifest=dict(saved.manifest) | {"seconds": 45.0})
    warn_about_grace(slow, CheckpointConfig(grace_seconds=60), True)
    assert not caplog.records
    warn_about_grace(slow, CheckpointConfig(grace_seconds=30), True)
    assert "took 45.0 s and checkpoints.grace_seconds is 30" in caplog.text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"keep_best": 1}, r"keep_best: 1: has no effect without checkpoints\.best_metric"),
        ({"pinned": ("step_5",)}, r"pinned: 'step_5' is not a checkpoint name"),
    ],
)
def test_options_that_need_another(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        CheckpointConfig(**options)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, "bit-exact: the same layout as when it was saved\n"),
        ({"lr": 2.0}, "bit-exact: the same layout as when it was saved; from here on with another lr\n"),
        ({"max_steps": 9}, "bit-exact: the same layout as when it was saved\n"),
        ({"micro_batch_size": 1}, "not bit-exact: .*micro_batch_size 2 -> 1"),
        ({"model.loss_chunk": 1024}, "not bit-exact: .*model.loss_chunk None -> 1024"),
        ({"attention": "sdpa_math"}, "not bit-exact: .*attention None -> sdpa_math"),
        ({"compile.mode": "on"}, "not bit-exact: .*compile.mode None -> on"),
        ({"loader.bucket_by_length": True}, "not bit-exact: .*loader.bucket_by_length None -> True"),
    ],
)
def test_whether_a_resume_is_bit_exact_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, Any], says: str
) -> None:
    first = Toy(tmp_path / "run")
    experiment = {"global_batch_size": 4, "micro_batch_size": 2, "lr": 1.0, "max_steps": 8}
    first.run = replace(first.run, saved={"experiment": experiment})
    first.train(CheckpointConfig(), 2)
    second = Toy(tmp_path / "run")
    saved = commit.verify(first.run.checkpoints / "checkpoint_00000002")
    run = replace(second.run, checkpoint=saved, saved={"experiment": experiment | changed})
    with caplog.at_level("INFO"):
        restore.restore(run, second.accelerator, second.average.shards, second.average, ("max_steps",))
    assert re.search(f"(^|\n).*{says}", caplog.text)
    assert ("not bit-exact" in caplog.text) == says.startswith("not")


def resume_says(out: Path, caplog: pytest.LogCaptureFixture) -> str:
    again = Toy(out)
    saved = commit.verify(again.run.checkpoints / "checkpoint_00000001")
    with caplog.at_level("INFO"):
        restore.restore(replace(again.run, checkpoint=saved), again.accelerator, again.average.shards, again.average)
    return caplog.text


def test_a_resume_on_other_instructions_is_not_bit_exact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    Toy(tmp_path / "run").train(CheckpointConfig(), 1)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "AVX2")
    pattern = r"not bit-exact: .*\(cpu .*, AVX512 -> .*, AVX2, MKL_ENABLE_INSTRUCTIONS=AVX2\)"
    assert re.search(pattern, resume_says(tmp_path / "run", caplog))


def test_a_buffer_with_infinity_is_saved_loaded_and_exported(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    mask = torch.full((3, 3), float("-inf")).triu(1)
    toy.average.shards.module.register_buffer("mask", mask.clone())
    toy.average = Ema(EmaConfig(0.5), Shards(toy.model, toy.optimizer))
    toy.train(CheckpointConfig(), 1)
    saved = commit.verify(toy.run.checkpoints / "checkpoint_00000001")
    again = Toy(tmp_path / "run", seed=1)
    again.average.shards.module.register_buffer("mask", torch.zeros(3, 3))
    restore.load_initial_weights(again.average.shards.module, replace(again.run, checkpoint=saved))
    assert torch.equal(again.average.shards.module.get_buffer("mask"), mask)
    export.export(str(saved.path), str(tmp_path / "out"), precision="fp16")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["mask"], mask.half())


def test_a_buffer_of_two_modules_is_saved_once_and_one_that_can_be_computed_not_at_all(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    module = toy.average.shards.module
    shared = torch.ones(3)
    for layer in (module[0], module[2]):
        layer.register_buffer("shared", shared)
        layer.register_buffer("computed", torch.ones(2), persistent=False)
    assert persistent_buffers(module) == ["0.shared"]


class Stateful(torch.nn.Linear):
    def get_extra_state(self) -> object:
        return {"seen": 1}

    def set_extra_state(self, state: object) -> None: ...


def test_state_that_would_be_lost_is_refused_at_the_start(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    toy.average.shards.module.add_module("stateful", Stateful(1, 1).requires_grad_(False))
    with pytest.raises(UsageError, match=r"stateful has state of its own \(get_extra_state\)"):
        toy.saver(CheckpointConfig())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint16])
def test_a_dtype_that_no_checkpoint_holds_is_refused_at_the_start(tmp_path: Path, dtype: torch.dtype) -> None:
    toy = Toy(tmp_path / "run")
    toy.average.shards.module.register_buffer("rotations", torch.zeros(2, dtype=dtype))
    toy.average = Ema(EmaConfig(0.5), Shards(toy.model, toy.optimizer))
    with pytest.raises(UsageError, match=f"the model: rotations has the dtype {dtype}, which a checkpoint cannot hold"):
        toy.saver(CheckpointConfig())


@pytest.mark.parametrize(("dtype", "found"), [(torch.complex64, "complex"), (torch.float64, "trained in float64")])
def test_parameters_wider_than_fp32_are_refused_at_the_start(tmp_path: Path, dtype: torch.dtype, found: str) -> None:
    """A checkpoint would round them, and the resume from it would not be exact."""
    toy = Toy(tmp_path / "run")
    toy.average.shards.module.register_parameter("modes", nn.Parameter(torch.ones(2, dtype=dtype)))
    toy.average = Ema(EmaConfig(0.0), Shards(toy.model, toy.optimizer))
    with pytest.raises(UsageError, match=f"the model: modes is {found}"):
        toy.saver(CheckpointConfig())
    # Before anything is built from them.
    with pytest.raises(UsageError, match=f"the model: modes is {found}"):
        preparation._trained_in_fp32(toy.average.shards.module)
    # Frozen ones are saved in their own type.
    preparation._trained_in_fp32(nn.Linear(1, 1, dtype=torch.float64).requires_grad_(False))


def test_weights_alone_can_be_evaluated(tmp_path: Path) -> None:
    first = Toy(tmp_path / "run")
    first.train(CheckpointConfig(save_state=False), 2)
    saved = commit.verify(first.run.checkpoints / "checkpoint_00000002")
    assert not (saved.path / "optimizer").exists()
    second = Toy(tmp_path / "run", seed=1)
    restore.restore(replace(second.run, checkpoint=saved), second.accelerator, second.average.shards, second.average)
    assert all(torch.equal(t, second.average.averages[n]) for n, t in first.average.averages.items())


def test_the_loss_scale_is_saved_and_restored(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    toy.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=5)
    scaler = toy.accelerator.scaler
    scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**10, "_growth_tracker": 2})
    scaler.scale(torch.ones(()))
    toy.train(CheckpointConfig(), 1)
    saved = commit.verify(toy.run.checkpoints / "checkpoint_00000001")
    assert saved.json("trainer_state.json")["loss_scale"] == {"scale": 2.0**10, "steps": 2}
    again = Toy(tmp_path / "run", seed=1)
    again.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=5)
    restore.restore(replace(again.run, checkpoint=saved), again.accelerator, again.average.shards, again.average)
    restored = again.accelerator.scaler
    restored.scale(torch.ones(()))
    assert restored.get_scale() == 2.0**10
    assert restored._growth_tracker is not None
    assert int(restored._growth_tracker) == 2


@pytest.mark.parametrize("foreign", [None, "{}", "[", '{"name": "another tool", "files": []}'])
def test_initial_weights_may_lie_beside_a_foreign_manifest(foreign: str | None, tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    if foreign is not None:
        (tmp_path / "manifest.json").write_text(foreign)
    run = Run(tmp_path / "run", "x", None, "", {}, initial_weights=tmp_path)
    restore.load_initial_weights(other, run)
    assert torch.equal(other.weight, model.weight)

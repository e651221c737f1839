"""The average of the weights against its formula, and switched off: no memory, and everything else continues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accel_train.checkpoints import restore
from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.store import commit
from accel_train.training.ema import Ema, EmaConfig, decay_at
from accel_train.training.shards import Shards
from tests.checkpoints.test_saver import Toy

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path / "run")


def off(toy: Toy) -> Toy:
    toy.average = Ema(EmaConfig(0.0), toy.average.shards)
    return toy


def test_the_average_is_that_of_the_formula(toy: Toy) -> None:
    view = toy.average.shards
    expected = {n: view.master(n).double() for n in view.parameters}
    for step in range(20):
        toy.step(step)
        decay = decay_at(0.5, step)
        expected = {n: decay * e + (1 - decay) * view.master(n).double() for n, e in expected.items()}
    for name, tensor in toy.average.averages.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-5, atol=1e-7)
    trained = {n: view.master(n).clone() for n in view.parameters}
    with toy.average.applied():
        assert all(torch.equal(view.master(n), t) for n, t in toy.average.averages.items())
    assert all(torch.equal(view.master(n), t) for n, t in trained.items())


def test_the_early_average_forgets_the_random_start() -> None:
    """The warm-up of diffusers' ``EMAModel``: a tenth of the start is left after the first step."""
    assert [decay_at(0.9, step) for step in (0, 8, 10, 79, 80, 81, 1000)] == [0.1, 0.5, 0.55, 80 / 89, 0.9, 0.9, 0.9]


def test_an_error_waits_for_nobody(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the weights come back in a collective, the process with the error would be alone in it."""

    def fails() -> None:
        with toy.average.applied():
            raise RuntimeError("of this process alone")

    toy.step(0)
    view = toy.average.shards
    trained = {n: view.master(n).clone() for n in view.parameters}
    with pytest.raises(RuntimeError, match="alone"):
        fails()
    assert all(torch.equal(view.master(n), t) for n, t in trained.items())
    toy.average.announce(1)
    toy.average.update(1)
    monkeypatch.setattr(Shards, "shows_alone", False)
    with pytest.raises(RuntimeError, match="alone"):
        fails()
    assert not all(torch.equal(view.master(n), t) for n, t in trained.items())
    with pytest.raises(RuntimeError, match="step 2 would train the EMA weights"):
        toy.average.announce(1)


def test_a_forgotten_update_is_named_before_it_is_evaluated_or_saved(toy: Toy, tmp_path: Path) -> None:
    """Only where steps are announced, as ``prepared.window`` does; in every step, so also after a resume."""
    toy.step(0)
    with toy.average.applied():  # nobody announces
        pass
    for step in (1, 2):
        toy.average.announce(step)
        says = rf"step {step + 1}: the loop did not call prepared\.ema\.update.*--ema\.decay 0"
        with pytest.raises(RuntimeError, match=says), toy.average.applied():
            pass
        with toy.saver(CheckpointConfig()) as saver, pytest.raises(RuntimeError, match=says):
            saver.boundary(step)
        toy.step(step)
        toy.average.require_update()
    off(toy).average.announce(3)
    toy.average.require_update()


@pytest.mark.parametrize("decay", [0.5, 0.0])
def test_an_update_of_another_step_or_a_second_one_is_refused(toy: Toy, decay: float) -> None:
    average = toy.average if decay else off(toy).average
    average.update(7)  # nobody announces
    average.announce(1)
    with pytest.raises(
        RuntimeError, match=r"ema\.update\(0\) was called instead of .*update\(1\), .* once in every step"
    ):
        average.update(0)
    average.update(1)
    with pytest.raises(RuntimeError, match=r"ema\.update\(1\) was called a second time in a step"):
        average.update(1)
    average.announce(2)
    average.update(2)


def test_switched_off_it_keeps_no_tensor_and_the_average_is_the_weights(toy: Toy) -> None:
    off(toy).step(0)
    view = toy.average.shards
    trained = {n: view.master(n).clone() for n in view.parameters}
    assert not toy.average.averages
    with toy.average.applied():
        assert all(torch.equal(view.master(n), t) for n, t in trained.items())
    assert not toy.average.averages


def test_switched_off_a_run_saves_and_restores(toy: Toy, tmp_path: Path) -> None:
    assert off(toy).train(CheckpointConfig(), 2) == [2]
    saved = commit.verify(toy.run.checkpoints / "checkpoint_00000002")
    assert not list(saved.path.glob("ema*"))
    other = off(Toy(tmp_path / "other", seed=1))
    restore.restore(replace(other.run, checkpoint=saved), other.accelerator, other.average.shards, other.average)
    assert not other.average.averages
    found = other.state()
    assert all(torch.equal(t, found[n]) for n, t in toy.state().items())


def test_switched_off_on_resume_the_weights_stay_the_trained_ones(toy: Toy, tmp_path: Path) -> None:
    """``--allow ema.decay``: the average that the checkpoint has is not read, nor taken for the weights."""
    toy.train(CheckpointConfig(), 2)
    saved = commit.verify(toy.run.checkpoints / "checkpoint_00000002")
    assert list(saved.path.glob("ema*"))
    other = off(Toy(tmp_path / "other", seed=1))
    restore.restore(replace(other.run, checkpoint=saved), other.accelerator, other.average.shards, other.average)
    view = other.average.shards
    assert all(torch.equal(view.master(n), toy.average.shards.master(n)) for n in view.parameters)
    assert not other.average.averages

"""The residual's stage as a whole: what it leaves as it was, what it learns, and a run that is cut at its beginning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from accel_train.domains.pde import operator_learning
from accel_train.domains.pde.losses import predict
from accel_train.domains.pde.options import ObjectiveConfig
from accel_train.domains.pde.residual import refinement
from accel_train.domains.pde.shape import PdeModelConfig, PdeTransformerConfig, TaskShape
from accel_train.domains.pde.transformer import PdeTransformer
from accel_train.store import failpoints
from accel_train.training.optimizers import OptimizerConfig, build_optimizer, set_frozen, set_learning_rate
from tests.distributed.launching import Finished, Layout, run_recipe

SINGLE = Layout("single", 1, "pde")
FLAGS = (
    "--max_steps 16 --objective.residual_from 10 --model.residual_depth 1 --objective.residual_steps 2 "
    "--checkpoints.save_every 5 --checkpoints.keep_last 0 --optimizer.weight_decay 0.5"
).split()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run_recipe(SINGLE, tmp_path_factory.mktemp("whole") / "run", *FLAGS)


def of_residual(tensors: dict[str, Tensor], own: bool) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if name.startswith("residual.") == own}


@pytest.mark.distributed
def test_each_stage_moves_its_own_weights_alone(whole: Finished) -> None:
    """Though weight decay and moments act in every step on all that is not kept still."""
    early, boundary, end = (whole.tensors(step, "model") for step in (5, 10, 16))
    for name, value in of_residual(boundary, own=True).items():
        assert torch.equal(value, early[name]), name
    for name, value in of_residual(end, own=False).items():
        assert torch.equal(value, boundary[name]), name
    moved = [not torch.equal(value, end[name]) for name, value in of_residual(boundary, own=True).items()]
    assert sum(moved) > 0.8 * len(moved)  # what is still zero has no decay to move it
    before, after = (
        sum(float((of[name] - end[name]).square().sum()) for name in of_residual(end, own=False))
        for of in (whole.tensors(10, "ema"), whole.tensors(16, "ema"))
    )
    assert after < 0.5 * before  # the average arrives at what is kept still


@pytest.mark.distributed
def test_stages_have_their_terms_and_figures(whole: Finished) -> None:
    lines = whole.train_lines()
    terms = {step: {k for k in line if k.startswith("loss_")} for step, line in lines.items()}
    assert all(("loss_residual" in found) == (step > 10) for step, found in terms.items())
    assert all(terms[step] == {"loss_residual"} for step in range(11, 17))
    assert "loss_prediction" in terms[10]
    assert all(lines[step]["lr"] > 0 for step in range(12, 17))  # that of what learns, not of what keeps still
    figures = json.loads((whole.directory / "report" / "evaluation.json").read_text())
    for task in ("advection", "darcy"):
        gain = 1 - figures[f"{task}_refined_nrmse"] / figures[f"{task}_nrmse"]
        assert figures[f"{task}_refined_gain"] == pytest.approx(gain, rel=1e-6, abs=1e-9)
        assert figures[f"{task}_refined_spectral_error"] != figures[f"{task}_spectral_error"]
    assert ", refined 0." in whole.output


@pytest.mark.distributed
def test_a_resume_crosses_into_the_residuals_stage_bit_for_bit(whole: Finished, tmp_path: Path) -> None:
    """Killed when step 5 was committed; from there on through the operator's stage into the residual's."""
    extra = {failpoints.VARIABLE: "after_commit#1"}
    killed = run_recipe(SINGLE, tmp_path / "run", *FLAGS, ok=False, extra=extra)
    assert killed.code != 0
    resumed = run_recipe(SINGLE, tmp_path / "run", *FLAGS, "--resume", "must")
    assert "at step 5" in resumed.output
    assert [x.hex() for x in resumed.losses()] == [x.hex() for x in whole.losses()]
    for stem in ("model", "ema", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
        expected, found = whole.tensors(16, stem), resumed.tensors(16, stem)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[k], found[k]) for k in expected), stem


def test_half_of_a_residual_is_refused_at_the_start(tmp_path: Path) -> None:
    run = run_recipe(SINGLE, tmp_path / "run", "--model.residual_depth", "0", ok=False)
    assert run.code == 2
    assert "objective.residual_from 10 with" in run.output
    assert not (tmp_path / "run" / "run.json").exists()


# ------------------------------------------------------------------------------------------------------ what it learns
TASK = TaskShape("moved", 1, 1, (1, 32), periodic=True)
SHAPE = PdeTransformerConfig(
    (TASK,), PdeModelConfig(width=32, depth=1, heads=2, decoder_width=16, octaves=3, residual_depth=1)
)
STEPS = 240


def batch_of(step: int, size: int = 16) -> dict[str, Tensor]:
    """Waves of three frequencies, and the same a quarter of a domain further on. Held out: negative steps."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.arange(32) / 32
    amplitude, phase = torch.randn(size, 3, generator=generator), torch.rand(size, 3, generator=generator)
    waves = torch.sin(2 * torch.pi * (torch.arange(1, 4)[:, None] * x + phase[..., None]))  # (B, 3, 32)
    fields = (amplitude[..., None] * waves).sum(1)[:, None, None] / 1.2
    index = torch.arange(size)
    numbers = {"parameters": torch.zeros(size, 1), "dt": torch.full((size,), 0.1)}
    return numbers | {"input": fields, "target": fields.roll(8, -1), "occurrence": index, "position": index}


def loss_of(model: PdeTransformer, step: int, stages: ObjectiveConfig) -> Tensor:
    batch = batch_of(step)
    if operator_learning.stage_of_step(stages, step) == "operator":
        found = model(batch["input"], None, batch["parameters"], batch["dt"], 0).prediction.unflatten(-1, TASK.grid)
        return (found - batch["target"]).square().mean()
    fields, size, correct = predict(model, batch, 0, TASK.grid)
    assert size is not None
    draws = refinement.draw_noise(batch, 0, step, 16, stages.residual_steps)
    return refinement.losses(correct, batch["target"] - fields, size, draws["time"], draws["noise"]).mean()


def nrmse(model: PdeTransformer, steps: int | None) -> float:
    """Held out; None: not refined."""
    batch = batch_of(-1, 64)
    fields, size, correct = predict(model, batch, 0, TASK.grid)
    if steps is not None:
        assert size is not None
        fields = refinement.refine(correct, fields, size, steps, 0, torch.arange(64))
    return float((fields - batch["target"]).square().mean().sqrt() / batch["target"].square().mean().sqrt())


@pytest.mark.parametrize(("residual_steps", "part"), [pytest.param(1, 0.6, marks=pytest.mark.slow), (2, 0.9)])
def test_what_can_be_known_of_a_residual_is_learned(residual_steps: int, part: float) -> None:
    """An operator that stopped early misses much that the input tells. Weights, average and figures are the seed's."""
    torch.manual_seed(0)
    model = PdeTransformer(SHAPE)
    stages = ObjectiveConfig(residual_from=60, residual_steps=residual_steps)
    parts = operator_learning.freezable(stages, model)
    optimizer, _ = build_optimizer(model, OptimizerConfig(lr=3e-3, weight_decay=0.1), torch.device("cpu"), parts)
    kept, plain = dict[str, Tensor](), 0.0
    for step in range(STEPS):
        set_frozen(optimizer, operator_learning.frozen_parts(stages, step))
        place, length = operator_learning.place_in_schedule(stages, step, STEPS)
        set_learning_rate(optimizer, min(1.0, place / 5) * (1 - place / length))
        if step == stages.residual_from:
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            plain = nrmse(model, None)
            assert nrmse(model, 1) == plain  # it has learned nothing yet
        loss_of(model, step, stages).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert nrmse(model, None) == plain  # to the last bit
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, kept[name])}
    assert changed == {name for name in kept if name.startswith("residual.")}
    refined = nrmse(model, residual_steps)
    print(f"plain {plain:.4f}, refined in {residual_steps} steps {refined:.4f}")
    assert 0.05 < plain < 0.9
    assert refined < part * plain
    batch = batch_of(-1, 64)
    fields, size, _ = predict(model, batch, 0, TASK.grid)
    assert size is not None
    missed = (batch["target"] - fields).square().mean().sqrt()
    assert float(size.exp()) == pytest.approx(float(missed), rel=0.25)

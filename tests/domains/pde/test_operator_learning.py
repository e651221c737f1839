"""Stages, terms and points of the latent operator's objective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accel_train import rng
from accel_train.config import UsageError
from accel_train.domains.pde import operator_learning
from accel_train.domains.pde.losses import TERMS
from accel_train.domains.pde.operator_learning import BOUNDARY_POINTS
from accel_train.domains.pde.options import EvaluationConfig, ObjectiveConfig
from accel_train.domains.pde.shape import PdeModelConfig, PdeTransformerConfig, TaskShape
from accel_train.domains.pde.tokens import FieldGrid, grid_coordinates
from accel_train.domains.pde.transformer import PdeTransformer
from accel_train.training.schedules import ScheduleConfig, learning_rate_factor
from tests.trained import ADVECTION


def test_the_first_stage_has_the_inverse_terms_alone() -> None:
    config = ObjectiveConfig(autoencode_steps=3, inverse_weight=0.1, spectral_weight=1.0, latent_weight=0.5)
    first = operator_learning.coefficients(config, 2, conserved=True, boundary="periodic")
    assert set(first) == set(TERMS)
    assert {k: v for k, v in first.items() if v} == {"reconstruction": 1.0, "reencoding": 0.1}
    second = operator_learning.coefficients(config, 3, conserved=True, boundary="periodic")
    assert second["prediction"] == 1.0
    assert operator_learning.active_terms(second) == {
        "prediction",
        "latent",
        "reconstruction",
        "reencoding",
        "spectral",
    }


@pytest.mark.parametrize(
    ("terms", "says"),
    [
        ({**TERMS, "energy": TERMS["latent"]}, r"'energy': it is in TERMS .*losses\.py but not in coefficients of"),
        ({name: TERMS[name] for name in TERMS if name != "latent"}, r"'latent': it is in coefficients .* not in TERMS"),
    ],
)
def test_a_term_named_in_one_place_only_is_refused(
    terms: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_learning, "TERMS", terms)
    with pytest.raises(UsageError, match=says):
        operator_learning.objective_of_step(ObjectiveConfig(), 0, 0, ADVECTION)


def test_inverse_terms_pause_with_a_coefficient_of_zero() -> None:
    config = ObjectiveConfig(inverse_every=4)
    on = [bool(operator_learning.coefficients(config, s, False, "dirichlet")["reconstruction"]) for s in range(9)]
    assert on == [True, False, False, False] * 2 + [True]


def test_a_task_has_the_terms_of_its_equation() -> None:
    config = ObjectiveConfig(boundary_weight=1.0, conservation_weight=2.0)
    fixed = operator_learning.coefficients(config, 0, conserved=False, boundary="dirichlet")
    assert (fixed["boundary"], fixed["conservation"]) == (1.0, 0.0)
    round_ = operator_learning.coefficients(config, 0, conserved=True, boundary="periodic")
    assert (round_["boundary"], round_["conservation"]) == (0.0, 2.0)


TASKS = (TaskShape("advection", 1, 1, (1, 16)), TaskShape("darcy", 2, 1, (8, 8), same_fields=False))
MODEL = PdeModelConfig(width=16, depth=1, heads=2, decoder_width=8, residual_depth=1)


def model_of(tasks: tuple[TaskShape, ...] = TASKS) -> PdeTransformer:
    return PdeTransformer(PdeTransformerConfig(tasks, MODEL))


def test_a_frozen_autoencoder_has_no_inverse_terms() -> None:
    config = ObjectiveConfig(autoencode_steps=2, freeze_autoencoder=True)
    found = operator_learning.freezable(config, model_of())
    assert found == {"autoencoder": ["encoders", "target_encoders", "decoder"]}
    assert [operator_learning.frozen_parts(config, step) for step in (1, 2)] == [[], ["autoencoder"]]
    assert operator_learning.coefficients(config, 2, False, "periodic")["reconstruction"] == 0
    assert operator_learning.freezable(ObjectiveConfig(), model_of()) == {}


def test_what_has_no_parameters_is_not_frozen() -> None:
    """Input and target of the same fields have one encoder."""
    config = ObjectiveConfig(autoencode_steps=2, freeze_autoencoder=True)
    assert operator_learning.freezable(config, model_of(TASKS[:1])) == {"autoencoder": ["encoders", "decoder"]}


def test_a_residuals_stage_trains_it_alone() -> None:
    config = ObjectiveConfig(autoencode_steps=2, residual_from=5, spectral_weight=1.0, boundary_weight=1.0)
    stages = [operator_learning.stage_of_step(config, step) for step in range(7)]
    assert stages == ["autoencode"] * 2 + ["operator"] * 3 + ["residual"] * 2
    before, after = (operator_learning.coefficients(config, step, True, "dirichlet") for step in (4, 5))
    assert set(before) == set(after) == set(TERMS)
    assert operator_learning.active_terms(before) == {
        "prediction",
        "reconstruction",
        "reencoding",
        "spectral",
        "boundary",
    }
    assert {k: v for k, v in after.items() if v} == {"residual": 1.0}
    assert [operator_learning.frozen_parts(config, s) for s in (1, 4, 5)] == [
        ["residual"],
        ["residual"],
        ["autoencoder", "operator"],
    ]
    config = ObjectiveConfig(autoencode_steps=2, residual_from=5, freeze_autoencoder=True)
    assert operator_learning.frozen_parts(config, 4) == ["autoencoder", "residual"]


def test_with_a_residual_every_parameter_belongs_to_a_part() -> None:
    model = model_of()
    parts = operator_learning.freezable(ObjectiveConfig(residual_from=5), model)
    assert parts["residual"] == ["residual"]
    assert parts["autoencoder"] == ["encoders", "target_encoders", "decoder"]
    prefixes = [prefix for part in parts.values() for prefix in part]
    assert sorted(prefixes) == sorted({name.split(".")[0] for name, _ in model.named_parameters()})


def test_the_learning_rate_begins_anew_with_the_residual() -> None:
    config = ObjectiveConfig(residual_from=6)
    places = [operator_learning.place_in_schedule(config, step, 10) for step in range(12)]
    assert places == [(n, 6) for n in range(6)] + [(n, 4) for n in range(6)]
    schedule = ScheduleConfig(kind="cosine", warmup_steps=1)
    rates = [learning_rate_factor(schedule, *place) for place in places]
    assert rates[:6] == [learning_rate_factor(schedule, n, 6) for n in range(6)]
    assert (rates[6], rates[7], rates[10]) == (0.0, 1.0, 0.0)
    assert operator_learning.place_in_schedule(ObjectiveConfig(), 7, 10) == (7, 10)
    assert operator_learning.place_in_schedule(config, 3, 4) == (3, 4)  # the schedule's own end comes first


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"spectral_weight": 0.1, "queries": 64}, r"objective.spectral_weight 0.1: .*objective.queries 64"),
        ({"conservation_weight": 0.1, "queries": 64}, r"objective.conservation_weight 0.1"),
        ({"freeze_autoencoder": True}, r"autoencode_steps 0: .*random initial values"),
        ({"residual_steps": 4}, r"residual_steps: 4: has no effect without objective.residual_from"),
        ({"autoencode_steps": 5, "residual_from": 5}, r"residual_from 5: must be more than autoencode_steps 5"),
        ({"query_sampling": "uniform"}, r"has no effect without objective.queries"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ObjectiveConfig(**options)


def test_an_evaluation_is_due_at_the_end() -> None:
    assert EvaluationConfig(every=10).due(20, 100)
    assert [EvaluationConfig().due(step, 100) for step in (50, 100)] == [False, True]


def batch_of(grid: tuple[int, int], size: int = 3) -> dict[str, Tensor]:
    """Fields that say where they are: channel k of sample i at point p is 1000 i + 100 k + p."""
    points = torch.arange(grid[0] * grid[1]).view(1, 1, *grid)
    fields = 1000 * torch.arange(size).view(-1, 1, 1, 1) + 100 * torch.arange(2).view(1, -1, 1, 1) + points
    return {"input": fields.float(), "target": fields.float() + 0.5, "occurrence": torch.arange(size)}


def draws_of(batch: dict[str, Tensor]) -> Any:
    return lambda stream, *shape: rng.uniform(rng.sample_keys(0, stream, 7, batch["occurrence"]), shape)


@pytest.mark.parametrize("sampling", ["stratified", "uniform"])
@pytest.mark.parametrize("points", [(4, 5), (20, 1), (1, 20)])
def test_points_are_asked_where_the_values_are_from(points: tuple[int, int], sampling: Any) -> None:
    batch, grid = batch_of(points), FieldGrid(points, (1, 1)).coordinates()
    config = ObjectiveConfig(queries=7, query_sampling=sampling)
    made = operator_learning.add_queries(config, batch, draws_of(batch), {"prediction"})
    assert made["queries"].shape == (3, 7, grid.shape[1])
    for i in range(3):
        for q in range(7):
            place = int(made["query_input"][i, 0, q]) % 100
            assert torch.equal(made["queries"][i, q], grid[place])
            assert made["query_target"][i, 1, q] == batch["target"].flatten(2)[i, 1, place]


def test_boundary_points_follow_the_others() -> None:
    batch = batch_of((4, 5))
    made = operator_learning.add_queries(ObjectiveConfig(), batch, draws_of(batch), {"boundary"})
    assert made["queries"].shape == (3, 20 + BOUNDARY_POINTS, 2)
    assert torch.equal(made["queries"][1, :20], grid_coordinates((4, 5)))
    edge = made["queries"][:, 20:]
    assert bool(((edge == 0) | (edge == 1)).any(-1).all())
    assert made["query_target"].shape == (3, 2, 20)


def test_a_small_grid_is_decoded_whole() -> None:
    batch = batch_of((4, 5))
    made = operator_learning.add_queries(ObjectiveConfig(queries=20), batch, draws_of(batch), set())
    assert "queries" not in made
    assert torch.equal(made["query_target"], batch["target"].flatten(2))


def test_points_do_not_depend_on_how_the_batch_is_cut() -> None:
    batch = batch_of((4, 5))
    config = ObjectiveConfig(queries=5)
    whole = operator_learning.add_queries(config, batch, draws_of(batch), {"boundary"})
    one = {name: values[2:] for name, values in batch.items()}
    alone = operator_learning.add_queries(config, one, draws_of(one), {"boundary"})
    assert torch.equal(alone["queries"], whole["queries"][2:])


def test_samples_are_mirrored_by_their_draws() -> None:
    fields = torch.arange(12.0).view(1, 1, 3, 4).repeat(3, 1, 1, 1)
    draws = torch.tensor([[0.1, 0.9], [0.9, 0.1], [0.9, 0.9]])
    made = operator_learning.mirror(fields, draws, 0.5)
    assert torch.equal(made[0], fields[0].flip(1))
    assert torch.equal(made[1], fields[1].flip(2))
    assert torch.equal(made[2], fields[2])

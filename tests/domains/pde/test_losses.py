"""The recipe's own loss terms: what each trains of the model, and that a term with coefficient 0 is a zero."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_train.config import UsageError
from accel_train.domains.pde import checks, operator_learning, options
from accel_train.domains.pde.data.prepare import prepare_pde
from accel_train.domains.pde.data.rows import FieldData
from accel_train.domains.pde.fields import Scale
from accel_train.domains.pde.losses import TERMS, Forward, forward_of, parts_of
from accel_train.domains.pde.transformer import PdeTransformer
from accel_train.options.loading import load_config
from recipes import pde

SMALL = (
    "--model.width 16 --model.depth 1 --model.heads 2 --model.decoder_width 8 --model.patch_2d 2 --data.workers 0 "
    "--data.train_samples 16 --data.heldout_samples 4 --data.resolution_1d 16 --data.resolution_2d 8 "
    "--data.snapshots 3 --objective.autoencode_steps 2 --objective.queries null --objective.latent_weight 1 "
    "--objective.spectral_weight 1 --objective.boundary_weight 1 --objective.conservation_weight 1"
).split()
FREEZE = ("--objective.freeze_autoencoder", "true")
RESIDUAL = ("--objective.residual_from", "4", "--model.residual_depth", "1")
STAGES = {"autoencode": 0, "operator": 2, "residual": 4}
OPERATOR = {"conditioning", "operator"}
TRAINS = {
    ("autoencode", "reconstruction"): {"encoders", "target_encoders", "decoder"},
    ("autoencode", "reencoding"): {"target_encoders", "decoder"},
    ("operator", "prediction"): {"encoders", *OPERATOR, "decoder"},
    ("operator", "latent"): {"encoders", *OPERATOR},
    ("operator", "reconstruction"): {"encoders", "target_encoders", "decoder"},
    ("operator", "reencoding"): {"target_encoders", "decoder"},
    ("operator", "spectral"): {"encoders", *OPERATOR, "decoder"},
    ("operator", "boundary"): {"encoders", *OPERATOR, "decoder"},
    ("operator", "conservation"): {"encoders", *OPERATOR, "decoder"},
    ("residual", "residual"): {"residual"},
}
"""The table of docs/pde.md. Where input and target are the same fields, one encoder serves both."""
PAGE = Path(pde.__file__).parents[1] / "docs" / "pde.md"
HAS = {"advection": set(TERMS) - {"boundary"}, "darcy": set(TERMS) - {"conservation"}}


def opened(tmp_path: Path, *flags: str) -> tuple[pde.Config, FieldData, PdeTransformer]:
    given = ["pde_demo", *SMALL, "--data.cache_dir", str(tmp_path), *flags]
    config = load_config(pde.Config, given, presets=Path(pde.__file__).parent / "presets").config
    data = prepare_pde(config.data)
    torch.manual_seed(0)
    model = PdeTransformer(operator_learning.model_shape(config.model, data.tasks))
    with torch.no_grad():
        for parameter in model.parameters():  # off its start, where gates are zero
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return config, data, model


def sums_of(config: pde.Config, data: FieldData, model: PdeTransformer, number: int, step: int) -> dict[str, Any]:
    task = data.tasks[number]
    learned = operator_learning.objective_of_step(config.objective, step, number, task)
    batch = data.training[task.name].batch([0, 1, 2]) | {
        "weight": torch.ones(3), "occurrence": torch.arange(3), "sample": torch.arange(3), "position": torch.arange(3)
    }  # fmt: skip
    inputs, weight = pde.corrupt(config, batch, step, learned)
    assert float(weight.sum()) == 3
    found = pde.loss_sums(model, inputs, learned)
    assert set(found) == set(TERMS) == set(learned.coefficients)
    assert all(not found[term].any() for term in set(TERMS) - learned.terms)
    return {term: found[term].sum() for term in learned.terms}


def test_the_tables_here_and_on_the_page_have_every_term() -> None:
    here = {term for _, term in TRAINS}
    assert here == set(TERMS), "give each term of losses.TERMS a row in TRAINS above, and its coefficient in SMALL"
    section = PAGE.read_text().partition("## Loss terms")[2].partition("\n## ")[0]
    rows = set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE))
    assert rows == set(TERMS), "give each term of losses.TERMS a row in the table of docs/pde.md, Loss terms"


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("number", [0, 1], ids=["advection", "darcy"])
def test_each_term_trains_what_the_table_says_and_nothing_else(
    tmp_path: Path, number: int, stage: str, freeze: bool
) -> None:
    flags = (*(FREEZE if freeze else ()), *(RESIDUAL if stage == "residual" else ()))
    config, data, model = opened(tmp_path, *flags)
    task = data.tasks[number]
    sums = sums_of(config, data, model, number, STAGES[stage])
    expected = {term for where, term in TRAINS if where == stage and term in HAS[task.name]}
    if freeze and stage == "operator":
        expected -= {"reconstruction", "reencoding"}
    assert set(sums) == expected
    for term, loss in sums.items():
        model.zero_grad()
        loss.backward(retain_graph=True)
        wanted = set(TRAINS[stage, term])
        if freeze and stage == "operator":
            wanted -= {"encoders"}
        if task.has_time and "target_encoders" in wanted:
            wanted = wanted - {"target_encoders"} | {"encoders"}
        reached = {
            name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0
        }
        assert reached == wanted, term


@pytest.mark.parametrize(
    ("tasks", "flags", "words"),
    [
        ("darcy", ("--objective.conservation_weight", "1"), "objective.conservation_weight 1.0: has no effect"),
        ("advection", ("--objective.boundary_weight", "1"), "boundary_weight 1.0: has no effect, .* is 0 at the edge"),
        ("advection", ("--objective.flip", "0.5"), "objective.flip 0.5: has no effect"),
        ("darcy", ("--evaluation.trajectories", "5"), "evaluation.trajectories 5: has no effect, .* has time"),
        ("darcy", ("--evaluation.conditioning.beam", "3"), "evaluation.conditioning.beam 3: has no effect"),
    ],
)
def test_options_that_no_task_has_a_use_for_are_refused(tasks: str, flags: tuple[str, ...], words: str) -> None:
    given = ["pde_demo", "--data.tasks", tasks, "--task_weights", "null", "--objective.queries", "null", *flags]
    config = load_config(pde.Config, given, presets=Path(pde.__file__).parent / "presets").config

    class Task:
        name, grid = tasks, (1, 16)
        conserved, boundary, has_time = tasks == "advection", "periodic", tasks == "advection"

    if tasks == "darcy":
        Task.boundary = "dirichlet"
    with pytest.raises(UsageError, match=words):
        checks.check_tasks(config, [Task()], {tasks: 1}, TERMS)
    config = load_config(pde.Config, given[:7], presets=Path(pde.__file__).parent / "presets").config
    checks.check_tasks(config, [Task()], {tasks: 1}, TERMS)  # trajectories of the preset are for any tasks


def test_inverse_terms_that_a_frozen_autoencoder_does_not_have_are_refused() -> None:
    with pytest.raises(UsageError, match=r"inverse_every: 4: has no effect with objective.freeze_autoencoder: true"):
        options.ObjectiveConfig(autoencode_steps=5, freeze_autoencoder=True, inverse_every=4)


@pytest.mark.parametrize(("term", "moved"), [("latent", "predicted_latent"), ("reencoding", "reencoded")])
def test_the_latent_of_the_target_is_not_drawn_to_the_others(term: str, moved: str) -> None:
    """The encoder could lower such a loss by making all latents alike."""
    target, other = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(2))
    forward: Any = SimpleNamespace(output=SimpleNamespace(**{moved: other, "target_latent": target}))
    TERMS[term].losses(forward).sum().backward()
    assert other.grad is not None
    assert target.grad is None


def test_what_is_conserved_is_compared_in_units_of_input_and_target() -> None:
    scales = Scale((1.0,), (2.0,)), Scale((3.0,), (0.5,))
    task: Any = SimpleNamespace(common_scales=lambda: scales)
    physical = 3 + torch.rand(2, 1, 8)
    given, target = (scale.normalise(physical, 1) for scale in scales)
    output = SimpleNamespace(prediction=target)
    same = Forward({"query_input": given, "query_target": target}, task, output)
    assert TERMS["conservation"].losses(same).tolist() == pytest.approx([0, 0], abs=1e-6)


def test_a_conserved_integral_is_that_of_a_bf16_prediction_in_fp32() -> None:
    """bf16 would round the mean of the fields by a quarter of their deviation."""
    scale = Scale((1.3,), (0.01,))
    task: Any = SimpleNamespace(common_scales=lambda: (scale, scale))
    values = torch.randint(-2, 3, (2, 1, 8)).float()  # exact in bf16
    output = SimpleNamespace(prediction=values.bfloat16())
    forward = Forward({"query_input": values, "query_target": values}, task, output)
    assert TERMS["conservation"].losses(forward).tolist() == pytest.approx([0, 0], abs=1e-6)


def test_a_boundary_is_zero_in_physical_units_of_the_target() -> None:
    task: Any = SimpleNamespace(input=Scale((1.0,), (2.0,)), target=Scale((3.0,), (0.5,)))
    inside = torch.rand(2, 1, 5)
    target = {"query_target": torch.zeros(2, 1, 5)}
    zero = task.target.normalise(torch.zeros(2, 1, 4), 1)
    for edge, expected in ((zero, 0.0), (zero + 2, 4.0)):
        output: Any = SimpleNamespace(prediction=torch.cat([inside, edge], -1))
        assert TERMS["boundary"].losses(Forward(target, task, output)).tolist() == pytest.approx([expected] * 2)


def test_the_model_is_given_all_inputs_of_its_forward() -> None:
    asked: dict[str, Any] = {}
    inputs = {name: torch.rand(2) for name in ("input", "target", "parameters", "dt", "queries", "keep")}
    task: Any = SimpleNamespace(grid=(4, 4))

    def model(*given: Any, **named: Any) -> None:
        asked.update(named, given=given)

    parts = parts_of(["prediction"], train_encoder=True)
    forward_of(model, inputs, 3, task, ["prediction"], parts)
    assert asked["given"][0] is inputs["input"]
    assert asked["given"][1] is None  # no term needs the target
    assert asked["given"][2:] == (inputs["parameters"], inputs["dt"], 3)
    assert (asked["queries"], asked["keep"], asked["parts"]) == (inputs["queries"], inputs["keep"], parts)

"""What training, sharding and saving rely on in the PDE operator: whose gradients come from which loss, above all."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from accel_train.config import UsageError
from accel_train.domains.pde.flops import correction_flops_per_sample, flops_per_sample, training_flops_per_sample
from accel_train.domains.pde.losses import predict, stepper
from accel_train.domains.pde.residual.network import ResidualGuess
from accel_train.domains.pde.shape import PdeModelConfig, PdeTransformerConfig, TaskShape
from accel_train.domains.pde.transformer import ALL_PARTS, PREDICTION, Parts, PdeOutput, PdeTransformer
from accel_train.speed.activation_checkpointing import apply_activation_checkpointing
from accel_train.speed.attention.kernels import build_attention
from accel_train.speed.attention.selection import apply_attention
from accel_train.speed.blocks import blocks_of
from accel_train.training.parameters import kinds
from tests import zygote
from tests.speed.checkpointing import MODES, config_of

TASKS = (
    TaskShape("advection", 1, 1, (1, 16), parameters=1, periodic=True),
    TaskShape("darcy", 2, 1, (8, 8), same_fields=False),
    TaskShape("flow", 2, 2, (4, 8), parameters=2, periodic=True),
)
MODEL = PdeModelConfig(width=16, depth=2, heads=2, decoder_width=8, patch_2d=2, octaves=3)
SMALL = PdeTransformerConfig(TASKS, MODEL)
MODELS = {
    "stack": MODEL,
    "unet": replace(MODEL, operator="pdet_unet", depth=4, depths=(1, 1, 1)),
    "channel-separated, other latents": replace(
        MODEL, attention="channel_separated", group_width=8, latent_width=24, max_tokens=2
    ),
    "without cross-attention": replace(MODEL, decoder_layers=0),
}
REFINING = {
    "stack": replace(MODEL, residual_depth=2),
    "other latents, merged patches": replace(MODEL, residual_depth=1, latent_width=24, max_tokens=2),
}
SMALL_REFINING = replace(SMALL, model=REFINING["stack"])
STAGES = {
    "all": ALL_PARTS,
    "autoencoding": Parts(operator=False, prediction=False),
    "autoencoding, no inverse loss": Parts(reencoding=False, operator=False, prediction=False),
    "operator": Parts(reconstruction=False, reencoding=False, train_encoder=False),
    "latents alone": Parts(reconstruction=False, reencoding=False, prediction=False, train_encoder=False),
}


def build(config: PdeTransformerConfig = SMALL, noise: float = 0.2) -> PdeTransformer:
    """A model off its starting point, where gates are zero and the operator does nothing."""
    torch.manual_seed(0)
    model = PdeTransformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=noise)
    return model


def batch(task: int, size: int = 4, queries: int | None = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    shape = TASKS[task]
    dimensions = 1 if shape.grid[0] == 1 else 2
    return {
        "input": torch.randn(size, shape.input_channels, *shape.grid, generator=generator),
        "target": torch.randn(size, shape.target_channels, *shape.grid, generator=generator),
        "parameters": torch.randn(size, 2, generator=generator),
        "dt": torch.rand(size, generator=generator),
        "task": task,
        "queries": None if queries is None else torch.rand(size, queries, dimensions, generator=generator),
    }


def given(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def guessed(task: int, size: int = 4) -> dict[str, Any]:
    """The same batch, with a guess of the residual in place of the input."""
    given = batch(task, size)
    generator = torch.Generator().manual_seed(2)
    both = (torch.randn(given["target"].shape, generator=generator) for _ in range(2))
    fields = ResidualGuess(next(both), torch.rand(size, generator=generator), next(both), given["input"])
    return given | {"input": fields, "target": None}


def present(output: PdeOutput) -> dict[str, Tensor]:
    return {name: value for name, value in output._asdict().items() if value is not None}


# -------------------------------------------------------------------------------------------------------- gradients
LOSSES: dict[str, Callable[[PdeOutput, dict[str, Any]], Tensor]] = {
    "input reconstruction": lambda o, b: given(o.input_reconstruction).sub(b["input"].flatten(2)).square().mean(),
    "target reconstruction": lambda o, b: given(o.target_reconstruction).sub(b["target"].flatten(2)).square().mean(),
    "inverse of the decoder": lambda o, _: given(o.reencoded).sub(given(o.target_latent).detach()).square().mean(),
    "latent": lambda o, _: given(o.predicted_latent).sub(given(o.target_latent).detach()).square().mean(),
    "prediction": lambda o, b: given(o.prediction).sub(b["target"].flatten(2)).square().mean(),
}
GROUPS = ("encoders", "target_encoders", "conditioning", "operator", "decoder")
OPERATOR = {"conditioning", "operator"}
REACHED: dict[tuple[str, bool], set[str]] = {
    ("input reconstruction", True): {"encoders", "decoder"},
    ("target reconstruction", True): {"target_encoders", "decoder"},
    ("inverse of the decoder", True): {"target_encoders", "decoder"},
    ("latent", True): {"encoders", *OPERATOR},
    ("latent", False): OPERATOR,
    ("prediction", True): {"encoders", *OPERATOR, "decoder"},
    ("prediction", False): {*OPERATOR, "decoder"},
}
"""What each loss trains, by whether the operator's losses may train the encoder."""


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("task", range(len(TASKS)))
@pytest.mark.parametrize(("loss", "train_encoder"), REACHED)
def test_a_loss_trains_what_it_is_meant_to_and_nothing_else(
    loss: str, train_encoder: bool, task: int, model: str
) -> None:
    net, inputs = build(replace(SMALL, model=MODELS[model])), batch(task)
    output = net(**inputs, parts=Parts(train_encoder=train_encoder))
    LOSSES[loss](output, inputs).backward()
    expected = set(REACHED[loss, train_encoder])
    if TASKS[task].same_fields and "target_encoders" in expected:
        expected = expected - {"target_encoders"} | {"encoders"}
    for group in GROUPS:
        for name, parameter in net.get_submodule(group).named_parameters():
            arrived = bool(given(parameter.grad).abs().max() > 0)
            assert arrived == (group in expected and is_read(f"{group}.{name}", task, loss)), f"{group}.{name}"


@pytest.mark.parametrize("model", REFINING)
@pytest.mark.parametrize("task", range(len(TASKS)))
def test_a_residual_trains_its_own_network_alone(task: int, model: str) -> None:
    net = build(replace(SMALL, model=REFINING[model]))
    output = net(**guessed(task))
    assert set(present(output)) == {"residual", "residual_size"}
    given(output.residual).square().mean().backward()
    for name, parameter in net.named_parameters():
        path = name.split(".")
        own = (
            path[0] == "residual"
            and path[1] != "size"
            and (path[1] not in ("encoders", "heads") or path[2] == str(task))
        )
        assert bool(given(parameter.grad).abs().max() > 0) == own, name
    net.zero_grad()
    given(net(**guessed(task)).residual_size).sum().backward()
    counts = [shape.target_channels for shape in TASKS]
    for name, parameter in net.named_parameters():
        gradient = given(parameter.grad)
        if name == "residual.size.deviation":
            assert (gradient != 0).tolist() == [n == task for n, count in enumerate(counts) for _ in range(count)]
        else:
            assert gradient.abs().max() == 0, name


@pytest.mark.parametrize("loss", LOSSES)
def test_no_other_loss_trains_the_residual(loss: str) -> None:
    net, inputs = build(SMALL_REFINING), batch(1)
    LOSSES[loss](net(**inputs), inputs).backward()
    assert all(given(p.grad).abs().max() == 0 for p in given_module(net.residual).parameters())


def given_module(x: nn.Module | None) -> nn.Module:
    assert x is not None
    return x


def is_read(name: str, task: int, loss: str) -> bool:
    """Whether a parameter of a part that ran is one that this task and this loss read: shared, or the task's own."""
    group, *path = name.split(".")
    if group in ("encoders", "target_encoders"):
        return int(path[0]) == task
    if path[0] in ("points", "places", "parameters_of"):
        return int(path[1]) == task
    if path[0] == "heads":
        of_input = int(path[2]) >= TASKS[task].target_channels  # only where input and target are different fields
        return int(path[1]) == task and of_input == (loss == "input reconstruction" and not TASKS[task].same_fields)
    return True


@pytest.mark.parametrize("config", [SMALL, SMALL_REFINING], ids=["", "refining"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("task", range(len(TASKS)))
@pytest.mark.parametrize("with_target", [True, False])
def test_every_parameter_takes_part_by_whichever_output(
    stage: str, task: int, with_target: bool, config: PdeTransformerConfig
) -> None:
    """DDP and ZeRO wait for the gradient of each, and an optimizer treats none and zero differently."""
    net, inputs = build(config), batch(task, queries=3)
    inputs["target"] = inputs["target"] if with_target else None
    all_take_part(net, net(**inputs, parts=STAGES[stage]))


@pytest.mark.parametrize("model", REFINING)
@pytest.mark.parametrize("task", range(len(TASKS)))
def test_every_parameter_takes_part_in_correcting(task: int, model: str) -> None:
    net = build(replace(SMALL, model=REFINING[model]))
    all_take_part(net, net(**guessed(task)))


def all_take_part(net: PdeTransformer, output: PdeOutput) -> None:
    for name, value in present(output).items():
        net.zero_grad()
        value.square().sum().backward(retain_graph=True)
        missing = [n for n, p in net.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
        assert not missing, f"{name}: {missing}"


@pytest.mark.parametrize("stage", [*STAGES, "correcting"])
@pytest.mark.parametrize("task", range(len(TASKS)))
def test_taking_part_changes_no_output(stage: str, task: int) -> None:
    net, inputs = build(SMALL_REFINING), guessed(task) if stage == "correcting" else batch(task)
    parts = STAGES.get(stage, ALL_PARTS)
    output = net(**inputs, parts=parts)
    with torch.no_grad():
        plain = net(**inputs, parts=parts)
    assert present(output).keys() == present(plain).keys()
    assert all(torch.equal(value, present(plain)[name]) for name, value in present(output).items())


def test_a_stop_gradient_stands_before_the_encoding_that_is_to_be_found_again() -> None:
    net, inputs = build(), batch(1)
    inputs["target"].requires_grad_()
    output = net(**inputs)
    (gradient,) = torch.autograd.grad(given(output.reencoded).square().sum(), inputs["target"], retain_graph=True)
    assert gradient.abs().max() == 0
    (gradient,) = torch.autograd.grad(given(output.target_reconstruction).square().sum(), inputs["target"])
    assert gradient.abs().max() > 0


# ---------------------------------------------------------------------------------------------------------- outputs
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("task", range(len(TASKS)))
def test_shapes(task: int, model: str) -> None:
    config, shape = replace(SMALL, model=MODELS[model]), TASKS[task]
    net, inputs = build(config), batch(task)
    tokens = int(torch.tensor(config.grid(shape).cells).prod())
    latent = (4, tokens, config.model.latent)
    points = shape.grid[0] * shape.grid[1]
    wanted = [latent, latent, (4, shape.input_channels, points), (4, shape.target_channels, points), latent, latent]
    found = [tuple(x.shape) for x in present(net(**inputs)).values()]
    assert found == [*wanted, (4, shape.target_channels, points)]
    alone = net(**batch(task, queries=5), parts=PREDICTION)
    assert given(alone.prediction).shape == (4, shape.target_channels, 5)
    assert set(present(alone)) == {"latent", "target_latent", "predicted_latent", "prediction"}


@pytest.mark.parametrize("model", REFINING)
@pytest.mark.parametrize("task", range(len(TASKS)))
def test_a_residual_is_of_the_grid_and_its_size_of_the_channels(task: int, model: str) -> None:
    net, shape = build(replace(SMALL, model=REFINING[model])), TASKS[task]
    corrected = net(**guessed(task))
    assert given(corrected.residual).shape == (4, shape.target_channels, *shape.grid)
    assert given(corrected.residual_size).shape == (shape.target_channels,)
    assert torch.equal(given(corrected.residual_size), given(net(**batch(task)).residual_size))
    alone = {k: v[3:4] if isinstance(v, Tensor) else v for k, v in guessed(task).items()}
    alone["input"] = ResidualGuess(*(x[3:4] for x in guessed(task)["input"]))
    torch.testing.assert_close(net(**alone).residual, corrected.residual[3:4], rtol=1e-4, atol=1e-5)


def test_a_residual_leaves_the_rest_of_a_model_as_it_would_be() -> None:
    torch.manual_seed(0)
    plain = PdeTransformer(SMALL)
    torch.manual_seed(0)
    refining = PdeTransformer(SMALL_REFINING)
    others = {n: v for n, v in refining.state_dict().items() if not n.startswith("residual.")}
    assert others.keys() == plain.state_dict().keys()
    assert all(torch.equal(v, plain.state_dict()[n]) for n, v in others.items())
    output = refining(**guessed(1))
    assert given(output.residual).abs().max() == 0  # nothing is added before it has learned
    torch.testing.assert_close(given(output.residual_size), torch.tensor([-3.0]))


@pytest.mark.parametrize("name", ["guess", "time", "prediction", "input", "parameters", "dt"])
def test_every_input_reaches_the_residual(name: str) -> None:
    net, inputs = build(SMALL_REFINING), guessed(0)
    first = given(net(**inputs).residual)
    fields: ResidualGuess = inputs["input"]
    if name in fields._fields:
        changed = {"input": fields._replace(**{name: getattr(fields, name).flip(0)})}
    else:
        changed = {name: inputs[name].flip(0)}
    assert not torch.allclose(first, given(net(**inputs | changed).residual), atol=1e-3)


def test_a_model_without_a_residual_corrects_none() -> None:
    with pytest.raises(UsageError, match="residual_depth 0: there is no network that corrects"):
        build()(**guessed(0))


@pytest.mark.parametrize("task", range(len(TASKS)))
def test_a_prediction_is_that_of_the_model_and_can_be_corrected(task: int) -> None:
    net, inputs, grid = build(SMALL_REFINING), batch(task), TASKS[task].grid
    fields, size, correct = predict(net, inputs, task, grid)
    with torch.no_grad():
        whole = net(**inputs | {"target": None}, parts=PREDICTION)
    assert torch.equal(fields, given(whole.prediction).unflatten(-1, grid))
    assert torch.equal(given(size), given(whole.residual_size))
    assert not fields.requires_grad
    x: ResidualGuess = guessed(task)["input"]
    found, learned = correct(x.guess, x.time)
    assert found.requires_grad
    assert learned.requires_grad
    expected = net(**inputs | {"input": x._replace(prediction=fields), "target": None})
    assert torch.equal(found, expected.residual)
    assert predict(build(), inputs, task, grid).log_size is None


def test_a_step_of_a_rollout_is_a_prediction() -> None:
    net, inputs = build(SMALL_REFINING), batch(0)
    inputs["dt"] = torch.full((4,), 0.3)
    step = stepper(net, inputs["parameters"], 0.3, 0, TASKS[0].grid)
    assert torch.equal(step(inputs["input"]), predict(net, inputs, 0, TASKS[0].grid).fields)


@pytest.mark.parametrize("task", range(len(TASKS)))
def test_query_points_on_the_grid_are_the_grid(task: int) -> None:
    net, inputs = build(), batch(task)
    whole = net(**inputs)
    points = net.grids[task].coordinates()
    index = torch.randint(0, len(points), (4, 6), generator=torch.Generator().manual_seed(0))
    some = net(**inputs | {"queries": points[index]})
    for name in ("input_reconstruction", "target_reconstruction", "prediction"):
        expected = getattr(whole, name)
        expected = expected.gather(2, index[:, None].expand(-1, expected.shape[1], -1))
        torch.testing.assert_close(getattr(some, name), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(given(some.reencoded), given(whole.reencoded))  # always on the whole grid


@pytest.mark.parametrize("task", range(len(TASKS)))
def test_outputs_are_what_their_names_say(task: int) -> None:
    """By the parts themselves, called one by one."""
    net, inputs, shape = build(), batch(task), TASKS[task]
    output = net(**inputs)
    encode_target = net.encoders[task] if shape.same_fields else net.target_encoders[task]
    points = net.grids[task].coordinates()[None]
    torch.testing.assert_close(output.latent, net.encoders[task](inputs["input"]))
    torch.testing.assert_close(given(output.target_latent), encode_target(inputs["target"]))
    conditioning = net.conditioning(inputs["dt"], inputs["parameters"], task)
    advanced = output.latent + net.operator(output.latent, conditioning, task, None)
    torch.testing.assert_close(given(output.predicted_latent), advanced)
    first = shape.target_channels
    inputs_heads = slice(0, first) if shape.same_fields else slice(first, None)
    for name, latent, heads in (
        ("input_reconstruction", output.latent, inputs_heads),
        ("target_reconstruction", given(output.target_latent), slice(0, first)),
        ("prediction", advanced, slice(0, first)),
    ):
        torch.testing.assert_close(getattr(output, name), net.decoder(latent, points, task)[:, heads])
    fields = net.decoder(given(output.target_latent), points, task)[:, :first].unflatten(-1, shape.grid)
    torch.testing.assert_close(given(output.reencoded), encode_target(fields))


@pytest.mark.parametrize("model", MODELS)
def test_the_operator_starts_as_persistence(model: str) -> None:
    torch.manual_seed(0)
    output = PdeTransformer(replace(SMALL, model=MODELS[model]))(**batch(0))
    torch.testing.assert_close(given(output.predicted_latent), output.latent, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["input", "parameters", "dt"])
@pytest.mark.parametrize("model", MODELS)
def test_every_input_reaches_the_prediction(name: str, model: str) -> None:
    net, inputs = build(replace(SMALL, model=MODELS[model])), batch(0)
    first = given(net(**inputs).prediction)
    second = given(net(**inputs | {name: inputs[name].flip(0)}).prediction)
    assert not torch.allclose(first, second, atol=1e-3)


def test_a_task_reads_its_own_parameters_alone() -> None:
    net, inputs = build(), batch(0)
    wider = torch.cat((inputs["parameters"][:, :1], torch.full((4, 3), torch.nan)), dim=1)
    assert torch.equal(given(net(**inputs).prediction), given(net(**inputs | {"parameters": wider}).prediction))


def test_the_operator_knows_places_even_if_the_latents_do_not() -> None:
    """Stage one does not need them in the latents, and attention without them could not shift a field."""
    net = build()
    same = torch.ones(1, 4, 16).repeat(2, 1, 1)
    advanced = net.operator(same, torch.zeros(2, 16), 0, None)
    assert (advanced[0, 0] - advanced[0, 1]).abs().max() > 1e-2


@pytest.mark.parametrize("model", MODELS)
def test_a_sample_does_not_depend_on_its_batch(model: str) -> None:
    net, inputs = build(replace(SMALL, model=MODELS[model])), batch(0, 5, queries=4)
    whole = present(net(**inputs))
    alone = {k: v[3:4] if isinstance(v, Tensor) else v for k, v in inputs.items()}
    for name, value in present(net(**alone)).items():
        torch.testing.assert_close(value, whole[name][3:4], rtol=1e-4, atol=1e-5)


def test_training_draws_nothing() -> None:
    net, inputs = build().train(), batch(0)
    state = torch.get_rng_state()
    first, second = net(**inputs), net(**inputs)
    assert torch.equal(given(first.prediction), given(second.prediction))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("model", ["stack", "unet"])
def test_drop_path_leaves_out_blocks_of_its_samples(model: str) -> None:
    net, inputs = build(replace(SMALL, model=MODELS[model])), batch(0)
    blocks = len(net.operator.blocks)
    assert blocks == sum(net.config.model.stages)
    whole = given(net(**inputs).prediction)
    torch.testing.assert_close(given(net(**inputs, keep=torch.ones(4, blocks)).prediction), whole)
    results = [whole]
    for left_out in range(blocks):  # every column of the mask is one block
        keep = torch.ones(4, blocks)
        keep[2, left_out] = 0
        result = given(net(**inputs, keep=keep).prediction)
        torch.testing.assert_close(result[[0, 1, 3]], whole[[0, 1, 3]])
        assert all(not torch.allclose(result[2], other[2], atol=1e-4) for other in results)
        results.append(result)


def test_initialisation_is_a_function_of_the_seed() -> None:
    states: list[dict[str, Tensor]] = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        states.append(PdeTransformer(SMALL).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["encoders.0.project.weight"], states[2]["encoders.0.project.weight"])


@pytest.mark.parametrize("cast_weights", [False, True])
@pytest.mark.parametrize("model", ["stack", "unet", "channel-separated, other latents"])
def test_bf16(cast_weights: bool, model: str) -> None:
    """fp32 fields and times meet bf16 weights (DeepSpeed) or autocast; the conditioning stays fp32."""
    net, inputs = build(replace(SMALL, model=MODELS[model]), noise=0.02), batch(1)
    expected = present(net(**inputs))
    if cast_weights:
        net.bfloat16()
    seen: list[torch.dtype] = []
    net.conditioning.register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=not cast_weights):
        output = present(net(**inputs))
    assert set(seen) == {torch.float32}
    for name, reference in expected.items():
        assert (output[name].float() - reference).norm() < 0.03 * reference.norm(), name
    torch.stack([value.float().sum() for value in output.values()]).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("cast_weights", [False, True])
def test_correcting_in_bf16(cast_weights: bool) -> None:
    net, inputs = build(SMALL_REFINING, noise=0.02), guessed(1)
    expected = present(net(**inputs))
    if cast_weights:
        net.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=not cast_weights):
        output = present(net(**inputs))
    assert output["residual_size"].dtype == torch.float32
    for name, reference in expected.items():
        assert (output[name].float() - reference).norm() < 0.03 * reference.norm(), name
    torch.stack([value.float().sum() for value in output.values()]).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


# ---------------------------------------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    "change",
    [
        {"operator": "pdet_unet", "depth": 4},
        {"depth": 3},
        {"heads": 4},
        {"attention": "channel_separated", "group_width": 8},
        {"ffn_ratio": 2},
        {"qk_norm": False},
        {"latent_width": 8},
        {"patch_1d": 2},
        {"max_tokens": 2},
        {"stem_width": 4},
        {"octaves": 2},
        {"decoder_width": 16},
        {"decoder_layers": 2},
    ],
)
def test_every_option_of_the_architecture_is_used(change: dict[str, Any]) -> None:
    base, changed = build(), build(replace(SMALL, model=replace(MODEL, **change)))
    own = changed.state_dict()
    same = {n: v for n, v in base.state_dict().items() if n in own and own[n].shape == v.shape}
    changed.load_state_dict(same, strict=False)
    first, second = given(base(**batch(0)).prediction), given(changed(**batch(0)).prediction)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 18, "heads": 4}, ("width 18", "8")),
        ({"width": 2, "heads": 4}, ("width 2", "8")),
        ({"decoder_width": 12}, ("decoder_width 12", "head size 8")),
        ({"attention": "channel_separated", "group_width": 12}, ("group_width 12", "head size 8", "16")),
        ({"attention": "channel_separated", "group_width": 32}, ("group_width 32", "head size 8", "16")),
        ({"operator": "pdet_unet", "depth": 4, "depths": (2, 2)}, ("depths (2, 2)", "odd")),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        replace(MODEL, **change)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"depth": 4, "depths": (1, 1, 1)}, ("depths: 1 1 1", "has no effect with model.operator: pdet_stack")),
        ({"operator": "pdet_unet"}, ("depth: 2", "has no effect with model.operator: pdet_unet")),
        ({"group_width": 8}, ("group_width: 8", "has no effect with model.attention: standard")),
    ],
)
def test_options_that_are_not_read_are_refused_in_a_run_and_not_in_a_checkpoint(
    change: dict[str, Any], words: tuple[str, ...]
) -> None:
    config = replace(MODEL, **change)
    with pytest.raises(UsageError) as caught:
        config.refuse_unread()
    assert all(word in str(caught.value) for word in words)
    MODEL.refuse_unread()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"patch_1d": 3}, ("model.patch_1d: 3", "1 x 16", "advection", "Set --model.patch_1d to")),
        ({"patch_2d": 3}, ("model.patch_2d: 3", "8 x 8", "darcy")),
        ({"patch_2d": 8}, ("model.patch_2d: 8", "4 x 8", "flow")),
        (
            {"patch_1d": 16, "patch_2d": 4, "max_tokens": 0},
            ("model.max_tokens: 0", "1 x 1 tokens", "Raise --model.max_tokens"),
        ),
    ],
)
def test_grids_that_cannot_be_cut_are_refused(change: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        PdeTransformerConfig(TASKS, replace(MODEL, **change))
    assert all(word in str(caught.value) for word in words)


def test_a_task_cannot_keep_fields_that_are_not_as_many() -> None:
    with pytest.raises(UsageError, match="same_fields with 2 input and 1 target"):
        TaskShape("darcy", 2, 1, (8, 8))


def test_tokens_are_merged_along_the_longer_side() -> None:
    config = PdeTransformerConfig((TaskShape("wide", 1, 1, (8, 32)),), replace(MODEL, patch_2d=2, max_tokens=16))
    assert config.grid(config.tasks[0]).cells == (4, 4)
    assert config.grid(config.tasks[0]).merged == (1, 4)


# ---------------------------------------------------------------------------------------------- speed and memory
@pytest.mark.parametrize(
    ("model", "task", "stage", "queries"),
    [
        ("stack", 0, "all", 3),
        ("stack", 1, "autoencoding", None),
        ("stack", 2, "latents alone", None),
        ("unet", 0, "operator", 3),
        ("unet", 1, "all", None),
        ("unet", 2, "autoencoding, no inverse loss", 3),
        ("channel-separated, other latents", 0, "all", None),
        ("channel-separated, other latents", 1, "operator", None),
        ("channel-separated, other latents", 2, "all", 3),
        ("without cross-attention", 1, "all", 3),
    ],
)
def test_flops_equal_the_counter(model: str, task: int, stage: str, queries: int | None) -> None:
    config = replace(SMALL, model=MODELS[model])
    net, counts = PdeTransformer(config), list[int]()
    for size in (2, 5):
        # The counter does not know the CPU's flash kernel; the math backend is made of products that it counts.
        with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            net(**batch(task, size, queries), parts=STAGES[stage])
        counts.append(counter.get_total_flops())
    # What is the same for all samples (places, points of the grid) is in both counts.
    assert counts[1] - counts[0] == 3 * flops_per_sample(config, task, queries, STAGES[stage])


@pytest.mark.parametrize("model", REFINING)
@pytest.mark.parametrize("task", range(len(TASKS)))
def test_flops_of_the_residuals_stage_equal_the_counter(task: int, model: str) -> None:
    """A prediction without gradient and without the target, then what it misses with both ways."""
    config = replace(SMALL, model=REFINING[model])
    net, counts = PdeTransformer(config), list[list[int]]()
    for size in (2, 5):
        row: list[int] = []
        for inputs in (batch(task, size) | {"target": None}, guessed(task, size)):
            with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
                net(**inputs, parts=PREDICTION)
            row.append(counter.get_total_flops())
        counts.append(row)
    predicting, correcting = ((b - a) // 3 for a, b in zip(*counts, strict=True))
    assert correcting == correction_flops_per_sample(config, task)
    assert training_flops_per_sample(config, task, 3, None) == predicting + 3 * correcting


@pytest.mark.parametrize(("queries", "some"), [(None, None), (3, 3), (16, None), (99, None)])
def test_flops_of_training_are_three_forwards(queries: int | None, some: int | None) -> None:
    expected = 3 * flops_per_sample(SMALL, 0, some, PREDICTION)
    assert training_flops_per_sample(SMALL, 0, queries, PREDICTION) == expected


@pytest.mark.parametrize("model", MODELS)
def test_attention_is_replaced_everywhere_and_described_rightly(model: str) -> None:
    net, inputs = build(replace(SMALL, model=MODELS[model])), batch(1)
    before = given(net(**inputs).prediction)
    chosen, seen = build_attention("sdpa_math"), list[tuple[int, ...]]()

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        assert mask is None
        seen.append(tuple(q.shape))
        return chosen.kernel(q, k, v, mask)

    apply_attention(net, replace(chosen, kernel=kernel))
    torch.testing.assert_close(given(net(**inputs, parts=PREDICTION).prediction), before, rtol=1e-4, atol=1e-5)
    shape = net.config.model
    assert len(seen) == sum(shape.stages) + shape.decoder_layers
    needs = net.config.attention_needs(torch.device("cpu"), "bf16", 4)
    tokens = [int(torch.tensor(grid.cells).prod()) for grid in net.grids]
    assert needs.length == max(tokens)
    assert seen[0] == (needs.batch, needs.heads, tokens[1], needs.head_size)
    assert {s[-1] for s in seen} == {needs.head_size}
    assert (needs.mask, needs.dtype) == (False, torch.bfloat16)


@pytest.mark.parametrize("mode", MODES[1:])
def test_activation_checkpointing_changes_no_gradient(mode: Any) -> None:
    gradients: list[list[Tensor]] = []
    for config in (config_of("none"), config_of(mode)):
        net = build()
        assert len(blocks_of(net)) == 3
        apply_activation_checkpointing(net, config)
        output = net(**batch(0), keep=torch.tensor([[1.0, 0.0], [1.0, 2.0], [1.0, 2.0], [1.0, 0.0]]))
        torch.stack([value.square().sum() for value in present(output).values()]).sum().backward()
        gradients.append([given(p.grad) for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_activation_checkpointing_and_muon_know_the_residuals_blocks() -> None:
    net = build(SMALL_REFINING)
    assert len(blocks_of(net)) == 5
    found = kinds(net, muon=True)
    names = {n: found[id(p)] for n, p in net.named_parameters() if n.startswith("residual.")}
    layers = ("qkv", "out", "ffn.expand", "ffn.project")
    assert {n for n, kind in names.items() if kind == "muon"} == {
        f"residual.blocks.{i}.{layer}.weight" for i in (0, 1) for layer in layers
    }
    assert names["residual.size.deviation"] == "no_decay"


def test_muon_takes_the_matrices_of_the_blocks_alone() -> None:
    net = build()
    found = kinds(net, muon=True)
    muon = {name for name, parameter in net.named_parameters() if found[id(parameter)] == "muon"}
    blocks = {
        f"operator.blocks.{i}.{layer}.weight" for i in (0, 1) for layer in ("qkv", "out", "ffn.expand", "ffn.project")
    }
    layers = ("query", "key_value", "out", "ffn.expand", "ffn.project")
    assert muon == blocks | {f"decoder.layers.0.{layer}.weight" for layer in layers}


# ------------------------------------------------------------------------------------------------------------ saving
def test_saved_model_loads_where_training_is_never_imported(tmp_path: Path) -> None:
    net = build(replace(SMALL, model=MODELS["unet"]))
    net.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["tasks"][1]["name"] == "darcy"
    assert saved["model"]["operator"] == "pdet_unet"
    program = (
        "import sys, torch\n"
        "from accel_train.domains.pde.transformer import PdeTransformer\n"
        f"model = PdeTransformer.from_pretrained({str(tmp_path)!r})\n"
        "unwanted = {'accelerate', 'transformers', 'h5py', 'accel_train.training', 'accel_train.runtime'}\n"
        "assert not unwanted & set(sys.modules), unwanted & set(sys.modules)\n"
        f"torch.save(model.state_dict(), {str(tmp_path / 'loaded.pt')!r})\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, capture_output=True)
    loaded = torch.load(tmp_path / "loaded.pt", weights_only=True)
    assert loaded.keys() == net.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in net.state_dict().items())
    again = PdeTransformer.from_pretrained(tmp_path)
    assert again.config == net.config
    assert not again.training


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    build().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["operator.leave.bias"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"operator\.leave\.bias"):
        PdeTransformer.from_pretrained(tmp_path)


@pytest.mark.parametrize("config", [SMALL, SMALL_REFINING], ids=["", "refining"])
def test_state_is_plain(config: PdeTransformerConfig) -> None:
    net = build(config)
    parameters = dict(net.named_parameters())
    assert net.state_dict().keys() == parameters.keys()  # no buffers
    assert len({parameter.data_ptr() for parameter in parameters.values()}) == len(parameters)  # none shared
    names = {type(module).__name__ for module in net.modules()}
    assert set(PdeTransformer._no_split_modules) <= names  # pyright: ignore[reportPrivateUsage]


def test_identity_encoders_hold_no_weights() -> None:
    assert isinstance(build().target_encoders[0], nn.Identity)


# ------------------------------------------------------------------------------------------------ several processes
def shard(net: PdeTransformer, strategy: str) -> nn.Module:
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    from torch.distributed.fsdp import fully_shard

    for block in blocks_of(net):
        fully_shard(block)
    fully_shard(net)
    return net


def batch_of(stage: str, task: int) -> dict[str, Any]:
    return guessed(task) if stage == "correcting" else batch(task) | {"parts": STAGES[stage]}


def one_of_two(rank: int, strategy: str, directory: str) -> None:
    """Half of every batch; rank 0 saves the gradients of each stage and task."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2)
    net = build(SMALL_REFINING)
    wrapped, gradients = shard(net, strategy), dict[str, dict[str, Tensor]]()
    for stage in (*STAGES, "correcting"):
        for task in range(2):
            whole, own = batch_of(stage, task), slice(2 * rank, 2 * rank + 2)
            half = {k: v[own] if isinstance(v, Tensor) else v for k, v in whole.items()}
            wrapped.zero_grad()
            if stage == "correcting":
                with torch.no_grad():  # as the residual's stage does, which predicts first
                    wrapped(**half | {"input": whole["input"].input[own]}, parts=PREDICTION)
                half["input"] = ResidualGuess(*(x[own] for x in whole["input"]))
            output = present(wrapped(**half))
            torch.stack([value.square().mean() for value in output.values()]).sum().backward()
            found: dict[str, Any] = {n: p.grad for n, p in net.named_parameters()}
            gradients[f"{stage} {task}"] = {
                n: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for n, g in found.items()
            }
    if rank == 0:
        torch.save(gradients, f"{directory}/gradients.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow  # tests/distributed/test_invariance.py trains it on several processes
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_have_the_gradients_of_one(strategy: str, tmp_path: Path) -> None:
    zygote.call(one_of_two, 2, strategy, str(tmp_path))
    gradients = torch.load(tmp_path / "gradients.pt", weights_only=True)
    net = build(SMALL_REFINING)
    for stage in (*STAGES, "correcting"):
        for task in range(2):
            net.zero_grad()
            output = present(net(**batch_of(stage, task)))
            torch.stack([value.square().mean() for value in output.values()]).sum().backward()
            found = gradients[f"{stage} {task}"]
            assert found.keys() == dict(net.named_parameters()).keys()
            for name, parameter in net.named_parameters():
                torch.testing.assert_close(found[name], given(parameter.grad), rtol=1e-3, atol=1e-5)

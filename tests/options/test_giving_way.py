"""An option of a file that a flag leaves without effect gives way to it, at every place that refuses such options."""

from __future__ import annotations

import json
import pickle
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from accel_train.config import UsageError, WithoutEffectError, as_written, origin_of, refuse_without_effect
from accel_train.options.flags import read_flags
from accel_train.options.loading import load_config
from accel_train.options.tree import defaults_tree, flatten, option_types, to_tree
from accel_train.store.run_file import refuse_changes
from accel_train.training.health.options import HealthConfig
from recipes import causal_lm, lora, mmdit, pde
from tests.options.test_options import PRESETS

ROOT = Path(__file__).parents[2]


class Row(NamedTuple):
    recipe: ModuleType
    moot: dict[str, Any]
    """Options of the file that the flag leaves without effect."""
    flag: str
    beside: dict[str, Any] = {}  # noqa: RUF012
    """Options of the file that give them their effect."""


MUON = {"optimizer.muon_momentum": 0.9, "optimizer.muon_lr": 0.02, "optimizer.muon_nesterov": False}
PLATEAU = {"plateau.steps": 9, "plateau.patience": 2, "plateau.min_factor": 0.1}
PRIOR = {"data.prior.caption": "a dog", "data.prior.weight": 0.5}
ROWS = [
    Row(mmdit, MUON, "--optimizer.name adamw", {"optimizer.name": "muon"}),
    Row(
        mmdit,
        {"optimizer.arguments": ["momentum=0.9"]},
        "--optimizer.name adamw",
        {"optimizer.name": "torch.optim:SGD"},
    ),
    Row(mmdit, {"optimizer.fused": False}, "--optimizer.name adamw8bit"),
    Row(mmdit, {"schedule.cycles": 3}, "--schedule.kind cosine", {"schedule.kind": "cosine_restarts"}),
    Row(
        mmdit,
        {"schedule.cycle_multiplier": 2},
        "--schedule.cycles 1",
        {"schedule.kind": "cosine_restarts", "schedule.cycles": 2},
    ),
    Row(mmdit, {"loader.prefetch_factor": 4, "loader.timeout_seconds": 9.0}, "--loader.num_workers 0"),
    Row(mmdit, {"loader.bucket_shapes": 2}, "--loader.bucket_by_length false", {"loader.bucket_by_length": True}),
    Row(
        mmdit,
        {"batch_schedule.noise_steps": 20, "batch_schedule.max_size": 999},
        "--batch_schedule.noise_factor 0",
        {"batch_schedule.noise_factor": 1.0},
    ),
    Row(mmdit, {"data.vocab_size": 300}, "--data.tokenizer gpt2"),
    Row(mmdit, {"data.encoder": "x/y", "data.normalise": False}, "--data.latents shards"),
    Row(mmdit, {"data.pooling": "last"}, "--data.encoder tfidf-svd", {"data.encoder": "x/y"}),
    Row(mmdit, {"data.cache_mib": 9}, "--data.read memory", {"data.read": "shards"}),
    Row(mmdit, {"data.heldout_fraction": 0.2}, "--data.heldout_path x.txt"),
    Row(
        mmdit,
        {"checkpoints.keep_best": 2, "checkpoints.keep_every": 5},
        "--checkpoints.keep_last 0",
        {"checkpoints.best_metric": "nll"},
    ),
    Row(
        mmdit,
        {"checkpoints.keep_best": 2, "checkpoints.patience": 2},
        "--checkpoints.best_metric None",
        {"checkpoints.best_metric": "nll", "evaluation.every": 5},
    ),
    Row(
        mmdit,
        {"checkpoints.patience": 2},
        "--evaluation.every 0",
        {"checkpoints.best_metric": "nll", "evaluation.every": 5},
    ),
    Row(mmdit, {"checkpoints.keep_state_last": 2}, "--checkpoints.save_state false"),
    Row(mmdit, {"checkpoints.keep_state_last": 2}, "--checkpoints.keep_last 2"),
    Row(mmdit, {"hub.push_every": 3}, "--hub.push last", {"hub.repo_id": "me/model"}),
    Row(mmdit, {"hub.push": "last"}, "--hub.repo_id None", {"hub.repo_id": "me/model"}),
    Row(mmdit, {"hub.include_state": True}, "--checkpoints.save_state false", {"hub.repo_id": "me/model"}),
    Row(mmdit, {"log.project": "p"}, "--log.trackers", {"log.trackers": ["wandb"]}),
    Row(mmdit, {"profile.memory": True}, "--profile.steps None", {"profile.steps": "1:2"}),
    Row(mmdit, {"health.slow_factor": 2.0}, "--health.compare_every 0"),
    Row(
        mmdit, {"health.spike": "clip", "health.spike_window": 9}, "--health.spike_factor 0", {"health.spike_factor": 9}
    ),
    Row(mmdit, {"health.max_skipped": 5}, "--health.non_finite stop", {"health.non_finite": "skip"}),
    Row(mmdit, {"health.max_rollbacks": 2}, "--health.non_finite skip", {"health.non_finite": "rollback"}),
    Row(mmdit, {"balance.decay": 0.5}, "--balance.kind fixed", {"balance.kind": "ema"}),
    Row(mmdit, PLATEAU, "--plateau.factor 1", {"plateau.factor": 0.5}),
    Row(
        mmdit,
        {"activation_checkpointing.blocks": 2, "activation_checkpointing.offload": True},
        "--activation_checkpointing.mode none",
        {"activation_checkpointing.mode": "full"},
    ),
    Row(mmdit, {"compile.dynamic": True, "compile.recompile_budget": 2}, "--compile.mode off", {"compile.mode": "on"}),
    Row(
        mmdit,
        {"distributed.powersgd_rank": 2},
        "--distributed.comm_hook bf16",
        {"distributed.comm_hook": "powersgd"},
    ),
    Row(
        mmdit,
        {"modes.phases": ["mixed:5"]},
        "--modes.mode mixed",
        {"modes.mode": "sequential"},
    ),
    Row(mmdit, {"modes.conditioning_dropout": 0.2, "modes.weights": [1, 0, 2]}, "--modes.mode unconditional"),
    Row(mmdit, {"times.logit_mean": 0.5}, "--times.density uniform", {"times.density": "logit_normal"}),
    Row(
        mmdit,
        {"pictures.leave_out": ["flags"]},
        "--data.path shapes",
        {"pictures.latents": "pixels", "data.path": "emoji"},
    ),
    Row(
        mmdit,
        {"pictures.size": 64, "pictures.leave_out": ["flags"]},
        "--pictures.latents none",
        {"pictures.latents": "pixels", "data.path": "emoji"},
    ),
    Row(mmdit, {"data.normalise": False, "data.latent_dim": 8}, "--pictures.latents pixels", {"data.path": "emoji"}),
    Row(mmdit, {"data.heldout_path": "x"}, "--data.path emoji", {"pictures.latents": "pixels", "data.path": "mine"}),
    Row(causal_lm, {"data.vocab_size": 300}, "--data.tokenizer gpt2"),
    Row(causal_lm, {"data.vocab_size": 300}, "--model.source me/base"),
    Row(causal_lm, {"data.heldout_fraction": 0.2}, "--data.heldout_path x.txt"),
    Row(causal_lm, {"model.config": "gpt2", "model.hidden_size": 64}, "--model.source me/base"),
    Row(causal_lm, {"model.revision": "main"}, "--model.source None", {"model.source": "me/base"}),
    Row(
        causal_lm,
        {"lora.alpha": 8.0, "lora.variant": "dora", "lora.targets": ["q_proj"]},
        "--lora.rank 0",
        {"lora.rank": 4, "model.source": "me/base"},
    ),
    Row(pde, {"model.depths": [1, 1, 1]}, "--model.operator pdet_stack", {"model.operator": "pdet_unet"}),
    Row(pde, {"model.depth": 2}, "--model.operator pdet_unet", {"model.operator": "pdet_stack"}),
    Row(pde, {"model.group_width": 64}, "--model.attention standard", {"model.attention": "channel_separated"}),
    Row(pde, {"data.snapshots": 9, "data.seed": 3}, "--data.path files"),
    Row(pde, {"data.cache_mib": 9}, "--data.path demo", {"data.path": "files"}),
    Row(pde, {"data.speed": [0.3, 0.4], "data.resolution_1d": 64}, "--data.tasks darcy"),
    Row(pde, {"objective.inverse_every": 4}, "--objective.inverse_weight 0"),
    Row(
        pde,
        {"objective.inverse_every": 4},
        "--objective.freeze_autoencoder true",
        {"objective.autoencode_steps": 5},
    ),
    Row(pde, {"objective.query_sampling": "uniform"}, "--objective.queries None", {"objective.queries": 9}),
    Row(pde, {"evaluation.conditioning.beam": 4}, "--evaluation.conditioning.candidates 1"),
    Row(pde, {"objective.drop_path": 0.5}, "--model.depth 1", {"model.operator": "pdet_stack"}),
    Row(
        lora,
        {"objective.snr_gamma": 3.0},
        "--objective.snr_weighting none",
        {"objective.snr_weighting": "min_snr"},
    ),
    Row(
        lora,
        {"objective.multires_discount": 0.5},
        "--objective.multires_iterations 0",
        {"objective.multires_iterations": 6},
    ),
    Row(lora, PRIOR, "--data.prior.path None", {"data.prior.path": "class"}),
    Row(
        lora,
        {"data.prior.steps": 3},
        "--data.prior.count 0",
        {"data.prior.path": "class", "data.prior.count": 5, "data.prior.caption": "a dog"},
    ),
    Row(lora, {"data.mask.outside": 0.1}, "--data.mask.source none", {"data.mask.source": "alpha"}),
    Row(lora, {"data.resolution_choice": "each"}, "--data.resolutions 512", {"data.resolutions": [512, 256]}),
    Row(
        lora,
        {"evaluation.judge": "flags"},
        "--evaluation.heldout_prompts 0",
        {"evaluation.heldout_prompts": 4},
    ),
]
BASES: dict[ModuleType, dict[str, Any]] = {lora: {"lora.rank": 4}}


def write(path: Path, recipe: ModuleType, options: dict[str, Any]) -> str:
    tree: dict[str, Any] = {}
    for option, value in ({"max_steps": 9} | BASES.get(recipe, {}) | options).items():
        *groups, name = option.split(".")
        place = tree
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = value
    path.write_text(json.dumps(tree))
    return str(path)


def load(recipe: ModuleType, words: list[str]) -> Any:
    return load_config(vars(recipe)["Config"], words, presets=PRESETS).config


@pytest.mark.parametrize("row", ROWS, ids=[f"{next(iter(row.moot))} {row.flag}" for row in ROWS])
def test_that_of_a_file_gives_way_and_a_flag_does_not(row: Row, tmp_path: Path) -> None:
    file = write(tmp_path / "own.yaml", row.recipe, row.beside | row.moot)
    flag, *values = row.flag.split()
    before = load(row.recipe, [file])
    config = load(row.recipe, [file, flag, *values])
    defaults = flatten(defaults_tree(type(config)))
    after = flatten(to_tree(config))
    assert {option: after[option] for option in row.moot} == {option: defaults[option] for option in row.moot}
    # Nothing else changes.
    changed = {option for option, old in flatten(to_tree(before)).items() if old != after[option]}
    assert changed <= {*row.moot, flag.removeprefix("--")}
    for option in row.moot:
        assert origin_of(config, option).endswith(f"of {file} gives way to {flag}")
    notices = [line for line in config.replaced_notices() if line.partition(":")[0] in row.moot]
    assert len(notices) == len(row.moot)
    assert all(f"gives way to {flag}" in notice for notice in notices)

    given = [
        word
        for option, value in (row.beside | row.moot).items()
        for word in (f"--{option}", *shlex.split(as_flag(value)))
        if f"--{option}" != flag
    ]
    base = write(tmp_path / "base.yaml", row.recipe, {})
    with pytest.raises(UsageError, match="no effect") as refused:
        load(row.recipe, [base, *given, flag, *values])
    assert all(option in str(refused.value) for option in row.moot)
    # In the file with its cause, too.
    cause = read_flags(option_types(type(config)), [flag, *values], list)
    both = write(tmp_path / "both.yaml", row.recipe, row.beside | row.moot | cause)
    with pytest.raises(UsageError, match="no effect"):
        load(row.recipe, [both])


def as_flag(value: Any) -> str:
    return as_written(tuple(value) if isinstance(value, list) else value).replace("a dog", "'a dog'")


def test_options_of_two_causes_each_name_their_own(tmp_path: Path) -> None:
    options = MUON | {"optimizer.name": "muon", "schedule.kind": "cosine_restarts", "schedule.cycles": 3}
    file = write(tmp_path / "own.yaml", mmdit, options)
    config = load(mmdit, [file, "--schedule.kind", "cosine", "--optimizer.name", "adamw"])
    assert config.replaced_notices() == [
        f"optimizer.muon_lr: 0.02 of {file} gives way to --optimizer.name adamw",
        f"optimizer.muon_momentum: 0.9 of {file} gives way to --optimizer.name adamw",
        f"optimizer.muon_nesterov: False of {file} gives way to --optimizer.name adamw",
        f"schedule.cycles: 3 of {file} gives way to --schedule.kind cosine",
    ]
    # One of them is a flag as well: the start is refused for it, and names what else is in the way.
    with pytest.raises(UsageError, match=r"optimizer\.muon_lr: 0\.1.*muon_momentum is from .*: --\S+ None changes it"):
        load(mmdit, [file, "--optimizer.name", "adamw", "--optimizer.muon_lr", "0.1"])


def test_a_flag_named_in_the_remedy_alone_is_no_cause(tmp_path: Path) -> None:
    file = write(tmp_path / "own.yaml", mmdit, {"regrow_after": 5, "micro_batch_size": 4})
    flags = ["--micro_batch_size", "1", "--out_of_memory", "halve"]
    assert load(mmdit, [file, *flags]).replaced_notices() == [
        f"regrow_after: 5 of {file} gives way to --micro_batch_size 1"
    ]
    file = write(tmp_path / "pde.yaml", pde, {"objective.drop_path": 0.5, "model.depth": 2})
    config = load(pde, [file, "--objective.inverse_every", "1", "--model.depth", "1"])
    assert config.replaced_notices() == [f"objective.drop_path: 0.5 of {file} gives way to --model.depth 1"]


def test_a_resume_compares_what_gave_way(tmp_path: Path) -> None:
    file = write(tmp_path / "own.yaml", mmdit, MUON | {"optimizer.name": "muon"})
    saved = {"experiment": load(mmdit, [file]).run_options().experiment}
    now = load(mmdit, [file, "--optimizer.name", "adamw"]).run_options()
    place = ("output_dir", tmp_path)
    with pytest.raises(UsageError, match=r"optimizer\.muon_momentum: 0\.9 there, None now"):
        refuse_changes(saved, now.experiment, (), now.free_to_change, place, now.defaults)
    allowed = ("optimizer",)
    changed = refuse_changes(saved, now.experiment, allowed, now.free_to_change, place, now.defaults)
    assert "optimizer.muon_momentum: 0.9 there, None now" in changed


def test_latents_of_your_own_do_not_give_way(tmp_path: Path) -> None:
    """Others would be learned in their place."""
    file = write(tmp_path / "own.yaml", mmdit, {"data.latents": "made"})
    with pytest.raises(UsageError, match=r"data\.read: shards, data\.latents: made: .* leave one of the two out"):
        load(mmdit, [file, "--data.read", "shards"])


def test_one_and_several_options_in_a_sentence() -> None:
    config = load(mmdit, ["demo", "--optimizer.betas", "0.9", "0.99", "--seed", "3"])
    refuse_without_effect(config.optimizer, "optimizer", ["no_decay"], "at all")
    with pytest.raises(WithoutEffectError) as one:
        refuse_without_effect(config.optimizer, "optimizer", ["betas"], "at all")
    assert str(one.value) == ("optimizer.betas: 0.9 0.99: has no effect at all; leave it out (the default is 0.9 0.95)")
    with pytest.raises(WithoutEffectError, match="have no effect") as several:
        refuse_without_effect(config, "", ["seed", "max_steps"], "now", "give more")
    assert several.value.options == {"seed": 0, "max_steps": None}
    assert "; give more, or leave them out (the defaults are " in str(several.value)


@dataclass(frozen=True)
class Watchful(pde.Config):
    """A recipe with defaults of its own in a group."""

    health: HealthConfig = field(default_factory=lambda: HealthConfig(spike_factor=10, spike="skip", spike_window=50))


def test_defaults_of_a_recipe_give_way_to_those_of_the_group() -> None:
    loaded = load_config(Watchful, ["pde_demo", "--health.spike_factor", "0"], presets=PRESETS)
    assert loaded.config.health == HealthConfig()
    assert "gives way to --health.spike_factor" in loaded.origins["health.spike"]


def test_it_reaches_other_processes_as_it_is() -> None:
    one = WithoutEffectError("no effect", {"a.b": 1})
    both = pickle.loads(pickle.dumps(WithoutEffectError("none", {"a.b": 1}, parts=[one, one])))
    assert (str(both), both.options) == ("none", {"a.b": 1})
    assert [(type(part), str(part), part.options) for part in both.parts] == [
        (WithoutEffectError, "no effect", one.options)
    ] * 2
    alone = pickle.loads(pickle.dumps(one))
    assert alone.parts == (alone,)


def test_every_place_names_its_sentence_by_one_helper() -> None:
    """A place of its own would be free not to give way."""
    package = ROOT / "accel_train"
    found = [path for path in package.rglob("*.py") if " WithoutEffectError(" in path.read_text()]
    assert sorted(path.relative_to(package).as_posix() for path in found) == ["config.py", "options/loading.py"]

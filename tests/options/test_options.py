"""What a person can set in each recipe: the options, their help, the presets and launch files that ship."""

from __future__ import annotations

import dataclasses
import re
import shutil
import socket
from collections import Counter
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from accel_train.config import UsageError, unset_variable
from accel_train.experiment import ExperimentConfig
from accel_train.launch_files.machine_config import read_machine_config
from accel_train.options.help_text import field_texts
from accel_train.options.loading import config_of, load_config, read_tree
from accel_train.options.refusals import unset_variables
from accel_train.options.tree import config_text, option_names, to_tree
from accel_train.store.run_file import write_config
from recipes import causal_lm, lora, mmdit, pde
from recipes.mmdit import Config
from tests import options_page

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "recipes" / "presets"
LAUNCH_FILES = ROOT / "accelerate_configs"

MMDIT = """
output_dir
seed
global_batch_size
micro_batch_size
max_steps
max_epochs
precision
attention
deterministic
float8
offload_frozen
out_of_memory
regrow_after
sync
resume
allow
overwrite
init_from
evaluate_only
collective_timeout_seconds
without_samples
activation_checkpointing.mode
activation_checkpointing.blocks
activation_checkpointing.offload
memory.fraction
memory.expandable_segments
compile.mode
compile.optimize
compile.dynamic
compile.recompile_budget
distributed.gradient_as_bucket_view
distributed.bucket_cap_mb
distributed.comm_hook
distributed.powersgd_rank
distributed.powersgd_start_step
distributed.static_graph
distributed.fsdp2_prefetch
optimizer.name
optimizer.arguments
optimizer.lr
optimizer.betas
optimizer.eps
optimizer.weight_decay
optimizer.max_grad_norm
optimizer.lr_factors
optimizer.no_decay
optimizer.fused
optimizer.muon_lr
optimizer.muon_weight_decay
optimizer.muon_momentum
optimizer.muon_nesterov
optimizer.muon_adjust_lr_fn
optimizer.muon_precision
schedule.kind
schedule.warmup_steps
schedule.decay_steps
schedule.floor
schedule.cycles
schedule.cycle_steps
schedule.cycle_multiplier
schedule.wsd_decay_fraction
plateau.factor
plateau.steps
plateau.min_improvement
plateau.patience
plateau.cooldown
plateau.min_factor
batch_schedule.steps
batch_schedule.sizes
batch_schedule.learning_rate
batch_schedule.noise_factor
batch_schedule.noise_steps
batch_schedule.noise_every
batch_schedule.max_size
balance.kind
balance.decay
balance.lr
ema.decay
health.non_finite
health.max_skipped
health.max_rollbacks
health.spike_factor
health.spike
health.spike_window
health.hang_seconds
health.compare_every
health.slow_factor
health.check_replicas_every
loader.num_workers
loader.prefetch_factor
loader.pin_memory
loader.timeout_seconds
loader.bucket_by_length
loader.bucket_shapes
checkpoints.save_every
checkpoints.save_every_minutes
checkpoints.save_every_epochs
checkpoints.save_state
checkpoints.save_precision
checkpoints.base
checkpoints.asynchronous
checkpoints.keep_last
checkpoints.keep_best
checkpoints.best_metric
checkpoints.best_mode
checkpoints.patience
checkpoints.keep_every
checkpoints.keep_window_steps
checkpoints.keep_window_epochs
checkpoints.pinned
checkpoints.keep_state_last
checkpoints.on_error
checkpoints.grace_seconds
hub.repo_id
hub.push
hub.push_every
hub.include_state
hub.private
hub.revisions
hub.license
hub.finish_minutes
log.log_every
log.per_sample
log.grad_norms
log.update_ratios
log.trackers
log.project
log.run_name
log.progress_bar
profile.steps
profile.memory
model.size
model.blocks_from
model.width
model.depth
model.heads
model.conditioning_width
model.ffn_ratio
model.qk_norm
model.bias
data.path
data.read
data.shuffle_blocks
data.cache_mib
data.changed
data.split
data.text_column
data.heldout_path
data.heldout_fraction
data.min_words
data.max_bad_rows
data.tokenizer
data.vocab_size
data.max_length
data.encoder
data.latent_dim
data.pooling
data.normalise
data.encoder_max_length
data.encoder_batch_size
data.latents
data.cache_dir
pictures.latents
pictures.vae
pictures.vae_revision
pictures.vae_batch_size
pictures.size
pictures.patch
pictures.samples
pictures.leave_out
pictures.image_column
pictures.max_left_out
modes.mode
modes.weights
modes.phases
modes.conditioning_dropout
modes.latent_weight
text.weighting
latent.kind
latent.schedule
latent.prediction
latent.loss
times.density
times.logit_mean
times.logit_std
times.mode_scale
times.shift
times.weighting
evaluation.every
evaluation.samples
evaluation.batch_size
evaluation.timesteps
evaluation.shown
evaluation.text.steps
evaluation.text.temperature
evaluation.text.guidance
evaluation.latent.steps
evaluation.latent.guidance
evaluation.latent.shift
"""
"""Adding, renaming or removing an option is a decision that people's files and scripts feel: change it here too."""


PDE = """
model.operator
model.width
model.latent_width
model.depth
model.depths
model.heads
model.attention
model.group_width
model.ffn_ratio
model.qk_norm
model.patch_1d
model.patch_2d
model.max_tokens
model.stem_width
model.octaves
model.decoder_width
model.decoder_layers
model.residual_depth
data.path
data.tasks
data.train_samples
data.heldout_samples
data.resolution_1d
data.resolution_2d
data.time_stride
data.snapshots
data.dt
data.speed
data.viscosity
data.seed
data.workers
data.changed
data.cache_mib
data.cache_dir
task_weights
init_tasks
objective.autoencode_steps
objective.freeze_autoencoder
objective.latent_weight
objective.inverse_weight
objective.inverse_every
objective.spectral_weight
objective.boundary_weight
objective.conservation_weight
objective.queries
objective.query_sampling
objective.drop_path
objective.flip
objective.residual_from
objective.residual_steps
evaluation.every
evaluation.samples
evaluation.batch_size
evaluation.trajectories
evaluation.conditioning.candidates
evaluation.conditioning.beam
evaluation.conditioning.horizon
"""


CAUSAL_LM = """
model.source
model.revision
model.config
model.hidden_size
model.intermediate_size
model.num_hidden_layers
model.num_attention_heads
model.num_key_value_heads
model.tie_word_embeddings
model.loss_chunk
lora.rank
lora.alpha
lora.variant
lora.base_precision
lora.targets
data.path
data.more_paths
data.repeats
data.split
data.text_column
data.sample_by
data.heldout_path
data.heldout_fraction
data.changed
data.max_bad_rows
data.tokenizer
data.vocab_size
data.chat_template
data.max_length
data.packing
data.cache_dir
evaluation.every
evaluation.samples
evaluation.batch_size
evaluation.shown
evaluation.prompt_tokens
evaluation.max_new_tokens
evaluation.temperature
"""


def assert_options_are(found: list[str], expected: list[str], where: str) -> None:
    """Compare with a list of this file, and name what differs."""
    new = [name for name in found if name not in expected]
    gone = [name for name in expected if name not in found]
    assert found == expected, f"correct the list {where} in this file, in the order of the fields: {new=}, {gone=}"


def own_options(config: type) -> list[str]:
    """The options of a recipe beside the shared ones."""
    shared = option_names(ExperimentConfig)
    return [name for name in option_names(config) if name not in shared]


def test_the_options_of_mmdit_are_these() -> None:
    assert_options_are(option_names(Config), MMDIT.split(), "MMDIT")


def test_the_options_of_pde_are_these_beside_the_shared_ones() -> None:
    assert_options_are(own_options(pde.Config), PDE.split(), "PDE")


def test_the_options_of_causal_lm_are_these_beside_the_shared_ones() -> None:
    assert_options_are(own_options(causal_lm.Config), CAUSAL_LM.split(), "CAUSAL_LM")


RECIPES: dict[str, tuple[type, str]] = {
    "mmdit": (mmdit.Config, "demo"),
    "pde": (pde.Config, pde.DEFAULT_PRESET),
    "causal_lm": (causal_lm.Config, causal_lm.DEFAULT_PRESET),
    "lora": (lora.Config, lora.DEFAULT_PRESET),
}


def of_preset(name: str) -> type:
    """The recipe that a preset belongs to: by the name that it begins with, else mmdit."""
    recipe = next((recipe for recipe in RECIPES if name.startswith(f"{recipe}_")), "mmdit")
    return RECIPES[recipe][0]


def groups(cls: type) -> list[type]:
    """The class and every group below it."""
    hints = get_type_hints(cls)
    below = [hints[f.name] for f in dataclasses.fields(cls) if dataclasses.is_dataclass(hints[f.name])]
    return [cls, *(group for child in below for group in groups(child))]


def every_group() -> list[type]:
    """Each group of options of any recipe, once."""
    return list(dict.fromkeys(group for config, _ in RECIPES.values() for group in groups(config)))


def documented(cls: type) -> set[str]:
    """Fields with a string under them: what tyro shows as help."""
    return {name for name, text in field_texts(cls).items() if len(text) > 15}


@pytest.mark.parametrize("cls", every_group(), ids=lambda cls: cls.__name__)
def test_every_option_says_what_it_does(cls: type) -> None:
    hints = get_type_hints(cls)
    options = {f.name for f in dataclasses.fields(cls) if not dataclasses.is_dataclass(hints[f.name])}
    assert options <= documented(cls), sorted(options - documented(cls))


@pytest.mark.parametrize("cls", every_group(), ids=lambda cls: cls.__name__)
def test_groups_are_frozen_and_complete_without_a_file(cls: type) -> None:
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    for field in dataclasses.fields(cls):
        given = (field.default, field.default_factory)
        assert any(value is not dataclasses.MISSING for value in given), f"{cls.__name__}.{field.name}"


def free_by_its_text(config: type, prefix: str = "") -> set[str]:
    """The options whose text says that they affect speed and memory only."""
    kinds, texts, found = get_type_hints(config), field_texts(config), set[str]()
    for field in dataclasses.fields(config):
        kind = kinds[field.name]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            found |= free_by_its_text(kind, f"{prefix}{field.name}.")
        elif "speed and memory only" in texts.get(field.name, ""):
            found.add(prefix + field.name)
    return found


@pytest.mark.parametrize("recipe", [mmdit, pde, causal_lm, lora])
def test_an_option_that_affects_speed_and_memory_only_may_change_on_resume(recipe: Any) -> None:
    assert {name for name in free_by_its_text(recipe.Config) if not recipe.Config.may_change_on_resume(name)} == set()


@pytest.mark.parametrize("recipe", [mmdit, pde, causal_lm, lora])
def test_what_may_change_on_resume_is_an_option(recipe: Any) -> None:
    names = set(option_names(recipe.Config))
    free = recipe.Config.recipe.free_to_change
    assert [name for name in free if not any(n == name or n.startswith(f"{name}.") for n in names)] == []


def test_there_are_options_that_affect_speed_and_memory_only() -> None:
    found = free_by_its_text(Config) | free_by_its_text(lora.Config)
    assert found == {"data.encoder_batch_size", "pictures.vae_batch_size", "base.encoder_batch_size"}


def shown_by_help(recipe: str, *words: str, capsys: pytest.CaptureFixture[str]) -> str:
    config, default = RECIPES[recipe]
    with pytest.raises(SystemExit) as left:
        load_config(config, words, presets=PRESETS, default_preset=default)
    assert left.value.code == 0
    return capsys.readouterr().out


def listed(config: type, shown: str) -> list[str]:
    """The options of which a help text has a line, in the order of the config."""
    flags = set(re.findall(r"^\W*(?:-\w, )?--([\w.]+)", shown, flags=re.MULTILINE))
    return [name for name in option_names(config) if name in flags]


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_all_lists_every_option_with_its_text(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = RECIPES[recipe]
    shown = shown_by_help(recipe, "--help", "all", capsys=capsys)
    assert listed(config, shown) == option_names(config)
    assert "Samples per optimizer step over all processes" in " ".join(re.sub(r"\W*\n\W*", " ", shown).split())


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_lists_twenty_options_and_names_the_rest_by_group(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = RECIPES[recipe]
    shown = shown_by_help(recipe, "--help", capsys=capsys)
    options, _, overview = shown.partition("More options, by group")
    first = listed(config, options)
    assert len(first) == 20
    assert {*config.first_options()} == {*first}  # type: ignore[attr-defined]
    counts = {row[1]: int(row[2]) for row in re.finditer(r"^  (\w+) +(\d+)  \w", overview, flags=re.MULTILINE)}
    rest = [name for name in option_names(config) if name not in first]
    assert not re.search(r"\b(al|e\.g|i\.e)$", overview, flags=re.MULTILINE)
    assert counts == dict(Counter(name.split(".")[0] if "." in name else "general" for name in rest))
    offered = re.search(r"a preset \((.*?)\)", " ".join(shown.split()))
    assert offered is not None
    assert offered[1].split(", ") == [preset for preset in preset_names() if of_preset(preset) is config]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--objective.spectral_weight", "0.1"],
            r"spectral_weight 0\.1: .*\(objective\.queries is from pde_demo: --objective\.queries None changes it\)$",
        ),
        (["--objective.spectral_weight", "0.1", "--objective.queries", "8"], r"this weight at 0\.$"),
        (
            ["--objective.residual_from", "50"],
            r"residual_from 50: .*\(objective\.autoencode_steps is from pde_demo: --objective\.autoencode_steps ch",
        ),
    ],
)
def test_a_flag_that_contradicts_the_preset_is_refused_with_both_places(flags: list[str], says: str) -> None:
    config, _ = RECIPES["pde"]
    with pytest.raises(UsageError, match=says):
        load_config(config, ["pde_demo", *flags], presets=PRESETS)


@pytest.mark.parametrize("topic", ["optimizer", "evaluation", "evaluation.text", "activation-checkpointing"])
def test_help_of_a_group_lists_its_options(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by_help("mmdit", "base", "--help", topic, capsys=capsys)
    group = topic.replace("-", "_")
    assert listed(Config, shown) == [name for name in option_names(Config) if name.startswith(f"{group}.")]


def test_help_shows_the_values_of_the_preset(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help=optimizer"], ["base", "--seed", "1", "-h", "optimizer"]):
        preset = words[0] if len(words) > 1 else "demo"
        rate = read_tree(PRESETS / f"{preset}.yaml")["optimizer"]["lr"]
        assert f"(default: {rate})" in shown_by_help("mmdit", *words, capsys=capsys)


def test_help_of_an_unknown_group_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--help optimiser: there is no such group; .* \(did you mean 'optimizer'\?"):
        load_config(Config, ["--help", "optimiser"], presets=PRESETS)


@pytest.mark.parametrize(("option", "topic"), [("optimizer.lr", "optimizer"), ("seed", "general")])
def test_help_of_an_option_names_its_group(option: str, topic: str) -> None:
    with pytest.raises(UsageError, match=rf"^--help {option}: it is an option; give --help {topic}$"):
        load_config(Config, ["--help", option], presets=PRESETS)


def test_a_recipe_that_forgets_the_checks_of_every_recipe_has_them() -> None:
    @dataclasses.dataclass(frozen=True)
    class Forgetful(ExperimentConfig):
        flavour: str = "mild"

        def __post_init__(self) -> None:
            if self.flavour == "none":
                raise UsageError("flavour: none")

    assert Forgetful(max_steps=4).flavour == "mild"
    with pytest.raises(UsageError, match=r"max_steps: 4, max_epochs: 2: give exactly one of them"):
        Forgetful(max_steps=4, max_epochs=2)
    with pytest.raises(UsageError, match=r"flavour: none"):
        Forgetful(max_steps=4, flavour="none")


def test_the_page_of_options_is_that_of_the_dataclasses() -> None:
    assert options_page.PAGE.read_text() == options_page.page(), "run: python -m tests.options_page"


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def test_the_presets_are_these() -> None:
    assert preset_names() == [
        "base",
        "causal_lm_demo",
        "causal_lm_smoke",
        "causal_lm_tune",
        "demo",
        "image_demo",
        "image_shapes",
        "l2t_qwen",
        "lora_12gb",
        "lora_141gb",
        "lora_16gb",
        "lora_24gb",
        "lora_48gb",
        "lora_6gb",
        "lora_80gb",
        "lora_8gb",
        "lora_demo",
        "lora_quality",
        "lora_speed",
        "lora_tune",
        "mmdit_base_baseline",
        "mmdit_base_optimized",
        "mmdit_baseline",
        "mmdit_optimized",
        "mmdit_small_baseline",
        "mmdit_small_optimized",
        "pde_baseline",
        "pde_demo",
        "pde_optimized",
        "pde_stack_baseline",
        "pde_stack_optimized",
    ]


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_valid_and_says_when_to_take_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load_config(of_preset(name), [name, "--print_config"], presets=PRESETS)
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == len(option_names(of_preset(name)))
    assert f"# {name}" in shown
    first, *_ = (PRESETS / f"{name}.yaml").read_text().splitlines()
    assert first.startswith("# ")
    assert len(first) > 40


def test_presets_write_to_directories_of_their_own() -> None:
    directories = [read_tree(PRESETS / f"{name}.yaml")["output_dir"] for name in preset_names()]
    assert len(set(directories)) == len(directories)


def test_the_presets_are_what_their_names_promise() -> None:
    base = load_config(Config, ["base"], presets=PRESETS).config
    assert base.model.transformer().width, base.model.transformer().depth == (1024, 24)
    qwen = load_config(Config, ["l2t_qwen"], presets=PRESETS).config
    assert (qwen.modes.mode, qwen.data.encoder, qwen.data.pooling, qwen.data.latent_dim) == (
        "l2t",
        "Qwen/Qwen3-Embedding-0.6B",
        "last",
        1024,
    )


TRACKED = ("--log.trackers", "tensorboard")


@pytest.mark.parametrize(
    ("name", "flags"),
    [(name, []) for name in preset_names()]
    + [
        ("demo", ["--max_steps", "None", "--max_epochs", "2.5"]),
        ("demo", ["--optimizer.lr", "1e-9", "--optimizer.betas", "0.1", "0.999999", "--output_dir", "a: b # c"]),
        ("demo", ["--optimizer.name", "a.b:C", "--optimizer.arguments", "d=1e-3", "betas=[0.9, 1]", "kind=: #"]),
        (
            "demo",
            ["--modes.mode", "sequential", "--modes.phases", "t2l:500", "mixed:5", "--log.project", "null", *TRACKED],
        ),
        ("demo", ["--loader.pin_memory", "false", "--loader.num_workers", "3", "--log.run_name", "1e3", *TRACKED]),
        ("demo", ["--log.trackers", "tensorboard", "wandb", "--data.text_column", "тext", "--data.split", "007"]),
    ],
)
def test_a_saved_config_is_valid_and_the_same_experiment(name: str, flags: list[str], tmp_path: Path) -> None:
    config = load_config(of_preset(name), [name, *flags], presets=PRESETS).config
    saved = tmp_path / "config.yaml"
    write_config(config_text(config), saved)
    again = load_config(of_preset(name), [str(saved)], presets=PRESETS)
    assert again.config == config
    assert types(to_tree(again.config)) == types(to_tree(config))


def types(tree: dict[str, Any]) -> dict[str, Any]:
    return {k: types(v) if isinstance(v, dict) else type(v) for k, v in tree.items()}


def test_a_saved_config_leaves_out_what_belongs_to_one_call(tmp_path: Path) -> None:
    config = load_config(Config, ["--resume", "must", "--allow", "seed", "--overwrite"], presets=PRESETS).config
    write_config(config_text(config), tmp_path / "config.yaml")
    again = load_config(Config, [str(tmp_path / "config.yaml")], presets=PRESETS).config
    assert (again.resume, again.allow, again.overwrite) == ("auto", (), False)


def test_a_saved_config_sets_what_differs_from_the_defaults(tmp_path: Path) -> None:
    config = load_config(Config, ["--sync", "every"], presets=PRESETS).config
    write_config(config_text(config), tmp_path / "config.yaml")
    again = load_config(Config, [str(tmp_path / "config.yaml"), "--attention", "auto"], presets=PRESETS).config
    names = ("sync", "attention", "optimizer.name", "step_guard")  # the last is no option
    assert [again.is_default(name) for name in names] == [False, False, True, True]


def test_the_config_of_a_moved_run_does_not_start_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(Config, ["--output_dir", "runs/first"], presets=PRESETS).config
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    write_config(config_text(config), run / "config.yaml")
    (run / "run.json").write_text("{}")

    def load(file: Path, *flags: str) -> str:
        return load_config(Config, [str(file), *flags], presets=PRESETS).config.output_dir

    assert load(run / "config.yaml") == "runs/first"
    link = tmp_path / "link"
    link.symlink_to(run)
    assert load(link / "config.yaml") == "runs/first"
    moved = tmp_path / "moved run"
    shutil.copytree(run, moved)
    where = rf"output_dir: runs/first, here {re.escape(str(run))}, is not {re.escape(str(moved))}, .*"
    for flags in ([], ["--evaluate_only"]):
        with pytest.raises(UsageError, match=rf"{where}give --output_dir '{re.escape(str(moved))}' to continue it"):
            load(moved / "config.yaml", *flags)
    assert load(moved / "config.yaml", "--output_dir", str(moved)) == str(moved)
    assert load(moved / "config.yaml", "--output_dir", "runs/new") == "runs/new"
    # Read to be compared or planned with, it starts nothing.
    main = config_of(lambda argv: load(Path(str(argv[0]))), [str(moved / "config.yaml")])
    assert main is not None
    monkeypatch.chdir(moved)
    with pytest.raises(UsageError, match="another working directory"):
        load(run / "config.yaml")
    # A file of another name is written by a person, or a copy of a single file.
    assert load((moved / "config.yaml").rename(moved / "mine.yaml")) == "runs/first"


UNSET = rf"the variable NOT_SET is not set on {re.escape(socket.gethostname())}; set it there, or "


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("output_dir", "$NOT_SET/run"),
        ("data.cache_dir", "${NOT_SET}/cache"),
        ("data.path", "$HOME/$NOT_SET.jsonl"),
        ("init_from", "$NOT_SET/$NEITHER"),
    ],
)
def test_a_path_with_a_variable_that_is_not_set_is_refused(
    option: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"^{option}: '{re.escape(value)}': {UNSET}"):
        load_config(Config, [f"--{option}", value], presets=PRESETS)
    # Only read, on a laptop for instance: its variables are not those of the machine that trains.
    assert config_of(lambda argv: load_config(Config, argv, presets=PRESETS), [f"--{option}", value]) is not None
    for name in ("NOT_SET", "NEITHER"):
        monkeypatch.setenv(name, "x")
    load_config(Config, [f"--{option}", value], presets=PRESETS)


def test_a_resume_by_its_config_needs_no_place_of_starting_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setenv("NOT_SET", "x")
    config = load_config(Config, ["--output_dir", str(run), "--init_from", "$NOT_SET/late"], presets=PRESETS).config
    monkeypatch.delenv("NOT_SET")
    (run / "config.yaml").write_text(config_text(config))
    refused = pytest.raises(UsageError, match=f"^init_from: '{re.escape('$NOT_SET/late')}': {UNSET}")
    with refused:
        load_config(Config, [str(run / "config.yaml")], presets=PRESETS)
    (run / "checkpoints" / "checkpoint_00000001").mkdir(parents=True)
    load_config(Config, [str(run / "config.yaml")], presets=PRESETS)
    with refused:
        load_config(Config, [str(run / "config.yaml"), "--overwrite", "true"], presets=PRESETS)


def test_a_dollar_that_is_no_unset_variable_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "$NOT_SET").mkdir()
    for value in ("$NOT_SET", "cost-in-$", "$5"):
        load_config(Config, ["--output_dir", value], presets=PRESETS)
    assert unset_variables({"data.more_paths": ("a", "$NOT_SET/b"), "metrics.name": "$NOT_SET/b"}) == [
        f"data.more_paths: {unset_variable('$NOT_SET/b')}"
    ]


def launch_files() -> list[Path]:
    return sorted(LAUNCH_FILES.glob("*"))


def test_the_launch_files_are_these() -> None:
    assert [path.name for path in launch_files()] == [
        "ddp.yaml",
        "fsdp2.yaml",
        "fsdp2_offload.yaml",
        "multi_node.yaml",
        "single_gpu.yaml",
        "zero2_offload.yaml",
        "zero3_offload.yaml",
    ]


@pytest.mark.parametrize("path", launch_files(), ids=lambda path: path.stem)
def test_every_launch_file_is_read_and_says_nothing_of_the_experiment(path: Path) -> None:
    machine = read_machine_config(path)
    assert machine.mixed_precision is None
    assert machine.dynamo.backend == "no"
    text = path.read_text()
    for word in ("When:", "Cost:", f"accelerate launch --config_file accelerate_configs/{path.name}"):
        assert word in text, word

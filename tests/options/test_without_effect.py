"""An option that another leaves without effect is refused, and with the remedy it is accepted."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from accel_train import experiment, startup
from accel_train.checkpoints.policy import RunOptions
from accel_train.commands.checkpoints import push
from accel_train.config import UsageError, origin_of
from accel_train.data.options import BatchScheduleConfig
from accel_train.domains.images.captioned import PictureConfig
from accel_train.domains.images.captioned import prepare_pictures as prepare_captioned
from accel_train.domains.images.dataset import refuse_unread
from accel_train.domains.images.options import PictureDataConfig, PriorConfig
from accel_train.domains.language.prepare import DataConfig as LanguageConfig
from accel_train.domains.language.prepare import prepare_data as prepare_language
from accel_train.domains.language.pretrained import ModelConfig
from accel_train.domains.pde import operator_learning
from accel_train.domains.pde.data.equations import PdeDataConfig
from accel_train.domains.pde.data.prepare import prepare_pde
from accel_train.domains.pde.shape import PdeModelConfig
from accel_train.domains.text.options import DataConfig as TextConfig
from accel_train.hub.options import HubConfig
from accel_train.metrics.profiling.options import ProfileConfig
from accel_train.options.loading import load_config
from accel_train.options.tree import config_text
from accel_train.store.run_file import new_run, refuse_changes
from recipes import causal_lm, lora, mmdit, pde
from tests.options.test_options import PRESETS

DEFAULTS = {mmdit: "demo", causal_lm: "causal_lm_tune", pde: "pde_demo", lora: "lora_tune"}


class Row(NamedTuple):
    recipe: ModuleType
    flags: str
    says: str
    remedy: str


ROWS = [
    Row(
        mmdit,
        "--checkpoints.keep_last 0 --checkpoints.keep_every 5",
        r"keep_every: 5: .*keep_last: 0, which keeps every",
        "--checkpoints.keep_last 1",
    ),
    Row(
        mmdit,
        "--checkpoints.keep_last 0 --checkpoints.keep_window_epochs 2",
        r"keep_window_epochs: 2: ",
        "--checkpoints.keep_window_epochs 0",
    ),
    Row(
        mmdit,
        "--checkpoints.keep_state_last 1 --checkpoints.no_save_state",
        r"keep_state_last: 1: .*save_state: false",
        "--checkpoints.save_state",
    ),
    Row(mmdit, "--checkpoints.keep_state_last 3", r"give less than 3, keep more", "--checkpoints.keep_state_last 2"),
    Row(mmdit, "--checkpoints.keep_state_last 3", r"keep_state_last: 3: .*keep_last: 3", "--checkpoints.keep_every 9"),
    Row(
        mmdit,
        "--checkpoints.best_metric t2l_cosine",
        r"best_mode: min: t2l_cosine is better the larger it is",
        "--checkpoints.best_mode max",
    ),
    Row(
        mmdit,
        "--modes.mode l2t --latent.loss normalised_mse",
        r"latent\.loss: normalised_mse: have no effect with .*, which learns no latent",
        "--modes.mode t2l",
    ),
    Row(mmdit, "--checkpoints.best_mode max", r"best_mode: max: .*best_metric", "--checkpoints.best_metric t2l_cosine"),
    Row(
        mmdit,
        "--hub.repo_id me/model --hub.push last --hub.push_every 5",
        r"push_every: 5: .*push: last",
        "--hub.push every",
    ),
    Row(
        mmdit,
        "--hub.repo_id me/model --hub.include_state --checkpoints.no_save_state",
        r"include_state: true: .*save_state: false",
        "--checkpoints.save_state",
    ),
    Row(mmdit, "--health.max_skipped 3", r"max_skipped: 3: .*stop, which skips no", "--health.non_finite skip"),
    Row(mmdit, "--health.max_rollbacks 1", r"max_rollbacks: 1: .*never goes", "--health.non_finite rollback"),
    Row(
        mmdit,
        "--health.spike_window 50",
        r"spike_window: 50: .* switches spike detection off",
        "--health.spike_factor 10",
    ),
    Row(
        mmdit,
        "--schedule.kind cosine_restarts --schedule.cycles 1 --schedule.cycle_multiplier 2",
        r"cycle_multiplier: 2: .*no second cycle",
        "--schedule.cycles 2",
    ),
    Row(
        mmdit,
        "--modes.weights 1 0 0 --modes.latent_weight 1 --modes.conditioning_dropout 0.2",
        r"conditioning_dropout: 0\.2: has no effect",
        "--modes.weights 1 0 1",
    ),
    Row(
        mmdit,
        "--modes.weights 0 1 0 --modes.latent_weight 2",
        r"latent_weight: 2: has no effect with modes\.weights: 0 1 0",
        "--modes.weights 0 1 1",
    ),
    Row(
        causal_lm,
        "--model.source me/base --data.vocab_size 300",
        r"vocab_size: 300: .*me/base, whose tokenizer",
        "--data.tokenizer trained",
    ),
    Row(
        causal_lm,
        "--data.heldout_path a.txt --data.heldout_fraction 0.2",
        r"fraction: 0\.2: .*a\.txt.*default is 0\.04",
        "--data.heldout_fraction 0",
    ),
    Row(
        lora,
        "--data.heldout_path more --data.heldout_fraction 0.2",
        r"fraction: 0\.2: has no effect .*more.*default is 0\.05",
        "--data.heldout_fraction 0",
    ),
    Row(
        pde,
        "--objective.inverse_every 4 --objective.inverse_weight 0",
        r"inverse_every: 4: .*leaves the inverse terms",
        "--objective.inverse_weight 1",
    ),
    Row(
        pde,
        "--evaluation.conditioning.beam 4 --evaluation.conditioning.candidates 1",
        r"beam: 4: .*candidates: 1, the plain step",
        "--evaluation.conditioning.candidates 2",
    ),
    Row(
        mmdit,
        "--modes.mode l2t --times.shift 3 --times.weighting cosmap",
        r"times\.shift: 3, times\.weighting: cosmap: have no effect with modes\.mode: l2t, which learns no latent",
        "--modes.mode unconditional",
    ),
    Row(
        mmdit,
        "--modes.weights 0 0 2 --text.weighting uniform",
        r"text\.weighting: uniform: has no effect with modes\.weights: 0 0 2, which learns no text",
        "--modes.weights 0 1 2",
    ),
    Row(
        mmdit,
        "--times.density cosmap --modes.mode sequential --modes.phases l2t:5 l2t:6:freeze=latent",
        r"times\.density: cosmap: has no effect",
        "mixed:5",
    ),
    Row(mmdit, "--compile.dynamic", r"compile\.dynamic: true: has no effect .* off", "--compile.mode auto"),
    Row(
        pde,
        "--compile.recompile_budget 2 --compile.optimize max-autotune-no-cudagraphs",
        r"optimize: max-autotune-no-cudagraphs, compile\.recompile_budget: 2: have no effect",
        "--compile.mode on",
    ),
    Row(mmdit, "--log.project p", r"log\.project: p: has no effect without log\.trackers", "--log.trackers wandb"),
    Row(causal_lm, "--log.run_name r", r"log\.run_name: r: has no effect without", "--log.trackers tensorboard"),
    Row(
        mmdit,
        "--hub.push last --hub.push_every 2",
        r"hub\.push: last, hub\.push_every: 2: have no effect without hub\.repo_id",
        "--hub.repo_id me/model --hub.push every",
    ),
    Row(lora, "--cache_only --overwrite", r"overwrite: true: has no effect with cache_only", "--overwrite false"),
    Row(
        lora,
        "--cache_only --evaluate_only",
        r"evaluate_only: true: has no effect with cache_only",
        "--cache_only false",
    ),
    Row(lora, "--cache_only --resume must", r"resume: must: has no effect with cache_only", "--resume auto"),
    Row(
        mmdit,
        "--evaluate_only --profile.steps 1:2",
        r"profile\.steps: 1:2: has no effect with evaluate_only: true",
        "--profile.steps None",
    ),
    Row(
        mmdit,
        "--regrow_after 5 --micro_batch_size 1",
        r"regrow_after: 5: has no effect with micro_batch_size: 1, which cannot",
        "--micro_batch_size 2",
    ),
    Row(mmdit, "--regrow_after 5 --out_of_memory stop", r"regrow_after: 5: .*stop, which halves", "--regrow_after 0"),
    Row(
        lora,
        "--evaluation.heldout_prompts 3 --data.heldout_fraction 0",
        r"heldout_prompts: 3: has no effect with data\.heldout_fraction: 0 .*no picture is held out",
        "--data.heldout_path more",
    ),
]


def load(recipe: ModuleType, flags: str) -> Any:
    return load_config(vars(recipe)["Config"], flags.split(), presets=PRESETS, default_preset=DEFAULTS[recipe]).config


@pytest.mark.parametrize("row", ROWS, ids=[row.remedy.replace("--", "") for row in ROWS])
def test_it_is_refused_without_its_remedy(row: Row) -> None:
    with pytest.raises(UsageError, match=row.says):
        load(row.recipe, row.flags)
    load(row.recipe, f"{row.flags} {row.remedy}")


@pytest.mark.parametrize(
    ("recipe", "flags", "options", "said"),
    [
        (mmdit, "demo --modes.mode t2l", ["text.weighting"], "'uniform' of demo gives way to --modes.mode"),
        (mmdit, "demo --modes.weights 0 0 1", ["text.weighting"], "'uniform' of demo gives way to --modes.weights"),
        (
            mmdit,
            "image_demo --modes.mode l2t",
            ["times.density", "times.logit_mean", "times.logit_std", "times.weighting"],
            "'sigma_sqrt' of image_demo gives way to --modes.mode",
        ),
        (
            mmdit,
            "mmdit_small_optimized --compile.mode off",
            ["compile.dynamic"],
            "True of mmdit_small_optimized gives way to --compile.mode",
        ),
        (
            lora,
            "lora_demo --data.heldout_fraction 0",
            ["evaluation.heldout_prompts", "evaluation.judge"],
            "'flags' of lora_demo gives way to --data.heldout_fraction",
        ),
        (
            lora,
            "lora_demo --data.heldout_path more",
            ["data.heldout_fraction"],
            "0.227 of lora_demo gives way to --data.heldout_path",
        ),
        (mmdit, "base --schedule.kind constant", ["schedule.floor"], "0.1 of base gives way to --schedule.kind"),
        (lora, "lora_demo --smoke --cache_only", ["overwrite"], "True of --smoke gives way to --cache_only"),
    ],
)
def test_that_of_a_preset_gives_way_to_a_flag(recipe: ModuleType, flags: str, options: list[str], said: str) -> None:
    config = load(recipe, flags)
    assert all(option == "overwrite" or config.is_default(option) for option in options)
    assert [option for option in options if " gives way to " in origin_of(config, option)] == options
    assert origin_of(config, options[-1]) == said
    notices = [line for line in config.replaced_notices() if line.partition(":")[0] in options]
    assert len(notices) == len(options)
    assert notices[-1].startswith(f"{options[-1]}: {said} ")


def test_a_flag_that_a_trial_switches_off_gives_way_to_it(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("max_steps: 9\nlog: {trackers: [wandb]}\nhub: {repo_id: me/model}\n")
    config = load(mmdit, f"{file} --log.project p --hub.push last --smoke")
    assert (config.log.trackers, config.log.project, config.hub.push) == ((), "accel_train", "every")
    assert "log.project: 'p' of the command line gives way to --smoke" in config.replaced_notices()
    with pytest.raises(UsageError, match=r"log\.project: p: has no effect"):
        load(mmdit, "--log.project p --smoke")
    floor = "schedule.floor: 0.2 of the command line gives way to --smoke"
    assert floor in load(mmdit, "base --smoke --schedule.floor 0.2").replaced_notices()


def test_a_trial_switches_off_what_later_steps_would_do(tmp_path: Path) -> None:
    """Of the file, and flags of the same groups with it. A range of steps that a flag gives is the trial's own."""
    file = tmp_path / "own.yaml"
    schedule = "batch_schedule: {noise_factor: 1.0, max_size: 512, learning_rate: linear}"
    file.write_text(f"max_steps: 900\nprofile: {{steps: '10:20'}}\n{schedule}\n")
    flags = "--batch_schedule.noise_steps 100 --batch_schedule.learning_rate sqrt --profile.memory"
    config = load(mmdit, f"{file} --smoke {flags}")
    assert (config.profile, config.batch_schedule) == (ProfileConfig(), BatchScheduleConfig())
    assert sum("of the command line gives way to --smoke" in line for line in config.replaced_notices()) == 3
    startup.refuse_options(config)
    assert load(mmdit, f"{file} --smoke --profile.steps 1:2").profile.steps == "1:2"
    with pytest.raises(UsageError, match=r"batch_schedule\.noise_steps: 100: has no effect without"):
        load(mmdit, "demo --smoke --batch_schedule.noise_steps 100")


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("--evaluate_only", ["profile.steps", "profile.memory"]),
        ("--micro_batch_size 1", ["regrow_after"]),
        ("--out_of_memory stop", ["regrow_after"]),
    ],
)
def test_that_of_a_file_gives_way_too(flag: str, options: list[str], tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("max_steps: 9\nprofile: {steps: '1:2', memory: true}\nregrow_after: 5\n")
    config = load(mmdit, f"{file} {flag}")
    given_way = [option for option in options if origin_of(config, option).endswith(f"gives way to {flag.split()[0]}")]
    assert given_way == options
    assert (config.profile == ProfileConfig()) == ("profile.steps" in options)
    assert config.regrow_after == (0 if "regrow_after" in options else 5)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ("nonsense", r"allow: 'nonsense' is not an option of this experiment; name"),
        ("lr", r"\(did you mean 'optimizer\.lr'"),
        ("seed optimizer.lrr", r"allow: 'optimizer\.lrr' is not an option .*\(did you mean 'optimizer\.lr'\?\)"),
        ("optimiser", r"\(did you mean 'optimizer'\?\)"),
        ("seed optimizer data_fingerprint schedule.decay_steps", None),
    ],
)
def test_only_options_of_the_experiment_are_allowed_to_change(names: str, says: str | None, tmp_path: Path) -> None:
    config = load(mmdit, f"--output_dir {tmp_path / 'new'} --allow {names}")
    if says is None:
        assert config.run_options().allow == tuple(names.split())
        return
    with pytest.raises(UsageError, match=says):
        config.run_options()


def test_options_of_pushes_are_left_to_those_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--hub.no_private --hub.include_state --hub.revisions tag --hub.license mit --hub.finish_minutes 3"
    config = load(mmdit, flags)
    (notice,) = config.hub.notices()
    assert notice.startswith(
        "hub.include_state: true, hub.private: false, hub.revisions: tag, hub.license: mit, hub.finish_minutes: 3.0: "
    )
    assert load(mmdit, f"{flags} --hub.repo_id me/model").hub.notices() == []
    assert load(mmdit, "").hub.notices() == []
    # Each of them is in what a push by hand follows.
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text(config_text(config))
    pushed: list[HubConfig] = []
    monkeypatch.setattr("accel_train.hub.push_now.push_now", lambda _, options: pushed.append(options) or ["url"])
    assert push(str(tmp_path), {"repo_id": "me/model"}) == 0
    assert pushed == [replace(config.hub, repo_id="me/model")]


def test_a_resume_is_told_in_one_message_what_else_it_needs(tmp_path: Path) -> None:
    """It began with a value that is refused now."""
    run = tmp_path / "run"
    run.mkdir()
    config = load(mmdit, f"--modes.mode t2l --output_dir {run}")
    saved: dict[str, Any] = {"trained": True, "experiment": dict(config.run_options().experiment), "resolved": {}}
    saved["experiment"] |= {"text.weighting": "uniform", "compile.dynamic": True}
    (run / "run.json").write_text(json.dumps(saved))
    file = run / "config.yaml"
    text = config_text(config)
    file.write_text(text.replace("weighting: elbo", "weighting: uniform"))
    says = r"learns no text; .*began with text\.weighting 'uniform': .*give --allow text\.weighting as well$"
    with pytest.raises(UsageError, match=says):
        load(mmdit, str(file))
    with pytest.raises(UsageError, match=says):
        load(mmdit, f"--modes.mode t2l --text.weighting uniform --output_dir {run}")
    with pytest.raises(UsageError, match=r"choose another mode, or leave it out \(the default is elbo\)$"):
        load(mmdit, f"{file} --overwrite")
    with pytest.raises(UsageError, match=r"compile\.dynamic: true: .* or leave it out \(the default is false\)$"):
        load(mmdit, f"--compile.dynamic --output_dir {run}")
    # As the message says.
    file.write_text(text)
    given = load(mmdit, f"{file} --allow text.weighting").run_options()
    place = ("output_dir", run)
    changed = refuse_changes(saved, given.experiment, given.allow, given.free_to_change, place, given.defaults)
    assert changed == ["text.weighting: 'uniform' there, 'elbo' now"]


def test_other_refusals_say_so_too(tmp_path: Path) -> None:
    config = load(mmdit, f"--output_dir {tmp_path}")
    changed = {"schedule.kind": "cosine_restarts", "schedule.cycles": 1, "schedule.cycle_multiplier": 2.0}
    experiment = {**config.run_options().experiment, **changed, "optimizer.lr": 0.5}
    (tmp_path / "run.json").write_text(json.dumps({"trained": True, "experiment": experiment}))
    flags = f"--output_dir {tmp_path} --schedule.kind cosine_restarts --schedule.cycles 1"
    # Another value than that of the run is only to be corrected.
    for other in ("--optimizer.lr=-1", "--schedule.cycle_multiplier 3"):
        with pytest.raises(UsageError) as refused:
            load(mmdit, f"{flags} {other}")
        assert "began with" not in str(refused.value)
    with pytest.raises(UsageError, match=r"no second .*give --allow schedule\.cycle_multiplier as well$"):
        load(mmdit, f"{flags} --schedule.cycle_multiplier 2")


def test_shapes_hold_out_no_fraction(tmp_path: Path) -> None:
    data = TextConfig("shapes", heldout_fraction=0.2, cache_dir=str(tmp_path))
    pictures = PictureConfig("pixels", size=8, samples=8)
    with pytest.raises(UsageError, match=r"heldout_fraction: 0\.2: has no effect with data\.path: shapes"):
        prepare_captioned(pictures, data)
    assert prepare_captioned(pictures, TextConfig("shapes", cache_dir=str(tmp_path))) is not None


@pytest.mark.parametrize(
    ("path", "heldout_path", "options", "says"),
    [
        ("demo", None, {"text_column": "body"}, r"text_column: body: has no effect with --data\.path 'demo'"),
        ("a.txt", None, {"text_column": "body"}, r"text_column: body: "),
        ("a.jsonl", None, {"sample_by": "document"}, r"sample_by: document: has no effect .*a\.jsonl.*\.txt"),
        ("a.jsonl", "a.txt", {"sample_by": "paragraph", "text_column": "body"}, None),
        ("a.txt", "a.jsonl", {"sample_by": "paragraph", "text_column": "body"}, None),
    ],
)
def test_options_of_rows_are_read_by_one_source_at_least(
    path: str, heldout_path: str | None, options: dict[str, Any], says: str | None, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("".join(f"a line of words, number {n}\n\n" for n in range(200)))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": f"other words {n}"}) + "\n" for n in range(200)))
    places: dict[str, Any] = {"path": path if path == "demo" else str(tmp_path / path)}
    if heldout_path is not None:
        places["heldout_path"] = str(tmp_path / heldout_path)
    config = LanguageConfig(**places, **options, vocab_size=300, cache_dir=str(tmp_path / "cache"))
    if says is None:
        prepare_language(config, ModelConfig())
        return
    with pytest.raises(UsageError, match=says):
        prepare_language(config, ModelConfig())


@pytest.mark.parametrize(
    ("path", "options", "says"),
    [
        ("plain", {"split": "test"}, r"split 'test' has no effect with --data\.path '.*plain'"),
        ("plain", {"image_column": "jpg"}, r"image_column 'jpg' has no effect"),
        ("plain", {"caption_extension": ".caption"}, None),
        ("listed", {"caption_extension": ".caption"}, r"caption_extension '\.caption' has no effect .*metadata"),
        ("listed", {"caption_column": "prompt"}, None),
        ("listed", {"caption_extension": ".caption", "heldout_path": "plain"}, None),
        ("listed", {"caption_extension": ".caption", "prior": "plain"}, None),
        ("listed", {"split": "test", "prior": "owner/name"}, r"split 'test' has no effect"),
        ("emoji:flags", {"caption_column": "text"}, r"caption_column 'text' has no effect"),
        ("a.parquet", {"split": "test"}, r"split 'test' has no effect"),
        ("a.parquet", {"image_column": "jpg", "caption_column": "text"}, None),
        ("parts", {"caption_column": "prompt", "caption_extension": ".caption"}, None),
        ("parts/train", {"caption_extension": ".caption"}, r"caption_extension '.caption' has no effect"),
        ("saved", {"split": "test"}, r"split 'test' has no effect"),
        ("splits", {"split": "test"}, None),
        ("owner/name", {"split": "test", "image_column": "jpg"}, None),
    ],
)
def test_options_of_pictures_are_read_by_one_source_at_least(
    path: str, options: dict[str, Any], says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("plain/a.png", "listed/metadata.jsonl", "saved/state.json", "splits/dataset_dict.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    (tmp_path / "parts" / "train").mkdir(parents=True)
    (tmp_path / "parts" / "train" / "metadata.csv").touch()
    prior = PriorConfig(options.pop("prior", None))
    config = PictureDataConfig(path, **options, prior=prior)
    if says is None:
        refuse_unread(config)
        return
    with pytest.raises(UsageError, match=says):
        refuse_unread(config)


@pytest.mark.parametrize(
    ("task", "options", "says"),
    [
        (
            "advection",
            {"resolution_2d": 4},
            r"resolution_2d: 4: has no effect with data\.tasks: advection, none of which has 2-D",
        ),
        (
            "darcy",
            {"resolution_1d": 4},
            r"resolution_1d: 4: has no effect with data\.tasks: darcy, none of which has 1-D",
        ),
        ("darcy", {"time_stride": 3}, r"time_stride: 3: has no effect .* none of which has time"),
        ("advection", {"resolution_1d": 16, "time_stride": 3}, None),
    ],
)
def test_options_of_fields_need_a_task_with_them(
    task: str, options: dict[str, Any], says: str | None, tmp_path: Path
) -> None:
    small: dict[str, Any] = {
        "train_samples": 2,
        "heldout_samples": 1,
        "cache_dir": str(tmp_path / "cache"),
        "workers": 0,
    }
    small |= {"resolution_1d": 32, "snapshots": 5} if task == "advection" else {"resolution_2d": 8}
    prepare_pde(PdeDataConfig(tasks=(task,), **small))
    (folder,) = (tmp_path / "cache" / "pde").glob(f"{task}-*")
    config = PdeDataConfig(path=str(folder), tasks=(task,), cache_dir=str(tmp_path / "cache"), **options)
    if says is None:
        prepare_pde(config)
        return
    with pytest.raises(UsageError, match=says):
        prepare_pde(config)


def test_a_patch_needs_a_task_with_such_fields(tmp_path: Path) -> None:
    data = PdeDataConfig(
        tasks=("darcy",), train_samples=2, heldout_samples=1, resolution_2d=8, cache_dir=str(tmp_path), workers=0
    )
    tasks = prepare_pde(data).tasks
    with pytest.raises(
        UsageError, match=r"model\.patch_1d 2: has no effect, because no task of data\.tasks has 1-D fields"
    ):
        operator_learning.model_shape(PdeModelConfig(patch_1d=2), tasks)
    operator_learning.model_shape(PdeModelConfig(patch_2d=2), tasks)


def test_a_resume_past_the_steps_to_profile_is_told() -> None:
    profile = ProfileConfig("10:20")
    assert profile.notices(10) == ProfileConfig().notices(30) == []
    (some,), (none,) = profile.notices(15), profile.notices(20)
    assert some == "profile.steps: 10:20: this start resumes at step 15: only steps 16 to 20 are profiled"
    assert none.endswith("at step 20: nothing is profiled")


@pytest.mark.parametrize(
    ("flags", "steps", "is_told"),
    [
        ("--max_steps 50 --evaluation.every 50", 50, True),
        ("--max_steps 50 --evaluation.every 49", 50, False),
        ("--evaluation.every 2000", 1500, True),
        # The preset's interval, in a run that the command line shortens.
        ("--max_steps 50", 50, False),
        ("--smoke", 2, False),
        ("--evaluation.every 0", 1500, False),
    ],
)
def test_an_evaluation_that_never_comes_is_told(flags: str, steps: int, is_told: bool) -> None:
    notices = experiment.late_evaluation(load(mmdit, flags), steps)
    assert bool(notices) == is_told
    assert not notices or re.fullmatch(rf"evaluation.every: \d+: the run has {steps} steps, .* at the end", notices[0])


def test_an_encoder_in_another_place_may_be_the_same() -> None:
    saved = {"experiment": {"data.encoder": "/old/bge", "model.size": "base"}}
    with pytest.raises(
        UsageError, match=r"another data.encoder; if it is the same one in another place, .* --allow data.e"
    ):
        now = {"data.encoder": "/new/bge", "model.size": "base"}
        refuse_changes(saved, now, (), (), ("output_dir", "run"), {}, ["data.encoder", "model"])
    with pytest.raises(UsageError, match=r"another data.encoder, model.size$"):
        refuse_changes(
            saved, {"data.encoder": "/new/bge"}, (), (), ("output_dir", "run"), {}, ["data.encoder", "model"]
        )


def test_an_option_that_the_recipe_has_lost_can_be_allowed(tmp_path: Path) -> None:
    saved = {"experiment": {"seed": 0, "model.kernel": "old"}}
    with pytest.raises(UsageError, match=r"--allow model\.kernel"):
        refuse_changes(saved, {"seed": 0}, (), (), ("output_dir", tmp_path), {})
    assert refuse_changes(saved, {"seed": 0}, ["model.kernel"], (), ("output_dir", tmp_path), {}) == [
        "model.kernel: 'old' there, None now"
    ]
    with pytest.raises(UsageError, match="not an option of this experiment"):
        RunOptions(str(tmp_path), {"seed": 0}, allow=("model.kernel",))
    new_run(tmp_path, "", {"seed": 0, "model.kernel": "old"}, {}, {})
    RunOptions(str(tmp_path), {"seed": 0}, allow=("model.kernel",))
    with pytest.raises(UsageError, match="not an option of this experiment"):
        RunOptions(str(tmp_path), {"seed": 0}, allow=("model.kernel",), overwrite=True)


@pytest.mark.parametrize(
    ("recipe", "preset", "flags"),
    [
        (mmdit, "image_shapes", "--model.depth 3"),
        (mmdit, "image_shapes", "--pictures.size 8"),
        (mmdit, "image_shapes", "--seed 1 --data.max_length 9"),
        (pde, "pde_demo", "--model.width 64"),
    ],
)
def test_no_change_of_shapes_is_proposed(recipe: ModuleType, preset: str, flags: str, tmp_path: Path) -> None:
    begun = load(recipe, f"{preset} --output_dir {tmp_path}").run_options()
    saved = {"experiment": begun.experiment}

    def refused(flags: str) -> str:
        now = load(recipe, f"{preset} --output_dir {tmp_path} {flags}").run_options()
        with pytest.raises(UsageError) as error:
            place = ("output_dir", tmp_path)
            free, shapes = now.free_to_change, now.decides_shapes
            refuse_changes(saved, now.experiment, now.allow, free, place, now.defaults, shapes)
        return str(error.value)

    name = flags.split()[-2].removeprefix("--")
    assert refused(flags).endswith(f"or go back to the saved values: the weights do not fit another {name}")
    # Nothing is said of what was allowed and has not changed.
    assert refused("--seed 1 --allow model.width").endswith("accept the change with --allow model.width seed")
    assert refused("--seed 1").endswith("accept the change with --allow seed")


def test_no_change_of_rank_is_proposed_for_a_language_model(tmp_path: Path) -> None:
    given = f"causal_lm_tune --output_dir {tmp_path} --model.source org/name"
    saved = {"experiment": load(causal_lm, given).run_options().experiment}
    now = load(causal_lm, f"{given} --lora.rank 4").run_options()
    with pytest.raises(UsageError, match=r"or go back to the saved values: the weights do not fit another lora\.rank$"):
        refuse_changes(
            saved, now.experiment, (), now.free_to_change, ("output_dir", "x"), now.defaults, now.decides_shapes
        )

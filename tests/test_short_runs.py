"""Every shipped preset may be tried for a few steps: its schedule fits, and what was shortened is said.

Only the options and the length are resolved. ``test_bad_input`` has the same through a recipe's ``main``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from accel_train import experiment
from accel_train.config import UsageError
from accel_train.domains.pde.checks import check_stages
from accel_train.linting.facts import Facts
from accel_train.linting.training import warmup_beyond_the_run
from accel_train.options.loading import load_config
from accel_train.training.schedules import learning_rate_factor, notices, remedy_when_finished
from recipes import causal_lm, mmdit, pde
from tests.linting.test_presets import EVERY_PRESET, PRESETS

SAMPLES = 1000
SHORT = "--max_steps 6"
OTHERS = ("--max_steps 1", "--max_epochs 0.01")
CASES = [
    *((recipe, name, SHORT) for recipe, name in EVERY_PRESET),
    *((causal_lm, "causal_lm_tune", length) for length in OTHERS),
    *((mmdit, "demo", length) for length in OTHERS),
]


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def loaded(recipe: Any, name: str, length: str, directory: Path) -> Any:
    argv = [name, *length.split(), "--output_dir", str(directory)]
    return load_config(recipe.Config, argv, presets=PRESETS).config


def test_more_epochs_than_can_be_counted_are_refused(accelerator: Accelerator, tmp_path: Path) -> None:
    config = loaded(causal_lm, "causal_lm_demo", "--max_epochs 1e308", tmp_path)
    with pytest.raises(
        UsageError, match=r"max_epochs: 1e\+308: over 1,000 samples, .* give fewer epochs, or max_steps"
    ):
        experiment.resolve_length(config, accelerator, SAMPLES)


@pytest.mark.parametrize(("recipe", "name", "length"), CASES, ids=[f"{name} {length}" for _, name, length in CASES])
def test_a_shipped_preset_runs_for_a_few_steps(
    recipe: Any, name: str, length: str, accelerator: Accelerator, tmp_path: Path
) -> None:
    full = load_config(recipe.Config, [name], presets=PRESETS).config
    config = loaded(recipe, name, length, tmp_path)
    found = experiment.resolve_length(config, accelerator, SAMPLES)
    option, value = length.removeprefix("--").split()
    assert getattr(config, option) == float(value)
    assert found.max_steps == (int(value) if option == "max_steps" else max(1, -(-10 // config.global_batch_size)))

    factors = [learning_rate_factor(found.schedule, step, found.max_steps) for step in range(found.max_steps)]
    assert max(factors) == 1, f"{name} never reaches its learning rate: {factors}"
    asked, used = full.schedule.warmup_steps, found.schedule.warmup_steps
    said = "\n".join(found.notices)
    assert used == (asked if asked <= found.max_steps else found.max_steps // 10)
    assert (f"schedule.warmup_steps: {asked} " in said and f"shortened to {used};" in said) == (used != asked)
    other = "max_epochs" if option == "max_steps" else "max_steps"
    was = getattr(full, other)
    assert (f"{other}: {was} of {name} gives way to {length.split()[0]} " in said) == (was is not None)
    assert len(found.notices) == (used != asked) + (was is not None)

    assert found.decay_steps == found.max_steps
    if recipe is pde:
        check_stages(config.objective, found.schedule, found.max_steps, found.decay_steps)


@pytest.mark.parametrize("flags", ["", " --schedule.decay_steps 300", " --schedule.decay_steps 300 --max_steps 400"])
def test_a_resume_keeps_the_shortened_warm_up(
    flags: str, accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the flags that the notice of a longer run recommends."""
    kept = {"schedule.decay_steps": 6, "schedule.warmup": [20, 0]}
    monkeypatch.setattr(experiment, "values_of_first_start", lambda _: kept)
    config = loaded(mmdit, "demo", f"--max_steps 300{flags}", tmp_path)
    assert config.schedule.warmup_steps == 20
    found = experiment.resolve_length(config, accelerator, SAMPLES)
    assert found.schedule.warmup_steps == 0
    assert found.kept_flags == " --schedule.warmup_steps 0"
    (said,) = [notice for notice in found.notices if "warmup_steps" in notice]
    assert "20 is more than fits into the schedule of the first start: shortened to 0;" in said
    (longer,) = notices(found.schedule, 6, 300, found.kept_flags)
    command = "--schedule.decay_steps 300 --schedule.warmup_steps 0 --allow schedule.decay_steps"
    assert longer.endswith(command)
    assert f"{found.kept_flags} and --allow" in remedy_when_finished(found.schedule, 6, 6, found.kept_flags)
    # With the flag it is what the first start has used, and nothing was shortened.
    asked = loaded(mmdit, "demo", f"--max_steps 300{flags}{found.kept_flags}", tmp_path)
    again = experiment.resolve_length(asked, accelerator, SAMPLES)
    assert again.schedule.warmup_steps == 0
    assert again.kept_flags == ""


def test_a_warm_up_of_the_file_that_sets_the_epochs_fits_few_data(accelerator: Accelerator, tmp_path: Path) -> None:
    """Its author cannot know how many steps they are; who gives the warm-up on the command line can."""
    config = loaded(causal_lm, "causal_lm_tune", "", tmp_path)
    found = experiment.resolve_length(config, accelerator, 60)
    assert (config.max_epochs, found.max_steps, found.schedule.warmup_steps) == (2, 4, 0)
    (said,) = [notice for notice in found.notices if "warmup_steps" in notice]
    assert (
        "schedule.warmup_steps: 20 is more than fits into the 4 steps of this run's schedule: shortened to 0;" in said
    )
    asked = loaded(causal_lm, "causal_lm_tune", "--schedule.warmup_steps 20", tmp_path)
    with pytest.raises(UsageError, match=r"schedule.warmup_steps: 20: must not be more than max_epochs: 2 \(4 steps\)"):
        experiment.resolve_length(asked, accelerator, 60)


@pytest.mark.parametrize("length", [SHORT, *OTHERS])
def test_the_linter_reports_no_warm_up_that_the_start_shortens(length: str) -> None:
    origins = {"schedule.warmup_steps": "demo", length.removeprefix("--").split()[0]: "command line"}
    options = {"schedule.warmup_steps": 20, "global_batch_size": 32, "max_steps": None, "max_epochs": None}
    option, value = length.removeprefix("--").split()
    short = Facts(options | {option: float(value)}, dataset_size=SAMPLES, origins=origins)
    assert warmup_beyond_the_run(short) is None
    by_file = Facts(options | {option: float(value)}, dataset_size=SAMPLES, origins={})
    # max_epochs counts steps of data that the file does not know.
    assert (warmup_beyond_the_run(by_file) is None) == (option == "max_epochs")

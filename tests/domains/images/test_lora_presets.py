"""Presets of recipes/lora.py: each is executed at tiny size, and those by memory differ in what the machine decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from accel_train.commands.bundled import find_recipe, import_recipe
from accel_train.commands.lora_plan import INTENTS, OF_THE_MACHINE, presets_by_memory
from accel_train.config import UsageError
from accel_train.options.loading import read_tree
from accel_train.options.tree import flatten
from tests.domains.images import tiny_pipelines as tiny
from tests.domains.images.test_lora_recipe import WITHOUT_EFFECT, pictures

pytest.importorskip("diffusers")
pytest.importorskip("peft")
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.usefixtures("fresh")]
DAILY = {"lora_6gb", "lora_16gb"}
"""A base in nf4 and int8: the others differ in numbers alone, or have a base in bf16 as other tests have."""
PRESETS = Path(__file__).parents[3] / "recipes" / "presets"
SMALL = (
    "--global_batch_size 2 --micro_batch_size 1 --max_steps 2 --schedule.warmup_steps 1 --lora.rank 2 "
    "--data.resolutions 16 --data.bucket_step 4 --data.group_size 1 --data.heldout_fraction 0.2 "
    "--log.log_every 1 --log.progress_bar off "
    "--evaluation.every 0 --evaluation.samples 1 --evaluation.steps 1"
).split()
BY_MEMORY = [path.stem for path in presets_by_memory().values()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("presets")
    tiny.save("sd3", folder / "base")
    pictures(folder / "photos", 6)
    return folder


def train(folder: Path, preset: str, run: Path, *flags: str) -> int:
    recipe: Any = import_recipe(find_recipe("lora"))
    places = ("--base.source", str(folder / "base"), "--data.path", str(folder / "photos"), "--output_dir", str(run))
    cache = ("--data.cache_dir", str(folder / "cache"), "--base.prompt_tokens", str(tiny.LENGTH))
    return recipe.main([preset, *SMALL, *places, *cache, *flags])


@pytest.mark.parametrize(
    "preset",
    [pytest.param(name, marks=() if name in DAILY else pytest.mark.slow) for name in (*INTENTS.values(), *BY_MEMORY)],
)
def test_every_preset_trains(
    preset: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    options = read_tree(PRESETS / f"{preset}.yaml")
    bits = options["lora"]["base_precision"]
    if bits != "bf16":
        pytest.importorskip("bitsandbytes")
    run = tmp_path / "run"
    assert train(made, preset, run) == 0
    shown = capsys.readouterr().out + caplog.text
    assert f"activation checkpointing: {options['activation_checkpointing']['mode']}" in shown
    assert (f"on a base in {bits}" in shown) == (bits != "bf16")
    trained = load_file(run / "checkpoints" / "checkpoint_00000002" / "model.safetensors")
    untrained = [key for key, value in trained.items() if ".lora_B." in key and not value.abs().max() > 0]
    assert untrained == WITHOUT_EFFECT["sd3"]


@pytest.mark.slow  # a base in nf4 and int8 trains above, and one in float8 is used in tests/domains/language
def test_a_base_in_float8_trains(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert train(made, "lora_tune", run, "--lora.base_precision", "fp8") == 0
    assert "on a base in fp8" in capsys.readouterr().out
    trained = load_file(run / "checkpoints" / "checkpoint_00000002" / "model.safetensors")
    assert not any("base_layer" in key for key in trained)
    assert any(value.abs().max() > 0 for key, value in trained.items() if ".lora_B." in key)


def test_presets_by_memory_are_the_balanced_one_but_for_the_machine() -> None:
    assert list(presets_by_memory()) == [6, 8, 12, 16, 24, 48, 80, 141]
    balanced = flatten(read_tree(PRESETS / "lora_tune.yaml"))
    machines = tuple(f"{option}." for option in OF_THE_MACHINE)
    for path in presets_by_memory().values():
        assert "by simulated activations and arithmetic" in path.read_text()
        for option, value in flatten(read_tree(path)).items():
            if option not in (*OF_THE_MACHINE, "output_dir") and not option.startswith(machines):
                assert value == balanced[option], (path, option)


def test_only_the_cache_is_filled(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(made, "lora_tune", run, "--cache_only", "--data.cache_dir", str(tmp_path / "cache")) == 0
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) > 6
    assert not list(run.rglob("*.safetensors"))


def test_bits_need_a_base_that_names_its_files(made: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    with pytest.raises(UsageError, match=r"checkpoints.base: embed, but the frozen weights are quantised"):
        train(made, "lora_6gb", tmp_path / "run", "--checkpoints.base", "embed")

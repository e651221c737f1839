"""recipes/lora.py on a tiny pipeline of each family: trained, resumed, exported, and loaded by diffusers alone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

import accel_train
from accel_train import cli
from accel_train.commands.bundled import find_recipe, import_recipe
from accel_train.config import UsageError
from accel_train.domains.images.options import PictureDataConfig, PriorConfig
from accel_train.domains.images.pipelines import adapter_files, validation
from accel_train.store import commit
from tests.domains.images import tiny_pipelines as tiny
from tests.domains.images.drawn import UNREADABLE

pytest.importorskip("diffusers")
pytest.importorskip("peft")
# Of diffusers itself, when it reads transformers' classes.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.usefixtures("fresh")]
DAILY = {"sd1"}
"""The others are implied by test_families.py and test_objective.py, which have all of them."""
STEPS = 10
PROMPT = "a red flag"
WITHOUT_EFFECT = {"sd3": ["transformer_blocks.1.attn.add_q_proj.lora_B.default.weight"]}
"""What the last block reads of the prompts is kept, what it answers to them is not."""
PRIOR = ("--data.prior.path", "/nowhere/class", "--data.prior.caption", "a dog", "--data.prior.count", "2")
READ_BY_DIFFUSERS = ("sd1", "sd2", "sdxl", "flux2", "qwen_image", "z_image")
"""kohya's file. That of SD3 it does not know, that of Flux only in its real width: test_kohya.py has both."""


def pictures(folder: Path, count: int = 12) -> Path:
    """Pictures of two shapes, with captions."""
    folder.mkdir()
    noise = np.random.default_rng(0)
    for number in range(count):
        size = (40, 20) if number % 3 == 0 else (24, 24)
        Image.fromarray(noise.integers(0, 255, (*size, 3), dtype=np.uint8)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(("a red flag", "a cat", "two dogs in a wood")[number % 3])
    return folder


def settings(folder: Path, name: str) -> Path:
    """A file with the options of a short run."""
    side = tiny.SIDES.get(name, tiny.SIDE)
    length = "" if name in ("sd1", "sd2", "sdxl") else f", prompt_tokens: {tiny.LENGTH}"
    file = folder / "tiny.yaml"
    file.write_text(
        f"global_batch_size: 4\nmicro_batch_size: 2\nmax_steps: {STEPS}\nprecision: fp32\n"
        f"base: {{source: {folder / 'base'}{length}}}\nlora: {{rank: 3, alpha: 6}}\n"
        f"data: {{path: {folder / 'photos'}, resolutions: [{side}], bucket_step: 4, heldout_fraction: 0.2, "
        f"group_size: 2, cache_dir: {folder / 'cache'}}}\n"
        "optimizer: {lr: 2e-2, weight_decay: 0.0}\nschedule: {kind: constant, warmup_steps: 0}\n"
        "objective: {caption_dropout: 0.1}\nlog: {log_every: 1, progress_bar: off}\nema: {decay: 0.0}\n"
        "activation_checkpointing: {mode: none}\ncheckpoints: {save_every: 5, keep_last: 0}\n"
        f"evaluation: {{samples: 2, batch_size: 2, prompts: [{PROMPT}], steps: 2, side: {side}}}\n"
    )
    return file


def train(folder: Path, name: str, *flags: str) -> Path:
    recipe: Any = import_recipe(find_recipe("lora"))
    run = folder / name
    assert recipe.main([str(folder / "tiny.yaml"), "--output_dir", str(run), *flags]) == 0
    return run


def weights_of(run: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"checkpoint_{step:08d}" / "model.safetensors")


def drawn_by_diffusers(folder: Path, name: str, file: str | None, base: str = "base") -> np.ndarray[Any, Any]:
    """What a stranger gets from the base and the exported file, with diffusers alone and the prompt as a text."""
    from diffusers import DiffusionPipeline

    from accel_train import rng

    pipeline: Any = DiffusionPipeline.from_pretrained(folder / base)
    pipeline.set_progress_bar_config(disable=True)
    if file is not None:
        pipeline.load_lora_weights(folder / "out", weight_name=file)
    side = tiny.SIDES.get(name, tiny.SIDE)
    # Sana's own instruction before each prompt is not part of training.
    sana = {"use_resolution_binning": False, "complex_human_instruction": None}
    arguments: dict[str, Any] = sana if name == "sana" else {}
    if name not in ("sd1", "sd2", "sdxl"):
        arguments["max_sequence_length"] = tiny.LENGTH
    if name == "qwen_image":
        arguments["negative_prompt"] = ""
    generator = torch.Generator().manual_seed(rng.key(0, "lora/validation", 0) & (2**63 - 1))
    found = pipeline(
        prompt=PROMPT,
        height=side,
        width=side,
        num_inference_steps=2,
        generator=generator,
        output_type="np",
        **arguments,
    )
    return 255 * found.images[0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.slow) for name in tiny.PIPELINES]
)
def test_a_family_is_trained_resumed_exported_and_loaded(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.save(name, tmp_path / "base")
    pictures(tmp_path / "photos")
    settings(tmp_path, name)
    run = train(tmp_path, "whole")
    trained = weights_of(run)
    assert sum(".lora_B." in key for key in trained) > 0
    untrained = [key for key, value in trained.items() if ".lora_B." in key and not value.abs().max() > 0]
    assert untrained == WITHOUT_EFFECT.get(name, [])

    # A run that was ended after five steps continues to the same bits, wherever the frozen weights lay.
    resumed = train(tmp_path, "halves", "--max_steps", "5", "--offload_frozen", "--base.offload_encoders")
    train(tmp_path, "halves")
    again = weights_of(resumed)
    assert all(torch.equal(again[key], value) for key, value in trained.items())

    assert cli._main(["checkpoints", "export", str(run), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    adapter = {key for key in trained if ".lora_" in key}
    assert f"{adapter_files.DIFFUSERS_FILE}: {len(adapter)} tensors" in printed
    of_run = np.asarray(Image.open(run / "report" / "pictures" / f"step_{STEPS:08d}.png"), np.float64)
    exported = drawn_by_diffusers(tmp_path, name, adapter_files.DIFFUSERS_FILE)
    # The picture of the run is in whole levels.
    assert np.abs(of_run - exported).max() < 0.6
    plain = drawn_by_diffusers(tmp_path, name, None)
    assert np.abs(plain - exported).max() > 3
    file = adapter_files.KOHYA_FILE
    if name == "sana":
        assert f"without {file}: kohya's scripts have no names for Sana; use {adapter_files.DIFFUSERS_FILE}" in printed
    else:
        assert f"{file}: {len(adapter) // 2} layers" in printed
    # And the whole pipeline that the adapter makes of its base, without the base.
    assert cli._main(["export", str(run), str(tmp_path / "merged"), "--merged"]) == 0
    assert "a diffusers pipeline" in capsys.readouterr().out
    assert not (tmp_path / "merged" / "adapters").exists()
    assert np.abs(drawn_by_diffusers(tmp_path, name, None, "merged") - exported).max() < 0.6
    if name in READ_BY_DIFFUSERS:
        assert np.abs(drawn_by_diffusers(tmp_path, name, file) - exported).max() < 1e-2

    base = commit.verify(run / "checkpoints" / f"checkpoint_{STEPS:08d}").manifest["base"]
    assert base["source"] == str(tmp_path / "base")
    loaded = accel_train.load(run)
    mine = np.asarray(loaded(PROMPT, seed=7), np.float64)
    assert np.array_equal(mine, np.asarray(accel_train.load(tmp_path / "out")(PROMPT, seed=7)))
    without = np.asarray(loaded(PROMPT, seed=7, adapter="base"), np.float64)
    assert np.abs(mine - without).max() > 3
    if name == "sd1":
        with pytest.raises(UsageError, match=r"lora\.alpha 3: .* were trained with other values, .* --lora\.alpha 6$"):
            train(tmp_path, "other", "--init_from", str(run), "--lora.alpha", "3")
        with pytest.raises(UsageError, match=r"side 17: .* multiples of 8 \(its VAE reduces by 2\); give 16 or 24"):
            loaded(PROMPT, side=17)


def test_a_folder_with_a_file_of_another_program_is_refused_with_the_command(made: Path, tmp_path: Path) -> None:
    run = train(made, "source", "--max_steps", "1", "--evaluation.every", "0")
    out = tmp_path / "out"
    assert cli._main(["export", str(run), str(out)]) == 0
    (tmp_path / "lone").mkdir()
    shutil.copy(out / adapter_files.KOHYA_FILE, tmp_path / "lone")
    command = r"`accel-train checkpoints convert FILE FOLDER --base BASE`"
    with pytest.raises(UsageError, match=rf"or a folder of peft, is required; .*with {command}"):
        train(made, "refused", "--init_from", str(tmp_path / "lone"))
    with pytest.raises(UsageError, match=rf"^adapters a=.*lone: .* or a folder of peft; .*with {command}"):
        accel_train.load(made / "base", adapters={"a": tmp_path / "lone"})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    tiny.save("sd1", folder / "base")
    pictures(folder / "photos")
    settings(folder, "sd1")
    return folder


@pytest.mark.slow  # test_scanning.py leaves out a run's own folders
def test_a_run_below_its_pictures_does_not_learn_its_own_report(made: Path, tmp_path: Path) -> None:
    photos = pictures(tmp_path / "photos")
    flags = ("--data.path", str(photos), "--data.default_caption", "a curve")
    run = photos / "run"
    train(made, str(run), *flags, "--max_steps", "1")
    assert list(run.glob("report/**/*.png"))
    # A resume with other data is refused.
    train(made, str(run), *flags, "--max_steps", "2")
    assert (run / "checkpoints" / "checkpoint_00000002").is_dir()


def test_class_pictures_are_not_drawn_among_those_of_training(tmp_path: Path) -> None:
    prior = PriorConfig(path=str(tmp_path / "photos" / "class"), caption="a dog", count=4)
    with pytest.raises(UsageError, match=r"data.prior.path '.*class': is inside data.path '.*photos'"):
        PictureDataConfig(path=str(tmp_path / "photos"), prior=prior)


@pytest.mark.slow  # the test above exports the plain variant
@pytest.mark.parametrize("variant", ["rslora", "dora"])
def test_variants_are_loaded_by_diffusers(variant: str, made: Path, tmp_path: Path) -> None:
    flags = ("--lora.variant", variant, "--max_steps", "4", "--evaluation.guidance", "7.5")
    run = train(made, variant, *flags)
    out = made / "out"
    assert cli._main(["checkpoints", "export", str(run), str(out)]) == 0
    of_run = np.asarray(Image.open(run / "report" / "pictures" / "step_00000004.png"), np.float64)
    exported = drawn_by_diffusers(made, "sd1", adapter_files.DIFFUSERS_FILE)
    assert np.abs(of_run - exported).max() < 0.6
    has_kohya = (out / adapter_files.KOHYA_FILE).exists()
    assert has_kohya == (variant == "rslora")
    if has_kohya:
        assert np.abs(drawn_by_diffusers(made, "sd1", adapter_files.KOHYA_FILE) - exported).max() < 1e-2
        with safe_open(out / adapter_files.KOHYA_FILE, "pt") as file:
            metadata = file.metadata()
        assert metadata["ss_network_dim"] == "3"
        assert float(metadata["ss_network_alpha"]) == pytest.approx(6 * 3**0.5)
        assert metadata["ss_base_model_version"] == "sd_v1"
    out.rename(tmp_path / "out")


@pytest.mark.slow  # those on our own model do in test_trained_mmdit.py
def test_adapters_on_a_pipeline_of_diffusers_stand_side_by_side(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = train(made, "one", "--max_steps", "2"), train(made, "two", "--max_steps", "2", "--lora.rank", "2")
    both = accel_train.load(one, adapters={"two": two})
    drawn = [np.asarray(both(PROMPT, seed=7, adapter=name)) for name in (None, "two", "base", "default")]
    assert np.array_equal(drawn[0], np.asarray(accel_train.load(one)(PROMPT, seed=7)))
    assert np.array_equal(drawn[1], np.asarray(accel_train.load(two)(PROMPT, seed=7)))
    assert np.array_equal(drawn[3], drawn[0])
    assert len({picture.tobytes() for picture in drawn[:3]}) == 3

    # As diffusers or peft alone would have written it, on a base that nothing names.
    assert cli._main(["checkpoints", "export", str(two), str(tmp_path / "plain")]) == 0
    for name in ("config.json", "pipeline.json", "README.md"):
        (tmp_path / "plain" / name).unlink(missing_ok=True)
    both.attach({"plain": tmp_path / "plain"})
    assert "does not record the files of its base" in caplog.text
    assert np.array_equal(drawn[1], np.asarray(both(PROMPT, seed=7, adapter="plain")))


@pytest.mark.parametrize("scale", ["0", "-0.1", "NaN", "Infinity"])
def test_a_vae_that_scales_its_latents_away_is_refused(scale: str, made: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(made / "base", base)
    config = base / "vae" / "config.json"
    config.write_text(re.sub(r'"scaling_factor": [0-9.]+', f'"scaling_factor": {scale}', config.read_text()))
    with pytest.raises(UsageError, match=r"base.source .*: the config of its VAE has scaling_factor .* above 0 is"):
        train(made, "scaled", "--base.source", str(base))


def test_the_file_of_diffusers_is_the_one_that_it_would_write(made: Path, tmp_path: Path) -> None:
    from diffusers import StableDiffusionPipeline

    adapter = {"base_model.model.a.to_q.lora_A.weight": torch.ones(2, 3)}
    settings = {"r": 2, "lora_alpha": 4.0, "target_modules": ["to_q"], "inference_mode": True}
    adapter_files.write_diffusers(tmp_path, adapter, settings, "unet")
    kept = {name: value for name, value in settings.items() if name != "inference_mode"}
    theirs = tmp_path / "theirs"
    layers: Any = {"a.to_q.lora_A.weight": torch.ones(2, 3)}
    StableDiffusionPipeline.save_lora_weights(theirs, unet_lora_layers=layers, unet_lora_adapter_metadata=kept)
    assert contents(tmp_path / adapter_files.DIFFUSERS_FILE) == contents(theirs / adapter_files.DIFFUSERS_FILE)


def contents(path: Path) -> tuple[dict[str, object], bytes]:
    """Header and values of a safetensors file, whose writer orders the metadata by chance."""
    stored = path.read_bytes()
    length = int.from_bytes(stored[:8], "little")
    return json.loads(stored[8 : 8 + length]), stored[8 + length :]


def labels_of(grid: Image.Image, width: int, height: int) -> tuple[Image.Image, list[Image.Image]]:
    """What is above pictures of this size in all, and the labels to the left of them, one for each row."""
    left, top = grid.width - width, grid.height - height
    step = validation.CELL + validation.MARGIN
    rows = range(top, grid.height, step)
    return grid.crop((left, 0, grid.width, top)), [grid.crop((0, row, left, row + step)) for row in rows]


def test_pictures_of_all_steps_are_in_one_grid(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "step_5 (copy).png").write_text("of a person")
    side = validation.CELL
    dark = torch.zeros(3, side, side)
    for step in (5, 10):
        validation.report(tmp_path, step, [torch.full((3, side, side), step / 10), dark], ["a cat", "a dog"])
    # Resumed before the second: its row is of another training.
    validation.report(tmp_path, 7, [dark, dark], ["a cat", "a dog"])
    both = 2 * side + validation.MARGIN
    with Image.open(tmp_path / "pictures.png") as grid:
        left, top = grid.width - both, grid.height - both
        assert grid.getpixel((left + 2, top + 2)) == (191, 191, 191)
        assert grid.getpixel((left + 2, top + side + validation.MARGIN + 2)) == (128, 128, 128)
        head, (first, second) = labels_of(grid, both, both)
    for text in (head.crop((0, 0, side, head.height)), head.crop((side, 0, *head.size)), first, second):
        assert text.getextrema() != ((255, 255),) * 3, "without a label"
    assert first.tobytes() != second.tobytes()


def test_a_row_of_other_prompts_is_marked(tmp_path: Path) -> None:
    side = validation.CELL
    labels: list[bytes] = []
    for prompts in (["a cat"], ["a dog"]):
        validation.report(tmp_path, 5, [torch.zeros(3, side, side)], prompts)
        validation.report(tmp_path, 6, [torch.zeros(3, side, side)], ["a dog"])
        with Image.open(tmp_path / "pictures.png") as grid:
            _, rows = labels_of(grid, side, 2 * side + validation.MARGIN)
            # Only the step's letters.
            labels.append(rows[0].tobytes())
            assert rows[1].getextrema() != ((255, 255),) * 3
    assert labels[0] != labels[1]


def test_the_grid_of_many_steps_has_ten_evenly_spaced_rows(tmp_path: Path) -> None:
    for step in range(1, 29):
        validation.report(tmp_path, step, [torch.full((3, 8, 8), step / 50)], ["a cat"])
    rows = [tmp_path / "pictures" / f"step_{step:08d}.png" for step in range(1, 29, 3)]
    scale = validation.CELL // 8
    with Image.open(tmp_path / "pictures.png") as grid:
        left, top = grid.width - 8 * scale, grid.height - 10 * 8 * scale - 9 * validation.MARGIN
        for number, file in enumerate(rows):
            above = top + number * (8 * scale + validation.MARGIN)
            shown = grid.crop((left, above, grid.width, above + 8 * scale))
            with Image.open(file) as row:
                assert shown.resize((8, 8), Image.Resampling.NEAREST).tobytes() == row.tobytes()
    assert len(list((tmp_path / "pictures").iterdir())) == 28


@pytest.mark.parametrize("content", UNREADABLE)
def test_an_earlier_row_that_cannot_be_read_is_named(
    content: Callable[[], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    validation.report(tmp_path, 5, [torch.zeros(3, 8, 8)], ["a cat"])
    row = tmp_path / "pictures" / "step_00000005.png"
    row.write_bytes(content())
    validation.report(tmp_path, 10, [torch.zeros(3, 8, 8)], ["a cat"])
    assert f"pictures.png could not be written ({row}: " in caplog.text
    assert (tmp_path / "pictures" / "step_00000010.png").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lora.rank", "0"), r"lora\.rank: 0, and this recipe trains adapters alone"),
        (("--base.source", "None"), r"base.source: adapters need a pretrained diffusers pipeline"),
        (("--data.bucket_step", "3"), r"data.bucket_step 3: Stable Diffusion 1.x and 2.x takes sides that are mult"),
        (("--evaluation.side", "17"), r"evaluation.side 17: .* multiples of 8 .*; give 16 or 24"),
        (("--evaluation.side", "5"), r"evaluation.side 5: .*; give 8$"),
        (
            ("--evaluation.side", "None", "--data.resolutions", "20"),
            r"resolutions \[20\]: the first is used because evaluation.side",
        ),
        (("--data.resolutions", "20", *PRIOR), r"data.prior.count 2 draws pictures of 20x20: .*; give 16 or 24"),
        # Before the pictures of the class are drawn.
        (("--times.weighting", "cosmap", *PRIOR), r"times.weighting cosmap: .* predicts epsilon"),
        (("--base.guidance", "3", *PRIOR), r"base.guidance: .*whose denoiser takes no guidance scale"),
        (("--data.mask.source", "files", *PRIOR), r"data.mask.source files: no picture has a mask"),
        (("--network_dim", "8"), r"network_dim.*--lora.rank"),
        (("--blocks_to_swap", "8"), r"blocks_to_swap.*--offload_frozen"),
        (("--offload_frozen", "--checkpoints.base", "embed"), r"offload_frozen: checkpoints would contain the frozen"),
    ],
)
def test_wrong_options(flags: tuple[str, ...], message: str, made: Path, tmp_path: Path) -> None:
    with pytest.raises((UsageError, SystemExit), match=message):
        train(made, "wrong", *(word.replace("/nowhere", str(tmp_path)) for word in flags))
    assert not (made / "wrong" / "checkpoints").exists()
    assert not (tmp_path / "class").exists()


def test_a_scale_of_guidance_below_0_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"evaluation.guidance: -1 is refused: a value greater than or equal to 0"):
        import_recipe(find_recipe("lora")).main(["--evaluation.guidance", "-1", "--output_dir", str(tmp_path / "run")])

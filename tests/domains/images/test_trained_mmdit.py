"""Our own MMDiT as a base of adapters: its captions, objective and sampler against recipes/mmdit.py, and the recipe."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

import accel_train
from accel_train import cli
from accel_train.commands.bundled import find_recipe, import_recipe
from accel_train.config import UsageError
from accel_train.domains.diffusion import latents
from accel_train.domains.diffusion.latents import LatentDiffusionConfig
from accel_train.domains.diffusion.timesteps import TimeConfig
from accel_train.domains.images.pipeline import PicturePipeline
from accel_train.domains.images.pipelines.drawing import draw_picture
from accel_train.domains.images.pipelines.loading import BaseConfig, find_base
from accel_train.domains.images.pipelines.objective import Denoising, ObjectiveConfig
from accel_train.domains.images.trained_mmdit.finding import MAKE_DEMO
from accel_train.domains.images.trained_mmdit.run_base import LEVELS, MMDiTBase
from accel_train.domains.models import adapters
from accel_train.domains.models.lora import LoraConfig, apply_lora, with_effect
from accel_train.domains.models.patches import as_grid, from_patches, joined, to_patches
from accel_train.domains.models.vae import load_vae
from accel_train.domains.text.dataset import load_assets
from accel_train.domains.text.trained_model import load_both_ways
from accel_train.store import commit
from accel_train.store.exports.peft_layout import ADAPTER
from tests.domains.images import tiny_pipelines as tiny
from tests.trained import CAPTIONS, picture_run, text_run

pytest.importorskip("peft")
COUNT = 3
PROMPTS = CAPTIONS[:COUNT]
CPU = torch.device("cpu")
PROCESSES = {
    "x0": LatentDiffusionConfig(prediction="x0"),
    "velocity": LatentDiffusionConfig(),
    "v": LatentDiffusionConfig(kind="ddpm", schedule="cosine", prediction="v"),
}


def base_of(run: Path) -> MMDiTBase:
    found = find_base(BaseConfig(source=str(run)))
    assert isinstance(found, MMDiTBase)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return picture_run(tmp_path_factory.mktemp("base") / "run")


def conditioning(base: MMDiTBase, captions: list[str]) -> dict[str, Tensor]:
    return base.family.encode(base.components(CPU), captions, None)


@pytest.fixture(scope="module")
def latent_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_on_latents(tmp_path_factory.mktemp("latent"))


def run_on_latents(folder: Path) -> Path:
    """A run on the latents of an autoencoder: 12 channels, half the sides, patches of 2 x 2."""
    torch.manual_seed(5)
    tiny.vae(12).save_pretrained(folder / "vae")
    return picture_run(folder / "run", vae=load_vae(str(folder / "vae"), None, "vae").reference)


def test_a_base_on_latents_has_the_autoencoder_of_its_training(latent_run: Path, tmp_path: Path) -> None:
    from diffusers import AutoencoderKL

    base = base_of(latent_run)
    assert base.patch == 2
    assert base.largest == (8, 8)
    parts = base.components(CPU)
    assert parts.vae_scale_factor == 4
    vae: Any = AutoencoderKL.from_pretrained(latent_run.parent / "vae")
    pixels = some_pictures().permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        mean = vae.encode(pixels).latent_dist.mean
        decoded = vae.decode(mean).sample
    encoded = parts.vae.encode(pixels).latent  # (B, 48, 2, 2)
    assert encoded.shape == (COUNT, 48, 2, 2)
    assert torch.allclose(joined(encoded, 2), mean, atol=1e-6)
    assert torch.allclose(parts.vae.decode(encoded), decoded, atol=1e-5)
    # The picture of a prompt is that of its latents, which are tested against the recipe.
    drawn = tmp_path / "drawn"
    assert cli._main(["sample", str(latent_run), "--prompt", PROMPTS[0], "--seed", "3", "--output", str(drawn)]) == 0
    (file,) = drawn.glob("*.png")
    pipeline: Any = accel_train.load(latent_run)
    latents = pipeline.latents_from_texts(PROMPTS[:1], seed=3)
    with torch.no_grad():
        expected = vae.decode(joined(as_grid(latents, (2, 2)), 2)).sample
    levels = (expected[0].permute(1, 2, 0).clamp(-1, 1) + 1) * 127.5
    found = torch.from_numpy(np.array(Image.open(file), np.float32))
    assert (found - levels).abs().max() < 0.6


def test_another_autoencoder_than_that_of_the_training_is_refused(tmp_path: Path) -> None:
    """Other weights under the same name."""
    run = run_on_latents(tmp_path)
    torch.manual_seed(6)
    tiny.vae(12).save_pretrained(tmp_path / "vae")
    with pytest.raises(UsageError, match="the model was trained on latents of"):
        base_of(run).components(CPU)


@pytest.mark.slow  # the tests below train adapters on a base on pixels, and the one above reads that on latents
def test_adapters_on_a_base_on_latents(latent_run: Path, tmp_path: Path) -> None:
    recipe: Any = import_recipe(find_recipe("lora"))
    options = settings(tmp_path, latent_run)
    assert recipe.main([*options, "--output_dir", str(tmp_path / "tuned")]) == 0
    tuned: Any = accel_train.load(tmp_path / "tuned")
    assert tuned(PROMPTS[0], seed=1).size == (8, 8)


def test_captions_have_the_tokens_of_training(run: Path) -> None:
    base = base_of(run)
    captions = [*PROMPTS, "unseen words of many, many, many, many, many, many tokens", "[MASK]", "é", ""]
    found = conditioning(base, captions)
    expected = load_assets(base.directory / "assets").tokenise(captions)
    assert torch.equal(found["tokens"], expected["tokens"])
    assert torch.equal(found["text_mask"], expected["text_mask"])
    mask_id = load_assets(base.directory / "assets").tokenizer.mask_id
    assert torch.equal(found["absent"], expected["tokens"].masked_fill(expected["maskable"], mask_id))
    assert found["text_time"].tolist() == [0.0] * (len(captions) - 1) + [1.0]


def process_of(base: MMDiTBase, dropout: float = 0.0) -> Denoising:
    parts = base.components(CPU)
    options = ObjectiveConfig(caption_dropout=dropout)
    empty = conditioning(base, [""])
    return Denoising(base.family, base.levels(), parts.vae, base.shape, empty, options, TimeConfig())


def batch_of(base: MMDiTBase, pictures: Tensor) -> dict[str, Tensor]:
    parts = base.components(CPU)
    pixels = pictures.permute(0, 3, 1, 2).float() / 127.5 - 1
    size = torch.tensor([[8, 8]]).expand(COUNT, 2)
    numbers = torch.arange(COUNT)
    return {
        "mean": parts.vae.encode(pixels).latent,
        **conditioning(base, PROMPTS),
        **dict.fromkeys(("original_size", "crop_top_left", "target_size"), size),
        **dict.fromkeys(("sample", "occurrence", "position"), numbers),
    }


def some_pictures() -> Tensor:
    return torch.randint(256, (COUNT, 8, 8, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


@pytest.mark.parametrize("name", PROCESSES)
def test_the_loss_is_that_of_the_base(name: str, tmp_path: Path) -> None:
    """On the same pictures, noise and times, by the functions that recipes/mmdit.py calls."""
    diffusion = PROCESSES[name]
    base = base_of(picture_run(tmp_path / "run", diffusion))
    model: Any = base.denoiser("fp32").eval()
    pictures = some_pictures()
    process = process_of(base)
    inputs = process.noised(batch_of(base, pictures), 3, 5, COUNT)
    with torch.no_grad():
        found = process.errors(model, inputs)

    assets = load_assets(base.directory / "assets")
    clean = assets.normalise(to_patches(pictures, 4))
    time = inputs["timestep"]
    # With v and velocity too the noise is what is left of the noisy latent.
    a, b = latents.coefficients(time, diffusion)
    noisy = inputs["noisy"].flatten(2).transpose(1, 2)
    noise = (noisy - a.view(-1, 1, 1) * clean) / b.view(-1, 1, 1)
    texts = assets.tokenise(PROMPTS)
    with torch.no_grad():
        given = latents.add_noise(clean, noise, time, diffusion)
        predicted = model(texts["tokens"], given, torch.zeros(COUNT), time, texts["text_mask"]).latents
    expected = latents.losses(predicted, latents.target(clean, noise, time, diffusion), diffusion)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_times_are_spread_and_weighted_as_in_training(run: Path, tmp_path: Path) -> None:
    levels = base_of(run).levels()
    assert len(levels) == LEVELS
    middle = (torch.arange(LEVELS) + 0.5) / LEVELS
    torch.testing.assert_close(levels.timesteps, 3 * middle / (1 + 2 * middle))
    torch.testing.assert_close(levels.a, 1 - levels.timesteps)
    assert levels.prediction == "sample"
    assert levels.weight is None

    options = {"density": "logit_normal", "logit_mean": 1.2, "logit_std": 1.2, "weighting": "sigma_sqrt"}
    weighted = base_of(picture_run(tmp_path / "run", times=options))
    process = process_of(weighted)
    normal = torch.distributions.Normal(1.2, 1.2).icdf(middle.double()).float()
    torch.testing.assert_close(process.levels.timesteps, torch.sigmoid(normal))
    # On x0 of a flow, the squared error of the velocity.
    level = torch.tensor([0, 500, 999])
    torch.testing.assert_close(process.weights(level), torch.sigmoid(normal[level]) ** -2)


def test_a_dropped_caption_is_absent_as_in_training(run: Path) -> None:
    base = base_of(run)
    batch = batch_of(base, some_pictures())
    inputs = process_of(base, dropout=1.0).noised(batch, 3, 5, COUNT)
    assert inputs["text_time"].tolist() == [1.0] * COUNT
    assert torch.equal(inputs["tokens"], batch["absent"])
    assert torch.equal(inputs["text_mask"], batch["text_mask"])
    kept = process_of(base).noised(batch, 3, 5, COUNT)
    assert torch.equal(kept["tokens"], batch["tokens"])


def test_a_picture_is_drawn_as_the_base_draws_it(run: Path) -> None:
    """With its guidance and shift, from the same noise, by the samplers of recipes/mmdit.py."""
    base = base_of(run)
    prompt = conditioning(base, PROMPTS[:1])
    pipeline = base.pipeline(CPU)
    drawn = draw_picture(pipeline, base.family, base.family.sample(prompt, {}), 77, (8, 8), 3, None)

    both, assets = load_both_ways(base.directory)
    batch = {**assets.tokenise(PROMPTS[:1]), "weight": torch.ones(1), "sample": torch.tensor([77])}
    batch["latent"] = torch.zeros(1, 4, 48)
    # Noise is keyed by seed and sample. The pipeline has the seed of the generator in the second.
    sampled = assets.denormalise(replace(both, seed=0).sample_latents(batch))
    expected = from_patches(sampled, (2, 2), 4)[0]
    levels = ((drawn.permute(1, 2, 0) + 1) * 127.5).round().to(torch.uint8)
    assert (levels.int() - expected.int()).abs().max() <= 1
    assert levels.float().std() > 10


def test_patches_are_those_of_the_rows() -> None:
    pictures = some_pictures()
    tokens = to_patches(pictures, 4)
    assert torch.equal(from_patches(tokens, (2, 2), 4), pictures)
    assert torch.equal(tokens[0, 1].view(4, 4, 3), pictures[0, :4, 4:].float() / 127.5 - 1)
    assert as_grid(tokens, (2, 2)).shape == (COUNT, 48, 2, 2)


# ------------------------------------------------------------------------------------------------------- the recipe
def settings(folder: Path, base: Path) -> list[str]:
    """Options of a short run on the bundled flags."""
    file = folder / "tiny.yaml"
    file.write_text(
        "global_batch_size: 4\nmicro_batch_size: 4\nmax_steps: 4\nprecision: fp32\n"
        f"base: {{source: {base}}}\nlora: {{rank: 2}}\n"
        f"data: {{path: 'emoji:flags', resolutions: [8], bucket_step: 4, max_aspect: 1.0, heldout_fraction: 0.227, "
        f"group_size: 1, min_side: 8, cache_dir: {folder / 'cache'}}}\n"
        "objective: {caption_dropout: 0.5}\noptimizer: {lr: 5e-2, weight_decay: 0.0}\n"
        "schedule: {kind: constant, warmup_steps: 0}\nlog: {log_every: 1, progress_bar: off}\n"
        "ema: {decay: 0.5}\ncheckpoints: {save_every: 2, keep_last: 0}\n"
        "evaluation: {samples: 4, batch_size: 4, steps: 2, every: 2, heldout_prompts: 3, prompts: [red apple]}\n"
    )
    return [str(file)]


def train(folder: Path, base: Path, name: str, *flags: str) -> Path:
    recipe: Any = import_recipe(find_recipe("lora"))
    assert recipe.main([*settings(folder, base), "--output_dir", str(folder / name), *flags]) == 0
    return folder / name


def without_gradient(base: MMDiTBase, model: Any, targets: tuple[str, ...]) -> set[str]:
    """Layers whose adapter gets no gradient."""
    apply_lora(model, LoraConfig(rank=2, targets=targets), "fp32")
    process = process_of(base)
    process.errors(model, process.noised(batch_of(base, some_pictures()), 0, 1, COUNT)).sum().backward()
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    return {name.partition(".lora_")[0] for name, value in trained.items() if value.grad is None}


def test_only_layers_without_influence_get_no_adapter(run: Path) -> None:
    base = base_of(run)
    model = base.denoiser("fp32")
    idle = base.family.idle(model)
    found = with_effect(model, ("all-linear", "text_head"), idle)
    assert without_gradient(base, model, found) == set()
    assert without_gradient(base, base.denoiser("fp32"), ("all-linear", "text_head")) == idle
    with pytest.raises(UsageError, match="text_head have no influence"):
        with_effect(base.denoiser("fp32"), ("text_head",), idle)


@pytest.fixture(scope="module")
def trained(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("lora"), run, "lora")


def pixels(image: Image.Image) -> bytes:
    return image.tobytes()


def weights_of(run: Path, step: int) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / f"checkpoint_{step:08d}" / "model.safetensors")


@pytest.mark.slow  # test_lora_recipe.py resumes on a pipeline every day
def test_a_run_resumes_to_the_same_bits(run: Path, trained: Path) -> None:
    """And an evaluation, which takes the adapter off and on again, changes nothing in the training."""
    halves = train(trained.parent, run, "halves", "--max_steps", "2")
    train(trained.parent, run, "halves", "--evaluation.every", "0")
    expected = weights_of(trained, 4)
    found = weights_of(halves, 4)
    assert found.keys() == expected.keys()
    assert all(".lora_" in name for name in expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert any(float(value.abs().max()) > 0 for name, value in expected.items() if ".lora_B." in name)


def test_with_the_adapter_off_pictures_are_those_of_the_base_bit_for_bit(run: Path, trained: Path) -> None:
    loaded = accel_train.load(trained)
    base = base_of(run)
    alone = base.pipeline(CPU)
    for number, prompt in enumerate([*PROMPTS, "andorra flag, country flag"]):
        given = conditioning(base, [prompt])
        expected = draw_picture(alone, base.family, base.family.sample(given, {}), number, (8, 8), 2, None)
        off = loaded.draw(prompt, steps=2, side=8, seed=number, adapter="base")
        assert torch.equal(off, expected)
        on = loaded.draw(prompt, steps=2, side=8, seed=number)
        assert not torch.equal(on, expected)


def test_adapters_stand_side_by_side(run: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each draws what it draws alone, bit for bit, whatever else is on the base."""
    other = train(trained.parent, run, "other", "--lora.rank", "2", "--max_steps", "2", "--optimizer.lr", "0.1")
    both = accel_train.load(trained, adapters={"other": other})
    assert both.adapters == ("default", "other")
    drawn = [both.draw(PROMPTS[0], steps=2, side=8, adapter=name) for name in (None, "other", "base", "default")]
    assert torch.equal(drawn[0], accel_train.load(trained).draw(PROMPTS[0], steps=2, side=8))
    assert torch.equal(drawn[1], accel_train.load(other).draw(PROMPTS[0], steps=2, side=8))
    assert torch.equal(drawn[3], drawn[0])
    assert len({pixels.numpy().tobytes() for pixels in drawn[:3]}) == 3

    with pytest.raises(UsageError, match=r"adapter 'othr'.*did you mean 'other'"):
        both.draw(PROMPTS[0], adapter="othr")
    with pytest.raises(UsageError, match="'other': is in use"):
        both.attach({"other": other / "checkpoints" / "checkpoint_00000002"})
    with pytest.raises(UsageError, match="contains a whole model, not adapters"):
        accel_train.load(trained, adapters={"base_run": run})

    words = ["sample", str(trained), "--prompt", PROMPTS[0], "--adapters", f"other={other}", "--adapter", "other"]
    assert cli._main([*words, "--steps", "2", "--side", "8", "--output", str(trained.parent / "drawn")]) == 0
    (file,) = (trained.parent / "drawn").glob("*.png")
    with Image.open(file) as image:
        assert image.tobytes() == both(PROMPTS[0], steps=2, side=8, adapter="other").tobytes()


def test_an_export_draws_as_the_run_and_merged_as_apart(
    run: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli._main(["export", str(trained), str(tmp_path / "out"), "--weights", "ema"]) == 0
    assert "diffusers has no MMDiT of recipes/mmdit.py" in capsys.readouterr().out
    of_run = accel_train.load(trained)
    exported = accel_train.load(tmp_path / "out")
    expected = of_run(PROMPTS[0], steps=2)
    assert pixels(exported(PROMPTS[0], steps=2)) == pixels(expected)
    assert verify(tmp_path / "out", "verify.py") == 0
    assert verify(tmp_path / "out", "verify.py", str(base_of(run).directory)) == 0

    apart = of_run.draw(PROMPTS[0], steps=2)
    assert cli._main(["export", str(trained), str(tmp_path / "merged"), "--weights", "ema", "--merged"]) == 0
    assert "model.py with torch alone reproduces" in capsys.readouterr().out
    whole = base_of(tmp_path / "merged")
    parts = whole.pipeline(CPU)
    given = whole.family.sample(conditioning(whole, PROMPTS[:1]), {})
    drawn = draw_picture(parts, whole.family, given, 0, (8, 8), 2, None)
    assert (drawn - apart).abs().max() < 1e-4
    adapters.merge_adapter(of_run.model, ADAPTER)
    merged = of_run.draw(PROMPTS[0], steps=2)
    torch.testing.assert_close(merged, apart, rtol=0, atol=1e-4)

    # As peft itself reads it.
    import peft

    model: Any = base_of(run).denoiser("fp32").eval()
    wrapped: Any = peft.PeftModel.from_pretrained(model, str(tmp_path / "out"))
    sizes = {name: p.shape for name, p in wrapped.named_parameters() if ".lora_" in name}
    assert len(sizes) == len(load_file(tmp_path / "out" / "adapter_model.safetensors"))


def test_a_merged_export_keeps_the_times_of_the_base(tmp_path: Path) -> None:
    """Its experiment.json has those of the adapter's run, which came on top of the base's."""
    options: dict[str, Any] = {"density": "logit_normal", "logit_mean": 1.2, "weighting": "sigma_sqrt"}
    base = picture_run(tmp_path / "run", times=options)
    short = ["--max_steps", "1", "--evaluation.heldout_prompts", "0", "--evaluation.prompts", "[]"]
    tuned = train(tmp_path, base, "tuned", "--times.shift", "2", *short)
    merged = tmp_path / "merged"
    assert cli._main(["export", str(tuned), str(merged), "--merged"]) == 0
    assert base_of(merged).times == base_of(base).times == TimeConfig(**options)


def verify(out: Path, *command: str) -> int:
    return subprocess.run([sys.executable, "-I", "-S", *command], cwd=out, check=False, capture_output=True).returncode


def test_an_export_notices_a_flipped_bit(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli._main(["export", str(trained), str(out)]) == 0
    file = out / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert verify(out, "verify.py") == 1
    with pytest.raises(UsageError, match=r"adapter_model\.safetensors changed since the export"):
        accel_train.load(out)


def test_sample_draws_a_file(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sample", str(trained), "--prompt", "red flag", "--output", str(tmp_path / "drawn"), "--steps", "2"]
    assert cli._main(words) == 0
    (file,) = (tmp_path / "drawn").glob("*.png")
    with Image.open(file) as drawn:
        assert drawn.size == (8, 8)


def test_a_prompt_is_drawn_as_training_reads_a_caption(trained: Path) -> None:
    pipeline = accel_train.load(trained, pipeline=PicturePipeline)
    assert torch.equal(pipeline.draw(" red\n flag ", steps=2), pipeline.draw("red flag", steps=2))


def test_the_report_has_pictures_before_and_after(trained: Path) -> None:
    with Image.open(trained / "report" / "before_after.png") as grid:
        assert grid.height > 3 * 96


@pytest.mark.slow  # another base is refused in test_base_definition.py and in tests/domains/language/test_adapted.py
def test_load_refuses_another_base(trained: Path, tmp_path: Path) -> None:
    base = picture_run(tmp_path / "base")
    mine = train(tmp_path, base, "mine", "--max_steps", "2", "--evaluation.heldout_prompts", "0")
    accel_train.load(mine)
    (file,) = base.glob("checkpoints/*/model.safetensors")
    changed = load_file(file)
    changed["latent_head.project.bias"] += 1e-3
    save_file(changed, file)
    directory = file.parent
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = commit.seal_file(file)
    commit.rewrite_manifest(directory, {"files": manifest["files"]})
    with pytest.raises(UsageError, match=r"has another model\.safetensors .* give the base that it was trained on"):
        accel_train.load(mine)


def test_a_base_that_is_gone_or_no_model_of_pictures_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"runs/image-demo does not exist; make it with: {MAKE_DEMO}"):
        find_base(BaseConfig(source="runs/image-demo"))
    (tmp_path / "runs" / "image-demo" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UsageError, match=f"it has none yet.*make it with: {MAKE_DEMO}"):
        find_base(BaseConfig(source="runs/image-demo"))
    with pytest.raises(UsageError, match=r"is not a picture model of recipes/mmdit\.py"):
        find_base(BaseConfig(source=str(text_run(tmp_path / "texts"))))
    with pytest.raises(UsageError, match=r"base\.guidance: 3: has no effect with base\.source"):
        find_base(BaseConfig(source=str(run), guidance=3.0))


def test_pictures_larger_than_those_of_the_base_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"draws at most 8x8; give --data\.resolutions 8 --data\.max_aspect 1"):
        train(tmp_path, run, "large", "--data.resolutions", "16")
    # Before anything is trained, and not at the first evaluation.
    with pytest.raises(UsageError, match=r"evaluation\.side 16: .* draws at most 8x8; give 8 or less"):
        train(tmp_path, run, "large", "--evaluation.side", "16")
    assert not (tmp_path / "large").exists()


def test_a_larger_picture_than_those_of_the_base_is_not_drawn(trained: Path, tmp_path: Path) -> None:
    words = ["sample", str(trained), "--prompt", "red flag", "--output", str(tmp_path / "drawn"), "--side", "64"]
    with pytest.raises(UsageError, match=r"side 64: .* draws at most 8x8; give 8 or less, a multiple of 4"):
        cli._main(words)


def test_the_preset_without_one_is_that_of_the_base() -> None:
    recipe: Any = import_recipe(find_recipe("lora"))
    assert recipe.preset_without_one([]) == "lora_demo"
    assert recipe.preset_without_one(["--seed", "1"]) == "lora_demo"
    assert recipe.preset_without_one(["--base.source", "x"]) == "lora_tune"
    assert recipe.preset_without_one(["--base.source=x"]) == "lora_tune"


def test_a_cell_of_a_notebook_may_have_numbers_and_paths(capsys: pytest.CaptureFixture[str]) -> None:
    recipe: Any = import_recipe(find_recipe("lora"))
    with pytest.raises(SystemExit) as ended:
        recipe.main(["--base.source", Path("x"), "--max_steps", 12, "--print_config"])
    assert ended.value.code == 0
    assert "max_steps: 12 " in capsys.readouterr().out

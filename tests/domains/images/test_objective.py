"""Losses of a micro-batch against the lines of diffusers' training scripts, with its schedulers, on the same noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accel_train.config import UsageError
from accel_train.domains.diffusion import timesteps
from accel_train.domains.diffusion.shaped_noise import NoiseKey, shaped_noise
from accel_train.domains.diffusion.timesteps import TimeConfig
from accel_train.domains.images.latent_cache import draw, latents_of
from accel_train.domains.images.options import PictureDataConfig
from accel_train.domains.images.pipelines import encoding
from accel_train.domains.images.pipelines.inputs import prepare_inputs
from accel_train.domains.images.pipelines.loading import BaseConfig, find_base
from accel_train.domains.images.pipelines.objective import BANDS, Denoising, ObjectiveConfig, refuse_foreign_weights
from accel_train.domains.images.pipelines.validation import EvaluationConfig
from accel_train.domains.images.trained_text.adapters import TextEncoderConfig, with_trained_text
from tests.domains.images import tiny_pipelines as tiny
from tests.domains.images.test_lora_recipe import pictures

diffusers: Any = pytest.importorskip("diffusers")
SEED, STEP, COUNT = 3, 5, 6
GAMMA = 2.0
UNETS = ("sd1", "sd2", "sdxl")


class Made:
    """One base with a batch of pictures, captions and noise."""

    def __init__(self, name: str, folder: Path, options: ObjectiveConfig, times: TimeConfig) -> None:
        base = find_base(BaseConfig(source=str(tiny.save(name, folder))))
        self.pipeline = base.components(torch.device("cpu"))
        self.model: Any = base.denoiser("fp32").eval()
        side = tiny.SIDES.get(name, tiny.SIDE)
        generator = torch.Generator().manual_seed(1)
        pixels = torch.rand(COUNT, 3, side, side, generator=generator) * 2 - 1
        length = tiny.LENGTH if base.family.prompt_tokens else None
        with torch.no_grad():
            self.captions = base.family.encode(
                self.pipeline, [f"a {word} flag" for word in "red big new old wet dry".split()], length
            )
            empty = base.family.encode(self.pipeline, [""], length)
        self.empty = {key: padded(value, self.captions[key]) for key, value in empty.items()}
        indices = torch.arange(COUNT)
        latents = encoding.encode_pictures(self.pipeline.vae, pixels)
        self.batch = {
            **{name: value for name, value in latents._asdict().items() if value is not None},
            **self.captions,
            "original_size": torch.tensor([[side, side]]).expand(COUNT, 2),
            "crop_top_left": torch.zeros(COUNT, 2, dtype=torch.int64),
            "target_size": torch.tensor([[side, side]]).expand(COUNT, 2),
            "sample": indices,
            "occurrence": indices + 40,
            "position": indices,
        }
        self.process = Denoising(
            base.family, base.levels(), self.pipeline.vae, self.model.config, self.empty, options, times
        )
        self.family = base.family

    def found(self) -> tuple[dict[str, Tensor], Tensor]:
        with torch.no_grad():
            inputs = self.process.noised(self.batch, SEED, STEP, COUNT)
            errors = self.process.errors(self.model, inputs)
        return inputs, (errors * inputs["level_weight"]).mean()

    def latents_and_noise(self) -> tuple[Tensor, Tensor]:
        """Drawn by the keys that the recipe documents."""
        key = NoiseKey(SEED, "lora", STEP, self.batch["occurrence"])
        sample = draw(latents_of(self.batch), SEED, STEP, self.batch["occurrence"])
        latents = self.family.normalise(self.pipeline.vae, sample)
        return latents, key.normal("noise", tuple(latents.shape[1:]))


def padded(value: Tensor, like: Tensor) -> Tensor:
    if value.dim() < 2 or value.shape[1] == like.shape[1]:
        return value
    shape = (value.shape[0], like.shape[1] - value.shape[1], *value.shape[2:])
    return torch.cat([value, value.new_zeros(shape)], 1)


def ddpm_loss(made: Made, predicted: Tensor, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
    """Of train_text_to_image_lora_sdxl.py with --snr_gamma."""
    scheduler = diffusers.DDPMScheduler.from_config(made.pipeline.scheduler.config)
    prediction = scheduler.config.prediction_type
    target = noise if prediction == "epsilon" else scheduler.get_velocity(latents, noise, timesteps)
    snr = diffusers.training_utils.compute_snr(scheduler, timesteps)
    weights = torch.stack([snr, GAMMA * torch.ones_like(timesteps)], dim=1).min(dim=1)[0]
    weights = weights / snr if prediction == "epsilon" else weights / (snr + 1)
    loss = torch.nn.functional.mse_loss(predicted.float(), target.float(), reduction="none")
    return (loss.mean(dim=list(range(1, len(loss.shape)))) * weights).mean()


def flow_loss(scheduler: Any, predicted: Tensor, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
    """Of train_dreambooth_lora_flux.py and _sd3.py with --weighting_scheme cosmap."""
    indices = [(scheduler.timesteps == t).nonzero().item() for t in timesteps]
    sigmas = scheduler.sigmas[indices].view(-1, 1, 1, 1)
    weighting = diffusers.training_utils.compute_loss_weighting_for_sd3("cosmap", sigmas)
    target = noise - latents
    loss = torch.mean((weighting.float() * (predicted.float() - target.float()) ** 2).reshape(target.shape[0], -1), 1)
    return loss.mean()


@pytest.mark.parametrize("name", list(tiny.PIPELINES))
def test_the_loss_is_that_of_diffusers_scripts(name: str, tmp_path: Path) -> None:
    is_unet = name in UNETS
    options = ObjectiveConfig(snr_weighting="min_snr", snr_gamma=GAMMA) if is_unet else ObjectiveConfig()
    times = TimeConfig() if is_unet else TimeConfig(weighting="cosmap", density="logit_normal")
    made = Made(name, tmp_path, options, times)
    inputs, found = made.found()
    latents, noise = made.latents_and_noise()
    assert len(set(inputs["timestep"].tolist())) == COUNT
    if is_unet:
        timesteps = inputs["timestep"].long()
        scheduler = diffusers.DDPMScheduler.from_config(made.pipeline.scheduler.config)
        noisy = scheduler.add_noise(latents, noise, timesteps)
    else:
        timesteps = inputs["timestep"]
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(made.pipeline.scheduler.config)
        noisy = scheduler.scale_noise(latents, timesteps, noise)
    torch.testing.assert_close(inputs["noisy"], noisy, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        predicted = made.family.predict(made.model, made.process._predicting(inputs | {"noisy": noisy}))
    loss = ddpm_loss if is_unet else flow_loss
    first = made if is_unet else scheduler
    expected = loss(first, predicted, latents, noise, timesteps)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("name", ["sd1", "sdxl", "sd3", "flux", "sana"])
def test_a_denoiser_in_bf16_takes_inputs_in_fp32(name: str, tmp_path: Path) -> None:
    """As FSDP2 and DeepSpeed have it, which compute without autocast. A UNet's rounded times would be others."""
    made = Made(name, tmp_path, ObjectiveConfig(), TimeConfig())
    inputs, expected = made.found()
    seen: list[Tensor] = []
    if name in UNETS:
        made.model.time_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    made.model.bfloat16()
    with torch.no_grad():
        found = made.process.errors(made.model, inputs)
    assert all(torch.equal(times, inputs["timestep"]) for times in seen)
    assert len(seen) == (name in UNETS)
    assert found.mean().item() == pytest.approx(expected.item(), rel=2e-2)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made("sd1", tmp_path_factory.mktemp("sd1"), ObjectiveConfig(caption_dropout=0.5), TimeConfig())


def test_times_noise_and_weights_are_those_of_the_options(plain: Made) -> None:
    times = TimeConfig(density="logit_normal", logit_mean=0.5, shift=3.0)
    options = ObjectiveConfig(offset_noise=0.1, multires_iterations=3, multires_discount=0.8)
    levels = replace(plain.process.levels, weight=torch.rand(len(plain.process.levels)))
    found = replace(plain.process, times=times, options=options, levels=levels).noised(plain.batch, SEED, STEP, COUNT)
    expected = timesteps.training_times(plain.batch, SEED, "lora/time", STEP, COUNT, config=times)
    assert torch.equal(found["time"], expected)
    key = NoiseKey(SEED, "lora", STEP, plain.batch["occurrence"])
    noise = shaped_noise(key, tuple(found["noisy"].shape[1:]), offset=0.1, iterations=3, discount=0.8)
    assert torch.equal(found["target"], noise)
    torch.testing.assert_close(found["level_weight"], levels.weight[levels.level(expected)])


def test_a_dropped_caption_is_the_empty_prompt(plain: Made) -> None:
    inputs, _ = plain.found()
    empty = torch.stack([torch.equal(row, plain.empty["prompt"][0]) * torch.ones(()) for row in inputs["prompt"]])
    kept = [torch.equal(a, b) for a, b in zip(inputs["prompt"], plain.captions["prompt"], strict=True)]
    assert 0 < float(empty.sum()) < COUNT
    assert [not each for each in kept] == empty.bool().tolist()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_dropped_caption_of_xl_is_what_its_guidance_leads_away_from(tmp_path: Path) -> None:
    """Zeros, and not the encoding of an empty prompt. With trained text encoders they are tokens, which never are."""
    pictures(tmp_path / "photos", 4)
    found = find_base(BaseConfig(source=str(tiny.save("sdxl", tmp_path / "base"))))
    data = PictureDataConfig(
        str(tmp_path / "photos"), resolutions=(tiny.SIDE,), bucket_step=4, cache_dir=str(tmp_path / "cache")
    )
    for base, is_trained in ((found, False), (with_trained_text(found, TextEncoderConfig(rank=2)), True)):
        inputs = prepare_inputs(data, base, EvaluationConfig(), torch.device("cpu"))
        config = base.denoiser("fp32").config
        process = inputs.denoising(base.levels(), config, ObjectiveConfig(caption_dropout=1.0), TimeConfig())
        loaded = {"sample": 0, "occurrence": 40, "position": 0}
        batch = {name: value[None] for name, value in inputs.train[0].items()}
        dropped = process.noised(batch | {name: torch.tensor([at]) for name, at in loaded.items()}, SEED, STEP, 1)
        guided = inputs.prompt("") if is_trained else base.family.empty(inputs.pipeline, inputs.prompt(""))
        for name, value in guided.items():
            assert torch.equal(dropped[name], value)
            assert bool(value.any()) == is_trained


def test_heldout_noise_belongs_to_the_picture(plain: Made) -> None:
    for band in range(BANDS):
        whole = plain.process.noised_in_band(plain.batch, band)
        alone = plain.process.noised_in_band({key: value[2:3] for key, value in plain.batch.items()}, band)
        assert torch.equal(whole["noisy"][2:3], alone["noisy"])
        bounds = 1000 * torch.tensor([band, band + 1]) / BANDS
        assert bool((whole["timestep"] >= bounds[0] - 1).all())
        assert bool((whole["timestep"] < bounds[1]).all())


def test_heldout_noise_is_that_of_the_picture_wherever_it_comes_up(plain: Made) -> None:
    before = plain.process.noised_in_band(plain.batch, 1)["noisy"]
    elsewhere = {name: plain.batch[name] + 7 for name in ("occurrence", "position")}
    assert torch.equal(plain.process.noised_in_band(plain.batch | elsewhere, 1)["noisy"], before)
    another = {"sample": plain.batch["sample"] + 7}
    assert not torch.equal(plain.process.noised_in_band(plain.batch | another, 1)["noisy"], before)


def test_a_flow_is_weighted_by_its_noise(plain: Made) -> None:
    """Times of a shifted scheduler are no even steps, and the weights are functions of them."""
    levels = replace(plain.process.levels, prediction="flow")
    process = replace(plain.process, levels=levels, times=TimeConfig(weighting="sigma_sqrt"))
    level = torch.tensor([100, 500, 900])
    torch.testing.assert_close(process.weights(level), levels.b[level].pow(-2))


def test_weights_of_another_process_are_refused(plain: Made) -> None:
    levels = plain.process.levels
    with pytest.raises(UsageError, match=r"times.weighting cosmap: base predicts epsilon"):
        refuse_foreign_weights(ObjectiveConfig(), TimeConfig(weighting="cosmap"), levels, "base")
    flow = type(levels)(levels.a, levels.b, levels.timesteps, "flow")
    with pytest.raises(UsageError, match=r"objective.snr_weighting min_snr: base is trained by flow matching"):
        refuse_foreign_weights(ObjectiveConfig(snr_weighting="min_snr"), TimeConfig(), flow, "base")


@pytest.mark.parametrize("options", [{"snr_gamma": 3.0}, {"multires_discount": 0.5}])
def test_options_without_effect_are_refused(options: Any) -> None:
    with pytest.raises(UsageError, match="has no effect"):
        ObjectiveConfig(**options)

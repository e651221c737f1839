"""Noise, targets and weights against diffusers' schedulers and the formulas of its training scripts."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from accel_train.domains.diffusion import noise_levels
from accel_train.domains.diffusion.noise_levels import NoiseLevels, ddpm_levels, flow_levels, snr_weight

diffusers: Any = pytest.importorskip("diffusers")
GAMMA = 5.0


def ddpm(prediction: Any) -> tuple[Any, NoiseLevels]:
    scheduler = diffusers.DDPMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, prediction_type=prediction
    )
    return scheduler, ddpm_levels(scheduler.alphas_cumprod, prediction)


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(12, 4, 6, 5, generator=generator)
    noise = torch.randn(12, 4, 6, 5, generator=generator)
    return latents, noise, torch.tensor([0, 1, 2, 50, 100, 250, 400, 500, 700, 900, 998, 999])


def theirs(scheduler: Any, prediction: str, gamma: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy latents, target and weights as in diffusers' train_text_to_image_lora.py."""
    latents, noise, timesteps = drawn()
    noisy = scheduler.add_noise(latents, noise, timesteps)
    target = noise if prediction == "epsilon" else scheduler.get_velocity(latents, noise, timesteps)
    if gamma is None:
        return noisy, target, torch.ones(len(timesteps))
    snr = diffusers.training_utils.compute_snr(scheduler, timesteps)
    weights = torch.stack([snr, gamma * torch.ones_like(timesteps)], dim=1).min(dim=1)[0]
    weights = weights / snr if prediction == "epsilon" else weights / (snr + 1)
    return noisy, target, weights


@pytest.mark.parametrize("gamma", [None, GAMMA])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_ddpm_is_that_of_diffusers(prediction: Any, gamma: float | None) -> None:
    scheduler, levels = ddpm(prediction)
    latents, noise, level = drawn()
    noisy, target, weights = theirs(scheduler, prediction, gamma)
    torch.testing.assert_close(levels.add_noise(latents, noise, level), noisy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(levels.target(latents, noise, level), target, rtol=1e-5, atol=1e-6)
    found = snr_weight(levels.snr(level), prediction, "none" if gamma is None else "min_snr", GAMMA)
    torch.testing.assert_close(found, weights, rtol=1e-5, atol=1e-6)
    assert torch.equal(levels.timesteps[level].long(), level)


def test_levels_on_a_device_keep_every_table() -> None:
    levels = NoiseLevels(*torch.rand(3, 8), "epsilon", weight=torch.rand(8), straight=True)
    moved = levels.to(torch.device("meta"))
    for name in ("a", "b", "timesteps", "weight"):
        table = getattr(moved, name)
        assert (table.device.type, table.shape) == ("meta", (8,))
    assert (moved.prediction, moved.straight, moved.is_flow) == ("epsilon", True, True)


def test_a_time_just_below_a_level_belongs_to_the_one_before() -> None:
    _, levels = ddpm("epsilon")
    times = torch.nextafter(torch.arange(1, 1001) / 1000, torch.tensor(0.0))
    expected = [math.floor(Fraction(time) * 1000) for time in times.tolist()]
    assert levels.level(times).tolist() == expected
    assert levels.level(torch.tensor([0.0, 1.0])).tolist() == [0, 999]


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_is_that_of_diffusers(shift: float) -> None:
    """Of train_dreambooth_lora_sd3.py: sigmas by get_sigmas, the noisy input, and the target."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    levels = flow_levels(scheduler.sigmas[:1000], scheduler.timesteps)
    latents, noise, level = drawn()
    timesteps = levels.timesteps[level]
    found = [(scheduler.timesteps == t).nonzero().item() for t in timesteps]
    sigmas = scheduler.sigmas[found].view(-1, 1, 1, 1)
    noisy = (1.0 - sigmas) * latents + sigmas * noise
    torch.testing.assert_close(levels.add_noise(latents, noise, level), noisy, rtol=1e-5, atol=1e-6)
    assert torch.equal(levels.target(latents, noise, level), noise - latents)
    assert bool((levels.b.diff() > 0).all())


def test_every_level_is_drawn_alike() -> None:
    _, levels = ddpm("epsilon")
    time = (torch.arange(4000) + 0.5) / 4000
    assert torch.equal(levels.level(time), torch.arange(1000).repeat_interleave(4))
    assert levels.level(torch.tensor([0.0, 1.0])).tolist() == [0, 999]


@pytest.mark.parametrize("weighting", ["min_snr", "soft_min_snr", "debiased"])
def test_weights_do_not_depend_on_what_is_predicted(weighting: Any) -> None:
    """One error of x0, expressed as one of eps or v, counts alike."""
    snr = torch.logspace(-4, 2.9, 40, dtype=torch.float64)
    of_epsilon = snr_weight(snr, "epsilon", weighting, GAMMA)
    of_v = snr_weight(snr, "v_prediction", weighting, GAMMA)
    of_sample = snr_weight(snr, "sample", weighting, GAMMA)
    torch.testing.assert_close(of_epsilon * snr, of_sample)
    if weighting == "debiased":  # two definitions, each of its own script
        torch.testing.assert_close(of_epsilon, snr**-0.5)
        torch.testing.assert_close(of_v, 1 / (snr + 1))
        return
    torch.testing.assert_close(of_v * (snr + 1), of_sample)
    closed = snr.clamp(max=GAMMA) if weighting == "min_snr" else snr * GAMMA / (snr + GAMMA)
    torch.testing.assert_close(of_sample, closed)


def test_zero_terminal_snr_has_a_finite_weight() -> None:
    """Where min(SNR, gamma) / SNR of the scripts is 0 / 0."""
    weights = snr_weight(torch.zeros(1), "epsilon", "min_snr", GAMMA)
    assert weights.tolist() == [1.0]
    for prediction in ("epsilon", "v_prediction", "sample"):
        assert snr_weight(torch.zeros(1), prediction, "debiased", GAMMA).isfinite().all()
    assert snr_weight(torch.tensor([1e6]), "epsilon", "debiased", GAMMA).item() == pytest.approx(
        noise_levels.LARGEST_DEBIASED_SNR**-0.5
    )

"""Latent diffusion against diffusers, fp64 and closed forms."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from accel_train.config import UsageError
from accel_train.domains.diffusion import latents
from accel_train.domains.diffusion.latents import LatentDiffusionConfig

FLOW = LatentDiffusionConfig()
FLOW_X0 = LatentDiffusionConfig(prediction="x0")
DDPM = {
    (schedule, prediction): LatentDiffusionConfig("ddpm", schedule, prediction)
    for schedule in ("linear", "cosine")
    for prediction in ("epsilon", "x0", "v")
}
EVERY = [FLOW, FLOW_X0, *DDPM.values()]
DIFFUSERS_SCHEDULE = {"linear": "linear", "cosine": "squaredcos_cap_v2"}


def ddpm_scheduler(schedule):
    from diffusers import DDPMScheduler

    return DDPMScheduler(1000, beta_start=1e-4, beta_end=0.02, beta_schedule=DIFFUSERS_SCHEDULE[schedule])


def pair(dtype=torch.float64, shape=(40, 2, 8)):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_alpha_bar_is_that_of_diffusers(schedule):
    """t = k / 1000 is the k-th discrete step; the last ten of the cosine schedule are cut off differently."""
    steps = torch.arange(1, 991 if schedule == "cosine" else 1001)
    expected = ddpm_scheduler(schedule).alphas_cumprod.double()[steps - 1]
    a, b = latents.coefficients(steps.double() / 1000, DDPM[schedule, "v"])
    torch.testing.assert_close(a.square(), expected, rtol=3e-5, atol=0)  # theirs is a product in float32
    torch.testing.assert_close(a.square() + b.square(), torch.ones_like(a), rtol=0, atol=1e-12)


def test_linear_alpha_bar_is_the_product():
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    a, _ = latents.coefficients(torch.arange(1, 1001).double() / 1000, DDPM["linear", "v"])
    torch.testing.assert_close(a.square(), (1 - betas).cumprod(0), rtol=1e-9, atol=0)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_noise_only_grows_between_the_steps(schedule):
    a, b = latents.coefficients(torch.linspace(0, 1, 10_001, dtype=torch.float64), DDPM[schedule, "v"])
    assert (a.diff() <= 0).all()
    assert (b.diff() >= 0).all()
    assert a[0] == 1
    assert b[0] == 0
    assert 0.006 < a[-1] < 0.007  # x0 = (x - b eps) / a must exist


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_add_noise_and_targets_are_those_of_diffusers(schedule):
    x0, noise = pair(torch.float32)
    steps = torch.linspace(1, 990, 40).long()
    scheduler, time = ddpm_scheduler(schedule), steps / 1000
    config = DDPM[schedule, "v"]
    close = {"rtol": 1e-4, "atol": 2e-5}
    expected = scheduler.add_noise(x0, noise, steps - 1)
    torch.testing.assert_close(latents.add_noise(x0, noise, time, config), expected, **close)
    velocity = scheduler.get_velocity(x0, noise, steps - 1)
    torch.testing.assert_close(latents.target(x0, noise, time, config), velocity, **close)


def test_flow_is_that_of_diffusers():
    from diffusers import FlowMatchEulerDiscreteScheduler

    x0, noise = pair(torch.float32)
    scheduler = FlowMatchEulerDiscreteScheduler(1000)
    time = scheduler.sigmas[:1000:25]
    expected = scheduler.scale_noise(x0, scheduler.timesteps[::25], noise)
    torch.testing.assert_close(latents.add_noise(x0, noise, time, FLOW), expected)
    # The velocity is the derivative of the path.
    ahead = latents.add_noise(*pair(), time.double() * 0.9 + 1e-6, FLOW)
    behind = latents.add_noise(*pair(), time.double() * 0.9, FLOW)
    velocity = latents.target(*pair(), time.double(), FLOW)
    torch.testing.assert_close((ahead - behind) / 1e-6, velocity, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("config", EVERY)
def test_x0_comes_back_from_the_target(config):
    x0, noise = pair()
    time = torch.linspace(1e-4, 1 - 1e-4, 40, dtype=torch.float64)
    noisy = latents.add_noise(x0, noise, time, config)
    wanted = latents.target(x0, noise, time, config)
    torch.testing.assert_close(latents.predicted_x0(wanted, noisy, time, config), x0, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("config", EVERY)
def test_clean_and_absent_exactly(config):
    x0, noise = pair(torch.float32)
    assert torch.equal(latents.add_noise(x0, noise, torch.zeros(40), config), x0)
    assert torch.equal(latents.add_noise(x0, noise, torch.ones(40), config), noise)


def test_losses_and_the_factor_between_them():
    prediction, wanted = pair()
    by = {
        loss: latents.losses(prediction, wanted, LatentDiffusionConfig(prediction="x0", loss=loss))
        for loss in ("mse", "normalised_mse", "cosine")
    }
    cosine = F.cosine_similarity(prediction, wanted, dim=-1).mean(-1)
    expected = {
        "mse": (prediction - wanted).square().mean((1, 2)),
        "normalised_mse": (F.normalize(prediction, dim=-1) - F.normalize(wanted, dim=-1)).square().mean((1, 2)),
        "cosine": 1 - cosine,
    }
    for loss, values in by.items():
        assert values.shape == (40,)
        assert values.dtype == torch.float32
        torch.testing.assert_close(values.double(), expected[loss], rtol=1e-6, atol=1e-7)
    factor = latents.normalised_mse_per_cosine(8)
    assert factor == 2 / 8
    torch.testing.assert_close(by["normalised_mse"], by["cosine"] * factor)


@pytest.mark.parametrize("loss", ["mse", "normalised_mse", "cosine"])
def test_losses_of_bf16_predictions_in_fp32(loss):
    prediction, wanted = pair(torch.bfloat16)
    config = LatentDiffusionConfig(prediction="x0", loss=loss)
    values = latents.losses(prediction, wanted, config)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, latents.losses(prediction.double(), wanted.double(), config))


def test_losses_of_direction_do_not_see_the_length():
    prediction, wanted = pair()
    for loss in ("normalised_mse", "cosine"):
        config = LatentDiffusionConfig(prediction="x0", loss=loss)
        once = latents.losses(prediction, wanted, config)
        torch.testing.assert_close(latents.losses(prediction * 70, wanted, config), once)
        x0 = latents.predicted_x0(prediction * 70, wanted, torch.full((40,), 0.5), config)
        torch.testing.assert_close(x0.norm(dim=-1), torch.full((40, 2), math.sqrt(8), dtype=torch.float64))
        torch.testing.assert_close(F.cosine_similarity(x0, prediction, dim=-1), torch.ones(40, 2).double())


def test_gradient_of_a_direction_stays_bounded_at_zero():
    """A head that starts at 0 would otherwise begin with a gradient of 1e12."""
    prediction = torch.zeros(40, 2, 8, requires_grad=True)
    config = LatentDiffusionConfig(prediction="x0", loss="cosine")
    latents.losses(prediction, pair(torch.float32)[0], config).mean().backward()
    assert prediction.grad is not None
    assert 0 < prediction.grad.norm() < 1e3


def test_combinations_that_can_be_sampled_and_no_others():
    allowed = {("flow", "straight", "velocity", "mse")}
    allowed |= {("flow", "straight", "x0", loss) for loss in ("mse", "normalised_mse", "cosine")}
    for schedule in ("linear", "cosine"):
        allowed |= {("ddpm", schedule, prediction, "mse") for prediction in ("epsilon", "v")}
        allowed |= {("ddpm", schedule, "x0", loss) for loss in ("mse", "normalised_mse", "cosine")}
    every = itertools.product(
        ("flow", "ddpm"),
        ("straight", "linear", "cosine"),
        ("velocity", "epsilon", "x0", "v"),
        ("mse", "normalised_mse", "cosine"),
    )
    for combination in every:
        if combination in allowed:
            LatentDiffusionConfig(*combination)
        else:
            with pytest.raises(UsageError, match="Set "):
                LatentDiffusionConfig(*combination)


def test_refusals_name_the_remedy():
    with pytest.raises(UsageError, match=r"kind=ddpm.*linear or cosine.*epsilon or x0 or v"):
        LatentDiffusionConfig(kind="ddpm")
    with pytest.raises(UsageError, match=r"loss=cosine with prediction=velocity.*length.*prediction to x0"):
        LatentDiffusionConfig(loss="cosine")

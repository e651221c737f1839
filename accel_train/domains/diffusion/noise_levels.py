"""Discrete noise levels of a pretrained model, its prediction target, and loss weights by signal-to-noise ratio.

Level k of N has x = a[k] x0 + b[k] eps. DDPM has a = sqrt(alpha_bar), b = sqrt(1 - alpha_bar), rectified flow
a = 1 - sigma, b = sigma. The signal-to-noise ratio is SNR = (a / b)^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from accel_train.config import UsageError

Prediction = Literal["epsilon", "v_prediction", "sample", "flow"]
SnrWeighting = Literal["none", "min_snr", "soft_min_snr", "debiased"]

SCHEDULED = ("epsilon", "v_prediction", "sample")
"""Values of ``prediction_type`` in a scheduler with ``alphas_cumprod``."""
LARGEST_DEBIASED_SNR = 1000.0
"""The weight of ``debiased`` is constant above this SNR, as in kohya's sd-scripts."""
SMALLEST_DEBIASED_SNR = 1e-4
"""It is constant below this SNR too, since it is infinite at 0. The noisiest level of Stable Diffusion has 0.005."""


@dataclass(frozen=True, eq=False)
class NoiseLevels:
    """Noise levels from cleanest to noisiest, and the model's prediction target."""

    a: Tensor
    """Factor of the clean latent, (N,) fp32."""
    b: Tensor
    """Factor of the noise, (N,) fp32."""
    timesteps: Tensor
    """Time input of the model at each level, (N,) fp32."""
    prediction: Prediction
    weight: Tensor | None = None
    """Weight of the squared error in the model's own training, (N,) fp32. None: 1 at every level."""
    straight: bool = False
    """True for a straight path whose prediction target is not the flow."""

    @property
    def is_flow(self) -> bool:
        """True for a straight path, a = 1 - b, False for a variance-preserving one."""
        return self.straight or self.prediction == "flow"

    def __len__(self) -> int:
        return len(self.timesteps)

    def to(self, device: torch.device) -> NoiseLevels:
        """Return the levels with their tables on ``device``."""
        weight = None if self.weight is None else self.weight.to(device)
        a = self.a.to(device)
        b = self.b.to(device)
        timesteps = self.timesteps.to(device)
        return NoiseLevels(a, b, timesteps, self.prediction, weight, self.straight)

    def level(self, time: Tensor) -> Tensor:
        """Return the level floor(N t) of times in [0, 1], int64 in their shape."""
        # Time 1 falls into the last level, since there is no level N.
        # In fp64, because the product in fp32 may round up to the next level.
        return (time.double() * len(self)).long().clamp_(max=len(self) - 1)

    def add_noise(self, latents: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Return the noisy latents of each sample's ``level`` (B,)."""
        a, b = self._factors(latents, level)
        return a * latents + b * noise

    def target(self, latents: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Return eps, x0, v = a eps - b x0 (Salimans and Ho 2022), or eps - x0 of rectified flow."""
        if self.prediction == "epsilon":
            return noise
        if self.prediction == "sample":
            return latents
        if self.prediction == "flow":
            return noise - latents
        a, b = self._factors(latents, level)
        return a * noise - b * latents

    def snr(self, level: Tensor) -> Tensor:
        """Return (a / b)^2 of each level, in its shape."""
        return (self.a[level] / self.b[level]).square()

    def _factors(self, latents: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        shape = (-1, *[1] * (latents.dim() - 1))  # (B, 1, ..., 1)
        return self.a[level].view(shape), self.b[level].view(shape)


def ddpm_levels(alphas_cumprod: Tensor, prediction: Prediction) -> NoiseLevels:
    """Return the levels of a variance-preserving process with ``alphas_cumprod`` (N,), timesteps 0 to N - 1."""
    alpha_bar = alphas_cumprod.float()
    timesteps = torch.arange(len(alpha_bar), dtype=torch.float32)
    return NoiseLevels(alpha_bar.sqrt(), (1 - alpha_bar).sqrt(), timesteps, prediction)


def flow_levels(sigmas: Tensor, timesteps: Tensor) -> NoiseLevels:
    """Return the levels of rectified flow with ``sigmas`` (N,) in (0, 1] in any order."""
    # Levels ascend in noise, whichever way a scheduler lists its sigmas.
    order = sigmas.argsort()
    ascending = sigmas[order].float()
    return NoiseLevels(1 - ascending, ascending, timesteps[order].float(), "flow")


def snr_weight(snr: Tensor, prediction: Prediction, weighting: SnrWeighting, gamma: float) -> Tensor:
    """Return the weight of each sample's squared error, in the shape of ``snr``.

    min_snr (Hang et al. 2023, arXiv:2303.09556) is min(SNR, gamma) on x0; soft_min_snr (Crowson et al. 2024,
    arXiv:2401.11605) is SNR gamma / (SNR + gamma). The squared error of eps is SNR times that of x0, and the squared
    error of v is SNR + 1 times that of x0, so their weights are divided by these factors. debiased (Yu et al. 2023,
    arXiv:2310.08442) is 1 / sqrt(SNR) on eps, so sqrt(SNR) on x0, and 1 / (SNR + 1) on v.
    """
    if weighting == "none":
        return torch.ones_like(snr)
    if weighting == "debiased":
        if prediction == "v_prediction":
            return 1 / (snr.clamp(max=LARGEST_DEBIASED_SNR) + 1)
        bounded = snr.clamp(SMALLEST_DEBIASED_SNR, LARGEST_DEBIASED_SNR)
        return bounded.sqrt() if prediction == "sample" else bounded.rsqrt()
    # The weight on eps, written so that SNR 0 gives the limit and not 0 / 0.
    on_epsilon = (gamma / snr).clamp(max=1) if weighting == "min_snr" else gamma / (snr + gamma)
    if prediction == "epsilon":
        return on_epsilon
    on_sample = snr.clamp(max=gamma) if weighting == "min_snr" else snr * on_epsilon
    return on_sample if prediction == "sample" else on_sample / (snr + 1)


def levels_of(scheduler: Any, source: str) -> NoiseLevels:
    """Return the training levels of a diffusers scheduler. Raises ``UsageError`` if it does not define them."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    name = type(scheduler).__name__
    prediction = scheduler.config.get("prediction_type")
    if prediction == "flow_prediction":
        # Its own solver is for sampling. Training uses the levels of flow matching, as diffusers' script does.
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(scheduler.config)
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        if scheduler.config.get("stochastic_sampling") or scheduler.config.get("invert_sigmas"):
            raise UsageError(
                f"base.source {source!r}: its {name} inverts its sigmas, which this recipe does not train; use a base "
                "that does not"
            )
        flow: Any = scheduler
        # The sigmas have one more value than the timesteps, a final 0.
        return flow_levels(flow.sigmas[: len(flow.timesteps)], flow.timesteps)
    alphas = getattr(scheduler, "alphas_cumprod", None)
    if alphas is None or prediction not in SCHEDULED:
        raise UsageError(
            f"base.source {source!r}: its {name} has prediction_type {prediction!r} and "
            f"{'no ' if alphas is None else ''}alphas_cumprod; one of {', '.join(SCHEDULED)} with alphas_cumprod, or "
            "flow matching, is required. Replace its scheduler"
        )
    return ddpm_levels(alphas, prediction)

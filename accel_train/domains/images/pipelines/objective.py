"""Loss of a denoiser, as defined by its scheduler, on noise keyed by sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_train import rng
from accel_train.config import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    UsageError,
    refuse_without_effect,
)
from accel_train.domains.diffusion import timesteps
from accel_train.domains.diffusion.noise_levels import NoiseLevels, SnrWeighting, snr_weight
from accel_train.domains.diffusion.shaped_noise import NoiseKey, caption_dropped, shaped_noise
from accel_train.domains.diffusion.timesteps import TimeConfig
from accel_train.domains.images.latent_cache import draw, latents_of
from accel_train.domains.images.pipelines.family import Conditioning, Family, Predicting
from accel_train.domains.images.weighting.masks import MASK
from accel_train.metrics.progress import Labels

Batch = Mapping[str, Tensor]
STREAM = "lora"
SIZES = ("original_size", "crop_top_left", "target_size")
"""Fields of a batch, (B, 2) each, in XL's order."""
BANDS = 4
"""Equal parts of the times of held-out losses, from clean to noisy."""
METRICS = ("loss", *(f"loss_band_{band}" for band in range(1, BANDS + 1)))
LABELS = Labels(
    units={"loss": "mean squared error", "band": "mean squared error", "adapter": "fraction of pictures"},
    titles={"band": "loss by time, from clean to noisy", "adapter": "recognised pictures"},
    own_summary=True,
)


@dataclass(frozen=True)
class ObjectiveConfig:
    """Noise and weights of the loss. The base's scheduler decides what is predicted: noise, v or flow."""

    snr_weighting: SnrWeighting = "none"
    """Weight of a sample's loss by its signal-to-noise ratio, not for flow matching. min_snr: no more than snr_gamma
    (arXiv:2303.09556). soft_min_snr: the same without its corner. debiased: 1 / sqrt(SNR) (arXiv:2310.08442)."""
    snr_gamma: PositiveFloat = 5.0
    """min_snr and soft_min_snr: the ratio from which on clean samples count no more."""
    offset_noise: NonNegativeFloat = 0.0
    """Noise added to a whole channel, for pictures darker or brighter than the base can make. 0.05 to 0.1 is usual."""
    multires_iterations: NonNegativeInt = 0
    """Number of resolutions, from the full one to ever coarser ones, at which noise is added as well, for the same
    purpose. 0: none. 6 to 10 are usual."""
    multires_discount: Fraction = 0.3
    """Strength of each coarser resolution relative to the one before."""
    caption_dropout: Fraction = 0.0
    """Share of captions that are left out, so that guidance stays meaningful. 0.05 to 0.1 is usual."""

    def __post_init__(self) -> None:
        if self.snr_weighting not in ("min_snr", "soft_min_snr"):
            because = f"with objective.snr_weighting: {self.snr_weighting}"
            instead = "set snr_weighting to min_snr or soft_min_snr"
            refuse_without_effect(self, "objective", ["snr_gamma"], because, instead)
        if self.multires_iterations == 0:
            because = "without objective.multires_iterations"
            refuse_without_effect(self, "objective", ["multires_discount"], because, "give both")


def refuse_foreign_weights(options: ObjectiveConfig, times: TimeConfig, levels: NoiseLevels, source: str) -> None:
    """Raise ``UsageError`` for a loss weighting that belongs to another process than the base's."""
    if levels.is_flow and options.snr_weighting != "none":
        raise UsageError(
            f"objective.snr_weighting {options.snr_weighting}: {source} is trained by flow matching, which is "
            "weighted by times.weighting; leave it out"
        )
    if not levels.is_flow and times.weighting != "none":
        raise UsageError(
            f"times.weighting {times.weighting}: {source} predicts {levels.prediction}, and this weighting is for flow "
            "matching; leave it out, or give objective.snr_weighting"
        )


@dataclass(frozen=True, eq=False)
class Denoising:
    """Diffusion process of a base: its noise levels, the normalisation of its latents, and the call of its denoiser."""

    family: Family
    levels: NoiseLevels
    vae: Any
    denoiser_config: Any
    empty: Conditioning
    """Conditioning of an empty prompt, with a first dimension of 1."""
    options: ObjectiveConfig
    times: TimeConfig
    guidance: float = 1.0
    """Input of a denoiser distilled from guidance."""

    def noised(self, batch: Batch, seed: int, step: int, global_batch_size: int) -> dict[str, Tensor]:
        """Return the inputs, target and weights of a micro-batch. All draws are keyed by (seed, step, sample).

        ``batch`` has mean and logvar (B, C, H, W) of the VAE, sizes, and the conditioning of its captions.
        """
        key = NoiseKey(seed, STREAM, step, batch["occurrence"])
        # A new draw in each step, as from a VAE without a cache.
        latents = self._normalised(draw(latents_of(batch), seed, step, batch["occurrence"]))
        time = timesteps.training_times(batch, seed, f"{STREAM}/time", step, global_batch_size, config=self.times)
        channels, height, width = latents.shape[1:]
        noise = shaped_noise(
            key,
            (channels, height, width),
            offset=self.options.offset_noise,
            iterations=self.options.multires_iterations,
            discount=self.options.multires_discount,
        )
        inputs = self._at(latents, noise, self.levels.level(time), batch) | {"time": time}
        if self.options.caption_dropout > 0:
            inputs |= self._with_dropped(inputs, caption_dropped(key, self.options.caption_dropout))
        return inputs

    def noised_in_band(self, batch: Batch, band: int) -> dict[str, Tensor]:
        """Return the inputs of a held-out batch in one band of times, the same in every evaluation of every run."""
        # The mean, not a draw: evaluations differ only by the model.
        latents = self._normalised(batch["mean"])
        # Seed 0, not the run's, so that runs can be compared with each other.
        key = NoiseKey(0, f"{STREAM}/heldout{band}", 0, batch["sample"])
        draws = rng.sample_keys(0, f"{STREAM}/heldout/time{band}", 0, batch["sample"])
        time = timesteps.stratified(draws, band, BANDS)
        noise = key.normal("noise", tuple(latents.shape[1:]))
        return self._at(latents, noise, self.levels.level(time), batch)

    def weights(self, level: Tensor) -> Tensor:
        """Return the weight of each sample's squared error, (B,), including the weight of the base's own training."""
        if self.levels.is_flow:
            found = timesteps.loss_weight(self.levels.b[level], self.times.weighting)
        else:
            snr = self.levels.snr(level)
            found = snr_weight(snr, self.levels.prediction, self.options.snr_weighting, self.options.snr_gamma)
        return found if self.levels.weight is None else found * self.levels.weight[level]

    def errors(self, model: nn.Module, inputs: Batch) -> Tensor:
        """Return the mean squared error of each sample, (B,) fp32, without its weight.

        With a mask, the squared errors are weighted by position first, and still divided by their number.
        """
        predicted = self.family.predict(model, self._predicting(inputs))
        # In fp32: in bf16 an error of one part in 300 would be rounded away.
        squared = (predicted.float() - inputs["target"].float()).square()
        if MASK in inputs:
            # Latents in patches have fewer positions than those of the VAE.
            height, width = squared.shape[-2:]
            squared = squared * F.adaptive_avg_pool2d(inputs[MASK], (height, width))
        return squared.flatten(1).mean(1)

    def _at(self, latents: Tensor, noise: Tensor, level: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {
            **batch,
            "noisy": self.levels.add_noise(latents, noise, level),
            "target": self.levels.target(latents, noise, level),
            "timestep": self.levels.timesteps[level],
            "level_weight": self.weights(level),
        }

    def _with_dropped(self, inputs: Batch, dropped: Tensor) -> dict[str, Tensor]:
        given = {name: inputs[name] for name in self.empty}
        found: dict[str, Tensor] = {}
        for name, replacement in self.family.left_out(given, self.empty).items():
            # (B, 1, ...), to choose whole captions.
            where = dropped.view(-1, *[1] * (replacement.dim() - 1))
            found[name] = torch.where(where, replacement, given[name])
        return found

    def _normalised(self, latents: Tensor) -> Tensor:
        return self.family.normalise(self.vae, latents)

    def _predicting(self, inputs: Batch) -> Predicting:
        return Predicting(
            noisy=inputs["noisy"],
            timestep=inputs["timestep"],
            conditioning={name: inputs[name] for name in self.empty},
            sizes=torch.cat([inputs[name] for name in SIZES], 1),
            config=self.denoiser_config,
            guidance=self.guidance,
        )


def metrics_of(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the held-out losses from their sums over samples and the sum of weights, ``samples``."""
    found = {name: float(total / sums["samples"]) for name, total in sums.items() if name != "samples"}
    # All bands count equally, as they are of equal length.
    return {"loss": sum(found.values()) / len(found), **found}


def summary(metrics: Mapping[str, float]) -> str:
    """Return a log line about an evaluation."""
    if not metrics:
        return "no held-out pictures (data.heldout_fraction), so no losses"
    bands = ", ".join(f"{metrics[name]:.4f}" for name in METRICS[1:])
    return f"held-out loss {metrics['loss']:.4f}; from clean to noisy times {bands}"


def describe_objective(levels: NoiseLevels, family: Family) -> str:
    """Return a notice of the prediction target."""
    predicted = {"epsilon": "the noise", "v_prediction": "v", "sample": "the latent", "flow": "the flow"}
    return f"{family.name}: according to its config, the {family.denoiser} predicts {predicted[levels.prediction]}"

"""What a run of adapters learns from: pictures, the embeddings of their captions, and the base around them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.domains.diffusion.noise_levels import NoiseLevels
from accel_train.domains.diffusion.timesteps import TimeConfig
from accel_train.domains.images.dataset import PictureData, prepare_pictures
from accel_train.domains.images.options import PictureDataConfig
from accel_train.domains.images.pipelines import encoding
from accel_train.domains.images.pipelines.encoding import CaptionedPictures, Prompts
from accel_train.domains.images.pipelines.loading import Base
from accel_train.domains.images.pipelines.objective import Denoising, ObjectiveConfig, refuse_foreign_weights

logger = logging.getLogger(__name__)


# Compared and hashed by identity, like the data of the other recipes.
@dataclass(frozen=True, eq=False)
class Inputs:
    """Datasets of a run, and the base without its denoiser and text encoders."""

    base: Base
    pipeline: Any
    """With VAE and scheduler, on the device."""
    prompts: Prompts
    train: CaptionedPictures
    heldout: CaptionedPictures
    pictures: PictureData
    notices: tuple[str, ...]

    def encoded(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch with mean and logvar of its pictures in place of their pixels."""
        return {**batch, **encoding.encode_pictures(self.pipeline.vae, batch["pixels"])}

    def process(
        self, levels: NoiseLevels, denoiser_config: Any, options: ObjectiveConfig, times: TimeConfig
    ) -> Denoising:
        """Return the process that the denoiser is trained on, on the device of the VAE.

        Raises ``UsageError`` for a weighting that belongs to another one.
        """
        refuse_foreign_weights(options, times, levels, self.base.source)
        device = self.pipeline.vae.device
        return Denoising(
            family=self.base.family,
            levels=levels.to(device),
            vae=self.pipeline.vae,
            denoiser_config=denoiser_config,
            empty=self.prompts.alone("", device),
            options=options,
            times=times,
            guidance=self.base.config.guidance,
        )

    def call_once(self, process: Denoising, model: nn.Module) -> Tensor:
        """Call a denoiser on one picture, wherever its weights are. For the proof of its attention."""
        device = self.pipeline.vae.device
        sample = {name: value[None].to(device) for name, value in self.train[0].items()}
        batch = self.encoded({**sample, "sample": torch.zeros(1, dtype=torch.int64, device=device)})
        inputs = process.noised_in_band(batch, 0)
        where = next(model.parameters()).device
        return process.errors(model, {name: value.to(where) for name, value in inputs.items()})


def prepare_inputs(
    config: PictureDataConfig,
    base: Base,
    prompts: Sequence[str],
    device: torch.device,
    *,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] = lambda: None,
) -> Inputs:
    """Read the pictures, encode all captions and ``prompts``, and drop the text encoders. Collective.

    Raises ``UsageError``, also for buckets that the base cannot take.
    """
    pictures = prepare_pictures(config, rank=rank, world_size=world_size, barrier=barrier)
    pipeline = base.components(device)
    _refuse_step(config, base, pipeline)
    captions = [sample.caption for data in (pictures.train, pictures.heldout) for sample in data.samples]
    table = encoding.encode_captions(pipeline, base, ["", *prompts, *captions], show=rank == 0)
    freed = encoding.drop_text_encoders(pipeline)
    notices = (
        *pictures.notices,
        f"{len(table):,} captions are encoded; the text encoders, {freed / (1 << 30):.2f} GiB, are dropped",
    )
    train = CaptionedPictures(pictures.train, table)
    heldout = CaptionedPictures(pictures.heldout, table)
    return Inputs(base, pipeline, table, train, heldout, pictures, notices)


def _refuse_step(config: PictureDataConfig, base: Base, pipeline: Any) -> None:
    """Raise ``UsageError`` for sides that are not whole numbers of latents and patches."""
    needed = reduction(pipeline) * base.family.patch
    if config.bucket_step % needed:
        raise UsageError(
            f"data.bucket_step {config.bucket_step}: {base.family.name} takes sides that are multiples of {needed} "
            f"(its VAE reduces by {reduction(pipeline)}); give a multiple of {needed}"
        )


def reduction(pipeline: Any) -> int:
    """Return how many pixels along a side make one latent."""
    return int(pipeline.vae_scale_factor)

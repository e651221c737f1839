"""Inputs of a run that trains adapters: latents of pictures, embeddings of captions, and the base around them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from accel_train.config import UsageError, refuse_without_effect
from accel_train.data.tables.ledger import Ledger, earlier_ledger
from accel_train.data.tensor_cache import TensorCache
from accel_train.domains.diffusion.noise_levels import NoiseLevels
from accel_train.domains.diffusion.timesteps import TimeConfig
from accel_train.domains.images.dataset import PictureDataset, Sample, prepare_pictures, refuse_unread
from accel_train.domains.images.latent_cache import CachedPictures, Filling, cached_latents, cached_texts, text_key
from accel_train.domains.images.options import PictureDataConfig
from accel_train.domains.images.pipelines import encoding
from accel_train.domains.images.pipelines.drawing import reduction
from accel_train.domains.images.pipelines.loading import Base
from accel_train.domains.images.pipelines.objective import Denoising, ObjectiveConfig
from accel_train.domains.images.trained_text.adapters import with_frozen_text
from accel_train.domains.images.weighting.class_pictures import draw_missing, drawn_beyond
from accel_train.domains.images.weighting.masks import Masks, describe_masks, find_masks
from accel_train.domains.images.weighting.prior import ROWS, PairedPictures, joined, prepare_prior


# Compared and hashed by identity, like the data of the other recipes.
@dataclass(frozen=True, eq=False)
class Inputs:
    """Datasets of a run, and the base without its denoiser and text encoders."""

    base: Base
    pipeline: Any
    """Pipeline with VAE and scheduler, on the device."""
    texts: TensorCache
    train: CachedPictures | PairedPictures
    heldout: CachedPictures
    fingerprint: str
    notices: tuple[str, ...]
    prior_weight: float = 1.0
    ledger: Ledger = ()
    """Data seen before by the resumed run, if they may change."""

    @property
    def rows(self) -> int:
        """Pictures of a training sample: 2 with prior preservation."""
        return ROWS if isinstance(self.train, PairedPictures) else 1

    def weights(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the weight of each row in the divisor of the loss, (rows * B,), for a batch of the loader.

        0 for pictures of the prior: their loss is added to the mean of the others (``prior.joined``).
        """
        weight = batch["weight"]
        return torch.cat([weight, *[torch.zeros_like(weight)] * (self.rows - 1)])

    def encoded(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch with mean and logvar of its pictures, those of the prior as further rows.

        Where latents are not cached, the VAE encodes pixels.
        """
        whole = joined(batch, self.prior_weight)
        if "pixels" not in whole:
            return whole
        device = whole["pixels"].device
        latents = encoding.encode_pictures(self.pipeline.vae, whole["pixels"])
        named = {name: value for name, value in latents._asdict().items() if value is not None}
        return whole | {name: value.to(device) for name, value in named.items()}

    def prompt(self, text: str) -> dict[str, Tensor]:
        """Return the embeddings of an encoded text, with a first dimension of 1, on the device of the VAE."""
        found = self.texts.read(text_key(text))
        return {name: value[None].to(self.pipeline.vae.device) for name, value in found.items()}

    def embeddings(self, text: str) -> dict[str, Tensor]:
        """Return the embeddings of an encoded text as the denoiser takes them, to draw it.

        With trained text encoders, the pipeline's denoiser encodes it now, so every process must call it.
        """
        return self.base.family.embed(self.pipeline, self.prompt(text))

    def denoising(
        self, levels: NoiseLevels, denoiser_config: Any, options: ObjectiveConfig, times: TimeConfig
    ) -> Denoising:
        """Return the noising of pictures and the objective of the denoiser, on the device of the VAE."""
        device = self.pipeline.vae.device
        return Denoising(
            family=self.base.family,
            levels=levels.to(device),
            vae=self.pipeline.vae,
            denoiser_config=denoiser_config,
            empty=self._left_out(),
            options=options,
            times=times,
            guidance=self.base.config.guidance,
        )

    def _left_out(self) -> Mapping[str, Tensor]:
        """Return the stand-in for a dropped caption: what guidance leads away from, or tokens of the empty prompt."""
        empty = self.prompt("")
        # Trained encoders take tokens, and zeros in their place would be other words.
        if self.base.trained_text:
            return empty
        return self.base.family.empty(self.pipeline, empty)

    def call_once(self, denoising: Denoising, model: nn.Module) -> Tensor:
        """Return a denoiser's error on one picture, (1,), on the device of its weights. Used to check its attention."""
        device = self.pipeline.vae.device
        sample = {name: value[None].to(device) for name, value in self.train[0].items()}
        batch = self.encoded({**sample, "sample": torch.zeros(1, dtype=torch.int64, device=device)})
        inputs = denoising.noised_in_band(batch, 0)
        where = next(model.parameters()).device
        return denoising.errors(model, {name: value.to(where) for name, value in inputs.items()})


class StartOptions(Protocol):
    """Options of a start that only fills the cache, or opens a run."""

    @property
    def cache_only(self) -> bool: ...
    @property
    def evaluate_only(self) -> bool: ...
    @property
    def overwrite(self) -> bool: ...
    @property
    def resume(self) -> str: ...


def refuse_beside_cache_only(config: StartOptions) -> None:
    """Raise ``UsageError`` for options of a run beside ``cache_only``, with which no run is opened."""
    if config.cache_only:
        because = "with cache_only: true, which ends before a run is opened"
        refuse_without_effect(config, "", ("evaluate_only", "overwrite", "resume"), because)


class DrawnPrompts(Protocol):
    """Prompts that an evaluation draws (``validation.EvaluationConfig``)."""

    @property
    def prompts(self) -> Sequence[str]: ...
    def refuse_side(self, data: PictureDataConfig, pipeline: Any, base: Base) -> None: ...


def prepare_inputs(
    config: PictureDataConfig,
    base: Base,
    evaluation: DrawnPrompts,
    device: torch.device,
    *,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] = lambda: None,
    earlier: Path | None = None,
) -> Inputs:
    """Read the pictures, encode them, their captions and the prompts once, and drop the text encoders. Collective.

    ``earlier``: assets of the checkpoint to resume. Raises ``UsageError``, also for sizes unfit for the base.
    """
    refuse_unread(config)
    pictures = prepare_pictures(config, rank=rank, world_size=world_size, barrier=barrier)
    pipeline = base.components(device)
    _refuse_unfit(config, base, pipeline, evaluation)
    # Before pictures of the class are drawn, which takes minutes: a mask may be refused.
    masked = [sample.picture for data in (pictures.train, pictures.heldout) for sample in data.samples]
    masks = find_masks(config.mask, masked, reduction(pipeline))
    filling = Filling(rank, world_size, barrier, base.config.encoder_batch_size, progress=True)
    # First, while the pipeline has its text encoders: pictures of the class are drawn from a caption.
    prior = _prior(config, base, pipeline, pictures.train, filling)
    datasets = [pictures.train, pictures.heldout, *([prior[0]] if prior else [])]
    samples = [sample for data in datasets for sample in data.samples]
    cut = _describe_cut(pipeline, base, samples, evaluation.prompts)
    texts = cached_texts(
        [*evaluation.prompts, *(sample.caption for sample in samples)],
        partial(encoding.encode_texts, pipeline, base),
        encoding.identity_of_texts(pipeline, base),
        pictures.cache,
        cap_bytes=config.cap_bytes,
        filling=filling,
    )
    # Before pictures are encoded, so that text encoders and the VAE's activations need not fit together.
    freed = encoding.drop_text_encoders(pipeline)
    vae_id = encoding.identity_of_vae(pipeline, base)
    encode = partial(encoding.encode_pictures, pipeline.vae)

    def with_latents(data: PictureDataset, masks: Masks | None = None) -> CachedPictures:
        latents = None
        # A random crop is different each time, so it has no latent to cache.
        if not data.view.random_crop:
            latents = cached_latents(data, encode, vae_id, pictures.cache, cap_bytes=config.cap_bytes, filling=filling)
        return CachedPictures(data, latents, texts, masks)

    train: Any = with_latents(pictures.train, masks)
    notices = [*pictures.notices, *describe_masks(masks, masked), *cut, *_about_encoding(base, freed, train)]
    heldout = with_latents(pictures.heldout, masks)
    fingerprint = pictures.fingerprint
    if masks is not None:
        fingerprint = _joined_hash(fingerprint, masks.fingerprint)
    if prior is not None:
        train = PairedPictures(train, with_latents(prior[0]))
        notices += prior[1]
        fingerprint = _joined_hash(fingerprint, prior[0].fingerprint)
    ledger = earlier_ledger(config.changed, earlier)
    return Inputs(base, pipeline, texts, train, heldout, fingerprint, tuple(notices), config.prior.weight, ledger)


def _prior(
    config: PictureDataConfig, base: Base, pipeline: Any, training: PictureDataset, filling: Filling
) -> tuple[PictureDataset, list[str]] | None:
    """Draw the missing pictures of the prior, and read all of them. Collective."""
    frozen = with_frozen_text(base)
    encode = partial(encoding.encode_texts, pipeline, frozen)
    drawn = draw_missing(config, frozen, pipeline, encode, filling)
    found = prepare_prior(
        config,
        training,
        without=drawn_beyond(config.prior),
        rank=filling.rank,
        world_size=filling.world_size,
        barrier=filling.barrier,
    )
    return None if found is None else (found[0], [*drawn, *found[1]])


def _describe_cut(pipeline: Any, base: Base, samples: Sequence[Sample], prompts: Sequence[str]) -> list[str]:
    # Each once: a picture in several resolutions is several samples.
    named = dict.fromkeys((sample.picture.name, sample.caption) for sample in samples)
    named |= dict.fromkeys((f"the prompt {prompt[:40]!r}", prompt) for prompt in prompts)
    return encoding.describe_cut(pipeline, base, named)


def _about_encoding(base: Base, freed: int, train: CachedPictures) -> list[str]:
    notices = [f"captions are encoded; the text encoders, {freed / (1 << 30):.2f} GiB, are dropped"]
    if base.trained_text:
        names = " and ".join(base.trained_text)
        notices = [f"captions are tokenised, and no embedding is cached: {names} change with every step"]
    if train.latents is None:
        notices.append("pictures are encoded at every step (data.crop random); data.crop centre encodes them once")
    return notices


def _joined_hash(one: str, other: str) -> str:
    return hashlib.sha256(f"{one} {other}".encode()).hexdigest()


def _refuse_unfit(config: PictureDataConfig, base: Base, pipeline: Any, evaluation: DrawnPrompts) -> None:
    """Raise ``UsageError`` for a base that cannot be trained, and for sizes and a guidance that it does not take."""
    _refuse_guidance(base)
    _refuse_scale(base, pipeline)
    _refuse_step(config, base, pipeline)
    evaluation.refuse_side(config, pipeline, base)


def _refuse_guidance(base: Base) -> None:
    """Raise ``UsageError`` for a guidance scale that the denoiser does not take."""
    if base.config.guidance == type(base.config).guidance:
        return
    with torch.device("meta"):
        model: Any = base.denoiser("fp32")
    if not getattr(model.config, "guidance_embeds", False):
        because = f"with base.source: {base.source}, whose denoiser takes no guidance scale"
        instead = "give evaluation.guidance, that of the pictures drawn"
        refuse_without_effect(base.config, "base", ["guidance"], because, instead)


def _refuse_scale(base: Base, pipeline: Any) -> None:
    """Raise ``UsageError`` for a VAE whose latents would all be 0, not finite or of the other sign."""
    # Patches of our own MMDiT have no config.
    scale = getattr(getattr(pipeline.vae, "config", None), "scaling_factor", None)
    if scale is not None and not 0 < scale < math.inf:
        raise UsageError(
            f"base.source {base.source}: the config of its VAE has scaling_factor {scale}, by which latents are "
            "multiplied; a finite number above 0 is required, such as Stable Diffusion's 0.18215. Correct it"
        )


def _refuse_step(config: PictureDataConfig, base: Base, pipeline: Any) -> None:
    """Raise ``UsageError`` for sides that are not whole numbers of latents and patches, or too long."""
    needed = reduction(pipeline) * base.family.patch
    if config.bucket_step % needed:
        raise UsageError(
            f"data.bucket_step {config.bucket_step}: {base.family.name} takes sides that are multiples of {needed} "
            f"(its VAE reduces by {reduction(pipeline)}); give a multiple of {needed}"
        )
    largest = base.largest
    if largest is None:
        return
    sizes = [size for resolution in config.resolutions for size in config.buckets.sizes(resolution)]
    too_large = [size for size in sizes if size[0] > largest[0] or size[1] > largest[1]]
    if too_large:
        height, width = too_large[0]
        raise UsageError(
            f"data.resolutions {list(config.resolutions)}, data.max_aspect {config.max_aspect:g}: a bucket has "
            f"{width}x{height} pixels, but {base.source} draws at most {largest[1]}x{largest[0]}; give "
            f"--data.resolutions {min(largest)} --data.max_aspect 1 --data.bucket_step {needed}"
        )

"""Outputs of a base's encoders for captions and pictures, computed once into the cache on disk."""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train.domains.images.latent_cache import EncoderIdentity, Latents, weights_hash
from accel_train.domains.images.pipelines.family import text_encoders
from accel_train.domains.images.pipelines.loading import Base, DiffusersBase
from accel_train.domains.images.sources import SHOWN_NAMES
from accel_train.domains.models.pretrained import config_hash
from accel_train.wording import shortened

logger = logging.getLogger(__name__)
CUT = ("The following part of your input was truncated", "Token indices sequence length is longer than")
"""Prefixes of two warnings to suppress. That of diffusers repeats the rest of a caption, megabytes for a whole book.
That of transformers announces an error that does not occur, because pipelines cut such a caption."""
OF_TOKENIZERS = "transformers.tokenization_utils_base"
"""Module, and so logger, of the second warning."""


@torch.no_grad()
def encode_texts(pipeline: Any, base: Base, captions: Sequence[str]) -> dict[str, Tensor]:
    """Return the embeddings of captions, by the pipeline's own ``encode_prompt``, by name on the CPU.

    Prompts with a mask are padded with zeros to the longest allowed, so all captions have one shape.
    """
    length = base.prompt_tokens
    with _without_truncated(pipeline):
        encoded = base.family.encode(pipeline, captions, length)
    if "prompt_mask" in encoded:
        assert length is not None, "families with a mask have a default length"
        # Pipelines pad to the longest prompt of a call, and cached rows need one length.
        missing = length - encoded["prompt_mask"].shape[1]
        encoded["prompt"] = F.pad(encoded["prompt"], (0, 0, 0, missing))
        encoded["prompt_mask"] = F.pad(encoded["prompt_mask"], (0, missing))
    return {name: values.cpu() for name, values in encoded.items()}


@contextmanager
def _without_truncated(pipeline: Any) -> Generator[None]:
    """Suppress the libraries' warnings about captions that are cut. ``describe_cut`` names these captions instead."""

    def wanted(record: logging.LogRecord) -> bool:
        return not any(beginning in str(record.msg) for beginning in CUT)

    with ExitStack() as after:
        # A logger for each module: a pipeline may inherit the method from another one.
        for module in {OF_TOKENIZERS, *(kind.__module__ for kind in type(pipeline).__mro__)}:
            logger = logging.getLogger(module)
            logger.addFilter(wanted)
            after.callback(logger.removeFilter, wanted)
        yield


def describe_cut(pipeline: Any, base: Base, captions: Iterable[tuple[str, str]]) -> list[str]:
    """Return a notice for each length at which a diffusers pipeline cuts any of the captions, (name, text).

    Logs a warning if more than half of them are cut.
    """
    tokenizers = {name: getattr(pipeline, name) for name in pipeline.components if name.startswith("tokenizer")}
    by_length: dict[int, tuple[str, Any]] = {}
    for component, tokenizer in tokenizers.items():
        is_clip = type(tokenizer).__name__.startswith("CLIP")
        longest = tokenizer.model_max_length if is_clip else base.prompt_tokens
        if longest is not None:
            by_length.setdefault(longest, (component, tokenizer))
    captions = list(captions)
    notices: list[str] = []
    for longest, (component, tokenizer) in by_length.items():
        cut = [name for name, caption in captions if _is_longer(caption, longest, tokenizer)]
        if cut:
            which = f" by {component}" if len(by_length) > 1 else ""
            names = shortened(cut, SHOWN_NAMES)
            notices.append(f"{len(cut):,} captions are longer than {longest} tokens and are cut{which}: {names}")
        if 2 * len(cut) > len(captions):
            logger.warning("more than half of the captions are cut to %d tokens; what follows is not learned", longest)
    return notices


def _is_longer(caption: str, longest: int, tokenizer: Any) -> bool:
    # A token has at least one byte, so most captions need not be tokenised.
    is_short = len(caption.encode("utf-8", "replace")) < longest - 2
    return not is_short and len(tokenizer(caption, verbose=False).input_ids) > longest


@torch.no_grad()
def encode_pictures(vae: Any, pixels: Tensor) -> Latents:
    """Return mean and logvar (B, C, h, w), fp32 on the CPU, of pixels (B, 3, H, W) from -1 to 1 on any device."""
    is_video = type(vae).__name__ == "AutoencoderKLQwenImage"
    # The VAE of Qwen-Image is one of videos: a picture is a single frame, (B, 3, 1, H, W).
    given = pixels.to(vae.device)
    found = vae.encode(given.unsqueeze(2) if is_video else given)
    if not hasattr(found, "latent_dist"):
        return Latents(found.latent.float().cpu())
    mean = found.latent_dist.mean.float().cpu()
    logvar = found.latent_dist.logvar.float().cpu()
    if is_video:
        return Latents(mean.squeeze(2), logvar.squeeze(2))
    return Latents(mean, logvar)


def identity_of_vae(pipeline: Any, base: Base) -> EncoderIdentity:
    """Return the identity of cached latents."""
    settings = {"dtype": "fp32", "config": config_hash(pipeline.vae)}
    return EncoderIdentity(base.source, base.revision, weights_hash(pipeline.vae), settings)


def identity_of_texts(pipeline: Any, base: Base) -> EncoderIdentity:
    """Return the identity of cached embeddings, or of cached tokens if text encoders are trained."""
    settings = {"dtype": base.config.encoder_precision, "tokens": base.prompt_tokens, "family": base.family.name}
    if isinstance(base, DiffusersBase) and base.trained_text:
        return EncoderIdentity(base.source, base.revision, _hash_of_tokenizers(base), settings | {"tokens_of": "CLIP"})
    encoders = text_encoders(pipeline).values()
    settings["config"] = config_hash(*encoders)
    # The tokenizer of our own MMDiT is a buffer, and so among the weights.
    if isinstance(base, DiffusersBase):
        settings["tokenizers"] = _hash_of_tokenizers(base)
    return EncoderIdentity(base.source, base.revision, weights_hash(*encoders), settings)


def _hash_of_tokenizers(base: DiffusersBase) -> str:
    found = hashlib.sha256()
    for file in sorted(base.directory.glob("tokenizer*/*")):
        if file.is_file():
            # With its name: two files that were exchanged would hash alike.
            found.update(f"{file.parent.name}/{file.name}".encode())
            found.update(file.read_bytes())
    return found.hexdigest()


def drop_text_encoders(pipeline: Any) -> int:
    """Remove the text encoders from a pipeline, and return the bytes of their weights. Its VAE stays."""
    freed = 0
    for name, encoder in text_encoders(pipeline).items():
        # Counted before it is gone, for the notice of the log.
        freed += sum(weight.numel() * weight.element_size() for weight in encoder.parameters())
        pipeline.register_modules(**{name: None})
    # Modules form reference cycles, which only the garbage collector frees.
    gc.collect()
    return freed

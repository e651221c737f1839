"""FLOPs of an MMDiT in closed form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from accel_train.domains.models.layers import TIME_FEATURES
from accel_train.domains.models.mmdit import MODALITIES, MultimodalMMDiTConfig

TRAINING_FACTOR = 3
"""A training step costs three forwards: the backward has two matrix products for each of the forward. Not counted:
recomputation by activation checkpointing (it lowers MFU), and what layers save whose input needs no gradient (less than
0.5 % beyond toy models)."""


def flops_per_sample(config: MultimodalMMDiTConfig, text_length: int, latent_length: int) -> int:
    """Return the FLOPs in matrix products of one sample's forward, equal to torch's FlopCounterMode.

    Multiply by `TRAINING_FACTOR` for training. Lengths are padded lengths, since padding costs the same as text.
    The usual 6 * parameters * tokens is about double: a token passes one stream only, and modulation runs once per
    sample.
    """
    shape = config.transformer
    width = shape.width
    conditioning = shape.modulation_width
    length = text_length + latent_length

    qkv_and_out = 4 * length * width**2
    feed_forward = 2 * shape.ffn_ratio * length * width**2
    attention = 2 * length**2 * width  # scores, and the weighted sum of values
    # Shift, scale and gate of attention and of the feed-forward layer, from one vector for each sample.
    modulation = MODALITIES * 6 * conditioning * width
    blocks = shape.depth * (qkv_and_out + feed_forward + attention + modulation)

    # The two layers of each `TimestepEmbedder`.
    embedders = MODALITIES * (TIME_FEATURES * conditioning + conditioning**2)
    # `TimeConditioning`: from two embeddings to 4 widths, and back to one.
    time_conditioning = embedders + (2 * 4 + 4) * conditioning**2
    latent_layers = 2 * latent_length * (2 * config.latent_dim * width + 2 * width**2)  # encoder and head
    text_head = text_length * width * config.vocabulary_size
    # A multiplication and an addition per element of each product.
    return 2 * (blocks + time_conditioning + latent_layers + text_head)


def work(config: MultimodalMMDiTConfig, micro_batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor | int]:
    """Count this process's part of a training step, for the throughput.

    A micro-batch holds tokens and text_mask (B, S), latent (B, L, Dz) and weight (B,), 0 for padding.
    """
    tokens = [(batch["text_mask"].sum(-1) * batch["weight"]).sum() for batch in micro_batches]
    padded = 0
    forward = 0
    for batch in micro_batches:
        size, length = batch["tokens"].shape
        padded += size * length
        forward += size * flops_per_sample(config, length, batch["latent"].shape[1])
    return {
        "tokens": torch.stack(tokens).sum(),
        "padded_tokens": padded,
        "flops": TRAINING_FACTOR * forward,
    }

"""FLOPs of an MMDiT in closed form."""

from __future__ import annotations

from accel_train.domains.models.layers import TIME_FEATURES
from accel_train.domains.models.mmdit import MODALITIES, MultimodalMMDiTConfig

TRAINING_FACTOR = 3
"""Training costs three forwards: the backward makes two products for each of the forward's. Recomputation by
activation checkpointing is not counted, so that MFU falls where it is used; nor is the small saving of layers
whose input needs no gradient (less than 0.5 % for anything but toys)."""


def flops_per_sample(config: MultimodalMMDiTConfig, text_length: int, latent_length: int) -> int:
    """Multiplications and additions of one sample's forward in matrix products: what torch's FlopCounterMode
    counts. Times `TRAINING_FACTOR` for training.

    Lengths are what the model computes on: the padded ones, since padding costs the same as text. The usual
    6 * parameters * tokens is about double: a token passes one stream only, modulation runs once per sample.
    """
    shape = config.transformer
    width, conditioning, length = shape.width, shape.modulation_width, text_length + latent_length
    per_block = length * (4 + 2 * shape.ffn_ratio) * width**2  # qkv, out; feed-forward
    per_block += 2 * length**2 * width  # scores, and values weighted by them
    per_block += MODALITIES * 6 * conditioning * width  # modulation
    times = MODALITIES * (TIME_FEATURES * conditioning + conditioning**2) + (2 * 4 + 4) * conditioning**2
    latents = latent_length * 2 * (2 * config.latent_dim * width + 2 * width**2)  # encoder and head
    text = text_length * width * config.vocabulary_size
    return 2 * (shape.depth * per_block + times + latents + text)

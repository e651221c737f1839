"""Prior preservation: every training picture is paired with one of its class (arXiv:2208.12242).

The pictures of the prior are cropped to the sizes of the training pictures, so both are rows of one micro-batch. Pairs
are drawn again in each epoch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from accel_train.domains.images.buckets import Size
from accel_train.domains.images.dataset import PictureDataset, Sample, prepare_pictures
from accel_train.domains.images.latent_cache import CachedPictures
from accel_train.domains.images.options import PictureDataConfig
from accel_train.domains.images.weighting.masks import MASK

PREFIX = "prior_"
"""Prefix of the fields of a sample's picture of the prior."""
ROWS = 2
"""Pictures of a sample."""
LOADED: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "sample": lambda value: (value, value),
    # Draws of their own: no sample has a negative number.
    "occurrence": lambda value: (value, -1 - value),
    # Times are spread evenly over each half, as in a batch of twice the size.
    "position": lambda value: (ROWS * value, ROWS * value + 1),
}
"""Fields added to a batch by the loader, for a training picture and its picture of the prior."""


class PairedPictures:
    """Map-style dataset: samples of ``own``, each with a picture of ``prior`` of its size, under ``PREFIX``."""

    def __init__(self, own: CachedPictures, prior: CachedPictures) -> None:
        self.own = own
        self.prior = prior
        self.order = own.order
        self.partners: dict[Size, list[int]] = {}
        for index in range(len(prior)):
            self.partners.setdefault(prior.sample_shape(index), []).append(index)

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the fields of both. The partner comes from Python's global generator, seeded by the loader."""
        item = self.own[index]
        partner = random.choice(self.partners[self.own.sample_shape(index)])
        other = self.prior[partner]
        # The prior has no masks and counts everywhere, but both halves of a batch need the same fields.
        if MASK in item:
            other[MASK] = torch.ones_like(item[MASK])
        return item | {f"{PREFIX}{name}": value for name, value in other.items()}

    def sample_shape(self, index: int) -> Size:
        """Return (height, width) of a sample's bucket, in pixels."""
        return self.own.sample_shape(index)


def prepare_prior(
    config: PictureDataConfig,
    training: PictureDataset,
    *,
    without: Collection[str] = (),
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] = lambda: None,
) -> tuple[PictureDataset, list[str]] | None:
    """Read the pictures of the prior, in the sizes of ``training``, and return them with notices. Collective.

    Pictures named in ``without`` are passed over. None without ``data.prior.path``. Raises ``UsageError`` as for
    training pictures.
    """
    prior = config.prior
    if prior.path is None:
        return None
    source = replace(
        config,
        path=prior.path,
        # Never the training pictures' own: that may name their subject, and would teach it to the whole class.
        default_caption=prior.caption,
        caption_prefix="",
        split="train",
        image_column=None,
        caption_column=None,
        heldout_path=None,
        heldout_fraction=0.0,
        prior=type(prior)(),
    )
    found = prepare_pictures(
        source,
        option="--data.prior.path",
        caption_option="--data.prior.caption",
        without=without,
        rank=rank,
        world_size=world_size,
        barrier=barrier,
    )
    sizes = [sample.target_size for sample in training.samples]
    samples = in_sizes(found.train.samples, sizes)
    notices = [f"prior: {notice}" for notice in found.notices]
    notices.append(f"each training picture comes with one of {prior.path}, whose loss counts {prior.weight:g} times")
    return PictureDataset(samples, training.view), notices


def in_sizes(prior: Sequence[Sample], sizes: Iterable[Size]) -> list[Sample]:
    """Return the pictures of the prior for each size: those in this bucket, or if there are none, all cropped to it."""
    whole = {sample.picture.content: sample for sample in prior}
    resized: list[Sample] = []
    for size in sorted(set(sizes)):
        own = [sample for sample in prior if sample.target_size == size]
        resized += own or [sample._replace(target_size=size) for sample in whole.values()]
    return resized


def joined(batch: Mapping[str, Tensor], weight: float) -> dict[str, Tensor]:
    """Return a batch (B, ...) of ``PairedPictures`` as rows (2 B, ...): its own pictures, then those of the prior.

    The weights (B,) of the prior's pictures are multiplied by ``weight``. The sum of the own pictures' weights divides
    the loss, so it becomes mean(own) + weight * mean(prior), as in diffusers' scripts. Other batches stay as they are.
    """
    if not any(name.startswith(PREFIX) for name in batch):
        return dict(batch)
    rows: dict[str, Tensor] = {}
    for name, value in batch.items():
        if name.startswith(PREFIX):
            continue
        if name == "weight":
            pair = (value, weight * value)
        elif name in LOADED:
            pair = LOADED[name](value)
        else:
            pair = (value, batch[f"{PREFIX}{name}"])
        rows[name] = torch.cat(pair)
    return rows

"""Latents of pictures and outputs of text encoders on disk, computed once by all processes together.

A latent is stored as mean and log-variance, not as a sample: a run draws anew at each use, keyed by (seed, step,
sample). An entry is named by its source: the hash of the picture's file and its frame, or the text. Its folder is named
by the encoder's identity. An edited picture, another encoder or another size therefore never reads an old latent, and
after edits in a folder only the edited pictures are encoded again.

Encoders are passed as functions: this module does not know their library.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from accel_train import rng
from accel_train.config import UsageError
from accel_train.cores import usable_cores
from accel_train.data.datasets import content_hash
from accel_train.data.progress import Progress
from accel_train.data.tensor_cache import Lease, TensorCache
from accel_train.domains.images.buckets import Frame, Size, conditioning

if TYPE_CHECKING:
    from accel_train.domains.images.dataset import PictureDataset
    from accel_train.domains.images.weighting.masks import Masks

logger = logging.getLogger(__name__)

PIXELS = "pixels-1"
"""Version of the pixels of a frame. Change it with the rendering."""
BYTES_BETWEEN_CHECKS = 2**28
"""Bytes written by each process between two checks of the cap."""
MEAN = "mean"
LOGVAR = "logvar"
DRAW_STREAM = "latent/draw"


class Latents(NamedTuple):
    """Output of an encoder for a batch: the distribution of each latent."""

    mean: Tensor  # (B, C, h, w)
    logvar: Tensor | None = None  # (B, C, h, w)
    """Log-variance. None: the encoder has no distribution, and every draw is the mean."""


EncodePixels = Callable[[Tensor], Latents]
"""Maps pixels (B, 3, H, W) float32 from -1 to 1 on the CPU to latents, not yet scaled or shifted for a model."""
EncodeTexts = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Maps texts to named tensors (B, ...), of one shape for all texts."""


@dataclass(frozen=True)
class EncoderIdentity:
    """Everything an encoder's outputs depend on, besides its input."""

    source: str
    """Hub id or path."""
    revision: str | None
    """Commit on the Hub."""
    weights: str
    """`weights_hash` of all its modules."""
    settings: Mapping[str, str | int | float | bool | None] = field(default_factory=dict[str, Any])
    """dtype, maximum number of tokens, hashes of configs and tokenizers, ..."""

    def about(self, kind: str, **more: object) -> dict[str, Any]:
        """Return the description of the encoder's folder in the cache, where equal descriptions share a folder."""
        return {"kind": kind, **asdict(self), "settings": dict(self.settings), **more}


def weights_hash(*modules: nn.Module) -> str:
    """Hash names, dtypes, shapes and bytes of all weights with sha256. Reads every weight once."""
    hashes = [content_hash(module.state_dict()) for module in modules]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def frame_key(content: str, seen: Frame) -> str:
    """Return the key of a frame of a picture. `content` is the hash of its file."""
    return hashlib.sha256(json.dumps([content, list(seen)]).encode()).hexdigest()


def text_key(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def draw(latents: Latents, seed: int, step: int, occurrence: Tensor) -> Tensor:
    """Draw a latent (B, C, h, w) from each distribution: mean + exp(logvar / 2) * noise.

    The noise is keyed by (seed, step, occurrence) (B,), so it is the same on any process, from a cache or not. As in
    diffusers' DiagonalGaussianDistribution, the log-variance is clamped to [-30, 20].
    """
    if latents.logvar is None:
        return latents.mean
    keys = rng.sample_keys(seed, DRAW_STREAM, step, occurrence)
    noise = rng.normal(keys, latents.mean.shape[1:]).to(latents.mean)
    return latents.mean + torch.exp(0.5 * latents.logvar.clamp(-30.0, 20.0)) * noise


# ---------------------------------------------------------------------------------------------------------- filling
@dataclass(frozen=True)
class Filling:
    """Processes filling a cache together, and their batch size."""

    rank: int = 0
    world_size: int = 1
    barrier: Callable[[], None] = lambda: None
    batch_size: int = 8
    progress: bool = False
    local_rank: int = field(default_factory=lambda: int(os.environ.get("LOCAL_RANK", "0")))
    """Rank among the processes of this host, which usually share a disk. Set by the launcher, like their number."""
    local_world_size: int = field(default_factory=lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class _Job(NamedTuple):
    """One entry to compute."""

    key: str
    name: str
    """Name for messages."""
    shape: Size
    """Jobs of one shape are computed in one batch."""
    item: Any


def cached_latents(
    dataset: PictureDataset,
    encode: EncodePixels,
    identity: EncoderIdentity,
    root: Path,
    *,
    cap_bytes: int | None = None,
    filling: Filling | None = None,
) -> TensorCache:
    """Compute the missing latents of every sample and, with flips, of its mirror image.

    Every process calls it (five barriers). Process r first encodes each world_size-th missing entry, then its share of
    those still missing on its host. The entries are leased for the life of the process. Raises ``UsageError`` for
    random crops (their latents cannot be computed ahead), for non-finite latents, for a full disk, and for a cap below
    the needs of the run.
    """
    if dataset.view.random_crop:
        raise UsageError(
            "--data.crop random: the crop changes with each epoch, so its latent cannot be cached. Set crop to centre, "
            "or encode without a cache."
        )
    background = list(dataset.view.background)
    cache = TensorCache(root, identity.about("latents", pixels=PIXELS, background=background), cap_bytes)
    # A mirrored picture has a latent of its own: a VAE does not commute with flips.
    mirrors = (False, True) if dataset.view.flip else (False,)
    jobs: list[_Job] = []
    for index, sample in enumerate(dataset.samples):
        for mirror in mirrors:
            seen = dataset.frame(index, flipped=mirror)
            key = frame_key(sample.picture.content, seen)
            jobs.append(_Job(key, sample.picture.name, seen.target_size, (index, seen)))

    cores, _ = usable_cores()

    def compute(batch: Sequence[_Job]) -> list[dict[str, Tensor]]:
        # Threads are enough: decoders release the interpreter's lock.
        with ThreadPoolExecutor(max(1, cores)) as pool:
            pixels = torch.stack(list(pool.map(lambda job: dataset.pixels(*job.item), batch)))
        latents = encode(pixels)
        rows: list[dict[str, Tensor]] = []
        for row in range(len(batch)):
            tensors = {MEAN: latents.mean[row]}
            if latents.logvar is not None:
                tensors[LOGVAR] = latents.logvar[row]
            rows.append(tensors)
        return rows

    _fill(cache, jobs, compute, filling or Filling(), "latents")
    return cache


def cached_texts(
    texts: Sequence[str],
    encode: EncodeTexts,
    identity: EncoderIdentity,
    root: Path,
    *,
    cap_bytes: int | None = None,
    filling: Filling | None = None,
) -> TensorCache:
    """Compute the missing outputs of text encoders, including the empty text for dropped captions.

    Every process calls it (five barriers), as `cached_latents`.
    """
    cache = TensorCache(root, identity.about("texts"), cap_bytes)
    # Each once and in order: a set is ordered differently on each process, and so would be the shares.
    unique = dict.fromkeys(["", *texts])
    jobs = [_Job(text_key(text), repr(text[:60]), (0, 0), text) for text in unique]

    def compute(batch: Sequence[_Job]) -> list[dict[str, Tensor]]:
        outputs = encode([job.item for job in batch])
        return [{name: tensor[row] for name, tensor in outputs.items()} for row in range(len(batch))]

    _fill(cache, jobs, compute, filling or Filling(), "texts")
    return cache


_leases: list[Lease] = []
"""Held until the process ends."""


def _fill(
    cache: TensorCache,
    jobs: Sequence[_Job],
    compute: Callable[[Sequence[_Job]], list[dict[str, Tensor]]],
    filling: Filling,
    label: str,
) -> None:
    # Two samples of one picture and frame are one entry.
    by_key = {job.key: job for job in jobs}
    _leases.append(cache.lease(list(by_key)))
    # The main process first, because its log is the one to be read. Then the others, whose disk may be another one.
    damaged = cache.delete_damaged() if filling.rank == 0 else 0
    filling.barrier()
    damaged += cache.delete_damaged()
    if damaged:
        logger.warning("%s: %s damaged cache entries are deleted and recomputed", label, f"{damaged:,}")
    missing = cache.missing(by_key)
    # A process that looks after another has begun to write sees fewer missing entries, and would divide them otherwise.
    filling.barrier()
    among_all = missing[filling.rank :: filling.world_size]
    on_host = missing[filling.local_rank :: filling.local_world_size]
    # After the first pass a shared disk has every entry, so the second one computes only on separate disks. The last
    # one computes what is left if processes of a host have separate disks too.
    for keys in (among_all, on_host, missing):
        own = [by_key[key] for key in cache.missing(keys)]
        _compute_all(cache, own, compute, filling, label, sum(map(_cost, by_key.values())))
        filling.barrier()
    # The last entries may have exceeded the cap.
    cache.keep_within_cap()


def _compute_all(
    cache: TensorCache,
    jobs: Sequence[_Job],
    compute: Callable[[Sequence[_Job]], list[dict[str, Tensor]]],
    filling: Filling,
    label: str,
    total_cost: int,
) -> None:
    written = 0
    with Progress(label, len(jobs), filling.progress and filling.rank == 0) as progress, torch.no_grad():
        for batch in _batches(jobs, filling.batch_size):
            sizes = [
                cache.write(job.key, _finite(tensors, job, label))
                for job, tensors in zip(batch, compute(batch), strict=True)
            ]
            if not written:
                # Refused now, and not after a night's work.
                cache.refuse_size(sum(sizes) * total_cost // sum(map(_cost, batch)))
            if written // BYTES_BETWEEN_CHECKS != (written + sum(sizes)) // BYTES_BETWEEN_CHECKS:
                cache.keep_within_cap()
            written += sum(sizes)
            progress.update(len(batch))


def _cost(job: _Job) -> int:
    """Return a number proportional to the size of an entry."""
    return max(1, math.prod(job.shape))


def _batches(jobs: Sequence[_Job], batch_size: int) -> Iterator[list[_Job]]:
    by_shape: dict[Size, list[_Job]] = {}
    for job in jobs:
        by_shape.setdefault(job.shape, []).append(job)
    # Pictures of one size only: a batch has one shape.
    for alike in by_shape.values():
        for start in range(0, len(alike), batch_size):
            yield alike[start : start + batch_size]


def _finite(tensors: Mapping[str, Tensor], job: _Job, label: str) -> Mapping[str, Tensor]:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UsageError(
                f"{label}: {name} of {job.name} contains NaN or infinity. Finite values are required: check the "
                "encoder's weights, or give it a wider dtype (SDXL's VAE overflows in fp16)."
            )
    return tensors


# ---------------------------------------------------------------------------------------------------------- reading
class CachedPictures:
    """Map-style dataset like `PictureDataset`, with cached latents in place of pixels, and cached outputs of texts."""

    def __init__(
        self,
        pictures: PictureDataset,
        latents: TensorCache | None = None,
        texts: TensorCache | None = None,
        masks: Masks | None = None,
    ) -> None:
        self.pictures = pictures
        self.latents = latents
        self.texts = texts
        self.masks = masks
        self.order = pictures.order

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return mean and logvar (C, h, w), or pixels without cached latents; the outputs of the caption's encoder; the
        mask (1, h, w) of a run with masks; and original_size, crop_top_left, target_size (2,) int64.
        """
        seen = self.pictures.draw_frame(index)
        sample = self.pictures.samples[index]
        item = conditioning(seen)
        if self.latents is None:
            item["pixels"] = self.pictures.pixels(index, seen)
        else:
            item |= self.latents.read(frame_key(sample.picture.content, seen))
        if self.texts is not None:
            item |= self.texts.read(text_key(sample.caption))
        if self.masks is not None:
            # A random crop is another frame each time.
            item["mask"] = self.masks.read(sample.picture, seen, keep=not self.pictures.view.random_crop)
        return item

    def sample_shape(self, index: int) -> Size:
        """Return (height, width) of a sample's bucket, in pixels."""
        return self.pictures.sample_shape(index)


def latents_of(batch: Mapping[str, Tensor]) -> Latents:
    """Return the distributions in a batch of `CachedPictures`."""
    return Latents(batch[MEAN], batch.get(LOGVAR))

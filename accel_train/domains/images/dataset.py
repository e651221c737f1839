"""Pictures in their buckets, for the loader, with the split into training and held-out pictures."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from accel_train.config import UsageError, expand_path
from accel_train.data.artifacts import open_cache
from accel_train.data.grouping.shape_groups import GroupOrder
from accel_train.domains.images.buckets import CENTRE, Frame, Size, conditioning, frame, frame_notices, render
from accel_train.domains.images.options import PictureDataConfig
from accel_train.domains.images.scanning import (
    Picture,
    Pictures,
    options_read,
    read_pictures,
    refuse_options,
    without_unread_columns,
)
from accel_train.domains.images.sources import CLASS_FOLDERS, NO_CAPTION, LeftOut, left_out_notices
from accel_train.domains.models.pictures.decoding import Colour, colour, decode_picture

FEW = 4
"""Fewest held-out pictures without a notice. The loss on fewer depends on single pictures."""


class Sample(NamedTuple):
    """A picture in one of its resolutions."""

    picture: Picture
    caption: str
    target_size: Size
    """(height, width) of its bucket."""


@dataclass(frozen=True)
class View:
    """Rendering of samples: random crops and flips, and the background of transparent pixels."""

    background: Colour
    random_crop: bool = False
    flip: bool = False
    max_pixels: int = 0


class PictureDataset:
    """Map-style dataset of pictures, each sample of the size of its bucket.

    Random crops and flips come from Python's global generator, seeded by the loader for each sample and epoch.
    """

    def __init__(self, samples: Sequence[Sample], view: View, group_size: int = 1) -> None:
        self.samples = list(samples)
        self.view = view
        self.fingerprint = _fingerprint(self.samples, view, group_size)
        self.order = GroupOrder([sample.target_size for sample in self.samples], group_size) if samples else None
        """Order of samples for `StepSampler.blocks`."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return pixels (3, H, W) float32 from -1 to 1, and original_size, crop_top_left, target_size (2,) int64."""
        seen = self.draw_frame(index)
        return {"pixels": self.pixels(index, seen), **conditioning(seen)}

    def sample_shape(self, index: int) -> Size:
        """Return (height, width) of a sample's bucket."""
        return self.samples[index].target_size

    def captions(self, indices: Tensor) -> list[str]:
        """Return the captions of samples (B,) int64, such as a batch's ``sample``."""
        return [self.samples[index].caption for index in indices.tolist()]

    def draw_frame(self, index: int) -> Frame:
        """Draw crop and flip of a sample from the global generator. Draws the same numbers whatever the options."""
        # All three are drawn in any case, so that --data.flip does not change the crops.
        down = random.random()
        across = random.random()
        mirror = random.random() < 0.5
        place = (down, across) if self.view.random_crop else CENTRE
        return self.frame(index, place=place, flipped=mirror and self.view.flip)

    def frame(self, index: int, *, place: tuple[float, float] = CENTRE, flipped: bool = False) -> Frame:
        """Return a frame of a sample in its bucket."""
        sample = self.samples[index]
        original = (sample.picture.height, sample.picture.width)
        return frame(original, sample.target_size, place=place, flipped=flipped)

    def pixels(self, index: int, seen: Frame) -> Tensor:
        """Read a sample's file and return the pixels of a frame. Raises ``RuntimeError`` if the file has changed."""
        picture = self.samples[index].picture
        content = picture.bytes.read()
        # The order, the buckets and the caches were made for the old picture.
        if hashlib.sha256(content).hexdigest() != picture.content:
            raise RuntimeError(
                f"{picture.name} has changed since the run began, so it is another picture now. Start the run again, "
                "or put the file back"
            )
        image = decode_picture(content, background=self.view.background, max_pixels=self.view.max_pixels)
        return render(image, seen)


def _fingerprint(samples: Sequence[Sample], view: View, group_size: int) -> str:
    # Where the files lie is left out: a copy of the folder is the same data.
    seen = [list(view.background), view.random_crop, view.flip]
    # With the group size, which decides the order of the samples.
    digest = hashlib.sha256(f"pictures-1 {seen} {group_size}".encode())
    for sample in samples:
        row = [sample.picture.content, sample.caption, sample.target_size]
        digest.update(json.dumps(row).encode())
    return digest.hexdigest()


# Compared and hashed by identity, like the data of the other recipes.
@dataclass(frozen=True, eq=False)
class PictureData:
    """Datasets of a run."""

    train: PictureDataset
    heldout: PictureDataset
    """Empty with `heldout_fraction` 0. Without flips and random crops."""
    cache: Path
    """Folder for data computed from the pictures."""
    fingerprint: str
    """sha256 of both splits' files, captions and sizes."""
    notices: tuple[str, ...]
    """Lines for the main process to log."""


def refuse_unread(config: PictureDataConfig) -> None:
    """Raise ``UsageError`` for an option that none of the sources of pictures reads. Looks only at their kinds."""

    def read_by() -> Iterator[set[str]]:
        for path in (config.path, config.heldout_path):
            if path is not None:
                yield options_read(config.source(path))
        if config.prior.path is not None:
            # Its pictures may have captions beside them. The other options are those of the training pictures.
            yield options_read(config.source(config.prior.path)) & {"caption_extension"}

    refuse_options(config.source(config.path), read_by())


def prepare_pictures(
    config: PictureDataConfig,
    *,
    option: str = "--data.path",
    caption_option: str = "--data.default_caption",
    without: Collection[str] = (),
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] = lambda: None,
) -> PictureData:
    """Read all pictures of a run once and put them into buckets. Every rank calls it with the same options; collective.

    ``option`` and ``caption_option`` name `config.path` and `config.default_caption` in messages. Pictures named in
    ``without`` are passed over. Raises ``UsageError``, also if more than `max_left_out` of the pictures and captions
    cannot be used.
    """
    _refuse_absent_default(config, option)
    cache = open_cache(config.cache_dir, rank, world_size)

    def read(path: str, option: str) -> tuple[list[Sample], list[str]]:
        source = config.source(path, option)
        if config.heldout_path is not None:
            source = without_unread_columns(source)
        found = read_pictures(
            source,
            cache,
            min_side=config.min_side,
            max_pixels=config.max_pixels,
            rank=rank,
            world_size=world_size,
            barrier=barrier,
        )
        kept = [picture for picture in found.pictures if picture.name not in without]
        return _samples(replace(found, pictures=kept), config, source.named, caption_option)

    samples, notices = read(config.path, option)
    if config.heldout_path is not None:
        heldout, heldout_notices = read(config.heldout_path, "--data.heldout_path")
        notices += [f"held out: {notice}" for notice in heldout_notices]
        # By content: a copy under another name would be trained on and still count as held out.
        known = {sample.picture.content for sample in heldout}
        train = [sample for sample in samples if sample.picture.content not in known]
    else:
        train, heldout = split_heldout(samples, config.heldout_fraction)
    barrier()
    if not train:
        raise UsageError(
            f"{option} {config.path!r}: {len(heldout)} held-out samples and none to train on; at least 1 is "
            "required. Add more pictures, or lower --data.heldout_fraction."
        )
    # Held-out pictures are not flipped or randomly cropped, or their loss would differ between evaluations.
    still = View(colour(config.background), max_pixels=config.max_pixels)
    moving = View(still.background, config.crop == "random", config.flip, config.max_pixels)
    train_data = PictureDataset(train, moving, config.group_size)
    heldout_data = PictureDataset(heldout, still)
    fingerprint = hashlib.sha256(f"{train_data.fingerprint} {heldout_data.fingerprint}".encode()).hexdigest()
    sizes = f"{len(train):,} training samples, {len(heldout):,} held out"
    notices = [sizes, *_about_few(train, heldout, config), *notices, *bucket_notices(train_data)]
    return PictureData(train_data, heldout_data, cache, fingerprint, tuple(notices))


def _refuse_absent_default(config: PictureDataConfig, option: str) -> None:
    if config.path == PictureDataConfig.path and not expand_path(config.path).exists():
        # A default that nobody has given is not looked up on the Hub.
        raise UsageError(
            f"{option} {config.path!r}: the default, but there is no such folder here; give a folder of pictures, "
            "parquet files, a folder of dataset.save_to_disk, a Hub id, or emoji for the bundled ones"
        )


def _samples(
    found: Pictures, config: PictureDataConfig, named: str, caption_option: str
) -> tuple[list[Sample], list[str]]:
    """Return a sample for each picture and resolution, and notices of omissions."""
    samples: list[Sample] = []
    left_out = list(found.left_out)
    for picture in found.pictures:
        caption = picture.caption or config.default_caption
        if caption is None:
            reason = NO_CAPTION if picture.caption is None else "its caption is empty"
            left_out.append(LeftOut(picture.name, reason, f"give {caption_option} to use it"))
            continue
        sizes = _target_sizes((picture.height, picture.width), config)
        if not sizes:
            detail = f"{picture.width}x{picture.height}"
            left_out.append(LeftOut(picture.name, "smaller than its bucket (--data.enlarge false)", detail))
        samples += [Sample(picture, f"{config.caption_prefix}{caption}", size) for size in sizes]
    total = len(found) + len(found.left_out)
    if not samples or len(left_out) > config.max_left_out * total:
        reasons = "; ".join(left_out_notices(left_out)) or "the source is empty"
        help_with_classes = ""
        if any(item.reason == NO_CAPTION for item in left_out):
            help_with_classes = f" {CLASS_FOLDERS}"
        raise UsageError(
            f"{named}: {len(left_out)} of {total} pictures and captions cannot be used; at most "
            f"--data.max_left_out {config.max_left_out:g} of them may be left out: {reasons}. Correct them, or raise "
            f"the share.{help_with_classes}"
        )
    return samples, replace(found, left_out=left_out).notices


def _target_sizes(original: Size, config: PictureDataConfig) -> list[Size]:
    """Return a picture's bucket in each of its resolutions. Without `enlarge`, those that enlarge it are left out."""
    buckets = config.buckets
    largest = buckets.largest_filled(original)
    chosen = [largest]
    if config.resolution_choice == "each":
        chosen = [resolution for resolution in config.resolutions if resolution <= largest]
    sizes = [buckets.choose(original, resolution) for resolution in chosen]
    if config.enlarge:
        return sizes
    return [size for size in sizes if frame(original, size).enlargement <= 1]


def split_heldout(samples: Sequence[Sample], fraction: float) -> tuple[list[Sample], list[Sample]]:
    """Return (training, held-out) samples. A picture is held out if its content hash is below `fraction`.

    The split of a picture depends only on its file: it stays the same when others are added, and equal files are on one
    side. If no hash is below it, the smallest one is held out, but a single picture is not. Held-out samples are sorted
    by hash, so the first ones are as good as a random choice.
    """
    contents = {sample.picture.content for sample in samples}
    if len(contents) < 2 or fraction == 0:
        return list(samples), []
    smallest = min(contents)
    # A hash is a hexadecimal number, evenly distributed below 16 to the power of its number of digits.
    limit = fraction * 16 ** len(smallest)
    train: list[Sample] = []
    heldout: list[Sample] = []
    for sample in samples:
        content = sample.picture.content
        below = content == smallest or int(content, 16) < limit
        (heldout if below else train).append(sample)
    # Caption and size decide among samples of one file, so that the order is the same on every machine.
    heldout.sort(key=lambda sample: (sample.picture.content, sample.caption, sample.target_size))
    return train, heldout


def _about_few(train: Sequence[Sample], heldout: Sequence[Sample], config: PictureDataConfig) -> list[str]:
    """Return a line if the split has held out fewer pictures than an evaluation needs."""
    held, trained = ({sample.picture.content for sample in part} for part in (heldout, train))
    if config.heldout_path is not None or not held or len(held) >= FEW:
        return []
    return [
        f"few pictures are held out, {len(held)} of {len(held | trained)}: a hash of each file decides "
        f"(--data.heldout_fraction {config.heldout_fraction:g}), and the loss on so few means little; raise the "
        "fraction, or give --data.heldout_path"
    ]


def bucket_notices(dataset: PictureDataset) -> list[str]:
    """Return the table of buckets as one line, and how many pictures are enlarged or much cropped."""
    counts = Counter(sample.target_size for sample in dataset.samples)
    ordered = sorted(counts.items(), key=lambda item: (math.prod(item[0]), item[0]))
    table = ", ".join(f"{width}x{height}: {count:,}" for (height, width), count in ordered)
    frames = (dataset.frame(index) for index in range(len(dataset)))
    buckets = "1 bucket" if len(counts) == 1 else f"{len(counts)} buckets"
    shown = frame_notices(frames, enlarged_to="fill their bucket (--data.enlarge)", cropped_by="--data.max_aspect")
    return [f"{buckets} (width x height): {table}", *shown]

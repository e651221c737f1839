"""Captioned pictures of your own: sources of training and held-out pictures, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from accel_train.config import UsageError
from accel_train.data.tables.sides import side_keys
from accel_train.data.tables.text_sources import held_out_below, split_key
from accel_train.domains.images.buckets import frame, frame_notices
from accel_train.domains.images.options import MIN_SIDE
from accel_train.domains.images.rows.picture_rows import ROWS_PER_SHARD, Captioned, Parts
from accel_train.domains.images.scanning import (
    Picture,
    Pictures,
    options_read,
    read_pictures,
    refuse_options,
    without_unread_columns,
)
from accel_train.domains.images.sources import CLASS_FOLDERS, NO_CAPTION, LeftOut, Source, left_out_notices
from accel_train.domains.models.pictures.decoding import decode_picture
from accel_train.domains.models.pictures.patching import square

OPTIONS = {"split": "--data.split", "image_column": "--pictures.image_column", "caption_column": "--data.text_column"}
"""Names of the options of a source, in messages."""
SPLIT = "split="
TEXT = "text"
"""Default of `data.text_column`, with which captions may also be in ``caption``."""


class PictureOptions(Protocol):
    """The options of the `pictures` group that are read for your own pictures."""

    @property
    def image_column(self) -> str | None: ...
    @property
    def max_left_out(self) -> float: ...
    @property
    def size(self) -> int: ...


class DataOptions(Protocol):
    """The options of the `data` group that are read for pictures."""

    @property
    def path(self) -> str: ...
    @property
    def split(self) -> str: ...
    @property
    def text_column(self) -> str: ...
    @property
    def heldout_path(self) -> str | None: ...
    @property
    def heldout_fraction(self) -> float: ...
    @property
    def min_words(self) -> int: ...
    @property
    def cache_dir(self) -> str | None: ...


@dataclass(frozen=True)
class OwnPictures:
    """Pictures with captions. A picture with several captions has an entry for each."""

    train: Sequence[Picture]
    heldout: Sequence[Picture]
    """Empty without a held-out source of its own: the captions are split."""
    notices: tuple[str, ...]
    split_keys: Mapping[str, int]
    """`split_key` of the captions that are split."""

    @property
    def facts(self) -> tuple[Any, ...]:
        """Everything that the rows depend on."""
        train = ((picture.content, picture.caption) for picture in self.train)
        if not self.heldout:
            return (*train,)
        return (*train, "heldout", *((picture.content, picture.caption) for picture in self.heldout))

    @property
    def total(self) -> int:
        """Number of pictures in the files of rows."""
        return sum(len({picture.content for picture in part}) for part in (self.train, self.heldout))

    def parts(self, size: int) -> Parts:
        """Yield the pictures, cut to squares of ``size`` pixels."""
        for part, pictures in (("train", self.train), ("heldout", self.heldout)):
            captions: dict[str, list[str]] = {}
            for picture in pictures:
                captions.setdefault(picture.content, []).append(str(picture.caption))
            # The last of equal files is as good as the first.
            files = {picture.content: picture for picture in pictures}
            contents = list(captions)
            # Shard by shard, so that a large folder is never in memory as a whole.
            for start in range(0, len(contents), ROWS_PER_SHARD):
                piece = contents[start : start + ROWS_PER_SHARD]
                squares = [square(decode_picture(files[content].bytes.read()), size) for content in piece]
                yield part, Captioned([captions[content] for content in piece], torch.stack(squares), piece)


def read_own(
    config: PictureOptions,
    data: DataOptions,
    cache: Path,
    *,
    rank: int,
    world_size: int,
    barrier: Callable[[], None],
) -> OwnPictures:
    """Read the pictures of `data.path`, and those of `data.heldout_path`. Collective (a barrier for each).

    Training pictures that are held out too are left out. Raises ``UsageError``, also for options that are not read, if
    more than `max_left_out` of the pictures and captions cannot be used, and if there is nothing to train or evaluate
    on.
    """
    sources = _sources(config, data)
    refuse_options(sources[0], map(options_read, sources))

    def read(source: Source) -> tuple[list[Picture], list[str]]:
        if len(sources) > 1:
            source = without_unread_columns(source)
        side = _shortest_side(config)
        found = read_pictures(source, cache, min_side=side, rank=rank, world_size=world_size, barrier=barrier)
        return _with_captions(found, source, config)

    train, notices = read(sources[0])
    heldout: list[Picture] = []
    if len(sources) > 1:
        heldout, heldout_notices = read(sources[1])
        notices += [f"held out: {notice}" for notice in heldout_notices]
        train, both = _without_heldout(train, heldout)
        if both:
            notices.append(f"{both:,} captions of held-out pictures are left out of training")
    if data.heldout_path is None:
        split_keys = _split(train, data)
    else:
        split_keys = {}
        _refuse_too_few(train, heldout, data)
    return OwnPictures(train, heldout, tuple(notices), split_keys)


def _shortest_side(config: PictureOptions) -> int:
    # A picture as large as those of the run is not too small for it.
    return min(MIN_SIDE, config.size)


def _square_notices(pictures: Sequence[Picture], size: int) -> list[str]:
    """Return lines on samples that are enlarged or much cropped by ``square``."""
    frames = (frame((picture.height, picture.width), (size, size)) for picture in pictures)
    return frame_notices(frames, enlarged_to=f"--pictures.size {size}", cropped_by="squares are cut at the centre")


def _without_heldout(train: Sequence[Picture], heldout: Sequence[Picture]) -> tuple[list[Picture], int]:
    """Return the training pictures that are not held out, and the number of the others."""
    # By content: a copy under another name would be trained on and still count as held out.
    known = {picture.content for picture in heldout}
    kept = [picture for picture in train if picture.content not in known]
    return kept, len(train) - len(kept)


def _sources(config: PictureOptions, data: DataOptions) -> list[Source]:
    """Return the sources of training pictures and, if they have their own, of held-out ones."""
    column = None if data.text_column == TEXT else data.text_column
    train = Source(data.path, data.split, config.image_column, column, options=OPTIONS)
    path = data.heldout_path
    if path is None:
        return [train]
    if not path.startswith(SPLIT):
        return [train, replace(train, path=path, option="--data.heldout_path")]
    if "split" not in options_read(train):
        raise UsageError(
            f"--data.heldout_path {path!r}: {train.named} has no splits. Give the path of held-out pictures."
        )
    return [train, replace(train, split=path.removeprefix(SPLIT))]


def _with_captions(found: Pictures, source: Source, config: PictureOptions) -> tuple[list[Picture], list[str]]:
    """Return the pictures with a caption, and notices. A picture without one cannot be learned in any direction."""
    pictures = [picture for picture in found.pictures if picture.caption]
    without = [LeftOut(picture.name, NO_CAPTION) for picture in found.pictures if not picture.caption]
    left_out = [*found.left_out, *without]
    if not pictures and without:
        raise UsageError(
            f"{source.named}: none of {len(without):,} pictures has a caption. Write captions in .txt files beside the "
            f"pictures, or name their column with {source.options['caption_column']}. {CLASS_FOLDERS}"
        )
    total = len(found) + len(found.left_out)
    if len(left_out) > config.max_left_out * total:
        reasons = "; ".join(left_out_notices(left_out))
        raise UsageError(
            f"{source.named}: {len(left_out):,} of {total:,} pictures and captions cannot be used; at most "
            f"--pictures.max_left_out {config.max_left_out:g} of them may be left out: {reasons}. Correct them, or "
            "raise the share."
        )
    notices = replace(found, left_out=left_out).notices
    return pictures, [*notices, *_square_notices(pictures, config.size)]


def _refuse_too_few(train: Sequence[Picture], heldout: Sequence[Picture], data: DataOptions) -> None:
    """Raise ``UsageError`` for too few captions on a side, before anything is encoded."""
    if not train or len(heldout) < 2:
        raise UsageError(
            f"--data.path {data.path!r}, --data.heldout_path {data.heldout_path!r}: {len(train)} training and "
            f"{len(heldout)} held-out captions; at least 1 and 2 are required, of pictures that are not in both. Add "
            "more pictures."
        )


def _split(train: Sequence[Picture], data: DataOptions) -> dict[str, int]:
    """Return the `split_key` of each caption, by which the rows are split once they are read.

    Raises ``UsageError`` for a split that leaves a side without captions, before anything is encoded.
    """
    # Shorter captions are left out before the split.
    kept = [picture for picture in train if len(str(picture.caption).split()) >= data.min_words]
    captions = [str(picture.caption) for picture in kept]
    keys = {caption: split_key(caption) for caption in dict.fromkeys(captions)}
    sides = side_keys([keys[caption] for caption in captions], [picture.content for picture in kept])
    bound = held_out_below(data.heldout_fraction)
    held_out = sum(key < bound for key in sides)
    if held_out < len(kept) and held_out >= 2:
        return keys
    # The upper half of a key decides the side.
    groups = len({key >> 32 for key in sides})
    fraction = _working_fraction(sides)
    remedy = "or add more pictures"
    if fraction is not None:
        remedy = f"set --data.heldout_fraction {fraction:g}, {remedy}"
    raise UsageError(
        f"--data.path {data.path!r}, --data.heldout_fraction {data.heldout_fraction:g}: {len(kept) - held_out} "
        f"training and {held_out} held-out captions; at least 1 and 2 are required. All pictures of a caption, and all "
        f"captions of a picture, stay on one side, which leaves {groups:,} groups to choose from. Give "
        f"separate held-out pictures with --data.heldout_path, {remedy}."
    )


def _working_fraction(sides: Sequence[int]) -> float | None:
    """Return the smallest fraction, in hundredths, that leaves enough captions on both sides. None if there is none."""
    for percent in range(1, 100):
        held_out = sum(key < held_out_below(percent / 100) for key in sides)
        if 2 <= held_out < len(sides):
            return percent / 100
    return None

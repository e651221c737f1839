"""Options of the `data` group of recipes that learn from pictures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from accel_train.config import (
    Fraction,
    FractionBelowOne,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UsageError,
    expand_path,
    refuse_without_effect,
)
from accel_train.data.tables.ledger import Changed
from accel_train.domains.images.buckets import Buckets
from accel_train.domains.images.sources import Source, refuse_extension
from accel_train.domains.models.pictures import decoding

MIN_SIDE = 16
"""Shortest side of a picture, in pixels. Icons and spacers of web pages are smaller."""
DRAWING_STEPS = 50
"""Default number of denoising steps, as in diffusers' DreamBooth script."""


FREE_TO_CHANGE = ("data.cache_dir", "data.cache_gib", "data.changed")
"""Options that a resume may change: they change no sample."""


@dataclass(frozen=True)
class PriorConfig:
    """Prior preservation (DreamBooth, arXiv:2208.12242): what the base knows of a class is kept."""

    path: str | None = None
    """Pictures of the class with captions: any source accepted by data.path. Each training picture then comes with one
    of them, cut to the same size, so a step takes twice the memory and time. None: none."""
    weight: PositiveFloat = 1.0
    """Weight of their loss, which is added to that of the training pictures."""
    caption: str | None = None
    """Caption of those that have none, such as "a dog", and of those that are drawn. `data.default_caption` is not
    theirs. None: those without one are left out."""
    count: NonNegativeInt = 0
    """Minimum number of class pictures in `data.prior.path`, then a folder. Before training the base generates the
    missing ones from `data.prior.caption`, as squares of the first of `data.resolutions`. Your own there are all used,
    of the generated ones the first up to the count. 0: all that are there."""
    steps: PositiveInt = DRAWING_STEPS
    """Denoising steps of a picture that is drawn."""

    def __post_init__(self) -> None:
        if self.path is None:
            names = ("weight", "caption", "count", "steps")
            refuse_without_effect(self, "data.prior", names, "without data.prior.path", "give it pictures of the class")
        if self.count and not (self.caption and self.caption.strip()):
            raise UsageError(
                f"data.prior.count {self.count}: the base draws pictures of data.prior.caption, which is not set; "
                "give --data.prior.caption 'a dog'"
            )
        if self.count and self.path is not None and self.path.partition(":")[0] in ("emoji", "hub"):
            raise UsageError(
                f"data.prior.count {self.count}: the base draws into a folder, and data.prior.path is {self.path}; "
                "give a folder, or leave the count out"
            )
        if self.count == 0:
            because = "without data.prior.count"
            refuse_without_effect(self, "data.prior", ["steps"], because, "give --data.prior.count 200")

    @property
    def makes_path(self) -> bool:
        """True if a start creates the folder ``path`` when it does not exist."""
        return self.count > 0


@dataclass(frozen=True)
class MaskConfig:
    """Masked loss: only a part of each picture is learned."""

    source: Literal["none", "alpha", "files"] = "none"
    """alpha: what is opaque counts. files: what is white in NAME.mask.png beside NAME.png counts. Pictures without a
    mask count whole."""
    outside: Fraction = 0.0
    """Weight of the rest. The weighted error is still divided by all latents, so small parts give small losses."""

    def __post_init__(self) -> None:
        if self.source == "none":
            because = "without data.mask.source"
            refuse_without_effect(self, "data.mask", ["outside"], because, "give alpha or files")


@dataclass(frozen=True)
class PictureDataConfig:
    """Source of pictures and captions, and how they are scaled and cropped."""

    path: str = "pictures"
    """A folder of pictures (captions in text files beside them, or in metadata.jsonl or metadata.csv), parquet files, a
    folder written by dataset.save_to_disk, or a Hub id (owner/name, owner/name:configuration@revision). emoji or
    emoji:GROUP: the bundled ones, such as emoji:flags."""
    changed: Changed = "refuse"
    """Pictures or captions that changed since the run began, such as added ones. refuse: do not resume. allow: continue
    with them; assets/ledger.json of a checkpoint records which data were used from which step."""
    split: str = "train"
    """Split of a saved or Hub dataset."""
    image_column: str | None = None
    """Column of pictures in a table. None: the only one."""
    caption_column: str | None = None
    """Column of captions in a table, metadata.jsonl or metadata.csv; of a column of classes, their names. None: text
    or caption."""
    caption_extension: str = ".txt"
    """Extension of the text file beside a picture."""
    default_caption: str | None = None
    """Caption of pictures that have none, but not of those of the prior; may be empty. None: they are left out."""
    caption_prefix: str = ""
    """Text before every caption, such as a trigger word: 'sks, '. Not before those of the prior."""
    resolutions: tuple[PositiveInt, ...] = (512,)
    """Square roots of the largest areas in pixels. Several make one run of several resolutions."""
    resolution_choice: Literal["largest", "each"] = "largest"
    """With several resolutions. largest: a picture comes in the highest one that it fills without being enlarged.
    each: it comes in each of these as a sample of its own."""
    bucket_step: PositiveInt = 64
    """Sides of buckets are multiples of it: at least the reduction of the VAE times the size of a patch."""
    max_aspect: float = 2.0
    """Largest ratio of a bucket's sides. 1: squares alone. What a bucket does not cover is cropped."""
    enlarge: bool = True
    """Enlarge pictures that are smaller than their bucket. false: they are left out."""
    crop: Literal["centre", "random"] = "centre"
    """Which part is kept of a picture that is longer than its bucket. random: drawn for each epoch and sample."""
    flip: bool = False
    """Mirror half of the training samples, drawn for each epoch. Not for texts, and not for faces to be recognised."""
    background: str = "white"
    """Colour behind transparent pixels: a name or #rrggbb."""
    min_side: PositiveInt = MIN_SIDE
    """Shortest side in pixels. Smaller pictures are left out."""
    max_pixels: PositiveInt = decoding.MAX_PIXELS
    """Most pixels of a picture. Larger ones are left out before they are decoded."""
    max_left_out: Fraction = 0.1
    """Largest share of pictures and captions left out for any reason. More is an error."""
    group_size: PositiveInt = 4
    """Samples of one bucket that are drawn one after another, part of the order of samples. A micro-batch has one
    bucket, so larger groups make fewer and fuller ones; 1 mixes best."""
    heldout_path: str | None = None
    """Held-out pictures: any source accepted by path. None: heldout_fraction of path."""
    heldout_fraction: FractionBelowOne = 0.05
    """Share of pictures held out for evaluation, at least one, by a hash of the file. 0: none. Refused with
    heldout_path."""
    cache_dir: str | None = None
    """Cache between runs. None: $ACCEL_TRAIN_CACHE, else ~/.cache/accel_train."""

    cache_gib: PositiveFloat | None = None
    """Largest size in GiB of the latents and outputs of text encoders in the cache, of all runs together. What was used
    longest ago is deleted first, and nothing that a live run uses. None: no limit."""
    prior: PriorConfig = field(default_factory=PriorConfig)
    mask: MaskConfig = field(default_factory=MaskConfig)

    def __post_init__(self) -> None:
        _ = self.buckets
        # The default is nobody's request, and 0 means the same.
        if self.heldout_path is not None and self.heldout_fraction:
            because = f"with data.heldout_path: {self.heldout_path}"
            refuse_without_effect(self, "data", ["heldout_fraction"], because)
        self._refuse_prior_below()
        decoding.colour(self.background)
        if len(set(self.resolutions)) < len(self.resolutions):
            raise UsageError(
                f"--data.resolutions {' '.join(map(str, self.resolutions))}: each may be given only once, and a number "
                f"is the side of a square; give --data.resolutions {self.resolutions[0]}"
            )
        if len(self.resolutions) == 1:
            because = f"with one resolution in data.resolutions: {self.resolutions[0]}"
            refuse_without_effect(self, "data", ["resolution_choice"], because, "give several")
        refuse_extension(self.caption_extension, "--data.caption_extension")

    def _refuse_prior_below(self) -> None:
        """Raise ``UsageError`` if the next start would read the drawn pictures of the class as training pictures."""
        if self.prior.path is None or self.prior.count == 0:
            return
        # Through links as well.
        training = expand_path(self.path).resolve()
        drawn = expand_path(self.prior.path).resolve()
        if drawn == training or training in drawn.parents:
            raise UsageError(
                f"data.prior.path {self.prior.path!r}: is inside data.path {self.path!r}, whose pictures are all "
                "learned, including those that data.prior.count draws; give a folder outside it"
            )

    @property
    def buckets(self) -> Buckets:
        """The sizes that pictures are scaled to."""
        return Buckets(self.resolutions, self.bucket_step, self.max_aspect)

    @property
    def cap_bytes(self) -> int | None:
        """`cache_gib` in bytes."""
        return None if self.cache_gib is None else int(self.cache_gib * 2**30)

    def source(self, path: str, option: str = "--data.path") -> Source:
        """Return the source to read at `path`, with these options."""
        return Source(
            path=path,
            split=self.split,
            image_column=self.image_column,
            caption_column=self.caption_column,
            caption_extension=self.caption_extension,
            option=option,
        )

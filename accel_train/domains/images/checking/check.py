"""Check of a dataset of pictures before a run: sizes, buckets, duplicates, captions, quality, and a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from accel_train.config import Fraction, NonNegativeInt, PositiveInt, UsageError
from accel_train.cores import usable_cores
from accel_train.data.progress import Progress
from accel_train.domains.images.buckets import Buckets, frame
from accel_train.domains.images.checking import quality
from accel_train.domains.images.checking.quality import Measures
from accel_train.domains.images.scanning import Picture, Pictures, read_pictures
from accel_train.domains.images.sources import OPTIONS, Source, left_out_notices, refuse_extension
from accel_train.domains.models.pictures.decoding import decode_picture
from accel_train.wording import shortened

SHOWN = 8
"""Most pictures to name for each reason."""
FLAT = 1.0
"""A picture with less contrast counts as one colour."""
LOW = 0.5
"""Scores below it are listed as reasons."""


@dataclass(frozen=True)
class CheckConfig:
    """Options of the check, and the thresholds of its verdict."""

    resolutions: tuple[PositiveInt, ...] = (512,)
    """Square roots of the largest areas of the buckets, as data.resolutions of a run."""
    bucket_step: PositiveInt = 64
    """Sides of buckets are multiples of it."""
    max_aspect: float = 2.0
    """Largest ratio of a bucket's sides."""
    split: str = "train"
    """Split of a saved or Hub dataset."""
    image_column: str | None = None
    """Column of pictures in a table. None: the only one."""
    caption_column: str | None = None
    """Column of captions in a table, metadata.jsonl or metadata.csv. None: text or caption."""
    caption_extension: str = ".txt"
    """Extension of the text file beside a picture."""
    min_side: PositiveInt = 16
    """Shortest side in pixels of a usable picture."""
    max_words: PositiveInt = 60
    """Most words of a caption that is not too long. CLIP reads 77 tokens, about 60 words, and cuts the rest."""
    max_distance: NonNegativeInt = 4
    """Most bits, of 64, in which the perceptual hashes of near duplicates differ."""
    min_quality: Fraction = 0.25
    """Quality below which a picture counts as not usable."""
    min_dataset_quality: Fraction = 0.5
    """Quality below which the dataset fails: exit code 1."""
    json: bool = False
    """Print everything as JSON, with a row for each picture."""
    cache_dir: str | None = None
    """Cache of what was read before. None: $ACCEL_TRAIN_CACHE, else ~/.cache/accel_train."""

    def __post_init__(self) -> None:
        # Refused with the options, and not after an hour of reading.
        _ = self.buckets
        refuse_extension(self.caption_extension, "--caption_extension")

    @property
    def buckets(self) -> Buckets:
        """The sizes that training scales pictures to."""
        return Buckets(self.resolutions, self.bucket_step, self.max_aspect)


class Row(NamedTuple):
    """One picture."""

    picture: Picture
    measures: Measures
    scores: dict[str, float]
    bucket: tuple[int, int]
    """(height, width)"""

    @property
    def quality(self) -> float:
        """Quality of the picture, from 0 to 1."""
        return quality.quality(self.scores)

    @property
    def words(self) -> int:
        """Number of words in the caption."""
        return len((self.picture.caption or "").split())

    def reasons(self) -> list[str]:
        """Return the low scores, lowest first."""
        low = sorted((value, name) for name, value in self.scores.items() if value < LOW)
        return [f"{name} {value:.2f}" for value, name in low]


@dataclass(frozen=True)
class Report:
    """Findings of a check."""

    found: Pictures
    rows: Sequence[Row]
    exact: Sequence[Sequence[int]]
    """Groups of rows with the same file."""
    near: Sequence[Sequence[int]]
    """Groups of similar-looking rows, exact duplicates included."""
    config: CheckConfig

    @property
    def low(self) -> list[Row]:
        """Pictures below `min_quality`, the worst first."""
        worse = [row for row in self.rows if row.quality < self.config.min_quality]
        return sorted(worse, key=lambda row: (row.quality, row.picture.name))

    @property
    def usable(self) -> float:
        """Share of all pictures and captions that are in use and not below `min_quality`."""
        used = len(self.rows) - len(self.low)
        # Unreadable pictures count as well: a dataset with half of its pictures broken is not a good one.
        every = len(self.rows) + len(self.found.left_out)
        return used / max(1, every)

    @property
    def without_caption(self) -> list[str]:
        """Names of the pictures whose caption is missing or empty."""
        return [row.picture.name for row in self.rows if not row.picture.caption]

    @property
    def duplicates(self) -> float:
        """Share of pictures similar to an earlier one."""
        return sum(len(group) - 1 for group in self.near) / max(1, len(self.rows))

    @property
    def quality(self) -> float:
        """Quality of the dataset, from 0 to 1."""
        return quality.dataset_quality([row.quality for row in self.rows], self.usable, self.duplicates)

    @property
    def passed(self) -> bool:
        return self.quality >= self.config.min_dataset_quality

    def names(self, group: Sequence[int]) -> list[str]:
        """Return the names of the pictures of some rows."""
        return [self.rows[index].picture.name for index in group]


def check(path: str, config: CheckConfig, cache: Path) -> Report:
    """Read and measure every picture of a source. Raises ``UsageError`` for a source without usable pictures."""
    source = Source(
        path,
        config.split,
        config.image_column,
        config.caption_column,
        config.caption_extension,
        option="data check",
        options={name: f"--{name}" for name in OPTIONS},
    )
    found = read_pictures(source, cache, min_side=config.min_side, progress=not config.json)
    if not found.pictures:
        reasons = "; ".join(left_out_notices(found.left_out))
        raise UsageError(f"data check {path!r}: no usable picture: {reasons}. At least 1 is required.")
    buckets = config.buckets

    def row(picture: Picture) -> Row:
        measures = quality.measure(decode_picture(picture.bytes.read()))
        original = (picture.height, picture.width)
        bucket = buckets.choose(original, buckets.largest_filled(original))
        words = len((picture.caption or "").split())
        pixels = picture.height * picture.width
        found_scores = quality.scores(measures, pixels, bucket[0] * bucket[1], words, config.max_words)
        return Row(picture, measures, found_scores, bucket)

    # Threads are enough: decoding and resizing in Pillow and numpy run outside of the interpreter's lock.
    cores, _ = usable_cores()
    rows: list[Row] = []
    with Progress("check", len(found), enabled=not config.json) as progress, ThreadPoolExecutor(max(1, cores)) as pool:
        # In the order of the pictures, whichever thread is done first.
        for made in pool.map(row, found.pictures):
            rows.append(made)
            progress.update(1)
    # Identical files first, by their hash. The groups of similar-looking pictures below include them.
    by_content: dict[str, list[int]] = {}
    for index, made in enumerate(rows):
        by_content.setdefault(made.picture.content, []).append(index)
    exact = [group for group in by_content.values() if len(group) > 1]
    near = quality.near_duplicates([_looks(made) for made in rows], config.max_distance)
    return Report(found, rows, exact, near, config)


def _looks(row: Row) -> int:
    # A picture of one colour has a hash of rounding errors: only the same file is its duplicate.
    return row.measures.looks if row.measures.contrast >= FLAT else int(row.picture.content[:16], 16)


# ---------------------------------------------------------------------------------------------------------- as text
def render(report: Report) -> list[str]:
    """Return the report as lines."""
    rows = report.rows
    lines = [f"{len(rows):,} pictures, {len(report.found.left_out):,} left out"]
    lines += [f"  {notice}" for notice in report.found.notices]
    if report.without_caption:
        # Not a finding of this check: training may be given a default caption.
        lines.append(f"  {len(report.without_caption):,} more are left out in training without --data.default_caption")
    lines += ["", "sizes (min, median, max)"]
    for name in ("width", "height"):
        lines.append(f"  {name}: {_summarised([getattr(row.picture, name) for row in rows])}")
    lines += ["", "buckets (width x height): pictures, enlarged, kept share of the area", *_bucket_lines(rows)]
    lines += ["", "captions", *_caption_lines(rows, report.config.max_words)]
    lines += ["", "duplicates", *_duplicate_lines(report)]
    lines += ["", "scores of the pictures (min, median, max)"]
    for name in rows[0].scores:
        lines.append(f"  {name}: {_summarised([row.scores[name] for row in rows], 2)}")
    lines.append(f"  quality: {_summarised([row.quality for row in rows], 2)}")
    return [*lines, "", *_verdict(report)]


def _summarised(values: Sequence[float], digits: int = 0) -> str:
    found = quality.summary(values)
    return ", ".join(f"{value:.{digits}f}" for value in found.values())


def _bucket_lines(rows: Sequence[Row]) -> list[str]:
    lines: list[str] = []
    counts = Counter(row.bucket for row in rows)
    for bucket, count in sorted(counts.items()):
        frames = [frame((row.picture.height, row.picture.width), bucket) for row in rows if row.bucket == bucket]
        enlarged = sum(seen.enlargement > 1 for seen in frames)
        kept = sum(seen.kept for seen in frames) / count
        lines.append(f"  {bucket[1]}x{bucket[0]}: {count:,}, {enlarged:,}, {kept:.0%}")
    return lines


def _caption_lines(rows: Sequence[Row], max_words: int) -> list[str]:
    # None is a picture without a caption file, "" one whose file is empty: two mistakes with two remedies.
    missing = [row.picture.name for row in rows if row.picture.caption is None]
    empty = [row.picture.name for row in rows if row.picture.caption == ""]
    long = [row.picture.name for row in rows if row.words > max_words]
    texts = Counter(row.picture.caption for row in rows if row.picture.caption)
    repeated = sum(count - 1 for count in texts.values())
    vocabulary = {word.lower() for text in texts for word in (text or "").split()}
    lines = [
        f"  words (min, median, max): {_summarised([row.words for row in rows])}; {len(vocabulary):,} different ones",
        f"  {len(texts):,} different captions, {repeated:,} repeated",
    ]
    for names, reason in ((missing, "without one"), (empty, "empty"), (long, f"longer than {max_words} words")):
        if names:
            lines.append(f"  {len(names):,} {reason}: {shortened(names, SHOWN)}")
    return lines


def _duplicate_lines(report: Report) -> list[str]:
    lines: list[str] = []
    for groups, reason in ((report.exact, "the same file"), (report.near, "look alike")):
        lines += [f"  {reason}: {shortened(report.names(group), SHOWN)}" for group in groups[:SHOWN]]
        if len(groups) > SHOWN:
            lines.append(f"  {reason}: {len(groups) - SHOWN:,} more groups")
    return lines or ["  none"]


def _verdict(report: Report) -> list[str]:
    config = report.config
    lines = [
        f"  {row.picture.name}: quality {row.quality:.2f}, {', '.join(row.reasons())}" for row in report.low[:SHOWN]
    ]
    if lines:
        lines.insert(0, f"{len(report.low):,} pictures below --min_quality {config.min_quality:g}")
    lines += [
        f"quality of the dataset {report.quality:.2f} = mean of the pictures "
        f"{sum(row.quality for row in report.rows) / len(report.rows):.2f} x usable {report.usable:.2f} x not repeated "
        f"{1 - report.duplicates:.2f}"
    ]
    word = "passed" if report.passed else "FAILED"
    lines.append(f"{word}: --min_dataset_quality {config.min_dataset_quality:g}")
    return lines


# ---------------------------------------------------------------------------------------------------------- as JSON
def as_tree(report: Report) -> dict[str, Any]:
    """Return the report as plain values."""
    counts = Counter(row.bucket for row in report.rows)
    return {
        "passed": report.passed,
        "quality": report.quality,
        "usable": report.usable,
        "duplicates": report.duplicates,
        "config": asdict(report.config),
        "without_caption": report.without_caption,
        "left_out": [item._asdict() for item in report.found.left_out],
        "buckets": [{"width": width, "height": height, "pictures": n} for (height, width), n in counts.items()],
        "exact_duplicates": [report.names(group) for group in report.exact],
        "near_duplicates": [report.names(group) for group in report.near],
        "pictures": [_row_tree(row) for row in report.rows],
    }


def _row_tree(row: Row) -> dict[str, Any]:
    return {
        "name": row.picture.name,
        "content": row.picture.content,
        "width": row.picture.width,
        "height": row.picture.height,
        "caption": row.picture.caption,
        "words": row.words,
        "bucket": [row.bucket[1], row.bucket[0]],
        "sharpness": row.measures.sharpness,
        "brightness": row.measures.brightness,
        "contrast": row.measures.contrast,
        "looks": f"{row.measures.looks:016x}",
        "scores": row.scores,
        "quality": row.quality,
        "reasons": row.reasons(),
    }

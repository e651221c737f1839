"""Scores of sampled pictures and captions: distances in pixels, words, and properties of shapes read from the
pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from accel_train.domains.images.demo.shape_reading import read_caption, read_picture
from accel_train.domains.images.grids import Column, report_pictures
from accel_train.domains.images.rows.picture_rows import CaptionedPictures

Batch = Mapping[str, Tensor]
ERRORS = ("t2l_error", "t2l_error_shuffled", "unconditional_error")
"""Sums added by ``BothWays.latent_error_sums`` to those of ``PictureScores``."""
DISTANCES = ("t2l_distance", "t2l_distance_shuffled", "nearest_distance", "nearest_distance_true")
CAPTIONS = ("caption_words", "caption_exact")
SHOWN = ("shown_colour", "shown_position", "shown_form", "shown_size", "shown_count")
_SINGLES = "singles"
_PICTURES = "pictures"


class Drawn(Protocol):
    """Normalised latents (B, L, D) sampled for a batch."""

    @property
    def latents(self) -> Tensor:
        """Latents sampled for the captions."""
        ...

    @property
    def unconditional(self) -> Tensor | None:
        """Latents sampled without a caption, or None."""
        ...


@dataclass(frozen=True)
class PictureScores:
    """Scores of sampled pictures and captions. Metrics are means over held-out samples.

    ``t2l_distance``: root mean square difference, over all pixels in values of 0 to 1, between the picture sampled for
    a caption and the caption's own; ``_shuffled``: another caption's. ``nearest_distance``: from the sampled picture to
    the nearest training picture. If samples are copies, it is far below ``nearest_distance_true``, the same distance
    for the caption's own picture. ``caption_words``: share of correct words, place by place, in a caption sampled for a
    picture; ``caption_exact``: share of captions without a wrong word. For shapes also the share of sampled pictures
    with the caption's colour, position (of single shapes), form, size and count, read from the pixels.
    """

    pictures: CaptionedPictures
    denormalise: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], str]
    """Text of one row of tokens (S,)."""
    nearest: Callable[[Tensor], Tensor]
    """Normalised latents (B, L, D) of the training pictures nearest to such latents."""

    def metric_names(self) -> list[str]:
        """List the metrics of an evaluation."""
        shown = SHOWN if self.pictures.exact else ()
        return [*ERRORS, *DISTANCES, *CAPTIONS, *shown]

    def report(self, directory: Path, step: int, batch: Batch, drawn: Drawn) -> None:
        """Write ``pictures.png`` for the captions of a batch. Call it on the main process."""
        prompts = [self.decode(row) for row in batch["tokens"].cpu()]
        more = [Column("nearest in training", self.pixels(self.nearest(drawn.latents)))]
        if drawn.unconditional is not None:
            more.append(Column("no caption", self.pixels(drawn.unconditional)))
        true = self.pixels(batch["latent"])
        report_pictures(directory, step, prompts, true, self.pixels(drawn.latents), more)

    def pixels(self, latents: Tensor) -> Tensor:
        """Return pictures (B, H, W, 3) uint8 of normalised latents (B, L, D)."""
        return self.pictures.pixels(self.denormalise(latents.float().cpu()))

    def __call__(self, batch: Batch, shuffled: Batch, latents: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Sum the scores of latents (B, L, D) and tokens (B, S) sampled for a batch. Waits for the device."""
        # In pixels, as people see them: distances of latents depend on the scale of their encoder.
        sampled = self.pixels(latents)
        true = self.pixels(batch["latent"])
        # One search for both, because it reads every training latent.
        near, near_true = self.nearest(torch.cat([latents.float(), batch["latent"].float()])).chunk(2)
        captions = [self.decode(row) for row in batch["tokens"].cpu()]
        said = [self.decode(row) for row in tokens.cpu()]
        scores = {
            "t2l_distance": rms_distance(sampled, true),
            "t2l_distance_shuffled": rms_distance(sampled, self.pixels(shuffled["latent"])),
            "nearest_distance": rms_distance(sampled, self.pixels(near)),
            "nearest_distance_true": rms_distance(true, self.pixels(near_true)),
            "caption_words": torch.tensor([_words_right(*pair) for pair in zip(said, captions, strict=True)]),
            "caption_exact": _as_float([one == other for one, other in zip(said, captions, strict=True)]),
            _PICTURES: torch.ones(len(captions)),
        }
        if self.pictures.exact:
            scores |= shape_scores(sampled, captions)
        weight = batch["weight"]
        return {name: (values.to(weight) * weight).sum() for name, values in scores.items()}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Divide the sums of all batches by their counts."""
        counted = {"shown_position": _SINGLES}
        found: dict[str, float] = {}
        for name in self.metric_names():
            count = float(sums[counted.get(name, _PICTURES)])
            found[name] = float(sums[name]) / max(count, 1e-12)
        return found


def rms_distance(pictures: Tensor, others: Tensor) -> Tensor:
    """Return the root mean square difference of pictures (B, H, W, 3) uint8, (B,), in values of 0 to 1."""
    # uint8 would wrap around below 0.
    difference = (pictures.float() - others.float()) / 255
    return difference.square().flatten(1).mean(-1).sqrt()


def shape_scores(pictures: Tensor, captions: Sequence[str]) -> dict[str, Tensor]:
    """Compare each picture with its caption: 1 or 0 for each property, (B,) each.

    Position counts for single shapes only; ``singles`` marks them. An empty picture is wrong in all.
    """
    wanted = [read_caption(caption) for caption in captions]
    shown = [read_picture(picture) for picture in pictures]
    pairs = list(zip(shown, wanted, strict=True))

    def right(name: str) -> Tensor:
        return _as_float([one is not None and getattr(one, name) == getattr(scene, name) for one, scene in pairs])

    singles = _as_float([scene.place is not None for scene in wanted])
    return {
        "shown_colour": right("colour"),
        # A caption of several shapes names no position, and such a picture cannot be right or wrong in it.
        "shown_position": right("place") * singles,
        "shown_form": right("form"),
        "shown_size": right("size"),
        "shown_count": right("count"),
        _SINGLES: singles,
    }


def _as_float(right: Sequence[bool]) -> Tensor:
    return torch.tensor(right, dtype=torch.float32)


def _words_right(said: str, caption: str) -> float:
    words = caption.split()
    if not words:
        # Right if nothing was said.
        return float(not said.split())
    # Extra words are not counted here. `caption_exact` counts them as wrong.
    found = said.split()[: len(words)]
    return sum(one == other for one, other in zip(found, words, strict=False)) / len(words)


Scores = PictureScores | None
"""Scores of a run on pictures. None without pictures."""


def build_scores(
    pictures: CaptionedPictures | None,
    denormalise: Callable[[Tensor], Tensor],
    decode: Callable[[Tensor], str],
    nearest: Callable[[Tensor], Tensor],
) -> Scores:
    """Return the scores of these pictures, or None if the latents are not pictures."""
    if pictures is None:
        return None
    # Keys of the split would stay in memory for the whole run.
    return PictureScores(replace(pictures, split_keys={}), denormalise, decode, nearest)


def metric_names(scores: Scores) -> list[str]:
    """List the metrics of an evaluation with these scores. Empty if ``scores`` is None."""
    return scores.metric_names() if scores else []


def notices(scores: Scores) -> tuple[str, ...]:
    """Return log lines about the pictures behind these scores. Empty if ``scores`` is None."""
    return scores.pictures.notices if scores else ()


def metrics(scores: Scores, sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the metrics of an evaluation with these scores. Empty if ``scores`` is None."""
    return scores.metrics(sums) if scores else {}


def report(scores: Scores, directory: Path, step: int, batch: Batch, drawn: Drawn) -> None:
    """Write ``pictures.png`` with these scores. Call it on the main process. Does nothing if ``scores`` is None."""
    if scores is not None:
        scores.report(directory, step, batch, drawn)


def summary(metrics: Mapping[str, float]) -> list[str]:
    """Format the scores of pictures as log lines, if there are any."""
    if "t2l_distance" not in metrics:
        return []
    errors = (
        f"pictures: error {metrics['t2l_error']:.3f} with the right caption, {metrics['t2l_error_shuffled']:.3f} with "
        f"a shuffled one, {metrics['unconditional_error']:.3f} without"
    )
    distances = (
        f"distance of samples {metrics['t2l_distance']:.3f} to the caption's own picture, "
        f"{metrics['t2l_distance_shuffled']:.3f} to another caption's, {metrics['nearest_distance']:.3f} to the "
        "nearest in training"
    )
    lines = [
        f"{errors}; {distances}",
        f"captions: {metrics['caption_words']:.1%} of words right, {metrics['caption_exact']:.1%} without a wrong one",
    ]
    if "shown_colour" in metrics:
        shown = [f"{name.removeprefix('shown_')} {metrics[name]:.1%}" for name in SHOWN]
        lines.append(f"shapes that show what the caption says: {', '.join(shown)}")
    return lines

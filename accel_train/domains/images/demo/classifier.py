"""Small classifier of the bundled emoji: does a picture belong to one group, such as flags, or to another?

Judges pictures drawn for captions of the group. Trained in seconds, on blurred, shifted and noisy emoji, because drawn
pictures are less sharp than real ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_train.domains.images.demo import emoji

SIZE = 32
"""Side of its input in pixels. Other sizes are scaled."""
HELDOUT = 0.25
"""Share of names held out to measure its own accuracy."""
STEPS = 500
BATCH = 64
SEED = 0
SHIFT = 2
"""Largest shift in pixels."""
PATCH = 4
"""Side of the patches varied in colour strength, because a model of patches draws them unevenly."""
JITTER = 0.8
"""Largest standard deviation of a patch's colour strength."""
FALSE_ALARMS = 0.001
"""Allowed share of false positives on the other groups' disturbed training emoji. Small, because few of the judged
pictures should belong to the group: a threshold of 0 would pass seven times as many."""
DRAWS = 8
"""Number of disturbed copies of each emoji to measure this share on."""


class EmojiNet(nn.Module):
    """Four convolutions on pictures (B, 3, 32, 32), and one logit (B,)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 64, 64)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers.append(nn.Conv2d(before, after, 3, stride=2, padding=1))
            layers.append(nn.GroupNorm(4, after))
            layers.append(nn.GELU())
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(4 * widths[-1], 1)

    def forward(self, pixels: Tensor) -> Tensor:
        features = self.layers(pixels)  # (B, 64, 2, 2)
        return self.head(features.flatten(1)).squeeze(1)


@dataclass(frozen=True, eq=False)
class Judge:
    """The trained classifier and its accuracy on held-out names."""

    group: str
    model: EmojiNet
    threshold: float
    """Pictures with a higher logit count as the group's."""
    right_inside: float
    """Share of the group's held-out emoji it recognises."""
    right_outside: float
    """Share of the other groups' held-out emoji it rejects."""

    @torch.no_grad()
    def calls(self, pictures: Tensor) -> Tensor:
        """Return True for each picture (N, H, W, 3) uint8 classified as one of the group."""
        return self.model(_pixels(pictures)) > self.threshold


@lru_cache(maxsize=4)
def train_judge(group: str) -> Judge:
    """Train the classifier of a group on the CPU. Deterministic; leaves the global generator as it was.

    Raises ``UsageError`` for an unknown group.
    """
    # Before the training, which takes seconds.
    emoji.check_groups("--evaluation.judge", (group,))
    listed = emoji.list_emoji()
    pixels = _pixels(emoji.load_pictures(SIZE))
    inside = torch.tensor([one.is_in((group,)) for one in listed])
    heldout = torch.tensor([one.heldout(HELDOUT) for one in listed])
    # Modules draw their weights from the global generator, which belongs to the run.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = EmojiNet()
    seen = ~heldout
    _fit(model, pixels[inside & seen], pixels[~inside & seen])
    with torch.no_grad():
        threshold = _threshold(model, pixels[~inside & seen])
        said = model(pixels) > threshold
    right_inside = said[inside & heldout].float().mean()
    right_outside = (~said[~inside & heldout]).float().mean()
    return Judge(group, model.eval(), threshold, float(right_inside), float(right_outside))


def _fit(model: EmojiNet, inside: Tensor, outside: Tensor) -> None:
    """Train on batches with half of their pictures from the group."""
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
    # Half and half: a group is a small part of all emoji, and the classifier would learn to say no.
    labels = torch.arange(BATCH) < BATCH // 2
    for _ in range(STEPS):
        chosen = [_random_rows(part, BATCH // 2, generator) for part in (inside, outside)]
        pixels = _disturbed(torch.cat(chosen), generator)
        logits = model(pixels)
        loss = F.binary_cross_entropy_with_logits(logits, labels.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def _threshold(model: EmojiNet, outside: Tensor) -> float:
    """Return the logit exceeded by a share ``FALSE_ALARMS`` of the other groups' disturbed pictures."""
    generator = torch.Generator().manual_seed(SEED + 1)
    # In batches, each of which has a shift and an order of colours of its own.
    batches = [batch for _ in range(DRAWS) for batch in outside.split(BATCH)]
    logits = [model(_disturbed(batch, generator)) for batch in batches]
    return float(torch.cat(logits).quantile(1 - FALSE_ALARMS))


def _random_rows(pixels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    rows = torch.randint(len(pixels), (count,), generator=generator)
    return pixels[rows]


def _disturbed(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Shift a batch, exchange its colours, jitter its patches, blur every second picture, and add noise."""
    down, across = torch.randint(-SHIFT, SHIFT + 1, (2,), generator=generator).tolist()
    # White, 1, comes in at the sides.
    edge = F.pad(pixels, (SHIFT, SHIFT, SHIFT, SHIFT), value=1.0)
    rolled = edge.roll((down, across), (2, 3))
    moved = rolled[..., SHIFT:-SHIFT, SHIFT:-SHIFT]
    # A flag has to be recognised by its outline, not by its colours.
    colours = torch.randperm(3, generator=generator)
    coloured = moved[:, colours]
    count = len(pixels)
    side = SIZE // PATCH
    patches = torch.randn(count, 3, side, side, generator=generator)
    strength = JITTER * torch.rand(count, 1, 1, 1, generator=generator)
    jitter = patches.repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)  # (B, 3, SIZE, SIZE)
    # White stays white, because a drawn picture's background does.
    ink = (1 - coloured) * (1 + strength * jitter)
    drawn = (1 - ink).clamp(-1, 1)
    padded = F.pad(drawn, (1, 1, 1, 1), mode="replicate")
    blurred = F.avg_pool2d(padded, 3, stride=1)
    is_even = torch.arange(count) % 2 == 0
    soft = torch.where(is_even[:, None, None, None], drawn, blurred)
    noise = torch.randn(soft.shape, generator=generator)
    return soft + 0.05 * noise


def _pixels(pictures: Tensor) -> Tensor:
    """Return pictures (N, H, W, 3) uint8 as (N, 3, 32, 32) from -1 to 1."""
    values = pictures.permute(0, 3, 1, 2).float() / 127.5 - 1
    if values.shape[2:] == (SIZE, SIZE):
        return values
    return F.interpolate(values, (SIZE, SIZE), mode="bilinear", antialias=True, align_corners=False)

"""Report of samples in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from accel_train.domains.text.dataset import PreparedData
from accel_train.metrics.recorder import quoted, write_page_of_step


def report_samples(directory: Path, data: PreparedData, tokens: Tensor, latents: Tensor, step: int) -> None:
    """Write ``samples.md`` for the first held-out texts, from tokens (B, S) and latents (B, L, Dz) sampled for them."""
    sampled = [data.tokenizer.decode(row) for row in tokens.cpu()]
    write_samples(directory, data.heldout.texts, sampled, data.nearest_texts(latents), step)


def write_samples(
    directory: Path,
    originals: Sequence[str],
    sampled: Sequence[str],
    nearest: Sequence[tuple[str, float]],
    step: int,
) -> None:
    """Write ``samples.md`` on the main process, and keep it by step.

    For each held-out text it shows the text sampled from its latent, and the training text nearest to the latent
    sampled from it, with their cosine. A write error is logged as a warning.
    """
    lines = ["# Samples on held-out text", ""]
    for number, (text, tokens, (neighbour, cosine)) in enumerate(zip(originals, sampled, nearest, strict=False), 1):
        lines += [
            f"## {number}",
            "",
            f"- held-out text: {quoted(text)}",
            f"- text sampled from its latent (l2t): {quoted(tokens)}",
            f"- training text nearest to the latent sampled from it (t2l), cosine {cosine:.2f}: {quoted(neighbour)}",
            "",
        ]
    write_page_of_step(directory, "samples", lines, step)

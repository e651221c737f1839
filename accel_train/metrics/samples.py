"""Samples that a person can read, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def write_samples(
    directory: Path, originals: Sequence[str], sampled: Sequence[str], nearest: Sequence[tuple[str, float]]
) -> Path:
    """Write ``samples.md``: for each held-out text the text sampled from its latent, and the training text nearest
    to the latent sampled from it, with their cosine. Main process."""
    lines = ["# Samples on held-out text", ""]
    for number, (text, tokens, (neighbour, cosine)) in enumerate(zip(originals, sampled, nearest, strict=False), 1):
        lines += [
            f"## {number}",
            "",
            f"- held-out text: {_quoted(text)}",
            f"- text sampled from its latent (l2t): {_quoted(tokens)}",
            f"- training text nearest to the latent sampled from it (t2l), cosine {cosine:.2f}: {_quoted(neighbour)}",
            "",
        ]
    path = directory / "samples.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _quoted(text: str) -> str:
    return "> " + " ".join(text.split()) if text.strip() else "> (empty)"

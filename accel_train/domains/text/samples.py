"""Readable results of an evaluation: samples in Markdown, and metrics as log lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from accel_train.data.heldout import kinds_of, pairs_of_a_kind, size_notices
from accel_train.domains.text.both_ways import EvaluationConfig
from accel_train.domains.text.dataset import PreparedData
from accel_train.metrics.recorder import quoted, write_page_of_step


def notices(options: EvaluationConfig, data: PreparedData) -> list[str]:
    """Return notices about options that ask for more samples than are held out, and about pairs with the same text."""
    asked = {"evaluation.samples": options.samples, "evaluation.shown": options.shown}
    lines = size_notices(asked, len(data.heldout))
    kinds = kinds_of(data.heldout, options.samples)
    same = pairs_of_a_kind(kinds)
    if same:
        lines.append(
            f"shuffled metrics: {same:,} of {len(kinds):,} samples are paired with the same text, because more than "
            "half of them share one text; hold out more of the others"
        )
    return lines


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
    """Write ``samples.md`` on the main process, and keep a copy for this step.

    For each held-out text it shows the text sampled from its latent, and the training text nearest to the latent
    sampled from it, with the cosine of the two latents. A write error is logged as a warning.
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


def summary(metrics: dict[str, float]) -> list[str]:
    """Format the evaluation as two log lines, one per direction, with the baselines where they were measured."""
    l2t = (
        f"l2t: {metrics['l2t_nll']:.3f} nats per token with the right latent, {metrics['l2t_nll_shuffled']:.3f} with a "
        f"shuffled one ({_less(metrics['l2t_gain'])}), {metrics['unconditional_nll']:.3f} without; masked-token "
        f"accuracy {metrics['l2t_accuracy']:.1%}"
    )
    # The z of :z.3f keeps a cosine of about zero from being printed as -0.000.
    t2l = (
        f"t2l: cosine {metrics['t2l_cosine']:z.3f} between sampled and true latents, "
        f"{metrics['t2l_cosine_shuffled']:z.3f} against shuffled ones, {metrics['t2l_mean_cosine']:z.3f} in one step"
    )
    if "l2t_log_linear_nll" in metrics:
        nll = metrics["l2t_log_linear_nll"]
        shuffled = metrics["l2t_log_linear_nll_shuffled"]
        l2t += f"; log-linear: {nll:.3f}, {shuffled:.3f} ({_less(metrics['l2t_log_linear_gain'])})"
    if "unigram_nll" in metrics:
        l2t += f"; unigrams: {metrics['unigram_nll']:.3f} without"
    if "t2l_ridge_cosine" in metrics:
        t2l += f"; ridge regression on the counts of its tokens: {metrics['t2l_ridge_cosine']:z.3f}"
    return [l2t, t2l]


def _less(gain: float) -> str:
    percent = round(100 * gain, 1)
    if not percent:
        return "less than 0.05% apart"
    return f"{abs(percent):.1f}% {'more' if percent < 0 else 'less'}"

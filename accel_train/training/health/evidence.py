"""Device tensors of a step, and the verdict once the host has read them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Reason = Literal["loss", "gradient", "weight", "spike"]
_ADVICE = {"bf16": "try --precision fp32", "fp16": "try --precision bf16, which overflows later, or fp32"}
"""Remedy specific to the precision. fp32 has none, as no finer precision is left."""


class NonFiniteError(RuntimeError):
    """Non-finite loss or gradient on some rank. Raised on every rank, with the optimizer as it was before."""

    def __init__(self, message: str, bad: BadStep | None = None) -> None:
        super().__init__(message)
        self.bad = bad
        """The step, if it alone ends the run. None after too many skipped steps in a row."""


@dataclass(frozen=True)
class BadStep:
    """A step with a value that is not finite, or a spike, or without any weight. The same on every rank."""

    step: int
    """0-based, as the loop counts."""
    reason: Reason
    """``loss``: a sum of a term is not finite. ``gradient``: the sums are finite and the norm is not. ``weight``: no
    sample has a weight in a term that the step trains, so that the mean over them is 0 / 0."""
    loss_sums: dict[str, float]
    """Sum of each term over the global batch."""
    grad_norm: float | None
    """Norm of the gradient before clipping. None if the losses are refused before there is one."""
    samples: list[list[int]]
    """For each rank, the numbers of its samples with a loss that is not finite. If the recipe gives sums alone, those
    of all samples in micro-batches with such a sum. If all losses are finite, those of all its samples."""
    precision: str

    @property
    def suspects(self) -> str:
        """The samples of each rank, for messages."""
        by_rank = [f"rank {rank}: {samples}" for rank, samples in enumerate(self.samples) if samples]
        return "; ".join(by_rank) or "unknown"

    @property
    def finding(self) -> str:
        """The finding, for messages. Counts the step as training lines do, from 1."""
        number = self.step + 1
        if self.reason == "spike":
            return f"gradient norm {self.grad_norm} of step {number} is a spike"
        if self.reason == "weight":
            return f"no sample of step {number} has a weight above 0 in a loss term that the step trains"
        value = self.loss_sums if self.reason == "loss" else f"norm {self.grad_norm}"
        return f"{self.reason} of step {number} is not finite ({value})"

    @property
    def explanation(self) -> str:
        """The reason for the stop, and the remedy."""
        if self.reason == "weight":
            return (
                f"{self.finding}, so its mean is 0 / 0, and an update would only be momentum and weight decay; the "
                f"optimizer has not stepped and the last checkpoint is untouched. Samples concerned: {self.suspects}. "
                "Leave such samples out of the data, raise --global_batch_size, or give --health.non_finite skip"
            )
        return (
            f"{self.finding}; the optimizer has not stepped and the last checkpoint is untouched. Samples "
            f"concerned: {self.suspects}. Look at those samples, lower the learning rate, or "
            f"{_ADVICE.get(self.precision, 'lengthen the warm-up')}"
        )

    def fields(self) -> dict[str, Any]:
        """Values for ``metrics.jsonl``."""
        return {
            "reason": self.reason,
            "loss_sums": self.loss_sums,
            "grad_norm": self.grad_norm,
            "samples": self.samples,
        }


class Examined(NamedTuple):
    """Result of reading a step on the host."""

    value: float
    """Norm of the gradient, or the last loss sum where no norm is known."""
    bad: BadStep | None


@dataclass(frozen=True)
class Evidence:
    """Small device tensors of one step, enough to find and explain a bad one later."""

    step: int
    terms: tuple[str, ...]
    totals: Tensor
    """(K,) sums of the terms, the same on every rank."""
    norm: Tensor | None
    """Norm of the global gradient. None before it is known."""
    losses: Sequence[Sequence[Tensor]]
    """The K terms of each micro-batch of this rank: its sum, (), or the loss of each sample, (B,)."""
    rows: Sequence[Mapping[str, Tensor]]
    """Inputs with one value per sample, (B,), of each micro-batch of this rank. ``sample`` is the number of each."""
    precision: str = "fp32"
    weights: Sequence[Mapping[str, Tensor]] = ()
    """Weight of each term in each micro-batch of this rank, () or (B,)."""
    spike: Tensor | None = None
    """1 if the norm is a spike, else 0. None if nothing looks for spikes."""
    quotient: Tensor | None = None
    """Not finite if no trained term has a weight in the global batch. None where one is known to have."""

    def must_be_finite(self, norm: Tensor) -> list[Tensor]:
        """Return the tensors of which one is not finite in a bad step, on the device of the sums. No device wait."""
        if self.quotient is None:
            return [self.totals, norm]
        quotient = self.quotient
        # The kernel that reads them needs one dtype and device. Most weights have them already, so the check saves the
        # call.
        if quotient.dtype != self.totals.dtype or quotient.device != self.totals.device:
            quotient = quotient.to(self.totals)
        return [self.totals, norm, quotient]

    def examine(self) -> Examined:
        """Read the step. Waits for the device once. Where it is bad, the ranks exchange their samples.

        All ranks call it, and all find the same, because they read the same reduced values.
        """
        reduced = [self.totals]
        further = [extra for extra in (self.norm, self.spike, self.quotient) if extra is not None]
        # torch.cat needs one dtype and device. The values are popped below in the reverse of this order.
        reduced += [extra.reshape(1).to(self.totals) for extra in further]
        # One tensor, so that the host waits once.
        values: list[float] = torch.cat(reduced).tolist()
        has_no_weight = self.quotient is not None and not math.isfinite(values.pop())
        is_spike = self.spike is not None and values.pop() > 0
        losses = values[: len(self.terms)]
        if not all(map(math.isfinite, losses)):
            return Examined(values[-1], self._bad("loss", values, self._non_finite_samples()))
        if not all(map(math.isfinite, values)):
            return Examined(values[-1], self._bad("gradient", values, self._all_samples()))
        # Every factor is 0 in such a step, so a gradient could only come from a module's own backward.
        if has_no_weight:
            return Examined(values[-1], self._bad("weight", values, self._all_samples()))
        if is_spike:
            return Examined(values[-1], self._bad("spike", values, self._all_samples()))
        return Examined(values[-1], None)

    def _non_finite_samples(self) -> set[int]:
        """Return the samples with a non-finite loss. Without losses per sample, all samples of such a micro-batch."""
        # A wait for each term, which only a bad step costs.
        bad_samples: set[int] = set()
        for losses, rows in zip(self.losses, self.rows, strict=True):
            if "sample" in rows:
                samples = rows["sample"]
                for loss in losses:
                    is_bad = ~loss.isfinite()
                    if loss.shape != samples.shape:
                        is_bad = is_bad.any().expand_as(samples)
                    bad_samples.update(samples[is_bad].tolist())
        return bad_samples

    def _all_samples(self) -> set[int]:
        samples: set[int] = set()
        for rows in self.rows:
            if "sample" in rows:
                samples.update(rows["sample"].tolist())
        return samples

    def _bad(self, reason: Reason, values: Sequence[float], suspects: set[int]) -> BadStep:
        # Not strict: the norm stands behind the sums.
        by_term = dict(zip(self.terms, values, strict=False))
        norm = values[-1] if self.norm is not None else None
        return BadStep(self.step, reason, by_term, norm, _of_all_ranks(sorted(suspects)), self.precision)


def _of_all_ranks(local: list[int]) -> list[list[int]]:
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return [local]
    # Every rank is here: all have read the same reduced values.
    by_rank: list[list[int]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(by_rank, local)
    return by_rank


def of_samples(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs with one value per sample. Only these are kept until a log point, as others may be large."""
    if "sample" not in inputs:
        return {}
    shape = inputs["sample"].shape
    fields: dict[str, Any] = dict(inputs)  # a recipe may pass on anything
    return {name: value for name, value in fields.items() if isinstance(value, Tensor) and value.shape == shape}

"""Losses of single samples in training: their means by timestep and, if asked for, a file with each of them.

A step computes them anyway. They stay on the device until a log point, where the host waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from accelerate import Accelerator
from torch import Tensor

from accel_train.config import UsageError
from accel_train.metrics.records import LineWriter, rewind
from accel_train.store.names import SAMPLE_LOSSES_FILE
from accel_train.training.health.evidence import Evidence
from accel_train.training.parameters import widest
from accel_train.training.step_guard import StepResult

BANDS = 4
"""Number of equal parts of the times from 0 to 1."""
EVENT = "sample"
"""Event of the lines of the file."""
MOST_STEPS = 256
"""Steps kept on the device before they are added up, so that rare log points need little memory."""


class _Rows(NamedTuple):
    """One loss term in one micro-batch of this process. All (B,)."""

    term: str
    loss: Tensor
    """Multiplied by the weight."""
    weight: Tensor
    inputs: Mapping[str, Tensor]

    def time(self, name: str) -> Tensor:
        """Return the input ``name``. Raises ``UsageError`` if it has no value per sample."""
        if name not in self.inputs:
            raise UsageError(
                f"recipe.timesteps: {self.term!r}: the micro-batches given to prepared.window have no {name!r} with "
                f"one value per sample, (B,); they have {', '.join(sorted(self.inputs))}"
            )
        return self.inputs[name]


class SampleLosses:
    """Losses of the samples of all steps since the last log point. One per process."""

    def __init__(
        self, accelerator: Accelerator, timesteps: Mapping[str, str], directory: Path | None, start_step: int
    ) -> None:
        """``timesteps`` names the input with the time of a term, (B,) in [0, 1].

        With a ``directory`` every sample becomes a line of its ``sample_losses.jsonl``, from which lines beyond
        ``start_step`` are dropped first. None: means by timestep only.
        """
        self._accelerator = accelerator
        self._timesteps = timesteps
        self._kept: list[tuple[Evidence, Mapping[str, float]]] = []
        self._sums = self._no_sums()
        self._lines: list[dict[str, Any]] | None = None if directory is None else []
        self._writer: LineWriter | None = None
        if directory is not None and accelerator.is_main_process:
            path = directory / SAMPLE_LOSSES_FILE
            rewind(path, start_step)
            self._writer = LineWriter(path)

    def add(self, result: StepResult) -> None:
        """Keep the losses of a step. No collective.

        Waits for the device only if samples are written, and only after ``MOST_STEPS`` steps without a log point or a
        save. Raises ``UsageError`` if samples are to be written but the recipe gives sums over a micro-batch only.
        """
        if not self._timesteps and self._lines is None:
            return
        evidence = result.evidence
        if self._lines is not None and next(_rows_of(evidence, result.coefficients), None) is None:
            raise UsageError(
                "log.per_sample: the losses of this recipe are sums over a micro-batch; give window.backward one value "
                "per sample, (B,), and prepared.window the weight of each sample, or leave the option out"
            )
        # Not the whole result, which holds a norm of every parameter.
        self._kept.append((evidence, result.coefficients))
        if len(self._kept) >= MOST_STEPS:
            self._read()

    def take(self) -> dict[str, float]:
        """Return ``TERM_at_TIME``, the mean loss of a term over the times from TIME to the next, and write the file.

        For log points: waits for the device. Collective. Raises ``UsageError`` for a time that no micro-batch has.
        """
        self.write()
        if not self._timesteps:
            return {}
        total = cast(Tensor, self._accelerator.reduce(self._sums, "sum"))
        self._sums = self._no_sums()
        fields: dict[str, float] = {}
        for term, (losses, weights) in zip(self._timesteps, total.tolist(), strict=True):
            for band, (loss, weight) in enumerate(zip(losses, weights, strict=True)):
                # A band without a sample has no mean.
                if weight > 0:
                    fields[f"{term}_at_{band / BANDS:.2f}"] = loss / weight
        return fields

    def _read(self) -> None:
        kept = self._kept
        self._kept = []
        if self._lines is not None:
            for evidence, coefficients in kept:
                self._lines += _lines_of(evidence, coefficients, self._timesteps)
        for place, term in enumerate(self._timesteps):
            self._sums[place] += self._by_time(kept, term)

    def _no_sums(self) -> Tensor:
        """Return the sums of losses and of weights, by term and band, before any step: (terms, 2, BANDS)."""
        return widest(torch.zeros(len(self._timesteps), 2, BANDS, device=self._accelerator.device))

    def _by_time(self, kept: Sequence[tuple[Evidence, Mapping[str, float]]], term: str) -> Tensor | float:
        """Return the sums of losses and of weights by band, (2, BANDS), or 0 for a term that was not trained."""
        values: list[Tensor] = []
        for evidence, coefficients in kept:
            for rows in _rows_of(evidence, coefficients):
                if rows.term == term:
                    time = rows.time(self._timesteps[term])
                    values.append(torch.stack([rows.loss, rows.weight, time]))
        if not values:
            return 0.0
        loss, weight, time = widest(torch.cat(values, 1))
        band = (time * BANDS).long().clamp(0, BANDS - 1)
        # A non-finite loss has its own event, and would hide all others here.
        counted = (weight > 0) & loss.isfinite()
        is_in = (band == torch.arange(BANDS, device=band.device).unsqueeze(1)) & counted
        return torch.where(is_in, torch.stack([loss, weight]).unsqueeze(1), 0.0).sum(-1)

    def write(self) -> None:
        """Write the samples of all processes so far, if asked for. Then it is collective and waits for the device.

        Also called before a save, because a resume continues after it.
        """
        self._read()
        if self._lines is None:
            return
        lines = self._gathered(self._lines)
        self._lines = []
        if self._writer is not None:
            # The same order on any number of processes.
            self._writer.write(*sorted(lines, key=lambda line: (line["step"], line["sample"])))

    def _gathered(self, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the lines of all processes on the main process, and nothing on the others."""
        if self._accelerator.num_processes == 1:
            return lines
        by_process: list[Any] | None = None
        if self._accelerator.is_main_process:
            by_process = [None] * self._accelerator.num_processes
        # Accelerate's gather_object would give every process all of them.
        torch.distributed.gather_object(lines, by_process)
        return [line for of_one in by_process or [] for line in of_one]


def _rows_of(evidence: Evidence, coefficients: Mapping[str, float]) -> Iterator[_Rows]:
    """Yield each trained term of each micro-batch whose losses and weights are given by sample."""
    for losses, weights, inputs in zip(evidence.losses, evidence.weights, evidence.rows, strict=True):
        for term, loss in zip(evidence.terms, losses, strict=True):
            # Sums have no shape, and a recipe may give something other than a value for each sample.
            is_by_sample = "sample" in inputs and loss.shape == weights[term].shape == inputs["sample"].shape
            if coefficients[term] != 0 and is_by_sample:
                yield _Rows(term, loss, weights[term], inputs)


def _lines_of(
    evidence: Evidence, coefficients: Mapping[str, float], timesteps: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return a line for each sample of this process in a step."""
    lines: dict[tuple[int, int], dict[str, Any]] = {}
    for rows in _rows_of(evidence, coefficients):
        columns = {"loss": rows.loss / rows.weight, "weight": rows.weight}
        if rows.term in timesteps:
            columns["time"] = rows.time(timesteps[rows.term])
        values = [column.tolist() for column in columns.values()]
        samples: list[int] = rows.inputs["sample"].tolist()
        occurrences: list[int] = rows.inputs["occurrence"].tolist()
        for sample, occurrence, *row in zip(samples, occurrences, *values, strict=True):
            named = {f"{column}_{rows.term}": value for column, value in zip(columns, row, strict=True)}
            # A sample that only pads a micro-batch, or does not belong to this term, has no loss.
            if named[f"weight_{rows.term}"] > 0:
                head = {"event": EVENT, "step": evidence.step + 1, "sample": sample}
                lines.setdefault((sample, occurrence), head).update(named)
    return list(lines.values())

"""Rounds of a comparison: the variants take turns, and each run is checked against the first one."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from accel_train.compare.figures import observations, window_of
from accel_train.compare.request import Request
from accel_train.compare.runs import InterruptedRunError, Run, RunFailedError, Variant, read_run, run_once
from accel_train.config import UsageError, expand_path
from accel_train.metrics.gates import Gate, gate_values
from accel_train.metrics.progress import format_seconds

EQUAL = ("seed", "global_batch_size", "max_steps", "max_epochs")
"""Options that must be the same in every variant, except for the varied one."""
MAY_DIFFER = ("output_dir", "micro_batch_size")
"""Options that may differ between two runs of a variant. A run out of memory makes its micro-batches smaller."""


@dataclass(frozen=True)
class Rounds:
    """Complete rounds, each with its runs in the order of the variants."""

    runs: Sequence[Sequence[Run]]
    asked: int
    """Number of rounds asked for."""
    cut_short: str | None = None
    """What ended the comparison before the last round. None if all rounds are complete."""

    def print_end(self) -> None:
        """Print to stderr what ended the comparison before the last round, if anything did."""
        if self.cut_short is not None:
            text = f"{self.cut_short}\nthe result of {len(self.runs)} of {self.asked} rounds:"
            print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Runner:
    """Runs of one comparison."""

    request: Request
    recipe: Path
    output: Path

    def run_rounds(self, variants: Sequence[Variant], key: str | None, gates: Sequence[Gate]) -> Rounds:
        """Run the rounds up to the last one, a failed run or a signal. An error in the first round is raised."""
        done: list[Run] = []
        rounds: list[Sequence[Run]] = []
        for number in range(1, self.request.rounds + 1):
            try:
                self._run_round(number, done, variants, key, gates)
            except (RunFailedError, InterruptedRunError, UsageError) as error:
                if not rounds:
                    raise
                reason = f"error: {error}"
                if isinstance(error, InterruptedRunError):
                    reason = f"interrupted by {error}: the current run is stopped"
                return Rounds(rounds, self.request.rounds, reason)
            rounds.append(sorted(done[-len(variants) :], key=lambda run: run.letter))
        return Rounds(rounds, self.request.rounds)

    def _run_round(
        self, number: int, done: list[Run], variants: Sequence[Variant], key: str | None, gates: Sequence[Gate]
    ) -> None:
        # Every other round runs in reverse order, so that a drift of the machine over time favours no variant.
        for variant in variants if number % 2 else reversed(variants):
            run = self._run(variant, number)
            # Checked now, not after all rounds.
            may_differ = (*MAY_DIFFER, "seed") if self.request.seeds else MAY_DIFFER
            refuse_changed_options([one for one in done if one.letter == run.letter], run, may_differ)
            done.append(run)
            # A seed may also choose the data.
            comparable = [one for one in done if not self.request.seeds or one.round == number]
            refuse_unequal_runs(comparable[0], run, key)
            # The names of the evaluation's metrics are known after the first run. Some metrics need log lines
            # that another variant may not write, which the first round shows.
            if len(done) in (1, len(variants)):
                _check_gate_names(gates, done)
            print(_progress(done, variant, self.request.rounds * len(variants)), flush=True)

    def _run(self, variant: Variant, number: int) -> Run:
        folder = self.output / f"round_{number}"
        folder.mkdir(exist_ok=True)
        directory = folder / variant.letter
        command = self._command(variant, number, directory)
        try:
            seconds, cpu_seconds = run_once(command, folder / f"{variant.letter}.log", self.request.gates)
        except UsageError:
            if not directory.exists() and len(list(folder.iterdir())) == 1:
                # Nothing has run, so nothing is left behind.
                shutil.rmtree(folder)
                if not any(self.output.iterdir()):
                    self.output.rmdir()
            raise
        run = read_run(variant.letter, number, directory, seconds, cpu_seconds)
        if not self.request.keep_checkpoints:
            # Deleted at once: the checkpoints of all runs together may not fit on the disk.
            shutil.rmtree(directory / "checkpoints", ignore_errors=True)
        return run

    def _command(self, variant: Variant, number: int, directory: Path) -> list[str]:
        command = [sys.executable, str(self.recipe)]
        if self.request.config_file is not None:
            machine = str(expand_path(self.request.config_file))
            command[1:1] = ["-m", "accel_train.cli", "launch", "--config_file", machine, *self.request.processes()]
        command += [variant.source, *variant.flags, "--output_dir", str(directory)]
        if self.request.seeds:
            command += ["--seed", str(self.request.seeds[number - 1])]
        return command


def _check_gate_names(gates: Sequence[Gate], runs: Sequence[Run]) -> None:
    values = observations([runs], window_of(runs))
    for gate, other in itertools.product(gates, values):
        gate_values(gate, values[0], other)


def refuse_changed_options(earlier: Sequence[Run], run: Run, may_differ: Sequence[str] = MAY_DIFFER) -> None:
    """Raise ``UsageError`` if the options of a variant are not those of its first run: its file was edited since.

    Options in ``may_differ`` are not compared.
    """
    if not earlier:
        return
    before = earlier[0].options
    for name, value in run.options.items():
        if name not in may_differ and name in before and before[name] != value:
            raise UsageError(
                f"{name}: {before[name]!r} in {earlier[0].directory}, {value!r} in {run.directory}: the config of "
                f"{run.letter} has changed while the comparison ran; do not change it until the end, and compare again"
            )


def refuse_unequal_runs(first: Run, run: Run, key: str | None) -> None:
    """Raise ``UsageError`` for differences that options do not show: data, number of steps, global batch size."""
    may_change_data = key is not None and key.startswith("data.")
    batches = [one.lines[-1].get("global_batch_size") for one in (first, run)]
    if first.fingerprint != run.fingerprint and not may_change_data:
        raise _unequal("data fingerprint", first, first.fingerprint, run, run.fingerprint)
    if first.last_step != run.last_step and not may_change_data and key not in EQUAL:
        raise _unequal("steps done", first, first.last_step, run, run.last_step)
    if batches[0] != batches[1] and key not in EQUAL:
        raise _unequal("global_batch_size", first, batches[0], run, batches[1])


def _unequal(name: str, first: Run, a: object, run: Run, b: object) -> UsageError:
    return UsageError(
        f"{name}: {a!r} in {first.directory}, {b!r} in {run.directory}: a fair comparison needs the same; "
        "correct the configs, or compare the option that changes it with --vary"
    )


def _progress(done: Sequence[Run], variant: Variant, total: int) -> str:
    run = done[-1]
    line = run.lines[-1]
    parts = [
        f"run {len(done)} of {total}",
        f"round {run.round}",
        f"{variant.letter} {variant.name}",
        format_seconds(run.seconds),
        f"{line['step_seconds']:.4g} s/step",
    ]
    loss = line.get("loss")
    if isinstance(loss, (int, float)):
        parts.append(f"loss {loss:.4g}")
    left = total - len(done)
    if left:
        mean_seconds = fmean(one.seconds for one in done)
        parts.append(f"{left} left, about {format_seconds(left * mean_seconds)}")
    else:
        parts.append("all done")
    return "  ".join(parts)

"""A run of a verification as data: its request and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

LINES_SHOWN = 12
"""Lines shown of the output of a failed run."""
OF_TORCHRUN = "torch/distributed/elastic/"
"""In each line that torchrun itself logs: notices, and the first line of its report of a failure."""
FAILURE = "failed (exitcode"
"""In the first line of that report. The rest of it repeats the exit code and has no error of a process."""
REFUSAL = "error (wrong usage, exit code 2): "


@dataclass(frozen=True)
class Deviation:
    """Differences of a run from the reference, besides its options and its number of processes."""

    evaluates: bool = False
    """Call the recipe's evaluation. Otherwise it is skipped, with no metrics as after a stop."""
    continues_to: int | None = None
    """Continue to this step after ``max_steps``, so that the evaluation at the end comes in the middle."""
    reverses_samples: bool = False
    """Reverse the samples of every micro-batch."""
    disturbs_generators: bool = False
    """Set the global generators of torch, numpy and Python to another state before the first step."""


@dataclass(frozen=True)
class Spec:
    """One run: its name, its flags besides those of every run, and its deviation."""

    name: str
    flags: Mapping[str, str]
    deviation: Deviation = field(default_factory=Deviation)
    layout: str | None = None
    """Name of a launch file of ``runs.FILES``. None: one process, without a launcher."""
    file: Path | None = None
    """Launch file of the user's own, in place of ``layout``."""
    processes: int = 2
    """Processes of the layout or the file."""


@dataclass
class Facts:
    """Observations of one run. Written as JSON by process 0."""

    learning_rates: list[list[float]] = field(default_factory=list[list[float]])
    """Learning rates by step, then by group of the optimizer."""
    clipped_norms: list[float] = field(default_factory=list[float])
    """Norm of the gradient that reached the optimizer, by step. Empty under DeepSpeed, whose engine steps itself."""
    largest_gradients: dict[str, float] = field(default_factory=dict[str, float])
    """Largest absolute gradient of each trained parameter over all steps."""
    groups_of: dict[str, int] = field(default_factory=dict[str, int])
    """Number of the optimizer's groups that have each trained parameter."""
    always_frozen: list[str] = field(default_factory=list[str])
    """Parameters frozen by the recipe in every step (``optimizers.set_frozen``), as those of a later stage are."""
    moved: int = 0
    """Parameters changed by the first step with a learning rate above 0."""
    first_moving_step: int | None = None
    """The first step with a learning rate above 0, counted from 0."""
    reduced: list[float] = field(default_factory=list[float])
    """Values handed to DDP's reduction in each step, as a multiple of the parameters. Empty if not counted."""
    evaluations: int = 0


@dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    directory: Path
    code: int
    """Exit code."""
    output: str
    losses: Mapping[int, Mapping[str, float]]
    """Loss, its terms and the gradient norm of each step, counted from 1."""
    facts: Facts

    @property
    def failed(self) -> bool:
        return self.code != 0

    @property
    def message(self) -> str:
        """The last lines of the output up to the exit code in torchrun's report, or the sentence of a refusal."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        # Not only the last line: a launcher may add some of its own.
        refusals = [line.partition(REFUSAL)[2] for line in lines if REFUSAL in line]
        if self.code == 2 and refusals:
            return refusals[-1]
        reports = (number for number, line in enumerate(lines) if OF_TORCHRUN in line and FAILURE in line)
        end = next(reports, len(lines))
        own = [line for line in lines[:end] if OF_TORCHRUN not in line]
        # The exit code in the report's first line is the only trace of a killed process.
        told = [*own, *lines[end : end + 1]]
        return "\n".join((told or lines)[-LINES_SHOWN:])

    def checkpoint(self, step: int) -> Path:
        return self.directory / "checkpoints" / f"checkpoint_{step:08d}"

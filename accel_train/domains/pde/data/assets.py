"""Descriptions of the tasks with their normalisation constants: enough to run a model in another process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_train.config import UsageError
from accel_train.domains.pde.fields import Scale

ASSETS_FORMAT = 1
WIDE = 20.0
"""Above this ratio of the largest to the smallest value, one linear scale fits badly."""


@dataclass(frozen=True)
class FieldTask:
    """One mapping between fields for a model to learn."""

    name: str
    input_channels: int
    target_channels: int
    grid: tuple[int, int]
    """(H, W); 1-D fields have H = 1."""
    parameters: tuple[str, ...]
    """Names of the task's own parameters, the first columns of a row's parameters."""
    boundary: str
    """periodic: points at j / W. dirichlet: 0 on the boundary, points at the cell centres (j + 1/2) / W."""
    conserved: bool
    """True: each channel has the same integral in input and target."""
    has_time: bool
    """True: the target has the input's channels at a later time, so the output can be the next input."""
    dt: float
    """Time from input to target, 0 without time."""
    input: Scale
    target: Scale
    """Equal to `input` in a task with time."""
    parameter: Scale
    """Scale of the parameters, or of their logarithms where `logarithmic`."""
    logarithmic: tuple[bool, ...] = ()
    """True for each parameter read by its logarithm: positive, with a ratio of largest to smallest above `WIDE`."""

    def common_scales(self) -> tuple[Scale, Scale]:
        """Return the scales of input and target in `Scale.unit` of the target, for relative errors."""
        unit = self.target.unit
        return self.input.in_units_of(unit), self.target.in_units_of(unit)


@dataclass(frozen=True)
class FieldAssets:
    """All tasks with their normalisation: enough to run a model in another process."""

    tasks: tuple[FieldTask, ...]

    @property
    def parameter_count(self) -> int:
        """P, the largest number of parameters of any task, at least 1."""
        return max(1, *(len(task.parameters) for task in self.tasks))

    def task(self, name: str) -> FieldTask:
        return next(task for task in self.tasks if task.name == name)

    def normalise_parameters(self, task: str, values: Tensor) -> Tensor:
        """Normalise the task's own parameters and pad them with 0 to (..., P).

        Raises `UsageError` if one that is read by its logarithm is not positive.
        """
        own = self.task(task)
        if any(own.logarithmic):
            logarithmic = torch.tensor(own.logarithmic, device=values.device)
            positive = values[..., logarithmic]
            if (positive <= 0).any():
                names = ", ".join(compress(own.parameters, own.logarithmic))
                raise UsageError(
                    f"task {task}: parameters {names} are read as logarithms and go down to "
                    f"{float(positive.min()):g}; values above 0 are required, as in the training split"
                )
            values = torch.where(logarithmic, values.log(), values)
        scaled = own.parameter.normalise(values, trailing=0)
        missing = self.parameter_count - values.shape[-1]
        return torch.nn.functional.pad(scaled, (0, missing))

    def save(self, directory: Path) -> None:
        """Write fields.json into a folder, which is created if it is missing."""
        directory.mkdir(parents=True, exist_ok=True)
        facts = {"format": ASSETS_FORMAT, **asdict(self)}
        (directory / "fields.json").write_text(json.dumps(facts, indent=1), "utf-8")


def load_field_assets(directory: Path) -> FieldAssets:
    """Read what `FieldAssets.save` wrote. Raises `UsageError` for a missing or damaged file or another format."""
    try:
        facts: dict[str, Any] = json.loads((directory / "fields.json").read_text("utf-8"))
        if facts["format"] != ASSETS_FORMAT:
            raise ValueError(f"format {facts['format']}, this version reads {ASSETS_FORMAT}")
        return FieldAssets(tuple(_task(task) for task in facts["tasks"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{directory}: no usable data assets ({type(error).__name__}: {error}). The folder `assets` of a "
            "checkpoint, written by this version, is required."
        ) from None


def _task(facts: dict[str, Any]) -> FieldTask:
    values = dict(facts)
    for name in ("grid", "parameters", "logarithmic"):
        values[name] = tuple(facts[name])
    for name in ("input", "target", "parameter"):
        numbers = [tuple(part) for part in facts[name].values()]
        values[name] = Scale(*numbers)
    return FieldTask(**values)

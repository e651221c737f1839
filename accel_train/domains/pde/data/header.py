"""Properties of all samples of a file of fields, read from its attributes and checked against its arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel_train.config import UsageError
from accel_train.wording import nearest

SCHEMA = "accel_train/fields-1"
BOUNDARIES = ("periodic", "dirichlet")
"""Boundaries that change what the framework does. Any other word is allowed and changes nothing."""


@dataclass(frozen=True)
class FieldHeader:
    """Properties shared by all samples of a file."""

    task: str
    parameters: tuple[str, ...]
    """Names of the P parameters."""
    input_channels: int
    """Number of leading channels that are the input. Without time, the others are the target. With time, all C are
    both."""
    dt: float
    """Time from one snapshot to the next, over which all channels advance. 0: no time, and T = 1."""
    boundary: str
    """periodic: points at j / W. Anything else: at the cell centres (j + 1/2) / W."""
    conserved: bool
    """True: the integral of every channel is constant."""


def read_header(
    file: Path, attributes: Mapping[str, Any], fields: tuple[int, ...], parameters: tuple[int, ...]
) -> FieldHeader:
    """Read the header from the attributes of a file of our schema, for arrays of these shapes.

    Raises `UsageError` for attributes that are missing, impossible, or contradict the shapes.
    """
    names = ("schema", *FieldHeader.__dataclass_fields__)
    missing = [name for name in names if name not in attributes]
    if missing or _text(attributes["schema"]) != SCHEMA:
        problem = f"no attribute {missing[0]!r}" if missing else f"schema {_text(attributes['schema'])!r}"
        raise UsageError(f"--data.path: {file} has {problem}; {SCHEMA!r} with {', '.join(names)} is required.")
    header = FieldHeader(
        _text(attributes["task"]),
        tuple(map(_text, np.ravel(attributes["parameters"]))),
        int(_number(file, attributes, "input_channels")),
        _number(file, attributes, "dt"),
        _text(attributes["boundary"]),
        bool(_number(file, attributes, "conserved")),
    )
    required = (fields[0], len(header.parameters))
    if len(fields) != 5 or parameters != required:
        raise UsageError(
            f"--data.path: {file} has fields {fields} and parameters {parameters}; (N, T, C, H, W) and "
            f"(N, {len(header.parameters)}) are required. Write it again."
        )
    # Files written by hand may lack the grid, which the shape gives as well.
    _check_grid(file, tuple(np.ravel(attributes.get("grid", fields[3:])).tolist()), fields)
    _check_time(file, header, fields)
    _check_boundary(file, header)
    return header


def _text(value: Any) -> str:
    """Return a string attribute as str. h5py reads a fixed-length one, as Fortran, MATLAB and C write it, as bytes."""
    return value.decode("utf-8", "replace").rstrip() if isinstance(value, bytes) else str(value)


def _number(file: Path, attributes: Mapping[str, Any], name: str) -> float:
    value = attributes[name]
    try:
        return float(np.asarray(value).item())
    except (TypeError, ValueError):
        raise UsageError(
            f"--data.path: {file} has the attribute {name} {value!r}; one number is required: correct the attribute."
        ) from None


def differences(
    found: FieldHeader, found_shape: tuple[int, ...], expected: FieldHeader, expected_shape: tuple[int, ...]
) -> str:
    """List the attributes and shapes in which two files differ, with both values. Empty if they agree."""
    both = {name: (getattr(found, name), getattr(expected, name)) for name in FieldHeader.__dataclass_fields__}
    axes = ("T", "C", "H", "W")[-len(found_shape) :]
    both[f"shape ({', '.join(axes)})"] = (found_shape, expected_shape)
    return ", ".join(f"{name} {one!r} instead of {other!r}" for name, (one, other) in both.items() if one != other)


def _check_grid(file: Path, grid: tuple[int, ...], fields: tuple[int, ...]) -> None:
    """Refuse a grid attribute that differs from the fields' grid, and 1-D fields along H instead of W."""
    if fields[4] == 1 and fields[3] > 1:
        raise UsageError(
            f"--data.path: {file} has fields {fields}, (N, T, C, H, W), with W = 1; fields of one dimension have H = 1 "
            f"and {fields[3]} points along W. Write it again with the last two axes exchanged."
        )
    if grid != fields[3:]:
        raise UsageError(
            f"--data.path: {file} has the attribute grid {grid} and fields {fields}, (N, T, C, H, W): its grid is "
            f"{fields[3:]}. Correct the one that is wrong."
        )


def _check_time(file: Path, header: FieldHeader, fields: tuple[int, ...]) -> None:
    """Refuse an impossible time step, and channel or snapshot counts that do not go with it."""
    if not math.isfinite(header.dt) or header.dt < 0:
        raise UsageError(
            f"--data.path: {file} has the attribute dt {header.dt:g}; the time from one snapshot to the next is "
            "required, finite and above 0, or 0 for an equation without time. Correct it in the files of both splits."
        )
    _, snapshots, channels, _, _ = fields
    if header.dt == 0 and snapshots > 1:
        raise UsageError(
            f"--data.path: {file} has the attribute dt 0, without time, and {snapshots} snapshots of each sample; one "
            "is required, T = 1. Correct dt in the files of both splits, or write a single snapshot."
        )
    if header.dt == 0 and not 0 < header.input_channels < channels:
        raise UsageError(
            f"--data.path: {file} has the attributes dt 0, without time, and input_channels {header.input_channels} of "
            f"{channels} channels; 1 to {channels - 1} inputs are required, because the other channels are the target. "
            "Correct input_channels, or dt if the fields have a time step."
        )
    if header.dt and header.input_channels != channels:
        raise UsageError(
            f"--data.path: {file} has the attributes dt {header.dt:g} and input_channels {header.input_channels} of "
            f"{channels} channels; with time all channels are input and target, the field before and after a step, so "
            f"{channels} is required. Correct input_channels in the files of both splits. A coefficient that is "
            "constant in time would be predicted as well; if it is a number, write it to parameters."
        )
    targets = channels - header.input_channels
    if header.dt == 0 and header.conserved and targets != header.input_channels:
        raise UsageError(
            f"--data.path: {file} has the attribute conserved, the integral of each channel, and without time "
            f"{header.input_channels} input and {targets} target channels; equal numbers are required, to compare the "
            "two. Set conserved to False in the files of both splits."
        )


def _check_boundary(file: Path, header: FieldHeader) -> None:
    """Refuse a misspelling of one of `BOUNDARIES`, which would silently have no effect."""
    given = header.boundary.strip()
    meant = nearest(given, BOUNDARIES, cutoff=0.8)
    # With a prefix, as in non-periodic, it names another boundary and often the opposite.
    is_other = meant is not None and len(given) > len(meant) and given.lower().endswith(meant)
    if meant and meant != header.boundary and not is_other:
        raise UsageError(
            f"--data.path: {file} has the attribute boundary {header.boundary!r}, which has no effect; {meant!r} is "
            "required for one that has. Correct it in the files of both splits, or name another boundary."
        )


def finite_parameters(file: Path, header: FieldHeader, parameters: NDArray[Any], first: int) -> None:
    """Refuse NaN and infinity in parameters (N, P). Their samples are consecutive in the file, from ``first`` on."""
    finite = np.isfinite(parameters)
    if finite.all():
        return
    row, column = (int(place) for place in np.argwhere(~finite)[0])
    raise UsageError(
        f"--data.path: sample {first + row} of {file}, task {header.task}, has the parameter "
        f"{header.parameters[column]} {parameters[row, column]:g}. Finite parameters are required, because they are "
        "inputs of the model: write the file again, or leave the sample out."
    )

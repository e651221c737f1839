"""Reading of PDEBench's files: their layout, times and parameter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from accel_train.config import UsageError
from accel_train.domains.pde.data.solvers import Float


def check_layout(file: Path, content: Any, task: str, steady: bool) -> None:
    """Refuse an open file whose arrays do not have PDEBench's layout for `task`."""
    shape = content["tensor"].shape
    points = content["x-coordinate"].size
    found = f"tensor {shape}"
    if steady:
        nu = content["nu"].shape
        found += f" and nu {nu}"
        layout = "tensor (N, 1, X, Y) and nu (N, X, Y)"
        fits = len(nu) == 3 and shape == (*nu[:1], 1, *nu[1:])
    else:
        layout = "tensor (N, T, X) or (N, T, X, C)"
        fits = len(shape) in (3, 4)
    if not fits or shape[2] != points:
        raise UsageError(
            f"--data.path: {file} has a {found} for {points} x-coordinates; {layout} for X coordinates is PDEBench's "
            f"layout of {task}. Check which file it is."
        )


def spacing_of(file: Path, times: Float, count: int) -> float:
    """Return the time between snapshots. Refuses fewer than `count` times, uneven spacing and times that fall."""
    if len(times) < count or count < 2:
        raise UsageError(
            f"--data.path: {file} has {len(times)} times in 't-coordinate' for {count} snapshots; one for each, and "
            "at least 2, are required: check which file it is."
        )
    steps = np.diff(times.astype(np.float64))
    mean = float(steps.mean())
    if not np.allclose(steps, mean, rtol=1e-3, atol=0) or mean <= 0:
        raise UsageError(
            f"--data.path: {file} has times in 't-coordinate' ({times.dtype}) that are {steps.min():g} to "
            f"{steps.max():g} apart; even spacing above 0, to within 1 in 1000, is required: correct them, "
            "to the precision of float32 or better."
        )
    # Rounded to 6 digits, in any unit of time, to drop the error of a decimal number in float32.
    return float(f"{mean:.6g}")


def parameter_of(file: Path, content: Any, name: str) -> float:
    """Read the parameter from the file's attribute or from its name. Some of PDEBench's files have the name only."""
    if name in content.attrs:
        value = content.attrs[name]
        try:
            return float(np.asarray(value).item())
        except (TypeError, ValueError):
            raise UsageError(
                f"--data.path: {file} has the attribute {name} {value!r}; one number is required, because it is an "
                "input of the model: correct the attribute."
            ) from None
    written = re.search(rf"{name}(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?P<rest>.*)", file.name, re.IGNORECASE)
    if written and not _has_other_separator(**written.groupdict()):
        return float(written["number"])
    raise UsageError(
        f"--data.path: {file} has no attribute {name!r} (it has {sorted(content.attrs) or 'none'}) and no such number "
        f"in its name. The parameter is an input of the model: name the file as PDEBench does, ..._{name}0.4.hdf5."
    )


def _has_other_separator(number: str, rest: str) -> bool:
    """Return True for a number whose decimal separator is not a point, as in 0p4, 0,4 and 0_4."""
    # After a decimal point, _2 marks the second file of the same number.
    divided = r"[p,]?\d" + (r"|_\d" * ("." not in number))
    return re.match(divided, rest, re.IGNORECASE) is not None

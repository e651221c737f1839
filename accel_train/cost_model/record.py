"""File of a calibration: every figure with its unit, its spread and the way it was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from accel_train.config import UsageError
from accel_train.cost_model.rates import LINKS
from accel_train.options.flags import refusal
from accel_train.options.keys import invalid_keys
from accel_train.options.tree import flatten, option_types
from accel_train.precision import Precision
from accel_train.store import atomic_files, strict_json

FORMAT = 3
NOISY = 0.1
"""Largest spread that does not count as noise."""
MAX_BYTES = 1 << 20
RATES = (".value", ".bytes_per_second")
"""Endings of the keys of rates, which must be above 0 because work is divided by them."""
AGAIN = "measure again with accel-train calibrate"


@dataclass(frozen=True)
class Figure:
    """One measured rate."""

    value: float
    unit: str
    spread: float
    """Interquartile range of the rounds over their median."""
    rounds: int
    how: str


@dataclass(frozen=True)
class LinkFigure:
    """A fitted link. Without values it was not measured, and ``how`` has the reason."""

    latency_seconds: float | None
    bytes_per_second: float | None
    residual: float | None
    """Root mean square of the fit's relative errors."""
    spread: float | None
    """Largest spread over the sizes."""
    rounds: int
    how: str


@dataclass(frozen=True)
class Links:
    """The collectives of ``LINKS``, with underscores."""

    all_reduce: LinkFigure
    all_gather: LinkFigure
    reduce_scatter: LinkFigure

    def by_kind(self) -> dict[str, LinkFigure]:
        """Return the links by their names in ``LINKS``."""
        return {kind: getattr(self, kind.replace("-", "_")) for kind in LINKS}


@dataclass(frozen=True)
class Machine:
    """Machine, time and setup of the measurement."""

    date: str
    """UTC, to the minute."""
    device: str
    device_type: Literal["cpu", "cuda"]
    precision: Precision
    torch: str
    num_machines: int
    processes: int
    """Processes on all machines together."""
    backend: str | None
    """Backend of the collectives. None with one process."""
    threads: int
    """Torch's threads of each process."""
    clock: str
    """Clock behind the figures of one process: ``wall``, or on a CPU with one thread that thread's own, ``thread``."""
    load: float
    """Load average of the system over the minute before."""
    cores: int
    """Cores of one machine that this process may use."""

    def share_of_cores(self, processes: int) -> float:
        """Return the part of the time that each thread of ``processes`` has a core, relative to the measurement."""
        cores = self.cores * self.num_machines
        share = min(1.0, cores / (processes * self.threads))
        if self.clock == "thread":
            # The thread's clock stands still while another thread has the core.
            return share
        return min(1.0, share / min(1.0, cores / (self.processes * self.threads)))


@dataclass(frozen=True)
class Figures:
    """Rates of one process."""

    products: Figure
    attention: Figure
    operators: Figure
    copy: Figure
    host: Figure
    adamw: Figure
    """Bytes of host memory that AdamW on the CPU reads and writes."""
    transfer: Figure
    """Bytes copied between host memory and the device."""

    def by_name(self) -> dict[str, Figure]:
        """Return the figures by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclass(frozen=True)
class Calibration:
    """Everything in a file of ``accel-train calibrate``."""

    machine: Machine
    figures: Figures
    links: Links
    format: int = FORMAT

    def noisy(self) -> list[str]:
        """Return the names of the figures with a spread above ``NOISY``."""
        spreads = {name: figure.spread for name, figure in self.figures.by_name().items()}
        spreads |= {kind: link.spread or 0.0 for kind, link in self.links.by_kind().items()}
        return [name for name, spread in spreads.items() if spread > NOISY]

    @property
    def origin(self) -> str:
        """Origin of a figure, for a report."""
        return f"measured by calibrate on {self.machine.date.partition(' ')[0]}"


def write(path: Path, calibration: Calibration) -> None:
    """Write the file, sealed by its own hash. Replaces nothing but another calibration."""
    refuse_other_file(path)
    atomic_files.replace_json(path, strict_json.sealed(dataclasses.asdict(calibration)))


def refuse_other_file(path: Path) -> None:
    """Raise ``UsageError`` if there is something at ``path`` that ``calibrate`` has not written."""
    if not path.exists():
        return
    try:
        tree = strict_json.read_object(path, MAX_BYTES)
    except (ValueError, FileNotFoundError):
        tree = {}
    # A calibration of any version passes. Other files have a seal as well, such as the manifest of a checkpoint.
    if not {"machine", "figures", "links", strict_json.SEAL} <= tree.keys():
        raise UsageError(
            f"output: {path} exists and was not written by accel-train calibrate; a new name is required. Give another"
        )


def read(path: Path) -> Calibration:
    """Read a file. Raises ``UsageError`` if it is damaged, or not of this version."""
    try:
        tree = strict_json.read_object(path, MAX_BYTES)
        sealed = {key: value for key, value in tree.items() if key != strict_json.SEAL}
        _check_keys(sealed)
        strict_json.check_seal(tree)
        return _calibration(sealed)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(
            f"device: {path}: {error}; an unchanged file of this version of accel-train calibrate is required. "
            f"{AGAIN.capitalize()}"
        ) from None


def _check_keys(tree: Mapping[str, Any]) -> None:
    if tree.get("format") != FORMAT:
        raise ValueError(f"its format is {tree.get('format')!r}, not {FORMAT}")
    for key in invalid_keys(Calibration, tree, ()):
        name = ".".join(key.path)
        raise ValueError(f"{name} is not a group of keys" if key.is_group else f"unknown key {name}")
    flat = flatten(tree)
    for name, kind in option_types(Calibration).items():
        if name not in flat:
            raise ValueError(f"the key {name} is missing")
        value = flat[name]
        reason = refusal(kind, value)
        if isinstance(value, list):
            reason = "a list is refused: one value is required"
        elif reason is None and name.endswith(RATES) and value is not None and not value > 0:
            reason = f"{value}: a number above 0 is required"
        if reason is not None:
            raise ValueError(f"{name}: {reason}")


def _calibration(tree: Mapping[str, Any]) -> Calibration:
    links = Links(**{name: LinkFigure(**values) for name, values in tree["links"].items()})
    figures = Figures(**{name: Figure(**values) for name, values in tree["figures"].items()})
    return Calibration(Machine(**tree["machine"]), figures, links, tree["format"])

"""Options of the `data` group, and the equations whose fields are generated here."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accel_train import rng
from accel_train.config import NonNegativeInt, PositiveFloat, PositiveInt, Seed, UsageError, refuse_without_effect
from accel_train.data.generation import blocks_in_order
from accel_train.data.options import refuse_too_many
from accel_train.data.progress import Progress
from accel_train.data.tables.ledger import Changed
from accel_train.domains.pde.data.files import FieldHeader, write_fields
from accel_train.domains.pde.data.solvers import Float, gaussian_fields, solve_burgers, solve_darcy

DEMO = "demo"
SPLITS = ("train", "heldout")
DEFAULT_SAMPLES = {"train": 1536, "heldout": 128}
DEFAULT_RESOLUTION = {1: 128, 2: 32}
GENERATOR = 1
"""Version of the generated data. It changes when the same options give other data."""
TASK_OPTIONS = ("speed", "viscosity", "snapshots", "dt", "time_stride", "resolution_1d", "resolution_2d")
"""Generation options that only some tasks read."""
BLOCK = 32
"""Samples generated together. Blocks are always whole, so sample i does not depend on the number of samples."""
MODES = 6
"""Fourier modes of an initial condition, with amplitudes 1 / k."""


@dataclass(frozen=True)
class PdeDataConfig:
    """Source of the fields. Generation options are refused if the fields are read from files."""

    path: str = DEMO
    """'demo' (generated here), a folder with files {task}_train.h5 and {task}_heldout.h5 (or .hdf5, .zarr) of our
    schema, or a folder with PDEBench's files as downloaded. The last samples of those are held out."""
    tasks: tuple[str, ...] = ("advection", "darcy")
    """Generated or from PDEBench: advection (1-D, periodic), burgers (1-D, viscous, periodic), darcy (2-D, steady).
    Files of our schema may hold any other task."""
    train_samples: PositiveInt | None = None
    """Training trajectories or problems of each task. None: 1536 generated, all of a file."""
    heldout_samples: PositiveInt | None = None
    """Held-out trajectories or problems of each task. None: 128 generated, all of a held-out file, a tenth of
    PDEBench's."""
    resolution_1d: PositiveInt | None = None
    """Points of 1-D fields. From a file, every n-th point is read. For periodic fields, n must divide their points. For
    others, 421 points give 211, 141, 106, 85 and so on. None: 128 generated, all of a file."""
    resolution_2d: PositiveInt | None = None
    """Points of 2-D fields along the width, the last axis. Generated fields are square. From a file, every n-th point
    is read along both axes, with the n of the width. None: 32 generated, all of a file."""
    time_stride: PositiveInt = 2
    """Tasks with time: snapshots from a row's input to its target."""
    snapshots: PositiveInt = 21
    """Generated: snapshots of a trajectory, including the initial condition."""
    dt: PositiveFloat = 0.05
    """Generated: time between snapshots."""
    speed: tuple[float, float] = (0.2, 1.2)
    """Generated advection: lowest and highest speed in domain lengths per unit of time. Equal: one fixed linear
    map."""
    viscosity: tuple[PositiveFloat, PositiveFloat] = (0.02, 0.2)
    """Generated burgers: lowest and highest viscosity, drawn uniformly in the logarithm. A lower one needs a finer
    grid."""
    seed: Seed = 0
    """Seed of the generated data, independent of the training seed."""
    workers: NonNegativeInt | Literal["auto"] = "auto"
    """Processes for generation, with the same data for any number. 0: this process alone. auto: one per core of the
    host if the work takes longer than starting them."""
    changed: Changed = "refuse"
    """Files that changed since the run began, such as added samples. refuse: do not resume. allow: continue with the
    normalisation of the checkpoint; its assets/ledger.json records which data were used from which step."""
    cache_mib: PositiveInt | None = None
    """Files: decoded chunks of each split that each process and each worker caches, in MiB. At least one chunk is
    cached. None: 256."""
    cache_dir: str | None = None
    """Cache of generated data between runs. None: $ACCEL_TRAIN_CACHE, else ~/.cache/accel_train."""

    def __post_init__(self) -> None:
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise UsageError(f"--data.tasks {list(self.tasks)}: at least one task, each once, is required.")
        if self.path == DEMO:
            because = f"with data.path: {DEMO}, whose files have no chunks"
            refuse_without_effect(self, "data", ["cache_mib"], because, "read files")
            self._check_generation()
        else:
            names = ("snapshots", "dt", "speed", "viscosity", "seed", "workers")
            because = f"with data.path: {self.path}, whose files are read"
            refuse_without_effect(self, "data", names, because, f"set path to {DEMO}")

    def _check_generation(self) -> None:
        if unknown := [task for task in self.tasks if task not in KINDS]:
            raise UsageError(f"--data.tasks {unknown[0]}: cannot be generated; choose from {', '.join(KINDS)}.")
        read: set[str] = set()
        for task in self.tasks:
            read.update(KINDS[task].options)
            read.add(f"resolution_{KINDS[task].space}d")
        if "dt" in read:
            read.add("time_stride")
        unread = [name for name in TASK_OPTIONS if name not in read]
        because = f"with data.tasks: {' '.join(self.tasks)}"
        refuse_without_effect(self, "data", unread, because, "add a task that reads it")
        if self.snapshots <= self.time_stride:
            raise UsageError(
                f"--data.snapshots {self.snapshots}: more than time_stride {self.time_stride} are required to make a "
                "pair of input and target. Raise snapshots or lower time_stride."
            )
        if self.resolution(1) <= 2 * MODES:
            raise UsageError(
                f"--data.resolution_1d {self.resolution_1d}: more than {2 * MODES} points are required for the "
                f"{MODES} Fourier modes of an initial condition. Raise it."
            )
        ranges = {"speed": self.speed, "viscosity": self.viscosity}
        for name, (low, high) in ranges.items():
            if low > high:
                raise UsageError(f"--data.{name} {low} {high}: the lower value must come first. Swap them.")

    def resolution(self, space: int) -> int:
        """Return the number of points per axis of generated fields in ``space`` dimensions, 1 or 2."""
        return self.points_of_files()[space] or DEFAULT_RESOLUTION[space]

    def points_of_files(self) -> dict[int, int | None]:
        """Map the dimensions 1 and 2 to the points to read along an axis. None: all of a file."""
        return {1: self.resolution_1d, 2: self.resolution_2d}

    def samples(self, split: str) -> int | None:
        """Return the number of samples of a split. None: as many as the files have."""
        samples = {"train": self.train_samples, "heldout": self.heldout_samples}[split]
        if samples is None and self.path == DEMO:
            return DEFAULT_SAMPLES[split]
        return samples


Keys = Callable[[str], Tensor]
"""Function from the purpose of a draw to the keys (BLOCK,), int64, that `accel_train.rng` draws from."""


def _advection(config: PdeDataConfig, keys: Keys) -> tuple[Float, Float]:
    """Generate u_t + beta u_x = 0 exactly: u(x, t) = u0(x - beta t) shifts the phase of every Fourier mode."""
    speed = _draw_between(keys("speed"), *config.speed)
    times = np.arange(config.snapshots) * config.dt
    modes = np.arange(MODES + 1)
    distance = speed[:, None] * times  # (BLOCK, T), in domain lengths
    phase = np.exp(-2j * np.pi * distance[..., None] * modes)  # (BLOCK, T, MODES + 1)
    spectrum = _draw_initial(keys)[:, None] * phase
    points = config.resolution(1)
    # irfft divides by the number of points. Undo that, so that the amplitudes are the same on any grid.
    fields = np.fft.irfft(spectrum, points) * points  # (BLOCK, T, X)
    return fields[:, :, None, None], speed[:, None]


def _burgers(config: PdeDataConfig, keys: Keys) -> tuple[Float, Float]:
    """Generate u_t + (u^2 / 2)_x = nu u_xx on a fine grid, and subsample it."""
    lowest, highest = config.viscosity
    logarithm = _draw_between(keys("viscosity"), math.log(lowest), math.log(highest))
    # Uniform in the logarithm: every octave of viscosities has equally many samples.
    viscosity = np.exp(logarithm)
    points = config.resolution(1)
    # The fine grid resolves the thinnest shock, that of the lowest viscosity.
    fine = points * 2 * math.ceil(2.5 / (lowest * points))
    spectrum = np.zeros((BLOCK, fine // 2 + 1), complex)
    # The solver takes spectra as numpy's rfft returns them, which grow with the number of points.
    spectrum[:, : MODES + 1] = _draw_initial(keys) * fine
    fields = solve_burgers(spectrum, viscosity, config.dt, config.snapshots)
    subsampled = fields[:, :, :: fine // points]  # (BLOCK, T, X)
    return subsampled[:, :, None, None], viscosity[:, None]


def _draw_initial(keys: Keys) -> NDArray[np.complex128]:
    """Draw spectra (BLOCK, MODES + 1) of a constant and a sum over k of (a_k cos 2 pi k x + b_k sin 2 pi k x) / k."""
    draws = rng.normal(keys("initial"), (MODES + 1, 2)).double().numpy()
    numbers = np.arange(MODES + 1)
    # Half of a mode's amplitude is in its mirror image, which a real FFT leaves out. The constant counts as k = 1.
    divisor = 2.0 * np.maximum(1, numbers)
    cosines = draws[..., 0]
    sines = draws[..., 1]
    spectrum = (cosines - 1j * sines) / divisor
    spectrum[:, 0] = spectrum[:, 0].real  # a real field's constant
    return spectrum


def _draw_between(keys: Tensor, low: float, high: float) -> Float:
    return low + (high - low) * rng.uniform(keys).double().numpy()


def _darcy(config: PdeDataConfig, keys: Keys) -> tuple[Float, Float]:
    """Generate -div(a grad u) = 1 with u = 0 on the boundary. a is 12 above a level of a Gaussian random field, else 3.

    In Li et al. 2021 (arXiv 2010.08895, A.3.2) the level is 0. Here the share of 12 is drawn from 5 % to 95 %, so the
    size of u varies as well.
    """
    # The number of modes does not grow with the grid, so a finer grid poses the same problem.
    modes = DEFAULT_RESOLUTION[2]
    noise = rng.normal(keys("coefficient"), (modes, modes)).double().numpy()
    fields = gaussian_fields(noise, config.resolution(2))
    shares = _draw_between(keys("share"), 0.05, 0.95)
    pairs = zip(fields, shares, strict=True)
    # The quantile of each field's own points, so that its share is exact and not only right on average.
    levels = np.array([np.quantile(field, 1 - share) for field, share in pairs])
    coefficient = np.where(fields > levels[:, None, None], 12.0, 3.0)
    solution = np.stack([solve_darcy(sample, np.ones_like(sample)) for sample in coefficient])
    channels = np.stack([coefficient, solution], axis=1)
    return channels[:, None], np.empty((BLOCK, 0))


class Kind(NamedTuple):
    """A task that can be generated, with the properties that PDEBench's files of it do not record."""

    generate: Callable[[PdeDataConfig, Keys], tuple[Float, Float]]
    parameters: tuple[str, ...]
    space: int
    boundary: Literal["periodic", "dirichlet"]
    conserved: bool
    pdebench: str
    """Pattern of PDEBench's file names."""
    attribute: str
    """Name of PDEBench's parameter, which has one value per file."""
    options: tuple[str, ...] = ()
    """Options read by the generator, in addition to sizes and seed."""


TIME = ("snapshots", "dt")
KINDS = {
    "advection": Kind(_advection, ("beta",), 1, "periodic", True, "1D_Advection_Sols_*.hdf5", "beta", (*TIME, "speed")),
    "burgers": Kind(_burgers, ("Nu",), 1, "periodic", True, "1D_Burgers_Sols_*.hdf5", "Nu", (*TIME, "viscosity")),
    "darcy": Kind(_darcy, (), 2, "dirichlet", False, "2D_DarcyFlow_*.hdf5", "beta"),
}


def _block(config: PdeDataConfig, task: str, split: str, number: int) -> tuple[Float, Float]:
    """Generate the BLOCK samples from number * BLOCK on. The result depends on the arguments only, on any process."""
    samples = torch.arange(number * BLOCK, (number + 1) * BLOCK)

    def keys(use: str) -> Tensor:
        return rng.sample_keys(config.seed, f"{task}/{split}/{use}", 0, samples)

    return KINDS[task].generate(config, keys)


def generate(config: PdeDataConfig, task: str, progress: bool, directory: Path) -> None:
    """Write both splits of a task into a folder. Raises ``UsageError`` for too many workers."""
    if config.workers != "auto":
        refuse_too_many("data.workers", config.workers)
    kind = KINDS[task]
    # Darcy flow is steady: a row maps a coefficient to a solution, not one time to the next.
    dt = config.dt if kind.space == 1 else 0.0
    header = FieldHeader(task, kind.parameters, 1, dt, kind.boundary, kind.conserved)
    for split in SPLITS:
        samples = config.samples(split) or 0
        count = math.ceil(samples / BLOCK)
        blocks = blocks_in_order(partial(_block, config, task, split), count, config.workers)
        with Progress(f"{task} {split}", samples, progress) as bar:
            write_fields(directory / f"{task}_{split}.h5", header, samples, blocks, bar.update)


def key_of(config: PdeDataConfig, task: str) -> str:
    """Hash everything the generated data depend on. The hash names their cache folder."""
    # Options that this task does not read are left out, so that changing them still finds the cached data.
    sizes = [*map(config.samples, SPLITS), config.resolution(KINDS[task].space)]
    options = [getattr(config, name) for name in ("seed", *KINDS[task].options)]
    text = json.dumps([GENERATOR, sizes, options])
    return hashlib.sha256(text.encode()).hexdigest()

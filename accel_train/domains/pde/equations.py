"""Partial differential equations as data: generated here, exactly, or read from files.

Files ``{task}_train.h5`` and ``{task}_heldout.h5`` of the schema of `accel_train.domains.pde.files`, or PDEBench's own.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accel_train import rng
from accel_train.config import NonNegativeInt, PositiveFloat, PositiveInt, Seed, UsageError, expand_path
from accel_train.data.artifacts import cached_folder, open_cache
from accel_train.data.generation import blocks_in_order, split_evenly
from accel_train.data.progress import Progress
from accel_train.domains.pde.files import FieldHeader, FieldPart, StoredFields, hdf5, read_stored, require, write_fields
from accel_train.domains.pde.rows import FieldData, build_field_data

DEMO = "demo"
SPLITS = ("train", "heldout")
DEFAULT_SAMPLES = {"train": 1536, "heldout": 128}
DEFAULT_RESOLUTION = {1: 128, 2: 32}
GENERATOR = 1
"""Counts changes of what is generated from the same options."""
SOME_TASKS = ("speed", "viscosity", "snapshots", "dt", "time_stride", "resolution_1d", "resolution_2d")  # not by all
BLOCK = 32
"""Samples generated together. Always whole blocks, so that sample i does not depend on how many there are."""
MODES = 6
"""Fourier modes of an initial condition, with amplitudes 1 / k."""

Float = NDArray[np.float64]


@dataclass(frozen=True)
class PdeDataConfig:
    """Where fields come from. Options of generation are refused with files."""

    path: str = DEMO
    """'demo' (generated here), or a folder with files {task}_train.h5 and {task}_heldout.h5 of our schema, or with
    PDEBench's files as downloaded, of which the last samples are held out."""
    tasks: tuple[str, ...] = ("advection", "darcy")
    """Generated or of PDEBench: advection (1-D, periodic), burgers (1-D, viscous, periodic), darcy (2-D, steady). Files
    of our schema may hold any other."""
    train_samples: PositiveInt | None = None
    """Trajectories or problems of each task to train on. null: 1536 generated, all of a file."""
    heldout_samples: PositiveInt | None = None
    """Held out of each task. null: 128 generated, all of a held-out file, a tenth of PDEBench's."""
    resolution_1d: PositiveInt | None = None
    """Points of 1-D fields; files are sub-sampled, and must divide by it. null: 128 generated, all of a file."""
    resolution_2d: PositiveInt | None = None
    """Points of 2-D fields along each axis. null: 32 generated, all of a file."""
    time_stride: PositiveInt = 2
    """Snapshots from a row's input to its target, in tasks with time."""
    snapshots: PositiveInt = 21
    """Generated: snapshots of a trajectory, the initial condition among them."""
    dt: PositiveFloat = 0.05
    """Generated: time between snapshots."""
    speed: tuple[float, float] = (0.2, 1.2)
    """Generated advection: lowest and highest speed, domain lengths per unit of time. Equal: one fixed linear map."""
    viscosity: tuple[PositiveFloat, PositiveFloat] = (0.02, 0.2)
    """Generated burgers: lowest and highest viscosity, drawn evenly in the logarithm. Lower costs a finer grid."""
    seed: Seed = 0
    """Of what is generated; not that of the training."""
    workers: NonNegativeInt | Literal["auto"] = "auto"
    """Processes that generate, 0: none beside this one; the data are the same. auto: the cores of the host, where the
    work takes longer than starting them."""
    cache_dir: str | None = None
    """Where generated data are kept between runs; null: $ACCEL_TRAIN_CACHE, else ~/.cache/accel_train."""

    def __post_init__(self) -> None:
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise UsageError(f"--data.tasks {list(self.tasks)}: at least one task, each once, is required.")
        if self.path == DEMO:
            self._check_generation()
        else:
            names = ("snapshots", "dt", "speed", "viscosity", "seed", "workers")
            self._refuse_unread(names, f"--data.path {self.path!r}, whose files are read", f"set path to {DEMO}")

    def _refuse_unread(self, names: Iterable[str], where: str, instead: str) -> None:
        defaults = {f.name: f.default for f in dataclass_fields(self)}
        for name, value in ((n, getattr(self, n)) for n in names if getattr(self, n) != defaults[n]):
            raise UsageError(
                f"--data.{name} {value!r} has no effect with {where}. Leave it at {defaults[name]!r}, or {instead}."
            )

    def _check_generation(self) -> None:
        if unknown := [task for task in self.tasks if task not in KINDS]:
            raise UsageError(f"--data.tasks {unknown[0]}: cannot be generated; choose of {', '.join(KINDS)}.")
        read = {n for task in self.tasks for n in (*KINDS[task].options, f"resolution_{KINDS[task].space}d")}
        unread = (n for n in SOME_TASKS if n.replace("time_stride", "dt") not in read)
        self._refuse_unread(unread, f"--data.tasks {' '.join(self.tasks)}", "add a task that reads it")
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
        for name, (low, high) in {"speed": self.speed, "viscosity": self.viscosity}.items():
            if low > high:
                raise UsageError(f"--data.{name} {low} {high}: the lowest comes first. Swap them.")

    def resolution(self, space: int) -> int:
        """Points along an axis of what is generated in 1 or 2 dimensions."""
        return (self.resolution_1d if space == 1 else self.resolution_2d) or DEFAULT_RESOLUTION[space]

    def samples(self, split: str) -> int | None:
        """The number asked for, None where it is left to the files."""
        given = self.train_samples if split == "train" else self.heldout_samples
        return given or (DEFAULT_SAMPLES[split] if self.path == DEMO else None)


Keys = Callable[[str], Tensor]
"""Use of a draw -> keys (BLOCK,) int64 of `accel_train.rng`."""


def _advection(config: PdeDataConfig, keys: Keys) -> tuple[Float, Float]:
    """u_t + beta u_x = 0: u(x, t) = u0(x - beta t), every Fourier mode turned by its own phase."""
    speed = _between(keys("speed"), *config.speed)
    times, modes = np.arange(config.snapshots) * config.dt, np.arange(MODES + 1)
    phase = np.exp(-2j * np.pi * (speed[:, None] * times)[..., None] * modes)
    points = config.resolution(1)
    fields = np.fft.irfft(_initial(keys)[:, None] * phase, points) * points
    return fields[:, :, None, None], speed[:, None]


def _burgers(config: PdeDataConfig, keys: Keys) -> tuple[Float, Float]:
    """u_t + (u^2 / 2)_x = nu u_xx, on a grid that resolves the thinnest shock of the lowest viscosity."""
    viscosity = np.exp(_between(keys("viscosity"), *map(math.log, config.viscosity)))
    points = config.resolution(1)
    fine = points * 2 * math.ceil(2.5 / (config.viscosity[0] * points))
    spectrum = np.zeros((BLOCK, fine // 2 + 1), complex)
    spectrum[:, : MODES + 1] = _initial(keys) * fine
    fields = solve_burgers(spectrum, viscosity, config.dt, config.snapshots)
    return fields[:, :, None, None, :: fine // points], viscosity[:, None]


def _initial(keys: Keys) -> NDArray[np.complex128]:
    """(BLOCK, MODES + 1): sum over k of (a_k cos 2 pi k x + b_k sin 2 pi k x) / k, and a constant."""
    draws = rng.normal(keys("initial"), (MODES + 1, 2)).double().numpy()
    spectrum = (draws[..., 0] - 1j * draws[..., 1]) / (2.0 * np.maximum(1, np.arange(MODES + 1)))
    spectrum[:, 0] = spectrum[:, 0].real
    return spectrum


def _between(keys: Tensor, low: float, high: float) -> Float:
    return low + (high - low) * rng.uniform(keys).double().numpy()


def solve_burgers(
    spectrum: NDArray[np.complex128], viscosity: Float, dt: float, snapshots: int, courant: float = 0.5
) -> Float:
    """Spectra (B, X / 2 + 1) of numpy's rfft and viscosities (B,) -> (B, snapshots, X), `dt` apart, the first given.

    Fourier in space with the upper third left empty (Orszag), in time the classical Runge-Kutta method of order 4 on
    exp(nu k^2 t) u_k, which takes viscosity exactly (Trefethen, Spectral Methods in MATLAB, program 27). A step is
    `courant` cells at the highest initial speed, which viscous flow never exceeds.
    """
    points = 2 * (spectrum.shape[1] - 1)
    number = np.arange(spectrum.shape[1])
    kept = number <= points // 3
    state, fields = spectrum * kept, [np.fft.irfft(spectrum * kept, points)]
    steps = math.ceil(dt * max(1.0, float(np.abs(fields[0]).max())) * points / courant)
    half = np.exp(-viscosity[:, None] * (2 * np.pi * number) ** 2 * (dt / steps / 2))
    slope = -1j * np.pi * number * kept * (dt / steps)

    def change(spectrum: NDArray[np.complex128]) -> NDArray[np.complex128]:
        return slope * np.fft.rfft(np.fft.irfft(spectrum, points) ** 2)

    for _ in range(snapshots - 1):
        for _ in range(steps):
            first = change(state)
            second = change(half * (state + first / 2))
            third = change(half * state + second / 2)
            fourth = change(half * (half * state + third))
            state = half * (half * (state + first / 6) + (second + third) / 3) + fourth / 6
        fields.append(np.fft.irfft(state, points))
    return np.stack(fields, axis=1)


def _darcy(config: PdeDataConfig, keys: Keys) -> tuple[Float, Float]:
    """-div(a grad u) = 1 with u = 0 on the boundary; a is 12 where a Gaussian random field is above a level, else 3.

    Its covariance is (9 - Laplace)^-2 with Neumann boundaries, as in Li et al. 2021 (arXiv 2010.08895, A.3.2). There
    the level is 0; here the share of 12 is drawn from 5 % to 95 %, so that the size of u differs as well.
    """
    from scipy.fft import idctn

    points = config.resolution(2)
    modes = min(points, DEFAULT_RESOLUTION[2])  # the same problem on every finer grid
    square = np.arange(modes) ** 2
    noise = rng.normal(keys("coefficient"), (DEFAULT_RESOLUTION[2],) * 2).double().numpy()[:, :modes, :modes]
    spectrum = np.zeros((BLOCK, points, points))
    spectrum[:, :modes, :modes] = noise / (np.pi**2 * (square[:, None] + square) + 9.0)
    fields = cast(Float, idctn(spectrum, axes=(1, 2), norm="ortho"))
    shares = _between(keys("share"), 0.05, 0.95)
    levels = [np.quantile(field, 1 - share) for field, share in zip(fields, shares, strict=True)]
    coefficient = np.where(fields > np.array(levels)[:, None, None], 12.0, 3.0)
    solution = np.stack([solve_darcy(one, np.ones_like(one)) for one in coefficient])
    return np.stack([coefficient, solution], axis=1)[:, None], np.empty((BLOCK, 0))


def solve_darcy(coefficient: Float, source: Float) -> Float:
    """-div(a grad u) = f on the unit square, u = 0 on its boundary; all (H, W) at the centres of cells.

    Finite volumes of second order; a face between two cells has the harmonic mean of their coefficients, so that the
    flux is right where the coefficient jumps. Sparse Cholesky-like factors (SuperLU, symmetric mode): 2 ms at 32 x 32.
    """
    from scipy.sparse import diags_array
    from scipy.sparse.linalg import splu

    height, width = coefficient.shape
    across, down = _faces(coefficient) * (width / height), _faces(coefficient.T).T * (height / width)
    diagonal = (across[:, 1:] + across[:, :-1] + down[1:] + down[:-1]).ravel()
    right = np.where(np.arange(width) < width - 1, across[:, 1:], 0.0).ravel()[:-1]
    below = down[1:-1].ravel()
    offsets: Any = [-width, -1, 0, 1, width]  # scipy's annotation knows one only
    matrix = diags_array([-below, -right, diagonal, -right, -below], offsets=offsets, format="csc")
    factors = splu(matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
    return factors.solve(source.ravel() / (height * width)).reshape(height, width)


def _faces(coefficient: Float) -> Float:
    """(H, W) -> (H, W + 1) along the last axis; the boundary is half a cell away."""
    left, right = coefficient[:, :-1], coefficient[:, 1:]
    ends = 2.0 * coefficient[:, [0, -1]]
    return np.concatenate([ends[:, :1], 2.0 * left * right / (left + right), ends[:, 1:]], axis=1)


class Kind(NamedTuple):
    """A task that is generated, and what PDEBench's files do not say of it."""

    generate: Callable[[PdeDataConfig, Keys], tuple[Float, Float]]
    parameters: tuple[str, ...]
    space: int
    boundary: Literal["periodic", "dirichlet"]
    conserved: bool
    pdebench: str
    """PDEBench's file names."""
    attribute: str
    """PDEBench's parameter, one value for each file."""
    options: tuple[str, ...] = ()
    """What the samples depend on, beside sizes and seed."""


TIME = ("snapshots", "dt")
KINDS = {
    "advection": Kind(_advection, ("beta",), 1, "periodic", True, "1D_Advection_Sols_*.hdf5", "beta", (*TIME, "speed")),
    "burgers": Kind(_burgers, ("Nu",), 1, "periodic", True, "1D_Burgers_Sols_*.hdf5", "Nu", (*TIME, "viscosity")),
    "darcy": Kind(_darcy, (), 2, "dirichlet", False, "2D_DarcyFlow_*.hdf5", "beta"),
}


def _block(config: PdeDataConfig, task: str, split: str, number: int) -> tuple[Float, Float]:
    """Samples number * BLOCK and on: a function of these arguments, on whatever process."""
    samples = torch.arange(number * BLOCK, (number + 1) * BLOCK)
    return KINDS[task].generate(config, lambda use: rng.sample_keys(config.seed, f"{task}/{split}/{use}", 0, samples))


def _generate(config: PdeDataConfig, task: str, sharing: int, progress: bool, directory: Path) -> None:
    kind = KINDS[task]
    header = FieldHeader(task, kind.parameters, 1, config.dt if kind.space == 1 else 0.0, kind.boundary, kind.conserved)
    for split in SPLITS:
        samples = config.samples(split) or 0
        blocks = blocks_in_order(partial(_block, config, task, split), -(-samples // BLOCK), config.workers, sharing)
        with Progress(f"{task} {split}", samples, progress) as bar:
            write_fields(directory / f"{task}_{split}.h5", header, samples, blocks, bar.update)


def _key(config: PdeDataConfig, task: str) -> str:
    """Names the folder of what is generated: all that it is a function of."""
    sizes = [*map(config.samples, SPLITS), config.resolution(KINDS[task].space)]
    options = [getattr(config, name) for name in ("seed", *KINDS[task].options)]
    return hashlib.sha256(json.dumps([GENERATOR, sizes, options]).encode()).hexdigest()


def _splits(config: PdeDataConfig, task: str, folder: Path) -> dict[str, list[StoredFields]]:
    """The samples of each split: of its own file, or the first and the last of every file of PDEBench."""
    points = {1: config.resolution_1d, 2: config.resolution_2d}
    own = {split: folder / f"{task}_{split}.h5" for split in SPLITS}
    if any(file.is_file() for file in own.values()):
        opened = {split: _open(file, task) for split, file in own.items()}
        sizes = {split: len(stored.parameters) for split, stored in opened.items()}
        wanted = {split: config.samples(split) or size for split, size in sizes.items()}
        return {split: [opened[split].cut(split, (0, sizes[split]), wanted[split], points)] for split in SPLITS}
    files = [_open(file, task) for file in _pdebench_files(config, task, folder)]
    sizes = [len(stored.parameters) for stored in files]
    heldout = split_evenly(config.heldout_samples, [size // 10 for size in sizes])
    train = split_evenly(config.train_samples, [size - count for size, count in zip(sizes, heldout, strict=True)])
    splits: dict[str, list[StoredFields]] = {split: [] for split in SPLITS}
    for stored, size, last, first in zip(files, sizes, heldout, train, strict=True):
        splits["heldout"].append(stored.cut("heldout", (max(0, size - last), size), last, points))
        splits["train"].append(stored.cut("train", (0, size - last), first, points))
    return splits


def _pdebench_files(config: PdeDataConfig, task: str, folder: Path) -> list[Path]:
    pattern = KINDS[task].pdebench if task in KINDS else f"{task}_*.h5"
    if files := sorted(folder.rglob(pattern)):
        return files
    there = ", ".join(sorted(file.name for file in folder.glob("*"))[:8]) if folder.is_dir() else "no such folder"
    raise UsageError(
        f"--data.path {config.path!r}: {folder} has no data of task {task!r}; it holds: {there or 'nothing'}. Files "
        f"{task}_train.h5 and {task}_heldout.h5, or PDEBench's {pattern}, are required: correct path or --data.tasks."
    )


def _open(file: Path, task: str) -> StoredFields:
    try:
        with hdf5().File(file, "r") as content:
            stored = read_stored(file, content) if "fields" in content else _read_pdebench(file, content, task)
    except OSError as error:
        raise UsageError(
            f"--data.path: {file} cannot be read ({error}). A complete HDF5 file is required for the training split "
            "and for the held-out one: bring it, or delete both to use others of the folder."
        ) from None
    if stored.header.task != task:
        raise UsageError(f"--data.path: {file} holds task {stored.header.task!r}; {task!r} is required. Rename it.")
    return stored


def _read_pdebench(file: Path, content: Any, task: str) -> StoredFields:
    """`tensor` (N, T, X) or (N, T, X, C); of Darcy flow (N, 1, X, Y) beside `nu` (N, X, Y). One parameter a file."""
    if task not in KINDS:
        raise UsageError(
            f"--data.path: {file} is not of our schema, and of PDEBench {', '.join(KINDS)} are read, not {task!r}. "
            "Write it as accel_train.domains.pde.files says."
        )
    kind, steady = KINDS[task], KINDS[task].space == 2
    names = ("nu", "tensor") if steady else ("tensor",)
    require(file, content, (*names, "x-coordinate", *(() if steady else ("t-coordinate",))))
    shape, points = content["tensor"].shape, len(content["x-coordinate"])
    nu = content["nu"].shape if steady else ()
    if (shape != (*nu[:1], 1, *nu[1:]) if steady else len(shape) not in (3, 4)) or shape[2] != points:
        layout = "tensor (N, 1, X, Y) and nu (N, X, Y)" if steady else "tensor (N, T, X) or (N, T, X, C)"
        raise UsageError(
            f"--data.path: {file} has a tensor {shape}{f' and nu {nu}' if steady else ''} for {points} x-coordinates; "
            f"{layout} for X coordinates is what PDEBench has of {task}. Check which file it is."
        )
    dt = 0.0 if steady else _spacing(file, content["t-coordinate"][: shape[1]], shape[1])
    header = FieldHeader(task, (kind.attribute,), 1, dt, kind.boundary, kind.conserved)
    value = np.full((shape[0], 1), _parameter(file, content, kind.attribute), np.float32)
    return StoredFields(header, FieldPart(file, names, kind.space, 0, shape[0]), value)


def _spacing(file: Path, times: Float, count: int) -> float:
    steps = np.diff(times)
    if len(times) < count or count < 2 or not np.allclose(steps, steps.mean(), rtol=1e-3):
        raise UsageError(
            f"--data.path: {file} has {len(times)} times in 't-coordinate' for {count} snapshots; as many, 2 or more "
            "and evenly spaced, are required."
        )
    return round(float(steps.mean()), 6)


def _parameter(file: Path, content: Any, name: str) -> float:
    """An attribute of the file, or, as in some of PDEBench's, only in its name."""
    if name in content.attrs:
        return float(content.attrs[name])
    if found := re.search(rf"{name}(\d+(?:\.\d+)?(?:e-?\d+)?)", file.name, re.IGNORECASE):
        return float(found[1])
    raise UsageError(
        f"--data.path: {file} has no attribute {name!r} (it has {sorted(content.attrs) or 'none'}) and no such number "
        f"in its name. The parameter is an input of the model: name the file as PDEBench does, ..._{name}0.4.hdf5."
    )


def prepare_pde(
    config: PdeDataConfig, *, rank: int = 0, world_size: int = 1, barrier: Callable[[], None] | None = None
) -> FieldData:
    """Rows of all tasks; every rank calls it with the same configuration (it meets at `barrier` several times).

    Rank 0 generates what the cache lacks while the others wait, at most for the timeout of collectives; on a host that
    does not see rank 0's cache, each process makes its own copy with its share of the cores.
    """
    cache, meet = open_cache(config.cache_dir, rank, world_size) / "pde", barrier or (lambda: None)
    splits: dict[str, dict[str, list[StoredFields]]] = {}
    for task in config.tasks:
        folder = expand_path(config.path)
        if config.path == DEMO:
            write = partial(_generate, config, task, world_size if rank else 1, rank == 0)
            folder = cached_folder(cache / f"{task}-{_key(config, task)}", write, rank=rank, barrier=meet)
        splits[task] = _splits(config, task, folder)
    return build_field_data(splits, config.time_stride, cache, rank=rank, barrier=meet)

"""Preparation of training and held-out rows from the `data` options: read from files, or generated here.

Files are ``{task}_train.h5`` and ``{task}_heldout.h5`` (or ``.hdf5``, ``.zarr``) with the schema of
`accel_train.domains.pde.data.files`, or those of PDEBench.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from accel_train.checkpoints.run import WeightsAssets
from accel_train.config import UsageError, expand_path, refuse_without_effect
from accel_train.data.artifacts import cached_folder, open_cache
from accel_train.data.generation import split_evenly
from accel_train.data.tables.ledger import Ledger, earlier_ledger
from accel_train.domains.pde.data.assets import FieldTask
from accel_train.domains.pde.data.equations import DEMO, KINDS, SPLITS, PdeDataConfig, generate, key_of
from accel_train.domains.pde.data.files import (
    DEFAULT_CACHE_MIB,
    FieldHeader,
    FieldPart,
    StoredFields,
    read_stored,
)
from accel_train.domains.pde.data.on_disk import contents_of, require
from accel_train.domains.pde.data.pdebench import check_layout, parameter_of, spacing_of
from accel_train.domains.pde.data.rows import FieldData, build_field_data
from accel_train.domains.pde.data.scales import trained_scales
from accel_train.domains.pde.data.stored_arrays import ZARR, open_fields
from accel_train.wording import shortened

ENDINGS = (".h5", ".hdf5", ZARR)
"""Endings of the names of files of our schema, after the name of the split."""


def _splits(config: PdeDataConfig, task: str, folder: Path) -> dict[str, list[StoredFields]]:
    """Select the samples of each split: from its own file, or the first and last of every PDEBench file."""
    own = _own_files(config, task, folder)
    found = [*itertools.chain(*own.values())]
    if not found:
        return _pdebench_splits(config, task, folder)
    points = config.points_of_files()
    splits: dict[str, list[StoredFields]] = {}
    for split, files in own.items():
        if not files:
            missing = f"{task}_{split}{found[0].suffix}"
            raise UsageError(
                f"--data.path {config.path!r}: {folder} has no {missing}. The training split and the held-out one "
                f"of task {task!r} are both required, each in a file of its own: copy {missing} there, or write it."
            )
        stored = _open(files[0], task)
        size = len(stored.parameters)
        count = config.samples(split) or size
        splits[split] = [stored.select(split, (0, size), count, points)]
    return splits


def _own_files(config: PdeDataConfig, task: str, folder: Path) -> dict[str, list[Path]]:
    """Return each split's file of our schema, or an empty list. Refuses two of one split, or PDEBench's beside them."""
    own: dict[str, list[Path]] = {}
    for split in SPLITS:
        places = [folder / f"{task}_{split}{ending}" for ending in ENDINGS]
        own[split] = [file for file in places if file.exists()]
        _refuse_two_sources(config, task, *([file] for file in own[split]))
    others = sorted(folder.rglob(KINDS[task].pdebench)) if task in KINDS else []
    _refuse_two_sources(config, task, [*itertools.chain(*own.values())], others)
    return own


def _refuse_two_sources(config: PdeDataConfig, task: str, *sources: Sequence[Path]) -> None:
    found = [shortened([path.name for path in paths], 2) for paths in sources if paths]
    if len(found) > 1:
        raise UsageError(
            f"--data.path {config.path!r}: task {task!r} has {', and also '.join(found)}. One source of each "
            "split is required, because only one would be read: move or delete the others."
        )


def _pdebench_splits(config: PdeDataConfig, task: str, folder: Path) -> dict[str, list[StoredFields]]:
    """Hold out the last samples of every file, so that both splits have every parameter value."""
    points = config.points_of_files()
    files = [_open(file, task) for file in _pdebench_files(config, task, folder)]
    sizes = [len(stored.parameters) for stored in files]
    if config.heldout_samples is None:
        _refuse_without_a_tenth(files)
    heldout = split_evenly(config.heldout_samples, [size // 10 for size in sizes])
    remaining = [size - count for size, count in zip(sizes, heldout, strict=True)]
    train = split_evenly(config.train_samples, remaining)
    of_train: list[StoredFields] = []
    of_heldout: list[StoredFields] = []
    for stored, size, last, first in zip(files, sizes, heldout, train, strict=True):
        end = max(0, size - last)
        of_heldout.append(stored.select("heldout", (end, size), last, points))
        of_train.append(stored.select("train", (0, size - last), first, points))
    return {"train": of_train, "heldout": of_heldout}


def _refuse_without_a_tenth(files: Sequence[StoredFields]) -> None:
    for stored in files:
        if len(stored.parameters) < 10:
            raise UsageError(
                f"--data.heldout_samples null holds out a tenth of the samples of each file, and {stored.part.file} "
                f"has {len(stored.parameters)}; 10 or more are required for that. Give a number over all files: "
                f"--data.heldout_samples {len(files)} is one of each."
            )


def _pdebench_files(config: PdeDataConfig, task: str, folder: Path) -> list[Path]:
    if folder.exists() and not folder.is_dir():
        raise UsageError(
            f"--data.path {config.path!r}: {folder} is a file. The folder that contains it is required, with the files "
            f"of both splits: give --data.path {folder.parent}."
        )
    if not folder.is_dir():
        raise UsageError(
            f"--data.path {config.path!r}: {folder} is not a folder, or does not exist. One with {task}_train.h5 and "
            f"{task}_heldout.h5 is required: correct the path."
        )
    others = f" (of PDEBench's, {', '.join(KINDS)} are read)"
    if task in KINDS:
        pattern = KINDS[task].pdebench
        if files := sorted(folder.rglob(pattern)):
            return files
        others = f", or PDEBench's {pattern},"
    names = sorted(file.name for file in folder.glob("*"))
    raise UsageError(
        f"--data.path {config.path!r}: {folder} has no data of task {task!r}; it contains: {shortened(names, 8)}. "
        f"Files {task}_train.h5 and {task}_heldout.h5{others} are required: correct path or --data.tasks."
    )


def _open(file: Path, task: str) -> StoredFields:
    try:
        # Opening a named pipe would block until something writes to it.
        if file.is_fifo():
            raise OSError("a named pipe")
        # Closed at once: rows are read by loader workers, which cannot share an open HDF5 file.
        with open_fields(file) as content:
            stored = read_stored(file, content) if "fields" in content else _read_pdebench(file, content, task)
    except OSError as error:
        raise UsageError(
            f"--data.path: {file} cannot be read ({error}). A complete file is required for the training split "
            "and for the held-out one: provide it, or delete both to use others of the folder."
        ) from None
    if stored.header.task != task:
        raise UsageError(f"--data.path: {file} contains task {stored.header.task!r}; {task!r} is required. Rename it.")
    return stored


def _read_pdebench(file: Path, content: Any, task: str) -> StoredFields:
    """Read a PDEBench file of one parameter value.

    It holds `tensor` (N, T, X) or (N, T, X, C). Darcy flow has (N, 1, X, Y) and the coefficient `nu` (N, X, Y).
    """
    if task not in KINDS:
        raise UsageError(
            f"--data.path: {file} has no dataset 'fields'; it contains {contents_of(content)}. A file of task {task!r} "
            "needs fields (N, T, C, H, W), parameters (N, P) and the attributes of docs/pde.md, as "
            f"accel_train.domains.pde.data.files.write_fields writes them; of PDEBench's, {', '.join(KINDS)} are read."
        )
    kind = KINDS[task]
    steady = kind.space == 2
    names = ("nu", "tensor") if steady else ("tensor",)
    coordinates = ("x-coordinate",) if steady else ("x-coordinate", "t-coordinate")
    require(file, content, (*names, *coordinates))
    shape = content["tensor"].shape
    check_layout(file, content, task, steady)
    dt = 0.0
    if not steady:  # some files have one time more than snapshots
        dt = spacing_of(file, np.ravel(content["t-coordinate"])[: shape[1]], shape[1])
    header = FieldHeader(task, (kind.attribute,), 1, dt, kind.boundary, kind.conserved)
    parameter = parameter_of(file, content, kind.attribute)
    samples = shape[0]
    value = np.full((samples, 1), parameter, np.float32)
    part = FieldPart(file, names, kind.space, 0, samples)
    return StoredFields(header, part, value)


def prepare_pde(
    config: PdeDataConfig,
    *,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] | None = None,
    weights: WeightsAssets | None = None,
    init_tasks: tuple[str, ...] | None = None,
) -> FieldData:
    """Prepare the rows of all tasks. Collective: every rank calls it with the same configuration.

    Rank 0 generates the data missing from the cache while the others wait. On a host without access to rank 0's cache,
    one process generates a copy. `weights` are the assets saved with the weights that the run starts from: their
    normalisation is kept. `init_tasks` names the task of the weights that each task starts from. Raises `UsageError`
    for tasks or data that do not match them.
    """
    # First, so that a mismatch is refused before any data are read or generated.
    trained = trained_scales(weights, config.tasks, init_tasks)
    ledger: Ledger = ()
    if weights is not None and weights.resumes:
        ledger = earlier_ledger(config.changed, weights.folder)
    cache = open_cache(config.cache_dir, rank, world_size) / "pde"
    # A single process has nobody to wait for.
    barrier = barrier or (lambda: None)
    splits: dict[str, dict[str, list[StoredFields]]] = {}
    for task in config.tasks:
        folder = expand_path(config.path)
        if config.path == DEMO:
            write = partial(generate, config, task, rank == 0)
            folder = cached_folder(cache / f"{task}-{key_of(config, task)}", write, rank=rank, barrier=barrier)
        splits[task] = _splits(config, task, folder)
    cache_bytes = (config.cache_mib or DEFAULT_CACHE_MIB) * 2**20
    data = build_field_data(
        splits,
        config.time_stride,
        cache,
        rank=rank,
        barrier=barrier,
        cache_bytes=cache_bytes,
        ledger=ledger,
        trained=trained,
    )
    _refuse_unread(config, data.tasks)
    return replace(data, generated=config.path == DEMO)


def _refuse_unread(config: PdeDataConfig, tasks: Iterable[FieldTask]) -> None:
    """Refuse options for kinds of fields that no task's files hold. `PdeDataConfig` checks generated data itself."""
    tasks = list(tasks)
    read = {
        "resolution_1d": ("1-D fields", any(task.grid[0] == 1 for task in tasks)),
        "resolution_2d": ("2-D fields", any(task.grid[0] > 1 for task in tasks)),
        "time_stride": ("time", any(task.has_time for task in tasks)),
    }
    for name, (what, is_read) in read.items():
        if not is_read:
            because = f"with data.tasks: {' '.join(config.tasks)}, none of which has {what}"
            refuse_without_effect(config, "data", [name], because, "add a task that has")

import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from accel_train.config import UsageError
from accel_train.data.tables.block_cache import BlockCache
from accel_train.domains.pde.data import files, stored_arrays
from accel_train.domains.pde.data.equations import PdeDataConfig
from accel_train.domains.pde.data.facts import cached_facts, field_facts
from accel_train.domains.pde.data.files import FieldHeader, FieldPart, Fields, read_stored, write_fields
from accel_train.domains.pde.data.prepare import prepare_pde
from accel_train.domains.pde.data.stored_arrays import MappedArray

HEADER = FieldHeader("heat", ("a", "b"), 2, 0.5, "periodic", True)
VALUES = np.random.default_rng(0).normal(size=(11, 3, 2, 4, 6)).astype(np.float32)
PARAMETERS = np.random.default_rng(1).normal(size=(11, 2)).astype(np.float32)


def write(file: Path, samples: int = 11, values: NDArray[np.float32] = VALUES) -> Path:
    blocks = ((values[i : i + 4].astype(float), PARAMETERS[i : i + 4]) for i in range(0, 12, 4))
    write_fields(file, HEADER, samples, blocks)
    return file


def read(file: Path) -> Any:
    with h5py.File(file) as content:
        return read_stored(file, content)


@pytest.mark.parametrize("samples", [11, 9, 8])
def test_blocks_are_written_as_the_schema_says(tmp_path: Path, samples: int) -> None:
    file = write(tmp_path / "x.h5", samples)
    with h5py.File(file) as content:
        assert np.array_equal(content["fields"], VALUES[:samples])
        assert np.array_equal(content["parameters"], PARAMETERS[:samples])
        assert content["fields"].dtype == content["parameters"].dtype == np.float32
        assert content["fields"].chunks is None
        attributes = dict(content.attrs)
        assert attributes.pop("grid").tolist() == [4, 6]
        assert attributes.pop("parameters").tolist() == ["a", "b"]
        assert attributes == {
            "schema": "accel_train/fields-1", "task": "heat", "input_channels": 2, "dt": 0.5, "boundary": "periodic",
            "conserved": True,
        }  # fmt: skip
    stored = read(file)
    assert stored.header == HEADER
    assert np.array_equal(stored.parameters, PARAMETERS[:samples])
    assert stored.part == FieldPart(file, ("fields",), 0, 0, samples)


def test_what_was_written_is_told(tmp_path: Path) -> None:
    told: list[int] = []
    write_fields(
        tmp_path / "x.h5", HEADER, 10, [(VALUES[:6], PARAMETERS[:6]), (VALUES[5:], PARAMETERS[5:])], told.append
    )
    assert told == [6, 4]


@pytest.fixture
def two_files(tmp_path: Path) -> Fields:
    """Samples 2 to 6 of one file and 0 to 3 of a compressed one, every other point."""
    with h5py.File(tmp_path / "b.h5", "w") as content:
        content.create_dataset("fields", data=VALUES[::-1], compression="gzip")
    parts = [(write(tmp_path / "a.h5"), 2, 5), (tmp_path / "b.h5", 0, 4)]
    return Fields(tuple(FieldPart(file, ("fields",), 0, first, count, 2) for file, first, count in parts))


TOGETHER = np.concatenate([VALUES[2:7], VALUES[::-1][:4]])[..., ::2, ::2]


def test_samples_of_several_files_in_order(two_files: Fields, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (len(two_files), two_files.shape) == (9, (3, 2, 2, 3))
    for sample in range(9):
        found = two_files.snapshots(sample, slice(0, 3, 2))
        assert np.array_equal(found, TOGETHER[sample, ::2])
        assert found.flags.writeable  # a copy: the file cannot be changed through it
    monkeypatch.setattr(files, "VALUES_PER_BLOCK", 3 * 36)
    blocks = list(two_files.blocks())
    assert [(part.first + start, len(block)) for part, start, block in blocks] == [(2, 3), (5, 2), (0, 3), (3, 1)]
    assert np.array_equal(np.concatenate([block for _, _, block in blocks]), TOGETHER)


def test_another_process_opens_the_files_for_itself(two_files: Fields) -> None:
    two_files.snapshots(0, slice(0, 1))
    pickled = pickle.dumps(two_files)
    assert len(pickled) < 1000
    assert np.array_equal(pickle.loads(pickled).snapshots(8, slice(0, 3)), TOGETHER[8])


def test_a_contiguous_file_is_mapped_and_not_read(tmp_path: Path) -> None:
    [view] = FieldPart(write(tmp_path / "x.h5"), ("fields",), 0, 3, 5, 2).open(BlockCache(2**20))
    assert isinstance(view.stored, MappedArray)
    found = view.read(slice(None), slice(None))
    assert view.shape == found.shape == (5, 3, 2, 2, 3)
    assert np.array_equal(found, VALUES[3:8, :, :, ::2, ::2])
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 0


def test_a_forked_worker_opens_the_files_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not read through its parent's HDF5 handles."""
    write(tmp_path / "x.h5")
    opened: list[Any] = []
    open_array = files.open_array
    monkeypatch.setattr(files, "open_array", lambda *given: opened.append(given) or open_array(*given))
    fields = Fields((read(tmp_path / "x.h5").part,))
    for process, count in ((1, 1), (1, 1), (2, 2)):
        monkeypatch.setattr(files.os, "getpid", lambda process=process: process)
        fields.snapshots(0, slice(None))
        assert len(opened) == count


def test_pages_of_a_map_are_handed_back(tmp_path: Path) -> None:
    values = np.arange(2**21, dtype=np.float32).reshape(8, 64, 1, 64, 64)  # 8 MiB
    with h5py.File(tmp_path / "x.h5", "w") as content:
        content.create_dataset("fields", data=values)
    fields = Fields((FieldPart(tmp_path / "x.h5", ("fields",), 0, 0, 8),), cache_bytes=2**20)
    resident = Path("/proc/self/smaps")
    if not resident.exists():
        pytest.skip("no /proc/self/smaps here")
    for _ in range(2):
        for sample in range(8):
            assert np.array_equal(fields.snapshots(sample, slice(None)), values[sample])
    lines = resident.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.endswith("x.h5"))
    kilobytes = next(int(line.split()[1]) for line in lines[start:] if line.startswith("Rss:"))
    assert kilobytes <= 3 * 1024  # of 8 MiB: the limit, and the sample behind it


@pytest.mark.parametrize("chunks", [(2, 1, 2, 4, 6), (3, 2, 1, 3, 5), (11, 3, 2, 4, 6), None])
@pytest.mark.parametrize("kind", ["h5", "zarr"])
def test_chunks_are_read_once_while_they_fit(kind: str, chunks: tuple[int, ...] | None, tmp_path: Path) -> None:
    file = tmp_path / f"x.{kind}"
    if kind == "h5":
        with h5py.File(file, "w") as content:
            content.create_dataset("fields", data=VALUES, chunks=chunks or True, compression="gzip")
    else:
        zarr = pytest.importorskip("zarr")
        group = zarr.open_group(str(file), mode="w")
        group.create_array("fields", data=VALUES, chunks=chunks or "auto")
    fields = Fields((FieldPart(file, ("fields",), 0, 2, 8, 2),))
    expected = VALUES[2:10, ..., ::2, ::2]
    for sample in (7, 0, 3, 3):
        assert np.array_equal(fields.snapshots(sample, slice(0, 3, 2)), expected[sample, ::2])
    [view] = fields._views(0)
    view.stored._stored = None  # type: ignore[attr-defined]  # everything it needs is in the cache
    assert np.array_equal(fields.snapshots(3, slice(0, 3, 2)), expected[3, ::2])
    assert np.array_equal(np.concatenate([b for _, _, b in Fields(fields.parts).blocks()]), expected)
    bounded = Fields(fields.parts, cache_bytes=1)
    assert np.array_equal(np.concatenate([b for _, _, b in bounded.blocks()]), expected)
    assert len(bounded._cache) == 1


def test_storage_that_was_never_written_is_its_fill_value(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as content:
        content.create_dataset("fields", (11, 3, 2, 4, 6), np.float32)
    fields = Fields((FieldPart(tmp_path / "x.h5", ("fields",), 0, 0, 11),))
    assert not fields.snapshots(10, slice(None)).any()


def test_a_damaged_chunk_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.h5"
    with h5py.File(file, "w") as content:
        stored = content.create_dataset("fields", data=VALUES, chunks=(4, 3, 2, 4, 6), compression="gzip")
        place = stored.id.get_chunk_info(1).byte_offset
    damaged = bytearray(file.read_bytes())
    damaged[place + 20 : place + 60] = bytes(40)
    file.write_bytes(bytes(damaged))
    fields = Fields((FieldPart(file, ("fields",), 0, 0, 11),))
    assert np.array_equal(fields.snapshots(3, slice(None)), VALUES[3])
    with pytest.raises(UsageError, match=r"x\.h5, 'fields', the chunk of samples 4 to 7 cannot be read .*damaged"):
        fields.snapshots(5, slice(None))


def test_zarr_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(UsageError, match=r"zarr.*not installed; pip install 'accel-train\[zarr\]'"):
        stored_arrays.zarr()


LAYOUTS = {
    "(N, T, X)": ((5, 3, 8), 1, lambda a: a[:, :, None, None]),
    "(N, T, X, C)": ((5, 3, 8, 2), 1, lambda a: a.transpose(0, 1, 3, 2)[:, :, :, None]),
    "(N, X, Y)": ((5, 8, 6), 2, lambda a: a[:, None, None]),
    "(N, T, X, Y)": ((5, 3, 8, 6), 2, lambda a: a[:, :, None]),
    "(N, T, X, Y, C)": ((5, 3, 8, 6, 2), 2, lambda a: a.transpose(0, 1, 4, 2, 3)),
}


@pytest.mark.parametrize(("shape", "space", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_of_other_files(tmp_path: Path, shape: tuple[int, ...], space: int, expected: Any) -> None:
    values = np.random.default_rng(0).normal(size=shape)
    with h5py.File(tmp_path / "x.h5", "w") as content:
        content["a"], content["b"] = values, -values
    fields = Fields((FieldPart(tmp_path / "x.h5", ("a", "b"), space, 0, 5),))
    found = np.stack([fields.snapshots(i, slice(None)) for i in range(5)])
    values = expected(values.astype(np.float32))
    assert found.dtype == np.float32
    assert np.array_equal(found, np.concatenate([values, -values], axis=2))


def test_facts_of_a_file_that_keeps_size_and_date_are_new(tmp_path: Path) -> None:
    """As after `tar` or `rsync`, which set the date of what they write."""
    file = write(tmp_path / "x.h5")
    before = file.stat()
    both = dict.fromkeys(("train", "heldout"), Fields((read(file).part,)))
    first = cached_facts(both, tmp_path / "cache", 0, lambda: None)
    with h5py.File(file, "a") as content:
        content["fields"][...] *= 10
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    both = dict.fromkeys(("train", "heldout"), Fields((read(file).part,)))
    second = cached_facts(both, tmp_path / "cache", 0, lambda: None)
    assert file.stat().st_size == before.st_size
    assert second.of_split["train"].std == pytest.approx([10 * std for std in first.of_split["train"].std])


def test_facts_are_those_of_all_samples(two_files: Fields, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, samples, _ = field_facts(two_files)
    assert facts.mean == pytest.approx(TOGETHER.astype(float).mean((0, 1, 3, 4)), rel=1e-6)
    assert facts.std == pytest.approx(TOGETHER.astype(float).std((0, 1, 3, 4)), rel=1e-6)
    monkeypatch.setattr(files, "VALUES_PER_BLOCK", 1)
    again, same, _ = field_facts(two_files)
    assert same == samples
    assert len(set(samples)) == 9
    assert again.sha256 == facts.sha256  # of contents, not of how they were read
    assert again.mean == pytest.approx(facts.mean, rel=1e-12)
    other = Fields((two_files.parts[0]._replace(first=1), two_files.parts[1]))
    assert field_facts(other)[0].sha256 != facts.sha256


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_the_sample_that_is_not_finite_is_named(tmp_path: Path, wrong: float) -> None:
    values = VALUES.copy()
    values[7, 2, 1, 3, 5] = wrong
    fields = Fields((FieldPart(write(tmp_path / "x.h5", values=values), ("fields",), 0, 2, 9),))
    with pytest.raises(UsageError, match=r"sample 7 of .*x.h5 contains NaN, infinity or .* in fields"):
        field_facts(fields)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_the_sample_of_a_parameter_that_is_not_finite_is_named(tmp_path: Path, wrong: float) -> None:
    stored = read(write(tmp_path / "x.h5"))
    stored.parameters[7, 1] = wrong
    chosen: dict[int, int | None] = {1: None, 2: None}
    with pytest.raises(UsageError, match=rf"sample 7 of .*x\.h5, task heat, has the parameter b {wrong:g}\. Finite"):
        stored.select("heldout", (5, 11), 6, chosen)
    assert len(stored.select("train", (0, 7), 7, chosen).parameters) == 7  # the sample is left out


def test_points_of_a_grid_that_is_not_square_are_thinned_alike_along_both_axes(tmp_path: Path) -> None:
    stored = read(write(tmp_path / "x.h5"))  # 4 x 6 points
    part = stored.select("train", (0, 11), 11, {1: None, 2: 3}).part
    assert (part.stride, Fields((part,)).shape) == (2, (3, 2, 2, 3))
    # 2 divides the width, and 3 does not divide the height.
    with pytest.raises(UsageError, match=r"resolution_2d 2: .*x\.h5 has 4 x 6 points.* divides 2, .*Choose 6, 3 for"):
        stored.select("train", (0, 11), 11, {1: None, 2: 2})


def test_a_grid_with_ends_is_thinned_by_any_step(tmp_path: Path) -> None:
    """Darcy flow of FNO has 421 x 421 points, of which every fifth is taken: 85 x 85."""
    file = tmp_path / "darcy.h5"
    fields = np.random.default_rng(0).normal(size=(2, 1, 2, 421, 421)).astype(np.float32)
    write_fields(file, FieldHeader("li", (), 1, 0.0, "dirichlet", False), 2, [(fields, np.zeros((2, 0)))])
    part = read(file).select("train", (0, 2), 2, {1: None, 2: 85}).part
    found = Fields((part,)).snapshots(1, slice(None))
    assert np.array_equal(found, fields[1, :, :, ::5, ::5])
    with pytest.raises(UsageError, match=r"resolution_2d 86: .* with one n. Choose 421, 211, 141, 106, 85, 71, 61, 53"):
        read(file).select("train", (0, 2), 2, {1: None, 2: 86})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: f.attrs.pop("dt"), "no attribute 'dt'; 'accel_train/fields-1' with schema, task"),
        (lambda f: f.attrs.update(schema="fields-9"), "has schema 'fields-9'"),
        (lambda f: f.pop("parameters"), r"no dataset 'parameters'; it contains fields \(11, 3, 2, 4, 6\)"),
        (lambda f: (f.pop("parameters"), f.update(parameters=PARAMETERS[:5])), r"parameters \(5, 2\); .* \(N, 2\)"),
        (lambda f: (f.pop("fields"), f.update(fields=VALUES[0])), r"fields \(3, 2, 4, 6\)"),
        (lambda f: f.attrs.update(dt=-0.1), r"x\.h5 has the attribute dt -0\.1; .*finite and above 0"),
        (lambda f: f.attrs.update(dt=np.nan), r"x\.h5 has the attribute dt nan; .*finite and above 0"),
        (lambda f: f.attrs.update(dt=np.inf), r"x\.h5 has the attribute dt inf; .*finite and above 0"),
        (
            lambda f: (f.attrs.update(dt=0.0, input_channels=2), f.pop("fields"), f.update(fields=VALUES[:, :1])),
            "input_channels 2 of 2 channels; 1 to 1 inputs are req",
        ),
        (
            lambda f: f.attrs.update(input_channels=1),
            "dt 0.5 and input_channels 1 of 2 channels; with time all .* so 2 is",
        ),
        (lambda f: (f.pop("fields"), f.update(fields=VALUES[..., :1])), "with W = 1; .* H = 1 and 4 points along W"),
        (lambda f: f.attrs.update(boundary="periodc"), "'periodc', which has no effect; 'periodic' is required"),
        (lambda f: f.attrs.update(dt=0.0), "dt 0, without time, and 3 snapshots of each sample; one is required"),
        (
            lambda f: (
                f.attrs.update(dt=0.0, input_channels=1),
                f.pop("fields"),
                f.update(fields=VALUES[:, :1, [0, 1, 1]]),
            ),
            "conserved, .* without time 1 input and 2 target channels; equal numbers are required",
        ),
        (lambda f: f.attrs.update(boundary="Periodic"), "'Periodic', which has no effect; 'periodic' is required"),
        (lambda f: f.attrs.update(grid=(1, 32)), r"attribute grid \(1, 32\) and .* its grid is \(4, 6\)"),
    ],
)
def test_files_that_are_not_of_the_schema(tmp_path: Path, damage: Any, words: str) -> None:
    file = write(tmp_path / "x.h5")
    with h5py.File(file, "a") as content:
        damage(_Changing(content))
    with pytest.raises(UsageError, match=words):
        read(file)


def test_texts_of_fixed_length_are_read_as_others(tmp_path: Path) -> None:
    """Fortran, MATLAB and C write them so, and h5py reads bytes."""
    file = write(tmp_path / "x.h5")
    expected = read(file).header
    with h5py.File(file, "a") as content:
        for name in ("schema", "task", "boundary"):
            content.attrs[name] = np.bytes_(content.attrs[name])
        content.attrs["parameters"] = np.array([name.encode() for name in expected.parameters])
    assert read(file).header == expected


class _Changing:
    """An open file with the methods of a dict."""

    def __init__(self, content: Any) -> None:
        self.attrs = _Changing(content.attrs) if hasattr(content, "attrs") else None
        self.content = content

    def pop(self, name: str) -> None:
        del self.content[name]

    def update(self, **values: Any) -> None:
        for name, value in values.items():
            self.content[name] = value


def write_zarr(file: Path, source: Path, zarr_format: int = 3, **options: Any) -> Any:
    """Write the zarr folder of an HDF5 file, in chunks of 4 samples."""
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(file), mode="w", zarr_format=zarr_format)
    with h5py.File(source) as content:
        for name in ("fields", "parameters"):
            shape = content[name].shape[1:]
            group.create_array(name, data=content[name][...], chunks=(4, *shape), **options)
        for name, value in content.attrs.items():
            group.attrs[name] = value.tolist() if hasattr(value, "tolist") else value
    return group


@pytest.mark.parametrize(
    ("layout", "sharded", "chunk"), [(3, False, "c/2/0/0/0/0"), (2, False, "2.0.0.0.0"), (3, True, "c/1/0/0/0/0")]
)
def test_absent_chunks_of_a_zarr_folder_are_refused(tmp_path: Path, layout: int, sharded: bool, chunk: str) -> None:
    source = write(tmp_path / "x.h5")
    file = tmp_path / "heat_train.zarr"
    group = write_zarr(file, source, zarr_format=layout)
    if sharded:  # 11 samples in files of 8: zarr's own count of chunks rounds up
        group.create_array("fields", data=VALUES, chunks=(4, 3, 2, 4, 6), shards=(8, 3, 2, 4, 6), overwrite=True)
    assert read_stored(file, group).part.samples == 11
    (file / "fields" / chunk).unlink()
    total = 2 if sharded else 3
    with pytest.raises(UsageError, match=rf"heat_train\.zarr, 'fields': 1 of {total} chunks .*{chunk}.* copy the fold"):
        read_stored(file, group)


@pytest.mark.parametrize(
    ("how", "written", "counts"),
    [({"chunks": (4, 3, 2, 4, 6), "compression": "gzip"}, 8, "1 of 3"), ({"chunks": (4, 3, 2, 4, 6)}, 0, "3 of 3"),
     ({}, 0, "1 of 1")],
)  # fmt: skip
def test_what_was_never_written_of_an_hdf5_file_is_refused(
    how: dict[str, Any], written: int, counts: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "x.h5")
    with h5py.File(file, "r+") as content:
        del content["fields"]
        fields = content.create_dataset("fields", VALUES.shape, np.float32, **how)
        if written:
            fields[:written] = VALUES[:written]
    with (
        h5py.File(file) as content,
        pytest.raises(UsageError, match=rf"x\.h5, 'fields': {counts} chunks were never written.*read as 0\.0: write"),
    ):
        read_stored(file, content)


def test_a_virtual_dataset_is_read_from_its_files(tmp_path: Path) -> None:
    source = write(tmp_path / "source.h5")
    file = write(tmp_path / "x.h5", values=np.zeros_like(VALUES))
    with h5py.File(file, "r+") as content:
        del content["fields"]
        layout = h5py.VirtualLayout(VALUES.shape, np.float32)
        layout[...] = h5py.VirtualSource(str(source), "fields", VALUES.shape)
        content.create_virtual_dataset("fields", layout)
    with h5py.File(file) as content:
        stored = read_stored(file, content)
    assert np.array_equal(Fields((stored.part,)).snapshots(7, slice(None)), VALUES[7])


def test_zarr_without_chunks_of_zeros_is_refused_unless_they_are_written(tmp_path: Path) -> None:
    values = VALUES.copy()
    values[4:8] = 0
    source = write(tmp_path / "x.h5", values=values)
    file = tmp_path / "heat_train.zarr"
    with pytest.raises(UsageError, match=r"'fields': 1 of 3 chunks .*read as 0\.0: .*write_empty_chunks=True"):
        read_stored(file, write_zarr(file, source))
    read_stored(file, write_zarr(file, source, config={"write_empty_chunks": True}))


@pytest.mark.parametrize("ending", ["hdf5", "zarr"])
def test_the_splits_of_a_task_may_have_different_endings(tmp_path: Path, ending: str) -> None:
    source = write(tmp_path / "heat_train.h5")
    other = tmp_path / f"heat_heldout.{ending}"
    if ending == "zarr":
        write_zarr(other, source)
    else:
        shutil.copy(source, other)
    config = PdeDataConfig(path=str(tmp_path), tasks=("heat",), time_stride=1, cache_dir=str(tmp_path / "cache"))
    data = prepare_pde(config)
    assert data.training["heat"].samples == data.heldout["heat"].samples == len(VALUES)
    shutil.copy(source, tmp_path / "heat_train.hdf5")
    with pytest.raises(UsageError, match=r"heat_train\.h5, and also heat_train\.hdf5\. .* move or delete the others"):
        prepare_pde(config)


def test_a_zarr_folder_gives_the_rows_of_the_same_hdf5(tmp_path: Path) -> None:
    (tmp_path / "zarr").mkdir()
    for split in ("train", "heldout"):
        write_zarr(tmp_path / "zarr" / f"heat_{split}.zarr", write(tmp_path / f"heat_{split}.h5"))
    options = {"tasks": ("heat",), "time_stride": 1, "cache_dir": str(tmp_path / "cache")}
    from_hdf5 = prepare_pde(PdeDataConfig(path=str(tmp_path), **options))  # type: ignore[arg-type]
    from_zarr = prepare_pde(PdeDataConfig(path=str(tmp_path / "zarr"), cache_mib=1, **options))  # type: ignore[arg-type]
    assert from_zarr.fingerprint == from_hdf5.fingerprint
    rows = list(range(len(from_hdf5.train)))
    expected = from_hdf5.train.batch(rows)
    assert all(torch.equal(values, expected[name]) for name, values in from_zarr.train.batch(rows).items())
    beside = write(tmp_path / "zarr" / "heat_train.h5")
    with pytest.raises(UsageError, match=r"heat_train\.h5, and also heat_train\.zarr\. .* move or delete"):
        prepare_pde(PdeDataConfig(path=str(tmp_path / "zarr"), **options))  # type: ignore[arg-type]
    beside.unlink()
    (tmp_path / "zarr" / "heat_train.zarr" / "zarr.json").write_text("{")
    with pytest.raises(UsageError, match=r"heat_train\.zarr cannot be read"):
        prepare_pde(PdeDataConfig(path=str(tmp_path / "zarr"), **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("boundary", ["non-periodic", "nonperiodic", "aperiodic", "non_dirichlet", "neumann", "walls"])
def test_a_boundary_that_is_none_of_those_with_an_effect_is_taken(boundary: str, tmp_path: Path) -> None:
    file = tmp_path / "own.h5"
    header = FieldHeader("own", (), 1, 0.0, boundary, False)
    write_fields(file, header, 2, [(np.ones((2, 1, 2, 4, 4)), np.zeros((2, 0)))])
    assert read(file).header.boundary == boundary

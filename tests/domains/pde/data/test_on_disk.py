"""Fields that would be read as zeros, or as something else than fields, because a part of them is not on disk."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from accel_train.config import UsageError
from accel_train.domains.pde.data import facts as facts_module
from accel_train.domains.pde.data.files import Fields, write_fields
from accel_train.domains.pde.data.on_disk import source_files
from tests.domains.pde.data.test_equations import files, write_pdebench
from tests.domains.pde.data.test_files import HEADER, PARAMETERS, VALUES, read, write

NAME = "1D_Advection_Sols_beta0.4.hdf5"
TENSOR = np.random.default_rng(0).normal(size=(40, 6, 16)).astype(np.float32)
AXES = {"x-coordinate": np.arange(16) / 16, "t-coordinate": np.arange(6) * np.float32(0.1)}


# ------------------------------------------------------------------------------------------------------------- writing
@pytest.mark.parametrize("samples", [12, 100])
def test_blocks_with_fewer_samples_than_asked_for_are_refused(tmp_path: Path, samples: int) -> None:
    with pytest.raises(UsageError, match=rf"x\.h5 have 11 samples; {samples} are required.*zeros: give more blocks"):
        write(tmp_path / "x.h5", samples)
    assert not list(tmp_path.iterdir())


def test_a_block_has_as_many_parameters_as_fields(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"x\.h5 has 11 samples of fields and 1 of parameters"):
        write_fields(tmp_path / "x.h5", HEADER, 11, [(VALUES, PARAMETERS[:1])])


def test_blocks_have_the_shape_of_the_first(tmp_path: Path) -> None:
    """numpy would repeat one snapshot, channel or parameter as often as the file has room."""
    for second in (
        (VALUES[4:, :1], PARAMETERS[4:]),
        (VALUES[4:, :, :1], PARAMETERS[4:]),
        (VALUES[4:], PARAMETERS[4:, :1]),
    ):
        with pytest.raises(
            UsageError, match=r"a block for .*x\.h5 has samples of fields .*; \(3, 2, 4, 6\) and \(2,\)"
        ):
            write_fields(tmp_path / "x.h5", HEADER, 11, [(VALUES[:4], PARAMETERS[:4]), second])
    assert not list(tmp_path.iterdir())


def test_a_header_is_checked_before_it_is_written(tmp_path: Path) -> None:
    for wrong in ({"boundary": "Periodic"}, {"parameters": ("a",)}, {"input_channels": 1}):
        with pytest.raises(UsageError, match=r"--data.path: .*x\.h5 has"):
            write_fields(tmp_path / "x.h5", replace(HEADER, **wrong), 11, [(VALUES, PARAMETERS)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_write_leaves_the_file_before_it(tmp_path: Path, error: type[BaseException]) -> None:
    def blocks() -> Iterator[tuple[Any, Any]]:
        yield VALUES[:4], PARAMETERS[:4]
        raise error

    file = tmp_path / "x.h5"
    with pytest.raises(error):
        write_fields(file, HEADER, 11, blocks())
    assert not list(tmp_path.iterdir())
    write(file)
    with pytest.raises(error):
        write_fields(file, HEADER, 11, blocks())
    assert list(tmp_path.iterdir()) == [file]
    assert len(read(file).parameters) == 11


# ----------------------------------------------------------------------------------------------------- virtual datasets
def virtual(file: Path, parts: int = 4, step: int = 10) -> None:
    """Write four files of ten samples each, and a file that names them from the folder beside theirs."""
    for folder in (file.parent, file.parent.parent / "parts"):
        folder.mkdir(exist_ok=True)
    layout = h5py.VirtualLayout(TENSOR.shape, np.float32)
    for number in range(parts):
        own = slice(10 * number, 10 * (number + 1))
        with h5py.File(file.parent / f"../parts/{number}.h5", "w") as content:
            content["tensor"] = TENSOR[own][:step]
        layout[own] = h5py.VirtualSource(f"../parts/{number}.h5", "tensor", (10, 6, 16))[:]
    with h5py.File(file, "w") as content:
        content.create_virtual_dataset("tensor", layout)
        for name, values in AXES.items():
            content[name] = values


def test_a_virtual_dataset_finds_its_sources_from_its_own_folder(tmp_path: Path, monkeypatch: Any) -> None:
    virtual(tmp_path / "data" / NAME)
    monkeypatch.chdir("/")
    data = files(tmp_path / "data", "advection")
    assert (data.training["advection"].samples, data.heldout["advection"].samples) == (36, 4)
    row = data.assets.task("advection").input.denormalise(data.heldout["advection"][0]["input"])
    assert np.allclose(row.ravel(), TENSOR[36, 0], atol=1e-5)


def _empty(parts: Path) -> None:
    with h5py.File(parts / "2.h5", "w") as content:
        content.create_dataset("tensor", (10, 6, 16), np.float32)


DAMAGE: dict[str, tuple[dict[str, Any], Callable[[Path], Any], str]] = {
    "missing": ({}, lambda parts: (parts / "2.h5").unlink(), r"source .*parts/2\.h5 is missing\..*read as 0\.0: copy"),
    "damaged": ({}, lambda parts: (parts / "2.h5").write_text("?"), r"source .*parts/2\.h5 cannot be read .*a whole"),
    "never written": ({}, _empty, r"parts/2\.h5, 'tensor': 1 of 1 chunks were never written"),
    "short": ({"step": 9}, lambda _: None, r"'tensor' of its source .*parts/0\.h5 has fewer values than are taken"),
    "holes": ({"parts": 3}, lambda _: None, r"960 of its 3840 values have no source"),
}


@pytest.mark.parametrize(("how", "damage", "words"), DAMAGE.values(), ids=DAMAGE)
def test_virtual_datasets_with_holes(
    tmp_path: Path, how: dict[str, Any], damage: Callable[[Path], Any], words: str
) -> None:
    virtual(tmp_path / "data" / NAME, **how)
    damage(tmp_path / "parts")
    with pytest.raises(UsageError, match=words):
        files(tmp_path / "data", "advection")


def test_a_pattern_of_sources_is_refused(tmp_path: Path) -> None:
    size, many = (10, 6, 16), h5py.h5s.UNLIMITED
    target = h5py.h5s.create_simple(size, (many, 6, 16))
    target.select_hyperslab((0, 0, 0), (many, 1, 1), size, size)
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_virtual(target, b"%b.h5", b"tensor", h5py.h5s.create_simple(size))
    write_pdebench(tmp_path / NAME, AXES, {})
    for number in range(4):
        write_pdebench(tmp_path / f"{number}.h5", {"tensor": TENSOR[10 * number :][:10]}, {})
    with h5py.File(tmp_path / NAME, "r+") as content:
        h5py.h5d.create(content.id, b"tensor", h5py.h5t.IEEE_F32LE, target, how)
    with pytest.raises(UsageError, match=r"names them by the pattern '%b\.h5'.*name each source, or write"):
        files(tmp_path, "advection")


def test_changed_sources_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    real = facts_module.field_facts
    monkeypatch.setattr(facts_module, "field_facts", lambda fields: reads.append(len(fields)) or real(fields))
    virtual(tmp_path / "data" / NAME)
    first = files(tmp_path / "data", "advection").fingerprint
    assert files(tmp_path / "data", "advection").fingerprint == first
    assert reads == [36, 4]
    gc.collect()  # HDF5 keeps the sources of a file open, which the next start of a process does not have
    (tmp_path / "parts" / "1.h5").unlink()
    with h5py.File(tmp_path / "parts" / "1.h5", "w") as content:
        content["tensor"] = TENSOR[:10]
    assert files(tmp_path / "data", "advection").fingerprint != first
    assert reads[2:] == [36, 4]


def test_external_storage_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    TENSOR.tofile("raw.bin")
    write_pdebench(tmp_path / NAME, AXES, {})
    with h5py.File(tmp_path / NAME, "r+") as content:
        content.create_dataset("tensor", TENSOR.shape, np.float32, external=[("raw.bin", 0, TENSOR.nbytes)])
    with pytest.raises(UsageError, match=r"'tensor', is kept in raw files \(raw\.bin\).*without external storage"):
        files(tmp_path, "advection")


# --------------------------------------------------------------------------------------------------------------- links
def test_a_link_is_read_from_the_file_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    with h5py.File(tmp_path / "sources" / "other.h5", "w") as content:
        content["before"] = np.arange(999)
        content["linked"] = VALUES
    file = write(tmp_path / "x.h5")
    with h5py.File(file, "r+") as content:
        del content["fields"]
        content["fields"] = h5py.ExternalLink("sources/other.h5", "linked")
    fields = Fields((read(file).part,))
    assert np.array_equal(fields.snapshots(7, slice(None)), VALUES[7])
    assert source_files(file, ("fields", "parameters")) == [tmp_path / "sources" / "other.h5"]


# ------------------------------------------------------------------------------------------------- what are no fields
NO_FIELDS: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "group": (lambda c: c.create_group("tensor"), {}, r"'tensor', is a group; a dataset is required"),
    "soft link": (
        lambda c: c.update(tensor=h5py.SoftLink("/nope")), {}, r"'tensor', is a link to nothing; a dataset",
    ),
    "external link": (
        lambda c: c.update(tensor=h5py.ExternalLink("none.h5", "t")), {}, r"'tensor', is a link to nothing; a data",
    ),
    "other links": (lambda c: c.update(other=h5py.SoftLink("/nope")), {}, r"no dataset 'tensor'; .*other \(a link to"),
    "complex": (lambda c: c.update(tensor=TENSOR.astype("c8")), {}, r"'tensor', has values of type complex64; real"),
    "text": (lambda c: c.update(tensor=np.full(TENSOR.shape, b"1")), {}, r"'tensor', has values of type \|S1; real"),
    "nothing": (lambda c: c.update(tensor=h5py.Empty("f")), {}, r"'tensor', is without values; a dataset is"),
    "words": (lambda c: c.update(tensor=TENSOR), {"beta": "zero point four"}, "beta 'zero point four'; one number is"),
    "two numbers": (lambda c: c.update(tensor=TENSOR), {"beta": [0.4, 0.5]}, r"beta array\(\[0\.4, 0\.5\]\); one numb"),
}  # fmt: skip


@pytest.mark.parametrize(("add", "attributes", "words"), NO_FIELDS.values(), ids=NO_FIELDS)
def test_what_are_no_fields_is_said(
    tmp_path: Path, add: Callable[[Any], Any], attributes: dict[str, Any], words: str
) -> None:
    write_pdebench(tmp_path / NAME, AXES, attributes)
    with h5py.File(tmp_path / NAME, "r+") as content:
        add(content)
    with pytest.raises(UsageError, match=rf"--data\.path: .*{words}"):
        files(tmp_path, "advection")


@pytest.mark.parametrize(("name", "value"), [("dt", "soon"), ("input_channels", [1, 2]), ("conserved", "no")])
def test_attributes_of_the_schema_are_numbers(tmp_path: Path, name: str, value: Any) -> None:
    file = write(tmp_path / "x.h5")
    with h5py.File(file, "r+") as content:
        content.attrs[name] = value
    with pytest.raises(UsageError, match=rf"x\.h5 has the attribute {name} .*; one number is required: correct"):
        read(file)


def test_uneven_times_are_told_from_missing_ones(tmp_path: Path) -> None:
    short = AXES | {"t-coordinate": AXES["t-coordinate"].astype(np.float16)}
    write_pdebench(tmp_path / NAME, {"tensor": TENSOR, **short}, {})
    with pytest.raises(UsageError, match=r"'t-coordinate' \(float16\) that are 0\.09\d+ to 0\.1\d* apart; even"):
        files(tmp_path, "advection")
    write_pdebench(tmp_path / NAME, {"tensor": TENSOR, **AXES, "t-coordinate": np.float32(0.1)}, {})
    with pytest.raises(UsageError, match="has 1 times in 't-coordinate' for 6 snapshots; one for each"):
        files(tmp_path, "advection")

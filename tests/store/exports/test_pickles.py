"""Pickles are recognised by name and content, and other formats are not taken for one."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from accel_train.store.exports.pickles import PROTOCOLS, holds_pickle, is_pickle

TENSORS = {"mean": torch.zeros(2)}


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".pkl", ".pickle", ".joblib", ".PT"])
def test_a_name_is_enough(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_text("{}")
    assert is_pickle(path)
    assert holds_pickle(path)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", [{}, [1, 2], "text", 3, 2**70, ("a", None), Path("x")])
def test_the_content_of_each_marked_protocol(tmp_path: Path, protocol: int, value: object) -> None:
    path = tmp_path / "x.state"
    path.write_bytes(pickle.dumps(value, protocol))
    assert holds_pickle(path)
    assert not is_pickle(path)


@pytest.mark.parametrize("suffix", [".bin", ".ckpt", ".CKPT"])
def test_the_content_decides_on_suffixes_that_other_formats_have_too(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"tokenizer{suffix}"
    for content in (b"\x00\x01a table of numbers", b"text", b""):
        path.write_bytes(content)
        # The weights of others are not read.
        assert is_pickle(path)
        assert not holds_pickle(path)
    path.write_bytes(pickle.dumps(TENSORS, 2))
    assert holds_pickle(path)


@pytest.mark.parametrize("header", [b"(" * 3000, b"'''\n", b"{'descr': [('a', '<f4', 'x')], 'shape': (3,), }\n"])
def test_an_array_with_a_damaged_header_is_no_pickle(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    assert not holds_pickle(path)


def test_a_damaged_archive_of_arrays_is_no_pickle(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=np.arange(100_000.0))
    content = bytearray(path.read_bytes())
    start = content.index(b"x.npy") + 25
    content[start : start + 40] = bytes(each ^ 0xFF for each in content[start : start + 40])
    path.write_bytes(content)
    assert not holds_pickle(path)


@pytest.mark.parametrize("suffix", [".state", ".bin", ".ckpt"])
@pytest.mark.parametrize("is_zip", [True, False])
def test_both_formats_of_torch(tmp_path: Path, *, is_zip: bool, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    torch.save(TENSORS, path, _use_new_zipfile_serialization=is_zip)
    assert holds_pickle(path)


@pytest.mark.parametrize(
    ("names", "is_torch"),
    [
        (["x/data.pkl", "x/version"], True),
        (["x/data.pkl", "x/data/0"], True),
        (["x/data.pkl"], False),
        (["x/data.pkl", "y/version"], False),
        (["x/data.pkl", "x/data.json"], False),
        (["x/versions.txt", "x/data.pkl"], False),
        (["data.pkl", "version"], False),
        (["x/y/data.pkl", "x/y/version"], False),
    ],
)
def test_an_archive_of_torch_has_its_layout(tmp_path: Path, names: list[str], *, is_torch: bool) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    assert holds_pickle(path) == is_torch


@pytest.mark.parametrize(
    ("array", "holds"),
    [
        (np.zeros((2, 3), np.float32), False),
        (np.array(["text"]), False),
        (np.array([{}, None], object), True),
        (np.zeros(2, [("number", "f4"), ("rest", "O")]), True),
        # Headers of the versions 3 and 2.
        (np.zeros(2, [("zahl_\u03b1", "f4")]), False),
        (np.zeros(2, [("rest_\u03b1", "O")]), True),
        (np.zeros(2, [(f"{'x' * 70}{number}", "f4") for number in range(1000)]), False),
        (np.zeros(2, [(f"{'x' * 70}{number}", "O") for number in range(1000)]), True),
    ],
)
@pytest.mark.filterwarnings("ignore:Stored array in format")
def test_an_array_of_objects_is_a_pickle(tmp_path: Path, array: np.ndarray, *, holds: bool) -> None:
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", first=np.zeros(2), second=array)
    np.savez_compressed(tmp_path / "b.npz", array)
    (tmp_path / "b.bin").write_bytes((tmp_path / "a.npy").read_bytes())
    assert {path.name: holds_pickle(path) for path in tmp_path.iterdir()} == dict.fromkeys(
        ("a.npy", "a.npz", "b.npz", "b.bin"), holds
    )


def test_damaged_arrays_are_no_pickles(tmp_path: Path) -> None:
    for content in (b"\x93NUMPY", b"\x93NUMPY\x01\x00\x05\x00{'de}", b"\x93NUMPY\x09\x00\x00\x00"):
        (tmp_path / "a.npy").write_bytes(content)
        assert not holds_pickle(tmp_path / "a.npy")


def test_other_formats(tmp_path: Path) -> None:
    for name, content in {"empty": b"", "short": b"\x80\x04", "a.json": b"{}", "broken.zip": b"PK\x03\x04"}.items():
        (tmp_path / name).write_bytes(content)
    np.savez(tmp_path / "a.npz", mean=np.zeros(2))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("data.json", "{}")
    assert [path.name for path in tmp_path.iterdir() if holds_pickle(path)] == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_safetensors_file_may_begin_with_the_mark_of_a_protocol(tmp_path: Path, protocol: int) -> None:
    """The file begins with the length of its header, here the two bytes of the mark."""
    path, length = tmp_path / "x.safetensors", 0x80 + 256 * protocol
    shortest = len(safetensors.torch.save(TENSORS, {"note": ""})) - 16
    content = safetensors.torch.save(TENSORS, {"note": "x" * (length - shortest)})
    path.write_bytes(content)
    assert content[:2] == bytes([0x80, protocol])
    assert not holds_pickle(path)

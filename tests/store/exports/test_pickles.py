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


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".pkl", ".pickle", ".PT"])
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

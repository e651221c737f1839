import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from accel_train.config import UsageError
from accel_train.domains.text.latents.files import read_latents, write_latents

RNG = np.random.default_rng(0)


def test_written_and_read(tmp_path: Path) -> None:
    latents = RNG.standard_normal((10, 2, 3)).astype(np.float32)
    file = write_latents(tmp_path, [f"t{i}" for i in range(10)], latents, rows_per_shard=4)
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert written[5] == {"text": "t5", "shard": 1, "idx": 1}
    table = read_latents(tmp_path, [(row["shard"], row["idx"]) for row in written])
    assert table.shape == (2, 3)
    assert torch.equal(table.rows(torch.arange(10)), torch.from_numpy(latents))


def test_a_latent_for_each_text_is_written_or_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="write_latents: 6 texts and 5 latents; one latent for each text is required"):
        write_latents(tmp_path / "new", ["text"] * 6, np.zeros((5, 4), np.float32))
    assert not (tmp_path / "new").exists()


def test_any_order_names_and_float_types(tmp_path: Path) -> None:
    a, b = RNG.standard_normal((2, 5, 4))
    np.save(tmp_path / "shard_0.npy", a.astype(np.float16))
    save_file({"anything": b.astype(np.float32)}, tmp_path / "shard_00001.safetensors")
    table = read_latents(tmp_path, [(1, 3), ("shard_0.npy", 0), (1, 0), (0, 4)])
    expected = torch.tensor(np.stack([b[3], a[0], b[0], a[4]])).float()
    torch.testing.assert_close(table.rows(torch.arange(4)), expected[:, None], atol=2e-3, rtol=0)
    assert table.row(0).dtype == torch.float32
    assert table.row(0).shape == (1, 4)


def test_refusals(tmp_path: Path) -> None:
    np.save(tmp_path / "shard_0000.npy", np.ones((3, 4), np.float32))
    np.save(tmp_path / "shard_0001.npy", np.ones((3, 5), np.float32))
    np.save(tmp_path / "shard_0002.npy", np.ones((3, 4), np.int64))
    np.save(tmp_path / "shard_0003.npy", np.array([Canary(tmp_path)], object), allow_pickle=True)
    (tmp_path / "shard_0004.safetensors").write_bytes(b"damaged")
    np.save(tmp_path / "shard_0005.npy", np.ones((3, 4), np.float32))
    save_file({"latents": np.ones((3, 4), np.float32)}, tmp_path / "shard_0005.safetensors")
    for shard, idx, message in (
        (0, 3, r"sample 1 asks for row 3 of .*shard_0000\.npy, which has 3"),
        (1, 0, r"shard_0001\.npy contains latents of shape \(1, 5\).* of \(1, 4\)"),
        (2, 0, r"torch.int64 of shape \(3, 4\); floats"),
        (3, 0, r"pickled objects are refused"),
        (4, 0, r"shard_0004\.safetensors cannot be read"),
        (5, 0, r"2 files for shard 5"),
        (6, 0, r"no files for shard 6"),
        ("../shard_0000.npy", 0, r"the bare name of a \.npy or \.safetensors file"),
        ("latents.pt", 0, r"the bare name of a \.npy or \.safetensors file"),
    ):
        with pytest.raises(UsageError, match=message):
            read_latents(tmp_path, [(0, 0), (shard, idx)])
    assert not (tmp_path / "canary").exists()


class Canary:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.folder / "canary"), "w")

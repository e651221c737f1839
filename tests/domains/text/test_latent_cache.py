import pickle
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from accel_train.config import UsageError
from accel_train.data.artifacts import hosts_without
from accel_train.domains.text.latents import cache as latent_cache
from accel_train.domains.text.latents.cache import BatchMemory, LatentTable, cached_latents, latent_key
from tests import zygote

TEXTS = [f"{'long ' * (i % 5)}text {i}" for i in range(50)]
ROWS = 8


class Encoder:
    """A latent that says which text it is of, and a list of what was asked for."""

    def __init__(self, identity: str = "a", seconds: float = 0.0) -> None:
        self.identity, self.seconds = identity, seconds
        self.dim, self.batch_size = 3, 4
        self.asked: list[str] = []

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        time.sleep(self.seconds)
        self.asked.extend(texts)
        return np.stack([self.latent(text) for text in texts])

    def latent(self, text: str) -> NDArray[np.float32]:
        number = float(text.split()[-1])
        return np.array([number, ord(self.identity[0]), number**2], np.float32)

    def save(self, directory: Path) -> None: ...

    def all(self, texts: Sequence[str]) -> torch.Tensor:
        return torch.from_numpy(np.stack([self.latent(text) for text in texts]))[:, None, :]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_cache, "ROWS_PER_SHARD", ROWS)


def rows(table: LatentTable) -> torch.Tensor:
    return table.rows(torch.arange(len(table)))


def test_computed_once_in_the_order_of_the_texts(tmp_path: Path) -> None:
    first, second = Encoder(), Encoder()
    table = cached_latents(TEXTS, first, tmp_path)
    assert torch.equal(rows(table), first.all(TEXTS))
    assert torch.equal(torch.stack([table.row(i) for i in range(50)]), first.all(TEXTS))
    assert torch.equal(torch.cat([block for _, block in table.blocks(7)]), first.all(TEXTS))
    assert [start for start, _ in table.blocks(7)] == list(range(0, 50, 7))
    lengths = [len(text) for text in first.asked[:ROWS]]
    assert lengths == sorted(lengths, reverse=True)  # batches of similar length, little padding
    assert (len(table), table.shape, sorted(first.asked)) == (50, (1, 3), sorted(TEXTS))
    assert torch.equal(rows(cached_latents(TEXTS, second, tmp_path)), first.all(TEXTS))
    assert second.asked == []
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    "picked", [[3], [0, 7, 3], [49, 0, 49, 20], list(range(49, -1, -1)), [8, 9, 10, 11, 12, 13, 14, 15] * 3 + [16]]
)
def test_rows_come_in_any_order_into_a_buffer_that_is_used_again(tmp_path: Path, picked: list[int]) -> None:
    table, expected = cached_latents(TEXTS, Encoder(), tmp_path), Encoder().all(TEXTS)
    buffer = torch.full((len(picked), 1, 3), torch.nan)
    for _ in range(2):
        found = table.rows(torch.tensor(picked), buffer)
        assert found.data_ptr() == buffer.data_ptr()
        assert torch.equal(buffer, expected[picked])
        buffer.fill_(torch.nan)
    assert torch.equal(table.rows(torch.tensor(picked)), expected[picked])


def test_what_a_batch_is_changed_to_stays_out_of_the_cache(tmp_path: Path) -> None:
    table, expected = cached_latents(TEXTS, Encoder(), tmp_path), Encoder().all(TEXTS)
    for picked in (torch.arange(8), torch.arange(50), torch.tensor([0, 20])):
        table.rows(picked).mul_(7)
    assert torch.equal(rows(table), expected)


def test_memory_is_used_again_only_when_nothing_refers_to_it() -> None:
    memory = BatchMemory()
    first, other = memory.empty(4, 3), memory.empty(4, 3)
    assert first.data_ptr() != other.data_ptr()
    place, row, array = first.data_ptr(), first[2], other.numpy()
    del other, first
    assert memory.empty(4, 3).data_ptr() not in (place, array.ctypes.data)  # a row and an array are still held
    del row
    again = memory.empty(4, 3)
    assert again.data_ptr() == place
    assert memory.empty(2, 6).data_ptr() != place  # another shape
    assert torch.equal(pickle.loads(pickle.dumps(memory)).empty(2).fill_(1), torch.ones(2))


def test_blocks_are_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = cached_latents(TEXTS, Encoder(), tmp_path)
    assert [len(block) for _, block in table.blocks()] == [50]
    monkeypatch.setattr(latent_cache, "BLOCK_BYTES", 20 * 3 * 4)
    assert [len(block) for _, block in table.blocks()] == [20, 20, 10]
    monkeypatch.setattr(latent_cache, "BLOCK_BYTES", 1)
    assert torch.equal(torch.cat([block for _, block in table.blocks()]), Encoder().all(TEXTS))


def test_other_texts_or_another_encoder_never_meet_stale_latents(tmp_path: Path) -> None:
    cached_latents(TEXTS, Encoder(), tmp_path)
    for texts, encoder in ((TEXTS, Encoder("b")), (TEXTS[::-1], Encoder()), ([*TEXTS[:-1], "other 7"], Encoder())):
        assert torch.equal(rows(cached_latents(texts, encoder, tmp_path)), encoder.all(texts))
        assert sorted(encoder.asked) == sorted(texts)
    assert latent_key(["ab", "c"], "a") != latent_key(["a", "bc"], "a")


def damage(kind: str, file: Path) -> None:
    content = bytearray(file.read_bytes())
    if kind == "truncated":
        file.write_bytes(content[:-5])
    elif kind == "flipped bit":
        content[-2] ^= 1
        file.write_bytes(content)
    elif kind == "emptied":
        file.write_bytes(b"")
    elif kind == "header":
        file.write_bytes(b"\xff" * 8 + bytes(content[8:]))
    elif kind == "shape":
        save_file({"latents": load_file(file)["latents"][:-1]}, file, metadata={"sha256": "x"})
    elif kind == "not finite":  # with the right checksum: written by a broken program
        latent_cache.write_shard(file, np.full_like(load_file(file)["latents"], np.nan))
    elif kind == "other name":
        save_file({"other": load_file(file)["latents"]}, file)
    else:
        file.unlink()


@pytest.mark.parametrize(
    "kind", ["truncated", "flipped bit", "emptied", "header", "shape", "not finite", "other name", "deleted"]
)
def test_a_damaged_shard_is_built_again_and_only_that_one(tmp_path: Path, kind: str) -> None:
    cached_latents(TEXTS, Encoder(), tmp_path)
    damage(kind, sorted(tmp_path.rglob("*.safetensors"))[2])
    encoder = Encoder()
    assert torch.equal(rows(cached_latents(TEXTS, encoder, tmp_path)), encoder.all(TEXTS))
    assert sorted(encoder.asked) == sorted(TEXTS[16:24])


def test_an_interrupted_build_is_continued(tmp_path: Path) -> None:
    class Stops(Encoder):
        def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
            if len(self.asked) >= 20:
                raise KeyboardInterrupt
            return super().encode(texts)

    with pytest.raises(KeyboardInterrupt):
        cached_latents(TEXTS, Stops(), tmp_path)
    encoder = Encoder()
    assert torch.equal(rows(cached_latents(TEXTS, encoder, tmp_path)), encoder.all(TEXTS))
    assert sorted(encoder.asked) == sorted(TEXTS[16:])


def test_latents_that_are_not_finite_are_refused_with_the_sample(tmp_path: Path) -> None:
    class Broken(Encoder):
        def latent(self, text: str) -> NDArray[np.float32]:
            return np.where(text == TEXTS[19], np.float32("inf"), super().latent(text)).astype(np.float32)

    with pytest.raises(UsageError, match=r"sample 19 \('long long long long text 19'\) contains NaN or infinity"):
        cached_latents(TEXTS, Broken(), tmp_path)


def test_a_table_travels_to_workers_without_its_data(tmp_path: Path) -> None:
    fresh, table = (cached_latents(TEXTS, Encoder(), tmp_path) for _ in range(2))
    expected = rows(table)
    assert abs(len(pickle.dumps(table)) - len(pickle.dumps(fresh))) < 64 < expected.nbytes  # strings are shared or not
    assert torch.equal(rows(pickle.loads(pickle.dumps(table))), expected)


def test_shards_are_memory_mapped(tmp_path: Path) -> None:
    latent_cache.write_shard(tmp_path / "big.safetensors", np.ones((25_000, 1, 1024), np.float32))
    before = psutil.Process().memory_info().rss
    shard = latent_cache.open_shard(tmp_path / "big.safetensors")
    assert float(shard[777].sum()) == 1024
    assert psutil.Process().memory_info().rss - before < 30e6  # of 100 MB


def together(rank: int, out: Path) -> None:
    """One of two real processes: first on a disk that both see, then each on its own."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{out / 'store'}", rank=rank, world_size=2)
    latent_cache.ROWS_PER_SHARD = ROWS
    barrier = torch.distributed.barrier
    for disk, cache in (("shared", out / "both"), ("own", out / f"host{rank}")):
        encoder = Encoder(seconds=0.02)
        cache.mkdir(exist_ok=True)
        apart = hosts_without(cache, rank, 2)
        table = cached_latents(TEXTS, encoder, cache, rank=rank, world_size=2, barrier=barrier)
        torch.save({"asked": encoder.asked, "latents": rows(table), "apart": apart}, out / f"{disk}{rank}.pt")
    barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both have written."""
    out = tmp_path_factory.mktemp("together")
    zygote.call(together, 2, out)
    return out


@pytest.mark.distributed
@pytest.mark.parametrize("disk", ["shared", "own"])
def test_two_processes_build_it_together(built: Path, disk: str) -> None:
    results = [torch.load(built / f"{disk}{rank}.pt") for rank in range(2)]
    assert all(torch.equal(result["latents"], Encoder().all(TEXTS)) for result in results)
    shares = [sorted(result["asked"]) for result in results]
    said = [result["apart"] for result in results]
    if disk == "shared":
        assert said == [None, None]
    else:
        own, other = built / "host0", built / "host1"
        assert f"({other}) cannot see {own} of {socket.gethostname()}" in said[0]
    if disk == "shared":  # each text once, by the rank that its shard belongs to
        assert shares[0] == sorted(text for i, text in enumerate(TEXTS) if i // ROWS % 2 == 0)
        assert shares[1] == sorted(text for i, text in enumerate(TEXTS) if i // ROWS % 2 == 1)
    else:  # each host all of them
        assert shares == [sorted(TEXTS)] * 2

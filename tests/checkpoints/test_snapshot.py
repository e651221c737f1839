"""Who owns which tensor, how pieces make a whole, and that a snapshot is a copy."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Replicate, Shard

from accel_train.checkpoints import snapshot, writer
from accel_train.checkpoints.background import Writer
from accel_train.precision import Precision, dtype_of
from accel_train.store import commit, planning, weights
from accel_train.training.sharding import DTensors


def collections(*stems: str, spread: bool = False) -> list[planning.Collection]:
    return [planning.Collection(s, lambda n: torch.zeros(0), spread=spread) for s in stems]


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(st.text("abc.", min_size=1, max_size=6), st.integers(0, 4000), min_size=1, max_size=30),
    st.integers(1, 7),
)
def test_every_tensor_has_one_owner_and_one_place(elements: dict[str, int], world_size: int) -> None:
    kinds = [*collections("model", "ema"), *collections("optimizer/a", "optimizer/b", spread=True)]
    planned = planning.plan(kinds, elements, world_size)
    assert sorted((t.collection, t.name) for t in planned.tensors) == sorted((c, n) for c in range(4) for n in elements)
    owners: dict[str, set[int]] = {}
    for rank in range(world_size):
        mine = sorted((t.start, t.start + t.bytes) for t in planned.tensors if t.owner == rank)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(mine)), "two tensors share memory"
        assert planned.sizes[rank] == max((end for _, end in mine), default=0)
    for tensor in planned.tensors:
        owners.setdefault(tensor.file, set()).add(tensor.owner)
        assert tensor.bytes == elements[tensor.name] * 4
    assert all(len(o) == 1 for o in owners.values()), "a file has one writer"
    assert set(planned.files("model")) == set(planned.files("optimizer/a")) == set(elements)


def test_the_load_is_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """As even as whole tensors and files allow: no rank above the mean by more than the largest file of weights."""
    monkeypatch.setattr(planning, "SHARD_BYTES", 100_000)
    elements = {f"layer{i:03d}": 1000 + 37 * (i % 50) for i in range(200)}
    kinds = [*collections("model", "ema"), *collections("optimizer/a", "optimizer/b", spread=True)]
    for world_size in (2, 4, 8):
        sizes = planning.plan(kinds, elements, world_size).sizes
        assert max(sizes) <= 1.05 * sum(sizes) / world_size


def test_large_collections_are_split_with_names_that_the_hub_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SHARD_BYTES", 1000)
    planned = planning.plan(collections("model"), {"a": 200, "b": 100, "c": 400}, 1)
    files = planned.files("model")
    assert files == {
        "a": "model-00001-of-00003.safetensors",
        "b": "model-00002-of-00003.safetensors",
        "c": "model-00003-of-00003.safetensors",
    }


@pytest.mark.parametrize(
    ("extents", "pieces"),
    [
        ([(0, 5), (5, 5)], [(0, 0, 5, 0), (1, 5, 5, 0)]),
        ([(0, 10), (10, 0)], [(0, 0, 10, 0)]),
        ([(0, 0), (0, 10)], [(1, 0, 10, 0)]),
        ([(0, 5), (5, 5), (0, 5), (5, 5)], [(0, 0, 5, 0), (1, 5, 5, 0)]),
        ([(0, 6), (4, 6)], [(0, 0, 6, 0), (1, 6, 4, 2)]),
        ([(5, 5), (0, 5)], [(1, 0, 5, 0), (0, 5, 5, 0)]),
    ],
)
def test_pieces_cover_the_whole_once(extents: list[tuple[int, int]], pieces: list[tuple[int, ...]]) -> None:
    assert planning.cover(extents) == pieces


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_an_extent_is_the_chunk_that_a_rank_has(world: int) -> None:
    """Of FSDP2, with replicas beside: the last ranks may have fewer rows, or none."""
    for rows in range(1, 12):
        whole = torch.arange(rows * 3).view(rows, 3)
        chunks = [*whole.chunk(world)]
        chunks += [whole[:0]] * (world - len(chunks))
        for rank, chunk in enumerate(chunks):
            mesh = SimpleNamespace(shape=(2, world), get_coordinate=lambda rank=rank: [1, rank])
            parameter: Any = SimpleNamespace(
                shape=whole.shape, ndim=2, device_mesh=mesh, placements=(Replicate(), Shard(0))
            )
            start, length = DTensors.extent(parameter)
            assert torch.equal(whole.flatten()[start : start + length], chunk.flatten())
            assert length == chunk.numel()


def test_a_hole_is_noticed() -> None:
    with pytest.raises(AssertionError, match="on no rank"):
        planning.cover([(0, 4), (5, 5)])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_snapshot_is_a_copy_and_its_file_is_what_safetensors_writes(tmp_path: Path, precision: Precision) -> None:
    live = {"b.weight": torch.randn(7, 3), "a": torch.randn(5), "empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5)}
    expected = {n: t.to(dtype_of(precision), copy=True) for n, t in live.items()}
    kinds = [planning.Collection("model", live.__getitem__, precision)]
    planned = planning.plan(kinds, {n: t.numel() for n, t in live.items()}, 1)
    pen = Writer(planned.sizes[0])
    try:
        snapshot.Snapshot(planned, kinds, pen.buffer, None, 0).take()
        for tensor in live.values():
            tensor.fill_(-1.0)  # the loop continues
        name = weights.DTYPE_NAMES[dtype_of(precision)]
        tensors = [
            {"name": t.name, "dtype": name, "shape": list(live[t.name].shape), "bytes": t.bytes}
            for t in planned.tensors
        ]
        (tmp_path / "t" / "optimizer").mkdir(parents=True)
        job = {"do": "write", "rank": 0, "directory": str(tmp_path / "t"), "texts": {"x.json": "{}"}, "extras": []}
        pen.submit(job | {"files": [{"name": "m.safetensors", "start": 0, "tensors": tensors}], "needed_bytes": 1})
        answer = pen.answer(wait=True)
    finally:
        pen.close()
    assert answer is not None
    save_file(expected, tmp_path / "reference.safetensors", metadata={"format": "pt"})
    written = tmp_path / "t" / "m.safetensors"
    assert written.read_bytes() == (tmp_path / "reference.safetensors").read_bytes()
    loaded = load_file(written)
    assert all(torch.equal(loaded[n], expected[n]) for n in expected)
    assert answer["files"]["m.safetensors"] == commit.seal_file(written)
    assert answer["files"]["x.json"]["size"] == 2


def test_tensors_of_two_dtypes_in_one_file() -> None:
    """Codes of 8 bits beside fp32: nothing lies between them, and each keeps its own dtype."""
    live = {"a": torch.randn(3), "b": torch.arange(8, dtype=torch.uint8), "c": torch.randn(5)}
    kinds = [planning.Collection("optimizer/a", live.__getitem__, own_dtypes={"b": torch.uint8})]
    planned = planning.plan(kinds, {name: tensor.numel() for name, tensor in live.items()}, 1)
    shot = snapshot.Snapshot(planned, kinds, bytearray(planned.sizes[0]), None, 0)
    shot.take()
    assert all(torch.equal(shot._views[0, name], tensor) for name, tensor in live.items())


def test_shards_of_all_ranks_make_the_whole_in_the_dtype_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks one after the other: what each sends is handed over at the end. Of "a" both have elements 4 and 5."""
    whole = {"a": torch.arange(10) / 3, "b": torch.arange(7) / 7}
    extents = [{"a": (0, 6), "b": (0, 3)}, {"a": (4, 6), "b": (3, 4)}]
    shots: list[snapshot.Snapshot] = []
    sent: dict[tuple[int, int], list[torch.Tensor]] = {(0, 1): [], (1, 0): []}
    awaited: dict[tuple[int, int], list[torch.Tensor]] = {(0, 1): [], (1, 0): []}
    monkeypatch.setattr(snapshot.dist, "P2POp", lambda *arguments: arguments)
    for rank, extent in enumerate(extents):

        def read(name: str, extent: dict[str, tuple[int, int]] = extent) -> torch.Tensor:
            start, length = extent[name]
            return whole[name][start : start + length]

        kinds = [planning.Collection("model", read, "bf16"), planning.Collection("ema", read)]
        planned = planning.plan(kinds, {name: tensor.numel() for name, tensor in whole.items()}, 2)
        operations: list[Any] = []
        monkeypatch.setattr(snapshot, "_transfer", operations.extend)
        shots.append(snapshot.Snapshot(planned, kinds, bytearray(planned.sizes[rank]), extents, rank))
        shots[-1].take()
        for operation, tensor, peer, _ in operations:
            if operation is snapshot.dist.isend:
                sent[rank, peer].append(tensor)
            else:
                awaited[peer, rank].append(tensor)
    for pair, landings in awaited.items():
        for landing, tensor in zip(landings, sent[pair], strict=True):
            assert (landing.dtype, landing.shape) == (tensor.dtype, tensor.shape)
            landing.copy_(tensor)
    found = shots[0]._views | shots[1]._views
    assert len(found) == 4
    for name, tensor in whole.items():
        assert torch.equal(found[0, name], tensor.bfloat16())
        assert torch.equal(found[1, name], tensor)


def test_a_bucket_holds_as_much_as_it_may() -> None:
    slots = [planning.TensorSlot(str(i), 0, 0, "f", 0, size) for i, size in enumerate((4, 4, 1, 9, 8))]
    found = [[slot.bytes for slot in bucket] for bucket in snapshot._buckets(slots, 8)]
    assert found == [[4, 4], [1], [9], [8]]


class Streams:
    """Stands in for CUDA's streams: says what was asked of them, in order. Copies happen at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free_bytes: int = 1 << 30) -> None:
        self.asked: list[str] = []
        self.side = SimpleNamespace(wait_stream=lambda other: self.asked.append(f"wait for {other}"))
        event = SimpleNamespace(record=lambda _stream: self.asked.append("mark"), query=lambda: True)
        for name, stand_in in {
            "is_available": lambda: True,
            "max_memory_allocated": lambda: 0,
            "memory_reserved": lambda: 0,
            "mem_get_info": lambda: (free_bytes, free_bytes),
            "current_stream": lambda: "training",
            "stream": self.switched,
            "Event": lambda: event,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(snapshot, "_pinned_stream", lambda _owner, _buffer: self.side)
        monkeypatch.setattr(snapshot, "_is_on_gpu", lambda _tensor: True)
        monkeypatch.setattr(snapshot, "CLONE_BYTES", 600)

    @contextmanager
    def switched(self, stream: object) -> Generator[None]:
        assert stream is self.side
        self.asked.append("switch")
        yield
        self.asked.append("switch back")


def taken(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a snapshot of fp32 tensors holds once it is ready, although they change in the meantime."""
    kinds = [planning.Collection("model", weights.__getitem__)]
    planned = planning.plan(kinds, {name: tensor.numel() for name, tensor in weights.items()}, 1)
    buffer = bytearray(planned.sizes[0])
    shot = snapshot.Snapshot(planned, kinds, buffer, None, 0)
    shot.take()
    for tensor in weights.values():
        tensor.zero_()
    assert shot.ready(wait=False)
    assert shot._clones == []
    return {name: view.clone() for (_, name), view in shot._views.items()}


def test_clones_are_sent_in_groups_that_wait_for_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    weights = {f"w{i:02d}": torch.randn(100 + i) for i in range(20)}
    before = {name: tensor.clone() for name, tensor in weights.items()}
    found = taken(weights)
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
    # One tensor a clone, eight clones a group.
    assert streams.asked == ["wait for training", "switch", "switch back"] * 3 + ["mark"]


def test_what_finds_no_room_on_the_device_is_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    weights = {f"w{i:02d}": torch.randn(100 + i) for i in range(6)}
    before = {name: tensor.clone() for name, tensor in weights.items()}
    empty = torch.empty
    sizes: list[int] = []

    def little_room(size: int, **options: Any) -> torch.Tensor:
        sizes.append(size)
        if len(sizes) > 2:
            raise torch.OutOfMemoryError("no room")
        return empty(size, **options)

    monkeypatch.setattr(torch, "empty", little_room)
    found = taken(weights)
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
    assert len(sizes) == len(weights)
    assert streams.asked == ["wait for training", "switch", "switch back", "mark"]


def test_too_little_free_memory_for_all_clones_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch, free_bytes=1000)
    weights = {f"w{i:02d}": torch.randn(100 + i) for i in range(6)}
    before = {name: tensor.clone() for name, tensor in weights.items()}
    found = taken(weights)
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
    assert streams.asked == []


def test_a_header_of_many_names_is_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = {f"blocks.{i}.wéight": torch.full((i + 1,), float(i)) for i in range(12)}
    save_file(tensors, tmp_path / "reference.safetensors", metadata={"format": "pt"})
    names = sorted(tensors)
    header = writer.safetensors_header(
        [{"name": n, "dtype": "F32", "shape": list(tensors[n].shape), "bytes": tensors[n].numel() * 4} for n in names]
    )
    data = b"".join(tensors[n].numpy().tobytes() for n in names)
    assert header + data == (tmp_path / "reference.safetensors").read_bytes()


def test_a_writer_that_dies_is_an_answer() -> None:
    pen = Writer(10)
    pen._process.kill()
    pen._process.wait()
    pen.submit({"do": "write"})
    answer = pen.answer(wait=True)
    assert answer is not None
    assert "the writer process ended by itself (code -9)" in answer["error"]
    assert pen.broken
    pen.close()


def test_the_writer_process_carries_no_library() -> None:
    """It starts in a moment and weighs little, because it takes the standard library alone."""
    code = "import sys, accel_train.checkpoints.writer; print(sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(done.stdout))
    assert "accel_train" in loaded
    assert not loaded & {"torch", "numpy", "accelerate", "pydantic", "yaml", "psutil", "safetensors", "huggingface_hub"}

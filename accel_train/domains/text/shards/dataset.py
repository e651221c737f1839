"""Training pairs of text and latent from shards larger than memory: texts and latents are read by block."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from accel_train.config import UsageError
from accel_train.data.datasets import Batch
from accel_train.data.progress import Progress
from accel_train.data.tables.block_cache import BlockCache
from accel_train.data.tables.block_order import BlockOrder
from accel_train.domains.text.dataset import DataAssets, padded_rows
from accel_train.domains.text.encoders import LatentEncoder
from accel_train.domains.text.latents.cache import (
    FORMAT,
    check_finite,
    encode_rows,
    intact,
    open_shard,
    row_blocks,
    write_shard,
)
from accel_train.domains.text.shards.corpus import ShardTexts


class BlockLatents:
    """Latents (L, Dz) of the training texts, one file for each block of the table.

    Files are memory-mapped up to `cache_bytes` in total, but always at least one. Same interface as `LatentTable`.
    """

    def __init__(self, files: tuple[Path | None, ...], texts: ShardTexts, cache_bytes: int) -> None:
        self.texts = texts
        self._files = files
        self._starts = texts.starts
        self._mapped: BlockCache[Tensor] = BlockCache(cache_bytes)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def shape(self) -> tuple[int, int]:
        """(L, Dz)"""
        first = int(np.searchsorted(self._starts, 0, side="right")) - 1
        shard = self._file(first)
        return shard.shape[1], shard.shape[2]

    def row(self, index: int) -> Tensor:
        """Read one latent (L, Dz) float32."""
        return self.rows(torch.tensor([index]))[0]

    def rows(self, indices: Tensor, out: Tensor | None = None) -> Tensor:
        """Read rows (n,) int64 as (n, L, Dz) float32, into `out` if given."""
        if out is None:
            out = torch.empty(len(indices), *self.shape)
        wanted = indices.numpy()
        blocks = np.searchsorted(self._starts, wanted, side="right") - 1
        for number in dict.fromkeys(blocks.tolist()):
            here = torch.from_numpy(blocks == number)
            # Block by block, so that each file is opened once per batch.
            rows = indices[here] - int(self._starts[number])
            out[here] = self._file(number)[rows]
        return out

    def blocks(self, size: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield (first index, latents (n, L, Dz)) in order. `size` None: as many rows as fit into 64 MiB."""
        return row_blocks(self, size)

    def _file(self, number: int) -> Tensor:
        file = self._files[number]
        assert file is not None, "a block without training texts has no latents"
        # The pages of a memory map count as memory of the process until it is closed.
        return self._mapped.get(number, lambda: open_shard(file), lambda shard: shard.nbytes)


def block_latents(
    texts: ShardTexts,
    encoder: LatentEncoder,
    cache: Path,
    *,
    rank: int,
    world_size: int,
    barrier: Callable[[], None],
    progress: bool,
) -> BlockLatents:
    """Load the latents of all training texts and compute the missing ones. Collective (two barriers).

    A file is named after the encoder and the ids of its texts, so it stays valid if other blocks are added or removed.
    Rank r first builds blocks r, r + world_size, ... Then each rank builds those still missing on its own disk. Each
    process reads every file once to verify it.
    """
    # One file per block for any number of ranks: the result does not depend on which rank builds it.
    files = [_file_of(texts, number, encoder, cache) for number in range(len(texts.sizes))]
    filled = [number for number, file in enumerate(files) if file is not None]
    # Each rank starts at a different block, so that ranks with a shared disk seldom build the same one at once.
    start = rank % max(1, len(filled))
    for assigned in (filled[rank::world_size], filled[start:] + filled[:start]):
        total = sum(texts.sizes[number] for number in assigned)
        with Progress("latents", total, progress and rank == 0) as bar:
            for number in assigned:
                _build(files[number], texts, number, encoder, bar.update)
        barrier()
    return BlockLatents(tuple(files), texts, texts.table.cache_bytes)


def _file_of(texts: ShardTexts, number: int, encoder: LatentEncoder, cache: Path) -> Path | None:
    if not texts.sizes[number]:
        return None
    hashed = hashlib.sha256(f"{FORMAT} {encoder.identity} ".encode())
    hashed.update(texts.ids(number).tobytes())
    digest = hashed.hexdigest()
    # In subfolders of two digits, because a folder with many thousand files is slow on shared disks.
    return cache / "latents" / "blocks" / digest[:2] / f"{digest}.safetensors"


def _build(
    file: Path | None, texts: ShardTexts, number: int, encoder: LatentEncoder, done: Callable[[int], None]
) -> None:
    """Build the file of a block, unless it is intact. Another process may do so at the same time."""
    rows = texts.sizes[number]
    # Checked right before building, because another process may have built it in the meantime.
    if file is None or intact(file, rows, encoder.dim):
        done(rows)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    block = texts.of_block(number)
    latents = encode_rows(block, encoder, done)
    start = int(texts.starts[number])
    check_finite(torch.from_numpy(latents), start, block, start)
    write_shard(file, latents[:, None, :])


class ShardTextDataset:
    """Map-style dataset of text and latents, with the samples of `TextLatentDataset`. Texts are tokenised when read.

    The lengths of texts are not known in advance, so batches cannot be grouped by length.
    """

    PADDED = ("tokens", "text_mask", "maskable")

    def __init__(self, table: BlockLatents, assets: DataAssets, order: BlockOrder | None) -> None:
        self.texts = table.texts
        self.table = table
        self.order = order
        self.fingerprint = _fingerprint(table.texts, assets)
        self._tokenizer = assets.tokenizer
        self._max_length = assets.max_length
        self._maskable = assets.tokenizer.maskable()
        self._mean = assets.latent_mean
        self._std = assets.latent_std

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Batch:
        """Return tokens (S,) int64, text_mask (S,) bool, maskable (S,) bool and latent (L, Dz) float32."""
        batch = self.batch([index])
        return {name: values[0] for name, values in batch.items()}

    def batch(self, indices: list[int]) -> Batch:
        """Stack samples: tokens, text_mask, maskable (B, S) and latent (B, L, Dz)."""
        tokens = self._tokenizer.tokenise(self.texts.take(indices), self._max_length)
        rows, mask = padded_rows(
            tokens, torch.arange(len(indices)), torch.arange(self._max_length), self._tokenizer.pad_id
        )
        maskable = mask & self._maskable[rows]
        without_token = maskable.any(1).logical_not().nonzero().flatten().tolist()
        if without_token:
            place = self.texts.place(indices[without_token[0]])
            raise UsageError(f"--data.path: {place}: the tokenizer finds no token in its text. Remove it.")
        latent = self.table.rows(torch.tensor(indices))
        # In place, because `rows` returns a copy.
        latent.sub_(self._mean).div_(self._std)
        return {"tokens": rows, "text_mask": mask, "maskable": maskable, "latent": latent}


def _fingerprint(texts: ShardTexts, assets: DataAssets) -> str:
    """Hash the ids and block sizes of the training texts, the tokenizer, the maximum length and the encoder."""
    assert assets.encoder is not None, "ready-made latents are refused with shards"
    sizes = list(texts.sizes)
    tokenizer = assets.tokenizer.to_json()
    facts = [texts.digest(), sizes, assets.max_length, tokenizer, assets.encoder.identity]
    return hashlib.sha256(repr(facts).encode()).hexdigest()

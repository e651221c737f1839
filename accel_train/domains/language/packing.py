"""Pack texts into rows of one length. No token sees the tokens of another text.

Positions tell transformers about the texts of a row: they begin at 0 with each text. The attention then masks other
texts in every layer, windows included, or calls the kernels for varying lengths.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accel_train.data.datasets import Batch

Tokens = NDArray[np.int32]
Ints = NDArray[np.int64]
IGNORED = -100
"""Label of a non-target token, as in transformers."""
IDS = np.int32(2**30 - 1)
"""Bits of the token itself, where it is stored."""
TARGET = np.int32(2**30)
"""Bit of a token counted by the loss."""
FIRST = np.int32(-(2**31))
"""Bit of the first token of a text: the sign."""


class Encoded(NamedTuple):
    """Tokens of one text."""

    ids: list[int]
    trained: list[bool]
    """True where the token counts in the loss as a target. Never the first one: nothing predicts it."""


class EncodedBlock(NamedTuple):
    """Texts of a block, in order. A row over the limit is several texts."""

    tokens: Tokens
    """All of them, as ``marked`` writes them."""
    lengths: Ints
    """Tokens of each text."""
    keys: Ints
    """(n, 2): for a held-out text the sort key of its row, else 0."""
    heldout: NDArray[np.bool_]
    """True for a held-out text."""
    counts: Counter[str]
    """Rows by what became of them, under the names of ``encoding``."""
    faults: Sequence[tuple[str, str]]
    """Place and fault of each bad row."""


def fit(encoded: Encoded, max_length: int, *, split: bool) -> Iterator[Encoded]:
    """Yield a text in pieces of at most ``max_length`` tokens, or with ``split`` False its beginning alone.

    A piece begins with the last token of the one before: every token is predicted once.
    """
    ids, trained = encoded
    yield Encoded(ids[:max_length], trained[:max_length])
    if not split:
        return
    # Up to the last token but one: the last one alone was already predicted by the piece before.
    for start in range(max_length - 1, len(ids) - 1, max_length - 1):
        piece = trained[start : start + max_length]
        yield Encoded(ids[start : start + max_length], [False, *piece[1:]])


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Divide texts among rows of ``capacity`` tokens: best-fit decreasing (Johnson 1974). Returns indices by row.

    Each text goes to the row with the least sufficient room, the longest texts first. O(n), and a function of the
    lengths alone.
    """
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit r is set if a row has r tokens of room: the lowest set bit from a length on is the best fit.
    rooms = 0
    # `sorted` is stable, so equal lengths stay in order.
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        above = rooms >> length
        if above:
            room = length + (above & -above).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room = capacity
            row = len(rows)
            rows.append([])
        rows[row].append(index)
        by_room[room - length].append(row)
        rooms |= 1 << (room - length)
    return rows


def marked(encoded: Encoded) -> Tokens:
    """Return the tokens of a text as they are stored: with marks of its beginning and of its targets."""
    tokens = np.array(encoded.ids, np.int32)
    tokens[encoded.trained] |= TARGET
    tokens[:1] |= FIRST
    return tokens


class PackedTexts(NamedTuple):
    """Rows of one shard: tokens of several texts each with packing, else of one."""

    tokens: Tokens
    """Marked, row after row."""
    rows: Ints
    """(R + 1,) start of each row in the tokens, and at the end the number of tokens."""
    texts: Ints
    """(n, 2): start in the tokens and length of each text, in the order of the texts."""


def pack_texts(tokens: Tokens, lengths: Ints, max_length: int, *, packing: bool) -> PackedTexts:
    """Pack the marked texts of one shard, given one after another."""
    rows = [[index] for index in range(len(lengths))]
    if packing:
        rows = pack(lengths.tolist(), max_length)
    order = np.array([index for row in rows for index in row], np.int64)
    sizes = np.array([len(row) for row in rows], np.int64)
    starts = np.cumsum(lengths) - lengths
    ordered = lengths[order]
    ends = np.cumsum(ordered)
    places = np.empty_like(starts)
    places[order] = ends - ordered
    # For each token, the distance from its new place back to its old one.
    moved = np.repeat(starts[order] - (ends - ordered), ordered)
    packed = tokens[moved + np.arange(len(tokens))]
    last = np.cumsum(sizes) - 1
    bounds = np.concatenate([np.zeros(1, np.int64), ends[last]])
    return PackedTexts(packed, bounds, np.stack([places, lengths], axis=1))


def unmarked(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return token ids (n,) int64 and the mask of targets (n,) bool."""
    ids = torch.from_numpy((tokens & IDS).astype(np.int64))
    return ids, torch.from_numpy((tokens & TARGET) != 0)


def collate(rows: Sequence[Tokens], max_length: int, pad_id: int) -> Batch:
    """Return input_ids, labels and position_ids (B, S) int64, and length (B,) of marked rows.

    A label is the token itself, or -100 where the loss does not count it. Padding forms a last text of its own.
    """
    shape = (len(rows), max_length)
    ids = torch.full(shape, pad_id)
    labels = torch.full(shape, IGNORED)
    first = torch.zeros(shape, dtype=torch.int64)
    places = torch.arange(max_length)
    for row, tokens in enumerate(rows):
        end = len(tokens)
        found, is_target = unmarked(tokens)
        ids[row, :end] = found
        labels[row, :end] = torch.where(is_target, found, IGNORED)
        begins = torch.from_numpy(tokens < 0)
        first[row, :end] = torch.where(begins, places[:end], 0)
        first[row, end:] = end
    # cummax carries the beginning of each text on to all of its tokens.
    positions = places - first.cummax(dim=1).values
    length = torch.tensor([len(tokens) for tokens in rows])
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "length": length}


def fingerprint(tokens: Tokens, lengths: Ints, max_length: int, *, packing: bool) -> str:
    """Hash the tokens and targets of texts, and everything their division into rows depends on."""
    offsets = [0, *np.cumsum(lengths).tolist()]
    digest = hashlib.sha256(f"{max_length} {packing} {offsets}".encode())
    digest.update((tokens & IDS).tobytes())
    digest.update(((tokens & TARGET) != 0).tobytes())
    return digest.hexdigest()

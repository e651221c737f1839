"""Texts packed into rows of one length, such that no token sees another text's.

A row of several texts is told to transformers by its positions, which begin at 0 with each text. Its attention then
masks other texts in every layer, windows included, or calls the kernels for varying lengths.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from accel_train.data.datasets import Batch
from accel_train.domains.language.templates import Encoded

IGNORED = -100
"""Label of a token that is no target, as in transformers."""


def fit(encoded: Encoded, max_length: int, *, split: bool) -> Iterator[Encoded]:
    """Yield a text in pieces of at most ``max_length`` tokens, or with ``split`` False its beginning alone.

    A piece begins with the last token of the one before, so that every token is predicted once.
    """
    ids, trained = encoded
    yield Encoded(ids[:max_length], trained[:max_length])
    if not split:
        return
    for start in range(max_length - 1, len(ids) - 1, max_length - 1):
        piece = trained[start : start + max_length]
        yield Encoded(ids[start : start + max_length], [False, *piece[1:]])


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Divide texts among rows of ``capacity`` tokens: best-fit decreasing (Johnson 1974). Returns indices by row.

    Each text goes to the row with the least room that is enough, the longest texts first. O(n), and a function of the
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


class TokenDataset:
    """Rows of tokens for the loader: several texts each with ``packing``, else one.

    A sample has input_ids, labels and position_ids, (S,) int64, and length, (), its tokens without padding. A label is
    the token itself, or -100 where the loss does not count it. Padding forms a last text of its own.
    """

    def __init__(self, texts: Iterable[Encoded], max_length: int, pad_id: int, *, packing: bool) -> None:
        # Read one by one: a list of Python's numbers takes ten times the memory.
        ids = array("i")
        trained = bytearray()
        lengths: list[int] = []
        for text in texts:
            ids.extend(text.ids)
            trained.extend(text.trained)
            lengths.append(len(text.ids))
        self.packing = packing
        self._rows = [[index] for index in range(len(lengths))]
        if packing:
            self._rows = pack(lengths, max_length)
        self._ids = torch.from_numpy(np.frombuffer(ids, np.int32))
        self._trained = torch.from_numpy(np.frombuffer(trained, np.bool_))
        self._offsets = [0, *itertools.accumulate(lengths)]
        self._max_length = max_length
        self._pad_id = pad_id
        self.texts = len(lengths)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Batch:
        batch = self.batch([index])
        return {name: rows[0] for name, rows in batch.items()}

    def batch(self, indices: list[int]) -> Batch:
        """Return these rows, (B, S) each, and their length (B,)."""
        shape = (len(indices), self._max_length)
        ids = torch.full(shape, self._pad_id)
        labels = torch.full(shape, IGNORED)
        positions = torch.zeros(shape, dtype=torch.int64)
        for row, index in enumerate(indices):
            place = 0
            for text in self._rows[index]:
                tokens, trained = self.text(text)
                end = place + len(tokens)
                ids[row, place:end] = tokens
                labels[row, place:end] = torch.where(trained, tokens, IGNORED)
                positions[row, place:end] = torch.arange(len(tokens))
                place = end
            positions[row, place:] = torch.arange(self._max_length - place)
        length = torch.tensor([self.length(index) for index in indices])
        return {"input_ids": ids, "labels": labels, "position_ids": positions, "length": length}

    def text(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of one text, (n,) int64, and where they are trained, (n,) bool."""
        start, stop = self._offsets[index], self._offsets[index + 1]
        return self._ids[start:stop].long(), self._trained[start:stop]

    def length(self, index: int) -> int:
        """Return the number of tokens of a row without padding."""
        length = 0
        for text in self._rows[index]:
            length += self._offsets[text + 1] - self._offsets[text]
        return length

    def trim(self, batch: Mapping[str, Tensor], length: int) -> Batch:
        """Crop the rows to ``length`` tokens. The caller knows that none is longer."""
        trimmed = dict(batch)
        for name, values in batch.items():
            if values.dim() == 2:
                trimmed[name] = values[:, :length].contiguous()
        return trimmed

    def targets(self) -> Tensor:
        """Return every token that is a target, (n,) int64."""
        return self._ids[self._trained].long()

    @property
    def tokens(self) -> int:
        """Number of tokens of all texts."""
        return len(self._ids)

    def fingerprint(self) -> str:
        """Hash tokens, targets, and their division into rows."""
        digest = hashlib.sha256(f"{self._max_length} {self.packing} {self._offsets}".encode())
        digest.update(self._ids.numpy().tobytes())
        digest.update(self._trained.numpy().tobytes())
        return digest.hexdigest()

"""Tokens of texts and captions as text, with those that masked diffusion learns, for ``accel-train data rows``."""

from __future__ import annotations

from functools import partial

from accel_train.data.datasets import TextRow, TextRows
from accel_train.domains.text.dataset import PreparedData, TextLatents


def text_rows(prepared: tuple[PreparedData, object]) -> TextRows:
    """Return the texts of a run. ``prepared`` are its data, and what pictures are scored with."""
    data, _ = prepared
    tokenizer = data.tokenizer
    pieces = {number: piece for piece, number in tokenizer.pieces().items()}
    return TextRows(
        train=data.train,
        heldout=data.heldout,
        row=partial(_row, data),
        max_length=data.assets.max_length,
        decode=tokenizer.decode,
        piece=pieces.__getitem__,
        special=frozenset(tokenizer.special_ids),
        notices=data.notices,
    )


def _row(data: PreparedData, dataset: TextLatents, index: int) -> TextRow:
    sample = dataset[index]
    length = int(sample["text_mask"].sum())
    ids = sample["tokens"][:length].tolist()
    learned = sample["maskable"][:length].tolist()
    # Once more, because the cache has the number of truncated texts and not which.
    cut = data.tokenizer.tokenise([dataset.texts[index]], data.assets.max_length).truncated
    return TextRow(ids, learned, [*range(length)], ["truncated" * cut])

"""Packed rows as text, with the tokens that the loss counts, for ``accel-train data rows``."""

from __future__ import annotations

from functools import partial

import torch

from accel_train.data.datasets import TextRow, TextRows
from accel_train.domains.language import perplexity, templates
from accel_train.domains.language.packing import IGNORED
from accel_train.domains.language.prepare import LanguageData
from accel_train.domains.language.tokens.shards import TokenDataset


def text_rows(data: LanguageData) -> TextRows:
    """Return the rows of a run as text."""
    tokenizer = data.tokenizer
    return TextRows(
        train=data.train,
        heldout=data.heldout,
        row=partial(_row, data),
        max_length=data.train.max_length,
        decode=partial(tokenizer.decode, skip_special_tokens=True),
        piece=tokenizer.convert_ids_to_tokens,
        special={number for number, token in tokenizer.added_tokens_decoder.items() if token.special},
        notices=data.notices,
    )


def _row(data: LanguageData, dataset: TokenDataset, index: int) -> TextRow:
    # A weight as from the loader, whose repeated rows have weight 0 and count nowhere.
    batch = dataset.batch([index]) | {"weight": torch.ones(1)}
    length = int(batch["length"])
    ids = batch["input_ids"][0, :length].tolist()
    positions = batch["position_ids"][0, :length].tolist()
    # The loss at each place is that of the next token.
    counted = perplexity.targets(batch)[0, : length - 1] != IGNORED
    learned = [False, *counted.tolist()]
    starts = [place for place, position in enumerate(positions) if position == 0]
    bounds = zip(starts, [*starts[1:], length], strict=True)
    remarks = [_remark(data, ids[start:end], learned[start:end]) for start, end in bounds]
    return TextRow(ids, learned, positions, remarks)


def _remark(data: LanguageData, ids: list[int], learned: list[bool]) -> str:
    """Return ``split`` or ``truncated`` for a text that fills a row and does not end in it, else empty text."""
    tokenizer = data.tokenizer
    if len(ids) < data.train.max_length or ids[-1] == tokenizer.eos_token_id:
        return ""
    ending = templates.behind_answer(tokenizer).strip()
    if ending and tokenizer.decode(ids).rstrip().endswith(ending):
        return ""
    # Of plain text every token but the first is learned, in one row or another.
    return "split" if all(learned[1:]) else "truncated"

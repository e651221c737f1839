"""Encode blocks of rows: each row is tokenised, divided to fit, and held out or trained, by its content alone."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accel_train.data.tables.row_blocks import RowBlocks
from accel_train.data.tables.text_sources import content_key, text_key
from accel_train.domains.language import packing, templates
from accel_train.domains.language.packing import Encoded, EncodedBlock, Tokens
from accel_train.domains.language.rows import roles
from accel_train.domains.language.rows.forms import DEFAULT_COLUMN, Fault, Row, order_of_forms, parsed
from accel_train.domains.language.rows.sources import has_come_before

UNWRITTEN = "unwritten "
"""Prefix of a part's name in the count of training chats whose template does not write that part."""
UNENDED = (
    "the chat template does not end an answer with a special token of the tokenizer, so the trained model generates up "
    "to the length limit"
)
UNREAD = "unread "
"""Prefix of a form's name in the count of training rows that have the form, but are read by another."""
BESIDE = "beside "
"""Prefix of a field's name in the count of training rows that have the field beside the only column read."""
ROLE = "role "
"""Prefix of an unknown role in the count of training messages that have it."""
LONGEST = "longest"
"""Key for the tokens of a block's longest training row that is split or cut. A sum over blocks is meaningless."""
KEY_BYTES = 16
"""Bytes kept of the hash of a row's words, which orders held-out rows: enough that different rows never share them."""
TEXTS_AT_ONCE = 256
SHOWN = 5
"""Most field names in a notice: rows may have any number of them."""


@dataclass(frozen=True)
class BlockEncoder:
    """Encodes a block. Can be pickled: a worker has its own tokenizer."""

    source: RowBlocks
    tokenizer: Any
    text_column: str
    max_length: int
    fraction: float
    """Share of rows held out, by the hash of their words."""
    excluded: frozenset[bytes] = frozenset()
    """Hashes of the texts of rows to leave out, because they are held out elsewhere."""

    def __call__(self, number: int) -> EncodedBlock:
        """Return the tokens of a block. Raises ``UsageError`` for rows without a template in the tokenizer."""
        if multiprocessing.parent_process() is not None:
            # There is already one worker per core.
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        block = _Block(self, is_copy=has_come_before(self.source, number))
        rows: list[Row] = []
        for row in parsed(self.source.read(number), self.text_column):
            if isinstance(row, Fault):
                block.faults.append(row)
                continue
            rows.append(row)
            # The tokenizer takes many texts at a time, on several threads.
            if len(rows) == TEXTS_AT_ONCE:
                block.add_all(rows)
                rows = []
        block.add_all(rows)
        return block.finish()


class _Block:
    """The encoded part of a block."""

    def __init__(self, encoder: BlockEncoder, *, is_copy: bool) -> None:
        self.faults: list[Fault] = []
        self._encoder = encoder
        self._is_copy = is_copy
        """True if an earlier block had the same rows, and counts those held out, excluded or bad."""
        # Rows with a lower hash are held out: the side of a row depends on its words and on nothing else.
        self._limit = math.ceil(encoder.fraction * 2**64)
        self._texts: list[Tokens] = []
        self._keys: list[bytes] = []
        self._heldout: list[bool] = []
        self._counts: Counter[str] = Counter()
        """Rows by split (``train``, ``heldout``), by form (``plain``, ``chats``), those without the column that the
        user named (``columnless``), ``bad`` and ``excluded`` ones.

        Of the training split: rows ``split`` or ``cut`` for their length, chats of ``several`` texts, the tokens
        ``repeated`` in all of these but the last, chats with parts that are `UNWRITTEN`, rows with forms that are
        `UNREAD`, rows with fields `BESIDE` the column that the user named, and messages of each unknown `ROLE`.
        """

    def add_all(self, rows: Sequence[Row]) -> None:
        excluded = self._encoder.excluded
        kept = [(row, content_key(row.content)) for row in rows if not (excluded and text_key(row.content) in excluded)]
        if not self._is_copy:
            self._counts["excluded"] += len(rows) - len(kept)
        texts = [row for row, _ in kept if row.text is not None]
        encoded = iter(templates.encode_texts(texts, self._encoder.tokenizer))
        for row, key in kept:
            if row.text is not None:
                self._add(row, key, templates.EncodedRow([next(encoded)]))
                continue
            try:
                found = templates.encode(row, self._encoder.tokenizer)
            except templates.UnusableRowError as error:
                self.faults.append(Fault(row.place, error.reason))
            else:
                self._add(row, key, found)

    def _add(self, row: Row, key: bytes, encoded: templates.EncodedRow) -> None:
        texts = encoded.texts
        length = max(len(text.ids) for text in texts)
        limit = self._encoder.max_length
        is_heldout = int.from_bytes(key[:8], "big") < self._limit
        if is_heldout and self._is_copy:
            return
        is_plain = row.text is not None
        pieces = (piece for text in texts for piece in packing.fit(text, limit, split=is_plain))
        # A piece without a token to learn would only take up space.
        kept = [packing.marked(piece) for piece in pieces if any(piece.trained)]
        self._texts += kept
        self._keys += [key[:KEY_BYTES]] * len(kept)
        self._heldout += [is_heldout] * len(kept)
        if not kept:
            self.faults.append(Fault(row.place, _nothing_learned(texts, limit)))
            # A bad row belongs to neither split.
            return
        self._counts["heldout" if is_heldout else "train"] += 1
        self._counts["plain"] += is_plain
        self._counts["chats"] += len(row.messages) > 0
        self._counts["columnless"] += row.lacks_column
        # The rest is counted for training alone, which is all that the notices describe.
        if is_heldout:
            return
        self._counts["several"] += len(texts) > 1
        # The last text has nearly the whole chat.
        self._counts["repeated"] += sum(min(len(text.ids), limit) for text in texts[:-1])
        by_column = is_plain and self._encoder.text_column != DEFAULT_COLUMN
        for name in row.unread:
            self._counts[(BESIDE if by_column else UNREAD) + name] += 1
        for part in encoded.unwritten:
            self._counts[UNWRITTEN + part] += 1
        self._counts.update(ROLE + name for name in roles.unknown(row.messages))
        if length > limit:
            self._counts["split" if is_plain else "cut"] += 1
            self._counts[LONGEST] = max(self._counts[LONGEST], length)

    def finish(self) -> EncodedBlock:
        heldout = np.array(self._heldout, np.bool_)
        faults = [] if self._is_copy else self.faults
        # Big-endian, so that numbers sort like the bytes. Shifted by 2**63 to fit into int64 in the same order.
        keys = np.frombuffer(b"".join(self._keys), ">u8").reshape(-1, 2)
        signed = (keys ^ np.uint64(2**63)).astype(np.uint64).view(np.int64)
        return EncodedBlock(
            tokens=np.concatenate([np.zeros(0, np.int32), *self._texts]),
            lengths=np.array([len(text) for text in self._texts], np.int64),
            keys=np.where(heldout[:, None], signed, 0),
            heldout=heldout,
            counts=self._counts + Counter(bad=len(faults)),
            faults=faults,
        )


def _nothing_learned(texts: Sequence[Encoded], limit: int) -> str:
    """Return why none of the first ``limit`` tokens of each text is trained, and what to do."""
    first = min((text.trained.index(True) for text in texts if any(text.trained)), default=None)
    if first is None:
        length = max(len(text.ids) for text in texts)
        return f"nothing to learn: none of its {length} tokens is trained (the chat template, weights of 0)"
    return (
        f"nothing to learn in its first {limit} tokens (--data.max_length {limit}): its first answer starts at token "
        f"{first + 1}; give --data.max_length {2 ** first.bit_length()} or more"
    )


def unread_notices(counts: Counter[str], column: str) -> list[str]:
    """Return notices about rows with several forms, or with other texts beside the ``column`` of the options."""
    forms = order_of_forms(column)
    by_form = {form: counts[UNREAD + form] for form in forms}
    names = ", ".join(forms)
    notices = [
        f"{count:,} rows also have {form}, which is not read: a row is read in the first form that it has of {names}. "
        "Remove the unwanted fields from the rows"
        for form, count in by_form.items()
        if count
    ]
    beside = {name.removeprefix(BESIDE): count for name, count in sorted(counts.items()) if name.startswith(BESIDE)}
    if beside:
        others = ", ".join(f"{name!r} ({count:,} rows)" for name, count in [*beside.items()][:SHOWN])
        notices.append(
            f"only {column!r} (--data.text_column) is trained on; other texts of the rows are not read: {others}. An "
            "answer is learned in rows of 'prompt' and 'completion'"
        )
    return notices


def chat_notices(counts: Counter[str], answer_end: int | None, tokenizer: Any) -> list[str]:
    """Return notices about chats split into texts, unknown roles, parts not learned, and answers without an end."""
    others = {name.removeprefix(ROLE): count for name, count in counts.items() if name.startswith(ROLE)}
    notices = roles.notices(others, marked=templates.marks_learned(tokenizer))
    if several := counts["several"]:
        notices.append(
            f"{several:,} chats become one text per answer, because the chat template rewrites earlier answers (it may "
            "leave out their reasoning): each answer is learned after the prompt that the model will see for it. This "
            f"repeats {counts['repeated']:,} tokens of earlier turns"
        )
    unwritten = {part: counts[UNWRITTEN + part] for part in templates.PARTS}
    lost = "that the chat template does not write: the model neither reads nor learns it"
    notices += [
        f"{count:,} chats have {part} {lost} (another template: --data.chat_template FILE.jinja)"
        for part, count in unwritten.items()
        if count
    ]
    if counts["chats"] and answer_end is None:
        notices.append(UNENDED)
    return notices

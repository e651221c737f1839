"""Options of the `data` group, and the training and held-out rows of tokens made by them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel_train.config import FractionBelowOne, NonNegativeInt, PositiveInt, UsageError
from accel_train.data.artifacts import open_cache
from accel_train.data.tables.text_sources import BadRows
from accel_train.domains.language import packing, rows, templates, tokenizers
from accel_train.domains.language.packing import TokenDataset
from accel_train.domains.language.pretrained import ModelConfig
from accel_train.domains.language.rows import Row, SampleBy

DEFAULT_VOCAB_SIZE = 2048


@dataclass(frozen=True)
class DataConfig:
    """Source of rows, their tokenizer, and how they are packed."""

    path: str = "demo"
    """'demo' (bundled Shakespeare), a .jsonl, .txt, .parquet or .csv file, a folder of them, a folder written by
    dataset.save_to_disk, or a Hub id (owner/name or owner/name:configuration). A row has messages (a chat), prompt and
    completion (texts, or lists of messages), or plain text."""
    split: str = "train"
    """Split of a saved or Hub dataset. Files have none."""
    text_column: str = "text"
    """Field or column of plain text."""
    sample_by: SampleBy = "line"
    """Unit of a row in a .txt file: a line, a paragraph (separated by empty lines), or the whole file."""
    heldout_path: str | None = None
    """Held-out rows: any source accepted by `path`. null: heldout_fraction of `path`."""
    heldout_fraction: FractionBelowOne = 0.04
    """Share of rows held out for evaluation, by a hash of their words. Has no effect with heldout_path."""
    max_bad_rows: NonNegativeInt = 0
    """Unusable rows (bad JSON, no text, nothing to learn) to leave out. The next one is an error with its place."""
    tokenizer: str | None = None
    """Hub id or folder of a tokenizer, or 'trained': a byte-level BPE of vocab_size pieces, trained on the training
    rows. null: that of model.source, or 'trained' from scratch."""
    vocab_size: PositiveInt | None = None
    """Pieces of the trained tokenizer, 300 or more. null: 2048."""
    chat_template: str | None = None
    """Jinja file with a chat template that replaces the tokenizer's."""
    max_length: PositiveInt = 256
    """Tokens of a row. Longer plain texts are split, longer chats and completions are truncated."""
    packing: bool = True
    """Pack as many texts into a row as fit. They do not attend to each other; the loss is that of separate texts."""
    cache_dir: str | None = None
    """Cache of trained tokenizers between runs. null: $ACCEL_TRAIN_CACHE, else ~/.cache/accel_train."""

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise UsageError(f"--data.max_length {self.max_length}: a row needs 2 tokens, the second to be predicted.")
        if self.heldout_path is None and self.heldout_fraction == 0:
            raise UsageError(
                "--data.heldout_fraction 0 without --data.heldout_path leaves nothing to evaluate on. Set a fraction "
                "such as 0.04, or give held-out rows."
            )
        if self.tokenizer not in (None, tokenizers.TRAINED) and self.vocab_size is not None:
            raise UsageError(
                f"--data.vocab_size {self.vocab_size} has no effect with --data.tokenizer {self.tokenizer!r}. Leave it "
                "out, or set the tokenizer to 'trained'."
            )


# Compared and hashed by identity.
@dataclass(frozen=True, eq=False)
class LanguageData:
    """Rows of a run with their tokenizer."""

    train: TokenDataset
    heldout: TokenDataset
    tokenizer: Any
    unigram: Tensor
    """Log-probability of each token among the targets of the training rows, (V,), with one count added to each."""
    fingerprint: str
    """sha256 of both splits and the tokenizer."""
    notices: tuple[str, ...]
    """Lines for the main process to log."""


def prepare_data(
    config: DataConfig,
    model: ModelConfig,
    *,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] = lambda: None,
) -> LanguageData:
    """Read, tokenise and pack the rows of a run. Every process calls it with the same options (barriers).

    Each process holds all tokens in memory, 5 bytes each. Raises ``UsageError``.
    """
    bad = BadRows(config.max_bad_rows)
    train, heldout = _read_splits(config, bad)
    cache = open_cache(config.cache_dir, rank, world_size)
    name = config.tokenizer or model.source or tokenizers.TRAINED
    if name == tokenizers.TRAINED:
        size = config.vocab_size or DEFAULT_VOCAB_SIZE
        texts = [row.content for row in train]
        tokenizer = tokenizers.cached_tokenizer(texts, size, cache, rank=rank, barrier=barrier)
    else:
        tokenizer = tokenizers.load_tokenizer(name, model.revision if name == model.source else None)
    notices = tokenizers.set_pad_token(tokenizer)
    tokenizers.set_chat_template(tokenizer, config.chat_template)
    train_data, train_notices = _tokenise(config, train, tokenizer, bad)
    heldout_data, _ = _tokenise(config, heldout, tokenizer, bad)
    notices = [
        f"{len(train):,} training rows of data, {len(heldout):,} held out",
        *([f"{bad.count:,} bad rows left out"] if bad.count else []),
        *notices,
        *train_notices,
    ]
    vocabulary = 1 + max(tokenizer.get_vocab().values())
    counts = torch.bincount(train_data.targets(), minlength=vocabulary) + 1.0
    digest = f"{train_data.fingerprint()} {heldout_data.fingerprint()} {tokenizer.backend_tokenizer.to_str()}"
    fingerprint = hashlib.sha256(digest.encode("utf-8", "surrogatepass")).hexdigest()
    unigram = (counts / counts.sum()).log()
    return LanguageData(train_data, heldout_data, tokenizer, unigram, fingerprint, tuple(notices))


def _read_splits(config: DataConfig, bad: BadRows) -> tuple[list[Row], list[Row]]:
    def read(path: str) -> list[Row]:
        return rows.read_rows(
            path, split=config.split, text_column=config.text_column, sample_by=config.sample_by, bad=bad
        )

    if config.heldout_path is not None:
        heldout = read(config.heldout_path)
        keys = {rows.content_key(row.content) for row in heldout}
        train = [row for row in read(config.path) if rows.content_key(row.content) not in keys]
    else:
        train, heldout = rows.split_heldout(read(config.path), config.heldout_fraction)
    if not train or not heldout:
        raise UsageError(
            f"--data.path {config.path!r}, --data.heldout_fraction {config.heldout_fraction:g}: {len(train)} training "
            f"and {len(heldout)} held-out rows; at least 1 of each is required. Bring more rows (--data.sample_by "
            "paragraph makes more of a .txt file than document), raise the fraction, or give --data.heldout_path."
        )
    return train, heldout


def _tokenise(config: DataConfig, found: Sequence[Row], tokenizer: Any, bad: BadRows) -> tuple[TokenDataset, list[str]]:
    """Return the rows of tokens, and notices of texts that were too long and of the packing."""
    split = cut = 0

    def pieces() -> Iterator[templates.Encoded]:
        nonlocal split, cut
        for row in found:
            encoded = templates.encode(row, tokenizer)
            too_long = len(encoded.ids) > config.max_length
            is_plain = row.text is not None
            split += too_long and is_plain
            cut += too_long and not is_plain
            pieces = packing.fit(encoded, config.max_length, split=is_plain)
            kept = [piece for piece in pieces if any(piece.trained)]
            yield from kept
            if not kept:
                why = f"the first {config.max_length} tokens" if too_long else f"its {len(encoded.ids)} tokens"
                bad.add(row.place, f"nothing to learn: none of {why} is trained (--data.max_length, the chat template)")

    data = TokenDataset(pieces(), config.max_length, tokenizer.pad_token_id, packing=config.packing)
    if not data.texts:
        raise UsageError(f"--data.path: no row of {config.path!r} has a token to learn. Bring other rows.")
    notices = [
        *([f"{split:,} texts longer than {config.max_length} tokens are split"] if split else []),
        *([f"{cut:,} chats or completions are cut to {config.max_length} tokens"] if cut else []),
        f"{data.tokens:,} tokens of {data.texts:,} texts in {len(data):,} rows of {config.max_length}, "
        f"{data.tokens / (len(data) * config.max_length):.0%} filled",
    ]
    return data, notices

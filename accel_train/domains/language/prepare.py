"""Prepare the training and held-out rows of tokens by the options of the `data` group."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.data.artifacts import open_cache
from accel_train.data.tables.ledger import Ledger, earlier_ledger
from accel_train.data.tables.row_blocks import RowBlocks
from accel_train.data.tables.text_sources import BadRows, bad_row_notices
from accel_train.domains.language import encoding, templates, tokenizers
from accel_train.domains.language.encoding import BlockEncoder
from accel_train.domains.language.generation.ends import end_answers
from accel_train.domains.language.pretrained import ModelConfig
from accel_train.domains.language.rows import forms
from accel_train.domains.language.rows.sources import DataConfig, MixedRows, contents
from accel_train.domains.language.splits import SplitSources
from accel_train.domains.language.tokens.cache import Layout, PreparedTokens, TokenCache
from accel_train.domains.language.tokens.shards import TokenDataset
from accel_train.store.run_file import experiment_options

DEFAULT_VOCAB_SIZE = 2048


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
    answer_end: int | None = None
    """Special token with which the chat template ends an answer. None: no row is a chat, or the template has none."""
    ledger: Ledger = ()
    """Data seen before by the resumed run, if they may change."""

    more_samples: str = "use more data"
    """Advice on getting more rows, as the end of an error message."""

    def end_answers(self, model: nn.Module) -> list[str]:
        """Let generation with the model end where the chat template ends an answer, and return a notice."""
        return end_answers(model, self.answer_end, self.tokenizer)


def prepare_data(
    config: DataConfig,
    model: ModelConfig,
    *,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] = lambda: None,
    earlier: Path | None = None,
) -> LanguageData:
    """Return the rows of a run, tokenised and packed by the first start with them. Every process calls it (barrier).

    One process of a host does the work, in worker processes where it takes long, and the others wait. Memory does not
    depend on the size of the data. ``earlier`` is the folder of assets in the checkpoint to resume, whose tokenizer is
    used. Raises ``UsageError``, also for options that ask for another tokenizer.
    """
    ledger = earlier_ledger(config.changed, earlier)
    cache = open_cache(config.cache_dir, rank, world_size)
    sources = SplitSources(config, cache)
    # One process logs the changes. That reads no row, so the others need not wait.
    if rank == 0:
        sources.name_changed_files()
    bad = BadRows(config.max_bad_rows)
    tokenizer, notices = _resolve_tokenizer(config, model, sources, cache, earlier, changed=bool(ledger))
    # Not the number of pieces: ids of added tokens may leave gaps.
    layout = Layout(config.max_length, config.packing, 1 + max(tokenizer.get_vocab().values()))
    heldout = None
    if sources.heldout is not None:
        # Before the training rows, from which equal ones are left out.
        heldout = _prepare(sources, sources.heldout, tokenizer, layout, bad)
    train = _prepare_train(sources, tokenizer, layout, bad)
    # From here on every process has what it needs, or raises the error of another.
    barrier()
    form_notices = _form_notices(config, tokenizer, [train] if heldout is None else [train, heldout])
    answer_end = templates.end_of_answer(tokenizer) if train.counts["chats"] else None
    _refuse_one_side(sources, train, heldout)
    _refuse_untrained_source(sources, train)
    pad_id = tokenizer.pad_token_id
    train_data = TokenDataset(train.train, config.max_length, pad_id, train.lease)
    if heldout is None:
        heldout_data = TokenDataset(train.heldout, config.max_length, pad_id, train.lease)
    else:
        heldout_data = TokenDataset(heldout.train, config.max_length, pad_id, heldout.lease)
    hashes = (train.fingerprints[0], train.fingerprints[1] if heldout is None else heldout.fingerprints[0])
    # The whole tokenizer and not its name: a model of another revision may have other pieces.
    digest = f"{hashes[0]} {hashes[1]} {tokenizer.backend_tokenizer.to_str()}"
    fingerprint = hashlib.sha256(digest.encode("utf-8", "surrogatepass")).hexdigest()
    notices = [
        *sources.notices(),
        *_notices(train, heldout, bad),
        *form_notices,
        *notices,
        *_packing_notices(config, train, train_data),
        *encoding.unread_notices(train.counts, config.text_column),
        *encoding.chat_notices(train.counts, answer_end, tokenizer),
    ]
    unigram = _unigram(train.targets)
    more = _more_samples(config, train_data)
    return LanguageData(
        train_data, heldout_data, tokenizer, unigram, fingerprint, tuple(notices), answer_end, ledger, more
    )


def _more_samples(config: DataConfig, data: TokenDataset) -> str:
    # Each text is a sample of its own already.
    if not config.packing or data.texts <= len(data):
        return "use more data"
    return (
        f"use more data, --data.no_packing or a smaller --data.max_length: a sample is a packed row of "
        f"{config.max_length} tokens, and {data.texts:,} texts fill {len(data):,}"
    )


def _unigram(targets: Tensor) -> Tensor:
    # Add one to each count, so that a token that training never shows has a finite loss.
    counts = targets.float() + 1.0
    return (counts / counts.sum()).log()


def _resolve_tokenizer(
    config: DataConfig, model: ModelConfig, sources: SplitSources, cache: Path, earlier: Path | None, *, changed: bool
) -> tuple[Any, list[str]]:
    """Return the tokenizer of the checkpoint to resume, or that of the options, with its chat template, and notices.

    A named tokenizer is loaded again, unless the data may have ``changed``. Raises ``UsageError`` for other ids.
    """
    saved = None if earlier is None else _saved_tokenizer(config, model, earlier.parent)
    if saved is not None and (changed or _named(config, model) == tokenizers.TRAINED):
        tokenizers.set_chat_template(saved, config.chat_template)
        return saved, []
    tokenizer, notices = _tokenizer(config, model, sources, cache)
    if saved is not None and earlier is not None:
        tokenizers.refuse_other_pieces(tokenizer, earlier.parent, resumes=True)
    elif model.source is not None and config.tokenizer not in (None, model.source):
        source = (model.source, model.revision)
        notices += tokenizers.refuse_other_than_source(tokenizer, _named(config, model), *source)
    return tokenizer, notices


def _named(config: DataConfig, model: ModelConfig) -> str:
    return config.tokenizer or model.source or tokenizers.TRAINED


def _described(name: str, vocab_size: int | None) -> str:
    if name == tokenizers.TRAINED:
        return f"{name} --data.vocab_size {vocab_size or DEFAULT_VOCAB_SIZE}"
    return name


def _saved_tokenizer(config: DataConfig, model: ModelConfig, checkpoint: Path) -> Any:
    """Return the tokenizer of a checkpoint to resume, None if it has none. Its weights know no other ids.

    Raises ``UsageError`` if the options ask for another one, and either of the two is ``trained``.
    """
    if not (checkpoint / tokenizers.TOKENIZER_FILE).is_file():
        return None
    before = experiment_options(checkpoint)
    name = before.get("data.tokenizer") or before.get("model.source") or tokenizers.TRAINED
    was = _described(name, before.get("data.vocab_size"))
    now = _described(_named(config, model), config.vocab_size)
    # A tokenizer given by name may have moved, and is compared by its ids.
    if before and now != was and tokenizers.TRAINED in (name, _named(config, model)):
        raise UsageError(
            f"--data.tokenizer {now}: {checkpoint} was trained with {was}, and its weights only know the ids of that "
            "tokenizer. A resume or an evaluation requires the same one, whatever --allow and --data.changed say. Give "
            f"--data.tokenizer {was}, or another --output_dir for another model."
        )
    saved = tokenizers.load_tokenizer(str(checkpoint), None)
    if name == tokenizers.TRAINED:
        # Only the option gives a trained tokenizer a chat template.
        saved.chat_template = None
    return saved


def _tokenizer(config: DataConfig, model: ModelConfig, sources: SplitSources, cache: Path) -> tuple[Any, list[str]]:
    """Return the tokenizer of the options with its chat template, and notices."""
    name = _named(config, model)
    if name == tokenizers.TRAINED:
        source = json.dumps(sources.facts(sources.train))
        size = config.vocab_size or DEFAULT_VOCAB_SIZE
        tokenizer = tokenizers.cached_tokenizer(
            source, lambda: tokenizers.sampled(sources.training_texts()), size, cache
        )
    else:
        of_source = name == model.source
        tokenizer = tokenizers.load_tokenizer(name, model.revision if of_source else None, of_source=of_source)
    notices = tokenizers.set_pad_token(tokenizer)
    tokenizers.set_chat_template(tokenizer, config.chat_template)
    return tokenizer, notices


def _prepare(sources: SplitSources, source: RowBlocks, tokenizer: Any, layout: Layout, bad: BadRows) -> PreparedTokens:
    """Return the tokens of a source, computed if they are not in the cache."""
    config = sources.config
    # How many more bad rows are allowed decides where an error stops the pass, so it is part of the cache key.
    facts = [*sources.facts(source), bad.limit - bad.count]
    cache = TokenCache(sources.cache, tokenizers.identity_of(tokenizer), facts, layout)

    def encoder() -> BlockEncoder:
        is_train = source is sources.train
        fraction = sources.fraction if is_train else 0.0
        # Read late: it scans the whole held-out source, which a warm cache does not need.
        excluded = sources.excluded if is_train else frozenset[bytes]()
        return BlockEncoder(source, tokenizer, config.text_column, config.max_length, fraction, excluded)

    return cache.prepared(source, encoder, bad)


def _prepare_train(sources: SplitSources, tokenizer: Any, layout: Layout, bad: BadRows) -> PreparedTokens:
    """Return the tokens of the training rows, and of those held out from them: at least one of two or more rows."""
    before = bad.count, [*bad.first]
    train = _prepare(sources, sources.train, tokenizer, layout, bad)
    if not sources.hold_out_one(train.counts):
        return train
    # The same rows are read again.
    bad.count, bad.first = before
    train = _prepare(sources, sources.train, tokenizer, layout, bad)
    share = f"--data.heldout_fraction {sources.config.heldout_fraction:g}"
    return train._replace(
        notices=[*train.notices, f"no row falls under {share}, so the one with the lowest hash is held out"]
    )


def _form_notices(config: DataConfig, tokenizer: Any, found: list[PreparedTokens]) -> list[str]:
    """Return notices about rows other than plain text: those without the named column, and dates of their template.

    Raises ``UsageError`` if all rows lack the column.
    """
    column = config.text_column
    counts = sum((tokens.counts for tokens in found), Counter[str]())
    rows = counts["train"] + counts["heldout"]
    of_templates = rows - counts["plain"]
    notices = templates.date_notices(tokenizer) if of_templates > 0 else []
    lacking = counts["columnless"]
    if not lacking:
        return notices
    others = "messages, or prompt and completion"
    if lacking > of_templates:
        others = f"{forms.DEFAULT_COLUMN!r}, {others}"
    if lacking == rows:
        raise UsageError(
            f"--data.text_column {column!r}: no row of {config.named} has it; all {lacking:,} have {others}. Name a "
            "column that the rows have, or leave the option out to train on these."
        )
    return [f"{lacking:,} rows without {column!r} (--data.text_column) are read from {others}", *notices]


def _refuse_one_side(sources: SplitSources, train: PreparedTokens, heldout: PreparedTokens | None) -> None:
    """Refuse data that leave nothing to train or to evaluate on."""
    config = sources.config
    held_out = train.heldout if heldout is None else heldout.train
    if train.train and held_out:
        return
    if heldout is not None and not held_out:
        _refuse_no_row(f"--data.heldout_path {config.heldout_path!r}", config, heldout.counts["bad"])
    rows_read = train.counts["train"] + train.counts["heldout"]
    if not rows_read:
        # Rows of the held-out source are left out before they are counted.
        if held_out and any(True for _ in contents(sources.train, config.text_column)):
            raise UsageError(
                f"{config.named}: all of its rows are held out, because --data.heldout_path {config.heldout_path!r} "
                "has them too. Training needs rows that are not held out: give a different file to one of the two, or "
                "leave --data.heldout_path out to hold out a share of the rows (--data.heldout_fraction)."
            )
        _refuse_no_row(config.named, config, train.counts["bad"])
    held_out_rows = train.counts["heldout"] if heldout is None else heldout.counts["train"]
    # Read again, which costs little where all of it is refused.
    if heldout is None and rows_read > 1 and len({*contents(sources.train, config.text_column)}) == 1:
        raise UsageError(
            f"{config.named}: all {rows_read} rows have the same text, and equal rows are either all trained on or all "
            "held out. At least 2 different texts are required: add other rows, or give --data.heldout_path."
        )
    raise UsageError(
        f"{config.named}, --data.heldout_fraction {config.heldout_fraction:g}: {train.counts['train']} training and "
        f"{held_out_rows} held-out rows; at least 1 of each is required, with a token to learn. Add more rows "
        "(--data.sample_by paragraph makes more of a .txt file than document), raise the fraction, or give "
        "--data.heldout_path."
    )


def _refuse_untrained_source(sources: SplitSources, train: PreparedTokens) -> None:
    """Refuse a mixture with a source that adds no training row: an epoch would lack what was asked for."""
    if not isinstance(sources.train, MixedRows):
        return
    counts = [Counter[str]() for _ in sources.config.paths]
    for number, found in train.blocks.items():
        counts[sources.train.place_of(int(number))[0]].update(found)
    for path, source, found in zip(sources.config.paths, sources.train.sources, counts, strict=True):
        if not found["train"]:
            raise UsageError(
                f"{source.option} {path!r}: this source of the mixture has no row to train on ({found['bad']} bad "
                f"rows, {found['heldout'] + found['excluded']} held out). At least one row is required: correct its "
                "rows or add more, or leave the source out."
            )


def _refuse_no_row(source: str, config: DataConfig, bad: int) -> None:
    raise UsageError(
        f"{source} contains no usable row ({bad} bad rows). At least one row with messages, with prompt and "
        f"completion, or with text in {config.text_column!r} is required: check the path, --data.split and "
        "--data.text_column."
    )


def _notices(train: PreparedTokens, heldout: PreparedTokens | None, bad: BadRows) -> list[str]:
    held_out = train.counts["heldout"] if heldout is None else heldout.counts["train"]
    notices = [f"{train.counts['train']:,} training rows of data, {held_out:,} held out", *train.notices]
    if heldout is not None:
        notices += heldout.notices
    if excluded := train.counts["excluded"]:
        notices.append(f"{excluded:,} rows left out of training, because held-out rows have their text")
    return notices + bad_row_notices(bad.count, bad.first)


def _packing_notices(config: DataConfig, train: PreparedTokens, data: TokenDataset) -> list[str]:
    """Return notices about overlong texts, and about the rows."""
    split = train.counts["split"]
    cut = train.counts["cut"]
    longest = max((block.get(encoding.LONGEST, 0) for block in train.blocks.values()), default=0)
    most = f"the longest row has {longest:,}"
    filled = data.tokens / (len(data) * config.max_length)
    return [
        *([f"{split:,} training texts longer than {config.max_length} tokens are split; {most}"] if split else []),
        *([f"{cut:,} training chats or completions are cut to {config.max_length} tokens; {most}"] if cut else []),
        f"{data.tokens:,} tokens of {data.texts:,} texts in {len(data):,} rows of {config.max_length}, {filled:.0%} "
        "filled",
    ]

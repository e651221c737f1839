"""Training and held-out texts from the `data` options, in memory or in shards (`read_splits`), and their tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch

from accel_train.config import UsageError
from accel_train.data.artifacts import cached_folder
from accel_train.data.tables.block_order import BlockOrder
from accel_train.data.tables.sharded_table import ShardedTable
from accel_train.data.tables.shards import index_shards
from accel_train.data.tables.text_sources import bad_row_notices, split_key, texts_hash
from accel_train.domains.text.corpus import (
    Corpus,
    check_options_have_effect,
    has_splits,
    left_out_notices,
    read_corpus,
    remove_heldout,
    split_heldout,
)
from accel_train.domains.text.options import TRAINED, DataConfig
from accel_train.domains.text.shards.corpus import (
    ShardTexts,
    SplitRules,
    split_notices,
    split_shards,
    window_notices,
)
from accel_train.domains.text.tokenizer import TextTokenizer, Tokens, train_tokenizer, transformers_tokenizer
from accel_train.wording import shortened

SPLIT = "split="
TOKENS = "tokens-1"
"""Version of the cached token files. Change it with their content, so that no run reads those of another version."""
TOKENS_FILE = "tokens.safetensors"
DEFAULT_SHUFFLE_BLOCKS = 16
DEFAULT_CACHE_MIB = 256


@dataclass(frozen=True)
class Processes:
    """This process among those that prepare the data together."""

    rank: int
    world_size: int
    barrier: Callable[[], None]
    progress: bool
    device: str

    def building(self) -> Building:
        """Return the keyword arguments of functions with which processes build a part of the cache together."""
        return Building(rank=self.rank, world_size=self.world_size, barrier=self.barrier, progress=self.progress)


class Building(TypedDict):
    """Keyword arguments of functions with which processes build a part of the cache together."""

    rank: int
    world_size: int
    barrier: Callable[[], None]
    progress: bool


class Splits(NamedTuple):
    """Training and held-out texts of a run."""

    train: Corpus
    """Training texts, or a sample of them to fit on if `shards` is given."""
    heldout: Corpus
    notices: list[str]
    """Lines for the log about both splits."""
    order: BlockOrder | None = None
    shards: ShardTexts | None = None
    """All training texts, if they are not held in memory."""


def read_splits(
    config: DataConfig, cache: Path, processes: Processes, known: Mapping[str, int] | None = None
) -> Splits:
    """Read and split the texts, by block or into memory. Collective: every rank calls it (four barriers for shards).

    ``known`` is given for captions of pictures. It maps captions to a `split_key` that replaces the computed one.
    """
    if config.by_blocks:
        return _read_shards(config, cache, processes)
    return _read_texts(config, known)


def _read_shards(config: DataConfig, cache: Path, processes: Processes) -> Splits:
    """Split the rows of shards. Collective: every rank calls it (four barriers)."""
    if config.latents is not None or config.split != "train" or str(config.heldout_path).startswith(SPLIT):
        raise UsageError(
            f"--data.path {config.path!r} is read in blocks, where data.latents and splits have no effect. Leave them "
            "out, or give one JSONL file or a saved dataset, without data.read and data.shuffle_blocks."
        )
    heldout = Corpus([])
    fraction = config.heldout_fraction
    if config.heldout_path is not None:
        fraction = 0.0
        heldout = _read_heldout(config, config.heldout_path)
        # A share of 1 keeps all texts, removes repeated ones and sorts them by hash.
        heldout = heldout.select(split_heldout(heldout, 1.0)[1])
    index = index_shards("--data.path", config.path, cache, rank=processes.rank, barrier=processes.barrier)
    cache_bytes = 2**20 * (config.cache_mib or DEFAULT_CACHE_MIB)
    table = ShardedTable(index, (config.text_column,), cache_bytes)
    # Sorted, because they are part of the cache key.
    keys = tuple(sorted(split_key(text) for text in heldout.texts))
    rules = SplitRules(config.text_column, config.min_words, config.max_bad_rows, fraction, keys)
    rank, barrier, progress = processes.rank, processes.barrier, processes.progress
    split = split_shards(table, rules, cache, rank=rank, barrier=barrier, progress=progress)
    if config.heldout_path is None:
        heldout = Corpus(split.heldout)
    texts = split.train
    _refuse_too_few(config, len(texts), len(heldout.texts))
    window = config.shuffle_blocks or DEFAULT_SHUFFLE_BLOCKS
    notices = [*index.notices, *split_notices(split, len(heldout.texts))]
    notices += bad_row_notices(heldout.skipped, heldout.faults)
    if config.read == "memory":
        order = BlockOrder(texts.sizes, window) if config.shuffle_blocks else None
        corpus = Corpus(list(texts), [], split.facts["bad"])
        return Splits(corpus, heldout, notices, order)
    notices += window_notices(texts, window)
    # Tokenizer and encoder are fitted on a sample: all texts may not fit into memory.
    train = Corpus(split.sample, [], split.facts["bad"])
    return Splits(train, heldout, notices, BlockOrder(texts.sizes, window), texts)


def _refuse_too_few(config: DataConfig, train: int, heldout: int) -> None:
    # At least 2, because evaluation also pairs each held-out text with the latent of another one.
    if train and heldout >= 2:
        return
    remedy = "Add more text, raise the fraction, or give --data.heldout_path."
    share = f"--data.heldout_fraction {config.heldout_fraction:g}"
    if config.heldout_path is not None:
        share = f"--data.heldout_path {config.heldout_path!r}"
        remedy = "Held-out texts are left out of training: give one of the two options different texts."
    if config.min_words > 1:
        remedy += f" Texts of fewer than {config.min_words} words are left out (--data.min_words)."
    raise UsageError(
        f"--data.path {config.path!r}, {share}: "
        f"{train} training and {heldout} held-out texts; at least 1 and 2 are required. "
        f"{remedy}"
    )


def _read_texts(config: DataConfig, known: Mapping[str, int] | None) -> Splits:
    """Read all texts into memory and split them."""
    # Checked before the texts are read, which may take minutes.
    is_split = config.heldout_path is not None and config.heldout_path.startswith(SPLIT)
    heldout = None if is_split else config.heldout_path
    check_options_have_effect(config.path, config.split, config.text_column, heldout)
    if is_split and not has_splits(config.path):
        raise UsageError(
            f"--data.heldout_path {config.heldout_path!r}: --data.path {config.path!r} has no splits, because files "
            "and datasets saved without splits have none. Give the held-out file."
        )
    corpus, short = _read(config, config.path, config.split)
    if config.heldout_path is None:
        heldout_corpus = corpus
        # Counted before repeated texts are left out, so that the notice can give their number.
        total = len(corpus.texts)
        train_rows, heldout_rows = split_heldout(corpus, config.heldout_fraction, known)
    else:
        heldout_corpus = _read_heldout(config, config.heldout_path)
        total = len(corpus.texts) + len(heldout_corpus.texts)
        train_rows, heldout_rows = remove_heldout(corpus, heldout_corpus)
    train = corpus.select(train_rows)
    heldout = heldout_corpus.select(heldout_rows)
    _refuse_too_few(config, len(train.texts), len(heldout.texts))
    repeated = total - len(train.texts) - len(heldout.texts)
    left_out = {"short texts": short, "repeated texts": repeated}
    notices = [_sizes(train.texts, heldout.texts, of_pictures=known is not None)]
    notices += left_out_notices(config.path)
    notices += bad_row_notices(corpus.skipped, corpus.faults)
    if heldout_corpus is not corpus:
        notices += bad_row_notices(heldout_corpus.skipped, heldout_corpus.faults)
    notices += [f"{count:,} {kind} left out" for kind, count in left_out.items() if count]
    return Splits(train, heldout, notices)


def _sizes(train: Sequence[str], heldout: Sequence[str], *, of_pictures: bool) -> str:
    """Return a line with the sizes of the splits. For pictures, which may share a caption, it also counts captions."""
    if not of_pictures:
        return f"{len(train):,} training texts, {len(heldout):,} held out"
    captions, others = len(set(train)), len(set(heldout))
    return f"{len(train):,} training samples ({captions:,} captions), {len(heldout):,} held out ({others:,} captions)"


def _read_heldout(config: DataConfig, source: str) -> Corpus:
    """Read another split of `path`, or another source."""
    if source.startswith(SPLIT):
        corpus, _ = _read(config, config.path, source.removeprefix(SPLIT))
    else:
        corpus, _ = _read(config, source, config.split)
    return corpus


def _read(config: DataConfig, path: str, split: str) -> tuple[Corpus, int]:
    """Read a source. Returns its texts of at least `min_words` words, and the number of shorter ones."""
    corpus = read_corpus(
        path,
        split=split,
        text_column=config.text_column,
        max_bad_rows=config.max_bad_rows,
        with_references=config.latents is not None,
    )
    # Words and not characters, because the option counts words.
    words = [len(text.split()) for text in corpus.texts]
    long = [index for index, count in enumerate(words) if count >= config.min_words]
    return corpus.select(long), len(corpus.texts) - len(long)


def build_tokenizer(config: DataConfig, texts: Sequence[str], cache: Path, processes: Processes) -> TextTokenizer:
    """Train the tokenizer (two barriers), or load that of a transformers model. Every rank calls it."""
    if config.tokenizer != TRAINED:
        return transformers_tokenizer(config.tokenizer)
    # Change the 1 in bpe-1 with the training of the tokenizer, so that no run reads the cache of another version.
    key = hashlib.sha256(f"bpe-1 {config.vocab_size} {texts_hash(texts)}".encode()).hexdigest()

    def write(directory: Path) -> None:
        tokenizer = train_tokenizer(texts, config.vocab_size)
        (directory / "tokenizer.json").write_text(tokenizer.to_json(), "utf-8")

    folder = cached_folder(cache / "tokenizers" / key, write, rank=processes.rank, barrier=processes.barrier)
    saved = (folder / "tokenizer.json").read_text("utf-8")
    return TextTokenizer.from_json(saved, pad_id=0, mask_id=1, special_ids=())


def tokenise_corpus(
    corpus: Corpus, tokenizer: TextTokenizer, config: DataConfig, cache: Path, processes: Processes
) -> tuple[Corpus, Tokens]:
    """Tokenise the texts. Those without a real token (control characters only) are left out as bad rows.

    Collective: every rank calls it (two barriers, or four if texts are left out). Raises `UsageError` above
    data.max_bad_rows.
    """
    tokens = cached_tokens(corpus.texts, tokenizer, config.max_length, cache, processes)
    # By a running sum over all texts, because a loop over millions of them would take minutes.
    real_tokens = tokenizer.maskable()[tokens.ids].long().cumsum(0)
    running = torch.cat([torch.zeros(1, dtype=torch.int64), real_tokens])
    counts = running[tokens.offsets].diff()
    empty = (counts == 0).nonzero().flatten().tolist()
    if not empty:
        return corpus, tokens
    if corpus.skipped + len(empty) > config.max_bad_rows:
        samples = [f"sample {index} ({corpus.texts[index][:60]!r})" for index in empty]
        raise UsageError(
            f"--data.path: tokenizer {config.tokenizer!r} finds no token in {shortened(samples, 1)}. Correct them, or "
            f"raise --data.max_bad_rows (now {config.max_bad_rows})."
        )
    # Tokenised again without them, so that texts and tokens have the same indices.
    corpus = corpus.select((counts > 0).nonzero().flatten().tolist())
    return corpus, cached_tokens(corpus.texts, tokenizer, config.max_length, cache, processes)


def cached_tokens(
    texts: Sequence[str], tokenizer: TextTokenizer, max_length: int, cache: Path, processes: Processes
) -> Tokens:
    """Return the tokens of the texts, cut to `max_length`, through the cache. Collective (two barriers)."""
    about = [TOKENS, tokenizer.identity(), max_length, texts_hash(texts)]
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()

    def write(directory: Path) -> None:
        tokenizer.tokenise(texts, max_length).save(directory / TOKENS_FILE)

    folder = cached_folder(cache / "tokens" / key, write, rank=processes.rank, barrier=processes.barrier)
    return Tokens.load(folder / TOKENS_FILE)

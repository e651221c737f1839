"""Options of the `data` group, and their training and held-out datasets (`prepare_data`)."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from accel_train.config import FractionBelowOne, NonNegativeInt, PositiveInt, UsageError
from accel_train.data.artifacts import cached_folder, open_cache
from accel_train.domains.text import tfidf
from accel_train.domains.text.corpus import (
    Corpus,
    check_options_have_effect,
    read_corpus,
    remove_heldout,
    resolve_path,
    split_heldout,
    texts_hash,
)
from accel_train.domains.text.dataset import (
    DataAssets,
    PreparedData,
    TextLatentDataset,
    dataset_fingerprint,
    load_assets,
    statistics,
)
from accel_train.domains.text.encoders import LatentEncoder, Pooling, TransformerEncoder, load_encoder
from accel_train.domains.text.latent_cache import LatentTable, cached_latents, check_finite
from accel_train.domains.text.latent_files import read_latents
from accel_train.domains.text.lengths import fit_length
from accel_train.domains.text.tokenizer import TextTokenizer, Tokens, train_tokenizer, transformers_tokenizer
from accel_train.wording import shortened

TFIDF_SVD = "tfidf-svd"
TRAINED = "trained"
TFIDF_DIM = 64
SPLIT = "split="


@dataclass(frozen=True)
class DataConfig:
    """Source of texts and latents."""

    path: str = "demo"
    """'demo' (bundled Shakespeare), a .jsonl, .txt, .parquet or .csv file, a folder of .jsonl and .txt files, a
    folder written by dataset.save_to_disk, or a Hub id (owner/name or owner/name:configuration)."""
    split: str = "train"
    """Split of a saved or Hub dataset. Files have none."""
    text_column: str = "text"
    """Field or column of the text."""
    heldout_path: str | None = None
    """Held-out texts: any source accepted by `path`, or split=NAME, another split of `path`. Training texts found in
    it are left out. null: heldout_fraction of `path`."""
    heldout_fraction: FractionBelowOne = 0.04
    """Share of texts held out for evaluation, by a hash of their words. Not with heldout_path."""
    min_words: NonNegativeInt = 1
    """Fewest words of a text. Shorter ones are left out."""
    max_bad_rows: NonNegativeInt = 0
    """Unusable rows (bad JSON, no text, not UTF-8) to leave out. The next one is an error with its place."""
    tokenizer: str = TRAINED
    """'trained': a byte-level BPE of vocab_size pieces, trained on the training split. Otherwise the tokenizer of a
    transformers model, by Hub id or local directory."""
    vocab_size: PositiveInt = 2048
    """Pieces of the trained tokenizer, 300 or more."""
    max_length: PositiveInt = 32
    """Tokens per text: longer ones are cut, shorter ones padded. Compute grows with it. At least 1 more than the
    tokenizer's special tokens around a text ('trained': none). With 1, only the first token is learned."""
    encoder: str = TFIDF_SVD
    """Encoder of the latents: 'tfidf-svd' (fitted on the training split, needs no network), or a transformers encoder
    by Hub id or local directory with safetensors weights."""
    latent_dim: PositiveInt | None = None
    """Latent dimensions: the size of tfidf-svd (null: 64), or the leading dimensions kept of a transformers encoder
    (null: all)."""
    pooling: Pooling = "mean"
    """Pooling of a transformers encoder's token states to one latent: their mean, the first or the last."""
    normalise: bool = True
    """Scale each latent to length 1, after latent_dim."""
    encoder_max_length: PositiveInt | None = None
    """Tokens read of each text by a transformers encoder. null: its maximum, but at most 512."""
    encoder_batch_size: PositiveInt = 64
    """Texts per forward of a transformers encoder. Affects speed and memory only."""
    latents: str | None = None
    """Folder of ready-made latent shards (.npy or safetensors), instead of an encoder. The rows of `path` are then
    JSONL objects with the fields shard and idx in addition to the text."""
    cache_dir: str | None = None
    """Cache of tokenizers, encoders and latents between runs. null: $ACCEL_TRAIN_CACHE, else ~/.cache/accel_train."""

    def __post_init__(self) -> None:
        if self.heldout_path is None and self.heldout_fraction == 0:
            raise UsageError(
                "--data.heldout_fraction 0 without --data.heldout_path leaves nothing to evaluate on. Set a "
                "fraction such as 0.04, or give a held-out source."
            )
        if self.heldout_path is not None and self.heldout_fraction:
            self._refuse(("heldout_fraction",), f"heldout_path {self.heldout_path!r}")
        transformer_only = ("pooling", "encoder_max_length", "encoder_batch_size")
        if self.latents is not None:
            self._refuse(("encoder", "normalise", "latent_dim", *transformer_only), f"latents {self.latents!r}")
        elif self.encoder == TFIDF_SVD:
            self._refuse(transformer_only, f"encoder {TFIDF_SVD!r}")
        if self.tokenizer != TRAINED:
            self._refuse(("vocab_size",), f"tokenizer {self.tokenizer!r}")

    def _refuse(self, names: Sequence[str], because: str) -> None:
        """Refuse options that another one makes meaningless, unless they have their default value."""
        defaults = {field.name: field.default for field in fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise UsageError(
                    f"--data.{name} {getattr(self, name)!r} has no effect with --data.{because}. Leave it at its "
                    f"default {defaults[name]!r}, or change the other option."
                )


@dataclass(frozen=True)
class _Processes:
    """The processes that prepare data together."""

    rank: int
    world_size: int
    barrier: Callable[[], None]
    progress: bool
    device: str


def prepare_data(
    config: DataConfig,
    *,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] | None = None,
    progress: bool = True,
    device: str = "cpu",
    assets: Path | None = None,
) -> PreparedData:
    """Prepare the datasets of a run. Every rank calls it with the same configuration (several barriers).

    Reads the corpus, trains the tokenizer, fits or loads the encoder (on the training split only) and computes the
    latents missing from the cache, on `device` for a neural encoder. With `assets`, the folder of a checkpoint,
    tokenizer, encoder, mean and std are read from there. Each process holds texts and ids in memory. Latents are
    memory-mapped. Raises `UsageError`.
    """
    processes = _Processes(rank, world_size, barrier or _no_barrier, progress, device)
    cache = open_cache(config.cache_dir, rank, world_size)
    train, heldout, notices = _read_splits(config)
    saved = load_assets(assets, device) if assets else None
    tokenizer = saved.tokenizer if saved else _build_tokenizer(config, train.texts, cache, processes)
    train, train_tokens = _tokenise(train, tokenizer, config)
    heldout, heldout_tokens = _tokenise(heldout, tokenizer, config)
    encoder = saved.encoder if saved else _build_encoder(config, train.texts, cache, processes)
    table = _latents(config, train, encoder, cache, processes)
    if saved:  # the scale that the model has learned
        mean = saved.latent_mean
        std = saved.latent_std
        length = saved.length
    else:
        mean, std = statistics(table)
        length = fit_length(table, train_tokens.offsets.diff(), mean, std)
    own = DataAssets(tokenizer, encoder, config.max_length, mean, std, table.shape[0], length)
    heldout_table = _latents(config, heldout, encoder, cache, processes)
    if isinstance(encoder, TransformerEncoder):
        # Training does not encode.
        encoder.release()
    train_data = _dataset(train.texts, train_tokens, table, own)
    heldout_data = _dataset(heldout.texts, heldout_tokens, heldout_table, own)
    notices += _truncation_notice(train_tokens, config.max_length)
    fingerprint = hashlib.sha256(f"{train_data.fingerprint}{heldout_data.fingerprint}".encode()).hexdigest()
    return PreparedData(train_data, heldout_data, own, fingerprint, tuple(notices))


def _truncation_notice(tokens: Tokens, max_length: int) -> list[str]:
    """Return a line about cut training texts, or none if no text was cut."""
    if not tokens.truncated:
        return []
    share = tokens.truncated / (len(tokens.offsets) - 1)
    return [f"{share:.1%} of training texts are cut to {max_length} tokens"]


def _no_barrier() -> None:
    """Do nothing, as the barrier of a single process."""


def _dataset(texts: Sequence[str], tokens: Tokens, table: LatentTable, assets: DataAssets) -> TextLatentDataset:
    if table.shape != assets.latent_shape:
        raise UsageError(
            f"--data.latents: latents of shape {table.shape} beside others of {assets.latent_shape}. Training, "
            "held-out and checkpoint latents must come from one encoder with one latent_dim."
        )
    return TextLatentDataset(texts, tokens, table, assets, dataset_fingerprint(texts, table, assets))


def _read_splits(config: DataConfig) -> tuple[Corpus, Corpus, list[str]]:
    """Return the training and the held-out texts, and notices for the log about both."""
    check_options_have_effect(config.path, config.split, config.text_column)
    corpus, short = _read(config, config.path, config.split)
    if config.heldout_path is None:
        heldout_corpus = corpus
        total = len(corpus.texts)
        train_rows, heldout_rows = split_heldout(corpus, config.heldout_fraction)
    else:
        heldout_corpus = _read_heldout(config, config.heldout_path)
        total = len(corpus.texts) + len(heldout_corpus.texts)
        train_rows, heldout_rows = remove_heldout(corpus, heldout_corpus)
    train = corpus.select(train_rows)
    heldout = heldout_corpus.select(heldout_rows)
    # Evaluation also pairs each held-out text with the latent of another one.
    if not train.texts or len(heldout.texts) < 2:
        raise UsageError(
            f"--data.path {config.path!r}, --data.heldout_fraction {config.heldout_fraction:g}: "
            f"{len(train.texts)} training and {len(heldout.texts)} held-out texts; at least 1 and 2 are required. "
            "Bring more text, raise the fraction, or give --data.heldout_path."
        )
    repeated = total - len(train.texts) - len(heldout.texts)
    left_out = {"bad rows": corpus.skipped, "short texts": short, "repeated texts": repeated}
    notices = [f"{len(train.texts):,} training texts, {len(heldout.texts):,} held out"]
    notices += [f"{count:,} {kind} left out" for kind, count in left_out.items() if count]
    return train, heldout, notices


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
    long = [index for index, text in enumerate(corpus.texts) if len(text.split()) >= config.min_words]
    return corpus.select(long), len(corpus.texts) - len(long)


def _build_tokenizer(config: DataConfig, texts: Sequence[str], cache: Path, processes: _Processes) -> TextTokenizer:
    if config.tokenizer != TRAINED:
        return transformers_tokenizer(config.tokenizer)
    # The 1 changes with the training of the tokenizer, so that no run reads another version's cache.
    key = hashlib.sha256(f"bpe-1 {config.vocab_size} {texts_hash(texts)}".encode()).hexdigest()

    def write(directory: Path) -> None:
        tokenizer = train_tokenizer(texts, config.vocab_size)
        (directory / "tokenizer.json").write_text(tokenizer.to_json(), "utf-8")

    folder = cached_folder(cache / "tokenizers" / key, write, rank=processes.rank, barrier=processes.barrier)
    saved = (folder / "tokenizer.json").read_text("utf-8")
    return TextTokenizer.from_json(saved, pad_id=0, mask_id=1, special_ids=())


def _tokenise(corpus: Corpus, tokenizer: TextTokenizer, config: DataConfig) -> tuple[Corpus, Tokens]:
    """Tokenise the texts. Those without a real token (control characters only) are bad rows and left out."""
    tokens = tokenizer.tokenise(corpus.texts, config.max_length)
    real_tokens = tokenizer.maskable()[tokens.ids].long().cumsum(0)
    running = torch.cat([torch.zeros(1, dtype=torch.int64), real_tokens])
    counts = running[tokens.offsets].diff()
    empty = (counts == 0).nonzero().flatten().tolist()
    if not empty:
        return corpus, tokens
    if corpus.skipped + len(empty) > config.max_bad_rows:
        samples = [f"sample {index} ({corpus.texts[index][:60]!r})" for index in empty]
        raise UsageError(
            f"--data.path: tokenizer {config.tokenizer!r} leaves no token of {shortened(samples, 1)}. Correct them, or "
            f"raise --data.max_bad_rows (now {config.max_bad_rows})."
        )
    corpus = corpus.select((counts > 0).nonzero().flatten().tolist())
    return corpus, tokenizer.tokenise(corpus.texts, config.max_length)


def _build_encoder(
    config: DataConfig, texts: Sequence[str], cache: Path, processes: _Processes
) -> LatentEncoder | None:
    if config.latents is not None:
        return None
    if config.encoder != TFIDF_SVD:
        return TransformerEncoder(
            name=config.encoder,
            pooling=config.pooling,
            normalise=config.normalise,
            max_length=config.encoder_max_length,
            latent_dim=config.latent_dim,
            batch_size=config.encoder_batch_size,
            device=processes.device,
        )
    dim = config.latent_dim or TFIDF_DIM
    key = tfidf.fit_identity(texts, dim, config.normalise)

    def write(directory: Path) -> None:
        tfidf.fit(texts, dim, config.normalise).save(directory)

    folder = cached_folder(cache / "encoders" / key, write, rank=processes.rank, barrier=processes.barrier)
    return load_encoder(folder)


def _latents(
    config: DataConfig, corpus: Corpus, encoder: LatentEncoder | None, cache: Path, processes: _Processes
) -> LatentTable:
    if encoder is None:
        table = read_latents(resolve_path("--data.latents", str(config.latents)), corpus.references)
        for start, block in table.blocks():
            check_finite(block, start, corpus.texts)
        return table
    return cached_latents(
        corpus.texts,
        encoder,
        cache,
        rank=processes.rank,
        world_size=processes.world_size,
        barrier=processes.barrier,
        progress=processes.progress,
    )

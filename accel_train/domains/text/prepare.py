"""From the options of the `data` group to training and held-out datasets: `prepare_data`."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

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
    TextLatentDataset,
    dataset_fingerprint,
    load_assets,
    statistics,
)
from accel_train.domains.text.encoders import LatentEncoder, Pooling, TransformerEncoder, load_encoder
from accel_train.domains.text.latent_cache import LatentTable, cached_latents, check_finite
from accel_train.domains.text.latent_files import read_latents
from accel_train.domains.text.tokenizer import TextTokenizer, Tokens, train_tokenizer, transformers_tokenizer
from accel_train.wording import shortened

TFIDF_SVD = "tfidf-svd"
TRAINED = "trained"
TFIDF_DIM = 64
SPLIT = "split="


@dataclass(frozen=True)
class DataConfig:
    """Where text and latents come from."""

    path: str = "demo"
    """'demo' (bundled Shakespeare), a .jsonl, .txt, .parquet or .csv file, a folder of .jsonl and .txt files, a
    folder made by dataset.save_to_disk, or a hub id (owner/name or owner/name:configuration)."""
    split: str = "train"
    """Split of a saved or hub dataset to read; files have none."""
    text_column: str = "text"
    """Field or column that holds the text."""
    heldout_path: str | None = None
    """Held-out texts: any source that `path` can be, or split=NAME, another split of `path`. Training texts found
    in it are left out. null: a part of `path`, heldout_fraction of it."""
    heldout_fraction: FractionBelowOne = 0.04
    """Share of texts held out for evaluation, chosen by a hash of their words. Not with heldout_path."""
    min_words: NonNegativeInt = 1
    """Texts of fewer words are left out."""
    max_bad_rows: NonNegativeInt = 0
    """Rows that may be unusable (bad JSON, no text, not UTF-8) and are left out; one more is an error that names
    it."""
    tokenizer: str = TRAINED
    """'trained': a byte-level BPE of vocab_size pieces trained on the training split; or the tokenizer of a
    transformers model, by hub id or local directory."""
    vocab_size: PositiveInt = 2048
    """Pieces of the trained tokenizer, 300 or more."""
    max_length: PositiveInt = 32
    """Tokens per text: longer ones are cut, shorter ones padded. Compute grows with it. At least 1 more than the
    special tokens that the tokenizer puts around a text ('trained': none); 1 learns the first token alone."""
    encoder: str = TFIDF_SVD
    """What makes the latents: 'tfidf-svd' (fitted on the training split, no network), or a transformers encoder
    by hub id or local directory with safetensors weights."""
    latent_dim: PositiveInt | None = None
    """Latent dimensions: the size of tfidf-svd (null: 64), or how many of a transformers encoder's first
    dimensions are kept (null: all)."""
    pooling: Pooling = "mean"
    """How a transformers encoder's token states become one latent: their mean, the first, or the last."""
    normalise: bool = True
    """Scale each latent to length 1, after latent_dim."""
    encoder_max_length: PositiveInt | None = None
    """Tokens that a transformers encoder reads of each text; null: as many as it can, at most 512."""
    encoder_batch_size: PositiveInt = 64
    """Texts per forward of a transformers encoder; changes speed and memory only."""
    latents: str | None = None
    """Folder of ready-made latent shards (.npy or safetensors), used instead of an encoder; the rows of `path`
    are then JSONL objects with the fields shard and idx besides the text."""
    cache_dir: str | None = None
    """Where tokenizers, encoders and latents are kept between runs; null: $ACCEL_TRAIN_CACHE, else
    ~/.cache/accel_train."""

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
        """An option that another one makes meaningless must be left at its default."""
        defaults = {field.name: field.default for field in fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise UsageError(
                    f"--data.{name} {getattr(self, name)!r} has no effect with --data.{because}. Leave it at its "
                    f"default {defaults[name]!r}, or change the other option."
                )


@dataclass(frozen=True, eq=False)
class PreparedData:
    train: TextLatentDataset
    heldout: TextLatentDataset
    assets: DataAssets
    """Tokenizer, latent encoder, mean and std: what a checkpoint stores (`assets.save(directory)`)."""
    fingerprint: str
    """sha256 of both splits' contents and of all preprocessing."""
    notices: tuple[str, ...]
    """What a person should know: sizes, texts cut or left out. For the main process to print."""

    @property
    def tokenizer(self) -> TextTokenizer:
        """vocab_size, pad_id, mask_id, special_ids, decode(ids) -> str."""
        return self.assets.tokenizer

    @property
    def latent_mean(self) -> Tensor:
        return self.assets.latent_mean

    @property
    def latent_std(self) -> float:
        return self.assets.latent_std

    @property
    def latent_shape(self) -> tuple[int, int]:
        """(L, Dz)"""
        return self.assets.latent_shape

    def nearest_texts(self, latents: Tensor) -> list[tuple[str, float]]:
        """(B, L, Dz) normalised latents -> for each the training text of the highest cosine in the centred space,
        and that cosine. Reads every training latent once."""
        queries = F.normalize(latents.detach().float().cpu().flatten(1), dim=1)
        best, place = torch.full((len(queries),), -2.0), torch.zeros(len(queries), dtype=torch.int64)
        for start, block in self.train.table.blocks():
            keys = F.normalize(self.assets.normalise(block).flatten(1), dim=1)
            cosine, index = (queries @ keys.T).max(1)
            place = torch.where(cosine > best, index + start, place)
            best = torch.maximum(best, cosine)
        return [(self.train.texts[i], float(c)) for i, c in zip(place.tolist(), best.tolist(), strict=True)]

    def save_assets(self, directory: Path) -> None:
        self.assets.save(directory)


@dataclass(frozen=True)
class _Processes:
    """Who builds together."""

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
    """Datasets of a run; every rank calls it with the same configuration (it meets at `barrier` several times).

    Reads the corpus, trains the tokenizer and fits or loads the encoder (training split only), and computes the
    latents that the cache lacks, on `device` where the encoder is a neural network. With `assets`, the folder of a
    checkpoint, tokenizer, encoder, mean and std come from there. Texts and ids are held in memory by each process,
    latents are memory-mapped. Refuses with `UsageError`.
    """
    processes = _Processes(rank, world_size, barrier or (lambda: None), progress, device)
    cache = open_cache(config.cache_dir, rank, world_size)
    train, heldout, notices = _read_splits(config)
    given = load_assets(assets, device) if assets else None
    tokenizer = given.tokenizer if given else _tokenizer(config, train.texts, cache, processes)
    train, train_tokens = _tokenised(train, tokenizer, config)
    heldout, heldout_tokens = _tokenised(heldout, tokenizer, config)
    encoder = given.encoder if given else _encoder(config, train.texts, cache, processes)
    table = _latents(config, train, encoder, cache, processes)
    mean, std = (given.latent_mean, given.latent_std) if given else statistics(table)
    made = DataAssets(tokenizer, encoder, config.max_length, mean, std, table.shape[0])
    heldout_table = _latents(config, heldout, encoder, cache, processes)
    if isinstance(encoder, TransformerEncoder):
        encoder.release()  # training never asks it
    parts = [
        _dataset(train.texts, train_tokens, table, made),
        _dataset(heldout.texts, heldout_tokens, heldout_table, made),
    ]
    notices += _length_notice(train_tokens, config.max_length)
    fingerprint = hashlib.sha256("".join(part.fingerprint for part in parts).encode()).hexdigest()
    return PreparedData(parts[0], parts[1], made, fingerprint, tuple(notices))


def _dataset(texts: Sequence[str], tokens: Tokens, table: LatentTable, assets: DataAssets) -> TextLatentDataset:
    if table.shape != assets.latent_shape:
        raise UsageError(
            f"--data.latents: latents of shape {table.shape} beside others of {assets.latent_shape}. Training, "
            "held-out and checkpoint latents must come from one encoder with one latent_dim."
        )
    return TextLatentDataset(texts, tokens, table, assets, dataset_fingerprint(texts, table, assets))


def _read_splits(config: DataConfig) -> tuple[Corpus, Corpus, list[str]]:
    check_options_have_effect(config.path, config.split, config.text_column)
    corpus, short = _read(config, config.path, config.split)
    if config.heldout_path is None:
        train_rows, heldout_rows = split_heldout(corpus, config.heldout_fraction)
        train, heldout, total = corpus.select(train_rows), corpus.select(heldout_rows), len(corpus.texts)
    else:
        split = config.heldout_path.removeprefix(SPLIT)
        own = split == config.heldout_path
        apart, _ = _read(config, config.heldout_path if own else config.path, config.split if own else split)
        train_rows, heldout_rows = remove_heldout(corpus, apart)
        train, heldout = corpus.select(train_rows), apart.select(heldout_rows)
        total = len(corpus.texts) + len(apart.texts)
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


def _read(config: DataConfig, path: str, split: str) -> tuple[Corpus, int]:
    corpus = read_corpus(
        path,
        split=split,
        text_column=config.text_column,
        max_bad_rows=config.max_bad_rows,
        with_references=config.latents is not None,
    )
    long = [i for i, text in enumerate(corpus.texts) if len(text.split()) >= config.min_words]
    return corpus.select(long), len(corpus.texts) - len(long)


def _tokenizer(config: DataConfig, texts: Sequence[str], cache: Path, processes: _Processes) -> TextTokenizer:
    if config.tokenizer != TRAINED:
        return transformers_tokenizer(config.tokenizer)
    key = hashlib.sha256(f"bpe-1 {config.vocab_size} {texts_hash(texts)}".encode()).hexdigest()

    def write(directory: Path) -> None:
        tokenizer = train_tokenizer(texts, config.vocab_size)
        (directory / "tokenizer.json").write_text(tokenizer.to_json(), "utf-8")

    folder = cached_folder(cache / "tokenizers" / key, write, rank=processes.rank, barrier=processes.barrier)
    saved = (folder / "tokenizer.json").read_text("utf-8")
    return TextTokenizer.from_json(saved, pad_id=0, mask_id=1, special_ids=())


def _tokenised(corpus: Corpus, tokenizer: TextTokenizer, config: DataConfig) -> tuple[Corpus, Tokens]:
    """Token ids, less the texts without a single real token (control characters only): these are bad rows too."""
    tokens = tokenizer.tokenise(corpus.texts, config.max_length)
    real = tokenizer.maskable()[tokens.ids].long().cumsum(0)
    counts = torch.cat([torch.zeros(1, dtype=torch.int64), real])[tokens.offsets].diff()
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


def _encoder(config: DataConfig, texts: Sequence[str], cache: Path, processes: _Processes) -> LatentEncoder | None:
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


def _length_notice(tokens: Tokens, max_length: int) -> list[str]:
    share = tokens.truncated / max(1, len(tokens.offsets) - 1)
    return [f"{share:.1%} of training texts are cut to {max_length} tokens"] if tokens.truncated else []

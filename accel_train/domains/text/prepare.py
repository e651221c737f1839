"""Preparation of training and held-out datasets from the `data` options (`prepare_data`)."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from accel_train.config import UsageError
from accel_train.data.artifacts import cached_folder, of_rank_0, open_cache, without_folder
from accel_train.data.tables.block_order import BlockOrder
from accel_train.data.tables.ledger import earlier_ledger
from accel_train.domains.models.vae import VaeReference
from accel_train.domains.text import tfidf
from accel_train.domains.text.corpus import Corpus, resolve_path
from accel_train.domains.text.dataset import (
    DataAssets,
    PreparedData,
    TextLatentDataset,
    dataset_fingerprint,
)
from accel_train.domains.text.encoders import LatentEncoder, TransformerEncoder, load_encoder
from accel_train.domains.text.latents.cache import LatentTable, cached_latents, check_finite
from accel_train.domains.text.latents.files import read_latents
from accel_train.domains.text.latents.trained_assets import (
    TrainedAssets,
    WeightsAssets,
    refuse_declared_otherwise,
    resolve_length,
    resolve_scale,
    taken_notices,
    trained_assets,
)
from accel_train.domains.text.options import DECIDE_SHAPES as DECIDE_SHAPES
from accel_train.domains.text.options import FREE_TO_CHANGE as FREE_TO_CHANGE
from accel_train.domains.text.options import TFIDF_SVD, TRAINED
from accel_train.domains.text.options import DataConfig as DataConfig
from accel_train.domains.text.shards.dataset import BlockLatents, ShardTextDataset, block_latents
from accel_train.domains.text.splits import Processes, build_tokenizer, read_splits, tokenise_corpus
from accel_train.domains.text.tokenizer import TextTokenizer, Tokens

logger = logging.getLogger(__name__)
TFIDF_DIM = 64


class PictureRows(Protocol):
    """Facts about captions and their ready-made latents, for texts that are captions of pictures."""

    @property
    def vae(self) -> VaeReference | None: ...
    @property
    def split_keys(self) -> Mapping[str, int]: ...


def prepare_data(
    config: DataConfig,
    *,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] | None = None,
    progress: bool = True,
    device: str = "cpu",
    weights: WeightsAssets | None = None,
    pictures: PictureRows | None = None,
) -> PreparedData:
    """Prepare the datasets of a run. Collective: every rank calls it with the same configuration (several barriers).

    Reads the corpus, trains the tokenizer, fits or loads the encoder (on the training split only) and computes the
    latents missing from the cache, on `device` for a neural encoder. `weights` are the assets saved with the weights
    that the run starts from: their tokenizer, encoder, mean and std are kept. `pictures` is given if ready-made latents
    are of pictures. Each process holds texts and ids in memory, or with `read: shards` reads them by block. Latents are
    memory-mapped. Raises `UsageError`, also for options and data that do not match the weights.
    """
    processes = Processes(rank, world_size, barrier or _no_barrier, progress, device)
    ledger = earlier_ledger(config.changed, weights.folder if weights and weights.resumes else None)
    trained = trained_assets(weights, device)
    cache = open_cache(config.cache_dir, rank, world_size)
    vae = None if pictures is None else pictures.vae
    splits = read_splits(config, cache, processes, None if pictures is None else pictures.split_keys)
    tokenizer = _tokenizer(config, trained, splits.train.texts, cache, processes)
    train, train_tokens = tokenise_corpus(splits.train, tokenizer, config, cache, processes)
    heldout, heldout_tokens = tokenise_corpus(splits.heldout, tokenizer, config, cache, processes)
    encoder = _build_encoder(config, trained, train.texts, cache, processes)
    if trained is not None:
        trained.refuse_other_latents(config, encoder, vae)
    if splits.shards is None:
        table = _latents(config, train, encoder, cache, processes)
    else:
        assert encoder is not None, "ready-made latents are refused with shards"
        table = block_latents(splits.shards, encoder, cache, **processes.building())
    scale = resolve_scale(trained, table, encoder, vae)
    length = resolve_length(trained, table, train_tokens, scale)
    own = DataAssets(tokenizer, encoder, config.max_length, scale.mean, scale.std, length, table.shape[0], vae)
    heldout_table = _latents(config, heldout, encoder, cache, processes)
    if isinstance(encoder, TransformerEncoder):
        # Training does not need the encoder.
        encoder.release()
    train_data = _training_dataset(table, own, train, train_tokens, splits.order)
    heldout_data = _dataset(heldout.texts, heldout_tokens, heldout_table, own)
    notices = [*splits.notices, *_truncation_notice(train_tokens, config.max_length)]
    notices += [*taken_notices(trained, tokenizer, encoder), *scale.notices]
    fingerprint = hashlib.sha256(f"{train_data.fingerprint}{heldout_data.fingerprint}".encode()).hexdigest()
    return PreparedData(train_data, heldout_data, own, fingerprint, tuple(notices), ledger)


def _training_dataset(
    table: LatentTable | BlockLatents, assets: DataAssets, train: Corpus, tokens: Tokens, order: BlockOrder | None
) -> ShardTextDataset | TextLatentDataset:
    if isinstance(table, BlockLatents):
        return ShardTextDataset(table, assets, order)
    return _dataset(train.texts, tokens, table, assets, order)


def _truncation_notice(tokens: Tokens, max_length: int) -> list[str]:
    """Return a line about cut training texts, or an empty list if none was cut."""
    if not tokens.truncated:
        return []
    share = tokens.truncated / (len(tokens.offsets) - 1)
    if share > 0.5:
        logger.warning("more than half of the training texts are cut; raise --data.max_length (now %d)", max_length)
    return [f"{share:.1%} of training texts are cut to {max_length} tokens"]


def _no_barrier() -> None:
    """Do nothing, as the barrier of a single process."""


def _dataset(
    texts: Sequence[str], tokens: Tokens, table: LatentTable, assets: DataAssets, order: BlockOrder | None = None
) -> TextLatentDataset:
    if table.shape != assets.latent_shape:
        raise UsageError(
            f"--data.latents: latents of shape {table.shape} and others of {assets.latent_shape}. Training, held-out "
            "and checkpoint latents must come from one encoder with one latent_dim."
        )
    if order is not None and len(order) != len(texts):
        raise UsageError(
            f"--data.shuffle_blocks: {len(order) - len(texts)} of {len(order)} texts have no token and would be "
            "missing from their blocks. Take them out of the files, or leave shuffle_blocks out."
        )
    fingerprint = dataset_fingerprint(texts, table, assets)
    if order is not None:
        # The blocks are part of the order of samples.
        fingerprint = hashlib.sha256(f"{fingerprint} {list(order.sizes)}".encode()).hexdigest()
    return TextLatentDataset(texts, tokens, table, assets, fingerprint, order)


def _tokenizer(
    config: DataConfig, trained: TrainedAssets | None, texts: Sequence[str], cache: Path, processes: Processes
) -> TextTokenizer:
    """Return the tokenizer of the weights, or build that of the options. Collective (two barriers)."""
    if trained is None:
        return build_tokenizer(config, texts, cache, processes)
    if config.tokenizer == TRAINED or trained.is_named_as_before(config):
        trained.refuse_other_options(config, ("tokenizer", "vocab_size"), "tokenizer")
        if config.tokenizer == TRAINED:
            # A host that cannot see the checkpoint trains a tokenizer, with these barriers, and is refused later.
            without_folder(processes.barrier)
        return trained.saved.tokenizer
    tokenizer = build_tokenizer(config, texts, cache, processes)
    trained.refuse_other_pieces(config.tokenizer, tokenizer)
    return trained.saved.tokenizer if trained.resumes else tokenizer


def _build_encoder(
    config: DataConfig, trained: TrainedAssets | None, texts: Sequence[str], cache: Path, processes: Processes
) -> LatentEncoder | None:
    """Return the encoder of the weights, or fit or load that of the options. None with ready-made latents."""
    if config.latents is not None:
        return None
    if config.encoder != TFIDF_SVD:
        return _transformer_encoder(config, trained, processes)
    if trained is not None and trained.saved.encoder is not None:
        trained.refuse_other_options(config, ("encoder", "latent_dim", "normalise"), "latent encoder")
        without_folder(processes.barrier)
        return trained.saved.encoder
    dim = config.latent_dim or TFIDF_DIM
    key = tfidf.fit_identity(texts, dim, config.normalise)

    def write(directory: Path) -> None:
        tfidf.fit(texts, dim, config.normalise).save(directory)

    folder = cached_folder(cache / "encoders" / key, write, rank=processes.rank, barrier=processes.barrier)
    return load_encoder(folder)


def _transformer_encoder(config: DataConfig, trained: TrainedAssets | None, processes: Processes) -> LatentEncoder:
    encoder = TransformerEncoder(
        name=config.encoder,
        pooling=config.pooling,
        normalise=config.normalise,
        max_length=config.encoder_max_length,
        latent_dim=config.latent_dim,
        batch_size=config.encoder_batch_size,
        device=processes.device,
    )
    encoder = encoder.resumed(trained.folder if trained else None)
    commit = encoder.commit if processes.rank == 0 else encoder.revision
    encoder = replace(encoder, revision=of_rank_0(commit, processes.world_size, processes.barrier))
    refuse_declared_otherwise(trained, encoder)
    return encoder


def _latents(
    config: DataConfig, corpus: Corpus, encoder: LatentEncoder | None, cache: Path, processes: Processes
) -> LatentTable:
    if encoder is None:
        table = read_latents(resolve_path("--data.latents", str(config.latents)), corpus.references)
        for start, block in table.blocks():
            check_finite(block, start, corpus.texts)
        return table
    return cached_latents(corpus.texts, encoder, cache, **processes.building())

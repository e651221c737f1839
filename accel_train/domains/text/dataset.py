"""Pairs of text and latent for the loader, with the assets for encoding and decoding text."""

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train.config import UsageError
from accel_train.data.datasets import Batch, TextRow, TextRows
from accel_train.data.tables.block_order import BlockOrder
from accel_train.data.tables.ledger import Ledger
from accel_train.data.tables.text_sources import texts_hash
from accel_train.domains.models.vae import VaeReference
from accel_train.domains.text.encoders import LatentEncoder, load_encoder
from accel_train.domains.text.latents.cache import BatchMemory, LatentRows, LatentTable
from accel_train.domains.text.lengths import LengthEstimate, load_length
from accel_train.domains.text.tokenizer import TextTokenizer, Tokens

ASSETS_FORMAT = 1


@dataclass(frozen=True)
class DataAssets:
    """Tokenizer, encoder and normalisation: enough to tokenise, encode and decode in another process."""

    tokenizer: TextTokenizer
    encoder: LatentEncoder | None
    """None with ready-made latents, in which case new text cannot be encoded."""
    max_length: int
    latent_mean: Tensor
    """Mean over the training split, (Dz,)."""
    latent_std: float
    """One scalar for all dimensions, so normalising leaves the cosines of centred latents unchanged."""
    length: LengthEstimate
    """Estimate of a text's length from its latent."""
    latent_tokens: int = 1
    """Number L of tokens per latent."""
    vae: VaeReference | None = None
    """Autoencoder whose latents of pictures, cut into patches, these are. None for other latents."""

    @property
    def latent_shape(self) -> tuple[int, int]:
        """(L, Dz)"""
        return self.latent_tokens, len(self.latent_mean)

    def tokenise(self, texts: Sequence[str]) -> Batch:
        """Return tokens (B, S) int64, text_mask (B, S) bool and maskable (B, S) bool."""
        tokens = self.tokenizer.tokenise(texts, self.max_length)
        positions = torch.arange(self.max_length)
        rows = torch.arange(len(texts))
        ids, mask = padded_rows(tokens, rows, positions, self.tokenizer.pad_id)
        maskable = mask & self.tokenizer.maskable()[ids]
        return {"tokens": ids, "text_mask": mask, "maskable": maskable}

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return latents (B, L, Dz) float32, normalised with the training split's mean and std.

        The texts are encoded as one batch, so do not pass a whole corpus. Raises `UsageError` without an encoder.
        """
        if self.encoder is None:
            raise UsageError(
                "--data.latents: ready-made latents come without an encoder, so new text cannot be encoded. Name the "
                "encoder that made them with --data.encoder instead of --data.latents."
            )
        latents = torch.from_numpy(self.encoder.encode(texts))  # (B, Dz)
        return self.normalise(latents.unsqueeze(1))

    def normalise(self, latents: Tensor) -> Tensor:
        return (latents - self.latent_mean) / self.latent_std

    def denormalise(self, latents: Tensor) -> Tensor:
        return latents * self.latent_std + self.latent_mean

    def save(self, directory: Path) -> None:
        """Write tokenizer, normalisation, length estimate and encoder files into a folder, created if missing.

        transformers' AutoTokenizer can read the folder, too.
        """
        from safetensors.torch import save_file

        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tokenizer.json").write_text(self.tokenizer.to_json(), "utf-8")
        # AutoTokenizer reads mask and padding tokens from here, not from the ids in assets.json.
        settings = self.tokenizer.settings(self.max_length)
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), "utf-8")
        save_file({"mean": self.latent_mean}, directory / "latent.safetensors")
        facts = {
            "format": ASSETS_FORMAT,
            "tokenizer": self.tokenizer.ids(),
            "max_length": self.max_length,
            "latent_std": self.latent_std,
            "latent_tokens": self.latent_tokens,
            "encoder": self.encoder is not None,
        }
        if self.vae is not None:
            facts["vae"] = asdict(self.vae)
        (directory / "assets.json").write_text(json.dumps(facts, indent=1), "utf-8")
        self.length.save(directory)
        if self.encoder is not None:
            self.encoder.save(directory)


def load_assets(directory: Path, device: str = "cpu") -> DataAssets:
    """Read the files of `DataAssets.save`. Raises `UsageError` if they are missing or damaged.

    A transformers encoder is found by its name, and its files are verified when it is first used.
    """
    from safetensors.torch import load_file

    try:
        facts: dict[str, Any] = json.loads((directory / "assets.json").read_text("utf-8"))
        if facts["format"] != ASSETS_FORMAT:
            raise ValueError(f"format {facts['format']}, this version reads {ASSETS_FORMAT}")
        saved_tokenizer = (directory / "tokenizer.json").read_text("utf-8")
        tokenizer = TextTokenizer.from_json(saved_tokenizer, **facts["tokenizer"])
        mean = load_file(directory / "latent.safetensors")["mean"]
        encoder = None
        if facts["encoder"]:
            encoder = load_encoder(directory, device)
        vae = facts.get("vae")
        return DataAssets(
            tokenizer=tokenizer,
            encoder=encoder,
            max_length=facts["max_length"],
            latent_mean=mean,
            latent_std=facts["latent_std"],
            latent_tokens=facts["latent_tokens"],
            length=load_length(directory),
            vae=None if vae is None else VaeReference(**vae),
        )
    except UsageError:  # names its remedy already
        raise
    except Exception as error:  # tokenizers and safetensors raise types of their own
        raise UsageError(
            f"{directory}: no usable data assets ({type(error).__name__}: {error}). The folder `assets` of a "
            "checkpoint, written by this version, is required."
        ) from None


def padded(tokens: Tokens, index: int, positions: Tensor, pad_id: int) -> tuple[Tensor, Tensor]:
    """Return one row of ids (S,) int64 and its mask (S,) bool, True at real tokens. `positions` is range(S)."""
    ids = tokens.row(index)
    row = torch.full_like(positions, pad_id)
    row[: len(ids)] = ids
    return row, positions < len(ids)


def padded_rows(tokens: Tokens, index: Tensor, positions: Tensor, pad_id: int) -> tuple[Tensor, Tensor]:
    """Return `padded` for the samples `index` (B,) at once: ids (B, S) int64 and mask (B, S) bool."""
    starts = tokens.offsets[index].unsqueeze(-1)
    lengths = tokens.offsets[index + 1].unsqueeze(-1) - starts
    mask = positions < lengths
    # Otherwise positions past the end of a text would read its neighbour's tokens, or past the end of all tokens.
    places = torch.where(mask, starts + positions, 0)
    return torch.where(mask, tokens.ids[places].long(), pad_id), mask


class TextLatents(Protocol):
    """Training pairs of text and latent: in memory (`TextLatentDataset`) or in shards (`ShardTextDataset`)."""

    @property
    def texts(self) -> Sequence[str]: ...
    @property
    def table(self) -> LatentRows: ...
    @property
    def order(self) -> BlockOrder | None:
        """Blocks to shuffle, with rows shuffled within windows of blocks. None: a full shuffle of the rows."""
        ...

    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Batch: ...
    def batch(self, indices: list[int], /) -> Batch: ...


class TextLatentDataset:
    """Map-style dataset of text and latents. `texts[i]` is the full text of sample i, not cut to `max_length`."""

    PADDED = ("tokens", "text_mask", "maskable")
    """Fields whose second dimension is the text length."""

    def __init__(
        self,
        texts: Sequence[str],
        tokens: Tokens,
        table: LatentTable,
        assets: DataAssets,
        fingerprint: str,
        order: BlockOrder | None = None,
    ) -> None:
        self.texts = list(texts)
        self.table = table
        self.order = order
        self.fingerprint = fingerprint
        self._tokens = tokens
        self._positions = torch.arange(assets.max_length)
        self._pad_id = assets.tokenizer.pad_id
        self._maskable = assets.tokenizer.maskable()
        self._mean = assets.latent_mean
        self._std = assets.latent_std
        self._lengths = tokens.offsets.diff().numpy()
        self._memory = BatchMemory()

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Batch:
        """Return tokens (S,) int64, text_mask (S,) bool, maskable (S,) bool and latent (L, Dz) float32."""
        row, mask = padded(self._tokens, index, self._positions, self._pad_id)
        return {
            "tokens": row,
            "text_mask": mask,
            "maskable": mask & self._maskable[row],
            "latent": (self.table.row(index) - self._mean) / self._std,
        }

    def batch(self, indices: list[int]) -> Batch:
        """Stack samples: tokens, text_mask, maskable (B, S) and latent (B, L, Dz).

        Latents are read in one copy and normalised in place. Their memory is reused once the batch is gone.
        """
        index = torch.tensor(indices)
        rows, mask = padded_rows(self._tokens, index, self._positions, self._pad_id)
        memory = self._memory.empty(len(indices), *self.table.shape)
        latent = self.table.rows(index, memory)
        # `rows` returns a copy, so this does not change the memory-mapped cache.
        latent.sub_(self._mean).div_(self._std)
        maskable = mask & self._maskable[rows]
        return {"tokens": rows, "text_mask": mask, "maskable": maskable, "latent": latent}

    def kind(self, index: int) -> Hashable:
        """Return the text, by which samples are grouped. With ready-made latents, several samples may share one."""
        return self.texts[index]

    def length(self, index: int) -> int:
        """Return the number of tokens without padding."""
        return int(self._lengths[index])

    def trim(self, batch: Mapping[str, Tensor], length: int) -> Batch:
        """Cut the padded fields to `length` tokens. The caller ensures no text is longer."""
        trimmed = dict(batch)
        for name in self.PADDED:
            trimmed[name] = batch[name][:, :length].contiguous()
        return trimmed


def statistics(table: LatentRows) -> tuple[Tensor, float]:
    """Compute the mean (Dz,) over samples and latent tokens, and one std over all centred entries.

    Reads every latent once and accumulates in float64.
    """
    count = 0
    total = torch.zeros(table.shape[1], dtype=torch.float64)
    squares = 0.0
    for _, block in table.blocks():
        flat = block.double().flatten(0, 1)  # (n * L, Dz)
        count += len(flat)
        # Sums rather than means of blocks, because the last block is smaller.
        total = total + flat.sum(0)
        squares += float((flat**2).sum())
    mean = total / count
    mean_square = float((mean**2).mean())
    variance = squares / (count * len(mean)) - mean_square
    # If all latents are equal, rounding still leaves a variance of this size.
    if variance <= 1e-12 * max(1.0, mean_square):
        raise UsageError(
            f"--data.encoder: all {count} latents of the training split are equal, so they carry no information about "
            "their texts. Latents that differ are required: check the encoder, or the ready-made latents."
        )
    return mean.float(), variance**0.5


def dataset_fingerprint(texts: Sequence[str], table: LatentTable, assets: DataAssets) -> str:
    """Hash texts, tokenizer, length and latents with sha256.

    Latents are identified by their encoder. Ready-made ones are identified by their own identity if they have one, and
    otherwise by their bytes.
    """
    digest = hashlib.sha256(f"{texts_hash(texts)} {assets.max_length} {assets.tokenizer.to_json()}".encode())
    if assets.encoder is not None:
        # It covers weights, pooling and length, which determine the latents. Millions of those need not be hashed.
        digest.update(assets.encoder.identity.encode())
    elif table.identity:
        digest.update(table.identity.encode())
    else:
        for _, block in table.blocks():
            digest.update(block.numpy().tobytes())
    return digest.hexdigest()


# Compared and hashed by identity: `baseline_metrics` caches its result by this object.
@dataclass(frozen=True, eq=False)
class PreparedData:
    """Datasets of a run with their assets."""

    train: TextLatents
    heldout: TextLatentDataset
    assets: DataAssets
    """Tokenizer, latent encoder, mean and std, as stored in a checkpoint (`assets.save(directory)`)."""
    fingerprint: str
    """sha256 of both splits' contents and of all preprocessing."""
    notices: tuple[str, ...]
    """Lines for the main process to log: sizes, texts cut or left out."""
    ledger: Ledger = ()
    """Record of the data that the resumed run has used before, if data.changed allows changes."""

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of both splits."""
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

    def nearest_rows(self, latents: Tensor) -> tuple[list[int], list[float]]:
        """Find the training row with the highest cosine to each normalised latent (B, L, Dz), and that cosine.

        Reads every training latent once.
        """
        flat = latents.detach().float().cpu().flatten(1)
        queries = F.normalize(flat, dim=1)
        best = torch.full((len(queries),), -2.0)  # below any cosine
        nearest = torch.zeros(len(queries), dtype=torch.int64)
        for start, block in self.train.table.blocks():
            keys = F.normalize(self.assets.normalise(block).flatten(1), dim=1)
            cosine, index = (queries @ keys.T).max(1)
            # Strictly greater, so that the first of equal rows wins for any block size.
            nearest = torch.where(cosine > best, index + start, nearest)
            best = torch.maximum(best, cosine)
        return nearest.tolist(), best.tolist()

    def nearest_texts(self, latents: Tensor) -> list[tuple[str, float]]:
        """Return the texts of the `nearest_rows`, each with its cosine."""
        indices, cosines = self.nearest_rows(latents)
        texts = [self.train.texts[index] for index in indices]
        return list(zip(texts, cosines, strict=True))

    def nearest_latents(self, latents: Tensor) -> Tensor:
        """Read the training latents (B, L, Dz) of the `nearest_rows`, normalised."""
        indices, _ = self.nearest_rows(latents)
        rows = [self.train.table.row(index) for index in indices]
        return self.assets.normalise(torch.stack(rows))


def text_rows(prepared: tuple[PreparedData, object]) -> TextRows:
    """Return the texts of a run for ``accel-train data rows``, with the tokens that masked diffusion learns.

    ``prepared`` holds the data of the run, followed by the scoring of pictures, which is not used.
    """
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
    # Tokenised again, because the cache only has the number of truncated texts and not which they are.
    cut = data.tokenizer.tokenise([dataset.texts[index]], data.assets.max_length).truncated
    return TextRow(ids, learned, [*range(length)], ["truncated" * cut])

"""Text and latent examples for the loader, and the assets that turn text into them and back."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_train.config import UsageError
from accel_train.domains.text.corpus import texts_hash
from accel_train.domains.text.encoders import LatentEncoder, load_encoder
from accel_train.domains.text.latent_cache import BatchMemory, LatentTable
from accel_train.domains.text.tokenizer import TextTokenizer, Tokens

ASSETS_FORMAT = 1


@dataclass(frozen=True)
class DataAssets:
    """All that is needed to tokenise, encode and decode in another process, apart from the texts themselves."""

    tokenizer: TextTokenizer
    encoder: LatentEncoder | None
    """None where latents were ready-made: then new text cannot be encoded."""
    max_length: int
    latent_mean: Tensor
    """(Dz,) of the training split."""
    latent_std: float
    """One scalar, so that cosines of centred latents are those of normalised ones."""
    latent_tokens: int = 1
    """L"""

    @property
    def latent_shape(self) -> tuple[int, int]:
        """(L, Dz)"""
        return self.latent_tokens, len(self.latent_mean)

    def tokenise(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """tokens (B, S) int64, text_mask (B, S) bool, maskable (B, S) bool."""
        tokens = self.tokenizer.tokenise(texts, self.max_length)
        positions, pad_id = torch.arange(self.max_length), self.tokenizer.pad_id
        rows = [padded(tokens, i, positions, pad_id) for i in range(len(texts))]
        ids, mask = torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])
        return {"tokens": ids, "text_mask": mask, "maskable": mask & self.tokenizer.maskable()[ids]}

    def encode(self, texts: Sequence[str]) -> Tensor:
        """(B, L, Dz) float32, normalised with the training split's mean and std. One batch, not a whole corpus."""
        if self.encoder is None:
            raise UsageError(
                "--data.latents: ready-made latents have no encoder here, so new text has no latent. Name the "
                "encoder that made them with --data.encoder instead of --data.latents."
            )
        return self.normalise(torch.from_numpy(self.encoder.encode(texts)).unsqueeze(1))

    def normalise(self, latents: Tensor) -> Tensor:
        return (latents - self.latent_mean) / self.latent_std

    def save(self, directory: Path) -> None:
        """tokenizer.json, assets.json, latent.safetensors and the encoder's files, into a folder that is made."""
        from safetensors.torch import save_file

        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tokenizer.json").write_text(self.tokenizer.to_json(), "utf-8")
        save_file({"mean": self.latent_mean}, directory / "latent.safetensors")
        facts = {
            "format": ASSETS_FORMAT,
            "tokenizer": self.tokenizer.ids(),
            "max_length": self.max_length,
            "latent_std": self.latent_std,
            "latent_tokens": self.latent_tokens,
            "encoder": self.encoder is not None,
        }
        (directory / "assets.json").write_text(json.dumps(facts, indent=1), "utf-8")
        if self.encoder is not None:
            self.encoder.save(directory)


def load_assets(directory: Path, device: str = "cpu") -> DataAssets:
    """What `DataAssets.save` wrote. The weights of a transformers encoder are found by its id and verified."""
    from safetensors.torch import load_file

    try:
        facts: dict[str, Any] = json.loads((directory / "assets.json").read_text("utf-8"))
        if facts["format"] != ASSETS_FORMAT:
            raise ValueError(f"format {facts['format']}, this version reads {ASSETS_FORMAT}")
        tokenizer = TextTokenizer.from_json((directory / "tokenizer.json").read_text("utf-8"), **facts["tokenizer"])
        mean = load_file(directory / "latent.safetensors")["mean"]
        encoder = load_encoder(directory, device) if facts["encoder"] else None
        return DataAssets(tokenizer, encoder, facts["max_length"], mean, facts["latent_std"], facts["latent_tokens"])
    except UsageError:
        raise
    except Exception as error:  # tokenizers and safetensors raise types of their own
        raise UsageError(
            f"{directory}: no usable data assets ({type(error).__name__}: {error}). The folder `assets` of a "
            "checkpoint, written by this version, is required."
        ) from None


def padded(tokens: Tokens, index: int, positions: Tensor, pad_id: int) -> tuple[Tensor, Tensor]:
    """(S,) int64 and (S,) bool, True at real tokens; `positions` is range(S)."""
    ids = tokens.row(index)
    row = torch.full_like(positions, pad_id)
    row[: len(ids)] = ids
    return row, positions < len(ids)


def padded_rows(tokens: Tokens, index: Tensor, positions: Tensor, pad_id: int) -> tuple[Tensor, Tensor]:
    """`padded` for the samples `index` (B,), all at once: (B, S) int64 and (B, S) bool."""
    starts = tokens.offsets[index].unsqueeze(-1)
    mask = positions < tokens.offsets[index + 1].unsqueeze(-1) - starts
    places = torch.where(mask, starts + positions, 0)
    return torch.where(mask, tokens.ids[places].long(), pad_id), mask


class TextLatentDataset:
    """Map-style. `texts[i]` is the whole text of sample i, before it was cut to `max_length`."""

    PADDED = ("tokens", "text_mask", "maskable")
    """Fields whose second dimension is the text's length."""

    def __init__(
        self, texts: Sequence[str], tokens: Tokens, table: LatentTable, assets: DataAssets, fingerprint: str
    ) -> None:
        self.texts = list(texts)
        self.table, self.fingerprint = table, fingerprint
        self._tokens = tokens
        self._positions, self._pad_id = torch.arange(assets.max_length), assets.tokenizer.pad_id
        self._maskable = assets.tokenizer.maskable()
        self._mean, self._std = assets.latent_mean, assets.latent_std
        self._lengths = tokens.offsets.diff().numpy()
        self._memory = BatchMemory()

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """tokens (S,) int64, text_mask (S,) bool, maskable (S,) bool, latent (L, Dz) float32."""
        row, mask = padded(self._tokens, index, self._positions, self._pad_id)
        return {
            "tokens": row,
            "text_mask": mask,
            "maskable": mask & self._maskable[row],
            "latent": (self.table.row(index) - self._mean) / self._std,
        }

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        """These samples stacked: tokens, text_mask, maskable (B, S) and latent (B, L, Dz). Latents are read in one
        copy, into memory that is used again when the batch is gone, and normalised there."""
        index = torch.tensor(indices)
        rows, mask = padded_rows(self._tokens, index, self._positions, self._pad_id)
        latent = self.table.rows(index, self._memory.empty(len(indices), *self.table.shape))
        latent.sub_(self._mean).div_(self._std)
        return {"tokens": rows, "text_mask": mask, "maskable": mask & self._maskable[rows], "latent": latent}

    def length(self, index: int) -> int:
        """Tokens of the text, padding not counted."""
        return int(self._lengths[index])

    def trim(self, batch: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
        """The batch with at most `length` tokens a text; the caller knows that none is longer."""
        return {k: v[:, :length].contiguous() if k in self.PADDED else v for k, v in batch.items()}


def statistics(table: LatentTable) -> tuple[Tensor, float]:
    """Mean (Dz,) over samples and latent tokens, and the one std of all centred entries. Accumulated in float64;
    reads every latent once."""
    count, total, squares = 0, torch.zeros(table.shape[1], dtype=torch.float64), 0.0
    for _, block in table.blocks():
        flat = block.double().flatten(0, 1)
        count, total, squares = count + len(flat), total + flat.sum(0), squares + float((flat**2).sum())
    mean = total / count
    variance = squares / (count * len(mean)) - float((mean**2).mean())
    if variance <= 1e-12 * max(1.0, float((mean**2).mean())):
        raise UsageError(
            f"--data.encoder: all {count} latents of the training split are equal, so they say nothing about "
            "their texts. Latents that differ are required: check the encoder, or the ready-made latents."
        )
    return mean.float(), variance**0.5


def dataset_fingerprint(texts: Sequence[str], table: LatentTable, assets: DataAssets) -> str:
    """sha256 of texts, tokenizer, length and latents: of the encoder's identity, or of ready-made latents' bytes."""
    digest = hashlib.sha256(f"{texts_hash(texts)} {assets.max_length} {assets.tokenizer.to_json()}".encode())
    if assets.encoder is not None:
        digest.update(assets.encoder.identity.encode())
    else:
        for _, block in table.blocks():
            digest.update(block.numpy().tobytes())
    return digest.hexdigest()

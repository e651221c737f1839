"""Tokenizer, latent encoder and scale that belong to trained weights: a run that starts from them keeps these.

A resume or an evaluation has those of its checkpoint, whatever ``--allow`` says. A new run from the weights of another
(``init_from``) takes them where it would otherwise fit its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel_train.checkpoints.run import WeightsAssets as WeightsAssets
from accel_train.config import UsageError
from accel_train.domains.models.vae import VaeReference
from accel_train.domains.text.dataset import DataAssets, load_assets, statistics
from accel_train.domains.text.encoders import LatentEncoder, TransformerEncoder
from accel_train.domains.text.latents.cache import LatentRows
from accel_train.domains.text.latents.sentence_modules import refuse_other_modules
from accel_train.domains.text.lengths import LengthEstimate, fit_length
from accel_train.domains.text.options import TRAINED, DataConfig
from accel_train.domains.text.shards.corpus import sampled_rows
from accel_train.domains.text.tokenizer import TextTokenizer, Tokens
from accel_train.store.run_file import experiment_options

OF_TRANSFORMER = ("pooling", "normalise", "max_length", "latent_dim")
"""Fields of an encoder that determine its latents, together with its files."""


@dataclass(frozen=True)
class TrainedAssets:
    """Assets and options that the weights a run starts from were trained with."""

    folder: Path
    """Folder ``assets`` beside the weights."""
    saved: DataAssets
    options: Mapping[str, Any]
    """Options of the run that trained the weights, by their names on the command line."""
    resumes: bool
    """False: a new run starts from the weights."""

    @property
    def place(self) -> Path:
        """The checkpoint or another directory with the weights."""
        return self.folder.parent

    def is_named_as_before(self, config: DataConfig) -> bool:
        """Return True for a resume that names the tokenizer the run began with."""
        return self.resumes and config.tokenizer == self.options.get("data.tokenizer", config.tokenizer)

    def refuse_other_options(self, config: DataConfig, names: Sequence[str], kept: str) -> None:
        """Raise `UsageError` for options that contradict the weights' own `kept`, such as their tokenizer.

        A new run may leave these options at their defaults.
        """
        defaults = {field.name: field.default for field in fields(config)}
        facts = {"vocab_size": self.saved.tokenizer.vocab_size, "latent_dim": len(self.saved.latent_mean)}
        if self.saved.encoder is not None:
            facts["normalise"] = self.saved.encoder.normalise
        for name in names:
            now = getattr(config, name)
            # Weights may come without the options of the run that trained them.
            was = self.options.get(f"data.{name}", facts.get(name, now))
            is_kept = now in (was, facts.get(name, was))
            if is_kept or (not self.resumes and now == defaults[name]):
                continue
            raise UsageError(
                f"--data.{name} {now}: {was} in {self.place}, and the {kept} that its weights were trained with is "
                f"kept {self._starts}. {self._remedy(f'--data.{name} {was}')}"
            )

    def refuse_other_pieces(self, name: str, tokenizer: TextTokenizer) -> None:
        """Raise `UsageError` for a tokenizer whose ids differ from those that the weights were trained with."""
        known = self.saved.tokenizer.pieces()
        given = tokenizer.pieces()
        other = sum(given.get(piece) != number for piece, number in known.items())
        special = self.saved.tokenizer.ids() != tokenizer.ids()
        if not other and len(known) == len(given) and not special:
            return
        differs = f"{other} of them have another id, or none," if other else "others are special"
        trained_on = self.options.get("data.tokenizer", TRAINED)
        raise UsageError(
            f"--data.tokenizer {name!r}: the weights of {self.place} know {len(known)} pieces by their ids, and "
            f"{differs} in this tokenizer, which has {len(given)}. The same ids are required {self._starts}. "
            f"{self._remedy(f'--data.tokenizer {trained_on}')}"
        )

    def refuse_other_latents(self, config: DataConfig, encoder: LatentEncoder | None, vae: VaeReference | None) -> None:
        """Raise `UsageError` for a resume with latents of another encoder or autoencoder."""
        if not self.resumes or self.has_latents_of(encoder, vae):
            return
        option, value = "data.encoder", config.encoder
        if vae is not None:
            option, value = "pictures.vae", vae.source
        elif encoder is None:
            option, value = "data.latents", str(config.latents)
        was = self.options.get(option) or "ready-made ones"
        raise UsageError(
            f"--{option} {value!r}: the weights of {self.place} were trained on latents of another encoder or of "
            f"different files of it ({was}). The same latents are required {self._starts}. "
            f"{self._remedy('the encoder, the autoencoder or the latents used in training')}"
        )

    def has_latents_of(self, encoder: LatentEncoder | None, vae: VaeReference | None) -> bool:
        """Return True if latents come from the encoder of the training. Ready-made ones are assumed to."""
        saved = self.saved.encoder
        if isinstance(encoder, TransformerEncoder) and isinstance(saved, TransformerEncoder):
            return encoder is saved or _is_same(encoder, saved)
        if encoder is not None or saved is not None:
            return encoder is saved
        before = self.saved.vae
        # The hash of the config depends on the version of diffusers.
        return (before and before.sha256) == (vae and vae.sha256)

    @property
    def _starts(self) -> str:
        if self.resumes:
            return "in a resume or an evaluation, whatever --allow and --data.changed say"
        return "in a run that starts from them"

    def _remedy(self, back: str) -> str:
        if self.resumes:
            return f"Give {back}, or another --output_dir for another model."
        return f"Give {back}, or leave the option out to take that of the weights, or train without --init_from."


def trained_assets(weights: WeightsAssets | None, device: str) -> TrainedAssets | None:
    """Read the assets that the initial weights were trained with. None for random weights, or without assets."""
    if weights is None:
        return None
    options = experiment_options(weights.folder.parent)
    return TrainedAssets(weights.folder, load_assets(weights.folder, device), options, weights.resumes)


def refuse_declared_otherwise(trained: TrainedAssets | None, encoder: TransformerEncoder) -> None:
    """Raise `UsageError` for an encoder that declares other latents than those computed here.

    It is not refused for weights that were trained on the latents computed here.
    """
    if trained is None or not trained.has_latents_of(encoder, None):
        refuse_other_modules(encoder)


class LatentScale(NamedTuple):
    """Normalisation of latents."""

    mean: Tensor
    """(Dz,)"""
    std: float
    notices: list[str]


def resolve_scale(
    trained: TrainedAssets | None, table: LatentRows, encoder: LatentEncoder | None, vae: VaeReference | None
) -> LatentScale:
    """Return the scale of the weights, or that of the data if its latents are new to them.

    Reads all latents, except in a resume.
    """
    if trained is not None and trained.resumes:
        return LatentScale(trained.saved.latent_mean, trained.saved.latent_std, [])
    mean, std = statistics(table)
    if trained is None:
        return LatentScale(mean, std, [])
    saved = trained.saved
    if len(mean) != len(saved.latent_mean) or not trained.has_latents_of(encoder, vae):
        told = f"init_from: the weights of {trained.place} were trained on latents of another encoder; mean and std"
        return LatentScale(mean, std, [f"{told} are those of these latents"])
    told = f"init_from: mean and std of the latents are those used to train the weights of {trained.place}"
    return LatentScale(
        saved.latent_mean, saved.latent_std, [f"{told}: std {saved.latent_std:.4g} ({std:.4g} of these latents alone)"]
    )


def resolve_length(
    trained: TrainedAssets | None, table: LatentRows, tokens: Tokens, scale: LatentScale
) -> LengthEstimate:
    """Return the length estimate of a resumed run, or fit one to the training texts."""
    if trained is not None and trained.resumes:
        return trained.saved.length
    # With shards, only a sample of the texts is tokenised.
    lengths = tokens.offsets.diff()
    rows = torch.from_numpy(sampled_rows(len(table), len(lengths)))
    return fit_length(table, lengths, scale.mean, scale.std, rows)


def taken_notices(
    trained: TrainedAssets | None, tokenizer: TextTokenizer, encoder: LatentEncoder | None
) -> Iterator[str]:
    """Yield a notice about what a new run takes over together with the weights of another."""
    if trained is None or trained.resumes:
        return
    taken: list[str] = []
    if tokenizer is trained.saved.tokenizer:
        taken.append(f"the tokenizer of {tokenizer.vocab_size} pieces")
    if encoder is not None and encoder is trained.saved.encoder:
        taken.append("the latent encoder")
    if taken:
        yield (
            f"init_from: uses {' and '.join(taken)} of {trained.place} instead of new ones, because its weights were "
            "trained with them"
        )


def _is_same(encoder: TransformerEncoder, saved: TransformerEncoder) -> bool:
    if any(getattr(encoder, name) != getattr(saved, name) for name in OF_TRANSFORMER):
        return False
    return saved.weights_hash == encoder.files_hash

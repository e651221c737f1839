"""Pipeline of a model of text and latents: text from a latent, the latent of a text, and both."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from accel_train import rng
from accel_train.config import UsageError, expand_path
from accel_train.domains.diffusion.latents import LatentDiffusionConfig
from accel_train.domains.diffusion.masked_text import TextDiffusionConfig
from accel_train.domains.models.mmdit import MultimodalMMDiT, MultimodalMMDiTConfig
from accel_train.domains.text.both_ways import (
    Batch,
    BothWays,
    EvaluationConfig,
    latents_from_tokens,
    tokens_from_latents,
)
from accel_train.domains.text.dataset import DataAssets
from accel_train.domains.text.encoders import TransformerEncoder
from accel_train.domains.text.latents import asked
from accel_train.domains.text.latents.drawn import (
    about_use,
    decoded,
    image,
    picture_grid,
    refuse_text_of_pictures,
    units_of_pictures,
)
from accel_train.domains.text.latents.files import checked
from accel_train.domains.text.latents.given_pictures import read_pictures
from accel_train.domains.text.modes import (
    ModeConfig,
    Part,
    learned_conditions,
    refuse_never_without_text,
    refuse_unlearned_guidance,
)
from accel_train.domains.text.options import TextLatentOptions
from accel_train.domains.text.trained_model import given_texts, load_both_ways, read_settings, refuse_moved
from accel_train.pipeline import Example, describe, listed

if TYPE_CHECKING:
    from PIL import Image

    from accel_train.domains.text.latents.given_pictures import Given

BATCH = 64
"""Number of prompts per forward."""
EXAMPLE_LENGTH = 8
"""Tokens of an example's text. With longer ones, its logits would take more space than the weights."""
HUB_DATASET = re.compile(r"[\w.-]+/[\w.-]+")
UNITS = {
    "latents": "as the encoder gives them; the model reads (latents - mean) / std",
    "time": "0 is clean, 1 is pure noise or all tokens masked",
}


class TextLatentSamples(NamedTuple):
    """Samples for a list of prompts."""

    texts: list[str] | None
    """One text per prompt. None if prompts are texts and the model has no encoder for them or has not learned l2t."""
    latents: Tensor | None
    """(B, L, Dz) in the encoder's units, on the CPU. None if the model has not learned t2l."""


class TextLatentPipeline:
    """Text sampled from latents (l2t), and latents sampled from text (t2l).

    Latents are in the units of their encoder. Noise is keyed by seed and prompt: an answer does not depend on the
    other prompts of a call.
    """

    recipe: ClassVar[str] = "mmdit"
    tag: ClassVar[str | None] = "text-generation"
    usage: ClassVar[str] = 'print(pipeline("A text to say in other words.").texts)'
    standalone: tuple[Any, ...] | ModuleType | None = (
        MultimodalMMDiT,
        MultimodalMMDiTConfig,
        tokens_from_latents,
        latents_from_tokens,
    )
    options: ClassVar[type] = TextLatentOptions

    def __init__(
        self,
        model: MultimodalMMDiT,
        both: BothWays,
        assets: DataAssets,
        modes: ModeConfig,
        device: str = "cpu",
    ) -> None:
        self.model = model
        self.both = both
        self.assets = assets
        self.device = device
        self.modes = modes
        """Modes that the model was trained in."""
        self.conditions: set[Part] = learned_conditions(modes)
        """Conditions the model has learned to sample from."""

    @classmethod
    def from_directory(cls, directory: Path, device: str = "cpu") -> TextLatentPipeline:
        """Load a checkpoint or an export. Raises ``UsageError`` if its settings or assets are missing or damaged."""
        both, assets = load_both_ways(directory, device)
        assert isinstance(both.model, MultimodalMMDiT)
        return cls(both.model, both, assets, read_settings(directory).modes, device)

    def with_sampling(
        self, *, steps: int | None = None, temperature: float | None = None, guidance: float | None = None
    ) -> TextLatentPipeline:
        """Return a pipeline of the same model that samples with other settings. None keeps a setting.

        ``steps`` is the number of forward passes per sample, ``temperature`` that of text tokens, and ``guidance`` the
        strength of the condition. Raises ``UsageError`` for guidance that the model has not been trained for.
        """
        if guidance is not None:
            refuse_unlearned_guidance(self.modes, {"guidance": guidance})
        both = self.both.with_sampling(steps=steps, temperature=temperature, guidance=guidance)
        return TextLatentPipeline(self.model, both, self.assets, self.modes, self.device)

    def with_models(self, *, encoder: str | None = None, vae: str | None = None) -> TextLatentPipeline:
        """Return this pipeline with the text encoder or the autoencoder of its training at another place.

        Each is a folder or a Hub id. If its files are not those of the training, they are refused on first use. Raises
        ``UsageError`` for a model that uses no such encoder or autoencoder.
        """
        assets = self.assets
        if encoder is not None:
            if not isinstance(assets.encoder, TransformerEncoder):
                raise UsageError(f"encoder {encoder!r}: this model uses no text encoder from a folder; leave it out")
            assets = replace(assets, encoder=replace(assets.encoder, name=encoder, revision=None))
        if vae is not None:
            if assets.vae is None:
                raise UsageError(f"vae {vae!r}: this model uses no autoencoder; leave it out")
            assets = replace(assets, vae=replace(assets.vae, source=vae, revision=None))
        return TextLatentPipeline(self.model, self.both, assets, self.modes, self.device)

    def __call__(
        self,
        texts: str | Sequence[str] | None = None,
        latents: Tensor | None = None,
        *,
        seed: int = 0,
        length: int | None = None,
    ) -> TextLatentSamples:
        """Sample from texts in both directions, or text from ``latents``.

        From texts, the result's ``latents`` are sampled from each text, and its ``texts`` from the encoder's latent of
        each. From latents, its ``latents`` are those given. Raises ``UsageError`` for both or neither.
        """
        if (texts is None) == (latents is None):
            raise UsageError("texts and latents: give one of the two to sample from")
        if latents is not None:
            return TextLatentSamples(
                self.texts_from_latents(latents, seed=seed, length=length), checked(latents, self.assets.latent_shape)
            )
        prompts = [] if texts is None else listed(texts)
        rewritten = None
        sampled = None
        if self.assets.encoder is not None and "latent" in self.conditions:
            rewritten = self.texts_from_texts(prompts, seed=seed, length=length)
        if "text" in self.conditions:
            sampled = self.latents_from_texts(prompts, seed=seed)
        return TextLatentSamples(rewritten, sampled)

    def encode(self, texts: str | Sequence[str]) -> Tensor:
        """Return the encoder's latents (B, L, Dz) of texts. Raises ``UsageError`` for a model without an encoder."""
        if self.assets.encoder is None:
            refuse_text_of_pictures(self.model.config)
        refuse_moved(self.assets)
        # One at a time: a batch is padded, which changes the last bits of some encoders.
        return torch.cat([self.assets.denormalise(self.assets.encode([text])) for text in listed(texts)])

    def texts_from_latents(self, latents: Tensor, *, seed: int = 0, length: int | None = None) -> list[str]:
        """Sample a text for each of the latents (B, L, Dz), or (B, Dz) if L is 1.

        ``length`` is in tokens, None to estimate it from each latent.
        """
        given = checked(latents, self.assets.latent_shape)
        return self._sample_texts(given, [latent.numpy().tobytes() for latent in given], seed, length)

    def texts_from_texts(self, texts: str | Sequence[str], *, seed: int = 0, length: int | None = None) -> list[str]:
        """Encode each text and sample a text from its latent: ideally the same content in other words."""
        given = given_texts(texts, self.assets)
        return self._sample_texts(self.encode(given), [text.encode() for text in given], seed, length)

    def latents_from_texts(self, texts: str | Sequence[str], *, seed: int = 0) -> Tensor:
        """Sample a latent for each text: (B, L, Dz) on the CPU."""
        self._refuse_unlearned("text")
        given = given_texts(texts, self.assets)
        sampled: list[Tensor] = []
        for start in range(0, len(given), BATCH):
            part = given[start : start + BATCH]
            batch = self.assets.tokenise(part) | self._keys([text.encode() for text in part])
            batch["latent"] = torch.zeros(len(part), *self.assets.latent_shape)
            both = replace(self.both, seed=seed)
            latents = both.sample_latents({name: values.to(self.device) for name, values in batch.items()})
            # Moved to the CPU batch by batch, so that the device holds only one batch.
            sampled.append(self.assets.denormalise(latents.float().cpu()))
        return torch.cat(sampled)

    def draw(self, captions: str | Sequence[str], *, seed: int = 0) -> list[Image.Image]:
        """Draw a picture for each caption, with a model of captions and pictures. '' draws without a caption.

        As in training, spaces and line breaks count as single spaces. Raises ``UsageError`` for '' if the model has not
        learned to draw without a caption.
        """
        grid = picture_grid(self.model.config, "prompt")
        given = asked.captions(captions)
        latents = torch.empty(len(given), *self.assets.latent_shape)
        with_caption = torch.tensor([caption != "" for caption in given], dtype=torch.bool)
        if not with_caption.all():
            latents[~with_caption] = self._latent_without_text(seed)
        if with_caption.any() or not given:
            latents[with_caption] = self.latents_from_texts([caption for caption in given if caption], seed=seed)
        pictures = decoded(latents, grid, self.assets.vae, self.device)
        return [image(picture) for picture in pictures]

    def caption(self, pictures: Given | Iterable[Given], *, seed: int = 0, length: int | None = None) -> list[str]:
        """Sample a caption for each picture, a Pillow image or the path of a file.

        Noise is keyed by seed and pixels. ``length`` is in tokens, None to estimate it from each picture. Raises
        ``UsageError`` for a file that cannot be used, and for a model that has not learned pictures.
        """
        picture_grid(self.model.config, "picture")
        self._refuse_unlearned("latent")
        pixels, latents = self._read_pictures(pictures)
        return self._sample_texts(latents, [one.numpy().tobytes() for one in pixels], seed, length)

    def encode_pictures(self, pictures: Given | Iterable[Given]) -> Tensor:
        """Return the latents (B, L, Dz) of pictures, the same as training stores for them and ``caption`` reads."""
        return self._read_pictures(pictures)[1]

    def sample(self, options: TextLatentOptions) -> list[str]:
        """Sample with the options of ``accel-train sample``, and return the lines to print."""
        return asked.sample(self, options)

    def examples(self) -> list[Example]:
        """Return example forwards, with and without padding and noise on either side, and a sample per direction."""
        config = self.model.config
        rows = 3
        keys = rng.sample_keys(0, "example", 0, torch.arange(rows))
        length = min(config.max_text_length, EXAMPLE_LENGTH)
        draws = rng.uniform(rng.sample_keys(0, "example/text", 0, torch.arange(rows)), (length,))
        tokens = (draws * config.vocabulary_size).long()
        lengths = torch.tensor([length, max(1, length // 2), 1])
        arguments: dict[str, Any] = {
            "tokens": tokens,
            "latents": rng.normal(keys, (config.max_latent_length, config.latent_dim)),
            # Each modality is noisy, clean and absent once.
            "text_time": torch.tensor([0.3, 0.0, 1.0]),
            "latent_time": torch.tensor([0.7, 1.0, 0.0]),
        }
        mask = torch.arange(length) < lengths[:, None]
        texts = {"tokens": tokens, "text_mask": mask, "maskable": mask, "sample": torch.arange(rows), "steps": 3}
        return [
            Example("padded texts", arguments | {"text_mask": mask}),
            Example("whole texts", arguments | {"text_mask": None}),
            Example("text from latents", texts | {"latents": arguments["latents"]}, tokens_from_latents),
            Example("latents from text", texts, latents_from_tokens),
        ]

    # ------------------------------------------------------------------------------------------------------------ parts
    def _read_pictures(self, pictures: Given | Iterable[Given]) -> tuple[Tensor, Tensor]:
        """Return the pixels (B, H, W, 3) uint8 of pictures, and their latents (B, L, Dz)."""
        rows, _ = picture_grid(self.model.config, "picture")
        return read_pictures(pictures, rows, self.assets.latent_shape[1], self.assets.vae, self.device)

    def _latent_without_text(self, seed: int) -> Tensor:
        """Sample a latent without a text, as an evaluation does: (1, L, Dz) on the CPU."""
        self._refuse_unlearned("text")
        refuse_never_without_text(self.modes)
        batch = self._blank(torch.tensor([self.assets.length.typical()])) | self._keys([b""])
        batch["latent"] = torch.zeros(1, *self.assets.latent_shape)
        # Without a condition, guidance changes nothing but doubles the cost.
        both = replace(self.both, seed=seed, latent=replace(self.both.latent, guidance=1.0))
        on_device = {name: values.to(self.device) for name, values in batch.items()}
        return self.assets.denormalise(both.sample_latents(on_device, with_text=False).float().cpu())

    def _sample_texts(self, latents: Tensor, prompts: Sequence[bytes], seed: int, length: int | None) -> list[str]:
        """Sample from latents in the encoder's units, with noise keyed by ``prompts``."""
        self._refuse_unlearned("latent")
        normalised = self.assets.normalise(latents)
        lengths = self._lengths(normalised, length)
        both = replace(self.both, seed=seed)
        texts: list[str] = []
        for start in range(0, len(prompts), BATCH):
            rows = slice(start, start + BATCH)
            batch = self._blank(lengths[rows]) | self._keys(prompts[rows]) | {"latent": normalised[rows]}
            tokens = both.sample_text({name: values.to(self.device) for name, values in batch.items()})
            texts += [self.assets.tokenizer.decode(row) for row in tokens.cpu()]
        return texts

    def _lengths(self, normalised: Tensor, length: int | None) -> Tensor:
        """Return the number of tokens of each text, special ones included: (B,) int64."""
        frame = sum(map(len, self.assets.tokenizer.frame()))
        if length is not None:
            if not frame < length <= self.assets.max_length:
                raise UsageError(
                    f"length {length}: {frame + 1} to {self.assets.max_length} tokens are possible with this model; "
                    "give a number in this range, or leave it out"
                )
            return torch.full((len(normalised),), length)
        return self.assets.length(normalised).clamp(frame + 1, self.assets.max_length)

    def _blank(self, lengths: Tensor) -> Batch:
        """Return texts (B, S) to be filled, between the tokenizer's special tokens. S is always the longest length."""
        before, after = self.assets.tokenizer.frame()
        size = self.assets.max_length
        # The same length in all batches: a shorter one would change the last bits of attention.
        tokens = torch.full((len(lengths), size), self.assets.tokenizer.pad_id)
        place = torch.arange(size)
        mask = place < lengths[:, None]  # (B, S)
        maskable = (place >= len(before)) & (place < lengths[:, None] - len(after))
        tokens[:, : len(before)] = torch.tensor(before, dtype=torch.int64)
        for row, length in zip(tokens, lengths.tolist(), strict=True):
            row[length - len(after) : length] = torch.tensor(after, dtype=torch.int64)
        tokens[maskable] = self.assets.tokenizer.mask_id
        return {"tokens": tokens, "text_mask": mask, "maskable": maskable}

    def _keys(self, prompts: Sequence[bytes]) -> Batch:
        """Key the noise of each row by its prompt: (B,) each."""
        # Not Python's hash, which differs from process to process.
        digests = [hashlib.blake2b(prompt, digest_size=8).digest() for prompt in prompts]
        numbers = [int.from_bytes(digest, "little", signed=True) for digest in digests]
        return {"sample": torch.tensor(numbers), "weight": torch.ones(len(prompts))}

    def _refuse_unlearned(self, condition: Part) -> None:
        if condition not in self.conditions:
            asked = "text from a latent (l2t)" if condition == "latent" else "a latent from its text (t2l)"
            raise UsageError(
                f"{asked}: this model was never trained for it, according to modes in the objective of its "
                "config.json; sample the other direction, or train with --modes.mode mixed"
            )


def describe_model(
    shape: MultimodalMMDiTConfig,
    modes: ModeConfig,
    text: TextDiffusionConfig,
    latent: LatentDiffusionConfig,
    evaluation: EvaluationConfig,
    seed: int,
    assets: DataAssets,
    path: str,
) -> dict[str, Any]:
    """Return config.json of a checkpoint: architecture, objective, samplers, normalisation, units.

    ``path`` is ``data.path``.
    """
    datasets = [path] if HUB_DATASET.fullmatch(path) and not expand_path(path).exists() else []
    conditions = learned_conditions(modes)
    return describe(
        TextLatentPipeline,
        shape,
        objective={"modes": modes, "text": text, "latent": latent},
        sampler={
            "text": evaluation.text,
            "latent": evaluation.latent,
            "seed": seed,
            "mask_id": assets.tokenizer.mask_id,
        },
        normalisation={"mean": assets.latent_mean.tolist(), "std": assets.latent_std},
        units=UNITS | units_of_pictures(shape, assets),
        card={"datasets": datasets, **about_use(shape, assets, conditions, path)},
    )

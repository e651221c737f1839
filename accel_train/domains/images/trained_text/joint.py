"""A denoiser and its text encoders as one module, so that a strategy prepares, shards and reduces both together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accel_train.domains.images.pipelines import unets
from accel_train.domains.images.pipelines.family import Conditioning, Predicting

TOKENIZERS = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
"""Tokenizers of a pipeline, by text encoder."""
Encoders = Mapping[str, Any]


class Way(NamedTuple):
    """Steps of a family from tokens to a prediction."""

    embed: Callable[[Encoders, Conditioning], dict[str, Tensor]]
    """(text encoders, tokens (B, L) of each) -> conditioning, as the pipeline's own encode_prompt computes it."""
    predict: Callable[[nn.Module, Predicting], Tensor]
    skips_last: bool
    """True if the first encoder's last layer has no influence on the prediction."""


def _embed(encoders: Encoders, tokens: Conditioning) -> dict[str, Tensor]:
    return {"prompt": encoders["text_encoder"](tokens["text_encoder"])[0]}


def _embed_xl(encoders: Encoders, tokens: Conditioning) -> dict[str, Tensor]:
    hidden: list[Tensor] = []
    pooled: list[Tensor] = []
    for name, encoder in encoders.items():
        found = encoder(tokens[name], output_hidden_states=True)
        # XL reads the layer before the last one.
        hidden.append(found.hidden_states[-2])
        pooled.append(found[0])
    return {"prompt": torch.cat(hidden, -1), "pooled": pooled[-1]}


WAYS = {
    unets.STABLE_DIFFUSION.name: Way(_embed, unets.STABLE_DIFFUSION.predict, skips_last=False),
    unets.STABLE_DIFFUSION_XL.name: Way(_embed_xl, unets.STABLE_DIFFUSION_XL.predict, skips_last=True),
}
"""Supported families, by name."""


class DenoiserWithText(nn.Module):
    """A denoiser that encodes its captions itself. Parts have the names of the pipeline's components.

    In a pipeline it stands in the denoiser's place.
    """

    def __init__(self, family: str, component: str, denoiser: nn.Module, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.way = WAYS[family]
        self.component = component
        self.add_module(component, denoiser)
        for name, encoder in encoders.items():
            self.add_module(name, encoder)
        self.encoder_names = tuple(encoders)

    @property
    def denoiser(self) -> Any:
        return self.get_submodule(self.component)

    @property
    def encoders(self) -> dict[str, Any]:
        """The text encoders, by the name of their component."""
        return {name: self.get_submodule(name) for name in self.encoder_names}

    def forward(
        self, *given: Any, tokens: Conditioning | None = None, sizes: Tensor | None = None, **named: Any
    ) -> Any:
        """Predict from (noisy, timestep) and the tokens of captions, (B, L) int64 for each text encoder.

        Given only tokens, it returns their embeddings. Without tokens, it is the denoiser's own forward on embeddings.
        """
        if tokens is None:
            return self.denoiser(*given, **named)
        conditioning = self.way.embed(self.encoders, tokens)
        # For pictures of an evaluation, whose sampler calls the denoiser many times with the same embeddings.
        if not given:
            return conditioning
        noisy, timestep = given
        assert sizes is not None
        # Guidance is not read: UNets have no input for it.
        inputs = Predicting(noisy, timestep, conditioning, sizes, self.config, guidance=1.0)
        return self.way.predict(self.denoiser, inputs)

    # Attributes that pipelines read from a denoiser.
    @property
    def config(self) -> Any:
        return self.denoiser.config

    @property
    def dtype(self) -> torch.dtype:
        return self.denoiser.dtype

    @property
    def device(self) -> torch.device:
        return self.denoiser.device

    @property
    def add_embedding(self) -> Any:
        return self.denoiser.add_embedding


def denoiser_of(model: nn.Module) -> nn.Module:
    """Return the denoiser of a model with text encoders, or the model itself."""
    return model.denoiser if isinstance(model, DenoiserWithText) else model


def predict(model: nn.Module, inputs: Predicting) -> Tensor:
    """Predict with a prepared ``DenoiserWithText``, conditioned on tokens."""
    return model(inputs.noisy, inputs.timestep, tokens=inputs.conditioning, sizes=inputs.sizes)


def tokenise(pipeline: Any, captions: Sequence[str], length: int | None) -> dict[str, Tensor]:
    """Return the tokens of captions, (B, L) int64 for each text encoder of the pipeline, as it pads them."""
    found: dict[str, Tensor] = {}
    for name, tokenizer_name in TOKENIZERS.items():
        tokenizer = getattr(pipeline, tokenizer_name, None)
        if tokenizer is None or getattr(pipeline, name, None) is None:
            continue
        # All to one length, as the pipelines do, so that batches need no mask.
        longest = tokenizer.model_max_length
        encoded = tokenizer(
            list(captions), padding="max_length", max_length=longest, truncation=True, return_tensors="pt"
        )
        found[name] = encoded.input_ids
    return found

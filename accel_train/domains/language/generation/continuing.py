"""Continue tokens with a causal language model, by draws that are functions of their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accel_train import rng

TEMPERATURE = 0.8


@dataclass(frozen=True)
class Drawing:
    """Settings and key of the draws of tokens. The same key gives the same numbers on any device."""

    seed: int
    stream: str
    sample: int
    """Number of the text, a signed 64-bit integer."""
    temperature: float
    """0: always the most likely token."""
    top_p: float = 1.0
    """Draw from the most likely tokens whose probabilities add up to it."""


class KeyedDraw:
    """Logits processor that leaves only the token drawn by the key of each row."""

    def __init__(self, drawing: Drawing, prompt_length: int) -> None:
        self.drawing = drawing
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores (B, V) for ``input_ids`` (B, S), -inf except for one token of each row."""
        # Counted from the end of the prompt: each new token has a draw of its own.
        position = input_ids.shape[1] - self.prompt_length
        sample = torch.full((len(scores),), self.drawing.sample, device=scores.device)
        keys = rng.sample_keys(self.drawing.seed, self.drawing.stream, position, sample)
        drawn = rng.categorical(keys, scores.double().softmax(-1))
        ruled_out = torch.full_like(scores, -torch.inf)
        return ruled_out.scatter_(1, drawn[:, None], 0.0)


def continue_tokens(
    model: nn.Module,
    prompt: Sequence[int],
    drawing: Drawing,
    max_new_tokens: int,
    *,
    pad_id: int | None,
    synced: bool = False,
) -> list[int]:
    """Return the tokens after ``prompt``, up to the end of the text or ``max_new_tokens``, the end included.

    ``model`` is a transformers model in eval mode. Its generation_config.json sets end tokens and penalties, and
    ``drawing`` alone the draws. With ``synced``, a process of a sharded model that is done computes on with the others.
    """
    generator: Any = model
    device = next(model.parameters()).device
    ids = torch.tensor([list(prompt)], device=device)
    with torch.no_grad():
        written = generator.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            pad_token_id=pad_id,
            use_cache=True,
            synced_gpus=synced,
            # The processor draws, and the token that it leaves is the most likely one. torch's own generators give
            # other numbers on a GPU than on the CPU.
            do_sample=False,
            logits_processor=_processors(drawing, len(prompt)),
        )
    return written[0, len(prompt) :].tolist()


def example_tokens(shape: tuple[int, int], vocabulary: int) -> Tensor:
    """Return drawn tokens, the same in every process. ``shape`` is (B, S)."""
    rows, length = shape
    draws = rng.uniform(rng.sample_keys(0, "example", 0, torch.arange(rows)), (length,))
    return (draws * vocabulary).long()


def _processors(drawing: Drawing, prompt_length: int) -> Any:
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

    processors: Any = LogitsProcessorList()
    if drawing.temperature > 0:
        processors.append(TemperatureLogitsWarper(drawing.temperature))
        if drawing.top_p < 1:
            processors.append(TopPLogitsWarper(drawing.top_p))
        processors.append(KeyedDraw(drawing, prompt_length))
    return processors

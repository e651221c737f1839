"""Continuations of held-out texts, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from accel_train.config import NonNegativeFloat, NonNegativeInt, PositiveInt
from accel_train.domains.language import pretrained
from accel_train.domains.language.generation import continuing
from accel_train.domains.language.prepare import LanguageData
from accel_train.domains.language.tokens.shards import TokenDataset
from accel_train.metrics import evaluation
from accel_train.metrics.recorder import quoted, write_page_of_step


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out perplexity and sampled texts."""

    every: NonNegativeInt = 0
    """Steps between evaluations. 0: only at the end."""
    samples: PositiveInt = 256
    """Maximum number of held-out rows."""
    batch_size: PositiveInt | None = None
    """Rows per process and forward. None: as many as in a micro-batch, and so no more memory than training takes."""
    shown: NonNegativeInt = 4
    """Held-out texts to continue in report/samples.md."""
    prompt_tokens: PositiveInt = 6
    """Prompt length of a plain text, in tokens. The prompt of a chat or a pair is the part that is not trained."""
    max_new_tokens: PositiveInt = 48
    """Maximum number of sampled tokens, or fewer where the model has no more positions."""
    temperature: NonNegativeFloat = continuing.TEMPERATURE
    """Sampling temperature. 0: always the most likely token."""

    def due(self, done: int, max_steps: int) -> bool:
        """Return True if an evaluation is due after ``done`` steps."""
        return done == max_steps or (self.every > 0 and done % self.every == 0)


class Sample(NamedTuple):
    """One held-out text: its prompt, the model's continuation, and the original one."""

    prompt: str
    written: str
    original: str


def write(
    model: nn.Module, data: LanguageData, options: EvaluationConfig, seed: int, *, processes: int
) -> list[Sample]:
    """Continue the first held-out texts. Every process calls it with its unwrapped model, inside ``evaluating``.

    The draws are a function of the seed and the number of the text, so all processes write the same.
    """
    tokenizer = data.tokenizer
    positions = pretrained.positions_of(model.config)
    samples: list[Sample] = []
    for number in range(min(options.shown, data.heldout.texts)):
        evaluation.stopping_point()
        prompt, rest = _divide(data.heldout, number, options.prompt_tokens)
        drawing = continuing.Drawing(seed, "generate", number, options.temperature)
        length = options.max_new_tokens
        if positions is not None:
            # At least one position is left: a row fits, and the prompt is not all of it.
            length = min(length, positions - len(prompt))
        # A process of a sharded model that ended before the others would leave them waiting.
        new = continuing.continue_tokens(
            model, prompt, drawing, length, pad_id=tokenizer.pad_token_id, synced=processes > 1
        )
        written, original = (tokenizer.decode(part, skip_special_tokens=True) for part in (new, rest))
        samples.append(Sample(_shown(prompt, tokenizer), written, original))
    return samples


def _divide(heldout: TokenDataset, number: int, prompt_tokens: int) -> tuple[list[int], list[int]]:
    """Split the tokens of a text into the prompt and what follows, in a chat up to the end of its answer."""
    tokens, trained = heldout.text(number)
    first = int(trained.int().argmax())
    # The first token is never trained, so plain text begins to be trained at the second.
    given = prompt_tokens if first <= 1 else first
    # At least one token is left for the text's own continuation.
    given = min(given, len(tokens) - 1)
    behind = (number for number in range(given + 1, len(tokens)) if not trained[number])
    return tokens[:given].tolist(), tokens[given : next(behind, len(tokens))].tolist()


def _shown(prompt: Sequence[int], tokenizer: Any) -> str:
    """Return a prompt with the special tokens that divide the turns of a chat, but without the begin token."""
    begins = prompt[:1] == [tokenizer.bos_token_id]
    return tokenizer.decode(prompt[begins:])


def report(directory: Path, samples: Sequence[Sample], step: int) -> None:
    """Write ``samples.md`` on the main process, and keep it by step. A write error is logged as a warning."""
    lines = ["# Continuations of held-out texts", ""]
    for number, sample in enumerate(samples, 1):
        lines += [f"## {number}", ""]
        lines += [f"- given: {quoted(sample.prompt)}", f"- written by the model: {quoted(sample.written)}"]
        lines += [f"- the text itself: {quoted(sample.original)}", ""]
    write_page_of_step(directory, "samples", lines, step)

"""The prepared model: its logits, and what a loss or a metric takes from them, all at once or by chunks of tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accel_train.config import UsageError
from accel_train.precision import Precision, dtype_of

MANY_BYTES = 4 * 2**30
"""Logits that take more, with their gradient, are worth a notice."""
OfTokens = Callable[[Tensor, Tensor], Tensor]
"""Values (N, ...) of tokens from their logits (N, V) and targets (N,)."""


@dataclass(frozen=True)
class LanguageModel:
    """The prepared model, called with the inputs that its attention and the packing need."""

    module: nn.Module
    packing: bool
    attention: str
    loss_chunk: int = 0
    """Tokens per chunk, if ``by_chunks`` was applied to the module. 0: all tokens at once."""

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits (B, S, V) of a batch of rows. Texts packed into one row do not see each other.

        Padding is at the end of a row and needs no mask: no token sees a later one.
        """
        return self.module(**self._inputs(batch)).logits.reshape(*batch["input_ids"].shape, -1)

    def of_tokens(self, batch: Mapping[str, Tensor], expected: Tensor, values: OfTokens) -> Tensor:
        """Return values (B, S, ...) of the tokens of a batch, from their logits and targets (B, S)."""
        if self.loss_chunk:
            found: Tensor = self.module(**self._inputs(batch), expected=expected, values=values)
        else:
            found = values(self.logits(batch).flatten(0, 1), expected.flatten())
        return found.unflatten(0, expected.shape)

    def _inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        ids = batch["input_ids"]
        named: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if self.packing:
            named["position_ids"] = batch["position_ids"]
            if "flash" in self.attention:
                # The kernel for varying lengths takes one row: all rows one after another.
                named["input_ids"] = ids.reshape(1, -1)
                named["position_ids"] = named["position_ids"].reshape(1, -1)
        return named


def by_chunks(model: nn.Module, tokens: int) -> None:
    """Let a model's forward compute values for ``tokens`` tokens at a time, for ``LanguageModel.of_tokens``.

    The logits of a chunk exist only while its values are computed, and again while the backward recomputes them. With
    a vocabulary of 152k and 16k tokens in bf16, all logits and their gradients are 10 GB. Without ``values`` the
    forward is as before.

    Raises ``UsageError`` for a model whose blocks cannot be told from its head.
    """
    plain: Any = model
    decoder = plain.get_decoder()
    if decoder is None or decoder is model:
        raise UsageError(
            f"--model.loss_chunk {tokens}: {type(model).__name__} does not say which of its modules come before the "
            "head (get_decoder); give 0"
        )
    whole = plain.forward

    @functools.wraps(whole)
    def forward(*args: Any, expected: Tensor | None = None, values: OfTokens | None = None, **named: Any) -> Any:
        if expected is None or values is None:
            return whole(*args, **named)
        found = decoder(*args, **named)
        kind = type(found)

        def of_chunk(states: Tensor, targets: Tensor) -> Tensor:
            # Everything that the model does after its blocks, such as scaling or capping logits.
            with _standing_in(decoder, kind(last_hidden_state=states.unsqueeze(0))):
                # Any ids will do, because the output of the blocks is already known.
                logits = whole(input_ids=torch.zeros_like(targets[None]), use_cache=False).logits.squeeze(0)
            return values(logits, targets)

        pairs = zip(found[0].flatten(0, 1).split(tokens), expected.flatten().split(tokens), strict=True)
        # Nothing after the blocks draws random numbers.
        again = functools.partial(checkpoint, of_chunk, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([again(*pair) for pair in pairs])

    plain.forward = forward


def notices(model: nn.Module, loss_chunk: int, tokens: int, precision: Precision) -> list[str]:
    """Return a notice if the logits of a micro-batch of ``tokens`` tokens take much memory."""
    plain: Any = model
    vocabulary = plain.config.get_text_config().vocab_size
    # Their gradient is as large.
    size = 2 * tokens * vocabulary * dtype_of(precision).itemsize
    if loss_chunk or size <= MANY_BYTES:
        return []
    return [
        f"the logits of a micro-batch, up to {tokens:,} tokens, take {size / 2**30:.1f} GiB with their gradient "
        f"(vocabulary of {vocabulary:,}); with --model.loss_chunk 1024 those of 1,024 tokens at a time are in memory"
    ]


@contextmanager
def _standing_in(decoder: nn.Module, output: Any) -> Generator[None]:
    """Let a module's forward return ``output``. The module itself stays, because a model may look into it."""
    before = vars(decoder).get("forward")
    vars(decoder)["forward"] = lambda *_, **__: output
    try:
        yield
    finally:
        del vars(decoder)["forward"]
        if before is not None:
            vars(decoder)["forward"] = before

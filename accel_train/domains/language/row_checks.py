"""Prove before training what a token of a row sees: no later token, and no other text of a packed row."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from accel_train import simulated
from accel_train.config import UsageError
from accel_train.domains.language import perplexity
from accel_train.domains.language.language_model import LanguageModel
from accel_train.domains.language.pretrained import attention_of, one_line

SAME = 1e-4
"""Largest difference by rounding in fp32 between a text's logits alone and in a row, relative to the largest logit."""
UNSEEN = 1e-5
"""Largest difference by rounding between two rows of one shape, likewise. In a small model with random weights, a token
that is seen changes the logits by 5e-4."""


def attention_example(model: nn.Module, *, packing: bool) -> Tensor:
    """Call the model on one row, of two texts with ``packing``, so that its attention can be proven as it is used."""
    language_model = LanguageModel(model, packing, attention_of(model))
    return language_model.logits(_two_texts(model))


def _two_texts(model: nn.Module) -> dict[str, Tensor]:
    """Return a row of two texts, of 9 and 7 tokens."""
    plain: Any = model
    ids = torch.arange(1, 17, device=plain.device).remainder(plain.config.get_text_config().vocab_size)
    positions = torch.cat([torch.arange(9), torch.arange(7)]).to(plain.device)
    return {"input_ids": ids[None], "position_ids": positions[None]}


def check_rows(model: nn.Module, *, packing: bool, loss_chunk: int = 0) -> list[str]:
    """Prove that no token sees what it is to predict, and return notices. Called before the model is sharded.

    Raises ``UsageError`` for a model whose tokens see later ones, or, with ``packing``, another text of the row, and
    for one whose loss by chunks differs.
    """
    notices = [check_causality(model)]
    if packing:
        notices.append(check_packing(model))
    if loss_chunk:
        notices.append(check_chunks(model, loss_chunk))
    return notices + _router_notices(model)


def _router_notices(model: nn.Module) -> list[str]:
    """Return a notice if config.json asks for the auxiliary loss of a mixture of experts."""
    plain: Any = model
    if not getattr(plain.config.get_text_config(), "output_router_logits", False):
        return []
    return ["output_router_logits of config.json has no effect: the auxiliary loss of the experts' router is not added"]


@torch.no_grad()
def check_causality(model: nn.Module) -> str:
    """Prove that a token does not see later ones, by two forwards of 16 tokens that differ in the last.

    A model that sees the next token has a loss near zero, and generates nothing.
    """
    if simulated.weights_have_no_values():
        return "causality: not proven, because weights have no values here"
    name = type(model).__name__
    plain: Any = model
    ids = _two_texts(model)["input_ids"]
    other = ids.clone()
    # A different token for any size of the vocabulary.
    other[0, -1] = (ids[0, -1] + 1).remainder(plain.config.get_text_config().vocab_size)
    try:
        with _evaluating(model):
            first, second = (model(input_ids=each, use_cache=False).logits[:, :-1].float() for each in (ids, other))
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        raise UsageError(
            f"--model: {name} cannot take a row of 16 tokens: {one_line(error)}. Give sizes that fit together."
        ) from None
    changed = float((first - second).abs().max() / first.abs().max())
    # Experts round differently when another number of tokens is routed to them.
    allowed = max(UNSEEN, _rounding(model))
    # Not `changed >= allowed`, which NaN would pass.
    if not changed < allowed:
        raise UsageError(
            f"--model: {name}: changing the last token changes the logits before it, by {changed:.1e} of the largest "
            f"({allowed:.0e} is allowed), so a token sees the one that it must predict. A causal language model is "
            "required, whose tokens see only earlier ones."
        )
    return f"causality: proven, logits before a changed token stay the same, within {changed:.0e}"


@contextmanager
def _evaluating(model: nn.Module) -> Generator[None]:
    """Switch dropout off, which would differ from forward to forward."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _rounding(model: nn.Module) -> float:
    """Return the relative difference of logits that the coarsest weights explain: a frozen base may be bf16."""
    computed = {p.dtype for p in model.parameters() if p.dtype.is_floating_point and p.itemsize > 1}
    return max(4 * torch.finfo(dtype).eps for dtype in computed)


def check_packing(model: nn.Module) -> str:
    """Prove that texts packed into one row do not see each other, and return a notice with the largest difference.

    Three forwards of two short texts, before the model is sharded, with sdpa or eager, as it was built. Raises
    ``UsageError`` for a model unable to take them: with a recurrent state, or without position_ids.
    """
    name = type(model).__name__
    remedy = "Set --data.no_packing, and --loader.bucket_by_length to save padding."
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    # Checked before the forwards, because such a model may refuse the arguments with an unhelpful error.
    if getattr(model, "_is_stateful", False) or not takes_positions:
        reason = "keeps a state over the whole row" if takes_positions else "takes no position_ids"
        raise UsageError(f"--data.packing: {name} {reason}, so one text of a row would see another. {remedy}")
    if simulated.weights_have_no_values():
        return "packing: not proven, because weights have no values here"
    apart, together = _forwards(model, **_two_texts(model))
    # Relative to the largest logit, whose size differs from model to model.
    error = float((apart - together).abs().max() / apart.abs().max())
    allowed = max(SAME, _rounding(model))
    # Not `error >= allowed`, which NaN would pass.
    if not error < allowed:
        raise UsageError(
            f"--data.packing: {name}: two texts in one row have different logits than alone, by {error:.1e} of the "
            f"largest ({allowed:.0e} is allowed), so one sees the other. {remedy}"
        )
    return f"packing: proven, two texts in one row have the same logits as alone, within {error:.0e}"


@torch.no_grad()
def check_chunks(model: nn.Module, loss_chunk: int) -> str:
    """Prove that the loss by chunks is that of all tokens at once, and return a notice with the largest difference.

    Raises ``UsageError`` for a model whose losses differ, or that cannot compute logits from the output of its blocks.
    """
    if simulated.weights_have_no_values():
        return "loss by chunks: not proven, because weights have no values here"
    row = _two_texts(model)
    expected = row["input_ids"].roll(-1)

    def losses(tokens: int) -> Tensor:
        chunks = LanguageModel(model, False, attention_of(model), tokens)
        return chunks.of_tokens(row, expected, perplexity.losses)

    with _evaluating(model):
        whole = losses(0)
        try:
            chunked = losses(loss_chunk)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        # A head that reads more than the last hidden states may raise any error.
        except Exception as error:
            raise UsageError(
                f"--model.loss_chunk {loss_chunk}: {type(model).__name__} cannot compute the logits of a chunk: "
                f"{one_line(error)}. Give 0."
            ) from None
    changed = float((whole - chunked).abs().max() / whole.abs().max())
    allowed = max(SAME, _rounding(model))
    # Not `changed >= allowed`, which NaN would pass.
    if not changed < allowed:
        raise UsageError(
            f"--model.loss_chunk {loss_chunk}: {type(model).__name__} has a different loss by chunks, by {changed:.1e} "
            f"of the largest ({allowed:.0e} is allowed). Give 0."
        )
    return f"loss by chunks: proven, tokens have the same loss as without chunks, within {changed:.0e}"


@torch.no_grad()
def _forwards(model: nn.Module, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of the texts alone, one after the other, and those of the packed row."""
    with _evaluating(model):
        first = model(input_ids=input_ids[:, :9], use_cache=False).logits
        second = model(input_ids=input_ids[:, 9:], use_cache=False).logits
        together = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
    return torch.cat([first, second], 1), together

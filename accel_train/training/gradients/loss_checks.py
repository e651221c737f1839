"""Checks of the losses and weights that a recipe gives to the window.

A mean or a forgotten weight would go unnoticed: on one process without accumulation, with all weights 1, it only scales
the loss. In other layouts it changes what is trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_train.config import UsageError

if TYPE_CHECKING:
    from accel_train.training.step_guard import StepResult

PLACES = {
    "coefficients": "the coefficients given to the window",
    "weights": "the weights given to the window",
    "sums": "the sums given to window.backward",
}
"""Places where a recipe names its loss terms, as worded in messages."""


def refuse_empty(micro_batches: Sequence[object], coefficients: Mapping[str, float], step: int) -> None:
    """Raise ``UsageError`` for a window without a micro-batch or a loss term, and for others than pairs and a dict."""
    if not isinstance(coefficients, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            f"window (step {step + 1}): the coefficients are {coefficients!r}: a dict with one for each loss term is "
            'required, such as {"class": 1.0}'
        )
    for given in micro_batches:
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise UsageError(
                f"window (step {step + 1}): a micro-batch is of type {type(given).__name__}: a pair of the batch and "
                'the weights of its loss terms is required; pass [(batch, {"class": batch["weight"]}) for batch in '
                "batches.micro_batches]"
            )
    if not micro_batches or not coefficients:
        raise UsageError(
            f"window (step {step + 1}): {len(micro_batches)} micro-batches and {len(coefficients)} loss "
            "terms; at least one of each is required: pass all of batches.micro_batches, and the coefficient of each "
            "term"
        )


def by_term(
    values: Mapping[str, Tensor] | Tensor, kind: str, coefficients: Mapping[str, float], step: int
) -> Mapping[str, Tensor]:
    """Return ``values`` as a mapping from loss term to tensor. A single tensor stands for every term.

    Raises ``UsageError`` for a term in only one of ``values`` and ``coefficients``, and for a value that is no tensor.
    ``kind`` is a key of ``PLACES``.
    """
    if isinstance(values, Tensor):
        return dict.fromkeys(coefficients, values)
    if not isinstance(values, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _no_tensor(kind, step, "they are", values)
    for name, value in values.items():
        if not isinstance(value, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _no_tensor(kind, step, f"that of {name!r} is", value)
    for name in sorted(values.keys() ^ coefficients.keys()):
        present, absent = (kind, "coefficients") if name in values else ("coefficients", kind)
        raise UsageError(
            f"loss term {name!r} (step {step + 1}): it is in {PLACES[present]} but not in {PLACES[absent]}; "
            "add it there, with coefficient 0 in steps that do not train it, or remove it from both"
        )
    return values


def sums_by_term(
    sums: Mapping[str, Tensor] | Tensor, coefficients: Mapping[str, float], step: int
) -> Mapping[str, Tensor]:
    """Return ``sums`` as a mapping from loss term to tensor, as ``by_term``. A single tensor needs a single term."""
    if isinstance(sums, Tensor) and len(coefficients) != 1:
        names = sorted(coefficients)
        raise UsageError(
            f"window.backward: got one tensor for the loss terms {names}; give a dict with the sum of each"
        )
    return by_term(sums, "sums", coefficients, step)


def refuse_detached(terms: Sequence[Tensor], names: Iterable[str]) -> None:
    """Raise ``UsageError`` for a loss of which no term depends on a parameter."""
    if not any(term.requires_grad for term in terms):
        raise UsageError(
            f"window.backward: no loss term ({', '.join(names)}) depends on a trained parameter, so there is no "
            "gradient; compute the losses from the output of the model, without torch.no_grad, detach or .item()"
        )


def checked_limit(max_grad_norm: Any) -> float:
    """Return a limit of the gradient norm, of numpy or torch too, as a float. ``UsageError`` for one below 0 or NaN."""
    try:
        limit = float(max_grad_norm)
    except (TypeError, ValueError, RuntimeError):
        limit = math.nan
    if not limit >= 0:
        raise UsageError(
            f"window.finish: max_grad_norm is {max_grad_norm!r}: a number of at least 0 is required; give 0 for no "
            "clipping"
        )
    return limit


def _no_tensor(kind: str, step: int, found: str, value: object) -> UsageError:
    return UsageError(
        f"{PLACES[kind]} (step {step + 1}): {found} of type {type(value).__name__}, but a tensor, or a dict with one "
        "for each loss term, is required; give a number as torch.tensor(1.0), and a count of samples as "
        'batch["weight"].sum()'
    )


def refuse_means(sums: Mapping[str, Tensor], weights: Mapping[str, Tensor], coefficients: Mapping[str, float]) -> None:
    """Raise ``UsageError`` for a trained term with one weight per sample, (B,), but not one loss per sample.

    Such a loss is one value, (), one of fewer samples, or a matrix by mistake: (B, 1) times (B,) is (B, B). Does not
    wait for the device.
    """
    for name, loss in sums.items():
        if coefficients[name] == 0 or weights[name].ndim == 0:
            continue
        if loss.ndim == 0:
            raise UsageError(
                f"window.backward: loss term {name!r} is one value, and its weight has shape "
                f"{tuple(weights[name].shape)}, one for each sample; give the loss of each sample times its weight "
                "(reduction='none', not a mean), or the sum of these, with weight.sum() as its weight. The window "
                "divides by the weights of the global batch"
            )
        refuse_other_shape(f"loss term {name!r}", loss, weights[name])


def refuse_other_shape(what: str, values: Tensor, weight: Tensor) -> None:
    """Raise ``UsageError`` for values with more dimensions than the weights of the samples, (B,), or of other samples.

    No device wait.
    """
    # Sums of other shapes, such as (T,) beside (), cannot be told from right ones.
    if values.ndim == weight.ndim == 1 and len(values) != len(weight):
        raise UsageError(
            f"window.backward: {what} has {len(values)} values, but its weight {len(weight)}, one for each sample, and "
            "the window divides by all of these; to leave samples out, multiply both by the mask instead of indexing "
            "with it (losses * mask, and weight * mask for prepared.window); for values that are not of samples, give "
            "losses.sum() and weight.sum()"
        )
    if values.ndim > weight.ndim > 0:
        raise UsageError(
            f"window.backward: {what} has shape {tuple(values.shape)}, but its weight {tuple(weight.shape)}, one for "
            "each sample; reduce it to one value for each sample, as with .flatten(1).sum(1), before multiplying it "
            "by the weight: (B, 1) times (B,) is (B, B), which counts every sample B times"
        )


def count_unweighted(result: StepResult) -> dict[str, Tensor]:
    """Count the samples of this process that contribute to a trained term although their loader ``weight`` is 0.

    ``lost_weights`` counts those with a loss other than 0, ``weighted_padding`` those with a term weight above 0. The
    reverse is allowed: a term's weight may be 0 where a loss is added to the mean over other samples. No device wait.
    """
    evidence = result.evidence
    losses_found = torch.zeros((), device=evidence.totals.device)
    weights_found = torch.zeros_like(losses_found)
    for losses, weights, rows in zip(evidence.losses, evidence.weights, evidence.rows, strict=True):
        if "weight" not in rows:
            continue
        is_padding = rows["weight"] == 0
        # A sample counts once, whatever the number of terms.
        has_loss = torch.zeros_like(is_padding)
        has_weight = torch.zeros_like(is_padding)
        for name, loss in zip(evidence.terms, losses, strict=True):
            if result.coefficients[name] == 0:
                continue
            # NaN does not count: NaN times 0 is NaN, and the step guard finds it.
            if loss.shape == is_padding.shape:
                has_loss |= loss.abs() > 0
            if weights[name].shape == is_padding.shape:
                has_weight |= (weights[name] > 0).to(is_padding.device)
        losses_found += (is_padding & has_loss).sum()
        weights_found += (is_padding & has_weight).sum()
    return {"lost_weights": losses_found, "weighted_padding": weights_found}


def refuse_unweighted(counts: dict[str, float]) -> None:
    """Pop the entries of ``count_unweighted`` from counts summed over processes. ``UsageError`` if one is above 0."""
    of_losses = counts.pop("lost_weights")
    of_weights = counts.pop("weighted_padding")
    why = "Such a sample only fills a micro-batch, or stands in for one that is left out"
    if of_losses > 0:
        raise UsageError(
            f"window.backward: {of_losses:g} sample(s) of this step have weight 0, but their loss is not 0; multiply "
            f'the loss of each sample by its weight (losses * batch["weight"]). {why}'
        )
    if of_weights > 0:
        raise UsageError(
            f"prepared.window: {of_weights:g} sample(s) of this step have weight 0, but a weight above 0 in a loss "
            "term, whose mean would be over more samples than the global batch has; multiply the weights of each term "
            "by that of the sample, as in "
            f'(batch, {{"NAME": tokens * batch["weight"]}}). {why}'
        )

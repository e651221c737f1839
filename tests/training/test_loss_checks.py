"""What the window and the log points refuse: a mean of the losses, and a loss or weight without that of the sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.training.accumulation import GradientWindow
from accel_train.training.gradients.loss_checks import count_unweighted, refuse_unweighted
from accel_train.training.step_guard import StepResult

COEFFICIENTS = {"main": 1.0, "off": 0.0}


def finished(accelerator: Accelerator, weights: list[Tensor], losses: list[Tensor]) -> StepResult:
    """A step with a micro-batch for each pair of weights and losses, which both terms share."""
    model = accelerator.prepare(nn.Linear(1, 1))
    parts = [
        ({"sample": torch.arange(weight.numel()), "weight": weight.reshape(-1)}, {"main": weight, "off": weight})
        for weight in weights
    ]
    window = GradientWindow(accelerator, model, parts, COEFFICIENTS, step=0)
    for _, loss in zip(window, losses, strict=True):
        window.backward({name: loss * model.weight.sum() for name in COEFFICIENTS})
    return window.finish(0.0)


def test_one_value_beside_the_weight_of_each_sample_is_refused(accelerator: Accelerator) -> None:
    for weight in (torch.ones(4), torch.ones(1)):
        with pytest.raises(UsageError, match=rf"'main' is one value, and its weight has shape \({len(weight)},\)"):
            finished(accelerator, [weight], [torch.tensor(2.0)])
    finished(accelerator, [torch.ones(4).sum()], [torch.tensor(2.0)])
    # A term that this step does not train may be a plain 0.
    model = accelerator.prepare(nn.Linear(1, 1))
    weights = {"main": torch.ones(4), "off": torch.ones(4)}
    window = GradientWindow(accelerator, model, [({}, weights)], COEFFICIENTS, step=0)
    for _ in window:
        window.backward({"main": torch.ones(4) * model.weight.sum(), "off": torch.zeros(())})
    finished(accelerator, [torch.ones(4)], [torch.ones(4)])


def test_a_matrix_beside_the_weight_of_each_sample_is_refused(accelerator: Accelerator) -> None:
    """The loss of a model whose output is (B, 1), times the weights (B,), is (B, B)."""
    weight = torch.ones(4)
    for loss in (torch.ones(4, 1) * weight, torch.ones(4, 1)):
        with pytest.raises(UsageError, match=rf"'main' has shape \(4, {loss.shape[1]}\), but its weight \(4,\)"):
            finished(accelerator, [weight], [loss])
    model = accelerator.prepare(nn.Linear(1, 1))
    window = GradientWindow(accelerator, model, [({}, weight)], {"main": 1.0}, step=0)
    for _ in window:
        with pytest.raises(UsageError, match=r"metric 'error' has shape \(4, 4\)"):
            window.backward(weight * model.weight.sum(), metrics={"error": torch.ones(4, 1) * weight})
    # A weight for each token.
    finished(accelerator, [torch.ones(4, 2)], [torch.ones(4, 2)])


def test_a_loss_of_fewer_samples_than_the_weight_is_refused(accelerator: Accelerator) -> None:
    """As with ``loss[mask]``: the mean would be over samples that it leaves out."""
    weight = torch.ones(4)
    for count in (3, 5):
        with pytest.raises(UsageError, match=rf"'main' has {count} values, but its weight 4, .*losses \* mask"):
            finished(accelerator, [weight, weight], [weight, torch.ones(count)])
    model = accelerator.prepare(nn.Linear(1, 1))
    window = GradientWindow(accelerator, model, [({}, weight)], {"main": 1.0}, step=0)
    for _ in window:
        with pytest.raises(UsageError, match=r"metric 'error' has 3 values, but its weight 4"):
            window.backward(weight * model.weight.sum(), metrics={"error": torch.ones(3)})
    # Sums over tokens of another number.
    finished(accelerator, [weight.sum()], [torch.ones(3)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sums", [False, True])
def test_weights_in_low_precision_divide_as_those_in_fp32(
    accelerator: Accelerator, dtype: torch.dtype, sums: bool
) -> None:
    """Each is exact, and their sum of 4,099 is not, nor is its inverse. Whatever the division of the batch."""
    weight = torch.tensor([2048.0, 2048.0, 3.0])
    expected = finished(accelerator, [weight], [weight]).weights["main"]
    for sizes in ([3], [1, 2]):
        parts = list(weight.to(dtype).split(sizes))
        if sums:
            parts = [each for part in parts for each in part]
        result = finished(accelerator, parts, [part.float() for part in parts])
        assert float(result.weights["main"]) == float(expected) == 4099
        assert float(result.grad_norm) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(
    ("micro_batches", "coefficients", "found"),
    [([], COEFFICIENTS, "0 micro-batches and 2 loss terms"), ([({}, torch.ones(1))], {}, "1 micro-batches and 0 loss")],
)
def test_a_window_without_anything_to_train_is_refused(
    micro_batches: list[tuple[dict[str, Tensor], Tensor]],
    coefficients: dict[str, float],
    found: str,
    accelerator: Accelerator,
) -> None:
    model = accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(UsageError, match=rf"\(step 5\): {found}.*at least one of each is required"):
        GradientWindow(accelerator, model, micro_batches, coefficients, step=4)


def counts_of(accelerator: Accelerator, weights: list[Tensor], losses: list[Tensor]) -> dict[str, int]:
    return {name: int(count) for name, count in count_unweighted(finished(accelerator, weights, losses)).items()}


def test_a_loss_without_weight_is_counted_in_trained_terms_only(accelerator: Accelerator) -> None:
    weights = [torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.5, 0.0])]
    losses = [torch.tensor([2.0, 0.0, 3.0]), torch.tensor([2.0, 5.0])]
    assert counts_of(accelerator, weights, losses) == {"lost_weights": 2, "weighted_padding": 0}
    below = [-loss for loss in losses]
    assert counts_of(accelerator, weights, below)["lost_weights"] == 2
    right = [loss * weight for loss, weight in zip(losses, weights, strict=True)]
    assert counts_of(accelerator, weights, right) == {"lost_weights": 0, "weighted_padding": 0}
    # Of sums nothing can be said.
    sums = [weight.sum() for weight in weights]
    assert counts_of(accelerator, sums, sums) == {"lost_weights": 0, "weighted_padding": 0}


def test_a_weight_of_a_term_that_padding_has_is_counted_in_trained_terms_only(accelerator: Accelerator) -> None:
    model = accelerator.prepare(nn.Linear(1, 1))
    weight = torch.tensor([1.0, 1.0, 0.0])
    tokens = torch.tensor([3, 0, 5])
    batch = {"sample": torch.arange(3), "weight": weight}
    for weights, expected in ((tokens, 1), (tokens * weight, 0), ((tokens * weight).sum(), 0)):
        window = GradientWindow(accelerator, model, [(batch, {"main": weights, "off": tokens})], COEFFICIENTS, step=0)
        for _ in window:
            window.backward({name: torch.ones(3) * weight * model.weight.sum() for name in COEFFICIENTS})
        counts = count_unweighted(window.finish(0.0))
        assert {name: int(count) for name, count in counts.items()} == {"lost_weights": 0, "weighted_padding": expected}
    # Of two trained terms a sample counts once.
    window = GradientWindow(accelerator, model, [(batch, tokens)], {"main": 1.0, "more": 1.0}, step=0)
    for _ in window:
        window.backward({name: torch.ones(3) * model.weight.sum() for name in ("main", "more")})
    counts = count_unweighted(window.finish(0.0))
    assert {name: int(count) for name, count in counts.items()} == {"lost_weights": 1, "weighted_padding": 1}


def test_the_messages_say_what_to_multiply() -> None:
    totals = {"lost_weights": 0.0, "weighted_padding": 0.0, "tokens": 7.0}
    refuse_unweighted(totals)
    assert totals == {"tokens": 7.0}
    with pytest.raises(UsageError, match=r"3 sample\(s\) of this step have weight 0, .*\(losses \* batch"):
        refuse_unweighted({"lost_weights": 3.0, "weighted_padding": 0.0})
    with pytest.raises(UsageError, match=r'2 sample\(s\) .*"NAME": tokens \* batch\["weight"\]'):
        refuse_unweighted({"lost_weights": 0.0, "weighted_padding": 2.0})


@pytest.mark.parametrize(
    ("weight", "found"), [(4, "they are of type int"), ({"main": 1}, "that of 'main' is of type int")]
)
def test_a_number_in_place_of_a_tensor_is_refused(accelerator: Accelerator, weight: Any, found: str) -> None:
    model = accelerator.prepare(nn.Linear(1, 1))
    micro_batches: list[Any] = [({}, weight)]
    with pytest.raises(
        UsageError,
        match=rf"given to the window \(step 1\): {found}, but a tensor, or a dict",
    ):
        GradientWindow(accelerator, model, micro_batches, {"main": 1.0}, 0)
    window = GradientWindow(accelerator, model, [({}, torch.ones(4))], {"main": 1.0}, 0)
    with pytest.raises(UsageError, match=rf"given to window\.backward \(step 1\): {found}"):
        window.backward(weight)


@pytest.mark.parametrize(
    ("micro_batches", "coefficients", "found"),
    [
        ([({}, {})], 1.0, r"window \(step 3\): the coefficients are 1\.0: a dict"),
        ([{"x": torch.ones(1), "y": torch.ones(1)}], {"main": 1.0}, r"a micro-batch is of type dict: a pair"),
        ([{"x": torch.ones(1)}], {"main": 1.0}, r"a micro-batch is of type dict: a pair"),
    ],
)
def test_a_window_of_other_things_is_refused(
    accelerator: Accelerator, micro_batches: Any, coefficients: Any, found: str
) -> None:
    model = accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(UsageError, match=found):
        GradientWindow(accelerator, model, micro_batches, coefficients, step=2)


def test_a_loss_without_a_gradient_and_a_norm_that_is_no_number_are_refused(accelerator: Accelerator) -> None:
    model = accelerator.prepare(nn.Linear(1, 1))
    window = GradientWindow(accelerator, model, [({}, torch.ones(4))], {"main": 1.0}, step=0)
    for _ in window:
        with pytest.raises(UsageError, match=r"no loss term \(main\) depends on a trained parameter"):
            window.backward(torch.ones(4))
        window.backward(torch.ones(4) * model.weight.sum())
    limits: list[Any] = [None, "much", -1.0, float("nan")]
    for limit in limits:
        with pytest.raises(UsageError, match=rf"max_grad_norm is {limit!r}: a number of at least 0 is required"):
            window.finish(limit)
    window.finish(0)


@pytest.mark.parametrize("limit", [np.float32(0.5), torch.tensor(0.5), 0.5])
def test_a_limit_of_the_norm_may_be_a_number_of_numpy_or_torch(accelerator: Accelerator, limit: Any) -> None:
    model = accelerator.prepare(nn.Linear(1, 1))
    window = GradientWindow(accelerator, model, [({}, torch.ones(4))], {"main": 1.0}, step=0)
    for _ in window:
        window.backward(torch.ones(4) * 3 * model.weight.sum())
    window.finish(limit)
    assert model.weight.grad.item() == pytest.approx(0.5)

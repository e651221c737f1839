"""Metrics beside the loss: means over the global batch, whatever its division, and never trained."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.training.accumulation import GradientWindow

VALUES = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
WEIGHTS = torch.tensor([1.0, 2.0, 0.0, 1.0, 3.0, 1.0])


def window_of(accelerator: Accelerator, sizes: list[int], *, sums: bool = False) -> tuple[GradientWindow, nn.Linear]:
    model = accelerator.prepare(nn.Linear(1, 1))
    weights = WEIGHTS.split(sizes)
    parts = [({"sample": torch.arange(len(w))}, w.sum() if sums else w) for w in weights]
    return GradientWindow(accelerator, model, parts, {"main": 1.0}, step=0), model


def means(accelerator: Accelerator, sizes: list[int], *, sums: bool = False) -> dict[str, float]:
    window, model = window_of(accelerator, sizes, sums=sums)
    for _, values, weights in zip(window, VALUES.split(sizes), WEIGHTS.split(sizes), strict=True):
        weighted: Tensor = values * weights * model.weight.sum() ** 0
        if sums:
            weighted = weighted.sum()
        window.backward(weighted * model.weight.sum(), metrics={"value": weighted, "weight": weighted * 0 + 1})
    result = window.finish(0.0)
    assert set(result.fields()) == {"loss", "loss_main", "grad_norm"}
    return result.metrics.means()


@pytest.mark.parametrize("sizes", [[6], [2, 2, 2], [1, 5]])
@pytest.mark.parametrize("sums", [False, True])
def test_they_are_weighted_means_over_the_whole_batch(accelerator: Accelerator, sizes: list[int], sums: bool) -> None:
    expected = float((VALUES.double() * WEIGHTS.double()).sum() / WEIGHTS.double().sum())
    count = len(sizes) if sums else 6
    found = means(accelerator, sizes, sums=sums)
    assert found == {"train_value": pytest.approx(expected, rel=1e-6), "train_weight": pytest.approx(count / 8)}


def test_they_move_no_gradient(accelerator: Accelerator) -> None:
    gradients: list[Tensor] = []
    for metrics in ({}, {"value": 1e6}):
        window, model = window_of(accelerator, [3, 3])
        nn.init.ones_(model.weight)
        for _, weights in zip(window, WEIGHTS.split(3), strict=True):
            loss = weights * model.weight.sum()
            window.backward(loss, metrics={name: loss * value for name, value in metrics.items()})
        window.finish(0.0)
        assert model.weight.grad is not None
        gradients.append(model.weight.grad.clone())
    assert torch.equal(*gradients)
    assert gradients[0].item() == pytest.approx(1.0)


def test_a_mean_is_refused(accelerator: Accelerator) -> None:
    window, model = window_of(accelerator, [6])
    for _ in window:
        with pytest.raises(UsageError, match=r"metric 'value' is one value, and the weight has shape \(6,\)"):
            window.backward(WEIGHTS * model.weight.sum(), metrics={"value": VALUES.mean()})
        break


def test_all_micro_batches_have_the_same(accelerator: Accelerator) -> None:
    window, model = window_of(accelerator, [3, 3])
    names = iter(["first", "second"])
    with pytest.raises(UsageError, match=r"metrics \['second'\] of this micro-batch, \['first'\] of the first"):
        for _ in window:
            window.backward(WEIGHTS[:3] * model.weight.sum(), metrics={next(names): WEIGHTS[:3]})

"""Weights of the global batch, and means over it of a step's metrics beside its loss, such as the accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor

from accel_train.config import UsageError
from accel_train.training.feedback.factors import term_factor
from accel_train.training.gradients.loss_checks import refuse_other_shape
from accel_train.training.parameters import summed, widest

PREFIX = "train_"
"""Prefix of their names in a training line. Names of evaluation metrics begin with ``heldout_``."""


class StepMetrics:
    """Sums of a step's metrics on this process. Read at log points only: other steps reduce and wait for nothing."""

    def __init__(self, accelerator: Accelerator, weight: Tensor, weights: Sequence[Tensor]) -> None:
        """Metrics are divided by ``weight``, that of the global batch. ``weights`` are those of the micro-batches."""
        self._accelerator = accelerator
        self._weight = weight
        self._weights = weights
        self._sums: list[dict[str, Tensor]] = []

    def clear(self) -> None:
        """Drop the sums of an attempt that will be repeated."""
        self._sums.clear()

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add a micro-batch: the sum of each metric, (), or its weighted values, (B,). No device wait.

        Where weights are per sample, raises ``UsageError`` for a single value, which may be a mean, and for a matrix.
        Also for names that differ from those of the first micro-batch.
        """
        weight = self._weights[len(self._sums) % len(self._weights)]
        first = self._sums[0] if self._sums else metrics
        if metrics.keys() != first.keys():
            raise UsageError(
                f"window.backward: metrics {sorted(metrics)} of this micro-batch, {sorted(first)} of the first; give "
                "the same in each (0 where there is nothing to count)"
            )
        for name, values in metrics.items():
            if values.ndim == 0 and weight.ndim > 0:
                raise UsageError(
                    f"window.backward: metric {name!r} is one value, and the weight has shape {tuple(weight.shape)}, "
                    "one for each sample; give the value of each sample times its weight, not a mean"
                )
            refuse_other_shape(f"metric {name!r}", values, weight)
        self._sums.append({name: values.detach().sum() for name, values in metrics.items()})

    def means(self) -> dict[str, float]:
        """Return the means over the global batch by ``train_NAME``. Waits for the device, and all ranks call it."""
        if not self._sums or not self._sums[0]:
            return {}
        sums = torch.stack([widest(torch.stack(list(micro_batch.values()))) for micro_batch in self._sums]).sum(0)
        if self._accelerator.num_processes > 1:
            sums = cast(Tensor, self._accelerator.reduce(sums, "sum"))
        means: list[float] = (sums.float() * term_factor(1.0, self._weight)).tolist()
        return {PREFIX + name: mean for name, mean in zip(self._sums[0], means, strict=True)}


def global_weights(accelerator: Accelerator, micro_batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Sum the weights over all micro-batches and ranks, in fp64 where the device has it: exact for any count."""
    local = {name: summed(weight) for name, weight in micro_batches[0].items()}
    if len(micro_batches) > 1:
        for name in local:
            wide = [widest(summed(weights[name])) for weights in micro_batches]
            local[name] = torch.stack(wide).sum()
    if accelerator.num_processes == 1:
        return local
    stacked = torch.stack([widest(weight) for weight in local.values()])
    reduced: Any = accelerator.reduce(stacked, "sum")
    return dict(zip(local, reduced.unbind(), strict=True))

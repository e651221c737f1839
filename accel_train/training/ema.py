"""Exponential moving average of the weights, in fp32, on this rank's shards."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from accel_train.config import FractionBelowOne
from accel_train.training.shards import Shards
from accel_train.training.step_guard import StepGuard


@dataclass(frozen=True)
class EmaConfig:
    """EMA of the weights for evaluation and sampling, saved as ema.safetensors beside the trained weights."""

    decay: FractionBelowOne = 0.999
    """Share of the old EMA kept per step. Starts lower and rises with the step. 0 switches the EMA off."""


class Ema:
    """EMA of the weights. Elementwise on shards, so it costs no communication under any strategy.

    Every rank builds and updates it. ``shards`` are fp32 even under bf16, because a difference of 1 - decay is lost in
    bf16's 8 bits. With decay 0 there are no shards and no cost: the EMA is the weights. A step that ``guard`` leaves
    out does not move it.
    """

    def __init__(self, config: EmaConfig, shards: Shards, guard: StepGuard | None = None) -> None:
        self.config = config
        self.guard = guard or StepGuard()
        self.view = shards
        """The averaged parameters, with their optimizer's state."""
        self.shards: dict[str, torch.Tensor] = {}
        """EMA by parameter name, this rank's shard."""
        if config.decay > 0:
            for name in shards.parameters:
                self.shards[name] = shards.master(name).float().clone()

    def update(self, step: int) -> None:
        """Move towards the weights after optimizer step ``step`` (0-based)."""
        if self.config.decay == 0 or self.guard.skips_this_step:
            return
        # Asked for in every step, because FSDP2 and DeepSpeed may replace the tensors behind the names.
        masters = [self.view.master(name) for name in self.shards]
        decay = decay_at(self.config.decay, step)
        weight_of_step = self.guard.weight_of_step
        if weight_of_step is not None:
            self._update_on_device(masters, weight_of_step * (1 - decay))
            return
        lerp = torch._foreach_lerp_  # pyright: ignore[reportPrivateUsage]
        # One kernel for many tensors: a loop over them would be bound by launches.
        lerp(list(self.shards.values()), masters, 1 - decay)

    def _update_on_device(self, masters: list[torch.Tensor], weight: torch.Tensor) -> None:
        """Move by a weight that the host does not know: 0 for a step left out, which changes no bit.

        A kernel for each tensor, because torch's kernel for many takes the weight from the host. The same values.
        """
        for shard, master in zip(self.shards.values(), masters, strict=True):
            shard.lerp_(master, weight)

    @contextmanager
    def applied(self) -> Generator[None]:
        """Run the body with the EMA in the model, on all ranks. The trained weights come back bit for bit."""
        if self.config.decay == 0:
            yield
            return
        # Under DDP and FSDP2 the forward uses the master weights themselves, and `show` overwrites them.
        trained = {name: self.view.master(name).clone() for name in self.shards}
        self.view.show(self.shards)
        try:
            yield
        finally:
            self.view.show(trained)


def decay_at(decay: float, step: int) -> float:
    """``min(decay, (1 + step) / (10 + step))``: the early EMA forgets the random start (diffusers' EMAModel)."""
    return min(decay, (1 + step) / (10 + step))

"""Gradient noise scale, measured from the optimizer's running mean, for a batch size that grows with it.

The noise scale is ``B_noise = tr(Sigma) / |G|^2`` (McCandlish et al., arXiv:1812.06162), with the mean G and the
covariance Sigma of the gradient of one sample. A batch far below it gains from more samples almost in proportion, and
one far above gains little.

The usual estimator compares the gradient of one process with the mean over processes, so it depends on the layout. Here
two means over steps are compared, which are the same under every layout. With the batch ``B_i`` of step i, its gradient
``g_i`` as it enters the optimizer, and the bias-corrected weights ``w_i`` of an exponential moving average, let

    m = sum_i w_i g_i               the optimizer's ``exp_avg``, corrected for its start at 0
    s = sum_i w_i |g_i|^2           kept here, with the same decay
    a = sum_i w_i / B_i             b = sum_i w_i^2 / B_i

Then ``E s = |G|^2 + a tr(Sigma)`` and ``E |m|^2 = |G|^2 + b tr(Sigma)``, hence the unbiased

    tr(Sigma) = (s - |m|^2) / (a - b)          |G|^2 = (a |m|^2 - b s) / (a - b)

exact from the second step on and over any change of the batch. With one size B after many steps ``b = (1 - beta) /
(1 + beta) / B``. Numerator and denominator are averaged over the observations of a window before their quotient is
taken, because the quotient of a single observation has no mean.

G is taken as constant over the memory of the mean, about ``1 / (1 - beta)`` steps, and gradients as independent of the
noise of those before. Anything else that changes the gradient from step to step, such as other tasks or modes, counts
as noise too. At a high learning rate a step undoes the noise of the step before, so that gradients have a negative
covariance: ``|m|^2`` is smaller, ``|G|^2`` is underestimated, and may come out below 0. Then there is no measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor

from accel_train.training.parameters import square_of_norm, widest
from accel_train.training.shards import Shards

if TYPE_CHECKING:
    from accel_train.training.step_guard import StepResult

MEAN = "exp_avg"
"""AdamW's name for the running mean of the gradient."""
FADED = 1e-6
"""Weight in the running mean below which a gradient no longer matters."""


@dataclass(frozen=True)
class Window:
    """Measurement over a window of steps."""

    noise_scale: float | None
    """``B_noise`` in samples. None if it cannot be measured, because the estimate of ``|G|^2`` is not above 0."""
    gradient_square: float
    """``|G|^2``. May be 0 or less with too few observations, or where consecutive gradients undo each other."""
    noise_trace: float
    """``tr(Sigma)``, of the gradient of one sample."""
    observations: int

    def exceeds(self, size: float) -> bool:
        """Return True if the noise scale is measured, and larger than ``size`` samples."""
        return self.noise_scale is not None and self.noise_scale > size

    def describe(self, size: int, grown: int) -> str:
        """Return a log line with the measurement and the batch size before and after it."""
        scale = "not measurable" if self.noise_scale is None else f"about {self.noise_scale:,.3g} samples"
        action = f"{grown:,} samples per step from here on" if grown > size else "stays"
        return f"gradient noise scale {scale} ({self.observations} observations), batch {size:,}: {action}"


class NoiseScale:
    """Means of the gradient's squared norm, and the observations of a window. Every rank has one, with equal values.

    Only the end of a window waits for the device. An observation costs one read of ``exp_avg`` and, on several
    processes, a reduction of two numbers. Both come at fixed steps of the run, whatever is logged or saved.
    """

    def __init__(self, beta: float, steps: int, every: int, stages: list[tuple[int, int]]) -> None:
        """``stages`` are the changes of the batch size so far, as (step, size after it). A checkpoint restores them."""
        assert 0 < beta < 1, "a mean over several steps"
        self._beta = beta
        self._steps = steps
        self._every = every
        self.stages = stages
        self._moments = torch.zeros(5, dtype=torch.float64)
        """Averages of ``|g|^2``, of ``1 / B``, of ``1 / B`` with squared weights and of 1, and the trained steps."""
        self._decay = torch.tensor([beta, beta, beta**2, beta, 1.0], dtype=torch.float64)
        self._sums = torch.zeros(3, dtype=torch.float64)
        """Sums over the window: of ``tr(Sigma)``, of ``|G|^2``, and the number of observations."""

    def follow(self, result: StepResult, done: int, size: int, shards: Shards, accelerator: Accelerator) -> bool:
        """Count step ``done``, counted from 1, of ``size`` samples, after the optimizer's step. Collective.

        Steps that were left out do not count. Returns True at the end of a window, where it waits for the device, and
        raises ``NonFiniteError`` if a bad step ends the run.
        """
        guard = result.guard
        assert guard is not None, "a training loop has a guard"
        if not guard.skips_this_step:
            self.add(guard.clipped_norm(result.grad_norm), size, guard.weight_of_step)
        if done % self._every:
            return False
        self.observe(_square_of_mean(shards, accelerator))
        if done % self._steps:
            return False
        # After a step that ends the run nothing more was trained, so raise before the window is used.
        result.check()
        return True

    def add(self, norm: Tensor, size: int, trained: Tensor | None) -> None:
        """Count the norm of a gradient of ``size`` samples. Does not wait for the device.

        ``trained`` is 0 where the device leaves out the step, None if the host knows that it is trained.
        """
        rest = 1 - self._beta
        square = widest(norm).square()
        # Filled on the device, because a copy from the host would wait.
        numbers = [square.new_full((), number) for number in (rest / size, rest * rest / size, rest, 1.0)]
        added = torch.stack([rest * square, *numbers])
        before = self._moments.to(added)
        self._decay = self._decay.to(added)
        moments = before * self._decay + added
        # Selected instead of multiplied by 0, because 0 * NaN is NaN.
        self._moments = moments if trained is None else torch.where(trained > 0, moments, before)

    def observe(self, square_of_mean: Tensor) -> None:
        """Add an observation to the window, from ``|exp_avg|^2`` over all parameters. Does not wait for the device."""
        square, a, b, one, steps = self._moments.unbind()
        # The weights of `exp_avg` sum to this, because it starts at 0.
        s, a, b = square / one, a / one, b / one**2
        mean = square_of_mean.to(s) / one**2
        observation = torch.stack([s - mean, a * mean - b * s, a - b]) / (a - b)
        # The mean of a single gradient is that gradient, and tells nothing about its noise.
        self._sums = self._sums.to(observation) + torch.where(steps > 1, observation, 0.0)

    def end_window(self) -> Window | None:
        """Return the window's measurement, None without an observation, and begin the next. Waits for the device."""
        trace, square, count = self._sums.tolist()
        self._sums = torch.zeros_like(self._sums)
        if count == 0:
            return None
        trace, square = trace / count, square / count
        scale = max(trace, 0.0) / square if square > 0 else None
        return Window(scale, square, trace, round(count))

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Waits for the device."""
        return {"moments": self._moments.tolist(), "window": self._sums.tolist(), "stages": self.stages}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from ``state``. Without one, ``exp_avg`` holds gradients not counted here: wait until they fade."""
        if not saved:
            fading = math.ceil(math.log(FADED) / math.log(self._beta))
            self._moments = torch.tensor([0.0, 0.0, 0.0, 1.0, -fading], dtype=torch.float64)
            return
        self._moments = torch.tensor(saved["moments"], dtype=torch.float64)
        self._sums = torch.tensor(saved["window"], dtype=torch.float64)
        self.stages[:] = [(int(step), int(size)) for step, size in saved["stages"]]


@torch.no_grad()
def _square_of_mean(shards: Shards, accelerator: Accelerator) -> Tensor:
    """Return ``|exp_avg|^2`` over all parameters, (), on the device of the losses. Collective on several processes.

    Replicas of a shard are summed as well, so the sum is divided by the number of times that an element was counted.
    """
    names = shards.state_names().get(MEAN, [])
    means = [shards.state(name, MEAN) for name in names]
    device = accelerator.device
    squares = [square_of_norm(mean).to(device) for mean in means]
    if not squares:
        squares = [widest(torch.zeros((), device=device))]
    total = torch.stack(squares).sum()
    if accelerator.num_processes == 1:
        return total
    elements = sum(shards.shape(name).numel() for name in names)
    counted = total.new_full((), sum(mean.numel() for mean in means))
    total, counted = cast(Tensor, accelerator.reduce(torch.stack([total, counted]), "sum")).unbind()
    return total * elements / counted.clamp(min=1.0)

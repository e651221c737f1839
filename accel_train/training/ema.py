"""Weight averaging in fp32 on this rank's shards: an EMA, or the optimizer's own average."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from accel_train.config import FractionBelowOne, UsageError
from accel_train.training.optimizer_choice import averages_weights
from accel_train.training.optimizer_classes.fused_adamw import FusedAdamW
from accel_train.training.parameters import unwrapped
from accel_train.training.shards import Shards
from accel_train.training.step_guard import StepGuard
from accel_train.wording import shortened


@dataclass(frozen=True)
class EmaConfig:
    """EMA of the weights for evaluation and sampling, saved as ema.safetensors beside the trained weights."""

    decay: FractionBelowOne = 0.999
    """Share of the old EMA kept per step. Starts lower and rises with the step. 0 switches the EMA off. A schedule-free
    optimizer averages by itself and requires 0; its average takes the EMA's place."""


class Ema:
    """EMA of the weights. Elementwise on shards, so it costs no communication under any strategy.

    Every rank builds and updates it. The averages are fp32 even under bf16, because a difference of 1 - decay is lost
    in bf16's 8 bits. With decay 0 there are none, and no cost: the EMA is the weights. A step that ``guard`` leaves out
    does not move it.
    """

    def __init__(self, config: EmaConfig, shards: Shards, guard: StepGuard | None = None) -> None:
        self.config = config
        self.guard = guard or StepGuard()
        self.shards = shards
        """View of the averaged parameters and of their optimizer's state."""
        self._averages: dict[str, torch.Tensor] = {}
        if self.is_on:
            for name in shards.parameters:
                self._averages[name] = shards.master(name).float().clone()
        self._fused: FusedAdamW | None = None
        """An optimizer that moves the averages in the pass over memory that updates the weights."""
        if self.is_on and isinstance(shards.optimizer, FusedAdamW) and shards.optimizer.one_pass:
            self._fused = shards.optimizer
        self._is_announced = False
        """Steps are announced, as ``prepared.window`` does."""
        self._owed_step: int | None = None
        """The announced step whose ``update`` is still to come."""
        self._is_left = False
        """True after an error in ``applied`` that left the EMA in the model, in place of the trained weights."""

    @property
    def is_on(self) -> bool:
        """False where the weights themselves are evaluated."""
        return self.config.decay > 0

    @property
    def averages(self) -> dict[str, torch.Tensor]:
        """EMA by parameter name, this rank's shard."""
        return self._averages

    def held(self) -> list[torch.Tensor]:
        """Return the tensors held, to measure their size. Unlike ``averages``, computes nothing."""
        return list(self._averages.values())

    def update(self, step: int) -> None:
        """Move the EMA towards the weights after optimizer step ``step`` (0-based).

        Raises ``RuntimeError`` unless it is the announced step, and the first call for it.
        """
        self._settle(step)
        if self.config.decay == 0 or self.guard.skips_this_step:
            return
        if self._fused is None or not self._fused.has_averaged:
            self._move(step)

    def _settle(self, step: int) -> None:
        # With decay 0 too, or the recipe would fail only once the EMA is on.
        if self._is_announced and step != self._owed_step:
            finding = "a second time in a step"
            if self._owed_step is not None:
                finding = f"instead of prepared.ema.update({self._owed_step})"
            raise RuntimeError(
                f"prepared.ema.update({step}) was called {finding}, and the EMA would not be that of the steps; call "
                "prepared.ema.update(batches.step) once in every step, after optimizer.step()"
            )
        self._owed_step = None

    def announce(self, step: int) -> None:
        """Let the optimizer move the averages within its coming step ``step``, if it can.

        ``update`` must follow it (``require_update``). Without this call, and with any other optimizer, ``update``
        moves them. Raises ``RuntimeError`` after an error of ``applied`` that left the EMA in the model.
        """
        if self._is_left:
            raise RuntimeError(
                f"step {step + 1} would train the EMA weights: an evaluation failed, and under ZeRO the trained "
                "weights can be restored only on all processes together; let its error end the run, and start it "
                "again"
            )
        self._is_announced = True
        self._owed_step = step
        if self._fused is None:
            return
        averages: dict[torch.Tensor, torch.Tensor] = {
            self.shards.parameters[name]: average for name, average in self._averages.items()
        }
        self._fused.average_next(averages, 1 - decay_at(self.config.decay, step))

    def require_update(self) -> None:
        """Raise ``RuntimeError`` if ``update`` has not followed the last ``announce``: it is not the EMA of the step.

        Does nothing for an EMA used without ``announce``.
        """
        if self.is_on and self._owed_step is not None:
            without = " (or give --ema.decay 0, to train without an EMA)" if self.config.decay > 0 else ""
            raise RuntimeError(
                f"step {self._owed_step + 1}: the loop did not call prepared.ema.update, so what is evaluated and "
                "saved would not be the EMA of this step; call it in every step, after optimizer.step() and before "
                f"training.save_if_due and training.evaluate{without}"
            )

    def _move(self, step: int) -> None:
        # Looked up in every step, because FSDP2 and DeepSpeed may replace the tensors behind the names.
        masters = [self.shards.master(name) for name in self._averages]
        decay = decay_at(self.config.decay, step)
        # None unless the device itself may leave out this step without the host knowing.
        weight_of_step = self.guard.weight_of_step
        if weight_of_step is not None:
            self._update_on_device(masters, weight_of_step * (1 - decay))
            return
        lerp = torch._foreach_lerp_  # pyright: ignore[reportPrivateUsage]
        # One kernel for many tensors: a loop over them would be bound by launches.
        lerp(list(self._averages.values()), masters, 1 - decay)

    def _update_on_device(self, masters: list[torch.Tensor], weight: torch.Tensor) -> None:
        """Move by a weight that the host does not know: 0 for a step left out, which changes no bit.

        One kernel per tensor, because torch's foreach kernel takes the weight from the host. The values are the same.
        """
        for average, master in zip(self._averages.values(), masters, strict=True):
            average.lerp_(master, weight)

    @contextmanager
    def applied(self) -> Generator[None]:
        """Run the body with the EMA in the model, on all ranks. The trained weights come back bit for bit.

        They do not come back after an error under ZeRO with several processes: the others may not have met it, and this
        one would wait for them in the collective that brings the weights back, while they wait for it elsewhere. Raises
        ``RuntimeError`` before the body if the EMA lags behind the step (``require_update``).
        """
        self.require_update()
        if not self.is_on:
            yield
            return
        averages = self.averages
        # Under DDP and FSDP2 the forward uses the master weights themselves, and `show` overwrites them.
        trained = {name: self.shards.master(name).clone() for name in averages}
        self.shards.show(averages)
        try:
            yield
        except Exception:
            self._is_left = not self.shards.shows_alone
            raise
        finally:
            if not self._is_left:
                self.shards.show(trained)


class OptimizerAverage(Ema):
    """The average that a schedule-free optimizer keeps, in the place of the EMA: evaluated, saved and exported.

    Defazio et al., The Road Less Scheduled (arXiv:2405.15682): gradients are taken at y, an interpolation of the
    average x and the fast weights z, and x is what to use. A checkpoint has y as the weights, z as optimizer state and
    x as the EMA, so a resume goes on with the same bits.
    """

    def __init__(self, config: EmaConfig, shards: Shards, guard: StepGuard, optimizer: Any) -> None:
        super().__init__(config, shards, guard)
        self._optimizer = optimizer
        self._is_stale = False

    @property
    def is_on(self) -> bool:
        return True

    def update(self, step: int) -> None:
        """Note that the optimizer has stepped. Its average is computed when somebody asks for it."""
        self._settle(step)
        self._is_stale = True

    @property
    def averages(self) -> dict[str, torch.Tensor]:
        if self._is_stale:
            self._read_average()
            # A restored average stays until the next step: without optimizer state it could not be computed.
            self._is_stale = False
        return self._averages

    @torch.no_grad()
    def _read_average(self) -> None:
        masters = {name: self.shards.master(name) for name in self._averages}
        trained = {name: master.clone() for name, master in masters.items()}
        # `eval` writes the average over the trained weights, in place, and from there it is copied.
        self._optimizer.eval()
        for name, master in masters.items():
            self._averages[name].copy_(master)
        self._optimizer.train()
        # `eval` and `train` cancel out only up to rounding, and reading the average must not change the trajectory.
        for name, master in masters.items():
            master.copy_(trained[name])


def build_ema(config: EmaConfig, shards: Shards, guard: StepGuard, optimizer: Any) -> Ema:
    """Build the EMA, or the average of a schedule-free ``optimizer``, after ``prepare``.

    Raises ``UsageError`` for an EMA beside such an average, because a checkpoint holds only one of them.
    """
    # Accelerate's wrapper has both methods whether its optimizer has them or not.
    inner = unwrapped(optimizer)
    if not averages_weights(inner):
        return Ema(config, shards, guard)
    if config.decay > 0:
        raise UsageError(
            f"ema.decay: {config.decay}: {type(inner).__name__} averages the weights itself, and its average is "
            "evaluated and saved instead of the EMA, so 0 is required. Give --ema.decay 0"
        )
    return OptimizerAverage(config, shards, guard, inner)


def refuse_wide(trained: Mapping[str, torch.Tensor]) -> None:
    """Raise ``UsageError`` for trained parameters, by name, that fp32 cannot hold: complex or float64."""
    # The cast would drop the imaginary part.
    unreal = [name for name, parameter in trained.items() if parameter.is_complex()]
    if unreal:
        raise UsageError(
            f"the model: {shortened(unreal, 3)} is complex, which a checkpoint cannot hold; train torch.view_as_real "
            "of it, and use torch.view_as_complex in forward"
        )
    wide = [name for name, parameter in trained.items() if parameter.dtype == torch.float64]
    if wide:
        raise UsageError(
            f"the model: {shortened(wide, 3)} is trained in float64, but weights, optimizer state and EMA are kept in "
            "fp32; call model.float(), and convert to float64 in forward where the arithmetic needs it"
        )


def decay_at(decay: float, step: int) -> float:
    """``min(decay, (1 + step) / (10 + step))``: the early EMA forgets the random start (diffusers' EMAModel)."""
    return min(decay, (1 + step) / (10 + step))

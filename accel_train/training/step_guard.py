"""Guard against non-finite steps, without a device wait in every step.

torch's fused optimizers accept two tensors made for loss scaling: ``found_inf`` = 1 skips the update, and
``grad_scale`` divides the gradient. ``StepGuard`` owns both. A non-finite loss or norm sets the first on the device,
and clipping sets the second. The host reads them at log points and saves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

KERNEL_DEVICES = ("cpu", "cuda", "xpu")
"""Devices with torch's kernel for the detection of non-finite values."""


class NonFiniteError(RuntimeError):
    """Non-finite loss or gradient on some rank. Raised on every rank, with the optimizer as it was before."""


_ADVICE = {"bf16": "try --precision fp32", "fp16": "try --precision bf16, which overflows later, or fp32"}
"""Further remedy by precision. A run in fp32 has no finer precision to go to."""


@dataclass(frozen=True)
class Evidence:
    """Small device tensors of one step, enough to find and explain a non-finite value later."""

    step: int
    terms: tuple[str, ...]
    totals: Tensor
    """(K,) sums of the terms, the same on every rank."""
    norm: Tensor | None
    """Norm of the global gradient. None before it is known."""
    sums: Sequence[Sequence[Tensor]]
    """The K sums of each micro-batch of this rank."""
    samples: Sequence[Tensor | None]
    """Sample numbers of each micro-batch of this rank, None where the batch has none."""
    precision: str = "fp32"

    def read(self) -> float:
        """Return the norm (without one, the last total) on the host. Waits for the device.

        Raises ``NonFiniteError`` on every rank or on none, because all ranks read the same reduced values.
        """
        reduced = self.totals
        if self.norm is not None:
            # One tensor, so that the host waits once.
            norm = self.norm.reshape(1).to(self.totals)
            reduced = torch.cat([self.totals, norm])
        values: list[float] = reduced.tolist()
        if all(map(math.isfinite, values)):
            return values[-1]
        losses = values[: len(self.terms)]
        if all(map(math.isfinite, losses)):
            everything = range(len(self.samples))
            raise NonFiniteError(self._explain("gradient", f"norm {values[-1]}", everything))
        # A wait for each micro-batch, which only a run that ends can afford.
        non_finite: list[int] = []
        for index, sums in enumerate(self.sums):
            if not bool(torch.isfinite(torch.stack(list(sums))).all()):
                non_finite.append(index)
        by_term = dict(zip(self.terms, losses, strict=True))
        raise NonFiniteError(self._explain("loss", by_term, non_finite))

    def _explain(self, quantity: str, value: object, micro_batches: Sequence[int]) -> str:
        suspects: set[int] = set()
        for index in micro_batches:
            samples = self.samples[index]
            if samples is not None:
                suspects.update(samples.tolist())
        local = sorted(suspects)
        by_rank = [local]
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            # Every rank is here: all have read the same reduced values.
            by_rank = [[] for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather_object(by_rank, local)
        found = "; ".join(f"rank {rank}: {samples}" for rank, samples in enumerate(by_rank) if samples)
        return (
            f"{quantity} of step {self.step} is not finite ({value}); the optimizer has not stepped and the last "
            f"checkpoint is untouched. Samples of the micro-batches concerned: {found or 'unknown'}. Look at those "
            f"samples, lower the learning rate, or {_ADVICE.get(self.precision, 'lengthen the warm-up')}"
        )


class StepGuard:
    """Stop the optimizer on the device at the first non-finite step, and raise on the host in ``check``.

    Build it on every rank with ``resolve_step_guard``, pass it to each ``GradientWindow``, and call ``check`` before
    anything is saved (``StepResult.fields`` calls it at a log point). Steps between a non-finite step and the next
    check are wasted. Weights, optimizer state and step counts stay as they were before the non-finite step.
    """

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        self.found = torch.zeros((), device=device)
        self.scale = torch.ones((), device=device)
        self._one = torch.ones((), device=device)
        self._unread: list[Evidence] = []
        self._error: NonFiniteError | None = None
        # Attributes read by torch's fused optimizers, as set by ``GradScaler.step``.
        optimizer.found_inf = self.found
        optimizer.grad_scale = self.scale

    def watch(self, evidence: Evidence, norm: Tensor, max_grad_norm: float) -> None:
        """Check one step on the device, without a wait. The optimizer's next step clips the gradient to
        ``max_grad_norm`` (0: no clipping), or does nothing after a non-finite step."""
        check_and_unscale = torch._amp_foreach_non_finite_check_and_unscale_  # pyright: ignore[reportPrivateUsage]
        # The kernel sets `found` and never clears it, so the optimizer stays stopped in the steps that follow.
        check_and_unscale([evidence.totals, norm], self.found, self._one)  # a scale of 1 changes neither
        # The optimizer divides by it, and by 1 where the norm is below the limit.
        if max_grad_norm > 0:
            torch.clamp(norm / max_grad_norm, min=1.0, out=self.scale)
        else:
            self.scale.fill_(1.0)
        self._unread.append(evidence)

    def check(self) -> None:
        """Wait for the device once and raise ``NonFiniteError`` for the first non-finite step since the last check.

        All ranks call it at the same step. After an error, every later check raises it again, because the optimizer
        stays stopped.
        """
        unread = self._unread
        self._unread = []
        if self._error is None and unread and bool(self.found):
            try:
                for evidence in unread:
                    evidence.read()
            except NonFiniteError as error:
                self._error = error
        if self._error is not None:
            raise self._error


@dataclass(frozen=True)
class StepResult:
    """Losses and gradient norm of one optimizer step. Tensors stay on the device: reading them waits for it."""

    coefficients: Mapping[str, float]
    """``c_k``."""
    sums: Tensor
    """``S_k`` of the global batch, (K,)."""
    weights: dict[str, Tensor]
    """``W_k`` of the global batch."""
    grad_norm: Tensor
    """Norm of the global gradient before clipping."""
    overflows: int = 0
    """fp16: attempts at this step repeated with a lower loss scale."""
    guard: StepGuard | None = None
    all_overflows: int | None = None
    """Sum of ``overflows`` over all steps of this process. None without a loss scale."""

    @property
    def loss(self) -> Tensor:
        """Loss of the global batch, ``sum_k c_k * S_k / W_k``. Computed on access."""
        parts: list[Tensor] = []
        for total, (name, coefficient) in zip(self.sums, self.coefficients.items(), strict=True):
            factor = term_factor(coefficient, self.weights[name])
            parts.append(total * factor)
        return torch.stack(parts).sum()

    @property
    def terms(self) -> dict[str, Tensor]:
        """``S_k / W_k`` of each term with a coefficient. Computed on access."""
        terms: dict[str, Tensor] = {}
        for total, (k, coefficient) in zip(self.sums, self.coefficients.items(), strict=True):
            if coefficient != 0:
                terms[k] = total / self.weights[k].clamp(min=1e-12).float()
        return terms

    def fields(self) -> dict[str, float]:
        """``loss``, ``loss_TERM``, ``grad_norm`` and, with a loss scale, ``overflows`` so far, as numbers.

        For log points: waits for the device. All ranks call it. Raises ``NonFiniteError`` where the guard has stopped
        the optimizer.
        """
        self.check()
        tensors = {"loss": self.loss}
        for name, value in self.terms.items():
            tensors[f"loss_{name}"] = value
        tensors["grad_norm"] = self.grad_norm
        # One stacked tensor, so that the host waits once.
        stacked = torch.stack([value.float() for value in tensors.values()])
        values: list[float] = stacked.tolist()
        numbers = dict(zip(tensors, values, strict=True))
        if self.all_overflows is not None:
            numbers["overflows"] = self.all_overflows
        return numbers

    def check(self) -> None:
        """Make sure that every step so far was finite. Call it before a checkpoint, on all ranks.

        Waits for the device with a guard. Raises ``NonFiniteError``.
        """
        if self.guard is not None:
            self.guard.check()


def term_factor(coefficient: float, weight: Tensor) -> Tensor:
    """Quotient in fp32, 0 for a term without weight in this step."""
    dtype = weight.dtype if weight.is_floating_point() else torch.float32
    return (_constant(coefficient, weight.device, dtype) / weight).nan_to_num_(0.0, 0.0, 0.0).float()


@lru_cache(maxsize=64)
def _constant(value: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A number on the device, filled there because a copy from the host would wait."""
    with torch.inference_mode(False):  # the first caller may be an evaluation
        return torch.full((), value, device=device, dtype=dtype)


def resolve_step_guard(
    accelerator: Accelerator, optimizer: Any, *, on_cpu: bool = False
) -> tuple[StepGuard | None, str]:
    """Build the guard for a prepared optimizer, and return the reason of the decision.

    Without a guard ``GradientWindow`` checks every step on the host. That is the choice on a CPU, where the check
    costs nothing, and for optimizers that cannot be stopped on the device. ``on_cpu`` builds a guard on a CPU as
    well: an error is then raised at the next log point, not at once.
    """
    if accelerator.device.type == "cpu" and not on_cpu:
        return None, "every step is known to be finite before the next: on a CPU there is nothing to wait for"
    inner = getattr(optimizer, "optimizer", optimizer)  # inside Accelerate's wrapper
    because = None
    devices = [p.device for group in inner.param_groups for p in group["params"]]
    device = devices[0] if devices else accelerator.device
    if accelerator.distributed_type == DistributedType.DEEPSPEED:  # ZeRO-3 keeps its parameters elsewhere
        because = "DeepSpeed's engine clips and steps by itself"
    elif accelerator.scaler is not None:
        because = "fp16's loss scale is decided on the host"
    elif not getattr(inner, "_step_supports_amp_scaling", False):
        because = f"{type(inner).__name__} cannot be stopped on the device; fused AdamW can"
    elif device.type not in KERNEL_DEVICES or device.type != accelerator.device.type:  # an index may be left out
        because = f"the parameters are on {device}, the losses on {accelerator.device}"
    if because is not None:
        return None, f"every step waits for the device, to know that it is finite: {because}"
    return StepGuard(inner, device), "the device is waited for at log points and saves only"


def read_loss_scale(accelerator: Accelerator, model: nn.Module) -> dict[str, Any] | None:
    """Return the scale, and the steps since it last changed. None if nothing is scaled. May wait for the device."""
    scaler: Any = accelerator.scaler
    if scaler is not None:
        state = scaler.state_dict()
        return {"scale": float(state["scale"]), "steps": int(state["_growth_tracker"])}
    loss_scaler = _of_deepspeed(accelerator, model)
    if loss_scaler is None:
        return None
    steps = loss_scaler.cur_iter - loss_scaler.last_overflow_iter - 1
    return {"scale": float(loss_scaler.cur_scale), "steps": int(steps)}


def write_loss_scale(accelerator: Accelerator, model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Set the scale and the steps since it last changed. Does nothing if nothing is scaled."""
    scaler: Any = accelerator.scaler
    if scaler is not None:
        state = scaler.state_dict()
        state["scale"] = float(saved["scale"])
        state["_growth_tracker"] = int(saved["steps"])
        scaler.load_state_dict(state)
        return
    loss_scaler = _of_deepspeed(accelerator, model)
    if loss_scaler is not None:
        loss_scaler.cur_scale = float(saved["scale"])
        loss_scaler.cur_iter = loss_scaler.last_overflow_iter + int(saved["steps"]) + 1


def _of_deepspeed(accelerator: Accelerator, model: nn.Module) -> Any:
    """Return DeepSpeed's dynamic loss scaler, None without one."""
    if accelerator.mixed_precision != "fp16":
        return None
    engine: Any = model
    loss_scaler = getattr(getattr(engine, "optimizer", None), "loss_scaler", None)
    # A static scale has no counters, and comes from the launch file.
    return loss_scaler if hasattr(loss_scaler, "cur_iter") else None

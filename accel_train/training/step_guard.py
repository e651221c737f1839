"""A step that is not finite moves nothing, and nobody waits for the device to know it.

torch's fused optimizers take two tensors that were made for loss scaling: ``found_inf``, at 1 of which they leave
everything as it is, and ``grad_scale``, by which they divide the gradient. ``StepGuard`` owns both: the first is set on
the device by a loss or a norm that is not finite, the second clips. The host reads them at log points and saves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor

KERNEL_DEVICES = ("cpu", "cuda", "xpu")
"""Where torch has the kernel that looks for values which are not finite."""


class NonFiniteError(RuntimeError):
    """A loss or gradient of some rank is not finite. Raised on every rank; the optimizer has not moved since."""


_ADVICE = {"bf16": "try --precision fp32", "fp16": "try --precision bf16, which overflows later, or fp32"}
"""What may help beside; a run in fp32 has no finer precision to go to."""


@dataclass(frozen=True)
class Evidence:
    """What tells whether one step was finite, and where it was not: small tensors of the device."""

    step: int
    terms: tuple[str, ...]
    totals: Tensor
    """(K,) sums of the terms, the same on every rank."""
    norm: Tensor | None
    """Of the global gradient; None before it is known."""
    sums: Sequence[Sequence[Tensor]]
    """Of each micro-batch of this rank, its K sums."""
    samples: Sequence[Tensor | None]
    """Samples of each micro-batch of this rank, where the batch names them."""
    precision: str = "fp32"
    """Of the computation."""

    def read(self) -> float:
        """The norm (without one, the last total), on the host: waits for the device.

        Raises ``NonFiniteError``, on every rank or on none, as all read the same reduced values.
        """
        both = self.totals if self.norm is None else torch.cat([self.totals, self.norm.reshape(1).to(self.totals)])
        values: list[float] = both.tolist()
        if all(map(math.isfinite, values)):
            return values[-1]
        if all(map(math.isfinite, values[: len(self.terms)])):
            raise NonFiniteError(self._explain("gradient", f"norm {values[-1]}", range(len(self.samples))))
        bad = [i for i, s in enumerate(self.sums) if not bool(torch.isfinite(torch.stack(list(s))).all())]
        value = dict(zip(self.terms, values, strict=False))
        raise NonFiniteError(self._explain("loss", value, bad))

    def _explain(self, what: str, value: object, micro_batches: Sequence[int]) -> str:
        local = sorted({s for i in micro_batches if (ids := self.samples[i]) is not None for s in ids.tolist()})
        everywhere = [local]
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            everywhere = [[] for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather_object(everywhere, local)
        found = "; ".join(f"rank {r}: {ids}" for r, ids in enumerate(everywhere) if ids)
        return (
            f"{what} of step {self.step} is not finite ({value}); the optimizer has not stepped and the last "
            f"checkpoint is untouched. Samples of the micro-batches concerned: {found or 'unknown'}. Look at those "
            f"samples, lower the learning rate, or {_ADVICE.get(self.precision, 'lengthen the warm-up')}"
        )


class StepGuard:
    """Stops the optimizer on the device at the first step that is not finite; ``check`` tells the host.

    Build it on every rank with ``resolve_step_guard``, give it to each ``GradientWindow``, and call ``check`` before
    anything is saved (``StepResult.fields`` calls it at a log point). From the step that was not finite to the next
    check the run computes in vain; weights, optimizer state and step counts stay as that step found them.
    """

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        self.found = torch.zeros((), device=device)
        self.scale = torch.ones((), device=device)
        self._one = torch.ones((), device=device)
        self._unread: list[Evidence] = []
        self._error: NonFiniteError | None = None
        optimizer.found_inf, optimizer.grad_scale = self.found, self.scale

    def watch(self, evidence: Evidence, norm: Tensor, max_grad_norm: float) -> None:
        """Take one step's figures: no wait. The optimizer's next step divides the gradient so that its norm is at most
        ``max_grad_norm`` (0: leaves it), or does nothing."""
        look = torch._amp_foreach_non_finite_check_and_unscale_  # pyright: ignore[reportPrivateUsage]
        look([evidence.totals, norm], self.found, self._one)
        if max_grad_norm > 0:
            torch.clamp(norm / max_grad_norm, min=1.0, out=self.scale)
        else:
            self.scale.fill_(1.0)
        self._unread.append(evidence)

    def check(self) -> None:
        """Wait for the device once and raise ``NonFiniteError`` for the first step since the last check that was not
        finite. All ranks, at the same step. Once raised it is raised again: the optimizer stands still for good."""
        unread, self._unread = self._unread, []
        if self._error is None and unread and bool(self.found):
            try:
                for evidence in unread:
                    evidence.read()
            except NonFiniteError as error:
                self._error = error
        if self._error is not None:
            raise self._error


def resolve_step_guard(
    accelerator: Accelerator, optimizer: Any, *, on_cpu: bool = False
) -> tuple[StepGuard | None, str]:
    """The guard for what ``prepare`` returned, and the reason. None: ``GradientWindow`` looks at every step instead,
    because the optimizer cannot be stopped on the device, or because looking costs nothing.

    ``on_cpu`` gives one on a CPU as well, where an error then comes at the next log point and not at once.
    """
    if accelerator.device.type == "cpu" and not on_cpu:
        return None, "every step is known to be finite before the next: on a CPU there is nothing to wait for"
    inner, because = getattr(optimizer, "optimizer", optimizer), None
    device = next((p.device for group in inner.param_groups for p in group["params"]), accelerator.device)
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

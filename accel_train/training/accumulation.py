"""The gradient of one optimizer step, the same however its batch is cut.

A step's loss is ``sum_k c_k * S_k / W_k`` over its terms k: ``c_k`` a coefficient, ``S_k`` the sum of the term
over the global batch, ``W_k`` its weight (tokens, samples, points) over the global batch. The weights are known
before the first forward, so each micro-batch is divided by the true total, and not, as is usual, by the number
of micro-batches (Lightning#19987, transformers#34373: mean of means).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

SyncPolicy = Literal["auto", "last", "every"]
Batch = dict[str, Tensor]


DDP_TYPES = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


class NonFiniteError(RuntimeError):
    """A loss or gradient of some rank is not finite. Raised on every rank, before the optimizer has stepped."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step reports. Tensors stay on the device: reading them waits for it."""

    loss: Tensor
    """Loss of the global batch, ``sum_k c_k * S_k / W_k``."""
    terms: dict[str, Tensor]
    """``S_k / W_k`` of each term that has a weight in this step and a coefficient."""
    weights: dict[str, Tensor]
    """``W_k``, and whatever else the micro-batches counted, over the global batch."""
    grad_norm: Tensor
    """Norm of the global gradient before clipping."""
    overflows: int = 0
    """fp16: attempts at this step that a lower loss scale had to repeat."""

    def fields(self) -> dict[str, float]:
        """``loss``, ``loss_TERM`` and ``grad_norm`` as numbers. Waits for the device: for log points."""
        named = {"loss": self.loss} | {f"loss_{k}": v for k, v in self.terms.items()} | {"grad_norm": self.grad_norm}
        return dict(zip(named, torch.stack([v.float() for v in named.values()]).tolist(), strict=True))


def resolve_sync(policy: SyncPolicy, accelerator: Accelerator) -> tuple[Literal["last", "every"], str]:
    """When gradients are reduced within a step, and why.

    ZeRO-2 and -3 hold only a shard of the gradient, so they reduce every micro-batch unless told to keep whole
    local gradients (``last``: one reduction, more memory).
    """
    stage = _zero_stage(accelerator)
    if policy != "auto":
        return (
            policy,
            f"asked for: gradients are reduced on {'every' if policy == 'every' else 'the last'} micro-batch",
        )
    if stage >= 2:
        return "every", f"ZeRO-{stage} keeps only a shard of the gradient, so every micro-batch is reduced"
    return "last", "one reduction per optimizer step, on the last micro-batch"


@contextmanager
def no_sync(accelerator: Accelerator, model: nn.Module, *, enabled: bool = True) -> Generator[None]:
    """Keep gradients local: no reduction in the body, which must hold the forward as well as the backward.

    Takes one module that ``accelerator.prepare`` returned. A list would silently reduce every time
    (diffusers#10553), an unprepared module has nothing to hold back: both raise ``TypeError``.
    """
    if not _is_prepared(accelerator, model):
        raise TypeError(
            f"no_sync needs the one module that accelerator.prepare returned, not {type(model).__name__}; with several "
            "models, wrap them in one nn.Module before prepare"
        )
    accelerator.sync_gradients = not enabled  # what accelerator.backward tells DeepSpeed about the boundary
    try:
        with accelerator.no_sync(model) if enabled else nullcontext():
            yield
    finally:
        accelerator.sync_gradients = True


class GradientWindow:
    """The micro-batches of one optimizer step, their weights, and the gradient that they add up to.

    ::

        window = GradientWindow(accelerator, model, [corrupt(batch, step) for batch in batches], coefficients, step)
        for inputs in window:                               # no gradient reduction until the last
            window.backward(loss_sums(model, inputs))       # {term: sum over the micro-batch}
        result = window.finish(max_grad_norm)               # agree, clip
        optimizer.step()

    Each micro-batch is (inputs, {term: weight}); weights that belong to no term are counts, summed alike. Every rank
    must run the same number of micro-batches. Costs two small reductions a step (weights, losses)
    and one wait for the device, in ``finish``: a non-finite step must be known before the optimizer moves.

    In fp16 the loop over the window ends with a wait of its own. Where the gradient has overflowed, the loss scale
    falls and the same micro-batches come again, so a scale that is too high costs time and no step: step, schedule,
    average and data are those of the experiment. Noise and dropout must be functions of the step.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        micro_batches: Sequence[tuple[Batch, Mapping[str, Tensor]]],
        coefficients: Mapping[str, float],
        step: int,
        policy: SyncPolicy = "auto",
    ) -> None:
        self.accelerator = accelerator
        self.model = model
        self.step = step
        self.inputs = [inputs for inputs, _ in micro_batches]
        self.coefficients = dict(coefficients)
        self.sync, _ = resolve_sync(policy, accelerator)
        self._zero_stage = _zero_stage(accelerator)
        self._coalesced = self.sync == "last" and self._zero_stage >= 2
        self._steps_in_backward = self._zero_stage > 0 and not self._coalesced
        names = list(micro_batches[0][1])
        local = torch.stack([sum_weights(k, [w for _, w in micro_batches]) for k in names])
        reduced: Any = accelerator.reduce(local, "sum")
        self.weights: dict[str, Tensor] = dict(zip(names, reduced.unbind(), strict=True))
        self._sums: list[Tensor] = []
        self._totals: Tensor | None = None
        self._norm: Tensor | None = None
        self._is_last = False
        self._overflows = 0

    def __iter__(self) -> Iterator[Batch]:
        """Yield each micro-batch's inputs; the body of the loop runs without reduction until the last."""
        yield from self._attempt()
        while self._overflowed():
            self._overflows += 1
            self._sums, self._totals, self._norm = [], None, None
            yield from self._attempt()

    def _attempt(self) -> Iterator[Batch]:
        engine: Any = self.model
        with engine.coalesce_grad_reduction() if self._coalesced else nullcontext():
            for i, inputs in enumerate(self.inputs):
                self._is_last = i + 1 == len(self.inputs)
                with self._boundary():
                    yield inputs
        if self._coalesced:
            self._check(self._reduce_sums())
            engine.step()

    def _overflowed(self) -> bool:
        """fp16: whether a lower loss scale can mend the gradient. It has fallen by then, and the gradient is gone."""
        if self.accelerator.mixed_precision == "fp16" and self._zero_stage > 0:
            engine: Any = self.model
            return bool(engine.optimizer.overflow)  # it has lowered its scale, or raised where that was at its end
        scaler: Any = self.accelerator.scaler
        if scaler is None:
            return False
        self._norm = self._measure()
        loss_is_finite, norm_is_finite = (bool(torch.isfinite(v).all()) for v in (self._reduce_sums(), self._norm))
        scale = float(scaler.get_scale())
        if norm_is_finite or not loss_is_finite or scale <= 1:
            return False  # in order, or no matter of the scale: finish says so
        scaler.update()
        if float(scaler.get_scale()) >= scale:  # each value is finite, their norm is not
            scaler.update(scale * scaler.get_backoff_factor())
        self.model.zero_grad(set_to_none=True)
        return True

    def _boundary(self) -> AbstractContextManager[None]:
        hold = self._coalesced or (self.sync == "last" and not self._is_last)
        if self._steps_in_backward and not hold and not self._is_last:
            return _reduce_without_step(self.accelerator)
        return no_sync(self.accelerator, self.model, enabled=hold)

    def backward(self, sums: Mapping[str, Tensor]) -> None:
        """Backward of this micro-batch's share of the loss. ``sums`` must hold every term, in every step.

        The factor ``num_processes`` undoes the averaging of DDP, FSDP2 and ZeRO.
        """
        if set(sums) != set(self.coefficients):
            raise ValueError(f"loss terms {sorted(sums)} do not match the coefficients {sorted(self.coefficients)}")
        self._sums.append(torch.stack([sums[k].detach().float() for k in self.coefficients]))
        if self._is_last and self._steps_in_backward:
            self._check(self._reduce_sums())
        loss = torch.stack([sums[k].float() * self._factor(k) for k in self.coefficients]).sum()
        self.accelerator.backward(loss * self.accelerator.num_processes)

    def finish(self, max_grad_norm: float) -> StepResult:
        """Agree that the step is finite, clip the global gradient to ``max_grad_norm`` (0: only measure it).

        Raises ``NonFiniteError`` on every rank. Under ZeRO the engine has clipped already, by the same number,
        and skips a step whose gradient is not finite.
        """
        totals = self._reduce_sums()
        norm = self._measure() if self._norm is None else self._norm
        value = self._check(totals, norm)
        if 0 < max_grad_norm < value and self._zero_stage == 0:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), max_grad_norm, norm)
        loss = torch.stack([totals[i] * self._factor(k) for i, k in enumerate(self.coefficients)]).sum()
        means = {
            k: totals[i] / self.weights[k].clamp(min=1e-12).float()
            for i, k in enumerate(self.coefficients)
            if self.coefficients[k] != 0
        }
        return StepResult(loss, means, self.weights, norm, self._overflows)

    def _factor(self, term: str) -> Tensor:
        """``c_k / W_k``, 0 for a term that has no weight in this step."""
        weight = self.weights[term]
        return torch.where(weight > 0, self.coefficients[term] / weight, 0.0).float()

    def _reduce_sums(self) -> Tensor:
        """Sums of the terms over all ranks and micro-batches, reduced once a step."""
        if self._totals is None:
            reduced: Any = self.accelerator.reduce(widest(torch.stack(self._sums)).sum(0), "sum")
            self._totals = reduced.float()
        return cast(Tensor, self._totals)

    def _measure(self) -> Tensor:
        """Norm of the global gradient, free of the loss scale. A collective where the gradient is sharded."""
        if self._zero_stage > 0:
            norm: Any = self.accelerator.clip_grad_norm_(self.model.parameters(), math.inf)
            return torch.as_tensor(norm, device=self._reduce_sums().device)
        if self.accelerator.scaler is not None:
            for optimizer in self.accelerator._optimizers:  # pyright: ignore[reportPrivateUsage]
                self.accelerator.scaler.unscale_(optimizer.optimizer)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateUsage]
        norm = torch.linalg.vector_norm(torch.stack(list(norms)))
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def _check(self, totals: Tensor, norm: Tensor | None = None) -> float:
        """The one wait for the device: every rank reads the same reduced values, so all raise or none does.

        Returns the norm.
        """
        values: list[float] = (totals if norm is None else torch.cat([totals, norm.reshape(1).to(totals)])).tolist()
        if all(map(math.isfinite, values)):
            return values[-1]
        if all(map(math.isfinite, values[: len(totals)])):
            raise NonFiniteError(self._explain("gradient", f"norm {values[-1]}", range(len(self.inputs))))
        bad = [i for i, s in enumerate(self._sums) if not bool(torch.isfinite(s).all())]
        value = dict(zip(self.coefficients, values, strict=False))
        raise NonFiniteError(self._explain("loss", value, bad))

    def _explain(self, what: str, value: object, micro_batches: Sequence[int]) -> str:
        samples = [self.inputs[i]["sample"].tolist() for i in micro_batches if "sample" in self.inputs[i]]
        local = sorted({s for ids in samples for s in ids})
        everywhere = [local]
        if self.accelerator.num_processes > 1:
            everywhere = [[] for _ in range(self.accelerator.num_processes)]
            torch.distributed.all_gather_object(everywhere, local)
        found = "; ".join(f"rank {r}: {ids}" for r, ids in enumerate(everywhere) if ids)
        return (
            f"{what} of step {self.step} is not finite ({value}); the optimizer has not stepped and the last "
            f"checkpoint is untouched. Samples of the micro-batches concerned: {found or 'unknown'}. Look at those "
            "samples, lower the learning rate, or try --precision fp32"
        )


def _is_prepared(accelerator: Accelerator, model: object) -> bool:
    known: list[nn.Module] = accelerator._models  # pyright: ignore[reportPrivateUsage]
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel) or accelerator.distributed_type not in DDP_TYPES
    return any(inner is m or model is m for m in known) and wrapped


def sum_weights(term: str, weights: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """This rank's weight of one term over its micro-batches, in fp64 where the device has it (exact for any count)."""
    return torch.stack([widest(w[term]) for w in weights]).sum()


def widest(tensor: Tensor) -> Tensor:
    """In fp64, but for Apple's devices, which have none."""
    return tensor.float() if tensor.device.type == "mps" else tensor.double()


def _zero_stage(accelerator: Accelerator) -> int:
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return 0
    plugin: Any = accelerator.state.deepspeed_plugin
    return int(plugin.zero_stage)


@contextmanager
def _reduce_without_step(accelerator: Accelerator) -> Generator[None]:
    """ZeRO, policy ``every``: the engine reduces this micro-batch but must not step yet."""
    accelerator.sync_gradients = False
    try:
        yield
    finally:
        accelerator.sync_gradients = True

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
from functools import lru_cache
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from accel_train.training.parameters import clear_gradients, without_gradients
from accel_train.training.step_guard import Evidence, StepGuard

SyncPolicy = Literal["auto", "last", "every"]
Batch = dict[str, Tensor]
DDP_TYPES = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step reports. Tensors stay on the device: reading them waits for it."""

    coefficients: Mapping[str, float]
    """``c_k``."""
    sums: Tensor
    """``S_k`` of the global batch, (K,)."""
    weights: dict[str, Tensor]
    """``W_k`` of the global batch."""
    grad_norm: Tensor
    """Norm of the global gradient before clipping."""
    overflows: int = 0
    """fp16: attempts at this step that a lower loss scale had to repeat."""
    guard: StepGuard | None = None
    all_overflows: int | None = None
    """The same of every step since this process began with the model. None where there is no loss scale."""

    @property
    def loss(self) -> Tensor:
        """Loss of the global batch, ``sum_k c_k * S_k / W_k``. Computed when asked for."""
        parts = [self.sums[i] * _factor(c, self.weights[k]) for i, (k, c) in enumerate(self.coefficients.items())]
        return torch.stack(parts).sum()

    @property
    def terms(self) -> dict[str, Tensor]:
        """``S_k / W_k`` of each term that has a weight in this step and a coefficient. Computed when asked for."""
        return {
            k: self.sums[i] / self.weights[k].clamp(min=1e-12).float()
            for i, (k, c) in enumerate(self.coefficients.items())
            if c != 0
        }

    def fields(self) -> dict[str, float]:
        """``loss``, ``loss_TERM``, ``grad_norm`` and, with a loss scale, ``overflows`` so far, as numbers.

        Waits for the device: for log points. Raises ``NonFiniteError`` where the guard has stopped the optimizer; all
        ranks call it.
        """
        if self.guard is not None:
            self.guard.check()
        named = {"loss": self.loss} | {f"loss_{k}": v for k, v in self.terms.items()} | {"grad_norm": self.grad_norm}
        numbers: list[float] = torch.stack([v.float() for v in named.values()]).tolist()
        counted = {} if self.all_overflows is None else {"overflows": self.all_overflows}
        return dict(zip(named, numbers, strict=True)) | counted

    def check(self) -> None:
        """Before a checkpoint: see to it that no step so far was not finite.

        Waits for the device with a guard. Raises ``NonFiniteError``; all ranks call it.
        """
        if self.guard is not None:
            self.guard.check()


def resolve_sync(policy: SyncPolicy, accelerator: Accelerator) -> tuple[Literal["last", "every"], str]:
    """When gradients are reduced within a step, and why.

    ZeRO-2 and -3 hold only a shard of the gradient, so they reduce every micro-batch unless told to keep whole
    local gradients (``last``: one reduction, more memory).
    """
    stage = _zero_stage(accelerator)
    when = _when(policy, stage)
    if policy != "auto":
        return when, f"asked for: gradients are reduced on {'every' if policy == 'every' else 'the last'} micro-batch"
    if when == "every":
        return when, f"ZeRO-{stage} keeps only a shard of the gradient, so every micro-batch is reduced"
    return when, "one reduction per optimizer step, on the last micro-batch"


def _when(policy: SyncPolicy, zero_stage: int) -> Literal["last", "every"]:
    if policy != "auto":
        return policy
    return "every" if zero_stage >= 2 else "last"


@contextmanager
def no_sync(accelerator: Accelerator, model: nn.Module, *, enabled: bool = True) -> Generator[None]:
    """Keep gradients local: no reduction in the body, which must hold the forward as well as the backward.

    Takes one module that ``accelerator.prepare`` returned. A list would silently reduce every time
    (diffusers#10553), an unprepared module has nothing to hold back: both raise ``TypeError``.
    """
    _require_prepared(accelerator, model)
    accelerator.sync_gradients = not enabled  # what accelerator.backward tells DeepSpeed about the boundary
    try:
        with accelerator.no_sync(model) if enabled else nullcontext():
            yield
    finally:
        accelerator.sync_gradients = True


class GradientWindow:
    """The micro-batches of one optimizer step, their weights, and the gradient that they add up to::

        window = GradientWindow(accelerator, model, [corrupt(batch, step) for batch in batches], coefficients, step)
        for inputs in window:                               # no gradient reduction until the last
            window.backward(loss_sums(model, inputs))       # {term: sum over the micro-batch}
        result = window.finish(max_grad_norm)               # agree, clip
        optimizer.step()

    Each micro-batch is (inputs, {term: weight}). Coefficients, weights and sums name the same terms, or ``ValueError``.
    One tensor is the weight of every term, and one tensor the sum of the only term, which ``coefficients`` names. Every
    rank must run the same number of micro-batches. Costs two small reductions a step (weights, losses). A step that is
    not finite must not move the optimizer: with ``guard`` the device sees to it
    (``resolve_step_guard``), without one ``finish`` waits for the device in every step.

    In fp16 the loop over the window ends with a wait of its own. Where the gradient has overflowed, the loss scale
    falls and the same micro-batches come again, so a scale that is too high costs time and no step: step, schedule,
    average and data are those of the experiment. Noise and dropout must be functions of the step.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        micro_batches: Sequence[tuple[Batch, Mapping[str, Tensor] | Tensor]],
        coefficients: Mapping[str, float],
        step: int,
        policy: SyncPolicy = "auto",
        guard: StepGuard | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.model = model
        self._parameters = _parameters(accelerator, model)
        self._optimizers: list[Any] = accelerator._optimizers  # pyright: ignore[reportPrivateUsage]
        self.step = step
        self.guard = guard
        self.inputs = [inputs for inputs, _ in micro_batches]
        self.coefficients = dict(coefficients)
        self._zero_stage = _zero_stage(accelerator)
        self.sync = _when(policy, self._zero_stage)
        self._coalesced = self.sync == "last" and self._zero_stage >= 2
        self._steps_in_backward = self._zero_stage > 0 and not self._coalesced
        weights = [dict.fromkeys(coefficients, w) if isinstance(w, Tensor) else w for _, w in micro_batches]
        for found in weights:
            self._require_terms(found, "weights")
        self.weights = _global_weights(accelerator, weights)
        self._factors = [_factor(c * accelerator.num_processes, self.weights[k]) for k, c in self.coefficients.items()]
        self._sums: list[list[Tensor]] = []
        self._totals: Tensor | None = None
        self._norm: Tensor | None = None
        self._is_last = False
        self._overflows = 0

    def __iter__(self) -> Iterator[Batch]:
        """Yield each micro-batch's inputs; the body of the loop runs without reduction until the last."""
        if _will_rebuild_buckets(self.model, self.accelerator.num_processes):
            yield from self._rehearsal()
        yield from self._attempt()
        while self._overflowed():
            self._overflows += 1
            self._sums, self._totals, self._norm = [], None, None
            yield from self._attempt()

    def _rehearsal(self) -> Iterator[Batch]:
        """One backward that is thrown away, its draws too: a process's first, under DDP (``_will_rebuild_buckets``)."""
        on_device = torch.cuda.is_initialized()
        states = torch.get_rng_state(), torch.cuda.get_rng_state() if on_device else None
        self._is_last = True
        yield self.inputs[0]
        self.model.zero_grad(set_to_none=True)
        self._sums, self._totals = [], None
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1])

    def _attempt(self) -> Iterator[Batch]:
        engine: Any = self.model
        held_back = without_gradients(self.model, self._optimizers) if self._zero_stage > 0 else nullcontext()
        with engine.coalesce_grad_reduction() if self._coalesced else nullcontext(), held_back:
            for i, inputs in enumerate(self.inputs):
                self._is_last = i + 1 == len(self.inputs)
                with self._boundary():
                    yield inputs
        if self._coalesced:
            self._evidence(None).read()
            engine.step()

    def _overflowed(self) -> bool:
        """fp16: whether a lower loss scale can mend the gradient. It has fallen by then, and the gradient is gone."""
        if self._zero_stage > 0 and self.accelerator.mixed_precision == "fp16":
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
        return no_sync(self.accelerator, self.model) if hold else nullcontext()

    def backward(self, sums: Mapping[str, Tensor] | Tensor) -> None:
        """Backward of this micro-batch's share of the loss. ``sums`` must hold every term, in every step; a tensor is
        the sum of the only one.

        The number of processes is in the factors: it undoes the averaging of DDP, FSDP2 and ZeRO.
        """
        if isinstance(sums, Tensor):
            if (terms := len(self.coefficients)) != 1:
                raise ValueError(f"one tensor for {terms} loss terms; give {sorted(self.coefficients)} each")
            sums = dict.fromkeys(self.coefficients, sums)
        self._require_terms(sums, "sums")
        terms = [sums[k].float() for k in self.coefficients]
        self._sums.append([term.detach() for term in terms])
        if self._is_last and self._steps_in_backward:
            self._evidence(None).read()
        parts = [term * factor for term, factor in zip(terms, self._factors, strict=True)]
        self.accelerator.backward(parts[0] if len(parts) == 1 else torch.stack(parts).sum())

    def _require_terms(self, found: Mapping[str, Tensor], what: str) -> None:
        if found.keys() != self.coefficients.keys():
            raise ValueError(
                f"step {self.step}: a micro-batch has {what} of {sorted(found)}, the loss terms by their coefficients "
                f"are {sorted(self.coefficients)}; name the same terms in both, with coefficient 0 where one is unused"
            )

    def finish(self, max_grad_norm: float) -> StepResult:
        """Clip the global gradient to ``max_grad_norm`` (0: only measure it), and agree that the step is finite.

        Without a guard it raises ``NonFiniteError`` on every rank; with one, ``guard.check`` does, later. Under ZeRO
        the engine has clipped already, by the same number, and skips a step whose gradient is not finite.
        """
        norm = self._measure() if self._norm is None else self._norm
        evidence = self._evidence(norm)
        if self.guard is not None:
            self.guard.watch(evidence, norm, max_grad_norm)
        else:
            value = evidence.read()
            if 0 < max_grad_norm < value and self._zero_stage == 0:
                torch.nn.utils.clip_grads_with_norm_(self._parameters, max_grad_norm, norm)
        counts = self._overflows, self.guard, self._count_overflows()
        return StepResult(self.coefficients, evidence.totals, self.weights, norm, *counts)

    def _count_overflows(self) -> int | None:
        if self.accelerator.scaler is None and self.accelerator.mixed_precision != "fp16":
            return None
        _OVERFLOWS[self.model] = _OVERFLOWS.get(self.model, 0) + self._overflows
        return _OVERFLOWS[self.model]

    def _evidence(self, norm: Tensor | None) -> Evidence:
        samples = [inputs.get("sample") for inputs in self.inputs]
        precision = str(self.accelerator.mixed_precision)
        return Evidence(self.step, tuple(self.coefficients), self._reduce_sums(), norm, self._sums, samples, precision)

    def _reduce_sums(self) -> Tensor:
        """Sums of the terms over all ranks and micro-batches, reduced once a step."""
        if self._totals is None:
            local = torch.stack([term for terms in self._sums for term in terms])
            if len(self._sums) > 1:
                local = widest(local).unflatten(0, (len(self._sums), -1)).sum(0)
            if self.accelerator.num_processes > 1:
                local = cast(Tensor, self.accelerator.reduce(widest(local), "sum"))
            self._totals = local.float()
        return self._totals

    def _measure(self) -> Tensor:
        """Norm of the global gradient, free of the loss scale. A collective where the gradient is sharded."""
        if self._zero_stage > 0:
            norm: Any = self.accelerator.clip_grad_norm_(self.model.parameters(), math.inf)
            return torch.as_tensor(norm, device=self._reduce_sums().device)
        clear_gradients(self._optimizers)
        if self.accelerator.scaler is not None:
            for optimizer in self._optimizers:
                self.accelerator.scaler.unscale_(optimizer.optimizer)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateUsage]
        norm = torch.linalg.vector_norm(torch.stack(list(norms)))
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _will_rebuild_buckets(model: Any, processes: int) -> bool:
    """True before the backward after which DDP rebuilds its buckets, as torch's ``Reducer`` does after the first.

    The place of an element in its bucket decides in which order three or more processes add it up. The first step
    after a start would therefore not have the bits of the same step within a run, and a resume would not be exact.
    """
    if processes <= 2 or not isinstance(model, nn.parallel.DistributedDataParallel):
        return False
    return not model._has_rebuilt_buckets  # pyright: ignore[reportPrivateUsage]


def _require_prepared(accelerator: Accelerator, model: object) -> None:
    known: list[nn.Module] = accelerator._models  # pyright: ignore[reportPrivateUsage]
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel) or accelerator.distributed_type not in DDP_TYPES
    if not (wrapped and any(inner is m or model is m for m in known)):
        raise TypeError(
            f"no_sync needs the one module that accelerator.prepare returned, not {type(model).__name__}; with several "
            "models, wrap them in one nn.Module before prepare"
        )


def _global_weights(accelerator: Accelerator, micro_batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Over all micro-batches and ranks: as they are where there is one, else summed in fp64 where the device has it,
    which is exact for any count."""
    local = dict(micro_batches[0])
    if len(micro_batches) > 1:
        local = {k: torch.stack([widest(weights[k]) for weights in micro_batches]).sum() for k in local}
    if accelerator.num_processes == 1:
        return local
    reduced: Any = accelerator.reduce(torch.stack([widest(w) for w in local.values()]), "sum")
    return dict(zip(local, reduced.unbind(), strict=True))


def _factor(coefficient: float, weight: Tensor) -> Tensor:
    """Their quotient in fp32, 0 for a term that has no weight in this step."""
    dtype = weight.dtype if weight.is_floating_point() else torch.float32
    return (_constant(coefficient, weight.device, dtype) / weight).nan_to_num_(0.0, 0.0, 0.0).float()


@lru_cache(maxsize=64)
def _constant(value: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A number on the device, without the wait of copying it there. Not an inference tensor, whoever asks first."""
    with torch.inference_mode(False):
        return torch.full((), value, device=device, dtype=dtype)


_PARAMETERS: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()
"""As listed at a model's first window: walking through a large one takes a millisecond, in every step."""

_OVERFLOWS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Of every step of a model so far: a window lives for one step."""


def _parameters(accelerator: Accelerator, model: nn.Module) -> list[nn.Parameter]:
    """Of a prepared module; raises ``TypeError`` for another."""
    found = _PARAMETERS.get(model)
    if found is None:
        _require_prepared(accelerator, model)
        found = _PARAMETERS[model] = list(model.parameters())
    return found


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

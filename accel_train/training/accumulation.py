"""The gradient of one optimizer step, independent of the division into micro-batches and ranks.

A step's loss is ``sum_k c_k * S_k / W_k`` over its terms k: ``c_k`` a coefficient, ``S_k`` the sum of the term
over the global batch, ``W_k`` its weight (tokens, samples, points) over the global batch. The weights are known
before the first forward, so each micro-batch is divided by the true total. Dividing by the number of micro-batches,
as is usual, gives a mean of means (Lightning#19987, transformers#34373).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.rng import preserve_random_states
from accel_train.training.feedback.factors import quotient_of_step, term_factor
from accel_train.training.gradients import loss_checks
from accel_train.training.gradients.step_metrics import StepMetrics, global_weights
from accel_train.training.gradients.sync import (
    SyncPolicy,
    no_sync,
    reduce_once,
    reduce_without_step,
    when_to_reduce,
    will_rebuild_buckets,
    zero_stage_of,
)
from accel_train.training.gradients.trained_parameters import trained_parameters
from accel_train.training.health.evidence import Evidence, of_samples
from accel_train.training.health.leaving_out import leave_out
from accel_train.training.parameters import (
    clear_gradients,
    prepared_parameters,
    summed,
    widest,
    without_gradients,
)
from accel_train.training.step_calls import find_unused, leftovers_of, note_gradient
from accel_train.training.step_guard import GradientNorms, StepGuard, StepResult, read_loss_scale, write_loss_scale

Batch = dict[str, Tensor]


class Times(Protocol):
    """Timer of a step's parts (``metrics.profiling.step_times``)."""

    def begin(self) -> None: ...
    def end(self, part: Literal["forward", "backward", "update"]) -> None: ...


class GradientWindow:
    """The micro-batches of one optimizer step, their weights and their total gradient::

        window = GradientWindow(accelerator, model, [corrupt(batch, step) for batch in batches], coefficients, step)
        for inputs in window:                               # no gradient reduction until the last
            window.backward(loss_sums(model, inputs))       # {term: sum over the micro-batch}
        result = window.finish(max_grad_norm)               # agree, clip
        optimizer.step()

    Each micro-batch is a pair (inputs, {term: weight}). A weight is one value for all its samples, (), or one per
    sample, (B,). Coefficients, weights and sums must name the same terms, else ``UsageError``. A single weight tensor
    applies to every term, and a single sum tensor needs a single term. Every rank must run the same number of
    micro-batches. Costs two small reductions a step (weights, losses). A non-finite step must not move the optimizer:
    ``guard`` stops it on the device (``resolve_step_guard``). Without one, ``finish`` waits for the device in every
    step, and a non-finite one ends the run.

    In fp16 the loop over the window ends with another wait. After an overflow the loss scale is lowered and the same
    micro-batches are repeated. A scale that is too high therefore costs time but no step: schedule, EMA and data stay
    those of the experiment. Noise and dropout must be functions of the step.
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
        times: Times | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.model = model
        self._parameters = prepared_parameters(accelerator, model)
        self._leftovers = leftovers_of(model)
        self._optimizers: list[Any] = accelerator._optimizers  # pyright: ignore[reportPrivateUsage]
        self.step = step
        self.guard = guard or StepGuard()
        self._times = times
        loss_checks.refuse_empty(micro_batches, coefficients, step)
        self.inputs = [inputs for inputs, _ in micro_batches]
        self.coefficients = dict(coefficients)
        self._trained = trained_parameters(model, self._parameters, self._optimizers)
        self._zero_stage = zero_stage_of(accelerator)
        self.sync = when_to_reduce(policy, self._zero_stage)
        # DeepSpeed refuses no_sync where it shards gradients.
        self._coalesced = self.sync == "last" and self._zero_stage >= 2
        # Accelerate's backward also clips and steps under DeepSpeed, at the boundary that the window sets.
        self._steps_in_backward = self._zero_stage > 0 and not self._coalesced
        weights = [loss_checks.by_term(weight, "weights", self.coefficients, step) for _, weight in micro_batches]
        self._local_weights = weights
        self.weights = global_weights(accelerator, weights)
        first = next(iter(self.coefficients))
        self._metrics = StepMetrics(accelerator, self.weights[first], [weight[first] for weight in weights])
        self._balance: dict[str, Tensor] = {}
        if self.guard.balance is not None:
            self._balance = self.guard.balance.factors(self.weights)
        self._factors = self._factors_of_terms()
        self._reset_attempt()
        self._is_last = self._is_complete = self._is_finished = False
        self._overflows = 0
        self._loss_scale: Mapping[str, Any] | None = None
        """fp16: the loss scale from before this step. None until an overflow lowers it."""
        accelerator.sync_gradients = True  # a step that was left out has set it to False

    def _factors_of_terms(self) -> list[Tensor]:
        """Return the factor of each term's sum in a micro-batch, in the order of the coefficients."""
        # The number of processes undoes the averaging of DDP, FSDP2 and ZeRO.
        processes = self.accelerator.num_processes
        factors: list[Tensor] = []
        for name, coefficient in self.coefficients.items():
            factor = term_factor(coefficient * processes, self.weights[name])
            if self._balance:
                factor = factor * self._balance[name]
            factors.append(factor)
        return factors

    def __iter__(self) -> Iterator[Batch]:
        """Yield the inputs of each micro-batch. Unless the policy is ``every``, only the last one reduces gradients.

        Raises ``RuntimeError`` for a gradient from before the window, such as that of the previous step.
        """
        self._leftovers.refuse(self.step)
        if self._zero_stage > 0:
            # The engine fills in missing gradients, and steps before they could be counted.
            self._trained.refuse_others(self.model, self._parameters)
        elif self._leftovers.is_first:
            self._leftovers.watch(self._parameters, self.step)
        if will_rebuild_buckets(self.model, self.accelerator.num_processes):
            yield from self._rebuild_buckets()
        yield from self._attempt()
        while self._overflowed():
            self._overflows += 1
            self._reset_attempt()
            yield from self._attempt()
        self._is_complete = True

    def _reset_attempt(self) -> None:
        """Clear the losses, sums and norms of an earlier attempt at the step."""
        self._metrics.clear()
        self._losses: list[list[Tensor]] = []
        self._sums: list[list[Tensor]] = []
        self._totals: Tensor | None = None
        self._norm: Tensor | None = None
        self._gradient_norms: GradientNorms | None = None

    def _rebuild_buckets(self) -> Iterator[Batch]:
        """Run a discarded backward in which DDP rebuilds its buckets. Restores random states and buffers."""
        # A batch norm counts every forward.
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        self._is_last = True  # DDP rebuilds its buckets in a backward with reduction
        # The step draws what it would have drawn without the rehearsal.
        with preserve_random_states(of_device=True):
            yield self.inputs[0]
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        self.model.zero_grad(set_to_none=True)
        self._reset_attempt()

    def _attempt(self) -> Iterator[Batch]:
        engine: Any = self.model
        with ExitStack() as contexts:
            if self._coalesced:
                contexts.enter_context(reduce_once(engine))
            if self._zero_stage > 0:
                contexts.enter_context(without_gradients(self.model, self._optimizers))
            for i, inputs in enumerate(self.inputs):
                self._is_last = i + 1 == len(self.inputs)
                with self._boundary():
                    if self._times is not None:
                        self._times.begin()
                    yield inputs
        # The context above reduced on its exit, and the engine refuses to step inside of it.
        if self._coalesced:
            engine.step()

    def _overflowed(self) -> bool:
        """fp16: lower the loss scale after an overflow, and return True if the step must be repeated."""
        if self._zero_stage > 0 and self.accelerator.mixed_precision == "fp16":
            engine: Any = self.model
            return bool(engine.optimizer.overflow)  # the engine has lowered its scale, or raised at the lowest
        scaler: Any = self.accelerator.scaler
        if scaler is None:
            return False
        self._norm = self._measure()
        loss_is_finite = bool(torch.isfinite(self._reduce_sums()).all())
        norm_is_finite = bool(torch.isfinite(self._norm).all())
        scale = float(scaler.get_scale())
        if norm_is_finite or not loss_is_finite or scale <= 1:
            return False  # finite, or no lower scale would help and finish raises
        if self._loss_scale is None:
            self._loss_scale = read_loss_scale(self.accelerator, self.model)
        # It lowers the scale where `unscale_` found an overflow, and permits the `unscale_` of the next attempt.
        scaler.update()
        if float(scaler.get_scale()) >= scale:  # the values are finite but their norm is not
            scaler.update(scale * scaler.get_backoff_factor())
        self.model.zero_grad(set_to_none=True)
        return True

    def _boundary(self) -> AbstractContextManager[None]:
        hold = self._coalesced or (self.sync == "last" and not self._is_last)
        if self._steps_in_backward and not hold and not self._is_last:
            return reduce_without_step(self.accelerator)
        return no_sync(self.accelerator, self.model) if hold else nullcontext()

    def backward(self, sums: Mapping[str, Tensor] | Tensor, metrics: Mapping[str, Tensor] | None = None) -> None:
        """Run the backward of this micro-batch's share of the loss.

        ``sums`` must hold every term in every step: its sum over the micro-batch, (), or the weighted loss of each
        sample, (B,), with which a bad step can name its samples. A single tensor stands for the only term. ``metrics``
        have the same form and are not trained: the training line has their means as ``train_NAME``, divided by the
        weight of the first term. Raises ``UsageError`` for a single value where each sample has a weight: it may be a
        mean.
        """
        of_terms = loss_checks.sums_by_term(sums, self.coefficients, self.step)
        # Wraps around after one call too many, which `finish` refuses.
        weights = self._local_weights[len(self._sums) % len(self._local_weights)]
        loss_checks.refuse_means(of_terms, weights, self.coefficients)
        losses = [of_terms[k].float() for k in self.coefficients]
        terms = [summed(loss) for loss in losses]
        loss_checks.refuse_detached(terms, self.coefficients)
        self._metrics.add(metrics or {})
        self._losses.append([loss.detach() for loss in losses])
        self._sums.append([term.detach() for term in terms])
        if self._times is not None:
            self._times.end("forward")
        self._leftovers.in_backward = True
        if len(terms) == 1 and self._zero_stage == 0 and self.accelerator.scaler is None:
            # The same gradient as `_backward_of_sum`, without forming the product. Accelerate's backward would only
            # divide by its own accumulation steps, which are 1.
            terms[0].backward(self._factors[0].to(terms[0].device))
        else:
            self._backward_of_sum(terms)
        self._leftovers.in_backward = False
        # After a backward that has reduced the gradients. ZeRO's engine keeps them to itself.
        if self._leftovers.is_first and self._is_last and self._zero_stage == 0:
            find_unused(self.model, self._optimizers, self.step)
        if self._times is not None:
            self._times.end("backward")

    def _backward_of_sum(self, terms: list[Tensor]) -> None:
        loss = torch.stack([term * factor for term, factor in zip(terms, self._factors, strict=True)]).sum()
        # ZeRO's engine steps right after this backward, so the losses must be known before it.
        if self._is_last and self._zero_stage > 0 and self.guard.discards(self._evidence(None)):
            # The engine discards a step by itself if its gradient is not finite. This makes sure that it is not: a loss
            # can be NaN in a part that has no gradient.
            loss = loss * math.nan
        if self._zero_stage == 0 and self.accelerator.scaler is None:
            loss.backward()
        else:
            self.accelerator.backward(loss)

    def finish(self, max_grad_norm: float) -> StepResult:
        """Measure the norm of the global gradient, clip it to ``max_grad_norm`` (0: no clipping), and check the step.

        Every rank calls it; collective. A guard on the host waits for the device, clips here, and raises
        ``NonFiniteError`` on every rank. A guard on the device waits for nothing: the optimizer's next ``step`` clips,
        or does nothing, and ``guard.check`` raises later. ZeRO's engine has clipped already, to the same norm, and
        skips a step with a non-finite gradient. A step that the guard leaves out does not move the weights. Raises
        ``RuntimeError`` unless the window was iterated to its end with one ``backward`` per micro-batch, and if called
        twice.
        """
        max_grad_norm = loss_checks.checked_limit(max_grad_norm)
        self._refuse_incomplete()
        norm = self._norm  # fp16 has measured it before the loss scale was decided
        if norm is None:
            norm = self._measure()
        evidence = self._evidence(norm)
        value = self.guard.watch(evidence, norm, max_grad_norm)
        if self.guard.skips_this_step:
            leave_out(self.accelerator, self.model, self.step)
            if self._loss_scale is not None:
                write_loss_scale(self.accelerator, self.model, self._loss_scale)
        elif value is not None and 0 < self.guard.max_grad_norm < value and self._zero_stage == 0:
            # With the norm at hand, since `clip_grad_norm_` would measure it a second time.
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.guard.max_grad_norm, norm)
        note_gradient(self._optimizers)
        if self._zero_stage == 0:  # ZeRO's engine owns the gradients
            self._leftovers.choose(self._parameters, self._optimizers)
        if self.guard.balance is not None and not self.guard.skips_this_step:
            self.guard.balance.update(self.coefficients, evidence.totals, self.weights, self.guard.weight_of_step)
        return StepResult(
            coefficients=self.coefficients,
            sums=evidence.totals,
            weights=self.weights,
            grad_norm=norm,
            evidence=evidence,
            metrics=self._metrics,
            gradient_norms=self._gradient_norms,
            overflows=self._overflows,
            guard=self.guard,
            balance=self._balance,
            all_overflows=self._count_overflows(),
        )

    def _refuse_incomplete(self) -> None:
        if self._is_finished:
            raise RuntimeError(
                f"step {self.step + 1}: window.finish was called twice, and the second call would measure and clip a "
                "gradient that is already clipped; call it once per window, and keep its result"
            )
        self._is_finished = True
        done, required = len(self._sums), len(self.inputs)
        if done == required and self._is_complete:
            return
        left = "" if self._is_complete else ", and the loop over the window was left early"
        raise RuntimeError(
            f"step {self.step + 1}: window.backward was called {done} times for {required} micro-batches{left}, so the "
            "gradient is not that of the global batch; iterate over the window to its end, and call window.backward "
            "once for each micro-batch (an empty one has weight 0)"
        )

    def _count_overflows(self) -> int | None:
        if self.accelerator.scaler is None and self.accelerator.mixed_precision != "fp16":
            return None
        _OVERFLOWS[self.model] = _OVERFLOWS.get(self.model, 0) + self._overflows
        return _OVERFLOWS[self.model]

    def _evidence(self, norm: Tensor | None) -> Evidence:
        return Evidence(
            step=self.step,
            terms=tuple(self.coefficients),
            totals=self._reduce_sums(),
            norm=norm,
            losses=self._losses,
            rows=[of_samples(inputs) for inputs in self.inputs],
            precision=str(self.accelerator.mixed_precision),
            weights=self._local_weights,
            quotient=quotient_of_step(self.coefficients, self.weights, self._local_weights[0], self.inputs[0]),
        )

    def _reduce_sums(self) -> Tensor:
        """Sums of the terms over all ranks and micro-batches, reduced once a step."""
        if self._totals is None:
            local = torch.stack([term for terms in self._sums for term in terms])
            # In fp64, so that the sum over micro-batches and ranks adds no rounding of its own.
            if len(self._sums) > 1:
                local = widest(local)
                local = local.unflatten(0, (len(self._sums), -1)).sum(0)
            if self.accelerator.num_processes > 1:
                local = cast(Tensor, self.accelerator.reduce(widest(local), "sum"))
            self._totals = local.float()
        return self._totals

    def _measure(self) -> Tensor:
        """Norm of the global gradient, without the loss scale. A collective where the gradient is sharded.

        Returned on the device of the losses, even if the gradients of an offloaded model are on the host.
        """
        device = self._reduce_sums().device
        if self._zero_stage > 0:
            norm: Any = self.accelerator.clip_grad_norm_(self.model.parameters(), math.inf)
            return torch.as_tensor(norm, device=device)
        clear_gradients(self._optimizers)
        if self.accelerator.scaler is not None:
            for optimizer in self._optimizers:
                # The inner one: the scaler knows an optimizer by its id, and Accelerate's step passes the inner one.
                self.accelerator.scaler.unscale_(optimizer.optimizer)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self._trained.refuse_others(self.model, self._parameters, len(gradients))
        norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateUsage]
        measured = self._parameters
        if len(gradients) < len(measured):
            measured = [p for p in measured if p.grad is not None]
        self._gradient_norms = GradientNorms(measured, norms)
        norm: Any = torch.linalg.vector_norm(torch.stack(list(norms)))
        if hasattr(norm, "full_tensor"):  # FSDP2: each rank has the norm of its shards
            norm = norm.full_tensor()
        return norm.to(device)


_OVERFLOWS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Overflows over all steps of a model so far. A window lives for one step only."""

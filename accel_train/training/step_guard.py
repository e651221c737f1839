"""Detect bad steps (non-finite values, gradient spikes) and leave them out, where possible without waiting for the
device in every step.

torch's fused optimizers accept two tensors made for loss scaling: ``found_inf`` = 1 skips the update, and
``grad_scale`` divides the gradient. ``StepGuard`` owns both. A non-finite loss or norm sets the first on the device,
and clipping sets the second. The host reads the findings at log points and saves. Other optimizers are guarded by the
host, which then waits for the device in every step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from accel_train.training.feedback.factors import constant, term_factor
from accel_train.training.health.evidence import BadStep, Evidence, NonFiniteError
from accel_train.training.health.history import History
from accel_train.training.health.options import HealthConfig
from accel_train.training.health.spikes import Spikes
from accel_train.training.parameters import unwrapped

if TYPE_CHECKING:
    from accel_train.training.feedback.balance import LossBalance
    from accel_train.training.feedback.noise_scale import NoiseScale
    from accel_train.training.feedback.plateau import Plateau
    from accel_train.training.gradients.step_metrics import StepMetrics

KERNEL_DEVICES = ("cpu", "cuda", "xpu")
"""Devices with torch's kernel for the detection of non-finite values."""
STOP = HealthConfig()


class StepGuard:
    """Decide about every step, and either leave out a bad one or end the run.

    Build it on every rank with ``resolve_step_guard``, pass it to each ``GradientWindow`` and to the ``Ema``, and call
    ``check`` before anything is saved (``StepResult.fields`` calls it at a log point). With a fused optimizer the
    device decides; without ``optimizer`` the host does, and waits in each step.

    A step is left out entirely: weights, optimizer state, step counts and EMA stay as they were. With ``non_finite:
    stop`` so do all steps after it. On the device those are wasted until the next check, which raises. The
    limit of ``max_skipped`` is enforced by that check too.
    """

    def __init__(self, optimizer: Any = None, device: torch.device | None = None, config: HealthConfig = STOP) -> None:
        self.config = config
        self.on_device = optimizer is not None
        self.history = History(config.max_skipped)
        self.leaves_out = False
        """Leave out the coming steps, whatever their values: they are measured only, or no sample has a weight."""
        self.skips_this_step = False
        """The host leaves out the current step. Where the device decides about values, only for ``leaves_out``."""
        self.max_grad_norm = 0.0
        """Where the host decides: the norm to which the gradient of the current step is clipped. 0: no clipping."""
        self.balance: LossBalance | None = None
        """Factors of the loss terms, which only trained steps move. None: the coefficients alone."""
        self.plateau: Plateau | None = None
        """Factor of the learning rate, which only trained steps move. None: that of the schedule alone."""
        self.noise_scale: NoiseScale | None = None
        """Noise of the gradient, of trained steps only. None: not measured."""
        self._spikes: Spikes | None = None
        if config.finds_spikes:
            assert device is not None, "spikes are found on a device"
            self._spikes = Spikes(config.spike_factor, config.spike_window, device)
        self._unread: list[Evidence] = []
        self._verdicts: list[Tensor] = []
        """(2,) of each unread step: not finite, spike."""
        self._error: NonFiniteError | None = None
        if self.on_device:
            self.found_inf = torch.zeros((), device=device)
            self.grad_scale = torch.ones((), device=device)
            self._one = torch.ones((), device=device)
            self._non_finite = self.found_inf
            if config.skips_spikes:
                # Separate, because a spike stops only its own step.
                self._non_finite = torch.zeros((), device=device)
            # Attributes read by torch's fused optimizers, as set by ``GradScaler.step``.
            optimizer.found_inf = self.found_inf
            optimizer.grad_scale = self.grad_scale

    def watch(self, evidence: Evidence, norm: Tensor, max_grad_norm: float) -> float | None:
        """Decide about one step, before the optimizer's. Returns the norm, or None where it is on the device only.

        On the device nothing waits: the optimizer's next step clips the gradient to ``max_grad_norm`` (0: no clipping),
        or does nothing. On the host, the caller clips to ``self.max_grad_norm``, and reads ``skips_this_step``. Raises
        ``NonFiniteError``.
        """
        self.skips_this_step = self.leaves_out
        # Neither good nor bad: no count, no spike and no error comes from it.
        if self.leaves_out:
            return None
        usual: Tensor | None = None
        if self._spikes is not None:
            # Before this norm joins the window, so that a spike does not raise the limit it is judged by.
            usual = self._spikes.limit()
            evidence = replace(evidence, spike=(norm > usual).float())
        if self.on_device:
            self._watch_on_device(evidence, norm, max_grad_norm, usual)
            return None
        # The host decides here: it waits, and knows the step before its update.
        value, bad = evidence.examine()
        self.skips_this_step = bad is not None and self._skips(bad)
        self._note(bad)
        # A skipped norm stays out of the median, or a row of spikes would become the norm.
        if self._spikes is not None and not self.skips_this_step:
            self._spikes.add(self._trained_norm(norm, usual))
        self.max_grad_norm = max_grad_norm
        if usual is not None and self.config.clips_spikes and bad is not None:
            self.max_grad_norm = min(max_grad_norm or math.inf, float(usual))
        return value

    def _trained_norm(self, norm: Tensor, usual: Tensor | None) -> Tensor:
        """Return the norm that enters the median: for a spike that is clipped, the norm after clipping."""
        return norm if usual is None or not self.config.clips_spikes else torch.minimum(norm, usual)

    def discards(self, evidence: Evidence) -> bool:
        """Return True if this step's losses are bad and it is to be left out. For engines that step in the backward.

        Waits for the device. Raises ``NonFiniteError`` if the run is to stop. ``watch`` still has to follow.
        """
        if self.leaves_out:
            return True
        bad = evidence.examine().bad
        return bad is not None and self._skips(bad)

    def _skips(self, bad: BadStep) -> bool:
        """Return True if the update is left out, False if it is made. Raises ``NonFiniteError`` to stop."""
        if bad.reason == "spike":
            return self.config.skips_spikes
        # A rollback raises as well: the loop turns the error into a new start (`train_state.roll_back`).
        if self.config.non_finite != "skip":
            raise NonFiniteError(bad.explanation, bad)
        return True

    def _note(self, bad: BadStep | None) -> None:
        if bad is None:
            self.history.trained()
        elif self._skips(bad):
            self.history.skip(bad)
        else:
            self.history.warn(bad)

    def _watch_on_device(self, evidence: Evidence, norm: Tensor, max_grad_norm: float, usual: Tensor | None) -> None:
        check_and_unscale = torch._amp_foreach_non_finite_check_and_unscale_  # pyright: ignore[reportPrivateUsage]
        # The kernel sets its flag and never clears it, so with `stop` the optimizer stays stopped.
        if self.config.non_finite == "skip":
            self._non_finite.zero_()
        check_and_unscale(evidence.must_be_finite(norm), self._non_finite, self._one)  # a scale of 1 changes neither
        spike = evidence.spike
        if spike is not None and self.config.skips_spikes:
            torch.maximum(self._non_finite, spike, out=self.found_inf)
        # The optimizer divides by it, and by 1 where the norm is below the limit.
        if usual is not None and self.config.clips_spikes:
            torch.maximum(norm / usual.clamp(max=max_grad_norm or math.inf), self._one, out=self.grad_scale)
        elif max_grad_norm > 0:
            torch.maximum(norm / constant(max_grad_norm, norm.device, norm.dtype), self._one, out=self.grad_scale)
        else:
            self.grad_scale.fill_(1.0)
        if self._spikes is not None:
            self._spikes.add(self._trained_norm(norm, usual), trained=1 - self.found_inf)
        self._unread.append(evidence)
        if self._judges_each:
            # Stacking copies them: the flags are overwritten by the next step.
            second = torch.zeros_like(self.found_inf) if spike is None else spike
            self._verdicts.append(torch.stack([self._non_finite, second]))

    @property
    def _judges_each(self) -> bool:
        """True if a bad step does not end the run, so that each step needs a verdict of its own."""
        return self.config.skips or self.config.finds_spikes

    def check(self) -> None:
        """Wait for the device once, count the bad steps since the last check, and raise if one ends the run.

        All ranks call it at the same step. After a ``NonFiniteError``, every later check raises it again. Does nothing
        where the host decides, because it knows every step already.
        """
        unread = self._unread
        verdicts = self._verdicts
        self._unread = []
        self._verdicts = []
        # An error stays: the run is to end, so no later check may pass.
        if self._error is None and unread:
            try:
                self._read(unread, verdicts)
            except NonFiniteError as error:
                self._error = error
        if self._error is not None:
            raise self._error

    def _read(self, unread: list[Evidence], verdicts: list[Tensor]) -> None:
        if not self._judges_each:
            # One flag covers all steps: usually there is nothing to examine.
            if bool(self.found_inf):
                for evidence in unread:
                    self._note(evidence.examine().bad)
            return
        is_bad: list[bool] = torch.stack(verdicts).any(dim=1).tolist()
        for evidence, bad in zip(unread, is_bad, strict=True):
            self._note(evidence.examine().bad if bad else None)

    @property
    def weight_of_step(self) -> Tensor | None:
        """0 on the device if the current step is left out there, else 1. None if the host knows that it is trained."""
        return 1 - self.found_inf if self.on_device and self.config.skips else None

    def clipped_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of the current step's gradient after clipping, given the norm before."""
        if self.on_device:
            return norm / self.grad_scale
        return norm.clamp(max=self.max_grad_norm) if self.max_grad_norm > 0 else norm

    def state(self) -> dict[str, Any]:
        """Return the state that trained and skipped steps have changed, for a checkpoint. Call it after ``check``."""
        state = self.history.state()
        if self.balance is not None:
            state["balance"] = self.balance.state()
        if self.plateau is not None:
            state["plateau"] = self.plateau.state()
        if self.noise_scale is not None:
            state["noise_scale"] = self.noise_scale.state()
        if self._spikes is not None:
            state["grad_norms"] = self._spikes.read()
        return state

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from ``state``."""
        self.history.load(saved)
        # A checkpoint of a run without them, changed with `--allow`, has none: they begin here.
        if self.balance is not None:
            self.balance.load(saved.get("balance", {}))
        if self.plateau is not None:
            self.plateau.load(saved.get("plateau", {}))
        if self.noise_scale is not None:
            self.noise_scale.load(saved.get("noise_scale", {}))
        if self._spikes is not None:
            self._spikes.write(saved.get("grad_norms", []))


class GradientNorms(NamedTuple):
    """Norms of the gradients of single parameters: of this rank's shard, where it has a shard."""

    parameters: Sequence[nn.Parameter]
    norms: Sequence[Tensor]


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
    evidence: Evidence = field(repr=False)
    """Tensors of this process for the step, with losses by sample where the recipe gives them."""
    metrics: StepMetrics = field(repr=False)
    gradient_norms: GradientNorms | None = field(default=None, repr=False)
    """Before clipping. None under ZeRO, whose engine keeps the gradients to itself."""
    overflows: int = 0
    """fp16: attempts at this step repeated with a lower loss scale."""
    guard: StepGuard | None = field(default=None, repr=False)
    balance: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """``f_k``, the factors on top of the coefficients in this step. Empty without a balance of the terms."""
    all_overflows: int | None = None
    """Sum of ``overflows`` over all steps of this process. None without a loss scale."""

    @property
    def loss(self) -> Tensor:
        """Loss of the global batch, ``sum_k c_k * S_k / W_k``, without the factors of a balance. Computed on access.

        With them it would say nothing: under ``ema`` it stays near the sum of the coefficients.
        """
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
                # A term without weight in this step is reported as 0, where 0 / 0 would be NaN.
                terms[k] = total / self.weights[k].clamp(min=1e-12).float()
        return terms

    def fields(self) -> dict[str, float]:
        """``loss``, ``loss_TERM``, ``balance_TERM``, ``grad_norm``; if counted, ``overflows`` and ``skipped_steps``.

        For log points: waits for the device. All ranks call it. Raises ``NonFiniteError`` where the guard has stopped
        the optimizer.
        """
        self.check()
        tensors = {"loss": self.loss}
        for name, value in self.terms.items():
            tensors[f"loss_{name}"] = value
        for name, factor in self.balance.items():
            if self.coefficients[name] != 0:
                tensors[f"balance_{name}"] = factor
        tensors["grad_norm"] = self.grad_norm
        # One stacked tensor, so that the host waits once.
        stacked = torch.stack([value.float() for value in tensors.values()])
        values: list[float] = stacked.tolist()
        numbers = dict(zip(tensors, values, strict=True))
        if self.all_overflows is not None:
            numbers["overflows"] = self.all_overflows
        if self.guard is not None and self.guard.config.skips:
            numbers["skipped_steps"] = self.guard.history.skipped
        return numbers

    def check(self) -> None:
        """Make sure that every step so far was finite. Call it before a checkpoint, on all ranks.

        Waits for the device with a guard. Raises ``NonFiniteError``.
        """
        if self.guard is not None:
            self.guard.check()


def resolve_step_guard(
    accelerator: Accelerator, optimizer: Any, config: HealthConfig = STOP, *, on_cpu: bool = False
) -> tuple[StepGuard, str]:
    """Build the guard for a prepared optimizer, and return where it decides, with the reason.

    It decides on the host on a CPU, where that costs nothing, and for optimizers that cannot be stopped on the device.
    ``on_cpu`` lets the device decide on a CPU as well: an error is then raised at the next log point, not at once.
    """
    if accelerator.device.type == "cpu" and not on_cpu:
        reason = "every step is known to be finite before the next: on a CPU there is nothing to wait for"
        return StepGuard(None, accelerator.device, config), reason
    inner = unwrapped(optimizer)
    because = None
    devices = [p.device for group in inner.param_groups for p in group["params"]]
    device = devices[0] if devices else accelerator.device
    if accelerator.distributed_type == DistributedType.DEEPSPEED:  # ZeRO-3 keeps its parameters elsewhere
        because = "DeepSpeed's engine clips and steps by itself"
    elif accelerator.scaler is not None:
        because = "fp16's loss scale is decided on the host"
    elif not getattr(inner, "_step_supports_amp_scaling", False):
        because = f"{type(inner).__name__} cannot skip a step on the device; fused AdamW can"
    elif device.type not in KERNEL_DEVICES or device.type != accelerator.device.type:  # an index may be left out
        because = f"the parameters are on {device}, the losses on {accelerator.device}"
    if because is not None:
        reason = f"every step waits for the device, to check that it is finite: {because}"
        return StepGuard(None, accelerator.device, config), reason
    return StepGuard(inner, device, config), "steps wait for the device at log points and saves only"


def read_loss_scale(accelerator: Accelerator, model: nn.Module) -> dict[str, Any] | None:
    """Return the scale, and the steps since it last changed. None if nothing is scaled. May wait for the device."""
    scaler: Any = accelerator.scaler
    if scaler is not None:
        state = scaler.state_dict()
        return {"scale": float(state["scale"]), "steps": int(state["_growth_tracker"])}
    loss_scaler = _of_deepspeed(accelerator, model)
    if loss_scaler is None:
        return None
    # DeepSpeed counts iterations from the start, torch the steps since the last change: stored as torch's.
    steps = loss_scaler.cur_iter - loss_scaler.last_overflow_iter - 1
    return {"scale": float(loss_scaler.cur_scale), "steps": int(steps)}


def write_loss_scale(accelerator: Accelerator, model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Set the scale and the steps since it last changed. Does nothing if nothing is scaled."""
    scaler: Any = accelerator.scaler
    if scaler is not None:
        state = scaler.state_dict()
        state["scale"] = float(saved["scale"])
        # The scaler grows its scale after a number of good steps, so a resume needs both.
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

"""Correctness, time and actual device kernels of attention: small experiments on the actual device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accel_train.config import UsageError
from accel_train.precision import largest
from accel_train.speed.attention.kernels import Attention, build_attention
from accel_train.speed.attention.table import NAMES, AttentionNeeds, Machine, machine_of, why_not

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest relative L2 error against fp64 with the same inputs, for the result and each gradient. About 4 times the
error of torch's own kernels. A wrong scale, layout or mask is above 0.1."""
TOLERANCE_OF_TF32 = 2e-3
SAMPLE_LENGTH = 64
MORE_KEYS = 24


@dataclass(frozen=True)
class Proof:
    """Relative L2 errors against fp64, the worst of all cases, and the duration of the proof."""

    forward_error: float
    backward_error: float
    tolerance: float
    seconds: float


def reference(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Attention by its definition, in fp64. A row without keys attends to all."""
    q, k, v = (x.double() for x in (q, k, v))
    scale = q.shape[-1] ** 0.5
    scores = q @ k.transpose(-1, -2) / scale
    if key_mask is not None:
        allowed = key_mask | ~key_mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~allowed[:, None, None, :], -torch.inf)
    return scores.softmax(dim=-1) @ v


def prove_attention(attention: Attention, needs: AttentionNeeds) -> Proof:
    """Compare forward and backward with fp64 on small tensors of the needed dtype, head size and device.

    Cases: without a mask; with one, if needed, on three rows (whole, padded in the middle, only padding); and for
    cross-attention more keys than queries (with fewer, a wrong kernel might read past them). Takes some milliseconds
    on a CPU, or a second where a kernel is compiled for its shapes. Draws from its own generator. Raises `UsageError`
    with the numbers for a non-finite value or an error above the tolerance.
    """
    started = time.perf_counter()
    tolerance = tolerance_of(needs.dtype, needs.device)
    cases = [("without a mask", False, 0)]
    if needs.mask:
        cases.append(("with a mask", True, 0))
    if needs.cross:
        cases.append(("with other keys than queries", False, MORE_KEYS))
    worst_forward = 0.0
    worst_backward = 0.0
    for case, masked, more_keys in cases:
        forward, backward = _errors(attention, needs, masked, more_keys)
        worst_forward = max(worst_forward, forward)
        worst_backward = max(worst_backward, backward)
        if not (forward <= tolerance and backward <= tolerance):  # NaN fails as well
            raise UsageError(
                f"attention {attention.name}: differs from the fp64 reference {case} by {forward:.2g} forward and "
                f"{backward:.2g} backward (relative, L2), more than the allowed {tolerance:.2g}; needed: {needs}. "
                "Choose another kernel, such as sdpa."
            )
    seconds = time.perf_counter() - started
    return Proof(worst_forward, worst_backward, tolerance, seconds)


def tolerance_of(dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest relative error that a proof allows for this dtype of the computation."""
    tf32 = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    # TF32 rounds the operands of an fp32 product to 10 bits of fraction.
    if dtype == torch.float32 and tf32:
        return TOLERANCE_OF_TF32
    return TOLERANCES[dtype]


def _sample_length(length: int) -> int:
    """Return a short length with the same remainder, because kernels depend on alignment."""
    if length > 2 * SAMPLE_LENGTH:
        return SAMPLE_LENGTH + length % SAMPLE_LENGTH
    return max(length, 16)  # with a single key the gradients of q and k are zero


def _errors(attention: Attention, needs: AttentionNeeds, masked: bool, more_keys: int) -> tuple[float, float]:
    """Return the relative errors of the forward and of the worst gradient. NaN for a result that cannot be compared."""
    heads = min(needs.heads, 2)
    length = _sample_length(needs.length)
    # Three rows, one for each kind of mask in `_rows`.
    small = replace(needs, batch=3, heads=heads, length=length)
    q, k, v, weights = _sample(small, more_keys)
    key_mask, valid = _mask_of_case(small, masked)
    expected = reference(q, k, v, key_mask)
    with torch.set_grad_enabled(needs.backward):
        result = attention(q, k, v, attention.mask(key_mask))
    is_alike = result.shape == expected.shape and result.dtype == needs.dtype
    if not is_alike or not bool(result.isfinite().all()):
        return float("nan"), float("nan")
    difference = (result.double() - expected) * valid
    forward = relative_error(difference.detach(), expected.detach())
    if not needs.backward:
        return forward, 0.0
    return forward, gradient_error(result, expected, (q, k, v), weights * valid)


def gradient_error(result: Tensor, expected: Tensor, inputs: Sequence[Tensor], weights: Tensor) -> float:
    """Return the worst relative error of the gradients of ``inputs``. Infinite if one of them holds NaN.

    ``weights`` is the gradient of the result.
    """
    weights = weights.to(result.dtype)  # the same rounded weights for both
    gradients = torch.autograd.grad(result, inputs, weights)
    exact = torch.autograd.grad(expected, inputs, weights.double())
    errors: list[float] = []
    for gradient, wanted in zip(gradients, exact, strict=True):
        difference = gradient.double() - wanted
        errors.append(relative_error(difference, wanted))
    return largest(errors)


def _mask_of_case(needs: AttentionNeeds, masked: bool) -> tuple[Tensor | None, Tensor]:
    """Return the key mask (None without one), and (B, 1, N, 1), True for queries with a meaningful result."""
    if not masked:
        queries = (needs.batch, needs.length)
        valid = torch.ones(queries, dtype=torch.bool, device=needs.device)
        return None, valid[:, None, :, None]
    key_mask = _rows(needs.length).to(needs.device)
    return key_mask, _meaningful(key_mask)[:, None, :, None]


def _sample(needs: AttentionNeeds, more_keys: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw q, k, v in a model's layout, (B, H, N, D) views of (B, N, H, D), and weights of the result."""
    # On the host, so that every device is tested with the same numbers.
    generator = torch.Generator().manual_seed(0)

    def draw(more: int) -> Tensor:
        shape = (needs.batch, needs.length + more, needs.heads, needs.head_size)
        drawn = torch.randn(shape, generator=generator)
        return drawn.to(needs.device, needs.dtype).transpose(1, 2)

    q = draw(0).requires_grad_(needs.backward)
    k = draw(more_keys).requires_grad_(needs.backward)
    v = draw(more_keys).requires_grad_(needs.backward)
    return q, k, v, draw(0)


def _rows(length: int) -> Tensor:
    """Return three rows of keys: all, all but padding in the middle (as after a first stream), none."""
    place = torch.arange(length)
    in_front = place < length // 3
    behind = place >= 2 * length // 3
    return torch.stack((place >= 0, in_front | behind, place < 0))


def _meaningful(key_mask: Tensor) -> Tensor:
    """Return the queries with a meaningful result: unmasked positions, and all of a row without keys."""
    return key_mask | ~key_mask.any(-1, keepdim=True)


def relative_error(difference: Tensor, expected: Tensor) -> float:
    """Return the L2 norm of a difference, relative to the norm of the expected value."""
    # Avoids 0 / 0: its NaN would fail the proof of a gradient that is rightly zero.
    size = expected.norm().clamp_min(1e-30)
    return float(difference.norm() / size)


# ------------------------------------------------------------------------------------------------ time and events
def _step(attention: Attention, needs: AttentionNeeds) -> Callable[[], object]:
    """Build a step: forward, and backward where needed, on the needed shapes with about a quarter of padding."""
    q, k, v, weights = _sample(needs)
    key_mask: Tensor | None = None
    if needs.mask:
        fraction = torch.linspace(0.5, 1, needs.batch)
        tokens = fraction[:, None] * needs.length  # (B, 1)
        key_mask = torch.arange(needs.length) < tokens
        key_mask = key_mask.to(needs.device)

    def step() -> object:
        with torch.set_grad_enabled(needs.backward):
            result = attention(q, k, v, attention.mask(key_mask))
        if not needs.backward:
            return result
        return torch.autograd.grad(result, (q, k, v), weights)

    return step


def time_attention(attention: Attention, needs: AttentionNeeds, seconds: float = 0.5) -> float:
    """Return median seconds of a forward and backward on the needed shapes. Measures for `seconds`, at least twice.

    Waits for the device.
    """
    step = _step(attention, needs)
    times: list[float] = []
    step()  # builds plans, fills caches
    until = time.perf_counter() + seconds
    while len(times) < 2 or time.perf_counter() < until:
        _wait(needs.device)  # or the clock would start with earlier work in the queue
        started = time.perf_counter()
        step()
        _wait(needs.device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernels_that_ran(attention: Attention, needs: AttentionNeeds) -> tuple[str, ...]:
    """Return the names of the kernels of one forward and backward, for the run info. Takes about a second.

    On CUDA the device kernels in torch's profiler, elsewhere torch's operators with "attention" in their name.
    """
    return operators_of(_step(attention, needs), needs.device)


def operators_of(step: Callable[[], object], device: torch.device) -> tuple[str, ...]:
    """Return the names of the kernels in a step on ``device``, as ``kernels_that_ran`` does. Runs it twice."""
    step()  # so that compilation and autotuning are not recorded
    if device.type != "cuda":
        with _recorded_operators() as names:
            step()
        attentions = [name for name in names if "attention" in name]
        return tuple(dict.fromkeys(attentions))
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    # Without acc_events torch warns that it keeps the events of one cycle only.
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        step()
        torch.cuda.synchronize(device)
    events: Any = recorded.events()
    kernels = [event.name for event in events if event.device_type == DeviceType.CUDA]
    return tuple(dict.fromkeys(kernels))


@contextmanager
def _recorded_operators() -> Generator[list[str]]:
    names: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Recorder():
        yield names


# ---------------------------------------------------------------------------------------------------------- table
@dataclass(frozen=True)
class AttentionRow:
    """One kernel on this device: the reason why it cannot run, or its errors, time and device kernels."""

    name: str
    why_not: str | None
    proof: Proof | None = None
    seconds: float | None = None
    kernels: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.proof is None or self.seconds is None:
            return f"{self.name:<15} no: {self.why_not}"
        errors = f"error {self.proof.forward_error:.1e} forward, {self.proof.backward_error:.1e} backward"
        milliseconds = 1000 * self.seconds
        kernels = ", ".join(self.kernels)[:120]
        return f"{self.name:<15} {milliseconds:9.3f} ms  {errors}  {kernels}".rstrip()


def attention_rows(needs: AttentionNeeds, seconds: float = 0.5) -> list[AttentionRow]:
    """Try every kernel of the table on this device: time, errors and device kernels, or the reason against it."""
    machine = machine_of(needs.device)
    return [_row(name, needs, machine, seconds) for name in NAMES]


def _row(name: str, needs: AttentionNeeds, machine: Machine, seconds: float) -> AttentionRow:
    reason = why_not(name, needs, machine)
    if reason is not None:
        return AttentionRow(name, reason)
    try:
        attention = build_attention(name)
        proof = prove_attention(attention, needs)
        measured = time_attention(attention, needs, seconds)
        kernels = kernels_that_ran(attention, needs)
        return AttentionRow(name, None, proof, measured, kernels)
    # An error that a library raises on this device is the reason in its row, and the other rows are still tried.
    except (RuntimeError, ImportError, NotImplementedError, UsageError) as error:
        reason = " ".join(str(error).split())
        return AttentionRow(name, reason[:300])

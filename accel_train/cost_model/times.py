"""Model of the time of a step: FLOPs, bytes and kernels over the rates of a device. Modelled, not measured.

    device        = products / matrix rate + attention / attention rate + bytes moved / memory rate
    computation   = max(device, kernels * host time)
    communication = bytes sent / link rate + collectives * latency
    step          = computation + communication that is not hidden + copies + optimizer on the host

On a CPU host and device are one:

    computation   = device + kernels * host time
    step          = computation + communication

Products come one after the other with the operators between them, so their times add up. Collectives overlap with the
computation of the same part of a step: the last micro-batch, all that is before it, or the optimizer, with which
nothing overlaps. Gathers overlap with forward and backward, reductions with the backward alone:

    not hidden = max(0, communication - computation, reductions - 2/3 computation)

Under DDP and FSDP2 the last micro-batch reduces its gradients, or with ``sync: every`` each one. Under ZeRO nothing is
hidden if DeepSpeed's ``overlap_comm`` is off, as it is in stages 1 and 2 by default.

The last two terms exist under an offload: bytes over the rates of the host link and of host memory. By a rule nothing
overlaps with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel_train.cost_model.rates import LINK_SHARE, LINKS, Link, Rates

if TYPE_CHECKING:
    from accel_train.cost_model.devices import Device
    from accel_train.cost_model.work import Work

PRODUCT_SHARE = 0.65
"""Part of the matrix peak reached by products. Measured on an H200 in bf16: 616 to 714 of 989 TFLOP/s
(docs/performance.md, G0)."""
ATTENTION_SHARE = 0.34
"""Part of the matrix peak reached by attention, forward and backward: 337 of 989 TFLOP/s, measured there."""
MEMORY_SHARE = 0.88
"""Part of the memory bandwidth reached by a copy: 4,236 of 4,800 GB/s, measured there."""
HOST_MEMORY_SHARE = 0.6
"""Part of a host's memory bandwidth reached by AdamW on its cores. A rule, not measured."""
LATENCY_SECONDS = 20e-6
"""Time of a collective without bytes. A rule, not measured."""
HOST_SECONDS = 20e-6
"""Host time per kernel, for which small kernels wait. A rule between 11 us, measured on an EPYC, and 40 and more on the
virtual host of an H200."""
NOT_BESIDE = ("zero1", "zero2")
"""Name prefixes of the strategies whose ``overlap_comm`` is off by default."""
BACKWARD_SHARE = 2 / 3
"""Share of the backward in a micro-batch's work: two products for each one of the forward."""
GATHER = "all-gather"


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by part."""

    products: float
    attention: float
    moved: float
    host: float
    communication: float
    """All of it, overlapped with computation or not."""
    exposed: float
    """The part of it not hidden by the computation."""
    serial: bool = False
    """Host and device are one, as on a CPU: their times add up."""
    copied: float = 0.0
    """Copies between host memory and the device."""
    on_host: float = 0.0
    """Optimizer and EMA in host memory."""

    @property
    def computation(self) -> float:
        device = self.products + self.attention + self.moved
        return device + self.host if self.serial else max(device, self.host)

    @property
    def total(self) -> float:
        # To a picosecond, so that steps which all wait for the same link are equal.
        return round(self.computation + self.exposed + self.copied + self.on_host, 12)


def rates_of(device: Device, peak: float, gpus: int = 1) -> Rates:
    """Return the rates of a device with a matrix peak of ``peak`` FLOP/s. ``gpus`` share the memory of their host."""
    link = Link(LATENCY_SECONDS, device.link_gbs * 1e9 * LINK_SHARE)
    return Rates(
        products=peak * PRODUCT_SHARE,
        attention=peak * ATTENTION_SHARE,
        moved=device.memory_gbs * 1e9 * MEMORY_SHARE,
        host_seconds=HOST_SECONDS,
        links=dict.fromkeys(LINKS, link),
        on_host=device.host.memory_gbs * 1e9 * HOST_MEMORY_SHARE / gpus,
        copied=device.host.link_gbs * 1e9 * LINK_SHARE,
    )


def step_work(parts: Sequence[Work], micro_batches: int) -> Work:
    """Return the work of a step from ``parts``: before the first forward, of each simulated micro-batch, and the end.

    With fewer simulated than the step has, there are three: the first, one for all in the middle, and the last.
    """
    before, *simulated, end = parts
    # All inputs are made before the first forward. The weights of the loss are reduced once.
    total = before.computed(micro_batches / len(simulated)) + end
    for part in simulated:
        total = total + part
    missing = micro_batches - len(simulated)
    if missing:
        # The first one has no gradients to add to, and the last one reduces them.
        assert len(simulated) == 3, "a first, a middle and a last micro-batch"
        total = total + simulated[1].times(missing)
    return total


def step_time(
    total: Work, last: Work, end: Work, strategy: str, rates: Rates, overlap_comm: bool | None = None
) -> StepTime:
    """Return the time of a step of ``total`` work: ``last`` in its last micro-batch, ``end`` from the optimizer on.

    ``overlap_comm`` is the setting of DeepSpeed's engine, where it is known.
    """
    overlaps = not strategy.startswith(NOT_BESIDE)
    if overlap_comm is not None:
        overlaps = overlap_comm
    exposed = rates.communication_seconds(total)
    # On a CPU, sending takes time of the cores that compute.
    if overlaps and not rates.serial:
        before = total + (last + end).times(-1)
        exposed = _exposed(before, rates) + _exposed(last, rates) + rates.communication_seconds(end)
    return StepTime(
        products=total.products / rates.products,
        attention=total.attention / rates.attention,
        moved=total.moved / rates.moved,
        host=total.kernels * rates.host_seconds,
        communication=rates.communication_seconds(total),
        exposed=exposed,
        serial=rates.serial,
        copied=rates.copy_seconds(total),
        on_host=total.on_host / rates.on_host,
    )


def _exposed(part: Work, rates: Rates) -> float:
    """Return the seconds of a part's collectives that its own computation does not hide."""
    # The host's time hides collectives as well, where small kernels wait for it.
    computation = max(rates.device_seconds(part), part.kernels * rates.host_seconds)
    communication = rates.communication_seconds(part)
    reductions = communication - rates.links[GATHER].seconds(part.gathers, part.gathered)
    return max(0.0, communication - computation, reductions - BACKWARD_SHARE * computation)

"""Learning-rate factors: pure functions of the optimizer step, independent of the number of processes and of a
resume (a prepared scheduler advances once per process, and its state has to be restored).

Formulas and the step convention follow transformers and diffusers: `lr = peak * factor(step)` for update number
`step`, counted from 0. With a warm-up of W steps the factor is step/W: 0 at step 0 and exactly 1 at step W. At
`decay_steps` it is exactly the floor and stays there.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from accel_train.config import Fraction, NonNegativeInt, PositiveInt, UsageError, refuse_without_effect

SHORTEST_CYCLE = 4
"""Fewest steps of a cycle without a notice. With fewer, nothing is left of the cosine's shape."""
ScheduleKind = Literal["constant", "linear", "cosine", "cosine_restarts", "wsd", "inverse_sqrt"]

_ENDLESS: frozenset[ScheduleKind] = frozenset(("constant", "inverse_sqrt"))
_OWN_KIND: dict[str, ScheduleKind] = {
    "cycles": "cosine_restarts",
    "cycle_steps": "cosine_restarts",
    "cycle_multiplier": "cosine_restarts",
    "wsd_decay_fraction": "wsd",
}


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate over the run. Options of another kind are refused."""

    kind: ScheduleKind = "cosine"
    """Shape after the warm-up: constant, linear or cosine down to the floor, cosine_restarts (cosine cycles,
    each from the peak), wsd (stay at the peak, then fall linearly), inverse_sqrt (sqrt(warmup_steps/step))."""

    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises linearly from 0. Never multiplied by the number of
    processes. The first step of a warm-up has learning rate 0."""

    decay_steps: PositiveInt | None = None
    """Optimizer step at which the floor is reached, counted from the start of training, warm-up included. Later steps
    stay at the floor. None: max_steps of the first start: raising max_steps later does not stretch the schedule. Not
    for constant and inverse_sqrt, which have no end."""

    floor: Fraction = 0.0
    """Lowest learning rate after the warm-up, as a fraction of the peak. Not for constant."""

    cycles: PositiveInt | None = None
    """cosine_restarts: number of cycles between the end of the warm-up and decay_steps. Give this or
    cycle_steps."""

    cycle_steps: PositiveInt | None = None
    """cosine_restarts: optimizer steps of the first cycle. The last cycle ends early at decay_steps."""

    cycle_multiplier: PositiveInt | None = None
    """cosine_restarts: every cycle is this many times as long as the one before. None: 1, all equal."""

    wsd_decay_fraction: Fraction | None = None
    """wsd: share of decay_steps, at its end, over which the learning rate falls, in whole steps. None: 0.2."""

    def __post_init__(self) -> None:
        # The annotated range is checked by pydantic only, which a config built in Python never meets.
        if not 0 <= self.floor <= 1:
            raise UsageError(
                f"schedule.floor: {self.floor}: a fraction of the peak learning rate, from 0 to 1, is required; give "
                "for example 0.1 for a tenth of the peak"
            )
        self._refuse_unread_options()
        if self.kind == "cosine_restarts" and (self.cycles is None) == (self.cycle_steps is None):
            raise UsageError(
                f"schedule.cycles: {self.cycles}, schedule.cycle_steps: {self.cycle_steps}: schedule.kind: "
                "cosine_restarts requires exactly one of them; give cycles (how many) or cycle_steps (length of the "
                "first)"
            )
        # A multiplier of 1 is the default, so it passes.
        if self.cycles == 1 and self.cycle_multiplier != 1:
            because = "with schedule.cycles: 1, which has no second cycle"
            refuse_without_effect(self, "schedule", ["cycle_multiplier"], because, "give more cycles")
        if self.kind == "inverse_sqrt" and self.warmup_steps == 0:
            raise UsageError(
                "schedule.warmup_steps: 0: schedule.kind: inverse_sqrt, which decays as sqrt(warmup_steps / step), "
                "requires at least 1; give a warm-up, 1000 to 10000 steps is usual"
            )
        if self.decay_steps is not None:
            check_lengths(self, self.decay_steps, f"schedule.decay_steps: {self.decay_steps}")

    @property
    def has_end(self) -> bool:
        """False for constant and inverse_sqrt, which do not read decay_steps."""
        return self.kind not in _ENDLESS

    def _refuse_unread_options(self) -> None:
        unread = [name for name, kind in _OWN_KIND.items() if kind != self.kind]
        if not self.has_end:
            unread.append("decay_steps")
        if self.kind == "constant":
            unread.append("floor")
        wanted = sorted({_OWN_KIND[name] for name in unread if name in _OWN_KIND and getattr(self, name) is not None})
        instead = None
        if wanted:
            instead = f"give --schedule.kind {' or '.join(wanted)}"
        refuse_without_effect(self, "schedule", unread, f"with schedule.kind: {self.kind}", instead)


def resolve_decay_steps(config: ScheduleConfig, max_steps: int, length: str | None = None) -> int:
    """Return the decay_steps to save with the experiment and to pass to `learning_rate_factor` from then on.

    ``length`` replaces ``max_steps`` in an error, if another option sets the length of the run.

    Call it once, at the first start, before any model is built. It refuses a warm-up, first cycle or wsd decay
    longer than the run. For constant and inverse_sqrt the number is max_steps and has no effect.
    """
    if config.decay_steps is not None:
        return config.decay_steps
    check_lengths(config, max_steps, length or f"max_steps: {max_steps}")
    return max_steps


def shortened(config: ScheduleConfig, decay_steps: int, free: Collection[str]) -> ScheduleConfig:
    """Return the schedule with the options in ``free`` shortened where they do not fit into ``decay_steps``.

    A warm-up is cut to a tenth of the run or less, and then a first cycle to what is left.
    """
    if _fits(config, decay_steps):
        return config
    if "warmup_steps" in free:
        shorter = decay_steps // 10
        if config.kind == "wsd":
            shorter = min(shorter, decay_steps - _wsd_steps(config, decay_steps))
        if config.kind == "inverse_sqrt":  # divides by the warm-up
            shorter = max(1, shorter)
        config = replace(config, warmup_steps=min(config.warmup_steps, shorter))
    rest = decay_steps - config.warmup_steps
    if "cycle_steps" in free and config.cycle_steps is not None and 0 < rest < config.cycle_steps:
        config = replace(config, cycle_steps=rest)
    return config


def _fits(config: ScheduleConfig, decay_steps: int) -> bool:
    try:
        check_lengths(config, decay_steps, "")
    except UsageError:
        return False
    return True


def notices(config: ScheduleConfig, decay_steps: int, max_steps: int, kept_flags: str = "") -> list[str]:
    """Return notices for cycles too short to have a shape, and for a run that does not end with its schedule.

    ``kept_flags`` are those of options that the first start has shortened, for the command that a notice recommends.
    """
    return _short_cycles(config, decay_steps) + _other_end(config, decay_steps, max_steps, kept_flags)


def _short_cycles(config: ScheduleConfig, decay_steps: int) -> list[str]:
    if config.kind != "cosine_restarts":
        return []
    span = decay_steps - config.warmup_steps
    first, units = _first_cycle(config, span)
    # A warm-up to the end leaves nothing for a cycle.
    if span == 0 or first >= SHORTEST_CYCLE * units:
        return []
    return [
        f"the first cycle of the schedule has {first / units:.2g} steps: with fewer than {SHORTEST_CYCLE} the learning "
        "rate hardly leaves the peak, or jumps; give fewer or longer cycles"
    ]


def _other_end(config: ScheduleConfig, decay_steps: int, max_steps: int, kept_flags: str) -> list[str]:
    """Return a notice if the run does not end with its schedule, as after a resume with another max_steps."""
    if config.kind in _ENDLESS or max_steps == decay_steps:
        return []
    flags = f"--schedule.decay_steps {max_steps}{kept_flags} --allow schedule.decay_steps"
    if max_steps < decay_steps:
        # The user has named the end of the schedule, so stopping before it is on purpose.
        if config.decay_steps is not None:
            return []
        factor = learning_rate_factor(config, max_steps, decay_steps)
        return [
            f"the schedule of this run ends at step {decay_steps}, as set at its first start: at step {max_steps} the "
            f"learning rate is still {factor:.2g} of the peak; to end there, give {flags}"
        ]
    lr = f"{config.floor:g} of the peak"
    if config.floor == 0:
        lr = "0, so nothing is learned there"
    return [
        f"the schedule of this run ends at step {decay_steps}: from there to step {max_steps} the learning rate is "
        f"{lr}; to stretch it, give {flags}"
    ]


def remedy_when_finished(config: ScheduleConfig, decay_steps: int, max_steps: int, kept_flags: str = "") -> str:
    """Return the flags that a finished run needs besides a larger ``max_steps`` to learn more, as text. Empty if none.

    ``kept_flags`` as in ``notices``.
    """
    if config.kind in _ENDLESS or decay_steps > max_steps:
        return ""
    flags = f"--schedule.decay_steps STEPS{kept_flags} and --allow schedule.decay_steps"
    return f", with {flags}, because the learning rate has decayed"


def learning_rate_factor(config: ScheduleConfig, step: int, decay_steps: int) -> float:
    """Learning rate of update `step` (0 = the first) as a fraction of the peak, in [0, 1].

    `decay_steps` comes from `resolve_decay_steps`. It is not max_steps of the present start.
    """
    warmup = config.warmup_steps
    if step < warmup:
        return step / warmup
    if config.kind == "constant":
        return 1.0
    if config.kind == "inverse_sqrt":
        return max(config.floor, math.sqrt(warmup / step))
    # The shapes below divide by a span that may be 0 here, and a cycle would begin again at the peak.
    if step >= decay_steps:
        return config.floor
    return config.floor + (1.0 - config.floor) * _shape(config, step - warmup, decay_steps - warmup)


def _shape(config: ScheduleConfig, done: int, span: int) -> float:
    """Factor from 1 at `done` = 0 towards 0 at `done` = `span`, both counted from the end of the warm-up."""
    match config.kind:
        case "linear":
            return 1.0 - done / span
        case "cosine":
            return _half_cosine(done / span)
        case "wsd":
            # The fraction is of decay_steps, warm-up included. Before the decay the quotient is above 1: the peak.
            return min(1.0, (span - done) / _wsd_steps(config, span + config.warmup_steps))
        case _:
            return _half_cosine(_cycle_progress(config, done, span))


def _half_cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _cycle_progress(config: ScheduleConfig, done: int, span: int) -> float:
    """Completed fraction of the current cycle. In integers, so that a restart falls on its step exactly."""
    multiplier = config.cycle_multiplier or 1
    length, units = _first_cycle(config, span)
    done *= units
    if multiplier == 1:
        return (done % length) / length
    while done >= length:
        done -= length
        length *= multiplier
    return done / length


def _first_cycle(config: ScheduleConfig, span: int) -> tuple[int, int]:
    """Length of the first cycle in units of a step, and the units of one step. Both are integers."""
    if config.cycle_steps is not None:
        return config.cycle_steps, 1
    # Cycle i is span * multiplier**i / units steps long.
    return span, _units(config.cycles or 1, config.cycle_multiplier or 1)


def _units(cycles: int, multiplier: int) -> int:
    """Sum of multiplier**i over all cycles."""
    if multiplier == 1:
        return cycles
    return (multiplier**cycles - 1) // (multiplier - 1)


def _are_too_many(cycles: int, multiplier: int, steps: int) -> bool:
    """Return True if the first cycle would be shorter than a step, even without a warm-up."""
    # By logarithms first: a power of this size takes hours.
    if (cycles - 1) * math.log(multiplier) > math.log(steps) + 1:
        return True
    return _units(cycles, multiplier) > steps


def _wsd_steps(config: ScheduleConfig, decay_steps: int) -> int:
    return max(1, round(_wsd_fraction(config) * decay_steps))  # at least 1, because `_shape` divides by it


def _wsd_fraction(config: ScheduleConfig) -> float:
    return 0.2 if config.wsd_decay_fraction is None else config.wsd_decay_fraction


def check_lengths(config: ScheduleConfig, decay_steps: int, length: str) -> None:
    """Refuse a warm-up, cycles or a wsd decay that do not fit into ``decay_steps``, which errors call ``length``."""
    warmup = config.warmup_steps
    if warmup > decay_steps:
        raise UsageError(
            f"schedule.warmup_steps: {warmup}: must not be more than {length}, or the peak would never be reached; "
            "lower one or raise the other"
        )
    if config.cycle_steps is not None and warmup + config.cycle_steps > decay_steps:
        raise UsageError(
            f"schedule.cycle_steps: {config.cycle_steps}: with schedule.warmup_steps: {warmup} one cycle ends at step "
            f"{warmup + config.cycle_steps}, after {length}; shorten it to "
            f"{decay_steps - warmup} or less, or give cycles instead"
        )
    if config.cycles is not None and _are_too_many(config.cycles, config.cycle_multiplier or 1, decay_steps):
        raise UsageError(
            f"schedule.cycles: {config.cycles}, schedule.cycle_multiplier: {config.cycle_multiplier or 1}: the first "
            f"cycle would be shorter than a step, with {length} to divide; give fewer cycles, each of "
            f"{SHORTEST_CYCLE} steps or more"
        )
    if config.kind == "wsd" and warmup + _wsd_steps(config, decay_steps) > decay_steps:
        raise UsageError(
            f"schedule.wsd_decay_fraction: {_wsd_fraction(config)}: a decay of "
            f"{_wsd_steps(config, decay_steps)} steps and schedule.warmup_steps: {warmup} are more than "
            f"{length}; shorten the warm-up or the decay"
        )

"""Which of the two modalities a step is given and which it learns, agreed by all processes without a message.

The mode belongs to the step: it is a function of (seed, step). Every forward still runs every part of the model;
a term that the mode does not use has coefficient 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from accel_train import rng
from accel_train.config import Fraction, NonNegativeFloat, PositiveFloat, UsageError

Mode = Literal["unconditional", "l2t", "t2l"]
Part = Literal["text", "latent"]
MODES: tuple[Mode, ...] = ("unconditional", "l2t", "t2l")
CONDITION: dict[Mode, Part | None] = {"unconditional": None, "l2t": "latent", "t2l": "text"}
"""What each mode is given clean; the other modality is what it learns."""


PREFIXES: dict[Part, list[str]] = {
    "text": ["token_embedding", "text_positions"],
    "latent": ["latent_encoder", "latent_positions"],
}
"""Modules of ``MultimodalMMDiT`` that belong to one modality alone, beside its head."""


@dataclass(frozen=True)
class Phase:
    """One entry of a sequence: a mode (or ``mixed``), its length in steps, and the part that is frozen in it."""

    mode: Mode | Literal["mixed"]
    steps: int
    frozen: Part | None = None


@dataclass(frozen=True)
class ModeConfig:
    """What the model is trained to do."""

    mode: Literal["unconditional", "l2t", "t2l", "mixed", "sequential"] = "mixed"
    """unconditional: both modalities noised, both learned. l2t: text from its latent. t2l: latent from its text.
    mixed: one of the three each step, by weights. sequential: phase after phase, then from the start again."""

    weights: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] = (1.0, 1.0, 1.0)
    """mixed: how often unconditional, l2t and t2l are chosen, relative to each other."""

    phases: tuple[str, ...] = ()
    """sequential: entries MODE:STEPS or MODE:STEPS:freeze=PART, such as t2l:500 or mixed:200:freeze=text. A frozen
    part (text or latent: embeddings, positions and head) keeps its values for the phase."""

    conditioning_dropout: Fraction = 0.1
    """l2t and t2l: share of samples whose condition is wholly noised. Guidance above 1 needs it."""

    latent_weight: PositiveFloat = 1.0
    """Coefficient of the latent loss; the text loss has 1."""

    def __post_init__(self) -> None:
        if self.mode == "mixed" and sum(self.weights) == 0:
            raise UsageError("weights 0 0 0: at least one mode needs a weight above 0; give for example 1 1 1")
        if (self.mode == "sequential") != bool(self.phases):
            raise UsageError(
                f"mode {self.mode} with phases {list(self.phases)}: sequential needs phases and the other modes read "
                "none; give --modes.mode sequential --modes.phases t2l:500 mixed:500, or leave phases out"
            )
        refuse_random_conditions(self.parsed())
        self._refuse_unread()

    def _refuse_unread(self) -> None:
        modes = {phase.mode for phase in self.parsed()} or {self.mode}
        learned = set(MODES) if "mixed" in modes else modes
        read = {
            "weights": "mixed" in modes,
            "latent_weight": learned != {"l2t"},
            "conditioning_dropout": learned != {"unconditional"},
        }
        unread = [name for name in read if not read[name] and getattr(self, name) != getattr(type(self), name)]
        if unread:
            given = ", ".join(f"modes.{name} {_as_flag(getattr(self, name))}" for name in unread)
            back = " ".join(f"--modes.{name} {_as_flag(getattr(type(self), name))}" for name in unread)
            raise UsageError(
                f"{given}: not read by modes.mode {self.mode}. Leave it out; where a preset gives it, take it back "
                f"with {back}."
            )

    def parsed(self) -> list[Phase]:
        """The phases of ``sequential``, checked."""
        return [_parse(text) for text in self.phases]


def mode_of_step(config: ModeConfig, seed: int, step: int) -> Mode:
    """The mode of optimizer step ``step``: the same on every process."""
    mode = phase_of_step(config, step).mode
    return mode if mode != "mixed" else MODES[rng.host_choice(seed, "mode", step, config.weights)]


def phase_of_step(config: ModeConfig, step: int) -> Phase:
    """The phase that ``step`` falls into, modulo the total length; without phases the mode itself, for ever."""
    if config.mode != "sequential":
        return Phase(config.mode, 0)
    phases = config.parsed()
    place = step % sum(p.steps for p in phases)
    for phase in phases:
        if place < phase.steps:
            return phase
        place -= phase.steps
    raise AssertionError("the lengths add up")


def coefficients(config: ModeConfig, mode: Mode) -> dict[str, float]:
    """Coefficient of each loss term in a step of this mode; a modality that is given is not learned."""
    given = CONDITION[mode]
    return {"text": float(given != "text"), "latent": config.latent_weight * (given != "latent")}


def freezable(config: ModeConfig) -> dict[str, list[str]]:
    """Module prefixes of the parts that some phase freezes, for the optimizer's groups; mostly empty."""
    parts = {phase.frozen for phase in config.parsed()} - {None}
    return {part: [f"{part}_head", *PREFIXES[part]] for part in sorted(cast("set[Part]", parts))}


def frozen_parts(config: ModeConfig, step: int) -> list[str]:
    """Parts frozen in the phase of ``step``."""
    frozen = phase_of_step(config, step).frozen
    return [] if frozen is None else [frozen]


def refuse_random_conditions(phases: Sequence[Phase]) -> None:
    """A frozen part that its phase conditions on must have been trained before: its values would be random."""
    trained: set[Part] = set()
    for number, phase in enumerate(phases):
        modes = MODES if phase.mode == "mixed" else (phase.mode,)
        if phase.frozen is not None and phase.frozen not in trained and phase.frozen in {CONDITION[m] for m in modes}:
            raise UsageError(
                f"phases[{number}] {phase.mode}:{phase.steps}:freeze={phase.frozen}: {phase.mode} is conditioned on "
                f"the {phase.frozen} part, which no earlier phase has trained, so it would stay at its random initial "
                "values; train it first or do not freeze it"
            )
        if phase.frozen != "text":
            trained.add("text")
        if phase.frozen != "latent":
            trained.add("latent")


def _as_flag(value: Any) -> str:
    return " ".join(f"{v:g}" for v in value) if isinstance(value, tuple) else f"{value:g}"


def _parse(text: str) -> Phase:
    mode, _, rest = text.partition(":")
    steps, _, frozen = rest.partition(":")
    part = frozen.removeprefix("freeze=")
    readable = mode in (*MODES, "mixed") and steps.isdigit() and int(steps) > 0
    if not readable or (frozen and (not frozen.startswith("freeze=") or part not in ("text", "latent"))):
        raise UsageError(
            f"phases entry {text!r}: MODE:STEPS or MODE:STEPS:freeze=PART is required, MODE one of "
            f"{', '.join((*MODES, 'mixed'))}, STEPS at least 1, PART text or latent; for example t2l:500:freeze=text"
        )
    return Phase(cast(Mode, mode), int(steps), cast(Part, part) if part else None)

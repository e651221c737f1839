"""Training modes: the modality that a step is conditioned on and the one that it learns.

The mode is a function of (seed, step), so all processes agree without communication. Every forward runs every part of
the model in any mode. A loss term that the mode does not use has coefficient 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, cast

from torch import Tensor

from accel_train import rng
from accel_train.config import Fraction, NonNegativeFloat, PositiveFloat, UsageError, as_written, refuse_without_effect
from accel_train.domains.diffusion.latents import LatentDiffusionConfig
from accel_train.domains.diffusion.masked_text import TextDiffusionConfig
from accel_train.domains.diffusion.timesteps import TimeConfig

Mode = Literal["unconditional", "l2t", "t2l"]
Part = Literal["text", "latent"]
MODES: tuple[Mode, ...] = ("unconditional", "l2t", "t2l")
CONDITION: dict[Mode, Part | None] = {"unconditional": None, "l2t": "latent", "t2l": "text"}
"""The modality that is the clean condition in each mode. The other one is learned."""


PREFIXES: dict[Part, list[str]] = {
    "text": ["token_embedding", "text_positions"],
    "latent": ["latent_encoder", "latent_positions"],
}
"""Modules of ``MultimodalMMDiT`` that only one modality uses, in addition to its head."""


@dataclass(frozen=True)
class Phase:
    """One entry of a sequence: a mode (or ``mixed``), its length in steps and the part that it freezes."""

    mode: Mode | Literal["mixed"]
    steps: int
    frozen: Part | None = None

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Modes of this phase."""
        if self.mode == "mixed":
            return MODES
        return (self.mode,)


@dataclass(frozen=True)
class ModeConfig:
    """Training modes and their weights."""

    mode: Literal["unconditional", "l2t", "t2l", "mixed", "sequential"] = "mixed"
    """unconditional: both modalities noised, both learned. l2t: text from its latent. t2l: latent from its text.
    mixed: one of the three each step, drawn by weight. sequential: the phases in order, then again from the first."""

    weights: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] = (1.0, 1.0, 1.0)
    """mixed: relative frequency of unconditional, l2t and t2l."""

    phases: tuple[str, ...] = ()
    """sequential: entries MODE:STEPS or MODE:STEPS:freeze=PART, such as t2l:500 or mixed:200:freeze=text. A frozen
    part (text or latent: embeddings, positions and head) keeps its values for the phase."""

    conditioning_dropout: Fraction = 0.1
    """l2t and t2l: share of samples with a fully noised condition. Guidance above 1 needs it."""

    latent_weight: PositiveFloat = 1.0
    """Coefficient of the latent loss. The text loss has 1."""

    def __post_init__(self) -> None:
        if self.mode != "sequential":
            because = f"with modes.mode: {self.mode}"
            refuse_without_effect(self, "modes", ["phases"], because, "give --modes.mode sequential")
        elif not self.phases:
            raise UsageError("modes.mode: sequential: phases are required; give --modes.phases t2l:500 mixed:500")
        # Parsed here as well, so that a wrong phase is refused before the data are read.
        refuse_random_conditions(self.parsed())
        has_mixed = self.mode == "mixed" or any(phase.mode == "mixed" for phase in self.parsed())
        if has_mixed and sum(self.weights) == 0:
            raise UsageError("modes.weights 0 0 0: at least one mode needs a weight above 0; for example, give 1 1 1")
        self._refuse_unread()

    def drawn(self) -> set[Mode]:
        """Return the modes that the steps of a run can have."""
        drawn: set[Mode] = set()
        for phase in self.parsed() or [phase_of_step(self, 0)]:
            if phase.mode == "mixed":
                # A weight of 0 is never drawn.
                drawn |= {mode for mode, weight in zip(MODES, self.weights, strict=True) if weight}
            else:
                drawn.add(phase.mode)
        return drawn

    def describe(self) -> str:
        """Return the option that determines the modes, with its value."""
        if self.mode == "mixed":
            return f"modes.weights: {as_written(self.weights)}"
        return f"modes.mode: {self.mode}"

    def _refuse_unread(self) -> None:
        phases = self.parsed() or [phase_of_step(self, 0)]
        modes = self.drawn()
        has_effect = {
            "weights": any(phase.mode == "mixed" for phase in phases),
            "latent_weight": modes != {"l2t"},
            "conditioning_dropout": modes != {"unconditional"},
        }
        ignored = [name for name, is_read in has_effect.items() if not is_read]
        refuse_without_effect(self, "modes", ignored, f"with {self.describe()}")

    def parsed(self) -> list[Phase]:
        """Parse and check the phases of ``sequential``."""
        return [_parse(text) for text in self.phases]


def refuse_unlearned(
    config: ModeConfig, text: TextDiffusionConfig, times: TimeConfig, latent: LatentDiffusionConfig
) -> None:
    """Raise ``UsageError`` for options of a loss that no step trains: that of the latent in l2t, of the text in t2l."""
    # The loss of a mode's condition has the coefficient 0.
    unlearned = (
        ("l2t", "times", times, "latent"),
        ("l2t", "latent", latent, "latent"),
        ("t2l", "text", text, "text"),
    )
    for mode, group, options, part in unlearned:
        if config.drawn() != {mode}:
            continue
        names = [field.name for field in fields(options)]
        because = f"with {config.describe()}, which learns no {part}"
        refuse_without_effect(options, group, names, because, "choose another mode")


def learns_without_condition(config: ModeConfig) -> bool:
    """Return True if a run also learns to predict without the condition, by dropout or in unconditional steps."""
    # In unconditional steps each modality has its own time, up to pure noise.
    return config.conditioning_dropout > 0 or "unconditional" in config.drawn()


def refuse_unlearned_guidance(config: ModeConfig, guidance: Mapping[str, float]) -> None:
    """Raise ``UsageError`` for guidance if the model has never learned to predict without its condition.

    ``guidance`` maps the option of each direction to its strength. Dropout and unconditional steps both teach this.
    """
    if learns_without_condition(config):
        return
    for option, strength in guidance.items():
        if strength != 1:
            raise UsageError(
                f"{option} {strength:g}: adds a prediction without the condition, but with modes.conditioning_dropout "
                f"0 and {config.describe()} the model never learns one. Set it to 1, or train with "
                "--modes.conditioning_dropout 0.1."
            )


def refuse_never_without_text(config: ModeConfig) -> None:
    """Raise ``UsageError`` for sampling a latent without a text if the model has always been trained with one."""
    if not learns_without_condition(config):
        raise UsageError(
            "prompt '': asks for a picture without a caption, but with modes.conditioning_dropout 0 and "
            f"{config.describe()} the model was always trained with one; give a caption, or train with "
            "--modes.conditioning_dropout 0.1"
        )


def mode_of_step(config: ModeConfig, seed: int, step: int) -> Mode:
    """Return the mode of optimizer step ``step``, the same on every process."""
    mode = phase_of_step(config, step).mode
    if mode == "mixed":
        # Drawn on the host: a draw on the device would have to be waited for in every step.
        return MODES[rng.host_choice(seed, "mode", step, config.weights)]
    return mode


def fix_condition(
    config: ModeConfig,
    seed: int,
    step: int,
    occurrence: Tensor,
    text_time: Tensor,
    latent_time: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the times of text and latent, (B,) each, with the time of the step's condition fixed.

    A condition is clean at time 0. In a share ``conditioning_dropout`` of the samples, keyed by sample, its time is 1:
    pure noise, which the model reads as an absent condition.
    """
    keys = rng.sample_keys(seed, "condition", step, occurrence)
    condition_time = (rng.uniform(keys) < config.conditioning_dropout).float()
    mode = mode_of_step(config, seed, step)
    if mode == "l2t":
        return text_time, condition_time
    if mode == "t2l":
        return condition_time, latent_time
    return text_time, latent_time


def phase_of_step(config: ModeConfig, step: int) -> Phase:
    """Return the phase of ``step``. The sequence repeats. Without phases, the mode itself lasts for the whole run."""
    if config.mode != "sequential":
        return Phase(config.mode, 0)
    phases = config.parsed()
    # Derived from the step number, so that a resume needs no state.
    remaining = step % sum(phase.steps for phase in phases)
    for phase in phases:
        if remaining < phase.steps:
            return phase
        remaining -= phase.steps
    raise AssertionError("the lengths add up")


def learned_conditions(config: ModeConfig) -> set[Part]:
    """Return the conditions learned by a run with this config: latent for l2t, text for t2l.

    Unconditional steps teach both, because each modality then has a time of its own, which may be 0.
    """
    learned: set[Part] = set()
    for mode in config.drawn():
        condition = CONDITION[mode]
        learned |= {"text", "latent"} if condition is None else {condition}
    return learned


def coefficients(config: ModeConfig, mode: Mode) -> dict[str, float]:
    """Return the coefficient of each loss term in a step of this mode. The condition itself is not learned."""
    weights = {"text": 1.0, "latent": config.latent_weight}
    condition = CONDITION[mode]
    if condition is not None:
        # Weight 0 instead of a missing term keeps its part of the model in the backward, which DDP waits for.
        weights[condition] = 0.0
    return weights


def freezable(config: ModeConfig) -> dict[str, list[str]]:
    """Map each part frozen by some phase to its module prefixes, for the optimizer's groups. Mostly empty."""
    parts = {phase.frozen for phase in config.parsed()} - {None}
    prefixes: dict[str, list[str]] = {}
    for part in sorted(cast("set[Part]", parts)):
        # Blocks are never frozen, because each attends to both modalities.
        prefixes[part] = [f"{part}_head", *PREFIXES[part]]
    return prefixes


def frozen_parts(config: ModeConfig, step: int) -> list[str]:
    """List the parts frozen in the phase of ``step``."""
    frozen = phase_of_step(config, step).frozen
    if frozen is None:
        return []
    return [frozen]


def refuse_random_conditions(phases: Sequence[Phase]) -> None:
    """Refuse a phase conditioned on a frozen part that no earlier phase trained: its weights would be random."""
    trained: set[Part] = set()
    for number, phase in enumerate(phases):
        conditions = {CONDITION[mode] for mode in phase.modes}
        if phase.frozen is not None and phase.frozen not in trained and phase.frozen in conditions:
            raise UsageError(
                f"phases[{number}] {phase.mode}:{phase.steps}:freeze={phase.frozen}: {phase.mode} is conditioned on "
                f"the {phase.frozen} part, which no earlier phase has trained, so it would stay at its random initial "
                "values; train it first or do not freeze it"
            )
        # Each mode trains both parts: the condition's part learns through the loss of the other one.
        if phase.frozen != "text":
            trained.add("text")
        if phase.frozen != "latent":
            trained.add("latent")


def _parse(text: str) -> Phase:
    mode, _, rest = text.partition(":")
    steps, _, frozen = rest.partition(":")
    part = frozen.removeprefix("freeze=")
    valid_mode = mode in (*MODES, "mixed")
    valid_steps = steps.isdecimal() and int(steps) > 0
    valid_part = not frozen or (frozen.startswith("freeze=") and part in ("text", "latent"))
    if not (valid_mode and valid_steps and valid_part):
        raise UsageError(
            f"phases entry {text!r}: MODE:STEPS or MODE:STEPS:freeze=PART is required, MODE one of "
            f"{', '.join((*MODES, 'mixed'))}, STEPS at least 1, PART text or latent; for example t2l:500:freeze=text"
        )
    frozen = cast(Part, part) if part else None
    return Phase(cast(Mode, mode), int(steps), frozen)

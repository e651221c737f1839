"""Modes by step, phases, and what may be frozen."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from accel_train.config import UsageError
from accel_train.domains.text.modes import (
    MODES,
    ModeConfig,
    coefficients,
    freezable,
    frozen_parts,
    mode_of_step,
    phase_of_step,
    refuse_unlearned_guidance,
)


def test_mixed_follows_its_weights_and_depends_on_seed_and_step_alone() -> None:
    config = ModeConfig(weights=(1, 2, 1))
    drawn = [mode_of_step(config, 0, step) for step in range(4000)]
    assert drawn == [mode_of_step(config, 0, step) for step in range(4000)]
    assert drawn != [mode_of_step(config, 1, step) for step in range(4000)]
    shares = {mode: count / 4000 for mode, count in Counter(drawn).items()}
    assert shares == pytest.approx({"unconditional": 0.25, "l2t": 0.5, "t2l": 0.25}, abs=0.03)
    assert all(mode_of_step(ModeConfig(weights=(0, 1, 0)), 0, s) == "l2t" for s in range(50))


@pytest.mark.parametrize("mode", MODES)
def test_a_given_modality_is_not_learned(mode: str) -> None:
    config = ModeConfig(mode=mode, latent_weight=1.0 if mode == "l2t" else 3.0)  # type: ignore[arg-type]
    expected = {"unconditional": (1, 3), "l2t": (1, 0), "t2l": (0, 3)}[mode]
    assert coefficients(config, mode_of_step(config, 0, 5)) == dict(zip(("text", "latent"), expected, strict=True))


def test_phases_follow_each_other_and_start_again() -> None:
    config = ModeConfig(mode="sequential", phases=("l2t:2", "t2l:3:freeze=text", "mixed:1"))
    assert [phase_of_step(config, s).mode for s in range(8)] == ["l2t", "l2t", *["t2l"] * 3, "mixed", "l2t", "l2t"]
    assert [frozen_parts(config, s) for s in (1, 2, 4, 5)] == [[], ["text"], ["text"], []]
    assert list(freezable(config)) == ["text"]
    assert freezable(ModeConfig()) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": (0, 0, 0)}, "at least one mode"),
        ({"mode": "sequential", "phases": ("l2t:2", "mixed:2"), "weights": (0, 0, 0)}, "at least one mode"),
        ({"mode": "sequential"}, "modes.mode: sequential: phases are required"),
        ({"phases": ("l2t:3",)}, "modes.phases: l2t:3: has no effect with modes.mode: mixed"),
        ({"mode": "sequential", "phases": ("l2t",)}, "MODE:STEPS"),
        ({"mode": "sequential", "phases": ("l2t:²",)}, "MODE:STEPS"),
        ({"mode": "sequential", "phases": ("l2t:0",)}, "STEPS at least 1"),
        ({"mode": "sequential", "phases": ("both:4",)}, "MODE one of"),
        ({"mode": "sequential", "phases": ("l2t:4:text",)}, "freeze=PART"),
        ({"mode": "sequential", "phases": ("t2l:4:freeze=text",)}, "conditioned on the text part"),
        ({"mode": "sequential", "phases": ("l2t:4:freeze=latent", "t2l:4")}, "conditioned on the latent part"),
        ({"mode": "sequential", "phases": ("mixed:4:freeze=latent",)}, "random initial values"),
        (
            {"mode": "l2t", "weights": (0.1, 1.2, 1), "latent_weight": 4.0},
            r"modes.weights: 0.1 1.2 1, modes.latent_weight: 4: have no effect with modes.mode: l2t; .*"
            r"defaults are 1 1 1, 1",
        ),
        (
            {"mode": "unconditional", "conditioning_dropout": 0.2},
            r"conditioning_dropout: 0.2: has no effect.*default is 0.1",
        ),
        (
            {"mode": "sequential", "phases": ("t2l:4",), "weights": (1, 2, 1)},
            r"weights: 1 2 1: has no effect with .*sequential",
        ),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ModeConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "is_learned"),
    [
        ({"conditioning_dropout": 0.1, "mode": "t2l"}, True),
        ({"conditioning_dropout": 0.0, "mode": "mixed"}, True),  # by its unconditional steps
        ({"conditioning_dropout": 0.0, "mode": "t2l"}, False),
        ({"conditioning_dropout": 0.0, "mode": "mixed", "weights": (0.0, 1.0, 1.0)}, False),
        # Beside a phase of a mode of its own, too, a weight of 0 is never drawn.
        (
            {"conditioning_dropout": 0.0, "mode": "sequential", "phases": ("mixed:9", "t2l:9"), "weights": (0, 0, 1)},
            False,
        ),
    ],
)
def test_guidance_needs_a_model_that_has_been_without_its_condition(options: dict[str, Any], is_learned: bool) -> None:
    config = ModeConfig(**options)
    refuse_unlearned_guidance(config, {"evaluation.text.guidance": 1.0})
    if is_learned:
        refuse_unlearned_guidance(config, {"evaluation.text.guidance": 2.0})
        return
    with pytest.raises(UsageError, match=r"evaluation.text.guidance 2: .*never learns one.*conditioning_dropout 0.1"):
        refuse_unlearned_guidance(config, {"evaluation.text.guidance": 2.0})

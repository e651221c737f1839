"""The trajectory belongs to the experiment: steps of every recipe's demo on every layout, compared number by number.

That of mmdit trains with mode `mixed` and conditioning dropout, that of pde in two stages on two tasks with drop-path,
flips and drawn points, that of causal_lm on packed rows with different numbers of trained tokens and with tied
embeddings, that of lora on buckets of several shapes with cached latents and captions, so these are in every
comparison.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.distributed.launching import Finished, Layout, relative_difference, run_recipe

pytestmark = pytest.mark.distributed
STEPS = {"mmdit": 40, "pde": 16, "causal_lm": 16, "lora": 12}

LAYOUTS = {
    "2 processes": (Layout("ddp", 2), ()),
    "3 processes": (Layout("ddp", 3), ()),
    "4 processes": (Layout("ddp", 4), ()),
    "ragged micro-batches of 3": (Layout("single", 1), ("--micro_batch_size", "3")),
    "micro-batches of 1, 2 processes": (Layout("ddp", 2), ("--micro_batch_size", "1")),
    "3 processes, ragged": (Layout("ddp", 3), ("--micro_batch_size", "3")),
    "FSDP2": (Layout("fsdp2", 2), ("--micro_batch_size", "3")),
    "HSDP": (Layout("hsdp", 4), ("--micro_batch_size", "3")),
    "ZeRO-1": (Layout("zero1", 2), ("--micro_batch_size", "3")),
    "ZeRO-2": (Layout("zero2", 2), ("--micro_batch_size", "3")),
    "ZeRO-2, one reduction": (Layout("zero2", 2), ("--micro_batch_size", "3", "--sync", "last")),
    "ZeRO-3": (Layout("zero3", 2), ("--micro_batch_size", "3")),
}

SLOW = {
    "2 processes",
    "3 processes",
    "4 processes",
    "ragged micro-batches of 3",
    "micro-batches of 1, 2 processes",
    "3 processes, ragged",
    "HSDP",
    "ZeRO-1",
    "ZeRO-2",
    "ZeRO-2, one reduction",
    "ZeRO-3",
}
"""Each of these is between two others, or daily in test_contract.py and test_resume.py; they run with -m slow. Pictures
on two processes are daily in test_pictures.py."""


QUICK = {"pde": {"3 processes, ragged"}, "causal_lm": set[str](), "lora": {"2 processes"}}
"""Of causal_lm a gradient on two processes is daily in test_causal_lm.py, and adapters under FSDP2 in
test_causal_lm_lora.py."""


def cases() -> list[object]:
    quick = QUICK | {"mmdit": set(LAYOUTS) - SLOW}
    return [
        pytest.param(recipe, name, marks=() if name in quick[recipe] else pytest.mark.slow, id=f"{recipe}-{name}")
        for recipe in STEPS
        for name in LAYOUTS
    ]


def train(layout: Layout, folder: Path, *flags: str) -> Finished:
    steps = ("--max_steps", str(STEPS[layout.recipe]))
    return run_recipe(layout, folder / "run", *steps, "--log.update_ratios", "true", *flags)


Alone = Callable[[str], Finished]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """A recipe in one process with the whole batch, run when first asked for."""
    made: dict[str, Finished] = {}

    def of(recipe: str) -> Finished:
        if recipe not in made:
            made[recipe] = train(Layout("single", 1, recipe), tmp_path_factory.mktemp(recipe))
        return made[recipe]

    return of


@pytest.fixture(scope="module")
def reference(alone: Alone) -> Finished:
    return alone("mmdit")


def tokens_per_sample(run: Finished) -> float:
    """In the steps up to the last log point: what each process counts is added up over all."""
    lines = run.train_lines()
    last = lines[max(lines)]
    # A recipe of pictures counts none.
    return last.get("tokens_per_second", 0.0) / last["samples_per_second"]


def norms_by_part(run: Finished, step: int) -> dict[str, float]:
    line = run.train_lines()[step]
    return {name: value for name, value in line.items() if name.startswith(("grad_norm_", "update_ratio_"))}


@pytest.mark.parametrize(("recipe", "name"), cases())
def test_every_layout_follows_the_same_trajectory(recipe: str, name: str, alone: Alone, tmp_path: Path) -> None:
    layout, flags = LAYOUTS[name]
    reference, steps = alone(recipe), STEPS[recipe]
    run = train(dataclasses.replace(layout, recipe=recipe), tmp_path, *flags)
    expected, found = reference.losses(), run.losses()
    assert len(found) == steps
    worst = max(abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True))
    assert worst < 1e-5, f"{name}: {worst:.1e}"
    assert tokens_per_sample(run) == pytest.approx(tokens_per_sample(reference), rel=1e-9)
    if (recipe, name) == ("mmdit", "FSDP2"):
        # The other strategies: tests/metrics/test_part_norms.py.
        for step in (1, 2, 3):
            assert len(norms_by_part(run, step)) >= 10
            # The first updates of Adam are those of rounding where a gradient is nearly 0.
            assert norms_by_part(run, step) == pytest.approx(norms_by_part(reference, step), rel=1e-3, abs=1e-6)
    for stem in ("model", "ema"):
        assert relative_difference(reference.tensors(steps, stem), run.tensors(steps, stem)) < 1e-4, stem


@pytest.mark.slow  # a resume that has the same bits shows it every day
def test_the_same_layout_twice_is_bit_identical(reference: Finished, tmp_path: Path) -> None:
    again, steps = train(Layout("single", 1), tmp_path), STEPS["mmdit"]
    assert [x.hex() for x in again.losses()] == [x.hex() for x in reference.losses()]
    for stem in ("model", "ema", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
        ours, theirs = again.tensors(steps, stem), reference.tensors(steps, stem)
        assert all(torch.equal(ours[k], theirs[k]) for k in theirs), stem


@pytest.mark.slow  # other options do give other losses in tests/rerun/test_branch.py
def test_another_seed_is_another_trajectory(reference: Finished, tmp_path: Path) -> None:
    """The comparison above can fail: losses do differ where the experiment does."""
    other = run_recipe(Layout("single", 1), tmp_path / "run", "--max_steps", "4", "--seed", "1")
    assert max(abs(a - b) for a, b in zip(reference.losses(), other.losses(), strict=False)) > 1e-2

"""Kill after a commit, resume, compare step 20: bit for bit on the same layout, within 1e-6 on another."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accel_train.store import failpoints
from tests.distributed.launching import Finished, Layout, run_recipe

pytestmark = pytest.mark.distributed
LAYOUTS = [Layout("single", 1), Layout("ddp", 2), Layout("fsdp2", 2), Layout("zero2", 2), Layout("zero3", 2)]
OFFLOADED = [Layout("zero2_offload", 2), Layout("zero3_offload", 2)]
THREE = [Layout("ddp", 3), Layout("fsdp2", 3), Layout("zero2", 3)]
"""With two processes a sum has no order; with three it depends on how their numbers are laid out."""
PDE = [Layout("single", 1, "pde"), Layout("fsdp2", 2, "pde"), Layout("zero3", 2, "pde")]
CAUSAL_LM = [Layout("single", 1, "causal_lm"), Layout("fsdp2", 2, "causal_lm"), Layout("zero3", 2, "causal_lm")]
LORA = [Layout("single", 1, "lora"), Layout("fsdp2", 2, "lora"), Layout("zero2", 2, "lora")]
HSDP = Layout("hsdp", 4)
SAME = [*LAYOUTS, *THREE, *PDE, *CAUSAL_LM, *LORA, *OFFLOADED, HSDP]
FLAGS = (
    "--max_steps",
    "20",
    "--micro_batch_size",
    "4",
    "--checkpoints.keep_last",
    "0",
    "--checkpoints.save_every",
    "5",
)

ELSEWHERE = [
    (first, second)
    for all_of in (LAYOUTS, PDE, CAUSAL_LM, LORA)
    for first in all_of
    for second in all_of
    if first != second
]
# The same number of processes, and of values in a shard; what differs is the groups that reduce.
ELSEWHERE += [(HSDP, Layout("fsdp2", 4)), (Layout("fsdp2", 2), HSDP)]
RING = {
    (a, b) for all_of in (LAYOUTS, PDE, CAUSAL_LM, LORA) for a, b in zip(all_of, [*all_of[1:], all_of[0]], strict=True)
}
"""One way round: each strategy of each recipe once as the writer and once as the reader."""
QUICK = {(Layout("fsdp2", 2), Layout("zero3", 2))}
"""Two strategies that both cut the state, each in its own way."""

# In one process each recipe resumes to the same bits every day: mmdit in test_feedback.py, PDE in
# test_residual_stage.py, causal_lm in test_health.py and lora in test_lora_recipe.py. ZeRO-2 is in
# test_foreign_models.py.


def workers(number: int) -> tuple[str, ...]:
    return ("--loader.num_workers", str(number))


def killed(layout: Layout, directory: Path, commits: int, *flags: str) -> Finished:
    """Run until its own n-th checkpoint is committed; SIGKILL at that instant, steps further on."""
    extra = {failpoints.VARIABLE: f"after_commit#{commits}"}
    run = run_recipe(layout, directory, *FLAGS, *flags, ok=False, extra=extra)
    assert run.code != 0, run.output[-3000:]
    return run


Whole = Callable[[Layout], Finished]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Each layout's run to step 20 without a stop, made when first asked for."""
    folder, made = tmp_path_factory.mktemp("whole"), dict[Layout, Finished]()

    def of(layout: Layout) -> Finished:
        if layout not in made:
            made[layout] = run_recipe(layout, folder / str(layout) / "run", *FLAGS)
        return made[layout]

    return of


@pytest.fixture(scope="module")
def at_ten(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Each layout's run, killed when step 10 was committed."""
    folder, made = tmp_path_factory.mktemp("killed"), dict[Layout, Finished]()

    def of(layout: Layout) -> Finished:
        if layout not in made:
            made[layout] = killed(layout, folder / str(layout) / "run", 2)
        return made[layout]

    return of


def resume(run: Finished, layout: Layout, folder: Path, *flags: str) -> Finished:
    """Go on to the end from a copy, so that each test starts from the same step."""
    shutil.copytree(run.directory, folder / "run")
    resumed = run_recipe(layout, folder / "run", "--resume", "must", *FLAGS, *flags)
    assert "at step 10" in resumed.output
    return resumed


def assert_identical(found: Finished, expected: Finished) -> None:
    assert [x.hex() for x in found.losses()] == [x.hex() for x in expected.losses()]
    for stem in ("model", "ema", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
        a, b = expected.tensors(20, stem), found.tensors(20, stem)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) for k in a), stem


def assert_close(found: Finished, expected: Finished) -> None:
    assert len(found.losses()) == 20
    assert found.losses() == pytest.approx(expected.losses(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.fault(
    "F46", injected="resume in the middle of an epoch, five strategies", outcome="the same bits as an uninterrupted run"
)
@pytest.mark.fault("F48", injected="0 loader workers before, 2 after", outcome="the same bits as an uninterrupted run")
@pytest.mark.parametrize("layout", SAME, ids=str)
def test_one_interruption_on_the_same_layout(layout: Layout, whole: Whole, at_ten: Whole, tmp_path: Path) -> None:
    number = 2 if layout in LAYOUTS[:3] else 0
    resumed = resume(at_ten(layout), layout, tmp_path, *workers(number))
    assert "bit-exact: the same layout" in resumed.output
    assert_identical(resumed, whole(layout))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout("single", 1), Layout("zero2", 2)], ids=str)
def test_weights_that_were_saved_rounded_resume_to_the_same_bits(layout: Layout, whole: Whole, tmp_path: Path) -> None:
    """ZeRO's forward reads other weights than its masters: they too must be the exact ones, in the first step."""
    rounded = ("--checkpoints.save_precision", "bf16")
    resumed = resume(killed(layout, tmp_path / "killed" / "run", 2, *rounded), layout, tmp_path, *rounded)
    assert "bit-exact: the same layout" in resumed.output
    assert [x.hex() for x in resumed.losses()] == [x.hex() for x in whole(layout).losses()]


@pytest.mark.slow
@pytest.mark.fault(
    "F47", injected="three SIGKILLs in one epoch, five strategies", outcome="the same bits as an uninterrupted run"
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_three_interruptions_on_the_same_layout(layout: Layout, whole: Whole, tmp_path: Path) -> None:
    for start in range(3):
        killed(layout, tmp_path / "run", 1, *workers(2 * (start % 2)))
    assert_identical(run_recipe(layout, tmp_path / "run", *FLAGS), whole(layout))


@pytest.mark.fault("F42", injected="FSDP2 to 1 process and back", outcome="losses within 1e-6")
@pytest.mark.fault("F43", injected="ZeRO-2 and ZeRO-3 to other strategies and back", outcome="losses within 1e-6")
@pytest.mark.fault("F44", injected="every strategy's checkpoint under every other", outcome="losses within 1e-6")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow, id="-".join(map(str, pair)))
        for pair in ELSEWHERE
    ],
)
def test_on_another_layout(first: Layout, second: Layout, whole: Whole, at_ten: Whole, tmp_path: Path) -> None:
    resumed = resume(at_ten(first), second, tmp_path, *workers(2 * (ELSEWHERE.index((first, second)) % 2)))
    assert "not bit-exact" in resumed.output
    assert_close(resumed, whole(first))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), sorted(RING, key=str), ids=lambda x: str(x))
def test_three_interruptions_to_and_fro(first: Layout, second: Layout, whole: Whole, tmp_path: Path) -> None:
    killed(first, tmp_path / "run", 1, *workers(2))
    killed(second, tmp_path / "run", 1, *workers(0))
    killed(first, tmp_path / "run", 1, *workers(0))
    assert_close(run_recipe(second, tmp_path / "run", *FLAGS, *workers(2)), whole(first))

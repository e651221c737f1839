"""Stop at step 10, resume, compare step 20: bit for bit on the same layout, within 1e-6 on another."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.distributed.launching import Finished, Layout, run_recipe

pytestmark = pytest.mark.distributed
LAYOUTS = [Layout("single", 1), Layout("ddp", 2), Layout("fsdp2", 2), Layout("zero2", 2)]
LAYOUTS += [Layout("zero2_offload", 2), Layout("zero3_offload", 2)]
ELSEWHERE = [
    (first, second)
    for first in LAYOUTS[:3]
    for second in LAYOUTS[:3]
    if first != second
]  # fmt: skip
FLAGS = ("--schedule.decay_steps", "20", "--micro_batch_size", "4", "--checkpoints.keep_last", "0")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, Finished]:
    """Each layout's run to step 10."""
    folder = tmp_path_factory.mktemp("stopped")
    return {x: run_recipe(x, folder / str(x) / "run", "--max_steps", "10", *FLAGS) for x in LAYOUTS}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, Finished]:
    """Each layout's run to step 20 without a stop."""
    folder = tmp_path_factory.mktemp("whole")
    return {x: run_recipe(x, folder / str(x) / "run", "--max_steps", "20", *FLAGS) for x in LAYOUTS}


def resume(run: Finished, layout: Layout, folder: Path) -> Finished:
    """Go on from a copy, so that each test starts from the same step."""
    shutil.copytree(run.directory, folder / "run")
    resumed = run_recipe(layout, folder / "run", "--max_steps", "20", "--resume", "must", *FLAGS)
    assert "at step 10" in resumed.output
    return resumed


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_resume_on_the_same_layout_is_bit_identical(
    layout: Layout, stopped: dict[Layout, Finished], whole: dict[Layout, Finished], tmp_path: Path
) -> None:
    resumed = resume(stopped[layout], layout, tmp_path)
    assert [x.hex() for x in resumed.losses()] == [x.hex() for x in whole[layout].losses()]
    for stem in ("model", "ema", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
        expected, found = whole[layout].tensors(20, stem), resumed.tensors(20, stem)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[k], found[k]) for k in expected), stem


@pytest.mark.parametrize(("first", "second"), ELSEWHERE, ids=lambda x: str(x))
def test_resume_on_another_layout_follows_the_same_trajectory(
    first: Layout, second: Layout, stopped: dict[Layout, Finished], whole: dict[Layout, Finished], tmp_path: Path
) -> None:
    found = resume(stopped[first], second, tmp_path).losses()
    assert len(found) == 20
    assert found[19] == pytest.approx(whole[first].losses()[19], rel=1e-6)

"""A run of one process replayed on two: other bits, for a reason that is named, and within the tolerance."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_train import cli
from accel_train.precision import relative
from accel_train.rerun.agreement import TOLERANCE
from accel_train.store import strict_json
from tests.rerun import recording

pytestmark = pytest.mark.distributed


@pytest.mark.slow  # tests/rerun/test_replay.py compares one process with itself
@pytest.mark.parametrize("recipe", ["mmdit", "pde"])
def test_on_two_processes_it_is_equal_within_reduction_order(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = recording.record(recipe, tmp_path / "run")
    before = recording.tree(run.directory)
    receipt = tmp_path / "receipt.json"
    words = ["replay", str(run.directory), "--steps", "4:12", "--num_processes", "2", "--receipt", str(receipt)]
    assert cli._main(words) == 0
    assert recording.tree(run.directory) == before
    found = strict_json.read_object(receipt)
    assert found["verdict"] == "equal within reduction order"
    assert "world_size 1 -> 2" in found["reasons_for_other_bits"]
    largest: dict[str, float] = {}
    for line in found["steps"]:
        for name, sides in line["values"].items():
            apart = relative(float.fromhex(sides["recorded"]), float.fromhex(sides["replayed"]))
            largest[name] = max(largest.get(name, 0.0), apart)
    print(recipe, largest, [line for one in found["checkpoints"] for line in one["collections"]])
    # Bits do differ, so the same verdict without a reason for it would be the other one.
    assert 0 < max(largest.values()) <= TOLERANCE
    assert cli._main([*words, "--tolerance", "0"]) == 1
    # A fault above the tolerance is none of reduction order.
    recording.move_loss(run.directory, 9, 1e-3)
    assert cli._main(words) == 1
    assert "first differing step" in capsys.readouterr().out

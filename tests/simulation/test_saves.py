"""The memory that a simulation foresees for a save is what a real save writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launching import Layout, run_recipe
from tests.simulation.counting import counted

pytestmark = pytest.mark.distributed
STATE = ("model", "ema", "optimizer/")
CASES = [
    (Layout("fsdp2", 2), ()),
    pytest.param(Layout("single", 1), ("--checkpoints.no_save_state",), marks=pytest.mark.slow),
    pytest.param(Layout("ddp", 2), ("--checkpoints.save_precision", "bf16"), marks=pytest.mark.slow),
    pytest.param(Layout("ddp", 2), ("--optimizer.name", "muon", "--ema.decay", "0"), marks=pytest.mark.slow),
    pytest.param(Layout("zero2", 2), ("--precision", "bf16"), marks=pytest.mark.slow),
    pytest.param(Layout("zero3", 2), (), marks=pytest.mark.slow),
    pytest.param(Layout("fsdp2", 2, "pde"), (), marks=pytest.mark.slow),
    pytest.param(Layout("ddp", 2, "lora"), (), marks=pytest.mark.slow),
]


def tensor_bytes(file: Path) -> int:
    """Bytes of a safetensors file behind its header."""
    with file.open("rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")


@pytest.mark.parametrize(("layout", "flags"), CASES, ids=str)
def test_a_checkpoint_has_the_bytes_of_the_simulated_snapshots(
    layout: Layout, flags: tuple[str, ...], tmp_path: Path
) -> None:
    found = counted(layout, tmp_path, *flags)
    run_recipe(layout, tmp_path / "run", "--max_steps", "2", *flags)
    checkpoint = max((tmp_path / "run" / "checkpoints").iterdir())
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    # What a recipe writes beside them, such as adapters in the format of other tools, is none of the state.
    names = [name for name in files if name.endswith(".safetensors") and name.startswith(STATE)]
    written = sum(tensor_bytes(checkpoint / name) for name in names)
    assert written == found["save"]["written"]
    # The ranks share the writing: the first has its part, give or take one tensor.
    assert found["save"]["copied"] == pytest.approx(written / layout.processes, rel=0.15)

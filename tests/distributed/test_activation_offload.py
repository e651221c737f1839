"""Inputs of checkpointed blocks in host memory under every strategy: the same run to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.launching import DEMOS, ROOT, Finished, Layout, command, fork

pytestmark = pytest.mark.distributed
WORKER = ROOT / "tests" / "distributed" / "offload_worker.py"


def train(layout: Layout, folder: Path, name: str, recipe: Path | None = None) -> Finished:
    """A few steps of two micro-batches."""
    preset, small = DEMOS[layout.recipe]
    words = [preset, *small, "--output_dir", str(folder / name), "--max_steps", "3", "--micro_batch_size", "4"]
    words += ["--activation_checkpointing.mode", "full", "--evaluation.every", "3", "--model.depth", "4"]
    extra = {"PYTHONPATH": str(ROOT), "RECIPE": layout.recipe, "LOG": str(folder / f"{name}.log")}
    done = fork(layout, command(layout, words, folder, recipe), **extra)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return Finished(folder / name, done.stdout, done.returncode)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp2", "zero1", "zero2", "zero3")]


@pytest.mark.parametrize("strategy", ["ddp", *SLOW])
def test_the_run_is_the_same_to_the_bit(strategy: str, tmp_path: Path) -> None:
    layout = Layout(strategy, 2)
    plain = train(layout, tmp_path, "plain")
    offloaded = train(layout, tmp_path, "offloaded", WORKER)
    log = (tmp_path / "offloaded.log").read_text().splitlines()
    assert sum(line.startswith("fetch") for line in log) > 0
    assert log[-1] == "overwritten 0"
    assert offloaded.losses() == plain.losses()
    expected = plain.tensors(3, "model")
    found = offloaded.tensors(3, "model")
    assert expected.keys() == found.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []

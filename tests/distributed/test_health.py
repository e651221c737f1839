"""NaN on one rank of two, skipped by all, equals a run that skips that step: the same bits under every strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import ROOT, Layout, command, fork

pytestmark = pytest.mark.distributed
WORKER = ROOT / "tests" / "distributed" / "health_worker.py"


def work(layout: Layout, folder: Path, alternatives: list[dict[str, Any]], *flags: str) -> list[dict[str, Any]]:
    words = command(layout, [str(folder / "runs"), json.dumps(alternatives), *flags], folder, WORKER)
    done = fork(layout, words, PYTHONPATH=str(ROOT))
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


ALTERNATIVES: dict[str, list[dict[str, Any]]] = {
    "ddp": [{}, {"on_device": True}, {"optimizer": "muon"}],
    "fsdp2": [{}, {"on_device": True}, {"optimizer": "muon"}],
    "zero1": [{}],
    "zero2": [{}, {"sync": "last"}],
    "zero3": [{}],
}


@pytest.mark.fault(
    "F53",
    injected="NaN in the loss or the gradient of one rank of two, skip, five strategies",
    outcome="equals a run without those steps, also after a resume",
)
@pytest.mark.parametrize("strategy", ALTERNATIVES)
def test_nan_on_one_rank_of_two_equals_a_run_without_that_step(strategy: str, tmp_path: Path) -> None:
    for options, found in zip(
        ALTERNATIVES[strategy], work(Layout(strategy, 2), tmp_path, ALTERNATIVES[strategy]), strict=True
    ):
        assert not found["without"], options
        assert not found["resumed"], options
        assert found["counts"] in ([6.0], [])  # Muon keeps none for its matrices
        assert [bad[:2] for bad in found["bad"]] == [[2, "loss"], [5, "gradient"]]
        assert found["bad"][0][2][0] == []  # all samples of rank 0 were finite
        assert 13 in found["bad"][0][2][1]
        assert all("2 steps in a row were skipped" in message for message in found["messages"])
        if "on_device" in options:
            assert found["reads"] == {}


@pytest.mark.slow  # the quick one above has the same paths in fp32
@pytest.mark.parametrize("strategy", ALTERNATIVES)
def test_the_same_in_bf16(strategy: str, tmp_path: Path) -> None:
    (found,) = work(Layout(strategy, 2), tmp_path, [{}], "bf16")
    assert not found["without"]
    assert not found["resumed"]

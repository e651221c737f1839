"""Deterministic algorithms: on for one run, and with a workspace of cuBLAS that repeats its results."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.config import UsageError
from accel_train.speed.apply import WORKSPACE, set_deterministic
from recipes import mmdit
from tests.distributed.launching import SMALL

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(WORKSPACE, "")  # restored afterwards, whatever the code does to it
    monkeypatch.delenv(WORKSPACE)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("given", [(), ("--deterministic",)], ids=["off", "on"])
def test_a_run_computes_with_them_and_leaves_the_process_as_it_was(
    given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool]] = []
    original = mmdit.loss_sums

    def looking(config: Any, model: Any, inputs: Any, mask_id: int) -> Any:
        shape = config.model.multimodal(512, 32, (1, 8), None)
        needs = shape.attention_needs(torch.device("cpu"), "fp32", 1)
        seen.append((torch.are_deterministic_algorithms_enabled(), needs.deterministic))
        return original(config, model, inputs, mask_id)

    monkeypatch.setattr(mmdit, "loss_sums", looking)
    assert mmdit.main(["demo", *SMALL, *given, "--max_steps", "1", "--output_dir", str(tmp_path / "run")]) == 0
    assert seen == [(bool(given), bool(given))]
    assert not torch.are_deterministic_algorithms_enabled()
    logged = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert ("deterministic: an operator without a deterministic kernel ends the run" in logged) == bool(given)


def test_what_the_caller_had_switched_on_stays_on() -> None:
    torch.use_deterministic_algorithms(True)
    _, switch_back = set_deterministic(torch.device("cpu"))
    switch_back()
    assert torch.are_deterministic_algorithms_enabled()


def test_cublas_gets_a_workspace_that_repeats_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    notice, _ = set_deterministic(CUDA)
    assert os.environ[WORKSPACE] == ":4096:8"
    assert notice.endswith(f"{WORKSPACE}=:4096:8")
    monkeypatch.setenv(WORKSPACE, ":16:8")
    set_deterministic(CUDA)
    assert os.environ[WORKSPACE] == ":16:8"


def test_another_workspace_is_refused_before_anything_is_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":4096:2")
    with pytest.raises(UsageError, match=r"deterministic: CUBLAS_WORKSPACE_CONFIG=:4096:2: :4096:8 or :16:8 is requir"):
        set_deterministic(CUDA)
    assert not torch.are_deterministic_algorithms_enabled()
    set_deterministic(torch.device("cpu"))  # a CPU does not read it

"""Optimizers on real processes: Muon's whole matrices, its state across layouts, and the table row by row."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accel_train.training.optimizer_choice import TABLE
from tests.distributed.launching import Layout, relative_difference
from tests.distributed.test_contract import work

pytestmark = pytest.mark.distributed

SINGLE, DDP, FSDP2 = Layout("single", 1), Layout("ddp", 2), Layout("fsdp2", 2)
CUTS = {"single": 16, "ddp": 3, "fsdp2": 2, "last": 5}
MATRICES = 6


def train(
    layout: Layout, folder: Path, cut: str, resume: Path | None = None, *, freeze: bool = True, **config: Any
) -> dict[str, Any]:
    folder.mkdir(parents=True)
    asked = {
        "freeze": freeze,
        "config": {"name": "muon"} | config,
        "micro": CUTS[cut],
        "folder": str(folder / "run"),
        "resume": str(resume) if resume else None,
    }
    return work(layout, folder, "optimizer", json.dumps(asked)) | {"folder": folder / "run"}


def middle(found: dict[str, Any]) -> Path:
    return found["folder"] / "checkpoints" / "checkpoint_00000020"


def tensors(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights, average and optimizer state after the last step."""
    path = found["folder"] / "checkpoints" / "checkpoint_00000040"
    files = [*path.glob("*.safetensors"), *path.glob("optimizer/*.safetensors")]
    return {
        f"{file.name.split('.')[0].split('-')[0]}/{name}": tensor
        for file in files
        for name, tensor in load_file(file).items()
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """40 steps of Muon in each layout, each with another cut of the batch, each also resuming the one before."""
    folder = tmp_path_factory.mktemp("muon")
    single = train(SINGLE, folder / "single", "single")
    ddp = train(DDP, folder / "ddp", "ddp", resume=middle(single))
    fsdp2 = train(FSDP2, folder / "fsdp2", "fsdp2", resume=middle(ddp))
    last = train(SINGLE, folder / "last", "last", resume=middle(fsdp2))
    return {"single": single, "ddp": ddp, "fsdp2": fsdp2, "last": last}


def worst(expected: list[float], found: list[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "last"])
def test_muon_equals_one_process_with_the_whole_batch(name: str, runs: dict[str, dict[str, Any]]) -> None:
    found, alone = runs[name], runs["single"]
    print(f"{name}: losses apart by {worst(alone['losses'], found['losses']):.1e}", end=", ")
    print(f"state by {relative_difference(tensors(alone), tensors(found)):.1e}")
    assert worst(alone["losses"], found["losses"]) < 1e-5
    assert relative_difference(tensors(alone), tensors(found)) < 1e-4
    assert found["losses"][-1] < 0.9 * found["losses"][0]


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp2"])
def test_resume_is_bit_identical_on_the_same_layout(name: str, runs: dict[str, dict[str, Any]]) -> None:
    found = runs[name]
    assert found["state"]["momentum_buffer"] == MATRICES
    assert [x.hex() for x in found["again"]] == [x.hex() for x in found["losses"][20:]]


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "last"])
def test_resume_from_another_layout(name: str, runs: dict[str, dict[str, Any]]) -> None:
    assert worst(runs["single"]["losses"][20:], runs[name]["from_elsewhere"]) < 1e-6


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp2"])
def test_frozen_matrices_stay_as_they_are(name: str, runs: dict[str, dict[str, Any]]) -> None:
    """Whole or sharded: the first block, and nothing else."""
    assert runs[name]["sharded"] is (name == "fsdp2")
    assert set(runs[name]["unmoved"]) == {"blocks.0"}


def test_each_rank_orthogonalises_its_share(runs: dict[str, dict[str, Any]]) -> None:
    total = 40 * MATRICES
    assert runs["single"]["orthogonalised"] == [total]
    for name in ("ddp", "fsdp2"):
        assert runs[name]["orthogonalised"] == [total // 2, total // 2]


def test_eight_bit_state_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """Its moments are in the checkpoint as fp32, under AdamW's names, and come back as the codes that they were."""
    found = train(DDP, tmp_path / "ddp", "ddp", name="adamw8bit")
    assert found["state"] == {"exp_avg": 22, "exp_avg_sq": 22}
    assert [x.hex() for x in found["again"]] == [x.hex() for x in found["losses"][20:]]


def test_a_class_of_the_users_own_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """Its tensors and its numbers are in the checkpoint by parameter name (NAdam: mu_product beside two moments)."""
    found = train(DDP, tmp_path / "ddp", "ddp", name="torch.optim:NAdam")
    assert found["state"] == {"exp_avg": 22, "exp_avg_sq": 22}
    index = json.loads((middle(found) / "optimizer" / "index.json").read_text())
    assert {tuple(sorted(kept)) for kept in index["numbers"]["parameters"].values()} == {("mu_product", "step")}
    assert [x.hex() for x in found["again"]] == [x.hex() for x in found["losses"][20:]]


def test_a_schedule_free_average_is_of_the_step_that_is_saved(tmp_path: Path) -> None:
    """x = y + (z - y)(1 - 1/beta), of what the checkpoint itself holds, in the second save as in the first."""
    pytest.importorskip("schedulefree")
    found = train(DDP, tmp_path / "ddp", "ddp", freeze=False, name="schedulefree:AdamWScheduleFree", weight_decay=0.1)
    assert [x.hex() for x in found["again"]] == [x.hex() for x in found["losses"][20:]]
    for path in (middle(found), middle(found).with_name("checkpoint_00000040")):
        files = {
            kind: path.glob(pattern) for kind, pattern in {"y": "model*", "x": "ema*", "z": "optimizer/z-*"}.items()
        }
        held = {
            kind: {k: v for f in found_files for k, v in load_file(f).items()} for kind, found_files in files.items()
        }
        assert held["x"].keys() == held["y"].keys() == held["z"].keys()
        for name, x in held["x"].items():
            assert torch.equal(x, held["y"][name].lerp(held["z"][name], 1 - 1 / 0.9))


@pytest.mark.slow
def test_muon_in_bf16_is_outside_the_promise(tmp_path: Path) -> None:
    """The measured reason for fp32: another cut of the same batch changes the losses, but not the training."""
    one = train(SINGLE, tmp_path / "one", "single", muon_precision="bf16")
    other = train(SINGLE, tmp_path / "other", "last", muon_precision="bf16")
    apart = worst(one["losses"], other["losses"])
    print(f"bf16: losses apart by {apart:.1e}")
    assert 1e-5 < apart < 5e-2


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", [SINGLE, DDP, FSDP2, *(Layout(f"zero{n}", 2) for n in (1, 2, 3))], ids=str)
def test_every_row_of_the_table(layout: Layout, precision: str, tmp_path: Path) -> None:
    """What is allowed trains; what is refused says why. What has no device here is refused as well: no run of it."""
    found = work(layout, tmp_path, "rows", precision)
    for name, result in found.items():
        row = TABLE[name][layout.strategy]
        if precision not in row.run:
            assert f"optimizer.name: {name}" in result
            assert not isinstance(result, list)
        else:
            assert isinstance(result, list), result
            assert all(map(math.isfinite, result))
            assert result[-1] < result[0]

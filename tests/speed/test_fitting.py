"""A model that cannot fit is refused by arithmetic, before memory is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_train.config import UsageError
from accel_train.speed.memory import fitting
from accel_train.speed.memory.fitting import GIB, Kept, Size, host_bytes, refuse_what_cannot_fit, size_of
from recipes import mmdit, pde

ONE_GIB_OF_WEIGHTS = GIB // 4
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def check(parameters: int, *, processes: int = 1, trained: float = 1, **given: Any) -> None:
    kept: dict[str, Any] = {"optimizer": "adamw", "has_ema": True}
    kept |= {name: given.pop(name) for name in Kept._fields if name in given}
    usual: dict[str, Any] = {"sharded": False, "device": CPU, "world_size": processes}
    size = Size(parameters, int(parameters * trained), 4 * parameters)
    refuse_what_cannot_fit(size, Kept(**kept), **usual | given)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of 16 GiB with devices of 4 GiB."""
    monkeypatch.setattr(fitting, "host_bytes", lambda: 16 * GIB)
    monkeypatch.setattr(fitting, "device_bytes", lambda _: 4.0 * GIB)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("weights_gib", "options", "says"),
    [
        (1.9, {}, None),
        (
            2.1,
            {},
            r"take 16\.8 GiB \(weights 2\.1 GiB, EMA, gradient, state of adamw at 16 bytes for each trained parameter; "
            r"during a save without the gradient, but with a snapshot of 16 bytes for each\), but this host with 1 ",
        ),
        (13, {"trained": 0.03}, None),
        (14, {"trained": 0.03}, r"parameters, 112,742,891 of them trained, take 16\.9 GiB \(weights 14\.0 GiB, EMA"),
        (2.6, {"has_ema": False}, None),
        (2.7, {"has_ema": False}, r"take 16\.2 GiB .* snapshot of 12 bytes"),
        (2.6, {"optimizer": "muon"}, None),
        (2.6, {"saves_state": False}, None),
        (2.7, {"saves_state": False}, r"take 16\.2 GiB .* snapshot of 8 bytes"),
        (4.1, {"saves_state": False, "has_ema": False}, r"gradient, state of adamw at 12 .*parameter\), but"),
        (3.1, {"saves_state": False, "saved_bytes": 2}, None),
        (3.3, {"saves_state": False, "saved_bytes": 2}, r"16\.5 GiB .*16 bytes for each trained parameter\), but"),
        (1.7, {"saved_bytes": 2}, None),
        (1.8, {"saved_bytes": 2}, r"snapshot of 20 bytes"),
        (7.9, {"training": False}, None),
        (8.1, {"training": False}, r"\(weights 8\.1 GiB, EMA at 4 bytes for each trained parameter\)"),
        (1.3, {"processes": 2}, None),
        (1.4, {"processes": 2}, r"take 16\.8 GiB .*this host with 2 process\(es\) has 16\.0 GiB"),
        (1.9, {"processes": 2, "sharded": True}, None),
        (
            2.1,
            {"processes": 2, "sharded": True},
            r"16\.8 GiB .*; divided by 2 processes; during a save .*, but this host",
        ),
        (8.1, {"processes": 2, "sharded": True}, r"take 16\.2 GiB as weights, which each of 2 .* start fewer"),
        (0.7, {"device": GPU}, None),
        (0.9, {"device": GPU}, r"take 4\.5 GiB .*cuda:0 has 4\.0 GiB.*fsdp2\.yaml"),
        (0.9, {"device": GPU, "optimizer": "adamw_offload"}, None),
        (3.9, {"device": GPU, "sharded": True}, None),
        (4.1, {"device": GPU, "sharded": True}, r"cuda:0 and host memory has 20\.0 GiB"),
        (4.7, {"device": GPU, "sharded": True, "processes": 2}, None),
        (4.9, {"device": GPU, "sharded": True, "processes": 2}, r"cuda:0 and host memory has 12\.0 GiB"),
    ],
)
def test_what_fits_by_hand(
    weights_gib: float, options: dict[str, Any], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(options.get("processes", 1)))
    if says is None:
        check(int(weights_gib * ONE_GIB_OF_WEIGHTS), **options)
    else:
        with pytest.raises(UsageError, match=says):
            check(int(weights_gib * ONE_GIB_OF_WEIGHTS), **options)


def test_counting_takes_no_memory_and_no_randomness() -> None:
    before = torch.get_rng_state()
    parameters = (1 << 40) + (1 << 20)
    assert size_of(lambda: nn.Linear(1 << 20, 1 << 20)) == (parameters, parameters, 4 * parameters, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_frozen_weights_are_counted_by_their_bytes_and_not_as_trained() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 4, bias=False).requires_grad_(False).bfloat16(), nn.Linear(4, 2))

    assert size_of(build) == (42, 10, 2 * 32 + 4 * 10, 0)
    assert size_of(build).frozen_bytes == 2 * 32


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    whole = host_bytes([])
    (tmp_path / "limit").write_text("1048576\n")
    (tmp_path / "none").write_text("max\n")
    assert host_bytes([str(tmp_path / "limit"), str(tmp_path / "none")]) == 1 << 20
    assert host_bytes([str(tmp_path / "none"), str(tmp_path / "absent")]) == whole


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        (
            mmdit,
            "demo --data.path {}/texts.jsonl --data.vocab_size 300 --global_batch_size 8 --data.latent_dim 4",
        ),
        (pde, "pde_demo --data.train_samples 16 --data.heldout_samples 4 --data.workers 0 --model.decoder_width 65536"),
    ],
)
def test_a_recipe_refuses_a_width_that_no_machine_has(
    recipe: Any, flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "cache"))
    lines = (json.dumps({"text": f"the {i * 7} old king rode {i} north"}) + "\n" for i in range(60))
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    given = [*flags.replace("{}", str(tmp_path)).split(), "--model.width", "65536"]
    with pytest.raises(UsageError, match=r"--model\.width 65536.*: [\d,]+ parameters take [\d,.]+ GiB .*smaller"):
        recipe.main([*given, "--output_dir", str(tmp_path / "run")])

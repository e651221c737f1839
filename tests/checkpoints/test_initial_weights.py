"""Weights before `prepare`: of a checkpoint whose frozen parameters are elsewhere, and its buffers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_train.checkpoints.restore import load_initial_weights
from accel_train.checkpoints.run import Run
from accel_train.config import UsageError
from accel_train.store import atomic_files, commit
from accel_train.store.manifest import Checkpoint


class Model(nn.Module):
    """A trained layer on a frozen one, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.trained = nn.Linear(3, 2)
        self.register_buffer("scale", torch.rand(3))


def base(weights: str = "a" * 64, config: str | None = "c" * 64) -> dict[str, Any]:
    definition = {} if config is None else {"config.json": config}
    files = {"model.safetensors": {"size": 8, "sha256": weights}}
    return {"source": "/base", "files": files, "definition": definition}


def saved(directory: Path, model: nn.Module, left_out: str = "frozen.", **facts: Any) -> Checkpoint:
    """Commit a checkpoint without the tensors whose names begin with ``left_out``."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(left_out)}
    temporary = directory / commit.temporary_name(2, atomic_files.new_nonce())
    temporary.mkdir(parents=True)
    save_file(tensors, temporary / "model.safetensors")
    files = {"model.safetensors": commit.seal_file(temporary / "model.safetensors")}
    final = directory / commit.checkpoint_name(2)
    commit.commit(temporary, final, {"step": 2, "files": files, **facts})
    return commit.verify(final)


def load(directory: Path, current: Mapping[str, Any] | None, *, resume: Checkpoint | None = None, **run: Any) -> Model:
    model = Model()
    load_initial_weights(model, Run(directory / "run", "r", resume, "", {}, **run), current)
    return model


@pytest.mark.parametrize(
    ("current", "says"),
    [
        (base(), None),
        (None, "was built without a base"),
        (base(weights="b" * 64), r"another model\.safetensors"),
        (base(config="d" * 64), r"another config\.json"),
    ],
)
def test_a_resume_takes_the_very_base_of_its_checkpoint(
    tmp_path: Path, current: Mapping[str, Any] | None, says: str | None
) -> None:
    model = Model()
    checkpoint = saved(tmp_path, model, base=base())
    if says is None:
        assert torch.equal(load(tmp_path, current, resume=checkpoint).trained.weight, model.trained.weight)
        return
    with pytest.raises(UsageError, match=says):
        load(tmp_path, current, resume=checkpoint)


def test_embedded_weights_need_no_base_but_its_definition(tmp_path: Path) -> None:
    """The weights are in the checkpoint. Another config would use them in another way."""
    model = Model()
    embedded = {"source": "/base", "definition": base()["definition"]}
    checkpoint = saved(tmp_path, model, left_out="-", embedded_base=embedded)
    for current in (None, base(), base(weights="b" * 64)):
        assert torch.equal(load(tmp_path, current, resume=checkpoint).frozen.weight, model.frozen.weight)
    with pytest.raises(UsageError, match=r"another config\.json"):
        load(tmp_path, base(config="d" * 64), resume=checkpoint)


def test_a_new_run_begins_from_trained_weights_on_the_same_frozen_ones(tmp_path: Path) -> None:
    model = Model()
    checkpoint = saved(tmp_path, model, base=base())
    for current in (base(), base(config="d" * 64)):  # it may use them in another way
        found = load(tmp_path, current, initial_weights=checkpoint.path)
        assert torch.equal(found.trained.weight, model.trained.weight)
    for current, says in ((None, "without a base"), (base(weights="b" * 64), r"another model\.safetensors")):
        with pytest.raises(UsageError, match=says):
            load(tmp_path, current, initial_weights=checkpoint.path)


def test_frozen_weights_are_required_where_the_checkpoint_names_no_base(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, Model())
    with pytest.raises(UsageError, match=r"frozen\.weight"):
        load(tmp_path, base(), resume=checkpoint)


def test_a_resume_requires_buffers_and_a_new_run_does_not(tmp_path: Path) -> None:
    model = Model()
    checkpoint = saved(tmp_path, model, left_out="scale")
    with pytest.raises(UsageError, match="scale"):
        load(tmp_path, None, resume=checkpoint)
    assert torch.equal(load(tmp_path, None, initial_weights=checkpoint.path).trained.weight, model.trained.weight)

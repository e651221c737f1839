import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from accel_train.config import UsageError
from accel_train.domains.pde.data import facts as facts_module
from accel_train.domains.pde.data.assets import load_field_assets
from accel_train.domains.pde.data.equations import PdeDataConfig
from accel_train.domains.pde.data.files import FieldHeader, StoredFields, read_stored, write_fields
from accel_train.domains.pde.data.prepare import prepare_pde
from accel_train.domains.pde.data.rows import FieldData, build_field_data

MOVING = FieldHeader("moving", ("a", "b"), 2, 0.5, "periodic", True)
STILL = FieldHeader("still", ("c",), 1, 0.0, "dirichlet", False)
GENERATOR = np.random.default_rng(0)


def stored(file: Path, header: FieldHeader, samples: int, shape: tuple[int, ...] = (4, 2, 1, 8)) -> StoredFields:
    values = GENERATOR.normal(3.0, 2.0, size=(samples, *shape))
    write_fields(file, header, samples, [(values, GENERATOR.normal(5.0, 0.1, (samples, len(header.parameters))))])
    return opened(file)


def opened(file: Path) -> StoredFields:
    with h5py.File(file) as content:
        return read_stored(file, content)


def two_tasks(folder: Path) -> dict[str, dict[str, list[StoredFields]]]:
    still = (1, 3, 4, 4)
    return {
        "moving": {
            "train": [stored(folder / "a.h5", MOVING, 6), stored(folder / "b.h5", MOVING, 5)],
            "heldout": [stored(folder / "c.h5", MOVING, 3)],
        },
        "still": {
            "train": [stored(folder / "d.h5", STILL, 9, still)], "heldout": [stored(folder / "e.h5", STILL, 2, still)],
        },
    }  # fmt: skip


def build(files: Any, cache: Path, time_stride: int = 1) -> FieldData:
    return build_field_data(files, time_stride, cache, rank=0, barrier=lambda: None)


def test_rows_of_all_tasks_one_after_another(tmp_path: Path) -> None:
    data = build(two_tasks(tmp_path), tmp_path)
    assert (len(data.train), data.train.sizes) == (33 + 9, (33, 9))
    for i in range(42):
        alone = data.training["moving"][i] if i < 33 else data.training["still"][i - 33]
        row = data.train[i]
        assert all(torch.equal(row[name], alone[name]) for name in row)
    batch = data.train.batch([33, 41, 35])
    assert all(torch.equal(values[1], data.train[41][name]) for name, values in batch.items())
    assert batch["target"].shape == (3, 2, 4, 4)
    assert batch["parameters"].shape == (3, 2)  # as many as any task has
    assert batch["parameters"][:, 1].tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="use TaskSampler"):
        data.train.batch([32, 33])
    for index in (-1, 42):
        with pytest.raises(IndexError):
            data.train[index]
    with pytest.raises(IndexError):
        data.heldout["still"][2]


def test_constants_are_those_of_the_samples_chosen_of_a_file(tmp_path: Path) -> None:
    """With one cache, and files that did not change."""
    files = two_tasks(tmp_path)
    whole = build(files, tmp_path / "cache")
    one = files["still"]["train"][0]
    files["still"]["train"] = [one._replace(part=one.part._replace(samples=4), parameters=one.parameters[:4])]
    part = build(files, tmp_path / "cache")
    assert part.assets != whole.assets
    assert part.assets == build(files, tmp_path / "another").assets


def test_constants_come_from_the_training_split(tmp_path: Path) -> None:
    files = two_tasks(tmp_path)
    first = build(files, tmp_path)
    with h5py.File(tmp_path / "e.h5", "a") as content:
        content["fields"][...] = 100.0
    files["still"]["heldout"] = [opened(tmp_path / "e.h5")]
    second = build(files, tmp_path)
    assert second.assets == first.assets
    assert second.fingerprint != first.fingerprint
    with h5py.File(tmp_path / "d.h5") as content:
        values: NDArray[np.float64] = content["fields"][...].astype(float)
    task = first.assets.task("still")
    assert task.input.mean == pytest.approx(values[:, :, :1].mean((0, 1, 3, 4)))
    assert task.target.std == pytest.approx(values[:, :, 1:].std((0, 1, 3, 4)))
    parameters = first.training["still"].parameters[:, 0]
    assert float(parameters.mean()) == pytest.approx(0, abs=1e-3)
    assert float(parameters.std(correction=0)) == pytest.approx(1, abs=1e-3)


def test_assets_go_through_a_folder(tmp_path: Path) -> None:
    assets = build(two_tasks(tmp_path), tmp_path).assets
    assets.save(tmp_path / "assets")
    again = load_field_assets(tmp_path / "assets")
    assert again == assets
    values = torch.randn(5, 2, 4, 4)
    for task, one in (("still", values), ("moving", values)):
        assert torch.allclose(
            again.task(task).target.denormalise(again.task(task).target.normalise(one)), one, atol=1e-5
        )
    one = values[:, :1]
    assert torch.allclose(
        again.task("still").input.denormalise(again.task("still").input.normalise(one)), one, atol=1e-5
    )
    mean, std = assets.task("still").target.mean, assets.task("still").target.std
    assert again.task("still").target.denormalise(torch.ones(2, 1, 1)).flatten().tolist() == pytest.approx(
        [m + s for m, s in zip(mean, std, strict=True)]
    )
    assert again.normalise_parameters("still", torch.tensor([[assets.task("still").parameter.mean[0]]])).tolist() == [
        [0, 0]
    ]


@pytest.mark.parametrize(
    "content", ["{", '{"format": 9}', '{"format": 1}', '{"format": 1, "tasks": [{"name": 1}]}', None]
)
def test_assets_that_cannot_be_used(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "fields.json").write_text(content)
    with pytest.raises(UsageError, match=r"no usable data assets.*folder `assets` of a checkpoint"):
        load_field_assets(tmp_path)


def test_the_fingerprint_is_of_contents_and_preprocessing(tmp_path: Path) -> None:
    files = two_tasks(tmp_path)
    first = build(files, tmp_path)
    assert build(files, tmp_path / "other cache").fingerprint == first.fingerprint
    assert build(files, tmp_path, time_stride=2).fingerprint != first.fingerprint
    assert build({"still": files["still"], "moving": files["moving"]}, tmp_path).fingerprint != first.fingerprint
    [moved] = files["moving"]["heldout"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c.h5").write_bytes(moved.part.file.read_bytes())
    files["moving"]["heldout"] = [opened(tmp_path / "elsewhere" / "c.h5")]
    assert build(files, tmp_path).fingerprint == first.fingerprint
    files["moving"]["heldout"] = [moved._replace(parameters=moved.parameters + np.float32(1e-3))]
    assert build(files, tmp_path).fingerprint != first.fingerprint


def test_contents_are_read_once_for_as_long_as_they_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    real = facts_module.field_facts
    monkeypatch.setattr(facts_module, "field_facts", lambda fields: reads.append(len(fields)) or real(fields))
    files = two_tasks(tmp_path)
    first = build(files, tmp_path)
    assert build(files, tmp_path).fingerprint == first.fingerprint
    assert reads == [11, 3, 9, 2]
    with h5py.File(tmp_path / "d.h5", "a") as content:
        content["fields"][0] += 1
    assert build(files, tmp_path).fingerprint != first.fingerprint
    assert reads[4:] == [9, 2]


def test_files_of_one_task_must_agree(tmp_path: Path) -> None:
    files = two_tasks(tmp_path)
    train = files["moving"]["train"]
    faster = train[1]._replace(header=replace(MOVING, dt=0.25))
    with pytest.raises(UsageError, match=r"b\.h5 has dt 0\.25 instead of 0\.5 in .*a\.h5\. Files"):
        build({"moving": {**files["moving"], "train": [train[0], faster]}}, tmp_path)
    finer = stored(tmp_path / "finer.h5", MOVING, 3, (4, 2, 1, 16))
    with pytest.raises(
        UsageError, match=r"finer\.h5 has shape \(C, H, W\) \(2, 1, 16\) instead of \(2, 1, 8\) in .*a\.h5"
    ):
        build({"moving": {"train": train, "heldout": [finer]}}, tmp_path)
    longer = stored(tmp_path / "longer.h5", MOVING, 3, (9, 2, 1, 8))
    data = build({"moving": {"train": train, "heldout": [longer]}}, tmp_path)
    assert data.heldout["moving"].trajectory(0).fields.shape == (9, 2, 1, 8)


@pytest.mark.parametrize(("constant", "samples", "points"), [(1.0, 2, 4), (1 / 3, 3, 5), (0.1, 11, 7)])
def test_a_channel_that_never_changes_is_refused(constant: float, samples: int, points: int, tmp_path: Path) -> None:
    """Also where the mean of its squares differs from the square of its mean by rounding."""
    fields = np.full((samples, 1, 2, points, points), constant)
    fields[:, :, 1] = GENERATOR.normal(size=(samples, 1, points, points))
    write_fields(tmp_path / "x.h5", STILL, samples, [(fields, np.ones((samples, 1)))])
    one = [opened(tmp_path / "x.h5")]
    with pytest.raises(UsageError, match=r"channel 0 of .*x.h5 is the same number everywhere"):
        build({"still": {"train": one, "heldout": one}}, tmp_path)


def test_held_out_targets_of_zeros_are_refused(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(2, 1, 2, 4, 4))
    for name, factor in {"train": 1, "heldout": 0}.items():
        # The second channel is the target.
        fields = values * np.array([1, factor])[:, None, None]
        write_fields(tmp_path / f"{name}.h5", STILL, 2, [(fields, np.ones((2, 1)))])
    splits = {name: [opened(tmp_path / f"{name}.h5")] for name in ("train", "heldout")}
    with pytest.raises(UsageError, match=r"held-out fields of .*heldout\.h5 are 0 everywhere, and nRMSE"):
        build({"still": splits}, tmp_path)


def test_a_task_with_time_and_a_single_snapshot_is_refused(tmp_path: Path) -> None:
    files = {split: [stored(tmp_path / f"{split}.h5", MOVING, 3, (1, 2, 1, 8))] for split in ("train", "heldout")}
    with pytest.raises(UsageError, match=r"train\.h5 has 1 snapshot of task moving .*dt 0\.5; 2 or more .*or dt 0 for"):
        build({"moving": files}, tmp_path)
    files = {split: [stored(tmp_path / f"{split}.h5", MOVING, 3, (3, 2, 1, 8))] for split in ("train", "heldout")}
    with pytest.raises(UsageError, match=r"time_stride 3: .* has 3 snapshots .*Lower it to 2 or less"):
        build({"moving": files}, tmp_path, 3)


def test_held_out_samples_that_are_trained_on_are_told(tmp_path: Path) -> None:
    files = two_tasks(tmp_path)
    values = np.random.default_rng(1).normal(size=(3, 4, 2, 1, 8)).astype(np.float32)
    with h5py.File(tmp_path / "b.h5", "a") as content:
        content["fields"][2:4] = values[1:]
    write_fields(tmp_path / "c.h5", MOVING, 3, [(values, np.ones((3, 2)))])
    files["moving"]["heldout"] = [opened(tmp_path / "c.h5")]
    files["still"]["heldout"] = files["still"]["train"]
    for _ in range(2):  # the second time from the cache
        found = [notice for notice in build(files, tmp_path).notices if "training samples too" in notice]
        assert [notice.split(" are ")[0] for notice in found] == [
            "moving: 2 of 3 held-out samples", "still: 9 of 9 held-out samples"
        ]  # fmt: skip


@pytest.mark.parametrize("header", [MOVING, STILL])
def test_channels_that_share_one_error_in_different_units_are_told(header: FieldHeader, tmp_path: Path) -> None:
    units = np.array([1e-3, 1, 100])[:, None, None]
    values = np.random.default_rng(0).normal(size=(5, 3 if header.dt else 1, 3, 1, 8)) * units
    header = header if not header.dt else replace(header, input_channels=3)
    write_fields(tmp_path / "x.h5", header, 5, [(values, np.ones((5, len(header.parameters))))])
    one = [opened(tmp_path / "x.h5")]
    found = build({header.task: {"train": one, "heldout": one}}, tmp_path).notices
    (told,) = [notice for notice in found if "nRMSE covers all channels together" in notice]
    # The first channel of a steady equation is its input.
    assert re.search(rf": channel 2 varies \S+ times as much as channel {0 if header.dt else 1},", told)
    assert not [notice for notice in build(two_tasks(tmp_path), tmp_path).notices if "nRMSE covers" in notice]


def test_a_header_that_the_fields_contradict_is_told(tmp_path: Path) -> None:
    """Fields that decay do not keep their integral, and periodic ones are not 0 at the edge."""
    x = (np.arange(32) + 0.5) / 32
    kept = 1 + np.cos(2 * np.pi * (x - np.linspace(0, 1, 5)[:, None]))  # (T, W)
    ends = np.sin(np.pi * x)[None].repeat(5, 0)
    decay = np.exp(-np.arange(5.0))[:, None]

    def told(fields: Any, boundary: str, conserved: bool) -> list[str]:
        header = FieldHeader("moving", ("a", "b"), 1, 0.5, boundary, conserved)
        fields = np.stack([fields, 2 * fields])[:, :, None, None]
        write_fields(tmp_path / "x.h5", header, 2, [(fields, np.ones((2, 2)))])
        one = [opened(tmp_path / "x.h5")]
        found = build({"moving": {"train": one, "heldout": one}}, tmp_path).notices
        return [notice for notice in found if "conserved is true" in notice or "boundary is dirichlet" in notice]

    assert told(kept, "periodic", True) == []
    assert told(ends, "dirichlet", True) == []
    assert told(kept * decay, "periodic", False) == []
    (drift,) = told(kept * decay, "periodic", True)
    # (1 - exp(-4)) over the mean of exp(-n).
    assert "the integral of channel 0 of the training fields changes in time by 3.12 of their mean size" in drift
    # The attributes of a file of PDEBench say nothing of it.
    assert "Leave both out, or set conserved to False" in drift
    (edge,) = told(kept, "dirichlet", True)
    # The mean square of 1 + cos is 1.5.
    at_the_end = np.sqrt((kept[:, [0, -1]] ** 2).mean() / 1.5)
    assert f"root mean square of channel 0 of the training fields there is {at_the_end:.3g} of that of all" in edge
    assert "Leave it out, or write the boundary that they have" in edge


def test_the_edge_of_a_steady_field_is_that_of_its_target(tmp_path: Path) -> None:
    wave = np.sin(np.pi * (np.arange(16) + 0.5) / 16)
    values = (
        np.stack([np.ones((16, 16)), wave[:, None] * wave])[None, None] * np.arange(1, 4)[:, None, None, None, None]
    )
    write_fields(tmp_path / "x.h5", STILL, 3, [(values, np.ones((3, 1)))])
    one = [opened(tmp_path / "x.h5")]
    found = build({"still": {"train": one, "heldout": one}}, tmp_path).notices
    assert not [notice for notice in found if "boundary is dirichlet" in notice]


@pytest.mark.parametrize("points", [4, 6])
def test_generated_fields_are_what_their_header_says_on_coarse_grids_too(tmp_path: Path, points: int) -> None:
    # Centres of cells lie half a cell from the edge.
    config = PdeDataConfig(
        tasks=("darcy",), resolution_2d=points, train_samples=8, heldout_samples=2, cache_dir=str(tmp_path), workers=0
    )
    assert not [notice for notice in prepare_pde(config).notices if "boundary is dirichlet" in notice]


@pytest.mark.parametrize(("stride", "told"), [(1, 1), (8, 0)])
def test_points_left_out_near_the_edge_do_not_contradict_the_header(tmp_path: Path, stride: int, told: int) -> None:
    x = (np.arange(64) + 0.5) / 64
    # Of every 8th point the last is 7.5 cells from the edge. Those same values at all points of a file do contradict.
    values = np.random.default_rng(0).normal(size=(4, 3, 3)) @ np.sin(np.pi * np.arange(1, 4)[:, None] * x)
    if stride == 1:
        values = values[..., ::8]
    for split in ("train", "heldout"):
        write_fields(
            tmp_path / f"moving_{split}.h5",
            replace(MOVING, input_channels=1, boundary="dirichlet"),
            4,
            [(values[:, :, None, None], np.random.default_rng(1).normal(5.0, 0.1, (4, 2)))],
        )
    config = PdeDataConfig(
        path=str(tmp_path), tasks=("moving",), time_stride=1, resolution_1d=8, cache_dir=str(tmp_path / "cache")
    )
    assert len([notice for notice in prepare_pde(config).notices if "boundary is dirichlet" in notice]) == told


def test_a_field_that_varies_little_about_its_mean_is_told(tmp_path: Path) -> None:
    values = 101325 + 0.03 * np.random.default_rng(0).normal(size=(5, 3, 2, 1, 8))
    values[:, :, 1] -= 101325
    write_fields(tmp_path / "x.h5", MOVING, 5, [(values, np.ones((5, 2)))])
    one = [opened(tmp_path / "x.h5")]
    found = build({"moving": {"train": one, "heldout": one}}, tmp_path).notices
    (told,) = [notice for notice in found if "nRMSE, the error over the size" in notice]
    assert re.search(
        r"moving: channel 0 varies by 0\.0\d+ about 1\.013e\+05, and float32 rounds it by 0\.2 of that", told
    )


def test_assets_are_plain_json(tmp_path: Path) -> None:
    build(two_tasks(tmp_path), tmp_path).assets.save(tmp_path)
    facts = json.loads((tmp_path / "fields.json").read_text())
    assert facts["tasks"][0]["grid"] == [1, 8]

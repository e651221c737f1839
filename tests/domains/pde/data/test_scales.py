"""A start from trained weights reads its data with their normalisation, and each task finds its modules there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from accel_train.checkpoints.run import WeightsAssets
from accel_train.commands.bundled import find_recipe, import_recipe
from accel_train.config import UsageError
from accel_train.domains.pde import transfer
from accel_train.domains.pde.data.assets import FieldTask, load_field_assets
from accel_train.domains.pde.data.equations import PdeDataConfig
from accel_train.domains.pde.data.files import FieldHeader, write_fields
from accel_train.domains.pde.data.prepare import prepare_pde
from accel_train.domains.pde.data.rows import FieldData
from accel_train.domains.pde.data.scales import Origins

HEADER = FieldHeader("heat", ("a",), 1, 0.5, "periodic", False)


def write(folder: Path, name: str, scale: float = 1.0, points: int = 8, **changed: Any) -> None:
    """Write 6 training samples, with fields and parameters of this size, and 3 held-out ones of size 1."""
    folder.mkdir(exist_ok=True)
    header = replace(HEADER, task=name, **changed)
    draws = np.random.default_rng(len(name))
    for split, samples, size in (("train", 6, scale), ("heldout", 3, 1.0)):
        fields = draws.normal(size, 2.0 * size, (samples, 3, 1, 1, points))
        write_fields(
            folder / f"{name}_{split}.h5", header, samples, [(fields, size * draws.uniform(1, 2, (samples, 1)))]
        )


def prepare(folder: Path, *tasks: str, weights: WeightsAssets | None = None, **options: Any) -> FieldData:
    cache = str(folder.parent / "cache")
    return prepare_pde(
        PdeDataConfig(path=str(folder), tasks=tasks, time_stride=1, cache_dir=cache, **options), weights=weights
    )


@pytest.fixture
def trained(tmp_path: Path) -> FieldData:
    """Tasks heat and wave, whose assets lie in old/assets."""
    for name in ("heat", "wave"):
        write(tmp_path / "data", name)
    data = prepare(tmp_path / "data", "heat", "wave")
    data.assets.save(tmp_path / "old" / "assets")
    return data


def scales(task: FieldTask) -> list[Any]:
    return [task.input, task.target, task.parameter, task.logarithmic]


@pytest.mark.parametrize("resumes", [True, False])
def test_scales_are_those_of_the_weights(tmp_path: Path, trained: FieldData, resumes: bool) -> None:
    weights = WeightsAssets(tmp_path / "old" / "assets", resumes)
    # Unchanged data keep their fingerprint.
    again = prepare(tmp_path / "data", "heat", "wave", weights=weights)
    assert (again.fingerprint, again.notices) == (trained.fingerprint, trained.notices)
    write(tmp_path / "data", "heat", 3.0)
    changed = prepare(tmp_path / "data", "heat", "wave", weights=weights)
    assert changed.fingerprint != trained.fingerprint
    assert changed.tasks == trained.tasks
    first, second = (data.heldout["heat"][2] for data in (trained, changed))
    assert all((first[name] == second[name]).all() for name in first)
    [notice] = set(changed.notices) - set(trained.notices)
    own = prepare(tmp_path / "data", "heat", "wave").assets.task("heat")
    assert scales(own) != scales(trained.tasks[0])
    assert notice.startswith(f"heat: normalised as the weights of {tmp_path / 'old'} were trained, and not by these")
    for scale in (trained.tasks[0].input, own.input, trained.tasks[0].parameter, own.parameter):
        assert f"mean {scale.mean[0]:.4g}, std {scale.std[0]:.4g}" in notice
    # What the next checkpoint holds leads to the same fingerprint.
    changed.assets.save(tmp_path / "new" / "assets")
    resumed = prepare(tmp_path / "data", "heat", "wave", weights=WeightsAssets(tmp_path / "new" / "assets", True))
    assert resumed.fingerprint == changed.fingerprint


def test_logarithms_are_those_of_the_weights(tmp_path: Path, trained: FieldData) -> None:
    saved = [replace(task, logarithmic=(True,)) for task in trained.tasks]
    replace(trained.assets, tasks=tuple(saved)).save(tmp_path / "log" / "assets")
    data = prepare(tmp_path / "data", "heat", "wave", weights=WeightsAssets(tmp_path / "log" / "assets", True))
    assert data.tasks == tuple(saved)
    assert any("read as logarithms: a (here none)" in line for line in data.notices)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"points": 16}, r"grid of task heat is \(1, 16\), but \(1, 8\) in the checkpoint .*old\. .*whatever --allow"),
        ({"dt": 0.25}, r"dt of task heat is 0\.25, but 0\.5 in"),
        ({"parameters": ("b",)}, r"parameters of task heat is \('b',\), but \('a',\) in"),
        ({"boundary": "wall"}, "boundary of task heat is wall, but periodic in"),
    ],
)
def test_a_resume_needs_data_of_the_same_kind(
    tmp_path: Path, trained: FieldData, changed: dict[str, Any], message: str
) -> None:
    weights = WeightsAssets(tmp_path / "old" / "assets", resumes=True)
    write(tmp_path / "data", "heat", **changed)
    with pytest.raises(UsageError, match=message):
        prepare(tmp_path / "data", "heat", "wave", weights=weights)
    write(tmp_path / "data", "heat", dt=0.5 + 1e-8)
    assert prepare(tmp_path / "data", "heat", "wave", weights=weights).assets.task("heat").dt == 0.5 + 1e-8


@pytest.mark.parametrize("tasks", [("wave", "heat"), ("heat",), ("heat", "wave", "cold"), ("heat", "cold")])
def test_a_resume_needs_the_same_tasks(tmp_path: Path, trained: FieldData, tasks: Sequence[str]) -> None:
    weights = WeightsAssets(tmp_path / "old" / "assets", resumes=True)
    # Before a file is read: there are none of the task cold.
    with pytest.raises(UsageError, match=rf"--data\.tasks {' '.join(tasks)}: .* give --data\.tasks heat wave, or"):
        prepare(tmp_path / "data", *tasks, weights=weights)


def test_tasks_of_a_new_run_start_from_those_of_their_name(tmp_path: Path, trained: FieldData) -> None:
    weights = WeightsAssets(tmp_path / "old" / "assets", resumes=False)
    assert prepare(tmp_path / "data", "wave", "heat", weights=weights).origins == Origins((1, 0), same_tasks=False)
    assert prepare(tmp_path / "data", "heat", "wave", weights=weights).origins == Origins((0, 1), same_tasks=True)
    data = prepare(tmp_path / "data", "wave", weights=weights)
    assert (data.origins, data.tasks) == (Origins((1,), same_tasks=False), trained.tasks[1:])
    write(tmp_path / "data", "cold", 7.0)
    # The one of its name is not free for another.
    data = prepare(tmp_path / "data", "cold", "heat", weights=weights)
    assert data.origins == Origins((1, 0), same_tasks=False)
    assert data.tasks[0] == prepare(tmp_path / "data", "cold").tasks[0]
    assert data.notices[-1] == (
        f"cold: starts from the modules of wave in {tmp_path / 'old'}, with a normalisation of its own; --init_tasks "
        "chooses another task of heat wave, or new modules"
    )
    data = prepare(tmp_path / "data", "heat", "cold", "wave", weights=weights)
    assert data.origins == Origins((0, None, 1), same_tasks=False)
    assert data.notices[-1] == (
        f"cold: starts with newly initialised modules of its own and with the shared blocks of {tmp_path / 'old'}, "
        "which was trained on heat wave"
    )


def test_init_tasks_chooses_the_modules(tmp_path: Path, trained: FieldData) -> None:
    weights = WeightsAssets(tmp_path / "old" / "assets", resumes=False)
    write(tmp_path / "data", "cold", 7.0)

    def start(*init_tasks: str, weights: WeightsAssets | None = weights) -> FieldData:
        config = PdeDataConfig(path=str(tmp_path / "data"), tasks=("heat", "cold"), time_stride=1)
        return prepare_pde(config, weights=weights, init_tasks=init_tasks)

    assert start("heat", "heat").origins == Origins((0, 0), same_tasks=False)
    own = prepare(tmp_path / "data", "heat", "cold")
    new = start("new", "wave")
    # A task with new modules has no reason to keep the scales of the old ones.
    assert (new.origins, new.tasks) == (Origins((None, 1), same_tasks=False), own.tasks)
    for wrong in (("heat",), ("heat", "cold")):
        with pytest.raises(UsageError, match=rf"--init_tasks {' '.join(wrong)}: .*one of heat wave, .* Give 2 of"):
            start(*wrong)
    with pytest.raises(UsageError, match=r"--init_tasks heat new: .* Give --init_from with a run"):
        start("heat", "new", weights=None)
    write(tmp_path / "data", "cold", boundary="dirichlet")
    with pytest.raises(UsageError, match=r"task cold would start from the modules of wave .* or --init_tasks with"):
        start("heat", "wave")
    assert start("heat", "new").origins == Origins((0, None), same_tasks=False)


def test_a_resume_takes_no_other_modules(tmp_path: Path, trained: FieldData) -> None:
    """Also with --allow, which the data do not see. To leave the option out is a change that --allow may accept."""
    weights = WeightsAssets(tmp_path / "old" / "assets", resumes=True)

    def start(init_tasks: tuple[str, ...] | None) -> FieldData:
        config = PdeDataConfig(path=str(tmp_path / "data"), tasks=("heat", "wave"), time_stride=1)
        return prepare_pde(config, weights=weights, init_tasks=init_tasks)

    with pytest.raises(
        UsageError, match=r"^--init_tasks heat new: has no effect on a resume .*old; leave --init_tasks out to"
    ):
        start(("heat", "new"))
    began = {"experiment": {"init_tasks": ["heat", "new"]}}
    (tmp_path / "old" / "manifest.json").write_text(json.dumps(began))
    for same in (("heat", "new"), None):
        assert start(same).origins == Origins((0, 1), same_tasks=True)
    with pytest.raises(
        UsageError, match=r"^--init_tasks new wave: .*; give --init_tasks heat new, as the run began, to"
    ):
        start(("new", "wave"))


def test_a_new_run_may_have_another_grid_or_other_parameters(tmp_path: Path, trained: FieldData) -> None:
    weights = WeightsAssets(tmp_path / "old" / "assets", resumes=False)
    write(tmp_path / "data", "heat", 3.0, 16)
    data = prepare(tmp_path / "data", "heat", "wave", weights=weights)
    assert data.tasks == (replace(trained.tasks[0], grid=(1, 16)), trained.tasks[1])
    assert any("grid of task heat is (1, 16), but (1, 8) in" in line for line in data.notices)
    write(tmp_path / "data", "heat", 3.0, parameters=("b",))
    data = prepare(tmp_path / "data", "heat", "wave", weights=weights)
    assert data.tasks == prepare(tmp_path / "data", "heat", "wave").tasks
    assert data.notices[-1].endswith("normalised by its own training files")


def test_a_new_run_with_a_task_of_other_shapes_is_told_what_differs(tmp_path: Path, trained: FieldData) -> None:
    weights = WeightsAssets(tmp_path / "old" / "assets", resumes=False)
    write(tmp_path / "data", "wave", boundary="dirichlet", dt=0.25, points=16)
    with pytest.raises(UsageError) as error:
        prepare(tmp_path / "data", "heat", "wave", weights=weights)
    assert str(error.value).startswith(
        f"--init_from: task wave would start from the modules of wave in {tmp_path / 'old'}, which have other shapes: "
        "boundary not periodic here and periodic there. "
    )


# --------------------------------------------------------------------------------------------------------------- files
def test_the_split_without_a_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "data", "heat")
    (tmp_path / "data" / "heat_heldout.h5").unlink()
    with pytest.raises(UsageError, match=r"data has no heat_heldout\.h5\. .* both required"):
        prepare(tmp_path / "data", "heat")


def test_a_file_in_place_of_its_folder_is_told(tmp_path: Path) -> None:
    write(tmp_path / "data", "heat")
    folder = tmp_path / "data"
    with pytest.raises(UsageError, match=rf"heat_train\.h5 is a file\. .*give --data\.path {folder}\.$"):
        prepare(folder / "heat_train.h5", "heat")


def test_files_may_end_on_hdf5(tmp_path: Path, trained: FieldData) -> None:
    for file in (tmp_path / "data").iterdir():
        file.rename(file.with_suffix(".hdf5"))
    assert prepare(tmp_path / "data", "heat", "wave").fingerprint == trained.fingerprint


# -------------------------------------------------------------------------------------------------------------- recipe
WORDS = (
    "pde_demo --data.tasks heat --data.time_stride 1 --task_weights None --model.width 32 --model.heads 2 "
    "--model.depth 1 --model.decoder_width 32 --model.patch_1d 2 --objective.autoencode_steps 1 --global_batch_size 4 "
    "--micro_batch_size 4 --evaluation.every 0 --schedule.kind constant --schedule.warmup_steps 0"
)


@pytest.mark.usefixtures("fresh")
def test_no_option_gives_trained_weights_other_scales(tmp_path: Path) -> None:
    recipe: Any = import_recipe(find_recipe("pde"))
    write(tmp_path / "data", "heat")
    write(tmp_path / "other", "heat", 3.0)
    shutil.copy(tmp_path / "data" / "heat_heldout.h5", tmp_path / "other")

    def start(run: str, data: str, steps: int, *more: str) -> float:
        places = ["--output_dir", str(tmp_path / run), "--data.path", str(tmp_path / data)]
        words = [*WORDS.split(), *places, "--data.cache_dir", str(tmp_path / "cache"), "--max_steps", str(steps)]
        assert recipe.main([*words, "--log.progress_bar", "off", *more]) == 0
        return json.loads((tmp_path / run / "report" / "evaluation.json").read_text())["heat_nrmse"]

    def report() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in (tmp_path / "run" / "report").iterdir() if file.is_file()}

    def saved(run: str, steps: int) -> Path:
        return tmp_path / run / "checkpoints" / f"checkpoint_{steps:08d}"

    allow = ("--allow", "data.path", "data_fingerprint")
    before = start("run", "data", 2)
    log = tmp_path / "run" / "logs" / "rank_0.log"
    of_the_run = report()
    start("run", "other", 2, "--evaluate_only", *allow)
    # The record of the run stays. That of the other data names them.
    assert report() == of_the_run
    other = tmp_path / "run" / "report" / "other_data"
    assert {file.name for file in other.iterdir()} == {"evaluation.json", "fields.json", "fields.png"}
    measured = json.loads((other / "evaluation.json").read_text())
    assert measured["measured_on"].keys() == {"data.path", "data_fingerprint"}
    assert measured["measured_on"]["data.path"] == str(tmp_path / "other")
    # The held-out samples are the same ones, and so are the weights.
    assert measured["heat_nrmse"] == before
    assert "bit-exact: the same layout as when it was saved; from here on with another data.path, data_fing" in (
        log.read_text()
    )
    first = load_field_assets(saved("run", 2) / "assets")
    start("run", "other", 3, *allow)
    assert load_field_assets(saved("run", 3) / "assets") == first
    # A file of assets that is damaged leads to the checkpoint before, as other damage does.
    (saved("run", 3) / "assets" / "fields.json").write_text("{}")
    start("run", "other", 3)
    assert "newer checkpoints were refused" in log.read_text()
    # Weights alone are taken with their scales as well, and the new run keeps them.
    weights = ("--init_from", str(saved("run", 2)))
    start("tuned", "other", 1, *weights)
    assert load_field_assets(saved("tuned", 1) / "assets") == first
    start("tuned", "other", 2, *weights)
    assert load_field_assets(saved("tuned", 2) / "assets") == first


@pytest.mark.usefixtures("fresh")
def test_a_start_from_other_tasks_takes_their_modules_by_name(tmp_path: Path) -> None:
    recipe: Any = import_recipe(find_recipe("pde"))
    for name in ("heat", "wave"):
        write(tmp_path / "data", name)
    write(tmp_path / "data", "walls", boundary="dirichlet")
    steady = replace(HEADER, task="still", dt=0.0)
    draws = np.random.default_rng(0)
    for split in ("train", "heldout"):
        file = tmp_path / "data" / f"still_{split}.h5"
        write_fields(file, steady, 6, [(draws.normal(size=(6, 1, 2, 1, 8)), draws.uniform(1, 2, (6, 1)))])
    places = ["--data.path", str(tmp_path / "data"), "--data.cache_dir", str(tmp_path / "cache")]

    def start(run: str, tasks: str, *more: str) -> dict[str, Any]:
        """Return the weights after a step."""
        words = [*WORDS.replace("heat", tasks).split(), *places, "--output_dir", str(tmp_path / run)]
        words += ["--log.progress_bar", "off", *more]
        assert recipe.main(words) == 0
        return load_file(next((tmp_path / run).rglob("model.safetensors")))

    still = ("--optimizer.lr", "1e-30", "--seed", "5", "--max_steps", "1")
    old = start("old", "heat wave still", "--optimizer.lr", "0.01", "--max_steps", "1")
    new = start("new", "walls still wave heat", "--init_from", str(tmp_path / "old"), *still)
    untrained = start("untrained", "walls still wave heat", *still)
    moved = {"1": "2", "2": "1", "3": "0"}
    taken = 0
    for name, value in new.items():
        module = next((m for m in transfer.OF_TASK if name.startswith(f"{m}.")), None)
        there = name
        if module is not None:
            number, _, rest = name.removeprefix(f"{module}.").partition(".")
            there = f"{module}.{moved[number]}.{rest}" if number in moved else ""
        taken += there != name
        torch.testing.assert_close(value, old[there] if there else untrained[name], rtol=0, atol=1e-20)
    assert taken > 20
    # What all tasks share may not be left out.
    with pytest.raises(UsageError, match=r"the weights do not fit this model: .*operator\.blocks\.0\.[qk]_norm"):
        start("other", "walls wave", "--init_from", str(tmp_path / "old"), "--model.no_qk_norm", *still)


@pytest.mark.usefixtures("fresh")
def test_a_residual_network_may_be_added_to_trained_weights_and_left_out(tmp_path: Path) -> None:
    recipe: Any = import_recipe(find_recipe("pde"))
    write(tmp_path / "data", "heat")
    places = ["--data.path", str(tmp_path / "data"), "--data.cache_dir", str(tmp_path / "cache")]
    words = [*WORDS.split(), *places, "--log.progress_bar", "off"]
    assert recipe.main([*words, "--output_dir", str(tmp_path / "old"), "--max_steps", "1"]) == 0
    residual = ["--model.residual_depth", "1", "--objective.residual_from", "2", "--max_steps", "3"]
    start = ["--output_dir", str(tmp_path / "new"), "--init_from", str(tmp_path / "old"), *residual]
    assert recipe.main([*words, *start]) == 0
    log = (tmp_path / "new" / "logs" / "rank_0.log").read_text()
    fresh = "the residual network starts from initial values, not from"
    assert fresh in log
    # It is kept for the same task, and not for another one that starts from its modules.
    write(tmp_path / "data", "wave")
    for tasks, is_new in (("heat", False), ("wave", True)):
        start = [f"--output_dir={tmp_path / tasks}", "--init_from", str(tmp_path / "new"), *residual]
        assert recipe.main([*(word.replace("heat", tasks) if word == "heat" else word for word in words), *start]) == 0
        assert (fresh in (tmp_path / tasks / "logs" / "rank_0.log").read_text()) == is_new
    # A run without one takes all the rest.
    still = ["--optimizer.lr", "1e-30", "--max_steps", "1", "--seed", "5"]
    start = [f"--output_dir={tmp_path / 'without'}", "--init_from", str(tmp_path / "new"), *still]
    assert recipe.main([*words, *start]) == 0
    left_out = "is left out: it corrects predictions of its own tasks"
    assert left_out in (tmp_path / "without" / "logs" / "rank_0.log").read_text()
    ours, theirs = (load_file(next((tmp_path / run).rglob("model.safetensors"))) for run in ("without", "new"))
    kept = {name: value for name, value in theirs.items() if not name.startswith(transfer.RESIDUAL)}
    assert len(kept) < len(theirs)
    torch.testing.assert_close(ours, kept, rtol=0, atol=1e-20)

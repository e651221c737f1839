"""``accel-train lora``: options beside a plan that is there. Nothing is trained here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train import cli
from accel_train.commands.bundled import find_recipe, import_recipe
from accel_train.config import UsageError
from accel_train.options.loading import config_of, read_tree
from accel_train.options.tree import INVOCATION_OPTIONS, tree_text
from accel_train.store import commit, run_file
from tests.trained import commit_checkpoint

pytest.importorskip("diffusers")
pytest.importorskip("peft")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has trained by a plan."""
    tree: dict[str, Any] = {"output_dir": str(tmp_path), "max_steps": 1000, "lora": {"rank": 16}}
    tree |= {"base": {"source": "bases/x"}, "data": {"path": "pics"}}
    (tmp_path / "plan.yaml").write_text(tree_text(tree))
    run_file.write_run(tmp_path, {"run_id": "a", "experiment": {}, "resolved": {}, "trained": True})
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Configs that the recipe reads from the command lines of its launches."""
    configs: list[Any] = []

    def read(launch: Any) -> int:
        recipe: Any = import_recipe(find_recipe(launch.recipe))
        loaded = config_of(recipe.main, launch.arguments)
        assert loaded is not None
        configs.append(loaded.config)
        return 0

    monkeypatch.setattr("accel_train.commands.launch.launch", read)
    return configs


def call(run: Path, *flags: str, dataset: str = "pics") -> int:
    return cli._main(["lora", dataset, "--output_dir", str(run), *flags])


def test_options_of_one_start_are_those_of_the_step_train_alone(run: Path, started: list[Any]) -> None:
    steps = ("--steps", "plan", "cache", "train")
    assert call(run, *steps, "--resume", "must", "--allow", "precision", "max_steps") == 0
    cache, train = started
    assert (cache.cache_only, cache.resume, cache.allow) == (True, "auto", ())
    assert (train.cache_only, train.resume, train.allow) == (False, "must", ("precision", "max_steps"))
    assert read_tree(run / "plan.yaml").keys().isdisjoint(INVOCATION_OPTIONS)
    assert call(run, "--steps", "train", "--overwrite") == 0
    assert call(run, *steps) == 0
    assert [config.overwrite for config in started[2:]] == [True, False, False]
    assert started[-1].resume == "auto"


def test_a_plan_with_overwrite_does_not_delete_the_run_at_each_start(
    run: Path, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = run / "plan.yaml"
    plan.write_text(plan.read_text() + "overwrite: true\n")
    assert call(run, "--steps", "train") == 0
    assert not started[0].overwrite
    assert "overwrite removed, because a plan applies to every start" in capsys.readouterr().out
    assert "overwrite" not in read_tree(plan)


@pytest.mark.parametrize("written", ["report", "report/other_data"])
def test_an_earlier_evaluation_of_other_data_is_not_taken_for_that_of_the_run(
    written: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest step is evaluated on the data of the plan, which may be others than it was trained on."""
    launched: list[Any] = []

    def launch(request: Any) -> int:
        launched.append(request.arguments)
        (run / written / "evaluation.json").write_text('{"step": 3, "loss": 0.5}')
        return 0

    monkeypatch.setattr("accel_train.commands.launch.launch", launch)
    plan = run / "plan.yaml"
    plan.write_text(plan.read_text() + "evaluation: {prompts: [a flag]}\n")
    commit_checkpoint(run, torch.nn.Linear(2, 2), {}, lambda assets: None)
    (run / "metrics.jsonl").touch()
    other = run / "report" / "other_data"
    other.mkdir(parents=True)
    (other / "evaluation.json").write_text('{"step": 3, "measured_on": {"data.path": "benchmark"}, "loss": 9.9}')
    assert call(run, "--steps", "validate") == 0
    assert launched == [(str(plan), "--evaluate_only")]
    assert f"{run / written / 'pictures.png'}: the prompts" in capsys.readouterr().out
    # What the run itself has evaluated is not evaluated again.
    assert call(run, "--steps", "validate") == 0
    assert len(launched) == (1 if written == "report" else 2)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ("--overwrite", "--steps", "plan"),
            r"--overwrite True: belongs to the step train, which is not among --steps",
        ),
        (("--allow", "precision", "--steps", "export"), r"--allow precision: belongs to the step train"),
        (("--cache_only",), r"--cache_only: here it is the step cache; give --steps cache"),
    ],
)
def test_options_of_steps_that_do_not_run_are_refused(run: Path, flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call(run, *flags)


PLANNED = ("--base", "bases/x", "--max_steps", "1000", "--lora.rank", "16", "--seed", "0")


def test_steps_after_the_plan_refuse_options_that_it_has_otherwise(run: Path, started: list[Any]) -> None:
    before = (run / "plan.yaml").read_text()
    given = ("--base", "bases/y", "--max_steps", "3000", "--seed", "1")
    with pytest.raises(UsageError, match=r"the steps train read the plan, which has other values") as refused:
        call(run, "--steps", "train", *given, dataset="other_pics")
    lines = str(refused.value).splitlines()
    assert sorted(lines[1:-1]) == [
        "  --base: 'bases/x' there, 'bases/y' now",
        "  --max_steps: 1000 there, 3000 now",
        "  --seed: 0 there, 1 now",
        "  the word after `accel-train lora`: 'pics' there, 'other_pics' now",
    ]
    assert lines[-1] == "add plan to --steps, or leave out what differs"
    for step in ("cache", "validate", "export"):
        with pytest.raises(UsageError, match=rf"the steps {step} read the plan.*\n  --lora.rank: 16 there, 8 now"):
            call(run, "--steps", step, "--lora.rank", "8")
    assert not started
    # The values of the plan and of its defaults, and another way to write a folder.
    assert call(run, "--steps", "train", *PLANNED, dataset="./pics/") == 0
    assert (started[0].max_steps, started[0].data.path) == (1000, "pics")
    assert (run / "plan.yaml").read_text() == before


def test_a_plan_that_is_kept_refuses_another_intent_and_memory(run: Path, started: list[Any]) -> None:
    plan = run / "plan.yaml"
    with pytest.raises(UsageError, match=r"--intent: None there, 'speed' now"):
        call(run, "--steps", "train", "--intent", "speed")
    plan.write_text("# Made with --intent speed --memory_gib 24.0\n" + plan.read_text())
    same = ("--intent", "speed", "--memory_gib", "24")
    # The same command continues a run that was stopped.
    assert call(run, "--steps", "plan", "train", *same) == 0
    assert call(run, "--steps", "train", *same) == 0
    assert "# Made with --intent speed --memory_gib 24.0\n" in plan.read_text()
    with pytest.raises(UsageError, match=r"is kept, because .*\n  --intent: 'speed' there, 'quality' now"):
        call(run, "--steps", "plan", "train", "--intent", "quality")
    with pytest.raises(UsageError, match=r"the steps train read the plan.*\n  --memory_gib: 24.0 there, 48 now"):
        call(run, "--steps", "train", "--memory_gib", "48")
    assert len(started) == 2


def test_the_export_of_a_deleted_run_is_not_that_of_the_next_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = commit_checkpoint(run, torch.nn.Linear(2, 2), {}, lambda assets: None)
    assert call(run, "--steps", "export") == 0
    assert call(run, "--steps", "export") == 0
    exported = run / "exported-00000003"
    assert f"{exported}: there already" in capsys.readouterr().out
    commit.rewrite_manifest(checkpoint, {"run_id": "next"})
    with pytest.raises(UsageError, match=r"exported-00000003: is the export of another run, abc; .* is of run next"):
        call(run, "--steps", "export")
    (exported / "experiment.json").unlink()
    with pytest.raises(UsageError, match=r"is no export that can be read .*Move the folder away, and give --steps"):
        call(run, "--steps", "export")
    shutil.rmtree(exported)
    exported.mkdir()
    assert call(run, "--steps", "export") == 0
    assert json.loads((exported / "experiment.json").read_text())["run_id"] == "next"

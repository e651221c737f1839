"""``accel-train drill``: no alarm on the recipes of the project, and each planted cause named by its fault."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from accel_train import cli
from accel_train.commands.bundled import import_recipe
from accel_train.compare.runs import InterruptedRunError
from accel_train.config import UsageError
from accel_train.drill import drill as drilling
from accel_train.drill import faults
from accel_train.drill.drill import present_interval
from accel_train.drill.judging import Result
from accel_train.drill.runs import Runner
from accel_train.drill.trials import Trials, Undisturbed
from accel_train.options.loading import config_of
from accel_train.options.tree import flatten, to_tree
from accel_train.store import strict_json
from tests import zygote
from tests.compiling import skip_without
from tests.distributed.launching import DEMOS, inputs_of
from tests.verification.faults import SCAFFOLD, write
from tests.waiting import PATIENCE_SECONDS, until
from tests.zygote import Child

pytestmark = pytest.mark.distributed

Rows = dict[str, dict[str, Any]]


def start(self: Runner, words: Sequence[str], log: Path, environment: Mapping[str, str]) -> Child:
    """Start a command as ``Runner.start`` does, in forked processes."""
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    # The run that pushes asks for a Hub by itself.
    if "HF_ENDPOINT" in environment:
        fixed["HF_HUB_OFFLINE"] = environment["HF_HUB_OFFLINE"]
    return zygote.start(words, log, env={**environment, **fixed}, group=True)


def read_config(recipe: Path, arguments: Sequence[str]) -> dict[str, Any]:
    loaded = config_of(import_recipe(recipe).main, arguments)
    assert loaded is not None
    return flatten(to_tree(loaded.config))


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Seconds of imports less in each start. What a drill writes lies in the test's directory."""
    monkeypatch.setattr(Runner, "start", start)
    monkeypatch.setattr(drilling, "read_config", read_config)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("HF_ENDPOINT", "ACCELERATE_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)


def drill(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Rows, dict[str, Any]]:
    code = cli._main(["drill", "--json", *words])
    # Packages may print in front of it while this process imports them; `accel-train drill` reads options in another.
    printed = capsys.readouterr().out
    found = json.loads(printed[printed.index("{") :])
    return code, {row["fault"]: row for row in found["faults"]}, found


def verdicts(rows: Rows) -> dict[str, str]:
    return {name: row["verdict"] for name, row in rows.items()}


def test_the_scaffold_resumes_after_two_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows, found = drill(
        capsys, "--steps", "6", str(SCAFFOLD), "--faults", "kill_in_step", "kill_in_save", "--receipt", "here.json"
    )
    assert verdicts(rows) == dict.fromkeys(("kill_in_step", "kill_in_save"), "passed"), rows
    assert code == 0
    # Saves after 2, 4 and 6 of 6 steps: killed in the fourth step, and in the save after it.
    assert [rows[name]["resumed_from"] for name in rows] == [2, 2]
    assert [rows[name]["steps_lost"] for name in rows] == [1, 2]
    for row in rows.values():
        assert row["exit_code"] == "SIGKILL"
        assert (row["losses_identical"], row["weights_identical"]) == (True, True)
        assert row["restart_seconds"] > 0
        assert row["seconds_lost"] > row["restart_seconds"]
    assert found["saving"]["save_every"] >= 1
    assert found["saving"]["present"] == "checkpoints.save_every 100"
    # Nothing is in the recipe's own output_dir.
    assert [path.name for path in Path().iterdir()] == ["here.json"]
    receipt = json.loads(Path("here.json").read_text())
    strict_json.check_seal(receipt)
    assert [step["step"] for step in receipt["evidence"]["kill_in_step"]["steps"]] == [1, 2, 3, 4, 5, 6]


IGNORES = (
    "from accel_train.training import optimizers\n",
    "from accel_train.training import optimizers\nimport signal\n",
)
EVALUATES = ("batches.done % 100 == 0", "batches.done % 2 == 0")
LOOP = "        for batches in training:\n"


def changed(folder: Path, *replaced: tuple[str, str], planted: str | None = None) -> str:
    """Write the scaffold with a mistake."""
    recipe = write(folder, planted) if planted else write(folder)
    text = recipe.read_text()
    for before, after in replaced:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    recipe.write_text(text)
    return str(recipe)


def test_a_recipe_that_ignores_the_signal_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_train.drill.trials.ALONE_SECONDS", 1.0)
    deaf = (LOOP, f"        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{LOOP}")
    recipe = changed(tmp_path / "recipe", IGNORES, deaf)
    code, rows, _ = drill(capsys, "--steps", "6", recipe, "--faults", "sigterm_in_training")
    assert verdicts(rows) == {"sigterm_in_training": "FAILED"}
    assert "the stop request did not arrive: exit code 1" in rows["sigterm_in_training"]["reasons"][0]
    assert code == 1


@pytest.mark.slow  # one that does not stop at all is found above; here, one that stops late
def test_a_recipe_that_goes_on_after_the_request_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopped = "            training.save_if_due(result)\n"
    recipe = changed(tmp_path / "recipe", (stopped, f"{stopped}            training.stopped = False\n"))
    code, rows, _ = drill(capsys, "--steps", "6", recipe, "--faults", "sigterm_in_training")
    assert rows["sigterm_in_training"]["reasons"] == ["asked to stop after step 3, the run continued to step 6"]
    assert code == 1


@pytest.mark.slow  # a run that resumes as another is found below
def test_an_evaluation_that_changes_training_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stop breaks the evaluation off before it changes anything, so the resumed run differs."""
    recipe = changed(tmp_path / "recipe", EVALUATES, planted="evaluation that leaves the model in eval mode")
    code, rows, _ = drill(capsys, "--steps", "6", recipe, "--faults", "sigterm_in_evaluation")
    assert verdicts(rows) == {"sigterm_in_evaluation": "FAILED"}, rows
    row = rows["sigterm_in_evaluation"]
    assert (row["resumed_from"], row["steps_lost"]) == (4, 0)
    assert "losses differ from the undisturbed run, first in step 5" in row["reasons"][0]
    assert not row["weights_identical"]
    assert code == 1


def test_a_recipe_that_does_not_resume_exactly_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = changed(tmp_path / "recipe", planted="state outside the checkpoint")
    code, rows, _ = drill(capsys, "--steps", "6", recipe, "--faults", "kill_in_step")
    assert verdicts(rows) == {"kill_in_step": "FAILED"}
    assert "first in step 3" in rows["kill_in_step"]["reasons"][0]
    assert code == 1


@pytest.mark.slow  # a resume that differs is found above; here, one that is refused
def test_a_recipe_that_saves_no_state_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--steps", "6", str(SCAFFOLD), "--checkpoints.save_state", "false", "--faults", "kill_in_step")
    code, rows, _ = drill(capsys, *words)
    assert "the same command again ended with exit code" in rows["kill_in_step"]["reasons"][0]
    assert code == 1


def refused(*words: str) -> str:
    with pytest.raises(UsageError) as found:
        cli._main(["drill", *words])
    return str(found.value)


def test_wrong_usage_is_refused_before_anything_runs(tmp_path: Path) -> None:
    recipe = str(SCAFFOLD)
    assert "did you mean 'kill_in_step'?" in refused("--faults", "kill_in_steps", recipe)
    assert "--faults hanging_rank: it needs two processes" in refused(recipe, "--faults", "hanging_rank")
    assert "--steps 5: at least 6 are required" in refused("--steps", "5", recipe)
    assert "--mtbf_hours 0: hours between failures, a number above 0" in refused(recipe, "--mtbf_hours", "0")
    assert "--step_seconds -1" in refused(recipe, "--step_seconds", "-1")
    assert "--max_steps: `accel-train drill` sets it" in refused(recipe, "--max_steps", "10")
    assert "--output_dir" in refused(recipe, "demo", "--output_dir=mine")
    assert "--output_dir: `accel-train drill` sets it" in refused(recipe, "demo", "--output-dir=mine")
    assert "num_machines is 2" in refused("--config_file", str(_two_machines(tmp_path)), recipe)
    assert "is not empty" in refused("--keep", str(tmp_path), recipe)
    (tmp_path / "file").write_text("")
    assert "file is a file; give a directory" in refused("--keep", str(tmp_path / "file"), recipe)
    assert "cannot be written (Not a directory)" in refused("--keep", str(tmp_path / "file" / "runs"), recipe)
    assert "is a directory; give the name of a file" in refused("--receipt", str(tmp_path), recipe)
    assert not list(Path().iterdir())


def _two_machines(folder: Path) -> Path:
    path = folder / "launch.yaml"
    path.write_text(
        "distributed_type: MULTI_GPU\nnum_machines: 2\nmachine_rank: 0\nnum_processes: 4\n"
        "main_process_ip: 10.0.0.1\nmain_process_port: 29500\n"
    )
    return path


@pytest.mark.parametrize(
    ("values", "text", "seconds"),
    [
        ((500, None, 0.0), "checkpoints.save_every 500", 250.0),
        ((0, None, 0.0), "a save every 10 minutes", 600.0),
        ((0, 2.0, 0.0), "a save every 2 minutes", 120.0),
        ((0, None, 0.5), "checkpoints.save_every_epochs 0.5", None),
    ],
)
def test_the_present_interval(values: tuple[Any, ...], text: str, seconds: float | None) -> None:
    names = ("checkpoints.save_every", "checkpoints.save_every_minutes", "checkpoints.save_every_epochs")
    present = present_interval(dict(zip(names, values, strict=True)), 0.5)
    assert (present.text, present.interval_seconds) == (text, seconds)


def test_an_interrupted_drill_leaves_nothing_behind(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "accel_train.cli", "drill", str(SCAFFOLD)]
    log = tmp_path / "drill.txt"
    process = zygote.start(command, log, env={**os.environ, "TMPDIR": str(scratch)}, cwd=tmp_path, group=True)
    until(lambda: process.poll() is not None or list(scratch.glob("accel-train-drill-*/undisturbed/run/run.json")))
    # Not SIGINT, which is ignored if a shell runs the tests in the background.
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == 1, log.read_text()
    assert "interrupted by SIGTERM: the runs are stopped, no result" in log.read_text()
    assert not list(scratch.glob("accel-train-drill-*"))


def test_an_interrupted_drill_keeps_the_results_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    strike = Trials.strike

    def struck(trials: Trials, fault: faults.Fault, undisturbed: Undisturbed) -> Result:
        if fault.name == "kill_in_save":
            raise InterruptedRunError("SIGINT")
        return strike(trials, fault, undisturbed)

    monkeypatch.setattr(Trials, "strike", struck)
    words = ["--steps", "6", str(SCAFFOLD), "--faults", "kill_in_step", "kill_in_save", "--receipt", "here.json"]
    assert cli._main(["drill", *words]) == 1
    printed = capsys.readouterr()
    assert "interrupted by SIGINT: the runs are stopped; not tried: kill_in_save" in printed.err
    assert "1 passed, 0 failed, 0 not applicable" in printed.out
    receipt = strict_json.read_object(Path("here.json"))
    assert [row["fault"] for row in receipt["faults"]] == ["kill_in_step"]
    assert receipt["not_tried"] == ["kill_in_save"]


LEFT_OUT = (*faults.SET_HERE, "schedule.warmup_steps", "log.progress_bar")
"""Flags of the small demos that a drill sets itself, or would rather set."""


def flags_of(recipe: str) -> list[str]:
    """The small demo of a recipe, without what a drill sets itself."""
    preset, small = DEMOS[recipe]
    words = [preset]
    starts = [i for i, word in enumerate(small) if word.startswith("--")]
    for first, last in zip(starts, [*starts[1:], len(small)], strict=True):
        if small[first][2:] not in LEFT_OUT:
            words += small[first:last]
    return words


def test_a_recipe_that_ends_early_is_refused(tmp_path: Path) -> None:
    saved = "            training.save_if_due(result)\n"
    recipe = changed(
        tmp_path / "recipe", (saved, f"{saved}            if batches.done == 2:\n                training.end()\n")
    )
    said = refused("--steps", "6", recipe, "--faults", "kill_in_step")
    assert said.startswith("--steps 6: the steps logged by the undisturbed run: 1, 2; the first 2 are not timed")
    assert "let the recipe train until max_steps" in said


@pytest.mark.slow  # the same faults hit a toy run in tests/faults; here, the recipes of the project and all faults
@pytest.mark.parametrize("recipe", ["mmdit", "pde", "causal_lm"])
def test_no_alarm_on_the_demos(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows, _ = drill(capsys, recipe, *flags_of(recipe))
    expected = {fault.name: "passed" for fault in faults.FAULTS} | {"hanging_rank": "not applicable"}
    assert verdicts(rows) == expected, rows
    assert rows["sigterm_in_training"]["steps_lost"] == rows["sigterm_in_evaluation"]["steps_lost"] == 0
    assert rows["full_disk_in_save"]["steps_lost"] == rows["kill_in_save"]["steps_lost"] == 3
    assert all(row["losses_identical"] for row in rows.values() if row["verdict"] == "passed")
    assert code == 0


@pytest.mark.slow  # as above; two faults, since a start of diffusers takes long
def test_no_alarm_on_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skip_without("diffusers")
    words = [*flags_of("lora"), *inputs_of("lora", tmp_path)]
    code, rows, _ = drill(capsys, "lora", *words, "--faults", "sigterm_in_evaluation", "kill_in_save")
    assert verdicts(rows) == dict.fromkeys(("sigterm_in_evaluation", "kill_in_save"), "passed"), rows
    assert all(row["losses_identical"] and row["weights_identical"] for row in rows.values())
    assert code == 0


@pytest.mark.slow  # two of them are quick above; here all, with evaluations between the steps
def test_no_alarm_on_the_scaffold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = changed(tmp_path / "recipe", EVALUATES)
    code, rows, _ = drill(capsys, "--steps", "6", recipe)
    assert verdicts(rows) == {f.name: "passed" for f in faults.FAULTS} | {"hanging_rank": "not applicable"}, rows
    assert {name: row["exit_code"] for name, row in rows.items() if name != "hanging_rank"} == {
        "kill_in_step": "SIGKILL",
        "sigterm_in_training": "75",
        "sigterm_in_evaluation": "75",
        "kill_in_save": "SIGKILL",
        "full_disk_in_save": "1",
        "hub_down": "0",
        "failing_evaluation": "1",
    }
    assert code == 0


@pytest.mark.slow  # as above, on two processes and with one that hangs until the timeout
def test_no_alarm_on_two_processes(capsys: pytest.CaptureFixture[str]) -> None:
    code, rows, found = drill(capsys, str(SCAFFOLD), "--num_processes", "2")
    assert verdicts(rows) == {fault.name: "passed" for fault in faults.FAULTS}, rows
    assert rows["sigterm_in_training"]["resumed_from"] == 6  # the step of the signal, and one for all to know of it
    assert found["layout"] == "2 processes, ddp, on the CPU"
    assert rows["hanging_rank"]["resumed_from"] == 3
    assert code == 0


def test_the_page_describes_every_fault() -> None:
    page = (Path(__file__).parents[2] / "docs" / "drill.md").read_text()
    table = page.partition("| Fault |")[2]
    for fault in faults.FAULTS:
        assert f"`{fault.name}`" in table, fault.name

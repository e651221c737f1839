"""``accel-train replay --upgrade``: an operator that is one ulp off is named, and equal environments are identical."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel_train import cli
from accel_train.store import strict_json
from tests import compiling
from tests.distributed.launching import Finished
from tests.rerun import recording
from tests.rerun.upgrade import environments


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return recording.record("mmdit", tmp_path_factory.mktemp("recorded") / "mmdit")


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the packages of this one."""
    return environments.build(tmp_path_factory.mktemp("environments") / "same")


def command(run: Path, steps: str, environment: Path, folder: Path, *more: str) -> tuple[int, dict[str, Any]]:
    """Exit code and receipt."""
    receipt = folder / "receipt.json"
    words = ["replay", str(run), "--steps", steps, "--upgrade", str(environment), "--receipt", str(receipt), *more]
    code = cli._main(words)
    content = strict_json.read_object(receipt)
    strict_json.check_seal(content)
    return code, content


def assert_named(receipt: dict[str, Any], step: int, operator: str, module: str) -> None:
    """The planted operator is the one that is named."""
    found = receipt["first_difference"]
    assert (receipt["verdict"], receipt["first_differing_step"], found["step"]) == ("different", step, step)
    assert found["kind"] == "output"
    assert (found["here"][0]["operator"], found["there"][0]["operator"]) == (operator, operator)
    assert found["here"][0]["module"] == module
    # Equal inputs, and the recording has the bits of the step as it was trained.
    assert found["here"][0]["inputs"] == found["there"][0]["inputs"]
    assert found["notes"] == []
    # One ulp of one number.
    assert 0 < found["relative"] < 1e-6
    assert "apart by" in found["largest"]


def test_an_operator_one_ulp_off_is_named_with_its_step_and_module(
    run: Finished, same: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = recording.tree(run.directory)
    commands = environments.fork_runs(monkeypatch, environments.fault("gelu", steps=2))
    code, receipt = command(run.directory, "4:8", same, tmp_path)
    assert code == 1
    assert_named(receipt, 7, "aten.gelu.default", "latent_encoder")
    assert recording.tree(run.directory) == before
    # Two windows, and two recordings of the step in each environment.
    assert len(commands) == 6
    assert receipt["first_step_other_than_logged"] == 0
    assert receipt["checkpoints"][0]["identical"] is False
    output = capsys.readouterr().out
    assert "first differing step: 7 (" in output
    assert "first operator with a different output for equal inputs: aten.gelu.default" in output
    assert "the same packages in both" in output
    assert "verdict: different" in output


@pytest.mark.slow  # the steps before the planted fault are compared every day
def test_environments_without_a_difference_are_identical(
    run: Finished, same: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = environments.fork_runs(monkeypatch, "")
    code, receipt = command(run.directory, "6:10", same, tmp_path)
    assert (code, receipt["verdict"], receipt["first_difference"]) == (0, "bit-identical", None)
    assert receipt["first_step_other_than_logged"] == 0
    # Nothing to record. The first word says in which environment.
    assert [words[0] for words in commands] == [commands[0][0], str(same / "bin" / "python")]
    losses = run.losses()
    # Every step has a line, whatever the run logged.
    assert [(line["step"], line["values"]["loss"]) for line in receipt["steps"]] == [
        (step, {"here": losses[step - 1].hex(), "upgraded": losses[step - 1].hex()}) for step in range(5, 11)
    ]
    assert [(one["name"], one["identical"]) for one in receipt["checkpoints"]] == [("checkpoint_00000010", True)]
    assert receipt["packages"]["here"] == receipt["packages"]["upgraded"]


@pytest.mark.slow  # without another version it is quick, and verdicts have quick tests in test_replay.py
def test_another_version_allows_a_difference_within_the_tolerance(
    run: Finished, same: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = environments.fault("gelu") + environments.NEWER
    environments.fork_runs(monkeypatch, newer)
    code, receipt = command(run.directory, "4:5", same, tmp_path)
    assert (code, receipt["verdict"]) == (0, "equal within reduction order")
    (reason,) = receipt["reasons_for_other_bits"]
    assert reason.startswith("torch version ")
    assert reason.endswith(" -> 99.0")
    assert receipt["first_difference"]["here"][0]["operator"] == "aten.gelu.default"
    code, receipt = command(run.directory, "4:5", same, tmp_path, "--tolerance", "1e-12")
    assert (code, receipt["verdict"]) == (1, "different")


@pytest.mark.slow  # a difference in a step is quick
def test_other_initial_weights_are_told_from_a_difference_in_a_step(
    run: Finished, same: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = environments.fork_runs(monkeypatch, environments.OTHER_START)
    code, receipt = command(run.directory, "0:2", same, tmp_path)
    assert (code, receipt["verdict"], receipt["first_differing_step"]) == (1, "different", 0)
    assert receipt["first_difference"]["terms"] == ["weights", "ema"]
    # No step is recorded, since none is the cause.
    assert len(commands) == 2
    assert "before the first step (weights, ema): the initial values differ" in capsys.readouterr().out


@pytest.mark.slow  # the end of a window is compared above
def test_a_recipe_that_ends_before_the_window_is_no_result(
    run: Finished, same: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environments.fork_runs(monkeypatch, environments.ENDS_EARLY)
    assert cli._main(["replay", str(run.directory), "--steps", "4:8", "--upgrade", str(same)]) == 1
    assert "upgraded, the recipe ended by itself at step 5, so there is no step 8" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # the same without compilation is quick
@pytest.mark.skipif(compiling.COMPILER is None, reason="torch.compile needs a C++ compiler: apt install g++")
@pytest.mark.skipif(compiling.NO_INDUCTOR is not None, reason=f"a space in {compiling.NO_INDUCTOR}")
def test_compiled_blocks_run_eagerly_while_they_are_recorded(
    same: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recording.record("mmdit", tmp_path / "run", "--compile.mode", "on")
    environments.fork_runs(monkeypatch, environments.fault("gelu", steps=2))
    code, receipt = command(run.directory, "4:8", same, tmp_path)
    assert code == 1
    assert receipt["first_step_other_than_logged"] == 0
    assert receipt["first_difference"]["here"][0]["operator"] == "aten.gelu.default"
    assert receipt["first_differing_step"] == 7


@pytest.mark.slow  # the same with forked processes is quick
@pytest.mark.parametrize(
    ("recipe", "operator", "module"),
    [("mmdit", "gelu", "latent_encoder"), ("pde", "silu", "conditioning.time")],
)
def test_real_environments(same: Path, tmp_path: Path, recipe: str, operator: str, module: str) -> None:
    run = recording.record(recipe, tmp_path / "run")
    code, receipt = command(run.directory, "4:8", same, tmp_path)
    assert (code, receipt["verdict"]) == (0, "bit-identical")
    faulty = environments.build(tmp_path / "faulty", environments.fault(operator, steps=2))
    # Its interpreter is as good as its directory.
    code, receipt = command(run.directory, "4:8", faulty / "bin" / "python", tmp_path)
    assert code == 1
    assert_named(receipt, 7, f"aten.{operator}.default", module)

"""``accel-train verify``: no alarm on the recipes of the project, and each planted fault named by its check."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from accel_train import cli
from accel_train.commands.bundled import import_recipe
from accel_train.options.loading import config_of
from accel_train.options.tree import flatten, to_tree
from accel_train.verification import plan
from accel_train.verification import verify as verification
from accel_train.verification.runs import Runner
from tests import zygote
from tests.distributed.launching import DEMOS, inputs_of
from tests.verification import faults

pytestmark = pytest.mark.distributed


def execute(self: Runner, words: Sequence[str], log: Path) -> int:
    """Run a command as ``Runner.execute`` does, in forked processes."""
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    sharded = any(word.endswith(("fsdp2.yaml", "zero2.yaml")) for word in words)
    child = zygote.start(words, log, env=self.environment() | fixed, kind="sharded" if sharded else "plain")
    return child.wait()


def read_config(recipe: Path, arguments: Sequence[str]) -> dict[str, Any]:
    loaded = config_of(import_recipe(recipe).main, arguments)
    assert loaded is not None
    return flatten(to_tree(loaded.config))


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of imports less in each run; one at a time, because one zygote serves all."""
    monkeypatch.setattr(Runner, "execute", execute)
    monkeypatch.setattr(verification, "read_config", read_config)
    monkeypatch.setattr(verification, "PARALLEL", 1)


def verify(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code and the result of each check."""
    code = cli._main(["verify", "--json", *words])
    # Packages that the recipe imports, in this process as well, may print before.
    text = capsys.readouterr().out
    printed = json.loads(text[text.index("{\n") :])
    return code, {result["check"]: result for result in printed["checks"]}


def failed(results: dict[str, dict[str, str]]) -> set[str]:
    return {name for name, result in results.items() if result["verdict"] == "FAILED"}


ALL_BUT_SHARDED = (
    "accumulation,ragged,two_processes,learning_rate,sample_order,unkeyed_draws,repeat,resume,evaluation,"
    "gradient_paths,optimizer_groups,clip,reductions,first_step"
)


def test_the_scaffold_passes(capsys: pytest.CaptureFixture[str]) -> None:
    code, results = verify(capsys, "--only", ALL_BUT_SHARDED, str(faults.SCAFFOLD))
    assert {result["verdict"] for result in results.values()} == {"ok"}, results
    assert len(results) == 14
    assert code == 0


@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_planted_fault_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fault = faults.FAULTS[name]
    recipe = faults.write(name, tmp_path / "recipe")
    code, results = verify(capsys, "--only", fault.named_by, "--steps", "4", str(recipe))
    assert failed(results) == {fault.named_by}, results
    assert fault.said in results[fault.named_by]["reason"]
    assert code == 1


@pytest.mark.slow  # that each is named is tested above; here, that nothing else is
@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_planted_fault_raises_no_other_alarm(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fault = faults.FAULTS[name]
    recipe = faults.write(name, tmp_path / "recipe")
    _, results = verify(capsys, "--only", ALL_BUT_SHARDED, str(recipe))
    assert failed(results) == {fault.named_by, *fault.consequences}


LEFT_OUT = (*plan.SET_HERE, "global_batch_size", "schedule.warmup_steps", "log.progress_bar")
"""Flags of the small demos that a verification sets itself, or would rather set."""


def flags_of(recipe: str, folder: Path) -> list[str]:
    """The small demo of a recipe, without what a verification sets itself."""
    preset, small = DEMOS[recipe]
    words = [preset]
    values = [*small, *inputs_of(recipe, folder)]
    starts = [i for i, word in enumerate(values) if word.startswith("--")]
    for start, end in zip(starts, [*starts[1:], len(values)], strict=True):
        if values[start][2:] not in LEFT_OUT:
            words += values[start:end]
    return words


SHIPPED = {
    "mmdit": (),
    "pde": ("--objective.autoencode_steps", "2", "--objective.residual_from", "4", "--objective.residual_steps", "1"),
    "causal_lm": (),
    "lora": (),
}


@pytest.mark.slow  # the same recipes on the same layouts, compared by test_invariance.py; here, that no check alarms
@pytest.mark.parametrize("recipe", SHIPPED)
def test_no_alarm_on_the_recipes_of_the_project(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [recipe, *flags_of(recipe, tmp_path), *SHIPPED[recipe]]
    code, results = verify(capsys, *words)
    assert not failed(results), results
    unchecked = {name for name, result in results.items() if result["verdict"] == "not checked"}
    assert unchecked <= {"zero2"}
    assert code == 0

"""``accel-train verify``: no alarm on the recipes of the project, and each planted fault named by its check."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from accel_train import cli
from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.commands.bundled import import_recipe
from accel_train.compare.runs import InterruptedRunError
from accel_train.config import UsageError
from accel_train.data.sampler import StepSampler
from accel_train.options.loading import config_of
from accel_train.options.tree import flatten, to_tree
from accel_train.verification import comparing, plan, report
from accel_train.verification import verify as verification
from accel_train.verification.checks import CHECKS, Evidence, Finding, missing
from accel_train.verification.facts import Facts, Outcome, Spec
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


def test_the_scaffold_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The resume names its checkpoint in a flag.
    folder = tmp_path / "a name with spaces"
    words = ["--only", ALL_BUT_SHARDED, "--steps", "4", "--output", str(folder)]
    code, results = verify(capsys, *words, str(faults.SCAFFOLD))
    assert {result["verdict"] for result in results.values()} == {"ok"}, results
    assert len(results) == 14
    assert code == 0


def refused(*words: str) -> str:
    with pytest.raises(UsageError) as found:
        cli._main(["verify", *words])
    return str(found.value)


QUICK = (
    ("mean of means",),
    ("negatives from the batch",),
    ("clip forgotten", "schedule counted by process", "a reduction for each micro-batch"),
    ("evaluation that leaves the model in eval mode", "optimizer state dropped on resume"),
    ("unkeyed dropout",),
    ("frozen conditioning layer",),
    ("parameter missing from the optimizer",),
)
"""Faults whose checks need the same runs stand in one recipe."""


@pytest.mark.parametrize("names", QUICK, ids=" and ".join)
def test_planted_faults_are_named(names: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planted = [faults.FAULTS[name] for name in names]
    recipe = faults.write(tmp_path / "recipe", *names)
    expected = {fault.named_by for fault in planted}
    code, results = verify(capsys, "--only", ",".join(expected), "--steps", "4", str(recipe))
    assert failed(results) == expected, results
    assert all(fault.said in results[fault.named_by]["reason"] for fault in planted)
    assert code == 1


def test_negatives_from_the_batch_are_named_among_the_causes() -> None:
    for check in CHECKS:
        if check.name in ("accumulation", "ragged", "two_processes"):
            assert "the loss of a sample depends on the others of its micro-batch" in check.failure


@pytest.mark.slow  # one fault of most checks is named above; here, each of them by itself, and that nothing else is
@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_planted_fault_is_named_and_raises_no_other_alarm(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = faults.FAULTS[name]
    recipe = faults.write(tmp_path / "recipe", name)
    code, results = verify(capsys, "--only", ALL_BUT_SHARDED, str(recipe))
    assert failed(results) == {fault.named_by, *fault.consequences}
    assert fault.said in results[fault.named_by]["reason"]
    assert code == 1


@pytest.mark.slow  # refusals of a run are read as those of any other
def test_a_layout_that_is_refused_is_listed_as_not_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, results = verify(capsys, "--only", "fsdp2", str(faults.SCAFFOLD))
    assert (code, results["fsdp2"]["verdict"]) == (0, "ok"), results
    # FSDP2 is refused where a model does not name its blocks.
    shutil.copytree(faults.SCAFFOLD.parent, tmp_path / "recipe")
    recipe = tmp_path / "recipe" / faults.SCAFFOLD.name
    recipe.write_text(recipe.read_text().replace('["Block"]  #', "[]  #"))
    code, results = verify(capsys, "--only", "fsdp2,repeat", str(recipe))
    assert results["fsdp2"]["verdict"] == "not checked"
    assert '_no_split_modules = ["Block"]' in results["fsdp2"]["reason"]
    assert results["repeat"]["verdict"] == "ok"
    assert code == 0


def test_wrong_usage_is_refused_before_anything_runs(tmp_path: Path) -> None:
    recipe = str(faults.SCAFFOLD)
    assert "--steps 2: an even number, at least 4, is required" in refused("--steps", "2", recipe)
    # Saves are multiples of half the steps: without one at the end there is nothing to compare.
    assert "--steps 7: an even number" in refused("--steps", "7", recipe)
    assert "did you mean 'resume'?" in refused("--only", "resumes", recipe)
    assert "--max_steps: `accel-train verify` sets it" in refused(recipe, "--max_steps", "10")
    assert "--micro_batch_size" in refused(recipe, "demo", "--micro_batch_size=10")
    assert "--max_steps: `accel-train verify` sets it" in refused(recipe, "--max-steps", "10")
    several = refused(recipe, "--micro_batch_size", "4", "--max_epochs", "None", "--max_steps", "9")
    assert (
        "--micro_batch_size, --max_epochs, --max_steps: `accel-train verify` sets them in each of its runs" in several
    )
    assert "leave them out, and give --steps N instead of --max_steps" in several
    assert refused("--only", "launch_file", recipe).endswith("needs the launch file; give --config_file FILE")
    (tmp_path / "file").touch()
    assert "is not empty" in refused("--output", str(tmp_path), recipe)


def outcome(steps: int, **facts: Any) -> Outcome:
    losses = {step: {"loss": 1.0, "grad_norm": 1.0} for step in range(1, steps + 1)}
    return Outcome(Path(), 0, "", losses, Facts(learning_rates=[[1.0]] * steps, **facts))


def finding(name: str, **outcomes: Outcome) -> Finding:
    sizes = plan.choose_sizes({"global_batch_size": 64}, (), 4)
    evidence = Evidence({"reference": outcome(4), **outcomes}, {}, sizes, {"sync": "auto"}, 1.0)
    (check,) = [check for check in CHECKS if check.name == name]
    return missing(evidence, check.runs) or check.find(evidence)


def test_a_run_without_the_steps_asked_for_proves_nothing() -> None:
    """A recipe with a loop of its own is not observed; a resume that begins again has the bits of the reference."""
    unobserved = finding("gradient_paths", reference=replace(outcome(4), facts=Facts()))
    assert unobserved.verdict == "FAILED"
    assert "made 0 steps of loop.training and logged 4; 4 were asked for" in unobserved.reason
    again = finding("resume", resumed=outcome(4))
    assert again.verdict == "FAILED"
    assert "the run resumed made 4 steps" in again.reason


def test_a_run_on_several_processes_that_crashed_says_its_own_error() -> None:
    # As torchrun prints it, cut at the sides.
    output = (
        """Traceback (most recent call last):
  File "recipe.py", line 9, in main
RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.
E1201 09:40:32 18877 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
  File "torch/distributed/run.py", line 1032, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
  error_file: <N/A>
"""
        + "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html\n" * 12
    )
    crashed = replace(outcome(0), code=1, output=output)
    for name in ("two_processes", "clip"):
        found = finding(name, two_processes=crashed)
        (check,) = [check for check in CHECKS if check.name == name]
        shown = "\n".join(report.text([(check, found)]))
        assert "\n  RuntimeError: Expected to have finished reduction" in shown
        assert "error_file" not in shown
        assert " ".join(check.failure.split()[:4]) not in shown


def test_a_killed_process_is_named_by_its_exit_code_and_a_notice_of_torchrun_hides_no_error() -> None:
    # As torchrun prints it, cut at the sides.
    module = "W1201 09:40:32 18870 torch/distributed/elastic/multiprocessing"
    notice = f"{module}/redirects.py:29] NOTE: Redirects are currently not supported in Windows or MacOs."
    stopping = f"{module}/api.py:1028] Sending process 18878 closing signal SIGTERM"
    failed = f"{module}/api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 18877) of binary: python"
    report_of_torchrun = [
        "Traceback (most recent call last):",
        "  traceback : Signal 15 (SIGTERM) received by PID 18878",
    ]

    def message(*lines: str) -> str:
        return replace(outcome(0), code=1, output="\n".join(lines)).message

    assert message("step 1/4", stopping, failed, *report_of_torchrun) == f"step 1/4\n{failed}"
    assert message(notice, failed, *report_of_torchrun) == failed
    assert message("2 processes", notice, "RuntimeError: mine") == "2 processes\nRuntimeError: mine"
    assert message(notice) == notice


def test_a_term_that_only_one_of_two_runs_logs_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_compared", lambda *_: {})
    more = outcome(4)
    for line in more.losses.values():
        cast(dict[str, float], line)["loss_prior"] = 0.5
    for name, run in (("accumulation", "accumulated"), ("repeat", "again")):
        assert finding(name, **{run: outcome(4)}).verdict == "ok"
        assert finding(name, **{run: more}).verdict == finding(name, reference=more, **{run: outcome(4)}).verdict
        assert finding(name, **{run: more}).verdict == "FAILED"


def test_a_value_that_is_not_finite_hides_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_compared", lambda *_: {})

    def losses(*values: float) -> Outcome:
        found = outcome(4)
        for step, value in enumerate(values, start=1):
            cast(dict[str, float], found.losses[step])["loss"] = value
        return found

    for values in ([1.0, 1.0, math.inf, 1.0], [1.0, 1.0, math.nan, 1.0]):
        assert finding("accumulation", reference=losses(*values), accumulated=losses(*values)).verdict == "ok"
        # A reference with an infinite value has no infinite scale.
        other = losses(2.0, *values[1:])
        assert finding("accumulation", reference=losses(*values), accumulated=other).verdict == "FAILED"


def test_a_clipped_norm_that_is_not_a_number_fails_in_any_step() -> None:
    good = outcome(4, clipped_norms=[1.0] * 4)
    for step in range(4):
        norms = [1.0] * 4
        norms[step] = math.nan
        found = finding("clip", reference=good, two_processes=outcome(4, clipped_norms=norms))
        assert found.verdict == "FAILED"
        assert f"step {step + 1}, two_processes: nan, expected 1" in found.reason
    assert finding("clip", reference=good, two_processes=good).verdict == "ok"


def test_an_interrupted_verification_compares_the_finished_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(runner: Runner, spec: Spec) -> Outcome:
        if spec.name != "again":
            return outcome(4)
        runner.stop()  # the signal comes in here, and ends the other run
        raise InterruptedRunError("SIGTERM")

    monkeypatch.setattr(Runner, "run", run)
    words = ["verify", "--json", "--steps", "4", "--only", "repeat,gradient_paths", str(faults.SCAFFOLD)]
    assert cli._main(words) == 1
    printed = capsys.readouterr()
    assert "interrupted by SIGTERM: the runs are stopped, and only finished ones are compared" in printed.err
    checks = {found["check"]: found for found in json.loads(printed.out[printed.out.index("{\n") :])["checks"]}
    assert checks["gradient_paths"]["verdict"] == "ok"
    assert (checks["repeat"]["verdict"], checks["repeat"]["reason"]) == ("not checked", "interrupted")


def test_a_run_that_the_stop_ends_is_no_failed_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(runner: Runner, spec: Spec) -> Outcome:
        if spec.name != "again":
            return outcome(4)
        runner.stop()
        return replace(outcome(4), code=-9)

    monkeypatch.setattr(Runner, "run", run)
    # Behind the recipe as well as before it.
    cli._main(["verify", "--steps", "4", str(faults.SCAFFOLD), "--only", "repeat"])
    printed = capsys.readouterr()
    assert "again: stopped in" in printed.err
    assert "exit code -9" not in printed.err + printed.out


def test_what_deepspeed_may_compile_for_is_said_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    refused = replace(outcome(4), code=2)
    one_process = ("reference", "probe")
    monkeypatch.setattr(Runner, "run", lambda _, spec: outcome(4) if spec.name in one_process else refused)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    for kind, named in (("MULTI_GPU", {"zero2"}), ("DEEPSPEED", {"zero2", "launch_file"})):
        file = tmp_path / f"{kind}.yaml"
        file.write_text(f"distributed_type: {kind}\nnum_machines: 1\nnum_processes: 2\n")
        words = ["--steps", "4", "--only", "two_processes,zero2,launch_file", "--config_file", str(file)]
        assert cli._main(["verify", *words, str(faults.SCAFFOLD)]) == 0
        said = capsys.readouterr().err
        assert set(re.findall(r"^(\w+): DeepSpeed first compiles", said, re.MULTILINE)) == named


def test_a_gradient_that_is_never_reduced_fails() -> None:
    assert finding("reductions", two_processes=outcome(4, reduced=[1.0] * 4)).verdict == "ok"
    assert finding("reductions", two_processes=outcome(4, reduced=[0.0] * 4)).verdict == "FAILED"
    assert finding("reductions", two_processes=outcome(4)).verdict == "not checked"


@pytest.mark.parametrize(
    ("asked", "arguments", "batch", "even", "ragged"),
    [
        (64, (), 15, 5, 4),
        (8, (), 7, 1, 2),
        (4, (), 3, 1, 2),
        (1, (), 3, 1, 2),
        (16, ("--global_batch_size", "16"), 16, 8, 6),
        (2, ("--global_batch_size=2",), 2, 1, None),
        (4, ("--global-batch-size", "4"), 4, 2, None),
        (1, ("--global_batch_size", "1"), 1, None, None),
    ],
)
def test_sizes(asked: int, arguments: Sequence[str], batch: int, even: int | None, ragged: int | None) -> None:
    """Micro-batches are equal with the even size, differ with the ragged one, and two processes share unequally."""
    sizes = plan.choose_sizes({"global_batch_size": asked}, arguments, 6)
    assert (sizes.batch, sizes.even, sizes.ragged) == (batch, even, ragged)
    divided = {
        size: {len(part) for part in StepSampler(100, batch, 0).micro_batches(0, 0, 1, size)}
        for size in (even, ragged)
        if size is not None
    }
    assert even is None or len(divided[even]) == 1
    assert ragged is None or len(divided[ragged]) == 2


@pytest.mark.parametrize(
    ("asked", "arguments", "batch"), [(64, (), 14), (3, (), 2), (1, (), 2), (4, ("--global_batch_size=4",), 4)]
)
def test_whole_sizes(asked: int, arguments: Sequence[str], batch: int) -> None:
    sizes = plan.choose_whole_sizes({"global_batch_size": asked}, arguments, 6)
    assert (sizes.batch, sizes.on_layouts) == (batch, batch)
    assert not {"accumulated", "ragged"} & set(plan.all_specs(sizes, None))


def test_an_odd_batch_has_no_two_equal_shares() -> None:
    with pytest.raises(UsageError, match="global_batch_size: 5 with --one_micro_batch: an even number is required"):
        plan.choose_whole_sizes({"global_batch_size": 5}, ("--global_batch_size", "5"), 6)


GATHERED = """gathered = logits
    first = 0
    if torch.distributed.is_initialized():
        from torch.distributed.nn.functional import all_gather

        gathered = torch.cat(all_gather(logits))
        first = torch.distributed.get_rank() * len(logits)
    partner = first + torch.arange(len(logits))
    loss = nn.functional.cross_entropy(logits @ gathered.T, partner, reduction="none")"""


def test_negatives_of_all_processes_pass_with_one_micro_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As docs/recipes.md says of contrastive losses. Without the gathering, the same check fails."""
    recipe = faults.write(tmp_path / "recipe", "negatives from the batch")
    text = recipe.read_text()
    assert text.count(faults.NEGATIVES) == 1
    words = ["--only", "accumulation,two_processes", "--steps", "4", "--one_micro_batch", str(recipe)]
    assert failed(verify(capsys, *words)[1]) == {"two_processes"}
    recipe.write_text(text.replace(faults.NEGATIVES, GATHERED))
    code, results = verify(capsys, *words)
    assert code == 0, results
    assert results["two_processes"]["verdict"] == "ok"
    assert "--one_micro_batch leaves the batch of a process whole" in results["accumulation"]["reason"]


def test_the_page_describes_every_check() -> None:
    page = (Path(__file__).parents[2] / "docs" / "verify.md").read_text()
    table = page.partition("| Check |")[2]
    for check in CHECKS:
        assert f"`{check.name}`" in table, check.name


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


STAGES = ("--objective.autoencode_steps", "6", "--objective.residual_from", "14", "--objective.residual_steps", "1")
SHIPPED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mmdit": ((), ()),
    # Three stages, of two tasks, each behind layers that begin at 0: a gradient reaches the last parameter late.
    "pde": (("--steps", "24"), STAGES),
    "causal_lm": ((), ()),
    "lora": ((), ()),
}


@pytest.mark.slow  # the same recipes on the same layouts, compared by test_invariance.py; here, that no check alarms
@pytest.mark.parametrize("recipe", SHIPPED)
def test_no_alarm_on_the_recipes_of_the_project(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    length, stages = SHIPPED[recipe]
    code, results = verify(capsys, *length, recipe, *flags_of(recipe, tmp_path), *stages)
    assert not failed(results), results
    unchecked = {name for name, result in results.items() if result["verdict"] == "not checked"}
    assert unchecked <= {"zero2"}
    assert code == 0


VALUES = {"None": None, "min": "min", "max": "max"}


@pytest.mark.parametrize(
    ("saved", "flags"),
    [
        ({"keep_last": 0, "keep_state_last": 10}, []),
        ({"keep_last": 3, "keep_best": 2, "best_metric": "loss", "best_mode": "max"}, []),
        ({"best_metric": "loss"}, ["--checkpoints.best_mode", "max"]),
    ],
    ids=str,
)
def test_retention_of_the_users_own_is_replaced_as_a_whole(saved: dict[str, Any], flags: list[str]) -> None:
    """The flags of every run beside any that a preset has: none of them leaves another without effect."""
    options = {"schedule.kind": "constant", "schedule.floor": 0.0}
    made = plan.common_flags(options, flags, plan.choose_sizes({"global_batch_size": 8}, flags, 6))
    given = dict(zip([word.removeprefix("--") for word in flags[::2]], flags[1::2], strict=True))
    wanted = given | made
    values = saved | {
        name.removeprefix("checkpoints."): VALUES[text] if text in VALUES else int(text)
        for name, text in wanted.items()
        if name.startswith("checkpoints.")
    }
    assert CheckpointConfig(**values).keep_last == 9

"""The recipe that ``accel-train init --scaffold`` begins: short, and its trajectory is that of any other recipe."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accel_train import cli
from accel_train.config import UsageError
from accel_train.metrics.records import read_metrics
from accel_train.store.manifest import MANIFEST, checkpoint_name
from tests import zygote
from tests.distributed.launching import ROOT, environment

SCAFFOLD = ROOT / "recipes" / "scaffold" / "recipe.py"
SHORT = ["--log.log_every", "1", "--schedule.warmup_steps", "2", "--schedule.decay_steps", "6"]


@pytest.fixture
def begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A directory as `accel-train init` leaves it."""
    folder = tmp_path / "my recipe"
    assert cli._main(["init", str(folder), "--scaffold"]) == 0
    assert "accelerate launch recipe.py --smoke" in capsys.readouterr().out
    return folder


def run(folder: Path, *command: str) -> str:
    done = zygote.run([sys.executable, *command], cwd=folder, env=environment(PYTHONPATH=str(ROOT)), apart=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def logged(folder: Path, name: str, key: str) -> list[float]:
    lines = read_metrics(folder / "runs" / name / "metrics.jsonl")
    return [line[key] for line in lines if line["event"] == "train"]


def losses(folder: Path, name: str) -> list[float]:
    return logged(folder, name, "loss")


def test_it_is_short_and_says_what_to_change(begun: Path) -> None:
    text = (begun / "recipe.py").read_text()
    assert text == SCAFFOLD.read_text()
    assert len(text.splitlines()) <= 130
    assert text.count("CHANGE") >= 5
    files = {str(path.relative_to(begun)) for path in begun.rglob("*") if path.is_file()}
    assert {"recipe.py", "presets/demo.yaml", "accelerate_configs/ddp.yaml"} <= files


def test_it_passes_the_checks_of_the_project(begun: Path) -> None:
    for command in (["check"], ["format", "--check"]):
        words = ["ruff", *command, "--config", str(ROOT / "pyproject.toml"), str(begun / "recipe.py")]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_recipe_and_a_scaffold_are_refused_together(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli._main(["init", "x", "--scaffold", "--recipe", "pde"])
    assert "not allowed with" in capsys.readouterr().err


STABLE = """
experiment loop preparation rng startup config.PositiveInt data.datasets data.sampler metrics.records
metrics.evaluation.EvaluationConfig
options.loading.load_config
runtime.exiting.one_run runtime.exiting.run_main store.run_file.experiment_options store.weights.best_stem
store.weights.load_weights training.optimizers
"""
"""What recipes of users import. A name that moves needs a line in CHANGELOG.md that says what to write instead."""


def test_what_recipes_import_stays_where_it_is() -> None:
    example = (
        (ROOT / "docs" / "recipes.md")
        .read_text()
        .split("`train.py`, adds", 1)[1]
        .split("```python\n")[1]
        .split("```")[0]
    )
    imported: set[str] = set()
    for text in (SCAFFOLD.read_text(), example):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("accel_train"):
                module = str(node.module).removeprefix("accel_train").lstrip(".")
                imported |= {f"{module}.{alias.name}".lstrip(".") for alias in node.names}
    assert imported == set(STABLE.split())


def test_the_page_lists_what_stays_where_it_is() -> None:
    section = (ROOT / "docs" / "recipes.md").read_text().split("### What stays where it is")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)} == set(STABLE.split())


@pytest.mark.distributed
def test_two_processes_train_as_one_does_and_micro_batches_change_nothing(begun: Path) -> None:
    flags = [*SHORT, "--max_steps", "6"]
    two = begun / "two.yaml"
    two.write_text("num_machines: 1\nnum_processes: 2\ndistributed_type: MULTI_GPU\n")
    rehearse = ["-m", "accel_train.cli", "rehearse", "--config_file", str(two)]
    # With a metric of its own beside the loss.
    text = (begun / "recipe.py").read_text()
    loss = 'metrics_of(prepared.model, batch)["loss"] * batch["weight"]'
    assert text.count(loss) == 1
    own = 'metrics_of(prepared.model, batch)["accuracy"] * batch["weight"]'
    (begun / "measuring.py").write_text(text.replace(loss, f'{loss}, metrics={{"accuracy": {own}}}'))
    run(begun, "measuring.py", *flags, "--output_dir", "runs/one")
    run(begun, *rehearse, "measuring.py", *flags, "--output_dir", "runs/two", "--micro_batch_size", "12")
    assert len(losses(begun, "one")) == 6
    assert losses(begun, "two") == pytest.approx(losses(begun, "one"), rel=1e-6)
    accuracies = [logged(begun, name, "train_accuracy") for name in ("one", "two")]
    assert 0 < max(accuracies[0]) <= 1
    # Counts are exact, and so is their quotient.
    assert accuracies[0] == accuracies[1]


@pytest.mark.distributed
def test_a_layer_that_the_forward_skips_trains_with_a_static_graph_alone(begun: Path) -> None:
    """torch's DDP then waits for no gradient of it; without the option the next forward would fail."""
    text = (begun / "recipe.py").read_text()
    body = "class RingModel(nn.Sequential):\n"
    assert text.count(body) == 1
    body += "    def forward(self, x: Tensor) -> Tensor:\n        return nn.Sequential(*list(self)[:-1])(x)\n\n"
    text = text.replace("class RingModel(nn.Sequential):\n", body)
    assert text.count("nn.Linear(width, 5))") == 1
    (begun / "skipping.py").write_text(text.replace("nn.Linear(width, 5))", "nn.Linear(width, 5), nn.Linear(3, 3))"))
    (begun / "two.yaml").write_text("num_machines: 1\nnum_processes: 2\ndistributed_type: MULTI_GPU\n")
    flags = [*SHORT, "--max_steps", "4", "--global_batch_size", "16", "--micro_batch_size", "8"]
    rehearse = ["-m", "accel_train.cli", "rehearse", "--config_file", "two.yaml", "skipping.py", *flags]
    printed = run(begun, *rehearse, "--distributed.static_graph", "--output_dir", "runs/static")
    finding = "step 1: no gradient for 2 trained parameter(s) (5.weight, 5.bias)"
    assert printed.count(finding) == 1
    assert f"{finding}: they do not train in this step" in printed
    assert len(losses(begun, "static")) == 4
    words = [sys.executable, *rehearse, "--output_dir", "runs/refused"]
    done = zygote.run(words, cwd=begun, env=environment(PYTHONPATH=str(ROOT)), apart=True)
    assert done.returncode == 1
    refused = done.stdout + done.stderr
    assert f"{finding}, and DDP requires one for each in every step" in refused
    assert "if no step uses them and a step is one micro-batch, give --distributed.static_graph" in refused


@pytest.mark.distributed
def test_a_loss_that_forgets_the_weight_is_refused_where_it_matters(begun: Path) -> None:
    text = (begun / "recipe.py").read_text()
    assert text.count(' * batch["weight"])') == 1
    (begun / "forgetful.py").write_text(text.replace(' * batch["weight"])', ")"))
    two = begun / "two.yaml"
    two.write_text("num_machines: 1\nnum_processes: 2\ndistributed_type: MULTI_GPU\n")
    flags = [*SHORT, "--max_steps", "2", "--global_batch_size", "63", "--output_dir", "runs/forgetful"]
    words = [sys.executable, "-m", "accel_train.cli", "rehearse", "--config_file", str(two), "forgetful.py", *flags]
    done = zygote.run(words, cwd=begun, env=environment(PYTHONPATH=str(ROOT)), apart=True)
    assert done.returncode == 2, done.stdout + done.stderr
    # The second process has 31 samples, and repeats one of them.
    assert "1 sample(s) of this step have weight 0, but their loss is not 0" in done.stdout + done.stderr


def test_the_option_of_evaluations_is_one_line(begun: Path) -> None:
    text = (begun / "recipe.py").read_text()
    fixed, width = "if batches.done % 100 == 0 or batches.done == opened.max_steps:", "    width: PositiveInt"
    assert (text.count(fixed), text.count(width)) == (1, 1)
    option = "    evaluation: EvaluationConfig = EvaluationConfig(every=100)\n"
    text = text.replace(
        "from accel_train.options",
        "from accel_train.metrics.evaluation import EvaluationConfig\nfrom accel_train.options",
    )
    text = text.replace(fixed, "if config.evaluation.due(batches.done, opened.max_steps):").replace(
        width, option + width
    )
    (begun / "evaluating.py").write_text(text)
    flags = [*SHORT, "--max_steps", "5", "--evaluation.every", "2", "--output_dir", "runs/evaluating"]
    run(begun, "evaluating.py", *flags)
    lines = read_metrics(begun / "runs" / "evaluating" / "metrics.jsonl")
    assert [line["step"] for line in lines if line["event"] == "evaluation"] == [2, 4, 5]


SAMPLER = "sampler.StepSampler(len(data), config.global_batch_size, config.seed)"
SECOND = "second = torch.optim.SGD(prepared.model.parameters(), lr=0.1)"
LOOP = "    with loop.training("
STEP = "            optimizer.step()\n"
SAVE = "            training.save_if_due(result)\n"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("right", "wrong", "code", "words"),
    [
        (SAMPLER, SAMPLER.replace("config.global_batch_size", "32"), 2, "has 32 samples in step 1, and 64"),
        ("dataset_size=len(data)", "dataset_size=1000", 2, "dataset_size: 1000: the dataset given to loop.training"),
        ("training.evaluate(evaluate)", "training.evaluate(evaluate())", 2, "it was given a dict: pass the function"),
        ("training.evaluate(evaluate)", "training.evaluate(lambda: None)", 2, "it returned None: return one"),
        (SAVE, f"{SAVE}            break\n", 1, "step 1: the loop over training was left before its last step, 2"),
        (SAVE, SAVE.replace("result", "batches.done"), 2, "save_if_due(result): int: this type is not accepted"),
        ("report(batches, result)", "report(result, batches)", 2, "result): StepResult: this type is not accepted"),
        ("return loop.finish(training)", "loop.finish(training)", 2, "main returned None, and the exit code of"),
        ("return loop.finish(training)", "return 0", 2, "main returned 0, and the exit code of loop.finish"),
        (
            "report(batches, result)",
            "report(batches, result, loss=3)",
            2,
            "training.report(..., loss=...): training lines",
        ),
        (
            "in batches.micro_batches]",
            "in batches.micro_batches * 2]",
            1,
            "given 2 micro-batches, and the step has 1",
        ),
        ("ema.update(batches.step)", "ema.update(0)", 1, "update(0) was called instead of prepared.ema.update(1)"),
        (STEP, f"{STEP}            second.step()\n", 1, "a second optimizer, a SGD, steps parameters"),
    ],
)
def test_mistakes_of_a_loop_are_refused(begun: Path, right: str, wrong: str, code: int, words: str) -> None:
    text = (begun / "recipe.py").read_text()
    if "second" in wrong:
        text = text.replace(LOOP, f"    {SECOND}\n{LOOP}")
    assert text.count(right) == 1
    (begun / "mistaken.py").write_text(text.replace(right, wrong))
    flags = [*SHORT, "--max_steps", "2", "--output_dir", "runs/mistaken"]
    command = [sys.executable, "mistaken.py", *flags]
    done = zygote.run(command, cwd=begun, env=environment(PYTHONPATH=str(ROOT)), apart=True)
    printed = done.stdout + done.stderr
    assert done.returncode == code, printed
    assert words in printed
    assert ("Traceback" in printed) == (code == 1)
    if "evaluate" in right or "finish" in right:
        assert (begun / "runs" / "mistaken" / "checkpoints" / checkpoint_name(2)).is_dir()


def test_a_break_after_an_early_end_has_saved_its_step(begun: Path) -> None:
    text = (begun / "recipe.py").read_text()
    assert text.count(SAVE) == 1
    (begun / "ending.py").write_text(text.replace(SAVE, f"{SAVE}            training.end()\n            break\n"))
    printed = run(begun, "ending.py", *SHORT, "--max_steps", "6", "--output_dir", "runs/ending")
    assert f"holds checkpoints/{checkpoint_name(1)}" in printed
    assert (begun / "runs" / "ending" / "checkpoints" / checkpoint_name(1)).is_dir()
    assert read_metrics(begun / "runs" / "ending" / "metrics.jsonl")[-1]["reason"] == "finished"


def test_a_mistyped_best_metric_is_refused_at_the_start(begun: Path) -> None:
    best = ["--checkpoints.keep_best", "1", "--checkpoints.best_metric", "heldout_acuracy"]
    words = [sys.executable, "recipe.py", *SHORT, "--max_steps", "6", *best, "--output_dir", "runs/one"]
    done = zygote.run(words, cwd=begun, env=environment(PYTHONPATH=str(ROOT)), apart=True)
    assert done.returncode == 2
    assert "did you mean 'heldout_accuracy'?" in done.stdout + done.stderr
    assert not (begun / "runs" / "one" / "run.json").exists()


@pytest.mark.distributed
def test_a_resume_goes_on_bit_for_bit(begun: Path) -> None:
    """The manifest has the hash of every file, of weights, averages and optimizer alike."""
    run(begun, "recipe.py", *SHORT, "--max_steps", "6", "--output_dir", "runs/whole")
    for steps in ("4", "6"):
        run(begun, "recipe.py", *SHORT, "--max_steps", steps, "--output_dir", "runs/parts")
    assert losses(begun, "parts") == losses(begun, "whole")
    assert len(losses(begun, "whole")) == 6

    def hashes(name: str) -> dict[str, str]:
        path = begun / "runs" / name / "checkpoints" / checkpoint_name(6) / MANIFEST
        files = json.loads(path.read_text())["files"]
        return {file: entry["sha256"] for file, entry in files.items() if file.endswith(".safetensors")}

    assert hashes("parts") == hashes("whole")
    assert len(hashes("whole")) >= 2


@pytest.mark.distributed
def test_a_run_of_it_is_sampled_with_its_own_pipeline(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without it, the error names what is missing and the page."""
    run(begun, "recipe.py", *SHORT, "--max_steps", "2")
    page = r'docs/use\.md, "A pipeline for a recipe of your own"'
    recipe, place = begun / "recipe.py", str(begun / "runs" / "rings")
    with pytest.raises(
        UsageError,
        match=rf"no config\.json.* load\(place, pipeline=MyPipeline\).*sample --recipe FILE {re.escape(place)}.*{page}",
    ):
        cli._main(["sample", place])
    capsys.readouterr()
    assert cli._main(["sample", "--recipe", str(recipe), place, "--place", "0.1", "0.2"]) == 0
    answer = capsys.readouterr().out
    assert re.fullmatch(r"ring [0-4]\n", answer)
    exported = str(begun / "exported")
    assert cli._main(["export", place, exported, "--weights", "ema"]) == 0
    assert "are made only for pipelines of this package; weights and options are complete" in capsys.readouterr().out
    assert cli._main(["sample", "--recipe", str(recipe), exported, "--place", "0.1", "0.2"]) == 0
    assert capsys.readouterr().out == answer

    recipe.write_text(recipe.read_text().replace('["width"]', '["depth"]'))
    missing = r"its run had no option 'depth'.*options\.get\('depth', VALUE\)"
    with pytest.raises(UsageError, match=rf"manifest\.json: {missing}"):
        cli._main(["sample", "--recipe", str(recipe), place])
    with pytest.raises(UsageError, match=rf"experiment\.json: {missing}"):
        cli._main(["sample", "--recipe", str(recipe), exported])

    recipe.write_text(recipe.read_text().replace("pipeline=RingPipeline", ""))
    with pytest.raises(UsageError, match=rf"declares no pipeline.*{page}"):
        cli._main(["sample", "--recipe", str(recipe), place])


@pytest.mark.distributed
def test_it_learns_in_some_hundred_steps_and_can_be_tried_in_two(begun: Path) -> None:
    assert "step 2/2" in run(begun, "recipe.py", "--smoke")
    run(begun, "recipe.py")
    metrics = json.loads((begun / "runs" / "rings" / "report" / "evaluation.json").read_text())
    assert metrics["step"] == 300
    assert metrics["heldout_accuracy"] > 0.9  # of five rings

"""Every launch preset for real (multi_node: test_two_hosts.py), and what a finished run offers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from accel_train.domains.text import modes
from tests.distributed.launching import PRESETS, RECIPE, ROOT, SMALL, Layout, environment, run_recipe
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.distributed
NAMES = sorted(p.stem for p in PRESETS.glob("*.yaml"))


def test_the_presets_are_these() -> None:
    assert NAMES == ["ddp", "fsdp2", "fsdp2_offload", "multi_node", "single_gpu", "zero2_offload", "zero3_offload"]


@pytest.mark.slow  # every other run of these tests is a rehearsal of its own launch file
@pytest.mark.parametrize("name", [n for n in NAMES if n != "multi_node"])
def test_every_preset_trains_in_rehearsal(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accel_train.cli", "rehearse", "--config_file", str(PRESETS / f"{name}.yaml")]
    command += ["--num_processes", "1" if name == "single_gpu" else "2", str(RECIPE), "demo", *SMALL]
    command += ["--max_steps", "20", "--global_batch_size", "4", "--output_dir", str(tmp_path / "run")]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"REHEARSAL of {PRESETS / name}.yaml" in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "checkpoint_00000020" / "manifest.json").exists()


FILES = ["report/curves.png", "report/evaluation.json", "report/samples.md"]


@pytest.mark.slow  # tests/test_docs.py evaluates a finished run
def test_a_finished_run_says_so_goes_on_and_evaluates_alone(tmp_path: Path) -> None:
    one = Layout("single", 1)
    run = run_recipe(one, tmp_path / "run", "--max_steps", "20")
    for name in ("config.yaml", "metrics.jsonl", "logs/rank_0.log", *FILES):
        assert (run.directory / name).stat().st_size > 0, name
    figures = json.loads((run.directory / "report" / "evaluation.json").read_text())
    assert {"l2t_nll", "l2t_nll_shuffled", "t2l_cosine", "t2l_cosine_shuffled"} <= figures.keys()

    assert {"checkpoints/checkpoint_00000020", *FILES} <= set(held(run.output))
    assert {line["mode"] for line in run.train_lines().values()} == set(modes.MODES)
    again = run_recipe(one, tmp_path / "run", "--max_steps", "20")
    assert "the run is finished: step 20 of 20; raise --max_steps" in again.output
    assert "evaluation.json" not in again.output
    further = run_recipe(one, tmp_path / "run", "--max_steps", "22")
    assert sorted(further.train_lines()) == list(range(1, 23))
    assert further.train_lines()[22]["lr"] == 0  # past the schedule's own end it holds its floor

    (run.directory / "report" / "evaluation.json").unlink()
    assert "report has no evaluation.json" in run_recipe(one, tmp_path / "run", "--max_steps", "22").output
    lines = (run.directory / "metrics.jsonl").read_bytes()
    alone = subprocess.run(
        [sys.executable, str(RECIPE), str(run.directory / "config.yaml"), "--evaluate_only"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert alone.returncode == 0, alone.stderr
    assert json.loads((run.directory / "report" / "evaluation.json").read_text())["step"] == 22
    assert (run.directory / "metrics.jsonl").read_bytes() == lines


def held(output: str) -> list[str]:
    """What a finished run says that its directory holds."""
    (line,) = [line for line in output.splitlines() if "finished: " in line]
    return line.partition(" holds ")[2].split(", ")


@pytest.mark.slow
def test_a_run_that_stopped_getting_better_does_not_go_on_unless_it_is_given_more_patience(tmp_path: Path) -> None:
    plain = ("--objective.residual_from", "None", "--objective.residual_steps", "1", "--model.residual_depth", "0")
    # Every evaluation of these weights gives the same bits, and counts from the first step.
    constant = ("--optimizer.lr", "1e-30", "--ema.decay", "0", "--objective.autoencode_steps", "0")
    flags = (*plain, *constant, "--max_steps", "12", "--evaluation.every", "2")
    one, two = Layout("single", 1, "pde"), Layout("ddp", 2, "pde")
    flags += ("--checkpoints.best_metric", "mean_nrmse", "--checkpoints.patience")
    first = run_recipe(one, tmp_path / "run", *flags, "1")
    assert "no better mean_nrmse for 1 evaluations: the run ends" in first.output
    assert max(first.train_lines()) == 4
    again = run_recipe(two, tmp_path / "run", *flags, "1")
    assert "the run has ended at step 4: no better mean_nrmse for 1 evaluations" in again.output
    assert max(again.train_lines()) == 4
    assert max(run_recipe(two, tmp_path / "run", *flags, "2").train_lines()) == 6


SAMPLE = """
import sys, torch
from pathlib import Path
from accel_train.domains.text.dataset import load_assets
from accel_train.domains.models.mmdit import MultimodalMMDiT
checkpoint = Path(sys.argv[1])
model = MultimodalMMDiT.from_pretrained(checkpoint)
assets = load_assets(checkpoint / "assets")
batch = assets.tokenise(["To be, or not to be: that is the question."])
latent = assets.encode(["To be, or not to be: that is the question."])
out = model(batch["tokens"], latent, torch.ones(1), torch.zeros(1), batch["text_mask"])
assert out.text_logits.shape[:2] == batch["tokens"].shape, out.text_logits.shape
assert "accel_train.training" not in sys.modules and "accelerate" not in sys.modules
print("sampled", assets.tokenizer.decode(out.text_logits.argmax(-1)[0]))
"""


@pytest.mark.slow  # test_docs.py samples from a checkpoint and from its export
def test_a_checkpoint_is_enough_to_sample_in_another_process(tmp_path: Path) -> None:
    run = run_recipe(Layout("ddp", 2), tmp_path / "run", "--max_steps", "20")
    moved = tmp_path / "elsewhere"
    run.checkpoint(20).rename(moved)
    done = subprocess.run(
        [sys.executable, "-c", SAMPLE, str(moved)], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "sampled" in done.stdout


@pytest.mark.slow
def test_phases_with_a_frozen_part_are_the_same_on_two_processes(tmp_path: Path) -> None:
    phases = ("--modes.mode", "sequential", "--modes.phases", "mixed:12", "t2l:8:freeze=text", "--max_steps", "20")
    one = run_recipe(Layout("single", 1), tmp_path / "one" / "run", *phases, "--checkpoints.save_every", "12")
    two = run_recipe(Layout("fsdp2", 2), tmp_path / "two" / "run", *phases)
    assert two.losses() == pytest.approx(one.losses(), rel=1e-5)
    before, after = one.tensors(12, "model"), one.tensors(20, "model")
    moved = {name for name in after if not before[name].equal(after[name])}
    assert "token_embedding.weight" not in moved
    assert "text_head.weight" not in moved
    assert "latent_head.project.weight" in moved


@pytest.mark.slow
def test_weights_of_another_run_can_be_the_start(tmp_path: Path) -> None:
    first = run_recipe(Layout("single", 1), tmp_path / "first" / "run", "--max_steps", "20")
    flags = ("--max_steps", "20", "--init_from", str(first.directory))
    second = run_recipe(Layout("single", 1), tmp_path / "second" / "run", *flags)
    assert second.losses()[0] < first.losses()[0] - 0.5
    wrong = run_recipe(Layout("single", 1), tmp_path / "third" / "run", *flags, "--model.width", "96", ok=False)
    assert wrong.code == 2
    assert "the weights do not fit this model" in wrong.output

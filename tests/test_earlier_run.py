"""A run of an earlier version, from before positions on a grid and densities of times: it loads and continues."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

import accel_train
from accel_train.metrics.records import read_metrics
from tests import zygote
from tests.distributed.launching import ROOT, environment
from tests.trained import EARLIER

RESUMABLE = EARLIER / "mmdit-resumable"
"""Step 3 of 6, its corpus, and the losses of steps 4 to 6 that the version which wrote it had without a stop."""
ADDED_SINCE = ("pictures", "times")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(RESUMABLE, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_its_checkpoint_knows_none_of_the_options_added_since() -> None:
    checkpoint = RESUMABLE / "run" / "checkpoints" / "checkpoint_00000003"
    experiment = json.loads((checkpoint / "manifest.json").read_text())["experiment"]
    assert "latent.kind" in experiment
    assert not [name for name in experiment if name.startswith(ADDED_SINCE) or name == "evaluation.latent.shift"]
    assert "latent_grid" not in json.loads((checkpoint / "config.json").read_text())


def test_it_loads_and_samples(folder: Path) -> None:
    pipeline = accel_train.load(folder / "run")
    assert pipeline.both.latent.shift == 1
    answer = pipeline("to be or not to be")
    assert answer.latents.shape == (1, 1, 4)
    assert answer.latents.isfinite().all()


def test_it_goes_on_with_the_losses_of_the_version_that_wrote_it(folder: Path) -> None:
    words = [str(ROOT / "recipes" / "mmdit.py"), "run/config.yaml", "--resume", "must"]
    done = zygote.run([sys.executable, *words], env=environment(PYTHONPATH=str(ROOT)), cwd=folder)
    assert done.returncode == 0, done.stdout[-4000:]
    lines = [line for line in read_metrics(folder / "run" / "metrics.jsonl") if line["event"] == "train"]
    losses = {str(line["step"]): line["loss"] for line in lines}
    assert losses == pytest.approx(json.loads((RESUMABLE / "losses.json").read_text()), rel=1e-6)

"""Bases on the Hub, whose branch moves on between a start and what is done with its run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_train.store import commit
from tests.distributed.launching import ROOT
from tests.domains.images import tiny_pipelines
from tests.domains.images.test_lora_recipe import pictures, settings
from tests.domains.language import tiny
from tests.hub_server import HubServer, serving
from tests.waiting import PATIENCE_SECONDS

pytest.importorskip("diffusers")
pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")]
# Children with the Hub's address take a quarter of a minute each; the rules are tested in one process every day.
REPOSITORY = "me/tiny"


def push(folder: Path, server: HubServer) -> str:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=server.url)
    api.create_repo(REPOSITORY, exist_ok=True)
    return str(api.upload_folder(repo_id=REPOSITORY, folder_path=folder).oid)


def call(*words: object) -> str:
    command = [sys.executable, *map(str, words)]
    given = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def commit_of(run: Path, step: int) -> str:
    return commit.verify(run / "checkpoints" / f"checkpoint_{step:08d}").manifest["base"]["revision"]


def test_a_run_on_a_pipeline_stays_at_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_pipelines.save("sd1", tmp_path / "base")
    pictures(tmp_path / "photos")
    file, run = settings(tmp_path, "sd1"), tmp_path / "run"
    words = ["recipes/lora.py", file, "--base.source", REPOSITORY, "--output_dir", run]
    with serving(monkeypatch, tmp_path / "home") as server:
        first = push(base, server)
        call(*words, "--max_steps", "2")
        edit(base / "scheduler" / "scheduler_config.json", beta_end=0.02)
        second = push(base, server)
        call(*words, "--max_steps", "4")
        call("-m", "accel_train.cli", "sample", run, "--prompt", "a cat", "--output", tmp_path / "drawn")
        call("-m", "accel_train.cli", "export", run, tmp_path / "merged", "--merged")
    assert first != second
    assert commit_of(run, 2) == commit_of(run, 4) == first
    assert list((tmp_path / "drawn").glob("*.png"))
    assert json.loads((tmp_path / "merged" / "scheduler" / "scheduler_config.json").read_text())["beta_end"] != 0.02


def test_adapters_on_a_language_model_stay_at_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny.save(tmp_path / "model")
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(f"{text} {number}" for number in range(12) for text in tiny.TEXTS))
    run = tmp_path / "run"
    words = f"recipes/causal_lm.py causal_lm_tune --model.source {REPOSITORY} --lora.rank 2 --data.path {texts} "
    words += "--data.max_length 32 --global_batch_size 4 --micro_batch_size 4 --precision fp32 --evaluation.samples 2 "
    words += "--schedule.kind constant --schedule.floor 0 --schedule.warmup_steps 0 --checkpoints.save_every 0 "
    words += f"--output_dir {run}"
    with serving(monkeypatch, tmp_path / "home") as server:
        first = push(base, server)
        call(*words.split(), "--max_steps", "2")
        edit(base / "config.json", rms_norm_eps=1e-3)
        push(base, server)
        call(*words.split(), "--max_steps", "4")
        assert call("-m", "accel_train.cli", "sample", run, "--text", "Stand")
    assert commit_of(run, 2) == commit_of(run, 4) == first

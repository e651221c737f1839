"""Recorded runs of the demos, trees to compare, and one-ulp faults planted in them."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from accel_train.compare.runs import RunFailedError
from accel_train.config import UsageError
from accel_train.rerun import training
from accel_train.store import commit, manifest
from tests import zygote
from tests.distributed.launching import Finished, Layout, environment, run_recipe

TINY = {
    "mmdit": "--model.width 32 --model.depth 1 --model.heads 2 --global_batch_size 4 --micro_batch_size 4".split(),
    "pde": "--schedule.warmup_steps 2 --objective.autoencode_steps 3 --objective.residual_from 8".split(),
}
"""Smaller still than the demos of other tests, whose losses matter there and not here."""
GROWING = (
    "--batch_schedule.noise_factor 0.02 --batch_schedule.max_size 12 "
    "--batch_schedule.noise_steps 3 --batch_schedule.noise_every 3"
).split()
"""Flags with which the batch of the tiny ``mmdit`` is 4 for three steps, 8 for three and 12 from then on."""
LAUNCH = [sys.executable, "-m", "accel_train.cli", "launch"]


def record(recipe: str, directory: Path, *flags: str) -> Finished:
    """Train 12 steps, with a checkpoint every 4 and all of them kept."""
    saves = ("--checkpoints.save_every", "4", "--checkpoints.keep_last", "0")
    return run_recipe(Layout("single", 1, recipe), directory, *TINY[recipe], "--max_steps", "12", *saves, *flags)


def fork_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have replays and branches train in forked processes (``tests.zygote``), with no change but the time."""

    def run(
        command: Sequence[str], log: Path, *, environment: Mapping[str, str], save_seconds: float | None
    ) -> tuple[float, float]:
        assert command[:4] == LAUNCH
        words = [sys.executable, *command[4:]]
        done = zygote.run(words, env={**quiet(), **environment})
        log.write_text(done.stdout)
        if done.returncode:
            raise (UsageError if done.returncode == 2 else RunFailedError)(done.stdout[-2000:])
        return 0.0, 0.0

    monkeypatch.setattr(training, "run_once", run)


def quiet() -> dict[str, str]:
    return environment()


def tree(directory: Path) -> dict[str, str]:
    """Every name below a directory with the hash of its content."""
    found: dict[str, str] = {}
    for path in sorted(directory.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(directory))] = f"{path.is_symlink()} {hashlib.sha256(content).hexdigest()}"
    return found


def copied(run: Finished, directory: Path) -> Finished:
    shutil.copytree(run.directory, directory)
    return Finished(directory, run.output, run.code)


def move_one_weight(checkpoint: Path) -> str:
    """Move the largest weight by one ulp, with all hashes of the checkpoint written anew. Return its tensor's name."""
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    name = max(tensors, key=lambda key: float(tensors[key].abs().max()))
    flat = tensors[name].reshape(-1)
    place = int(flat.abs().argmax())
    flat[place] = torch.nextafter(flat[place], torch.tensor(math.inf))
    save_file(tensors, path, {"format": "pt"})
    files = manifest.read(checkpoint)["files"] | {path.name: commit.seal_file(path)}
    commit.rewrite_manifest(checkpoint, {"files": files})
    commit.verify(checkpoint)
    return name


def move_loss(run: Path, step: int, relative: float | None = None) -> None:
    """Move the logged loss of a step, by one ulp or by a part of its value."""
    path = run / "metrics.jsonl"
    lines: list[str] = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["event"] == "train" and record["step"] == step:
            loss = record["loss"]
            record["loss"] = math.nextafter(loss, math.inf) if relative is None else loss * (1 + relative)
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines) + "\n")

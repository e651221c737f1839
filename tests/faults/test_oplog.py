"""Power lost after any call: what was acknowledged verifies, and nothing torn has a final name.

A kill cannot show a missing ``fsync``, because the kernel keeps what a dead process wrote. So the calls of real runs
are recorded and replayed up to every point, with what was not flushed dropped, kept, or kept in part.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from accel_train.store import commit, manifest, run_file
from tests.faults import oplog
from tests.faults.harness import Trainers

KEEP = 3
FLAGS = (
    f"--hidden 2 --checkpoints.save_every 2 --checkpoints.keep_last {KEEP} --checkpoints.keep_state_last 2 "
    "--checkpoints.asynchronous"
).split()
LOSSES = [(0.0, 0.0), (1.0, 1.0), (1.0, 0.0), (0.0, 1.0), *[(0.5, 0.5)] * 12]
"""Probability that an unflushed name, and that unflushed bytes, are there afterwards."""


@dataclass
class Promises:
    """What must be on the disk at this point of the log."""

    acknowledged: list[int] = field(default_factory=list)
    harmed: set[str] = field(default_factory=set)
    """Names that the test itself damaged."""
    handles: dict[int, str] = field(default_factory=dict)

    def follow(self, operation: oplog.Operation) -> None:
        """Take note of an acknowledgement, which is a line in the run's acknowledged.txt."""
        kind, *rest = operation
        if kind == "open":
            self.handles[rest[1]] = rest[0]
        elif kind == "write" and self.handles[rest[0]] == "run/acknowledged.txt":
            self.acknowledged.append(int(rest[1]))
            self.harmed.discard(commit.checkpoint_name(int(rest[1])))
        elif kind == "harm":
            self.harmed.add(rest[0])


def broken_promises(folder: Path, promises: Promises) -> list[str]:
    """Look at what a power loss left."""
    broken: list[str] = []
    for run in ("run", "copy"):
        there: set[int] = set()
        for step, path in manifest.committed(folder / run / "checkpoints"):
            try:
                there.add(commit.verify(path).step)
                assert step in there
            except ValueError as error:
                if path.name not in promises.harmed:
                    broken.append(f"torn under a final name: {error}")
        if run == "run" and promises.acknowledged:
            kept = sorted({*there, *promises.acknowledged})[-KEEP:]
            if lost := {step for step in kept if commit.checkpoint_name(step) not in promises.harmed} - there:
                broken.append(f"acknowledged and gone: {sorted(lost)} of {kept}")
            try:
                assert run_file.load(folder / run)["schema"] == run_file.RUN_SCHEMA
            except (OSError, ValueError) as error:
                broken.append(f"run.json: {error}")
    return broken


def what_counts(tree: oplog.Tree) -> oplog.Tree:
    """Final names and run.json; the next start looks at nothing else."""
    kept: oplog.Tree = {}
    for name, run in tree.items():
        assert isinstance(run, dict), name
        kept[name] = {n: w for n, w in run.items() if n == "run.json"}
        if isinstance(folder := run.get("checkpoints"), dict):
            kept[name]["checkpoints"] = {n: w for n, w in folder.items() if commit.NAME.fullmatch(n)}
    return kept


def replay(log: Path, folder: Path, *, until_broken: bool = False) -> tuple[dict[str, int], list[str]]:
    """Lose the power after every operation, in every way of ``LOSSES``; the counts, and what was broken."""
    operations, promises = oplog.read(log), Promises()
    disk, seen, broken = oplog.Disk(), set[bytes](), list[str]()
    chance, states = random.Random(0), 0
    for number, operation in enumerate(operations, 1):
        promises.follow(operation)
        if operation[0] != "harm":
            disk.apply(operation)
        for names, data in LOSSES:
            tree = what_counts(disk.after_a_loss(chance.random, names, data))
            states += 1
            key = hashlib.sha256(pickle.dumps((tree, promises.acknowledged, promises.harmed))).digest()
            if key in seen:
                continue
            seen.add(key)
            oplog.make(tree, folder)
            found = broken_promises(folder, promises)
            broken += [f"after {number} ({operation[:2]}), names {names}, data {data}: {text}" for text in found]
            shutil.rmtree(folder)
            if broken and until_broken:
                return {}, broken
    counts = {"operations": len(operations), "fsyncs": sum(o[0] == "fsync" for o in operations)}
    return counts | {"states": states, "different": len(seen), "acknowledged": len(promises.acknowledged)}, broken


def recording(root: Path, log: Path) -> str:
    """Python for a trainer to run first; at its end it compares what was recorded with what Python reports."""
    return f"""
from tests.faults import oplog, trainer
oplog.record({str(root)!r}, {str(log)!r})
original = trainer.main
def main(argv):
    code = original(argv)
    oplog.finished({str(log)!r})
    return code
trainer.main = main
"""


# Slow: the same code writes in either mode, and a process is killed in both every day.
@pytest.fixture(
    scope="module", params=[pytest.param("true", id="async"), pytest.param("false", id="sync", marks=pytest.mark.slow)]
)
def log(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A run with retention, killed amid a deletion, damaged and resumed, and a run that starts from its copy."""
    folder = tmp_path_factory.mktemp("oplog")
    root, log = folder / "root", folder / "log"
    root.mkdir()
    flags = (*FLAGS, request.param)

    def run(name: str, *more: str, failpoint: str = "", code: int = 0) -> None:
        ended = trainers.run(root / name, *flags, *more, patch=recording(root, log), failpoint=failpoint)
        assert ended.wait() == [code], ended.output()

    def harm(step: int) -> None:
        """Somebody takes a file away, so that the next run saves this step again."""
        name = commit.checkpoint_name(step)
        (root / "run" / "checkpoints" / name / "ema.safetensors").unlink()
        with log.open("ab") as file:
            file.write(pickle.dumps(("harm", name)))
            file.write(pickle.dumps(("remove", f"run/checkpoints/{name}/ema.safetensors")))

    run("run", "--max_steps", "6")
    run("run", "--max_steps", "12", failpoint="before_rmtree", code=-9)
    run("run", "--max_steps", "10")
    harm(10)
    run("run", "--max_steps", "12")
    run("copy", "--resume", str(root / "run"), "--max_steps", "14")
    return log


@pytest.mark.fault(
    "F32",
    injected="power lost after any call of a save (log replay)",
    outcome="acknowledged checkpoints verify; none is torn",
)
def test_a_power_loss_after_any_call(log: Path, tmp_path: Path) -> None:
    counts, broken = replay(log, tmp_path / "left")
    print(json.dumps(counts))
    assert broken == []
    assert counts["operations"] > 500
    assert counts["fsyncs"] > 100
    assert counts["acknowledged"] >= 6
    assert [o[0] for o in oplog.read(log)].count("finished") == 4


NEEDED = (
    "run/.run.json.tmp",
    "run/checkpoints",
    "run/checkpoints after a removal",
    "run/checkpoints/.tmp",
    "run/checkpoints/.tmp/config.json",
    "run/checkpoints/.tmp/ema.safetensors",
    "run/checkpoints/.tmp/manifest.json",
    "run/checkpoints/.tmp/model.safetensors",
    "run/checkpoints/.tmp/optimizer",
    "run/checkpoints/.tmp/optimizer/exp_avg.safetensors",
    "run/checkpoints/.tmp/optimizer/exp_avg_sq.safetensors",
    "run/checkpoints/.tmp/optimizer/index.json",
    "run/checkpoints/.tmp/trainer_state.json",
    "run/checkpoints/checkpoint/.manifest.json.tmp",
)
"""Everything that is flushed once the run has a directory; the last by taking old optimizer state away."""


@pytest.mark.slow  # the replay itself is quick; this shows that it can fail
def test_the_replay_misses_no_single_fsync(log: Path, tmp_path: Path) -> None:
    """Else the test above could not fail: forget one call at a time, of each kind, and see it found."""
    operations = oplog.read(log)
    names = {o[2]: o[1] for o in operations if o[0] == "open"}
    found: dict[str, bool] = {}
    for number, operation in enumerate(operations):
        if operation[0] != "fsync":
            continue
        name = re.sub(r"\.tmp-checkpoint[^/]*", ".tmp", names[operation[1]])
        name = re.sub(r"checkpoint_\d+", "checkpoint", name)
        renamed = next((o for o in reversed(operations[:number]) if o[0] == "rename"), ("", "", ""))
        if name == "run/checkpoints" and ".trash-" in renamed[2] and operations[number - 2] == renamed:
            name += " after a removal"
        if name in NEEDED and not found.get(name):
            shorter = tmp_path / "log"
            shorter.write_bytes(b"".join(pickle.dumps(o) for n, o in enumerate(operations) if n != number))
            found[name] = bool(replay(shorter, tmp_path / "left", until_broken=True)[1])
    assert found == dict.fromkeys(NEEDED, True)

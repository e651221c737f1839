"""Runs killed again and again, at random instants and at every place of a save, and started again each time.

``ACCEL_TRAIN_FAULT_SEED`` chooses the instants; the counts go to stdout as one JSON line (``pytest -s``).
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from accel_train.store import commit, failpoints, manifest
from tests.faults.harness import Trainer, Trainers, acknowledged, debris, digests, first_difference, losses
from tests.waiting import PATIENCE_SECONDS

STEPS, KEEP = 45, 2
FLAGS = (
    f"--max_steps {STEPS} --checkpoints.save_every 3 --checkpoints.keep_last {KEEP} --step_seconds 0.01 --hidden 512"
).split()
ALONE_SECONDS = 1.5
"""After the death of one process: what the others get to end by themselves before all are killed, as torchrun does."""
PARTS = 5
"""Each has its own places of a save, often enough that all are reached."""
LIFE_SECONDS = 1.5
"""Kills come at a uniform instant of this; a run takes about as long."""


@dataclass
class Line:
    """A run that is killed and started again in one directory, until it reaches its last step."""

    out: Path
    ranks: int
    left: list[str] = field(default_factory=list)
    """Debris seen after the last kill; the next start must sweep it."""


@dataclass
class Loop:
    """Kills runs of one and of two processes by turns, and counts."""

    trainers: Trainers
    folder: Path
    random: random.Random
    whole: dict[int, Path]
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    lines: dict[int, Line] = field(default_factory=dict)

    def line(self, ranks: int) -> Line:
        if ranks not in self.lines:
            self.counts["runs"] += 1
            self.lines[ranks] = Line(self.folder / f"run{self.counts['runs']}", ranks)
        return self.lines[ranks]

    def life(self, number: int, failpoint: str | None) -> None:
        """One start, one kill, and what must hold after it."""
        line = self.line(1 + number % 2)
        mode = self.random.choice(["true", "false"])
        spell = f"{failpoint}@0#{self.random.randint(1, 3)}" if failpoint else ""
        if failpoint in ("mid_file", "after_optimizer_file", "before_seal") and self.random.random() < 0.5:
            spell = spell.replace("@0", f"@{line.ranks - 1}")
        before = time.monotonic()
        run = self.trainers.start(
            line.out, *FLAGS, "--checkpoints.asynchronous", mode, ranks=line.ranks, failpoint=spell
        )
        if failpoint is None:
            self.kill_at_random(run, before)
        codes = self.end(run)
        self.look(line, run, f"life {number}, {spell or 'random'}, async {mode}, {line.ranks} ranks, codes {codes}")
        if -9 in codes:
            where = failpoint or "random"
            self.counts.update(["kills", f"at {where}", f"{line.ranks} ranks", "async" if mode == "true" else "sync"])
        elif set(codes) == {0}:
            self.compare(line)
            del self.lines[line.ranks]
        else:
            self.violations.append(f"life {number} ended by itself with {codes}: {run.output()[-500:]}")

    def kill_at_random(self, run: Trainer, before: float) -> None:
        """SIGKILL to all, or to one at random, at an instant that nobody chose."""
        instant = before + self.random.uniform(0, LIFE_SECONDS)
        while time.monotonic() < instant and not run.poll():
            time.sleep(0.002)
        run.kill(rank=self.random.choice([None, *range(len(run.pids))]))

    def end(self, run: Trainer) -> list[int]:
        """Wait for the end; where one process was killed the others end by themselves, or after a while are ended."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        patience = None
        while not run.poll():
            now = time.monotonic()
            assert now < deadline, run.output()
            if any(code is not None for code in run.codes()) and patience is None:
                patience = now + ALONE_SECONDS
            if patience is not None and now > patience:
                self.counts["waited for"] += 1
                run.kill()
            time.sleep(0.01)
        return run.wait()

    def look(self, line: Line, run: Trainer, what: str) -> None:
        """The promises, as they stand after a kill."""
        there: set[int] = set()
        for step, path in manifest.committed(line.out / "checkpoints"):
            try:
                there.add(commit.verify(path).step)
            except ValueError as error:
                self.violations.append(f"{what}: torn under a final name: {error}")
            if step not in there:
                self.violations.append(f"{what}: step of {path} differs from its name")
        kept = sorted(there | set(acknowledged(line.out)))[-KEEP:]
        if lost := set(kept) - there:
            self.violations.append(f"{what}: acknowledged and gone: {lost}")
        if "step" in run.output() or "fresh start" in run.output() or "no checkpoint yet" in run.output():
            self.counts["starts"] += 1
            if still := set(line.left) & set(debris(line.out)):
                self.violations.append(f"{what}: not swept: {still}")
        line.left = debris(line.out)

    def compare(self, line: Line) -> None:
        """A run that came to its end, however often it was killed, is the run that nothing happened to."""
        self.counts["finished and compared"] += 1
        whole = self.whole[line.ranks]
        if losses(line.out) != losses(whole):
            self.violations.append(f"{line.out}: other losses")
        a, b = (digests(run / "checkpoints" / commit.checkpoint_name(STEPS)) for run in (line.out, whole))
        if difference := first_difference(a, b):
            self.violations.append(f"{line.out}: {difference} differs")
        if left := debris(line.out):
            self.violations.append(f"{line.out}: {left} left at the end")


def kill(trainers: Trainers, folder: Path, kills: int, part: int) -> dict[str, Any]:
    """``kills`` kills, half of them at random instants; then every run is brought to its end."""
    seed = PARTS * int(os.environ.get("ACCEL_TRAIN_FAULT_SEED", "0")) + part
    whole = {ranks: folder / f"whole{ranks}" for ranks in (1, 2)}
    for ranks, out in whole.items():
        assert set(trainers.run(out, *FLAGS, ranks=ranks).wait()) == {0}
    loop = Loop(trainers, folder, random.Random(seed), whole)
    number, places = 0, list(failpoints.NAMES[part::PARTS])
    loop.random.shuffle(places)
    while loop.counts["kills"] < kills and not loop.violations:
        loop.life(number // 2, places[number // 2 % len(places)] if number % 2 else None)
        number += 1
    for line in list(loop.lines.values()) if not loop.violations else []:
        run = trainers.run(line.out, *FLAGS, ranks=line.ranks)
        assert set(run.wait()) == {0}, run.output()
        loop.compare(line)
    found = {"seed": seed, "lives": number, **dict(sorted(loop.counts.items())), "violations": loop.violations}
    print(json.dumps(found))
    return found


@pytest.mark.slow
@pytest.mark.fault(
    "F8",
    injected="200 SIGKILLs, random and at every place, 1 and 2 processes",
    outcome="nothing lost; ends with the same bits",
)
@pytest.mark.parametrize("part", range(PARTS))
def test_forty_kills(trainers: Trainers, tmp_path: Path, part: int) -> None:
    found = kill(trainers, tmp_path, 40, part)
    assert found["violations"] == []
    assert found["kills"] >= 40
    assert {f"at {name}" for name in failpoints.NAMES[part::PARTS]} <= found.keys()
    assert min(found["at random"], found["1 ranks"], found["2 ranks"], found["sync"], found["async"]) >= 8
    assert found["finished and compared"] >= 2

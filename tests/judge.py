"""Compare two versions of the code bit for bit: every demo is run, and what came out is written to a file.

    git worktree add ../before REVISION
    python -m tests.judge before.json --tree ../before
    python -m tests.judge after.json --against before.json       # exit code 1 if anything differs

Each demo, made small, trains for 40 steps on each layout: once without interruption, once killed between two saves and
started again. The file holds the loss of every step in hexadecimal and the SHA-256 of every weight file. Bits depend on
the processor and on torch, so compare files from one machine only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.distributed.launching import ROOT, SMALL_CAUSAL_LM, SMALL_DEMO, SMALL_PDE, Layout, command, environment
from tests.waiting import PATIENCE_SECONDS, until

DEMOS = {
    "mmdit": ("demo", SMALL_DEMO),
    "pde": ("pde_demo", SMALL_PDE),
    "causal_lm": ("causal_lm_smoke", SMALL_CAUSAL_LM),
}
STEPS, SAVE_EVERY, KILL_AT = 40, 20, 28
LAYOUTS = [
    Layout(strategy, processes, recipe)
    for recipe in DEMOS
    for strategy, processes in (("single", 1), ("ddp", 2), ("fsdp2", 2), ("zero2", 2))
]


def losses(run: Path) -> dict[int, str]:
    """Loss of each step that was logged, in hexadecimal; of a step trained twice, the later."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {r["step"]: float(r["loss"]).hex() for r in records if r["event"] == "train"}


def weight_hashes(run: Path) -> dict[str, str]:
    """Hash of each weight file of the last checkpoint, by its name in there."""
    checkpoint = run / "checkpoints" / f"checkpoint_{STEPS:08d}"
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {str(f.relative_to(checkpoint)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def start(layout: Layout, tree: Path, run: Path) -> subprocess.Popen[bytes]:
    preset, small = DEMOS[layout.recipe]
    flags = ["--output_dir", str(run), "--max_steps", str(STEPS), "--checkpoints.save_every", str(SAVE_EVERY)]
    run.parent.mkdir(parents=True, exist_ok=True)
    words = command(layout, [preset, *small, *flags], run.parent, tree / "recipes" / f"{layout.recipe}.py")
    with (run.parent / f"{run.name}.log").open("ab") as log:
        return subprocess.Popen(words, cwd=tree, env=environment(PYTHONPATH=str(tree)), stdout=log, stderr=log)


def finish(process: subprocess.Popen[bytes], run: Path) -> None:
    if process.wait(PATIENCE_SECONDS) != 0:
        raise SystemExit(
            f"{run}: exit code {process.returncode}\n{(run.parent / f'{run.name}.log').read_text()[-4000:]}"
        )


def judge(layout: Layout, tree: Path, folder: Path) -> dict[str, Any]:
    """What a run and a run that was killed and started again came to."""
    whole, killed = folder / "whole", folder / "killed"
    finish(start(layout, tree, whole), whole)
    process = start(layout, tree, killed)
    until(lambda: process.poll() is not None or max(losses(killed), default=0) >= KILL_AT)
    assert process.poll() is None, f"{layout} ended before it could be killed"
    everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for each in everyone:
        each.kill()
    psutil.wait_procs(everyone)
    process.wait()
    finish(start(layout, tree, killed), killed)
    return {
        name: {"losses": losses(run), "files": weight_hashes(run)}
        for name, run in (("whole", whole), ("killed", killed))
    }


def differences(before: Any, after: Any, place: str = "") -> list[str]:
    """Paths of the leaves that differ or that one side lacks."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return [] if before == after else [f"{place}: {before} -> {after}"]
    names = [*before, *(name for name in after if name not in before)]
    return [line for name in names for line in differences(before.get(name), after.get(name), f"{place}/{name}")]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout whose code runs")
    parser.add_argument("--against", type=Path, help="what an earlier call wrote")
    parser.add_argument("--only", nargs="+", choices=[str(layout) for layout in LAYOUTS])
    arguments = parser.parse_args(argv)
    found: dict[str, Any] = {}
    for layout in LAYOUTS:
        if arguments.only is None or str(layout) in arguments.only:
            with tempfile.TemporaryDirectory() as folder:
                found[str(layout)] = judge(layout, arguments.tree.resolve(), Path(folder))
            same = found[str(layout)]["whole"] == found[str(layout)]["killed"]
            print(
                f"{layout}: {'the killed run has the bits of the whole one' if same else 'KILLED RUN DIFFERS'}",
                flush=True,
            )
    found = json.loads(json.dumps(found))  # as it is read back: keys are text
    arguments.output.write_text(json.dumps(found, indent=1))
    if arguments.against is None:
        return 0
    lines = differences({k: v for k, v in json.loads(arguments.against.read_text()).items() if k in found}, found)
    print("\n".join([f"{len(lines)} differences", *lines[:20]]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

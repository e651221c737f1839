"""Short runs of a recipe on the processors of this machine, and their results."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accel_train.compare.runs import start_child
from accel_train.config import without_launcher
from accel_train.metrics.records import last_pass, read_metrics
from accel_train.verification import plan
from accel_train.verification.facts import Facts, Outcome, Spec

PROGRAM = Path(__file__).with_name("observed_run.py")
FILES = {
    "two_processes": "distributed_type: MULTI_GPU\n",
    "fsdp2": (
        "distributed_type: FSDP\n"
        "fsdp_config:\n"
        "  fsdp_version: 2\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        "  fsdp_reshard_after_forward: true\n"
        "  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
        "  fsdp_cpu_ram_efficient_loading: false\n"
    ),
    "zero2": "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n",
}
"""Launch file of each layout, without the number of processes."""


def environment_on_cpu(threads: int) -> dict[str, str]:
    """Return the environment of runs without accelerators, with a fixed number of threads."""
    # The number of threads decides the order of sums, so bits are compared with equal numbers.
    fixed = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)}
    return without_launcher(os.environ) | fixed


class Runner:
    """Starts runs of one recipe with the same options, each in a directory of its own."""

    def __init__(self, recipe: Path, arguments: Sequence[str], folder: Path, threads: int) -> None:
        self._recipe = recipe
        self._arguments = list(arguments)
        self._folder = folder
        self._threads = threads
        self._children: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, spec: Spec) -> Outcome:
        """Run to the end. Thread-safe."""
        home = self._folder / spec.name
        home.mkdir()
        facts = home / "facts.json"
        request = {"facts": str(facts), "deviation": asdict(spec.deviation)}
        arguments = [*self._arguments, *plan.words_of(spec.flags), "--output_dir", str(home / "run")]
        words = [*self._head(spec, home), json.dumps(request), str(self._recipe), *arguments]
        log = home / "output.txt"
        code = self.execute(words, log)
        return _read(home / "run", code, log.read_text(errors="replace"), facts)

    def _head(self, spec: Spec, home: Path) -> list[str]:
        if spec.layout is None and spec.file is None:
            return [sys.executable, str(PROGRAM)]
        file = spec.file
        if file is None:
            file = home / f"{spec.layout}.yaml"
            file.write_text(f"num_machines: 1\nnum_processes: {spec.processes}\n{FILES[str(spec.layout)]}")
        rehearse = [sys.executable, "-m", "accel_train.cli", "rehearse", "--config_file", str(file)]
        return [*rehearse, "--num_processes", str(spec.processes), str(PROGRAM)]

    def environment(self) -> dict[str, str]:
        """Return the environment of every run: no accelerator, a fixed number of threads, no launcher's variables."""
        return environment_on_cpu(self._threads)

    def execute(self, words: Sequence[str], log: Path) -> int:
        """Run a command with its output in ``log`` and return its exit code."""
        # Started under the lock: `stop` on another thread misses no child.
        with log.open("wb") as output, self._lock:
            if self._stopped:
                return 1
            child = start_child(words, output, self.environment())
            self._children.add(child)
        code = child.wait()
        with self._lock:
            self._children.discard(child)
        return code

    @property
    def is_stopped(self) -> bool:
        """True from `stop` on: runs that fail then were ended by it."""
        return self._stopped

    def stop(self) -> None:
        """End all processes, and start no more."""
        with self._lock:
            self._stopped = True
            for child in self._children:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)


def _read(directory: Path, code: int, output: str, facts: Path) -> Outcome:
    losses: dict[int, dict[str, float]] = {}
    path = directory / "metrics.jsonl"
    if code == 0 and path.is_file():
        for line in last_pass(read_metrics(path), "train"):
            losses[int(line["step"])] = {name: float(line[name]) for name in line if _is_compared(name)}
    found: dict[str, Any] = {}
    if code == 0 and facts.is_file():
        found = json.loads(facts.read_text(encoding="utf-8"))
    return Outcome(directory, code, output, losses, Facts(**found))


def _is_compared(name: str) -> bool:
    return re.fullmatch(r"loss(_.*)?|grad_norm", name) is not None

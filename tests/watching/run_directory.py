"""A run directory as a trainer leaves it, at any moment that a test asks for."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from accel_train.store.commit import rewrite_manifest
from accel_train.store.manifest import MANIFEST, checkpoint_name, sealed

BEGIN = 1_700_000_000.0
"""Time of the first line. Every further line comes a second after the one before it unless it says another time."""


class RunDirectory:
    """Writes the files that the pages read."""

    def __init__(self, path: Path, **options: Any) -> None:
        path.mkdir(parents=True)
        self.path = path
        self.time = BEGIN
        self.add("environment", command="recipes/x.py base --max_steps 100", world_size=1, strategy="single")
        self.add("config", config={"max_steps": 100, "log": {"log_every": 1}, **options})

    @property
    def file(self) -> Path:
        return self.path / "metrics.jsonl"

    def add(self, event: str, step: int | None = None, after: float = 1.0, **fields: Any) -> None:
        self.time += after
        line: dict[str, Any] = {"event": event, "time": self.time, "elapsed_seconds": self.time - BEGIN}
        if step is not None:
            line["step"] = step
        with self.file.open("a") as file:
            file.write(json.dumps(line | fields) + "\n")

    def train(self, step: int, loss: Any = 2.0, after: float = 1.0, **fields: Any) -> None:
        usual = {"lr": 1e-3, "grad_norm": 1.0, "samples_per_second": 100.0, "step_seconds": 0.5, "epoch": step / 50}
        self.add("train", step, after, **(usual | {"loss": loss} | fields))

    def steps(self, first: int, last: int, **fields: Any) -> None:
        for step in range(first, last + 1):
            self.train(step, **fields)

    def lock(self, pid: int, host: str | None = None, at: float | None = None) -> None:
        lock = self.path / ".lock"
        lock.write_text(f"process {pid} on {host or socket.gethostname()}\n")
        if at is not None:
            os.utime(lock, (at, at))

    def checkpoint(self, step: int, written_at: str | None = "2023-11-14T22:13:20Z") -> None:
        """One whose manifest can be read; its only file is not looked at."""
        path = self.path / "checkpoints" / checkpoint_name(step)
        path.mkdir(parents=True)
        files = {"model.safetensors": {"size": 1, "sha256": "0" * 64}}
        (path / MANIFEST).write_text(json.dumps(sealed({"step": step, "files": files})))
        if written_at is not None:
            rewrite_manifest(path, {"written_at": written_at})


def pid_of_the_dead() -> int:
    """The number of a process that has just ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid

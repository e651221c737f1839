"""Start small real runs, break them, and look at what is left."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from accel_train.store import commit, failpoints, manifest
from tests import zygote
from tests.distributed.launching import environment
from tests.waiting import PATIENCE_SECONDS, free_port, until
from tests.zygote import Child

EVERY = ("--checkpoints.save_every", "5", "--checkpoints.keep_last", "2")
"""Of 20 steps: saves after 5, 10, 15 and 20, of which two are kept."""
ROOT = Path(__file__).parents[2]
TRAINER = ROOT / "tests" / "faults" / "trainer.py"


@dataclass
class Trainer:
    """One run under way: its processes, its directory and what it prints."""

    processes: list[Child]
    out: Path
    log: Path

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def poll(self) -> bool:
        """Whether every process has ended."""
        return None not in self.codes()

    def codes(self) -> list[int | None]:
        """Exit codes in rank order, None of those that run."""
        return [process.poll() for process in self.processes]

    def wait(self, timeout: float = PATIENCE_SECONDS) -> list[int]:
        """Exit codes in rank order (negative: the signal); kills and fails after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        try:
            return [process.wait(max(0.0, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout} s:\n{self.output()[-3000:]}") from None

    def kill(self, number: int = signal.SIGKILL, rank: int | None = None) -> None:
        """Send a signal to one rank, or to all."""
        for process in self.processes if rank is None else [self.processes[rank]]:
            process.send_signal(number)

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def until(self, path: Path, text: str = "") -> None:
        """Wait until ``path`` exists and holds ``text``."""

        def there() -> bool:
            if path.exists() and (not text or text in path.read_text()):
                return True
            assert not self.poll(), f"the run ended before {text!r} was in {path}:\n{self.output()[-3000:]}"
            return False

        until(there, lambda: f"no {text!r} in {path}:\n{self.output()[-3000:]}")

    def until_step(self, step: int) -> None:
        """Wait until ``step`` optimizer steps are done."""
        self.until(self.out / "losses.txt", f"\n{step} " if step > 1 else f"{step} ")

    def until_held(self) -> None:
        """Wait until a failpoint holds a process (``=hold``)."""
        go = go_file(self.out)
        self.until(go.with_name(f"{go.name}.held"))

    def go(self) -> None:
        """Let go what a failpoint holds, and the ranks that pause."""
        go_file(self.out).touch()


RUN = "import sys; sys.argv[0] = 'trainer.py'; from tests.faults import trainer; trainer.run_main(trainer.main)"


class Trainers:
    """Starts trainers, forked from the zygote. One a test session; ``close`` it."""

    def __init__(self) -> None:
        self._stopped: dict[tuple[int, int], Path] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="accel-train-faults-")

    def start(
        self, out: Path, *arguments: str, ranks: int = 1, failpoint: str = "", patch: str = "", **env: str
    ) -> Trainer:
        """Start the toy run in ``out`` on ``ranks`` processes; output goes to a file beside it.

        ``patch`` is Python that each trainer runs first; ``writer_patch`` does the same to the writers.
        """
        log = out.with_name(f"{out.name}.log")
        log.unlink(missing_ok=True)
        command = [sys.executable, "-c", f"{textwrap.dedent(patch)}\n{RUN}", "--output_dir", str(out), *arguments]
        variables = environment(MASTER_PORT=str(free_port()), **{failpoints.VARIABLE: failpoint}) | env
        variables[failpoints.GO_VARIABLE] = str(no_go_file(out))
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (variables.get("PYTHONPATH"), str(ROOT))))
        processes: list[Child] = []
        for rank in range(ranks):
            if ranks > 1:
                variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
                variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            processes.append(zygote.start(command, log, env=variables, group=True))
        return Trainer(processes, out, log)

    def run(self, out: Path, *arguments: str, timeout: float = PATIENCE_SECONDS, **options: Any) -> Trainer:
        """Start it and wait for its end."""
        trainer = self.start(out, *arguments, **options)
        trainer.wait(timeout)
        return trainer

    def stopped(self, out: Path, step: int, ranks: int = 1) -> None:
        """Put a run that has ended at ``step`` (flags ``EVERY``) into ``out``: run once, then copied."""
        first = self._stopped.get((step, ranks))
        if first is None:
            first = self._stopped[step, ranks] = Path(self._folder.name) / f"{step}-{ranks}"
            ended = self.run(first, *EVERY, "--max_steps", str(step), ranks=ranks)
            assert set(ended.wait()) == {0}, ended.output()
        shutil.copytree(first, out)

    def close(self) -> None:
        self._folder.cleanup()


def go_file(out: Path) -> Path:
    """What a held or pausing process of the run in ``out`` waits for."""
    return out.with_name(f"{out.name}.go")


def no_go_file(out: Path) -> Path:
    """The same, not there, and nobody waiting for it."""
    go = go_file(out)
    for path in (go, go.with_name(f"{go.name}.held")):
        path.unlink(missing_ok=True)
    return go


def acknowledged(out: Path) -> list[int]:
    """Steps that the run said were saved."""
    path = out / "acknowledged.txt"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def losses(out: Path) -> dict[int, str]:
    """Step -> loss as a hexadecimal float; of a step done twice, the last."""
    lines = (out / "losses.txt").read_text().splitlines()
    return {int(step): loss for step, loss in (line.split() for line in lines)}


def checkpoints(out: Path) -> list[int]:
    """Steps of all committed checkpoints; fails if one does not verify."""
    steps: list[int] = []
    for step, path in manifest.committed(out / "checkpoints"):
        commit.verify(path)
        steps.append(step)
    return steps


def debris(out: Path) -> list[str]:
    """What a save or a start left unfinished."""
    saves = [p.name for p in (out / "checkpoints").glob("*") if commit.NAME.fullmatch(p.name) is None]
    return sorted([*saves, *(p.name for pattern in (".probe-*", ".shared-*") for p in out.glob(pattern))])


def same_run(out: Path, whole: Path, step: int = 20) -> None:
    """Assert that every loss, and weights, average and optimizer state after ``step`` are those of ``whole``."""
    assert losses(out) == losses(whole)
    a, b = (digests(run / "checkpoints" / commit.checkpoint_name(step)) for run in (out, whole))
    assert len(a) > 20
    assert first_difference(a, b) is None


def children(pid: int, words: str) -> list[psutil.Process]:
    """Living processes below ``pid`` with ``words`` in their command line."""
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if words in " ".join(process.cmdline()):
                    found.append(process)
    return found


def writer_patch(folder: Path, code: str) -> dict[str, str]:
    """Environment under which every writer process runs ``code`` before anything else (by ``sitecustomize``)."""
    folder.mkdir(exist_ok=True)
    guard = 'import sys\nif "accel_train.checkpoints.writer" in sys.orig_argv:\n'
    (folder / "sitecustomize.py").write_text(guard + textwrap.indent(textwrap.dedent(code), "    "))
    return {"PYTHONPATH": str(folder)}


def digests(checkpoint: Path) -> dict[str, str]:
    """sha256 by tensor (name, dtype, shape, bytes), whatever files hold them; JSON state beside them."""
    found: dict[str, str] = {}
    for path in sorted(checkpoint.rglob("*.safetensors")):
        stem = path.relative_to(checkpoint).as_posix().removesuffix(".safetensors")
        stem = stem.split("-0")[0]
        for name, tensor in load_file(path).items():
            text = f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode()
            found[f"{stem}:{name}"] = hashlib.sha256(text + _bytes(tensor)).hexdigest()
    found["step"] = str(json.loads((checkpoint / "trainer_state.json").read_text())["step"])
    return found


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def first_difference(a: dict[str, str], b: dict[str, str]) -> str | None:
    """The first key, in order, whose values differ."""
    return next((key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)), None)


def damage(path: Path, *, flip: bool = False, cut: int = 0) -> None:
    """Flip one bit in the middle of a file, or cut bytes off its end."""
    data = bytearray(path.read_bytes())
    if flip:
        data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data[: len(data) - cut]))


def launch(out: Path, *arguments: str, command: Sequence[str] = (sys.executable,), **options: Any) -> Any:
    """Start the toy run as a person would, through a launcher; a ``Popen`` in its own session."""
    options[failpoints.GO_VARIABLE] = str(no_go_file(out))
    return subprocess.Popen(
        [*command, str(TRAINER), "--output_dir", str(out), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)} | options,
    )

"""Virtual environments with the packages of this one, of which one operator may be off by one ulp."""

from __future__ import annotations

import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from accel_train.compare.runs import RunFailedError
from accel_train.config import UsageError
from accel_train.rerun import training
from tests import zygote
from tests.rerun import recording

ROOT = Path(__file__).parents[3]
FAULT = """
import math

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

library = torch.library.Library("aten", "IMPL")
steps = [0]

def count(*_):
    steps[0] += 1

def {name}(*inputs, **named):
    # The variant with out= has a kernel of its own, which is not replaced.
    out = torch.empty_like(inputs[0])
    torch.ops.aten.{name}.out(*inputs, **named, out=out)
    if steps[0] >= {after}:
        flat = out.view(-1)
        place = int(flat.abs().argmax())
        flat[place] = torch.nextafter(flat[place], flat.new_tensor(math.inf))
    return out

register_optimizer_step_post_hook(count)
library.impl("{name}", {name}, "CPU")
"""
"""The largest output of an elementwise operator moves by one ulp, after some optimizer steps of the process."""
NEWER = """
from accel_train.metrics import environment
versions = environment.package_versions
environment.package_versions = lambda: versions() | {"torch": "99.0"}
"""
"""Runs record another version of torch."""
OTHER_START = """
import torch
from accel_train import preparation
build_model = preparation.build_model

def moved(*arguments, **named):
    model = build_model(*arguments, **named)
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    return model

preparation.build_model = moved
"""
"""A model begins with other weights."""
ENDS_EARLY = """
from accel_train import loop
report = loop.Training.report

def ending(self, *arguments, **named):
    report(self, *arguments, **named)
    if self.done == 5:
        self.end()

loop.Training.report = ending
"""
"""The recipe ends by itself after step 5."""
RUN = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def fault(name: str, steps: int = 0) -> str:
    """Source that replaces an operator after so many optimizer steps behind a resume."""
    # A resume makes one by itself, to create the optimizer's state.
    return FAULT.format(name=name, after=1 + steps if steps else 0)


def build(directory: Path, fault: str = "") -> Path:
    """Make a virtual environment that sees the packages of this one, and runs ``fault`` in front of each program."""
    venv.create(directory, with_pip=False, symlinks=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    # Plain paths: an environment with the packages of the system would see those of another interpreter.
    (packages / "outer.pth").write_text(f"{ROOT}\n{sysconfig.get_paths()['purelib']}\n")
    # Not in front of `-c`, which asks for versions and would have to import torch.
    indented = "".join(f"    {line}\n" for line in fault.splitlines())
    (packages / "sitecustomize.py").write_text(f"import sys\nif '-c' not in sys.orig_argv:\n    pass\n{indented}")
    return directory


def fork_runs(monkeypatch: pytest.MonkeyPatch, fault: str) -> list[Sequence[str]]:
    """Have both environments train in forked processes, the other one with ``fault``. Return the commands, as added."""
    commands: list[Sequence[str]] = []

    def run(
        command: Sequence[str],
        log: Path,
        gates: Sequence[str] = (),
        environment: Mapping[str, str] = {},
        save_seconds: float | None = None,
    ) -> tuple[float, float]:
        commands.append(command)
        interpreter, *words = command
        assert words[:3] == recording.LAUNCH[1:]
        head = [sys.executable]
        if interpreter != sys.executable:
            head += ["-c", fault + RUN]
        done = zygote.run([*head, *words[3:]], env={**recording.quiet(), **environment})
        log.write_text(done.stdout)
        if done.returncode:
            raise (UsageError if done.returncode == 2 else RunFailedError)(done.stdout[-2000:])
        return 0.0, 0.0

    monkeypatch.setattr(training, "run_once", run)
    return commands

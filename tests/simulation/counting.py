"""One step counted twice: on fake tensors as rank 0 of a launch, and on real ones in real processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_train.commands.launch import Launch
from accel_train.simulation.command import worker_command
from accel_train.simulation.flags import REPORT, Options
from tests import zygote
from tests.distributed.launching import DEMOS, ROOT, Layout, command, environment, fork, inputs_of
from tests.waiting import PATIENCE_SECONDS

REAL = ROOT / "tests" / "simulation" / "real.py"
MACHINE = REAL.with_name("machine.py")
TO_THE_SYSTEM = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}
"""glibc gives each larger block its own pages, and gives them back as soon as it is freed."""
ANYTHING = Options(None, (None,), None, None, False, None)
SINGLE = "num_machines: 1\nnum_processes: 1\ndistributed_type: 'NO'\nuse_cpu: true\n"


def flags_of(layout: Layout, folder: Path, flags: Sequence[str]) -> list[str]:
    preset, small = DEMOS[layout.recipe]
    return [preset, *small, *inputs_of(layout.recipe, folder), *flags]


def simulated(layout: Layout, folder: Path, *flags: str, options: Options = ANYTHING) -> dict[str, Any]:
    """The report of a simulation, whose process is forked from one that has imported everything."""
    command(layout, [], folder)
    file = folder / f"{layout}.yaml"
    if layout.strategy == "single":
        file.write_text(SINGLE)
    request = Launch(
        str(file),
        layout.recipe,
        tuple(flags_of(layout, folder, flags)),
        main_process_port=29500,
    )
    words, variables, _ = worker_command(request, options, folder)
    kind = "plain" if layout.strategy in ("single", "ddp") else "sharded"
    variables = {**environment(), **{k: v for k, v in variables.items() if not k.startswith("OMP_")}}
    variables["OMP_NUM_THREADS"] = "1"
    done = zygote.run(words, env=variables, timeout=PATIENCE_SECONDS, kind=kind)
    report = folder / REPORT
    assert report.is_file(), done.stdout[-4000:]
    return json.loads(report.read_text())


def counted(layout: Layout, folder: Path, *flags: str, largest: int | None = None) -> dict[str, Any]:
    found = simulated(layout, folder, *flags, options=replace(ANYTHING, largest=largest))
    assert "refused" not in found, found
    return found["counted"]


def real(layout: Layout, folder: Path, *flags: str, program: Path = REAL, **extra: str) -> dict[str, Any]:
    """The same of a real run of as many processes. ``extra`` are environment variables of ``program``."""
    words = [layout.recipe, *flags_of(layout, folder, flags), "--output_dir", str(folder / "run")]
    done = fork(layout, command(layout, words, folder, program), timeout=PATIENCE_SECONDS, **extra)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


def by_machine(layout: Layout, folder: Path, count: str, *flags: str, **extra: str) -> dict[str, Any]:
    """What the machine counts of a real run (``tests/simulation/machine.py``)."""
    return real(layout, folder, *flags, program=MACHINE, COUNT=count, **extra)


def total_work(found: dict[str, Any], name: str) -> int:
    """Over the parts of a step."""
    return sum(part[name] for part in found["work"])

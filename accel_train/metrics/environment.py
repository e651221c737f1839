"""What a run ran on: the first line of ``metrics.jsonl``. Versions and hardware, no environment variables."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from accel_train import __version__

if TYPE_CHECKING:
    from accelerate import Accelerator

SECRET = re.compile(r"token|secret|password|passwd|credential|api[-_]?key", re.IGNORECASE)
PACKAGES = ("torch", "accelerate", "transformers", "datasets", "numpy", "deepspeed")


def describe_environment(accelerator: Accelerator) -> dict[str, object]:
    """Facts of this process's machine and of the whole run; no collective, no device wait.

    Main process: other hosts may differ, which the launcher's own checks see to.
    """
    import torch

    from accel_train.runtime.accelerator import strategy_of

    cuda = accelerator.device.type == "cuda"
    facts: dict[str, object] = {
        "versions": package_versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda if cuda else None,
        "device": accelerator.device.type,
        "device_name": torch.cuda.get_device_name(accelerator.device) if cuda else cpu_name(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "world_size": accelerator.num_processes,
        "strategy": strategy_of(accelerator),
        "precision": {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision),
        "command": command_line(sys.argv),
        "git_commit": git_commit(Path(sys.argv[0]).resolve().parent),
    }
    return facts


def cpu_name() -> str:
    """The processor's model where the system tells it, else its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that decide a run's numbers; absent ones are left out."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"accel_train": __version__}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def command_line(arguments: Sequence[str]) -> str:
    """The command as a shell would take it, the values of options that look like secrets replaced."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        secret = name.startswith("-") and SECRET.search(name.rsplit(".", 1)[-1]) is not None
        if hide_next and not argument.startswith("-"):
            shown.append("***")
        else:
            shown.append(f"{name}=***" if secret and equals else argument)
        hide_next = secret and not equals
    return shlex.join(shown)


def git_commit(directory: Path) -> str | None:
    """The commit of the script's repository, with ``-dirty`` where tracked files differ; None without one."""
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None

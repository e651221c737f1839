"""Versions and hardware of a run, for the first line of ``metrics.jsonl``. No environment variables are recorded."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accel_train.cores import cpu_name

if TYPE_CHECKING:
    from accelerate import Accelerator

# Matched against the last part of an option name, such as hub.token. Whole words, so that max_tokens is no secret.
SECRET = re.compile(r"(^|[-_])(token|secrets?|passwords?|passwd|credentials?|api[-_]?keys?)([-_]|$)", re.IGNORECASE)
# Packages that affect the numbers of a run.
PACKAGES = (
    *("torch", "accelerate", "transformers", "datasets", "numpy", "deepspeed"),
    *("diffusers", "peft", "torchao", "bitsandbytes"),
)


def describe_environment(accelerator: Accelerator) -> dict[str, object]:
    """Describe this process's machine and the whole run. No collective, no device wait.

    Call it on the main process only. Other hosts may differ.
    """
    import torch

    from accel_train.runtime.exiting import recipe_file
    from accel_train.runtime.strategy import strategy_of

    if accelerator.device.type == "cuda":
        cuda_version = torch.version.cuda
        device_name = torch.cuda.get_device_name(accelerator.device)
    else:
        cuda_version = None
        device_name = cpu_name()
    precision = accelerator.mixed_precision
    recipe = recipe_file()
    # A cell of a notebook has no file, and runs in the notebook's directory.
    directory = Path.cwd()
    if recipe is not None:
        directory = Path(recipe).resolve().parent
    return {
        "versions": package_versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": cuda_version,
        "device": accelerator.device.type,
        "device_name": device_name,
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "world_size": accelerator.num_processes,
        "strategy": strategy_of(accelerator),
        "precision": "fp32" if precision == "no" else precision,
        "command": command_line(sys.argv),
        # The command has the path as it was typed, relative to a working directory that the reader may not know.
        "recipe": recipe,
        "git_commit": git_commit(directory),
    }


def package_versions() -> dict[str, str]:
    """Return the installed versions of packages that affect a run's numbers."""
    # Imported here, because the tools that import this module for other functions do not need it.
    from accel_train.runtime.tested_versions import installed_versions

    return installed_versions(PACKAGES)


def command_line(arguments: Sequence[str]) -> str:
    """Join the command in shell syntax, with the values of secret-looking options hidden."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        leaf = name.rsplit(".", 1)[-1]
        is_secret = name.startswith("-") and SECRET.search(leaf) is not None
        if hide_next and not argument.startswith("-"):  # --token VALUE
            shown.append("***")
        elif is_secret and equals:  # --token=VALUE
            shown.append(f"{name}=***")
        else:
            shown.append(argument)
        hide_next = is_secret and not equals
    return shlex.join(shown)


def git_commit(directory: Path) -> str | None:
    """Return the commit of the repository around ``directory``, or None. ``-dirty`` means changed tracked files."""
    # --exclude=* ignores all tags, so that the output is always a hash.
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return done.stdout.strip() or None

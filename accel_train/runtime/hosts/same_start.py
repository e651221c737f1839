"""Compare what the processes have been started with: options, launch settings, package versions and code.

Hosts with a different command or an older copy of the code would train together without an error.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from accel_train.config import UsageError
from accel_train.options.tree import flatten, to_tree
from accel_train.runtime.exiting import recipe_file
from accel_train.runtime.tested_versions import installed_versions
from accel_train.wording import shortened

MAY_DIFFER = ("cache_dir", "num_workers", "workers")
"""Last parts of the names of options that may differ between hosts: they do not change which data are read."""
COMPARED_PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "diffusers", "peft")
"""Packages that compute. A different release may give a different result, and its collectives may not match."""
LAUNCH_VARIABLES = ("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_USE_")
"""Prefixes of the variables by which a launcher says how a model is distributed."""
SHOWN = 5
"""Most differences in one message."""

Facts = Mapping[str, Mapping[str, str]]
"""Values that must be the same on every process: by kind, such as ``options``, then by name, each as text."""

REMEDIES = {
    "options": "every process needs the same options: give the same command on every host, with the same preset or "
    "file, and write a path that differs between hosts with a variable in single quotes, as in '$SCRATCH/cache'",
    "launch settings": "every process needs the same launch settings: use the same launch file on every host",
    "packages": "every process needs the same versions: install them from one list on every host",
    "files": "every process needs the same code: share the folder, or bring the copies up to date",
}
"""Kinds in the order in which they are compared, each with the requirement and the remedy."""


class Started(NamedTuple):
    """A process that has arrived to connect."""

    host: str
    rank: int
    facts: Facts

    @property
    def place(self) -> str:
        """Host and rank, for messages."""
        return f"on {self.host} (process {self.rank})"


def facts_of_start(config: object) -> Facts:
    """Return the facts that all processes must share. Reads every file of this package: 25 ms."""
    options: dict[str, str] = {}
    for name, value in flatten(to_tree(config)).items():
        if name.rpartition(".")[2] not in MAY_DIFFER:
            # As written in a file or command, so that a variable of each host stays a variable. Opening output_dir
            # then checks that it is one place for all hosts.
            options[name] = repr(value)
    return {"options": options, "packages": installed_versions(COMPARED_PACKAGES), "files": _file_hashes()}


def launch_settings(
    strategy: str | None, environment: Mapping[str, str], deepspeed: Mapping[str, Any] | None
) -> dict[str, str]:
    """Return what decides how a model is distributed: the strategy, its variables and DeepSpeed's settings."""
    settings = {"strategy": strategy or "data parallel"}
    settings |= {name.lower(): value for name, value in environment.items() if name.startswith(LAUNCH_VARIABLES)}
    settings |= {f"deepspeed_config.{name}": repr(value) for name, value in flatten(deepspeed or {}).items()}
    return settings


def _file_hashes() -> dict[str, str]:
    package = Path(__file__).parents[2]
    files = {f"accel_train/{path.relative_to(package)}": path for path in package.rglob("*.py")}
    recipe = recipe_file()
    if recipe is not None:
        folder = Path(recipe).parent
        files |= {f"{folder.name}/{path.relative_to(folder)}": path for path in _own_modules(folder, package)}
        # By its name alone, because copies of one recipe may lie in different folders.
        files[Path(recipe).name] = Path(recipe)
    found: dict[str, str] = {}
    for name, path in files.items():
        try:
            found[name] = f"hash {hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()}"
        except OSError:
            # A broken link left by an editor, or a file that is being replaced.
            found[name] = "unreadable"
    return found


def _own_modules(folder: Path, package: Path) -> list[Path]:
    """List the files beside a recipe that it has imported."""
    # A recipe may lie in a home directory that holds the interpreter too.
    others = (package, Path(sys.prefix), Path(sys.base_prefix), Path(sysconfig.get_path("stdlib")))
    found: list[Path] = []
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is None or not Path(file).is_relative_to(folder):
            continue
        if file.endswith(".py") and not any(Path(file).is_relative_to(other) for other in others):
            found.append(Path(file))
    return found


def packed(facts: Facts) -> str:
    """Return facts as text. Equal facts give equal texts."""
    # Hosts may list their files in a different order.
    return json.dumps(facts, sort_keys=True)


def digest(text: str) -> str:
    """Return a short hash of packed facts."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def refuse_different_start(first: Started, others: Iterable[Started]) -> None:
    """Raise ``UsageError`` for the first of ``others`` whose facts differ from ``first``, with both values of each."""
    for other in others:
        for kind, remedy in REMEDIES.items():
            different = _differences(kind, first, other)
            if different:
                raise UsageError(f"{shortened(different, SHOWN, '; ')}; {remedy}")


def _differences(kind: str, first: Started, other: Started) -> list[str]:
    ours, theirs = (started.facts.get(kind, {}) for started in (first, other))
    found: list[str] = []
    names = ours.keys() | theirs.keys()
    # A package or file that only one of the two hosts has is not in use.
    if kind in ("packages", "files"):
        names = ours.keys() & theirs.keys()
    for name in sorted(names):
        values = [facts.get(name, "not set") for facts in (ours, theirs)]
        if values[0] != values[1]:
            found.append(f"{name}: {values[0]} {first.place}, but {values[1]} {other.place}")
    return found

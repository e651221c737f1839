"""A second Python environment: its interpreter, its packages, and whether it has this source of accel_train."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import accel_train
from accel_train.config import UsageError, expand_path
from accel_train.metrics.environment import PACKAGES

PROBE = (
    "import json, dataclasses\n"
    "from accel_train.rerun.upgrade.environment import this_environment\n"
    "print(json.dumps(dataclasses.asdict(this_environment())))\n"
)
PROBE_SECONDS = 300.0
"""Longest time for the imports of the other environment, which may lie on a slow network disk."""
SOURCE = Path(accel_train.__file__).parent
WITH_EFFECT = ("python", *PACKAGES)
"""Python and the packages whose versions a run records, because they affect its numbers."""
VENDORED = "_vendor"
OWN = "accel-train"
"""Name of this distribution. Its sources are compared in place of its version."""


@dataclass(frozen=True)
class Environment:
    """One side of the comparison."""

    interpreter: str
    python: str
    """Version of Python."""
    packages: Mapping[str, str]
    """Version of every installed distribution."""
    source: str
    """Directory of its ``accel_train``."""
    sources_sha256: str
    """Hash of the sources of its ``accel_train``."""


def this_environment() -> Environment:
    """Describe the environment of this process. Imports no torch."""
    packages: dict[str, str] = {}
    # Once imported, setuptools puts the packages that it vendors on the search path.
    paths = [path for path in sys.path if Path(path).name != VENDORED]
    for found in distributions(path=paths):
        name = found.metadata["Name"]
        # Of two copies on the search path the first is imported. A broken distribution has no name.
        if name:
            packages.setdefault(name.lower().replace("_", "-"), found.version)
    packages.pop(OWN, None)
    return Environment(sys.executable, platform.python_version(), packages, str(SOURCE), _hash_sources())


def _hash_sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCE.rglob("*.py")):
        digest.update(f"{path.relative_to(SOURCE).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def open_environment(place: str) -> Environment:
    """Describe the environment at ``place``, the directory of a virtual environment or a Python interpreter.

    Starts its interpreter. Raises ``UsageError`` if it cannot run this source of accel_train.
    """
    interpreter = _interpreter(place)
    try:
        # -P: a recipe does not see the current directory either, where a checkout may lie.
        command = [str(interpreter), "-P", "-c", PROBE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"--upgrade {place}: {interpreter} cannot be run ({error}); give a Python interpreter"
        ) from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise UsageError(
            f"--upgrade {place}: accel_train cannot be imported there ({lines[-1]}); install it, with the packages "
            f"that it needs: {_pip_command(interpreter)}"
        )
    # A package may print while it is imported.
    found = Environment(**json.loads(done.stdout.strip().splitlines()[-1]))
    if found.sources_sha256 != _hash_sources():
        raise UsageError(
            f"--upgrade {place}: its accel_train in {found.source} has different sources than {SOURCE}, so a "
            f"difference might not come from the packages; install this one: {_pip_command(interpreter)}"
        )
    return found


def _interpreter(place: str) -> Path:
    # Never resolved: the interpreter of a virtual environment is a link, and its place says which packages it has.
    path = Path(os.path.abspath(expand_path(place)))
    if path.is_file():
        return path
    for name in ("bin/python", "Scripts/python.exe"):
        if (path / name).is_file():
            return path / name
    raise UsageError(
        f"--upgrade {place}: the directory of a virtual environment (with bin/python in it) or a Python interpreter is "
        f"required; make one: python -m venv {place}"
    )


def _pip_command(interpreter: Path) -> str:
    # A checkout is installed from its folder, a wheel by its version.
    project = SOURCE.parent
    what = f"accel-train=={accel_train.__version__}"
    if (project / "pyproject.toml").is_file():
        what = f"-e {project}"
    return f"{interpreter} -m pip install {what}"


def differing_versions(here: Environment, there: Environment) -> dict[str, tuple[str | None, str | None]]:
    """Return the versions that differ, of Python and each package; None for one that is not installed.

    Those with an effect on the numbers of a run come first.
    """
    ours = {"python": here.python, **here.packages}
    theirs = {"python": there.python, **there.packages}
    names = [*WITH_EFFECT, *sorted((ours.keys() | theirs.keys()) - {*WITH_EFFECT})]
    differing: dict[str, tuple[str | None, str | None]] = {}
    for name in names:
        if ours.get(name) != theirs.get(name):
            differing[name] = (ours.get(name), theirs.get(name))
    return differing


def describe(side: Environment) -> dict[str, Any]:
    """Return the part of an environment for the receipt, without paths of this machine."""
    return {"python": side.python, "packages": dict(sorted(side.packages.items()))}

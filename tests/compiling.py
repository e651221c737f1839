"""What tests need beside the package, and where nothing can be compiled: torch and DeepSpeed hand paths to the compiler
without quotes (torch 2.13, DeepSpeed 0.19), so that a space in one ends it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from importlib.util import find_spec

import pytest


def with_a_space(*places: str) -> str | None:
    """The first that has one."""
    return next((place for place in places if " " in place), None)


NO_INDUCTOR = with_a_space(sys.prefix, tempfile.gettempdir(), os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
NO_DEEPSPEED = with_a_space(sys.prefix)
"""Extensions are built inside their folder, which may have a space."""


COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


def skip_without(package: str) -> None:
    """Skip the test where a package of the extra ``test-all`` is not installed."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -e '.[test-all]'")


def skip_without_deepspeed() -> None:
    """It compiles its communication on the CPU when it starts."""
    skip_without("deepspeed")
    if COMPILER is None:
        pytest.skip("DeepSpeed needs a C++ compiler: apt install g++")
    if NO_DEEPSPEED is not None:
        pytest.skip(f"DeepSpeed cannot compile with a space in {NO_DEEPSPEED}")

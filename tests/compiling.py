"""Where nothing can be compiled: torch and DeepSpeed hand paths to the compiler without quotes (torch 2.13, DeepSpeed
0.19), so that a space in one ends it."""

from __future__ import annotations

import os
import sys
import tempfile

import pytest


def with_a_space(*places: str) -> str | None:
    """The first that has one."""
    return next((place for place in places if " " in place), None)


NO_INDUCTOR = with_a_space(sys.prefix, tempfile.gettempdir(), os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
NO_DEEPSPEED = with_a_space(sys.prefix)
"""Extensions are built inside their folder, which may have a space."""


def skip_without_deepspeed() -> None:
    """It compiles its communication on the CPU when it starts."""
    if NO_DEEPSPEED is not None:
        pytest.skip(f"DeepSpeed cannot compile with a space in {NO_DEEPSPEED}")

"""One zygote for all fault tests, and the marker that ties a test to its row of the fault matrix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.harness import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run directory that does not exist yet."""
    return tmp_path / "run"

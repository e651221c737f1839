"""One trainers for all fault tests, and the marker that ties a test to its row of the fault matrix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.harness import Trainers


@pytest.fixture(scope="session")
def trainers() -> Iterator[Trainers]:
    made = Trainers()
    yield made
    made.close()


@pytest.fixture(scope="session")
def whole(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process that nothing happened to."""
    out = tmp_path_factory.mktemp("whole") / "run"
    trainers.stopped(out, 20)
    return out


@pytest.fixture(scope="session")
def whole_of_two(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two processes that nothing happened to."""
    out = tmp_path_factory.mktemp("whole_of_two") / "run"
    trainers.stopped(out, 20, 2)
    return out


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run directory that does not exist yet."""
    return tmp_path / "run"

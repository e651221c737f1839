"""What several files of tests need before and after each of their tests."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # one test on each core (-n auto): more threads would get in their way
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState


def forget() -> None:
    """Accelerate's state of this process, which outlives its objects."""
    AcceleratorState._reset_state(True)
    PartialState._reset_state()


@pytest.fixture
def fresh() -> Iterator[None]:
    """No Accelerator of another test, and none left behind."""
    forget()
    yield
    forget()


@pytest.fixture
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each legend takes ten seconds: above one, matplotlib warns of the default place."""
    monkeypatch.setattr("matplotlib.legend.time", SimpleNamespace(perf_counter=itertools.count(0, 10).__next__))


@pytest.fixture
def accelerator(fresh: None) -> Accelerator:
    """Of one process on the CPU."""
    return Accelerator(cpu=True)

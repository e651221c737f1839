"""What several files of tests need before and after each of their tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
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
def accelerator(fresh: None) -> Accelerator:
    """Of one process on the CPU."""
    return Accelerator(cpu=True)

"""The seam between a recipe's ``main`` and ``accel-train simulate``: empty in every real run.

A simulation calls ``main`` as a launcher would. ``preparation`` and ``loop`` ask here whether one is active, and let it
build the model, surround ``accelerator.prepare``, and iterate over the steps in place of the real training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn


class Simulation(Protocol):
    """Parts of a run replaced by a simulation. Arguments are those of the functions of the same name."""

    def build_model(self, accelerator: Any, build: Callable[[], nn.Module]) -> nn.Module:
        """Return the model of ``build``, without memory for its weights."""
        ...

    def preparing(self) -> AbstractContextManager[None]:
        """Surround ``accelerator.prepare``."""
        ...

    def training(self, opened: Any, prepared: Any, dataset: Any, order: Any) -> AbstractContextManager[Any]:
        """Return the object for a recipe's loop to iterate over and report to."""
        ...


class _State:
    """State of this process."""

    active: Simulation | None = None


_state = _State()


def active() -> Simulation | None:
    """Return the simulation of this process, None in every real run."""
    return _state.active


def weights_have_no_values() -> bool:
    """Return True on the meta device, where a model is only counted, and in a simulation: no file need be read."""
    return active() is not None or torch.get_default_device().type == "meta"


@contextmanager
def simulating(simulation: Simulation) -> Generator[None]:
    """Let ``simulation`` take the place of the machine in the body."""
    assert _state.active is None, "one simulation at a time"
    _state.active = simulation
    try:
        yield
    # A simulation leaves ``main`` by an exception.
    finally:
        _state.active = None

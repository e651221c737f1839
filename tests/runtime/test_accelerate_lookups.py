"""Accelerate's optimizer asks once."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator, optimizer
from accelerate.state import AcceleratorState, PartialState
from torch import nn

from accel_train.runtime.step_overhead import remember_lookups


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names that were looked for on sys.path."""
    seen: list[str] = []

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            seen.append(name)

    look = optimizer.is_lomo_available  # a recipe that ran in this process before has replaced it
    monkeypatch.setattr(optimizer, "is_lomo_available", getattr(look, "__wrapped__", look))
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    AcceleratorState._reset_state(True)
    yield seen
    AcceleratorState._reset_state(True)
    PartialState._reset_state()


def test_a_step_looks_for_no_package(searches: list[str]) -> None:
    model = nn.Linear(2, 2)
    prepared = Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    prepared.step()
    searches.clear()
    prepared.step()
    assert searches == ["lomo_optim"] * 2, "Accelerate does not look twice any more; delete remember_lookups"

    assert remember_lookups()
    prepared.step()
    searches.clear()
    prepared.step()
    assert searches == []


def test_zero_grad_takes_no_signature_apart(searches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "inspect", inspect)  # as in a process without an earlier run
    taken: list[object] = []
    signature = inspect.signature
    monkeypatch.setattr(inspect, "signature", lambda of: taken.append(of) or signature(of))
    model = nn.Linear(2, 2)
    prepared = Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    prepared.zero_grad()
    taken.clear()
    prepared.zero_grad()
    assert len(taken) == 1, "Accelerate takes no signature apart any more; leave it out of remember_lookups"

    remember_lookups()
    prepared.zero_grad()
    taken.clear()
    model.weight.grad = torch.ones_like(model.weight)
    prepared.zero_grad()
    assert taken == []
    assert model.weight.grad is None


def test_the_step_is_the_same_and_asking_again_changes_nothing(searches: list[str]) -> None:
    remember_lookups()
    assert not remember_lookups()
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    prepared = Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    model.weight.grad = torch.ones_like(model.weight)
    prepared.step()
    assert torch.equal(model.weight, before - 1)


def test_a_version_without_the_question_is_left_alone(searches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(optimizer, "is_lomo_available")
    assert not remember_lookups()

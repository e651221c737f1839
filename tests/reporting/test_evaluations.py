"""What an evaluation returns becomes plain numbers, or is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from accel_train.config import UsageError
from accel_train.reporting.evaluations import numbers, returned_by, warn_undeclared


def test_tensors_and_arrays_of_one_element_are_numbers() -> None:
    given = {
        "tensor": torch.tensor([0.5]),
        "scalar": torch.tensor(0.25),
        "numpy": np.float32(0.75),
        "array": np.array([[2.0]]),
        "count": 3,
    }
    found = numbers(Accelerator(cpu=True), given)
    assert found == {"tensor": 0.5, "scalar": 0.25, "numpy": 0.75, "array": 2.0, "count": 3}
    assert [type(value) for value in found.values()] == [float, float, float, float, int]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "it returned None: return one"),
        ([0.5], "it returned a list: return one"),
        ({"loss": {"a": 1.0}}, "it returned a dict for 'loss': give one number"),
        ({"loss": torch.ones(3)}, r"it returned a Tensor of shape \(3,\) for 'loss'"),
        ({"loss": "0.5"}, "it returned a str for 'loss'"),
        ({1: 0.5}, "it returned a float for 1: .* under a name"),
    ],
)
def test_anything_else_is_refused_once_the_step_is_saved(returned: Any, words: str) -> None:
    saved: list[str] = []
    with pytest.raises(UsageError, match=f"training.evaluate takes a function that returns a dict of numbers; {words}"):
        numbers(Accelerator(cpu=True), returned, lambda: saved.append("saved"))
    assert saved == ["saved"]


def test_an_evaluation_that_was_called_already_is_refused() -> None:
    with pytest.raises(UsageError, match="it was given a dict: pass the function itself, without calling it"):
        returned_by({"loss": 0.5})


def test_a_misspelt_metric_is_named_with_the_one_that_was_meant(caplog: pytest.LogCaptureFixture) -> None:
    warn_undeclared(["heldout_nll", "heldout_macro_f1"], {"heldout_nll": 1.0, "heldout_f1": 0.5})
    [record] = caplog.records
    assert "returned heldout_f1, which" in record.getMessage()
    assert "(did you mean 'heldout_macro_f1'?)" in record.getMessage()
    caplog.clear()
    warn_undeclared(["heldout_nll"], {"heldout_nll": 1.0, "more": 0.5})
    warn_undeclared(None, {"more": 0.5})
    assert not caplog.records

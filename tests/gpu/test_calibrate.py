"""Rates of a GPU, by its own clock."""

from __future__ import annotations

import pytest
import torch

from accel_train.calibration.measuring import Place, measure
from accel_train.speed.device_peaks import peak_of


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rates_are_below_the_data_sheet_and_not_far_below() -> None:
    """A clock that did not wait for the device would find rates far above it."""
    device = torch.device("cuda", torch.cuda.current_device())
    found = measure(Place(device, "bf16", 0.0), seconds=5.0)
    assert (found.machine.device_type, found.machine.clock) == ("cuda", "wall")
    peak = peak_of(device, "bf16")
    if peak is None:
        pytest.skip(f"no data sheet of {found.machine.device}")
    assert 0.3 * peak < found.figures.products.value < peak
    assert 0.05 * peak < found.figures.attention.value < peak
    assert found.figures.operators.value < 1.2 * found.figures.copy.value

"""Warnings before a model is prepared."""

from __future__ import annotations

import logging

import pytest
from torch import nn

from accel_train import preparation


@pytest.mark.parametrize(
    ("layer", "warned"),
    [(nn.Dropout(0.1), True), (nn.Dropout2d(0.5), True), (nn.Dropout(0.0), False), (nn.GELU(), False)],
)
def test_a_dropout_layer_is_warned_about_once(layer: nn.Module, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), layer, nn.Sequential(layer))
    with caplog.at_level(logging.WARNING):
        preparation._warn_about_dropout(model)
    assert len(caplog.records) == warned
    assert ("1 is Dropout" in caplog.text) == warned

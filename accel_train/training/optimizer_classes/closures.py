"""The closure of an optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Call the closure with gradients enabled, unlike in ``step``, and return its loss. None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():  # a closure runs a backward
        return closure()

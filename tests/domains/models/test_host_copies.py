"""No model copies from the host in its training step: on a GPU such a copy waits for all work before it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from accel_train.domains.models.mmdit import MMDiTConfig, MultimodalMMDiT, MultimodalMMDiTConfig
from accel_train.domains.models.sd3 import SD3, SD3Config

DEVICE = torch.device("meta")
"""Stands for a GPU: another device than the host."""


class HostCopies(TorchDispatchMode):
    """Operators that read a tensor of the host which has dimensions, while others are on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        on_device = any(tensor.device == DEVICE for tensor in tensors)
        if on_device and any(tensor.device.type == "cpu" and tensor.dim() for tensor in tensors):
            self.found.append(str(func))
        return result


def sd3() -> Callable[[], Tensor]:
    model = SD3(SD3Config(32, 3, 8, 4, 2, 24, 20, max_side=12, base_side=8))
    latents, text, pooled, time = torch.randn(2, 4, 8, 20), torch.randn(2, 5, 24), torch.randn(2, 20), torch.rand(2)
    return lambda: model(latents, text, pooled, time)


def mmdit(grid: tuple[int, int] | None) -> Callable[[], Tensor]:
    model = MultimodalMMDiT(MultimodalMMDiTConfig(MMDiTConfig(width=48, depth=2, heads=4), 50, 6, 8, 12, grid))
    tokens, latents = torch.randint(0, 50, (2, 8)), torch.randn(2, 12, 6)
    mask, time = torch.ones(2, 8, dtype=torch.bool), torch.rand(2)

    def step() -> Tensor:
        output = model(tokens, latents, time, time, mask)
        return output.text_logits.sum() + output.latents.sum()

    return step


CASES: dict[str, Callable[[], Callable[[], Tensor]]] = {
    "sd3": sd3,
    "mmdit": lambda: mmdit(None),
    "mmdit on pictures": lambda: mmdit((3, 4)),
}


def copies_of(step: Callable[[], Tensor]) -> list[str]:
    with HostCopies() as copies:
        step().sum().backward()
    return copies.found


@pytest.mark.parametrize("name", CASES)
def test_a_training_step_reads_nothing_of_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # There is none for this device.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    with DEVICE:
        step = CASES[name]()
    # Outside of it, where a tensor without a device is one of the host.
    assert copies_of(step) == []


def test_a_copy_would_be_seen() -> None:
    table = nn.Parameter(torch.randn(12, 4, device=DEVICE))
    places = torch.arange(3)
    assert copies_of(lambda: table[places.to(DEVICE)]) == ["aten._to_copy.default"]
    assert "aten.index.Tensor" in copies_of(lambda: table[places])

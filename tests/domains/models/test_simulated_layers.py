"""Layers of 8 and 4 bits in a simulation have the bytes of bitsandbytes' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accel_train.domains.models.quantised import Bits, is_quantised, quantise

pytest.importorskip("bitsandbytes")
CPU = torch.device("cpu")


def quantised(bits: Bits, sizes: tuple[int, int], *, bias: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(*sizes, bias=bias), nn.Linear(sizes[1], 8))
    quantise(model, ["0"], bits, compute=torch.bfloat16, device=CPU)
    assert is_quantised(model.get_submodule("0"))
    return model


def tensors_of(layer: Any) -> list[Tensor]:
    """The weight with its scales, wherever bitsandbytes keeps them."""
    weight = layer.weight
    found: list[Any] = [weight.data, getattr(weight, "SCB", None), getattr(layer, "scales", None)]
    found += getattr(layer, "statistics", [])
    state = getattr(weight, "quant_state", None)
    while state is not None:
        found += vars(state).values()
        state = state.state2
    return [each for each in found if isinstance(each, Tensor)]


def sizes_of(layer: Any) -> list[int]:
    """Bytes of each storage, once."""
    storages: list[Any] = [each.untyped_storage() for each in tensors_of(layer)]
    found = {storage._cdata: storage.nbytes() for storage in storages}
    return sorted(found.values())


@pytest.mark.parametrize("sizes", [(64, 32), (70, 33), (300, 1000)])
@pytest.mark.parametrize("bits", ["int8", "nf4"])
@pytest.mark.parametrize("bias", [False, True])
def test_bytes_at_rest(bits: Bits, sizes: tuple[int, int], bias: bool) -> None:
    real = quantised(bits, sizes, bias=bias).get_submodule("0")
    with FakeTensorMode():
        fake = quantised(bits, sizes, bias=bias).get_submodule("0")
    assert type(fake).__name__.startswith("Simulated")
    expected, found = sizes_of(real), sizes_of(fake)
    assert found == expected
    assert (fake.bias is None) == (real.bias is None)


@pytest.mark.parametrize("bits", ["int8", "nf4"])
def test_gradients_have_the_dtypes_of_the_real_layer(bits: Bits) -> None:
    def dtypes(model: nn.Module) -> list[torch.dtype]:
        input = torch.randn(2, 5, 64, dtype=torch.bfloat16, requires_grad=True)
        output = model.get_submodule("0")(input)
        output.sum().backward()
        assert input.grad is not None
        assert output.shape == (2, 5, 32)
        assert input.grad.shape == input.shape
        return [output.dtype, input.grad.dtype]

    expected = dtypes(quantised(bits, (64, 32), bias=False))
    with FakeTensorMode():
        assert dtypes(quantised(bits, (64, 32), bias=False)) == expected

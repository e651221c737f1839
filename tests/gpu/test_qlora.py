"""A base of 4 and 8 bits on a GPU: its values are those on the CPU, adapters learn on it, and it stays."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from accel_train.domains.models import lora, quantised
from accel_train.domains.models.lora import LoraConfig, apply_lora
from tests.domains.language import tiny

GPU = torch.device("cuda")
TOKENS = torch.arange(24).reshape(2, 12) + 3


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS.to(GPU), use_cache=False).logits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("bits", ["nf4", "int8", "fp8"])
def test_adapters_learn_on_a_quantised_base_that_stays(bits: Any) -> None:
    model: Any = tiny.model().to(GPU)
    torch.manual_seed(1)
    apply_lora(model, LoraConfig(rank=4, base_precision=bits), "bf16", GPU)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    assert {p.dtype for p in frozen.values()} == {torch.uint8 if bits == "nf4" else torch.int8, torch.bfloat16}
    assert all(parameter.is_cuda for parameter in model.parameters())
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-2)
    losses: list[float] = []
    for _ in range(12):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=TOKENS.to(GPU), labels=TOKENS.to(GPU), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.1
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name].detach(), value) for name, value in frozen.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_four_bits_compute_what_their_values_do() -> None:
    """The kernel of 4 bits against a float model of the same values, in fp32."""
    model: Any = tiny.model().to(GPU)
    lora.freeze_base(model, "nf4", "fp32", GPU)
    plain = copy.deepcopy(model)
    quantised.dequantise(plain)
    torch.testing.assert_close(logits(model), logits(plain.to(GPU)), rtol=1e-4, atol=1e-4)

"""The MMDiT against diffusers' block, and what training relies on."""

import torch

from accel_train.models.mmdit import MMDiTConfig, MultimodalMMDiT, MultimodalMMDiTConfig


def test_every_parameter_takes_part() -> None:
    torch.manual_seed(0)
    model = MultimodalMMDiT(MultimodalMMDiTConfig(MMDiTConfig(width=32, depth=2, heads=2), 50, 6, 8, 2))
    output = model(
        torch.randint(0, 50, (3, 8)), torch.randn(3, 2, 6), torch.rand(3), torch.rand(3), torch.ones(3, 8) > 0
    )
    assert output.text_logits.shape == (3, 8, 50)
    assert output.latents.shape == (3, 2, 6)
    (output.text_logits.square().sum() + 0 * output.latents.sum()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())

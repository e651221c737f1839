"""SD3's transformer with diffusers' weights gives diffusers' outputs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from accel_train.config import UsageError
from accel_train.domains.models.sd3 import SD3, SD3Config

TINY = SD3Config(32, 3, 8, 4, 2, 24, 20, max_side=12, base_side=8)


def diffusers_model(config: SD3Config) -> Any:
    from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel

    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=config.base_side * config.patch,
        patch_size=config.patch,
        in_channels=config.channels,
        out_channels=config.channels,
        num_layers=config.depth,
        attention_head_dim=config.head_width,
        num_attention_heads=config.width // config.head_width,
        joint_attention_dim=config.text_width,
        caption_projection_dim=config.width,
        pooled_projection_dim=config.pooled_width,
        pos_embed_max_size=config.max_side,
        qk_norm="rms_norm" if config.qk_norm else None,
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_weights_of_diffusers_give_its_outputs(qk_norm: bool) -> None:
    config = replace(TINY, qk_norm=qk_norm)
    theirs = diffusers_model(config)
    ours = SD3(config).eval()
    ours.load_diffusers(theirs.state_dict())
    time = torch.tensor([3.0, 700.0])
    text = torch.randn(2, 5, 24)
    pooled = torch.randn(2, 20)
    for size in ((16, 16), (8, 20), (24, 6)):
        latents = torch.randn(2, 4, *size)
        expected = theirs(latents, text, pooled, time, return_dict=False)[0]
        torch.testing.assert_close(ours(latents, text, pooled, time), expected, rtol=1e-4, atol=1e-4)


def test_the_named_size_is_that_of_sd3_medium() -> None:
    config = SD3Config()
    with torch.device("meta"):
        ours = sum(parameter.numel() for parameter in SD3(config).parameters())
        theirs = sum(parameter.numel() for parameter in diffusers_model(config).parameters())
    # diffusers also has queries of the last block's text, whose results it drops.
    assert ours == theirs - (config.width + 1) * config.width
    assert 2.0e9 < ours < 2.1e9


def test_weights_of_another_shape_are_refused() -> None:
    weights = diffusers_model(TINY).state_dict()
    with pytest.raises(UsageError, match=r"have no place in a model of depth 2"):
        SD3(replace(TINY, depth=2)).load_diffusers(weights)
    with pytest.raises(UsageError, match="do not fit this shape"):
        SD3(replace(TINY, depth=4)).load_diffusers(weights)
    with pytest.raises(UsageError, match="positions cover only 12 x 12"):
        SD3(TINY)(torch.randn(1, 4, 26, 8), torch.randn(1, 5, 24), torch.randn(1, 20), torch.ones(1))

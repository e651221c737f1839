"""Shaped noise against the scripts that introduced it, and its keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from accel_train import rng
from accel_train.domains.diffusion.shaped_noise import NoiseKey, caption_dropped, shaped_noise

SHAPE = (4, 24, 17)


def key(count: int = 3, step: int = 2) -> NoiseKey:
    return NoiseKey(5, "train", step, torch.arange(count) + 40)


def pyramid_noise_like(noise: Tensor, draws: list[Tensor], factors: list[float], discount: float) -> Tensor:
    """Of kohya's sd-scripts (library/custom_train_functions.py), with its draws given."""
    _, _, w, h = noise.shape
    u = nn.Upsample(size=(w, h), mode="bilinear")
    for i, r in enumerate(factors):
        wn, hn = max(1, int(w / (r**i))), max(1, int(h / (r**i)))
        assert draws[i].shape[2:] == (wn, hn)
        noise = noise + u(draws[i]) * discount**i
        if wn == 1 or hn == 1:
            break
    return noise / noise.std()


def test_offset_noise_is_that_of_diffusers() -> None:
    """noise += args.noise_offset * torch.randn((B, C, 1, 1))."""
    plain = shaped_noise(key(), SHAPE)
    found = shaped_noise(key(), SHAPE, offset=0.1)
    offsets = key().normal("offset", (4, 1, 1))
    torch.testing.assert_close(found, plain + 0.1 * offsets)
    assert float((found - plain).flatten(2).std(2).max()) < 1e-6
    assert float((found - plain).abs().max()) > 0.05


@pytest.mark.parametrize(
    ("iterations", "shape"), [(1, SHAPE), (3, SHAPE), (8, SHAPE), (8, (4, 24, 2)), (8, (4, 2, 24))]
)
def test_multi_resolution_noise_is_that_of_kohya(iterations: int, shape: tuple[int, int, int]) -> None:
    one = key(count=1)
    factors = [2 + 2 * rng.host_uniform(5, f"train/factor{i}", 2) for i in range(iterations)]
    sizes = [(max(1, int(shape[1] / r**i)), max(1, int(shape[2] / r**i))) for i, r in enumerate(factors)]
    draws = [one.normal(f"coarse{i}", (4, *size)) for i, size in enumerate(sizes)]
    expected = pyramid_noise_like(one.normal("noise", shape), draws, factors, 0.4)
    found = shaped_noise(one, shape, iterations=iterations, discount=0.4)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_noise_belongs_to_the_sample_and_not_to_its_batch() -> None:
    whole = shaped_noise(key(), SHAPE, offset=0.1, iterations=4)
    alone = [
        shaped_noise(NoiseKey(5, "train", 2, torch.tensor([40 + i])), SHAPE, offset=0.1, iterations=4) for i in range(3)
    ]
    assert torch.equal(whole, torch.cat(alone))
    assert not torch.equal(whole, shaped_noise(key(step=3), SHAPE, offset=0.1, iterations=4))
    torch.testing.assert_close(whole.flatten(1).std(1), torch.ones(3))


def test_captions_are_dropped_as_often_as_asked() -> None:
    dropped = caption_dropped(key(count=20_000), 0.1)
    assert float(dropped.float().mean()) == pytest.approx(0.1, abs=0.01)
    assert not caption_dropped(key(count=1000), 0.0).any()
    assert caption_dropped(key(count=1000), 1.0).all()

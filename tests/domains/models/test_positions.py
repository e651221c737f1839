"""2-D positions against diffusers, and in the model."""

import pytest
import torch

from accel_train.config import UsageError
from accel_train.domains.models.mmdit import MMDiTConfig, MultimodalMMDiT, MultimodalMMDiTConfig
from accel_train.domains.models.positions import centred_places, sincos_2d

PICTURES = MultimodalMMDiTConfig(MMDiTConfig(width=48, depth=1, heads=4), 50, 6, 8, 12, (3, 4))


@pytest.mark.parametrize("grid", [(8, 8), (4, 6), (7, 3)])
@pytest.mark.parametrize(("base", "interpolation"), [(16, 1.0), (8, 2.0)])
def test_positions_are_those_of_diffusers(grid, base, interpolation):
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    expected = get_2d_sincos_pos_embed(32, grid, base_size=base, interpolation_scale=interpolation)
    found = sincos_2d(32, grid, base, interpolation)
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=1e-6)


def test_a_crop_is_that_of_sd3():
    from diffusers.models.embeddings import PatchEmbed

    patches = PatchEmbed(height=8, width=8, patch_size=1, embed_dim=32, pos_embed_max_size=12)
    whole = sincos_2d(32, (12, 12), base=8)
    for grid in ((8, 8), (5, 10), (12, 1)):
        places = centred_places(grid, (12, 12), torch.device("cpu"))
        torch.testing.assert_close(whole[places], patches.cropped_pos_embed(*grid)[0], rtol=0, atol=1e-6)


def test_a_crop_of_a_grid_that_is_no_square():
    places = centred_places((2, 3), (4, 5), torch.device("cpu"))
    assert places.tolist() == [6, 7, 8, 11, 12, 13]


def build():
    torch.manual_seed(0)
    model = MultimodalMMDiT(PICTURES)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def inputs(length):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 50, (2, 8), generator=generator)
    return tokens, torch.randn(2, length, 6, generator=generator), torch.rand(2), torch.rand(2), None


def test_the_model_tells_places_apart_and_reads_a_smaller_picture():
    model = build()
    given = inputs(12)
    output = model(*given).latents
    turned = model(given[0], given[1].flip(1), *given[2:]).latents
    assert (turned.flip(1) - output).abs().max() > 0.01
    small = inputs(4)
    assert model(*small, grid=(2, 2)).latents.shape == (2, 4, 6)
    # The same four tokens elsewhere on the grid.
    assert not torch.allclose(model(*small, grid=(1, 4)).latents, model(*small, grid=(2, 2)).latents)


def test_learned_positions_of_a_smaller_picture_are_those_of_the_middle():
    model = build()
    small = inputs(4)
    before = model(*small, grid=(2, 2)).latents
    changed = []
    for place in range(12):
        with torch.no_grad():
            model.latent_positions.weight[place] += 1
            if not torch.equal(model(*small, grid=(2, 2)).latents, before):
                changed.append(place)
            model.latent_positions.weight[place] -= 1
        before = model(*small, grid=(2, 2)).latents
    assert changed == centred_places((2, 2), (3, 4), torch.device("cpu")).tolist()


def test_the_grid_goes_into_the_config_and_not_into_the_weights(tmp_path):
    model = build()
    assert "grid_positions" not in model.state_dict()
    model.save_pretrained(tmp_path)
    loaded = MultimodalMMDiT.from_pretrained(tmp_path)
    assert loaded.config == PICTURES
    given = inputs(12)
    assert torch.equal(loaded(*given).latents, model(*given).latents)


def test_a_grid_of_another_length_is_refused():
    with pytest.raises(UsageError, match="latent_grid 3 x 4 with max_latent_length 11"):
        MultimodalMMDiTConfig(MMDiTConfig(width=48, depth=1, heads=4), 50, 6, 8, 11, (3, 4))

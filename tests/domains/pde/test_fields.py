"""Losses and measures of fields against closed forms and numpy in fp64."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from accel_train import rng
from accel_train.domains.pde import fields

SHAPES = [(3, 2, 1, 16), (3, 2, 1, 15), (3, 1, 8, 12), (3, 2, 9, 7)]


def pair(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def wave(rows: int, columns: int, size: tuple[int, int] = (16, 16), amplitude: float = 1.0) -> Tensor:
    """(1, 1, H, W): a plane wave with so many periods along each axis."""
    y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) / n for n in size), indexing="ij")
    return (amplitude * (2 * torch.pi * (rows * y + columns * x) + 0.3).cos()).float()[None, None]


@pytest.mark.parametrize("shape", [*SHAPES, (3, 2, 11)])
def test_errors_equal_numpy(shape: tuple[int, ...]) -> None:
    p, t = pair(shape)
    a, b = p.double().numpy().reshape(3, -1), t.double().numpy().reshape(3, -1)
    np.testing.assert_allclose(fields.squared_error(p, t), ((a - b) ** 2).mean(1), rtol=1e-5)
    np.testing.assert_allclose(fields.mean_square(t), (b**2).mean(1), rtol=1e-5)
    expected = np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)
    np.testing.assert_allclose(relative_l2(p, t), expected, rtol=1e-5)


def test_nrmse_is_that_of_the_whole_set_however_it_is_cut() -> None:
    p, t = pair((7, 1, 1, 16))
    t[3] *= 20  # the mean of the samples' own nrmse would be another number
    whole = float(((p - t) ** 2).mean().sqrt() / (t**2).mean().sqrt())
    for cut in (1, 2, 7):
        parts = list(zip(p.split(cut), t.split(cut), strict=True))
        errors = sum(float(fields.squared_error(a, b).sum()) for a, b in parts)
        sizes = sum(float(fields.mean_square(b).sum()) for _, b in parts)
        assert fields.nrmse(errors, sizes) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_spectrum_equals_the_full_transform_of_numpy(shape: tuple[int, ...]) -> None:
    field, _ = pair(shape)
    full = np.abs(np.fft.fft2(field.double().numpy(), norm="forward")) ** 2
    rows, columns = (np.fft.fftfreq(n, 1 / n) for n in shape[2:])
    ring = np.round(np.hypot(rows[:, None], columns[None])).astype(int)
    result = fields.spectrum(field)
    for k in range(result.shape[1]):
        np.testing.assert_allclose(result[:, k], full[:, :, ring == k].sum((1, 2)), rtol=1e-4, atol=1e-7)
    assert result.shape[1] == ring.max() + 1
    torch.testing.assert_close(result.sum(1), shape[1] * fields.mean_square(field))


@pytest.mark.parametrize(("rows", "columns", "ring"), [(0, 5, 5), (3, 4, 5), (-3, 4, 5), (2, 0, 2), (0, 8, 8)])
def test_a_wave_is_in_the_ring_of_its_number(rows: int, columns: int, ring: int) -> None:
    field = wave(rows, columns)
    energy = fields.spectrum(field)[0]
    assert int(energy.argmax()) == ring
    torch.testing.assert_close(energy[ring], fields.mean_square(field)[0], rtol=1e-4, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_spectral_loss_equals_numpy(shape: tuple[int, ...]) -> None:
    p, t = pair(shape)
    a, b = (np.abs(np.fft.fft2(x.double().numpy())) for x in (p, t))
    expected = ((a - b) ** 2).sum((1, 2, 3)) / (b**2).sum((1, 2, 3))
    np.testing.assert_allclose(fields.spectral_loss(p, t), expected, rtol=1e-4)


@pytest.mark.parametrize("measure", [fields.spectral_loss, fields.spectral_error])
def test_spectral_measures_see_sizes_and_not_places(measure: Callable[[Tensor, Tensor], Tensor]) -> None:
    _, t = pair((2, 1, 8, 8))
    assert measure(t.roll((3, 2), (-2, -1)), t).max() < 1e-5
    factor = 1.1
    expected = (factor - 1) ** 2 if measure is fields.spectral_loss else factor**2 - 1
    torch.testing.assert_close(measure(factor * t, t), torch.full((2,), expected), rtol=1e-4, atol=0)
    assert measure(wave(0, 5), wave(0, 3)).item() == pytest.approx(2, rel=1e-3)


def relative_l2(prediction: Tensor, target: Tensor) -> Tensor:
    least = torch.tensor(fields.TINY)
    return fields.relative_l2(fields.squared_error(prediction, target), fields.mean_square(target), least)[0]


def gap_of(fields_: Tensor, reference: Tensor) -> Tensor:
    return fields.conservation_gap(fields_, reference, fields.Scale((0.0,), (1.0,)))


def test_gradients_are_finite_at_fields_of_zeros() -> None:
    prediction = torch.zeros(2, 1, 4, 4, requires_grad=True)
    target = torch.zeros(2, 1, 4, 4)
    target[1] = 1.0
    losses = (fields.spectral_loss, fields.squared_error, gap_of)
    total = torch.stack([loss(prediction, target) for loss in losses])
    assert total.isfinite().all()
    total.sum().backward()
    assert prediction.grad is not None
    assert prediction.grad.isfinite().all()


def test_conservation_gap() -> None:
    reference = wave(0, 2) + 3.0
    torch.testing.assert_close(gap_of(reference.roll(3, -1), reference), torch.zeros(1), atol=1e-6, rtol=0)
    torch.testing.assert_close(gap_of(reference - 0.6, reference), torch.tensor([0.2]))
    torch.testing.assert_close(gap_of(1.2 * reference, reference), torch.tensor([0.2]))
    centred = reference - 3.0  # its integral is zero
    gap = gap_of(centred + 0.1, centred)
    torch.testing.assert_close(gap, 0.1 / centred.abs().mean()[None], rtol=1e-4, atol=0)
    two = torch.cat((reference, reference), dim=1)
    wrong = torch.cat((reference + 0.3, reference - 0.3), dim=1)  # one channel does not make up for the other
    torch.testing.assert_close(gap_of(wrong, two), torch.tensor([0.1]))


def test_the_gap_of_a_channel_at_rest_is_of_its_deviation() -> None:
    """A wave is released with a height and without momentum."""
    scale = fields.Scale((1.0, 0.0), (0.5, 0.2))
    height = 1 + 0.1 * wave(0, 2)
    start = torch.cat((height, torch.zeros_like(height)), dim=1)
    gap = fields.conservation_gap(start + 0.01, start, scale)
    torch.testing.assert_close(gap, torch.tensor([(0.01 / 1 + 0.01 / 0.02) / 2]))


def test_every_measure_is_of_each_sample_alone() -> None:
    p, t = pair((5, 2, 6, 8))
    for measure in (
        fields.squared_error,
        relative_l2,
        fields.spectral_loss,
        fields.spectral_error,
        gap_of,
    ):
        whole = measure(p, t)
        assert whole.shape == (5,)
        assert whole.dtype == torch.float32
        torch.testing.assert_close(torch.cat([measure(p[i : i + 1], t[i : i + 1]) for i in range(5)]), whole)
        low = measure(p.bfloat16(), t.bfloat16())
        assert low.dtype == torch.float32
        torch.testing.assert_close(low, whole, rtol=0.02, atol=0.01)


@pytest.mark.parametrize(("count", "points"), [(8, 64), (64, 64), (24, 100), (7, 9)])
def test_stratified_points_are_one_from_each_stretch(count: int, points: int) -> None:
    draws = rng.uniform(rng.sample_keys(0, "test", 0, torch.arange(50)), (count,))
    index = fields.sample_points(draws, points)
    assert all(len(set(row)) == count for row in index.tolist()) or points % count
    assert index.min() >= 0
    assert index.max() < points
    stretch = torch.arange(count) * points / count
    assert (index >= stretch.floor()).all()
    assert (index <= (stretch + points / count).ceil()).all()


@pytest.mark.parametrize(("count", "stratified"), [(50, False), (4, True), (7, True)])
def test_every_point_is_as_likely(count: int, stratified: bool) -> None:
    draws = rng.uniform(rng.sample_keys(0, "test", 0, torch.arange(20000 // count)), (count,))
    counts = fields.sample_points(draws, 10, stratified).flatten().bincount(minlength=10)
    assert len(counts) == 10
    assert ((counts - 2000).abs() < 5 * 2000**0.5).all()


@pytest.mark.parametrize("stratified", [False, True])
def test_extreme_draws_stay_in_the_grid(stratified: bool) -> None:
    ends = torch.tensor([[0.0, 1 - 2.0**-24], [1 - 2.0**-24, 1 - 2.0**-24]])
    index = fields.sample_points(ends, 1000003, stratified)
    assert index.min() >= 0
    assert index.max() <= 1000002


def test_values_at_points() -> None:
    field, _ = pair((4, 3, 5, 6))
    index = fields.sample_points(torch.rand(4, 7, generator=torch.Generator().manual_seed(0)), 30)
    values = fields.at_points(field, index)
    assert values.shape == (4, 3, 7)
    for b in range(4):
        for q, flat in enumerate(index[b].tolist()):
            assert torch.equal(values[b, :, q], field[b, :, flat // 6, flat % 6])


def test_boundary_points_are_on_the_boundary_and_everywhere_on_it() -> None:
    draws = rng.uniform(rng.sample_keys(0, "test", 0, torch.arange(500)), (16,))
    points = fields.boundary_points(draws, 2)
    assert points.shape == (500, 16, 2)
    on_an_end = (points == 0) | (points == 1)
    assert on_an_end.any(-1).all()
    assert points.min() >= 0
    assert points.max() <= 1
    for axis in (0, 1):
        for end in (0.0, 1.0):
            along = points[points[..., axis] == end][:, 1 - axis]
            assert abs(len(along) - 2000) < 5 * 2000**0.5
            assert abs(float(along.mean()) - 0.5) < 0.05
            assert along.std() > 0.25
    line = fields.boundary_points(draws, 1)
    assert line.shape == (500, 16, 1)
    assert set(line.unique().tolist()) == {0.0, 1.0}


def test_zeros_that_were_normalised_and_back_have_no_size() -> None:
    """Whatever the mean is, and fields of that mean have one."""
    for mean, std in ((0.0, 1.0), (0.3, 0.7), (101325.0, 20.0), (-3e-9, 1e-12)):
        scale = fields.Scale((mean, mean), (std, std))
        physical = torch.full((3, 2, 1, 64), mean) + std * torch.randn(3, 2, 1, 64)
        physical[1] = 0
        physical[2, 0] = 0
        unit = scale.in_units_of(scale.unit)
        target = unit.denormalise(scale.normalise(physical))
        least = fields.least_squares(unit, target)
        squares = fields.channel_squares(target)
        errors, has_size = fields.relative_l2(4 * squares, squares, least)
        assert has_size.tolist() == [[1, 1], [0, 0], [0, 1]]
        assert errors.tolist() == [[2, 2], [0, 0], [0, 2]]
        _, has_size = fields.relative_l2(squares.mean(1), squares.mean(1), least.mean())
        assert has_size.tolist() == [1, 0, 1]

"""Scale, losses and error metrics of fields, one value per sample, and the sampling of query points.

Fields are (B, C, H, W), with H = 1 in 1-D. Functions without a spectrum also take (B, C, Q) at points. Errors are
(B,) in fp32. Callers weight and sum them and divide by the weight of the global batch, so a loss or a metric does not
depend on the split into micro-batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

TINY = 1e-12
"""Smallest divisor of a relative error, for all-zero fields. Fields are in `Scale.unit`, so of size about 1."""
LEAST_SIZE = 0.1
"""Smallest divisor of a conservation gap, in standard deviations of the channel."""


# ------------------------------------------------------------------------------------------------------------ scale
@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of each channel over the training split."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, values: Tensor, trailing: int = 2) -> Tensor:
        """Scale physical values (..., C, H, W) to mean 0 and deviation 1. `trailing` is the number of axes after C."""
        mean, std = self._shaped(values, trailing)
        return (values - mean) / std

    def denormalise(self, values: Tensor, trailing: int = 2) -> Tensor:
        """Undo `normalise`."""
        mean, std = self._shaped(values, trailing)
        return values * std + mean

    @property
    def unit(self) -> float:
        """The unit in which relative errors are computed: a power of two near the largest standard deviation.

        In physical units, the squares of very small or large fields would leave the range of fp32. Scaling by a power
        of two does not change any digit of a ratio.
        """
        _, exponent = math.frexp(max(self.std))
        return math.ldexp(1.0, exponent)

    def in_units_of(self, unit: float) -> Scale:
        """Return the scale that denormalises to multiples of `unit`."""
        return Scale(tuple(mean / unit for mean in self.mean), tuple(std / unit for std in self.std))

    def _shaped(self, values: Tensor, trailing: int) -> tuple[Tensor, Tensor]:
        shape = (-1, *[1] * trailing)
        mean = _constant(self.mean, values.device, values.dtype)
        std = _constant(self.std, values.device, values.dtype)
        return mean.view(shape), std.view(shape)


@lru_cache(maxsize=256)
def _constant(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Cache constants on the device: copying them in every step would synchronise with it."""
    # The first call may come from evaluation, and training cannot use inference tensors.
    with torch.inference_mode(False):
        return torch.tensor(numbers, device=device, dtype=dtype)


# ----------------------------------------------------------------------------------------------------------- errors
def mean_square(fields: Tensor) -> Tensor:
    """Average the square over channels and points: (B, C, ...) -> (B,). Of the target, it is the divisor of `nrmse`."""
    return fields.float().square().flatten(1).mean(1)


def channel_squares(fields: Tensor) -> Tensor:
    """Average the square over the points of each channel: (B, C, ...) -> (B, C)."""
    return fields.float().square().flatten(2).mean(2)


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Average the squared difference over channels and points: (B, C, ...) -> (B,)."""
    return mean_square(prediction.float() - target.float())


def nrmse(squared_errors: float, mean_squares: float) -> float:
    """Compute nRMSE from the sums over all samples of `squared_error` and of the targets' `mean_square`."""
    return math.sqrt(squared_errors / max(mean_squares, TINY))


def least_squares(scale: Scale, like: Tensor) -> Tensor:
    """Return the largest mean square of a channel that still counts as all-zero: (C,), on the device of `like`.

    An error cannot be relative to an all-zero field. After normalisation and back, in fp32, such a field holds the
    rounding error of the mean instead of zeros.
    """
    deviation = _constant(scale.std, like.device, like.dtype)
    rounding = 4 * torch.finfo(torch.float32).eps * _constant(scale.mean, like.device, like.dtype)
    return (TINY * deviation.square()).maximum(rounding.square())


def relative_l2(squared_errors: Tensor, squares: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Compute |prediction - target| / |target| from `squared_error` and `mean_square` of the target.

    Also returns a flag per sample: 1 for a target with a mean square above `least`, 0 for an all-zero target. The error
    of the latter is set to 0. It would otherwise be arbitrarily large and spoil the mean over the samples.
    """
    has_size = squares > least
    ratio = squared_errors / torch.where(has_size, squares, 1.0)
    return torch.where(has_size, ratio.sqrt(), 0.0), has_size.to(squares.dtype)


def conservation_gap(fields: Tensor, reference: Tensor, scale: Scale) -> Tensor:
    """Compute |integral of fields - integral of reference| / integral of |reference|: (B, C, ...) -> (B,).

    The result is the mean over channels. The divisor is the size of the reference, since the integral of a conserved
    quantity is often zero. It is at least a tenth of the deviation in `scale`, since a channel at rest, such as the
    initial momentum of a released wave, is 0 everywhere. `scale` is that of `reference`. Fields are in its units,
    physical or a multiple of them, but not normalised, which would move the zero.
    """
    fields = fields.float().flatten(2)
    reference = reference.float().flatten(2)
    integral = fields.mean(-1)  # (B, C), of a domain of size 1
    wanted = reference.mean(-1)
    gap = (integral - wanted).abs()
    least = LEAST_SIZE * _constant(scale.std, reference.device, reference.dtype)
    size = reference.abs().mean(-1).maximum(least)
    return (gap / size).mean(-1)


# --------------------------------------------------------------------------------------------------------- spectrum
def spectral_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Compare Fourier magnitudes: sum of (|P| - |T|)^2 over sum of |T|^2, (B, C, H, W) -> (B,).

    It ignores phases: it penalises wrong energy at a length scale, where `squared_error` penalises wrong positions.
    """
    width = target.shape[-1]
    target_magnitudes = _magnitudes(target)  # (B, C, H, W // 2 + 1)
    difference = _magnitudes(prediction) - target_magnitudes
    error = _energy(difference, width).sum((1, 2, 3))
    energy = _energy(target_magnitudes, width).sum((1, 2, 3))
    return error / energy.clamp(min=TINY)


def spectrum(fields: Tensor) -> Tensor:
    """Compute the energy of each wave number 0, 1, 2, ..., summed over channels: (B, C, H, W) -> (B, K).

    The energies add up to the sum of `mean_square` over the channels (Parseval). In 2-D, wave number k collects the
    frequencies in the ring of radius k - 1/2 to k + 1/2.
    """
    height, width = fields.shape[-2:]
    energy = _energy(_magnitudes(fields), width)  # (B, C, H, W // 2 + 1)
    energy = energy.sum(1).flatten(1)
    rows = torch.fft.fftfreq(height, 1 / height, device=fields.device)
    columns = torch.fft.rfftfreq(width, 1 / width, device=fields.device)
    radius = torch.hypot(rows[:, None], columns[None])  # (H, W // 2 + 1), in waves per domain
    radius = radius.round().long().flatten()
    # The corner of the spectrum is the furthest from wave number 0.
    furthest = math.hypot(height // 2, width // 2)
    rings = energy.new_zeros(len(energy), round(furthest) + 1)
    return rings.index_add_(1, radius, energy)


def spectral_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Sum |energy - target energy| over wave numbers, relative to the target's energy: (B, C, H, W) -> (B,)."""
    target_energy = spectrum(target)
    difference = spectrum(prediction) - target_energy
    error = difference.abs().sum(1)
    return error / target_energy.sum(1).clamp(min=TINY)


def _magnitudes(fields: Tensor) -> Tensor:
    # Divided by the number of points, so that energies do not grow with the grid.
    return torch.fft.rfft2(fields.float(), norm="forward").abs()


def _energy(magnitudes: Tensor, width: int) -> Tensor:
    """Square the magnitudes of a real FFT, counting columns with a mirror image twice."""
    # A real FFT leaves out columns that are mirror images. Column 0, and the middle one of an even width, have none.
    column = torch.arange(magnitudes.shape[-1], device=magnitudes.device)
    has_no_mirror = (column == 0) | (2 * column == width)
    counted = torch.where(has_no_mirror, 1.0, 2.0)
    return magnitudes.square() * counted


# ----------------------------------------------------------------------------------------------------------- points
def sample_points(draws: Tensor, points: int, stratified: bool = True) -> Tensor:
    """Turn uniform draws (B, Q) into indices (B, Q) into a grid of `points` points, row by row.

    stratified: one point from each of Q equal stretches of the grid, without repetition if Q divides `points`. In both
    cases all points are equally likely. The draws come from `rng.uniform`, keyed by sample.
    """
    count = draws.shape[-1]
    if stratified:
        # One draw in each stretch has a smaller variance than the same number of independent draws.
        stretch = torch.arange(count, device=draws.device)
        draws = (stretch + draws) / count
    # A draw just below 1 may round up to the end of the grid.
    return (draws * points).long().clamp(max=points - 1)


def at_points(fields: Tensor, index: Tensor) -> Tensor:
    """Gather fields (B, C, H, W) at `index` (B, Q) of `sample_points`: (B, C, Q)."""
    per_channel = index[:, None].expand(-1, fields.shape[1], -1)  # (B, C, Q)
    return fields.flatten(2).gather(2, per_channel)


def boundary_points(draws: Tensor, dimensions: int) -> Tensor:
    """Turn uniform draws (B, Q) into coordinates (B, Q, d), evenly spread on the boundary of the interval or square.

    `squared_error` at these points is the boundary loss of a field with known boundary values (Dirichlet). The grid
    has no points there: its points are the centres of cells.
    """
    place = draws * 2 * dimensions
    # A draw just below 1 may round up past the last side.
    side = place.long().clamp(max=2 * dimensions - 1)
    along = place.frac()
    end = (side % 2).to(draws.dtype)  # 0 or 1: which of two opposite sides
    if dimensions == 1:
        return end[..., None]
    horizontal = torch.stack((end, along), -1)
    vertical = torch.stack((along, end), -1)
    return torch.where((side < 2)[..., None], horizontal, vertical)

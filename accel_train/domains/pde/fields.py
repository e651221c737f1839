"""Losses and measures of error between fields, one number for each sample, and the points at which fields are compared.

Fields are (B, C, H, W), 1-D ones with H = 1, or (B, C, Q) at points where a function takes no spectrum. Every result
is (B,) in fp32: times the weights of the samples and summed, it is divided by the weight of the global batch, so that
a loss or a figure does not depend on how a batch was cut.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_TINY = 1e-12
"""Smallest divisor: a field of zeros has no relative error."""


# ----------------------------------------------------------------------------------------------------------- errors
def mean_square(fields: Tensor) -> Tensor:
    """(B, C, ...) -> (B,): mean over channels and points. Of a target, the divisor of `nrmse`."""
    return fields.float().square().flatten(1).mean(1)


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """(B, C, ...) -> (B,): mean over channels and points of the squared difference."""
    return mean_square(prediction.float() - target.float())


def nrmse(squared_errors: float, mean_squares: float) -> float:
    """Root of the quotient of two sums over all samples: of `squared_error`, and of `mean_square` of the targets."""
    return math.sqrt(squared_errors / max(mean_squares, _TINY))


def relative_l2(prediction: Tensor, target: Tensor) -> Tensor:
    """(B, C, ...) -> (B,): |prediction - target| / |target| of each sample, over all channels and points."""
    return (squared_error(prediction, target) / mean_square(target).clamp(min=_TINY)).sqrt()


def conservation_gap(fields: Tensor, reference: Tensor) -> Tensor:
    """(B, C, ...) -> (B,): |integral of fields - integral of reference| / integral of |reference|, mean over channels.

    The size of the reference and not its integral is the divisor: that of many a conserved quantity is zero. In
    physical units: normalised fields have another zero.
    """
    fields, reference = fields.float().flatten(2), reference.float().flatten(2)
    gap = (fields.mean(-1) - reference.mean(-1)).abs()
    return (gap / reference.abs().mean(-1).clamp(min=_TINY)).mean(-1)


# --------------------------------------------------------------------------------------------------------- spectrum
def spectral_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """(B, C, H, W) -> (B,): sum over frequencies of (|P| - |T|)^2 over that of |T|^2, P and T Fourier transforms.

    Blind to phases: it says that the energy of a scale is wrong, `squared_error` says where.
    """
    wrong = _energy(_magnitudes(prediction) - _magnitudes(target), target.shape[-1])
    return wrong.sum((1, 2, 3)) / _energy(_magnitudes(target), target.shape[-1]).sum((1, 2, 3)).clamp(min=_TINY)


def spectrum(fields: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, K) energy of each wave number 0, 1, 2, ... around the domain, summed over channels.

    Their sum is the sum of `mean_square` over the channels (Parseval). Frequencies of a 2-D field are gathered in
    rings of radius k - 1/2 to k + 1/2.
    """
    height, width = fields.shape[-2:]
    energy = _energy(_magnitudes(fields), width).sum(1).flatten(1)  # (B, H * (W // 2 + 1))
    rows = torch.fft.fftfreq(height, 1 / height, device=fields.device)
    columns = torch.fft.rfftfreq(width, 1 / width, device=fields.device)
    radius = torch.hypot(rows[:, None], columns[None]).round().long().flatten()
    rings = round(math.hypot(height // 2, width // 2)) + 1
    return energy.new_zeros(len(energy), rings).index_add_(1, radius, energy)


def spectral_error(prediction: Tensor, target: Tensor) -> Tensor:
    """(B, C, H, W) -> (B,): sum over wave numbers of |energy - true energy|, over the true energy."""
    true = spectrum(target)
    return (spectrum(prediction) - true).abs().sum(1) / true.sum(1).clamp(min=_TINY)


def _magnitudes(fields: Tensor) -> Tensor:
    return torch.fft.rfft2(fields.float(), norm="forward").abs()


def _energy(magnitudes: Tensor, width: int) -> Tensor:
    """Squares; the columns that stand for their mirror images as well count twice."""
    column = torch.arange(magnitudes.shape[-1], device=magnitudes.device)
    return magnitudes.square() * torch.where((column == 0) | (2 * column == width), 1.0, 2.0)


# ----------------------------------------------------------------------------------------------------------- points
def sample_points(draws: Tensor, points: int, stratified: bool = True) -> Tensor:
    """Uniform draws (B, Q) -> indices (B, Q) into a grid of `points` points, row by row.

    stratified: one from each of Q equal stretches of the grid, none twice where Q divides `points`. Either way every
    point is as likely as any other. The draws come from `rng.uniform`, keyed by sample.
    """
    count = draws.shape[-1]
    if stratified:
        draws = (torch.arange(count, device=draws.device) + draws) / count
    return (draws * points).long().clamp(max=points - 1)


def at_points(fields: Tensor, index: Tensor) -> Tensor:
    """fields (B, C, H, W), index (B, Q) of `sample_points` -> (B, C, Q)."""
    return fields.flatten(2).gather(2, index[:, None].expand(-1, fields.shape[1], -1))


def boundary_points(draws: Tensor, dimensions: int) -> Tensor:
    """Uniform draws (B, Q) -> coordinates (B, Q, d) on the boundary of the unit interval or square, evenly spread.

    Where a field is known (Dirichlet) `squared_error` there is the boundary loss. Points in the middles of cells do
    not lie on it, so the grid itself does not show what a prediction is there.
    """
    place = draws * 2 * dimensions
    side, along = place.long().clamp(max=2 * dimensions - 1), place.frac()
    end = (side % 2).to(draws.dtype)
    if dimensions == 1:
        return end[..., None]
    return torch.where((side < 2)[..., None], torch.stack((end, along), -1), torch.stack((along, end), -1))

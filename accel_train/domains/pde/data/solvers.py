"""Numerical solvers of the generated equations, in float64."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
Spectrum = NDArray[np.complex128]


def solve_burgers(spectrum: Spectrum, viscosity: Float, dt: float, snapshots: int, courant: float = 0.5) -> Float:
    """Solve u_t + (u^2 / 2)_x = nu u_xx from spectra (B, X / 2 + 1) of numpy's rfft and viscosities (B,).

    Returns (B, snapshots, X), `dt` apart, starting with the initial fields. Space is a Fourier series with the upper
    third left empty against aliasing (Orszag). Time is the classical Runge-Kutta method of order 4 on
    exp(nu k^2 t) u_k, exact in the viscous term (Trefethen, Spectral Methods in MATLAB, program 27). A step is
    `courant` cells at the highest initial speed. Viscous flow never exceeds that speed.
    """
    points = 2 * (spectrum.shape[1] - 1)
    number = np.arange(spectrum.shape[1])
    resolved = number <= points // 3
    state = spectrum * resolved  # (B, X / 2 + 1)
    fields = [np.fft.irfft(state, points)]
    # At least 1, so that still fields take a step of finite length.
    highest = float(np.abs(fields[0]).max())
    speed = max(1.0, highest)
    steps = math.ceil(dt * speed * points / courant)
    step = dt / steps
    decay = -viscosity[:, None] * (2 * np.pi * number) ** 2  # (B, X / 2 + 1)
    # The viscous decay over half a step. Two of them make the whole one.
    half = np.exp(decay * (step / 2))
    # -(u^2 / 2)_x is -i pi k on the spectrum of u^2. 0 beyond the resolved modes, where the square would add energy.
    slope = -1j * np.pi * number * resolved * step

    for _ in range(snapshots - 1):
        for _ in range(steps):
            state = _runge_kutta_step(state, half, slope)
        fields.append(np.fft.irfft(state, points))
    return np.stack(fields, axis=1)


def _runge_kutta_step(state: Spectrum, half: Float, slope: Spectrum) -> Spectrum:
    """Advance spectra (B, X / 2 + 1) by a step. `half` is the decay over half of it, `slope` is -i pi k times it."""
    points = 2 * (state.shape[1] - 1)

    def change(spectrum: Spectrum) -> Spectrum:
        field = np.fft.irfft(spectrum, points)
        return slope * np.fft.rfft(field**2)

    first = change(state)
    second = change(half * (state + first / 2))
    third = change(half * state + second / 2)
    fourth = change(half * (half * state + third))
    # Each slope decays from its own time to the end: the first over both halves, the middle two over one.
    middle = half * (state + first / 6) + (second + third) / 3
    return half * middle + fourth / 6


def gaussian_fields(noise: Float, points: int) -> Float:
    """Build Gaussian random fields (B, points, points) from normal draws (B, m, m), one for each cosine mode.

    Their covariance is (9 - Laplace)^-2 with Neumann boundaries, as in Li et al. 2021 (arXiv 2010.08895, A.3.2).
    """
    from scipy.fft import idctn

    # A coarser grid uses the lower modes of the same draws.
    modes = min(points, noise.shape[-1])
    square = np.arange(modes) ** 2
    spectrum = np.zeros((len(noise), points, points))
    # Eigenvalues of 9 - Laplace for the cosine modes. The draws are divided once, which squares in the covariance.
    eigenvalues = np.pi**2 * (square[:, None] + square) + 9.0
    lower = noise[:, :modes, :modes]
    spectrum[:, :modes, :modes] = lower / eigenvalues
    return cast(Float, idctn(spectrum, axes=(1, 2), norm="ortho"))


def solve_darcy(coefficient: Float, source: Float) -> Float:
    """Solve -div(a grad u) = f on the unit square with u = 0 on the boundary. Fields are (H, W) at the cell centres.

    Finite volumes of second order. A face between two cells has the harmonic mean of their coefficients, so the flux
    is right where the coefficient jumps. SuperLU in symmetric mode factorises in 2 ms at 32 x 32.
    """
    from scipy.sparse import diags_array
    from scipy.sparse.linalg import splu

    height, width = coefficient.shape
    # The flux through a face is proportional to its length over the distance of the two centres.
    across = _face_coefficients(coefficient) * (width / height)
    down = _face_coefficients(coefficient.T).T * (height / width)
    sides = across[:, 1:] + across[:, :-1]  # (H, W)
    every_face = sides + down[1:] + down[:-1]
    diagonal = every_face.ravel()
    # The last cell of a row has no neighbour on the right.
    has_neighbour = np.arange(width) < width - 1
    to_the_right = np.where(has_neighbour, across[:, 1:], 0.0)
    right = to_the_right.ravel()[:-1]
    below = down[1:-1].ravel()
    offsets: Any = [-width, -1, 0, 1, width]  # scipy's annotation allows one offset only
    diagonals = [-below, -right, diagonal, -right, -below]
    matrix = diags_array(diagonals, offsets=offsets, format="csc")
    factors = splu(
        matrix,
        # SuperLU's manual names these three together for symmetric mode. A definite matrix needs no pivots.
        permc_spec="MMD_AT_PLUS_A",
        diag_pivot_thresh=0.0,
        options={"SymmetricMode": True},
    )
    # Finite volumes balance the fluxes with the source integrated over a cell.
    solution = factors.solve(source.ravel() / (height * width))
    return solution.reshape(height, width)


def _face_coefficients(coefficient: Float) -> Float:
    """Average cells (H, W) to faces (H, W + 1) along the last axis."""
    left = coefficient[:, :-1]
    right = coefficient[:, 1:]
    # Two half cells in series: their resistances add up.
    harmonic_mean = 2.0 * left * right / (left + right)
    # The boundary is half a cell away.
    first = 2.0 * coefficient[:, :1]
    last = 2.0 * coefficient[:, -1:]
    return np.concatenate([first, harmonic_mean, last], axis=1)

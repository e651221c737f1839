"""Encoder of fields on a grid to tokens, and decoder of tokens to fields at any points.

Coordinates run from 0 to 1. On every grid, point j of n along an axis lies at (j + 1/2) / n, in the middle of its
cell. For a periodic field with its first point at the origin, this only moves the origin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.domains.models.layers import NORM_EPS, FeedForward
from accel_train.speed.attention.kernels import TORCH_CHOICE
from accel_train.wording import shortened

KERNEL = 3
CELL_OCTAVES = 3
DECODER_FFN_RATIO = 2
IDLE_TOKENS = 2
"""Number of zero tokens that idle modules run on. cuDNN's attention does not accept a single key."""


@dataclass(frozen=True)
class FieldGrid:
    """A grid of points and its division into tokens. Pairs are (rows, columns), with one row for 1-D fields."""

    points: tuple[int, int]
    patch: tuple[int, int]
    """Points of a patch."""
    merged: tuple[int, int] = (1, 1)
    """Neighbouring patches averaged into one token."""
    periodic: bool = False

    @property
    def dimensions(self) -> int:
        return 1 if self.points[0] == 1 else 2

    @property
    def cells(self) -> tuple[int, int]:
        """The grid of tokens."""
        rows, columns = self.points_per_token
        return self.points[0] // rows, self.points[1] // columns

    @property
    def points_per_token(self) -> tuple[int, int]:
        """Points of a token along each axis."""
        rows = self.patch[0] * self.merged[0]
        columns = self.patch[1] * self.merged[1]
        return rows, columns

    def coordinates(self, device: torch.device | None = None, *, of_tokens: bool = False) -> Tensor:
        """Return coordinates (H * W, d) of all points row by row, or those of the centres of all tokens."""
        if of_tokens:
            return coordinates(self.cells[-self.dimensions :], device)
        return grid_coordinates(self.points, device)

    def wave_features(self, octaves: int) -> int:
        """Count the features of `waves` for a point of this grid."""
        return wave_features(self.dimensions, octaves, self.periodic)


def divide(task: str, points: tuple[int, int], side: int, max_tokens: int, periodic: bool) -> FieldGrid:
    """Divide a task's grid into patches of `side` points along each axis, merged to at most `max_tokens` tokens."""
    height, width = points
    option = "model.patch_1d" if height == 1 else "model.patch_2d"
    patch = (1 if height == 1 else side, side)
    cells = [height // patch[0], width // patch[1]]
    merged = [1, 1]
    if height % patch[0] or width % patch[1]:
        raise UsageError(
            f"{option}: {side}: the {height} x {width} points of task {task} must be a whole number of patches. Set "
            f"--{option} to a divisor of the sides: {_divisors(math.gcd(height, width) if height > 1 else width)}."
        )
    while math.prod(cells) > max_tokens:
        axis = 1 if cells[1] >= cells[0] else 0  # the longer one
        if cells[axis] % 2:
            raise UsageError(
                f"model.max_tokens: {max_tokens}: the {cells[0]} x {cells[1]} tokens of task {task} exceed it and "
                f"cannot be halved. Raise --model.max_tokens or --{option}."
            )
        cells[axis] //= 2
        merged[axis] *= 2
    return FieldGrid(points, patch, (merged[0], merged[1]), periodic)


def _divisors(number: int) -> str:
    return shortened([str(n) for n in range(1, number + 1) if number % n == 0], 8)


def coordinates(sides: Sequence[int], device: torch.device | None = None) -> Tensor:
    """Return the cell centres of a grid, the last axis fastest: (n1, ..., nd) -> (n1 * ... * nd, d)."""
    axes = [(torch.arange(n, device=device) + 0.5) / n for n in sides]  # (n1,), (n2,), ...
    mesh = torch.meshgrid(*axes, indexing="ij")  # d tensors (n1, ..., nd)
    return torch.stack(mesh, dim=-1).flatten(0, -2)


def grid_coordinates(points: Sequence[int], device: torch.device | None = None) -> Tensor:
    """Return the coordinates (H * W, d) of all points of a grid (H, W), row by row. 1-D fields have one row."""
    return coordinates(points[1:] if points[0] == 1 else points, device)


def waves(x: Tensor, octaves: int, periodic: bool) -> Tensor:
    """Embed x (..., d) by sines and cosines of 1, 2, 4, ... waves over 0 to 1: (..., wave_features).

    A domain that is not periodic has half as many waves, and x itself as a feature.
    """
    # On a periodic domain only whole waves are continuous. Elsewhere half waves are needed to tell the two ends apart.
    half_periods = 2 if periodic else 1
    powers = torch.arange(octaves, dtype=x.dtype, device=x.device)
    frequencies = math.pi * half_periods * 2.0**powers
    angles = (x[..., None] * frequencies).flatten(-2)  # (..., d * octaves)
    features = [angles.sin(), angles.cos()]  # (..., d * octaves) each
    if not periodic:
        features.append(x)
    return torch.cat(features, dim=-1)


def wave_features(dimensions: int, octaves: int, periodic: bool) -> int:
    """Count the features of `waves`."""
    per_dimension = 2 * octaves
    if not periodic:
        per_dimension += 1
    return dimensions * per_dimension


class GridEncoder(nn.Module):
    """Encoder (B, C, H, W) -> (B, N, D): a residual convolution of each field, then patches with their positions.

    Accepts fields of any number of whole tokens. The convolutions start as the identity.
    """

    def __init__(self, channels: int, grid: FieldGrid, width: int, stem_width: int, octaves: int) -> None:
        super().__init__()
        self.grid = grid
        self.octaves = octaves
        # A 1-D field is one row: further rows of a kernel would only see padding.
        rows = 1 if grid.dimensions == 1 else KERNEL
        kernel = (rows, KERNEL)
        # In the order of F.pad: columns first, then rows, each at both ends.
        self.padding = (KERNEL // 2, KERNEL // 2, rows // 2, rows // 2)
        hidden = channels * stem_width
        # Grouped: the fields of an equation differ in scale and meaning, so each has filters of its own.
        self.stem = nn.Conv2d(channels, hidden, kernel, groups=channels)
        self.stem_out = nn.Conv2d(hidden, channels, kernel, groups=channels)
        # With an output of zero the residual convolution starts as the identity.
        nn.init.zeros_(self.stem_out.weight)
        nn.init.zeros_(cast(Tensor, self.stem_out.bias))
        patch_values = channels * math.prod(grid.patch)
        self.project = nn.Linear(patch_values, width)
        self.position = nn.Linear(grid.wave_features(octaves), width)

    def forward(self, fields: Tensor) -> Tensor:
        grid = self.grid
        u = fields.to(self.project.weight.dtype)
        hidden = F.gelu(self.stem(self._pad(u)))  # (B, C * stem_width, H, W)
        u = u + self.stem_out(self._pad(hidden))  # (B, C, H, W)
        p, q = grid.patch
        u = u.unflatten(3, (-1, q))  # (B, C, H, columns, q)
        u = u.unflatten(2, (-1, p))  # (B, C, rows, p, columns, q)
        rows, columns = u.shape[2], u.shape[4]
        patches = u.permute(0, 2, 4, 1, 3, 5).flatten(3)  # (B, rows, columns, C * p * q)
        tokens = self.project(patches)  # (B, rows, columns, D)
        tokens = tokens + self._positions(rows, columns, u)
        m1, m2 = grid.merged
        merged = tokens.unflatten(2, (-1, m2))  # (B, rows, N2, m2, D)
        merged = merged.unflatten(1, (-1, m1))  # (B, N1, m1, N2, m2, D)
        return merged.mean(dim=(2, 4)).flatten(1, 2)  # (B, N, D)

    def _positions(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Embed the centres of the patches: (rows, columns, D)."""
        # For the patches of this batch, not of the grid: idle encoders run on a single token.
        cells = (rows, columns) if self.grid.dimensions == 2 else (columns,)
        positions = coordinates(cells, like.device)  # (rows * columns, d)
        features = waves(positions, self.octaves, self.grid.periodic)
        embedded = self.position(features.to(like.dtype))  # (rows * columns, D)
        return embedded.unflatten(0, (rows, columns))

    def _pad(self, u: Tensor) -> Tensor:
        # A periodic field continues at its other end. Other fields get zeros, which mark the boundary.
        mode = "circular" if self.grid.periodic else "constant"
        return F.pad(u, self.padding, mode=mode)


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of an `AnyPointDecoder`."""

    latent_width: int
    width: int
    """Channels per query point, a multiple of `head_width`."""
    head_width: int
    layers: int
    octaves: int


class QueryPoints(nn.Module):
    """Embedding of query points: (B, Q, d) -> (B, Q, E), and the index (B, Q) of each point's own token."""

    def __init__(self, grid: FieldGrid, shape: DecoderShape) -> None:
        super().__init__()
        self.grid = grid
        self.octaves = shape.octaves
        features = query_features(grid, shape.octaves)
        self.expand = nn.Linear(features, shape.width)
        self.project = nn.Linear(shape.width, shape.width)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        # In fp32: in bf16, neighbouring points of a fine grid would have the same coordinates.
        x = points.float()
        # A point beyond one end of a periodic domain belongs to a token at the other end.
        wrapped = x - x.floor() if self.grid.periodic else x
        sides = self.grid.cells[-self.grid.dimensions :]
        cell: list[Tensor] = []
        offsets: list[Tensor] = []  # from the middle of the token's cell, in cells
        for axis, cells in enumerate(sides):
            scaled = wrapped[..., axis] * cells  # (B, Q), in cells
            # The end of the domain at 1 belongs to the last token.
            own_cell = scaled.long().clamp(0, cells - 1)
            cell.append(own_cell)
            offsets.append(scaled - own_cell - 0.5)
        own_token = cell[0]
        if len(cell) == 2:
            own_token = cell[0] * sides[1] + cell[1]  # row by row, as tokens are
        of_domain = waves(x, self.octaves, self.grid.periodic)
        offset = torch.stack(offsets, dim=-1)  # (B, Q, d)
        # Position within a cell, in finer detail than the waves over the whole domain resolve.
        of_cell = waves(offset, CELL_OCTAVES, periodic=False)
        features = torch.cat([of_domain, of_cell], dim=-1)
        features = features.to(self.expand.weight.dtype)
        embedded = F.gelu(self.expand(features))
        return self.project(embedded), own_token


def query_features(grid: FieldGrid, octaves: int) -> int:
    """Count the features of `QueryPoints` for a point."""
    position = grid.wave_features(octaves)
    offset = wave_features(grid.dimensions, CELL_OCTAVES, periodic=False)
    return position + offset


class DecoderLayer(nn.Module):
    """Cross-attention from query points (B, Q, E) to all tokens (B, N, D), then a feed-forward layer."""

    # Methods that activation checkpointing may recompute one by one, by the names of its modes.
    checkpoint_parts: ClassVar[dict[str, str]] = {"attention": "attend_to_tokens", "ffn": "feed_forward"}

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        # Default kernel, until `apply_attention` replaces it.
        self.attend = TORCH_CHOICE
        self.head_width = shape.head_width
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key_value = nn.Linear(shape.latent_width, 2 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.ffn = FeedForward(shape.width, DECODER_FFN_RATIO, bias=True)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.feed_forward(self.attend_to_tokens(x, tokens))

    def attend_to_tokens(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Run the first half of the layer, cross-attention: (B, Q, E), (B, N, D) -> (B, Q, E)."""
        normalised = F.layer_norm(x, x.shape[-1:], eps=NORM_EPS)
        q = self.query(normalised).unflatten(-1, (-1, self.head_width))  # (B, Q, H, E / H)
        key_value = self.key_value(tokens).unflatten(-1, (2, -1, self.head_width))  # (B, N, 2, H, E / H)
        k, v = key_value.unbind(2)
        # Attention kernels expect heads before positions.
        q = q.transpose(1, 2)  # (B, H, Q, E / H)
        k = k.transpose(1, 2)  # (B, H, N, E / H)
        v = v.transpose(1, 2)
        attended = self.attend(q, k, v, None)
        joined = attended.transpose(1, 2).flatten(2)  # (B, Q, E)
        return x + self.out(joined)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Run the second half of the layer, the feed-forward part: (B, Q, E) -> (B, Q, E)."""
        normalised = F.layer_norm(x, x.shape[-1:], eps=NORM_EPS)
        return x + self.ffn(normalised)


class PointHead(nn.Module):
    """Head for one field at the query points: (B, Q, E) -> (B, Q)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, width)
        self.project = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.expand(x))
        return self.project(hidden).squeeze(-1)


class AnyPointDecoder(nn.Module):
    """Decoder of tokens to fields at any points, for several grids with their own fields.

    A query starts as the embedding of its coordinates, scaled and shifted by the token of its own cell. Then it
    attends to all tokens (Perceiver IO, Jaegle et al. 2021). A head per field reads the result.
    """

    def __init__(self, grids: Sequence[FieldGrid], fields: Sequence[int], shape: DecoderShape) -> None:
        super().__init__()
        self.points = nn.ModuleList(QueryPoints(grid, shape) for grid in grids)
        self.local = nn.Linear(shape.latent_width, 2 * shape.width)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
        self.heads = nn.ModuleList()
        for count in fields:
            heads = [PointHead(shape.width) for _ in range(count)]
            self.heads.append(nn.ModuleList(heads))

    def forward(self, tokens: Tensor, points: Tensor, grid: int) -> Tensor:
        """Decode tokens (B, N, D) at points (P, Q, d) of grid number `grid`: (B, fields, Q).

        P is 1 if all rows share the points, and otherwise a divisor of B, where row i uses points i % P.
        """
        x = self.embed(tokens, points, grid)
        # Once for all layers, since the tokens do not change between them.
        normalised = F.layer_norm(tokens, tokens.shape[-1:], eps=NORM_EPS)
        for layer in self.layers:
            x = layer(x, normalised)
        return self.read(x, grid)

    def embed(self, tokens: Tensor, points: Tensor, grid: int) -> Tensor:
        """Embed the query points (B, Q, E), before attention."""
        x, own_token = self.points[grid](points)
        if len(points) > 1:
            repeats = len(tokens) // len(points)
            x = x.repeat(repeats, 1, 1)
            own_token = own_token.repeat(repeats, 1)
        # Mapped before gathering: one product per token, however many points lie in its cell.
        local = at_tokens(self.local(tokens), own_token)  # (B, Q, 2 E)
        scale, shift = local.chunk(2, dim=-1)
        # 1 + scale, so that small weights leave the embedding as it is.
        return x * (1 + scale) + shift

    def read(self, x: Tensor, grid: int) -> Tensor:
        """Read the grid's fields (B, fields, Q) from queries after attention."""
        heads = cast(nn.ModuleList, self.heads[grid])
        return torch.stack([head(x) for head in heads], dim=1)


def at_tokens(x: Tensor, token: Tensor) -> Tensor:
    """Gather x (B, N, E) at `token` (B, Q), or (1, Q) for all rows: (B, Q, E)."""
    # Points shared by all rows need one index, not one for each row.
    if len(token) == 1:
        return x.index_select(1, token[0])
    batch, tokens, _ = x.shape
    # `gather` would need an index of its own for each of the E channels.
    first = torch.arange(0, batch * tokens, tokens, device=x.device)  # (B,), of each row in the flat tensor
    index = (first[:, None] + token).flatten()
    chosen = x.flatten(0, 1).index_select(0, index)  # (B * Q, E)
    return chosen.unflatten(0, token.shape)


def encoder_multiplications(grid: FieldGrid, width: int, stem_width: int) -> int:
    """Count the multiplications of `GridEncoder` for one field, without the part done once per batch."""
    convolutions = 2 * KERNEL**grid.dimensions * stem_width
    return math.prod(grid.points) * (convolutions + width)


def decoder_multiplications(
    grid: FieldGrid, fields: int, shape: DecoderShape, queries: int | None = None, latents: int = 1
) -> int:
    """Count the multiplications of `AnyPointDecoder` for one sample with `latents` sets of tokens.

    `queries` None: all points of the grid, embedded once per batch and therefore not counted.
    """
    tokens = math.prod(grid.cells)
    points = queries or math.prod(grid.points)
    width = shape.width
    key_values = tokens * shape.latent_width * 2 * width
    # Both map every token to 2 E values.
    scales_and_shifts = key_values
    projections = 2 * points * width**2
    attention = projections + 2 * points * tokens * width
    feed_forward = 2 * DECODER_FFN_RATIO * points * width**2
    layers = shape.layers * (key_values + attention + feed_forward)
    heads = fields * points * (width**2 + width)
    total = latents * (scales_and_shifts + layers + heads)
    if queries is not None:
        features = query_features(grid, shape.octaves)
        total += points * (features + width) * width
    return total

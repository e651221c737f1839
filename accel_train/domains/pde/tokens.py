"""Fields on a grid to tokens, and tokens to fields at any points.

Points have coordinates from 0 to 1. Point j of n along an axis lies at (j + 1/2) / n, in the middle of its cell, for
every grid; a periodic field whose first point is at the origin is only named from another origin by this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_train.domains.models.layers import NORM_EPS, FeedForward
from accel_train.speed.attention import TORCH_CHOICE

KERNEL = 3
CELL_OCTAVES = 3
DECODER_FFN_RATIO = 2
IDLE_TOKENS = 2
"""Of zeros, through a module that has nothing to do: cuDNN's attention takes no single key."""


@dataclass(frozen=True)
class FieldGrid:
    """A grid of points and how it is cut into tokens. All pairs are (rows, columns); 1-D fields have one row."""

    points: tuple[int, int]
    patch: tuple[int, int]
    """Points of a patch."""
    merged: tuple[int, int] = (1, 1)
    """Patches whose mean is one token."""
    periodic: bool = False

    @property
    def dimensions(self) -> int:
        return 1 if self.points[0] == 1 else 2

    @property
    def cells(self) -> tuple[int, int]:
        """The grid of tokens."""
        rows, columns = (n // (p * m) for n, p, m in zip(self.points, self.patch, self.merged, strict=True))
        return rows, columns

    def coordinates(self, device: torch.device | None = None, *, of_tokens: bool = False) -> Tensor:
        """(H * W, d) of all points, or of the middles of all tokens, row by row."""
        return coordinates((self.cells if of_tokens else self.points)[-self.dimensions :], device)

    def wave_features(self, octaves: int) -> int:
        """Features of `waves` for a point of this grid."""
        return wave_features(self.dimensions, octaves, self.periodic)


def coordinates(sides: Sequence[int], device: torch.device | None = None) -> Tensor:
    """(n1, ..., nd) -> (n1 * ... * nd, d): the middles of the cells of a grid, the last axis fastest."""
    axes = [(torch.arange(n, device=device) + 0.5) / n for n in sides]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)


def waves(x: Tensor, octaves: int, periodic: bool) -> Tensor:
    """(..., d) -> (..., wave_features(d, octaves, periodic)): sines and cosines of 1, 2, 4, ... waves over 0 to 1.

    Half as many waves, and x itself beside them, where the domain has ends.
    """
    frequencies = math.pi * (2 if periodic else 1) * 2.0 ** torch.arange(octaves, dtype=x.dtype, device=x.device)
    angles = (x[..., None] * frequencies).flatten(-2)  # (..., d * octaves)
    return torch.cat([angles.sin(), angles.cos(), *([] if periodic else [x])], dim=-1)


def wave_features(dimensions: int, octaves: int, periodic: bool) -> int:
    return dimensions * (2 * octaves + (0 if periodic else 1))


class GridEncoder(nn.Module):
    """(B, C, H, W) -> (B, N, D): a residual convolution of each field, patches, coordinates of the patches.

    Takes fields of any number of whole tokens. The convolutions start as the identity.
    """

    def __init__(self, channels: int, grid: FieldGrid, width: int, stem_width: int, octaves: int) -> None:
        super().__init__()
        self.grid, self.octaves = grid, octaves
        rows = 1 if grid.dimensions == 1 else KERNEL
        self.padding = (KERNEL // 2, KERNEL // 2, rows // 2, rows // 2)
        hidden = channels * stem_width
        self.stem = nn.Conv2d(channels, hidden, (rows, KERNEL), groups=channels)
        self.stem_out = nn.Conv2d(hidden, channels, (rows, KERNEL), groups=channels)
        nn.init.zeros_(self.stem_out.weight)
        nn.init.zeros_(cast(Tensor, self.stem_out.bias))
        self.project = nn.Linear(channels * math.prod(grid.patch), width)
        self.position = nn.Linear(grid.wave_features(octaves), width)

    def forward(self, fields: Tensor) -> Tensor:
        u, grid = fields.to(self.project.weight.dtype), self.grid
        u = u + self.stem_out(self._padded(F.gelu(self.stem(self._padded(u)))))
        u = u.unflatten(3, (-1, grid.patch[1])).unflatten(2, (-1, grid.patch[0]))  # (B, C, rows, p, columns, q)
        rows, columns = u.shape[2], u.shape[4]
        tokens = self.project(u.permute(0, 2, 4, 1, 3, 5).flatten(3))  # (B, rows, columns, D)
        cells = (rows, columns) if grid.dimensions == 2 else (columns,)
        places = coordinates(cells, u.device)
        places = waves(places, self.octaves, grid.periodic).to(u.dtype)
        tokens = tokens + self.position(places).unflatten(0, (rows, columns))
        merged = tokens.unflatten(2, (-1, grid.merged[1])).unflatten(1, (-1, grid.merged[0]))
        return merged.mean(dim=(2, 4)).flatten(1, 2)  # (B, N, D)

    def _padded(self, u: Tensor) -> Tensor:
        return F.pad(u, self.padding, mode="circular" if self.grid.periodic else "constant")


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
    """Coordinates (B, Q, d) -> embeddings (B, Q, E), and the token (B, Q) in whose cell each point lies."""

    def __init__(self, grid: FieldGrid, shape: DecoderShape) -> None:
        super().__init__()
        self.grid, self.octaves = grid, shape.octaves
        self.expand = nn.Linear(query_features(grid, shape.octaves), shape.width)
        self.project = nn.Linear(shape.width, shape.width)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        x, sides = points.float(), self.grid.cells[-self.grid.dimensions :]
        inside = x - x.floor() if self.grid.periodic else x
        scaled = [inside[..., axis] * cells for axis, cells in enumerate(sides)]
        cell = [s.long().clamp(0, cells - 1) for s, cells in zip(scaled, sides, strict=True)]
        own = torch.stack([s - c - 0.5 for s, c in zip(scaled, cell, strict=True)], dim=-1)  # where in its cell
        features = (waves(x, self.octaves, self.grid.periodic), waves(own, CELL_OCTAVES, periodic=False))
        embedded = F.gelu(self.expand(torch.cat(features, dim=-1).to(self.expand.weight.dtype)))
        return self.project(embedded), cell[0] if len(cell) == 1 else cell[0] * sides[1] + cell[1]


def query_features(grid: FieldGrid, octaves: int) -> int:
    """Features that `QueryPoints` makes of a point."""
    return grid.wave_features(octaves) + wave_features(grid.dimensions, CELL_OCTAVES, periodic=False)


class DecoderLayer(nn.Module):
    """Cross-attention from query points (B, Q, E) to all tokens (B, N, D), and a feed-forward layer."""

    checkpoint_parts: ClassVar[dict[str, str]] = {"attention": "attend_to_tokens", "ffn": "feed_forward"}

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attend = TORCH_CHOICE
        self.head_width = shape.head_width
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key_value = nn.Linear(shape.latent_width, 2 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.ffn = FeedForward(shape.width, DECODER_FFN_RATIO, bias=True)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.feed_forward(self.attend_to_tokens(x, tokens))

    def attend_to_tokens(self, x: Tensor, tokens: Tensor) -> Tensor:
        """The first half of the layer."""
        q = self.query(F.layer_norm(x, x.shape[-1:], eps=NORM_EPS)).unflatten(-1, (-1, self.head_width))
        k, v = self.key_value(tokens).unflatten(-1, (2, -1, self.head_width)).unbind(2)
        attended = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None)
        return x + self.out(attended.transpose(1, 2).flatten(2))

    def feed_forward(self, x: Tensor) -> Tensor:
        """The second half of the layer."""
        return x + self.ffn(F.layer_norm(x, x.shape[-1:], eps=NORM_EPS))


class PointHead(nn.Module):
    """(B, Q, E) -> one field at the query points (B, Q)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, width)
        self.project = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(F.gelu(self.expand(x))).squeeze(-1)


class AnyPointDecoder(nn.Module):
    """Tokens -> fields at any points, for several grids with fields of their own.

    A query is the embedding of its coordinates, scaled and shifted by the token in whose cell it lies: what a patch
    knows of itself. Then it attends to all tokens (Perceiver IO, Jaegle et al. 2021), and a head for each field reads
    it.
    """

    def __init__(self, grids: Sequence[FieldGrid], fields: Sequence[int], shape: DecoderShape) -> None:
        super().__init__()
        self.points = nn.ModuleList(QueryPoints(grid, shape) for grid in grids)
        self.local = nn.Linear(shape.latent_width, 2 * shape.width)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
        self.heads = nn.ModuleList(nn.ModuleList(PointHead(shape.width) for _ in range(count)) for count in fields)

    def forward(self, tokens: Tensor, points: Tensor, grid: int) -> Tensor:
        """tokens (B, N, D), the grid's number, points (P, Q, d) -> (B, fields, Q).

        P is 1 for points that all rows share, or a divisor of B: row i then has those of i % P.
        """
        x = self.embed(tokens, points, grid)
        normalised = F.layer_norm(tokens, tokens.shape[-1:], eps=NORM_EPS)
        for layer in self.layers:
            x = layer(x, normalised)
        return self.read(x, grid)

    def embed(self, tokens: Tensor, points: Tensor, grid: int) -> Tensor:
        """The queries (B, Q, E) before they attend."""
        x, own = self.points[grid](points)
        if len(points) > 1:
            repeats = len(tokens) // len(points)
            x, own = x.repeat(repeats, 1, 1), own.repeat(repeats, 1)
        scale, shift = at_tokens(self.local(tokens), own).chunk(2, dim=-1)
        return x * (1 + scale) + shift

    def read(self, x: Tensor, grid: int) -> Tensor:
        """The grid's fields (B, fields, Q) in queries that have attended."""
        return torch.stack([head(x) for head in cast(nn.ModuleList, self.heads[grid])], dim=1)


def at_tokens(x: Tensor, token: Tensor) -> Tensor:
    """x (B, N, E), token (B, Q), or (1, Q) for all alike -> (B, Q, E)."""
    if len(token) == 1:
        return x.index_select(1, token[0])
    first = torch.arange(0, x.shape[0] * x.shape[1], x.shape[1], device=x.device)[:, None]
    return x.flatten(0, 1).index_select(0, (first + token).flatten()).unflatten(0, token.shape)


def encoder_products(grid: FieldGrid, width: int, stem_width: int) -> int:
    """Multiplications of one field's way through `GridEncoder`, beside what is done once for a batch."""
    return math.prod(grid.points) * (2 * KERNEL**grid.dimensions * stem_width + width)


def decoder_products(
    grid: FieldGrid, fields: int, shape: DecoderShape, queries: int | None = None, latents: int = 1
) -> int:
    """Multiplications of `AnyPointDecoder` for one sample with `latents` sets of tokens and its own query points.

    `queries` None: all points of the grid, which are embedded once for a batch.
    """
    tokens, points, width = math.prod(grid.cells), queries or math.prod(grid.points), shape.width
    key_values = tokens * shape.latent_width * 2 * width  # as many as the scales and shifts
    attention = 2 * points * width**2 + 2 * points * tokens * width
    layers = shape.layers * (key_values + attention + 2 * DECODER_FFN_RATIO * points * width**2)
    heads = fields * points * (width**2 + width)
    embedding = 0 if queries is None else points * (query_features(grid, shape.octaves) + width) * width
    return embedding + latents * (key_values + layers + heads)

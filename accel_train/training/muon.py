"""Muon for hidden matrices and AdamW for the rest, as one optimizer (Jordan et al., 2024,
https://kellerjordan.github.io/posts/muon/; the arithmetic and the options are those of ``torch.optim.Muon``).

Muon needs whole matrices: a shard's own orthogonal factor is not a shard of the matrix's. So the momentum of a matrix
is brought together on one rank, which orthogonalises it, and every rank gets back what it holds. Each rank does its
share of the matrices: with n ranks an n-th of the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7

MuonPrecision = Literal["fp32", "bf16"]
DTYPES: dict[MuonPrecision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def orthogonalise(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Five Newton-Schulz steps towards U V^T of ``matrix`` = U S V^T: singular values of about 0.7 to 1.2.

    ``dtype`` is that of the arithmetic and of the result. In bf16 two gradients that differ in their last bit of fp32
    give results that differ by 1e-2; in fp32 they stay together. 4 m^2 n + 2 m^3 operations a step for m <= n.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(dtype)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def learning_rate_ratio(adjust_lr_fn: str, shape: Sequence[int]) -> float:
    """What the learning rate of a matrix is multiplied by; ``match_rms_adamw`` gives updates of AdamW's usual size."""
    rows, columns = shape[0], shape[1]
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


class MuonAdamW(torch.optim.Optimizer):
    """One optimizer over groups with ``muon`` True (2-D matrices) or False (AdamW, with torch's own arithmetic).

    State: ``momentum_buffer`` of a matrix; ``exp_avg``, ``exp_avg_sq`` and ``step`` of the others. A group whose
    learning rate is 0 keeps its momentum up to date and is not orthogonalised. Under DDP and FSDP2 ``step`` is a
    collective: every rank, the same gradients present. It needs memory for as many whole matrices as there are ranks,
    for one under FSDP2, and two of their gram matrices.
    """

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float, fused: bool) -> None:
        rest = [group for group in groups if not group["muon"]]
        # It fills in the settings of its groups, which are the same dictionaries as ours.
        self._adamw = torch.optim.AdamW(rest, betas=betas, eps=eps, fused=fused or None) if rest else None
        super().__init__(groups, {"fused": fused})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices = [
            self._matrix(p, group)
            for group in self.param_groups
            if group["muon"]
            for p in group["params"]
            if p.grad is not None
        ]
        # Equal shapes side by side: the ranks of a round have the same amount of work.
        moving = sorted((m for m in matrices if m.group["lr"] != 0), key=lambda m: tuple(m.parameter.shape))
        for members in _by_mesh(moving):
            _Round.over(members)
        if self._adamw is not None:  # load_state_dict and FSDP2 replace the groups: hand over those of today
            self._adamw.param_groups = [group for group in self.param_groups if not group["muon"]]
            self._adamw.state = self.state
            self._adamw.step()
        return loss

    def _matrix(self, parameter: Tensor, group: dict[str, Any]) -> _Matrix:
        """Take the gradient into the momentum, this rank's part of it."""
        assert parameter.grad is not None
        if parameter.ndim != 2:
            raise ValueError(f"Muon needs whole 2-D matrices, this has shape {tuple(parameter.shape)} (ZeRO flattens)")
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        gradient, buffer = _local(parameter.grad), _local(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        return _Matrix(parameter, gradient, buffer, group)


@dataclass(frozen=True)
class _Matrix:
    """One parameter of a step, with this rank's parts."""

    parameter: Tensor
    gradient: Tensor
    buffer: Tensor
    group: dict[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.group["precision"]]

    def direction(self) -> Tensor:
        """What is to be orthogonalised, this rank's part."""
        if self.group["nesterov"]:
            return self.gradient.lerp(self.buffer, self.group["momentum"])
        return self.buffer

    def move(self, orthogonal: Tensor) -> None:
        """Decay, then step along this rank's part of the orthogonal factor."""
        group, local = self.group, _local(self.parameter)
        local.mul_(1 - group["lr"] * group["weight_decay"])
        ratio = learning_rate_ratio(group["adjust_lr_fn"], self.parameter.shape)
        local.add_(orthogonal, alpha=-group["lr"] * ratio)


class _Round:
    """As many matrices as there are ranks: one for each to orthogonalise."""

    def __init__(self, matrices: Sequence[_Matrix], group: Any, rank: int, world: int) -> None:
        self.matrices, self.process_group, self.rank, self.world = matrices, group, rank, world

    @staticmethod
    def over(matrices: Sequence[_Matrix]) -> None:
        """All matrices of one mesh, a round at a time, so that few are whole at once."""
        sharded, group = _shard_group(matrices[0].parameter)
        world, rank = (dist.get_world_size(group), dist.get_rank(group)) if dist.is_initialized() else (1, 0)
        for start in range(0, len(matrices), world):
            turn = _Round(matrices[start : start + world], group, rank, world)
            results = turn.alone() if world == 1 else turn.sharded() if sharded else turn.replicated()
            for matrix, orthogonal in zip(turn.matrices, results, strict=True):
                matrix.move(orthogonal)

    def alone(self) -> Iterator[Tensor]:
        return (orthogonalise(m.direction(), m.dtype) for m in self.matrices)

    def replicated(self) -> list[Tensor]:
        """DDP: every rank has all gradients; each orthogonalises one matrix and sends it to the others."""
        results: list[Tensor] = []
        for owner, matrix in enumerate(self.matrices):
            if owner == self.rank:
                results.append(orthogonalise(matrix.direction(), matrix.dtype).contiguous())
            else:
                results.append(torch.empty(matrix.parameter.shape, dtype=matrix.dtype, device=matrix.buffer.device))
        waits: list[Any] = [dist.broadcast(r, owner, async_op=True) for owner, r in enumerate(results)]
        for wait in waits:
            wait.wait()
        return results

    def sharded(self) -> list[Tensor]:
        """FSDP2: rows of the i-th matrix to rank i, which gives the rows of its orthogonal factor back."""
        pieces = [m.direction() for m in self.matrices]
        sent = [piece.numel() for piece in pieces] + [0] * (self.world - len(pieces))
        mine = self.matrices[self.rank] if self.rank < len(self.matrices) else None
        rows, columns = mine.parameter.shape if mine is not None else (0, 0)
        received = [n * columns for n in _rows_of_ranks(rows, self.world)]
        whole = self._exchange(torch.cat([piece.flatten() for piece in pieces]), sent, received)
        dtype = self.matrices[0].dtype
        back = orthogonalise(whole.view(rows, columns), dtype).flatten() if mine is not None else whole.to(dtype)
        parts = self._exchange(back, received, sent).split(sent[: len(pieces)])
        return [part.view_as(piece) for part, piece in zip(parts, pieces, strict=True)]

    def _exchange(self, outgoing: Tensor, sent: list[int], received: list[int]) -> Tensor:
        incoming = outgoing.new_empty(sum(received))
        dist.all_to_all_single(incoming, outgoing.contiguous(), received, sent, group=self.process_group)
        return incoming


def _by_mesh(matrices: Sequence[_Matrix]) -> list[list[_Matrix]]:
    """Runs that exchange with the same ranks in the same dtype, in one order on every rank."""
    from torch.distributed.tensor import DTensor  # a second of CPU, which --help does not need

    runs: dict[Any, list[_Matrix]] = {}
    for matrix in matrices:
        parameter = matrix.parameter
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        runs.setdefault((mesh, matrix.dtype), []).append(matrix)
    return list(runs.values())


def _shard_group(parameter: Tensor) -> tuple[bool, Any]:
    """Whether the matrix is cut over ranks, and the processes that hold its parts or, whole, its copies."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return False, None
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_shard():
            assert placement.is_shard(0), f"{placement} is not FSDP2's own way to cut"
            return True, parameter.device_mesh.get_group(dimension)
    return False, None


def _rows_of_ranks(rows: int, world: int) -> list[int]:
    """Rows of each rank as FSDP2 cuts them, by ``torch.chunk``: the last ranks may have fewer, or none."""
    chunk = -(-rows // world)
    return [max(0, min(chunk, rows - rank * chunk)) for rank in range(world)]


def _local(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

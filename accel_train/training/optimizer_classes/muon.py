"""Muon for hidden matrices and AdamW for the rest, as one optimizer (Jordan et al., 2024,
https://kellerjordan.github.io/posts/muon/; the arithmetic and the options are those of ``torch.optim.Muon``).

Muon needs whole matrices, because the orthogonal factor of a shard is not a shard of the matrix's factor. The momentum
of a matrix is therefore gathered on one rank, orthogonalised there, and its rows are sent back. With n ranks, each
orthogonalises an n-th of the matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from accel_train.precision import dtype_of
from accel_train.training.optimizer_classes.closures import loss_of
from accel_train.training.parameters import ParamGroup, local_of

# The quintic of Jordan et al., tuned for the steepest slope at 0 rather than for convergence to exactly 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7

MuonPrecision = Literal["fp32", "bf16"]


def orthogonalise(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Five Newton-Schulz steps towards U V^T of ``matrix`` = U S V^T: singular values of about 0.7 to 1.2.

    ``dtype`` is the dtype of the arithmetic and of the result. In bf16, a difference in the last fp32 bit of a
    gradient grows to 1e-2 in the result; in fp32 it stays small. 4 m^2 n + 2 m^3 operations a step for m <= n.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(dtype)
    if tall:  # the gram matrix has the size of the shorter side
        x = x.T
    # The iteration converges for singular values up to 1, and the Frobenius norm bounds the largest.
    x = x / x.norm().clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.T  # (m, m), m the shorter side
        # a x + b x x^T x + c (x x^T)^2 x, with two products that are fused with their sums.
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if tall else x


def learning_rate_ratio(adjust_lr_fn: str, shape: Sequence[int]) -> float:
    """Factor on the learning rate of a matrix. ``match_rms_adamw`` gives updates of AdamW's usual size."""
    rows = shape[0]
    columns = shape[1]
    # An orthogonal m x n matrix has an RMS of 1 / sqrt(max(m, n)), an update of AdamW about 0.2 (arXiv:2502.16982).
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


class MuonAdamW(torch.optim.Optimizer):
    """One optimizer over groups with ``muon`` True (2-D matrices) or False (AdamW, with torch's own arithmetic).

    State: ``momentum_buffer`` for a matrix, and ``exp_avg``, ``exp_avg_sq`` and ``step`` for the others. A group with
    learning rate 0 keeps its momentum up to date and is not orthogonalised. Under DDP and FSDP2 ``step`` is a
    collective: every rank calls it with the same gradients present. Peak memory of a rank: as many whole matrices as
    ranks under DDP, one under FSDP2, and two gram matrices.
    """

    def __init__(self, groups: list[ParamGroup], *, betas: tuple[float, float], eps: float, fused: bool) -> None:
        rest = [group for group in groups if not group["muon"]]
        self._adamw: torch.optim.AdamW | None = None
        if rest:
            # AdamW fills the defaults into its groups, which are the same dictionaries as ours.
            self._adamw = torch.optim.AdamW(rest, betas=betas, eps=eps, fused=fused or None)
        super().__init__(groups, {"fused": fused})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = loss_of(closure)
        matrices: list[_Matrix] = []
        for group in self.param_groups:
            if group["muon"]:
                moved = [parameter for parameter in group["params"] if parameter.grad is not None]
                matrices.extend(self._matrix(parameter, group) for parameter in moved)
        # The rate is a function of the step, so all ranks leave out the same matrices and their exchanges match.
        moving = [matrix for matrix in matrices if matrix.group["lr"] != 0]
        # Equal shapes side by side: the ranks of a round have the same amount of work.
        moving.sort(key=lambda matrix: tuple(matrix.parameter.shape))
        for members in _by_mesh(moving):
            _Round.over(members)
        if self._adamw is not None:
            # load_state_dict and FSDP2 replace the groups and the state, so AdamW gets the current ones.
            self._adamw.param_groups = [group for group in self.param_groups if not group["muon"]]
            self._adamw.state = self.state
            self._adamw.step()
        return loss

    def _matrix(self, parameter: Tensor, group: ParamGroup) -> _Matrix:
        """Update this rank's shard of the momentum with the gradient."""
        assert parameter.grad is not None
        if parameter.ndim != 2:
            raise ValueError(f"Muon needs whole 2-D matrices, this has shape {tuple(parameter.shape)} (ZeRO flattens)")
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        gradient = local_of(parameter.grad)
        buffer = local_of(state["momentum_buffer"])
        # A shard needs no other rank: the momentum is taken value by value.
        buffer.lerp_(gradient, 1 - group["momentum"])
        return _Matrix(parameter, gradient, buffer, group)


@dataclass(frozen=True)
class _Matrix:
    """One parameter of a step, with this rank's shards."""

    parameter: Tensor
    gradient: Tensor
    buffer: Tensor
    group: ParamGroup

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.group["precision"])

    def direction(self) -> Tensor:
        """This rank's shard of the matrix to orthogonalise."""
        if self.group["nesterov"]:
            return self.gradient.lerp(self.buffer, self.group["momentum"])
        return self.buffer

    def move(self, orthogonal: Tensor) -> None:
        """Decay, then step along this rank's shard of the orthogonal factor."""
        group = self.group
        local = local_of(self.parameter)
        # Decoupled, before the step, as torch's AdamW does.
        local.mul_(1 - group["lr"] * group["weight_decay"])
        ratio = learning_rate_ratio(group["adjust_lr_fn"], self.parameter.shape)
        local.add_(orthogonal, alpha=-group["lr"] * ratio)


class _Round:
    """One matrix per rank to orthogonalise."""

    def __init__(self, matrices: Sequence[_Matrix], process_group: Any, rank: int, world: int) -> None:
        self.matrices = matrices
        self.process_group = process_group
        self.rank = rank
        self.world = world

    @staticmethod
    def over(matrices: Sequence[_Matrix]) -> None:
        """Move all matrices of one mesh, a round at a time, so that few are whole at once."""
        sharded, process_group = _shard_group(matrices[0].parameter)
        world = 1
        rank = 0
        if dist.is_initialized():
            world = dist.get_world_size(process_group)
            rank = dist.get_rank(process_group)
        for start in range(0, len(matrices), world):
            members = matrices[start : start + world]
            results = _Round(members, process_group, rank, world).orthogonal_factors(sharded)
            for matrix, orthogonal in zip(members, results, strict=True):
                matrix.move(orthogonal)

    def orthogonal_factors(self, sharded: bool) -> Iterable[Tensor]:
        """This rank's shard of the orthogonal factor of each matrix."""
        if self.world == 1:
            # A generator, so that only one result is alive at a time.
            return (orthogonalise(m.direction(), m.dtype) for m in self.matrices)
        return self.sharded() if sharded else self.replicated()

    def replicated(self) -> list[Tensor]:
        """DDP: every rank has all gradients, orthogonalises one matrix and broadcasts it."""
        results: list[Tensor] = []
        for owner, matrix in enumerate(self.matrices):
            if owner == self.rank:
                # The factor of a tall matrix is a transposed view, which a broadcast does not take.
                results.append(orthogonalise(matrix.direction(), matrix.dtype).contiguous())
            else:
                shape = matrix.parameter.shape
                empty = torch.empty(shape, dtype=matrix.dtype, device=matrix.buffer.device)
                results.append(empty)
        waits: list[Any] = []
        for owner, result in enumerate(results):
            # All at once, so that small matrices do not wait for each other's latency.
            wait = dist.broadcast(result, owner, async_op=True)
            waits.append(wait)
        for wait in waits:
            wait.wait()
        return results

    def sharded(self) -> list[Tensor]:
        """FSDP2: send the rows of the i-th matrix to rank i and get back the rows of its orthogonal factor."""
        pieces = [m.direction() for m in self.matrices]
        sent = [piece.numel() for piece in pieces]
        sent += [0] * (self.world - len(pieces))
        # The last round may have fewer matrices than ranks: those without one still take part in the exchange.
        owns_matrix = self.rank < len(self.matrices)
        rows = 0
        columns = 0
        if owns_matrix:
            rows, columns = self.matrices[self.rank].parameter.shape
        received = [n * columns for n in _rows_of_ranks(rows, self.world)]
        # One exchange for the whole round instead of one for each matrix.
        outgoing = torch.cat([piece.flatten() for piece in pieces])
        whole = self._exchange(outgoing, sent, received)
        dtype = self.matrices[0].dtype  # the same for all of them, see `_by_mesh`
        if owns_matrix:
            whole = orthogonalise(whole.view(rows, columns), dtype).flatten()
        # Cast on every rank: one without a matrix has an empty part in the dtype of its gradients.
        exchanged = self._exchange(whole.to(dtype), received, sent)
        parts = exchanged.split(sent[: len(pieces)])
        return [part.view_as(piece) for part, piece in zip(parts, pieces, strict=True)]

    def _exchange(self, outgoing: Tensor, sent: list[int], received: list[int]) -> Tensor:
        incoming = outgoing.new_empty(sum(received))
        dist.all_to_all_single(incoming, outgoing.contiguous(), received, sent, group=self.process_group)
        return incoming


def _by_mesh(matrices: Sequence[_Matrix]) -> list[list[_Matrix]]:
    """Matrices grouped by mesh and dtype, in one order on every rank."""
    from torch.distributed.tensor import DTensor  # a second of CPU, which --help does not need

    runs: dict[Any, list[_Matrix]] = {}
    for matrix in matrices:
        parameter = matrix.parameter
        mesh = None
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
        runs.setdefault((mesh, matrix.dtype), []).append(matrix)
    return list(runs.values())


def _shard_group(parameter: Tensor) -> tuple[bool, Any]:
    """Return True and the process group of the shards where the matrix is sharded, else False and None."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return False, None
    # Of several dimensions of a mesh only one shards. The others hold replicas.
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_shard():
            assert placement.is_shard(0), f"{placement} is not FSDP2's own sharding by rows"
            return True, parameter.device_mesh.get_group(dimension)
    return False, None


def _rows_of_ranks(rows: int, world: int) -> list[int]:
    """Rows of each rank under FSDP2, as ``torch.chunk`` divides them: the last ranks may have fewer, or none."""
    chunk = -(-rows // world)  # rounded up
    return [max(0, min(chunk, rows - rank * chunk)) for rank in range(world)]

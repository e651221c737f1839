"""Fused AdamW: torch's kernel with less work on the host around it, or on a GPU one pass with the moving average."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from accel_train.training.feedback.factors import constant
from accel_train.training.optimizer_classes.closures import loss_of
from accel_train.training.parameters import ParamGroup, local_of

if TYPE_CHECKING:
    from accel_train.training.optimizer_classes.adamw_kernel import Chunks

State = dict[str, Tensor]
"""``step``, ``exp_avg`` and ``exp_avg_sq`` of one parameter, as torch names them."""


class _Counts(NamedTuple):
    """Step counts of the parameters of a group."""

    all: Tensor
    """(P,)."""
    each: tuple[Tensor, ...]
    """Its elements as views, which are the ``step`` of each parameter's state."""


class _Tensors(NamedTuple):
    """Tensors of one group in one step, each list in the order of the parameters."""

    number: int
    """Index of the group."""
    group: ParamGroup
    parameters: list[Tensor]
    gradients: list[Any]
    means: list[Tensor]
    squares: list[Tensor]
    counts: _Counts

    def columns(self, averages: Mapping[Tensor, Tensor]) -> list[list[Tensor]]:
        """Return this rank's shards that one pass reads: four lists, and the averages if there are any."""
        columns: list[list[Any]] = [self.parameters, self.gradients, self.means, self.squares]
        if averages:
            columns.append([averages[parameter] for parameter in self.parameters])
        return [[local_of(tensor) for tensor in column] for column in columns]

    def update_by_torch(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Run torch's kernel."""
        beta1, beta2 = self.group["betas"]
        torch._fused_adamw_(  # pyright: ignore[reportPrivateUsage]
            self.parameters,
            self.gradients,
            self.means,
            self.squares,
            [],
            self.counts.each,
            lr=self.group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=self.group["weight_decay"],
            eps=self.group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )


class FusedAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW(fused=True)`` bit for bit, with the same state under the same names.

    torch sorts the tensors by device and dtype in every step and adds 1 to the step count of each, one by one on a CPU:
    with many small tensors that takes longer than the kernel. Here the counts of a group are elements of one tensor,
    and all parameters of a group must have the same device and dtype. ``grad_scale`` and ``found_inf`` work as in
    torch's own.

    With ``one_pass`` the kernel of ``adamw_kernel`` takes the place of torch's, and moves averages of the weights in
    the same pass (``average_next``). Its values differ from torch's in the last bits.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        one_pass: bool = False,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self.one_pass = one_pass
        self.has_averaged = False
        """True if the last step has moved the averages, or has left out both weights and averages."""
        self._averages: Mapping[Tensor, Tensor] = {}
        self._weight: float | None = None
        """Weight of the new values in the averages at the coming step. None: the step leaves the averages alone."""
        self._counts: dict[int, _Counts] = {}
        """Step counts by the index of the group."""
        self._chunks: dict[int, Chunks] = {}

    def average_next(self, averages: Mapping[Tensor, Tensor], weight: float) -> None:
        """Move ``averages`` (by parameter) towards the new weights in the coming step, if it can take them along.

        ``has_averaged`` is True afterwards if it did. It cannot where a parameter has no gradient or a tensor is not
        contiguous.
        """
        self._averages, self._weight = averages, weight
        self.has_averaged = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Does not wait for the device."""
        loss = loss_of(closure)
        groups: list[_Tensors] = []
        for number, group in enumerate(self.param_groups):
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                groups.append(self._tensors(number, group, parameters))
        passes = self._passes(groups)
        for tensors, columns in zip(groups, passes or [None] * len(groups), strict=True):
            self._update(tensors, columns)
        self._weight = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients. torch's own method spends most of its time on a profiler record, left out here."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _passes(self, groups: Sequence[_Tensors]) -> list[list[list[Tensor]]] | None:
        """Return the columns of each group for one pass, or None if torch's kernel is to run. Sets `has_averaged`."""
        self.has_averaged = False
        if not self.one_pass:
            return None
        # A parameter without a gradient is in no launch, but its average has to move.
        is_whole = sum(len(tensors.parameters) for tensors in groups) == len(self._averages)
        averages = self._averages if self._weight is not None and is_whole else {}
        passes = [tensors.columns(averages) for tensors in groups]
        tensors = chain.from_iterable(chain.from_iterable(passes))
        if not all(tensor.is_contiguous() for tensor in tensors):
            return None
        self.has_averaged = bool(averages)
        return passes

    def _tensors(self, number: int, group: ParamGroup, parameters: list[Tensor]) -> _Tensors:
        states = [self.state[parameter] for parameter in parameters]
        if not all(states):
            self._init_group(group, [], [], [], [], [], [])  # torch's own, which creates the state
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        return _Tensors(number, group, parameters, gradients, means, squares, self._counts_of(number, states))

    def _update(self, tensors: _Tensors, columns: list[list[Tensor]] | None) -> None:
        counts = tensors.counts
        found_inf = self._attribute("found_inf", counts.all.device)
        grad_scale = self._attribute("grad_scale", counts.all.device)
        counts.all.add_(constant(1.0, counts.all.device, counts.all.dtype))
        if columns is None:
            tensors.update_by_torch(grad_scale, found_inf)
        else:
            self._in_one_pass(tensors, columns, grad_scale, found_inf)
        # With `found_inf` 1 the kernel did nothing, so the step does not count.
        if found_inf is not None:
            counts.all.sub_(found_inf)

    def _in_one_pass(
        self, tensors: _Tensors, columns: list[list[Tensor]], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        # Imported here, because Triton is not installed everywhere.
        from accel_train.training.optimizer_classes.adamw_kernel import Chunks, Rates

        group = tensors.group
        rates = Rates(group["lr"], group["betas"], group["eps"], group["weight_decay"])
        weight = self._weight if self.has_averaged else None
        sizes = tuple(tensor.numel() for tensor in columns[0])
        chunks = self._chunks.get(tensors.number)
        if chunks is None or chunks.sizes != sizes:
            chunks = self._chunks[tensors.number] = Chunks(sizes, tensors.counts.all.device)
        chunks.step(columns, tensors.counts.all, rates, grad_scale, found_inf, weight)

    def _attribute(self, name: str, device: torch.device) -> Tensor | None:
        """Return the tensor that the step guard or a loss scaler has set, if any."""
        tensor: Tensor | None = getattr(self, name, None)
        if tensor is None:
            return None
        return tensor.to(device, non_blocking=True)

    def _counts_of(self, number: int, states: Sequence[State]) -> _Counts:
        counts = self._counts.get(number)
        each = [state["step"] for state in states]
        # They differ after a load, and when only some of the parameters have a gradient.
        if counts is None or len(each) != len(counts.each) or not all(map(is_, each, counts.each)):
            joined = torch.stack(each)
            counts = self._counts[number] = _Counts(joined, joined.unbind())
            for state, count in zip(states, counts.each, strict=True):
                state["step"] = count
        return counts

"""torch's fused AdamW with less work on the host around its kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel_train.training.optimizer_classes.closures import loss_of
from accel_train.training.parameters import ParamGroup

State = dict[str, Tensor]
"""``step``, ``exp_avg`` and ``exp_avg_sq`` of one parameter, as torch names them."""


class _Counts(NamedTuple):
    """Step counts of the parameters of a group."""

    all: Tensor
    """(P,)."""
    each: tuple[Tensor, ...]
    """Its elements, as views, which are the ``step`` of the parameters."""


class FusedAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW(fused=True)`` bit for bit, with the same state under the same names.

    torch sorts the tensors by device and dtype in every step and adds 1 to the step count of each, one by one on a CPU:
    with many small tensors that takes longer than the kernel. Here the counts of a group are elements of one tensor,
    and all parameters of a group must have the same device and dtype. ``grad_scale`` and ``found_inf`` are read as by
    torch's own.
    """

    def __init__(self, groups: Sequence[ParamGroup], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self._counts: dict[int, _Counts] = {}
        """By the number of the group."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Does not wait for the device."""
        loss = loss_of(closure)
        for number, group in enumerate(self.param_groups):
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(number, group, parameters)
        return loss

    def _update(self, number: int, group: ParamGroup, parameters: list[Tensor]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        if not all(states):
            self._init_group(group, [], [], [], [], [], [])  # torch's own, which makes the state
        counts = self._counts_of(number, states)
        found_inf = self._attribute("found_inf", counts.all.device)
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        beta1, beta2 = group["betas"]
        counts.all.add_(1)
        torch._fused_adamw_(  # pyright: ignore[reportPrivateUsage]
            parameters,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            counts.each,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=self._attribute("grad_scale", counts.all.device),
            found_inf=found_inf,
        )
        # The kernel did nothing then, so the step does not count.
        if found_inf is not None:
            counts.all.sub_(found_inf)

    def _attribute(self, name: str, device: torch.device) -> Tensor | None:
        """Return what the step guard or a loss scale has set, if one has."""
        found: Tensor | None = getattr(self, name, None)
        if found is None:
            return None
        return found.to(device, non_blocking=True)

    def _counts_of(self, number: int, states: Sequence[State]) -> _Counts:
        counts = self._counts.get(number)
        each = [state["step"] for state in states]
        # Others are there after a load, and of a part of the parameters where some have no gradient.
        if counts is None or len(each) != len(counts.each) or not all(map(is_, each, counts.each)):
            joined = torch.stack(each)
            counts = self._counts[number] = _Counts(joined, joined.unbind())
            for state, count in zip(states, counts.each, strict=True):
                state["step"] = count
        return counts

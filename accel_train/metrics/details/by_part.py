"""Norms by part of the model: of the gradient, and of the update relative to the weights. Measured at log points."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor

from accel_train.training.parameters import square_of_norm, widest
from accel_train.training.shards import Shards
from accel_train.training.step_guard import StepResult

MOST_PARTS = 12
"""Maximum number of parts, so that their fields fit into a training line. More are merged by their common prefixes."""


class PartNorms:
    """Norms of the parts of a prepared model. One per process."""

    def __init__(
        self, accelerator: Accelerator, shards: Shards, by: Literal["parts", "blocks", "none"], *, ratios: bool
    ) -> None:
        """With ``ratios``, also measure the update over the weights, which needs a copy of the trained weights."""
        self._accelerator = accelerator
        self._shards = shards
        self._measures_gradient = by != "none"
        self._measures_blocks = by == "blocks"
        self._keeps_gradients = accelerator.distributed_type != DistributedType.DEEPSPEED
        self._ratios = ratios
        parts = parts_of(list(shards.parameters), blocks=by == "blocks")
        self._parts = list(dict.fromkeys(parts.values()))
        places = {part: place for place, part in enumerate(self._parts)}
        self._place_by_name = {name: places[part] for name, part in parts.items()}
        self._place_by_id = {id(shards.parameters[name]): place for name, place in self._place_by_name.items()}
        self._before: dict[str, Tensor] = {}

    @property
    def notices(self) -> list[str]:
        """Log lines about requested norms that cannot be measured here."""
        if not self._measures_blocks or (self._keeps_gradients and len(self._parts) > 1):
            return []
        reason = "the model has one part"
        if not self._keeps_gradients:
            reason = "DeepSpeed's engine keeps the gradients to itself"
        return [f"log.grad_norms: blocks: no norms by part, because {reason}"]

    @torch.no_grad()
    def before(self) -> None:
        """Keep the weights before a step, if ``take`` will be called after it."""
        if self._ratios:
            self._before = {name: self._shards.master(name).clone() for name in self._place_by_name}

    @torch.no_grad()
    def take(self, result: StepResult, grad_norm: float) -> dict[str, float]:
        """Return ``grad_norm_PART`` and ``update_ratio_PART`` of the step, for a log point. Collective.

        The squares are summed over all processes, so a replicated shard counts several times, but equally often in
        every part. Only ratios of the sums are used: shares of the square of ``grad_norm``, and update over weights.
        """
        gradients = self._squares_of_gradients(result)
        changes = self._squares_of_updates()
        if not gradients + changes:
            return {}
        sums = torch.stack(gradients + changes)
        if self._accelerator.num_processes > 1:
            sums = cast(Tensor, self._accelerator.reduce(sums, "sum"))
        rows: list[list[float]] = sums.tolist()
        fields: dict[str, float] = {}
        if gradients:
            squares = rows.pop(0)
            whole = sum(squares)
            for part, square in zip(self._parts, squares, strict=True):
                # A gradient of 0 has no shares.
                fields[f"grad_norm_{part}"] = grad_norm * math.sqrt(square / (whole or 1.0))
        if changes:
            for part, update, weight in zip(self._parts, *rows, strict=True):
                # Weights of 0, as in a fresh adapter, have no ratio.
                if weight > 0:
                    fields[f"update_ratio_{part}"] = math.sqrt(update / weight)
        return fields

    def _squares_of_gradients(self, result: StepResult) -> list[Tensor]:
        """Return the squared gradient norm of each part on this process, as one tensor (P,). Empty if not measured."""
        # A single part is the whole model, whose norm is known.
        if result.gradient_norms is None or not self._measures_gradient or len(self._parts) == 1:
            return []
        places: list[int] = []
        squares: list[Tensor] = []
        for parameter, norm in zip(*result.gradient_norms, strict=True):
            # A parameter that was made trainable after `prepare` is in no part.
            if id(parameter) in self._place_by_id:
                places.append(self._place_by_id[id(parameter)])
                squares.append(_local(norm).square())
        return [self._by_part(places, squares)]

    def _squares_of_updates(self) -> list[Tensor]:
        """Return the squared norms of the update and of the weights before it, by part, (P,) each. Empty without."""
        before, self._before = self._before, {}
        if not before:
            return []
        places = [self._place_by_name[name] for name in before]
        weights = [square_of_norm(old) for old in before.values()]
        updates = [square_of_norm(self._shards.master(name) - old) for name, old in before.items()]
        return [self._by_part(places, updates), self._by_part(places, weights)]

    def _by_part(self, places: Sequence[int], squares: Sequence[Tensor]) -> Tensor:
        """Add up the squares of each part, (P,), on the device of the losses."""
        device = self._accelerator.device
        index = torch.tensor(places, device=device)
        values = widest(torch.stack([square.to(device) for square in squares]))
        is_in = index == torch.arange(len(self._parts), device=device).unsqueeze(1)
        return torch.where(is_in, values, 0.0).sum(1)


def _local(norm: Any) -> Tensor:
    """Return the norm of this rank's shard under FSDP2, and any other norm unchanged."""
    return norm.to_local() if hasattr(norm, "to_local") else norm


def parts_of(names: Sequence[str], *, blocks: bool) -> dict[str, str]:
    """Return the part of the model that each parameter belongs to, by the path of its module.

    The common prefix of all paths is left out, and paths are shortened until there are at most ``MOST_PARTS``. With
    ``blocks`` the list of modules with the most parameters is split into its elements.
    """
    paths = {name: name.split(".")[:-1] or [name] for name in names}
    # The name of a list stays, since the numbers in it say nothing.
    while all(len(path) > 1 and not path[1].isdigit() for path in paths.values()):
        if len({path[0] for path in paths.values()}) > 1:
            break
        paths = {name: path[1:] for name, path in paths.items()}
    in_lists = {name: list_and_element for name, path in paths.items() if (list_and_element := _list_of(path))}
    # Elements of a list are alike, so they form one part.
    whole = paths | {name: path for name, (path, _) in in_lists.items()}
    depth = max(map(len, whole.values()))
    while depth > 1 and len({tuple(path[:depth]) for path in whole.values()}) > MOST_PARTS:
        depth -= 1
    parts = {name: ".".join(path[:depth]) for name, path in whole.items()}
    if blocks and in_lists:
        counts = Counter(tuple(path) for path, _ in in_lists.values())
        largest = list(counts.most_common(1)[0][0])
        for name, (path, element) in in_lists.items():
            if path == largest:
                parts[name] = ".".join([*path, element])
    return parts


def _list_of(path: Sequence[str]) -> tuple[list[str], str] | None:
    """Return the path of the outermost list of modules and the element of it on ``path``, or None without a list."""
    for place, word in enumerate(path):
        if word.isdigit() and place > 0:
            return list(path[:place]), word
    return None

"""Parameters by kind (hidden matrix, other decayed matrix, the rest), and parts of a model that are frozen.

A frozen part has no gradient: neither the norm that is clipped nor the optimizer's running means see one. Its
parameters keep `requires_grad`: switched off after wrapping, DDP raises, FSDP2 leaves the gradient None and ZeRO fills
zeros, three different trainings. Zeros are what all strategies can have.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

_PART = "_accel_train_part"
Kind = Literal["muon", "decay", "no_decay"]

_MATRICES = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,  # pyright: ignore[reportPrivateUsage]
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
)
_NOT_HIDDEN = re.compile(r"norm|embed|modulation|ada_?ln|head$", re.IGNORECASE)
"""Attributes or classes inside a block that hold no hidden matrix; `MultiheadAttention` does."""


def kinds(model: nn.Module, *, muon: bool) -> dict[int, Kind]:
    """Kind of every parameter by its id. One that several modules share has the most careful of its kinds.

    Weight decay acts on matrices and convolutions, never on norms, biases and embeddings. With ``muon``, 2-D
    matrices inside the repeated blocks are "muon", but for norms, embeddings, modulation and heads. Blocks are the
    classes in the model's ``_no_split_modules`` (what FSDP2 shards as one unit), else the elements of each
    ``nn.ModuleList`` of two or more.
    """
    blocks = _blocks(model) if muon else {}
    careful: list[Kind] = ["no_decay", "decay", "muon"]
    found: dict[int, Kind] = {}
    for path, owner in model.named_modules(remove_duplicate=False):
        for parameter in owner.parameters(recurse=False):
            kind: Kind = "no_decay"
            if _decays(owner, parameter):
                kind = "muon" if parameter.ndim == 2 and _hidden(path, blocks) else "decay"
            found[id(parameter)] = min(kind, found.get(id(parameter), kind), key=careful.index)
    return found


def _decays(owner: nn.Module, parameter: nn.Parameter) -> bool:
    if parameter.ndim < 2:
        return False
    if isinstance(owner, _MATRICES):
        return True
    if any("Norm" in base.__name__ or "Embedding" in base.__name__ for base in type(owner).__mro__):
        return False
    # A bare tensor on a module that has children is a position table, a gate or a modulation bias; on a
    # module without any it is the module's own operator (GPT-2's Conv1D, a spectral convolution).
    return next(owner.children(), None) is None


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    classes: set[str] = set(getattr(model, "_no_split_modules", None) or ())
    named = {path: module for path, module in model.named_modules() if type(module).__name__ in classes}
    return named or {
        f"{path}.{name}".lstrip("."): element
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1
        for name, element in module.named_children()
    }


def _hidden(path: str, blocks: dict[str, nn.Module]) -> bool:
    """Whether the module at ``path`` is in a block, and nothing from the block down to it says otherwise."""
    for prefix, block in blocks.items():
        if path == prefix or path.startswith(f"{prefix}."):
            return not any(_NOT_HIDDEN.search(name) for name in _names_below(block, path[len(prefix) + 1 :]))
    return False


def _names_below(block: nn.Module, path: str) -> Iterator[str]:
    """Attribute and class names of the modules on the way from ``block`` to ``path``."""
    module = block
    for name in path.split(".") if path else ():
        module = module.get_submodule(name)
        yield name
        yield type(module).__name__


def mark_part(parameters: Iterable[nn.Parameter], part: str) -> None:
    """Note the part on the parameters themselves: ZeRO puts flat tensors of its own into the optimizer's groups."""
    for parameter in parameters:
        setattr(parameter, _PART, part)


def clear_gradients(optimizers: Iterable[Any]) -> None:
    """Set the gradients of frozen groups to zero, whole ones and shards. Not for ZeRO, which keeps them to itself."""
    for group in _frozen_groups(optimizers):
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.zero_()


@contextmanager
def without_gradients(model: nn.Module, optimizers: Iterable[Any]) -> Generator[None]:
    """For ZeRO, whose engine reduces, measures and clips within the backward: a backward in the body gives the engine
    zeros for frozen parts."""
    frozen = {group["part"] for group in _frozen_groups(optimizers)}
    parameters = [p for p in model.parameters() if getattr(p, _PART, None) in frozen] if frozen else []
    handles = [parameter.register_hook(torch.zeros_like) for parameter in parameters]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _frozen_groups(optimizers: Iterable[Any]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups if group.get("frozen")]

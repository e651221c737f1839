"""The repeated blocks of a model, to which options for speed and memory apply one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

from torch import nn

from accel_train.config import UsageError


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, in order. They are checkpointed and compiled one by one.

    Modules of the classes named in `_no_split_modules` (transformers, this project) or `_repeated_blocks` (diffusers)
    of the model or a part of it, outermost: an up block of a UNet counts, and its residual blocks then do not. Without
    such a name, the elements of the largest `nn.ModuleList` (by parameters) whose elements have one class. Raises
    `UsageError` where there is neither.
    """
    found = _outermost(model, _block_names(model))
    if found:
        return found
    module_lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    lists = [modules for modules in module_lists if _has_one_class(modules)]
    if lists:
        # Heads and embeddings may be lists too, but smaller ones.
        largest = max(lists, key=_count_parameters)
        return list(largest)
    raise UsageError(
        f"{type(model).__name__}: has no list of blocks to checkpoint or compile one by one. Name the class of its "
        'blocks in an attribute _no_split_modules = ["MyBlock"], or keep them in one nn.ModuleList.'
    )


def count_blocks(model: nn.Module) -> int:
    """Return the number of blocks of `blocks_of`, 0 for a model without blocks."""
    try:
        return len(blocks_of(model))
    except UsageError:
        return 0


def classes_of(blocks: Sequence[nn.Module]) -> str:
    """Return the name of the blocks' class, or several names with their counts."""
    counts = Counter(type(block).__name__ for block in blocks)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def innermost_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of `blocks_of`. One that contains blocks of the named classes is replaced by those."""
    names = _block_names(model)
    found: list[nn.Module] = []
    for block in blocks_of(model):
        found.extend(_innermost(block, names))
    return found


def _innermost(block: nn.Module, names: set[str]) -> list[nn.Module]:
    nested = _outermost(block, names)
    if not nested:
        return [block]
    found: list[nn.Module] = []
    for inner in nested:
        found.extend(_innermost(inner, names))
    return found


def _block_names(model: nn.Module) -> set[str]:
    names: set[str] = set()
    for module in model.modules():
        names.update(_names(module, "_no_split_modules"))
        names.update(_names(module, "_repeated_blocks"))
    return names


def _outermost(module: nn.Module, names: set[str]) -> list[nn.Module]:
    """Return the modules of these classes that are not inside another of them."""
    found: list[nn.Module] = []
    for child in module.children():
        # Compared by name, because `_no_split_modules` has names, perhaps of a class that is not imported here.
        if type(child).__name__ in names:
            found.append(child)
        else:
            found.extend(_outermost(child, names))
    return found


def _has_one_class(blocks: nn.ModuleList) -> bool:
    return len({type(block) for block in blocks}) == 1


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _names(module: nn.Module, attribute: str) -> Sequence[str]:
    return cast("Sequence[str]", getattr(module, attribute, None) or ())

"""Activation checkpointing: parts of a model are computed again in the backward instead of kept.

Applied before `compile` and before `prepare`, in place: no module is wrapped, so parameters keep their names.
Losses and gradients are bit for bit those without it, as long as the kernels are deterministic.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from accel_train.config import PositiveInt, UsageError


@dataclass(frozen=True)
class ActivationCheckpointingConfig:
    """What is computed again in the backward instead of kept in memory. Costs time, changes no result."""

    mode: Literal["none", "full", "every_nth", "attention", "ffn", "selective"] = "none"
    """full: every block keeps its inputs only: a quarter of the memory at its peak for a third more time.
    every_nth: the same for one block in `every`. attention or ffn: that half of each block only. selective: all is
    computed again but matrix products and attention: half of the memory for 11 % more time. Measured on a CPU by
    benchmarks/activation_checkpointing.py; weights and optimizer are not in these shares. In compiled blocks what
    attention gave is kept in every mode."""
    every: PositiveInt = 2
    """With mode every_nth: blocks 0, n, 2 n, ... are checkpointed; 1 is the same as full."""


def apply_activation_checkpointing(model: nn.Module, config: ActivationCheckpointingConfig) -> str:
    """Replace the forwards that the mode names, in place, and a line for the log.

    For any model with a list of blocks (`blocks_of`); attention and ffn need blocks that name these parts. Call it
    after `apply_attention` and before `apply_compile` and `prepare`, on every process. Without gradients the plain
    forward runs. Random draws inside a block are repeated exactly.
    """
    if config.mode == "none":
        return "activation checkpointing: none"
    blocks = blocks_of(model)
    _refuse_wrong_order(model, blocks, config.mode)
    every = config.every if config.mode == "every_nth" else 1
    _keep_torch_quiet(blocks)
    targets = _targets(model, blocks[::every], config.mode)
    again = {key: _checkpointed(getattr(*key), config.mode) for key in {(type(m), name) for m, name in targets}}
    for module, name in targets:
        setattr(module, name, types.MethodType(again[type(module), name], module))
    of = f"{len(blocks[::every])} of {len(blocks)} blocks ({type(blocks[0]).__name__})"
    return f"activation checkpointing: {config.mode}, {of}"


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, in order: what is checkpointed and compiled one by one.

    Modules of the classes that the model or a part of it names in `_no_split_modules` (transformers, this project) or
    `_repeated_blocks` (diffusers); without such a name the `nn.ModuleList` with most parameters, if all of its
    elements have one class. Raises `UsageError` where there is neither.
    """
    names = {n for m in model.modules() for a in ("_no_split_modules", "_repeated_blocks") for n in _names(m, a)}
    if found := [module for module in model.modules() if type(module).__name__ in names]:
        return found
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len({type(block) for block in m}) == 1]
    if lists:
        return list(max(lists, key=lambda m: sum(p.numel() for p in m.parameters())))
    raise UsageError(
        f"{type(model).__name__}: has no list of blocks to checkpoint or compile one by one. Name the class of its "
        'blocks in an attribute _no_split_modules = ["MyBlock"], or keep them in one nn.ModuleList.'
    )


def _names(module: nn.Module, attribute: str) -> Sequence[str]:
    return cast("Sequence[str]", getattr(module, attribute, None) or ())


def _refuse_wrong_order(model: nn.Module, blocks: Sequence[nn.Module], mode: str) -> None:
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in (model, *blocks)):
        raise UsageError(
            f"activation_checkpointing.mode {mode}: the blocks are compiled already. Apply checkpointing first."
        )
    if any(isinstance(vars(m).get("forward"), types.MethodType) for m in blocks):
        raise UsageError(f"activation_checkpointing.mode {mode}: the blocks are checkpointed already. Apply it once.")


def _targets(model: nn.Module, blocks: Sequence[nn.Module], mode: str) -> list[tuple[nn.Module, str]]:
    """Modules and the names of their methods that are to be computed again."""
    if mode not in ("attention", "ffn"):
        return [(block, "forward") for block in blocks]
    parts = [(m, _parts(m)[mode]) for block in blocks for m in block.modules() if mode in _parts(m)]
    if not parts:
        raise UsageError(
            f"activation_checkpointing.mode {mode}: the blocks of {type(model).__name__} do not name this part. Use "
            f'full, every_nth or selective, or give the class an attribute checkpoint_parts = {{"{mode}": "method"}}.'
        )
    return parts


def _parts(module: nn.Module) -> dict[str, str]:
    return cast("dict[str, str]", getattr(module, "checkpoint_parts", {}))


def _checkpointed(method: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """A method that computes itself again. One per class, not per block: a compiler then sees the same code.

    Compiled, attention is kept in every mode. torch tags its kernels as random, for their dropout, and a random
    operator that is computed again is compiled without its layout (torch 2.13: the CPU kernel then reads other memory,
    in silence; the constraint of pytorch#122083 sits in a lowering that is passed by).
    """
    selective = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _keep_expensive)}
    compiled = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _keep_attention)}
    eager = selective if mode == "selective" else {}
    compiled = selective if mode == "selective" else compiled

    @functools.wraps(method)
    def again(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return method(self, *arguments, **named)
        extra = compiled if torch.compiler.is_compiling() else eager
        return checkpoint(method, self, *arguments, use_reentrant=False, **extra, **named)

    return again


def _keep_torch_quiet(blocks: Sequence[nn.Module]) -> None:
    """Drop one warning of torch, for blocks of this project.

    Whenever code with a `context_fn` is compiled, torch asks to make sure that nothing in it works in place, and there
    is no other way to keep attention. These blocks have no operator in place but inside torch's own RMSNorm, on a mean
    that nobody keeps; a test counts them. About blocks of others the warning is right.
    """
    if all(type(block).__module__.startswith("accel_train.") for block in blocks):
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_says_something_else)


def _says_something_else(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint under torch.compile" not in record.getMessage()


def _keep_expensive(_context: Any, operator: Any, *_arguments: Any, **_named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_expensive(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_attention(_context: Any, operator: Any, *_arguments: Any, **_named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_attention(operator) else CheckpointPolicy.MUST_RECOMPUTE


_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_scaled_mm"}


@functools.cache
def _is_expensive(operator: Any) -> bool:
    """Matrix products, and every operator of attention."""
    return _name(operator).split(".")[0] in _PRODUCTS or _is_attention(operator)


@functools.cache
def _is_attention(operator: Any) -> bool:
    """torch's, flash-attn's, flex."""
    return "attention" in _name(operator) or "attn" in _name(operator)


def _name(operator: Any) -> str:
    return operator.name() if callable(getattr(operator, "name", None)) else str(operator)

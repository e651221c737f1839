"""Activation checkpointing: recompute parts of a model in the backward instead of keeping their activations.

Applied in place before `compile` and `prepare`: no module is wrapped, so parameters keep their names. With
deterministic kernels, losses and gradients do not change by a bit.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from accel_train.config import UsageError
from accel_train.speed.blocks import blocks_of, classes_of
from accel_train.speed.memory.activation_offload import InputOffload
from accel_train.speed.options import ActivationCheckpointingConfig


def apply_activation_checkpointing(
    model: nn.Module, config: ActivationCheckpointingConfig, offload: InputOffload | None = None
) -> str:
    """Replace forwards by checkpointed ones, in place, and return a notice.

    Works for any model with a list of blocks (`blocks_of`). The modes attention and ffn need blocks with
    `checkpoint_parts`. Call it after `apply_attention` and before `apply_compile` and `prepare`, on every process.
    Without gradients the plain forward runs. Random draws inside a block are repeated exactly. With ``offload``, host
    memory holds the inputs of the blocks until the backward.
    """
    if config.mode == "none":
        return "activation checkpointing: none"
    blocks = blocks_of(model)
    _refuse_wrong_order(model, blocks, config.mode)
    if config.blocks is not None and config.blocks > len(blocks):
        raise UsageError(
            f"activation_checkpointing.blocks: {config.blocks}: {type(model).__name__} has {len(blocks)} blocks "
            f"({classes_of(blocks)}); give 1 to {len(blocks)}, or leave it out for all"
        )
    _keep_torch_quiet(blocks)
    # The first blocks: memory peaks when the backward begins, and then the last ones need no recomputation.
    chosen = blocks[: config.blocks]
    if offload is not None:
        offload.refuse_too_few(len(chosen))
    # One function per class, not per block, so that a compiler reuses the code of the first block.
    functions: dict[tuple[type[nn.Module], str], Callable[..., Any]] = {}
    for module, name in _targets(model, chosen, config.mode):
        key = (type(module), name)
        if key not in functions:
            functions[key] = _checkpointed(getattr(type(module), name), config.mode, offload)
        # On the instance: other models of the class in this process stay as they are.
        setattr(module, name, types.MethodType(functions[key], module))
    count = f"{len(chosen)} of {len(blocks)} blocks ({classes_of(chosen)})"
    kept = ""
    if offload is not None:
        kept = ", their inputs in host memory"
    return f"activation checkpointing: {config.mode}, {count}{kept}"


def _refuse_wrong_order(model: nn.Module, blocks: Sequence[nn.Module], mode: str) -> None:
    compiled = [getattr(module, "_compiled_call_impl", None) for module in (model, *blocks)]
    if any(call is not None for call in compiled):
        raise UsageError(
            f"activation_checkpointing.mode {mode}: the blocks are already compiled. Apply checkpointing first."
        )
    forwards = [vars(block).get("forward") for block in blocks]
    if any(isinstance(forward, types.MethodType) for forward in forwards):
        raise UsageError(f"activation_checkpointing.mode {mode}: the blocks are already checkpointed. Apply it once.")


def _targets(model: nn.Module, blocks: Sequence[nn.Module], mode: str) -> list[tuple[nn.Module, str]]:
    """Return the modules to checkpoint, each with the name of its method."""
    if mode not in ("attention", "ffn"):
        return [(block, "forward") for block in blocks]
    parts: list[tuple[nn.Module, str]] = []
    for block in blocks:
        for module in block.modules():
            methods = _parts(module)
            if mode in methods:
                parts.append((module, methods[mode]))
    if not parts:
        raise UsageError(
            f"activation_checkpointing.mode {mode}: the blocks of {type(model).__name__} do not name this part. Use "
            f'full or selective, or give the class an attribute checkpoint_parts = {{"{mode}": "method"}}.'
        )
    return parts


def _parts(module: nn.Module) -> dict[str, str]:
    return cast("dict[str, str]", getattr(module, "checkpoint_parts", {}))


def _checkpointed(method: Callable[..., Any], mode: str, offload: InputOffload | None) -> Callable[..., Any]:
    """Return the method with a recomputation in the backward.

    Compiled code keeps attention in every mode. torch tags its kernels as random, because of their dropout, and
    recomputes a random operator without its layout constraint. In torch 2.13 the CPU kernel then silently reads other
    memory (the constraint of pytorch#122083 sits in a skipped lowering).
    """
    eager: dict[str, Any] = {}
    policy = _keep_attention
    if mode == "selective":
        policy = _keep_expensive
    compiled: dict[str, Any] = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}
    # Outside of compiled code the other modes keep nothing, so they need no policy at every operator.
    if mode == "selective":
        eager = {"context_fn": _selective_contexts}

    @functools.wraps(method)
    def recomputed(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        # Nothing is kept for a backward, so there is nothing to recompute.
        if not torch.is_grad_enabled():
            return method(self, *arguments, **named)
        if offload is not None:
            return offload.run(method, self, arguments, named)
        extra = compiled if torch.compiler.is_compiling() else eager
        # torch's reentrant form takes neither a `context_fn` nor named arguments.
        return checkpoint(method, self, *arguments, use_reentrant=False, **extra, **named)

    return recomputed


class _ExpensiveAlone(TorchDispatchMode):
    """A mode of selective checkpointing that sees only the operators whose results are kept. The others run twice.

    torch's own mode counts all operators, and refuses a recomputation with more of them. Some may differ: autocast
    casts a weight once in a forward and uses the copy again in the next call of the block, but a backward casts it for
    each call; and FSDP2 gathers the weights of blocks within a block elsewhere.
    """

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._mode = mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True as torch's own modes do: compiled parts of a block, such as flex attention, may run inside."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _is_expensive(func):
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _selective_contexts() -> tuple[_ExpensiveAlone, _ExpensiveAlone]:
    """Return the modes for the forward and for the recomputation of a block outside of compiled code."""
    forward, recomputation = create_selective_checkpoint_contexts(_keep_expensive)
    return _ExpensiveAlone(forward), _ExpensiveAlone(recomputation)


def _keep_torch_quiet(blocks: Sequence[nn.Module]) -> None:
    """Drop one warning of torch, for blocks of this project.

    torch warns about in-place operators whenever code with a `context_fn` is compiled, and there is no other way to
    keep attention. The only in-place operator of these blocks is inside torch's own RMSNorm, on an intermediate mean
    (a test counts them). For blocks of others the warning stays.
    """
    if all(type(block).__module__.startswith("accel_train.") for block in blocks):
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_other_warning)


def _is_other_warning(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint under torch.compile" not in record.getMessage()


def _keep_expensive(_context: Any, operator: Any, *_arguments: Any, **_named: Any) -> CheckpointPolicy:
    if _is_expensive(operator):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE  # the compiler may still keep what costs no memory


def _keep_attention(_context: Any, operator: Any, *_arguments: Any, **_named: Any) -> CheckpointPolicy:
    if _is_attention(operator):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.MUST_RECOMPUTE


# The last one is the product of float8.
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_scaled_mm"}


# Cached, because torch asks at every operator of every block, in the forward and again in the recomputation.
@functools.cache
def _is_expensive(operator: Any) -> bool:
    """Return True for matrix products and for every operator of attention."""
    return _name(operator).split(".")[0] in _PRODUCTS or _is_attention(operator)


@functools.cache
def _is_attention(operator: Any) -> bool:
    """Return True for the attention operators of torch, flash-attn and flex."""
    name = _name(operator)
    return "attention" in name or "attn" in name


def _name(operator: Any) -> str:
    return operator.name() if callable(getattr(operator, "name", None)) else str(operator)

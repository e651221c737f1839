"""Parameters by kind (hidden matrix, other decayed matrix, the rest), and frozen parts of a model.

A frozen part has a gradient of zero, so neither clipping nor the optimizer's running means see it. Its parameters keep
`requires_grad`. If it were switched off after wrapping, DDP would raise, FSDP2 would leave the gradient None, and ZeRO
would fill in zeros: three different results. Only zeros work under every strategy.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

DDP_TYPES = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
ParamGroup = dict[str, Any]
"""Parameter group of an optimizer: its tensors under `params`, and their options."""
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
"""Attributes or classes inside a block without hidden matrices. Must not match `MultiheadAttention`, which has some."""


def kinds(model: nn.Module, *, muon: bool) -> dict[int, Kind]:
    """Return each parameter's kind by its id. One shared by several modules gets the most conservative kind.

    Weight decay acts on matrices and convolutions, never on norms, biases and embeddings. With ``muon``, 2-D
    matrices inside the repeated blocks are "muon", except norms, embeddings, modulation and heads. Blocks are the
    classes in the model's ``_no_split_modules`` (FSDP2's units), else the elements of each ``nn.ModuleList`` of two
    or more.
    """
    blocks = _blocks(model) if muon else {}
    conservative_first: list[Kind] = ["no_decay", "decay", "muon"]
    kind_of: dict[int, Kind] = {}
    # A module shared by two paths counts under both: one may be inside a block and the other not.
    for path, owner in model.named_modules(remove_duplicate=False):
        for parameter in owner.parameters(recurse=False):
            kind: Kind = "no_decay"
            if _decays(owner, parameter):
                kind = "decay"
                if parameter.ndim == 2 and _is_hidden(path, blocks):
                    kind = "muon"
            other = kind_of.get(id(parameter), kind)
            kind_of[id(parameter)] = min(kind, other, key=conservative_first.index)
    return kind_of


def _decays(owner: nn.Module, parameter: nn.Parameter) -> bool:
    if parameter.ndim < 2:
        return False
    if isinstance(owner, _MATRICES):
        return True
    names = [base.__name__ for base in type(owner).__mro__]
    if any("Norm" in name or "Embedding" in name for name in names):
        return False
    # A bare tensor on a module that has children is a position table, a gate or a modulation bias; on a
    # module without any it is the module's own operator (GPT-2's Conv1D, a spectral convolution).
    return next(owner.children(), None) is None


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    classes: set[str] = set(getattr(model, "_no_split_modules", None) or ())
    modules = dict(model.named_modules())
    named = {path: module for path, module in modules.items() if type(module).__name__ in classes}
    if named:
        return named
    blocks: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            for name, element in module.named_children():
                blocks[f"{path}.{name}".lstrip(".")] = element
    return blocks


def _is_hidden(path: str, blocks: dict[str, nn.Module]) -> bool:
    """Return True if ``path`` is inside a block and not below a norm, embedding, modulation or head in it."""
    for prefix, block in blocks.items():
        if path == prefix or path.startswith(f"{prefix}."):
            inside = path[len(prefix) + 1 :]
            return not any(_NOT_HIDDEN.search(name) for name in _names_below(block, inside))
    return False


def _names_below(block: nn.Module, path: str) -> Iterator[str]:
    """Yield attribute and class names of the modules on the path from ``block`` to ``path``."""
    if not path:
        return
    module = block
    for name in path.split("."):
        module = module.get_submodule(name)
        yield name
        yield type(module).__name__


def mark_part(parameters: Iterable[nn.Parameter], part: str) -> None:
    """Mark the parameters themselves with their part: ZeRO puts its own flat tensors into the optimizer's groups."""
    for parameter in parameters:
        setattr(parameter, _PART, part)


def unmark_parts(model: nn.Module) -> None:
    """Remove the marks of an optimizer built before."""
    for parameter in model.parameters():
        if was_chosen(parameter):
            delattr(parameter, _PART)


def was_chosen(parameter: nn.Parameter) -> bool:
    """Return True for a parameter that ``build_optimizer`` was given to train, unless FSDP2 has replaced it since."""
    return hasattr(parameter, _PART)


def clear_gradients(optimizers: Iterable[Any]) -> None:
    """Set the gradients of frozen groups to zero, whole ones and shards. Under ZeRO use ``without_gradients``."""
    for group in frozen_groups(optimizers):
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.zero_()


@contextmanager
def without_gradients(model: nn.Module, optimizers: Iterable[Any]) -> Generator[None]:
    """Give ZeRO's engine zero gradients for frozen parts in a backward within the body.

    The engine reduces, measures and clips within the backward, so zeroing the gradients afterwards would be too late.
    """
    frozen = {group["part"] for group in frozen_groups(optimizers)}
    parameters: list[nn.Parameter] = []
    if frozen:  # walking a large model takes a millisecond
        parameters = [p for p in model.parameters() if getattr(p, _PART, None) in frozen]
    handles = [parameter.register_hook(torch.zeros_like) for parameter in parameters]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def frozen_groups(optimizers: Iterable[Any]) -> list[ParamGroup]:
    """Return the groups of parts that the coming step leaves as they are."""
    return [group for optimizer in optimizers for group in optimizer.param_groups if group.get("frozen")]


def widest(tensor: Tensor) -> Tensor:
    """Convert to fp64, or to fp32 on Apple's devices, which have no fp64."""
    return tensor.float() if tensor.device.type == "mps" else tensor.double()


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside of Accelerate's wrapper, and any other as it is."""
    return getattr(optimizer, "optimizer", optimizer)


def summed(values: Tensor) -> Tensor:
    """Sum over the samples of a micro-batch, in fp32 at least: bf16 cannot count to 257. A scalar stays one."""
    if values.is_floating_point() and values.itemsize < 4:
        values = values.float()
    return values.sum() if values.ndim else values


def square_of_norm(tensor: Tensor) -> Tensor:
    """Return the sum of the squares, in the widest type, without a copy of the tensor in that type."""
    widest_type = widest(tensor.new_empty(0)).dtype
    return torch.linalg.vector_norm(tensor, dtype=widest_type).square()


def require_prepared(accelerator: Accelerator, model: object) -> None:
    """Raise ``TypeError`` unless ``model`` is a module that ``accelerator.prepare`` returned."""
    # Accelerate lists a model before it wraps it, so the module inside of DDP is the listed one.
    known: list[nn.Module] = accelerator._models  # pyright: ignore[reportPrivateUsage]
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    needs_wrapper = accelerator.num_processes > 1 and accelerator.distributed_type in DDP_TYPES
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel) or not needs_wrapper
    if not (wrapped and any(inner is m or model is m for m in known)):
        raise TypeError(
            f"no_sync needs the one module that accelerator.prepare returned, not {type(model).__name__}; with several "
            "models, wrap them in one nn.Module before prepare"
        )


_PARAMETERS: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()
"""Parameters listed at a model's first window: walking a large model takes a millisecond."""


def prepared_parameters(accelerator: Accelerator, model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a prepared module. Raises ``TypeError`` for an unprepared one."""
    parameters = _PARAMETERS.get(model)
    if parameters is None:
        require_prepared(accelerator, model)
        parameters = _PARAMETERS[model] = list(model.parameters())
    return parameters


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that FSDP2 has sharded, and any other tensor itself."""
    sharded: Any = tensor
    return sharded.to_local() if hasattr(sharded, "to_local") else tensor

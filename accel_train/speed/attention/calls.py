"""Attention calls inside a transformers or diffusers model: recorded in a forward, repeated on any device.

A recorded call computes nothing, so the forward runs where the kernel itself cannot: the model may be on the CPU and
later attend on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
DIRECT = "torch"
"""Name for a call of torch's own function, which no option of a library reaches."""


class Drawn(NamedTuple):
    """Shape and dtype of one input of a call."""

    shape: tuple[int, ...]  # (B, H, N, D)
    dtype: torch.dtype


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention. Holds its mask and its settings, but no queries, keys and values."""

    module: nn.Module
    """The attending module."""
    chosen: str
    """Name of the function in its library, or ``DIRECT``."""
    inputs: tuple[Drawn, Drawn, Drawn]
    """Queries, keys and values. Keys may have fewer heads than queries."""
    mask: Any
    """(B or 1, H or 1, N, M), True or 0 where a query sees a key. None, or a library's own type of mask."""
    attend: Attend
    """Repeats the call on (B, H, N, D) tensors of any device."""
    definition: Attend | None
    """Repeats the call by torch's own definition. None where the library defines it."""
    kernels: tuple[str, ...]
    """Kernels for torch to choose from in this call."""


@contextmanager
def recorded_calls() -> Generator[list[AttentionCall]]:
    """Record every attention call in the body, of any model, instead of computing it: its result is zero."""
    calls: list[AttentionCall] = []
    running: list[nn.Module] = []
    with ExitStack() as stack:
        entering = register_module_forward_pre_hook(lambda module, _inputs: running.append(module))
        leaving = register_module_forward_hook(lambda *_: _leave(running), always_call=True)
        stack.callback(entering.remove)
        stack.callback(leaving.remove)
        # A library that is not imported cannot be called.
        if "transformers.modeling_utils" in sys.modules:
            stack.enter_context(_calls_of_transformers(calls))
        if "diffusers.models.attention_dispatch" in sys.modules:
            stack.enter_context(_calls_of_diffusers(calls, running))
        stack.enter_context(_CallsOfTorch(calls, running))
        yield calls


def _leave(running: list[nn.Module]) -> None:
    running.pop()


class _CallsOfTorch(TorchFunctionMode):
    def __init__(self, calls: list[AttentionCall], running: list[nn.Module]) -> None:
        super().__init__()
        self.calls = calls
        self.running = running

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named: dict[str, Any] = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **named)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        named |= dict(zip(names, args, strict=False))
        q, k, v = (named.pop(name) for name in names[:3])
        attend = partial(_scaled_dot_product, named)
        call = _call(self.running[-1], DIRECT, (q, k, v), named.get("attn_mask"), attend, attend)
        self.calls.append(call)
        return _zeros(q, v)


@contextmanager
def _calls_of_transformers(calls: list[AttentionCall]) -> Generator[None]:
    interface: Any = sys.modules["transformers.modeling_utils"]
    interface = interface.AttentionInterface
    original = interface.get_interface

    def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return partial(record, name, original(self, name, default))

    def record(
        name: str,
        function: Callable[..., Any],
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Any = None,
        **named: Any,
    ) -> tuple[Tensor, None]:
        attend = partial(_repeat_of_transformers, function, module, {"attention_mask": attention_mask, **named})
        calls.append(_call(module, name, (q, k, v), attention_mask, attend, None))
        return _zeros(q, v).transpose(1, 2), None

    # Looked up by every model at every call, so nothing else has to change.
    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = original


def _repeat_of_transformers(
    function: Callable[..., Any], module: nn.Module, named: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    named = {**_moved(named, q.device), "dropout": 0.0}
    result = function(module, q, k, v, **named)
    return result[0].transpose(1, 2)


@contextmanager
def _calls_of_diffusers(calls: list[AttentionCall], running: list[nn.Module]) -> Generator[None]:
    dispatch: Any = sys.modules["diffusers.models.attention_dispatch"]
    backends: dict[Any, Callable[..., Any]] = dispatch._AttentionBackendRegistry._backends
    originals = dict(backends)

    def record(name: str, function: Callable[..., Any], **named: Any) -> Tensor:
        # Its layout is (B, N, H, D).
        q, k, v = (named.pop(key).transpose(1, 2) for key in ("query", "key", "value"))
        attend = partial(_repeat_of_diffusers, function, named)
        mask = named.get("attn_mask")
        reference = partial(_scaled_dot_product, named)
        calls.append(_call(running[-1], name, (q, k, v), mask, attend, reference))
        return _zeros(q, v).transpose(1, 2)

    backends.update({name: partial(record, name.value, function) for name, function in originals.items()})
    try:
        yield
    finally:
        backends.update(originals)


def _repeat_of_diffusers(
    function: Callable[..., Any], named: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    named = _moved(named, q.device)
    if "dropout_p" in named:
        named["dropout_p"] = 0.0
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return function(query=q, key=k, value=v, **named).transpose(1, 2)


def _scaled_dot_product(named: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    moved = _moved(named, q.device)
    settings = {name: moved[name] for name in ("is_causal", "scale", "enable_gqa") if name in moved}
    mask = moved.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **settings)


def _call(
    module: nn.Module,
    chosen: str,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Any,
    attend: Attend,
    definition: Attend | None,
) -> AttentionCall:
    q, k, v = (Drawn(tuple(x.shape), x.dtype) for x in inputs)
    return AttentionCall(module, chosen, (q, k, v), mask, attend, definition, kernels_allowed())


def kernels_allowed() -> tuple[str, ...]:
    """Return the kernels that torch may choose from at this point, by the names of the table."""
    allowed: list[str] = []
    settings = torch.backends.cuda  # of every device, in spite of the name
    if settings.flash_sdp_enabled():
        allowed.append("sdpa_flash")
    if settings.mem_efficient_sdp_enabled():
        allowed.append("sdpa_efficient")
    if settings.math_sdp_enabled():
        allowed.append("sdpa_math")
    if settings.cudnn_sdp_enabled():
        allowed.append("sdpa_cudnn")
    return tuple(allowed)


def in_fp64(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Repeat a call in fp64, by torch's math where it is torch's own function."""
    with sdpa_kernel(SDPBackend.MATH):
        return attend(q.double(), k.double(), v.double())


def _zeros(q: Tensor, v: Tensor) -> Tensor:
    """Return zeros of a result's shape and layout: (B, H, N, D), a view of (B, N, H, D)."""
    batch, heads, length, _ = q.shape
    return v.new_zeros(batch, length, heads, v.shape[-1]).transpose(1, 2)


def _moved(named: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the values with tensors and flex attention masks on the device."""
    moved: dict[str, Any] = {}
    for name, value in named.items():
        if isinstance(value, Tensor):
            value = value.to(device)
        elif type(value).__name__ == "BlockMask" and value.kv_num_blocks.device != device:
            value = block_mask_on(value, device)
        moved[name] = value
    return moved


def block_mask_on(mask: Any, device: torch.device) -> Any:
    """Return a mask of flex attention on another device. Its own function may hold tensors of the old device."""
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    rows, heads, queries, keys = mask.shape
    dense = create_mask(mask.mask_mod, rows, heads, queries, keys, device=mask.kv_num_blocks.device).to(device)
    # A mask with one row or head applies to all.
    several_rows = int(rows > 1)
    several_heads = int(heads > 1)

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return dense[b * several_rows, h * several_heads, q, k]

    return create_block_mask(sees, rows, heads, queries, keys, device=device, BLOCK_SIZE=mask.BLOCK_SIZE)

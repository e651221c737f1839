"""The kernels behind one call: adapters for the layout and the mask format of each kernel.

All callers use one format: queries, keys and values (B, H, N, D), and a mask from `Attention.mask` of `key_mask`
(B, N), True where a key may be attended.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from accel_train.config import UsageError

Kernel = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
Prepare = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Attention:
    """Bidirectional attention by one kernel. `build_attention` makes one, `resolve_attention` chooses and proves it.

    The result of a query at a masked position is finite but meaningless, and differs between kernels: do not read it.
    A row with every key masked attends to all of them, in every kernel, because some would return NaN for it.
    """

    name: str
    kernel: Kernel
    prepare: Prepare

    def mask(self, key_mask: Tensor | None) -> Any:
        """Convert (B, N) bool to the kernel's own format, once per forward, not per block. Never waits for the device.

        None means that no key is masked in any row. Pass it where that is known, because it permits faster kernels.
        """
        if key_mask is None:
            return None
        all_masked = ~key_mask.any(dim=-1, keepdim=True)  # (B, 1)
        return self.prepare(torch.logical_or(key_mask, all_masked))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        """(B, H, N, D) three times and a mask of `self.mask` -> (B, H, N, D). Also takes a `key_mask`, at the cost of
        preparing it in each call."""
        # A 2-D tensor is a key mask that was not prepared. Prepared masks have other dimensions, or are not tensors.
        if isinstance(mask, Tensor) and mask.dim() == 2:
            mask = self.mask(mask)
        return self.kernel(q, k, v, mask)


def build_attention(name: str) -> Attention:
    """Build the named kernel with its imports. Check first with `table.why_not` that it can run here.

    In torch's design, flash3 and flash4 replace its own flash kernel in the whole process. Building any other kernel
    restores torch's own.
    """
    if name not in _ACTIVATED:
        _restore_flash_of_torch()
    if ":" in name:
        return Attention(name, _user_kernel(name), _unchanged)
    if name == "sdpa":
        return Attention(name, sdpa, broadcast_mask)
    if name == "sdpa_flash" and torch.cuda.is_available():  # the kernel of a CPU takes masks itself
        return _flash_of_torch(name)
    if name in RESTRICTED:
        return Attention(name, partial(restricted_sdpa, name), broadcast_mask)
    return _BUILDERS[name](name)


# ------------------------------------------------------------------------------------------ torch's own function
RESTRICTED = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend with torch's choice among its kernels."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def restricted_sdpa(name: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend with one kernel of torch, or raise its error, where torch alone would silently fall back to another.

    The kernel is given by name, because models hold this function and torch's own constants cannot be copied or
    pickled.
    """
    with sdpa_kernel(RESTRICTED[name]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def broadcast_mask(key_mask: Tensor) -> Tensor:
    """(B, N) -> (B, 1, 1, N)."""
    return key_mask[:, None, None, :]


def _unchanged(key_mask: Tensor) -> Tensor:
    return key_mask


# ------------------------------------------------------------------------------- sequences of different lengths
class Packing(NamedTuple):
    """A padding mask as 2 B sequences of different lengths: the keys of each row and then its padding.

    The padding is a separate sequence so that all sizes follow from the shape. The number of valid tokens is never
    fetched from the device, shapes stay static, and every element of the result is written. The cost is the attention
    of padding to padding. A row without padding has an empty second sequence.
    """

    order: Tensor  # (B * N,) int64: source token of each packed place
    inverse: Tensor  # (B * N,) int64: packed place of each token
    boundaries: Tensor  # (2 B + 1,) int32: first packed place of each sequence, and the end


def pack_mask(key_mask: Tensor) -> Packing:
    """(B, N) bool -> Packing. The keys of a row keep their order."""
    rows, length = key_mask.shape
    first = torch.arange(0, rows * length, length, device=key_mask.device)[:, None]  # (B, 1)
    # Stable, so that keys and padding each keep their order.
    order = key_mask.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)  # (B, N)
    inverse = order.argsort(dim=-1)
    keys = key_mask.sum(dim=-1)  # (B,)
    lengths = torch.stack((keys, length - keys), dim=-1).flatten()  # (2 B,)
    boundaries = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return Packing((order + first).flatten(), (inverse + first).flatten(), boundaries)


def pack(x: Tensor, packing: Packing) -> Tensor:
    """(B, H, N, D) -> (B * N, H, D), each row's keys first."""
    return x.transpose(1, 2).flatten(0, 1).index_select(0, packing.order)


def unpack(x: Tensor, packing: Packing, rows: int) -> Tensor:
    """(B * N, H, D) -> (B, H, N, D), every token back in its place."""
    return x.index_select(0, packing.inverse).unflatten(0, (rows, -1)).transpose(1, 2)


def packed_kernel(dense: Kernel, variable: Callable[..., Tensor]) -> Kernel:
    """Call `dense` without a mask, and `variable` on packed tokens with one.

    `variable` is called as (q, k, v, boundaries, boundaries, longest, longest) with q, k, v (B * N, H, D), the
    common positional order of flash-attn and torch.nn.attention.varlen. The longest is N: a bound, not a count.
    """
    return partial(_packed, dense, variable)


def _packed(
    dense: Kernel, variable: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Packing | None
) -> Tensor:
    if mask is None:
        return dense(q, k, v, None)
    rows = q.shape[0]
    longest = q.shape[2]
    ends = mask.boundaries
    q, k, v = (pack(x, mask) for x in (q, k, v))  # (B * N, H, D) each
    attended = variable(q, k, v, ends, ends, longest, longest)
    return unpack(attended, mask, rows)


# ------------------------------------------------------------------------------------------- kernels of others
def flash_attention(module: Any, deterministic: bool) -> Kernel:
    """flash-attn 2 by its documented functions: `flash_attn_func` on (B, N, H, D) and `flash_attn_varlen_func`."""
    dense = partial(_flash_dense, module.flash_attn_func, deterministic)
    return packed_kernel(dense, partial(module.flash_attn_varlen_func, deterministic=deterministic))


def _flash_dense(
    function: Callable[..., Tensor], deterministic: bool, q: Tensor, k: Tensor, v: Tensor, _mask: None
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return function(q, k, v, deterministic=deterministic).transpose(1, 2)


def _build_flash(name: str) -> Attention:
    # Imported by name: it cannot be installed without a GPU, and type checkers would miss it.
    module = importlib.import_module("flash_attn")
    return Attention(name, flash_attention(module, torch.are_deterministic_algorithms_enabled()), pack_mask)


HUB_FLASH = ("kernels-community/flash-attn2", 2)
"""Repository and version of flash-attn 2, built for each torch and CUDA, so that nothing is compiled here."""


def _build_flash_hub(name: str) -> Attention:
    """Build flash-attn 2 of the Hub with the package `kernels`: downloaded once, then read from the Hub's cache."""
    get_kernel: Callable[..., Any] = importlib.import_module("kernels").get_kernel
    repository, version = HUB_FLASH
    try:
        module = get_kernel(repository, version=version)
        kernel = flash_attention(module, torch.are_deterministic_algorithms_enabled())
    except Exception as error:  # of foreign code: the network, the cache, no build for this torch and CUDA
        raise UsageError(
            f"attention {name}: {repository} version {version} could not be loaded. Fetch it once where there is a "
            f'network (HF_HUB_OFFLINE not set), with the same HF_HOME and torch {torch.__version__}: python -c "from '
            f"kernels import get_kernel; get_kernel('{repository}', version={version})\", or use flash, varlen or auto "
            f"({type(error).__name__}: {error})"
        ) from error
    return Attention(name, kernel, pack_mask)


def _flash_of_torch(name: str) -> Attention:
    """Build torch's flash kernel. It takes no mask on CUDA, so masked batches use its variable-length form."""
    dense = partial(restricted_sdpa, "sdpa_flash")
    return Attention(name, packed_kernel(dense, _varlen_function()), pack_mask)


_ACTIVATED = {"flash3": "FA3", "flash4": "FA4"}


def _build_activated(name: str) -> Attention:
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl(_ACTIVATED[name])
    return _flash_of_torch(name)


def _restore_flash_of_torch() -> None:
    active = getattr(torch.nn.attention, "current_flash_attention_impl", None)  # torch 2.11 and newer
    if active is not None and active() is not None:
        torch.nn.attention.restore_flash_attention_impl()


def _varlen_function() -> Callable[..., Tensor]:
    return importlib.import_module("torch.nn.attention.varlen").varlen_attn


def _build_varlen(name: str) -> Attention:
    variable = _varlen_function()
    return Attention(name, packed_kernel(partial(_rows_as_sequences, variable), variable), pack_mask)


def _rows_as_sequences(variable: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, _mask: None) -> Tensor:
    rows = q.shape[0]
    lengths = (q.shape[2], k.shape[2])  # differ in cross-attention
    row = torch.arange(rows + 1, dtype=torch.int32, device=q.device)
    ends = [row * length for length in lengths]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    attended = variable(q, k, v, *ends, *lengths)
    return attended.unflatten(0, (rows, -1)).transpose(1, 2)


def _build_flex(name: str) -> Attention:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)  # uncompiled it is slow math
    return Attention(name, partial(_flex, compiled), flex_mask)


def _flex(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    return function(q, k, v, block_mask=mask)


def flex_mask(key_mask: Tensor) -> Any:
    """(B, N) -> BlockMask. Blocks of 128 padding keys are skipped."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, length = key_mask.shape

    def may_attend(b: Tensor, _h: Tensor, _q: Tensor, k: Tensor) -> Tensor:
        return key_mask[b, k]

    # None: one mask for all heads.
    return create_block_mask(may_attend, rows, None, length, length, device=key_mask.device)


def _user_kernel(name: str) -> Kernel:
    """Import `module:function`, called as (q, k, v, key_mask) with key_mask (B, N) bool or None."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            f"attention {name}: cannot be imported ({error}). Give module:function, where the module can be imported "
            "from here and the function takes (q, k, v, key_mask)."
        ) from None


_BUILDERS: dict[str, Callable[[str], Attention]] = {
    "flash": _build_flash,
    "flash_hub": _build_flash_hub,
    "flash3": _build_activated,
    "flash4": _build_activated,
    "varlen": _build_varlen,
    "flex": _build_flex,
}


TORCH_CHOICE = Attention("sdpa", sdpa, broadcast_mask)
"""Attention of a model before `apply_attention`: torch's choice."""

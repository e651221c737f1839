"""Table of the capabilities of each attention kernel, and the reasons why a kernel cannot run here.

The rows follow torch 2.13 and the vendors' documentation. Rows for CUDA are not measured on every device of their
range: `resolve_attention` proves the chosen kernel on the actual device before its first use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch


@dataclass(frozen=True)
class AttentionNeeds:
    """Requirements of one model's attention on one device: features, dtype and shapes."""

    device: torch.device
    dtype: torch.dtype
    """Dtype of queries, keys and values in the computation: bf16 under autocast, whatever the weights are."""
    head_size: int
    heads: int = 4
    length: int = 128
    """Tokens of a row over all streams, padding included (N)."""
    batch: int = 4
    """Samples per process per forward."""
    mask: bool = True
    """Rows are padded, with a mask of keys."""
    backward: bool = True
    deterministic: bool = False
    """Two backward passes must agree bit for bit (`torch.use_deterministic_algorithms`)."""
    compiled: bool = False
    """The blocks are compiled with fullgraph=True."""
    cross: bool = False
    """Some layers have different numbers of keys and queries, without a mask."""

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        masked = "with a mask" if self.mask else "without a mask"
        shape = (self.batch, self.heads, self.length, self.head_size)
        return f"{self.device}, {dtype}, (B, H, N, D) = {shape}, {masked}"


@dataclass(frozen=True)
class Backend:
    """One row of the table: a kernel on one type of device."""

    name: str
    device: str
    """Device type, or "any"."""
    dtypes: tuple[str, ...]
    mask: Literal["native", "packed"]
    """native: reads a mask of keys. packed: rows become sequences of different lengths."""
    largest_head: int | None = None
    head_multiple: int = 1
    capability: tuple[int, int] | None = None
    """Lowest compute capability."""
    majors: tuple[int, ...] = ()
    """The only major compute capabilities. Empty: all from `capability` up."""
    dropout: bool = True
    """Dropout of the weights inside the kernel. No model here uses it."""
    backward: bool = True
    deterministic: bool = True
    """The backward can be made deterministic."""
    compiles: bool = True
    """Runs inside a compiled block without a graph break."""
    requires: tuple[str, ...] = ()
    """Modules that must be importable."""
    install: str = ""
    """Package that provides them."""


_ALL = ("float64", "float32", "bfloat16", "float16")
_HALF = ("bfloat16", "float16")
_VARLEN = ("torch.nn.attention.varlen",)

BACKENDS: tuple[Backend, ...] = (
    Backend("sdpa", "any", _ALL, "native"),
    Backend("sdpa_math", "any", _ALL, "native", compiles=False),  # inductor's patterns replace it by a fused kernel
    Backend("sdpa_flash", "cpu", _ALL, "native", dropout=False),
    Backend(
        "sdpa_flash",
        "cuda",
        _HALF,
        "packed",
        largest_head=256,
        head_multiple=8,
        capability=(8, 0),
        requires=_VARLEN,
        install="torch 2.11 or newer",
    ),
    Backend("sdpa_efficient", "cuda", ("float32", *_HALF), "native", head_multiple=8, capability=(5, 0)),
    Backend(
        "sdpa_cudnn",
        "cuda",
        _HALF,
        "native",
        largest_head=128,
        head_multiple=8,
        capability=(8, 0),
        deterministic=False,
    ),
    Backend(
        "flash",
        "cuda",
        _HALF,
        "packed",
        largest_head=256,
        head_multiple=8,
        capability=(8, 0),
        requires=("flash_attn",),
        install="'accel-train[flash]'",
    ),
    Backend(
        "flash_hub",
        "cuda",
        _HALF,
        "packed",
        largest_head=256,
        head_multiple=8,
        capability=(8, 0),
        compiles=False,  # not known of the builds on the Hub
        requires=("kernels",),
        install="'accel-train[kernels]'",
    ),
    Backend(
        "flash3",
        "cuda",
        _HALF,
        "packed",
        largest_head=256,
        head_multiple=8,
        capability=(9, 0),
        majors=(9,),  # Hopper
        dropout=False,
        requires=("flash_attn_interface", *_VARLEN),
        install="flash-attn 3 (flash_attn_interface, from the hopper directory of flash-attention)",
    ),
    Backend(
        "flash4",
        "cuda",
        _HALF,
        "packed",
        largest_head=128,  # sequences of length 0 and 256 channels: flash-attention#2562
        head_multiple=8,
        capability=(9, 0),
        majors=(9, 10),  # Hopper and Blackwell
        dropout=False,
        requires=("flash_attn.cute", *_VARLEN),
        install="flash-attn-4",
    ),
    Backend(
        "varlen",
        "cuda",
        _HALF,
        "packed",
        largest_head=256,
        head_multiple=8,
        capability=(8, 0),
        dropout=False,
        requires=_VARLEN,
        install="torch 2.11 or newer",
    ),
    Backend("flex", "cpu", ("float32", *_HALF), "native", dropout=False, backward=False),
    Backend(
        "flex",
        "cuda",
        ("float32", *_HALF),
        "native",
        largest_head=256,
        capability=(8, 0),
        dropout=False,
        requires=("triton",),
        install="triton",
    ),
)

NAMES = tuple(dict.fromkeys(row.name for row in BACKENDS))

PREFERENCE: tuple[tuple[str, bool | None, tuple[str, ...]], ...] = (
    # cuDNN is 1.7 to 2.3 times as fast as the flash kernel on Hopper and slower or equal elsewhere
    # (transformers#48163). With a mask its gradients can be NaN (pytorch#196678) and the flash kernel can pack.
    ("9", False, ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "sdpa")),
    ("cuda", None, ("sdpa_flash", "sdpa_efficient", "sdpa")),
    ("any", None, ("sdpa",)),
)
"""Kernels of `auto`, in order. The first row that matches device (major capability or type) and mask applies."""


def _importable(module: str) -> bool:
    try:
        # Checked first, because find_spec raises for a loaded module without a __spec__.
        return module in sys.modules or find_spec(module) is not None
    except (ImportError, ValueError):  # the package above it is missing or broken
        return False


@dataclass(frozen=True)
class Machine:
    """The device and packages to compare with the table. Tests build other machines by hand."""

    device: str
    capability: tuple[int, int] | None = None
    importable: Callable[[str], bool] = _importable


def machine_of(device: torch.device) -> Machine:
    """Describe the actual device. Does not wait for it."""
    if device.type == "cuda" and torch.cuda.is_available():
        return Machine(device.type, torch.cuda.get_device_capability(device))
    return Machine(device.type)


def why_not(name: str, needs: AttentionNeeds, machine: Machine) -> str | None:
    """Return the reason why the named kernel cannot run here, or None where it can. Imports nothing."""
    rows = [row for row in BACKENDS if row.name == name]
    row = next((row for row in rows if row.device in (machine.device, "any")), None)
    if row is None:
        return f"it needs a {' or '.join(row.device for row in rows)} device, and this one is {machine.device}"
    reasons = (_why_not_device(row, machine), _why_not_numbers(row, needs), _why_not_mode(row, needs))
    return next((reason for reason in reasons if reason), None)


def able(needs: AttentionNeeds, machine: Machine) -> tuple[str, ...]:
    """Return the kernels of the table that can run here, in its order."""
    return tuple(name for name in NAMES if why_not(name, needs, machine) is None)


def preferred(needs: AttentionNeeds, machine: Machine) -> tuple[str, ...]:
    """Return the candidates of `auto`, best first, in the order of `PREFERENCE`. Never empty: sdpa runs everywhere."""
    kinds = {machine.device, "any"}
    if machine.capability:
        kinds.add(str(machine.capability[0]))
    order = next(o for kind, mask, o in PREFERENCE if kind in kinds and mask in (needs.mask, None))
    return tuple(name for name in order if why_not(name, needs, machine) is None)


def _why_not_device(row: Backend, machine: Machine) -> str | None:
    lowest = row.capability
    found = machine.capability
    if lowest and not _is_capable(row, lowest, found):
        wanted = " or ".join(f"{major}.x" for major in row.majors) or f"{lowest[0]}.{lowest[1]} or higher"
        return f"it needs compute capability {wanted}, this device has {found and '.'.join(map(str, found))}"
    missing = [module for module in row.requires if not machine.importable(module)]
    if missing and row.install:
        return f"{missing[0]} cannot be imported: install {row.install}"
    if missing:
        return f"{missing[0]} cannot be imported"
    return None


def _is_capable(row: Backend, lowest: tuple[int, int], found: tuple[int, int] | None) -> bool:
    if found is None or found < lowest:
        return False
    return not row.majors or found[0] in row.majors


def _why_not_numbers(row: Backend, needs: AttentionNeeds) -> str | None:
    dtype = str(needs.dtype).removeprefix("torch.")
    head = needs.head_size
    if dtype not in row.dtypes:
        return f"it computes in {' or '.join(row.dtypes)}, not {dtype}"
    if row.largest_head and head > row.largest_head:
        return f"its heads have at most {row.largest_head} channels, here {head}"
    if head % row.head_multiple:
        return f"channels per head must be a multiple of {row.head_multiple}, here {head}"
    if row.name == "sdpa_cudnn" and needs.mask and needs.length % 128 == 64:
        excess = f"length {needs.length} (64 more than a multiple of 128)"
        return f"with a mask and {excess} its gradients can be NaN (pytorch#196678)"
    return None


def _why_not_mode(row: Backend, needs: AttentionNeeds) -> str | None:
    if needs.backward and not row.backward:
        return f"it has no backward on {row.device}"
    if needs.deterministic and not row.deterministic:
        return "its backward is not deterministic"
    if needs.compiled and not row.compiles:
        return "it cannot be part of a compiled block"
    return None

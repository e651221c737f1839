"""What this machine has, what it can run, and what is set to no good effect."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch
from packaging.version import Version

from accel_train.launch_files.requested import misleading_variables
from accel_train.runtime.compiler import paths_with_a_space
from accel_train.runtime.tested_versions import newer_than_tested

PACKAGES = (
    "accel-train",
    "torch",
    "accelerate",
    "transformers",
    "datasets",
    "safetensors",
    "huggingface-hub",
    "deepspeed",
    "flash-attn",
)
ADVISED = {"torch": ("2.10", "CVE-2026-24747"), "transformers": ("5.3", "several CVEs")}


def report() -> str:
    """The text that ``accel-train doctor`` prints. Starts nothing and connects to nothing."""
    sections = (
        ("versions", _versions()),
        ("devices", _devices()),
        ("can run", _strategies()),
        ("settings", _settings()),
    )
    return "\n".join(line for title, lines in sections for line in (f"{title}:", *(f"  {text}" for text in lines)))


def attention_report() -> str:
    """The text of ``accel-train doctor --attention``: every kernel on one shape, with a mask, forward and backward.

    Runs each: about half a second a row and precision, and what a kernel takes to be built. Joins no processes.
    """
    from accel_train.speed.attention_proof import attention_rows
    from accel_train.speed.attention_table import AttentionNeeds

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines: list[str] = []
    for dtype in (torch.float32, torch.bfloat16):
        needs = AttentionNeeds(device, dtype, head_size=64, heads=8, length=256, batch=2)
        lines += [f"{needs}: time of forward and backward, error against fp64, what ran"]
        lines += [f"  {row}" for row in attention_rows(needs)]
    return "\n".join(lines)


def _versions() -> list[str]:
    lines: list[str] = []
    for name in PACKAGES:
        found = _installed(name)
        floor, why = ADVISED.get(name, (None, ""))
        old = floor is not None and found is not None and Version(found) < Version(floor)
        lines.append(f"{name} {found or 'not installed'}{f'  WARNING: below {floor} ({why})' if old else ''}")
    lines += [f"WARNING: newer than tested: {package}" for package in newer_than_tested()]
    return lines


def _devices() -> list[str]:
    lines = [f"cpu: {len(psutil.Process().cpu_affinity() or [])} cores usable, {torch.get_num_threads()} torch threads"]
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        kernels = ", ".join(_kernels(i))
        lines.append(
            f"cuda:{i}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability "
            f"{properties.major}.{properties.minor}; attention kernels of torch: {kernels}"
        )
    return lines


def _kernels(index: int) -> list[str]:
    """Kernels of scaled_dot_product_attention that accept a small bf16 problem on this device."""
    from torch.backends import cuda

    query = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=f"cuda:{index}")
    parameters = cuda.SDPAParams(query, query, query, None, 0.0, False, False)
    able = {
        "flash": cuda.can_use_flash_attention(parameters),
        "efficient": cuda.can_use_efficient_attention(parameters),
        "cudnn": cuda.can_use_cudnn_attention(parameters),
        "math": True,
    }
    return [name for name, usable in able.items() if usable]


def _strategies() -> list[str]:
    count = torch.cuda.device_count()
    deepspeed = _installed("deepspeed") is not None
    compiler = shutil.which("c++") or shutil.which("g++")
    on_gpus = f"on {count} GPU(s)" if count else "in rehearsal only (no GPU here): accel-train rehearse"
    zero = on_gpus if deepspeed else "no: pip install 'accel-train[deepspeed]'"
    if deepspeed and not count and compiler is None:
        zero = "no: a rehearsal compiles DeepSpeed's CPU communication and finds no C++ compiler (apt install g++)"
    precisions = ["fp32", "bf16"] if not count or torch.cuda.is_bf16_supported(including_emulation=False) else ["fp32"]
    return [
        "one process: yes",
        f"ddp: {'yes' if torch.distributed.is_available() else 'no'} ({on_gpus if count else 'gloo on CPU'})",
        f"fsdp2: {on_gpus}",
        f"zero1, zero2, zero3, with and without offload: {zero}",
        f"precision: {', '.join([*precisions, *(['fp16'] if count else [])])}",
    ]


def _settings() -> list[str]:
    timeout = torch.distributed.distributed_c10d.default_pg_timeout if torch.distributed.is_available() else None
    return [
        f"collective timeout: the recipe's --collective_timeout_seconds (torch's own default here: {timeout})",
        *(f"WARNING: {sentence}" for sentence in misleading_variables(os.environ)),
        *(f"WARNING: {sentence}" for sentence in paths_with_a_space()),
    ]


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

"""``accel-train doctor``: versions, devices, supported strategies, and settings without effect."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, version

import torch

from accel_train.cores import usable_cores
from accel_train.launch_files.requested import misleading_variables
from accel_train.runtime.tested_versions import newer_than_tested
from accel_train.speed.compiler import paths_with_a_space

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
    "kernels",
)


def report() -> str:
    """Return the output of ``accel-train doctor``. Starts no process and opens no connection."""
    sections = {
        "versions": _versions(),
        "devices": _devices(),
        "can run": _strategies(),
        "settings": _settings(),
    }
    report: list[str] = []
    for title, lines in sections.items():
        report.append(f"{title}:")
        report += [f"  {line}" for line in lines]
    return "\n".join(report)


def attention_report() -> str:
    """Run every attention kernel on one masked shape, forward and backward, and return a table of the results.

    Takes about half a second per kernel and precision, and longer to build a kernel. One process.
    """
    from accel_train.speed.attention.proof import attention_rows
    from accel_train.speed.attention.table import AttentionNeeds

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines: list[str] = []
    # Kernels differ by dtype: flash attention has no fp32.
    for dtype in (torch.float32, torch.bfloat16):
        needs = AttentionNeeds(device, dtype, head_size=64, heads=8, length=256, batch=2)
        lines += [f"{needs}: time of forward and backward, error against fp64, what ran"]
        lines += [f"  {row}" for row in attention_rows(needs)]
    return "\n".join(lines)


def _versions() -> list[str]:
    # torch's own version names its build, such as +cu130, which that of its package may leave out.
    versions = {name: _installed(name) for name in PACKAGES} | {"torch": str(torch.__version__)}
    lines = [f"{name} {installed or 'not installed'}" for name, installed in versions.items()]
    lines += [f"WARNING: newer than tested: {package}" for package in newer_than_tested()]
    return lines


def _devices() -> list[str]:
    # Of this process: a job scheduler or a container may have granted fewer cores than the host has.
    cores, limit = usable_cores()
    lines = [f"cpu: {cores} cores usable ({limit}), {torch.get_num_threads()} torch threads"]
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        memory_gib = properties.total_memory / 2**30
        lines.append(
            f"cuda:{i}: {properties.name}, {memory_gib:.0f} GiB, compute capability "
            f"{properties.major}.{properties.minor}; attention kernels of torch: {', '.join(_kernels(i))}"
        )
    return lines


def _kernels(index: int) -> list[str]:
    """Return the kernels of scaled_dot_product_attention for a small bf16 problem on this device."""
    from torch.backends import cuda

    # torch asks for tensors, not for shapes; a head size of 64 suits every kernel.
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
    gpus = torch.cuda.device_count()
    if gpus:
        sharded = f"on {gpus} GPU(s)"
        ddp_devices = sharded
    else:
        sharded = "in rehearsal only (no GPU here): accel-train rehearse"
        ddp_devices = "gloo on CPU"
    ddp = "yes" if torch.distributed.is_available() else "no"
    return [
        "one process: yes",
        f"ddp: {ddp} ({ddp_devices})",
        f"fsdp2: {sharded}",
        f"zero1, zero2, zero3, with and without offload: {_zero_problem(gpus) or sharded}",
        f"precision: {', '.join(_precisions(gpus))}",
    ]


def _zero_problem(gpus: int) -> str | None:
    if _installed("deepspeed") is None:
        return "no: pip install 'accel-train[deepspeed]'"
    compiler = shutil.which("c++") or shutil.which("g++")
    # On a GPU DeepSpeed communicates by NCCL, and compiles nothing for it.
    if gpus == 0 and compiler is None:
        return "no: a rehearsal compiles DeepSpeed's CPU communication and finds no C++ compiler (apt install g++)"
    return None


def _precisions(gpus: int) -> list[str]:
    if gpus == 0:
        return ["fp32", "bf16"]
    # By default torch also counts GPUs that only emulate bf16.
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return ["fp32", "bf16", "fp16"]
    return ["fp32", "fp16"]


def _settings() -> list[str]:
    # A build of torch without distributed has no such timeout.
    timeout = None
    if torch.distributed.is_available():
        timeout = torch.distributed.distributed_c10d.default_pg_timeout
    warnings = [*misleading_variables(os.environ), *paths_with_a_space()]
    return [
        f"collective timeout: the recipe's --collective_timeout_seconds (torch's own default here: {timeout})",
        *(f"WARNING: {warning}" for warning in warnings),
    ]


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

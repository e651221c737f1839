"""torch's flight recorder: the last collectives of each process, as a file and in words.

torch keeps the last 2,000 of them in memory. NCCL's watchdog writes them when a collective times out; the report of a
step that does not end (``hangs``) writes them for gloo too, and before the timeout.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from accel_train.launch_files.flight_recorder import PREFIX
from accel_train.store import atomic_files

MOST = 3
"""Most unfinished collectives to name for a process. The one that others wait in is among the oldest."""


def dump(logs: Path, process: int) -> list[str] | None:
    """Write the last collectives of this process to a file, and describe the unfinished ones, or else the last.

    Returns None without a process group, or if this torch does not record its backend. Not a collective. May be called
    from any thread.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    recorder = importlib.import_module("torch._C._distributed_c10d")
    if _is_nccl():
        # In the format of NCCL's watchdog, for torch's own analysis, which supports no other backend (torch 2.13).
        atomic_files.replace_file(_file(logs, process), recorder._dump_nccl_trace())
        return in_words(json.loads(recorder._dump_nccl_trace_json()))
    # Newer releases only.
    if not hasattr(recorder, "_dump_fr_trace_json"):
        return None
    trace = json.loads(recorder._dump_fr_trace_json())
    atomic_files.replace_json(_file(logs, process), trace)
    return in_words(trace)


def _is_nccl() -> bool:
    return "nccl" in torch.distributed.get_backend()


def _file(logs: Path, process: object) -> Path:
    name = f"{PREFIX}{process}"
    if not _is_nccl():
        name += ".json"
    return logs / name


def in_words(trace: Mapping[str, Any]) -> list[str]:
    """Return a line for each unfinished collective, the oldest first, or one for the last."""
    entries = sorted(trace.get("entries", []), key=lambda entry: entry["record_id"])
    if not entries:
        return ["no collective yet"]
    unfinished = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    if not unfinished:
        return [f"none unfinished; the last was {_name(entries[-1])}"]
    return [f"waits in {_name(entry)}" for entry in unfinished[:MOST]]


def _name(entry: Mapping[str, Any]) -> str:
    number, description = entry["process_group"]
    group = description
    if description in ("", "undefined"):
        group = f"group {number}"
    order = entry["collective_seq_id"]
    if entry["is_p2p"]:
        order = entry["p2p_seq_id"]
    tensors: list[str] = []
    for dtype, shape in zip(entry["input_dtypes"], entry["input_sizes"], strict=False):
        tensors.append(f"{dtype} {shape}")
    return f"{entry['profiling_name']} number {order} of {group} ({', '.join(tensors[:MOST])})"


def how_to_read(logs: Path) -> str:
    """Return a log line that tells where the last collectives are and how to read them."""
    if _is_nccl():
        return f"the last collectives and their stacks: torchfrtrace --prefix {PREFIX} {logs}"
    return f"the last collectives: {_file(logs, 'N')}"

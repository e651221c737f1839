"""torch's flight recorder: the last collectives of each process, as a file and in words.

torch keeps the last 2,000 of them in memory. NCCL's watchdog writes them when a collective times out; the report of a
step that does not end (``hangs``) writes them for gloo too, and before the timeout.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch

from accel_train.store import atomic_files

PREFIX = "flight_recorder_"
"""Name of a file before the number of its process, as torch appends it."""
ENTRIES = "2000"
MOST = 3
"""Unfinished collectives of a process that are named. The one that others wait in is among the oldest."""
SETTINGS = (
    (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), ENTRIES),
    (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), None),
)
"""Each variable with its older name, which torch still reads, and its value. None: the path of the files."""


def set_up(logs: Path, environment: MutableMapping[str, str]) -> None:
    """Let NCCL's watchdog write ``logs/flight_recorder_N`` at a timeout. Before the processes are connected.

    What the user has set, by either name, stays.
    """
    for names, value in SETTINGS:
        if not any(name in environment for name in names):
            environment[names[0]] = str(logs / PREFIX) if value is None else value


def dump(logs: Path, process: int) -> list[str] | None:
    """Write the last collectives of this process, and return the unfinished ones in words, or the last.

    None without a process group, or if this torch does not record its backend. Not a collective; any thread.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    recorder = importlib.import_module("torch._C._distributed_c10d")
    if _is_nccl():
        # As its watchdog would, for torch's own analysis, which knows no other backend (torch 2.13).
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
    return logs / f"{PREFIX}{process}{'' if _is_nccl() else '.json'}"


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
    group = description if description not in ("", "undefined") else f"group {number}"
    order = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    tensors: list[str] = []
    for dtype, shape in zip(entry["input_dtypes"], entry["input_sizes"], strict=False):
        tensors.append(f"{dtype} {shape}")
    return f"{entry['profiling_name']} number {order} of {group} ({', '.join(tensors[:MOST])})"


def how_to_read(logs: Path) -> str:
    """Return a line for the log."""
    if _is_nccl():
        return f"the last collectives and their stacks: torchfrtrace --prefix {PREFIX} {logs}"
    return f"the last collectives: {_file(logs, 'N')}"

"""Variables of torch's flight recorder, which NCCL's watchdog writes to a file when a collective times out."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

PREFIX = "flight_recorder_"
"""Prefix of the file names. torch appends the number of the process."""
ENTRIES = "2000"
"""Number of collectives that torch keeps."""


def set_up(logs: Path, environment: MutableMapping[str, str]) -> None:
    """Let NCCL's watchdog write ``logs/flight_recorder_N`` at a timeout. Before the processes are connected.

    Variables set by the user stay, including those with an older name that torch still reads.
    """
    settings = {
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): ENTRIES,
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): str(logs / PREFIX),
    }
    for names, value in settings.items():
        if not any(name in environment for name in names):
            environment[names[0]] = value

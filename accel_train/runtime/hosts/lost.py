"""Explain the errors of collectives in which another process is missing, which torch's own messages do not."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from pathlib import Path

# Phrases in the errors of gloo and NCCL.
STUCK = ("Timed out waiting", "timed out after", "Wait timeout", "Application timeout")
GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "Connection timed out",
    "No route to host",
    "Network is unreachable",
    "Host is down",
)
COMMON_CALLS = ("evaluate", "report", "save_if_due")
"""Calls of a training loop that all processes make together."""


def explain(error: BaseException | None) -> None:
    """Add a note to the error of a collective: its name, its meaning and the remedy. Other errors get none.

    An error may pass here twice, on its way out of a step and out of the run, and gets one note only.

    torch names neither the operation nor the option, and raises in the process that waited, not in the missing one.
    """
    # torch's are RuntimeErrors. In those of pipes, files and requests the same words have another meaning.
    if not isinstance(error, RuntimeError) or any("called at" in note for note in getattr(error, "__notes__", ())):
        return
    # One process waits for nobody.
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return
    # torch's own frames come last. The newest one outside of it shows which call has failed.
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return
    operation = frames[-1].name
    caller = frames[0]
    for frame in frames:
        if "site-packages" not in frame.filename:
            caller = frame
    # Raised by Python code, such as a loss. The errors of collectives come from within torch, mostly from C++.
    if caller is frames[-1] and (caller.line or "").startswith("raise "):
        return
    where = f"{operation}, called at {caller.filename}:{caller.lineno},"
    text = str(error)
    if any(words in text for words in STUCK):
        error.add_note(
            f"{where} waited in vain for another process, which is stuck or slow: its logs/rank_N.log ends with what "
            "it did last, and `py-spy dump --pid PID` shows where it is. If all processes wait in this operation, the "
            "network between their hosts may be cut. If it was only slow, give a larger "
            f"--collective_timeout_seconds.{_alone_in(frames)}"
        )
    elif any(words in text for words in GONE):
        error.add_note(
            f"{where} failed because another process has ended or its host is gone; its logs/rank_N.log has the error "
            "to look for."
        )


def _alone_in(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return a hint for a wait within a call of the training loop: the other process may never have made it."""
    for frame in frames:
        if frame.name in COMMON_CALLS and Path(frame.filename).parts[-2:] == ("accel_train", "loop.py"):
            return (
                f" This process waits in training.{frame.name}, which every process must call: not within `if "
                "accelerator.is_main_process`."
            )
    return ""

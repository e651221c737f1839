"""Places where a test makes the process die, wait or fail, to prove crash safety with real crashes.

``ACCEL_TRAIN_FAILPOINTS`` is a comma-separated list of ``name[@rank][#n][=action]``. At the n-th passage of that place
(default 1) on that rank (default: every rank) the action is taken:

- ``kill``, the default: SIGKILL to the trainer and its writer.
- ``sleep:SECONDS``.
- ``hold``: touch the file named by ``ACCEL_TRAIN_FAILPOINTS_GO`` plus ``.held``, then wait for the file itself.
- the name of an errno, such as ``ENOSPC``: raise it.

Without the variable a passage costs one look at the environment.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from pathlib import Path

VARIABLE = "ACCEL_TRAIN_FAILPOINTS"
GO_VARIABLE = "ACCEL_TRAIN_FAILPOINTS_GO"

NAMES = (
    "after_mkdir",
    "after_snapshot",
    "before_file",
    "mid_file",
    "after_model_file",
    "after_optimizer_file",
    "before_seal",
    "after_write",
    "before_manifest",
    "mid_manifest",
    "before_rename",
    "after_rename",
    "after_commit",
    "before_retention",
    "before_rmtree",
)
"""All places, in the order of a save."""

_FORM = re.compile(r"(?P<name>\w+)(?:@(?P<rank>\d+))?(?:#(?P<nth>\d+))?(?:=(?P<action>[\w:.]+))?")
# Per process: the trainer and its writer count their own passages.
_passages: dict[str, int] = {}
_trainer: list[int] = []


def belongs_to(trainer: int) -> None:
    """Set the process for ``kill`` to end along with this one. The writer passes its trainer's process id."""
    _trainer[:] = [trainer]


def hit(name: str, rank: int = 0) -> None:
    """Pass the place ``name`` and run the action set for it, if any. Raises ``OSError`` if the action is an errno."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    assert name in NAMES, name
    for text in wanted.split(","):
        match = _FORM.fullmatch(text.strip())
        if match is None or match["name"] not in NAMES:
            raise ValueError(f"{VARIABLE}: {text!r} is not name[@rank][#n][=action] with one of {', '.join(NAMES)}")
        of_other_rank = match["rank"] is not None and int(match["rank"]) != rank
        if match["name"] != name or of_other_rank:
            continue
        # Counted by entry, not by name: two entries may wait for different passages of one place.
        _passages[text] = _passages.get(text, 0) + 1
        if _passages[text] == int(match["nth"] or 1):
            _act(match["action"] or "kill", name)


def _act(action: str, name: str) -> None:
    if action == "kill":
        for process in (*_trainer, os.getpid()):  # this process last, or it could not kill the trainer
            os.kill(process, signal.SIGKILL)
    elif action.startswith("sleep:"):
        time.sleep(float(action.removeprefix("sleep:")))
    elif action == "hold":
        # The test learns from ".held" that the place is reached, and creates the file itself to go on.
        go = Path(os.environ[GO_VARIABLE])
        go.with_name(f"{go.name}.held").touch()
        while not go.exists():
            time.sleep(0.01)
    else:
        code = getattr(errno, action)
        raise OSError(code, f"{os.strerror(code)} (failpoint {name})")

"""Places where a test makes the process die, wait or fail, so that crash claims are shown by crashing.

``ACCEL_TRAIN_FAILPOINTS`` holds ``name[@rank][#n][=action]``, several separated by commas: at the n-th passage
(from 1; the first unless told) of that place on that rank (every rank unless told) the action happens: ``kill``
(SIGKILL to the trainer and its writer; the default), ``sleep:SECONDS``, ``hold`` (wait for the file that
``ACCEL_TRAIN_FAILPOINTS_GO`` names, after making the same name with ``.held``), or the name of an errno such as
``ENOSPC``, which is raised. Without the variable a passage costs one look at the environment.
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
"""Every place, in the order of a save."""

_FORM = re.compile(r"(?P<name>\w+)(?:@(?P<rank>\d+))?(?:#(?P<nth>\d+))?(?:=(?P<action>[\w:.]+))?")
_passages: dict[str, int] = {}
_trainer: list[int] = []


def belongs_to(trainer: int) -> None:
    """Name the process that dies with this one: the writer calls it with its trainer's process id."""
    _trainer[:] = [trainer]


def hit(name: str, rank: int = 0) -> None:
    """Pass the place ``name``; what happens is described above. Raises ``OSError`` where the action is an errno."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    assert name in NAMES, name
    for text in wanted.split(","):
        match = _FORM.fullmatch(text.strip())
        if match is None or match["name"] not in NAMES:
            raise ValueError(f"{VARIABLE}: {text!r} is not name[@rank][#n][=action] with one of {', '.join(NAMES)}")
        if match["name"] != name or (match["rank"] is not None and int(match["rank"]) != rank):
            continue
        _passages[text] = _passages.get(text, 0) + 1
        if _passages[text] == int(match["nth"] or 1):
            _act(match["action"] or "kill", name)


def _act(action: str, name: str) -> None:
    if action == "kill":
        for process in (*_trainer, os.getpid()):
            os.kill(process, signal.SIGKILL)
    elif action.startswith("sleep:"):
        time.sleep(float(action.removeprefix("sleep:")))
    elif action == "hold":
        go = Path(os.environ[GO_VARIABLE])
        go.with_name(f"{go.name}.held").touch()
        while not go.exists():
            time.sleep(0.01)
    else:
        code = getattr(errno, action)
        raise OSError(code, f"{os.strerror(code)} (failpoint {name})")

"""Compile what DeepSpeed needs on CPUs, audibly, and past what an interrupted compilation left behind.

DeepSpeed would do it by itself, in silence, inside `init_distributed`; torch's extensions guard a build with a file
that whoever finds it waits for, for ever: a process that is killed leaves it there.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from accel_train.config import UsageError
from accel_train.speed.compiler import compiler_error, paths_with_a_space

SECONDS_BETWEEN_LINES = 20.0
COMPILERS = {"ninja", "c++", "g++", "cc1plus", "as", "collect2", "ld", "clang", "clang++"}


def load_communication() -> None:
    """Load DeepSpeed's shared-memory communication, compiled on first use. Every process, before they are connected.

    Takes a minute or more where it compiles. Raises ``UsageError`` with the compiler's own words where that fails.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops

    accelerator: Any = get_accelerator()
    builder: Any = accelerator.create_op_builder("ShareMemCommBuilder")
    compatible: dict[str, bool] = deepspeed.ops.__compatible_ops__
    if builder is None or not compatible.get(builder.NAME) or installed_ops.get(builder.NAME):
        return
    from torch.utils.cpp_extension import _get_build_directory  # pyright: ignore[reportPrivateUsage]

    try:
        folder = Path(_get_build_directory(builder.NAME, verbose=False))
        with _told(folder, builder.NAME), one_at_a_time(folder):
            builder.load()
    except (RuntimeError, ImportError, OSError) as error:
        raise UsageError(_failure(builder.NAME, error)) from error


@contextmanager
def one_at_a_time(folder: Path) -> Generator[None]:
    """Keep other processes out of the build in ``folder``, and clear away what an interrupted one left there.

    The lock goes with its process, so that a failed build is tried, and its error seen, by each process in turn. On a
    file system without locks torch's own file is all there is, and it is left alone.
    """
    with (folder / "accel_train.lock").open("w") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
            clear(folder)
        yield


def clear(folder: Path) -> None:
    """Delete torch's lock file in ``folder`` if the process that made it is dead; say so, or who holds it.

    torch keeps the file open while it builds (torch.utils.file_baton). Only processes of this user on this machine can
    be looked at, so another user's file stays. What a dead process left compiling goes on alone, and is waited for.
    """
    baton = folder / "lock"
    if not baton.exists() or baton.stat().st_uid != os.getuid():
        return
    if owners := _with_open(baton):
        _say(f"process {owners[0]} is compiling in {folder}: waiting for it")
        return
    if left := _compiling_in(folder):
        _say(f"an interrupted start left process {left[0]} compiling in {folder}: waiting for it")
    while _compiling_in(folder):
        time.sleep(0.1)
    baton.unlink(missing_ok=True)
    _say(f"an interrupted compilation left the lock {baton}, which no process holds: deleted")


def _with_open(file: Path) -> list[int]:
    """Processes of this user that have the file open."""
    own, found = file.stat(), list[int]()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # gone meanwhile, or another user's
            opened = descriptor.stat()
            if (opened.st_dev, opened.st_ino) == (own.st_dev, own.st_ino):
                found.append(int(descriptor.parts[2]))
    return found


def _compiling_in(folder: Path) -> list[int]:
    """Compilers that work in ``folder``: a person's shell may stand there too."""
    found: list[int] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            compiler = process.name() in COMPILERS or "-g++" in process.name()
            if compiler and Path(process.cwd()) == folder.resolve() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@contextmanager
def _told(folder: Path, name: str) -> Generator[None]:
    """Say on the main process that it compiles, and every 20 s that it still does. Logging is not set up yet."""
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    started, done = time.monotonic(), threading.Event()
    fresh = not (folder / f"{name}.so").exists()

    def still() -> None:
        while not done.wait(SECONDS_BETWEEN_LINES):
            _say(f"{name} of DeepSpeed is being compiled: {time.monotonic() - started:.0f} s so far")

    if fresh:
        _say(f"compiling {name} of DeepSpeed in {folder}, once on this machine: a minute or more")
    thread = threading.Thread(target=still, name="compilation", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if fresh:
        _say(f"compiled {name} of DeepSpeed in {time.monotonic() - started:.0f} s")


def _failure(name: str, error: BaseException) -> str:
    cause = compiler_error(str(error)) or " ".join(str(error).split())[:400]
    if isinstance(error, RuntimeError):
        remedy = "; ".join(paths_with_a_space(inductor=False)) or "install what it misses (apt install g++)"
    elif isinstance(error, ImportError):
        remedy = "delete the folder of this file, and the next start compiles it anew"
    else:
        remedy = "set TORCH_EXTENSIONS_DIR to a folder that this user can write"
    return f"distributed_type: DEEPSPEED: {name} of DeepSpeed cannot be compiled or loaded: {cause}. {remedy}"


def _say(text: str) -> None:
    print(f"rehearsal: {text}", flush=True)

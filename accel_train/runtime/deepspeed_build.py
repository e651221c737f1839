"""Compile DeepSpeed's CPU communication with progress messages, and recover from an interrupted compilation.

DeepSpeed would compile it silently inside `init_distributed`. torch guards the build of an extension with a lock file
and waits for it without a limit. A killed process leaves the file behind.
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

    A compilation takes a minute or more. Raises ``UsageError`` with the compiler's error if it fails.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops

    accelerator: Any = get_accelerator()
    builder: Any = accelerator.create_op_builder("ShareMemCommBuilder")
    compatible: dict[str, bool] = deepspeed.ops.__compatible_ops__
    # Then DeepSpeed works without it, or its package ships it compiled.
    if builder is None or not compatible.get(builder.NAME) or installed_ops.get(builder.NAME):
        return
    from torch.utils.cpp_extension import _get_build_directory  # pyright: ignore[reportPrivateUsage]

    try:
        folder = Path(_get_build_directory(builder.NAME, verbose=False))
        with _report_progress(folder, builder.NAME), one_at_a_time(folder):
            builder.load()
    except (RuntimeError, ImportError, OSError) as error:
        raise UsageError(_failure(builder.NAME, error)) from error


@contextmanager
def one_at_a_time(folder: Path) -> Generator[None]:
    """Keep other processes out of the build in ``folder``, and remove the leftovers of an interrupted one.

    The kernel releases the lock when its process ends, so after a failed build each process in turn tries it and sees
    the error.
    """
    with (folder / "accel_train.lock").open("w") as lock:
        # On a file system without locks only torch's lock file protects the build, so it is left alone.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
            clear(folder)
        yield


def clear(folder: Path) -> None:
    """Delete torch's lock file in ``folder`` if its process is dead, else print its holder.

    Waits first for compilers that outlive a dead process.
    """
    baton = folder / "lock"
    # The open files of another user's processes are invisible, so another user's lock stays.
    if not baton.exists() or baton.stat().st_uid != os.getuid():
        return
    # torch keeps the file open while it builds (`torch.utils.file_baton`).
    owners = _with_open(baton)
    if owners:
        _print(f"process {owners[0]} is compiling in {folder}: waiting for it")
        return
    left = _compiling_in(folder)
    if left:
        _print(f"an interrupted start left process {left[0]} compiling in {folder}: waiting for it")
    while _compiling_in(folder):
        time.sleep(0.1)
    baton.unlink(missing_ok=True)
    _print(f"an interrupted compilation left the lock {baton}, which no process holds: deleted")


def _with_open(file: Path) -> list[int]:
    """List the processes of this user with the file open."""
    own = file.stat()
    found: list[int] = []
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        # The process may have ended, or belong to another user.
        with suppress(OSError):
            opened = descriptor.stat()
            if opened.st_dev == own.st_dev and opened.st_ino == own.st_ino:
                found.append(int(descriptor.parts[2]))
    return found


def _compiling_in(folder: Path) -> list[int]:
    """List the compilers working in ``folder``. A person's shell may be there too and does not count."""
    found: list[int] = []
    for process in psutil.process_iter():
        # A process may end between these calls.
        with suppress(psutil.Error, OSError):
            name = process.name()
            if name not in COMPILERS and "-g++" not in name:
                continue
            here = Path(process.cwd()) == folder.resolve()
            if here and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@contextmanager
def _report_progress(folder: Path, name: str) -> Generator[None]:
    """Print the start of a compilation on the main process, and a line every 20 s."""
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    started = time.monotonic()
    done = threading.Event()
    fresh = not (folder / f"{name}.so").exists()

    def report() -> None:
        while not done.wait(SECONDS_BETWEEN_LINES):
            _print(f"{name} of DeepSpeed is being compiled: {time.monotonic() - started:.0f} s so far")

    if fresh:
        _print(f"compiling {name} of DeepSpeed in {folder}, once on this machine: a minute or more")
    thread = threading.Thread(target=report, name="compilation", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if fresh:
        _print(f"compiled {name} of DeepSpeed in {time.monotonic() - started:.0f} s")


def _failure(name: str, error: BaseException) -> str:
    cause = compiler_error(str(error))
    if not cause:
        cause = " ".join(str(error).split())[:400]
    if isinstance(error, RuntimeError):
        remedy = "; ".join(paths_with_a_space(inductor=False)) or "install what it misses (apt install g++)"
    elif isinstance(error, ImportError):
        remedy = "delete the folder of this file, and the next start compiles it again"
    else:
        remedy = "set TORCH_EXTENSIONS_DIR to a folder that this user can write"
    return f"distributed_type: DEEPSPEED: {name} of DeepSpeed cannot be compiled or loaded: {cause}. {remedy}"


def _print(text: str) -> None:
    # Logging is not set up yet.
    print(f"rehearsal: {text}", flush=True)

"""Fitted artifacts in the cache (tokenizer, TF-IDF encoder): complete and verified folders, rebuilt if damaged."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeVar, cast

from accel_train.config import MachineError, UsageError, default_cache, error_number, expand_path, refuse_unwritable

T = TypeVar("T")
SEAL = "sha256.json"
"""Hashes of the other files of a folder. Written last."""
STAMPS = "stamps.json"
"""Sizes and times of these files when they were last hashed. If they have changed, a start hashes the folder again."""
CLOCK_STEP_NS = 2 * 10**9
"""Coarsest clock of a file system. A file hashed sooner after a change may change again with the same timestamp."""
REMEDY = (
    "files that another user created in a cache may not be writable: give --data.cache_dir or ACCEL_TRAIN_CACHE a "
    "folder of your own, or free space on the disk"
)


def cache_directory(option: str | None) -> Path:
    """Create and return the option's folder, else $ACCEL_TRAIN_CACHE, else ~/.cache/accel_train.

    Refuses a folder that cannot be created or written.
    """
    value = option or default_cache()
    folder = expand_path(value)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = str(error)
    else:
        if os.access(folder, os.W_OK):
            return folder
        reason = "not writable"
    raise UsageError(
        f"--data.cache_dir {value!r}: {folder} cannot be used ({reason}). A folder that this process may create "
        "and write is required. Set the option or ACCEL_TRAIN_CACHE."
    )


def cache_if_usable() -> Path | None:
    """Return the cache directory, or None if there cannot be one. For caches that only save time."""
    try:
        return cache_directory(None)
    except UsageError:
        return None


def open_cache(option: str | None, rank: int, world_size: int) -> Path:
    """Return `cache_directory`. Rank 0 prints a notice if other hosts do not share it. Collective."""
    cache = cache_directory(option)
    notice = hosts_without(cache, rank, world_size)
    if notice is not None and rank == 0:
        print(notice, flush=True)
    return cache


def hosts_without(cache: Path, rank: int, world_size: int) -> str | None:
    """Name the hosts that do not see rank 0's `cache`, with the remedy. None if all of them do.

    Collective if several processes are connected: every rank calls it. Processes of one host share its cache.
    """
    from torch import distributed

    if world_size == 1 or not distributed.is_available() or not distributed.is_initialized():
        return None
    # A new name each time: a network file system remembers files that did not exist.
    name = [f".rank_0.{uuid.uuid4().hex}.probe"]
    if rank == 0:
        (cache / name[0]).touch()
    distributed.broadcast_object_list(name, src=0)
    probe = cache / name[0]
    mine = (socket.gethostname(), str(cache), probe.exists())
    gathered: list[object] = [None] * world_size
    distributed.all_gather_object(gathered, mine)
    # The gather was also a barrier: every rank has looked.
    if rank == 0:
        probe.unlink()
    ranks = cast("list[tuple[str, str, bool]]", gathered)
    without = sorted({f"{host} ({folder})" for host, folder, sees_probe in ranks if not sees_probe})
    if not without:
        return None
    first_host = ranks[0][0]
    return (
        f"--data.cache_dir: {', '.join(without)} cannot see {cache} of {first_host}, so each builds its own copy of "
        "what is cached there. Give --data.cache_dir a folder that all hosts share to build it once"
    )


@contextlib.contextmanager
def one_at_a_time(lock: Path) -> Generator[None]:
    """Let one process at a time, among all on the same file system, into the block. The others wait.

    Where the file system has no locks, all enter at once, and their writes must tolerate that.
    """
    with refuse_unwritable(f"--data.cache_dir: {lock}", REMEDY):
        lock.parent.mkdir(parents=True, exist_ok=True)
        stream = lock.open("w")
    with stream:
        with contextlib.suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def of_rank_0(value: T, world_size: int, barrier: Callable[[], None]) -> T:
    """Return rank 0's value on every rank. Collective. Where processes are not connected each keeps its own."""
    from torch import distributed

    # An error of rank 0 is raised here, so that none waits for its value.
    barrier()
    if world_size == 1 or not distributed.is_available() or not distributed.is_initialized():
        return value
    found = [value]
    distributed.broadcast_object_list(found, src=0)
    return found[0]


def cached_folder(
    folder: Path,
    write: Callable[[Path], None],
    *,
    rank: int = 0,
    barrier: Callable[[], None] = lambda: None,
) -> Path:
    """Return `folder`, filled by `write(directory)` unless it is intact already.

    Every rank calls it (two barriers). Rank 0 builds first. Then one process of each host without the folder builds
    that host's own.
    """
    if rank == 0:
        _build_unless_intact(folder, write)
    barrier()
    # On a file system shared with rank 0 the folder is there by now, and this only looks at it.
    if rank > 0:
        _build_unless_intact(folder, write)
    barrier()
    return folder


def without_folder(barrier: Callable[[], None]) -> None:
    """Take part in the barriers of `cached_folder` where it is not needed: other hosts may not see the folder."""
    barrier()
    barrier()


def _build_unless_intact(folder: Path, write: Callable[[Path], None]) -> None:
    # A process that may not write there takes no lock.
    if _is_unchanged(folder) or (not os.access(folder.parent, os.W_OK) and is_intact(folder)):
        return
    with one_at_a_time(folder.with_name(f".{folder.name}.lock")):
        # Another process may have built or hashed it meanwhile.
        if not is_intact(folder):
            _build(folder, write)


def _build(folder: Path, write: Callable[[Path], None]) -> None:
    # Named by host and process: where the file system has no locks, several may build at once.
    part = folder.with_name(f".{folder.name}.{socket.gethostname()}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    with refuse_unwritable(f"--data.cache_dir: {part}", REMEDY):
        part.mkdir(parents=True)
    try:
        write(part)
        (part / SEAL).write_text(json.dumps(_hashes(part)), "utf-8")
        # Later starts trust sizes and times, which a power failure may leave on files without their contents.
        for file in part.iterdir():
            with file.open("rb") as content:
                os.fsync(content.fileno())
    except Exception as error:
        # Other errors may come from reading the input.
        if error_number(error) not in (errno.ENOSPC, errno.EDQUOT):
            raise
        shutil.rmtree(part, ignore_errors=True)
        raise MachineError(
            f"--data.cache_dir: {folder}: cannot be written ({error}); free space (accel-train data cache ls, clear), "
            "or name another folder with --data.cache_dir or ACCEL_TRAIN_CACHE"
        ) from None
    _note_stamps(part, _stamps(part))
    # A rename, so that nobody ever sees half of the folder under its name.
    try:
        part.rename(folder)
    except OSError:
        # The folder exists: another process was faster, or the old one is damaged.
        if not is_intact(folder):
            shutil.rmtree(folder)
            part.rename(folder)
        shutil.rmtree(part, ignore_errors=True)


def is_intact(folder: Path) -> bool:
    """Compare the folder's files with its seal. Hashes them only if they have changed since they were last hashed."""
    if _is_unchanged(folder):
        return True
    try:
        # Taken before the files are read, so that a change in the meantime shows.
        stamps = _stamps(folder)
        expected = json.loads((folder / SEAL).read_text("utf-8"))
        if expected != _hashes(folder):
            return False
    except (OSError, ValueError):
        return False
    _note_stamps(folder, stamps)
    return True


def _is_unchanged(folder: Path) -> bool:
    """Return True if sizes and times of the files are those noted when they were last hashed."""
    try:
        noted = json.loads((folder / STAMPS).read_text("utf-8"))
        noted_at = (folder / STAMPS).stat().st_mtime_ns
        stamps = _stamps(folder)
    except (OSError, ValueError):
        return False
    newest = max((changed_at for _, changed_at in stamps.values()), default=0)
    return noted == stamps and newest + CLOCK_STEP_NS < noted_at


def _stamps(folder: Path) -> dict[str, list[int]]:
    files = {file.name: file.stat() for file in _sealed(folder)} | {SEAL: (folder / SEAL).stat()}
    return {name: [found.st_size, found.st_mtime_ns] for name, found in files.items()}


def _note_stamps(folder: Path, stamps: dict[str, list[int]]) -> None:
    part = folder / f".{STAMPS}.{uuid.uuid4().hex}"
    # Where it cannot be written, the next start hashes again.
    with contextlib.suppress(OSError):
        part.write_text(json.dumps(stamps), "utf-8")
        part.replace(folder / STAMPS)


def _sealed(folder: Path) -> list[Path]:
    notes = (SEAL, STAMPS, f".{STAMPS}.")
    return sorted(file for file in folder.iterdir() if not file.name.startswith(notes))


def _hashes(folder: Path) -> dict[str, str]:
    return {file.name: hash_file(file) for file in _sealed(folder)}


def hash_file(file: Path) -> str:
    # Read in pieces: generated fields may be larger than the memory of the host.
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()

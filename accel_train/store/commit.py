"""Checkpoint directories, complete or absent: names, hashes and the atomic commit.

A checkpoint is written into a temporary directory. Every file is fsynced, hashed and listed in ``manifest.json``, then
the directory is renamed to its final name. A directory under a final name is therefore complete; ``verify`` checks
for later damage. This module knows nothing of processes or tensors.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import re
import shlex
import shutil
import socket
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from accel_train.store import failpoints
from accel_train.store import manifest as manifests
from accel_train.store.atomic_files import fsync_directory, new_nonce, replace_json, set_aside, to_json
from accel_train.store.manifest import MANIFEST, NAME, Checkpoint, checkpoint_name, committed
from accel_train.store.strict_json import NO_FILE, Json, UnreadableError
from accel_train.wording import binary_size, shortened

logger = logging.getLogger(__name__)

# Constants of Linux's renameat2(2), which Python does not expose.
AT_FDCWD = -100
RENAME_EXCHANGE = 2

TEMPORARY = re.compile(r"\.(?:tmp|trash)-checkpoint_(?P<step>\d+)-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]+")
NO_SPACE = "no space left for a checkpoint in"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

FileFacts = tuple[int, int, int, int, str]
"""Size in bytes, mtime_ns, ctime_ns and inode of a file, and the sha256 of its content at that time."""
VerifyCache = dict[Path, dict[str, FileFacts]]
"""Known hashes by checkpoint and file name, for ``verify_cached``. Belongs to one process and starts as ``{}``."""


class CheckpointWriteError(RuntimeError):
    """A checkpoint could not be written. Training state is unharmed and older checkpoints are untouched."""


class NotRenamedError(OSError):
    """A checkpoint is complete and flushed, but its directory could not be renamed to its final name."""


def temporary_name(step: int, nonce: str, kind: str = "tmp") -> str:
    """Build a directory name with the host and the process id of its writer, for ``sweep``."""
    return f".{kind}-{checkpoint_name(step)}-{socket.gethostname()}-{os.getpid()}-{nonce}"


def seal_file(path: Path) -> Json:
    """Flush a written file to the disk and return its ``size`` in bytes and its ``sha256``."""
    # safetensors creates files with mode 0600, but jobs of other users load checkpoints too.
    # The umask can only be read by setting it.
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
    # fsync flushes the file, also through a descriptor opened for reading.
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def rewrite_manifest(path: Path, changes: Mapping[str, Any]) -> None:
    """Change fields of a checkpoint's manifest and its hash. Raises ``OSError`` and ``ValueError``."""
    # The manifest alone is replaced, in one step: the checkpoint verifies before and after.
    manifest = manifests.read(path) | dict(changes)
    replace_json(path / MANIFEST, manifests.sealed(manifest))


def fsync_folders(path: Path) -> None:
    """Make every name below ``path`` survive a power loss. File contents are flushed by ``seal_file``."""
    for folder in {p.parent for p in path.rglob("*")} | {path}:
        fsync_directory(folder)


def commit(temporary: Path, final: Path, manifest: Mapping[str, Any]) -> Path | None:
    """Write the manifest and rename the directory to its final name. One process, after every file is sealed.

    If something other than a checkpoint has the final name, it is set aside and its new path is returned. Raises
    ``ValueError`` for a manifest that no reader would accept: the checkpoint would count as damaged.
    """
    failpoints.hit("before_manifest")
    text = to_json(manifests.sealed(manifest))
    manifests.parse(text.encode())
    # Written in two halves for the failpoint between them: a torn manifest must never count as a checkpoint.
    middle = len(text) // 2
    with (temporary / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text[:middle])
        file.flush()
        failpoints.hit("mid_manifest")
        file.write(text[middle:])
        file.flush()
        os.fsync(file.fileno())
    # Names before the rename: otherwise a power loss could leave the final name without its files.
    fsync_folders(temporary)
    failpoints.hit("before_rename")
    try:
        aside = clear_name(final)
        replaced = final.exists()
        if replaced:
            # The same step was saved before and that checkpoint was refused. Never mix the two, never lose both.
            _exchange(temporary, final)
        else:
            os.rename(temporary, final)
    except OSError as error:
        raise NotRenamedError(
            error.errno,
            f"{error.strerror}: {temporary} is complete, but could not be renamed to {final.name}; it remains there "
            "until the next start removes it",
        ) from error
    failpoints.hit("after_rename")
    fsync_directory(final.parent)
    if replaced:
        shutil.rmtree(temporary)  # the older checkpoint, after the exchange
    return aside


def clear_name(final: Path) -> Path | None:
    """Set aside a file, a link or a foreign directory with the name of a new checkpoint. Returns its new path."""
    # Not `exists`, which follows links: a broken one has the name as well.
    if not os.path.lexists(final):
        return None
    if final.is_dir() and not final.is_symlink() and _looks_like_checkpoint(final):
        return None
    return set_aside(final)


def _looks_like_checkpoint(directory: Path) -> bool:
    """Return True for a checkpoint, damaged or not, and for an empty directory."""
    names = {path.name for path in directory.iterdir()}
    return not names or bool(names & {MANIFEST, "model.safetensors", "model.safetensors.index.json", "optimizer"})


def describe_broken_link(path: Path) -> str | None:
    """Return a sentence about the target if ``path`` is a broken link, as with an unmounted disk, else None."""
    # Not the methods of `Path`, which raise for a network disk that is away.
    if os.path.islink(path) and not os.path.exists(path):
        return f"{path} is a link to {path.readlink()}, which does not exist (a disk that is not mounted?)"
    return None


def describe_lost(directory: Path) -> str | None:
    """Return a sentence about the first checkpoint in a directory that is a broken link, or None."""
    for path in sorted(directory.glob("checkpoint_*")):
        lost = describe_broken_link(path)
        if lost is not None:
            return lost
    return None


def _exchange(temporary: Path, final: Path) -> None:
    """Swap two directories atomically. On file systems without that operation, move the older one aside first.

    A crash between those renames loses the checkpoint of this step, no other.
    """
    libc = ctypes.CDLL(None)
    one = os.fsencode(temporary)
    other = os.fsencode(final)
    # Absent from a libc older than this call of the kernel.
    exchange = getattr(libc, "renameat2", None)
    if exchange is not None and exchange(AT_FDCWD, one, AT_FDCWD, other, RENAME_EXCHANGE) == 0:
        return
    aside = final.with_name(temporary_name(0, new_nonce(), "trash"))
    os.rename(final, aside)
    os.rename(temporary, final)
    os.rename(aside, temporary)


def open_verified(path: Path) -> Checkpoint:
    """Open a checkpoint verified just now: read its manifest, hash nothing. Raises ``ValueError``."""
    manifest = manifests.read(path)
    return Checkpoint(path, manifest["step"], manifest)


def hash_file(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(path: Path, sha256: Callable[[Path], str] = hash_file) -> Checkpoint:
    """Read the manifest and check the size and the sha256 of every file. Raises ``ValueError`` with the reason.

    Raises ``UnreadableError`` if a file cannot be read now, which says nothing about its content. ``sha256`` returns
    the hash of a file, perhaps from a cache.
    """
    manifest = manifests.read(path)
    for name, expected in manifest["files"].items():
        try:
            _check_file(path, name, expected, sha256)
        except OSError as error:
            raise UnreadableError(f"{path}: {name} cannot be read now: {error.strerror or error}") from None
    return Checkpoint(path, manifest["step"], manifest)


def is_intact(path: Path, folder: str) -> bool:
    """Return True if ``path`` has the folder and, in a checkpoint, its files match the manifest. Hashes no others.

    A folder that cannot be read now is not intact.
    """
    if not (path / folder).is_dir():
        return False
    if not manifests.is_checkpoint(path):
        return True
    try:
        for name, expected in manifests.read(path)["files"].items():
            if name.startswith(f"{folder}/"):
                _check_file(path, name, expected, hash_file)
    except (OSError, ValueError):
        return False
    return True


def _check_file(path: Path, name: str, expected: Mapping[str, Any], sha256: Callable[[Path], str]) -> None:
    """Compare one file with its entry in the manifest. Raises ``OSError`` if it cannot be read now."""
    file = path / name
    try:
        # Not `is_file`, which returns False for a file on a lost disk too.
        status = file.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, *NO_FILE):
            raise
        raise ValueError(f"{path}: {name} is missing") from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path}: {name} is not a regular file")
    size = status.st_size
    if size != expected["size"]:  # before the hash: a truncated file is found without reading it
        raise ValueError(f"{path}: {name} has {size} bytes, the manifest says {expected['size']}")
    if sha256(file) != expected["sha256"]:
        raise ValueError(f"{path}: {name} has changed since it was written (sha256 differs)")


def verify_cached(cache: VerifyCache, path: Path) -> Checkpoint:
    """Verify a checkpoint like ``verify``, but reuse the hashes of unchanged files. Raises ``ValueError``.

    Unchanged means equal size, times of change and inode. Bit rot on the disk alters none of them, so this may decide
    on deletions but not on a checkpoint to load.
    """
    known = cache.setdefault(path, {})

    def sha256(file: Path) -> str:
        name = file.relative_to(path).as_posix()
        identity = file_identity(file.stat())
        if name not in known or known[name][:4] != identity:
            known[name] = (*identity, hash_file(file))
        return known[name][4]

    return verify(path, sha256)


def file_identity(status: os.stat_result) -> tuple[int, int, int, int]:
    """Return size, mtime_ns, ctime_ns and inode: a file in which none of them differs counts as unchanged."""
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def remember(cache: VerifyCache, path: Path) -> None:
    """Add the hashes of a checkpoint just written by this process, to avoid reading it again."""
    # After an error the hashes are missing, and the checkpoint is read again.
    with suppress(OSError, ValueError):
        known: dict[str, FileFacts] = {}
        for name, facts in manifests.read(path)["files"].items():
            known[name] = (*file_identity((path / name).stat()), facts["sha256"])
        cache[path] = known


def unlisted(checkpoint: Checkpoint) -> list[str]:
    """List files in its directory without an entry in the manifest: foreign files, or leftovers of a crash."""
    files = [path for path in checkpoint.path.rglob("*") if path.is_file()]
    names = {file.relative_to(checkpoint.path).as_posix() for file in files}
    return sorted(names - checkpoint.manifest["files"].keys() - {MANIFEST})


def newest_verified(
    directory: Path, *, with_state: bool = False, strict: bool = False
) -> tuple[Checkpoint | None, list[str]]:
    """Find the newest verified checkpoint, and the reasons for skipping newer ones.

    ``with_state`` also skips checkpoints without optimizer state, because a run cannot resume from them.
    ``strict`` raises ``UnreadableError`` for one that cannot be read now: only damage is a reason to go back.
    """
    reasons: list[str] = []
    for _, path in reversed(committed(directory)):
        try:
            found = verify(path)
        except ValueError as error:
            if strict and isinstance(error, UnreadableError):
                raise
            reasons.append(str(error))
            continue
        if not with_state or found.manifest.get("state", True):
            return found, reasons
        reasons.append(f"{path}: weights without optimizer state; --init_from starts a new run from it")
    return None, reasons


def remove(path: Path) -> None:
    """Delete a checkpoint. It loses its final name first, so a crash leaves no half-deleted checkpoint behind."""
    match = NAME.fullmatch(path.name)
    step = int(match.group(1)) if match else 0
    trash = path.with_name(temporary_name(step, new_nonce(), "trash"))
    os.rename(path, trash)
    fsync_directory(path.parent)  # or a power loss could restore the name without the files
    failpoints.hit("before_rmtree")
    if trash.is_symlink():  # the target belongs to the user
        trash.unlink()
    else:
        shutil.rmtree(trash)


def sweep(directory: Path) -> list[Path]:
    """Delete unfinished directories of dead processes on this host and return them. One process, at the start."""
    own, others = unfinished(directory)
    for path in own:
        shutil.rmtree(path, ignore_errors=True)
    if others:
        logger.warning(
            "%d unfinished save(s) of other hosts remain in %s, because this host cannot see their processes: %s; "
            "once these have ended, `accel-train checkpoints prune %s` deletes them",
            len(others),
            directory,
            shortened([path.name for path in others], 3),
            shlex.quote(str(directory.parent)),
        )
    return own


def unfinished(directory: Path) -> tuple[list[Path], list[Path]]:
    """List unfinished directories: of dead processes on this host, and of other hosts."""
    own: list[Path] = []
    others: list[Path] = []
    for path in directory.glob(".t*-checkpoint_*"):
        match = TEMPORARY.fullmatch(path.name)
        if match is None:
            continue
        if match["host"] != socket.gethostname():
            others.append(path)
        elif not _is_writer_alive(int(match["pid"]), path):
            own.append(path)
    return own, sorted(others)


def _is_writer_alive(pid: int, path: Path) -> bool:
    try:
        return is_alive(pid, path.stat().st_mtime)
    except FileNotFoundError:
        return False


def is_alive(pid: int, wrote_at: float) -> bool:
    """Return True if the process on this host that wrote something at a time (``st_mtime``) is alive.

    Containers reuse process ids, so its start time counts too.
    """
    import psutil  # here: the writer process imports this module and must start fast

    try:
        process = psutil.Process(pid)
        # It has ended, and its parent has not asked for the exit code yet.
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        # One second of tolerance: process start times have the resolution of the kernel's clock ticks.
        return process.create_time() <= wrote_at + 1
    except psutil.NoSuchProcess:
        return False


def is_disk_full(error: Exception) -> bool:
    """Return True if a write failed for want of space, or of the right to more."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return True
    # safetensors raises its own exception, with the number in the text. These are those of `DISK_FULL` on Linux.
    return re.search(r"os error (28|122|27)\b", str(error)) is not None


def describe_write_error(error: Exception, directory: Path, needed_bytes: int) -> str:
    """Describe a failed write in one sentence, with the numbers if the disk is full."""
    if is_disk_full(error):
        free = shutil.disk_usage(directory).free if directory.exists() else 0
        remedy = "free space there, or give another --output_dir"
        if any(directory.glob("checkpoint_*")):
            remedy = (
                "free space, such as that of older checkpoints: accel-train checkpoints prune "
                f"{shlex.quote(str(directory))} --keep_last N"
            )
        sizes = f"need about {binary_size(needed_bytes)}, free {binary_size(free)}"
        return f"{NO_SPACE} {directory} ({sizes}; {error}); {remedy}"
    return f"checkpoint in {directory} could not be written: {type(error).__name__}: {error}"

"""Checkpoint directories that are complete or do not exist: names, hashes, atomic commit, retention.

A checkpoint is written into a temporary directory, every file fsynced and hashed, listed in ``manifest.json``,
and renamed to its final name. What exists under a final name is complete; whether it still is what was written,
``verify`` tells. Nothing here knows of processes or tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train import strict_json
from accel_train.store import failpoints
from accel_train.store import manifest as manifests
from accel_train.store.manifest import MANIFEST, NAME, checkpoint_name

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of Linux's ``renameat2``."""
TEMPORARY = re.compile(r"\.(?:tmp|trash)-checkpoint_\d+-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]+")


class CheckpointWriteError(RuntimeError):
    """A checkpoint could not be written. Training state is unharmed and older checkpoints are untouched."""


class NotRenamedError(OSError):
    """A checkpoint is complete and flushed, but its directory could not be given its final name."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint directory and what its manifest says."""

    path: Path
    step: int
    manifest: Mapping[str, Any]

    def file(self, name: str) -> Path:
        """Path of one of its files."""
        return self.path / name

    def json(self, name: str) -> Any:
        """One of its JSON files. Raises ``ValueError``."""
        try:
            return strict_json.read(self.file(name))
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(f"{self.file(name)} cannot be read ({error})") from None


def temporary_name(step: int, nonce: str, kind: str = "tmp") -> str:
    """A name that says which process of which host may still be writing it."""
    return f".{kind}-{checkpoint_name(step)}-{socket.gethostname()}-{os.getpid()}-{nonce}"


def new_nonce() -> str:
    """Random hexadecimal digits that keep two attempts at one step apart."""
    return uuid.uuid4().hex[:12]


def committed(directory: Path) -> list[tuple[int, Path]]:
    """Final names in ``directory`` with their steps, oldest first, by step and never by time."""
    if not directory.is_dir():
        return []
    matches = ((NAME.fullmatch(p.name), p) for p in directory.iterdir())
    return sorted((int(m.group(1)), p) for m, p in matches if m and p.is_dir())


def seal_file(path: Path) -> dict[str, Any]:
    """Flush one written file to the disk; returns its ``size`` in bytes and ``sha256``.

    safetensors leaves files readable by their owner alone; other people's jobs load checkpoints too.
    """
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def to_json(value: Any) -> str:
    """JSON as people read it."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON and flush it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(to_json(value))
        file.flush()
        os.fsync(file.fileno())


def replace_json(path: Path, value: Any) -> None:
    """Write readable JSON under a name that at every instant holds the old text or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    write_json(temporary, value)
    try:
        temporary.replace(path)
    except IsADirectoryError:  # somebody's, or a broken copy's: what is written must get its name all the same
        set_aside(path)
        temporary.replace(path)
    fsync_directory(path.parent)


def set_aside(path: Path) -> Path:
    """Take a name from what stands there, which stays beside it as ``NAME.aside-<nonce>``; returns its new path."""
    aside = path.with_name(f"{path.name}.aside-{new_nonce()}")
    os.rename(path, aside)
    logging.getLogger(__name__).warning("%s was in the way and is set aside as %s", path, aside.name)
    return aside


def rewrite_manifest(path: Path, changes: Mapping[str, Any]) -> None:
    """Change fields of a checkpoint's manifest, and its hash with them. Raises ``OSError`` and ``ValueError``."""
    replace_json(path / MANIFEST, manifests.sealed(manifests.read(path) | dict(changes)))


def fsync_directory(path: Path) -> None:
    """Make renames and new names in ``path`` survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make it and its parents, and see to it that they survive a power loss, whoever made them."""
    path.mkdir(parents=True, exist_ok=True)
    for parent in path.absolute().parents:
        if parent.stat().st_dev != path.stat().st_dev:
            break
        with contextlib.suppress(PermissionError):  # one that we may pass through, but not read
            fsync_directory(parent)


def fsync_folders(path: Path) -> None:
    """Make every name below ``path`` survive a power loss; what the files hold is flushed by ``seal_file``."""
    for folder in {p.parent for p in path.rglob("*")} | {path}:
        fsync_directory(folder)


def commit(temporary: Path, final: Path, manifest: Mapping[str, Any]) -> Path | None:
    """Write the manifest and give the directory its final name. One process, after every file is sealed.

    What stands under that name and is no checkpoint is set aside: its new path is returned.
    """
    failpoints.hit("before_manifest")
    text = to_json(manifests.sealed(manifest))
    with (temporary / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text[: len(text) // 2])
        file.flush()
        failpoints.hit("mid_manifest")
        file.write(text[len(text) // 2 :])
        file.flush()
        os.fsync(file.fileno())
    fsync_folders(temporary)
    failpoints.hit("before_rename")
    try:
        aside = clear_name(final)
        replaced = final.exists()
        if replaced:
            # The same step again, after the older one was refused: never mix the two, and never be without either.
            _exchange(temporary, final)
        else:
            os.rename(temporary, final)
    except OSError as error:
        text = f"{error.strerror}: {temporary} is complete, but could not be renamed to {final.name}; it stays there"
        raise NotRenamedError(error.errno, f"{text} until the next start sweeps it") from error
    failpoints.hit("after_rename")
    fsync_directory(final.parent)
    if replaced:
        shutil.rmtree(temporary)
    return aside


def clear_name(final: Path) -> Path | None:
    """Set aside a file, a link or a strange directory that has the name of a checkpoint to come: its new path."""
    ours = final.is_dir() and not final.is_symlink() and _like_a_checkpoint(final)
    return set_aside(final) if os.path.lexists(final) and not ours else None


def _like_a_checkpoint(directory: Path) -> bool:
    """Damaged or not; an empty one counts."""
    names = {path.name for path in directory.iterdir()}
    return not names or bool(names & {MANIFEST, "model.safetensors", "model.safetensors.index.json", "optimizer"})


def lost_link(path: Path) -> str | None:
    """Where ``path`` is a link to what is not there, as of a disk that is not mounted: that, as a sentence."""
    if path.is_symlink() and not path.exists():
        return f"{path} is a link to {path.readlink()}, which does not exist (a disk that is not mounted?)"
    return None


def _exchange(temporary: Path, final: Path) -> None:
    """Swap two directories in one step. Where the file system cannot, the older one goes aside first."""
    paths = [os.fsencode(path) for path in (temporary, final)]
    if ctypes.CDLL(None).renameat2(AT_FDCWD, paths[0], AT_FDCWD, paths[1], RENAME_EXCHANGE) == 0:
        return
    aside = final.with_name(temporary_name(0, new_nonce(), "trash"))
    os.rename(final, aside)
    os.rename(temporary, final)
    os.rename(aside, temporary)


def opened(path: Path) -> Checkpoint:
    """What has been verified just now: its manifest, without hashing all files again. Raises ``ValueError``."""
    found = manifests.read(path)
    return Checkpoint(path, found["step"], found)


def hash_file(file: Path) -> str:
    """sha256 of what it holds."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def verify(path: Path, sha256: Callable[[Path], str] = hash_file) -> Checkpoint:
    """Read the manifest and compare size and sha256 of every file; raises ``ValueError`` with the reason.

    ``sha256`` gives the hash of a file where it is known without reading it.
    """
    found = manifests.read(path)
    for name, expected in found["files"].items():
        try:
            _compare(path, name, expected, sha256)
        except OSError as error:
            raise ValueError(f"{path}: {name} cannot be read ({error})") from None
    return Checkpoint(path, found["step"], found)


def _compare(path: Path, name: str, expected: Mapping[str, Any], sha256: Callable[[Path], str]) -> None:
    """One file with what the manifest says of it."""
    file = path / name
    if not file.is_file():
        raise ValueError(f"{path}: {name} is {'no regular file' if file.exists() else 'missing'}")
    if file.stat().st_size != expected["size"]:
        raise ValueError(f"{path}: {name} has {file.stat().st_size} bytes, the manifest says {expected['size']}")
    if sha256(file) != expected["sha256"]:
        raise ValueError(f"{path}: {name} has changed since it was written (sha256 differs)")


def unlisted(checkpoint: Checkpoint) -> list[str]:
    """Files in its directory that nobody of this project wrote, or that a crash left there."""
    names = {p.relative_to(checkpoint.path).as_posix() for p in checkpoint.path.rglob("*") if p.is_file()}
    return sorted(names - checkpoint.manifest["files"].keys() - {MANIFEST})


def newest_verified(directory: Path, *, with_state: bool = False) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that verifies (``with_state``: and can be resumed), and why newer ones are passed over."""
    reasons: list[str] = []
    for _, path in reversed(committed(directory)):
        try:
            found = verify(path)
        except ValueError as error:
            reasons.append(str(error))
            continue
        if not with_state or found.manifest.get("state", True):
            return found, reasons
        reasons.append(f"{path}: weights without optimizer state; --init_from starts a new run from it")
    return None, reasons


def remove(path: Path) -> None:
    """Take the final name away first, so that a crash in between leaves no half checkpoint behind."""
    match = NAME.fullmatch(path.name)
    trash = path.with_name(temporary_name(int(match.group(1)) if match else 0, new_nonce(), "trash"))
    os.rename(path, trash)
    fsync_directory(path.parent)  # or a power loss may bring the name back and not the files
    failpoints.hit("before_rmtree")
    if trash.is_symlink():  # what it leads to is not ours to delete
        trash.unlink()
    else:
        shutil.rmtree(trash)


def sweep(directory: Path) -> list[Path]:
    """Delete what dead processes of this host left unfinished; returns what went. One process, at start.

    Another host's leftovers stay: whether its process lives cannot be seen from here.
    """
    swept: list[Path] = []
    for path in directory.glob(".t*-checkpoint_*") if directory.is_dir() else []:
        match = TEMPORARY.fullmatch(path.name)
        if match and match["host"] != socket.gethostname():
            logging.getLogger(__name__).warning(
                "%s is of a process on host %s and stays; delete it once that process has ended", path, match["host"]
            )
        elif match and not _made_by(int(match["pid"]), path):
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
    return swept


def _made_by(pid: int, path: Path) -> bool:
    """Whether the process that made ``path`` lives: in containers a new process often gets the old one's number."""
    import psutil  # here, because the writer process takes the rest of this module and should start at once

    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= path.stat().st_mtime + 1
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False


def describe_write_error(error: Exception, directory: Path, needed_bytes: int) -> str:
    """One sentence with the numbers for a failed write. safetensors says "os error 28" where Python has ENOSPC."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if full or re.search(r"os error (28|122|27)\b", str(error)):
        free = shutil.disk_usage(directory).free if directory.exists() else 0
        return (
            f"no space left for a checkpoint in {directory} (need about {needed_bytes / 2**20:.0f} MiB, free "
            f"{free / 2**20:.0f} MiB; {error}); free space or lower --checkpoints.keep_last"
        )
    return f"checkpoint in {directory} could not be written: {type(error).__name__}: {error}"


def total_size(files: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of all listed files."""
    return sum(int(f["size"]) for f in files)

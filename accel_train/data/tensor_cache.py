"""Cache of computed tensors on disk: an entry for each key, shared by runs, processes and hosts.

An entry is a safetensors file with the hash of its content, written by one rename: it is complete or absent. Entries
lie in a folder named by the hash of `about` (how they were computed), so those of other weights or settings are never
mixed in. A limit on the size of all folders together is kept by deleting the least recently used entries. Those in use
by a live run stay: each run holds a locked list of its keys, and the lock ends with its process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from torch import Tensor

from accel_train.config import MendedError, UsageError, disk_error, refuse_unwritable
from accel_train.data.artifacts import REMEDY, one_at_a_time
from accel_train.data.datasets import content_hash

FORMAT = "tensors-1"
ROOT = "tensors"
ABOUT = "about.json"
LEASES = "leases"
DOUBTED = "damaged"
"""Marks a folder in which an entry was found damaged. The next run verifies all entries of it before it starts."""
SUFFIX = ".safetensors"


class DamagedEntryError(UsageError):
    """An entry differs from the one written. The message names its file and the remedy: another start."""


class DeletedEntryError(DamagedEntryError, MendedError):
    """The entry is deleted, or the next start deletes it. That start computes it again."""


class Entry(NamedTuple):
    """A file of the cache."""

    file: Path
    size: int
    """Bytes."""
    used: float
    """Time of the last use, in seconds since 1970."""

    @property
    def name(self) -> str:
        """Folder and key, as in a lease."""
        return f"{self.file.parents[1].name}/{self.file.stem}"


class TensorCache:
    """Entries computed in one way. `about` describes it in plain values, and `root` holds the entries of all ways.

    `cap_bytes` limits the files of all ways together. Can be pickled, for the workers of a loader.
    """

    def __init__(self, root: Path, about: Mapping[str, Any], cap_bytes: int | None = None) -> None:
        self.root = root / ROOT
        self.about = dict(about)
        self.cap_bytes = cap_bytes
        # Sorted, so that the order in which a recipe names the facts does not change the folder.
        described = json.dumps([FORMAT, self.about], sort_keys=True)
        self.folder = self.root / hashlib.sha256(described.encode()).hexdigest()[:32]

    def file(self, key: str) -> Path:
        """Return the file of a key, a hash in hexadecimal."""
        # Spread over 256 folders, so that no folder has a million files.
        return self.folder / key[:2] / f"{key}{SUFFIX}"

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Return the keys without a whole entry, each once. Reads the header of each file, not its content."""
        return [key for key in dict.fromkeys(keys) if not _is_whole(self.file(key))]

    def read(self, key: str) -> dict[str, Tensor]:
        """Read and verify an entry. Raises ``DeletedEntryError`` for one that is absent, or damaged and now deleted.

        Raises another ``DamagedEntryError`` where it can be neither read nor deleted.
        """
        file = self.file(key)
        try:
            content = file.read_bytes()
            return _verified(content)
        except (OSError, ValueError) as error:
            kind = DamagedEntryError
            if not isinstance(error, OSError):
                # The disk may be read-only.
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)
                self._doubt()
            if not os.path.lexists(file):
                kind = DeletedEntryError
            raise kind(
                f"{file}: {error}. Start the run again: it first reads all of its entries, and computes the damaged "
                "ones again (accel-train data cache verify finds those of all runs at once)"
            ) from None

    def _doubt(self) -> None:
        """Let the next start read all entries: a damaged one is seldom alone, and its header may look intact."""
        # In all folders in use: the same cause may have damaged entries of another encoder.
        in_use = {name.partition("/")[0] for name in live_leases(self.root)}
        for folder in {self.folder.name, *in_use}:
            doubt_folder(self.root / folder)

    def delete_damaged(self) -> int:
        """Read all entries if one was found damaged since the last time, and delete the damaged ones.

        Returns their number. One process at a time; those that come later find nothing to do.
        """
        doubted = self.folder / DOUBTED
        if not doubted.exists():
            return 0
        with one_at_a_time(self.folder / f".{DOUBTED}.lock"):
            if not doubted.exists():
                return 0
            damaged = [entry for entry in entries(self.root, self.folder.name) if not is_intact(entry.file)]
            for entry in damaged:
                entry.file.unlink(missing_ok=True)
            doubted.unlink(missing_ok=True)
        return len(damaged)

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> int:
        """Write an entry and return its bytes. Another process may write the same one. Raises ``UsageError``.

        A full disk leaves no part of the entry.
        """
        file = self.file(key)
        content = _encoded(tensors)
        part = _part_of(file)
        try:
            self._prepare_folder(file.parent)
            part.write_bytes(content)
            part.replace(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            # A problem that the user can fix gets a message with a remedy. Anything else needs its traceback.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
                raise
            raise disk_error(error)(
                f"cache {self.root}: {error.strerror}; {len(content):,} bytes are required for an entry. Free space "
                "(accel-train data cache ls, clear), or name another folder with --data.cache_dir or ACCEL_TRAIN_CACHE."
            ) from None
        return len(content)

    def _prepare_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        folder.mkdir(parents=True, exist_ok=True)
        about = self.folder / ABOUT
        if not about.exists():
            part = _part_of(about)
            part.write_text(json.dumps(self.about, indent=1), "utf-8")
            part.replace(about)

    def lease(self, keys: Sequence[str]) -> Lease:
        """Protect entries from deletion, whether or not they exist yet, and count them as used now."""
        with _locked(self.root):
            # Under the lock of `keep_within_cap`, so that a running deletion either sees the lease or ends before it.
            lease = Lease(self.root, [f"{self.folder.name}/{key}" for key in keys])
        for key in keys:
            with contextlib.suppress(OSError):
                # Set explicitly, because many disks do not keep the time of access (noatime).
                os.utime(self.file(key))
        return lease

    def keep_within_cap(self) -> int:
        """Delete the least recently used entries, of any way, until the cap is kept. Return the bytes deleted.

        Raises ``UsageError`` if the entries of live runs are larger than the cap.
        """
        if self.cap_bytes is None:
            return 0
        with _locked(self.root):
            # Under the lock, or a run that starts now could lose an entry that it has just counted on.
            leased = live_leases(self.root)
            # Of all folders: entries of another encoder take room as well.
            found = sorted(entries(self.root), key=lambda entry: entry.used)
            excess = sum(entry.size for entry in found) - self.cap_bytes
            deleted = 0
            for entry in found:
                if deleted >= excess:
                    break
                if entry.name not in leased:
                    entry.file.unlink(missing_ok=True)
                    deleted += entry.size
        if deleted < excess:
            in_use = self.cap_bytes + excess - deleted
            self.refuse_size(in_use)
        return deleted

    def refuse_size(self, needed: int) -> None:
        """Raise ``UsageError`` if `needed` bytes are more than the cap."""
        if self.cap_bytes is not None and needed > self.cap_bytes:
            raise UsageError(
                f"--data.cache_gib {self.cap_bytes / 2**30:g}: {needed / 2**30:.3g} GiB are in use by this run and "
                f"others in {self.root}. Raise it to {needed / 2**30 * 1.05:.3g} or more, or use fewer samples."
            )


class Lease:
    """A locked list of keys. The lock ends with `close` or with the process."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        folder = root / LEASES
        self.file = folder / f"{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        with refuse_unwritable(f"--data.cache_dir: {self.file}", REMEDY):
            folder.mkdir(parents=True, exist_ok=True)
            self._stream: IO[str] | None = self.file.open("w", encoding="utf-8")
        with contextlib.suppress(OSError):  # a file system without locks: entries are then deleted by age alone
            fcntl.flock(self._stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._stream.write("\n".join(names))
        self._stream.flush()
        # A loader's worker outlives a killed trainer by seconds, and must not hold its lock.
        os.register_at_fork(after_in_child=self._stream.close)

    def close(self) -> None:
        """Release the entries."""
        if self._stream is not None:
            self.file.unlink(missing_ok=True)
            self._stream.close()
            self._stream = None


def live_leases(root: Path) -> set[str]:
    """Return ``folder/key`` of all entries in use by live processes. Deletes the lists of dead ones."""
    names: set[str] = set()
    for file in (root / LEASES).glob("*"):
        with contextlib.suppress(FileNotFoundError), file.open("r+", encoding="utf-8") as stream:
            try:
                # Granted only if the writer of the list is gone: it holds a shared lock until it ends.
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.unlink(missing_ok=True)
            except OSError:  # held by a live process, or no locks here
                # Kept when in doubt: a deleted entry costs a running job, and a needless one only some bytes.
                names |= set(stream.read().splitlines())
    return names


def entries(root: Path, folder: str = "*") -> Iterator[Entry]:
    """Yield all entries below `root`, or those of one folder."""
    for file in root.glob(f"{folder}/??/*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # deleted by another process
            status = file.stat()
            yield Entry(file, status.st_size, status.st_mtime)


def clear(root: Path, used_before: float) -> tuple[list[Entry], int]:
    """Delete the entries last used before a time, in seconds since 1970, except those of live runs.

    Returns the deleted ones, and the number of those kept because they are in use.
    """
    deleted: list[Entry] = []
    in_use = 0
    with _locked(root):
        leased = live_leases(root)
        for entry in entries(root):
            if entry.name in leased:
                in_use += 1
            elif entry.used <= used_before:
                entry.file.unlink(missing_ok=True)
                deleted.append(entry)
    return deleted, in_use


def doubt_folder(folder: Path) -> bool:
    """Let the next start read all entries of a folder. False if that cannot be noted, as on a read-only disk."""
    try:
        (folder / DOUBTED).touch()
    except OSError:
        return False
    return True


def is_intact(file: Path) -> bool:
    """Read an entry and compare it with its hash."""
    try:
        _verified(file.read_bytes())
    except (OSError, ValueError):
        return False
    return True


def _locked(root: Path) -> contextlib.AbstractContextManager[None]:
    """Let one process at a time take leases or delete."""
    return one_at_a_time(root / ".lock")


def _part_of(file: Path) -> Path:
    """Return a name for the content of ``file`` while it is written, different for every call."""
    # With the host, because process ids repeat across hosts. The random part is for threads.
    return file.with_name(f".{file.stem}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}.part")


def _encoded(tensors: Mapping[str, Tensor]) -> bytes:
    from safetensors.torch import save

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save(plain, metadata={"sha256": content_hash(plain), "format": FORMAT})


def _verified(content: bytes) -> dict[str, Tensor]:
    """Decode an entry. Raises ``ValueError`` if it is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(content)
        expected = _header(content)["__metadata__"]["sha256"]
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"damaged ({error})") from None
    if content_hash(tensors) != expected:
        raise ValueError("damaged (its content does not match its hash)")
    return tensors


def _header(content: bytes) -> dict[str, Any]:
    """Return the header of a safetensors file from its beginning."""
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size])


def _is_whole(file: Path) -> bool:
    """Return True if a file is as long as its header says. One cut by a power failure is not."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = os.fstat(stream.fileno()).st_size
            if not 0 < length <= size - 8:
                return False
            fields = json.loads(stream.read(length))
        ends = [field["data_offsets"][1] for name, field in fields.items() if name != "__metadata__"]
        # Cheap enough for each of a million entries at a start. The content is verified when it is read.
        return size == 8 + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False

"""The writer process: write, hash and flush a snapshot, commit it, then delete old checkpoints. One per rank.

A thread would share the trainer's interpreter lock and stall its loop. A process shares only the memory of the
snapshot. It imports nothing but the standard library, so it starts fast and takes a few MiB. Jobs and answers are JSON,
one at a time. ``background.Writer`` is the trainer's side.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accel_train.launch_files.parents import killed_with_parent
from accel_train.store import commit, failpoints, retention
from accel_train.store.strict_json import Json

CHUNK_BYTES = 8 << 20
NICENESS = 10
"""The training loop has priority if cores are scarce."""
RETENTION_SECONDS = 1.0
"""Longest wait of a save for the deletion of old checkpoints."""
PATIENCE_SECONDS = 30.0
"""Longest wait for a directory made by another host to appear. Network file systems cache names."""


def safetensors_header(tensors: Sequence[Mapping[str, Any]]) -> bytes:
    """Build the length and the JSON header of a safetensors file with the tensors in this order, without gaps.

    For tensors of one dtype sorted by name, the bytes equal those of ``safetensors.torch.save_file``. The library
    itself would need torch tensors in this process and a copy of each.
    """
    header: Json = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        end = start + int(tensor["bytes"])
        header[tensor["name"]] = {
            "dtype": tensor["dtype"],
            "shape": tensor["shape"],
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8, as safetensors writes them
    return len(text).to_bytes(8, "little") + text


def write_tensors(path: Path, header: bytes, data: memoryview, rank: int = 0) -> Json:
    """Write one safetensors file and flush it. Returns its ``size`` in bytes and its ``sha256``."""
    digest = hashlib.sha256()
    descriptor = _open_patiently(path)
    try:
        with ThreadPoolExecutor(1) as hashing:
            # Hash each chunk in a second thread while it is written: both operations release the interpreter lock.
            for number, chunk in enumerate(_chunks(header, data)):
                hashed = hashing.submit(digest.update, chunk)
                _write_all(descriptor, chunk)
                hashed.result()
                if number == 1:  # after the header and the first chunk of data
                    failpoints.hit("mid_file", rank)
        os.fsync(descriptor)
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    return {"size": size, "sha256": digest.hexdigest()}


def _chunks(header: bytes, data: memoryview) -> Iterator[memoryview]:
    yield memoryview(header)
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _write_all(descriptor: int, chunk: memoryview) -> None:
    while len(chunk):  # `os.write` may write less, at 2 GiB for example
        chunk = chunk[os.write(descriptor, chunk) :]


def _open_patiently(path: Path) -> int:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            # If the folder above is missing too, the directory was deleted, and waiting would not help.
            if time.monotonic() > deadline or not path.parents[1].exists():
                raise
            time.sleep(0.1)


def write(job: Mapping[str, Any], buffer: memoryview) -> Json:
    """Write the ``files`` of a job from the snapshot, and its ``texts``. ``extras`` exist and are only sealed."""
    rank = int(job["rank"])
    folder = Path(job["directory"])
    written: Json = {}
    failpoints.hit("before_file", rank)
    for file in job["files"]:
        header = safetensors_header(file["tensors"])
        start = file["start"]
        size = sum(tensor["bytes"] for tensor in file["tensors"])
        name = file["name"]
        data = buffer[start : start + size]
        written[name] = write_tensors(folder / name, header, data, rank)
        failpoints.hit("after_optimizer_file" if "/" in name else "after_model_file", rank)
    failpoints.hit("before_seal", rank)
    for name, text in job["texts"].items():
        (folder / name).write_text(text, encoding="utf-8")
    for name in (*job["texts"], *job["extras"]):
        written[name] = commit.seal_file(folder / name)
    failpoints.hit("after_write", rank)
    return {"files": written}


class Retention:
    """Deletion of old checkpoints after a commit, in short pieces, so a new job can start in between.

    After the first commit of a process, checkpoints of earlier processes must be hashed, which may take minutes. Work
    left undone at the end of the process is done by the next one: safe, because checkpoints are renamed before they are
    deleted.
    """

    def __init__(self) -> None:
        self._cache: commit.VerifyCache = {}
        self._job: Mapping[str, Any] | None = None
        self._hashing: Iterator[None] | None = None
        self._unreadable: Mapping[str, str] = {}
        self.notices: list[str] = []
        """Log lines for the trainer, sent with the next answer."""

    @property
    def waiting(self) -> bool:
        """True while work is left."""
        return self._job is not None

    def begin(self, job: Mapping[str, Any]) -> None:
        """Start after the commit of ``job``."""
        self._job = job
        final = Path(job["final"])
        # Hashed while it was written, so it need not be read again.
        commit.remember(self._cache, final)
        if self._hashing is None:
            self._hashing = retention.hash_ahead(final.parent, self._cache)

    def step(self) -> bool:
        """Do one piece of work. Returns True if it was hashing, so that more is left."""
        try:
            assert self._job is not None
            if self._hashing is not None and not self._keeps_all(self._job):
                if next(self._hashing, self) is None:  # it yields None after each piece; `self` marks its end
                    return True
                self._hashing = None
            self._prune(self._job)
        except (OSError, ValueError) as error:  # the new checkpoint is committed; a later call tries again
            self._note_failure(f"{type(error).__name__}: {error}")
        self._job = None
        self._hashing = None
        return False

    def finish(self, *, hurry: bool) -> None:
        """Do the remaining work. With ``hurry``, stop at the first checkpoint still to be hashed."""
        while self.waiting:
            is_hashing = self.step()
            if is_hashing and hurry:
                break

    def advance(self, seconds: float) -> None:
        """Work for a limited time. Without this, saves in quick succession would never leave time for it."""
        deadline = time.monotonic() + seconds
        while self.waiting and time.monotonic() < deadline:
            self.step()

    def _keeps_all(self, job: Mapping[str, Any]) -> bool:
        keep: Any = SimpleNamespace(**job["keep"])
        step = int(job["manifest"]["step"])
        return retention.keeps_all(Path(job["final"]).parent, keep, step)

    def _prune(self, job: Mapping[str, Any]) -> None:
        failpoints.hit("before_retention")
        keep: Any = SimpleNamespace(**job["keep"])
        directory = Path(job["final"]).parent
        queue = Path(job["queue"])
        busy: set[str] = set()
        if queue.is_dir():
            busy = {path.stem for path in queue.glob("*.json")}
        step = int(job["manifest"]["step"])
        done = retention.prune(directory, keep, step, busy, self._cache)
        for name, reason in done.failed.items():
            self._note_failure(f"{name}: {reason}")
        for name, reason in done.unreadable.items():
            # Reported once, not after every save.
            if self._unreadable.get(name) != reason:
                self.notices.append(f"{name} is kept whatever the options say: {reason}")
        self._unreadable = done.unreadable

    def _note_failure(self, what: str) -> None:
        self.notices.append(f"an old checkpoint could not be deleted: {what}")


def finish(job: Mapping[str, Any], pending: Retention) -> Json:
    """Commit the files of all ranks and begin the retention. The main process's writer alone."""
    temporary = Path(job["temporary"])
    aside = commit.commit(temporary, Path(job["final"]), job["manifest"])
    pending.begin(job)
    if aside is not None:
        pending.notices.append(f"{job['final']} was taken by something else, which is set aside as {aside}")
    failpoints.hit("after_commit")
    return {}


def serve(connection: Connection, buffer: memoryview) -> None:
    """Answer jobs until the trainer closes its end. Delete old checkpoints in between."""
    pending = Retention()
    while True:
        while pending.waiting and not connection.poll():
            pending.step()
        try:
            job: Json = json.loads(connection.recv_bytes())
        except EOFError:
            return
        # A scheduler that asked for a stop kills soon, so its save waits for no deletion.
        if job["do"] == "write" and not job.get("hurry"):
            pending.advance(RETENTION_SECONDS)
        started = time.monotonic()
        try:
            answer = _do(job, buffer, pending)
        except Exception as error:  # the trainer must receive any error, or it would wait forever
            # A rank writes into a directory beside the final one; the end of a run has neither.
            directory = Path(job.get("directory") or job.get("final") or "").parent
            text = commit.describe_write_error(error, directory, int(job.get("needed_bytes", 0)))
            answer = {"error": text, "complete": isinstance(error, commit.NotRenamedError)}
        answer |= {"seconds": time.monotonic() - started, "notices": pending.notices}
        pending.notices = []
        connection.send_bytes(json.dumps(answer).encode())


def _do(job: Json, buffer: memoryview, pending: Retention) -> Json:
    match job["do"]:
        case "write":
            return write(job, buffer)
        case "commit":
            return finish(job, pending)
        case "end":
            pending.finish(hurry=job["hurry"])
            return {}
        case unknown:
            raise KeyError(unknown)


def main(arguments: Sequence[str]) -> None:
    """Serve with ``socket memory bytes trainer``: two inherited descriptors, memory size, the trainer's process id."""
    socket, memory, size, trainer = (int(a) for a in arguments)
    # These signals may be sent to the whole process group, but the trainer decides when to end.
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    killed_with_parent()
    if os.getppid() != trainer:  # it died before the line above took effect
        return
    failpoints.belongs_to(trainer)
    os.nice(NICENESS)
    logging.disable()  # notices go to the trainer with the answers
    with mmap.mmap(memory, size, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as buffer:
        serve(Connection(socket), buffer)


if __name__ == "__main__":
    main(sys.argv[1:])

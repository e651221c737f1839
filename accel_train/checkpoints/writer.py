"""The writer process: writes, hashes and flushes a snapshot, commits it, then lets old ones go. One a rank.

A thread of the trainer would share its interpreter lock and stall the loop; a process shares nothing but the memory
that holds the snapshot. It imports the standard library alone, so it starts in a moment and weighs a few MiB.
Jobs and answers are JSON, one at a time. ``background.Writer`` is the trainer's side.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accel_train.parent_death import end_with_parent
from accel_train.store import commit, failpoints, retention

CHUNK_BYTES = 8 << 20
NICENESS = 10
"""The loop goes first where cores are short."""
RETENTION_SECONDS = 1.0
"""How long a save waits, at most, for old checkpoints to go that the commits before have left."""
PATIENCE_SECONDS = 30.0
"""How long a directory that another host made may take to be seen here: network file systems cache names."""

Json = dict[str, Any]


def safetensors_header(tensors: Sequence[Mapping[str, Any]]) -> bytes:
    """Length and JSON header of a safetensors file whose tensors lie one after the other in this order.

    Byte for byte what ``safetensors.torch.save_file`` writes for tensors of one dtype in order of name; written here
    because the library wants the tensors in its own process, and a copy of each.
    """
    header: Json = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        end = start + int(tensor["bytes"])
        header[tensor["name"]] = {"dtype": tensor["dtype"], "shape": tensor["shape"], "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_tensors(path: Path, header: bytes, data: memoryview, rank: int = 0) -> Json:
    """Write one safetensors file and flush it; returns its ``size`` in bytes and ``sha256``.

    Hashed from memory while it is written, in a second thread: both release the interpreter lock.
    """
    digest = hashlib.sha256()
    descriptor = _open_patiently(path)
    try:
        with ThreadPoolExecutor(1) as hashing:
            for number, chunk in enumerate(_chunks(header, data)):
                hashed = hashing.submit(digest.update, chunk)
                _write_all(descriptor, chunk)
                hashed.result()
                if number == 1:
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
    while len(chunk):
        chunk = chunk[os.write(descriptor, chunk) :]


def _open_patiently(path: Path) -> int:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            if time.monotonic() > deadline or not path.parents[1].exists():
                raise
            time.sleep(0.1)


def write(job: Mapping[str, Any], buffer: memoryview) -> Json:
    """Write every file of a job: ``files`` from the snapshot, ``texts`` as they stand, and seal ``extras``."""
    rank, folder = int(job["rank"]), Path(job["directory"])
    written: Json = {}
    failpoints.hit("before_file", rank)
    for file in job["files"]:
        header = safetensors_header(file["tensors"])
        data = buffer[file["start"] : file["start"] + sum(t["bytes"] for t in file["tensors"])]
        written[file["name"]] = write_tensors(folder / file["name"], header, data, rank)
        failpoints.hit("after_optimizer_file" if "/" in file["name"] else "after_model_file", rank)
    failpoints.hit("before_seal", rank)
    for name, text in job["texts"].items():
        (folder / name).write_text(text, encoding="utf-8")
    for name in (*job["texts"], *job["extras"]):
        written[name] = commit.seal_file(folder / name)
    failpoints.hit("after_write", rank)
    return {"files": written}


class Retention:
    """What is left to do after a commit, in pieces so short that the next job need not wait for it.

    The first commit of a process finds older checkpoints that nobody has hashed yet, which may take minutes. Whatever
    is left undone when the process ends, the next one does: what goes is renamed before it is deleted.
    """

    def __init__(self) -> None:
        self._cache: retention.VerifyCache = {}
        self._job: Mapping[str, Any] | None = None
        self._hashing: Iterator[None] | None = None
        self.notices: list[str] = []
        """What the trainer is to say, until an answer has told it."""

    @property
    def waiting(self) -> bool:
        """Whether something is left to do."""
        return self._job is not None

    def begin(self, job: Mapping[str, Any]) -> None:
        """After the commit that ``job`` asked for."""
        self._job, final = job, Path(job["final"])
        retention.remember(self._cache, final)
        if self._hashing is None:
            self._hashing = retention.hash_ahead(final.parent, self._cache)

    def step(self) -> bool:
        """Do one piece. Returns whether it was a piece of hashing: where everything is known there is none."""
        try:
            assert self._job is not None
            if self._hashing is not None and not self._keeps_all(self._job):
                if next(self._hashing, self) is None:
                    return True
                self._hashing = None
            self._prune(self._job)
        except (OSError, ValueError) as error:  # the new checkpoint is committed; what could not go now goes next time
            self._could_not_go(f"{type(error).__name__}: {error}")
        self._job = self._hashing = None
        return False

    def end(self, job: Json) -> Json:
        """Do the rest; in a ``hurry``, leave it where old checkpoints would have to be hashed first."""
        while self.waiting:
            must_hash = self.step()
            if must_hash and job["hurry"]:
                break
        return {}

    def advance(self, seconds: float) -> None:
        """Do some of it: where saves follow one another without a pause, it must come to an end all the same."""
        deadline = time.monotonic() + seconds
        while self.waiting and time.monotonic() < deadline:
            self.step()

    def _keeps_all(self, job: Mapping[str, Any]) -> bool:
        keep: Any = SimpleNamespace(**job["keep"])
        return retention.keeps_all(Path(job["final"]).parent, keep, int(job["manifest"]["step"]))

    def _prune(self, job: Mapping[str, Any]) -> None:
        failpoints.hit("before_retention")
        keep: Any = SimpleNamespace(**job["keep"])
        directory, queue = Path(job["final"]).parent, Path(job["queue"])
        busy = {p.stem for p in queue.glob("*.json")} if queue.is_dir() else set[str]()
        failed = retention.prune(directory, keep, int(job["manifest"]["step"]), busy, self._cache).failed
        for name, why in failed.items():
            self._could_not_go(f"{name}: {why}")

    def _could_not_go(self, what: str) -> None:
        self.notices.append(f"an old checkpoint could not be deleted: {what}")


def finish(job: Mapping[str, Any], left: Retention) -> Json:
    """Commit what all ranks have written; old checkpoints go after the answer. The main process's writer alone."""
    aside = commit.commit(Path(job["temporary"]), Path(job["final"]), job["manifest"])
    left.begin(job)
    if aside is not None:
        left.notices.append(f"what stood in the place of {job['final']} is set aside as {aside}")
    failpoints.hit("after_commit")
    return {}


def serve(connection: Connection, buffer: memoryview) -> None:
    """Answer jobs until the trainer closes its end; between them let old checkpoints go."""
    left = Retention()
    jobs: dict[str, Callable[[Json], Json]] = {
        "write": lambda job: write(job, buffer),
        "commit": lambda job: finish(job, left),
        "end": left.end,
    }
    while True:
        while left.waiting and not connection.poll():
            left.step()
        try:
            job: Json = json.loads(connection.recv_bytes())
        except EOFError:
            return
        if job["do"] == "write" and not job.get("hurry"):
            left.advance(RETENTION_SECONDS)
        started = time.monotonic()
        try:
            answer = jobs[job["do"]](job)
        except Exception as error:  # whatever it is, the trainer must hear of it
            where = Path(job.get("directory") or Path(job["final"]).parent)
            text = commit.describe_write_error(error, where.parent, int(job["needed_bytes"]))
            answer = {"error": text, "complete": isinstance(error, commit.NotRenamedError)}
        notices, left.notices = left.notices, []
        answer |= {"seconds": time.monotonic() - started, "notices": notices}
        connection.send_bytes(json.dumps(answer).encode())


def main(arguments: Sequence[str]) -> None:
    """``socket memory bytes trainer``: two inherited descriptors, the size of the memory, the trainer's process id."""
    socket, memory, size, trainer = (int(a) for a in arguments)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):  # meant for the trainer, which decides when to end
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)
    if os.getppid() != trainer:
        return
    failpoints.belongs_to(trainer)
    os.nice(NICENESS)
    logging.disable()  # this process has no log: what it meets is in its answers, and the trainer says it
    with mmap.mmap(memory, size, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as buffer:
        serve(Connection(socket), buffer)


if __name__ == "__main__":
    main(sys.argv[1:])

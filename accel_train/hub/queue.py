"""Queue of the checkpoints to push, kept as files of the run, so that a restart continues with it.

| below ``RUN/hub`` | |
|---|---|
| ``queue/<checkpoint>.json`` | waiting or being pushed; retention keeps the checkpoint as long as the file exists |
| ``failed/<checkpoint>.json`` | refused by the Hub, gone or damaged, with the reason; ``retry_failed`` tries again |
| ``pushed/<checkpoint>.json`` | place of a pushed checkpoint: repository, revision, commit |
| ``log.jsonl`` | pushes, retries, drops and failures, one per line |
| ``offers.json`` | checkpoints offered by training so far, so that every n-th and best survive a restart |

Only the standard library is imported, because readers of the queue start often. Tokens are never written here.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from accel_train.store import atomic_files, commit, manifest, strict_json
from accel_train.store.strict_json import Json

Reason = Literal["every", "best", "last", "hand"]
Revisions = Literal["branch", "tag"]
REFUSED = (401, 403, 404)
"""Statuses of a Hub that refused access. Another token, or a repository created since, may cure them."""
MAX_BYTES = 1 << 20
MAX_LOG_BYTES = 1 << 30


@dataclass(frozen=True)
class Entry:
    """A checkpoint to push and the options of its push: the content of its file in the queue."""

    checkpoint: str
    """Name of its directory, such as ``checkpoint_00001200``."""
    step: int
    run_id: str
    repo_id: str
    include_state: bool = False
    private: bool = True
    revisions: Revisions = "branch"
    reason: Reason = "every"
    """Reason for the push. An ``every`` entry is dropped if a newer one waits when the worker is behind."""
    license: str = ""
    """Licence in the card. Empty: none is named."""


class HubQueue:
    """The files below ``RUN/hub``.

    One process pushes at a time, and any process may read. The main training process and the command line add entries.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.directory = run / "hub"

    def names(self) -> set[str]:
        """Return the names of the checkpoints in the queue. Retention must keep them."""
        return {path.stem for path in self._files("queue")}

    def add(self, entry: Entry) -> None:
        """Write the entry to the queue. It is on disk when this returns."""
        # Queued before the failure is forgotten: a crash in between loses neither.
        self._write("queue", entry.checkpoint, asdict(entry))
        (self.directory / "failed" / f"{entry.checkpoint}.json").unlink(missing_ok=True)

    def entries(self) -> list[Entry]:
        """Return the waiting entries, oldest first. Invalid files are set aside, with a note in ``failed``.

        One that cannot be read now is left out and stays in the queue.
        """
        found: list[Entry] = []
        for path in self._files("queue"):
            try:
                found.append(_entry(_load(path), path.stem))
            except strict_json.UnreadableError:
                continue  # it stays in the queue: a later call may read it
            except (FileNotFoundError, ValueError) as error:
                if not os.path.lexists(path):
                    continue  # pushed in the meantime
                # Renamed and not deleted: somebody may want to see what it was.
                aside = atomic_files.set_aside(path).name
                reason = f"its file in the queue cannot be read ({error}) and is set aside as {aside}"
                self._write("failed", path.stem, {"reason": reason})
                self.log("unreadable", checkpoint=path.stem, reason=reason)
        # By step and not by date: a checkpoint that is pushed again by hand does not overtake others.
        return sorted(found, key=lambda entry: entry.step)

    def next(self, after: Entry | None = None) -> Entry | None:
        """Return the oldest entry to push. With ``after``, return the first of a later step if there is one.

        ``every`` entries older than the newest entry are dropped if they go to the same repository.
        """
        waiting = self.entries()
        if not waiting:
            return None
        newest = waiting[-1]
        kept: list[Entry] = []
        for entry in waiting:
            # Pushing the older one would only delay the newest, which `main` shows in the end.
            is_superseded = entry != newest and entry.repo_id == newest.repo_id
            if entry.reason == "every" and is_superseded:
                self.drop(entry, f"behind: {newest.checkpoint} is newer", event="coalesced")
            else:
                kept.append(entry)
        later = [] if after is None else [entry for entry in kept if entry.step > after.step]
        return (later or kept)[0]

    def drop(self, entry: Entry, reason: str, event: str = "dropped") -> None:
        """Remove an entry without a push and log the reason."""
        self.log(event, checkpoint=entry.checkpoint, reason=reason)
        self._remove_from_queue(entry)

    def fail(self, entry: Entry, reason: str, status: int | None = None) -> None:
        """Move an entry to ``failed`` with the reason: the Hub's, with its ``status``, or that of the checkpoint."""
        record = asdict(entry) | {"reason": reason, "status": status, "failed_at": _now()}
        # Recorded before it leaves the queue: a crash in between loses nothing.
        self._write("failed", entry.checkpoint, record)
        self.log("failed", checkpoint=entry.checkpoint, reason=reason)
        self._remove_from_queue(entry)

    def done(self, entry: Entry, where: Mapping[str, str]) -> None:
        """Move an entry to ``pushed`` with the place of its commit."""
        # The entry leaves the queue last: a process waiting for that reads the record next.
        record = asdict(entry) | dict(where) | {"pushed_at": _now()}
        self._write("pushed", entry.checkpoint, record)
        (self.directory / "failed" / f"{entry.checkpoint}.json").unlink(missing_ok=True)
        self.log("pushed", checkpoint=entry.checkpoint, **where)
        self._remove_from_queue(entry)

    def failed(self) -> dict[str, str]:
        """Return the reasons of the failed entries, by checkpoint."""
        failed = self._records("failed")
        return {name: str(record.get("reason")) for name, record in failed.items()}

    def pushed(self) -> dict[str, Json]:
        """Return ``repo_id``, ``revision``, ``commit`` and ``url`` of the pushed checkpoints, by checkpoint."""
        return self._records("pushed")

    def retry_failed(self, refused_by: str | None = None) -> None:
        """Put failed entries back into the queue, with the reason ``hand``, so that newer ones do not replace them.

        With ``refused_by`` only those to which this repository refused access, and whose checkpoint still exists. Its
        files are not read here, because a push verifies them.
        """
        for name, record in self._records("failed").items():
            is_refused = record.get("repo_id") == refused_by and record.get("status") in REFUSED
            exists = (self.run / "checkpoints" / name / manifest.MANIFEST).is_file()
            if refused_by is not None and not (is_refused and exists):
                continue
            # An entry set aside as invalid has only a reason in `failed`, and cannot be pushed.
            with suppress(ValueError):
                self.add(_entry(record | {"reason": "hand"}, name))

    def offers(self, run_id: str) -> Json:
        """Return the record of the offers in this run, or a new one if the saved record is of another run.

        Raises ``UnreadableError`` if it cannot be read now: with a new record, a worse checkpoint would seem the best.
        """
        saved = _read(self.directory / "offers.json", now=True)
        if saved.get("run_id") == run_id and _are_offers(saved):
            return saved
        # After `--overwrite` the directory holds another run, whose pushes are counted from 0.
        return {"run_id": run_id, "committed": 0}

    def save_offers(self, offers: Mapping[str, Any]) -> None:
        """Save the record of the offers for the next start."""
        atomic_files.replace_json(self._folder("") / "offers.json", strict_json.sealed(offers))

    def log(self, event: str, **details: Any) -> None:
        """Append one line to ``log.jsonl``."""
        record = {"time": _now(), "event": event} | details
        line = json.dumps(record, ensure_ascii=False) + "\n"
        # O_NONBLOCK: a FIFO of this name must not stop the training process until somebody reads it.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self._folder("") / "log.jsonl", flags, 0o666)
        try:
            # A single write, so that lines of two processes do not mix.
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def log_size(self) -> int:
        """Return the size of ``log.jsonl`` in bytes, a position for ``events``."""
        try:
            return (self.directory / "log.jsonl").stat().st_size
        except OSError:
            return 0

    def events(self, start: int) -> tuple[list[Json], int]:
        """Return the events of ``log.jsonl`` from byte ``start`` on, and their end. Invalid lines are skipped."""
        try:
            content = strict_json.read_bytes(self.directory / "log.jsonl", MAX_LOG_BYTES)[start:]
        except (FileNotFoundError, ValueError):
            return [], start
        # A last line without its end is still being written.
        whole = content[: content.rfind(b"\n") + 1]
        records = [_parse(line) for line in whole.splitlines()]
        return [record for record in records if "event" in record], start + len(whole)

    @contextmanager
    def pushing(self, patience_seconds: float = 0.0) -> Generator[str | None, None, None]:
        """Hold the lock for pushing this run. Yields None, or the other process if it holds the lock."""
        # Not w+, which would erase the holder's name before this process has the lock.
        with (self._folder("") / ".lock").open("a+") as lock:
            deadline = time.monotonic() + patience_seconds
            holder = _acquire(lock)
            while holder is not None and time.monotonic() < deadline:
                time.sleep(0.1)
                holder = _acquire(lock)
            yield holder

    def _files(self, folder: str) -> list[Path]:
        try:
            paths = list((self.directory / folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []  # nothing was queued yet, or a file stands in the way
        files = [path for path in paths if path.suffix == ".json"]
        return sorted(path for path in files if commit.NAME.fullmatch(path.stem))

    def _records(self, folder: str) -> dict[str, Json]:
        return {path.stem: _read(path) for path in self._files(folder)}

    def _folder(self, name: str) -> Path:
        folder = self.directory / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _write(self, folder: str, name: str, value: Mapping[str, Any]) -> None:
        atomic_files.replace_json(self._folder(folder) / f"{name}.json", strict_json.sealed(value))

    def _remove_from_queue(self, entry: Entry) -> None:
        (self.directory / "queue" / f"{entry.checkpoint}.json").unlink(missing_ok=True)


def _entry(record: Mapping[str, Any], name: str) -> Entry:
    """Parse and check the record of checkpoint ``name``. Raises ``ValueError`` with the problem."""
    for key, (kind, required) in _FIELDS.items():
        # `type` and not `isinstance`: a step must not be `True`.
        if (required or key in record) and type(record.get(key)) is not kind:
            raise ValueError(f"{key} is {record.get(key)!r:.60}; {kind.__name__} is required")
    entry = Entry(**{key: record[key] for key in _FIELDS if key in record})
    if entry.checkpoint != name or not 0 <= entry.step <= manifest.MAX_STEP:
        raise ValueError(f"it is named {name} but contains {entry.checkpoint:.60}, step {entry.step}")
    if entry.revisions not in get_args(Revisions) or entry.reason not in get_args(Reason):
        raise ValueError(f"revisions {entry.revisions!r:.60} or reason {entry.reason!r:.60} is unknown")
    return entry


_KINDS = {"str": str, "int": int, "bool": bool}
# Annotations are texts in this module, and the values of its Literal types are strings.
_FIELDS: dict[str, tuple[type, bool]] = {}
for _field in fields(Entry):
    _kind = _KINDS.get(str(_field.type), str)
    _FIELDS[_field.name] = (_kind, _field.default is MISSING)
"""Fields of ``Entry`` with their type in JSON, and True if they are required."""


def _are_offers(saved: Mapping[str, Any]) -> bool:
    # `type` and not `isinstance`: in Python `True` is an int.
    if type(saved.get("committed")) is not int:
        return False
    if type(saved.get("best", 0.0)) not in (int, float):
        return False
    return isinstance(saved.get("last", ""), str)


def _load(path: Path) -> Json:
    """Read a file of the queue. Raises ``FileNotFoundError`` and ``ValueError``."""
    record = strict_json.read_object(path, MAX_BYTES)
    strict_json.check_seal(record)
    del record[strict_json.SEAL]
    return record


def _read(path: Path, *, now: bool = False) -> Json:
    """Read a record, empty if the file is missing or damaged. With ``now`` raises ``UnreadableError``."""
    try:
        return _load(path)
    except (FileNotFoundError, ValueError) as error:
        if now and isinstance(error, strict_json.UnreadableError):
            raise
        return {}


def _parse(line: bytes) -> Json:
    try:
        value = strict_json.parse(line)
    except ValueError:
        return {}
    if isinstance(value, dict):
        return value
    return {}


def _acquire(lock: Any) -> str | None:
    """Take the lock. Returns its holder if another process has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        return lock.read().strip() or "another process"
    except OSError:
        # A file system without locks. Two workers would find each other's commits and only waste work.
        return None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return None


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

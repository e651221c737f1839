"""Checkpoints on their way to the Hub, as files of the run, so that a restart goes on where the last one ended.

| below ``RUN/hub`` | |
|---|---|
| ``queue/<checkpoint>.json`` | waits or is being pushed; retention keeps the checkpoint while it is there |
| ``failed/<checkpoint>.json`` | the Hub refused it, with the reason; ``accel-train checkpoints push`` tries again |
| ``pushed/<checkpoint>.json`` | where it is: repository, revision, commit |
| ``log.jsonl`` | every push, retry, drop and failure, one a line |
| ``offers.json`` | what training has offered so far, so that every n-th and best survive a restart |

Only the standard library is imported: the processes that read the queue start often. No token is ever written here.
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

Reason = Literal["every", "best", "last", "hand"]
Revisions = Literal["branch", "tag"]
MAX_BYTES = 1 << 20
MAX_LOG_BYTES = 1 << 30


@dataclass(frozen=True)
class Entry:
    """One checkpoint to push, and how. What its file in the queue holds."""

    checkpoint: str
    """Name of its directory, ``checkpoint_00001200``."""
    step: int
    run_id: str
    repo_id: str
    include_state: bool = False
    private: bool = True
    revisions: Revisions = "branch"
    reason: Reason = "every"
    """Why it is pushed; ``every`` gives way to a newer one when the pusher is behind."""


class HubQueue:
    """The files below ``RUN/hub``. One process pushes, any may look, the main training process and a hand add."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.directory = run / "hub"

    def names(self) -> set[str]:
        """Checkpoints that wait or are being pushed: retention must keep them."""
        return {path.stem for path in self._files("queue")}

    def add(self, entry: Entry) -> None:
        """Put it into the queue for good: on the disk when this returns."""
        self._write("queue", entry.checkpoint, asdict(entry))
        (self.directory / "failed" / f"{entry.checkpoint}.json").unlink(missing_ok=True)

    def entries(self) -> list[Entry]:
        """What waits, oldest first. A file that cannot be believed is set aside, with a note in ``failed``."""
        found: list[Entry] = []
        for path in self._files("queue"):
            try:
                found.append(_entry(_load(path), path.stem))
            except (FileNotFoundError, ValueError) as error:
                if not os.path.lexists(path):
                    continue  # pushed in this moment
                aside = atomic_files.set_aside(path).name
                reason = f"its file in the queue cannot be read ({error}) and is set aside as {aside}"
                self._write("failed", path.stem, {"reason": reason})
                self.log("unreadable", checkpoint=path.stem, reason=reason)
        return sorted(found, key=lambda entry: entry.step)

    def next(self) -> Entry | None:
        """The oldest one to push. When behind, those of ``every`` but the newest are dropped: main would pass them."""
        waiting, kept = self.entries(), list[Entry]()
        for entry in waiting:
            newest = waiting[-1]
            if entry.reason == "every" and entry != newest and entry.repo_id == newest.repo_id:
                self.drop(entry, f"behind: {newest.checkpoint} is newer", event="coalesced")
            else:
                kept.append(entry)
        return kept[0] if kept else None

    def drop(self, entry: Entry, reason: str, event: str = "dropped") -> None:
        """Take it out unpushed, and say why in the log."""
        self.log(event, checkpoint=entry.checkpoint, reason=reason)
        self._leave(entry)

    def fail(self, entry: Entry, reason: str) -> None:
        """Keep it with the reason why the Hub will not have it."""
        self._write("failed", entry.checkpoint, asdict(entry) | {"reason": reason, "failed_at": _now()})
        self.log("failed", checkpoint=entry.checkpoint, reason=reason)
        self._leave(entry)

    def done(self, entry: Entry, where: Mapping[str, str]) -> None:
        """Record where it is; only then does it leave the queue, for whoever waits for that reads the record next."""
        record = asdict(entry) | dict(where) | {"pushed_at": _now()}
        self._write("pushed", entry.checkpoint, record)
        (self.directory / "failed" / f"{entry.checkpoint}.json").unlink(missing_ok=True)
        self.log("pushed", checkpoint=entry.checkpoint, **where)
        self._leave(entry)

    def failed(self) -> dict[str, str]:
        """Reasons of what the Hub refused, by checkpoint."""
        return {name: str(record.get("reason")) for name, record in self._records("failed").items()}

    def pushed(self) -> dict[str, dict[str, Any]]:
        """Where each pushed checkpoint is (``repo_id``, ``revision``, ``commit``, ``url``), by checkpoint."""
        return self._records("pushed")

    def retry_failed(self) -> None:
        """Put what the Hub refused back into the queue, as by hand."""
        for name, record in self._records("failed").items():
            with suppress(ValueError):  # its queue file was not readable: there is nothing to push it by
                self.add(_entry(record | {"reason": "hand"}, name))

    def offers(self, run_id: str) -> dict[str, Any]:
        """What training has offered in this run; empty for another run that used the directory before."""
        saved = _read(self.directory / "offers.json")
        return saved if saved.get("run_id") == run_id and _are_offers(saved) else {"run_id": run_id, "committed": 0}

    def save_offers(self, offers: Mapping[str, Any]) -> None:
        """Remember them over a restart."""
        atomic_files.replace_json(self._folder("") / "offers.json", strict_json.sealed(offers))

    def log(self, event: str, **details: Any) -> None:
        """Add one line to ``log.jsonl``; one write, so that lines of two processes do not mix."""
        line = json.dumps({"time": _now(), "event": event} | details, ensure_ascii=False) + "\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self._folder("") / "log.jsonl", flags, 0o666)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def log_size(self) -> int:
        """Bytes of ``log.jsonl``: where to read on later."""
        try:
            return (self.directory / "log.jsonl").stat().st_size
        except OSError:
            return 0

    def events(self, start: int) -> tuple[list[dict[str, Any]], int]:
        """Lines of ``log.jsonl`` from byte ``start`` on, and where they end. A line that is no JSON is passed over."""
        try:
            content = strict_json.read_bytes(self.directory / "log.jsonl", MAX_LOG_BYTES)[start:]
        except (FileNotFoundError, ValueError):
            return [], start
        whole = content[: content.rfind(b"\n") + 1]
        return [event for event in map(_parse, whole.splitlines()) if "event" in event], start + len(whole)

    @contextmanager
    def pushing(self, patience_seconds: float = 0.0) -> Generator[str | None, None, None]:
        """Be the one process that pushes this run; gives the holder instead if another one is. Frees it at the end."""
        with (self._folder("") / ".lock").open("a+") as lock:
            deadline = time.monotonic() + patience_seconds
            while holder := _held_by_another(lock):
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.1)
            yield holder

    def _files(self, folder: str) -> list[Path]:
        try:
            paths = list((self.directory / folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(path for path in paths if path.suffix == ".json" and commit.NAME.fullmatch(path.stem))

    def _records(self, folder: str) -> dict[str, dict[str, Any]]:
        return {path.stem: _read(path) for path in self._files(folder)}

    def _folder(self, name: str) -> Path:
        folder = self.directory / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _write(self, folder: str, name: str, value: Mapping[str, Any]) -> None:
        atomic_files.replace_json(self._folder(folder) / f"{name}.json", strict_json.sealed(value))

    def _leave(self, entry: Entry) -> None:
        (self.directory / "queue" / f"{entry.checkpoint}.json").unlink(missing_ok=True)


def _entry(record: Mapping[str, Any], name: str) -> Entry:
    """The entry in the record of checkpoint ``name``. Raises ``ValueError`` with what is wrong with it."""
    for key, (kind, required) in _FIELDS.items():
        if (required or key in record) and type(record.get(key)) is not kind:
            raise ValueError(f"{key} is {record.get(key)!r:.60}; {kind.__name__} is required")
    entry = Entry(**{key: record[key] for key in _FIELDS if key in record})
    if entry.checkpoint != name or not 0 <= entry.step <= manifest.MAX_STEP:
        raise ValueError(f"it is named {name} and holds {entry.checkpoint:.60}, step {entry.step}")
    if entry.revisions not in get_args(Revisions) or entry.reason not in get_args(Reason):
        raise ValueError(f"revisions {entry.revisions!r:.60} or reason {entry.reason!r:.60} is none that there is")
    return entry


_FIELDS = {
    field.name: ({"str": str, "int": int, "bool": bool}.get(str(field.type), str), field.default is MISSING)
    for field in fields(Entry)
}
"""Of each field of ``Entry``: its type in JSON, and whether it must be there."""


def _are_offers(saved: Mapping[str, Any]) -> bool:
    best = saved.get("best", 0.0)
    return type(saved.get("committed")) is int and type(best) in (int, float) and isinstance(saved.get("last", ""), str)


def _load(path: Path) -> dict[str, Any]:
    """One of these files. Raises ``FileNotFoundError`` and ``ValueError``. Those of the first versions have no hash."""
    record = strict_json.read_object(path, MAX_BYTES)
    if strict_json.SEAL in record:
        strict_json.check_seal(record)
        del record[strict_json.SEAL]
    return record


def _read(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is none: these files are a record of what happened, nothing depends on one."""
    try:
        return _load(path)
    except (FileNotFoundError, ValueError):
        return {}


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = strict_json.parse(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _held_by_another(lock: Any) -> str | None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        return lock.read().strip() or "another process"
    except OSError:
        return None  # a file system without locks: two pushers would find each other's commits, and only waste work
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return None


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

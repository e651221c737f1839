"""What a trainer does to its files, recorded call by call, and a file system that loses what was not flushed.

``record`` runs inside a trainer (``Trainers.start(patch=...)``) whose writer it takes into the same process. ``Disk``
replays the log and shows what a power loss may leave: of every file the flushed bytes for certain, of every directory
the flushed names, and of all else any part.
"""

from __future__ import annotations

import builtins
import io
import mmap
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
Operation = tuple[Any, ...]
"""Name, then paths relative to the root, a handle, or bytes."""
Tree = dict[str, "Tree | bytes"]


class InProcess:
    """Stands for ``background.Writer``: the real writer's functions, in the trainer's own process."""

    def __init__(self, size: int) -> None:
        self.buffer = mmap.mmap(-1, max(size, 1))
        self.size, self.busy, self.broken = size, False, False
        self._left: Any = None
        self._job: Mapping[str, Any] = {}

    def submit(self, job: Mapping[str, Any]) -> None:
        self._job, self.busy = job, True

    def answer(self, *, wait: bool) -> Mapping[str, Any]:
        from accel_train.checkpoints import writer

        self.busy = False
        if self._job["do"] == "write":
            return writer.write(self._job, memoryview(self.buffer))
        self._left = self._left or writer.Retention()
        answer = writer.finish(self._job, self._left)
        self._left.finish(hurry=False)
        return answer

    def settle(self, requests: Any, *, hurry: bool) -> None:
        """Nothing is ever left."""

    def close(self, *, kill: bool = False) -> None:
        pass


def record(root: str, log: str) -> None:
    """Append every change below ``root`` to ``log``, from now to the end of this process."""
    from accel_train.checkpoints import saver

    saver.Writer = InProcess  # type: ignore[assignment,misc]
    _Recorder(root, os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)).install()


class _Recorder:
    """Takes the place of the calls of ``os`` and ``io`` that change files; counts what Python itself reports of it."""

    def __init__(self, root: str, log: int) -> None:
        self.root, self.log = root, log
        names = "open write fsync rename replace unlink remove rmdir mkdir truncate ftruncate link symlink"
        self.real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in names.split()}
        self.real_open = io.open
        self.handles: dict[int, int] = {}
        self.number = os.getpid() * 1_000_000
        self.reported: Counter[str] = Counter()
        self.recorded: Counter[str] = Counter()

    def install(self) -> None:
        import shutil

        for name in self.real:
            setattr(os, name, getattr(self, name))
        io.open = builtins.open = self.io_open  # type: ignore[assignment]
        shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]  # so that copies are writes
        from accel_train.store import commit

        real_exchange = commit._exchange

        def exchange(a: Path, b: Path) -> None:
            real_exchange(a, b)
            self.note("exchange", self.below(a), self.below(b))

        commit._exchange = exchange
        sys.addaudithook(self.audit)

    # What Python reports, to see that nothing went past the recorder.
    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int):
            if arguments[2] & WRITING and self.below(arguments[0]) is not None:
                self.reported["written"] += 1
        elif event in ("os.rename", "os.rmdir", "os.mkdir", "os.remove", "os.link", "os.symlink", "os.truncate"):
            place = arguments[-1] if isinstance(arguments[-1], int) and arguments[-1] >= 0 else None
            if self.below(arguments[0], place if event in ("os.rmdir", "os.remove") else None) is not None:
                self.reported[event.removeprefix("os.")] += 1

    def note(self, *operation: Any) -> None:
        if operation[1] is not None:
            self.real["write"](self.log, pickle.dumps(operation))

    def below(self, path: Any, directory: int | None = None) -> str | None:
        """``path`` relative to the root; None outside, and for logs, which promise nothing."""
        if isinstance(path, int):
            return None
        text = os.fsdecode(path)
        if directory is not None and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), text)
        text = os.path.abspath(text)
        inside = f"{text}/".startswith(f"{self.root}/") and "/logs" not in text
        return os.path.relpath(text, self.root) if inside else None

    def opened(self, descriptor: int, path: Any, flags: int, directory: int | None = None) -> None:
        self.handles.pop(descriptor, None)
        name = self.below(path, directory)
        if name is None:
            return
        self.number += 1
        self.handles[descriptor] = self.number
        self.note("open", name, self.number, bool(flags & os.O_CREAT), bool(flags & os.O_TRUNC))

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & WRITING and self.below(path, dir_fd) is not None:
            self.recorded["written"] += 1
        descriptor = self.real["open"](path, flags, mode, dir_fd=dir_fd)
        self.opened(descriptor, path, flags, dir_fd)
        return descriptor

    def io_open(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        """Files opened for writing get an unbuffered layer of ours below the usual ones."""
        if isinstance(file, int) or self.below(file) is None or not set(mode) & set("wax+"):
            opened = self.real_open(file, mode, *arguments, **options)
            if not isinstance(file, int) and self.below(file) is not None:
                self.opened(opened.fileno(), file, 0)
            return opened
        self.recorded["written"] += 1
        raw = _File(self, file, mode.replace("b", "").replace("t", ""))
        layer: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return layer
        names = ("buffering", "encoding", "errors", "newline")
        given = dict(zip(names, arguments, strict=False)) | options
        given.pop("buffering", None)
        return io.TextIOWrapper(layer, **given)

    def write(self, descriptor: int, data: Any) -> int:
        written = self.real["write"](descriptor, data)
        if descriptor in self.handles:
            self.note("write", self.handles[descriptor], bytes(memoryview(data)[:written]))
        return written

    def fsync(self, descriptor: int) -> None:
        self.real["fsync"](descriptor)
        if descriptor in self.handles:
            self.note("fsync", self.handles[descriptor])

    def _two(self, name: str, a: Any, b: Any, options: Mapping[str, Any]) -> None:
        assert not options, options
        before = self.below(a)
        self.recorded["rename"] += before is not None
        self.real[name](a, b)
        self.note("rename", before, self.below(b))

    def rename(self, a: Any, b: Any, **options: Any) -> None:
        self._two("rename", a, b, options)

    def replace(self, a: Any, b: Any, **options: Any) -> None:
        self._two("replace", a, b, options)

    def _one(self, name: str, kind: str, path: Any, *arguments: Any, dir_fd: int | None = None) -> None:
        below = self.below(path, dir_fd)
        self.recorded[kind] += below is not None
        self.real[name](path, *arguments, dir_fd=dir_fd)
        self.note(kind, below)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._one("unlink", "remove", path, dir_fd=dir_fd)

    def remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._one("remove", "remove", path, dir_fd=dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._one("rmdir", "rmdir", path, dir_fd=dir_fd)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._one("mkdir", "mkdir", path, mode, dir_fd=dir_fd)

    def _refused(self, *arguments: Any, **_: Any) -> None:
        raise AssertionError(f"a call that the recorder does not know: {arguments}")

    truncate = ftruncate = link = symlink = _refused


class _File(io.FileIO):
    """The layer that really writes."""

    def __init__(self, recorder: _Recorder, path: Any, mode: str) -> None:
        self._recorder = recorder
        super().__init__(path, mode)
        flags = {"w": os.O_TRUNC, "a": 0, "x": 0}.get(mode[0])
        recorder.opened(self.fileno(), path, os.O_WRONLY | (os.O_CREAT | flags if flags is not None else 0))

    def write(self, data: Any) -> int:
        written = super().write(data) or 0
        self._recorder.note("write", self._recorder.handles[self.fileno()], bytes(memoryview(data)[:written]))
        return written

    def truncate(self, size: int | None = None) -> int:
        assert size == 0, "the recorder knows no other"
        self._recorder.note("truncate", self._recorder.handles[self.fileno()])
        return super().truncate(size)


def finished(log: str) -> None:
    """Last call of a recorded process that ends by itself: what Python reported must be what was recorded."""
    recorder: _Recorder = os.open.__self__  # type: ignore[attr-defined]
    assert recorder.reported == recorder.recorded, (recorder.reported, recorder.recorded)
    recorder.real["write"](recorder.log, pickle.dumps(("finished", sum(recorder.recorded.values()))))


def read(log: Path) -> list[Operation]:
    """The operations of a log, in order."""
    operations: list[Operation] = []
    with log.open("rb") as file:
        while file.peek(1):
            operations.append(pickle.load(file))
    return operations


# --------------------------------------------------------------------------------------------------------- the replay
@dataclass
class File:
    data: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""
    """What is certain to be there."""


@dataclass
class Directory:
    names: dict[str, Any] = field(default_factory=dict)
    flushed: dict[str, Any] = field(default_factory=dict)
    pending: list[tuple[str, str, Any]] = field(default_factory=list)
    """Changes since the last flush: link or unlink, the name, what it names. Each happens wholly or not at all."""


class Disk:
    """A file system as POSIX promises it: only ``fsync`` of a file keeps its bytes, of a directory its names."""

    def __init__(self) -> None:
        self.root = Directory()
        self.handles: dict[int, Any] = {}

    def _place(self, path: str) -> tuple[Directory, str]:
        *folders, name = path.split("/")
        directory = self.root
        for folder in folders:
            directory = directory.names[folder]
        return directory, name

    @staticmethod
    def _set(directory: Directory, *changes: tuple[str, Any]) -> None:
        """Names to set (or take away: None), as one change."""
        for name, what in changes:
            if what is None:
                del directory.names[name]
            else:
                directory.names[name] = what
        directory.pending.append(("change", "", changes))

    def apply(self, operation: Operation) -> None:
        """One recorded call."""
        kind, *rest = operation
        getattr(self, f"_{kind}")(*rest)

    def _open(self, path: str, handle: int, create: bool, truncate: bool) -> None:
        if path == ".":
            self.handles[handle] = self.root
            return
        directory, name = self._place(path)
        if name not in directory.names:
            assert create, path
            self._set(directory, (name, File()))
        self.handles[handle] = directory.names[name]
        if truncate:
            self.handles[handle].data.clear()

    def _write(self, handle: int, data: bytes) -> None:
        self.handles[handle].data += data

    def _truncate(self, handle: int) -> None:
        self.handles[handle].data.clear()

    def _fsync(self, handle: int) -> None:
        what = self.handles[handle]
        if isinstance(what, File):
            what.flushed = bytes(what.data)
        else:
            what.flushed, what.pending = dict(what.names), []

    def _mkdir(self, path: str) -> None:
        directory, name = self._place(path)
        self._set(directory, (name, Directory()))

    def _rename(self, a: str, b: str) -> None:
        (source, old), (target, new) = self._place(a), self._place(b)
        assert source is target, "no rename leaves its directory"
        self._set(source, (new, source.names[old]), (old, None))

    def _exchange(self, a: str, b: str) -> None:
        (source, old), (target, new) = self._place(a), self._place(b)
        assert source is target
        self._set(source, (new, source.names[old]), (old, source.names[new]))

    def _remove(self, path: str) -> None:
        directory, name = self._place(path)
        self._set(directory, (name, None))

    _rmdir = _remove

    def _finished(self, _: int) -> None:
        pass

    def after_a_loss(self, chance: Callable[[], float], names: float | None, data: float | None) -> Tree:
        """What is left: each unflushed change of names with probability ``names``, of bytes ``data`` (0 none, 1 all).

        Of a file whose unflushed bytes are kept in part, a prefix is kept: as if the power went amid the write.
        """

        def look(directory: Directory) -> Tree:
            left = dict(directory.flushed)
            for _, _, changes in directory.pending:
                if chance() < (names or 0):
                    for name, what in changes:
                        if what is None:
                            left.pop(name, None)
                        else:
                            left[name] = what
            return {n: look(w) if isinstance(w, Directory) else content(w) for n, w in sorted(left.items())}

        def content(file: File) -> bytes:
            if bytes(file.data) == file.flushed or chance() >= (data or 0):
                return file.flushed
            kept = 1.0 if data == 1 else chance()
            return bytes(file.data[: round(len(file.data) * kept)])

        return look(self.root)


def prefixes(operations: list[Operation]) -> Iterator[tuple[int, Disk]]:
    """The disk after each operation."""
    disk = Disk()
    for number, operation in enumerate(operations, 1):
        disk.apply(operation)
        yield number, disk


def make(tree: Tree, folder: Path) -> None:
    """Put a tree on the real file system."""
    folder.mkdir()
    for name, what in tree.items():
        if isinstance(what, bytes):
            (folder / name).write_bytes(what)
        else:
            make(what, folder / name)

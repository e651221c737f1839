"""Names, hashes, atomic commit, verification and retention, on plain files."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from accel_train.store import atomic_files, commit, manifest, strict_json


def make(directory: Path, step: int, content: bytes = b"weights", more: str | None = None) -> Path:
    temporary = directory / commit.temporary_name(step, atomic_files.new_nonce())
    temporary.mkdir(parents=True)
    files = {}
    for name in ("model.safetensors", "optimizer/exp_avg.safetensors", *([more] if more else [])):
        (temporary / name).parent.mkdir(exist_ok=True)
        (temporary / name).write_bytes(content)
        files[name] = commit.seal_file(temporary / name)
    final = directory / commit.checkpoint_name(step)
    commit.commit(temporary, final, {"step": step, "files": files})
    return final


def test_a_committed_checkpoint_verifies(tmp_path: Path) -> None:
    final = make(tmp_path, 1200)
    found = commit.verify(final)
    assert (final.name, found.step) == ("checkpoint_00001200", 1200)
    assert [p.name for p in tmp_path.iterdir()] == [final.name]
    assert (final / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: (p / "model.safetensors").write_bytes(b"weightz"), "sha256 differs"),
        (lambda p: (p / "model.safetensors").write_bytes(b"weight"), "6 bytes, the manifest says 7"),
        (lambda p: (p / "optimizer" / "exp_avg.safetensors").unlink(), "exp_avg.safetensors is missing"),
        (lambda p: (p / "manifest.json").unlink(), "no manifest.json"),
        (lambda p: (p / "manifest.json").write_text("{"), "cannot be read"),
        (lambda p: (p / "manifest.json").write_text('{"schema": 9, "accel_train": "9.0"}'), "accel_train 9.0"),
        (lambda p: (p / "manifest.json").write_text("[]"), "it contains no object"),
        (lambda p: (p / "manifest.json").write_text('{"schema": 2}'), "it has changed since it was written"),
        (lambda p: _instead(p / "optimizer" / "exp_avg.safetensors", Path.mkdir), "is not a regular file"),
        (lambda p: _instead(p / "optimizer" / "exp_avg.safetensors", os.mkfifo), "is not a regular file"),
        (lambda p: _instead(p / "optimizer" / "exp_avg.safetensors", _to_itself), "is missing"),
    ],
)
def test_damage_is_found_and_an_older_checkpoint_is_used(tmp_path: Path, damage: object, reason: str) -> None:
    older, newer = make(tmp_path, 10), make(tmp_path, 20)
    damage(newer)  # type: ignore[operator]
    with pytest.raises(ValueError, match=reason) as found_by:
        commit.verify(newer)
    assert not isinstance(found_by.value, strict_json.UnreadableError)
    found, reasons = commit.newest_verified(tmp_path)
    assert found is not None
    assert found.path == older
    assert len(reasons) == 1
    assert reason in reasons[0]


def _instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def _to_itself(path: Path) -> None:
    path.symlink_to(path.name)


FAULT = pytest.mark.fault(
    "R1",
    injected="a manifest whose step is 0, -5, 10^20 or Infinity, with doubled keys, deep nesting, half a surrogate "
    "pair, wrong types, no file list, or files outside",
    outcome="reported with the reason; falls back to the previous checkpoint",
)


@FAULT
@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ('"step": 20', '"step": 0', "its step is 0, but the directory's name says 20"),
        ('"step": 20', '"step": 22', "its step is 22, but the directory's name says 20"),
        ('"step": 20', '"step": -5', "step is -5; a whole number from 0"),
        ('"step": 20', '"step": 100000000000000000000', "a whole number from 0 to 1000000000000000"),
        ('"step": 20', f'"step": {"9" * 5000}', "Exceeds the limit"),
        ('"step": 20', '"step": true', "step is True"),
        ('"step": 20', '"step": 20.0', "step is 20.0"),
        ('"step": 20', '"step": Infinity', "Infinity is not a JSON number"),
        ('"step": 20', '"step": 20, "step": 20', "the key 'step' is given twice"),
        ('"step": 20', '"step": 20, "epoch": 1e999', "1e999 is too large for a float"),
        ('"step": 20', '"step": 20, "epoch": -1', "epoch is -1"),
        ('"step": 20', '"step": 20, "epoch": 1' + "0" * 400, "finite number"),
        ('"step": 20', '"step": 20, "run_id": 7', "run_id is 7; a text is required"),
        ('"step": 20', '"step": 20, "run_id": "\\ud800"', "a lone surrogate"),
        ('"step": 20', '"step": 20, "metrics": {"loss": "low"}', "finite numbers by name"),
        ('"step": 20', '"step": 20, "state": 1', "true or false"),
        ('"step": 20', '"step": 20, "more": ' + "[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('"step": 20', '"step": 20, "resolved": 3', "resolved is 3; an object is required"),
        ('"files": {', '"filez": {', "it has no 'files'"),
        ('"files": {', '"files": [], "more": {', "files is .*; an object is required"),
        ('"files": {', '"files": {}, "more": {', "it lists no files"),
        ('"model.safetensors"', '"../model.safetensors"', "is not a valid file name in a checkpoint"),
        ('"model.safetensors"', '"./model.safetensors"', "is not a valid file name in a checkpoint"),
        ('"model.safetensors"', '"/etc/passwd"', "is not a valid file name in a checkpoint"),
        ('"model.safetensors"', '"a//b"', "is not a valid file name in a checkpoint"),
        ('"model.safetensors"', f'"{"a/" * 20}b"', "is not a valid file name in a checkpoint"),
        ('"model.safetensors"', '"manifest.json"', "is not a valid file name in a checkpoint"),
        ('"size": 7', '"size": -7', "model.safetensors has no size and sha256"),
        ('"sha256": "', '"sha256": "x', "model.safetensors has no size and sha256"),
    ],
)
def test_a_manifest_that_cannot_be_believed(tmp_path: Path, before: str, after: str, reason: str) -> None:
    """Where the hash is right, as of one who made it so."""
    older, newer = make(tmp_path, 10), make(tmp_path, 20)
    file = newer / "manifest.json"
    lines = [line for line in file.read_text().splitlines(keepends=True) if strict_json.SEAL not in line]
    text = "".join(lines).replace("},\n}", "}\n}")
    assert before in text
    text = text.replace(before, after, 1)
    with suppress(ValueError):  # what cannot be parsed has no hash
        text = atomic_files.to_json(strict_json.sealed(strict_json.parse(text)))
    file.write_text(text)
    with pytest.raises(ValueError, match=f"checkpoint_00000020: manifest.json cannot be read .*{reason}"):
        commit.verify(newer)
    assert commit.newest_verified(tmp_path)[0] == commit.open_verified(older)


@pytest.mark.fault(
    "R1", injected="each single bit of a manifest flipped", outcome="detected; falls back to the previous checkpoint"
)
def test_no_bit_of_a_manifest_can_flip_unnoticed(tmp_path: Path) -> None:
    path = make(tmp_path, 20)
    sound, content = commit.open_verified(path).manifest, (path / "manifest.json").read_bytes()
    believed = 0
    for place, bit in itertools.product(range(len(content)), range(8)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        with suppress(ValueError):
            assert manifest.parse(bytes(flipped)) == sound
            believed += 1
    assert believed == 0


@pytest.mark.fault(
    "R1",
    injected="a directory, a FIFO, a device, a socket, a link to nowhere for the manifest",
    outcome="reported; falls back to the previous checkpoint",
)
@pytest.mark.parametrize(
    ("make_it", "reason"),
    [
        (Path.mkdir, "it is a directory, not a regular file"),
        (os.mkfifo, "it is a FIFO, not a regular file"),
        (lambda p: p.symlink_to("/dev/zero"), "it is a device, not a regular file"),
        (lambda p: p.symlink_to("/nowhere"), "it is a link to /nowhere, which does not exist"),
        (lambda p: p.symlink_to(p.name), "Too many levels of symbolic links"),
        (lambda p: p.symlink_to("../checkpoint_00000010/manifest.json"), "the directory's name says 20"),
        (lambda p: os.truncate(p.parent / "manifest.json", 1 << 40), "at most 67108864 are read"),
        (lambda p: p.write_bytes(b"\xff{}"), "it is not UTF-8"),
        (lambda p: p.write_bytes(b""), "it is not JSON"),
    ],
)
def test_something_else_in_the_manifest_s_place(tmp_path: Path, make_it: Callable[[Path], object], reason: str) -> None:
    older, newer = make(tmp_path, 10), make(tmp_path, 20)
    if reason.startswith("at most"):
        make_it(newer / "manifest.json")
    else:
        _instead(newer / "manifest.json", make_it)
    with pytest.raises(ValueError, match=reason) as found:
        commit.verify(newer)
    assert not isinstance(found.value, strict_json.UnreadableError)
    assert commit.newest_verified(tmp_path)[0] == commit.open_verified(older)


def unreadable(path: Path) -> None:
    """Replace a file by one whose reads fail with EIO, as on a failing disk."""
    _instead(path, lambda place: place.symlink_to("/proc/self/mem"))


def lost(path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let every look at a file fail, as on a network disk that is away."""
    original = Path.stat

    def stat(self: Path, **options: bool) -> os.stat_result:
        if self == path:
            raise OSError(number, os.strerror(number), str(path))
        return original(self, **options)

    monkeypatch.setattr(Path, "stat", stat)


def test_what_cannot_be_read_now_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = make(tmp_path, 10), make(tmp_path, 20)
    with monkeypatch.context() as patch:
        lost(newer / "model.safetensors", patch, errno.ESTALE)
        with pytest.raises(
            strict_json.UnreadableError, match=r"00000020: model\.safetensors cannot be read now: Stale"
        ):
            commit.verify(newer)
    assert commit.verify(newer).step == 20
    unreadable(newer / "manifest.json")
    with pytest.raises(strict_json.UnreadableError, match=r"00000020: manifest\.json cannot be read now: Input/output"):
        commit.verify(newer)
    assert commit.newest_verified(tmp_path)[0] == commit.open_verified(older)
    # A resume would have the newer one deleted, as of a future that it went back from.
    with pytest.raises(strict_json.UnreadableError, match=r"00000020: manifest\.json cannot be read now: Input/output"):
        commit.newest_verified(tmp_path, strict=True)


def test_a_checkpoint_that_cannot_be_looked_at_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = make(tmp_path, 20)
    lost(newer, monkeypatch, errno.ESTALE)
    assert manifest.committed(tmp_path) == [(20, newer)]


def test_a_resume_needs_a_checkpoint_with_state(tmp_path: Path) -> None:
    """A manifest that says nothing of it has it."""
    older, newer = make(tmp_path, 10), make(tmp_path, 20)
    commit.rewrite_manifest(newer, {"state": False})
    found, reasons = commit.newest_verified(tmp_path, with_state=True)
    assert found is not None
    assert found.path == older
    assert [reason.split(";")[0] for reason in reasons] == [f"{newer}: weights without optimizer state"]
    assert commit.newest_verified(tmp_path)[0] == commit.open_verified(newer)


def test_no_manifest_is_committed_that_would_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"it lists 'at 3\\u202fPM\.png', which is not a valid file name"):
        make(tmp_path, 7, more="at 3\u202fPM.png")
    assert not list(tmp_path.glob("checkpoint_*"))


def test_order_is_by_step_and_not_by_time(tmp_path: Path) -> None:
    for step in (900, 1000, 100_000_000, 20):
        make(tmp_path, step)
    os.utime(tmp_path / commit.checkpoint_name(20), (2e9, 2e9))
    assert [s for s, _ in manifest.committed(tmp_path)] == [20, 900, 1000, 100_000_000]


def test_only_dead_processes_of_this_host_are_swept(tmp_path: Path) -> None:
    dead = tmp_path / f".tmp-checkpoint_00000001-{socket.gethostname()}-{_dead_pid()}-abc"
    alive = tmp_path / commit.temporary_name(2, "def")
    foreign = tmp_path / f".trash-checkpoint_00000003-elsewhere-{_dead_pid()}-abc"
    for path in (dead, alive, foreign):
        path.mkdir()
    assert commit.sweep(tmp_path) == [dead]
    assert {p.name for p in tmp_path.iterdir()} == {alive.name, foreign.name}


def test_a_process_id_that_is_used_again_is_not_the_writer(tmp_path: Path) -> None:
    """The start of a process is known to a tick of the kernel's clock only, which may round it up."""
    started = psutil.Process().create_time()
    another = tmp_path / commit.temporary_name(1, "abc")
    same = tmp_path / commit.temporary_name(2, "def")
    for path, age in ((another, 60.0), (same, 0.5)):
        path.mkdir()
        os.utime(path, (started - age, started - age))
    assert commit.sweep(tmp_path) == [another]
    assert same.is_dir()


def _dead_pid() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


@pytest.mark.parametrize("libc", [None, SimpleNamespace(renameat2=lambda *given: -1), SimpleNamespace()])
def test_a_step_written_again_replaces_the_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libc: SimpleNamespace | None
) -> None:
    """Also on a file system that cannot exchange two names, and with a libc that does not know of it."""
    first = make(tmp_path, 5, b"old")
    (first / "stray").write_text("left over")
    if libc is not None:
        monkeypatch.setattr(commit.ctypes, "CDLL", lambda _: libc)
    second = make(tmp_path, 5, b"new")
    assert (second / "model.safetensors").read_bytes() == b"new"
    assert not (second / "stray").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_00000005"]


@pytest.mark.fault(
    "R2",
    injected="a file, a link, a dangling link or a strange directory where a checkpoint goes",
    outcome="set aside under another name; the save continues",
)
@pytest.mark.parametrize(
    "put",
    [
        lambda p: p.write_text("mine"),
        lambda p: p.symlink_to("/nowhere"),
        lambda p: p.symlink_to(p.parent / "else"),
        lambda p: (p.mkdir(), (p / "notes.txt").write_text("mine")),
    ],
    ids=["file", "dangling", "link", "directory"],
)
def test_what_stands_in_the_way_is_set_aside(tmp_path: Path, put: Callable[[Path], object]) -> None:
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "notes.txt").write_text("mine")
    (tmp_path / "else" / "model.safetensors").touch()  # a checkpoint on another disk perhaps
    final = tmp_path / commit.checkpoint_name(5)
    put(final)
    was = os.readlink(final) if final.is_symlink() else None
    make(tmp_path, 5)
    (aside,) = tmp_path.glob("checkpoint_00000005.aside-*")
    assert manifest.committed(tmp_path) == [(5, final)]
    assert commit.verify(final).step == 5
    assert (tmp_path / "else" / "notes.txt").read_text() == "mine"
    if was is not None:
        assert os.readlink(aside) == was
    else:
        assert (aside if aside.is_file() else aside / "notes.txt").read_text() == "mine"


def test_only_the_link_to_a_checkpoint_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    there = make(tmp_path / "disk", 5)
    link = tmp_path / "run" / there.name
    link.symlink_to(there)
    assert commit.verify(link).step == 5
    commit.remove(link)
    assert list((tmp_path / "run").iterdir()) == []
    assert commit.verify(there).step == 5


def test_a_full_disk_is_explained_with_numbers(tmp_path: Path) -> None:
    text = commit.describe_write_error(OSError(errno.ENOSPC, "No space left on device"), tmp_path, 3 * 2**20)
    assert "need about 3 MiB, free" in text
    # Nothing can be pruned.
    assert text.endswith("; free space there, or give another --output_dir")
    foreign = commit.describe_write_error(RuntimeError("I/O error: File too large (os error 27)"), tmp_path, 2**20)
    assert "no space left" in foreign


def test_little_space_is_told_in_kib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=564 * 2**10))
    text = commit.describe_write_error(OSError(errno.ENOSPC, "No space left on device"), tmp_path, 2**20)
    assert "(need about 1 MiB, free 564 KiB; " in text


def test_a_directory_in_the_place_of_a_file_is_set_aside(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    (file / "inside").mkdir(parents=True)
    atomic_files.replace_file(file, b"seed: 0\n")
    assert file.read_bytes() == b"seed: 0\n"
    (aside,) = tmp_path.glob("config.yaml.aside-*")
    assert (aside / "inside").is_dir()
    assert len(list(tmp_path.iterdir())) == 2


def test_the_error_of_a_write_is_not_hidden_by_that_of_deleting_its_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that has become read-only refuses both."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def read_only(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    file = tmp_path / "config.yaml"
    file.write_bytes(b"seed: 1\n")
    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        atomic_files.replace_file(file, b"seed: 0\n")
    assert file.read_bytes() == b"seed: 1\n"


def test_a_full_disk_is_reported_with_the_command_that_frees_space_now(tmp_path: Path) -> None:
    """A smaller keep_last deletes nothing before a newer checkpoint is committed, which does not fit."""
    folder = tmp_path / "a run" / "checkpoints"
    (folder / "checkpoint_0000005").mkdir(parents=True)
    text = commit.describe_write_error(OSError(errno.ENOSPC, "No space left on device"), folder, 1 << 20)
    assert text.endswith(f"accel-train checkpoints prune '{folder}' --keep_last N")

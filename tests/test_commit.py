"""Names, hashes, atomic commit, verification and retention, on plain files."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from accel_train.checkpoints import commit


def make(directory: Path, step: int, content: bytes = b"weights") -> Path:
    temporary = directory / commit.temporary_name(step, commit.new_nonce())
    (temporary / "optimizer").mkdir(parents=True)
    files = {}
    for name in ("model.safetensors", "optimizer/exp_avg.safetensors"):
        (temporary / name).write_bytes(content)
        files[name] = commit.seal_file(temporary / name)
    final = directory / commit.checkpoint_name(step)
    commit.commit(temporary, final, {"schema": commit.SCHEMA, "step": step, "files": files})
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
        (lambda p: (p / "manifest.json").write_text("[]"), "schema None"),
        (lambda p: (p / "manifest.json").write_text('{"schema": 1}'), "KeyError"),
    ],
)
def test_damage_is_found_and_an_older_checkpoint_is_used(tmp_path: Path, damage: object, reason: str) -> None:
    older, newer = make(tmp_path, 10), make(tmp_path, 20)
    damage(newer)  # type: ignore[operator]
    with pytest.raises(ValueError, match=reason):
        commit.verify(newer)
    found, reasons = commit.newest_verified(tmp_path)
    assert found is not None
    assert found.path == older
    assert len(reasons) == 1
    assert reason in reasons[0]


def test_order_is_by_step_and_not_by_time(tmp_path: Path) -> None:
    for step in (900, 1000, 100_000_000, 20):
        make(tmp_path, step)
    os.utime(tmp_path / commit.checkpoint_name(20), (2e9, 2e9))
    assert [s for s, _ in commit.committed(tmp_path)] == [20, 900, 1000, 100_000_000]


def test_only_dead_processes_of_this_host_are_swept(tmp_path: Path) -> None:
    dead = tmp_path / f".tmp-checkpoint_00000001-{socket.gethostname()}-{_dead_pid()}-abc"
    alive = tmp_path / commit.temporary_name(2, "def")
    foreign = tmp_path / f".trash-checkpoint_00000003-elsewhere-{_dead_pid()}-abc"
    for path in (dead, alive, foreign):
        path.mkdir()
    assert commit.sweep(tmp_path) == [dead]
    assert {p.name for p in tmp_path.iterdir()} == {alive.name, foreign.name}


def _dead_pid() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def test_a_step_written_again_replaces_the_damaged_one(tmp_path: Path) -> None:
    first = make(tmp_path, 5, b"old")
    (first / "stray").write_text("left over")
    second = make(tmp_path, 5, b"new")
    assert (second / "model.safetensors").read_bytes() == b"new"
    assert not (second / "stray").exists()


def test_a_full_disk_is_explained_with_numbers(tmp_path: Path) -> None:
    text = commit.describe_write_error(OSError(errno.ENOSPC, "No space left on device"), tmp_path, 3 * 2**20)
    assert "need about 3 MiB" in text
    assert "free" in text
    foreign = commit.describe_write_error(RuntimeError("I/O error: File too large (os error 27)"), tmp_path, 2**20)
    assert "no space left" in foreign

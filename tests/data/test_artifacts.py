import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from accel_train.config import MachineError, UsageError
from accel_train.data import artifacts
from accel_train.data.artifacts import (
    SEAL,
    STAMPS,
    cache_directory,
    cached_folder,
    is_intact,
    of_rank_0,
    one_at_a_time,
)
from accel_train.data.tables.shards import warn_of_changes
from accel_train.data.tensor_cache import TensorCache


class Writer:
    calls = 0

    def __call__(self, directory: Path) -> None:
        self.calls += 1
        (directory / "a.json").write_text("{}")
        (directory / "b.bin").write_bytes(b"content")


def test_built_once_by_rank_0_and_by_who_does_not_see_it(tmp_path: Path) -> None:
    first, second, elsewhere = Writer(), Writer(), Writer()
    meetings: list[int] = []
    cached_folder(tmp_path / "kind" / "x", first, rank=0, barrier=lambda: meetings.append(0))
    folder = cached_folder(tmp_path / "kind" / "x", second, rank=1, barrier=lambda: meetings.append(1))
    cached_folder(tmp_path / "other disk" / "x", elsewhere, rank=1)
    assert (first.calls, second.calls, elsewhere.calls) == (1, 0, 1)
    assert meetings == [0, 0, 1, 1]
    assert sorted(file.name for file in folder.iterdir()) == ["a.json", "b.bin", SEAL, STAMPS]
    assert sorted(os.listdir(tmp_path / "kind")) == [".x.lock", "x"]


OF_RANK_0 = """
import sys
from torch import distributed
from accel_train.data.artifacts import of_rank_0
rank = int(sys.argv[1])
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
print(of_rank_0(f"of {rank}", 2, distributed.barrier))
distributed.destroy_process_group()
"""


def test_every_process_has_the_value_of_rank_0(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OF_RANK_0]
    other = subprocess.Popen([*command, "1", str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
    first = subprocess.run([*command, "0", str(tmp_path / "store")], capture_output=True, text=True, check=True)
    assert (first.stdout, other.communicate()[0]) == ("of 0\n", "of 0\n")
    # Where processes are not connected.
    assert of_rank_0("own", 2, lambda: None) == "own"


def test_one_process_of_a_host_builds_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    writer = Writer()
    held: list[bool] = []

    def write(directory: Path) -> None:
        with (tmp_path / ".x.lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(True)
        writer(directory)

    with ThreadPoolExecutor(4) as pool:
        # Ranks of a host that does not see the cache of rank 0.
        ranks = [pool.submit(cached_folder, folder, write, rank=rank) for rank in range(4, 8)]
        for rank in ranks:
            rank.result()
    assert held == [True]
    assert writer.calls == 1


def test_a_start_hashes_only_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    original = artifacts.hash_file

    def noted(file: Path) -> str:
        hashed.append(file.name)
        return original(file)

    monkeypatch.setattr(artifacts, "hash_file", noted)
    writer = Writer()
    folder = cached_folder(tmp_path / "x", writer)
    for file in folder.iterdir():
        os.utime(file, (0, 0))  # as of an older cache: not what was noted
    hashed.clear()
    cached_folder(folder, writer)
    assert hashed == ["a.json", "b.bin"]
    for rank in range(2):
        cached_folder(folder, writer, rank=rank)
    assert hashed == ["a.json", "b.bin"]
    (folder / "b.bin").write_bytes(b"c0ntent")  # of the same size
    assert not is_intact(folder)
    assert writer.calls == 1


def test_a_file_changed_right_after_it_was_hashed_is_hashed_again(tmp_path: Path) -> None:
    folder = cached_folder(tmp_path / "x", Writer())
    same_time = (folder / "b.bin").stat()
    (folder / "b.bin").write_bytes(b"c0ntent")
    os.utime(folder / "b.bin", ns=(same_time.st_atime_ns, same_time.st_mtime_ns))
    assert not is_intact(folder)


@pytest.mark.parametrize("kind", ["changed", "truncated", "deleted", "added", "seal"])
def test_what_is_damaged_is_built_again(tmp_path: Path, kind: str) -> None:
    writer = Writer()
    folder = cached_folder(tmp_path / "x", writer)
    if kind == "changed":
        (folder / "b.bin").write_bytes(b"c0ntent")
    elif kind == "truncated":
        (folder / "b.bin").write_bytes(b"")
    elif kind == "deleted":
        (folder / "a.json").unlink()
    elif kind == "added":
        (folder / "c.txt").write_text("")
    else:
        (folder / SEAL).write_text("{")
    assert not is_intact(folder)
    cached_folder(folder, writer)
    assert writer.calls == 2
    assert is_intact(folder)
    assert (folder / "b.bin").read_bytes() == b"content"


def test_a_crash_while_building_leaves_nothing_that_counts(tmp_path: Path) -> None:
    def crashes(directory: Path) -> None:
        (directory / "a.json").write_text(json.dumps({}))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder(tmp_path / "x", crashes)
    assert not (tmp_path / "x").exists()
    assert is_intact(cached_folder(tmp_path / "x", Writer()))


# As Python says it, and a library in Rust.
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), Exception("No space left (os error 28)")])
def test_a_full_disk_is_named_and_nothing_stays_on_it(tmp_path: Path, error: Exception) -> None:
    def fills(directory: Path) -> None:
        (directory / "a.json").write_text(json.dumps({}))
        raise error

    with pytest.raises(MachineError, match=r"^--data.cache_dir: .*: cannot be written \(.*No space left.*free space"):
        cached_folder(tmp_path / "x", fills)
    assert [file.name for file in tmp_path.iterdir()] == [".x.lock"]


def test_a_cache_that_another_user_made_is_refused_with_a_remedy() -> None:
    def locked() -> None:
        with one_at_a_time(cache / "x.lock"):
            pass

    # Not in `tmp_path`, whose parent another user may not enter.
    root = tempfile.mkdtemp()
    cache = Path(root) / "cache"
    uses: list[Callable[[], object]] = [
        locked,
        lambda: cached_folder(cache / "x", Writer()),
        lambda: TensorCache(cache, {"kind": "x"}).lease(["0" * 64]),
    ]
    for folder in (cache / "tensors" / "leases", cache / "tensors", cache / "shards", cache):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o555)
    os.chmod(root, 0o755)
    # Tests may run as root, whom no permission stops.
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        for use in uses:
            with pytest.raises(UsageError, match=r"--data.cache_dir: .*Permission denied.*another user created"):
                use()
        # What only names files in the log says nothing then.
        warn_of_changes("--data.path", "x", cache, {"a.parquet": (1, 2)})
    finally:
        os.seteuid(user)
        for folder in cache.rglob("*"):
            folder.chmod(0o755)
        cache.chmod(0o755)
        shutil.rmtree(root)


def test_cache_directory_of_option_variable_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ACCEL_TRAIN_CACHE", raising=False)
    assert cache_directory(None) == tmp_path / ".cache" / "accel_train"
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "named"))
    assert cache_directory(None) == tmp_path / "named"
    assert cache_directory("~/mine") == tmp_path / "mine"
    assert (tmp_path / "mine").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--data.cache_dir '~/file/below': .* cannot be used"):
        cache_directory("~/file/below")

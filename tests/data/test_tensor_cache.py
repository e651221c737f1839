"""Entries on disk: whole or absent, verified, deleted by age but never under a live run."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accel_train.config import MendedError, UsageError
from accel_train.data import tensor_cache
from accel_train.data.tensor_cache import (
    DamagedEntryError,
    DeletedEntryError,
    TensorCache,
    entries,
    is_intact,
    live_leases,
)
from tests import zygote
from tests.waiting import PATIENCE_SECONDS, until

ABOUT = {"kind": "test", "weights": "a" * 8}
KEYS = [f"{number:064x}" for number in range(1, 9)]


def tensors(number: int, size: int = 50) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    values = torch.randn(size, generator=generator)
    return {"values": values, "half": values[:7].bfloat16(), "flag": values[:3] > 0, "one": torch.tensor(number)}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path, ABOUT)
    assert cache.missing([*KEYS, KEYS[0]]) == KEYS
    for number, key in enumerate(KEYS):
        cache.write(key, tensors(number))
    assert cache.missing(KEYS) == []
    for number, key in enumerate(KEYS):
        assert same(cache.read(key), tensors(number))
    assert {entry.file.stem for entry in entries(cache.root)} == set(KEYS)
    assert not list(tmp_path.rglob("*.part"))
    # A tensor that is a part of another is stored alone.
    assert cache.write(KEYS[0], {"row": torch.zeros(1000, 10)[3]}) < 1000


def test_other_ways_of_computing_never_meet(tmp_path: Path) -> None:
    one = TensorCache(tmp_path, ABOUT)
    one.write(KEYS[0], tensors(0))
    for about in ({**ABOUT, "weights": "b"}, {**ABOUT, "kind": "other"}, {**ABOUT, "pixels": 2}):
        assert TensorCache(tmp_path, about).missing(KEYS[:1]) == KEYS[:1]
    assert TensorCache(tmp_path, dict(reversed(ABOUT.items()))).missing(KEYS[:1]) == []


@pytest.mark.parametrize("damage", ["cut", "empty", "flip", "header", "gone"])
def test_a_damaged_entry_is_never_read(tmp_path: Path, damage: str) -> None:
    cache = TensorCache(tmp_path, ABOUT)
    cache.write(KEYS[0], tensors(0))
    file = cache.file(KEYS[0])
    content = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    else:
        content[-5] ^= 1 if damage == "flip" else 0
        content[20] ^= 1 if damage == "header" else 0
        file.write_bytes({"cut": content[:-9], "empty": b""}.get(damage, bytes(content)))
    with pytest.raises(DeletedEntryError, match="Start the run again"):
        cache.read(KEYS[0])
    assert not is_intact(file)
    if damage in ("cut", "empty", "gone"):
        assert cache.missing(KEYS[:1]) == KEYS[:1]


def test_an_entry_that_stays_is_not_left_to_the_next_start(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path, ABOUT)
    cache.file(KEYS[0]).mkdir(parents=True)
    with pytest.raises(DamagedEntryError) as error:
        cache.read(KEYS[0])
    assert not isinstance(error.value, MendedError)


def test_a_damaged_entry_lets_the_next_start_read_all_that_the_run_uses(tmp_path: Path) -> None:
    latents, texts, others = (TensorCache(tmp_path, {"kind": kind}) for kind in ("latents", "texts", "others"))
    for cache in (latents, texts, others):
        for key in KEYS[:2]:
            cache.write(key, tensors(0))
            content = bytearray(cache.file(key).read_bytes())
            content[-5] ^= 1
            cache.file(key).write_bytes(bytes(content))
    leases = [latents.lease(KEYS[:2]), texts.lease(KEYS[:2])]
    assert texts.delete_damaged() == 0
    with pytest.raises(DamagedEntryError):
        texts.read(KEYS[0])
    for lease in leases:
        lease.close()
    assert [cache.delete_damaged() for cache in (latents, texts, others)] == [2, 1, 0]
    assert latents.missing(KEYS[:2]) == texts.missing(KEYS[:2]) == KEYS[:2]
    assert latents.delete_damaged() == 0


def aged(cache: TensorCache, *numbers: int) -> None:
    """Write entries, the first one used longest ago."""
    for place, number in enumerate(numbers):
        cache.write(KEYS[number], tensors(number))
        os.utime(cache.file(KEYS[number]), (1000 + place, 1000 + place))


def there(cache: TensorCache) -> list[int]:
    return [number for number, key in enumerate(KEYS) if cache.file(key).exists()]


def test_what_was_used_longest_ago_is_deleted(tmp_path: Path) -> None:
    size = TensorCache(tmp_path / "other", ABOUT).write(KEYS[0], tensors(0))
    cache = TensorCache(tmp_path, ABOUT, cap_bytes=4 * size)
    other = TensorCache(tmp_path, {"kind": "older"})
    aged(other, 0)
    os.utime(other.file(KEYS[0]), (1, 1))
    aged(cache, 3, 1, 2, 0, 4)
    assert cache.keep_within_cap() == 2 * size
    assert there(other) == []
    assert there(cache) == [0, 1, 2, 4]
    # Using an entry makes it young.
    cache.lease(KEYS[1:2]).close()
    cache.write(KEYS[5], tensors(5))
    cache.keep_within_cap()
    assert there(cache) == [0, 1, 4, 5]
    assert cache.keep_within_cap() == 0
    assert TensorCache(tmp_path, ABOUT).keep_within_cap() == 0


def test_entries_of_a_live_run_stay(tmp_path: Path) -> None:
    size = TensorCache(tmp_path / "other", ABOUT).write(KEYS[0], tensors(0))
    cache = TensorCache(tmp_path, ABOUT, cap_bytes=2 * size)
    aged(cache, 0, 1, 2, 3)
    lease = cache.lease(KEYS[:2])
    aged(cache, 0, 1)
    cache.keep_within_cap()
    assert there(cache) == [0, 1]
    third = cache.lease(KEYS[2:3])
    cache.write(KEYS[2], tensors(2))
    with pytest.raises(UsageError, match=r"--data.cache_gib .* are in use by this run and others"):
        cache.keep_within_cap()
    assert there(cache) == [0, 1, 2]
    lease.close()
    third.close()
    cache.keep_within_cap()
    assert len(there(cache)) == 2


HOLDER = """
import sys, time
from pathlib import Path
from accel_train.data.tensor_cache import TensorCache
lease = TensorCache(Path(sys.argv[1]), {"kind": "test", "weights": "a" * 8}).lease(sys.argv[2:])
print("held", flush=True)
time.sleep(1000)
"""


def test_the_lease_of_another_process_ends_with_it(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path, ABOUT)
    output = tmp_path / "output"
    holder = zygote.start([sys.executable, "-c", HOLDER, str(tmp_path), *KEYS[:2]], output)
    until(lambda: output.exists() and "held" in output.read_text())
    held = {f"{cache.folder.name}/{key}" for key in KEYS[:2]}
    assert live_leases(cache.root) == held
    holder.kill()  # it cannot clean up
    holder.wait(PATIENCE_SECONDS)
    assert live_leases(cache.root) == set()
    assert not list((cache.root / tensor_cache.LEASES).iterdir())


def test_writers_of_one_entry_do_not_disturb_each_other(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path, ABOUT)
    faults: list[BaseException] = []
    # All begin at once: the first also make the folder and its description.
    together = threading.Barrier(4)

    def work() -> None:
        try:
            together.wait()
            for number, key in enumerate(KEYS * 5):
                cache.write(key, tensors(number % len(KEYS)))
                assert same(cache.read(key), tensors(number % len(KEYS)))
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert not list(tmp_path.rglob("*.part"))


# ------------------------------------------------------------------------------------------------------- full disks
def test_a_full_disk_leaves_no_part_of_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TensorCache(tmp_path, ABOUT)
    cache.write(KEYS[0], tensors(0))
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        write(path, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UsageError, match=r"No space left on device; [\d,]+ bytes are required.*data cache ls, clear"):
        cache.write(KEYS[1], tensors(1))
    monkeypatch.undo()
    assert cache.missing(KEYS[:2]) == KEYS[1:2]
    assert not list(tmp_path.rglob("*.part"))
    cache.write(KEYS[1], tensors(1))
    assert same(cache.read(KEYS[1]), tensors(1))


@pytest.mark.fault(
    "D7", injected="the cache's disk full (tmpfs)", outcome="exit 2 with the bytes and the remedy; no torn file"
)
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here ({done.stderr.strip()}); root is needed")
    try:
        cache = TensorCache(tmp_path, ABOUT)
        with pytest.raises(UsageError, match="No space left on device"):
            for number, key in enumerate(KEYS * 2):
                cache.write(key[:-1] + "abcdef0123456789"[number], tensors(number, 10_000))
        found = list(entries(cache.root))
        assert 2 <= len(found) <= 7
        assert all(is_intact(entry.file) for entry in found)
        assert not list(tmp_path.rglob("*.part"))
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_other_errors_keep_their_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path, content: Any) -> int:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(Path, "write_bytes", broken)
    with pytest.raises(OSError, match="Input/output error"):
        TensorCache(tmp_path, ABOUT).write(KEYS[0], tensors(0))

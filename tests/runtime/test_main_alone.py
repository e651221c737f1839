"""An error of one process, before there is a run, ends every process with its text: two real processes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator

from accel_train.checkpoints import fetch, opening, refused
from accel_train.checkpoints.policy import RunOptions
from accel_train.config import UsageError
from accel_train.data.artifacts import cached_folder
from accel_train.runtime.accelerator import build_accelerator
from accel_train.runtime.main_alone import OtherProcessError, connect_hosts, failing_together, on_main
from accel_train.store.manifest import Checkpoint
from tests import zygote
from tests.waiting import free_port, until


class NeedsTwoError(Exception):
    """Cannot be made again from its text alone."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def prepare(rank: int, folder: Path, port: int) -> None:
    """Writes what each block ended with. A process that hears nothing waits until the parent kills it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    accelerator, ended = Accelerator(cpu=True), list[str]()
    (folder / "full").touch()  # a file where the cache directory should be

    def step(number: int) -> None:
        with failing_together(accelerator) as barrier:
            if number == 0:
                cached_folder(folder / "full" / "tokenizer", lambda _: None, rank=rank, barrier=barrier)
            barrier()
            if number == 1 and rank == 1:
                raise NeedsTwoError("after", "the last barrier")
            if number == 2:
                raise UsageError(f"of {rank}")

    for number in range(4):
        try:
            step(number)
            ended.append("well")
        except Exception as error:
            ended.append(f"{type(error).__name__}: {error}")
    (folder / f"rank{rank}").write_text("\n".join(ended))
    accelerator.end_training()


def prepare_beyond_the_limit(rank: int, folder: Path, port: int) -> None:
    """Rank 0 works alone for longer than a collective waits, in `on_main` and between two barriers."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (folder / f"started{rank}").touch()
    until((folder / f"started{1 - rank}").exists)  # they have the time of one collective to connect
    accelerator = build_accelerator(
        precision="fp32", global_batch_size=2, micro_batch_size=1, max_grad_norm=1.0, collective_timeout_seconds=3
    )
    connect_hosts(accelerator, timeout_seconds=3)
    clocks: list[Any] = [dist.new_group(timeout=timedelta(seconds=3.5)) for _ in range(2)]

    def outlast_a_collective() -> str:
        with pytest.raises(RuntimeError, match="Timed out waiting 3500ms"):
            dist.recv(torch.zeros(1), src=1, group=clocks.pop())
        return "late"

    ended = [on_main(accelerator, outlast_a_collective)]
    with failing_together(accelerator) as barrier:
        if rank == 0:
            outlast_a_collective()
        barrier()
        ended.append("met")
    (folder / f"rank{rank}").write_text("\n".join(ended))
    accelerator.end_training()


def die_alone(rank: int, folder: Path, port: int) -> None:
    """Rank 0 ends without a word while the other waits for it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    accelerator = Accelerator(cpu=True)
    connect_hosts(accelerator, timeout_seconds=600)
    (folder / f"rank{rank}").write_text("alive")

    def die() -> None:
        # One process is connected before the other: to die in between is another error, of the connection.
        until((folder / "rank1").exists)
        os._exit(0)

    with pytest.raises(RuntimeError, match=r"Connection (closed|reset) by peer|Broken pipe"):
        on_main(accelerator, die)
    (folder / f"rank{rank}").write_text("noticed")
    accelerator.end_training()


def outcomes(folder: Path, target: Callable[[int, Path, int], None]) -> list[list[str]]:
    """What each of two real processes wrote. One that still waits after minutes fails the test."""
    zygote.call(target, 2, folder, free_port())
    return [(folder / f"rank{rank}").read_text().splitlines() for rank in range(2)]


def open_runs(rank: int, folder: Path, port: int) -> None:
    """The main process cannot open the run, for a different reason each time; then both meet."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    accelerator, ended = Accelerator(cpu=True), list[str]()
    original = opening.new_run
    faults: list[BaseException] = [
        OSError(errno.ENOSPC, "No space left on device"),
        MemoryError("too large"),
        NeedsTwoError("of", "two"),
        SystemExit(3),
        KeyboardInterrupt(),
    ]
    for number, fault in enumerate(faults):

        def fail(*_: object, fault: BaseException = fault) -> dict[str, object]:
            raise fault

        opening.new_run = fail  # after the lock: only the main process comes here
        try:
            opening.open_run(RunOptions(str(folder / f"run{number}"), {"seed": 0}), accelerator, "data")
        except BaseException as error:
            ended.append(f"{type(error).__name__}: {error}")
    opening.new_run = original
    try:
        on_main(accelerator, lambda: lambda: None)  # cannot be sent
    except Exception as error:
        ended.append(type(error).__name__)
    run = opening.open_run(RunOptions(str(folder / "run"), {"seed": 0}), accelerator, "data")
    ended.append(run.decision)
    run.close()
    ended.append(open_unseen(rank, folder / "unseen", accelerator))
    (folder / f"rank{rank}").write_text("\n".join(ended))
    accelerator.end_training()


def open_unseen(rank: int, directory: Path, accelerator: Accelerator) -> str:
    """Open a directory that the second process does not see, as a recipe does; returns whether it is left."""
    before = refused.present(directory)
    accelerator.wait_for_everyone()
    if rank == 1:
        opening._wait_until_visible = lambda _: False
    with pytest.raises(UsageError, match="is not visible to 1 process"):
        opening.open_run(RunOptions(str(directory), {"seed": 0}), accelerator, "data")
    refused.remove_new(directory, before, rank)
    accelerator.wait_for_everyone()
    return f"left: {directory.exists()}"


def open_at_two_places(rank: int, folder: Path, port: int) -> None:
    """Opens one directory by another path in each process, and then one of its own in each."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    accelerator = Accelerator(cpu=True)
    by_rank = folder / ("shared", "mounted")[rank]
    run = opening.open_run(RunOptions(str(by_rank / "run"), {"seed": 0}), accelerator, "data")
    assert run.directory == by_rank / "run"
    run.close()
    accelerator.wait_for_everyone()
    opening.PATIENCE_SECONDS = 0.0
    own = folder / f"own{rank}"
    own.mkdir()
    with pytest.raises(UsageError) as error:
        opening.open_run(RunOptions(str(own), {"seed": 0}), accelerator, "data")
    (folder / f"rank{rank}").write_text(str(error.value))
    accelerator.end_training()


def test_one_directory_may_be_mounted_at_two_places_and_two_directories_are_refused(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "mounted").symlink_to(tmp_path / "shared")
    first, second = outcomes(tmp_path, open_at_two_places)
    assert first == second
    assert first[0].startswith(
        f"output_dir: {tmp_path}/own0 of the main process is not visible to 1 process(es) as {tmp_path}/own1 on "
    )


def test_the_checkpoint_of_a_resume_is_read_from_where_this_host_has_it() -> None:
    of_main = Checkpoint(Path("/mnt/a/run/checkpoints/checkpoint_00000004"), 4, {})
    here = fetch.as_seen_here(of_main, Path("/mnt/b/run"))
    assert here is not None
    assert here.path == Path("/mnt/b/run/checkpoints/checkpoint_00000004")


def test_whatever_the_main_process_raises_while_it_opens_a_run_reaches_all(tmp_path: Path) -> None:
    first, second = outcomes(tmp_path, open_runs)
    assert first[:2] == second[:2] == ["OSError: [Errno 28] No space left on device", "MemoryError: too large"]
    assert first[2:5] == ["NeedsTwoError: of two", "SystemExit: 3", "KeyboardInterrupt: "]
    assert second[2:5] == [f"OtherProcessError: process 0: {text}" for text in first[2:5]]
    assert first[-1] == "left: False"
    assert first[5:] == second[5:]
    assert first[6].startswith("fresh start in ")


def test_an_error_of_one_process_ends_the_preparation_of_all(tmp_path: Path) -> None:
    first, second = outcomes(tmp_path, prepare)
    assert first[0] == second[0]
    assert first[0].startswith("UsageError: --data.cache_dir: ")
    assert (first[1], second[1]) == (
        "OtherProcessError: process 1: NeedsTwoError: after the last barrier",
        "NeedsTwoError: after the last barrier",
    )
    assert (first[2], second[2]) == ("UsageError: of 0", "UsageError: of 1")
    assert first[3] == second[3] == "well"


def test_one_process_raises_what_it_raises() -> None:
    with pytest.raises(OtherProcessError), failing_together(Accelerator(cpu=True)) as barrier:
        barrier()
        raise OtherProcessError


def test_a_preparation_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    assert outcomes(tmp_path, prepare_beyond_the_limit) == [["late", "met"]] * 2


def test_the_wait_for_a_process_that_has_died_ends(tmp_path: Path) -> None:
    assert outcomes(tmp_path, die_alone) == [["alive"], ["noticed"]]

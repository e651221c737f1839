"""Disks that are full, read-only or broken, and writers that die: an error in time, on every rank, and nothing lost."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accel_train.checkpoints.background import Writer
from accel_train.store import commit
from tests.faults.harness import EVERY, Trainer, Trainers, acknowledged, checkpoints, children, debris, losses, same_run
from tests.faults.harness import writer_patch as patched
from tests.waiting import PATIENCE_SECONDS

LARGE = ("--hidden", "2048")
"""3.2 MiB a checkpoint."""
CONTINUE = ("--checkpoints.on_error", "continue")
SYNC = ("--checkpoints.asynchronous", "false")
QUICK_MODES = [pytest.param((), id="async"), pytest.param(SYNC, id="sync", marks=pytest.mark.slow)]
"""The same code writes in either mode: one process is killed in both, in test_crash.py."""
Disk = Callable[..., None]


@pytest.fixture
def disk(out: Path) -> Iterator[Disk]:
    """A file system of its own for the checkpoints: call it with mount options, again to change them."""
    place = out / "checkpoints"

    def mount(options: str) -> None:
        again = "remount," if place.is_mount() else ""
        place.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", again + options, "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"no file system can be mounted here ({done.stderr.strip()}); root is needed")

    yield mount
    if place.is_mount():
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(folder: Path) -> Path:
    """Take every byte that is left."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


def goes_on(trainers: Trainers, out: Path, *flags: str, newest: int = 5) -> None:
    """The next start resumes and ends as the run that nothing happened to."""
    again = trainers.run(out, *EVERY, *flags)
    assert again.wait() == [0], again.output()
    assert f"at step {newest}" in again.output()
    assert debris(out) == []
    straight = out.with_name("straight")
    if flags:
        assert trainers.run(straight, *EVERY, *flags).wait() == [0]
    else:
        trainers.stopped(straight, 20)
    same_run(out, straight)


# ------------------------------------------------------------------------------------------------------- full disks
@pytest.mark.fault(
    "F21",
    injected="disk full at the weights (tmpfs)",
    outcome="an error with required and free bytes; the old checkpoint is kept",
)
@pytest.mark.parametrize("mode", QUICK_MODES)
def test_full_at_the_weights(trainers: Trainers, out: Path, disk: Disk, mode: tuple[str, ...]) -> None:
    disk("size=5m")
    run = trainers.run(out, *EVERY, *LARGE, *mode)
    assert run.wait() == [1]
    assert "error (exit code 1): rank 0: no space left for a checkpoint in" in run.output()
    assert "need about 3 MiB, free" in run.output()
    assert "free space, such as that of older checkpoints: accel-train checkpoints prune" in run.output()
    assert checkpoints(out) == acknowledged(out) == [5]
    assert debris(out) == []
    disk("size=50m")
    goes_on(trainers, out, *LARGE)


@pytest.mark.fault(
    "F21",
    injected="disk full at the weights, on_error: continue",
    outcome="a warning; training continues; a failed last save exits with 1",
)
@pytest.mark.parametrize("mode", QUICK_MODES)
def test_full_and_training_goes_on(trainers: Trainers, out: Path, disk: Disk, mode: tuple[str, ...]) -> None:
    disk("size=5m")
    run = trainers.run(out, *EVERY, *LARGE, *CONTINUE, *mode)
    assert run.wait() == [1], "the last save failed, so the run has not done what it was to do"
    for step in (10, 15):
        assert f"checkpoint of step {step} was not saved; training continues: rank 0: no space left" in run.output()
    assert "error (exit code 1): rank 0: no space left" in run.output()
    assert max(losses(out)) == 20
    assert checkpoints(out) == [5]
    assert debris(out) == []


@pytest.mark.slow  # a full disk is quick at the weights, and a manifest that cannot be flushed below
@pytest.mark.fault(
    "F22", injected="disk full at the manifest", outcome="as at the weights; what was written is deleted"
)
def test_full_at_the_manifest(trainers: Trainers, out: Path, disk: Disk) -> None:
    disk("size=8m")
    assert trainers.run(out, *EVERY, *LARGE, "--max_steps", "5").wait() == [0]
    run = trainers.start(out, *EVERY, *LARGE, failpoint="before_manifest=hold")
    run.until_held()
    assert any((path / "trainer_state.json").exists() for path in (out / "checkpoints").glob(".tmp-*"))
    filler = fill(out / "checkpoints")
    run.go()
    assert run.wait() == [1]
    assert "no space left for a checkpoint in" in run.output()
    filler.unlink()
    assert checkpoints(out) == [5]
    assert debris(out) == []
    disk("size=50m")
    goes_on(trainers, out, *LARGE)


@pytest.mark.fault("F23", injected="RLIMIT_FSIZE in the writer", outcome="as at the weights, with the system's message")
def test_file_size_limit(trainers: Trainers, out: Path, tmp_path: Path) -> None:
    limit = patched(tmp_path / "patch", "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))")
    run = trainers.run(out, *EVERY, **limit)
    assert run.wait() == [1]
    assert "no space left for a checkpoint in" in run.output()
    assert "[Errno 27] File too large" in run.output()
    assert checkpoints(out) == debris(out) == []
    assert trainers.run(out, *EVERY).wait() == [0]


def test_file_size_limit_on_the_snapshot(trainers: Trainers, out: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000))"
    run = trainers.run(out, *EVERY, patch=limit)
    assert run.wait() == [1]
    assert "but the limit of file sizes (ulimit -f) is 30000 bytes" in run.output()
    assert checkpoints(out) == debris(out) == []


def test_a_writer_gets_the_memory_it_asks_for() -> None:
    writer = Writer(1 << 20)
    assert len(writer.buffer) == 1 << 20
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    writer.close()


def test_a_writer_ends_though_a_forked_child_holds_its_socket() -> None:
    """A reader of data that was forked after it, and hangs."""
    writer = Writer(1 << 12)
    child = os.fork()
    if not child:
        time.sleep(4 * PATIENCE_SECONDS)
        os._exit(0)
    closing = threading.Thread(target=writer.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_SECONDS)
    ended = not closing.is_alive()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert ended


@pytest.mark.fault(
    "F24", injected="disk full on rank 1 alone", outcome="both ranks raise the same error; neither hangs"
)
@pytest.mark.parametrize("mode", QUICK_MODES)
def test_full_on_one_rank(trainers: Trainers, out: Path, whole_of_two: Path, mode: tuple[str, ...]) -> None:
    trainers.stopped(out, 5, 2)
    run = trainers.run(out, *EVERY, *mode, ranks=2, failpoint="after_optimizer_file@1=ENOSPC")
    assert run.wait() == [1, 1]
    assert run.output().count("error (exit code 1): rank 1: no space left for a checkpoint in") == 2
    assert checkpoints(out) == [5]
    assert debris(out) == []
    assert trainers.run(out, *EVERY, ranks=2).wait() == [0, 0]
    same_run(out, whole_of_two)


@pytest.mark.fault("F25", injected="a write fails behind the loop", outcome="raised at the next step, not swallowed")
@pytest.mark.parametrize(("ranks", "step"), [(1, 6), (2, 7)])
def test_a_failed_write_is_raised_in_the_loop(trainers: Trainers, out: Path, ranks: int, step: int) -> None:
    """One process hears of it at the next step, several tell each other at the one after."""
    wait_for_the_answer = """
from accel_train.checkpoints import saver
original = saver.Saver.boundary
def boundary(self, step):
    if step == 6:
        self._take_answer(wait=True)
    return original(self, step)
saver.Saver.boundary = boundary
"""
    run = trainers.run(out, *EVERY, ranks=ranks, patch=wait_for_the_answer, failpoint=f"before_file@{ranks - 1}=ENOSPC")
    assert set(run.wait()) == {1}
    assert max(losses(out)) == step
    assert checkpoints(out) == debris(out) == acknowledged(out) == []


@pytest.mark.fault(
    "F25",
    injected="a write fails behind the loop, on_error: continue",
    outcome="a warning; training continues; a later save succeeds",
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_goes_on_and_a_later_save_works(
    trainers: Trainers, out: Path, request: pytest.FixtureRequest, ranks: int
) -> None:
    failpoint = f"before_seal@{ranks - 1}#2=EIO"
    run = trainers.run(out, *EVERY, *CONTINUE, ranks=ranks, failpoint=failpoint)
    assert set(run.wait()) == {0}
    assert "checkpoint of step 10 was not saved; training continues: rank" in run.output()
    assert acknowledged(out) == [5, 15, 20]
    assert checkpoints(out) == [15, 20]
    same_run(out, request.getfixturevalue("whole" if ranks == 1 else "whole_of_two"))


@pytest.mark.fault(
    "F25", injected="no room even to begin, on_error: continue", outcome="a warning; a later save succeeds"
)
def test_a_save_that_cannot_begin_does_not_stop_training(trainers: Trainers, out: Path, whole: Path) -> None:
    run = trainers.run(out, *EVERY, *CONTINUE, failpoint="after_mkdir#2=ENOSPC")
    assert run.wait() == [0], run.output()
    assert "checkpoint of step 10 was not saved; training continues: rank 0: no space left" in run.output()
    assert acknowledged(out) == [5, 15, 20]
    same_run(out, whole)


NO_WRITER = """
import errno, os
from accel_train.checkpoints import background
original = background._allocate
def allocate(memory, size):
    background._allocate = original
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
if os.environ["RANK"] == "1":
    background._allocate = allocate
"""
"""The first writer of rank 1 cannot start."""
CANNOT_BEGIN = [
    pytest.param({"patch": NO_WRITER}, "Too many open files", id="writer"),
    pytest.param({"failpoint": "after_snapshot@1#1=EIO"}, "Input/output error", id="snapshot"),
]


@pytest.mark.fault(
    "F24",
    injected="rank 1 alone has no memory or file for its snapshot",
    outcome="both ranks raise the same error; on_error: continue: a warning, and a later save succeeds",
)
@pytest.mark.parametrize(("broken", "reason"), CANNOT_BEGIN)
@pytest.mark.parametrize("flags", [(), CONTINUE], ids=["stop", "continue"])
def test_one_rank_cannot_begin(
    trainers: Trainers, out: Path, whole_of_two: Path, flags: tuple[str, ...], broken: dict[str, str], reason: str
) -> None:
    run = trainers.run(out, *EVERY, *flags, ranks=2, **broken)
    assert run.wait() == ([0, 0] if flags else [1, 1]), run.output()
    told = rf"rank 1: checkpoint in \S+ could not be written: OSError: \[Errno \d+\] {reason}"
    if flags:
        assert len(re.findall(f"checkpoint of step 5 was not saved; training continues: {told}", run.output())) >= 1
        assert acknowledged(out) == [10, 15, 20]
        same_run(out, whole_of_two)
    else:
        assert len(re.findall(f"CheckpointWriteError: {told}", run.output())) == 2
        assert checkpoints(out) == debris(out) == []


@pytest.mark.fault(
    "F52", injected="no host memory for the save of one rank of two", outcome="both ranks end; no temporary directory"
)
def test_one_rank_has_no_memory_for_a_save(trainers: Trainers, out: Path) -> None:
    run = trainers.run(out, *EVERY, ranks=2, patch=NO_WRITER.replace("EMFILE", "ENOMEM"))
    assert run.wait() == [1, 1]
    assert "CheckpointWriteError: rank 1: the save of step 5 ran out of host memory" in run.output()
    assert re.search(
        r"OSError: \[Errno 12\] Cannot allocate memory\n.*bytes of host memory in this process", run.output()
    )
    assert checkpoints(out) == debris(out) == []


# ------------------------------------------------------------------------------------- directories that do not answer
@pytest.mark.fault("F27", injected="file system remounted read-only", outcome="the error names the path; nothing lost")
def test_read_only(trainers: Trainers, out: Path, disk: Disk) -> None:
    disk("size=50m")
    run = trainers.start(out, *EVERY, "--pause_at", "7")
    run.until(out / "acknowledged.txt", "5")
    disk("ro")
    run.go()
    assert run.wait() == [1]
    assert f"checkpoint in {out}/checkpoints could not be written: OSError: [Errno 30] Read-only" in run.output()
    refused = trainers.run(out, *EVERY)
    assert refused.wait() == [1]
    assert "Read-only file system" in refused.output()
    assert checkpoints(out) == [5]
    disk("rw")
    goes_on(trainers, out)


@pytest.mark.fault(
    "F27", injected="directory without permission (chattr +i)", outcome="the error names the path; nothing lost"
)
def test_no_permission(trainers: Trainers, out: Path) -> None:
    trainers.stopped(out, 5)
    if subprocess.run(["chattr", "+i", str(out / "checkpoints")], capture_output=True, check=False).returncode != 0:
        pytest.skip("this file system has no immutable directories, and root may write everywhere")
    try:
        run = trainers.run(out, *EVERY)
        assert run.wait() == [1]
        assert f"checkpoint in {out}/checkpoints could not be written: PermissionError" in run.output()
        assert checkpoints(out) == [5]
    finally:
        subprocess.run(["chattr", "-i", str(out / "checkpoints")], check=True)
    goes_on(trainers, out)


@pytest.mark.fault(
    "F28", injected="checkpoints deleted while running", outcome="created again at the next save, with a warning"
)
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])  # one is the easier case
def test_deleted_while_running(trainers: Trainers, out: Path, request: pytest.FixtureRequest, ranks: int) -> None:
    run = trainers.start(out, *EVERY, *SYNC, "--pause_at", "7", ranks=ranks)
    run.until_step(7)  # between two saves
    assert acknowledged(out) == checkpoints(out) == [5]
    shutil.rmtree(out / "checkpoints")
    (out / "run.json").unlink()
    run.go()
    assert set(run.wait()) == {0}
    assert "was deleted during the run; it is recreated" in run.output()
    assert checkpoints(out) == [15, 20]
    same_run(out, request.getfixturevalue("whole" if ranks == 1 else "whole_of_two"))
    again = trainers.run(out, *EVERY, ranks=ranks)
    assert "at step 20" in again.output()


@pytest.mark.fault(
    "F28", injected="the save's own directory deleted under it", outcome="an error; the next save succeeds"
)
def test_deleted_under_the_writer(trainers: Trainers, out: Path, whole: Path) -> None:
    run = trainers.start(out, *EVERY, *CONTINUE, failpoint="after_model_file=hold")
    run.until_held()
    shutil.rmtree(out / "checkpoints")
    run.go()
    assert run.wait() == [0]
    assert "checkpoint of step 5 was not saved" in run.output()
    assert acknowledged(out)[-2:] == checkpoints(out) == [15, 20]
    same_run(out, whole)


# ------------------------------------------------------------------------------------------------------ broken disks
@pytest.mark.fault(
    "F30", injected="rename fails (EXDEV)", outcome="the error names the complete directory, which is kept"
)
def test_rename_fails(trainers: Trainers, out: Path, tmp_path: Path) -> None:
    code = """
    import errno, os
    real = os.rename
    def rename(a, b, **options):
        if str(b).endswith("checkpoint_00000010"):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        real(a, b, **options)
    os.rename = rename
    """
    run = trainers.run(out, *EVERY, **patched(tmp_path / "patch", code))
    assert run.wait() == [1]
    (kept,) = debris(out)
    assert f"{out}/checkpoints/{kept} is complete, but could not be renamed to checkpoint_00000010" in run.output()
    assert "Invalid cross-device link" in run.output()
    assert commit.verify(out / "checkpoints" / kept).step == 10
    assert checkpoints(out) == [5]
    goes_on(trainers, out)


@pytest.mark.fault("F31", injected="fsync fails (EIO) on a file or directory", outcome="a failed save, never a success")
@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        pytest.param("trainer_state.json", marks=pytest.mark.slow),  # a file as the weights
        "manifest.json",
        pytest.param("optimizer", marks=pytest.mark.slow),  # a directory as the next one, before the rename
        "checkpoints",
    ],
)
def test_fsync_fails(trainers: Trainers, out: Path, tmp_path: Path, name: str) -> None:
    code = f"""
    import errno, os
    real, failed = os.fsync, []
    def fsync(descriptor):
        if os.readlink(f"/proc/self/fd/{{descriptor}}").endswith("/{name}") and not failed:
            failed.append(1)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)
    os.fsync = fsync
    """
    trainers.stopped(out, 5)
    run = trainers.run(out, *EVERY, **patched(tmp_path / "patch", code))
    assert run.wait() == [1]
    assert "[Errno 5] Input/output error" in run.output()
    assert acknowledged(out) == [5]
    renamed = (
        [10] if name == "checkpoints" else []
    )  # the name is there and whole, though perhaps not after a power loss
    assert checkpoints(out) == [5, *renamed]
    assert debris(out) == []
    goes_on(trainers, out, newest=10 if renamed else 5)


def kill_the_writer(run: Trainer) -> None:
    """That of rank 0, while a failpoint holds it."""
    run.until_held()
    (writer,) = children(run.pids[0], "checkpoints.writer")
    writer.kill()


@pytest.mark.fault("F31", injected="SIGKILL of the writer process alone", outcome="an error that says so; nothing lost")
def test_the_writer_dies(trainers: Trainers, out: Path) -> None:
    run = trainers.start(out, *EVERY, failpoint="after_model_file#2=hold")
    kill_the_writer(run)
    assert run.wait() == [1]
    assert "CheckpointWriteError: rank 0: the writer process ended by itself (code -9)" in run.output()
    assert checkpoints(out) == debris(out) == []
    assert trainers.run(out, *EVERY).wait() == [0]


@pytest.mark.fault(
    "F31",
    injected="SIGKILL of the writer process alone, on_error: continue",
    outcome="another writer is started; later saves succeed",
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_another_writer_takes_over(trainers: Trainers, out: Path, request: pytest.FixtureRequest, ranks: int) -> None:
    run = trainers.start(out, *EVERY, *CONTINUE, ranks=ranks, failpoint="after_optimizer_file@0=hold")
    kill_the_writer(run)
    run.go()  # the next writer passes that place again
    assert set(run.wait()) == {0}, run.output()
    assert "checkpoint of step 5 was not saved; training continues: rank 0: the writer process ended" in run.output()
    assert acknowledged(out)[-2:] == checkpoints(out) == [15, 20]
    assert debris(out) == []
    same_run(out, request.getfixturevalue("whole" if ranks == 1 else "whole_of_two"))

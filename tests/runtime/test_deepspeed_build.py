"""The first rehearsal of ZeRO: it says that it compiles, fails in words, and outlives a start that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from accel_train.runtime import deepspeed_build
from tests import compiling
from tests.distributed.launching import ROOT, environment
from tests.waiting import PATIENCE_SECONDS, until

LOAD = "from accel_train.runtime.deepspeed_build import load_communication; load_communication()"


@contextmanager
def running(*command: str, folder: Path) -> Generator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.fault("R9", injected="the lock of a compilation that was killed", outcome="deleted, and reported")
def test_a_lock_that_nobody_holds_is_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deepspeed_build.clear(tmp_path)
    assert capsys.readouterr().out == ""
    (tmp_path / "lock").touch()
    deepspeed_build.clear(tmp_path)
    assert not (tmp_path / "lock").exists()
    assert f"left the lock {tmp_path / 'lock'}, which no process holds: deleted" in capsys.readouterr().out


@pytest.mark.fault("R9", injected="the lock of a compilation that runs", outcome="waited for; its process is named")
def test_a_lock_that_a_process_holds_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hold = "from torch.utils.file_baton import FileBaton; print(FileBaton('lock').try_acquire(), flush=True); input()"
    with running(sys.executable, "-c", hold, folder=tmp_path) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "True\n"
        deepspeed_build.clear(tmp_path)
        assert (tmp_path / "lock").exists()
        assert f"process {owner.pid} is compiling in {tmp_path}: waiting for it" in capsys.readouterr().out
    deepspeed_build.clear(tmp_path)
    assert not (tmp_path / "lock").exists()


def test_what_a_killed_start_left_compiling_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    (tmp_path / "cc1plus").symlink_to("/bin/sleep")
    with running(str(tmp_path / "cc1plus"), str(PATIENCE_SECONDS), folder=tmp_path):
        clearing = threading.Thread(target=deepspeed_build.clear, args=(tmp_path,))
        clearing.start()
        clearing.join(0.5)
        assert clearing.is_alive()
        assert (tmp_path / "lock").exists()
    clearing.join(PATIENCE_SECONDS)
    assert not (tmp_path / "lock").exists()


def load(folder: Path, **variables: str) -> subprocess.Popen[str]:
    """Load it as a rehearsal does."""
    own = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder), **variables}
    return subprocess.Popen(
        [sys.executable, "-c", LOAD],
        cwd=ROOT,
        env=environment(**own),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    compiling.skip_without("deepspeed")
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-c*) echo "x.cpp:1:10: fatal error: omp.h: none here"; exit 1;; esac\n'
    )
    compiler.chmod(0o755)
    output, _ = load(tmp_path, CXX=str(compiler)).communicate(timeout=PATIENCE_SECONDS)
    assert f"rehearsal: compiling deepspeed_shm_comm of DeepSpeed in {tmp_path}" in output
    assert "cannot be compiled or loaded: x.cpp:1:10: fatal error: omp.h: none here. " in output
    remedy = "contains a space, which breaks a compiler's command" if " " in sys.prefix else "install what it misses"
    assert remedy in output


@pytest.mark.fault("R9", injected="SIGKILL of a start that compiles", outcome="the next start compiles again")
@pytest.mark.slow
def test_a_compilation_that_is_killed_is_done_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling.skip_without_deepspeed()
    folder = tmp_path / "deepspeed_shm_comm"
    first = load(tmp_path)
    until(lambda: deepspeed_build._compiling_in(folder))
    os.kill(first.pid, signal.SIGKILL)  # the compilers go on
    first.communicate()
    assert (folder / "lock").exists()
    both = [load(tmp_path, RANK=str(rank)) for rank in range(2)]
    outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert "".join(outputs).count("which no process holds: deleted") == 1
    assert "rehearsal: compiled deepspeed_shm_comm of DeepSpeed in " in outputs[0]
    assert "rehearsal" not in load(tmp_path).communicate(timeout=PATIENCE_SECONDS)[0]

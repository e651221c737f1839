"""Forked processes are as good as new ones: the same command line, the same end, and the same bits."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import zygote
from tests.distributed.launching import ROOT, Layout, environment, run_recipe
from tests.waiting import PATIENCE_SECONDS

SEEN = """
import json, os, random, sys, threading
import numpy as np
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path": sys.path, "name": __name__, "cwd": os.getcwd(),
    "file": globals().get("__file__"), "environment": dict(os.environ), "threads": threading.active_count(),
    "main": sys.modules["__main__"].__dict__ is globals(), "stdin": sys.stdin.read(),
}))
"""


def new(command: list[str], folder: Path, given: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=given, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("form", ["script", "module", "code"])
def test_a_command_sees_what_it_sees_in_a_new_process(form: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "seen.py").write_text(SEEN)
    words = {"script": ["here/seen.py"], "module": ["-m", "here.seen"], "code": ["-c", SEEN]}[form]
    command, given = [sys.executable, *words, "--flag", "a word"], environment(PYTHONPATH="elsewhere")
    found, expected = (
        json.loads(done.stdout)
        for done in (
            zygote.run(command, cwd=tmp_path, env=given, apart=True),
            new(command, tmp_path, given),
        )
    )
    for seen in (found, expected):  # set by imports, in this process too
        for name in ("TORCHINDUCTOR_CACHE_DIR", *zygote.SET_BY_PACKAGES):
            seen["environment"].pop(name, None)
    assert found == expected


HEARS = "import os, signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); "
"""A shell's background job ignores SIGINT, and so do the tests in it."""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", (0, "", "")),
        ("raise SystemExit", (0, "", "")),
        ("raise SystemExit(75)", (75, "", "")),
        ("raise SystemExit('words')", (1, "", "words\n")),
        ("import os; os.kill(os.getpid(), 9)", (-signal.SIGKILL, "", "")),
        (f"{HEARS}os.kill(os.getpid(), 2); time.sleep(600)", (-signal.SIGINT, "", "KeyboardInterrupt")),
        ("import atexit; atexit.register(print, 'late'); print('soon')", (0, "soon\nlate\n", "")),
        ("import threading as t; t.Timer(0.1, print, ['late']).start(); print('soon')", (0, "soon\nlate\n", "")),
        ("raise ValueError('wrong')", (1, "", "ValueError: wrong")),
    ],
)
def test_a_process_ends_as_a_new_one_ends(code: str, expected: tuple[int, str, str]) -> None:
    done = zygote.run([sys.executable, "-c", code], env=environment(), apart=True)
    assert (done.returncode, done.stdout) == expected[:2]
    assert expected[2] in done.stderr
    assert bool(done.stderr) == bool(expected[2])


def test_two_children_draw_different_numbers() -> None:
    code = "import numpy, random; print(random.random(), numpy.random.random())"
    drawn = [zygote.run([sys.executable, "-c", code], env=environment()).stdout.split() for _ in range(2)]
    assert len({*drawn[0], *drawn[1], str(random.random()), str(np.random.random())}) == 6


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "HF_HOME"])
def test_what_is_read_at_import_starts_a_new_interpreter(variable: str) -> None:
    code = "import sys; print('torch' in sys.modules)"
    said = [zygote.run([sys.executable, "-c", code], env=environment() | more).stdout for more in ({}, {variable: "2"})]
    assert said == ["True\n", "False\n"]


def test_imports_of_this_process_start_no_new_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """scikit-learn and DeepSpeed leave variables behind, with which each child would take seconds."""
    for name in zygote.SET_BY_PACKAGES:
        monkeypatch.setenv(name, "another value")
    code = "import sys; print('recipes.mmdit' in sys.modules)"
    assert zygote.run([sys.executable, "-c", code], env=environment()).stdout == "True\n"


def test_a_child_that_hangs_is_killed(tmp_path: Path) -> None:
    code = "import time, os; print(os.getpid(), flush=True); time.sleep(3600)"
    with pytest.raises(subprocess.TimeoutExpired):
        zygote.run([sys.executable, "-c", code], env=environment(), timeout=0.5)
    child = zygote.start([sys.executable, "-c", code], tmp_path / "out", env=environment())
    assert child.poll() is None
    child.terminate()
    assert child.wait(PATIENCE_SECONDS) == -signal.SIGTERM
    assert not os.path.exists(f"/proc/{child.pid}")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout", [Layout("single", 1), Layout("ddp", 2), Layout("zero2", 2), Layout("fsdp2", 2)], ids=str
)
def test_the_real_launcher_gives_the_same_bits(layout: Layout, tmp_path: Path) -> None:
    """Plain Python, and ``accel-train rehearse`` over torchrun. The other tests of strategies fork."""
    forked, real = (
        run_recipe(layout, tmp_path / name / "run", "--max_steps", "6", "--checkpoints.save_every", "3", new=new)
        for name, new in (("forked", False), ("real", True))
    )
    assert [x.hex() for x in forked.losses()] == [x.hex() for x in real.losses()]
    files = sorted(file.relative_to(real.checkpoint(6)) for file in real.checkpoint(6).rglob("*.safetensors"))
    assert len(files) >= 4
    for file in files:
        assert (forked.checkpoint(6) / file).read_bytes() == (real.checkpoint(6) / file).read_bytes(), file


@pytest.mark.distributed
def test_one_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    """As under torchrun: the exit code that it reported is the launcher's."""
    (tmp_path / "two.yaml").write_text("num_machines: 1\nnum_processes: 2\ndistributed_type: MULTI_GPU\n")
    (tmp_path / "recipe.py").write_text(
        "import os, time\nfrom accel_train.runtime.exiting import run_main\n"
        "run_main(lambda argv: 2 if os.environ['RANK'] == '1' else time.sleep(3600))\n"
    )
    command = [sys.executable, "-m", "accel_train.cli", "rehearse", "--config_file", str(tmp_path / "two.yaml")]
    given = environment(PYTHONPATH=str(ROOT))
    done = zygote.run([*command, str(tmp_path / "recipe.py")], env=given, timeout=PATIENCE_SECONDS)
    assert done.returncode == 2, done.stdout
    assert "REHEARSAL of" in done.stdout

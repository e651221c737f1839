"""What a failed compiler says, in the words of real ones (g++ 12, ninja 1.13, torch 2.13, DeepSpeed 0.19)."""

import sys

import pytest

from accel_train.speed.compiler import compiler_error, paths_with_a_space

NINJA = """Error building extension 'deepspeed_shm_comm': [1/3] c++ -I'/tmp/a b/include' -c '/tmp/a b/shm.cpp' -o shm.o
shm_interface.cpp:42:46: warning: ISO C++ forbids converting a string constant to ‘char*’ [-Wwrite-strings]
[3/3] c++ shm_interface.o shm.o -shared -L/tmp/a b/venv/torch/lib -lc10 -o deepspeed_shm_comm.so
FAILED: [code=1] deepspeed_shm_comm.so
/usr/bin/ld: cannot find b/venv/torch/lib: No such file or directory
/usr/bin/ld: cannot find -lc10: No such file or directory
collect2: error: ld returned 1 exit status
ninja: build stopped: subcommand failed.
"""
INDUCTOR = f"""C++ compile error

Command:
g++ /tmp/a b/x.main.cpp {"-O3 " * 300} -o /tmp/a b/x.main.so

Output:
g++: fatal error: input file ‘/tmp/a’ is the same as output file
compilation terminated.
"""


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (NINJA, "/usr/bin/ld: cannot find b/venv/torch/lib: No such file or directory"),
        (INDUCTOR, "g++: fatal error: input file ‘/tmp/a’ is the same as output file"),
        (
            "[1/1] c++ x.cpp\n  x.cpp:1:10: fatal error: omp.h: No such file or directory\n    1 | #include <omp.h>",
            "x.cpp:1:10: fatal error: omp.h: No such file or directory",
        ),
        (
            "x.o: in function `f':\nx.cpp:3: undefined reference to `g'\ncollect2: error: ld returned 1 exit status",
            "x.cpp:3: undefined reference to `g'",
        ),
        ("RuntimeError: the compiler\n  is out of order", None),
    ],
)
def test_the_line_that_names_the_cause_is_found(output: str, cause: str | None) -> None:
    assert compiler_error(output) == cause


def test_each_path_at_which_a_command_breaks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/home/me/my venv")
    monkeypatch.setattr("tempfile.tempdir", "/tmp/my files")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/cache")
    environment, temporary = paths_with_a_space()
    assert environment.startswith("the Python environment '/home/me/my venv' contains a space")
    assert temporary.startswith("the directory for temporary files '/tmp/my files' contains a space")
    assert paths_with_a_space(inductor=False) == [environment]

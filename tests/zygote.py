"""Processes forked from one that has imported everything: a start costs a tenth of a second of CPU time, not four.

``run`` and ``start`` take the place of ``subprocess.run`` and ``subprocess.Popen`` for commands that begin with this
Python: a script, ``-m module`` or ``-c code``. The zygote has run no operation and holds no thread of its own, which it
checks before each fork, so that its children compute what new processes compute, bit for bit
(``tests/distributed/test_zygote.py``). A child gets the command line, environment, directory and search path of the
command, its own state of numpy's and Python's generators, and ends as an interpreter ends.

``accel-train rehearse`` is followed into its ranks: the launcher itself runs, with its strict reading, its environment
and its exit codes; what ``torch.distributed.run`` would start is forked, with the variables that it would set.

Where a child would differ from a new process, it becomes one (``execve``): under variables that are read at import and
are not those of the zygote, for several hosts, for options of the interpreter. What is left: all children share one
hash seed, and their parent's command line names this module.

One pytest process has up to four zygotes, each started when first needed: where weights are sharded, Accelerate and our
launcher import DeepSpeed, which takes as long as all the rest, and so does diffusers for pictures; elsewhere they stay
out.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import importlib
import json
import os
import pickle
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]
IMPORTS = {
    "plain": (
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "accelerate.commands.launch",
        "matplotlib.pyplot",
        "matplotlib.backends.backend_agg",
        "PIL.PngImagePlugin",
        "pydantic.dataclasses",
        "pydantic.type_adapter",
        "safetensors.torch",
        "tokenizers",
        "recipes.mmdit",
        "recipes.pde",
        "recipes.causal_lm",
        "accel_train.commands.launch",
    ),
    "sharded": (
        "deepspeed",
        "deepspeed.ops.op_builder.all_ops",
        "networkx",
        "torch.utils.cpp_extension",
        "transformers.integrations",
    ),
    "pictures": (
        "scipy.stats",
        "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
        "peft",
        "recipes.lora",
    ),
}
"""What takes long to import, by the words of a zygote's kind; all but the first may be missing."""
OF_PICTURES = "lora.py"
"""A recipe whose processes are forked from a zygote of ``pictures``."""
READ_AT_IMPORT = ("OMP_", "MKL_", "KMP_", "HF_", "HUGGINGFACE", "TRANSFORMERS_", "TORCH", "PYTORCH_", "DS_", "LD_")
READ_AT_IMPORT += ("PYTHON", "MPL", "HOME", "XDG_", "LC_", "LANG", "TZ", "NUMBA_", "OPENBLAS_", "GLIBC_", "MALLOC_")
SET_BY_PACKAGES = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "PYTORCH_NVML_BASED_CUDA_CHECK")
"""scikit-learn and DeepSpeed set these when they are imported, which the tests' own process may have done since: for a
child they would be a reason to become a new process, and one that imports the same sets them itself."""
READ_LATER = ("TORCHELASTIC_", "TORCH_NCCL", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONSTARTUP")
ALLOCATOR = "jemalloc_bg_thd"
"""The thread of an allocator of pyarrow, which some releases of other packages import. It prepares for forks itself."""
LAUNCHER = "accel_train.commands.launch"
GRACE_SECONDS = 30.0
"""How long torchrun leaves the other ranks after SIGTERM."""


# The side of the tests


@dataclass
class Child:
    """A process forked by a zygote: what ``subprocess.Popen`` is for others."""

    pid: int
    _zygote: Zygote
    returncode: int | None = None

    def __post_init__(self) -> None:
        self._end = os.pidfd_open(self.pid)  # not reaped before it is asked for, so the number is its own

    def poll(self) -> int | None:
        """The exit code (negative: the signal), or None while it runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises ``subprocess.TimeoutExpired``."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._end], [], [], timeout)[0]:
            self.returncode = self._zygote.ask({"wait": self.pid})
            os.close(self._end)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._end, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Zygote:
    """The process that forks. Use ``zygote``, which keeps one of each kind; it ends with this process."""

    def __init__(self, kind: str) -> None:
        # Without PYTHONPATH: of a directory in it, the entry of an editable install would be left out of sys.path.
        outer = ("ACCELERATE_", "FSDP_", "WORLD_SIZE", "RANK", "LOCAL_", "MASTER_", "PYTEST_", "PYTHONPATH")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(outer + SET_BY_PACKAGES)}
        kept |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        # Packages ask for GPUs when they are imported. CUDA's own answer would leave it unusable in what is forked.
        kept["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        if "sharded" in kind:
            kept["DS_ACCELERATOR"] = "cpu"
        self._asking = threading.Lock()
        """Several threads of a test may start commands."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.zygote", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=kept,
        )

    def ask(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._asking:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process:  # closes its pipes, then waits
            self._process.stdin.close()


MADE: dict[str, Zygote] = {}
MAKING = threading.Lock()


def zygote(kind: str = "plain") -> Zygote:
    """This process's zygote of a kind: words of ``IMPORTS``."""
    with MAKING:
        if kind not in MADE:
            MADE[kind] = Zygote(kind)
            atexit.register(MADE[kind].close)
        return MADE[kind]


def start(
    command: Sequence[str],
    output: Path,
    *,
    errors: Path | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    group: bool = False,
    kind: str = "plain",
) -> Child:
    """Start ``command``, whose first word is ``sys.executable``. What it prints is appended to ``output``.

    ``errors`` takes what goes to stderr; ``group`` makes it the leader of a process group.
    """
    assert command[0] == sys.executable, command
    given = os.environ if env is None else env
    environment = {name: value for name, value in given.items() if name not in SET_BY_PACKAGES}
    request = {
        "command": [str(word) for word in command],
        "environment": environment,
        "directory": str(cwd),
        "output": str(output),
        "errors": str(errors or output),
        "group": group,
    }
    pictures = any(word.endswith(OF_PICTURES) for word in request["command"])
    made = zygote(f"{kind} pictures" if pictures else kind)
    return Child(made.ask(request), made)


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout: float | None = None,
    apart: bool = False,
    kind: str = "plain",
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` to its end. Its stderr is in ``stdout`` as well, in order, unless it is to be kept ``apart``."""
    with tempfile.TemporaryDirectory(prefix="accel-train-tests-") as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        child = start(command, output, errors=errors if apart else None, env=env, cwd=cwd, kind=kind)
        try:
            child.wait(timeout)
        except BaseException:
            child.kill()
            child.wait()
            raise
        said, wrong = (path.read_text(errors="replace") if path.exists() else "" for path in (output, errors))
    assert child.returncode is not None
    return subprocess.CompletedProcess(command, child.returncode, said, wrong)


CALL = """
import importlib, pathlib, pickle, sys
_, module, name, arguments, rank = sys.argv
function = getattr(importlib.import_module(module), name)
function(int(rank), *pickle.loads(pathlib.Path(arguments).read_bytes()))
"""


def call(function: Callable[..., None], processes: int, *arguments: object, seconds: float = PATIENCE_SECONDS) -> None:
    """Call ``function(rank, *arguments)`` in so many processes, as ``torch.multiprocessing.spawn`` does."""
    with tempfile.TemporaryDirectory(prefix="accel-train-tests-") as folder:
        given = Path(folder) / "arguments"
        given.write_bytes(pickle.dumps(arguments))
        outputs = [Path(folder) / f"{rank}.txt" for rank in range(processes)]
        head = [sys.executable, "-c", CALL, function.__module__, function.__qualname__, str(given)]
        children = [start([*head, str(rank)], output) for rank, output in enumerate(outputs)]
        deadline = time.monotonic() + seconds
        try:
            codes = [child.wait(max(0.0, deadline - time.monotonic())) for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        assert codes == [0] * processes, "\n".join(output.read_text(errors="replace") for output in outputs)


# The side of the zygote


class Birth:
    """What the zygote started with, and what its imports made of it."""

    environment: ClassVar[dict[str, str]] = {}
    path: ClassVar[list[str]] = []
    """Where modules are searched for, without ``PYTHONPATH`` and the directory of the script."""
    set_by_imports: ClassVar[dict[str, str]] = {}
    """Variables: every process that imports the same has them."""


def serve(kind: str) -> None:
    """Fork what is asked for, until the tests close the pipe. Requests and answers are JSON lines."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    put(0, Path(os.devnull))
    os.dup2(2, 1)
    Birth.environment = dict(os.environ)
    Birth.path = sys.path[1:]
    for name in IMPORTS["plain"]:
        importlib.import_module(name)
    for word in kind.split():
        for name in IMPORTS[word] if word != "plain" else ():
            with contextlib.suppress(ImportError):  # of an extra
                importlib.import_module(name)
    Birth.set_by_imports = {k: v for k, v in os.environ.items() if Birth.environment.get(k) != v}
    running: set[int] = set()
    for line in requests:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            running.discard(request["wait"])
            print(json.dumps(os.waitstatus_to_exitcode(status)), file=answers, flush=True)
            continue
        if (pid := fork()) == 0:
            requests.close()
            answers.close()
            if request["group"]:
                os.setpgid(0, 0)
            put(1, Path(request["output"]))
            put(2, Path(request["errors"]))
            os.chdir(request["directory"])
            become(request["command"], request["environment"])
        running.add(pid)
        print(json.dumps(pid), file=answers, flush=True)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def put(descriptor: int, path: Path) -> None:
    """Make ``path`` what this process has under the number ``descriptor``."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(opened, descriptor)
    os.close(opened)


def fork() -> int:
    """A child would not have this process's threads, and would wait for what they hold."""
    others = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
    named = [(task / "comm").read_text().strip() for task in others]
    assert set(named) <= {ALLOCATOR}, f"threads before a fork: {named}"
    return os.fork()


def become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Do in this process what a new one does with ``command``."""
    _, *words = command
    options = words[0].startswith("-") and words[0] not in ("-c", "-m")
    several_hosts = words[:2] == ["-m", "accel_train.cli.torchrun"]
    if options or several_hosts or read_at_import(environment) != read_at_import(Birth.environment):
        os.execve(sys.executable, command, dict(environment))
    os.environ.clear()
    os.environ.update(Birth.set_by_imports | dict(environment))
    sys.orig_argv = list(command)
    tempfile.tempdir = None
    sys.modules["numpy"].random.seed()  # Python's own generator starts anew by itself
    given = [os.path.abspath(place) for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = [*given, *(place for place in Birth.path if place not in given)]
    if words[:3] == ["-m", "accel_train.cli", "rehearse"]:
        launcher: Any = importlib.import_module(LAUNCHER)
        launcher.subprocess = types.SimpleNamespace(Popen=Ranks)
    end(functools.partial(execute, words))


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that have had their effect by the time of a fork."""
    later = (*READ_LATER, "DS_ACCELERATOR" if "deepspeed" in sys.modules else "DS_")
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_IMPORT)
        and not name.startswith((*later, *SET_BY_PACKAGES))
        and Birth.set_by_imports.get(name) != value
    }


def execute(words: Sequence[str]) -> None:
    """Run a script, a module or code as ``__main__``."""
    first, *rest = words
    if first == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = [first, *rest[first == "-c" :]]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if first == "-c":
        sys.path.insert(0, "")
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.path.insert(0, str(Path(first).resolve().parent))
        main.__file__ = os.path.abspath(first)
        code = compile(Path(first).read_bytes(), first, "exec")
    exec(code, main.__dict__)


def end(work: Callable[[], None]) -> NoReturn:
    """Call ``work`` and leave as the interpreter does, but for taking its modules apart."""
    code = 0
    try:
        work()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if left.code is not None and not isinstance(left.code, int):
            print(left.code, file=sys.stderr)
    except BaseException as error:
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 255)


class Ranks:
    """In a launcher, in place of ``subprocess.Popen``: what ``torch.distributed.run`` does, with forked ranks."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], preexec_fn: Callable[[], None]) -> None:
        self._pids: set[int] = set()
        sys.stdout.flush()
        for words, environment in ranks_of(command, env):
            if (pid := fork()) == 0:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                    if signal.getsignal(number) is not signal.SIG_IGN:
                        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
                preexec_fn()
                # They would delete the launcher's temporary folder when this rank ends.
                weakref.finalize._registry.clear()  # type: ignore[attr-defined]
                become(words, environment)
            self._pids.add(pid)

    def wait(self) -> int:
        """0 if all ranks end so. When one does not, the others are ended, and the code is 1."""
        code, deadline = 0, None
        while self._pids:
            pid, status = os.waitpid(-1, 0 if deadline is None else os.WNOHANG)
            if pid == 0:
                time.sleep(0.02)
                if deadline is not None and time.monotonic() > deadline:
                    self.send_signal(signal.SIGKILL)
                continue
            self._pids.discard(pid)
            if status != 0 and deadline is None:
                code, deadline = 1, time.monotonic() + GRACE_SECONDS
                self.send_signal(signal.SIGTERM)
        return code

    def send_signal(self, number: int) -> None:
        for pid in self._pids:
            os.kill(pid, number)


def ranks_of(command: Sequence[str], environment: Mapping[str, str]) -> list[tuple[list[str], dict[str, str]]]:
    """The command and environment of each process that torchrun would start for ``command``.

    ``command`` itself where it is no torchrun, or one for several hosts.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc_per_node", type=int)
    parser.add_argument("--master_addr")
    parser.add_argument("--master_port")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    head = [sys.executable, "-m", "accel_train.cli.torchrun"]
    asked = parser.parse_args(command[len(head) :]) if list(command[: len(head)]) == head else None
    if asked is None or asked.script[0].startswith("-"):
        return [(list(command), dict(environment))]
    number = str(asked.nproc_per_node)
    same = dict(environment) | {
        "WORLD_SIZE": number,
        "LOCAL_WORLD_SIZE": number,
        "ROLE_WORLD_SIZE": number,
        "GROUP_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "ROLE_NAME": "default",
        "MASTER_ADDR": asked.master_addr,
        "MASTER_PORT": asked.master_port,
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 holds the store: there is no agent
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)} for rank in range(int(number))]
    return [([sys.executable, *asked.script], same | rank) for rank in ranks]


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve(sys.argv[1])

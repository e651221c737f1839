"""C4: the cost of saving to a loop: ours against torch.save in a thread, Accelerator.save_state and DCP async_save.

    python -m benchmarks.checkpoint --output benchmarks/results/checkpoint_cpu.json
    python -m benchmarks.checkpoint --state_mb 1500 --output benchmarks/results/checkpoint_cpu_1500.json
    python -m benchmarks.checkpoint --device cuda --state_mb 24300 --rounds 3 --output RESULT.json

Each contender runs in a process of its own, with the same state and the same Python-bound loop (small tensor
operations, one thread). A round times the loop alone, then from the call of save until the checkpoint is complete: the
share of its speed that the loop keeps, how long the call blocks, and the longest iteration after the call. Values are
medians over the rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from accel_train.store import atomic_files
from benchmarks.method import ROOT, Row, parser_of, row, write_results

CONTENDERS = ("accel_train", "thread_torch_save", "dcp_async_save", "save_state")
WIDTH = 1024
WINDOW_SECONDS = 2.0


class State:
    """The state to save: a model with AdamW's moments and an EMA, 16 bytes per parameter."""

    def __init__(self, state_mb: float, device: str) -> None:
        from accelerate import Accelerator

        from accel_train.training.ema import Ema, EmaConfig
        from accel_train.training.shards import Shards

        self.accelerator = Accelerator(cpu=device == "cpu")
        layers = max(1, round(state_mb * 1e6 / 16 / (WIDTH * WIDTH + WIDTH)))
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
        self.model(torch.randn(1, WIDTH, device=device)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average = Ema(EmaConfig(0.9), Shards(self.model, self.optimizer))
        self.small = torch.randn(16, 16, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors to save by name. They are the live ones, not copies."""
        view = self.average.shards
        found = {f"model.{n}": view.master(n) for n in view.parameters}
        found |= {f"ema.{n}": t for n, t in self.average.averages.items()}
        for key in ("exp_avg", "exp_avg_sq"):
            found |= {f"{key}.{n}": view.state(n, key) for n in view.parameters}
        return found

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def iterate(self) -> None:
        """Run one iteration of a loop bound by the Python interpreter."""
        x = self.small
        for _ in range(20):
            x = x * 1.0001 + 0.1
        sum(i * i for i in range(200))


class Saving:
    """One contender. ``begin`` starts a save. ``poll``, called in every iteration, returns True once it is complete."""

    begin: Callable[[], None]
    poll: Callable[[], bool]
    close: Callable[[], None] = staticmethod(lambda: None)
    before_update: Callable[[], object] = staticmethod(lambda: None)
    """Called before each update of the weights; waits until a save no longer reads them."""
    bytes_on_disk: Callable[[], int]


def accel_train(state: State, folder: Path) -> Saving:
    from accel_train.checkpoints.policy import CheckpointConfig
    from accel_train.checkpoints.run import Run
    from accel_train.checkpoints.saver import Saver
    from accel_train.hub.options import HubConfig

    run = Run(folder, "benchmark", None, "", {"experiment": {"global_batch_size": 1}, "resolved": {}})
    run.checkpoints.mkdir(parents=True)
    atomic_files.write_json_in_place(folder / "run.json", {})
    committed: list[int] = []
    saver = Saver(
        state.accelerator, run, state.average, CheckpointConfig(keep_last=1), HubConfig(),
        lambda at: (at / "config.json").write_text("{}"), epoch=float, on_commit=lambda c: committed.append(c.step),
    )  # fmt: skip
    saving, steps = Saving(), [0]

    def begin() -> None:
        steps[0] += 1
        saver.save(steps[0])

    def poll() -> bool:
        saver.boundary(steps[0])
        return bool(committed) and committed[-1] == steps[0]

    saving.begin, saving.poll, saving.close = begin, poll, lambda: saver.__exit__(None, None, None)
    saving.bytes_on_disk = lambda: sum(p.stat().st_size for p in folder.rglob("*.safetensors"))
    return saving


def thread_torch_save(state: State, folder: Path) -> Saving:
    saving, threads, names = Saving(), list[threading.Thread](), [0]

    def begin() -> None:
        copies = {n: t.detach().to("cpu", copy=True) for n, t in state.tensors().items()}
        names[0] += 1
        threads.append(threading.Thread(target=torch.save, args=(copies, folder / "state.pt")))
        threads[-1].start()

    saving.begin, saving.poll = begin, lambda: bool(threads) and not threads[-1].is_alive()
    saving.bytes_on_disk = lambda: (folder / "state.pt").stat().st_size
    return saving


def save_state(state: State, folder: Path) -> Saving:
    saving = Saving()
    saving.begin = lambda: state.accelerator.save_state(str(folder / "state"))
    saving.poll = lambda: True
    saving.bytes_on_disk = lambda: sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    return saving


def process_group(state: State, folder: Path) -> None:
    """Initialise a process group of one process if there is none: DCP's asynchronous save requires one."""
    import torch.distributed as dist

    if not dist.is_initialized():
        store = dist.FileStore(str(folder / "store"), 1)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if state.small.is_cuda else "gloo", store=store, rank=0, world_size=1
        )


def dcp_async_save(state: State, folder: Path) -> Saving:
    import torch.distributed.checkpoint as dcp

    process_group(state, folder)
    saving, futures, count = Saving(), list[Any](), [0]

    def begin() -> None:
        count[0] += 1
        futures.append(dcp.async_save(state.tensors(), checkpoint_id=str(folder / f"dcp{count[0]}")))

    saving.begin, saving.poll = begin, lambda: bool(futures) and futures[-1].done()
    saving.bytes_on_disk = lambda: sum(p.stat().st_size for p in (folder / f"dcp{count[0]}").rglob("*"))
    return saving


def window(state: State, until: Callable[[], bool]) -> tuple[float, float]:
    """Run the loop until ``until`` returns True; return iterations per second and the longest iteration in seconds."""
    count, longest = 0, 0.0
    began = last = time.perf_counter()
    while True:
        state.iterate()
        count += 1
        done = until()
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
        if done:
            return count / (now - began), longest


def pss(process: psutil.Process) -> int:
    """Return the proportional set size of a process and its children in bytes. Shared pages count once in total."""
    return sum(p.memory_full_info().pss for p in (process, *process.children(recursive=True)))


def contend(name: str, state_mb: float, device: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Measure one contender in this process and return its metrics, most of them medians over the rounds."""
    torch.set_num_threads(1)
    state = State(state_mb, device)
    size, process = state.bytes(), psutil.Process()
    saving = {"accel_train": accel_train, "thread_torch_save": thread_torch_save, "save_state": save_state,
              "dcp_async_save": dcp_async_save}[name](state, folder)  # fmt: skip
    found: dict[str, list[float]] = {
        k: [] for k in ("alone", "kept", "stall", "blocked", "complete", "extra_memory", "pieces", "hashed")
    }
    copy_pieces = piecewise_copy(state) if name == "accel_train" else lambda: 0.0
    before = pss(process)
    for number in range(rounds + 1):
        deadline = time.perf_counter() + WINDOW_SECONDS
        alone, _ = window(state, lambda end=deadline: (saving.poll(), time.perf_counter() > end)[1])
        copied = copy_pieces()
        began = time.perf_counter()
        saving.begin()
        blocked = time.perf_counter() - began
        extra = (pss(process) - before) / size
        during, stall = window(state, saving.poll)
        complete = time.perf_counter() - began
        if number == 0:  # not counted: buffers are allocated and files are new
            first = blocked
            continue
        values = {"alone": alone, "kept": during / alone, "stall": stall, "blocked": blocked, "complete": complete}
        values |= {"hashed": beside_a_hash(state) / alone if name == "accel_train" else 0.0}
        for key, value in (values | {"extra_memory": extra, "pieces": copied}).items():
            found[key].append(value)
        os.sync()
    written = saving.bytes_on_disk()
    saving.close()
    median = {key: statistics.median(values) for key, values in found.items()}
    return {
        "state_bytes": size,
        "bytes_on_disk": written,
        "loop_iterations_per_second": median["alone"],
        "loop_speed_kept": median["kept"] if name != "save_state" else None,
        "loop_speed_kept_rounds": found["kept"],
        "longest_iteration_ms": 1e3 * median["stall"],
        "longest_iteration_ms_rounds": [1e3 * s for s in found["stall"]],
        "blocked_ms": 1e3 * median["blocked"],
        "blocked_ms_first_save": 1e3 * first,
        "complete_seconds": median["complete"],
        "extra_memory_of_state": max(found["extra_memory"]),
        "copy_of_the_same_tensors_ms": 1e3 * median["pieces"],
        "speed_over_copy_rounds": [p / b for p, b in zip(found["pieces"], found["blocked"], strict=True)],
        "beside_a_hash_rounds": found["hashed"],
    }


def piecewise_copy(state: State) -> Callable[[], float]:
    """Return a timer of one copy of all tensors to preallocated memory, the floor of a snapshot. 0 s on a GPU."""
    if state.small.is_cuda:
        return lambda: 0.0
    sources = list(state.tensors().values())
    targets = [torch.zeros_like(t) for t in sources]

    def copy() -> float:
        began = time.perf_counter()
        torch._foreach_copy_(targets, sources)
        return time.perf_counter() - began

    return copy


HASH = """
import hashlib, time
data, end = bytes(256 << 20), time.monotonic() + 1.5
print("ready", flush=True)
while time.monotonic() < end:
    hashlib.sha256(data)
"""


def beside_a_hash(state: State) -> float:
    """Return iterations per second beside an unrelated process that hashes memory, as a checkpoint writer does."""
    with subprocess.Popen([sys.executable, "-c", HASH], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        speed, _ = window(state, lambda: other.poll() is not None)
    return speed


class Unhashed:
    """A stand-in for sha256 that does nothing, to time the write alone."""

    def update(self, _: Any) -> None:
        pass

    def hexdigest(self) -> str:
        return ""


def writing(state_mb: float, folder: Path, rounds: int) -> dict[str, Any]:
    """Time writing alone, with no loop: our writer's function against torch.save, plain and durable (fsync, hash)."""
    from accel_train.checkpoints import writer

    torch.set_num_threads(1)
    elements = int(state_mb * 1e6 / 4)
    tensors = {f"t{i:02d}": torch.randn(elements // 16) for i in range(16)}
    size = sum(t.numel() * 4 for t in tensors.values())
    target = torch.empty(elements // 16 * 16)
    source = torch.cat(list(tensors.values()))
    buffer = memoryview(source.numpy()).cast("B")
    header = writer.safetensors_header(
        [{"name": n, "dtype": "F32", "shape": [t.numel()], "bytes": t.numel() * 4} for n, t in tensors.items()]
    )
    times: dict[str, list[float]] = {}

    def measure(name: str, action: Callable[[], object]) -> None:
        for path in folder.iterdir():
            path.unlink()
        os.sync()
        began = time.perf_counter()
        action()
        times.setdefault(name, []).append(time.perf_counter() - began)

    def durable(path: Path) -> None:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            hashlib.file_digest(file, "sha256")

    def no_fsync() -> None:
        original, os.fsync = os.fsync, lambda _: None
        try:
            writer.write_tensors(folder / "a.safetensors", header, buffer)
        finally:
            os.fsync = original

    def no_hash() -> None:
        original, hashlib.sha256 = hashlib.sha256, Unhashed
        try:
            no_fsync()
        finally:
            hashlib.sha256 = original

    ways: list[tuple[str, Callable[[], object]]] = [
        ("memcpy", lambda: target.copy_(source)),
        ("ours_unhashed", no_hash),
        ("ours_hashed", no_fsync),
        ("ours_hashed_fsynced", lambda: writer.write_tensors(folder / "a.safetensors", header, buffer)),
        ("torch_save", lambda: torch.save(tensors, folder / "a.pt")),
        ("torch_save_fsynced_hashed", lambda: (torch.save(tensors, folder / "a.pt"), durable(folder / "a.pt"))),
    ]
    for _ in range(rounds):
        for name, action in ways:
            measure(name, action)
        ways.reverse()  # on a virtual machine the first to write may wait until the host provides memory

    def over(ours: str, theirs: str) -> list[float]:
        """Return how many times as fast ``ours`` is as ``theirs``, by round."""
        return [b / a for a, b in zip(times[ours], times[theirs], strict=True)]

    rates = {name: size / statistics.median(values) / 1e9 for name, values in times.items()}
    return {
        "bytes": size,
        "gb_per_second": rates,
        "unhashed_over_torch_save": over("ours_unhashed", "torch_save"),
        "hashed_over_torch_save": over("ours_hashed", "torch_save"),
        "durable_over_torch_save_durable": over("ours_hashed_fsynced", "torch_save_fsynced_hashed"),
    }


def reload_is_identical(state_mb: float, device: str, folder: Path) -> bool:
    """Save with ours, read every file with safetensors and return True if all tensors equal the live ones."""
    from safetensors.torch import load_file

    state = State(state_mb, device)
    saving = accel_train(state, folder)
    saving.begin()
    saving.close()
    stems = {"model": "model", "ema": "ema", "exp_avg": "optimizer/exp_avg", "exp_avg_sq": "optimizer/exp_avg_sq"}
    (checkpoint,) = (folder / "checkpoints").iterdir()
    loaded = {
        f"{key}.{name}": tensor
        for key, stem in stems.items()
        for path in checkpoint.rglob("*.safetensors")
        if path.relative_to(checkpoint).as_posix().split(".")[0].split("-")[0] == stem
        for name, tensor in load_file(path).items()
    }
    live = state.tensors()
    return loaded.keys() == live.keys() and all(torch.equal(loaded[n], live[n].cpu()) for n in live)


def in_own_process(job: str, arguments: argparse.Namespace, state_mb: float) -> Any:
    """Run one job of this file in a fresh process and folder. Returns its result, or its error as ``failed``."""
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        command = [
            sys.executable,
            "-m",
            "benchmarks.checkpoint",
            "--job",
            job,
            "--state_mb",
            str(state_mb),
            "--device",
            arguments.device,
        ]
        command += ["--rounds", str(arguments.rounds), "--directory", folder]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": str(arguments.device == "cpu").lower(),
        }
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
        if done.returncode:
            return {"failed": done.stderr[-1500:]}
        return json.loads(done.stdout.splitlines()[-1])


def one_job(arguments: argparse.Namespace) -> Any:
    folder, (state_mb,) = Path(arguments.directory), arguments.state_mb
    if arguments.job == "writing":
        return writing(state_mb, folder, arguments.rounds)
    if arguments.job == "reload":
        return reload_is_identical(state_mb, arguments.device, folder)
    return contend(arguments.job, state_mb, arguments.device, arguments.rounds, folder)


def jobs_of(arguments: argparse.Namespace, state_mb: float) -> dict[str, Any]:
    """Run every job at one size of the state, each in a process of its own; return the results by name."""
    jobs = {name: in_own_process(name, arguments, state_mb) for name in (*CONTENDERS, "writing")}
    copied = jobs["accel_train"].get("blocked_ms")
    if copied:
        rate = jobs["accel_train"]["state_bytes"] / copied / 1e6
        jobs["snapshot_gb_per_second"] = rate
        jobs["snapshot_over_one_large_memcpy"] = rate / jobs["writing"]["gb_per_second"]["memcpy"]
    jobs["reload_is_identical"] = in_own_process("reload", arguments, state_mb)
    return jobs


TEXTS = {
    "accel_train": "ours",
    "thread_torch_save": "a thread with torch.save",
    "dcp_async_save": "DCP async_save",
    "save_state": "Accelerator.save_state",
}

DURABLE = "speed of writing over torch.save, both hashed and flushed to the disk"
UNHASHED = "speed of writing over torch.save, without hash and flush"


def rows_of(id: str, size: str, jobs: dict[str, Any]) -> list[Row]:
    """Return the rows of one size of the state. Raises RuntimeError if a contender failed."""
    rows: list[Row] = []
    for name, text in TEXTS.items():
        job, mine = jobs[name], name == "accel_train"
        if "failed" in job:
            raise RuntimeError(f"{name} has failed: {job['failed']}")
        if name != "save_state":  # its call returns only when all is written
            kept, longest = job["loop_speed_kept_rounds"], job["longest_iteration_ms_rounds"]
            rows.append(row(id, f"{size}, {text}: speed the loop keeps", kept, target=">= 0.95" if mine else None))
            rows.append(row(id, f"{size}, {text}: longest iteration", longest, "ms", "<= 10" if mine else None))
        rows.append(row(id, f"{size}, {text}: the call blocks for", job["blocked_ms"], "ms"))
    if id == "C4":
        mine = jobs["accel_train"]
        text = f"{size}, a process that hashes on the other core and has nothing to do with the loop: speed it keeps"
        rows.append(row(id, text, mine["beside_a_hash_rounds"]))
        text = f"{size}, a copy into memory of before, on one core: takes"
        rows.append(row(id, text, mine["copy_of_the_same_tensors_ms"], "ms"))
        copied, writing = mine["speed_over_copy_rounds"], jobs["writing"]
        rows.append(row(id, f"{size}: speed of the snapshot over a copy of its tensors", copied, target=">= 0.9"))
        rows.append(row(id, f"{size}: {DURABLE}", writing["durable_over_torch_save_durable"], target=">= 1.3"))
        rows.append(row(id, f"{size}: {UNHASHED}", writing["unhashed_over_torch_save"]))
    rows.append(row(id, f"{size}: reloaded bit for bit", float(jobs["reload_is_identical"]), "count", ">= 1"))
    return rows


def main() -> int:
    """Measure each size of the state and write the rows. Returns 1 if a target is missed, else 0."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--state_mb", type=float, nargs="+", default=[402.0], help="sizes of the state in MB")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--directory", help="where to write; a temporary directory by default")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        print(json.dumps(one_job(arguments)))
        return 0
    if arguments.tiny:
        arguments.state_mb, arguments.rounds = [20.0], 2
    torch.set_num_threads(1)
    rows: list[Row] = []
    sizes: dict[str, Any] = {}
    for state_mb in arguments.state_mb:
        sizes[str(state_mb)] = jobs = jobs_of(arguments, state_mb)
        rows += rows_of("C4" if arguments.device == "cpu" else "G3", f"{state_mb:g} MB", jobs)
    output, title = arguments.output, "C4: saving while the loop runs"
    return 0 if write_results(output, title, rows, {"sizes": sizes}, gpu=arguments.device == "cuda") else 1


if __name__ == "__main__":
    sys.exit(main())

"""G3: saving SD3-medium's weights and AdamW's state, 24.3 GB, while the loop that trains them continues.

    python -m benchmarks.gpu --only saving

Each contender runs in a process of its own. The loop is a compiled training step on the very tensors that are saved,
long enough to keep the device busy. Each contender saves once before it is measured, which allocates its memory. The
hidden cost is the extra time of the steps beside a save over as many steps alone, timed before and after it; the first
step of each window is counted separately. A negative cost is within the noise. If time is left, ours also saves beside
a host-bound loop: a few rows, not compiled. If device, host or disk has too little room, a smaller state is saved,
without targets.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from accel_train.checkpoints.background import Writer
from accel_train.checkpoints.snapshot import Snapshot
from accel_train.training.ema import Ema, EmaConfig
from accel_train.training.shards import Shards
from benchmarks import checkpoint
from benchmarks.device import TINY, Machine
from benchmarks.gpu_contenders import Found, compile_blocks, new_accelerator
from benchmarks.method import ROOT
from benchmarks.sd3 import SD3, Shape, batch_of, loss_sum

DEPTHS = (24, 12, 6)
SHARED = Path("/dev/shm")
"""A file system in memory. If it has room, the speed of the disk does not affect how long a save takes."""
WHOLE = "G3, 24.3 GB of state"
BYTES_A_VALUE = 12
"""Weight and two moments in fp32. The EMA is off, because the published numbers are without one."""
ONE_STAGING = torch.__version__ < (2, 13)
"""True for torch before 2.13, whose stager drops its host memory after a save: each save needs a new one."""
PEERS = {"save_state": "Accelerator.save_state", "dcp_async_save": "DCP async_save"}


def dcp_async_save(state: Any, folder: Path) -> checkpoint.Saving:
    """Return DCP's asynchronous save as in torchtitan.

    The state is staged in pinned host memory that is reused, beside forward and backward of a step. The update of the
    weights waits for it.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    checkpoint.process_group(state, folder)
    on_device = bool(state.small.is_cuda)
    options = StagingOptions(on_device, use_shared_memory=False, use_non_blocking_copy=on_device)
    stagers = [DefaultStager(options)]
    saving, responses = checkpoint.Saving(), list[Any]()

    def directory(number: int) -> Path:
        return folder / f"dcp{number}"

    def begin() -> None:
        number = len(responses)
        if number and ONE_STAGING:
            stagers.pop().close()
            stagers.append(DefaultStager(options))
        responses.append(dcp.async_save(state.tensors(), checkpoint_id=str(directory(number)), async_stager=stagers[0]))

    def poll() -> bool:
        if not responses[-1].upload_completion.done():
            return False
        responses[-1].upload_completion.result()  # raises the error of a failed save
        shutil.rmtree(directory(len(responses) - 2), ignore_errors=True)
        return True

    saving.begin, saving.poll, saving.close = begin, poll, lambda: stagers[0].close()
    saving.before_update = lambda: responses and responses[-1].staging_completion.result()
    return saving


CONTENDERS: dict[str, Callable[[Any, Path], checkpoint.Saving]] = {
    "accel_train": checkpoint.accel_train,
    "save_state": checkpoint.save_state,
    "dcp_async_save": dcp_async_save,
}


def g3(machine: Machine, rate: float, found: Found) -> None:
    """Measure ours, then Accelerate's, then DCP's, and ours beside a host-bound loop, as far as time is left."""
    depth, folder = room_for(machine, found)
    whole = depth == DEPTHS[0]
    rounds = 3 if machine.left > 400 else 1
    ours = found.details["accel_train"] = in_own_process("accel_train", machine, depth, rounds, folder)
    add_ours(found, ours, whole)
    for name, words in PEERS.items():
        if name == "dcp_async_save" and machine.left < 150:
            found.fails(f"G3, {words}", f"{machine.left:.0f} s were left, it needs 150")
            continue
        theirs = found.details[name] = in_own_process(name, machine, depth, 1, folder)
        text = f"{size_of(ours)}: time lost per save, {words} over ours"
        found.add("G3", text, lost(theirs) / lost(ours), "x", ">= 50" if name == "save_state" else None)
    if machine.left < 100:
        found.fails("G3, beside a loop that waits for its host", f"{machine.left:.0f} s were left, it needs 100")
        return
    job = found.details["host_bound"] = in_own_process("accel_train", machine, depth, 1, folder, host_bound=True)
    text = f"{size_of(job)}, beside a loop that waits for its host: hidden cost over the time of the steps beside it"
    whole_time = [count * alone for count, alone in zip(job["steps"], job["step_ms"], strict=True)]
    found.add("G3", text, [a / b for a, b in zip(job["hidden_ms"], whole_time, strict=True)])


def add_ours(found: Found, job: dict[str, Any], whole: bool) -> None:
    """Add the rows of our save. Only ``whole``, the full state, has targets."""
    text = size_of(job)
    found.add("G3", f"{text}: the call blocks for", job["blocked_ms"], "ms", "<= 30" if whole else None)
    found.add(
        "G3",
        f"{text}: hidden cost, what the steps beside the save take longer",
        job["hidden_ms"],
        "ms",
        "<= 150" if whole else None,
        "<= 60" if whole else None,
    )
    if job["to_host_gb_per_second"] is None:
        found.absent["G3, speed of the way to the host"] = "on a CPU the snapshot is a copy in the call itself"
        return
    share = job["to_host_gb_per_second"] / job["locked_gb_per_second"]
    target = ">= 0.9" if whole else None
    found.add("G3", f"{text}: way to the host over a copy into locked memory", share, "x", target)


def size_of(job: dict[str, Any]) -> str:
    """Return the size of the saved state as text."""
    size = job["state_bytes"]
    return f"{size / 1e9:.3g} GB of state" if size > 1e8 else f"{size / 1e6:.3g} MB of state"


def lost(job: dict[str, Any]) -> float:
    """Return the milliseconds that a save costs the loop: blocked and hidden time, median over the rounds."""
    return statistics.median(b + max(0.0, h) for b, h in zip(job["blocked_ms"], job["hidden_ms"], strict=True))


# ------------------------------------------------------------------------------------------------------ what fits here
def shape_of(depth: int, tiny: bool, host_bound: bool = False) -> Shape:
    """Return the shape of the model. Few rows, so that memory goes to the state and not to activations."""
    return TINY if tiny else replace(Shape(depth=depth), batch=4 if host_bound else 16)


def room_for(machine: Machine, found: Found) -> tuple[int, Path]:
    """Return the largest depth that fits and the folder to write to. Raises RuntimeError if none fits.

    Needed are, on the device, the state, the gradients and the snapshot's copy of the state; on the disk two
    checkpoints, because the old one is deleted once the new one is complete; in host memory the copy that is written.
    If the largest depth does not fit, ``found.absent`` says what it needs.
    """
    if machine.tiny:
        found.absent[WHOLE] = "a dry run saves some megabytes, against no target"
        return TINY.depth, Path(tempfile.gettempdir())
    device = torch.cuda.mem_get_info(machine.device)[0]
    memory = psutil.virtual_memory().available
    folders = [p for p in (SHARED, Path(tempfile.gettempdir())) if os.access(p, os.W_OK)]
    lacking = ""
    for depth in DEPTHS:
        with torch.device("meta"):
            values = sum(p.numel() for p in SD3(shape_of(depth, tiny=False)).parameters())
        state = BYTES_A_VALUE * values
        on_device, on_disk, on_host = 2.2 * state + 4 * values + 30e9, 2.1 * state, 1.3 * state + 8e9
        for folder in folders:
            free = shutil.disk_usage(folder).free
            in_memory = on_host + (on_disk if folder == SHARED else 0)
            if device >= on_device and memory >= in_memory and free >= on_disk:
                if lacking:
                    saved = f"{state / 1e9:.1f} GB were saved, without targets"
                    found.absent[WHOLE] = f"{lacking}: {saved}"
                return depth, folder
        lacking = lacking or (
            f"needs {on_device / 1e9:.0f} GB of the device ({device / 1e9:.0f} are free), {on_host / 1e9:.0f} GB of "
            f"host memory ({memory / 1e9:.0f}) and {on_disk / 1e9:.0f} GB of disk "
            f"({max(shutil.disk_usage(f).free for f in folders) / 1e9:.0f})"
        )
    raise RuntimeError(f"no room for a state to save: 24.3 GB {lacking}, and a quarter of it has none either")


# ------------------------------------------------------------------------------------------------- one contender's run
class Training:
    """SD3's model in training: the state that the contenders of `checkpoint` save, and the step that they disturb."""

    def __init__(self, machine: Machine, shape: Shape, compiled: bool) -> None:
        self.accelerator = new_accelerator(machine)
        torch.manual_seed(0)
        with torch.device(machine.device):
            plain = SD3(shape)
        if compiled:
            compile_blocks(plain, machine.backend)
        self.model: Any
        self.optimizer: Any
        self.model, self.optimizer = self.accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), fused=True))
        self.average = Ema(EmaConfig(0.0), Shards(self.model, self.optimizer))
        self.batch, self.rows = batch_of(shape, machine.device), shape.batch
        self.small = self.batch["time"]
        self.before_update: Callable[[], object] = lambda: None
        self._marks: deque[torch.cuda.Event] = deque()

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors to save by name. They are the live ones, not copies."""
        view = self.average.shards
        found = {f"model.{n}": view.master(n) for n in view.parameters}
        for key in ("exp_avg", "exp_avg_sq"):
            found |= {f"{key}.{n}": view.state(n, key) for n in view.parameters}
        return found

    def step(self) -> None:
        """Take one optimizer step. The host runs at most one step ahead of the device."""
        loss = loss_sum(self.model, self.batch) / self.rows
        self.accelerator.backward(loss)
        self.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.small.is_cuda:
            self._marks.append(torch.cuda.Event())
            self._marks[-1].record()
            if len(self._marks) > 1:
                self._marks.popleft().synchronize()

    def settle(self) -> None:
        """Wait for the steps on the device, but not for copies on other streams."""
        if self.small.is_cuda:
            torch.cuda.current_stream().synchronize()


@dataclass(frozen=True)
class Window:
    """Timing of consecutive steps that start and end with an idle device."""

    seconds: float
    steps: int
    first: float
    """Seconds until the first step was complete, start-up included."""
    each: list[float]
    """Seconds of each step on the host, which runs one step ahead of the device."""

    @property
    def step(self) -> float:
        """Mean seconds of a step after the first."""
        return (self.seconds - self.first) / (self.steps - 1)


def window(state: Training, steps: int, poll: Callable[[], bool]) -> Window:
    """Run at least ``steps`` steps (two or more), until ``poll``, called after each, has returned True."""
    ahead = int(state.small.is_cuda)
    state.settle()
    began, done, first = time.perf_counter(), False, 0.0
    each: list[float] = []
    while len(each) < steps or not done:
        last = time.perf_counter()
        state.step()
        done = poll() or done
        now = time.perf_counter()
        each.append(now - last)
        if len(each) == 1 + ahead:
            first = now - began
    state.settle()
    return Window(time.perf_counter() - began, len(each), first, each)


def hidden(beside: Window, alone: Sequence[Window]) -> float:
    """Return the extra seconds of the steps beside a save over as many steps alone, averaged over those windows."""
    first, step = (statistics.fmean(values) for values in zip(*((w.first, w.step) for w in alone), strict=True))
    return beside.seconds - first - (beside.steps - 1) * step


class Arrival:
    """Times at which a snapshot began and was complete in host memory, which is when the writer gets its job.

    Patches ``Snapshot.take`` and ``Writer.submit`` in this process, because nothing else records these times.
    """

    def __init__(self) -> None:
        self.began = self.ended = 0.0
        snapshots: Any = Snapshot
        writers: Any = Writer
        take, submit = snapshots.take, writers.submit

        def taken(snapshot: Snapshot) -> None:
            self.began = time.perf_counter()
            take(snapshot)

        def submitted(writer: Writer, job: Any) -> None:
            if job["do"] == "write":
                self.ended = time.perf_counter()
            submit(writer, job)

        snapshots.take, writers.submit = taken, submitted


def contend(name: str, machine: Machine, shape: Shape, rounds: int, folder: Path, compiled: bool) -> dict[str, Any]:
    """Measure one contender in this process and return its values by round.

    Before the rounds it saves once without a loop, which allocates and pins host memory. For ours this also gives the
    GB/s of a snapshot on an otherwise idle device.
    """
    torch.set_num_threads(1)
    state, arrival = Training(machine, shape, compiled), Arrival()
    for _ in range(3):
        state.step()
    saving = CONTENDERS[name](state, folder)
    size = sum(t.numel() * t.element_size() for t in state.tensors().values())
    found: dict[str, Any] = {"state_bytes": size, "to_host_gb_per_second": None}
    found |= {key: [] for key in ("blocked_ms", "hidden_ms", "steps", "step_ms", "called_ms", "beside_ms")}
    state.settle()
    saving.begin()
    while not saving.poll():
        time.sleep(1e-4)
    if name == "accel_train" and machine.device.type == "cuda":
        found["to_host_gb_per_second"] = size / (arrival.ended - arrival.began) / 1e9
        found["locked_gb_per_second"] = locked_rate(machine)
    state.before_update = saving.before_update
    steps = 3 if machine.tiny else 20
    for _ in range(rounds):
        before = window(state, steps, lambda: saving.poll() or True)
        began = time.perf_counter()
        saving.begin()
        called = time.perf_counter() - began
        state.settle()
        blocked = time.perf_counter() - began
        beside = window(state, steps, saving.poll)
        alone = (before, window(state, steps, lambda: saving.poll() or True))
        values = {"blocked_ms": 1e3 * blocked, "hidden_ms": 1e3 * hidden(beside, alone), "called_ms": 1e3 * called}
        values |= {"step_ms": 1e3 * statistics.fmean(w.step for w in alone), "steps": beside.steps}
        for key, value in (values | {"beside_ms": [round(1e3 * s, 1) for s in beside.each]}).items():
            found[key].append(value)
    saving.close()
    return found


def locked_rate(machine: Machine) -> float:
    """Return the GB/s from the device into pinned host memory, the upper bound of a snapshot."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, device=machine.device)
    target = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    seconds = machine.seconds(lambda: target.copy_(source, non_blocking=True), 5)
    return source.numel() / statistics.median(seconds) / 1e9


def in_own_process(
    name: str, machine: Machine, depth: int, rounds: int, folder: Path, host_bound: bool = False
) -> dict[str, Any]:
    """Run `contend` in a fresh process and a temporary folder. Raises TimeoutError, or RuntimeError if it fails."""
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        command = [sys.executable, "-m", "benchmarks.gpu_saving", name, "--depth", str(depth)]
        command += ["--rounds", str(rounds), "--directory", directory]
        command += ["--tiny"] * machine.tiny + ["--host_bound"] * host_bound
        environment = os.environ | {"ACCELERATE_USE_CPU": str(machine.tiny).lower()}
        limit = max(30.0, machine.left - 10)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT, timeout=limit
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{name}: {limit:.0f} s were left, and were too few") from None
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-1500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Measure one contender and print its values as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CONTENDERS)
    parser.add_argument("--depth", type=int, default=DEPTHS[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--host_bound", action="store_true")
    given = parser.parse_args()
    machine = Machine(torch.device("cpu" if given.tiny else "cuda:0"), given.tiny)
    shape = shape_of(given.depth, given.tiny, given.host_bound)
    compiled = not (given.host_bound or given.tiny)
    print(json.dumps(contend(given.name, machine, shape, given.rounds, given.directory, compiled)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

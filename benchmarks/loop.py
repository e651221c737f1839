"""C1: host time per optimizer step of each way to train, over a raw torch loop.

    python -m benchmarks.loop --output benchmarks/results/loop_cpu.json

Two small linear layers, 4 rows of 8, fp32, fused AdamW, gradients clipped to norm 1: nearly all of a step is work of
the host. Ours is the loop of a recipe from the loss to the next batch, at steps that neither log nor save: gradient
window, optimizer, zero_grad, throughput, losses by sample, comparisons of the processes, recorder, and the saver's
check. Accelerate's is its own idiom: prepare, accumulate, backward, clip, step. All contenders run in turns in one
process on one thread, and time is thread time.

Reads are calls that bring a number from a tensor to the host, for which the host would have to wait for a GPU. They are
counted in one step of our loop.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate import optimizer as accelerate_optimizer
from torch import Tensor, nn

from accel_train.runtime import step_overhead
from accel_train.runtime.step_overhead import remember_lookups
from accel_train.training.accumulation import GradientWindow
from accel_train.training.ema import Ema, EmaConfig
from accel_train.training.optimizer_classes.fused_adamw import FusedAdamW
from accel_train.training.shards import Shards
from accel_train.training.step_guard import StepResult, resolve_step_guard
from benchmarks.method import Row, in_turns, parser_of, row, write_results
from benchmarks.reads import HostReads
from benchmarks.recipe_step import START, after_steps

ROWS, WIDTH = 4, 8
TRAINER_SKIPS = 5
MAX_NORM = 1.0


def start() -> tuple[nn.Module, Tensor, Tensor]:
    """Return the model, inputs and targets, the same for every contender."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    return model, torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


Step = Callable[[], Tensor | StepResult]
"""One optimizer step. Returns the loss or a result that has it."""


def raw() -> Step:
    """Return the step of a hand-written loop without any library."""
    model, x, y = start()
    optimizer = adamw(model)

    def step() -> Tensor:
        loss = (model(x) - y).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def accelerates(accelerator: Accelerator) -> Step:
    """Return the step in the idiom of Accelerate's documentation."""
    plain, x, y = start()
    model, optimizer = accelerator.prepare(plain, adamw(plain))

    def step() -> Tensor:
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


@contextmanager
def ours(accelerator: Accelerator, folder: Path, kind: type[torch.optim.Optimizer] = FusedAdamW) -> Iterator[Step]:
    """Yield the step of the recipes' loop between two log points, with an optimizer of class ``kind``."""
    plain, x, y = start()
    # Two groups, as a recipe has them.
    groups = [{"params": [layer.weight for layer in plain]}, {"params": [layer.bias for layer in plain]}]
    own: dict[str, Any] = {} if kind is FusedAdamW else {"fused": True}
    model, optimizer = accelerator.prepare(plain, kind(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, **own))
    average = Ema(EmaConfig(0.0), Shards(model, optimizer))
    weights = {"main": torch.tensor(float(ROWS * WIDTH))}
    inputs = {"x": x, "y": y, "sample": torch.arange(ROWS)}
    coefficients = {"main": 1.0}
    guard, _ = resolve_step_guard(accelerator, optimizer, on_cpu=True)
    with after_steps(accelerator, average, folder, ROWS) as after:
        numbers = count(START)

        def step() -> StepResult:
            window = GradientWindow(accelerator, model, [(inputs, weights)], coefficients, next(numbers), "auto", guard)
            for batch in window:
                window.backward({"main": (model(batch["x"]) - batch["y"]).square().sum()})
            result = window.finish(MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            after(result)
            return result

        yield step


def fabrics() -> Step:
    """Return the step in the idiom of Lightning Fabric."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    plain, x, y = start()
    model, optimizer = fabric.setup(plain, adamw(plain))

    def step() -> Tensor:
        loss = (model(x) - y).square().mean()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Trained(nn.Module):
    """The model with the interface of HF's Trainer: the forward returns the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.model(x) - labels).square().mean()}


def trainers(steps: int, folder: Path) -> Callable[[], float]:
    """Return a function that runs HF's Trainer and returns thread seconds per step, without set-up and first steps."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    plain, x, y = start()
    model, batch = Trained(plain), {"x": x, "labels": y}

    class Clock(TrainerCallback):  # type: ignore[misc]
        began = ended = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == TRAINER_SKIPS:
                self.began = time.thread_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.ended = time.thread_time()

    class Loop(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return [batch] * (steps + TRAINER_SKIPS)

    given: Any = TrainingArguments(
        output_dir=str(folder), max_steps=steps + TRAINER_SKIPS, max_grad_norm=MAX_NORM, use_cpu=True,
        logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True, per_device_train_batch_size=ROWS,
    )  # fmt: skip

    def run() -> float:
        clock = Clock()
        trainer = Loop(model, given, optimizers=(adamw(model), None), callbacks=[clock])
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # it prints what it logs
            trainer.train()
        return (clock.ended - clock.began) / steps

    return run


def same_losses(ways: dict[str, Step], steps: int = 20) -> None:
    """Assert that every contender has the same losses, to a relative tolerance of 1e-5."""
    results = {name: [step() for _ in range(steps)] for name, step in ways.items()}
    losses = {n: [r.loss if isinstance(r, StepResult) else r for r in found] for n, found in results.items()}
    for name, found in losses.items():
        assert torch.allclose(torch.stack(found), torch.stack(losses["raw"]), rtol=1e-5), f"{name}: other losses"


def measure(rounds: int, steps: int, folder: Path) -> tuple[list[Row], dict[str, Any], dict[str, str]]:
    """Time all contenders in turns; return rows, details and absent peers."""
    absent: dict[str, str] = {}
    logging.getLogger("transformers").setLevel(logging.ERROR)
    trainer = trainers(steps, folder / "trainer")  # first, because TrainingArguments resets Accelerate's state
    accelerator = Accelerator(cpu=True)
    with ExitStack() as stack:
        mine = stack.enter_context(ours(accelerator, folder / "run"))
        with_torch = stack.enter_context(ours(accelerator, folder / "torch", torch.optim.AdamW))
        ways: dict[str, Step] = {
            "raw": raw(),
            "ours": mine,
            "torch": with_torch,
            "accelerate": accelerates(accelerator),
        }
        if find_spec("lightning_fabric") is None:
            absent["lightning-fabric"] = "not installed; pip install lightning-fabric"
        else:
            ways["fabric"] = fabrics()
        same_losses(ways)
        reads = count_reads(mine)
        trained: list[float] = []
        timed: dict[str, Callable[[], object]] = {n: repeated(s, steps) for n, s in ways.items()}
        timed |= {"looking": timed["ours"]} | {n: remembering(timed[n]) for n in ("ours", "torch")}
        times = in_turns(timed | {"trainer": lambda: trained.append(trainer())}, rounds)
        pauses = collections(mine, 10 * steps)
    over = {n: [1e6 * d / steps for d in times.differences(n, "raw")] for n in timed if n != "raw"}
    plain = times.median("raw") / steps
    over["trainer"] = [1e6 * (seconds - plain) for seconds in trained[-rounds:]]
    least = {n: 1e6 * (min(times.seconds[n]) - min(times.seconds["raw"])) / steps for n in timed}
    details = {"steps_per_round": steps, "reads_of_a_step": reads, "least_over_raw_us": least, "collections": pauses}
    return rows_of(over, reads, pauses), details | times.summary(), absent


def repeated(step: Step, steps: int) -> Callable[[], object]:
    """Return a function that takes ``steps`` steps."""

    def run() -> None:
        for _ in range(steps):
            step()

    return run


def remembering(run: Callable[[], object]) -> Callable[[], object]:
    """Return ``run`` with Accelerate's lookups cached as in the recipes, and restored after it for the other ways."""
    looks = accelerate_optimizer.is_lomo_available
    remember_lookups()
    remembers = accelerate_optimizer.is_lomo_available
    accelerate_optimizer.is_lomo_available = looks

    def remembered() -> None:
        accelerate_optimizer.is_lomo_available = remembers
        run()
        accelerate_optimizer.is_lomo_available = looks

    return remembered


def count_reads(step: Step) -> dict[str, int]:
    """Return the number of reads in one step, by call."""
    with HostReads() as reads:
        step()
    return dict(reads.counts)


def collections(step: Step, steps: int) -> dict[str, float]:
    """Return milliseconds of garbage collections: the longest that Python starts by itself in ``steps`` steps, a full
    one (which it starts at an arbitrary step), and the longest at log points with all other objects frozen."""
    taken: list[float] = []

    def note(phase: str, _: dict[str, int]) -> None:
        taken.append(-time.thread_time() if phase == "start" else taken.pop() + time.thread_time())

    def longest(work: Callable[[], object]) -> float:
        taken.clear()
        gc.callbacks.append(note)
        work()
        gc.callbacks.remove(note)
        return 1e3 * max(taken, default=0.0)

    def at_log_points() -> None:
        for number in range(1, steps + 1):
            step()
            if number % 50 == 0:
                step_overhead.collect_garbage()

    pauses = {"automatic": longest(repeated(step, steps)), "full": longest(gc.collect)}
    with step_overhead.garbage_frozen():
        pauses["frozen"] = longest(at_log_points)
    return pauses


def rows_of(over: dict[str, list[float]], reads: dict[str, int], pauses: dict[str, float]) -> list[Row]:
    """Return the rows. ``over`` has microseconds per step over the raw loop, by contender and round."""
    names = {
        "torch": "our loop with torch's fused AdamW, as all others have it,",
        "looking": "our loop, Accelerate's two lookups per step left as they are,",
        "accelerate": "Accelerate's idiom",
        "fabric": "Lightning Fabric",
        "trainer": "HF Trainer",
    }
    unit = "us per step"
    rows = [row("C1", "our loop over the raw loop", over["ours"], unit, goal="<= 40")]
    rows += [row("C1", f"{names[n]} over the raw loop", over[n], unit) for n in names if n in over]
    for name, which in (("ours", "our loop"), ("looking", "our loop, lookups as they are")):
        saved = [b - a for a, b in zip(over[name], over["accelerate"], strict=True)]
        rows.append(row("C1", f"Accelerate's idiom less {which}", saved, unit, "> 0"))
    rows.append(row("C1", "reads of the device in a step that does not log", sum(reads.values()), "count", "<= 0"))
    texts = {
        "automatic": "the longest that Python started in these steps",
        "full": "a full one, which Python starts at a step of its choice",
        "frozen": "the longest at log points, all else frozen",
    }
    return rows + [row("C1", f"garbage collection: {texts[n]}", pauses[n], "ms") for n in texts]


def main() -> int:
    """Measure, print and write the rows. Returns 1 if a target is missed, else 0."""
    parser = parser_of(__doc__, rounds=20)
    parser.add_argument("--steps", type=int, default=200, help="steps of each contender in each round")
    options = parser.parse_args()
    if options.tiny:
        options.rounds, options.steps = 2, 5
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows, details, absent = measure(options.rounds, options.steps, Path(folder))
    met = write_results(options.output, "C1: host cost of a step", rows, details, absent)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())

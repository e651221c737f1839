"""A toy trained on real processes, for what the recipe does not show: reductions, agreement, exactness.

Started like a recipe (``accel-train rehearse ... tests/distributed/worker.py TASK``); prints one JSON line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.checkpoints import contents, restore
from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.checkpoints.run import Run
from accel_train.checkpoints.saver import Saver
from accel_train.config import UsageError
from accel_train.hub.options import HubConfig
from accel_train.runtime.accelerator import build_accelerator
from accel_train.runtime.distributed_options import DistributedConfig
from accel_train.runtime.exiting import run_main
from accel_train.runtime.strategy import strategy_of, verify_prepared
from accel_train.store import atomic_files, commit, planning
from accel_train.training.accumulation import GradientWindow
from accel_train.training.ema import Ema, EmaConfig, build_ema
from accel_train.training.optimizer_choice import OWN, TABLE, refuse_combination
from accel_train.training.optimizer_classes import muon
from accel_train.training.optimizers import OptimizerConfig, build_optimizer, set_frozen, set_learning_rate
from accel_train.training.shards import Shards, exact_masters
from accel_train.training.step_guard import NonFiniteError, StepGuard

GLOBAL_BATCH, MICRO_BATCH, WIDTH = 16, 2, 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Wide(nn.Module):
    """A block of matrices that are not square, whose rows two processes cannot share evenly, and of 4096 values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 181), nn.Linear(181, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Toy(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self._no_split_modules = (block.__name__,)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head, self.other = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.to(self.head.weight.dtype)  # as the weights compute: bf16 under FSDP2 and ZeRO
        for block in self.blocks:
            x = block(x)
        return self.head(x), self.other(x)


def build(accelerator: Accelerator) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Toy()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    return accelerator.prepare(model, torch.optim.AdamW(groups, lr=1e-2, fused=True))


def micro_batches(
    accelerator: Accelerator, step: int, size: int = MICRO_BATCH
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """This rank's share of the step's batch; the ``aux`` term's weight varies from sample to sample."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(GLOBAL_BATCH, WIDTH, generator=generator), torch.randn(GLOBAL_BATCH, 1, generator=generator)
    weight = torch.rand(GLOBAL_BATCH, 1, generator=generator)
    share = torch.arange(GLOBAL_BATCH).tensor_split(accelerator.num_processes)[accelerator.process_index]
    cut: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    for index in share.split(size):
        inputs = {"x": x[index], "y": y[index], "weight": weight[index], "sample": index}
        cut.append((inputs, {"main": torch.tensor(float(len(index))), "aux": weight[index].sum()}))
    return cut


def loss_sums(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    main, aux = model(inputs["x"])
    return {"main": (main - inputs["y"]).square().sum(), "aux": (aux.square() * inputs["weight"]).sum()}


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: int, sync: Any) -> Iterator[tuple[int, Any]]:
    for step in range(steps):
        coefficients = {"main": 1.0, "aux": 0.5 if step % 2 else 0.0}
        window = GradientWindow(accelerator, model, micro_batches(accelerator, step), coefficients, step, sync)
        for inputs in window:
            window.backward(loss_sums(model, inputs))
        result = window.finish(1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield step, result


def trajectory(accelerator: Accelerator, sync: Any) -> dict[str, Any]:
    """Losses, and norms of weights, momentum and average after 8 steps; and that cut and full are inverse."""
    model, optimizer = build(accelerator)
    shards = Shards(model, optimizer)
    ema = Ema(EmaConfig(0.9), shards)
    losses: list[float] = []
    for step, result in train(accelerator, model, optimizer, 8, sync):
        ema.update(step)
        losses.append(float(result.loss))
    names = list(shards.parameters)
    whole = {name: shards.full(name, shards.master(name)).clone() for name in names}
    with ema.applied(), torch.no_grad():
        averaged = float(model(torch.ones(2, WIDTH))[0].sum())
    after = {name: shards.full(name, shards.master(name)) for name in names}
    return {
        "losses": losses,
        "weights": float(sum(w.double().square().sum() for w in whole.values())),
        "exp_avg": float(sum(shards.full(n, shards.state(n, "exp_avg")).double().square().sum() for n in names)),
        "ema": float(sum(shards.full(n, ema.averages[n]).double().square().sum() for n in names)),
        "averaged_output": averaged,
        "evaluation_left_no_trace": all(torch.equal(whole[n], after[n]) for n in names),
        "inverse": all(torch.equal(shards.full(n, shards.shard_of(n, whole[n])), whole[n]) for n in names),
    }


REDUCTIONS = ("gloo:all_reduce", "gloo:reduce")
"""gloo's own events, which carry shapes; it builds reduce-scatter from an all-reduce of the whole."""


def reductions(accelerator: Accelerator, sync: Any) -> dict[str, Any]:
    """How many elements are reduced over ranks in one step, as a multiple of the number of parameters.

    Small reductions (weights, losses, the norm) are left out by their size.
    """
    model, optimizer = build(accelerator)
    for step, _ in train(accelerator, model, optimizer, 1, sync):
        assert step == 0
    total = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        for _ in train(accelerator, model, optimizer, 1, sync):
            pass
    reduced = 0
    for event in profile.events():
        if event.name in REDUCTIONS:
            reduced += max((size for shape in event.input_shapes if (size := _numel(shape)) > 64), default=0)
    return {"reductions": reduced / total, "micro_batches": GLOBAL_BATCH // accelerator.num_processes // MICRO_BATCH}


def _numel(shape: Any) -> int:
    """Elements of a tensor's shape, or of a list of shapes."""
    if not shape:
        return 0
    if isinstance(shape[0], (list, tuple)):
        return sum(_numel(s) for s in shape)
    return int(torch.Size(shape).numel())


def nonfinite(accelerator: Accelerator, where: Any) -> dict[str, Any]:
    """Poison one sample of the last rank in step 3 and report what every rank meets."""
    model, optimizer = build(accelerator)
    shards = Shards(model, optimizer)
    for _ in train(accelerator, model, optimizer, 3, "auto"):
        pass
    before = {n: shards.full(n, shards.master(n)).clone() for n in shards.parameters}
    batches = micro_batches(accelerator, 3)
    poisoned = accelerator.process_index == accelerator.num_processes - 1
    if poisoned and where == "loss":
        batches[-1][0]["y"][0] = float("nan")
    window = GradientWindow(accelerator, model, batches, {"main": 1.0, "aux": 0.5}, 3)
    message = None
    try:
        for inputs in window:
            sums = loss_sums(model, inputs)
            if poisoned and where == "gradient" and inputs is batches[-1][0]:
                sums["main"].register_hook(lambda g: g * float("inf"))
            window.backward(sums)
        window.finish(1.0)
        optimizer.step()
    except NonFiniteError as error:
        message = str(error)
    messages: list[Any] = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(messages, message)
    after = {n: shards.full(n, shards.master(n)) for n in shards.parameters}
    return {"messages": messages, "unmoved": all(torch.equal(before[n], after[n]) for n in before)}


def masters(accelerator: Accelerator, _: Any) -> dict[str, Any]:
    """After ``prepare`` in low precision: are the fp32 masters the weights of the seed, and what computes?"""
    torch.manual_seed(0)
    expected = {n: p.detach().clone() for n, p in Toy().named_parameters()}
    torch.manual_seed(0)
    model = Toy()
    exact = exact_masters(model, "bf16")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    shards = Shards(model, optimizer, exact)
    whole = {n: shards.full(n, shards.master(n)) for n in shards.parameters}
    seen: list[str] = []
    shards.module.head.register_forward_hook(lambda _, i, o: seen.append(str(o.dtype)))
    # Inputs are the model's own business under every strategy; this toy takes them as its weights compute.
    computes_in_bf16 = strategy_of(accelerator) != "ddp"
    x = torch.randn(2, WIDTH, dtype=torch.bfloat16 if computes_in_bf16 else torch.float32)
    model(x)
    return {
        "equal": all(torch.equal(whole[n], expected[n]) for n in expected),
        "types": sorted({str(w.dtype) for w in whole.values()}),
        "computed": seen[0],
    }


@dataclass
class Chosen:
    """A model with an optimizer of the library, and how to train, save and restore it."""

    accelerator: Accelerator
    config: OptimizerConfig
    seed: int
    micro: int

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        model, parts = Toy(Wide), {"first": ["blocks.0"]}
        strategy, precision = strategy_of(self.accelerator), self.accelerator.mixed_precision.replace("no", "fp32")
        optimizer, _ = build_optimizer(
            model, self.config, self.accelerator.device, parts, strategy=strategy, precision=precision
        )
        exact = exact_masters(model, precision)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.shards = Shards(self.model, self.optimizer, exact)
        average = EmaConfig(0.0 if "ScheduleFree" in self.config.name else 0.9)
        self.average = build_ema(average, self.shards, StepGuard(), self.optimizer)

    def train(self, steps: range, saver: Saver | None = None) -> list[float]:
        losses: list[float] = []
        for step in steps:
            batches = micro_batches(self.accelerator, step, self.micro)
            window = GradientWindow(self.accelerator, self.model, batches, {"main": 1.0, "aux": 0.5}, step)
            for inputs in window:
                window.backward(loss_sums(self.model, inputs))
            losses.append(float(window.finish(1.0).loss))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.average.update(step)
            if saver is not None and (step + 1) % (STEPS // 2) == 0:
                saver.save(step + 1)
        return losses

    def saver(self, run: Run) -> Saver:
        def write_extras(folder: Path) -> None:
            (folder / "config.json").write_text("{}")

        return Saver(
            self.accelerator,
            run,
            self.average,
            CheckpointConfig(keep_last=0),
            HubConfig(),
            write_extras,
            epoch=lambda step: 0.0,
        )

    def restored(self, path: Path) -> list[float]:
        """Losses from another seed's weights after restoring a checkpoint of the middle."""
        other = Chosen(self.accelerator, self.config, self.seed + 1, self.micro)
        run = Run(path.parents[1], "toy", commit.verify(path), "", {"experiment": {}, "resolved": {}})
        assert restore.restore(run, self.accelerator, other.shards, other.average) == STEPS // 2
        return other.train(range(STEPS // 2, STEPS))


STEPS = 40


def optimizer(accelerator: Accelerator, option: Any) -> dict[str, Any]:
    """Train with the optimizer of ``option``, save in the middle and at the end, and restore what was saved."""
    asked = json.loads(option)
    calls: list[torch.Size] = []
    real = muon.orthogonalise
    muon.orthogonalise = lambda matrix, dtype: calls.append(matrix.shape) or real(matrix, dtype)
    chosen = Chosen(accelerator, OptimizerConfig(lr=3e-3, **asked["config"]), 0, asked["micro"])
    folder = Path(asked["folder"])
    run = Run(folder, "toy", None, "", {"experiment": {"global_batch_size": GLOBAL_BATCH}, "resolved": {}})
    if accelerator.is_main_process:
        run.checkpoints.mkdir(parents=True)
        atomic_files.write_json_in_place(folder / "run.json", {})
    accelerator.wait_for_everyone()
    with chosen.saver(run) as saver:
        losses = chosen.train(range(STEPS), saver)
    shares: list[Any] = [len(calls)] * accelerator.num_processes
    if accelerator.num_processes > 1:
        torch.distributed.all_gather_object(shares, len(calls))
    shards = chosen.shards
    before = {n: shards.master(n).clone() for n in shards.parameters}
    if asked.get("freeze", True):
        set_frozen(chosen.optimizer, ["first"])
        set_learning_rate(chosen.optimizer, 1.0)
        chosen.train(range(STEPS, STEPS + 2))
    return {
        "losses": losses,
        "state": {key: len(names) for key, names in shards.state_names().items()},
        "orthogonalised": shares,
        "sharded": not shards.replicated,
        "unmoved": sorted({n.rsplit(".", 2)[0] for n in before if torch.equal(before[n], shards.master(n))}),
        "again": chosen.restored(run.checkpoints / f"checkpoint_{STEPS // 2:08d}"),
        "from_elsewhere": chosen.restored(Path(asked["resume"])) if asked.get("resume") else None,
    }


def frozen(accelerator: Accelerator, sync: Any) -> dict[str, Any]:
    """Gradient norms of 3 clipped steps with the first block frozen and of 3 without, and the squared weights then."""
    chosen = Chosen(accelerator, OptimizerConfig(lr=1e-2), 0, MICRO_BATCH)
    norms: list[float] = []
    for parts in (["first"], []):
        set_frozen(chosen.optimizer, parts)
        set_learning_rate(chosen.optimizer, 1.0)
        for _, result in train(accelerator, chosen.model, chosen.optimizer, 3, sync):
            norms.append(float(result.grad_norm))
    shards = chosen.shards
    weights = [shards.full(name, shards.master(name)).double().square().sum() for name in shards.parameters]
    return {"norms": norms, "weights": float(sum(weights))}


EXAMPLES = {OWN: "torch.optim:NAdam"}


def rows(accelerator: Accelerator, option: Any) -> dict[str, Any]:
    """Every optimizer that the table allows under this strategy and precision: losses of a few steps, or the refusal.

    Those that this machine has no device or package for are left out.
    """
    strategy, precision = strategy_of(accelerator), accelerator.mixed_precision.replace("no", "fp32")
    found: dict[str, Any] = {}
    for name in TABLE:
        try:
            refuse_combination(name, strategy, precision, accelerator.device)
        except UsageError as error:
            found[name] = str(error)
            continue
        found[name] = Chosen(
            accelerator, OptimizerConfig(lr=1e-2, name=EXAMPLES.get(name, name)), 0, MICRO_BATCH
        ).train(range(6))
        accelerator.free_memory()
    return found


def exchange(accelerator: Accelerator, option: Any) -> dict[str, Any]:
    """DDP with the options of ``option``: losses, what the wrapper says, and bytes reduced in a late step."""
    chosen = Chosen(accelerator, OptimizerConfig(lr=1e-2), 0, json.loads(option).get("micro", MICRO_BATCH))
    said = verify_prepared(accelerator, chosen.model, 1.0)
    losses = chosen.train(range(STEPS))
    called: list[int] = []
    real = torch.distributed.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        called.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    torch.distributed.all_reduce = all_reduce
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        chosen.train(range(STEPS, STEPS + 1))
    seen = [_numel(event.input_shapes) for event in profile.events() if event.name == "gloo:all_reduce"]
    # A hook reduces from Python, partly in callbacks that the profiler does not see; DDP itself in C++.
    sizes = [size for size in called if size > 16] or [size for size in seen if size > 16]
    return {"losses": losses, "said": said, "reductions": len(sizes), "bytes": 4 * sum(sizes)}


def trained_bytes(accelerator: Accelerator, option: Any) -> dict[str, Any]:
    """Bytes over all ranks that a model with two frozen blocks of three takes, and the names reduced in a step."""
    torch.manual_seed(0)
    model = Toy()
    model.blocks[:2].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-2))
    shards = Shards(model, optimizer)
    ema = Ema(EmaConfig(0.9), shards)
    for _ in train(accelerator, model, optimizer, 2, "last"):
        pass
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        for _ in train(accelerator, model, optimizer, 1, "last"):
            pass
    reduced = [_numel(e.input_shapes) for e in profile.events() if e.name.startswith("gloo:") and "reduce" in e.name]
    run = Run(Path(option), "bytes", None, "", {"experiment": {}, "resolved": {}}, base={"source": "x", "files": {}})
    names = contents.saved_names(shards, run)
    state = shards.state_names()
    planned = planning.plan(
        contents.collections(shards, ema, CheckpointConfig(), state, names),
        {name: shards.shape(name).numel() for name in names},
        accelerator.num_processes,
    )
    state_bytes = sum(4 * shards.state(name, key).numel() for key, of in state.items() for name in of)
    ema_bytes = sum(4 * shard.numel() for shard in ema.averages.values())
    totals: Any = accelerator.reduce(torch.tensor([state_bytes, ema_bytes]), "sum")
    return {
        "trained": sum(4 * shards.shape(name).numel() for name in shards.parameters),
        "state": int(totals[0]),
        "ema": int(totals[1]),
        "snapshot": sum(planned.sizes),
        "reduced": 4 * sum(size for size in reduced if size > 16),
    }


def main(argv: Any) -> None:
    task, option = argv[0], argv[1] if len(argv) > 1 else "auto"
    tasks = {
        "trajectory": trajectory,
        "frozen": frozen,
        "reductions": reductions,
        "nonfinite": nonfinite,
        "masters": masters,
        "optimizer": optimizer,
        "rows": rows,
        "exchange": exchange,
        "trained_bytes": trained_bytes,
    }
    options = {k: v for k, v in json.loads(option).items() if k != "micro"} if task == "exchange" else {}
    accelerator = build_accelerator(
        precision="bf16" if task == "masters" or option == "bf16" else "fp32",
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=json.loads(option).get("micro", MICRO_BATCH) if task == "exchange" else MICRO_BATCH,
        max_grad_norm=1.0,
        distributed=DistributedConfig(**options),
    )
    result = tasks[task](accelerator, option)
    if accelerator.is_main_process:
        print(f"RESULT {json.dumps(result)}", file=sys.stdout, flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    run_main(main)

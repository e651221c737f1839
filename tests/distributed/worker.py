"""A toy trained on real processes, for what the recipe does not show: reductions, agreement, exactness.

Started like a recipe (``accel-train rehearse ... tests/distributed/worker.py TASK``); prints one JSON line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.config import run_main
from accel_train.runtime.accelerator import build_accelerator, strategy_of
from accel_train.training.accumulation import GradientWindow, NonFiniteError
from accel_train.training.ema import Ema, EmaConfig
from accel_train.training.shards import Shards, exact_masters

GLOBAL_BATCH, MICRO_BATCH, WIDTH = 16, 2, 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Toy(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head, self.other = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
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


def micro_batches(accelerator: Accelerator, step: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """This rank's share of the step's batch; the ``aux`` term's weight varies from sample to sample."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(GLOBAL_BATCH, WIDTH, generator=generator), torch.randn(GLOBAL_BATCH, 1, generator=generator)
    weight = torch.rand(GLOBAL_BATCH, 1, generator=generator)
    share = torch.arange(GLOBAL_BATCH).tensor_split(accelerator.num_processes)[accelerator.process_index]
    cut: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    for index in share.split(MICRO_BATCH):
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
        "ema": float(sum(shards.full(n, ema.shards[n]).double().square().sum() for n in names)),
        "averaged_output": averaged,
        "evaluation_left_no_trace": all(torch.equal(whole[n], after[n]) for n in names),
        "inverse": all(torch.equal(shards.full(n, shards.cut(n, whole[n])), whole[n]) for n in names),
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


def main(argv: Any) -> None:
    task, option = argv[0], argv[1] if len(argv) > 1 else "auto"
    tasks = {"trajectory": trajectory, "reductions": reductions, "nonfinite": nonfinite, "masters": masters}
    accelerator = build_accelerator(
        precision="bf16" if task == "masters" else "fp32",
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=MICRO_BATCH,
        max_grad_norm=1.0,
    )
    result = tasks[task](accelerator, option)
    if accelerator.is_main_process:
        print(f"RESULT {json.dumps(result)}", file=sys.stdout, flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    run_main(main)

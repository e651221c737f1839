"""A toy with a bad step of one rank of several, beside the same without that step. Prints one JSON line.

Started like a recipe: ``health_worker.py FOLDER ALTERNATIVES``, the latter a list of options of ``Training`` as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from accel_train.checkpoints.run import Run
from accel_train.runtime.accelerator import build_accelerator
from accel_train.runtime.exiting import run_main
from accel_train.training.feedback.options import BalanceConfig
from accel_train.training.health.evidence import NonFiniteError
from accel_train.training.health.options import HealthConfig
from accel_train.training.optimizers import OptimizerConfig
from benchmarks.reads import HostReads
from tests.distributed.worker import GLOBAL_BATCH
from tests.training.test_health import STEPS, Training, resumed_from, saver_of

HEALTH = HealthConfig(non_finite="skip", max_skipped=1)


def digest(training: Training) -> dict[str, torch.Tensor]:
    """This rank's shards of weights, EMA and optimizer state, and the optimizer's counts of steps."""
    shards = training.shards

    def own(name: str, shard: torch.Tensor) -> torch.Tensor:
        """A copy without the padding of ZeRO-3, which is of no meaning."""
        return shard.detach().reshape(-1)[: shards.extent(name)[1]].clone()

    found = {f"weight {name}": own(name, shards.master(name)) for name in shards.parameters}
    found |= {f"ema {name}": own(name, shard) for name, shard in training.average.averages.items()}
    for key, names in shards.state_names().items():
        found |= {f"{key} {name}": own(name, shards.state(name, key)) for name in names}
    counts = [float(state["step"]) for state in shards._sharding.optimizer.state.values() if "step" in state]
    if training.guard.balance is not None:
        terms = training.guard.balance.state()["terms"]
        found |= {f"balance {name}": torch.tensor(values) for name, values in terms.items()}
    return found | {"counts": torch.tensor(counts)}


def differing(accelerator: Accelerator, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names of what differs on any rank."""
    local = [name for name in a if not torch.equal(a[name], b[name])] if a.keys() == b.keys() else ["names"]
    ranks: list[Any] = [local] * accelerator.num_processes
    torch.distributed.all_gather_object(ranks, local)
    return sorted({name for rank in ranks for name in rank})


def compare(accelerator: Accelerator, options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Skip a NaN in a loss and one in a gradient, and compare with a run without these two steps."""

    def build(resume: Run | None = None) -> Training:
        accelerator.free_memory()
        optimizer = OptimizerConfig(lr=1e-2, name=options.get("optimizer", "adamw"))
        on_device, sync = options.get("on_device", False), options.get("sync", "auto")
        balance = BalanceConfig(options.get("balance", "fixed"))
        return Training(
            optimizer,
            HEALTH,
            on_device=on_device,
            accelerator=accelerator,
            sync=sync,
            resume=resume,
            balance=balance,
        )

    spoiled = build()
    spoiled.train(range(2))
    with HostReads() as reads:
        spoiled.step(2, "loss")
        spoiled.step(3)
    middle = spoiled.train(range(4, 6), "gradient", at=(5,))
    run, saver = saver_of(middle, folder)
    with saver:
        saver.save(6)
    spoiled.train(range(6, STEPS))
    spoiled.guard.check()
    bad = [each for each, _ in spoiled.guard.history.take_unreported()]
    end, message = digest(spoiled), None
    try:
        spoiled.train(range(STEPS, STEPS + 2), "loss", at=(STEPS, STEPS + 1))
        spoiled.guard.check()
    except NonFiniteError as error:
        message = str(error)
    messages: list[Any] = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(messages, message)
    without = digest(build().train([step for step in range(STEPS) if step not in (2, 5)]))
    resumed = build(resumed_from(run, 6))
    return {
        "bad": [[each.step, each.reason, each.samples] for each in bad],
        "without": differing(accelerator, end, without),
        "resumed": differing(accelerator, end, digest(resumed.train(range(6, STEPS)))),
        "counts": sorted(set(end["counts"].tolist())),
        "messages": messages,
        "reads": dict(reads.counts),
    }


def main(argv: Sequence[str]) -> None:
    accelerator = build_accelerator(
        precision="bf16" if "bf16" in argv else "fp32",
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=4,
        max_grad_norm=0.5,
    )
    found: list[Any] = []
    for number, options in enumerate(json.loads(argv[1])):
        found.append(compare(accelerator, options, Path(argv[0]) / str(number)))
    if accelerator.is_main_process:
        print(f"RESULT {json.dumps(found)}", file=sys.stdout, flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    run_main(main)

"""A toy trained with and without the guard on real processes. Prints one JSON line."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from accelerate import Accelerator

from accel_train.config import UsageError
from accel_train.runtime.accelerator import build_accelerator
from accel_train.runtime.exiting import run_main
from accel_train.training.accumulation import GradientWindow
from accel_train.training.shards import Shards
from accel_train.training.step_guard import NonFiniteError, StepGuard, resolve_step_guard
from benchmarks.reads import HostReads
from tests.distributed.worker import GLOBAL_BATCH, MICRO_BATCH, build, loss_sums, micro_batches


class Training:
    """Twelve steps of the toy."""

    def __init__(self, accelerator: Accelerator, guarded: bool) -> None:
        self.accelerator = accelerator
        self.model, self.optimizer = build(accelerator)
        self.guard: StepGuard | None = None
        self.reason = ""
        if guarded:
            self.guard, self.reason = resolve_step_guard(accelerator, self.optimizer, on_cpu=True)
        self.on_device = self.guard is not None and self.guard.on_device
        self.shards = Shards(self.model, self.optimizer)

    def step(self, step: int, spoil: bool = False) -> Any:
        batches = micro_batches(self.accelerator, step)
        if spoil and self.accelerator.process_index == self.accelerator.num_processes - 1:
            batches[-1][0]["y"][0] = float("nan")
        window = GradientWindow(
            self.accelerator, self.model, batches, {"main": 1.0, "aux": 0.5}, step, "auto", self.guard
        )
        for inputs in window:
            window.backward(loss_sums(self.model, inputs))
        result = window.finish(0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return result

    def weights(self) -> list[list[float]]:
        return [self.shards.full(n, self.shards.master(n)).flatten().tolist() for n in self.shards.parameters]


def late_freezing(training: Training) -> str:
    """Freeze a parameter between two steps, and return the error of the second."""
    next(p for p in training.model.parameters() if p.requires_grad).requires_grad_(False)
    try:
        training.step(9)
    except UsageError as error:
        return str(error)
    return "none"


def main(_: Any) -> None:
    accelerator = build_accelerator(
        precision="fp32", global_batch_size=GLOBAL_BATCH, micro_batch_size=MICRO_BATCH, max_grad_norm=0.5
    )
    found: dict[str, Any] = {}
    for name in ("plain", "guarded"):
        training = Training(accelerator, name == "guarded")
        losses = [training.step(step).fields()["loss"] for step in range(6)]
        found[name] = {"losses": losses, "weights": training.weights()}
        found["reason"] = training.reason
        if not training.on_device and name == "guarded":
            found["late"] = late_freezing(training)
            break
        if name == "guarded":
            with HostReads() as reads:
                training.step(6)
            before = training.weights()
            training.step(7, spoil=True)
            training.step(8)
            message = None
            try:
                training.guard.check()  # type: ignore[union-attr]
            except NonFiniteError as error:
                message = str(error)
            messages: list[Any] = [None] * accelerator.num_processes
            torch.distributed.all_gather_object(messages, message)
            found |= {
                "reads": dict(reads.counts),
                "messages": messages,
                "unmoved": before == training.weights(),
            }
            found["late"] = late_freezing(training)
        accelerator.free_memory()
    if accelerator.is_main_process:
        print(f"RESULT {json.dumps(found)}", file=sys.stdout, flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    run_main(main)

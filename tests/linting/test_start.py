"""A start of a recipe logs what the rules find: once at each stage, on the main process, within its time."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from accel_train.config import UsageError
from accel_train.linting.host import facts_of_start
from accel_train.linting.reporting import LOGGED, log_findings
from accel_train.linting.table import lint
from accel_train.options.loading import load_config
from accel_train.runtime.accelerator import build_accelerator
from recipes import mmdit
from tests.distributed.launching import Layout, run_recipe

ROOT = Path(__file__).parents[2]
LONG = ("--max_steps", "1000", "--output_dir", str(ROOT / "runs" / "long"))
WRONG = ("--optimizer.betas", "0.99", "0.9", "--checkpoints.keep_last", "1")


@dataclass
class Process:
    """What the linter reads of an accelerator."""

    is_main_process: bool
    accelerator: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.accelerator, name)


@pytest.fixture(scope="module")
def accelerator() -> Iterator[Any]:
    yield build_accelerator(precision="fp32", global_batch_size=4, micro_batch_size=4, max_grad_norm=1.0)
    for state in (AcceleratorState, PartialState):
        state._reset_state()
    GradientState._reset_state()


def config_of(*flags: str) -> Any:
    return load_config(mmdit.Config, ["demo", *LONG, *flags], presets=ROOT / "recipes" / "presets").config


def logged(caplog: pytest.LogCaptureFixture, config: Any, accelerator: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        log_findings(config, accelerator, "start")
    return [message for message in caplog.messages if message.endswith("]") or "more finding(s)" in message]


def test_findings_are_lines_of_the_log(
    accelerator: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_TRAIN_IGNORE", "output-in-temporary,output-in-container,cpu-beside-devices")
    assert logged(caplog, config_of(), accelerator) == []
    lines = logged(caplog, config_of(*WRONG), accelerator)
    assert [line.rsplit(" ", 1)[1] for line in lines] == ["[one-checkpoint]", "[swapped-betas]"]
    assert lines[1].startswith("optimizer.betas: [0.99, 0.9]: the squares are forgotten in 10 steps, the mean in 100: ")
    assert logged(caplog, config_of(*WRONG), Process(False, accelerator)) == []
    assert logged(caplog, config_of(*WRONG, "--evaluate_only"), accelerator) == []
    many = (
        "--optimizer.eps",
        "0.1",
        "--optimizer.lr",
        "1",
        "--log.log_every",
        "1000",
        "--optimizer.max_grad_norm",
        "0",
    )
    more = ("--schedule.warmup_steps", "900", "--checkpoints.save_every", "2000")
    lines = logged(caplog, config_of(*WRONG, *many, *more), accelerator)
    assert len(lines) == LOGGED + 1
    assert lines[-1].startswith("1 more finding(s): `accel-train check`")


def test_a_start_goes_on_so_that_no_finding_is_an_error_of_its_log(
    accelerator: Any, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = ("--micro_batch_size", "1", "--compile.mode", "on", "--compile.optimize", "reduce-overhead")
    # A start refuses it in words of its own, if it trains at all.
    warmup = ("--schedule.warmup_steps", "2000")
    lines = logged(caplog, config_of(*graphs, *warmup), accelerator)
    assert any(line.endswith("[cuda-graphs-with-accumulation]") for line in lines)
    assert not any(line.endswith("[warmup-beyond-the-run]") for line in lines)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_an_unknown_name_is_refused_on_every_process(accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TRAIN_IGNORE", "swapped-beta")
    with pytest.raises(UsageError, match=r"did you mean 'swapped-betas'\?\); .* --explain or ACCEL_TRAIN_IGNORE"):
        log_findings(config_of(), Process(False, accelerator), "start")


def test_a_start_pays_less_than_fifty_milliseconds(accelerator: Any) -> None:
    config = config_of()
    lint(facts_of_start(config, accelerator))
    spent: list[float] = []
    for _ in range(5):
        began = time.process_time()
        lint(facts_of_start(config, accelerator))
        spent.append(time.process_time() - began)
    # CPU time, the least of five: another process does not count.
    assert min(spent) < 0.05


def test_threads_that_a_launcher_has_set_are_not_those_of_a_person(
    accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1000")
    names = [rule.name for rule, _ in lint(facts_of_start(config_of(), accelerator))]
    assert "threads-above-cores" in names
    monkeypatch.setenv("ACCEL_TRAIN_THREADS_UNASKED", "1")
    names = [rule.name for rule, _ in lint(facts_of_start(config_of(), accelerator))]
    assert "threads-above-cores" not in names


def test_processes_and_machines_are_those_that_came_up(accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    twelve = SimpleNamespace(
        num_processes=12, device=torch.device("cuda"), distributed_type=accelerator.distributed_type, state=None
    )
    layout = facts_of_start(config_of(), twelve).layout
    assert (layout.strategy, layout.processes, layout.machines, layout.local_processes) == ("ddp", 12, 3, 4)
    assert layout.device == "cuda"


def test_each_stage_of_a_start_knows_what_the_run_knows(tmp_path: Path) -> None:
    """A hundred passes over a small file, and more checkpoints than any disk holds. A refusal then ends the run."""
    data = tmp_path / "texts.jsonl"
    texts = [f"the {number} small ships sail to the harbour of the {number * 7} towns" for number in range(24)]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    flags = [
        "--data.path",
        str(data),
        "--data.heldout_fraction",
        "0.2",
        "--data.packing",
        "false",
        "--max_steps",
        "101",
    ]
    flags += ["--global_batch_size", "21", "--optimizer.betas", "0.99", "0.9", "--checkpoints.keep_last", str(10**9)]
    # It needs a GPU, which is asked for once the model is built.
    flags += ["--compile.mode", "on", "--compile.optimize", "reduce-overhead", "--micro_batch_size", "21"]
    done = run_recipe(Layout("single", 1, "causal_lm"), tmp_path / "run", *flags, ok=False)
    assert done.code == 2
    lines = [line for line in done.output.splitlines() if line.endswith("]") and "warning:" in line]
    names = [line.rsplit(" ", 1)[1] for line in lines]
    assert names == ["[swapped-betas]", "[many-passes]", "[checkpoints-above-disk]"]
    assert "the run passes over 21 samples 101 times" in lines[1]
    assert "1000000001 checkpoints of " in lines[2]

"""No speed option changes what is trained: attention, compilation, activation checkpointing, strategy and length
buckets, in pairs.

Every value of an option meets every value of each other one in some run; each run is compared with plain math
attention, uncompiled, nothing checkpointed, all texts padded alike, in one process (issue 4, must hold 7).
"""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest

from accel_train.metrics.records import read_metrics
from tests.distributed.launching import Finished, Layout, run_recipe
from tests.speed.checkpointing import MODES, PARTIAL, config_of, flags_of
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.distributed

STEPS = 8
SHORT = (
    f"--max_steps {STEPS} --schedule.warmup_steps 2 --model.width 64 --model.depth 3 --model.heads 2 "
    "--micro_batch_size 4 --checkpoints.save_state false"
).split()
STEPS_PDE = 16
SHORT_PDE = f"--max_steps {STEPS_PDE} --micro_batch_size 4 --checkpoints.save_state false".split()
"""Into the third stage."""
STRATEGIES = ("single", "ddp", "fsdp2", "zero2", "zero3")
ATTENTION = ("sdpa", "sdpa_math", "sdpa_flash")
LENGTHS = ("padded", "buckets")
REFUSED = {("on", "zero3"), ("sdpa_math", "on")}
"""ZeRO-3 fetches weights in hooks inside the blocks, which cannot be compiled as one graph; the compiler puts another
kernel in the place of math attention."""
FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"
KERNELS = {
    name: [f"{FLASH}{part}.default" for part in ("", "_backward")] if name != "sdpa_math" else []
    for name in ("sdpa", "sdpa_flash", "sdpa_math")
}
"""What really runs on a CPU under each name; math attention is made of matrix products."""
IN_BF16 = (
    ("sdpa_flash", "off", "full", "single"),
    ("sdpa", "on", "selective", "single"),
    ("sdpa_flash", "on", PARTIAL, "single"),
    ("sdpa_math", "off", "ffn", "ddp"),
    ("sdpa", "off", "attention", "ddp"),
    ("sdpa_flash", "on", "none", "ddp"),
)
OF_PDE = (
    ("sdpa_flash", "off", "full", "single"),
    ("sdpa_flash", "off", "selective", "ddp"),
    ("sdpa_math", "off", "ffn", "fsdp2"),
    ("sdpa", "off", "attention", "zero2"),
    ("sdpa_flash", "off", PARTIAL, "zero3"),
    ("sdpa", "on", "none", "single"),  # minutes: each task and stage has shapes of its own
)
"""Each value of each option once or more, with -m slow. Rows of the MMDiT in fp32 run every day, and so do the kernels
in bf16 (tests/speed/test_attention_kernels.py)."""
BF16_TOLERANCE = 1e-3
"""Of a loss, relative. Measured on a CPU over four of the rows: 1.3e-5 to 5.2e-5."""


Row = tuple[str, str, str, str, str]


def runs() -> list[Row]:
    """(attention, compile, activation checkpointing, strategy, lengths): every checkpointing with every strategy, and
    to each the other three that bring most pairs not seen before."""
    rows: list[Row] = []
    seen: set[tuple[str, str]] = set()
    order = random.Random(0)  # of those that bring equally many
    for kept, strategy in itertools.product(MODES, STRATEGIES):
        others = itertools.product(ATTENTION, ("off", "on"), LENGTHS)
        found = [(attention, compiled, kept, strategy, lengths) for attention, compiled, lengths in others]
        allowed = [row for row in found if not REFUSED & pairs(row)]
        order.shuffle(allowed)
        rows.append(max(allowed, key=lambda row: len(pairs(row) - seen)))
        seen |= pairs(rows[-1])
    return rows


def pairs(row: tuple[str, ...]) -> set[tuple[str, str]]:
    return set(itertools.combinations(row, 2))


QUICK = {("off", "attention", "ddp"), ("off", "selective", "single")}


def parameters() -> list[object]:
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(*row, marks=marks[row[1:4] in QUICK], id="-".join(row)) for row in runs()]


def test_every_pair_of_values_is_in_some_run() -> None:
    values = (ATTENTION, ("off", "on"), MODES, STRATEGIES, LENGTHS)
    assert len(runs()) == len(MODES) * len(STRATEGIES)
    assert {row[1:4] for row in runs()} >= QUICK
    assert {row[4] for row in runs() if row[1:4] in QUICK} == set(LENGTHS)
    for a, b in itertools.combinations(range(len(values)), 2):
        wanted = set(itertools.product(values[a], values[b])) - REFUSED
        assert wanted == {(row[a], row[b]) for row in runs()}, (a, b)


def train(folder: Path, strategy: str, *flags: str, ok: bool = True, recipe: str = "mmdit") -> Finished:
    layout = Layout(strategy, 1 if strategy == "single" else 2, recipe)
    short, timeout = (SHORT, PATIENCE_SECONDS) if recipe == "mmdit" else (SHORT_PDE, 1200)
    return run_recipe(layout, folder / "run", *short, *flags, ok=ok, timeout=timeout)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return train(tmp_path_factory.mktemp("reference"), "single", "--attention", "sdpa_math")


@pytest.fixture(scope="module")
def reference_in_bf16(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return train(tmp_path_factory.mktemp("bf16"), "single", "--attention", "sdpa_math", "--precision", "bf16")


@pytest.fixture(scope="module")
def reference_of_pde(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return train(tmp_path_factory.mktemp("pde"), "single", "--attention", "sdpa_math", recipe="pde")


def apart(reference: Finished, run: Finished) -> float:
    """The largest difference of two losses of a step, relative."""
    expected, found = reference.losses(), run.losses()
    assert len(found) == len(expected) > 0
    return max(abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True))


def obeyed(run: Finished, attention: str, compiled: str, kept: str) -> None:
    """The log names what was asked for, and the record of the run the kernel that really ran."""
    assert f"attention {attention} " in run.output
    assert f"activation checkpointing: {config_of(kept).mode}" in run.output
    assert re.search("compile: off" if compiled == "off" else r"compile: [1-9]\d* blocks", run.output)
    record = next(r for r in read_metrics(run.directory / "metrics.jsonl") if r["event"] == "environment")
    assert record["attention"] == attention
    assert record["attention_kernels"] == KERNELS[attention]


@pytest.mark.parametrize(("attention", "compiled", "kept", "strategy", "lengths"), parameters())
def test_losses_are_those_of_the_plain_run(
    attention: str, compiled: str, kept: str, strategy: str, lengths: str, reference: Finished, tmp_path: Path
) -> None:
    flags = ["--attention", attention, "--compile.mode", compiled, *flags_of(kept)]
    if lengths == "buckets":
        flags += ["--loader.bucket_by_length", "true"]
    run = train(tmp_path, strategy, *flags)
    obeyed(run, attention, compiled, kept)
    padded = re.search(r"padded to ([\d, ]+) tokens", run.output)
    assert (padded is not None) is (lengths == "buckets")
    assert (worst := apart(reference, run)) < 1e-5, f"{worst:.1e}"
    if compiled == "on":
        last = run.train_lines()[STEPS]
        assert last["compile_graphs"] >= 1
        codes, shapes = 1 + (kept == PARTIAL), len(padded[1].split(",")) if padded else 1
        assert last["compile_recompilations"] <= codes * (shapes - 1)  # once for each length


def rows(given: tuple[tuple[str, str, str, str], ...]) -> list[object]:
    return [pytest.param(*row, marks=pytest.mark.slow, id="-".join(row)) for row in given]


@pytest.mark.parametrize(("attention", "compiled", "kept", "strategy"), rows(IN_BF16))
def test_losses_in_bf16_are_near_those_of_the_plain_run(
    attention: str, compiled: str, kept: str, strategy: str, reference_in_bf16: Finished, tmp_path: Path
) -> None:
    flags = ("--attention", attention, "--compile.mode", compiled, *flags_of(kept))
    run = train(tmp_path, strategy, *flags, "--precision", "bf16")
    obeyed(run, attention, compiled, kept)
    worst = apart(reference_in_bf16, run)
    print(f"bf16: losses apart by {worst:.1e}")
    assert worst < BF16_TOLERANCE


@pytest.mark.parametrize(("attention", "compiled", "kept", "strategy"), rows(OF_PDE))
def test_losses_of_pde_are_those_of_the_plain_run(
    attention: str, compiled: str, kept: str, strategy: str, reference_of_pde: Finished, tmp_path: Path
) -> None:
    flags = ("--attention", attention, "--compile.mode", compiled, *flags_of(kept))
    run = train(tmp_path, strategy, *flags, recipe="pde")
    obeyed(run, attention, compiled, kept)
    worst = apart(reference_of_pde, run)
    print(f"pde: losses apart by {worst:.1e}")
    assert worst < 1e-5


def test_what_cannot_be_compiled_stops_with_the_cause(tmp_path: Path) -> None:
    run = train(tmp_path, "zero3", "--compile.mode", "on", ok=False)
    assert run.code != 0
    assert "compile.mode on: torch.compile failed: ZeRO-3 fetches weights in hooks" in run.output
    assert "Set compile.mode to auto" in run.output


@pytest.mark.slow
def test_auto_leaves_blocks_uncompiled_on_a_cpu_and_says_so(reference: Finished, tmp_path: Path) -> None:
    run = train(tmp_path, "zero3", "--compile.mode", "auto")
    assert "compile: off (auto: on a CPU" in run.output
    assert max(abs(a - b) / abs(a) for a, b in zip(reference.losses(), run.losses(), strict=True)) < 1e-5

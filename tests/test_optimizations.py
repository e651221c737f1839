"""docs/optimizations.md: each figure of the column "Measured" is that of its own row of benchmarks/results."""

from __future__ import annotations

import re

import pytest

from benchmarks.method import Row, cells
from benchmarks.performance_page import effect
from tests.test_claims import ablation_of, rows_of
from tests.test_docs import ROOT

PAGE = ROOT / "docs" / "optimizations.md"
FIGURE = re.compile(r"\d+\.\d+(?: x(?: \([^)]*\))?| [A-Za-z]+)?|\d+ x(?: \([^)]*\))?")
MMDIT, PDE, DDP, COMPILE = "ablation_mmdit_cpu", "ablation_pde_cpu", "exchange_cpu", "compile_cpu"
CPU, GPU, MEMORY = "activation_checkpointing_cpu", "gpu_checkpointing", "activation memory over none"
ASYNCHRONOUS = "checkpoints.asynchronous: False -> True"
STEP = "speed of a step"
MEASURED: dict[str, list[tuple[str, str]]] = {
    "attention": [(recipe, "attention: 'sdpa_math' -> 'auto'") for recipe in (PDE, MMDIT)],
    "compile.mode on": [
        *((COMPILE, f"{size}: {STEP} over eager") for size in ("15M", "2M")),
        *((recipe, "on top of all: compile.mode=on") for recipe in (MMDIT, PDE)),
    ],
    "compile.optimize": [
        (COMPILE, "2M, 3 lengths: cold compile with compile.dynamic over without"),
        (COMPILE, f"2M, 3 lengths: {STEP} over eager with compile.dynamic"),
        (COMPILE, f"2M, 3 lengths: {STEP} over eager without"),
        (COMPILE, f"2M, max-autotune-no-cudagraphs: {STEP} over eager"),
        (COMPILE, f"2M: {STEP} over eager"),
        ("gpu_small", "launch-bound, 12 x 768, 16 rows: speed over the usual script on diffusers' model"),
    ],
    "activation_checkpointing.mode": [
        *((GPU, f"{mode}: {what}") for mode in ("selective", "full") for what in (MEMORY, "time over none")),
        *((CPU, f"selective: {what}") for what in ("peak of its tensors", "growth of the process's peak", "time")),
        *((CPU, f"full: {what}") for what in ("peak of its tensors", "growth of the process's peak", "time")),
        (PDE, "on top of all: activation_checkpointing.mode=full"),
    ],
    "precision bf16": [(recipe, "on top of all: precision=bf16 (another precision)") for recipe in (PDE, MMDIT)],
    "optimizer.fused": [
        ("optimizer_cpu", "74M values in 80 tensors: speed of fused AdamW over the for-loop"),
        ("optimizer_cpu", "1.25M values in 600 tensors: speed of fused AdamW over the for-loop"),
        *((recipe, "optimizer.fused: False -> True") for recipe in (MMDIT, PDE)),
        ("gpu_optimizer", "1.95 B values: speed of fused AdamW over for-loop"),
        ("gpu_optimizer", "1.95 B values: norm, clip, AdamW, average"),
    ],
    "optimizer.name muon": [
        ("muon_cpu", "steps to AdamW's best loss, Muon over AdamW"),
        ("muon_cpu", "seconds to AdamW's best loss, Muon over AdamW"),
        ("muon_cpu", "loss at the end, best of Muon over best of AdamW"),
        ("muon_cpu", "held-out error, best of Muon over best of AdamW"),
    ],
    "optimizer.name adamw8bit": [
        ("gpu_offload", "memory of the device saved"),
        *(("gpu_offload", f"time over state on the device, 32 rows, accumulation {n}") for n in (1, 8)),
    ],
    "float8": [("gpu_float8", "float8 over bf16: speed")],
    "checkpoints.asynchronous": [
        *((recipe, ASYNCHRONOUS) for recipe in (MMDIT, PDE)),
        ("checkpoint_cpu_1500", "1500 MB, ours: speed the loop keeps"),
        ("checkpoint_cpu_1500", "1500 MB, a thread with torch.save: speed the loop keeps"),
    ],
    "loader.bucket_by_length": [(MMDIT, "loader.bucket_by_length: False -> True")],
    "loader.prefetch_factor": [
        ("data_loading_cpu", f"prefetch_factor {n} over 2, {reads}: {STEP}")
        for reads in ("reads alike", "one read in ten takes 5 steps")
        for n in (1, 8)
    ],
    "sync": [
        ("accumulation_cpu", "bytes reduced with a reduction on every micro-batch over once"),
        ("accumulation_cpu", "speed of one reduction per step over one per micro-batch"),
    ],
    "distributed.gradient_as_bucket_view": [
        (DDP, "gradient_as_bucket_view: memory of gradients and buckets over that without"),
        (DDP, "gradient_as_bucket_view: speed over without"),
    ],
    "distributed.bucket_cap_mb": [(DDP, f"bucket_cap_mb {n}: speed over the default") for n in (1, 100)],
    "distributed.static_graph": [(DDP, "static_graph: speed over the default")],
    "distributed.comm_hook": [
        (DDP, f"powersgd, rank {rank}: {what}")
        for what in (
            "bytes over whole gradients",
            "memory over the default's",
            "speed over whole gradients in one bucket",
        )
        for rank in (1, 4)
    ],
}
"""By option, file and row of each figure of its cell, in the order in which the cell has them."""
ELSEWHERE = {
    "offload_frozen": ["0.8 GiB", "11.2"],  # counted by tests/speed/test_frozen_offload.py
    "optimizer.fused": ["1.25 M"],  # a number of values
    "float8": ["1.25 x"],  # torchao's own
}


def measured() -> dict[str, str]:
    """The cell "Measured" of each option of the first table."""
    table = PAGE.read_text().split("| Option |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line[1:-1].split(" |")] for line in table]
    return {row[0].split("`")[1]: row[2] for row in rows}


def figure(file: str, row: str) -> str:
    """As docs/performance.md has it, with its interval, and whether that shows an effect."""
    speed = ablation_of(file).get(row)
    if speed is not None:
        return effect(*speed)
    found: Row = rows_of(file)[row]
    value, between, _, _ = cells(found)
    if not value.endswith(" x") or found.interval is None:
        return value
    none = ", no effect" if found.interval[0] <= 1 <= found.interval[1] else ""
    return f"{value} ({between}{none})"


@pytest.mark.parametrize("option", measured())
def test_figures_are_those_of_their_rows(option: str) -> None:
    shown = FIGURE.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", "", measured()[option]))
    shown = [text for text in shown if text not in ELSEWHERE.get(option, [])]
    assert shown == [figure(file, row) for file, row in MEASURED.get(option, [])]


def test_every_option_with_figures_is_in_the_table() -> None:
    assert MEASURED.keys() <= measured().keys()


@pytest.mark.parametrize("mode", ["selective"])
def test_the_help_of_activation_checkpointing_has_the_measured_time(mode: str) -> None:
    more = round(100 * (rows_of(CPU)[f"{mode}: time"].value - 1))
    help_text = (
        (ROOT / "docs" / "options.md").read_text().split("`--activation_checkpointing.mode` |")[1].split("\n")[0]
    )
    assert (
        f"{mode}: recompute everything except matrix products and attention: half of the memory for {more} % more"
        in help_text
    )

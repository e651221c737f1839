"""docs/performance.md, generated from benchmarks/results/*.json alone.

python -m benchmarks.performance_page            # write it
python -m benchmarks.performance_page --check    # exit code 1 if it does not match the results
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from accel_train.compare.comparison import Request
from benchmarks.method import RESULTS, ROOT, SCHEMA, Row, cells

PAGE = ROOT / "docs" / "performance.md"
NOT_YET = "not yet measured"

CPU_ROWS = {
    "C1": "What the loop costs the host per step",
    "C2": "The MMDiT block against diffusers'",
    "C3": "Optimizers",
    "C4": "Saving while the loop runs",
    "C5": "Activation checkpointing",
    "C6": "Compiling",
    "C7": "Reading training data",
    "C8": "One reduction per optimizer step",
    "C9": "Fraction of the machine's matrix product rate",
    "C10": "Gradient communication: the options of DDP",
}
BOUNDS = {
    "C3": "Norm, step and average read and write 44 bytes a value and the step alone 28: their ratio is what a machine "
    "can reach whose memory is the limit. Of 600 small tensors the calls take the time instead. On a GPU one kernel "
    "does step and average ([G5](#g5-adamw-clipping-and-ema-over-203-b-parameters)).",
    "C4": "The call blocks for one copy of the state, so the row of such a copy is its bound. Behind it the writer "
    "hashes on the other core, which takes memory and caches from the loop, as the row of a foreign process shows.",
    "C8": "A backward leaves no core idle here, so the one reduction cannot be hidden: the bound adds what gloo takes "
    "for it to a step without any.",
    "C9": "The bound is a step's own products and attention, with their shapes and nothing else. What a step lies below "
    "it is the time of what lies between them: norms, modulation, activations and their gradients.",
    "G1": "Of the 382 ms of the traced step, an MFU of 0.457, products, attention and AdamW take 314, at the rates of "
    "G0 and G5. Compiled kernels take 65 ms. They move 245 GB by the compiler's own count, and 228 since then (`CHAIN` "
    "in `accel_train/speed/inductor.py`; what that gains is not yet measured). At the rate of a copy (G0) that takes "
    "54 ms, so 368 ms, an MFU of 0.474, is the bound of a step with these kernels. The goal of 0.48 needs fewer bytes, "
    "as from a GELU inside the product before it, which torch does not offer. `reduce-overhead` gains nothing here: "
    "387 ms.",
}
"""Why a target is missed, by the row of the suite."""
GPU_ROWS = {
    "G0": "Ceilings of the device: matrix products, copies, attention backends",
    "G1": "MMDiT of SD3-medium's shape and a launch-bound small one, against a typical script and a strong one",
    "G2": "The trainer against a raw loop around the same model; waits per step",
    "G3": "Saving SD3-medium's weights and AdamW's state while they train",
    "G4": "Activation checkpointing: memory against time",
    "G5": "AdamW, clipping and EMA over 2.03 B parameters",
    "G6": "Compile times",
    "G7": "Data wait",
    "G8": "Optimizer state in host memory: what it saves and what it costs",
}
GPU_TARGETS = {
    "G1": "our loss is that of diffusers' model with its weights; MFU >= 0.45, goal 0.48 at head size 64 and 0.50 at "
    "128, >= 0.42 at 4096 tokens; >= 1.08 x the strong loop, >= 1.3 x the typical script; launch-bound >= 3 x the "
    "typical script; float8 >= 1.12 x bf16",
    "G2": "losses of the two from the same weights within 0.1 % in bf16; <= 1.003 at the large step, <= 1.02 at a 5 ms "
    "step; no wait in a step that does not log",
    "G3": "at 24.3 GB blocked <= 30 ms, hidden <= 150 ms, transfer to the host >= 0.9 of a copy into pinned memory; "
    ">= 50 x less time lost than with Accelerator.save_state",
    "G4": "-50 % activation memory at <= +12 %; full <= +28 %",
    "G5": "<= 23 ms",
    "G6": "cold <= 25 s, >= 4 x faster than the whole model, step within 2 %, warm <= 5 s",
    "G7": "<= 0.3 % of a step",
    "G8": "<= +20 % at accumulation 1, <= +5 % at 8; saves >= 16.2 GB; saves memory, never time",
}


@dataclass(frozen=True)
class Result:
    """One file."""

    name: str
    title: str
    environment: dict[str, Any]
    absent: dict[str, str]
    rows: list[Row]
    details: dict[str, Any]


def read(folder: Path) -> list[Result]:
    """Every result of the suite in a folder, by name. Raises ``ValueError`` for a file that is not one."""
    known = {f.name for f in fields(Row)}
    found: list[Result] = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if content.get("schema") != SCHEMA:
            raise ValueError(f"{path.name} has schema {content.get('schema')}, this page reads {SCHEMA}: run it again")
        rows = [Row(**{k: v for k, v in r.items() if k in known}) for r in content["rows"]]
        environment, absent = content["environment"], content.get("absent", {})
        found.append(Result(path.stem, content["title"], environment, absent, rows, content.get("details", {})))
    return found


def page(folder: Path) -> str:
    """The whole text."""
    results = read(folder)
    parts = [HEAD, *summary(results)]
    for id, title in CPU_ROWS.items():
        parts += ["", f"## {id}: {title}", "", *table_of(id, results)]
        if id in BOUNDS:
            parts += ["", BOUNDS[id]]
    parts += ["", "## One GPU", "", GPU_WORDS, ""]
    for id, title in GPU_ROWS.items():
        parts += [f"### {id}: {title}", "", *gpu_table(id, results), ""]
        if id in BOUNDS:
            parts += [BOUNDS[id], ""]
    parts += ["### Launch files", "", *table_of("presets", results), ""]
    parts += ["## Options one by one", "", *ablations(results), ""]
    parts += ["### Where a step goes", "", DEMO_STEPS_WORDS, "", *table_of("demo_steps", results), ""]
    parts += ["## Muon against AdamW", "", *muon(results), ""]
    parts += [
        "## Scaling",
        "",
        *scaling(results),
        "",
        "## Random numbers",
        "",
        RNG_WORDS,
        "",
        *table_of("rng", results),
    ]
    parts += ["", "## Pictures", "", *table_of("pictures", results)]
    parts += ["", "## Language models", "", *table_of("causal_lm", results)]
    parts += ["", "## The first second", "", STARTUP_WORDS, "", *table_of("startup", results)]
    parts += ["", "## Metrics and health checks", "", *table_of("reporting", results)]
    parts += ["", "## Where these numbers come from", "", *origins(results)]
    return "\n".join(parts) + "\n"


HEAD = """<!-- Generated from benchmarks/results/*.json by python -m benchmarks.performance_page. Do not edit. -->
# Performance

How to read this page:

- Every value is a ratio, or stands beside its peer, from one run on one machine. All variants of a comparison
  alternate in one process.
- Times are processor time of one thread unless stated otherwise. Each value is the median over the rounds, with a
  bootstrap 95 % interval.
- A target is missed (**FAILED**) only if the whole interval misses it, and not decided if the interval includes it.
- Counts are exact. Anything that has not been run is marked "not yet measured".

```
python -m benchmarks.suite                    # every row that needs no GPU, then this page
python -m benchmarks.loop --output FILE.json  # one row
python -m benchmarks.checkpoint --state_mb 1500 --output FILE.json
python -m benchmarks.ablation pde --output FILE.json
python -m benchmarks.muon --output FILE.json
```

Purpose and risks of each option: [optimizations.md](optimizations.md)."""

GPU_WORDS = """`python -m benchmarks.gpu` measures these on one device, with one file per part; `--only PART` repeats
one part. `python -m benchmarks.one_gpu` runs every launch file that one GPU can run."""


RNG_WORDS = """The parts at the end of the table are the operators of torch that the same bits need, each alone.
Their sum is the least that a draw made of them can take. Most of it is sine and cosine: `torch.polar` calls libm's for
each value, which branches by the quadrant of a random angle. Vectorised ones have other last bits."""

DEMO_STEPS_WORDS = """Processor time of a step of both presets, with equal work, and how much of it matrix products,
convolutions and attention take. Nothing that leaves these products alone can be faster than the bound."""

STARTUP_WORDS = """Processor time (user and system) of whole processes, with a warm cache. Every start of a training
imports torch, imports `torch._dynamo` with torch's first optimizer, and under `accelerate launch` pays for a launcher
that imports torch as well: the rows of the raw loop and of the empty script are its lower bound. A recipe answers
`--help` before its imports, with a text from the cache. The first `--help` after a change of sources, presets or
packages imports everything."""


def summary(results: Sequence[Result]) -> list[str]:
    """How many rows met their target, by the row of the suite."""
    lines = ["", "| | Targets met | Not decided | Missed | Reported only |", "|---|---|---|---|---|"]
    for id, title in (CPU_ROWS | GPU_ROWS).items():
        rows = [r for result in results for r in result.rows if r.id == id]
        counts = [sum(r.verdict == v for r in rows) for v in ("passed", "not decided", "FAILED", "reported")]
        told = " | ".join(map(str, counts)) if rows else f"{NOT_YET} | | |"
        lines.append(f"| {id}: {title} | {told} |")
    return lines


def table_of(id: str, results: Sequence[Result]) -> list[str]:
    """The rows of one id, of every file that has some; which file, where there are several."""
    having = [result for result in results if any(r.id == id for r in result.rows)]
    if not having:
        return [f"{NOT_YET.capitalize()}."]
    lines: list[str] = []
    for result in having:
        lines += [*([""] if lines else []), "| What | Value | Interval | Target | |", "|---|---|---|---|---|"]
        for found in (r for r in result.rows if r.id == id):
            value, between, against, verdict = cells(found)
            verdict = verdict.replace("FAILED", "**FAILED**").replace("reported", "")
            lines.append(f"| {found.name} | {value} | {between} | {against} | {verdict} |")
        note = f" {result.details['note']}" if "note" in result.details else ""
        lines += ["", f"From [{result.name}.json](../benchmarks/results/{result.name}.json){missing(result)}{note}"]
    return lines


def missing(result: Result) -> str:
    """Peers that did not run, as the end of a sentence."""
    if not result.absent:
        return "."
    return "; absent: " + "; ".join(f"{peer} ({reason})" for peer, reason in result.absent.items()) + "."


def gpu_table(id: str, results: Sequence[Result]) -> list[str]:
    """Rows, or the target that waits for them."""
    if any(r.id == id for result in results for r in result.rows):
        return table_of(id, results)
    target = f" Target: {GPU_TARGETS[id]}." if id in GPU_TARGETS else ""
    return [f"{NOT_YET.capitalize()}.{target}"]


def scaling(results: Sequence[Result]) -> list[str]:
    """Collectives, bytes and efficiency by layout."""
    head = "| Strategy | Processes | Hosts | Collectives per step | MB per step | Efficiency by wall time | of work |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    result = next((r for r in results if "layouts" in r.details), None)
    for f in result.details["layouts"] if result else []:
        figures = f"{f['collectives']} | {f['bytes'] / 1e6:.1f} | {f['efficiency']:.2f} | {f['efficiency_of_work']:.2f}"
        lines.append(f"| {f['strategy']} | {f['processes']} | {f['hosts']} | {figures} |")
    if result is None:
        lines.append(f"| on CPU processes | 1, 2, 4 | 1, 2 | {NOT_YET} | | | |")
    lines.append(f"| on GPUs (NCCL) | 2 and more | 1 and more | {NOT_YET} | | | |")
    if result is None:
        return lines
    cores = result.details["cores"]
    words = f"gloo on {cores} cores; more processes than cores share them. Two hosts are two network namespaces"
    return [*lines, "", f"Per process; {words}. Losses:", "", *table_of("scaling", results)]


ABLATION_WORDS = """Each row is the baseline preset with one option of the optimised one, followed by a row with all.

- **Speed** covers the loop with saves and log lines; above 1 is faster. It is given by wall time, and by processor
  time of the main process, which other work disturbs less and which excludes loader workers and the checkpoint writer.
- **"No effect"**: the interval includes 1. With fewer than 5 rounds it is their range, which includes the true
  median in fewer than 95 % of cases.
- **Rows "on top"** are compared with the optimised preset, in fewer rounds.
- **Noise**: on a CPU `num_workers: auto` is 0, so its row shows how large the noise is.
- **Equal**: yes if the values in the last columns match the baseline's in every round, within the relative tolerance of
  `accel-train compare` (1e-5), with the largest difference. Options that skip work or change the precision need not be.
- **The last columns** show how much worse a metric is at the last step, relative to the baseline."""


def ablations(results: Sequence[Result]) -> list[str]:
    """A table for each recipe."""
    found = [result for result in results if "ablation" in result.details]
    lines = [ABLATION_WORDS]
    for result in found:
        about = result.details["ablation"]
        names = list(about["options"][0]["worse"])
        lines += ["", f"### recipes/{about['recipe']}.py", "", f"{about['rounds']} rounds.", ""]
        titles = [
            "Option",
            "Speed (wall time)",
            "Speed (processor time)",
            "Memory",
            "Equal",
            *(f"{n} worse by" for n in names),
        ]
        lines.append(f"| {' | '.join(titles)} |")
        lines.append("|---" * (5 + len(names)) + "|")
        for option in about["options"]:
            parts = [
                option["option"],
                *(effect(*option[k]) for k in ("speed", "processor")),
                f"x {option['memory']:.3f}",
                equality(option),
            ]
            lines.append(f"| {' | '.join((*parts, *(f'{v:+.2%}' for v in option['worse'].values())))} |")
        lines += ["", *table_of("ablation", [result])]
    return lines if found else [*lines, "", f"{NOT_YET.capitalize()}."]


def equality(option: dict[str, Any]) -> str:
    """Whether an option left the figures alone; nothing of results that do not say."""
    if "apart" not in option:
        return ""
    if option["unequal"]:
        return "need not be"
    within = option["apart"] <= Request.tolerance
    return f"{'yes' if within else '**no**'} ({option['apart']:.0e})"


def effect(value: float, interval: Sequence[float] | None) -> str:
    """A ratio with its interval, and whether it is none."""
    if interval is None:
        return f"{value:.3f} x"
    none = ", no effect" if interval[0] <= 1 <= interval[1] else ""
    return f"{value:.3f} x ({interval[0]:.3f} to {interval[1]:.3f}{none})"


def muon(results: Sequence[Result]) -> list[str]:
    """What each optimizer reached at each learning rate."""
    result = next((r for r in results if "muon" in r.details), None)
    if result is None:
        return [f"{NOT_YET.capitalize()}."]
    about = result.details["muon"]
    lines = [
        about["words"],
        "",
        "| Optimizer | lr | Loss at the end | mean nRMSE | Reached AdamW's best loss at step | after |",
    ]
    lines.append("|---|---|---|---|---|---|")
    for run in about["runs"]:
        reached = f"{run['step']} | {run['seconds']:.0f} s" if run["step"] else "not | "
        lines.append(
            f"| {run['optimizer']} | {run['lr']:g} | {run['loss']:.5f} | {run['mean_nrmse']:.4f} | {reached} |"
        )
    return [*lines, "", *table_of("muon", [result])]


def origins(results: Sequence[Result]) -> list[str]:
    """Machine, versions, commit and command of each file."""
    lines: list[str] = []
    for result in results:
        e = result.environment
        versions = ", ".join(f"{name} {version}" for name, version in e["versions"].items())
        commit = (
            f"commit `{e['commit'][:12]}{'-dirty' if e['commit'].endswith('-dirty') else ''}`" if e["commit"] else ""
        )
        threads = f"{e['torch_threads']} thread{'' if e['torch_threads'] == 1 else 's'}"
        facts = [e["hardware"], threads, f"Python {e['python']}", versions, commit, f"`{e['command']}`"]
        lines.append(f"- **{result.name}**: {'; '.join(str(f) for f in facts if f)}")
    return lines or [f"{NOT_YET.capitalize()}."]


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if the page is out of date")
    options = parser.parse_args()
    text = page(RESULTS)
    if options.check:
        same = PAGE.exists() and PAGE.read_text() == text
        if not same:
            print(f"{PAGE.relative_to(ROOT)} does not match the results: python -m benchmarks.performance_page")
        return 0 if same else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

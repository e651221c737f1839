"""docs/performance.md, generated from benchmarks/results/*.json alone.

python -m benchmarks.performance_page            # write it
python -m benchmarks.performance_page --check    # exit code 1 if it does not match the results
python -m benchmarks.performance_page --age      # commits since each file that touched what it measures
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from accel_train.compare.comparison import Request
from benchmarks.method import RESULTS, ROOT, SCHEMA, Row, cells
from benchmarks.performance_words import (
    ABLATION_WORDS,
    BOUNDS,
    CLOCKS,
    CPU_ROWS,
    DEMO_STEPS_WORDS,
    GPU_ROWS,
    GPU_TARGETS,
    GPU_WORDS,
    HEAD,
    NOT_YET,
    RNG_WORDS,
    STARTUP_WORDS,
)

PAGE = ROOT / "docs" / "performance.md"


@dataclass(frozen=True)
class Result:
    """Content of one result file."""

    name: str
    title: str
    environment: dict[str, Any]
    absent: dict[str, str]
    rows: list[Row]
    details: dict[str, Any]


def read(folder: Path) -> list[Result]:
    """Return all results in a folder, sorted by name. Raises ``ValueError`` for a file with another schema."""
    known = {f.name for f in fields(Row)}
    found: list[Result] = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if content.get("schema") != SCHEMA:
            raise ValueError(f"{path.name} has schema {content.get('schema')}, this page reads {SCHEMA}: run it again")
        rows = [row_of({k: v for k, v in r.items() if k in known}) for r in content["rows"]]
        environment, absent = content["environment"], content.get("absent", {})
        found.append(Result(path.stem, content["title"], environment, absent, rows, content.get("details", {})))
    return found


def row_of(stored: dict[str, Any]) -> Row:
    """Return a row from its JSON, in which a value such as NaN is a string."""
    return Row(**stored | {"value": float(stored["value"])})


def hardware(environment: dict[str, Any]) -> str:
    """Return the text of the hardware: the CPU, after GPU, driver and CUDA version if a GPU was used."""
    gpu = environment.get("gpu")
    if gpu is None:
        return environment["hardware"]
    return f"{gpu['name']}, driver {gpu['driver']}, CUDA {gpu['cuda']}; {environment['hardware']}"


def device(environment: dict[str, Any]) -> str:
    """Return the name of the device that was measured: the GPU if one was used, else the CPU."""
    return environment.get("gpu", {}).get("name") or environment["hardware"]


def device_of(results: Sequence[Result]) -> str | None:
    """Return the GPU of all GPU rows, None without any. Raises ``ValueError`` if they are of different GPUs."""
    devices = {r.name: device(r.environment) for r in results if any(w.id in (*GPU_ROWS, "presets") for w in r.rows)}
    if len(set(devices.values())) > 1:
        told = ", ".join(f"{name}.json: {device}" for name, device in devices.items())
        raise ValueError(f"results of different GPUs in one folder ({told}): keep each GPU's in one of its own")
    return next(iter(devices.values()), None)


def page(folder: Path) -> str:
    """Return the text of the page from the results in a folder."""
    results = read(folder)
    measured_on = device_of(results)
    parts = [HEAD, *summary(results)]
    for id, title in CPU_ROWS.items():
        parts += ["", f"## {id}: {title}", "", *table_of(id, results)]
        if id in BOUNDS:
            parts += ["", BOUNDS[id]]
    parts += ["", "## One GPU", "", GPU_WORDS, *([f"\nMeasured on: {measured_on}."] if measured_on else []), ""]
    for id, title in GPU_ROWS.items():
        parts += [f"### {id}: {title}", "", *gpu_table(id, results), ""]
        if id in BOUNDS and any(r.id == id for result in results for r in result.rows):
            parts += [BOUNDS[id], ""]
        if id == "G1":
            parts += [*where_the_step_goes(results), ""]
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
    parts += ["", "## Rows of shards", "", *table_of("shards", results)]
    parts += ["", "## Language models", "", *table_of("causal_lm", results)]
    parts += ["", "## The first second", "", STARTUP_WORDS, "", *table_of("startup", results)]
    parts += ["", "## Initial weights once per host", "", *table_of("host_weights", results)]
    parts += ["", "## Metrics and health checks", "", *table_of("reporting", results)]
    parts += ["", "## Where these numbers come from", "", *origins(results)]
    return "\n".join(parts) + "\n"


def summary(results: Sequence[Result]) -> list[str]:
    """Return a table of the number of rows per verdict, by group of rows."""
    lines = ["", "| | Targets met | Not decided | Missed | Reported only |", "|---|---|---|---|---|"]
    for id, title in (CPU_ROWS | GPU_ROWS).items():
        rows = [r for result in results for r in result.rows if r.id == id]
        counts = [sum(r.verdict == v for r in rows) for v in ("passed", "not decided", "FAILED", "reported")]
        told = " | ".join(map(str, counts)) if rows else f"{NOT_YET} | | |"
        lines.append(f"| {id}: {title} | {told} |")
    return lines


def table_of(id: str, results: Sequence[Result]) -> list[str]:
    """Return a table of the rows with this id for each file that has some, with the source below."""
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
        lines += ["", source(id, result)]
    return lines


def source(id: str, result: Result) -> str:
    """Return the line below a table: file, machine, date, commit, absent peers, clock, rounds, and any note."""
    e = result.environment
    link = f"[{result.name}.json](../benchmarks/results/{result.name}.json)"
    parts = [f"From {link}: {device(e)}", *([e["date"]] if "date" in e else []), *commit_of(e)]
    text = f"{', '.join(parts)}{missing(result)}"
    rounds = sorted({r.rounds for r in result.rows if r.id == id and r.interval is not None})
    timed = [CLOCKS[id]] if id in CLOCKS else []
    if rounds:
        timed.append(f"{rounds[0]} rounds" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]} rounds")
    text += f" Timed: {'; '.join(timed)}." if timed else ""
    return f"{text} {result.details['note']}" if "note" in result.details else text


def commit_of(environment: dict[str, Any]) -> list[str]:
    """Return the abbreviated commit, with `-dirty` if the code was modified. Empty without a commit."""
    commit = environment["commit"]
    if not commit:
        return []
    return [f"commit `{commit[:12]}{'-dirty' if commit.endswith('-dirty') else ''}`"]


NO_TIME = re.compile(r"TimeoutError|\d+ s were (left|over)")
"""Reasons about lack of device time, which the page shows as `NOT_YET`."""


def missing(result: Result) -> str:
    """Return the peers that did not run, with reasons, as the end of a sentence."""
    if not result.absent:
        return "."
    reasons = {peer: NOT_YET if NO_TIME.search(reason) else reason for peer, reason in result.absent.items()}
    return "; absent: " + "; ".join(f"{peer} ({reason})" for peer, reason in reasons.items()) + "."


def where_the_step_goes(results: Sequence[Result]) -> list[str]:
    """Return a sentence on the traced large step, computed from its rows. Empty without a trace."""
    traced = next((r for r in results if r.name == "gpu_trace"), None)
    if traced is None:
        return []
    step = 1e3 * median(traced.details["seconds"])
    begin = "large step: "
    times = {r.name.removeprefix(begin): r.value for r in traced.rows if r.name.startswith(begin)}
    compiled = sum(value for kind, value in times.items() if kind.startswith("compiled"))
    kinds = ("matrix products", "attention", "AdamW", "gradient norm")
    needed = sum(times[kind] for kind in kinds)
    each = ", ".join(f"{kind} {times[kind]:.1f}" for kind in kinds)
    return [
        f"Of the {step:.0f} ms of the traced step, by a profile, {each} ms take {needed:.0f} together, and compiled "
        f"kernels {compiled:.0f}. If those took no time at all, a step would be {step / (step - compiled):.2f} times "
        "as fast."
    ]


def gpu_table(id: str, results: Sequence[Result]) -> list[str]:
    """Return the table of a GPU row, or its target if it has not been measured."""
    if any(r.id == id for result in results for r in result.rows):
        return table_of(id, results)
    target = f" Target: {GPU_TARGETS[id]}." if id in GPU_TARGETS else ""
    return [f"{NOT_YET.capitalize()}.{target}"]


def scaling(results: Sequence[Result]) -> list[str]:
    """Return the table of collectives, bytes and efficiency by layout, and that of the losses."""
    head = "| Strategy | Processes | Hosts | Collectives per step | MB per step | Efficiency by wall time | of work |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    result = next((r for r in results if "layouts" in r.details), None)
    for f in result.details["layouts"] if result else []:
        shares = " | ".join(share(f, name) for name in ("efficiency", "efficiency_of_work"))
        figures = f"{f['collectives']} | {f['bytes'] / 1e6:.1f} | {shares}"
        lines.append(f"| {f['strategy']} | {f['processes']} | {f['hosts']} | {figures} |")
    if result is None:
        lines.append(f"| on CPU processes | 1, 2, 4 | 1, 2 | {NOT_YET} | | | |")
    lines.append(f"| on GPUs (NCCL) | 2 and more | 1 and more | {NOT_YET} | | | |")
    if result is None:
        return lines
    cores = result.details["cores"]
    taken = f"in {result.details['rounds']} rounds, in turns" if "rounds" in result.details else "once"
    words = (
        f"each layout ran {taken}; gloo on {cores} cores; more processes than cores share them. Two hosts are two "
        "network namespaces"
    )
    return [*lines, "", f"Per process; {words}. Losses:", "", *table_of("scaling", results)]


def share(layout: dict[str, Any], name: str) -> str:
    """Return an efficiency as text, with its interval if there were several rounds."""
    low, high = layout.get(f"{name}_interval") or (None, None)
    return f"{layout[name]:.2f}" + ("" if low is None else f" ({low:.2f} to {high:.2f})")


def ablations(results: Sequence[Result]) -> list[str]:
    """Return the tables of the options, one for each recipe."""
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
    """Return whether an option left the metrics unchanged, as text. Empty for older results without this entry."""
    if "apart" not in option:
        return ""
    if option["unequal"]:
        return "need not be"
    within = option["apart"] <= Request.tolerance
    return f"{'yes' if within else '**no**'} ({option['apart']:.0e})"


def effect(value: float, interval: Sequence[float] | None) -> str:
    """Return a ratio as text with its interval, marked "no effect" if the interval includes 1."""
    if interval is None:
        return f"{value:.3f} x"
    none = ", no effect" if interval[0] <= 1 <= interval[1] else ""
    return f"{value:.3f} x ({interval[0]:.3f} to {interval[1]:.3f}{none})"


def muon(results: Sequence[Result]) -> list[str]:
    """Return the table of both optimizers at each learning rate, and their rows."""
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
    """Return the list of files by machine and versions, with date, commit, threads and command of each."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        e = result.environment
        versions = ", ".join(f"{name} {version}" for name, version in e["versions"].items())
        groups.setdefault((hardware(e), f"Python {e['python']}", versions), []).append(result)
    if not groups:
        return [f"{NOT_YET.capitalize()}."]
    lines = ["A command is that of its commit. Options may have changed since."]
    for environment, members in groups.items():
        lines += ["", f"{'; '.join(environment)}:", ""]
        for result in members:
            e = result.environment
            threads = f"{e['torch_threads']} thread{'' if e['torch_threads'] == 1 else 's'}"
            facts = [*([e["date"]] if "date" in e else []), *commit_of(e), threads, f"`{e['command']}`"]
            lines.append(f"- **{result.name}**: {'; '.join(facts)}")
    return lines


MEASURED = ("accel_train", "recipes", "benchmarks", ":(exclude)benchmarks/results")


def age(results: Sequence[Result]) -> list[str]:
    """Return a line per file with the number of commits since then that changed measured code."""
    lines: list[str] = []
    for result in results:
        commit = (result.environment["commit"] or "unknown").removesuffix("-dirty")
        command = ["git", "-C", str(ROOT), "rev-list", "--count", f"{commit}..HEAD", "--", *MEASURED]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        count = done.stdout.strip() if done.returncode == 0 else "an unknown number of"
        lines.append(f"{result.name:32} {result.environment.get('date', '')}  {count} commits since")
    return lines


def main() -> int:
    """Write the page. With --check, return 1 if it is out of date; with --age, print the age of each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if the page is out of date")
    parser.add_argument("--age", action="store_true", help="print how many commits are newer than each file")
    options = parser.parse_args()
    if options.age:
        print("\n".join(age(read(RESULTS))))
        return 0
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

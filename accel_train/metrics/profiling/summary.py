"""The summary of a profile, in plain words."""

from __future__ import annotations

from accel_train.metrics.profiling.advice import Advice, Setting
from accel_train.metrics.profiling.options import StepRange
from accel_train.metrics.profiling.shares import COMMUNICATION, COMPUTE, IDLE, MEMORY, OTHER, PYTHON, WAIT, Shares

ON_DEVICE = {
    COMPUTE: "matrix products, convolutions and attention on the GPU",
    MEMORY: "every other kernel, copy and fill on the GPU, while no compute runs",
    COMMUNICATION: "collectives, while no other kernel runs",
    WAIT: "the GPU has nothing to do, and the host waits for samples",
    IDLE: "the GPU has nothing to do for another reason, such as a host that is slower than the kernels",
}
ON_HOST = {
    WAIT: "reading of samples, and the wait for them",
    COMPUTE: "matrix products, convolutions and attention",
    COMMUNICATION: "collectives, while no compute runs",
    OTHER: "every other operator, with its dispatch",
    PYTHON: "no operator runs: Python, the optimizer's host code and the profiler itself",
}


def summarise(steps: StepRange, shares: Shares, advice: list[Advice], setting: Setting) -> list[str]:
    """Return the lines of profile.md."""
    meanings = ON_DEVICE if shares.on_device else ON_HOST
    milliseconds = shares.seconds / shares.steps * 1000
    lines = [
        f"# Profile of steps {steps}",
        "",
        f"{shares.steps} steps of {milliseconds:.1f} ms on average, with the cost of profiling; evaluations and saves "
        "are left out. Only the main process is measured. Each moment counts once.",
        "",
        "| Part | Share | ms per step | What it is |",
        "|---|---|---|---|",
    ]
    for name, share in shares.parts.items():
        lines.append(f"| {name} | {share:.1%} | {share * milliseconds:.2f} | {meanings[name]} |")
    if not shares.on_device:
        lines += ["", "On a CPU the trace cannot tell memory-bound operators from others, nor an idle device."]
    lines += ["", "## What to try", ""]
    lines += _advised(advice, setting)
    lines += [
        "",
        "`profile_trace.json.gz` opens in https://ui.perfetto.dev; `profile_operators.txt` has the operators.",
    ]
    return lines


def _advised(advice: list[Advice], setting: Setting) -> list[str]:
    """Return a numbered list with the command to check each."""
    if not advice:
        return ["No option of this project reduces a large part of this step."]
    lines: list[str] = []
    for number, each in enumerate(advice, 1):
        lines += [f"{number}. {each.reason}.", "", f"   `{each.command(setting)}`", ""]
    if setting.world_size > 1:
        return [*lines, "Give each command the launch file of this run with `--config_file`."]
    return lines[:-1]

"""The CPU suite: the rows of docs/performance.md that need no GPU, then the page.

    python -m benchmarks.suite                     # about twenty minutes on two quiet cores
    python -m benchmarks.suite --long              # all of them: some hours, most for the options one by one
    python -m benchmarks.suite --only loop gemm
    python -m benchmarks.suite --tiny --directory /tmp/check

Each job runs in a process of its own, which sees no GPU, and writes one file to benchmarks/results/. Run it on an
otherwise idle machine: processor time and interleaved rounds remove most of the effect of other load, but not all. The
exit code is 1 if a target is missed or a script fails. `benchmarks.lora_memory` (half an hour) is not part of the
suite, because it fills no row.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import performance_page
from benchmarks.method import CPU_ALONE, RESULTS, ROOT

TINY = ("--tiny",)


@dataclass(frozen=True)
class Job:
    """A run of a script, and the file that it writes."""

    module: str
    file: str
    arguments: tuple[str, ...] = ()
    long: bool = False
    """True if it takes over ten minutes: it runs only with ``--long``, or if named by ``--only``."""
    tiny: tuple[str, ...] = TINY
    """Arguments that replace ``arguments`` with ``--tiny``, to test that the script works."""


JOBS = {
    "loop": Job("loop", "loop_cpu.json"),
    "mmdit_block": Job("mmdit_block", "mmdit_block_cpu.json"),
    "optimizer": Job("optimizer", "optimizer_cpu.json"),
    "checkpoint": Job("checkpoint", "checkpoint_cpu.json", ("--rounds", "10")),
    "checkpoint_1500": Job("checkpoint", "checkpoint_cpu_1500.json", ("--state_mb", "1500", "--rounds", "8"), True),
    "activation_checkpointing": Job("activation_checkpointing", "activation_checkpointing_cpu.json"),
    "compile": Job("compile", "compile_cpu.json"),
    "data_loading": Job("data_loading", "data_loading_cpu.json"),
    "accumulation": Job("accumulation", "accumulation_cpu.json"),
    "gemm": Job("gemm", "gemm_cpu.json"),
    "gemm_2_threads": Job("gemm", "gemm_cpu_2_threads.json", ("--threads", "2"), tiny=("--threads", "2", *TINY)),
    "exchange": Job("exchange", "exchange_cpu.json"),
    "scaling": Job("scaling", "scaling_cpu.json"),
    "rng": Job("rng", "rng_cpu.json"),
    "pictures": Job("pictures", "pictures_cpu.json"),
    "causal_lm": Job("causal_lm", "causal_lm_cpu.json"),
    "shards": Job("shards", "shards_cpu.json"),
    "startup": Job("startup", "startup_cpu.json"),
    "host_weights": Job("host_weights", "host_weights_cpu.json"),
    "reporting": Job("reporting", "reporting_cpu.json"),
    "demo_steps": Job("demo_steps", "demo_steps_cpu.json"),
    "ablation_mmdit": Job(
        "ablation",
        "ablation_mmdit_cpu.json",
        ("mmdit", "--max_steps", "20"),
        True,
        ("mmdit", "--rounds", "1", "--max_steps", "20"),
    ),
    "ablation_pde": Job(
        "ablation",
        "ablation_pde_cpu.json",
        ("pde", "--max_steps", "40"),
        True,
        ("pde", "--rounds", "1", "--max_steps", "20"),
    ),
    "muon": Job(
        "muon",
        "muon_cpu.json",
        (),
        True,
        ("--max_steps", "30", "--rates", "1e-3", "--", "--evaluation.samples", "8"),
    ),
}
"""Jobs by name, in the order of the run."""


def command(name: str, directory: Path, tiny: bool) -> list[str]:
    """Return the command of a job."""
    job = JOBS[name]
    output = (directory / job.file).resolve()
    output = output.relative_to(ROOT) if output.is_relative_to(ROOT) else output  # the result records the command
    arguments = job.tiny if tiny else job.arguments
    return [sys.executable, "-m", f"benchmarks.{job.module}", "--output", str(output), *arguments]


def environment() -> dict[str, str]:
    """Return the environment of every job: one thread and no GPU."""
    given = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
    return os.environ | given | CPU_ALONE


def run(name: str, directory: Path, tiny: bool) -> tuple[int, float]:
    """Run a job, with its output on the console; return its exit code and seconds."""
    began = time.perf_counter()
    code = subprocess.run(command(name, directory, tiny), cwd=ROOT, env=environment(), check=False).returncode
    return code, time.perf_counter() - began


def main() -> int:
    """Run the selected jobs and write the page. Returns 1 if a target is missed or a script fails, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=JOBS)
    parser.add_argument("--long", action="store_true", help="also run jobs of more than ten minutes")
    parser.add_argument("--directory", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument(
        "--tiny", action="store_true", help="test that the scripts work: results mean nothing, no page is written"
    )
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    codes: dict[str, int] = {}
    spent: dict[str, float] = {}
    for name in options.only or [name for name, job in JOBS.items() if options.long or not job.long]:
        print(f"\n{name}", flush=True)
        codes[name], spent[name] = run(name, options.directory, options.tiny)
    print()
    for name, code in codes.items():
        print(f"{name:26} {spent[name]:6.0f} s  {'every target met' if code == 0 else 'missed a target, or failed'}")
    print(f"{'in all':26} {sum(spent.values()):6.0f} s")
    if not options.tiny and options.directory == RESULTS:
        performance_page.PAGE.write_text(performance_page.page(RESULTS))
        print(f"written: {performance_page.PAGE.relative_to(ROOT)}")
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main())

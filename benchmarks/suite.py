"""The CPU suite: every row of docs/performance.md that needs no GPU, in one command, then the page.

    python -m benchmarks.suite                     # about twenty minutes on two quiet cores
    python -m benchmarks.suite --only loop gemm
    python -m benchmarks.suite --tiny --directory /tmp/check

Each script runs in a process of its own and writes one file to benchmarks/results/. Run it on a machine that does
nothing else: processor time and interleaved rounds take out most of what others do, not all. The exit code is 1 where
a target is missed or a script failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import performance_page
from benchmarks.method import RESULTS, ROOT

SCRIPTS = {
    "loop": "loop_cpu.json",
    "mmdit_block": "mmdit_block_cpu.json",
    "optimizer": "optimizer_cpu.json",
    "checkpoint": "checkpoint_cpu.json",
    "activation_checkpointing": "activation_checkpointing_cpu.json",
    "compile": "compile_cpu.json",
    "data_loading": "data_loading_cpu.json",
    "accumulation": "accumulation_cpu.json",
    "gemm": "gemm_cpu.json",
    "exchange": "exchange_cpu.json",
    "scaling": "scaling_cpu.json",
    "rng": "rng_cpu.json",
    "pictures": "pictures_cpu.json",
    "causal_lm": "causal_lm_cpu.json",
    "startup": "startup_cpu.json",
    "reporting": "reporting_cpu.json",
    "demo_steps": "demo_steps_cpu.json",
}
"""Script, and the file it writes: C1 to C10 in order, then what has no target."""


def run(name: str, directory: Path, tiny: bool) -> tuple[int, float]:
    """Exit code and seconds of one script; its output goes to the console."""
    output = (directory / SCRIPTS[name]).resolve()
    output = output.relative_to(ROOT) if output.is_relative_to(ROOT) else output  # it is in the recorded command
    command = [sys.executable, "-m", f"benchmarks.{name}", "--output", str(output), *(["--tiny"] if tiny else [])]
    began = time.perf_counter()
    given = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
    code = subprocess.run(command, cwd=ROOT, env=given, check=False).returncode
    return code, time.perf_counter() - began


def main() -> int:
    """Run what was asked for and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--directory", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--tiny", action="store_true", help="do the scripts work; figures mean nothing, no page")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    codes: dict[str, int] = {}
    spent: dict[str, float] = {}
    for name in options.only:
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

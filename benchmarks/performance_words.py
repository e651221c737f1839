"""Fixed texts of docs/performance.md: titles, targets, clocks, and explanations of bounds."""

from __future__ import annotations

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
    "does step and average ([G5](#g5-adamw-clipping-and-ema-over-195-b-parameters)).",
    "C4": "The call blocks for one copy of the state, so the row of such a copy is its bound. Behind it the writer "
    "hashes on the other core, which takes memory and caches from the loop, as the row of a foreign process shows.",
    "C8": "A backward leaves no core idle here, so the one reduction cannot be hidden: the bound adds what gloo takes "
    "for it to a step without any.",
    "C9": "The bound is a step's own products and attention, with their shapes and nothing else. Norms, modulation, "
    "activations and their gradients take the rest of a step.",
    "G2": "The hand-written loop clips in a pass over the gradients and averages in another, where the trainer leaves "
    "both to the kernel of AdamW: it does more work and cannot show what a trainer costs. The loop with both in the "
    "kernel has the target, in files that were written since it was added.",
    "G3": "A hidden cost below zero is within the noise of the steps.",
    "G7": "The samples are warm: their file is in the page cache.",
}
"""Explanations of what bounds a row or how to read it, by row of the suite."""
GPU_ROWS = {
    "G0": "Ceilings of the device: matrix products, copies, attention backends",
    "G1": "MMDiT of SD3-medium's shape and a launch-bound small one, against a typical script and a strong one",
    "G2": "The trainer against a raw loop around the same model; waits per step",
    "G3": "Saving SD3-medium's weights and AdamW's state while they train",
    "G4": "Activation checkpointing: memory against time",
    "G5": "AdamW, clipping and EMA over 1.95 B parameters",
    "G6": "Compile times",
    "G7": "Data wait",
    "G8": "Optimizer state in host memory: what it saves and what it costs",
}
GPU_TARGETS = {
    "G1": "our output is that of diffusers' model with its weights; MFU >= 0.45, goal 0.48 at head size 64 and 0.50 at "
    "128, >= 0.42 at 4096 tokens; >= 1.08 x the strong loop, >= 1.3 x the typical script; launch-bound >= 3 x the "
    "typical script; float8 >= 1.12 x bf16",
    "G2": "losses from the same weights within 0.1 % in bf16; over a loop with clip and average in the kernel <= 1.003 "
    "at the large step, <= 1.02 at a 5 ms step; no wait in a step that does not log",
    "G3": "at 24.3 GB blocked <= 30 ms, hidden <= 150 ms, transfer to the host >= 0.9 of a copy into pinned memory; "
    ">= 50 x less time lost than with Accelerator.save_state",
    "G4": "-50 % activation memory at <= +12 %; full <= +28 %",
    "G5": "<= 22.2 ms, which is 23 ms for the 2.03 B of SD3-medium",
    "G6": "cold <= 25 s, >= 4 x faster than the whole model, step within 2 %, warm <= 5 s",
    "G7": "<= 0.3 % of a step",
    "G8": "<= +20 % at accumulation 1, <= +5 % at 8; saves >= 16.2 GB; saves memory, never time",
}

HEAD = """<!-- Generated from benchmarks/results/*.json by python -m benchmarks.performance_page. Do not edit. -->
# Performance

How to read this page:

- A table is of one file, from one machine, at one commit; the line under it names them. No row compares files of
  different machines or commits. Most values are ratios to a peer that was measured in the same run, or stand beside it.
- The line also says by which clock times were taken, and whether variants took turns in one process or ran one after
  another, because not all fit into one.
- A value with an interval is the median over that many rounds (single steps, of most rows of a GPU), and the interval
  is a bootstrap one of 95 %. With fewer than 5 rounds it is their range. A value without an interval is a single one
  (some are medians of repeats), or a count, which is exact.
- A row with a target has **passed** or **FAILED**, where the whole interval (or the one value) meets or misses it, or
  is **not decided**, where the interval includes it. A goal is hoped for beyond the target; a row that does not reach
  it has not failed.
- Code has changed since some files were written. `python -m benchmarks.performance_page --age` counts the commits.
- Anything that has not been run is marked "not yet measured".

```
python -m benchmarks.suite                    # what needs no GPU and less than ten minutes each, then this page
python -m benchmarks.suite --long             # and the rest of it: larger states, options one by one, Muon
python -m benchmarks.loop --output FILE.json  # one file
```

Purpose and risks of each option: [optimizations.md](optimizations.md)."""

GPU_WORDS = """`python -m benchmarks.gpu` measures these on one device, with one file per part; `--only PART` repeats
one part: `large` for gpu_large.json. `python -m benchmarks.one_gpu --output FILE.json` runs every launch file that one
GPU can run. Targets are for an H200."""

THREAD = "processor time of the thread, in turns in one process"
DEVICE = "the device's own clock"
CLOCKS = {
    "C1": THREAD,
    "C2": THREAD,
    "C3": THREAD,
    "C4": "wall time, each contender in a process of its own, one after another",
    "C5": f"{THREAD}; growth of a process's peak in processes of their own",
    "C6": f"{THREAD}; compile times are processor time of a process of its own and of the compilers it starts",
    "C7": f"{THREAD}; of `prefetch_factor` wall time, in turns",
    "C8": "wall time, in turns in the same processes; of work processor time",
    "C9": f"{THREAD}; with two threads wall time",
    "C10": "wall time, in turns in the same processes",
    "G0": f"{DEVICE}, one after another",
    "G1": f"{DEVICE}, one after another",
    "G2": f"{DEVICE}, in turns",
    "G3": "wall time, each contender in a process of its own, one after another",
    "G4": f"{DEVICE}, one mode after another",
    "G5": f"{DEVICE}, one after another",
    "G6": "wall time, each in a process of its own with its own cache",
    "G7": "wall time",
    "G8": f"{DEVICE}, one after another",
    "presets": "wall time of the steps as logged; runs in fp32 at once, in bf16 one after another",
    "rng": "wall time, one after another, the median of 15 calls each",
    "pictures": "processor time of the process, in turns",
    "shards": THREAD,
    "causal_lm": "each in a process of its own, in turns",
    "startup": "user and system time of whole processes, in turns",
    "reporting": "wall time of the same steps",
    "demo_steps": "processor time of one run each, one after another",
    "muon": "processor time of the process from its first step, two runs at a time",
    "scaling": "wall and processor time of the steps, each layout in processes of its own",
    "ablation": "each run in a process of its own, in turns",
}
"""Clock and order of the measurements, by row of the suite."""


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

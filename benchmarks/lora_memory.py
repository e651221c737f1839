"""Memory of a step of recipes/lora.py for each family of pipelines, simulated: the table of `simulated_memory.py`.

    python -m benchmarks.lora_memory --output benchmarks/results/lora_memory.json
    python -m benchmarks.lora_memory --only FLUX.1-dev --output FILE

Each published model is simulated as by `accel-train simulate`, at its real size on tensors without memory, in bf16 with
adapters of rank 16, in each mode of activation checkpointing. This takes half an hour on two quiet cores. An existing
FILE is continued: steps it already has are not simulated again. Everything that a process holds at its peak besides
weights, gradients and optimizer state counts as "activations": those of the forward, temporaries of the backward, the
batch, and the denoiser's buffers.

Steps at two picture sizes give the GiB per picture and per megapixel in each mode, and a step with another micro-batch
gives the GiB that do not depend on the micro-batch. For some models a further step checks the estimate at another
point. All captions have the maximum number of tokens. VAEs are in fp32.

Not included: workspaces of kernels, the CUDA context, fragmentation, and weights in 8 or 4 bits.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from accel_train.commands.bundled import find_recipe, import_recipe
from accel_train.domains.images.pipelines import flow_transformers
from accel_train.metrics.records import write_json
from accel_train.simulation.ledger import BESIDE, EMA, GRADIENTS, OPTIMIZER, PARAMETERS
from accel_train.simulation.worker import simulate_recipe
from benchmarks import lora_bases, lora_vaes
from benchmarks.method import SCHEMA, facts

GIB = 1 << 30
MEGAPIXEL = 1 << 20
DIGITS = 3
MODES = ("none", "selective", "full")
RESTING = (PARAMETERS, GRADIENTS, OPTIMIZER, EMA, BESIDE)
"""Categories that an estimate of memory computes separately from the activations."""
EXPERIMENT = "lora_tune --precision bf16 --lora.rank 16 --lora.base_precision bf16 --data.heldout_fraction 0".split()
CPU = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false"}


Point = tuple[int, int]
"""Side of the pictures in pixels, and micro-batch."""


class Task(NamedTuple):
    """One step to simulate."""

    model: str
    mode: str
    side: int
    micro_batch: int


SMALL: Point = (512, 1)
LARGE: Point = (1024, 1)
TWO: Point = (1024, 2)
"""In mode none only: in the other modes buffers and copies of adapters are the same or smaller."""
ELSEWHERE: Point = (768, 3)
"""In mode full only, where the peak may move to another part of the model with the size."""
CHECKED = ("Stable Diffusion XL", "FLUX.1-dev", "FLUX.2-klein-4B", "Sana 1.6B")


def tasks_of(model: str) -> list[Task]:
    """Return the steps to simulate for a model."""
    further = {"none": [TWO], "full": [ELSEWHERE] if model in CHECKED else []}
    return [Task(model, mode, *point) for mode in MODES for point in (SMALL, LARGE, *further.get(mode, []))]


def simulate(folder: Path, task: Task) -> dict[str, Any]:
    """Simulate one step and return its counts. Call it in a fresh process, because it changes the environment."""
    os.environ.update(CPU)
    torch.set_num_threads(1)
    base = folder / task.model
    flags = {
        "base.source": base,
        "data.path": folder / "pictures",
        "data.cache_dir": folder / "cache" / task.model,
        "data.resolutions": task.side,
        "micro_batch_size": task.micro_batch,
        "global_batch_size": task.micro_batch,
        "activation_checkpointing.mode": task.mode,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    with _longest_prompts(task.model):
        counted = simulate_recipe("lora", [*EXPERIMENT, *words])[0].counted
    resting = sum(counted.peak.by_category[name] for name in RESTING)
    return {
        **task._asdict(),
        "values": counted.values - counted.trained,
        "trained": counted.trained,
        "gib": (counted.peak_in_blocks - resting) / GIB,
        "place": counted.peak.place,
    }


def _longest_prompts(model: str) -> AbstractContextManager[Any]:
    """Make Z-Image use all tokens of a prompt. Its step reads their number, and simulated tensors have no values."""
    if model != "Z-Image":
        return nullcontext()
    return mock.patch.object(flow_transformers, "_as_list", lambda given: list(given["prompt"].unbind(0)))


def figures(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return parameter counts and the GiB of one model: fixed, and per picture and megapixel in each mode."""
    gib = {Task(*(step[name] for name in Task._fields)): step["gib"] for step in steps}
    model = steps[0]["model"]
    megapixels = [side**2 / MEGAPIXEL for side, _ in (SMALL, LARGE)]
    fixed = 2 * gib[Task(model, "none", *LARGE)] - gib[Task(model, "none", *TWO)]
    found: dict[str, Any] = {
        "values": steps[0]["values"],
        "trained": steps[0]["trained"],
        "fixed": round(fixed, DIGITS),
    }
    for mode in MODES:
        small, large = (gib[Task(model, mode, *point)] for point in (SMALL, LARGE))
        megapixel = (large - small) / (megapixels[1] - megapixels[0])
        picture = large - fixed - megapixel * megapixels[1]
        found[mode] = {"picture": round(picture, DIGITS), "megapixel": round(megapixel, DIGITS)}
        elsewhere = Task(model, mode, *ELSEWHERE)
        if elsewhere in gib:
            side, rows = ELSEWHERE
            expected = fixed + rows * (picture + megapixel * side**2 / MEGAPIXEL)
            found["elsewhere"] = {"simulated": round(gib[elsewhere], DIGITS), "expected": round(expected, DIGITS)}
    return found


def vae_figures() -> dict[str, Any]:
    """Return the GiB per megapixel of each VAE, encoding and decoding, from pictures of side 1024 and of side 512."""
    found: dict[str, Any] = {}
    for name in lora_vaes.VAES:
        found[name] = {}
        for work in ("encode", "decode"):
            small, large = (lora_vaes.peak_bytes(name, side, 1, work) / GIB for side in (512, 1024))
            found[name][work] = {"megapixel": round(large, DIGITS), "megapixel_at_512": round(4 * small, DIGITS)}
    return found


def _child(arguments: tuple[Path, Task]) -> dict[str, Any]:
    folder, task = arguments
    # Hide notices of the run, so that only the lines of this script show.
    with open(os.devnull, "w") as nowhere, mock.patch.object(sys, "stdout", nowhere):
        return simulate(folder, task)


def run(tasks: Sequence[Task], jobs: int) -> Iterator[dict[str, Any]]:
    """Simulate steps, ``jobs`` at a time, each in a process forked from this one; yield results as they complete."""
    with tempfile.TemporaryDirectory(prefix="lora-memory-") as directory:
        folder = Path(directory)
        for name in {task.model for task in tasks}:
            lora_bases.save(lora_bases.MODELS[name], folder / name)
        lora_bases.save_pictures(folder / "pictures")
        with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
            yield from pool.imap_unordered(_child, [(folder, task) for task in tasks])


def write(path: Path, steps: Sequence[Mapping[str, Any]], vaes: Mapping[str, Any]) -> None:
    """Write the steps so far, and the `figures` of the models with all steps."""
    models: dict[str, Any] = {}
    ordered: list[Mapping[str, Any]] = []
    for name in lora_bases.MODELS:
        wanted = [task._asdict() for task in tasks_of(name)]
        own = [step for task in wanted for step in steps if step.items() >= task.items()]
        ordered += own
        if len(own) == len(wanted):
            models[name] = figures(own)
    content = {"schema": SCHEMA, "title": "Memory of adapters on pipelines", "environment": facts(), "absent": {}}
    write_json(path, content | {"rows": [], "details": {"models": models, "vaes": vaes, "steps": ordered}})


def main() -> int:
    """Simulate the missing steps and write the file after each. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write, or to continue")
    parser.add_argument("--only", nargs="+", choices=lora_bases.MODELS, default=list(lora_bases.MODELS))
    parser.add_argument("--jobs", type=int, default=2, help="simulations at once")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Imported once, before the processes are forked.
    import_recipe(find_recipe("lora"))
    steps: list[dict[str, Any]] = []
    if options.output.is_file():
        steps = json.loads(options.output.read_text())["details"]["steps"]
    known = [Task(*(step[name] for name in Task._fields)) for step in steps]
    missing = [task for model in options.only for task in tasks_of(model) if task not in known]
    vaes = vae_figures()
    write(options.output, steps, vaes)
    for step in run(missing, options.jobs):
        steps.append(step)
        write(options.output, steps, vaes)
        print(
            f"{step['model']}, {step['mode']}, {step['micro_batch']} of {step['side']} pixels: {step['gib']:.3f} GiB, "
            f"at its peak in the {step['place']}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs of the real recipe in real processes, for tests that compare them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accel_train.metrics.records import read_metrics
from tests import compiling, zygote
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "mmdit.py"
PRESETS = ROOT / "accelerate_configs"

LAUNCH_FILES = {
    "ddp": "distributed_type: MULTI_GPU\n",
    "fsdp2": (PRESETS / "fsdp2.yaml").read_text().split("fsdp_config:")[1],
    "zero1": "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 1}\n",
    "zero2": "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n",
    "zero3": "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3, zero3_init_flag: false}\n",
    "zero2_offload": (PRESETS / "zero2_offload.yaml").read_text().split("num_processes: 1\n")[1],
    "zero3_offload": (PRESETS / "zero3_offload.yaml").read_text().split("num_processes: 1\n")[1],
}
for name in ("zero2_offload", "zero3_offload"):
    LAUNCH_FILES[name] = f"distributed_type: DEEPSPEED\n{LAUNCH_FILES[name]}"
LAUNCH_FILES["fsdp2"] = f"distributed_type: FSDP\nfsdp_config:{LAUNCH_FILES['fsdp2']}"


def hsdp_file(replicas: int, shards: int) -> str:
    """FSDP2 over groups of ``shards`` processes, of which there are ``replicas``."""
    return (
        f"{LAUNCH_FILES['fsdp2'].rstrip()}\nparallelism_config:\n"
        f"  parallelism_config_dp_replicate_size: {replicas}\n  parallelism_config_dp_shard_size: {shards}\n"
    )


LAUNCH_FILES["hsdp"] = hsdp_file(2, 2)
"""Four processes: two groups, over each of which everything is sharded."""

SMALL_DEMO = (
    "--global_batch_size 16 --micro_batch_size 16 --log.log_every 1 --log.progress_bar off --evaluation.samples 8 "
    "--evaluation.timesteps 1 --evaluation.shown 1 --evaluation.text.steps 1 --evaluation.latent.steps 1"
).split()
"""The demo with a smaller batch, every step logged, and next to no evaluation."""


def few_texts() -> Path:
    """Every twelfth text of the demo, in a file that all tests share: seconds less of tokenising and of baselines."""
    lines = (ROOT / "accel_train" / "domains" / "text" / "demo" / "shakespeare.txt").read_text().splitlines()[::12]
    place = Path(tempfile.gettempdir()) / f"accel-train-texts-{os.getuid()}.txt"
    part = place.with_name(f"{place.name}.{os.getpid()}")
    part.write_text("\n".join(lines) + "\n")
    return part.replace(place)


SMALL = [*SMALL_DEMO, "--data.path", str(few_texts()), "--data.vocab_size", "512"]
"""The same on few texts of few different tokens: for whatever does not ask what was learned."""
SMALL_PDE = (
    "--global_batch_size 16 --micro_batch_size 16 --log.log_every 1 --log.progress_bar off --data.train_samples 64 "
    "--data.heldout_samples 16 --model.width 32 --model.depth 2 --model.heads 2 --model.decoder_width 32 "
    "--objective.autoencode_steps 6 --objective.inverse_every 2 --objective.boundary_weight 0.1 --objective.queries 64 "
    "--objective.drop_path 0.2 --objective.flip 0.5 --schedule.warmup_steps 5 --evaluation.samples 8 "
    "--objective.residual_from 10 --objective.residual_steps 4 --model.residual_depth 1 "
    "--evaluation.trajectories 2 --evaluation.conditioning.candidates 2 --evaluation.conditioning.beam 1"
).split()
"""All three stages, both tasks, and everything that draws, in a few steps of a small model."""
SMALL_CAUSAL_LM = [
    *"--global_batch_size 16 --micro_batch_size 16 --log.log_every 1 --log.progress_bar off".split(),
    *"--evaluation.samples 8 --evaluation.shown 1 --evaluation.max_new_tokens 4".split(),
    *("--model.tie_word_embeddings", "true"),
    *("--data.path", str(few_texts()), "--data.vocab_size", "400", "--data.max_length", "32"),
]
"""Packed rows of few texts, and tied embeddings."""
SMALL_LORA = (
    "--global_batch_size 16 --micro_batch_size 16 --log.log_every 1 --log.progress_bar off --precision fp32 "
    "--data.resolutions 12 16 --data.resolution_choice each --data.bucket_step 4 --data.heldout_fraction 0.2 "
    "--data.group_size 4 --data.flip --lora.rank 3 --lora.base_precision fp32 --optimizer.lr 5e-3 "
    "--schedule.warmup_steps 2 --ema.decay 0.9 --objective.caption_dropout 0.2 --objective.offset_noise 0.1 "
    "--objective.snr_weighting min_snr --activation_checkpointing.mode none --evaluation.samples 4 "
    "--evaluation.batch_size 2"
).split()
"""Buckets of several shapes and sizes, and everything that draws."""
DEMOS = {
    "mmdit": ("demo", SMALL),
    "pde": ("pde_demo", SMALL_PDE),
    "causal_lm": ("causal_lm_smoke", SMALL_CAUSAL_LM),
    "lora": ("lora_tune", SMALL_LORA),
}


@dataclass(frozen=True)
class Layout:
    """A strategy on a number of CPU processes."""

    strategy: str
    processes: int
    recipe: str = "mmdit"

    def __str__(self) -> str:
        return f"{self.strategy}x{self.processes}" + ("" if self.recipe == "mmdit" else f"-{self.recipe}")


def every_day(quick: Collection[tuple[str, str]], recipes: Iterable[str], names: Iterable[str]) -> list[Any]:
    """The cases of each recipe with each named layout, slow ones but for those in ``quick``."""
    return [
        pytest.param(recipe, name, marks=() if (recipe, name) in quick else pytest.mark.slow, id=f"{recipe}-{name}")
        for recipe, name in product(recipes, names)
    ]


@dataclass(frozen=True)
class Finished:
    """A run that has ended: what it left behind."""

    directory: Path
    output: str
    code: int

    def train_lines(self) -> dict[int, dict[str, Any]]:
        lines = [r for r in read_metrics(self.directory / "metrics.jsonl") if r["event"] == "train"]
        return {r["step"]: r for r in lines}

    def losses(self) -> list[float]:
        lines = self.train_lines()
        return [lines[step]["loss"] for step in sorted(lines)]

    def checkpoint(self, step: int) -> Path:
        return self.directory / "checkpoints" / f"checkpoint_{step:08d}"

    def tensors(self, step: int, stem: str) -> dict[str, torch.Tensor]:
        """All tensors of a collection (model, ema, optimizer/exp_avg), whatever its number of files."""
        found: dict[str, torch.Tensor] = {}
        for path in self.checkpoint(step).glob(f"{stem}*.safetensors"):
            if path.name.split(".")[0].split("-")[0] == stem.split("/")[-1]:
                found |= load_file(path)
        assert found, (self.checkpoint(step), stem)
        return found


@functools.cache
def _pipeline_and_pictures() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with a tiny pipeline of diffusers and pictures of several shapes, deleted with this process."""
    for package in ("diffusers", "peft"):
        pytest.importorskip(package)
    from tests.domains.images import drawn, tiny_pipelines

    made = tempfile.TemporaryDirectory(prefix="accel-train-lora-")
    tiny_pipelines.save("sd1", Path(made.name) / "base")
    drawn.folder_of(Path(made.name) / "photos", *8 * [(24, 24), (40, 20), (20, 30)])
    return made


def inputs_of(recipe: str, folder: Path) -> list[str]:
    """Return flags for what a recipe reads beside its demo's files. Its cache in ``folder`` is filled by the run."""
    if recipe != "lora":
        return []
    made = _pipeline_and_pictures().name
    paths = {"--base.source": f"{made}/base", "--data.path": f"{made}/photos", "--data.cache_dir": f"{folder}/cache"}
    return [word for flag in paths.items() for word in flag]


def environment(**extra: str) -> dict[str, str]:
    """Quiet, single-threaded and offline."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_", "WORLD_SIZE", "RANK"))}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **extra}


def command(layout: Layout, arguments: list[str], folder: Path, recipe: Path | None = None) -> list[str]:
    """How a person would start it: plain Python for one process, a rehearsal of a launch file for several."""
    if layout.strategy.startswith("zero"):
        compiling.skip_without_deepspeed()
    recipe = recipe or RECIPE.with_stem(layout.recipe)
    if layout.strategy == "single":
        return [sys.executable, str(recipe), *arguments]
    file = folder / f"{layout}.yaml"
    file.write_text(f"num_machines: 1\nnum_processes: {layout.processes}\n{LAUNCH_FILES[layout.strategy]}")
    head = [sys.executable, "-m", "accel_train.cli", "rehearse", "--config_file", str(file)]
    return [*head, str(recipe), *arguments]


def fork(
    layout: Layout, words: Sequence[str], *, timeout: float = PATIENCE_SECONDS, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run what ``command`` gave for ``layout`` to its end, in forked processes (``tests.zygote``)."""
    kind = "plain" if layout.strategy in ("single", "ddp") else "sharded"
    return zygote.run(words, env=environment(**extra), timeout=timeout, kind=kind)


def run_recipe(
    layout: Layout,
    directory: Path,
    *arguments: str,
    ok: bool = True,
    timeout: float = PATIENCE_SECONDS,
    extra: dict[str, str] | None = None,
    new: bool = False,
) -> Finished:
    """Run the demo to its end; asserts success unless told otherwise.

    Its processes are forked (``tests.zygote``), or with ``new`` started by the real launcher.
    """
    preset, small = DEMOS[layout.recipe]
    flags = [preset, *small, *inputs_of(layout.recipe, directory.parent), *arguments]
    flags += ["--output_dir", str(directory)]
    directory.parent.mkdir(parents=True, exist_ok=True)
    words, extra = command(layout, flags, directory.parent), extra or {}
    if not new:
        done = fork(layout, words, timeout=timeout, **extra)
    else:
        done = subprocess.run(
            words,
            env=environment(**extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            cwd=ROOT,
            check=False,
        )
    assert not ok or done.returncode == 0, done.stdout[-4000:]
    return Finished(directory, done.stdout, done.returncode)


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of all tensors over the norm of the first's."""
    assert a.keys() == b.keys()
    difference = sum(float((a[k].double() - b[k].double()).square().sum()) for k in a)
    return (difference / sum(float(v.double().square().sum()) for v in a.values())) ** 0.5

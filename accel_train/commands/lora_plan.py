"""The plan of ``accel-train lora``: presets by memory and intent, and the largest that fits this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from accel_train.commands.bundled import folder
from accel_train.config import UsageError
from accel_train.options.loading import from_tree, read_tree
from accel_train.options.tree import Tree, overlaid
from accel_train.speed.memory import fitting
from accel_train.speed.memory.fitting import GIB
from accel_train.training import schedules
from accel_train.training.schedules import ScheduleConfig

if TYPE_CHECKING:
    from accel_train.domains.images.pipelines.loading import DiffusersBase

Intent = Literal["speed", "balanced", "quality"]
INTENTS: Mapping[str, str] = {"speed": "lora_speed", "balanced": "lora_tune", "quality": "lora_quality"}
"""Preset with the experiment of each intent."""
OUTPUT_DIR = "runs/lora"
BY_MEMORY = re.compile(r"lora_(\d+)gb")
OF_THE_MACHINE = (
    "micro_batch_size",
    "precision",
    "base",
    "lora.base_precision",
    "data.resolutions",
    "activation_checkpointing",
    "offload_frozen",
    "evaluation.batch_size",
)
"""Options to copy from a preset by memory into an intent. Its other options are those of the intent balanced."""
NOMINAL = 0.9
"""Least fraction of n GiB that a device sold with n GB reports, since its driver keeps a part."""

ORIGIN = "activations simulated, the rest by arithmetic; not measured"
"""Origin of the numbers in a plan."""


class Machine(NamedTuple):
    """Memory to plan for."""

    name: str
    gib: float


def find_machine(memory_gib: float | None) -> Machine:
    """Return the smallest visible accelerator, or the host without one."""
    if memory_gib is not None:
        return Machine("as --memory_gib says", memory_gib)
    # The smallest device decides, because every process has the same micro-batch.
    devices: list[Machine] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(Machine(properties.name, properties.total_memory / GIB))
    return min(devices, key=lambda machine: machine.gib, default=Machine("the host", fitting.host_bytes() / GIB))


def presets_by_memory() -> dict[int, Path]:
    """Return the presets by the memory of their target device in GB, ascending."""
    presets: dict[int, Path] = {}
    for path in (folder("recipes") / "presets").glob("*.yaml"):
        match = BY_MEMORY.fullmatch(path.stem)
        if match is not None:
            presets[int(match[1])] = path
    return dict(sorted(presets.items()))


def make(
    recipe: ModuleType, flags: Mapping[str, Any], intent: Intent, memory_gib: float | None
) -> tuple[Tree, list[str]]:
    """Return the options of a run on this machine, and lines that explain the choice.

    The presets are tried from the largest down. Raises ``UsageError`` if none fits, or for a base
    that cannot be found.
    """
    from accel_train.domains.images.memory.memory_need import denoiser_values

    machine = find_machine(memory_gib)
    base = _find_base(flags)
    experiment = read_tree(folder("recipes") / "presets" / f"{INTENTS[intent]}.yaml")
    lines = [f"machine: {machine.name}, {machine.gib:.1f} GiB", f"intent: {intent} ({INTENTS[intent]})"]
    presets = presets_by_memory()
    smallest = min(presets)
    if machine.gib < NOMINAL * smallest:
        raise UsageError(
            f"{machine.name}: {machine.gib:.1f} GiB of memory; at least {NOMINAL * smallest:.1f} GiB are required, for "
            f"{presets[smallest].stem}. Use a larger device"
        )
    counted = _Counted(denoiser_values(base), {})
    reasons: list[str] = []
    for offloads in (False, True):
        # From the largest down: more memory buys a larger micro-batch or less recomputation, and so speed. Presets of
        # larger devices are tried too, because with a small base they may fit.
        for gb in sorted(presets, reverse=True):
            # The user's own flags come last, so that the estimate includes them.
            tree = _with_encoders(overlaid(with_machine(experiment, read_tree(presets[gb])), flags), flags)
            name = presets[gb].stem
            if offloads:
                tree = _with_offload(tree, flags)
                name += " with offload_frozen"
            needed, reason = _need(recipe, tree, base, counted)
            fits = needed <= machine.gib
            reasons.append(f"  {name}: {reason}{', too much' * (machine.gib < needed < inf)}")
            if fits:
                chosen = f"chosen: {name}, the largest that fits ({ORIGIN})"
                advice = _advised(tree, intent, flags, base)
                return tree, [*lines, *reasons, chosen, *advice]
        # The user has set offload_frozen, so it is not tried as a last resort.
        if "offload_frozen" in flags:
            break
    listed = "\n".join(reasons)
    raise UsageError(
        f"{machine.name}: {machine.gib:.1f} GiB of memory, and no preset fits:\n{listed}\nTake a smaller base, or "
        "lower --data.resolutions"
    )


def _with_encoders(tree: Tree, flags: Mapping[str, Any]) -> Tree:
    """Return the options with text encoders in fp32 if they are trained, since presets set a dtype for frozen ones."""
    if not tree.get("text_encoders", {}).get("rank") or "base.encoder_precision" in flags:
        return tree
    return overlaid(tree, {"base.encoder_precision": "fp32"})


def _with_offload(tree: Tree, flags: Mapping[str, Any]) -> Tree:
    """Return the options with blocks of the base in host memory: the last resort, because they cross the bus."""
    values: dict[str, Any] = {"offload_frozen": True}
    if not tree.get("text_encoders", {}).get("rank"):
        values["base.offload_encoders"] = True
    # Weights of bitsandbytes cannot be offloaded. fp8 takes as many bytes as int8 over the bus.
    if tree.get("lora", {}).get("base_precision") in ("int8", "nf4") and "lora.base_precision" not in flags:
        values["lora.base_precision"] = "fp8"
    return overlaid(tree, values)


def with_machine(experiment: Tree, machine: Tree) -> Tree:
    """Return the options of an intent, with those ``OF_THE_MACHINE`` taken from a preset by memory."""
    values: dict[str, Any] = {}
    for option in OF_THE_MACHINE:
        group, _, leaf = option.partition(".")
        if group in machine and not leaf:
            values[group] = machine[group]
        elif leaf in machine.get(group, {}):
            values[option] = machine[group][leaf]
    return overlaid(experiment, values)


def _find_base(flags: Mapping[str, Any]) -> DiffusersBase:
    from accel_train.domains.images.pipelines import loading

    given = {name.removeprefix("base."): value for name, value in flags.items() if name.startswith("base.")}
    base = loading.find_base(from_tree(loading.BaseConfig, given, "command line"))
    if not isinstance(base, loading.DiffusersBase):
        raise UsageError(
            f"--base {base.source}: a model of recipes/mmdit.py, which needs no plan; give a diffusers pipeline, or "
            f"train with `accelerate launch recipes/lora.py lora_demo --base.source {base.source}`"
        )
    return base


class _Counted(NamedTuple):
    """Sizes of a base that are counted once for all presets."""

    values: int
    """Number of values of its denoiser's weights."""
    sizes: dict[Any, fitting.Size]
    """Sizes of the denoiser with adapters, by the options that they depend on."""


def _need(recipe: ModuleType, tree: Tree, found: DiffusersBase, counted: _Counted) -> tuple[float, str]:
    """Return the GiB that a run with these options needs, infinite if it cannot be built here, and a text about it."""
    from accel_train.domains.images.memory import memory_need
    from accel_train.domains.images.trained_text.adapters import build, with_trained_text
    from accel_train.domains.images.weighting.prior import ROWS

    config: Any = from_tree(recipe.Config, tree, "command line")
    base = replace(found, config=config.base)
    text = config.text_encoders
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        trained = with_trained_text(base, text)
        key = (config.lora, text, config.precision, config.offload_frozen)
        if key not in counted.sizes:
            # Counted on the meta device, which needs neither the weights nor the memory for them.
            counted.sizes[key] = fitting.size_of(
                lambda: build(trained, config.lora, text, config.precision, device),
                offload_frozen=config.offload_frozen,
            )
    except UsageError as error:
        return inf, str(error)
    # The largest resolution needs the most memory, and one step of it is enough to run out.
    sides = max(config.data.resolutions)
    # A picture of the prior comes with each picture of training.
    rows = min(config.micro_batch_size, config.global_batch_size)
    if config.data.prior.path:
        rows *= ROWS
    drawn = 0.0
    if config.evaluation.prompts or config.evaluation.heldout_prompts:
        drawn = config.evaluation.pixels(config.data) ** 2 / memory_need.MEGAPIXEL
    checkpointing = config.activation_checkpointing.mode
    if config.activation_checkpointing.blocks is not None:
        # The saving by checkpointing only some blocks is not known, so the need without any is taken.
        checkpointing = "none"
    load = memory_need.Load(
        size=counted.sizes[key],
        values=counted.values,
        micro_batch_size=rows,
        megapixels=sides**2 / memory_need.MEGAPIXEL,
        checkpointing=checkpointing,
        precision=config.precision,
        optimizer=config.optimizer.name,
        has_ema=config.ema.decay > 0,
        drawn_megapixels=drawn,
    )
    need = memory_need.estimate(base, load)
    return need.most, f"needs {need}"


def _fit_warmup(tree: Tree, flags: Mapping[str, Any]) -> list[str]:
    """Shorten the preset's warm-up in ``tree`` to the user's number of steps, in place, and return lines about it.

    A start with the preset and the flag does the same. A start with the plan cannot tell the two apart.
    """
    steps = flags.get("max_steps")
    if steps is None or "schedule.warmup_steps" in flags or "schedule.decay_steps" in flags:
        return []
    schedule = from_tree(ScheduleConfig, tree["schedule"], "command line")
    shorter = schedules.shortened(schedule, steps, ["warmup_steps"])
    if shorter == schedule:
        return []
    tree["schedule"]["warmup_steps"] = shorter.warmup_steps
    return [f"  with schedule.warmup_steps {shorter.warmup_steps}, because the run has {steps} steps"]


def _advised(tree: Tree, intent: Intent, flags: Mapping[str, Any], base: DiffusersBase) -> list[str]:
    """Fit the warm-up, add the intent's option for this kind of base to ``tree``, in place, and describe both."""
    lines = _fit_warmup(tree, flags)
    if intent != "quality":
        return lines
    prediction = base.levels().prediction
    group, option, value = "objective", "snr_weighting", "min_snr"
    if prediction == "flow":
        # Weights by signal-to-noise are for noise and v. A flow is weighted by how often a time is drawn.
        group, option, value = "times", "density", "logit_normal"
    # An option that the user has set stays.
    if f"{group}.{option}" in flags:
        return lines
    tree.setdefault(group, {})[option] = value
    return [*lines, f"  with {group}.{option} {value}, because the base predicts {prediction}"]

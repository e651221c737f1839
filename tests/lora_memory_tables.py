"""Tables of docs/lora.md: GiB of each preset by memory for each published model, and the figures of activations.

python -m tests.lora_memory_tables        # write them
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accel_train.commands.bundled import find_recipe, import_recipe
from accel_train.commands.lora_plan import overlaid, presets_by_memory
from accel_train.domains.images.memory import memory_need
from accel_train.domains.images.memory.simulated_memory import MODELS, Model
from accel_train.domains.images.pipelines.family import Family
from accel_train.domains.images.pipelines.loading import FAMILIES, DiffusersBase, find_base
from accel_train.domains.images.trained_text.adapters import build
from accel_train.options.loading import from_tree, read_tree
from accel_train.speed.memory import fitting
from benchmarks import lora_bases

PAGE = Path(__file__).parents[1] / "docs" / "lora.md"
BEGIN, END = "<!-- {}: written by python -m tests.lora_memory_tables -->", "<!-- end -->"
VISIBLE = 0.98
"""GiB that a GPU of a GB shows."""
VAE_VALUES = 84e6
"""Of a VAE of Stable Diffusion and Flux, in place of the tiny one of a folder."""


def figures() -> str:
    """The figures of activations."""
    heads = ("Model", "Fixed", "Picture, by mode", "Megapixel, `none`", "`selective`", "`full`")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for models in MODELS.values():
        for model in models:
            modes = (model.none, model.selective, model.full)
            pictures = ", ".join(f"{mode.picture:.2f}" for mode in modes)
            pixels = " | ".join(f"{mode.megapixel:.2f}" for mode in modes)
            lines.append(f"| {model.name} | {model.fixed:.2f} | {pictures} | {pixels} |")
    return "\n".join(lines)


def needs() -> str:
    """What training takes, with the reserve."""
    presets = presets_by_memory()
    lines = ["| | " + " | ".join(f"`lora_{gb}gb`" for gb in presets) + " |", "|---" * (len(presets) + 1) + "|"]
    with tempfile.TemporaryDirectory() as directory:
        for family in FAMILIES:
            for model in MODELS[family.name]:
                folder = lora_bases.save(lora_bases.MODELS[model.name], Path(directory) / model.name)
                found = {gb: _need(folder, family, model, path) for gb, path in presets.items()}
                cells = [f"**{gib:.1f}**" if gib <= VISIBLE * gb else f"{gib:.1f}" for gb, gib in found.items()]
                lines.append(f"| {model.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


_SIZES: dict[tuple[str, str], fitting.Size] = {}


def _need(folder: Path, family: Family, model: Model, preset: Path) -> float:
    recipe: Any = import_recipe(find_recipe("lora"))
    config: Any = from_tree(recipe.Config, overlaid(read_tree(preset), {"base.source": str(folder)}), str(preset))
    base = find_base(config.base)
    assert isinstance(base, DiffusersBase)
    # The folder of FLUX.2-dev is a pipeline of klein.
    base = replace(base, family=family)
    key = (model.name, config.lora.base_precision)
    if key not in _SIZES:
        # Presets of one precision differ in nothing else that is counted here.
        made = partial(build, base, config.lora, config.text_encoders, config.precision, torch.device("cpu"))
        _SIZES[key] = fitting.size_of(made)
    (side,) = config.data.resolutions
    load = memory_need.Load(
        _SIZES[key],
        model.values,
        config.micro_batch_size,
        side**2 / memory_need.MEGAPIXEL,
        config.activation_checkpointing.mode,
        config.precision,
        config.optimizer.name,
    )
    vae = VAE_VALUES * fitting.FP32_BYTES / fitting.GIB
    return memory_need.estimate(base, load).training + vae + memory_need.RESERVED_GIB


TABLES = {"needs": needs, "figures": figures}


def replaced(text: str, name: str, table: str) -> str:
    """The page with this table in place of its own."""
    head, _, rest = text.partition(BEGIN.format(name))
    _, _, tail = rest.partition(END)
    assert tail, f"{PAGE.name} has no place for {name}"
    return f"{head}{BEGIN.format(name)}\n\n{table}\n\n{END}{tail}"


def main() -> int:
    """Write the tables into the page."""
    text = PAGE.read_text()
    for name, table in TABLES.items():
        text = replaced(text, name, table())
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A shipped preset with a shipped launch file gives no finding on a machine as they ask for.

With the real sizes of its model and data, so that the rules of every stage may speak. Launch files that shard or
offload are for models that do not fit easily on each device: with a preset that does, exactly that is found.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.domains.models.mmdit import MultimodalMMDiT
from accel_train.launch_files.machine_config import read_machine_config
from accel_train.linting import reporting
from accel_train.linting.facts import GIB, Device, Layout
from accel_train.linting.host import facts_of, layout_of_file
from accel_train.linting.table import Found, lint
from accel_train.options.loading import load_config, preset_names
from recipes import causal_lm, lora, mmdit, pde
from tests.distributed.launching import environment
from tests.linting.cases import A100, HOST, RTX_4090
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "recipes" / "presets"
LAUNCH_FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
RECIPES: tuple[Any, ...] = (causal_lm, lora, mmdit, pde)
EVERY_PRESET = [(recipe, name) for recipe in RECIPES for name in preset_names(recipe.Config, PRESETS)]


SIZES = {
    "demo": (4_268_736, 31_765),
    "image_demo": (3_290_160, 1_570),
    "image_shapes": (2_853_535, 8_192),
    "mmdit_baseline": (6_928_128, 31_765),
    "mmdit_optimized": (6_928_128, 31_765),
    "causal_lm_demo": (1_328_256, 5_059),
    "causal_lm_smoke": (53_408, 14_467),
    "pde_demo": (1_371_246, 30_720),
    "pde_baseline": (1_371_246, 30_720),
    "pde_optimized": (1_371_246, 30_720),
    "pde_stack_baseline": (32_587_438, 30_720),
    "pde_stack_optimized": (32_587_438, 30_720),
}
"""Trained parameters and samples of presets with bundled data, as a start counts them."""
OWN_SAMPLES = 1_000_000
"""Of a preset for data of one's own."""
TUNED = {"causal_lm_tune": 596_049_920}
"""Qwen3-0.6B."""
ADAPTERS = 50_000_000
FLUX, SDXL = 11_900_000_000, 2_570_000_000
"""Frozen values below adapters."""
BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0, "nf4": 0.5}
GPUS = tuple(size * GIB for size in (6, 8, 12, 16, 24, 40, 48, 80))
UNNEEDED = {"sharding-without-need", "offload-without-need"}


@cache
def sizes_of(recipe: Any, name: str) -> dict[str, int]:
    """Return the sizes that a start of the preset would find."""
    config = config_of(recipe, name)
    if name in SIZES:
        parameters, samples = SIZES[name]
        return {"parameters": parameters, "dataset_size": samples}
    if recipe is lora:
        # Of its own small base.
        base = 3_290_160 if name == "lora_demo" else SDXL if name in ("lora_6gb", "lora_8gb") else FLUX
        frozen = int(base * BYTES[config.lora.base_precision])
        return {"parameters": ADAPTERS, "dataset_size": 200, "frozen_bytes": frozen}
    if recipe is mmdit:
        # all-MiniLM, unless the preset names an encoder.
        shape = config.model.multimodal(config.data.vocab_size, config.data.max_length, (1, 384))
        if config.data.latent_dim:
            shape = replace(shape, latent_dim=config.data.latent_dim)
        with torch.device("meta"):
            model = MultimodalMMDiT(shape)
        return {"parameters": sum(p.numel() for p in model.parameters()), "dataset_size": OWN_SAMPLES}
    return {"parameters": TUNED[name], "dataset_size": OWN_SAMPLES}


@cache
def config_of(recipe: Any, name: str) -> Any:
    return load_config(recipe.Config, [name], presets=PRESETS).config


def findings(recipe: Any, name: str, layout: Layout, device: Device) -> list[Found]:
    devices = (device,) * layout.local_processes if layout.device == "cuda" else ()
    return lint(facts_of(config_of(recipe, name), layout, {}, replace(HOST, devices=devices), **sizes_of(recipe, name)))


def test_all_presets_and_launch_files_are_here() -> None:
    assert {name for _, name in EVERY_PRESET} == {path.stem for path in PRESETS.glob("*.yaml")}
    assert len(LAUNCH_FILES) >= 7


@pytest.mark.parametrize("file", LAUNCH_FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("has_devices", [True, False], ids=["gpu", "cpu"])
def test_shipped_presets_give_no_finding(file: Path, has_devices: bool) -> None:
    """On GPUs of 80 GiB all of them fit easily, which a launch file that shards or offloads is not for."""
    layout = layout_of_file(read_machine_config(file), has_devices=has_devices)
    spares = layout.offload or layout.strategy == "fsdp2"
    for recipe, name in EVERY_PRESET:
        found = findings(recipe, name, layout, A100)
        names = {rule.name for rule, _ in found}
        expected = {"offload-without-need" if layout.offload else "sharding-without-need"} if spares else set[str]()
        assert names == expected, f"{name}: {reporting.describe(found)}"


@pytest.mark.parametrize("stem", ["fsdp2", "fsdp2_offload", "zero2_offload", "zero3_offload"])
def test_a_launch_file_that_spares_memory_is_for_models_that_fill_a_device(stem: str) -> None:
    """On the largest GPU that a preset fills, such a launch file gives no finding at all."""
    layout = layout_of_file(read_machine_config(ROOT / "accelerate_configs" / f"{stem}.yaml"), has_devices=True)
    meant: set[str] = set()
    for recipe, name in EVERY_PRESET:
        for memory in reversed(GPUS):
            found = findings(recipe, name, layout, replace(A100, memory_bytes=memory))
            names = {rule.name for rule, _ in found}
            if not names & UNNEEDED:
                assert not found, f"{name}: {reporting.describe(found)}"
                meant.add(name)
                break
    # Models of a few million parameters fit easily everywhere: the demos are not meant for these launch files.
    assert {"base", "l2t_qwen", "causal_lm_tune", "lora_tune", "lora_24gb"} <= meant
    assert not meant & SIZES.keys()


# Slow: bundled data are prepared. The linter is quick with their sizes in the table.
@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "name"), [case for case in EVERY_PRESET if case[1] in SIZES], ids=str)
def test_the_sizes_are_those_of_a_start(recipe: Any, name: str, tmp_path: Path) -> None:
    words = [recipe.__name__.split(".")[-1], name, "--output_dir", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.linting.sizes", *words],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert "RESULT " in done.stdout, done.stderr[-4000:]
    found = json.loads(done.stdout.split("RESULT ")[1])
    assert (found["parameters"], found["dataset_size"]) == SIZES[name]
    assert found["frozen_bytes"] == 0


def test_frozen_weights_fill_a_device_as_well() -> None:
    """A base in bf16 is larger than the state of its adapters: sharding it is no waste."""
    layout = Layout("fsdp2", 2, device="cuda")
    host = replace(HOST, devices=(RTX_4090,) * 2)
    recipe: Any = lora
    config = config_of(recipe, "lora_24gb")
    small = facts_of(config, layout, {}, host, parameters=ADAPTERS)
    large = replace(small, frozen_bytes=FLUX)
    assert [rule.name for rule, _ in lint(small)] == ["sharding-without-need"]
    assert lint(large) == []


def test_a_smoke_of_each_recipe_gives_no_finding() -> None:
    layout = layout_of_file(read_machine_config(ROOT / "accelerate_configs" / "single_gpu.yaml"), has_devices=True)
    first = dict(reversed(EVERY_PRESET))
    for recipe, name in first.items():
        config = load_config(recipe.Config, [name, "--smoke"], presets=PRESETS).config
        found = lint(facts_of(config, layout, {}, replace(HOST, devices=(A100,))))
        assert not found, f"{name}: {reporting.describe(found)}"

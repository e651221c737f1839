"""Matrix products in float8 for the large linear layers of the blocks, through torchao.

Only the operands of the products are rounded, each with a dynamic scale. Weights, gradients, optimizer and checkpoints
keep their dtypes, so checkpoints of float8 runs and of other runs are interchangeable.

The scales of tensorwise are computed per micro-batch, so another division of the global batch changes the gradient by
1e-3 of its norm (bf16 alone: 2e-3). The scales of rowwise are powers of two, exact in floating point, and add no such
difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from accel_train.config import UsageError
from accel_train.speed.blocks import blocks_of
from accel_train.speed.options import Float8

CAPABILITY: dict[str, tuple[int, int]] = {"tensorwise": (8, 9), "rowwise": (9, 0)}
"""Lowest compute capability: float8 matrix units came with Ada, products with a scale per row with Hopper."""

STRATEGIES = ("single", "ddp", "fsdp2")
"""Strategies covered by the tests, on CPU processes with emulated products."""

TORCHAO = Version("0.16")
"""First tested version."""

MULTIPLE = 16
"""Sides of a float8 product are multiples of this."""


def refuse_float8(recipe: Float8, device: torch.device, precision: str, strategy: str) -> None:
    """Raise `UsageError` for a machine, strategy or precision without float8. Imports nothing."""
    if recipe == "none":
        return
    _refuse_device(recipe, device)
    refuse_float8_strategy(recipe, precision, strategy)
    _refuse_package(recipe)


def refuse_float8_strategy(recipe: Float8, precision: str, strategy: str) -> None:
    """Raise `UsageError` for a strategy or precision without float8, on whatever device."""
    if recipe == "none":
        return
    if precision != "bf16":
        raise UsageError(
            f"float8: {recipe} with precision {precision}: what is not in float8 is computed in bf16; use --precision "
            "bf16, or --float8 none"
        )
    if strategy not in STRATEGIES:
        raise UsageError(
            f"float8: {recipe} runs under {', '.join(STRATEGIES)}, this is {strategy}: DeepSpeed casts weights and "
            "replaces linear layers by functions of its own, and the two have never been run together; use "
            "accelerate_configs/fsdp2.yaml, which shards as much, or --float8 none"
        )


def apply_float8(model: nn.Module, recipe: Float8, *, emulate: bool = False) -> str:
    """Convert the layers of `large_linears` to float8, in place, and return a notice.

    Parameters stay the same objects under the same names. Call it on every process after the initial weights are in
    the model, and before `apply_activation_checkpointing`, `apply_compile`, the optimizer and `prepare`.
    `emulate` does the same rounding with fp32 products on any device, for tests. rowwise sets an option of torch's
    compiler for the whole process (`_convert`). Raises `UsageError` where no layer fits.
    """
    if recipe == "none":
        return "float8: none"
    linears = list(_linears(model))
    chosen = large_linears(model, recipe)
    if not chosen:
        raise UsageError(
            f"float8: {recipe} finds no layer to work on: of {len(linears)} linear layers in the blocks of "
            f"{type(model).__name__} the largest has {_largest(linears)}; {_needed(recipe)}. Train in bf16 with "
            "--float8 none, or widen the model."
        )
    _convert(model, set(chosen.values()), recipe, emulate)
    converted = sum(layer.weight.numel() for layer in chosen.values())
    share = converted / sum(layer.weight.numel() for layer in linears)
    return f"float8: {recipe} in {len(chosen)} of {len(linears)} linear layers of the blocks, {share:.0%} of weights"


def large_linears(model: nn.Module, recipe: Float8) -> dict[str, nn.Linear]:
    """Return the layers that are faster in float8, by name: large, inside `blocks_of(model)`, run once per token.

    Norms, embeddings, heads, modules with `once_per_sample` and subclasses of `nn.Linear` such as `Float32Linear`
    are left out.
    """
    inside = set(_linears(model))
    layers: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module in inside:
            outputs, inputs = module.weight.shape
            if gains(recipe, outputs, inputs):
                layers[name] = module
    return layers


def gains(recipe: Float8, outputs: int, inputs: int) -> bool:
    """Return True if a layer of these sides is faster in float8, by torchao's measurements on an H100.

    The rules follow `_auto_filter_for_recipe`, private and subject to change.
    """
    if outputs % MULTIPLE or inputs % MULTIPLE:
        return False
    if recipe == "tensorwise":
        # Below, the rounding of the operands takes longer than the product saves.
        return outputs > 1024 or inputs > 4096
    return outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048)


def _needed(recipe: Float8) -> str:
    """Describe the rule of `gains`, for messages."""
    sides = f"it needs inputs and outputs in multiples of {MULTIPLE}, "
    if recipe == "tensorwise":
        return sides + "with more than 1024 outputs or more than 4096 inputs"
    return sides + "more than 2048 outputs, more than 1024 inputs, and more than 4096 outputs or 2048 inputs"


def _largest(linears: list[nn.Linear]) -> str:
    if not linears:
        return "none"
    shapes = [module.weight.shape for module in linears]
    outputs, inputs = max(shapes, key=lambda shape: shape.numel())
    return f"{outputs} outputs and {inputs} inputs"


def _linears(model: nn.Module) -> Iterator[nn.Linear]:
    """Yield the linear layers of the blocks, except those run once per sample."""
    for block in blocks_of(model):
        once: set[nn.Module] = set()
        for module in block.modules():
            if getattr(module, "once_per_sample", False):
                # Modulations run on one row for each sample, and a product that small gains nothing.
                once.update(module.modules())
        for module in block.modules():
            # Not a subclass, which may need a dtype of its own.
            if type(module) is nn.Linear and module not in once:
                yield module


def _convert(model: nn.Module, chosen: set[nn.Linear], recipe: str, emulate: bool) -> None:
    try:
        ao: Any = import_module("torchao.float8")
    except ImportError as error:
        raise UsageError(
            f"float8: {recipe} needs torchao, and with torch {torch.__version__} it cannot be imported ({error}); "
            "install the version that belongs to this torch (pytorch/ao#2919 lists them), or use --float8 none"
        ) from error
    # A micro-batch may hold any number of rows, and in the gradient of the weights they are the inner side of the
    # product, which must be a multiple of 16 (pytorch/ao#571). Where it already is, the compiler removes the padding.
    config = replace(ao.Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True, emulate=emulate)
    ao.convert_to_float8_training(model, module_filter_fn=lambda layer, _: layer in chosen, config=config)
    if recipe == "rowwise":
        # Compiled code keeps fp32 where the model says bf16, so that a value can be larger than the one its scale was
        # computed from, and overflow: NaN after tens of steps behind an RMSNorm (pytorch#150859, open).
        import torch._inductor.config as inductor

        inductor.emulate_precision_casts = True


def _refuse_device(recipe: str, device: torch.device) -> None:
    if device.type != "cuda" or torch.version.hip is not None:
        kind = device.type
        if kind == "cuda":  # ROCm calls its devices cuda too
            kind = "an AMD GPU, on which it has never been run"
        raise UsageError(
            f"float8: {recipe} needs an NVIDIA GPU of compute capability {_dotted(CAPABILITY[recipe])}, but the "
            f"device is {kind}; use --float8 none"
        )
    # Queried for this device: GPUs of one host may differ.
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY[recipe]:
        other = ""
        if found >= CAPABILITY["tensorwise"]:
            other = ", --float8 tensorwise"
        raise UsageError(
            f"float8: {recipe} needs compute capability {_dotted(CAPABILITY[recipe])}, "
            f"{torch.cuda.get_device_name(device)} has {_dotted(found)}; use --float8 none{other}"
        )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _refuse_package(recipe: str) -> None:
    try:
        installed = Version(version("torchao"))
    except PackageNotFoundError:
        installed = None
    if installed is None or installed < TORCHAO:
        raise UsageError(
            f"float8: {recipe} needs torchao {TORCHAO} or newer, and "
            f"{'it is not installed' if installed is None else f'{installed} is installed'}; run "
            'pip install "accel-train[float8]", or use --float8 none'
        )

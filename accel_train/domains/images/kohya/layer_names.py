"""Names of layers in kohya's sd-scripts and ComfyUI, by their paths in diffusers.

UNets of Stable Diffusion 1.x and 2.x keep the names of diffusers, and XL has those of the original code (sgm).
Transformers also have their original names, with query, key and value as one layer. The adapters of the three are
joined to one of the summed rank, with the first matrices stacked and the second ones on the diagonal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from accel_train.config import UsageError

PREFIX = "lora_unet_"
"""Prefix of the keys of a denoiser's adapters, for transformers as well as UNets."""
BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.(attentions|resnets)\.(\d+)\.(.+)")
MIDDLE = re.compile(r"mid_block\.(attentions|resnets)\.(\d+)\.(.+)")
PLACES = {"resnets": 0, "attentions": 1}
SGM_LAYERS = {
    "time_emb_proj": "emb_layers.1",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
"""Layers outside of attention in the original UNet of XL."""

NUMBERED = re.compile(r"(\w+)\.(\d+)\.(.+)")
JOINED = {
    "attn.to_q": 0,
    "attn.to_k": 1,
    "attn.to_v": 2,
    "attn2.to_q": 0,
    "attn2.to_k": 1,
    "attn2.to_v": 2,
    "attn.add_q_proj": 0,
    "attn.add_k_proj": 1,
    "attn.add_v_proj": 2,
    "attention.to_q": 0,
    "attention.to_k": 1,
    "attention.to_v": 2,
    "proj_mlp": 3,
}
"""Number of each layer among the parts of its joined layer."""
FLUX_EMBEDDERS = {
    "timestep_embedder.linear_1": "time_in.in_layer",
    "timestep_embedder.linear_2": "time_in.out_layer",
    "text_embedder.linear_1": "vector_in.in_layer",
    "text_embedder.linear_2": "vector_in.out_layer",
    "guidance_embedder.linear_1": "guidance_in.in_layer",
    "guidance_embedder.linear_2": "guidance_in.out_layer",
}
FLUX_DOUBLE = {
    "attn.to_q": "img_attn.qkv",
    "attn.to_k": "img_attn.qkv",
    "attn.to_v": "img_attn.qkv",
    "attn.add_q_proj": "txt_attn.qkv",
    "attn.add_k_proj": "txt_attn.qkv",
    "attn.add_v_proj": "txt_attn.qkv",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
}
FLUX = {
    "transformer_blocks": {
        **FLUX_DOUBLE,
        "": "double_blocks",
        "ff.net.0.proj": "img_mlp.0",
        "ff.net.2": "img_mlp.2",
        "ff_context.net.0.proj": "txt_mlp.0",
        "ff_context.net.2": "txt_mlp.2",
        "norm1.linear": "img_mod.lin",
        "norm1_context.linear": "txt_mod.lin",
    },
    "single_transformer_blocks": {
        "": "single_blocks",
        "attn.to_q": "linear1",
        "attn.to_k": "linear1",
        "attn.to_v": "linear1",
        "proj_mlp": "linear1",
        "proj_out": "linear2",
        "norm.linear": "modulation.lin",
    },
    "outside": {
        **{f"time_text_embed.{theirs}": ours for theirs, ours in FLUX_EMBEDDERS.items()},
        "x_embedder": "img_in",
        "context_embedder": "txt_in",
        "proj_out": "final_layer.linear",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
    },
}
"""Black Forest Labs' names, by the list of blocks. Under ``""`` is the name of the list."""
FLUX2 = {
    "transformer_blocks": {
        **FLUX_DOUBLE,
        "": "double_blocks",
        "ff.linear_in": "img_mlp.0",
        "ff.linear_out": "img_mlp.2",
        "ff_context.linear_in": "txt_mlp.0",
        "ff_context.linear_out": "txt_mlp.2",
    },
    "single_transformer_blocks": {
        "": "single_blocks",
        "attn.to_qkv_mlp_proj": "linear1",
        "attn.to_out": "linear2",
    },
    "outside": {
        "x_embedder": "img_in",
        "context_embedder": "txt_in",
        "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
        "proj_out": "final_layer.linear",
    },
}
SD3 = {
    "transformer_blocks": {
        "": "joint_blocks",
        "attn.to_q": "x_block.attn.qkv",
        "attn.to_k": "x_block.attn.qkv",
        "attn.to_v": "x_block.attn.qkv",
        "attn.to_out.0": "x_block.attn.proj",
        "attn2.to_q": "x_block.attn2.qkv",
        "attn2.to_k": "x_block.attn2.qkv",
        "attn2.to_v": "x_block.attn2.qkv",
        "attn2.to_out.0": "x_block.attn2.proj",
        "attn.add_q_proj": "context_block.attn.qkv",
        "attn.add_k_proj": "context_block.attn.qkv",
        "attn.add_v_proj": "context_block.attn.qkv",
        "attn.to_add_out": "context_block.attn.proj",
        "ff.net.0.proj": "x_block.mlp.fc1",
        "ff.net.2": "x_block.mlp.fc2",
        "ff_context.net.0.proj": "context_block.mlp.fc1",
        "ff_context.net.2": "context_block.mlp.fc2",
        "norm1.linear": "x_block.adaLN_modulation.1",
        "norm1_context.linear": "context_block.adaLN_modulation.1",
    },
    "outside": {
        "context_embedder": "context_embedder",
        "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
        "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
        "proj_out": "final_layer.linear",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
    },
}
"""Stability's names."""
Z_IMAGE_BLOCK = {
    "attention.to_q": "attention.qkv",
    "attention.to_k": "attention.qkv",
    "attention.to_v": "attention.qkv",
    "attention.to_out.0": "attention.out",
    "feed_forward.w1": "feed_forward.w1",
    "feed_forward.w2": "feed_forward.w2",
    "feed_forward.w3": "feed_forward.w3",
    "adaLN_modulation.0": "adaLN_modulation.0",
}
Z_IMAGE = {name: {**Z_IMAGE_BLOCK, "": name} for name in ("layers", "noise_refiner", "context_refiner")}
TABLES: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "flux": FLUX,
    "flux2": FLUX2,
    "sd3": SD3,
    "z_image": Z_IMAGE,
    # Its original has the names of diffusers.
    "qwen_image": {},
}


class Layer(NamedTuple):
    """Adapter of a layer: ``down`` (rank, in), ``up`` (out, rank). Their product is scaled by alpha / rank."""

    down: Tensor
    up: Tensor
    alpha: float


class Place(NamedTuple):
    """Counterpart of a diffusers layer in the original model: a whole layer or a part of one."""

    name: str
    part: int = 0
    widths: tuple[int, ...] = ()
    """Number of outputs of each part. Empty for a whole layer."""
    is_swapped: bool = False
    """True if scale and shift, the two halves of its output, are in the opposite order."""


def renamed(layers: Mapping[str, Layer], facts: Mapping[str, str]) -> dict[str, Layer]:
    """Return adapters by their names in kohya's files, from those by their paths in diffusers.

    ``facts`` are from ``kohya_facts``. Raises ``UsageError`` for a layer without such a name, and for two with one.
    """
    parts: dict[str, dict[int, Layer]] = {}
    places: dict[str, Place] = {}
    for path, layer in layers.items():
        place = place_of(path, facts)
        # Query, key and value come as three layers, and leave as one.
        found = parts.setdefault(place.name, {})
        if place.part in found:
            raise UsageError(f"two layers would have the name {place.name}; one of them is {path}")
        if place.is_swapped:
            layer = _swapped(layer)
        # diffusers reads this layer of Flux without its alpha.
        if place.name.startswith("final_layer"):
            layer = _scaled(layer)
        found[place.part] = layer
        places[place.name] = place
    whole: dict[str, Layer] = {}
    for name, found in parts.items():
        flat = name.replace(".", "_")
        whole[PREFIX + flat] = _joined(found, places[name].widths)
    return whole


def renamed_text(layers: Mapping[str, Layer], component: str, facts: Mapping[str, str]) -> dict[str, Layer]:
    """Return adapters of a text encoder by their names in kohya's files, from paths below ``text_model``'s parent.

    XL numbers its two encoders, ``lora_te1_`` and ``lora_te2_``; others have ``lora_te_``.
    """
    number = ""
    if facts["ss_base_model_version"].startswith("sdxl"):
        number = "2" if component.endswith("_2") else "1"
    return {f"lora_te{number}_{path.replace('.', '_')}": layer for path, layer in layers.items()}


def place_of(path: str, facts: Mapping[str, str]) -> Place:
    """Return the place of a diffusers layer in the original model. Raises ``UsageError`` if no name is known."""
    names = facts.get("names", "unet")
    if names == "unet":
        is_xl = facts["ss_base_model_version"].startswith("sdxl")
        # A level has one part more than it has layers, the one that changes the resolution.
        return Place(_in_original(path, int(facts["layers_per_block"]) + 1) if is_xl else path)
    if names == "qwen_image":
        return Place(path)
    table = TABLES[names]
    match = NUMBERED.fullmatch(path)
    blocks, number, rest = match.groups() if match else ("outside", "", path)
    # A number may stand in the path of a layer outside the blocks, such as one of an nn.Sequential.
    if blocks not in table:
        blocks, number, rest = "outside", "", path
    name = table.get(blocks, {}).get(rest)
    if name is None:
        raise UsageError(
            f"{path} has no name in kohya's format; give --lora.targets other layers, or use "
            "pytorch_lora_weights.safetensors"
        )
    if number:
        name = f"{table[blocks]['']}.{number}.{name}"
    # The last block of SD3 has no context to pass on: diffusers gives it
    # the norm of an output, which has the scale first.
    last = f"transformer_blocks.{int(facts['layers']) - 1}.norm1_context.linear"
    is_swapped = path == "norm_out.linear" or (names == "sd3" and path == last)
    if rest not in JOINED:
        return Place(name, is_swapped=is_swapped)
    width = int(facts["width"])
    # A single block of Flux has query, key, value and the MLP's first layer, 4 times as wide, in one layer.
    widths = (width, width, width, 4 * width) if name.endswith("linear1") else (width, width, width)
    return Place(name, JOINED[rest], widths)


def _joined(parts: Mapping[int, Layer], widths: tuple[int, ...]) -> Layer:
    """Join the adapters of layers with stacked outputs. Missing ones are zero."""
    if not widths:
        return parts[0]
    layers = [parts[number] for number in sorted(parts)]
    rank = sum(layer.down.shape[0] for layer in layers)
    up = layers[0].up.new_zeros(sum(widths), rank)
    column = 0
    for number in sorted(parts):
        row = sum(widths[:number])
        part = parts[number].up
        up[row : row + part.shape[0], column : column + part.shape[1]] = part
        column += part.shape[1]
    down = torch.cat([layer.down for layer in layers])
    # The rank is now the sum of all parts, so alpha grows with it: the scale, alpha / rank, must stay the same.
    return Layer(down, up, layers[0].alpha * rank / layers[0].down.shape[0])


def _swapped(layer: Layer) -> Layer:
    first, second = layer.up.chunk(2)
    return layer._replace(up=torch.cat([second, first]))


def _scaled(layer: Layer) -> Layer:
    """Fold the scale into the weights, for Flux layers read by diffusers without their alpha."""
    rank = layer.down.shape[0]
    return Layer(layer.down, layer.up * (layer.alpha / rank), float(rank))


def _in_original(path: str, per_block: int) -> str:
    match = BLOCK.fullmatch(path)
    if match is not None:
        side, block, kind, layer, rest = match.groups()
        number = int(block) * per_block + int(layer)
        if side == "down":
            # The first of the input blocks is the convolution before all levels.
            return f"input_blocks.{number + 1}.{PLACES[kind]}.{SGM_LAYERS.get(rest, rest)}"
        return f"output_blocks.{number}.{PLACES[kind]}.{SGM_LAYERS.get(rest, rest)}"
    match = MIDDLE.fullmatch(path)
    if match is not None:
        kind, layer, rest = match.groups()
        # A resnet, an attention, a resnet: diffusers numbers the two kinds apart.
        number = 1 if kind == "attentions" else 2 * int(layer)
        return f"middle_block.{number}.{SGM_LAYERS.get(rest, rest)}"
    return SGM_LAYERS.get(path, path)

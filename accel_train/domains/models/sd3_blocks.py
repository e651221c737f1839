"""A `MultimodalMMDiT` whose blocks start from those of Stable Diffusion 3's transformer.

SD3 reads outputs of text encoders and does not predict text. So only its blocks are taken: with the same tokens and
conditioning they give diffusers' outputs. Embeddings, times, positions and heads are newly initialised.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from accel_train.config import UsageError, expand_path
from accel_train.domains.models.mmdit import ModelConfig, MultimodalMMDiT, MultimodalMMDiTConfig
from accel_train.domains.models.sd3 import from_diffusers
from accel_train.store import strict_json
from accel_train.store.weights import TensorReader, find_tensors
from accel_train.wording import shortened

logger = logging.getLogger(__name__)
FOLDER = "transformer"
STEM = "diffusion_pytorch_model"
WEIGHTS = (f"{STEM}.safetensors", f"{STEM}.safetensors.index.json")
"""One of these is required. Their names have no variant's suffix, because a folder may hold several variants."""
SHARDS = f"{STEM}-*.safetensors"
SETTINGS = "config.json"
STREAMS = {"0": "1", "1": "0"}
"""Pictures come first in SD3, and second here."""
SHIFT_AND_SCALE = slice(None, 2)
KEYS_AND_VALUES = slice(1, None)


def build(
    shape: MultimodalMMDiTConfig, options: ModelConfig, start_step: int = 0, init_from: str | None = None
) -> MultimodalMMDiT:
    """Build the model, and at step 0 load the blocks of `options.blocks_from`. Every process reads the files.

    On the meta device nothing is loaded. Raises ``UsageError`` for options that contradict the source.
    """
    source = options.blocks_from
    if source is None:
        return MultimodalMMDiT(shape)
    _check_options(options, init_from)
    model = MultimodalMMDiT(shape)
    on_meta = model.text_head.weight.is_meta
    if start_step == 0 and not on_meta:
        new = load_blocks(model, source)
        logger.info(f"model.blocks_from {source}: blocks of SD3 loaded; newly initialised: {shortened(new, 20)}")
    return model


def _check_options(options: ModelConfig, init_from: str | None) -> None:
    if options.size != "sd3_medium" or not options.bias:
        raise UsageError(
            f"--model.blocks_from {options.blocks_from!r} with --model.size {options.size} and --model.bias "
            f"{options.bias}: the blocks of SD3 need --model.size sd3_medium --model.bias true. Set both, or "
            "leave the source out."
        )
    if init_from is not None:
        raise UsageError(
            f"--model.blocks_from {options.blocks_from!r} with --init_from {init_from!r}: a run starts from only "
            "one of them. Leave one out."
        )


def load_blocks(model: MultimodalMMDiT, source: str) -> list[str]:
    """Load the blocks of a diffusers pipeline or transformer (a folder or Hub id). Return the names of the other parts.

    Every tensor of the source has a place in SD3, and all of its blocks are taken. Raises ``UsageError`` that names
    missing, left-over and misshapen tensors.
    """
    weights, settings = read_transformer(source)
    shape = model.config.transformer
    depth = settings.get("num_layers", shape.depth)
    heads = settings.get("num_attention_heads", shape.heads)
    normalised = settings.get("qk_norm") is not None
    if (depth, heads, normalised) != (shape.depth, shape.heads, shape.qk_norm):
        raise UsageError(
            f"--model.blocks_from {source!r}: {depth} blocks, {heads} heads and qk_norm {normalised}; the model has "
            f"{shape.depth}, {shape.heads} and {shape.qk_norm}. Set --model.depth, heads and qk_norm to the source's."
        )
    try:
        found = from_diffusers(weights, depth)
    except KeyError as error:
        raise UsageError(
            f"--model.blocks_from {source!r}: the tensor {error} is missing. The weights of a whole "
            "SD3Transformer2DModel are required."
        ) from None
    own = dict(model.named_parameters())
    whole: set[str] = set()
    for name, tensor in found.items():
        if name.startswith("blocks."):
            target = _target_name(name)
            place = _place(own, target, tensor, source)
            with torch.no_grad():
                place.copy_(tensor)
            if place.shape == own[target].shape:
                whole.add(target)
    return _named_parts(set(own) - whole)


def read_transformer(source: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and config.json of a folder or Hub id, of a pipeline or of its transformer alone.

    Other variants of the weights, such as fp16, are left alone. Raises ``UsageError``, also for unreadable files.
    """
    directory = _directory(source)
    if (directory / FOLDER).is_dir():
        directory = directory / FOLDER
    settings = directory / SETTINGS
    if not any((directory / name).is_file() for name in WEIGHTS) or not settings.is_file():
        raise UsageError(
            f"--model.blocks_from {source!r}: {' or '.join(WEIGHTS)}, and {SETTINGS}, are required there or in its "
            f"folder {FOLDER!r}. Name a diffusers pipeline of SD3, or its transformer."
        )
    try:
        described = strict_json.read_object(settings)
    except (OSError, ValueError) as error:
        raise _unreadable(source, f"{settings}: {error}") from None
    try:
        tensors = find_tensors(directory, STEM)
        with TensorReader(tensors) as reader:
            return {name: reader.read(name) for name in tensors}, described
    except UsageError as error:
        raise _unreadable(source, str(error)) from None


def _unreadable(source: str, reason: str) -> UsageError:
    return UsageError(f"--model.blocks_from {source!r}: {reason}. Download it again, or give another one.")


def _directory(source: str) -> Path:
    """Return a local folder, or the Hub's snapshot, downloaded once."""
    directory = expand_path(source)
    if directory.is_dir():
        return directory
    names = [*WEIGHTS, SHARDS, SETTINGS]
    try:
        return Path(snapshot_download(source, allow_patterns=[*(f"{FOLDER}/{name}" for name in names), *names]))
    except Exception as error:
        raise UsageError(
            f"--model.blocks_from {source!r}: no such directory, and the hub answered {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}. Name the folder of a diffusers pipeline of SD3 or of its "
            "transformer, or an id that the hub or the local cache has."
        ) from None


def _target_name(name: str) -> str:
    blocks, number, streams, stream, rest = name.split(".", 4)
    return f"transformer.{blocks}.{number}.{streams}.{STREAMS[stream]}.{rest}"


def _place(own: dict[str, torch.nn.Parameter], name: str, tensor: Tensor, source: str) -> Tensor:
    """Return the destination of `tensor`: a parameter, or the part of it that SD3's last text stream has."""
    place = own.get(name)
    if place is None:
        raise UsageError(
            f"--model.blocks_from {source!r}: {name} has no place in the model. Set the options of its shape."
        )
    if place.shape == tensor.shape:
        return place
    # In SD3's last block the text gives only keys and values: two of three projections, and one shift and scale.
    part = place.detach()
    if ".qkv." in name:
        part = part.unflatten(0, (3, -1))[KEYS_AND_VALUES].flatten(0, 1)
    elif ".modulation." in name:
        part = part.unflatten(0, (6, -1))[SHIFT_AND_SCALE].flatten(0, 1)
    if part.shape != tensor.shape:
        raise UsageError(
            f"--model.blocks_from {source!r}: {name} has the shape {tuple(tensor.shape)}, the model "
            f"{tuple(place.shape)}. Set --model.width, depth, heads and ffn_ratio to those of the source."
        )
    return part


def _named_parts(names: set[str]) -> list[str]:
    """Name layers of the blocks one by one, and everything outside the blocks by its top-level module."""
    parts: set[str] = set()
    for name in names:
        outer, _, rest = name.partition(".")
        layer, _, _ = name.rpartition(".")
        parts.add(layer if rest.startswith("blocks.") else outer)
    if "transformer" in parts:
        parts.remove("transformer")
        parts.add("transformer.norms")
    return sorted(parts)

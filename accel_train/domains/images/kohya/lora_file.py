"""LoRA files of diffusers, kohya's sd-scripts and others, as they are on the disk: what they add to which layer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from accel_train.config import UsageError
from accel_train.domains.images.pipelines.adapter_files import METADATA_KEY
from accel_train.store import strict_json, weights
from accel_train.wording import shortened

MATRIX = re.compile(r"(?P<layer>.+?)[._]lora(?:_linear_layer)?[._](?P<matrix>A|B|down|up)(?:\.default)?\.weight")
"""Key of one of the two matrices of a layer's adapter, in any of these programs."""
FIRST = ("A", "down")
MAGNITUDES = (".dora_scale", ".lora_magnitude_vector", ".lora_magnitude_vector.weight")
"""Ends of the keys of DoRA's magnitudes: of kohya, of peft, and of transformers, which reads text encoders."""
OF_LAYER = (".alpha", *MAGNITUDES)
"""Ends of the other keys of an adapter."""


class Change(NamedTuple):
    """What an adapter adds to the weight of its layer: ``scale * up @ down``, in (rank, in) and (out, rank)."""

    down: Tensor
    up: Tensor
    scale: float
    magnitudes: Tensor
    """Those of DoRA, empty without it."""

    def sizes(self) -> Tensor:
        """Return (3,): its squared Frobenius norm, the number of magnitudes and their squared norm.

        Those of a layer are the sums of those of its parts. The first comes from products of (rank, rank).
        """
        down = self.down.flatten(1).double()
        up = self.up.flatten(1).double()
        norm = self.scale**2 * float(((up.T @ up) * (down @ down.T)).sum())
        return torch.tensor([norm, self.magnitudes.numel(), float(self.magnitudes.double().square().sum())]).double()


class LoraFile(NamedTuple):
    """Tensors of a file, and the change of each layer by the layer's name there."""

    tensors: Mapping[str, Tensor]
    changes: Mapping[str, Change]


def read_lora_file(file: Path) -> LoraFile:
    """Read a file. Raises ``UsageError`` for a damaged one, and for another kind of adapters."""
    tensors, settings = _tensors_and_settings(file)
    return LoraFile(tensors, _changes(file, tensors, settings))


def _tensors_and_settings(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a file, and the settings that diffusers writes into it."""
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            tensors: dict[str, Tensor] = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{file}: cannot be read ({error}); a safetensors file of LoRA is required") from None
    for key, tensor in tensors.items():
        weights.refuse_nonfinite(key, tensor, file)
    try:
        settings = strict_json.parse(metadata.get(METADATA_KEY, "{}").encode())
    except ValueError as error:
        raise _unreadable_settings(file, str(error)) from None
    if not isinstance(settings, dict):
        raise _unreadable_settings(file, f"{str(settings)[:40]} is not an object")
    return tensors, settings


def _unreadable_settings(file: Path, fault: str) -> UsageError:
    return UsageError(
        f"{file}: {METADATA_KEY} of its metadata: the settings of adapters as JSON are required ({fault}); save it "
        "again with the program that wrote it"
    )


def _changes(file: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Change]:
    """Return the change of each layer of a file, by the layer's name there."""
    changes: dict[str, Change] = {}
    for layer, matrices in _pairs(file, tensors).items():
        down, up = matrices[True], matrices[False]
        if min(down.ndim, up.ndim) < 2 or up.shape[1] != down.shape[0] or len(down) == 0:
            raise UsageError(
                f"{file}: the matrices of {layer} have the shapes {tuple(down.shape)} and {tuple(up.shape)}; (rank, "
                "in) and (out, rank) are required, with one rank above 0. Save it again with the program that wrote it"
            )
        try:
            scale = _scale(tensors.get(f"{layer}.alpha"), settings, layer, len(down))
        # Values of settings may be of any type, and names in them are regular expressions.
        except (AttributeError, OverflowError, RuntimeError, TypeError, ValueError, re.error) as error:
            raise UsageError(
                f"{file}: alpha of {layer}, in the file or in {METADATA_KEY} of its metadata: a finite number above 0 "
                f"is required ({error}); save it again with the program that wrote it"
            ) from None
        magnitudes = [tensors[layer + end].flatten() for end in MAGNITUDES if layer + end in tensors]
        changes[layer] = Change(down, up, scale, torch.cat([torch.empty(0), *magnitudes]))
    return changes


def _pairs(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, dict[bool, Tensor]]:
    """Return the two matrices of each layer. The first of them, which reads the input, is under True."""
    pairs: dict[str, dict[bool, Tensor]] = {}
    for key, tensor in tensors.items():
        match = MATRIX.fullmatch(key)
        if match is not None:
            pairs.setdefault(match["layer"], {})[match["matrix"] in FIRST] = tensor
        elif not key.endswith(OF_LAYER):
            raise UsageError(f"{file}: has {key}, which is no part of LoRA; a LoRA file is required")
    halves = [layer for layer, matrices in pairs.items() if len(matrices) < 2]
    if halves:
        raise UsageError(f"{file}: has one of the two matrices of {shortened(halves, 3)}; a LoRA file is required")
    if not pairs:
        raise UsageError(f"{file}: has no tensors; a LoRA file is required")
    return pairs


def _scale(alpha: Tensor | None, settings: Mapping[str, Any], layer: str, rank: int) -> float:
    """Return the scale of a layer. ``alpha`` of the file comes before that of its settings, as in diffusers."""
    scale = _scale_of_settings(settings, layer, rank)
    if alpha is not None:
        scale = alpha.item() / rank
    if not 0 < scale < math.inf:
        raise ValueError(f"it gives a scale of {scale:g}")
    return scale


def _scale_of_settings(settings: Mapping[str, Any], layer: str, rank: int) -> float:
    """Return the scale of a layer by the settings that diffusers writes into its file. Without any it is 1."""
    component, _, path = layer.partition(".")
    alpha = settings.get(f"{component}.lora_alpha", rank)
    patterns = settings.get(f"{component}.alpha_pattern") or {}
    alpha = next((value for name, value in patterns.items() if re.fullmatch(rf"(.*\.)?({name})", path)), alpha)
    return float(alpha) / (math.sqrt(rank) if settings.get(f"{component}.use_rslora") else rank)


def numbered(content: LoraFile) -> dict[str, Tensor]:
    """Return the matrices of a file with the number of their layer, from 1, as the only value of ``up @ down``.

    Read by diffusers like the file, they tell which layer there each layer of the pipeline comes from.
    """
    numbers = {layer: number for number, layer in enumerate(content.changes, 1)}
    found: dict[str, Tensor] = {}
    for key, tensor in content.tensors.items():
        match = MATRIX.fullmatch(key)
        if match is not None:
            shape, number = [len(tensor), 1, *tensor.shape[2:]], numbers[match["layer"]]
            if match["matrix"] in FIRST:
                shape, number = [1, *tensor.shape[1:]], 1
            # Zeros stay zeros, because diffusers passes over some layers of zeros on purpose.
            found[key] = torch.full(shape, float(number * bool(tensor.float().any())))
        elif key.endswith(".alpha"):
            found[key] = torch.ones_like(tensor)
    return found

"""LoRA files of diffusers, kohya's sd-scripts and others, converted to peft's layout for ``--init_from``.

diffusers reads the file, so its names are those that diffusers knows. What it read is compared with the file itself.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.domains.images.pipelines.adapter_files import METADATA_KEY, write_settings
from accel_train.domains.images.pipelines.components import quiet
from accel_train.domains.images.pipelines.family import INDEX, UNUSED, text_encoders
from accel_train.domains.images.pipelines.loading import DiffusersBase
from accel_train.domains.images.trained_text import adapters as trained_text
from accel_train.domains.images.trained_text import joint
from accel_train.domains.models import lora
from accel_train.store import strict_json
from accel_train.store.exports.peft_layout import ADAPTER, PREFIX, WEIGHTS_STEM, by_key_of_peft
from accel_train.wording import shortened

MATRIX = re.compile(r"(?P<layer>.+?)[._]lora(?:_linear_layer)?[._](?P<matrix>A|B|down|up)(?:\.default)?\.weight")
"""Key of one of the two matrices of a layer's adapter, in any of these programs."""
FIRST = ("A", "down")
OF_LAYER = (".alpha", ".dora_scale", ".lora_magnitude_vector", ".lora_magnitude_vector.weight")
"""Ends of the other keys of an adapter."""
TOLERANCE = 1e-3
"""Relative difference of two squared norms. Programs multiply a scale into matrices that may be in half precision."""


class Change(NamedTuple):
    """What an adapter adds to the weight of its layer: ``scale * up @ down``, in (rank, in) and (out, rank)."""

    down: Tensor
    up: Tensor
    scale: float

    def squared_norm(self) -> float:
        """Return its squared Frobenius norm, computed from products of (rank, rank)."""
        down = self.down.flatten(1).double()
        up = self.up.flatten(1).double()
        return self.scale**2 * float(((up.T @ up) * (down @ down.T)).sum())


class Part(NamedTuple):
    """The adapters of a component, as diffusers has read them."""

    tensors: Mapping[str, Tensor]
    """By peft's keys below the component."""
    rank: int
    alpha: float
    layers: Sequence[str]
    is_dora: bool


def convert_file(file: Path, base: DiffusersBase, directory: Path) -> list[str]:
    """Write the adapters in a LoRA file to the existing ``directory``, as folders of peft, and return lines about them.

    Adapters of the denoiser and of text encoders get a folder each below ``directory``, those of a denoiser alone get
    ``directory`` itself. No weights of the base are read. Raises ``UsageError`` for a file that is not LoRA, that
    diffusers does not read as a whole with this base, and for ranks, alphas or layers that no option here can train.
    """
    expected = _read(file)
    pipeline = _load(file, base)
    models = {base.family.denoiser: getattr(pipeline, base.family.denoiser), **text_encoders(pipeline)}
    _refuse_other_change(file, expected, models)
    parts: dict[str, Part] = {}
    lines: list[str] = []
    for name, model in models.items():
        has_names = name == base.family.denoiser or base.family.name in joint.WAYS
        idle = _idle_layers(base, name, model)
        part, left_out = _part(file, name, model, idle)
        if part is not None and has_names:
            parts[name] = part
        elif part is not None:
            lines.append(f"left out: {name}: {len(part.layers)} layers, because it is not trained here")
        if left_out:
            lines.append(f"left out: {name}: {shortened(left_out, 2)}, because they have no influence on the output")
    if base.family.denoiser not in parts:
        raise UsageError(f"{file}: has no adapters of a {base.family.denoiser}, which a run here always trains")
    _write(directory, parts)
    lines = [
        f"{name}: {len(part.layers)} layers of rank {part.rank}, alpha {part.alpha:g}" for name, part in parts.items()
    ] + lines
    return [*lines, *_commands(base, parts, directory)]


def _read(file: Path) -> dict[str, Change]:
    """Return the change of each layer of a file, by the layer's name there. Raises ``UsageError`` for another kind."""
    tensors, settings = _tensors_and_settings(file)
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
    changes: dict[str, Change] = {}
    for layer, matrices in pairs.items():
        alpha = tensors.get(f"{layer}.alpha")
        rank = matrices[True].shape[0]
        # A scale in the file comes before that of its settings, as in diffusers.
        scale = _scale_of_settings(settings, layer, rank)
        if alpha is not None:
            scale = float(alpha) / rank
        changes[layer] = Change(matrices[True], matrices[False], scale)
    return changes


def _tensors_and_settings(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            tensors: dict[str, Tensor] = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{file}: cannot be read ({error}); a safetensors file of LoRA is required") from None
    return tensors, json.loads(metadata.get(METADATA_KEY, "{}"))


def _scale_of_settings(settings: Mapping[str, Any], layer: str, rank: int) -> float:
    """Return the scale of a layer by the settings that diffusers writes into its file. Without any it is 1."""
    component, _, path = layer.partition(".")
    alpha = settings.get(f"{component}.lora_alpha", rank)
    patterns = settings.get(f"{component}.alpha_pattern") or {}
    alpha = next((value for name, value in patterns.items() if re.fullmatch(rf"(.*\.)?({name})", path)), alpha)
    return float(alpha) / (math.sqrt(rank) if settings.get(f"{component}.use_rslora") else rank)


def _load(file: Path, base: DiffusersBase) -> Any:
    """Return the pipeline of ``base`` with the adapters of ``file``. Its own weights are zeros without memory."""
    with quiet():
        from diffusers import DiffusionPipeline
    with torch.device("meta"):
        parts = {name: base.component(name, "fp32") for name in (base.family.denoiser, *base.text_encoders())}
    for part in parts.values():
        _fill_with_zeros(part)
    index = strict_json.read_object(base.directory / INDEX)
    unread = [name for name in index if name in UNUSED or name.startswith(("vae", "tokenizer"))]
    try:
        with quiet():
            pipeline = DiffusionPipeline.from_pretrained(base.directory, **dict.fromkeys(unread), **parts)
            pipeline.load_lora_weights(file.parent, weight_name=file.name, adapter_name=ADAPTER)
    # diffusers and peft have no common type for names or shapes that do not fit.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{file}: diffusers cannot put it on {base.family.name} of {base.source} ({type(error).__name__}: "
            f"{reason}); give the --base that it was trained on"
        ) from None
    return pipeline


def _fill_with_zeros(model: nn.Module) -> None:
    """Give each tensor of a model on the meta device one zero: peft moves adapters to the device of their layer."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(_zeros_like(parameter), requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, _zeros_like(buffer))


def _zeros_like(tensor: Tensor) -> Tensor:
    # All elements are one in memory: a base of 12 billion parameters would not fit otherwise.
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def _refuse_other_change(file: Path, expected: Mapping[str, Change], models: Mapping[str, nn.Module]) -> None:
    """Raise ``UsageError`` if diffusers did not read the whole file: it warns of unknown names at most.

    Names differ between programs, and a layer there may be three here, but the sum of all squared norms is the same.
    """
    found = [change for model in models.values() for change in _changes(model)]
    theirs = math.fsum(change.squared_norm() for change in expected.values())
    ours = math.fsum(change.squared_norm() for change in found)
    if not math.isclose(theirs, ours, rel_tol=TOLERANCE):
        raise UsageError(
            f"{file}: diffusers read {len(found)} layers from its {len(expected)}, with a squared norm of {ours:.6g} "
            f"instead of {theirs:.6g}, so it left some out or scaled them otherwise; give the --base that it was "
            "trained on, or the same adapters in the file format of diffusers"
        )


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers with an adapter, by path."""
    layers: dict[str, Any] = {
        path: module for path, module in model.named_modules() if hasattr(module, "get_base_layer")
    }
    return {path: layer for path, layer in layers.items() if ADAPTER in layer.lora_A}


def _changes(model: nn.Module) -> list[Change]:
    found: list[Change] = []
    for layer in _adapted_layers(model).values():
        down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        found.append(Change(down.detach(), up.detach(), layer.scaling[ADAPTER]))
    return found


def _idle_layers(base: DiffusersBase, name: str, model: nn.Module) -> Callable[[str], bool]:
    """Return a function that tells whether a layer has no influence, so that a run here gives it no adapter."""
    if name == base.family.denoiser:
        idle = base.family.idle(model)
        return lambda path: path in idle
    way = joint.WAYS.get(base.family.name)
    if way is None or not way.skips_last:
        return lambda path: False
    # XL reads the layer before the last one, except for the pooled output.
    block = trained_text.idle_block(model)
    return lambda path: block is not None and path.startswith(block)


def _part(file: Path, name: str, model: nn.Module, is_idle: Callable[[str], bool]) -> tuple[Part | None, list[str]]:
    """Return the adapters of a component, and the layers left out. Raises ``UsageError`` for what cannot be trained."""
    adapted = _adapted_layers(model)
    layers = {path: layer for path, layer in adapted.items() if not is_idle(path)}
    left_out = sorted(adapted.keys() - layers.keys())
    if not layers:
        return None, left_out
    _refuse_untrainable(file, name, layers)
    any_layer = next(iter(layers.values()))
    tensors: dict[str, Tensor] = {}
    for key, tensor in by_key_of_peft(dict(model.named_parameters())).items():
        if key.removeprefix(PREFIX).partition(".lora_")[0] in layers:
            # Copies, because the parts of a joined layer share their first matrix.
            tensors[key] = tensor.detach().to(torch.float32, copy=True).contiguous()
    is_dora = any("lora_magnitude" in key for key in tensors)
    return Part(tensors, any_layer.r[ADAPTER], _alpha(any_layer), list(layers), is_dora), left_out


def _alpha(layer: Any) -> float:
    """Return the alpha that gives plain LoRA the scale of a layer, which may be that of rsLoRA."""
    return round(layer.scaling[ADAPTER] * layer.r[ADAPTER], 6)


def _refuse_untrainable(file: Path, name: str, layers: Mapping[str, Any]) -> None:
    for path, layer in layers.items():
        kind = type(layer.get_base_layer()).__name__
        if kind not in lora.LINEAR:
            raise UsageError(
                f"{file}: {name}.{path} is a {kind}, and adapters here are on linear layers alone. Merge the file into "
                "its base with diffusers (fuse_lora, save_pretrained) and train on that"
            )
    ranks = {layer.r[ADAPTER] for layer in layers.values()}
    alphas = {_alpha(layer) for layer in layers.values()}
    if len(ranks) > 1 or len(alphas) > 1:
        raise UsageError(
            f"{file}: layers of its {name} have the ranks {sorted(ranks)} and the alphas {sorted(alphas)}; one of each "
            "is required, because no option here can set several. Merge the file into its base with diffusers "
            "(fuse_lora, save_pretrained) and train on that"
        )


def _write(directory: Path, parts: Mapping[str, Part]) -> None:
    for name, part in parts.items():
        folder = directory
        # Adapters of several components have equal names in their files.
        if len(parts) > 1:
            folder = directory / name
            folder.mkdir()
        save_file(dict(part.tensors), folder / f"{WEIGHTS_STEM}.safetensors", metadata={"format": "pt"})
        write_settings(folder, _settings(part, list(part.layers)))
    if len(parts) == 1:
        return
    # As in an export: the settings of the whole model, in which text encoders have a rank and an alpha of their own.
    denoiser, *texts = parts
    paths = [f"{name}.{path}" for name, part in parts.items() for path in part.layers]
    ranks = {lora.part_pattern(name): parts[name].rank for name in texts}
    alphas = {lora.part_pattern(name): parts[name].alpha for name in texts}
    whole = _settings(parts[denoiser], paths, rank_pattern=ranks, alpha_pattern=alphas)
    write_settings(directory, whole)


def _settings(part: Part, layers: Sequence[str], **patterns: Any) -> dict[str, Any]:
    config = lora.import_peft().LoraConfig(
        r=part.rank, lora_alpha=part.alpha, target_modules=list(layers), use_dora=part.is_dora, **patterns
    )
    settings = config.to_dict()
    return settings | {"target_modules": sorted(settings["target_modules"]), "inference_mode": True}


def _commands(base: DiffusersBase, parts: Mapping[str, Part], directory: Path) -> list[str]:
    """Return the options with which a run starts from the adapters."""
    name, *texts = parts
    place = shlex.quote(str(directory))
    if not texts:
        options = _options("lora", parts[name], parts[name].layers, trained_text.layers_of(base)["lora"])
        return [f"start a run from these adapters with --init_from {place} {options}"]
    layers = trained_text.layers_of(trained_text.with_encoders(base))
    paths = {part: [f"{part}.{path}" for path in parts[part].layers] for part in parts}
    options = _options("lora", parts[name], paths[name], layers["lora"])
    of_text = [path for part in texts for path in paths[part]]
    options_of_text = _options(trained_text.PART, parts[texts[0]], of_text, layers[trained_text.PART])
    return [
        f"start a run from all of them with --init_from {place} {options} {options_of_text}",
        f"or from those of the {name} alone with --init_from {shlex.quote(str(directory / name))} {options}",
    ]


def _options(group: str, part: Part, paths: Collection[str], layers: lora.Layers) -> str:
    options = f"--{group}.rank {part.rank} --{group}.alpha {part.alpha:g}"
    if set(layers.of(layers.default)) != set(paths):
        options += f" --{group}.targets {' '.join(lora.names_of_layers(paths, layers))}"
    if part.is_dora and group == "lora":
        options += " --lora.variant dora"
    return options

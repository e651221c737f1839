"""LoRA files of diffusers, kohya's sd-scripts and others, converted to peft's layout for ``--init_from``.

diffusers reads the file, so its names are those that diffusers knows. What it read is compared with the file itself.
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.domains.images.kohya.lora_file import Change, numbered, read_lora_file
from accel_train.domains.images.pipelines.adapter_files import write_settings
from accel_train.domains.images.pipelines.components import quiet
from accel_train.domains.images.pipelines.family import INDEX, UNUSED, text_encoders
from accel_train.domains.images.pipelines.loading import DiffusersBase
from accel_train.domains.images.trained_text import adapters as trained_text
from accel_train.domains.images.trained_text import joint
from accel_train.domains.models import lora
from accel_train.store import strict_json
from accel_train.store.exports.peft_layout import ADAPTER, PREFIX, WEIGHTS_STEM, by_key_of_peft
from accel_train.wording import shortened

NUMBERS = "numbers"
"""Name of adapters in a pipeline that have the number of a layer of the file in place of values."""
TOLERANCE = 1e-3
"""Relative difference of two squared norms. Programs multiply a scale into matrices that may be in half precision."""
FLOOR = 1e-8
"""Difference of two squared norms, relative to that of all layers: small values have few digits in half precision."""


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
    content = read_lora_file(file)
    pipeline = _load(file, base, numbered(content))
    models = {base.family.denoiser: getattr(pipeline, base.family.denoiser), **text_encoders(pipeline)}
    _refuse_other_change(file, content.changes, models)
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


def _load(file: Path, base: DiffusersBase, numbers: Mapping[str, Tensor]) -> Any:
    """Return the pipeline of ``base`` with the adapters of ``file``, and those with ``numbers`` beside them.

    Its own weights are zeros without memory.
    """
    with quiet():
        from diffusers import DiffusionPipeline
    with torch.device("meta"):
        parts = {name: base.component(name, "fp32") for name in (base.family.denoiser, *base.text_encoders())}
    for part in parts.values():
        _fill_with_zeros(part)
    index = strict_json.read_object(base.directory / INDEX)
    unread = [name for name in index if name in UNUSED or name.startswith(("vae", "tokenizer"))]
    try:
        with quiet(), warnings.catch_warnings():
            # Two adapters are meant.
            warnings.filterwarnings("ignore", "Already found a `peft_config` attribute", UserWarning)
            pipeline = DiffusionPipeline.from_pretrained(base.directory, **dict.fromkeys(unread), **parts)
            pipeline.load_lora_weights(file.parent, weight_name=file.name, adapter_name=ADAPTER)
            pipeline.load_lora_weights(dict(numbers), adapter_name=NUMBERS)
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
    """Raise ``UsageError`` if diffusers did not read the whole file: it warns of unknown names at most."""
    is_same = _comparison(expected, models)
    names = ["a layer that the file does not have", *expected]
    other = [name for name, (same, _) in zip(names, is_same, strict=True) if not same]
    if other:
        raise UsageError(
            f"{file}: diffusers left out {len(other)} of its {len(expected)} layers or scaled them otherwise "
            f"({shortened(other, 3)}); give the --base that it was trained on, or the same adapters in the file format "
            "of diffusers"
        )
    other = [name for name, (_, same) in zip(names, is_same, strict=True) if not same]
    if other:
        raise UsageError(
            f"{file}: diffusers did not take the magnitudes of DoRA as they are in the file on {len(other)} of its "
            f"{len(expected)} layers ({shortened(other, 3)}), so it would be another change; keys that end in "
            "lora_magnitude_vector, for text encoders in lora_magnitude_vector.weight, are required on all layers of a "
            "component. Convert it with the program that wrote it, or merge it into its base there and train on that"
        )


def _comparison(expected: Mapping[str, Change], models: Mapping[str, nn.Module]) -> list[tuple[bool, bool]]:
    """Return for no layer and for each layer whether its matrices and its magnitudes are the same in the models.

    A layer of a file may be several there. The sums of their ``sizes`` are those of the layer.
    """
    theirs = torch.stack([torch.zeros(3).double(), *(change.sizes() for change in expected.values())])
    ours = torch.zeros_like(theirs)
    for model in models.values():
        for number, change in _changes(model):
            ours[number] += change.sizes()
    is_close = (ours - theirs).abs() <= TOLERANCE * theirs + FLOOR * theirs.sum(0)
    # However small, a layer is either in both or in none.
    is_same = is_close & ((ours == 0) == (theirs == 0))
    return list(zip(is_same[:, 0].tolist(), is_same[:, 1:].all(1).tolist(), strict=True))


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers with an adapter, by path."""
    layers: dict[str, Any] = {
        path: module for path, module in model.named_modules() if hasattr(module, "get_base_layer")
    }
    return {path: layer for path, layer in layers.items() if ADAPTER in layer.lora_A}


def _changes(model: nn.Module) -> Generator[tuple[int, Change]]:
    """Yield the change of each layer, with the number of the layer of the file that it comes from."""
    for layer in _adapted_layers(model).values():
        magnitudes = torch.empty(0)
        if ADAPTER in layer.lora_magnitude_vector:
            magnitudes = layer.lora_magnitude_vector[ADAPTER].weight.detach()
        down, up = (part[ADAPTER].weight.detach() for part in (layer.lora_A, layer.lora_B))
        one, number = (part[NUMBERS].weight.detach().flatten()[0] for part in (layer.lora_A, layer.lora_B))
        number = round(float(one * number) * layer.scaling[NUMBERS])
        yield number, Change(down, up, layer.scaling[ADAPTER], magnitudes)


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
    # One file of settings has one use_dora.
    if len(parts) == 1 or len({part.is_dora for part in parts.values()}) > 1:
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
    alone = f"from those of the {name} alone with --init_from {shlex.quote(str(directory / name))} {options}"
    of_text = [path for part in texts for path in paths[part]]
    reason = _why_no_run_has(parts, lora.names_of_layers(of_text, layers[trained_text.PART]))
    if reason:
        return [f"no run starts from those of {' and '.join(texts)}: {reason}", f"start a run {alone}"]
    options_of_text = _options(trained_text.PART, parts[texts[0]], of_text, layers[trained_text.PART])
    return [f"start a run from all of them with --init_from {place} {options} {options_of_text}", f"or {alone}"]


def _why_no_run_has(parts: Mapping[str, Part], targets: Sequence[str]) -> str:
    """Return why no options give a run these adapters of text encoders, which have ``targets``. Empty if some do."""
    _, *texts = parts.values()
    if len({(part.rank, part.alpha) for part in texts}) > 1:
        return "they differ in rank or alpha, and --text_encoders.rank and --text_encoders.alpha set one for all"
    if len({part.is_dora for part in parts.values()}) > 1:
        return "some of the adapters are DoRA and some are not, and --lora.variant sets one for all"
    if not targets:
        return "they are on other layers in one than in the other, and --text_encoders.targets sets one choice for all"
    return ""


def _options(group: str, part: Part, paths: Collection[str], layers: lora.Layers) -> str:
    options = f"--{group}.rank {part.rank} --{group}.alpha {part.alpha:g}"
    if set(layers.of(layers.default)) != set(paths):
        options += f" --{group}.targets {' '.join(lora.names_of_layers(paths, layers))}"
    if part.is_dora and group == "lora":
        options += " --lora.variant dora"
    return options

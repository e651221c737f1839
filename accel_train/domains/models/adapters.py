"""Trained adapters on their base, with peft: read from peft's layout or a checkpoint, choose by name, scale, merge."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from accel_train.config import UsageError
from accel_train.domains.models.lora import Layers, LoraConfig, PartOfModel, import_peft, inject, names_of_layers
from accel_train.precision import Precision
from accel_train.store import strict_json, weights
from accel_train.store.exports import peft_layout
from accel_train.store.exports.peft_layout import CONFIG_FILE, adapter_key, by_key_of_peft
from accel_train.store.pretrained_base import refuse_other_base
from accel_train.store.weights import TensorInfo, TensorReader
from accel_train.wording import did_you_mean, nearest, shortened

logger = logging.getLogger(__name__)
INITS: tuple[Any, ...] = (True, False, "gaussian", "orthogonal")
"""Initialisations of adapters that leave the base unchanged. Others, such as pissa, change it."""
BASE = "base"
"""Name that selects the base without an adapter."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def is_adapter(directory: Path) -> bool:
    """Return True for a directory with adapters: a checkpoint, an export, or a folder written by peft."""
    # All three have peft's config. Weights alone do not identify adapters.
    return (directory / CONFIG_FILE).is_file()


def read_adapter(directory: Path) -> dict[str, TensorInfo]:
    """Find the adapter's tensors in a directory, by peft's keys. Takes the EMA of a checkpoint that has one.

    Raises ``UsageError`` for a malformed file, and for a directory without adapters.
    """
    # An export and a folder of peft have one set. A checkpoint may have the trained weights and their EMA.
    exported: dict[str, TensorInfo] = {}
    for beginning, folder in peft_layout.folders(directory).items():
        exported |= peft_layout.of_whole(weights.find_tensors(folder, peft_layout.WEIGHTS_STEM), beginning)
    if exported:
        return exported
    stem = weights.best_stem(directory)
    tensors = by_key_of_peft(weights.find_tensors(directory, stem))
    if not tensors:
        raise UsageError(f"{directory}: {stem}.safetensors contains no adapters; give a run with --lora.rank")
    return tensors


def paths_of_adapter(directory: Path) -> set[str]:
    """Return the paths of the layers with tensors of the adapter in a directory."""
    # Not target_modules, which may be a pattern, and name layers without any.
    return {key.removeprefix(peft_layout.PREFIX).partition(".lora_")[0] for key in read_adapter(directory)}


def embeds_base(directory: Path) -> bool:
    """Return True for a checkpoint with the frozen weights inside (``checkpoints.base: embed``)."""
    if not any(directory.glob("model*.safetensors")):
        return False
    tensors = weights.find_tensors(directory, "model")
    return any(adapter_key(name) is None for name in tensors)


def add_adapter(model: nn.Module, name: str, directory: Path) -> None:
    """Add the adapter in ``directory`` to its base, in place, and select it.

    Raises ``UsageError`` for an adapter that is not LoRA, does not fit the model's layers, or is damaged.
    """
    tensors = read_adapter(directory)
    settings = _settings(directory)
    try:
        # Layers first, with initial values, then the values of the files.
        inject(model, settings, name)
    except ValueError as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{directory}: its adapter does not fit {type(model).__name__} ({reason}); give the base that it was "
            "trained on"
        ) from None
    names = by_key_of_peft({parameter: parameter for parameter, _ in model.named_parameters()}, name)
    _refuse_misfits(directory, tensors, {key: model.get_parameter(names[key]).shape for key in names})
    with TensorReader(tensors) as reader, torch.no_grad():
        for key, info in tensors.items():
            value = reader.read(key)
            # A single NaN would spread through every picture or text, with no hint of where it came from.
            weights.refuse_nonfinite(key, value, info.file)
            model.get_parameter(names[key]).copy_(value)
    choose_adapter(model, name)


def _settings(directory: Path) -> Any:
    """Read adapter_config.json as peft's ``LoraConfig``. Raises ``UsageError`` for any other kind of adapter."""
    path = directory / CONFIG_FILE
    try:
        values = strict_json.read_object(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); restore it from a copy, or export it again") from None
    # Other kinds, such as IA3, have other tensors under names of their own.
    kind = values.get("peft_type")
    if kind != "LORA":
        raise UsageError(f"{path}: is of peft's type {str(kind)[:40]!r}; adapters of its type 'LORA' are required")
    init = values.get("init_lora_weights", True)
    if init not in INITS:
        raise UsageError(
            f"{path}: init_lora_weights {str(init)[:40]!r} changes the base; convert the adapter to plain LoRA with "
            "peft first (save_pretrained, path_initial_model_for_weight_conversion)"
        )
    try:
        # As for training: `inject` casts only parameters with a gradient to fp32, and inference mode would freeze them.
        return import_peft().LoraConfig(**values | {"inference_mode": False, "init_lora_weights": True})
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{path}: not read by the installed peft ({' '.join(str(error).split())[:200]}); install the version that "
            "wrote it, or a newer one"
        ) from None


def _refuse_misfits(directory: Path, tensors: Mapping[str, TensorInfo], expected: Mapping[str, torch.Size]) -> None:
    missing = sorted(expected.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - expected.keys())
    misfits = [
        f"{key}: {tensors[key].shape} in the file, {tuple(expected[key])} on this base"
        for key in sorted(expected.keys() & tensors.keys())
        if tensors[key].shape != tuple(expected[key])
    ]
    problems = [f"{key}: not in the file" for key in missing]
    problems += [f"{key}: this base has no layer for it" for key in unknown]
    problems += misfits
    if problems:
        raise UsageError(
            f"{directory}: its adapter does not fit this base ({shortened(problems, 3, '; ')}); give the base that it "
            "was trained on"
        )


class _Pair(NamedTuple):
    """An option of adapters, in this run and in the training of other adapters."""

    ours: Any
    theirs: Any
    given: str
    """Option of this run that ``ours`` comes from, with its value, for an error message."""


def refuse_other_training(
    initial_weights: Path | None,
    config: LoraConfig,
    parts: Sequence[PartOfModel] = (),
    layers: Mapping[str, Layers] | None = None,
    beside_parts: str = "",
) -> None:
    """Raise ``UsageError`` if the adapters to start from have another rank, alpha or variant, or are on other layers.

    Weights trained with another alpha or with rsLoRA would fit, but be scaled by another factor than in their training.
    ``initial_weights`` is a checkpoint, or None. A part of rank 0 has no adapters. ``layers``, by option group, has
    those to compare. ``beside_parts`` are options that a run with adapters on ``parts`` needs too. Adapters on layers
    that the model lacks are left to the loading of the weights, which lists them.
    """
    if initial_weights is None or not is_adapter(initial_weights):
        return
    trained = _settings(initial_weights)
    _refuse_other_patterns(initial_weights, trained, parts)
    pairs = _scales(config, parts, trained)
    for group, compared in (layers or {}).items():
        pairs |= _targets(group, compared, paths_of_adapter(initial_weights))
    other = {name: pair for name, pair in pairs.items() if pair.ours != pair.theirs}
    if other:
        given = ", ".join(pair.given for pair in other.values())
        alone = _rest_alone(initial_weights, other, parts)
        required = f"{_required(other)}{beside_parts if alone else ''}{alone}"
        raise UsageError(
            f"{given}: the adapters of --init_from, {initial_weights}, were trained with other values, and would "
            f"compute something else; give {required}"
        )


def _required(other: Mapping[str, _Pair]) -> str:
    options = [f"--{name} {_shown(pair.theirs)}" for name, pair in other.items()]
    # Their rank is refused beside other options of their group.
    off = [name.rpartition(".")[0] for name, pair in other.items() if name.endswith(".rank") and pair.theirs == 0]
    return " ".join(options) + "".join(f", without other options of {group}" for group in off)


def _rest_alone(directory: Path, other: Mapping[str, _Pair], parts: Sequence[PartOfModel]) -> str:
    """Return how to start without the adapters of ``parts``, if this run has none there. Empty if it has."""
    groups = {part.options for part in parts if part.rank == 0}
    folders = peft_layout.folders(directory)
    # A single folder holds them all, and none can be left out.
    if "" in folders or not any(f"{group}.rank" in other for group in groups):
        return ""
    rest = [folder for name, folder in folders.items() if name not in {f"{part.name}." for part in parts}]
    if not rest:
        return f"; or run accel-train export {directory}, and start from the other folder of adapters in it"
    options = _required({name: pair for name, pair in other.items() if name.startswith("lora.")})
    return f"; or, without those of {' and '.join(sorted(groups))}, --init_from {rest[0]} {options}".rstrip()


def _refuse_other_patterns(directory: Path, trained: Any, parts: Sequence[PartOfModel]) -> None:
    """Raise ``UsageError`` if peft's settings scale some layers differently. Their weights would fit unnoticed."""
    patterns = {**trained.rank_pattern, **trained.alpha_pattern}
    foreign = sorted(patterns.keys() - {part.pattern for part in parts})
    # One option sets those of all parts of its group.
    foreign += [part.pattern for part in parts if len(set(_of_group(part.options, parts, trained))) > 1]
    # The patterns of a checkpoint come from this project's own options.
    if foreign and peft_layout.folders(directory):
        raise UsageError(
            f"init_from: the adapters of {directory} have another rank or alpha on {shortened(foreign, 3)}, which no "
            "option here can set; merge them into the base with peft, and start from that"
        )


def _targets(group: str, layers: Layers, paths: Collection[str]) -> dict[str, _Pair]:
    """Return the targets of this run, and those that mean the layers among ``paths``, if any do."""
    theirs = {path for path in paths if path.startswith(tuple(layers.roots))}
    ours = layers.default if layers.targets is None else layers.targets
    # Without the targets of a group that this run does not train: its defaults hold if they are not given.
    if not theirs or set(layers.of(ours)) == theirs:
        return {}
    names = names_of_layers(theirs, layers)
    given = f"--{group}.targets {' '.join(ours)}" if layers.targets else f"{group}.targets null ({' '.join(ours)})"
    return {f"{group}.targets": _Pair(" ".join(ours), " ".join(names), given)} if names else {}


def _scales(config: LoraConfig, parts: Sequence[PartOfModel], trained: Any) -> dict[str, _Pair]:
    """Return the options that scale adapters, with those of peft's ``trained`` settings, by name."""
    options = _ranks_and_alphas("lora", config.rank, config.alpha, trained.r, trained.lora_alpha)
    variant = "dora" if trained.use_dora else "rslora" if trained.use_rslora else "lora"
    options["lora.variant"] = _Pair(config.variant, variant, f"--lora.variant {config.variant}")
    for part in parts:
        rank, alpha = (_of_group(part.options, parts, trained) or [(0, 0.0)])[0]
        options |= _ranks_and_alphas(part.options, part.rank, part.alpha, rank, alpha)
    return options


def _of_group(group: str, parts: Sequence[PartOfModel], trained: Any) -> list[tuple[int, float]]:
    """Return rank and alpha of each part of a group that has adapters by peft's ``trained`` settings."""
    patterns = [part.pattern for part in parts if part.options == group]
    ranks, alphas = trained.rank_pattern, trained.alpha_pattern
    return [(ranks[key], alphas.get(key, trained.lora_alpha)) for key in patterns if key in ranks]


def _ranks_and_alphas(
    group: str, rank: int, alpha: float | None, trained_rank: int, trained_alpha: float
) -> dict[str, _Pair]:
    options = {f"{group}.rank": _Pair(rank, trained_rank, f"--{group}.rank {rank}")}
    if trained_rank > 0:
        given = f"{group}.alpha null (the rank)" if alpha is None else f"--{group}.alpha {_shown(alpha)}"
        # Not given, it is that of the rank to give.
        options[f"{group}.alpha"] = _Pair(trained_rank if alpha is None else alpha, trained_alpha, given)
    return options


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def choose_adapter(model: nn.Module, name: str | None) -> None:
    """Compute with the adapter ``name`` from now on, or with None as the base alone, bit for bit."""
    for layer in _adapted_layers(model):
        layer.enable_adapters(name is not None)
        if name is not None:
            layer.set_adapter(name)


@contextmanager
def scaled_adapter(parts: Iterable[nn.Module], name: str, scale: float) -> Generator[None]:
    """Scale the adapter ``name`` in the body. 0 computes as the base alone, bit for bit, and 1 as trained.

    Raises ``UsageError`` for any other scale of a DoRA adapter.
    """
    adapted = [layer for part in parts for layer in _adapted_layers(part)]
    layers: list[Any] = [layer for layer in adapted if name in layer.scaling]
    if scale not in (0, 1) and any(name in layer.lora_magnitude_vector for layer in layers):
        raise UsageError(
            f"scale {scale:g}: adapter {name!r} is DoRA, whose magnitudes were learned for the whole change and cannot "
            "be scaled with it; 0 (the base) or 1 (as trained) is required. Leave it out, or train adapters with "
            "--lora.variant lora"
        )
    # Switched off, not scaled by 0: peft scales only the matrices, so DoRA's magnitudes would still change the output.
    switched_off = [layer for layer in layers if scale == 0 and not layer.disable_adapters]
    # By layer: an adapter may have its own alpha in each.
    before = [dict(layer.scaling) for layer in layers]
    for layer in layers:
        layer.scaling[name] *= scale
    for layer in switched_off:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer, scaling in zip(layers, before, strict=True):
            layer.scaling.update(scaling)
        for layer in switched_off:
            layer.enable_adapters(True)


def merge_adapter(model: nn.Module, name: str) -> None:
    """Merge an adapter into the weights of its base, and remove all adapters, in place.

    The base must be in a float dtype. A layer that shares its weight, such as a head tied to the embeddings, gets its
    own. Raises ``UsageError`` if a merged weight is not finite, and for a class that always ties its weights.
    """
    _untie_adapted(model)
    paths = [path for path, module in model.named_modules() if hasattr(module, "get_base_layer")]
    for path in paths:
        layer: Any = model.get_submodule(path)
        try:
            # safe_merge computes a copy first, and so leaves the base intact if a weight is not finite.
            layer.merge(safe_merge=True, adapter_names=[name])
        except ValueError as error:
            raise UsageError(f"{path}: cannot be merged ({error}); take an earlier checkpoint") from None
        # The plain layer again, so that the model has the names of its base.
        model.set_submodule(path, layer.get_base_layer())
    adapted: Any = model
    del adapted.peft_config


def _untie_adapted(model: nn.Module) -> None:
    """Give each adapted layer its own weight, and let transformers load and save it as such, in place."""
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    tied = [layer.get_base_layer() for layer in _adapted_layers(model) if owners[id(layer.get_base_layer().weight)] > 1]
    if not tied:
        return
    for layer in tied:
        # Merged in place, it would change the input embeddings too, which training left as they were.
        layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    untied: Any = model
    for config in (untied.config, untied.config.get_text_config()):
        config.tie_word_embeddings = False
    # Some classes tie weights whatever their config says, and would drop the new weight on loading.
    if untied.get_expanded_tied_weights_keys(all_submodels=True):
        raise UsageError(
            f"{type(model).__name__} always ties its head to its embeddings, so an adapter on the head cannot be "
            "merged; leave --merged out"
        )


def refuse_out_of_range(model: nn.Module, name: str, precision: Precision) -> None:
    """Raise ``UsageError`` for a non-finite weight of ``model``, already cast to ``precision``."""
    # After the cast: a weight that is finite in fp32 may be out of fp16's range.
    for path, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise UsageError(
                f"{name}.{path}: has values that are not finite in {precision} once the adapter is merged; use another "
                "precision, or an earlier checkpoint"
            )


def _adapted_layers(model: nn.Module) -> Sequence[Any]:
    return [module for module in model.modules() if hasattr(module, "get_base_layer")]


def refuse_whole_model(name: str, directory: Path) -> None:
    """Raise ``UsageError`` for a directory given as adapters but without any."""
    if not is_adapter(directory):
        raise UsageError(
            f"adapters {name}={directory}: contains a whole model, not adapters; give a run with --lora.rank, or a "
            "folder of peft"
        )


def compare_bases(
    recorded: Mapping[str, Any] | None, reference: Mapping[str, Any] | None, directory: Path, owner: Path
) -> None:
    """Raise ``UsageError`` for adapters of another base than the files of ``reference``, the base of ``owner``.

    ``recorded`` are the base files named by the adapters in ``directory``. If they or those of ``reference`` are not
    known, as for peft's own folders, only a warning is logged.
    """
    if recorded is None or reference is None:
        # Most existing adapters do not name these files, so they cannot be refused.
        logger.warning("%s does not record the files of its base, so they are not compared with %s", directory, owner)
    else:
        refuse_other_base(recorded, reference, directory)


def refuse_names(names: Mapping[str, Any], taken: tuple[str, ...]) -> None:
    """Raise ``UsageError`` for ambiguous or unusable names of adapters."""
    for name in names:
        if name == BASE or name in taken or not NAME.fullmatch(name):
            reason = f"{name!r} stands for the base alone" if name == BASE else "is in use, or not a plain name"
            raise UsageError(
                f"adapters {name!r}: {reason}; give names of letters, digits, - and _, other than base"
                + "".join(f", {one}" for one in taken)
            )


def refuse_unknown(adapter: str, known: tuple[str, ...]) -> None:
    """Raise ``UsageError`` for an adapter unknown to the model."""
    if adapter != BASE and adapter not in known:
        listed = ", ".join([BASE, *known])
        hint = did_you_mean(nearest(adapter, [BASE, *known]))
        raise UsageError(f"adapter {adapter!r}: this model has no adapter of that name{hint}; it has {listed}")

"""Load language models with adapters: find the base by its reference, verify it, and add the adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.data.artifacts import cache_if_usable
from accel_train.domains.language import pretrained, tokenizers
from accel_train.domains.language.generation import ends
from accel_train.domains.language.pretrained import ModelConfig
from accel_train.domains.language.sources import find_base
from accel_train.domains.models import quantised
from accel_train.domains.models.adapters import (
    add_adapter,
    compare_bases,
    embeds_base,
    merge_adapter,
    refuse_other_training,
    refuse_out_of_range,
    refuse_whole_model,
)
from accel_train.domains.models.lora import ADAPTER, CPU, BasePrecision, LoraConfig, freeze_base
from accel_train.pipeline import ADAPTER_DESCRIPTION, Example
from accel_train.precision import Precision, dtype_of
from accel_train.store import manifest, planning, strict_json, weights
from accel_train.store.pretrained_base import refuse_other_base

MERGE_TOLERANCE = 1e-4
"""Largest allowed difference of an output, relative to the largest output, as in verify.py of an export."""


def read_description(directory: Path) -> dict[str, Any]:
    """Read the description of adapters; empty for a folder of peft."""
    path = directory / ADAPTER_DESCRIPTION
    try:
        return strict_json.read_object(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); restore it from a copy, or export it again") from None


def notices_of_dora(directory: Path) -> list[str]:
    """Return a notice if the adapters in ``directory`` are DoRA, of which transformers reads the matrices only.

    Its ``from_pretrained`` leaves the magnitudes as initialised, with a line in a report at most.
    """
    if not strict_json.read_object(directory / "adapter_config.json").get("use_dora"):
        return []
    return [
        "note: AutoModelForCausalLM of transformers drops DoRA's magnitudes: load with PeftModel of peft, or export "
        "--merged"
    ]


def base_reference(directory: Path) -> Mapping[str, Any] | None:
    """Return the reference of a checkpoint or an export to its base's files, None if it has none."""
    if (directory / manifest.MANIFEST).is_file():
        # A checkpoint: its manifest is what was verified.
        return manifest.read(directory).get("base")
    base = _described_base(directory)
    return base if "files" in base else None


def _described_base(directory: Path) -> Mapping[str, Any]:
    base: Any = read_description(directory).get("base")
    if base is None:
        return {}
    files: Any = base.get("files", {}) if isinstance(base, dict) else None
    hashed = isinstance(files, dict) and all(isinstance(facts, dict) and "sha256" in facts for facts in files.values())
    if not hashed or not isinstance(base.get("source"), str):
        raise UsageError(
            f"{directory / ADAPTER_DESCRIPTION}: does not record the source and the sha256 of the files of its base; "
            "export the run again"
        )
    return base


def base_precision(directory: Path) -> BasePrecision:
    """Return the precision that the base had while the adapters in ``directory`` were trained."""
    found: Any = _described_base(directory).get("precision", "fp32")
    if found not in get_args(BasePrecision):
        known = ", ".join(get_args(BasePrecision))
        raise UsageError(f"{directory / ADAPTER_DESCRIPTION}: base precision {str(found)[:40]!r}; known are {known}")
    return found


def load_adapted(directory: Path, device: torch.device = CPU, *, plain: bool = False) -> nn.Module:
    """Return the base with the adapters of a checkpoint or an export, in fp32 and in eval mode.

    A base of 8 or 4 bits is quantised as in training; with ``plain`` it is a float model of the same values. Generation
    ends as with the base (``AdapterEnds``). Raises ``UsageError`` for a missing or different base, and for damaged
    adapters.
    """
    if embeds_base(directory):
        model = _embedded_base(directory)
        add_adapter(model, ADAPTER, directory)
        # The base and the adapters at once: an embedded base is in the same files.
        weights.load_weights(directory, "model", model)
        if weights.has_ema(directory):
            weights.load_weights(directory, "ema", model, required=())
        return model.eval()
    model = _referenced_base(directory)
    precision = base_precision(directory)
    # Rounded as in training, or the adapters would correct another base.
    freeze_base(model, precision, "fp32", device)
    if plain:
        quantised.dequantise(model)
    # The computation is in fp32, on the values as bf16 or fp16 rounded them.
    model.float()
    add_adapter(model, ADAPTER, directory)
    return model.eval()


def _embedded_base(directory: Path) -> nn.Module:
    """Return the architecture of an embedded base, with random weights."""
    from transformers import AutoConfig

    described: Any = read_description(directory).get("architecture")
    try:
        values = dict(described)
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        return pretrained.build(ModelConfig(config=config.model_type), config, load_source=False)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{directory / ADAPTER_DESCRIPTION}: does not describe the architecture of the base that its weights "
            f"include ({error}); restore it from a copy, or load the folder with peft"
        ) from None


def _referenced_base(directory: Path) -> nn.Module:
    reference = base_reference(directory)
    if reference is None:
        raise UsageError(
            f"{directory}: these adapters do not record the files of their base (peft writes none); give the base and "
            "the adapters: load(BASE, adapters={'mine': PATH}), or accel-train sample BASE --adapters mine=PATH"
        )
    source = str(reference["source"])
    gone = (
        f"{directory}: its base, {source}, does not exist; restore it, or give the location of the same files: "
        "load(BASE, adapters={'mine': PATH}), or accel-train sample BASE --adapters mine=PATH"
    )
    try:
        base = find_base(source, reference.get("revision"))
    except UsageError as error:
        raise UsageError(f"{gone} ({error})") from None
    refuse_other_base(reference, base.reference(cache_if_usable()), directory)
    return _read_base(base.directory)


def _read_base(folder: Path) -> nn.Module:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}: no config.json of a base model ({' '.join(str(error).split())[:200]})") from None
    return pretrained.build(ModelConfig(source=str(folder)), config, load_source=True)


def refuse_other_meaning(initial_weights: Path | None, tokenizer: Any, adapters: LoraConfig) -> None:
    """Raise ``UsageError`` for initial weights that fit, but were trained with another tokenizer or adapter scale.

    ``initial_weights`` is a checkpoint, or None.
    """
    tokenizers.refuse_other_pieces(tokenizer, initial_weights)
    refuse_other_training(initial_weights, adapters)


def attach(model: nn.Module, adapters: Mapping[str, Path], owner: Path, reference: Mapping[str, Any] | None) -> None:
    """Put further adapters on a model, by name, in place. ``owner`` is where the model was loaded from.

    ``reference`` has the files of its weights. Raises ``UsageError`` for adapters of another base.
    """
    for name, directory in adapters.items():
        refuse_whole_model(name, directory)
        compare_bases(base_reference(directory), reference, directory, owner)
        add_adapter(model, name, directory)


class AdapterEnds:
    """End tokens of generation with each adapter of a model: those of the base, and its own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._base = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        self._own: dict[str, list[int]] = {}

    def read(self, adapter: str, directory: Path) -> None:
        """Read the end tokens of an adapter from its directory. Raises ``UsageError``."""
        self._own[adapter] = ends.saved_ends(directory)

    def choose(self, adapter: str) -> None:
        """Let generation end at the tokens of ``adapter``, or of the base alone for a name without its own."""
        config: Any = getattr(self._model, "generation_config", None)
        if config is not None:
            # Those of other adapters are removed: what an adapter writes must not depend on which others are loaded.
            config.eos_token_id = self._base
            ends.add_ends(self._model, self._own.get(adapter, []))


class Merged(NamedTuple):
    """A model with its adapters merged, and what it computed before."""

    model: nn.Module
    outputs: list[dict[str, Any]]
    """Outputs of each example by name, from the base and its adapters before merging."""


def load_merged(directory: Path, examples: Callable[[nn.Module], Sequence[Example]]) -> Merged:
    """Return the model of a checkpoint or an export of adapters, merged into their base in fp32.

    A base of 8 or 4 bits is merged by its dequantised values, as in training. Raises ``UsageError``, also if merging
    has changed the outputs.
    """
    model = load_adapted(directory, plain=True)
    before = outputs(model, examples(model))
    # In place, so that there is one model in memory.
    merge_adapter(model, ADAPTER)
    # In fp32, because the rounding of a lower precision would hide a wrong weight.
    for expected, found in zip(before, outputs(model, examples(model)), strict=True):
        _refuse_other_outputs(directory, expected, found)
    ends.add_saved_ends(model, directory)
    return Merged(model, before)


def outputs(model: nn.Module, examples: Sequence[Example]) -> list[dict[str, Any]]:
    """Return the outputs of each example by name."""
    config: Any = model.config
    with torch.no_grad():
        return [example.call(model, config.to_dict()) for example in examples]


def _refuse_other_outputs(directory: Path, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name, value in expected.items():
        error = float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-12))
        # Not >, which a NaN would pass.
        if not error <= MERGE_TOLERANCE:
            raise UsageError(
                f"{directory}: the outputs of the merged model differ from those of the base with adapters (by "
                f"{error:.1e} of the largest; at most {MERGE_TOLERANCE:g} is allowed); leave --merged out"
            )


def round_weights(model: nn.Module, precision: Precision) -> None:
    """Round the values of the parameters to ``precision``, in place. Their dtype stays fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype_of(precision)).float()


@pretrained.quiet()
def save_whole(model: nn.Module, directory: Path, precision: Precision) -> None:
    """Write config.json, generation_config.json and weights of a transformers model, cast to ``precision`` in place.

    Raises ``UsageError`` for values out of its range.
    """
    narrow: Any = model.to(dtype_of(precision))
    refuse_out_of_range(narrow, type(narrow).__name__, precision)
    # transformers and the Hub find the class by this.
    narrow.config.architectures = [type(narrow).__name__]
    narrow.save_pretrained(directory, max_shard_size=planning.SHARD_BYTES)

"""Causal language models of transformers: from a checkpoint or from a config, their attention, and their files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_train import simulated
from accel_train.config import NonNegativeInt, PositiveInt, UsageError, expand_path, refuse_without_effect
from accel_train.domains.language.language_model import by_chunks
from accel_train.domains.models.lora import CPU, LoraConfig, adapter_config, apply_lora
from accel_train.domains.models.pretrained import near_folder, without_bars_in_logs, without_notices_of_imports
from accel_train.pipeline import ADAPTER_DESCRIPTION, DESCRIBED
from accel_train.precision import Precision
from accel_train.store import strict_json
from accel_train.store.atomic_files import write_json_in_place
from accel_train.store.exports.peft_layout import CONFIG_FILE
from accel_train.store.manifest import Checkpoint
from accel_train.wording import did_you_mean, nearest, shortened

SCRATCH = "llama"
MODEL_CONFIG = "config.json"
NO_ADAPTERS = LoraConfig()
UNREAD = ("architectures", "dtype", "torch_dtype", *DESCRIBED, "format")
"""Keys of config.json without effect: here the model type gives the class, and weights are read in fp32."""


@dataclass(frozen=True)
class ModelConfig:
    """Causal language model of transformers. The options have their transformers names."""

    source: str | None = None
    """Pretrained weights: a Hub id or a folder. None: train from scratch, with `config`."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id, also for its tokenizer."""
    config: str = SCRATCH
    """Architecture from scratch: a transformers model type (llama, gpt2, qwen3), or the Hub id or folder of a
    config.json, whose weights are not read."""
    hidden_size: PositiveInt | None = None
    """Width, from scratch. None: that of `config`, as for the options below."""
    intermediate_size: PositiveInt | None = None
    """Width of the feed-forward layers, from scratch."""
    num_hidden_layers: PositiveInt | None = None
    """Number of blocks, from scratch."""
    num_attention_heads: PositiveInt | None = None
    """Attention heads, from scratch."""
    num_key_value_heads: PositiveInt | None = None
    """Key and value heads, from scratch: fewer than num_attention_heads for grouped-query attention."""
    tie_word_embeddings: bool | None = None
    """Tie the output layer to the input embeddings, from scratch."""
    loss_chunk: NonNegativeInt = 0
    """Tokens whose logits are in memory at a time, such as 1024; the backward computes them again. 0: those of the
    whole micro-batch."""

    def __post_init__(self) -> None:
        if self.source is None:
            refuse_without_effect(self, "model", ["revision"], "without model.source", "give both")
            return
        because = f"with model.source: {self.source}, whose config.json decides it"
        instead = "train from scratch without --model.source"
        refuse_without_effect(self, "model", ["config", *self.sizes], because, instead)

    @property
    def location(self) -> str | None:
        """Path or Hub id that finds `source` from any working directory."""
        is_folder = self.source is not None and self.revision is None and Path(self.source).is_dir()
        return str(Path(str(self.source)).absolute()) if is_folder else self.source

    @property
    def sizes(self) -> dict[str, int | bool]:
        """Options of the config that are given."""
        values = {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "tie_word_embeddings": self.tie_word_embeddings,
        }
        return {name: value for name, value in values.items() if value is not None}


NO_SOURCE = ModelConfig()
SHOWN = 3
"""Most pieces of a vocabulary in a message."""


def resolve_config(options: ModelConfig, tokenizer: Any, max_length: int) -> Any:
    """Return transformers' config of the model, which fits the tokenizer and the row length.

    Raises ``UsageError`` for an unknown architecture, an option missing from its config, and too small a vocabulary or
    number of positions.
    """
    if options.source is not None and options.revision is not None and expand_path(options.source).is_dir():
        raise UsageError(
            f"--model.revision {options.revision!r}: {options.source} is a folder and has no revisions; leave it out"
        )
    config = _load_config(options.source, options.revision) if options.source else _from_scratch(options, tokenizer)
    # An id beyond the embeddings would be an index error on a CPU, and an opaque assertion on a GPU.
    needed = 1 + max(tokenizer.get_vocab().values())
    # A vision-language model has a config for each modality.
    of_text = config.get_text_config()
    if of_text.vocab_size < needed:
        raise UsageError(_too_few_embeddings(str(options.source), of_text.vocab_size, tokenizer))
    positions = positions_of(config)
    if positions is not None and positions < max_length:
        raise UsageError(
            f"--data.max_length {max_length}: {options.source or options.config!r} has {positions} positions. Give "
            f"{positions} or less."
        )
    return config


def _too_few_embeddings(source: str, rows: int, tokenizer: Any) -> str:
    name = tokenizer.name_or_path
    without = {number: piece for piece, number in tokenizer.get_vocab().items() if number >= rows}
    last = max(without)
    if name not in ("", source):
        return (
            f"--data.tokenizer: that of {name} has ids up to {last}, but the embeddings of --model.source "
            f"{source!r} have {rows} rows. A row for each id is required: leave --data.tokenizer out, or give a "
            f"tokenizer of the source with ids up to {rows - 1}."
        )
    named = shortened([f"{piece!r} ({number})" for number, piece in sorted(without.items())], SHOWN)
    found = (
        f"--model.source {source!r}: its embeddings have {rows} rows, but its tokenizer has ids up to {last}. A row "
        f"for each id is required, and there is none for {named}"
    )
    if without.keys() <= tokenizer.added_tokens_decoder.keys():
        return (
            f"{found}: tokens added to the vocabulary. Call model.resize_token_embeddings({last + 1}) of transformers, "
            "save model and tokenizer in a folder and give it as --model.source; or use a tokenizer without these "
            "tokens."
        )
    # Not for want of resizing: rows added to the embeddings would be random, and the others may be of other pieces.
    return (
        f"{found}: pieces of the vocabulary itself, so it is not the tokenizer that the model was trained with. Give "
        "a folder with the model and that tokenizer as --model.source."
    )


def positions_of(config: Any) -> int | None:
    """Return the maximum number of tokens of a model, None if its config names no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def refuse_other_config(options: ModelConfig, config: Any, checkpoint: Checkpoint | None) -> None:
    """Raise ``UsageError`` if ``config`` differs from that of the checkpoint to resume, which the run is bound to.

    The files of a source may change between two starts, and the weights would fit all the same.
    """
    if checkpoint is None:
        return
    saved = _saved_config(checkpoint.path, config)
    now = _plain(config)
    if saved["model_type"] != config.model_type:
        # Of a vision-language model, transformers builds the language model alone.
        now = _plain(getattr(config, "text_config", config))
    names = [name for name in ("model_type", *sorted({**saved, **now})) if saved.get(name) != now.get(name)]
    if not names:
        return
    name = names[0]
    raise UsageError(
        f"{checkpoint.path}: its model has {name} {saved.get(name)!r}, but the config.json of "
        f"{options.source or options.config} has {now.get(name)!r} (differences: {len(names)}); give it as it was, or "
        "start a new run in an unused --output_dir"
    )


def _saved_config(directory: Path, config: Any) -> dict[str, Any]:
    """Return the config of a checkpoint's model, or of the base of its adapters. Raises ``UsageError`` without one.

    Read like ``config``, so that both have the names and defaults of this version of transformers.
    """
    is_whole = (directory / MODEL_CONFIG).is_file()
    try:
        if is_whole:
            found: Any = strict_json.read_object(directory / MODEL_CONFIG)
        else:
            found = strict_json.read_object(directory / ADAPTER_DESCRIPTION)["architecture"]
        model_type = found["model_type"]
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{directory}: does not describe its model ({error}); give another checkpoint") from None
    kinds = {each.model_type: type(each) for each in (getattr(config, "text_config", config), config)}
    kind = kinds.get(model_type)
    if kind is None:
        return found
    if is_whole:
        return _plain(kind.from_pretrained(directory))
    return _plain(kind.from_dict(found))


def _plain(config: Any) -> dict[str, Any]:
    return strict_json.without_provenance(json.loads(config.to_json_string(use_diff=False)), UNREAD)


def _load_config(name: str, revision: str | None = None) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:  # failures of hub, network, code and format have no common type
        raise UsageError(not_loaded(name, error)) from None


def not_loaded(name: str, error: Exception) -> str:
    return (
        f"--model.source {name!r} cannot be loaded{near_folder(name)} ({one_line(error)}). The Hub id or folder of a "
        "causal language model with safetensors weights is required (without a network it must be in the cache); code "
        "from a repository is never run."
    )


def _from_scratch(options: ModelConfig, tokenizer: Any) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    types = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    values = {**options.sizes, "vocab_size": 1 + max(tokenizer.get_vocab().values()), **special}
    if options.config in types:
        # transformers takes unknown names in silence, so the names are compared with those of the defaults.
        known = AutoConfig.for_model(options.config)
        _refuse_unknown_sizes(options, known)
        return _with_sizes(options, lambda: AutoConfig.for_model(options.config, **values))
    if not Path(options.config).exists() and "/" not in options.config:
        raise UsageError(
            f"--model.config {options.config!r}: no model type of a causal language model from "
            f"transformers{did_you_mean(nearest(options.config, types))}, no folder and no Hub id. Give one of these."
        )
    known = _load_config(options.config)
    _refuse_unknown_sizes(options, known)
    return _with_sizes(options, lambda: type(known).from_dict({**known.to_dict(), **values}))


def _with_sizes(options: ModelConfig, make: Callable[[], Any]) -> Any:
    try:
        config = make()
    except Exception as error:  # some classes check their values, with errors of other packages
        sizes = ", ".join(f"--model.{name} {value}" for name, value in options.sizes.items())
        raise UsageError(
            f"{sizes or '--model.config'}: the config of {options.config} rejects it: {one_line(error)}. Give values "
            "that fit together, such as a --model.hidden_size that is a multiple of --model.num_attention_heads."
        ) from None
    # Most classes take any two numbers, and fail in their first forward.
    heads, groups = (getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        origin = f"{options.config} has {groups} by default" if options.num_key_value_heads is None else str(groups)
        raise UsageError(
            f"--model.num_key_value_heads: {origin}; a divisor of the {heads} attention heads is required. Give "
            f"--model.num_key_value_heads {heads}, or a smaller divisor for grouped-query attention."
        )
    return config


def one_line(error: Exception) -> str:
    """Return an error of another package as the end of a sentence."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _refuse_unknown_sizes(options: ModelConfig, known: Any) -> None:
    for name, value in options.sizes.items():
        if not hasattr(known, name):
            raise UsageError(
                f"--model.{name} {value}: a config of {known.model_type} has no {name}. Leave it out (None where a "
                "preset has it), or use another --model.config."
            )


def build(
    options: ModelConfig,
    config: Any,
    *,
    load_source: bool,
    adapters: LoraConfig = NO_ADAPTERS,
    precision: Precision = "fp32",
    device: torch.device = CPU,
) -> nn.Module:
    """Return the model with its adapters, if there are any. Its attention is sdpa, or eager if it lacks sdpa.

    ``precision`` is the compute precision. A base of 8 or 4 bits is quantised on ``device``.

    Weights are read from ``source`` if it is set and ``load_source`` or adapters ask for it, and random otherwise.
    Raises ``UsageError`` for missing weights, and for adapters that do not fit.
    """
    # A checkpoint of adapters may lack the base, which is therefore read from its source at every start.
    model = _build(options, config, load_source=load_source or adapters.rank > 0)
    apply_lora(model, adapters, precision, device)
    if options.loss_chunk:
        by_chunks(model, options.loss_chunk)
    return model


def refuse_adapters_without_source(options: ModelConfig, adapters: LoraConfig) -> None:
    """Raise ``UsageError`` for adapters on random weights."""
    if adapters.rank > 0 and options.source is None:
        raise UsageError(
            f"--lora.rank {adapters.rank}: adapters tune a trained model, but this one is trained from scratch; give "
            "--model.source, or leave --lora.rank out"
        )


def _build(options: ModelConfig, config: Any, *, load_source: bool) -> nn.Module:
    reads = load_source and options.source is not None and not simulated.weights_have_no_values()
    try:
        # Named, because a config.json may name kernels on the Hub, which are code.
        return _make(options, config, "sdpa", reads)
    except (ImportError, ValueError, OSError) as error:
        if not re.search(r"attention|attn", str(error), re.IGNORECASE):
            raise UsageError(not_loaded(options.source or options.config, error)) from None
    return _make(options, config, "eager", reads)


@contextmanager
def quiet() -> Generator[None]:
    """Silence messages of transformers that this package logs itself, or that nobody has asked for."""
    with without_notices_of_imports(), without_bars_in_logs():
        yield


@quiet()
def _make(options: ModelConfig, config: Any, attention: str, reads: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    # Under ZeRO-3 transformers would build a sharded model. Here each process builds it whole, from the same seed, and
    # `accelerator.prepare` shards it.
    unset_hf_deepspeed_config()
    loader: Any = AutoModelForCausalLM
    if reads:
        model, found = loader.from_pretrained(
            options.source,
            config=config,
            revision=options.revision,
            dtype=torch.float32,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        _refuse_missing(str(options.source), found)
    else:
        model = loader.from_config(config, dtype=torch.float32, attn_implementation=attention)
    # Other programs find the class by this.
    model.config.architectures = [type(model).__name__]
    return model.train()


def _refuse_missing(source: str, found: Mapping[str, Any]) -> None:
    missing = sorted(found["missing_keys"])
    if missing:
        raise UsageError(
            f"--model.source {source!r}: {len(missing)} weight(s) are not in its files ({', '.join(missing[:3])}), and "
            "would stay random. Give the folder or Hub id of a causal language model."
        )


def attention_of(model: nn.Module) -> str:
    """Return the name of the attention chosen by transformers for a model."""
    config: Any = model.config
    return config._attn_implementation


def save_files(model: nn.Module, tokenizer: Any, directory: Path, source: ModelConfig = NO_SOURCE) -> None:
    """Write config, generation config, tokenizer and chat template, so that ``from_pretrained(directory)`` loads.

    With adapters on ``source``, write peft's config instead of the model's: beside a config.json transformers would
    take the weights of the adapters for those of a whole model, and leave the rest random.
    """
    plain: Any = model
    tokenizer.save_pretrained(directory)
    # Adapters need it for the token that ends an answer, which their base may not know.
    if plain.can_generate():
        plain.generation_config.save_pretrained(directory)
    if hasattr(plain, "peft_config"):
        described = adapter_config(plain, source.location, source.revision)
        # peft finds the class of the base by this (`AutoPeftModelForCausalLM`).
        write_json_in_place(directory / CONFIG_FILE, described | {"task_type": "CAUSAL_LM"})
        return
    plain.config.save_pretrained(directory)

"""Pipeline of a causal language model: the continuation of a text, and the answer to a chat."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from accel_train.config import UsageError, expand_path
from accel_train.domains.language import adapted, pretrained, templates, tokenizers
from accel_train.domains.language.exported import llama as exported_llama
from accel_train.domains.language.exported import model as exported_model
from accel_train.domains.language.generation import asked, continuing
from accel_train.domains.language.pretrained import ModelConfig
from accel_train.domains.language.rows import forms
from accel_train.domains.models import lora
from accel_train.domains.models.adapters import (
    BASE,
    choose_adapter,
    is_adapter,
    refuse_names,
    refuse_unknown,
)
from accel_train.pipeline import (
    ADAPTER_DESCRIPTION,
    DESCRIBED,
    PLACE,
    Example,
    WrittenModel,
    describe,
    read_lines,
    settings,
)
from accel_train.precision import Precision
from accel_train.store import atomic_files, weights

if TYPE_CHECKING:
    from accel_train.domains.language.samples import EvaluationConfig

Prompt = str | Sequence[asked.Message]
"""A text, or the messages of a chat, each with ``role`` and ``content``."""

MAX_NEW_TOKENS = 128
EXAMPLE_SHAPE = (2, 8)
"""Rows and tokens of an example. Logits of a larger one could take more space than the weights."""
UNITS = {"logits": "of the next token, natural logarithm up to a constant"}
TRANSFORMERS = {
    "program": "transformers",
    "code": "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
    f"tokenizer = AutoTokenizer.from_pretrained({PLACE})\nmodel = AutoModelForCausalLM.from_pretrained({PLACE})",
}
"""Code for the card that loads a whole model."""


class LanguagePipeline:
    """Texts continued, and chats answered through the chat template of the tokenizer.

    Draws are keyed by seed and prompt, and each prompt is computed by itself: an answer depends on nothing else.
    """

    recipe: ClassVar[str] = "causal_lm"
    tag: ClassVar[str | None] = "text-generation"
    usage: ClassVar[str] = 'print(pipeline("A text to continue"))'
    options: ClassVar[type] = asked.LanguageOptions

    def __init__(self, model: nn.Module, tokenizer: Any, temperature: float, directory: Path | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.temperature = temperature
        """Default sampling temperature."""
        self.directory = directory
        """The checkpoint or export, None for a model loaded from neither."""
        self.adapters: tuple[str, ...] = (lora.ADAPTER,) if hasattr(model, "peft_config") else ()
        """Names of adapters to choose from in a call; ``default`` is the one of a run of adapters."""
        self._ends = adapted.AdapterEnds(model)
        self._chosen = next(iter(self.adapters), BASE)

    @property
    def standalone(self) -> tuple[Any, ...] | ModuleType | None:
        """A file with torch alone for Llama and its kin, and one that loads any other model by transformers."""
        config: Any = self.model.config
        return exported_llama if exported_llama.is_supported(config.to_dict()) else exported_model

    @classmethod
    def recognises(cls, description: Mapping[str, Any]) -> bool:
        """Return True for config.json of any causal language model from transformers, and for peft's of adapters."""
        if "peft_type" in description:
            return True
        # Late: asked only of a config.json without a description, and transformers takes seconds to import.
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
        named: Any = description.get("architectures")
        return "model_type" in description and isinstance(named, list) and any(name in known for name in named)

    @classmethod
    def from_directory(cls, directory: Path, device: str = "cpu") -> LanguagePipeline:
        """Read a checkpoint or an export, of a whole model or of adapters on their base. Raises ``UsageError``."""
        if is_adapter(directory):
            # Before the base is loaded: a description of another version is refused.
            described = settings(adapted.read_description(directory), directory)
            model = adapted.load_adapted(directory, torch.device(device))
        else:
            described = settings(json.loads((directory / "config.json").read_text("utf-8")), directory)
            model = _whole_model(directory)
        tokenizer = tokenizers.load_tokenizer(str(directory), None)
        sampler: Mapping[str, Any] = {} if described is None else described["sampler"]
        temperature = float(sampler.get("temperature", continuing.TEMPERATURE))
        pipeline = cls(model.to(device), tokenizer, temperature, directory)
        pipeline._read_ends(dict.fromkeys(pipeline.adapters, directory))
        return pipeline

    @classmethod
    def write_for_others(cls, directory: Path) -> list[str]:
        """Write nothing: transformers and peft read an export as it is. Return a line if one of them reads less."""
        return adapted.notices_of_dora(directory) if is_adapter(directory) else []

    def attach(self, adapters: Mapping[str, Path]) -> None:
        """Put further adapters on the model, by name: directories of checkpoints or exports, verified already.

        The base is then the weights that adapters are trained on, not their EMA. Raises ``UsageError`` for adapters of
        another base, and for names in use.
        """
        refuse_names(adapters, self.adapters)
        assert self.directory is not None, "a model that was not loaded has no files to compare"
        if is_adapter(self.directory):
            reference = adapted.base_reference(self.directory)
        else:
            # Here, because nothing else of a pipeline needs it.
            from accel_train.domains.language.sources import find_base

            reference = find_base(str(self.directory), None).reference()
            if weights.has_ema(self.directory):
                weights.load_weights(self.directory, "model", self.model, required=())
        device = next(self.model.parameters()).device
        adapted.attach(self.model, adapters, self.directory, reference)
        self.model.to(device).eval()
        if not self.adapters:
            self._chosen = next(iter(adapters))
        self.adapters += tuple(adapters)
        self._read_ends(adapters)

    def _read_ends(self, adapters: Mapping[str, Path]) -> None:
        for name, directory in adapters.items():
            self._ends.read(name, directory)
        self._choose(self._chosen)

    @contextmanager
    def using(self, adapter: str | None) -> Generator[None]:
        """Compute with an adapter, or with ``base`` the base alone. None: the one in use, initially the first."""
        before = self._chosen
        name = before if adapter is None else adapter
        refuse_unknown(name, self.adapters)
        self._choose(name)
        try:
            yield
        finally:
            # The model is as it was, also for a caller that continues after an error.
            self._choose(before)

    def _choose(self, name: str) -> None:
        self._chosen = name
        if self.adapters:
            choose_adapter(self.model, None if name == BASE else name)
            self._ends.choose(name)

    @classmethod
    def write_merged(cls, adapters: Path, directory: Path, precision: Precision) -> WrittenModel:
        """Write the base of a checkpoint with its adapters merged, as a whole model for ``from_pretrained``.

        A base of 8 or 4 bits is merged by its dequantised values, as in training. Raises ``UsageError`` for a missing
        or different base, and for values out of the range of ``precision``.
        """
        # Merged in fp32 and rounded once, at the end.
        model, outputs = adapted.load_merged(adapters, _examples)
        if precision != "fp32":
            adapted.round_weights(model, precision)
            # From the weights in memory: outputs of weights read back from the files could not prove these.
            outputs = adapted.outputs(model, _examples(model))
        adapted.save_whole(model, directory, precision)
        tokenizers.load_tokenizer(str(adapters), None).save_pretrained(directory)
        described = adapted.read_description(adapters)
        parts = {name: described[name] for name in (*DESCRIBED, "format")}
        config = json.loads((directory / "config.json").read_text("utf-8"))
        atomic_files.write_json_in_place(directory / "config.json", config | parts)
        return WrittenModel(outputs=outputs)

    def __call__(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        adapter: str | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Continue a text, or answer a chat, and return what the model wrote.

        ``tools`` and ``chat_template_kwargs`` are given to the chat template, as those of a training row are.
        ``temperature`` 0 takes the most likely token each time. ``top_p`` draws from the most likely tokens whose
        probabilities add up to it. ``adapter`` is one of ``adapters``, by default the one in use, or ``base`` for none.
        Raises ``UsageError`` for an empty prompt, messages without a usable chat template, more tokens than the model
        has positions, an unknown adapter, and values out of range.
        """
        temperature = self.temperature if temperature is None else temperature
        if not (0 <= temperature < float("inf") and 0 < top_p <= 1):
            raise UsageError(
                f"temperature {temperature:g}, top_p {top_p:g}: a temperature of 0 or more and a top_p above 0, at "
                "most 1, are required"
            )
        ids = templates.encode_prompt(prompt, self.tokenizer, tools, chat_template_kwargs)
        length = self._new_tokens(len(ids), max_new_tokens)
        # Keyed by the tokens: two texts that the tokenizer cannot tell apart get the same answer.
        drawing = continuing.Drawing(seed, "prompt", _number(ids), temperature, top_p)
        with self.using(adapter):
            new = continuing.continue_tokens(self.model, ids, drawing, length, pad_id=self.tokenizer.pad_token_id)
        return self._written(ids, new)

    def answers(
        self,
        prompts: str | Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        adapter: str | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Answer each prompt as a call with it alone would. A single text is one prompt."""
        answer = partial(
            self,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            adapter=adapter,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        if isinstance(prompts, str):
            return [answer(prompts)]
        return [answer(prompt) for prompt in prompts]

    def sample(self, options: asked.LanguageOptions) -> list[str]:
        """Answer as ``accel-train sample`` is asked to, and return the lines to print."""
        prompts: list[Prompt] = [*options.text, *read_lines(options.text_file), *map(asked.chat, options.messages)]
        answers = self.answers(
            prompts,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            adapter=options.adapter,
            tools=asked.tools(options.tools),
            chat_template_kwargs=asked.template_options(options.chat_template_kwargs),
        )
        if options.output is None:
            return answers
        path = expand_path(options.output)
        pairs = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True)]
        path.write_text("".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs), "utf-8")
        return [f"{path}: {len(pairs)} answers"]

    def examples(self) -> list[Example]:
        """Return a forward of drawn tokens. Its logits depend on all weights used by these tokens."""
        return _examples(self.model)

    # ------------------------------------------------------------------------------------------------------------ parts
    def _new_tokens(self, given: int, asked: int | None) -> int:
        """Return the maximum number of tokens of an answer to a prompt of ``given`` tokens."""
        positions = pretrained.positions_of(self.model.config)
        left = MAX_NEW_TOKENS if positions is None else positions - given
        found = min(MAX_NEW_TOKENS, left) if asked is None else asked
        if found < 1 or (positions is not None and found > left):
            limit = "" if positions is None else f" and the model {positions} positions, so up to {left} can be written"
            shown = "" if asked is None else f"max_new_tokens {asked}: "
            raise UsageError(
                f"{shown}the prompt has {given} tokens{limit}; give 1 or more that fit, or a shorter prompt"
            )
        return found

    def _written(self, given: Sequence[int], new: Sequence[int]) -> str:
        """Return the text of the new tokens as it follows the prompt."""
        before = self.tokenizer.decode(given, skip_special_tokens=True)
        whole = self.tokenizer.decode([*given, *new], skip_special_tokens=True)
        # Some tokenizers drop the space before the first token that they decode.
        if whole.startswith(before):
            return whole.removeprefix(before)
        return self.tokenizer.decode(new, skip_special_tokens=True)


def _examples(model: nn.Module) -> list[Example]:
    config: Any = model.config
    tokens = continuing.example_tokens(EXAMPLE_SHAPE, config.get_text_config().vocab_size)
    return [Example("logits of the next token", {"input_ids": tokens}, exported_model.logits)]


@pretrained.quiet()
def _whole_model(directory: Path) -> nn.Module:
    """Read config.json and weights, EMA weights where there are any."""
    try:
        model: nn.Module = exported_model.load(directory)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{directory}: cannot be loaded as a causal language model of transformers ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}); a checkpoint or an export of recipes/causal_lm.py is required"
        ) from None
    if weights.has_ema(directory):
        # The EMA covers what was trained. The rest is in the weights.
        weights.load_weights(directory, "ema", model, required=())
    return model


def _number(ids: Sequence[int]) -> int:
    """Return the number of a prompt in the keys of its draws."""
    # Not Python's hash, which differs from process to process.
    digest = hashlib.blake2b(" ".join(map(str, ids)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _code_for_peft(options: ModelConfig) -> dict[str, str]:
    """Return the code that loads adapters with peft, for the card."""
    if options.source and forms.is_hub_id(options.source):
        code = f"from peft import AutoPeftModelForCausalLM\n\nmodel = AutoPeftModelForCausalLM.from_pretrained({PLACE})"
    else:
        # The path in adapter_config.json exists on the machine of the training alone.
        code = (
            "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
            'base = AutoModelForCausalLM.from_pretrained("FOLDER_OF_THE_BASE")\n'
            f"model = PeftModel.from_pretrained(base, {PLACE})"
        )
    return {"program": "peft", "needs": "adapter_model.safetensors", "code": code}


def write_files(
    model: nn.Module,
    tokenizer: Any,
    options: ModelConfig,
    evaluation: EvaluationConfig,
    paths: Sequence[str],
    base_precision: lora.BasePrecision,
    directory: Path,
) -> None:
    """Write the files beside the weights of a checkpoint. ``paths`` are the sources of training rows.

    config.json is transformers' own plus the description of the pipeline, ignored by ``from_pretrained``. For adapters
    the description is in pipeline.json, with the architecture and the precision of their base.
    """
    pretrained.save_files(model, tokenizer, directory, options)
    file = directory / "config.json"
    adapters = {}
    architecture: Mapping[str, Any] = {}
    if file.is_file():
        architecture = json.loads(file.read_text("utf-8"))
    else:
        file = directory / ADAPTER_DESCRIPTION
        base = {"source": options.location, "precision": base_precision}
        config: Any = model.config
        adapters = {"base": base, "architecture": config.to_dict()}
    described = describe(
        LanguagePipeline,
        architecture,
        objective={"loss": "cross entropy of the next token"},
        sampler={"temperature": evaluation.temperature},
        normalisation={},
        units=UNITS,
        card={
            "base_model": options.source if options.source and forms.is_hub_id(options.source) else None,
            "datasets": [re.split("[:@]", path)[0] for path in paths if path != "demo" and forms.is_hub_id(path)],
            "measured_on": f"held-out texts of {', '.join(paths)}",
            "other_programs": [_code_for_peft(options) if adapters else TRANSFORMERS],
        },
    )
    atomic_files.write_json_in_place(file, described | adapters)

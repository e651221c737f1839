"""Models of transformers: options, what is refused, attention, files, FLOPs."""

from __future__ import annotations

import dataclasses
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from accel_train.config import UsageError
from accel_train.domains.language import flops, pretrained, row_checks, tokenizers
from accel_train.domains.language.language_model import LanguageModel
from accel_train.domains.language.pretrained import ModelConfig
from accel_train.options.loading import load_config
from accel_train.speed.activation_checkpointing import apply_activation_checkpointing
from recipes import causal_lm
from tests.domains.language import tiny
from tests.speed.checkpointing import PARTIAL, config_of

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4
}  # fmt: skip
SIZES = ModelConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)


def test_the_import_of_a_model_names_no_optional_packages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    make = transformers.AutoModelForCausalLM.from_config

    def importing(config: Any, **options: Any) -> Any:
        logging.getLogger("torch.utils._pytree").warning("torchao registers an enum")
        return make(config, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", importing)
    pretrained.build(SIZES, resolved(SIZES), load_source=False)
    assert caplog.messages == []


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_log_has_no_bar_of_loaded_weights(
    is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ModelConfig(source=str(tiny.save(tmp_path / "base", SIZES)))
    capsys.readouterr()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    pretrained.build(source, resolved(source), load_source=True)
    assert ("Loading weights" in capsys.readouterr().err) == is_terminal


def resolved(options: ModelConfig) -> Any:
    return pretrained.resolve_config(options, tiny.tokenizer(), 64)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 64),
        ("intermediate_size", 96),
        ("num_hidden_layers", 3),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 4),
        ("tie_word_embeddings", True),
    ],
)
def test_a_size_from_scratch_is_that_of_the_model(name: str, value: Any) -> None:
    changed = dataclasses.replace(tiny.LLAMA, **{name: value})
    assert getattr(resolved(tiny.LLAMA), name) != value
    assert getattr(resolved(changed), name) == value
    shapes = [[tuple(p.shape) for p in tiny.model(options).parameters()] for options in (tiny.LLAMA, changed)]
    assert shapes[0] != shapes[1]


def test_vocabulary_and_special_tokens_from_scratch_are_the_tokenizers() -> None:
    tokenizer = tiny.tokenizer()
    config = resolved(tiny.LLAMA)
    assert config.vocab_size == len(tokenizer)
    assert (config.bos_token_id, config.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


def test_the_architecture_is_a_model_type_or_the_config_of_a_folder(tmp_path: Path) -> None:
    assert type(tiny.model(ModelConfig(config="gpt2", hidden_size=32, num_attention_heads=4))).__name__ == (
        "GPT2LMHeadModel"
    )
    resolved(tiny.LLAMA).save_pretrained(tmp_path)
    found = resolved(ModelConfig(config=str(tmp_path), num_hidden_layers=1))
    assert (found.hidden_size, found.num_hidden_layers) == (32, 1)
    with pytest.raises(UsageError, match=r"--model.config 'lama': no model type .*did you mean 'llama'"):
        resolved(ModelConfig(config="lama"))
    with pytest.raises(UsageError, match=r"heads: qwen3 has 32 by default; a divisor of the 4 .* 4, or"):
        resolved(ModelConfig(config="qwen3", hidden_size=32, num_attention_heads=4))
    with pytest.raises(UsageError, match=r"--model.num_key_value_heads: 3; a divisor of the 4 attention heads"):
        resolved(ModelConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=3))
    with pytest.raises(UsageError, match=r"--model.num_key_value_heads 2: a config of gpt2 has no num_key_value_heads"):
        resolved(ModelConfig(config="gpt2", num_key_value_heads=2))


def test_pretrained_weights_are_those_of_the_folder_and_a_resume_reads_none(tmp_path: Path) -> None:
    tiny.save(tmp_path)
    options = ModelConfig(source=str(tmp_path))
    config = resolved(options)
    expected = tiny.model().state_dict()
    found = pretrained.build(options, config, load_source=True).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    torch.manual_seed(1)
    random = pretrained.build(options, config, load_source=False).state_dict()
    assert not torch.equal(random["lm_head.weight"], expected["lm_head.weight"])
    with torch.device("meta"):
        assert next(pretrained.build(options, config, load_source=True).parameters()).is_meta


@pytest.mark.parametrize(
    "flags",
    [{"hidden_size": 64}, {"config": "gpt2"}, {"tie_word_embeddings": False}],
    ids=lambda flags: next(iter(flags)),
)
def test_sizes_have_no_effect_on_pretrained_weights_and_are_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=rf"model\.{next(iter(flags))}: .* no effect with model\.source: x,"):
        ModelConfig(source="x", **flags)
    with pytest.raises(UsageError, match=r"model\.revision: main: has no effect without model\.source"):
        ModelConfig(revision="main")


def test_a_source_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--model.source '.*nothing' cannot be loaded"):
        resolved(ModelConfig(source=str(tmp_path / "nothing")))
    tiny.save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    options = ModelConfig(source=str(tmp_path))
    with pytest.raises(UsageError, match=r"--model.source .* cannot be loaded .*model.safetensors"):
        pretrained.build(options, resolved(options), load_source=True)


def test_weights_that_would_stay_random_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    options = ModelConfig(source=str(tmp_path))
    with pytest.raises(UsageError, match=r"1 weight\(s\) are not in its files \(lm_head.weight\)"):
        pretrained.build(options, resolved(options), load_source=True)


def test_a_vocabulary_or_positions_too_few_are_refused_with_the_numbers(tmp_path: Path) -> None:
    tiny.save(tmp_path)
    larger = tokenizers.train_tokenizer(tiny.TEXTS * 2 + ["entirely different words of another text"], 340)
    with pytest.raises(UsageError, match=r"embeddings have 320 rows, .* ids up to 339\. .*the vocabulary itself"):
        pretrained.resolve_config(ModelConfig(source=str(tmp_path)), larger, 64)
    larger.save_pretrained(tmp_path / "larger")
    larger = tokenizers.load_tokenizer(str(tmp_path / "larger"), None)
    with pytest.raises(UsageError, match=r"--data.tokenizer: that of .*larger has ids up to 339, .* have 320 rows"):
        pretrained.resolve_config(ModelConfig(source=str(tmp_path)), larger, 64)
    larger.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"none for '.*' \(320\), .*: pieces of the vocabulary itself, so it is not"):
        itself = tokenizers.load_tokenizer(str(tmp_path), None)
        pretrained.resolve_config(ModelConfig(source=str(tmp_path)), itself, 64)
    with pytest.raises(UsageError, match=r"--data.max_length 4096: 'llama' has 2048 positions. Give 2048 or less"):
        pretrained.resolve_config(tiny.LLAMA, tiny.tokenizer(), 4096)


@pytest.mark.parametrize(
    ("kind", "name"), [("gemma3", "Gemma3ForConditionalGeneration"), ("llama4", "Llama4ForCausalLM")]
)
def test_a_source_of_pictures_and_texts_is_read_by_its_config_of_texts(kind: str, name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    texts = {"vocab_size": 320, "head_dim": 16, "num_key_value_heads": 1, "max_position_embeddings": 96}
    pictures = {"image_size": 28, "patch_size": 14}
    config: Any = AutoConfig.for_model(kind, text_config={**sizes, **texts}, vision_config={**sizes, **pictures})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    # That of the whole, as its repository on the Hub has it.
    config.save_pretrained(tmp_path)
    options = ModelConfig(source=str(tmp_path))
    model: Any = pretrained.build(options, resolved(options), load_source=True)
    assert type(model).__name__ == name
    assert len(row_checks.check_rows(model, packing=True)) == 2
    assert pretrained.positions_of(resolved(options)) == pretrained.positions_of(model.config) == 96
    with pytest.raises(UsageError, match=r"--data.max_length 97: .* has 96 positions"):
        pretrained.resolve_config(options, tiny.tokenizer(), 97)
    larger = tiny.tokenizer()
    larger.add_tokens(["another"])
    added = r"320 rows, .* ids up to 320\. .* none for 'another' \(320\): tokens added to .*_embeddings\(321\)"
    with pytest.raises(UsageError, match=added):
        pretrained.resolve_config(options, larger, 64)


def test_the_name_in_transformers_is_refused_with_ours(tmp_path: Path) -> None:
    presets = Path(causal_lm.__file__).parent / "presets"
    for words in (["--model.attn_implementation", "sdpa"], [str(tmp_path / "old.yaml")]):
        (tmp_path / "old.yaml").write_text("model: {attn_implementation: sdpa}\n")
        with pytest.raises(UsageError, match=r"model.attn_implementation.* use --attention \(eager, sdpa, flash"):
            load_config(causal_lm.Config, words, presets=presets, default_preset="causal_lm_demo")


def test_a_model_attends_by_sdpa_or_by_eager_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    assert pretrained.attention_of(tiny.model()) == "sdpa"
    monkeypatch.setattr(LlamaForCausalLM, "_supports_sdpa", False)
    assert pretrained.attention_of(tiny.model()) == "eager"


@pytest.mark.parametrize("tied", [False, True])
def test_saved_files_and_weights_load_with_the_same_logits(tied: bool, tmp_path: Path) -> None:
    """As in a checkpoint: our weights file has each tied tensor once."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tiny.model(dataclasses.replace(tiny.LLAMA, tie_word_embeddings=tied))
    tokenizer = tiny.tokenizer(tiny.CHATML)
    pretrained.save_files(model, tokenizer, tmp_path)
    save_file({name: p.detach() for name, p in model.named_parameters()}, tmp_path / "model.safetensors")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    again: Any = AutoTokenizer.from_pretrained(tmp_path)
    ids = again(tiny.TEXTS[0], return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == tokenizer(tiny.TEXTS[0])["input_ids"]
    assert again.chat_template == tiny.CHATML
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    assert loaded.config.architectures == ["LlamaForCausalLM"]


def test_a_model_is_built_in_fp32_and_training_whatever_its_files_hold(tmp_path: Path) -> None:
    tiny.model().to(torch.bfloat16).save_pretrained(tmp_path)
    options = ModelConfig(source=str(tmp_path))
    for reads in (True, False):
        built = pretrained.build(options, resolved(options), load_source=reads)
        assert {parameter.dtype for parameter in built.parameters()} == {torch.float32}
        assert all(module.training for module in built.modules())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("config", ["llama", "gpt2"])
def test_flops_are_those_that_torch_counts(config: str, tied: bool) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = tiny.model(ModelConfig(config=config, tie_word_embeddings=tied, **sizes))
    model.set_attn_implementation("eager")
    ids = torch.arange(24).reshape(1, 24)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    assert 24 * flops.forward_flops_per_token(model, 24) == pytest.approx(counter.get_total_flops(), rel=2e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_weights_have_no_product_for_their_gradients(tied: bool) -> None:
    model: Any = tiny.model(ModelConfig(config="llama", tie_word_embeddings=tied, **SMALL))
    forward = flops.forward_flops_per_token(model, 24)
    assert flops.training_flops_per_token(model, 24) == 3 * forward
    model.model.requires_grad_(False)
    frozen = sum(p.numel() for name, p in model.model.layers.named_parameters() if "norm" not in name)
    if tied:
        frozen += model.lm_head.weight.numel()
    assert flops.training_flops_per_token(model, 24) == 3 * forward - 2 * frozen


def test_of_experts_the_active_ones_count() -> None:
    model: Any = tiny.model(ModelConfig(config="mixtral", num_key_value_heads=2, **SMALL))
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    model.config.num_experts_per_tok = model.config.num_local_experts = 8
    whole = flops.forward_flops_per_token(model, 24)
    model.config.num_experts_per_tok = 2
    assert experts > 0
    assert flops.forward_flops_per_token(model, 24) == whole - 2 * experts * 6 // 8


def test_a_missing_pad_token_is_set_and_said() -> None:
    tokenizer = tiny.tokenizer()
    assert tokenizers.set_pad_token(tokenizer) == []
    tokenizer.pad_token = None
    size = len(tokenizer)
    (notice,) = tokenizers.set_pad_token(tokenizer)
    assert "no pad token: '</s>' is used" in notice
    assert (tokenizer.pad_token_id, len(tokenizer)) == (tokenizer.eos_token_id, size)


@pytest.mark.parametrize("mode", ["full", PARTIAL, "selective"])
@pytest.mark.parametrize("config", ["llama", "gpt2"])
def test_activation_checkpointing_of_its_blocks_changes_no_gradient(config: str, mode: Any) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    options = ModelConfig(config=config, **sizes)
    ids = torch.arange(24).reshape(1, 24)
    packed = {"input_ids": ids, "position_ids": torch.arange(12).repeat(2).reshape(1, 24)}

    def gradients(checkpointed: bool) -> list[torch.Tensor]:
        model = tiny.model(options)
        if checkpointed:
            notice = apply_activation_checkpointing(model, config_of(mode))
            assert f"{1 if mode == PARTIAL else 2} of 2 blocks" in notice
        LanguageModel(model, packing=True, attention="sdpa").logits(packed).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))

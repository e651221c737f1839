"""Habits of models in training: dropout, caches, dtypes, and recomputation of their own."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

from accel_train.config import UsageError
from accel_train.domains.models.lora import LoraConfig, apply_lora
from accel_train.domains.models.mmdit import MMDiTConfig, MultimodalMMDiT, MultimodalMMDiTConfig
from accel_train.precision import kept_in_fp32
from accel_train.speed import model_habits
from tests.distributed.foreign_models import MODELS, VOCABULARY


def settled(model: nn.Module, precision: Any = "fp32", strategy: str = "ddp", checkpointing: str = "none") -> list[str]:
    return model_habits.settle_habits(model, precision, strategy, checkpointing)


@pytest.mark.parametrize(
    ("layer", "count"),
    [(nn.Dropout(0.1), 1), (nn.Dropout2d(0.5), 1), (nn.Dropout(0.0), 0), (nn.GELU(), 0)],
)
def test_dropout_is_said_once_with_the_number_of_modules(
    layer: nn.Module, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), layer, nn.Sequential(nn.GELU(), copy.deepcopy(layer)))
    with caplog.at_level(logging.WARNING):
        settled(model)
    assert len(caplog.records) == bool(count)
    if count:
        assert "dropout of 2 modules (1 is the first" in caplog.text
        assert "so the trajectory depends on the machine" in caplog.text
    assert model_habits.dropout_warning(model.eval()) is None


def test_dropout_that_a_config_sets_is_named_by_its_options() -> None:
    from transformers import GPT2Config, GPT2DoubleHeadsModel, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    sizes: Any = {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 1, "n_head": 2, "attn_pdrop": 0.2}
    warning = str(model_habits.dropout_warning(GPT2LMHeadModel(GPT2Config(**sizes, embd_pdrop=0.0)).train()))
    assert "set attn_pdrop, resid_pdrop of its config to 0" in warning
    headed = GPT2DoubleHeadsModel(GPT2Config(**sizes, embd_pdrop=0.0, num_labels=1)).train()
    warning = str(model_habits.dropout_warning(headed))
    assert "set attn_pdrop, resid_pdrop, summary_first_dropout of its config to 0" in warning
    # As from_pretrained notes it.
    headed.name_or_path = "org/gpt2"
    assert "set attn_pdrop, resid_pdrop, summary_first_dropout in its config.json to 0" in str(
        model_habits.dropout_warning(headed)
    )
    # Llama has no dropout module: its attention draws by itself.
    small: Any = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    config = LlamaConfig(**small, num_attention_heads=2, num_key_value_heads=2, attention_dropout=0.1)
    warning = str(model_habits.dropout_warning(LlamaForCausalLM(config).train()))
    assert "dropout of 2 modules (model.layers.0.self_attn is the first, a LlamaAttention)" in warning
    assert "set attention_dropout of its config to 0" in warning


@pytest.mark.parametrize("kind", ["llama", "gpt", "sd3", "unet"])
def test_models_without_dropout_and_ours_are_silent(kind: Any) -> None:
    assert model_habits.dropout_warning(MODELS[kind]().train()) is None
    ours = MultimodalMMDiT(MultimodalMMDiTConfig(MMDiTConfig(width=48, depth=1, heads=4), 50, 6, 8, 3))
    assert model_habits.dropout_warning(ours) is None


@pytest.mark.parametrize("kind", ["llama", "sd3", "unet"])
def test_recomputation_of_its_own_is_named_and_not_done_twice(kind: Any) -> None:
    model: Any = MODELS[kind]()
    assert not any("checkpointing" in notice for notice in settled(model))
    if kind == "llama":
        model._set_gradient_checkpointing(enable=True)  # gradient_checkpointing_enable without its warning
    else:
        model.enable_gradient_checkpointing()
    name = type(model).__name__
    assert any(f"activation checkpointing: {name}'s own" in notice for notice in settled(model))
    with pytest.raises(UsageError, match=rf"activation_checkpointing.mode full: {name} already recomputes by itself"):
        settled(model, checkpointing="full")


def test_a_frozen_batch_norm_keeps_its_statistics_and_a_trained_one_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3).requires_grad_(False), nn.BatchNorm1d(3))
    with caplog.at_level(logging.WARNING):
        assert settled(model) == ["1 frozen batch norm(s) keep their running statistics"]
    (warning,) = caplog.records
    assert warning.getMessage().startswith("1 is BatchNorm1d(3")
    model(torch.randn(8, 3) + 5)
    assert model[0].running_mean.tolist() == [0, 0, 0]
    assert float(model[1].running_mean.abs().max()) > 0


def test_a_loop_of_its_own_freezes_the_statistics_again_after_train() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3).requires_grad_(False), nn.BatchNorm1d(3))
    for _ in range(2):
        assert model_habits.freeze_statistics(model.train()) == ["1 frozen batch norm(s) keep their running statistics"]
        assert [module.training for module in model] == [False, True]
    assert model_habits.freeze_statistics(nn.Sequential(nn.BatchNorm1d(3))) == []


def test_no_cache_is_filled_while_a_model_trains() -> None:
    model: Any = MODELS["llama"]().train()
    assert "use_cache is off while the model trains" in settled(model)
    ids = torch.arange(6)[None]
    assert model(input_ids=ids).past_key_values is None
    with pytest.raises(UsageError, match="use_cache=True: LlamaForCausalLM is being trained"):
        model(input_ids=ids, use_cache=True)
    with torch.no_grad():
        assert model(input_ids=ids).past_key_values is not None
    assert model.eval()(input_ids=ids).past_key_values is not None
    assert model.config.use_cache is True  # what is saved generates with a cache
    assert settled(MODELS["sd3"]()) == []


def test_weights_that_a_library_keeps_in_fp32_are_known_by_dtype() -> None:
    """Against what transformers itself loads."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: Any = {"vocab_size": 9, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model: Any = T5ForConditionalGeneration(T5Config(**sizes))
    for dtype in (torch.float16, torch.bfloat16):
        plan = model._get_dtype_plan(dtype) if hasattr(model, "_get_dtype_plan") else {}
        kept = kept_in_fp32(model, dtype)
        names = {name for name, parameter in model.named_parameters() if id(parameter) in kept}
        assert bool(names) == bool(plan) == (dtype == torch.float16)
        assert all(".wo." in name for name in names)
    assert kept_in_fp32(model, torch.float32) == set()
    with pytest.raises(UsageError, match=r"precision fp16 under zero2 casts all .*T5ForConditionalGeneration keeps"):
        settled(model, "fp16", "zero2")
    settled(model, "fp16", "ddp")
    settled(model, "bf16", "zero2")


def test_a_base_in_half_precision_leaves_them_in_fp32() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    pytest.importorskip("peft")
    sizes: Any = {"vocab_size": 9, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model: Any = T5ForConditionalGeneration(T5Config(**sizes))
    apply_lora(model, LoraConfig(rank=2, base_precision="fp16"))
    for name, parameter in model.named_parameters():
        keeps = ".wo." in name or ".lora_" in name
        assert parameter.dtype == (torch.float32 if keeps else torch.float16), name

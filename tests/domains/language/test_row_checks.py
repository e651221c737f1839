"""A model whose tokens see later ones is refused, whatever hides it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.config import UsageError
from accel_train.domains.language import row_checks
from accel_train.domains.language.pretrained import ModelConfig
from tests import zygote
from tests.distributed.launching import ROOT, environment
from tests.domains.language import tiny

SIZES = {"hidden_size": 32, "num_hidden_layers": 1}


@pytest.mark.parametrize("config", ["llama", "gpt2", "mamba", "bloom"])
def test_a_causal_model_is_proven(config: str) -> None:
    sizes: dict[str, Any] = {} if config == "mamba" else {"num_attention_heads": 4}
    model = tiny.model(ModelConfig(config=config, **SIZES, **sizes)).train()
    assert model.config.model_type == config
    assert "causality: proven" in row_checks.check_causality(model)
    assert model.training


def test_a_base_in_bf16_is_proven() -> None:
    """As that of adapters: alone and in a row its logits differ by the rounding of bf16."""
    causality, packing = row_checks.check_rows(tiny.model().to(torch.bfloat16), packing=True)
    assert "causality: proven" in causality
    assert "packing: proven" in packing


@pytest.mark.parametrize(("config", "name"), [("bert", "BertLMHeadModel"), ("roberta", "RobertaForCausalLM")])
def test_a_model_whose_tokens_see_later_ones_is_refused(config: str, name: str) -> None:
    """Their classes for language models look both ways unless the config makes them decoders."""
    model = tiny.model(ModelConfig(config=config, **SIZES, intermediate_size=64, num_attention_heads=2))
    with pytest.raises(UsageError, match=f"{name}: changing the last token changes the logits before it"):
        row_checks.check_rows(model, packing=False)


def test_an_auxiliary_loss_that_is_asked_for_is_said_to_have_no_effect() -> None:
    model = tiny.model()
    assert len(row_checks.check_rows(model, packing=True)) == 2
    model.config.output_router_logits = True
    *_, notice = row_checks.check_rows(model, packing=True)
    assert notice.startswith("output_router_logits of config.json has no effect")


def test_a_model_whose_logits_are_no_numbers_is_not_proven() -> None:
    model: Any = tiny.model()
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(UsageError, match="by nan of the largest"):
        row_checks.check_causality(model)


def test_a_vocabulary_of_any_size_has_another_token() -> None:
    """The two rows must differ, or every model would pass."""
    seen: list[torch.Tensor] = []
    for vocabulary in (2, 3, 5, 15, 16, 17):
        model = tiny.model()
        model.config.vocab_size = vocabulary
        model.register_forward_pre_hook(lambda *given: seen.append(given[2]["input_ids"]), with_kwargs=True)
        row_checks.check_causality(model)
        assert not torch.equal(*seen[-2:]), vocabulary
        assert int(torch.stack(seen[-2:]).max()) < vocabulary


def test_sizes_that_do_not_fit_each_other_are_refused() -> None:
    sizes = {**SIZES, "intermediate_size": 64, "num_attention_heads": 2}
    with pytest.raises(UsageError, match=r"--model.num_attention_heads 3: the config of llama rejects it: Strict"):
        tiny.model(ModelConfig(config="llama", **{**sizes, "num_attention_heads": 3}))
    with pytest.raises(UsageError, match=r"--model.num_key_value_heads: 3; a divisor of the 2 attention heads"):
        tiny.model(ModelConfig(config="llama", num_key_value_heads=3, **sizes))
    model = tiny.model(ModelConfig(config="llama", **sizes))
    projection = model.get_submodule("model.layers.0.self_attn.k_proj")
    projection.weight = torch.nn.Parameter(projection.weight[:-1])
    with pytest.raises(
        UsageError, match=r"LlamaForCausalLM cannot take a row of 16 tokens: RuntimeError: .* fit together"
    ):
        row_checks.check_rows(model, packing=True)


def test_a_run_of_such_a_model_is_a_usage_error(tmp_path: Path) -> None:
    flags = "causal_lm_smoke --model.config bert --model.hidden_size 32 --model.intermediate_size 64 "
    flags += "--model.num_hidden_layers 1 --model.num_attention_heads 2 --data.no_packing --output_dir"
    words = (sys.executable, str(ROOT / "recipes" / "causal_lm.py"), *flags.split(), str(tmp_path / "run"))
    done: subprocess.CompletedProcess[str] = zygote.run(words, env=environment(), timeout=300)
    assert done.returncode == 2, done.stdout
    assert "a token sees the one that it must predict" in done.stdout
    assert not (tmp_path / "run").exists()

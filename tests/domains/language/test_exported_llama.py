"""model.py of Llama and its kin: torch alone, and the outputs of transformers for every setting that it takes."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.domains.language.exported import llama as exported_llama

ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "rope_theta": 500.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, tied, biases, whole heads": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 4,
        "hidden_act": "gelu",
    },
    "llama, linear": {"model_type": "llama", "rope_parameters": ROPE},
    "llama 3.1": {"model_type": "llama", "rope_parameters": LLAMA3, "head_dim": 16},
    "mistral, window": {"model_type": "mistral", "sliding_window": 5},
    "qwen2": {"model_type": "qwen2"},
    "qwen2, window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3, biases": {"model_type": "qwen3", "head_dim": 8, "attention_bias": True},
}


def built(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = SMALL | MODELS[name]
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    loader: Any = AutoModelForCausalLM
    model = loader.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    model = built(name)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    alone = exported_llama.load(tmp_path)
    tokens = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
        torch.testing.assert_close(alone(tokens), expected, rtol=1e-4, atol=2e-5)
    # Without the mask, tokens with the number of the padding would be hidden.
    given = {"input_ids": tokens[:1], "attention_mask": torch.ones(1, 40, dtype=torch.int64)}
    model.generation_config.eos_token_id = None
    written = model.generate(**given, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(exported_llama.continue_greedily(alone, tokens[:1], 6), written)


@pytest.mark.parametrize("name", ["llama", "llama 3.1", "qwen3"])
def test_in_bf16_it_is_as_exact_as_transformers_at_far_positions(name: str, tmp_path: Path) -> None:
    """Both round their weights and activations alike, and neither the angles of the positions."""
    from transformers import AutoModelForCausalLM

    built(name).save_pretrained(tmp_path)
    exact = exported_llama.load(tmp_path)
    narrow = exported_llama.load(tmp_path).bfloat16()
    loader: Any = AutoModelForCausalLM
    theirs = loader.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    tokens = torch.randint(0, 50, (1, 2000), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = exact(tokens)[:, -100:]
        error = (narrow(tokens)[:, -100:].float() - expected).abs().mean()
        error_of_theirs = (theirs(input_ids=tokens, use_cache=False).logits[:, -100:].float() - expected).abs().mean()
    assert error < 1.2 * error_of_theirs


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gemma"},
        {"hidden_act": "swish2"},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
    ],
    ids=str,
)
def test_other_settings_are_left_to_transformers(change: dict[str, Any], tmp_path: Path) -> None:
    config = built("llama").config.to_dict()
    assert exported_llama.is_supported(config)
    assert not exported_llama.is_supported(config | change)
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match="are not in this file"):
        exported_llama.load(tmp_path)


def test_a_config_of_before_transformers_5_is_read() -> None:
    config = built("llama").config.to_dict()
    earlier = {name: value for name, value in config.items() if name != "rope_parameters"}
    earlier |= {"rope_theta": 500.0, "rope_scaling": LLAMA3 | {"rope_theta": None}}
    now = config | {"rope_parameters": LLAMA3}
    assert torch.equal(exported_llama.frequencies(earlier, 8), exported_llama.frequencies(now, 8))


def test_it_imports_torch_alone() -> None:
    tree = ast.parse(Path(str(exported_llama.__file__)).read_text())
    names = {node.names[0].name for node in ast.walk(tree) if isinstance(node, ast.Import)}
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} == {"json", "math", "torch"}
    assert modules == {"__future__", "collections.abc", "pathlib", "typing", "torch", "safetensors.torch"}

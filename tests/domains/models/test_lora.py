"""Adapters: what peft itself would make of the same model, only they are trained, and peft loads what is exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.domains.models import lora
from accel_train.domains.models.lora import LoraConfig, apply_lora
from tests.distributed.foreign_models import MODELS

peft = pytest.importorskip("peft")
# peft reads a property that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
TOKENS = torch.arange(12)[None] % 7


def llama(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return MODELS["llama"]().requires_grad_(True).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def trained_a_little(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("variant", ["lora", "dora", "rslora"])
def test_it_is_what_peft_makes(variant: Any) -> None:
    ours, theirs = llama(), llama()
    torch.manual_seed(1)
    notices = apply_lora(ours, LoraConfig(rank=4, alpha=6.0, variant=variant, targets=("q_proj", "v_proj")))
    torch.manual_seed(1)
    kind = {"use_dora": variant == "dora", "use_rslora": variant == "rslora", "target_modules": ["q_proj", "v_proj"]}
    whole = peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=6.0, **kind))
    assert torch.allclose(logits(ours), logits(llama()), atol=1e-6)
    trained_a_little(ours)
    trained_a_little(whole)
    assert torch.equal(logits(ours), logits(whole))
    assert not torch.allclose(logits(ours), logits(llama()), atol=1e-3)
    trained = {name for name, parameter in ours.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert notices[0].startswith(f"{variant} of rank 4 on 6 layers: ")


@pytest.mark.parametrize("variant", ["lora", "dora", "rslora"])
def test_peft_loads_what_is_exported_and_merged_is_the_same(variant: Any, tmp_path: Path) -> None:
    model = llama()
    apply_lora(model, LoraConfig(rank=2, variant=variant))
    trained_a_little(model)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    save_file(weights, checkpoint / "model.safetensors")
    (checkpoint / lora.CONFIG_FILE).write_text(json.dumps(lora.adapter_config(model, "some/base")))
    assert lora.export_adapter(checkpoint, tmp_path / "adapter") == len(weights)
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(loaded), logits(model))
    assert loaded.peft_config["default"].base_model_name_or_path == "some/base"
    torch.testing.assert_close(logits(loaded.merge_and_unload()), logits(model), rtol=1e-4, atol=1e-5)


def test_targets_by_group() -> None:
    model = llama()
    everything = lora.resolve_targets(model, ["all-linear"])
    assert everything == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert lora.resolve_targets(model, ["attention"]) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert lora.resolve_targets(model, ["layers.1.mlp.up_proj"]) == ["model.layers.1.mlp.up_proj"]
    # The MLP of GPT-2 has a c_proj as well, so the whole path is needed.
    assert "transformer.h.0.attn.c_proj" in lora.resolve_targets(MODELS["gpt"](), ["attention"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"alpha": 2.0}, r"lora\.alpha: lora\.rank is 0"),
        ({"targets": ("attention",)}, r"lora\.targets: lora\.rank is 0"),
        ({"rank": 2, "targets": ()}, "names no layer"),
    ],
)
def test_options_without_effect_are_refused(options: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        LoraConfig(**options)


def test_an_unknown_layer_is_named_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"'q_pro' is no linear layer of LlamaForCausalLM: did you mean 'q_proj'\?"):
        apply_lora(llama(), LoraConfig(rank=2, targets=("q_pro",)))
    assert apply_lora(llama(), LoraConfig()) == []


def test_a_checkpoint_without_an_adapter_is_refused(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="trained without LoRA"):
        lora.export_adapter(tmp_path, tmp_path / "out")

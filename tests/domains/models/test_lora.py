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
    apply_lora(ours, LoraConfig(rank=4, alpha=6.0, variant=variant, targets=("q_proj", "v_proj")))
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
    (notice,) = lora.describe_lora(ours, LoraConfig(rank=4, variant=variant))
    assert notice.startswith(f"{variant} of rank 4 on 6 layers: ")


@pytest.mark.parametrize("variant", ["lora", "dora", "rslora"])
def test_peft_loads_what_is_exported_and_merged_is_the_same(variant: Any, tmp_path: Path) -> None:
    model = llama()
    apply_lora(model, LoraConfig(rank=2, variant=variant))
    trained_a_little(model)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    adapter = lora.by_key_of_peft(weights)
    assert len(adapter) == sum(1 for p in model.parameters() if p.requires_grad)
    save_file(adapter, tmp_path / f"{lora.WEIGHTS_STEM}.safetensors")
    (tmp_path / lora.CONFIG_FILE).write_text(json.dumps(lora.adapter_config(model, "some/base")))
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path).eval()
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
    model = llama()
    apply_lora(model, LoraConfig())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert lora.describe_lora(model, LoraConfig()) == []

"""What FSDP2 shards by: the classes that a model has of those that it names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from torch import nn

from accel_train.config import UsageError
from accel_train.runtime.strategy import device_of_updates, name_wrapped_classes
from tests.distributed.foreign_models import MODELS


def machine(*names: str) -> Any:
    """What an Accelerator says under FSDP2, with Accelerate's own plugin."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=list(names) or None,
    )
    state = SimpleNamespace(fsdp_plugin=plugin)
    return SimpleNamespace(distributed_type=DistributedType.FSDP, num_processes=2, state=state)


@pytest.mark.parametrize(("offload", "expected"), [(True, "cpu"), (False, "cuda")])
def test_shards_in_host_memory_are_updated_there(offload: bool, expected: str) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=offload)
    accelerator = machine()
    accelerator.state.fsdp_plugin, accelerator.device = plugin, torch.device("cuda")
    assert device_of_updates(accelerator).type == expected


def sharded_classes(accelerator: Any, model: nn.Module) -> set[str]:
    """Classes of the modules that Accelerate would shard."""
    plugin = accelerator.state.fsdp_plugin
    plugin.set_auto_wrap_policy(model)
    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert policy is not None
    return {type(module).__name__ for module in model.modules() if policy(module)}


@pytest.mark.parametrize(("kind", "expected"), [("llama", "LlamaDecoderLayer"), ("sd3", "JointTransformerBlock")])
def test_a_model_that_has_what_it_names_is_left_alone(kind: Any, expected: str) -> None:
    model, accelerator = MODELS[kind](), machine()
    assert name_wrapped_classes(accelerator, model) == []
    assert sharded_classes(accelerator, model) == {expected}


def test_a_class_that_a_model_names_and_lacks_is_said_and_left_out() -> None:
    model, accelerator = MODELS["unet"](), machine()
    with pytest.raises(ValueError, match="Could not find the transformer layer class UpBlock2D"):
        sharded_classes(machine(), model)
    (notice,) = name_wrapped_classes(accelerator, model)
    present = ["BasicTransformerBlock", "CrossAttnUpBlock2D", "ResnetBlock2D"]
    assert notice.endswith(f"by {', '.join(present)}; it names UpBlock2D too, and has none of them")
    assert sharded_classes(accelerator, model) == set(present)


def test_a_module_around_two_models_is_sharded_by_the_classes_of_both() -> None:
    pair, accelerator = nn.ModuleDict({"text": MODELS["llama"](), "image": MODELS["sd3"]()}), machine()
    (notice,) = name_wrapped_classes(accelerator, pair)
    assert notice == "fsdp2: shards ModuleDict by the classes of its parts: JointTransformerBlock, LlamaDecoderLayer"
    assert sharded_classes(accelerator, pair) == {"JointTransformerBlock", "LlamaDecoderLayer"}


def test_a_class_of_the_launch_file_that_a_model_lacks_is_refused() -> None:
    message = (
        r"fsdp_transformer_layer_cls_to_wrap: MMDiTBlock: LlamaForCausalLM has no .* names LlamaDecoderLayer itself"
    )
    with pytest.raises(UsageError, match=message):
        name_wrapped_classes(machine("MMDiTBlock"), MODELS["llama"]())
    assert name_wrapped_classes(machine("LlamaMLP"), MODELS["llama"]()) == []

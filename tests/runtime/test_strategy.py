"""What FSDP2 shards by: the classes that a model has of those that it names."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy, fsdp2_prepare_model
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.runtime.strategy import (
    device_of_updates,
    embeddings_optional,
    name_wrapped_classes,
    refuse_unshardable,
)
from accel_train.runtime.threads import updates_on_host
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


@pytest.mark.parametrize("offload", ["cpu", "none"])
def test_updates_are_on_the_host_where_the_launch_or_the_optimizer_puts_them(offload: str) -> None:
    accelerator = machine()
    accelerator.device = torch.device("cuda")
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=offload == "cpu")
    assert updates_on_host(accelerator, "adamw") is (offload == "cpu")

    pytest.importorskip("deepspeed")
    accelerator.distributed_type = DistributedType.DEEPSPEED
    accelerator.state.deepspeed_plugin = DeepSpeedPlugin(zero_stage=2, offload_optimizer_device=offload)
    assert updates_on_host(accelerator, "adamw") is (offload == "cpu")

    accelerator.distributed_type, accelerator.num_processes = DistributedType.NO, 1
    assert not updates_on_host(accelerator, "adamw")
    assert updates_on_host(accelerator, "adamw_offload")


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
    assert notice.endswith(f"by {', '.join(present)}; it also names UpBlock2D, but has none of them")
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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x))


class Model(nn.Module):
    _no_split_modules: ClassVar = ["Block"]

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.extra = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.extra


class ModelThatNamesItsEmbeddings(Model):
    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


class ModelThatNamesItsInputAlone(Model):
    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class ModelWithAClassOfEmbeddings(Model):
    """Names the class around its embedding, as BERT does."""

    _no_split_modules: ClassVar = ["Block", "Embeddings"]

    def __init__(self) -> None:
        super().__init__()
        self.embedding: Any = Embeddings()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding.linear

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_a_class_around_an_embedding_is_left_out_and_said() -> None:
    accelerator, model = machine(), ModelWithAClassOfEmbeddings()
    tie(model.embedding.linear, model.head)
    (notice,) = name_wrapped_classes(accelerator, model)
    assert notice.endswith("by Block, not by Embeddings: its embedding is sharded apart from the blocks")
    assert sharded_classes(accelerator, model) == {"Block"}
    # A launch file that names it is obeyed, and then refused.
    named = machine("Block", "Embeddings")
    assert name_wrapped_classes(named, model) == []
    with pytest.raises(UsageError, match=r"head\.weight are one tensor, .* zero2_offload\.yaml accept it as it is"):
        refuse_unshardable(named, model)


class Outer(nn.Module):
    """A unit around two others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = Block(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.inner(x))


def tie(a: Any, b: Any) -> None:
    b.weight = a.weight


def variant(kind: str) -> Model:
    kinds = {
        "named tied head": ModelThatNamesItsEmbeddings,
        "named head tied further": ModelThatNamesItsEmbeddings,
        "embedding within a class": ModelWithAClassOfEmbeddings,
        "tied embedding within a class": ModelWithAClassOfEmbeddings,
        "half named tied head": ModelThatNamesItsInputAlone,
    }
    model: Any = kinds.get(kind, Model)()
    first, second = model.blocks
    if kind == "named head tied further":
        # As T5's encoder and decoder share an embedding with the head.
        model.third = nn.Linear(4, 4)
        tie(model.embedding, model.head)
        tie(model.embedding, model.third)
    elif kind == "tied embedding within a class":
        tie(model.embedding.linear, model.head)
    elif kind.endswith("tied head"):
        tie(model.embedding, model.head)
    elif kind == "blocks":
        tie(first.first, second.first)
    elif kind == "frozen blocks":
        tie(first.first, second.first)
        first.first.weight.requires_grad_(False)
    elif kind == "embedding and block":
        tie(model.embedding, first.second)
    elif kind == "block and head":
        tie(second.second, model.head)
    elif kind == "within a block":
        tie(first.first, first.second)
    elif kind == "module of two blocks":
        second.first = first.first
    elif kind == "one block twice":
        model.blocks[1] = first
    elif kind == "nested units":
        model._no_split_modules = ["Block", "Outer"]
        outer = model.blocks[1] = Outer()
        tie(outer.inner.first, outer.own)
    elif kind == "one unit around both":
        model._no_split_modules = ["Outer"]
        outer = Outer()
        model.blocks = nn.ModuleList([Outer(), outer])
        tie(outer.inner.first, outer.own)
    elif kind == "scalar":
        model.extra = nn.Parameter(torch.tensor(1.0))
    elif kind == "strides":
        model.head.weight = nn.Parameter(torch.randn(4, 4).t())
    return model


@pytest.fixture
def one_process() -> Generator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


REFUSED = {
    "blocks": "blocks.0.first.weight and blocks.1.first.weight are one tensor, and blocks.0 and blocks.1 are sharded",
    "frozen blocks": "blocks.0.first.weight and blocks.1.first.weight are one tensor",
    "embedding and block": (
        "embedding.weight and blocks.0.second.weight are one tensor, and everything outside of the blocks and blocks.0"
    ),
    "block and head": "head.weight and blocks.1.second.weight are one tensor",
    "module of two blocks": "blocks.0.first.weight and blocks.1.first.weight are one tensor",
    "nested units": "blocks.1.inner.first.weight and blocks.1.own.weight are one tensor, and blocks.1.inner and",
    "scalar": "extra has no dimension, but at least one is required",
    "strides": "head.weight of shape (4, 4) has the strides (1, 4), but contiguous memory is required",
}
TIED = ("blocks", "frozen blocks", "embedding and block", "block and head", "nested units")
"""Of these: torch looks for a weight of two units from 2.12 on, and trained with it before. We refuse it everywhere."""
TAKEN = (
    "plain",
    "tied head",
    "named tied head",
    "half named tied head",
    "named head tied further",
    "embedding within a class",
    "tied embedding within a class",
    "within a block",
    "one block twice",
    "one unit around both",
)


@pytest.mark.parametrize("kind", [*REFUSED, *TAKEN])
def test_fsdp2_is_given_exactly_the_parameters_that_it_takes(kind: str, one_process: Any) -> None:
    """The reference is Accelerate's preparation and a step of torch's FSDP2, in which some of them fail."""
    message = None
    try:
        model = variant(kind)
        name_wrapped_classes(machine(), model)
        refuse_unshardable(machine(), model)
    except UsageError as error:
        message = str(error)
    accelerator, model = machine(), variant(kind)
    name_wrapped_classes(accelerator, model)
    accelerator.torch_device_mesh, accelerator.device = one_process, torch.device("cpu")
    accelerator.parallelism_config = SimpleNamespace(fsdp_dim_names=["shard"])
    accelerator.mixed_precision, accelerator.is_main_process = "no", True
    accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
    if kind in REFUSED:
        assert message is not None
        assert message.startswith(f"fsdp2: {REFUSED[kind]}")
        known = kind not in TIED or torch.__version__ >= (2, 12)
        with pytest.raises((ValueError, TypeError, RuntimeError)) if known else nullcontext():
            with embeddings_optional(model):
                prepared = fsdp2_prepare_model(accelerator, model)
            prepared(torch.ones(2, 4))
    else:
        assert message is None
        with embeddings_optional(model):
            prepared = fsdp2_prepare_model(accelerator, model)
        prepared(torch.ones(2, 4)).sum().backward()


def test_classes_of_the_launch_file_are_named_where_they_part_a_tied_weight() -> None:
    model = variant("nested units")
    for names, remedy in {
        (): "Let _no_split_modules name a class that contains both, give each its own",
        ("Block", "Outer"): "Delete fsdp_transformer_layer_cls_to_wrap: Block, Outer in the launch file",
    }.items():
        with pytest.raises(UsageError, match=f"a tied weight must be in a single unit. {remedy}"):
            refuse_unshardable(machine(*names), model)


def test_the_other_strategies_take_any_parameter() -> None:
    accelerator: Any = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU, num_processes=2)
    for kind in REFUSED:
        refuse_unshardable(accelerator, variant(kind))

"""Name the strategy that distributes a model over the processes, and verify that ``prepare`` applied it."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import nn

from accel_train.config import UsageError
from accel_train.cores import cpu_name
from accel_train.runtime.distributed_options import DistributedConfig, verify_ddp

Strategy = Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
INSTRUCTION_LIMITS = ("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variables that limit the instructions used by MKL and oneDNN. Neither library reports which ones it uses."""
EMBEDDINGS = ("get_input_embeddings", "get_output_embeddings")
"""Methods by which Accelerate asks a model for the modules that FSDP2 shards apart from the rest."""


def strategy_of(accelerator: Accelerator) -> Strategy:
    """Return the strategy of the running Accelerator.

    A launch of one process with a DDP file is "single": Accelerate does not wrap its model.
    """
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        plugin: Any = accelerator.state.deepspeed_plugin
        stage = int(plugin.zero_stage)
        names: dict[int, Strategy] = {1: "zero1", 2: "zero2", 3: "zero3"}
        return names[stage]
    if kind == DistributedType.FSDP:
        return "fsdp2"
    if accelerator.num_processes == 1:
        return "single"
    return "ddp"


def device_of_updates(accelerator: Accelerator) -> torch.device:
    """Return the device of weights and state while the optimizer steps: the CPU if FSDP2 keeps its shards there."""
    if strategy_of(accelerator) == "fsdp2":
        # Imported late, because it takes a second that --help does not need.
        from torch.distributed.fsdp import CPUOffloadPolicy

        plugin: Any = accelerator.state.fsdp_plugin
        if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
            return torch.device("cpu")
    return accelerator.device


def layout_of(accelerator: Accelerator) -> dict[str, Any]:
    """Describe the machines and the sharding. A bit-exact continuation requires the same. Collective.

    A property that may differ between machines is one value if all processes agree, else a list of values by rank.
    """
    groups: dict[str, Any] = {}
    mesh: Any = getattr(accelerator, "parallelism_config", None)
    if mesh is not None and mesh.dp_replicate_size > 1:
        # HSDP: this many groups hold all shards each, and a second reduction sums their gradients.
        groups["replicas"] = mesh.dp_replicate_size
    return {
        "strategy": strategy_of(accelerator),
        "world_size": accelerator.num_processes,
        **groups,
        **_machines(accelerator),
        "torch": str(torch.__version__),
    }


def _machines(accelerator: Accelerator) -> dict[str, Any]:
    """Return the properties of each process's machine that may change the bits of a result. Collective."""
    device = accelerator.device.type
    cpu = _instructions()
    if device == "cuda":
        device = torch.cuda.get_device_name()
    else:
        # MKL also chooses its kernels by the CPU's model. With a GPU the host sums nothing with it.
        cpu = f"{cpu_name()}, {cpu}"
    # A CPU sums in as many parts as there are threads.
    mine = {"device": device, "threads": torch.get_num_threads(), "cpu": cpu}
    every = [mine]
    if accelerator.num_processes > 1:
        every = gather_object([mine])  # in a list: Accelerate joins the lists of all
    by_rank = {key: [each[key] for each in every] for key in mine}
    return {key: values if len({*values}) > 1 else values[0] for key, values in by_rank.items()}


def _instructions() -> str:
    """Return the instruction set that torch's kernels use, and the limits that the user set for its libraries."""
    limits = [f"{name}={os.environ[name]}" for name in INSTRUCTION_LIMITS if os.environ.get(name)]
    return ", ".join([torch.backends.cpu.get_cpu_capability(), *limits])


@contextmanager
def embeddings_optional(model: torch.nn.Module) -> Generator[None]:
    """Run ``accelerator.prepare`` in the body. Accelerate 1.15 asks a model for its embeddings to shard them apart.

    Models of transformers without any, such as those of images, raise ``NotImplementedError`` instead of returning
    None, and could not be sharded. Nor could those whose embeddings share a parameter with further modules, as T5 and
    BERT do: a shared one has to lie in one unit, so they are sharded with what lies outside of the blocks.
    """
    hidden: list[str] = []
    shared = _embeddings_shared_further(model)
    for name in EMBEDDINGS:
        if shared or _embedding_of(model, name) is None:
            # On the instance, so that deleting it uncovers the method of the class again.
            setattr(model, name, lambda: None)
            hidden.append(name)
    try:
        yield
    finally:
        for name in hidden:
            delattr(model, name)


def _embedding_of(model: nn.Module, name: str) -> Any:
    """Return the embedding that a model names, or None."""
    try:
        return getattr(model, name, lambda: None)()
    except NotImplementedError:
        return None


def _embeddings_shared_further(model: nn.Module) -> bool:
    """Return True if an embedding shares a parameter with a module that Accelerate 1.15 shards in another unit."""
    asked = [each for each in (_embedding_of(model, name) for name in EMBEDDINGS) if isinstance(each, nn.Module)]
    units = [{*each.modules()} for each in asked]
    if len({id(getattr(each, "weight", each)) for each in asked}) == 1:
        # Tied to each other, they are one unit.
        units = [set[nn.Module]().union(*units)]
    return any(_shares_a_parameter(model, unit) for unit in units)


def _shares_a_parameter(model: nn.Module, unit: set[nn.Module]) -> bool:
    """Return True if modules in ``unit`` have a parameter in common with modules outside of it."""
    inside = {id(parameter) for module in unit for parameter in module.parameters(recurse=False)}
    outside = (module for module in model.modules() if module not in unit)
    return any(id(parameter) in inside for module in outside for parameter in module.parameters(recurse=False))


def name_wrapped_classes(accelerator: Accelerator, model: torch.nn.Module) -> list[str]:
    """Let FSDP2 shard by the classes in the model, and return a notice of those that the model names and lacks.

    Without names in the launch file Accelerate reads only the ``_no_split_modules`` of the whole model, and fails at
    the first class that this size of it lacks, such as ``UpBlock2D`` in some UNets. So the classes named by any of its
    parts that exist are set on the model. Raises ``UsageError`` for a class of the launch file that the model lacks.
    """
    if strategy_of(accelerator) != "fsdp2":
        return []
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    plugin: Any = accelerator.state.fsdp_plugin
    # The other policies do not shard by class.
    if getattr(plugin.auto_wrap_policy, "func", plugin.auto_wrap_policy) is not transformer_auto_wrap_policy:
        return []
    name = type(model).__name__
    there = {type(module).__name__ for module in model.modules()}
    wanted = sorted({each for part in model.modules() for each in getattr(part, "_no_split_modules", None) or ()})
    around = _classes_around_embeddings(model, wanted)
    present = [each for each in wanted if each in there and each not in around]
    given = plugin.transformer_cls_names_to_wrap
    if given is not None:
        _refuse_lacking(given, there, name, present)
        return []
    absent = [each for each in wanted if each not in there]
    if not absent and set(present) == set(getattr(model, "_no_split_modules", None) or ()):
        return []
    setattr(model, "_no_split_modules", present)  # noqa: B010  a module's own __setattr__ is typed for tensors
    return [f"fsdp2: shards {name} by {_in_notice(present, absent, around)}"]


def _in_notice(present: Sequence[str], absent: Sequence[str], around: Sequence[str]) -> str:
    by = ", ".join(present)
    if around:
        return f"{by}, not by {', '.join(around)}: its embedding is sharded apart from the blocks"
    if not absent:
        return f"the classes of its parts: {by}"
    return f"{by}; it also names {', '.join(absent)}, but has none of them"


def _refuse_lacking(given: Sequence[str], there: set[str], name: str, present: Sequence[str]) -> None:
    lacking = [each for each in given if each not in there]
    if lacking:
        raise UsageError(
            f"fsdp_transformer_layer_cls_to_wrap: {', '.join(lacking)}: {name} has no module of that class; it "
            f"names {', '.join(present) or 'none'} itself. Correct the launch file, or delete the line"
        )


def _classes_around_embeddings(model: nn.Module, wanted: Sequence[str]) -> list[str]:
    """Return the ``wanted`` classes whose only module holds an embedding, as in BERT. Empty if no other would be left.

    Accelerate 1.15 shards such an embedding a second time, and the first step would fail.
    """
    asked = {_embedding_of(model, name) for name in EMBEDDINGS}
    count = Counter(type(module).__name__ for module in model.modules())
    inside = (module for module in model.modules() if module is not model and not asked.isdisjoint(module.modules()))
    found = {type(module).__name__ for module in inside}
    around = [name for name in wanted if name in found and count[name] == 1]
    if len(around) == len(wanted):
        return []
    return around


def refuse_unshardable(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Raise ``UsageError`` for a parameter that FSDP2 would refuse only during preparation or the first step.

    These are parameters without dimensions, not contiguous, or shared by two units. Before torch 2.13 a shared one
    was silently split into two. Any process may call it, after ``name_wrapped_classes``.
    """
    if strategy_of(accelerator) != "fsdp2":
        return
    unit_of: dict[str, str] = {}
    chosen = _units(accelerator, model)
    first: dict[int, str] = {}
    # Includes every name of a shared module or parameter. A module comes after the one that holds it.
    for name, module in model.named_modules(remove_duplicate=False):
        holder = name.rpartition(".")[0]
        unit_of[name] = chosen.get(id(module), unit_of.get(holder, ""))
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{name}.{leaf}".lstrip(".")
            _refuse_unshardable_parameter(full, parameter)
            other = first.setdefault(id(parameter), full)
            units = [unit_of[each.rpartition(".")[0]] for each in (other, full)]
            if units[0] != units[1]:
                raise UsageError(
                    f"fsdp2: {other} and {full} are one tensor, and {_in_words(units)} are sharded as units of their "
                    f"own: a tied weight must be in a single unit. {_remedy_of_tied(accelerator)}, give each its own, "
                    "or tie only what is outside of the blocks or in the same one; accelerate_configs/ddp.yaml and "
                    "zero2_offload.yaml accept it as it is"
                )


def _remedy_of_tied(accelerator: Accelerator) -> str:
    plugin: Any = accelerator.state.fsdp_plugin
    given = plugin.transformer_cls_names_to_wrap
    if given is None:
        return "Let _no_split_modules name a class that contains both"
    named = f"fsdp_transformer_layer_cls_to_wrap: {', '.join(given)}"
    return f"Delete {named} in the launch file, for the model's own blocks, or name a class there that contains both"


def _units(accelerator: Accelerator, model: nn.Module) -> dict[int, str]:
    """Map the ``id`` of each module that begins a unit to the unit's name, as Accelerate 1.15 forms units."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

    is_unit = fsdp2_prepare_auto_wrap_policy(accelerator.state.fsdp_plugin, model)
    names = {id(module): name for name, module in model.named_modules()}
    units = {id(each): names[id(each)] for each in model.modules() if each is not model and is_unit and is_unit(each)}
    own = _embeddings_apart(model, units)
    weights = {id(getattr(each, "weight", each)) for each in own}
    if len(weights) == 1:
        # Tied to each other, they are sharded together.
        return dict.fromkeys(map(id, own), names.get(id(own[0]), "")) | units
    return {id(each): names.get(id(each), "") for each in own} | units


def _embeddings_apart(model: nn.Module, units: Mapping[int, str]) -> list[nn.Module]:
    """Return the embeddings that Accelerate shards apart from the rest, without those within one of ``units``."""
    with embeddings_optional(model):
        asked = [_embedding_of(model, name) for name in EMBEDDINGS]
    taken = {id(inner) for module in model.modules() if id(module) in units for inner in module.modules()}
    return [each for each in asked if each is not None and id(each) not in taken]


def _in_words(units: list[str]) -> str:
    return " and ".join(unit or "everything outside of the blocks" for unit in units)


def _refuse_unshardable_parameter(name: str, parameter: nn.Parameter) -> None:
    if parameter.dim() == 0:
        raise UsageError(
            f"fsdp2: {name} has no dimension, but at least one is required to shard it; make it a vector with one "
            "element: nn.Parameter(torch.tensor([1.0]))"
        )
    if not parameter.is_contiguous():
        raise UsageError(
            f"fsdp2: {name} of shape {tuple(parameter.shape)} has the strides {parameter.stride()}, but contiguous "
            "memory is required; set its data to .contiguous() after building the model"
        )


def verify_prepared(accelerator: Accelerator, model: torch.nn.Module, max_grad_norm: float) -> str:
    """Check that ``prepare`` wrapped the model as the strategy requires, and return a line for the log.

    All ranks call it, right after ``prepare``. An FSDP2 wrap policy without a matching block, for example, shards only
    the root and gathers the whole model at once.
    """
    strategy = strategy_of(accelerator)
    if strategy == "ddp":
        assert isinstance(model, torch.nn.parallel.DistributedDataParallel), type(model)
        settings = verify_ddp(model, accelerator.ddp_handler)
        return f"ddp: {accelerator.num_processes} process(es) on {accelerator.device.type}, {settings}"
    if strategy == "fsdp2":
        return f"fsdp2: {_check_fsdp_units(accelerator, model)} sharded units: each block, and the rest"
    if strategy.startswith("zero"):
        engine: Any = model
        # Read back from the engine: ZeRO ignores `clip_grad_norm_`, so this value alone decides.
        clip = float(engine.gradient_clipping())
        if not math.isclose(clip, max_grad_norm):
            raise UsageError(f"gradient_clipping: ZeRO clips at {clip}, but the experiment asks for {max_grad_norm}")
        return f"{strategy}: clips at {clip:g} in its own step"
    return f"{strategy}: {accelerator.num_processes} process(es) on {accelerator.device.type}"


def _check_fsdp_units(accelerator: Accelerator, model: torch.nn.Module) -> int:
    from torch.distributed.fsdp import FSDPModule

    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    # The root is a unit by itself, so one means that no block was found.
    if len(units) < 2:
        blocks = getattr(model, "_no_split_modules", None)
        if not blocks:
            raise UsageError(
                f"fsdp_auto_wrap_policy: {type(model).__name__} does not name its blocks, so FSDP2 would gather all of "
                "it at once; at least one class is required. Set it on the class of the model, with the name of the "
                'repeated module: _no_split_modules = ["Block"]'
            )
        plugin: Any = accelerator.state.fsdp_plugin
        raise UsageError(
            f"fsdp_auto_wrap_policy: {plugin.auto_wrap_policy} wrapped {len(units)} module of {type(model).__name__}, "
            "so the whole model would be gathered at once; use TRANSFORMER_BASED_WRAP without naming classes "
            f"(the model names {blocks})"
        )
    return len(units)


def apply_fsdp2_prefetch(config: DistributedConfig, model: nn.Module) -> list[str]:
    """Let each sharded block gather the following ones while it computes. Returns a line for the log if asked for.

    Every process calls it, after ``prepare``. Blocks of one ``nn.ModuleList`` are assumed to run one after another.
    Raises ``UsageError`` if the model has fewer than two blocks.
    """
    ahead = config.fsdp2_prefetch
    if ahead is None:
        return []
    from torch.distributed.fsdp import FSDPModule

    inside = [module for module in model.modules() if module is not model]
    blocks: list[FSDPModule] = [module for module in inside if isinstance(module, FSDPModule)]
    if len(blocks) < 2:
        raise UsageError(
            f"distributed.fsdp2_prefetch: {ahead}: the model has {len(blocks)} block(s) that are sharded on their "
            "own, but at least 2 are required; leave it out, or name them in fsdp_transformer_layer_cls_to_wrap"
        )
    for chain in _chains(model):
        for place, block in enumerate(chain):
            # Nothing beyond the end of the chain: a module that is gathered and does not run next would later compute
            # with outdated weights, such as the EMA weights of an evaluation.
            following = chain[place + 1 : place + 1 + ahead]
            preceding = chain[max(0, place - ahead) : place]
            block.set_modules_to_forward_prefetch(following)
            # The backward pass runs through the blocks in reverse.
            block.set_modules_to_backward_prefetch(preceding[::-1])
    return [f"fsdp2: {ahead} of {len(blocks)} blocks are gathered ahead of their use"]


def _chains(model: nn.Module) -> list[list[Any]]:
    """Return lists of sharded blocks in the order of their forwards."""
    from torch.distributed.fsdp import FSDPModule

    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    return [[block for block in part if isinstance(block, FSDPModule)] for part in lists]

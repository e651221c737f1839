"""Read `fsdp_config` and `deepspeed_config` of a launch file, and check their keys against each other.

Keys for FSDP1 or for another ZeRO stage are refused here. Accelerate drops them silently.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accel_train.config import UsageError
from accel_train.launch_files.section import Section
from accel_train.strict_yaml import Document, YamlError, read_document

_REPLACED_BY_DEEPSPEED_FILE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
)
"""Keys refused by `DeepSpeedPlugin` beside a deepspeed_config_file, but only once the processes run."""
_NO_NVME = "optimizer and weights are offloaded to host memory only, from where checkpoints are written"
_REPLICATE = "parallelism_config_dp_replicate_size"
_SHARD = "parallelism_config_dp_shard_size"
_UNSUPPORTED_AXES = ("parallelism_config_tp_size", "parallelism_config_cp_size", "parallelism_config_sp_size")


@dataclass(frozen=True)
class FsdpSettings:
    """`fsdp_config` of version 2, and the mesh of `parallelism_config`."""

    reshard_after_forward: bool
    offload_params: bool
    auto_wrap_policy: str
    """TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP (Accelerate's default)."""
    transformer_layers: tuple[str, ...]
    """Class names to wrap. Empty stands for the model's `_no_split_modules`."""
    min_num_params: int
    """For SIZE_BASED_WRAP."""
    state_dict_type: str
    cpu_ram_efficient_loading: bool
    """True if the file asks for it. The launcher's own default is True as well."""
    activation_checkpointing: bool
    activation_checkpointing_offload: bool
    dp_replicate_size: int | None
    dp_shard_size: int | None
    """Both are None without a parallelism_config: all processes form one shard group."""


@dataclass(frozen=True)
class DeepSpeedSettings:
    """`deepspeed_config`, including the stage and offload of a deepspeed_config_file."""

    zero_stage: int
    offload_optimizer_device: str
    offload_param_device: str
    """Both devices are none or cpu."""
    gradient_accumulation_steps: int | None
    gradient_clipping: float | None
    """Both are None if the file omits them or has `auto`."""
    zero3_init: bool
    """True if the file asks for it, at any stage. Accelerate's own default is on for stage 3."""
    config_file: Path | None
    config_values: Mapping[str, object]
    """Content of the deepspeed_config_file. Empty without one."""


def read_fsdp(section: Section, mesh: Section, processes: int | None) -> FsdpSettings:
    """Read `fsdp_config` and `parallelism_config`. `processes` counts all machines and is None if not known yet."""
    from accelerate.utils.constants import FSDP2_STATE_DICT_TYPE, FSDP_AUTO_WRAP_POLICY

    _require_version_2(section)
    if section.values.get("fsdp_ignored_modules") is not None:
        raise section.refuse(
            "fsdp_ignored_modules", "absent: gradients of ignored modules are not averaged", "delete the line"
        )
    policy = section.choice("fsdp_auto_wrap_policy", FSDP_AUTO_WRAP_POLICY, "NO_WRAP")
    layers = _transformer_layers(section, str(policy))
    # Accelerate reads it under that policy alone, and drops it without a word under any other.
    if "fsdp_min_num_params" in section.values and policy != "SIZE_BASED_WRAP":
        raise section.refuse(
            "fsdp_min_num_params",
            "absent unless the policy is SIZE_BASED_WRAP",
            "delete the line, or set the policy",
        )
    checkpointing = section.boolean("fsdp_activation_checkpointing", False)
    offload_inputs = section.boolean("fsdp_activation_checkpointing_offload", False)
    if offload_inputs and not checkpointing:
        raise section.refuse(
            "fsdp_activation_checkpointing_offload",
            "false without fsdp_activation_checkpointing",
            "add `fsdp_activation_checkpointing: true`, or delete the line",
        )
    replicate, shard = _mesh_sizes(mesh, processes)
    return FsdpSettings(
        reshard_after_forward=_reshard(section),
        offload_params=section.boolean("fsdp_offload_params", False),
        auto_wrap_policy=str(policy),
        transformer_layers=layers,
        # Accelerate's own default.
        min_num_params=section.integer("fsdp_min_num_params", 10**8, low=1),
        state_dict_type=str(section.choice("fsdp_state_dict_type", FSDP2_STATE_DICT_TYPE, "SHARDED_STATE_DICT")),
        cpu_ram_efficient_loading=section.boolean("fsdp_cpu_ram_efficient_loading", False),
        activation_checkpointing=checkpointing,
        activation_checkpointing_offload=offload_inputs,
        dp_replicate_size=replicate,
        dp_shard_size=shard,
    )


def _require_version_2(section: Section) -> None:
    from accelerate.commands.to_fsdp2 import ARGUMENT_KEY_MAPPING

    # A file without the key gets FSDP1 from Accelerate.
    version = section.values.get("fsdp_version", 1)
    file = shlex.quote(str(section.file))
    convert = f"`accelerate to-fsdp2 --config_file {file} --overwrite`"
    # True would pass for 1.
    if isinstance(version, bool) or str(version) not in ("1", "2"):
        raise section.refuse("fsdp_version", "1 or 2, of which 2 is supported here", "write `fsdp_version: 2`")
    if str(version) == "1":
        raise section.refuse("fsdp_version", "2: FSDP1 is not supported here", f"convert the file with {convert}")
    # Keys that Accelerate's own converter renames or drops.
    of_version_1 = [key for key, replacement in ARGUMENT_KEY_MAPPING.items() if replacement != key]
    for key in section.values:
        if key in of_version_1:
            raise section.refuse(
                key,
                "absent with `fsdp_version: 2`, it is a key of FSDP1 and would be ignored",
                f"delete the line, or set `fsdp_version: 1` and convert the file with {convert}",
            )


def _reshard(section: Section) -> bool:
    key = "fsdp_reshard_after_forward"
    value = section.values.get(key, True)
    # Under FSDP1 the value is the name of a sharding strategy, such as SHARD_GRAD_OP.
    if isinstance(value, str) and value.isupper() and "_" in value:
        new = "true" if value in ("FULL_SHARD", "HYBRID_SHARD") else "false"
        raise section.refuse(key, "true or false with `fsdp_version: 2`", f"for {value} write `{key}: {new}`")
    return section.boolean(key, True)


def _transformer_layers(section: Section, policy: str) -> tuple[str, ...]:
    key = "fsdp_transformer_layer_cls_to_wrap"
    value = section.values.get(key)
    if value is None:
        return ()
    if policy != "TRANSFORMER_BASED_WRAP":
        raise section.refuse(
            key,
            f"absent unless the policy is TRANSFORMER_BASED_WRAP (here {policy})",
            "write `fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP`, or delete the line",
        )
    # Split as Accelerate does: "A, B" would name a class that begins with a space.
    names = value.split(",") if isinstance(value, str) else []
    if not names or not all(name.isidentifier() for name in names):
        raise section.refuse(
            key,
            "names of classes with commas and no spaces",
            "write `MMDiTBlock` or `A,B`; delete the line to take the model's own `_no_split_modules`",
        )
    return tuple(names)


def _mesh_sizes(mesh: Section, processes: int | None) -> tuple[int | None, int | None]:
    """Return `dp_replicate_size` and `dp_shard_size`. Refuses other axes, and a product other than `processes`."""
    if not mesh.values:
        return None, None
    _refuse_other_axes(mesh)
    replicate = mesh.integer(_REPLICATE, 1, low=1)
    # 1 is Accelerate's default, so a mesh without this key shards nothing.
    shard = mesh.integer(_SHARD, 1, low=1)
    if shard == 1:
        raise mesh.refuse(
            _SHARD,
            "2 or more: FSDP has nothing to shard over otherwise",
            "delete parallelism_config to shard over all processes, or use `distributed_type: MULTI_GPU`",
        )
    # torch would say it too, but on every process and after minutes in a queue.
    if processes is not None and replicate * shard != processes:
        key = _SHARD if _SHARD in mesh.values else _REPLICATE
        raise mesh.refuse(
            key,
            f"such that dp_replicate_size x dp_shard_size ({replicate} x {shard} = {replicate * shard}) is "
            f"num_processes ({processes})",
            "correct one of the three, or delete parallelism_config to shard over all processes",
        )
    return replicate, shard


def _refuse_other_axes(mesh: Section) -> None:
    for key in mesh.values:
        if not key.endswith("_size"):
            raise mesh.refuse(key, "absent: it acts with context or sequence parallelism only", "delete the line")
    sizes = {key: mesh.integer(key, 1, low=1) for key in _UNSUPPORTED_AXES}
    for key, size in sizes.items():
        if size > 1:
            raise mesh.refuse(
                key,
                "1: tensor, context and sequence parallelism are not supported",
                f"write 1, and {_SHARD} {size} times as large",
            )


def read_deepspeed(section: Section, top: Section, machines: int) -> DeepSpeedSettings:
    """Read `deepspeed_config` and the deepspeed_config_file in it."""
    found = _deepspeed_file(section, top)
    _check_multinode(section, machines)
    if found is None:
        settings = _settings_of_keys(section)
    else:
        file, document = found
        settings = _settings_of_file(section, file, document)
    for key in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
        if section.text(key) not in (None, "none"):
            raise section.refuse(key, f"absent or none: {_NO_NVME}", "delete the line")
    if section.boolean("zero3_save_16bit_model", False) and settings.zero_stage != 3:
        raise section.refuse(
            "zero3_save_16bit_model",
            f"false with stage {settings.zero_stage}: it acts in stage 3 only",
            "write false",
        )
    return settings


def _settings_of_keys(section: Section) -> DeepSpeedSettings:
    clipping = _number_or_none(section, "gradient_clipping")
    if clipping is not None and clipping <= 0:
        raise section.refuse(
            "gradient_clipping",
            "above 0: Accelerate drops 0 and DeepSpeed then clips at 1.0",
            "delete the line",
        )
    stage = _stage(section, "zero_stage", 2)
    offload_params = _device(section, "offload_param_device")
    _refuse_offload(section, "offload_param_device", offload_params, stage)
    return DeepSpeedSettings(
        zero_stage=stage,
        offload_optimizer_device=_device(section, "offload_optimizer_device"),
        offload_param_device=offload_params,
        gradient_accumulation_steps=_accumulation(section),
        gradient_clipping=clipping,
        zero3_init=section.boolean("zero3_init_flag", False),
        config_file=None,
        config_values={},
    )


def _settings_of_file(section: Section, file: Path, document: Document) -> DeepSpeedSettings:
    top = Section(file, "", document.values, document.places)
    content = document.values.get("zero_optimization")
    if not isinstance(content, dict):
        raise top.refuse("zero_optimization", 'a mapping such as {"stage": 2}', "add it")
    zero = Section(file, "zero_optimization", dict[str, object](content), document.places)
    offload_optimizer = _offload_section(zero, "offload_optimizer")
    offload_param = _offload_section(zero, "offload_param")
    # DeepSpeed's own default. Without such a file Accelerate's applies, which is 2.
    stage = _stage(zero, "stage", 0)
    offload_params = _device(offload_param, "device")
    _refuse_offload(zero, "offload_param", offload_params, stage)
    return DeepSpeedSettings(
        zero_stage=stage,
        offload_optimizer_device=_device(offload_optimizer, "device"),
        offload_param_device=offload_params,
        gradient_accumulation_steps=_accumulation(top),
        gradient_clipping=_number_or_none(top, "gradient_clipping"),
        zero3_init=section.boolean("zero3_init_flag", False),
        config_file=file,
        config_values=document.values,
    )


def _offload_section(zero: Section, name: str) -> Section:
    content = zero.values.get(name) or {}
    if not isinstance(content, dict):
        raise zero.refuse(name, 'a mapping such as {"device": "cpu"}', "correct it, or delete it")
    section = Section(zero.file, f"{zero.name}.{name}", dict[str, object](content), zero.places)
    if section.text("nvme_path") is not None:
        raise section.refuse("nvme_path", f"absent: {_NO_NVME}", "delete it")
    return section


def _accumulation(section: Section) -> int | None:
    key = "gradient_accumulation_steps"
    if section.values.get(key) in (None, "auto"):
        return None
    return section.integer(key, 1, low=1)


def _number_or_none(section: Section, key: str) -> float | None:
    """Return None for null and `auto`. Refuses true, because Python takes it for 1."""
    value = section.values.get(key)
    if isinstance(value, bool):
        raise section.refuse(key, "a number", "correct it, or delete it")
    # Text is `auto`, which DeepSpeed fills in from Accelerate.
    if isinstance(value, int | float):
        return float(value)
    return None


def _deepspeed_file(section: Section, top: Section) -> tuple[Path, Document] | None:
    """Read the deepspeed_config_file, if there is one. Refuses keys decided by the file."""
    name = section.text("deepspeed_config_file")
    # `none` is Accelerate's word for no file, in its environment variable.
    if name is None or name == "none":
        return None
    for key in _REPLACED_BY_DEEPSPEED_FILE:
        if key in section.values:
            raise section.refuse(
                key,
                "absent beside deepspeed_config_file, which decides it",
                "keep it in one of the two places",
            )
    if top.values.get("mixed_precision") is not None:
        raise top.refuse(
            "mixed_precision",
            "absent beside deepspeed_config_file",
            "delete the line; the experiment sets precision",
        )
    file = Path(name)
    try:
        return file, read_document(file)
    except YamlError as error:
        raise UsageError(f"{section.file}: `deepspeed_config.deepspeed_config_file: {name}`: {error}") from error


def _stage(section: Section, key: str, default: int) -> int:
    stage = section.integer(key, default, low=0, high=3)
    if stage == 0:
        raise section.refuse(
            key,
            "1, 2 or 3: stage 0 shards nothing",
            "write 2, or `distributed_type: MULTI_GPU` for plain DDP",
        )
    return stage


def _device(section: Section, key: str) -> str:
    if str(section.values.get(key)).lower() == "nvme":
        raise section.refuse(key, f"none or cpu: {_NO_NVME}", "write cpu, or `distributed_type: FSDP` on more GPUs")
    return str(section.choice(key, ("none", "cpu"), "none"))


def _refuse_offload(section: Section, key: str, device: str, stage: int) -> None:
    if device != "none" and stage != 3:
        raise section.refuse(
            key, f"none with stage {stage}: parameters are offloaded in stage 3 only", "write none, or stage 3"
        )


def _check_multinode(section: Section, machines: int) -> None:
    from accelerate.utils.constants import DEEPSPEED_MULTINODE_LAUNCHERS

    # Accelerate's default. Of its launchers only `standard` takes no host file.
    launcher = section.choice("deepspeed_multinode_launcher", DEEPSPEED_MULTINODE_LAUNCHERS, "pdsh")
    if machines > 1 and launcher != "standard" and section.text("deepspeed_hostfile") is None:
        raise section.refuse(
            "deepspeed_hostfile",
            f"a file naming the machines, because num_machines is {machines} and the launcher is {launcher}",
            "add it, or write `deepspeed_multinode_launcher: standard` and start it on every machine",
        )

"""Read `fsdp_config` and `parallelism_config` of a launch file, and check their keys against each other.

Keys for FSDP1 are refused here. Accelerate drops them silently.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from accel_train.launch_files.section import Section

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
    # Accelerate reads it under that policy only, and drops it silently under any other.
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
        raise section.refuse("fsdp_version", "1 or 2, of which only 2 is supported here", "write `fsdp_version: 2`")
    if str(version) == "1":
        raise section.refuse("fsdp_version", "2: FSDP1 is not supported here", f"convert the file with {convert}")
    # Keys that Accelerate's own converter renames or drops.
    of_version_1 = [key for key, replacement in ARGUMENT_KEY_MAPPING.items() if replacement != key]
    for key in section.values:
        if key in of_version_1:
            raise section.refuse(
                key,
                "absent with `fsdp_version: 2`, because it is a key of FSDP1 and would be ignored",
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
    # torch would refuse it too, but on every process and after minutes in a queue.
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

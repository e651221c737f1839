"""The strict reader of launch files: the bad-input rows, the presets, files of the real wizard, and its own
agreement with Accelerate: what the reader accepts, `accelerate launch` accepts as well."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from accel_train.config import UsageError
from accel_train.launch_files.machine_config import (
    MachineConfig,
    default_machine_config_path,
    read_machine_config,
)
from accel_train.launch_files.rendezvous import check_rendezvous
from accel_train.launch_files.requested import notices
from accel_train.launch_files.section import known_keys

PRESETS = sorted((Path(__file__).parents[2] / "accelerate_configs").glob("*.yaml"))
STRATEGIES = {
    "single_gpu": "single",
    "ddp": "ddp",
    "fsdp2": "fsdp2",
    "fsdp2_offload": "fsdp2",
    "zero2_offload": "zero2",
    "zero3_offload": "zero3",
    "multi_node": "ddp",
}

TOP = "compute_environment: LOCAL_MACHINE\n"
DDP = TOP + "distributed_type: MULTI_GPU\nnum_processes: 4\n"
FSDP = TOP + "distributed_type: FSDP\nnum_processes: 4\nfsdp_config:\n"
FSDP2 = FSDP + "  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
ZERO = TOP + "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config:\n"
MESH = FSDP2 + "parallelism_config:\n  parallelism_config_"
NODES = DDP + "num_machines: 2\nmain_process_ip: 10.0.0.1\nmain_process_port: 29500\n"

ROWS = [
    # (row of the bad-input matrix, file, what the error must say)
    ("I1", DDP + "num_proceses: 4\n", r":4:1: unknown key `num_proceses`.*did you mean 'num_processes'"),
    ("I1", DDP + "bananas: 4\n", r":4:1: unknown key `bananas`.*delete it"),
    ("I1", DDP + "zero_stage: 2\n", r"unknown key `zero_stage`.*belongs under deepspeed_config"),
    ("I1", DDP + "ipex_config:\n  ipex: false\n", r"unknown key `ipex_config`.*; newer .* dropped this section"),
    ("I1", DDP + "fsdp_confg: {}\n", r"did you mean 'fsdp_config'"),
    ("I1", ZERO + "  zero_stage: 2\n  mixed_precision: bf16\n", r"belongs at the top of the file"),
    ("I1", DDP + "<<: {debug: true}\n", r"unknown key `<<`"),
    ("I1", DDP + "fp16: true\n", r"`fp16: true`: must be absent.*mixed_precision"),
    ("I2", FSDP + "  fsdp_verison: 2\n", r":5:3: unknown key `fsdp_config.fsdp_verison`.*did you mean 'fsdp_version'"),
    ("I2", FSDP2 + "  reshard_after_foward: true\n", r"did you mean 'fsdp_reshard_after_forward'"),
    ("I2", FSDP2 + "  version: 2\n", r"given once, but `fsdp_version` is there"),
    ("I2", DDP + "dynamo_config:\n  dynamo_backand: inductor\n", r"did you mean 'dynamo_backend'"),
    ("I2", MESH + "dp_shrad_size: 4\n", r"did you mean 'parallelism_config_dp_shard_size'"),
    ("I2", FSDP2 + "parallelism_config:\n  dp_shard_size: 4\n", r"did you mean 'parallelism_config_dp_shard_size'"),
    ("I3", FSDP + "  fsdp_version: 3\n", r"`fsdp_config.fsdp_version: 3`: must be 1 or 2"),
    ("I3", FSDP + "  fsdp_version: two\n", r"`fsdp_config.fsdp_version: two`: must be 1 or 2"),
    ("I3", FSDP + "  fsdp_version: true\n", r"must be 1 or 2"),
    ("I3", FSDP + "  fsdp_version: 1\n", r"FSDP1 is not supported here; .*`accelerate to-fsdp2 --config_file"),
    ("I3", FSDP + "  fsdp_offload_params: false\n", r":4:1: `fsdp_config.fsdp_version` is missing.*accelerate to-fsd"),
    ("I3", TOP + "distributed_type: FSDP\nnum_processes: 4\n", r"fsdp_version` is missing"),
    ("I4", FSDP2 + "  fsdp_sharding_strategy: FULL_SHARD\n", r"a key of FSDP1.*accelerate to-fsdp2"),
    ("I4", FSDP2 + "  fsdp_use_orig_params: true\n", r"a key of FSDP1.*accelerate to-fsdp2"),
    ("I4", FSDP2 + "  fsdp_sync_module_states: true\n", r"a key of FSDP1.*accelerate to-fsdp2"),
    ("I4", FSDP2 + "  fsdp_backward_prefetch: BACKWARD_PRE\n", r"a key of FSDP1.*accelerate to-fsdp2"),
    ("I4", FSDP2 + "  forward_prefetch: false\n", r"fsdp_forward_prefetch: false`.*a key of FSDP1"),
    ("I5", FSDP2 + "  fsdp_reshard_after_forward: FULL_SHARD\n", r"true or false .*fsdp_reshard_after_forward: true`"),
    ("I5", FSDP2 + "  fsdp_reshard_after_forward: SHARD_GRAD_OP\n", r"write `fsdp_reshard_after_forward: false`"),
    ("I5", FSDP2 + "  fsdp_reshard_after_forward: 2\n", r"must be true or false"),
    ("I6", FSDP2 + "  fsdp_state_dict_type: LOCAL_STATE_DICT\n", r"one of SHARDED_STATE_DICT, FULL_STATE_DICT"),
    ("I7", DDP + "mixed_precision: bf32\n", r":4:1: `mixed_precision: bf32`: must be one of no, fp8, fp16, bf16; w"),
    ("I7", DDP + "mixed_precision: 16\n", r"must be one of no, fp8, fp16, bf16"),
    ("I7", DDP + "mixed_precision: true\n", r"must be one of no, fp8, fp16, bf16"),
    ("I9", DDP.replace("4", "two"), r"`num_processes: two`: must be a whole number, 1 or more"),
    ("I9", DDP.replace("4", "0"), r"`num_processes: 0`: must be a whole number, 1 or more"),
    ("I9", DDP.replace("4", "2.0"), r"`num_processes: 2.0`: must be a whole number"),
    ("I9", DDP.replace("4", "'4'"), r"must be a whole number.*without quotes"),
    ("I9", DDP.replace("4", "true"), r"`num_processes: true`: must be a whole number"),
    ("I9", DDP.replace("4", "1_000"), r"must be a whole number"),
    ("I9", DDP.replace(": 4", ":"), r"`num_processes: null`: must be a value"),
    ("I9", TOP + "distributed_type: 'NO'\nnum_processes: 2\n", r"1 with `distributed_type: NO`.*write MULTI_GPU"),
    ("I9", DDP + "num_machines: 3\nmain_process_ip: a\n", r"a multiple of num_machines \(3\).*write 3 or 6"),
    ("I10", DDP.replace("4", "-1"), r"`num_processes: -1`: must be a whole number, 1 or more"),
    ("I11", DDP.replace("MULTI_GPU", "FSDP2"), r"must be one of NO, .*write FSDP, with `fsdp_version: 2`"),
    ("I11", DDP.replace("MULTI_GPU", "fsdp"), r"did you mean 'FSDP'"),
    ("I11", DDP.replace("MULTI_GPU", "ZERO3"), r"write DEEPSPEED, with `zero_stage`"),
    ("I11", DDP.replace("MULTI_GPU", "DDP"), r"write MULTI_GPU"),
    ("I11", DDP.replace("MULTI_GPU", "MEGATRON_LM"), r"Megatron-LM is not supported; write FSDP"),
    ("I11", DDP.replace("MULTI_GPU", "XLA"), r"TPUs are not supported"),
    ("I11", DDP.replace("MULTI_GPU", "TP"), r"tensor parallelism is not supported; write FSDP"),
    ("I11", DDP.replace("LOCAL_MACHINE", "AMAZON_SAGEMAKER"), r"compute_environment: AMAZON.*LOCAL_MACHINE"),
    ("I12", TOP + "num_processes: 4\n", r"`distributed_type` is missing; it must be a value, one of NO, .*add the"),
    ("I12", TOP + "distributed_type:\n", r"`distributed_type: null`: must be a value"),
    ("I13", "", r"the file is empty"),
    ("I13", "# nothing\n", r"the file is empty"),
    ("I13", "- distributed_type: NO\n", r"the top is a list, not a mapping"),
    ("I13", FSDP.replace("fsdp_config:\n", "fsdp_config: 2\n"), r"`fsdp_config: 2`: must be a mapping"),
    ("I13", FSDP.replace("fsdp_config:\n", "fsdp_config: [a]\n"), r"`fsdp_config: \['a'\]`: must be a mapping"),
    ("I14", DDP + "debug: a: b\n", r":4:9: not valid YAML"),
    ("I14", FSDP + "\tfsdp_version: 2\n", r":5:1: a tab.*indent with spaces"),
    ("I15", DDP + "num_processes: 8\n", r":4:1: key `num_processes` is given twice, first at line 3"),
    ("I15", FSDP2 + "  fsdp_version: 1\n", r":7:3: key `fsdp_config.fsdp_version` is given twice"),
    ("I16", DDP + "debug: !!python/object/apply:os.system [true]\n", r":4:8: unsupported tag `!!python/object"),
    ("I17", ZERO + "  zero_stage: 5\n", r":5:3: `deepspeed_config.zero_stage: 5`: must be a whole number, 0 to 3"),
    ("I17", ZERO + "  zero_stag: 2\n", r"unknown key `deepspeed_config.zero_stag`.*did you mean 'zero_stage'"),
    ("I17", ZERO + "  zero_stage: 0\n", r"stage 0 shards nothing.*MULTI_GPU"),
    ("I17", ZERO + "  zero_stage: three\n", r"must be a whole number"),
    ("I17", ZERO + "  zero_stage: auto\n", r"must be a whole number"),
    ("I17", ZERO + "  offload_optimizer_device: gpu\n", r"must be one of none, cpu; "),
    ("I17", ZERO + "  zero_stage: 2\n  offload_param_device: cpu\n", r"offloaded in stage 3 only"),
    ("I17", ZERO + "  offload_optimizer_device: nvme\n", r":5:3: `.*_device: nvme`: must be none or cpu"),
    ("I17", ZERO + "  zero_stage: 3\n  offload_param_device: NVME\n", r"must be none or cpu: .*; write cpu, or"),
    ("I17", ZERO + "  offload_optimizer_nvme_path: /nvme\n", r"must be absent or none: .*; delete the line"),
    ("I17", ZERO + "  zero3_init_flag: maybe\n", r"must be true or false"),
    ("I17", ZERO + "  zero_stage: 1\n  zero3_save_16bit_model: true\n", r"false with stage 1"),
    ("I17", ZERO + "  gradient_clipping: 0\n", r"above 0: .*clips at 1.0; delete the line"),
    ("I17", ZERO + "  gradient_clipping: -1.0\n", r"above 0"),
    ("I17", ZERO + "  gradient_clipping: .nan\n", r"a finite number"),
    ("I17", ZERO + "  gradient_clipping: some\n", r"a finite number"),
    ("I17", ZERO + "  gradient_accumulation_steps: 0\n", r"a whole number, 1 or more"),
    ("I17", ZERO + "  gradient_accumulation_steps: 1.5\n", r"a whole number"),
    ("I17", ZERO + "  deepspeed_multinode_launcher: ssh\n", r"must be one of pdsh, standard"),
    ("I17", ZERO + "  deepspeed_config_file: /no/such.json\n", r"deepspeed_config_file: /no/such.json`.*no such file"),
    ("I17", ZERO + "  deepspeed_config_file: a.json\n  zero_stage: 2\n", r"zero_stage: 2`: must be absent"),
    ("I18", FSDP2 + "deepspeed_config:\n  zero_stage: 2\n", r"`deepspeed_config: {...}`: must be the only one"),
    ("I18", ZERO + "  zero_stage: 2\nfsdp_config:\n  fsdp_version: 2\n", r"must be the only one"),
    ("I18", DDP + "deepspeed_config:\n  zero_stage: 2\n", r"absent with `distributed_type: MULTI_GPU`, which ignores"),
    ("I18", DDP + "fsdp_config:\n  fsdp_version: 2\n", r"write `distributed_type: FSDP`, or delete fsdp_config"),
    ("I18", MESH.replace("FSDP", "MULTI_GPU", 1) + "dp_shard_size: 4\n", r"absent with"),
    ("I18", DDP + "parallelism_config:\n  parallelism_config_tp_size: 2\n", r"absent without .*FSDP"),
    ("I22", MESH + "dp_shard_size: 2\n", r"dp_replicate_size x dp_shard_size \(1 x 2 = 2\) is num_processes \(4\)"),
    ("I22", MESH + "dp_shard_size: 4\n  parallelism_config_dp_replicate_size: 2\n", r"\(2 x 4 = 8\)"),
    ("I22", MESH + "dp_replicate_size: 4\n", r"dp_shard_size` is missing; it must be 2 or more"),
    ("I22", MESH + "tp_size: 4\n", r"tp_size: 4`: must be 1: tensor.*dp_shard_size 4 times"),
    ("I22", MESH + "dp_shard_size: 0\n", r"a whole number, 1 or more"),
    ("I22", MESH + "dp_shard_size: four\n", r"a whole number"),
    ("I22", MESH + "cp_backend: torch\n", r"must be absent: it acts with context"),
    ("I23", NODES + "machine_rank: 2\n", r"`machine_rank: 2`: must be 0 to 1, because num_machines is 2"),
    ("I23", NODES + "machine_rank: -1\n", r"a whole number, 0 or more"),
    ("I23", DDP + "machine_rank: 1\n", r"must be 0 to 0"),
    ("I23", DDP + "num_machines: 2\n", r"`main_process_ip` is missing.*because num_machines is 2"),
    ("I23", DDP + "main_process_port: 65536\n", r"a whole number, 0 to 65535"),
    ("I23", DDP + "main_process_port: http\n", r"a whole number, 0 to 65535"),
    ("I23", NODES.replace("29500", "0"), r"a whole number, 1 to 65535"),
    ("I23", DDP + "main_process_ip: 10.0.0.1:29500\n", r"an IP address or a host name; .*main_process_port"),
    ("I23", DDP + "main_process_ip: http://a\n", r"an IP address or a host name"),
    ("I23", NODES.replace("machines: 2", "machines: 0"), r"`num_machines: 0`: must be a whole number, 1 or more"),
    # what Accelerate would ignore or trip over
    ("use_cpu", DDP + "use_cpu: true\n", r"false with `distributed_type: MULTI_GPU`.*accel-train rehearse"),
    ("use_cpu", DDP.replace("_GPU", "_CPU"), r"`use_cpu` is missing; it must be true with .*MULTI_CPU"),
    ("use_cpu", DDP + "use_cpu: maybe\n", r"must be true or false"),
    ("tpu", DDP + "tpu_name: mine\n", r"`tpu_name: mine`: must be empty, because it acts on TPUs only"),
    ("tpu", DDP + "main_training_function: train\n", r"must be `main`"),
    ("gpu_ids", DDP + "gpu_ids: 0\n", r"put it in quotes, as '0'"),
    ("gpu_ids", DDP + "gpu_ids: '0,1'\n", r"at least 4 ids"),
    ("gpu_ids", DDP + "gpu_ids: '0, 1, 2, 3'\n", r"commas and no spaces"),
    ("gpu_ids", DDP + "gpu_ids: '0,0,1,2'\n", r"different ids"),
    ("fp8", DDP + "fp8_config:\n  backend: TE\n", r"absent without `mixed_precision: fp8`"),
    ("fp8", DDP + "mixed_precision: fp8\nfp8_config:\n  bakend: TE\n", r"did you mean 'fp8_backend'"),
    ("dynamo", DDP + "dynamo_config:\n  dynamo_backend: inductr\n", r"did you mean 'INDUCTOR'"),
    (
        "dynamo",
        DDP + "dynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_mode: fast\n",
        r"one of default, reduce-overhead",
    ),
    ("dynamo", DDP + "dynamo_config: {dynamo_backend: EAGER, dynamo_use_dynamic: 2}\n", r"true or false"),
    ("dynamo", DDP + "dynamo_config:\n  mode: default\n", r"`dynamo_config.dynamo_mode: default`: must be absent"),
    ("network", DDP + "same_network: banana\n", r"`same_network: banana`: must be true or false"),
    ("fsdp", FSDP2 + "  fsdp_offload_params: maybe\n", r"true or false"),
    ("fsdp", FSDP2 + "  fsdp_offload_params:\n", r"`fsdp_config.fsdp_offload_params: null`: must be a value"),
    ("fsdp", FSDP2 + "  fsdp_transformer_layer_cls_to_wrap: 'A, B'\n", r"commas and no spaces"),
    ("fsdp", FSDP2 + "  fsdp_transformer_layer_cls_to_wrap: ''\n", r"delete the line to take the model's own"),
    ("fsdp", FSDP2 + "  fsdp_transformer_layer_cls_to_wrap: [A]\n", r"a single value, not a list"),
    ("fsdp", FSDP2 + "  fsdp_min_num_params: 1000\n", r"absent unless the policy is SIZE_BASED_WRAP"),
    ("fsdp", FSDP2.replace("TRANSFORMER", "SIZE") + "  fsdp_min_num_params: 0\n", r"1 or more"),
    ("fsdp", FSDP2.replace("TRANSFORMER", "LAYER"), r"one of TRANSFORMER_BASED_WRAP"),
    ("fsdp", FSDP + "  fsdp_version: 2\n  transformer_layer_cls_to_wrap: A\n", r"BASED_WRAP \(here NO_WRAP\)"),
    ("fsdp", FSDP2 + "  fsdp_activation_checkpointing_offload: true\n", r"false without fsdp_activation_checkpointing"),
    ("fsdp", FSDP2 + "  fsdp_ignored_modules: norm.*\n", r"gradients of ignored modules are not averaged"),
    ("nodes", ZERO + "  zero_stage: 2\nnum_machines: 2\n", r"deepspeed_hostfile` is missing.*launcher is pdsh"),
]  # fmt: skip


def write(folder: Path, content: str | dict[str, Any], name: str = "machine.yaml") -> Path:
    file = folder / name
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return file


def accelerate_accepts(file: Path) -> argparse.Namespace:
    """As `accelerate launch --config_file FILE script.py` reads it, before it starts anything."""
    return _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(file), "a.py"]))[0]


@pytest.mark.parametrize(("row", "text", "message"), ROWS, ids=[f"{row}-{i}" for i, (row, *_) in enumerate(ROWS)])
def test_bad_input(tmp_path: Path, row: str, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(UsageError, match=message) as caught:
        read_machine_config(file)
    assert str(caught.value).startswith(str(file)), "every error names the file"
    assert ";" in str(caught.value), "every error says what to do"


def test_every_row_of_the_matrix_is_here() -> None:
    rows = {row for row, *_ in ROWS}
    # I8 is accepted, I19 to I21 compare with the machine: runtime.accelerator.
    assert {f"I{n}" for n in (*range(1, 8), *range(9, 19), 22, 23)} <= rows


@pytest.mark.parametrize("written", ["no", "'no'", "No", "NO", "false", "False"])
def test_i8_mixed_precision_no_is_normalised(tmp_path: Path, written: str) -> None:
    assert read_machine_config(write(tmp_path, DDP + f"mixed_precision: {written}\n")).mixed_precision == "no"


@pytest.mark.parametrize(("written", "value"), [("bf16", "bf16"), ("FP16", "fp16"), ("fp8", "fp8"), ("null", None)])
def test_mixed_precision(tmp_path: Path, written: str, value: str | None) -> None:
    assert read_machine_config(write(tmp_path, DDP + f"mixed_precision: {written}\n")).mixed_precision == value


@pytest.mark.parametrize("content", [DDP.encode("utf-16"), b"a: \xff\n", DDP.encode() + b"#" * 10_000_000])
def test_i43_encodings_and_size(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.yaml").write_bytes(content)
    with pytest.raises(UsageError, match=r"UTF-8|larger than"):
        read_machine_config(tmp_path / "a.yaml")
    with pytest.raises(UsageError, match="no such file"):
        read_machine_config(tmp_path / "missing.yaml")


def test_i43_bom_crlf_and_json(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbf" + DDP.replace("\n", "\r\n").encode())
    assert read_machine_config(tmp_path / "a.yaml").num_processes == 4
    file = write(tmp_path, json.dumps(yaml.safe_load(FSDP2), indent=2), "a.json")
    assert read_machine_config(file).strategy == "fsdp2"
    accelerate_accepts(file)


def test_number_of_presets() -> None:
    assert {file.stem for file in PRESETS} == set(STRATEGIES)


@pytest.mark.parametrize("file", PRESETS, ids=lambda file: file.stem)
def test_presets(file: Path) -> None:
    machine = read_machine_config(file)
    assert machine.strategy == STRATEGIES[file.stem]
    assert notices(machine, {}) == []
    arguments = accelerate_accepts(file)
    assert arguments.num_processes == machine.num_processes
    assert arguments.num_machines == machine.num_machines
    text = file.read_text()
    head = text[: text.index("compute_environment")]
    assert all(line.startswith("#") for line in head.splitlines())
    assert "# When:" in head
    assert "# Cost:" in head
    assert f"accelerate launch --config_file accelerate_configs/{file.name} " in head
    assert machine.num_machines == 1 or "--machine_rank 1" in head


@pytest.mark.parametrize("file", PRESETS, ids=lambda file: file.stem)
def test_presets_say_nothing_about_the_experiment(file: Path) -> None:
    machine = read_machine_config(file)
    assert machine.mixed_precision is None
    assert machine.dynamo.backend == "no"
    if machine.deepspeed is not None:
        assert machine.deepspeed.gradient_clipping is None
        assert machine.deepspeed.gradient_accumulation_steps is None
    if machine.fsdp is not None:
        assert machine.fsdp.auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
        assert machine.fsdp.transformer_layers == ()
        assert not machine.fsdp.activation_checkpointing


def test_no_class_named_means_the_models_no_split_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the FSDP2 presets rely on, in Accelerate's own plugin."""
    import torch
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

    class Block(torch.nn.Linear):
        pass

    class Model(torch.nn.Module):
        _no_split_modules = ("Block",)

        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block(2, 2), torch.nn.Linear(2, 2)

    for name in [name for name in os.environ if name.startswith("FSDP_")]:
        monkeypatch.delenv(name)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    model = Model()
    plugin.set_auto_wrap_policy(model)
    wrap = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert wrap is not None
    assert [name for name, module in model.named_children() if wrap(module)] == ["block"]


def test_settings_are_read(tmp_path: Path) -> None:
    machine = read_machine_config(
        write(
            tmp_path,
            MESH.replace("parallelism_config:", "  reshard_after_forward: no\n  fsdp_offload_params: on\n"
            "  fsdp_transformer_layer_cls_to_wrap: A,B\n  fsdp_state_dict_type: FULL_STATE_DICT\n"
            "  fsdp_activation_checkpointing: true\nparallelism_config:")
            + "dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 2\n",
        )
    )  # fmt: skip
    assert machine.fsdp is not None
    assert not machine.fsdp.reshard_after_forward
    assert machine.fsdp.offload_params
    assert machine.fsdp.transformer_layers == ("A", "B")
    assert machine.fsdp.state_dict_type == "FULL_STATE_DICT"
    assert machine.fsdp.activation_checkpointing
    assert (machine.fsdp.dp_replicate_size, machine.fsdp.dp_shard_size) == (2, 2)

    machine = read_machine_config(
        write(
            tmp_path,
            ZERO + "  zero_stage: 3\n  offload_optimizer_device: none\n"
            "  offload_param_device: CPU\n  gradient_clipping: 1\n  gradient_accumulation_steps: auto\n"
            "  zero3_init_flag: 'false'\n  zero3_save_16bit_model: true\n",
        )
    )
    assert machine.deepspeed is not None
    assert machine.deepspeed.offload_param_device == "cpu"
    assert machine.deepspeed.gradient_clipping == 1.0
    assert machine.deepspeed.gradient_accumulation_steps is None

    machine = read_machine_config(
        write(tmp_path, NODES + "machine_rank: 1\ngpu_ids: '2,3'\ndynamo_backend: INDUCTOR\ndebug: yes\n")
    )
    assert (machine.machine_rank, machine.gpu_ids, machine.debug) == (1, ("2", "3"), True)
    assert (machine.dynamo.backend, machine.dynamo.mode) == ("INDUCTOR", "default")
    assert (machine.main_process_ip, machine.main_process_port) == ("10.0.0.1", 29500)


def test_zero_stage_2_is_the_default_as_in_accelerate(tmp_path: Path) -> None:
    assert read_machine_config(write(tmp_path, ZERO + "  offload_optimizer_device: cpu\n")).strategy == "zero2"


def test_deepspeed_config_file(tmp_path: Path) -> None:
    values = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "gradient_clipping": 0.5,
        "train_micro_batch_size_per_gpu": "auto",
    }
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(values))
    machine = read_machine_config(write(tmp_path, ZERO + f"  deepspeed_config_file: {file}\n"))
    assert machine.strategy == "zero3"
    assert machine.deepspeed is not None
    assert machine.deepspeed.offload_param_device == "cpu"
    assert machine.deepspeed.gradient_clipping == 0.5
    assert machine.deepspeed.config_values == values
    precise = write(tmp_path, "mixed_precision: bf16\n" + ZERO + f"  deepspeed_config_file: {file}\n")
    with pytest.raises(UsageError, match="mixed_precision: bf16`: must be absent when deepspeed_config_file is given"):
        read_machine_config(precise)
    for bad, message in [
        ({}, "zero_optimization` is missing"),
        ({"zero_optimization": {"stage": 0}}, r"zero_optimization.stage: 0`: must be 1, 2 or 3"),
        ({"zero_optimization": {"stage": 7}}, r"0 to 3"),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            r"zero_optimization.offload_param: {\.\.\.}`: must be none with stage 2.*stage 3 only",
        ),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}, "a mapping such as"),
        ({"zero_optimization": {"stage": 2}, "gradient_clipping": True}, "gradient_clipping: true`: must be a number"),
    ]:
        file.write_text(json.dumps(bad))
        with pytest.raises(UsageError, match=message):
            read_machine_config(write(tmp_path, ZERO + f"  deepspeed_config_file: {file}\n"))


def test_a_deepspeed_file_in_yaml_is_pointed_into(tmp_path: Path) -> None:
    file = tmp_path / "ds.yaml"
    file.write_text("zero_optimization:\n  stage: 2\n  offload_optimizer: {device: disk}\n")
    with pytest.raises(UsageError, match=r"ds\.yaml:3:23: `zero_optimization\.offload_optimizer\.device: disk`"):
        read_machine_config(write(tmp_path, ZERO + f"  deepspeed_config_file: {file}\n"))


def test_number_of_processes_from_the_command_line(tmp_path: Path) -> None:
    """`accelerate launch --num_processes N` overrides the file: products are checked with what counts."""
    file = write(tmp_path, MESH + "dp_shard_size: 4\n")
    assert read_machine_config(file, num_processes=4).num_processes == 4
    with pytest.raises(UsageError, match=r"num_processes \(2\)"):
        read_machine_config(file, num_processes=2)
    without = write(tmp_path, TOP + "distributed_type: MULTI_GPU\n")
    assert read_machine_config(without).num_processes is None
    assert read_machine_config(without, num_processes=3).num_processes == 3
    with pytest.raises(UsageError, match="a multiple of num_machines"):
        read_machine_config(write(tmp_path, NODES), num_processes=3)


def test_what_the_launcher_ignores_is_noted(tmp_path: Path) -> None:
    file = write(tmp_path, NODES + "rdzv_backend: c10d\nenable_cpu_affinity: true\n")
    machine = read_machine_config(file)
    rdzv, affinity = notices(machine, {})
    assert "--rdzv_backend c10d" in rdzv
    assert "--enable_cpu_affinity" in affinity
    assert notices(machine, {}, {"rdzv_backend": "c10d", "enable_cpu_affinity": True}) == []
    arguments = accelerate_accepts(file)
    assert arguments.rdzv_backend == "static", "Accelerate obeys the file now: drop the note"
    assert not arguments.enable_cpu_affinity, "Accelerate obeys the file now: drop the note"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (ZERO + "  zero3_init_flag: true\n", "zero3_init_flag: true is off here"),
        (ZERO + "  zero_stage: 3\n  zero3_init_flag: true\n", "zero3_init_flag: true is off here"),
        (ZERO + "  zero_stage: 3\n", None),
        (FSDP2 + "  fsdp_cpu_ram_efficient_loading: true\n", "fsdp_cpu_ram_efficient_loading: true is off here"),
        (FSDP2, None),
    ],
)
def test_what_the_recipe_does_not_follow_is_noted(asked: str, said: str | None, tmp_path: Path) -> None:
    found = notices(read_machine_config(write(tmp_path, asked)), {})
    assert [line.split(":")[0] + ": true is off here" for line in found] == ([said] if said else [])


def test_default_path_is_accelerates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_accelerate() -> Path:
        """A fresh copy of the module, which computes the path when it is imported."""
        name = "accelerate.commands.config.config_args"
        spec = importlib.util.spec_from_file_location(f"{name}_fresh", sys.modules[name].__file__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return Path(module.default_config_file)

    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for variables in ({}, {"XDG_CACHE_HOME": str(tmp_path / "xdg")}, {"HF_HOME": "~/hf"}):
        for key, value in variables.items():
            monkeypatch.setenv(key, value)
        path = of_accelerate()
        assert default_machine_config_path() is None
        path.parent.mkdir(parents=True)
        path.with_suffix(".json").write_text("{}")
        assert default_machine_config_path() == (path if of_accelerate().is_file() else None)
        path.write_text(DDP)
        assert default_machine_config_path() == path == of_accelerate()


def test_rendezvous(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        port = held.getsockname()[1]
        busy = NODES.replace("29500", str(port)).replace("10.0.0.1", "127.0.0.1")
        with pytest.raises(UsageError, match=rf"`main_process_port: {port}`: must be a free port.*cannot be bound"):
            check_rendezvous(read_machine_config(write(tmp_path, busy)))
        check_rendezvous(read_machine_config(write(tmp_path, busy + "machine_rank: 1\n")))
    check_rendezvous(read_machine_config(write(tmp_path, busy)))
    check_rendezvous(read_machine_config(write(tmp_path, DDP)))
    preset = next(file for file in PRESETS if file.stem == "multi_node")
    machine = read_machine_config(preset)
    with pytest.raises(UsageError, match=r"main_process_ip: first-machine.invalid`: must be the address"):
        check_rendezvous(machine)
    # Replaced by a flag.
    with pytest.raises(UsageError, match=r"main_process_ip: other.invalid`: must be the address"):
        check_rendezvous(dataclasses.replace(machine, main_process_ip="other.invalid"))


def test_one_gpu_id_is_too_few_for_several_gpus_only(tmp_path: Path) -> None:
    """As Accelerate has it, which does not read them for processes on CPUs."""
    one = "num_machines: 1\nnum_processes: 1\ngpu_ids: '0'\ndistributed_type: "
    assert read_machine_config(write(tmp_path, one + "MULTI_CPU\nuse_cpu: true\n")).gpu_ids == ("0",)
    with pytest.raises(UsageError, match="at least 2 ids"):
        read_machine_config(write(tmp_path, one + "MULTI_GPU\n"))


def test_reading_imports_no_accelerate_before_it_is_needed() -> None:
    code = "import sys, accel_train.launch_files.machine_config; assert not {'torch', 'accelerate'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_known_keys_come_from_accelerate() -> None:
    """Every flag group of the launcher was found, and holds what this reader interprets."""
    keys = known_keys()
    assert "num_processes" in keys[""]
    assert "fsdp_version" in keys["fsdp_config"]
    assert "zero_stage" in keys["deepspeed_config"]
    assert "parallelism_config_dp_shard_size" in keys["parallelism_config"]
    assert "dynamo_backend" in keys["dynamo_config"]
    assert "mpirun_hostfile" in keys["mpirun_config"]
    assert "fp8_backend" in keys["fp8_config"]


# --- files of the wizard -------------------------------------------------------------------------------------

GPUS = {"Which type of machine": "multi-GPU"}
FSDP_ANSWERS = GPUS | {
    "use FullyShardedDataParallel": "yes",
    "auto wrap policy": "TRANSFORMER_BASED_WRAP",
    "_no_split_modules": "yes",
    "How many GPU": "2",
}
ZERO_ANSWERS = GPUS | {"use DeepSpeed?": "yes", "How many GPU": "2"}
TWO_MACHINES = {
    "How many different machines": "2",
    "rank of this machine": 1,
    "IP address": "10.0.0.1",
    "What is the port": "29500",
}
WIZARD: dict[str, tuple[dict[str, Any], str]] = {
    "defaults": ({"Which type of machine": "No distributed training"}, "single"),
    "one CPU": ({"Which type of machine": "No distributed training", "on CPU only": "yes"}, "single"),
    "two GPUs": (GPUS | {"How many GPU": "2"}, "ddp"),
    "some GPUs": (GPUS | {"How many GPU": "2", "What GPU(s)": "1,3", "numa": "yes"}, "ddp"),
    "NPUs": ({"Which type of machine": "multi-NPU", "How many NPU": "2"}, "ddp"),
    "CPUs": ({"Which type of machine": "multi-CPU", "How many processes": "2"}, "ddp"),
    "mpirun": (
        {"Which type of machine": "multi-CPU", "How many processes": "2", "launch mpirun": "yes"},
        "ddp",
    ),
    "two machines": (GPUS | TWO_MACHINES | {"How many GPU": "4"}, "ddp"),
    "cloud": (
        GPUS | TWO_MACHINES | {"How many GPU": "4", "same local network": "no", "rendezvous": "c10d"},
        "ddp",
    ),
    "bf16": (GPUS | {"How many GPU": "2", "mixed precision": "bf16"}, "ddp"),
    "compile": (GPUS | {"How many GPU": "2", "torch dynamo": "yes", "customize": "yes"}, "ddp"),
    "FSDP2": (FSDP_ANSWERS, "fsdp2"),
    "FSDP2 offload": (FSDP_ANSWERS | {"offload parameters": "yes", "state dict": "FULL_STATE_DICT"}, "fsdp2"),
    "FSDP2 by name": (
        FSDP_ANSWERS | {"_no_split_modules": "no", "comma-separated list of tr": "A,B"},
        "fsdp2",
    ),
    "FSDP2 by size": (
        GPUS | {"use Fully": "yes", "auto wrap policy": "SIZE_BASED_WRAP", "How many GPU": "2"},
        "fsdp2",
    ),
    "HSDP": (
        FSDP_ANSWERS | {"How many GPU": "4", "parallelism config": "yes", "replicate size": "2", "shard size": "2"},
        "fsdp2",
    ),
    "FSDP2 on two machines": (FSDP_ANSWERS | TWO_MACHINES, "fsdp2"),
    "ZeRO-1": (ZERO_ANSWERS | {"ZeRO optimization stage": 1}, "zero1"),
    "ZeRO-2": (ZERO_ANSWERS | {"gradient clipping?": "yes"}, "zero2"),
    "ZeRO-2 offload": (ZERO_ANSWERS | {"offload optimizer": "cpu"}, "zero2"),
    "ZeRO-3": (ZERO_ANSWERS | {"ZeRO optimization stage": 3, "16-bit": "yes"}, "zero3"),
    "ZeRO-3 offload": (
        ZERO_ANSWERS | {"ZeRO optimization stage": 3, "offload optimizer": "cpu", "offload parameters": "cpu"},
        "zero3",
    ),
    "ZeRO on one GPU": (
        {"Which type of machine": "No distributed training", "use DeepSpeed?": "yes"},
        "zero2",
    ),
    "ZeRO on two machines": (
        ZERO_ANSWERS | TWO_MACHINES | {"Which Type of launcher": "standard"},
        "zero2",
    ),
    "ZeRO by pdsh": (
        ZERO_ANSWERS | TWO_MACHINES | {"specify the location of hostfile": "hosts"},
        "zero2",
    ),
    "ZeRO from a file": (ZERO_ANSWERS | {"json file to": "yes", "path to the json": "ds.json"}, "zero2"),
}


def run_wizard(monkeypatch: pytest.MonkeyPatch, file: Path, answers: dict[str, Any]) -> None:
    """`accelerate config --config_file FILE`, with the keyboard replaced: unanswered questions take the default."""
    from accelerate.commands.config import config_utils
    from accelerate.commands.config.config import config_command

    unused = set(answers)

    def answer(prompt: str) -> Any:
        for part, value in answers.items():
            if part in prompt:
                unused.discard(part)
                return value
        return None

    class Menu:
        def __init__(self, prompt: str, choices: list[Any]) -> None:
            self.prompt, self.choices = prompt, choices

        def run(self, default_choice: int = 0) -> int:
            value = answer(self.prompt)
            return default_choice if value is None else self.choices.index(value)

    monkeypatch.setattr(config_utils, "BulletMenu", Menu)
    monkeypatch.setattr("builtins.input", lambda prompt: answer(prompt) or "")
    config_command(argparse.Namespace(config_file=str(file)))
    assert not unused, f"the wizard never asked: {unused}"


@pytest.mark.parametrize("suffix", ["yaml", "json"])
@pytest.mark.parametrize("name", WIZARD)
def test_files_of_the_wizard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, suffix: str) -> None:
    answers, strategy = WIZARD[name]
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    file = tmp_path / f"wizard.{suffix}"
    run_wizard(monkeypatch, file, answers)
    machine = read_machine_config(file)
    assert machine.strategy == strategy
    of_accelerate = load_config_from_file(str(file))
    assert machine.num_processes == of_accelerate.num_processes
    assert machine.num_machines == of_accelerate.num_machines
    assert machine.distributed_type == of_accelerate.distributed_type.value
    assert machine.mixed_precision == of_accelerate.mixed_precision
    assert machine.use_cpu == of_accelerate.use_cpu
    accelerate_accepts(file)


def test_wizard_files_of_fsdp1_are_refused_and_their_conversion_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands.to_fsdp2 import to_fsdp2_command, to_fsdp2_command_parser

    file = tmp_path / "of the wizard.yaml"
    run_wizard(monkeypatch, file, FSDP_ANSWERS | {"FSDP version": 1})
    with pytest.raises(UsageError, match=rf"accelerate to-fsdp2 --config_file '{file}' --overwrite"):
        read_machine_config(file)
    to_fsdp2_command(to_fsdp2_command_parser().parse_args(["--config_file", str(file), "--overwrite"]))
    machine = read_machine_config(file)
    assert machine.fsdp is not None
    assert machine.fsdp.reshard_after_forward


def test_the_default_file_of_accelerate(tmp_path: Path) -> None:
    """`accelerate config default` writes JSON into a .yaml file."""
    from accelerate.commands.config.default import write_basic_config

    file = tmp_path / "default_config.yaml"
    write_basic_config(save_location=str(file))
    assert read_machine_config(file).strategy in ("single", "ddp")


@pytest.mark.parametrize(
    ("strategy", "values"),
    [
        ("single", {"distributed_type": "NO", "num_processes": 1}),
        ("ddp", {"distributed_type": "MULTI_XPU", "num_processes": 4}),
        ("fsdp2", {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": {"fsdp_version": 2}}),
        (
            "zero1",
            {"distributed_type": "DEEPSPEED", "num_processes": 4, "deepspeed_config": {"zero_stage": 1}},
        ),
    ],
)
def test_files_written_by_cluster_config(tmp_path: Path, strategy: str, values: dict[str, Any]) -> None:
    """Every default of the dataclass in the file, as programs write it."""
    config = ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        mixed_precision="no",
        use_cpu=False,
        debug=False,
        **copy.deepcopy(values),
    )
    config.to_yaml_file(str(tmp_path / "a.yaml"))
    assert read_machine_config(tmp_path / "a.yaml").strategy == strategy


# --- properties ----------------------------------------------------------------------------------------------

KEYS = [
    (file, place)
    for file in PRESETS
    for top, value in yaml.safe_load(file.read_text()).items()
    for place in [(top,), *((top, key) for key in (value if isinstance(value, dict) else ()))]
]
EDITS = ["delete", "double", "swap", "replace"]


def misspell(key: str, edit: str, at: int) -> str:
    at %= len(key)
    if edit == "delete":
        return key[:at] + key[at + 1 :]
    if edit == "double":
        return key[: at + 1] + key[at:]
    if edit == "swap":
        at = min(at, len(key) - 2)
        return key[:at] + key[at + 1] + key[at] + key[at + 2 :]
    return key[:at] + "x" + key[at + 1 :]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(KEYS), st.sampled_from(EDITS), st.integers(0, 60))
def test_a_misspelt_key_is_refused_with_the_true_one(
    tmp_path_factory: pytest.TempPathFactory, where: tuple[Path, tuple[str, ...]], edit: str, at: int
) -> None:
    preset, place = where
    wrong = misspell(place[-1], edit, at)
    assume(wrong != place[-1])
    lines = preset.read_text().splitlines(keepends=True)
    indent = "  " * (len(place) - 1)
    index = next(i for i, line in enumerate(lines) if line.startswith(f"{indent}{place[-1]}:"))
    lines[index] = lines[index].replace(place[-1], wrong, 1)
    file = write(tmp_path_factory.mktemp("typo"), "".join(lines))
    with pytest.raises(UsageError, match=rf":{index + 1}:{len(indent) + 1}: unknown key .*did you mean '{place[-1]}'"):
        read_machine_config(file)


SCALARS = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        5,
        10**30,
        1.5,
        "",
        "no",
        "two",
        "auto",
        "none",
        "cpu",
        "FULL_SHARD",
        [],
        {},
    ]
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(KEYS), SCALARS, st.booleans())
def test_what_is_accepted_accelerate_accepts(
    tmp_path_factory: pytest.TempPathFactory, where: tuple[Path, tuple[str, ...]], value: object, drop: bool
) -> None:
    """Any value at any key, or the key gone: a UsageError, or a file that Accelerate's parser takes as well."""
    preset, place = where
    values = yaml.safe_load(preset.read_text())
    section = values[place[0]] if len(place) == 2 else values
    if drop:
        del section[place[-1]]
    else:
        section[place[-1]] = value
    file = write(tmp_path_factory.mktemp("value"), values)
    try:
        machine = read_machine_config(file)
    except UsageError:
        return
    assert isinstance(machine, MachineConfig)
    if machine.num_processes is not None:
        accelerate_accepts(file)


def test_a_number_in_quotes_is_shown_with_them(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text('distributed_type: "NO"\nnum_machines: "1"\n')
    with pytest.raises(UsageError, match=r"`num_machines: '1'`: must be a whole number, 1 or more; .*without quotes"):
        read_machine_config(file)

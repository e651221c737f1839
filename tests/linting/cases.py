"""For each rule the facts in which it finds something, and the nearest in which it does not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from accel_train.linting.facts import GIB, MIB, Device, Disk, Facts, Host, Layout
from accel_train.options.tree import flatten, to_tree
from recipes import mmdit

A100 = Device("NVIDIA A100-SXM4-80GB", 80 * GIB, (8, 0))
V100 = Device("Tesla V100-SXM2-32GB", 32 * GIB, (7, 0))
RTX_4090 = Device("NVIDIA GeForce RTX 4090", 24 * GIB, (8, 9))
HOST = Host(
    cores=64,
    all_cores=64,
    memory_bytes=512 * GIB,
    shared_memory_bytes=256 * GIB,
    open_files=65536,
    interfaces=("lo", "eth0", "ib0"),
    output=Disk("lustre", 4096 * GIB),
)
OPTIONS = flatten(to_tree(mmdit.Config(max_steps=10_000)))
"""A long run with every option at its default."""
CPU = Layout()
GPU = Layout(device="cuda")
DDP = Layout("ddp", 4, device="cuda")
FSDP2 = Layout("fsdp2", 4, device="cuda")
CLUSTER = Layout("ddp", 16, 2, device="cuda")
Options = Mapping[str, Any]
NOTHING: Options = {}


def given(
    options: Options = NOTHING,
    layout: Layout = CPU,
    environment: Mapping[str, str] = NOTHING,
    host: Host | None = None,
    **more: Any,
) -> Facts:
    """Return facts of a plain machine with as many devices as the launch file has processes."""
    if host is None:
        count = layout.local_processes if layout.device == "cuda" else 0
        host = replace(HOST, devices=(A100,) * count)
    return Facts({**OPTIONS, **options}, layout, host, environment, **more)


def on(layout: Layout, options: Options = NOTHING, **changes: Any) -> Facts:
    """Return facts with another host."""
    count = layout.local_processes if layout.device == "cuda" else 0
    return given(options, layout, host=replace(HOST, **{"devices": (A100,) * count, **changes}))


def disk(options: Options = NOTHING, layout: Layout = CPU, **changes: Any) -> Facts:
    """Return facts with another disk."""
    return on(layout, options, output=replace(HOST.output, **changes))


ADAPTERS = {"lora.rank": 16, "lora.variant": "lora", "lora.alpha": None}
HUB = {"hub.repo_id": "org/name"}
COMPILED = {"compile.mode": "on"}
FOUR_MICRO_BATCHES = {"global_batch_size": 64, "micro_batch_size": 4}
ONE_MICRO_BATCH = {"global_batch_size": 64, "micro_batch_size": 64}
EIGHT_WORKERS = {"loader.num_workers": 8}
BILLION = 10**9

PROCESSES = {
    "devices-fewer-than-processes": (on(DDP, devices=(A100,) * 3), on(DDP, devices=(A100,) * 4)),
    "idle-devices": (on(GPU, devices=(A100,) * 2), on(replace(GPU, chosen_devices=True), devices=(A100,) * 2)),
    "unequal-devices": (
        on(replace(DDP, processes=2), devices=(A100, V100)),
        on(replace(DDP, processes=2), devices=(A100, A100)),
    ),
    "cpu-beside-devices": (on(CPU, devices=(A100,)), on(CPU)),
    "sharding-on-one-process": (
        given(layout=replace(FSDP2, processes=1)),
        given(layout=replace(FSDP2, processes=1, offload=True)),
    ),
    "sharding-without-need": (
        given(FOUR_MICRO_BATCHES, FSDP2, parameters=BILLION),
        given(FOUR_MICRO_BATCHES, FSDP2, parameters=2 * BILLION),
    ),
    "offload-without-need": (
        given(layout=replace(FSDP2, offload=True), parameters=BILLION),
        given(layout=replace(FSDP2, offload=True), parameters=2 * BILLION),
    ),
    "shards-across-machines": (
        given(layout=replace(FSDP2, processes=16, machines=2), parameters=10 * BILLION),
        given(layout=replace(FSDP2, processes=16, machines=2, replicate_size=2), parameters=10 * BILLION),
    ),
    "gathered-weights-kept": (
        given({"precision": "bf16"}, replace(FSDP2, reshard_after_forward=False), parameters=11 * BILLION),
        given({"precision": "bf16"}, replace(FSDP2, reshard_after_forward=False), parameters=10 * BILLION),
    ),
    "whole-gradients-kept": (
        given(FOUR_MICRO_BATCHES, FSDP2, parameters=6 * BILLION),
        given({**FOUR_MICRO_BATCHES, "sync": "every"}, FSDP2, parameters=6 * BILLION),
    ),
    "reduction-of-every-micro-batch": (
        given({**FOUR_MICRO_BATCHES, "sync": "every"}, DDP),
        given({**ONE_MICRO_BATCH, "sync": "every"}, DDP),
    ),
    "many-offloaded-micro-batches": (
        given({**FOUR_MICRO_BATCHES, "offload_frozen": True}),
        given({"global_batch_size": 60, "micro_batch_size": 4, "offload_frozen": True}),
    ),
    "powersgd-never-starts": (
        given({"distributed.comm_hook": "powersgd", "max_steps": 1000}, DDP),
        given({"distributed.comm_hook": "powersgd", "max_steps": 1001}, DDP),
    ),
    "static-graph-with-accumulation": (
        given({**FOUR_MICRO_BATCHES, "distributed.static_graph": True}, DDP),
        given({**ONE_MICRO_BATCH, "distributed.static_graph": True}, DDP),
    ),
    "debug-mode-of-accelerate": (
        given(layout=replace(DDP, debug=True)),
        given({"max_steps": 200}, replace(DDP, debug=True)),
    ),
    "long-collective-timeout": (
        given({"collective_timeout_seconds": 14401}, DDP),
        given({"collective_timeout_seconds": 14400}, DDP),
    ),
    "short-collective-timeout": (
        given({"collective_timeout_seconds": 59}, DDP),
        given({"collective_timeout_seconds": 60}, DDP),
    ),
    "loader-timeout-above-collective": (
        given({**EIGHT_WORKERS, "loader.timeout_seconds": 1800.0}, DDP),
        given({**EIGHT_WORKERS, "loader.timeout_seconds": 1799.0}, DDP),
    ),
}
IB_CLUSTER = replace(HOST, devices=(A100,) * 8, has_infiniband=True)
NETWORK = {
    "nccl-debug-left-on": (
        given(layout=DDP, environment={"NCCL_DEBUG": "INFO"}),
        given(layout=DDP, environment={"NCCL_DEBUG": "WARN"}),
    ),
    "distributed-debug-left-on": (
        given(layout=DDP, environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
        given(layout=DDP, environment={"TORCH_DISTRIBUTED_DEBUG": "INFO"}),
    ),
    "infiniband-switched-off": (
        given({}, CLUSTER, {"NCCL_IB_DISABLE": "1"}, IB_CLUSTER),
        given({}, CLUSTER, {"NCCL_IB_DISABLE": "1"}),
    ),
    "peer-to-peer-switched-off": (
        given(layout=DDP, environment={"NCCL_P2P_DISABLE": "1"}),
        given({}, DDP, {"NCCL_P2P_DISABLE": "1"}, replace(HOST, devices=(RTX_4090,) * 4)),
    ),
    "missing-interface": (
        given(layout=DDP, environment={"GLOO_SOCKET_IFNAME": "eth"}),
        given(layout=DDP, environment={"NCCL_SOCKET_IFNAME": "eth"}),  # a prefix is enough for NCCL alone
    ),
    "loopback-between-machines": (
        given(layout=CLUSTER, environment={"GLOO_SOCKET_IFNAME": "lo"}),
        given(layout=DDP, environment={"GLOO_SOCKET_IFNAME": "lo"}),
    ),
    "collective-timeout-disarmed": (
        given(layout=DDP, environment={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}),
        given(layout=DDP, environment={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}),
    ),
    "monitoring-switched-off": (
        given(layout=DDP, environment={"TORCH_NCCL_ENABLE_MONITORING": "0"}),
        given(layout=GPU, environment={"TORCH_NCCL_ENABLE_MONITORING": "0"}),
    ),
    "blocking-wait": (
        given(layout=DDP, environment={"TORCH_NCCL_BLOCKING_WAIT": "1"}),
        given(layout=DDP, environment={"TORCH_NCCL_BLOCKING_WAIT": "0"}),
    ),
    "one-device-connection": (
        given(layout=DDP, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        given(layout=DDP, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "8"}),
    ),
    "forced-protocol": (
        given(layout=DDP, environment={"NCCL_PROTO": "LL,LL128"}),
        given(layout=DDP, environment={"NCCL_PROTO": "^LL128"}),
    ),
    "locked-memory-low": (
        given(layout=CLUSTER, host=replace(IB_CLUSTER, locked_memory_bytes=8 * MIB)),
        given(layout=CLUSTER, host=replace(IB_CLUSTER, locked_memory_bytes=math.inf)),
    ),
}
VARIABLES = {
    "launch-blocking": (
        given(layout=GPU, environment={"CUDA_LAUNCH_BLOCKING": "1"}),
        given(layout=GPU, environment={"CUDA_LAUNCH_BLOCKING": "0"}),
    ),
    "allocator-set-twice": (
        given(layout=GPU, environment={"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:2"}),
        given(layout=GPU, environment={"PYTORCH_CUDA_ALLOC_CONF": "a:2", "PYTORCH_ALLOC_CONF": "a:2"}),
    ),
    "no-memory-caching": (
        given(layout=GPU, environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
        given(layout=CPU, environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    ),
    "compiler-logs-left-on": (
        given(COMPILED, environment={"TORCH_LOGS": "+dynamo"}),
        given(environment={"TORCH_LOGS": "+dynamo"}),
    ),
    "compile-debug-left-on": (
        given(COMPILED, environment={"TORCH_COMPILE_DEBUG": "1"}),
        given({**COMPILED, "max_steps": 100}, environment={"TORCH_COMPILE_DEBUG": "1"}),
    ),
    "compilation-switched-off": (
        given({"compile.mode": "auto"}, environment={"TORCHDYNAMO_DISABLE": "1"}),
        given({"compile.mode": "off"}, environment={"TORCHDYNAMO_DISABLE": "1"}),
    ),
    "compile-cache-switched-off": (
        given(COMPILED, environment={"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}),
        given(COMPILED, environment={"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "0"}),
    ),
    "parallel-tokenizers-in-workers": (
        given(EIGHT_WORKERS, environment={"TOKENIZERS_PARALLELISM": "true"}),
        given({"loader.num_workers": 0}, environment={"TOKENIZERS_PARALLELISM": "true"}),
    ),
    "hub-offline-with-push": (
        given(HUB, environment={"TRANSFORMERS_OFFLINE": "1"}),
        given(HUB, environment={"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1"}),
    ),
    "obsolete-variable": (
        given(environment={"TRANSFORMERS_CACHE": "/cache"}),
        given(environment={"HF_HOME": "/cache"}),
    ),
    "forced-tf32": (
        given({"precision": "fp32"}, GPU, {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}),
        given({"precision": "bf16"}, GPU, {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}),
    ),
    "tracker-switched-off": (
        given({"log.trackers": ["wandb"]}, environment={"WANDB_MODE": "disabled"}),
        given({"log.trackers": ["wandb"]}, environment={"WANDB_MODE": "offline"}),
    ),
    "threads-above-cores": (
        given(layout=DDP, environment={"OMP_NUM_THREADS": "17"}),
        given(layout=DDP, environment={"OMP_NUM_THREADS": "16"}),
    ),
    "threads-bound-alike": (
        given({}, DDP, {"OMP_PROC_BIND": "true"}),
        given({}, DDP, {"OMP_PROC_BIND": "true"}, replace(HOST, all_cores=128, devices=(A100,) * 4)),
    ),
}
LIMITS = {
    "shared-memory-small": (
        on(CPU, EIGHT_WORKERS, shared_memory_bytes=64 * MIB),
        on(CPU, EIGHT_WORKERS, shared_memory_bytes=65 * MIB),
    ),
    "workers-above-cores": (given({"loader.num_workers": 17}, DDP), given({"loader.num_workers": 16}, DDP)),
    "few-cores": (on(DDP, cores=7), on(DDP, cores=8)),
    "few-open-files": (
        on(CPU, {**EIGHT_WORKERS, "loader.prefetch_factor": 8}, open_files=1024),
        on(CPU, {**EIGHT_WORKERS, "loader.prefetch_factor": 6}, open_files=1024),
    ),
    "core-files": (on(GPU, core_file_bytes=math.inf), on(GPU, core_file_bytes=0)),
    "deep-read-ahead": (
        given({**EIGHT_WORKERS, "loader.prefetch_factor": 9}),
        given({**EIGHT_WORKERS, "loader.prefetch_factor": 8}),
    ),
    "pageable-memory": (given({"loader.pin_memory": False}, GPU), given({"loader.pin_memory": False}, CPU)),
    "no-bf16": (
        on(GPU, {"precision": "bf16"}, devices=(V100,)),
        on(GPU, {"precision": "bf16"}, devices=(A100,)),
    ),
    "bf16-on-old-cpu": (
        on(CPU, {"precision": "bf16"}, has_fast_bf16=False),
        on(CPU, {"precision": "bf16"}, has_fast_bf16=True),
    ),
    "fp16-beside-bf16": (
        on(GPU, {"precision": "fp16"}, devices=(A100,)),
        on(GPU, {"precision": "fp16"}, devices=(V100,)),
    ),
    "output-in-memory": (disk(filesystem="tmpfs"), disk({"max_steps": 200}, filesystem="tmpfs")),
    "output-in-temporary": (disk(is_temporary=True), disk(is_temporary=False)),
    "output-in-container": (disk(filesystem="overlay"), disk(filesystem="ext4")),
    "output-on-object-store": (disk(filesystem="fuse.gcsfuse"), disk(filesystem="fuse.sshfs")),
    "output-not-shared": (disk({}, CLUSTER, filesystem="ext4"), disk({}, CLUSTER, filesystem="nfs4")),
    "disk-nearly-full": (disk(free_bytes=GIB - 1), disk(free_bytes=GIB)),
    "checkpoints-above-disk": (
        replace(disk(free_bytes=4 * 16 * BILLION - 1), parameters=BILLION),
        replace(disk(free_bytes=4 * 16 * BILLION), parameters=BILLION),
    ),
    "host-memory-of-offload": (
        given(layout=replace(FSDP2, offload=True), parameters=18 * BILLION),
        given({"checkpoints.asynchronous": False}, replace(FSDP2, offload=True), parameters=18 * BILLION),
    ),
    "time-limit-before-save": (on(CPU, seconds_left=600.0), on(CPU, seconds_left=601.0)),
    "compile-cache-on-network": (
        on(CPU, COMPILED, compile_cache_filesystem="nfs4"),
        on(CPU, COMPILED, compile_cache_filesystem="xfs"),
    ),
}
BEST = {"checkpoints.keep_best": 1, "checkpoints.best_metric": "loss", "checkpoints.save_every": 100}
RESTARTS = {"TORCHELASTIC_MAX_RESTARTS": "3"}
UNDER_TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}
SAVING = {
    "no-save-before-the-end": (
        given({"checkpoints.save_every": 10_001}),
        given({"checkpoints.save_every": 10_000}),
    ),
    # 10,000 steps of 64 samples are 6.4 epochs of 100,000 samples.
    "no-epoch-before-the-end": (
        given({"global_batch_size": 64, "checkpoints.save_every_epochs": 6.5}, dataset_size=100_000),
        given({"global_batch_size": 64, "checkpoints.save_every_epochs": 6.4}, dataset_size=100_000),
    ),
    "many-saves": (given({"checkpoints.save_every": 9}), given({"checkpoints.save_every": 10})),
    "waiting-saves": (
        given({"checkpoints.save_every": 1000, "checkpoints.asynchronous": False}),
        given({"checkpoints.save_every": 1001, "checkpoints.asynchronous": False}),
    ),
    "one-checkpoint": (
        given({"checkpoints.keep_last": 1}),
        given({"checkpoints.keep_last": 1, "checkpoints.keep_every": 5000}),
    ),
    "every-checkpoint-kept": (
        given({"checkpoints.keep_last": 0, "checkpoints.save_every": 100}),
        given({"checkpoints.keep_last": 0, "checkpoints.save_every": 101}),
    ),
    "keep-every-between-saves": (
        given({"checkpoints.keep_every": 1000, "checkpoints.save_every": 300}),
        given({"checkpoints.keep_every": 900, "checkpoints.save_every": 300}),
    ),
    "empty-window": (
        given({"checkpoints.keep_window_steps": 99, "checkpoints.save_every": 100}),
        given({"checkpoints.keep_window_steps": 100, "checkpoints.save_every": 100}),
    ),
    "best-of-one-evaluation": (
        given({**BEST, "evaluation.every": 0}),
        given({**BEST, "evaluation.every": 100}),
    ),
    "best-between-saves": (
        given({**BEST, "evaluation.every": 150}),
        given({**BEST, "evaluation.every": 200}),
    ),
    "overwrite-with-restarts": (
        given({"overwrite": True}, environment=RESTARTS),
        given({"overwrite": True}, environment={"TORCHELASTIC_MAX_RESTARTS": "0"}),
    ),
    "no-resume-with-restarts": (
        given({"resume": "never"}, environment={"SLURM_RESTART_COUNT": "1"}),
        given({"resume": "auto"}, environment={"SLURM_RESTART_COUNT": "1"}),
    ),
    "state-missing-for-restarts": (
        given({"checkpoints.save_state": False}, environment=RESTARTS),
        given({"checkpoints.save_state": False}),
    ),
    "grace-above-torchrun": (
        given({"checkpoints.grace_seconds": 60.0}, environment=UNDER_TORCHRUN),
        given(
            {"checkpoints.grace_seconds": 60.0},
            environment={**UNDER_TORCHRUN, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"},
        ),
    ),
    "many-revisions": (
        given({**HUB, "checkpoints.save_every": 49}),
        given({**HUB, "checkpoints.save_every": 50}),
    ),
    "public-without-license": (
        given({**HUB, "hub.private": False}),
        given({**HUB, "hub.private": False, "hub.license": "mit"}),
    ),
}
TRAINING = {
    "warmup-beyond-the-run": (
        given({"schedule.warmup_steps": 10_001}),
        given({"schedule.warmup_steps": 10_000}),
    ),
    "long-warmup": (given({"schedule.warmup_steps": 5001}), given({"schedule.warmup_steps": 5000})),
    "steps-without-learning-rate": (
        given({"schedule.decay_steps": 9000}),
        given({"schedule.decay_steps": 9000, "schedule.floor": 0.1}),
    ),
    "ema-never-reached": (
        given({"ema.decay": 0.9999, "max_steps": 6931}),
        given({"ema.decay": 0.9999, "max_steps": 6932}),
    ),
    "evaluation-outweighs-training": (
        given({"evaluation.every": 7, "evaluation.samples": 512}),
        given({"evaluation.every": 8, "evaluation.samples": 512}),
    ),
    "log-every-step": (given({"log.log_every": 1}, GPU), given({"log.log_every": 2}, GPU)),
    "nothing-logged": (given({"log.log_every": 10_000}), given({"log.log_every": 9999})),
    "large-learning-rate": (given({"optimizer.lr": 0.011}), given({"optimizer.lr": 0.01})),
    "large-learning-rate-of-tuning": (
        given({"model.source": "org/base", "optimizer.lr": 1e-3}),
        given({"model.source": "org/base", "optimizer.lr": 1e-3, "lora.rank": 16}),
    ),
    "small-learning-rate-of-adapters": (
        given({**ADAPTERS, "optimizer.lr": 2.9e-5}),
        given({**ADAPTERS, "optimizer.lr": 3e-5}),
    ),
    "swapped-betas": (given({"optimizer.betas": [0.99, 0.9]}), given({"optimizer.betas": [0.9, 0.9]})),
    "large-eps": (given({"optimizer.eps": 1e-3}), given({"optimizer.eps": 1e-4})),
    "decayed-adapters": (
        given({**ADAPTERS, "optimizer.lr": 1e-4, "optimizer.weight_decay": 0.2}),
        given({**ADAPTERS, "optimizer.lr": 1e-4, "optimizer.weight_decay": 0.1}),
    ),
    "scale-of-adapters": (given({**ADAPTERS, "lora.alpha": 0.5}), given({**ADAPTERS, "lora.alpha": 1.0})),
    "many-passes": (
        given({"global_batch_size": 64, "data.packing": True}, dataset_size=6399),
        given({"global_batch_size": 64, "data.packing": True}, dataset_size=6400),
    ),
    "uncompiled-float8": (
        given({"float8": "rowwise"}, GPU),
        given({"float8": "rowwise", **COMPILED}, GPU),
    ),
    "cuda-graphs-with-accumulation": (
        given({**COMPILED, **FOUR_MICRO_BATCHES, "compile.optimize": "reduce-overhead"}, GPU),
        given({**COMPILED, **ONE_MICRO_BATCH, "compile.optimize": "reduce-overhead"}, GPU),
    ),
    "many-compiled-shapes": (
        given({**COMPILED, "loader.bucket_shapes": 9}),
        given({**COMPILED, "loader.bucket_shapes": 8}),
    ),
}
CASES: dict[str, tuple[Facts, Facts]] = {**PROCESSES, **NETWORK, **VARIABLES, **LIMITS, **SAVING, **TRAINING}

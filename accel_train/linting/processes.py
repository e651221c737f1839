"""Rules about processes, devices and the sharding of a model."""

from __future__ import annotations

import math

from accel_train.linting.facts import FITS_EASILY, GIB, Facts, divides_a_large_update, fits_easily
from accel_train.linting.findings import Finding, Rule

MANY_MICRO_BATCHES = 16
LARGE_SHARE = 0.25
LONG_TIMEOUT_SECONDS = 4 * 3600
SHORT_TIMEOUT_SECONDS = 60
SHARDING = ("fsdp2", "zero1", "zero2", "zero3")


def few_devices(facts: Facts) -> Finding | None:
    """Process i of a machine computes on its device i. With fewer visible devices, usually because CUDA_VISIBLE_DEVICES
    names too few, the start is refused: Accelerate would give two processes one device, which NCCL ends with `Duplicate
    GPU detected`.
    """
    visible = len(facts.host.devices)
    needed = facts.layout.local_processes
    # No device at all means an unknown host, such as a login node.
    if not facts.on_gpu or visible == 0 or visible >= needed:
        return None
    return Finding(
        option="num_processes",
        value=facts.layout.processes,
        reason=f"{needed} processes on this machine need as many devices, and {visible} are visible",
        remedy="name more devices in CUDA_VISIBLE_DEVICES, or give a smaller --num_processes",
    )


def idle_devices(facts: Facts) -> Finding | None:
    """Every process uses one device. Visible devices beyond the number of processes do nothing."""
    visible = len(facts.host.devices)
    used = facts.layout.local_processes
    if not facts.on_gpu or facts.layout.chosen_devices or visible <= used:
        return None
    return Finding(
        option="num_processes",
        value=facts.layout.processes,
        reason=f"{used} of {visible} visible devices of this machine are used",
        remedy=f"give --num_processes {visible * facts.layout.machines}, or choose with CUDA_VISIBLE_DEVICES",
    )


def unequal_devices(facts: Facts) -> Finding | None:
    """Processes wait for each other in every step, so the slowest device sets the speed and the smallest the batch.
    CUDA numbers devices by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID, so an index may mean a different device than in
    nvidia-smi.
    """
    # Process i takes device i, so further devices are not used.
    devices = facts.host.devices[: facts.layout.local_processes]
    names = sorted({device.name for device in devices})
    if not facts.on_gpu or len(names) < 2:
        return None
    return Finding(
        option="devices",
        value=", ".join(names),
        reason="the processes wait for the slowest of them in every step",
        remedy="choose equal ones with CUDA_DEVICE_ORDER=PCI_BUS_ID and CUDA_VISIBLE_DEVICES",
    )


def cpu_beside_devices(facts: Facts) -> Finding | None:
    """A launch file with `use_cpu: true` trains on the CPU of a machine with accelerators."""
    count = len(facts.host.devices)
    if facts.on_gpu or count == 0 or facts.is_trial:
        return None
    return Finding(
        option="use_cpu",
        value=True,
        reason=f"the run computes on the CPU, and {count} accelerator(s) are visible",
        remedy="launch with accelerate_configs/single_gpu.yaml or ddp.yaml",
    )


def sharding_on_one_process(facts: Facts) -> Finding | None:
    """FSDP2 and ZeRO divide weights and optimizer by the number of processes. One process has nothing to divide but
    still pays for the wrapping. Offload is a reason to use them anyway.
    """
    layout = facts.layout
    if layout.strategy not in SHARDING or layout.processes > 1 or layout.offload:
        return None
    return Finding(
        option="distributed_type",
        value=layout.strategy,
        reason="one process holds everything whatever the strategy; sharding costs time and saves nothing",
        remedy="launch with accelerate_configs/single_gpu.yaml, or give --num_processes 2 or more",
    )


def _fits_each_device(facts: Facts) -> bool:
    state = facts.held_bytes
    device = facts.device_bytes
    if state is None or device is None or not facts.on_gpu:
        return False
    # False while anything is unknown: the rules that ask would advise against sharding.
    return fits_easily(state, device)


def _sizes(facts: Facts) -> str:
    state = (facts.held_bytes or 0) / GIB
    device = (facts.device_bytes or 0) / GIB
    return f"weights, gradients, optimizer and EMA take {state:.1f} GiB, and a device has {device:.0f} GiB"


def sharding_without_need(facts: Facts) -> Finding | None:
    """FSDP2 and ZeRO-3 gather the weights of each block in every forward and backward. DDP gathers nothing, and is
    faster for a model whose training state fits on each device. The exception is a state of 10 GiB or more with a
    single micro-batch on one machine: there each device updates only its shard, and gathers cost no more than DDP's
    reduction.
    """
    layout = facts.layout
    # Under ZeRO-1 and ZeRO-2 weights are whole on every device, so no block is gathered.
    if layout.strategy not in ("fsdp2", "zero3") or layout.processes == 1 or layout.offload:
        return None
    if not _fits_each_device(facts):
        return None
    trained = (facts.held_bytes or 0) - facts.frozen_bytes
    if layout.machines == 1 and divides_a_large_update(trained, facts.accumulation):
        return None
    return Finding(
        option="distributed_type",
        value=layout.strategy,
        reason=f"{_sizes(facts)}: every micro-batch needlessly gathers all weights",
        remedy="launch with accelerate_configs/ddp.yaml; a checkpoint of either continues under the other",
    )


def offload_without_need(facts: Facts) -> Finding | None:
    """Offload moves weights or gradients over PCIe in every micro-batch and steps the optimizer on the CPU. It is for a
    training state that does not fit on the devices.
    """
    if not facts.layout.offload or not _fits_each_device(facts):
        return None
    return Finding(
        option="offload",
        value=facts.layout.strategy,
        reason=f"{_sizes(facts)}: PCIe and the CPU needlessly limit the speed",
        remedy="launch with accelerate_configs/single_gpu.yaml or ddp.yaml",
    )


def shards_across_machines(facts: Facts) -> Finding | None:
    """One group of shards over several machines gathers every block over the network. If the devices of one machine can
    hold the training state, shard inside each machine and reduce gradients between machines.
    """
    layout = facts.layout
    state = facts.held_bytes
    device = facts.device_bytes
    if layout.strategy != "fsdp2" or layout.machines == 1 or layout.replicate_size is not None:
        return None
    if state is None or device is None or state > FITS_EASILY * device * layout.local_processes:
        return None
    return Finding(
        option="parallelism_config_dp_replicate_size",
        value=None,
        reason=f"weights are gathered over the network of {layout.machines} machines in forward and backward, but the "
        f"{layout.local_processes} devices of one machine can hold the {state / GIB:.1f} GiB of state",
        remedy=f"add `parallelism_config: {{parallelism_config_dp_replicate_size: {layout.machines}, "
        f"parallelism_config_dp_shard_size: {layout.local_processes}}}` to the launch file",
    )


def gathered_weights_kept(facts: Facts) -> Finding | None:
    """With `fsdp_reshard_after_forward: false` every device holds all gathered weights from the forward of a block to
    its backward: faster, at the memory of ZeRO-2.
    """
    layout = facts.layout
    device = facts.device_bytes
    if layout.strategy != "fsdp2" or layout.reshard_after_forward or facts.parameters is None or device is None:
        return None
    # FSDP2 gathers in the precision of the computation.
    bytes_each = 4 if facts.option("precision") == "fp32" else 2
    gathered = facts.parameters * bytes_each
    if gathered < LARGE_SHARE * device:
        return None
    return Finding(
        option="fsdp_reshard_after_forward",
        value=False,
        reason=f"{gathered / GIB:.1f} GiB of gathered weights stay on each device of {device / GIB:.0f} GiB",
        remedy="write fsdp_reshard_after_forward: true if memory is short",
    )


def whole_gradients_kept(facts: Facts) -> Finding | None:
    """If FSDP2 reduces gradients on the last micro-batch only, each device holds whole gradients until then: 4 bytes
    per parameter, not divided by the number of processes. With `sync: every` it holds shards.
    """
    device = facts.device_bytes
    if facts.layout.strategy != "fsdp2" or facts.accumulation == 1 or facts.option("sync") == "every":
        return None
    if facts.parameters is None or device is None or facts.parameters * 4 < LARGE_SHARE * device:
        return None
    return Finding(
        option="sync",
        value=facts.option("sync"),
        reason=f"{facts.parameters * 4 / GIB:.1f} GiB of whole gradients stay on each device of "
        f"{device / GIB:.0f} GiB over {facts.accumulation} micro-batches",
        remedy="give sync: every, at the cost of one reduction per micro-batch",
    )


def reduction_of_every_micro_batch(facts: Facts) -> Finding | None:
    """DDP needs one reduction of the gradients per optimizer step. Reducing every micro-batch multiplies the traffic
    and saves no memory; on two hosts a step took 2.13 s instead of 0.91 s.
    """
    count = facts.accumulation
    if facts.layout.strategy != "ddp" or facts.option("sync") != "every" or count == 1:
        return None
    return Finding(
        option="sync",
        value="every",
        reason=f"gradients are reduced {count} times per step on {facts.layout.machines} machine(s); once is enough",
        remedy="leave it at auto",
        change=("sync", "auto"),
    )


def many_offloaded_micro_batches(facts: Facts) -> Finding | None:
    """Offloaded weights or gradients cross PCIe in every micro-batch, so few large micro-batches are faster than many
    small ones. The same holds for `offload_frozen`.
    """
    frozen = bool(facts.option("offload_frozen"))
    if facts.accumulation < MANY_MICRO_BATCHES or not (facts.layout.offload or frozen):
        return None
    return Finding(
        option="micro_batch_size",
        value=facts.option("micro_batch_size"),
        reason=f"each step has {facts.accumulation} micro-batches, and each moves the offloaded tensors over PCIe",
        remedy="raise it as far as memory allows; the result stays the same",
    )


def powersgd_that_never_starts(facts: Facts) -> Finding | None:
    """PowerSGD reduces full gradients before `powersgd_start_step`. A shorter run never compresses."""
    if facts.option("distributed.comm_hook") != "powersgd" or facts.steps is None:
        return None
    from accel_train.runtime.distributed_options import POWERSGD_START

    # None leaves the start to the hook's own default.
    start = facts.option("distributed.powersgd_start_step") or POWERSGD_START
    if facts.steps > start:
        return None
    return Finding(
        option="distributed.powersgd_start_step",
        value=start,
        reason=f"the run has {facts.steps} steps, so every reduction is of full gradients",
        remedy=f"give a start below {facts.steps}, or leave the hook out",
    )


def static_graph_with_accumulation(facts: Facts) -> Finding | None:
    """DDP with a static graph counts the hooks of the first backward, which no_sync leaves out, and stops on an
    assertion. A start refuses the combination.
    """
    if not facts.option("distributed.static_graph") or facts.accumulation == 1:
        return None
    return Finding(
        option="distributed.static_graph",
        value=True,
        reason=f"each step has {facts.accumulation} micro-batches, and DDP stops with an assertion error",
        remedy="leave it out, or raise micro_batch_size until one micro-batch is enough",
        change=("distributed.static_graph", False),
    )


def debug_mode_of_accelerate(facts: Facts) -> Finding | None:
    """`debug: true` in a launch file makes Accelerate compare shapes over all processes before each of its
    collectives."""
    if not facts.layout.debug or facts.layout.processes == 1 or facts.is_trial:
        return None
    return Finding(
        option="debug",
        value=True,
        reason="every gather and reduction of Accelerate is preceded by another one that compares shapes",
        remedy="remove it from the launch file once the hang is found",
    )


def long_collective_timeout(facts: Facts) -> Finding | None:
    """All devices stay reserved while the processes wait for a dead one."""
    seconds = facts.number("collective_timeout_seconds")
    count = facts.layout.processes
    if count == 1 or seconds <= LONG_TIMEOUT_SECONDS:
        return None
    return Finding(
        option="collective_timeout_seconds",
        value=facts.option("collective_timeout_seconds"),
        reason=f"when one process dies, {count - 1} others wait {seconds / 3600:.1f} hours",
        remedy="give the longest wait that is normal, such as 1800",
        change=("collective_timeout_seconds", 1800),
    )


def short_collective_timeout(facts: Facts) -> Finding | None:
    """Compilation, a slow disk or the first read of data may delay one process for a minute while the others wait."""
    seconds = facts.number("collective_timeout_seconds")
    if facts.layout.processes == 1 or not 0 < seconds < SHORT_TIMEOUT_SECONDS:
        return None
    return Finding(
        option="collective_timeout_seconds",
        value=facts.option("collective_timeout_seconds"),
        reason=f"a process that is {seconds:g} s late ends the run; compiling or a slow disk can take longer",
        remedy="give several minutes or more, such as 1800 seconds",
        change=("collective_timeout_seconds", 1800),
    )


def loader_timeout_above_collective(facts: Facts) -> Finding | None:
    """If the loader waits longer than the collectives, a slow disk shows up as a failed collective of another process,
    which names the wrong cause.
    """
    # Imported here, because it imports torch.
    from accel_train.data.options import DEFAULT_TIMEOUT_SECONDS

    limit = facts.number("collective_timeout_seconds")
    waits = facts.number("loader.timeout_seconds") or DEFAULT_TIMEOUT_SECONDS
    if facts.layout.processes == 1 or facts.workers == 0 or not limit or waits < limit:
        return None
    # Half of it, so that the loader's own error, with the right cause, comes first.
    below = float(max(1, math.floor(limit / 2)))
    return Finding(
        option="loader.timeout_seconds",
        value=facts.option("loader.timeout_seconds"),
        reason=f"the other processes give up after {limit:g} s, before the error that names the slow read",
        remedy=f"give {below:g} s",
        change=("loader.timeout_seconds", below),
    )


MACHINES = "docs/machines.md"
PROCESS_RULES = (
    Rule("devices-fewer-than-processes", "warning", "accelerate: local rank modulo devices", few_devices),
    Rule("idle-devices", "warning", MACHINES, idle_devices),
    Rule("unequal-devices", "warning", "CUDA C++ Programming Guide, CUDA_DEVICE_ORDER", unequal_devices),
    Rule("cpu-beside-devices", "warning", MACHINES, cpu_beside_devices),
    Rule("sharding-on-one-process", "warning", MACHINES, sharding_on_one_process),
    Rule("sharding-without-need", "warning", MACHINES, sharding_without_need, "model"),
    Rule("offload-without-need", "warning", MACHINES, offload_without_need, "model"),
    Rule("shards-across-machines", "warning", "torch: fully_shard, 2-D mesh", shards_across_machines, "model"),
    Rule("gathered-weights-kept", "warning", "torch: fully_shard", gathered_weights_kept, "model"),
    Rule("whole-gradients-kept", "warning", "accelerate#2531, transformers#29425", whole_gradients_kept, "model"),
    Rule("reduction-of-every-micro-batch", "warning", "accelerate#1153", reduction_of_every_micro_batch),
    Rule("many-offloaded-micro-batches", "warning", MACHINES, many_offloaded_micro_batches),
    Rule("powersgd-never-starts", "warning", "torch: PowerSGDState", powersgd_that_never_starts),
    Rule("static-graph-with-accumulation", "error", "accelerate#3679", static_graph_with_accumulation),
    Rule("debug-mode-of-accelerate", "warning", "accelerate: ACCELERATE_DEBUG_MODE", debug_mode_of_accelerate),
    Rule("long-collective-timeout", "warning", MACHINES, long_collective_timeout),
    Rule("short-collective-timeout", "warning", MACHINES, short_collective_timeout),
    Rule("loader-timeout-above-collective", "warning", MACHINES, loader_timeout_above_collective),
)

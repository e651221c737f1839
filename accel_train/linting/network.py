"""Rules about NCCL, gloo and the network between processes."""

from __future__ import annotations

from accel_train.launch_files import interfaces
from accel_train.linting.facts import GIB, Facts
from accel_train.linting.findings import Finding, Rule

LOCKED_MEMORY_NEEDED = GIB
"""NCCL registers buffers of some hundred MiB with the network card."""


def _over_nccl(facts: Facts) -> bool:
    return facts.on_gpu and facts.layout.processes > 1


def nccl_debug(facts: Facts) -> Finding | None:
    """NCCL_DEBUG=INFO prints lines for every communicator, TRACE for every operation."""
    value = facts.variable("NCCL_DEBUG")
    # WARN and VERSION print a line or two, and may stay.
    if value not in ("info", "trace") or not _over_nccl(facts) or facts.is_trial:
        return None
    return Finding(
        option="NCCL_DEBUG",
        value=value.upper(),
        reason=f"{facts.layout.processes} processes write NCCL's log to the console all the time",
        remedy="set it to WARN, or write the log to files with NCCL_DEBUG_FILE",
    )


def distributed_debug(facts: Facts) -> Finding | None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps every process group: each collective is preceded by a check that all
    processes call the same one with the same shapes.
    """
    if facts.variable("TORCH_DISTRIBUTED_DEBUG") != "detail" or facts.layout.processes == 1 or facts.is_trial:
        return None
    return Finding(
        option="TORCH_DISTRIBUTED_DEBUG",
        value="DETAIL",
        reason=f"every collective of {facts.layout.processes} processes is checked by another one before it runs",
        remedy="unset it once the mismatch is found",
    )


def infiniband_off(facts: Facts) -> Finding | None:
    """NCCL_IB_DISABLE=1 and NCCL_NET=Socket send the gradients between machines over TCP although there is
    InfiniBand.
    """
    if not _over_nccl(facts) or facts.layout.machines == 1 or not facts.host.has_infiniband:
        return None
    if facts.variable("NCCL_IB_DISABLE") == "1":
        name = "NCCL_IB_DISABLE"
    elif facts.variable("NCCL_NET") == "socket":
        name = "NCCL_NET"
    else:
        return None
    return Finding(
        option=name,
        value=facts.environment[name],
        reason=f"{facts.layout.machines} machines exchange gradients over TCP, although this one has InfiniBand",
        remedy="unset it; NCCL_DEBUG=INFO shows which network NCCL uses",
    )


def peer_to_peer_off(facts: Facts) -> Finding | None:
    """With NCCL_P2P_DISABLE=1 the devices of one machine exchange data through host memory. Launchers set it on cards
    of the RTX 40 series with drivers before 550.40.07. Elsewhere it is usually left over from debugging.
    """
    if not _over_nccl(facts) or facts.variable("NCCL_P2P_DISABLE") != "1" or facts.layout.local_processes == 1:
        return None
    # Peer-to-peer fails on these with older drivers, so it may be switched off for good reason.
    if any("RTX 40" in device.name for device in facts.host.devices):
        return None
    return Finding(
        option="NCCL_P2P_DISABLE",
        value=1,
        reason=f"{facts.layout.local_processes} devices of this machine exchange gradients through host memory",
        remedy="unset it",
    )


def missing_interface(facts: Facts) -> Finding | None:
    """GLOO_SOCKET_IFNAME has full names of interfaces. NCCL_SOCKET_IFNAME has prefixes, or full names after `=`.
    Without a match gloo or NCCL stops when the processes connect. Names differ between machines.
    """
    if facts.layout.processes == 1 or not facts.host.interfaces:
        return None
    for variable in (interfaces.GLOO_VARIABLE, interfaces.NCCL_VARIABLE):
        # Not `Facts.variable`, which lowers the case: names of interfaces are case-sensitive.
        value = facts.environment.get(variable, "")
        # After ^ NCCL takes all interfaces but the named ones.
        if not value or value.startswith("^"):
            continue
        # The two libraries read the same form of value by different rules.
        if not interfaces.matches(value, facts.host.interfaces, exact=variable == interfaces.GLOO_VARIABLE):
            return Finding(
                option=variable,
                value=value,
                reason=f"this machine has no such interface, only {', '.join(facts.host.interfaces)}",
                remedy="name, on each machine, the interface through which it reaches the others",
            )
    return None


def loopback_between_machines(facts: Facts) -> Finding | None:
    """The loopback interface of a machine reaches that machine only."""
    if facts.layout.machines == 1:
        return None
    for variable in (interfaces.GLOO_VARIABLE, interfaces.NCCL_VARIABLE):
        if facts.variable(variable).removeprefix("=") == "lo":
            return Finding(
                option=variable,
                value="lo",
                reason=f"{facts.layout.machines} machines cannot reach each other through it",
                remedy="name the interface of the network between them",
            )
    return None


def collective_timeout_disarmed(facts: Facts) -> Finding | None:
    """With TORCH_NCCL_ASYNC_ERROR_HANDLING=0 torch's watchdog does not end a process whose collective has timed out,
    so `collective_timeout_seconds` has no effect and a hang lasts until somebody looks.
    """
    if not _over_nccl(facts) or facts.variable("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "0":
        return None
    return Finding(
        option="TORCH_NCCL_ASYNC_ERROR_HANDLING",
        value=0,
        reason=f"collective_timeout_seconds: {facts.option('collective_timeout_seconds')} ends no process",
        remedy="unset it",
    )


def monitoring_off(facts: Facts) -> Finding | None:
    """TORCH_NCCL_ENABLE_MONITORING=0 switches off the thread that ends a process whose NCCL watchdog is itself stuck,
    as in a blocked CUDA call.
    """
    if not _over_nccl(facts) or facts.variable("TORCH_NCCL_ENABLE_MONITORING") not in ("0", "false"):
        return None
    return Finding(
        option="TORCH_NCCL_ENABLE_MONITORING",
        value=facts.environment["TORCH_NCCL_ENABLE_MONITORING"],
        reason=f"nothing ends {facts.layout.processes} processes when the watchdog of one is stuck",
        remedy="unset it",
    )


def blocking_wait(facts: Facts) -> Finding | None:
    """TORCH_NCCL_BLOCKING_WAIT=1 makes the host wait for each collective, so it no longer runs ahead of the device."""
    if not _over_nccl(facts) or not facts.switched_on("TORCH_NCCL_BLOCKING_WAIT"):
        return None
    return Finding(
        option="TORCH_NCCL_BLOCKING_WAIT",
        value=facts.environment["TORCH_NCCL_BLOCKING_WAIT"],
        reason="the host waits for every collective, which hides less communication behind the computation",
        remedy="unset it; without it, too, a hang ends after collective_timeout_seconds",
    )


def one_connection(facts: Facts) -> Finding | None:
    """CUDA_DEVICE_MAX_CONNECTIONS=1 is set for tensor parallelism of Megatron-LM. It puts all streams into one hardware
    queue, where reductions wait for the kernels launched before them.
    """
    if not _over_nccl(facts) or facts.variable("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        return None
    return Finding(
        option="CUDA_DEVICE_MAX_CONNECTIONS",
        value=1,
        reason="communication and computation share one hardware queue and overlap less",
        remedy="unset it; CUDA's default is 8",
    )


def forced_protocol(facts: Facts) -> Finding | None:
    """NCCL chooses protocols by what the platform supports. LL128 on one that does not support it can corrupt data."""
    value = facts.variable("NCCL_PROTO")
    # ^ excludes protocols, so LL128 after it is switched off, not forced.
    if not _over_nccl(facts) or value.startswith("^") or "ll128" not in value.split(","):
        return None
    return Finding(
        option="NCCL_PROTO",
        value=facts.environment["NCCL_PROTO"],
        reason="LL128 is forced, which corrupts gradients on platforms without support for it",
        remedy="unset it; NCCL uses LL128 by itself where it is safe",
    )


def locked_memory(facts: Facts) -> Finding | None:
    """InfiniBand needs locked memory. If its limit is too low, NCCL fails in ibv_reg_mr, often with the first large
    bucket.
    """
    limit = facts.host.locked_memory_bytes
    if not _over_nccl(facts) or facts.layout.machines == 1 or not facts.host.has_infiniband:
        return None
    if limit >= LOCKED_MEMORY_NEEDED:
        return None
    return Finding(
        option="ulimit -l",
        value=f"{limit / 1024:.0f} KiB",
        reason="NCCL registers hundreds of MiB with the InfiniBand card and fails in ibv_reg_mr",
        remedy="run `ulimit -l unlimited` before the launch (docker: --ulimit memlock=-1)",
    )


NCCL_MANUAL = "NCCL user guide, environment variables"
HEADER = "torch: ProcessGroupNCCL.hpp"
NETWORK_RULES = (
    Rule("nccl-debug-left-on", "warning", NCCL_MANUAL, nccl_debug),
    Rule("distributed-debug-left-on", "warning", "torch: torch.distributed, debugging", distributed_debug),
    Rule("infiniband-switched-off", "warning", NCCL_MANUAL, infiniband_off),
    Rule("peer-to-peer-switched-off", "warning", NCCL_MANUAL, peer_to_peer_off),
    Rule("missing-interface", "warning", "docs/machines.md", missing_interface),
    Rule("loopback-between-machines", "error", "docs/machines.md", loopback_between_machines),
    Rule("collective-timeout-disarmed", "warning", HEADER, collective_timeout_disarmed),
    Rule("monitoring-switched-off", "warning", HEADER, monitoring_off),
    Rule("blocking-wait", "warning", HEADER, blocking_wait),
    Rule("one-device-connection", "warning", "verl-omni#421, torchtitan#1147", one_connection),
    Rule("forced-protocol", "warning", NCCL_MANUAL, forced_protocol),
    Rule("locked-memory-low", "warning", "NCCL user guide, troubleshooting", locked_memory),
)

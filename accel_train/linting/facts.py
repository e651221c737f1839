"""Facts for the rules of the linter: options, layout of the processes, host and environment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_train.data.options import BatchScheduleConfig

MIB = 2**20
GIB = 2**30
TRIAL_STEPS = 200
"""A run of at most this many steps is a trial. Rules about the length of a run leave it alone."""
TRUE = ("1", "true", "yes", "on")
FITS_EASILY = 0.4
"""Weights, gradients, optimizer and EMA fit up to this share of a device. The rest is activations."""


LARGE_UPDATE_BYTES = 10 * 2**30
"""Size of a training state whose update on each device takes longer than the host needs for FSDP2's hooks: reading and
writing it takes 7 ms at 3 TB/s."""


def divides_a_large_update(trained_bytes: float, micro_batches: int) -> bool:
    """Tell if sharding within one machine pays off although the training state fits on each device.

    ``trained_bytes`` is the state without frozen weights. With a single micro-batch per step, gathers cost no more than
    DDP's reduction.
    """
    return trained_bytes >= LARGE_UPDATE_BYTES and micro_batches == 1


def fits_easily(state_bytes: float, device_bytes: float) -> bool:
    """Tell if each device holds a whole training state with room for activations, so that nothing need be sharded."""
    return state_bytes <= FITS_EASILY * device_bytes


@dataclass(frozen=True)
class Device:
    """A visible accelerator."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """Processes and sharding, from the launch file or from the running processes."""

    strategy: str = "single"
    """single, ddp, fsdp2, zero1, zero2 or zero3."""
    processes: int = 1
    """Number of processes over all machines."""
    machines: int = 1
    device: str = "cpu"
    """cpu, or the type of the accelerators."""
    offload: bool = False
    """True if FSDP2 or ZeRO keep optimizer or weights in host memory."""
    reshard_after_forward: bool = True
    replicate_size: int | None = None
    """FSDP2: number of replicas, each a group of processes that shards alone. None: all processes are one group."""
    debug: bool = False
    chosen_devices: bool = False
    """True if the launch file names the devices."""

    @property
    def local_processes(self) -> int:
        """Processes on each machine."""
        # At least 1, because callers divide by it.
        return max(1, self.processes // self.machines)


@dataclass(frozen=True)
class Disk:
    """The place of the run directory."""

    filesystem: str = ""
    """Type as in /proc/mounts. Empty if unknown."""
    free_bytes: int | None = None
    is_temporary: bool = False
    """Below /tmp, /var/tmp or $TMPDIR."""


@dataclass(frozen=True)
class Host:
    """The machine of this process. None stands for unknown."""

    cores: int = 1
    """Cores usable by this process, by affinity and quota."""
    all_cores: int = 1
    memory_bytes: int | None = None
    """Memory of the host, or the limit of its cgroup."""
    shared_memory_bytes: int | None = None
    open_files: float | None = None
    core_file_bytes: float = 0
    """Maximum size of a core file. 0 if none is written, or if the system pipes it to a program."""
    locked_memory_bytes: float = math.inf
    interfaces: tuple[str, ...] = ()
    has_infiniband: bool = False
    devices: tuple[Device, ...] = ()
    output: Disk = field(default_factory=Disk)
    compile_cache_filesystem: str = ""
    forks: bool = True
    """True if DataLoader workers are forked, which is Python's default on Linux before 3.14."""
    has_fast_bf16: bool = True
    """True if torch computes bf16 matrix products on this CPU by oneDNN. For GPUs see ``Device.capability``."""
    seconds_left: float | None = None
    """Seconds until the scheduler ends the job."""


@dataclass(frozen=True)
class Facts:
    """Everything a rule may read, collected once."""

    options: Mapping[str, Any]
    """Values of the config by dotted name."""
    layout: Layout = field(default_factory=Layout)
    host: Host = field(default_factory=Host)
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    origins: Mapping[str, str] = field(default_factory=dict[str, str])
    """The place where each option was set: default, a preset or file, or the command line."""
    dataset_size: int | None = None
    """Samples of an epoch, once the data are open."""
    parameters: int | None = None
    """Trained parameters, once the model is counted."""
    frozen_bytes: int = 0
    """Weights on a device that are not trained, such as the base of adapters, once the model is counted."""

    def option(self, name: str, default: Any = None) -> Any:
        """Return an option's value, or ``default`` if this recipe has no such option."""
        return self.options.get(name, default)

    def number(self, name: str) -> float:
        """Return a numeric option, 0 for None, "auto" or an option missing from the recipe."""
        value = self.options.get(name)
        # "auto" counts as 0, so that rules compare numbers without asking for types.
        if isinstance(value, (int, float)):
            return value
        return 0

    def variable(self, name: str) -> str:
        """Return an environment variable in lower case, empty if it is not set."""
        return self.environment.get(name, "").strip().lower()

    def switched_on(self, name: str) -> bool:
        """Tell if an environment variable is 1, true, yes or on."""
        return self.variable(name) in TRUE

    @property
    def on_gpu(self) -> bool:
        """Tell if the run computes on accelerators."""
        return self.layout.device != "cpu"

    @property
    def steps(self) -> int | None:
        """Length of the run in optimizer steps. None if it depends on data that are not open yet."""
        # max_steps needs no data, so a run with it is judged at the start already.
        steps = self.option("max_steps")
        if steps is not None:
            return int(steps)
        if self.dataset_size is None:
            return None
        first, epochs = int(self.number("global_batch_size")), self.number("max_epochs")
        return self.batch_schedule.steps_for_epochs(first, epochs, self.dataset_size)

    @property
    def batch_schedule(self) -> BatchScheduleConfig:
        """Schedule of the batch size by the given steps. Growth by measured noise is not known in advance."""
        # Imported here, because it imports torch, which explaining a rule does not need.
        from accel_train.data.options import BatchScheduleConfig

        steps = tuple(self.option("batch_schedule.steps", ()))
        return BatchScheduleConfig(steps, tuple(self.option("batch_schedule.sizes", ())))

    @property
    def samples_per_step(self) -> float:
        """Mean samples per step over the run. ``global_batch_size`` while the length of the run is not known."""
        first = int(self.number("global_batch_size"))
        if not self.steps:
            return first
        return self.batch_schedule.samples_before(first, self.steps) / self.steps

    @property
    def is_smoke(self) -> bool:
        """Tell if the run was started with --smoke."""
        # --smoke is a set of values, not an option of the config: only the origins show it.
        return "--smoke" in self.origins.values()

    @property
    def is_trial(self) -> bool:
        """Tell if the run is too short for rules about length."""
        return self.is_smoke or (self.steps is not None and self.steps <= TRIAL_STEPS)

    @property
    def accumulation(self) -> int:
        """Micro-batches per process in the largest optimizer step."""
        # Rounded up: the process with the largest share sets the number of micro-batches for all.
        largest = self.batch_schedule.largest(int(self.number("global_batch_size")))
        share = math.ceil(largest / self.layout.processes)
        return math.ceil(share / max(1, self.number("micro_batch_size")))

    @property
    def compiles(self) -> bool:
        """Tell if the blocks are to be compiled."""
        return self.option("compile.mode", "off") != "off"

    @property
    def workers(self) -> int:
        """DataLoader workers per training process, with ``auto`` resolved as ``data.options`` does."""
        asked = self.option("loader.num_workers", 0)
        if asked != "auto":
            return int(asked)
        # On a CPU the training process needs the cores itself.
        if not self.on_gpu:
            return 0
        # It imports torch, which explaining a rule does not need.
        from accel_train.data.options import MAX_AUTO_WORKERS

        return min(MAX_AUTO_WORKERS, max(0, self.host.cores // self.layout.local_processes - 1))

    @property
    def state_bytes(self) -> int | None:
        """Bytes of weights, gradients, optimizer and EMA of the trained parameters, without frozen weights.

        None before they are counted, and for an optimizer with an unknown state.
        """
        from accel_train.speed.memory.fitting import OPTIMIZER_BYTES

        of_optimizer = OPTIMIZER_BYTES.get(str(self.option("optimizer.name")))
        if self.parameters is None or of_optimizer is None:
            return None
        # 4 bytes each for weight and gradient in fp32; the EMA below is fp32 too.
        each = 8 + of_optimizer
        if self.number("ema.decay") > 0:
            each += 4
        return self.parameters * each

    @property
    def held_bytes(self) -> int | None:
        """Bytes between two steps: ``state_bytes`` and the frozen weights."""
        state = self.state_bytes
        return None if state is None else state + self.frozen_bytes

    @property
    def device_bytes(self) -> int | None:
        """Memory of the smallest visible accelerator."""
        return min((device.memory_bytes for device in self.host.devices), default=None)

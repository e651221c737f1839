"""Rules about the host: cores, memory, shared memory, files, disks, time."""

from __future__ import annotations

from accel_train.linting.facts import GIB, MIB, Facts
from accel_train.linting.findings import Finding, Rule

SMALL_SHARED_MEMORY = 64 * MIB
"""Docker's default."""
TENSORS_OF_A_BATCH = 16
FILES_OF_A_PROCESS = 256
"""Descriptors open in a training process without its workers: libraries, sockets, logs, data."""
MANY_READ_AHEAD = 64
FEW_BYTES_FREE = GIB
BF16_CAPABILITY = (8, 0)
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "9p", "afs", "fuse.sshfs")
LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "ramfs")
OBJECT_STORES = ("fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.blobfuse2")


def small_shared_memory(facts: Facts) -> Finding | None:
    """DataLoader workers hand micro-batches over in /dev/shm. A container has 64 MiB of it by default, and a
    run that fills it ends with an error.
    """
    size = facts.host.shared_memory_bytes
    if facts.workers == 0 or size is None or size > SMALL_SHARED_MEMORY:
        return None
    # One /dev/shm serves all processes of the machine.
    waiting = _read_ahead(facts) * facts.layout.local_processes
    return Finding(
        option="/dev/shm",
        value=f"{size / MIB:.0f} MiB",
        reason=f"{waiting} micro-batches wait in it, and the run ends if a worker finds no room",
        remedy="start the container with --ipc=host or --shm-size=16g (Kubernetes: an emptyDir of medium Memory)",
    )


def _read_ahead(facts: Facts) -> int:
    """Return the number of micro-batches that wait for one training process."""
    # 2 is torch's default.
    each = facts.option("loader.prefetch_factor") or 2
    return facts.workers * int(each)


def workers_above_cores(facts: Facts) -> Finding | None:
    """`loader.num_workers` counts the reading processes of each training process. If there are more of them than cores,
    they wait for each other and for the training processes.
    """
    asked = facts.option("loader.num_workers")
    total = facts.workers * facts.layout.local_processes
    # auto divides the cores by itself.
    if asked == "auto" or total <= facts.host.cores:
        return None
    return Finding(
        option="loader.num_workers",
        value=asked,
        reason=f"{facts.layout.local_processes} training process(es) with {asked} workers each make {total} reading "
        f"processes on {facts.host.cores} core(s)",
        remedy="leave it at auto",
        change=("loader.num_workers", "auto"),
    )


def few_cores(facts: Facts) -> Finding | None:
    """A process on a GPU needs one core to launch kernels and one for everything else: reading, copies, saves. SLURM
    gives one core to a task unless --cpus-per-task says more.
    """
    cores = facts.host.cores
    local = facts.layout.local_processes
    if not facts.on_gpu or cores >= 2 * local:
        return None
    return Finding(
        option="cores",
        value=cores,
        reason=f"{local} training process(es), with their reading and saving, share {cores} core(s)",
        remedy="ask the scheduler for more (SLURM: --cpus-per-task), or start the launcher without a binding to cores",
    )


def few_open_files(facts: Facts) -> Finding | None:
    """Every tensor handed over by a worker is an open file of the training process until it is used."""
    limit = facts.host.open_files
    needed = FILES_OF_A_PROCESS + _read_ahead(facts) * TENSORS_OF_A_BATCH
    if limit is None or facts.workers == 0 or limit >= needed:
        return None
    return Finding(
        option="ulimit -n",
        value=int(limit),
        reason=f"{_read_ahead(facts)} micro-batches of about {TENSORS_OF_A_BATCH} tensors may be open at once: "
        f"{needed} files, so a start would fail with `Too many open files`",
        remedy="run `ulimit -n 65536` before the launch, or lower loader.prefetch_factor",
    )


def core_files(facts: Facts) -> Finding | None:
    """A crashing process writes its memory into a core file in the working directory, each process its own."""
    limit = facts.host.core_file_bytes
    # A smaller limit cuts the core file before it can fill a disk.
    if limit < GIB or not facts.on_gpu or facts.is_trial:
        return None
    return Finding(
        option="ulimit -c",
        value="unlimited" if limit == float("inf") else int(limit),
        reason=f"a crash writes {facts.layout.local_processes} core file(s), each as large as the host memory of a "
        "training process",
        remedy="run `ulimit -c 0` before the launch",
    )


def deep_read_ahead(facts: Facts) -> Finding | None:
    """Read-ahead hides uneven reading times. Beyond a few micro-batches it only takes shared memory."""
    waiting = _read_ahead(facts)
    # Without prefetch_factor the number of workers is the cause, and has its own rules.
    if waiting <= MANY_READ_AHEAD or facts.option("loader.prefetch_factor") is None:
        return None
    return Finding(
        option="loader.prefetch_factor",
        value=facts.option("loader.prefetch_factor"),
        reason=f"{facts.workers} workers read {waiting} micro-batches ahead, or {waiting / facts.accumulation:.0f} "
        "steps, and keep them in shared memory",
        remedy="leave it at 2 unless reading times vary by that much",
        change=("loader.prefetch_factor", 2),
    )


def pageable_memory(facts: Facts) -> Finding | None:
    """Copies from pageable memory do not overlap with computation."""
    if not facts.on_gpu or facts.option("loader.pin_memory") is not False:
        return None
    return Finding(
        option="loader.pin_memory",
        value=False,
        reason="each micro-batch is copied to the GPU while it waits",
        remedy="leave it at auto",
        change=("loader.pin_memory", "auto"),
    )


def no_bf16(facts: Facts) -> Finding | None:
    """bf16 needs compute capability 8.0. torch emulates it on older devices, slower than fp32. A start refuses."""
    old = [device for device in facts.host.devices if device.capability < BF16_CAPABILITY]
    if not facts.on_gpu or facts.option("precision") != "bf16" or not old:
        return None
    major, minor = old[0].capability
    return Finding(
        option="precision",
        value="bf16",
        reason=f"{old[0].name} has compute capability {major}.{minor}, and 8.0 is needed",
        remedy="give --precision fp16 or fp32",
    )


def bf16_on_old_cpu(facts: Facts) -> Finding | None:
    """torch has fast bf16 products on CPUs with AVX-512 or bf16 units. On a CPU without them, a step of a transformer
    took 19 times as long as in fp32.
    """
    if facts.on_gpu or facts.option("precision") != "bf16" or facts.host.has_fast_bf16:
        return None
    return Finding(
        option="precision",
        value="bf16",
        reason="torch has no fast bf16 matrix products on this CPU, and they take many times as long as in fp32",
        remedy="give --precision fp32, or run it on a GPU",
    )


def fp16_beside_bf16(facts: Facts) -> Finding | None:
    """fp16 overflows at 65504 and needs a loss scale, whose overflows skip steps. bf16 has the range of fp32 and the
    same speed.
    """
    devices = facts.host.devices
    new = [device for device in devices if device.capability >= BF16_CAPABILITY]
    # One old device among them is reason enough for fp16.
    if facts.option("precision") != "fp16" or not new or len(new) < len(devices):
        return None
    return Finding(
        option="precision",
        value="fp16",
        reason=f"{new[0].name} is as fast in bf16, with no loss scale and none of its skipped steps",
        remedy="give --precision bf16 to a new run",
    )


def output_in_memory(facts: Facts) -> Finding | None:
    """tmpfs is memory: checkpoints take it from the run and are lost at a reboot or with the container."""
    if facts.host.output.filesystem not in ("tmpfs", "ramfs") or facts.is_trial:
        return None
    return Finding(
        option="output_dir",
        value=facts.option("output_dir"),
        reason=f"it is on {facts.host.output.filesystem}: checkpoints take memory and are lost at a reboot",
        remedy="give a directory on a disk",
    )


def output_in_temporary(facts: Facts) -> Finding | None:
    """/tmp is emptied at a reboot, by systemd-tmpfiles after days, and by schedulers at the end of a job."""
    if not facts.host.output.is_temporary or facts.is_trial:
        return None
    return Finding(
        option="output_dir",
        value=facts.option("output_dir"),
        reason="it is a temporary directory, emptied by a reboot, a cleanup service or the end of a job",
        remedy="give a permanent directory",
    )


def output_in_container(facts: Facts) -> Finding | None:
    """The writable layer of a container is deleted with it, and slower than a volume."""
    if facts.host.output.filesystem != "overlay" or facts.is_trial:
        return None
    return Finding(
        option="output_dir",
        value=facts.option("output_dir"),
        reason="it is in the layer of this container, which is deleted with the container",
        remedy="mount a volume and give a directory on it",
    )


def output_on_object_store(facts: Facts) -> Finding | None:
    """A checkpoint is committed by renaming its directory. Object stores mounted as a filesystem copy every file for
    that, one after another, so an incomplete checkpoint may be visible.
    """
    kind = facts.host.output.filesystem
    if kind not in OBJECT_STORES:
        return None
    return Finding(
        option="output_dir",
        value=facts.option("output_dir"),
        reason=f"{kind} has no atomic rename of directories, which commits checkpoints elsewhere",
        remedy="write to a disk, and push to the Hub (hub.repo_id) or copy committed checkpoints",
    )


def output_not_shared(facts: Facts) -> Finding | None:
    """All machines write into one run directory. A start compares what they see, and refuses."""
    kind = facts.host.output.filesystem
    # Only types known to be local: an unknown one may be shared.
    if facts.layout.machines == 1 or kind not in LOCAL:
        return None
    return Finding(
        option="output_dir",
        value=facts.option("output_dir"),
        reason=f"{facts.layout.machines} machines need one directory that all of them see; {kind} is local",
        remedy="give a directory on a shared filesystem",
    )


def disk_nearly_full(facts: Facts) -> Finding | None:
    """A save without free space fails, and with `checkpoints.on_error: stop` the run fails with it."""
    free = facts.host.output.free_bytes
    # A fixed bound, because the model is not counted yet. `checkpoints_above_disk` compares with its size.
    if free is None or free >= FEW_BYTES_FREE or facts.is_trial:
        return None
    return Finding(
        option="output_dir",
        value=facts.option("output_dir"),
        reason=f"{free / GIB:.2f} GiB are free on its disk",
        remedy="free space, or give a directory on another disk",
    )


def checkpoints_above_disk(facts: Facts) -> Finding | None:
    """The next checkpoint is complete before the oldest is deleted, so one more than `keep_last` must fit."""
    free = facts.host.output.free_bytes
    state = facts.state_bytes
    kept = int(facts.number("checkpoints.keep_last"))
    # Without optimizer state a checkpoint is smaller than `state_bytes`.
    if free is None or state is None or kept == 0 or not facts.option("checkpoints.save_state"):
        return None
    # Gradients are not saved.
    each = state - 4 * (facts.parameters or 0)
    needed = (kept + 1) * each
    if needed <= free:
        return None
    return Finding(
        option="checkpoints.keep_last",
        value=kept,
        reason=f"{kept + 1} checkpoints of {each / GIB:.1f} GiB are on the disk at once, and {free / GIB:.1f} GiB are "
        "free",
        remedy="free space, keep fewer, or drop old optimizer states with checkpoints.keep_state_last",
    )


def host_memory_of_offload(facts: Facts) -> Finding | None:
    """Offload holds 16 bytes per parameter in host memory over all processes of a machine. A save in the background
    takes as much again for its snapshot.
    """
    memory = facts.host.memory_bytes
    if not facts.layout.offload or facts.parameters is None or memory is None:
        return None
    asynchronous = bool(facts.option("checkpoints.asynchronous"))
    # fp32 weight, gradient and two moments of Adam, 4 bytes each; the snapshot doubles them.
    each = 32 if asynchronous else 16
    needed = facts.parameters * each / facts.layout.machines
    if needed <= memory:
        return None
    remedy = "use more machines"
    if asynchronous:
        remedy = f"give --checkpoints.no_asynchronous, or {remedy}"
    return Finding(
        option="offload",
        value=facts.layout.strategy,
        reason=f"{facts.parameters:,} parameters take {needed / GIB:.0f} GiB of host memory during a save "
        f"({each} bytes each), and there are {memory / GIB:.0f} GiB",
        remedy=remedy,
    )


def time_limit(facts: Facts) -> Finding | None:
    """A save by the clock that is due after the scheduler ends the job never happens. What the grace period does not
    save is lost.
    """
    left = facts.host.seconds_left
    if left is None or facts.option("checkpoints.save_every") or facts.option("checkpoints.save_every_epochs"):
        return None
    given = facts.option("checkpoints.save_every_minutes")
    # 10 is the default if no other interval is given.
    minutes = 10.0 if given is None else float(given)
    if minutes and minutes * 60 < left:
        return None
    return Finding(
        option="checkpoints.save_every_minutes",
        value=given,
        reason=f"the scheduler ends this job in {left / 60:.0f} minutes, and no save is due before that",
        remedy="save more often, or ask for more time",
        # A quarter of the time left, in minutes: several saves before the end.
        change=("checkpoints.save_every_minutes", max(1.0, float(left // 240))),
    )


def compile_cache_on_network(facts: Facts) -> Finding | None:
    """The compiler's cache is thousands of small files, which all processes write and lock at once."""
    kind = facts.host.compile_cache_filesystem
    if not facts.compiles or kind not in NETWORK:
        return None
    return Finding(
        option="TORCHINDUCTOR_CACHE_DIR",
        value=kind,
        reason=f"{facts.layout.processes} process(es) write thousands of small compiler files to a network disk",
        remedy="point it, and TRITON_CACHE_DIR, to a local disk",
    )


DISKS = "docs/checkpoints.md"
LIMIT_RULES = (
    Rule("shared-memory-small", "warning", "pytorch#5040", small_shared_memory),
    Rule("workers-above-cores", "warning", "torch: DataLoader, suggested number of workers", workers_above_cores),
    Rule("few-cores", "warning", "SLURM: srun --cpus-per-task", few_cores),
    Rule("few-open-files", "warning", "pytorch#973", few_open_files),
    Rule("core-files", "warning", "core(5)", core_files),
    Rule("deep-read-ahead", "warning", "torch: DataLoader, prefetch_factor", deep_read_ahead),
    Rule("pageable-memory", "warning", "torch: DataLoader, memory pinning", pageable_memory),
    Rule("no-bf16", "warning", "torch: torch.cuda.is_bf16_supported", no_bf16),
    Rule("bf16-on-old-cpu", "warning", "oneDNN: data types, bf16", bf16_on_old_cpu),
    Rule("fp16-beside-bf16", "warning", "docs/optimizations.md", fp16_beside_bf16),
    Rule("output-in-memory", "warning", "tmpfs(5)", output_in_memory),
    Rule("output-in-temporary", "warning", "tmpfiles.d(5)", output_in_temporary),
    Rule("output-in-container", "warning", "Docker: storage drivers", output_in_container),
    Rule("output-on-object-store", "warning", DISKS, output_on_object_store),
    Rule("output-not-shared", "warning", "docs/machines.md", output_not_shared),
    Rule("disk-nearly-full", "warning", DISKS, disk_nearly_full),
    Rule("checkpoints-above-disk", "warning", DISKS, checkpoints_above_disk, "model"),
    Rule("host-memory-of-offload", "error", "docs/machines.md", host_memory_of_offload, "model"),
    Rule("time-limit-before-save", "warning", "SLURM: sbatch, SLURM_JOB_END_TIME", time_limit),
    Rule("compile-cache-on-network", "warning", "torch: torch.compile, caching", compile_cache_on_network),
)

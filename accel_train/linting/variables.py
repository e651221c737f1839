"""Rules about environment variables of torch, CUDA, OpenMP, the Hub and trackers."""

from __future__ import annotations

from accel_train.linting.facts import Facts
from accel_train.linting.findings import Finding, Rule

THREADS = "OMP_NUM_THREADS"
OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
NEW_ALLOCATOR = "PYTORCH_ALLOC_CONF"
NO_COMPILATION = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
NO_COMPILE_CACHE = ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "TORCH_COMPILE_FORCE_DISABLE_CACHES")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
TF32 = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
RUST_THREADS = "TOKENIZERS_PARALLELISM"  # of the package tokenizers
OBSOLETE = {
    "TRANSFORMERS_CACHE": "transformers 5 does not read it; HF_HOME moves the cache",
    "HF_HUB_ENABLE_HF_TRANSFER": "huggingface_hub 1 has dropped hf_transfer; HF_XET_HIGH_PERFORMANCE takes its place",
}
BINDINGS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND")


def _first_set(facts: Facts, names: tuple[str, ...]) -> str | None:
    # torch accepts 1 and no other value.
    return next((name for name in names if facts.variable(name) == "1"), None)


def launch_blocking(facts: Facts) -> Finding | None:
    """CUDA_LAUNCH_BLOCKING=1 waits for each kernel, so that an error names its line. The device idles between any two
    kernels.
    """
    if not facts.on_gpu or facts.variable("CUDA_LAUNCH_BLOCKING") in ("", "0"):
        return None
    return Finding(
        option="CUDA_LAUNCH_BLOCKING",
        value=facts.environment["CUDA_LAUNCH_BLOCKING"],
        reason="the host waits for every kernel, and no copy or reduction overlaps with computation",
        remedy="unset it once the error is found",
    )


def allocator_set_twice(facts: Facts) -> Finding | None:
    """If both names are set, torch 2.13 reads settings of all allocators from the new one, and settings of CUDA's
    alone, such as the backend, from the old one.
    """
    old = facts.environment.get(OLD_ALLOCATOR)
    new = facts.environment.get(NEW_ALLOCATOR)
    if old is None or new is None or old == new or not facts.on_gpu:
        return None
    return Finding(
        option=NEW_ALLOCATOR,
        value=new,
        reason=f"{OLD_ALLOCATOR}={old} is set as well, and torch reads some settings from one, some from the other",
        remedy=f"put everything into {NEW_ALLOCATOR} and unset {OLD_ALLOCATOR}",
    )


def no_memory_caching(facts: Facts) -> Finding | None:
    """Without the caching allocator every tensor is a cudaMalloc and a cudaFree, and each free waits for the device.
    It is meant for compute-sanitizer only.
    """
    name = "PYTORCH_NO_CUDA_MEMORY_CACHING"
    if not facts.on_gpu or name not in facts.environment or facts.is_trial:
        return None
    return Finding(
        option=name,
        value=facts.environment[name],
        reason="every tensor is allocated and freed by the driver, which waits for the device",
        remedy="unset it",
    )


def compiler_logs(facts: Facts) -> Finding | None:
    """TORCH_LOGS prints the compiler's work, with `+` every guard of every graph, in every process."""
    # Without compilation the compiler logs nothing.
    if "TORCH_LOGS" not in facts.environment or not facts.compiles or facts.is_trial:
        return None
    return Finding(
        option="TORCH_LOGS",
        value=facts.environment["TORCH_LOGS"],
        reason=f"the compiler's logs go to the console of {facts.layout.processes} process(es) in a long run",
        remedy="unset it; the run records its recompilations and their guards without it",
    )


def compile_debug(facts: Facts) -> Finding | None:
    """TORCH_COMPILE_DEBUG=1 writes every graph and its generated code into torch_compile_debug in the working
    directory.
    """
    if facts.variable("TORCH_COMPILE_DEBUG") != "1" or not facts.compiles or facts.is_trial:
        return None
    return Finding(
        option="TORCH_COMPILE_DEBUG",
        value=facts.environment["TORCH_COMPILE_DEBUG"],
        reason=f"{facts.layout.processes} process(es) write every graph and kernel into torch_compile_debug",
        remedy="unset it",
    )


def compilation_off(facts: Facts) -> Finding | None:
    """TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE switch torch.compile off for the process. With `compile.mode: on`
    a start refuses, with `auto` it continues uncompiled.
    """
    name = _first_set(facts, NO_COMPILATION)
    if name is None or not facts.compiles:
        return None
    return Finding(
        option="compile.mode",
        value=facts.option("compile.mode"),
        reason=f"{name}={facts.environment[name]} switches torch.compile off",
        remedy=f"unset {name}",
    )


def compile_cache_off(facts: Facts) -> Finding | None:
    """Without the caches of the compiler every start compiles again, even a restart after a preemption."""
    name = _first_set(facts, NO_COMPILE_CACHE)
    if name is None or not facts.compiles or facts.is_trial:
        return None
    return Finding(
        option=name,
        value=facts.environment[name],
        reason="every start and every restart compiles all blocks again",
        remedy="unset it",
    )


def parallel_tokenizers(facts: Facts) -> Finding | None:
    """Fast tokenizers switch their threads off in a process that was forked after they were used. Set to true, the
    variable keeps them on, and the first batch that a worker encodes may wait forever.
    """
    if not facts.switched_on(RUST_THREADS) or facts.workers == 0 or not facts.host.forks:
        return None
    return Finding(
        option=RUST_THREADS,
        value=facts.environment[RUST_THREADS],
        reason=f"{facts.workers} reading processes are forked with the threads of fast tokenizers switched on, and "
        "threads do not survive a fork",
        remedy="unset it, or set it to false",
    )


def hub_offline(facts: Facts) -> Finding | None:
    """HF_HUB_OFFLINE=1 and TRANSFORMERS_OFFLINE=1 forbid every request to the Hub, pushes as well. A start refuses."""
    # huggingface_hub reads the second only if the first is not set.
    name = next((each for each in OFFLINE if facts.variable(each)), None)
    if name is None or not facts.switched_on(name) or facts.option("hub.repo_id") is None:
        return None
    return Finding(
        option="hub.repo_id",
        value=facts.option("hub.repo_id"),
        reason=f"{name}={facts.environment[name]} forbids requests to the Hub, so nothing can be pushed",
        remedy=f"unset {name}, or leave hub.repo_id out and push later: accel-train checkpoints push RUN",
    )


def obsolete_variable(facts: Facts) -> Finding | None:
    """Variables of older versions of transformers and huggingface_hub no longer have an effect."""
    for name, problem in OBSOLETE.items():
        if name in facts.environment:
            return Finding(
                option=name,
                value=facts.environment[name],
                reason=problem,
                remedy=f"unset {name}",
            )
    return None


def forced_tf32(facts: Facts) -> Finding | None:
    """TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 lets torch round the inputs of fp32 matrix products to 10 bits of fraction."""
    if facts.variable(TF32) != "1" or not facts.on_gpu or facts.option("precision") != "fp32":
        return None
    return Finding(
        option=TF32,
        value=1,
        reason="precision: fp32 is asked for, but matrix products round their inputs to 10 bits instead of 23",
        remedy=f"unset {TF32}; for speed give --precision bf16, which the run records",
    )


def tracker_off(facts: Facts) -> Finding | None:
    """WANDB_MODE=disabled makes W&B accept every call and record nothing."""
    trackers = facts.option("log.trackers", ())
    if "wandb" not in trackers or facts.variable("WANDB_MODE") != "disabled":
        return None
    return Finding(
        option="log.trackers",
        value=list(trackers),
        reason="WANDB_MODE=disabled: wandb accepts every figure and records none",
        remedy="unset WANDB_MODE, or set it to offline",
    )


def threads_above_cores(facts: Facts) -> Finding | None:
    """Each process computes with OMP_NUM_THREADS threads. With more threads than cores each parallel region waits for
    the thread that is not running. Unset, the run divides the cores by itself.
    """
    value = facts.variable(THREADS)
    # OpenMP also takes a list, with a number for each level of nested regions. It is left alone.
    if not value.isdecimal():
        return None
    threads = int(value) * facts.layout.local_processes
    cores = facts.host.cores
    # One thread per process cannot be lowered: too many processes are another rule's finding.
    if int(value) <= 1 or threads <= cores:
        return None
    return Finding(
        option=THREADS,
        value=value,
        reason=f"{facts.layout.local_processes} process(es) with {value} threads each make {threads} threads on "
        f"{cores} core(s)",
        remedy="unset it, or give at most the cores divided by the processes",
    )


def bound_threads(facts: Facts) -> Finding | None:
    """A binding of OpenMP threads to cores counts from the same first core in every process, and reading processes
    inherit the core of their parent. If a launcher gives each process its own cores, it does no harm.
    """
    name = next((each for each in BINDINGS if facts.environment.get(each)), None)
    sharing = facts.layout.local_processes + facts.workers
    # Fewer usable cores than the host has: a launcher has bound each process already.
    if name is None or sharing == 1 or facts.host.cores < facts.host.all_cores:
        return None
    # Each variable has its own word for no binding.
    if facts.variable(name) in ("false", "disabled", "none"):
        return None
    return Finding(
        option=name,
        value=facts.environment[name],
        reason=f"{facts.layout.local_processes} process(es) with {facts.workers} reading process(es) each are bound to "
        f"the same first cores of {facts.host.all_cores}",
        remedy="unset it, or bind each process to its own cores with numactl or the scheduler",
    )


VARIABLE_RULES = (
    Rule("launch-blocking", "warning", "torch: CUDA environment variables", launch_blocking),
    Rule("allocator-set-twice", "warning", "torch: c10/cuda/CUDAAllocatorConfig.h", allocator_set_twice),
    Rule("no-memory-caching", "warning", "torch: CUDA environment variables", no_memory_caching),
    Rule("compiler-logs-left-on", "warning", "torch: torch._logging", compiler_logs),
    Rule("compile-debug-left-on", "warning", "torch: torch/_inductor/config.py", compile_debug),
    Rule("compilation-switched-off", "warning", "torch: torch/_dynamo/config.py", compilation_off),
    Rule("compile-cache-switched-off", "warning", "torch: torch/compiler/config.py", compile_cache_off),
    Rule("parallel-tokenizers-in-workers", "warning", "transformers#5486, allennlp#4330", parallel_tokenizers),
    Rule("hub-offline-with-push", "error", "huggingface_hub: HF_HUB_OFFLINE", hub_offline),
    Rule("obsolete-variable", "warning", "huggingface_hub: constants.py", obsolete_variable),
    Rule("forced-tf32", "warning", "torch: aten/src/ATen/Context.h", forced_tf32),
    Rule("tracker-switched-off", "warning", "wandb: WANDB_MODE", tracker_off),
    Rule("threads-above-cores", "warning", "docs/machines.md", threads_above_cores),
    Rule("threads-bound-alike", "warning", "pytorch#101850, tensorflow#29354", bound_threads),
)

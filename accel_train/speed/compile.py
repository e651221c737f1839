"""torch.compile, block by block and in place: names stay, the second block reuses the code of the first.

Order: `apply_attention`, `apply_activation_checkpointing`, `apply_compile`, then the optimizer and `prepare`.
Compiled code is kept on disk between runs in TORCHINDUCTOR_CACHE_DIR (by default below /tmp): on a cluster set it to
a directory that outlives the job, and a restart compiles in seconds.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from accel_train.config import PositiveInt, UsageError
from accel_train.runtime.compiler import compiler_error, paths_with_a_space
from accel_train.speed.activation_checkpointing import blocks_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompileConfig:
    """Compilation of the model's blocks by torch.compile, each in place and with fullgraph=True."""

    mode: Literal["off", "auto", "on"] = "off"
    """on: compile, or stop with the cause. auto: compile where that works, else run uncompiled and say so. It pays
    where a step is bound by launches and elementwise work (small models on a GPU; not yet measured), little where
    matrix products dominate; measure with `accel-train compare`. Evaluation and sampling run uncompiled."""
    optimize: Literal["default", "max-autotune-no-cudagraphs", "reduce-overhead"] = "default"
    """torch's mode. max-autotune-no-cudagraphs tries kernels and compiles longer where there are several, on a GPU.
    reduce-overhead replays CUDA graphs: it needs a GPU and one micro-batch per step."""
    dynamic: bool = False
    """False: one compilation per shape. True: where a second shape comes, one compilation for all further ones:
    for batches whose lengths vary, at some speed."""
    recompile_budget: PositiveInt = 8
    """Compilations of a code that was compiled before; above it a warning names the guard that failed."""


class CompiledBlocks:
    """What `apply_compile` did, and what compilation has cost since. One per process."""

    def __init__(self, config: CompileConfig, blocks: int, notice: str) -> None:
        self.config = config
        self.blocks = blocks
        """How many blocks are compiled: 0 where it is off."""
        self.notice = notice
        """A line for the log: what was decided and why."""
        self.failure: str | None = None
        """Why the blocks run uncompiled though they were to be compiled."""
        self.seconds = 0.0
        """Spent in calls that compiled, their first run included."""
        self.graphs = 0
        self.recompilations = 0
        self.guards: list[str] = []
        """Of each recompilation, the guard that failed."""

    def fields(self) -> dict[str, Any]:
        """For metrics.jsonl, at log points: costs nothing, waits for nothing. Empty where compile is off."""
        if not self.blocks:
            return {}
        counts = {"compile_graphs": self.graphs, "compile_recompilations": self.recompilations}
        failed = {"compile_failure": self.failure} if self.failure else {}
        return {"compile_seconds": round(self.seconds, 3), **counts, **failed}

    def record(self, seconds: float, reasons: list[str | None]) -> None:
        """Count graphs compiled in one call, each with the guard behind it, None for a first compilation."""
        if not self.graphs:
            logger.info(f"compile: one graph for {self.blocks} blocks, compiled in {seconds:.1f} s")
        self.seconds += seconds
        self.graphs += len(reasons)
        again = [reason for reason in reasons if reason]
        before = self.recompilations
        self.recompilations += len(again)
        self.guards.extend(again)
        if before <= self.config.recompile_budget < self.recompilations:
            logger.warning(
                f"compile: {self.recompilations} recompilations, the budget compile.recompile_budget is "
                f"{self.config.recompile_budget}. The last guard that failed: {self.guards[-1]}. Each costs seconds: "
                "make shapes fewer (drop the ragged last batch, fewer length buckets), or set compile.dynamic true."
            )

    def fail(self, error: BaseException) -> None:
        """A block did not compile: stop with mode on, go on uncompiled with auto."""
        cause = _cause(error)
        if "deepspeed" in cause.lower() and not compiler_error(str(_innermost(error))):
            cause = f"ZeRO-3 fetches weights in hooks inside the block, which cannot be compiled as one graph ({cause})"
        if torn := _torn_library(error):
            cause = f"a process was killed while it compiled and left half a library: delete {torn} ({cause})"
        if self.config.mode == "on":
            raise UsageError(
                f"compile.mode on: torch.compile failed: {cause}. Set compile.mode to auto to go on uncompiled, or "
                "off; TORCH_LOGS=+dynamo shows more."
            ) from error
        self.failure = cause
        logger.warning(f"compile: torch.compile failed, the blocks run uncompiled from here on: {cause}")


def apply_compile(
    model: nn.Module,
    config: CompileConfig,
    device: torch.device,
    accumulation_steps: int = 1,
    backend: str = "inductor",
) -> CompiledBlocks:
    """Compile every block of `blocks_of(model)` in place; compilation itself happens in the first training step.

    Call it on every process, after activation checkpointing and before the optimizer and `prepare`. Sets two
    options of torch for the process: backwards are compiled with their forward, so that a failure shows where it can
    be handled, and the limit of recompilations is lifted above `recompile_budget`. Raises `UsageError` for what
    cannot work: with mode on a missing compiler, and in any mode reduce-overhead without a GPU or with accumulation.
    """
    _refuse(config, device, accumulation_steps)
    if config.mode == "off":
        return CompiledBlocks(config, 0, "compile: off")
    if reason := _why_not(device, backend):
        if config.mode == "on":
            raise UsageError(f"compile.mode on: cannot compile: {reason}. Or set compile.mode to auto or off.")
        return CompiledBlocks(config, 0, f"compile: off (auto: {reason})")
    blocks = blocks_of(model)
    names = f"{len(blocks)} blocks ({type(blocks[0]).__name__})"
    watch = CompiledBlocks(config, len(blocks), f"compile: {names} in place, {backend}, {config.optimize}")
    _set_torch(config)
    for block in blocks:
        block.compile(
            backend=backend,
            mode=None if config.optimize == "default" else config.optimize,
            fullgraph=True,
            dynamic=None if config.dynamic else False,
        )
        block._compiled_call_impl = _Watched(block, watch)  # pyright: ignore[reportPrivateUsage]
    return watch


class _Watched:
    """The compiled call of one block. Counts what it compiles; runs the plain one without gradients, so that
    evaluation with its own shapes compiles nothing, and after a failure."""

    def __init__(self, block: nn.Module, watch: CompiledBlocks) -> None:
        compiled = block._compiled_call_impl  # pyright: ignore[reportPrivateUsage]
        assert compiled is not None
        self.compiled: Callable[..., Any] = compiled
        self.plain: Callable[..., Any] = block._call_impl  # pyright: ignore[reportPrivateUsage]
        self.watch = watch

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.watch.failure is not None or not torch.is_grad_enabled():
            return self.plain(*arguments, **named)
        before, started = _graphs(), time.perf_counter()
        try:
            result = self.compiled(*arguments, **named)
        except _compile_errors() as error:
            self.watch.fail(error)
            return self.plain(*arguments, **named)
        if made := _graphs() - before:
            self.watch.record(time.perf_counter() - started, _reasons(made))
        return result


def _refuse(config: CompileConfig, device: torch.device, accumulation_steps: int) -> None:
    if config.mode == "off" or config.optimize != "reduce-overhead":
        return
    if device.type != "cuda":
        raise UsageError(
            f"compile.optimize reduce-overhead: replays CUDA graphs and the device is {device.type}. Set it to default."
        )
    if accumulation_steps > 1:
        raise UsageError(
            f"compile.optimize reduce-overhead: fails with accumulation (pytorch#169545), here {accumulation_steps} "
            "micro-batches per step. Set it to default, or raise micro_batch_size until there is one."
        )


def _why_not(device: torch.device, backend: str) -> str | None:
    """What is missing for torch.compile here, in words and with the remedy; nothing is compiled for it."""
    from torch._dynamo import config as dynamo

    if dynamo.disable:
        return "it is switched off in the environment (unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE)"
    if dynamo.suppress_errors:
        return "failures would be silent (unset TORCHDYNAMO_SUPPRESS_ERRORS)"
    if backend != "inductor":
        return None
    if device.type == "cuda":
        return None if find_spec("triton") else "triton cannot be imported (pip install triton)"
    return _why_no_compiler()


def _why_no_compiler() -> str | None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError as error:
        return f"there is no working C++ compiler: {_cause(error)} (apt install g++, or set CXX)"
    return None


def _set_torch(config: CompileConfig) -> None:
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    functorch.force_non_lazy_backward_lowering = True
    # Above torch's limit of 8 fullgraph=True stops the run, in the middle of it.
    dynamo.recompile_limit = max(dynamo.recompile_limit, 64, 4 * config.recompile_budget)


def _compile_errors() -> tuple[type[BaseException], ...]:
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return (TorchDynamoException, FailOnRecompileLimitHit)


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _reasons(count: int) -> list[str | None]:
    """Of the last `count` graphs: the first line of the guard that failed, None for code never compiled before."""
    from torch._dynamo.utils import get_compilation_metrics

    frames = [entry for entry in get_compilation_metrics() if entry.is_forward]
    found = [entry.recompile_reason for entry in frames[-count:]]
    return [reason.splitlines()[0] if reason else None for reason in found]


def _torn_library(error: BaseException) -> str | None:
    """The file in torch's cache that the loader of libraries cannot read. torch links it in place."""
    torn = re.search(r"(/.+?\.so): (file too short|invalid ELF header|cannot read file data)", str(_innermost(error)))
    return torn[1] if torn else None


def _innermost(error: BaseException) -> BaseException:
    while (inner := error.__cause__) is not None:
        error = inner
    return getattr(error, "inner_exception", None) or error


def _cause(error: BaseException) -> str:
    """The innermost cause, on one line: the compiler's own where there is one, with the path at which it broke."""
    error = _innermost(error)
    said = compiler_error(str(error))
    words = [said or " ".join(str(error).split())[:400], *(paths_with_a_space() if said else ())]
    return f"{type(error).__name__}: {'; '.join(words)}".rstrip(". ")

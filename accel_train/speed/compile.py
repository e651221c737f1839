"""torch.compile, block by block and in place: parameter names stay, and all blocks share the code of the first.

Order: `apply_attention`, `apply_activation_checkpointing`, `apply_compile`, then the optimizer and `prepare`.
Compiled code is cached between runs in TORCHINDUCTOR_CACHE_DIR (by default below /tmp). On a cluster set it to a
directory that outlives the job, and a restart compiles in seconds.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from accel_train.config import UsageError
from accel_train.speed.blocks import blocks_of, classes_of
from accel_train.speed.compiler import compiler_error, paths_with_a_space
from accel_train.speed.options import CompileConfig

logger = logging.getLogger(__name__)


class CompiledBlocks:
    """Result of `apply_compile`, with the cost of compilations since then. One per process."""

    def __init__(self, config: CompileConfig, blocks: int, notice: str) -> None:
        self.config = config
        self.blocks = blocks
        """Number of compiled blocks, 0 where compilation is off."""
        self.notice = notice
        """Log line with the decision and its reason."""
        self.failure: str | None = None
        """Cause of a failed compilation. The blocks then run uncompiled."""
        self.seconds = 0.0
        """Time of the calls that compiled, including their first run."""
        self.graphs = 0
        self.recompilations = 0
        self.guards: list[str] = []
        """The failed guard of each recompilation."""

    def fields(self) -> dict[str, Any]:
        """Return fields for metrics.jsonl at log points, without cost or wait. Empty where compilation is off."""
        if not self.blocks:
            return {}
        fields: dict[str, Any] = {
            "compile_seconds": round(self.seconds, 3),
            "compile_graphs": self.graphs,
            "compile_recompilations": self.recompilations,
        }
        if self.failure:
            fields["compile_failure"] = self.failure
        return fields

    def record(self, seconds: float, reasons: list[str | None]) -> None:
        """Count the graphs compiled in one call, each with its failed guard, None for a first compilation."""
        if not self.graphs:
            logger.info(f"compile: one graph for {self.blocks} blocks, compiled in {seconds:.1f} s")
        self.seconds += seconds
        self.graphs += len(reasons)
        again = [reason for reason in reasons if reason]
        before = self.recompilations
        self.recompilations += len(again)
        self.guards.extend(again)
        if before <= self.config.recompile_budget < self.recompilations:  # warn once
            logger.warning(
                f"compile: {self.recompilations} recompilations, the budget compile.recompile_budget is "
                f"{self.config.recompile_budget}. The last guard that failed: {self.guards[-1]}. Each costs seconds: "
                "use fewer shapes (drop the ragged last batch, fewer length buckets), or set compile.dynamic true."
            )

    def fail(self, error: BaseException) -> None:
        """Handle a failed compilation: stop with mode on, continue uncompiled with auto."""
        cause = _cause(error)
        # An error of the C++ compiler may contain the word in a path, such as that of the environment.
        if "deepspeed" in cause.lower() and not compiler_error(str(_innermost(error))):
            cause = f"ZeRO-3 fetches weights in hooks inside the block, which cannot be compiled as one graph ({cause})"
        # A later start would fail on the same torn file, because the cache trusts any file that exists.
        torn = _torn_library(error)
        if torn:
            cause = f"a process was killed while it compiled and left an incomplete library: delete {torn} ({cause})"
        if self.config.mode == "on":
            raise UsageError(
                f"compile.mode on: torch.compile failed: {cause}. Set compile.mode to auto to continue uncompiled, or "
                "off; TORCH_LOGS=+dynamo shows more."
            ) from error
        self.failure = cause
        logger.warning(f"compile: torch.compile failed, the blocks run uncompiled from now on: {cause}")


def apply_compile(
    model: nn.Module,
    config: CompileConfig,
    device: torch.device,
    accumulation_steps: int = 1,
    backend: str = "inductor",
) -> CompiledBlocks:
    """Set up every block of `blocks_of(model)` for compilation, in place. They compile in the first training step.

    Call it on every process, after activation checkpointing and before the optimizer and `prepare`. Sets options of
    torch for the process: backwards are compiled with their forward, so that a failure can be handled there, the
    recompilation limit is raised above `recompile_budget`, DDP's buckets split no block, and on a GPU the compiler's
    heuristics change. Raises `UsageError` for a missing compiler with mode on, and in any mode for reduce-overhead
    without a GPU or with accumulation.
    """
    _refuse(config, device, accumulation_steps)
    if config.mode == "off":
        return CompiledBlocks(config, 0, "compile: off")
    reason = _why_not(device, backend)
    if reason and config.mode == "on":
        raise UsageError(f"compile.mode on: cannot compile: {reason}. Or set compile.mode to auto or off.")
    reason = reason or _why_no_gain(config, device, backend)
    if reason:
        return CompiledBlocks(config, 0, f"compile: off (auto: {reason})")
    blocks = blocks_of(model)
    names = f"{len(blocks)} blocks ({classes_of(blocks)})"
    # One for all blocks, because they share their code: a recompilation belongs to none of them.
    watch = CompiledBlocks(config, len(blocks), f"compile: {names} in place, {backend}, {config.optimize}")
    _set_torch(config, device)
    for block in blocks:
        block.compile(
            backend=backend,
            mode=None if config.optimize == "default" else config.optimize,
            fullgraph=True,  # a graph break is an error: torch would silently run that part uncompiled
            dynamic=None if config.dynamic else False,  # None: torch generalises at the second shape, not the first
        )
        # `Module.__call__` calls this, where it is set, instead of `_call_impl`.
        block._compiled_call_impl = _Watched(block, watch)  # pyright: ignore[reportPrivateUsage]
    return watch


class _Watched:
    """The compiled call of one block, with a count of its compilations.

    Without gradients the plain call runs, so that evaluation with its own shapes compiles nothing. The same holds
    after a failure.
    """

    def __init__(self, block: nn.Module, watch: CompiledBlocks) -> None:
        compiled = block._compiled_call_impl  # pyright: ignore[reportPrivateUsage]
        assert compiled is not None
        self.compiled: Callable[..., Any] = compiled
        self.plain: Callable[..., Any] = block._call_impl  # pyright: ignore[reportPrivateUsage]
        self.watch = watch

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.watch.failure is not None or not torch.is_grad_enabled():
            return self.plain(*arguments, **named)
        # A counter of torch, read on the host: it costs nothing where no graph was compiled.
        before = _graphs()
        started = time.perf_counter()
        try:
            result = self.compiled(*arguments, **named)
        except _compile_errors() as error:
            # Returns with mode auto. From here on every block takes its plain call.
            self.watch.fail(error)
            return self.plain(*arguments, **named)
        compiled = _graphs() - before
        if compiled:
            self.watch.record(time.perf_counter() - started, _reasons(compiled))
        return result


def _refuse(config: CompileConfig, device: torch.device, accumulation_steps: int) -> None:
    if config.mode == "off" or config.optimize != "reduce-overhead":
        return
    if device.type != "cuda":
        raise UsageError(
            f"compile.optimize reduce-overhead: replays CUDA graphs, but the device is {device.type}. Set it to "
            "default."
        )
    if accumulation_steps > 1:
        raise UsageError(
            f"compile.optimize reduce-overhead: fails with accumulation (pytorch#169545), here {accumulation_steps} "
            "micro-batches per step. Set it to default, or raise micro_batch_size until there is one."
        )


def _why_not(device: torch.device, backend: str) -> str | None:
    """Return the obstacle to torch.compile here, with the remedy, or None. Compiles nothing."""
    from torch._dynamo import config as dynamo

    if dynamo.disable:
        return "it is switched off in the environment (unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE)"
    # torch would silently continue uncompiled, and the option would be ignored.
    if dynamo.suppress_errors:
        return "failures would be silent (unset TORCHDYNAMO_SUPPRESS_ERRORS)"
    if backend != "inductor":
        return None
    if device.type != "cuda":
        return _why_no_compiler()
    if find_spec("triton") is None:
        return "triton cannot be imported (pip install triton)"
    return None


def _why_no_gain(config: CompileConfig, device: torch.device, backend: str) -> str | None:
    """Return why `auto` leaves blocks uncompiled that could be compiled, or None."""
    if config.mode == "on" or device.type != "cpu" or backend != "inductor":
        return None
    return (
        "on a CPU compiling makes blocks about a tenth faster and whole steps of the demos no faster, and takes half "
        "a minute; compile.mode on compiles anyway"
    )


def _why_no_compiler() -> str | None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError as error:
        return f"there is no working C++ compiler: {_cause(error)} (apt install g++, or set CXX)"
    return None


def _set_torch(config: CompileConfig, device: torch.device) -> None:
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    # A backward compiled later would fail inside autograd, where no plain call can take its place.
    functorch.force_non_lazy_backward_lowering = True
    # With fullgraph=True, torch stops the run at its limit of 8 recompilations.
    dynamo.recompile_limit = max(dynamo.recompile_limit, 64, 4 * config.recompile_budget)
    # Under DDP torch splits graphs at full buckets of gradients, for models compiled as a whole: their gradients would
    # all arrive at the end of one backward. Ours arrive block by block, and a block that is split loses fusions.
    dynamo.optimize_ddp = False
    if device.type == "cuda":
        from accel_train.speed.inductor import set_heuristics

        set_heuristics()


def _compile_errors() -> tuple[type[BaseException], ...]:
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return (TorchDynamoException, FailOnRecompileLimitHit)


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _reasons(count: int) -> list[str | None]:
    """Return the failed guard's first line for each of the last `count` graphs, None for code new to the compiler."""
    from torch._dynamo.utils import get_compilation_metrics

    # Other code in the process may compile backwards lazily, which have entries of their own.
    frames = [entry for entry in get_compilation_metrics() if entry.is_forward]
    reasons = [entry.recompile_reason for entry in frames[-count:]]
    return [reason.splitlines()[0] if reason else None for reason in reasons]


def _torn_library(error: BaseException) -> str | None:
    """Return the unreadable library in torch's cache, if any. torch links in place, so a kill can leave half."""
    message = str(_innermost(error))
    torn = re.search(r"(/.+?\.so): (file too short|invalid ELF header|cannot read file data)", message)
    return torn[1] if torn else None


def _innermost(error: BaseException) -> BaseException:
    while (inner := error.__cause__) is not None:
        error = inner
    # torch's BackendCompilerFailed keeps the compiler's error in an attribute.
    return getattr(error, "inner_exception", None) or error


def _cause(error: BaseException) -> str:
    """Return the innermost cause on one line: the C++ compiler's own error, if there is one, with suspicious paths."""
    error = _innermost(error)
    message = compiler_error(str(error))
    causes = [" ".join(str(error).split())[:400]]
    if message:
        causes = [message, *paths_with_a_space()]
    return f"{type(error).__name__}: {'; '.join(causes)}".rstrip(". ")

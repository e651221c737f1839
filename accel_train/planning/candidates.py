"""Search space of a plan: the candidates, the values fixed by flags, and the options left out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from accel_train.config import UsageError

MICRO_BATCH = "micro_batch_size"
MODE = "activation_checkpointing.mode"
BLOCKS = "activation_checkpointing.blocks"
OFFLOAD = "activation_checkpointing.offload"
MODES = ("none", "selective", "full")
"""From the fastest to the smallest."""
LAUNCH_FILES = {
    "single": "single_gpu.yaml",
    "ddp": "ddp.yaml",
    "fsdp2": "fsdp2.yaml",
    "zero2_offload": "zero2_offload.yaml",
    "zero3_offload": "zero3_offload.yaml",
}
"""Bundled launch file by strategy."""
OFFLOADS = ("zero2_offload", "zero3_offload")
"""Searched last: if something fits without an offload, they mostly need no search."""
WHOLE = ("single", "ddp")
"""Each GPU holds all states."""
DIVIDED = ("fsdp2", "zero3_offload")
"""A GPU's own states are a part of all."""
NO_DEEPSPEED = {
    "DeepSpeed ZeRO (zero2_offload.yaml, zero3_offload.yaml)": "DeepSpeed is not installed: "
    "pip install 'accel-train[deepspeed]'"
}
NOT_CONSIDERED: Mapping[str, str] = {
    f"fsdp_offload_params (fsdp2_offload.yaml), offload_frozen, {OFFLOAD}": "a simulation has one memory, and offload "
    "needs two",
    "parallelism_config (HSDP), several machines": "one machine is planned for",
    f"{MODE} attention and ffn": "their memory and time lie between those of none and full",
    "precision, float8, optimizer": "part of the experiment: other values train other weights",
    "attention": "auto picks the fastest correct kernel at each start",
    "sync": "left as the preset and the flags set it",
    "compile": "simulated as off, because a compiler decides for itself what it keeps; written as preset or flag says",
}
"""Options that are left out, with the reason. Named in every plan."""


@dataclass(frozen=True)
class Candidate:
    """One combination of the values to choose."""

    strategy: str
    mode: str
    micro_batch_size: int
    blocks: int | None = None
    """Number of the model's blocks that are checkpointed. None: all."""

    def flags(self) -> list[str]:
        """Return the recipe's flags."""
        words = [f"--{MICRO_BATCH}", str(self.micro_batch_size), f"--{MODE}", self.mode]
        if self.blocks is not None:
            words += [f"--{BLOCKS}", str(self.blocks)]
        return words

    def with_blocks(self, blocks: int) -> Candidate:
        """Return the candidate with this number of checkpointed blocks. With 0 its mode is none."""
        if blocks:
            return replace(self, blocks=blocks)
        return replace(self, mode=MODES[0], blocks=None)

    def __str__(self) -> str:
        words = [self.strategy, f"{MODE} {self.mode}"]
        if self.blocks is not None:
            words.append(f"{BLOCKS} {self.blocks}")
        words.append(f"{MICRO_BATCH} {self.micro_batch_size}")
        return ", ".join(words)


@dataclass(frozen=True)
class Space:
    """Everything to choose from, for one config and number of GPUs."""

    gpus: int
    global_batch_size: int
    strategies: tuple[str, ...]
    modes: tuple[str, ...]
    sizes: tuple[int, ...]
    """Micro-batch sizes to try: divisors of a process's share of the global batch, ascending."""
    fixed: frozenset[str]
    """Options set by a flag and therefore not chosen."""
    blocks: int | None = None
    """Number of checkpointed blocks, if preset or flag set it. It is then not chosen."""
    compile_mode: str = "off"
    """``compile.mode`` as the preset or a flag says. Candidates are simulated without compilation."""

    def not_considered(self) -> Mapping[str, str]:
        """Return the options that are left out, with the reason."""
        return NOT_CONSIDERED if OFFLOADS[0] in self.strategies else NO_DEEPSPEED | dict(NOT_CONSIDERED)

    @property
    def share(self) -> int:
        return self.global_batch_size // self.gpus

    def micro_batches(self, candidate: Candidate) -> int:
        """Return the micro-batches of each process in a step."""
        return self.share // candidate.micro_batch_size


def space_of(config: Any, origins: Mapping[str, str], gpus: int) -> Space:
    """Return the search space. Raises ``UsageError`` if the global batch cannot be divided exactly."""
    total = config.global_batch_size
    if total % gpus:
        raise UsageError(
            f"gpus: {gpus}: a plan keeps global_batch_size {total:,} exactly, so a number that divides it is required; "
            f"give --gpus {' or '.join(map(str, _nearest(total, gpus)))}, or another --global_batch_size"
        )
    _refuse_what_is_planned(config, origins)
    # Of equal shares only: with a remainder some processes compute more, and the step waits for them.
    share = total // gpus
    fixed = frozenset(name for name in (MICRO_BATCH, MODE) if origins.get(name) == "command line")
    sizes = divisors(share)
    if MICRO_BATCH in fixed:
        # A training start would pad the last micro-batch, and the plan's memory and time are of full ones.
        if share % config.micro_batch_size:
            raise UsageError(
                f"micro_batch_size: {config.micro_batch_size}: each of {gpus} GPU(s) has {share} of {total:,} samples, "
                f"and a divisor of that is required: {', '.join(map(str, sizes))}; give one, or leave the flag out"
            )
        sizes = (config.micro_batch_size,)
    return Space(
        gpus=gpus,
        global_batch_size=total,
        # In this order, because one that fits whole spares the others their search, and FSDP2 needs less.
        strategies=(*(("fsdp2", "ddp") if gpus > 1 else ("single",)), *(OFFLOADS if has_deepspeed() else ())),
        modes=(config.activation_checkpointing.mode,) if MODE in fixed else MODES,
        sizes=sizes,
        fixed=fixed,
        blocks=config.activation_checkpointing.blocks,
        compile_mode=config.compile.mode,
    )


def on_a_cpu(space: Space) -> Space:
    """Return the space for CPUs, where host memory is the only memory."""
    return replace(space, strategies=tuple(name for name in space.strategies if name not in OFFLOADS))


def _refuse_what_is_planned(config: Any, origins: Mapping[str, str]) -> None:
    """Raise ``UsageError`` for options that contradict what a plan varies."""
    if config.activation_checkpointing.offload:
        raise UsageError(
            f"{OFFLOAD}: true: a plan is simulated, with one memory for host and device; false is required. Plan "
            "without it: what fits then fits with it"
        )
    blocks = config.activation_checkpointing.blocks
    if blocks is not None and origins.get(MODE) != "command line":
        raise UsageError(
            f"{BLOCKS}: {blocks}: a plan chooses the mode, and then the fewest blocks that fit; give --{MODE} "
            f"{config.activation_checkpointing.mode} to plan with these, or leave blocks out"
        )
    largest = config.batch_schedule.largest(config.global_batch_size)
    if largest != config.global_batch_size or config.batch_schedule.sizes:
        raise UsageError(
            f"batch_schedule: a plan divides one number of samples exactly, and a step has up to {largest:,}; "
            f"leave batch_schedule out and give --global_batch_size {largest}: what fits then fits in other steps too"
        )
    if config.memory.fraction < 1:
        raise UsageError(
            f"memory.fraction: {config.memory.fraction:g}: a plan takes the memory of a GPU from --vram_gib; give "
            "that share of it there, and leave memory.fraction out"
        )


def has_deepspeed() -> bool:
    """Return True if DeepSpeed is installed, whose own engine is simulated."""
    return find_spec("deepspeed") is not None


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def _nearest(total: int, gpus: int) -> Sequence[int]:
    """Return the divisors of ``total`` next to ``gpus``, below and above."""
    known = divisors(total)
    below = [number for number in known if number < gpus][-1:]
    above = [number for number in known if number > gpus][:1]
    return [*below, *above]

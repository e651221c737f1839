"""Attention: one call for every model, with one kernel, chosen once, proven, and logged with the reason."""

from __future__ import annotations

import socket
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.speed.attention.kernels import TORCH_CHOICE, Attention, build_attention
from accel_train.speed.attention.proof import Proof, prove_attention, time_attention
from accel_train.speed.attention.table import NAMES, AttentionNeeds, able, machine_of, preferred, why_not
from accel_train.wording import did_you_mean, nearest, shortened

REPLACED = {
    "xformers": "sdpa_efficient, which is the same kernel inside torch",
    "flash_attention_2": "flash, or flash_hub, which compiles nothing",
    "kernels-community/flash-attn2": "flash_hub",
    "flash_attention_3": "flash3",
    "flex_attention": "flex",
    "native": "sdpa",
}
"""Kernel names of other projects, refused with a pointer to the name used here."""
OF_TRANSFORMERS = "eager"
"""The attention that a transformers model itself defines. Models of this package use sdpa_math instead."""
_CANNOT_RUN = (RuntimeError, ImportError, NotImplementedError)
_WRONG_FUNCTION = (TypeError, ValueError)
"""Errors of a user's function with other arguments or shapes. `UsageError` is one of them."""
T = TypeVar("T")


def attention(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Attend with torch's choice: tensors (B, H, N, D), `key_mask` (B, N), True where a key may be attended.

    None means that no key is masked in any row. Models call `Attention.mask` once per forward instead and pass the
    result to every block. See `Attention` for masked rows and queries.
    """
    return TORCH_CHOICE(q, k, v, key_mask)


def resolve_attention(name: str, needs: AttentionNeeds) -> tuple[Attention, str]:
    """Choose the kernel for these needs, prove it on this device, and return it with a notice.

    `name`: auto (by the table), tune (the fastest kernel on these shapes, measured in some seconds), a kernel of the
    table, or your own function as module:function. A named kernel that cannot run or fails its proof is a
    `UsageError` with the reason and the alternatives. Every process calls it. With torch.distributed, auto and tune
    are collective: all processes take the same kernel, proven on each of them, whatever is installed on their hosts.
    """
    machine = machine_of(needs.device)
    if name == "auto":
        names, lacking = _common(name, preferred(needs, machine), needs)
        return _first_proven(names, needs, "auto: first of the table for", lacking)
    if name == "tune":
        names, lacking = _common(name, able(needs, machine), needs)
        names, times, failed = _by_time(names, needs)
        return _first_proven(names, needs, times, lacking + failed)
    if name == OF_TRANSFORMERS:
        raise UsageError(f"attention {name}: is what transformers models call their own attention. Use sdpa_math.")
    check_name(name)
    is_user_function = ":" in name
    reason = None
    if not is_user_function:
        reason = why_not(name, needs, machine)
    if reason is None:
        try:
            return _proven(name, needs, "as asked, for")
        except (*_CANNOT_RUN, UsageError) as error:
            reason = _one_line(error, 500)
        except _WRONG_FUNCTION as error:
            if not is_user_function:  # a kernel of the table: a bug here, not wrong usage
                raise
            reason = _one_line(error, 500)
    alternatives = [other for other in able(needs, machine) if other != name]
    raise UsageError(
        f"attention {name}: cannot be used: {reason}. Needed: {needs}. "
        f"Use auto, or one that can: {', '.join(alternatives)}."
    )


def apply_attention(model: nn.Module, attention: Attention) -> None:
    """Set this kernel in every module with an attribute `attend`, in place."""
    parts = [module for module in model.modules() if isinstance(getattr(module, "attend", None), Attention)]
    # A choice that is logged and reaches no module would be an ignored option.
    if not parts:
        raise UsageError(
            f"attention {attention.name}: no part of {type(model).__name__} has an attribute `attend` to set. "
            "Give the module that attends `self.attend = TORCH_CHOICE` and let it call self.attend(q, k, v, mask)."
        )
    for module in parts:
        setattr(module, "attend", attention)  # noqa: B010  a module's own __setattr__ is typed for tensors


def check_name(name: str) -> None:
    """Refuse an unknown kernel name before anything is built. The device is checked later.

    Raises `UsageError` with the nearest name.
    """
    if name in REPLACED:
        raise UsageError(f"attention {name}: is a name from other projects. Use {REPLACED[name]}.")
    known = ("auto", "tune", *NAMES, OF_TRANSFORMERS)
    if ":" not in name and name not in known:
        raise UsageError(
            f"attention {name!r}: is not known{did_you_mean(nearest(name, known))}; give one of {', '.join(known)}, "
            "or module:function of your own."
        )


def _proven(name: str, needs: AttentionNeeds, why: str) -> tuple[Attention, str]:
    built = build_attention(name)
    proof = prove_attention(built, needs)
    return built, _notice(built, proof, needs, why)


def _notice(built: Attention, proof: Proof, needs: AttentionNeeds, why: str) -> str:
    return (
        f"attention {built.name} ({why} {needs}); against fp64: forward {proof.forward_error:.1e}, "
        f"backward {proof.backward_error:.1e}, allowed {proof.tolerance:.0e}"
    )


def _first_proven(names: tuple[str, ...], needs: AttentionNeeds, why: str, failed: list[str]) -> tuple[Attention, str]:
    """Return the first kernel proven on every process. The notice names the failed ones, and where they failed."""
    failed = list(failed)
    for name in names:
        proven = None
        problem = ""
        try:
            proven = _proven(name, needs, why)
        except (*_CANNOT_RUN, UsageError) as error:
            problem = _failure(name, error)
        # Gathered even if it failed here, because the other processes are in the same collective.
        problems = [words for words in _gather(problem) if words]
        if proven is not None and not problems:
            attention, notice = proven
            return attention, "; ".join((notice, *failed))
        failed.append(shortened(problems, 1))
    raise UsageError(f"attention: nothing can run for {needs}: {'; '.join(failed)}")


def _common(option: str, names: tuple[str, ...], needs: AttentionNeeds) -> tuple[tuple[str, ...], list[str]]:
    """Return the kernels that every process can run, in the order of rank 0, and notices about the others.

    Hosts may differ in packages and devices, but a step is one function of all ranks: two kernels in one run would
    round differently, and `tune` cannot reduce timings of different lengths.
    """
    everyone = _gather((_place(), names))
    _, names_of_first = everyone[0]
    lacking = {name: [place for place, theirs in everyone if name not in theirs] for name in names_of_first}
    common = tuple(name for name, places in lacking.items() if not places)
    if not common:
        found = "; ".join(f"{', '.join(theirs) or 'none'}{place}" for place, theirs in everyone)
        raise UsageError(
            f"attention {option}: no kernel can run on every process, but all must use the same one: {found}. Needed: "
            f"{needs}. Install the same packages on all hosts, and start the run on devices of one kind."
        )
    return common, [f"{name} cannot run{places[0]}" for name, places in lacking.items() if places]


def _by_time(names: tuple[str, ...], needs: AttentionNeeds) -> tuple[tuple[str, ...], str, list[str]]:
    """Return kernels by measured time, fastest first, the times as text, and failures. The same on every process."""
    timed = [_time_or_inf(name, needs) for name in names]
    slowest = _slowest_of_all_processes([seconds for seconds, _ in timed], needs.device)
    problems_by_rank = _gather([problem for _, problem in timed])
    failed: list[str] = []
    for problems in zip(*problems_by_rank, strict=True):
        # The first process that failed is enough: a notice need not repeat the problem for every rank of a large run.
        failed.extend([problem for problem in problems if problem][:1])
    # An infinite time on any process removes the kernel on all of them.
    finite = {name: seconds for name, seconds in zip(names, slowest, strict=True) if seconds != float("inf")}
    fastest_first = sorted(finite, key=lambda name: finite[name])
    times = ", ".join(f"{name} {1000 * finite[name]:.3g} ms" for name in fastest_first)
    return tuple(fastest_first), f"tune: {times}, for", failed


def _time_or_inf(name: str, needs: AttentionNeeds) -> tuple[float, str]:
    try:
        return time_attention(build_attention(name), needs), ""
    except (*_CANNOT_RUN, UsageError) as error:
        return float("inf"), _failure(name, error)


def _failure(name: str, error: Exception) -> str:
    return f"{name} failed{_place()}: {_one_line(error, 300)}"


def _one_line(error: Exception, length: int) -> str:
    return " ".join(str(error).split())[:length]


def _slowest_of_all_processes(seconds: list[float], device: torch.device) -> list[float]:
    if not _is_distributed():
        return seconds
    times = torch.tensor(seconds, device=device, dtype=torch.float32)
    # The slowest time counts, since every step waits for its slowest process.
    torch.distributed.all_reduce(times, torch.distributed.ReduceOp.MAX)
    return times.tolist()


def _gather(value: T) -> list[T]:
    """Return the value of each process, by rank. A collective where there are several."""
    if not _is_distributed():
        return [value]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, value)
    return everyone


def _place() -> str:
    """Return this process and its host, for a message. Empty where there is one process."""
    if not _is_distributed():
        return ""
    return f" on process {torch.distributed.get_rank()} ({socket.gethostname()})"


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()

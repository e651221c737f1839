"""Attention: one call for every model, the kernel behind it chosen once, proven, and named with the reason."""

from __future__ import annotations

import socket
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.speed.attention_kernels import Attention, broadcast_mask, build_attention, sdpa
from accel_train.speed.attention_proof import Proof, prove_attention, time_attention
from accel_train.speed.attention_table import NAMES, AttentionNeeds, able, machine_of, preferred, why_not
from accel_train.wording import did_you_mean, nearest, shortened

TORCH_CHOICE = Attention("sdpa", sdpa, broadcast_mask)
"""What a model has before `apply_attention`: torch's choice."""
REPLACED = {
    "xformers": "sdpa_efficient, which is the same kernel inside torch",
    "flash_attention_2": "flash",
    "flash_attention_3": "flash3",
    "flex_attention": "flex",
    "eager": "sdpa_math",
}
"""Names of other projects, refused with the name used here."""
_CANNOT_RUN = (RuntimeError, ImportError, NotImplementedError)
_WRONG_FUNCTION = (TypeError, ValueError)
"""What a function of somebody's own raises where it takes other arguments or shapes; a `UsageError` is one of these."""
T = TypeVar("T")


def attention(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """torch's choice, in one call: tensors (B, H, N, D), `key_mask` (B, N) True where a key may be attended.

    None says that no key is masked in any row. A model asks `Attention.mask` once per forward instead, and hands
    what it gives to every block. What is said of masked rows and queries in `Attention` holds.
    """
    return TORCH_CHOICE(q, k, v, key_mask)


def resolve_attention(name: str, needs: AttentionNeeds) -> tuple[Attention, str]:
    """The kernel for these needs, proven on this device, and a line that says what and why.

    `name`: auto (by the table), tune (the fastest of all that can run, measured on these shapes; some seconds), a
    kernel of the table, or a function of your own as module:function. A named kernel that cannot run or that the
    proof refutes is a `UsageError` with the reason and what can run instead. Every process calls it. Where
    torch.distributed is initialised, auto and tune are collective: all processes take the same kernel, one that every
    one of them can run and has proven, whatever is installed on their hosts.
    """
    machine = machine_of(needs.device)
    if name == "auto":
        names, lacking = _common(name, preferred(needs, machine), needs)
        return _chosen(names, needs, "auto: first of the table for", lacking)
    if name == "tune":
        names, lacking = _common(name, able(needs, machine), needs)
        names, times, failed = _by_time(names, needs)
        return _chosen(names, needs, times, lacking + failed)
    check_name(name)
    own = ":" in name
    reason = None if own else why_not(name, needs, machine)
    if reason is None:
        try:
            return _proven(name, needs, "as asked, for")
        except (*_CANNOT_RUN, *_WRONG_FUNCTION) as error:
            if isinstance(error, _WRONG_FUNCTION) and not isinstance(error, UsageError) and not own:
                raise
            reason = " ".join(str(error).split())[:500]
    raise UsageError(
        f"attention {name}: cannot be used: {reason}. Needed: {needs}. "
        f"Use auto, or one that can: {', '.join(n for n in able(needs, machine) if n != name)}."
    )


def apply_attention(model: nn.Module, attention: Attention) -> None:
    """Make every part of the model that attends use this kernel, in place: modules with an attribute `attend`."""
    parts = [module for module in model.modules() if isinstance(getattr(module, "attend", None), Attention)]
    if not parts:
        raise UsageError(
            f"attention {attention.name}: no part of {type(model).__name__} has an attribute `attend` to set. "
            "Give the module that attends `self.attend = TORCH_CHOICE` and let it call self.attend(q, k, v, mask)."
        )
    for module in parts:
        setattr(module, "attend", attention)  # noqa: B010  a module's own __setattr__ is typed for tensors


def check_name(name: str) -> None:
    """Refuse what can be no kernel's name, before anything is built. Whether it can run is asked of the device later.

    Raises `UsageError` with the nearest name.
    """
    if name in REPLACED:
        raise UsageError(f"attention {name}: is a name of other projects. Use {REPLACED[name]}.")
    known = ("auto", "tune", *NAMES)
    if ":" not in name and name not in known:
        raise UsageError(
            f"attention {name!r}: is not known{did_you_mean(nearest(name, known))}; known are {', '.join(known)}, and "
            "module:function of your own."
        )


def _proven(name: str, needs: AttentionNeeds, why: str) -> tuple[Attention, str]:
    built = build_attention(name)
    return built, _sentence(built, prove_attention(built, needs), needs, why)


def _sentence(built: Attention, proof: Proof, needs: AttentionNeeds, why: str) -> str:
    return (
        f"attention {built.name} ({why} {needs}); against fp64: forward {proof.forward_error:.1e}, "
        f"backward {proof.backward_error:.1e}, allowed {proof.tolerance:.0e}"
    )


def _chosen(names: tuple[str, ...], needs: AttentionNeeds, why: str, failed: list[str]) -> tuple[Attention, str]:
    """The first that builds and is right on every process; the sentence names those that were not, and where."""
    for name in names:
        found, problem = None, ""
        try:
            found = _proven(name, needs, why)
        except (*_CANNOT_RUN, UsageError) as error:
            problem = f"{name} failed{_place()}: {' '.join(str(error).split())[:300]}"
        problems = [words for words in _of_every_process(problem) if words]
        if found is not None and not problems:
            return found[0], "; ".join((found[1], *failed))
        failed = [*failed, shortened(problems, 1)]
    raise UsageError(f"attention: nothing can run for {needs}: {'; '.join(failed)}")


def _common(option: str, names: tuple[str, ...], needs: AttentionNeeds) -> tuple[tuple[str, ...], list[str]]:
    """Those that every process has, in the order of the first one, and of the others who lacks them.

    Hosts may differ in packages and devices, and a step is one function of all ranks: two kernels in one run would
    differ in what they round, and lists of two lengths cannot be reduced.
    """
    everyone = _of_every_process((_place(), names))
    lacking = {name: [place for place, theirs in everyone if name not in theirs] for name in everyone[0][1]}
    common = tuple(name for name, places in lacking.items() if not places)
    if not common:
        found = "; ".join(f"{', '.join(theirs) or 'none'}{place}" for place, theirs in everyone)
        raise UsageError(
            f"attention {option}: no kernel can run on every process, and one for all is required: {found}. Needed: "
            f"{needs}. Install the same packages on all hosts, and start the run on devices of one kind."
        )
    return common, [f"{name} cannot run{places[0]}" for name, places in lacking.items() if places]


def _by_time(names: tuple[str, ...], needs: AttentionNeeds) -> tuple[tuple[str, ...], str, list[str]]:
    """Kernels by their time here, fastest first, the times in words, and what failed. The same on every process."""
    timed = [_seconds_or_never(name, needs) for name in names]
    together = _slowest_of_all_processes([seconds for seconds, _ in timed], needs.device)
    everyone = zip(*_of_every_process([problem for _, problem in timed]), strict=True)
    failed = [next(filter(None, problems)) for problems in everyone if any(problems)]
    times = {n: s for n, s in sorted(zip(names, together, strict=True), key=lambda x: x[1]) if s != float("inf")}
    shown = ", ".join(f"{name} {1000 * s:.3g} ms" for name, s in times.items())
    return tuple(times), f"tune: {shown}, for", failed


def _seconds_or_never(name: str, needs: AttentionNeeds) -> tuple[float, str]:
    try:
        return time_attention(build_attention(name), needs), ""
    except (*_CANNOT_RUN, UsageError) as error:
        return float("inf"), f"{name} failed{_place()}: {' '.join(str(error).split())[:300]}"


def _slowest_of_all_processes(seconds: list[float], device: torch.device) -> list[float]:
    if not _several():
        return seconds
    times = torch.tensor(seconds, device=device, dtype=torch.float32)
    torch.distributed.all_reduce(times, torch.distributed.ReduceOp.MAX)
    return times.tolist()


def _of_every_process(value: T) -> list[T]:
    """What each process gives, by rank. A collective where there are several."""
    if not _several():
        return [value]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, value)
    return everyone


def _place() -> str:
    """Where this is, for a message: nothing where there is one process."""
    return f" on process {torch.distributed.get_rank()} ({socket.gethostname()})" if _several() else ""


def _several() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()

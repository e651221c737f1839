"""Attention: one call for every model, the kernel behind it chosen once, proven, and named with the reason."""

from __future__ import annotations

import difflib

import torch
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.models.attention_kernels import Attention, broadcast_mask, build_attention, sdpa
from accel_train.models.attention_proof import Proof, prove_attention, time_attention
from accel_train.models.attention_table import NAMES, AttentionNeeds, able, machine_of, preferred, why_not

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
    proof refutes is a `UsageError` with the reason and what can run instead. Every process calls it; with tune all
    processes take the same kernel, by a collective where torch.distributed is initialised.
    """
    if name == "auto":
        return _chosen(preferred(needs, machine_of(needs.device)), needs, "auto: first of the table for")
    if name == "tune":
        return _chosen(*_by_time(needs))
    check_name(name)
    own = ":" in name
    reason = None if own else why_not(name, needs, machine_of(needs.device))
    if reason is None:
        try:
            return _proven(name, needs, "as asked, for")
        except (*_CANNOT_RUN, *_WRONG_FUNCTION) as error:
            if isinstance(error, _WRONG_FUNCTION) and not isinstance(error, UsageError) and not own:
                raise
            reason = " ".join(str(error).split())[:500]
    raise UsageError(
        f"attention {name}: cannot be used: {reason}. Needed: {needs}. "
        f"Use auto, or one that can: {', '.join(n for n in able(needs, machine_of(needs.device)) if n != name)}."
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
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UsageError(
            f"attention {name!r}: is not known; {hint}Known are {', '.join(known)}, and module:function of your own."
        )


def _proven(name: str, needs: AttentionNeeds, why: str) -> tuple[Attention, str]:
    built = build_attention(name)
    return built, _sentence(built, prove_attention(built, needs), needs, why)


def _sentence(built: Attention, proof: Proof, needs: AttentionNeeds, why: str) -> str:
    return (
        f"attention {built.name} ({why} {needs}); against fp64: forward {proof.forward_error:.1e}, "
        f"backward {proof.backward_error:.1e}, allowed {proof.tolerance:.0e}"
    )


def _chosen(names: tuple[str, ...], needs: AttentionNeeds, why: str) -> tuple[Attention, str]:
    """The first that builds and is right; the sentence names those that were not."""
    failed: list[str] = []
    for name in names:
        try:
            chosen, sentence = _proven(name, needs, why)
            return chosen, "; ".join((sentence, *failed))
        except (*_CANNOT_RUN, UsageError) as error:
            failed.append(f"{name} failed: {' '.join(str(error).split())[:300]}")
    raise UsageError(f"attention: nothing can run for {needs}: {'; '.join(failed)}")


def _by_time(needs: AttentionNeeds) -> tuple[tuple[str, ...], AttentionNeeds, str]:
    """Kernels by their time here, fastest first."""
    seconds = {name: _seconds_or_never(name, needs) for name in able(needs, machine_of(needs.device))}
    together = _slowest_of_all_processes(list(seconds.values()), needs.device)
    times = {n: s for n, s in sorted(zip(seconds, together, strict=True), key=lambda x: x[1]) if s != float("inf")}
    shown = ", ".join(f"{name} {1000 * s:.3g} ms" for name, s in times.items())
    return tuple(times), needs, f"tune: {shown}, for"


def _seconds_or_never(name: str, needs: AttentionNeeds) -> float:
    try:
        return time_attention(build_attention(name), needs)
    except (*_CANNOT_RUN, UsageError):
        return float("inf")


def _slowest_of_all_processes(seconds: list[float], device: torch.device) -> list[float]:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return seconds
    times = torch.tensor(seconds, device=device, dtype=torch.float32)
    distributed.all_reduce(times, distributed.ReduceOp.MAX)
    return times.tolist()

"""Attention of transformers and diffusers models: the requested kernel, set by their own options and proven.

Three facts about them decide the form of this module. transformers replaces a kernel that it cannot use by another one,
with a warning at most. A third of the attention of diffusers (SD3, every UNet) calls torch itself, and
``set_attention_backend`` silently skips it. And the kernel is chosen while the model lies on the CPU. So attention
calls are recorded in one forward of the model, and repeated on the device, with their shapes and masks.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel

from accel_train import simulated
from accel_train.config import UsageError
from accel_train.speed.attention.call_proof import (
    CANNOT_RUN,
    CannotRunError,
    class_of,
    in_precision,
    kernels_of,
    kind_of,
    one_line,
    prove_calls,
)
from accel_train.speed.attention.calls import DIRECT, AttentionCall, kernels_allowed, recorded_calls
from accel_train.speed.attention.kernels import RESTRICTED
from accel_train.speed.attention.table import AttentionNeeds, machine_of, why_not
from accel_train.wording import shortened

Library = Literal["transformers", "diffusers"]
Parts = Sequence[tuple[Library, Any]]
"""Models of the libraries within a model, each with its library."""
Example = Callable[[nn.Module], object]
"""Calls the model on a few small inputs of its kind, on the device of its parameters."""

NAMES: dict[Library, dict[str, str]] = {
    "transformers": {
        "eager": "eager",
        "sdpa": "sdpa",
        "flash": "flash_attention_2",
        "flash_hub": "kernels-community/flash-attn2",
        "flash3": "flash_attention_3",
        "flash4": "flash_attention_4",
        "flex": "flex_attention",
    },
    "diffusers": {
        "sdpa": "native",
        "flash": "flash",
        "flash_hub": "flash_hub",
        "flash3": "_flash_3",
        "flex": "flex",
    },
}
"""Values of the option, and the library's own names for them. The kernels of torch are restrictions of ``sdpa``."""


@dataclass(frozen=True)
class LibraryAttention:
    """Attention found, or set, in a model of another library."""

    name: str
    notice: str
    kernels: tuple[str, ...] = ()
    """Operators or device kernels that ran in the proof."""


def library_parts(model: nn.Module) -> list[tuple[Library, Any]]:
    """Return the models of transformers and diffusers in ``model``, outermost, with their library. Imports neither."""
    if hasattr(model, "set_attn_implementation"):
        return [("transformers", model)]
    if hasattr(model, "set_attention_backend"):
        # Each attention module of diffusers has the method too, and only a model has blocks of them.
        return [("diffusers", model)]
    parts: list[tuple[Library, Any]] = []
    for child in model.children():
        parts.extend(library_parts(child))
    return parts


def apply_library_attention(
    model: nn.Module,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    example: Example | None = None,
    *,
    compiled: bool = False,
) -> LibraryAttention:
    """Set the attention of a transformers or diffusers model, in place, and prove it on ``device``.

    Call it on every process, with the initial weights in the model and before activation checkpointing, compilation
    and ``prepare``. ``name`` is auto, which keeps the library's choice, or a name of ``NAMES`` or of torch's kernels
    (``sdpa_math`` ...). ``dtype`` is that of the computation. ``example`` calls the model on small inputs with the
    masks of training; None takes transformers' own for a model of token ids. It is called twice or three times without
    computing attention, in eval mode and without gradients.

    The proof compares forward and backward of every kind of call with fp64: the model's own eager function in
    transformers, torch's definition in diffusers. Raises ``UsageError`` for a name that the library or the model does
    not have, that cannot run here, that the model does not really call, or that is wrong.
    """
    parts = library_parts(model)
    assert parts, type(model).__name__
    if name != "auto":
        _refuse_unknown(name, parts)
    elif simulated.active() is not None:
        # A proof on real tensors would take as long as the simulation, and would only hold for this machine.
        return _unproven(name, parts, "a simulation has no device to prove it on")
    example = example or _own_example(parts)
    if example is None:
        return _unproven(name, parts, "there is no example of its inputs")
    run = functools.partial(_record, model, example, dtype)
    try:
        calls = run()
    except CANNOT_RUN as error:
        return _unproven(name, parts, f"its example failed: {one_line(error)}")
    if not calls:
        return _unproven(name, parts, "no call of attention was observed")
    if name != "auto":
        _refuse_unable(name, parts, calls, device, dtype, compiled=compiled)
        _set(name, parts)
        if name in RESTRICTED:
            # Once for each module, by identity, because one may attend several times.
            for module in {id(call.module): call.module for call in calls}.values():
                restrict_kernels(module, name)
        # Recorded again: what was set may have reached only some of the modules.
        calls = run()
        _refuse_other_calls(name, parts, calls)
    return _proven(name, parts, calls, _references(parts, calls, run), device, dtype)


def restrict_kernels(module: nn.Module, name: str) -> None:
    """Restrict torch to this kernel inside ``module``, in place. The forward raises where the kernel cannot run."""
    forward = type(module).forward

    @functools.wraps(forward)
    def restricted(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        # Within the module, so that a recomputation in the backward takes the same kernel.
        with sdpa_kernel(RESTRICTED[name]):
            return forward(self, *arguments, **named)

    setattr(module, "forward", types.MethodType(restricted, module))  # noqa: B010  typed for tensors


# ---------------------------------------------------------------------------------------------------------- names
def _theirs(name: str, library: Library) -> str | None:
    """Return the library's name for a kernel. None if it has no such kernel."""
    if name in RESTRICTED:
        name = "sdpa"
    return NAMES[library].get(name)


def _known(parts: Parts) -> list[str]:
    """Return the names that all libraries of the model have."""
    return [name for name in ("eager", *NAMES["diffusers"], "flash4", *RESTRICTED) if _is_known(name, parts)]


def _is_known(name: str, parts: Parts) -> bool:
    return all(_theirs(name, library) is not None for library, _ in parts)


def _refuse_unknown(name: str, parts: Parts) -> None:
    if _is_known(name, parts):
        return
    library, part = next((library, part) for library, part in parts if _theirs(name, library) is None)
    raise UsageError(
        f"attention {name}: {type(part).__name__} attends through {library}, which has none of that name; it has "
        f"{', '.join(_known(parts))}. Give one of them, or leave the option out."
    )


def _refuse_unable(
    name: str,
    parts: Parts,
    calls: Sequence[AttentionCall],
    device: torch.device,
    dtype: torch.dtype,
    *,
    compiled: bool,
) -> None:
    """Refuse a kernel that the table excludes for the shapes of this model."""
    needs = [_needs(call, device, dtype, compiled=compiled) for call in calls]
    machine = machine_of(device)

    def reason_against(other: str) -> str | None:
        if other == "eager":
            return None
        return next((reason for each in needs if (reason := why_not(other, each, machine))), None)

    reason = reason_against(name)
    if reason is not None:
        able = [other for other in _known(parts) if reason_against(other) is None]
        raise UsageError(
            f"attention {name}: cannot be used in {_names(parts)}: {reason}. Needed: {needs[0]}. Use auto, or one that "
            f"can: {', '.join(able)}."
        )


def _needs(call: AttentionCall, device: torch.device, dtype: torch.dtype, *, compiled: bool) -> AttentionNeeds:
    batch, heads, length, head_size = call.inputs[0].shape
    return AttentionNeeds(
        device,
        dtype,
        head_size,
        heads=heads,
        length=length,
        batch=batch,
        mask=call.mask is not None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        compiled=compiled,
    )


# ------------------------------------------------------------------------------------------------------- choosing
def _set(name: str, parts: Parts) -> None:
    for library, part in parts:
        theirs = _theirs(name, library)
        try:
            if library == "transformers":
                part.set_attn_implementation(theirs)
            else:
                _set_backend(part, str(theirs))
        except Exception as error:  # diffusers fetches kernels of the Hub, and errors of the network come through
            raise UsageError(
                f"attention {name}: {library} refuses {theirs} for {type(part).__name__}: {one_line(error)}. Use "
                f"auto, or another of {', '.join(_known(parts))}."
            ) from None


def _set_backend(part: Any, backend: str) -> None:
    from diffusers.models import attention_dispatch

    # diffusers applies the choice for one model to the whole process, and later models would inherit it.
    registry: Any = vars(attention_dispatch)["_AttentionBackendRegistry"]
    active, _ = registry.get_active_backend()
    try:
        part.set_attention_backend(backend)
    finally:
        registry.set_active_backend(active)


def _refuse_other_calls(name: str, parts: Parts, calls: Sequence[AttentionCall]) -> None:
    """Refuse a kernel that some attention calls of the model do not use."""
    wanted = {_theirs(name, library) for library, _ in parts}
    restriction = (name,) if name in RESTRICTED else kernels_allowed()
    others: list[str] = []
    for call in calls:
        # torch's own function, restricted or not, is what `sdpa` names.
        is_torch = call.chosen == DIRECT and (name == "sdpa" or name in RESTRICTED)
        if call.chosen not in wanted and not is_torch:
            others.append(f"{class_of(call)} ({'torch itself' if call.chosen == DIRECT else call.chosen})")
        elif call.kernels != restriction:
            others.append(f"{class_of(call)} ({', '.join(call.kernels)})")
    if others or not calls:
        raise UsageError(
            f"attention {name}: was set in {_names(parts)}, but {len(others)} of its {len(calls)} calls of attention "
            f"go elsewhere: {shortened(sorted(set(others)), 3)}. The option does not reach them: use auto, sdpa or a "
            f"kernel of torch ({', '.join(RESTRICTED)})."
        )


# ---------------------------------------------------------------------------------------------------------- calls
def _own_example(parts: Parts) -> Example | None:
    """Return transformers' example of token ids. None for a model that does not take them."""
    library, part = parts[0]
    # Inputs of several models, or of pictures and sound, cannot be guessed.
    if len(parts) > 1 or library != "transformers" or part.main_input_name != "input_ids":
        return None
    if "input_ids" not in inspect.signature(part.forward).parameters:
        return None
    return lambda model: model(input_ids=part.dummy_inputs["input_ids"].to(part.device))


def _record(model: nn.Module, example: Example, dtype: torch.dtype) -> list[AttentionCall]:
    """Return the attention calls of one forward. Leaves the model and the random generators as they are."""
    training = {module: module.training for module in model.modules()}
    kind = next(model.parameters()).device.type
    model.eval()
    try:
        with (
            torch.no_grad(),
            # The example may draw inputs, and the run's own draws must not depend on the proof.
            torch.random.fork_rng(devices=[]),
            in_precision(kind, dtype),
            recorded_calls() as calls,
        ):
            example(model)
    finally:
        for module, was_training in training.items():
            module.training = was_training
    return calls


@contextmanager
def _eager(parts: Parts) -> Generator[None]:
    """Let models of transformers attend by their own functions, masks included."""
    configs: dict[int, Any] = {}
    for _, part in parts:
        for module in part.modules():
            config = getattr(module, "config", None)
            if hasattr(config, "_attn_implementation_internal"):
                configs[id(config)] = config
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


def _references(
    parts: Parts, calls: Sequence[AttentionCall], run: Callable[[], list[AttentionCall]]
) -> list[AttentionCall]:
    """Return the calls as their library defines them."""
    if all(call.definition is not None for call in calls):
        # No second forward is needed where each call carries its own definition.
        return [replace(call, attend=call.definition or call.attend) for call in calls]
    with _eager(parts):
        return run()


def _proven(
    name: str,
    parts: Parts,
    calls: Sequence[AttentionCall],
    references: Sequence[AttentionCall],
    device: torch.device,
    dtype: torch.dtype,
) -> LibraryAttention:
    # Compared call by call, which is possible only where both have the same shapes.
    if [call.inputs[0].shape for call in calls] != [call.inputs[0].shape for call in references]:
        return _unproven(name, parts, "with eager its attention has other shapes")
    chosen = _described(name, calls)
    label = f"attention {chosen} of {_names(parts)}"
    try:
        proof = prove_calls(calls, references, label, device, dtype)
    except CannotRunError as error:
        # A model without a reference is no reason to stop, unless a kernel was requested.
        if name == "auto":
            return _unproven(name, parts, str(error))
        raise
    why = "as it came" if name == "auto" else "as asked"
    kinds = len({kind_of(call) for call in calls})
    notice = (
        f"{label} ({why}): {len(calls)} calls in a forward, {kinds} kind(s), (B, H, N, D) = "
        f"{calls[0].inputs[0].shape}; against fp64: forward {proof.forward_error:.1e}, backward "
        f"{proof.backward_error:.1e}, allowed {proof.tolerance:.0e}"
    )
    return LibraryAttention(chosen, notice, kernels_of(calls[0], device, dtype))


# ---------------------------------------------------------------------------------------------------------- words
def _unproven(name: str, parts: Parts, reason: str) -> LibraryAttention:
    if name != "auto":
        raise UsageError(
            f"attention {name}: cannot be proven in {_names(parts)}: {reason}. Give `prepare` an example that calls "
            "the model on a few of its inputs, or leave the option out."
        )
    return LibraryAttention("own", f"attention: that of {_names(parts)}, unchanged and not proven: {reason}")


def _described(name: str, calls: Sequence[AttentionCall]) -> str:
    """Return the requested name, or with auto those that the model calls."""
    if name != "auto":
        return name
    ours = {theirs: own for names in NAMES.values() for own, theirs in names.items()} | {DIRECT: "sdpa"}
    return "+".join(dict.fromkeys(ours.get(call.chosen, call.chosen) for call in calls))


def _names(parts: Parts) -> str:
    return ", ".join(dict.fromkeys(type(part).__name__ for _, part in parts))

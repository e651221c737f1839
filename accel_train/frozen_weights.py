"""Frozen parameters of a model: stored in checkpoints or referenced by file, on the device or in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from accel_train.checkpoints.policy import BasePolicy, RunOptions
from accel_train.checkpoints.run import Run, earlier_checkpoints
from accel_train.config import UsageError
from accel_train.data.artifacts import cache_if_usable
from accel_train.precision import Precision
from accel_train.runtime.main_alone import failing_together, on_main
from accel_train.runtime.strategy import strategy_of
from accel_train.speed.memory.frozen_offload import offload_frozen_blocks
from accel_train.store import manifest
from accel_train.store.pretrained_base import Options, PretrainedBase, TrainedBase, at_recorded_revision

NARROW = (torch.bfloat16, torch.float16)
QUANTISED = (torch.int8, torch.uint8)
SHARDING = ("fsdp2", "zero3")
"""Strategies that split parameters over the processes."""


def resolve_base(
    accelerator: Accelerator,
    run: Run,
    model: nn.Module,
    base: PretrainedBase | TrainedBase | None,
    *,
    option: BasePolicy,
    precision: Precision,
) -> tuple[Mapping[str, Any] | None, list[str]]:
    """Decide whether checkpoints store the frozen parameters or reference ``base``. Collective, before ``prepare``.

    ``option`` is ``checkpoints.base``. Sets ``run.base``, ``run.embedded_base`` or ``run.hub_base``, which every
    manifest then records.
    Returns the reference to the files of ``base``, None without them or without frozen parameters, and notices.
    Raises ``UsageError`` for an option that cannot be obeyed, for files that are missing or differ between hosts, and
    for frozen weights that the precision or the strategy would change.
    """
    if isinstance(base, TrainedBase):
        run.hub_base = asdict(base)
        base = None
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    if option == "reference":
        _refuse_without_base(frozen, base)
    if not frozen:
        return None, []
    _refuse_narrow(precision, frozen)
    _refuse_quantised(accelerator, frozen, base, option)
    values = f"{sum(parameter.numel() for parameter in frozen):,} frozen values"
    if base is None:
        _refuse_rounding(accelerator, precision, frozen)
        return None, [f"{values}, saved in every checkpoint (checkpoints.base: {option}, and there is no base)"]
    reference = _reference(accelerator, base)
    checkpoint = run.checkpoint
    is_embedded = checkpoint is not None and "base" not in checkpoint.manifest
    if option == "reference" and is_embedded:
        raise UsageError(
            f"checkpoints.base: reference, but the checkpoints of {run.directory} contain its frozen weights; leave "
            "the option out, or start a new run"
        )
    # Checkpoints of one run are alike: a resume continues as the first start began.
    if option == "embed" or is_embedded:
        _refuse_rounding(accelerator, precision, frozen)
        if "definition" in reference:
            run.embedded_base = {name: value for name, value in reference.items() if name != "files"}
        return reference, [f"{values}, saved in every checkpoint"]
    # Recorded in the manifest of every checkpoint, and compared on every resume.
    run.base = reference
    files = reference["files"]
    gib = sum(facts["size"] for facts in files.values()) / (1 << 30)
    return reference, [
        f"{values} of {base.source}: checkpoints name its {len(files)} file(s), {gib:.2f} GiB, with their sha256"
    ]


def offload_frozen(accelerator: Accelerator, run: Run, model: nn.Module, compile_mode: str) -> str:
    """Move the frozen weights of the blocks to host memory, in place, and return a notice. Before ``prepare``.

    Raises ``UsageError`` for frozen weights that a save would have to read, and for whatever ``offload_frozen_blocks``
    refuses.
    """
    if run.base is None:
        raise UsageError(
            "offload_frozen: checkpoints would contain the frozen weights (checkpoints.base embed, or a model without "
            "a base), but they are not on the device; give a base and leave checkpoints.base out"
        )
    return offload_frozen_blocks(model, accelerator.device, strategy_of(accelerator), compile_mode)


def _refuse_without_base(frozen: list[nn.Parameter], base: PretrainedBase | None) -> None:
    if not frozen:
        raise UsageError("checkpoints.base: reference, but the model has no frozen parameter; leave it out")
    if base is None:
        raise UsageError(
            "checkpoints.base: reference, but the frozen parameters of this model do not come from files; use embed"
        )


def _refuse_narrow(precision: Precision, frozen: list[nn.Parameter]) -> None:
    narrow = {str(p.dtype).removeprefix("torch.") for p in frozen if p.dtype in NARROW}
    if narrow and precision == "fp32":
        raise UsageError(
            f"precision: fp32, but the frozen weights are {', '.join(sorted(narrow))}, which cannot be multiplied with "
            "fp32 activations; use --precision bf16, or load the base in fp32"
        )


def _refuse_quantised(
    accelerator: Accelerator, frozen: list[nn.Parameter], base: PretrainedBase | None, option: BasePolicy
) -> None:
    """Raise ``UsageError`` where quantised weights would be sharded, or saved without their scales."""
    quantised = sorted({str(p.dtype).removeprefix("torch.") for p in frozen if p.dtype in QUANTISED})
    if not quantised:
        return
    strategy = strategy_of(accelerator)
    if strategy in SHARDING:
        raise UsageError(
            f"the frozen weights are quantised ({', '.join(quantised)}), and {strategy} would shard them, which loses "
            "their scales; use one process, DDP, ZeRO-1 or ZeRO-2, or a base in bf16"
        )
    if base is None or option == "embed":
        raise UsageError(
            f"checkpoints.base: {option}, but the frozen weights are quantised ({', '.join(quantised)}): checkpoints "
            "can name the files that they come from, not contain them; leave the option out, and give the model a base"
        )


def _refuse_rounding(accelerator: Accelerator, precision: Precision, frozen: list[nn.Parameter]) -> None:
    """Raise ``UsageError`` where DeepSpeed would round frozen weights that are to be saved."""
    strategy = strategy_of(accelerator)
    if strategy.startswith("zero") and precision != "fp32" and any(p.dtype == torch.float32 for p in frozen):
        raise UsageError(
            f"precision: {precision} under {strategy} rounds the fp32 frozen weights, which checkpoints would then "
            f"contain rounded; load them in {precision}, give the model a base (checkpoints.base: reference), or use "
            "--precision fp32"
        )


def _reference(accelerator: Accelerator, base: PretrainedBase) -> dict[str, Any]:
    """Hash the files on every host, and require the same on all. Collective."""
    mine = None
    with failing_together(accelerator):
        # One process per host: all of them see the same files, and hashing saturates the disk.
        if accelerator.is_local_main_process:
            mine = base.reference(cache_if_usable())
    # In a list, because Accelerate joins the lists of all processes.
    references = [each for each in gather_object([mine]) if each is not None]
    for other in references:
        if any(other.get(part) != references[0].get(part) for part in ("files", "definition")):
            raise UsageError(
                f"the base {base.source}: the hosts have different files; make {base.directory} the same on all of them"
            )
    return references[0]


def pinned(
    accelerator: Accelerator,
    base: Options,
    option: str,
    options: RunOptions,
    at_commit: Callable[[Options], Options],
) -> Options:
    """Return the options of a base on the Hub with the commit that the run began with. Collective.

    ``base`` is a dataclass with ``source`` and ``revision``. ``option`` is the name of the latter, such as
    ``model.revision``. If it or the source has changed since the start of the run, the new values count.
    ``at_commit`` is called on the main process and returns the options with the commit to begin with. Raises like
    ``at_commit``, and like ``fetch.read_manifest`` for a checkpoint on the Hub that is not there.
    """

    def pin() -> Options:
        recorded = _earlier_manifest(options)
        begun, given = recorded.get("experiment", {}), options.experiment
        source = option.replace("revision", "source")
        if any(begun.get(name, given.get(name)) != given.get(name) for name in (source, option)):
            return at_commit(base)
        names = [name for name in ("base", "embedded_base", "hub_base") if name in recorded]
        return at_commit(at_recorded_revision(base, recorded[names[0]] if names else None))

    return on_main(accelerator, pin)


def _earlier_manifest(options: RunOptions) -> Mapping[str, Any]:
    """Return the manifest of the newest checkpoint that a start finds, also on the Hub. Empty for a fresh start."""
    # Imported here, because only a resume from the Hub needs it and its dependencies.
    from accel_train.checkpoints import fetch

    earlier = earlier_checkpoints(options)
    for checkpoint in reversed(earlier):
        with suppress(ValueError):  # a damaged one is passed over by the resume too
            return manifest.read(checkpoint)
    if not earlier and options.resume.startswith(fetch.HUB):
        return fetch.read_manifest(options.resume)
    return {}

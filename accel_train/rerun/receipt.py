"""The receipt of a replay: both sides of the comparison, every value in hexadecimal, sealed by its own hash."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_train.config import UsageError, expand_path, refuse_unusable_folder
from accel_train.rerun.agreement import SIDES, Row, Verdict, Weights, first_difference
from accel_train.rerun.starts import Start
from accel_train.store import atomic_files, commit, manifest, strict_json
from accel_train.store.manifest import Checkpoint

SCHEMA = 1
OF_EVERY_RECEIPT = {"schema", "written_at", "recipe", strict_json.SEAL}
NOTHING_MORE: Mapping[str, Any] = MappingProxyType({})
# Fields of an environment line. The command is left out: it may hold paths, and a receipt is made to be shared.
ENVIRONMENT = (
    *("versions", "python", "platform", "cuda", "device", "device_name", "torch_threads", "world_size", "strategy"),
    *("precision", "attention", "attention_kernels", "git_commit"),
)


@dataclass(frozen=True)
class Result:
    """Result of a replay."""

    window: tuple[int, int]
    """The steps after the first, up to the last."""
    start_step: int
    rows: Sequence[Row]
    weights: Sequence[Weights]
    reasons: Sequence[str]
    """Reasons why bits may differ. Empty if every bit must be the same."""
    tolerance: float
    verdict: Verdict
    changes: Mapping[int, Sequence[str]] = field(default_factory=dict[int, Sequence[str]])
    """Step of a checkpoint -> options that the run changed when it was resumed there. Steps after the first of these
    checkpoints are not judged."""

    @property
    def first_difference(self) -> Row | None:
        """First row that differs in any bit."""
        return first_difference(self.rows)


def receipt_file(given: str | None, default: str) -> Path:
    """Return the file for a receipt, before anything has run. ``given`` is the value of ``--receipt``.

    Raises ``UsageError`` where no file can be written, and for a file that is not a receipt: only those are replaced.
    """
    path = expand_path(given or default)
    place = f"--receipt {path}"
    if path.is_dir():
        raise UsageError(f"{place}: is a directory; give the name of a file, such as {path / default}")
    if not path.parent.is_dir():
        raise UsageError(f"{place}: {path.parent} is not a directory; create it, or give another file")
    if os.path.lexists(path) and not _is_receipt(path):
        raise UsageError(f"{place}: exists and is not a receipt of accel-train; give another file")
    refuse_unusable_folder(place, path.parent)
    return path


def _is_receipt(path: Path) -> bool:
    try:
        return strict_json.read_object(path).keys() >= OF_EVERY_RECEIPT
    except (OSError, ValueError):
        return False


def write_receipt(
    path: Path,
    run_id: str,
    recipe: Path,
    checkpoint: Checkpoint | None,
    starts: Mapping[str, Sequence[Start]],
    result: Result,
    more: Mapping[str, Any] = NOTHING_MORE,
) -> None:
    """Write the receipt. ``starts`` maps each side, such as ``recorded``, to the starts that wrote its lines."""
    first = result.first_difference
    sides = tuple(starts)
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "run_id": run_id,
        # The name alone: a path would tell about the machine.
        "recipe": {"name": recipe.name, "sha256": commit.hash_file(recipe)},
        "window": list(result.window),
        "start_step": result.start_step,
        "checkpoint": None if checkpoint is None else describe_checkpoint(checkpoint),
        "verdict": result.verdict,
        "reasons_for_other_bits": list(result.reasons),
        "tolerance": result.tolerance,
        "first_differing_step": None if first is None else first.step,
        "steps": [describe_row(row, sides) for row in result.rows],
        "checkpoints": [describe_weights(weights) for weights in result.weights],
    }
    content |= {side: [describe_environment(start) for start in found] for side, found in starts.items()}
    content |= more
    atomic_files.replace_json(path, strict_json.sealed(content))


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Identify a checkpoint by its name and the hash of its manifest, which has those of all other files."""
    return {
        "name": manifest.checkpoint_name(checkpoint.step),
        "manifest_sha256": commit.hash_file(checkpoint.file(manifest.MANIFEST)),
    }


def describe_row(row: Row, sides: Sequence[str] = SIDES) -> dict[str, Any]:
    """Return both sides of a row, each value in hexadecimal."""
    values: dict[str, Any] = {}
    for name, both in row.values.items():
        # Decimal digits would need a rule for rounding, and JSON has no NaN.
        values[name] = {side: value.hex() for side, value in zip(sides, both, strict=True)}
    return {"step": row.step, "identical": not row.differing, "values": values}


def describe_weights(weights: Weights) -> dict[str, Any]:
    """Return the result of comparing a checkpoint."""
    return {"name": weights.name, "identical": weights.identical, "collections": list(weights.lines)}


def describe_environment(start: Start) -> dict[str, Any]:
    """Return the fields of a start's environment that tell nothing about the user."""
    return {name: start.environment[name] for name in ENVIRONMENT if name in start.environment}

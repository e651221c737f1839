"""``run.json``: the experiment that a directory is held to, and what may change between two starts in it."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_train.checkpoints import commit
from accel_train.config import UsageError, write_config

FREE_TO_CHANGE = (
    "output_dir",
    "max_steps",
    "max_epochs",
    "micro_batch_size",
    "sync",
    "attention",
    "activation_checkpointing",
    "compile",
    "distributed.gradient_as_bucket_view",
    "distributed.bucket_cap_mb",
    "distributed.static_graph",
    "distributed.fsdp2_prefetch",
    "collective_timeout_seconds",
    "loader",
    "log",
    "checkpoints",
    "hub",
    "evaluation",
    "data.cache_dir",
    "data.encoder_batch_size",
    "data.workers",
)
"""Options (or groups) that do not change the trajectory, or only prolong it. All others are the experiment."""

RUN_FILE = "run.json"


def has_trained(directory: Path) -> bool:
    """Whether a start got beyond its first step. One that was refused before binds nobody to its options."""
    try:
        return bool(json.loads((directory / RUN_FILE).read_text()).get("trained"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True  # somebody's run, which `read_run` refuses


def refuse_changes(
    saved: Mapping[str, Any], experiment: Mapping[str, Any], allow: Sequence[str], free: Sequence[str], directory: Path
) -> None:
    """Refuse a different experiment in a used directory, with both values of each difference."""
    if unknown := [k for k in allow if not any(name == k or name.startswith(f"{k}.") for name in experiment)]:
        raise UsageError(f"allow: {unknown[0]!r} is no option of this experiment; name the option that has changed")
    before = dict(saved["experiment"]) | dict(saved.get("resolved", {}).items())
    changed: list[str] = []
    for key in sorted(before.keys() | experiment.keys()):
        now = experiment.get(key)
        if before.get(key) == now or (now is None and key in saved.get("resolved", {})):
            continue
        if any(key == name or key.startswith(f"{name}.") for name in (*free, *allow)):
            continue
        changed.append(f"{key}: {before.get(key)!r} there, {now!r} now")
    if changed:
        first = changed[0].split(":", 1)[0]
        raise UsageError(
            f"output_dir: {directory} holds a different experiment:\n  " + "\n  ".join(changed) + "\ngive another "
            f"--output_dir, go back to the saved values, or take the change on purpose with --allow {first}"
        )


def new_run(
    directory: Path, config: Any, experiment: Mapping[str, Any], resolved: dict[str, Any], origin: str | None
) -> dict[str, Any]:
    """Write config.yaml and run.json of a start from nothing, or from the checkpoint ``origin``. Main process."""
    saved: dict[str, Any] = {
        "schema": commit.SCHEMA,
        "run_id": uuid.uuid4().hex[:12],
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "experiment": dict(experiment),
        "resolved": resolved,
    }
    if origin is not None:
        saved["origin"] = origin
    (directory / "checkpoints").mkdir(exist_ok=True)
    write_config(config, directory / "config.yaml")
    commit.replace_json(directory / RUN_FILE, saved)
    return saved


def renew_run(directory: Path, config: Any, saved: Mapping[str, Any], experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Take over the free changes, so that config.yaml always says how the last start was made."""
    given = {key: experiment[key] for key in saved["resolved"] if experiment.get(key) is not None}
    renewed = dict(saved) | {"experiment": dict(experiment), "resolved": saved["resolved"] | given}
    write_config(config, directory / "config.yaml")
    commit.replace_json(directory / RUN_FILE, renewed)
    return renewed


def read_run(directory: Path) -> dict[str, Any]:
    """``run.json`` as it stands. Raises ``UsageError`` where it cannot be read."""
    try:
        saved: Any = json.loads((directory / RUN_FILE).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"output_dir: {directory} holds checkpoints but run.json cannot be read ({error}); restore it from a "
            "backup or give another --output_dir"
        ) from None
    if saved.get("schema") != commit.SCHEMA:
        raise UsageError(f"{directory}/run.json has schema {saved.get('schema')}; this version reads {commit.SCHEMA}")
    return saved

"""``run.json``: the experiment that a directory is held to, and what may change between two starts in it."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_train.config import UsageError
from accel_train.store import atomic_files, strict_json
from accel_train.store import manifest as manifests
from accel_train.store.atomic_files import replace_file
from accel_train.store.names import CONFIG_FILE, RUN_FILE

logger = logging.getLogger(__name__)

RUN_SCHEMA = 2
"""2 carries a hash of itself; 1, of the first versions, has none."""
MAX_BYTES = 16 << 20


def has_trained(directory: Path) -> bool:
    """Whether a start got beyond its first step. One that was refused before binds nobody to its options."""
    try:
        saved = load(directory)
        return bool(saved.get("trained")) or any(key not in saved for key in _NEEDED)
    except FileNotFoundError:
        return (directory / RUN_FILE).is_symlink()
    except ValueError:
        return True  # somebody's run, which `read_run` makes again or refuses


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
        keys = " ".join([*allow, *(line.split(":", 1)[0] for line in changed)])  # --allow takes all of them at once
        raise UsageError(
            f"output_dir: {directory} holds a different experiment:\n  " + "\n  ".join(changed) + "\ngive another "
            f"--output_dir, go back to the saved values, or take the change on purpose with --allow {keys}"
        )


def new_run(
    directory: Path,
    config_text: str,
    experiment: Mapping[str, Any],
    resolved: dict[str, Any],
    facts: Mapping[str, str | None],
) -> dict[str, Any]:
    """Write config.yaml and run.json of a start. Main process.

    ``facts``: ``origin``, the checkpoint that it starts from, and ``loads_with``, the class that loads its checkpoints.
    """
    saved: dict[str, Any] = {
        "run_id": uuid.uuid4().hex[:12],
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "experiment": dict(experiment),
        "resolved": resolved,
    }
    saved |= {name: value for name, value in facts.items() if value is not None}
    (directory / "checkpoints").mkdir(exist_ok=True)
    write_config(config_text, directory / CONFIG_FILE)
    write_run(directory, saved)
    return saved


def renew_run(
    directory: Path, config_text: str, saved: Mapping[str, Any], experiment: Mapping[str, Any]
) -> dict[str, Any]:
    """Take over the free changes, so that config.yaml always says how the last start was made."""
    given = {key: experiment[key] for key in saved["resolved"] if experiment.get(key) is not None}
    renewed = dict(saved) | {"experiment": dict(experiment), "resolved": saved["resolved"] | given}
    write_config(config_text, directory / CONFIG_FILE)
    try:
        load(directory)
    except FileNotFoundError:
        pass
    except ValueError:  # what `saved` stands in for stays, for whoever wants to look at it
        atomic_files.set_aside(directory / RUN_FILE)
    write_run(directory, renewed)
    return renewed


def write_run(directory: Path, saved: Mapping[str, Any]) -> None:
    """Write ``run.json`` with its own hash. Main process."""
    rest = {key: value for key, value in saved.items() if key != "schema"}
    atomic_files.replace_json(directory / RUN_FILE, strict_json.sealed({"schema": RUN_SCHEMA} | rest))


def load(directory: Path) -> dict[str, Any]:
    """``run.json`` as it stands. Raises ``FileNotFoundError``, ``ValueError`` with the reason for what is damaged, and
    ``UsageError`` for one that a newer version wrote."""
    saved = strict_json.read_object(directory / RUN_FILE, MAX_BYTES)
    schema = saved.get("schema")
    if type(schema) is int and schema > RUN_SCHEMA:
        raise UsageError(
            f"{directory}/{RUN_FILE} has schema {schema}, this version reads 1 and {RUN_SCHEMA}: a newer accel_train "
            "wrote it, or it is damaged; update accel_train, or move it away to have it made again from the newest "
            "checkpoint"
        )
    if schema == RUN_SCHEMA:
        strict_json.check_seal(saved)
    elif schema != 1 or strict_json.SEAL in saved:
        raise ValueError("it has changed since it was written")
    for key, kind in _KINDS.items():
        if key in saved and not isinstance(saved[key], kind):
            raise ValueError(f"{key} is of type {type(saved[key]).__name__}; {kind.__name__} is required")
    return saved


_KINDS = {
    "run_id": str,
    "loads_with": str,
    "origin": str,
    "trained": bool,
    "experiment": dict,
    "resolved": dict,
    "hub": dict,
}
_NEEDED = ("run_id", "experiment", "resolved")


def recall(directory: Path) -> tuple[dict[str, Any] | None, str | None]:
    """What a used directory is held to: ``run.json``, else what the newest checkpoint's manifest says of the run.

    With the reason why ``run.json`` does not serve. Raises ``UsageError`` for one of a newer version.
    """
    try:
        saved = load(directory)
        if missing := [key for key in _NEEDED if key not in saved]:
            raise ValueError(f"it has no {missing[0]!r}")
        return saved, None
    except UsageError:
        raise
    except (FileNotFoundError, ValueError) as error:
        reason = str(error)
    for _, path in reversed(manifests.committed(directory / "checkpoints")):
        try:
            found = manifests.read(path)
        except ValueError:
            continue
        if all(found.get(key) is not None for key in _NEEDED) and found["experiment"]:
            kept = {key: found[key] for key in _NEEDED}
            return kept | {"trained": True, "made_again_from": path.name}, reason
    return None, reason


def read_run(directory: Path) -> dict[str, Any]:
    """``run.json``, or one made again from the newest checkpoint, with a warning; ``UsageError`` where none serves."""
    saved, reason = recall(directory)
    if saved is None:
        raise UsageError(
            f"output_dir: {directory} is used, but its {RUN_FILE} cannot be read ({reason}), and no checkpoint there "
            "says what the experiment is; restore it from a backup, give another --output_dir, or --overwrite to "
            "delete what is there and start anew"
        )
    if reason is not None:
        logger.warning(
            "%s cannot be read (%s); its content is taken from the manifest of %s",
            directory / RUN_FILE,
            reason,
            saved["made_again_from"],
        )
    return saved


def write_config(text: str, path: Path) -> None:
    """Write what ``config_text`` returned. Main process only."""
    replace_file(path, text.encode())

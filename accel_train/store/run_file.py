"""``run.json``: the experiment of a run directory, and the changes allowed between two starts.

Checkpoints and exports also hold the options of their experiment, for whoever loads the model. ``RUN@STEP`` and
``RUN@best`` name a checkpoint of a run by its step or by the best metric.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from accel_train.config import UsageError
from accel_train.options.allowed import is_covered, refuse_unknown_allowed
from accel_train.store import atomic_files, strict_json
from accel_train.store import manifest as manifests
from accel_train.store.atomic_files import replace_file
from accel_train.store.names import CONFIG_FILE, DATA_CHANGED, DATA_FINGERPRINT, INIT_FROM, RUN_FILE
from accel_train.store.strict_json import Json
from accel_train.wording import shortened, shown

logger = logging.getLogger(__name__)

RUN_SCHEMA = 2
"""The only version that is read. The file contains its own hash."""
MAX_BYTES = 16 << 20
WRITTEN_OPTIONS = (("experiment.json", "options"), (manifests.MANIFEST, "experiment"))
"""File and key with the options of an experiment: in an export, in a checkpoint."""
CHOICE = re.compile(r"(.+)@(best|\d+)")
"""Last part of a path that chooses a checkpoint of a run."""


class ExperimentOptions(dict[str, Any]):
    """Options by their dotted names (``model.width``), read from ``file``. A name it lacks raises ``UsageError``."""

    def __init__(self, values: Mapping[str, Any], file: Path) -> None:
        super().__init__(values)
        self.file = file

    def __missing__(self, name: str) -> Any:
        members = [key for key in self if key.startswith(f"{name}.")]
        if members:
            dotted = f"whose names are dotted: {shortened(members, 4)}; let the recipe read options[{members[0]!r}]"
            raise UsageError(f"{self.file}: {name!r} is a group of options, {dotted}")
        raise UsageError(
            f"{self.file}: its run had no option {name!r}, so the model is of another version of this recipe. Give a "
            f"newer run, or let the recipe read options.get({name!r}, VALUE) with the value it had then"
        )


def experiment_options(directory: Path) -> ExperimentOptions:
    """Read all options of the experiment behind a checkpoint or an export. Empty for any other directory.

    Raises ``UsageError`` for an unreadable file.
    """
    for name, key in WRITTEN_OPTIONS:
        path = directory / name
        if path.is_file():
            try:
                return ExperimentOptions(strict_json.read_object(path).get(key) or {}, path)
            except ValueError as error:
                raise UsageError(f"{path}: cannot be read ({error}); restore it from a copy") from None
    return ExperimentOptions({}, directory)


def has_trained(directory: Path) -> bool:
    """Return True if a start got beyond its first step. Without one, the directory is not bound to any options."""
    try:
        saved = load(directory)
    except FileNotFoundError:
        # A broken link: the file exists, its target does not.
        return (directory / RUN_FILE).is_symlink()
    except ValueError:
        # Somebody's run, which `read_run` recreates or refuses.
        return True
    # An incomplete file belongs to somebody's run as well.
    return bool(saved.get("trained")) or any(key not in saved for key in _NEEDED)


def refuse_changes(
    saved: Mapping[str, Any],
    experiment: Mapping[str, Any],
    allow: Sequence[str],
    free: Sequence[str],
    place: tuple[str, object],
    defaults: Mapping[str, Any],
    shapes: Sequence[str] = (),
) -> list[str]:
    """Raise ``UsageError`` with both values of each difference if ``place`` holds a different experiment.

    ``place`` is an option with its value. ``allow`` and ``free`` are options or groups of options that may differ. An
    option newer than the run is assumed to have had its default. Those in ``shapes`` decide the shapes of the weights,
    and are not proposed for ``allow``. Returns the differences in ``allow``.
    """
    refuse_unknown_allowed(allow, {**saved["experiment"], **experiment})
    resolved = saved.get("resolved", {})
    # Resolved values last: an option left open then and given now is compared with the value in use.
    before = {**defaults, **saved["experiment"], **resolved}
    changed: dict[str, str] = {}
    allowed: list[str] = []
    for key in sorted(before.keys() | experiment.keys()):
        was = before.get(key)
        now = experiment.get(key)
        if was == now or is_covered(key, free):
            continue
        if now is None and key in resolved:
            continue  # derived by the first start and kept
        difference = f"{key}: {shown(was)} there, {shown(now)} now"
        if is_covered(key, allow):
            allowed.append(difference)
        else:
            changed[key] = difference
    if changed:
        option, value = place
        # --allow takes all options at once, so the advice repeats those allowed already.
        advice = _advice([*allow, *changed], experiment)
        remedies = _remedies(option, {key: (before.get(key), experiment.get(key)) for key in changed}, advice, shapes)
        raise UsageError(
            f"{option}: {value} contains a different experiment:\n  " + "\n  ".join(changed.values()) + "\n"
            f"{_same_files(changed)}{remedies}"
        )
    return allowed


def _remedies(option: str, changed: Mapping[str, tuple[Any, Any]], advice: str, shapes: Sequence[str]) -> str:
    """Say what to do about ``changed``. Those among ``shapes`` would fail later even if ``advice`` were followed."""
    fixed = [key for key in changed if is_covered(key, shapes)]
    if not fixed:
        return f"give another --{option}, go back to the saved values, or {advice}"
    # A folder or an id of the Hub.
    are_places = all("/" in str(value) for key in fixed for value in changed[key])
    same = f"; if it is the same one in another place, {advice}" if are_places else ""
    names = ", ".join(fixed)
    return f"give another --{option}, or go back to the saved values: the weights do not fit another {names}{same}"


def _advice(keys: Sequence[str], experiment: Mapping[str, Any]) -> str:
    """Say how to accept changes of all ``keys`` on purpose. Changed data are better recorded than allowed."""
    allow = f"--allow {' '.join(keys)}"
    if DATA_FINGERPRINT not in keys or experiment.get(DATA_CHANGED) != "refuse":
        return f"accept the change with {allow}"
    others = " ".join(key for key in keys if key != DATA_FINGERPRINT)
    rest = f" --allow {others}" if others else ""
    return (
        f"continue with the changed data by --{DATA_CHANGED} allow{rest}: checkpoints then record which data were "
        f"used from which step. --allow {DATA_FINGERPRINT} would instead treat them as the data that the run began "
        f"with: {allow}"
    )


def _same_files(changed: Iterable[str]) -> str:
    """Return a line on how data can differ although their files are the same, if only the data differ, else nothing."""
    if [*changed] != [DATA_FINGERPRINT]:
        return ""
    return (
        "if the files are the same, the run began with another version of accel_train, or of a package that reads "
        "them, which produced other samples from them\n"
    )


def options_since(before: Mapping[str, Any], experiment: Mapping[str, Any]) -> str:
    """Name the options added to the recipe since the run began.

    Their defaults are assumed to be the former behaviour. This holds for options of this package, and for one of your
    own only if its default changes nothing.
    """
    added = [f"{name} {experiment[name]!r}" for name in sorted(experiment.keys() - before.keys())]
    if not added:
        return ""
    return (
        f"; the run began without {shortened(added, 5)}. If one of these changes training, the curve bends at this "
        "step: set it to what the run did before, or give another --output_dir"
    )


def new_run(
    directory: Path,
    config_text: str,
    experiment: Mapping[str, Any],
    resolved: Json,
    facts: Mapping[str, Any],
) -> Json:
    """Write ``config.yaml`` and ``run.json`` of a new run and return the content of the latter. Main process.

    ``facts`` are ``origin``, the checkpoint to start from, ``parent``, the run, name and hash of that checkpoint, and
    ``loads_with``, the class for loading the run's own checkpoints.
    """
    saved: Json = {
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


def with_changes(saved: Mapping[str, Any], experiment: Mapping[str, Any]) -> Json:
    """Return ``run.json`` with the allowed changes of a resume."""
    resolved = dict(saved["resolved"])
    for key in saved["resolved"]:
        if experiment.get(key) is not None:
            resolved[key] = experiment[key]
    return dict(saved) | {"experiment": dict(experiment), "resolved": resolved}


def renew_run(directory: Path, config_text: str, saved: Mapping[str, Any]) -> None:
    """Write ``config.yaml`` and ``run.json`` of a resume. Main process. Raises ``OSError``."""
    write_config(config_text, directory / CONFIG_FILE)
    try:
        load(directory)
    except FileNotFoundError:
        pass
    except ValueError:
        # `saved` was recalled from a checkpoint. The damaged file is kept for inspection.
        atomic_files.set_aside(directory / RUN_FILE)
    write_run(directory, saved)


def write_run(directory: Path, saved: Mapping[str, Any]) -> None:
    """Write ``run.json`` with its own hash. Main process."""
    rest = {key: value for key, value in saved.items() if key != "schema"}
    atomic_files.replace_json(directory / RUN_FILE, strict_json.sealed({"schema": RUN_SCHEMA} | rest))


def load(directory: Path) -> Json:
    """Read and check ``run.json``.

    Raises ``FileNotFoundError``, ``ValueError`` with the reason for a damaged file, and ``UsageError`` for a file of a
    newer version.
    """
    saved = strict_json.read_object(directory / RUN_FILE, MAX_BYTES)
    schema = saved.get("schema")
    # Not treated as damage: rebuilding it from a checkpoint would drop what a newer version has put there.
    if type(schema) is int and schema > RUN_SCHEMA:
        raise UsageError(
            f"{directory}/{RUN_FILE} has schema {schema}, this version reads {RUN_SCHEMA}: a newer accel_train "
            "wrote it, or it is damaged; update accel_train, or move it away to have it rebuilt from the newest "
            "checkpoint"
        )
    strict_json.check_seal(saved)
    for key, kind in _KINDS.items():
        if key in saved and not isinstance(saved[key], kind):
            raise ValueError(f"{key} is of type {type(saved[key]).__name__}; {kind.__name__} is required")
    return saved


_KINDS = {
    **dict.fromkeys(("run_id", "loads_with", "origin", INIT_FROM), str),
    **dict.fromkeys(("parent", "experiment", "resolved", "hub"), dict),
    "trained": bool,
}
_NEEDED = ("run_id", "experiment", "resolved")


def recall(directory: Path) -> tuple[Json | None, str | None]:
    """Return the content of ``run.json``, recreated from the newest usable manifest if the file is unusable.

    Returns it with the reason why ``run.json`` is unusable, or with None. Raises ``UsageError`` for a file of a newer
    version.
    """
    try:
        saved = load(directory)
        for key in _NEEDED:
            if key not in saved:
                raise ValueError(f"it has no {key!r}")
        return saved, None
    except UsageError:
        # A ValueError too, but the file of a newer version must not be recreated.
        raise
    except (FileNotFoundError, ValueError) as error:
        reason = str(error)
    for _, path in reversed(manifests.committed(directory / "checkpoints")):
        try:
            manifest = manifests.read(path)
        except ValueError:
            continue
        if all(manifest.get(key) is not None for key in _NEEDED) and manifest["experiment"]:
            # A checkpoint exists, so the lost file was of a run that had trained.
            kept = {key: manifest[key] for key in _NEEDED}
            return kept | {"trained": True, "made_again_from": path.name}, reason
    return None, reason


def read_run(directory: Path) -> Json:
    """Read ``run.json``, or recreate its content from the newest checkpoint with a warning.

    Raises ``UsageError`` if neither is usable.
    """
    saved, reason = recall(directory)
    if saved is None:
        raise UsageError(
            f"output_dir: {directory} is used, but its {RUN_FILE} cannot be read ({reason}), and no checkpoint there "
            "says what the experiment is; restore it from a backup, give another --output_dir, or --overwrite to "
            "delete what is there and start again"
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
    """Write the text returned by ``config_text``. Main process only."""
    replace_file(path, text.encode())


class Choice(NamedTuple):
    """A path with the word that chooses one of its checkpoints."""

    run: Path
    word: str
    """``best`` or a step."""


def choice_of(path: Path) -> Choice | None:
    """Split a path that ends with ``@STEP`` or ``@best``. Returns None for other paths, and for one that exists."""
    found = CHOICE.fullmatch(path.name)
    if found is None or path.exists():
        return None
    return Choice(path.with_name(found[1]), found[2])


def find_chosen(chosen: Choice, run: Path | None, checkpoints: Sequence[Path]) -> Path:
    """Return the checkpoint of a step, or the best one by ``checkpoints.best_metric`` of the run.

    Raises ``UsageError`` if there is none.
    """
    by_step = {facts.step: facts.path for facts in _facts(checkpoints)}
    steps = ", ".join(map(str, by_step)) or "none"
    if chosen.word == "best":
        path = best_of(run, checkpoints)
        if path is None:
            remedy = "it has no checkpoint yet"
            if by_step:
                remedy = f"name a step, as in {chosen.run}@{max(by_step)}; there are {steps}"
            raise UsageError(
                f"{chosen.run}@best: a run with checkpoints.best_metric in its config.yaml, and a checkpoint with that "
                f"metric, is required; {remedy}"
            )
        return path
    if int(chosen.word) not in by_step:
        raise UsageError(f"{chosen.run}@{chosen.word}: there is no checkpoint of this step; there are {steps}")
    return by_step[int(chosen.word)]


def best_of(run: Path | None, checkpoints: Sequence[Path]) -> Path | None:
    """Return the best checkpoint by ``checkpoints.best_metric`` of the run, or None without the option or metric."""
    metric, mode = best_metric(run)
    best = manifests.ranked(_facts(checkpoints), metric, mode)
    return best[0].path if best else None


def _facts(checkpoints: Sequence[Path]) -> list[manifests.CheckpointFacts]:
    """Return the facts of the readable checkpoints, oldest first."""
    found = ((path, manifests.read_if_valid(path)) for path in checkpoints)
    return [manifests.facts_from_manifest(path, facts) for path, facts in found if facts is not None]


def best_metric(run: Path | None) -> tuple[str | None, str]:
    """Return ``checkpoints.best_metric`` and ``best_mode`` of a run. The metric is None without a readable config."""
    options: dict[str, Any] = {}
    if run is not None:
        # Listing checkpoints also works beside a config.yaml that cannot be read.
        with suppress(UsageError):
            options = options_of(run, "checkpoints")
    return options.get("best_metric"), str(options.get("best_mode", "min"))


def options_of(run: Path, group: str) -> dict[str, Any]:
    """Return a group of options from the run's config.yaml, empty if there is none. Raises ``UsageError``."""
    # Imported late, because a reader of run.json alone needs no YAML.
    from accel_train.options.strict_yaml import YamlError, read_yaml

    path = run / CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        options: Any = read_yaml(path).get(group)
    except YamlError as error:
        raise UsageError(str(error)) from None
    # Somebody may have edited it by hand.
    return options if isinstance(options, dict) else {}

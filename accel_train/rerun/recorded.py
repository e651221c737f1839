"""A recorded run, opened for reading only: its log, its checkpoints and their options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from accel_train.commands.bundled import declaration_of, find_recipe, folder, recipe_names
from accel_train.commands.places import find_run
from accel_train.config import UsageError
from accel_train.metrics.records import last_pass, read_metrics
from accel_train.options.allowed import is_covered
from accel_train.options.tree import Tree, flatten, overlaid
from accel_train.rerun.starts import Line, Start
from accel_train.store import commit, manifest
from accel_train.store.manifest import Checkpoint
from accel_train.store.names import DATA_CHANGED, DATA_FINGERPRINT, METRICS_FILE
from accel_train.store.run_file import recall
from accel_train.wording import shortened

HUB = "hub:"
DATA_PATH = "data.path"
# Options that decide how long a run is, what it writes and where. They change no step.
WITHOUT_EFFECT = re.compile(r"output_dir|max_steps|max_epochs|collective_timeout_seconds|(checkpoints|hub|log)\..*")


@dataclass(frozen=True)
class RecordedRun:
    """A run directory. Nothing here writes to it."""

    place: str
    """Place of the run as given on the command line."""
    directory: Path
    saved: Mapping[str, Any]
    """Content of ``run.json``, or of a manifest in its place."""
    records: Sequence[Line]
    """Lines of ``metrics.jsonl``. Empty for a run from the Hub: it has no log."""
    checkpoints: Sequence[tuple[int, Path]]
    """Steps and directories, oldest first, unverified."""

    @property
    def run_id(self) -> str:
        """Id of the run, as in its manifests."""
        return str(self.saved["run_id"])

    @property
    def last_step(self) -> int:
        """Last step in the log or of a checkpoint, 0 for neither."""
        lines = self.lines("train")
        logged = max(lines, default=0)
        saved = self.checkpoints[-1][0] if self.checkpoints else 0
        return max(logged, saved)

    def lines(self, event: str) -> dict[int, Line]:
        """Return the lines of an event by step. Of a step repeated after a restart, the last line counts."""
        return {line["step"]: line for line in last_pass(self.records, event)}

    def newest_at(self, step: int) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest resumable checkpoint at or before ``step``, and the reasons against newer ones.

        Hashes every file of each candidate.
        """
        reasons: list[str] = []
        for saved, path in reversed(self.checkpoints):
            if saved > step:
                continue
            # Damaged ones are passed over as on a resume, and not loaded to be trained on.
            try:
                checkpoint = commit.verify(path)
            except ValueError as error:
                reasons.append(str(error))
                continue
            # Pushes to the Hub drop the optimizer state unless told to include it.
            if checkpoint.manifest.get("state", True):
                return checkpoint, reasons
            reasons.append(f"{path}: weights without optimizer state")
        return None, reasons

    def newest_manifest(self) -> Mapping[str, Any]:
        """Return the manifest of the newest checkpoint whose manifest is intact, or an empty one. Hashes no file."""
        for _, path in reversed(self.checkpoints):
            try:
                return manifest.read(path)
            except ValueError:
                # A checkpoint that is not resumed from is passed over.
                continue
        return {}

    def starts(self, first: int, last: int) -> list[Start]:
        """Return the starts that trained the steps ``first`` to ``last``, logged or not. Empty without a log."""
        return [start for _, start in self._begun(first, last)]

    @property
    def _allowed(self) -> set[str]:
        """Options, or groups of them, that any start was allowed to change."""
        return {name for record in self.records for name in record.get("config", {}).get("allow", ())}

    @property
    def _kept_its_data(self) -> bool:
        """True if no start can have had other data, wherever they were: each compared their fingerprint."""
        changeable = any(flatten(record.get("config", {})).get(DATA_CHANGED) == "allow" for record in self.records)
        is_known = bool(self.saved["experiment"].get(DATA_FINGERPRINT))
        return is_known and not changeable and not is_covered(DATA_FINGERPRINT, self._allowed)

    def _changes_steps(self, name: str, recipe: Path) -> bool:
        """Return True if a start was allowed to change the option ``name``, and it has an effect on the steps."""
        if not is_covered(name, self._allowed) or is_covered(name, free_options(recipe)):
            return False
        return name != DATA_PATH or not self._kept_its_data

    def changed_since_the_start(self, recipe: Path) -> list[str]:
        """Name the options that a later start changed with ``--allow``: ``run.json`` has only their new values.

        Options without an effect on the trajectory are left out. Imports the recipe if any option has changed.
        """
        before = flatten(next((record["config"] for record in self.records if record.get("event") == "config"), {}))
        now: Mapping[str, Any] = self.saved["experiment"]
        # A derived value is kept by a start that leaves the option open.
        used = values_of(self.saved)
        names = [name for name in before if name in now and before[name] not in (now[name], used[name])]
        return [f"{name} {before[name]!r} -> {now[name]!r}" for name in names if self._changes_steps(name, recipe)]

    def allowed_changes(self, first: int, last: int, used: Mapping[str, Any], recipe: Path) -> dict[int, list[str]]:
        """Map the step of each start among ``starts`` to the options that ``--allow`` let it change there.

        Each is compared with the start before it, and the first with the options ``used``. Empty without a log. An
        option that a start left to be derived was kept. Options without an effect on the trajectory are left out.
        Imports the recipe if any option has changed.
        """
        derived: Mapping[str, Any] = self.saved.get("resolved") or {}
        before = dict(used)
        changes: dict[int, list[str]] = {}
        for step, start in self._begun(first, last):
            for name, value in flatten(start.options).items():
                is_kept = value == before.get(name) or (value is None and name in derived)
                if not is_kept and self._changes_steps(name, recipe):
                    changes.setdefault(step, []).append(f"{name} {before.get(name)!r} -> {value!r}")
                    before[name] = value
        return changes

    def _begun(self, first: int, last: int) -> list[tuple[int, Start]]:
        """Return ``starts``, each with the step of the checkpoint that it began at."""
        starts: list[tuple[int, Start]] = []
        end = last
        # From the last one back, because a start trains again whatever follows its checkpoint.
        for number, begin in reversed(self._beginnings()):
            if begin < end and first <= end:
                starts.insert(0, (begin, self._start_at(number)))
            end = min(begin, end)
        return starts

    def _beginnings(self) -> list[tuple[int, int]]:
        """Return the number of each start's first record, with the step of its checkpoint."""
        beginnings: list[tuple[int, int]] = []
        for number, record in enumerate(self.records):
            if record.get("event") == "environment":
                beginnings.append((number, 0))
            elif record.get("event") == "resume" and beginnings:
                beginnings[-1] = (beginnings[-1][0], int(record["step"]))
        return beginnings

    def last_start(self) -> Start:
        """Return the start that wrote the end of the log."""
        numbers = [number for number, record in enumerate(self.records) if record.get("event") == "environment"]
        return self._start_at(numbers[-1])

    def _start_at(self, number: int) -> Start:
        environment = self.records[number]
        following = self.records[number + 1 : number + 2]
        options: Line = {}
        if following and following[0].get("event") == "config":
            options = following[0].get("config", {})
        return Start(environment, options)


def open_run(text: str) -> RecordedRun:
    """Open a run by its directory or its ``checkpoints/``. Raises ``UsageError`` for anything else."""
    place, directory = find_run(text)
    saved, reason = recall(directory)
    if saved is None:
        raise UsageError(f"{directory}: its run.json cannot be read ({reason}); give a run that has trained")
    path = directory / METRICS_FILE
    # A run can have lost its log and still be compared by its checkpoints.
    records = read_metrics(path) if path.is_file() else []
    return RecordedRun(text, directory, saved, records, manifest.committed(place.path / "checkpoints"))


def open_window(place: str, first: int, last: int, folder: Path) -> RecordedRun:
    """Open a run for the steps after ``first`` up to ``last``, downloaded to ``folder`` if it is on the Hub.

    Raises ``UsageError``, also for steps beyond its end.
    """
    is_on_hub = place.startswith(HUB)
    run = open_hub_run(place, first, last, folder / "downloaded") if is_on_hub else open_run(place)
    if last > run.last_step:
        raise UsageError(f"--steps {first}:{last}: {run.directory} ends at step {run.last_step}; give a window in it")
    return run


def open_hub_run(place: str, first: int, last: int, directory: Path) -> RecordedRun:
    """Download the newest checkpoint at or before ``first`` and those up to ``last``. Raises like ``hub.download``.

    The Hub has no log of a run.
    """
    from accel_train.hub.download import download, pushed_steps

    spec = place.removeprefix(HUB)
    if "@" in spec:
        raise UsageError(f"{place}: --steps chooses the checkpoints; leave out what follows the @")
    steps = pushed_steps(spec)
    before = [step for step in steps if step <= first]
    within = [step for step in steps if first < step <= last]
    if not before or not within:
        there = shortened([str(step) for step in steps], 12)
        raise UsageError(
            f"--steps {first}:{last}: {place} has the checkpoints {there}; one at or before step {first} is required, "
            f"and one after it up to step {last}, because the Hub has no log to compare with"
        )
    # Only what is needed: a checkpoint may have gigabytes.
    for step in (before[-1], *within):
        print(f"downloading step {step} of {place}", flush=True)
        download(f"{spec}@{step}", directory / "checkpoints")
    saved, reason = recall(directory)
    if saved is None:
        raise UsageError(f"{place}: its manifests do not say what the experiment is ({reason}); push it again")
    return RecordedRun(place, directory, saved, [], manifest.committed(directory / "checkpoints"))


def options_at(run: RecordedRun, checkpoint: Checkpoint | None) -> Tree:
    """Return the nested options of the run up to ``checkpoint``, or with None at its start.

    Those of the checkpoint, because a later start may have changed them with ``--allow``.
    """
    flat = run.saved["experiment"]
    if checkpoint is not None and checkpoint.manifest.get("experiment"):
        flat = checkpoint.manifest["experiment"]
    # The fingerprint is of the data, not an option.
    return overlaid({}, {name: value for name, value in flat.items() if name != DATA_FINGERPRINT})


def values_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in ``run.json`` or a manifest, with the derived values of those left open."""
    derived: Mapping[str, Any] = record.get("resolved") or {}
    options: Mapping[str, Any] = record.get("experiment") or {}
    return {name: derived.get(name) if value is None else value for name, value in options.items()}


@cache
def free_options(recipe: Path) -> tuple[str, ...]:
    """Return the options and groups of a recipe without an effect on the trajectory. Imports the recipe."""
    # Imported late, because it takes seconds and few runs have changed options.
    from accel_train.experiment_options import FREE_TO_CHANGE

    declared = declaration_of(recipe)
    own = () if declared is None else declared.free_to_change
    return (*FREE_TO_CHANGE, *own)


def changed_since(run: RecordedRun, checkpoint: Checkpoint) -> list[str]:
    """Name the options changed by a later start of the run, with their values at ``checkpoint`` and now."""
    before, now = values_of(checkpoint.manifest), values_of(run.saved)
    names = [name for name in now if name in before and not WITHOUT_EFFECT.fullmatch(name)]
    return [f"{name} {before[name]!r} -> {now[name]!r}" for name in names if before[name] != now[name]]


def recipe_of(run: RecordedRun, given: str | None) -> Path:
    """Return the recipe of the run: ``given``, or a bundled one named in the log.

    A run directory is data: no file named in it is executed, except the bundled one. Raises
    ``UsageError`` if ``--recipe`` is needed.
    """
    if given is not None:
        return find_recipe(given)
    files = [record.get("recipe") for record in run.records if record.get("event") == "environment"]
    # A notebook cell is not a file.
    if not files or files[-1] is None:
        raise UsageError(f"{run.place}: does not record its recipe; name it with --recipe, a file or a bundled name")
    # The last start, because a run may have been moved to another recipe's path.
    named = Path(str(files[-1]))
    if named.stem not in recipe_names():
        raise UsageError(
            f"{run.place}: was trained by {named}, which is not a recipe of this package; {_remedy(named)}"
        )
    # Compared by content: `accel-train init` copies recipes to be changed under the same name.
    bundled = folder("recipes") / named.name
    if named.is_file() and named.read_bytes() != bundled.read_bytes():
        raise UsageError(
            f"{run.place}: was trained by {named}, which differs from the bundled recipe of that name; say which one "
            f"to run with --recipe {named} or --recipe {named.stem}"
        )
    return bundled


def _remedy(named: Path) -> str:
    if named.is_file():
        return f"give --recipe {named}"
    return "the file no longer exists: if it has moved, give its new path with --recipe"


def name_of(recipe: Path) -> str:
    """Return a recipe's name for a command line: that of a bundled one, else its path."""
    bundled = recipe.parent == folder("recipes")
    return recipe.stem if bundled else str(recipe)

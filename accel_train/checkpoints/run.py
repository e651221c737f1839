"""Opened run directory, shared by all parts of training, and the counter of starts that died while loading."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accel_train.checkpoints.policy import POLICIES, CheckpointConfig, RunOptions
from accel_train.config import UsageError, expand_path
from accel_train.data.tables.ledger import read_ledger
from accel_train.hub.options import HubConfig
from accel_train.options.allowed import is_covered
from accel_train.runtime import early_stop
from accel_train.store import atomic_files, commit, failpoints, strict_json
from accel_train.store.exports.extras import extra_files
from accel_train.store.lock import Lock
from accel_train.store.manifest import Checkpoint, checkpoint_name, committed
from accel_train.store.names import DATA_FINGERPRINT, EVALUATION_FILE, LOADING_FILE, OTHER_DATA, REPORT, RUN_FILE
from accel_train.store.run_file import load, renew_run, write_run
from accel_train.training.health import rollback
from accel_train.training.health.rollback import Rollback

HUB = "hub:"
MAX_NOTE_BYTES = 64 << 10
OWED = "owes_evaluation"
"""Key in ``run.json`` of the step whose evaluation is left to the next start."""

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """Opened run directory. Every rank holds one. Only the main process writes to it."""

    directory: Path
    run_id: str
    checkpoint: Checkpoint | None
    """Newest verified checkpoint, None for a fresh start."""
    decision: str
    """Log line on the start or the resume, with the reason."""
    saved: Mapping[str, Any]
    """Current content of ``run.json``."""
    timeout_seconds: float = 1800.0
    """Longest wait for the other ranks during a save: ``collective_timeout_seconds`` of the config."""
    initial_weights: Path | None = None
    """Directory of the weights named by ``init_from``. The same on every rank."""
    base: Mapping[str, Any] | None = None
    """Reference to the files of the frozen parameters (``PretrainedBase.reference``): checkpoints leave these out.
    None: checkpoints hold every parameter."""
    embedded_base: Mapping[str, Any] | None = None
    """Source and definition of the base whose parameters checkpoints hold. None: no base, or none is embedded."""
    hub_base: Mapping[str, Any] | None = None
    """Hub id and commit of a base without frozen parameters. None: no such base, or not one from the Hub."""
    rollbacks: Sequence[Rollback] = ()
    """Rollbacks of earlier starts."""
    grown: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Batch sizes set from measured gradient noise so far: pairs of a step and the samples of each step after it."""
    unwritten_config: str | None = None
    """``config.yaml`` of a resume, to be written with ``saved`` after the first step."""
    is_restored: bool = False
    """``restore`` has restored ``checkpoint``."""
    _lock: Lock | None = field(default=None, repr=False)

    def close(self, error: type[BaseException] | None = None, *_: object) -> None:
        """Release the lock on the run directory. ``error`` is the type of the exception that ended the run, if any."""
        if self._lock is not None:
            self._lock.release(error)

    @contextmanager
    def loading(self, *, last: bool) -> Generator[None]:
        """Count an attempt to read a part of the checkpoint, as ``counted`` does. Main process.

        ``last`` marks the last part. Does nothing without a checkpoint.
        """
        # Only the main process holds the lock, and it counts for all.
        if self._lock is None or self.checkpoint is None:
            yield
        else:
            with counted(self.directory, self.checkpoint, last=last):
                yield

    def note_training(self) -> None:
        """Bind the directory to this experiment. Main process, after a step. Only the first call writes."""
        if self.saved.get("trained") and self.unwritten_config is None:
            return
        self.saved = dict(self.saved) | {"trained": True}
        config_text = self.unwritten_config
        self.unwritten_config = None
        # The next save reports a disk that fails.
        with suppress(OSError):
            if config_text is None:
                write_run(self.directory, self.saved)
            else:
                renew_run(self.directory, config_text, self.saved)

    def begin_checkpoint(
        self, step: int, write_extras: Callable[[Path], None], *, state: bool
    ) -> tuple[Path, list[str]]:
        """Make the temporary directory of a save, with the recipe's files in it. Main process.

        Returns it and the names of these files, without those that no checkpoint may hold. Raises whatever
        ``write_extras`` raises, and leaves no directory then.
        """
        # A unique name for each attempt, so that the leftovers of a killed save are never written into.
        temporary = self.checkpoints / commit.temporary_name(step, atomic_files.new_nonce())
        try:
            self._restore_directory()
            folder = temporary / "optimizer" if state else temporary
            folder.mkdir(parents=True)
            failpoints.hit("after_mkdir")
            # Code of the recipe, which may fail in any way. Nothing else has been written by then.
            names = extra_files(temporary, write_extras)
        except Exception:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return temporary, names

    def _restore_directory(self) -> None:
        """Recreate the directory if it was deleted during the run. Main process. Raises ``OSError``."""
        if not (self.directory / RUN_FILE).exists() or not self.checkpoints.is_dir():
            logger.warning("%s or part of it was deleted during the run; it is recreated", self.directory)
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            write_run(self.directory, self.saved)

    def report_directory(self, evaluated: str | None = None) -> Path:
        """Return the folder of the report, which may not exist yet.

        ``evaluated`` is the fingerprint of the data of an evaluation without training. If the checkpoint was trained on
        other data, the report has a folder of its own, so that its metrics are never taken for those of the run.
        """
        report = self.directory / REPORT
        if evaluated is None or self.checkpoint is None:
            return report
        experiment: Mapping[str, Any] = self.checkpoint.manifest.get("experiment") or {}
        trained_on = experiment.get(DATA_FINGERPRINT, evaluated)
        # A custom loop may write no ledger.
        with suppress(UsageError):
            trained_on = read_ledger(self.checkpoint.path / "assets")[-1].fingerprint
        if trained_on == evaluated:
            return report
        return report / OTHER_DATA

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.directory / "checkpoints"

    def results(self, step: int) -> list[str]:
        """List the checkpoint of ``step`` and the files of the report that exist, relative to the directory."""
        # Hidden files are the temporary ones of a killed writer.
        reports = sorted((self.directory / REPORT).glob("[!.]*"))
        checkpoint = self.checkpoints / checkpoint_name(step)
        found = [*([checkpoint] if checkpoint.exists() else []), *reports]
        return [path.relative_to(self.directory).as_posix() for path in found]

    def finished_notices(self, max_steps: int, option: str, remedy: str = "") -> list[str]:
        """Return lines for the log of a start that has no step left.

        ``option`` sets the length of the run, and ``remedy`` is what is needed besides a larger value of it.
        """
        lines = [f"the run is finished: step {self.start_step} of {max_steps}; raise --{option} to continue{remedy}"]
        report = self.directory / REPORT
        if not (report / EVALUATION_FILE).exists():
            lines.append(f"{report} has no {EVALUATION_FILE}: --evaluate_only writes it")
        return lines

    def rollback_notices(self, data: str) -> list[str]:
        """Return lines for the log about samples left out of the run, at a start with data of this hash."""
        return rollback.notices(self.directory, self.rollbacks, data)

    def resolved(self, key: str) -> Any:
        """Return a value derived by the first start and kept by later ones, such as ``schedule.decay_steps``."""
        return self.saved["resolved"][key]

    def owe_evaluation(self, step: int | None) -> None:
        """Note that the last evaluation, after ``step``, is left to the next start. None: nothing is left.

        Main process. A failing disk is no error, because `--evaluate_only` can make the evaluation later.
        """
        with suppress(OSError, ValueError):
            # Loaded again, because the Hub's queue may have added to it since the run was opened.
            write_run(self.directory, load(self.directory) | {OWED: step})

    def add_owed_evaluation(self, metrics: Mapping[str, float], policy: CheckpointConfig, hub: HubConfig) -> None:
        """Add the metrics of an owed evaluation to its checkpoint, and push what waits. Main process.

        Raises ``OSError``.
        """
        # Imported here: the first imports this module, and most starts push through the saver instead.
        from accel_train.checkpoints.contents import finite_metrics
        from accel_train.hub.pusher import push_the_rest

        assert self.checkpoint is not None, "a run that owes an evaluation has one"
        path = self.checkpoint.path
        commit.rewrite_manifest(path, {"metrics": finite_metrics(metrics)})
        self.owe_evaluation(None)
        push_the_rest(self.directory, commit.open_verified(path), hub, policy.best_metric, policy.best_mode)

    @property
    def owes_evaluation(self) -> bool:
        """True if a stop interrupted the evaluation after the last step, the one of the checkpoint."""
        return self.checkpoint is not None and self.saved.get(OWED) == self.start_step

    @property
    def has_no_weights(self) -> bool:
        """True if neither a checkpoint nor ``init_from`` brings weights: the model keeps its initial ones."""
        return self.checkpoint is None and self.initial_weights is None

    @property
    def start_step(self) -> int:
        """Number of optimizer steps already done."""
        if self.checkpoint is None:
            return 0
        return self.checkpoint.step


def earlier_assets(options: RunOptions) -> Path | None:
    """Return the folder ``assets`` of the newest checkpoint in ``output_dir``, else in the run named by ``resume``.

    ``resume`` may name a checkpoint itself. A folder with damaged files is skipped. Returns None if there is no folder,
    and for a checkpoint on the Hub, which is downloaded later. In the latter case raises ``UsageError`` if
    ``data.changed`` is ``allow``, because the folder is then required.
    """
    found = _newest_assets(earlier_checkpoints(options))
    if found is None and options.resume.startswith(HUB) and options.experiment.get("data.changed") == "allow":
        raise _not_downloaded_yet("--data.changed allow", options.resume)
    return found


class WeightsAssets(NamedTuple):
    """Folder ``assets`` that belongs to the weights of a start."""

    folder: Path
    resumes: bool
    """True for a resume or an evaluation, False for a new run with ``init_from``."""


def assets_of_weights(options: RunOptions) -> WeightsAssets | None:
    """Return the assets that belong to the weights of this start: of ``earlier_assets``, else those of ``init_from``.

    For recipes whose weights are only valid with their own assets. Raises ``UsageError`` as ``earlier_assets`` does,
    and for a checkpoint on the Hub if ``allow`` accepts other data, because its assets are downloaded too late.
    """
    folder = earlier_assets(options)
    if folder is not None:
        return WeightsAssets(folder, resumes=True)
    if options.resume.startswith(HUB) and is_covered(DATA_FINGERPRINT, options.allow):
        raise _not_downloaded_yet(f"--allow {DATA_FINGERPRINT}", options.resume)
    init_from = weights_to_read(options)
    if init_from is None:
        return None
    from accel_train.checkpoints.fetch import place_of_weights
    from accel_train.checkpoints.refused import find_saved

    place = place_of_weights(init_from)
    beside = [path for _, path in committed(place)]
    folder = _newest_assets([place, *(beside or find_saved(place, "init_from"))])
    if folder is None:
        return None
    return WeightsAssets(folder, resumes=False)


def weights_to_read(options: RunOptions) -> str | None:
    """Return ``init_from``, or None for a resume, which has weights of its own."""
    if options.resume not in POLICIES or earlier_checkpoints(options):
        return None
    return options.init_from


def _newest_assets(places: Sequence[Path]) -> Path | None:
    """Return the intact folder ``assets`` of the last place that has one, or None."""
    return next((place / "assets" for place in reversed(places) if commit.is_intact(place, "assets")), None)


def _not_downloaded_yet(option: str, resume: str) -> UsageError:
    return UsageError(
        f"{option} with --resume {resume}: what the run has learned from its data so far is required to read the new "
        "data, but a checkpoint on the Hub is fetched after that; download it first (hf download ORG/NAME --revision "
        "step-... --local-dir FOLDER) and give --resume FOLDER"
    )


def earlier_checkpoints(options: RunOptions) -> list[Path]:
    """List the checkpoints in ``output_dir``, else the path given by ``resume`` and those in it. The newest is last."""
    # Imported here: the saver imports this module, and needs nothing from that one.
    from accel_train.checkpoints.refused import find_saved, place_of

    if options.overwrite:
        return []
    found = find_saved(expand_path(options.output_dir))
    if not found and options.resume not in POLICIES and not options.resume.startswith(HUB):
        place = place_of(options.resume, "resume")
        found = [place, *find_saved(place, "resume")]
    return found


@contextmanager
def counted(directory: Path, checkpoint: Checkpoint, *, last: bool) -> Generator[None]:
    """Count an attempt to read the checkpoint, and take the count back once the block ends. Main process.

    A request to stop takes it back as well. Any other end, such as a crash, remains counted. Reading the ``last`` part
    resets the count to 0.
    """
    before = attempts(directory, checkpoint)
    early_stop.EARLY.undo = lambda: _write_count(directory, checkpoint, before)
    # Counted before the attempt, because a process that is killed counts nothing afterwards.
    _write_count(directory, checkpoint, before + 1)
    try:
        yield
    except (UsageError, torch.OutOfMemoryError, KeyboardInterrupt):
        # Refused options, a full device and Ctrl-C are no fault of the checkpoint.
        _write_count(directory, checkpoint, before)
        raise
    else:
        if last:
            before = 0
        _write_count(directory, checkpoint, before)
    finally:
        early_stop.EARLY.undo = None


def attempts(directory: Path, checkpoint: Checkpoint) -> int:
    """Return how many starts in a row died while they read this checkpoint. Main process."""
    try:
        note = strict_json.read_object(directory / LOADING_FILE, MAX_NOTE_BYTES)
        strict_json.check_seal(note)
    except (FileNotFoundError, ValueError):
        # A damaged count says nothing against the checkpoint, which was verified.
        return 0
    count = note.get("attempts")
    # The count of another checkpoint says nothing about this one.
    if isinstance(count, int) and note.get("checkpoint") == checkpoint.path.name:
        return count
    return 0


def _write_count(directory: Path, checkpoint: Checkpoint, count: int) -> None:
    if count:
        note = {"checkpoint": checkpoint.path.name, "attempts": count}
        atomic_files.replace_json(directory / LOADING_FILE, strict_json.sealed(note))
    else:
        atomic_files.delete_file(directory / LOADING_FILE)

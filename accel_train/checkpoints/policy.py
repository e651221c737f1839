"""Options for opening a run, for saving and for retention, and the decisions made from them without file access."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from accel_train.config import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UsageError,
    expand_path,
    refuse_without_effect,
)
from accel_train.hub.options import HubConfig
from accel_train.options.allowed import refuse_unknown_allowed
from accel_train.precision import Precision, dtype_of
from accel_train.runtime.exiting import started_again
from accel_train.store import manifest as manifests
from accel_train.store.manifest import Checkpoint
from accel_train.store.names import DATA_FINGERPRINT, RUN_FILE
from accel_train.wording import declared_of, did_you_mean, nearest, words_of

logger = logging.getLogger(__name__)

BasePolicy = Literal["auto", "embed", "reference"]
DEFAULT_MINUTES = 10.0
"""Default limit on the work lost in a crash."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Options of saving: how often, in which form, and which checkpoints are kept."""

    save_every: NonNegativeInt = 0
    """Optimizer steps between saves. 0: off. The final state is always saved."""
    save_every_minutes: NonNegativeFloat | None = None
    """Minutes between saves, by the main process's clock. 0: off. None: 10, or off if save_every or
    save_every_epochs is set."""
    save_every_epochs: NonNegativeFloat = 0.0
    """Epochs (passes over the data) between saves. 0: off."""
    save_state: bool = True
    """Save optimizer state. false: weights and EMA only, from which a run cannot resume."""
    save_precision: Precision = "fp32"
    """Dtype of model.safetensors and ema.safetensors. Exact fp32 copies are kept with the optimizer state."""
    base: BasePolicy = "auto"
    """Frozen parameters: embed saves them in every checkpoint. reference names the files that they were loaded from,
    with their hashes, and verifies these at every start. auto: reference if the model has such files, else embed."""
    asynchronous: bool = True
    """Write in the background. false: the loop waits until the checkpoint is committed."""
    keep_last: NonNegativeInt = 3
    """Number of newest checkpoints to keep. 0: all."""
    keep_best: NonNegativeInt = 0
    """Number of best checkpoints by best_metric to keep as well. 0: off."""
    best_metric: str | None = None
    """Name of an evaluation metric, as in report/evaluation.json."""
    best_mode: Literal["min", "max"] = "min"
    """Direction of best_metric: min if smaller is better."""
    patience: PositiveInt | None = None
    """End the run after this many evaluations without a better best_metric (early stopping). None: run to the end."""
    keep_every: NonNegativeInt = 0
    """Also keep every checkpoint whose step is a multiple of this, forever. 0: off."""
    keep_window_steps: NonNegativeInt = 0
    """Also keep all checkpoints at most this many steps older than the newest. 0: off."""
    keep_window_epochs: NonNegativeFloat = 0.0
    """Also keep all checkpoints at most this many epochs older than the newest. 0: off."""
    pinned: tuple[str, ...] = ()
    """Names of checkpoints (checkpoint_00001200) to keep forever."""
    keep_state_last: NonNegativeInt = 0
    """Keep optimizer state only in this many of the newest checkpoints. It is at least half of a checkpoint. 0: in
    all."""
    on_error: Literal["stop", "continue"] = "stop"
    """After a failed save: stop the run, or warn and continue. A failed final save always ends in an error."""
    grace_seconds: PositiveFloat = 30.0
    """Time between the scheduler's SIGTERM and SIGKILL. A warning is logged if the last save took longer."""

    @property
    def bytes_of_a_value(self) -> int:
        """Bytes of a value in model.safetensors and ema.safetensors."""
        return dtype_of(self.save_precision).itemsize

    @property
    def minutes(self) -> float:
        """Minutes between saves by the clock, 0 if off."""
        if self.save_every_minutes is not None:
            return self.save_every_minutes
        if self.save_every or self.save_every_epochs:
            return 0.0
        # Without any option, a long run must not be saved only at its end.
        return DEFAULT_MINUTES

    def __post_init__(self) -> None:
        # Other names may be metrics of the user's own, whose direction only the user knows.
        if self.best_metric and self.best_mode == "min" and _larger_is_better(self.best_metric):
            raise UsageError(
                f"checkpoints.best_mode: min: {self.best_metric} is better the larger it is, so min would keep the "
                "worst; give --checkpoints.best_mode max"
            )
        self._refuse_without_effect()
        invalid = invalid_pins(self.pinned)
        if invalid:
            raise UsageError(
                f"checkpoints.pinned: {invalid[0]!r} is not a checkpoint name; give e.g. checkpoint_00001200"
            )

    def notices(self) -> list[str]:
        """Return a log line with the direction of ``best_metric``, which its name alone may not tell."""
        if self.best_metric is None:
            return []
        extreme = "lowest" if self.best_mode == "min" else "highest"
        return [f"checkpoints.best_metric: {self.best_metric}: the {extreme} is best (best_mode {self.best_mode})"]

    def refuse_other_direction(self, directions: Mapping[str, Literal["min", "max"]]) -> None:
        """Raise ``UsageError`` if ``best_mode`` contradicts the recipe, which declares ``directions`` of its metrics.

        A key of ``directions`` is the name of a metric, or its last words.
        """
        mode = declared_of(str(self.best_metric), directions) or self.best_mode
        if mode != self.best_mode:
            raise UsageError(
                f"checkpoints.best_mode: {self.best_mode}: for {self.best_metric} the recipe declares {mode}; give "
                f"--checkpoints.best_mode {mode}"
            )

    def refuse_single_evaluation(self, every: int) -> None:
        """Raise ``UsageError`` for ``patience`` if ``evaluation.every`` is 0: only the end is evaluated then."""
        if every == 0:
            because = "with evaluation.every: 0, which evaluates only at the end"
            instead = "set evaluation.every to a number of steps"
            refuse_without_effect(self, "checkpoints", ["patience"], because, instead)

    def _refuse_without_effect(self) -> None:
        if not self.best_metric:
            names = ("keep_best", "patience", "best_mode")
            instead = "give the name of an evaluation metric (a key of evaluation.json)"
            refuse_without_effect(self, "checkpoints", names, "without checkpoints.best_metric", instead)
        if self.keep_last == 0:
            because = "with checkpoints.keep_last: 0, which keeps every checkpoint"
            refuse_without_effect(self, "checkpoints", _KEEP_MORE, because, "give --checkpoints.keep_last 1 or more")
        if not self.save_state:
            because = "with checkpoints.save_state: false, which saves no optimizer state"
            refuse_without_effect(self, "checkpoints", ["keep_state_last"], because)
        keeps_more = any(getattr(self, name) for name in _KEEP_MORE)
        if self.keep_state_last >= self.keep_last > 0 and not keeps_more:
            because = f"with checkpoints.keep_last: {self.keep_last}, which keeps no more checkpoints than that"
            instead = f"give less than {self.keep_last}, keep more"
            refuse_without_effect(self, "checkpoints", ["keep_state_last"], because, instead)


LARGER_IS_BETTER = (
    *("accuracy", "acc", "top1", "top5", "recall", "f1", "auc", "auroc", "r2", "iou", "miou", "dice", "psnr", "ssim"),
    *("bleu", "rouge", "cosine", "gain", "caption_exact", "caption_words"),
)
"""Last words of metric names for which larger is better: common ones, and those of the recipes."""
_KEEP_MORE = ("keep_best", "keep_every", "keep_window_steps", "keep_window_epochs")
"""Options that keep checkpoints older than the newest ``keep_last``."""


def _larger_is_better(metric: str) -> bool:
    # Match whole words: `err2` is not `r2`. Other loggers separate words with slashes, dots and hyphens.
    words = "_".join(["", *words_of(metric)])
    return words.endswith(tuple(f"_{last}" for last in LARGER_IS_BETTER))


def refuse_unknown_metric(best_metric: str | None, metrics: Sequence[str]) -> None:
    """Raise ``UsageError`` for a ``best_metric`` reported by no evaluation of this run."""
    if best_metric is None or best_metric in metrics:
        return
    hint = did_you_mean(nearest(best_metric, metrics))
    raise UsageError(
        f"checkpoints.best_metric: {best_metric!r} is not reported by this run's evaluation{hint}; it reports "
        f"{', '.join(metrics) or 'nothing'}; give one of these, or leave checkpoints.best_metric out"
    )


def due(config: CheckpointConfig, step: int, epoch: Callable[[int], float]) -> bool:
    """Return True if a save is due after ``step`` steps, by steps or by epochs. The same on every rank."""
    if config.save_every > 0 and step % config.save_every == 0:
        return True
    every = config.save_every_epochs
    # Epochs are fractions and grow with every step: save at the step that passes a multiple of `every`.
    if every <= 0:
        return False
    # Rounding may put a step just below the multiple that it reaches: its save would come a step late, or never.
    return int(epoch(step) / every + 1e-9) > int(epoch(step - 1) / every + 1e-9)


def warn_about_grace(checkpoint: Checkpoint | None, config: CheckpointConfig, main: bool) -> None:
    """Warn at the start if the last save took longer than the scheduler's grace period."""
    if checkpoint is None or not main:
        return
    seconds = float(checkpoint.manifest.get("seconds", 0.0))
    if seconds > config.grace_seconds:
        logger.warning(
            "the last save took %.1f s and checkpoints.grace_seconds is %g: after SIGTERM the scheduler may kill this "
            "run before it has saved; raise the scheduler's grace period and this option, or save more often",
            seconds,
            config.grace_seconds,
        )


POLICIES = ("auto", "must", "never")
"""Values of ``resume`` other than the place of a checkpoint."""


@dataclass(frozen=True)
class RunOptions:
    """Options of ``open_run``. ``experiment.ExperimentConfig`` documents those of the same name.

    Raises ``UsageError`` for contradictory options, and for a name in ``allow`` that is no option.
    """

    output_dir: str
    experiment: Mapping[str, Any]
    """All options of the experiment by dotted name. The directory is bound to them from the first step on."""
    config_text: str = ""
    """The config as YAML, kept as config.yaml."""
    free_to_change: tuple[str, ...] = ()
    """Options and groups of options without an effect on the trajectory, except for its length."""
    decides_shapes: tuple[str, ...] = ()
    """Options and groups of options that decide the shapes of the weights, so that no resume can change them."""
    loads_with: str | None = None
    """``module.Class`` with a ``from_pretrained`` that loads a checkpoint, shown in the card on the Hub."""
    resume: str = "auto"
    allow: tuple[str, ...] = ()
    overwrite: bool = False
    evaluate_only: bool = False
    init_from: str | None = None
    hub: HubConfig | None = None
    """Options of the Hub. The repository is checked unless ``evaluate_only`` is set."""
    collective_timeout_seconds: float = 1800.0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults by dotted name, assumed for options that the recipe did not have when the run began."""

    def __post_init__(self) -> None:
        for name, value in self.experiment.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise UsageError(
                    f"experiment: {name}: {value!r} cannot be written to run.json ({error}): finite numbers, text, "
                    "true, false, None, lists and dicts are required; give it as text, as in str(value)"
                ) from None
        # A resume also accepts options saved by the run that the recipe no longer has.
        if not self._continues_a_run:
            refuse_unknown_allowed(self.allow, [*self.experiment, DATA_FINGERPRINT])
        if self.overwrite and (self.resume == "must" or self.evaluate_only):
            raise UsageError(
                "overwrite: true deletes what --resume must or --evaluate_only needs; leave one of them out"
            )
        if self.overwrite and self.resume not in POLICIES:
            raise UsageError(
                f"overwrite: true with resume: {self.resume} would delete before that is known to be readable; leave "
                "--overwrite out and give an unused --output_dir"
            )

    @property
    def _continues_a_run(self) -> bool:
        """True if the options of an earlier start will be compared with these."""
        if self.overwrite or self.resume == "never":
            return False
        return self.resume not in POLICIES or (expand_path(self.output_dir) / RUN_FILE).exists()


def of_this_start(options: RunOptions) -> RunOptions:
    """Return the options without ``overwrite`` and ``resume`` if an earlier start of the same command obeyed them."""
    if not started_again():
        return options
    return replace(options, overwrite=False, resume="auto")


def invalid_pins(names: Iterable[str]) -> list[str]:
    """Filter names no checkpoint can have, such as ``step_100`` or ``checkpoint_100``."""
    invalid: list[str] = []
    for name in names:
        match = manifests.NAME.fullmatch(name)
        # The pattern also matches names with extra zeros, such as checkpoint_0000000100, which no save writes.
        if not match or manifests.checkpoint_name(int(match[1])) != name:
            invalid.append(name)
    return invalid


def refuse_smoke_of_a_run(output_dir: str, flags: Mapping[str, Any], *, evaluates_only: bool) -> None:
    """Raise ``UsageError`` for ``--smoke`` of a command that needs a checkpoint: a trial empties its own directory."""
    resume = flags.get("resume", "auto")
    asked = None
    if flags.get("evaluate_only", evaluates_only):
        asked = "evaluate_only: true", "--evaluate_only false"
    elif resume not in ("auto", "never"):
        asked = f"resume: {resume}", "--resume auto"
    if asked is not None:
        option, flag = asked
        raise UsageError(
            f"--smoke with {option}: a trial begins at step 0 in a directory of its own, {output_dir}-smoke, where no "
            f"checkpoint is kept; leave --smoke out, or give {flag} to try the training"
        )

"""Logging options and progress of a run: a bar on a terminal, elsewhere one plain line per log point."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NoReturn

from accel_train.config import PositiveInt, refuse_without_effect
from accel_train.wording import FILE_ONLY

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LogConfig:
    """Logging of a run."""

    log_every: PositiveInt = 10
    """Optimizer steps between two training lines. The host waits for the device at every log point, so 1 is slower on
    a GPU."""

    per_sample: bool = False
    """Write the loss of each sample of each step to sample_losses.jsonl, with its weight and its time: about 100 bytes
    per sample. Log points write them, and take longer for it."""

    grad_norms: Literal["parts", "blocks", "none"] = "parts"
    """Norm of the gradient by part of the model, in training lines. blocks: repeated blocks one by one. Not under ZeRO,
    whose engine keeps the gradients to itself."""
    update_ratios: bool = False
    """Size of the update over the size of the weights, by the same parts: about 1e-3 is usual. Takes a copy of the
    trained weights in the steps of log points."""

    trackers: tuple[str, ...] = ()
    """Trackers beside metrics.jsonl: tensorboard, wandb, trackio, mlflow, swanlab, or any other that Accelerate
    supports. Each needs its package. A missing package stops the run before training."""

    project: str = "accel_train"
    """Name of the project in trackers."""

    run_name: str | None = None
    """Name of the run in trackers. None: the name of the output directory."""

    progress_bar: Literal["auto", "on", "off"] = "auto"
    """auto: a bar on a terminal, elsewhere one plain line per log point. on: always the bar. off: lines."""

    def __post_init__(self) -> None:
        if not self.trackers:
            because = "without log.trackers, and only trackers show it"
            instead = "give --log.trackers tensorboard or another one"
            refuse_without_effect(self, "log", ["project", "run_name"], because, instead)

    def refuse_missing_trackers(self) -> None:
        """Raise ``UsageError`` for a tracker that is unknown or not installed."""
        # Not at the top, or every declaration of options would import the trackers.
        from accel_train.metrics.tracking.trackers import resolve_trackers

        resolve_trackers(self.trackers)


@dataclass(frozen=True)
class Labels:
    """Presentation of a recipe's metrics on the console and in the curves."""

    loss_of: str | None = None
    """Field of a training line with the kind of its loss, if losses of different steps are of different kinds. None if
    all are of one kind."""
    units: Mapping[str, str] = field(default_factory=dict[str, str])
    """Unit of evaluation metrics, by the last word of their name."""
    titles: Mapping[str, str] = field(default_factory=dict[str, str])
    """Title of the panel of evaluation metrics, by the last word of their name."""
    baselines: tuple[str, ...] = ()
    """Words that are in the names of evaluation metrics of baselines, such as ``linear_fit``."""
    own_summary: bool = False
    """True if the recipe's evaluation logs its own summary, so that the console does not list all metrics after it."""

    def is_baseline(self, metric: str) -> bool:
        """Return True for a metric of a baseline beside the model, not of the model itself."""
        return any(f"_{word}_" in f"_{metric}_" for word in self.baselines)


TERM = "loss_"
"""Prefix of the names of loss terms in a training line."""
OWN = "train_"
"""Prefix of the names of a recipe's own metrics in a training line (``window.backward``)."""
BY_TIME = re.compile(r"_at_\d\.\d+$")
"""Suffix of the names of mean losses by time. Those of a term named ``loss`` also begin with ``TERM``."""
MOST_DAYS = 9_999
"""Longer times are not spelled out. They come from runs without a real end, as with the largest possible max_steps."""
BAR_FORMAT = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
"""Without tqdm's time left, which counts an evaluation as a slow step."""


class Progress:
    """Display of step, loss, throughput and time left. Main process only.

    A bar if both stdout and stderr are terminals (``on`` draws it anyway), otherwise log lines: they stay readable in a
    pipe or batch system. With a bar, the lines still go to the log file.
    """

    def __init__(
        self, bar: Literal["auto", "on", "off"], max_steps: int, start_step: int, loss_of: str | None = None
    ) -> None:
        self._max_steps = max_steps
        self._loss_of = loss_of
        self._fields: Mapping[str, object] = {}
        self._shown: list[str] = []
        self._bar: tqdm[NoReturn] | None = None
        if bar == "on" or (bar == "auto" and _on_terminal()):
            # Not tqdm.auto, which warns in notebooks without ipywidgets.
            from tqdm import tqdm

            self._bar = tqdm(
                total=max_steps, initial=start_step, bar_format=BAR_FORMAT, unit="step", dynamic_ncols=True
            )

    def advance(self, step: int) -> None:
        """Move the bar. It is redrawn at most ten times a second, and nothing waits for the device."""
        if self._bar is not None:
            shown = list(self._shown)
            left = time_left(step, self._max_steps, self._fields)
            if left:
                shown.insert(0, f"{left} left")
            self._bar.set_postfix_str("  ".join(shown), refresh=False)
            self._bar.update(step - self._bar.n)

    def show(self, step: int, fields: Mapping[str, object]) -> None:
        """Show the fields of a training line at a log point."""
        self._fields = fields
        self._shown = describe(fields, self._loss_of)
        parts = [f"step {step}/{self._max_steps}", *self._shown]
        left = time_left(step, self._max_steps, fields)
        if left:
            parts.append(f"ETA {left}")
        self.advance(step)
        has_bar = self._bar is not None
        logger.info("%s", "  ".join(parts), extra={FILE_ONLY: has_bar})

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _on_terminal() -> bool:
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return False
    # Pseudo-terminals of some batch systems have no columns or no rows, and a bar would be invisible there.
    return all(size > 0 for size in os.get_terminal_size(sys.stderr.fileno()))


def describe(fields: Mapping[str, object], loss_of: str | None = None) -> list[str]:
    """Format the known fields: ``["loss 3.412 (large)", "lr 1.2e-3", "412 samples/s"]``."""
    shown: list[str] = []
    loss = fields.get("loss")
    if isinstance(loss, (int, float)):
        text = f"loss {loss:#.4g}"
        if loss_of is not None and loss_of in fields:
            text += f" ({fields[loss_of]})"
        shown.append(text)
    shown += _terms(fields)
    shown += [f"{name} {value:.4g}" for name, value in _own(fields).items()]
    lr = fields.get("lr")
    if isinstance(lr, (int, float)):
        shown.append(f"lr {short_exponent(lr)}")
    throughput = fields.get("samples_per_second")
    if isinstance(throughput, (int, float)):
        digits = ".0f" if throughput >= 100 else ".3g"
        shown.append(f"{throughput:{digits}} samples/s")
    return shown


def _terms(fields: Mapping[str, object]) -> list[str]:
    """Format the terms of the loss. Empty for a single one, which equals the loss up to its coefficient."""
    terms = [name for name in fields if is_term(name)]
    if len(terms) < 2:
        return []
    values = {name.removeprefix(TERM): fields[name] for name in terms}
    return [f"{name} {value:#.4g}" for name, value in values.items() if isinstance(value, (int, float))]


def _own(fields: Mapping[str, object]) -> dict[str, float]:
    """Return the recipe's own metrics."""
    return {name: value for name, value in fields.items() if is_own(name) and isinstance(value, (int, float))}


def is_own(name: str) -> bool:
    """Return True if a field of a training line is a metric of the recipe."""
    return name.startswith(OWN)


def is_term(name: str) -> bool:
    """Return True if a field of a training line is a term of the loss."""
    return name.startswith(TERM) and not BY_TIME.search(name)


def time_left(step: int, max_steps: int, fields: Mapping[str, object]) -> str:
    """Estimate the training time left, without evaluation and saving. Empty without a finite step time."""
    seconds = fields.get("step_seconds")
    if not isinstance(seconds, (int, float)) or not math.isfinite(seconds):
        return ""
    return format_seconds((max_steps - step) * seconds)


def format_seconds(seconds: float) -> str:
    """Format as ``1:32``, ``2:03:04`` or ``3 days 2:03:04``, and from ``MOST_DAYS`` on as ``over 9999 days``."""
    if seconds >= MOST_DAYS * 86400:
        return f"over {MOST_DAYS} days"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if not hours:
        return f"{minute}:{second:02d}"
    clock = f"{hour}:{minute:02d}:{second:02d}"
    if not days:
        return clock
    unit = "day" if days == 1 else "days"
    return f"{days} {unit} {clock}"


def short_exponent(value: float) -> str:
    """Format ``0.0012`` as ``1.2e-3``, with three digits at most."""
    if not value:
        return "0"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    if not exponent:  # nan, inf
        return mantissa
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"

"""What a person sees while a run goes on: a bar on a terminal, one plain line per log point elsewhere."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NoReturn

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)

FILE_ONLY = "file_only"
"""Attribute of a log record that belongs into the log file and not on the console."""

LOSS_OF = ("mode", "task")
"""Fields of a training line that say which of several losses this step had: those of two steps may be of two kinds."""

BAR_FORMAT = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class Progress:
    """Steps, loss, rate and time left. Main process only.

    A bar where both stdout and stderr are terminals (``on`` draws it anyway), else log lines, which a pipe or
    a batch system keeps readable. With a bar the lines still go to the log file.
    """

    def __init__(self, mode: Literal["auto", "on", "off"], max_steps: int, start_step: int) -> None:
        self._max_steps = max_steps
        self._bar: tqdm[NoReturn] | None = None
        if mode == "on" or (mode == "auto" and _on_terminal()):
            from tqdm import tqdm  # not tqdm.auto: it warns in notebooks that lack ipywidgets

            self._bar = tqdm(
                total=max_steps, initial=start_step, bar_format=BAR_FORMAT, unit="step", dynamic_ncols=True
            )

    def advance(self, step: int) -> None:
        """Move the bar; host only, and drawn at most ten times a second."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def show(self, step: int, fields: Mapping[str, object]) -> None:
        """The state at a log point, from the fields of a training line."""
        shown = describe(fields)
        left = time_left(step, self._max_steps, fields)
        line = "  ".join([f"step {step}/{self._max_steps}", *shown, *([f"ETA {left}"] if left else [])])
        if self._bar is not None:
            self._bar.set_postfix_str("  ".join(shown), refresh=False)
            self.advance(step)
        logger.info("%s", line, extra={FILE_ONLY: self._bar is not None})

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _on_terminal() -> bool:
    """A pseudo-terminal of some batch systems says that it has no columns: a bar would be invisible there."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return False
    return os.get_terminal_size(sys.stderr.fileno()).columns > 0


def describe(fields: Mapping[str, object]) -> list[str]:
    """``["loss 3.412 (l2t)", "lr 1.2e-3", "412 samples/s"]``, of what is there."""
    shown: list[str] = []
    if isinstance(loss := fields.get("loss"), (int, float)):
        of = next((f" ({fields[name]})" for name in LOSS_OF if name in fields), "")
        shown.append(f"loss {loss:#.4g}{of}")
    if isinstance(lr := fields.get("lr"), (int, float)):
        shown.append(f"lr {short_exponent(lr)}")
    if isinstance(rate := fields.get("samples_per_second"), (int, float)):
        shown.append(f"{rate:.0f} samples/s" if rate >= 100 else f"{rate:.3g} samples/s")
    return shown


def time_left(step: int, max_steps: int, fields: Mapping[str, object]) -> str:
    """Of training alone: evaluation and saving come on top. Empty where the step time is not known."""
    seconds = fields.get("step_seconds")
    return format_seconds((max_steps - step) * seconds) if isinstance(seconds, (int, float)) else ""


def format_seconds(seconds: float) -> str:
    """``1:32``, ``2:03:04``, ``3 days 2:03:04``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
    return f"{days} day{'s' if days > 1 else ''} {clock}" if days else clock


def short_exponent(value: float) -> str:
    """``0.0012`` -> ``1.2e-3``, three digits at most."""
    if not value:
        return "0"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    if not exponent:  # nan, inf
        return mantissa
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"

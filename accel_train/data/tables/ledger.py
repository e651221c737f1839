"""History of a run's data: the contents now, and the contents seen from each step on. Saved in each checkpoint.

The order of samples is a function of (seed, step) and of the number of samples, so a span of steps and the contents at
the time determine every sample drawn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from accel_train.config import UsageError

LEDGER = "ledger.json"
Changed = Literal["refuse", "allow"]
"""Values of the option ``data.changed``: whether a resume may continue with other data than before."""


class Span(NamedTuple):
    """Steps with the same contents, up to the next span or to the step of the checkpoint."""

    from_step: int
    fingerprint: str
    """Hash of the contents."""
    samples: int


Ledger = tuple[Span, ...]


@dataclass(frozen=True)
class DataHistory:
    """The data that this start reads, and those that the resumed run has read before."""

    contents: str
    """sha256 of everything that decides the samples."""
    samples: int
    ledger: Ledger = ()
    """Ledger of the checkpoint. Empty for a new run. If data must not change, it begins and ends with `contents`."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the run. If its data may change, that of the data it began with."""
        return self.ledger[0].fingerprint if self.ledger else self.contents

    @property
    def has_changed(self) -> bool:
        """True if the data have changed since the checkpoint."""
        return bool(self.ledger) and self.ledger[-1].fingerprint != self.contents

    @property
    def notices(self) -> list[str]:
        """A line for the log, if the data have changed since the checkpoint."""
        if not self.has_changed:
            return []
        before = self.ledger[-1].samples
        return [f"--data.changed allow: {self.samples:,} samples, different data from the {before:,} of the checkpoint"]

    def save(self, folder: Path, start_step: int) -> None:
        """Write the ledger of a run that was started or resumed at ``start_step`` into a folder of a checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        write_ledger(folder, continued(self.ledger, start_step, self.contents, self.samples))


def earlier_ledger(changed: Changed, earlier: Path | None) -> Ledger:
    """Read the ledger in the assets of the checkpoint to resume. Empty for a new run, and if data must not change."""
    if changed == "refuse" or earlier is None:
        return ()
    return tuple(read_ledger(earlier))


def unchanged_ledger(contents: str, earlier: Path) -> Ledger:
    """Read the ledger in the assets of a checkpoint that is resumed with `contents`, where data must not change.

    Empty if it cannot be read (a custom loop may write none), or if the run began with other data. Ledger and
    fingerprint then begin with `contents`. Raises `UsageError` if the run has moved on to other data since it began
    with `contents`.
    """
    try:
        ledger = tuple(read_ledger(earlier))
    except UsageError:
        return ()
    if ledger[0].fingerprint != contents:
        return ()
    last = ledger[-1]
    if last.fingerprint != contents:
        raise UsageError(
            f"--data.changed refuse: these are the data that the run began with, but from step {last.from_step} on it "
            f"was trained on other data, of {last.samples:,} samples. The latter are required: restore them, or give "
            "--data.changed allow to continue with these."
        )
    return ledger


def continued(ledger: Sequence[Span], start_step: int, fingerprint: str, samples: int) -> list[Span]:
    """Return the ledger of a run continued at `start_step` with these contents."""
    # Spans of steps that are lost, because an older checkpoint is resumed, are left out.
    kept = [span for span in ledger if span.from_step < start_step]
    if not kept or kept[-1].fingerprint != fingerprint:
        kept.append(Span(start_step, fingerprint, samples))
    return kept


def write_ledger(folder: Path, ledger: Sequence[Span]) -> None:
    """Write the ledger beside the other assets of a checkpoint."""
    spans = [span._asdict() for span in ledger]
    text = json.dumps(spans, indent=1)
    (folder / LEDGER).write_text(text, "utf-8")


def read_ledger(folder: Path) -> list[Span]:
    """Read the file of `write_ledger`. Refuses a checkpoint without one."""
    try:
        text = (folder / LEDGER).read_text("utf-8")
        spans = [Span(**span) for span in json.loads(text)]
        if not spans:
            raise ValueError("it is empty")
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"--data.changed allow: {folder / LEDGER} cannot be read ({error}). A checkpoint that records what was "
            "seen is required: leave data.changed at refuse, and use --allow data_fingerprint if the data did change."
        ) from None
    return spans

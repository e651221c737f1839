"""Ledger of the data seen by a run: its contents, and the step each began at. It lies in each checkpoint.

The order of samples is a function of (seed, step) and of the number of samples, so a span of steps and the contents at
the time determine every sample drawn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from accel_train.config import UsageError

LEDGER = "ledger.json"


class Span(NamedTuple):
    """Steps with the same contents, up to the next span or to the step of the checkpoint."""

    from_step: int
    fingerprint: str
    """Hash of the contents."""
    samples: int


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
            f"--data.changed allow: {folder / LEDGER} cannot be read ({error}). A checkpoint that tells what was seen "
            "is required: leave data.changed at refuse, and use --allow data_fingerprint if the data did change."
        ) from None
    return spans

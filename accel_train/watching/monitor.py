"""``accel-train monitor``: a live page of runs in the terminal, or one page, or one JSON object."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accel_train.config import UsageError
from accel_train.metrics.records import plain
from accel_train.store.names import METRICS_FILE
from accel_train.watching.alerts import alerts_of
from accel_train.watching.reading import find_directories, read_files
from accel_train.watching.run_files import MetricsFile
from accel_train.watching.run_state import state_of
from accel_train.watching.status import condition_of
from accel_train.watching.terminal import BLOCKS, Terminal, Watched, page
from accel_train.watching.webhook import Webhook

# Distinct from 1 and 2, which every command uses for errors and wrong usage.
EXIT_ALERT = 3
ENDED = ("finished", "stopped", "crashed", "unrecorded")
HOME = "\x1b[H"
CLEAR = "\x1b[2J"
LAST_TRIES = 10
"""Number of pages after the end of all runs on which messages that the webhook did not take are sent again."""
LONGEST_EVERY = 86_400.0
"""One day, in seconds. The operating system cannot sleep for longer than some centuries."""
REST = 9.0
"""Seconds of rest for each second spent on a page."""
CLEAR_REST_OF_LINE = "\x1b[K"
CLEAR_BELOW = "\x1b[J"


def monitor(
    places: Sequence[str],
    *,
    once: bool = False,
    as_json: bool = False,
    every: float = 2.0,
    webhook: str | None = None,
) -> int:
    """Show runs until all have ended or Ctrl-C. Return 3 if an alert stands on the last page, else 0.

    Files are read, and nothing is written or locked, so it may run on any machine with access to the directories. With
    ``once`` or ``as_json`` it shows one page or one JSON object. ``every`` is in seconds. ``webhook`` is the URL to
    notify of ends and new alerts.
    """
    # False for NaN as well.
    if not 0 < every <= LONGEST_EVERY:
        raise UsageError(
            f"--every {every:g}: seconds between two pages, above 0 and at most {LONGEST_EVERY:g}; leave it out for 2"
        )
    if webhook is not None and (once or as_json):
        raise UsageError(
            "--webhook: with --once and --json each call would send the same again; leave them out, so that the "
            "monitor keeps running, or read --json in a script"
        )
    notifier = None if webhook is None else Webhook(webhook)
    # Kept between pages, because each remembers how far it has read.
    files = {directory: MetricsFile(directory / METRICS_FILE) for directory in find_directories(places)}
    if as_json or once:
        return _exit_code(_print_once(files, as_json))
    return _exit_code(_follow(files, every, notifier))


def _exit_code(runs: Sequence[Watched]) -> int:
    """Return 3 if an alert stands, else 0, so that a script need not parse the output."""
    if any(run.alerts for run in runs):
        return EXIT_ALERT
    return 0


def _print_once(files: dict[Path, MetricsFile], as_json: bool) -> list[Watched]:
    now = time.time()
    runs = _look(files, now)
    if as_json:
        # allow_nan=False: NaN is not valid JSON, and `plain` has made it a string. In ASCII, since a file name may have
        # characters that the encoding of the output lacks.
        text = json.dumps(_as_json(runs, now), indent=2, allow_nan=False)
    else:
        text = "\n".join(page(runs, now, _terminal()))
    print(text)
    return runs


def _look(files: dict[Path, MetricsFile], now: float) -> list[Watched]:
    runs: list[Watched] = []
    for directory, metrics in files.items():
        found = read_files(directory, metrics, now)
        state = state_of(found, condition_of(found))
        runs.append(Watched(state, alerts_of(found, state)))
    return runs


def _follow(files: dict[Path, MetricsFile], every: float, notifier: Webhook | None) -> list[Watched]:
    """Show one page after the other until all runs have ended, or until Ctrl-C."""
    runs: list[Watched] = []
    tries = LAST_TRIES
    in_place = sys.stdout.isatty()
    if in_place:
        sys.stdout.write(CLEAR)
    try:
        # Each page shows what is on the disk by then, so there is nothing to keep in sync.
        while True:
            now = time.time()
            trouble: list[str] = []
            try:
                runs = _look(files, now)
            except UsageError as error:
                if not runs:
                    raise
                # A network disk may come back, and whoever watches for days should not have to start again.
                trouble = textwrap.wrap(f"as last read, because {error}", max(20, _terminal().width))
            _show([*trouble, *page(runs, now, _terminal())], in_place)
            all_sent = notifier is None or notifier.tell(runs)
            if all(run.state.status in ENDED for run in runs):
                if all_sent or not tries:
                    return runs
                # The end of a run is the message that matters most, and no later page would send it.
                tries -= 1
            # Watching shares the machine with training: at most a tenth of one core, however long the run is.
            time.sleep(max(every, REST * (time.time() - now)))
    except KeyboardInterrupt:
        # Ctrl-C is the way to leave the monitor, not an error. The last page stays on the terminal.
        return runs


def _show(lines: Sequence[str], in_place: bool) -> None:
    if not in_place:
        print("\n".join(lines), end="\n\n", flush=True)
        return
    # One line less than the terminal has, so that the cursor below the page does not scroll it.
    room = shutil.get_terminal_size().lines - 1
    shown = list(lines)
    if len(shown) > room:
        shown = [*shown[: room - 1], f"... {len(shown) - room + 1} more lines; --once prints all of them"]
    # Drawn over the last page: clearing it first would flicker.
    text = "".join(f"{line}{CLEAR_REST_OF_LINE}\n" for line in shown)
    sys.stdout.write(HOME + text + CLEAR_BELOW)
    sys.stdout.flush()


def _terminal() -> Terminal:
    encoding = sys.stdout.encoding or "ascii"
    try:
        # Tried, because the name of an encoding does not tell what it can write.
        BLOCKS.encode(encoding)
        unicode = True
    except (UnicodeEncodeError, LookupError):
        unicode = False
    # https://no-color.org
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Terminal(shutil.get_terminal_size().columns, unicode, color)


def _as_json(runs: Sequence[Watched], now: float) -> dict[str, Any]:
    described: list[dict[str, Any]] = []
    for run in runs:
        fields = asdict(run.state)
        fields["alerts"] = [asdict(alert) for alert in run.alerts]
        described.append(fields)
    alerts = sum(len(run.alerts) for run in runs)
    return plain({"time": now, "alerts": alerts, "runs": described})

"""Notifications of ``accel-train monitor --webhook``: each end and alert of a run, sent once as JSON to a URL.

The monitor sends them rather than the run, because a run that was killed or hangs sends nothing.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPException
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from accel_train.config import UsageError
from accel_train.metrics.records import plain

if TYPE_CHECKING:
    from accel_train.watching.terminal import Watched

TIMEOUT_SECONDS = 10.0
ENDED = ("finished", "stopped")
"""Statuses of a run that are sent although they are not alerts."""
CHANGING = ("silent", "throughput", "save")
"""Kinds of alerts whose numbers change while they stand. For any other kind, other numbers mean another alert."""


class Webhook:
    """A URL that gets a message for each end of a run and for each new alert.

    The message has ``text``, which Slack, Mattermost and Google Chat show, ``content``, which Discord shows, and for
    scripts ``event``, ``run`` and ``step``. A message that fails is sent again with the next page.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._host = _host_of(address)
        self._sent: set[tuple[str, str, str]] = set()
        self._is_failing = False

    def tell(self, runs: Sequence[Watched]) -> bool:
        """Send what has not been sent before, and return True if everything has been.

        An error is printed once, until a message gets through again.
        """
        standing: set[tuple[str, str, str]] = set()
        for run in runs:
            for event, message in news_of(run):
                text = message
                if event in CHANGING:
                    text = re.sub(r"[0-9.]+", "#", message)
                key = (run.state.directory, event, text)
                standing.add(key)
                if key not in self._sent and self._send(run, event, message):
                    self._sent.add(key)
        # A resumed run may end again, and an alert that is gone may come back.
        self._sent &= standing
        return self._sent == standing

    def _send(self, run: Watched, event: str, message: str) -> bool:
        text = f"{run.state.name}: {message}"
        fields = {"text": text, "content": text, "event": event, "run": run.state.directory, "step": run.state.step}
        request = urllib.request.Request(
            self._address,
            data=json.dumps(plain(fields)).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "accel-train"},
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):
                self._is_failing = False
                return True
        # HTTPException: an answer that is not HTTP, as from another service at this port.
        except (OSError, ValueError, HTTPException) as error:
            if not self._is_failing:
                # The host only: whoever has the whole address can write to the channel.
                print(
                    f"--webhook: {self._host} did not accept a message ({error}); it will be tried again",
                    file=sys.stderr,
                    flush=True,
                )
            self._is_failing = True
            return False


def _host_of(address: str) -> str:
    """Return the host of an address. Raises ``UsageError`` if nothing can be sent to it."""
    host = None
    # Spaces, line ends and letters beyond ASCII have to be escaped (%20).
    if re.fullmatch("(?i:https?)://[!-~]+", address):
        # Reading the port raises ValueError if it is not a number.
        with suppress(ValueError):
            parts = urlsplit(address)
            host = parts.port != 0 and parts.hostname
    if not host:
        raise UsageError(
            f"--webhook {address!r}: is not an address; give one that begins with http:// or https://, such as that of "
            "an incoming webhook of Slack, with a host, a port that is a number, and no space"
        )
    return host


def news_of(run: Watched) -> list[tuple[str, str]]:
    """Return (event, message) for the end of a run, if it has finished or stopped, and for each of its alerts."""
    state = run.state
    news: list[tuple[str, str]] = []
    if state.status in ENDED:
        message = f"{state.status} at step {state.step}"
        if state.max_steps is not None:
            message += f" of {state.max_steps}"
        news.append((state.status, message))
    for alert in run.alerts:
        where = "" if alert.step is None else f" at step {alert.step}"
        news.append((alert.kind, f"{alert.kind.replace('_', ' ')}{where}: {alert.message}"))
    return news

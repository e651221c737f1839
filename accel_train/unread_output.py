"""Standard output and error that nobody reads any more, as after ``recipe | head``. Standard library only."""

from __future__ import annotations

import os
import select
import sys
from typing import TextIO


def discard() -> bool:
    """Discard what is written from now on to standard output and error, where that is a pipe without a reader.

    Returns True if standard output is one.
    """
    # `recipe 2>&1 | head` leaves neither a reader.
    _discard_if_unread(sys.stderr)
    return _discard_if_unread(sys.stdout)


def _discard_if_unread(stream: TextIO) -> bool:
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        unread = any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):
        # Captured output of a notebook or a test has no file descriptor.
        return False
    if unread:
        # Without this, Python would fail once more when it flushes at exit.
        discard = os.open(os.devnull, os.O_WRONLY)
        os.dup2(discard, stream.fileno())
        os.close(discard)
    return unread

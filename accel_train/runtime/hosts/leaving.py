"""Pass a stop before the first step on to every process: a signal or ``STOP`` file may reach only one process or host.

The others would otherwise fail in their next collective, with an error instead of exit code 75.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch.distributed import Store

LOOK_SECONDS = 1.0
"""Seconds between two checks of the store."""
ANSWER_SECONDS = 5.0
"""Longest time that a leaving process waits for the others to hear of it."""
SAME_SIGNAL_SECONDS = 1.0
"""A launcher that ends a host sends SIGTERM to all of its processes within this time."""


class Others:
    """The other processes of a start. Nothing else may use ``store``, because a handler cannot wait for its lock."""

    def __init__(self, store: Store, world_size: int, host: str, processes_of_host: int) -> None:
        self._store = store
        self._world_size = world_size
        self._host = host
        self._processes_of_host = processes_of_host
        self._over = threading.Event()

    def listen(self, leave: Callable[[], None]) -> None:
        """Call ``leave`` in a thread once another process has been asked to stop, until ``end``."""
        threading.Thread(target=self._poll, args=(leave,), name="stop of others", daemon=True).start()

    def end(self) -> None:
        """Stop listening: from the first step on the processes agree on a stop at every step."""
        self._over.set()

    def tell(self, *, terminated: bool) -> None:
        """Tell the others that this process leaves, and wait until all have heard, for some seconds. Safe in a handler.

        ``terminated`` means by SIGTERM.
        """
        thread = threading.Thread(target=self._tell, args=(terminated,), daemon=True)
        thread.start()
        # The store of a host that is gone does not answer.
        thread.join(ANSWER_SECONDS)

    def _poll(self, leave: Callable[[], None]) -> None:
        # The store ends with process 0 or its launcher.
        with suppress(RuntimeError):
            while not self._over.wait(LOOK_SECONDS):
                if self._store.check(["asked"]):
                    leave()

    def _tell(self, terminated: bool) -> None:
        with suppress(RuntimeError):
            # When one process fails, torchrun sends SIGTERM to the others of its host: nobody has asked for a stop.
            if terminated and not self._is_whole_host():
                return
            self._store.set("asked", "")
            self._store.add("heard", 1)
            # The store may end with this process, before the others have looked.
            while self._store.add("heard", 0) < self._world_size:
                time.sleep(0.05)

    def _is_whole_host(self) -> bool:
        """Return True if every process of this host gets SIGTERM, or another process is known to stop."""
        end = time.monotonic() + SAME_SIGNAL_SECONDS
        name = f"terminated/{self._host}"
        count = self._store.add(name, 1)
        while count < self._processes_of_host and time.monotonic() < end:
            time.sleep(0.05)
            count = self._store.add(name, 0)
        return count >= self._processes_of_host or self._store.check(["asked"])

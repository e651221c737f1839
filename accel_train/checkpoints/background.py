"""The trainer's side of the writer process: shared memory, jobs and answers."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import accel_train
from accel_train.runtime.signals import StopRequests
from accel_train.store.commit import CheckpointWriteError
from accel_train.store.strict_json import Json

logger = logging.getLogger(__name__)


def _allocate(memory: int, size: int) -> None:
    try:
        os.truncate(memory, size)
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        # The bare error is EFBIG, "File too large", although no file of the user is involved.
        raise CheckpointWriteError(
            f"a snapshot needs {size} bytes of shared memory, but the limit of file sizes (ulimit -f) is {limit} "
            f"bytes ({error.strerror}); raise it"
        ) from error


def _start(connection: int, memory: int, size: int) -> subprocess.Popen[bytes]:
    # Our process id tells a writer that starts late whether its trainer is still there.
    arguments = [connection, memory, size, os.getpid()]
    # The writer must import this package even if the script's directory alone is on the path.
    search = str(Path(accel_train.__file__).parents[1])
    if os.environ.get("PYTHONPATH"):
        search += os.pathsep + os.environ["PYTHONPATH"]
    return subprocess.Popen(
        [sys.executable, "-m", "accel_train.checkpoints.writer", *map(str, arguments)],
        pass_fds=(connection, memory),
        env=os.environ | {"PYTHONPATH": search},
    )


class Writer:
    """One writer process and the memory for its snapshots, allocated once and reused for every save.

    The memory is anonymous (``memfd_create``). It needs no space in ``/dev/shm`` (small in containers), and the kernel
    frees it when the processes end, for any reason.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        mapped = max(size, 1)  # an empty mapping is an error
        # Always close what the child inherits. If this process kept the child's end of the socket open, the child's
        # death would never reach us as an end of file.
        with contextlib.ExitStack() as inherited:
            memory = os.memfd_create("accel_train_snapshot")
            inherited.callback(os.close, memory)
            ours, theirs = socket.socketpair()
            inherited.enter_context(theirs)
            try:
                _allocate(memory, mapped)
                self.buffer = mmap.mmap(memory, mapped)
                self._process = _start(theirs.fileno(), memory, mapped)
            except (OSError, CheckpointWriteError) as error:
                ours.close()
                if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                    error.add_note(
                        f"a snapshot takes {size:,} bytes of host memory in this process, allocated at the first save "
                        "and kept for later ones"
                    )
                raise
        self._connection = Connection(ours.detach())
        self._busy = False
        self.broken = False
        """True once the process has died. Start another one then."""

    @property
    def busy(self) -> bool:
        """True from ``submit`` until its answer is taken."""
        return self._busy

    def submit(self, job: Mapping[str, Any]) -> None:
        """Send a job. The answer to the previous one must have been taken."""
        assert not self._busy, "the answer to the last job has not been taken"
        self._busy = True
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `answer` reports the death
            self._connection.send_bytes(json.dumps(job).encode())

    def answer(self, *, wait: bool) -> Json | None:
        """Take the answer to the job, with an ``error`` if it failed. None while it runs, unless ``wait``."""
        if not wait and not self._connection.poll():
            return None
        try:
            answer: Json = json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.broken = True
            answer = {"error": f"the writer process ended by itself (code {self._process.wait()})"}
        self._busy = False
        for notice in answer.pop("notices", ()):
            logger.warning("%s", notice)
        return answer

    def settle(self, requests: StopRequests, *, hurry: bool) -> None:
        """Wait until old checkpoints are deleted. With ``hurry``, skip those still to be hashed.

        A request to stop ends the wait and kills the process: safe, because checkpoints are renamed before they are
        deleted.
        """
        if self._busy or self.broken:
            return
        self.submit({"do": "end", "hurry": hurry})
        while self.answer(wait=False) is None:
            if requests.requested and not hurry:
                self._process.kill()
                self.broken = True
                return
            time.sleep(0.005)  # polling, because `requested` has no event to wait for

    def close(self, *, kill: bool = False) -> None:
        """End the process, at once with ``kill``. The buffer stays mapped while a tensor views it."""
        # A second call finds the handle closed, which is no error. The block closes the duplicate that it gets.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
            # A forked child may hold a copy of the socket and keep it open. `shutdown` reaches all copies.
            ours.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        if kill:
            self._process.kill()
        self._process.wait()

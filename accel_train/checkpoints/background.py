"""The trainer's side of the writer process: memory that both see, jobs sent, answers taken when they are there."""

from __future__ import annotations

import contextlib
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

logger = logging.getLogger(__name__)

Json = dict[str, Any]


def _allocate(memory: int, size: int) -> None:
    try:
        os.truncate(memory, size)
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        raise CheckpointWriteError(
            f"a snapshot needs {size} bytes of shared memory, which the limit of file sizes (ulimit -f), {limit} "
            f"bytes, forbids ({error.strerror}); raise it"
        ) from error


class Writer:
    """One writer process and the memory for its snapshots, allocated once and used again for every save.

    The memory is anonymous (``memfd_create``): it needs no room in ``/dev/shm``, which containers keep small, and
    is gone with the processes however they end.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        memory = os.memfd_create("accel_train_snapshot")
        ours, theirs = socket.socketpair()
        try:
            _allocate(memory, max(size, 1))
            self.buffer = mmap.mmap(memory, max(size, 1))
            arguments = [theirs.fileno(), memory, max(size, 1), os.getpid()]
            package = str(Path(accel_train.__file__).parents[1])
            search = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH")) if p)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "accel_train.checkpoints.writer", *map(str, arguments)],
                pass_fds=(theirs.fileno(), memory),
                env=os.environ | {"PYTHONPATH": search},
            )
        finally:
            os.close(memory)
            theirs.close()
        self._connection = Connection(ours.detach())
        self._busy = False
        self.broken = False
        """The process has ended by itself; make another."""

    @property
    def busy(self) -> bool:
        """Whether a job has been given whose answer has not been taken."""
        return self._busy

    def submit(self, job: Mapping[str, Any]) -> None:
        """Give it a job. One at a time."""
        assert not self._busy, "the answer to the last job has not been taken"
        self._busy = True
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # then the answer says so
            self._connection.send_bytes(json.dumps(job).encode())

    def answer(self, *, wait: bool) -> Json | None:
        """The answer to the job, or None while there is none and ``wait`` is False. ``error`` is in it if it failed."""
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
        """Wait until old checkpoints that need not stay are gone; in a ``hurry`` none is hashed first, and stays.

        A request to stop ends the wait, and the process with it: what goes is renamed before it is deleted.
        """
        if self._busy or self.broken:
            return
        self.submit({"do": "end", "hurry": hurry})
        while self.answer(wait=False) is None:
            if requests.requested and not hurry:
                self._process.kill()
                self.broken = True
                return
            time.sleep(0.005)

    def close(self, *, kill: bool = False) -> None:
        """End it, at once with ``kill``. The buffer stays mapped for as long as a tensor looks into it."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)  # of all copies: a forked child may hold one, and would keep it open
        self._connection.close()
        if kill:
            self._process.kill()
        self._process.wait()

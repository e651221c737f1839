"""Meet the other processes before connecting to them: say who is missing, and refuse a start that differs.

torch waits for missing processes in silence, and then names a key of its store. A process that fails before it connects
leaves all others in that wait.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from accel_train import simulated
from accel_train.config import UsageError, launched_processes
from accel_train.runtime.hosts.same_start import Facts, Started, digest, packed, refuse_different_start
from accel_train.wording import shortened

FIRST_LINE_SECONDS = 15.0
"""Wait before the first line about missing processes. The next one comes after twice as long, and so on."""
LONGEST_PAUSE_SECONDS = 0.25
"""Longest pause between two checks of the store."""
SECONDS_TO_READ = 10.0
"""Time that a refused process gives the others to read what it was started with."""

_Answer = TypeVar("_Answer")

logger = logging.getLogger(__name__)


class MissingProcessError(RuntimeError):
    """A process did not connect within ``collective_timeout_seconds``, and only its own host knows why."""


class _Missing(NamedTuple):
    """Description of what a process waits for."""

    text: str
    other_counts: str = ""
    """Processes that were started with a different number of processes, with the remedy. Empty if there are none."""

    def too_late(self, seconds: float) -> Exception:
        """Return the error for a wait that has ended after ``seconds``."""
        late = f"collective_timeout_seconds: {seconds:g}: timed out waiting for {self.text}"
        if self.other_counts:
            return UsageError(f"{late}: {self.other_counts}")
        return MissingProcessError(
            f"{late}; its own host shows why: a refused option, an error, or no start at all. Fix that, and start all "
            "of them again"
        )

    def __str__(self) -> str:
        return "; ".join(filter(None, self))


@contextmanager
def meeting(facts: Facts, timeout: timedelta) -> Generator[str | None]:
    """Wait for all processes and compare what they were started with, then connect them in the body. All ranks.

    Yields the name of this attempt for ``PrefixStore``, or None if there was no wait at a store.

    Raises ``UsageError`` on every process if one was started with other ``facts`` or, after ``timeout``, with a
    different number of processes, and ``MissingProcessError`` if one does not arrive for any other reason. Does nothing
    for one process. Processes that are connected already only compare.
    """
    # A simulation has no other processes.
    if launched_processes(os.environ) == 1 or simulated.active() is not None:
        yield None
        return
    if dist.is_initialized():
        # Imported late: these modules are above this one, and rarely needed.
        from accel_train.runtime import signals
        from accel_train.runtime.main_alone import gather_on_hosts

        signals.host_group(timeout.total_seconds())
        mine = Started(socket.gethostname(), dist.get_rank(), facts)
        first, *others = [Started(*started) for started in gather_on_hosts(tuple(mine))]
        refuse_different_start(first, others)
        yield None
        return
    meeting_point = _Meeting(timeout)
    meeting_point.compare(facts)
    # The store stays open during the body: process 0 holds it for the others, whose groups connect by the same port.
    try:
        yield meeting_point.attempt
    except dist.DistError as error:
        error.add_note(
            "all processes had arrived, but could not be connected: one has ended since, or the hosts do not reach "
            "each other on the network that was chosen; name its interface in GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME"
        )
        raise


def _one_of_each(here: Sequence[tuple[str, str]]) -> list[tuple[int, str]]:
    """Return rank and host of the first process with each digest: the facts of all processes are too many to read."""
    found: dict[str, tuple[int, str]] = {}
    for rank, (host, known) in enumerate(here):
        found.setdefault(known, (rank, host))
    return list(found.values())


class _Meeting:
    """Place where the processes of one start meet: a store at the address by which torch connects them."""

    def __init__(self, timeout: timedelta) -> None:
        self._end = time.monotonic() + timeout.total_seconds()
        self._seconds = timeout.total_seconds()
        # Every launcher sets them, and a start without one of them was refused before.
        self._rank = int(os.environ["RANK"])
        self._world_size = launched_processes(os.environ)
        self._address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self._host = socket.gethostname()
        held_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._is_holder = self._rank == 0 and not held_by_torchrun
        self._arrivals = PrefixStore("accel_train", self._open())
        self.attempt = str(self._arrivals.add("arrivals", 1))
        self._answer = f"attempt_of/{self.attempt}"
        self._answered = 0

    def join(self) -> None:
        """Agree with process 0 on the name of this attempt, under which all meet: the number of its arrival.

        torchrun keeps its store for processes that it starts again, and they must not meet those that have ended. Its
        own count of restarts differs between hosts: only a host where a process failed counts one.
        """
        if self._rank > 0:
            # Process 0 answers nobody after its meeting, so an answer never comes from an attempt that has ended.
            self._wait(lambda: self._arrivals.check([self._answer]), self._describe_no_answer)
            self.attempt = self._arrivals.get(self._answer).decode()
        self._store = PrefixStore(f"{self.attempt}/{self._world_size}", self._arrivals)
        # Read by processes started with a different number of processes, which therefore wait under another prefix.
        self._counts = PrefixStore(f"{self.attempt}/counts", self._arrivals)
        self._counts.set(str(self._rank), json.dumps([self._world_size, self._host]))

    def answer(self) -> None:
        """Publish the name of this attempt to all processes that have arrived."""
        # All, because this process may have arrived last. Those that have ended read nothing.
        arrived = self._arrivals.add("arrivals", 0)
        for number in range(self._answered + 1, arrived + 1):
            self._arrivals.set(f"attempt_of/{number}", self.attempt)
        self._answered = arrived

    def compare(self, facts: Facts) -> None:
        """Wait for all processes. Raises ``UsageError`` on each of them if their facts differ."""
        text = packed(facts)
        while not self._meet(text):
            pass  # process 0 has been started again
        here: list[tuple[str, str]] = [json.loads(value) for value in self._store.multi_get(self._of_all("here"))]
        # Read one by one, because the first that differs is refused.
        one_of_each = (self._started(rank, host) for rank, host in _one_of_each(here))
        try:
            refuse_different_start(next(one_of_each), one_of_each)
        except UsageError:
            self._let_others_read()
            raise

    def _meet(self, text: str) -> bool:
        """Wait for all processes in one attempt. Returns False if process 0 has begun a newer one meanwhile."""
        self.join()
        # The facts first: whoever finds this process here may read them.
        self._store.set(f"facts/{self._rank}", text)
        self._store.set(f"here/{self._rank}", json.dumps([self._host, digest(text)]))
        if not self._wait_for_others(self._of_all("here")):
            return False
        # A process may have ended after it arrived, and its next start must still find process 0 answering.
        self._store.set(f"ready/{self._rank}", "")
        if self._rank > 0:
            return self._wait_for_others(["complete"])
        self._wait_for_others(self._of_all("ready"))
        self._store.set("complete", "")
        return True

    def _of_all(self, state: str) -> list[str]:
        return [f"{state}/{rank}" for rank in range(self._world_size)]

    def _wait_for_others(self, names: list[str]) -> bool:
        """Wait for ``names`` in the store. Returns False if process 0 has begun a newer attempt meanwhile."""
        self._wait(lambda: self._is_superseded() or self._store.check(names), self._describe_missing)
        return not self._ask_store(self._is_superseded)

    def _is_superseded(self) -> bool:
        if self._rank > 0:
            return self._arrivals.get(self._answer).decode() != self.attempt
        # Answered at every check, because each process waits for its answer before it gets here.
        self.answer()
        return False

    def _started(self, rank: int, host: str) -> Started:
        return Started(host, rank, json.loads(self._store.get(f"facts/{rank}")))

    def _open(self) -> Store:
        if not self._is_holder:
            # Tried with a plain socket, because torch prints a warning for every failed attempt.
            self._wait(self._answers, self._describe_silence)
        return TCPStore(
            *self._address,
            self._world_size,
            self._is_holder,
            timedelta(seconds=max(1.0, self._end - time.monotonic())),
            wait_for_workers=False,
            # torch opens the same port again for its groups.
            multi_tenant=True,
        )

    def _answers(self) -> bool:
        try:
            with socket.create_connection(self._address, timeout=5):
                return True
        except OSError:
            return False

    def _wait(self, done: Callable[[], bool], describe: Callable[[], _Missing]) -> None:
        pause = 0.01
        following = FIRST_LINE_SECONDS
        next_line = time.monotonic() + following
        while not self._ask_store(done):
            now = time.monotonic()
            if now > self._end:
                raise self._ask_store(describe).too_late(self._seconds)
            # One line for each host: its processes wait for the same.
            if now > next_line and os.environ.get("LOCAL_RANK", "0") == "0":
                logger.warning("waiting for %s", self._ask_store(describe))
                following *= 2
                next_line = now + following
            # Most processes arrive within a second, and all of them poll one store.
            time.sleep(pause)
            pause = min(pause * 1.3, LONGEST_PAUSE_SECONDS)

    def _ask_store(self, ask: Callable[[], _Answer]) -> _Answer:
        """Return the answer of the store. Raises ``MissingProcessError`` if the store has ended with its process."""
        try:
            return ask()
        except dist.DistError as error:
            raise MissingProcessError(
                f"process 0 at {self._place} has ended while the others were waiting to connect ({error}); its own "
                "host shows why"
            ) from None

    def _describe_missing(self) -> _Missing:
        missing: list[str] = []
        here: list[str] = []
        state = "here"
        # All have arrived, so one that is not ready by now has ended.
        if self._store.check(self._of_all("here")):
            state = "ready"
        for rank in range(self._world_size):
            if self._store.check([f"{state}/{rank}"]):
                host, _ = json.loads(self._store.get(f"here/{rank}"))
                here.append(f"{rank} on {host}")
            else:
                missing.append(str(rank))
        if not missing:
            # Only process 0 ends the meeting.
            missing.append("0")
            del here[0]
        text = (
            f"{len(missing)} of {self._world_size} processes to connect to {self._place} (process "
            f"{shortened(missing, 8)}; here: process {shortened(here, 8)})"
        )
        return _Missing(text, self._describe_other_counts())

    def _describe_other_counts(self) -> str:
        """Name processes that were started with another number of processes."""
        others: list[str] = []
        for rank in range(self._world_size):
            if self._counts.check([str(rank)]):
                count, host = json.loads(self._counts.get(str(rank)))
                if count != self._world_size:
                    others.append(f"{rank} on {host} of {count}")
        if not others:
            return ""
        return (
            f"process {shortened(others, 8)} was started with a number of processes that is not {self._world_size}; "
            "give the same --num_processes and --num_machines (torchrun: --nnodes, --nproc_per_node; WORLD_SIZE) on "
            "every host"
        )

    def _describe_no_answer(self) -> _Missing:
        return _Missing(
            f"process 0 of {self._world_size} processes, to connect to {self._place} (here: process {self._rank} on "
            f"{self._host})"
        )

    def _describe_silence(self) -> _Missing:
        return _Missing(
            f"process 0 of {self._world_size} processes, to connect to {self._place}, where nothing answers (here: "
            f"process {self._rank} on {self._host})"
        )

    @property
    def _place(self) -> str:
        address, port = self._address
        return f"{address}:{port}"

    def _let_others_read(self) -> None:
        """Wait some seconds until all have read the facts, because the store ends with process 0 or its launcher."""
        end = time.monotonic() + SECONDS_TO_READ
        # The store may have ended: with a launcher, or with process 0 if this process took too long.
        with suppress(dist.DistError):
            self._wait_for_all("readers", end)
            # Leave only when the others know: otherwise they would poll a store that is gone for the rest of the time.
            self._wait_for_all("informed", end if self._is_holder else 0.0)

    def _wait_for_all(self, name: str, end: float) -> None:
        """Count this process under ``name``, and wait until all are counted."""
        counted = self._store.add(name, 1)
        while counted < self._world_size and time.monotonic() < end:
            time.sleep(0.05)
            counted = self._store.add(name, 0)

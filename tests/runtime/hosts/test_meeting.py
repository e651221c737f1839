"""Processes wait for those that have not come, say so, and end with the name of what is missing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from accel_train.config import UsageError
from accel_train.runtime.hosts import meeting as module
from accel_train.runtime.hosts.meeting import MissingProcessError, meeting
from tests.waiting import free_port, until


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> int:
    """This process is the only one of two that comes; returns the port. Its first line is due at once."""
    port = free_port()
    monkeypatch.setattr(module, "FIRST_LINE_SECONDS", 0.0)
    for name, value in {"WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    return port


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Each is a process at its meeting."""
    with ThreadPoolExecutor() as pool:
        yield pool


def arrived(monkeypatch: pytest.MonkeyPatch, **variables: int) -> module._Meeting:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return module._Meeting(timedelta(seconds=9))


def joined(monkeypatch: pytest.MonkeyPatch, main: module._Meeting | None = None, **variables: int) -> module._Meeting:
    """A process that takes part in the attempt of ``main``, or begins one."""
    process = arrived(monkeypatch, **variables)
    if main is not None:
        main.answer()
    process.join()
    return process


def test_the_main_process_names_who_is_missing(
    one_of_two: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "0")
    caplog.set_level(logging.WARNING)
    missing = r"^collective_timeout_seconds: 1: timed out waiting for 1 of 2 processes"
    with pytest.raises(MissingProcessError, match=missing) as error, meeting({}, timedelta(seconds=1)):
        pytest.fail("nobody came")
    line = caplog.messages[0]
    assert line.startswith(f"waiting for 1 of 2 processes to connect to 127.0.0.1:{one_of_two} (process 1; here: ")
    assert "process 0 on " in line
    assert "its own host shows why" in str(error.value)


def test_processes_that_count_another_number_of_them_are_named(
    one_of_two: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that was started with another --num_machines would wait for processes that nobody starts."""
    of_two = joined(monkeypatch, RANK=0)
    assert of_two._describe_missing().other_counts == ""
    of_three = joined(monkeypatch, of_two, RANK=1, WORLD_SIZE=3)
    for one, other in ((of_two, f"1 on {of_two._host} of 3"), (of_three, f"0 on {of_two._host} of 2")):
        assert f"); process {other} was started with a number of processes that is not " in str(one._describe_missing())
    of_two._end = 0.0
    late = (
        r"^collective_timeout_seconds: 9: timed out waiting for 1 of 2 processes .*\): process 1 on .* of 3 was started"
    )
    with pytest.raises(UsageError, match=f"{late} .* not 2; give the same --num_processes") as error:
        of_two.compare({})
    assert "shows why" not in str(error.value)


def test_a_process_that_ends_at_the_meeting_is_waited_for_until_its_next_start(
    one_of_two: int, monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor
) -> None:
    """Its host restarts it, while the others wait for a third."""
    first = arrived(monkeypatch, RANK=0, WORLD_SIZE=3)
    meetings: list[Future[None]] = [threads.submit(first.compare, {})]
    ended = arrived(monkeypatch, RANK=1)
    ended.join()
    ended._end = 0.0
    with pytest.raises(MissingProcessError, match=r"process 2; here: process 0 on .*, 1 on"):
        ended.compare({})
    other = arrived(monkeypatch, RANK=2)
    meetings.append(threads.submit(other.compare, {}))
    until(lambda: meetings[0].done() or first._store.check(["ready/0", "ready/2"]))
    assert "(process 1; here: process 0 on " in str(other._describe_missing())
    again = arrived(monkeypatch, RANK=1)
    meetings.append(threads.submit(again.compare, {}))
    for each in meetings:
        each.result()
    assert {again.attempt, other.attempt} == {first.attempt}


def test_process_0_is_named_if_it_ends_before_it_ends_the_meeting(
    one_of_two: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = joined(monkeypatch, RANK=0)
    other = joined(monkeypatch, ended, RANK=1)
    for rank, each in enumerate((ended, other)):
        each._store.set(f"here/{rank}", f'["host-{rank}", ""]')
        each._store.set(f"ready/{rank}", "")
    assert "1 of 2 processes" in str(other._describe_missing())
    assert "(process 0; here: process 1 on host-1)" in str(other._describe_missing())


def test_those_that_wait_follow_process_0_when_it_is_started_again(
    one_of_two: int, monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    _of_torchrun = TCPStore("127.0.0.1", one_of_two, is_master=True, wait_for_workers=False)
    ended = joined(monkeypatch, RANK=0)
    other = joined(monkeypatch, ended, RANK=1)
    waiting = threads.submit(other.compare, {})
    until(lambda: ended._store.check(["here/1"]))
    again = arrived(monkeypatch, RANK=0)
    again.compare({})
    waiting.result()
    assert other.attempt == again.attempt != ended.attempt


def test_a_store_that_ends_while_who_is_missing_is_named_ends_the_wait(
    one_of_two: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders = [joined(monkeypatch, RANK=0)]
    other = joined(monkeypatch, holders[0], RANK=1)

    def describe() -> module._Missing:
        holders.clear()
        return other._describe_missing()

    with pytest.raises(MissingProcessError, match=f"^process 0 at 127.0.0.1:{one_of_two} has ended"):
        other._wait(lambda: False, describe)


def test_another_process_names_the_address_that_does_not_answer(
    one_of_two: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")
    caplog.set_level(logging.WARNING)
    with pytest.raises(MissingProcessError, match="where nothing answers"), meeting({}, timedelta(seconds=1)):
        pytest.fail("nobody came")
    assert caplog.messages[0].startswith("waiting for process 0 of 2 processes, to connect to 127.0.0.1:")


def test_a_connection_that_fails_after_all_have_come_names_the_network(
    monkeypatch: pytest.MonkeyPatch, one_of_two: int
) -> None:
    monkeypatch.setattr(module._Meeting, "compare", lambda *_: None)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(dist.DistStoreError) as error, meeting({}, timedelta(seconds=9)):
        raise dist.DistStoreError("wait timeout")
    assert "GLOO_SOCKET_IFNAME" in error.value.__notes__[0]


def test_one_process_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with meeting({}, timedelta(seconds=0)):
        pass

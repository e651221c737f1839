"""What asks a process to save and stop: real signals to this one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_train.runtime.signals import STOPPING, StopRequests


@pytest.fixture(autouse=True)
def as_in_a_terminal() -> Iterator[None]:
    """These tests may themselves run under nohup."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOPPING, ids=lambda s: s.name)
def test_a_signal_asks_to_save_and_the_handlers_are_given_back(tmp_path: Path, number: signal.Signals) -> None:
    requests = StopRequests(tmp_path, main=True)
    assert not requests.requested
    os.kill(os.getpid(), number)
    assert requests.requested
    assert requests.reason == number.name
    requests.close()
    assert signal.getsignal(number) == signal.SIG_DFL


def test_under_nohup_the_end_of_the_terminal_is_no_request(tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    requests = StopRequests(tmp_path, main=True)
    os.kill(os.getpid(), signal.SIGHUP)
    assert not requests.requested
    requests.close()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN

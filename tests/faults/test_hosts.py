"""One of two hosts dies: the other ends in time with an error, and a start on both continues."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.distributed import test_two_hosts
from tests.distributed.launching import PRESETS
from tests.faults.harness import EVERY, acknowledged, checkpoints, children, debris, launch, same_run
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = [*test_two_hosts.pytestmark, pytest.mark.slow]
hosts = test_two_hosts.hosts
TIMEOUT_SECONDS = 60
"""Of the collectives, where a host is gone without a packet: a start on a busy machine takes less."""


@pytest.fixture
def launched() -> Iterator[list[subprocess.Popen[str]]]:
    """Launchers to be killed with all they started, whatever happens."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        for left in children(process.pid, ""):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        process.kill()
        process.communicate()


def start_both(hosts: tuple[str, str], out: Path, *flags: str, timeout: float = 1800) -> list[subprocess.Popen[str]]:
    """The toy run, one process a host, under our launcher."""
    file = out.with_name("multi_node.yaml")
    file.write_text((PRESETS / "multi_node.yaml").read_text().replace("num_processes: 16", "num_processes: 2"))
    tag = hosts[0].split("-")[1]
    processes: list[subprocess.Popen[str]] = []
    for rank, host in enumerate(hosts):
        command = ["ip", "netns", "exec", host, sys.executable, "-m", "accel_train.cli", "rehearse"]
        command += ["--config_file", str(file), "--machine_rank", str(rank)]
        command += ["--main_process_ip", test_two_hosts.ADDRESSES[0]]
        device = f"v{'ab'[rank]}{tag}"
        limit = ("--collective_timeout_seconds", str(timeout))
        processes.append(launch(out, *EVERY, *limit, *flags, command=command, GLOO_SOCKET_IFNAME=device))
    return processes


@pytest.mark.fault(
    "F9", injected="SIGKILL of every process of one of two hosts", outcome="the other host fails at once; both resume"
)
@pytest.mark.parametrize("victim", [0, 1], ids=["first_host", "second_host"])
def test_a_host_dies(
    hosts: tuple[str, str], out: Path, whole_of_two: Path, launched: list[subprocess.Popen[str]], victim: int
) -> None:
    dies_and_resumes(hosts, out, whole_of_two, launched, victim)


@pytest.mark.fault(
    "F9", injected="one of two hosts gone without a packet", outcome="the other host fails at the timeout; both resume"
)
@pytest.mark.parametrize("victim", [0, 1], ids=["first_host", "second_host"])
def test_a_host_is_cut_off(
    hosts: tuple[str, str], out: Path, whole_of_two: Path, launched: list[subprocess.Popen[str]], victim: int
) -> None:
    dies_and_resumes(hosts, out, whole_of_two, launched, victim, silent=True)


def dies_and_resumes(
    hosts: tuple[str, str],
    out: Path,
    whole_of_two: Path,
    launched: list[subprocess.Popen[str]],
    victim: int,
    silent: bool = False,
) -> None:
    launched += start_both(
        hosts, out, "--pause_at", "7", "--pause_rank", str(victim), timeout=TIMEOUT_SECONDS if silent else 1800
    )

    def saved() -> bool:
        assert all(p.poll() is None for p in launched), [p.communicate()[0][-2000:] for p in launched]
        return acknowledged(out) == [5]

    until(saved)
    if silent:  # no packet says that a connection has ended
        device = f"v{'ab'[victim]}{hosts[0].split('-')[1]}"
        test_two_hosts.ip("netns", "exec", hosts[victim], "ip", "link", "set", device, "down")
    listed = subprocess.run(["ip", "netns", "pids", hosts[victim]], capture_output=True, text=True, check=True)
    for pid in listed.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    output = launched[1 - victim].communicate(timeout=PATIENCE_SECONDS)[0]
    assert launched[1 - victim].returncode == 1, output[-3000:]
    said = ["another process has ended or its host is gone"]  # so the kernel may say of a cut cable, too
    said += ["waited in vain for another process"] * silent
    assert any(text in output for text in said), output[-4000:]
    assert all(step <= 10 for step in checkpoints(out))

    if silent:
        test_two_hosts.ip("netns", "exec", hosts[victim], "ip", "link", "set", device, "up")
    again = start_both(hosts, out)
    launched += again
    outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in again]
    assert [process.returncode for process in again] == [0, 0], [o[-3000:] for o in outputs]
    assert "resuming" in outputs[0]
    assert debris(out) == []
    same_run(out, whole_of_two)

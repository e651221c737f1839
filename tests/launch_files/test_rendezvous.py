"""A name that does not resolve yet is asked for again, within limits; text that is no name is refused at once."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest
from torch.distributed import TCPStore

from accel_train.commands.launch import Launch, with_flags
from accel_train.config import UsageError
from accel_train.launch_files import rendezvous
from accel_train.launch_files.machine_config import read_machine_config
from accel_train.launch_files.rendezvous import check_rendezvous
from tests.waiting import PATIENCE_SECONDS, free_port

FILE = """\
distributed_type: MULTI_CPU
use_cpu: true
num_machines: 2
num_processes: 2
machine_rank: 1
main_process_ip: {}
main_process_port: 29500
"""


def check(tmp_path: Path, host: str) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(FILE.format(host))
    check_rendezvous(read_machine_config(file))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Let the resolver answer with these codes, one after the other, and then with an address."""
    asked: list[str] = []

    def answering(*codes: int) -> list[str]:
        left = list(codes)

        def resolve(host: str, port: int) -> list[object]:
            asked.append(host)
            if left:
                raise socket.gaierror(left.pop(0), "Name or service not known")
            return []

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        return asked

    monkeypatch.setattr(rendezvous, "PAUSE_SECONDS", 0.0)
    return answering


@pytest.mark.parametrize("code", [socket.EAI_NONAME, socket.EAI_AGAIN])
def test_a_pod_that_has_no_name_yet_is_waited_for(
    code: int, answers: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = answers(code, code, code)
    check(tmp_path, "mmdit-0.mmdit")
    assert asked == ["mmdit-0.mmdit"] * 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "main_process_ip: mmdit-0.mmdit does not resolve yet (Name or service not known); retrying for"
    )


@pytest.mark.parametrize(
    ("host", "rank", "lines"), [("192.0.2.1", 0, 1), ("192.0.2.1", 1, 0), ("127.0.0.1", 0, 0), ("127.0.1.1", 0, 0)]
)
def test_a_second_machine_0_is_told_that_the_address_is_not_its_own(
    host: str, rank: int, lines: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(
        FILE.format(host).replace("machine_rank: 1", f"machine_rank: {rank}").replace("29500", str(free_port()))
    )
    check_rendezvous(read_machine_config(file))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    assert all(line.startswith("machine_rank: 0, but main_process_ip 192.0.2.1 is not an address of") for line in said)


@pytest.mark.parametrize(("own", "lines"), [("127.0.0.1", 0), ("192.0.2.1", 1)])
def test_without_ipv6_in_the_kernel_no_address_of_it_is_own(
    own: str, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = str(free_port())

    class WithoutIPv6(socket.socket):
        def __init__(self, family: int, kind: int) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
            super().__init__(family, kind)

    # A name server has both addresses of a name, whatever the kernel of the asking machine has.
    both = [(socket.AF_INET6, 0, 0, "", ("2001:db8::1", 0, 0, 0)), (socket.AF_INET, 0, 0, "", (own, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: both)
    monkeypatch.setattr(socket, "socket", WithoutIPv6)
    monkeypatch.setattr(rendezvous, "_answers", lambda *_: False)
    file = tmp_path / "machine.yaml"
    file.write_text(FILE.format("node-0").replace("machine_rank: 1", "machine_rank: 0").replace("29500", port))
    check_rendezvous(read_machine_config(file))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    assert all("main_process_ip node-0 is not an address of this machine" in line for line in said)


def test_the_wait_for_a_name_ends(
    answers: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answers(*[socket.EAI_NONAME] * 9)
    monkeypatch.setattr(rendezvous, "RESOLUTION_SECONDS", -1.0)
    with pytest.raises(
        UsageError, match=r"main_process_ip: mmdit-0`: must be an address that this machine can resolve"
    ):
        check(tmp_path, "mmdit-0")
    assert len(asked) == 1


@pytest.mark.parametrize(
    "host", ["10.0.0.256", "10.0.0", "'two words'", "-a", "first-machine.invalid", "'::1::2'", "a..b"]
)
def test_what_is_no_name_is_refused_at_once(host: str, answers: Callable[..., list[str]], tmp_path: Path) -> None:
    asked = answers(*[socket.EAI_NONAME] * 9)
    with pytest.raises(UsageError, match="main_process_ip"):
        check(tmp_path, host)
    assert len(asked) <= 1


def test_a_resolver_that_is_broken_is_not_waited_for(answers: Callable[..., list[str]], tmp_path: Path) -> None:
    asked = answers(*[socket.EAI_FAIL] * 9)
    with pytest.raises(UsageError, match="main_process_ip: mmdit-0"):
        check(tmp_path, "mmdit-0")
    assert len(asked) == 1


def test_an_address_given_by_a_flag_is_refused_by_the_name_of_the_flag(
    answers: Callable[..., list[str]], tmp_path: Path
) -> None:
    answers(*[socket.EAI_NONAME] * 9)
    file = tmp_path / "machine.yaml"
    file.write_text(FILE.format("10.0.0.1"))
    request = Launch(str(file), "mmdit", main_process_ip="10.0.0.256")
    with pytest.raises(UsageError, match=r"^--main_process_ip '10\.0\.0\.256': must be an address that this"):
        check_rendezvous(*with_flags(read_machine_config(file), request))
    # What no flag has replaced is still a line of the file.
    request = Launch(str(file), "mmdit", main_process_port=29501)
    with pytest.raises(UsageError, match=rf"^{file}:\d+:1: `main_process_ip: '10\.0\.0\.256'`"):
        file.write_text(FILE.format("10.0.0.256"))
        check_rendezvous(*with_flags(read_machine_config(file), request))


def test_a_machine_says_what_it_waits_for_until_machine_0_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "FIRST_LINE_SECONDS", 0.0)
    monkeypatch.setattr(rendezvous, "PAUSE_SECONDS", 0.0)
    file = tmp_path / "machine.yaml"
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        file.write_text(FILE.format("127.0.0.1").replace("29500", str(held.getsockname()[1])))
        machine = read_machine_config(file)
        monkeypatch.setattr(rendezvous, "JOIN_SECONDS", 0.2)
        rendezvous.wait_for_machine_0(machine)  # without an error: torchrun has one
        lines = capsys.readouterr().err.splitlines()
        assert lines
        assert lines[0].startswith(f"machine_rank: 1 on {socket.gethostname()}: nothing answers at 127.0.0.1:")
        held.listen()
        monkeypatch.setattr(rendezvous, "JOIN_SECONDS", 600.0)
        rendezvous.wait_for_machine_0(machine)


def test_a_forwarded_port_behind_which_nobody_listens_does_not_answer() -> None:
    """Docker's proxy accepts a connection first, and hangs up when it finds nobody in the container."""

    def forward(listening: socket.socket) -> None:
        listening.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        forwarding = Thread(target=forward, args=(listening,))
        forwarding.start()
        assert not rendezvous._answers("127.0.0.1", port)
        forwarding.join()
        # Nobody accepts or hangs up, as where torch's store is busy.
        assert rendezvous._answers("127.0.0.1", port)
    assert not rendezvous._answers("127.0.0.1", port)


def test_torchs_store_is_told_from_a_service_that_stays_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A balancer may hold a connection for longer than any wait, while it looks for the machine behind it."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
    monkeypatch.setattr(rendezvous, "STORE_SECONDS", PATIENCE_SECONDS)
    assert rendezvous._is_store("127.0.0.1", store.port)
    monkeypatch.setattr(rendezvous, "STORE_SECONDS", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not rendezvous._is_store("127.0.0.1", silent.getsockname()[1])

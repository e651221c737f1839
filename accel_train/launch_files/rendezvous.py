"""Check the rendezvous of a launch file on the real network, before processes start."""

from __future__ import annotations

import errno
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from accel_train.config import UsageError
from accel_train.launch_files.machine_config import DEFAULT_PORT, MachineConfig
from accel_train.launch_files.section import Section

RESOLUTION_SECONDS = 1800.0
"""Longest wait for a name that does not resolve yet, as long as processes wait for each other by default.

A pod has no name before it runs, and a node to be added and an image to be pulled take many minutes."""
PAUSE_SECONDS = 2.0
"""Pause between two look-ups. Resolvers remember for some seconds that a name was unknown."""
JOIN_SECONDS = 900.0
"""Longest wait for an answer of machine 0, before torchrun waits as long again and fails."""
STORE_SECONDS = 60.0
"""Longest wait for torch's store, most of it for the import of torch, which is slow on a shared disk."""
HANG_UP_SECONDS = 1.0
"""Wait for a connection to be closed that was accepted on behalf of another process."""
FIRST_LINE_SECONDS = 15.0
"""Wait before the first line about machine 0. The next one comes after twice as long, and so on."""
NOT_YET = (socket.EAI_AGAIN, socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
"""Answers to a name that may be known later: no answer, an unknown name, a name without an address."""
NAME = re.compile(r"(?!-)[\w-]{1,63}(?<!-)(\.(?!-)[\w-]{1,63}(?<!-))*\.?", re.ASCII)
"""Host names that a name server accepts."""


def check_rendezvous(machine: MachineConfig, flags: frozenset[str] = frozenset()) -> None:
    """Refuse an impossible rendezvous: an unknown host, or a port in use on the main machine.

    ``flags`` are the keys whose values in ``machine`` are those of flags.

    Waits up to ``RESOLUTION_SECONDS`` for the name of the host, and binds the port for a moment. Call it once per
    machine, before processes start.
    """
    section = _section(machine, flags)
    port = DEFAULT_PORT if machine.main_process_port is None else machine.main_process_port
    refuse_placeholder(machine, flags)
    if machine.num_machines > 1:
        addresses = _resolve(section, str(machine.main_process_ip), port)
        if machine.machine_rank == 0:
            _refuse_or_warn_if_elsewhere(section, addresses)
    # Without a port on a single machine, accelerate and torchrun look for a free one themselves.
    chosen_by_launcher = machine.num_machines == 1 and not machine.main_process_port
    if machine.machine_rank == 0 and port != 0 and not chosen_by_launcher:
        _check_port(section, port, several=machine.num_machines > 1)


def wait_for_machine_0(machine: MachineConfig) -> None:
    """Wait on another machine until machine 0 answers, with a line about it now and then.

    torchrun waits in silence, also on machines of which none has been started with rank 0. Gives up after
    ``JOIN_SECONDS`` without an error, because torchrun then raises its own.
    """
    if machine.machine_rank == 0:
        return
    host, port = str(machine.main_process_ip), machine.main_process_port or DEFAULT_PORT
    begun = time.monotonic()
    following = FIRST_LINE_SECONDS
    while not _answers(host, port) and time.monotonic() < begun + JOIN_SECONDS:
        if time.monotonic() > begun + following:
            following *= 2
            print(
                f"machine_rank: {machine.machine_rank} on {socket.gethostname()}: nothing answers at {host}:{port}, "
                "where machine 0 is expected; start exactly one machine with --machine_rank 0, the one with this "
                "address, give every other machine a rank of its own, and let them reach this port",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(PAUSE_SECONDS / 4)


def _answers(host: str, port: int) -> bool:
    """Return True if a process listens there."""
    try:
        connection = socket.create_connection((host, port), timeout=5)
    except OSError:
        return False
    with connection:
        connection.settimeout(HANG_UP_SECONDS)
        try:
            # A process that forwards a port, as Docker's does, accepts first, and hangs up if nobody listens.
            return connection.recv(1) != b""
        except TimeoutError:
            # It waits for the first word, as torch's store does.
            return True
        except OSError:
            return False


def _is_store(host: str, port: int) -> bool:
    """Return True if torch's store answers there, and not a service that will forward the address to this machine."""
    # In a process of its own, since torch waits without end for a service that stays silent.
    program = (
        "import datetime, sys, torch.distributed as d\n"
        "d.TCPStore(sys.argv[1], int(sys.argv[2]), None, False, datetime.timedelta(seconds=10), wait_for_workers=False)"
    )
    try:
        command = [sys.executable, "-c", program, host, str(port)]
        return subprocess.run(command, capture_output=True, timeout=STORE_SECONDS, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def refuse_placeholder(machine: MachineConfig, flags: frozenset[str] = frozenset()) -> None:
    """Refuse an address that cannot exist, such as that of `multi_node.yaml`. Asks no name server."""
    if machine.num_machines > 1 and _is_placeholder(str(machine.main_process_ip)):
        raise _section(machine, flags).refuse(
            "main_process_ip",
            "the address or name of machine 0 as the other machines see it, which a name ending in .invalid never is",
            "write it there, or give it as --main_process_ip",
        )


def _is_placeholder(host: str) -> bool:
    # No real name ends with `.invalid` (RFC 6761).
    return host.rstrip(".").endswith(".invalid")


def _section(machine: MachineConfig, flags: frozenset[str]) -> Section:
    # Flags may have replaced both, and an error must show those in use.
    used = {"main_process_ip": machine.main_process_ip, "main_process_port": machine.main_process_port}
    return Section(machine.path, "", dict(machine.raw) | used, machine.places, flags)


def _resolve(section: Section, host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Wait until ``host`` has addresses and return them, each with its family.

    Raises ``UsageError`` at once for text that never has one.
    """
    begun = time.monotonic()
    said = False
    while True:
        try:
            return [(found[0], found[4]) for found in socket.getaddrinfo(host, port)]
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            waited = time.monotonic() - begun
            if not _may_come(host, error) or waited > RESOLUTION_SECONDS:
                after = f" after {waited:.0f} s" if said else ""
                raise section.refuse(
                    "main_process_ip",
                    "an address that this machine can resolve",
                    f"give the address of machine 0 (here{after}: {reason})",
                ) from error
        if not said:
            print(
                f"main_process_ip: {host} does not resolve yet ({reason}); retrying for {RESOLUTION_SECONDS / 60:.0f} "
                "minutes, because a machine may have no name before it runs",
                file=sys.stderr,
                flush=True,
            )
        said = True
        time.sleep(PAUSE_SECONDS)


def _refuse_or_warn_if_elsewhere(section: Section, addresses: Sequence[tuple[int, tuple[Any, ...]]]) -> None:
    """Refuse a second machine 0, and warn of one that may be: it would wait in silence.

    It is one if no address of machine 0 belongs to this machine, and another machine answers there.
    """
    if any(_is_own(family, address) for family, address in addresses):
        return
    host, here = str(section.values["main_process_ip"]), socket.gethostname()
    remedy = "give every machine its own --machine_rank, and 0 to the one that has the address"
    if any(_answers(*address[:2]) and _is_store(*address[:2]) for _, address in addresses):
        raise UsageError(
            f"machine_rank: 0 on {here}: must be another number, because machine 0 runs at {host}:{addresses[0][1][1]} "
            f"already, which is not an address of this machine; {remedy}"
        )
    # Not an error, because a service of a cluster may forward an address of its own.
    print(
        f"machine_rank: 0, but main_process_ip {host} is not an address of this machine ({here}); if no service "
        f"forwards it here, {remedy}",
        file=sys.stderr,
        flush=True,
    )


def _is_own(family: int, address: tuple[Any, ...]) -> bool:
    """Return True for an address of this machine. Tried by binding, because lists of interfaces lack 127.0.1.1."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError as error:
        # A kernel without IPv6 has neither its sockets nor its addresses.
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


def _may_come(host: str, error: Exception) -> bool:
    """Return True if a later look-up may succeed: for a name, but not for a number that is not an address."""
    is_number = re.fullmatch(r"[\d.]+", host) is not None
    if is_number or NAME.fullmatch(host) is None:
        return False
    return isinstance(error, socket.gaierror) and error.errno in NOT_YET


def _check_port(section: Section, port: int, *, several: bool) -> None:
    remedy = "end the process that uses it, or give another --main_process_port, the same on every machine"
    if several:
        remedy += "; if that is machine 0 of this run, give this start another --machine_rank"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Otherwise a port that was released a moment ago (TIME_WAIT) would count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise section.refuse(
                "main_process_port",
                f"a free port on the main machine, but {port} cannot be bound ({error.strerror})",
                remedy,
            ) from error

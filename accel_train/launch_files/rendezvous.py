"""Check the rendezvous of a launch file on the real network, before processes start."""

from __future__ import annotations

import socket

from accel_train.launch_files.machine_config import DEFAULT_PORT, MachineConfig
from accel_train.launch_files.section import Section


def check_rendezvous(machine: MachineConfig) -> None:
    """Refuse an impossible rendezvous: an unknown host, or a port in use on the main machine.

    Resolves the host and binds the port for a moment. Call it once per machine, before processes start.
    """
    # Flags may have replaced both, and an error must show those in use.
    used = {"main_process_ip": machine.main_process_ip, "main_process_port": machine.main_process_port}
    section = Section(machine.path, "", dict(machine.raw) | used, machine.places)
    port = DEFAULT_PORT if machine.main_process_port is None else machine.main_process_port
    if machine.num_machines > 1:
        host = str(machine.main_process_ip)
        try:
            socket.getaddrinfo(host, port)
        except OSError as error:
            raise section.refuse(
                "main_process_ip",
                "an address that this machine can resolve",
                f"write the address of machine 0 (here: {error.strerror or error})",
            ) from error
    # Without a port on a single machine, accelerate and torchrun look for a free one themselves.
    chosen_by_launcher = machine.num_machines == 1 and not machine.main_process_port
    if machine.machine_rank == 0 and port != 0 and not chosen_by_launcher:
        _check_port(section, port)


def _check_port(section: Section, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Otherwise a port that was released a moment ago (TIME_WAIT) would count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise section.refuse(
                "main_process_port",
                f"a free port on the main machine, but {port} cannot be bound ({error.strerror})",
                "end the process that holds it, or give another --main_process_port, the same on every machine",
            ) from error

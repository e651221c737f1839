"""The network interface of a launch: NCCL takes prefixes of names, gloo takes whole names only."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping, Sequence

import psutil

NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


def share_with_gloo(environment: MutableMapping[str, str]) -> None:
    """Let gloo use the interface that NCCL is told to use. Before the processes are connected.

    Names exactly one of them, because every process must give gloo the same number. Nothing changes if the user has
    named gloo's own, if NCCL is told what to leave out (``^lo``), or if no interface matches.
    """
    value = environment.get(NCCL_VARIABLE, "")
    if not value or value.startswith("^") or GLOO_VARIABLE in environment:
        return
    matching = matches(value, _with_an_address(), exact=False)
    if matching:
        environment[GLOO_VARIABLE] = matching[0]


def matches(value: str, interfaces: Sequence[str], *, exact: bool) -> list[str]:
    """List the interfaces that a value without ``^`` matches. ``exact`` or a leading ``=`` requires whole names."""
    exact = exact or value.startswith("=")
    # NCCL takes `eth0:1`, with a port, as well.
    names = [name.partition(":")[0] for name in value.removeprefix("=").split(",")]
    if exact:
        return [name for name in names if name in interfaces]
    return [each for name in names for each in interfaces if name and each.startswith(name)]


def _with_an_address() -> list[str]:
    """List the interfaces over which processes can connect, in the system's order, as NCCL does."""
    internet = (socket.AF_INET, socket.AF_INET6)
    addresses = psutil.net_if_addrs()
    return [name for name, found in addresses.items() if any(each.family in internet for each in found)]

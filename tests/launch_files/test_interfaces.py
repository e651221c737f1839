"""gloo's interface is the one that NCCL is told to use, by its whole name."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from accel_train.launch_files.interfaces import GLOO_VARIABLE, share_with_gloo
from tests.distributed.launching import ROOT, Layout, command, fork

WORKER = Path(ROOT, "tests", "distributed", "timeout_worker.py")


@pytest.mark.parametrize(
    ("value", "shared"),
    [
        ("eth0", "eth0"),
        ("eth", "eth0"),
        ("ib", "ib1"),  # ib0 is there, without an address
        ("=eth", None),
        ("=eth1", "eth1"),
        ("ens3,eth1", "eth1"),  # the names of several machines
        ("bond0.100", "bond0.100"),
        ("eth1:5000", "eth1"),
        ("^lo", None),
        ("ens", None),
        ("", None),
    ],
)
def test_gloo_gets_the_name_of_one_interface(value: str, shared: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    with_address, without = SimpleNamespace(family=socket.AF_INET), SimpleNamespace(family=socket.AF_PACKET)
    there: dict[str, Any] = {name: [without, with_address] for name in ("lo", "eth0", "eth1", "ib1", "bond0.100")}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"ib0": [without]} | there)
    environment = {"NCCL_SOCKET_IFNAME": value}
    share_with_gloo(environment)
    assert environment.get(GLOO_VARIABLE) == shared


def test_a_name_for_gloo_stays() -> None:
    environment = {"NCCL_SOCKET_IFNAME": "lo", GLOO_VARIABLE: "mine"}
    share_with_gloo(environment)
    assert environment[GLOO_VARIABLE] == "mine"


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="names of interfaces are of Linux")
def test_processes_connect_with_a_prefix_for_nccl(tmp_path: Path) -> None:
    name = next(each for each in psutil.net_if_addrs() if each.startswith("l"))
    layout = Layout("ddp", 2)
    done = fork(layout, command(layout, ["77"], tmp_path, WORKER), PYTHONPATH=str(ROOT), NCCL_SOCKET_IFNAME="l")
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{GLOO_VARIABLE}: {name}\n" in done.stdout

"""Two hosts on one machine: network namespaces joined by a cable, the multi_node preset between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.launching import PRESETS, RECIPE, ROOT, SMALL, Finished, Layout, environment, run_recipe
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        shutil.which("ip") is None or os.geteuid() != 0,
        reason="two hosts need root and iproute2 (apt install iproute2)",
    ),
]
ADDRESSES = ("10.231.77.1", "10.231.77.2")


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces with one interface each; taken down again whatever happens."""
    tag = uuid.uuid4().hex[:6]
    names = (f"accel-{tag}-a", f"accel-{tag}-b")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", f"va{tag}", "netns", names[0], "type", "veth", "peer", "name", f"vb{tag}", "netns", names[1])
        for name, device, address in zip(names, (f"va{tag}", f"vb{tag}"), ADDRESSES, strict=True):
            inside = ("netns", "exec", name, "ip")
            ip(*inside, "addr", "add", f"{address}/24", "dev", device)
            ip(*inside, "link", "set", device, "up")
            ip(*inside, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def start(host: str, rank: int, device: str, file: Path, directory: Path, *flags: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", host, sys.executable, "-m", "accel_train.cli", "rehearse"]
    command += ["--config_file", str(file), "--machine_rank", str(rank), "--main_process_ip", ADDRESSES[0]]
    command += [str(RECIPE), "demo", *SMALL, "--output_dir", str(directory), *flags]
    return subprocess.Popen(
        command,
        env=environment(GLOO_SOCKET_IFNAME=device),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


def test_two_hosts_follow_the_trajectory_of_one_process(hosts: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "multi_node.yaml"
    file.write_text((PRESETS / "multi_node.yaml").read_text().replace("num_processes: 16", "num_processes: 2"))
    tag = hosts[0].split("-")[1]
    flags = ("--max_steps", "4")
    started = [
        start(host, rank, f"{'va' if rank == 0 else 'vb'}{tag}", file, tmp_path / "run", *flags)
        for rank, host in enumerate(hosts)
    ]
    outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(o[-3000:] for o in outputs)
    found = Finished(tmp_path / "run", "\n".join(outputs), 0)
    alone = run_recipe(Layout("single", 1), tmp_path / "alone" / "run", *flags)
    worst = max(abs(a - b) / abs(a) for a, b in zip(alone.losses(), found.losses(), strict=True))
    assert worst < 1e-5
    assert (tmp_path / "run" / "logs" / "rank_1.log").exists()


def start_each(hosts: tuple[str, str], tmp_path: Path, *flags: tuple[str, ...]) -> list[subprocess.Popen[str]]:
    """One process on each host, with the flags of that host."""
    file = tmp_path / "multi_node.yaml"
    file.write_text((PRESETS / "multi_node.yaml").read_text().replace("num_processes: 16", "num_processes: 2"))
    tag = hosts[0].split("-")[1]
    return [
        start(host, rank, f"{'va' if rank == 0 else 'vb'}{tag}", file, tmp_path / "run", *flags[rank])
        for rank, host in enumerate(hosts)
    ]


def test_hosts_with_other_options_are_refused_on_both(hosts: tuple[str, str], tmp_path: Path) -> None:
    started = start_each(hosts, tmp_path, ("--max_steps", "1"), ("--max_steps", "1", "--seed", "7"))
    outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in started]
    assert [process.returncode for process in started] == [2, 2], "\n".join(o[-3000:] for o in outputs)
    for output in outputs:
        assert "error (wrong usage, exit code 2): seed: 0 on " in output
        assert "(process 0), but 7 on " in output.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_a_host_that_fails_alone_is_missed_by_the_other(hosts: tuple[str, str], tmp_path: Path) -> None:
    limit = ("--max_steps", "1", "--collective_timeout_seconds", "20")
    started = start_each(hosts, tmp_path, limit, (*limit, "--attention", "unheard_of"))
    outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in started]
    assert [process.returncode for process in started] == [1, 2], "\n".join(o[-3000:] for o in outputs)
    assert "machine 0 of 2: the processes start once every machine has started this command" in outputs[0]
    assert "waiting for 1 of 2 processes to connect to 10.231.77.1:" in outputs[0]
    assert "MissingProcessError: collective_timeout_seconds: 20: timed out waiting for 1 of 2 processes" in outputs[0]
    assert "DistStoreError" not in outputs[0]


def test_a_second_machine_0_is_refused_while_the_first_one_waits(hosts: tuple[str, str], tmp_path: Path) -> None:
    tag = hosts[0].split("-")[1]
    file = tmp_path / "multi_node.yaml"
    file.write_text((PRESETS / "multi_node.yaml").read_text().replace("num_processes: 16", "num_processes: 2"))
    first = start(hosts[0], 0, f"va{tag}", file, tmp_path / "run")
    try:
        reach = f"import socket; socket.create_connection(({ADDRESSES[0]!r}, 29500))"
        probe = ["ip", "netns", "exec", hosts[1], sys.executable, "-c", reach]
        until(lambda: subprocess.run(probe, capture_output=True).returncode == 0)
        second = start(hosts[1], 0, f"vb{tag}", file, tmp_path / "run")
        output = second.communicate(timeout=PATIENCE_SECONDS)[0]
        assert first.poll() is None
    finally:
        first.terminate()
        first.communicate(timeout=PATIENCE_SECONDS)
    assert second.returncode == 2, output
    assert "error (wrong usage, exit code 2): machine_rank: 0 on " in output
    assert f"machine 0 runs at {ADDRESSES[0]}:29500 already" in output
    assert first.returncode == 75

"""Facts of a host and of a launch, as read from the system."""

from __future__ import annotations

import dataclasses
import math
import os
import resource
import time
from pathlib import Path

import pytest

from accel_train.launch_files.machine_config import MachineConfig, read_machine_config
from accel_train.linting import host
from accel_train.linting.facts import Facts, Layout

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "accelerate_configs"


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "ext4"), ("/home/me/runs", "ext4"), ("/data", "nfs4"), ("/data/my runs/a", "tmpfs"), ("/database", "ext4")],
)
def test_the_longest_mount_decides(path: str, kind: str, tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "rootfs / rootfs rw 0 0\n/dev/vda / ext4 rw 0 0\n"
        "server:/x /data nfs4 rw 0 0\ntmpfs /data/my\\040runs tmpfs rw 0 0\n"
    )
    assert host.filesystem_of(Path(path), mounts) == kind


def test_this_host_is_read_as_the_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = int(time.time()) + 3600
    monkeypatch.setattr(host, "MOUNTS", Path("/proc/mounts"))
    found = host.read_host(str(tmp_path / "new" / "run"), {"SLURM_JOB_END_TIME": str(end), "TMPDIR": str(tmp_path)})
    assert found.all_cores == os.cpu_count()
    assert found.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    status = os.statvfs("/dev/shm")
    assert found.shared_memory_bytes == status.f_blocks * status.f_frsize
    assert set(found.interfaces) == set(os.listdir("/sys/class/net"))
    assert found.output.is_temporary
    assert found.output.free_bytes is not None
    assert found.seconds_left == pytest.approx(3600, abs=60)
    assert not (tmp_path / "new").exists()


def layout(name: str, *, has_devices: bool = True, processes: int | None = None) -> Layout:
    machine: MachineConfig = read_machine_config(CONFIGS / f"{name}.yaml", num_processes=processes)
    return host.layout_of_file(machine, has_devices=has_devices)


def test_layouts_of_the_launch_files() -> None:
    assert layout("single_gpu") == Layout(device="cuda")
    assert layout("single_gpu", has_devices=False) == Layout()
    assert layout("ddp", processes=8, has_devices=False) == Layout("ddp", 8, device="cuda")
    assert layout("fsdp2") == Layout("fsdp2", 2, device="cuda")
    assert layout("fsdp2_offload") == Layout("fsdp2", device="cuda", offload=True)
    assert layout("zero2_offload") == Layout("zero2", device="cuda", offload=True)
    assert layout("zero3_offload") == Layout("zero3", device="cuda", offload=True)
    assert layout("multi_node") == Layout("ddp", 16, 2, device="cuda")
    assert layout("multi_node").local_processes == 8


def test_an_unknown_host_has_no_limits() -> None:
    nowhere = host.unknown_host()
    assert nowhere.cores > 10**5
    assert nowhere.locked_memory_bytes == math.inf


def test_derived_facts() -> None:
    facts = Facts(
        {
            "max_steps": None,
            "max_epochs": 1.5,
            "global_batch_size": 60,
            "micro_batch_size": 4,
            "optimizer.name": "adamw",
        },
        Layout("ddp", 4),
        dataset_size=100,
        parameters=1000,
    )
    assert facts.steps == 3
    assert facts.accumulation == 4
    assert facts.state_bytes == 16_000
    unknown = dataclasses.replace(facts, options={**facts.options, "optimizer.name": "prodigyopt:Prodigy"})
    assert unknown.state_bytes is None

"""How many cores a process may use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from accel_train import cores

V1 = "cpu,cpuacct/a/cpu.cfs"


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/", {"cpu.max": "max 100000\n"}, None),
        ("0::/", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/", {"cpu.max": "9900000 100000\n"}, None),  # more than there are
        ("0::/a/b", {"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "300000 100000\n"}, 1.0),
        (
            "4:cpu,cpuacct:/a",
            {f"{V1}_quota_us": "200000", f"{V1}_period_us": "100000"},
            2,
        ),
        (
            "4:cpu,cpuacct:/a",
            {f"{V1}_quota_us": "-1", f"{V1}_period_us": "100000"},
            None,
        ),
        ("9:memory:/a", {"memory/a/cpu.max": "100000 100000"}, None),
        ("4:cpu:/not/seen/here", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ("0::/", {"cpu.max": "nonsense"}, None),
        ("", {}, None),
    ],
)
def test_the_quota_of_a_cgroup(
    own: str, files: Mapping[str, str], quota: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(cores, "ROOT", tmp_path / "fs")
    monkeypatch.setattr(cores, "OWN", tmp_path / "own")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(24)), raising=False)
    expected = (24, "affinity") if quota is None else (max(1, int(quota)), f"cgroup quota {quota:g}")
    assert cores.usable_cores() == expected

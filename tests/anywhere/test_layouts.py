"""Devices, and the layout for a number of them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from accel_train import cli
from accel_train.anywhere import devices, flags
from accel_train.anywhere.devices import ListedDevices, VisibleDevices
from accel_train.anywhere.flags import Request
from accel_train.anywhere.layouts import Layouts
from accel_train.config import UsageError
from accel_train.launch_files.machine_config import read_machine_config

DDP = "distributed_type: MULTI_GPU\nnum_processes: {}\n"
FSDP = "distributed_type: FSDP\nnum_processes: {}\nfsdp_config:\n  fsdp_version: 2\n"


def layouts(request: Request, folder: Path, *, on_cpu: bool = True, batch: int = 16) -> Layouts:
    return Layouts(request, {"global_batch_size": batch}, folder, on_cpu=on_cpu)


def files(folder: Path, **texts: str) -> tuple[str, ...]:
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return tuple(str(folder / f"{name}.yaml") for name in texts)


def test_the_largest_launch_file_that_fits_is_taken(tmp_path: Path) -> None:
    given = files(tmp_path, two=DDP.format(2), four=FSDP.format(4))
    found = layouts(Request("r.py", ("demo",), given), tmp_path)
    assert found.least == 2
    assert [found.processes(count) for count in range(6)] == [0, 0, 2, 2, 4, 4]
    assert str(found.choose(3)) == "ddp on 2 processes"
    assert str(found.choose(5)) == "fsdp2 on 4 processes"
    assert (found.choose(5).file, found.choose(5).arguments) == (tmp_path / "four.yaml", ("demo",))


def test_without_files_every_device_has_a_process(tmp_path: Path) -> None:
    found = layouts(Request("r.py", ()), tmp_path)
    assert [found.processes(count) for count in (0, 1, 3, 40)] == [0, 1, 3, 16]
    machine = read_machine_config(found.choose(3).file)
    assert (machine.strategy, machine.num_processes, machine.use_cpu) == ("ddp", 3, True)
    machine = read_machine_config(found.choose(1).file)
    assert (machine.strategy, machine.use_cpu) == ("single", True)


def test_on_accelerators_and_in_rehearsals_the_bundled_files_are_used(tmp_path: Path) -> None:
    for found in (
        layouts(Request("r.py", ()), tmp_path, on_cpu=False),
        layouts(Request("r.py", (), rehearse=True), tmp_path),
    ):
        machine = read_machine_config(found.choose(3).file)
        assert (machine.distributed_type, machine.num_processes, machine.use_cpu) == ("MULTI_GPU", 3, False)


def test_a_plan_divides_the_global_batch(tmp_path: Path) -> None:
    found = layouts(Request("r.py", (), vram_gib=24.0), tmp_path, batch=12)
    assert [found.processes(count) for count in (0, 1, 5, 11, 13)] == [0, 1, 4, 6, 12]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"a": DDP.format(2), "b": FSDP.format(2)}, r"a\.yaml and .*b\.yaml both have 2 processes"),
        ({"a": "distributed_type: MULTI_GPU\n"}, r"a\.yaml has no num_processes"),
        (
            {"a": DDP.format(4) + "num_machines: 2\nmachine_rank: 0\nmain_process_ip: 10.0.0.1\n"},
            r"is for 2 machines, and `run --anywhere` manages one",
        ),
    ],
)
def test_files_that_cannot_be_chosen_from_are_refused(texts: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        layouts(Request("r.py", (), files(tmp_path, **texts)), tmp_path)


@pytest.mark.parametrize("text", ["", "four", "-1", "1025", "1 2", "²"])
def test_a_file_without_a_number_is_refused_at_first_and_passed_over_later(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "devices"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"devices: .*one number from 0 to 1024"):
        ListedDevices(str(path))
    path.write_text("3\n")
    found = ListedDevices(str(path))
    path.write_text(text)
    assert found.count() == 3
    path.unlink()
    assert found.count() == 3
    assert capsys.readouterr().err == "", "it may be half written"
    assert [found.count() for _ in range(5)] == [3] * 5
    assert capsys.readouterr().err.count(f"{path} no longer has a number from 0 to 1024; continuing with 3") == 1
    path.write_text("0")
    assert found.count() == 0


def test_a_machine_without_accelerators_has_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert VisibleDevices().count() >= 1
    monkeypatch.setattr(devices, "COUNT", "print(0)")
    assert VisibleDevices().count() == 1


def test_accelerators_that_are_lost_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "COUNT", "print(4)")
    monkeypatch.setattr(devices, "SECONDS_BETWEEN_COUNTS", -1.0)
    found = VisibleDevices()
    assert found.count() == 4
    monkeypatch.setattr(devices, "COUNT", "print(0)")
    assert found.count() == 0


def test_a_count_that_fails_or_is_not_repeated_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "COUNT", "print(4)")
    monkeypatch.setattr(devices, "SECONDS_BETWEEN_COUNTS", -1.0)
    found = VisibleDevices()
    for failing in ("raise SystemExit(1)", "print(0); raise SystemExit(1)", "print('no number')"):
        monkeypatch.setattr(devices, "COUNT", failing)
        assert found.count() == 4
    with pytest.raises(UsageError, match="give the number in a file with --devices"):
        VisibleDevices()
    # Two accelerators at the first count, all of them at the second.
    note = tmp_path / "note"
    once = f"from pathlib import Path; p = Path({str(note)!r}); print(4 if p.exists() else 2); p.touch()"
    monkeypatch.setattr(devices, "COUNT", once)
    assert found.count() == 4
    assert note.exists()
    monkeypatch.setattr(devices, "LONGEST_SECONDS", 0.01)
    monkeypatch.setattr(devices, "COUNT", "import time; print(0, flush=True); time.sleep(1800)")
    assert found.count() == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("mmdit", r"run: --anywhere is required.*accel-train launch mmdit"),
        ("--anywhere --max_restarts -1 mmdit", r"max_restarts: -1: 0 or more is required"),
        ("--anywhere --grace_seconds 0 mmdit", r"grace_seconds: 0: 1 or more is required"),
        ("--anywhere --vram_gib nan mmdit", r"vram_gib: nan: the memory of one GPU"),
        ("--anywhere --vram_gib all mmdit", r"vram_gib: all: .* or auto"),
        ("--anywhere --vram_gib 8 --config_file a.yaml mmdit", r"vram_gib with --config_file"),
        ("--anywhere none_such", r"none_such"),
    ],
)
def test_wrong_flags_are_refused(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cli._main(["run", *words.split()])  # pyright: ignore[reportPrivateUsage]


def test_the_memory_of_the_smallest_gpu_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    asked = parser.parse_args(["--anywhere", "--vram_gib", "auto"])
    asked.recipe, asked.arguments = "mmdit", []
    # What torch says on a machine of two GPUs, and on one without.
    monkeypatch.setattr(devices, "MEMORY", f"print({12 << 30})")
    assert flags.request_of(asked).vram_gib == 12.0
    monkeypatch.setattr(devices, "MEMORY", "print(0)")
    with pytest.raises(UsageError, match="torch sees no GPU here; give the memory"):
        flags.request_of(asked)


def test_a_machine_says_the_memory_that_torch_sees() -> None:
    expected = 0.0
    if torch.cuda.is_available():
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        expected = min(each.total_memory for each in properties) / 2**30
    assert devices.visible_vram_gib() == expected

"""How many threads torch takes: what the machine has to spare, what was asked for, and what a checkpoint had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from accel_train.runtime import threads


@pytest.fixture(autouse=True)
def number() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cores", "processes", "load", "all_cores", "chosen"),
    [
        (2, 1, 0.0, 2, 2),
        (2, 1, 1.0, 2, 2),  # this start itself
        (2, 1, 1.2, 2, 2),  # and the end of the command before it
        (2, 1, 1.6, 2, 1),
        (2, 1, 12.0, 2, 1),
        (16, 1, 8.0, 16, 9),
        (16, 4, 0.5, 16, 4),
        (16, 3, 0.5, 16, 5),
        (2, 4, 0.0, 2, 1),
        (4, 1, 0.0, 128, 4),  # a quota of four on a large host
        (4, 1, 100.0, 128, 4),
        (4, 1, 127.5, 128, 1),
    ],
)
def test_what_the_machine_has_to_spare(cores: int, processes: int, load: float, all_cores: int, chosen: int) -> None:
    assert threads.choose(cores, processes, load, all_cores) == chosen


@pytest.mark.parametrize(
    ("content", "load"),
    [
        ("1.80 1.0 0.5 1/84 77", 1.0),  # a command that has just ended
        ("1.80 1.0 0.5 9/84 77", 1.8),
        ("unreadable", 1.8),
        (None, 1.8),
    ],
)
def test_a_load_that_has_passed_does_not_count(
    content: str | None, load: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "LOAD", tmp_path / "loadavg")
    monkeypatch.setattr(threads.os, "getloadavg", lambda: (1.8, 1.0, 0.5))
    if content is not None:
        threads.LOAD.write_text(content)
    assert threads.current_load() == load


@pytest.mark.parametrize(
    ("environment", "flags", "launcher", "said"),
    [
        ({}, None, {}, False),
        ({"OMP_NUM_THREADS": "3"}, None, {}, True),
        ({"OMP_NUM_THREADS": "1"}, {}, {}, False),  # `accelerate launch` set it
        ({"OMP_NUM_THREADS": "1"}, {}, {"OMP_NUM_THREADS": "1"}, True),
        ({"OMP_NUM_THREADS": "4"}, {"num_cpu_threads_per_process": 4}, {}, True),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, None, {}, False),  # torchrun set it
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "none"}, None, {"OMP_NUM_THREADS": "2"}, True),
        ({"OMP_NUM_THREADS": "1", "ACCEL_TRAIN_THREADS_UNASKED": "1"}, None, {"OMP_NUM_THREADS": "1"}, False),
    ],
)
def test_what_a_person_said(
    environment: dict[str, str],
    flags: dict[str, Any] | None,
    launcher: dict[str, str],
    said: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psutil.Process, "environ", lambda _: launcher)
    assert threads.asked(environment, flags) is said


def test_a_number_that_was_asked_for_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_asked", lambda: True)
    torch.set_num_threads(3)
    assert threads.resolve_threads("cpu").startswith("3 torch thread(s), as OMP_NUM_THREADS")
    assert threads.keep_threads({"layout": {"threads": 1}}, "cpu") == []
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("saved", "now", "says"),
    [
        ({}, 2, None),
        ({"threads": 2}, 2, None),
        ({"threads": 1}, 1, "1 torch thread(s) instead of 2, as the checkpoint was computed"),
        ({"threads": 4}, 4, "4 torch thread(s) instead of 2"),
        ({"threads": 5}, 2, "2 torch thread(s): the checkpoint was computed with 5, for which there are too few cores"),
    ],
)
def test_a_resume_keeps_the_number_of_the_checkpoint(
    saved: dict[str, Any], now: int, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_asked", lambda: False)
    monkeypatch.setattr(threads, "usable_cores", lambda: (8, "affinity"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    torch.set_num_threads(2)
    said = threads.keep_threads({"layout": saved}, "cpu")
    assert torch.get_num_threads() == now
    assert [line.startswith(says) for line in said if says] == ([True] if says else [])


def test_a_resume_keeps_the_number_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_asked", lambda: False)
    monkeypatch.setattr(threads, "usable_cores", lambda: (8, "affinity"))
    for rank, kept in (("1", 3), ("2", 2)):
        monkeypatch.setenv("RANK", rank)
        torch.set_num_threads(2)
        threads.keep_threads({"layout": {"threads": [1, 3]}}, "cpu")
        assert torch.get_num_threads() == kept


@pytest.mark.parametrize(
    ("device", "on_host", "cores", "processes", "chosen", "says"),
    [
        (
            "cuda",
            True,
            64,
            8,
            8,
            "8 torch thread(s): 64 core(s) usable (affinity, shared by the optimizers on the host)",
        ),
        ("cuda", True, 4, 8, 1, "1 torch thread(s): 4 core(s) usable (affinity, shared by the optimizers on the host)"),
        ("cuda", False, 64, 8, 1, "1 torch thread(s): 64 core(s) usable (affinity), 8 process(es)"),
    ],
)
def test_an_optimizer_on_the_host_takes_its_share_of_the_cores(
    device: str, on_host: bool, cores: int, processes: int, chosen: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_asked", lambda: False)
    monkeypatch.setattr(threads, "usable_cores", lambda: (cores, "affinity"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    torch.set_num_threads(1)  # as the launcher left it
    assert threads.resolve_threads(device, updates_on_host=on_host).startswith(says)
    assert torch.get_num_threads() == chosen
    # A resume on a device keeps a number only if the host computes a sum of it.
    threads.keep_threads({"layout": {"threads": 2}}, device, updates_on_host=on_host)
    assert torch.get_num_threads() == (2 if on_host and cores >= 2 * processes else chosen)

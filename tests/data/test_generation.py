import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from accel_train.data import generation
from accel_train.data.generation import blocks_in_order
from tests.waiting import until


def square_and_process(number: int) -> tuple[int, int]:
    time.sleep(0.02 * (number % 3))
    return number**2, os.getpid()


def fails_at_3(number: int) -> int:
    if number == 3:
        raise ValueError("block 3 cannot be made")
    return number


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_in_order_without_workers(count: int) -> None:
    made = list(blocks_in_order(square_and_process, count, 0))
    assert made == [(number**2, os.getpid()) for number in range(count)]


@pytest.mark.distributed
def test_in_order_with_workers() -> None:
    made = list(blocks_in_order(square_and_process, 9, 2))
    assert [square for square, _ in made] == [number**2 for number in range(9)]
    processes = [process for _, process in made]
    assert set(processes[:2]) == {os.getpid()}
    assert os.getpid() not in processes[2:]
    assert not [child for child in psutil.Process().children(True) if child.pid in processes]
    with pytest.raises(ValueError, match="block 3 cannot be made"):
        list(blocks_in_order(fails_at_3, 9, 1))


def test_auto_starts_workers_for_long_work_only(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(
        generation, "_map_in_workers", lambda make, numbers, workers: started.append(workers) or map(make, numbers)
    )
    monkeypatch.setattr(generation, "usable_cores", lambda: (8, "affinity"))
    monkeypatch.setattr(generation, "SECONDS_WORTH_WORKERS", 600.0)
    assert [square for square, _ in blocks_in_order(square_and_process, 5, "auto")] == [0, 1, 4, 9, 16]
    assert started == []
    monkeypatch.setattr(generation, "SECONDS_WORTH_WORKERS", 0.05)
    list(blocks_in_order(square_and_process, 9, "auto"))
    assert started == [8]


def slow(number: int, folder: Path) -> int:
    (folder / f"{os.getpid()}").touch()
    time.sleep(0.0 if number < 2 else 1800.0)
    return number


@pytest.mark.distributed
def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom functools import partial\nfrom pathlib import Path\n"
        "from accel_train.data.generation import blocks_in_order\nfrom tests.data.test_generation import slow\n"
        "if __name__ == '__main__':\n    list(blocks_in_order(partial(slow, folder=Path(sys.argv[1])), 6, 2))\n"
    )
    (tmp_path / "pids").mkdir()
    root = str(Path(__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "pids")], env={**os.environ, "PYTHONPATH": root}
    )

    def workers() -> list[int]:
        return [int(f.name) for f in (tmp_path / "pids").iterdir() if int(f.name) != parent.pid]

    until(lambda: len(workers()) == 2)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not [worker for worker in workers() if psutil.pid_exists(worker)])


def test_what_is_made_can_be_a_partial() -> None:
    assert list(blocks_in_order(partial(pow, 2), 4, 0)) == [1, 2, 4, 8]

"""What a refused start removes, and what it must leave. The recipe's own refusals are in test_bad_input(_speed)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_train.checkpoints import refused
from accel_train.checkpoints.refused import present, remove_new
from accel_train.store import lock as locks
from accel_train.store.run_file import write_run
from tests.waiting import PATIENCE_SECONDS

WRITTEN = (".lock", "config.yaml", "logs/rank_0.log", "metrics.jsonl", "run.json")
ALL = {f"a/run/{name}" for name in WRITTEN}
SAVED = "checkpoints/checkpoint_00000002/manifest.json"
OTHER = "checkpoints/checkpoint_00000004/manifest.json"
RUN = {"run_id": "r", "experiment": {}, "resolved": {}}


def write(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()


def begin(directory: Path) -> None:
    """What a start makes before its first step."""
    write(directory, *WRITTEN)
    (directory / "checkpoints").mkdir(exist_ok=True)
    write_run(directory, RUN)


def copied(directory: Path) -> None:
    """As with ``--resume PATH``."""
    write(directory, SAVED)
    write_run(directory, RUN | {"parent": {"run_id": "p", "checkpoint": Path(SAVED).parent.name}})


def begin_from(directory: Path) -> None:
    begin(directory)
    copied(directory)


def trained(directory: Path) -> None:
    write_run(directory, RUN | {"trained": True})


def left(folder: Path) -> set[str]:
    """Files and empty directories."""
    found = (path for path in folder.rglob("*") if path.is_file() or not any(path.iterdir()))
    return {path.relative_to(folder).as_posix() for path in found}


def nothing(_: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("earlier", "meanwhile", "kept"),
    [
        pytest.param(nothing, nothing, set[str](), id="parents-and-all"),
        pytest.param(lambda run: run.mkdir(parents=True), nothing, {"a/run"}, id="a-directory-that-was-there"),
        pytest.param(lambda run: write(run, "notes.txt"), nothing, {"a/run/notes.txt"}, id="a-file-that-was-there"),
        pytest.param(nothing, lambda run: write(run, "notes.txt"), {"a/run/notes.txt"}, id="a-file-of-somebody"),
        pytest.param(lambda run: write(run, WRITTEN[2]), nothing, {"a/run/logs/rank_0.log"}, id="an-earlier-log"),
        pytest.param(begin, nothing, {*ALL, "a/run/checkpoints"}, id="resumed"),
        pytest.param(nothing, lambda run: write(run, SAVED), {*ALL, f"a/run/{SAVED}"}, id="a-checkpoint-of-its-own"),
        pytest.param(nothing, copied, set[str](), id="from-a-checkpoint"),
        pytest.param(begin_from, copied, {*ALL, f"a/run/{SAVED}"}, id="resumed-from-a-checkpoint"),
        pytest.param(
            nothing,
            lambda run: (copied(run), write(run, OTHER)),
            {*ALL, f"a/run/{SAVED}", f"a/run/{OTHER}"},
            id="a-checkpoint-and-its-own",
        ),
        pytest.param(nothing, trained, {*ALL, "a/run/checkpoints"}, id="trained"),
    ],
)
def test_what_a_refused_start_leaves(
    earlier: Callable[[Path], None], meanwhile: Callable[[Path], None], kept: set[str], tmp_path: Path
) -> None:
    run = tmp_path / "a" / "run"
    earlier(run)
    before = present(run)
    begin(run)
    meanwhile(run)
    remove_new(run, before, 0)
    assert left(tmp_path) == kept


def test_a_directory_that_another_run_took_meanwhile_stays_whole(tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = present(run)
    begin(run)
    lock = locks.acquire(run)
    remove_new(run, before, 0)
    assert left(run) == {*WRITTEN, "checkpoints"}
    lock.close()


@pytest.mark.parametrize("first", [0, 1])
def test_several_processes_leave_nothing(first: int, tmp_path: Path) -> None:
    """In whichever order they are refused: one that is not the main one waits for it, and so does its launcher."""
    run = tmp_path / "a" / "run"
    before = present(run)
    begin(run)
    write(run, "logs/rank_1.log")
    ranks = [threading.Thread(target=remove_new, args=(run, before, rank)) for rank in (0, 1)]
    ranks[first].start()
    if first == 0:
        ranks[0].join(PATIENCE_SECONDS)
        assert left(tmp_path) == set(), "the launcher may end the others before they come to it"
    ranks[1 - first].start()
    for rank in ranks:
        rank.join(PATIENCE_SECONDS)
    assert left(tmp_path) == set()


def test_a_process_that_is_refused_alone_waits_for_seconds_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = present(tmp_path)
    begin(tmp_path)
    write(tmp_path, "logs/rank_1.log")
    monkeypatch.setattr(refused, "SECONDS_TO_BE_HEARD", 0.2)
    remove_new(tmp_path, before, 1)
    assert left(tmp_path) == {*WRITTEN, "checkpoints"}

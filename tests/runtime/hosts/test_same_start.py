"""Processes that were started differently are refused, each with both values: real processes and one of their files."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from accel_train.config import UsageError
from accel_train.runtime import signals
from accel_train.runtime.hosts import meeting as module
from accel_train.runtime.hosts.meeting import meeting
from accel_train.runtime.hosts.same_start import (
    Facts,
    Started,
    facts_of_start,
    launch_settings,
    refuse_different_start,
)
from tests import zygote
from tests.waiting import PATIENCE_SECONDS, free_port, until

TIMEOUT = timedelta(seconds=PATIENCE_SECONDS)


@dataclass(frozen=True)
class Data:
    cache_dir: str = "cache"
    samples: int = 8


@dataclass(frozen=True)
class Config:
    output_dir: str = "runs/one"
    seed: int = 0
    data: Data = field(default_factory=Data)


def refusal(first: Facts, *others: Facts) -> str:
    with pytest.raises(UsageError) as error:
        refuse_different_start(
            Started("a", 0, first), [Started("b", 1 + rank, facts) for rank, facts in enumerate(others)]
        )
    return str(error.value)


def start_differently(rank: int, folder: Path, port: int) -> None:
    """Meets with an option of its own on the last rank, writes the error, then meets again as all others do."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with pytest.raises(UsageError) as error, meeting({"options": {"seed": "7" if rank == 2 else "0"}}, TIMEOUT):
        pass
    (folder / f"rank{rank}").write_text(str(error.value))


def leave_with_the_store(rank: int, folder: Path, port: int) -> None:
    """Process 0 holds the store and does not wait for the other, which looks at it again only after that."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    wait_for_others = module._Meeting._let_others_read

    def in_this_order(meeting_point: module._Meeting) -> None:
        def until_it_has_ended(_: float) -> None:
            (folder / "waiting").touch()
            until(lambda: not meeting_point._answers())

        if rank == 0:
            module.SECONDS_TO_READ = 0.0
            until((folder / "waiting").exists)
        else:
            vars(module)["time"] = SimpleNamespace(monotonic=time.monotonic, sleep=until_it_has_ended)
        wait_for_others(meeting_point)

    module._Meeting._let_others_read = in_this_order
    with pytest.raises(UsageError), meeting({"options": {"seed": str(rank)}}, TIMEOUT):
        pass


def start_all_differently(rank: int, folder: Path, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    read = module._Meeting._started
    found: list[int] = []

    def counted(meeting_point: module._Meeting, other: int, host: str) -> Started:
        found.append(other)
        return read(meeting_point, other, host)

    module._Meeting._started = counted
    with pytest.raises(UsageError), meeting({"options": {"seed": str(rank)}}, TIMEOUT):
        pass
    assert found == [0, 1]


def start_alike(rank: int, folder: Path, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with meeting({"options": {"seed": "0"}}, TIMEOUT):
        dist.init_process_group("gloo", timeout=TIMEOUT)
    # The processes are connected now, as in a second run of a notebook.
    given = timedelta(seconds=77)
    with pytest.raises(UsageError) as error, meeting({"options": {"seed": str(rank)}}, given):
        pass
    assert signals.host_group()._get_backend(torch.device("cpu")).options._timeout == given
    (folder / f"rank{rank}").write_text(str(error.value))
    dist.destroy_process_group()


def test_every_process_names_the_option_and_both_values(tmp_path: Path) -> None:
    zygote.call(start_differently, 3, tmp_path, free_port())
    texts = {path.read_text() for path in tmp_path.iterdir()}
    (text,) = texts
    assert len(list(tmp_path.iterdir())) == 3
    assert text.startswith("seed: 0 on ")
    assert "(process 0), but 7 on " in text
    assert "(process 2); every process needs the same options: give the same command on every host" in text
    assert "with the same preset or file" in text


def test_a_difference_is_reported_although_the_store_has_ended_with_process_0(tmp_path: Path) -> None:
    zygote.call(leave_with_the_store, 2, tmp_path, free_port())


def test_facts_are_read_up_to_the_first_that_differ(tmp_path: Path) -> None:
    """All facts of hundreds of processes that all differ would be gigabytes."""
    zygote.call(start_all_differently, 4, tmp_path, free_port())


def test_processes_that_are_connected_already_are_compared(tmp_path: Path) -> None:
    zygote.call(start_alike, 2, tmp_path, free_port())
    (text,) = {path.read_text() for path in tmp_path.iterdir()}
    assert text.startswith("seed: 0 on ")
    assert "but 1 on " in text


def test_where_data_are_cached_may_differ_and_nothing_else() -> None:
    facts = facts_of_start(Config())
    refuse_different_start(Started("a", 0, facts), [Started("b", 1, facts_of_start(Config(data=Data("/local"))))])
    assert refusal(facts, facts_of_start(Config(data=Data(samples=9)))).startswith("data.samples: 8 on a (process 0)")


def test_an_output_directory_is_compared_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts may mount one shared directory at different places. Whether it is shared is checked when it is opened."""
    monkeypatch.setenv("SHARED", "/mnt/a")
    facts = facts_of_start(Config(output_dir="$SHARED/run"))
    monkeypatch.setenv("SHARED", "/mnt/b")
    refuse_different_start(Started("a", 0, facts), [Started("b", 1, facts_of_start(Config(output_dir="$SHARED/run")))])
    assert "but '/mnt/b/run' on b" in refusal(facts, facts_of_start(Config(output_dir="/mnt/b/run")))


@pytest.mark.parametrize(
    ("kind", "remedy"), [("packages", "install them from one list"), ("files", "bring the copies up to date")]
)
def test_versions_and_code_are_compared_by_name(kind: str, remedy: str) -> None:
    known = facts_of_start(Config())
    name = {"packages": "torch", "files": "accel_train/loop.py"}[kind]
    other = {**known, kind: {**known[kind], name: "another"}}
    text = refusal(known, known, other)
    assert text.startswith(f"{name}: {known[kind][name]} on a (process 0), but another on b (process 2); ")
    assert remedy in text


def test_a_package_that_one_host_lacks_is_not_in_use() -> None:
    known = facts_of_start(Config())
    more = {**known, "packages": {**known["packages"], "unused": "1"}}
    refuse_different_start(Started("a", 0, known), [Started("b", 1, more)])


def test_launch_settings_are_compared() -> None:
    plain = launch_settings("fsdp", {"FSDP_OFFLOAD_PARAMS": "true", "HOME": "/root"}, None)
    assert plain == {"strategy": "fsdp", "fsdp_offload_params": "true"}
    other = launch_settings("deepspeed", {}, {"zero_optimization": {"stage": 2}})
    text = refusal({"launch settings": plain}, {"launch settings": other})
    assert "strategy: fsdp on a (process 0), but deepspeed on b (process 1)" in text
    assert "deepspeed_config.zero_optimization.stage: not set on a (process 0), but 2 on b" in text


def test_a_recipe_and_the_modules_beside_it_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, beside = tmp_path / "train.py", tmp_path / "my_model_beside_it.py"
    recipe.write_text("one")
    beside.write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("accel_train.runtime.hosts.same_start.recipe_file", lambda: str(recipe))
    __import__("my_model_beside_it")
    before = facts_of_start(Config())
    beside.write_text("x = 2")
    assert refusal(before, facts_of_start(Config())).startswith(f"{tmp_path.name}/my_model_beside_it.py: hash ")
    beside.write_text("x = 1")
    recipe.write_text("two")
    assert refusal(before, facts_of_start(Config())).startswith("train.py: hash ")

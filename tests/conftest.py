"""What several files of tests need before and after each of their tests."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Generator, Iterator
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # one test on each core (-n auto): more threads would get in their way
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

from accel_train.cores import usable_cores
from accel_train.runtime import tested_versions


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "slow tests to run beside those that -m selects: part DAY of PARTS, another one each day"
    parser.addoption("--part", metavar="DAY/PARTS", type=part, help=text)


def pytest_report_header() -> str | None:
    return tested_versions.notice()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than the cores, because the tests wait for processes a tenth of their time."""
    return usable_cores()[0] + 1


def part(words: str) -> tuple[int, int]:
    """'20780/14' -> (4, 14). The day may be counted from anywhere."""
    day, parts = map(int, words.split("/"))
    return day % parts, parts


def is_long(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether a test is allowed more time than the others: a day's part of the slow ones leaves it out."""
    limit = item.get_closest_marker("timeout")
    return limit is not None and limit.args[0] > float(config.getini("timeout"))


COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""Every test of the files that were asked for, before -m and -k."""


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    config.stash[COLLECTED] = list(items)
    for item in items:
        if item.get_closest_marker("gpu"):
            # Errors elsewhere. Drivers and kernels of a GPU warn of matters of their own, once in a process.
            item.add_marker(pytest.mark.filterwarnings("default"))
    if config.option.part is None:
        yield
        return
    today, parts = config.option.part
    slow = [item for item in items if item.get_closest_marker("slow")]
    # Those of a file, which take about as long, go to different days.
    due = [item for item in slow if not is_long(item, config)][today::parts]
    config.hook.pytest_deselected(items=[item for item in slow if item not in due])
    # Aside from -m, which is usually there to leave slow tests out.
    items[:] = [item for item in items if not item.get_closest_marker("slow")]
    yield
    # First, because the last tests of a run should be short: the other cores wait for them.
    items[:0] = due


def pytest_collection_finish() -> None:
    """Keep what was imported and collected out of the garbage collector, which every run in this process asks once."""
    gc.collect()
    gc.freeze()


def noted_unfreeze(unfreeze: Callable[[], None] = gc.unfreeze) -> None:
    # The end of a run thaws everything. Half a second each for the next runs is worth a little garbage that stays.
    unfreeze()
    thawed.append(True)


thawed: list[bool] = []
gc.unfreeze = noted_unfreeze  # because `gc.get_freeze_count` looks at every object


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    if thawed:
        thawed.clear()
        gc.freeze()


EXTRAS = ("bitsandbytes", "deepspeed", "diffusers", "prodigyopt", "schedulefree", "tensorboard", "torchao")
"""Packages of the extra ``test-all``: where one is missing, the tests that need it skip and name it."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> object:
    return (yield from skip_without_extra())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> object:
    return (yield from skip_without_extra())


def skip_without_extra() -> Generator[None, object, object]:
    try:
        return (yield)
    except (ModuleNotFoundError, PackageNotFoundError) as error:
        package = (error.name or "").partition(".")[0]
        if package in EXTRAS and find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install -e '.[test-all]'")
        raise


def forget() -> None:
    """Accelerate's state of this process, which outlives its objects."""
    AcceleratorState._reset_state(True)
    PartialState._reset_state()


@pytest.fixture
def fresh() -> Iterator[None]:
    """No Accelerator of another test, and none left behind."""
    forget()
    yield
    forget()


@pytest.fixture
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each legend takes ten seconds: above one, matplotlib warns of the default place."""
    monkeypatch.setattr("matplotlib.legend.time", SimpleNamespace(perf_counter=itertools.count(0, 10).__next__))


@pytest.fixture
def accelerator(fresh: None) -> Accelerator:
    """Of one process on the CPU."""
    return Accelerator(cpu=True)

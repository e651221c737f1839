"""One kernel of attention for all processes, whatever is installed where: two real processes whose hosts differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from accel_train.config import UsageError
from accel_train.speed.attention import selection as attention
from accel_train.speed.attention.table import AttentionNeeds
from tests import zygote
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.distributed
NEEDS = AttentionNeeds(torch.device("cpu"), torch.float32, 8, heads=2, length=12, batch=2)


def table(first: tuple[str, ...], second: tuple[str, ...]) -> Callable[[int], None]:
    """What the table says can run on each host."""

    def differ(rank: int) -> None:
        names = (first, second)[rank]
        vars(attention).update(able=lambda *_: names, preferred=lambda *_: names)

    return differ


def broken(names: tuple[str, ...], only: int | None = 1) -> Callable[[int], None]:
    """Kernels that the proof refutes on one process, or (None) on all."""
    prove = attention.prove_attention

    def differ(rank: int) -> None:
        def prove_or_refute(built: Any, needs: Any) -> Any:
            if built.name in names and only in (rank, None):
                raise UsageError(f"attention {built.name}: differs from the fp64 reference")
            return prove(built, needs)

        vars(attention).update(prove_attention=prove_or_refute)

    return differ


SECONDS = {"sdpa": 3.0, "sdpa_math": 1.0, "sdpa_flash": 2.0}


def slow(rank: int) -> None:
    """The second process finds the fastest kernel of the first one slow."""
    times = SECONDS if rank == 0 else SECONDS | {"sdpa_math": 9.0}
    vars(attention).update(time_attention=lambda built, _: times[built.name])


def untimed(rank: int) -> None:
    """The second process cannot run the fastest kernel at these shapes."""

    def seconds(built: Any, _: Any) -> float:
        if rank and built.name == "sdpa_math":
            raise RuntimeError("no room")
        return SECONDS[built.name]

    vars(attention).update(time_attention=seconds)


CASES: dict[str, tuple[str, Callable[[int], None]]] = {
    "alike": ("auto", lambda rank: None),
    "a package more": ("auto", table(("sdpa_flash", "sdpa"), ("sdpa",))),
    "another order": ("auto", table(("sdpa_math", "sdpa"), ("sdpa", "sdpa_math"))),
    "nothing in common": ("auto", table(("sdpa_math",), ("sdpa", "sdpa_flash"))),
    "wrong on one": ("auto", broken(("sdpa",))),
    "wrong on all": ("auto", broken(("sdpa",), None)),
    "tune, a package more": ("tune", table(("sdpa", "sdpa_math", "sdpa_flash"), ("sdpa", "sdpa_flash"))),
    "tune, slow on one": ("tune", slow),
    "tune, wrong on one": ("tune", broken(("sdpa", "sdpa_math"))),
    "tune, cannot be timed on one": ("tune", untimed),
}


def work(rank: int, folder: str) -> None:
    """Every case in turn; a case that leaves a collective of one process behind spoils those after it."""
    found: dict[str, Any] = {}
    timeout, kept = timedelta(seconds=PATIENCE_SECONDS), dict(vars(attention))
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timeout
    )
    for name, (option, differ) in CASES.items():
        vars(attention).update(kept, time_attention=lambda built, _: SECONDS[built.name])
        if name.startswith(("wrong", "tune, wrong")):
            table(("sdpa", "sdpa_math", "sdpa_flash"), ("sdpa", "sdpa_math", "sdpa_flash"))(rank)
        differ(rank)
        try:
            chosen, reason = attention.resolve_attention(option, NEEDS)
            found[name] = [chosen.name, reason]
        except UsageError as error:
            found[name] = ["", str(error)]
    distributed.destroy_process_group()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def choices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    """Of each case what both processes chose, and why."""
    folder = tmp_path_factory.mktemp("agreement")
    zygote.call(work, 2, str(folder))
    both = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return {name: [tuple(found[name]) for found in both] for name in CASES}


@pytest.mark.parametrize(
    ("case", "expected", "said"),
    [
        ("alike", "sdpa", "auto: first of the table"),
        ("a package more", "sdpa", "; sdpa_flash cannot run on process 1 ("),
        ("another order", "sdpa_math", "auto: first of the table"),
        ("wrong on one", "sdpa_math", "; sdpa failed on process 1 ("),
        ("wrong on all", "sdpa_math", "; sdpa failed on process 0 ("),
        ("tune, a package more", "sdpa_flash", "; sdpa_math cannot run on process 1 ("),
        ("tune, slow on one", "sdpa_flash", "sdpa_math 9e+03 ms"),
        ("tune, cannot be timed on one", "sdpa_flash", "; sdpa_math failed on process 1 ("),
        ("tune, wrong on one", "sdpa_flash", "; sdpa_math failed on process 1 ("),
    ],
)
def test_all_processes_take_one_kernel(
    case: str, expected: str, said: str, choices: dict[str, list[tuple[str, str]]]
) -> None:
    assert [name for name, _ in choices[case]] == [expected, expected]
    assert all(said in reason for _, reason in choices[case])


def test_nothing_in_common_stops_every_process(choices: dict[str, list[tuple[str, str]]]) -> None:
    for name, reason in choices["nothing in common"]:
        assert not name
        assert reason.startswith("attention auto: no kernel can run on every process, but all must use the same one: ")
        assert "sdpa_math on process 0 (" in reason
        assert "; sdpa, sdpa_flash on process 1 (" in reason
        assert "Install the same packages on all hosts" in reason

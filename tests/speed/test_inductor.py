"""The compiler's heuristics for GPUs: which reductions read a row at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
import torch._inductor.config as settings
from torch._inductor.choices import InductorChoices
from torch._inductor.dependencies import MemoryDep, StarDep
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V

from accel_train.speed import compile
from accel_train.speed.inductor import CHAIN, READS, ROW, RowsInRegisters, set_heuristics
from accel_train.speed.options import CompileConfig
from benchmarks.gpu_training import torch_heuristics

TOKEN, CHANNEL = sympy.symbols("token channel", integer=True, nonnegative=True)
TOKENS, ROWS = 32768, 1024


@pytest.fixture(autouse=True)
def heuristics() -> Any:
    """Those of torch, before and after."""
    before = V.choices
    with settings.patch(inductor_choices_class=None, realize_reads_threshold=4, realize_acc_reads_threshold=8):
        yield
    V.set_choices_handler(before)


def reads(index: Any, width: int) -> MemoryDep:
    return MemoryDep("buffer", sympy.sympify(index), (TOKEN, CHANNEL), (sympy.Integer(TOKENS), sympy.Integer(width)))


def is_persistent(width: int, *operands: Any, cooperative: bool = False, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Ask about a kernel with one reduction over so many values, for which torch's own answer is no."""
    asked: list[bool] = []

    def no(features: Any, cooperative_reduction: bool) -> bool:
        asked.append(cooperative_reduction)
        return False

    monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", staticmethod(no))
    node = SimpleNamespace(read_writes=SimpleNamespace(reads=set(operands)))
    features = SimpleNamespace(reduction_numel=sympy.Integer(width), reduction_nodes=lambda: [node])
    graph: Any = SimpleNamespace(sizevars=SizeVarAllocator())
    with V.set_graph_handler(graph):
        found = RowsInRegisters.should_use_persistent_reduction(features, cooperative)
    assert found or asked == [cooperative]
    return found


def row(width: int) -> list[MemoryDep]:
    """A token's channels, its sample's scale, and a number of its own: what a modulated norm reads."""
    scale = width * sympy.floor(TOKEN / ROWS) + CHANNEL
    return [reads(width * TOKEN + CHANNEL, width), reads(scale, width), reads(TOKEN, width)]


def test_rows_of_tokens_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (1536, ROW):
        assert is_persistent(width, *row(width), monkeypatch=monkeypatch)


def test_the_rest_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_persistent(ROW + 1, *row(ROW + 1), monkeypatch=monkeypatch)
    assert not is_persistent(1536, *row(1536), cooperative=True, monkeypatch=monkeypatch)
    # A sum over tokens, as of a bias' gradient: neighbours in memory are other sums.
    column = reads(TOKENS * CHANNEL + TOKEN, 1536)
    assert not is_persistent(1536, column, monkeypatch=monkeypatch)
    assert not is_persistent(1536, *row(1536), column, monkeypatch=monkeypatch)
    assert not is_persistent(1536, *row(1536), StarDep("buffer"), monkeypatch=monkeypatch)
    with settings.patch("triton.persistent_reductions", False):
        assert not is_persistent(1536, *row(1536), monkeypatch=monkeypatch)


def test_they_are_set_for_a_gpu_alone() -> None:
    compile._set_torch(CompileConfig("on"), torch.device("cpu"))
    assert settings.inductor_choices_class is None
    assert settings.realize_reads_threshold == 4
    compile._set_torch(CompileConfig("on"), torch.device("cuda"))
    assert settings.inductor_choices_class is RowsInRegisters
    assert settings.realize_reads_threshold == READS
    assert settings.realize_acc_reads_threshold == CHAIN
    assert type(V.choices) is RowsInRegisters
    # The cache of compiled code knows them from torch's.
    assert str(ROW) in RowsInRegisters().uuid()


def test_a_benchmark_compiles_with_those_of_torch() -> None:
    def are_set() -> tuple[Any, ...]:
        compile._set_torch(CompileConfig("on"), torch.device("cuda"))
        names = ("inductor_choices_class", "realize_reads_threshold", "realize_acc_reads_threshold")
        return type(V.choices), *(getattr(settings, name) for name in names)

    ours = are_set()
    with torch_heuristics():
        assert are_set() == (InductorChoices, None, 4, 8)
    assert are_set() == ours == (RowsInRegisters, RowsInRegisters, READS, CHAIN)


def test_a_newer_torch_has_its_own_limit_by_device() -> None:
    with settings.patch(realize_acc_reads_threshold=None):
        set_heuristics()
        assert settings.realize_acc_reads_threshold == CHAIN


def test_choices_that_are_set_already_stay() -> None:
    class Own(InductorChoices):
        pass

    # Larger or smaller than those of this package.
    for read, chain in ((20, 30), (4, 8)):
        own = {"inductor_choices_class": Own, "realize_reads_threshold": read, "realize_acc_reads_threshold": chain}
        with settings.patch(own):
            set_heuristics()
            assert settings.inductor_choices_class is Own
            assert (settings.realize_reads_threshold, settings.realize_acc_reads_threshold) == (read, chain)


def test_larger_thresholds_stay() -> None:
    with settings.patch(realize_reads_threshold=20, realize_acc_reads_threshold=30):
        set_heuristics()
        assert settings.inductor_choices_class is RowsInRegisters
        assert (settings.realize_reads_threshold, settings.realize_acc_reads_threshold) == (20, 30)

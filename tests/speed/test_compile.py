"""Compilation in place: same numbers, same names, counted, and refused or undone aloud where it fails.

Most tests compile with aot_eager, which traces forward and backward as inductor does and generates no code.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.domains.models.mmdit import MMDiTConfig, MultimodalMMDiT, MultimodalMMDiTConfig
from accel_train.speed.activation_checkpointing import apply_activation_checkpointing
from accel_train.speed.attention.kernels import Attention, build_attention, pack_mask, packed_kernel, sdpa
from accel_train.speed.attention.selection import apply_attention
from accel_train.speed.compile import CompiledBlocks, apply_compile
from accel_train.speed.options import CompileConfig
from tests.compiling import NO_INDUCTOR
from tests.speed.checkpointing import MODES, PARTIAL, config_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ON = CompileConfig("on")
pytestmark = pytest.mark.filterwarnings(  # torch's own: when it imports inductor, when it traces
    "ignore:The .grad attribute of a Tensor:UserWarning"
)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Compiled code and options of torch as they were."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch

    torch._dynamo.reset()
    with dynamo.patch(recompile_limit=8, optimize_ddp=True), functorch.patch(force_non_lazy_backward_lowering=False):
        yield
    torch._dynamo.reset()


def build(depth: int = 3) -> MultimodalMMDiT:
    torch.manual_seed(0)
    model = MultimodalMMDiT(MultimodalMMDiTConfig(MMDiTConfig(width=32, depth=depth, heads=2), 50, 6, 16, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def batch(length: int = 8, rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(length) < torch.tensor([[length], [5], [1], [3]])[:rows]
    return {
        "tokens": torch.randint(0, 50, (rows, length), generator=generator),
        "latents": torch.randn(rows, 3, 6, generator=generator),
        "text_time": torch.rand(rows, generator=generator),
        "latent_time": torch.rand(rows, generator=generator),
        "text_mask": mask,
    }


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    output = model(**inputs)
    return output.text_logits[inputs["text_mask"]].square().mean() + output.latents.square().mean()


def train(model: nn.Module, steps: int = 3, **shape: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for _ in range(steps):
        loss = loss_of(model, batch(**shape))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compiled(model: nn.Module, config: CompileConfig = ON, backend: Any = "aot_eager") -> CompiledBlocks:
    return apply_compile(model, config, CPU, backend=backend)


# ----------------------------------------------------------------------------------------------------- same numbers
def segments(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, _starts: Tensor, _longest: int, _: int) -> Tensor:
    """Attention of packed sequences by an ordinary mask: what a kernel for them computes."""
    sequence = torch.bucketize(torch.arange(q.shape[0]), starts, right=True)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return sdpa(q, k, v, sequence[:, None] == sequence[None, :]).transpose(0, 1)


KERNELS: dict[str, Callable[[], Attention]] = {
    "sdpa": lambda: build_attention("sdpa"),
    "sdpa_math": lambda: build_attention("sdpa_math"),
    "sdpa_flash": lambda: build_attention("sdpa_flash"),
    "packed": lambda: Attention("packed", packed_kernel(sdpa, segments), pack_mask),
}
COMPILED = zip(("sdpa", "packed", "sdpa", "sdpa_math", "sdpa_flash", "packed"), MODES, strict=True)
QUICK = {"full", PARTIAL}
"""Compiled in seconds: one graph with everything checkpointed, and two with a part of the blocks."""
PAIRS = [  # every pair of a kernel and a mode; compiled, each value of both, because it takes seconds
    *((kernel, mode, False) for kernel in KERNELS for mode in MODES),
    *(pytest.param(kernel, mode, True, marks=() if mode in QUICK else pytest.mark.slow) for kernel, mode in COMPILED),
]


@pytest.fixture(scope="module")
def reference() -> list[float]:
    return train(build())


@pytest.mark.parametrize(("kernel", "mode", "compiles"), PAIRS)
def test_losses_are_equal_for_every_pair_of_options(
    kernel: str, mode: Any, compiles: bool, reference: list[float]
) -> None:
    model = build()
    names = list(model.state_dict())
    apply_attention(model, KERNELS[kernel]())
    apply_activation_checkpointing(model, config_of(mode))
    watch = compiled(model, ON if compiles else CompileConfig())
    assert train(model) == pytest.approx(reference, rel=1e-5)
    assert list(model.state_dict()) == names
    assert watch.recompilations == 0
    # One graph for all blocks; two where only the first is checkpointed.
    assert watch.graphs == ((2 if mode == PARTIAL else 1) if compiles else 0)


def test_inductor_gives_the_same_losses() -> None:
    """Where torch cannot compile at all, for a space in a path, ``auto`` gives them uncompiled and says so."""
    reference, model = Stack(), Stack()
    watch = apply_compile(model, CompileConfig("auto") if NO_INDUCTOR else ON, CPU)
    x = torch.randn(4, 8, requires_grad=True)  # as behind an embedding: of the first block a second graph otherwise
    results: list[Tensor] = []
    for each in (reference, model):
        each(x).square().sum().backward()
        results.append(torch.cat([p.grad.flatten() for p in each.parameters() if p.grad is not None]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    if NO_INDUCTOR:
        assert watch.failure or not watch.blocks
        return
    assert "inductor" in watch.notice
    assert watch.graphs == 1
    assert watch.fields()["compile_seconds"] > 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


# ------------------------------------------------------------------------------------------------ what is compiled
def test_compilation_is_flat_in_depth_and_done_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "accel_train.speed.compile")
    for depth in (2, 5):
        torch._dynamo.reset()
        caplog.clear()
        model = build(depth)
        watch = compiled(model)
        assert watch.blocks == depth
        assert watch.notice == f"compile: {depth} blocks (MMDiTBlock) in place, aot_eager, default"
        train(model, steps=1)
        assert watch.graphs == 1
        seconds = watch.seconds
        assert seconds > 0
        train(model, steps=3)
        assert (watch.graphs, watch.recompilations, watch.seconds) == (1, 0, seconds)
        assert caplog.messages == [f"compile: one graph for {depth} blocks, compiled in {seconds:.1f} s"]


def test_evaluation_with_its_own_shapes_compiles_nothing() -> None:
    model, plain = build(), build()
    watch = compiled(model)
    train(model, steps=1)
    train(plain, steps=1)
    with torch.no_grad():
        for length in (5, 6, 7):
            torch.testing.assert_close(loss_of(model, batch(length)), loss_of(plain, batch(length)))
    assert watch.graphs == 1


def test_copies_are_not_compiled() -> None:
    model = build()
    watch = compiled(model)
    again = copy.deepcopy(model)
    train(again, steps=1)
    assert watch.graphs == 0


def test_seconds_of_all_compilations_are_added() -> None:
    watch = CompiledBlocks(CompileConfig("on"), 2, "")
    watch.record(1.5, [None])
    watch.record(2.25, ["a guard", "another"])
    assert watch.fields() == {"compile_seconds": 3.75, "compile_graphs": 3, "compile_recompilations": 2}


def test_recompilations_are_counted_and_above_the_budget_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack()
    watch = compiled(model, CompileConfig("on", recompile_budget=2))

    def step(rows: int) -> None:
        model(torch.randn(rows, 8, requires_grad=True)).sum().backward()

    with caplog.at_level(logging.WARNING, "accel_train.speed.compile"):
        for rows in (2, 3, 4):
            step(rows)
        assert watch.recompilations == 2
        assert not caplog.records
        for rows in (5, 6):
            step(rows)
    counts = {"compile_graphs": 5, "compile_recompilations": 4}
    assert watch.fields() == {"compile_seconds": round(watch.seconds, 3)} | counts
    (warning,) = caplog.records  # once
    for words in ("3 recompilations", "compile.recompile_budget is 2", "size mismatch at index 0", "actual 5"):
        assert words in warning.getMessage()
    assert len(watch.guards) == 4


def test_more_shapes_than_torch_allows_do_not_stop_a_run() -> None:
    model = Stack()
    watch = compiled(model)
    for rows in range(2, 14):
        model(torch.randn(rows, 8, requires_grad=True)).sum().backward()
    assert watch.graphs == 12


def test_dynamic_compiles_once_more_for_all_further_lengths() -> None:
    model, plain = build(), build()
    watch = compiled(model, CompileConfig("on", dynamic=True))
    for length in (8, 9, 11, 13):
        loss = loss_of(model, batch(length))
        torch.testing.assert_close(loss, loss_of(plain, batch(length)), rtol=1e-5, atol=0)
        loss.backward()
    assert watch.graphs == 2


def test_ddp_splits_no_block_at_its_buckets() -> None:
    """torch's DDPOptimizer would, once for each bucket that a block fills: smaller graphs with fewer fusions."""
    from torch._dynamo.backends.common import aot_autograd

    nodes: list[int] = []

    def count(graph: Any, _inputs: Any) -> Any:
        nodes.append(len(graph.graph.nodes))
        return make_boxed_func(graph.forward)

    def compiled_nodes(wrap: Callable[[nn.Module], nn.Module]) -> list[int]:
        torch._dynamo.reset()
        nodes.clear()
        model = Stack(Wide)
        compiled(model, ON, aot_autograd(fw_compiler=count))
        wrap(model)(torch.randn(4, 512, requires_grad=True)).sum().backward()
        return nodes.copy()

    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        # One matrix of a block fills a bucket.
        buckets = partial(nn.parallel.DistributedDataParallel, bucket_cap_mb=1)
        assert compiled_nodes(buckets) == compiled_nodes(lambda model: model)
    finally:
        torch.distributed.destroy_process_group()


# ------------------------------------------------------------------------------------------------------- where not
def test_off_changes_nothing() -> None:
    model = build()
    watch = compiled(model, CompileConfig())
    assert (watch.blocks, watch.notice, watch.fields()) == (0, "compile: off", {})
    assert all(module._compiled_call_impl is None for module in model.modules())


class Broken(Block):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def broken_code(_graph: Any, _inputs: Any) -> Any:
    raise RuntimeError("the compiler\n  is out of order")


def unhappy_compiler(_graph: Any, _inputs: Any) -> Any:
    command = "g++ -O3 " * 100
    raise RuntimeError(
        f"C++ compile error\n\nCommand:\n{command}\n\nOutput:\ng++: fatal error: no input files\nterminated."
    )


def broken_backward() -> Any:
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=broken_code)


FAILURES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str]] = {
    "graph break": (partial(Stack, Broken), lambda: "aot_eager", "graph_break"),
    "compiler": (Stack, lambda: broken_code, "RuntimeError: the compiler is out of order"),
    "words of the compiler": (Stack, lambda: unhappy_compiler, "RuntimeError: g++: fatal error: no input files"),
    "compiler of the backward": (Stack, broken_backward, "RuntimeError: the compiler is out of order"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_on_stops_with_the_cause(failure: str) -> None:
    make, backend, cause = FAILURES[failure]
    model = make()
    watch = compiled(model, ON, backend())
    with pytest.raises(UsageError) as caught:
        model(torch.randn(4, 8))
    text = str(caught.value)
    assert text.startswith("compile.mode on: torch.compile failed: ")
    assert cause in text
    assert "auto" in text
    assert "\n" not in text
    assert watch.failure is None


@pytest.mark.parametrize("failure", FAILURES)
def test_auto_goes_on_uncompiled_says_so_once_and_records_it(failure: str, caplog: pytest.LogCaptureFixture) -> None:
    make, backend, cause = FAILURES[failure]
    model, plain, x = make(), make(), torch.randn(4, 8)
    watch = compiled(model, CompileConfig("auto"), backend())
    with caplog.at_level(logging.WARNING, "accel_train.speed.compile"):
        for _ in range(2):
            losses = [each(x).square().sum() for each in (model, plain)]
            for loss in losses:
                loss.backward()
    assert torch.equal(*losses)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    (warning,) = caplog.records
    assert "run uncompiled from now on" in warning.getMessage()
    assert cause in warning.getMessage()
    assert cause in watch.fields()["compile_failure"]


@pytest.mark.parametrize("left", [b"", b"\x7fELF", b"no library" * 100], ids=["empty", "short", "other"])
def test_half_a_library_in_the_cache_is_named(left: bytes, tmp_path: Path) -> None:
    """torch links compiled code in place: a process killed meanwhile leaves what every later one fails to load."""
    library = tmp_path / "a cache" / "code.so"
    library.parent.mkdir()
    library.write_bytes(left)

    def load(_graph: Any, _inputs: Any) -> Any:
        return ctypes.CDLL(str(library))

    model = Stack()
    compiled(model, ON, load)
    with pytest.raises(UsageError, match=f"left an incomplete library: delete {library} "):
        model(torch.randn(4, 8))


def test_a_space_at_which_the_compiler_failed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/home/me/my deepspeed")
    model = Stack()
    compiled(model, ON, unhappy_compiler)
    expected = r"compile failed: RuntimeError: g\+\+: fatal error: no input files; the Python environment '/home/me"
    with pytest.raises(UsageError, match=expected):
        model(torch.randn(4, 8))


def test_an_error_of_the_model_itself_is_not_hidden() -> None:
    for mode in ("on", "auto"):
        model = Stack()
        compiled(model, CompileConfig(mode))
        model(torch.randn(4, 8))
        with pytest.raises((RuntimeError, UsageError), match=r"4x7|shape|size"):
            model(torch.randn(4, 7))


def missing_compiler() -> AbstractContextManager[None]:
    import torch._inductor.config as inductor

    return inductor.patch({"cpp.cxx": ("no-such-compiler",)})


def switched_off() -> AbstractContextManager[None]:
    return torch._dynamo.config.patch(disable=True)


def silenced() -> AbstractContextManager[None]:
    return torch._dynamo.config.patch(suppress_errors=True)


@pytest.mark.parametrize(
    ("spoiled", "words"),
    [
        (missing_compiler, ("no working C++ compiler", "no-such-compiler", "apt install g++")),
        (switched_off, ("TORCHDYNAMO_DISABLE",)),
        (silenced, ("TORCHDYNAMO_SUPPRESS_ERRORS",)),
    ],
)
def test_what_is_missing_is_said_before_anything_runs(
    spoiled: Callable[[], AbstractContextManager[None]], words: tuple[str, ...]
) -> None:
    model = build()
    with spoiled():
        with pytest.raises(UsageError) as caught:
            apply_compile(build(), ON, CPU)
        watch = apply_compile(model, CompileConfig("auto"), CPU)
    assert watch.notice.startswith("compile: off (auto: ")
    for word in words:
        assert word in str(caught.value)
        assert word in watch.notice
    assert watch.blocks == 0
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_auto_leaves_blocks_uncompiled_on_a_cpu_and_says_why() -> None:
    """On a GPU, and where no reason is known, they are compiled."""
    if NO_INDUCTOR:
        pytest.skip("another reason comes first: torch cannot compile here")
    watch = apply_compile(build(), CompileConfig("auto"), CPU)
    assert watch.notice.startswith("compile: off (auto: on a CPU")
    assert watch.blocks == 0
    assert apply_compile(build(), ON, CPU).blocks > 0
    assert apply_compile(build(), CompileConfig("auto"), CPU, backend="eager").blocks > 0


def test_a_gpu_without_triton_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_train.speed.compile.find_spec", lambda _name: None)
    with pytest.raises(UsageError, match="triton cannot be imported"):
        apply_compile(build(), ON, CUDA)


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_reduce_overhead_is_refused_with_accumulation_and_without_a_gpu(mode: Any) -> None:
    config = CompileConfig(mode, "reduce-overhead")
    with pytest.raises(UsageError, match=r"reduce-overhead: fails with accumulation \(pytorch#169545\), here 4"):
        apply_compile(build(), config, CUDA, accumulation_steps=4)
    with pytest.raises(UsageError, match="the device is cpu"):
        apply_compile(build(), config, CPU)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UsageError, match="has no list of blocks"):
        compiled(nn.Linear(2, 2))

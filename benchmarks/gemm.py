"""C9: the share of this machine's matrix product rate that a training step of the MMDiT reaches.

    python -m benchmarks.gemm --output benchmarks/results/gemm_cpu.json
    python -m benchmarks.gemm --threads 2 --output benchmarks/results/gemm_cpu_2_threads.json

An MMDiT of 6 blocks of width 256 (15 M parameters), 256 + 77 tokens, forward and backward, in fp32 and in bf16 under
autocast. The rate of the machine is that of the faster of two square products in the same dtype, timed in the same
rounds. The step is timed eager, and compiled block by block as with `compile.mode on`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from accel_train.domains.models.mmdit import MMDiT, MMDiTConfig
from accel_train.linting.host import has_fast_bf16
from accel_train.speed.compile import apply_compile
from accel_train.speed.options import CompileConfig
from benchmarks.method import Row, in_turns, parser_of, row, write_results

DTYPES = {"fp32": (torch.float32, ">= 0.8"), "bf16": (torch.bfloat16, ">= 0.5")}
SIZES = (768, 1536)
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product", "mkldnn_linear")
"""Name prefixes of the operators that do the counted FLOPs."""


def step_of(width: int, depth: int, rows: int, precision: str, compiled: bool = False) -> Callable[[], Tensor]:
    """Return a forward and backward that discards its gradients. ``compiled``: block by block, at the first call."""
    torch.manual_seed(0)
    model = MMDiT(MMDiTConfig(width, depth, heads=4))
    if compiled:
        apply_compile(model, CompileConfig("on"), torch.device("cpu"))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=width**-0.5)
    tokens = [torch.randn(rows, length, width) for length in (256, 77)]
    conditioning, parameters = torch.randn(rows, width), list(model.parameters())

    def step() -> Tensor:
        with autocast(precision):
            loss = sum((x.float().square().mean() for x in model(tokens, conditioning, None)), torch.zeros(()))
        torch.autograd.grad(loss, parameters)
        return loss

    return step


def autocast(precision: str) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Return the FLOPs of an attention forward: scores and their product with the values, (B, heads, L, head width)."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (width + value[3])


def attention_forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return attention_flops(query, key, value)


def attention_backward(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
    """Return twice the FLOPs of the forward. Recomputed scores do not count as work of the model."""
    return 2 * attention_flops(query, key, value)


CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
}
"""FLOP counts of the CPU attention operators. torch (2.13) counts attention on GPUs but not these two."""


def flops_of(step: Callable[[], object]) -> int:
    """Return the FLOPs of one call as counted by torch, with attention on a CPU included."""
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        step()
    return counter.get_total_flops()


class ProductTimes(TorchDispatchMode):
    """Sum the seconds spent in the operators of `PRODUCTS`, each timed at its dispatch."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.clock = clock
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = self.clock()
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket._qualified_op_name.removeprefix("aten::").startswith(PRODUCTS):
            self.seconds += self.clock() - began
        return result


def in_products(step: Callable[[], object], clock: Callable[[], float], rounds: int) -> list[float]:
    """Return the seconds that a step spends in its products, by round, after one warm-up round."""
    seconds: list[float] = []
    for _ in range(rounds + 1):
        with ProductTimes(clock) as times:
            step()
        seconds.append(times.seconds)
    return seconds[1:]


def product(size: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    return lambda: a @ b


def measure(
    width: int, depth: int, rows: int, rounds: int, sizes: tuple[int, ...], precisions: Sequence[str]
) -> tuple[list[Row], dict[str, Any]]:
    """Measure each precision; return rows and details."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    results: list[Row] = []
    details: dict[str, Any] = {}
    for name in precisions:
        dtype, target = DTYPES[name]
        step = step_of(width, depth, rows, name)
        work = flops_of(step)  # also of the compiled step, which computes the same
        ways: dict[str, Callable[[], object]] = {"step": step, "compiled": step_of(width, depth, rows, name, True)}
        ways |= {str(n): product(n, dtype) for n in sizes}
        times = in_turns(ways, rounds, repeats=2, clock=clock)
        name += "" if torch.get_num_threads() == 1 else f", {torch.get_num_threads()} threads"
        rate = {n: 2 * n**3 / times.median(str(n)) for n in sizes}
        best = max(rate, key=lambda n: rate[n])
        shares, compiled = (
            [work / a / (2 * best**3 / b) for a, b in zip(times.seconds[way], times.seconds[str(best)], strict=True)]
            for way in ("step", "compiled")
        )
        reached = [work / s / 1e9 for s in times.seconds["step"]]
        results.append(row("C9", f"{name}: share of the machine's own matrix product rate", shares, target=target))
        results.append(row("C9", f"{name}, compiled: share of the machine's own rate", compiled, target=target))
        # The step's own products are slower than square ones. A step cannot take less time than they do alone.
        alone = [work / s / rate[best] for s in in_products(step, clock, rounds)]
        results.append(
            row("C9", f"{name}: the same of its products and attention, all else left out: the bound", alone)
        )
        results.append(row("C9", f"{name}: training step", reached, "GFLOP/s"))
        results.append(row("C9", f"{name}: matrix product", rate[best] / 1e9, "GFLOP/s"))
        details[name] = {"flops": work, "product": best, **times.summary()}
        details[name]["spread"] = statistics.pstdev(shares)
    return results, details


def main() -> int:
    """Measure, print and write the rows. Returns 1 if a target is missed, else 0."""
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument(
        "--threads", type=int, default=1, help="number of threads; wall time is measured with more than one"
    )
    parser.add_argument("--rows", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    width, depth, sizes = (64, 1, (64, 128)) if options.tiny else (256, 6, SIZES)
    absent = {} if has_fast_bf16() else {"bf16": "torch has no fast bf16 products on this CPU to take a share of"}
    precisions = [name for name in DTYPES if name not in absent]
    rows, details = measure(width, depth, options.rows, 2 if options.tiny else options.rounds, sizes, precisions)
    return 0 if write_results(options.output, "C9: share of the matrix product rate", rows, details, absent) else 1


if __name__ == "__main__":
    sys.exit(main())

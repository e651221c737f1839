"""Options of DDP's exchange: what is refused where, what reaches DDP, and real processes that use them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch.distributed.fsdp import fully_shard

from accel_train.config import UsageError
from accel_train.options.help_text import field_texts
from accel_train.runtime.distributed_options import (
    DistributedConfig,
    ddp_handlers,
    verify_ddp,
)
from accel_train.runtime.strategy import apply_fsdp2_prefetch
from tests.distributed.launching import Layout, run_recipe
from tests.distributed.test_contract import work

OPTIONS: tuple[dict[str, Any], ...] = (
    {"gradient_as_bucket_view": False},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 25},
    {"comm_hook": "powersgd"},
    {"comm_hook": "bf16"},
    {"static_graph": True},
)


def handlers(
    strategy: str = "ddp",
    *,
    precision: str = "fp32",
    on_device: bool = True,
    accumulation_steps: int = 1,
    **options: Any,
) -> Any:
    config, steps = DistributedConfig(**options), accumulation_steps
    return ddp_handlers(config, strategy, precision=precision, on_device=on_device, accumulation_steps=steps)


def test_defaults_of_ddp() -> None:
    (found,) = handlers()
    assert found.gradient_as_bucket_view
    assert not found.find_unused_parameters
    assert not found.static_graph
    assert (found.bucket_cap_mb, found.comm_hook.value) == (25, "no")


def test_options_reach_the_handler() -> None:
    (found,) = handlers(gradient_as_bucket_view=False, bucket_cap_mb=3, comm_hook="bf16", static_graph=True)
    assert (found.gradient_as_bucket_view, found.bucket_cap_mb, found.static_graph) == (False, 3, True)
    assert found.comm_hook.value == "bf16"
    (found,) = handlers(comm_hook="powersgd", powersgd_rank=4, powersgd_start_step=7)
    assert found.comm_state_option == {"matrix_approximation_rank": 4, "start_powerSGD_iter": 7}
    (found,) = handlers(comm_hook="powersgd")
    assert found.comm_state_option == {"matrix_approximation_rank": 1, "start_powerSGD_iter": 1000}


@pytest.mark.parametrize("strategy", ["single", "fsdp2", "zero"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_without_effect_is_refused_and_not_ignored(strategy: str, options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(
        UsageError,
        match=rf"distributed\.{name}: {value}: applies to DDP only, and this run uses {strategy}.*leave it out",
    ):
        handlers(strategy, **options)
    assert handlers(strategy) == []


def test_what_fails_later_is_refused_now() -> None:
    with pytest.raises(UsageError, match=r"comm_hook: bf16 needs NCCL.*raises on gloo"):
        handlers(comm_hook="bf16", on_device=False)
    with pytest.raises(UsageError, match=r"static_graph: true with 4 micro-batches.*accelerate#3679"):
        handlers(static_graph=True, accumulation_steps=4)
    with pytest.raises(UsageError, match=r"powersgd_rank: 2: has no effect with distributed\.comm_hook: none"):
        DistributedConfig(powersgd_rank=2)
    with pytest.raises(UsageError, match=r"powersgd_start_step: 1: at least 2 is needed"):
        DistributedConfig(comm_hook="powersgd", powersgd_start_step=1)
    for values in ({"bucket_cap_mb": 0}, {"comm_hook": "fp16"}, {"comm_hook": "powersgd", "powersgd_rank": 0}):
        with pytest.raises(ValidationError):
            TypeAdapter(DistributedConfig).validate_python(values)


def test_powersgd_is_refused_where_a_gradient_may_overflow() -> None:
    """What the hook keeps would be NaN from the first overflow on, and of another loss scale before."""
    for precision in ("fp32", "bf16"):
        assert handlers(comm_hook="powersgd", precision=precision)
    for hook in ("none", "bf16"):
        assert handlers(comm_hook=hook, precision="fp16")
    words = (
        r"comm_hook: powersgd with precision: fp16: .*--precision bf16 or fp32.*--distributed\.comm_hook bf16 or none"
    )
    with pytest.raises(UsageError, match=words):
        handlers(comm_hook="powersgd", precision="fp16")


@pytest.mark.usefixtures("one_process_group")
def test_powersgd_over_gloo_wants_one_bucket() -> None:
    """Reductions of several buckets begin in gloo's threads, in no common order; a run with them was seen to abort."""
    for layers, said in ((1, ""), (2, r"of 1 MiB for 2\.0 MiB of gradients: .*--distributed\.bucket_cap_mb 2")):
        layer = [torch.nn.Linear(512, 512, bias=False) for _ in range(layers)]
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(*layer), bucket_cap_mb=1, gradient_as_bucket_view=True
        )
        (asked,) = handlers(comm_hook="powersgd", bucket_cap_mb=1)
        asked.register_comm_hook(model)
        with pytest.raises(UsageError, match=said) if said else contextlib.nullcontext():
            assert "buckets of 1 MiB" in verify_ddp(model, asked)


@pytest.mark.usefixtures("one_process_group")
def test_torch_counts_reductions_and_the_option_says_so() -> None:
    """Two micro-batches that are both reduced are two of ``powersgd_start_step``, one that is held back is none."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    (asked,) = handlers(comm_hook="powersgd", powersgd_start_step=4)
    asked.register_comm_hook(model)
    ((_, state),) = model._comm_hooks  # type: ignore[misc]
    for step in range(4):
        for reduced in (step >= 2, True):  # two steps with one reduction, two with two
            with contextlib.nullcontext() if reduced else model.no_sync():
                model(torch.randn(2, 8)).sum().backward()
        assert (state.iter, len(state.error_dict)) == ((1, 0), (2, 0), (4, 0), (6, 1))[step]
    text = " ".join(field_texts(DistributedConfig)["powersgd_start_step"].split())
    assert "one per optimizer step, or one per micro-batch with sync every" in text


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero"])
def test_gathering_ahead_is_of_fsdp2_alone(strategy: str) -> None:
    with pytest.raises(UsageError, match=rf"fsdp2_prefetch: 2: applies to FSDP2 only, and this run uses {strategy}"):
        handlers(strategy, fsdp2_prefetch=2)
    assert handlers("fsdp2", fsdp2_prefetch=2) == []
    with pytest.raises(UsageError, match=r"0 block\(s\) that are sharded on their own, but at least 2 are required"):
        apply_fsdp2_prefetch(DistributedConfig(fsdp2_prefetch=1), torch.nn.Linear(2, 2))


@pytest.mark.usefixtures("one_process_group")
def test_each_block_names_those_after_it_and_before_it() -> None:
    model = TwoParts()
    for block in (*model.first, *model.second, model):
        fully_shard(block)
    assert apply_fsdp2_prefetch(DistributedConfig(), model) == []
    (said,) = apply_fsdp2_prefetch(DistributedConfig(fsdp2_prefetch=2), model)
    assert said == "fsdp2: 2 of 6 blocks are gathered ahead of their use"
    states: list[Any] = [block._get_fsdp_state() for block in (*model.first, *model.second)]  # type: ignore[operator]

    def places(name: str) -> list[list[int]]:
        return [[states.index(other) for other in getattr(state, name)] for state in states]

    assert places("_states_to_forward_prefetch") == [[1, 2], [2, 3], [3], [], [5], []]
    assert places("_states_to_backward_prefetch") == [[], [0], [1, 0], [2, 1], [], [4]]
    (loss := model(torch.ones(1, 2)).sum()).backward()
    assert torch.isfinite(loss)


@pytest.mark.usefixtures("one_process_group")
def test_a_part_that_does_not_run_keeps_no_weights_of_another_time() -> None:
    """The average is in the weights while a run evaluates; a part that trains alone must not have gathered it."""
    model = TwoParts()
    for block in (*model.first, *model.second, model):
        fully_shard(block)
    apply_fsdp2_prefetch(DistributedConfig(fsdp2_prefetch=3), model)
    with torch.no_grad():
        trained = [p.detach().clone() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.zero_()
        model(torch.ones(1, 2), second=False)  # an evaluation of the average, without the second part
        for parameter, value in zip(model.parameters(), trained, strict=True):
            parameter.copy_(value)
        for block in (*model.first, *model.second, model):
            block.reshard()  # type: ignore[operator]
        assert bool((model(torch.ones(1, 2)) != 0).all())


class TwoParts(torch.nn.Module):
    """Blocks in two lists, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(4))
        self.second = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))

    def forward(self, x: torch.Tensor, second: bool = True) -> torch.Tensor:
        for block in (*self.first, *(self.second if second else ())):
            x = block(x)
        return x


@pytest.mark.slow
@pytest.mark.distributed
def test_gathering_ahead_changes_no_bit(tmp_path: Path) -> None:
    layout, flags = Layout("fsdp2", 2), ("--max_steps", "4", "--schedule.warmup_steps", "2", "--micro_batch_size", "4")
    plain = run_recipe(layout, tmp_path / "plain", *flags)
    ahead = run_recipe(layout, tmp_path / "ahead", *flags, "--distributed.fsdp2_prefetch", "2")
    assert "blocks are gathered ahead of their use" in ahead.output
    assert [x.hex() for x in ahead.losses()] == [x.hex() for x in plain.losses()]


@pytest.fixture
def one_process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    _GROUPS.append(torch.distributed.group.WORLD)
    yield
    torch.distributed.destroy_process_group()


_GROUPS: list[object] = []
"""Held to the end: a thread of gloo that drops the last reference, with what a hook leaves behind, would join itself,
which ends the process."""


@pytest.mark.usefixtures("one_process_group")
def test_what_ddp_has_is_compared_with_what_was_asked() -> None:
    """As if a later accelerate dropped an option on the way."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), gradient_as_bucket_view=True)
    (asked,) = handlers()
    assert verify_ddp(model, asked) == "buckets of 25 MiB, gradients as views"
    for option, other in (
        ("bucket_cap_mb", handlers(bucket_cap_mb=3)),
        ("gradient_as_bucket_view", handlers(gradient_as_bucket_view=False)),
        ("static_graph", handlers(static_graph=True)),
        ("comm_hook", handlers(comm_hook="powersgd")),
    ):
        with pytest.raises(UsageError, match=rf"distributed\.{option}: .* was asked for, but DDP uses"):
            verify_ddp(model, other[0])


def exchange(folder: Path, name: str, **options: Any) -> dict[str, Any]:
    (folder / name).mkdir()
    return work(Layout("ddp", 2), folder / name, "exchange", json.dumps(options))


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    return max(abs(x - y) / abs(x) for x, y in zip(a["losses"], b["losses"], strict=True))


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes(tmp_path: Path) -> None:
    """The same losses whatever the buckets; PowerSGD only near them, with a part of the bytes."""
    plain = exchange(tmp_path, "plain", gradient_as_bucket_view=False)
    assert plain["said"] == "ddp: 2 process(es) on cpu, buckets of 25 MiB, gradients beside them"
    default = exchange(tmp_path, "default")
    assert default["said"] == "ddp: 2 process(es) on cpu, buckets of 25 MiB, gradients as views"
    assert default["losses"] == plain["losses"]
    assert (default["reductions"], default["bytes"]) == (plain["reductions"], plain["bytes"])
    still = exchange(tmp_path, "still", static_graph=True, micro=8)
    assert apart(still, plain) < 1e-5

    factors = exchange(tmp_path, "factors", comm_hook="powersgd", powersgd_rank=2, powersgd_start_step=10)
    assert factors["said"].endswith("gradients as views, powerSGD_hook")
    assert factors["losses"][:10] == default["losses"][:10]
    assert factors["losses"][12:] != default["losses"][12:]
    print(f"powersgd: losses apart by {apart(default, factors):.2f}, bytes {factors['bytes'] / default['bytes']:.2f}")
    assert apart(default, factors) < 0.5
    assert factors["bytes"] < 0.5 * default["bytes"]

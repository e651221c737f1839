"""Advice in circulation, tried on the smallest example. docs/claims.md names each of these tests."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

from benchmarks.sd3 import SD3, Shape
from tests import zygote
from tests.distributed.launching import environment


def test_cpu_of_a_cpu_tensor_is_no_copy() -> None:
    weight = torch.zeros(3)
    snapshot = weight.cpu()
    weight.add_(1)  # the training goes on
    assert torch.equal(snapshot, torch.ones(3))


def test_a_gradient_that_was_set_to_zero_still_moves_the_weights() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
    weight.grad = torch.ones(1)
    optimizer.step()
    before = weight.detach().clone()
    weight.grad = torch.zeros(1)
    optimizer.step()
    assert (before - weight).item() > 0.01  # by the momentum alone


@pytest.mark.parametrize(("dtype", "moved"), [(torch.bfloat16, 0.0), (torch.float32, 0.005)])
def test_a_bf16_weight_does_not_feel_a_small_step(dtype: torch.dtype, moved: float) -> None:
    """A hundred steps of AdamW at a learning rate of 5e-5."""
    weight = nn.Parameter(torch.ones(1, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=5e-5, weight_decay=0.0)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert 1 - weight.item() == pytest.approx(moved, rel=1e-3)


def test_times_a_thousandth_apart_are_one_in_bf16() -> None:
    times = torch.tensor([0.5, 0.501])
    assert times[0] != times[1]
    assert times.bfloat16()[0] == times.bfloat16()[1]


def test_a_constant_scale_of_the_loss_moves_the_clip_alone() -> None:
    def trained(scale: float, max_norm: float) -> torch.Tensor:
        torch.manual_seed(0)
        model, x = nn.Linear(4, 4), torch.randn(8, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-30)
        for _ in range(5):
            optimizer.zero_grad()
            (model(x).square().sum() * scale).backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
        return model.weight.detach()

    assert torch.allclose(trained(1024.0, 1024.0), trained(1.0, 1.0), rtol=1e-5)


def test_a_loss_compared_after_it_was_recorded_is_never_a_spike() -> None:
    history = [1.0, 1.0]
    history.append(100.0)
    assert not history[-1] > history[-1] * 1.5


def test_a_mean_of_means_is_not_the_mean_over_tokens() -> None:
    """Two micro-batches, of one token and of three."""
    micro_batches = [torch.tensor([4.0]), torch.tensor([1.0, 1.0, 1.0])]
    means = torch.stack([losses.mean() for losses in micro_batches])
    assert means.mean() == 2.5
    assert torch.cat(micro_batches).mean() == 1.75


def test_one_batch_used_k_times_gives_the_gradient_of_one_batch() -> None:
    weight, batch = nn.Parameter(torch.ones(3)), torch.arange(3.0)
    (weight * batch).sum().square().backward()
    once, weight.grad = weight.grad, None
    for _ in range(4):
        ((weight * batch).sum().square() / 4).backward()
    assert torch.equal(weight.grad, once)


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """Made by the constructor alone. Its state is of the process, and would reach tests before and after."""
    states = (AcceleratorState, GradientState, PartialState)
    for state in states:
        state._reset_state()
    yield Accelerator(cpu=True, gradient_accumulation_steps=4)
    for state in states:
        state._reset_state()


def test_accelerate_divides_the_last_window_by_the_full_one(accelerator: Accelerator) -> None:
    """Five batches at accumulation 4: the gradient of the fifth, alone in its window, is a quarter of its own."""
    layer = nn.Linear(1, 1, bias=False)
    model, loader = accelerator.prepare(layer, DataLoader([torch.ones(1)] * 5, batch_size=1))
    windows: list[float] = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            if accelerator.sync_gradients:
                assert layer.weight.grad is not None
                windows.append(layer.weight.grad.item())
                layer.weight.grad = None
    assert windows == [1.0, 0.25]


def test_a_prepared_scheduler_advances_once_for_each_process(accelerator: Accelerator) -> None:
    """Accelerate is told that it is one of four processes, which is all that its scheduler asks."""
    PartialState._shared_state["num_processes"] = 4
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    prepared = AcceleratedScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1), [], step_with_optimizer=True)
    optimizer.step()
    prepared.step()
    assert prepared.scheduler.last_epoch == 4


def test_versions_are_no_text() -> None:
    assert not "2.13" >= "2.4"


def test_a_name_with_ln_says_nothing_about_weight_decay() -> None:
    """A matrix of adaptive layer norm has the letters, and a layer norm called norm1 has not."""
    model = nn.ModuleDict({"adaln": nn.Linear(4, 8, bias=False), "norm1": nn.LayerNorm(4, bias=False)})
    exempt = [name for name, _ in model.named_parameters() if "ln" in name]
    assert exempt == ["adaln.weight"]


def test_muon_of_torch_takes_matrices_alone() -> None:
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon([nn.Parameter(torch.ones(2, 2, 3))])


def test_fully_shard_has_no_arguments_of_fsdp1() -> None:
    arguments = inspect.signature(fully_shard).parameters
    assert {"strategy", "sharding_strategy", "cpu_offload"}.isdisjoint(arguments)
    assert {"mesh", "reshard_after_forward", "mp_policy", "offload_policy"} <= set(arguments)


def test_compiling_a_whole_model_renames_its_weights_and_in_place_does_not() -> None:
    model = nn.Linear(2, 2)
    assert all(name.startswith("_orig_mod.") for name in torch.compile(model).state_dict())
    model.compile()
    assert list(model.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_a_row_of_attention_without_keys_is_zero_on_a_cpu(backend: SDPBackend) -> None:
    q, k, v = (torch.randn(2, 1, 4, 8, requires_grad=True) for _ in range(3))
    mask = torch.tensor([True, False]).view(2, 1, 1, 1).expand(2, 1, 4, 4)
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out.sum().backward()
    assert torch.equal(out[1], torch.zeros(1, 4, 8))
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


def test_the_former_sdp_kernel_is_still_there_and_deprecated() -> None:
    with pytest.warns(FutureWarning, match="sdp_kernel"), torch.backends.cuda.sdp_kernel():
        pass


def test_a_static_graph_of_ddp_stops_on_accumulation() -> None:
    """One process is enough: the first forward and backward are without a reduction."""
    script = """
import torch
from torch import distributed, nn
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
with model.no_sync():
    model(torch.ones(1, 2)).sum().backward()
model(torch.ones(1, 2)).sum().backward()
"""
    done = zygote.run([sys.executable, "-c", script], env=environment())
    assert done.returncode != 0
    assert "expect_autograd_hooks_ INTERNAL ASSERT FAILED" in done.stdout + done.stderr


def test_six_n_d_is_no_count_of_an_mmdit() -> None:
    """SD3-medium at 1024 + 154 tokens: 6 operations for each parameter and token, over those that there are."""
    shape = Shape()
    with torch.device("meta"):
        parameters = sum(p.numel() for p in SD3(shape).parameters())
    tokens = shape.image_tokens + shape.text_tokens
    assert 6 * parameters * tokens / shape.train_flops() == pytest.approx(2.65, abs=0.01)


def test_published_figures_add_up_or_do_not() -> None:
    """The factors of a table of speed-ups, and the hours of 100,000 steps at a batch and a rate."""
    assert math.prod((1.36, 1.45, 1.31, 1.07, 1.23, 1.10, 1.18, 1.13)) == pytest.approx(4.99, abs=0.005)
    hours = [100_000 * batch / rate / 3600 for batch, rate in ((4, 10), (8, 18))]
    assert hours == pytest.approx([11.1, 12.3], abs=0.05)

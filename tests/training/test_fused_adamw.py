"""AdamW with less work around torch's kernel: the same bits and state as torch's own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.training.optimizer_classes.fused_adamw import FusedAdamW

SHAPES = ((3, 5), (7,), (), (4, 4), (2, 3, 2), (9,))
SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}


def groups_of(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:4], "weight_decay": 0.1}, {"params": parameters[4:], "weight_decay": 0.0}]


class Pair:
    """The same parameters under both optimizers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.ours = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        self.theirs = copy.deepcopy(self.ours)
        self.fused = FusedAdamW(groups_of(self.ours), **SETTINGS)
        self.torch = torch.optim.AdamW(groups_of(self.theirs), **SETTINGS, fused=True)

    def step(self, number: int, without: tuple[int, ...] = (), **attributes: Tensor) -> None:
        generator = torch.Generator().manual_seed(number)
        for place, (one, other) in enumerate(zip(self.ours, self.theirs, strict=True)):
            gradient = None if place in without else torch.randn(one.shape, generator=generator)
            one.grad = gradient
            other.grad = None if gradient is None else gradient.clone()
        for optimizer in (self.fused, self.torch):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (number + 1)
            for name, value in attributes.items():
                setattr(optimizer, name, value.clone())
            optimizer.step()

    def check(self) -> None:
        assert all(torch.equal(one, other) for one, other in zip(self.ours, self.theirs, strict=True))
        for one, other in zip(self.ours, self.theirs, strict=True):
            found, expected = self.fused.state[one], self.torch.state[other]
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), name
                assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype)


def test_the_bits_are_those_of_torch() -> None:
    pair = Pair()
    for number in range(6):
        pair.step(number)
    pair.check()


def test_parameters_without_a_gradient_keep_their_count() -> None:
    pair = Pair()
    pair.step(0, without=(1, 5))
    pair.step(1)
    pair.step(2, without=(0, 1, 2, 3))
    pair.step(3, without=(2,))
    pair.step(4)
    pair.check()
    assert [int(pair.fused.state[p]["step"]) for p in pair.ours] == [4, 3, 3, 4, 5, 4]


def test_steps_left_out_and_scaled_on_the_device() -> None:
    """As the step guard does, and torch's loss scale."""
    pair = Pair()
    for number, (found_inf, scale) in enumerate([(0.0, 1.0), (1.0, 1.0), (0.0, 4.0), (1.0, 2.0), (0.0, 1.0)]):
        pair.step(number, found_inf=torch.tensor(found_inf), grad_scale=torch.tensor(scale))
    pair.check()
    assert {int(state["step"]) for state in pair.fused.state.values()} == {3}


def test_state_goes_from_one_to_the_other() -> None:
    pair = Pair()
    for number in range(3):
        pair.step(number)
    saved = copy.deepcopy(pair.fused.state_dict()), copy.deepcopy(pair.torch.state_dict())
    pair.step(3)
    pair.fused.load_state_dict(saved[1])
    pair.torch.load_state_dict(saved[0])
    for number in range(3, 6):
        pair.step(number)
    pair.check()


def test_a_restored_value_counts() -> None:
    """A restore writes into the state, or puts other tensors there."""
    pair = Pair()
    pair.step(0)
    for optimizer, parameters in ((pair.fused, pair.ours), (pair.torch, pair.theirs)):
        optimizer.state[parameters[0]]["step"].fill_(10.0)
        optimizer.state[parameters[1]]["step"] = torch.tensor(20.0)
    pair.step(1)
    pair.step(2)
    pair.check()
    assert [int(pair.fused.state[p]["step"]) for p in pair.ours[:3]] == [12, 22, 3]


def test_hooks_run_once_and_a_closure_gives_its_loss() -> None:
    pair = Pair()
    calls: list[str] = []
    pair.fused.register_step_pre_hook(lambda *_: calls.append("before"))
    pair.fused.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        loss = torch.stack([parameter.square().sum() for parameter in pair.ours]).sum()
        loss.backward()
        return loss

    before = pair.ours[0].clone()
    for parameter in pair.ours:
        parameter.grad = None
    assert float(pair.fused.step(closure).detach()) > 0
    assert not torch.equal(before, pair.ours[0])
    assert calls == ["before", "after"]


def test_gradients_are_removed_or_set_to_zero() -> None:
    pair = Pair()
    pair.step(0, without=(1,))
    for optimizer in (pair.fused, pair.torch):
        optimizer.zero_grad(set_to_none=False)
    found = [parameter.grad for parameter in pair.ours]
    assert found[1] is None
    assert all(gradient is None or not gradient.any() for gradient in found)
    pair.fused.zero_grad()
    assert [parameter.grad for parameter in pair.ours] == [None] * len(SHAPES)

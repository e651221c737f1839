"""``--optimizer.name module:Class`` against the class in a plain torch loop; what a trial refuses; state by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from accel_train.config import UsageError
from accel_train.training.ema import EmaConfig, build_ema
from accel_train.training.optimizer_choice import averages_weights, keyword_arguments
from accel_train.training.optimizers import OptimizerConfig, build_optimizer, set_frozen, set_learning_rate
from accel_train.training.shards import OWN_KEY, Shards, decode_number, encode_number
from accel_train.training.step_guard import StepGuard

CPU = torch.device("cpu")
HERE = __name__


class Net(nn.Module):
    """With a layer that begins at zero, as heads do."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        for parameter in (self.first.weight, self.first.bias):
            parameter.data = torch.randn(parameter.shape, generator=generator) / 3
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.first(x))))


class Counting(torch.optim.SGD):
    """Steps in proportion to a number that it keeps in its groups, as Prodigy does with its estimate."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                parameter.grad.mul_(1 + 1 / group["count"])
        return super().step(closure)


def factor(step: int) -> float:
    """A warm-up from 0 and a decay."""
    return min(step / 3, 1.0) * (1 - step / 40)


def losses_of(model: nn.Module, optimizer: Any, steps: range, set_rate: Callable[[int], None]) -> list[str]:
    losses: list[str] = []
    for step in steps:
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - torch.stack((x[:, 0] * x[:, 1], x[:, 2]), 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        set_rate(step)
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


def ours(config: OptimizerConfig) -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    return model, build_optimizer(model, config, CPU)[0]


def train(model: Net, optimizer: torch.optim.Optimizer, steps: range) -> list[str]:
    return losses_of(model, optimizer, steps, lambda step: set_learning_rate(optimizer, factor(step)))


CLASSES: list[tuple[str, float, tuple[str, ...], dict[str, Any]]] = [
    ("torch.optim:SGD", 0.1, ("momentum=0.9", "nesterov=true"), {"momentum": 0.9, "nesterov": True}),
    ("torch.optim:NAdam", 0.01, ("betas=[0.8, 0.99]",), {"betas": (0.8, 0.99)}),
    ("torch.optim:RMSprop", 0.01, ("centered=true",), {"centered": True}),
    ("torch.optim:ASGD", 0.1, (), {}),
    ("prodigyopt:Prodigy", 1.0, ("d_coef=2",), {"betas": (0.9, 0.95), "d_coef": 2}),
    ("schedulefree:AdamWScheduleFree", 0.03, ("r=1",), {"betas": (0.9, 0.95), "r": 1}),
    ("schedulefree:SGDScheduleFree", 0.3, (), {}),
    (f"{HERE}:Counting", 0.1, (), {}),
]


def of_class(test: Any) -> Any:
    return pytest.mark.parametrize(("name", "lr", "given", "keywords"), CLASSES, ids=[name for name, *_ in CLASSES])(
        test
    )


def class_of(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed: pip install -e '.[test-all]'")
    return getattr(__import__(module, fromlist=[attribute]), attribute)


@of_class
def test_equals_a_plain_loop(name: str, lr: float, given: tuple[str, ...], keywords: dict[str, Any]) -> None:
    reference = Net()
    decayed = [reference.first.weight, reference.head.weight]
    rest = [p for p in reference.parameters() if all(p is not other for other in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    by_hand = class_of(name)(groups, lr=lr, **keywords)
    if averages_weights(by_hand):
        by_hand.train()

    def set_rate(step: int) -> None:
        for group in by_hand.param_groups:
            group["lr"] = lr * factor(step)

    expected = losses_of(reference, by_hand, range(20), set_rate)
    model, optimizer = ours(OptimizerConfig(name=name, lr=lr, weight_decay=0.1, arguments=given))
    assert isinstance(optimizer, class_of(name))
    assert train(model, optimizer, range(20)) == expected
    assert not torch.equal(model.first.weight, Net().first.weight)


@of_class
def test_state_comes_back_to_the_same_bits(
    name: str, lr: float, given: tuple[str, ...], keywords: dict[str, Any]
) -> None:
    """What a checkpoint holds, by name and as JSON, and nothing else; test_optimizers.py of real processes saves it."""
    class_of(name)
    config = OptimizerConfig(name=name, lr=lr, weight_decay=0.1, arguments=given)
    model, optimizer = ours(config)
    train(model, optimizer, range(8))
    shards = Shards(model, optimizer)
    tensors = {(n, key): shards.state(n, key).clone() for key, names in shards.state_names().items() for n in names}
    numbers = json.loads(json.dumps(shards.numbers()))
    other, again = ours(config)
    other.load_state_dict(model.state_dict())
    restored = Shards(other, again)
    restored.create_state()
    for (parameter, key), value in tensors.items():
        restored.set_state(parameter, key, value.view(restored.shape(parameter)))
    restored.set_step(8)
    restored.set_numbers(numbers)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert train(other, again, range(8, 16)) == train(model, optimizer, range(8, 16))


def test_prodigy_state_holds_its_estimate() -> None:
    class_of("prodigyopt:Prodigy")
    model, optimizer = ours(OptimizerConfig(name="prodigyopt:Prodigy", lr=1.0, weight_decay=0))
    train(model, optimizer, range(8))
    shards = Shards(model, optimizer)
    assert decode_number(shards.numbers()["groups"]["decay"]["d"], CPU) == optimizer.param_groups[0]["d"] > 1e-6
    assert "d_coef" not in shards.numbers()["groups"]["decay"]  # an argument of the run, not of the checkpoint
    assert "p0" not in shards.numbers()["parameters"]["first.weight"]
    assert shards.numbers()["parameters"]["head.weight"]["p0"] == ["torch.float32", "0.0"]  # that layer began at zero


def test_shared_options_reach_the_class_and_its_arguments_win() -> None:
    _, optimizer = ours(OptimizerConfig(name="torch.optim:Adam", betas=(0.8, 0.9), eps=1e-6, fused=True))
    given = optimizer.defaults
    assert (given["betas"], given["eps"], given["fused"], given["lr"]) == ((0.8, 0.9), 1e-6, True, 1e-4)
    config = OptimizerConfig(name="torch.optim:Adam", betas=(0.8, 0.9), arguments=("betas=[0.7,0.6]",))
    _, line = build_optimizer(Net(), config, CPU)
    assert "torch.optim:Adam(lr=0.0001, betas=(0.7, 0.6), eps=1e-08)" in line


def test_built_in_optimizers_have_no_numbers() -> None:
    model, optimizer = ours(OptimizerConfig())
    train(model, optimizer, range(2))
    assert Shards(model, optimizer).numbers() == {}


@pytest.mark.parametrize(
    "value",
    [3, -1.1e-300, math.inf, True, False, torch.tensor(0.1), torch.tensor(7), torch.tensor(0.3, dtype=torch.bfloat16)],
)
def test_a_number_survives_json(value: object) -> None:
    found = decode_number(json.loads(json.dumps(encode_number(value))), CPU)
    assert type(found) is type(value)
    assert found == value
    if isinstance(value, torch.Tensor):
        assert found.dtype == value.dtype


def test_what_is_no_number() -> None:
    assert [encode_number(value) for value in (None, "1", (1, 2), torch.zeros(1))] == [None] * 4


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (
            ["d_coef=0.5", "k=3", "decouple=false", "beta3=none"],
            {"d_coef": 0.5, "k": 3, "decouple": False, "beta3": None},
        ),
        (["betas=[0.9, 0.99]"], {"betas": (0.9, 0.99)}),
        (["betas=(0.9,0.99)", "kind=rms=1"], {"betas": (0.9, 0.99), "kind": "rms=1"}),
        (["eps=1e-30"], {"eps": 1e-30}),
    ],
)
def test_arguments(texts: list[str], expected: dict[str, Any]) -> None:
    assert keyword_arguments(texts) == expected


# ------------------------------------------------------------------------------------------------------- refusals
class Hidden(torch.optim.SGD):
    """Keeps a count where no checkpoint finds it."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] /= self.calls
        return super().step(closure)


class Sampling(torch.optim.SGD):
    """Draws from the generator of the process."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += torch.randn_like(parameter)
        return super().step(closure)


class Decaying(torch.optim.SGD):
    """Changes an argument of its own."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["momentum"] = 0.5 + group["momentum"] / 2
        return super().step(closure)


class Copying(torch.optim.SGD):
    """Keeps a tensor under the name of the exact weights in a checkpoint."""

    key = "master"

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault(self.key, torch.zeros_like(parameter))
        return super().step(closure)


class Dashed(Copying):
    """Under a name that reads as that of a file in parts."""

    key = "exp-avg"


class Lookahead(torch.optim.SGD):
    """Keeps a list of tensors in its state."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["before"] = [parameter.detach().clone()]
        return super().step(closure)


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"name": "adamv"}, ["optimizer.name: 'adamv' is not known (did you mean 'adamw'?)", "torch.optim:NAdam"]),
    ({"name": "torch.optim:"}, ["optimizer.name: 'torch.optim:' is not known"]),
    ({"name": ".optim:Nope"}, ["optimizer.name: .optim:Nope", "cannot be imported"]),
    ({"name": "torch.optim:Nope"}, ["optimizer.name: torch.optim:Nope", "cannot be imported", "PYTHONPATH"]),
    ({"name": "no_such_package:Nope"}, ["optimizer.name: no_such_package:Nope", "No module named"]),
    ({"name": "torch.nn:Linear"}, ["is not a torch.optim.Optimizer"]),
    (
        {"arguments": ("momentum=0.9",)},
        ["optimizer.arguments: momentum=0.9: has no effect with optimizer.name: adamw"],
    ),
    ({"name": "torch.optim:SGD", "arguments": ("momentum",)}, ["'momentum' must be KEY=VALUE"]),
    ({"name": "torch.optim:SGD", "arguments": ("lr=1",)}, ["'lr=1' is an option of its own", "--optimizer.lr"]),
    ({"name": "torch.optim:SGD", "arguments": ("weight_decay=1",)}, ["--optimizer.weight_decay"]),
    ({"name": "torch.optim:SGD", "arguments": ("momentum=1", "momentum=2")}, ["is given twice"]),
    (
        {"name": "torch.optim:SGD", "arguments": ("bogus=1",)},
        ["optimizer.arguments: torch.optim:SGD(lr=0.0001, bogus=1)", "TypeError"],
    ),
    ({"name": "torch.optim:SGD", "arguments": ("momentum=-1",)}, ["momentum=-1", "Invalid momentum value"]),
    ({"name": "torch.optim:SGD", "betas": (0.8, 0.9)}, ["optimizer.betas: (0.8, 0.9)", "--optimizer.betas 0.9 0.95"]),
    ({"name": "torch.optim:SGD", "eps": 1e-6}, ["optimizer.eps: 1e-06", "--optimizer.eps 1e-08"]),
    ({"name": "torch.optim:NAdam", "fused": True}, ["optimizer.fused: True", "--optimizer.fused auto"]),
    ({"name": "torch.optim:NAdam", "muon_lr": 0.1}, ["optimizer.muon_lr: 0.1"]),
    ({"name": "torch.optim:Rprop"}, ["optimizer.weight_decay: 0.01", "--optimizer.weight_decay 0"]),
    ({"name": "torch.optim:Rprop", "weight_decay": 0}, ["moves parameters while the learning rate is 0"]),
    ({"name": "torch.optim:LBFGS", "weight_decay": 0}, ["doesn't support per-parameter options"]),
    ({"name": "torch.optim:SparseAdam", "weight_decay": 0}, ["a trial of 12 steps failed", "dense gradients"]),
    (
        {"name": "torch.optim:Adafactor"},  # whose eps is a pair
        ["Adafactor keeps row_var of matrix as a tensor (4, 1) of float32"],
    ),
    ({"name": f"{HERE}:Hidden"}, ["did not continue bit for bit", "no checkpoint can find it"]),
    ({"name": f"{HERE}:Sampling"}, ["draws random numbers"]),
    ({"name": f"{HERE}:Decaying"}, ["did not continue bit for bit"]),
    ({"name": f"{HERE}:Lookahead"}, ["Lookahead keeps before of matrix as a list"]),
    ({"name": f"{HERE}:Copying"}, ["Copying keeps state of matrix under the key 'master'", "Choose another class"]),
    ({"name": f"{HERE}:Dashed"}, ["Dashed keeps state of matrix under the key 'exp-avg'"]),
]


@pytest.mark.parametrize(("values", "said"), REFUSED, ids=[f"{v.get('name')} {' '.join(s)[:30]}" for v, s in REFUSED])
def test_refused_with_the_reason(values: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        build_optimizer(Net(), OptimizerConfig(**values), CPU)
    for words in said:
        assert words in str(raised.value)


SCHEDULE_FREE = OptimizerConfig(name="schedulefree:AdamWScheduleFree", lr=0.03, weight_decay=0.1)


def test_the_average_of_a_schedule_free_optimizer_is_its_own() -> None:
    """Against the class as its page uses it, with `train()` and `eval()` around an evaluation."""
    class_of(SCHEDULE_FREE.name)
    model, optimizer = ours(SCHEDULE_FREE)
    by_hand_model, by_hand = ours(SCHEDULE_FREE)
    average = build_ema(EmaConfig(0.0), Shards(model, optimizer), StepGuard(), optimizer)
    assert all(torch.equal(average.averages[name], p) for name, p in model.named_parameters())  # before the first step
    train(model, optimizer, range(9))
    train(by_hand_model, by_hand, range(9))
    average.update(8)
    trained = [p.detach().clone() for p in model.parameters()]
    by_hand.eval()
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    with average.applied():
        assert torch.equal(model(x), by_hand_model(x))
        assert not torch.equal(model.first.weight, trained[0])
    # Asking changes no bit of what is trained; the class itself, asked and set back, comes back rounded.
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained, strict=True))
    undisturbed, same = ours(SCHEDULE_FREE)
    train(undisturbed, same, range(9))
    assert train(model, optimizer, range(9, 12)) == train(undisturbed, same, range(9, 12))


def test_a_restored_average_stays_until_the_next_step() -> None:
    """A checkpoint without optimizer state has no z to compute it from."""
    class_of(SCHEDULE_FREE.name)
    model, optimizer = ours(SCHEDULE_FREE)
    average = build_ema(EmaConfig(0.0), Shards(model, optimizer), StepGuard(), optimizer)
    average.averages["head.bias"].copy_(torch.tensor([3.0, 4.0]))
    with average.applied():
        assert model.head.bias.tolist() == [3.0, 4.0]
    assert model.head.bias.tolist() == [0.0, 0.0]
    train(model, optimizer, range(2))
    average.update(1)
    assert average.averages["head.bias"].tolist() != [3.0, 4.0]  # computed from here on
    average.averages["head.bias"].copy_(torch.tensor([5.0, 6.0]))  # a rollback restores it again
    assert average.averages["head.bias"].tolist() == [5.0, 6.0]


def test_an_ema_beside_the_average_of_the_optimizer_is_refused() -> None:
    class_of(SCHEDULE_FREE.name)
    model, optimizer = ours(SCHEDULE_FREE)
    with pytest.raises(UsageError, match=r"ema\.decay: 0\.9: AdamWScheduleFree averages .* Give --ema\.decay 0"):
        build_ema(EmaConfig(0.9), Shards(model, optimizer), StepGuard(), optimizer)


def test_state_that_appears_later_is_refused_at_the_save() -> None:
    model, optimizer = ours(OptimizerConfig(name="torch.optim:SGD", arguments=("momentum=0.9",)))
    train(model, optimizer, range(2))
    optimizer.state[model.head.bias]["history"] = torch.zeros(7)
    with pytest.raises(UsageError, match=r"SGD keeps history of head\.bias as a tensor \(7,\) of float32"):
        Shards(model, optimizer).numbers()


def test_state_that_fp32_does_not_hold_is_refused_at_the_save() -> None:
    model, optimizer = ours(OptimizerConfig(name="torch.optim:SGD", arguments=("momentum=0.9",)))
    train(model, optimizer, range(2))
    optimizer.state[model.head.bias]["history"] = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(UsageError, match=r"SGD keeps history of head\.bias as a tensor \(2,\) of float64"):
        Shards(model, optimizer).numbers()


class Drifting(torch.optim.SGD):
    """Moves parameters at a learning rate of 0."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data += 1
        return super().step(closure)


def test_the_step_that_makes_the_state_moves_nothing_whatever_the_class_does() -> None:
    model = Net()
    groups = [{"params": list(model.parameters()), "name": "decay", OWN_KEY: False}]
    optimizer = Drifting(groups, lr=0.1, momentum=0.9)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Shards(model, optimizer).create_state()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_numbers_of_another_class_are_refused() -> None:
    model, optimizer = ours(OptimizerConfig(name="torch.optim:NAdam"))
    train(model, optimizer, range(2))
    numbers = Shards(model, optimizer).numbers()
    for name in ("torch.optim:RAdam", "adamw"):
        other = Shards(*ours(OptimizerConfig(name=name)))
        other.create_state()
        with pytest.raises(UsageError, match=r"another class wrote it\. Go back to that class"):
            other.set_numbers(numbers)


def test_the_trial_leaves_the_generator_as_it_was() -> None:
    model = Net()
    before = torch.get_rng_state()
    build_optimizer(model, OptimizerConfig(name="torch.optim:NAdam"), CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_frozen_part_stays_or_is_refused() -> None:
    model = Net()
    optimizer, _ = build_optimizer(model, OptimizerConfig(name="torch.optim:NAdam"), CPU, {"head": ["head"]})
    set_frozen(optimizer, ["head"])
    before = model.head.weight.detach().clone()
    train(model, optimizer, range(1, 4))
    assert torch.equal(model.head.weight, before)
    optimizer, _ = build_optimizer(Net(), OptimizerConfig(name="torch.optim:ASGD"), CPU, {"head": ["head"]})
    set_frozen(optimizer, ())
    with pytest.raises(UsageError, match=r"frozen=\['head'\]: the optimizer moves parameters whose learning rate"):
        set_frozen(optimizer, ["head"])

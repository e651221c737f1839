"""Groups, learning rate, freezing and every AdamW against torch.optim.AdamW used by hand; the table of combinations."""

import math
import tomllib
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from accel_train.config import UsageError
from accel_train.training import optimizer_choice, optimizers
from accel_train.training.optimizer_choice import PRECISIONS, STRATEGIES, TABLE, refuse_combination
from accel_train.training.optimizer_classes import eight_bit, offload
from accel_train.training.optimizer_classes.offload import HostAdamW
from accel_train.training.optimizers import (
    OptimizerConfig,
    build_optimizer,
    set_frozen,
    set_learning_rate,
)
from accel_train.training.parameters import without_gradients
from accel_train.training.shards import Shards
from tests import compiling, optimizer_table

CPU = torch.device("cpu")


class CustomRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 8))


class GPT2Conv1D(nn.Module):
    """A matrix held by a leaf module of a type that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.zeros(8))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.custom_norm = CustomRMSNorm()
        self.attention = nn.MultiheadAttention(8, 2)
        self.up = nn.Linear(8, 8)
        self.projection = GPT2Conv1D()
        self.modulation = nn.Parameter(torch.zeros(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x), x, x)[0]
        x = self.up(x * self.custom_norm.scale) @ self.projection.weight + self.projection.bias
        return x * (1 + self.modulation[0])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 4, 8))
        self.embed = nn.Embedding(16, 8)
        self.patch = nn.Conv1d(8, 8, 1)
        self.text = Block()
        self.text_head = nn.Linear(8, 16)
        self.latent = Block()
        self.untrained = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.patch((self.embed(tokens) + self.positions).transpose(1, 2)).transpose(1, 2)
        return self.text_head(self.latent(self.text(x)))


def block_names(prefix: str) -> tuple[set[str], set[str]]:
    decay = {"attention.in_proj_weight", "attention.out_proj.weight", "up.weight", "projection.weight"}
    every = {name for name, _ in Block().named_parameters()}
    return {f"{prefix}.{n}" for n in decay}, {f"{prefix}.{n}" for n in every - decay}


def group_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[str]]:
    names = {id(p): n for n, p in model.named_parameters()}
    return {g["name"]: [names[id(p)] for p in g["params"]] for g in optimizer.param_groups}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, factor: float | None = None) -> None:
    tokens = torch.arange(8).reshape(2, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        if factor is not None:
            set_learning_rate(optimizer, factor)
        optimizer.step()


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def test_groups_by_module_type(model):
    optimizer, reason = build_optimizer(model, OptimizerConfig(weight_decay=0.3), CPU)
    groups = group_names(model, optimizer)
    text, latent = block_names("text"), block_names("latent")
    assert list(groups) == ["decay", "no_decay"]
    assert set(groups["decay"]) == {"patch.weight", "text_head.weight"} | text[0] | latent[0]
    bare = {"positions", "embed.weight", "patch.bias", "text_head.bias"}
    assert set(groups["no_decay"]) == bare | text[1] | latent[1]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.0]
    assert all(g["base_lr"] == 1e-4 for g in optimizer.param_groups)
    assert "no_decay 20 tensors (424 values)" in reason


def test_order_is_that_of_the_model(model):
    optimizer, _ = build_optimizer(model, OptimizerConfig(), CPU, {"text": ["text_head", "text"]})
    order = [name for name, _ in model.named_parameters()]
    for members in group_names(model, optimizer).values():
        assert members == sorted(members, key=order.index)


def test_a_matrix_shared_with_an_embedding_does_not_decay(model):
    model.text_head.weight = model.embed.weight
    optimizer, _ = build_optimizer(model, OptimizerConfig(), CPU)
    groups = group_names(model, optimizer)
    assert "embed.weight" in groups["no_decay"]
    assert sum("embed.weight" in members or "text_head.weight" in members for members in groups.values()) == 1


@pytest.mark.parametrize("fused", [True, False])
def test_equals_torch_adamw(model, fused):
    torch.manual_seed(0)
    reference = Model()
    config = OptimizerConfig(lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5, fused=fused)
    optimizer, _ = build_optimizer(model, config, CPU)
    decayed = set(group_names(model, optimizer)["decay"])
    trainable = {n: p for n, p in reference.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for n, p in trainable.items() if n in decayed], "weight_decay": 0.5},
        {"params": [p for n, p in trainable.items() if n not in decayed], "weight_decay": 0.0},
    ]
    by_hand = torch.optim.AdamW(groups, lr=0.25e-2, betas=(0.8, 0.9), eps=1e-6, fused=fused)
    train(model, optimizer, 10, factor=0.25)
    train(reference, by_hand, 10)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(model.text_head.weight, Model().text_head.weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["adamw", "muon", "adamw_offload", "adamw8bit"])
def test_betas_and_eps_reach_every_optimizer(name, monkeypatch):
    if name == "adamw8bit":
        compiling.skip_without("bitsandbytes")
    monkeypatch.setattr(optimizers, "refuse_combination", lambda *given: None)  # one of them needs a GPU
    model = nn.Sequential(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), nn.Linear(8, 8))
    optimizer, _ = build_optimizer(model, OptimizerConfig(name=name, betas=(0.8, 0.9), eps=1e-6), CPU)
    of_adamw = [group for group in optimizer.param_groups if not group["muon"]]
    assert {(group["betas"], group["eps"]) for group in of_adamw} == {((0.8, 0.9), 1e-6)}


def test_weights_of_two_dtypes_are_left_to_torch(model):
    """Its own class sorts them by dtype; ours takes one dtype in a group."""
    model.text_head.double()
    optimizer, _ = build_optimizer(model, OptimizerConfig(fused=True), CPU)
    assert type(optimizer) is torch.optim.AdamW


def test_factors_of_the_learning_rate_equal_groups_by_hand(model):
    torch.manual_seed(0)
    reference = Model()
    factors = ("text=0.5", "text_head=10", "*norm*=0", "latent.norm=3")
    optimizer, line = build_optimizer(model, OptimizerConfig(lr=1e-2, weight_decay=0.5, lr_factors=factors), CPU)
    decayed = {
        name for group, names in group_names(model, optimizer).items() if "no_decay" not in group for name in names
    }

    def factor(name: str) -> float:
        if "norm" in name:
            return 3.0 if name.startswith("latent.norm.") else 0.0
        return {"text": 0.5, "text_head": 10.0}.get(name.split(".")[0], 1.0)

    groups = [
        {"params": [p], "lr": 0.25e-2 * factor(name), "weight_decay": 0.5 * (name in decayed)}
        for name, p in reference.named_parameters()
        if p.requires_grad
    ]
    by_hand = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    train(model, optimizer, 10, factor=0.25)
    train(reference, by_hand, 10)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    # The first group is the one whose learning rate is recorded.
    assert list(group_names(model, optimizer))[:2] == ["decay", "no_decay"]
    assert "text_head" not in line
    assert "decay x10 1 tensors" in line


def test_a_factor_multiplies_the_learning_rate_of_muon_and_goes_with_frozen_parts(model):
    config = OptimizerConfig(name="muon", lr=1e-3, muon_lr=2e-2, lr_factors=("text=0.5",))
    model._no_split_modules = ["Block"]
    optimizer, _ = build_optimizer(model, config, CPU, {"text": ["text"]})
    rates = {group["name"]: group["base_lr"] for group in optimizer.param_groups}
    assert rates["text/muon x0.5"] == 1e-2
    assert rates["text/no_decay x0.5"] == 5e-4
    set_frozen(optimizer, {"text"})
    set_learning_rate(optimizer, 1.0)
    assert all((group["lr"] == 0) == (group["part"] == "text") for group in optimizer.param_groups)


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (("text",), "'text' must be MODULE=FACTOR"),
        (("=2",), "'=2' must be MODULE=FACTOR"),
        (("text=-1",), "a finite factor of at least 0"),
        (("text=nan",), "a finite factor of at least 0"),
        (("text=1", "text=2"), "'text=2' is given twice"),
        (("tex=2",), "tex=2 changes no trainable parameter: .* Trainable parameters: positions, embed.weight"),
        (("untrained=2",), "untrained=2 changes no trainable parameter"),
        (("text.up=2", "text=3"), "text.up=2 changes no trainable parameter: .* a later entry takes all of them"),
    ],
)
def test_factors_that_cannot_be_obeyed(model, factors, message):
    with pytest.raises(UsageError, match=message):
        build_optimizer(model, OptimizerConfig(lr_factors=factors), CPU)


def test_named_modules_lose_their_weight_decay_and_nothing_else(model):
    torch.manual_seed(0)
    reference = Model()
    config = OptimizerConfig(lr=1e-2, weight_decay=0.5, no_decay=("text_head", "*.up.weight"), lr_factors=("text=0.5",))
    optimizer, _ = build_optimizer(model, config, CPU)
    usual, _ = build_optimizer(reference, replace(config, no_decay=()), CPU)
    decayed = {
        name for group, names in group_names(reference, usual).items() if "no_decay" not in group for name in names
    }
    spared = {name for name in decayed if name == "text_head.weight" or name.endswith(".up.weight")}
    assert len(spared) > 2
    groups = [
        {
            "params": [p],
            "lr": 1e-2 * (0.5 if name.startswith("text.") else 1.0),
            "weight_decay": 0.5 * (name in decayed - spared),
        }
        for name, p in reference.named_parameters()
        if p.requires_grad
    ]
    by_hand = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    train(model, optimizer, 10)
    train(reference, by_hand, 10)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_muon_updates_a_matrix_without_decay_too(model):
    model._no_split_modules = ["Block"]
    config = OptimizerConfig(name="muon", muon_weight_decay=0.5, weight_decay=0.0, no_decay=("text",))
    optimizer, _ = build_optimizer(model, config, CPU)
    decay = {group["name"]: (group["muon"], group["weight_decay"]) for group in optimizer.param_groups}
    assert decay["muon"] == (True, 0.5)
    assert decay["muon no_decay"] == (True, 0.0)
    names = group_names(model, optimizer)
    assert {name.partition(".")[0] for name in names["muon no_decay"]} == {"text"}
    assert "text" not in {name.partition(".")[0] for name in names["muon"]}


@pytest.mark.parametrize(
    ("module", "decay", "message"),
    [
        ("text.norm", 0.1, "text.norm removes weight decay from no parameter: .* Parameters with decay: .*text"),
        ("tex", 0.1, "tex removes weight decay from no parameter"),
        ("text", 0.0, ".* Parameters with decay: nothing"),
    ],
)
def test_a_module_without_decay_to_lose_is_refused(model, module, decay, message):
    with pytest.raises(UsageError, match=f"optimizer.no_decay: {message}"):
        build_optimizer(model, OptimizerConfig(weight_decay=decay, no_decay=(module,)), CPU)


@pytest.mark.parametrize(("fused", "reason"), [("auto", "auto: cpu has it"), (True, "asked for")])
def test_fused_on_cpu(model, fused, reason):
    optimizer, line = build_optimizer(model, OptimizerConfig(fused=fused), CPU)
    assert optimizer.defaults["fused"] is True
    assert reason in line


def test_fused_where_there_is_none(model):
    meta = torch.device("meta")
    optimizer, line = build_optimizer(model, OptimizerConfig(), meta)
    assert not optimizer.defaults["fused"]
    assert "no fused AdamW on meta" in line
    with pytest.raises(UsageError, match=r"optimizer\.fused=True: .* on meta.*cuda.*Set it to auto or False"):
        build_optimizer(model, OptimizerConfig(fused=True), meta)
    model.spectral = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    optimizer, line = build_optimizer(model, OptimizerConfig(), CPU)
    assert not optimizer.defaults["fused"]
    assert "complex64" in line
    with pytest.raises(UsageError, match="complex64"):
        build_optimizer(model, OptimizerConfig(fused=True), CPU)


def test_frozen_part_stays_and_the_rest_trains(model):
    config = OptimizerConfig(lr=1e-2, weight_decay=0.5)
    optimizer, _ = build_optimizer(model, config, CPU, {"text": ["text", "text_head"], "latent": ["latent"]})
    text, latent = block_names("text"), block_names("latent")
    groups = group_names(model, optimizer)
    assert set(groups["text/decay"]) == text[0] | {"text_head.weight"}
    assert set(groups["latent/no_decay"]) == latent[1]
    set_frozen(optimizer, ["text"])
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, optimizer, 3, factor=1.0)
    unchanged = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
    frozen = text[0] | text[1] | {"text_head.weight", "text_head.bias"}
    assert unchanged == frozen | {"untrained.weight", "untrained.bias"}
    assert all(p.requires_grad for n, p in model.named_parameters() if n in frozen)
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}
    assert optimizer.state[model.text.up.weight]["exp_avg"].abs().sum() > 0


def test_release_restores_decay_and_rate(model):
    optimizer, _ = build_optimizer(model, OptimizerConfig(lr=1e-2, weight_decay=0.5), CPU, {"text": ["text"]})
    fresh = [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    set_frozen(optimizer, {"text"})
    set_learning_rate(optimizer, 0.5)
    rates = {g["name"]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups}
    assert rates["text/decay"] == rates["text/no_decay"] == (0.0, 0.0)
    assert rates["decay"] == (0.005, 0.5)
    set_frozen(optimizer, ())
    set_learning_rate(optimizer, 1.0)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == fresh


def test_a_frozen_part_gets_zeros_within_the_backward_where_the_engine_clips_there(model):
    """As ZeRO's does, which has its own tensors in the groups."""
    optimizer, _ = build_optimizer(model, OptimizerConfig(), CPU, {"text": ["text"], "latent": ["latent"]})
    set_frozen(optimizer, ["text"])
    for group in optimizer.param_groups:
        group["params"] = [torch.zeros(3)]
    with without_gradients(model, [optimizer]):
        model(torch.arange(8).reshape(2, 4)).square().mean().backward()
    moving = {name.partition(".")[0] for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert moving == {"positions", "embed", "patch", "text_head", "latent"}
    model(torch.arange(8).reshape(2, 4)).square().mean().backward()
    assert model.text.up.weight.grad.any()


def test_unknown_and_overlapping_parts(model):
    optimizer, _ = build_optimizer(model, OptimizerConfig(), CPU, {"text": ["text"]})
    with pytest.raises(UsageError, match=r"\['image'\] is not a freezable part.*\['text'\]"):
        set_frozen(optimizer, ["image"])
    with pytest.raises(ValueError, match="no trainable parameter is under 'tex'"):
        build_optimizer(model, OptimizerConfig(), CPU, {"text": ["tex"]})
    with pytest.raises(ValueError, match=r"'text.up.weight' is in both 'a' and 'b'"):
        build_optimizer(model, OptimizerConfig(), CPU, {"a": ["text.up"], "b": ["text.up.weight"]})


def test_nothing_to_train(model):
    with pytest.raises(UsageError, match="no trainable parameter"):
        build_optimizer(model.requires_grad_(False), OptimizerConfig(), CPU)


@pytest.mark.parametrize(
    "values",
    [
        *({"lr": value} for value in (0.0, -1.0, math.nan, math.inf)),
        *({"betas": value} for value in ((0.9, 1.0), (-0.1, 0.9), (0.9,), (math.nan, 0.9))),
        {"eps": 0.0},
        {"weight_decay": -0.1},
        {"weight_decay": math.inf},
        {"max_grad_norm": -1.0},
        {"max_grad_norm": math.nan},
        {"fused": "yes please"},
    ],
)
def test_values_that_config_refuses(values):
    with pytest.raises(ValidationError):
        TypeAdapter(OptimizerConfig).validate_python(values)
    assert TypeAdapter(OptimizerConfig).validate_python({"lr": 1e-3, "betas": [0.9, 0.99]}).lr == 1e-3


def test_offloaded_adamw_is_torch_adamw_to_the_bit(model, monkeypatch):
    """On CPU tensors: the arithmetic, buckets, groups and state; the copies themselves need a GPU."""
    monkeypatch.setattr(offload, "BUCKET_BYTES", 600)
    torch.manual_seed(0)
    reference = Model()
    config = OptimizerConfig(lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5, fused=True)
    by_hand, _ = build_optimizer(reference, config, CPU, {"text": ["text"]})
    groups = [{k: v for k, v in g.items() if k != "params"} for g in by_hand.param_groups]
    names = group_names(reference, by_hand)
    ours = dict(model.named_parameters())
    optimizer = HostAdamW(
        [{**g, "params": [ours[n] for n in names[g["name"]]]} for g in groups], betas=(0.8, 0.9), eps=1e-6
    )
    assert len(list(optimizer._buckets())) == 0
    for factor, frozen in ((1.0, ()), (0.5, ("text",)), (0.25, ())):
        for one, its in ((model, optimizer), (reference, by_hand)):
            set_frozen(its, frozen)
            train(one, its, 2, factor)
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    sizes = [[p.nbytes for group in bucket for p in group["params"]] for bucket in optimizer._buckets()]
    assert len(sizes) > 3
    assert all(sum(bucket[:-1]) < 600 <= sum(bucket) for bucket in sizes[:-1])
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q), name
        if p.requires_grad:
            assert optimizer.state[p].keys() == by_hand.state[q].keys()
            assert all(torch.equal(optimizer.state[p][k], by_hand.state[q][k]) for k in by_hand.state[q])


def test_offloaded_adamw_takes_weights_that_others_have_written(model):
    optimizer = HostAdamW([{"params": [model.text_head.weight], "lr": 0.1}], betas=(0.9, 0.95), eps=1e-8)
    model.text_head.weight.grad = torch.zeros(16, 8)
    optimizer.step()
    model.text_head.weight.data.fill_(3.0)  # restoring, or the average during an evaluation
    optimizer.step()
    assert torch.equal(model.text_head.weight, torch.full((16, 8), 3.0 * (1 - 0.1 * 0.01)))


def test_the_step_that_makes_the_state_leaves_gradients_and_rates_alone(model):
    optimizer, _ = build_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.5), CPU)
    gradient = model.text_head.weight.grad = torch.ones(16, 8)
    before = model.text_head.weight.detach().clone()
    Shards(model, optimizer).create_state()
    assert model.text_head.weight.grad is gradient  # ZeRO with offload reduces into it
    assert gradient.eq(1).all()
    assert model.patch.weight.grad is None
    assert torch.equal(model.text_head.weight, before)
    assert not optimizer.state[model.text_head.weight]["exp_avg"].any()
    assert {g["lr"] for g in optimizer.param_groups} == {0.1}


def test_every_combination_is_in_the_table():
    assert {name: tuple(rows) for name, rows in TABLE.items()} == dict.fromkeys(TABLE, STRATEGIES)
    listed = list(optimizer_table.rows())
    assert len(listed) == len(TABLE) * len(STRATEGIES) * len(PRECISIONS)
    assert {remark for *_, precision, allowed, remark in listed if allowed and precision == "fp16"} == {"not run"}


def test_the_table_of_the_page_is_the_one_that_runs_are_checked_against():
    text = optimizer_table.PAGE.read_text()
    assert text == optimizer_table.page(text), "run: python -m tests.optimizer_table"


def test_the_extra_for_all_tests_brings_what_the_table_says_was_run():
    extras = tomllib.loads((optimizer_table.PAGE.parents[1] / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    assert set(extras["bitsandbytes"]) <= set(extras["test-all"])


@pytest.mark.parametrize(("name", "strategy", "precision", "allowed", "remark"), list(optimizer_table.rows()))
def test_each_row(name, strategy, precision, allowed, remark, monkeypatch):
    """Refused rows say why and name another way; allowed ones pass, on a machine that has what they need."""
    monkeypatch.setattr(optimizer_choice, "version", lambda _: "0.50.2")
    device = torch.device("cuda")
    if allowed:
        refuse_combination(name, strategy, precision, device)
        return
    with pytest.raises(UsageError, match=rf"^optimizer\.name: {name} does not run under {strategy} in") as raised:
        refuse_combination(name, strategy, precision, device)
    assert remark in str(raised.value)
    assert "adamw" in remark


@pytest.mark.parametrize(("installed", "said"), [(None, "it is not installed"), ("0.49.1", "0.49.1 is installed")])
def test_a_missing_package_is_named(installed, said, monkeypatch):
    def find(name):
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(optimizer_choice, "version", find)
    with pytest.raises(UsageError, match=rf"{said}; run pip install 'bitsandbytes>=0\.50'"):
        build_optimizer(Model(), OptimizerConfig(name="adamw8bit"), CPU)


def test_devices_that_have_no_such_optimizer(model, monkeypatch):
    monkeypatch.setattr(optimizer_choice, "version", lambda _: "0.50.2")
    with pytest.raises(UsageError, match="adamw8bit runs on cuda, xpu and cpu, and this is mps"):
        build_optimizer(model, OptimizerConfig(name="adamw8bit"), torch.device("mps"))
    with pytest.raises(UsageError, match="adamw_offload needs a CUDA device, and this is cpu"):
        build_optimizer(model, OptimizerConfig(name="adamw_offload"), CPU)
    for name in ("adamw8bit", "adamw_offload"):
        with pytest.raises(UsageError, match=rf"optimizer\.fused: false: has no effect with optimizer\.name: {name}"):
            OptimizerConfig(name=name, fused=False)


def eight_bit_state(shape, seed):
    """State as bitsandbytes keeps it, with blocks whose largest value is negative, positive, and 0."""
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape)
    state = {"step": 3}
    for number, low in (("1", -0.993), ("2", 0.0)):
        fractions = torch.cat([torch.linspace(low, 0.99, 255), torch.ones(1)]).sort().values
        codes = torch.randint(1, 255, (size,), generator=generator, dtype=torch.uint8)
        codes[::256] = 0 if low < 0 else 255  # the largest of its block
        scale = torch.rand(-(-size // 256), generator=generator) * 1e-3
        scale[1] = 0.0
        state |= {f"state{number}": codes.view(shape), f"qmap{number}": fractions, f"absmax{number}": scale}
    return state


@pytest.mark.parametrize("shape", [(64, 80), (5000,), (16, 3, 100)])
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_eight_bit_moments_come_back_to_the_same_bits(shape, key):
    state, other = eight_bit_state(shape, 0), eight_bit_state(shape, 1)
    values = eight_bit.read_moment(state, key)
    assert (values.shape, values.dtype) == (torch.Size(shape), torch.float32)
    eight_bit.write_moment(other, key, values)
    number = eight_bit.MOMENTS[key]
    alive = state[f"absmax{number}"].repeat_interleave(256)[: values.numel()].view(shape) > 0
    assert torch.equal(other[f"absmax{number}"], state[f"absmax{number}"])
    assert torch.equal(other[f"state{number}"][alive], state[f"state{number}"][alive])
    assert torch.equal(eight_bit.read_moment(other, key), values)


class Large(nn.Module):
    """A matrix large enough for 8 bits, and others that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(72, 80), nn.Linear(80, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def train_large(model, optimizer, steps):
    losses = []
    for step in steps:
        x = torch.randn(8, 72, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x[:, :4]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_eight_bit_adamw_follows_adamw_and_its_state_survives():
    compiling.skip_without("bitsandbytes")
    config = {"lr": 1e-2, "weight_decay": 0.1}
    torch.manual_seed(0)
    model, plain = Large(), Large()
    plain.load_state_dict(model.state_dict())
    optimizer, line = build_optimizer(model, OptimizerConfig(name="adamw8bit", **config), CPU, {"second": ["second"]})
    assert "8-bit" in line
    reference, _ = build_optimizer(plain, OptimizerConfig(**config), CPU)
    losses, expected = train_large(model, optimizer, range(10)), train_large(plain, reference, range(10))
    assert losses == pytest.approx(expected, rel=0.02)
    assert losses != expected
    state = optimizer.state[model.first.weight]
    assert state["state1"].dtype == torch.uint8  # it is what it says, not 32 bits in silence
    shards = Shards(model, optimizer)
    assert set(shards.state_names()) == {"exp_avg", "exp_avg_sq"}
    moment = reference.state[plain.first.weight]["exp_avg"]
    assert float((shards.state("first.weight", "exp_avg") - moment).norm() / moment.norm()) < 0.05

    other = Large()
    other.load_state_dict(model.state_dict())
    again, _ = build_optimizer(other, OptimizerConfig(name="adamw8bit", **config), CPU, {"second": ["second"]})
    target = Shards(other, again)
    target.create_state()
    for key, names in shards.state_names().items():
        for name in names:
            target.set_state(name, key, shards.state(name, key))
    target.set_step(10)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    assert train_large(other, again, range(10, 20)) == train_large(model, optimizer, range(10, 20))

    set_frozen(optimizer, ["second"])
    set_learning_rate(optimizer, 1.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train_large(model, optimizer, range(20, 22))
    same = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
    assert same == {"second.weight", "second.bias"}


def test_an_optimizer_without_the_keys_of_set_learning_rate_is_told_what_to_add(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"only lr, .*: base_lr .* and frozen .* are required in each"):
        optimizers.set_learning_rate(optimizer, 0.5)
    for group in optimizer.param_groups:
        group.update(base_lr=group["lr"], frozen=False)
    optimizers.set_learning_rate(optimizer, 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.05

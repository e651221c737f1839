"""One view of parameters and optimizer state under DDP, FSDP2 and ZeRO: plain names, fp32, this rank's shard.

Checkpoints, which must survive a change of strategy, and the EMA, which must not communicate, work on these shards.
``full`` gathers a whole tensor and ``shard_of`` takes this rank's shard of a whole one, so every consumer is written
once. ``sharding`` holds the layout of each strategy.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.training.sharding import WholeTensors, sharding_of

OWN_KEY = "own"
"""Key in the groups of an optimizer of ``module:Class``: whether it leaves frozen parts as they are."""
GROUP_OPTIONS = (
    *("params", "name", "part", "frozen", OWN_KEY, "muon"),
    *("lr", "base_lr", "weight_decay", "base_weight_decay"),
)
"""Keys of a group that are functions of the options and the step. An optimizer's own numbers are the others."""
EXACT_IN_FP32 = {torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.bool}
"""Dtypes of state whose values survive in a file of fp32."""


class Shards:
    """The trainable parameters of a prepared model, sharded as its strategy shards them.

    Build it on every rank, after ``prepare``. It keeps references to the sharded parameters, which stay valid
    while FSDP2 swaps gathered ones in and out of the modules.
    """

    def __init__(self, model: nn.Module, optimizer: Any, masters: Mapping[str, Tensor] | None = None) -> None:
        self.model = model
        self.module = plain_module(model)
        self.parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self._sharding = sharding_of(model, self.module, next(iter(self.parameters.values())), optimizer)
        for name, whole in (masters or {}).items():
            self.master(name).copy_(self.shard_of(name, whole))

    @property
    def replicated(self) -> bool:
        """True where every rank holds whole tensors: ``full`` and ``shard_of`` cost nothing."""
        return isinstance(self._sharding, WholeTensors)

    def uncovered(self) -> list[str]:
        """Names in the module's state besides trainable parameters: persistent buffers, frozen weights."""
        # With duplicates, because a state dict lists a shared parameter under each of its names.
        trained = {n for n, p in self.module.named_parameters(remove_duplicate=False) if p.requires_grad}
        return [name for name in self.module.state_dict(keep_vars=True) if name not in trained]

    def shape(self, name: str) -> torch.Size:
        """Shape of the whole parameter."""
        return self._sharding.shape(self.parameters[name])

    def extent(self, name: str) -> tuple[int, int]:
        """First element and length of this rank's shard in the flattened whole. No communication.

        Every strategy here gives each rank one contiguous range of a parameter. ZeRO-3's padding is not counted.
        """
        return self._sharding.extent(self.parameters[name])

    def master(self, name: str) -> Tensor:
        """This rank's fp32 shard of a parameter, live: the optimizer writes to the same memory."""
        return self._sharding.master(self.parameters[name])

    def state(self, name: str, key: str) -> Tensor:
        """This rank's shard of an optimizer state tensor (``exp_avg``, ...), sharded like the parameter.

        Write with ``set_state``, because 8-bit state is returned as a copy in fp32.
        """
        return self._sharding.state(self.parameters[name], key)

    def set_state(self, name: str, key: str, shard: Tensor) -> None:
        """Write this rank's shard of an optimizer state tensor, sharded like the parameter."""
        self._sharding.set_state(self.parameters[name], key, shard)

    def state_names(self) -> dict[str, list[str]]:
        """Keys of the per-element optimizer state, each with its parameters. Empty before the first step.

        AdamW has the same keys for every parameter. A hybrid such as Muon with AdamW has not.
        """
        found: dict[str, list[str]] = {}
        for name, parameter in self.parameters.items():
            for key in self._sharding.state_keys(parameter):
                found.setdefault(key, []).append(name)
        return found

    def full(self, name: str, shard: Tensor) -> Tensor:
        """Gather the whole tensor from the ranks' shards. A collective unless ``replicated``: all ranks, same order."""
        return self._sharding.full(self.parameters[name], shard)

    def shard_of(self, name: str, whole: Tensor) -> Tensor:
        """This rank's shard of a whole tensor, sharded like ``master``. No communication."""
        return self._sharding.shard_of(self.parameters[name], whole)

    def show(self, shards: Mapping[str, Tensor]) -> None:
        """Write these fp32 shards into the weights of the forward. All ranks (a collective for ZeRO).

        Under DDP and FSDP2 those are the master weights themselves. Under ZeRO the masters stay as they are.
        """
        with torch.no_grad():
            self._sharding.show((self.parameters[name], shard) for name, shard in shards.items())

    def create_state(self) -> None:
        """Allocate the optimizer's lazy state by one step without effect: zero gradient, learning rate and decay."""
        optimizer = self._sharding.optimizer
        groups = self._sharding.groups()
        stepped: list[Any] = [tensor for group in groups for tensor in group["params"]]
        # A class of the user's own may move a parameter all the same.
        values = [tensor.detach().clone() for tensor in stepped] if self._is_own else []
        gradients = [tensor.grad for tensor in stepped]  # ZeRO-offload keeps its buffers there
        before = optimizer.param_groups
        try:
            optimizer.param_groups = [{**group, "lr": 0.0, "weight_decay": 0.0} for group in groups]
            # Zeros rather than None, since an optimizer makes no state for a tensor without gradient.
            for tensor in stepped:
                tensor.grad = torch.zeros_like(tensor)
            optimizer.step()
        finally:
            optimizer.param_groups = before
            for tensor, gradient in zip(stepped, gradients, strict=True):
                tensor.grad = gradient
            for tensor, value in zip(stepped, values, strict=False):
                tensor.data.copy_(value)

    @property
    def _is_own(self) -> bool:
        """True for ``--optimizer.name module:Class``."""
        return any(OWN_KEY in group for group in self._sharding.optimizer.param_groups)

    def numbers(self) -> dict[str, Any]:
        """Numbers that an optimizer of ``module:Class`` keeps, by group and by parameter, for JSON.

        Empty for the built-in ones. Reads from the device. Raises ``UsageError`` for state that has neither one value
        per element nor one for the whole parameter, because a checkpoint could not hold it by parameter name.
        """
        optimizer = self._sharding.optimizer
        if not self._is_own:
            return {}
        # What the constructor takes is an option of the run, and a resume with another value must not undo it.
        options = {*GROUP_OPTIONS, *inspect.signature(type(optimizer)).parameters}
        groups: dict[str, Any] = {}
        for group in optimizer.param_groups:
            kept = {key: encode_number(value) for key, value in group.items() if key not in options}
            groups[group["name"]] = {key: number for key, number in kept.items() if number is not None}
        parameters: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            of_elements = self._sharding.state_keys(parameter)
            state: Mapping[str, Any] = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if key in of_elements and value.dtype in EXACT_IN_FP32:
                    continue
                number = encode_number(value)
                if number is None:
                    raise UsageError(_unsaved_state(type(optimizer).__name__, key, name, value))
                parameters.setdefault(name, {})[key] = number
        return {"groups": groups, "parameters": parameters}

    def set_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Write what ``numbers`` returned, after ``create_state``. Raises ``UsageError`` where it has no place."""
        optimizer = self._sharding.optimizer
        for group in optimizer.param_groups:
            saved: Mapping[str, Any] = numbers.get("groups", {}).get(group["name"], {})
            group.update({key: decode_number(number, torch.device("cpu")) for key, number in saved.items()})
        for name, values in numbers.get("parameters", {}).items():
            parameter = self.parameters[name]
            state = optimizer.state[parameter]
            for key, number in values.items():
                if not self._is_own or key not in state:
                    raise UsageError(
                        f"optimizer.name: {type(optimizer).__name__} keeps no {key} of {name}, and the checkpoint has "
                        "one: another class wrote it. Go back to that one, or start a new run with --init_from"
                    )
                present = state[key]
                device = present.device if isinstance(present, Tensor) else parameter.device
                state[key] = decode_number(number, device)

    def set_step(self, step: int) -> None:
        """Set the optimizer's own counter (bias correction) to the number of completed steps."""
        for state in self._sharding.optimizer.state.values():
            counter = state.get("step")
            if isinstance(counter, Tensor):  # torch's optimizers
                counter.fill_(step)
            elif counter is not None:  # bitsandbytes and DeepSpeed's CPU Adam count in an int
                state["step"] = step


_DTYPES = {str(d): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)}
_NUMBERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": "True".__eq__}


def encode_number(value: object) -> list[str] | None:
    """A number or a tensor without dimensions as its type and its text, exact; None for anything else."""
    if isinstance(value, Tensor) and value.ndim == 0 and str(value.dtype) in _DTYPES:
        return [str(value.dtype), repr(value.item())]
    if type(value).__name__ in _NUMBERS:  # the type itself: numpy's numbers and enumerations are something else
        return [type(value).__name__, repr(value)]
    return None


def decode_number(number: Sequence[str], device: torch.device) -> Any:
    """Return the value of ``encode_number``."""
    kind, text = number
    if kind in _NUMBERS:
        return _NUMBERS[kind](text)
    dtype = _DTYPES[kind]
    return torch.tensor(float(text) if dtype.is_floating_point else int(text), dtype=dtype, device=device)


def _unsaved_state(optimizer: str, key: str, name: str, value: object) -> str:
    kind = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        kind = f"a tensor {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return (
        f"optimizer.name: {optimizer} keeps {key} of {name} as {kind}; a checkpoint holds state by parameter name, as "
        "one value per element that fp32 represents, or as one number. Choose arguments without this state, or another "
        "class"
    )


def exact_masters(model: nn.Module, precision: str) -> dict[str, Tensor]:
    """Copy the fp32 weights for ``Shards`` before ``prepare`` rounds them. Call it just before ``prepare``.

    DeepSpeed casts the model to bf16 or fp16 first and makes its fp32 masters from the rounded weights, so the same
    seed would start elsewhere than under DDP. Empty where nothing is rounded: in fp32, or without DeepSpeed.
    """
    uses_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if precision == "fp32" or not uses_deepspeed:
        return {}
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def plain_module(model: nn.Module) -> nn.Module:
    """The user's own module inside DDP, DeepSpeed or compile wrappers, with the plain parameter names."""
    while True:
        inner = getattr(model, "_orig_mod", None)  # torch.compile
        is_engine = hasattr(model, "zero_optimization_stage")  # DeepSpeed's, whose package need not be installed
        if inner is None and (is_engine or isinstance(model, nn.parallel.DistributedDataParallel)):
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


# ------------------------------------------------------------------- a trial of an optimizer of the user's own
TRIAL_STEPS = 12


def try_saving(
    name: str,
    build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    lr: float,
    weight_decay: float,
    device: torch.device,
) -> bool:
    """Train a few values with the optimizer of `build` twice, once with a restore in between, and compare the bits.

    ``name`` is that of the option. Returns whether a parameter stays as it is while its group's learning rate and
    weight decay are 0, as frozen parts must. Raises ``UsageError`` for a class that needs what the loop does not give,
    that does not read the learning rate, or that keeps state where no checkpoint finds it. Each process runs it by
    itself, in milliseconds.
    """
    half = TRIAL_STEPS // 2
    try:
        first, second = _Trial(build, lr, weight_decay, device), _Trial(build, lr, weight_decay, device)
        first.train(range(half))
        second.restore(first, half)
        for trial in (first, second):
            trial.train(range(half, TRIAL_STEPS))
        survives = first.equals(second)
        holds_frozen = first.holds("decay")
        reads_rate = first.holds("decay", "no_decay") or first.holds("decay", "no_decay")  # some are a step behind
    except UsageError:
        raise
    except Exception as error:  # of foreign code
        raise UsageError(
            f"optimizer.name: {name}: a trial of {TRIAL_STEPS} steps failed "
            f"({type(error).__name__}: {error}). The loop calls step() without a closure, with a learning rate "
            "that may be 0; choose a class that takes both"
        ) from error
    if not survives:
        raise UsageError(
            f"optimizer.name: {name}: a trial that was saved and restored after {half} of {TRIAL_STEPS} steps "
            "went on with other bits: the class draws random numbers, or keeps state outside of `state` and "
            "`param_groups`, where no checkpoint finds it. Choose another class"
        )
    if not reads_rate:
        raise UsageError(
            f"optimizer.name: {name}: moves parameters while the learning rate is 0, so --optimizer.lr and "
            "the schedule would be ignored. Choose another class"
        )
    return holds_frozen


class _Trial:
    """A few values and an optimizer of the class for them."""

    def __init__(
        self,
        build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        lr: float,
        weight_decay: float,
        device: torch.device,
    ) -> None:
        self.model = nn.Module()
        # Zeros as in heads and modulations at the start: some optimizers keep other state for them.
        values = {"matrix": torch.linspace(-1, 1, 20).view(4, 5), "scale": torch.ones(3), "zeros": torch.zeros(4)}
        for name, value in values.items():
            self.model.register_parameter(name, nn.Parameter(value.to(device)))
        groups: list[dict[str, Any]] = []
        for name, members in (("decay", ["matrix"]), ("no_decay", ["scale", "zeros"])):
            decay = weight_decay if name == "decay" else 0.0
            group = {"params": [self.model.get_parameter(n) for n in members], "name": name, OWN_KEY: True}
            groups.append(group | {"lr": lr, "base_lr": lr, "weight_decay": decay})
        self.optimizer = build(groups)
        self.shards = Shards(self.model, self.optimizer)

    def train(self, steps: range) -> None:
        """Step with gradients that are a function of the step. The first learning rate is 0, as in a warm-up."""
        for step in steps:
            for index, parameter in enumerate(self.model.parameters()):
                angles = torch.linspace(-1, 1, parameter.numel(), device=parameter.device).view(parameter.shape)
                # Much the same direction in every step, so that optimizers that estimate a distance see one.
                parameter.grad = torch.sin(2 * angles + index + 0.1 * step)
            for group in self.optimizer.param_groups:
                group["lr"] = group["base_lr"] * min(step / 2, 1.0)
            self.optimizer.step()

    def restore(self, other: _Trial, step: int) -> None:
        """Take over weights and state as from a checkpoint: by parameter name and key, in fp32 and JSON."""
        self.model.load_state_dict(other.model.state_dict())
        numbers = json.loads(json.dumps(other.shards.numbers()))
        self.shards.create_state()
        for key, names in other.shards.state_names().items():
            for name in names:
                self.shards.set_state(name, key, other.shards.state(name, key).float())
        self.shards.set_step(step)
        self.shards.set_numbers(numbers)

    def holds(self, *groups: str) -> bool:
        """Step with learning rate and weight decay 0 in these groups; return whether their parameters stayed."""
        members: list[torch.Tensor] = []
        for group in self.optimizer.param_groups:
            if group["name"] in groups:
                group["base_lr"] = group["weight_decay"] = 0.0
                members += group["params"]
        before = [parameter.detach().clone() for parameter in members]
        self.train(range(1, 2))
        return all(torch.equal(a, b) for a, b in zip(members, before, strict=True))

    def equals(self, other: _Trial) -> bool:
        """Compare the bits of all parameters."""
        ours, theirs = self.model.parameters(), other.model.parameters()
        return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

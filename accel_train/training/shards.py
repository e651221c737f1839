"""One view of parameters and optimizer state under DDP, FSDP2 and ZeRO: plain names, fp32, this rank's shard.

Checkpoints (they survive a change of strategy) and the EMA (it never communicates) work on these shards. ``full``
gathers a whole tensor and ``shard_of`` takes this rank's shard of a whole one, so every consumer is written once.
``sharding`` holds the layout of each strategy.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.training.sharding import DTensors, FixedShard, WholeTensors, fixed_shard, sharding_of
from accel_train.wording import shortened

logger = logging.getLogger(__name__)

OWN_KEY = "own"
"""Key in the groups of an optimizer of ``module:Class``: True if it leaves frozen parts as they are."""
GROUP_OPTIONS = (
    *("params", "name", "part", "frozen", OWN_KEY, "muon"),
    *("lr", "base_lr", "weight_decay", "base_weight_decay"),
)
"""Keys of a group that follow from the options and the step. All others are the optimizer's own numbers."""
EXACT_IN_FP32 = {torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.bool}
"""Dtypes of state whose values an fp32 file holds exactly."""
WEIGHT_COPIES = ("master", "master_ema")
"""Files beside those of the optimizer state: exact copies of weights and EMA saved in low precision."""


class Shards:
    """The parameters and buffers of a prepared model, sharded as its strategy shards them.

    Build it on every rank, after ``prepare``. It keeps references to the sharded parameters, which stay valid
    while FSDP2 swaps gathered ones in and out of the modules. EMA and optimizer state exist for trained parameters
    only.
    """

    def __init__(self, model: nn.Module, optimizer: Any, masters: Mapping[str, Tensor] | None = None) -> None:
        self.model = model
        self.module = plain_module(model)
        self.parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        """Trained parameters by name. A parameter shared by several modules has one name, its first."""
        self.frozen = {name: p for name, p in self.module.named_parameters() if not p.requires_grad}
        """Parameters that are not trained, by name."""
        self.buffers = persistent_buffers(self.module)
        """Names of the buffers in the module's state."""
        self._has_warned = False
        # One strategy shards all of them alike, so it can be told from the first.
        first = next(iter(self.parameters.values()))
        self._sharding = sharding_of(model, self.module, first, optimizer)
        for name, whole in (masters or {}).items():
            self.master(name).copy_(self.shard_of(name, whole))

    @property
    def replicated(self) -> bool:
        """True where every rank holds whole tensors: ``full`` and ``shard_of`` cost nothing."""
        return isinstance(self._sharding, WholeTensors)

    @property
    def shows_alone(self) -> bool:
        """True where ``show`` is no collective: one process, DDP, FSDP2."""
        return isinstance(self._sharding, (WholeTensors, DTensors)) or dist.get_world_size() == 1

    def shape(self, name: str) -> torch.Size:
        """Shape of a whole parameter, trained or frozen, or of a buffer."""
        if name in self.parameters:
            return self._sharding.shape(self.parameters[name])
        return self._fixed(name).shape

    def extent(self, name: str) -> tuple[int, int]:
        """First element and length of this rank's shard in the flattened whole. No communication.

        Every strategy here gives each rank one contiguous range of a parameter. ZeRO-3's padding is not counted.
        Every rank holds all of a buffer.
        """
        if name in self.parameters:
            return self._sharding.extent(self.parameters[name])
        fixed = self._fixed(name)
        return fixed.start, fixed.values.numel()

    def fixed(self, name: str) -> Tensor:
        """This rank's shard of a frozen parameter or a buffer, live, in its own dtype and flat."""
        return self._fixed(name).values

    def _fixed(self, name: str) -> FixedShard:
        if name in self.frozen:
            return fixed_shard(self.frozen[name])
        # Looked up each time, because a module may replace its buffer by a new tensor.
        return fixed_shard(self.module.get_buffer(name))

    @torch.no_grad()
    def agree_on_buffers(self) -> None:
        """Give every rank the buffers of rank 0, and warn once if they differed. Collective if there are any.

        The running statistics of a norm follow the samples of each rank. A resume gives all ranks those of rank 0, so a
        save and an evaluation must do the same.
        """
        if not self.buffers or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        differs: list[Tensor] = []
        for name in self.buffers:
            buffer = self.module.get_buffer(name)
            # A copy, because the rank's own values are compared with it.
            received = buffer.detach().contiguous().clone()
            dist.broadcast(received, 0)
            differs.append((received != buffer).any())
            buffer.copy_(received)
        flags = torch.stack(differs).int()
        # Rank 0 itself never sees a difference.
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        of_buffers = zip(self.buffers, flags.tolist(), strict=True)
        names = [name for name, differed in of_buffers if differed]
        if names and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the processes had different values in %d buffer(s) (%s), because each saw its own samples; those of "
                "process 0 are evaluated and saved",
                len(names),
                shortened(names, 3),
            )

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

        AdamW has the same keys for every parameter. A hybrid such as Muon with AdamW does not.
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

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The innermost optimizer."""
        return self._sharding.optimizer

    def stepped(self) -> list[Any]:
        """The tensors that the optimizer steps on: the parameters, or the flat masters of ZeRO."""
        return [tensor for group in self._sharding.groups() for tensor in group["params"]]

    def create_state(self) -> None:
        """Allocate the optimizer's lazy state by one step without effect: zero gradient, learning rate and decay."""
        optimizer = self._sharding.optimizer
        groups = self._sharding.groups()
        stepped = self.stepped()
        # A class of the user's own may still move a parameter.
        values = [tensor.detach().clone() for tensor in stepped] if self._is_own else []
        gradients = [tensor.grad for tensor in stepped]  # ZeRO-offload keeps its buffers there
        # Replaced as a whole rather than edited, so that the real rates and decays come back untouched.
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
        """Return the numbers that an optimizer of ``module:Class`` keeps, by group and by parameter, for JSON.

        Empty for the built-in ones. Reads from the device. Raises ``UsageError`` for state that has neither one value
        per element nor one for the whole parameter, because a checkpoint could not hold it by parameter name, and for a
        key that cannot name a file.
        """
        optimizer = self._sharding.optimizer
        if not self._is_own:
            return {}
        groups = {group["name"]: _own_numbers(group, type(optimizer)) for group in optimizer.param_groups}
        parameters: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            of_elements = self._sharding.state_keys(parameter)
            state: Mapping[str, Any] = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if key in of_elements and value.dtype in EXACT_IN_FP32:
                    _refuse_key(key, name, optimizer)
                    continue
                number = encode_number(value)
                if number is None:
                    raise UsageError(_unsaved_state(type(optimizer).__name__, key, name, value))
                parameters.setdefault(name, {})[key] = number
        return {"groups": groups, "parameters": parameters}

    def set_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Restore the result of ``numbers``, after ``create_state``. Raises ``UsageError`` for state not kept here."""
        optimizer = self._sharding.optimizer
        for group in optimizer.param_groups:
            groups = numbers.get("groups", {})
            saved: Mapping[str, Any] = groups.get(group["name"], {})
            for key, number in saved.items():
                group[key] = decode_number(number, torch.device("cpu"))
        for name, values in numbers.get("parameters", {}).items():
            parameter = self.parameters[name]
            state = optimizer.state[parameter]
            for key, number in values.items():
                if not self._is_own or key not in state:
                    raise UsageError(
                        f"optimizer.name: {type(optimizer).__name__} keeps no {key} of {name}, but the checkpoint has "
                        "one: another class wrote it. Go back to that class, or start a new run with --init_from"
                    )
                present = state[key]
                device = present.device if isinstance(present, Tensor) else parameter.device
                state[key] = decode_number(number, device)

    def step_counts(self) -> dict[str, int]:
        """Return the number of steps in which each parameter had a gradient. Waits for the device.

        Empty under ZeRO, which has one counter for all, and for an optimizer of ``module:Class``, whose counters are
        among its ``numbers``.
        """
        state: Mapping[Any, Mapping[str, Any]] = self._sharding.optimizer.state
        if self._is_own:
            return {}
        counters = {name: state[p]["step"] for name, p in self.parameters.items() if "step" in state.get(p, {})}
        # Read all at once: one by one, each would wait for the device.
        steps = torch.stack([torch.as_tensor(counter) for counter in counters.values()]).tolist() if counters else []
        return dict(zip(counters, map(int, steps), strict=True))

    def set_step(self, step: int, apart: Mapping[str, int] = MappingProxyType({})) -> None:
        """Set the optimizer's own counter (bias correction) to the number of completed steps.

        ``apart`` has the counts of single parameters that differ. Under ZeRO no parameter has a count of its own.
        """
        states = self._sharding.optimizer.state
        for state in states.values():
            _set_counter(state, step)
        for name, own in apart.items():
            _set_counter(states.get(self.parameters[name], {}), own)


def _set_counter(state: dict[str, Any], step: int) -> None:
    counter = state.get("step")
    if isinstance(counter, Tensor):  # torch's optimizers
        counter.fill_(step)
    elif counter is not None:  # bitsandbytes and DeepSpeed's CPU Adam count in an int
        state["step"] = step


def _own_numbers(group: Mapping[str, Any], optimizer: type) -> dict[str, Any]:
    """Return the numbers that an optimizer of ``module:Class`` has itself put into a group."""
    # An argument of the constructor is an option of the run, and a resume with a new value must not undo it.
    options = {*GROUP_OPTIONS, *inspect.signature(optimizer).parameters}
    # As text, in which Python writes floats exactly.
    encoded = {key: encode_number(value) for key, value in group.items() if key not in options}
    return {key: number for key, number in encoded.items() if number is not None}


def persistent_buffers(module: nn.Module) -> list[str]:
    """List the buffers in a module's state dict, each under its first name."""
    names: list[str] = []
    seen: set[int] = set()
    for path, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            is_persistent = name not in owner._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
            # A buffer of two modules is saved once.
            if is_persistent and id(buffer) not in seen:
                seen.add(id(buffer))
                names.append(f"{path}.{name}".lstrip("."))
    return names


_NUMBER_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
)
_DTYPES = {str(dtype): dtype for dtype in _NUMBER_DTYPES}
_NUMBERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": "True".__eq__}


def encode_number(value: object) -> list[str] | None:
    """Return a number or a tensor without dimensions as its type and its exact text. None for anything else."""
    if isinstance(value, Tensor) and value.ndim == 0 and str(value.dtype) in _DTYPES:
        return [str(value.dtype), repr(value.item())]
    if type(value).__name__ in _NUMBERS:  # the type itself: numpy's numbers and enumerations are something else
        return [type(value).__name__, repr(value)]
    return None


def decode_number(number: Sequence[str], device: torch.device) -> Any:
    """Return the number that ``encode_number`` was given."""
    kind, text = number
    if kind in _NUMBERS:
        return _NUMBERS[kind](text)
    dtype = _DTYPES[kind]
    value = float(text) if dtype.is_floating_point else int(text)
    # In its own dtype and on its own device: some optimizers count steps in a tensor of the GPU.
    return torch.tensor(value, dtype=dtype, device=device)


def _refuse_key(key: object, name: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``UsageError`` for a key of the state that cannot be the name of a file in a checkpoint."""
    # The parts of a file have a dash after the key, and the copies of the weights would be read as weights.
    if isinstance(key, str) and re.fullmatch(r"\w+", key, re.ASCII) and key not in WEIGHT_COPIES:
        return
    raise UsageError(
        f"optimizer.name: {type(optimizer).__name__} keeps state of {name} under the key {key!r}; a checkpoint has a "
        f"file for each key, so letters, digits and _ are required, and none of {', '.join(WEIGHT_COPIES)}. Choose "
        "another class"
    )


def _unsaved_state(optimizer: str, key: str, name: str, value: object) -> str:
    kind = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        kind = f"a tensor {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return (
        f"optimizer.name: {optimizer} keeps {key} of {name} as {kind}; a checkpoint holds state by parameter name, as "
        "one value per element that fp32 can represent, or as one number. Choose arguments without this state, or "
        "another class"
    )


def exact_masters(model: nn.Module, precision: str) -> dict[str, Tensor]:
    """Copy the fp32 weights for ``Shards`` before ``prepare`` rounds them. Call it just before ``prepare``.

    DeepSpeed casts the model to bf16 or fp16 first and makes its fp32 masters from the rounded weights, so the same
    seed would start from other weights than under DDP. Empty where nothing is rounded: in fp32, or without DeepSpeed.
    """
    uses_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if precision == "fp32" or not uses_deepspeed:
        return {}
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def plain_module(model: nn.Module) -> nn.Module:
    """Return the user's own module inside DDP, DeepSpeed or compile wrappers, with the plain parameter names."""
    while True:
        inner = getattr(model, "_orig_mod", None)  # torch.compile
        is_engine = hasattr(model, "zero_optimization_stage")  # DeepSpeed's, whose package need not be installed
        if inner is None and (is_engine or isinstance(model, nn.parallel.DistributedDataParallel)):
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner

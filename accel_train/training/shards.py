"""One view of parameters and optimizer state under DDP, FSDP2 and ZeRO: plain names, fp32, this rank's shard.

Checkpoints, which must survive a change of strategy, and the EMA, which must not communicate, work on these shards.
``full`` gathers a whole tensor and ``shard_of`` takes this rank's shard of a whole one, so every consumer is written
once. ``sharding`` holds the layout of each strategy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.training.sharding import WholeTensors, sharding_of


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

    def set_step(self, step: int) -> None:
        """Set the optimizer's own counter (bias correction) to the number of completed steps."""
        for state in self._sharding.optimizer.state.values():
            counter = state.get("step")
            if isinstance(counter, Tensor):  # torch's optimizers
                counter.fill_(step)
            elif counter is not None:  # bitsandbytes and DeepSpeed's CPU Adam count in an int
                state["step"] = step


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

"""One view of parameters and optimizer state under DDP, FSDP2 and ZeRO: plain names, fp32, this rank's shard.

Whatever must survive a change of strategy (checkpoints) or be computed without communication (the moving
average) works on shards named as the plain module names them. ``full`` puts a whole tensor together from the
shards and ``cut`` takes this rank's part of a whole one, so every consumer is written once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_train.training import eight_bit

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Shards:
    """The trainable parameters of a prepared model, cut as its strategy cuts them.

    Build it on every rank, after ``prepare``. It keeps references to the sharded parameters, which stay valid
    while FSDP2 swaps gathered ones in and out of the modules.
    """

    def __init__(self, model: nn.Module, optimizer: Any, masters: Mapping[str, Tensor] | None = None) -> None:
        from torch.distributed.tensor import DTensor  # a second of CPU, which --help does not need

        self.model = model
        self.module = plain_module(model)
        self.parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self._zero: Any = getattr(model, "optimizer", None) if hasattr(model, "zero_optimization_stage") else None
        self._optimizer: torch.optim.Optimizer = (
            self._zero.optimizer if self._zero is not None else getattr(optimizer, "optimizer", optimizer)
        )
        first = next(iter(self.parameters.values()))
        self._kind = (
            "zero3"
            if hasattr(first, "ds_id")
            else "zero12"
            if self._zero is not None
            else "dtensor"
            if isinstance(first, DTensor)
            else "whole"
        )
        for name, whole in (masters or {}).items():
            self.master(name).copy_(self.cut(name, whole))

    @property
    def replicated(self) -> bool:
        """Every rank holds whole tensors: ``full`` and ``cut`` cost nothing."""
        return self._kind == "whole"

    def uncovered(self) -> list[str]:
        """Names in the module's state that are not trainable parameters: persistent buffers, frozen weights."""
        trained = {n for n, p in self.module.named_parameters(remove_duplicate=False) if p.requires_grad}
        return [name for name in self.module.state_dict(keep_vars=True) if name not in trained]

    def shape(self, name: str) -> torch.Size:
        """Shape of the whole parameter."""
        parameter: Any = self.parameters[name]
        return torch.Size(parameter.ds_shape) if self._kind == "zero3" else parameter.shape

    def master(self, name: str) -> Tensor:
        """This rank's fp32 part of a parameter, live: the optimizer writes to the same memory."""
        parameter: Any = self.parameters[name]
        if self._kind == "whole":
            return parameter.data
        if self._kind == "dtensor":
            return parameter.to_local().data
        flat, start, length = self._place(parameter)
        return flat.data.narrow(0, start, length)

    def state(self, name: str, key: str) -> Tensor:
        """This rank's part of an optimizer state tensor (``exp_avg``, ...), cut like the parameter.

        Live, to be written with ``set_state``: 8-bit state comes as fp32 values that are a copy.
        """
        parameter = self.parameters[name]
        if self._kind in ("whole", "dtensor"):
            state: Any = self._optimizer.state[parameter]
            if eight_bit.holds_moments(state):
                return eight_bit.read_moment(state, key)
            return state[key].to_local() if hasattr(state[key], "to_local") else state[key]
        flat, start, length = self._place(parameter)
        if length == 0:
            return flat.data.narrow(0, 0, 0)
        return self._optimizer.state[flat][key].narrow(0, start, length)

    def set_state(self, name: str, key: str, shard: Tensor) -> None:
        """Write this rank's part of an optimizer state tensor, cut like the parameter."""
        state = self._optimizer.state.get(self.parameters[name], {})
        if eight_bit.holds_moments(state):
            eight_bit.write_moment(state, key, shard)
        else:
            self.state(name, key).copy_(shard)

    def state_names(self) -> dict[str, list[str]]:
        """Keys of the per-element optimizer state, each with the parameters that have it. Empty before the first step.

        AdamW gives every parameter the same keys; a hybrid gives some parameters keys of their own.
        """
        if self._kind in ("zero12", "zero3"):  # one flat holder stands for all parameters of a group
            keys = (_element_keys(holder, state) for holder, state in self._optimizer.state.items())
            return {key: list(self.parameters) for key in next(keys, [])}
        found: dict[str, list[str]] = {}
        for name, parameter in self.parameters.items():
            for key in _element_keys(parameter, self._optimizer.state.get(parameter, {})):
                found.setdefault(key, []).append(name)
        return found

    def state_keys(self) -> list[str]:
        """Names of the per-element optimizer state, empty before the first step."""
        return list(self.state_names())

    def extent(self, name: str) -> tuple[int, int]:
        """Where this rank's shard lies in the flattened whole: its first element and their number. No communication.

        Every strategy here cuts a parameter into one contiguous run a rank; ZeRO-3's padding is not counted.
        """
        parameter: Any = self.parameters[name]
        if self._kind == "whole":
            return 0, parameter.numel()
        if self._kind == "dtensor":
            return _dtensor_extent(parameter)
        if self._kind == "zero3":
            length = parameter.ds_tensor.numel()
            start = min(length * dist.get_rank(), parameter.ds_numel)
            return start, min(length, parameter.ds_numel - start)
        if (mapping := parameter._hp_mapping) is None:
            return 0, 0
        return mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel

    def full(self, name: str, shard: Tensor) -> Tensor:
        """The whole tensor from the ranks' shards. A collective unless ``replicated``: all ranks, same order."""
        parameter: Any = self.parameters[name]
        if self._kind == "whole":
            return shard
        if self._kind == "dtensor":
            from torch.distributed.tensor import DTensor

            whole = DTensor.from_local(
                shard,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            return whole.full_tensor()
        device = parameter.device
        if self._kind == "zero3":
            pieces = torch.empty(
                dist.get_world_size() * parameter.ds_tensor.numel(), dtype=torch.float32, device=device
            )
            _all_gather(pieces, shard.to(device))
            return pieces.narrow(0, 0, parameter.ds_numel).view(parameter.ds_shape)
        buffer = torch.zeros(parameter.numel(), dtype=torch.float32, device=device)
        if (mapping := parameter._hp_mapping) is not None:
            address = mapping.lp_fragment_address
            buffer.narrow(0, address.start, address.numel).copy_(shard)
        dist.all_reduce(buffer)
        return buffer.view(parameter.shape)

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, as ``master`` is cut. No communication."""
        parameter: Any = self.parameters[name]
        if self._kind == "whole":
            return whole
        if self._kind == "dtensor":
            from torch.distributed.tensor import distribute_tensor

            mesh, placements = parameter.device_mesh, parameter.placements
            return distribute_tensor(whole.to(parameter.device), mesh, placements, src_data_rank=None).to_local()
        flat_whole = whole.flatten()
        if self._kind == "zero3":  # every rank holds the same length; the last ones are padded
            length = parameter.ds_tensor.numel()
            padded = flat_whole.new_zeros(length * dist.get_world_size())
            padded[: flat_whole.numel()] = flat_whole
            return padded.narrow(0, length * dist.get_rank(), length)
        if (mapping := parameter._hp_mapping) is None:
            return flat_whole.narrow(0, 0, 0)
        address = mapping.lp_fragment_address
        return flat_whole.narrow(0, address.start, address.numel)

    def show(self, shards: Mapping[str, Tensor]) -> None:
        """Write these fp32 shards into the weights that the forward reads. All ranks (a collective for ZeRO).

        Under DDP and FSDP2 those are the master weights themselves; under ZeRO the masters stay as they are.
        """
        self._reshard()
        with torch.no_grad():
            for name, shard in shards.items():
                if self._kind in ("whole", "dtensor"):
                    self.master(name).copy_(shard)
                    continue
                whole = self.full(name, shard)
                with self._gathered(name):
                    self.parameters[name].data.copy_(whole)

    def create_state(self) -> None:
        """Make the optimizer allocate its (lazy) state by one step that changes nothing: no gradient, lr or decay."""
        holders = self._holders()
        gradients = [holder.grad for holder in holders]  # ZeRO-offload keeps its buffers there
        groups = self._optimizer.param_groups
        if self._zero is not None:  # whose groups hold the tensors of the next step only
            groups = [{**groups[0], "params": holders}]
        before, still = self._optimizer.param_groups, {"lr": 0.0, "weight_decay": 0.0}
        try:
            self._optimizer.param_groups = [{**group, **still} for group in groups]
            for holder in holders:
                holder.grad = torch.zeros_like(holder)
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = before
            for holder, gradient in zip(holders, gradients, strict=True):
                holder.grad = gradient

    def set_step(self, step: int) -> None:
        """Set the optimizer's own counter (bias correction) to the number of steps done."""
        for state in self._optimizer.state.values():
            if isinstance(counter := state.get("step"), Tensor):
                counter.fill_(step)
            elif counter is not None:
                state["step"] = step

    def _holders(self) -> list[Any]:
        """The tensors that the innermost torch optimizer steps on."""
        if self._kind == "zero12":
            return list(self._zero.single_partition_of_fp32_groups)
        if self._kind == "zero3":
            return list(self._zero.fp32_partitioned_groups_flat)
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _place(self, parameter: Any) -> tuple[Tensor, int, int]:
        """ZeRO: the flat fp32 tensor that holds this rank's part, where it starts, and its length."""
        if self._kind == "zero3":
            group, start, length = self._zero.grad_position[self._zero.get_param_id(parameter)]
            return self._zero.fp32_partitioned_groups_flat[group], start, length
        mapping = parameter._hp_mapping
        if mapping is None:
            return self._zero.single_partition_of_fp32_groups[0], 0, 0
        address = mapping.hp_fragment_address
        return (
            self._zero.single_partition_of_fp32_groups[mapping.param_group_index],
            address.start,
            address.numel,
        )

    def _gathered(self, name: str) -> AbstractContextManager[Any]:
        if self._kind != "zero3":
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters([self.parameters[name]], modifier_rank=0)

    def _reshard(self) -> None:
        """FSDP2 keeps the root gathered after a forward without backward, and would go on using that copy."""
        for unit in self._fsdp_units():
            unit.reshard()

    def _fsdp_units(self) -> Iterator[Any]:
        if self._kind == "dtensor":
            from torch.distributed.fsdp import FSDPModule

            yield from (m for m in self.module.modules() if isinstance(m, FSDPModule))


def exact_masters(model: nn.Module, precision: str) -> dict[str, Tensor]:
    """The fp32 weights that ``prepare`` may round, to be given to ``Shards``; call it just before ``prepare``.

    DeepSpeed casts the model to bf16 or fp16 first and makes its fp32 masters from the rounded weights, so the same
    seed would start elsewhere than under DDP. Empty where nothing is rounded: fp32, or no DeepSpeed in use.
    """
    if precision == "fp32" or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return {}
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def _element_keys(holder: Tensor, state: Mapping[str, Any]) -> list[str]:
    """Keys of what an optimizer keeps for each element of ``holder``."""
    if eight_bit.holds_moments(state):
        return list(eight_bit.MOMENTS)
    return [k for k, v in state.items() if k != "step" and isinstance(v, Tensor) and v.shape == holder.shape]


def plain_module(model: nn.Module) -> nn.Module:
    """The user's own module inside DDP, DeepSpeed or compile wrappers, whose parameter names are the plain ones."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        wrapped = isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "zero_optimization_stage")
        inner = getattr(model, "module", None) if inner is None and wrapped else inner
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _dtensor_extent(parameter: DTensor) -> tuple[int, int]:
    """FSDP2 cuts the first dimension as ``torch.chunk`` does; a dimension of the mesh that replicates cuts nothing."""
    rows, start = parameter.shape[0] if parameter.ndim else 1, 0
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None, "this process is outside the mesh of its own parameter"
    for position, (size, placement) in enumerate(zip(parameter.device_mesh.shape, parameter.placements, strict=True)):
        if placement.is_replicate():
            continue
        assert placement.is_shard(0), f"{placement} is not FSDP2's own way to cut"
        chunk = -(-rows // size)
        offset = min(chunk * coordinate[position], rows)
        start, rows = start + offset, min(chunk, rows - offset)
    stride = parameter.shape[1:].numel()
    return start * stride, rows * stride


def _all_gather(output: Tensor, piece: Tensor) -> None:
    """``all_gather_into_tensor`` under the name that this torch wants (renamed in 2.13, the old one warns)."""
    names = ("all_gather_single", "all_gather_into_tensor")
    gather: Any = next(getattr(dist, name) for name in names if hasattr(dist, name))
    gather(output, piece.contiguous())

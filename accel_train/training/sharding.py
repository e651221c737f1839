"""Layout of parameters and optimizer state under each strategy: one small class each, behind one protocol.

Consumers use the view ``Shards``. Attributes of DeepSpeed and of DTensor are read here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_train.training.optimizer_classes import eight_bit
from accel_train.training.parameters import ParamGroup, unwrapped

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Sharding(Protocol):
    """Layout of the parameters and the optimizer state of a prepared model under one strategy."""

    optimizer: torch.optim.Optimizer
    """The innermost optimizer. It steps on the tensors of ``groups``."""

    def shape(self, parameter: Any) -> torch.Size:
        """Shape of the whole parameter."""
        ...

    def extent(self, parameter: Any) -> tuple[int, int]:
        """First element and number of elements of this rank's shard in the flattened whole. No communication."""
        ...

    def master(self, parameter: Any) -> Tensor:
        """This rank's fp32 shard, live: the optimizer writes to the same memory."""
        ...

    def state(self, parameter: Any, key: str) -> Tensor:
        """This rank's shard of an optimizer state tensor. 8-bit state is a copy in fp32."""
        ...

    def set_state(self, parameter: Any, key: str, shard: Tensor) -> None:
        """Write this rank's shard of an optimizer state tensor."""
        ...

    def state_keys(self, parameter: Any) -> list[str]:
        """Keys of the per-element optimizer state. Empty before the first step."""
        ...

    def full(self, parameter: Any, shard: Tensor) -> Tensor:
        """Gather the whole tensor from the ranks' shards."""
        ...

    def shard_of(self, parameter: Any, whole: Tensor) -> Tensor:
        """This rank's shard of a whole tensor. No communication."""
        ...

    def show(self, shards: Iterable[tuple[Any, Tensor]]) -> None:
        """Write fp32 shards into the weights of the forward."""
        ...

    def groups(self) -> list[ParamGroup]:
        """Parameter groups with every tensor of ``optimizer``."""
        ...


def sharding_of(model: Any, module: nn.Module, first: nn.Parameter, optimizer: Any) -> Sharding:
    """Detect the sharding of a prepared model from its engine and its first trainable parameter."""
    from torch.distributed.tensor import DTensor  # a second of CPU, which --help does not need

    if hasattr(first, "ds_id"):  # checked first, because an engine of stage 3 has zero_optimization_stage as well
        return ZeroStage3(model)
    if hasattr(model, "zero_optimization_stage"):
        return ZeroStage12(model)
    innermost: torch.optim.Optimizer = unwrapped(optimizer)
    if isinstance(first, DTensor):
        return DTensors(module, innermost)
    return WholeTensors(innermost)


class WholeTensors:
    """Every rank holds everything: one process, DDP."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        return parameter.shape

    def extent(self, parameter: nn.Parameter) -> tuple[int, int]:
        return 0, parameter.numel()

    def master(self, parameter: nn.Parameter) -> Tensor:
        return parameter.data

    def state(self, parameter: nn.Parameter, key: str) -> Tensor:
        return _read_state(self.optimizer.state[parameter], key)

    def set_state(self, parameter: nn.Parameter, key: str, shard: Tensor) -> None:
        _write_state(self.optimizer.state[parameter], key, shard)

    def state_keys(self, parameter: nn.Parameter) -> list[str]:
        return _element_keys(parameter, self.optimizer.state.get(parameter, {}))

    def full(self, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        return shard

    def shard_of(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        return whole

    def show(self, shards: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        for parameter, shard in shards:
            parameter.data.copy_(shard)

    def groups(self) -> list[ParamGroup]:
        return self.optimizer.param_groups


class DTensors:
    """FSDP2: each rank holds some rows of a parameter and of its optimizer state."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module = module
        self.optimizer = optimizer

    def shape(self, parameter: DTensor) -> torch.Size:
        return parameter.shape

    @staticmethod
    def extent(parameter: DTensor) -> tuple[int, int]:
        """FSDP2 divides the first dimension as ``torch.chunk`` does. Replicating mesh dimensions divide nothing."""
        start = 0
        rows = parameter.shape[0] if parameter.ndim else 1
        mesh = parameter.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "this process is outside the mesh of its own parameter"
        for size, position, placement in zip(mesh.shape, coordinate, parameter.placements, strict=True):
            if placement.is_replicate():
                continue
            assert placement.is_shard(0), f"{placement} is not FSDP2's own sharding by rows"
            chunk = -(-rows // size)  # rounded up
            offset = min(chunk * position, rows)
            start += offset
            rows = min(chunk, rows - offset)
        stride = parameter.shape[1:].numel()
        return start * stride, rows * stride

    def master(self, parameter: DTensor) -> Tensor:
        return parameter.to_local().data

    def state(self, parameter: DTensor, key: str) -> Tensor:
        return _read_state(self.optimizer.state[parameter], key)

    def set_state(self, parameter: DTensor, key: str, shard: Tensor) -> None:
        _write_state(self.optimizer.state[parameter], key, shard)

    def state_keys(self, parameter: DTensor) -> list[str]:
        return _element_keys(parameter, self.optimizer.state.get(parameter, {}))

    def full(self, parameter: DTensor, shard: Tensor) -> Tensor:
        """An all-gather over the parameter's mesh."""
        from torch.distributed.tensor import DTensor

        whole = DTensor.from_local(
            shard,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,  # the check would be one more collective for each tensor
            shape=parameter.shape,  # else torch assumes equal shards, and the last ranks may have fewer rows
            stride=parameter.stride(),
        )
        return whole.full_tensor()

    def shard_of(self, parameter: DTensor, whole: Tensor) -> Tensor:
        """The rows of ``extent``. Every rank passes the whole tensor."""
        from torch.distributed.tensor import distribute_tensor

        sharded = distribute_tensor(
            whole.to(parameter.device),
            parameter.device_mesh,
            parameter.placements,
            src_data_rank=None,  # each rank takes its rows from its own copy, without a broadcast
        )
        return sharded.to_local()

    def show(self, shards: Iterable[tuple[DTensor, Tensor]]) -> None:
        """Write into the masters. The forward gathers from them."""
        from torch.distributed.fsdp import FSDPModule

        # After a forward without backward the root stays gathered, and the next forward would use that copy.
        for unit in self._module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
        for parameter, shard in shards:
            self.master(parameter).copy_(shard)

    def groups(self) -> list[ParamGroup]:
        return self.optimizer.param_groups


class ZeroStage12:
    """ZeRO-1 and -2: whole weights in the compute dtype, fp32 masters and state in one flat shard per group."""

    def __init__(self, engine: Any) -> None:
        self._zero = engine.optimizer
        self.optimizer: torch.optim.Optimizer = engine.optimizer.optimizer

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        return parameter.shape

    def extent(self, parameter: Any) -> tuple[int, int]:
        """Elements of the parameter in this rank's part of the group: often all or none."""
        mapping = parameter._hp_mapping
        if mapping is None:
            return 0, 0
        address = mapping.lp_fragment_address
        return address.start, address.numel

    def master(self, parameter: Any) -> Tensor:
        """A view of the group's flat fp32 shard, empty where none of the parameter is in it."""
        mapping = parameter._hp_mapping
        if mapping is None:
            return self._zero.single_partition_of_fp32_groups[0].data.narrow(0, 0, 0)
        address = mapping.hp_fragment_address
        return self._flat(mapping).data.narrow(0, address.start, address.numel)

    def state(self, parameter: Any, key: str) -> Tensor:
        """A view of the state of the group's flat shard."""
        mapping = parameter._hp_mapping
        if mapping is None:
            return self.master(parameter)  # empty, and an empty shard has no state of its own
        address = mapping.hp_fragment_address
        group_state: Tensor = self.optimizer.state[self._flat(mapping)][key]
        return group_state.narrow(0, address.start, address.numel)

    def set_state(self, parameter: Any, key: str, shard: Tensor) -> None:
        self.state(parameter, key).copy_(shard)

    def state_keys(self, parameter: Any) -> list[str]:
        return _keys_of_first(self.optimizer)

    def full(self, parameter: Any, shard: Tensor) -> Tensor:
        """An all-reduce of zeros except for this rank's elements."""
        buffer = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        start, length = self.extent(parameter)
        buffer.narrow(0, start, length).copy_(shard)
        dist.all_reduce(buffer)
        return buffer.view(parameter.shape)

    def shard_of(self, parameter: Any, whole: Tensor) -> Tensor:
        start, length = self.extent(parameter)
        return whole.flatten().narrow(0, start, length)

    def show(self, shards: Iterable[tuple[Any, Tensor]]) -> None:
        for parameter, shard in shards:
            parameter.data.copy_(self.full(parameter, shard))

    def groups(self) -> list[ParamGroup]:
        return _one_group(self.optimizer, self._zero.single_partition_of_fp32_groups)

    def _flat(self, mapping: Any) -> Tensor:
        return self._zero.single_partition_of_fp32_groups[mapping.param_group_index]


class ZeroStage3:
    """ZeRO-3: equal flat shards of weights, masters and state. The last ones are padded."""

    def __init__(self, engine: Any) -> None:
        self._zero = engine.optimizer
        self.optimizer: torch.optim.Optimizer = engine.optimizer.optimizer

    def shape(self, parameter: Any) -> torch.Size:
        return torch.Size(parameter.ds_shape)

    @staticmethod
    def extent(parameter: Any) -> tuple[int, int]:
        """Equal lengths, rank by rank. Padding at the end is not counted."""
        length = parameter.ds_tensor.numel()
        start = min(length * dist.get_rank(), parameter.ds_numel)
        return start, min(length, parameter.ds_numel - start)

    def master(self, parameter: Any) -> Tensor:
        flat, start, length = self._place(parameter)
        return flat.data.narrow(0, start, length)

    def state(self, parameter: Any, key: str) -> Tensor:
        flat, start, length = self._place(parameter)
        return self.optimizer.state[flat][key].narrow(0, start, length)

    def set_state(self, parameter: Any, key: str, shard: Tensor) -> None:
        self.state(parameter, key).copy_(shard)

    def state_keys(self, parameter: Any) -> list[str]:
        return _keys_of_first(self.optimizer)

    def full(self, parameter: Any, shard: Tensor) -> Tensor:
        """An all-gather, without the padding."""
        size = dist.get_world_size() * parameter.ds_tensor.numel()
        pieces = torch.empty(size, dtype=torch.float32, device=parameter.device)
        _all_gather(pieces, shard.to(parameter.device))  # with offload the shard is in host memory
        return pieces.narrow(0, 0, parameter.ds_numel).view(parameter.ds_shape)

    def shard_of(self, parameter: Any, whole: Tensor) -> Tensor:
        """Equally long on every rank, padded with zeros after the end of the whole."""
        length = parameter.ds_tensor.numel()
        padded = whole.new_zeros(length * dist.get_world_size())
        padded[: whole.numel()] = whole.flatten()
        return padded.narrow(0, length * dist.get_rank(), length)

    def show(self, shards: Iterable[tuple[Any, Tensor]]) -> None:
        """Write whole parameters. DeepSpeed broadcasts rank 0's values when it shards them again."""
        import deepspeed

        # One parameter at a time, so that no rank holds more than one whole.
        for parameter, shard in shards:
            whole = self.full(parameter, shard)
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(whole)

    def groups(self) -> list[ParamGroup]:
        return _one_group(self.optimizer, self._zero.fp32_partitioned_groups_flat)

    def _place(self, parameter: Any) -> tuple[Tensor, int, int]:
        """The flat fp32 tensor with this rank's shard, the shard's start and its length."""
        group, start, length = self._zero.grad_position[self._zero.get_param_id(parameter)]
        return self._zero.fp32_partitioned_groups_flat[group], start, length


class FixedShard(NamedTuple):
    """This rank's part of a frozen parameter or a buffer."""

    shape: torch.Size
    """Shape of the whole tensor."""
    start: int
    """First element of the part in the flattened whole."""
    values: Tensor
    """Live values in the tensor's own dtype, flat."""


def fixed_shard(tensor: Any) -> FixedShard:
    """Return this rank's part. FSDP2 and ZeRO-3 shard frozen parameters like trained ones; the rest is whole."""
    from torch.distributed.tensor import DTensor

    if hasattr(tensor, "ds_tensor"):
        start, length = ZeroStage3.extent(tensor)
        return FixedShard(torch.Size(tensor.ds_shape), start, tensor.ds_tensor.data.narrow(0, 0, length))
    if isinstance(tensor, DTensor):
        start, _ = DTensors.extent(tensor)
        return FixedShard(tensor.shape, start, tensor.to_local().detach().reshape(-1))
    return FixedShard(tensor.shape, 0, tensor.detach().reshape(-1))


def _element_keys(holder: Tensor, state: Mapping[str, Any]) -> list[str]:
    """Keys of the state with one value per element of ``holder``."""
    if eight_bit.holds_moments(state):
        return list(eight_bit.MOMENTS)
    keys: list[str] = []
    for key, value in state.items():
        # The step count of a parameter without dimensions has the parameter's shape as well.
        if key != "step" and isinstance(value, Tensor) and value.shape in (holder.shape, (holder.numel(),)):
            keys.append(key)
    return keys


def _keys_of_first(optimizer: torch.optim.Optimizer) -> list[str]:
    """Keys of the first flat tensor. It stands for all parameters of a group and has the keys of each."""
    flat = next(iter(optimizer.state), None)
    if flat is None:
        return []
    return _element_keys(flat, optimizer.state[flat])


def _read_state(state: Mapping[str, Any], key: str) -> Tensor:
    if eight_bit.holds_moments(state):
        return eight_bit.read_moment(state, key)
    value = state[key]
    return value.to_local() if hasattr(value, "to_local") else value


def _write_state(state: Mapping[str, Any], key: str, shard: Tensor) -> None:
    if eight_bit.holds_moments(state):
        eight_bit.write_moment(state, key, shard)
    else:
        target = _read_state(state, key)
        target.copy_(shard.reshape(target.shape))  # some optimizers keep flat state


def _one_group(optimizer: torch.optim.Optimizer, flat: Iterable[Tensor]) -> list[ParamGroup]:
    """One group with all flat tensors: ZeRO's own groups hold only the tensors of its next step."""
    return [{**optimizer.param_groups[0], "params": list(flat)}]


def _all_gather(output: Tensor, piece: Tensor) -> None:
    """``all_gather_into_tensor`` under its name in this torch (renamed in 2.13, where the old name warns)."""
    gather: Any = getattr(dist, "all_gather_single", None)
    if gather is None:
        gather = getattr(dist, "all_gather_into_tensor")  # noqa: B009  pyright reports the old name as deprecated
    gather(output, piece.contiguous())

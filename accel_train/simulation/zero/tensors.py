"""Tensors of DeepSpeed's engine by category, and which of them are in host memory under an offload."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from accel_train.simulation import ledger as ledgers
from accel_train.simulation.collectives import Collectives
from accel_train.simulation.ledger import Ledger
from accel_train.simulation.places import STEP

WARM_UP = {"zero1": 1, "zero2": 1, "zero3": 2}
"""Steps before the counted one, by strategy. They create the optimizer's state and persistent buffers. In the first,
stage 3 also records the order of its modules, by which it prefetches from the second on."""
WARM_UP_MICRO_BATCHES = 2
"""Micro-batches of a warm-up step: enough to create the buffers in which several are accumulated."""


class Kept(NamedTuple):
    """Tensors of one category in one memory."""

    category: str
    on_host: bool
    tensors: list[Tensor]


class EngineTensors:
    """Reads a prepared engine of any stage."""

    def __init__(self, prepared: Any) -> None:
        self._ema = prepared.ema
        self._shards = prepared.ema.shards
        self._zero = prepared.model.optimizer
        self.is_stage_3 = hasattr(self._zero, "fp32_partitioned_groups_flat")
        # The attribute is cpu_offload in stages 1 and 2, and offload_optimizer in stage 3.
        self._offloads = bool(getattr(self._zero, "cpu_offload", False) or getattr(self._zero, "offload_optimizer", 0))
        self.overlap_comm = bool(prepared.model.zero_overlap_comm())
        self._offloads_weights = bool(getattr(self._zero, "offload_param", False))

    @property
    def keeps_shards_of_gradients(self) -> bool:
        """True if gradients are reduced after each micro-batch. Stage 1 keeps whole ones until the last micro-batch."""
        return bool(getattr(self._zero, "partition_gradients", True))

    def prepare(self, ledger: Ledger, collectives: Collectives) -> None:
        """Set the categories that the ledger gives to tensors made on the host and to gathered ones."""
        if self._offloads:
            ledger.host_phase = STEP
        if self.is_stage_3:
            collectives.gathered = ledgers.GATHERED

    def between_steps(self) -> Iterator[Kept]:
        """Yield the tensors that the engine keeps between steps. The first category of a storage counts."""
        parameters = [*self._shards.parameters.values(), *self._shards.frozen.values()]
        yield Kept(ledgers.PARAMETERS, False, parameters)
        yield Kept(ledgers.PARAMETERS, self._offloads_weights, self._shards_of_weights())
        # Stages 1 and 2 first copy the updated weights into these buffers.
        on_their_way = list(getattr(self._zero, "param_buffer_of_bit16_for_cpu_offload_groups", []))
        yield Kept(ledgers.PARAMETERS, True, on_their_way)
        masters = [self._shards.master(name) for name in self._shards.parameters]
        yield Kept(ledgers.MASTERS, self._offloads, masters)
        state = [value for values in self._shards.optimizer.state.values() for value in values.values()]
        yield Kept(ledgers.OPTIMIZER, self._offloads, [value for value in state if isinstance(value, Tensor)])
        yield Kept(ledgers.EMA, self._offloads, list(self._ema.averages.values()))
        yield Kept(ledgers.BUFFERS, False, list(self._shards.module.buffers()))
        yield from self.gradients()
        yield Kept(ledgers.COMMUNICATION, False, self._buckets())
        yield Kept(ledgers.COMMUNICATION, False, self._of("temp_grad_buffer_for_gpu_offload"))
        yield Kept(ledgers.COMMUNICATION, True, self._of("temp_grad_buffer_for_cpu_offload"))

    def gradients(self) -> Iterator[Kept]:
        """Yield the reduced gradients that exist now: the partitions of each group, and the optimizer's copy."""
        stepped = [holder.grad for holder in self._shards.stepped() if holder.grad is not None]
        yield Kept(ledgers.GRADIENTS, self._offloads, stepped)
        yield Kept(ledgers.GRADIENTS, True, list(getattr(self._zero, "accumulated_grads_in_cpu", {}).values()))
        yield Kept(ledgers.GRADIENTS, self._offloads, self._of("grad_partitions_flat_buffer"))
        yield Kept(ledgers.GRADIENTS, False, self._of("grads_in_partition"))
        for groups in (self._zero.averaged_gradients, getattr(self._zero, "all_grad_tensors", {})):
            for tensors in groups.values():
                yield Kept(ledgers.GRADIENTS, False, list(tensors or []))

    @contextmanager
    def copying(self, ledger: Ledger | None = None) -> Generator[None]:
        """Copy tensors from host memory to the device in the body, as on a GPU. On a CPU ``to`` would not copy.

        ``ledger``, if given, is told which of the copies are weights.
        """
        from deepspeed.accelerator import get_accelerator

        on_host = {_storage(tensor) for kept in self.between_steps() if kept.on_host for tensor in kept.tensors}
        weights = {_storage(shard) for shard in self._shards_of_weights()}
        original = Tensor.to

        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            names_device = any(isinstance(value, (str, torch.device)) for value in (*args, *kwargs.values()))
            if not names_device or _storage(tensor) not in on_host:
                return original(tensor, *args, **kwargs)
            made = torch.empty_like(tensor, requires_grad=False).copy_(tensor.detach())
            if ledger is not None and _storage(tensor) in weights:
                ledger.suggest([made], ledgers.GATHERED)
            return original(made, *args, **kwargs)

        def on_device(_: Any, tensor: Tensor) -> bool:
            return _storage(tensor) not in on_host

        with (
            mock.patch.object(Tensor, "to", to),
            mock.patch.object(type(get_accelerator()), "on_accelerator", on_device),
        ):
            yield

    def _shards_of_weights(self) -> list[Tensor]:
        """Return stage 3's shard of each parameter. The parameter itself is empty between its uses."""
        parameters = [*self._shards.parameters.values(), *self._shards.frozen.values()]
        return [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]

    @contextmanager
    def following(self, ledger: Ledger) -> Generator[None]:
        """In the body, assign categories to what the engine creates: gradient buckets and weights gathered together."""
        with ExitStack() as patches:
            patches.enter_context(self.copying(ledger))
            if self.is_stage_3:
                from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle as Handle

                patches.enter_context(mock.patch.object(Handle, "wait", _naming_weights(Handle.wait, ledger)))
            else:
                # Buckets are created in each backward and released at its end.
                named = self._naming_buckets(self._zero.setup_buckets, ledger)
                patches.enter_context(mock.patch.object(self._zero, "setup_buckets", named))
            yield

    def _naming_buckets(self, set_up: Callable[[], None], ledger: Ledger) -> Callable[[], None]:
        def call() -> None:
            are_made = not self._zero.ready_for_gradients
            set_up()
            if are_made:
                ledger.mark(self._buckets(), ledgers.COMMUNICATION)

        return call

    def _buckets(self) -> list[Tensor]:
        """Return the gradient buckets, buffers of ``reduce_bucket_size`` values for any size of the model."""
        found: list[Tensor] = []
        for bucket in self._zero.ipg_buckets.values():
            # Stages 1 and 2 have a list, with two buffers if communication overlaps.
            buffers = bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
            found += [buffer for buffer in buffers if buffer is not None]
        return found

    def _of(self, name: str) -> list[Tensor]:
        value = getattr(self._zero, name, None)
        return [] if value is None else [value]


def _naming_weights(wait: Callable[..., None], ledger: Ledger) -> Callable[..., None]:
    def call(handle: Any, *args: Any, **kwargs: Any) -> None:
        wait(handle, *args, **kwargs)
        # Each parameter is a copy from the gathered buffer.
        ledger.suggest([parameter.data for parameter in handle.params], ledgers.GATHERED)

    return call


def _storage(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return storage._cdata

"""A model with its initial weights, once per host: one process builds or reads it, and the others map its memory.

Otherwise every process of a host holds the whole model, until FSDP2 has sharded it or until it is on its device.
"""

from __future__ import annotations

import io
import logging
import mmap
import os
import pickle
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.checkpoints.restore import load_initial_weights
from accel_train.metrics.logs import details
from accel_train.runtime.main_alone import failing_together, gather_on_hosts
from accel_train.runtime.strategy import strategy_of
from accel_train.speed.memory import fitting

if TYPE_CHECKING:
    from accel_train.train_state import Experiment

logger = logging.getLogger(__name__)

ALIGNMENT = 64
"""Alignment in bytes of the start of each parameter, as in torch's own allocations."""
NONCE_BYTES = 16
BOOT = Path("/proc/sys/kernel/random/boot_id")
NAMESPACE = Path("/proc/self/ns/pid")


class Place(NamedTuple):
    """A parameter in the memory file: its first byte, shape and dtype."""

    start: int
    shape: torch.Size
    dtype: torch.dtype


class Offer(NamedTuple):
    """Location of the parameters, and of the pickled rest behind them, for the other processes of a host.

    Small, because every process receives the offers of all processes.
    """

    path: str
    """Path of the memory file, valid while the process that made it holds it open."""
    nonce: bytes
    """First bytes of the file, which tell whether the path still means this file."""
    weights: int
    """Bytes up to the end of the parameters."""
    rest: int
    """Bytes of the pickled rest, behind the parameters."""


class Built(NamedTuple):
    """Origin of a process's model."""

    leader: int
    """Rank of the process that built it for the host."""
    offer: Offer | None
    """The memory of its parameters. None: this process built a model of its own."""
    places: Mapping[str, Place] = MappingProxyType({})
    """Place of each parameter in it, by name."""
    descriptor: int | None = None
    """The memory file, on the leader alone."""


class UnshareableError(Exception):
    """The model cannot be handed to other processes, with the reason."""


_built = WeakKeyDictionary[nn.Module, Built]()
"""Models from ``build_once_per_host`` until ``load_once_per_host``."""


def size_that_fits(opened: Experiment, build: Callable[[], nn.Module]) -> fitting.Size:
    """Return the size of the model of ``build``. Raises ``UsageError`` with the numbers if it cannot fit."""
    config = opened.config
    accelerator = opened.accelerator
    size = fitting.size_of(build, offload_frozen=config.offload_frozen)
    fitting.refuse_what_cannot_fit(
        size,
        fitting.Kept(
            config.optimizer.name,
            training=not config.evaluate_only,
            has_ema=config.ema.decay > 0,
            saves_state=config.checkpoints.save_state,
            saved_bytes=config.checkpoints.bytes_of_a_value,
        ),
        sharded=strategy_of(accelerator) not in ("single", "ddp"),
        once_per_host=shares(accelerator),
        world_size=accelerator.num_processes,
        device=accelerator.device,
        given=config.command_line_flags("model"),
    )
    return size


def load(
    opened: Experiment,
    model: nn.Module,
    base: Mapping[str, Any] | None,
    names: Mapping[str, str | None] | None = None,
) -> None:
    """Load weights before ``prepare``, from the checkpoint to resume or else from ``init_from``. Collective.

    ``base`` refers to the files behind ``model``. ``names`` is as in ``load_initial_weights``. Raises ``UsageError``
    as that does.
    """
    read: Callable[[], None] | None = None
    if opened.run.checkpoint is not None or opened.run.initial_weights is not None:
        read = partial(load_initial_weights, model, opened.run, base, names)
    load_once_per_host(opened.accelerator, model, read)


def shares(accelerator: Accelerator) -> bool:
    """Return True if ``accelerator.prepare`` moves the weights away from where they were built.

    Under DDP on a CPU every process trains them in place, and DeepSpeed copies all of them in each process.
    """
    strategy = strategy_of(accelerator)
    moves = strategy == "fsdp2" or (strategy == "ddp" and accelerator.device.type != "cpu")
    return moves and hasattr(os, "memfd_create")


def build_once_per_host(accelerator: Accelerator, make: Callable[[], nn.Module]) -> nn.Module:
    """Return ``make()``, called by one process of each host where ``shares``, else by every process. Collective.

    The others get its modules and its state of torch's CPU generator. What a process writes to the parameters later
    stays private to it. Every process calls ``make`` if the model cannot be pickled, or if its tensors overlap or have
    hooks. So does a process that may not open the leader's memory. An error of one process is raised on all.
    """
    if not shares(accelerator):
        return make()
    rank = accelerator.process_index
    hosts = gather_on_hosts(_host())
    # The lowest rank of the host.
    leader = hosts.index(hosts[rank])
    made: list[nn.Module] = []
    built = Built(leader, None)
    with failing_together(accelerator):
        if rank == leader:
            made.append(make())
            if hosts.count(hosts[rank]) > 1:
                built = _share(leader, made[0])
    offer = gather_on_hosts(built.offer)[leader]
    with failing_together(accelerator):
        if rank != leader:
            model, built = _take(leader, offer) or (make(), built)
            made.append(model)
    _built[made[0]] = built
    return made[0]


def load_once_per_host(accelerator: Accelerator, model: nn.Module, read: Callable[[], None] | None) -> None:
    """Call ``read``, which writes to parameters and buffers of ``model``, on one process of each host. Collective.

    Every process calls it if ``model`` is not from ``build_once_per_host``, or no longer has the parameters that it had
    there. With None nothing is read. An error of one process is raised on all.
    """
    built = _built.pop(model, None)
    if built is None:
        if read is not None:
            read()
        return
    if read is not None:
        leads = built.leader == accelerator.process_index
        has_places = bool(built.places) and _still_has(model, built.places)
        offer: Offer | None = None
        with failing_together(accelerator):
            if leads or not has_places:
                read()
            if leads and has_places:
                offer = _write(built, model, _elsewhere(model, built.places))
        offer = gather_on_hosts(offer)[built.leader]
        with failing_together(accelerator):
            if offer is not None and has_places and not leads:
                _adopt(offer, built.places, model)
    if built.descriptor is not None:
        os.close(built.descriptor)


def _host() -> tuple[str, int]:
    """Return a key shared by processes that see each other's files under ``/proc``, a unique one without ``/proc``."""
    try:
        return BOOT.read_text().strip(), NAMESPACE.stat().st_ino
    except OSError:
        return secrets.token_hex(), 0


def _share(leader: int, model: nn.Module) -> Built:
    """Move the parameters of ``model`` into a new memory file. Returns no offer if the model cannot be handed on."""
    descriptor = os.memfd_create("accel-train-weights")
    try:
        _refuse_unshareable(model)
        places, end = _places(model)
        offer = Offer(f"/proc/{os.getpid()}/fd/{descriptor}", secrets.token_bytes(NONCE_BYTES), end, 0)
        built = Built(leader, offer, places, descriptor)
        # Random draws after the model was built must not differ between processes either.
        return built._replace(offer=_write(built, model, (model, places, torch.get_rng_state())))
    # Pickle and third-party modules may raise anything.
    except Exception as error:
        details(logger, f"every process builds the model, because it cannot be shared: {type(error).__name__}: {error}")
        os.close(descriptor)
        return Built(leader, None)


def _places(model: nn.Module) -> tuple[dict[str, Place], int]:
    """Return the place of each parameter, and the end of the last."""
    places: dict[str, Place] = {}
    end = NONCE_BYTES
    for name, parameter in model.named_parameters():
        if _can_be_placed(parameter):
            place = Place(-(-end // ALIGNMENT) * ALIGNMENT, parameter.shape, parameter.dtype)
            places[name] = place
            end = place.start + parameter.numel() * parameter.element_size()
    return places, end


def _refuse_unshareable(model: nn.Module) -> None:
    """Raise ``UnshareableError`` for tensors that a copy would not reproduce: on a device, hooked or overlapping."""
    extents: list[tuple[int, int, str]] = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != "cpu":
            raise UnshareableError(f"{name} is on {tensor.device}")
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:  # pyright: ignore[reportPrivateUsage]
            raise UnshareableError(f"{name} has hooks, which are not pickled")
        if tensor.numel() > 0:
            # By the last element, because a transposed tensor reaches as far as a contiguous one.
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            extents.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size(), name))
    for (_, end, name), (start, _, other) in pairwise(sorted(extents)):
        if start < end:
            raise UnshareableError(f"{name} and {other} share memory")


def _can_be_placed(tensor: Tensor) -> bool:
    """Return True for a plain contiguous parameter, which its raw bytes describe fully. Others are pickled."""
    is_plain = type(tensor) is nn.Parameter and tensor.layout == torch.strided
    return is_plain and tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel() > 0


def _still_has(model: nn.Module, places: Mapping[str, Place]) -> bool:
    """Return True if ``model`` still has a matching parameter for each place. Its values may have changed."""
    parameters = dict(model.named_parameters())
    for name, place in places.items():
        parameter = parameters.get(name)
        if parameter is None or not _can_be_placed(parameter):
            return False
        if (parameter.shape, parameter.dtype) != (place.shape, place.dtype):
            return False
    return True


def _elsewhere(model: nn.Module, places: Mapping[str, Place]) -> dict[str, Tensor]:
    """Return the buffers, and the parameters that have no place in the file."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters() if name not in places}
    return tensors | dict(model.named_buffers())


def _write(built: Built, model: nn.Module, rest: object) -> Offer:
    """Write the parameters of ``model`` and the pickled ``rest``. The parameters are views of the file from then on."""
    assert built.offer is not None
    assert built.descriptor is not None
    parameters = dict(model.named_parameters())
    pickled = io.BytesIO()
    _Pickler(pickled, {id(parameters[name]): place for name, place in built.places.items()}).dump(rest)
    offer = built.offer._replace(rest=pickled.tell())
    os.ftruncate(built.descriptor, offer.weights + offer.rest)
    mapped = _map(built.descriptor, offer)
    with open(built.descriptor, "r+b", closefd=False) as file:
        file.write(offer.nonce)
        for name, place in built.places.items():
            file.seek(place.start)
            file.write(parameters[name].detach().reshape(-1).view(torch.uint8).numpy().data)
            # One at a time, so that the host holds them no more than once.
            file.flush()
            parameters[name].data = _view(mapped, place)
        file.seek(offer.weights)
        file.write(pickled.getbuffer())
    return offer


def _take(leader: int, offer: Offer | None) -> tuple[nn.Module, Built] | None:
    """Return the model of the leader, with its parameters as views of the file. None if that cannot be done."""
    if offer is None:
        return None
    try:
        model, places, random_state = _open(offer).load()
        torch.set_rng_state(random_state)
    # Pickle and third-party modules may raise anything, and a container may hide the files of other processes.
    except Exception as error:
        details(
            logger, f"this process builds the model, because it cannot be taken over: {type(error).__name__}: {error}"
        )
        return None
    return model, Built(leader, offer, places)


def _adopt(offer: Offer, places: Mapping[str, Place], model: nn.Module) -> None:
    """Give ``model`` the tensors that the leader has read."""
    unpickler = _open(offer)
    parameters = dict(model.named_parameters())
    for name, place in places.items():
        parameters[name].data = _view(unpickler.mapped, place)
    others = _elsewhere(model, places)
    for name, value in unpickler.load().items():
        others[name].copy_(value)


def _open(offer: Offer) -> _Unpickler:
    """Return a reader of the leader's pickled rest, with the memory of its parameters."""
    with open(offer.path, "rb") as file:
        # Process ids are reused.
        if file.read(NONCE_BYTES) != offer.nonce:
            raise OSError(f"{offer.path} is not the memory of the weights: another process has this process id here")
        file.seek(offer.weights)
        return _Unpickler(io.BytesIO(file.read(offer.rest)), _map(file.fileno(), offer))


def _map(descriptor: int, offer: Offer) -> mmap.mmap:
    """Map the weights. A page that this process writes to becomes its own."""
    return mmap.mmap(descriptor, offer.weights, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)


def _view(mapped: mmap.mmap, place: Place) -> Tensor:
    return torch.frombuffer(mapped, dtype=place.dtype, count=place.shape.numel(), offset=place.start).view(place.shape)


class _Pickler(pickle.Pickler):
    """Writes the place of each parameter that has one, by ``id``, instead of its values."""

    def __init__(self, file: io.BytesIO, places: Mapping[int, Place]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._places = places

    def persistent_id(self, obj: Any) -> tuple[Place, bool, dict[str, Any]] | None:
        place = self._places.get(id(obj))
        if place is None:
            return None
        # Some optimizers and strategies mark parameters by attributes.
        return place, obj.requires_grad, dict(vars(obj))


class _Unpickler(pickle.Unpickler):
    """Rebuilds the parameters, each as a view of ``mapped``."""

    def __init__(self, file: io.BytesIO, mapped: mmap.mmap) -> None:
        super().__init__(file)
        self.mapped = mapped
        self._made: dict[int, nn.Parameter] = {}

    def persistent_load(self, pid: tuple[Place, bool, dict[str, Any]]) -> nn.Parameter:
        place, requires_grad, attributes = pid
        # A tied parameter is found in several modules and is one object.
        if place.start not in self._made:
            parameter = nn.Parameter(_view(self.mapped, place), requires_grad)
            vars(parameter).update(attributes)
            self._made[place.start] = parameter
        return self._made[place.start]

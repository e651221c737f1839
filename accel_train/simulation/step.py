"""Takes the place of a recipe's training loop, to let its ``main`` run one step and count it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accel_train.config import UsageError
from accel_train.data import sampler
from accel_train.runtime.strategy import strategy_of
from accel_train.simulation import ledger as ledgers
from accel_train.simulation.collectives import Collectives, Row
from accel_train.simulation.flags import DeviceType
from accel_train.simulation.ledger import Ledger, Peak, storage_of
from accel_train.simulation.places import BEFORE, Places
from accel_train.simulation.strategies import gradients_of_step, without_memory
from accel_train.simulation.tensors.beside import tensors_beside
from accel_train.simulation.tensors.cuda_casts import cuda_casts
from accel_train.simulation.tensors.fake_tensors import FakeWhereNeeded, build_fake, fake_batch
from accel_train.simulation.work import Work, WorkCounter
from accel_train.simulation.zero.engine import engine_without_memory
from accel_train.simulation.zero.tensors import WARM_UP, WARM_UP_MICRO_BATCHES, EngineTensors, Kept
from accel_train.speed.blocks import count_blocks
from accel_train.training.health.evidence import Evidence, Examined

if TYPE_CHECKING:
    from accel_train.data.loader import StepBatches

WARM_UP_DDP = 2
"""Runs of the step under DDP before the counted one. DDP rebuilds its buckets in the second."""


@dataclass(frozen=True)
class Counted:
    """Memory, traffic and computation of one process in one optimizer step."""

    step: int
    """Number of the step, from 1."""
    strategy: str
    processes: int
    global_batch_size: int
    micro_batches: int
    of_the_step: int
    """Number of micro-batches of the whole step. Not all of them may have been run."""
    rows: int
    """Samples of the largest micro-batch."""
    precision: str
    values: int
    """Number of parameter values of the whole model."""
    trained: int
    blocks: int
    """Number of the model's blocks, as activation checkpointing counts them. 0 for a model without a list of blocks."""
    held: dict[str, int]
    """Bytes by category between two steps, and those of gradients before the optimizer steps."""
    peak: Peak
    peak_in_blocks: int
    collectives: list[Row]
    flops: int
    inputs: int
    """Bytes of all micro-batches and of tensors made from them before the first forward."""
    inputs_in_blocks: int
    work: list[Work]
    """Work before the first forward, of each micro-batch, and from the optimizer's step on. Empty if micro-batches
    differ in their number of forwards."""
    host: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes in host memory between two steps, by category. Empty without an offload."""
    overlap_comm: bool | None = None
    """DeepSpeed's setting, its default included. None under other strategies."""
    save: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes of a save: its copy in this process's host memory (``copied``), and the tensors on disk (``written``)."""


class StepCounted(BaseException):
    """Leaves a recipe's ``main`` once the step is counted. A ``BaseException``, so that no recipe catches it."""

    def __init__(self, counted: Counted, ledger: Ledger) -> None:
        self.counted = counted
        self.ledger = ledger


class FakeStep:
    """A recipe's step on fake tensors, or with ``real`` on tensors with memory, to compare the two."""

    def __init__(
        self,
        step: int | None = None,
        device_type: DeviceType = "cuda",
        *,
        real: bool = False,
        largest: int | None = None,
    ) -> None:
        """Count step ``step``, from 1. None: the middle of the run, where warm-up and phases are over.

        Autocast keeps in fp32 what it does on a device of ``device_type``. ``largest`` limits the step to that many of
        its micro-batches, those with the most bytes.
        """
        self._step = step
        self._casts = cuda_casts if device_type == "cuda" else nullcontext
        self._is_zero = False
        self._blocks = 0
        self._of_the_step = 0
        self._largest = largest
        # Numbers on the host stay real and are used in the same operators as fake tensors.
        self._fake = None if real else FakeTensorMode(allow_non_fake_inputs=True)
        self._where = None if self._fake is None else FakeWhereNeeded(self._fake)

    def build_model(self, accelerator: Any, build: Callable[[], nn.Module]) -> nn.Module:
        """Return the model of ``build``, with fake parameters unless ``real``. From here on tensors may be fake."""
        self._is_zero = strategy_of(accelerator).startswith("zero")
        model = build() if self._fake is None else build_fake(self._fake, build)
        # Counted before preparation, in which FSDP2 changes the classes of modules.
        self._blocks = count_blocks(model)
        if self._fake is not None:
            # Everything is on the CPU already, and torch cannot move a fake parameter.
            accelerator.device_placement = False
        return model

    @contextmanager
    def preparing(self) -> Generator[None]:
        """Let DDP, FSDP2 and DeepSpeed prepare fake tensors, which have no memory."""
        if self._where is None:
            yield
            return
        with without_memory(), self._engine(self._where), self._where:
            yield

    def _engine(self, where: FakeWhereNeeded) -> AbstractContextManager[None]:
        """Return the context in which DeepSpeed's engine runs on fake tensors, an empty one for other strategies."""
        return engine_without_memory(where) if self._is_zero else nullcontext()

    @contextmanager
    def training(self, opened: Any, prepared: Any, dataset: Any, order: Any) -> Generator[Any]:
        """Return an iterable over one step, first to warm up and then to be counted."""
        batches = self._read(opened, dataset, order)
        steps = Steps(opened, prepared, batches, self._of_the_step, self._blocks)
        if self._where is None:
            with self._casts():
                yield steps
            return
        # Without a guard on the device, the step reads its norm to decide on clipping. Infinity makes it clip.
        reading = mock.patch.object(Evidence, "examine", return_value=Examined(math.inf, None))
        engine = self._engine(self._where)
        computing = self._computing(self._where, prepared.model)
        with reading, engine, self._casts(), self._where, computing:
            yield steps

    def _read(self, opened: Any, dataset: Any, order: Any) -> StepBatches:
        config = opened.config
        number = self._step
        if number is None:
            number = max(1, opened.max_steps // 2)
        if not 1 <= number <= opened.max_steps:
            raise UsageError(
                f"step: {number}: the run has steps 1 to {opened.max_steps}; give one of them, or leave --step out"
            )
        # Imported here, because the loader needs many modules that the rest of this one does not.
        from accel_train.data.loader import iterate_steps

        # Rank 0 has the largest share of a batch, and the largest shards.
        shard = sampler.BatchShard(0, opened.accelerator.num_processes, config.micro_batch_size)
        steps = iterate_steps(
            dataset,
            order,
            shard,
            start_step=number - 1,
            max_steps=number,
            device=opened.accelerator.device,
            config=config.loader,
        )
        # Unpacked, not next(): running the generator to its end stops its workers.
        (read,) = steps
        self._of_the_step = len(read.micro_batches)
        if self._largest is not None:
            by_size = sorted(read.micro_batches, key=batch_bytes, reverse=True)[: self._largest]
            read = replace(read, micro_batches=by_size)
        if self._fake is None:
            return read
        fake = self._fake
        return replace(read, micro_batches=[fake_batch(fake, batch) for batch in read.micro_batches])

    @contextmanager
    def _computing(self, where: FakeWhereNeeded, model: nn.Module) -> Generator[None]:
        """Make tensors fake that the model creates in its forward without tensor inputs."""

        def enter(*_: Any) -> None:
            where.computing += 1

        def leave(*_: Any) -> None:
            where.computing -= 1

        before = model.register_forward_pre_hook(enter, prepend=True)
        # Always called: otherwise, after a forward that raises, every later tensor would be fake.
        after = model.register_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()


class Steps:
    """Takes the place of ``loop.Training``."""

    def __init__(self, opened: Any, prepared: Any, batches: StepBatches, of_the_step: int, blocks: int) -> None:
        self._opened = opened
        self._prepared = prepared
        self._batches = batches
        self._of_the_step = of_the_step
        self._blocks = blocks

    def __iter__(self) -> Iterator[StepBatches]:
        buckets: list[Tensor] = []
        strategy = self._prepared.run_info.facts["strategy"]
        if strategy in WARM_UP:
            first = replace(self._batches, micro_batches=self._batches.micro_batches[:WARM_UP_MICRO_BATCHES])
            with EngineTensors(self._prepared).copying():
                for _ in range(WARM_UP[strategy]):
                    yield first
        elif isinstance(self._prepared.model, nn.parallel.DistributedDataParallel):
            # One micro-batch is enough: every gradient arrives in it.
            first = replace(self._batches, micro_batches=self._batches.micro_batches[:1])
            for _ in range(WARM_UP_DDP):
                with gradients_of_step(self._prepared.model) as buckets:
                    yield first
        else:
            # Optimizers allocate their state in their first step, but the counted one is in the middle of a run.
            self._prepared.ema.shards.create_state()
        counter = StepCounter(self._prepared)
        with counter.recording(self._batches, buckets):
            yield self._batches
        raise StepCounted(self._counted(counter), counter.ledger)

    def _counted(self, counter: StepCounter) -> Counted:
        opened = self._opened
        batches = self._batches
        parameters = list(self._prepared.model.parameters())
        save = opened.plan_of_save(self._prepared.ema)
        return Counted(
            step=batches.done,
            strategy=self._prepared.run_info.facts["strategy"],
            processes=opened.accelerator.num_processes,
            global_batch_size=opened.batch_size(batches.done - 1),
            micro_batches=len(batches.micro_batches),
            of_the_step=self._of_the_step,
            rows=max(len(batch["weight"]) for batch in batches.micro_batches),
            precision=opened.config.precision,
            values=sum(map(whole_size, parameters)),
            trained=sum(whole_size(parameter) for parameter in parameters if parameter.requires_grad),
            blocks=self._blocks,
            held=counter.held,
            peak=counter.ledger.peak(),
            peak_in_blocks=counter.ledger.peak_in_blocks(),
            collectives=counter.collectives.rows(),
            flops=counter.work.flops.total,
            inputs=counter.inputs,
            inputs_in_blocks=counter.inputs_in_blocks,
            work=counter.work_by_part(len(batches.micro_batches)),
            host=counter.host,
            overlap_comm=counter.overlap_comm,
            save={"copied": save.sizes[0], "written": sum(slot.bytes for slot in save.tensors)},
        )

    def report(self, *_: object, **named: object) -> None:
        """Do nothing: a simulation does not log or save, and ends by itself."""

    save_if_due = end = report

    def evaluate(self, _: Callable[[], object]) -> dict[str, float]:
        """Return nothing: evaluations are not simulated."""
        return {}


def whole_size(parameter: Any) -> int:
    """Return the number of values of a whole parameter, also under ZeRO-3, which empties it between its uses."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def batch_bytes(batch: Mapping[str, Tensor]) -> int:
    """Return the bytes of a micro-batch."""
    return sum(value.numel() * value.element_size() for value in batch.values())


class StepCounter:
    """Counts one step of a prepared model."""

    def __init__(self, prepared: Any) -> None:
        self._prepared = prepared
        zero = prepared.run_info.facts["strategy"] in WARM_UP
        self._engine = EngineTensors(prepared) if zero else None
        self.overlap_comm: bool | None = None
        self.held: dict[str, int] = {}
        self.host: dict[str, int] = {}
        self.inputs = 0
        self.inputs_in_blocks = 0
        self.work = WorkCounter(lambda tensor: self.ledger.is_on_host(tensor))
        self.collectives = Collectives()
        self._marks: list[Work] = []
        self._at_step: Work | None = None
        self._places = Places(prepared.model)
        self.ledger = Ledger(self._places.now, self._watch)
        self.collectives.ledger = self.ledger
        if self._engine is not None:
            self._engine.prepare(self.ledger, self.collectives)
            self.overlap_comm = self._engine.overlap_comm
        self._places.before_forward = self._begin_forward
        self._places.before_step = self._mark_gradients

    def _watch(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.collectives.watch(func, args, kwargs)
        self.work.watch(func, args, kwargs, result)

    def work_by_part(self, micro_batches: int) -> list[Work]:
        """Return the fields of ``Counted.work``."""
        each, rest = divmod(len(self._marks), micro_batches)
        if rest or not each or self._at_step is None:
            return []
        bounds = [Work(), *self._marks[::each], self._at_step, self._so_far()]
        return [stop + start.times(-1) for start, stop in itertools.pairwise(bounds)]

    def _so_far(self) -> Work:
        return self.work.work(self.collectives.seen)

    @contextmanager
    def recording(self, batches: StepBatches, buckets: Sequence[Tensor]) -> Generator[None]:
        """Count the body, the recipe's code of one step. ``buckets`` are DDP's, kept between steps."""
        model = self._prepared.model
        device = self._prepared.accelerator.device.type
        beside = [tensor for tensor in tensors_beside(model) if tensor.device.type == device]
        batch = [value for batch in batches.micro_batches for value in batch.values()]
        held = self._states(buckets) if self._engine is None else self._engine.between_steps()
        self._mark([*held, Kept(ledgers.BATCH, False, batch), Kept(ledgers.BESIDE, False, beside)])
        with ExitStack() as contexts:
            contexts.enter_context(self._places.following())
            if self._engine is not None:
                contexts.enter_context(self._engine.following(self.ledger))
            contexts.enter_context(self.ledger.recording())
            yield

    def _states(self, buckets: Sequence[Tensor]) -> Iterator[Kept]:
        """Yield the tensors that are kept between steps without DeepSpeed."""
        model = self._prepared.model
        optimizer = getattr(self._prepared.optimizer, "optimizer", self._prepared.optimizer)
        state = [value for values in optimizer.state.values() for value in values.values()]
        yield Kept(ledgers.PARAMETERS, False, list(model.parameters()))
        yield Kept(ledgers.BUFFERS, False, list(model.buffers()))
        yield Kept(ledgers.OPTIMIZER, False, [value for value in state if isinstance(value, Tensor)])
        yield Kept(ledgers.EMA, False, list(self._prepared.ema.averages.values()))
        yield Kept(ledgers.GRADIENTS, False, list(buckets))

    def _mark(self, held: Iterable[Kept]) -> None:
        """Count existing tensors, each storage under the first category that contains it."""
        seen: set[int] = set()
        sums: tuple[dict[str, int], dict[str, int]] = {}, {}
        for kept in held:
            new = [tensor for tensor in kept.tensors if storage_of(tensor) not in seen]
            seen.update(map(storage_of, new))
            size = self.ledger.mark(new, ledgers.HOST if kept.on_host else kept.category)
            sums[kept.on_host][kept.category] = sums[kept.on_host].get(kept.category, 0) + size
        for total, found in zip((self.held, self.host), sums, strict=True):
            # DeepSpeed steps one group after another, each with its own gradients.
            total.update({category: max(size, total.get(category, 0)) for category, size in found.items()})
        self.host = {category: size for category, size in self.host.items() if size}

    def _begin_forward(self) -> None:
        if not self._marks:
            self.inputs, self.inputs_in_blocks = self.ledger.held(ledgers.BATCH, BEFORE)
        self._marks.append(self._so_far())
        if self._engine is not None and self._engine.keeps_shards_of_gradients:
            self._mark(self._engine.gradients())
        # Nothing but gradients outlives the backward of a micro-batch.
        self.ledger.mark_leftovers("backward", ledgers.UNREDUCED)

    def _mark_gradients(self) -> None:
        # If there are several optimizers, only the first one's step counts as the beginning.
        if self._at_step is None:
            self._at_step = self._so_far()
        if self._engine is not None:
            self._mark(self._engine.gradients())
            return
        gradients = [p.grad for p in self._prepared.model.parameters() if p.grad is not None]
        self.held[ledgers.GRADIENTS] = self.ledger.mark(gradients, ledgers.GRADIENTS)

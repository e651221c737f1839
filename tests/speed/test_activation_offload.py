"""Inputs of checkpointed blocks in host memory: the same bits, two blocks on the device, each fetched one ahead."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.speed.activation_checkpointing import apply_activation_checkpointing
from accel_train.speed.apply import SpeedOptions, apply_speed_options
from accel_train.speed.memory import activation_offload
from accel_train.speed.memory import transfers as transfers_module
from accel_train.speed.memory.activation_offload import InputOffload, input_offload
from accel_train.speed.memory.frozen_offload import offload_frozen_blocks
from accel_train.speed.options import ActivationCheckpointingConfig, CompileConfig
from tests.speed import test_activation_checkpointing as checkpointing
from tests.speed.late_transfers import LateTransfers

CPU = torch.device("cpu")
WIDTH = 16
ROWS = 6
DEPTH = 6
FULL = ActivationCheckpointingConfig("full")
OFFLOAD = ActivationCheckpointingConfig("full", offload=True)


@pytest.fixture(autouse=True)
def _small_inputs_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 64)


class Block(nn.Module):
    """Inputs in a list and by name, as diffusers blocks and of this project take them, and one that all share."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.25)
        self.seen: Callable[[int, Tensor, Tensor], None] = lambda number, x, text: None

    def forward(self, streams: list[Tensor], vector: Tensor, *, text: Tensor) -> tuple[list[Tensor], Tensor]:
        (x,) = streams
        self.seen(self.number, x, text)
        x = x + self.dropout(self.linear(x * vector).tanh())
        return [x], text + self.linear(text).sigmoid()


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(number) for number in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        vector = self.vector(x).tanh()
        text = x.flip(0) * 2
        streams = [x * 1]
        for block in self.blocks:
            streams, text = block(streams, vector, text=text)
        return (streams[0] * text).square().mean()


def chain() -> Chain:
    torch.manual_seed(0)
    return Chain()


def offloaded(model: nn.Module, blocks: int | None = None, transfers: Any = None) -> LateTransfers:
    transfers = transfers or LateTransfers()
    config = ActivationCheckpointingConfig("full", blocks, offload=True)
    apply_activation_checkpointing(model, config, InputOffload(transfers))
    return transfers


def checkpointed(model: nn.Module, blocks: int | None = None) -> nn.Module:
    apply_activation_checkpointing(model, ActivationCheckpointingConfig("full", blocks))
    return model


def loss_of_chain(model: nn.Module, step: int) -> Tensor:
    torch.manual_seed(step)
    return model(torch.randn(ROWS, WIDTH))


def gradients(model: nn.Module, loss: Callable[[nn.Module, int], Tensor] = loss_of_chain) -> list[Tensor]:
    """Of three steps of two micro-batches, with an evaluation after each."""
    found: list[Tensor] = []
    for step in range(3):
        model.zero_grad()
        for part in range(2):
            value = loss(model, 10 * step + part)
            value.backward()
            found.append(value.detach())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            found.append(loss(model, step))
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    assert len(one) == len(other) > 3
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("blocks", [None, 4])
def test_the_bits_are_those_without_offload(blocks: int | None) -> None:
    expected = gradients(checkpointed(chain(), blocks))
    assert same(expected, gradients(chain()))
    model = chain()
    transfers = offloaded(model, blocks)
    assert same(gradients(model), expected)
    assert any(word.startswith("fetch") for word in transfers.log)


@pytest.mark.parametrize("forgotten", ["wait fetch", "wait send", "fetch"])
def test_a_missing_wait_would_be_seen(forgotten: str) -> None:
    """The comparison above can fail: a copy that nothing waits for has not been made when it is needed."""

    class Forgetful(LateTransfers):
        def wait(self, event: int) -> None:
            if not f"wait {self._names[event]}".startswith(forgotten):
                super().wait(event)

        def fetch(self, host: Any, target: Tensor) -> Any:
            event = super().fetch(host, target)
            if forgotten == "fetch":
                self._queue[event] = lambda: None
            return event

    model = chain()
    transfers = offloaded(model, transfers=Forgetful())
    assert not same(gradients(model), gradients(checkpointed(chain())))
    assert (transfers.overwritten > 0) == (forgotten == "wait fetch")


def test_each_block_is_fetched_while_the_one_behind_it_computes() -> None:
    model = chain()
    transfers = offloaded(model)
    for block in model.blocks:
        block.seen = lambda number, x, text: transfers.log.append(f"block {number}")
    loss = loss_of_chain(model, 0)
    # Two tensors of a block; the vector that all take is never sent.
    assert transfers.log[:8] == [
        "block 0",
        "send 0",
        "send 1",
        "block 1",
        "wait send 0",
        "wait send 1",
        "send 2",
        "send 3",
    ]
    middle = len(transfers.log)
    # When block 5 runs, those of 4 have been asked for, and of all before it nothing is left on the device.
    assert transfers.log[-5:] == ["wait send 6", "wait send 7", "send 8", "send 9", "block 5"]
    loss.backward()
    backward = [word for word in transfers.log[middle:] if not word.startswith("free")]
    for number in range(DEPTH - 2):
        tensors = 2 * number, 2 * number + 1
        asked = [backward.index(f"fetch {each}") for each in tensors]
        there = [backward.index(f"wait fetch {each}") for each in tensors]
        behind = backward.index(f"block {number + 1}")
        assert max(asked) < behind < min(there)
        assert max(there) < backward.index(f"block {number}")
        if number + 2 < DEPTH:
            # And not earlier, for it would take memory.
            assert min(asked) > backward.index(f"block {number + 2}")
    fetched = [word for word in backward if word.startswith("fetch")]
    assert len(fetched) == len(set(fetched)) == 2 * (DEPTH - 2)


def test_inputs_of_two_blocks_lie_on_the_device() -> None:
    model = chain()
    transfers = offloaded(model)
    memory: list[weakref.ref[Any]] = []
    fetch = transfers.fetch

    def follow(tensor: Tensor) -> None:
        memory.append(weakref.ref(tensor.untyped_storage()))

    def fetched(host: Any, target: Tensor) -> Any:
        follow(target)
        return fetch(host, target)

    transfers.fetch = fetched
    alive: list[int] = []

    def seen(number: int, x: Tensor, text: Tensor) -> None:
        follow(x)
        follow(text)
        storages = [reference() for reference in memory]
        alive.append(len({id(storage) for storage in storages if storage is not None}))

    for block in model.blocks:
        block.seen = seen
    loss = loss_of_chain(model, 0)
    forward = len(alive)
    assert forward == DEPTH
    loss.backward()
    assert len(alive) == 2 * DEPTH
    # Two tensors of each of two blocks. In the forward those of a third go as the next one begins.
    assert alive[:forward] == [2, 4, 4, 4, 4, 4]
    assert alive[forward:] == [4, 4, 4, 4, 4, 2]
    plain = checkpointed(chain())
    memory.clear()
    alive.clear()
    for block in plain.blocks:
        block.seen = seen
    kept = loss_of_chain(plain, 0)
    assert alive == [2, 4, 6, 8, 10, 12]
    kept.backward()


def test_a_condition_of_every_second_block_is_sent_once_at_most() -> None:
    class Alternating(Chain):
        def forward(self, x: Tensor) -> Tensor:
            condition = self.vector(x)
            text = x.flip(0) * 2
            streams = [x * 1]
            for number, block in enumerate(self.blocks):
                vector = text * 3 if number % 2 else condition
                streams, text = block(streams, vector, text=text)
            return (streams[0] * text).square().mean()

    torch.manual_seed(0)
    model = Alternating()
    plain = checkpointed(copy.deepcopy(model))
    transfers = offloaded(model)
    loss_of_chain(model, 0).backward()
    # Two streams of each block but the last, two vectors of their own, and the condition of the first.
    assert sum(word.startswith("send") for word in transfers.log) == 2 * (DEPTH - 1) + 2 + 1
    # The condition, the second that is sent, never left.
    assert "fetch 0" in transfers.log
    assert "fetch 1" not in transfers.log
    model.zero_grad()
    assert same(gradients(model), gradients(plain))


def test_host_memory_is_used_again() -> None:
    model = chain()
    transfers = offloaded(model)
    loss_of_chain(model, 0).backward()
    hosts = len(transfers.hosts)
    # The last block is never sent.
    assert hosts == 2 * (DEPTH - 1) == transfers.free_places
    gradients(model)
    assert hosts == len(transfers.hosts) == transfers.free_places


def test_a_graph_that_goes_without_a_backward_leaves_nothing() -> None:
    model = chain()
    transfers = offloaded(model)
    for step in range(3):
        loss = loss_of_chain(model, step)
        if step == 1:
            # As far as block 3, whose backward has begun to fetch the inputs of block 2.
            torch.autograd.grad(loss, list(model.blocks[3].parameters()))
        del loss
        assert transfers.free_places == len(transfers.hosts)
    assert any(word.startswith("fetch") for word in transfers.log)
    assert same(gradients(model), gradients(checkpointed(chain())))
    assert transfers.overwritten == 0


def test_two_forwards_before_one_backward_and_two_backwards_of_one_forward() -> None:
    def both(model: nn.Module, step: int) -> Tensor:
        return loss_of_chain(model, step) * loss_of_chain(model, step + 100)

    model = chain()
    offloaded(model)
    plain = checkpointed(chain())
    assert same(gradients(model, both), gradients(plain, both))
    for each in (model, plain):
        each.zero_grad()
        loss = loss_of_chain(each, 0)
        loss.backward(retain_graph=True)
        loss_of_chain(each, 1).backward()
        loss.backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_copies_of_a_model_and_a_pickled_one() -> None:
    model = chain()
    offloaded(model)
    expected = gradients(checkpointed(chain()))
    again = copy.deepcopy(model)
    for block in again.blocks:
        del block.seen
        block.seen = print_nothing
    assert same(gradients(again), expected)
    assert same(gradients(model), expected)
    assert same(gradients(pickle.loads(pickle.dumps(again))), expected)


def print_nothing(number: int, x: Tensor, text: Tensor) -> None:
    """Do nothing, and can be pickled."""


class Strided(nn.Module):
    """Inputs that are no whole tensors: two parts of one storage, a transposed one, one that was taken before."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(1, WIDTH))
        self.blocks = nn.ModuleList(StridedBlock() for _ in range(DEPTH))
        self.strides: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        whole = x[None] * torch.arange(1.0, 3.0)[:, None, None]
        skipped: list[Tensor] = []
        for block in self.blocks:
            before = skipped[-3] if len(skipped) > 2 else None
            # With two rows neither part is contiguous.
            left, right = whole[:, :4], whole[:, 4:]
            skipped.append(whole)
            turned = (whole * 3).transpose(0, 2).contiguous().transpose(0, 2)
            whole = block(
                {"left": left, "more": (right, turned)}, before, self.vector.expand(64, -1), self.strides.append
            )
        return whole.square().mean()


class StridedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, parts: dict[str, Any], before: Tensor | None, rows: Tensor, note: Callable[..., None]) -> Tensor:
        right, turned = parts["more"]
        tensors = [parts["left"], right, turned, rows]
        note([(x.stride(), x.storage_offset(), x.requires_grad) for x in tensors])
        whole = torch.cat([parts["left"], right], 1)
        if before is not None:
            whole = whole + before.mean(1, keepdim=True)
        return whole + self.linear(whole + turned).tanh() * rows.mean()


def test_parts_of_a_storage_come_back_at_their_strides() -> None:
    def strided() -> Strided:
        torch.manual_seed(0)
        return Strided()

    model = strided()
    transfers = offloaded(model, transfers=LateTransfers(poison=False))
    loss_of_chain(model, 0).backward()
    forward = model.strides[:DEPTH]
    assert model.strides[DEPTH:] == forward[::-1]
    (one,) = {str(each) for each in forward[1:]}
    assert one == "[((96, 16, 1), 0, True), ((96, 16, 1), 64, True), ((1, 2, 12), 0, True), ((0, 1), 0, True)]"
    # The whole of which two parts are taken, and the transposed one: a storage is sent once. The vector is a parameter.
    sent = [word for word in transfers.log if word.startswith("send")]
    assert len(sent) == 2 * (DEPTH - 1) + 2
    # Of the first four blocks. What comes back three blocks later has left, and is sent again.
    fetched = [word for word in transfers.log if word.startswith("fetch")]
    assert len(fetched) == 2 * 4 + 1
    assert same(gradients(strided_with(LateTransfers(poison=False))), gradients(checkpointed(strided())))


def strided_with(transfers: LateTransfers) -> Strided:
    torch.manual_seed(0)
    model = Strided()
    offloaded(model, transfers=transfers)
    return model


def test_what_is_worth_a_copy() -> None:
    def sent(*leaves: Any) -> int:
        return len(activation_offload._worth_it(leaves, CPU))

    whole = torch.randn(8, 16)
    assert sent(whole) == sent(whole[:5], whole) == sent(whole[:, :6], 3, whole[:, 6:]) == 1
    # Half of it and no less.
    assert (sent(whole[:4]), sent(whole[:3])) == (1, 0)
    assert sent(whole, whole.clone()) == 2
    assert sent(whole.expand(4, 8, 16)) == 1
    others = {
        "a small part of something else": whole[:3],
        "smaller than 64 bytes": torch.randn(15),
        "a parameter": nn.Parameter(whole),
        "a leaf with a gradient": torch.randn(64, requires_grad=True),
        "no floating-point numbers": torch.arange(64),
        "a lazy negation": torch.randn(64, dtype=torch.complex64).conj().imag,
        "no storage": torch.randn(64).to_sparse(),
        "of another device": torch.empty(64, device="meta"),
        "no tensor": "text",
    }
    assert {name: sent(value) for name, value in others.items()} == dict.fromkeys(others, 0)


def test_a_block_may_append_to_a_list_of_its_caller() -> None:
    class Collecting(Block):
        def forward(self, streams: list[Tensor], vector: Tensor, *, text: Tensor) -> tuple[list[Tensor], Tensor]:
            found = super().forward(streams, vector, text=text)
            streams.append(text)
            return found

    model = chain()
    model.blocks = nn.ModuleList(Collecting(number) for number in range(DEPTH))
    offloaded(model)
    streams, text = [torch.randn(ROWS, WIDTH)], torch.randn(ROWS, WIDTH)
    model.blocks[0](streams, text, text=text)
    assert len(streams) == 2
    assert streams[1] is text


class Changing(nn.Module):
    """Changes in place what a block has kept: the newest, or what was sent already."""

    def __init__(self, late: bool, shared: bool) -> None:
        super().__init__()
        self.late = late
        self.shared = shared
        self.blocks = nn.ModuleList(Block(number) for number in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        vector = x.tanh()
        kept = streams = [x * 1]
        text = x * 2
        for number, block in enumerate(self.blocks):
            given = streams
            streams, text = block(streams, vector, text=text)
            if number == 2:
                kept = given
            if number == 2 + self.late:
                with torch.no_grad():
                    (vector if self.shared else kept[0]).add_(1)
        return (streams[0] * text).mean()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_inputs_changed_in_place_are_refused_as_by_torch(late: bool, shared: bool) -> None:
    model = Changing(late, shared)
    offloaded(model)
    with pytest.raises(RuntimeError, match=r"was changed in place, .*version 1, saved at 0"):
        loss_of_chain(model, 0).backward()
    if shared:
        # torch does not look into a list.
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss_of_chain(checkpointed(Changing(late, shared)), 0).backward()


# ---------------------------------------------------------------------------------------------------- real models
def test_the_blocks_of_this_project() -> None:
    """They take their tokens in a list."""
    plain = checkpointing.applied("full")
    model = checkpointing.build()
    transfers = offloaded(model)
    assert checkpointing.train(model) == checkpointing.train(plain)
    assert "fetch 0" in transfers.log


@pytest.mark.parametrize("kind", ["llama", "gpt", "sd3", "unet"])
def test_blocks_of_other_libraries(kind: Any) -> None:
    from tests.distributed import foreign_models

    torch.manual_seed(0)
    model = foreign_models.MODELS[kind]().train()
    plain = copy.deepcopy(model)
    checkpointed(plain)
    config = ActivationCheckpointingConfig("full", offload=True)
    # The skips of a UNet, and its text, are held by the model.
    transfers = LateTransfers(poison=kind != "unet")
    offload = InputOffload(transfers)
    offload.refuse_too_few = lambda blocks: None
    apply_activation_checkpointing(model, config, offload)
    batch = foreign_models.few(foreign_models.rows(kind))

    def gradients_of(each: nn.Module) -> list[Tensor]:
        parameters = [parameter for parameter in each.parameters() if parameter.requires_grad]
        return list(torch.autograd.grad(foreign_models.losses(each, kind, batch).sum(), parameters))

    for _ in range(2):
        assert same(gradients_of(model), gradients_of(plain))
    assert any(word.startswith("send") for word in transfers.log)


def test_beside_frozen_blocks_in_host_memory() -> None:
    def frozen() -> Chain:
        model = chain()
        for block in model.blocks[::2]:
            block.requires_grad_(False)
        return model

    model = frozen()
    offloaded(model)
    offload_frozen_blocks(model, CPU)
    assert same(gradients(model), gradients(checkpointed(frozen())))


# --------------------------------------------------------------------------------------------------------- pieces
def test_pinned_memory_is_handed_out_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    def copy_at_once(stream: Any, device: Any, pairs: list[tuple[Tensor, Tensor]]) -> str:
        for source, target in pairs:
            target.copy_(source)
            copied.append(len(source))
        return "event"

    monkeypatch.setattr(transfers_module, "PIECE_BYTES", 100)
    monkeypatch.setattr(transfers_module, "copy_beside", copy_at_once)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    empty = torch.empty
    made: list[int] = []

    def unpinned(size: int, *, dtype: torch.dtype, device: str, pin_memory: bool) -> Tensor:
        assert (device, pin_memory) == ("cpu", True)
        made.append(size)
        return empty(size, dtype=dtype)

    transfers = transfers_module.PinnedTransfers(torch.device("cuda", 0))
    for size, pieces in ((250, 3), (99, 1), (300, 3)):
        source = torch.randint(256, (size,), dtype=torch.uint8)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", unpinned)
            host, _ = transfers.send(source)
        assert len(host) == pieces
        target = torch.zeros(size, dtype=torch.uint8)
        transfers.fetch(host, target)
        assert torch.equal(target, source)
        transfers.free(host)
    assert made == [100, 100, 100]
    assert sum(copied) == 2 * (250 + 99 + 300)


# -------------------------------------------------------------------------------------------------------- refused
@pytest.mark.parametrize("mode", ["none", "attention", "ffn", "selective"])
def test_other_modes_are_refused(mode: Any) -> None:
    with pytest.raises(UsageError, match=rf"offload: true: .*mode: {mode}.*mode full, or leave it out"):
        ActivationCheckpointingConfig(mode, offload=True)


@pytest.mark.parametrize(
    ("device", "mode", "says"),
    [
        ("cpu", "off", "a cpu device has no other memory to offload to; a CUDA device is required"),
        ("cuda", "auto", "compile.mode auto cannot trace; use --compile.mode off"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(device: str, mode: Any, says: str) -> None:
    options = SpeedOptions(activation_checkpointing=OFFLOAD, compile=CompileConfig(mode))
    with pytest.raises(UsageError, match=rf"^activation_checkpointing\.offload: true: .*{says}"):
        apply_speed_options(chain(), options, torch.device(device), "fp32")
    assert input_offload(FULL, torch.device(device), mode) is None


def test_the_option_reaches_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = LateTransfers()
    monkeypatch.setattr(activation_offload, "PinnedTransfers", lambda device: transfers)
    model = chain()
    options = SpeedOptions(activation_checkpointing=OFFLOAD)
    applied = apply_speed_options(model, options, torch.device("cuda", 0), "fp32")
    notice = applied.choices["activation_checkpointing.mode"]
    assert notice == "activation checkpointing: full, 6 of 6 blocks (Block), their inputs in host memory"
    assert same(gradients(model), gradients(checkpointed(chain())))
    assert "fetch 0" in transfers.log


def test_the_stream_of_the_memory_waits_whichever_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as while another stream is entered, in which Python's collector may free a graph."""
    waits: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: str) -> None:
            waits.append(f"{self.name} for {event}")

    monkeypatch.setattr(transfers_module, "copy_beside", lambda stream, device, pairs: "copy")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Named("computing"))
    transfers = transfers_module.PinnedTransfers(torch.device("cuda", 0))
    copied = transfers.fetch([torch.zeros(1)], torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Named("another"))
    transfers.wait(copied)
    assert waits == ["another for copy", "computing for copy"]


def test_too_few_blocks_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"last 2 checkpointed blocks stay on the device, but there are only 2; at least 3"
    ):
        offloaded(chain(), blocks=2)


def test_a_micro_batch_of_which_nothing_is_sent_trains_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A larger one may follow: lengths vary, and so does the micro-batch after a run out of memory."""
    model = chain()
    transfers = offloaded(model)
    least = activation_offload.LEAST_BYTES
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 1 << 20)
    small = [gradients(model), gradients(model)]
    assert not transfers.log
    (warning,) = caplog.records
    assert "no block keeps an input of at least 1 MiB" in warning.getMessage()
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", least)
    assert same(gradients(model), gradients(checkpointed(chain())))
    assert same(small[0], small[1])
    assert transfers.log

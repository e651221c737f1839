"""Initial weights are built and read by one process of a host, and mapped by the others: real processes, FSDP2."""

from __future__ import annotations

import gc
import json
import os
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train import initial_weights
from accel_train.config import UsageError
from accel_train.runtime import rehearsal
from accel_train.speed.memory.fitting import size_of
from tests import zygote
from tests.waiting import free_port

FILE = "memfd:accel-train-weights"
WIDTH = 1024
WEIGHT_BYTES = 4 * 16 * WIDTH * WIDTH


class Tied(nn.Module):
    """Has what a module can hold: tied weights, buffers of both kinds, a frozen part, and marks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.layers[0].weight
        self.scale = nn.Parameter(torch.rand(()))
        self.empty = nn.Parameter(torch.empty(0))
        self.turned = nn.Parameter(torch.rand(3, 4).t())
        self.narrow = nn.Parameter(torch.rand(3).bfloat16(), requires_grad=False)
        self.narrow.mark = "kept"  # type: ignore[attr-defined]
        self.register_buffer("mean", torch.rand(3))
        self.register_buffer("table", torch.rand(3), persistent=False)
        self.plain = torch.rand(2)


class Unpicklable(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.act = lambda x: x


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        both = torch.rand(4, 4)
        self.upper, self.lower = nn.Parameter(both[:3]), nn.Parameter(both[1:])


class Hooked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight.register_hook(torch.neg)


class HookedLater(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.bias.register_post_accumulate_grad_hook(print)


def connected(rank: int, port: int, *, sharded: bool = True) -> Accelerator:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if not sharded:
        return Accelerator(cpu=True)
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}
    rehearsal.connect("fsdp", timedelta(minutes=5))
    return Accelerator()


def seeded(make: Callable[[], nn.Module], calls: list[str]) -> Callable[[], nn.Module]:
    def act() -> nn.Module:
        calls.append("built")
        torch.manual_seed(7)
        return make()

    return act


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}


def same(ones: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return ones.keys() == others.keys() and all(torch.equal(ones[name], others[name]) for name in ones)


def build_and_load(rank: int, folder: Path, port: int) -> None:
    """Compares with a model of its own, writes to the parameters, and reads others in their place."""
    accelerator = connected(rank, port)
    calls: list[str] = []
    reads: list[str] = []
    model: Any = initial_weights.build_once_per_host(accelerator, seeded(Tied, calls))
    drawn = torch.rand(2)
    alone: Any = seeded(Tied, [])()
    found: dict[str, object] = {
        "calls": calls,
        "same": same(tensors(model), tensors(alone)),
        "drawn": torch.equal(drawn, torch.rand(2)),
        "tied": model.head.weight is model.layers[0].weight,
        "plain": torch.equal(model.plain, alone.plain),
        "mark": model.narrow.mark,
        "stride": model.turned.stride(),
        "trained": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
    }
    with torch.no_grad():
        model.scale.fill_(10.0 + rank)
    accelerator.wait_for_everyone()
    found["own"] = model.scale.item()
    with torch.no_grad():
        model.scale.fill_(10.0)
    kept = model.scale

    def read() -> None:
        reads.append("read")
        torch.manual_seed(8)
        with torch.no_grad():
            for value in (*model.parameters(), *model.buffers()):
                value.copy_(torch.rand(value.shape))

    initial_weights.load_once_per_host(accelerator, model, read)
    found["reads"] = list(reads)
    mine = tensors(model)
    read()
    found["loaded"] = same(mine, tensors(model))
    found["object"] = kept is model.scale
    (folder / f"{rank}.json").write_text(json.dumps(found))
    accelerator.end_training()


def own_bytes() -> int:
    """Memory of this process that no other maps, pages of a private mapping that it has written to among it."""
    kib = re.search(r"^Anonymous:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert kib is not None
    return 1024 * int(kib[1])


def count_memory(rank: int, folder: Path, port: int) -> None:
    """Memory of its own that the build adds, and what is left of the memory file after ``prepare``."""
    accelerator = connected(rank, port)

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(16)))

    before = own_bytes()
    model = initial_weights.build_once_per_host(accelerator, seeded(make, []))
    accelerator.wait_for_everyone()
    added = own_bytes() - before
    initial_weights.load_once_per_host(accelerator, model, None)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    gc.collect()
    files = sum(
        os.path.basename(os.path.realpath(f"/proc/self/fd/{name}")).startswith(FILE)
        for name in os.listdir("/proc/self/fd")
    )
    maps = Path("/proc/self/maps").read_text()
    found = {"own": added, "files": files, "mapped": maps.count(FILE)}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    accelerator.end_training()


def build_others(rank: int, folder: Path, port: int) -> None:
    """Models that are not shared, an error of the builder, and parameters that are new after the build."""
    accelerator = connected(rank, port)
    found: dict[str, object] = {}
    for make in (Unpicklable, Overlapping, Hooked, HookedLater):
        calls: list[str] = []
        model = initial_weights.build_once_per_host(accelerator, seeded(make, calls))
        initial_weights.load_once_per_host(accelerator, model, lambda calls=calls: calls.append("read"))
        found[make.__name__] = [calls, same(tensors(model), tensors(seeded(make, [])()))]

    def refuse(*_: object) -> Any:
        raise PermissionError("hidden")

    opener = initial_weights._open
    initial_weights._open = refuse
    calls = []
    model = initial_weights.build_once_per_host(accelerator, seeded(Tied, calls))
    initial_weights._open = opener
    initial_weights.load_once_per_host(accelerator, model, lambda calls=calls: calls.append("read"))
    found["hidden"] = [calls, same(tensors(model), tensors(seeded(Tied, [])()))]

    def fail() -> nn.Module:
        raise ValueError(f"no weights for {rank}")

    with pytest.raises(ValueError, match="no weights") as caught:
        initial_weights.build_once_per_host(accelerator, fail)
    found["error"] = str(caught.value)
    calls = []
    model = initial_weights.build_once_per_host(accelerator, seeded(lambda: nn.Linear(4, 4), calls))
    model.weight = nn.Parameter(torch.rand(2, 4))
    initial_weights.load_once_per_host(accelerator, model, lambda: calls.append("read"))
    found["renewed"] = calls
    model = initial_weights.build_once_per_host(accelerator, seeded(lambda: nn.Linear(4, 4), []))
    with pytest.raises(ValueError, match="no weights") as caught:
        initial_weights.load_once_per_host(accelerator, model, fail)  # type: ignore[arg-type]
    found["reading"] = str(caught.value)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    accelerator.end_training()


def build_unsharded(rank: int, folder: Path, port: int) -> None:
    """DDP on a CPU."""
    accelerator = connected(rank, port, sharded=False)
    calls: list[str] = []
    model = initial_weights.build_once_per_host(accelerator, seeded(lambda: nn.Linear(4, 4), calls))
    initial_weights.load_once_per_host(accelerator, model, lambda: calls.append("read"))
    (folder / f"{rank}.json").write_text(json.dumps({"calls": calls}))
    accelerator.end_training()


def outcomes(folder: Path, target: Callable[[int, Path, int], None]) -> list[dict[str, Any]]:
    zygote.call(target, 2, folder, free_port())
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_one_process_builds_and_reads_for_both(tmp_path: Path) -> None:
    first, second = outcomes(tmp_path, build_and_load)
    assert (first.pop("calls"), second.pop("calls")) == (["built"], [])
    assert (first.pop("reads"), second.pop("reads")) == (["read"], [])
    assert (first.pop("own"), second.pop("own")) == (10.0, 11.0)
    expected = {
        "same": True,
        "drawn": True,
        "tied": True,
        "plain": True,
        "mark": "kept",
        "stride": [1, 4],
        "trained": ["scale", "empty", "turned", "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"],
        "loaded": True,
        "object": True,
    }
    assert first == expected
    assert second == expected


def test_the_host_holds_the_weights_once_and_frees_them_once_they_are_sharded(tmp_path: Path) -> None:
    first, second = outcomes(tmp_path, count_memory)
    assert (first["files"], second["files"]) == (0, 0)
    # Those of the leader are in the file as well, and not its own any more.
    assert max(first["own"], second["own"]) < WEIGHT_BYTES / 4
    assert (first["mapped"], second["mapped"]) == (0, 0)


def test_what_cannot_be_shared_is_built_and_read_by_each(tmp_path: Path) -> None:
    first, second = outcomes(tmp_path, build_others)
    assert first.pop("reading") == second.pop("reading") == "no weights for 0"
    assert first.pop("error") == second.pop("error") == "no weights for 0"
    assert (first.pop("renewed"), second.pop("renewed")) == (["built", "read"], ["read"])
    both = [["built", "read"], True]
    assert first == second == dict.fromkeys(("Unpicklable", "Overlapping", "Hooked", "HookedLater", "hidden"), both)


def test_weights_that_stay_on_the_host_are_built_by_each(tmp_path: Path) -> None:
    assert outcomes(tmp_path, build_unsharded) == [{"calls": ["built", "read"]}] * 2


def test_a_function_that_returns_more_than_the_model_is_refused() -> None:
    build: Any = lambda: (nn.Linear(1, 1), 1)  # noqa: E731
    with pytest.raises(UsageError, match=r"build_model: the function returned a tuple: a torch\.nn\.Module is"):
        size_of(build)

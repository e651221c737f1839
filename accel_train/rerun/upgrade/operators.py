"""Record every operator of one optimizer step, inside the process of a recipe.

Operators are seen below autograd: those of the forward, of the backward and of the optimizer, in the order in which
they are called. Compiled code runs eagerly while it is recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_train.config import UsageError
from accel_train.metrics.records import write_json
from accel_train.rerun.upgrade.fingerprints import fingerprint, without_evaluations
from accel_train.training.shards import plain_module

if TYPE_CHECKING:
    from accel_train.data.datasets import MapDataset
    from accel_train.data.loader import StepBatches
    from accel_train.loop import Training
    from accel_train.train_state import TrainState

# Operators that return uninitialised memory, whose bits mean nothing.
UNINITIALISED = ("aten::empty", "aten::new_empty", "aten::resize_")


@dataclass(frozen=True)
class Request:
    """The step to record, and where to write it."""

    step: int
    """Step as in log lines, counted from 1."""
    path: str
    keep: int | None = None
    """Position of an operator whose outputs are written as well, to ``kept_path``."""


def kept_path(path: str) -> Path:
    """Return the file of kept outputs that belongs to a recording."""
    return Path(f"{path}.safetensors")


@contextmanager
def recording(request: Request, training: Training, prepared: TrainState, _: MapDataset) -> Generator[None]:
    """Train up to the step, record its operators up to its report, and end the loop there."""
    if prepared.accelerator.num_processes > 1:
        raise UsageError("operators are recorded in one process")
    names = {id(module): name for name, module in plain_module(prepared.model).named_modules()}
    recorder = Recorder(request.keep)
    training.steps = _steps(training.steps, training, request.step, recorder, prepared.model, names)
    without_evaluations(training)
    yield
    write_json(Path(request.path), {"operators": recorder.finish()})
    if recorder.kept:
        save_file(recorder.kept, kept_path(request.path))


def _steps(
    steps: Iterator[StepBatches],
    training: Training,
    step: int,
    recorder: Recorder,
    model: nn.Module,
    names: Mapping[int, str],
) -> Iterator[StepBatches]:
    report = training.report
    for batches in steps:
        if batches.done != step:
            yield batches
            continue
        with ExitStack() as recorded:

            def reported(*arguments: Any, **named: Any) -> None:
                # What the report of a step computes is not part of the step.
                recorded.close()
                report(*arguments, **named)

            setattr(training, "report", reported)  # noqa: B010
            for module in model.modules():
                # Other modules are wrappers, which name nothing in the recipe.
                if id(module) in names:
                    for hook in recorder.hook(module, names[id(module)]):
                        recorded.callback(hook.remove)
            if training.opened.config.compile.mode != "off":
                # Dynamo refuses to compile while a recorder is entered. Only here, since it imports all of dynamo.
                recorded.enter_context(torch.compiler.set_stance("force_eager"))
            recorded.enter_context(recorder)
            yield batches
        return


class Recorder(TorchDispatchMode):
    """Collects a record of each operator called while it is entered."""

    def __init__(self, keep: int | None = None) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self._keep = keep
        self._records: list[dict[str, Any]] = []
        self._hashes: list[Tensor] = []
        """Hashes on the device, read at the end. Records hold their positions."""
        self._modules: list[str] = []
        self._places: dict[int, tuple[str, str]] = {}
        """Sequence number of an autograd node -> module and caller of its forward."""

    def hook(self, module: nn.Module, name: str) -> list[Any]:
        """Note the module while its forward runs."""

        def enter(*_: object) -> None:
            self._modules.append(name)

        def leave(*_: object) -> None:
            self._modules.pop()

        return [
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave, always_call=True),
        ]

    def finish(self) -> list[dict[str, Any]]:
        """Return the records. Waits for the devices."""
        values = [int(one) for one in self._hashes]
        for record in self._records:
            for side in ("inputs", "outputs"):
                for value in record[side]:
                    if value["hash"] is not None:
                        value["hash"] = values[value["hash"]]
        return self._records

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named: Mapping[str, Any] = kwargs or {}
        schema = func._schema
        given = dict(zip((one.name for one in schema.arguments), args, strict=False)) | dict(named)
        written = [one.name for one in schema.arguments if one.is_write and one.name in given]
        # For every operator, since views have autograd nodes too.
        backward, module, caller = self._place()
        if schema.name.startswith(UNINITIALISED) or _is_view(schema):
            return func(*args, **named)
        # Memory to be written to may hold anything: if its value was computed, an earlier record has it.
        read = {name: value for name, value in given.items() if name not in written}
        inputs = self._values(read)
        result = func(*args, **named)
        made = _unique([*tensors_of([given[name] for name in written]), *tensors_of(result)])
        if made:
            if self._keep == len(self._records):
                self.kept = {str(n): _plain(tensor) for n, tensor in enumerate(made)}
            self._records.append(
                {
                    "operator": str(func),
                    "backward": backward,
                    "module": module,
                    "caller": caller,
                    "arguments": {name: text(value) for name, value in read.items()},
                    "inputs": inputs,
                    "outputs": self._values(made),
                }
            )
        return result

    def _values(self, value: object) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for tensor in tensors_of(value):
            one = fingerprint(tensor)
            position: int | None = None
            if one is not None:
                position = len(self._hashes)
                self._hashes.append(one)
            found.append({"tensor": text(tensor), "hash": position})
        return found

    def _place(self) -> tuple[str, str, str]:
        """Return autograd node (empty in a forward), module and caller, in a backward those of its forward."""
        node: Any = torch._C._current_autograd_node()  # pyright: ignore[reportPrivateUsage]
        module = self._modules[-1] if self._modules else ""
        if node is None:
            caller = _caller()
            # A node gets its number just before its operator is called.
            number = torch.autograd._get_sequence_nr() - 1  # pyright: ignore[reportPrivateUsage]
            self._places.setdefault(number, (module, caller))
            return "", module, caller
        # A forward recomputed by activation checkpointing.
        if self._modules:
            return "", module, _caller()
        where = self._places.get(node._sequence_nr(), ("", ""))
        return str(node.name()), *where


def _is_view(schema: Any) -> bool:
    """Return True for an operator that returns memory of its inputs unchanged."""
    return any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)


def tensors_of(value: object) -> list[Tensor]:
    """Return the tensors in a value or in nested lists of them, those of a subclass by their parts."""
    if isinstance(value, Tensor):
        inner: Any = getattr(value, "__tensor_flatten__", None)
        if inner is None:
            return [value]
        return [one for name in inner()[0] for one in tensors_of(getattr(value, name))]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [one for item in value for one in tensors_of(item)]
    return []


def text(value: object) -> str:
    """Describe an argument: a tensor without its values, such as ``float32[4, 16]``, and anything else in full."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, torch.Generator):
        # Its repr is an address.
        return "Generator"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(text, value))}]"
    return repr(value)


def _unique(tensors: list[Tensor]) -> list[Tensor]:
    """Drop repeated tensors: an operator in place returns what it has written to."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def _plain(tensor: Tensor) -> Tensor:
    value = tensor.detach()
    if value.is_complex():
        value = torch.view_as_real(value)
    # A copy, because the rest of the step may write to it.
    return value.to("cpu", copy=True).contiguous()


def _caller() -> str:
    """Return the innermost line outside of torch and of this module."""
    for frame, line in walk_stack(inspect.currentframe()):
        name = str(frame.f_globals.get("__name__", ""))
        if name != __name__ and name.partition(".")[0] != "torch":
            if name == "__main__":
                name = Path(frame.f_code.co_filename).name
            return f"{name}:{line} in {frame.f_code.co_name}"
    return ""

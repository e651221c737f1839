"""Reading tensors that somebody else wrote: safetensors only, believed only after it was checked, and never a pickle.

What is wrong with a file is a ``UsageError`` that names it. Tensors are views of the file, so a collection costs memory
only for what is in use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from accel_train import strict_json
from accel_train.config import UsageError
from accel_train.wording import shortened

PICKLES = frozenset({".bin", ".ckpt", ".distcp", ".pickle", ".pkl", ".pt", ".pth"})
"""Endings of files that Python's pickle wrote: to read one is to run the program in it."""
MAX_HEADER_BYTES = 100_000_000
"""What safetensors itself allows."""
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that turn into a parameter's own; eight bits and fewer mean nothing without their scales."""
WHOLE = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8} | {
    "BOOL": torch.bool
}
"""Types of buffers that must be exactly what the model has."""

MALFORMED = (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError)
"""What the libraries below raise for a file that is not what it should be. RecursionError is a RuntimeError."""


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor."""

    file: Path
    name: str
    """In that file."""
    dtype: str
    """As safetensors names it: F32, BF16, I64."""
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return math.prod(self.shape)


def is_pickle(path: Path) -> bool:
    """Whether the name says that reading this file would run what is in it. ``.metadata`` is DCP's."""
    return path.suffix.lower() in PICKLES or path.name == ".metadata"


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Names, types and shapes in one file, checked by safetensors; raises ``UsageError`` for anything wrong with it.

    safetensors accepts a name that comes twice and takes the last; here it is refused.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"its header would have {length} bytes, the file has {size}")
            header = json.loads(file.read(length), object_pairs_hook=_refuse_twice)
        with safe_open(path, framework="pt"):
            facts = {name: value for name, value in header.items() if name != "__metadata__"}
        return {name: TensorInfo(path, name, str(v["dtype"]), tuple(v["shape"])) for name, v in facts.items()}
    except MALFORMED as error:
        raise _unreadable(path, error) from None


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it names {next(n for n in names if names.count(n) > 1)!r} twice")
    return found


def _unreadable(path: Path, error: Exception) -> UsageError:
    return UsageError(
        f"{path}: not a sound safetensors file ({str(error) or type(error).__name__}); copy or download it again, or "
        "have it written again"
    )


def find_tensors(directory: Path, stem: str = "model", names: Collection[str] | None = None) -> dict[str, TensorInfo]:
    """Headers of ``stem.safetensors``, or of the shards that its index names; in order of name. Reads no tensor.

    ``names`` limits them. Raises ``UsageError`` for a file or an index that is not sound, and for names not there.
    """
    if not directory.is_dir():
        raise _no_directory(directory)
    single = directory / f"{stem}.safetensors"
    indexes = [path for path in _index_names(directory, stem) if path.is_file()]
    if indexes and single.exists():
        raise UsageError(f"{directory}: holds {single.name} and {indexes[0].name}; delete the one that is not current")
    if not indexes and not single.is_file():
        raise _nothing_to_read(directory, stem)
    found = find_mapped(indexes[0], read_weight_map(indexes[0])) if indexes else read_header(single)
    if not found:
        raise UsageError(f"{indexes[0] if indexes else single}: holds no tensors; give a file that does")
    if missing := sorted(set(names or ()) - found.keys()):
        held = shortened(sorted(found), 6)
        raise UsageError(f"{directory}: {stem} holds no {shortened(missing, 3)}; it holds {held}")
    return {name: found[name] for name in sorted(found) if names is None or name in names}


def _index_names(directory: Path, stem: str) -> list[Path]:
    """``model.fp16`` has its index in ``model.safetensors.index.fp16.json``, as diffusers names variants."""
    name, _, variant = stem.partition(".")
    variants = [f"{name}.safetensors.index.{variant}.json"] if variant else []
    return [directory / text for text in (f"{stem}.safetensors.index.json", *variants)]


def read_weight_map(index: Path) -> Any:
    """What an index file says where each tensor is; a name that comes twice is refused."""
    try:
        return strict_json.read_object(index)["weight_map"]
    except MALFORMED as error:
        raise UsageError(f"{index}: cannot be read as an index ({error}); copy or download it again") from None


def find_mapped(source: Path, weight_map: Any, folder: str = "") -> dict[str, TensorInfo]:
    """Headers of the files that ``weight_map`` of the file ``source`` names, held against it.

    Every file must lie in the folder of ``source``; ``folder`` is a prefix that each name has. Index and files must
    agree on every tensor.
    """
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise UsageError(f"{source}: its weight_map is not a mapping of tensor names to files; have it written again")
    headers: dict[str, dict[str, TensorInfo]] = {}
    for file in dict.fromkeys(weight_map.values()):
        headers[file] = read_header(_beside(source, file, folder))
    found: dict[str, TensorInfo] = {}
    for file, header in headers.items():
        listed = {name for name, where in weight_map.items() if where == file}
        if twice := sorted(found.keys() & header.keys()):
            raise UsageError(f"{source.parent}: {twice[0]} is in {found[twice[0]].file.name} and again in {file}")
        if differing := sorted(listed ^ header.keys()):
            where = "the index, not in the file" if differing[0] in listed else "the file, not in the index"
            raise UsageError(
                f"{source}: disagrees with {file}: {differing[0]} is in {where}; copy or download both again"
            )
        found |= header
    return found


def _beside(source: Path, file: str, folder: str) -> Path:
    """The path of a file that an index names, if it is one in the index's own folder."""
    name = file.removeprefix(folder)
    sound = file.startswith(folder) and Path(name).name == name and not set(name) & set("/\\:\0") and name != ".."
    if not sound:
        raise UsageError(
            f"{source}: names {file!r}, which is not a file beside it; an index may not lead elsewhere. Do not use it, "
            "or have it written again"
        )
    path = source.parent / name
    if is_pickle(path):
        raise pickle_refusal([path])
    if not path.is_file():
        raise UsageError(f"{source}: names {file}, which is not there; copy or download all shards")
    return path


def pickle_refusal(files: Collection[Path]) -> UsageError:
    """Why these are not read, and how to get their weights across."""
    names = shortened(sorted(path.name for path in files), 6)
    return UsageError(
        f"{min(files).parent}: the weights are a pickle ({names}), and to read a pickle is to run the program in it. "
        "Load them in the tool that made them, save them there with safetensors.torch.save_file(state_dict, "
        '"model.safetensors"), or take the safetensors files of the same model'
    )


def _no_directory(path: Path) -> UsageError:
    if path.is_file() and is_pickle(path):
        return pickle_refusal([path])
    what = "is a file" if path.exists() else "does not exist"
    return UsageError(f"{path}: {what}; give a directory that holds safetensors files")


def _nothing_to_read(directory: Path, stem: str) -> UsageError:
    held = sorted(directory.iterdir())
    pickles = [path for path in held if is_pickle(path)]
    if pickles and not any(path.suffix == ".safetensors" for path in held):
        return pickle_refusal(pickles)
    names = shortened([path.name for path in held], 6)
    return UsageError(
        f"{directory}: {stem}.safetensors is not there, nor an index of it (it holds {names}); give a directory that "
        f"holds {stem}.safetensors"
    )


class TensorReader:
    """Reads tensors by name in any order, each file opened once. A context manager."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._tensors, self._stack = tensors, ExitStack()
        self._opened: dict[Path, Any] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str) -> Tensor:
        """A view of the file; ``UsageError`` where the file has changed since its header was read."""
        info = self._tensors[name]
        try:
            if info.file not in self._opened:
                self._opened[info.file] = self._stack.enter_context(safe_open(info.file, framework="pt"))
            tensor: Tensor = self._opened[info.file].get_tensor(info.name)
        except MALFORMED as error:
            raise _unreadable(info.file, error) from None
        if tuple(tensor.shape) != info.shape and info.dtype in FLOATS:
            raise _unreadable(info.file, ValueError(f"{name} changed while it was read"))
        return tensor


def refuse_not_finite(name: str, tensor: Tensor, file: Path) -> None:
    """Raise ``UsageError`` for a tensor that holds NaN or infinity. One pass, no copy."""
    if tensor.dtype not in FLOATS.values() or tensor.numel() == 0:
        return
    low, high = torch.aminmax(tensor)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        count = int((~torch.isfinite(tensor)).sum())
        raise UsageError(
            f"{file}: {name} holds {count} value(s) that are NaN or infinite, of {tensor.numel()}; what wrote it had "
            "failed by then: take an earlier checkpoint"
        )


def load_weights(directory: Path, stem: str, model: nn.Module, *, strict: bool = True) -> list[str]:
    """Load a collection into a model that is not sharded yet. Any process, each for itself.

    Raises ``UsageError`` for names, shapes or types that do not fit and for NaN or infinity, all before the model is
    changed. ``strict`` False lets names be on one side only, and returns them; shapes must still fit.
    """
    tensors = find_tensors(directory, stem)
    required = dict(model.named_parameters())
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    known = {name: value for name, value in state.items() if isinstance(value, Tensor)} | required
    one_sided = sorted((required.keys() - tensors.keys()) | (tensors.keys() - known.keys()))
    fitting = {name: info for name, info in tensors.items() if name in known}
    misfits = {name: _differences(name, tensors.get(name), known.get(name)) for name in (*one_sided, *fitting)}
    _refuse_misfit({n: text for n, text in misfits.items() if text and not (n in one_sided and not strict)}, directory)
    with TensorReader(fitting) as reader:
        loaded = {name: reader.read(name) for name in fitting}
        for name, tensor in loaded.items():
            refuse_not_finite(name, tensor, fitting[name].file)
        model.load_state_dict(loaded, strict=False)
    return one_sided


def _differences(name: str, found: TensorInfo | None, expected: Tensor | None) -> str:
    """What does not fit, in words; empty where it fits."""
    shapes = found.shape if found else None, tuple(expected.shape) if expected is not None else None
    if found is None or expected is None or shapes[0] != shapes[1]:
        return f"{name}: {shapes[0]} in the file, {shapes[1]} in the model"
    if found.dtype in FLOATS if expected.is_floating_point() else WHOLE.get(found.dtype) == expected.dtype:
        return ""
    return f"{name}: {found.dtype} in the file, {str(expected.dtype).removeprefix('torch.')} in the model"


def _refuse_misfit(differences: Mapping[str, str], directory: Path) -> None:
    if differences:
        texts = [differences[name] for name in sorted(differences)]
        raise UsageError(
            f"{directory}: the weights do not fit this model: {shortened(texts, 3, '; ')}; give the model "
            "options and the data that they were trained with"
        )

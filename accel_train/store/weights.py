"""Read tensors from untrusted files: safetensors only, checked before use, and never a pickle.

A damaged or unsuitable file raises a ``UsageError`` with its path. Tensors are views of the file, so memory is used
only for the tensors being read.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.store import manifest, strict_json
from accel_train.store.exports.pickles import is_pickle
from accel_train.store.strict_json import Json
from accel_train.wording import shortened

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself."""
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes converted to the parameter's own. Those of eight bits or fewer are meaningless without their scales."""
INTEGERS = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes of buffers, to be matched exactly by the model."""
DTYPE_NAMES = {dtype: name for name, dtype in (FLOATS | INTEGERS).items()}
"""Names in safetensors files of the dtypes that a checkpoint can hold."""

# Exceptions of safetensors, json and torch for malformed files. RecursionError is a RuntimeError.
MALFORMED = (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError)


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's entry in a file header."""

    file: Path
    name: str
    """Name in that file."""
    dtype: str
    """Name used by safetensors: F32, BF16, I64."""
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read names, dtypes and shapes from one file. Raises ``UsageError`` for any defect found by safetensors.

    Duplicate names are refused as well. safetensors would silently take the last.
    """
    try:
        header = _read_json_header(path)
        with safe_open(path, framework="pt"):  # checks offsets and sizes
            header.pop("__metadata__", None)
        tensors: dict[str, TensorInfo] = {}
        for name, described in header.items():
            shape = tuple(described["shape"])
            tensors[name] = TensorInfo(path, name, str(described["dtype"]), shape)
        return tensors
    except MALFORMED as error:
        raise _unreadable(path, error) from None


def _read_json_header(path: Path) -> Json:
    # The format: 8 bytes of length, little-endian, then that many bytes of JSON.
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"its header would have {length} bytes, the file has {size}")
        return json.loads(file.read(length), object_pairs_hook=_refuse_duplicates)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> Json:
    seen: Json = {}
    for name, value in pairs:
        if name in seen:
            raise ValueError(f"it names {name!r} twice")
        seen[name] = value
    return seen


def _unreadable(path: Path, error: Exception) -> UsageError:
    reason = str(error) or type(error).__name__
    return UsageError(
        f"{path}: not a valid safetensors file ({reason}); copy or download it again, or have it written again"
    )


def find_tensors(directory: Path, stem: str = "model") -> dict[str, TensorInfo]:
    """Read the headers of ``stem.safetensors`` or of the shards in its index, sorted by name. Reads no tensor.

    Raises ``UsageError`` for a malformed file or index.
    """
    if not directory.is_dir():
        raise _not_a_directory(directory)
    source = _find_source(directory, stem)
    is_index = source.suffix == ".json"
    found = find_indexed(source, read_weight_map(source)) if is_index else read_header(source)
    if not found:
        raise UsageError(f"{source}: contains no tensors; give a file that does")
    return {name: found[name] for name in sorted(found)}


def _find_source(directory: Path, stem: str) -> Path:
    """Find the one file of a collection, or its index."""
    single = directory / f"{stem}.safetensors"
    indexes = [path for path in _possible_indexes(directory, stem) if path.is_file()]
    if not indexes:
        if not single.is_file():
            raise _nothing_to_read(directory, stem)
        return single
    if single.exists():
        raise UsageError(
            f"{directory}: contains both {single.name} and {indexes[0].name}; delete the one that is not current"
        )
    return indexes[0]


def _possible_indexes(directory: Path, stem: str) -> list[Path]:
    # diffusers names the index of the variant model.fp16 "model.safetensors.index.fp16.json".
    name, _, variant = stem.partition(".")
    candidates = [f"{stem}.safetensors.index.json"]
    if variant:
        candidates.append(f"{name}.safetensors.index.{variant}.json")
    return [directory / candidate for candidate in candidates]


def read_weight_map(index: Path) -> Any:
    """Read the mapping of tensors to files from an index. Duplicate names are refused."""
    try:
        return strict_json.read_object(index)["weight_map"]
    except MALFORMED as error:
        raise UsageError(f"{index}: cannot be read as an index ({error}); copy or download it again") from None


def find_indexed(source: Path, weight_map: Any, folder: str = "") -> dict[str, TensorInfo]:
    """Read the headers of all files in ``weight_map``, and require that index and files agree on every tensor.

    ``source`` is the index. Every file must lie in its folder; ``folder`` is a prefix of every file name.
    """
    is_map = isinstance(weight_map, dict)
    if not is_map or not all(isinstance(file, str) for file in weight_map.values()):
        raise UsageError(f"{source}: its weight_map is not a mapping of tensor names to files; have it written again")
    headers: dict[str, dict[str, TensorInfo]] = {}
    for file in dict.fromkeys(weight_map.values()):
        headers[file] = read_header(_shard_path(source, file, folder))
    found: dict[str, TensorInfo] = {}
    for file, header in headers.items():
        duplicates = sorted(found.keys() & header.keys())
        if duplicates:
            name = duplicates[0]
            raise UsageError(f"{source.parent}: {name} is in {found[name].file.name} and again in {file}")
        listed = {name for name, shard in weight_map.items() if shard == file}
        # A tensor in the file alone would never be loaded, and one in the index alone would fail halfway.
        differing = sorted(listed ^ header.keys())
        if differing:
            place = "the index, not in the file" if differing[0] in listed else "the file, not in the index"
            raise UsageError(
                f"{source}: disagrees with {file}: {differing[0]} is in {place}; copy or download both again"
            )
        found |= header
    return found


def _shard_path(source: Path, file: str, folder: str) -> Path:
    """Return the path of a shard named by an index. Only files in the folder of the index are allowed."""
    # An index is as foreign as the weights: ../ or an absolute path would read other files of this machine.
    name = file.removeprefix(folder)
    is_plain = Path(name).name == name and name != ".." and not set(name) & set("/\\:\0")
    if not file.startswith(folder) or not is_plain:
        raise UsageError(
            f"{source}: names {file!r}, which is not a file next to it; an index may not point elsewhere. Do not use "
            "it, or have it written again"
        )
    path = source.parent / name
    if is_pickle(path):
        raise pickle_error([path])
    if not path.is_file():
        raise UsageError(f"{source}: names {file}, which is not there; copy or download all shards")
    return path


def pickle_error(files: Collection[Path]) -> UsageError:
    """Build the error for pickled weights, with ways to convert them."""
    names = shortened(sorted(path.name for path in files), 6)
    return UsageError(
        f"{min(files).parent}: the weights are a pickle ({names}), and reading a pickle runs the program in it. Load "
        "them in the tool that made them, save them there with safetensors.torch.save_file(state_dict, "
        '"model.safetensors"), or take the safetensors files of the same model'
    )


def _not_a_directory(path: Path) -> UsageError:
    if path.is_file() and is_pickle(path):
        return pickle_error([path])
    problem = "is a file" if path.exists() else "does not exist"
    return UsageError(f"{path}: {problem}; give a directory that contains safetensors files")


def _nothing_to_read(directory: Path, stem: str) -> UsageError:
    content = sorted(directory.iterdir())
    pickles = [path for path in content if is_pickle(path)]
    if pickles and not any(path.suffix == ".safetensors" for path in content):
        return pickle_error(pickles)
    names = shortened([path.name for path in content], 6)
    return UsageError(
        f"{directory}: {stem}.safetensors is not there, nor an index of it (it contains {names}); give a directory "
        f"that contains {stem}.safetensors"
    )


class TensorReader:
    """Context manager for reading tensors by name in any order. Opens each file once."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._tensors = tensors
        self._stack = ExitStack()
        self._opened: dict[Path, Any] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str) -> Tensor:
        """Return a view of the file. Raises ``UsageError`` if the file has changed since its header was read."""
        info = self._tensors[name]
        try:
            if info.file not in self._opened:
                opened = safe_open(info.file, framework="pt")
                self._opened[info.file] = self._stack.enter_context(opened)
            tensor: Tensor = self._opened[info.file].get_tensor(info.name)
        except MALFORMED as error:
            raise _unreadable(info.file, error) from None
        # Packed dtypes such as F4 have another shape in torch than in the header.
        if info.dtype in FLOATS and tuple(tensor.shape) != info.shape:
            raise _unreadable(info.file, ValueError(f"{name} changed while it was read"))
        return tensor


def refuse_nonfinite(name: str, tensor: Tensor, file: Path) -> None:
    """Raise ``UsageError`` for a parameter with NaN or infinity. One pass and no copy."""
    if tensor.dtype not in FLOATS.values() or tensor.numel() == 0:
        return
    low, high = torch.aminmax(tensor)  # both are NaN if any element is
    if not (torch.isfinite(low) and torch.isfinite(high)):
        count = int((~torch.isfinite(tensor)).sum())
        raise UsageError(
            f"{file}: {name} contains {count} value(s) that are NaN or infinite, of {tensor.numel()}; the model had "
            "diverged when it was written: take an earlier checkpoint"
        )


def has_ema(directory: Path) -> bool:
    """Return True for a directory with EMA weights. In a checkpoint, only files listed in the manifest count.

    Raises ``UsageError`` for a damaged manifest.
    """
    names = {path.name for path in directory.glob("ema*.safetensors")}
    if names and (directory / manifest.MANIFEST).is_file() and manifest.is_checkpoint(directory):
        try:
            names &= manifest.read(directory)["files"].keys()
        except ValueError as error:
            raise UsageError(f"{error}; restore it from a copy") from None
    return bool(names)


def best_stem(directory: Path) -> Literal["model", "ema"]:
    """Return ``ema`` for a directory with EMA weights, or else ``model``."""
    return "ema" if has_ema(directory) else "model"


def load_weights(directory: Path, stem: str, model: nn.Module, *, required: Collection[str] | None = None) -> None:
    """Load a collection into a model before it is sharded. Any process, no collective.

    The file must hold the tensors named in ``required``, by default all parameters. With an EMA, buffers and frozen
    parameters then come from the weights beside it. Raises ``UsageError`` before the model is changed if names, shapes
    or dtypes do not fit, or for a parameter with NaN or infinity.
    """
    tensors = find_tensors(directory, stem)
    if stem == "ema" and required is None and any(directory.glob("model*.safetensors")):
        tensors = find_tensors(directory, "model") | tensors
    load_tensors(directory, tensors, model, required=required)


def load_tensors(
    directory: Path,
    tensors: Mapping[str, TensorInfo],
    model: nn.Module,
    *,
    required: Collection[str] | None = None,
) -> None:
    """Load tensors by their names in the model, as ``load_weights``. Errors name their ``directory``."""
    parameters = dict(model.named_parameters())
    state: Json = model.state_dict(keep_vars=True)
    # A state dict can hold other objects than tensors (`get_extra_state`).
    tensors_of_model = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    known = tensors_of_model | parameters
    missing = set(parameters if required is None else required) - tensors.keys()
    unexpected = tensors.keys() - known.keys()
    common = {name: info for name, info in tensors.items() if name in known}
    misfits = {name: _describe_misfit(name, info, known[name]) for name, info in common.items()}
    for name in missing | unexpected:
        misfits[name] = _describe_one_sided(name, tensors.get(name), known.get(name))
    _refuse_misfits(misfits, directory)
    # Inside the block, because the tensors are views of the open files.
    with TensorReader(common) as reader:
        # Not strict: names were checked above, and buffers may be missing from the file.
        model.load_state_dict(_read_finite(reader, common, known), strict=False)


def _read_finite(
    reader: TensorReader, tensors: Mapping[str, TensorInfo], known: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Read all tensors before any is used, so that NaN in the last parameter leaves the model unchanged.

    Buffers, which ``known`` tells from parameters, may hold infinity, as attention masks and range observers do.
    """
    loaded: dict[str, Tensor] = {}
    for name, info in tensors.items():
        loaded[name] = reader.read(name)
        if isinstance(known[name], nn.Parameter):
            refuse_nonfinite(name, loaded[name], info.file)
        elif loaded[name].isnan().any():
            # Only a warning, because training itself may never read this buffer.
            logger.warning(
                "%s: the buffer %s contains NaN: a batch norm keeps it after one batch that was not finite, and an "
                "evaluation that reads it gives NaN; take an earlier checkpoint, or reset that buffer",
                info.file,
                name,
            )
    return loaded


def _describe_one_sided(name: str, found: TensorInfo | None, expected: Tensor | None) -> str:
    in_file = found.shape if found is not None else "missing"
    in_model = tuple(expected.shape) if expected is not None else "missing"
    return f"{name}: {in_file} in the file, {in_model} in the model"


def _describe_misfit(name: str, found: TensorInfo, expected: Tensor) -> str:
    """Describe a difference in shape or dtype. Empty if the tensor fits."""
    shape = tuple(expected.shape)
    if found.shape != shape:
        return f"{name}: {found.shape} in the file, {shape} in the model"
    is_float = expected.is_floating_point() and found.dtype in FLOATS
    is_equal = not expected.is_floating_point() and INTEGERS.get(found.dtype) == expected.dtype
    if is_float or is_equal:
        return ""
    return f"{name}: {found.dtype} in the file, {str(expected.dtype).removeprefix('torch.')} in the model"


def _refuse_misfits(misfits: Mapping[str, str], directory: Path) -> None:
    found = [misfits[name] for name in sorted(misfits) if misfits[name]]
    if not found:
        return
    raise UsageError(
        f"{directory}: the weights do not fit this model: {shortened(found, 3, '; ')}; give the model "
        "options and the data that they were trained with"
    )

"""``accel-train checkpoints diff``: compare two sets of tensors, holding one pair in memory at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from accel_train.commands import places
from accel_train.config import UsageError, expand_path
from accel_train.store import manifest, strict_json, weights
from accel_train.store.exports.pickles import is_pickle
from accel_train.store.weights import TensorInfo, TensorReader
from accel_train.wording import shortened

CHUNK = 1 << 20  # elements compared at a time, in fp64: three temporaries of 8 MiB
SHARD = re.compile(r"(?P<stem>.+?)(?:-\d{5}-of-\d{5})?\.safetensors")
INDEX = re.compile(r"(?P<stem>.*?)\.safetensors\.index(?P<variant>.*)\.json")
# File names of model weights in different tools. Both are the collection model.
WEIGHTS = ("model", "diffusion_pytorch_model")

Collections = dict[str, dict[str, TensorInfo]]


@dataclass(frozen=True)
class Difference:
    """Difference of two tensors with the same name and shape."""

    name: str
    largest: float
    """Largest absolute difference. 0 if only bits differ (-0 and 0), infinite next to NaN or infinity."""
    at: tuple[int, ...]
    values: tuple[float, float]
    """Values of A and B at the index ``at``."""

    def __str__(self) -> str:
        if self.largest == 0:
            return f"{self.name}: the same values with different bits"
        a, b = self.values
        index = f" at {list(self.at)}" if self.at else ""
        return f"{self.name}{index}: {a:.9g} in A, {b:.9g} in B, apart by {self.largest:.3g}"


@dataclass
class Comparison:
    """Comparison of one collection in A and B."""

    only_in_a: list[str]
    only_in_b: list[str]
    common: int = 0
    differing: int = 0
    first: Difference | None = None
    """First difference by name."""
    largest: Difference | None = None
    squared_difference: float = 0.0
    squared_norm: float = 0.0
    """Squared norms of A - B and of A, over all tensors of equal shape."""
    shapes: list[str] = field(default_factory=list[str])
    types: list[str] = field(default_factory=list[str])

    @property
    def equal(self) -> bool:
        """True if names, shapes, types and all bits are the same."""
        return not (self.differing or self.only_in_a or self.only_in_b or self.shapes or self.types)

    @property
    def relative(self) -> float:
        """Norm of A - B relative to the norm of A, NaN if that is 0."""
        if not self.squared_norm:
            return math.nan
        return math.sqrt(self.squared_difference / self.squared_norm)


def diff(a: str, b: str) -> int:
    """Print the differences between A and B. Return 0 if all tensors are the same bit for bit, else 1.

    Each side is a run (its newest verified checkpoint), a checkpoint, a directory with safetensors files or a single
    file. Random states and manifests are not compared.
    """
    left = _open_side("A", a)
    right = _open_side("B", b)
    same = True
    for name in sorted(left.keys() | right.keys(), key=display_order):
        if name not in right:
            same = False
            print(f"{name}: only in A")
        elif name not in left:
            same = False
            print(f"{name}: only in B")
        else:
            compared = compare(left[name], right[name])
            same = same and compared.equal
            print("\n  ".join([f"{name}: {summary(compared)}", *_details(compared)]))
    if same:
        print("equal")
        return 0
    print("different")
    return 1


def _open_side(label: str, text: str) -> Collections:
    path = _resolve(text)
    collections = collections_of(path)
    print(f"{label}: {path}{_step_of(path)}")  # after reading, so that a wrong path prints its error alone
    return collections


def display_order(name: str) -> tuple[bool, bool, str]:
    """Sort the model first and the optimizer last."""
    return name == "optimizer", name != "model", name


def _resolve(text: str) -> Path:
    """Return the newest verified checkpoint of a run or the chosen one, and any other path unchanged."""
    path = expand_path(text)
    # A path that does not exist may choose a checkpoint by its step, or is refused with a list of what is there.
    holds_checkpoints = path.is_dir() and ((path / "checkpoints").is_dir() or manifest.committed(path))
    if holds_checkpoints or not path.exists():
        checkpoint, skipped = places.newest_at(text)
        for reason in skipped:
            print(f"skipped: {reason}")
        return checkpoint.path
    return path


def _step_of(path: Path) -> str:
    try:
        return f" (step {manifest.read(path)['step']})"
    except ValueError:
        return ""


def collections_of(path: Path) -> Collections:
    """Return every collection of tensors in a directory by name: model, ema, optimizer, and any others.

    Optimizer tensors are named ``exp_avg/layer.weight``. Pickles are never opened.
    """
    if path.is_file():
        if is_pickle(path):
            raise weights.pickle_error([path])
        return {"model": weights.read_header(path)}
    collections: Collections = {}
    stems = stems_in(path)
    model_stems = [stem for stem in WEIGHTS if stem in stems]
    for stem in stems:
        # With both names in one directory, they are different weights and keep their names.
        name = "model" if model_stems == [stem] else stem
        collections[name] = weights.find_tensors(path, stem)
    # Each process wrote a file of its own. The index makes checkpoints of different world sizes comparable.
    if (path / "optimizer" / "index.json").is_file():
        collections["optimizer"] = _flat_optimizer_state(path)
    if not collections:
        pickles = [file for file in path.iterdir() if is_pickle(file)]
        if pickles:
            raise weights.pickle_error(pickles)
        raise UsageError(
            f"{path}: contains no safetensors file, but {places.contents(path)}; give a run, a checkpoint or a "
            "directory with safetensors files"
        )
    return {name: part for name, part in collections.items() if part}


def _flat_optimizer_state(checkpoint: Path) -> dict[str, TensorInfo]:
    flat: dict[str, TensorInfo] = {}
    for key, tensors in optimizer_state(checkpoint).items():
        for name, info in tensors.items():
            flat[f"{key}/{name}"] = info
    return flat


def stems_in(directory: Path) -> list[str]:
    """Return the collections in a directory: ``model`` for model.safetensors, its shards or their index."""
    stems: set[str] = set()
    for path in directory.iterdir():
        if not path.is_file():
            continue
        if match := SHARD.fullmatch(path.name):
            stems.add(match["stem"])
        elif match := INDEX.fullmatch(path.name):
            stems.add(match["stem"] + match["variant"])
    return sorted(stems)


def optimizer_state(checkpoint: Path, keys: Collection[str] | None = None) -> dict[str, dict[str, TensorInfo]]:
    """Read the headers of a checkpoint's optimizer state by key (exp_avg, ..., master), or only those of ``keys``."""
    index = checkpoint / "optimizer" / "index.json"
    try:
        parts = dict(strict_json.read_object(index)["state"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{index}: cannot be read as an index ({error}); verify the checkpoint") from None
    if keys is not None:
        parts = {key: files for key, files in parts.items() if key in keys}
    return {key: weights.find_indexed(index, files, "optimizer/") for key, files in parts.items()}


def compare(a: Mapping[str, TensorInfo], b: Mapping[str, TensorInfo]) -> Comparison:
    """Compare two collections tensor by tensor, in order of name."""
    only_a = sorted(a.keys() - b.keys())
    only_b = sorted(b.keys() - a.keys())
    result = Comparison(only_a, only_b)
    with TensorReader(a) as left, TensorReader(b) as right:
        for name in sorted(a.keys() & b.keys()):
            result.common += 1
            if a[name].shape != b[name].shape:
                result.shapes.append(f"{name} {a[name].shape} in A, {b[name].shape} in B")
                continue
            if a[name].dtype != b[name].dtype:
                result.types.append(f"{name} {a[name].dtype} in A, {b[name].dtype} in B")
            difference = _compare_pair(name, left.read(name), right.read(name), result)
            if difference is not None:
                result.differing += 1
                result.first = result.first or difference
                if result.largest is None or difference.largest > result.largest.largest:
                    result.largest = difference
    return result


def _compare_pair(name: str, a: Tensor, b: Tensor, totals: Comparison) -> Difference | None:
    """Return None if the tensors are the same. Add the squared norms of A - B and of A to ``totals``."""
    same_bits = True
    largest = 0.0
    largest_at = 0
    values = (0.0, 0.0)
    flat_a = a.reshape(-1)
    flat_b = b.reshape(-1)
    for start in range(0, flat_a.numel(), CHUNK):
        x = flat_a[start : start + CHUNK]
        y = flat_b[start : start + CHUNK]
        # Values alone do not tell -0 from 0, nor one NaN from another.
        same_bits = same_bits and _same_bits(x, y)
        wide_x = _widened(x)
        wide_y = _widened(y)
        difference = _distance(wide_x, wide_y)
        totals.squared_difference += float(difference.square().sum())
        totals.squared_norm += float(wide_x.abs().square().sum())
        if float(difference.max()) > largest:
            i = int(difference.argmax())
            largest = float(difference[i])
            largest_at = start + i
            values = (float(wide_x[i].real), float(wide_y[i].real))
    if same_bits and largest == 0:
        return None
    return Difference(name, largest, _unravel(largest_at, tuple(a.shape)), values)


def _distance(x: Tensor, y: Tensor) -> Tensor:
    """Return |x - y|, with 0 between two NaN and infinity between NaN and a number."""
    distance = (x - y).abs()
    # Equal infinities and two NaN subtract to NaN.
    both_nan = x.isnan() & y.isnan()
    distance[(x == y) | both_nan] = 0.0
    return distance.nan_to_num_(nan=math.inf, posinf=math.inf)


def _same_bits(x: Tensor, y: Tensor) -> bool:
    """Compare the bytes of two tensors. Different types count as equal here, since they are reported separately."""
    if x.dtype != y.dtype:
        return True
    # As bytes, because for `torch.equal` NaN differs from itself.
    x_bytes = x.contiguous().view(torch.uint8)
    y_bytes = y.contiguous().view(torch.uint8)
    return torch.equal(x_bytes, y_bytes)


def _widened(x: Tensor) -> Tensor:
    """Convert to fp64 or complex fp64. A type that torch cannot convert becomes the numbers of its bytes."""
    try:
        wide = torch.complex128 if x.is_complex() else torch.float64
        return x.to(wide)
    except (RuntimeError, TypeError):  # torch can store the type, but not convert it
        return x.contiguous().view(torch.uint8).double()


def _unravel(offset: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of the element at ``offset`` in a flattened tensor."""
    index: list[int] = []
    for length in reversed(shape):
        offset, i = divmod(offset, length)
        index.append(i)
    return tuple(reversed(index))


def summary(compared: Comparison) -> str:
    """Return one line: how many tensors differ, and by how much."""
    if compared.equal:
        return f"equal ({compared.common} tensors)"
    summary = f"{compared.differing} of {compared.common} common tensors differ"
    if math.isnan(compared.relative):
        return summary
    return f"{summary}; relative difference {compared.relative:.3g}"


def _details(compared: Comparison) -> list[str]:
    lines: list[str] = []
    if compared.only_in_a:
        lines.append(f"only in A: {shortened(compared.only_in_a, 4, '; ')}")
    if compared.only_in_b:
        lines.append(f"only in B: {shortened(compared.only_in_b, 4, '; ')}")
    if compared.shapes:
        lines.append(f"shapes: {shortened(compared.shapes, 2, '; ')}")
    if compared.types:
        lines.append(f"types: {shortened(compared.types, 2, '; ')}")
    if compared.first is not None:
        lines += [f"first by name: {compared.first}", f"largest: {compared.largest}"]
    return lines

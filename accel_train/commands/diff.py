"""``accel-train checkpoints diff``: where two sets of tensors differ, and by how much. One pair in memory at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from accel_train import strict_json
from accel_train.commands import places
from accel_train.config import UsageError, expand_path
from accel_train.store import commit, manifest, weights
from accel_train.store.weights import TensorInfo, TensorReader

CHUNK = 1 << 20
"""Elements compared at a time, in fp64."""
SHARD = re.compile(r"(?P<stem>.+?)(?:-\d{5}-of-\d{5})?\.safetensors")
WEIGHTS = ("model", "diffusion_pytorch_model")
"""Names under which tools write the weights of a model; both are the collection ``model``."""

Collections = dict[str, dict[str, TensorInfo]]


@dataclass(frozen=True)
class Difference:
    """Two tensors of one name and shape that are not the same bit for bit."""

    name: str
    largest: float
    """Absolute; 0 where only bits differ (-0 and 0), infinite where one holds NaN or infinity."""
    at: tuple[int, ...]
    values: tuple[float, float]
    """Of A and of B, there."""

    def __str__(self) -> str:
        if self.largest == 0:
            return f"{self.name}: the same values in other bits"
        place = f" at {list(self.at)}" if self.at else ""
        return f"{self.name}{place}: {self.values[0]:.9g} in A, {self.values[1]:.9g} in B, apart by {self.largest:.3g}"


@dataclass
class Comparison:
    """One collection in both."""

    common: int = 0
    differing: int = 0
    first: Difference | None = None
    """By name."""
    largest: Difference | None = None
    relative: float = 0.0
    """Norm of A - B over the norm of A, over all tensors of one shape; NaN where both are 0."""
    only: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    shapes: list[str] = field(default_factory=list[str])
    types: list[str] = field(default_factory=list[str])

    @property
    def equal(self) -> bool:
        """Bit for bit, in names, shapes, types and values."""
        return not (self.differing or any(self.only) or self.shapes or self.types)


def diff(a: str, b: str) -> int:
    """Print how A and B differ; 0 if all tensors are the same bit for bit, else 1.

    Each is a run (its newest checkpoint that verifies), a checkpoint, a directory with safetensors files or one such
    file. Random states and manifests are not compared.
    """
    sides: list[Collections] = []
    for label, text in (("A", a), ("B", b)):
        path = _resolve(text)
        sides.append(collections_of(path))
        print(f"{label}: {path}{_step_of(path)}")
    same = True
    for name in sorted(sides[0].keys() | sides[1].keys(), key=lambda n: (n == "optimizer", n != "model", n)):
        if name not in sides[0] or name not in sides[1]:
            same = False
            print(f"{name}: only in {'A' if name in sides[0] else 'B'}")
            continue
        compared = compare(sides[0][name], sides[1][name])
        same = same and compared.equal
        print("\n  ".join([f"{name}: {_summary(compared)}", *_details(compared)]))
    print("equal" if same else "different")
    return 0 if same else 1


def _resolve(text: str) -> Path:
    """A run's newest checkpoint; anything else as it is."""
    path = expand_path(text)
    if path.is_dir() and ((path / "checkpoints").is_dir() or commit.committed(path)):
        checkpoint, passed_over = places.newest_at(text)
        print("\n".join(f"passed over: {reason}" for reason in passed_over), end="\n" if passed_over else "")
        return checkpoint.path
    if not path.exists():
        places.find_place(text)  # which says what is there instead
    return path


def _step_of(path: Path) -> str:
    try:
        return f" (step {manifest.read(path)['step']})"
    except ValueError:
        return ""


def collections_of(path: Path) -> Collections:
    """Every collection of tensors in a directory by its name: model, ema, optimizer, and whatever else is there.

    Optimizer tensors are named ``exp_avg/layer.weight``. Pickles are not looked into.
    """
    if path.is_file():
        if weights.is_pickle(path):
            raise weights.pickle_refusal([path])
        return {"model": weights.read_header(path)}
    stems = stems_in(path)
    named = [stem for stem in WEIGHTS if stem in stems]
    found = {"model" if [stem] == named else stem: weights.find_tensors(path, stem) for stem in stems}
    if (path / "optimizer" / "index.json").is_file():
        found["optimizer"] = {f"{k}/{n}": info for k, part in optimizer_state(path).items() for n, info in part.items()}
    if not found:
        pickles = [file for file in path.iterdir() if weights.is_pickle(file)]
        if pickles:
            raise weights.pickle_refusal(pickles)
        raise UsageError(
            f"{path}: holds no safetensors file, but {places.contents(path)}; give a run, a checkpoint or a directory "
            "with safetensors files"
        )
    return {name: part for name, part in found.items() if part}


def stems_in(directory: Path) -> list[str]:
    """Names of the collections in a directory: ``model`` for model.safetensors, its shards or their index."""
    names = [path.name for path in directory.iterdir() if path.is_file()]
    stems = {match["stem"] for name in names if (match := SHARD.fullmatch(name))}
    for name in names:
        stem, found, variant = name.removesuffix(".json").partition(".safetensors.index")
        if found and name.endswith(".json"):
            stems.add(stem + variant)
    return sorted(stems)


def optimizer_state(checkpoint: Path, keys: Collection[str] | None = None) -> dict[str, dict[str, TensorInfo]]:
    """Headers of a checkpoint's optimizer state, by its keys (exp_avg, ..., master); ``keys`` limits them."""
    index = checkpoint / "optimizer" / "index.json"
    try:
        parts = dict(strict_json.read_object(index)["state"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{index}: cannot be read as an index ({error}); verify the checkpoint") from None
    wanted = [key for key in parts if keys is None or key in keys]
    return {key: weights.find_mapped(index, parts[key], "optimizer/") for key in wanted}


def compare(a: Mapping[str, TensorInfo], b: Mapping[str, TensorInfo]) -> Comparison:
    """Compare two collections tensor by tensor, in order of name."""
    result = Comparison(only=(sorted(a.keys() - b.keys()), sorted(b.keys() - a.keys())))
    squares = [0.0, 0.0]
    with TensorReader(a) as left, TensorReader(b) as right:
        for name in sorted(a.keys() & b.keys()):
            result.common += 1
            if a[name].shape != b[name].shape:
                result.shapes.append(f"{name} {a[name].shape} in A, {b[name].shape} in B")
                continue
            if a[name].dtype != b[name].dtype:
                result.types.append(f"{name} {a[name].dtype} in A, {b[name].dtype} in B")
            found = _compare_pair(name, left.read(name), right.read(name), squares)
            if found is not None:
                result.differing += 1
                result.first = result.first or found
                if result.largest is None or found.largest > result.largest.largest:
                    result.largest = found
    result.relative = math.sqrt(squares[0] / squares[1]) if squares[1] else math.nan
    return result


def _compare_pair(name: str, a: Tensor, b: Tensor, squares: list[float]) -> Difference | None:
    """None where they are the same. Adds the squared norms of A - B and of A to ``squares``."""
    shape, at, largest, bits = tuple(a.shape), 0, 0.0, False
    values = (0.0, 0.0)
    for start, x, y in _chunks(a, b):
        bits = bits or not _same_bits(x, y)
        wide, other = _widened(x), _widened(y)
        apart = (wide - other).abs()
        apart[(wide == other) | (wide.isnan() & other.isnan())] = 0.0
        apart.nan_to_num_(nan=math.inf, posinf=math.inf)
        squares[0] += float(apart.square().sum())
        squares[1] += float(wide.abs().square().sum())
        if float(apart.max()) > largest:
            place = int(apart.argmax())
            largest, at = float(apart[place]), start + place
            values = (float(wide[place].real), float(other[place].real))
    if not bits and largest == 0:
        return None
    return Difference(name, largest, _position(at, shape), values)


def _chunks(a: Tensor, b: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    flat, other = a.reshape(-1), b.reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        yield start, flat[start : start + CHUNK], other[start : start + CHUNK]


def _same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two of one type hold the same bytes; another type is told apart by itself."""
    return x.dtype != y.dtype or torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def _widened(x: Tensor) -> Tensor:
    """As fp64 or complex fp64; types that torch only stores, as the numbers of their bytes."""
    try:
        return x.to(torch.complex128 if x.is_complex() else torch.float64)
    except (RuntimeError, TypeError):
        return x.contiguous().view(torch.uint8).double()


def _position(at: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of an element by its place in memory."""
    index: list[int] = []
    for length in reversed(shape):
        at, place = divmod(at, length)
        index.append(place)
    return tuple(reversed(index))


def _summary(compared: Comparison) -> str:
    if compared.equal:
        return f"equal ({compared.common} tensors)"
    relative = "" if math.isnan(compared.relative) else f"; relative difference {compared.relative:.3g}"
    return f"{compared.differing} of {compared.common} common tensors differ{relative}"


def _details(compared: Comparison) -> list[str]:
    lines = [f"only in {side}: {_some(names)}" for side, names in zip("AB", compared.only, strict=True) if names]
    for label, texts in (("shapes", compared.shapes), ("types", compared.types)):
        if texts:
            lines.append(f"{label}: {_some(texts, 2)}")
    if compared.first is not None:
        lines += [f"first by name: {compared.first}", f"largest: {compared.largest}"]
    return lines


def _some(texts: list[str], limit: int = 4) -> str:
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return "; ".join(texts[:limit]) + more

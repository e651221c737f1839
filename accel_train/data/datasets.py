"""Protocols of a dataset: samples by index, whole batches, collation, lengths, shapes. Fingerprints of small ones."""

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from accel_train.config import UsageError

Batch = dict[str, Tensor]
Collate = Callable[[list[Mapping[str, Tensor]]], Mapping[str, Tensor]]


class MapDataset(Protocol):
    """Dataset with a length and an index. Augmentation may use the global generators of Python, numpy and torch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Tensor]: ...


@runtime_checkable
class BatchDataset(Protocol):
    """Dataset that reads many samples at once more cheaply than one by one, such as a memory-mapped table."""

    def batch(self, indices: list[int], /) -> Mapping[str, Tensor]:
        """Return these samples in this order, as `collate_of(dataset)` would. Must not draw at random."""
        ...


@runtime_checkable
class CollatingDataset(Protocol):
    """Dataset that makes a batch of its samples itself, in training and evaluation: pads to the longest, tokenises.

    Mixing of samples (mixup) belongs in `__getitem__`: here the partners would depend on the micro-batch size.
    """

    def collate(self, samples: list[Mapping[str, Tensor]], /) -> Mapping[str, Tensor]:
        """Return the fields of a batch, each with leading dimension B. Each row must depend on its own sample alone."""
        ...


@runtime_checkable
class VariableLengthDataset(Protocol):
    """Dataset with sample lengths known without reading the samples."""

    def length(self, index: int, /) -> int:
        """Return the length of a sample in tokens. Must be cheap: called for every sample of every global batch."""
        ...

    def trim(self, batch: Mapping[str, Tensor], length: int, /) -> Mapping[str, Tensor]:
        """Return the batch with padded fields cropped to `length`, contiguous. Shorter fields stay."""
        ...


@runtime_checkable
class ShapedDataset(Protocol):
    """Dataset whose samples differ in shape. A batch has samples of one shape."""

    def sample_shape(self, index: int, /) -> tuple[int, ...]:
        """Return the shape: samples of equal shape fit into one batch. Must be cheap, like `length`."""
        ...


@runtime_checkable
class KindsDataset(Protocol):
    """Dataset in which several samples may be of one kind, such as pictures with one caption."""

    def kind(self, index: int, /) -> Hashable:
        """Return the kind of a sample. In an evaluation, a sample and its shuffled partner are of different kinds."""
        ...


class TextRow(NamedTuple):
    """One row of tokens without padding, as the model gets it. Lists have an element for each token."""

    ids: list[int]
    learned: list[bool]
    """True where the token counts in the loss."""
    positions: list[int]
    """0 at the first token of each text."""
    remarks: list[str]
    """Remark on each text, such as ``truncated``. Empty for one that is whole."""


@dataclass(frozen=True)
class TextRows:
    """Rows of a run as text, which a recipe declares for ``accel-train data rows``."""

    train: Any
    heldout: Any
    row: Callable[[Any, int], TextRow]
    """Returns a row of either dataset by its index."""
    max_length: int
    """Tokens of a row with its padding."""
    decode: Callable[[list[int]], str]
    """Returns a text without its special tokens."""
    piece: Callable[[int], str]
    special: Set[int]
    """Ids of special tokens."""
    notices: Sequence[str]


def collate_of(dataset: MapDataset) -> Collate:
    """Return the dataset's own `collate`, else torch's `default_collate` with a plainer error."""
    return dataset.collate if isinstance(dataset, CollatingDataset) else _stacked


def _stacked(samples: list[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """Return torch's `default_collate`. Raises `UsageError` with the field whose samples differ in shape."""
    try:
        return default_collate(samples)
    except RuntimeError:
        for name in samples[0]:
            shapes = {tuple(getattr(sample.get(name), "shape", ())): None for sample in samples}
            if len(shapes) > 1:
                raise UsageError(
                    f"dataset: the samples of a micro-batch have the shapes {', '.join(map(str, shapes))} in the field "
                    f"{name!r}: one shape is required; pad them in dataset[i], or give the dataset collate(samples)"
                ) from None
        raise


def refuse_other_than_map_style(dataset: object) -> None:
    """Raise `UsageError` for data without a length and an index, such as a `DataLoader`."""
    # An `IterableDataset` may have both, and raises in them.
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return
    remedy = "read it into a list, or into files with an index"
    if hasattr(dataset, "dataset"):
        remedy = "pass the dataset itself (its .dataset). Order, micro-batches and workers are made from the options"
    raise UsageError(
        f"dataset: a {type(dataset).__name__} was given, but a map-style dataset is required, with len(dataset) and a "
        f"dict of tensors in dataset[i]; {remedy}"
    )


def sample_of(dataset: MapDataset, index: int) -> Mapping[str, Tensor]:
    """Return `dataset[index]`. Raises `UsageError` if it is no dict, such as torchvision's (image, label)."""
    sample: Any = dataset[index]
    if not isinstance(sample, Mapping):
        raise UsageError(
            f"dataset[{index}] must be a dict of tensors, got a {type(sample).__name__}; name its values, as in "
            '{"image": image, "label": label}'
        )
    return cast(Mapping[str, Tensor], sample)


def fingerprint_of(dataset: MapDataset) -> str:
    """Hash every sample: a fingerprint for data small enough to be read once more at every start. No collective.

    A sample that draws random numbers draws the same ones in every call. Raises `UsageError` for a field that is no
    tensor or number.
    """
    # Imported here, because most users of this module draw nothing.
    from accel_train.rng import preserve_random_states, seed_generators

    refuse_other_than_map_style(dataset)
    digest = hashlib.sha256()
    with preserve_random_states():
        for index in range(len(dataset)):
            seed_generators(index)
            sample = sample_of(dataset, index)
            tensors = {name: _as_tensor(value, f"dataset[{index}]: field {name!r}") for name, value in sample.items()}
            digest.update(content_hash(tensors).encode())
    return digest.hexdigest()[:16]


def _as_tensor(value: object, field: str) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        required = f"{field}: a tensor is required, got a {type(value).__name__}"
        raise UsageError(f"{required}. Encode it as numbers, or leave it out") from None


def content_hash(tensors: Mapping[str, Tensor]) -> str:
    """Hash names, dtypes, shapes and bytes of tensors with sha256, in the order of the names."""
    digest = hashlib.sha256()
    # Dtype and shape as well: the same bytes mean other numbers in another dtype.
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        # An empty tensor may have a stride of 0, which cannot be viewed as bytes.
        if tensor.numel():
            content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            digest.update(content)
    return digest.hexdigest()

"""Protocols of a dataset: samples by index, whole batches, lengths, shapes."""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

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
        """Return these samples in this order, as torch's `default_collate` would. Must not draw at random."""
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

"""Declarations of a recipe for the use of its trained models: a pipeline, and the description in config.json.

``config.json`` of a checkpoint holds the architecture, and beside it, under the names of ``DESCRIBED``, everything
needed to use the weights rightly: the objective (it gives their outputs a meaning), the samplers' settings, the
normalisation and the units. ``accel_train.load`` reads it and returns the pipeline.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

from accel_train.config import UsageError, expand_path
from accel_train.options.tree import to_tree

if TYPE_CHECKING:
    from torch import Tensor, nn

FORMAT = 1
DESCRIBED = ("recipe", "pipeline", "objective", "sampler", "normalisation", "units", "card")
"""Keys beside the architecture in config.json."""
ADAPTER_DESCRIPTION = "pipeline.json"
"""Counterpart of config.json for adapters: next to a config.json, transformers would take their weights for a whole
model's."""

PLACE = "REPOSITORY"
"""Stands for the arguments that name the repository and its revision, in code for the card on the Hub."""

T = TypeVar("T", bound="TrainedModel", covariant=True)


@dataclass(frozen=True)
class Example:
    """One call of the model, stored with its result in an export."""

    name: str
    arguments: Mapping[str, Any]
    """Arguments by name: tensors, plain values, and named tuples of these from the model's own file."""
    function: Callable[..., Any] | None = None
    """One of ``Pipeline.standalone``, called with the model and config.json before the arguments. None: the model."""

    def call(self, model: Callable[..., Any], description: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs by name, without those that are None."""
        result = (
            model(**self.arguments) if self.function is None else self.function(model, description, **self.arguments)
        )
        outputs: dict[str, Any] = result._asdict() if hasattr(result, "_asdict") else {"output": result}
        return {name: value for name, value in outputs.items() if value is not None}


class WrittenModel(NamedTuple):
    """Facts about a whole model that a pipeline wrote from adapters and their base."""

    line: str | None = None
    """Line about it for the user. None: it is proven like any other export, and the proof has its line."""
    outputs: Sequence[Mapping[str, Any]] | None = None
    """Outputs of each of ``Pipeline.examples``, by name, from the model in memory. None: from the written files."""


class SampleOptions(Protocol):
    """Options of ``accel-train sample`` that every pipeline has beside its own."""

    @property
    def seed(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def output(self) -> str | None: ...


class TrainedModel(Protocol):
    """Interface of a recipe's model for ``accel-train sample``: options, loading, sampling."""

    options: ClassVar[type]
    """Options of ``sample``, a frozen dataclass. ``device`` is required, and `seed` and `output` mean what they do in
    ``SampleOptions``."""

    @classmethod
    def from_directory(cls: type[T], directory: Path, device: str) -> T:
        """Read a checkpoint or an export, whose files are verified already. Raises ``UsageError``."""
        ...

    def sample(self, options: Any) -> list[str]:
        """Sample for ``accel-train sample`` and return the lines to print."""
        ...


class Pipeline(TrainedModel, Protocol):
    """A trained model with everything that its calls need. Calls take inputs in the units of the data.

    Those of this package are in ``accel_train.domains.NAME.pipeline``. Options have the fields of ``SampleOptions``.
    """

    recipe: ClassVar[str]
    """Name of the recipe, for config.json."""
    tag: ClassVar[str | None]
    """``pipeline_tag`` on the Hub. None if the Hub has no fitting tag."""
    usage: ClassVar[str]
    """A line of Python that calls ``pipeline``, for the card on the Hub."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def standalone(self) -> tuple[Any, ...] | ModuleType | None:
        """Parts to cut out of the sources for an export: the class of the model, that of its config, and functions that
        sample, called with the model, config.json and their arguments. For a model of another library, such as
        transformers, a module that is copied whole: its ``load(directory)`` returns the model, and its functions are
        called alike. None: an export has weights and config.json alone."""
        ...

    def examples(self) -> Sequence[Example]:
        """Return fixed calls that reach every part of the model that a user of it may need."""
        ...


@runtime_checkable
class Convertible(Protocol):
    """Pipeline whose weights can also be written in the formats of other programs."""

    @classmethod
    def write_for_others(cls, directory: Path) -> list[str]:
        """Write further files into an export, beside its weights and config.json, and return lines for its readers."""
        ...


def describe(
    pipeline: type[Pipeline],
    shape: object,
    *,
    objective: Mapping[str, object],
    sampler: Mapping[str, object],
    normalisation: Mapping[str, Any],
    units: Mapping[str, str],
    card: Mapping[str, Any],
) -> dict[str, Any]:
    """Return config.json of a model: its architecture, ``shape``, and how it is used.

    ``shape`` is a dataclass, or the config.json of another library, whose earlier description, if any, is replaced.
    Options map names to dataclasses or plain values. ``card`` may have ``datasets`` (Hub ids), ``base_model``,
    ``measured_on`` (the data of the metrics) and ``other_programs``: mappings with ``program``, its ``code`` for
    ``PLACE``, and for adapters the file of an export that it ``needs``. ``from_pretrained`` of the model's class reads
    the architecture and leaves out the rest.
    """
    architecture = _plain_architecture(shape)
    taken = sorted({*DESCRIBED, "format"} & architecture.keys())
    assert not taken, f"{taken} of {type(shape).__name__} would be overwritten"
    return {
        **architecture,
        "format": FORMAT,
        "recipe": pipeline.recipe,
        # A name, not code: `load` decides whether it may be imported.
        "pipeline": f"{pipeline.__module__}:{pipeline.__qualname__}",
        "objective": _plain(objective),
        "sampler": _plain(sampler),
        "normalisation": dict(normalisation),
        "units": dict(units),
        "card": {"pipeline_tag": pipeline.tag, "usage": pipeline.usage} | dict(card),
    }


def _plain_architecture(shape: object) -> dict[str, Any]:
    if not isinstance(shape, Mapping):
        return to_tree(shape)
    given = cast("Mapping[str, Any]", shape)
    # A model that was tuned further has the description of its source.
    written = (*DESCRIBED, "format") if "pipeline" in given else ()
    return {name: value for name, value in given.items() if name not in written}


def _plain(options: Mapping[str, object]) -> dict[str, Any]:
    return {
        name: to_tree(value) if hasattr(value, "__dataclass_fields__") else value for name, value in options.items()
    }


def settings(description: Mapping[str, Any], directory: Path) -> Mapping[str, Any] | None:
    """Return the description if it says how the model is used. None for a config.json of another library.

    Raises ``UsageError`` for the format of another version.
    """
    found = description.get("format")
    if found is None:
        return None
    # A description that means something else would give wrong samples without an error.
    if found != FORMAT:
        raise UsageError(
            f"{directory}: its description, format {found!r}, was written by another version of accel_train; this one "
            f"reads {FORMAT}. Install the version that wrote it, or a newer one"
        )
    return description


def read_lines(file: str | None, option: str = "text_file") -> list[str]:
    """Return the lines with text of a file. ``option`` is the option that names it, for errors.

    Raises ``UsageError`` if the file cannot be read, or holds no such line.
    """
    if file is None:
        return []
    try:
        # Some editors begin a file with a byte-order mark, which is not part of the first text.
        lines = expand_path(file).read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option} {file}: cannot be read ({error}); a file in UTF-8 is required") from None
    filled = [line for line in lines if line.strip()]
    if not filled:
        raise UsageError(f"{option} {file}: contains no line with text; one text per line is required")
    return filled


def listed(texts: object) -> list[str]:
    """Return texts as a list. A single string is one text. Raises ``UsageError`` for anything else."""
    # A string is a sequence too, of characters.
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
        return [one_text(texts)]
    return [one_text(text) for text in cast("Iterable[object]", texts)]


def one_text(text: object, what: str = "text") -> str:
    """Return a text as it is. Raises ``UsageError`` for anything that is no string."""
    if not isinstance(text, str):
        raise UsageError(f"{what} {repr(text)[:60]}: is of type {type(text).__name__}; a string is required")
    return text


def numbers(what: str, values: object) -> Tensor:
    """Return values as a tensor. Raises ``UsageError`` for anything of which torch makes none."""
    import torch

    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        kind = type(values).__name__
        raise UsageError(f"{what} {repr(values)[:60]}: is of type {kind}; a tensor of numbers is required") from None


def file_stem(prompt: str, seed: int, content: bytes) -> str:
    """Return a file name for a sample: only a file with the same prompt, seed and content is replaced.

    The prompt is hashed, because it may be too long for a file name, or have characters that no file name allows.
    """
    of_prompt, of_content = (hashlib.blake2b(each, digest_size=4).hexdigest() for each in (prompt.encode(), content))
    return f"{of_prompt}-{seed}-{of_content}"

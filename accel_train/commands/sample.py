"""``accel-train sample``: use a trained model from the command line, as its recipe's pipeline does."""

from __future__ import annotations

import errno
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accel_train import loading
from accel_train.commands.bundled import declaration_of, find_recipe
from accel_train.config import UsageError, disk_error, expand_path, refuse_unwritable
from accel_train.options.loading import read_options
from accel_train.pipeline import TrainedModel

TEXTS = ("prompt", "text", "messages")
"""Options whose values are read by a tokenizer."""


def sample(place: str, arguments: Sequence[str], recipe: str | None = None) -> int:
    """Load the model at ``place``, as ``accel_train.load`` does, and sample as the flags of its pipeline ask.

    ``recipe`` is the file or name of the recipe that trained it, for a pipeline outside this package: the file is
    imported. Prints the result or where it was written, and returns exit code 0. Raises ``UsageError``.
    """
    declared = None if recipe is None else _declared(recipe)
    directory = loading.find(place)
    pipeline = declared or loading.pipeline_of(directory)
    options: Any = read_options(pipeline.options, arguments, f"accel-train sample {place}")
    _refuse_undecodable(options)
    loading.refuse_absent(options.device)
    # Read first, because a model may take a minute to load.
    adapters = _named(getattr(options, "adapters", ()))
    loaded = pipeline.from_directory(directory, options.device)
    loading.attach(loaded, adapters)
    with _writing(options):
        lines = loaded.sample(options)
    for line in lines:
        print(line)
    return 0


@contextmanager
def _writing(options: Any) -> Generator[None]:
    """Create the folder of ``output``. An ``OSError`` about ``output`` becomes a ``UsageError``, any other does not."""
    given = getattr(options, "output", None)
    if given is None:
        yield
        return
    path = expand_path(given)
    remedy = "give a place with write access, and free space"
    with refuse_unwritable(f"--output {given}", remedy):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except OSError as error:
        file = Path(error.filename or "")
        # That the disk is full is noticed by a write, whose error names no file, or by a second file beside the first.
        is_on_its_disk = error.filename is None or file.parent == path.parent
        is_full = is_on_its_disk and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not is_full and path not in (file, *file.parents):
            raise
        raise disk_error(error)(f"--output {given}: cannot be written ({error.strerror}); {remedy}") from None


def _refuse_undecodable(options: Any) -> None:
    """Raise ``UsageError`` for a text with bytes that are not UTF-8. Paths may have them."""
    for name in TEXTS:
        # The pipeline of a custom recipe may take one text, or none.
        given = getattr(options, name, None)
        texts = given if isinstance(given, tuple) else (given,)
        for text in texts:
            # Python passes such bytes of the command line on as surrogates, which no tokenizer accepts.
            if isinstance(text, str) and any("\ud800" <= letter <= "\udfff" for letter in text):
                raise UsageError(f"--{name} {text[:60]!r}: valid UTF-8 is required; convert the text to it")


def _named(adapters: Sequence[str]) -> dict[str, str]:
    """Parse NAME=PLACE, and return the places by name. Raises ``UsageError`` for another form or a repeated name."""
    found: dict[str, str] = {}
    for each in adapters:
        name, separator, place = each.partition("=")
        if not (name and separator and place):
            raise UsageError(f"adapters {each!r}: NAME=PLACE is required, as in --adapters polite=runs/polite")
        if name in found:
            raise UsageError(f"adapters {each!r}: the name {name!r} is given twice; give each its own")
        found[name] = place
    return found


def _declared(recipe: str) -> type[TrainedModel]:
    """Return the pipeline declared by a recipe's file."""
    pipeline: type[TrainedModel] | None = getattr(declaration_of(find_recipe(recipe)), "pipeline", None)
    if pipeline is None:
        raise UsageError(
            f"recipe {recipe!r}: its Config declares no pipeline, the class that loads its model and samples from it. "
            "Write one and declare it, recipe: ClassVar = experiment.Recipe(pipeline=MyPipeline): docs/use.md, "
            '"A pipeline for a recipe of your own"'
        )
    return pipeline

"""Files that define a pipeline of diffusers beside the weights of what is trained: a change of one is another base."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

INDEX = "model_index.json"
UNUSED = ("safety_checker", "feature_extractor", "image_encoder")
"""Components that are not loaded."""
UNREAD = (*UNUSED, "requires_safety_checker")
"""Keys of model_index.json that say nothing about the components in use."""
CONFIGS = ("config.json", "scheduler_config.json")
WITH_VOCABULARY = ("tokenizer", "processor")
"""Begin the names of components that are defined by all files of these patterns."""
VOCABULARY = ("*.json", "merges.txt", "vocab.txt", "*.model", "*.jinja")


def defining_files(
    directory: Path,
    index: Mapping[str, Sequence[Any]],
    trained: Sequence[str],
    weight_files: Callable[[str], Sequence[str]],
) -> tuple[str, ...]:
    """Return the names in ``directory`` of the pipeline's files in use, without the weights of ``trained`` components.

    ``index`` has library and class of each component.
    """
    names = [INDEX]
    for component in sorted(index.keys() - set(UNUSED)):
        patterns = VOCABULARY if component.startswith(WITH_VOCABULARY) else CONFIGS
        found = {path.name for pattern in patterns for path in (directory / component).glob(pattern)}
        if component not in trained:
            found.update(weight_files(component))
        if index[component][0] is not None:
            names += [f"{component}/{name}" for name in sorted(found)]
    return tuple(names)

"""A start from weights that were trained on other tasks: which of their tensors each of the model's takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from accel_train.domains.pde.data.scales import Origins
from accel_train.metrics import logs
from accel_train.store.weights import find_tensors

logger = logging.getLogger(__name__)

OF_TASK = (
    "encoders",
    "target_encoders",
    "conditioning.parameters_of",
    "operator.places",
    "decoder.points",
    "decoder.heads",
)
"""Module lists of a `PdeTransformer` with an entry for each task."""
RESIDUAL = "residual."


def names_in_weights(model: nn.Module, directory: Path | None, origins: Origins | None) -> dict[str, str | None] | None:
    """Map each tensor of a `PdeTransformer` to its name in the weights of `directory`, or to None for a new one.

    All that is shared by the tasks is taken in any case. The residual network corrects the predictions of its tasks, so
    it is new with other tasks. Returns None if every tensor has the same name there, or without such weights.
    """
    if directory is None or origins is None:
        return None
    trained = find_tensors(directory, "model")
    own_residual = getattr(model, "residual", None) is not None
    has_residual = any(name.startswith(RESIDUAL) for name in trained)
    if origins.same_tasks and own_residual == has_residual:
        return None
    if own_residual:
        logs.info(logger, f"the residual network starts from initial values, not from {directory}")
    elif has_residual:
        logs.info(logger, f"the residual network of {directory} is left out: it corrects predictions of its own tasks")
    names: dict[str, str | None] = {}
    for name in model.state_dict():
        names[name] = None if name.startswith(RESIDUAL) else _renumbered(name, origins.of_tasks)
    # Shared tensors that the model lacks stay in the map, so that the loader refuses other options of the model.
    own = tuple(f"{modules}." for modules in (*OF_TASK, "residual"))
    return {name: name for name in trained if not name.startswith(own)} | names


def _renumbered(name: str, origins: Sequence[int | None]) -> str | None:
    """Return the name with the number of the task there, None for a new task."""
    for modules in OF_TASK:
        if name.startswith(f"{modules}."):
            number, _, rest = name.removeprefix(f"{modules}.").partition(".")
            origin = origins[int(number)]
            return None if origin is None else f"{modules}.{origin}.{rest}"
    return name

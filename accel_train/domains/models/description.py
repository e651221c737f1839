"""Read how a trained model is used: the objective and the sampler in config.json of a checkpoint or an export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_train import pipeline
from accel_train.config import UsageError
from accel_train.store import strict_json


def read_description(directory: Path) -> Mapping[str, Any]:
    """Return the description of a model, empty for one of another library. Raises ``UsageError``."""
    path = directory / "config.json"
    try:
        description = strict_json.read_object(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); restore it from a copy") from None
    return pipeline.settings(description, directory) or {}

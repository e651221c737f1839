"""Loader of the exported ``model.py``: this function is cut out of here and added to the model."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn


def build_model(model_class: Any, config_class: Any, directory: Path) -> Any:
    """Build the model of config.json and load model*.safetensors, in fp32 on the CPU, ready for inference."""
    from safetensors.torch import load_file

    described: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
    names = [field.name for field in fields(config_class)]
    model: nn.Module = model_class(config_class(**{name: described[name] for name in names if name in described}))
    weights: dict[str, Any] = {}
    for file in sorted(directory.glob("model*.safetensors")):
        weights |= load_file(file)
    model.load_state_dict(weights, strict=True)
    return model.eval()

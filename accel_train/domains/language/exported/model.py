"""The language model of this folder. Needs torch, transformers, and safetensors to read the weights.

    model = load()  # of transformers: AutoModelForCausalLM.from_pretrained of this folder loads the same

Copied whole from the sources of accel_train, licensed under the Apache License 2.0. The tokenizer beside it is read by
``AutoTokenizer.from_pretrained``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def load(directory: str | Path = Path(__file__).parent) -> Any:
    """Load model and weights in fp32 on the CPU, for inference. Runs no code of the folder.

    Raises ``ValueError`` or ``OSError`` for a folder without a causal language model, and for missing weights.
    """
    try:
        # Named, because a config.json may name kernels on the Hub, which are code.
        return _load(directory, "sdpa")
    except (ImportError, ValueError) as error:
        if "attention" not in str(error).lower():
            raise
        return _load(directory, "eager")


def _load(directory: str | Path, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    model, found = loader.from_pretrained(
        str(directory),
        dtype=torch.float32,
        attn_implementation=attention,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    # They would silently be random.
    if found["missing_keys"]:
        raise ValueError(f"weights that are not in the files: {', '.join(sorted(found['missing_keys'])[:3])}")
    return model.eval()


def logits(model: Any, description: Mapping[str, Any], input_ids: Tensor) -> Tensor:
    """Return the logits of the next token, (B, S, V), for tokens (B, S). ``description`` is config.json."""
    del description
    return model(input_ids=input_ids, use_cache=False).logits

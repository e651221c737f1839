"""Tokens at which generation ends: those of the base, and the one with which a chat template ends an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

CONFIG_FILE = "generation_config.json"


def end_answers(model: nn.Module, token: int | None, tokenizer: Any) -> list[str]:
    """Let generation end at the ``token`` that ends an answer, and return a notice. None: there is none.

    The chat template of a model that is tuned on chats may end its answers in another way than the base its texts.
    """
    if token is None or not _add_ends(model, [token]):
        return []
    piece = tokenizer.convert_ids_to_tokens(token)
    return [f"generation ends at {piece!r} as well, with which the chat template ends an answer"]


def add_saved_ends(model: nn.Module, directory: Path) -> None:
    """Let generation end where generation_config.json in ``directory``, if there is one, says it."""
    file = directory / CONFIG_FILE
    if file.is_file():
        _add_ends(model, _listed(json.loads(file.read_text("utf-8")).get("eos_token_id")))


def _add_ends(model: nn.Module, tokens: Sequence[int]) -> bool:
    """Return False if generation ends at these tokens already, or the model cannot generate."""
    config: Any = getattr(model, "generation_config", None)
    if config is None:
        return False
    ends = _listed(config.eos_token_id)
    new = [token for token in tokens if token not in ends]
    if new:
        config.eos_token_id = [*ends, *new]
    return bool(new)


def _listed(tokens: int | Sequence[int] | None) -> list[int]:
    if tokens is None:
        return []
    return [tokens] if isinstance(tokens, int) else list(tokens)

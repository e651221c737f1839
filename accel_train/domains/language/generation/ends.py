"""Tokens at which generation ends: those of the base, and the one with which a chat template ends an answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from accel_train.config import UsageError
from accel_train.store import strict_json

CONFIG_FILE = "generation_config.json"


def end_answers(model: nn.Module, token: int | None, tokenizer: Any) -> list[str]:
    """Let generation also end at the ``token`` that ends an answer, and return a notice. Does nothing for None.

    A chat template may end answers with another token than the one that ends the texts of the base.
    """
    if token is None or not add_ends(model, [token]):
        return []
    piece = tokenizer.convert_ids_to_tokens(token)
    return [f"generation also ends at {piece!r}, with which the chat template ends an answer"]


def add_saved_ends(model: nn.Module, directory: Path) -> None:
    """Let generation also end at the tokens in generation_config.json of ``directory``, if it has that file.

    Raises ``UsageError`` for a damaged file.
    """
    add_ends(model, saved_ends(directory))


def saved_ends(directory: Path) -> list[int]:
    """Return the end tokens in generation_config.json, none without it. Raises ``UsageError`` for a damaged file."""
    file = directory / CONFIG_FILE
    try:
        tokens = _listed(strict_json.read_object(file).get("eos_token_id"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read ({error}); restore it from a copy, or export it again") from None
    if not all(type(token) is int for token in tokens):
        raise UsageError(
            f"{file}: eos_token_id is {tokens}; the id of a token, or a list of them, is required: restore the file "
            "from a copy, or export it again"
        )
    return tokens


def add_ends(model: nn.Module, tokens: Sequence[int]) -> bool:
    """Add end tokens to the model's. Returns False if it already has them all, or cannot generate."""
    config: Any = getattr(model, "generation_config", None)
    if config is None:
        return False
    ends = _listed(config.eos_token_id)
    new = [token for token in tokens if token not in ends]
    if new:
        config.eos_token_id = [*ends, *new]
    return bool(new)


def _listed(tokens: Any) -> list[int]:
    """Return the end tokens of a config, one id, several or None, as a list."""
    if tokens is None:
        return []
    return list(tokens) if isinstance(tokens, (list, tuple)) else [tokens]

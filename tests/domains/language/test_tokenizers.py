"""Weights to start from belong to the pieces of text that they were trained with."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_train.config import UsageError
from accel_train.domains.language import tokenizers
from tests.domains.language import tiny


def test_weights_of_other_pieces_are_refused(tmp_path: Path) -> None:
    """Of the same number: a model takes them, and reads each number as another text."""
    made = [tokenizers.train_tokenizer(texts, 300) for texts in (["abab"] * 9, ["cdcd"] * 9)]
    assert len(made[0].get_vocab()) == len(made[1].get_vocab())
    made[0].save_pretrained(tmp_path)
    tokenizers.refuse_other_pieces(made[0], tmp_path)
    with pytest.raises(UsageError, match=rf"--init_from: .* know \d+ pieces .* --data.tokenizer {tmp_path}"):
        tokenizers.refuse_other_pieces(made[1], tmp_path)


def test_weights_without_a_tokenizer_are_taken(tmp_path: Path) -> None:
    tokenizers.refuse_other_pieces(tiny.tokenizer(), tmp_path)
    tokenizers.refuse_other_pieces(tiny.tokenizer(), None)


def test_a_tokenizer_without_its_vocabulary_is_refused(tmp_path: Path) -> None:
    """transformers builds one, for which every text is empty."""
    from transformers import Qwen2Tokenizer

    Qwen2Tokenizer(vocab={"a": 0, "b": 1, "<|endoftext|>": 2}, merges=[]).save_pretrained(tmp_path)
    tokenizers.load_tokenizer(str(tmp_path), None)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"tokenizer '.*': its tokenizer has no vocabulary \(0 .* download it again"):
        tokenizers.load_tokenizer(str(tmp_path), None)

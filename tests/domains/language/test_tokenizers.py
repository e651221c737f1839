"""Weights to start from belong to the pieces of text that they were trained with."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_train.config import UsageError
from accel_train.domains.language import tokenizers
from tests.domains.language import tiny
from tests.hub_server import serving


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


def test_pretrained_weights_take_no_other_tokenizer(tmp_path: Path) -> None:
    """The ids fit, and each of their embeddings would be read as another piece of text."""
    made = [tokenizers.train_tokenizer(texts, 300) for texts in (["abab"] * 9, ["cdcd"] * 9)]
    made[0].save_pretrained(tmp_path)
    assert not tokenizers.refuse_other_than_source(made[0], "same", str(tmp_path), None)
    says = (
        rf"^--data.tokenizer x: \d+ of \d+ ids stand for different pieces .* --model.source {tmp_path} \(the first is "
        r"\d+, '.*[cd].*' here and '.*[ab].*' there\).* Leave --data.tokenizer out, or train from scratch"
    )
    with pytest.raises(UsageError, match=says):
        tokenizers.refuse_other_than_source(made[1], "x", str(tmp_path), None)


def test_added_tokens_may_differ_from_those_of_the_weights(tmp_path: Path) -> None:
    tiny.tokenizer().save_pretrained(tmp_path)
    more = tiny.tokenizer()
    more.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    assert not tokenizers.refuse_other_than_source(more, "more", str(tmp_path), None)
    more.save_pretrained(tmp_path)
    renamed = tiny.tokenizer()
    renamed.add_tokens(["<|user|>"], special_tokens=True)
    assert not tokenizers.refuse_other_than_source(renamed, "renamed", str(tmp_path), None)


def test_weights_without_a_tokenizer_cannot_be_compared(tmp_path: Path) -> None:
    tiny.model().save_pretrained(tmp_path)
    notices = tokenizers.refuse_other_than_source(tiny.tokenizer(), "mine", str(tmp_path), None)
    assert notices == [
        f"{tmp_path} has no tokenizer that can be loaded, so it is unknown whether its weights were trained with that "
        "of --data.tokenizer mine"
    ]


def test_a_source_that_is_not_there_is_named_and_not_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.save(tmp_path / "qwen2")
    monkeypatch.chdir(tmp_path)
    says = r"^--model.source 'qwen9': is not a folder \(did you mean 'qwen2'\?\), and cannot be loaded from the Hub"
    # One that answers: without any, each request is made again and again.
    with serving(monkeypatch, tmp_path / "home"):
        with pytest.raises(UsageError, match=says):
            tokenizers.load_tokenizer("qwen9", None, of_source=True)
        with pytest.raises(
            UsageError, match=r"^--model.source 'org/name': is not a folder, and cannot be loaded from the"
        ):
            tokenizers.load_tokenizer("org/name", None, of_source=True)
    (tmp_path / "qwen2" / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"^--model.source 'qwen2': its tokenizer .* that they were trained with"):
        tokenizers.load_tokenizer("qwen2", None, of_source=True)

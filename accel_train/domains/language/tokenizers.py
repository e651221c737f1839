"""The tokenizer of a model, or a byte-level BPE trained on the texts, with its chat template and special tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from accel_train.config import UsageError, expand_path
from accel_train.data.artifacts import cached_folder
from accel_train.domains.models.pretrained import near_folder, refuse_empty_vocabulary

TRAINED = "trained"
MIN_VOCAB_SIZE = 300
SAMPLE_TEXTS = 2**17
SAMPLE_CHARACTERS = 2**26
BEGIN, END, PAD = "<s>", "</s>", "<pad>"
TOKENIZER_FILE = "tokenizer.json"


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
    """Train a byte-level BPE, with ``<s>`` at the start of every text. Equal texts give equal merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    # With the space, a word has the same pieces at the start of a text as inside it.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END, PAD],
        # All 256 bytes, or a byte missing from the texts could not be encoded; in an order that every process shares.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END, pad_token=PAD)


def cached_tokenizer(source: str, texts: Callable[[], Sequence[str]], vocab_size: int, cache: Path) -> Any:
    """Return ``train_tokenizer`` from the cache, trained if it is not there. One process trains, others wait for it.

    ``source`` identifies the result of ``texts``, which is called only if the tokenizer must be trained.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise UsageError(
            f"--data.vocab_size {vocab_size}: 256 pieces are single bytes and 3 are special; at least {MIN_VOCAB_SIZE} "
            "is required; 2048 suits a small corpus."
        )
    digest = hashlib.sha256(f"causal-bpe-3 {vocab_size} {source}".encode()).hexdigest()
    folder = cache / "tokenizers" / digest

    def write(directory: Path) -> None:
        train_tokenizer(texts(), vocab_size).save_pretrained(directory)

    cached_folder(folder, write)
    return load_tokenizer(str(folder), None)


def sampled(texts: Iterable[str]) -> list[str]:
    """Return all texts, or every 2nd, 4th, 8th ... of many: at most 131,072 texts and 64 Mi characters."""
    kept: list[str] = []
    every = 1
    characters = 0
    for number, text in enumerate(texts):
        if number % every:
            continue
        kept.append(text)
        characters += len(text)
        while len(kept) > 1 and (len(kept) > SAMPLE_TEXTS or characters > SAMPLE_CHARACTERS):
            # Thinned, not cut off, so that the sample spans all texts.
            kept = kept[::2]
            every *= 2
            characters = sum(map(len, kept))
    return kept


def identity_of(tokenizer: Any) -> str:
    """Hash everything the tokens of a row depend on: vocabulary and merges, special tokens, the chat template."""
    facts = [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, tokenizer.eos_token_id]
    described = json.dumps([*facts, tokenizer.special_tokens_map], sort_keys=True, default=str)
    return hashlib.sha256(described.encode("utf-8", "surrogatepass")).hexdigest()


def load_tokenizer(name: str, revision: str | None, *, of_source: bool = False) -> Any:
    """Load the tokenizer of a Hub id or folder, with ``of_source`` that of the pretrained weights.

    Raises ``UsageError`` for a missing or slow one.
    """
    from transformers import AutoTokenizer

    try:
        # A tokenizer that warns of long texts does not know that they are split later.
        tokenizer: Any = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False, verbose=False)
    except Exception as error:  # failures of hub, network, code and format have no common type
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UsageError(_source_not_loaded(name, reason) if of_source else _not_loaded(name, reason)) from None
    refuse_empty_vocabulary(f"tokenizer {name!r}", tokenizer)
    if not tokenizer.is_fast:
        raise UsageError(
            f"tokenizer {name!r}: {type(tokenizer).__name__} is written in Python; one with a tokenizer.json is "
            "required, which knows the position of each token in the text. Name a model with a fast tokenizer."
        )
    return tokenizer


def _not_loaded(name: str, reason: str) -> str:
    return (
        f"tokenizer {name!r} cannot be loaded ({reason}). A folder with tokenizer.json or a Hub id is required "
        "(without a network it must be in the cache); code from a repository is never run. Name another tokenizer with "
        "--data.tokenizer, or 'trained'."
    )


def _source_not_loaded(name: str, reason: str) -> str:
    if expand_path(name).is_dir():
        # Not 'trained': the ids would then stand for other pieces than the weights know.
        return (
            f"--model.source {name!r}: its tokenizer cannot be loaded ({reason}). A tokenizer.json next to the weights "
            "is required, or in --data.tokenizer the tokenizer that they were trained with."
        )
    return (
        f"--model.source {name!r}: is not a folder{near_folder(name)}, and cannot be loaded from the Hub ({reason}). "
        "The folder or the Hub id of a causal language model is required (without a network it must be in the cache)."
    )


def refuse_other_than_source(tokenizer: Any, name: str, source: str, revision: str | None) -> list[str]:
    """Raise ``UsageError`` for a tokenizer whose ids stand for other pieces than in that of ``--model.source``.

    ``name`` is that of ``tokenizer``. Added tokens may differ. Returns a notice if the source has none to compare with.
    """
    try:
        known = load_tokenizer(source, revision)
    except UsageError:
        return [
            f"{source} has no tokenizer that can be loaded, so it is unknown whether its weights were trained with "
            f"that of --data.tokenizer {name}"
        ]
    # Special tokens are renamed on purpose, such as the reserved ones of a base model.
    added = known.added_tokens_decoder.keys() | tokenizer.added_tokens_decoder.keys()
    theirs = {number: piece for piece, number in known.get_vocab().items() if number not in added}
    ours = {number: piece for piece, number in tokenizer.get_vocab().items()}
    other = sorted(number for number in theirs if ours.get(number, theirs[number]) != theirs[number])
    if not other:
        return []
    first = other[0]
    here, there = ours[first], theirs[first]
    raise UsageError(
        f"--data.tokenizer {name}: {len(other)} of {len(theirs)} ids stand for different pieces of text than in the "
        f"tokenizer of --model.source {source} (the first is {first}, {here!r} here and {there!r} there), so its "
        "pretrained embeddings would mean nothing. Leave --data.tokenizer out, or train from scratch with "
        "--model.config instead of --model.source."
    )


def refuse_other_pieces(tokenizer: Any, trained: Path | None, *, resumes: bool = False) -> None:
    """Raise ``UsageError`` if initial weights were trained with a vocabulary other than that of ``tokenizer``.

    ``trained`` is a checkpoint with its tokenizer, or None. With ``resumes`` its run is continued or evaluated.
    """
    if trained is None or not (trained / TOKENIZER_FILE).is_file():
        return
    known = load_tokenizer(str(trained), None).get_vocab()
    given = tokenizer.get_vocab()
    other = sum(given.get(piece) != number for piece, number in known.items())
    if other:
        start = f"the checkpoint {trained}, whatever --allow says" if resumes else "--init_from"
        raise UsageError(
            f"{start}: its weights know {len(known)} pieces of text by number, and {other} of them have a different "
            f"number, or none, in the tokenizer of these rows. Use theirs: --data.tokenizer {trained}"
        )


def set_pad_token(tokenizer: Any) -> list[str]:
    """Give the tokenizer a token to pad with, if it has none, and return a notice of it.

    No token is added: no loss counts padding and no text sees it, so any token will do.
    """
    if tokenizer.pad_token_id is not None:
        return []
    token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    tokenizer.pad_token = token
    return [f"the tokenizer has no pad token: {token!r} is used, and no loss counts padding"]


def set_chat_template(tokenizer: Any, file: str | None) -> None:
    """Give the tokenizer the chat template of a Jinja file. None keeps its own."""
    if file is None:
        return
    path = expand_path(file)
    try:
        # Some editors begin a file with a byte-order mark, which is not part of a chat.
        tokenizer.chat_template = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--data.chat_template {file!r} cannot be read ({error}). Give a Jinja file.") from None

"""Text to token ids and back, by a tokenizer trained on the corpus or taken from a transformers model."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_train.config import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD = "[PAD]"
MASK = "[MASK]"
MIN_VOCAB_SIZE = 300
BATCH_TEXTS = 8192
BATCH_CHARACTERS = 2**23


@dataclass(frozen=True)
class Tokens:
    """Ragged token ids of many texts. Text i is ids[offsets[i]:offsets[i + 1]]. int32 halves the memory."""

    ids: Tensor
    offsets: Tensor
    truncated: int
    """Number of texts cut to the maximum length."""

    def row(self, index: int) -> Tensor:
        start, stop = self.offsets[index : index + 2].tolist()
        return self.ids[start:stop]

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        from safetensors.torch import save_file

        save_file({"ids": self.ids, "offsets": self.offsets, "truncated": torch.tensor(self.truncated)}, path)

    @classmethod
    def load(cls, path: Path) -> "Tokens":
        """Read a file written by `save`."""
        from safetensors.torch import load_file

        saved = load_file(path)
        return cls(saved["ids"], saved["offsets"], int(saved["truncated"]))


class TextTokenizer:
    """A `tokenizers.Tokenizer` with the ids needed by masked diffusion.

    Special tokens spelled out in a text are read as ordinary characters, so no text can introduce a mask.
    """

    def __init__(self, tokenizer: "Tokenizer", *, pad_id: int, mask_id: int, special_ids: Iterable[int]) -> None:
        tokenizer.encode_special_tokens = True
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.pad_id = pad_id
        self.mask_id = mask_id
        self.special_ids = tuple(sorted({pad_id, mask_id, *special_ids}))
        """Ids exempt from diffusion: padding, the mask and the special tokens around a text."""
        # By the largest id, because ids may have gaps.
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

    def maskable(self) -> Tensor:
        """Return a table (V,) bool, False for the special ids."""
        table = torch.ones(self.vocab_size, dtype=torch.bool)
        table[list(self.special_ids)] = False
        return table

    def tokenise(self, texts: Sequence[str], max_length: int) -> Tokens:
        """Tokenise texts, cut to `max_length` but with all special tokens. Raises `UsageError` if these do not fit."""
        around = self._tokenizer.num_special_tokens_to_add(False)
        if max_length <= around:
            raise UsageError(
                f"--data.max_length {max_length}: the tokenizer puts {around} special tokens around a text. At least "
                f"{around + 1} is required; 16 or more is sensible."
            )
        self._tokenizer.enable_truncation(max_length)
        ids: list[Tensor] = []
        lengths: list[int] = [0]
        truncated = 0
        for batch in _batches(texts):
            encodings = self._tokenizer.encode_batch(batch)
            lengths.extend(len(encoding) for encoding in encodings)
            truncated += sum(bool(encoding.overflowing) for encoding in encodings)
            flat = list(itertools.chain.from_iterable(encoding.ids for encoding in encodings))
            ids.append(torch.tensor(flat, dtype=torch.int32))
        if not ids:
            ids.append(torch.zeros(0, dtype=torch.int32))
        return Tokens(torch.cat(ids), torch.tensor(lengths).cumsum(0), truncated)

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """Decode one row of ids to readable text, without special tokens, padding and masks."""
        row: list[int] = torch.as_tensor(ids).tolist()
        special = set(self.special_ids)
        content = [token for token in row if token not in special]
        return self._tokenizer.decode(content, skip_special_tokens=False).strip()

    def to_json(self) -> str:
        """Return the standard `tokenizer.json`, as read by the tokenizers and transformers libraries."""
        # `tokenise` sets a truncation on the library's object, which would end up in the file.
        self._tokenizer.no_truncation()
        return self._tokenizer.to_str(pretty=True)

    def pieces(self) -> dict[str, int]:
        """Return the vocabulary: the id of each piece of text."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def ids(self) -> dict[str, int | tuple[int, ...]]:
        """Return the ids missing from `tokenizer.json`. Together they are the arguments of `from_json`."""
        return {"pad_id": self.pad_id, "mask_id": self.mask_id, "special_ids": self.special_ids}

    def identity(self) -> str:
        """Hash everything the ids of a text depend on: the tokenizer, and the version of its library."""
        import tokenizers

        about = [tokenizers.__version__, self.to_json(), self.ids()]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()

    def settings(self, max_length: int) -> dict[str, object]:
        """Return the content of `tokenizer_config.json`, which tells transformers the mask and padding tokens."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_length,
            "pad_token": self._tokenizer.id_to_token(self.pad_id),
            "mask_token": self._tokenizer.id_to_token(self.mask_id),
            "clean_up_tokenization_spaces": False,
        }

    def frame(self) -> tuple[list[int], list[int]]:
        """Return the ids of the special tokens before and after a text."""
        self._tokenizer.no_truncation()
        ids: list[int] = self._tokenizer.encode("a").ids
        content = [place for place, token in enumerate(ids) if token not in self.special_ids]
        return ids[: content[0]], ids[content[-1] + 1 :]

    @classmethod
    def from_json(cls, text: str, *, pad_id: int, mask_id: int, special_ids: Iterable[int]) -> "TextTokenizer":
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_str(text), pad_id=pad_id, mask_id=mask_id, special_ids=special_ids)


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Group texts into batches of limited total length.

    The limit bounds memory: the library keeps about 90 bytes per truncated token until the batch is freed.
    """
    batch: list[str] = []
    characters = 0
    for text in texts:
        if batch and (len(batch) == BATCH_TEXTS or characters + len(text) > BATCH_CHARACTERS):
            yield batch
            batch = []
            characters = 0
        batch.append(text)
        characters += len(text)
    if batch:
        yield batch


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> TextTokenizer:
    """Train a byte-level BPE. It encodes every text without loss, and training on equal texts gives equal merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < MIN_VOCAB_SIZE:
        raise UsageError(
            f"--data.vocab_size {vocab_size}: 256 pieces are single bytes and 2 are special; at least {MIN_VOCAB_SIZE} "
            "is required; 2048 suits a small corpus."
        )
    tokenizer = Tokenizer(models.BPE())
    # With the space, a word has the same pieces at the start of a text as inside it.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, MASK],
        # All 256 bytes, because a byte missing from the corpus could otherwise not be encoded. Sorted, because the
        # library lists them in a different order in every process.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    return TextTokenizer(tokenizer, pad_id=0, mask_id=1, special_ids=())


def transformers_tokenizer(name: str) -> TextTokenizer:
    """Load the tokenizer of a model id or local directory. A missing mask or padding token is appended."""
    from transformers import AutoTokenizer

    try:
        loaded: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # failures of hub, network, code and format have no common type
        raise UsageError(
            f"--data.tokenizer {name!r} cannot be loaded ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}). Give 'trained', a local directory with tokenizer.json, or a model "
            "id of the hub (without a network it must be in the local cache); code from a repository is never run."
        ) from None
    if not getattr(loaded, "is_fast", False):
        raise UsageError(
            f"--data.tokenizer {name!r}: {type(loaded).__name__} is written in Python; one with a "
            "tokenizer.json is required. Name a model with a fast tokenizer, or use 'trained'."
        )
    missing: dict[str, str] = {}
    if loaded.pad_token is None:
        missing["pad_token"] = PAD
    if loaded.mask_token is None:
        missing["mask_token"] = MASK
    if missing:
        loaded.add_special_tokens(missing)
    special: set[int] = set(loaded.all_special_ids)
    # An unknown word is content, masked and counted like any other.
    if loaded.unk_token_id not in (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id):
        special.discard(loaded.unk_token_id)
    return TextTokenizer(
        loaded.backend_tokenizer,
        pad_id=loaded.pad_token_id,
        mask_id=loaded.mask_token_id,
        special_ids=special,
    )

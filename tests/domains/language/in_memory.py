"""The reader that holds everything in memory: what the cached one must equal, bit for bit.

As ``python tests/domains/language/in_memory.py ARGUMENTS`` it is recipes/causal_lm.py with this reader.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel_train.data.artifacts import cache_directory
from accel_train.data.datasets import Batch
from accel_train.data.tables.text_sources import content_key, text_key
from accel_train.data.tensor_cache import TensorCache
from accel_train.domains.language import packing, templates, tokenizers
from accel_train.domains.language.packing import IGNORED, Encoded
from accel_train.domains.language.prepare import DataConfig, LanguageData
from accel_train.domains.language.pretrained import ModelConfig
from accel_train.domains.language.rows import forms, sources
from accel_train.domains.language.rows.forms import Row
from accel_train.domains.language.tokens.shards import Shard, TokenDataset, shard_tensors


class InMemory:
    """Rows of tokens with the interface of ``TokenDataset``, packed by groups of so many tokens."""

    def __init__(self, texts: Sequence[Encoded], max_length: int, pad_id: int, packs: bool, groups: list[int]) -> None:
        self.all = texts
        self.max_length = max_length
        self.pad_id = pad_id
        self.texts = len(texts)
        self.tokens = sum(len(text.ids) for text in texts)
        self.rows: list[list[int]] = []
        self.hashes: list[str] = []
        for first, end in itertools.pairwise([0, *groups]):
            lengths = [len(text.ids) for text in texts[first:end]]
            inside = packing.pack(lengths, max_length) if packs else [[index] for index in range(end - first)]
            self.rows += [[first + index for index in row] for row in inside]
            offsets = [0, *itertools.accumulate(lengths)]
            digest = hashlib.sha256(f"{max_length} {packs} {offsets}".encode())
            digest.update(np.array([token for text in texts[first:end] for token in text.ids], np.int32).tobytes())
            digest.update(np.array([flag for text in texts[first:end] for flag in text.trained], np.bool_).tobytes())
            self.hashes.append(digest.hexdigest())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        return {name: values[0] for name, values in self.batch([index]).items()}

    def batch(self, indices: list[int]) -> Batch:
        shape = (len(indices), self.max_length)
        ids, labels = torch.full(shape, self.pad_id), torch.full(shape, IGNORED)
        positions = torch.zeros(shape, dtype=torch.int64)
        for row, index in enumerate(indices):
            place = 0
            for number in self.rows[index]:
                tokens, trained = self.text(number)
                end = place + len(tokens)
                ids[row, place:end] = tokens
                labels[row, place:end] = torch.where(trained, tokens, IGNORED)
                positions[row, place:end] = torch.arange(len(tokens))
                place = end
            positions[row, place:] = torch.arange(self.max_length - place)
        length = torch.tensor([self.length(index) for index in indices])
        return {"input_ids": ids, "labels": labels, "position_ids": positions, "length": length}

    def text(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.all[index].ids), torch.tensor(self.all[index].trained)

    def length(self, index: int) -> int:
        return sum(len(self.all[number].ids) for number in self.rows[index])

    def trim(self, batch: Mapping[str, Tensor], length: int) -> Batch:
        return {name: values[:, :length] if values.dim() == 2 else values for name, values in batch.items()}

    def fingerprint(self) -> str:
        if len(self.hashes) == 1:
            return self.hashes[0]
        return hashlib.sha256(" ".join(self.hashes).encode()).hexdigest()


def fields_of(file: Path, sample_by: str) -> Iterator[dict[str, Any]]:
    """Read a whole file."""
    if file.suffix == ".jsonl":
        yield from (json.loads(line) for line in file.read_text("utf-8-sig").split("\n") if line.strip())
    elif file.suffix == ".txt":
        text = file.read_text("utf-8-sig")
        divided = {"line": text.splitlines, "paragraph": lambda: re.split(r"\n\s*\n", text), "document": lambda: [text]}
        yield from ({"text": part} for part in divided[sample_by]() if part.strip())
    else:
        import pyarrow as pa
        from pyarrow import parquet

        table: Any = parquet.read_table(file) if file.suffix == ".parquet" else pa.ipc.open_file(file).read_all()
        yield from table.to_pylist()


def rows_of(path: str, sample_by: str) -> list[Row]:
    source = sources.DEMO_FILE if path == "demo" else Path(path)
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    found = [forms._row(str(file), fields, "text") for file in files for fields in fields_of(file, sample_by)]
    return [row for row in found if isinstance(row, Row)]


def prepare_data(config: DataConfig, model: ModelConfig, group_tokens: int = 2**22, **_: Any) -> LanguageData:
    """``prepare.prepare_data`` without a cache: everything is read, split, encoded and packed at once."""
    everything = rows_of(config.path, config.sample_by)
    keys = [content_key(row.content) for row in everything]
    if config.heldout_path is not None:
        heldout = rows_of(config.heldout_path, config.sample_by)
        excluded = {text_key(row.content) for row in heldout}
        stream = [(row, False) for row in everything if text_key(row.content) not in excluded]
    else:
        limit = config.heldout_fraction * 2**64
        sides = [int.from_bytes(key[:8], "big") < limit for key in keys]
        stream = list(zip(everything, sides, strict=True))
        chosen = [(key, number) for number, (key, side) in enumerate(zip(keys, sides, strict=True)) if side]
        heldout = [everything[number] for _, number in sorted(chosen)]
    if config.tokenizer is None:
        training = [row.content for row, side in stream if not side]
        tokenizer = tokenizers.train_tokenizer(training, config.vocab_size or 2048)
        # As the cached one: its file knows more than the object.
        folder = cache_directory(config.cache_dir) / f"in-memory-{hashlib.sha256(repr(config).encode()).hexdigest()}"
        tokenizer.save_pretrained(folder)
        tokenizer = tokenizers.load_tokenizer(str(folder), None)
    else:
        tokenizer = tokenizers.load_tokenizer(config.tokenizer, None)
    tokenizers.set_chat_template(tokenizer, config.chat_template)

    def pieces(row: Row) -> list[Encoded]:
        fitted = (
            piece
            for text in templates.encode(row, tokenizer).texts
            for piece in packing.fit(text, config.max_length, split=row.text is not None)
        )
        return [piece for piece in fitted if any(piece.trained)]

    def dataset(texts: list[Encoded], ends: list[int]) -> InMemory:
        ends = [end for end in dict.fromkeys([*ends, len(texts)]) if end > 0]
        return InMemory(texts, config.max_length, tokenizer.pad_token_id, config.packing, ends)

    def in_stream(found: Sequence[tuple[Row, bool]]) -> InMemory:
        """A group ends with the text that fills it. Held-out texts on the way fill it too."""
        kept: list[Encoded] = []
        ends: list[int] = []
        waiting = 0
        for piece, aside in [(piece, side) for row, side in found for piece in pieces(row)]:
            kept += [] if aside else [piece]
            waiting += len(piece.ids)
            if waiting >= group_tokens:
                ends.append(len(kept))
                waiting = 0
        return dataset(kept, ends)

    train = in_stream(stream)
    if config.heldout_path is not None:
        held = in_stream([(row, False) for row in heldout])
    else:
        texts = [piece for row in heldout for piece in pieces(row)]
        numbers = [end // group_tokens for end in itertools.accumulate(len(piece.ids) for piece in texts)]
        held = dataset(
            texts, [index for index, pair in enumerate(itertools.pairwise(numbers), 1) if pair[0] != pair[1]]
        )
    trained = [token for text in train.all for token, flag in zip(*text, strict=True) if flag]
    vocabulary = 1 + max(tokenizer.get_vocab().values())
    counts = torch.bincount(torch.tensor(trained), minlength=vocabulary) + 1.0
    digest = f"{train.fingerprint()} {held.fingerprint()} {tokenizer.backend_tokenizer.to_str()}"
    fingerprint = hashlib.sha256(digest.encode("utf-8", "surrogatepass")).hexdigest()
    unigram = (counts / counts.sum()).log()
    both: Any = (train, held)
    return LanguageData(*both, tokenizer, unigram, fingerprint, ())


def shard_of(texts: Sequence[Encoded], max_length: int, folder: Path, *, packs: bool) -> TokenDataset:
    """Texts in one shard on disk."""
    marked = [packing.marked(text) for text in texts]
    lengths = np.array([len(text) for text in marked], np.int64)
    packed = packing.pack_texts(np.concatenate(marked), lengths, max_length, packing=packs)
    cache = TensorCache(folder, {"kind": "test"})
    key = f"{int(packs):064x}"
    cache.write(key, shard_tensors(packed))
    shard = Shard(cache.file(key), len(packed.rows) - 1, len(texts), int(lengths.sum()))
    return TokenDataset([shard], max_length, 0)


if __name__ == "__main__":
    from accel_train.runtime.exiting import run_main
    from recipes import causal_lm

    causal_lm.prepare.prepare_data = prepare_data  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv[0] = causal_lm.__file__
    run_main(causal_lm.main)

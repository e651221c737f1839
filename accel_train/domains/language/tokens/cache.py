"""Tokens of a source, computed once: encoded block by block, packed shard by shard, and kept in the cache.

A shard has consecutive texts of about 4 million tokens, and texts are packed within their shard, so that memory does
not depend on the size of the source. One process of a host computes, and the others wait. A record beside the shards
has the end of each in the source: after an interruption, the next process continues after the last one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from accel_train.config import disk_error
from accel_train.data.artifacts import one_at_a_time
from accel_train.data.generation import blocks_in_order
from accel_train.data.progress import Progress
from accel_train.data.tables.row_blocks import RowBlocks
from accel_train.data.tables.text_sources import BAD_ROWS_SHOWN, BadRows
from accel_train.data.tensor_cache import Lease, TensorCache, is_intact
from accel_train.domains.language import packing
from accel_train.domains.language.packing import EncodedBlock, Ints, Tokens
from accel_train.domains.language.rows.sources import option_of
from accel_train.domains.language.tokens.shards import OpenShards, Shard, ShardFile, shard_tensors
from accel_train.store import atomic_files

logger = logging.getLogger(__name__)

FORMAT = 4
"""Format version of the cached tokens. Raise it when the same rows give other tokens."""
Encode = Callable[[int], EncodedBlock]
"""Encodes a block of the source. Can be pickled."""
SHARD_TOKENS = 2**22


class Layout(NamedTuple):
    """Settings by which texts are divided into rows."""

    max_length: int
    packing: bool
    vocabulary: int
    """Number of token ids."""


class PreparedTokens(NamedTuple):
    """Both splits of a source. Without a share to hold out, all is training."""

    train: list[Shard]
    heldout: list[Shard]
    fingerprints: tuple[str, str]
    """Hashes of the training and the held-out split: of their texts, and of how these form rows."""
    counts: Counter[str]
    """`EncodedBlock.counts` over all blocks."""
    blocks: Mapping[str, Mapping[str, int]]
    """The counts of each block, by its number."""
    lease: Lease
    """Keeps the files from being deleted."""
    faults: list[str]
    """Place and reason of the first bad rows."""
    targets: torch.Tensor
    """Number of times that each token is a target of training, (V,) int64."""
    notices: list[str]


class TokenCache:
    """Tokens of one source in one encoding and packing, which the plain values in `facts` identify."""

    def __init__(self, root: Path, tokenizer: str, facts: Sequence[Any], layout: Layout) -> None:
        about = {"kind": "tokens", "source": "tokenizer", "weights": tokenizer, **layout._asdict()}
        self.tensors = TensorCache(root, about)
        # Everything that decides the tokens: another value means another entry.
        described = json.dumps([FORMAT, SHARD_TOKENS, tokenizer, layout, list(facts)])
        self.key = hashlib.sha256(described.encode()).hexdigest()
        self.layout = layout
        self.record = self.tensors.folder / f"{self.key}.json"

    def prepared(self, source: RowBlocks, encoder: Callable[[], Encode], bad: BadRows) -> PreparedTokens:
        """Return the tokens, computed if the cache lacks them. Bad rows are counted in ``bad``.

        Damaged shards are computed again: any of them if a read has met one, and those that a preparation continues
        from. Raises ``UsageError`` for one bad row too many, and for a full disk.
        """
        self._report_damaged(self.tensors.delete_damaged())
        found = self._load(source)
        # The encoder is made only if something is missing: it may have to load a tokenizer.
        if found is None:
            bad_rows_left = bad.limit - bad.count
            found = self._computed(source, encoder, bad_rows_left)
        bad.include(found.counts["bad"], found.faults)
        return found

    def _computed(self, source: RowBlocks, encoder: Callable[[], Encode], bad_rows_left: int) -> PreparedTokens:
        with one_at_a_time(self.record.with_suffix(".lock")):
            # Another process may have computed them meanwhile.
            found = self._load(source)
            if found is None:
                self._delete_damaged_shards()
                preparation = _Preparation(self, source, encoder(), BadRows(bad_rows_left))
                preparation.run()
                found = self._load(source)
        assert found is not None, "it was just computed"
        return found

    def _delete_damaged_shards(self) -> None:
        """Delete the damaged ones among the shards that a preparation would continue from: it reads their tokens."""
        kept = [self.file(shard["name"]) for shard in self.read_record()["train"]]
        damaged = [file for file in kept if not is_intact(file)]
        for file in damaged:
            file.unlink(missing_ok=True)
        self._report_damaged(len(damaged))

    def _report_damaged(self, count: int) -> None:
        if count:
            logger.warning("tokens: %s damaged entries of the cache are deleted and computed again", f"{count:,}")

    def entry_key(self, name: str) -> str:
        """Return the key of an entry of the cache of tensors."""
        return hashlib.sha256(f"{self.key} {name}".encode()).hexdigest()

    def read_record(self) -> dict[str, Any]:
        """Return the record of the shards, cut off at the first missing one."""
        try:
            record: dict[str, Any] = json.loads(self.record.read_text("utf-8"))
            names = [shard["name"] for shard in record["train"]]
        except (OSError, ValueError, KeyError, TypeError):
            return {"train": [], "heldout": [], "blocks": {}, "faults": [], "notices": [], "complete": False}
        missing = self._missing(names)
        if missing:
            # Those after it are computed again, because the source is read from there on.
            first = min(names.index(name) for name in missing)
            record["train"] = record["train"][:first]
        others = [shard["name"] for shard in record["heldout"]]
        others.append("targets")
        if missing or self._missing(others):
            record["complete"] = False
        return record

    def _missing(self, names: Sequence[str]) -> list[str]:
        keys = {self.entry_key(name): name for name in names}
        return [keys[key] for key in self.tensors.missing(keys)]

    def file(self, name: str) -> Path:
        """Return the file of an entry."""
        return self.tensors.file(self.entry_key(name))

    def _load(self, source: RowBlocks) -> PreparedTokens | None:
        record = self.read_record()
        if not record["complete"]:
            return None
        targets = self.tensors.read(self.entry_key("targets"))["targets"]
        train = self._shards(record["train"])
        heldout = self._shards(record["heldout"])
        keys = [shard.file.stem for shard in [*train, *heldout]]
        return PreparedTokens(
            train=train,
            heldout=heldout,
            lease=self.tensors.lease(keys),
            fingerprints=(_combined(record["train"]), _combined(record["heldout"])),
            counts=_total(record["blocks"]),
            blocks=record["blocks"],
            faults=_placed(record.get("faults", []), source.names),
            targets=targets,
            notices=record["notices"],
        )

    def _shards(self, described: Sequence[dict[str, Any]]) -> list[Shard]:
        shards: list[Shard] = []
        for shard in described:
            # All texts of a shard may be held out.
            if not shard["texts"]:
                continue
            file = self.file(shard["name"])
            shards.append(Shard(file, shard["rows"], shard["texts"], shard["tokens"]))
        return shards

    def write(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write an entry."""
        self.tensors.write(self.entry_key(name), tensors)


def _combined(shards: Sequence[dict[str, Any]]) -> str:
    # In the order of the shards, which is that of the source.
    hashes = [shard["fingerprint"] for shard in shards if shard["texts"]]
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def _described(number: int, fault: tuple[str, str], names: Sequence[str]) -> list[Any]:
    """Return a bad row of a block for the record: by the index of its file, which may have moved by the next start."""
    place, reason = fault
    index = max(range(len(names)), key=lambda index: len(names[index]) * (names[index] in place))
    before, _, after = place.partition(names[index])
    return [number, index, before, f"{after}: {reason}"]


def _placed(faults: Sequence[Sequence[Any]], names: Sequence[str]) -> list[str]:
    return [f"{before}{names[index]}{after}" for _, index, before, after in faults]


def _total(blocks: Mapping[str, Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for counts in blocks.values():
        total.update(counts)
    return total


class _Texts(NamedTuple):
    """Texts of a part of a block, with the fields of ``EncodedBlock``."""

    tokens: Tokens
    lengths: Ints
    keys: Ints
    heldout: Any


class _Preparation:
    """The pass over a source."""

    def __init__(self, cache: TokenCache, source: RowBlocks, encode: Encode, bad: BadRows) -> None:
        self.cache = cache
        self.source = source
        self.encode = encode
        self.bad = bad
        self.record = cache.read_record()
        self._waiting: list[_Texts] = []
        self._tokens = 0

    def run(self) -> None:
        """Encode the missing blocks, then sort the held-out texts, and count the targets."""
        self.record["notices"] = self.source.notices
        start, skip = self._position()
        rows = self.source.rows
        count = len(rows)
        # What was counted after the last shard is counted again.
        done = {number: counts for number, counts in self.record["blocks"].items() if int(number) < start}
        self.record["blocks"] = done
        # Records of earlier versions have none.
        self.record["faults"] = [fault for fault in self.record.get("faults", []) if fault[0] < start]
        self.bad.count += _total(done)["bad"]
        encode = partial(_encode, self.encode, start)
        blocks = blocks_in_order(encode, count - start, "auto")
        rows_done = sum(rows[:start])
        with Progress("tokens", sum(rows), enabled=True) as bar:
            bar.update(rows_done)
            for number, block in enumerate(blocks, start):
                self._take(number, block, skip)
                skip = 0
                bar.update(rows[number])
        if self._waiting:
            self._write_shard((count, 0))
        self._write_heldout()
        self._count_targets()
        self._save(complete=True)

    def _position(self) -> tuple[int, int]:
        """Return the block to continue with, and how many of its texts are done."""
        shards = self.record["train"]
        if not shards:
            return 0, 0
        block, text = shards[-1]["end"]
        return block, text

    def _take(self, number: int, block: EncodedBlock, first: int) -> None:
        """Add the texts of a block from the ``first`` one on, and write full shards."""
        for place, reason in block.faults:
            self.bad.add(place, reason, option_of(self.source, number))
        shown = self.record["faults"]
        for fault in block.faults[: BAD_ROWS_SHOWN - len(shown)]:
            shown.append(_described(number, fault, self.source.names))
        self.record["blocks"][str(number)] = block.counts
        ends = np.cumsum(block.lengths)
        while first < len(ends):
            before = int(ends[first - 1]) if first else 0
            room = SHARD_TOKENS - self._tokens
            # The text that fills the shard is its last.
            last = int(np.searchsorted(ends, before + room))
            stop = min(last + 1, len(ends))
            end = int(ends[stop - 1])
            self._keep(block, first, stop, before, end)
            # Full by tokens and not by texts, so that shards are alike in size whatever the texts are.
            if self._tokens >= SHARD_TOKENS:
                self._write_shard((number, stop))
            first = stop

    def _keep(self, block: EncodedBlock, first: int, stop: int, start: int, end: int) -> None:
        part = slice(first, stop)
        # Copies: a view would hold the whole block.
        tokens = block.tokens[start:end].copy()
        lengths = block.lengths[part].copy()
        keys = block.keys[part].copy()
        texts = _Texts(tokens, lengths, keys, block.heldout[part])
        self._waiting.append(texts)
        self._tokens += end - start

    def _write_shard(self, end: tuple[int, int]) -> None:
        """Pack the waiting training texts, and write them with the held-out ones beside them."""
        fields = zip(*self._waiting, strict=True)
        texts = _Texts(*map(np.concatenate, fields))
        self._waiting = []
        self._tokens = 0
        is_heldout = texts.heldout
        of_heldout = np.repeat(is_heldout, texts.lengths)  # for each token
        heldout = {
            "heldout_tokens": texts.tokens[of_heldout],
            "heldout_lengths": texts.lengths[is_heldout],
            "heldout_keys": texts.keys[is_heldout],
        }
        aside = {name: torch.from_numpy(values) for name, values in heldout.items()}
        tokens = texts.tokens[~of_heldout]
        lengths = texts.lengths[~is_heldout]
        shards = self.record["train"]
        described = self._write(f"train {len(shards)}", tokens, lengths, aside)
        shards.append(described | {"end": list(end)})
        # Saved after every shard, so that a killed start continues after the last one.
        self._save(complete=False)

    def _write(self, name: str, tokens: Tokens, lengths: Ints, aside: dict[str, torch.Tensor]) -> dict[str, Any]:
        max_length, packs, _ = self.cache.layout
        packed = packing.pack_texts(tokens, lengths, max_length, packing=packs)
        self.cache.write(name, shard_tensors(packed) | aside)
        return {
            "name": name,
            "rows": len(packed.rows) - 1,
            "texts": len(lengths),
            "tokens": len(tokens),
            "fingerprint": packing.fingerprint(tokens, lengths, max_length, packing=packs),
        }

    def _write_heldout(self) -> None:
        """Write the held-out texts in the order of the hashes of their rows: the first ones are a fair sample."""
        paths = [self.cache.file(shard["name"]) for shard in self.record["train"]]
        files = OpenShards(paths)
        count = len(paths)
        lengths: list[Ints] = []
        keys: list[Ints] = []
        for number in range(count):
            lengths.append(files[number].read_all("heldout_lengths"))
            keys.append(files[number].read_all("heldout_keys").reshape(-1, 2))
        of_file = np.repeat(np.arange(count), [len(part) for part in lengths])
        # Where each text begins in the tokens of its file.
        starts = [np.cumsum(part) - part for part in lengths]
        # An empty array first, because a source without a usable row has no shard.
        first = np.concatenate([np.zeros(0, np.int64), *starts])
        length = np.concatenate([np.zeros(0, np.int64), *lengths])
        key = np.concatenate([np.zeros((0, 2), np.int64), *keys])
        # By both halves of the key. Equal rows stay in order.
        order = np.lexsort((key[:, 1], key[:, 0]))
        shard_of = np.cumsum(length[order]) // SHARD_TOKENS
        self.record["heldout"] = []
        for number in range(int(shard_of[-1]) + 1 if len(order) else 0):
            chosen = order[shard_of == number]
            texts: list[Tokens] = []
            for text in chosen.tolist():
                file = files[int(of_file[text])]
                start = int(first[text])
                stop = start + int(length[text])
                texts.append(file.read("heldout_tokens", start, stop))
            tokens = np.concatenate([np.zeros(0, np.int32), *texts])
            self.record["heldout"].append(self._write(f"heldout {number}", tokens, length[chosen], {}))

    def _count_targets(self) -> None:
        vocabulary = self.cache.layout.vocabulary
        counts = np.zeros(vocabulary, np.int64)
        for shard in self.record["train"]:
            file = ShardFile(self.cache.file(shard["name"]))
            tokens: Tokens = file.read_all("tokens")
            is_target = (tokens & packing.TARGET) != 0
            targets = tokens[is_target] & packing.IDS
            # Shard by shard, so that only one is in memory.
            counts += np.bincount(targets, minlength=vocabulary)
        self.cache.write("targets", {"targets": torch.from_numpy(counts)})

    def _save(self, *, complete: bool) -> None:
        self.record["complete"] = complete
        try:
            atomic_files.replace_json(self.cache.record, self.record)
        except OSError as error:
            raise disk_error(error)(
                f"cache {self.cache.record.parent}: {error.strerror}. Free space, or name another folder with "
                "--data.cache_dir or ACCEL_TRAIN_CACHE."
            ) from None


# A function of the module, because workers receive it pickled.
def _encode(encode: Encode, start: int, number: int) -> EncodedBlock:
    return encode(start + number)

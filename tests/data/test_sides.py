"""Sides of rows against their definition: connected components of rows that share words or a source."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Hashable, Sequence

import pytest

from accel_train.data.tables.sides import side_keys


def defined(keys: Sequence[int], sources: Sequence[Hashable]) -> list[int]:
    """Grow the group of each row until no other row shares anything with it."""
    if len(set(sources)) == len(sources):
        return list(keys)
    rows = [(key >> 32, source) for key, source in zip(keys, sources, strict=True)]
    found: list[int] = []
    for word, source in rows:
        words, members, size = {word}, {source}, 0
        while len(words) + len(members) > size:
            size = len(words) + len(members)
            joined = [row for row in rows if row[0] in words or row[1] in members]
            words, members = {word for word, _ in joined}, {source for _, source in joined}
        side = min(words)
        if len(words) > 1:
            side = int.from_bytes(hashlib.sha256(side.to_bytes(4, "big")).digest()[:4], "big")
        found.append(side << 32)
    return found


@pytest.mark.parametrize(
    ("rows", "words", "sources"),
    [(0, 1, 1), (1, 1, 1), (2, 9, 1), (30, 9, 9), (30, 20, 25), (30, 60, 25), (60, 90, 60), (40, 3, 200)],
)
def test_rows_joined_by_words_or_a_source_are_on_one_side(rows: int, words: int, sources: int) -> None:
    rng = random.Random(rows + words + sources)
    # The largest too: keys have 64 bits without a sign.
    hashes = [*(rng.getrandbits(32) for _ in range(words)), 2**32 - 1, 0]
    for _ in range(30):
        keys = [rng.choice(hashes) << 32 | rng.getrandbits(32) for _ in range(rows)]
        names: list[Hashable] = [f"file {number}" for number in range(sources)]
        shards: list[Hashable] = [(rng.choice([0, "a"]), number) for number in range(sources)]
        of_rows = [rng.choice(rng.choice([names, shards])) for _ in range(rows)]
        found = side_keys(keys, of_rows)
        assert found == defined(keys, of_rows)
        assert all(type(key) is int for key in found)


def test_rows_without_a_source_are_on_the_side_of_their_own_words() -> None:
    keys = [7 << 32 | 1, 7 << 32 | 2, 3 << 32 | 1]
    assert side_keys(keys) == side_keys(keys, ["a", "b", "c"]) == keys
    with pytest.raises(ValueError, match=r"dimension|length"):
        side_keys(keys, ["a", "a"])

"""Side of each row in a split: training or held out. Rows that share something are on one side."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

CONTENT_FIELD = "content_sha256"
"""Field of a row besides its text: the hash of the file that the text describes."""


def side_keys(keys: Sequence[int], sources: Sequence[Hashable] = ()) -> list[int]:
    """Return a key that decides the side of each row: one side for rows with the same words, and with the same source.

    ``keys`` are the `split_key` of each text, and ``sources`` the item that it belongs to, such as its picture. Empty:
    none. Rows connected through others are on one side too. A group of rows that all have the same words keeps the side
    of these words, so that it depends on nothing else. Other groups are on the side of a hash of their smallest words.
    """
    numbers: dict[Hashable, int] = {}
    source_of_row = [numbers.setdefault(source, len(numbers)) for source in sources]
    if len(numbers) == len(sources):
        return list(keys)
    # The upper half, which hashes the words and decides the side.
    words, word_of_row = np.unique(np.array(keys, np.uint64) >> np.uint64(32), return_inverse=True)
    groups = _groups(word_of_row, np.array(source_of_row))[: len(words)]
    # Words are sorted: the first one of a group is its smallest.
    _, first, group_of_word, sizes = np.unique(groups, return_index=True, return_inverse=True, return_counts=True)
    chosen = words[first].tolist()
    for group in np.flatnonzero(sizes > 1).tolist():
        # The smallest of five keys is below a bound about five times as often as a single one. Its hash is not.
        chosen[group] = int.from_bytes(hashlib.sha256(chosen[group].to_bytes(4, "big")).digest()[:4], "big")
    return (np.array(chosen, np.uint64)[group_of_word[word_of_row]] << np.uint64(32)).tolist()


def _groups(words: Any, sources: Any) -> Any:
    """Return the group of each word, then of each source: the connected components of rows (word, source)."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    # Numbers of sources follow those of words.
    first_source = words.max() + 1
    nodes = first_source + sources.max() + 1
    rows = coo_matrix((np.ones(len(words), np.int8), (words, first_source + sources)), shape=(nodes, nodes))
    _, groups = connected_components(rows, directed=False)
    return groups

"""On which side of a split rows are: training or held out. Rows that share something are on one side."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from itertools import pairwise

CONTENT_FIELD = "content_sha256"
"""Field of a row beside its text: the hash of the file that the text describes."""

Node = tuple[str, Hashable]
"""The words of a text or what a text belongs to, told apart by the first word."""


def side_keys(keys: Sequence[int], sources: Sequence[Hashable] = ()) -> list[int]:
    """Return a key for each row whose side is that of the row: one side for the same words, and for an equal source.

    ``keys`` are `split_key` of each text, and ``sources`` what it belongs to, such as its picture; empty: nothing. Rows
    joined through others are on one side too. A group of rows of the same words stays on their side, so that it depends
    on nothing else. Other groups are on the side of a hash of their smallest words.
    """
    if len(set(sources)) == len(sources):
        return list(keys)
    # The upper half, which hashes the words and decides the side.
    words = [key >> 32 for key in keys]
    roots = _roots([[("words", word), ("source", source)] for word, source in zip(words, sources, strict=True)])
    members: dict[Node, set[int]] = {}
    for word, root in zip(words, roots, strict=True):
        members.setdefault(root, set()).add(word)
    chosen = {root: _words_of_group(group) << 32 for root, group in members.items()}
    return [chosen[root] for root in roots]


def _words_of_group(words: set[int]) -> int:
    smallest = min(words)
    if len(words) == 1:
        return smallest
    # The smallest of five is below a fraction five times as often as one: its hash is not.
    return int.from_bytes(hashlib.sha256(smallest.to_bytes(4, "big")).digest()[:4], "big")


def _roots(rows: Sequence[Sequence[Node]]) -> list[Node]:
    """Return one node for each row, the same for rows that have a node in common, or are joined by other rows."""
    parents: dict[Node, Node] = {}

    def root(node: Node) -> Node:
        above = parents.setdefault(node, node)
        while above != node:
            # Each step also shortens the way of the next search.
            parents[node] = parents[above]
            node, above = above, parents[above]
        return node

    for nodes in rows:
        for one, other in pairwise(nodes):
            parents[root(one)] = root(other)
    return [root(nodes[0]) for nodes in rows]

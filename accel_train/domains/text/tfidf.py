"""A latent encoder without a neural network: TF-IDF of the words, then truncated SVD (latent semantic analysis).

The values equal those of scikit-learn's TfidfVectorizer(sublinear_tf=True) and TruncatedSVD. No pickle is involved.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel_train.config import UsageError
from accel_train.data.tables.text_sources import characters_of, texts_hash

VERSION = "tfidf-svd-1"
MAX_WORDS = 20_000
PLAIN_WORDS = re.compile(r"\b\w+\b")
UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Characters of scripts that write no spaces: hiragana, katakana, and Han."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TfidfSvdEncoder:
    """A fitted encoder. The latent of a text depends on that text only, not on its batch or on threads."""

    words: list[str]
    idf: NDArray[np.float32]  # (W,)
    components: NDArray[np.float32]  # (W, Dz)
    normalise: bool
    identity: str
    """Hash of the fitted texts and the options, which names the same encoder on every machine."""
    batch_size: int = 4096

    @cached_property
    def _index(self) -> dict[str, int]:
        return {word: column for column, word in enumerate(self.words)}

    @property
    def dim(self) -> int:
        return self.components.shape[1]

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return (n, Dz) float32, of length 1 with `normalise`. A text without a known word is all zeros."""
        indptr, columns, values = tfidf_rows(texts, self._index, self.idf.astype(np.float64))
        latents = np.zeros((len(texts), self.dim))
        # reduceat cannot sum an empty row, so rows without words are skipped.
        filled = np.diff(indptr) > 0
        if columns.size:
            products = self.components[columns].astype(np.float64) * values[:, None]
            starts = indptr[:-1][filled]
            latents[filled] = np.add.reduceat(products, starts, axis=0)
        if self.normalise:
            # A text without a known word must stay all zeros and not become NaN.
            lengths = np.linalg.norm(latents, axis=1, keepdims=True)
            latents /= np.maximum(lengths, 1e-12)
        return latents.astype(np.float32)

    def save(self, directory: Path) -> None:
        """Write encoder.json (words, options) and encoder.safetensors (idf, components)."""
        from safetensors.numpy import save_file

        facts = {
            "kind": VERSION,
            "identity": self.identity,
            "normalise": self.normalise,
            "words": self.words,
        }
        text = json.dumps(facts, ensure_ascii=False)
        (directory / "encoder.json").write_text(text, "utf-8")
        arrays = {"idf": self.idf, "components": np.ascontiguousarray(self.components)}
        save_file(arrays, directory / "encoder.safetensors")

    @classmethod
    def load(cls, directory: Path, facts: dict[str, Any]) -> "TfidfSvdEncoder":
        from safetensors.numpy import load_file

        arrays = load_file(directory / "encoder.safetensors")
        words = facts["words"]
        idf = arrays["idf"]
        components = arrays["components"]
        if idf.shape != (len(words),) or components.shape[:1] != idf.shape:
            raise ValueError(f"{len(words)} words, idf {idf.shape}, components {components.shape}")
        return cls(words, idf, components, facts["normalise"], facts["identity"])


def words_of(text: str) -> list[str]:
    """Return the words of a text, with their combining marks. Each Chinese or Japanese character is a word."""
    return (PLAIN_WORDS if text.isascii() else _words()).findall(text.lower())


@cache
def _words() -> re.Pattern[str]:
    return re.compile(rf"[{UNSPACED}]|(?:(?![{UNSPACED}])[\w{characters_of('M')}])+")


def tfidf_rows(
    texts: Sequence[str], index: dict[str, int], idf: Floats
) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    """Build sparse rows (indptr, columns, values) of (1 + log count) * idf.

    Each row has length 1 and ascending columns.
    """
    indptr: list[int] = [0]
    columns: list[int] = []
    counts: list[int] = []
    for text in texts:
        known = Counter(index[word] for word in words_of(text) if word in index)
        # Ascending, so that a text's sums always add up in the same order.
        for column, count in sorted(known.items()):
            columns.append(column)
            counts.append(count)
        indptr.append(len(columns))
    column_array = np.array(columns, np.int64)
    starts = np.array(indptr, np.int64)
    logarithms = np.log(np.array(counts, np.float64))
    values = (1.0 + logarithms) * idf[column_array]
    words_per_text = np.diff(starts)
    squares = np.zeros(len(texts))
    # As in `encode`: reduceat cannot sum an empty row, or be called without rows.
    if values.size:
        filled = words_per_text > 0
        first_words = starts[:-1][filled]
        squares[filled] = np.add.reduceat(values**2, first_words)
    lengths = np.sqrt(squares)
    return starts, column_array, values / np.repeat(lengths, words_per_text)


def fit_identity(texts: Sequence[str], dim: int, normalise: bool) -> str:
    """Compute the `identity` of the encoder returned by `fit`, without fitting it."""
    facts = f"{VERSION} {MAX_WORDS} {dim} {normalise} {texts_hash(texts)}"
    # Texts with combining marks or unspaced scripts follow a newer rule for words. Others keep their identity.
    if any(not text.isascii() and PLAIN_WORDS.findall(text.lower()) != words_of(text) for text in texts):
        facts += " word_rule 2"
    return hashlib.sha256(facts.encode()).hexdigest()


def fit(texts: Sequence[str], dim: int, normalise: bool) -> TfidfSvdEncoder:
    """Fit the encoder on the training texts, in seconds for 30,000 sentences.

    ARPACK runs in float64 from a fixed start and finds the singular space itself, not a random approximation. The
    largest entry of each component is positive.
    """
    from scipy.sparse import csr_matrix

    frequency = _document_frequency(texts)
    # Ties are broken by the word, because the order of a set of strings differs between processes.
    most_frequent = sorted(frequency, key=lambda word: (-frequency[word], word))
    words = sorted(most_frequent[:MAX_WORDS])
    largest = min(len(words), len(texts)) - 1
    if dim > largest:
        lower = f"Lower it to {largest} at most, or add more text." if largest > 0 else "Add more text."
        raise UsageError(
            f"--data.latent_dim {dim}: encoder 'tfidf-svd' needs more training texts and more distinct words than "
            f"dimensions; there are {len(texts)} texts and {len(words)} words. {lower}"
        )
    document_frequency = np.array([frequency[word] for word in words], np.float64)
    # Smoothed as in scikit-learn, as if one more text had every word.
    rarity = (1 + len(texts)) / (1 + document_frequency)
    idf = np.log(rarity) + 1
    index = {word: column for column, word in enumerate(words)}
    indptr, columns, values = tfidf_rows(texts, index, idf)
    shape = (len(texts), len(words))
    matrix = csr_matrix((values, columns, indptr), shape=shape)
    directions = _right_singular_vectors(matrix, dim)
    components = np.ascontiguousarray(directions.T, dtype=np.float32)
    identity = fit_identity(texts, dim, normalise)
    return TfidfSvdEncoder(words, idf.astype(np.float32), components, normalise, identity)


def _document_frequency(texts: Sequence[str]) -> Counter[str]:
    """Count the texts that contain each word."""
    frequency: Counter[str] = Counter()
    for text in texts:
        frequency.update(set(words_of(text)))
    return frequency


def _right_singular_vectors(matrix: Any, count: int) -> Floats:
    """Return the right singular vectors (count, W) of a sparse matrix (N, W), in order of descending singular value."""
    from scipy.sparse.linalg import svds
    from threadpoolctl import threadpool_limits

    start = np.random.default_rng(0).standard_normal(min(matrix.shape))
    # One thread gives the same bits on every machine. It is also faster because the blocks are small.
    with threadpool_limits(1):
        decomposition: Any = svds(matrix, k=count, v0=start, solver="arpack")
    # svds does not sort the singular values in descending order.
    _, singular, right = decomposition
    vectors: Floats = right[np.argsort(-singular)]
    # Vectors are unique up to their sign, which may differ between machines, so fix the sign.
    largest = np.abs(vectors).argmax(axis=1)
    signs = np.sign(vectors[np.arange(count), largest])
    vectors *= signs[:, None]
    return vectors

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer

from accel_train.config import UsageError
from accel_train.data.tables.text_sources import texts_hash
from accel_train.domains.text import tfidf
from accel_train.domains.text.corpus import DEMO_FILE
from accel_train.domains.text.encoders import load_encoder

LINES = DEMO_FILE.read_text().splitlines()
TRAIN, OTHER = LINES[:1500], [*LINES[1500:1600], "", "zzzz qqqq", "Été ÉTÉ"]


def test_equal_to_scikit_learn() -> None:
    vectorizer = TfidfVectorizer(sublinear_tf=True, token_pattern=r"(?u)\b\w+\b", dtype=np.float64)
    svd = TruncatedSVD(24, algorithm="arpack", random_state=0).fit(vectorizer.fit_transform(TRAIN))
    reference = svd.transform(vectorizer.transform(OTHER))
    signs = np.sign(svd.components_[np.arange(24), np.abs(svd.components_).argmax(1)])
    encoder = tfidf.fit(TRAIN, 24, normalise=False)
    assert encoder.words == sorted(vectorizer.vocabulary_)
    np.testing.assert_allclose(encoder.encode(OTHER), reference * signs, atol=1e-6)
    scaled = reference * signs / np.maximum(np.linalg.norm(reference, axis=1, keepdims=True), 1e-12)
    np.testing.assert_allclose(tfidf.fit(TRAIN, 24, normalise=True).encode(OTHER), scaled, atol=1e-5)


def test_words_have_their_marks_and_han_characters_are_words(tmp_path: Path) -> None:
    hindi = [f"{name} घर {verb} है" for name in ("सीता", "राम", "मोहन") for verb in ("जाता", "जाती", "आता", "आती")]
    encoder = tfidf.fit(hindi, 4, normalise=True)
    first, second = encoder.encode(["सीता घर जाता है", "सीता घर जाती है"])
    assert np.abs(first - second).max() > 0.1
    assert tfidf.words_of("他去了Berlin。") == ["他", "去", "了", "berlin"]
    encoder.save(tmp_path)
    assert np.array_equal(load_encoder(tmp_path).encode(hindi), encoder.encode(hindi))
    # Texts of other words than by the plain rule are known by that.
    plain = tfidf.fit_identity(TRAIN, 4, True)
    assert plain == hashlib.sha256(f"tfidf-svd-1 20000 4 True {texts_hash(TRAIN)}".encode()).hexdigest()
    assert encoder.identity != hashlib.sha256(f"tfidf-svd-1 20000 4 True {texts_hash(hindi)}".encode()).hexdigest()


def test_a_latent_is_a_function_of_its_text_alone() -> None:
    encoder = tfidf.fit(TRAIN, 16, normalise=True)
    together = encoder.encode(OTHER)
    alone = np.concatenate([encoder.encode([text]) for text in OTHER])
    assert np.array_equal(together, alone)
    lengths = np.linalg.norm(together, axis=1)
    np.testing.assert_allclose(lengths[:100], 1, atol=1e-6)
    assert not together[100:].any()  # without a known word
    assert encoder.encode([]).shape == (0, 16)


def test_rare_words_beyond_the_limit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tfidf, "MAX_WORDS", 40)
    encoder = tfidf.fit(TRAIN, 8, normalise=True)
    frequent = TfidfVectorizer(token_pattern=r"(?u)\b\w+\b", binary=True, use_idf=False, norm=None)
    counts = np.asarray(frequent.fit_transform(TRAIN).sum(0)).ravel()
    order = sorted(frequent.vocabulary_.items(), key=lambda item: (-counts[item[1]], item[0]))
    assert encoder.words == sorted(word for word, _ in order[:40])


def test_identity_names_texts_and_options() -> None:
    texts = LINES[:200]
    encoder = tfidf.fit(texts, 8, normalise=True)
    assert encoder.identity == tfidf.fit_identity(texts, 8, True)
    others = [
        tfidf.fit_identity(texts, 9, True),
        tfidf.fit_identity(texts, 8, False),
        tfidf.fit_identity(texts[::-1], 8, True),
        tfidf.fit_identity([*texts[:-1], texts[-1] + "!"], 8, True),
    ]
    assert len({encoder.identity, *others}) == 5


def test_saved_without_pickle_and_loaded(tmp_path: Path) -> None:
    encoder = tfidf.fit(LINES[:300], 8, normalise=True)
    encoder.save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["encoder.json", "encoder.safetensors"]
    assert json.loads((tmp_path / "encoder.json").read_text())["words"] == encoder.words
    loaded = load_encoder(tmp_path)
    assert loaded.identity == encoder.identity
    assert np.array_equal(loaded.encode(OTHER), encoder.encode(OTHER))


def test_too_little_text_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--data.latent_dim 64: .* there are 3 texts and 6 words. Lower it to 2"):
        tfidf.fit(["to be", "or not", "to be that is"], 64, normalise=True)

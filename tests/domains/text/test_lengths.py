"""Estimate of a text's length from its latent, against a plain ridge regression and on real text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from accel_train.domains.text import lengths, tfidf
from accel_train.domains.text.corpus import read_corpus
from accel_train.domains.text.lengths import fit_length, load_length
from accel_train.domains.text.tokenizer import train_tokenizer


class Table:
    """Latents in memory."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def rows(self, indices: Tensor) -> Tensor:
        return self.values[indices]


def test_the_fit_is_a_ridge_regression_of_the_logarithm() -> None:
    from sklearn.linear_model import Ridge

    torch.manual_seed(0)
    latents = torch.randn(300, 2, 5) * 3 + 1
    counts = (latents.mean(1) @ torch.randn(5) * 0.1 + 3).exp().round().long().clamp(min=1)
    mean, std = latents.mean((0, 1)), float(latents.std())
    fitted = fit_length(Table(latents), counts, mean, std)
    z = ((latents - mean) / std).double()
    x = torch.cat((z.mean(1), z.square().mean((1, 2)).sqrt()[:, None]), 1).numpy()
    penalty = x.shape[1] * (x - x.mean(0)).var(0).mean()
    reference = Ridge(alpha=penalty).fit(x, np.log(counts.numpy()))
    np.testing.assert_allclose(fitted.weights.numpy(), reference.coef_, rtol=1e-6)
    expected = np.exp(reference.predict(x)).round().clip(int(counts.min()), int(counts.max()))
    assert fitted((latents - mean) / std).tolist() == expected.tolist()


def test_more_texts_than_the_fit_takes_are_thinned_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "MOST_ROWS", 10)
    latents = torch.randn(25, 1, 2)
    counts = torch.arange(1, 26)
    whole = fit_length(Table(latents), counts, torch.zeros(2), 1.0)
    part = fit_length(Table(latents[::3]), counts[::3], torch.zeros(2), 1.0)
    assert torch.equal(whole.weights, part.weights)
    assert (whole.shortest, whole.longest) == (1, 25)


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    fitted = fit_length(Table(torch.randn(9, 1, 3)), torch.arange(1, 10), torch.zeros(3), 1.0)
    fitted.save(tmp_path)
    loaded = load_length(tmp_path)
    assert torch.equal(loaded.weights, fitted.weights)
    assert (loaded.bias, loaded.mean_error) == (fitted.bias, fitted.mean_error)


def test_on_the_bundled_text_it_is_better_than_one_length_for_all() -> None:
    """Held-out error in tokens, with latents of normalised length, from which the number of words is not to be read."""
    texts = read_corpus("demo", split="train", text_column="text", max_bad_rows=0, with_references=False).texts[:6000]
    train, heldout = texts[:5000], texts[5000:]
    tokenizer = train_tokenizer(train, 2048)
    encoder = tfidf.fit(train, 64, True)
    counts = tokenizer.tokenise(texts, 64).offsets.diff()
    latents = torch.from_numpy(encoder.encode(texts))[:, None]
    mean, std = latents[:5000].mean((0, 1)), float(latents[:5000].std())
    fitted = fit_length(Table(latents[:5000]), counts[:5000], mean, std)
    estimates = fitted((latents[5000:] - mean) / std)
    true = counts[5000:]
    error = float((estimates - true).abs().double().mean())
    constant = float((true - counts[:5000].double().log().mean().exp()).abs().mean())
    print(f"{len(heldout)} held-out texts: {error:.2f} tokens from the latent, {constant:.2f} from one length for all")
    assert error < 0.95 * constant

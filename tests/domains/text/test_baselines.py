from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train.domains.text import baselines
from accel_train.domains.text.baselines import fit_baselines

VOCABULARY, LENGTH, DIM = 12, 6, 3
PAD = 0


def test_the_last_of_many_rows_is_one_of_them() -> None:
    """In fp32 the last of more than 2^24 places may round up beyond it."""
    total = 2**24 + 4
    assert int(baselines._training_rows(total).max()) == total - 1


class Texts:
    """Random tokens 1 to 11; the last two positions of every third text are padding."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator)
        self.maskable = torch.ones(count, LENGTH, dtype=torch.bool)
        self.maskable[::3, -2:] = False
        self.tokens[~self.maskable] = PAD
        self.counts = F.one_hot(self.tokens, VOCABULARY).float().mul(self.maskable.unsqueeze(-1)).sum(1)
        self.map = torch.randn(VOCABULARY, DIM, generator=generator)
        self.latent = self.counts @ self.map + 0.5

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        fields = {"tokens": self.tokens, "maskable": self.maskable, "latent": self.latent.unsqueeze(1)}
        return {name: values[indices] for name, values in fields.items()}


def test_a_linear_map_of_the_counts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = Texts(400)
    monkeypatch.setattr(baselines, "RIDGES", (1e-6, 1e6))  # which of the two unseen texts decide
    found = fit_baselines(texts, VOCABULARY)
    assert torch.allclose(found.latents(texts.tokens, texts.maskable), texts.latent, atol=1e-3)
    assert found.texts == 400
    frequency = texts.counts.sum(0) + 0.5
    assert torch.allclose(found.unigram.exp(), frequency / frequency.sum())


def test_only_the_most_frequent_tokens_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = Texts(200)
    texts.tokens[:, 0] = torch.where(torch.arange(200) % 2 == 0, 5, 7)
    monkeypatch.setattr(baselines, "MAX_FEATURES", 2)
    found = fit_baselines(texts, VOCABULARY)
    counted = (found.columns < 2).nonzero().flatten()
    assert set(counted.tolist()) == {5, 7}
    without = texts.tokens.masked_fill((texts.tokens != 5) & (texts.tokens != 7), 1)
    assert torch.equal(found.latents(texts.tokens, texts.maskable), found.latents(without, texts.maskable))


def test_the_log_linear_fit_goes_to_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the mean cross-entropy, which L-BFGS with torch's own gradient finds; the demo stops on the way."""
    texts = Texts(300)
    monkeypatch.setattr(baselines, "EPOCHS", 600)
    found = fit_baselines(texts, VOCABULARY)
    weights = torch.zeros(DIM + 1, VOCABULARY, requires_grad=True)
    inputs = F.pad(texts.latent, (0, 1), value=1.0)

    def loss() -> Tensor:
        return -((inputs @ weights).log_softmax(-1) * texts.counts).sum() / texts.counts.sum()

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer = torch.optim.LBFGS([weights], max_iter=300, line_search_fn="strong_wolfe")
    optimizer.step(closure)
    best = float(loss().detach())
    ours = -(found.logits(texts.latent.unsqueeze(1)) * texts.counts).sum() / texts.counts.sum()
    unigram = -(found.unigram * texts.counts).sum() / texts.counts.sum()
    assert best < float(ours) < best + 0.02 * (float(unigram) - best)


def test_fits_repeat_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = Texts(100)
    first, again = fit_baselines(texts, VOCABULARY), fit_baselines(texts, VOCABULARY)
    assert first.log_linear is not None
    assert again.log_linear is not None
    assert torch.equal(first.linear, again.linear)
    assert torch.equal(first.log_linear, again.log_linear)
    monkeypatch.setattr(baselines, "BLOCK_ROWS", 7)
    assert torch.allclose(fit_baselines(texts, VOCABULARY).linear, first.linear, atol=1e-5)
    monkeypatch.setattr(baselines, "MAX_TRAINING_ROWS", 40)
    monkeypatch.setattr(baselines, "MAX_LOG_LINEAR_WEIGHTS", VOCABULARY * DIM - 1)
    bounded = fit_baselines(texts, VOCABULARY)
    assert bounded.texts == 40
    assert bounded.log_linear is None

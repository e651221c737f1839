"""The baselines of a run's own data, by the measures of its model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accel_train.data.heldout import heldout_pairs
from accel_train.domains.text import baselines as text_baselines
from accel_train.domains.text.baseline_scores import baseline_metrics
from accel_train.domains.text.both_ways import cosine_sum, text_nll_sums
from accel_train.domains.text.dataset import PreparedData
from accel_train.domains.text.prepare import DataConfig, prepare_data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    folder: Path = tmp_path_factory.mktemp("data")
    subjects, verbs = ("king queen knight fool ghost witch".split(), "loves hates fears sees hears".split())
    lines = [f"the {a} {v} the {b} and {w}s a {c}" for a in subjects for v in verbs for b in subjects
             for w in ("sing", "call") for c in subjects]  # fmt: skip
    (folder / "texts.txt").write_text("\n".join(lines))
    return prepare_data(
        DataConfig(path=str(folder / "texts.txt"), vocab_size=300, latent_dim=8, cache_dir=str(folder / "cache")),
        progress=False,
    )


def test_baselines_are_judged_as_the_model_is(data: PreparedData) -> None:
    figures = baseline_metrics(data, 40, 4, 0)
    fitted = text_baselines.fit_baselines(data.train, data.tokenizer.vocab_size)
    batch, shuffled = next(heldout_pairs(data.heldout, 40, 40, 0, 1, torch.device("cpu")))

    def nll(log_probabilities: torch.Tensor) -> float:
        logits = log_probabilities.unsqueeze(1).expand(-1, batch["tokens"].shape[1], -1)
        sums = text_nll_sums(lambda tokens, time: logits, batch, data.tokenizer.mask_id, 0, 4)
        return float(sums["nll"] / sums["tokens"])

    found = fitted.latents(batch["tokens"], batch["maskable"]).unsqueeze(1)
    right, wrong = nll(fitted.logits(batch["latent"])), nll(fitted.logits(shuffled["latent"]))
    expected = {
        "t2l_ridge_cosine": float(cosine_sum(found, batch["latent"], batch["weight"])) / 40,
        "unigram_nll": nll(fitted.unigram.expand(40, -1)),
        "l2t_log_linear_nll": right,
        "l2t_log_linear_nll_shuffled": wrong,
        "l2t_log_linear_gain": 1 - right / wrong,
    }
    assert dict(figures) == pytest.approx(expected, rel=1e-3)  # the model's measure rules MASK out, a bag gives it 1e-4
    assert figures["t2l_ridge_cosine"] > 0.9
    assert figures["l2t_log_linear_nll"] < figures["unigram_nll"]


def test_what_would_cost_minutes_is_left_out(data: PreparedData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_baselines, "MAX_LOG_LINEAR_WEIGHTS", 1)
    assert set(baseline_metrics(data, 20, 4, 0)) == {"t2l_ridge_cosine", "unigram_nll"}

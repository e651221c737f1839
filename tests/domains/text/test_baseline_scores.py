"""The baselines of a run's own data, by the measures of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.commands.bundled import find_recipe
from accel_train.data.heldout import heldout_pairs
from accel_train.domains.text import baselines as text_baselines
from accel_train.domains.text.baseline_scores import baseline_metrics, metric_names
from accel_train.domains.text.both_ways import cosine_sum, text_nll_sums
from accel_train.domains.text.dataset import PreparedData
from accel_train.domains.text.prepare import DataConfig, prepare_data
from accel_train.options import strict_yaml
from tests.domains.text.test_baselines import Texts


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
    monkeypatch.setattr(text_baselines, "MAX_LINEAR_WEIGHTS", 8 * data.tokenizer.vocab_size - 1)
    # Of other arguments: those above are remembered.
    assert list(baseline_metrics(data, 21, 4, 0)) == ["unigram_nll"]
    assert metric_names(data)[-1] == "unigram_nll"
    assert "t2l_ridge_cosine" not in metric_names(data)
    # A vocabulary larger than the features counts no more than these.
    monkeypatch.setattr(text_baselines, "MAX_FEATURES", 4)
    assert "t2l_ridge_cosine" in metric_names(data)


@pytest.mark.parametrize("preset", ["image_demo", "image_shapes"])
def test_presets_of_pictures_keep_ridge_regression(preset: str) -> None:
    found: Any = strict_yaml.read_yaml(find_recipe("mmdit").parent / "presets" / f"{preset}.yaml")
    texts = Texts(1)
    texts.latent = torch.zeros(1, 3 * found["pictures"]["size"] ** 2)
    assert text_baselines.fits_linear(texts, found["data"]["vocab_size"])
    # Pictures of 128 x 128 pixels would take minutes.
    texts.latent = torch.zeros(1, 3 * 128**2)
    assert not text_baselines.fits_linear(texts, found["data"]["vocab_size"])

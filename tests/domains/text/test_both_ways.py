"""Held-out figures and sampling in both directions, against models whose answers are known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from accel_train.data import progress
from accel_train.data.heldout import heldout_batches, heldout_pairs
from accel_train.domains.diffusion.latents import LatentDiffusionConfig
from accel_train.domains.diffusion.masked_text import gain
from accel_train.domains.diffusion.sampling import LatentSamplingConfig, TextSamplingConfig
from accel_train.domains.models.mmdit import MMDiTOutput
from accel_train.domains.text.both_ways import METRICS, BothWays, EvaluationConfig, metrics_from_sums
from accel_train.domains.text.samples import summary

VOCABULARY, MASK, LENGTH, DIM = 8, 7, 5, 8


class Data:
    """Sample i is the token i % 7 repeated, and its latent a unit vector that names the token."""

    fingerprint = "x"

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        token = index % 7
        return {
            "tokens": torch.full((LENGTH,), token),
            "text_mask": torch.ones(LENGTH, dtype=torch.bool),
            "maskable": torch.ones(LENGTH, dtype=torch.bool),
            "latent": torch.eye(DIM)[token].unsqueeze(0),
        }


class Oracle(nn.Module):
    """Reads the token off a clean latent and the latent off clean text; knows nothing where a condition is absent."""

    def forward(
        self, tokens: Tensor, latents: Tensor, text_time: Tensor, latent_time: Tensor, mask: Tensor
    ) -> MMDiTOutput:
        clean = (latent_time == 0).float().view(-1, 1, 1)
        logits = 30.0 * clean * latents[:, :1] * torch.tensor([1.0] * 7 + [0.0])
        token = tokens.mode(-1).values.clamp(max=6)
        x0 = torch.eye(DIM)[token].unsqueeze(1) * (text_time == 0).float().view(-1, 1, 1)
        return MMDiTOutput(logits.expand(-1, tokens.shape[1], -1), x0)


class Still(nn.Module):
    """Predicts 0."""

    def forward(self, tokens: Tensor, latents: Tensor, *_: Tensor) -> MMDiTOutput:
        return MMDiTOutput(torch.zeros(*tokens.shape, VOCABULARY), torch.zeros_like(latents))


def both(guidance: float = 1.0) -> BothWays:
    flow = LatentDiffusionConfig(prediction="x0")
    return BothWays(
        Oracle(), MASK, 0, flow, TextSamplingConfig(8, guidance=guidance), LatentSamplingConfig(4, guidance)
    )


def total(world_size: int, count: int = 21, batch_size: int = 4, timesteps: int = 4) -> dict[str, float]:
    sums: dict[str, float] = {}
    for rank in range(world_size):
        for batch, shuffled in heldout_pairs(Data(30), count, batch_size, rank, world_size, torch.device("cpu")):
            for name, value in both().metric_sums(batch, shuffled, timesteps).items():
                sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def test_an_oracle_gets_the_figures_of_an_oracle() -> None:
    figures = metrics_from_sums(total(1, timesteps=64), 64)
    assert figures["l2t_nll"] == pytest.approx(0, abs=1e-3)
    assert figures["unconditional_nll"] == pytest.approx(math.log(7), rel=0.1)
    assert figures["l2t_nll_shuffled"] > 20  # certain, and wrong
    assert figures["l2t_accuracy"] == 1
    assert figures["t2l_cosine"] == pytest.approx(1, abs=1e-5)
    assert figures["t2l_mean_cosine"] == pytest.approx(1, abs=1e-5)
    assert figures["t2l_cosine_shuffled"] < 0.3
    assert (figures["evaluated_samples"], figures["evaluated_tokens"]) == (21, 21 * LENGTH)
    assert len(summary(figures)) == 2
    baselines = {"t2l_ridge_cosine": 0.95, "unigram_nll": 1.9, "l2t_log_linear_nll": 0.5}
    baselines |= {"l2t_log_linear_nll_shuffled": 2.0, "l2t_log_linear_gain": 0.75}
    l2t, t2l = summary(figures | baselines)
    assert l2t.endswith("; log-linear: 0.500, 2.000 (75.0% less); unigrams: 1.900 without")
    assert t2l.endswith("; ridge regression on the counts of its tokens: 0.950")


def test_texts_without_a_word_have_no_gain() -> None:
    """Empty captions alone: no token is counted, and every sum is 0."""
    names = (*METRICS, "tokens", "masked", "samples")
    found = metrics_from_sums(dict.fromkeys(names, 0.0) | {"samples": 4.0}, 2)
    assert found["l2t_nll_shuffled"] == found["l2t_gain"] == 0
    assert gain(0.5, 2.0) == 0.75


@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 4), (3, 2), (4, 8)])
def test_figures_do_not_depend_on_the_number_of_processes(world_size: int, batch_size: int) -> None:
    assert total(world_size, batch_size=batch_size) == pytest.approx(total(1), rel=1e-4, abs=1e-3)


def test_every_rank_runs_equally_many_batches_and_each_sample_once() -> None:
    ranks = [list(heldout_pairs(Data(30), 21, 4, r, 4, torch.device("cpu"))) for r in range(4)]
    assert len({len(batches) for batches in ranks}) == 1
    counted = [int(s) for b in ranks for x, _ in b for s, w in zip(x["sample"], x["weight"], strict=True) if w]
    assert sorted(counted) == list(range(21))
    partners = [(int(x["sample"][0]), int(y["sample"][0])) for b in ranks for x, y in b]
    assert all(a != b for a, b in partners)


def test_the_first_process_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    for rank in (0, 1):
        assert len(list(heldout_batches(Data(30), 21, 4, rank, 2, torch.device("cpu")))) == 3
    lines = [line.split(" samples")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == [f"evaluation: {done} of 21" for done in (8, 16, 21)]


def test_errors_of_latents_predicted_from_noised_ones() -> None:
    """The oracle is exact with the right text, off by two unit vectors with another's, and predicts 0 without."""
    batch, shuffled = next(heldout_pairs(Data(30), 7, 7, 0, 1, torch.device("cpu")))
    batch["weight"][-1] = 0
    sums = both().latent_error_sums(batch, shuffled, 3)
    assert sums["t2l_error"] == pytest.approx(0, abs=1e-6)
    assert sums["t2l_error_shuffled"] == pytest.approx(6 * 2 / DIM)
    assert sums["unconditional_error"] == pytest.approx(6 * 1 / DIM)
    velocity = replace(both(), diffusion=LatentDiffusionConfig(), model=Still())
    noised = velocity.latent_error_sums(batch, shuffled, 64)
    # A velocity of 0 leaves the noised latent: t (noise - x0) away, whose square is 1 + 1 / DIM times 1 / 3.
    assert noised["t2l_error"] / 6 == pytest.approx((1 + 1 / DIM) / 3, rel=0.1)


def test_sampling_in_both_directions() -> None:
    batch = next(heldout_batches(Data(30), 6, 6, 0, 1, torch.device("cpu")))
    assert torch.equal(both().sample_text(batch), batch["tokens"])
    assert torch.allclose(both(guidance=1.0).sample_latents(batch), batch["latent"], atol=1e-5)
    assert torch.allclose(both(guidance=2.0).sample_latents(batch), 2 * batch["latent"], atol=1e-4)


def test_evaluation_is_due_at_the_end_and_on_the_way() -> None:
    assert [s for s in range(1, 11) if EvaluationConfig().due(s, 10)] == [10]
    assert [s for s in range(1, 11) if EvaluationConfig(every=4).due(s, 10)] == [4, 8, 10]


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (0.211, "(21.1% less)"),
        (-0.0004, "(less than 0.05% apart)"),
        (0.0, "(less than 0.05% apart)"),
        (-0.052, "(5.2% more)"),
    ],
)
def test_a_summary_says_less_only_of_what_is_less(gain: float, words: str) -> None:
    names = ("l2t_nll", "l2t_nll_shuffled", "unconditional_nll", "l2t_accuracy", "t2l_cosine", "t2l_mean_cosine")
    figures = dict.fromkeys(names, 1.0) | {"l2t_gain": gain, "t2l_cosine_shuffled": -0.0001}
    text, latent = summary(figures)
    assert words in text
    assert latent.endswith("0.000 against shuffled ones, 1.000 in one step")
    assert "-0.0" not in text + latent

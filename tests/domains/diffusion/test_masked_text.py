"""Masked text diffusion against closed forms, fp64, and a distribution whose likelihood is known exactly."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from accel_train import rng
from accel_train.domains.diffusion import masked_text, timesteps

MASK = 3
PAD = 4


def test_weight_is_the_schedule_s():
    """sigma(t) = -log(1 - (1 - eps) t), differentiated by autograd in fp64."""
    time = torch.linspace(1e-4, 1 - 1e-4, 500, dtype=torch.float64, requires_grad=True)
    sigma = -torch.log1p(-(1 - masked_text.SCHEDULE_EPSILON) * time)
    (slope,) = torch.autograd.grad(sigma.sum(), time)
    torch.testing.assert_close(masked_text.elbo_weight(time), slope / torch.expm1(sigma), rtol=1e-11, atol=0)
    torch.testing.assert_close(masked_text.mask_probability(time), 1 - torch.exp(-sigma), rtol=1e-11, atol=1e-15)


def test_share_of_masked_positions():
    times = torch.tensor([1e-4, 0.1, 0.5, 0.9, 1 - 1e-4])
    tokens, maskable = torch.zeros(5, 40_000, dtype=torch.long), torch.ones(5, 40_000, dtype=torch.bool)
    draws = rng.uniform(rng.sample_keys(0, "mask", 0, torch.arange(5)), (40_000,))
    noisy, masked = masked_text.corrupt(tokens, maskable, times, draws, MASK)
    assert torch.equal(noisy == MASK, masked)
    for count, time in zip(masked.sum(-1).tolist(), times.tolist(), strict=True):
        assert stats.binomtest(count, 40_000, (1 - 1e-4) * time).pvalue > 1e-3


def test_clean_absent_and_padding():
    tokens = torch.tensor([[0, 1, 2, PAD]] * 3)
    maskable = tokens != PAD
    draws = torch.full((3, 4), 1 - 2.0**-24)
    draws[0] = 0
    noisy, masked = masked_text.corrupt(tokens, maskable, torch.tensor([0.0, 1.0, 0.5]), draws, MASK)
    assert noisy.tolist() == [[0, 1, 2, PAD], [MASK, MASK, MASK, PAD], [0, 1, 2, PAD]]
    assert masked.sum(-1).tolist() == [0, 3, 0]


def example(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(4, 6, 9, generator=generator, dtype=torch.float64) * 3).to(dtype)
    tokens = torch.randint(4, 9, (4, 6), generator=generator)
    maskable = torch.rand(4, 6, generator=generator) < 0.8
    masked = maskable & (torch.rand(4, 6, generator=generator) < 0.6)
    masked[3] = False
    return logits, tokens, maskable, masked, torch.tensor([0.1, 0.5, 0.9, 0.3])


def reference(logits, tokens, masked, time, weighting):
    """One position after the other, in fp64, the MASK column struck out."""
    sums = []
    for b in range(logits.shape[0]):
        total = 0.0
        for s in range(logits.shape[1]):
            if masked[b, s]:
                row = logits[b, s].double().tolist()
                others = [math.exp(x) for v, x in enumerate(row) if v != MASK]
                total += math.log(sum(others)) - row[tokens[b, s]]
        sums.append(total / time[b].item() if weighting == "elbo" else total)
    return torch.tensor(sums)


@pytest.mark.parametrize("weighting", ["elbo", "uniform"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_in_fp32(weighting, dtype):
    """bf16 logits are taken as they are and everything after them is fp32: as close as with fp32 logits."""
    logits, tokens, _, masked, time = example(dtype)
    before = logits.clone()
    sums = masked_text.loss_sums(logits, tokens, masked, time, MASK, weighting)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums, reference(logits, tokens, masked, time, weighting), rtol=2e-6, atol=1e-6)
    assert sums[3] == 0
    assert torch.equal(logits, before)


def test_gradient_reaches_masked_positions_only():
    logits, tokens, _, masked, time = example()
    logits.requires_grad_()
    masked_text.loss_sums(logits, tokens, masked, time, MASK).sum().backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad.abs().sum(-1) > 0, masked)
    assert logits.grad[..., MASK].abs().max() == 0
    expected = F.softmax(logits.detach().index_fill(-1, torch.tensor(MASK), -torch.inf), -1) - F.one_hot(tokens, 9)
    expected = expected * (masked / time[:, None])[..., None]
    torch.testing.assert_close(logits.grad, expected)


def test_a_clean_text_has_no_loss_and_no_nan():
    """At t = 0 the weight 1 / t is infinite: a term with coefficient 0 would become NaN."""
    logits, tokens, _, _, _ = example()
    logits.requires_grad_()
    sums = masked_text.loss_sums(logits, tokens, torch.zeros(4, 6, dtype=torch.bool), torch.zeros(4), MASK)
    (sums.sum() * 0.0).backward()
    assert sums.tolist() == [0.0] * 4
    assert logits.grad is not None
    assert logits.grad.abs().max() == 0


def test_term_weight_counts_without_a_forward():
    _, _, maskable, masked, _ = example()
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0])
    kept = [0, 1, 3]
    assert masked_text.term_weight(masked, maskable, weight).sum() == maskable[kept].sum()
    assert masked_text.term_weight(masked, maskable, weight, "uniform").sum() == masked[kept].sum()


def test_correct_counts():
    logits, tokens, _, masked, _ = example()
    logits[..., MASK] = 100.0
    logits.scatter_(-1, tokens[..., None], 50.0)
    assert torch.equal(masked_text.correct_counts(logits, tokens, masked, MASK), masked.sum(-1))
    assert masked_text.correct_counts(logits, tokens + 1 - 2 * (tokens == 8).long(), masked, MASK).sum() == 0


def toy_distribution():
    """Probability of each of the 27 texts of 3 tokens out of 3, with strong dependence between positions."""
    weights = torch.randn(27, generator=torch.Generator().manual_seed(1), dtype=torch.float64).mul(1.5).exp()
    return (weights / weights.sum()).view(3, 3, 3)


def posterior_logits(state, joint):
    """log p(token at i | what is not masked) for states (B, 3), exactly; MASK gets no probability. (B, 3,
    5)"""
    table = torch.zeros(4, 4, 4, 3, 3, dtype=torch.float64)
    for known in itertools.product(range(4), repeat=3):
        fits = joint.clone()
        for place, token in enumerate(known):
            if token != MASK:
                fits = fits * (torch.arange(3) == token).view([3 if i == place else 1 for i in range(3)])
        for place in range(3):
            table[known][place] = fits.sum([i for i in range(3) if i != place]) / fits.sum()
    return F.pad(table[state[:, 0], state[:, 1], state[:, 2]].log(), (0, 2), value=-1e9)


@pytest.mark.parametrize("sampling", ["low_discrepancy", "uniform"])
def test_elbo_of_the_exact_predictor_is_the_likelihood(sampling):
    """With exact conditionals every order of unmasking telescopes to log p(x): the bound is tight, text by
    text."""
    joint, count = toy_distribution(), 60_000
    for text in [(0, 0, 0), (1, 2, 0), (2, 1, 1)]:
        tokens = torch.tensor([text]).expand(count, 3)
        batch = {"position": torch.arange(count), "occurrence": torch.arange(count)}
        time = timesteps.training_times(batch, 0, "t", 0, count, sampling)
        draws = rng.uniform(rng.sample_keys(0, f"m{text}", 0, torch.arange(count)), (3,))
        maskable = torch.ones_like(tokens, dtype=torch.bool)
        noisy, masked = masked_text.corrupt(tokens, maskable, time, draws, MASK)
        sums = masked_text.loss_sums(posterior_logits(noisy, joint), tokens, masked, time, MASK)
        exact = -joint[text].log()
        error = sums.std() / math.sqrt(count)
        assert abs(sums.mean() - exact) < 3.5 * error + 1e-3
        assert error < 0.05 * exact  # else the comparison above says nothing
        per_token = sums.sum() / masked_text.term_weight(masked, maskable, torch.ones(count)).sum()
        assert per_token == pytest.approx(exact.item() / 3, rel=0.15)


def test_elbo_of_a_wrong_predictor_is_larger():
    joint, count = toy_distribution(), 60_000
    batch = {"position": torch.arange(count), "occurrence": torch.arange(count)}
    texts = rng.categorical(rng.sample_keys(0, "texts", 0, torch.arange(count)), joint.flatten())
    tokens = torch.stack([texts // 9, texts // 3 % 3, texts % 3], -1)
    time = timesteps.training_times(batch, 0, "t", 0, count)
    draws = rng.uniform(rng.sample_keys(0, "m", 0, torch.arange(count)), (3,))
    noisy, masked = masked_text.corrupt(tokens, torch.ones_like(tokens, dtype=torch.bool), time, draws, MASK)
    entropy = -(joint * joint.log()).sum()
    exact = masked_text.loss_sums(posterior_logits(noisy, joint), tokens, masked, time, MASK).mean()
    independent = torch.stack([joint.sum([1, 2]), joint.sum([0, 2]), joint.sum([0, 1])]).log()
    marginals = F.pad(independent, (0, 2), value=-1e9).expand(count, 3, 5)
    wrong = masked_text.loss_sums(marginals, tokens, masked, time, MASK).mean()
    assert exact == pytest.approx(entropy.item(), rel=0.03)
    gap = sum(-(m.exp() * m).sum() for m in independent) - entropy  # the total correlation, in nats
    assert (wrong - exact).item() == pytest.approx(gap.item(), rel=0.15)

"""Samplers against diffusers, and on distributions whose optimal prediction is known in closed form."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from accel_train import rng
from accel_train.config import UsageError
from accel_train.domains.diffusion import sampling
from accel_train.domains.diffusion.latents import LatentDiffusionConfig, coefficients, predicted_x0, target
from accel_train.domains.diffusion.sampling import (
    LatentSamplingConfig,
    TextSamplingConfig,
    guided,
    sample_latents,
    sample_text,
)

MASK, PAD = 3, 4
DDPM_LINEAR = [LatentDiffusionConfig("ddpm", "linear", p) for p in ("epsilon", "x0", "v")]
EVERY = [
    LatentDiffusionConfig(),
    LatentDiffusionConfig(prediction="x0"),
    *DDPM_LINEAR,
    *[LatentDiffusionConfig("ddpm", "cosine", p) for p in ("epsilon", "x0", "v")],
]


def some_model(x, time):
    """Nothing optimal: any smooth function of x and time will do to compare two samplers."""
    mix = torch.randn(8, 8, generator=torch.Generator().manual_seed(3)) / 4
    return torch.tanh(x @ mix) * (1 + time.view(-1, 1, 1))


def start(count, shape):
    return rng.normal(rng.sample_keys(5, "sampling/latent", 0, torch.arange(count)), shape)


def test_a_shift_moves_the_steps_to_noisy_times():
    seen: list[float] = []

    def predict(x, time):
        seen.append(float(time[0]))
        return x

    sample_latents(predict, (2, 8), LatentDiffusionConfig(), LatentSamplingConfig(4, shift=3.0), 5, torch.arange(1))
    assert seen == pytest.approx([1, 0.9, 0.75, 0.5])  # 3 t / (1 + 2 t) of 1, 3/4, 1/2, 1/4


def test_tokens_rarer_than_the_rounding_of_fp32_are_drawn():
    """A frequent token and 20 of probability 1e-8 each, where numbers just below 1 are 6e-8 apart."""
    logits = torch.tensor([1 - 20e-8, *[1e-8] * 20, 1.0], dtype=torch.float64).log().float()
    last_draw = torch.tensor([1 - 2.0**-24])
    assert sampling._draw_tokens(logits[None], last_draw, mask_id=21, temperature=1.0).tolist() == [15]


@pytest.mark.parametrize("config", DDPM_LINEAR, ids=lambda c: c.prediction)
def test_ddim_is_that_of_diffusers(config):
    from diffusers import DDIMScheduler

    scheduler = DDIMScheduler(
        1000,
        beta_start=1e-4,
        beta_end=0.02,
        clip_sample=False,
        timestep_spacing="trailing",
        prediction_type={"epsilon": "epsilon", "x0": "sample", "v": "v_prediction"}[config.prediction],
    )
    scheduler.set_timesteps(20)
    expected = start(6, (2, 8))
    for step in scheduler.timesteps:  # 999, 949, ...: our k-th step, counted from 0
        time = torch.full((6,), (step.item() + 1) / 1000)
        expected = scheduler.step(some_model(expected, time), step, expected).prev_sample
    drawn = sample_latents(some_model, (2, 8), config, LatentSamplingConfig(20), 5, torch.arange(6))
    torch.testing.assert_close(drawn, expected, rtol=2e-4, atol=2e-4 * expected.abs().max().item())


def test_euler_is_that_of_diffusers():
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(1000)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 20, 20).tolist())
    expected = start(6, (2, 8))
    for step in scheduler.timesteps:
        velocity = some_model(expected, torch.full((6,), step.item() / 1000))
        expected = scheduler.step(velocity, step, expected).prev_sample
    drawn = sample_latents(some_model, (2, 8), LatentDiffusionConfig(), LatentSamplingConfig(20), 5, torch.arange(6))
    torch.testing.assert_close(drawn, expected, rtol=1e-5, atol=1e-5)


def optimal(config, mean, spread):
    """The prediction with the least squared error for x0 ~ N(mean, spread^2), element by element."""

    def predict(x, time):
        a, b = (c.view(-1, 1, 1) for c in coefficients(time.double(), config))
        x = x.double()
        gain = a * spread**2 / (a**2 * spread**2 + b**2)
        x0 = mean + gain * (x - a * mean)
        return target(x0, (x - a * x0) / b, time.double(), config)

    return predict


@pytest.mark.parametrize("config", EVERY, ids=lambda c: f"{c.kind}-{c.schedule}-{c.prediction}")
def test_gaussian_is_sampled_exactly(config):
    """Mean and variance of 20,000 samples; their standard errors are 0.7 % and 1 % of spread and variance."""
    mean = torch.tensor([0.5, -2.0], dtype=torch.float64)
    spread = torch.tensor([0.3, 1.5], dtype=torch.float64)
    drawn = sample_latents(
        optimal(config, mean, spread), (1, 2), config, LatentSamplingConfig(300), 0, torch.arange(20_000)
    ).double()[:, 0]
    assert ((drawn.mean(0) - mean).abs() / spread < 0.04).all()
    assert ((drawn.std(0) / spread - 1).abs() < 0.04).all()
    assert abs(torch.corrcoef(drawn.T)[0, 1]) < 0.03


@pytest.mark.parametrize("config", EVERY, ids=lambda c: f"{c.kind}-{c.schedule}-{c.prediction}")
def test_one_step_is_the_mean(config):
    """From pure noise the best x0 is the mean; `a` at t = 1 is 0.0064 for ddpm, not 0."""
    mean, spread = torch.tensor([0.5, -2.0]).double(), torch.tensor([0.3, 1.5]).double()
    drawn = sample_latents(optimal(config, mean, spread), (1, 2), config, LatentSamplingConfig(1), 0, torch.arange(50))
    torch.testing.assert_close(drawn.double(), mean.expand(50, 1, 2), rtol=0, atol=0.06)


def test_latents_do_not_depend_on_the_others_drawn():
    config = LatentDiffusionConfig()
    whole = sample_latents(some_model, (2, 8), config, LatentSamplingConfig(5), 0, torch.arange(9))
    part = sample_latents(some_model, (2, 8), config, LatentSamplingConfig(5), 0, torch.tensor([7, 2]))
    torch.testing.assert_close(part, whole[[7, 2]], rtol=1e-5, atol=1e-6)
    other = sample_latents(some_model, (2, 8), config, LatentSamplingConfig(5), 1, torch.arange(9))
    assert (other - whole).abs().max() > 0.1


def half(x, time):
    return some_model(x, time) / 2 - 0.1


@pytest.mark.parametrize("config", EVERY, ids=lambda c: f"{c.kind}-{c.schedule}-{c.prediction}")
def test_guidance_on_x0_is_guidance_on_the_prediction(config):
    def both(x, time):
        return half(x, time) + 2.5 * (some_model(x, time) - half(x, time))

    plain = sample_latents(both, (2, 8), config, LatentSamplingConfig(8), 0, torch.arange(4))
    sampling = LatentSamplingConfig(8, guidance=2.5)
    drawn = sample_latents(some_model, (2, 8), config, sampling, 0, torch.arange(4), half)
    torch.testing.assert_close(drawn, plain, rtol=1e-3, atol=1e-3 * plain.abs().max().item())


def test_guidance_of_directions_is_free_of_their_length():
    config = LatentDiffusionConfig(prediction="x0", loss="cosine")
    sampling = LatentSamplingConfig(8, guidance=2.0)

    def longer(x, time):
        return 30 * half(x, time)

    one, other = (sample_latents(some_model, (2, 8), config, sampling, 0, torch.arange(4), f) for f in (half, longer))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_guided_closed_form():
    conditional, unconditional = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    for scale in (0.0, 0.3, 1.0, 4.0):
        expected = unconditional + scale * (conditional - unconditional)
        torch.testing.assert_close(guided(conditional, unconditional, scale), expected)


def forbidden(x, time):
    raise AssertionError("guidance 1 must cost one forward")


def test_forwards_are_counted():
    calls = []

    def counting(x, time):
        calls.append(time)
        assert not torch.is_grad_enabled()
        return some_model(x, time)

    config = LatentDiffusionConfig()
    sample_latents(counting, (2, 8), config, LatentSamplingConfig(7), 0, torch.arange(3), forbidden)
    assert [time.tolist() for time in calls] == [[pytest.approx(1 - k / 7)] * 3 for k in range(7)]
    calls.clear()

    def logits(tokens, time):
        calls.append(time)
        return torch.zeros(*tokens.shape, 5)

    # Two tokens and 20 steps: most steps draw nothing, and still call the model, as other processes may need it.
    tokens, maskable = torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2, dtype=torch.bool)
    sample_text(logits, tokens, maskable, MASK, TextSamplingConfig(20), 0, torch.arange(3), forbidden)
    assert [time.tolist() for time in calls] == [[pytest.approx(1 - k / 20)] * 3 for k in range(20)]


def test_guidance_needs_the_unconditional():
    with pytest.raises(UsageError, match="guidance=2"):
        sample_latents(some_model, (2, 8), LatentDiffusionConfig(), LatentSamplingConfig(2, 2.0), 0, torch.arange(2))
    tokens = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(UsageError, match="guidance=2"):
        sample_text(forbidden, tokens, tokens == 0, MASK, TextSamplingConfig(2, guidance=2.0), 0, torch.arange(1))


def toy_joint():
    weights = torch.randn(27, generator=torch.Generator().manual_seed(1), dtype=torch.float64).mul(1.5).exp()
    return (weights / weights.sum()).view(3, 3, 3)


def posterior_table(joint):
    """(4, 4, 4, 3, 3): for each state of 3 positions, MASK being 3, p(token at place | what is not
    masked)."""
    table = torch.zeros(4, 4, 4, 3, 3, dtype=torch.float64)
    for known in itertools.product(range(4), repeat=3):
        fits = joint.clone()
        for place, token in enumerate(known):
            if token != MASK:
                fits = fits * (torch.arange(3) == token).view([3 if i == place else 1 for i in range(3)])
        for place in range(3):
            table[known][place] = fits.sum([i for i in range(3) if i != place]) / fits.sum()
    return table


def exact_chain(table, steps):
    """Distribution of the text after `steps` steps, by following the probability of all 64 states."""
    states = {(MASK,) * 3: 1.0}
    for k in range(steps):
        masked_now, masked_next = (1.0 if k == 0 else (1 - 1e-4) * (1 - k / steps)), (1 - 1e-4) * (1 - (k + 1) / steps)
        stay, after = masked_next / masked_now, {}
        for state, mass in states.items():
            options = []
            for place, token in enumerate(state):
                drawn = [(v, (1 - stay) * table[state][place][v].item()) for v in range(3)]
                options.append([(token, 1.0)] if token != MASK else [(MASK, stay), *drawn])
            for choice in itertools.product(*options):
                following = tuple(token for token, _ in choice)
                chance = mass * choice[0][1] * choice[1][1] * choice[2][1]
                after[following] = after.get(following, 0.0) + chance
        states = after
    return np.array([states[text] for text in itertools.product(range(3), repeat=3)])


def draw_texts(table, count, config):
    def predict(state, time):
        return F.pad(table[state[:, 0], state[:, 1], state[:, 2]].log(), (0, 2), value=-1e9)

    tokens = torch.full((count, 3), 2)
    texts = sample_text(predict, tokens, tokens == 2, MASK, config, 0, torch.arange(count))
    return torch.bincount((texts * torch.tensor([9, 3, 1])).sum(-1), minlength=27).numpy()


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_text_sampler_is_the_exact_chain(steps):
    """Few steps draw dependent tokens at once and miss the joint: by just as much as the chain itself
    does."""
    joint = toy_joint()
    counts = draw_texts(posterior_table(joint), 30_000, TextSamplingConfig(steps))
    expected = exact_chain(posterior_table(joint), steps)
    assert expected.sum() == pytest.approx(1, abs=1e-12)
    assert stats.chisquare(counts, expected * 30_000).pvalue > 1e-3
    if steps == 1:
        assert stats.chisquare(counts, joint.flatten().numpy() * 30_000).pvalue < 1e-6


def test_text_sampler_with_many_steps_draws_the_joint():
    joint = toy_joint()
    counts = draw_texts(posterior_table(joint), 5_000, TextSamplingConfig(500))
    assert stats.chisquare(counts, joint.flatten().numpy() * 5_000).pvalue > 1e-3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(temperature):
    logits = torch.tensor([1.0, 0.0, 2.0, 5.0, -1.0])  # MASK is the likeliest, and must never be drawn
    tokens = torch.zeros(20_000, 1, dtype=torch.long)
    config = TextSamplingConfig(3, temperature)
    texts = sample_text(
        lambda x, t: logits.expand(20_000, 1, 5), tokens, tokens == 0, MASK, config, 0, torch.arange(20_000)
    )
    counts = torch.bincount(texts.flatten(), minlength=5)
    assert counts[MASK] == 0
    kept = torch.tensor([0, 1, 2, 4])
    expected = (logits[kept].double() / temperature).softmax(-1) * 20_000
    assert stats.chisquare(counts[kept].numpy(), expected.numpy()).pvalue > 1e-3


def test_temperature_zero_takes_the_likeliest():
    logits = torch.randn(6, 4, 9, generator=torch.Generator().manual_seed(0))
    logits[..., MASK] = 50.0
    tokens = torch.zeros(6, 4, dtype=torch.long)
    texts = sample_text(lambda x, t: logits, tokens, tokens == 0, MASK, TextSamplingConfig(3, 0.0), 0, torch.arange(6))
    assert torch.equal(texts, logits.index_fill(-1, torch.tensor(MASK), -torch.inf).argmax(-1))
    assert (logits[..., MASK] == 50.0).all()  # the model's own tensor is left alone


def test_only_maskable_positions_move_and_none_stays_masked():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 40, (50, 12), generator=generator)
    tokens[:, 9:] = PAD
    maskable = (torch.rand(50, 12, generator=generator) < 0.7) & (tokens != PAD)
    seen = []

    def predict(state, time):
        seen.append(state.clone())
        return torch.randn(50, 12, 40, generator=torch.Generator().manual_seed(len(seen))).bfloat16()

    before = tokens.clone()
    texts = sample_text(predict, tokens, maskable, MASK, TextSamplingConfig(10), 0, torch.arange(50))
    assert torch.equal(tokens, before)
    assert torch.equal(texts[~maskable], tokens[~maskable])
    assert (texts != MASK).all()
    assert (seen[0][maskable] == MASK).all()
    for earlier, later in itertools.pairwise([*seen, texts]):  # once drawn, a token stays
        known = earlier != MASK
        assert torch.equal(earlier[known], later[known])


def test_texts_do_not_depend_on_the_others_drawn():
    def predict(state, time):
        return torch.sin(torch.arange(30.0) * (1 + state.float().mean(-1)).view(-1, 1, 1)).expand(*state.shape, 30)

    tokens = torch.zeros(8, 5, dtype=torch.long)
    config = TextSamplingConfig(6)
    whole = sample_text(predict, tokens, tokens == 0, MASK, config, 0, torch.arange(8))
    part = sample_text(predict, tokens[:2], tokens[:2] == 0, MASK, config, 0, torch.tensor([6, 1]))
    assert torch.equal(part, whole[[6, 1]])
    assert not torch.equal(sample_text(predict, tokens, tokens == 0, MASK, config, 1, torch.arange(8)), whole)


def test_text_guidance_sharpens_the_odds():
    """Guidance w samples from p_c^w p_u^(1 - w), normalised."""
    conditional, unconditional = torch.tensor([2.0, 1.0, 0.0, 0.0, 0.5]), torch.tensor([0.0, 1.0, 1.5, 0.0, 0.5])
    tokens = torch.zeros(20_000, 1, dtype=torch.long)
    config = TextSamplingConfig(2, guidance=1.7)
    texts = sample_text(
        lambda x, t: conditional.expand(20_000, 1, 5) + 3,  # a constant for each position says nothing
        tokens,
        tokens == 0,
        MASK,
        config,
        0,
        torch.arange(20_000),
        lambda x, t: unconditional.expand(20_000, 1, 5),
    )
    kept = torch.tensor([0, 1, 2, 4])
    expected = (1.7 * conditional[kept] - 0.7 * unconditional[kept]).double().softmax(-1) * 20_000
    counts = torch.bincount(texts.flatten(), minlength=5)[kept]
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-3


def test_directions_are_sampled_with_the_length_of_normalised_latents():
    config = LatentDiffusionConfig(prediction="x0", loss="normalised_mse")
    drawn = sample_latents(some_model, (2, 8), config, LatentSamplingConfig(4), 0, torch.arange(5))
    torch.testing.assert_close(drawn.norm(dim=-1), torch.full((5, 2), 8**0.5))
    assert predicted_x0(drawn * 3, drawn, torch.ones(5), config).allclose(drawn, atol=1e-5)

"""Rollouts against powers of a linear map, and the search against trying every path."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from accel_train.config import UsageError
from accel_train.domains.pde import rollout as rollouts
from accel_train.domains.pde.options import ConditioningConfig
from accel_train.domains.pde.rollout import Proposal, conditioned_rollout, rollout


def numbers(*values: float) -> Tensor:
    """(B, 1, 1, 1)"""
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1, 1)


def adding(amount: float) -> Proposal:
    return lambda state, _number: state + amount


def stay(state: Tensor) -> Tensor:
    return state


def far_from(goal: Sequence[float]) -> rollouts.Score:
    """Distance of the last fields from a goal for each sample."""
    return lambda _first, ahead: (ahead[:, -1].flatten() - torch.tensor(goal, dtype=torch.float64)).abs()


def test_rollout_is_powers_of_the_step() -> None:
    matrix = torch.tensor([[0.5, 1.0], [-0.25, 0.75]], dtype=torch.float64)
    state = torch.randn(3, 2, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    states = rollout(lambda u: torch.einsum("ij,bjhw->bihw", matrix, u), state, 4)
    assert states.shape == (3, 4, 2, 1, 4)
    for t in range(4):
        expected = torch.einsum("ij,bjhw->bihw", torch.linalg.matrix_power(matrix, t + 1), state)
        torch.testing.assert_close(states[:, t], expected)


def test_rollout_keeps_no_graph() -> None:
    weight = torch.ones((), requires_grad=True)
    assert not rollout(lambda u: weight * u, numbers(1.0), 3).requires_grad


def test_each_sample_follows_its_own_best() -> None:
    proposals = [adding(0.0), adding(1.0), adding(-1.0)]
    config = ConditioningConfig(candidates=3, beam=1, horizon=1)
    path = conditioned_rollout(proposals, stay, far_from([2.0, -3.0, 0.0]), numbers(0, 0, 0), 3, config)
    assert path.flatten(1).tolist() == [[1, 2, 2], [-1, -2, -3], [0, 0, 0]]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_wide_beam_finds_what_trying_every_path_finds(steps: int) -> None:
    proposals: list[Proposal] = [lambda u, _n: 1.3 * u, lambda u, n: u - 0.7 - n, lambda u, _n: u**2 - 1]
    goal, start = [0.4, -1.7], numbers(0.9, 2.3)
    path = conditioned_rollout(proposals, stay, far_from(goal), start, steps, ConditioningConfig(3, 3**steps, 1))
    for row in range(2):
        ends: list[float] = []
        for chosen in itertools.product(proposals, repeat=steps):
            state = start[row : row + 1]
            for number, proposal in enumerate(chosen):
                state = proposal(state, number)
            ends.append(abs(float(state) - goal[row]))
        assert abs(float(path[row, -1]) - goal[row]) == pytest.approx(min(ends))


def test_the_horizon_sees_where_a_candidate_leads() -> None:
    """Near the goal at once, but the steps after it lead away."""

    def step(state: Tensor) -> Tensor:
        return torch.where(state > 0, state + 10, state + 1)

    proposals = [adding(-1.0), adding(0.5)]
    score = far_from([0.6])
    blind = conditioned_rollout(proposals, step, score, numbers(0.0), 3, ConditioningConfig(2, 1, horizon=1))
    seeing = conditioned_rollout(proposals, step, score, numbers(0.0), 3, ConditioningConfig(2, 1, horizon=3))
    assert float(blind[0, 0]) == 0.5
    assert float(seeing[0, 0]) == -1.0


def test_the_last_steps_are_judged_within_the_rollout() -> None:
    lengths: list[int] = []

    def score(_first: Tensor, ahead: Tensor) -> Tensor:
        lengths.append(ahead.shape[1])
        return ahead[:, -1].flatten()

    conditioned_rollout([adding(0.0), adding(1.0)], stay, score, numbers(0.0), 4, ConditioningConfig(2, 1, 3))
    assert lengths == [3, 3, 3, 3, 2, 2, 1, 1]  # of each of the two


def test_a_second_path_is_followed() -> None:
    """What looks worse at first is the better way, one step later."""
    proposals: list[Proposal] = [
        lambda u, n: u + (1.0 if n == 0 else 0.0),
        lambda u, n: u + (2.0 if n == 0 else torch.where(u == 2, 8.0, 0.0)),
    ]

    def score(_first: Tensor, ahead: Tensor) -> Tensor:
        end = ahead[:, -1].flatten()
        return torch.where(end == 10, 0.0, end)

    ends = {
        b: float(conditioned_rollout(proposals, stay, score, numbers(0.0), 2, ConditioningConfig(2, b, 1))[0, -1])
        for b in (1, 2)
    }
    assert ends == {1: 1.0, 2: 10.0}


def test_equal_scores_go_to_the_plain_step_and_nan_to_nobody() -> None:
    config = ConditioningConfig(2, 1, 1)

    def indifferent(_first: Tensor, ahead: Tensor) -> Tensor:
        return torch.zeros(len(ahead))

    path = conditioned_rollout([adding(1.0), adding(2.0)], stay, indifferent, numbers(0.0), 2, config)
    assert path.flatten().tolist() == [1, 2]
    broken: Proposal = lambda u, _n: u * torch.nan  # noqa: E731
    path = conditioned_rollout([broken, adding(2.0)], stay, far_from([0.0]), numbers(0.0), 2, config)
    assert path.flatten().tolist() == [2, 4]


def test_the_number_of_forwards_is_a_function_of_the_options() -> None:
    """A sharded model behind the step would wait for ever for a process that calls less often."""
    calls: list[int] = []

    def step(state: Tensor) -> Tensor:
        calls.append(len(state))
        return state + 1

    proposals = [rollouts.plain(step), rollouts.shifted(step, (0, 1))]
    for start in (numbers(0.0, 5.0), numbers(-3.0, torch.nan)):
        calls.clear()
        conditioned_rollout(proposals, step, far_from([1.0, 1.0]), start, 3, ConditioningConfig(2, 2, 2))
        # The first step has one path, the others two; the last has nothing after it.
        assert calls == [2] * (2 * 2 + 2 * 2 * 2 + 2 * 2)


def test_too_few_proposals_are_refused() -> None:
    with pytest.raises(UsageError, match="candidates 6: there are 1 proposals"):
        conditioned_rollout([adding(0.0)], stay, far_from([0.0]), numbers(0.0), 1, ConditioningConfig())


def test_a_shifted_step_is_the_step_where_the_equation_has_no_places() -> None:
    state = torch.randn(2, 1, 4, 8, generator=torch.Generator().manual_seed(0))

    def smoothing(u: Tensor) -> Tensor:
        return (u + u.roll(1, -1) + u.roll(1, -2)) / 3

    def by_place(u: Tensor) -> Tensor:
        return u * torch.arange(8.0)

    torch.testing.assert_close(rollouts.shifted(smoothing, (1, 3))(state, 0), smoothing(state))
    expected = state * (torch.arange(8.0) + 3) % 8
    torch.testing.assert_close(rollouts.shifted(by_place, (0, 3))(state, 0), state * ((torch.arange(8.0) + 3) % 8))
    assert not torch.allclose(expected, by_place(state))


def test_noise_is_keyed_by_sample_and_step() -> None:
    states = torch.randn(4, 2, 1, 16, generator=torch.Generator().manual_seed(0))
    states[2] *= 100
    sample = torch.tensor([5, 9, 2, 7])
    whole = rollouts.perturbed(stay, 0.1, 3, sample)(states, 1)
    alone = rollouts.perturbed(stay, 0.1, 3, sample[2:3])(states[2:3], 1)
    assert torch.equal(whole[2:3], alone)
    size = ((whole - states).square().mean((1, 2, 3)) / states.square().mean((1, 2, 3))).sqrt()
    assert ((size - 0.1).abs() < 0.04).all()
    for other in (
        rollouts.perturbed(stay, 0.1, 3, sample)(states, 2),
        rollouts.perturbed(stay, 0.1, 4, sample)(states, 1),
        rollouts.perturbed(stay, 0.1, 3, sample + 1)(states, 1),
    ):
        assert not torch.allclose(whole, other)


def test_more_candidates_than_there_are_ways_are_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match=r"evaluation.conditioning.candidates 11: at most 10"):
        ConditioningConfig(candidates=11)

"""Fields through time, one step after another, and the choice among several next steps without knowing the truth.

A `Step` maps fields (B, C, H, W) to those one time step later. It is called equally often on every process, so that
a sharded model may stand behind it, and runs without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accel_train import rng
from accel_train.config import PositiveInt, UsageError

Step = Callable[[Tensor], Tensor]
Proposal = Callable[[Tensor, int], Tensor]
"""One way to make the next fields: called with the fields and the number of the step."""
Score = Callable[[Tensor, Tensor], Tensor]
"""Called with the first fields (B, C, H, W) and those ahead (B, h, C, H, W); (B,), lower is better. Sees no truth."""


@torch.no_grad()
def rollout(step: Step, state: Tensor, steps: int) -> Tensor:
    """(B, C, H, W) -> (B, steps, C, H, W): the fields after each step, each made from the one before."""
    states: list[Tensor] = []
    for _ in range(steps):
        state = step(state)
        states.append(state)
    return torch.stack(states, dim=1) if states else state[:, None][:, :0]


MOST_CANDIDATES = 10


@dataclass(frozen=True)
class ConditioningConfig:
    """Test-time conditioning: several next steps are tried, and those that keep what must be kept are followed."""

    candidates: PositiveInt = 6
    """Next steps tried from each state: the plain one and variations of it; at most 10."""
    beam: PositiveInt = 2
    """States of each sample that are followed at once."""
    horizon: PositiveInt = 2
    """Steps, the tried one and plain ones after it, over which a candidate is judged. A step costs up to
    beam * candidates * horizon forwards, where a plain one costs one."""

    def __post_init__(self) -> None:
        if self.candidates > MOST_CANDIDATES:
            raise UsageError(
                f"evaluation.conditioning.candidates {self.candidates}: at most {MOST_CANDIDATES} next steps can be "
                "tried from a state; lower it, or raise evaluation.conditioning.beam"
            )


@torch.no_grad()
def conditioned_rollout(
    proposals: Sequence[Proposal], step: Step, score: Score, state: Tensor, steps: int, config: ConditioningConfig
) -> Tensor:
    """(B, C, H, W) -> (B, steps, C, H, W): the path of each sample that scores best of those followed to the end.

    A beam search: from each state followed, the first `config.candidates` of `proposals` give the next; each is led on
    by plain steps to the horizon, not beyond the end; `config.beam` of them with the lowest scores are followed. Of
    equal scores the earlier proposal wins, so give the plain step first.
    """
    if len(proposals) < config.candidates:
        raise UsageError(
            f"candidates {config.candidates}: there are {len(proposals)} proposals, at least as many as candidates are "
            "required. Lower candidates."
        )
    paths = [state[:, None]]  # each (B, 1 + steps so far, C, H, W)
    for number in range(steps):
        longer: list[Tensor] = []
        scores: list[Tensor] = []
        for path in paths:
            for proposal in proposals[: config.candidates]:
                following = proposal(path[:, -1], number)
                seen = [following]
                for _ in range(min(config.horizon, steps - number) - 1):
                    seen.append(step(seen[-1]))
                scores.append(score(state, torch.stack(seen, dim=1)).float())
                longer.append(torch.cat((path, following[:, None]), dim=1))
        paths = _best(longer, torch.stack(scores), config.beam)
    return paths[0][:, 1:]


def _best(paths: list[Tensor], scores: Tensor, beam: int) -> list[Tensor]:
    """The `beam` paths of each sample with the lowest scores (paths, B), the best first; NaN is the worst."""
    order = scores.nan_to_num(nan=torch.inf).argsort(dim=0, stable=True)[:beam]  # (beam, B)
    stacked, rows = torch.stack(paths), torch.arange(scores.shape[1], device=scores.device)
    return [stacked[chosen, rows] for chosen in order]


# -------------------------------------------------------------------------------------------------------- proposals
def plain(step: Step) -> Proposal:
    return lambda state, _number: step(state)


def shifted(step: Step, by: Sequence[int]) -> Proposal:
    """The step in a frame moved by so many points along (H, W), for periodic fields.

    For the equation it is the same step; for a model whose patches lie elsewhere it is another estimate of it.
    """
    back = [-n for n in by]
    return lambda state, _number: step(state.roll(list(by), (-2, -1))).roll(back, (-2, -1))


def perturbed(step: Step, scale: float, seed: int, sample: Tensor) -> Proposal:
    """The step from fields with noise, `scale` times their root mean square, keyed by (seed, step, sample (B,))."""

    def propose(state: Tensor, number: int) -> Tensor:
        noise = rng.normal(rng.sample_keys(seed, f"rollout/{scale!r}", number, sample), state.shape[1:])
        size = state.float().square().flatten(1).mean(1).sqrt()[:, None, None, None]
        return step(state + (scale * size * noise).to(state.dtype))

    return propose

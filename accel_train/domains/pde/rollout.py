"""Autoregressive rollout of fields in time, with an optional beam search that does not see the truth.

A `Step` maps fields (B, C, H, W) to those one time step later, without gradients. It is called equally often on every
process, so it may run a sharded model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from accel_train import rng
from accel_train.config import UsageError
from accel_train.domains.pde.options import ConditioningConfig

Step = Callable[[Tensor], Tensor]
Proposal = Callable[[Tensor, int], Tensor]
"""One way to compute the next fields, called with the fields and the number of the step."""
Score = Callable[[Tensor, Tensor], Tensor]
"""Function of the first fields (B, C, H, W) and the following ones (B, h, C, H, W), to (B,). Lower is better."""


@torch.no_grad()
def rollout(step: Step, state: Tensor, steps: int) -> Tensor:
    """Apply `step` repeatedly and return the fields after each step: (B, C, H, W) -> (B, steps, C, H, W)."""
    if steps == 0:  # `stack` needs a state
        return state[:, None][:, :0]
    states: list[Tensor] = []
    for _ in range(steps):
        state = step(state)
        states.append(state)
    return torch.stack(states, dim=1)


@torch.no_grad()
def conditioned_rollout(
    proposals: Sequence[Proposal], step: Step, score: Score, state: Tensor, steps: int, config: ConditioningConfig
) -> Tensor:
    """Roll out by beam search and return the best path of each sample: (B, C, H, W) -> (B, steps, C, H, W).

    From each state in the beam, the first `config.candidates` of `proposals` compute next states. Plain steps continue
    each of them to the horizon, but not beyond the end. The `config.beam` states with the lowest scores are followed.
    The earlier proposal wins a tie, so the plain step comes first.
    """
    if len(proposals) < config.candidates:
        raise UsageError(
            f"candidates {config.candidates}: there are {len(proposals)} proposals; at least as many as candidates are "
            "required. Lower candidates."
        )
    paths = [state[:, None]]  # each (B, 1 + steps so far, C, H, W)
    for number in range(steps):
        longer: list[Tensor] = []
        scores: list[Tensor] = []
        for path in paths:
            for proposal in proposals[: config.candidates]:
                candidate = proposal(path[:, -1], number)
                ahead = [candidate]
                for _ in range(min(config.horizon, steps - number) - 1):
                    ahead.append(step(ahead[-1]))
                scores.append(score(state, torch.stack(ahead, dim=1)).float())
                # Only the candidate is kept. The steps ahead of it were only taken to score it.
                longer.append(torch.cat((path, candidate[:, None]), dim=1))
        paths = _best(longer, torch.stack(scores), config.beam)
    return paths[0][:, 1:]


def _best(paths: list[Tensor], scores: Tensor, beam: int) -> list[Tensor]:
    """Select the `beam` paths of each sample with the lowest scores (paths, B), best first. NaN is the worst."""
    # A diverged candidate must not win, and devices differ in how they sort NaN.
    scores = scores.nan_to_num(nan=torch.inf)
    # Stable, so that the earlier proposal wins a tie on every device.
    order = scores.argsort(dim=0, stable=True)[:beam]  # (beam, B)
    stacked = torch.stack(paths)  # (paths, B, steps, C, H, W)
    rows = torch.arange(scores.shape[1], device=scores.device)
    return [stacked[chosen, rows] for chosen in order]


# -------------------------------------------------------------------------------------------------------- proposals
def plain(step: Step) -> Proposal:
    return lambda state, _number: step(state)


def shifted(step: Step, by: Sequence[int]) -> Proposal:
    """Return the step in a frame shifted by `by` points along (H, W), for periodic fields.

    The equation is invariant under the shift. The model's patches lie elsewhere, so its estimate differs.
    """
    forth = list(by)
    back = [-points for points in by]

    def propose(state: Tensor, _number: int) -> Tensor:
        following = step(state.roll(forth, (-2, -1)))
        return following.roll(back, (-2, -1))

    return propose


def perturbed(step: Step, scale: float, seed: int, sample: Tensor) -> Proposal:
    """Return the step from noisy fields. The noise is `scale` times their root mean square.

    It is keyed by (seed, step, sample (B,)).
    """

    def propose(state: Tensor, number: int) -> Tensor:
        # One stream per scale: with a shared one, all candidates would be multiples of the same noise.
        keys = rng.sample_keys(seed, f"rollout/{scale!r}", number, sample)
        noise = rng.normal(keys, state.shape[1:])
        # Computed per sample, because the fields of a batch may differ in size.
        mean_square = state.float().square().flatten(1).mean(1)
        root_mean_square = mean_square.sqrt()[:, None, None, None]
        perturbation = scale * root_mean_square * noise
        return step(state + perturbation.to(state.dtype))

    return propose

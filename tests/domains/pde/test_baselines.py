from pathlib import Path

import pytest
import torch
from torch import Tensor

from accel_train.domains.pde import baselines as field_baselines
from accel_train.domains.pde.baselines import RIDGES, STRONGER, baselines, nrmse, ridge_fit
from accel_train.domains.pde.data.equations import PdeDataConfig
from accel_train.domains.pde.data.prepare import prepare_pde
from accel_train.domains.pde.fields import TINY, Scale
from accel_train.domains.pde.scoring.chosen import ScoredRows


class Rows:
    """Targets that are `how` of the inputs."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.fields = {"input": inputs, "target": targets, "parameters": torch.zeros(len(inputs), 2)}

    def __len__(self) -> int:
        return len(self.fields["input"])

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        return {name: values[indices] for name, values in self.fields.items()}


SAME = Scale((0.0,), (1.0,))
LEAST = torch.tensor(TINY)


def together(found: dict[str, list[float]]) -> dict[str, float]:
    """The nRMSE of all channels together."""
    return {name: errors[0] for name, errors in found.items()}


def test_nrmse_by_hand() -> None:
    target = torch.tensor([[3.0, 4.0], [1.0, 1.0]])
    assert nrmse(target + torch.tensor([[5.0, 0.0], [0.0, 0.0]]), target, LEAST).tolist() == [1.0, 0.0]
    assert nrmse(torch.zeros(2, 2), target, LEAST).tolist() == [1.0, 1.0]
    assert nrmse(1000 * target, 1000 * target + 0.0, LEAST).tolist() == [0.0, 0.0]


def test_targets_of_zeros_are_left_out() -> None:
    inputs = torch.randn(64, 1, 1, 6, generator=torch.Generator().manual_seed(0))
    targets = inputs.flip(-1)
    train = Rows(inputs, targets)
    scale = Scale((0.3,), (2.0,))
    kept = together(baselines(train, Rows(inputs[2:], targets[2:]), scale, same_fields=True))
    targets = targets.clone()
    targets[:2] = scale.normalise(torch.zeros(2, 1, 1, 6))
    found = together(baselines(train, Rows(inputs, targets), scale, same_fields=True))
    assert found == pytest.approx(kept, rel=1e-12)


def test_ridge_finds_a_linear_map_and_damps_one_that_the_rows_do_not_fix() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(400, 20, generator=generator, dtype=torch.float64)
    weights = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    assert torch.allclose(ridge_fit(features, features @ weights), weights, atol=1e-8)
    wide = torch.randn(40, 100, generator=generator, dtype=torch.float64)
    noise = torch.randn(40, 1, generator=generator, dtype=torch.float64)
    assert ridge_fit(wide, noise).norm() < torch.linalg.pinv(wide).matmul(noise).norm()


def damped(features: Tensor, targets: Tensor, ridge: float) -> Tensor:
    gram = features.T @ features
    scale = gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    return torch.linalg.solve(gram + ridge * scale, features.T @ targets)


def noisy(noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """64 rows of a linear map with this noise on its targets."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(64, 36, generator=generator, dtype=torch.float64)
    weights = torch.randn(36, 2, generator=generator, dtype=torch.float64)
    return features, features @ weights + noise * torch.randn(64, 2, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("noise", "seed", "strength"), [(0.7, 1, 1e-2), (5.0, 0, 1.0), (20.0, 0, STRONGER[-1])])
def test_the_strength_is_chosen_on_rows_that_are_not_fitted_and_then_all_are(
    noise: float, seed: int, strength: float
) -> None:
    """Beyond the end of the list as well, and of noise alone the strongest of all."""
    features, targets = noisy(noise, seed)
    strengths = (*RIDGES, *STRONGER)
    error = [(features[56:] @ damped(features[:56], targets[:56], one) - targets[56:]).norm() for one in strengths]
    assert strengths[int(torch.stack(error).argmin())] == strength
    torch.testing.assert_close(ridge_fit(features, targets), damped(features, targets, strength))


def test_baselines_by_hand() -> None:
    inputs = torch.randn(64, 1, 1, 6, generator=torch.Generator().manual_seed(0))
    linear = Rows(inputs, 2 * inputs.flip(-1) + 1)
    found = together(baselines(linear, linear, Scale((3.0,), (10.0,)), same_fields=True))
    target = 10 * linear.fields["target"] + 3  # physical units
    assert found["training_mean"] == pytest.approx(float(nrmse(target.mean(0).expand_as(target), target, LEAST).mean()))
    assert found["persistence"] == pytest.approx(float(nrmse(10 * inputs + 3, target, LEAST).mean()))
    assert found["linear_fit"] < 1e-6
    assert "persistence" not in baselines(linear, linear, SAME, same_fields=False)


def test_rows_are_read_block_by_block_with_and_without_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    fields = torch.randn(64, 1, 1, 6, generator=generator), torch.randn(64, 1, 1, 6, generator=generator)
    heldout = Rows(fields[0][:5], fields[1][:5])
    found = together(baselines(Rows(*fields), heldout, SAME, same_fields=True))
    assert found["persistence"] == pytest.approx(float(nrmse(fields[0][:5], fields[1][:5], LEAST).mean()))
    monkeypatch.setattr(field_baselines, "BLOCK_VALUES", 24)  # two rows at a time
    assert together(baselines(Rows(*fields), heldout, SAME, same_fields=True)) == pytest.approx(found)
    monkeypatch.setattr(field_baselines, "MAX_FEATURES", 1)
    wide = together(baselines(Rows(*fields), heldout, SAME, same_fields=True))
    assert wide == pytest.approx({name: found[name] for name in ("training_mean", "persistence")})


def test_a_fit_that_would_cost_minutes_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(torch.randn(32, 1, 2, 4), torch.randn(32, 1, 2, 4))
    monkeypatch.setattr(field_baselines, "MAX_FEATURES", 10)  # 8 points, 2 parameters and 1
    assert set(baselines(rows, rows, SAME, same_fields=False)) == {"training_mean"}


def test_one_speed_is_a_linear_map_and_many_speeds_are_not(tmp_path: Path) -> None:
    scores: list[dict[str, float]] = []
    for speed in ((0.7, 0.7), (0.2, 1.2)):
        data = prepare_pde(
            PdeDataConfig(
                tasks=("advection",), speed=speed, train_samples=64, heldout_samples=16, resolution_1d=32, snapshots=8,
                cache_dir=str(tmp_path),
            )
        )  # fmt: skip
        train, heldout = data.training["advection"], data.heldout["advection"]
        scored = ScoredRows(heldout, torch.arange(64))
        scores.append(together(baselines(train, scored, data.tasks[0].target, same_fields=True)))
    assert scores[0]["linear_fit"] < 1e-5  # the ceiling
    assert scores[1]["linear_fit"] > 0.2
    assert all(score["persistence"] > 0.4 and score["training_mean"] > 0.9 for score in scores)

"""Samples that are left out: all others as before, on any layout, and unknown samples refused."""

from __future__ import annotations

import pytest

from accel_train.config import UsageError
from accel_train.data.leaving_out import has_no_weight, without_samples
from accel_train.data.sampler import Draw, StepSampler

ORDER = StepSampler(30, 8, seed=3)


def test_only_the_places_of_these_samples_change() -> None:
    left_out = [draw.sample for draw in ORDER.draws(2)][:3]
    order = without_samples(ORDER, left_out)
    for step in range(8):
        of_step = {draw.sample for draw in ORDER.draws(step)}
        for before, now in zip(ORDER.draws(step), order.draws(step), strict=True):
            if before.sample not in left_out:
                assert now == before
                continue
            # Its place is taken by another of the step, with weight 0: a loss that is NaN would stay so.
            assert now.sample in of_step.difference(left_out)
            assert now[1:] == (before.occurrence, before.position, 0.0)
        shares = [order.micro_batches(step, rank, 3, 2) for rank in range(3)]
        weighed = {draw.position: draw.sample for share in shares for draws in share for draw in draws if draw.weight}
        assert weighed == {draw.position: draw.sample for draw in order.draws(step) if draw.weight}
        read = {draw.position: draw.sample for share in shares for draws in share for draw in draws}
        assert read == {draw.position: draw.sample for draw in order.draws(step)}


def test_the_whole_batch_is_drawn_at_most_once_for_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long to draw, and a share may have hundreds of micro-batches."""
    left_out = ORDER.draws(2)[0].sample
    order = without_samples(ORDER, [left_out])
    drawn: list[int] = []
    draws = StepSampler.draws

    def counted(self: StepSampler, step: int) -> list[Draw]:
        drawn.append(step)
        return draws(self, step)

    monkeypatch.setattr(StepSampler, "draws", counted)
    shares = [order.micro_batches(step, 0, 1, 1) for step in range(4)]
    assert len(shares[2]) == 8
    # Only the step that has the sample.
    assert drawn == [step for step in range(4) if any(draw.weight == 0 for part in shares[step] for draw in part)]
    drawn.clear()
    assert not has_no_weight(order, 0)
    assert drawn == []


def test_a_step_without_weight_is_known() -> None:
    order = without_samples(ORDER, [draw.sample for draw in ORDER.draws(1)])
    assert [step for step in range(3) if has_no_weight(order, step)] == [1]
    assert not has_no_weight(ORDER, 1)
    assert without_samples(ORDER, ()) is ORDER


def test_unknown_samples_and_all_of_them_are_refused() -> None:
    with pytest.raises(UsageError, match=r"has 30 samples, 0 to 29, but no 30, 99"):
        without_samples(ORDER, [3, 30, 99])
    with pytest.raises(UsageError, match="names all 30 samples"):
        without_samples(ORDER, range(30))

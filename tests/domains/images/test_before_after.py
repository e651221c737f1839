"""Captions of held-out pictures that are drawn without the adapter and with it."""

from types import SimpleNamespace
from typing import Any

import torch

from accel_train.domains.images.pipelines.before_after import first_of_each, notices
from accel_train.domains.images.pipelines.validation import EvaluationConfig


def test_equal_captions_are_drawn_once() -> None:
    """A picture in two resolutions is two samples, and equal captions have equal noise."""
    captions = ["red flag", "red flag", "blue flag", "red flag", "green flag", "old flag"]
    assert first_of_each(captions, 3) == {"red flag": 0, "blue flag": 2, "green flag": 4}
    assert first_of_each(captions, 70) == {"red flag": 0, "blue flag": 2, "green flag": 4, "old flag": 5}
    assert first_of_each(captions, 0) == first_of_each([], 3) == {}


def test_options_of_more_than_the_held_out_pictures_are_named() -> None:
    """Of three pictures, two have one caption."""
    captions = ["red flag", "blue flag", "red flag"]

    class Pictures:
        def __len__(self) -> int:
            return len(captions)

        def captions(self, rows: torch.Tensor) -> list[str]:
            return [captions[row] for row in rows.tolist()]

    inputs: Any = SimpleNamespace(heldout=SimpleNamespace(pictures=Pictures()))
    assert notices(EvaluationConfig(samples=3, heldout_prompts=2), inputs) == []
    assert notices(EvaluationConfig(samples=64, heldout_prompts=5), inputs) == [
        "--evaluation.samples 64: 3 samples are held out, and all of them are used",
        "--evaluation.heldout_prompts 5: held-out pictures have only 2 different captions, and all of them are drawn",
    ]
    captions.clear()
    assert notices(EvaluationConfig(), inputs) == []

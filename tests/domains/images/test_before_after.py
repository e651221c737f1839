"""Captions of held-out pictures that are drawn without the adapter and with it."""

from accel_train.domains.images.pipelines.before_after import first_of_each


def test_equal_captions_are_drawn_once() -> None:
    """A picture in two resolutions is two samples, and equal captions have equal noise."""
    captions = ["red flag", "red flag", "blue flag", "red flag", "green flag", "old flag"]
    assert first_of_each(captions, 3) == {"red flag": 0, "blue flag": 2, "green flag": 4}
    assert first_of_each(captions, 70) == {"red flag": 0, "blue flag": 2, "green flag": 4, "old flag": 5}
    assert first_of_each(captions, 0) == first_of_each([], 3) == {}

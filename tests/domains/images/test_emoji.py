"""The bundled emoji."""

import pytest
import torch

from accel_train.config import UsageError
from accel_train.domains.images.demo import emoji


def test_pictures_lines_and_size_of_the_files():
    listed = emoji.list_emoji()
    assert len(listed) == 3526
    assert "flags" in emoji.groups()
    files = [emoji.FOLDER / name for name in ("emoji.webp", "emoji.tsv")]
    assert sum(file.stat().st_size for file in files) < 6_000_000


def test_the_smaller_pictures_are_means_of_the_larger_and_show_what_is_named():
    listed = emoji.list_emoji()
    large = emoji.load_pictures(64)
    small = emoji.load_pictures(32)
    assert large.shape == (3526, 64, 64, 3)
    row = next(index for index, one in enumerate(listed) if one.name == "japan flag")
    expected = torch.nn.functional.avg_pool2d(large[row].permute(2, 0, 1).float(), 2).permute(1, 2, 0)
    assert (small[row].float() - expected).abs().max() <= 0.5
    red, green, blue = small[row, 16, 16].tolist()  # the sun in the middle of the flag
    assert red > 150
    assert max(green, blue) < 90


def test_all_skin_tones_of_a_name_are_held_out_together():
    sides: dict[str, set[bool]] = {}
    for one in emoji.list_emoji():
        sides.setdefault(one.name, set()).add(one.heldout(0.04))
    assert all(len(side) == 1 for side in sides.values())
    share = sum(True in side for side in sides.values()) / len(sides)
    assert 0.03 < share < 0.06


def test_another_size_and_an_unknown_group_are_refused():
    with pytest.raises(UsageError, match="32 or 64"):
        emoji.load_pictures(48)
    with pytest.raises(UsageError, match="did you mean 'flags'"):
        emoji.check_groups("--pictures.leave_out", ("flag",))

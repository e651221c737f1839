"""The bundled emoji."""

from pathlib import Path

import pytest
import torch

from accel_train.config import UsageError
from accel_train.domains.images.dataset import prepare_pictures
from accel_train.domains.images.demo import classifier, emoji
from accel_train.domains.images.options import PictureDataConfig


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


def test_the_flags_are_a_source_of_pictures_200_of_them_to_train_on(tmp_path: Path) -> None:
    config = PictureDataConfig(
        path="emoji:flags",
        resolutions=(32,),
        bucket_step=4,
        max_aspect=1.0,
        heldout_fraction=0.227,
        cache_dir=str(tmp_path),
    )
    data = prepare_pictures(config)
    assert (len(data.train), len(data.heldout)) == (200, 70)
    named = {one.caption for one in emoji.list_emoji() if one.group == "flags"}
    train = {sample.caption for sample in data.train.samples}
    heldout = {sample.caption for sample in data.heldout.samples}
    assert train | heldout == named
    assert not train & heldout
    # As the base has seen the others: means of four pixels. The recipe's own scaling differs a little from it.
    row = next(i for i, one in enumerate(emoji.list_emoji()) if one.caption == data.train.samples[0].caption)
    expected = emoji.load_pictures(32)[row].float() / 127.5 - 1
    found = data.train[0]["pixels"].permute(1, 2, 0)
    assert (found - expected).abs().mean() < 0.05


def test_a_group_that_is_none_is_refused(tmp_path: Path) -> None:
    config = PictureDataConfig(path="emoji:flag", cache_dir=str(tmp_path))
    with pytest.raises(UsageError, match=r"--data\.path emoji: 'flag' is not a group .* \(did you mean 'flags'"):
        prepare_pictures(config)


@pytest.mark.slow
def test_the_classifier_is_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classifier, "STEPS", 12)
    pictures = emoji.load_pictures(64)[::50]
    before = torch.get_rng_state()
    logits: list[torch.Tensor] = []
    for _ in range(2):
        classifier.train_judge.cache_clear()
        judge = classifier.train_judge("flags")
        logits.append(judge.model(pictures[:, ::2, ::2].permute(0, 3, 1, 2).float() / 127.5 - 1))
    classifier.train_judge.cache_clear()
    assert torch.equal(*logits)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow  # 11 seconds of CPU; that it is deterministic is tested daily
def test_the_classifier_knows_flags_it_has_not_seen() -> None:
    judge = classifier.train_judge("flags")
    assert judge.right_inside > 0.95
    assert judge.right_outside > 0.95
    # By its own two shares, on all pictures and in another size.
    pictures = emoji.load_pictures(64)
    flags = torch.tensor([one.group == "flags" for one in emoji.list_emoji()])
    said = judge.calls(pictures)
    assert said[flags].float().mean() > 0.95
    assert said[~flags].float().mean() < 0.05
    assert not judge.calls(torch.full((1, 32, 32, 3), 255, dtype=torch.uint8)).any()

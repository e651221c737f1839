"""Pictures of the class that the base draws: those of diffusers alone, kept when a run is ended in between."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from accel_train import rng
from accel_train.config import UsageError
from accel_train.domains.images.dataset import prepare_pictures
from accel_train.domains.images.latent_cache import Filling
from accel_train.domains.images.options import PictureDataConfig, PriorConfig
from accel_train.domains.images.pipelines import encoding, loading
from accel_train.domains.images.weighting import class_pictures
from accel_train.domains.images.weighting.prior import prepare_prior
from tests.domains.images import drawn
from tests.domains.images import test_lora_recipe as lora_recipe
from tests.domains.images import tiny_pipelines as tiny
from tests.domains.images.test_weighting import losses

diffusers: Any = pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
CAPTION = "a cat"
STEPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("class")
    tiny.save("sd1", made / "base")
    lora_recipe.pictures(made / "photos", 6)
    lora_recipe.settings(made, "sd1")
    return made


def draw(folder: Path, place: Path, count: int, **changes: Any) -> list[str]:
    base = loading.find_base(loading.BaseConfig(source=str(folder / "base")))
    asked: dict[str, Any] = {"caption": CAPTION, "steps": STEPS, **changes}
    prior = PriorConfig(path=str(place), count=count, **asked)
    config = PictureDataConfig(resolutions=(18,), bucket_step=4, prior=prior)
    pipeline: Any = base.components(torch.device("cpu"))
    encode = partial(encoding.encode_texts, pipeline, base)
    notices = class_pictures.draw_missing(config, base, pipeline, encode, Filling())
    assert pipeline.unet is None
    return notices


def contents(place: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in place.iterdir()}


def test_they_are_what_diffusers_draws(folder: Path, tmp_path: Path) -> None:
    """Own pictures count, and the side is that of a bucket."""
    drawn.folder_of(tmp_path / "class", (20, 20))
    assert "drawn 2 pictures of 'a cat'" in draw(folder, tmp_path / "class", 3)[0]
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(folder / "base")
    pipeline.set_progress_bar_config(disable=True)
    for number in range(2):
        seed = rng.key(0, "lora/prior", number) & (2**63 - 1)
        expected = pipeline(
            CAPTION,
            height=16,
            width=16,
            num_inference_steps=STEPS,
            generator=torch.Generator().manual_seed(seed),
            output_type="np",
        ).images[0]
        file = tmp_path / "class" / f"drawn_{number:05d}.png"
        found = np.asarray(Image.open(file), np.float64)
        assert np.abs(found - 255 * expected).max() < 0.6
        assert file.with_suffix(".txt").read_text() == f"{CAPTION}\n"
    assert len(list((tmp_path / "class").glob("*.png"))) == 3
    assert draw(folder, tmp_path / "class", 3) == []


def test_a_drawing_that_was_ended_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw(folder, tmp_path / "whole", 4)
    original = class_pictures.draw_picture
    calls: list[int] = []

    def ended(*arguments: Any) -> Any:
        calls.append(0)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(class_pictures, "draw_picture", ended)
    with pytest.raises(KeyboardInterrupt):
        draw(folder, tmp_path / "halves", 4)
    assert len(list((tmp_path / "halves").glob("*.png"))) == 2
    calls.extend([0, 0])
    draw(folder, tmp_path / "halves", 4)
    # Two in each half, and the call that was ended.
    assert len(calls) == 3 + 2 + 2
    assert contents(tmp_path / "halves") == contents(tmp_path / "whole")


def test_the_recipe_draws_them_before_it_trains(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = folder / "cats"
    prior = ("--data.prior.path", str(place), "--data.prior.caption", CAPTION, "--max_steps", "2")
    with caplog.at_level("INFO"):
        run = lora_recipe.train(folder, "drawing", *prior, "--data.prior.count", "3", "--data.prior.steps", "2")
    assert f"the base has drawn 3 pictures of 'a cat' into {place}" in caplog.text
    # The same pictures as a folder of one's own.
    assert losses(lora_recipe.train(folder, "given", *prior)) == losses(run)


def test_runs_of_several_counts_share_a_folder(folder: Path, tmp_path: Path) -> None:
    """What another run has drawn beyond the count does not change the data, and one's own pictures are all used."""
    drawn.folder_of(tmp_path / "class", (20, 20))
    (tmp_path / "class" / "000.png").rename(tmp_path / "class" / "drawn_by_hand.png")
    (tmp_path / "class" / "000.txt").rename(tmp_path / "class" / "drawn_by_hand.txt")
    drawn.folder_of(tmp_path / "photos", (20, 20))

    def read(count: int) -> tuple[list[str], str]:
        asked = PriorConfig(path=str(tmp_path / "class"), count=count, caption=CAPTION, steps=STEPS)
        config = PictureDataConfig(
            path=str(tmp_path / "photos"),
            resolutions=(18,),
            bucket_step=4,
            heldout_fraction=0,
            prior=asked,
            cache_dir=str(tmp_path / "cache"),
        )
        found = prepare_prior(config, prepare_pictures(config).train, without=class_pictures.drawn_beyond(asked))
        assert found is not None
        return [sample.picture.name for sample in found[0].samples], found[0].fingerprint

    draw(folder, tmp_path / "class", 2)
    before = read(2)
    assert before[0] == ["drawn_00000.png", "drawn_by_hand.png"]
    draw(folder, tmp_path / "class", 4)
    assert read(2) == before
    assert len(read(4)[0]) == 4
    assert read(1)[0] == ["drawn_by_hand.png"]


@pytest.mark.parametrize("offloaded", [False, True])
def test_text_encoders_wait_in_host_memory(
    offloaded: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are offloaded are there already. Moved back, all of them would be on the device at once."""
    moved: list[str] = []

    def note(encoder: torch.nn.Module, device: Any) -> torch.nn.Module:
        moved.append(str(device))
        return encoder

    base = loading.find_base(loading.BaseConfig(source=str(folder / "base"), offload_encoders=offloaded))
    prior = PriorConfig(path=str(tmp_path / "class"), count=1, caption=CAPTION, steps=STEPS)
    config = PictureDataConfig(resolutions=(18,), bucket_step=4, prior=prior)
    pipeline: Any = base.components(torch.device("cpu"))
    encode = partial(encoding.encode_texts, pipeline, base)
    monkeypatch.setattr(type(pipeline.text_encoder), "to", note)
    class_pictures.draw_missing(config, base, pipeline, encode, Filling())
    assert moved == ([] if offloaded else ["cpu", "cpu"])


def test_pictures_of_something_else_are_refused(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "class"
    draw(folder, place, 1)
    with pytest.raises(UsageError, match=r"were drawn with caption 'a cat', now 'a dog'; delete them"):
        draw(folder, place, 1, caption="a dog")
    (place / class_pictures.RECORD).write_text("{")
    with pytest.raises(UsageError, match=r"drawn.json cannot be read .*Restore it, or delete it and them"):
        draw(folder, place, 1)
    (place / class_pictures.RECORD).unlink()
    (place / "metadata.jsonl").write_text("")
    with pytest.raises(UsageError, match=r"captions are in metadata.jsonl"):
        draw(folder, place, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"count": 3, "caption": "a cat"},
            r"^data.prior.caption: a cat, data.prior.count: 3: have no effect without data.prior.path; .* leave them",
        ),
        (
            {"weight": 0.5},
            r"^data.prior.weight: 0.5: has no effect without data.prior.path; .* \(the default is 1\)$",
        ),
        ({"path": "class", "count": 3}, r"data.prior.count 3: .* give --data.prior.caption"),
        ({"path": "class", "steps": 3}, r"data.prior.steps: 3: has no effect without data.prior.count"),
        ({"path": "emoji:flags", "caption": "a", "count": 3}, r"data.prior.path is emoji:flags; give a folder"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PriorConfig(**options)

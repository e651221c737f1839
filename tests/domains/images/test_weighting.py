"""Prior preservation against diffusers' DreamBooth scripts, and masks against a closed form."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from accel_train.config import UsageError
from accel_train.domains.diffusion.timesteps import TimeConfig
from accel_train.domains.images.buckets import frame
from accel_train.domains.images.dataset import Sample
from accel_train.domains.images.options import MaskConfig, PriorConfig
from accel_train.domains.images.pipelines.objective import ObjectiveConfig
from accel_train.domains.images.scanning import Picture, read_pictures
from accel_train.domains.images.sources import FileBytes, Source
from accel_train.domains.images.weighting import masks, prior
from accel_train.domains.models.pictures import decoding
from tests.domains.images import test_lora_recipe as lora_recipe
from tests.domains.images import tiny_pipelines as tiny
from tests.domains.images.test_objective import COUNT, SEED, STEP, Made

diffusers: Any = pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
WEIGHT = 0.7
HALF = COUNT // 2


def as_pairs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first half of a batch as training pictures, each with one of the other half as that of the prior."""
    loaded = {"sample", "occurrence", "position"}
    pairs = {name: value[:HALF] for name, value in batch.items()}
    pairs |= {f"prior_{name}": value[HALF:] for name, value in batch.items() if name not in loaded}
    return pairs | {"weight": torch.ones(HALF)}


@pytest.mark.parametrize("name", ["sd1", "sd2", "flux"])
def test_the_loss_with_a_prior_is_that_of_dreambooth(name: str, tmp_path: Path) -> None:
    times = TimeConfig(weighting="cosmap") if name == "flux" else TimeConfig()
    made = Made(name, tmp_path, ObjectiveConfig(), times)
    made.batch = prior.joined(as_pairs(made.batch), WEIGHT)
    inputs, _ = made.found()
    with torch.no_grad():
        errors = made.process.errors(made.model, inputs)
    found = (errors * inputs["level_weight"] * inputs["weight"]).sum() / HALF

    latents, noise = made.latents_and_noise()
    timesteps = inputs["timestep"]
    assert len(set(timesteps.tolist())) == COUNT
    if name == "flux":
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(made.pipeline.scheduler.config)
        noisy = scheduler.scale_noise(latents, timesteps, noise)
        sigmas = scheduler.sigmas[[(scheduler.timesteps == t).nonzero().item() for t in timesteps]].view(-1, 1, 1, 1)
        weighting = diffusers.training_utils.compute_loss_weighting_for_sd3("cosmap", sigmas)
        target = noise - latents
    else:
        scheduler = diffusers.DDPMScheduler.from_config(made.pipeline.scheduler.config)
        noisy = scheduler.add_noise(latents, noise, timesteps.long())
        weighting = torch.ones(COUNT, 1, 1, 1)
        is_noise = scheduler.config.prediction_type == "epsilon"
        target = noise if is_noise else scheduler.get_velocity(latents, noise, timesteps.long())
    with torch.no_grad():
        predicted = made.family.predict(made.model, made.process._predicting(inputs | {"noisy": noisy}))
    # The lines of train_dreambooth_lora_sdxl.py and _flux.py.
    model_pred, model_pred_prior = torch.chunk(predicted, 2, dim=0)
    target, target_prior = torch.chunk(target, 2, dim=0)
    weight, weight_prior = torch.chunk(weighting, 2, dim=0)
    prior_loss = torch.mean((weight_prior * (model_pred_prior - target_prior) ** 2).reshape(HALF, -1), 1).mean()
    loss = torch.mean((weight * (model_pred - target) ** 2).reshape(HALF, -1), 1).mean()
    assert float(found) == pytest.approx(float(loss + WEIGHT * prior_loss), rel=1e-5)


def test_times_of_both_halves_are_spread_evenly(tmp_path: Path) -> None:
    made = Made("sd1", tmp_path, ObjectiveConfig(), TimeConfig())
    made.batch = prior.joined(as_pairs(made.batch), WEIGHT)
    times = made.process.noised(made.batch, SEED, STEP, COUNT)["timestep"]
    for half in (times[:HALF], times[HALF:]):
        gaps = half.sort().values.diff()
        assert float((gaps - 1000 / HALF).abs().max()) <= 2
    plain = {"mean": torch.ones(2)}
    assert prior.joined(plain, WEIGHT) == plain


def picture(name: str, size: tuple[int, int] = (40, 20)) -> Picture:
    return Picture(name, "a cat", name, size[1], size[0], FileBytes(Path(name)))


def test_pictures_of_the_prior_are_cut_only_where_none_has_the_size() -> None:
    tall, square = picture("tall"), picture("square", (20, 20))
    samples = [Sample(tall, "a cat", (40, 20)), Sample(square, "a cat", (20, 20))]
    found = prior.in_sizes(samples, [(20, 20), (20, 40), (20, 20)])
    assert [(each.picture.name, each.target_size) for each in found] == [
        ("square", (20, 20)),
        ("tall", (20, 40)),
        ("square", (20, 40)),
    ]


# -------------------------------------------------------------------------------------------------------------- masks
def with_alpha(folder: Path) -> Picture:
    """A picture of 16 x 16 whose upper 8 rows are opaque, and of the others each fourth column."""
    pixels = np.zeros((16, 16, 4), np.uint8)
    pixels[:8, :, 3] = 255
    pixels[8:, ::4, 3] = 255
    folder.mkdir()
    Image.fromarray(pixels).save(folder / "a.png")
    (folder / "a.txt").write_text("a cat")
    (found,) = read_pictures(Source(str(folder)), folder).pictures
    return found


def expected(outside: float) -> Tensor:
    """Of latents of 4 x 4 pixels."""
    shares = torch.ones(1, 4, 4)
    shares[:, 2:] = 0.25
    return outside + (1 - outside) * shares


@pytest.mark.parametrize("outside", [0.0, 0.1])
def test_a_mask_is_the_mean_over_the_pixels_of_a_latent(outside: float, tmp_path: Path) -> None:
    found = with_alpha(tmp_path / "photos")
    seen = frame((16, 16), (16, 16))
    alpha = masks.find_masks(MaskConfig("alpha", outside), [found], 4)
    assert alpha is not None
    torch.testing.assert_close(alpha.read(found, seen, keep=True), expected(outside))
    assert alpha.read(found, seen, keep=True) is alpha.read(found, seen, keep=True)

    with Image.open(tmp_path / "photos" / "a.png") as opened:
        white = opened.getchannel("A")
    white.save(tmp_path / "photos" / "a.mask.png")
    # The mask is no picture of its own.
    assert len(read_pictures(Source(str(tmp_path / "photos")), tmp_path)) == 1
    files = masks.find_masks(MaskConfig("files", outside), [found], 4)
    assert files is not None
    torch.testing.assert_close(files.read(found, seen, keep=False), expected(outside))
    other = found._replace(content="without a mask")
    assert torch.equal(files.read(other, seen, keep=False), torch.ones(1, 4, 4))
    white.rotate(90).save(tmp_path / "photos" / "a.mask.png")
    with pytest.raises(RuntimeError, match=r"a.mask.png has changed since the run began"):
        files.read(found, seen, keep=False)


def test_what_is_transparent_in_a_mask_is_outside(tmp_path: Path) -> None:
    found = with_alpha(tmp_path / "photos")
    mask = Image.new("RGBA", (16, 16), (255, 255, 255, 0))
    mask.paste((255, 255, 255, 255), (0, 0, 16, 8))
    mask.save(tmp_path / "photos" / "a.mask.png")
    files = masks.find_masks(MaskConfig("files"), [found], 4)
    assert files is not None
    weights = files.read(found, frame((16, 16), (16, 16)), keep=False)
    assert weights[0, :, 0].tolist() == [1, 1, 0, 0]


def test_a_mask_may_be_as_large_as_its_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = with_alpha(tmp_path / "photos")
    # data.max_pixels may allow a picture more than decoding does by itself, which would be large for a test.
    for decode in (decoding.decode_alpha, decoding.decode_picture):
        monkeypatch.setitem(decode.__kwdefaults__, "max_pixels", 16 * 16 - 1)
    seen = frame((16, 16), (16, 16))
    alpha = masks.find_masks(MaskConfig("alpha"), [found], 4)
    assert alpha is not None
    torch.testing.assert_close(alpha.read(found, seen, keep=False), expected(0.0))
    Image.new("L", (16, 16), "white").save(tmp_path / "photos" / "a.mask.png")
    files = masks.find_masks(MaskConfig("files"), [found], 4)
    assert files is not None
    assert torch.equal(files.read(found, seen, keep=False), torch.ones(1, 4, 4))


def test_errors_are_weighted_by_place(tmp_path: Path) -> None:
    made = Made("sd1", tmp_path, ObjectiveConfig(), TimeConfig())
    with torch.no_grad():
        inputs = made.process.noised(made.batch, SEED, STEP, COUNT)
        predicted = made.family.predict(made.model, made.process._predicting(inputs))
        squared = (predicted - inputs["target"]).square()
        weights = torch.rand(COUNT, 1, *squared.shape[-2:], generator=torch.Generator().manual_seed(0))
        found = made.process.errors(made.model, inputs | {masks.MASK: weights})
        whole = made.process.errors(made.model, inputs | {masks.MASK: torch.ones_like(weights)})
        plain = made.process.errors(made.model, inputs)
    torch.testing.assert_close(found, (squared * weights).sum((1, 2, 3)) / squared[0].numel())
    assert torch.equal(whole, plain)


def test_masks_that_cannot_be_used(tmp_path: Path) -> None:
    found = with_alpha(tmp_path / "photos")
    with pytest.raises(UsageError, match=r"data.mask.source files: no picture has a mask"):
        masks.find_masks(MaskConfig("files"), [found], 4)
    Image.new("L", (8, 16)).save(tmp_path / "photos" / "a.mask.png")
    with pytest.raises(UsageError, match=r"a.mask.png: 8x16 pixels, and a.png has 16x16; a mask of the same size"):
        masks.find_masks(MaskConfig("files"), [found], 4)
    (tmp_path / "photos" / "a.mask.png").write_bytes(b"no picture")
    with pytest.raises(UsageError, match=r"the mask of a.png cannot be used: not a picture"):
        masks.find_masks(MaskConfig("files"), [found], 4)
    (tmp_path / "photos" / "a.mask.png").unlink()
    os.mkfifo(tmp_path / "photos" / "a.mask.png")
    with pytest.raises(UsageError, match=r"the mask of a.png cannot be used: a named pipe"):
        masks.find_masks(MaskConfig("files"), [found], 4)
    row: Any = object()
    with pytest.raises(UsageError, match=r"is a row of a table, and masks are files"):
        masks.find_masks(MaskConfig("files"), [found._replace(bytes=row)], 4)


def test_copies_of_a_picture_have_one_mask(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    with_alpha(folder)
    (folder / "b.png").write_bytes((folder / "a.png").read_bytes())
    black, white = (Image.new("L", (16, 16), colour) for colour in ("black", "white"))
    black.save(folder / "a.mask.png")
    copies = read_pictures(Source(str(folder)), tmp_path / "cache").pictures
    same = r"a\.png and b\.png are the same picture.*with different masks"
    with pytest.raises(UsageError, match=rf"{same} \(a\.mask\.png; none\).*Save one of the two again"):
        masks.find_masks(MaskConfig("files"), copies, 4)
    white.save(folder / "b.mask.png")
    with pytest.raises(UsageError, match=rf"{same} \(a\.mask\.png; b\.mask\.png\)"):
        masks.find_masks(MaskConfig("files"), copies, 4)
    black.save(folder / "b.mask.png")
    equal = masks.find_masks(MaskConfig("files"), copies, 4)
    assert equal is not None
    assert len(equal.files) == 1
    # Saved again, they are two pictures.
    white.save(folder / "b.mask.png")
    with Image.open(folder / "a.png") as opened:
        opened.save(folder / "b.png", compress_level=1)
    apart = masks.find_masks(MaskConfig("files"), read_pictures(Source(str(folder)), tmp_path / "cache").pictures, 4)
    assert apart is not None
    assert len(apart.files) == 2


@pytest.mark.parametrize(
    ("group", "options"),
    [(PriorConfig, {"weight": 2.0}), (PriorConfig, {"caption": "a dog"}), (MaskConfig, {"outside": 0.5})],
)
def test_options_without_effect_are_refused(group: Any, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="no effect without"):
        group(**options)


# --------------------------------------------------------------------------------------------------------- the recipe
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("weighting")
    tiny.save("sd1", made / "base")
    lora_recipe.pictures(made / "photos", 6)
    for path in (made / "photos").glob("*.png"):
        with Image.open(path) as opened:
            mask = np.zeros(opened.size[::-1], np.uint8)
        mask[: len(mask) // 2] = 255
        Image.fromarray(mask).save(path.with_name(f"{path.stem}.mask.png"))
    lora_recipe.pictures(made / "class", 3)
    for caption in (made / "class").glob("*.txt"):
        caption.unlink()
    lora_recipe.settings(made, "sd1")
    return made


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "train"]


@pytest.mark.slow  # the weights are tested one by one
def test_the_recipe_learns_inside_of_masks_beside_the_prior(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same losses for any micro-batch and for crops that are encoded at every step."""
    kept = ("--data.prior.path", str(folder / "class"), "--data.prior.caption", "a thing", "--data.prior.weight", "0.5")
    flags = (*kept, "--data.mask.source", "files", "--data.mask.outside", "0.1", "--max_steps", "2")
    with caplog.at_level("INFO"):
        whole = losses(lora_recipe.train(folder, "whole", *flags))
    assert "whose loss counts 0.5 times" in caplog.text
    assert "the loss counts inside 6 masks, 0.1 outside" in caplog.text
    single = losses(lora_recipe.train(folder, "single", *flags, "--micro_batch_size", "1"))
    assert single == pytest.approx(whole, rel=1e-5)
    cropped = losses(lora_recipe.train(folder, "cropped", *flags, "--data.crop", "random"))
    assert len(cropped) == 2
    assert cropped != pytest.approx(whole, rel=1e-5)


def test_the_prior_must_hold_pictures(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"^--data.prior.path .*nowhere"):
        lora_recipe.train(folder, "wrong", "--data.prior.path", str(folder / "nowhere"))

"""Captions of picture files by a model of captions and pictures: its latents are those of training."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from accel_train.config import UsageError
from accel_train.domains.diffusion.latents import LatentDiffusionConfig
from accel_train.domains.diffusion.sampling import LatentSamplingConfig, TextSamplingConfig
from accel_train.domains.images.captioned import PictureConfig, prepare_pictures
from accel_train.domains.models.mmdit import ModelConfig, MultimodalMMDiT
from accel_train.domains.text.both_ways import BothWays
from accel_train.domains.text.dataset import PreparedData
from accel_train.domains.text.modes import ModeConfig
from accel_train.domains.text.options import DataConfig, TextLatentOptions
from accel_train.domains.text.pipeline import TextLatentPipeline
from accel_train.domains.text.prepare import prepare_data
from tests.domains.images import tiny_pipelines as tiny
from tests.trained import randomise, text_run

ROTATED = 6
"""EXIF's orientation of a picture that lies on its side."""


def drawn(number: int, width: int = 30, height: int = 20, channels: int = 3) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 256, (height // 5, width // 5, channels), np.uint8)
    return Image.fromarray(np.repeat(np.repeat(pixels, 5, 0), 5, 1))


def folder_of_pictures(folder: Path) -> Path:
    """Write pictures of several sizes, layouts and formats, each with a caption."""
    folder.mkdir()
    for number in range(12):
        name = f"{number}.png"
        if number == 0:
            exif = Image.Exif()
            exif[0x0112] = ROTATED
            name = "0.jpg"
            drawn(0).save(folder / name, exif=exif)
        elif number == 1:
            drawn(1, channels=4).save(folder / name)
        elif number == 2:
            drawn(2).convert("P").save(folder / name)
        else:
            drawn(number, width=20 + 5 * number).save(folder / name)
        (folder / f"{number}.txt").write_text(f"picture number {number}")
    return folder


def pipeline_of(data: PreparedData, grid: tuple[int, int]) -> TextLatentPipeline:
    """A model with random weights of these data, and its samplers."""
    shape = ModelConfig(width=16, depth=2, heads=2)
    assets = data.assets
    model = MultimodalMMDiT(
        shape.multimodal(data.tokenizer.vocab_size, assets.max_length, assets.latent_shape, grid)
    ).eval()
    randomise(model)
    both = BothWays(
        model,
        data.tokenizer.mask_id,
        7,
        LatentDiffusionConfig(prediction="x0"),
        TextSamplingConfig(steps=4, temperature=0.8, guidance=1.5),
        LatentSamplingConfig(steps=3, guidance=2.0),
    )
    return TextLatentPipeline(model, both, assets, modes=ModeConfig())


def trained_on(folder: Path, cache: Path, **options: Any) -> tuple[TextLatentPipeline, PreparedData]:
    data = DataConfig(path=str(folder), cache_dir=str(cache), vocab_size=300, max_length=24, heldout_fraction=0.4)
    pictures = prepare_pictures(PictureConfig(**options), data)
    assert pictures is not None
    prepared = prepare_data(pictures.rows(data), pictures=pictures)
    return pipeline_of(prepared, pictures.grid), prepared


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of_pictures(tmp_path_factory.mktemp("pictures") / "mine")


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TextLatentPipeline, PreparedData]:
    return trained_on(folder, tmp_path_factory.mktemp("cache"), latents="pixels", size=8, patch=4)


def file_of(folder: Path, caption: str) -> Path:
    number = caption.split()[-1]
    return folder / ("0.jpg" if number == "0" else f"{number}.png")


def assert_latents_are_those_of_training(
    folder: Path, pipeline: TextLatentPipeline, data: PreparedData, rounding: float = 0.0
) -> None:
    """``rounding``: relative difference allowed, such as that of the dtype in which latents are stored."""
    for part in (data.train, data.heldout):
        rows = part.batch(list(range(len(part))))["latent"]
        files = [file_of(folder, text) for text in part.texts]
        wanted = pipeline.assets.denormalise(rows)
        latents = pipeline.encode_pictures(files)
        torch.testing.assert_close(latents, wanted, rtol=max(rounding, 1e-6), atol=1e-5)
        if not rounding:
            assert torch.equal(pipeline.assets.normalise(latents), rows)
        opened = [Image.open(file) for file in files]
        assert torch.equal(pipeline.encode_pictures(opened), latents)


def test_the_latent_of_a_picture_is_that_of_its_training(
    folder: Path, trained: tuple[TextLatentPipeline, PreparedData]
) -> None:
    """Bit for bit: upright, without transparency, cropped, scaled and rounded alike."""
    assert_latents_are_those_of_training(folder, *trained)


def test_the_latent_of_an_autoencoder_is_that_of_its_training(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    torch.manual_seed(0)
    tiny.vae(4).save_pretrained(tmp_path / "vae")
    options = {"latents": "vae", "vae": str(tmp_path / "vae"), "size": 16, "patch": 2}
    pipeline, data = trained_on(folder, tmp_path / "cache", **options)
    # Convolutions of a batch and of a picture differ in the last bits on some CPUs, and latents are stored in half.
    assert_latents_are_those_of_training(folder, pipeline, data, rounding=2**-9)
    (tmp_path / "vae").rename(tmp_path / "moved")
    with pytest.raises(UsageError, match=r"--vae '.*vae' cannot be loaded .* Hub id .* of a diffusers autoencoder"):
        pipeline.caption(folder / "1.png")
    moved = pipeline.with_models(vae=str(tmp_path / "moved"))
    assert moved.caption(folder / "1.png", length=6)
    torch.manual_seed(1)
    tiny.vae(4).save_pretrained(tmp_path / "other")
    with pytest.raises(UsageError, match=r"the sha256 of its weights is .* restore the autoencoder of the training"):
        pipeline.with_models(vae=str(tmp_path / "other")).caption(folder / "1.png")


def test_a_caption_is_that_of_the_sampler_of_the_evaluation(
    folder: Path, trained: tuple[TextLatentPipeline, PreparedData]
) -> None:
    """On the batch of the evaluation, with the length of the true caption and the same keys."""
    pipeline, data = trained
    size = len(data.heldout)
    files = [file_of(folder, text) for text in data.heldout.texts]
    batch = data.heldout.batch(list(range(size))) | {"weight": torch.ones(size)}
    squares, _ = pipeline._read_pictures(files)
    batch |= pipeline._keys([square.numpy().tobytes() for square in squares])
    tokens = replace(pipeline.both, seed=3).sample_text(batch)
    for row, mask, file in zip(tokens, batch["text_mask"], files, strict=True):
        assert pipeline.caption(file, seed=3, length=int(mask.sum())) == [data.tokenizer.decode(row)]
    expected = pipeline.with_sampling(steps=2, temperature=0.0, guidance=1.0)
    assert expected.caption(files) == [expected.caption(file)[0] for file in files]
    assert expected.caption(files) != pipeline.caption(files)


def test_a_caption_depends_on_its_picture_and_the_seed_alone(
    folder: Path, trained: tuple[TextLatentPipeline, PreparedData], tmp_path: Path
) -> None:
    pipeline, _ = trained
    files = [folder / "3.png", folder / "1.png", folder / "0.jpg"]
    together = pipeline.caption(files, seed=5)
    assert [pipeline.caption(str(file), seed=5)[0] for file in files] == together
    # Such as of a glob.
    assert pipeline.caption((file for file in files), seed=5) == together
    assert pipeline.caption(files, seed=6) != together
    with Image.open(files[0]) as image:
        image.save(tmp_path / "copy.bmp")
    assert pipeline.caption([tmp_path / "copy.bmp"], seed=5) == together[:1]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, r"picture .*p\.png: cannot be read \(No such file or directory\); the path of a picture is required"),
        (b"", r"picture .*p\.png: the file is empty \(0 bytes\); a picture that can be decoded is required"),
        (b"no picture", r"picture .*p\.png: not a picture, or its beginning is damaged; known formats: PNG"),
        ("cut", r"picture .*p\.png: damaged: .*; a picture that can be decoded is required"),
        ("small", r"picture .*p\.png: 1x5 pixels; at least 2 on each side are required"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    content: Any, reason: str, folder: Path, trained: tuple[TextLatentPipeline, PreparedData], tmp_path: Path
) -> None:
    pipeline, _ = trained
    file = tmp_path / "p.png"
    if content == "cut":
        content = (folder / "5.png").read_bytes()[:-60]
    if content == "small":
        buffer = io.BytesIO()
        Image.new("RGB", (1, 5)).save(buffer, "PNG")
        content = buffer.getvalue()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=reason):
        pipeline.caption([folder / "1.png", file])


def test_an_image_that_cannot_be_used_is_counted(trained: tuple[TextLatentPipeline, PreparedData]) -> None:
    with pytest.raises(UsageError, match=r"picture 2: 1x1 pixels; at least 2"):
        trained[0].caption([drawn(1), Image.new("RGB", (1, 1))])
    with pytest.raises(UsageError, match="picture: none given"):
        trained[0].caption([])
    with pytest.raises(UsageError, match="picture: none given"):
        trained[0].caption(iter([]))
    with pytest.raises(UsageError, match=r"cannot be read \(Is a directory\)"):
        trained[0].caption(Path.cwd())


@pytest.mark.parametrize(
    ("pictures", "reason"),
    [
        (b"\x89PNG", "picture 1: bytes is not accepted; a path or a Pillow image is required"),
        (np.zeros((4, 4, 3), np.uint8), "picture 1: ndarray is not accepted; .* such as Image.fromarray makes"),
        (torch.zeros(3, 4, 4), "picture 1: Tensor is not accepted"),
        (None, "picture 1: NoneType is not accepted"),
        ([drawn(1), np.zeros((4, 4, 3), np.uint8)], "picture 2: ndarray is not accepted"),
    ],
)
def test_what_is_no_picture_is_named_by_its_type(
    pictures: Any, reason: str, trained: tuple[TextLatentPipeline, PreparedData]
) -> None:
    with pytest.raises(UsageError, match=reason):
        trained[0].caption(pictures)


def test_a_direction_or_pictures_that_were_not_learned_are_refused(
    trained: tuple[TextLatentPipeline, PreparedData], tmp_path: Path
) -> None:
    pipeline, _ = trained
    drawing = TextLatentPipeline(pipeline.model, pipeline.both, pipeline.assets, modes=ModeConfig(mode="t2l"))
    # Before a file is read.
    with pytest.raises(UsageError, match=r"text from a latent \(l2t\): this model was never trained for it"):
        drawing.caption("none.png")
    texts = TextLatentPipeline.from_directory(next((text_run(tmp_path) / "checkpoints").iterdir()))
    with pytest.raises(UsageError, match=r"picture: this model has learned latents of texts, not pictures; .*vae"):
        texts.caption("none.png")


def with_modes(pipeline: TextLatentPipeline, **options: Any) -> TextLatentPipeline:
    return TextLatentPipeline(pipeline.model, pipeline.both, pipeline.assets, modes=ModeConfig(**options))


def test_without_a_caption_a_picture_is_that_of_the_evaluation(
    trained: tuple[TextLatentPipeline, PreparedData],
) -> None:
    """On any row of its length, whose tokens are masked."""
    pipeline, data = trained
    lengths = [data.train.batch([row])["text_mask"].sum() for row in range(len(data.train))]
    typical = pipeline.assets.length.typical()
    assert abs(typical - float(torch.stack(lengths).double().log().mean().exp())) < 1
    row = next(row for row, length in enumerate(lengths) if int(length) == typical)
    batch = data.train.batch([row]) | {"weight": torch.ones(1)} | pipeline._keys([b""])
    latents = replace(pipeline.both, seed=4).sample_latents(batch, with_text=False)
    expected = pipeline.assets.denormalise(latents)
    torch.testing.assert_close(pipeline._latent_without_text(4), expected)
    alone = pipeline.draw([""], seed=4)[0]
    among = pipeline.draw(["picture number 3", "", "picture number 4", ""], seed=4)
    assert [image.tobytes() == alone.tobytes() for image in among] == [False, True, False, True]
    others = pipeline.draw(["picture number 3", "picture number 4"], seed=4)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(others, among[::2], strict=True))
    assert pipeline.draw([""], seed=5)[0].tobytes() != alone.tobytes()


def test_a_caption_alone_is_one_caption(trained: tuple[TextLatentPipeline, PreparedData]) -> None:
    (alone,) = trained[0].draw("picture number 3", seed=4)
    assert alone.tobytes() == trained[0].draw(["picture number 3"], seed=4)[0].tobytes()
    assert len(trained[0].draw("")) == 1


def test_captions_are_drawn_as_training_reads_them(
    trained: tuple[TextLatentPipeline, PreparedData], tmp_path: Path
) -> None:
    """A caption of spaces is none, for the command too, and words are apart by one space."""
    pipeline, _ = trained
    odd, plain = (" ", " picture\nnumber  3 "), ("", "picture number 3")
    for first, second in zip(pipeline.draw(odd), pipeline.draw(plain), strict=True):
        assert first.tobytes() == second.tobytes()
    lines = [
        pipeline.sample(TextLatentOptions(prompt=prompts, output=str(tmp_path / "drawn"))) for prompts in (odd, plain)
    ]
    assert lines[0] == lines[1]
    assert [line.partition(".png: ")[2] for line in lines[0]] == ["no caption", "picture number 3"]


def test_what_was_never_learned_without_a_caption_is_not_drawn_without(
    trained: tuple[TextLatentPipeline, PreparedData],
) -> None:
    pipeline, _ = trained
    for learned in ({"mode": "t2l"}, {"weights": (1.0, 0.0, 1.0), "conditioning_dropout": 0.0}):
        assert len(with_modes(pipeline, **learned).draw([""])) == 1
    always = with_modes(pipeline, weights=(0.0, 1.0, 1.0), conditioning_dropout=0.0)
    with pytest.raises(
        UsageError, match=r"prompt '': .*conditioning_dropout 0 and modes.weights: 0 1 1 .* always trained with"
    ):
        always.draw(["a picture", ""])
    with pytest.raises(UsageError, match=r"a latent from its text \(t2l\): this model was never trained for it"):
        with_modes(pipeline, mode="l2t").draw([""])

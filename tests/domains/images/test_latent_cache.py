"""Cached latents and outputs of texts: equal to computed ones, never stale, shared by processes, keyed draws."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.data.loader import iterate_steps
from accel_train.data.options import LoaderConfig
from accel_train.data.sampler import BatchShard, StepSampler
from accel_train.data.tensor_cache import DamagedEntryError, TensorCache
from accel_train.domains.images import latent_cache
from accel_train.domains.images.dataset import PictureDataset
from accel_train.domains.images.latent_cache import (
    CachedPictures,
    EncoderIdentity,
    Filling,
    Latents,
    cached_latents,
    cached_texts,
    draw,
    latents_of,
    text_key,
    weights_hash,
)
from tests import zygote
from tests.domains.images.drawn import drawn, encoded, folder_of
from tests.domains.images.test_dataset import prepared

SIZES = [(64, 33), (33, 64), (40, 40)] * 3


class Encoder:
    """A small VAE's encoder that counts what it encodes."""

    def __init__(self, seed: int = 0) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.network = nn.Conv2d(3, 8, 8, stride=8)
        self.encoded = 0

    @property
    def identity(self) -> EncoderIdentity:
        return EncoderIdentity("tiny/vae", None, weights_hash(self.network), {"dtype": "fp32"})

    def __call__(self, pixels: Tensor) -> Latents:
        self.encoded += len(pixels)
        mean, logvar = self.network(pixels).chunk(2, 1)
        return Latents(mean, logvar)


def dataset(folder: Path, **options: Any) -> PictureDataset:
    return prepared(folder, folder.parent / "pictures_cache", heldout_fraction=0, **options).train


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "data", *SIZES)


def test_cached_latents_are_those_of_the_encoder(folder: Path, tmp_path: Path) -> None:
    pictures = dataset(folder, flip=True)
    encoder = Encoder()
    cache = cached_latents(pictures, encoder, encoder.identity, tmp_path, filling=Filling(batch_size=4))
    assert encoder.encoded == 2 * len(SIZES)  # with the mirror image of each
    cached = CachedPictures(pictures, cache)
    for index in range(len(pictures)):
        random.seed(index)
        expected = pictures[index]
        random.seed(index)
        item = cached[index]
        mean, logvar = encoder(expected["pixels"][None])
        assert torch.allclose(item["mean"], mean[0], atol=1e-6)
        assert logvar is not None
        assert torch.allclose(item["logvar"], logvar[0], atol=1e-6)
        assert torch.equal(item["crop_top_left"], expected["crop_top_left"])
        assert cached.sample_shape(index) == pictures.sample_shape(index)


def test_a_second_start_encodes_nothing(folder: Path, tmp_path: Path) -> None:
    encoder = Encoder()
    for _ in range(2):
        cached_latents(dataset(folder), encoder, encoder.identity, tmp_path)
    assert encoder.encoded == len(SIZES)


@pytest.mark.fault("D8", injected="a picture edited, latents cached", outcome="only that picture is encoded again")
def test_an_edited_picture_alone_is_encoded_again(folder: Path, tmp_path: Path) -> None:
    encoder = Encoder()
    cached_latents(dataset(folder), encoder, encoder.identity, tmp_path)
    encoder.encoded = 0
    (folder / "004.png").write_bytes(encoded(drawn(33, 64, 1000)))
    (folder / "005.txt").write_text("an edited caption")
    (folder / "006.png").rename(folder / "renamed.png")
    (folder / "006.txt").rename(folder / "renamed.txt")
    pictures = dataset(folder)
    cache = cached_latents(pictures, encoder, encoder.identity, tmp_path)
    assert encoder.encoded == 1
    index = [sample.picture.name for sample in pictures.samples].index("004.png")
    mean, _ = encoder(pictures[index]["pixels"][None])
    assert torch.allclose(CachedPictures(pictures, cache)[index]["mean"], mean[0], atol=1e-6)


@pytest.mark.fault("I48", injected="another VAE, size or background", outcome="every latent is computed anew")
@pytest.mark.parametrize("change", [{"resolutions": (40,)}, {"background": "black"}, "weights", "dtype", "revision"])
def test_another_encoder_or_size_meets_no_latent_of_before(folder: Path, tmp_path: Path, change: Any) -> None:
    encoder = Encoder()
    cached_latents(dataset(folder), encoder, encoder.identity, tmp_path)
    other = Encoder(seed=1 if change == "weights" else 0)
    identity = other.identity
    if change == "dtype":
        identity = EncoderIdentity("tiny/vae", None, identity.weights, {"dtype": "bf16"})
    if change == "revision":
        identity = EncoderIdentity("tiny/vae", "abc", identity.weights, identity.settings)
    options = change if isinstance(change, dict) else {}
    cached_latents(dataset(folder, **options), other, identity, tmp_path)
    assert other.encoded == len(SIZES)


@pytest.mark.fault("I48", injected="NaN in a latent", outcome="exit 2 with the picture's name")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_latents_that_are_not_finite_are_refused(folder: Path, tmp_path: Path, value: float) -> None:
    encoder = Encoder()

    def broken(pixels: Tensor) -> Latents:
        mean, logvar = encoder(pixels)
        mean[-1, 0, 0, 0] = value
        return Latents(mean, logvar)

    with pytest.raises(UsageError, match=r"latents: mean of \d+.png contains NaN or infinity"):
        cached_latents(dataset(folder), broken, encoder.identity, tmp_path)


def test_a_damaged_latent_is_computed_again(folder: Path, tmp_path: Path) -> None:
    encoder = Encoder()
    cache = cached_latents(dataset(folder), encoder, encoder.identity, tmp_path)
    cut, flipped = sorted(cache.folder.glob("??/*.safetensors"))[:2]
    cut.write_bytes(cut.read_bytes()[:-1])
    damaged = bytearray(flipped.read_bytes())
    damaged[-1] ^= 1
    flipped.write_bytes(damaged)
    cached = CachedPictures(dataset(folder), cache)
    found = 0
    for index in range(len(cached)):
        try:
            cached[index]
        except DamagedEntryError:
            found += 1
    assert found == 2
    encoder.encoded = 0
    cached_latents(dataset(folder), encoder, encoder.identity, tmp_path)
    assert encoder.encoded == 2
    assert all(len(cached[index]["mean"]) for index in range(len(cached)))


def test_one_start_computes_all_damaged_entries_again(folder: Path, tmp_path: Path) -> None:
    encoder = Encoder()
    cache = cached_latents(dataset(folder), encoder, encoder.identity, tmp_path)
    files = sorted(cache.folder.glob("??/*.safetensors"))
    for file in files:
        damaged = bytearray(file.read_bytes())
        damaged[-1] ^= 1
        file.write_bytes(damaged)
    encoder.encoded = 0
    # Their headers are whole, so a start cannot tell before one of them is read.
    cached = CachedPictures(dataset(folder), cached_latents(dataset(folder), encoder, encoder.identity, tmp_path))
    assert encoder.encoded == 0
    with pytest.raises(UsageError, match=r"damaged .*Start the run again: .*accel-train data cache verify"):
        cached[0]
    cached_latents(dataset(folder), encoder, encoder.identity, tmp_path)
    assert encoder.encoded == len(files) > 2
    assert all(len(cached[index]["mean"]) for index in range(len(cached)))


def test_random_crops_cannot_be_cached(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--data.crop random: .* Set crop to centre"):
        cached_latents(dataset(folder, crop="random"), Encoder(), Encoder().identity, tmp_path)


@pytest.mark.fault(
    "D9", injected="a cap below what the run needs", outcome="exit 2 with the size that is needed, after one batch"
)
def test_a_cap_that_is_too_small_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    encoder = Encoder()
    whole = size_of(cached_latents(dataset(folder), encoder, encoder.identity, tmp_path / "whole"))
    encoder.encoded = 0
    with pytest.raises(UsageError, match="cache_gib"):
        cached_latents(
            dataset(folder),
            encoder,
            encoder.identity,
            tmp_path,
            # More than the first batch takes.
            cap_bytes=whole // 2,
            filling=Filling(batch_size=2),
        )
    assert encoder.encoded == 2
    cached_latents(dataset(folder), encoder, encoder.identity, tmp_path, cap_bytes=10**6)


def size_of(cache: TensorCache) -> int:
    return sum(file.stat().st_size for file in cache.folder.glob("??/*.safetensors"))


def test_a_cap_deletes_what_no_live_run_uses(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_cache, "_leases", [])
    one, other = Encoder(), Encoder(seed=1)
    before = cached_latents(dataset(folder), one, one.identity, tmp_path)
    size = size_of(before)

    def second() -> None:
        cached_latents(dataset(folder), other, other.identity, tmp_path, cap_bytes=size + size // 2)

    with pytest.raises(UsageError, match="are in use by this run and others"):
        second()
    assert size_of(before) == size
    # As at the end of the first run.
    latent_cache._leases[0].close()
    second()
    assert 0 < size_of(before) <= size // 2


# -------------------------------------------------------------------------------------------------------------- draws
def test_draws_have_mean_and_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(3, 4, 5, 6, generator=generator)
    logvar = 40 * torch.randn(3, 4, 5, 6, generator=generator)
    occurrence = torch.arange(3)
    noise = draw(Latents(torch.zeros_like(mean), torch.zeros_like(mean)), 7, 3, occurrence)
    # The bounds of diffusers' DiagonalGaussianDistribution.
    variance = logvar.double().clamp(-30, 20).exp()
    expected = mean.double() + variance.sqrt() * noise.double()
    assert torch.allclose(draw(Latents(mean, logvar), 7, 3, occurrence).double(), expected, rtol=1e-5)
    assert 0.9 < float(noise.std()) < 1.1


def test_draws_are_keyed_by_step_and_sample() -> None:
    latents = Latents(torch.zeros(4, 2, 3, 3), torch.zeros(4, 2, 3, 3))
    occurrence = torch.tensor([5, 6, 7, 8])
    first = draw(latents, 0, 1, occurrence)
    order = torch.tensor([2, 0])
    part = Latents(latents.mean[order], latents.mean[order])
    assert torch.equal(draw(part, 0, 1, occurrence[order]), first[order])
    for seed, step in ((1, 1), (0, 2)):
        assert not torch.equal(draw(latents, seed, step, occurrence), first)
    assert torch.equal(draw(Latents(latents.mean), 0, 1, occurrence), latents.mean)


# -------------------------------------------------------------------------------------------------------------- texts
def test_outputs_of_texts_with_that_of_the_empty_text(folder: Path, tmp_path: Path) -> None:
    seen: list[str] = []

    def encode(texts: Sequence[str]) -> dict[str, Tensor]:
        seen.extend(texts)
        lengths = torch.tensor([float(len(text)) for text in texts])
        return {"embedding": lengths[:, None, None].expand(-1, 4, 2).bfloat16(), "pooled": lengths[:, None]}

    pictures = dataset(folder)
    captions = [sample.caption for sample in pictures.samples]
    identity = EncoderIdentity("tiny/text", "main", "0", {"max_length": 4})
    cache = cached_texts([*captions, captions[0]], encode, identity, tmp_path)
    assert sorted(seen) == sorted(["", *captions])
    cached_texts([*captions, "new"], encode, identity, tmp_path)
    assert seen[-1] == "new"
    assert len(seen) == len(SIZES) + 2
    item = CachedPictures(pictures, None, cache)[1]
    assert item["pixels"].shape[0] == 3
    assert item["embedding"].dtype == torch.bfloat16
    assert float(item["pooled"]) == len(captions[1])
    assert float(cache.read(latent_cache.text_key(""))["pooled"]) == 0


def test_batches_of_cached_pictures(folder: Path, tmp_path: Path) -> None:
    pictures = dataset(folder)
    encoder = Encoder()
    cached = CachedPictures(pictures, cached_latents(pictures, encoder, encoder.identity, tmp_path))
    order = StepSampler(len(cached), 4, seed=0, blocks=cached.order)
    config = LoaderConfig(num_workers=0)
    for step in iterate_steps(
        cached, order, BatchShard(0, 1, 4), start_step=0, max_steps=4, device=torch.device("cpu"), config=config
    ):
        for batch in step.micro_batches:
            latents = latents_of(batch)
            height, width = batch["target_size"][0].tolist()
            assert latents.mean.shape == (len(batch["sample"]), 4, height // 8, width // 8)
            drawn_latents = draw(latents, 0, step.step, batch["occurrence"])
            assert drawn_latents.shape == latents.mean.shape


# ---------------------------------------------------------------------------------------------------------- processes
TOGETHER = """
import sys
from pathlib import Path
import torch
from torch import distributed
from tests.domains.images.test_latent_cache import Encoder, dataset
from accel_train.domains.images.latent_cache import Filling, cached_latents
from accel_train.domains.images.dataset import prepare_pictures
from accel_train.domains.images.options import PictureDataConfig

rank, folder, store, cache = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
distributed.init_process_group("gloo", store=distributed.FileStore(store, 3), rank=rank, world_size=3)
config = PictureDataConfig(
    str(folder), resolutions=(32,), bucket_step=8, heldout_fraction=0, cache_dir=str(folder.parent / "shared")
)
data = prepare_pictures(config, rank=rank, world_size=3, barrier=distributed.barrier)
encoder = Encoder()
filling = Filling(rank, 3, distributed.barrier, batch_size=2)
made = cached_latents(data.train, encoder, encoder.identity, cache, filling=filling)
missing = len(made.missing([file.stem for file in made.folder.glob("??/*.safetensors")]))
print("RESULT", rank, data.fingerprint, encoder.encoded, missing, len(data.train))
distributed.destroy_process_group()
"""


@pytest.mark.distributed
@pytest.mark.parametrize(
    "shared", [pytest.param(True, id="one_disk"), pytest.param(False, id="a_disk_each", marks=pytest.mark.slow)]
)
def test_processes_share_the_work(folder: Path, tmp_path: Path, shared: bool) -> None:
    single = prepared(folder, tmp_path / "alone", heldout_fraction=0)
    children = []
    for rank in range(3):
        cache = tmp_path / ("cache" if shared else f"cache{rank}")
        words = [str(rank), str(folder), str(tmp_path / "store"), str(cache)]
        children.append(zygote.start([sys.executable, "-c", TOGETHER, *words], tmp_path / f"output{rank}"))
    results = []
    for rank, child in enumerate(children):
        output = tmp_path / f"output{rank}"
        assert child.wait(600) == 0, output.read_text()
        line = next(line for line in output.read_text().splitlines() if line.startswith("RESULT"))
        results.append(line.split())
    assert {result[2] for result in results} == {single.fingerprint}
    assert {result[4] for result in results} == {"0"}
    counts = [int(result[3]) for result in results]
    # With a disk each, every process also computes what the others have on theirs.
    assert counts == ([3, 3, 3] if shared else [9, 9, 9])


def test_the_processes_of_a_host_share_what_it_lacks(tmp_path: Path) -> None:
    """Two hosts, each with a disk and four processes, here as threads."""
    all_here = threading.Barrier(8)
    texts = [f"text {number}" for number in range(799)]
    identity = Encoder().identity  # here, because threads that seed their weights at once would get others

    def barrier() -> None:
        all_here.wait()

    def encoded_by(rank: int) -> int:
        asked: list[str] = []

        def encode(some: Sequence[str]) -> dict[str, Tensor]:
            asked.extend(some)
            return {"output": torch.zeros(len(some), 1)}

        host, local_rank = divmod(rank, 4)
        filling = Filling(rank, 8, barrier, local_rank=local_rank, local_world_size=4)
        cache = cached_texts(texts, encode, identity, tmp_path / f"host{host}", filling=filling)
        assert not cache.missing(map(text_key, texts))
        return len(asked)

    with ThreadPoolExecutor(8) as pool:
        # Of 800 texts, an eighth with all others, and a quarter of the 400 that its host then lacks.
        assert list(pool.map(encoded_by, range(8))) == [200] * 8

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import default_collate

from accel_train.config import UsageError
from accel_train.domains.text import tfidf
from accel_train.domains.text.corpus import DEMO_FILE
from accel_train.domains.text.dataset import (
    DataAssets,
    TextLatentDataset,
    dataset_fingerprint,
    load_assets,
    statistics,
)
from accel_train.domains.text.encoders import LatentEncoder
from accel_train.domains.text.latents.cache import LatentTable
from accel_train.domains.text.latents.files import read_latents, write_latents
from accel_train.domains.text.lengths import LengthEstimate
from accel_train.domains.text.tokenizer import TextTokenizer, train_tokenizer

TEXTS = DEMO_FILE.read_text().splitlines()[:400]
LATENTS = (np.random.default_rng(0).standard_normal((400, 2, 8)) * [1, 2, 3, 4, 5, 6, 7, 8] + 3).astype(np.float32)


def assets_of(tokenizer: TextTokenizer, encoder: LatentEncoder | None, longest: int, *scale: Any) -> DataAssets:
    """``scale``: mean, std and number of tokens of a latent."""
    mean, std, *tokens = scale
    length = LengthEstimate(torch.zeros(len(mean) + 1, dtype=torch.float64), 2.0, 1.0, 3, 20)
    return DataAssets(tokenizer, encoder, longest, mean, std, length, *tokens)


def table(folder: Path, latents: np.ndarray = LATENTS) -> LatentTable:
    write_latents(folder, TEXTS[: len(latents)], latents, rows_per_shard=100)
    return read_latents(folder, [(i // 100, i % 100) for i in range(len(latents))])


def test_statistics_are_those_of_float64(tmp_path: Path) -> None:
    mean, std = statistics(table(tmp_path))
    flat = LATENTS.astype(np.float64).reshape(-1, 8)
    np.testing.assert_allclose(mean, flat.mean(0), rtol=1e-6)
    assert std == pytest.approx(np.sqrt(((flat - flat.mean(0)) ** 2).mean()), rel=1e-9)


def test_latents_that_say_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="all 400 latents of the training split are equal"):
        statistics(table(tmp_path, np.full_like(LATENTS, 0.7)[:200]))


def test_an_example_is_padded_masked_and_normalised(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, 400)
    latents = table(tmp_path)
    mean, std = statistics(latents)
    assets = assets_of(tokenizer, None, 12, mean, std, 2)
    dataset = TextLatentDataset(TEXTS, tokenizer.tokenise(TEXTS, 12), latents, assets, "f")
    assert (len(dataset), dataset.texts[7], dataset.fingerprint) == (400, TEXTS[7], "f")
    for i in (0, 7, 399):
        example = dataset[i]
        ids = tokenizer.tokenise([TEXTS[i]], 12).ids
        n = len(ids)
        assert example["tokens"].dtype == torch.int64
        assert example["tokens"].tolist() == ids.tolist() + [tokenizer.pad_id] * (12 - n)
        assert example["text_mask"].tolist() == [True] * n + [False] * (12 - n)
        assert torch.equal(example["maskable"], example["text_mask"])  # this tokenizer puts nothing around a text
        torch.testing.assert_close(example["latent"], (torch.from_numpy(LATENTS[i]) - mean) / std)
    every = torch.stack([dataset[i]["latent"] for i in range(400)])
    torch.testing.assert_close(every.flatten(0, 1).mean(0), torch.zeros(8), atol=1e-5, rtol=0)
    assert float(every.pow(2).mean()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_batch_is_the_samples_stacked_bit_for_bit(tmp_path: Path, dtype: type) -> None:
    tokenizer = train_tokenizer(TEXTS, 400)
    latents = table(tmp_path, LATENTS.astype(dtype))
    assets = assets_of(tokenizer, None, 12, *statistics(latents), 2)
    dataset = TextLatentDataset(TEXTS, tokenizer.tokenise(TEXTS, 12), latents, assets, "f")
    for indices in ([5], [3, 99, 1, 3], [399, 7, 150, 201, 0], list(range(0, 400, 3)), list(range(90, 130))):
        found, expected = dataset.batch(indices), default_collate([dataset[i] for i in indices])
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value), name


def test_a_trimmed_batch_keeps_every_token(tmp_path: Path) -> None:
    texts = [" ".join(text.split()[: 1 + i % 6]) for i, text in enumerate(TEXTS)]
    tokenizer, latents = train_tokenizer(texts, 400), table(tmp_path)
    assets = assets_of(tokenizer, None, 12, *statistics(latents), 2)
    dataset = TextLatentDataset(texts, tokenizer.tokenise(texts, 12), latents, assets, "f")
    lengths = [dataset.length(i) for i in range(400)]
    assert lengths == [int(dataset[i]["text_mask"].sum()) for i in range(400)]
    assert len(set(lengths)) > 5
    short = [i for i in range(400) if lengths[i] <= 7]
    whole = dataset.batch(short)
    trimmed = dataset.trim(whole, 7)
    assert trimmed["tokens"].shape == (len(short), 7)
    assert all(value.is_contiguous() for value in trimmed.values())
    assert not whole["text_mask"][:, 7:].any()
    for name, value in trimmed.items():
        assert torch.equal(value, whole[name][:, :7] if name != "latent" else whole[name])
    assert dataset.trim(whole, 99)["tokens"].shape == whole["tokens"].shape


def test_special_tokens_are_attended_but_not_maskable(tmp_path: Path) -> None:
    from accel_train.domains.text.tokenizer import transformers_tokenizer
    from tests import tiny_encoders

    tiny_encoders.bert(tmp_path)
    tokenizer = transformers_tokenizer(str(tmp_path))
    batch = assets_of(tokenizer, None, 6, torch.zeros(8), 1.0).tokenise(["to be", "king unheard"])
    assert batch["tokens"].tolist()[0] == [2, 5, 6, 3, 0, 0]
    assert batch["text_mask"].tolist() == [[True] * 4 + [False] * 2] * 2
    assert batch["maskable"].tolist() == [[False, True, True, False, False, False]] * 2  # an unknown word is content


def test_one_scalar_std_keeps_cosines_of_the_centred_space(tmp_path: Path) -> None:
    mean, std = statistics(table(tmp_path))
    centred = torch.from_numpy(LATENTS) - mean
    normalised = assets_of(train_tokenizer(TEXTS, 300), None, 8, mean, std, 2).normalise(torch.from_numpy(LATENTS))
    for shift in (1, 50):
        cosine = F.cosine_similarity(normalised, normalised.roll(shift, 0), dim=-1)
        torch.testing.assert_close(cosine, F.cosine_similarity(centred, centred.roll(shift, 0), dim=-1))


def test_assets_alone_tokenise_encode_and_decode(tmp_path: Path) -> None:
    tokenizer, encoder = train_tokenizer(TEXTS, 400), tfidf.fit(TEXTS, 8, True)
    assets = assets_of(tokenizer, encoder, 16, torch.randn(8), 0.37, 1)
    folder = tmp_path / "checkpoint" / "assets"
    assets.save(folder)
    assert not [file.name for file in folder.iterdir() if file.suffix not in (".json", ".safetensors")]
    loaded = load_assets(folder)
    new = ["A text that nobody wrote before.", *TEXTS[:3]]
    assert all(torch.equal(loaded.tokenise(new)[name], value) for name, value in assets.tokenise(new).items())
    assert torch.equal(loaded.encode(new), assets.encode(new))
    expected = (torch.from_numpy(encoder.encode(new)) - assets.latent_mean) / 0.37
    torch.testing.assert_close(loaded.encode(new)[:, 0], expected)
    assert loaded.latent_shape == (1, 8)
    assert loaded.tokenizer.decode(loaded.tokenise(new)["tokens"][0]).startswith("A text that")


def test_assets_of_ready_made_latents_have_no_encoder(tmp_path: Path) -> None:
    assets_of(train_tokenizer(TEXTS, 300), None, 16, torch.zeros(8), 1.0, 2).save(tmp_path)
    loaded = load_assets(tmp_path)
    assert loaded.encoder is None
    assert loaded.latent_shape == (2, 8)
    with pytest.raises(UsageError, match=r"--data.latents: ready-made latents come without an encoder"):
        loaded.encode(["new"])


NAMES = ["assets.json", "length.json", "tokenizer.json", "latent.safetensors", "encoder.safetensors", "encoder.json"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["deleted", "damaged"])
def test_incomplete_assets_are_refused(tmp_path: Path, name: str, how: str) -> None:
    assets = assets_of(train_tokenizer(TEXTS, 300), tfidf.fit(TEXTS, 8, True), 16, torch.zeros(8), 1.0)
    assets.save(tmp_path)
    (tmp_path / name).unlink() if how == "deleted" else (tmp_path / name).write_bytes(b'{"format": 1, ')
    with pytest.raises(UsageError, match="no usable data assets"):
        load_assets(tmp_path)


def test_assets_of_another_format_are_refused(tmp_path: Path) -> None:
    assets_of(train_tokenizer(TEXTS, 300), None, 16, torch.zeros(8), 1.0).save(tmp_path)
    facts = json.loads((tmp_path / "assets.json").read_text())
    (tmp_path / "assets.json").write_text(json.dumps({**facts, "format": 2}))
    with pytest.raises(UsageError, match="format 2, this version reads 1"):
        load_assets(tmp_path)


def test_fingerprint_changes_with_texts_length_tokenizer_and_latents(tmp_path: Path) -> None:
    tokenizer, latents = train_tokenizer(TEXTS, 400), table(tmp_path / "a")
    changed = LATENTS.copy()
    changed[399, 1, 7] += 1e-3
    other = table(tmp_path / "b", changed)
    assets = assets_of(tokenizer, None, 16, torch.zeros(8), 1.0, 2)
    base = dataset_fingerprint(TEXTS, latents, assets)
    assert dataset_fingerprint(TEXTS, latents, assets_of(tokenizer, None, 16, torch.ones(8), 2.0, 2)) == base
    others = [
        dataset_fingerprint([*TEXTS[:-1], "else"], latents, assets),
        dataset_fingerprint(TEXTS, other, assets),
        dataset_fingerprint(TEXTS, latents, assets_of(tokenizer, None, 17, torch.zeros(8), 1.0, 2)),
        dataset_fingerprint(TEXTS, latents, assets_of(train_tokenizer(TEXTS, 401), None, 16, torch.zeros(8), 1.0, 2)),
        dataset_fingerprint(TEXTS, latents, assets_of(tokenizer, tfidf.fit(TEXTS, 8, True), 16, torch.zeros(8), 1.0)),
    ]
    assert len({base, *others}) == 6

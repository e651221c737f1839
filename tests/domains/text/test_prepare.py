import ast
import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import accel_train.domains.text
from accel_train.checkpoints.run import WeightsAssets
from accel_train.config import UsageError
from accel_train.data.heldout import heldout_pairs
from accel_train.data.tables.text_sources import content_key
from accel_train.domains.text.both_ways import EvaluationConfig
from accel_train.domains.text.corpus import DEMO_FILE
from accel_train.domains.text.dataset import PreparedData, load_assets
from accel_train.domains.text.latents import cache
from accel_train.domains.text.latents.files import write_latents
from accel_train.domains.text.prepare import DataConfig, prepare_data
from accel_train.domains.text.samples import notices
from accel_train.domains.text.splits import Processes, cached_tokens
from accel_train.domains.text.tfidf import TfidfSvdEncoder, words_of
from accel_train.domains.text.tokenizer import TextTokenizer
from tests import tiny_encoders, zygote

LINES = DEMO_FILE.read_text().splitlines()[:600]


def settings(folder: Path, **options: object) -> DataConfig:
    file = folder / "corpus.txt"
    if not file.exists():
        file.write_text("\n".join(LINES))
    base = DataConfig(
        path=str(file), cache_dir=str(folder / "cache"), vocab_size=400, latent_dim=8, heldout_fraction=0.1
    )
    return replace(base, **options)  # type: ignore[arg-type]


def checkpoint(folder: Path, *, resumes: bool = True) -> WeightsAssets:
    """The assets that a test has saved in `folder`."""
    return WeightsAssets(folder / "assets", resumes)


def same(a: PreparedData, b: PreparedData) -> bool:
    """Bit for bit."""
    return all(
        len(first) == len(second)
        and all(torch.equal(first[i][k], second[i][k]) for i in range(len(first)) for k in first[i])
        for first, second in ((a.train, b.train), (a.heldout, b.heldout))
    )


def test_the_whole_from_a_text_file(tmp_path: Path) -> None:
    data = prepare_data(settings(tmp_path))
    assert len(data.train) + len(data.heldout) == 600
    assert 30 < len(data.heldout) < 90
    assert not {content_key(text) for text in data.train.texts} & {content_key(text) for text in data.heldout.texts}
    assert data.latent_shape == (1, 8)
    assert (data.tokenizer.vocab_size, data.tokenizer.pad_id, data.tokenizer.mask_id) == (400, 0, 1)
    example = data.heldout[3]
    assert {name: (tuple(value.shape), value.dtype) for name, value in example.items()} == {
        "tokens": ((32,), torch.int64),
        "text_mask": ((32,), torch.bool),
        "maskable": ((32,), torch.bool),
        "latent": ((1, 8), torch.float32),
    }
    assert data.heldout.texts[3].startswith(data.tokenizer.decode(example["tokens"]))
    torch.testing.assert_close(example["latent"][None], data.assets.encode([data.heldout.texts[3]]))
    assert data.notices[0] == f"{len(data.train)} training texts, {len(data.heldout)} held out"
    assert len({data.fingerprint, data.train.fingerprint, data.heldout.fingerprint}) == 3


def test_prepared_again_and_elsewhere_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(tmp_path)
    first = prepare_data(config)
    elsewhere = prepare_data(replace(config, cache_dir=str(tmp_path / "another cache")))
    monkeypatch.setattr(TfidfSvdEncoder, "encode", None)  # from the cache: nothing is computed
    monkeypatch.setattr("accel_train.domains.text.tfidf.fit", None)
    monkeypatch.setattr("accel_train.domains.text.splits.train_tokenizer", None)
    monkeypatch.setattr(TextTokenizer, "tokenise", None)
    again = prepare_data(config)
    for other in (elsewhere, again):
        assert same(first, other)
        assert other.fingerprint == first.fingerprint
        assert torch.equal(first.latent_mean, other.latent_mean)
        assert first.latent_std == other.latent_std


def test_cached_tokens_are_those_of_the_texts_and_options(tmp_path: Path) -> None:
    config = settings(tmp_path)
    tokenizer = prepare_data(config).tokenizer
    processes = Processes(0, 1, lambda: None, progress=False, device="cpu")
    asked = [(LINES, 32), (LINES, 8), (LINES[1:], 32), ([], 32)]
    # Each pair is computed, then read; neither takes what another one has written.
    for texts, length in (*asked, *asked):
        expected = tokenizer.tokenise(texts, length)
        found = cached_tokens(texts, tokenizer, length, tmp_path / "cache", processes)
        assert (found.ids.tolist(), found.offsets.tolist()) == (expected.ids.tolist(), expected.offsets.tolist())
        assert (found.ids.dtype, found.offsets.dtype) == (expected.ids.dtype, expected.offsets.dtype)
        assert found.truncated == expected.truncated
    another = prepare_data(replace(config, vocab_size=300)).tokenizer
    found = cached_tokens(LINES, another, 32, tmp_path / "cache", processes)
    assert found.ids.tolist() == another.tokenise(LINES, 32).ids.tolist()


def test_nothing_fitted_sees_held_out_text(tmp_path: Path) -> None:
    heldout = [f"Zyzzyva{i} quoth {LINES[i]}" for i in range(40)]
    (tmp_path / "one.txt").write_text("\n".join(heldout))
    (tmp_path / "two.txt").write_text("\n".join(f"entirely other words, number {i}" for i in range(80)))
    config = settings(tmp_path, heldout_path=str(tmp_path / "one.txt"), heldout_fraction=0.0)
    one = prepare_data(config)
    two = prepare_data(replace(config, heldout_path=str(tmp_path / "two.txt"), cache_dir=str(tmp_path / "cache2")))
    for part, data in (("one", one), ("two", two)):
        (tmp_path / part).mkdir()
        data.assets.save(tmp_path / part)
    names = sorted(file.name for file in (tmp_path / "one").iterdir())
    fitted = ["encoder.json", "encoder.safetensors", "latent.safetensors", "length.json", "tokenizer.json"]
    fitted += ["assets.json", "tokenizer_config.json"]
    assert names == sorted(fitted)
    for name in fitted:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert one.train.fingerprint == two.train.fingerprint
    assert one.heldout.fingerprint != two.heldout.fingerprint


def test_nothing_fitted_sees_the_part_that_the_hash_holds_out(tmp_path: Path) -> None:
    data = prepare_data(settings(tmp_path))
    encoder = data.assets.encoder
    assert isinstance(encoder, TfidfSvdEncoder)
    assert set(encoder.words) == {word for text in data.train.texts for word in words_of(text)}
    unseen = {word for text in data.heldout.texts for word in words_of(text)} - set(encoder.words)
    assert unseen
    (tmp_path / "train.txt").write_text("\n".join(data.train.texts))
    (tmp_path / "heldout.txt").write_text("\n".join(data.heldout.texts))
    apart = settings(
        tmp_path, path=str(tmp_path / "train.txt"), heldout_path=str(tmp_path / "heldout.txt"), heldout_fraction=0.0
    )
    assert same(data, prepare_data(apart))


def test_another_split_of_the_same_dataset_can_be_held_out(tmp_path: Path) -> None:
    parts = {"train": LINES[:300], "validation": LINES[290:400]}
    datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in parts.items()}
    ).save_to_disk(str(tmp_path / "saved"))
    config = settings(tmp_path, path=str(tmp_path / "saved"), heldout_path="split=validation", heldout_fraction=0.04)
    data = prepare_data(config)
    assert data.train.texts == LINES[:290]
    assert sorted(data.heldout.texts) == sorted(LINES[290:400])


def test_a_split_of_a_file_cannot_be_held_out(tmp_path: Path) -> None:
    config = settings(tmp_path, heldout_path="split=validation", heldout_fraction=0.04)
    with pytest.raises(UsageError, match=r"heldout_path 'split=validation': .*corpus\.txt' has no splits"):
        prepare_data(config)


def test_a_changed_corpus_is_prepared_anew(tmp_path: Path) -> None:
    config = settings(tmp_path)
    before = prepare_data(config)
    (tmp_path / "corpus.txt").write_text("\n".join([*LINES[1:], "Something is rotten in the state of Denmark now"]))
    after = prepare_data(config)
    fresh = prepare_data(replace(config, cache_dir=str(tmp_path / "fresh")))
    assert after.fingerprint == fresh.fingerprint != before.fingerprint
    assert same(after, fresh)


def test_sampled_latents_are_shown_as_their_nearest_training_texts(tmp_path: Path) -> None:
    data = prepare_data(settings(tmp_path))
    encoder = data.assets.encoder
    assert encoder is not None
    centred = torch.from_numpy(encoder.encode(data.train.texts)) - data.latent_mean
    queries = torch.from_numpy(encoder.encode(data.heldout.texts[:9])) - data.latent_mean
    cosines = F.normalize(queries, dim=1) @ F.normalize(centred, dim=1).T
    found = data.nearest_texts(torch.stack([data.heldout[i]["latent"] for i in range(9)]))
    for (text, cosine), row in zip(found, cosines, strict=True):
        assert text == data.train.texts[int(row.argmax())]
        assert cosine == pytest.approx(float(row.max()), abs=1e-5)
    own = data.nearest_texts(data.train[17]["latent"][None] * 3)[0]
    assert own[0] == data.train.texts[17]
    assert own[1] == pytest.approx(1, abs=1e-5)


def test_a_checkpoints_assets_stand_in_for_fitting(tmp_path: Path) -> None:
    config = settings(tmp_path)
    first = prepare_data(config)
    (tmp_path / "assets").mkdir()
    first.assets.save(tmp_path / "assets")
    again = prepare_data(replace(config, cache_dir=str(tmp_path / "empty")), weights=checkpoint(tmp_path))
    assert same(first, again)
    assert again.fingerprint == first.fingerprint
    (tmp_path / "new.txt").write_text("\n".join(LINES[:50] + [f"a new line, number {i}" for i in range(50)]))
    other = prepare_data(replace(config, path=str(tmp_path / "new.txt")), weights=checkpoint(tmp_path))
    assert torch.equal(other.latent_mean, first.latent_mean)
    assert other.tokenizer.to_json() == first.tokenizer.to_json()
    texts = [other.train.texts[0]]
    assert torch.equal(other.train[0]["latent"][None], load_assets(tmp_path / "assets").encode(texts))


def test_a_transformers_encoder_and_tokenizer(tmp_path: Path) -> None:
    tiny_encoders.bert(tmp_path / "bert")
    words = tiny_encoders.WORDS
    rows = [{"caption": " ".join(words[(i * k) % 15] for k in range(1, 6)) + f" {i}"} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    config = DataConfig(
        path=str(tmp_path / "rows.jsonl"),
        text_column="caption",
        heldout_fraction=0.2,
        tokenizer=str(tmp_path / "bert"),
        encoder=str(tmp_path / "bert"),
        encoder_batch_size=7,
        max_length=12,
        cache_dir=str(tmp_path / "cache"),
    )
    data = prepare_data(config)
    assert data.latent_shape == (1, 16)
    assert data.tokenizer.mask_id == 4
    for dataset in (data.train, data.heldout):
        around = dataset[0]["text_mask"] & ~dataset[0]["maskable"]
        assert dataset[0]["tokens"][around].tolist() == [2, 3]  # [CLS] and [SEP] are attended, not diffused
    small = prepare_data(replace(config, latent_dim=4, pooling="cls", encoder_max_length=5))
    assert small.latent_shape == (1, 4)
    (tmp_path / "assets").mkdir()
    data.assets.save(tmp_path / "assets")
    loaded = load_assets(tmp_path / "assets")
    torch.testing.assert_close(loaded.encode([data.heldout.texts[0]]), data.heldout[0]["latent"][None])
    tiny_encoders.bert(tmp_path / "bert", seed=1)
    assert prepare_data(config).fingerprint != data.fingerprint
    assert not same(prepare_data(config), data)


def test_ready_made_latents(tmp_path: Path) -> None:
    latents = np.random.default_rng(0).standard_normal((600, 2, 5)).astype(np.float32)
    rows = write_latents(tmp_path / "latents", LINES, latents, rows_per_shard=250)
    config = DataConfig(
        path=str(rows), latents=str(tmp_path / "latents"), vocab_size=400, cache_dir=str(tmp_path / "cache")
    )
    data = prepare_data(config)
    assert data.latent_shape == (2, 5)
    for i in (0, len(data.heldout) - 1):
        raw = latents[LINES.index(data.heldout.texts[i])]
        torch.testing.assert_close(data.heldout[i]["latent"] * data.latent_std + data.latent_mean, torch.tensor(raw))
    with pytest.raises(UsageError, match="ready-made latents come without an encoder"):
        data.assets.encode(["new"])
    with pytest.raises(UsageError, match=r"--data.latents needs --data.path to be JSONL"):
        prepare_data(replace(config, path="demo"))
    (tmp_path / "rows.txt").write_text("plain")
    with pytest.raises(UsageError, match=r"--data.latents needs --data.path to be JSONL"):
        prepare_data(replace(config, path=str(tmp_path / "rows.txt")))
    np.save(tmp_path / "latents" / "shard_0009.npy", latents[:2, :, :4])
    other = [{"text": f"held out {i}", "shard": 9, "idx": i} for i in range(2)]
    (tmp_path / "other.jsonl").write_text("\n".join(json.dumps(row) for row in other))
    with pytest.raises(UsageError, match=r"latents of shape \(2, 4\) and others of \(2, 5\)"):
        prepare_data(replace(config, heldout_path=str(tmp_path / "other.jsonl")))
    broken = LINES.index(data.heldout.texts[5])
    latents[broken, 1, 2] = np.nan
    write_latents(tmp_path / "latents", LINES, latents, rows_per_shard=250)
    with pytest.raises(UsageError, match=r"the latent of sample 5 .* contains NaN or infinity"):
        prepare_data(config)
    (tmp_path / "short.jsonl").write_text('{"text": "no reference"}\n')
    with pytest.raises(UsageError, match=r"short\.jsonl:1: 'shard' is None"):
        prepare_data(replace(config, path=str(tmp_path / "short.jsonl")))


@pytest.mark.parametrize("empty", [b"", (120, 0), (120, 0, 5), (120, 2, 0)], ids=str)
def test_latents_without_values_are_refused(empty: bytes | tuple[int, ...], tmp_path: Path) -> None:
    rows = write_latents(tmp_path / "latents", LINES[:120], np.ones((120, 5), np.float32))
    file = tmp_path / "latents" / "shard_0000.npy"
    if isinstance(empty, bytes):
        file.write_bytes(empty)
    else:
        np.save(file, np.ones(empty, np.float32))
    config = DataConfig(path=str(rows), latents=str(tmp_path / "latents"), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UsageError, match=r"--data.latents: .*shard_0000\.npy cannot be read \("):
        prepare_data(config)


def test_texts_without_a_token_are_bad_rows(tmp_path: Path) -> None:
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    tiny_encoders.tokenizer_folder(tmp_path / "tok", list(special.values()), "$A", **special)
    (tmp_path / "mixed.txt").write_text("\n".join(["\x00 \x00", *LINES[:100]]))
    tokenizer = json.loads((tmp_path / "tok" / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "\x00"}, "content": ""}
    (tmp_path / "tok" / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = replace(
        settings(tmp_path, path=str(tmp_path / "mixed.txt"), heldout_fraction=0.3),
        tokenizer=str(tmp_path / "tok"),
        vocab_size=2048,
    )
    with pytest.raises(UsageError, match=r"finds no token in sample \d+ \('\\x00 \\x00'\)\. Correct"):
        prepare_data(config)
    data = prepare_data(replace(config, max_bad_rows=1))
    assert len(data.train) + len(data.heldout) == 100


def test_what_was_left_out_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [*LINES[:200], LINES[0].upper(), "short", "two words"]
    (tmp_path / "some.txt").write_bytes("\n".join(lines).encode() + b"\n\xff\n")
    data = prepare_data(settings(tmp_path, path=str(tmp_path / "some.txt"), min_words=3, max_bad_rows=5, max_length=6))
    assert data.notices[1] == "1 bad rows left out"
    assert data.notices[2].startswith(f"bad row: {tmp_path / 'some.txt'}:204: byte 1 of the line is not UTF-8")
    assert data.notices[3:5] == ("2 short texts left out", "1 repeated texts left out")
    assert data.notices[5].endswith("% of training texts are cut to 6 tokens")
    assert caplog.messages[-1] == "more than half of the training texts are cut; raise --data.max_length (now 6)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heldout_fraction": 0.0}, "--data.heldout_fraction 0 without --data.heldout_path"),
        ({"heldout_path": "x", "heldout_fraction": 0.1}, r"data.heldout_fraction: 0.1: has no effect with"),
        ({"pooling": "last"}, r"data.pooling: last: has no effect with data.encoder: tfidf-svd"),
        ({"encoder_max_length": 9}, r"data.encoder_max_length: 9: has no effect"),
        ({"encoder": "x/y", "latents": "z"}, r"data.encoder: x/y: has no effect with data.latents: z"),
        ({"tokenizer": "x/y", "vocab_size": 9}, r"data.vocab_size: 9: has no effect with data.tokenizer: x/y"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DataConfig(**options)  # type: ignore[arg-type]


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "little.txt").write_text("\n".join(LINES[:4]))
    with pytest.raises(UsageError, match=r"training and \d held-out texts; at least 1 and 2 are required"):
        prepare_data(settings(tmp_path, path=str(tmp_path / "little.txt"), heldout_fraction=0.001))


def test_every_option_is_explained() -> None:
    assert len(fields(DataConfig)) == 22
    tree = ast.parse((Path(accel_train.domains.text.__file__).parent / "options.py").read_text())
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "DataConfig")
    for option, text in zip(config.body, config.body[1:], strict=False):
        if isinstance(option, ast.AnnAssign):
            assert isinstance(text, ast.Expr), ast.unparse(option)


def test_importing_is_light() -> None:
    code = (
        "import sys, accel_train.domains.text.prepare\n"
        "print([m for m in ('sklearn', 'scipy', 'datasets', 'transformers', 'tokenizers', 'accelerate') "
        "if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


ROWS = 1000


def work(rank: int, folder: Path) -> None:
    """One of two real processes with a cold cache."""
    store = f"file://{folder / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    calls: list[int] = []
    original = TfidfSvdEncoder.encode

    def counted(self: TfidfSvdEncoder, texts: list[str]) -> np.ndarray:
        calls.append(len(texts))
        return original(self, texts)

    TfidfSvdEncoder.encode = counted  # type: ignore[method-assign, assignment]
    cache.ROWS_PER_SHARD = ROWS
    barrier = torch.distributed.barrier
    config = DataConfig(path=str(folder / "demo.txt"), cache_dir=str(folder / "cache"))
    data = prepare_data(config, rank=rank, world_size=2, barrier=barrier, progress=False)
    latents = torch.stack([data.train[i]["latent"] for i in range(0, len(data.train), 97)])
    torch.save({"encoded": sum(calls), "fingerprint": data.fingerprint, "latents": latents}, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow  # test_latent_cache.py builds one cache with two processes, and recipes train with two elsewhere
@pytest.mark.distributed
def test_two_processes_prepare_together(tmp_path: Path) -> None:
    """Of a corpus with a shard for each."""
    (tmp_path / "demo.txt").write_text("\n".join(DEMO_FILE.read_text().splitlines()[: 2 * ROWS]))
    zygote.call(work, 2, tmp_path)
    zero, one = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    alone = prepare_data(DataConfig(path=str(tmp_path / "demo.txt"), cache_dir=str(tmp_path / "cache2")))
    assert zero["fingerprint"] == one["fingerprint"] == alone.fingerprint
    assert torch.equal(zero["latents"], one["latents"])
    assert min(zero["encoded"], one["encoded"]) > 0.7 * ROWS
    assert zero["encoded"] + one["encoded"] == len(alone.train) + len(alone.heldout)  # each text once


def of_captions(folder: Path, heldout: list[str]) -> DataConfig:
    """Ready-made latents, as pictures have them, with these held-out texts."""
    texts = [*heldout, *(f"training text {index}" for index in range(9))]
    latents = np.random.default_rng(0).standard_normal((len(texts), 4)).astype(np.float32)
    rows = write_latents(folder / "made", texts, latents, rows_per_shard=100).read_text().splitlines()
    (folder / "heldout.jsonl").write_text("\n".join(rows[: len(heldout)]))
    (folder / "train.jsonl").write_text("\n".join(rows[len(heldout) :]))
    paths = {"path": str(folder / "train.jsonl"), "heldout_path": str(folder / "heldout.jsonl")}
    return DataConfig(**paths, latents=str(folder / "made"), vocab_size=300, cache_dir=str(folder / "cache"))


def test_captions_that_are_classes_are_evaluated_evenly_and_against_other_classes(tmp_path: Path) -> None:
    data = prepare_data(of_captions(tmp_path, [name for name in ("red", "green", "blue") for _ in range(8)]))
    assert data.heldout.texts == data.heldout.texts[:3] * 8
    for batch, shuffled in heldout_pairs(data.heldout, 7, 3, 0, 1, torch.device("cpu")):
        pairs = zip(batch["tokens"], shuffled["tokens"], strict=True)
        assert not any(torch.equal(one, other) for one, other in pairs)
    assert notices(EvaluationConfig(samples=24), data) == []
    assert notices(EvaluationConfig(samples=25, shown=24), data) == [
        "--evaluation.samples 25: 24 samples are held out, and all of them are used"
    ]


def test_pairs_of_one_text_are_counted_in_a_notice(tmp_path: Path) -> None:
    data = prepare_data(of_captions(tmp_path, ["red", "red", "green", "red", "red"]))
    (line,) = notices(EvaluationConfig(samples=5, shown=5), data)
    assert line.startswith("shuffled metrics: 3 of 5 samples are paired with the same text")

"""The text recipe's data read from shards: the same samples as in memory, and every bad row by file and place."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from accel_train.checkpoints.run import WeightsAssets
from accel_train.config import UsageError
from accel_train.data.loader import iterate_steps
from accel_train.data.options import LoaderConfig
from accel_train.data.sampler import BatchShard, StepSampler
from accel_train.data.tables.ledger import LEDGER, DataHistory, Span, read_ledger
from accel_train.domains.text.corpus import DEMO_FILE
from accel_train.domains.text.dataset import PreparedData
from accel_train.domains.text.latents import cache as latent_cache
from accel_train.domains.text.prepare import DataConfig, prepare_data
from accel_train.domains.text.shards import corpus as shard_corpus
from accel_train.domains.text.shards.dataset import ShardTextDataset
from tests import zygote
from tests.distributed.launching import environment
from tests.domains.text.test_prepare import same

ROOT = Path(__file__).parents[3]
LINES = DEMO_FILE.read_text().splitlines()[:400]
ROWS: list[Any] = [*LINES[:200], "  ", LINES[3].upper(), *LINES[200:], "one"]


def shards(folder: Path, kind: str = "parquet", rows: list[Any] = ROWS) -> Path:
    folder.mkdir(exist_ok=True)
    for number, start in enumerate(range(0, len(rows), 150)):
        part = rows[start : start + 150]
        file = folder / f"part-{number}.{kind}"
        if kind == "jsonl":
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
        else:
            parquet.write_table(pa.table({"text": pa.array(part, pa.string())}), file, row_group_size=64)
    return folder


def settings(folder: Path, **options: object) -> DataConfig:
    base = DataConfig(
        path=str(folder / "data"),
        cache_dir=str(folder / "cache"),
        vocab_size=400,
        latent_dim=8,
        heldout_fraction=0.1,
        min_words=2,
        max_bad_rows=1,
        read="shards",
    )
    return replace(base, **options)  # type: ignore[arg-type]


def checkpoint(folder: Path) -> WeightsAssets:
    """The assets that a test has saved in `folder`."""
    return WeightsAssets(folder / "assets", resumes=True)


def batches(data: PreparedData, workers: int = 0, start: int = 0, stop: int = 40) -> list[dict[str, torch.Tensor]]:
    order = StepSampler(len(data.train), 16, 7, blocks=data.train.order)
    steps = iterate_steps(
        data.train,
        order,
        BatchShard(0, 1, 8),
        start_step=start,
        max_steps=stop,
        device=torch.device("cpu"),
        config=LoaderConfig(num_workers=workers),
    )
    return [batch for step in steps for batch in step.micro_batches]


def equal(a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]]) -> bool:
    return len(a) == len(b) and all(
        one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
        for one, two in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_shards_give_the_samples_of_memory(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_train.data.tables.formats.LINES_PER_BLOCK", 64)
    shards(tmp_path / "data", kind)
    config = settings(tmp_path, shuffle_blocks=2, cache_mib=1)
    read = prepare_data(config)
    held = prepare_data(replace(config, read="memory", cache_mib=None, cache_dir=str(tmp_path / "other")))
    assert isinstance(read.train, ShardTextDataset)
    assert same(read, held)
    assert list(read.train.texts) == list(held.train.texts) == read.train.texts[:]
    assert read.train.texts[5:9] == held.train.texts[5:9]
    assert read.train.texts[-1] == held.train.texts[-1]
    assert read.tokenizer.to_json() == held.tokenizer.to_json()
    assert torch.equal(read.latent_mean, held.latent_mean)
    assert read.latent_std == held.latent_std
    assert read.heldout.texts == held.heldout.texts
    indices = [7, 0, 300, 7]
    assert equal([read.train.batch(indices)], [held.train.batch(indices)])
    # Rows and their order, through the loader: the training losses are functions of them.
    assert equal(batches(read), batches(held))
    said = " ".join(read.notices)
    assert "1 bad rows left out" in said
    assert "1 short texts left out" in said
    assert "1 repeated texts left out" in said
    (bad,) = (line for line in read.notices if line.startswith("bad row: "))
    assert re.fullmatch(r"bad row: .*part-1\.(parquet, row group 0, row 50|jsonl:51): 'text' is empty", bad)
    assert held.notices[:6] == read.notices[:6]


def test_what_is_split_is_what_a_corpus_in_memory_splits(tmp_path: Path) -> None:
    shards(tmp_path / "data")
    read = prepare_data(settings(tmp_path))
    (tmp_path / "corpus.txt").write_text("\n".join(map(str, ROWS)))
    whole = prepare_data(settings(tmp_path, path=str(tmp_path / "corpus.txt"), read="memory"))
    assert list(read.train.texts) == whole.train.texts  # type: ignore[attr-defined]
    assert read.heldout.texts == whole.heldout.texts
    assert same(read, whole)
    # All rows of a folder of parquet, shuffled among each other as ever.
    held = prepare_data(settings(tmp_path, read="memory"))
    assert held.train.order is None
    assert equal(batches(held), batches(whole))


def test_workers_and_a_resume_read_the_same_batches(tmp_path: Path) -> None:
    shards(tmp_path / "data")
    data = prepare_data(settings(tmp_path, shuffle_blocks=2))
    whole = batches(data)
    assert equal(batches(data, workers=2), whole)
    assert equal(batches(data, start=30), whole[60:])
    copied = pickle.loads(pickle.dumps(data.train))
    assert equal([copied.batch([1, 2])], [data.train.batch([1, 2])])


def test_a_later_start_reads_no_shard_and_changed_files_are_another_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shards(tmp_path / "data")
    first = prepare_data(settings(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(shard_corpus, "_scan_block", None)
        patch.setattr(shard_corpus.ShardTexts, "take", None)
        again = prepare_data(settings(tmp_path))
    assert again.fingerprint == first.fingerprint
    assert prepare_data(settings(tmp_path, shuffle_blocks=3)).fingerprint == first.fingerprint
    (folder / "part-2.parquet").unlink()
    fewer = prepare_data(settings(tmp_path))
    assert len(fewer.train) < len(first.train)
    assert fewer.fingerprint != first.fingerprint


def test_small_partitions_and_limits_choose_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards(tmp_path / "data")
    whole = prepare_data(settings(tmp_path))
    monkeypatch.setattr(shard_corpus, "ROWS_PER_PARTITION", 50)
    parted = prepare_data(settings(tmp_path, cache_dir=str(tmp_path / "parted")))
    assert same(whole, parted)
    monkeypatch.setattr(shard_corpus, "HELDOUT_ROWS", 10)
    monkeypatch.setattr(shard_corpus, "SAMPLE_ROWS", 200)
    few = prepare_data(settings(tmp_path, cache_dir=str(tmp_path / "few")))
    assert few.heldout.texts == whole.heldout.texts[:10]
    assert len(few.train) == len(whole.train)
    assert re.search(r"10 held out of \d\d chosen by the hash; the others are not used", " ".join(few.notices))


@pytest.mark.parametrize("fraction", [0.0, DataConfig.heldout_fraction])
def test_a_held_out_source_of_its_own(fraction: float, tmp_path: Path) -> None:
    shards(tmp_path / "data")
    (tmp_path / "held.txt").write_text("\n".join(LINES[10:40]))
    options = {"heldout_path": str(tmp_path / "held.txt"), "heldout_fraction": fraction}
    read = prepare_data(settings(tmp_path, **options))
    assert sorted(read.heldout.texts) == sorted(LINES[10:40])
    assert not set(read.heldout.texts) & set(read.train.texts)
    assert len(read.train) == 370


def test_a_window_larger_than_the_cache_is_said(tmp_path: Path) -> None:
    rows = [f"{i} {'word ' * 2000}{i}" for i in range(400)]
    shards(tmp_path / "data", rows=rows)
    said = " ".join(prepare_data(settings(tmp_path, cache_mib=1)).notices)
    assert re.search(
        r"shuffle_blocks 16: the blocks of one window take up to \d MiB, but --data.cache_mib keeps 1", said
    )
    assert "cache_mib" not in " ".join(prepare_data(settings(tmp_path, cache_mib=8)).notices)


def train(folder: Path, read: str, steps: int, more: str = "") -> subprocess.CompletedProcess[str]:
    """A few steps of the recipe with a tiny model."""
    words = (
        f"demo --data.path {folder}/data --data.read {read} --data.shuffle_blocks 2 --data.vocab_size 300 "
        f"--data.latent_dim 4 --data.cache_dir {folder}/cache-{read} --data.max_bad_rows 1 --data.heldout_fraction 0.1 "
        f"--model.width 32 --model.heads 2 --model.depth 1 --global_batch_size 16 --micro_batch_size 8 "
        f"--max_steps {steps} --schedule.warmup_steps 2 --evaluation.samples 8 --evaluation.timesteps 1 "
        f"--evaluation.text.steps 2 --log.log_every 1 --output_dir {folder}/run-{read} {more}"
    )
    command = [sys.executable, str(ROOT / "recipes" / "mmdit.py"), *words.split()]
    return zygote.run(command, env=environment())


def losses(folder: Path, read: str) -> list[float]:
    done = train(folder, read, 30)
    assert done.returncode == 0, done.stdout
    lines = [json.loads(line) for line in (folder / f"run-{read}" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "train"]


def test_the_recipe_learns_the_same_from_shards_as_from_memory(tmp_path: Path) -> None:
    shards(tmp_path / "data")
    from_shards = losses(tmp_path, "shards")
    assert len(from_shards) == 30  # more than an epoch
    assert from_shards == losses(tmp_path, "memory")


# ------------------------------------------------------------------------------------------------------ changed data
def test_changed_data_go_on_with_the_scale_of_the_checkpoint_and_the_ledger_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shards(tmp_path / "data")
    first = prepare_data(settings(tmp_path, changed="allow"))
    first.assets.save(tmp_path / "assets")
    history = DataHistory(first.fingerprint, len(first.train))
    history.save(tmp_path / "assets", 0)
    kept = prepare_data(settings(tmp_path, changed="allow"), weights=checkpoint(tmp_path))
    assert kept.fingerprint == first.fingerprint
    assert kept.ledger == (Span(0, first.fingerprint, len(first.train)),)

    (folder / "part-0.parquet").unlink()
    built: list[int] = []
    encode = latent_cache.encode_rows
    monkeypatch.setattr(
        "accel_train.domains.text.shards.dataset.encode_rows",
        lambda texts, *rest: built.append(len(texts)) or encode(texts, *rest),
    )
    changed = prepare_data(settings(tmp_path, changed="allow"), weights=checkpoint(tmp_path))
    assert sum(built) < len(changed.train)  # latents of blocks that are still there come from the cache
    assert changed.ledger == kept.ledger
    assert changed.fingerprint != first.fingerprint
    assert changed.tokenizer.to_json() == first.tokenizer.to_json()
    assert torch.equal(changed.latent_mean, first.latent_mean)
    assert changed.latent_std == first.latent_std
    there = {text: number for number, text in enumerate(first.train.texts)}
    shared = [(there[text], number) for number, text in enumerate(changed.train.texts) if text in there]
    assert len(shared) > 150
    before, after = zip(*shared, strict=True)
    assert equal([first.train.batch(list(before))], [changed.train.batch(list(after))])
    # By default a change is another fingerprint, which a resume refuses.
    assert prepare_data(settings(tmp_path), weights=checkpoint(tmp_path)).fingerprint != first.fingerprint
    (tmp_path / "assets" / LEDGER).unlink()
    said = refusal(lambda: prepare_data(settings(tmp_path, changed="allow"), weights=checkpoint(tmp_path)))
    assert re.search(r"--data\.changed allow: .*ledger\.json cannot be read .*--allow data_fingerprint", said)


@pytest.mark.slow  # of a recipe tests/test_changed_data.py shows it, and of shards the test above the ledger
@pytest.mark.fault("R8", injected="rows changed between starts", outcome="exit 2; --data.changed allow continues")
def test_the_recipe_goes_on_with_changed_data_only_if_allowed(tmp_path: Path) -> None:
    shards(tmp_path / "data")
    assert train(tmp_path, "shards", 4).returncode == 0
    (tmp_path / "data" / "part-0.parquet").unlink()
    refused = train(tmp_path, "shards", 8)
    assert refused.returncode == 2
    assert "data_fingerprint" in refused.stdout
    allowed = train(tmp_path, "shards", 8, "--data.changed allow")
    assert allowed.returncode == 0, allowed.stdout
    ledger = read_ledger(tmp_path / "run-shards" / "checkpoints" / "checkpoint_00000008" / "assets")
    assert [span.from_step for span in ledger] == [0, 4]
    assert ledger[1].samples < ledger[0].samples


# --------------------------------------------------------------------------------------------------------- bad input
def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as refused:
        call()
    return str(refused.value)


def test_bad_rows_are_named_by_file_and_place(tmp_path: Path) -> None:
    shards(tmp_path / "data", rows=[*LINES[:70], None, *LINES[70:200]])
    said = refusal(lambda: prepare_data(settings(tmp_path, max_bad_rows=0)))
    assert re.search(r"part-0\.parquet, row group 1, row 6: 'text' is NoneType, text is required.*max_bad_rows", said)
    folder = shards(tmp_path / "lines", "jsonl", LINES[:150])
    with (folder / "part-0.jsonl").open("a") as file:
        file.write('{"text": \n')
    said = refusal(lambda: prepare_data(settings(tmp_path, path=str(folder), max_bad_rows=0)))
    assert re.search(r"part-0\.jsonl:151: not JSON \(.*one object per line", said)


def test_a_text_that_changed_under_its_file_is_named(tmp_path: Path) -> None:
    folder = shards(tmp_path / "data", "jsonl", LINES)
    data = prepare_data(settings(tmp_path))
    file = folder / "part-1.jsonl"
    stat = file.stat()
    victim = next(text for text in data.train.texts[200:] if text.isascii()).encode()
    assert victim in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(victim, victim[:-1] + bytes([victim[-1] ^ 1])))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    unread = pickle.loads(pickle.dumps(data.train.texts))
    said = refusal(lambda: list(unread))
    assert re.search(r"part-1\.jsonl:\d+: its text has changed .*Its bytes are damaged: copy the file again", said)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"latents": "made", "latent_dim": None}, r"data\.read: shards, data\.latents: made: "),
        ({"read": "memory", "cache_mib": 8}, r"data\.cache_mib: 8: has no effect with data\.read: memory"),
        ({"split": "test"}, r"read in blocks, where data\.latents and splits have no effect"),
        ({"text_column": "txt"}, r"part-0\.parquet has no column 'txt'; it has \['text'\]"),
        ({"path": "demo"}, r"demo.* does not exist"),
        ({"heldout_fraction": 1e-9}, r"at least 1 and 2 are required"),
    ],
)
def test_options_that_shards_cannot_obey_are_refused(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    shards(tmp_path / "data")
    assert re.search(says, refusal(lambda: prepare_data(settings(tmp_path, **options))))

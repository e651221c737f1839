"""Tokens on disk: the same rows as in memory, computed once, and taken up again where a killed process left them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.config import MendedError, UsageError
from accel_train.data.tables import formats, row_blocks
from accel_train.data.tensor_cache import DamagedEntryError, is_intact
from accel_train.domains.language import encoding, prepare, splits
from accel_train.domains.language.prepare import DataConfig, LanguageData
from accel_train.domains.language.tokens import cache as token_cache
from accel_train.domains.language.tokens.shards import TokenDataset
from tests.domains.language import in_memory, tiny

USER = {"role": "user", "content": "Who is there?"}
SHARD_TOKENS = 700
LINES_PER_BLOCK = 16


def found_rows() -> list[dict[str, Any]]:
    """Texts, pairs and chats; some too long, some twice."""
    rows: list[dict[str, Any]] = []
    for number in range(60):
        text = tiny.TEXTS[number % 5]
        rows.append({"text": f"{number} {text}"})
        rows.append({"text": " ".join(tiny.TEXTS * (number % 3))} if number % 3 else {"text": f"{text} again"})
        rows.append({"prompt": f"{number}: Who?", "completion": f" {text}"})
        rows.append({"messages": [USER, {"role": "assistant", "content": f"{text} {number}"}]})
    return rows


def write(folder: Path, kind: str) -> Path:
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir()
    rows = found_rows()
    plain = [row for row in rows if "text" in row]
    for number in range(3):
        part = rows[number::3] if kind == "jsonl" else plain[number::3]
        file = folder / f"{number}.{kind}"
        if kind == "jsonl":
            file.write_text("\n".join(map(json.dumps, part)) + "\n")
        elif kind == "txt":
            file.write_text("\n\n".join(row["text"].replace(". ", ".\n") for row in part))
        elif kind == "parquet":
            parquet.write_table(pa.Table.from_pylist(part), file, row_group_size=LINES_PER_BLOCK)
        else:
            table: Any = pa.Table.from_pylist(part)
            with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=LINES_PER_BLOCK)
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards and blocks so small that there are many of them."""
    monkeypatch.setattr(token_cache, "SHARD_TOKENS", SHARD_TOKENS)
    monkeypatch.setattr(formats, "LINES_PER_BLOCK", LINES_PER_BLOCK)
    monkeypatch.setattr(row_blocks, "BYTES_PER_BLOCK", 1500)


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    tiny.tokenizer(tiny.CHATML).save_pretrained(tmp_path / "tokenizer")
    return DataConfig(
        path=str(write(tmp_path / "rows", "jsonl")), tokenizer=str(tmp_path / "tokenizer"), max_length=48,
        heldout_fraction=0.2, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip


def cached(config: DataConfig) -> LanguageData:
    return prepare.prepare_data(config, tiny.LLAMA)


def assert_equal(found: LanguageData, expected: LanguageData) -> None:
    for ours, other in ((found.train, expected.train), (found.heldout, expected.heldout)):
        assert (len(ours), ours.texts, ours.tokens) == (len(other), other.texts, other.tokens)
        ordered = list(range(len(other)))
        ours_batch, expected_batch = ours.batch(ordered), other.batch(ordered)
        assert ours_batch.keys() == expected_batch.keys()
        assert all(torch.equal(ours_batch[name], expected_batch[name]) for name in expected_batch)
        assert [ours.length(index) for index in ordered] == [other.length(index) for index in ordered]
        for index in range(other.texts):
            assert all(torch.equal(a, b) for a, b in zip(ours.text(index), other.text(index), strict=True))
    assert torch.equal(found.unigram, expected.unigram)
    assert found.fingerprint == expected.fingerprint


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("jsonl", {}),
        ("jsonl", {"packing": False}),
        ("jsonl", {"heldout_path": "held", "heldout_fraction": 0.0}),
        ("jsonl", {"tokenizer": None, "vocab_size": 320, "chat_template": "chat.jinja"}),
        ("parquet", {}),
        ("arrow", {}),
        ("txt", {}),
        ("txt", {"sample_by": "paragraph"}),
        ("txt", {"sample_by": "document", "heldout_path": "held", "heldout_fraction": 0.0}),
    ],
)
def test_rows_are_those_of_the_reader_in_memory(
    kind: str, options: dict[str, Any], config: DataConfig, tmp_path: Path
) -> None:
    """Bit for bit, in many shards, and again when they come from the cache."""
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "x.jsonl").write_text("\n".join(map(json.dumps, found_rows()[:40])))
    (tmp_path / "chat.jinja").write_text(tiny.CHATML)
    options = {name: str(tmp_path / value) if name in ("heldout_path", "chat_template") else value
               for name, value in options.items()}  # fmt: skip
    changed = dataclasses.replace(config, path=str(write(tmp_path / "other", kind)), **options)
    expected = in_memory.prepare_data(changed, tiny.LLAMA, SHARD_TOKENS)
    found = cached(changed)
    assert len(found.train.shards) > 3 or "sample_by" in options
    assert_equal(found, expected)
    assert_equal(cached(changed), expected)


def test_data_of_one_shard_are_packed_as_a_whole(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where everything is packed at once."""
    monkeypatch.setattr(token_cache, "SHARD_TOKENS", 2**22)
    found = cached(config)
    assert len(found.train.shards) == len(found.heldout.shards) == 1
    assert_equal(found, in_memory.prepare_data(config, tiny.LLAMA))


def counted(monkeypatch: pytest.MonkeyPatch, log: Path, die_at: int | None = None, seconds: float = 0) -> None:
    """Write down each block that is encoded, and kill this process at one."""
    encode = token_cache._encode

    def counting(encoder: encoding.BlockEncoder, start: int, number: int) -> encoding.EncodedBlock:
        with log.open("a") as file:
            file.write(f"{start + number}\n")
        if start + number == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(seconds)
        return encode(encoder, start, number)

    monkeypatch.setattr(token_cache, "_encode", counting)


def in_child(config: DataConfig) -> int:
    """Prepare in a process of its own, and return its number."""
    child = os.fork()
    if child == 0:
        try:
            cached(config)
        finally:
            os._exit(0)
    return child


def blocks_of(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()]


@pytest.mark.fault(
    "R4", injected="SIGKILL while tokens are computed", outcome="continues after the last complete shard"
)
def test_a_killed_preparation_loses_a_shard_at_most(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = in_memory.prepare_data(config, tiny.LLAMA, SHARD_TOKENS)
    first, second = tmp_path / "first", tmp_path / "second"
    with monkeypatch.context() as patched:
        counted(patched, first, die_at=9)
        _, status = os.waitpid(in_child(config), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert blocks_of(first) == list(range(10))
    (record,) = (tmp_path / "cache" / "tensors").glob("*/????????????????*.json")
    written = json.loads(record.read_text())["train"]
    assert len(written) > 2
    counted(monkeypatch, second)
    found = cached(config)
    # From the block on in which the last whole shard ends.
    total = len(found.train.shards)
    assert blocks_of(second) == list(range(written[-1]["end"][0], 15))
    assert 9 - written[-1]["end"][0] <= 3
    assert total > len(written)
    assert_equal(found, expected)


def test_one_process_prepares_and_the_others_wait(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    counted(monkeypatch, log, seconds=0.02)
    children = [in_child(config) for _ in range(3)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert blocks_of(log) == list(range(15))
    assert_equal(cached(config), in_memory.prepare_data(config, tiny.LLAMA, SHARD_TOKENS))
    assert len(blocks_of(log)) == 15


@pytest.mark.fault(
    "R8", injected="a bit flipped in cached tokens", outcome="the file is named; the next start computes it again"
)
def test_a_damaged_row_is_named_and_computed_again_by_the_next_start(config: DataConfig) -> None:
    found = cached(config)
    file = found.train.shards[2].file
    content = bytearray(file.read_bytes())
    expected = found.train.batch([len(found.train) - 1])
    places = [index for index in range(len(content)) if content[index : index + 4] == b"\x00\x00\x00\x80"]
    content[places[len(places) // 2] if places else len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    again = cached(config)
    with pytest.raises(DamagedEntryError, match=rf"{file.name}: row \d+ is not what was written. Start the run again"):
        again.train.batch(list(range(len(again.train))))
    mended = cached(config)
    assert_equal(mended, in_memory.prepare_data(config, tiny.LLAMA, SHARD_TOKENS))
    assert torch.equal(mended.train.batch([len(found.train) - 1])["input_ids"], expected["input_ids"])
    file.unlink()
    with pytest.raises(MendedError, match="No such file"):
        cached_rows = TokenDataset(found.train.shards, 48, 0)
        cached_rows.batch(list(range(len(cached_rows))))
    assert_equal(cached(config), in_memory.prepare_data(config, tiny.LLAMA, SHARD_TOKENS))


@pytest.mark.fault(
    "R8", injected="a bit flipped in all cached tokens", outcome="the second start computes all of them again"
)
@pytest.mark.parametrize("place", [-3, 20], ids=["content", "header"])
def test_many_damaged_entries_are_computed_again(config: DataConfig, place: int) -> None:
    found = cached(config)
    root = found.train.shards[0].file.parents[1]
    expected = in_memory.prepare_data(config, tiny.LLAMA, SHARD_TOKENS)
    files = list(root.glob("??/*.safetensors"))
    assert len(files) > 3
    for file in files:
        content = bytearray(file.read_bytes())
        content[place] ^= 1
        file.write_bytes(bytes(content))
    # The counts of targets are read first.
    with contextlib.suppress(MendedError):
        cached(config)
    assert_equal(cached(config), expected)
    assert all(is_intact(file) for file in root.glob("??/*.safetensors"))


def test_a_preparation_continues_from_no_damaged_shard(config: DataConfig) -> None:
    found = cached(config)
    file = found.train.shards[2].file
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(bytes(content))
    # Another entry is deleted, so that nothing has yet been found damaged.
    assert found.heldout is not None
    found.heldout.shards[0].file.unlink()
    assert_equal(cached(config), in_memory.prepare_data(config, tiny.LLAMA, SHARD_TOKENS))


@pytest.mark.parametrize("damage", [b'"tokens"', b'"rows"', b'"I32"', b"data_offsets"])
def test_a_damaged_header_of_a_shard_is_no_traceback(config: DataConfig, damage: bytes) -> None:
    found = cached(config)
    file = found.train.shards[0].file
    content = file.read_bytes()
    file.write_bytes(content.replace(damage, bytes([damage[0], damage[1] ^ 1]) + damage[2:]))
    assert file.read_bytes() != content
    again = TokenDataset(found.train.shards, 48, 0)
    with pytest.raises(MendedError, match=f"{file.name}: .* cannot be read"):
        again.batch([0])


def test_a_worker_reads_the_same_rows(config: DataConfig) -> None:
    data = cached(config)
    copied: TokenDataset = pickle.loads(pickle.dumps(data.train))
    rows = [5, 0, len(copied) - 1]
    assert torch.equal(copied.batch(rows)["input_ids"], data.train.batch(rows)["input_ids"])
    with pytest.raises(IndexError):
        copied[len(copied)]


def test_many_shards_have_few_open_files(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_train.domains.language.tokens.shards.OPEN_FILES", 2)
    data = cached(config)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    data.train.batch(list(range(len(data.train))))
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_the_contents_of_the_files_decide_not_their_names(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = cached(config)
    (tmp_path / "rows").rename(tmp_path / "moved")
    counted(monkeypatch, tmp_path / "log")
    moved = dataclasses.replace(config, path=str(tmp_path / "moved"))
    assert_equal(cached(moved), expected)
    assert not (tmp_path / "log").exists()
    by_glob = dataclasses.replace(config, path=str(tmp_path / "moved" / "*.jsonl"))
    assert cached(by_glob).fingerprint == expected.fingerprint
    (tmp_path / "moved" / "1.jsonl").unlink()
    assert cached(moved).fingerprint != expected.fingerprint
    assert blocks_of(tmp_path / "log")


@pytest.mark.fault("R8", injected="causal_lm: a file removed or added between starts", outcome="each file is named")
def test_files_that_came_or_went_are_named(
    config: DataConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cached(config)
    assert not caplog.messages
    (tmp_path / "rows" / "1.jsonl").rename(tmp_path / "rows" / "3.jsonl")
    cached(config)
    assert [message.split("since the last start, ")[1] for message in caplog.messages] == [
        f"removed: {tmp_path / 'rows' / '1.jsonl'}",
        f"added: {tmp_path / 'rows' / '3.jsonl'}",
    ]


def test_bad_rows_count_over_all_files_and_starts(config: DataConfig, tmp_path: Path) -> None:
    for name in ("0.jsonl", "2.jsonl"):
        with (tmp_path / "rows" / name).open("a") as file:
            file.write("{\n")
    with pytest.raises(UsageError, match=r"2.jsonl:81: not JSON .*\(1 bad rows before it were left out\)"):
        cached(dataclasses.replace(config, max_bad_rows=1))
    for _ in range(2):
        assert "2 bad rows left out" in cached(dataclasses.replace(config, max_bad_rows=2)).notices


def test_bad_rows_are_shown_with_their_places_of_now(config: DataConfig, tmp_path: Path) -> None:
    with (tmp_path / "rows" / "0.jsonl").open("a") as file:
        file.write("{\n" * 4)
    with (tmp_path / "rows" / "2.jsonl").open("a") as file:
        file.write('{"text": 3}\n{"text": 4}\n{"text": 5}\n')
    allowed = dataclasses.replace(config, max_bad_rows=7)

    def shown(data: LanguageData) -> list[str]:
        start = data.notices.index("7 bad rows left out")
        return [line.split(" (")[0] for line in data.notices[start + 1 : start + 7]]

    def expected(folder: Path) -> list[str]:
        places = [f"bad row: {folder}/0.jsonl:{line}: not JSON" for line in (81, 82, 83, 84)]
        return [*places, f"bad row: {folder}/2.jsonl:81: 'text' is int, text is required", "and 2 more bad rows"]

    for _ in range(2):
        assert shown(cached(allowed)) == expected(tmp_path / "rows")
    (tmp_path / "rows").rename(tmp_path / "moved")
    allowed = dataclasses.replace(allowed, path=str(tmp_path / "moved"))
    assert shown(cached(allowed)) == expected(tmp_path / "moved")
    # A record that was written without places.
    for record in (tmp_path / "cache").rglob("*.json"):
        found = json.loads(record.read_text())
        if "blocks" in found:
            del found["faults"]
            record.write_text(json.dumps(found))
    without = cached(allowed).notices
    assert "7 bad rows left out" in without
    assert not [line for line in without if "bad row:" in line or "more bad rows" in line]


def test_a_full_disk_is_named(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("accel_train.store.atomic_files.replace_json", full)
    with pytest.raises(UsageError, match=r"cache .*: No space left on device. Free space"):
        cached(config)


# ------------------------------------------------------------------------------------------------------- bad files
def spoiled(folder: Path) -> Iterator[tuple[str, str]]:
    """Spoil the parquet shards of a folder in turn, and tell what is said of it."""
    import pyarrow as pa
    from pyarrow import parquet

    content = bytearray((folder / "1.parquet").read_bytes())
    whole = bytes(content)
    content[100:200] = bytes(100)
    (folder / "1.parquet").write_bytes(bytes(content))
    yield "damaged", r"1.parquet, row group 0 cannot be read .* copy the file again, or remove it"
    (folder / "1.parquet").write_bytes(whole[:-50])
    yield "cut", r"--data.path: .*1.parquet cannot be read as parquet"
    parquet.write_table(pa.table({"body": ["x"]}), folder / "1.parquet")
    yield "another schema", r"1.parquet, row group 0, row 0: no field 'text'.*set --data.text_column body"
    parquet.write_table(pa.table({"text": [3]}), folder / "1.parquet")
    yield "another type", r"1.parquet, row group 0, row 0: 'text' is int, text is required"


@pytest.mark.fault(
    "R8",
    injected="causal_lm: a row group damaged, a file cut, other columns, other types, 0 rows",
    outcome="the file is named",
)
def test_a_spoiled_shard_is_named_and_one_without_rows_left_out(config: DataConfig, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    folder = write(tmp_path / "spoiled", "parquet")
    changed = dataclasses.replace(config, path=str(folder))
    for name, message in spoiled(folder):
        with pytest.raises(UsageError, match=message):
            cached(changed)
            pytest.fail(name)
    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), folder / "1.parquet")
    assert f"files without rows are left out: {folder / '1.parquet'}" in cached(changed).notices
    for file in folder.iterdir():
        file.unlink()
    with pytest.raises(UsageError, match="is not a source of rows"):
        cached(changed)
    with pytest.raises(UsageError, match=r"matches no file. Give a pattern"):
        cached(dataclasses.replace(config, path=str(folder / "*.parquet")))


@pytest.mark.fault("R8", injected="causal_lm: a file written or removed meanwhile", outcome="the file is named")
def test_a_file_that_is_written_or_removed_meanwhile_is_named(config: DataConfig, tmp_path: Path) -> None:
    source = splits.SplitSources(config, tmp_path / "cache").train
    assert list(source.read(0))
    file = tmp_path / "rows" / "0.jsonl"
    file.write_text("{}")
    with pytest.raises(UsageError, match=r"0.jsonl was written since this start listed it"):
        list(source.read(0))
    file.unlink()
    with pytest.raises(UsageError, match=r"0.jsonl has disappeared since this start listed it"):
        list(source.read(0))

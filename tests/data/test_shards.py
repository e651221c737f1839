"""Shards of a table: the rows of every format, the bounded cache, and each kind of bad file by name and place."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from accel_train.config import UsageError
from accel_train.data.tables import formats
from accel_train.data.tables.sharded_table import ShardedTable
from accel_train.data.tables.shards import index_shards

ROWS = [{"text": f"row {i} " + "ü" * (i % 7), "n": i} for i in range(250)]
OPTION = "--data.path"


def as_parquet(file: Path, rows: list[dict[str, Any]]) -> None:
    parquet.write_table(pa.Table.from_pylist(rows, schema_of(rows)), file, row_group_size=40)


def schema_of(rows: list[dict[str, Any]]) -> Any:
    return pa.schema([("text", pa.string()), ("n", pa.int64())])


def as_arrow(file: Path, rows: list[dict[str, Any]], stream: bool = False) -> None:
    table = pa.Table.from_pylist(rows, schema_of(rows))
    new: Any = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(file), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=40)


def as_stream(file: Path, rows: list[dict[str, Any]]) -> None:
    as_arrow(file, rows, stream=True)


def as_jsonl(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


WRITERS: dict[str, tuple[str, Callable[[Path, list[dict[str, Any]]], None]]] = {
    "parquet": ("parquet", as_parquet),
    "arrow file": ("arrow", as_arrow),
    "arrow stream": ("arrow", as_stream),
    "jsonl": ("jsonl", as_jsonl),
}


def folder_of(folder: Path, kind: str = "parquet", cuts: tuple[int, ...] = (0, 100, 101, 250)) -> Path:
    suffix, write = WRITERS[kind]
    folder.mkdir()
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        write(folder / f"part-{number}.{suffix}", ROWS[start:stop])
    return folder


def table_of(value: Path | str, cache: Path, cache_bytes: int = 2**20, columns: tuple[str, ...] = ("text", "n")) -> Any:
    return ShardedTable(index_shards(OPTION, str(value), cache), columns, cache_bytes)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "LINES_PER_BLOCK", 40)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", WRITERS)
def test_rows_of_every_format_are_those_written(kind: str, tmp_path: Path) -> None:
    table = table_of(folder_of(tmp_path / "data", kind), tmp_path / "cache")
    assert len(table) == 250
    assert [block.rows for block in table.index.blocks] == [40, 40, 20, 1, 40, 40, 40, 29]
    order = [249, 0, 100, 101, 99, 3, 3, 140]
    assert table.take("n", order) == order
    assert table.take("text", order) == [ROWS[i]["text"] for i in order]
    whole = [value for _, block in table.decoded() for value in block.columns["text"].to_pylist()]
    assert whole == [row["text"] for row in ROWS]
    with pytest.raises(IndexError):
        table.place(250)
    other = pickle.loads(pickle.dumps(table))  # as a worker gets it
    assert other.take("n", [7, 200]) == [7, 200]


@pytest.mark.parametrize("piece", [1, 7, 4096])
@pytest.mark.parametrize("end", ["\n", ""])
def test_lines_are_cut_where_they_end_whatever_is_read_at_a_time(
    piece: int, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "PIECE_BYTES", piece)
    monkeypatch.setattr(formats, "LINES_PER_BLOCK", 3)
    monkeypatch.setattr(formats, "BYTES_PER_BLOCK", 60)
    rows = [{"text": "x" * size} for size in (1, 1, 1, 1, 90, 1, 30, 30, 1, 1)]
    file = tmp_path / "a.jsonl"
    file.write_text("\ufeff" + "\n".join(json.dumps(row) for row in rows) + end, "utf-8")
    table = table_of(file, tmp_path / "cache", columns=("text",))
    assert [(block.line, block.rows) for block in table.index.blocks] == [(1, 3), (4, 2), (6, 3), (9, 2)]
    assert table.take("text", range(10)) == [row["text"] for row in rows]
    assert table.place(9) == f"{file}:10"


def test_the_cache_is_bounded_and_keeps_what_was_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(folder_of(tmp_path / "data"), tmp_path / "cache")
    sizes = {number: block.size for number, block in table.decoded()}
    table = table_of(tmp_path / "data", tmp_path / "cache", cache_bytes=sizes[0] + sizes[1] + sizes[2])
    read: list[int] = []
    original = ShardedTable._read
    monkeypatch.setattr(ShardedTable, "_read", lambda self, number: read.append(number) or original(self, number))
    for number in (0, 1, 2, 0, 4, 0, 1):
        table.block(number)
        assert table._decoded.bytes == sum(sizes[kept] for kept in table._decoded._values) <= table.cache_bytes
    assert read == [0, 1, 2, 4, 1]  # 4 drives out 1, which was used longest ago
    alone = table_of(tmp_path / "data", tmp_path / "cache", cache_bytes=1)
    assert alone.take("n", [0, 1, 200]) == [0, 1, 200]
    assert len(alone._decoded) == 1


def test_the_index_is_cached_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "data")
    first = index_shards(OPTION, str(folder), tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(formats, "_index_parquet", None)
        assert index_shards(OPTION, str(folder), tmp_path / "cache") == first
    as_parquet(folder / "part-1.parquet", ROWS[:90])
    assert len(table_of(folder, tmp_path / "cache")) == 100 + 90 + 149


@pytest.mark.fault("R8", injected="shards removed, added, changed between starts", outcome="each file is named")
def test_shards_that_came_went_or_changed_are_named_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(tmp_path / "data")
    for _ in range(2):
        table_of(folder, tmp_path / "cache")
    assert not caplog.messages
    (folder / "part-0.parquet").rename(folder / "part-9.parquet")
    as_parquet(folder / "part-1.parquet", ROWS[:9])
    table_of(folder, tmp_path / "cache")
    said = " ".join(caplog.messages)
    for kind, name in (("removed", 0), ("added", 9), ("written again", 1)):
        assert re.search(rf"since the last start, {kind}: \S*part-{name}\.parquet( |$)", said), said


def test_a_glob_takes_the_files_it_matches(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data")
    (folder / "notes.md").write_text("no shard")
    assert len(table_of(folder, tmp_path / "cache")) == 250
    assert len(table_of(f"{folder}/part-[01].parquet", tmp_path / "cache")) == 101
    assert len(table_of(f"{tmp_path}/**/part-2.parquet", tmp_path / "cache")) == 149


# --------------------------------------------------------------------------------------------------------- bad input
def damaged(file: Path) -> Path:
    """Bytes flipped inside a page of the second row group."""
    column = parquet.ParquetFile(file).metadata.row_group(1).column(0)
    content = bytearray(file.read_bytes())
    start = column.data_page_offset + column.total_compressed_size - 40
    for place in range(start, start + 30):
        content[place] ^= 0xFF
    file.write_bytes(bytes(content))
    return file


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as refused:
        call()
    return str(refused.value)


def test_files_of_a_run_are_no_shards(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    for name in ("run.json", "config.yaml", "metrics.jsonl", "logs/rank_0.log"):
        (tmp_path / "run" / name).write_text("{}\n")
    files = [tmp_path / "a.jsonl"]
    assert list(index_shards(OPTION, f"{tmp_path}/**/*.jsonl", tmp_path / "cache").files) == files
    (tmp_path / "run" / "metrics.jsonl").rename(tmp_path / "metrics.jsonl")
    (tmp_path / ".lock").touch()
    assert list(index_shards(OPTION, str(tmp_path), tmp_path / "cache").files) == files


@pytest.mark.fault("R8", injected="a row group damaged", outcome="file and row group are named")
@pytest.mark.parametrize("checksum", [True, False])
def test_a_damaged_row_group_is_named(checksum: bool, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    parquet.write_table(
        pa.Table.from_pylist(ROWS, schema_of(ROWS)), file, row_group_size=40, compression="zstd",
        write_page_checksum=checksum,
    )  # fmt: skip
    table = table_of(damaged(file), tmp_path / "cache")
    assert table.take("n", [5]) == [5]
    said = refusal(lambda: table.take("text", [41]))
    assert re.search(r"--data\.path: .*a\.parquet, row group 1 cannot be read \(.*damaged: copy the file again", said)


def test_a_cut_file_and_a_text_with_the_name_of_a_table_are_named(tmp_path: Path) -> None:
    as_parquet(tmp_path / "a.parquet", ROWS)
    content = (tmp_path / "a.parquet").read_bytes()
    for cut in (content[:-20], b"", b"hello"):
        (tmp_path / "a.parquet").write_bytes(cut)
        said = refusal(lambda: table_of(tmp_path / "a.parquet", tmp_path / "cache"))
        assert re.search(r"a\.parquet cannot be read as parquet .*copy it again, or remove it", said)
    (tmp_path / "a.arrow").write_bytes(content)
    said = refusal(lambda: table_of(tmp_path / "a.arrow", tmp_path / "cache"))
    assert "a.arrow cannot be read as arrow" in said
    (tmp_path / "a.jsonl").write_text("x\n", "utf-16")
    assert "it is UTF-16" in refusal(lambda: table_of(tmp_path / "a.jsonl", tmp_path / "cache"))


def test_shards_and_blocks_are_counted(tmp_path: Path) -> None:
    for name, said in (("a", "1 jsonl shard in 1 block of lines"), ("b", "2 jsonl shards in 2 blocks of lines")):
        (tmp_path / "lines").mkdir(exist_ok=True)
        (tmp_path / "lines" / f"{name}.jsonl").write_text('{"text": "x"}\n')
        assert index_shards(OPTION, str(tmp_path / "lines"), tmp_path / "cache").notices == (said,)


@pytest.mark.fault("R8", injected="a shard of 0 rows", outcome="skipped, and reported")
def test_shards_without_rows_are_left_out_and_said(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data")
    as_parquet(folder / "part-00.parquet", [])
    table = table_of(folder, tmp_path / "cache")
    assert len(table) == 250
    assert table.index.notices[0] == "4 parquet shards in 8 row groups"
    assert re.search(r"without rows are left out: .*part-00\.parquet", table.index.notices[1])
    (tmp_path / "empty.jsonl").write_text("")
    said = refusal(lambda: table_of(tmp_path / "empty.jsonl", tmp_path / "cache"))
    assert re.search(r"empty\.jsonl contain no rows\. At least 1", said)


@pytest.mark.fault("R8", injected="shards of mixed schemas", outcome="refused; column and file are named")
def test_mixed_schemas_are_refused_by_column_and_file(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data")
    parquet.write_table(pa.table({"text": [1, 2], "n": [1, 2]}), folder / "z.parquet")
    said = refusal(lambda: table_of(folder, tmp_path / "cache"))
    assert re.search(r"column 'text' is int64 in .*z\.parquet, but string in .*part-0\.parquet", said)
    assert table_of(folder, tmp_path / "cache", columns=("n",)).take("n", [251]) == [2]
    parquet.write_table(pa.table({"txt": ["a"], "n": [1]}), folder / "z.parquet")
    said = refusal(lambda: table_of(folder, tmp_path / "cache"))
    assert re.search(r"z\.parquet has no column 'text'; it has \['txt', 'n'\]", said)
    large = pa.table({"text": pa.array(["a"], pa.large_string()), "n": [1]})
    parquet.write_table(large, folder / "z.parquet")
    assert table_of(folder, tmp_path / "cache").take("text", [250]) == ["a"]


def test_what_is_no_shard_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data")
    say = lambda value: refusal(lambda: table_of(value, tmp_path / "cache"))  # noqa: E731
    assert re.search(r"nothing\*\.parquet matches no file\. Give a folder or glob", say(f"{folder}/nothing*.parquet"))
    (tmp_path / "bare").mkdir()
    assert re.search(r"bare holds no such file", say(tmp_path / "bare"))
    assert re.search(r"none\.parquet does not exist", say(tmp_path / "none.parquet"))
    os.mkfifo(tmp_path / "pipe.parquet")
    assert re.search(r"pipe\.parquet is a named pipe", say(tmp_path / "pipe.parquet"))
    (tmp_path / "a.bin").write_text("")
    assert re.search(r"a\.bin is not a shard\. Files ending in \.parquet", say(tmp_path / "a.bin"))
    as_jsonl(folder / "more.jsonl", ROWS[:3])
    assert re.search(r"several formats, 1 jsonl \(more\.jsonl\), 3 parquet \(part-0\.parquet\)", say(folder))
    os.link(folder / "part-0.parquet", folder / "part-0-again.parquet")
    said = say(f"{folder}/*.parquet")
    assert re.search(r"part-0-again\.parquet and .*part-0\.parquet are one file under two names", said)


@pytest.mark.fault("R8", injected="a shard removed or changed during a run", outcome="the file is named")
def test_a_shard_that_goes_or_changes_while_it_is_used_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data")
    table = table_of(folder, tmp_path / "cache")
    as_parquet(folder / "part-2.parquet", ROWS[:9])
    assert "part-2.parquet was written since this start listed it" in refusal(lambda: table.take("n", [200]))
    (folder / "part-2.parquet").unlink()
    assert "part-2.parquet has disappeared since this start" in refusal(lambda: table.take("n", [200]))


def test_lines_that_hold_no_value_are_faults_by_row(tmp_path: Path) -> None:
    lines = [b'{"text": "a"}', b'{"text": ', b"", b"[1]", b'{"txt": 1}', b'{"text": 3}', b'{"text": "\\ud800"}',
             b'{"text": "\xff"}', b'{"text": null}', b'{"text": "z"}', b"[" * 100_000]  # fmt: skip
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    table = table_of(tmp_path / "a.jsonl", tmp_path / "cache", columns=("text",))
    block = table.block(0)
    assert block.columns["text"].to_pylist() == ["a", *[None] * 8, "z", None]
    faults = dict(block.faults)
    assert faults.pop(1).startswith("not JSON (")
    assert faults.pop(10).startswith("not JSON (")
    assert faults == {
        2: "",
        3: "a JSON list, not an object; one object per line is required",
        4: "no field 'text' among ['txt']",
        5: "'text' is int, but str is required, as in the lines around it",
        6: "'text' contains half of a surrogate pair, which is not a character",
        7: "byte 11 of the line is not UTF-8 (iconv -t UTF-8 converts)",
    }
    assert table.place(1) == f"{tmp_path / 'a.jsonl'}:2"

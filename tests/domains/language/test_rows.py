"""Rows of every source, and what is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accel_train.config import UsageError
from accel_train.data.tables.text_sources import BadRows, content_key
from accel_train.domains.language import rows
from accel_train.domains.language.rows import Row

USER = {"role": "user", "content": "Who is there?"}
ANSWER = {"role": "assistant", "content": "Friends."}


def read(path: Path | str, *, bad: int = 0, **named: Any) -> list[Row]:
    options = {"split": "train", "text_column": "text", "sample_by": "line"} | named
    return rows.read_rows(str(path), bad=BadRows(bad), **options)


def write(folder: Path, *found: Any, name: str = "rows.jsonl") -> Path:
    (folder / name).write_text("\n".join(json.dumps(row) for row in found))
    return folder / name


def test_a_row_is_what_its_fields_say(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {"text": " one "},
        {"prompt": "one", "completion": " two"},
        {"messages": [USER, ANSWER], "text": "left out"},
        {"prompt": [USER], "completion": [ANSWER]},
    )
    text, pair, chat, split_chat = read(file)
    assert (text.text, text.place) == ("one", f"{file}:1")
    assert (pair.prompt, pair.completion) == ("one", " two")
    assert (chat.messages, chat.first_trained) == ([USER, ANSWER], 0)
    assert (split_chat.messages, split_chat.first_trained) == ([USER, ANSWER], 1)
    assert split_chat.content == "Who is there?\nFriends."


@pytest.mark.parametrize(
    ("sample_by", "expected"), [("line", ["a", "b", "c"]), ("paragraph", ["a\nb", "c"]), ("document", ["a\nb\n\nc"])]
)
def test_a_text_file_is_read_by_line_paragraph_or_document(sample_by: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("a\nb\n\nc\n")
    assert [row.text for row in read(tmp_path / "x.txt", sample_by=sample_by)] == expected


def test_a_saved_dataset_and_a_table_are_read(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_dict({"body": ["one", "two"], "n": [1, 2]})
    datasets.DatasetDict({"valid": table}).save_to_disk(str(tmp_path / "saved"))
    table.to_parquet(str(tmp_path / "x.parquet"))
    assert [row.text for row in read(tmp_path / "saved", split="valid", text_column="body")] == ["one", "two"]
    assert [row.text for row in read(tmp_path / "x.parquet", text_column="body")] == ["one", "two"]
    with pytest.raises(UsageError, match=r"--data.split 'train': .* has the splits \['valid'\]"):
        read(tmp_path / "saved")
    with pytest.raises(UsageError, match=r"--data.split 'valid' has no effect"):
        read(tmp_path / "x.parquet", split="valid")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"body": "x"},
            "no field 'text', 'messages', or 'prompt' and 'completion' among .*set --data.text_column body",
        ),
        ({"text": 3}, "'text' is int, text is required"),
        ({"text": "  "}, "'text' is empty"),
        ({"prompt": "x", "completion": ""}, "'completion' is empty"),
        ({"prompt": "x", "completion": [ANSWER]}, "two texts or two lists of messages are required"),
        ({"messages": []}, "a list of messages is required"),
        ({"messages": [{"content": "x"}]}, "message 1 is .* an object with 'role' and 'content' is required"),
        ({"messages": [USER]}, "no message has the role 'assistant', so there is nothing to learn"),
        ([1], "a JSON list, not an object"),
    ],
)
def test_an_unusable_row_is_named_or_left_out(row: Any, message: str, tmp_path: Path) -> None:
    file = write(tmp_path, {"text": "good"}, row)
    with pytest.raises(UsageError, match=rf"rows.jsonl:2: .*{message}.*--data.max_bad_rows \(now 0\)"):
        read(file)
    assert [found.text for found in read(file, bad=1)] == ["good"]


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(content: str, tmp_path: Path) -> None:
    for name in ("x.txt", "x.jsonl"):
        (tmp_path / name).write_text(content)
        with pytest.raises(UsageError, match="holds no usable row"):
            read(tmp_path / name)


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing.jsonl does not exist"):
        read(tmp_path / "nothing.jsonl")
    with pytest.raises(UsageError, match="is no source of rows"):
        read(tmp_path)
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read as UTF-8"):
        read(tmp_path / "x.txt")
    (tmp_path / "x.jsonl").write_text("{")
    with pytest.raises(UsageError, match=r"x.jsonl:1: not JSON"):
        read(tmp_path / "x.jsonl")


def test_the_split_of_a_row_depends_on_its_words_alone() -> None:
    made = [Row(str(number), text=f"text number {number}") for number in range(400)]
    train, heldout = rows.split_heldout(made, 0.25)
    assert len(train) + len(heldout) == 400
    assert 60 < len(heldout) < 140
    again = [Row("x", text=f"TEXT, number {number}!") for number in range(200)]
    _, smaller = rows.split_heldout(again, 0.25)
    assert {content_key(row.content) for row in smaller} <= {content_key(row.content) for row in heldout}
    assert len({content_key(row.content) for row in smaller}) == sum(int(row.place) < 200 for row in heldout)

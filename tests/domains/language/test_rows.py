"""Rows of every source, and what is refused with its place."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from accel_train.config import UsageError
from accel_train.data.tables.row_blocks import file_rows
from accel_train.data.tables.text_sources import BadRows
from accel_train.domains.language.rows import forms, sources
from accel_train.domains.language.rows.forms import Row

USER = {"role": "user", "content": "Who is there?"}
ANSWER = {"role": "assistant", "content": "Friends."}
EMPTY = {"role": "assistant", "content": ""}
DEEP = "[" * 100_000


def read(path: Path | str, *, bad: int = 0, **named: Any) -> list[Row]:
    options: dict[str, Any] = {"split": "train", "text_column": "text", "sample_by": "line"} | named
    with tempfile.TemporaryDirectory() as cache:
        source = sources.open_rows(str(path), option="--data.path", cache=Path(cache), **options)
    left_out = BadRows(bad)
    found: list[Row] = []
    for number in range(len(source.rows)):
        for row in forms.parsed(source.read(number), options["text_column"]):
            if isinstance(row, Row):
                found.append(row)
            else:
                left_out.add(*row)
    return found


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


def test_both_forms_of_a_chat_have_their_tools(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "open_gate"}}]
    chat = {"messages": [USER, ANSWER], "tools": tools}
    split_chat = {"prompt": [USER], "completion": [ANSWER], "tools": tools}
    assert [row.tools for row in read(write(tmp_path, chat, split_chat, {"text": "one"}))] == [tools, tools, None]


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


def test_a_table_of_questions_and_answers_is_not_taken_for_texts(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_dict({"prompt": ["one"], "response": ["two"], "n": [1]})
    table.to_parquet(str(tmp_path / "x.parquet"))
    with pytest.raises(UsageError, match=r"; write its 'response' as 'completion'"):
        read(tmp_path / "x.parquet")
    (row,) = read(tmp_path / "x.parquet", text_column="prompt")
    assert row.unread == ("response",)


def test_other_columns_of_a_dataset_are_not_read(tmp_path: Path) -> None:
    """A picture that nobody reads is not decoded, whatever is in its file."""
    import datasets

    def save(name: str, **columns: Any) -> Path:
        (tmp_path / "no.png").write_text("no picture")
        table = datasets.Dataset.from_dict({**columns, "picture": [str(tmp_path / "no.png")]})
        table.cast_column("picture", datasets.Image()).save_to_disk(str(tmp_path / name))
        return tmp_path / name

    assert [row.text for row in read(save("texts", text=["one"]))] == ["one"]
    assert [row.prompt for row in read(save("pairs", prompt=["p"], completion=[" c"]))] == ["p"]
    plain: Any = datasets.Dataset.from_dict({"body": ["one"], "n": [1]})
    plain.save_to_disk(str(tmp_path / "none"))
    with pytest.raises(UsageError, match=r"no field 'text', .* among \['body', 'n'\]; set --data.text_column body"):
        read(tmp_path / "none")


def test_cells_of_csv_are_texts_with_their_line_breaks(tmp_path: Path) -> None:
    """pyarrow reads 1 MiB at a time."""
    texts = [f"{number} begins\n{'and goes on ' * 60}\nto its end" for number in range(3000)]
    quoted = "".join(f'"{text}",{number},,\n' for number, text in enumerate(texts))
    (tmp_path / "x.csv").write_text(f"text,number,prompt,completion\n{quoted}")
    assert (tmp_path / "x.csv").stat().st_size > 2 * 2**20
    assert [row.text for row in read(tmp_path / "x.csv")] == texts
    assert [row.text for row in read(tmp_path / "x.csv", text_column="number")] == [str(n) for n in range(3000)]


def test_a_list_of_json_is_rows(tmp_path: Path) -> None:
    """Named itself or by a glob. In a folder a .json file may be anything."""
    (tmp_path / "x.json").write_text("\ufeff" + json.dumps([{"text": "Stand, ho!"}, {"text": "Friends."}, 3]))
    for path in (tmp_path / "x.json", tmp_path / "*.json"):
        assert [row.text for row in read(path, bad=1)] == ["Stand, ho!", "Friends."]
    with pytest.raises(
        UsageError, match=r"row 2 of .*x.json: a JSON int, not an object; a list of objects is required"
    ):
        read(tmp_path / "x.json")
    write(tmp_path, {"text": "Long live the king!"})
    assert [row.text for row in read(tmp_path)] == ["Long live the king!"]
    for content, says in (
        ('{"data": []}', "contains a JSON dict; a list of objects"),
        ("[1,", "cannot be read as JSON"),
    ):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(UsageError, match=f"x.json {says}"):
            read(tmp_path / "x.json")


def test_an_empty_cell_of_csv_is_an_empty_text(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("text,n\n2024-01-01,1\n,2\n007,3\n")
    assert [row.text for row in read(tmp_path / "x.csv", bad=1)] == ["2024-01-01", "007"]
    with pytest.raises(UsageError, match=r"row 1 of .*x.csv: 'text' is empty"):
        read(tmp_path / "x.csv")


def call(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": arguments}}]}


TOOL = {"type": "function", "function": {"name": "look"}}
OTHER_FORMATS = {
    "parts": (
        {
            "messages": [
                {**USER, "content": [{"type": "text", "text": "Who is "}, {"type": "text", "text": "there?"}]},
                ANSWER,
            ]
        },
        {"messages": [USER, ANSWER]},
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Who is there?"}, {"from": "gpt", "value": "Friends."}]},
        {"messages": [USER, ANSWER]},
    ),
    "conversations": ({"conversations": [USER, ANSWER]}, {"messages": [USER, ANSWER]}),
    "openai": (
        {"messages": [USER, {**call('{"where": "gate", "how": null}'), "content": None}], "tools": json.dumps([TOOL])},
        {"messages": [USER, call({"where": "gate", "how": None})], "tools": [TOOL]},
    ),
    "alpaca": (
        {"instruction": "Who is there?", "input": "", "output": "Friends."},
        {"messages": [USER, ANSWER]},
    ),
    "alpaca with input": (
        {"instruction": "Who is", "input": "there?", "output": "Friends."},
        {"messages": [{"role": "user", "content": "Who is\n\nthere?"}, ANSWER]},
    ),
    "axolotl": (
        {"messages": [USER, {**ANSWER, "train": False}, USER, {**ANSWER, "training": True}]},
        {"messages": [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}]},
    ),
    "axolotl beside a weight": (
        {
            "messages": [
                USER,
                {**ANSWER, "weight": 1, "train": True},
                USER,
                {**ANSWER, "train": False, "training": False},
            ]
        },
        {"messages": [USER, {**ANSWER, "weight": 1}, USER, {**ANSWER, "weight": 0}]},
    ),
    "options": (
        {"messages": [USER, ANSWER], "chat_template_kwargs": '{"enable_thinking": false}'},
        {"messages": [USER, ANSWER], "chat_template_kwargs": {"enable_thinking": False}},
    ),
    "completion": (
        {"prompt": [{"from": "human", "value": "Who is there?"}], "completion": [{"from": "gpt", "value": "Friends."}]},
        {"prompt": [USER], "completion": [ANSWER]},
    ),
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_other_formats_of_chats_are_the_same_rows(name: str) -> None:
    given, expected = OTHER_FORMATS[name]
    (found,) = forms.parsed([("x", given)], "text")
    assert isinstance(found, Row)
    messages = expected.get("messages") or [*expected["prompt"], *expected["completion"]]
    assert (found.messages, found.tools) == (messages, expected.get("tools"))
    assert found.template_options == expected.get("chat_template_kwargs", {})
    assert found.first_trained == len(expected.get("prompt", ()))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"body": "x"},
            "no field 'text', 'messages', or 'prompt' and 'completion' among .*set --data.text_column body",
        ),
        ({"n": 1, "body": "x"}, "set --data.text_column body"),
        ({"texts": "x", "title": "y"}, "set --data.text_column texts"),
        (
            {"question": "a", "answer": "b"},
            "write its 'question' as 'prompt' and its 'answer' as 'completion', which is learned. Correct",
        ),
        ({"prompt": "a", "response": "b", "id": "c"}, "; write its 'response' as 'completion', which is learned"),
        ({"Question": "a", "Answer": "b"}, "; write its 'Question' as 'prompt' and its 'Answer' as 'completion'"),
        ({"question": "a", "answer": 3}, "; its 'answer' is int, and 'question' and 'answer' must be texts"),
        ({"question": "a", "answer": None}, "; its 'answer' is null, and 'question' and 'answer' must be texts"),
        ({"input": 3, "output": 4, "body": "a"}, "; set --data.text_column body"),
        ({"Instruction": "a", "input": "", "Output": "b"}, "; write 'Instruction', 'Output' in lower case"),
        ({"Text": "a"}, "; set --data.text_column Text"),
        ({"frage": "a", "antwort": "b"}, r"of its texts \['antwort', 'frage'\], write the question as 'prompt'"),
        (
            {"conversations": [{"from": "human", "value": "x"}]},
            "no message has the role 'assistant', so there is nothing to learn; its roles are 'user'",
        ),
        ({"conversations": "x"}, "'conversations' is 'x'; a list of messages is required"),
        ({"instruction": "a", "output": 3}, "'output' is int, text is required"),
        ({"instruction": "a", "output": " "}, "'output' is empty"),
        ({"messages": [USER, ANSWER, USER, EMPTY]}, r"message 4 \(assistant\) is empty, so the model would learn"),
        ({"messages": [USER, {**EMPTY, "content": " \n"}]}, r"message 2 \(assistant\) is empty"),
        ({"messages": [USER, {**EMPTY, "tool_calls": []}]}, r"message 2 \(assistant\) is empty"),
        ({"conversations": [USER, {"from": "gpt", "value": ""}]}, r"message 2 \(assistant\) is empty"),
        ({"prompt": [USER], "completion": [EMPTY]}, r"message 2 \(assistant\) is empty"),
        ({"instruction": "a", "input": 3, "output": "b"}, "'input' is int; text is required, which may be empty"),
        (
            {"messages": [USER, ANSWER], "chat_template_kwargs": {"max_length": 4, "truncation": True, "mood": "glad"}},
            r"'chat_template_kwargs' has \['max_length', 'truncation'\], which the tokenizer takes",
        ),
        ({"instruction": "a", "input": "b"}, "no field 'text', 'messages', or 'prompt' and 'completion'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "rows of preferences are not trained on; write the prompt"),
        ({"messages": [USER, {"role": "assistant", "value": "x"}]}, r"message 2 \(assistant\) has no 'content'"),
        ({"messages": [{"role": "user", "content": None}, ANSWER]}, r"message 1 \(user\) has no 'content'"),
        ({"messages": [USER, {**ANSWER, "content": 3}]}, r"message 2 \(assistant\) has int as 'content'"),
        (
            {"messages": [{**USER, "content": [{"type": "text", "text": "x"}, {"type": "image"}]}, ANSWER]},
            r"message 1 \(user\) has parts of \['image', 'text'\]; text, or parts of text, is required",
        ),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, r"message 2 has weight 0.5; 0 \(not learned\) or 1"),
        ({"messages": [USER, {**ANSWER, "train": "no"}]}, "message 2 has 'train': 'no'; true or false, or a weight"),
        (
            {"messages": [USER, {**ANSWER, "training": True, "weight": 0}]},
            "message 2 has 'training': True, and another of 'weight', .* says the opposite; leave one of them out",
        ),
        ({"messages": [USER, {**ANSWER, "train": True, "training": False}]}, "message 2 has 'training': False, and an"),
        ({"messages": [USER, ANSWER], "tools": "look"}, "'tools' is str; a list of JSON schemas"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": [1]}, "'chat_template_kwargs' is list; an object"),
        ({"text": 3}, "'text' is int, text is required"),
        ({"text": "  "}, "'text' is empty"),
        ({"prompt": "x", "completion": ""}, "'completion' is empty"),
        ({"prompt": "x", "completion": [ANSWER]}, "two texts or two lists of messages are required"),
        ({"messages": []}, "a list of messages is required"),
        ({"messages": [{"content": "x"}]}, "message 1 is .* an object with 'role' and 'content' is required"),
        ({"messages": [USER]}, "no message has the role 'assistant', so there is nothing to learn"),
        (
            {"messages": [{"role": "human", "content": "x"}, {"role": "gpt", "content": "y"}]},
            "its roles are 'human', 'gpt', ShareGPT's names: write 'user' and 'assistant', or its 'conversations'",
        ),
        (
            {"messages": [USER, {"role": "Asistant", "content": "y"}]},
            "its roles are 'user', 'Asistant'; write 'assistant' instead of 'Asistant'",
        ),
        ({"messages": [USER, {"role": "x" * 99, "content": "y"}]}, f"its roles are 'user', '{'x' * 40}'[.]"),
        # The escapes of JSON can spell half a pair, as an emoji cut in two.
        ({"text": "\ud83d lone"}, "'text' contains half of a surrogate pair, which is not a character"),
        ({"prompt": "\ud83d", "completion": "x"}, "'prompt' contains half of a surrogate pair"),
        ({"prompt": "x", "completion": "\ud83d"}, "'completion' contains half of a surrogate pair"),
        ({"messages": [USER, {**ANSWER, "content": "\ud83d"}]}, "'messages' contains half of a surrogate pair"),
        (
            {"prompt": [{**USER, "content": "\ud83d"}], "completion": [ANSWER]},
            "'messages' contains half of a surrogate",
        ),
        ({"messages": [USER, ANSWER], "tools": [{"a": {"\ud83d": 1}}]}, "'tools' contains half of a surrogate pair"),
        (
            {"text": None},
            r"null in \['text'\]; text in 'text', or 'messages', or 'prompt' and 'completion', is required",
        ),
        ({"text": None, "n": 1}, r"null in \['text'\]; text in 'text'"),
        ({"prompt": None, "completion": "x"}, r"'prompt' is null, but 'completion' is not; text is required"),
        ({"messages": None}, r"null in \['messages'\]; text in 'text', or 'messages'"),
        ([1], "a JSON list, not an object"),
        ({"conversations": [{"from": ["human"], "value": "x"}, ANSWER]}, "message 1 has list as 'role'; text is"),
        ({"messages": [USER, {**ANSWER, "tool_calls": 5}]}, "message 2 has int as 'tool_calls'; a list of calls"),
        ({"messages": [{**USER, "content": [{"type": ["x"]}]}, ANSWER]}, r"has parts of \[\"\['x'\]\"\]; text"),
        ({"messages": [USER, ANSWER], "tools": DEEP}, "'tools' is str; a list of JSON schemas"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": DEEP}, "'chat_template_kwargs' is str; an object"),
        (
            {"messages": [USER, ANSWER], "chat_template_kwargs": {"x": "\ud83d"}},
            "'chat_template_kwargs' contains half of",
        ),
        ({"messages": [{"role": "\ud83d"}, ANSWER]}, "'messages' contains half of a surrogate pair"),
    ],
)
def test_an_unusable_row_is_named_or_left_out(row: Any, message: str, tmp_path: Path) -> None:
    file = write(tmp_path, {"text": "good"}, row)
    with pytest.raises(UsageError, match=rf"rows.jsonl:2: .*{message}.*--data.max_bad_rows \(now 0\)"):
        read(file)
    assert [found.text for found in read(file, bad=1)] == ["good"]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, {**EMPTY, "weight": 0}, USER, ANSWER]},
        {"prompt": [USER, EMPTY, USER], "completion": [ANSWER]},
        {"messages": [USER, {**EMPTY, "tool_calls": [{"function": {"name": "look"}}]}]},
        {"messages": [USER, {**EMPTY, "reasoning_content": "A ghost?"}]},
        {"messages": [{"role": "system", "content": ""}, {**USER, "content": ""}, ANSWER]},
    ],
    ids=["weight 0", "in the prompt", "a call", "reasoning", "of others"],
)
def test_a_message_that_is_not_learned_may_be_empty(row: dict[str, Any]) -> None:
    (found,) = forms.parsed([("x", row)], "text")
    assert isinstance(found, Row)


def test_the_rows_of_blocks_are_listed_once(tmp_path: Path) -> None:
    """Whoever goes through 20,000 blocks asks for them at each."""
    import datasets

    datasets.Dataset.from_dict({"text": ["x"] * 9}).save_to_disk(str(tmp_path / "saved"))
    paths = (write(tmp_path, {"text": "x"}), tmp_path / "saved")
    given: Any = {"option": "--data.path", "split": "train", "text_column": "text", "sample_by": "line"}
    parts = [sources.open_rows(str(path), cache=tmp_path / "cache", **given) for path in paths]
    for source in (*parts, sources.mixed(parts, (2, 3))):
        assert source.rows is source.rows


@pytest.mark.parametrize("counts", [(2, 3), (0, 2, 0, 0, 1), (1, 0)])
def test_a_block_of_a_mixture_is_that_of_a_source(counts: tuple[int, ...], tmp_path: Path) -> None:
    """Also beside sources without a block."""
    names = [f"{number}.txt" for number in range(sum(counts))]
    for name in names:
        (tmp_path / name).write_text(name)
    left = iter(names)
    parts: list[Any] = []
    for count in counts:
        files = [tmp_path / next(left) for _ in range(count)]
        parts.append(file_rows("--data.path", files, ["text"], "line", lambda file: file.name))
    repeats = range(1, len(counts) + 1)
    found = sources.mixed(parts, repeats)
    read: list[str] = []
    for number in range(len(found.rows)):
        read += [row.content for row in forms.parsed(found.read(number), "text") if isinstance(row, Row)]
    expected: list[str] = []
    for part, times in zip(parts, repeats, strict=True):
        expected += [file.name for file in part.files] * times
    assert read == expected
    assert len({name for number, name in enumerate(read) if not sources.has_come_before(found, number)}) == len(names)


def test_a_row_nested_deeper_than_python_calls_is_bad() -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    (found,) = forms.parsed([("rows.jsonl:1", {"messages": [USER, {**ANSWER, "note": nested}]})], "text")
    assert isinstance(found, forms.Fault)
    assert "nested too deeply" in found.reason


def test_a_named_column_comes_before_the_forms_found_by_themselves(tmp_path: Path) -> None:
    pair = {"prompt": "p", "completion": " c"}
    file = write(tmp_path, {"body": "one"} | pair, {"body": "two", "messages": [USER, ANSWER]}, {"body": None} | pair)
    one, two, other = read(file, text_column="body")
    assert (one.text, two.text, other.prompt) == ("one", "two", "p")
    assert (one.unread, two.unread, other.unread) == (("completion", "prompt"), ("messages",), ())
    assert [row.text for row in read(file)] == [None, None, None]


def test_without_the_named_column_text_is_read_last(tmp_path: Path) -> None:
    """Alpaca's data often have a ready text beside the fields of a row."""
    alpaca = {"instruction": "i", "output": "o"}
    pair = {"prompt": "p", "completion": " c"}
    file = write(tmp_path, {"text": "t"} | alpaca, {"text": "t"} | pair, {"text": "t", "body": None}, {"body": "b"})
    asked, prompted, text, body = read(file, text_column="body")
    assert (len(asked.messages), prompted.prompt, text.text, body.text) == (2, "p", "t", "b")
    assert [row.lacks_column for row in (asked, prompted, text, body)] == [True, True, True, False]
    assert (asked.unread, prompted.unread, text.unread) == (("text",), ("text",), ())
    (unnamed,) = forms.parsed([("1", {"text": "t"} | alpaca)], "text")
    assert isinstance(unnamed, forms.Row)
    assert unnamed.text == "t"
    (fault,) = forms.parsed([("1", {"Text": "a"})], "body")
    assert "set --data.text_column Text (if other rows have 'body', write this one as 'text' instead)" in str(fault)


@pytest.mark.parametrize("kind", ["x.parquet", "saved", "nulls.jsonl"])
def test_what_a_table_fills_with_null_is_no_field(kind: str, tmp_path: Path) -> None:
    import datasets

    call = {**ANSWER, "tool_calls": [{"function": {"name": "look", "arguments": {"at": "door"}}}]}
    other = {**ANSWER, "tool_calls": [{"function": {"name": "wait", "arguments": {"seconds": 3}}}]}
    chats: list[dict[str, Any]] = [
        {"messages": [USER, call], "tools": [{"name": "look", "parameters": {"at": {"type": "string"}}}]},
        {"messages": [USER, other, ANSWER], "tools": [{"name": "wait", "parameters": {"seconds": {"enum": [3]}}}]},
        {"prompt": [USER, call], "completion": [ANSWER]},
    ]
    names = ("messages", "tools", "prompt", "completion")
    table: Any = datasets.Dataset.from_dict({name: [chat.get(name) for chat in chats] for name in names})
    if kind == "saved":
        table.save_to_disk(str(tmp_path / kind))
    elif kind == "x.parquet":
        table.to_parquet(str(tmp_path / kind))
    else:
        write(tmp_path, *table.to_list(), name=kind)
    assert "null" in json.dumps(table.to_list()[0]["messages"]), "else this shows nothing"
    expected = read(write(tmp_path, *chats))
    found = read(tmp_path / kind)
    assert [(row.messages, row.tools) for row in found] == [(row.messages, row.tools) for row in expected]
    assert [row.content for row in found] == [row.content for row in expected]


def test_a_key_given_twice_makes_a_bad_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    chat = '{"messages": [{"role": "user", "role": "assistant", "content": "x"}]}'
    file.write_text('{"text": "good"}\n{"text": "first", "text": "second"}\n' + chat)
    with pytest.raises(UsageError, match=r"rows.jsonl:2: the key 'text' is given twice.*--data.max_bad_rows \(now 0\)"):
        read(file)
    with pytest.raises(UsageError, match=r"rows.jsonl:3: the key 'role' is given twice.*\(1 bad rows before it"):
        read(file, bad=1)
    assert [found.text for found in read(file, bad=2)] == ["good"]


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_has_no_rows(content: str, tmp_path: Path) -> None:
    for name in ("x.txt", "x.jsonl"):
        (tmp_path / name).write_text(content)
        assert read(tmp_path / name) == []


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing.jsonl does not exist"):
        read(tmp_path / "nothing.jsonl")
    with pytest.raises(UsageError, match="is not a source of rows"):
        read(tmp_path)
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"x.txt cannot be read as text \(it is UTF-16, but UTF-8 is required"):
        read(tmp_path / "x.txt")
    (tmp_path / "x.txt").write_bytes(b"a\xff")
    with pytest.raises(UsageError, match=r"x.txt cannot be read as UTF-8"):
        read(tmp_path / "x.txt")
    (tmp_path / "x.jsonl").write_text("{")
    with pytest.raises(UsageError, match=r"x.jsonl:1: not JSON"):
        read(tmp_path / "x.jsonl")

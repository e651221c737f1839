"""Rows of any shape are encoded, or bad rows with a reason: every kind of value at every key."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from accel_train.data.tables.row_blocks import PlacedRow
from accel_train.domains.language.encoding import BlockEncoder
from tests.domains.language import tiny

CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
ASKED = {"role": "user", "content": "Who is there?", "weight": 1}
ANSWER = {"role": "assistant", "content": "Friends.", "weight": 1, "reasoning_content": "Hm.", "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
ROWS: list[dict[str, Any]] = [
    {"messages": [ASKED, ANSWER], "tools": [TOOL], "chat_template_kwargs": {"mood": "grave"}},
    {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}]},
    {"prompt": [ASKED], "completion": [ANSWER]},
    {"prompt": "Who?", "completion": "Me."},
    {"instruction": "Ask.", "input": "them", "output": "Who?"},
    {"text": "Friends."},
]
OF_TRANSFORMERS: list[Any] = [{"return_dict": True}, {"return_tensors": "pt"}, {"tools": []}, {"conversation": 1}]
"""Names that its method takes itself, and does not give to a template."""
VALUES: list[Any] = [
    *(None, True, 0, -1, 1.5, float("nan"), 10**30, "", "x", "\ud83d", "{", "[1]", '{"a": 1}'),
    *([], {}, [1], ["x"], [[]], [{}], {"a": 1}, {"\ud83d": 1}, [{"type": ["text"]}], [{"type": "text", "text": 1}]),
    *("[" * 100_000, '{"a":' * 9_000, "[" * 900 + "]" * 900, {"x": "\ud83d"}, [{"function": {"name": [1]}}]),
    *OF_TRANSFORMERS,
]
WRITES_ALL = "{{ mood }}{{ x }}{{ tools | tojson if tools }}"


def variants(value: Any) -> Iterator[Any]:
    """Yield the value with each of ``VALUES`` in the place of each of its parts, and without each of its keys."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield {name: kept for name, kept in value.items() if name != key}
            for other in (*VALUES, *variants(part)):
                yield {**value, key: other}
    elif isinstance(value, list):
        for place, part in enumerate(value):
            for other in (*VALUES, *variants(part)):
                yield [*value[:place], other, *value[place + 1 :]]


class OneRow:
    """A source of one row."""

    option = "--data.path"
    key = ""
    rows = (1,)

    def __init__(self, row: Any) -> None:
        self.notices: list[str] = []
        self.row = row

    @property
    def names(self) -> list[str]:
        return []

    def schemas(self, column: str) -> Iterator[None]:
        yield None

    def read(self, number: int, /) -> Iterator[PlacedRow]:
        yield "rows.jsonl:1", self.row


@pytest.mark.parametrize("template", [tiny.CHATML, tiny.MARKED, tiny.REASONING], ids=["chatml", "marked", "reasoning"])
def test_a_row_of_any_shape_is_encoded_or_bad(template: str) -> None:
    tokenizer = tiny.tokenizer(template + WRITES_ALL)
    for row in chain.from_iterable(map(variants, ROWS)):
        block = BlockEncoder(OneRow(row), tokenizer, "text", 64, 0.0)(0)
        assert len(block.faults) == 1 - block.counts["train"], row
        # A chat is not shown whole.
        assert all(place == "rows.jsonl:1" and 10 < len(reason) < 1500 for place, reason in block.faults), row

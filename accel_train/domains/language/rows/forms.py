"""Rows of plain text, of prompt and completion, and of chat messages, from files, saved datasets and the Hub.

Every error names its place: file:line, or the row's index in a dataset.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from accel_train.data.tables import hub_datasets
from accel_train.data.tables.formats import KINDS
from accel_train.domains.language.rows import roles
from accel_train.domains.language.rows.remedies import ASKED, TEXT, remedy

FILES = tuple(KINDS)
DEFAULT_COLUMN = TEXT
SHAREGPT = "conversations"
"""ShareGPT's field of messages, which have ``from`` and ``value``. Some data have it with ``role`` and ``content``."""
TRAINED = ("train", "training")
"""Axolotl's names for the weight of a message, which are true or false."""
ALPACA = ("instruction", "input", "output")
"""Alpaca's fields: what the user asks, what it is about, which may be missing or empty, and the answer."""
PAIR = "prompt and completion"
INSTRUCTION = "instruction and output"
ANSWERS_BESIDE = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Fields that make a message an answer even without content."""
FORMS: Mapping[str, Sequence[str]] = {
    # A chat first: such rows often have a plain text of the same chat beside it.
    "messages": ("messages",),
    SHAREGPT: (SHAREGPT,),
    PAIR: ("prompt", "completion"),
    DEFAULT_COLUMN: (DEFAULT_COLUMN,),
    INSTRUCTION: ("instruction", "output"),
}
"""Forms of a row, with the fields that each requires."""
FIELDS = ("messages", SHAREGPT, "prompt", "completion", *ALPACA, "tools", "chat_template_kwargs")
"""Optional fields of a row besides its text."""
READ = tuple(dict.fromkeys([*FIELDS, *chain.from_iterable(ASKED)]))
"""Columns of a table that are read besides the texts: the fields of a row, and names that an error may mention."""
TOKENIZERS_OWN = frozenset(
    "conversation chat_template tools add_generation_prompt continue_final_message tokenize sanitize_control_tokens "
    "padding truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
"""Arguments of transformers' ``apply_chat_template`` that no template sees."""


class Fault(NamedTuple):
    """An unusable row."""

    place: str
    reason: str


@dataclass(frozen=True)
class Row:
    """One row: exactly one of plain text, a pair of prompt and completion, or messages is given."""

    place: str
    """file:line, or the index in a dataset."""
    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    first_trained: int = 0
    """Messages before this one are never trained: the prompt, if prompt and completion are lists of messages."""
    tools: Sequence[Any] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further names for the chat template, such as ``enable_thinking``: the row's ``chat_template_kwargs``."""
    unread: tuple[str, ...] = ()
    """Other forms that the row has but is not read by. With a named text column, the other fields of text."""
    lacks_column: bool = False
    """True if the user named a text column, and the row is read without it."""

    def is_trained(self, number: int) -> bool:
        """Return True if the message is an answer to learn: the assistant's, outside the prompt, its weight not 0."""
        message = self.messages[number]
        return message["role"] == "assistant" and number >= self.first_trained and message.get("weight", 1) != 0

    @property
    def content(self) -> str:
        """All words of the row as one string. The held-out split hashes it, and a tokenizer is trained on it."""
        if self.text is not None:
            return self.text
        if self.prompt is not None:
            return f"{self.prompt}{self.completion}"
        return "\n".join(str(message.get("content") or "") for message in self.messages)


def parsed(found: Iterable[tuple[str, Mapping[str, Any] | str]], text_column: str) -> Iterator[Row | Fault]:
    """Parse pairs of a place and its fields into rows, and yield a fault for an unusable one.

    A row with a ``text_column`` other than the default is that text. Any other is read by the first form that it has
    (``order_of_forms``): a chat in ``messages`` or ShareGPT's ``conversations``, a pair of ``prompt`` and
    ``completion`` (texts or lists of messages), text, or Alpaca's ``instruction`` and ``output``, which are a chat.
    """
    for place, fields in found:
        try:
            row = fields if isinstance(fields, str) else _row(place, fields, text_column)
        # The JSON parser accepts deeper nesting than Python functions can recurse into.
        except RecursionError:
            row = "its values are nested too deeply to be read; flatter ones are required"
        yield Fault(place, row) if isinstance(row, str) else row


def order_of_forms(text_column: str) -> list[str]:
    """Return ``FORMS`` in the order that decides how a row is read which does not have a named text column."""
    if text_column == DEFAULT_COLUMN:
        return list(FORMS)
    # The user wanted another column than 'text', so any other form comes before it.
    return sorted(FORMS, key=lambda form: form == DEFAULT_COLUMN)


def _row(place: str, fields: Mapping[str, Any], text_column: str) -> Row | str:
    """Return the row, or its fault."""
    # Tables fill the columns that a row does not have with None.
    null = [name for name, value in fields.items() if value is None]
    fields = _without_nulls(fields)
    forms = _forms(fields, text_column)
    if not forms:
        return _formless(fields, null, text_column)
    form = forms[0]
    if form == PAIR:
        found = _pair(place, fields["prompt"], fields["completion"], fields)
    elif form == INSTRUCTION:
        found = _alpaca(place, fields)
    elif form in (text_column, DEFAULT_COLUMN):
        found = _plain(place, fields[form], form)
    else:
        found = _chat(place, fields[form], fields, form)
    if isinstance(found, str):
        return found
    unread = _beside(fields, text_column) if form == text_column != DEFAULT_COLUMN else forms[1:]
    return replace(found, unread=tuple(unread), lacks_column=text_column not in (DEFAULT_COLUMN, form))


def _beside(fields: Mapping[str, Any], column: str) -> list[str]:
    """Return the fields besides the ``column`` that could have been meant: texts, and messages."""
    others = fields.keys() - {column}
    return sorted(name for name in others if name in FORMS or (isinstance(fields[name], str) and fields[name].strip()))


def _forms(fields: Mapping[str, Any], text_column: str) -> list[str]:
    """Return the forms that a row has, the one that it is read by first."""
    # Named by the user, so that it comes before the forms found by themselves.
    if text_column != DEFAULT_COLUMN and text_column in fields:
        return [text_column]
    return [form for form in order_of_forms(text_column) if fields.keys() >= {*FORMS[form]}]


def _formless(fields: Mapping[str, Any], null: Sequence[str], text_column: str) -> str:
    """Return the fault of a row without a known form. ``null`` lists its null fields."""
    if text_column in null or (null and not fields):
        return f"null in {null}; text in {text_column!r}, or 'messages', or 'prompt' and 'completion', is required"
    if "completion" in fields and "prompt" in null:
        return "'prompt' is null, but 'completion' is not; text is required, which may be empty, or a list of messages"
    end = _lower_case(fields, text_column) or remedy({**fields, **dict.fromkeys(null)}, text_column)
    return f"no field {text_column!r}, 'messages', or 'prompt' and 'completion' among {sorted(fields)}{end}"


def _lower_case(fields: Mapping[str, Any], text_column: str) -> str:
    """Return the remedy if lower-case names would give the row a form. A text column has its own remedy."""
    forms = _forms({name.lower(): value for name, value in fields.items()}, text_column)
    if not {*forms} - {text_column, DEFAULT_COLUMN}:
        return ""
    others = [name for name in fields if name not in FIELDS and name.lower() in FIELDS]
    return f"; write {', '.join(map(repr, others))} in lower case"


def _without_nulls(value: Any) -> Any:
    """Return a value without the fields that are null, at any depth.

    A table gives each message of a column the fields of all of them, and a template would write the null ones.
    """
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _plain(place: str, text: Any, column: str) -> Row | str:
    return _text_fault(column, text) or Row(place, text=text.strip())


def _chat(place: str, messages: Any, fields: Mapping[str, Any], name: str, first_trained: int = 0) -> Row | str:
    """Return the row of a chat with its tools and template options, or its fault, which calls the chat ``name``."""
    messages = plain_messages(messages)
    tools = parsed_json(fields.get("tools"))
    options = parsed_json(fields.get("chat_template_kwargs", {}))
    fault = _messages_fault(messages, name) or _tools_fault(tools) or _options_fault(options)
    row = Row(place, messages=messages, first_trained=first_trained, tools=tools, template_options=options)
    return fault or _silence_fault(row) or row


def _alpaca(place: str, fields: Mapping[str, Any]) -> Row | str:
    """Return Alpaca's fields as a chat of one answer."""
    asked = fields["instruction"]
    about = fields.get("input", "")
    if not isinstance(about, str):
        return f"'input' is {type(about).__name__}; text is required, which may be empty"
    if about and isinstance(asked, str):
        asked = f"{asked}\n\n{about}"
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": fields["output"]}]
    return _text_fault("output", fields["output"]) or _chat(place, messages, fields, "instruction, input and output")


def _pair(place: str, prompt: Any, completion: Any, fields: Mapping[str, Any]) -> Row | str:
    if isinstance(prompt, str) and isinstance(completion, str):
        # A prompt may be empty, and the space between the two belongs to one of them.
        fault = _text_fault("completion", completion) or _unpaired_fault("prompt", prompt)
        return fault or Row(place, prompt=prompt, completion=completion)
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        return (
            f"'prompt' is {type(prompt).__name__} and 'completion' is {type(completion).__name__}; two texts or two "
            "lists of messages are required"
        )
    return _chat(place, [*prompt, *completion], fields, "messages", len(prompt))


def _text_fault(name: str, text: object) -> str | None:
    if not isinstance(text, str):
        return f"{name!r} is {type(text).__name__}, text is required"
    if not text.strip():
        return f"{name!r} is empty"
    return _unpaired_fault(name, text)


def _unpaired_fault(name: str, value: Any) -> str | None:
    """Return a fault if any text within ``value`` cannot be encoded as UTF-8. No tokenizer takes such a text."""
    try:
        for text in _texts(value):
            text.encode()
    except UnicodeEncodeError:
        return f"{name!r} contains half of a surrogate pair, which is not a character"
    return None


def _texts(value: Any) -> Iterator[str]:
    """Yield every string of a JSON value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield name
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def plain_messages(messages: Any) -> Any:
    """Return messages as chat templates take them. Anything but a list of messages is returned unchanged.

    Text parts are joined, ShareGPT's names replaced and null fields left out. The arguments of tool calls, a JSON
    string in OpenAI's format, become the object that transformers' templates write.
    """
    if not isinstance(messages, (list, tuple)):
        return messages
    return [_plain_message(_without_nulls(message)) for message in messages]


def _plain_message(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    plain = dict(message)
    if "role" not in plain and {"from", "value"} <= set(plain):
        speaker = plain.pop("from")
        role = roles.SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
        plain = {"role": role, "content": plain.pop("value"), **plain}
    for name in TRAINED:
        trained = plain.get(name)
        # One that contradicts the weight stays, and is refused.
        if isinstance(trained, bool) and plain.get("weight", trained) == trained:
            plain["weight"] = int(plain.pop(name))
    content = plain.get("content")
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        plain["content"] = "".join(part["text"] for part in content)
    calls = plain.get("tool_calls")
    if isinstance(calls, list):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _plain_call(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = call["function"]
    if "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": parsed_json(function["arguments"])}}


def parsed_json(value: Any) -> Any:
    """Return the value of a JSON string. Anything else is returned unchanged, as is JSON that is nested too deeply."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _tools_fault(tools: Any) -> str | None:
    if tools is not None and not isinstance(tools, list):
        return f"'tools' is {type(tools).__name__}; a list of JSON schemas, or such a list as JSON, is required"
    return _unpaired_fault("tools", tools)


def _options_fault(options: Any) -> str | None:
    if not isinstance(options, Mapping):
        return f"'chat_template_kwargs' is {type(options).__name__}; an object is required"
    if reserved := sorted(TOKENIZERS_OWN & options.keys()):
        return (
            f"'chat_template_kwargs' has {reserved}, which the tokenizer takes, so the template does not see it; names "
            "that the chat template reads, such as enable_thinking, are required"
        )
    return _unpaired_fault("chat_template_kwargs", options)


def _messages_fault(messages: Any, name: str = "messages") -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"{name!r} is {reprlib.repr(messages)}; a list of messages is required"
    # Checked first, because the faults below quote the messages.
    unpaired = _unpaired_fault(name, messages)
    if unpaired is not None:
        return unpaired
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or "role" not in message:
            return f"message {number} is {reprlib.repr(message)}; an object with 'role' and 'content' is required"
        fault = _content_fault(message)
        if fault is not None:
            return f"message {number} {fault}"
    if not any(message["role"] == roles.LEARNED for message in messages):
        return roles.nothing_learned(messages)
    return None


def _silence_fault(row: Row) -> str | None:
    """Return a fault if an answer to learn is empty: the model would learn to end its turn at once."""
    for number, message in enumerate(row.messages):
        if not row.is_trained(number) or any(message.get(name) for name in ANSWERS_BESIDE):
            continue
        if not message["content"].strip():
            return (
                f"message {number + 1} (assistant) is empty, so the model would learn to say nothing; text or "
                "tool_calls are required, or weight 0, which is read and not learned"
            )
    return None


def _content_fault(message: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a message that has a role, as the rest of a sentence."""
    if not isinstance(message["role"], str):
        return f"has {type(message['role']).__name__} as 'role'; text is required"
    if message.get("weight", 1) not in (0, 1):
        return f"has weight {reprlib.repr(message['weight'])}; 0 (not learned) or 1 is required"
    for name in TRAINED:
        if isinstance(message.get(name), bool):
            return (
                f"has {name!r}: {message[name]}, and another of 'weight', 'train' and 'training' says the opposite; "
                "leave one of them out"
            )
        if name in message:
            return f"has {name!r}: {reprlib.repr(message[name])}; true or false, or a weight instead, is required"
    if not isinstance(message.get("tool_calls", []), list):
        return f"has {type(message['tool_calls']).__name__} as 'tool_calls'; a list of calls is required"
    if "content" not in message:
        # What a template would write as empty, or refuse in words of its own.
        return None if message.get("tool_calls") else f"({message['role']}) has no 'content'; text is required"
    content = message["content"]
    if isinstance(content, list):
        kinds = {str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__ for part in content}
        return f"({message['role']}) has parts of {sorted(kinds)}; text, or parts of text, is required"
    if not isinstance(content, str):
        return f"({message['role']}) has {type(content).__name__} as 'content'; text is required"
    return None


def is_hub_id(path: str) -> bool:
    """Return True for a Hub id, with or without :configuration and @revision, that is not a path here."""
    return hub_datasets.is_hub_id(path, FILES)

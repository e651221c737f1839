"""Turn rows into token ids, and mark those counted by the loss.

Trained are all tokens of plain text, the completion of a pair, and the assistant's or the marked turns of a chat.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

from accel_train.config import UsageError
from accel_train.domains.language.packing import Encoded
from accel_train.domains.language.rows.forms import Row, plain_messages


class UnusableRowError(UsageError):
    """A row that the chat template refuses. It is left out if ``data.max_bad_rows`` allows."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.reason = reason


MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Tag of a template before what the assistant says, in every spelling that transformers accepts."""
TODAY = "strftime_now"
"""Function of templates, as transformers names it."""
DATE = datetime(2024, 7, 26, 12, tzinfo=UTC)
"""Date in training rows whose template writes today's, since tokens must not depend on the day. Llama 3's templates
write this one where they cannot ask for the date."""
CODES = ("%-d", "%-m", *(f"%{letter}" for letter in "aAbBcdDeFhHIjmMpRSTxXyY"))
Span = tuple[int, int]
"""First character, and the one after the last."""
PARTS = ("content", "reasoning_content", "tool_calls", "tools")
"""Parts of a chat that a template may leave out."""
SHORT_CHAT = ({"role": "user", "content": "Who is there?"}, {"role": "assistant", "content": "Friends."})


class EncodedRow(NamedTuple):
    """Tokens of a row, of any length."""

    texts: Sequence[Encoded]
    """One text, or several for a chat (``_answers``)."""
    unwritten: Sequence[str] = ()
    """Those of `PARTS` that the chat has and the template does not write."""


def encode(row: Row, tokenizer: Any) -> EncodedRow:
    """Return the tokens of a row.

    Raises ``UsageError`` for messages without a template, ``UnusableRowError`` for those that it refuses.
    """
    if row.text is not None:
        return EncodedRow(encode_texts([row], tokenizer))
    if row.prompt is not None:
        whole = f"{row.prompt}{row.completion}"
        # The prompt is read, and the completion is learned.
        completion = (len(row.prompt), len(whole))
        ids, trained = _tokenise(tokenizer, whole, [completion], special=True)
        return EncodedRow([_with_end(ids, trained, tokenizer)])
    return _encode_messages(row, tokenizer)


def encode_texts(rows: Sequence[Row], tokenizer: Any) -> list[Encoded]:
    """Return the texts of rows of plain text, tokenised many at a time."""
    if not rows:
        return []
    found = tokenizer([row.text for row in rows])["input_ids"]
    kept = [ids[_second_beginning(ids, tokenizer) :] for ids in found]
    return [_with_end(ids, [True] * len(ids), tokenizer) for ids in kept]


def _second_beginning(ids: Sequence[int], tokenizer: Any) -> int:
    """Return 1 if the text has two begin tokens, else 0: text written by a template may bring its own."""
    begin = tokenizer.bos_token_id
    return int(begin is not None and list(ids[:2]) == [begin, begin])


def encode_prompt(
    prompt: str | Sequence[Mapping[str, Any]],
    tokenizer: Any,
    tools: Sequence[Any] | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the tokens of a text to continue, or of a chat up to where the assistant begins to write.

    A training row begins with the same tokens. ``tools`` and ``template_options`` go to the chat template. Raises
    ``UsageError`` for a text without tokens, messages refused by the template, and options for it with a text.
    """
    if not isinstance(prompt, str):
        return _encode_chat_prompt(prompt, tokenizer, tools, template_options or {})
    if tools or template_options:
        raise UsageError(
            f"tools and chat_template_kwargs are for chat templates, but {prompt[:60]!r} is a text; give messages, or "
            "leave them out"
        )
    found: list[int] = tokenizer(prompt)["input_ids"]
    ids = found[_second_beginning(found, tokenizer) :]
    # Some tokenizers end every text, which this one does not.
    ends = len(ids) > 1 and ids[-1] == tokenizer.eos_token_id
    if ends and not prompt.endswith(tokenizer.eos_token):
        ids.pop()
    if not ids:
        raise UsageError(f"text {prompt[:60]!r}: the tokenizer finds no token in it; give a text to continue")
    return ids


def _encode_chat_prompt(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, tools: Sequence[Any] | None, options: Mapping[str, Any]
) -> list[int]:
    required = 'a list such as [{"role": "user", "content": "Who is there?"}] is required'
    found: Sequence[Any] = messages  # may be the JSON of a command line
    listed = isinstance(found, (list, tuple)) and len(found) > 0
    if not listed or not all(isinstance(message, Mapping) and "role" in message for message in found):
        raise UsageError(f"messages {str(messages)[:100]}: {required}")
    if messages[-1]["role"] == "assistant":
        raise UsageError("messages: the last one is the assistant's, so nothing is left to answer; leave it out")
    if tokenizer.chat_template is None:
        raise UsageError(
            "messages: this model's tokenizer has no chat template to write them with; give a text instead, which a "
            "model of plain text continues"
        )
    try:
        text = tokenizer.apply_chat_template(
            plain_messages(messages), tools=tools, tokenize=False, add_generation_prompt=True, **options
        )
        # Raises for half of a surrogate pair, which no tokenizer takes.
        text.encode()
    except Exception as error:  # a template may raise anything: roles out of order, a field that is missing
        raise UsageError(
            f"messages: the chat template refuses them ({type(error).__name__}: {error}); give messages that it accepts"
        ) from None
    # The template has written the special tokens into the text.
    return _tokenise(tokenizer, text, (), special=False)[0]


def _with_end(ids: Sequence[int], trained: Sequence[bool], tokenizer: Any) -> Encoded:
    """Append the end token of the text. It is learned, or generation would not stop."""
    ids = list(ids)
    trained = list(trained)
    end = tokenizer.eos_token_id
    if end is not None and ids[-1:] != [end]:
        ids.append(end)
        trained.append(True)
    elif end is not None:
        # Some tokenizers end every text themselves, with a token that is in none of the spans.
        trained[-1] = True
    return _without_first(ids, trained)


def _without_first(ids: list[int], trained: list[bool]) -> Encoded:
    """Mark the first token as not trained, since nothing comes before it. A row may have no token at all."""
    return Encoded(ids, [False, *trained[1:]] if trained else [])


def _tokenise(tokenizer: Any, text: str, spans: Sequence[Span], *, special: bool) -> tuple[list[int], list[bool]]:
    """Tokenise the whole text, and mark each token with at least one character in a span.

    Never part by part: a token may cross the border between parts, so the parts alone would have other tokens.
    """
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    # Tokens that the tokenizer adds around a text have the empty range (0, 0).
    trained: list[bool] = []
    for start, end in encoded["offset_mapping"]:
        overlaps = [end > first and start < last for first, last in spans]
        trained.append(any(overlaps))
    ids = list(encoded["input_ids"])
    # A chat keeps exactly what its template writes.
    first = _second_beginning(ids, tokenizer) if special else 0
    return ids[first:], trained[first:]


def _encode_messages(row: Row, tokenizer: Any) -> EncodedRow:
    if tokenizer.chat_template is None:
        raise UsageError(
            f"{row.place} has messages, but the tokenizer has no chat template to write them with. Give "
            "--data.chat_template FILE.jinja, the --data.tokenizer of a chat model, or rows with prompt and completion."
        )
    if MARK.search(_template(row, tokenizer)):
        marked = _without_first(*_marked_by_template(row, tokenizer))
        return EncodedRow([marked], _unwritten(row, [_render(row, tokenizer)]))
    found = _answers(row, tokenizer)
    texts = [_without_first(*_tokenise(tokenizer, text, spans, special=False)) for text, spans in found]
    return EncodedRow(texts, _unwritten(row, [text for text, _ in found]))


def _unwritten(row: Row, texts: Sequence[str]) -> list[str]:
    """Return those of `PARTS` that the row has and none of its ``texts`` shows."""
    wanted: dict[str, list[str]] = {part: [] for part in PARTS}
    wanted["tools"] = _names(row.tools or ())
    for message in row.messages:
        # A template may move the reasoning within the content to another place, or leave it out.
        _, _, content = str(message.get("content") or "").rpartition("</think>")
        wanted["content"].append(content)
        wanted["tool_calls"] += _names(message.get("tool_calls") or ())
    answers = [message for number, message in enumerate(row.messages) if row.is_trained(number)]
    reasoning = [message.get("reasoning_content") for message in answers]
    # Templates leave out the reasoning of earlier answers on purpose.
    wanted["reasoning_content"] = [text for text in reasoning if isinstance(text, str)][-1:]
    return [part for part, found in wanted.items() if not all(_is_within(text, texts) for text in found)]


def _is_within(part: str, texts: Sequence[str]) -> bool:
    return any(part.strip() in text for text in texts)


def _names(calls: Sequence[Any]) -> list[str]:
    """Return the names of functions that are called or offered."""
    inner = [call.get("function", call) for call in calls if isinstance(call, Mapping)]
    return [str(function["name"]) for function in inner if isinstance(function, Mapping) and "name" in function]


def _template(row: Row, tokenizer: Any) -> str:
    """Return the template of a row, with a fixed date: a tokenizer may have one more for chats with tools."""
    try:
        template: str = tokenizer.get_chat_template(tools=row.tools)
    except ValueError as error:  # several, and none is the default
        raise UnusableRowError(row.place, _refusal(error, None)) from None
    if not _asks_for_the_date(template):
        return template
    # A macro in the template hides transformers' function, which no argument can replace.
    replaced = "".join(f'.replace("{code}", "{DATE.strftime(code)}")' for code in CODES)
    # On a line of its own: spaces at the start of the template's first line may mean something.
    return f"{{% macro {TODAY}(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n{template}"


def date_notices(tokenizer: Any) -> list[str]:
    """Return a notice if the chat template writes today's date."""
    if not any(map(_asks_for_the_date, _templates(tokenizer))):
        return []
    return ["the chat template writes today's date: training always uses 2024-07-26, sampling the real date"]


def marks_learned(tokenizer: Any) -> bool:
    """Return True if the chat template marks what is learned. Otherwise the assistant's turns are learned."""
    return any(map(MARK.search, _templates(tokenizer)))


def _templates(tokenizer: Any) -> list[str]:
    found: Any = tokenizer.chat_template or ""
    return list(found.values()) if isinstance(found, Mapping) else [found]


def _asks_for_the_date(template: str) -> bool:
    return TODAY in template


def _marked_by_template(row: Row, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Tokenise a chat by the template's own marks of the assistant's turns. Marks in the prompt do not count."""
    if any(message.get("weight", 1) == 0 for message in row.messages):
        reason = "a message has weight 0, and the chat template marks all answers ({% generation %}); leave weight out"
        raise UnusableRowError(row.place, reason)
    try:
        found = tokenizer.apply_chat_template(
            list(row.messages),
            tools=row.tools,
            chat_template=_template(row, tokenizer),
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
            **row.template_options,
        )
        # Within the try, because a row's template options may make transformers return another form.
        marks = [(mark, end) for mark, (_, end) in zip(found["assistant_masks"], found["offset_mapping"], strict=True)]
    except Exception as error:  # as in `_render`
        raise UnusableRowError(row.place, _refusal(error, None)) from None
    # The marks are on every turn of the assistant, those of the prompt included.
    prompt = _length_of_prompt(row, tokenizer)
    return list(found["input_ids"]), [bool(mark) and end > prompt for mark, end in marks]


def _length_of_prompt(row: Row, tokenizer: Any) -> int:
    """Return how many characters lead up to the end of the prompt's last turn, 0 if no answer is in the prompt."""
    count = row.first_trained
    if not any(message["role"] == "assistant" for message in row.messages[:count]):
        return 0
    prompt = _render(row, tokenizer, count)
    if not _render(row, tokenizer).startswith(prompt):
        raise UnusableRowError(
            row.place,
            "the chat template writes the prompt differently once the completion follows, so where the completion "
            "begins cannot be found. Give one list of messages, of which all answers are learned, or another "
            "--data.chat_template",
        )
    return len(prompt)


def _render(row: Row, tokenizer: Any, count: int | None = None, *, prompt: bool = False) -> str:
    """Return the text of the first ``count`` messages, with ``prompt`` up to where the assistant begins to write."""
    messages: list[Mapping[str, Any]] = list(row.messages[:count])
    template = _template(row, tokenizer)
    try:
        return tokenizer.apply_chat_template(
            messages,
            tools=row.tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=prompt,
            **row.template_options,
        )
    except Exception as error:  # a template may raise anything: roles out of order, a field that is missing
        raise UnusableRowError(row.place, _refusal(error, count)) from None


def _refusal(error: Exception, count: int | None) -> str:
    """Return why the template does not write the first ``count`` messages of a row, None for all of them."""
    if count == 0:
        return (
            "its first message is the assistant's, and the chat template cannot write the beginning of a turn with no "
            "message before it, so what the assistant said cannot be found. Begin the chat with a message of the user, "
            "or mark the assistant's turns in the --data.chat_template with {% generation %}"
        )
    raised = f"{type(error).__name__}: {error}"
    return f"the chat template refuses its messages ({raised}). Another --data.chat_template may accept them"


def _answers(row: Row, tokenizer: Any) -> list[tuple[str, list[Span]]]:
    """Return the texts of a chat, and in each the ranges of characters that the assistant writes.

    An answer is the text of the chat up to its end, minus the prompt for it: what the model will be asked to write. All
    answers are in one text if the template writes a message the same way whatever follows. Some templates do not, such
    as Qwen3's, which leaves out the reasoning of earlier answers. There an answer that changes once others follow ends
    a text of its own.
    """
    whole = _render(row, tokenizer)
    unsaid = _unsaid(tokenizer, str(tokenizer.chat_template))
    texts: list[tuple[str, list[Span]]] = [("", [])]
    for number in range(len(row.messages)):
        if not row.is_trained(number):
            continue
        after = _render(row, tokenizer, number + 1)
        begin = _begin_of_answer(row, tokenizer, number, after)
        # Generation ends at the token that ends an answer, and never writes what the template adds after it.
        behind = unsaid.search(after, begin)
        span = (begin, len(after) if behind is None else behind.start(1))
        text, spans = texts[-1]
        if after.startswith(text):
            texts[-1] = (after, [*spans, span])
        else:
            texts.append((after, [span]))
    text, spans = texts[-1]
    # Includes the messages after the last answer, which are read but not learned.
    if whole.startswith(text):
        texts[-1] = (whole, spans)
    return texts


def _begin_of_answer(row: Row, tokenizer: Any, number: int, text: str) -> int:
    """Return the first character of an answer in ``text``, the chat up to its end: where its prompt ends."""
    prompt = _render(row, tokenizer, number, prompt=True)
    if text.startswith(prompt):
        return len(prompt)
    # An earlier message, such as another answer, may be written differently once this answer follows.
    opening = prompt.removeprefix(_render(row, tokenizer, number))
    head, found, answer = text.rpartition(opening) if opening else ("", "", "")
    content = str(row.messages[number].get("content") or "")
    if found and content.strip() in answer:
        return len(head) + len(found)
    raise UnusableRowError(
        row.place,
        f"the chat template ends the prompt for message {number + 1} with {prompt[-30:]!r}, but writes the chat "
        "differently once the answer follows, so what the assistant said cannot be found. Mark it in the template with "
        "{% generation %} ... {% endgeneration %} and give it as --data.chat_template FILE.jinja",
    )


@lru_cache(maxsize=4)
def _unsaid(tokenizer: Any, template: str) -> re.Pattern[str]:
    """Return a pattern for the token that ends an answer and, as its group, what the ``template`` adds after it.

    It matches nothing if no token ends an answer. Spaces, line breaks and other special tokens are the template's.
    Anything else may be part of an answer.
    """
    ending = end_of_answer(tokenizer)
    if ending is None:
        return re.compile(r"(?!)")
    added = tokenizer.added_tokens_decoder
    others = "|".join(re.escape(token.content) for number, token in added.items() if token.special and number != ending)
    return re.compile(rf"{re.escape(added[ending].content)}((?:\s|{others})+)\Z")


def behind_answer(tokenizer: Any) -> str:
    """Return what the chat template writes after an answer, empty without a template."""
    try:
        text = tokenizer.apply_chat_template(list(SHORT_CHAT), tokenize=False)
    except Exception:  # as in `_render`: a template may want something else of a chat
        return ""
    return text.rpartition(SHORT_CHAT[1]["content"])[2]


def end_of_answer(tokenizer: Any) -> int | None:
    """Return the id of the special token that ends an answer in the chat template, None if there is none."""
    rest = behind_answer(tokenizer)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((token for token in tokenizer(rest, add_special_tokens=False)["input_ids"] if token in special), None)

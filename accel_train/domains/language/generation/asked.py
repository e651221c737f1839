"""Options of ``accel-train sample``, and the JSON in them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

from annotated_types import Interval

from accel_train.config import NonNegativeFloat, PositiveInt, Seed, UsageError, expand_path

Message = Mapping[str, Any]
MESSAGES = '\'[{"role": "user", "content": "Who is there?"}]\''
TopP = Annotated[float, Interval(gt=0, le=1)]


@dataclass(frozen=True)
class LanguageOptions:
    """Continue texts, or answer chats.

    The answer to a prompt depends on the seed alone, not on the other prompts.
    """

    text: tuple[str, ...] = ()
    """Texts to continue."""
    text_file: str | None = None
    """File with a text to continue per line, beside or instead of --text."""
    messages: tuple[str, ...] = ()
    """Chats to answer, each as JSON: '[{"role": "user", "content": "Who is there?"}]', or a file .json of it."""
    tools: str | None = None
    """Tools offered to the chats, as the JSON of rows, or a file .json of it."""
    chat_template_kwargs: str | None = None
    """Further names for the chat template, as JSON: '{"enable_thinking": false}'."""
    max_new_tokens: PositiveInt | None = None
    """Maximum number of tokens per answer. None: 128, or as many as the model has positions left."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature. 0: always the most likely token. None: that of the evaluation in training."""
    top_p: TopP = 1.0
    """Draw from the most likely tokens whose probabilities add up to it."""
    adapters: tuple[str, ...] = ()
    """Further adapters of the same base, each as NAME=PLACE with a run, a checkpoint or an export."""
    adapter: str | None = None
    """Name of the adapter to answer with; base: none. None: that of the model itself, or else the first of
    --adapters."""
    seed: Seed = 0
    """Another seed gives another answer to the same prompt."""
    device: str = "cpu"
    """Device of torch."""
    output: str | None = None
    """File .jsonl to write, with prompt and answer in each line. None: answers are printed."""

    def __post_init__(self) -> None:
        if not (self.text or self.text_file or self.messages):
            raise UsageError(
                f"nothing to continue: give --text 'KING HENRY:', --text_file texts.txt or --messages {MESSAGES}"
            )


def template_options(text: str | None) -> Any:
    """Parse ``chat_template_kwargs`` as a JSON object, None for None. Raises ``UsageError``."""
    return _json("chat_template_kwargs", text, dict)


def tools(given: str | None) -> Any:
    """Return the list of tools given as JSON or as a .json file, None for None. Raises ``UsageError``."""
    return _json("tools", None if given is None else _content("tools", given, "tools"), list)


def _content(option: str, given: str, what: str) -> str:
    """Return the text of an option, or of the .json file that it names."""
    if not given.endswith(".json"):
        return given
    try:
        return expand_path(given).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{option} {given!r} cannot be read ({error}); a file with a list of {what} is required"
        ) from None


def _json(option: str, text: str | None, kind: type) -> Any:
    """Return the parsed value of an option, None for None. Raises ``UsageError`` if it is not a ``kind``."""
    if text is None:
        return None
    value = _parsed(option, text, "correct it")
    if not isinstance(value, kind):
        wanted = "an object" if kind is dict else "a list"
        raise UsageError(f"{option} {text[:60]!r}: {wanted} is required, not {type(value).__name__}")
    return value


def chat(given: str) -> Sequence[Message]:
    """Return the messages given as JSON or as a .json file. Raises ``UsageError``."""
    text = _content("messages", given, "messages")
    messages = _parsed("messages", text, f"give {MESSAGES} or a file .json of it, or a text to continue with --text")
    if not isinstance(messages, list):
        raise UsageError(f"messages {text[:60]!r}: a list of messages is required, as in {MESSAGES}")
    return cast("Sequence[Message]", messages)


def _parsed(option: str, text: str, remedy: str) -> Any:
    try:
        value: Any = json.loads(text)
        # An escape may be half of a surrogate pair, which no tokenizer takes.
        json.dumps(value, ensure_ascii=False).encode()
    # The parser recurses, so a long line of brackets exhausts the stack.
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{option} {text[:60]!r}: not JSON ({error}); {remedy}") from None
    return value

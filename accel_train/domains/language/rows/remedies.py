"""Remedies for rows without a known form, by the names of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_train.wording import nearest

ASKED = (("question", "answer"), ("instruction", "response"), ("prompt", "response"), ("input", "output"))
"""Common names of a prompt and its completion, in any case, that are not a form themselves."""
TEXT = "text"
"""Name of a text that is found without being named."""
FOREIGN = {
    "chosen": "rows of preferences are not trained on; write the prompt and the chosen answer as 'messages', or as "
    "'prompt' and 'completion'",
}
"""Remedy for a row of another format, by a field that it has."""


def remedy(fields: Mapping[str, Any], text_column: str) -> str:
    """Return the remedy as the end of a sentence, empty if the meant form cannot be guessed.

    ``fields`` includes those that are null.
    """
    for name, foreign in FOREIGN.items():
        if name in fields:
            return f"; {foreign}"
    texts = [name for name, value in fields.items() if isinstance(value, str)]
    named = {name.lower(): name for name in fields}
    for prompt, completion in ASKED:
        pair = (named.get(prompt), named.get(completion))
        if None not in pair and not {*texts}.isdisjoint(pair):
            return _remedy_of_pair(fields, *map(str, pair))
    # A name to try, even if it is not similar: most files have one column of text.
    near = nearest(text_column, texts) or (texts[0] if len(texts) == 1 else None)
    # The option names one column for all sources, so another name in it would make the rows of another one unreadable.
    others = "" if text_column == TEXT else f" (if other rows have {text_column!r}, write this one as {TEXT!r} instead)"
    if near is None and texts:
        # Any of them may be the question, and training on it alone is what nobody wants.
        return (
            f"; of its texts {sorted(texts)}, write the question as 'prompt' and the answer as 'completion', or name "
            f"the only one to train on in --data.text_column{others}"
        )
    return f"; set --data.text_column {near}{others}" if near else ""


def _remedy_of_pair(fields: Mapping[str, Any], prompt: str, completion: str) -> str:
    for name in (prompt, completion):
        if not isinstance(fields[name], str):
            kind = "null"
            if fields[name] is not None:
                kind = type(fields[name]).__name__
            return f"; its {name!r} is {kind}, and {prompt!r} and {completion!r} must be texts"
    learned = f"its {completion!r} as 'completion', which is learned"
    if prompt == "prompt":
        return f"; write {learned}"
    return f"; write its {prompt!r} as 'prompt' and {learned}"

"""The words of a command line that a program wrote: those of a cell of a notebook have numbers and paths among them."""

from __future__ import annotations

import numbers
import os
from collections.abc import Sequence

from accel_train.config import UsageError


def words_of(argv: Sequence[object]) -> list[str]:
    """Return the words of a command line that a notebook may have written with numbers and paths among them.

    Raises ``UsageError`` for anything else.
    """
    if isinstance(argv, str):
        raise UsageError(f"{argv!r}: one text, a list of words is required, as in main(['--max_steps', '5'])")
    words: list[str] = []
    for place, word in enumerate(argv):
        if not isinstance(word, (str, numbers.Real, os.PathLike)):
            behind = f" behind {words[-1]}" if words else ""
            raise UsageError(
                f"argument {place + 1}{behind} is {word!r} of type {type(word).__name__}: text, a number, True, False "
                "or a path is required, as in main(['--max_steps', 5])"
            )
        words.append(str(word))
    return words

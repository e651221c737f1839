"""The words of a command line that a program wrote: those of a cell of a notebook have numbers and paths among them."""

from __future__ import annotations

import numbers
import os
from collections.abc import Sequence
from typing import cast

from accel_train.config import UsageError


def words_of(argv: Sequence[object]) -> list[str]:
    """Return the words of a command line that a notebook may have written with numbers and paths among them.

    Raises ``UsageError`` for anything else.
    """
    if isinstance(argv, str):
        raise UsageError(f"{argv!r}: one text, a list of words is required, as in main(['--max_steps', '5'])")
    words: list[str] = []
    for place, given in enumerate(argv):
        word = given
        if isinstance(given, os.PathLike):
            word = os.fspath(cast("os.PathLike[str]", given))
        if not isinstance(word, (str, numbers.Real)):
            before = "".join(f" behind {each}" for each in words[-1:])
            raise UsageError(
                f"argument {place + 1}{before} is {word!r} of type {type(word).__name__}: text, a number, True, False "
                "or a path is required, as in main(['--max_steps', 5])"
            )
        words.append(str(word))
    return words

"""Recipe of the run in this process, and the words that its ``main`` was called with."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

_file: str | None = None
_words: list[str] | None = None


@contextmanager
def calling(file: str | None, words: Sequence[str]) -> Generator[None]:
    """Take ``file`` and ``words`` for those of the run. Used by ``one_run``."""
    global _file, _words
    _file, _words = file, [*words]
    try:
        yield
    finally:
        _file = _words = None


def recipe_file() -> str | None:
    """Return the absolute path of the file with the ``main`` of ``one_run``, else of this process's script.

    None where there is no file: in a cell of a notebook.
    """
    found = _file or getattr(sys.modules.get("__main__"), "__file__", None)
    if found is None or not Path(found).is_file():
        return None
    return found


def command() -> list[str]:
    """Return the command of the run like ``sys.argv``, with the words that ``main`` was called with.

    A notebook or a test has words of its own in ``sys.argv``.
    """
    if _words is None or _words == sys.argv[1:]:
        # As it was typed.
        return sys.argv
    return [recipe_file() or sys.argv[0], *_words]


def file_of(main: Callable[..., object]) -> str | None:
    """Return the absolute path of the file that defines ``main``."""
    code = getattr(inspect.unwrap(main), "__code__", None)
    if code is None:
        return None
    return os.path.abspath(code.co_filename)

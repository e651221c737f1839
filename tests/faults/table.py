"""The table of faults in docs/reliability.md, made of the tests' own markers: ``python -m tests.faults.table``.

``@pytest.mark.fault("F1", injected="...", outcome="...")`` on a test, or on a parameter of one, is a line of it.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: written by python -m tests.faults.table -->", "<!-- end of faults -->"
ROWS = [
    *(f"F{number}" for number in range(1, 60)),
    *(f"R{number}" for number in range(1, 10)),
    *(f"D{number}" for number in range(1, 10)),
    *("I47", "I48", "I52"),
]
"""The matrix of faults, the rows added to it later, and those of pictures and their caches."""

Line = tuple[str, str, str, str]
"""Row, what is injected, what comes of it, the test."""


class _Collector:
    """Takes the markers when pytest has collected, before it would run anything."""

    def __init__(self) -> None:
        self.lines: dict[Line, None] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.lines = dict.fromkeys(lines_of(items))


def lines_of(items: Iterable[pytest.Item]) -> Iterator[Line]:
    """The lines of the tests' markers, with repetitions, in the order of the tests."""
    for item in items:
        name = item.path.relative_to(ROOT).as_posix()
        slow = " (slow)" if item.get_closest_marker("slow") else ""
        for mark in item.iter_markers("fault"):
            test = f"[{item.path.stem.removeprefix('test_')}](../{name}){slow}"
            yield mark.args[0], mark.kwargs["injected"], mark.kwargs["outcome"], test


def collect() -> list[Line]:
    """Every line of the suite, as ``in_order`` has them."""
    files = [str(p) for p in sorted((ROOT / "tests").rglob("test_*.py")) if "fault(" in p.read_text()]
    collector = _Collector()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main(["--collect-only", "-m", "fault", "-p", "no:cacheprovider", *files], plugins=[collector])
    assert code == 0, said.getvalue()
    return in_order(collector.lines)


def in_order(lines: Iterable[Line]) -> list[Line]:
    """Each line once, by row, then in the order of the files."""
    found: dict[tuple[str, str, str], str] = {}
    for row, injected, outcome, test in lines:  # one that has a quick form is not called slow
        found.setdefault((row, injected, outcome), test)
        if not test.endswith("(slow)"):
            found[row, injected, outcome] = test
    return sorted(((*key, test) for key, test in found.items()), key=lambda line: (line[0][0], int(line[0][1:])))


def render(lines: list[Line]) -> str:
    """The part of the page between its two marks."""
    table = ["| Row | Injected | Outcome | Test |", "|---|---|---|---|"]
    table += [f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |" for line in lines]
    return "\n".join([BEGIN, "", *table, "", END])


def renewed(page: str, lines: list[Line]) -> str:
    """The page with these lines."""
    assert page.count(BEGIN) == page.count(END) == 1, PAGE
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: render(lines), page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(), collect()))

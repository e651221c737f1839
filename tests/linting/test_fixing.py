"""Edits of a YAML file: the value alone changes, and the file is read again as meant."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from accel_train.config import UsageError
from accel_train.linting.fixing import fix_file, undo, unused_copy, with_values
from accel_train.options.strict_yaml import parse_yaml
from accel_train.options.tree import flatten

FILE = Path("my.yaml")
TEXT = """\
# What I train, and why
seed: 3   # drawn
optimizer: {lr: 1e-3, betas: [0.99, 0.9]}  # tuned
checkpoints:
  # often
  save_every: 1   # preempted
  pinned:
    - checkpoint_00000100
    - checkpoint_00000200
    # more to come
evaluation:
  text: {steps: 8}

# the end
"""


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("seed", 4, "seed: 4   # drawn"),
        ("optimizer.lr", 0.0005, "optimizer: {lr: 0.0005, betas: [0.99, 0.9]}  # tuned"),
        ("optimizer.lr", None, "optimizer: {lr: null, betas: [0.99, 0.9]}  # tuned"),
        ("optimizer.betas", [0.9, 0.99], "optimizer: {lr: 1e-3, betas: [0.9, 0.99]}  # tuned"),
        ("optimizer.max_grad_norm", 1.0, "optimizer: {max_grad_norm: 1.0, lr: 1e-3, betas: [0.99, 0.9]}  # tuned"),
        ("checkpoints.save_every", 100, "  save_every: 100   # preempted"),
        ("checkpoints.keep_last", 3, "  keep_last: 3"),
        ("evaluation.every", 500, "  every: 500"),
        ("evaluation.text.guidance", 1.5, "  text: {guidance: 1.5, steps: 8}"),
        ("sync", "auto", "sync: auto"),
        ("compile.mode", "on", "compile: {mode: 'on'}"),
        ("a.b.c", True, "a: {b: {c: true}}"),
    ],
)
def test_one_line_changes_or_is_added(option: str, value: object, line: str) -> None:
    edited = with_values(FILE, TEXT, {option: value})
    before, after = TEXT.splitlines(), edited.splitlines()
    assert line in after
    assert line not in before
    assert len(set(before) - set(after)) <= 1
    assert len(after) - len(before) == (0 if set(before) - set(after) else 1)
    expected = flatten(parse_yaml(FILE, TEXT).values) | {option: value}
    assert flatten(parse_yaml(FILE, edited).values) == expected


def test_several_changes_with_the_line_ends_of_windows() -> None:
    text = "a: 1\r\nb:\r\n  c: 2  # two\r\n"
    edited = with_values(FILE, text, {"a": 10, "b.d": 4, "b.c": 3})
    assert edited == "a: 10\r\nb:\r\n  c: 3  # two\r\n  d: 4\r\n"


@pytest.mark.parametrize("text", ["checkpoints:\n", "checkpoints: {save_every: 1}"])
def test_files_without_a_last_line_end_or_a_value(text: str) -> None:
    option = "checkpoints.keep_last" if "{" in text else "checkpoints"
    edited = with_values(FILE, text, {option: 3})
    assert flatten(parse_yaml(FILE, edited).values)[option] == 3


@pytest.mark.parametrize(
    ("text", "option"),
    [(TEXT, "checkpoints.pinned"), ("a: |\n  text\n", "a.b"), ("a: >-\n  text\n# end\nb: 1", "a")],
)
def test_what_an_edit_of_a_line_cannot_change_is_refused(text: str, option: str) -> None:
    with pytest.raises(UsageError, match=rf"my\.yaml: {option} cannot be changed by .* write {option}: 7 by hand"):
        with_values(FILE, text, {option: 7})


def test_a_file_keeps_its_copy_mode_and_mark(tmp_path: Path) -> None:
    file = tmp_path / "my file.yaml"
    file.write_bytes("\ufeffa: 1\n# ende, größer\n".encode())
    file.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(file)
    before = file.read_bytes()
    copy = unused_copy(link)
    assert copy == tmp_path / "my file.yaml.orig"
    difference = fix_file(link, {"a": 2}, copy)
    assert copy.read_bytes() == before
    assert file.read_bytes() == before.replace(b"a: 1", b"a: 2")
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(copy.stat().st_mode) == 0o640
    assert link.is_symlink()
    assert difference.splitlines()[2:] == ["@@ -1,2 +1,2 @@", "-\ufeffa: 1", "+\ufeffa: 2", " # ende, größer"]
    # Another change of the same fix is one to the former file.
    difference = fix_file(link, {"a": 3}, copy)
    assert difference.splitlines()[3:5] == ["-\ufeffa: 1", "+\ufeffa: 3"]
    assert copy.read_bytes() == before
    undo(link, copy)
    assert file.read_bytes() == before
    assert not copy.exists()


def test_the_copies_of_earlier_fixes_stay(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: 1\n")
    for value in (2, 3, 4):
        fix_file(file, {"a": value}, unused_copy(file))
    copies = {path.name: path.read_text() for path in tmp_path.iterdir() if path != file}
    assert copies == {"a.yaml.orig": "a: 1\n", "a.yaml.orig.1": "a: 2\n", "a.yaml.orig.2": "a: 3\n"}

"""The output on the pages is what the programs print today; where it is not, ``python -m tests.transcripts`` says so.

What is short is run again. Of the long runs, the beginning is run again, what follows from presets and code is
computed (learning rate, mode, number of steps), and a hash tells whether the presets are those that were run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from accel_train.compare.report import header
from accel_train.compare.result import Plan
from accel_train.compare.runs import Variant
from accel_train.data.grouping.task_sampler import TaskSampler
from accel_train.domains.pde import operator_learning
from accel_train.domains.text import modes
from accel_train.metrics.progress import short_exponent
from accel_train.options.loading import load_config
from accel_train.options.tree import to_tree
from accel_train.training.schedules import learning_rate_factor
from recipes import mmdit, pde
from tests import transcripts, zygote
from tests.transcripts import PRESETS, SOURCES, Folder, stamp, written

NUMBER = re.compile(r"-?\d[\d.,]*(?:e-?\d+)?")
STEP = re.compile(r"step (\d+)/(\d+)  loss (\S+) \((\w+)\)(?:  \w+ \S+)*?  lr (\S+)  (\S+) samples/s  ETA (\S+)")


def old(source: str) -> str:
    return f"old; write it anew with python -m tests.transcripts --only {source}"


def masked(line: str) -> str:
    """Without numbers, the width of columns and the units of an age, which follow from them, the tensor that a
    difference of rounding makes the largest, and the sign of a gain, which a short run need not have."""
    named = re.sub(r"(largest|first by name): \S+( at \[[^\]]*\])?", r"\1: #", line)
    plain = NUMBER.sub("#", named)
    plain = re.sub(r"less than #% apart|#% more", "#% less", plain)
    return re.sub(r" {2,}", "  ", re.sub(r"# (s|min|h|days?)\b", "# s", plain)).strip()


def test_every_block_stands_on_a_page_once() -> None:
    assert sorted(written()) == sorted(block for source in SOURCES.values() for block in source.blocks)


@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if source.presets])
def test_long_runs_are_those_of_the_presets(name: str) -> None:
    for block in SOURCES[name].blocks:
        assert written()[block].stamp == SOURCES[name].stamp, f"{block}: {old(name)}"


def test_a_changed_preset_changes_the_hash_and_a_comment_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (PRESETS / "demo.yaml").read_text()
    found: list[str] = []
    for content in (text, f"# a comment\n{text}", text.replace("log_every: 20", "log_every: 21")):
        (tmp_path / "demo.yaml").write_text(content)
        monkeypatch.setattr(transcripts, "PRESETS", tmp_path)
        found.append(stamp(["demo"]))
    assert found[0] == found[1] != found[2]


def test_changed_code_changes_the_hash_and_a_comment_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcripts, "ROOT", tmp_path)
    (tmp_path / "accel_train").mkdir()
    found: list[str] = []
    for content in ("a = 1\n", "# why\na = 1\n", "a = 2\n"):
        (tmp_path / "accel_train" / "x.py").write_text(content)
        found.append(stamp(["demo"], ["x.py"]))
    assert found[0] == found[1] != found[2]


def step_lines(block: str) -> Iterator[tuple[int, str, str]]:
    """Step, mode or task, and learning rate of each line, as they are written."""
    for line in written()[block].output():
        if line.startswith("step "):
            found = STEP.fullmatch(line)
            assert found, line
            yield int(found[1]), found[4], found[5]


def test_the_readme_names_the_steps_of_the_demo() -> None:
    steps = load_config(mmdit.Config, ["demo"], presets=PRESETS).config.max_steps or 0
    text = " ".join((transcripts.ROOT / "README.md").read_text().split())
    assert set(re.findall(r"checkpoint_(\d{8})", text)) == {f"{steps:08d}"}
    assert f"--max_steps {2 * steps} --schedule.decay_steps {2 * steps}" in text
    assert f"come down to 0 at step {steps}" in text


def test_log_lines_of_the_demo_follow_from_its_preset() -> None:
    config = load_config(mmdit.Config, ["demo"], presets=PRESETS).config
    lines = list(step_lines("mmdit"))
    assert [step for step, *_ in lines] == logged(config), old("mmdit")
    for step, mode, lr in lines:
        factor = learning_rate_factor(config.schedule, step - 1, config.max_steps or 0)
        expected = modes.mode_of_step(config.modes, config.seed, step - 1), short_exponent(config.optimizer.lr * factor)
        assert (mode, lr) == expected, f"step {step}: {old('mmdit')}"


def test_log_lines_of_the_pde_demo_follow_from_its_preset() -> None:
    config = load_config(pde.Config, ["pde_demo"], presets=PRESETS).config
    order = TaskSampler((1000,) * len(config.data.tasks), config.global_batch_size, config.seed, config.task_weights)
    lines = list(step_lines("pde"))
    assert [step for step, *_ in lines] == logged(config), old("pde")
    for step, task, lr in lines:
        place = operator_learning.place_in_schedule(config.objective, step - 1, config.max_steps or 0)
        rate = config.optimizer.lr * learning_rate_factor(config.schedule, *place)
        assert (task, lr) == (config.data.tasks[order.task_of_step(step - 1)], short_exponent(rate)), old("pde")


def logged(config: Any) -> list[int]:
    """The first three and the last two log points."""
    last, every = config.max_steps, config.log.log_every
    points = [1, *range(every, last, every), last]
    return [*points[:3], *points[-2:]]


def test_the_comparison_names_what_differs_between_its_presets() -> None:
    names = SOURCES["compare"].presets
    trees = [to_tree(load_config(mmdit.Config, [name], presets=PRESETS).config) for name in names]
    variants = [
        Variant(letter, name, name, (), flat(tree)) for letter, name, tree in zip("AB", names, trees, strict=True)
    ]
    today = header(Plan("recipes/mmdit.py", variants, None, 3, 1e-5), Path("/home/me/runs/compare-20260101-000000"))
    page = written()["compare"].output()
    assert [masked(line) for line in page[1 : len(today) + 1]] == [masked(line) for line in today], old("compare")


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"log.log_every": 10}``."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def folder(path: Path) -> Folder:
    return Folder(path, partial(zygote.run, apart=True))


@pytest.mark.slow  # its presets by their hash, its steps, modes and learning rates are compared above
@pytest.mark.distributed
def test_the_demo_begins_and_ends_as_the_page_says(tmp_path: Path) -> None:
    """Its first steps anew, with the whole schedule: the same losses; and a short evaluation: the same words."""
    config = load_config(mmdit.Config, ["demo"], presets=PRESETS).config
    steps, total = config.log.log_every, config.max_steps
    short = f"--max_steps {steps} --schedule.decay_steps {total} --evaluation.samples 4 --evaluation.timesteps 1"
    quick = "--evaluation.shown 1 --evaluation.text.steps 1 --evaluation.latent.steps 1"
    today = transcripts.shortened(folder(tmp_path).run("recipes/mmdit.py", "demo", *short.split(), *quick.split()))
    page = written()["mmdit"].output()
    today_masked, page_masked = ([masked(x) for x in lines if x[:5] not in ("step ", "...")] for lines in (today, page))
    assert page_masked == today_masked, old("mmdit")
    ours, theirs = ([STEP.fullmatch(line) for line in lines if line.startswith("step ")] for lines in (today, page))
    for new, written_line in zip(ours, theirs, strict=False):
        assert new
        assert written_line
        assert (new[1], new[4], new[5]) == (written_line[1], written_line[4], written_line[5]), old("mmdit")
        assert float(new[3]) == pytest.approx(float(written_line[3]), rel=5e-3), old("mmdit")


@pytest.mark.slow  # minutes of commands; that every block stands on a page is a quick test
@pytest.mark.distributed
def test_what_the_commands_print_is_on_the_pages(tmp_path: Path) -> None:
    for name, text in transcripts.commands(folder(tmp_path)).items():
        today, page = ([masked(line) for line in lines.splitlines()] for lines in (text, written()[name].text))
        assert page == today, f"{name}: {old('commands')}"

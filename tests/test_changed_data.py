"""``--data.changed allow``: a run goes on with changed data, and its checkpoints tell what was seen from which step.

Latents with texts are in tests/domains/text/test_shard_dataset.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_train.commands.bundled import find_recipe, import_recipe
from accel_train.config import UsageError
from accel_train.data.tables.ledger import (
    DataHistory,
    Span,
    continued,
    earlier_ledger,
    read_ledger,
    unchanged_ledger,
    write_ledger,
)
from tests.domains.images import tiny_pipelines
from tests.domains.images.test_lora_recipe import pictures, settings
from tests.domains.language import tiny
from tests.domains.pde.data.test_files import VALUES, write

pytestmark = [pytest.mark.usefixtures("fresh"), pytest.mark.filterwarnings("ignore::FutureWarning")]


# -------------------------------------------------------------------------------------------------------------- ledger
def test_the_ledger_forgets_steps_that_are_lost() -> None:
    ledger = [Span(0, "a", 5), Span(10, "b", 6), Span(20, "c", 7)]
    assert continued(ledger, 30, "c", 7) == ledger
    assert continued(ledger, 20, "b", 6) == ledger[:2]
    assert continued(ledger, 15, "a", 5) == [*ledger[:2], Span(15, "a", 5)]
    assert continued([], 0, "a", 5) == [Span(0, "a", 5)]


def test_a_run_keeps_the_fingerprint_of_its_first_data(tmp_path: Path) -> None:
    first = DataHistory("a", 5)
    assert (first.fingerprint, first.notices) == ("a", [])
    first.save(tmp_path / "assets", 0)
    assert earlier_ledger("refuse", tmp_path / "assets") == ()
    assert earlier_ledger("allow", None) == ()
    changed = DataHistory("b", 1234, earlier_ledger("allow", tmp_path / "assets"))
    assert changed.fingerprint == "a"
    assert changed.notices == ["--data.changed allow: 1,234 samples, different data from the 5 of the checkpoint"]
    changed.save(tmp_path / "next", 10)
    ledger = earlier_ledger("allow", tmp_path / "next")
    assert ledger == (Span(0, "a", 5), Span(10, "b", 1234))
    assert DataHistory("b", 1234, ledger).notices == []


def test_a_start_without_changes_keeps_what_was_seen(tmp_path: Path) -> None:
    first, second, third = Span(0, "a", 5), Span(10, "b", 1234), Span(20, "a", 5)
    assert unchanged_ledger("a", tmp_path) == (), "a loop of one's own may write none"
    write_ledger(tmp_path, [first])
    assert unchanged_ledger("a", tmp_path) == (first,)
    # With --allow data_fingerprint: the fingerprint of the run is now theirs.
    assert unchanged_ledger("b", tmp_path) == ()
    write_ledger(tmp_path, [first, second])
    assert unchanged_ledger("b", tmp_path) == ()
    with pytest.raises(UsageError, match=r"refuse: .*from step 10 on .* other data, of 1,234 samples.*allow"):
        unchanged_ledger("a", tmp_path)
    write_ledger(tmp_path, [first, second, third])
    history = DataHistory("a", 5, unchanged_ledger("a", tmp_path))
    assert (history.fingerprint, history.notices) == ("a", [])
    history.save(tmp_path / "next", 30)
    assert read_ledger(tmp_path / "next") == [first, second, third]


# ------------------------------------------------------------------------------------------------------------- recipes
def language(folder: Path) -> tuple[list[str], Callable[[], object]]:
    """Two files of texts, of which the second goes."""
    data = folder / "data"
    data.mkdir()
    for name in "ab":
        lines = [f"{text} {name} {number}" for number in range(12) for text in tiny.TEXTS]
        (data / f"{name}.txt").write_text("\n".join(lines))
    words = (
        f"causal_lm_smoke --data.path {data} --data.vocab_size 320 --data.max_length 32 --data.heldout_fraction 0.2 "
        "--global_batch_size 8 --micro_batch_size 8 --evaluation.samples 2 --evaluation.shown 0"
    )
    return words.split(), (data / "b.txt").unlink


def fields(folder: Path) -> tuple[list[str], Callable[[], object]]:
    """Trajectories of which the last ones are missing at first."""
    (folder / "data").mkdir()
    file = folder / "data" / "heat_train.h5"
    write(file, 6)
    write(folder / "data" / "heat_heldout.h5", 4, 2 * VALUES)
    words = (
        f"pde_demo --data.path {folder / 'data'} --data.tasks heat --data.time_stride 1 --task_weights 1 "
        "--model.patch_2d 2 --model.width 32 --model.heads 2 --model.depth 1 --model.decoder_width 32 "
        "--objective.autoencode_steps 1 --global_batch_size 4 --micro_batch_size 4 --evaluation.samples 2"
    )
    return words.split(), lambda: write(file, 11, 3 * VALUES)


def photos(folder: Path) -> tuple[list[str], Callable[[], object]]:
    """Pictures of which one goes."""
    pytest.importorskip("diffusers")
    pytest.importorskip("peft")
    tiny_pipelines.save("sd1", folder / "base")
    data = pictures(folder / "photos")
    words = [str(settings(folder, "sd1")), "--evaluation.prompts", "a cat", "--evaluation.steps", "1"]
    return words, (data / "7.png").unlink


@pytest.mark.parametrize(
    ("recipe", "start", "kept"),
    [
        ("causal_lm", language, "tokenizer.json"),
        pytest.param("pde", fields, "assets/fields.json", marks=pytest.mark.slow),
        pytest.param("lora", photos, None, marks=pytest.mark.slow),
    ],
    ids=["causal_lm", "pde", "lora"],
)
def test_a_recipe_goes_on_with_changed_data_if_allowed(
    recipe: str, start: Callable[[Path], tuple[list[str], Callable[[], object]]], kept: str | None, tmp_path: Path
) -> None:
    module: Any = import_recipe(find_recipe(recipe))
    words, change = start(tmp_path)
    data = next(folder for folder in (tmp_path / "data", tmp_path / "photos") if folder.is_dir())

    def train(steps: int, *more: str, run: Path = tmp_path / "run") -> Path:
        length = ["--max_steps", str(steps), "--schedule.kind", "constant", "--schedule.warmup_steps", "0"]
        places = ["--output_dir", str(run), "--data.cache_dir", str(tmp_path / "cache")]
        assert module.main([*words, *places, *length, "--log.progress_bar", "off", *more]) == 0
        return run / "checkpoints" / f"checkpoint_{steps:08d}"

    before = train(2)
    # The same data are no change, whether or not one is allowed.
    plain = train(3, "--resume", str(before), run=tmp_path / "plain")
    assert read_ledger(plain / "assets") == read_ledger(before / "assets")
    same = train(3, "--data.changed", "allow")
    assert read_ledger(same / "assets") == read_ledger(before / "assets")
    log = tmp_path / "run" / "logs" / "rank_0.log"
    said = "bit-exact: the same layout as when it was saved"
    assert f"{said}\n" in log.read_text()
    shutil.copytree(data, tmp_path / "first")
    change()
    with pytest.raises(UsageError, match="data_fingerprint"):
        train(4)
    after = train(4, "--data.changed", "allow")
    # As for a change by `--allow`: what follows is not what the run would have done.
    assert f"{said}; from here on with another data_fingerprint\n" in log.read_text()
    first, second = read_ledger(after / "assets")
    assert (first.from_step, second.from_step) == (0, 3)
    assert first.samples != second.samples
    if kept is not None:
        assert (after / kept).read_bytes() == (before / kept).read_bytes()
    # A directory of its own begins with what the checkpoint tells.
    copy = train(4, "--data.changed", "allow", "--resume", str(same), run=tmp_path / "copy")
    assert read_ledger(copy / "assets") == [first, second]
    assert (copy / "model.safetensors").read_bytes() == (after / "model.safetensors").read_bytes()
    # So does one that names the run, for its newest checkpoint.
    newer = train(5, "--data.changed", "allow", "--resume", str(tmp_path / "run"), run=tmp_path / "newer")
    assert read_ledger(newer / "assets") == [first, second]
    # The first data are other ones by now.
    shutil.rmtree(data)
    shutil.copytree(tmp_path / "first", data)
    with pytest.raises(UsageError, match=r"--data\.changed refuse: .*from step 3 on it was trained on other data"):
        train(5)
    back = train(5, "--data.changed", "allow")
    assert read_ledger(back / "assets") == [first, second, first._replace(from_step=4)]
    again = train(6)
    assert read_ledger(again / "assets") == read_ledger(back / "assets")

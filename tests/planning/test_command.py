"""``accel-train plan`` as a person starts it, and the files it writes."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_train.config import UsageError
from accel_train.launch_files.machine_config import read_machine_config
from accel_train.metrics.records import read_metrics
from accel_train.options.loading import Loaded, config_of
from accel_train.options.tree import flatten, to_tree
from accel_train.planning import command, writing
from accel_train.planning.candidates import LAUNCH_FILES, Candidate
from accel_train.planning.flags import Options
from accel_train.planning.simulator import Simulator
from accel_train.planning.writing import LAUNCH, PRESET, paths_in, write
from recipes import mmdit
from tests import zygote
from tests.distributed.launching import PRESETS, RECIPE, ROOT, SMALL, environment
from tests.planning.made_up import made_up
from tests.waiting import PATIENCE_SECONDS

ARGUMENTS = [*SMALL, "--max_steps", "2", "--schedule.warmup_steps", "1", "--evaluation.every", "2"]


def without(words: list[str], flag: str) -> list[str]:
    place = words.index(flag)
    return words[:place] + words[place + 2 :]


CHOSEN = without(ARGUMENTS, "--micro_batch_size")
"""Without the one flag that a plan should choose."""


def plan(*words: str) -> subprocess.CompletedProcess[str]:
    head = [sys.executable, "-m", "accel_train.cli", "plan", "mmdit", "demo", *CHOSEN]
    return zygote.run([*head, *words], env=environment(), timeout=PATIENCE_SECONDS, apart=True)


def train(preset: Path, run: Path) -> int:
    words = [sys.executable, str(RECIPE), str(preset), "--output_dir", str(run)]
    done = zygote.run(words, env=environment(), timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stdout[-4000:]
    return len([record for record in read_metrics(run / "metrics.jsonl") if record["event"] == "train"])


def read(words: list[str]) -> Loaded[Any]:
    loaded = config_of(mmdit.main, words)
    assert loaded is not None
    return loaded


def test_a_plan_is_printed_written_and_trains(tmp_path: Path) -> None:
    files = tmp_path / "planned here"
    done = plan("--gpus", "1", "--vram_gib", "0.65", "--margin_gib", "0", "--write", str(files), "--explain")
    assert done.returncode == 0, done.stderr
    assert "needed" in done.stdout
    assert "step time: give --device NAME" in done.stdout
    assert f"{files / LAUNCH}' {RECIPE} '{files / PRESET}'" in done.stdout
    assert done.stderr.startswith("simulated single, activation_checkpointing.mode none")
    assert train(files / PRESET, tmp_path / "run") == 2
    again = plan("--gpus", "1", "--vram_gib", "0.65", "--write", str(files))
    assert again.returncode == 2
    assert "launch.yaml exists" in again.stderr
    assert "simulated" not in again.stderr, "refused only behind the search"


@pytest.mark.slow  # half a minute; the plan that is printed above has the same figures
def test_json_has_every_figure_with_its_origin() -> None:
    done = plan("--gpus", "2", "--vram_gib", "24", "--device", "rtx-4090", "--goal", "memory", "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    found = printed["plan"]
    assert found["micro_batch_size"] * 2 * found["micro_batches"] == 16
    # Under FSDP2, which gives the blocks other classes.
    assert (found["launch_file"], printed["blocks_of_model"]) == ("fsdp2.yaml", 2)
    for name in (*found["bytes"], *found["rules_gib"], "bytes_in_blocks", "needed_gib", "seconds"):
        assert found["origins"][name], name
    parts = found["seconds"]
    computation = max(parts["products"] + parts["attention"] + parts["moved"], parts["host"])
    assert parts["total"] == pytest.approx(computation + parts["exposed"])


@pytest.mark.slow  # simulations of DeepSpeed's engine; test_choices.py has the message
def test_nothing_fits_ends_with_exit_code_2() -> None:
    # One mode: DeepSpeed's engine, which is tried as well, takes seconds for each simulation.
    done = plan("--gpus", "1", "--vram_gib", "0.6", "--activation_checkpointing.mode", "full")
    assert done.returncode == 2
    assert "nothing fits into 0.57 GiB" in done.stderr
    needed = re.findall(r"(?m)^simulated (.*): ([0-9.]+) GiB, too much$", done.stderr)
    assert len(needed) >= 2
    candidate, least = min(needed, key=lambda found: float(found[1]))
    assert f"the smallest that was found needs {least} GiB (single" in done.stderr
    assert candidate.startswith("single, activation_checkpointing.mode full")


@pytest.mark.parametrize("recipe_flags", [["--precision", "fp16"], ["--optimizer.name", "adamw8bit"]], ids=str)
def test_what_a_simulation_refuses_is_refused(recipe_flags: list[str]) -> None:
    done = plan(*recipe_flags, "--gpus", "1", "--vram_gib", "24")
    assert done.returncode == 2
    assert f"{recipe_flags[0].removeprefix('--')}: {recipe_flags[1]}" in done.stderr


def test_micro_batches_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: dict[str, Any] = {"work": []}
    monkeypatch.setattr(Simulator, "_count", lambda *_: counted)
    with pytest.raises(UsageError, match="different numbers of forwards"):
        Simulator("mmdit", [], 1).count(Candidate("single", "none", 4))


@pytest.mark.parametrize("strategy", list(LAUNCH_FILES))
def test_written_files_are_read_as_they_were_meant(strategy: str, tmp_path: Path) -> None:
    gpus = 1 if strategy == "single" else 4
    loaded = read(["demo", *ARGUMENTS])
    launch, preset = write(str(tmp_path), "accel-train plan 'two\nlines'", Candidate(strategy, "full", 2), gpus, loaded)
    for file in (launch, preset):
        assert file.read_text().startswith("# Written by: accel-train plan 'two\n# lines'\n")
    machine = read_machine_config(launch)
    assert (machine.strategy, machine.num_processes) == (strategy.removesuffix("_offload"), gpus)
    bundled = read_machine_config(PRESETS / LAUNCH_FILES[strategy])
    assert (machine.fsdp, machine.deepspeed) == (bundled.fsdp, bundled.deepspeed)
    written = flatten(to_tree(read([str(preset)]).config))
    expected = flatten(to_tree(loaded.config))
    assert written == expected | {"micro_batch_size": 2, "activation_checkpointing.mode": "full"}
    with pytest.raises(UsageError, match=r"write: .*launch.yaml exists"):
        write(str(tmp_path), "accel-train plan", Candidate(strategy, "full", 2), gpus, loaded)


def test_a_plan_is_printed_if_its_files_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Simulator, "read_config", lambda _: read(["demo", *CHOSEN]))
    monkeypatch.setattr(command, "_reporting", lambda *_: lambda candidate: made_up(candidate, 1))
    monkeypatch.setattr(writing, "replace_file", fail)
    options = Options(gpus=1, vram_gib=80.0, write=str(tmp_path / "planned"))
    with pytest.raises(UsageError, match=r"write: .*planned: cannot be written \(No space left on device\)"):
        command.plan("mmdit", CHOSEN, options)
    assert capsys.readouterr().out == command.plan("mmdit", CHOSEN, replace(options, write=None)) + "\n"


def test_a_place_that_takes_no_files_is_refused_before_the_search(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for place in (file, file / "below"):
        with pytest.raises(UsageError, match=r"write: .*file.* cannot be written into"):
            paths_in(str(place))
    # Permissions say that a superuser may write there.
    for place in ("/proc/x", "/proc"):
        with pytest.raises(UsageError, match=f"write: {place}: cannot be written .*; give another"):
            paths_in(place)
    assert paths_in(str(tmp_path / "a" / "b"))[0] == tmp_path / "a" / "b" / LAUNCH
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "the trial has left something"


# Slow: ten seconds for the imports of a launcher; the files are read and trained from above.
@pytest.mark.slow
def test_accelerate_launch_takes_both_files(tmp_path: Path) -> None:
    loaded = read(["demo", *ARGUMENTS])
    launch, preset = write(str(tmp_path), "accel-train plan", Candidate("single", "full", 4), 1, loaded)
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(launch)]
    done = subprocess.run(
        [*words, str(RECIPE), str(preset), "--output_dir", str(tmp_path / "run")],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    steps = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["event"] == "train"]
    assert len(steps) == 2


@pytest.mark.slow  # twenty seconds of simulation for three options that are written as they are given
def test_compiled_blocks_are_planned_without_and_written_with_their_own_value(tmp_path: Path) -> None:
    files = tmp_path / "planned"
    # A start refuses the further options of compile with mode off, as which it is simulated.
    compiled = ["--compile.mode", "auto", "--compile.dynamic=true", "--compile.recompile_budget", "4"]
    done = plan(*compiled, "--gpus", "1", "--vram_gib", "24", "--write", str(files))
    assert done.returncode == 0, done.stderr
    assert re.search(r"(?m)^compile.mode +auto +unchanged: simulated as off", done.stdout)
    written = read([str(files / PRESET)]).config.compile
    assert (written.mode, written.dynamic, written.recompile_budget) == ("auto", True, 4)


def test_the_printed_start_holds_for_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("a text\n" * 64)
    monkeypatch.setattr(command, "_reporting", lambda *_: lambda candidate: made_up(candidate, 1))
    words = ["demo", *CHOSEN, "--output_dir", str(tmp_path / "run")]
    for given, beginning in (
        ([], "accelerate launch"),
        (["--data.path", "my.txt"], f"cd {tmp_path} && accelerate launch"),
        (["--data.path", str(tmp_path / "my.txt")], "accelerate launch"),
        (["--output_dir", "here"], f"cd {tmp_path} && accelerate launch"),
    ):
        loaded = read([*words, *given])
        monkeypatch.setattr(Simulator, "read_config", lambda _, found=loaded: found)
        options = Options(gpus=1, vram_gib=80.0, write=str(tmp_path / f"planned{len(list(tmp_path.iterdir()))}"))
        text = command.plan("mmdit", [*words, *given], options)
        assert text.splitlines()[-1].startswith(f"  {beginning}"), given

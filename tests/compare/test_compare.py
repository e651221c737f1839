"""``accel-train compare``: real subprocesses of a tiny recipe, statistics against references, gates, refusals."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats

from accel_train import cli
from accel_train.compare import figures, picture
from accel_train.compare import runs as compare_runs
from accel_train.compare.comparison import decide_gates, read_variants, single_options
from accel_train.compare.request import Request
from accel_train.compare.runs import Run, RunFailedError, read_config, read_run
from accel_train.config import UsageError
from accel_train.metrics.bootstrap import LEVEL, Estimate, coverage_of_range, estimate
from accel_train.metrics.gates import COMPARED, SIGNS, decide, gate_values, read_gate
from accel_train.metrics.throughput import Throughput
from accel_train.options.strict_yaml import read_yaml
from accel_train.options.tree import flatten
from tests import zygote
from tests.waiting import PATIENCE_SECONDS, until

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "recipes" / "presets"

RECIPE = '''
from __future__ import annotations

import os, sys, time
from dataclasses import dataclass, field
from pathlib import Path

from accel_train.config import UsageError, expand_path
from accel_train.options.loading import load_config
from accel_train.runtime.exiting import run_main
from accel_train.metrics.gates import refuse_unknown_gates
from accel_train.metrics.records import LineWriter, write_json


@dataclass(frozen=True)
class Data:
    """Data."""

    length: int = 8
    cache: str | None = None


@dataclass(frozen=True)
class Hub:
    """Hub."""

    repo_id: str | None = None


@dataclass(frozen=True)
class Profile:
    """Profile."""

    steps: str | None = None


@dataclass(frozen=True)
class Config:
    """Steps whose time and loss are known; round N takes N % longer in both."""

    output_dir: str = "runs/tiny"
    seed: int = 0
    global_batch_size: int = 8
    real_batch_size: int = 8
    max_steps: int | None = 20
    max_epochs: float | None = None
    step_seconds: float = 0.1
    log_every: int = 1
    shift: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    ends: str = "well"
    declares: tuple[str, ...] = ()
    data: Data = field(default_factory=Data)
    hub: Hub = field(default_factory=Hub)
    profile: Profile = field(default_factory=Profile)


def main(argv):
    config = load_config(Config, argv, presets=Path(__file__).parent / "presets").config
    out = expand_path(config.output_dir)
    if config.declares:
        refuse_unknown_gates(config.declares)
    (out / "checkpoints").mkdir(parents=True)
    print("started with", *argv, flush=True)
    if config.ends == "crash":
        raise RuntimeError("the user's own mistake")
    if config.ends == "refuse":
        raise UsageError("ends: refuse is no end; give another")
    if config.ends == "edited later":
        preset = Path(__file__).parent / "presets" / "edited_later.yaml"
        preset.write_text(preset.read_text() + "shift: 0.5\\n")
    if config.ends == "broken later":
        (Path(__file__).parent / "presets" / "broken_later.yaml").write_text("ends: [")
    if config.ends == "crash later" and out.parent.name == "round_2":
        raise RuntimeError("no room left")
    if config.ends == "interrupted later" and out.parent.name == "round_2":
        os.kill(int(os.environ["COMPARING"]), 15)
        time.sleep(1800)
    if config.ends == "hang":
        (out / "pid").write_text(str(os.getpid()))
        time.sleep(1800)
    if config.ends == "empty":
        return 0
    factor = 1 + 0.01 * int(out.parent.name.removeprefix("round_"))
    metrics, total = LineWriter(out / "metrics.jsonl"), 0.0
    metrics.write({"event": "environment", "device_name": "tiny", "command": "secret"})
    steps = config.max_steps or int(10 * config.max_epochs)
    for step in range(1, steps + 1):
        total += config.step_seconds * factor * (10 if step <= steps // 4 else 1)
        if step % config.log_every == 0 or step in (1, steps):
            loss = 5 - 0.01 * step + config.shift + config.seed
            metrics.write({
                "event": "train", "step": step, "elapsed_seconds": 2 * total, "loss": loss, "process_rss_gib": 0.5,
                "processor_seconds": total,
                "global_batch_size": config.real_batch_size, "step_seconds": total / step, "data_wait_fraction": 0.0,
                "train_accuracy": 0.5 + config.shift,
            })
    experiment = {"data_fingerprint": f"length {config.data.length}" * 3, "shift": config.shift}
    write_json(out / "run.json", {"experiment": experiment})
    (out / "report").mkdir(exist_ok=True)
    write_json(out / "report" / "evaluation.json", {"step": steps, "nll": 3.0 + config.shift, "broken": float("nan")})
    return 0


if __name__ == "__main__":
    run_main(main)
'''
"""It has no more than 50 steps, so a line's rate is the mean of all steps before it."""

FILES = {
    "slow": "step_seconds: 0.1\n",
    "fast": "step_seconds: 0.05\n",
    "both": "{step_seconds: 0.05, shift: 0.1, betas: [0.8, 0.99]}\n",
    "worse": "{step_seconds: 0.05, shift: 0.1}\n",
    "worse_seed1": "{step_seconds: 0.05, shift: 0.1, seed: 1}\n",
    "seed1": "seed: 1\n",
    "batch16": "global_batch_size: 16\n",
    "really16": "real_batch_size: 16\n",
    "epochs": "{max_steps: null, max_epochs: 2}\n",
    "longer": "max_steps: 30\n",
    "other_data": "data: {length: 16}\n",
    "cached": "data: {cache: somewhere}\n",
    "crash": "ends: crash\n",
    "refuse": "ends: refuse\n",
    "hang": "ends: hang\n",
    "empty": "ends: empty\n",
    "crash_later": "ends: crash later\n",
    "interrupted_later": "ends: interrupted later\n",
    "edited_later": "ends: edited later\n",
    "broken_later": "ends: broken later\n",
    "pushes": "hub: {repo_id: me/it}\n",
    "profiles": "profile: {steps: '10:20'}\n",
    "sparse": "log_every: 10\n",
    "declared": "declares: [nll, broken]\n",
}


class Forked:
    """In the place of ``subprocess``: a script is forked from a process with its imports, all else is started."""

    DEVNULL, STDOUT, TimeoutExpired = subprocess.DEVNULL, subprocess.STDOUT, subprocess.TimeoutExpired
    SAME: ClassVar = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    """Another value would make a forked process a new one."""

    @staticmethod
    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return zygote.run(command, env=os.environ | Forked.SAME, cwd=Path.cwd(), apart=True)

    @staticmethod
    def Popen(command: Sequence[str], *, stdout: Any, env: dict[str, str], **given: Any) -> Any:
        script = command[3:]
        if not script[1].endswith(".py"):
            return subprocess.Popen(command, stdout=stdout, env=env, **given)
        return zygote.start(script, Path(stdout.name), env=env | Forked.SAME, cwd=Path.cwd(), group=True)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe beside its presets, in a directory with a space. Its runs are forked."""
    monkeypatch.setattr(compare_runs, "subprocess", Forked)
    # The system counts those of the process that forks.
    monkeypatch.setattr(compare_runs, "_cpu_seconds_of_children", time.perf_counter)
    folder = tmp_path / "my recipe"
    (folder / "presets").mkdir(parents=True)
    for name, text in FILES.items():
        (folder / "presets" / f"{name}.yaml").write_text(text)
    (folder / "tiny.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return str(folder / "tiny.py")


def call(recipe: str, *arguments: str, output: str = "out") -> tuple[int, dict[str, Any]]:
    """Exit code and compare.json, which is empty if there is none."""
    code = cli._main(["compare", recipe, *arguments, "--output", output])
    path = Path(output) / "compare.json"
    return code, json.loads(path.read_text()) if path.exists() else {}


# ------------------------------------------------------------------------------------------------------- comparisons
def test_two_configs_in_turns(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = call(recipe, "slow", "fast", "--rounds", "2", "--gate", "speedup>=1.9", "loss_delta<=0")
    assert code == 0
    effects = result["effects"]["B"]
    times = effects["step_seconds"]
    assert (times["a"], times["b"]) == pytest.approx((0.1015, 0.05075))
    assert times["estimate"] == pytest.approx({"median": 0.5, "low": 0.5, "high": 0.5, "count": 2})
    assert (times["form"], times["over"], times["reading"]) == ("ratio", "rounds", "lower by 50.0%")
    assert effects["samples_per_second"]["a"] == pytest.approx((8 / 0.101 + 8 / 0.102) / 2)
    assert effects["loop_step_seconds"]["a"] == pytest.approx(0.203)  # twice: the recipe saves half of the time
    assert effects["loss"]["a"] == pytest.approx(4.8)
    assert effects["loss_last_tenth"]["b"] == pytest.approx((4.8 + 4.81) / 2)  # steps 19 and 20
    assert effects["loss"]["reading"] == effects["nll"]["reading"] == "equal"
    forms = {name: effects[name]["form"] for name in ("process_rss_gib", "run_seconds", "loss", "nll")}
    assert list(forms.values()) == ["ratio", "ratio", "difference", "difference"]
    assert effects["process_rss_gib"]["reading"] == "equal"
    assert effects["broken"]["reading"] == "not a number"
    assert result["window"] == {"first": 5, "last": 20, "points": list(range(5, 21))}
    assert result["differences"] == {"step_seconds": [0.1, 0.05]}
    assert result["environment"] == {"device_name": "tiny"}
    assert result["versions"]["accel_train"]
    shown = capsys.readouterr().out
    turns = [line.split("  ")[1:3] for line in shown.splitlines() if line.startswith("run ")]
    assert turns == [["round 1", "A slow"], ["round 1", "B fast"], ["round 2", "B fast"], ["round 2", "A slow"]]
    assert "run 3 of 4" in shown
    assert "1 left, about 0:0" in shown
    assert "differs  step_seconds: 0.1 | 0.05" in shown
    assert "equal    seed 0, global_batch_size 8, max_steps 20" in shown
    assert "steps 6 to 20 are measured, steps 1 to 5 are warm-up" in shown
    assert "gate speedup>=1.9: 2 [2, 2] passed" in shown
    assert "contains the true median in 50% of cases" in shown
    with Image.open("out/compare.png") as image:
        assert image.format == "PNG"
    assert not list(Path("out").rglob("checkpoints"))
    assert "started with slow --output_dir" in Path("out/round_2/A.log").read_text()


def test_a_failed_gate_is_exit_code_1(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    gates = ("--gate", "speedup>=3", "loss_delta<=0.2", "--gate", "nll_ratio<1.01", "step_seconds<=0.06")
    code, result = call(recipe, "slow", "worse", "--rounds", "2", "--keep_checkpoints", *gates)
    assert code == 1
    verdicts = {d["gate"]["text"]: d["verdict"] for d in result["gates"]["B"]}
    assert verdicts == {
        "speedup>=3": "FAILED",
        "loss_delta<=0.2": "passed",
        "nll_ratio<1.01": "FAILED",
        "step_seconds<=0.06": "passed",
    }
    assert result["effects"]["B"]["loss"]["reading"] == "higher"
    out = capsys.readouterr().out
    assert "gate speedup>=3: 2 [2, 2] FAILED: the interval excludes the target" in out
    assert "  [range] " in out, "of two rounds"
    assert len(list(Path("out").rglob("checkpoints"))) == 4


def test_varying_one_option(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = call(recipe, "slow", "--vary", "step_seconds=0.1,0.05,0.1001", "--rounds", "2")
    assert code == 0
    assert [v["config"]["step_seconds"] for v in result["variants"]] == [0.1, 0.05, 0.1001]
    assert result["effects"]["C"]["step_seconds"]["estimate"]["median"] == pytest.approx(1.001)
    shown = capsys.readouterr().out
    assert "best throughput: step_seconds=0.05, 157.6 samples per second\n" in shown
    assert "step_seconds=0.05: x 2 [2, 2] the samples per second of step_seconds=0.1 (higher by 100.0%)" in shown
    row = next(line for line in shown.splitlines() if line.startswith("samples_per_second"))
    assert row.split() == ["samples_per_second", "78.82", "157.6*", "78.74*"]
    (loss,) = [line for line in shown.splitlines() if line.startswith("loss ")]
    assert loss.split() == ["loss", "4.8", "4.8", "4.8"]


def test_seeds_have_no_stars(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Rounds repeat the losses of a seed, so their interval would have no width."""
    code, result = call(recipe, "slow", "--vary", "seed=0,1,2", "--rounds", "2", "--gate", "loss_delta<=9")
    assert code == 0
    shown = capsys.readouterr().out
    assert "passed: each side ran one seed, so no interval: the median of its 2 rounds decides" in shown
    assert {result["effects"][letter]["loss"]["reading"] for letter in "BC"} == {"no interval"}
    assert "seed; a row shows how far apart the seeds are\n" in shown
    assert "*" not in shown
    assert "another seed changes them" not in shown


def test_a_round_for_each_seed_has_intervals_over_seeds(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss of the recipe is that of seed 0 plus the seed."""
    gates = ("--gate", "loss_delta<=0.2", "loss<=5.9")
    # Their own seeds, 0 and 1, do not matter.
    code, result = call(recipe, "slow", "worse_seed1", "--seeds", "0", "3", "1", *gates)
    assert code == 0
    assert result["seeds"] == [0, 3, 1]
    assert "seed" not in result["differences"]
    a, b = (variant["values"]["loss"] for variant in result["variants"])
    assert a == pytest.approx([4.8, 7.8, 5.8])
    assert b == pytest.approx([4.9, 7.9, 5.9])
    loss = result["effects"]["B"]["loss"]
    assert (loss["a"], loss["reading"]) == (pytest.approx(5.8), "higher")
    assert loss["estimate"] == pytest.approx({"median": 0.1, "low": 0.1, "high": 0.1, "count": 3}), "paired by seed"
    verdicts = {d["gate"]["text"]: (d["verdict"], d["reason"]) for d in result["gates"]["B"]}
    assert verdicts["loss_delta<=0.2"][0] == "passed"
    assert verdicts["loss<=5.9"][0] == "not decided", "the seeds reach from 4.9 to 7.9"
    shown = capsys.readouterr().out
    assert "equal    in each round its seed of 0, 3, 1, global_batch_size 8" in shown
    rows = [line.split("  ") for line in shown.splitlines() if line.startswith(("mean and standard", "loss  "))]
    cells = [[cell.strip() for cell in row if cell] for row in rows[-2:]]
    assert cells == [
        ["mean and standard deviation over 3 seeds", "A", "B"],
        ["loss", "6.133 +- 1.528", "6.233 +- 1.528"],
    ]
    assert "medians of 3 rounds, each with a seed of its own; with so few" in shown
    assert "of one seed" not in shown
    assert "--output_dir" in Path("out/round_2/B.log").read_text()
    assert "--seed 3" in Path("out/round_2/B.log").read_text()


def test_each_option_by_itself(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    gates = ("--gate", "speedup>=1.9", "loss_delta>=0.05")  # of `worse`, not of its options one by one
    code, result = call(recipe, "slow", "both", "--ablate", "--rounds", "2", "--max_steps", "8", *gates)
    assert code == 0
    names = [v["name"] for v in result["variants"]]
    single = ["step_seconds: 0.1 -> 0.05", "shift: 0.0 -> 0.1", "betas: [0.9, 0.95] -> [0.8, 0.99]"]
    assert names == ["slow", *single, "both"]
    found = {name: result["effects"][letter] for name, letter in zip(names[1:], "BCDE", strict=True)}
    times = [found[name]["step_seconds"]["estimate"]["median"] for name in names[1:]]
    assert times == pytest.approx([0.5, 1, 1, 0.5])
    losses = [found[name]["loss"]["estimate"]["median"] for name in names[1:]]
    assert losses == pytest.approx([0, 0.1, 0, 0.1])
    assert [bool(result["gates"][letter]) for letter in "BCDE"] == [False, False, False, True]
    out = capsys.readouterr().out
    assert "differs" not in out
    table = {name: next(line for line in reversed(out.splitlines()) if line.startswith(name)) for name in single}
    assert "x 0.5 [0.5, 0.5]" in table[single[0]]
    assert table[single[0]].endswith("equal")
    assert table[single[1]].endswith("+0.1")
    assert "gate both: speedup>=1.9" in out


def test_an_option_that_needs_another_is_left_out(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    last = "    profile: Profile = field(default_factory=Profile)\n"
    check = (
        "        if self.log_every > 1 and not self.shift:\n            raise UsageError('log_every: needs a shift')\n"
    )
    Path(recipe).write_text(RECIPE.replace(last, f"{last}\n    def __post_init__(self):\n{check}"))
    (Path(recipe).parent / "presets" / "pair.yaml").write_text("{log_every: 2, shift: 0.1, step_seconds: 0.05}\n")
    _, variants = read_variants(Request(recipe, ("slow", "pair"), ablate=True), Path(recipe))
    names = ["slow", "step_seconds: 0.1 -> 0.05", "shift: 0.0 -> 0.1", "pair"]
    assert [(one.letter, one.name) for one in variants] == list(zip("ABCD", names, strict=True))
    said = capsys.readouterr().out
    assert said.startswith("not by itself: log_every: 1 -> 2 (")
    assert "log_every: needs a shift" in said


@pytest.mark.parametrize(
    ("sources", "flags", "says"),
    [
        (("slow", "slow"), (), "nothing to ablate"),
        (("slow",), ("--vary", "step_seconds=1,2"), "leave one of them out"),
        (("slow", "seed1"), (), "seed: 0 in slow, 1 in seed1"),
    ],
)
def test_what_cannot_be_taken_apart(recipe: str, sources: tuple[str, ...], flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call(recipe, *sources, "--ablate", *flags)


def test_one_round_has_intervals_over_log_intervals(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = call(recipe, "slow", "--vary", "betas=0.9 0.95,0.8 0.9", "--rounds", "1", "--max_epochs", "3")
    assert code == 0
    assert [v["config"]["betas"] for v in result["variants"]] == [[0.9, 0.95], [0.8, 0.9]]
    assert result["variants"][0]["config"] == result["variants"][1]["config"] | {"betas": [0.9, 0.95]}
    effects = result["effects"]["B"]
    assert effects["step_seconds"]["over"] == "log intervals"
    assert effects["step_seconds"]["estimate"]["count"] == 30 - 8  # steps 9 to 30
    assert (effects["loss"]["over"], effects["loss"]["reading"]) == ("one round", "equal")
    shown = capsys.readouterr().out
    assert "noise between runs is not in them" in shown
    assert "indistinguishable from betas=0.9 0.95" in shown or "indistinguishable from betas=0.8 0.9" in shown


@pytest.mark.usefixtures("busy_machine")
@pytest.mark.parametrize(
    "key", ["data.length", *(pytest.param(key, marks=pytest.mark.slow) for key in ("global_batch_size", "max_epochs"))]
)
def test_what_must_be_equal_may_be_varied(key: str, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = call(recipe, "slow", "--vary", f"{key}=2,4", "--rounds", "1")
    assert code == 0
    assert [v["config"][key] for v in result["variants"]] == [2, 4]
    assert ("the varied option changes the data" in capsys.readouterr().out) is (key == "data.length")


def test_a_gate_on_what_one_side_does_not_log_is_refused_after_the_first_round(recipe: str) -> None:
    gate = ("--gate", "loss_equal_time_delta<=1")  # B has too few lines for it
    with pytest.raises(UsageError, match=r"'loss_equal_time_delta<=1': .* is not known"):
        call(recipe, "slow", "sparse", "--max_steps", "50", "--rounds", "3", *gate)
    assert Path("out/round_1/B").exists()
    assert not Path("out/round_2").exists()


def test_the_hub_is_not_taken_apart() -> None:
    a, b = {"hub.repo_id": None, "seed": 0, "lr": 1.0}, {"hub.repo_id": "me/it", "seed": 0, "lr": 2.0}
    assert single_options(a, b) == [("lr: 1.0 -> 2.0", ("--lr", "2.0"))]


@pytest.mark.distributed
def test_runs_of_a_launch_file(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("distributed_type: 'NO'\nnum_processes: 1\nuse_cpu: true\n")
    assert call(recipe, "slow", "fast", "--rounds", "1", "--config_file", "one.yaml")[0] == 0
    with pytest.raises(UsageError, match=r"none\.yaml"):
        call(recipe, "slow", "fast", "--rounds", "1", "--config_file", "none.yaml", output="other")


@pytest.mark.distributed
def test_the_number_of_processes_is_that_of_the_command(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("distributed_type: 'NO'\nnum_processes: 1\nuse_cpu: true\n")
    arguments = ("slow", "fast", "--rounds", "1", "--config_file", "one.yaml", "--num_processes", "2")
    # The launcher's own refusal of two processes without a strategy shows that the number reached it.
    with pytest.raises(UsageError, match="num_processes"):
        call(recipe, *arguments)


def test_options_for_every_run(recipe: str) -> None:
    code, result = call(
        recipe, "slow", "fast", "--rounds", "1", "--set", "data.length=5", "betas=0.5 0.6", "--max_steps", "4"
    )
    assert code == 0
    assert [v["config"]["data.length"] for v in result["variants"]] == [5, 5]
    assert [v["config"]["betas"] for v in result["variants"]] == [[0.5, 0.6]] * 2
    assert result["differences"].keys() == {"step_seconds"}


def test_nothing_is_pushed_and_caches_may_differ(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = call(recipe, "pushes", "cached", "--rounds", "1", "--seed", "7", "--max_steps", "4")
    assert code == 0
    assert [v["config"]["hub.repo_id"] for v in result["variants"]] == [None, None]
    assert [v["config"]["seed"] for v in result["variants"]] == [7, 7]
    assert result["differences"] == {"data.cache": [None, "somewhere"]}
    assert "a comparison pushes nothing" in capsys.readouterr().out


def test_a_range_to_profile_does_not_reach_the_runs_unless_it_is_varied(recipe: str) -> None:
    code, result = call(recipe, "profiles", "profiles", "--rounds", "1", "--max_steps", "4")
    assert code == 0
    assert [v["config"]["profile.steps"] for v in result["variants"]] == [None, None]
    varied = call(recipe, "profiles", "--rounds", "1", "--vary", "profile.steps=None,0:2", output="varied")[1]
    assert [v["config"]["profile.steps"] for v in varied["variants"]] == [None, "0:2"]


# ---------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("slow seed1", r"seed: 0 in slow, 1 in seed1: a fair comparison needs the same; give --seed for both"),
        ("slow batch16", r"global_batch_size: 8 in slow, 16 in batch16: .*--vary global_batch_size="),
        ("slow longer", r"max_steps: 20 in slow, 30 in longer: .*give --max_steps"),
        ("slow epochs", r"max_steps: 20 in slow, None in epochs"),
        ("slow dmeo", r"preset 'dmeo' does not exist.*presets are "),
        ("slow", r"1 preset\(s\) or file\(s\) given \(slow\); two are required"),
        ("slow fast --vary seed=0,1", r"2 preset\(s\).*--vary takes one"),
        ("slow --vary seed=0", r"--vary 'seed=0' is not KEY=V1,V2"),
        ("slow --vary seed", r"--vary 'seed' is not KEY=V1,V2"),
        ("slow --vary sed=0,1", r"--vary sed: not an option that can be varied \(did you mean 'seed'\?"),
        ("slow --vary output_dir=a,b", r"--vary output_dir: not an option that can be varied"),
        ("slow --vary hub.repo_id=me/it,me/other", r"--vary hub.repo_id: a comparison pushes nothing"),
        ("slow --vary step_seconds=0.1,1e-1", r"--vary: step_seconds=0.1 and step_seconds=1e-1 are the same value"),
        ("slow --vary seed=1,two", r"two"),
        ("slow --vary seed=0,1 --seed 3", r"--seed 3 and --vary seed: both set the same thing"),
        ("slow fast --seeds 0 1 --seed 3", r"--seed 3 and --seeds 0 1: both set the seed"),
        ("slow --vary seed=0,1 --seeds 0 1", r"--vary seed=0,1 and --seeds 0 1: both set the seed"),
        ("slow fast --seeds 0 1 0", r"--seeds 0 1 0: names a seed twice"),
        ("slow fast --seeds 0 1 --rounds 5", r"--rounds 5 and --seeds 0 1: there is one round for each seed"),
        ("slow fast --num_processes 2", r"--num_processes 2 without --config_file"),
        ("slow fast --set data.length", r"--set data.length: KEY=VALUE is required"),
        ("slow fast --set shift=1 shift=2", r"--set shift: given twice, 1 and 2"),
        ("slow fast --set seed=3", r"--set seed=3: it has a flag of its own here"),
        ("slow fast --set hub.repo_id=me/it", r"--set hub.repo_id=me/it: .* belongs to the comparison"),
        ("slow --vary betas=it's,0.9", r"--vary betas=it's: No closing quotation; values are split into words"),
        ("slow fast --set betas=it's", r"--set betas=it's: No closing quotation; values are split into words"),
        ("slow fast --set profile.memory=true", r"--set profile.memory=true: .* belongs to the comparison"),
        ("slow fast --set data.size=3", r"--data.size 3: the recipe has no option data.size"),
        ("slow --vary shift=0,1 --set shift=3", r"--shift 3 and --vary shift: both set the same thing"),
        (
            "slow --vary max_steps=5,6 --max_epochs 1",
            r"--max_epochs 1\.0 and --vary max_steps: both set the same thing",
        ),
        ("slow --vary seed=" + ",".join(map(str, range(27))), r"27 values given, at most 26"),
        ("slow fast --max_steps 5 --max_epochs 1", r"--max_steps 5 and --max_epochs 1\.0: a run ends once"),
        ("slow fast --rounds 0", r"--rounds 0: at least 1"),
        ("slow fast --tolerance=-1", r"--tolerance -1\.0: a number from 0 up"),
        ("slow fast --gate=", r"--gate '' is not NAME SIGN NUMBER"),
        ("slow fast --gate speedup", r"--gate 'speedup' is not NAME SIGN NUMBER"),
        ("slow fast --gate speedup>=10%", r"percent is relative to A, so it needs NAME_delta"),
        ("slow fast --output presets", r"--output .*presets is not empty"),
        ("slow fast --output tiny.py/out", r"--output .*out: cannot be written \(Not a directory\); .* give another"),
        (
            "slow fast --output /proc/out",
            r"--output /proc/out: cannot be written \(.*\); a directory with write access",
        ),
    ],
)
def test_what_is_not_fair_or_not_clear_is_refused_before_anything_runs(
    arguments: str, says: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(recipe).parent)
    with pytest.raises(UsageError, match=says):
        cli._main(["compare", recipe, *arguments.split()])
    assert {p.name for p in Path.cwd().iterdir()} <= {"presets", "tiny.py", "__pycache__"}


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ("other_data", r"data fingerprint: 'length 8.*' in .*/A, 'length 16.*' in .*/B"),
        ("really16", r"global_batch_size: 8 in .*/A, 16 in .*/B"),
    ],
)
def test_what_only_the_runs_show_is_refused_after_the_first_of_each(other: str, says: str, recipe: str) -> None:
    with pytest.raises(UsageError, match=says):
        call(recipe, "slow", other, "--rounds", "3")
    assert not Path("out/round_2").exists()


def test_a_gate_on_an_unknown_metric_is_refused_after_one_run(recipe: str) -> None:
    says = r"'nl_delta<=1': nl_delta is not known \(did you mean 'nll_delta'\?.*step_seconds.*nll"
    with pytest.raises(UsageError, match=says):
        call(recipe, "slow", "fast", "--gate", "speedup>1", "nl_delta<=1")
    assert not Path("out/round_1/B").exists()
    with pytest.raises(UsageError, match=r"memory_peak_gib is not known.*process_rss_gib"):
        call(recipe, "slow", "fast", "--gate", "memory_peak_gib<=50", output="other")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, r"there is no such file"),
        ("print('hello')\n", r"it does not print its options with --print_config \(exit code 0\).*\n.*hello"),
        ("raise KeyError('x')\n", r"it does not print its options.*\(exit code 1\)[\s\S]*KeyError: 'x'"),
        (RECIPE.replace("output_dir", "directory"), r"the recipe has no option output_dir"),
    ],
)
def test_what_is_no_recipe_is_refused(text: str | None, says: str, recipe: str) -> None:
    path = Path(recipe).with_name("other.py")
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=says):
        call(str(path), "slow", "fast")


def test_options_are_read_as_the_recipe_resolves_them(recipe: str) -> None:
    options = read_config(Path(recipe), ["slow", "--data.cache", "a  # b: 'c'", "--betas", "0.1", "0.2"])
    assert options["data.cache"] == "a  # b: 'c'"
    assert options["betas"] == [0.1, 0.2]
    assert (options["step_seconds"], options["max_epochs"], options["ends"]) == (0.1, None, "well")


# ------------------------------------------------------------------------------------------------- runs that go wrong
def test_a_run_that_fails_is_shown_and_ends_the_comparison(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(recipe, "slow", "crash")[0] == 1
    shown = capsys.readouterr()
    assert "RuntimeError: the user's own mistake" in shown.err
    assert "exit code 1" in shown.err
    assert "out/round_1/B.log" in shown.err
    assert "written" not in shown.out
    assert call(recipe, "empty", "slow", output="other")[0] == 1
    assert "wrote no" in capsys.readouterr().err


def test_a_gate_on_what_the_recipe_does_not_declare_is_refused_as_the_first_run_starts(recipe: str) -> None:
    says = r"nl_delta is not known \(did you mean 'nll_delta'\?.*step_seconds.*nll"
    with pytest.raises(UsageError, match=says):
        call(recipe, "declared", "fast", "--gate", "speedup>1", "nl_delta<=1")
    assert not Path("out").exists()
    gates = ["--gate", "speedup>0", "nll_delta<=1", "loss_last_tenth_delta<=9", "train_accuracy>=0.5"]
    assert call(recipe, "declared", "fast", "--rounds", "1", *gates)[0] == 0


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ("crash_later", r"error: the run ended with.*no room left"),
        ("interrupted_later", r"interrupted by SIGTERM: the current run"),
        ("edited_later", r"shift: 0.0 in .*round_1/B, 0.5 in .*round_2/B: the config of B has changed while"),
        ("broken_later", r"error: the run ended with exit code 2.*broken_later\.yaml"),
    ],
)
def test_the_rounds_before_an_end_are_kept(
    ends: str, says: str, recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPARING", str(os.getpid()))
    code, result = call(recipe, "slow", ends, "--rounds", "3", "--gate", "speedup>=0.5")
    shown = capsys.readouterr()
    assert code == 1
    assert re.search(rf"{says}[\s\S]*the result of 1 of 3 rounds:", shown.err, re.DOTALL)
    assert (result["rounds"], result["rounds_asked"], len(result["runs"])) == (1, 3, 2)
    assert re.search(says, result["cut_short"], re.DOTALL)
    assert result["effects"]["B"]["step_seconds"]["estimate"]["median"] == 1
    assert re.search(r"gate speedup>=0\.5: 1 .*passed", shown.out)


def test_what_a_recipe_refuses_in_its_run_is_wrong_usage(recipe: str) -> None:
    with pytest.raises(UsageError, match=r"exit code 2.*\n.*B\.log[\s\S]*ends: refuse is no end; give another"):
        call(recipe, "slow", "refuse")


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _hear() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and only Linux ends children of a killed process")
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        signal.SIGKILL,
        *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGHUP)),  # as SIGTERM
    ],
)
def test_children_end_with_us(number: signal.Signals, recipe: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accel_train.cli", "compare", recipe, "hang", "slow", "--output", "out"]
    with (tmp_path / "shown").open("w") as shown:
        # What a shell ignores for tests in the background, or nohup for all, would be ignored here as well.
        us = subprocess.Popen(command, stdout=shown, stderr=shown, preexec_fn=_hear)
    note = tmp_path / "out" / "round_1" / "A" / "pid"
    try:
        until(lambda: note.exists() and note.read_text(), (tmp_path / "shown").read_text)
        child = int(note.read_text())
        assert _alive(child)
        us.send_signal(number)
        code = us.wait(PATIENCE_SECONDS)
    finally:
        us.kill()
    until(lambda: not _alive(child))
    assert code == (-number if number == signal.SIGKILL else 1)
    if number != signal.SIGKILL:
        assert f"interrupted by {number.name}" in (tmp_path / "shown").read_text()


def test_a_stop_during_a_start_comes_after_it() -> None:
    """An exception within the start would lose the process, which nobody ends then."""
    started = False
    with pytest.raises(compare_runs.InterruptedRunError, match="SIGTERM"), compare_runs.stop_signals_raise():
        with compare_runs.stop_signals_held():
            signal.raise_signal(signal.SIGTERM)
            started = True
        raise AssertionError("the signal is lost")
    assert started


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_the_process_ignores_stays_ignored(number: signal.Signals) -> None:
    """As under nohup, and in the background of a script."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with compare_runs.stop_signals_raise():
            signal.raise_signal(number)
            with compare_runs.stop_signals_held():
                signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_what_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_runs, "GRACE_SECONDS", 0.5)
    stubborn = (
        "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(1800)"
    )
    log = tmp_path / "log"

    def interrupt_it() -> None:
        until(lambda: log.exists() and log.read_text())
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    asking = threading.Thread(target=interrupt_it)
    with pytest.raises(compare_runs.InterruptedRunError, match="SIGTERM"), compare_runs.stop_signals_raise():
        asking.start()
        compare_runs.run_once([sys.executable, "-c", stubborn], log)
    asking.join()
    assert not _alive(int(log.read_text()))
    assert signal.getsignal(signal.SIGTERM) is before


def test_help_among_the_arguments_of_a_recipe_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text("import sys; print('usage: recipe.py', sys.argv[1:])")
    with pytest.raises(SystemExit) as ended:
        read_config(recipe, ["demo", "--help", "all"])
    assert ended.value.code == 0
    assert capfd.readouterr().out == "usage: recipe.py ['demo', '--help', 'all', '--print_config']\n"


def test_runs_belong_to_no_launcher_of_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for processes that nobody starts."""
    launcher = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    kept = {"ACCELERATE_USE_CPU": "true", "OWN": "a"}
    for name, value in (launcher | kept).items():
        monkeypatch.setenv(name, value)
    log = tmp_path / "log"
    shows = f"import os; print(sorted(set({sorted(launcher | kept)}).intersection(os.environ)))"
    compare_runs.run_once([sys.executable, "-c", shows], log, environment={"MORE": "b"})
    assert log.read_text().strip() == str(sorted(kept))
    recipe = tmp_path / "recipe.py"
    recipe.write_text("import os; print('world:', os.environ.get('WORLD_SIZE'), ' # default')")
    assert read_config(recipe, []) == {"world": None}
    assert os.environ["WORLD_SIZE"] == "2"


def test_a_run_that_can_be_continued_has_the_time_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_runs, "GRACE_SECONDS", 0.0)
    log = tmp_path / "log"
    ended = threading.Event()
    # Its save ends only once nobody else would wait any more.
    saving = (
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    print('saving', flush=True)\n"
        f"    while not pathlib.Path({str(tmp_path / 'waited')!r}).exists(): time.sleep(0.01)\n"
        "    print('saved', flush=True)\n"
        "    sys.exit(75)\n"
        "signal.signal(15, save)\n"
        "print('training', flush=True)\n"
        "time.sleep(1800)"
    )

    def interrupt_it() -> None:
        until(lambda: log.exists() and log.read_text())
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: "saving" in log.read_text() or ended.is_set())
        (tmp_path / "waited").touch()

    asking = threading.Thread(target=interrupt_it)
    with pytest.raises(compare_runs.InterruptedRunError), compare_runs.stop_signals_raise():
        asking.start()
        compare_runs.run_once([sys.executable, "-c", saving], log, save_seconds=PATIENCE_SECONDS)
    ended.set()
    asking.join()
    assert log.read_text().split() == ["training", "saving", "saved"]
    assert "the run is asked to save and stop" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------- statistics
def exact_interval(values: Sequence[float]) -> tuple[float, float]:
    """Quantiles of the medians of all n^n resamples."""
    resamples = np.array(list(itertools.product(values, repeat=len(values))))
    medians = np.median(resamples, axis=1)
    low, high = np.quantile(medians, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="inverted_cdf")
    return float(low), float(high)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7])
def test_the_interval_is_the_bootstrap_of_the_median(count: int) -> None:
    values = list(np.random.default_rng(count).normal(size=count))
    found = estimate(values)
    assert found.median == pytest.approx(np.median(values))
    assert (found.low, found.high) == pytest.approx(exact_interval(values), abs=1e-9)
    if count <= 5:
        assert (found.low, found.high) == (min(values), max(values))
    interval = stats.bootstrap(
        (values,), np.median, method="percentile", rng=np.random.default_rng(5)
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=0.05)
    assert estimate(values) == found


def test_the_range_holds_the_median_as_often_as_said() -> None:
    draws = np.random.default_rng(0).exponential(size=(20000, 4))
    held = ((draws.min(1) <= math.log(2)) & (draws.max(1) >= math.log(2))).mean()
    assert held == pytest.approx(coverage_of_range(4), abs=0.01)


def test_intervals_that_do_not_exist_or_have_no_width() -> None:
    assert estimate([3.0]) == Estimate(3.0, None, None, 1)
    assert estimate([3.0, 3.0, 3.0]) == Estimate(3.0, 3.0, 3.0, 3)
    assert estimate([1.0, math.inf]).low is None
    assert not estimate([3.0]).includes(3.0)
    assert math.isnan(estimate([1.0, math.nan, 2.0]).median)
    with pytest.raises(ValueError, match="no values"):
        estimate([])


@pytest.mark.parametrize(
    ("found", "neutral", "tolerated", "reading"),
    [
        (Estimate(0.5, 0.4, 0.6, 3), 1.0, 0.0, "lower by 50.0%"),
        (Estimate(1.5, 1.4, 1.6, 3), 1.0, 0.0, "higher by 50.0%"),
        (Estimate(1.1, 0.9, 1.6, 3), 1.0, 0.0, "no effect"),
        (Estimate(1.0, 1.0, 1.0, 3), 1.0, 0.0, "equal"),
        (Estimate(0.9), 1.0, 0.0, "no interval"),
        (Estimate(0.0), 0.0, 1e-5, "equal"),
        (Estimate(1e-6), 0.0, 1e-5, "equal within the tolerance"),
        (Estimate(-1e-6, -2e-6, -1e-7, 3), 0.0, 1e-5, "equal within the tolerance"),
        (Estimate(-1e-6, -2e-5, -1e-7, 3), 0.0, 1e-5, "lower"),
        (Estimate(math.nan), 0.0, 1e-5, "not a number"),
        (Estimate(math.inf), 1.0, 0.0, "not a number"),
    ],
)
def test_an_effect_in_words(found: Estimate, neutral: float, tolerated: float, reading: str) -> None:
    assert figures.describe_effect(found, neutral, tolerated) == reading


def run_of(lines: list[dict[str, Any]], **more: Any) -> Run:
    return replace(Run("A", 1, Path("a"), 9.0, 8.0, lines, {}, None, {}), **more)


def test_a_run_that_has_started_again_by_itself_has_no_times(tmp_path: Path) -> None:
    def write(*lines: dict[str, Any]) -> None:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def train(step: int, elapsed: float) -> dict[str, Any]:
        return {"event": "train", "step": step, "step_seconds": 1.0, "elapsed_seconds": elapsed}

    start, ran_out = {"event": "environment"}, {"event": "out_of_memory", "step": 61}
    # Before its first line nothing was timed.
    write(start, ran_out, start, train(1, 3.0), train(100, 102.0))
    assert read_run("A", 1, tmp_path, 9.0, 8.0).last_step == 100
    write(start, train(1, 3.0), train(60, 62.0), ran_out, start, train(61, 3.0), train(100, 42.0))
    with pytest.raises(RunFailedError, match=r"started again by itself after out_of_memory at step 61, .*micro_batch"):
        read_run("A", 1, tmp_path, 9.0, 8.0)


@settings(max_examples=60, deadline=None)
@given(steps=st.integers(1, 260), log_every=st.integers(1, 130), seed=st.integers(0, 1000))
@example(steps=170, log_every=1, seed=0)
@example(steps=170, log_every=7, seed=0)
@example(steps=170, log_every=50, seed=0)
def test_the_time_of_training_is_recovered_from_windowed_rates(steps: int, log_every: int, seed: int) -> None:
    times: list[float] = np.random.default_rng(seed).exponential(size=steps).tolist()
    clock = [0.0]
    rates = Throughput(torch.device("cpu"), clock=lambda: clock[0])
    lines: list[dict[str, Any]] = []
    for step, seconds in enumerate(times, start=1):
        clock[0] += seconds
        rates.update(samples=8)
        if step % log_every == 0 or step in (1, len(times)):
            lines.append({"step": step, "step_seconds": rates.read()["step_seconds"], "global_batch_size": 8})
    total = figures.training_seconds(lines)
    true = np.concatenate([[0.0], np.cumsum(times)])
    assert total == pytest.approx({step: true[step] for step in (0, *(line["step"] for line in lines))})
    run = run_of(lines)
    window = figures.window_of([run])
    assert figures.interval_seconds(run, window) == pytest.approx(
        [(true[e] - true[b]) / (e - b) for b, e in itertools.pairwise(window.points)]
    )


@pytest.mark.parametrize(
    ("logged", "first", "points"),
    [
        ((range(1, 21),), 5, tuple(range(5, 21))),
        ((range(1, 101), (1, 50, 100)), 50, (50, 100)),  # the same steps of each
        (((1, 40), (1, 40)), 1, (1, 40)),  # no line after the first quarter but the last
        (((3,),), 0, (0, 3)),
        ((range(1, 31), range(1, 21)), 5, tuple(range(5, 21))),  # varied max_steps
    ],
)
def test_the_steps_that_are_measured(logged: tuple[Sequence[int], ...], first: int, points: tuple[int, ...]) -> None:
    runs = [run_of([{"step": step, "step_seconds": 1.0} for step in steps]) for steps in logged]
    assert figures.window_of(runs) == figures.Window(first, points[-1], points)


def test_runs_without_a_common_log_line_are_refused() -> None:
    runs = [run_of([{"step": step, "step_seconds": 1.0} for step in steps]) for steps in ((3,), (2, 4, 5, 6, 7))]
    with pytest.raises(
        UsageError, match=r"every run \(A: step 3; A: step 2, 4, 5 and 2 more\).*such as --log\.log_every 1"
    ):
        figures.window_of(runs)


def test_loss_at_equal_time() -> None:
    def line(step: int, seconds: float) -> dict[str, Any]:
        return {"step": step, "step_seconds": seconds, "elapsed_seconds": step * seconds, "loss": 1 / step}

    slow = run_of([line(s, 2.0) for s in range(1, 101)])
    fast = run_of([line(s, 1.0) for s in range(1, 101)])
    window = figures.window_of([slow, fast])
    one, two = figures.observations([[slow, fast]], window)
    assert two["loss_equal_time"] == [pytest.approx(np.mean([1 / s for s in range(91, 101)]))]
    assert (len(one["step_seconds"]), len(one["run_seconds"])) == (75, 1)  # one round: steps 26 to 100
    assert one["loss_equal_time"] == [pytest.approx(np.mean([1 / s for s in range(41, 51)]))]  # at 100 s: step 50
    rare = run_of([line(s, 1.0) for s in range(20, 101, 20)])
    for values in figures.observations([[slow, rare]], figures.window_of([slow, rare])):
        assert "loss_equal_time" not in values
        assert len(values["step_seconds"]) == 1  # three log intervals would claim too much


def test_the_metrics_of_any_run_are_those_that_a_gate_may_name() -> None:
    fields = dict.fromkeys(("processor_seconds", "data_wait_fraction", "mfu"), 1.0)
    fields |= {"memory_peak_gib": 1.0, "process_rss_gib": 1.0, "step_seconds": 1.0, "loss": 1.0, "global_batch_size": 8}
    run = run_of([{"step": step, "elapsed_seconds": float(step), **fields} for step in range(1, 101)])
    assert set(figures.run_metrics(run, figures.window_of([run]), 100.0)) == set(COMPARED)


def test_figures_that_a_run_lacks_are_left_out_and_names_do_not_collide() -> None:
    run = run_of([{"step": 4, "step_seconds": 0.5}, {"step": 8, "step_seconds": 0.25}], evaluation={"loss": 3.0})
    found = figures.run_metrics(run, figures.window_of([run]), 1.0)
    assert found == {"step_seconds": 0.0, "run_seconds": 9.0, "run_cpu_seconds": 8.0, "loss": 3.0}
    run = run_of([{"step": 8, "step_seconds": 0.25, "loss": 2.0, "mfu": 0.4}], evaluation={"loss": 3.0})
    found = figures.run_metrics(run, figures.window_of([run]), 1.0)
    assert found == {
        "step_seconds": 0.25,
        "run_seconds": 9.0,
        "run_cpu_seconds": 8.0,
        "mfu": 0.4,
        "loss": 2.0,
        "loss_last_tenth": 2.0,
        "evaluation_loss": 3.0,
    }
    line = {"step": 8, "step_seconds": 0.25, "loss": 2.0, "loss_prediction": 1.5, "loss_reencoding": None}
    found = figures.run_metrics(run := run_of([line]), figures.window_of([run]), 1.0)
    assert {name: value for name, value in found.items() if name.startswith("loss_")} == {
        "loss_last_tenth": 2.0,
        "loss_prediction": 1.5,
    }


# ------------------------------------------------------------------------------------------------------------- gates
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.]{0,20}", fullmatch=True)
SPACE = st.sampled_from(["", " ", "  "])


@given(name=NAMES, sign=st.sampled_from(sorted(SIGNS)), target=st.floats(-1e9, 1e9), space=SPACE)
def test_a_gate_is_read_as_written(name: str, sign: str, target: float, space: str) -> None:
    gate = read_gate(f"{space}{name}{space}{sign}{space}{target!r}{space}")
    assert (gate.name, gate.sign, gate.target, gate.percent) == (name, sign, target, False)
    percent = read_gate(f"{name}_delta{sign}{target!r}{space}%")
    assert (percent.name, percent.target, percent.percent) == (f"{name}_delta", target / 100, True)


@given(text=st.one_of(st.text(max_size=30), st.text("ab_delt<>=%. 0123456789e-", max_size=12)))
def test_any_other_text_is_refused(text: str) -> None:
    found = re.fullmatch(r"\s*([A-Za-z_][\w.]*)\s*(>=|<=|>|<)\s*(\S+?)\s*(%?)\s*", text)
    try:
        number = float(found[3]) if found and "_" not in found[3] else math.nan
    except ValueError:
        number = math.nan
    if found and math.isfinite(number) and (not found[4] or found[1].endswith("_delta")):
        assert read_gate(text).sign == found[2]
        return
    with pytest.raises(UsageError, match=re.escape(repr(text))):
        read_gate(text)


@pytest.mark.parametrize(
    "text", ["", "loss", "loss==3", "loss=3", ">=3", "loss>=", "loss>=nan", "loss<=inf", "loss>=3x", "a b>=1", "x>1_0"]
)
def test_what_is_no_gate(text: str) -> None:
    with pytest.raises(UsageError, match="NAME SIGN NUMBER"):
        read_gate(text)


A = {"step_seconds": [0.2, 0.4], "loss": [4.0, -2.0], "x_delta": [1.0, 1.0], "none": [0.0, 0.0], "only_a": [1.0]}
B = {"step_seconds": [0.1, 0.1], "loss": [4.4, -1.0], "x_delta": [7.0, 8.0], "none": [0.0, 3.0]}


@pytest.mark.parametrize(
    ("gate", "values"),
    [
        ("speedup>=1", [2.0, 4.0]),
        ("step_seconds<1", [0.1, 0.1]),
        ("step_seconds_ratio<1", [0.5, 0.25]),
        ("loss_delta<1", [0.4, 1.0]),
        ("loss_delta<1%", [0.1, 0.5]),
        ("loss_ratio<1", [1.1, 0.5]),
        ("x_delta>1", [7.0, 8.0]),  # a metric of that name
        ("x_delta_delta>1", [6.0, 7.0]),
        ("none_ratio>1", [1.0, math.inf]),
        ("none_delta>1%", [0.0, math.inf]),
    ],
)
def test_what_a_gate_is_about(gate: str, values: list[float]) -> None:
    assert gate_values(read_gate(gate), A, B) == pytest.approx(values)


def test_rounds_of_one_seed_are_no_interval_of_a_loss() -> None:
    a = {"loss": [1.0, 1.0, 1.0], "step_seconds": [0.1, 0.1, 0.1]}
    b = {"loss": [1.1, 1.2, 1.6], "step_seconds": [0.1, 0.05, 0.05]}
    gates = [read_gate(text) for text in ("loss_delta<=0.3", "loss_ratio>1.3", "speedup>=2", "step_seconds_ratio<=1")]
    of_loss, ratio, *of_time = decide_gates(gates, a, b)
    assert (of_loss.verdict, ratio.verdict) == ("passed", "FAILED")
    assert of_loss.value.low is None
    assert of_loss.reason == "each side ran one seed, so no interval: the median of its 3 rounds decides"
    assert [decision.value.low for decision in of_time] == [1.0, 0.5]
    assert decide_gates(gates[:1], a, {"loss": [1.1, math.nan, 1.2]})[0].verdict == "FAILED"


def test_the_loss_at_equal_time_has_an_interval_because_times_move_it() -> None:
    gate = read_gate("loss_equal_time_delta<0")
    decision = decide_gates([gate], {"loss_equal_time": [2.0] * 5}, {"loss_equal_time": [2.3, 1.95, 1.99, 2.2, 1.7]})[0]
    assert decision.verdict == "not decided"
    assert decision.value.low == pytest.approx(-0.3)


@pytest.mark.parametrize("name", ["lss", "loss_detla", "speed_up", "delta", "_delta", "only_a_delta", "loss_speedup"])
def test_names_that_are_not_known(name: str) -> None:
    with pytest.raises(UsageError, match=r"is not known.*NAME is one of step_seconds, loss, x_delta, none"):
        gate_values(read_gate(f"{name}>1"), A, B)


@pytest.mark.parametrize(
    ("gate", "values", "verdict"),
    [
        ("x>=3", [3.0, 3.1, 3.2], "passed"),
        ("x>3", [3.0, 3.1, 3.2], "not decided"),
        ("x>=3", [2.0, 2.5, 3.5], "not decided"),
        ("x>=3", [2.0, 2.5, 2.9], "FAILED"),
        ("x<=3", [2.0, 2.5, 3.0], "passed"),
        ("x<=3", [3.1, 3.5, 9.0], "FAILED"),
        ("x<3", [3.0, 3.5, 9.0], "FAILED"),
        ("x<=3", [2.0], "passed"),
        ("x<=3", [4.0], "FAILED"),
        ("x<=3", [1.0, math.nan], "FAILED"),
        ("x>=3", [math.inf, math.inf], "passed"),
    ],
)
def test_a_gate_fails_only_where_the_interval_excludes_its_target(gate: str, values: list[float], verdict: str) -> None:
    assert decide(read_gate(gate), values).verdict == verdict


# ----------------------------------------------------------------------------------------------------------- presets
OF_THE_MACHINE = {"attention", "loader.num_workers", "optimizer.fused", "checkpoints.asynchronous", "log.log_every"}


@pytest.mark.parametrize(
    ("stem", "more"),
    [
        ("mmdit_", {"loader.bucket_by_length"}),
        ("mmdit_small_", {"loader.bucket_by_length", "compile.mode", "compile.dynamic"}),
        ("mmdit_base_", {"loader.bucket_by_length", "compile.mode", "compile.dynamic"}),
        ("pde_stack_", {"compile.mode"}),
    ],
)
def test_the_compared_presets_differ_in_their_options_alone(stem: str, more: set[str]) -> None:
    baseline, optimized = (flatten(read_yaml(PRESETS / f"{stem}{name}.yaml")) for name in ("baseline", "optimized"))
    either = baseline.keys() | optimized.keys()
    differing = {key for key in either if baseline.get(key) != optimized.get(key)} - {"output_dir"}
    assert differing == OF_THE_MACHINE | more


@pytest.mark.slow
def test_the_presets_of_the_real_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    recipe = str(ROOT / "recipes" / "mmdit.py")
    gates = ("--gate", "loss_delta<=0.001", "l2t_nll_delta<=1%")
    code, result = call(recipe, "mmdit_baseline", "mmdit_optimized", "--max_steps", "20", "--rounds", "1", *gates)
    assert code == 0
    effects = result["effects"]["B"]
    assert {"step_seconds", "samples_per_second", "loop_step_seconds", "loss", "l2t_nll", "t2l_cosine"} <= set(effects)
    assert result["data_fingerprint"]
    assert result["environment"]["versions"]["torch"]


def test_steps_of_the_picture_are_whole() -> None:
    from matplotlib.figure import Figure

    axis = Figure().subplots()
    axis.plot([1, 19], [0, 1])
    picture._label(axis, "Loss", "step", "loss")
    assert all(float(tick).is_integer() for tick in axis.get_xticks())

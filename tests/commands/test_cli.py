"""The ``accel-train`` command: check, doctor, and the help of each."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from accel_train import __version__, cli, cores
from accel_train.config import UsageError, refuse_impossible
from accel_train.options.loading import load_config
from accel_train.options.tree import flatten, to_tree
from accel_train.speed.attention import table as attention_table
from recipes import mmdit
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "accelerate_configs"
RECIPE = str(ROOT / "recipes" / "mmdit.py")
CAUSAL_LM = str(ROOT / "recipes" / "causal_lm.py")
LORA = str(ROOT / "recipes" / "lora.py")


def call(*arguments: str) -> int:
    return cli._main(arguments)


@pytest.mark.parametrize(
    ("words", "missing"), [(["launch"], "recipe"), (["better", "a"], "B"), (["sample"], "RUN_OR_CHECKPOINT")]
)
def test_only_what_is_required_is_asked_for(words: list[str], missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    """argparse counts the flags of a recipe as required as well."""
    with pytest.raises(SystemExit):
        call(*words)
    assert capsys.readouterr().err.endswith(f"the following arguments are required: {missing}\n")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["plan", "mmdit", "--gpus", "1", "--vram_gib", "24", "--write", ""], "write"),
        (["simulate", "--picture", "", "mmdit"], "picture"),
        (["simulate", "mmdit", "--config_file", ""], "config_file"),
        (["drill", "mmdit", "--receipt", ""], "receipt"),
        (["better", "a", "b", "--recipe", ""], "recipe"),
        (["launch", "--config_file", "", "mmdit"], "config_file"),
        (["run", "--anywhere", "--config_file", "", "mmdit"], "config_file"),
        (["compare", "mmdit", "demo", "smoke", "--output", ""], "output"),
        (["verify", "--output", "", "mmdit"], "output"),
        (["report", "runs", "--output", ""], "output"),
        (["report", ""], "runs"),
        (["init", ""], "directory"),
    ],
    ids=" ".join,
)
def test_empty_text_is_refused(words: list[str], name: str) -> None:
    with pytest.raises(UsageError, match=f"^{name}: '': empty text is refused, .*; give a value, or leave it out$"):
        call(*words)


def test_a_path_that_no_file_system_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMED", "x" * 300)
    for name, words in {
        "place": ["checkpoints", "ls"],
        "runs": ["monitor", "here"],
        "output": ["report", "here", "--output"],
        "b": ["better", "here"],
        "write": ["plan", "mmdit", "base", "--gpus", "1", "--vram_gib", "24", "--write"],
    }.items():
        for place in (f"/tmp/{'x' * 300}", "x/" * 2500, "$NAMED"):
            with pytest.raises(UsageError, match=f"^{name}: .* is refused: the path is too long for the file system"):
                call(*words, place)
        with pytest.raises(UsageError, match=f"^{name}: '.NOT_SET/x': the variable NOT_SET is not set on "):
            call(*words, "$NOT_SET/x")
    # A URL may be long.
    refuse_impossible({"webhook": f"https://host/{'x' * 300}", "arguments": ["x" * 300], "place": "x" * 255})


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("blam runs/x", "blame"),
        ("checkpoints prun", "prune"),
        ("data chek x", "check"),
        ("checkpoints push x --revisions tags", "tag"),
        ("zzzz", None),
    ],
)
def test_a_misspelt_word_gets_a_proposal(words: str, meant: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        call(*words.split())
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "invalid choice: " in said
    assert said.endswith(f" (did you mean '{meant}'?)\n") if meant else "did you mean" not in said


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.yaml")))
@pytest.mark.parametrize("experiment", ["demo", "base", "l2t_qwen"])
def test_check_accepts_every_preset_with_every_experiment(
    preset: str, experiment: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # The file has a placeholder, which a check refuses.
    address = ["--main_process_ip", "10.0.0.1"] if preset == "multi_node" else []
    assert call("check", "--config_file", str(PRESETS / f"{preset}.yaml"), *address, RECIPE, experiment) == 0
    shown = capsys.readouterr().out
    assert "nothing was run; launch file and options are consistent" in shown
    assert not list(tmp_path.iterdir())


def test_check_warns_of_data_that_are_not_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Hub id may be anywhere, and a path that exists is not looked into."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.jsonl").write_text("")
    cases = {"nonexist.txt": True, "./some/folder": True, "data/*.jsonl": True, "here.jsonl": False, "*.jsonl": False}
    cases |= {"owner/name": False, "owner/name:plain": False, "demo": False, "data[1].jsonl": False}
    (tmp_path / "data[1].jsonl").write_text("")
    for value, warns in cases.items():
        for option in ("--data.path", "--data.heldout_path"):
            assert call("check", RECIPE, "demo", option, value) == 0
            shown = capsys.readouterr().out
            missing = f"warning: {option[2:]}: {value}: there is no such file or folder on this machine"
            assert (missing in shown) == warns, (option, value)
            assert "everything" not in shown
    flags = ("--data.path", "here.jsonl", "--data.more_paths", "more.jsonl", "owner/name")
    assert call("check", CAUSAL_LM, "causal_lm_demo", *flags) == 0
    shown = capsys.readouterr().out
    assert "warning: data.more_paths: more.jsonl: there is no such file" in shown
    assert shown.count("there is no such file") == 1
    flags = ("--data.tokenizer", "/nope/tokenizer", "--data.cache_dir", "/made/by/the/start")
    assert call("check", CAUSAL_LM, "causal_lm_demo", *flags) == 0
    shown = capsys.readouterr().out
    assert "warning: data.tokenizer: /nope/tokenizer: there is no such file" in shown
    assert shown.count("there is no such file") == 1
    flags = ("--data.path", "emoji", "--data.prior.path", "./class", "--data.prior.caption", "a dog")
    for count, warns in ((0, True), (200, False)):
        # The base draws the pictures that are not there.
        assert call("check", LORA, "lora_demo", *flags, "--data.prior.count", str(count)) == 0
        assert ("data.prior.path: ./class: there is no such file" in capsys.readouterr().out) == warns


def test_check_warns_of_a_variable_that_is_not_set_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start would refuse the path, but the machine that trains may have the variable."""
    monkeypatch.chdir(tmp_path)
    flags = ("--output_dir", "$NOT_SET/run", "--data.cache_dir", "$HOME/cache")
    for words in (("check",), ("check", "--json")):
        assert call(*words, RECIPE, "demo", *flags) == 0
        shown = capsys.readouterr().out
        assert shown.count("the variable NOT_SET is not set on ") == 1
        assert ("  warning: output_dir: '$NOT_SET/run': the variable" in shown) == (len(words) == 1)


def test_check_refuses_the_config_of_a_moved_run(tmp_path: Path) -> None:
    """As a start does, where neither ``--output_dir`` nor ``--smoke`` names another directory."""
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "run.json").write_text("{}")
    config = moved / "config.yaml"
    config.write_text(f"max_steps: 8\nglobal_batch_size: 8\noutput_dir: {tmp_path / 'old'}\n")
    with pytest.raises(UsageError, match=f"{config}: output_dir: .*old is not {moved}, the directory of the run"):
        call("check", RECIPE, str(config))
    assert call("check", RECIPE, str(config), "--output_dir", str(moved)) == 0
    assert call("check", RECIPE, str(config), "--smoke") == 0


def test_check_says_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(PRESETS / "fsdp2.yaml")
    flags = ("--global_batch_size", "60", "--micro_batch_size", "4", "--precision", "bf16")
    assert call("check", "--config_file", file, "--num_processes", "4", RECIPE, "demo", *flags) == 0
    shown = capsys.readouterr().out
    assert "strategy fsdp2, 4 process(es) on 1 machine(s)" in shown
    assert "global batch 60 = 4 process(es) x 4 micro-batch(es) of at most 4; precision bf16" in shown
    assert "optimizer.lr" in shown
    assert "# command line" in shown
    assert "checkpoints.keep_last" not in shown  # at its default, like the options that the last line counts
    listed = shown.count("  # ")
    total = len(flatten(to_tree(load_config(mmdit.Config, ["demo"], presets=ROOT / "recipes" / "presets").config)))
    assert f"and {total - listed} options at their defaults: python {shlex.quote(RECIPE)} demo " in shown


FILES = {
    "precision": "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: fp16\n",
    "clipping": (
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 2, gradient_clipping: 0.5}\n"
    ),
    "accumulation": (
        "distributed_type: DEEPSPEED\nnum_processes: 2\n"
        "deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 8}\n"
    ),
    "dynamo": "distributed_type: MULTI_GPU\nnum_processes: 2\ndynamo_config: {dynamo_backend: EAGER}\n",
    "typo": "distributed_type: MULTI_GPU\nnum_process: 2\n",
    "many": "distributed_type: MULTI_GPU\nnum_processes: 65\n",
    "good": "distributed_type: MULTI_GPU\nnum_processes: 2\n",
}


@pytest.mark.parametrize(
    ("file", "arguments", "says"),
    [
        ("precision", "demo", r"mixed_precision: fp16 in .*precision\.yaml contradicts precision: fp32"),
        ("clipping", "demo", r"gradient_clipping: 0\.5 .*clipping\.yaml contradicts .*gives 1\.0"),
        ("accumulation", "demo", r"gradient_accumulation_steps: 8 .*give 1"),
        ("dynamo", "demo", r"dynamo backend 'eager'"),
        ("typo", "demo", r"num_process.*num_processes"),
        ("many", "demo", r"global_batch_size: 64 is smaller than the 65 processes"),
        ("good", "dmeo", r"preset 'dmeo' does not exist"),
        ("good", "demo --seed=-1", r"seed: -1 is refused"),
        ("good", "demo --gradient_accumulation_steps 4", r"a name from other scripts"),
    ],
)
def test_check_refuses_what_a_start_would(file: str, arguments: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / f"{file}.yaml"
    path.write_text(FILES[file])
    with pytest.raises(UsageError, match=says):
        call("check", "--config_file", str(path), RECIPE, *arguments.split())


def test_check_agrees_where_file_and_experiment_say_the_same(tmp_path: Path) -> None:
    for file, flags in (
        ("precision", ("--precision", "fp16")),
        ("clipping", ("--optimizer.max_grad_norm", "0.5")),
        ("accumulation", ("--micro_batch_size", "4")),
    ):
        path = tmp_path / f"{file}.yaml"
        path.write_text(FILES[file])
        assert call("check", "--config_file", str(path), RECIPE, "demo", *flags) == 0


def test_check_refuses_what_is_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("x = 1\n")
    (tmp_path / "preset.yaml").write_text("seed: 1\n")
    for name, says in (
        ("none.py", "there is no such file"),
        ("other.py", "it defines no main"),
        ("preset.yaml", "not a recipe; a Python file is required, and options follow it: RECIPE .*preset.yaml"),
    ):
        with pytest.raises(UsageError, match=says):
            call("check", "--config_file", str(PRESETS / "ddp.yaml"), str(tmp_path / name))


@pytest.mark.distributed
def test_ctrl_c_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    # In the place of a person who waits for its imports.
    # A shell's `&` ignores the signal in all that it starts, and so would this test.
    recipe.write_text(
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nsignal.raise_signal(signal.SIGINT)\n"
    )
    command = [sys.executable, "-m", "accel_train.cli", "check", str(recipe)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_doctor_reports(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_TIMEOUT", "9999")
    assert call("doctor") == 0
    shown = capsys.readouterr().out
    for heading in ("versions:", "devices:", "can run:", "settings:"):
        assert f"{heading}\n" in shown
    assert f"torch {torch.__version__}" in shown
    assert "--collective_timeout_seconds" in shown
    assert "WARNING: NCCL_TIMEOUT=9999 is read by neither NCCL nor torch" in shown
    if not torch.cuda.is_available():
        assert "fsdp2: in rehearsal only (no GPU here)" in shown
        assert "precision: fp32, bf16\n" in shown


def test_doctor_knows_the_quota_of_a_container(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    monkeypatch.setattr(cores, "ROOT", tmp_path)
    monkeypatch.setattr(cores, "OWN", tmp_path / "none")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(24)), raising=False)
    assert call("doctor") == 0
    assert "cpu: 1 cores usable (cgroup quota 1), " in capsys.readouterr().out


def test_doctor_tries_every_kernel_of_attention(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("doctor", "--attention") == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines if line.startswith("  ")}
    assert list(rows) == list(attention_table.NAMES)
    assert re.search(r" ms  error \d.+ forward, .+ backward", rows["sdpa_math"])
    if not torch.cuda.is_available():
        assert "no: it needs a cuda device, and this one is cpu" in rows["flash"]


def test_doctor_names_a_path_at_which_compilation_breaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "prefix", "/home/me/my venv")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/a b")
    assert call("doctor") == 0
    found = capsys.readouterr().out
    assert "WARNING: the Python environment '/home/me/my venv' contains a space" in found
    assert "WARNING: TORCHINDUCTOR_CACHE_DIR '/tmp/a b' contains a space" in found


@pytest.mark.parametrize("command", ["launch", "rehearse", "check"])
def test_help_of_each_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        call(command, "--help")
    assert left.value.code == 0
    shown = capsys.readouterr().out
    for flag in ("--config_file", "--num_processes", "--machine_rank", "--main_process_ip", "--main_process_port"):
        assert flag in shown


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call("--help")
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("doctor", "launch", "rehearse", "check"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        call("--version")
    assert left.value.code == 0
    assert Version(capsys.readouterr().out.strip()) == Version(__version__)


@pytest.mark.parametrize("arguments", [[], ["lunch"], ["check"], ["rehearse", "recipes/mmdit.py"]])
def test_a_wrong_command_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        call(*arguments)
    assert left.value.code == 2
    assert "usage: accel-train" in capsys.readouterr().err


def test_the_process_ends_with_2_and_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "accel_train.cli", "check", "--config_file", "none.yaml", RECIPE],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error (wrong usage, exit code 2): ")
    assert "none.yaml" in done.stderr
    assert len(done.stderr.splitlines()) == 1

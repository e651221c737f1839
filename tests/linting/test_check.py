"""``accel-train check``: findings, exit codes, JSON, explanations, and --fix of a person's file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accel_train import cli
from accel_train.config import UsageError
from accel_train.options.loading import load_config
from accel_train.startup import start
from recipes import causal_lm, mmdit

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "recipes" / "presets"
RECIPE = str(ROOT / "recipes" / "mmdit.py")
GPU = str(ROOT / "accelerate_configs" / "ddp.yaml")
ERROR = ("--compile.mode", "on", "--compile.optimize", "reduce-overhead", "--micro_batch_size", "8")
MINE = """\
# mine
output_dir: runs/mine
max_steps: 1500
log: {log_every: 1500}  # by hand
optimizer: {betas: [0.99, 0.9]}
checkpoints:
  keep_last: 1   # small disk
"""


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCEL_TRAIN_IGNORE", "OMP_NUM_THREADS", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)


def check(*arguments: str, file: str = GPU) -> int:
    return cli._main(["check", "--config_file", file, *arguments])


def test_exit_codes_of_nothing_a_warning_and_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(RECIPE, "demo") == 0
    assert capsys.readouterr().out.endswith("\nno findings\n")
    assert check(RECIPE, "demo", "--checkpoints.keep_last", "1") == 0
    shown = capsys.readouterr().out
    assert (
        "\nfindings: 0 error(s), 1 warning(s)\n  warning one-checkpoint: checkpoints.keep_last: 1\n    why: " in shown
    )
    assert check(RECIPE, "demo", *ERROR, "--checkpoints.keep_last", "1") == 2
    shown = capsys.readouterr().out
    assert shown.index("error cuda-graphs-with-accumulation") < shown.index("warning one-checkpoint")


@pytest.mark.parametrize("line", causal_lm.OWN_ROWS)
def test_what_a_demo_proposes_next_has_its_data_and_no_finding(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, command = line.partition("accelerate launch ")
    arguments = command.split()
    assert {"--data.path", "--output_dir"} <= {*arguments}
    assert check(str(ROOT / arguments[0]), *arguments[1:]) == 0
    assert "no findings" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--profile.steps", "900:910"], r"profile\.steps: 900:910: the run has max_steps 150, so STOP"),
        (["--log.trackers", "nope"], r"log\.trackers: 'nope' is not a tracker"),
        (["--attention", "flush"], r"attention 'flush': is not known"),
        (["--allow", "sead"], r"allow: 'sead' is not an option .*'seed'"),
        (["--overwrite", "--resume", "must"], r"overwrite: true deletes"),
    ],
)
def test_what_a_start_refuses_by_its_options_is_refused_in_the_same_words(flags: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says) as checked:
        check(RECIPE, "demo", "--max_steps", "150", *flags)
    config = load_config(mmdit.Config, ["demo", "--max_steps", "150", *flags], presets=PRESETS).config
    with pytest.raises(UsageError) as started:
        start(config)
    assert str(started.value) == str(checked.value)


@pytest.mark.parametrize(
    ("file", "flags", "says"),
    [
        (
            "fsdp2",
            "--distributed.bucket_cap_mb 50",
            r"distributed\.bucket_cap_mb: 50: applies to DDP only, and this run uses fsdp2",
        ),
        (
            "zero2_offload",
            "--distributed.static_graph",
            r"distributed\.static_graph: True: applies to DDP only, and this run uses zero",
        ),
        (
            "single_gpu",
            "--distributed.comm_hook powersgd",
            r"distributed\.comm_hook: powersgd: .*and this run uses single",
        ),
        (
            "ddp",
            "--distributed.fsdp2_prefetch 2",
            r"distributed\.fsdp2_prefetch: 2: applies to FSDP2 only, and this run uses ddp",
        ),
        ("ddp", "--distributed.static_graph --micro_batch_size 8", r"static_graph: true with 4 micro-batches"),
        ("cpu", "--distributed.comm_hook bf16", r"distributed\.comm_hook: bf16 needs NCCL"),
        (
            "fsdp2",
            "--optimizer.name torch.optim:NAdam",
            r"optimizer\.name: .*NAdam does not run under fsdp2 in fp32: a",
        ),
        ("zero2_offload", "--optimizer.name muon --precision bf16", r"muon does not run under zero2 in bf16: ZeRO"),
        ("ddp", "--optimizer.name adamw_offload", r"adamw_offload does not run under ddp in fp32: it keeps"),
        ("zero2_offload", "--health.spike_factor 9 --health.spike skip", r"health\.spike: skip: under zero2 DeepSpeed"),
        ("zero3_offload", "--health.non_finite skip --precision fp16", r"non_finite: skip under zero3 with precision"),
        ("ddp", "--health.non_finite skip --distributed.comm_hook powersgd", r"powersgd: the hook carries"),
        ("zero3_offload", "--float8 tensorwise --precision bf16", r"float8: tensorwise runs under single, ddp, fsdp2"),
        ("fsdp2", "--float8 tensorwise", r"float8: tensorwise with precision fp32"),
        ("fsdp2", "--offload_frozen", r"offload_frozen: fsdp2 divides or moves the weights"),
        ("own", "", r"fsdp_activation_checkpointing: true in .*own\.yaml would rename"),
    ],
)
def test_what_a_start_refuses_of_options_and_launch_file_is_refused(
    file: str, flags: str, says: str, tmp_path: Path
) -> None:
    own = {
        "own": "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true}\n",
        "cpu": "distributed_type: MULTI_CPU\nuse_cpu: true\n",
    }
    path = Path(GPU).with_name(f"{file}.yaml")
    if file in own:
        path = tmp_path / f"{file}.yaml"
        path.write_text(f"{own[file]}num_processes: 2\n")
    with pytest.raises(UsageError, match=says):
        check(RECIPE, "demo", "--precision", "fp32", *flags.split(), file=str(path))


def test_an_optimizer_class_of_the_recipe_or_of_a_missing_package_is_left_to_the_start() -> None:
    for name in ("__main__:Defined", "no_such_package:Nope"):
        assert check(RECIPE, "demo", "--optimizer.name", name) == 0


def test_a_ddp_file_of_one_process_is_checked_as_the_single_process_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_processes: 1\n")
    assert check(RECIPE, "demo", "--optimizer.name", "adamw_offload", file=str(path)) == 0
    assert "no findings" in capsys.readouterr().out


def test_names_are_silenced_by_flag_and_by_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check("--ignore", "cuda-graphs-with-accumulation", RECIPE, "demo", *ERROR) == 0
    assert capsys.readouterr().out.endswith("\nno findings\n")
    monkeypatch.setenv("ACCEL_TRAIN_IGNORE", "cuda-graphs-with-accumulation")
    assert check(RECIPE, "demo", *ERROR) == 0
    with pytest.raises(UsageError, match=r"rule 'one-checkpoints': there is no such rule \(did you mean 'one-checkp"):
        check("--ignore", "one-checkpoints", RECIPE, "demo")


def test_findings_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--json", RECIPE, "demo", *ERROR) == 2
    shown = json.loads(capsys.readouterr().out)
    assert (shown["strategy"], shown["num_processes"], shown["accumulation_steps"]) == ("ddp", 2, 4)
    (finding,) = shown["findings"]
    assert finding["name"] == "cuda-graphs-with-accumulation"
    assert finding["severity"] == "error"
    assert finding["source"] == "pytorch#169545"
    assert finding["change"] == {"option": "compile.optimize", "value": "default"}


def test_a_command_line_explains_a_rule_without_a_recipe_and_without_torch() -> None:
    program = (
        "import sys; from accel_train import cli\n"
        "try: cli._main(['check', '--explain', 'forced-protocol'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("forced-protocol (warning)\n  NCCL chooses protocols by what the platform supports.")


def test_a_file_is_fixed_and_keeps_its_comments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(MINE)
    timeouts = ("--collective_timeout_seconds", "30", "--loader.timeout_seconds", "15")
    assert check("--fix", RECIPE, str(file), *timeouts) == 0
    shown = capsys.readouterr().out
    given = "--collective_timeout_seconds is given on the command line: give 1800 there\n"
    assert f"short-collective-timeout: {given}" in shown
    assert "\n-  keep_last: 1   # small disk\n+  keep_last: 3   # small disk\n" in shown
    assert f"{file} is changed; the original is kept as mine.yaml.orig\n" in shown
    # Other betas would be another experiment.
    assert "findings: 0 error(s), 2 warning(s)\n  warning short-collective-timeout" in shown
    assert "\n  warning swapped-betas: optimizer.betas: [0.99, 0.9]\n" in shown
    fixed = MINE.replace("log_every: 1500", "log_every: 15").replace("keep_last: 1 ", "keep_last: 3 ")
    assert file.read_text() == fixed
    assert (tmp_path / "mine.yaml.orig").read_text() == MINE
    config = load_config(mmdit.Config, [str(file)], presets=PRESETS).config
    assert (config.log.log_every, config.checkpoints.keep_last) == (15, 3)
    assert check("--fix", RECIPE, str(file)) == 0
    assert capsys.readouterr().out.startswith(f"nothing to fix in {file}\n")


def test_a_file_that_a_start_would_then_refuse_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(MINE)
    monkeypatch.setattr("accel_train.commands.check.fix_file", _break_file)
    with pytest.raises(
        UsageError, match=r"--fix: .*mine\.yaml is left as it was, because a start would refuse .*keep_lost"
    ):
        check("--fix", RECIPE, str(file))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]
    assert file.read_text() == MINE


def _break_file(path: Path, changes: object, copy: Path) -> str:
    shutil.copy(path, copy)
    path.write_text("checkpoints: {keep_lost: 3}\n")
    return str(changes)


def test_what_a_fix_lets_another_rule_find_is_fixed_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.yaml"
    text = "max_steps: 2000\ncheckpoints: {save_every: 5000, keep_last: 1, asynchronous: false}\n"
    file.write_text(text)
    assert check("--fix", RECIPE, str(file)) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("no findings\n")
    assert shown.count("\n+checkpoints: {save_every: 200, keep_last: 3, asynchronous: true}\n") == 1
    assert shown.count("is changed; the original is kept as a.yaml.orig\n") == 1
    # A later one takes the next free name.
    for number in (1, 2):
        file.write_text(text.replace("2000", f"{number}000"))
        assert check("--fix", RECIPE, str(file)) == 0
        assert f"is changed; the original is kept as a.yaml.orig.{number}\n" in capsys.readouterr().out
        assert (tmp_path / f"a.yaml.orig.{number}").read_text() == text.replace("2000", f"{number}000")
    assert (tmp_path / "a.yaml.orig").read_text() == text
    assert len(list(tmp_path.iterdir())) == 4


def test_bundled_presets_are_not_changed(tmp_path: Path) -> None:
    before = (PRESETS / "demo.yaml").read_bytes()
    link = tmp_path / "linked.yaml"
    link.symlink_to(PRESETS / "demo.yaml")
    for source in (["demo"], [], [str(PRESETS / "demo.yaml")], [str(link)]):
        with pytest.raises(UsageError, match=r"is a bundled preset, .* copy it, as in `cp .*\.yaml my\.yaml`"):
            check("--fix", RECIPE, *source, "--checkpoints.keep_last", "1")
    assert (PRESETS / "demo.yaml").read_bytes() == before
    assert not [path for path in os.listdir(PRESETS) if path.endswith(".orig")]


def test_a_machine_without_accelerators_says_nothing_of_the_one_that_trains(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check(RECIPE, "demo") == 0
    assert "this machine has no accelerator: rules about cores, memory and disks were not applied\n" in (
        capsys.readouterr().out
    )
    assert check(RECIPE, "demo", file=str(ROOT / "accelerate_configs" / "single_gpu.yaml")) == 0
    assert "this machine has no accelerator" not in capsys.readouterr().out

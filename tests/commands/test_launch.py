"""Our launcher: the command and environment of each launch file, exit codes that survive, signals that arrive."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.commands.check import check
from accel_train.commands.launch import (
    Launch,
    accelerate_environment,
    accelerate_settings,
    free_port,
    launch,
    read_machine,
    torchrun_command,
)
from accel_train.config import UsageError
from accel_train.launch_files.machine_config import read_machine_config, visible_machine
from accel_train.launch_files.other_launchers import refuse_other_launchers
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "accelerate_configs"
RECIPE = ROOT / "recipes" / "mmdit.py"


def planned(preset: str, **changes: Any) -> tuple[list[str], dict[str, str]]:
    """Command and environment, with nothing started."""
    request = Launch(str(PRESETS / f"{preset}.yaml"), str(RECIPE), ("base",), **changes)
    machine = read_machine_config(PRESETS / f"{preset}.yaml", num_processes=request.num_processes)
    settings = accelerate_settings(PRESETS / f"{preset}.yaml", machine, request)
    environment = accelerate_environment(settings)
    return torchrun_command(settings, single=machine.strategy == "single"), environment


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "ACCEL_TRAIN_")) or name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            monkeypatch.delenv(name)


def test_one_process_is_plain_python() -> None:
    command, environment = planned("single_gpu")
    assert command == [sys.executable]
    assert environment.get("ACCELERATE_USE_FSDP", "false") == "false"
    assert environment.get("ACCELERATE_USE_DEEPSPEED", "false") == "false"


TORCHRUN = [sys.executable, "-m", "accel_train.cli.torchrun", "--nproc_per_node"]


@pytest.mark.parametrize(
    ("preset", "processes", "said"),
    [
        ("ddp", 2, {"ACCELERATE_MIXED_PRECISION": "no"}),
        ("fsdp2", 2, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "false"}),
        ("fsdp2_offload", 1, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}),
        (
            "zero2_offload",
            1,
            {
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
            },
        ),
        (
            "zero3_offload",
            1,
            {
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
            },
        ),
    ],
)
def test_each_file_becomes_its_command_and_environment(preset: str, processes: int, said: dict[str, str]) -> None:
    command, environment = planned(preset)
    assert command[:5] == [*TORCHRUN, str(processes)]
    assert command[5:8] == ["--master_addr", "127.0.0.1", "--master_port"]
    assert {name: environment.get(name) for name in said} == said
    assert environment["ACCELERATE_MIXED_PRECISION"] == "no"
    assert environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() == "no"


def test_flags_go_over_the_file() -> None:
    command, _ = planned("fsdp2", num_processes=6, main_process_port=29777)
    assert command[4] == "6"
    assert command[-1] == "29777"


def test_a_file_without_a_number_of_processes_needs_a_flag(tmp_path: Path) -> None:
    """Accelerate's own words for it were a traceback. One process needs no number."""
    file = tmp_path / "launch.yaml"
    file.write_text("distributed_type: MULTI_GPU\n")
    request = Launch(str(file), str(RECIPE), ("base",))
    says = rf"{file}: `num_processes` is missing; it must be a whole number.* give --num_processes N"
    for start in (launch, lambda asked: launch(asked, rehearsal=True), check):
        with pytest.raises(UsageError, match=says):
            start(request)
    asked = Launch(str(file), str(RECIPE), ("base",), num_processes=2)
    settings = accelerate_settings(file, read_machine_config(file, num_processes=2), asked)
    assert settings.num_processes == 2
    file.write_text("distributed_type: 'NO'\n")
    assert accelerate_settings(file, read_machine_config(file), request).num_processes == 1


@pytest.mark.parametrize("preset", ["fsdp2", "ddp"])
def test_settings_for_devices_are_refused_before_a_process_starts(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes refuse it too, under `accelerate launch`, but each only after its start."""
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    request = Launch(str(PRESETS / f"{preset}.yaml"), str(RECIPE), ("base",), num_processes=4)
    with pytest.raises(UsageError, match=rf"distributed_type: {preset} .*{preset}\.yaml, but .* no accelerator device"):
        launch(request)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(
        UsageError, match="num_processes: 4 processes on this machine need one device each, but only 2 are"
    ):
        launch(request)


def test_two_launches_on_one_machine_do_not_meet() -> None:
    assert planned("ddp")[0][-1] != planned("ddp")[0][-1]
    assert 1024 < free_port() < 65536


def test_a_machine_of_several_is_told_where_to_meet() -> None:
    command, _ = planned("multi_node", machine_rank=1, main_process_ip="10.0.0.1")
    assert command == [
        *(*TORCHRUN, "8", "--nnodes", "2", "--node_rank", "1"),
        *("--master_addr", "10.0.0.1", "--master_port", "29500"),
    ]


def test_a_check_refuses_the_placeholder_for_the_address_of_machine_0() -> None:
    """A launch would refuse it as well. The address may also come from the flag."""
    file, arguments = str(PRESETS / "multi_node.yaml"), ("base", "--data.path", "my.jsonl")
    with pytest.raises(
        UsageError,
        match=r"yaml:\d+:1: `main_process_ip: first-machine\.invalid`: must be .* give it as --main_process_ip",
    ):
        check(Launch(file, str(RECIPE), arguments))
    assert "16 process(es) on 2 machine(s)" in check(Launch(file, str(RECIPE), arguments, main_process_ip="10.0.0.1"))
    with pytest.raises(
        UsageError, match=r"^--main_process_ip first\.invalid: must be the address or name of machine 0"
    ):
        check(Launch(file, str(RECIPE), arguments, main_process_ip="first.invalid"))


def test_a_recipe_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"recipe 'none\.py': there is no such file"):
        launch(Launch(str(PRESETS / "ddp.yaml"), "none.py"))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "one.yaml").write_text("distributed_type: 'NO'\nnum_processes: 1\n")
    (tmp_path / "two.yaml").write_text("distributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 2\n")
    return tmp_path


WORKER = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from accel_train.config import UsageError
from accel_train.runtime.exiting import run_main

def main(argv):
    if argv[0] == "usage":
        raise UsageError("--x 1: must be 2; write 2")
    if argv[0] == "connect":
        from accel_train.runtime.accelerator import build_accelerator
        accelerator = build_accelerator(precision="fp32", global_batch_size=4, micro_batch_size=2, max_grad_norm=1.0,
            collective_timeout_seconds=77)
        import torch
        group = torch.distributed.distributed_c10d._get_default_group()
        seconds = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        print(f"rank {{accelerator.process_index}} of {{accelerator.num_processes}}: {{seconds:g}} s, "
              f"DeepSpeed {{os.environ['DEEPSPEED_TIMEOUT']}} min", flush=True)
        accelerator.wait_for_everyone()  # one that leaves first would cut the connection of the other
        return 0
    if argv[0] == "save":  # as a recipe does: it takes a while after the signal
        import pathlib, signal, time
        def save(*_):
            time.sleep(1)
            pathlib.Path(__file__).with_name("saved").touch()
            sys.exit(75)
        signal.signal(signal.SIGINT, save)
        os.write(1, b"ready\\n")
        time.sleep(60)
    if argv[0] == "finish":  # a stop after the last step: there is nothing left to do
        import signal, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        os.write(1, b"ready\\n")
        time.sleep(1800)
    if argv[0] == "wait":
        import signal, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        os.write(1, b"ready\\n")  # in one piece, beside the other process
        time.sleep(1800)
    if argv[0] == "again":
        from accel_train.runtime.exiting import StartAgain
        if os.environ["RANK"] == "1":
            raise StartAgain("step 3 ran out of memory")
        return 1
    return int(argv[0]) if os.environ.get("RANK", "0") == os.environ.get("FAILING_RANK", "0") else 0

run_main(main)
"""


@pytest.fixture
def worker(files: Path) -> str:
    path = files / "worker.py"
    path.write_text(WORKER)
    return str(path)


@pytest.mark.parametrize(("argument", "code"), [("0", 0), ("75", 75), ("usage", 2), ("3", 3)])
def test_the_exit_code_of_one_process(argument: str, code: int, files: Path, worker: str) -> None:
    assert launch(Launch(str(files / "one.yaml"), worker, (argument,))) == code


@pytest.mark.slow  # tests/faults/test_signals.py has 75 of two processes, and test_out_of_memory.py the code in between
@pytest.mark.distributed
@pytest.mark.parametrize(("argument", "code"), [("75", 75), ("usage", 2)])
def test_the_exit_code_survives_torchrun(argument: str, code: int, files: Path, worker: str) -> None:
    assert launch(Launch(str(files / "two.yaml"), worker, (argument,)), rehearsal=True) == code


@pytest.mark.distributed
def test_a_rehearsal_connects_with_the_timeout_that_was_asked_for(
    files: Path, worker: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(Launch(str(files / "two.yaml"), worker, ("connect",)), rehearsal=True) == 0
    shown = capfd.readouterr().out
    assert "REHEARSAL of" in shown
    for rank in (0, 1):
        assert f"rank {rank} of 2: 77 s, DeepSpeed 2 min" in shown


@pytest.mark.slow  # tests/test_bad_input.py has what a start with such a file answers
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("mixed_precision: bf16", "mixed_precision: bf16 in .* contradicts precision: fp32"),
        ("dynamo_config: {dynamo_backend: EAGER}", "dynamo backend 'eager' in "),
    ],
)
def test_what_the_file_says_of_the_experiment_is_not_lost_on_the_way(
    line: str, says: str, files: Path, worker: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (files / "more.yaml").write_text(f"distributed_type: 'NO'\nnum_processes: 1\n{line}\n")
    assert launch(Launch(str(files / "more.yaml"), worker, ("connect",))) == 2
    assert re.search(says, capfd.readouterr().err)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("number", "file"),
    [
        (signal.SIGHUP, "one.yaml"),
        # Two processes are in tests/faults/test_signals.py every day.
        pytest.param(signal.SIGTERM, "two.yaml", marks=pytest.mark.slow),
        # Implied by those above: the launcher passes on each signal in the same way, and torchrun one of them.
        pytest.param(signal.SIGTERM, "one.yaml", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "one.yaml", marks=pytest.mark.slow),  # and Ctrl-C is below
        pytest.param(signal.SIGINT, "two.yaml", marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, "two.yaml", marks=pytest.mark.slow),
    ],
)
def test_a_signal_reaches_the_recipe(number: signal.Signals, file: str, files: Path, worker: str) -> None:
    heard = "SIGTERM" if number == signal.SIGHUP else number.name
    Path(worker).write_text(WORKER.replace("signal.SIGTERM", f"signal.{heard}"))
    command = "launch" if file == "one.yaml" else "rehearse"
    head = [sys.executable, "-m", "accel_train.cli", command, "--config_file", str(files / file)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

    def hears() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # though these tests may run under nohup

    with subprocess.Popen(
        [*head, worker, "wait"], env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=hears
    ) as child:
        assert child.stdout is not None
        waiting = 1 if file == "one.yaml" else 2
        while waiting:
            line = child.stdout.readline()
            assert line, "it ended before it was ready"
            waiting -= line == "ready\n"
        child.send_signal(number)
        assert child.wait(timeout=PATIENCE_SECONDS) == 75


@pytest.mark.distributed
@pytest.mark.slow  # two launchers with torchrun; quick tests start one machine again
def test_of_several_machines_none_starts_again_alone(files: Path, worker: str) -> None:
    """It would wait for launchers that have ended. A scheduler starts all of them."""
    port = free_port()
    (files / "hosts.yaml").write_text(
        "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 2\nmain_process_ip: 127.0.0.1\n"
        f"main_process_port: {port}\nmachine_rank: 0\nrdzv_backend: static\nsame_network: true\n"
    )
    head = [sys.executable, "-m", "accel_train.cli", "launch", "--config_file", str(files / "hosts.yaml")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    launchers = [
        subprocess.Popen([*head, "--machine_rank", str(rank), worker, "again"], env=environment) for rank in (0, 1)
    ]
    codes = [launcher.wait(timeout=PATIENCE_SECONDS) for launcher in launchers]
    assert codes == [1, 75]


@pytest.mark.distributed
def test_a_stop_that_finds_the_run_finished_is_no_failure(files: Path, worker: str) -> None:
    """torchrun answers every signal with 1, also where both processes end with 0."""
    head = [sys.executable, "-m", "accel_train.cli", "rehearse", "--config_file", str(files / "two.yaml")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([*head, worker, "finish"], env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        waiting = 2
        while waiting:
            line = child.stdout.readline()
            assert line, "it ended before it was ready"
            waiting -= line == "ready\n"
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=PATIENCE_SECONDS) == 0


SLOW_START = """
import subprocess, sys
from accel_train.commands.launch import Launch, launch

class Slow(subprocess.Popen):
    def __init__(self, *words, **options):
        super().__init__(*words, **options)
        sys.stdin.read()  # the recipe runs before the launcher has heard that it does, as on a busy machine

subprocess.Popen = Slow
sys.exit(launch(Launch(sys.argv[1], sys.argv[2], ("save",))))
"""


@pytest.mark.parametrize("start", ["quick", "slow"])
def test_ctrl_c_gives_the_prompt_back_after_the_save(start: str, files: Path, worker: str) -> None:
    """A terminal sends SIGINT to the launcher and the recipe at once, and shows its prompt when the launcher ends."""
    file = str(files / "one.yaml")
    quick = [sys.executable, "-m", "accel_train.cli", "launch", "--config_file", file, worker, "save"]
    command = quick if start == "quick" else [sys.executable, "-c", SLOW_START, file, worker]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=environment, process_group=0, **pipes) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        os.killpg(child.pid, signal.SIGINT)
        shown = child.communicate(timeout=PATIENCE_SECONDS)
        assert (child.returncode, shown) == (75, (b"", b""))
        assert (files / "saved").exists()


@pytest.mark.parametrize(
    ("accelerators", "asked", "kind", "processes", "says"),
    [
        (0, None, "NO", 1, "one process, CPU (no accelerator is visible)"),
        (0, 2, "MULTI_CPU", 2, "2 processes, DDP, CPU (as --num_processes says)"),
        (1, None, "NO", 1, "one process, accelerator (as many as there are accelerators)"),
        (4, None, "MULTI_GPU", 4, "4 processes, DDP, accelerator (as many as there are accelerators)"),
        (4, 1, "NO", 1, "one process, accelerator (as --num_processes says)"),
    ],
)
def test_without_a_file_the_visible_accelerators_count(
    accelerators: int, asked: int | None, kind: str, processes: int, says: str, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path))
        patch.setattr(torch.accelerator, "is_available", lambda: accelerators > 0)
        patch.setattr(torch.accelerator, "device_count", lambda: accelerators)
        path, machine, words = read_machine(Launch(None, str(RECIPE), num_processes=asked))
    assert path is None
    assert (machine.distributed_type, machine.num_processes, machine.use_cpu) == (kind, processes, not accelerators)
    assert words is not None
    assert words.endswith(says)


def test_without_a_file_more_processes_than_accelerators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(UsageError, match=r"num_processes: 3 without a launch file: .* 2 are visible"):
        visible_machine(3)


def test_the_default_file_of_accelerate_config_is_read_and_named(
    files: Path, worker: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", str(files))
    assert launch(Launch(None, worker, ("75",))) == 75
    assert "no --config_file and no default file" in capfd.readouterr().out
    (files / "accelerate").mkdir()
    default = (files / "one.yaml").rename(files / "accelerate" / "default_config.yaml")
    assert launch(Launch(None, worker, ("75",))) == 75
    assert capfd.readouterr().out == f"no --config_file: {default} is read, the default file of `accelerate config`\n"
    with pytest.raises(UsageError, match=r"--machine_rank 1: must be 0 to 0, because num_machines is 1"):
        launch(Launch(None, worker, machine_rank=1))


@pytest.mark.distributed
@pytest.mark.parametrize("given", [False, True])
def test_a_port_that_is_in_use(given: bool, files: Path, worker: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A rehearsal takes another than the file's; one that a flag names is refused, and a launch refuses both."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (files / "two.yaml").open("a") as file:
            file.write(f"main_process_port: {port}\n")
        request = Launch(str(files / "two.yaml"), worker, ("0",), main_process_port=port if given else None)
        for rehearsal in (False, True):
            if rehearsal and not given:
                assert launch(request, rehearsal=True) == 0
                continue
            with pytest.raises(UsageError, match=r"main_process_port.* must be a free port .* give another"):
                launch(request, rehearsal=rehearsal)


def test_a_deepspeed_file_gives_its_own_keys(tmp_path: Path) -> None:
    """Accelerate refuses those that stand in the environment and must be in DeepSpeed's own file."""
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}')
    file = tmp_path / "zero.yaml"
    file.write_text(
        "distributed_type: DEEPSPEED\nnum_machines: 1\nnum_processes: 2\n"
        f"deepspeed_config: {{deepspeed_config_file: {tmp_path / 'ds.json'}, zero3_init_flag: false}}\n"
    )
    settings = accelerate_settings(file, read_machine_config(file), Launch(str(file), str(RECIPE)))
    given = accelerate_environment(settings)["ACCELERATE_CONFIG_DS_FIELDS"]
    assert set(given.split(",")) == {"deepspeed_config_file", "zero3_init_flag"}


MPIRUN = "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\nmpirun_config: {mpirun_hostfile: hosts}\n"
ZERO_ON_TWO = (
    "distributed_type: DEEPSPEED\nnum_machines: 2\nmachine_rank: 0\nnum_processes: 2\nmain_process_ip: 127.0.0.1\n"
    "main_process_port: 29511\ndeepspeed_config:\n  zero_stage: 2\n"
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MPIRUN, r"`mpirun_config.mpirun_hostfile: hosts`: must be absent.* delete mpirun_config"),
        (
            f"{ZERO_ON_TWO}  deepspeed_multinode_launcher: pdsh\n  deepspeed_hostfile: hosts\n"
            "  deepspeed_inclusion_filter: b:0\n",
            r"`deepspeed_config.deepspeed_multinode_launcher: pdsh`: must be standard.* each of the 2 machines",
        ),
        (f"{ZERO_ON_TWO}  deepspeed_hostfile: hosts\n", r"deepspeed_hostfile: hosts`: must be absent.* standard`"),
        (
            f"{ZERO_ON_TWO}  deepspeed_multinode_launcher: standard\n  deepspeed_exclusion_filter: b\n",
            r"deepspeed_exclusion_filter: b`: must be absent",
        ),
    ],
)
def test_a_file_that_asks_for_another_launcher(text: str, says: str, tmp_path: Path) -> None:
    """mpirun and pdsh start every machine, this launcher its own: it would wait for processes nobody starts."""
    file = tmp_path / "launch.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=says):
        refuse_other_launchers(read_machine_config(file))


def test_a_start_refuses_a_file_for_mpirun_and_a_check_notes_it(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text(MPIRUN)
    request = Launch(str(file), str(RECIPE), ("demo",))
    with pytest.raises(UsageError, match=r"mpirun_hostfile: hosts"):
        launch(request)
    assert f"note: for `accelerate launch` only: {file}:4" in check(request)


def test_the_standard_launcher_of_deepspeed_is_this_one(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text(f"{ZERO_ON_TWO}  deepspeed_multinode_launcher: standard\n")
    refuse_other_launchers(read_machine_config(file))


def test_a_file_for_the_cpu_keeps_the_run_from_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "cpu.yaml").write_text("distributed_type: 'NO'\nnum_machines: 1\nnum_processes: 1\nuse_cpu: true\n")
    script = tmp_path / "train.py"
    said = "pathlib.Path(__file__).with_name('said').write_text(os.environ['ACCELERATE_USE_CPU'])"
    script.write_text(f"import os, pathlib\n{said}\n")
    assert launch(Launch(str(tmp_path / "cpu.yaml"), str(script))) == 0
    assert (tmp_path / "said").read_text() == "true"

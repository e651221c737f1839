"""Flags of a launch that replace numbers of its file are refused by their own names, by every command alike."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from accel_train import cli
from accel_train.commands.launch import Launch, read_machine
from accel_train.config import UsageError
from accel_train.launch_files.machine_config import read_machine_config
from accel_train.launch_files.processes import device_of_process
from accel_train.launch_files.requested import read_request

RECIPE = Path(__file__).parents[2] / "recipes" / "mmdit.py"
CPU = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 3\n"
ONE = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 1\n"
NODES = CPU.replace("3", "4") + "num_machines: 2\nmain_process_ip: 10.0.0.1\nmain_process_port: 29500\n"
COUNT = "must be a whole number, 1 or more, for the processes of all machines; correct it, or leave it out"
PORT = "must be a whole number, 0 to 65535; correct it"
RANK = "must be 0 to 0, because num_machines is 1; count the machines from 0"


@pytest.fixture(autouse=True)
def no_default_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--num_processes 0", COUNT),
        ("--num_processes -1", COUNT),
        ("--main_process_port 70000", PORT),
        ("--main_process_port -5", PORT),
        ("--machine_rank 3", RANK),
        ("--machine_rank -1", RANK),
    ],
)
@pytest.mark.parametrize("command", ["launch", "rehearse", "check"])
def test_a_flag_out_of_range_is_refused_by_name(command: str, flags: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "three.yaml").write_text(CPU)
    given = shlex.split(f"{command} --config_file {tmp_path}/three.yaml {flags} {RECIPE} demo")
    with pytest.raises(UsageError, match=f"^{flags}: {says}"):
        cli._main(given)


@pytest.mark.parametrize("number", [0, -1])
def test_other_ways_to_a_number_of_processes(number: int, tmp_path: Path) -> None:
    """A comparison, a start without a launch file, and a process of `accelerate launch`."""
    file = tmp_path / "three.yaml"
    file.write_text(CPU)
    words = f"compare --config_file {file} --num_processes {number} {RECIPE} demo --vary seed=1,2"
    with pytest.raises(UsageError, match=f"^--num_processes {number}: {COUNT}"):
        cli._main(shlex.split(words))
    with pytest.raises(UsageError, match=f"--num_processes {number}: must be a whole number"):
        read_machine(Launch(None, str(RECIPE), num_processes=number))
    line = ["accelerate", "launch", "--config_file", str(file), f"--num_processes={number}", "recipe.py"]
    with pytest.raises(UsageError, match=f"--num_processes {number}: must be a whole number"):
        read_request({}, [line])


def test_a_flag_against_the_file_is_named_with_its_value(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(ONE)
    with pytest.raises(
        UsageError, match=r"--num_processes 2: must be 1 with `distributed_type: NO`.*yaml:2:1.* give 1"
    ):
        read_machine_config(file, num_processes=2)
    file.write_text(NODES)
    with pytest.raises(UsageError, match=r"--num_processes 3: must be a multiple of num_machines \(2\).*give 2 or 4"):
        read_machine_config(file, num_processes=3)
    read_machine(Launch(str(file), str(RECIPE), machine_rank=1, main_process_port=65535))
    with pytest.raises(UsageError, match="--main_process_port 0: must be a whole number, 1 to 65535"):
        read_machine(Launch(str(file), str(RECIPE), main_process_port=0))


def test_a_number_from_the_environment_is_named_by_its_variable(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    for text, says in {NODES: r"a multiple of num_machines \(2\)", ONE: "1 with `distributed_type: NO`"}.items():
        file.write_text(text)
        with pytest.raises(UsageError, match=f"^WORLD_SIZE 3: must be {says}"):
            read_request({"ACCEL_TRAIN_MACHINE_FILE": str(file), "WORLD_SIZE": "3"}, [])


@pytest.mark.parametrize("here", ["1", "2"])
def test_hosts_that_started_different_numbers_are_told_so(here: str, tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text(NODES)
    started = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": here, "GROUP_WORLD_SIZE": "2"}
    says = (
        f"^num_processes: the hosts started different numbers of processes: {here} on .*, and 3 on 2 hosts together; "
        "give every host the same --num_processes"
    )
    with pytest.raises(UsageError, match=says):
        read_request({"ACCEL_TRAIN_MACHINE_FILE": str(file), **started}, [])
    line = ["accelerate", "launch", "--config_file", str(file), "--num_processes=4", "recipe.py"]
    with pytest.raises(UsageError, match=says):
        read_request(started, [line])
    # torchrun without a launch file may start any number on each host.
    assert read_request(started, []).num_processes is None
    same = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    assert read_request({"ACCEL_TRAIN_MACHINE_FILE": str(file), **same}, []).num_processes == 4


def test_an_address_for_one_machine_is_refused_as_a_flag_alone(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(f"{ONE}main_process_ip: 10.0.0.1\n")
    assert read_machine(Launch(str(file), str(RECIPE)))[1].main_process_ip == "10.0.0.1"
    with pytest.raises(UsageError, match=rf"--main_process_ip 10\.0\.0\.2: has no effect, .* is 1 in {file}; set"):
        read_machine(Launch(str(file), str(RECIPE), main_process_ip="10.0.0.2"))
    file.write_text(NODES)
    read_machine(Launch(str(file), str(RECIPE), main_process_ip="10.0.0.2"))


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("environment", "visible", "index"),
    [
        ({}, 1, 0),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", **TORCHRUN}, 4, 3),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", **TORCHRUN}, 8, 3),
        ({"LOCAL_RANK": "3"}, 4, 3),
        ({"LOCAL_RANK": "3"}, 1, 0),  # srun --gpus-per-task=1: each task sees its own
    ],
)
def test_each_process_has_a_device(environment: dict[str, str], visible: int, index: int) -> None:
    assert device_of_process(environment, visible) == index


@pytest.mark.parametrize(
    ("environment", "visible"),
    [
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", **TORCHRUN}, 1),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", **TORCHRUN}, 3),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", **TORCHRUN}, 3),
        ({"LOCAL_RANK": "3"}, 2),
    ],
)
def test_two_processes_on_one_device_are_refused(environment: dict[str, str], visible: int) -> None:
    message = rf"num_processes: 4 processes .* but only {visible} are visible; name 4 in CUDA_VISIBLE_DEVICES .*srun"
    with pytest.raises(UsageError, match=message):
        device_of_process(environment, visible)

"""What was asked of the machine: found in parents' command lines, the environment and the launch file."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from accel_train.config import UsageError
from accel_train.launch_files.parents import parent_command_lines
from accel_train.launch_files.requested import (
    MISLEADING_VARIABLES,
    Requested,
    clear_environment,
    launcher_flags,
    misleading_variables,
    read_request,
    refuse_accumulation,
    refuse_experiment_settings,
    refuse_unsupported,
)

SHELL = ["/bin/bash", "-l"]


@pytest.fixture(autouse=True)
def no_wizard_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "accelerate" / "default_config.yaml"


@pytest.fixture
def two_gpus(tmp_path: Path) -> str:
    path = tmp_path / "two.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 2\n")
    return str(path)


FLAGS = ["--config_file", "m.yaml", "--num_processes", "2", "recipe.py", "demo", "--num_processes", "9"]


@pytest.mark.parametrize(
    "line",
    [
        ["/usr/bin/python3", "/usr/bin/accelerate", "launch", *FLAGS],
        ["accelerate", "launch", *FLAGS],
        ["/usr/bin/python3", "-u", "-W", "error", "/home/me/.venv/bin/accelerate", "launch", *FLAGS],
        ["/usr/bin/python3", "/usr/bin/accelerate-launch", *FLAGS],
        ["python", "-m", "accelerate.commands.launch", *FLAGS],
        ["python", "-u", "-m", "accelerate.commands.launch", *FLAGS],
        ["python", "-m", "accelerate.commands.accelerate_cli", "launch", *FLAGS],
    ],
    ids=" ".join,
)
def test_every_way_to_call_accelerate_launch_is_understood(line: list[str]) -> None:
    flags = launcher_flags([["python", "-m", "torch.distributed.run", "recipe.py"], line, SHELL])
    assert flags is not None
    assert (flags["config_file"], flags["num_processes"]) == ("m.yaml", 2)
    assert (flags["training_script"], flags["training_script_args"]) == ("recipe.py", ["demo", "--num_processes", "9"])


@pytest.mark.parametrize(
    "line",
    [
        SHELL,
        [],
        ["python", "recipe.py", "launch"],
        ["/usr/bin/accelerate", "config"],
        ["torchrun", "--nproc_per_node", "2", "recipe.py"],
        ["python", "-m", "accel_train.cli", "launch", "--config_file", "m.yaml", "recipe.py"],
        ["grep", "accelerate launch"],
    ],
    ids=" ".join,
)
def test_other_commands_are_not(line: list[str]) -> None:
    assert launcher_flags([line]) is None


def test_the_nearest_launcher_counts() -> None:
    near = ["accelerate", "launch", "--num_processes", "3", "recipe.py"]
    far = ["accelerate", "launch", "--num_processes", "4", "sweep.py"]
    flags = launcher_flags([SHELL, near, far])
    assert flags is not None
    assert flags["num_processes"] == 3


def test_the_real_parents_are_seen() -> None:
    lines = parent_command_lines()
    assert lines[0] == psutil.Process().parent().cmdline()
    assert len(lines) <= 4


def test_nothing_asked_for_is_no_request() -> None:
    asked = read_request({}, [SHELL])
    assert asked == Requested(None, "the environment", None, None, rehearsal=False)


def test_the_file_named_by_flag(two_gpus: str) -> None:
    asked = read_request({}, [["accelerate", "launch", "--config_file", two_gpus, "recipe.py"]])
    assert asked.machine is not None
    assert (asked.source, asked.num_processes, asked.machine.strategy) == (two_gpus, 2, "ddp")


def test_a_flag_beats_the_number_in_the_file(two_gpus: str) -> None:
    line = ["accelerate", "launch", "--config_file", two_gpus, "--num_processes", "8", "recipe.py"]
    assert read_request({}, [line]).num_processes == 8


def test_flags_without_a_file() -> None:
    asked = read_request({}, [["accelerate", "launch", "--cpu", "--num_processes", "2", "recipe.py"]])
    assert (asked.machine, asked.source, asked.num_processes) == (None, "the command line of `accelerate launch`", 2)


def test_the_wizards_file_counts_for_accelerate_launch_only(no_wizard_file: Path) -> None:
    no_wizard_file.parent.mkdir(parents=True)
    no_wizard_file.write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    asked = read_request({}, [["accelerate", "launch", "recipe.py"]])
    assert asked.num_processes == 4
    assert asked.source == f"{no_wizard_file}, the default file of `accelerate config`"
    assert read_request({}, [["torchrun", "recipe.py"]]).machine is None


def test_the_wizards_file_is_not_read_with_the_flag_cpu(no_wizard_file: Path, two_gpus: str) -> None:
    """By Accelerate neither: a file of two GPUs would have this run of one CPU process refused."""
    no_wizard_file.parent.mkdir(parents=True)
    no_wizard_file.write_text(Path(two_gpus).read_text())
    assert read_request({}, [["accelerate", "launch", "--cpu", "recipe.py"]]).machine is None
    named = read_request({}, [["accelerate", "launch", "--cpu", "--config_file", two_gpus, "recipe.py"]])
    assert named.num_processes == 2


def test_our_own_launcher_says_so_in_the_environment(two_gpus: str) -> None:
    said = {"ACCEL_TRAIN_MACHINE_FILE": two_gpus, "WORLD_SIZE": "6", "ACCEL_TRAIN_REHEARSAL": "1"}
    asked = read_request(said, [SHELL])
    assert (asked.source, asked.num_processes, asked.rehearsal) == (two_gpus, 6, True)


def test_a_number_of_processes_that_is_none_is_refused(two_gpus: str) -> None:
    with pytest.raises(UsageError, match="WORLD_SIZE: '': a whole number, 1 or more, is required"):
        read_request({"ACCEL_TRAIN_MACHINE_FILE": two_gpus, "WORLD_SIZE": ""}, [])


def test_a_bad_file_is_refused_in_the_process_too(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config: {fsdp_verison: 2}\n")
    with pytest.raises(UsageError, match=r"fsdp_verison.*fsdp_version"):
        read_request({}, [["accelerate", "launch", "--config_file", str(path), "recipe.py"]])


@pytest.mark.parametrize(
    ("environment", "strategy"),
    [
        ({}, None),
        ({"ACCELERATE_USE_FSDP": "true"}, "fsdp"),
        ({"ACCELERATE_USE_FSDP": "True"}, "fsdp"),
        ({"ACCELERATE_USE_FSDP": "false"}, None),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "deepspeed"),
    ],
)
def test_the_strategy_stands_in_the_environment(environment: dict[str, str], strategy: str | None) -> None:
    assert read_request(environment, []).strategy == strategy


NOTHING = Requested(None, "m.yaml", None, None, rehearsal=False)


@pytest.mark.parametrize("named", [{}, {"ACCELERATE_MIXED_PRECISION": "no"}, {"ACCELERATE_DYNAMO_BACKEND": "NO"}])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_file_that_says_nothing_leaves_the_precision(named: dict[str, str], precision: str) -> None:
    refuse_experiment_settings(NOTHING, named, precision)


@pytest.mark.parametrize(
    ("named", "precision"), [("bf16", "fp32"), ("fp16", "bf16"), ("fp8", "bf16"), ("bf16", "fp16")]
)
def test_another_precision_is_refused(named: str, precision: str) -> None:
    refuse_experiment_settings(NOTHING, {"ACCELERATE_MIXED_PRECISION": "bf16"}, "bf16")
    with pytest.raises(UsageError, match=rf"mixed_precision: {named} in m\.yaml contradicts precision: {precision}"):
        refuse_experiment_settings(NOTHING, {"ACCELERATE_MIXED_PRECISION": named}, precision)


def test_the_remedy_for_fp8_is_an_option_that_exists() -> None:
    with pytest.raises(UsageError, match=r"give --float8 rowwise --precision bf16 if"):
        refuse_experiment_settings(NOTHING, {"ACCELERATE_MIXED_PRECISION": "fp8"}, "fp32")


@pytest.mark.parametrize("named", ["foo", "fp32"])
def test_the_remedy_for_an_unknown_precision_is_not_to_give_it(named: str) -> None:
    with pytest.raises(UsageError, match=r"choose one with --precision \(fp32, bf16 and fp16 exist\)") as error:
        refuse_experiment_settings(NOTHING, {"ACCELERATE_MIXED_PRECISION": named}, "bf16")
    assert f"--precision {named}" not in str(error.value)


def test_a_precision_of_the_notebook_launcher_is_not_lost() -> None:
    """It sets names that Accelerate does not read. One of them alone may be anybody's."""
    launched = {"NPROC": "2", "NODE_RANK": "0"}
    refuse_experiment_settings(NOTHING, {"MIXED_PRECISION": "bf16"}, "fp32")
    refuse_experiment_settings(NOTHING, launched | {"MIXED_PRECISION": "no"}, "bf16")
    with pytest.raises(UsageError, match=r"mixed_precision: bf16 in .* contradicts precision: fp32"):
        refuse_experiment_settings(NOTHING, launched | {"MIXED_PRECISION": "bf16"}, "fp32")


def test_compilation_behind_the_experiments_back_is_refused() -> None:
    with pytest.raises(UsageError, match=r"dynamo backend 'inductor' in m\.yaml: .*; remove dynamo_config"):
        refuse_experiment_settings(NOTHING, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "bf16")


@pytest.mark.parametrize("value", ["1", "auto", "4"])
def test_accumulation_that_says_nothing_or_the_same(value: str) -> None:
    refuse_accumulation(NOTHING, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": value}, 4)


def test_other_accumulation_is_refused() -> None:
    with pytest.raises(UsageError, match=r"gradient_accumulation_steps: 3 .*m\.yaml.*give 4; remove it"):
        refuse_accumulation(NOTHING, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"}, 4)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--fsdp_activation_checkpointing true", r"fsdp_activation_checkpointing: true in FSDP_ACTIVATION_CHECKPOINT"),
        *[
            (
                f"--use_parallelism_config --parallelism_config_{axis}_size 2",
                rf"parallelism_config_{axis}_size: 2 .*: 1 is",
            )
            for axis in ("tp", "cp", "sp")
        ],
    ],
)
def test_what_a_file_is_refused_for_is_refused_as_a_flag(flags: str, says: str) -> None:
    words = ["--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "--num_machines", "1", "recipe.py"]
    for given in (flags.split(), []):
        settings, _, _ = _validate_launch_command(launch_command_parser().parse_args([*given, *words]))
        environment = prepare_multi_gpu_env(settings)
        requested = read_request(environment, [["accelerate", "launch", *given, *words]])
        if given:
            with pytest.raises(UsageError, match=says):
                refuse_unsupported(requested, environment)
        else:
            refuse_unsupported(requested, environment)


def test_what_would_beat_an_explicit_choice_is_taken_out() -> None:
    environment = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "HOME": "/"}
    clear_environment(environment)
    assert environment == {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false", "HOME": "/"}


@pytest.mark.parametrize("name", MISLEADING_VARIABLES)
def test_a_misleading_variable_is_named(name: str) -> None:
    (sentence,) = misleading_variables({name: "7", "NCCL_DEBUG": "INFO"})
    assert sentence.startswith(f"{name}=7 ")


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"NCCL_P2P_DISABLE": "0"}, "NCCL_P2P_DISABLE=0 enables nothing"),
        ({"NCCL_IB_DISABLE": "0"}, "NCCL_IB_DISABLE=0 enables nothing"),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "7200"}, "use --collective_timeout_seconds"),
    ],
)
def test_values_that_mislead(environment: dict[str, str], says: str) -> None:
    (sentence,) = misleading_variables(environment)
    assert says in sentence


def test_values_that_do_not() -> None:
    good = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600"}
    assert misleading_variables(good | {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth0"}) == []


def test_a_flag_that_names_another_precision_than_the_file_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "no.yaml"
    path.write_text("distributed_type: 'NO'\nmixed_precision: 'no'\n")
    asked = read_request({}, [["accelerate", "launch", "--config_file", str(path), "recipe.py"]])
    with pytest.raises(UsageError, match=r"mixed_precision: bf16 in .* contradicts precision: fp32"):
        refuse_experiment_settings(asked, {"ACCELERATE_MIXED_PRECISION": "bf16"}, "fp32")

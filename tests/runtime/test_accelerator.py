"""The verified ``Accelerator``: what is generated, what is compared, and which launch files contradict."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

from accel_train import experiment, startup
from accel_train.commands.check import check
from accel_train.commands.launch import Launch, accelerate_environment, accelerate_settings
from accel_train.config import UsageError
from accel_train.launch_files.machine_config import read_machine_config
from accel_train.launch_files.requested import Requested
from accel_train.runtime import accelerator as machine
from accel_train.runtime import strategy
from accel_train.runtime.exiting import current_run
from accel_train.store import lock
from accel_train.training.accumulation import GradientWindow

ROOT = Path(__file__).parents[2]
EXPERIMENT: dict[str, Any] = {
    "precision": "fp32",
    "global_batch_size": 8,
    "micro_batch_size": 4,
    "max_grad_norm": 1.0,
}


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path) -> Iterator[None]:
    """No variable and no shared state of another run, before and after."""
    before = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "ACCEL_TRAIN_", "NCCL_", "TORCH_NCCL")):
            del os.environ[name]
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "DEEPSPEED_TIMEOUT"):
        os.environ.pop(name, None)
    os.environ["HF_HOME"] = str(tmp_path / "hf")
    # A test of another file, run earlier in this process, may have left its Accelerator.
    forget_accelerator()
    yield
    # A run that was started here has its log open.
    current_run.close()
    os.environ.clear()
    os.environ.update(before)
    forget_accelerator()


def forget_accelerator() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def build(**changes: Any) -> Any:
    return machine.build_accelerator(**(EXPERIMENT | changes))


@pytest.mark.parametrize(("precision", "named"), [("fp32", "no"), ("bf16", "bf16")])
def test_one_process(precision: str, named: str) -> None:
    accelerator = build(precision=precision)
    assert (accelerator.num_processes, accelerator.mixed_precision) == (1, named)
    assert accelerator.gradient_accumulation_steps == 1
    assert strategy.strategy_of(accelerator) == "single"
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    assert strategy.verify_prepared(accelerator, model, 1.0).startswith("single: 1 process(es) on ")


def test_a_precision_is_judged_by_the_device_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU of a machine with an old GPU: fp16 would become fp32 without a word, and bf16 works."""
    for name, value in {"is_available": True, "is_bf16_supported": False}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value, **_: value)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    machine._refuse_unsupported_precision("fp16")
    with pytest.raises(UsageError, match="bf16 is not supported by an old GPU"):
        machine._refuse_unsupported_precision("bf16")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    machine._refuse_unsupported_precision("bf16")
    with pytest.raises(UsageError, match=r"precision: fp16 needs a GPU .* this run is on the CPU"):
        machine._refuse_unsupported_precision("fp16")


def test_more_processes_than_devices_are_refused_before_they_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate would put two of them on one device."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    names = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (names | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine, "connect", lambda *_, **__: pytest.fail("connected"))
    message = "num_processes: 4 processes on this machine need one device each, but only 2 are visible"
    with pytest.raises(UsageError, match=message):
        build(global_batch_size=16)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    machine._refuse_missing_device(Requested(None, "m.yaml", None, None, rehearsal=False))


def test_a_ddp_launch_of_one_process_is_single(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU machine Accelerate names it MULTI_GPU, and wraps no model."""

    def connect(*_: object, **__: object) -> None:
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    monkeypatch.setattr(machine, "connect", connect)
    accelerator = build()
    assert accelerator.distributed_type == DistributedType.MULTI_GPU
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    assert strategy.verify_prepared(accelerator, model, 1.0).startswith("single: 1 process(es) on ")
    one = torch.tensor(1.0)
    window = GradientWindow(accelerator, model, [({"x": torch.ones(1, 2)}, {"main": one})] * 2, {"main": 1.0}, 0)
    for inputs in window:
        window.backward({"main": model(inputs["x"]).sum()})
    assert model.weight.grad is not None


def test_accumulation_of_the_environment_does_not_reach_accelerate() -> None:
    """Accelerate lets the variable beat its own constructor argument, and would halve the loss."""
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "2"
    assert build().gradient_accumulation_steps == 1


def test_the_timeout_reaches_deepspeed_in_minutes() -> None:
    build(collective_timeout_seconds=601)
    assert os.environ["DEEPSPEED_TIMEOUT"] == "11"


def test_misleading_variables_are_named(caplog: pytest.LogCaptureFixture) -> None:
    os.environ["NCCL_TIMEOUT"] = "7200"
    with caplog.at_level(logging.WARNING):
        machine.log_notices()
    assert "NCCL_TIMEOUT=7200 is read by neither NCCL nor torch" in caplog.text


def test_a_start_and_check_name_what_the_file_asks_in_vain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "vain.yaml"
    file.write_text("distributed_type: 'NO'\nuse_cpu: true\nrdzv_backend: c10d\nenable_cpu_affinity: true\n")
    recipe = ROOT / "recipes" / "mmdit.py"
    said = check(Launch(str(file), str(recipe)))
    noted = [line.removeprefix("  note: ") for line in said.splitlines() if line.startswith("  note: ")]
    assert [note.split(":")[0] for note in noted] == ["rdzv_backend", "enable_cpu_affinity"]

    os.environ["ACCEL_TRAIN_MACHINE_FILE"] = str(file)
    startup.start(experiment.ExperimentConfig(output_dir=str(tmp_path / "run"), max_steps=1))
    shown, logged = capsys.readouterr().out, (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert all(f"warning: {note}\n" in shown and note in logged for note in noted)


def test_a_start_seeds_the_generators_of_whoever_draws_from_them(tmp_path: Path) -> None:
    """Such as a split of the data by numpy before the model is built."""

    def draws(seed: int) -> list[float]:
        startup.start(experiment.ExperimentConfig(output_dir=str(tmp_path / "run"), max_steps=1, seed=seed))
        return [random.random(), float(np.random.rand()), torch.rand(1).item()]

    first, other = draws(1), draws(2)
    assert draws(1) == first
    assert all(one != another for one, another in zip(first, other, strict=True))


def test_a_start_in_the_directory_of_a_living_run_leaves_its_log_alone(tmp_path: Path) -> None:
    log = tmp_path / "run" / "logs" / "rank_0.log"
    log.parent.mkdir(parents=True)
    log.write_text("of the living run\n")
    running = lock.acquire(tmp_path / "run")
    with pytest.raises(UsageError, match=r"is in use by an earlier run of this process \(process \d+ on "):
        startup.start(experiment.ExperimentConfig(output_dir=str(tmp_path / "run"), max_steps=1))
    running.release()
    assert log.read_text() == "of the living run\n"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", "logs"]


def test_a_difference_that_only_shows_afterwards_is_refused() -> None:
    """Another request than the one that this Accelerator was made for."""
    real = build()
    asked = Requested(None, "m.yaml", None, "fsdp", rehearsal=False)
    with pytest.raises(UsageError, match=r"strategy: fsdp2 was asked for by m\.yaml, but single was set up"):
        machine._verify(real, asked, 1, "fp32")
    with pytest.raises(UsageError, match=r"num_processes: 3 was asked for .*but 1 was set up"):
        machine._verify(real, Requested(None, "m.yaml", 3, None, rehearsal=False), 3, "fp32")
    with pytest.raises(UsageError, match=r"mixed_precision: bf16 was asked for .*but no was set up"):
        machine._verify(real, Requested(None, "m.yaml", None, None, rehearsal=False), 1, "bf16")


ZERO = Requested(None, "m.yaml", None, "deepspeed", rehearsal=False)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_zero_settings_come_from_the_experiment(stage: str, precision: Any) -> None:
    os.environ |= {"ACCELERATE_DEEPSPEED_ZERO_STAGE": stage, "ACCELERATE_DEEPSPEED_ZERO3_INIT": str(stage == "3")}
    plugin = machine.zero_plugin(ZERO, precision, 0.7, 4, world_size=3)
    settings: dict[str, Any] = plugin.deepspeed_config
    assert settings["zero_optimization"]["stage"] == int(stage)
    assert settings["gradient_clipping"] == 0.7
    assert settings["gradient_accumulation_steps"] == 1
    assert settings["train_micro_batch_size_per_gpu"] == 4
    assert settings["train_batch_size"] == 12
    assert settings["fp16"]["enabled"] is (precision == "fp16")
    assert settings["bf16"]["enabled"] is (precision == "bf16")
    assert not plugin.zero3_init_flag
    assert "optimizer" not in settings
    assert "scheduler" not in settings


@pytest.mark.parametrize(
    ("zero", "says"),
    [
        ({"OFFLOAD_OPTIMIZER_DEVICE": "nvme"}, "offload_optimizer_device: nvme .*: none or cpu is required"),
        ({"OFFLOAD_PARAM_DEVICE": "cpu"}, "offload_param_device: cpu .*: none is required with stage 2"),
        ({"CONFIG_FILE": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload_param_device: nvme"),
        ({"CONFIG_FILE": {"stage": 2, "offload_param": {"device": "cpu"}}}, "offload_param_device: cpu .* stage 2"),
    ],
)
def test_offloading_by_flags_is_refused_as_that_of_a_file(zero: dict[str, Any], says: str, tmp_path: Path) -> None:
    """Flags of `accelerate launch` are variables by now, and no launch file tells of them."""
    for name, value in zero.items():
        if name == "CONFIG_FILE":
            file = tmp_path / "ds.json"
            file.write_text(json.dumps({"zero_optimization": value}))
            value = str(file)
        os.environ[f"ACCELERATE_DEEPSPEED_{name}"] = value
    with pytest.raises(UsageError, match=says):
        machine.zero_plugin(ZERO, "fp32", 1.0, 4, world_size=2)
    os.environ |= {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "none", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    os.environ |= {f"ACCELERATE_DEEPSPEED_OFFLOAD_{name}_DEVICE": "cpu" for name in ("OPTIMIZER", "PARAM")}
    assert machine.zero_plugin(ZERO, "fp32", 1.0, 4, world_size=2).offload_param_device == "cpu"


GENERATED = {
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "train_micro_batch_size_per_gpu": 4,
    "train_batch_size": 8,
}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_clipping": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto"},
        {"gradient_clipping": 1, "train_micro_batch_size_per_gpu": 4, "train_batch_size": 8},
        {"bf16": {"enabled": True}, "fp16": {"enabled": False}},
        {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0}},
        {"zero_optimization": {"stage": 2, "overlap_comm": True}, "steps_per_print": 10},
    ],
)
def test_a_deepspeed_file_that_says_nothing_else(settings: dict[str, Any]) -> None:
    machine.refuse_zero_contradictions(settings, GENERATED, "bf16", "ds.json")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"optimizer": {"type": "AdamW"}}, r"'optimizer' in the DeepSpeed settings of ds\.json contradicts"),
        ({"scheduler": {"type": "WarmupLR"}}, r"'scheduler' .*remove it"),
        ({"gradient_clipping": 0.5}, r"gradient_clipping: 0\.5 .*gives 1\.0; remove it"),
        ({"gradient_clipping": 0}, r"gradient_clipping: 0 .*gives 1\.0"),
        ({"gradient_accumulation_steps": 4}, r"gradient_accumulation_steps: 4 .*gives 1"),
        ({"train_batch_size": 64}, r"train_batch_size: 64 .*gives 8"),
        ({"train_micro_batch_size_per_gpu": 1}, r"train_micro_batch_size_per_gpu: 1 .*gives 4"),
        ({"fp16": {"enabled": True}}, r"fp16\.enabled: true .*contradicts precision: bf16; .*--precision fp16"),
    ],
)
def test_a_deepspeed_file_that_contradicts(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        machine.refuse_zero_contradictions(settings, GENERATED, "bf16", "ds.json")


WIZARD = """compute_environment: LOCAL_MACHINE
debug: false
{strategy}
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
mixed_precision: {precision}
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
STRATEGIES = {
    "ddp": "distributed_type: MULTI_GPU\ngpu_ids: all",
    "fsdp2": (
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_activation_checkpointing: false\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_cpu_ram_efficient_loading: true\n"
        "  fsdp_offload_params: false\n  fsdp_reshard_after_forward: true\n"
        "  fsdp_state_dict_type: SHARDED_STATE_DICT\n  fsdp_version: 2"
    ),
    "zero2": (
        "deepspeed_config:\n  gradient_accumulation_steps: 1\n  gradient_clipping: 1.0\n"
        "  offload_optimizer_device: none\n  offload_param_device: none\n  zero3_init_flag: false\n"
        "  zero_stage: 2\ndistributed_type: DEEPSPEED"
    ),
    "zero3": (
        "deepspeed_config:\n  gradient_accumulation_steps: 1\n  offload_optimizer_device: cpu\n"
        "  offload_param_device: cpu\n  zero3_init_flag: true\n  zero3_save_16bit_model: true\n"
        "  zero_stage: 3\ndistributed_type: DEEPSPEED"
    ),
}


@pytest.mark.parametrize("precision", ["'no'", "no", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_file_as_the_wizard_writes_it_is_accepted(strategy: str, precision: str, tmp_path: Path) -> None:
    """From the file through Accelerate's own launcher to the settings of a process, without a word against it."""
    path = tmp_path / "default_config.yaml"
    path.write_text(WIZARD.format(strategy=STRATEGIES[strategy], precision=precision))
    read = read_machine_config(path)
    assert read.strategy == strategy
    request = Launch(str(path), "recipe.py")
    os.environ |= accelerate_environment(accelerate_settings(path, read, request))
    asked = machine.read_request(os.environ, [["accelerate", "launch", "--config_file", str(path), "recipe.py"]])
    assert asked.strategy == {"ddp": None, "fsdp2": "fsdp"}.get(strategy, "deepspeed")
    machine.refuse_experiment_settings(asked, os.environ, "bf16")
    machine.refuse_accumulation(asked, os.environ, 1)
    if strategy.startswith("zero"):
        plugin = machine.zero_plugin(asked, "bf16", 1.0, 4, world_size=2)
        assert plugin.deepspeed_config["zero_optimization"]["stage"] == int(strategy[-1])


def test_zero_without_deepspeed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package is missing, Accelerate's plugin raises ImportError."""

    def missing() -> Any:
        raise ImportError("DeepSpeed is not installed")

    monkeypatch.setattr(machine, "DeepSpeedPlugin", missing)
    with pytest.raises(UsageError, match=r"needs deepspeed, .*pip install 'accel-train\[deepspeed\]'"):
        machine.zero_plugin(ZERO, "bf16", 1.0, 4, world_size=2)

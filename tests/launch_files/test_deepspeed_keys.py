"""Keys of a deepspeed_config_file: what is taken is known to DeepSpeed, and the rest is refused with a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accel_train.commands.check import check
from accel_train.commands.launch import Launch
from accel_train.config import UsageError
from accel_train.launch_files import deepspeed_keys
from accel_train.launch_files.machine_config import read_machine_config
from accel_train.launch_files.requested import Requested
from accel_train.runtime import accelerator

RECIPE = Path(__file__).parents[2] / "recipes" / "mmdit.py"


def launch_file(folder: Path, values: dict[str, Any], **zero: Any) -> Path:
    settings = folder / "ds.json"
    settings.write_text(json.dumps({"zero_optimization": {"stage": 2, **zero}, **values}))
    file = folder / "machine.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 2\n"
        f"deepspeed_config: {{deepspeed_config_file: {settings}}}\n"
    )
    return file


CURRICULUM = {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 64}
REFUSED = [
    ({"unknown_thing": 3}, r"`unknown_thing: 3`: must be absent: .*; delete it$"),
    ({"train_batchsize": 8}, r"`train_batchsize: 8`: must be absent.*did you mean 'train_batch_size'\?"),
    ({"reduce_bucket_size": 5}, r"`reduce_bucket_size: 5`.*it belongs under zero_optimization"),
    ({"communication_data_type": "fp16"}, r"`communication_data_type: fp16`: must be fp32: gradients are reduced in"),
    ({"communication_data_type": None}, r"`communication_data_type: null`: must be fp32"),
    ({"prescale_gradients": True, "gradient_predivide_factor": 4.0}, r"`prescale_gradients: true`: must be false"),
    ({"gradient_predivide_factor": 4.0}, r"`gradient_predivide_factor: 4.0`: must be 1"),
    ({"gradient_predivide_factor": True}, r"`gradient_predivide_factor: true`: must be 1"),
    ({"curriculum_learning": CURRICULUM}, r"`curriculum_learning: {...}`: must be absent.*experiment decides"),
    ({"data_efficiency": {"enabled": True}}, r"`data_efficiency: {...}`: must be absent.*experiment decides"),
    ({"sparse_gradients": True}, r"`sparse_gradients: true`: must be absent.*gradients are dense"),
    ({"compression_training": {}}, r"`compression_training: {...}`: must be absent.*unquantised"),
    ({"activation_checkpointing": {}}, r"must be absent.*--activation_checkpointing\.mode"),
    ({"bfloat16": {"enabled": True}}, r"`bfloat16: {...}`.*write `bf16`"),
    ({"bf16": True}, r"`bf16: true`: must be a mapping such as"),
    ({"bf16": {"enabled": "auto", "check_grad_overflow": False}}, r"`bf16\.check_grad_overflow: false`: must be true"),
    ({"fp16": {"enabled": "auto", "loss_scale": 128}}, r"`fp16\.loss_scale: 128`: must be 0"),
    ({"wall_clock_breakdown": "yes"}, r"`wall_clock_breakdown: yes`: must be true or false"),
]
REFUSED_IN_ZERO = [
    ({"reduce_bucketsize": 5}, r"`zero_optimization\.reduce_bucketsize: 5`.*did you mean 'reduce_bucket_size'\?"),
    ({"allgather_bucket_size": "auto"}, r"`zero_optimization\.allgather_bucket_size: auto`: must be a whole number"),
    ({"reduce_bucket_size": "much"}, r"`zero_optimization\.reduce_bucket_size: much`: must be a whole number"),
    ({"reduce_bucket_size": -5}, r"must be a whole number, 0 or more"),
    ({"overlap_comm": 1}, r"`zero_optimization\.overlap_comm: 1`: must be true or false"),
    (
        {"cpu_offload": True},
        r"`zero_optimization\.cpu_offload: true`.*write `.offload_optimizer.: {.device.: .cpu",
    ),
    ({"round_robin_gradients": True}, r"`zero_optimization\.round_robin_gradients: true`: must be false"),
    ({"zero_quantized_gradients": True}, r"must be false: the weights and gradients would be rounded"),
    ({"gradient_clipping": 1.0}, r"`zero_optimization\.gradient_clipping: 1.0`.*belongs at the top of the file"),
    ({"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, r"offload_optimizer\.ratio: 0.5`: must be 1"),
    (
        {"offload_optimizer": {"device": "cpu", "pin_memry": True}},
        r"optimizer\.pin_memry: true`.*'pin_memory'\?",
    ),
]


@pytest.mark.parametrize(("values", "says"), REFUSED)
def test_a_key_at_the_top_is_refused(values: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"ds\.json: {says}" if says.startswith("`") else says):
        read_machine_config(launch_file(tmp_path, values))


@pytest.mark.parametrize(("values", "says"), REFUSED_IN_ZERO)
def test_a_key_of_the_section_is_refused(values: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        read_machine_config(launch_file(tmp_path, {}, **values))


def test_a_file_as_transformers_documents_it_is_taken(tmp_path: Path) -> None:
    """Every value that it leaves to the trainer, and sizes of buckets in both spellings of JSON."""
    values = {
        "fp16": {
            "enabled": "auto",
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "initial_scale_power": 16,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "bf16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
    }
    file = launch_file(
        tmp_path,
        values,
        offload_optimizer={"device": "cpu", "pin_memory": True},
        allgather_partitions=True,
        allgather_bucket_size=5e8,
        overlap_comm=True,
        reduce_scatter=True,
        reduce_bucket_size="auto",
        contiguous_gradients=True,
    )
    assert read_machine_config(file).strategy == "zero2"


def test_the_keys_are_those_of_deepspeed() -> None:
    """A name that DeepSpeed drops, or never had, would be refused by it once the engine is built."""
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    models: dict[str, Any] = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
    }
    for name, model in models.items():
        fields = {field.alias or key: field for key, field in model.model_fields.items()}
        known = deepspeed_keys.SECTIONS[name]
        assert not known.keys() - fields.keys()
        for key, kind in known.items():
            if isinstance(kind, deepspeed_keys.Only):
                # The one value that is taken is what DeepSpeed does without the key.
                assert fields[key].default == kind.value, key


def test_check_compares_the_batch_with_the_experiment(tmp_path: Path) -> None:
    file = launch_file(tmp_path, {"train_batch_size": 7})
    with pytest.raises(UsageError, match=r"train_batch_size: 7 in the DeepSpeed settings .* contradicts"):
        check(Launch(str(file), str(RECIPE), ("demo",)))
    file = launch_file(tmp_path, {"train_micro_batch_size_per_gpu": 7})
    with pytest.raises(UsageError, match=r"train_micro_batch_size_per_gpu: 7 in the DeepSpeed settings"):
        check(Launch(str(file), str(RECIPE), ("demo",)))


def test_a_file_of_a_flag_of_accelerate_is_checked_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate launch --deepspeed_config_file`: no launch file names it, and the environment does."""
    pytest.importorskip("deepspeed")
    launch_file(tmp_path, {"communication_data_type": "fp16"})
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_INIT", "false")
    asked = Requested(None, "the environment", None, "deepspeed", rehearsal=False)
    with pytest.raises(UsageError, match=r"ds\.json: `communication_data_type: fp16`: must be fp32"):
        accelerator.zero_plugin(asked, "fp32", 1.0, 4, world_size=2)

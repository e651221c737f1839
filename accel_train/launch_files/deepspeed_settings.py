"""Read `deepspeed_config` of a launch file and the deepspeed_config_file that it names, and check their keys.

Keys for another ZeRO stage are refused here: Accelerate drops them silently. So are keys of DeepSpeed's own file that
it would ignore, or that would change the result of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accel_train.config import UsageError
from accel_train.launch_files.deepspeed_keys import BOOLEAN, COUNT, COUNT_OR_AUTO, INSTEAD, SECTIONS, Only
from accel_train.launch_files.section import Section
from accel_train.options.strict_yaml import Document, YamlError, read_document
from accel_train.wording import did_you_mean, nearest

_REPLACED_BY_DEEPSPEED_FILE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
)
"""Keys that `DeepSpeedPlugin` refuses beside a deepspeed_config_file, but only once the processes run."""
_NO_NVME = "optimizer and weights are offloaded to host memory only, from where checkpoints are written"


@dataclass(frozen=True)
class DeepSpeedSettings:
    """`deepspeed_config`, including the stage and offload of a deepspeed_config_file."""

    zero_stage: int
    offload_optimizer_device: str
    offload_param_device: str
    """Both devices are none or cpu."""
    gradient_accumulation_steps: int | None
    gradient_clipping: float | None
    """Both are None if the file omits them or has `auto`."""
    zero3_init: bool
    """True if the file asks for it, at any stage. Accelerate's own default is on for stage 3."""
    config_file: Path | None
    config_values: Mapping[str, object]
    """Content of the deepspeed_config_file. Empty without one."""


def read_deepspeed(section: Section, top: Section, machines: int) -> DeepSpeedSettings:
    """Read `deepspeed_config` and the deepspeed_config_file that it names."""
    found = _deepspeed_file(section, top)
    _check_multinode(section, machines)
    if found is None:
        settings = _settings_of_keys(section)
    else:
        file, document = found
        settings = _settings_of_file(section, file, document)
    for key in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
        if section.text(key) not in (None, "none"):
            raise section.refuse(key, f"absent or none: {_NO_NVME}", "delete the line")
    if section.boolean("zero3_save_16bit_model", False) and settings.zero_stage != 3:
        raise section.refuse(
            "zero3_save_16bit_model",
            f"false with stage {settings.zero_stage}: it has an effect in stage 3 only",
            "write false",
        )
    return settings


def _settings_of_keys(section: Section) -> DeepSpeedSettings:
    clipping = _gradient_clipping(section)
    if clipping is not None and clipping <= 0:
        raise section.refuse(
            "gradient_clipping",
            "above 0: Accelerate drops 0 and DeepSpeed then clips at 1.0",
            "delete the line",
        )
    stage = _stage(section, "zero_stage", 2)
    offload_params = _device(section, "offload_param_device")
    _refuse_offload(section, "offload_param_device", offload_params, stage)
    return DeepSpeedSettings(
        zero_stage=stage,
        offload_optimizer_device=_device(section, "offload_optimizer_device"),
        offload_param_device=offload_params,
        gradient_accumulation_steps=_accumulation(section),
        gradient_clipping=clipping,
        zero3_init=section.boolean("zero3_init_flag", False),
        config_file=None,
        config_values={},
    )


def _settings_of_file(section: Section, file: Path, document: Document) -> DeepSpeedSettings:
    top = Section(file, "", document.values, document.places)
    content = document.values.get("zero_optimization")
    if not isinstance(content, dict):
        raise top.refuse("zero_optimization", 'a mapping such as {"stage": 2}', "add it")
    check_keys(top)
    zero = Section(file, "zero_optimization", dict[str, object](content), document.places)
    offload_optimizer = _offload_section(zero, "offload_optimizer")
    offload_param = _offload_section(zero, "offload_param")
    # DeepSpeed's own default. Without such a file Accelerate's applies, which is 2.
    stage = _stage(zero, "stage", 0)
    offload_params = _device(offload_param, "device")
    _refuse_offload(zero, "offload_param", offload_params, stage)
    return DeepSpeedSettings(
        zero_stage=stage,
        offload_optimizer_device=_device(offload_optimizer, "device"),
        offload_param_device=offload_params,
        gradient_accumulation_steps=_accumulation(top),
        gradient_clipping=_gradient_clipping(top),
        zero3_init=section.boolean("zero3_init_flag", False),
        config_file=file,
        config_values=document.values,
    )


def _offload_section(zero: Section, name: str) -> Section:
    content = zero.values.get(name) or {}
    if not isinstance(content, dict):
        raise zero.refuse(name, 'a mapping such as {"device": "cpu"}', "correct it, or delete it")
    section = Section(zero.file, f"{zero.name}.{name}", dict[str, object](content), zero.places)
    if section.text("nvme_path") is not None:
        raise section.refuse("nvme_path", f"absent: {_NO_NVME}", "delete it")
    return section


def _accumulation(section: Section) -> int | None:
    key = "gradient_accumulation_steps"
    if section.values.get(key) in (None, "auto"):
        return None
    return section.integer(key, 1, low=1)


def _gradient_clipping(section: Section) -> float | None:
    """Return None for null and `auto`. Refuses true, because Python takes it for 1."""
    value = section.values.get("gradient_clipping")
    if isinstance(value, bool):
        raise section.refuse("gradient_clipping", "a number", "correct it, or delete it")
    # Text is `auto`, which DeepSpeed fills in from Accelerate.
    if isinstance(value, int | float):
        return float(value)
    return None


def _deepspeed_file(section: Section, top: Section) -> tuple[Path, Document] | None:
    """Read the deepspeed_config_file, if there is one. Refuses keys decided by the file."""
    name = section.text("deepspeed_config_file")
    # `none` is Accelerate's word for no file, in its environment variable.
    if name is None or name == "none":
        return None
    for key in _REPLACED_BY_DEEPSPEED_FILE:
        if key in section.values:
            raise section.refuse(
                key,
                "absent when deepspeed_config_file is given, which sets it",
                "keep it in one of the two places",
            )
    if top.values.get("mixed_precision") is not None:
        raise top.refuse(
            "mixed_precision",
            "absent when deepspeed_config_file is given",
            "delete the line; the experiment sets precision",
        )
    file = Path(name)
    try:
        return file, read_document(file)
    except YamlError as error:
        raise UsageError(f"{section.file}: `deepspeed_config.deepspeed_config_file: {name}`: {error}") from error


def _stage(section: Section, key: str, default: int) -> int:
    stage = section.integer(key, default, low=0, high=3)
    if stage == 0:
        raise section.refuse(
            key,
            "1, 2 or 3: stage 0 shards nothing",
            "write 2, or `distributed_type: MULTI_GPU` for plain DDP",
        )
    return stage


def _device(section: Section, key: str) -> str:
    if str(section.values.get(key)).lower() == "nvme":
        raise section.refuse(key, f"none or cpu: {_NO_NVME}", "write cpu, or `distributed_type: FSDP` on more GPUs")
    return str(section.choice(key, ("none", "cpu"), "none"))


def _refuse_offload(section: Section, key: str, device: str, stage: int) -> None:
    if device != "none" and stage != 3:
        raise section.refuse(
            key, f"none with stage {stage}: parameters are offloaded in stage 3 only", "write none, or stage 3"
        )


def _check_multinode(section: Section, machines: int) -> None:
    from accelerate.utils.constants import DEEPSPEED_MULTINODE_LAUNCHERS

    # Accelerate's default. Of its launchers only `standard` takes no host file.
    launcher = section.choice("deepspeed_multinode_launcher", DEEPSPEED_MULTINODE_LAUNCHERS, "pdsh")
    if machines > 1 and launcher != "standard" and section.text("deepspeed_hostfile") is None:
        raise section.refuse(
            "deepspeed_hostfile",
            f"a file naming the machines, because num_machines is {machines} and the launcher is {launcher}",
            "add it, or write `deepspeed_multinode_launcher: standard` and start it on every machine",
        )


def check_file_of_environment(environment: Mapping[str, str]) -> None:
    """Check a DeepSpeed file given by a flag of `accelerate launch`, in no launch file. Raises like `check_keys`."""
    file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file == "none":
        return
    try:
        document = read_document(Path(file))
    except YamlError as error:
        raise UsageError(f"deepspeed_config_file: {file}: {error}") from error
    check_keys(Section(Path(file), "", document.values, document.places))


def refuse_offload(settings: Mapping[str, object], source: str) -> None:
    """Refuse the same offloading as `read_deepspeed` in the settings of a process, which flags may have set."""
    zero = settings.get("zero_optimization")
    if not isinstance(zero, dict):
        return
    values = dict[str, object](zero)
    for name in ("offload_optimizer", "offload_param"):
        content = values.get(name)
        if not isinstance(content, dict):
            continue
        device = str(dict[str, object](content).get("device", "none")).lower()
        asked = f"{name}_device: {device} in the DeepSpeed settings of {source}"
        if device == "nvme":
            raise UsageError(f"{asked}: none or cpu is required: {_NO_NVME}; give cpu, or leave it out")
        if name == "offload_param" and device != "none" and values.get("stage") != 3:
            raise UsageError(
                f"{asked}: none is required with stage {values.get('stage')}: parameters are offloaded in stage 3 "
                "only; leave it out, or give stage 3"
            )


def check_keys(top: Section) -> None:
    """Refuse keys and values of a DeepSpeed file that are unknown here, or would change the result of a run.

    Raises `UsageError` with file, key, value, what is required and what to do.
    """
    for name, known in SECTIONS.items():
        section = _section(top, name)
        for key in section.values:
            if key not in known:
                raise _unknown(section, key)
            _check_value(section, key, known[key])


def _section(top: Section, name: str) -> Section:
    """Return a section, empty if it is absent. One that is not a mapping is refused here or by its reader."""
    content: object = top.values
    for part in name.split(".") if name else ():
        content = content.get(part) if isinstance(content, dict) else None
    if name in ("fp16", "bf16") and name in top.values and not isinstance(content, dict):
        raise top.refuse(name, 'a mapping such as {"enabled": "auto"}', "correct it, or delete it")
    values = dict[str, object](content) if isinstance(content, dict) else {}
    return Section(top.file, name, values, top.places)


def _check_value(section: Section, key: str, kind: object) -> None:
    value = section.values[key]
    if isinstance(kind, Only):
        if not _same(value, kind.value):
            wanted = str(kind.value).lower()
            raise section.refuse(key, f"{wanted}: {kind.reason}", f"write {wanted}, or delete it")
    # DeepSpeed does not take YAML 1.1's other words for true and false.
    elif kind == BOOLEAN and not isinstance(value, bool):
        raise section.refuse(key, "true or false", "write one of them, or delete it")
    elif kind in (COUNT, COUNT_OR_AUTO) and not (_is_count(value) or (kind == COUNT_OR_AUTO and value == "auto")):
        raise section.refuse(key, "a whole number, 0 or more", "write digits without quotes, or delete it")


def _same(value: object, wanted: object) -> bool:
    # In Python true equals 1.
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, str):
        return value.lower() == wanted
    return value == wanted


def _is_count(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # DeepSpeed takes 5e8, which JSON reads as a float.
    return value >= 0 and float(value).is_integer()


def _unknown(section: Section, key: str) -> UsageError:
    with_key = [name for name, known in SECTIONS.items() if key in known]
    meant = did_you_mean(nearest(key, SECTIONS[section.name]), bare=True)
    if key in INSTEAD:
        remedy = INSTEAD[key]
    elif with_key:
        remedy = f"it belongs under {with_key[0]}" if with_key[0] else "it belongs at the top of the file"
    else:
        remedy = meant or "delete it"
    required = "absent: only those keys of DeepSpeed are accepted that do not change the result of a run"
    return section.refuse(key, required, remedy)

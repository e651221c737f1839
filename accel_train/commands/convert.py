"""``accel-train checkpoints convert``: turn weights of another tool into a checkpoint for ``--init_from``.

Reads safetensors only. Pickles are listed and ignored.
"""

from __future__ import annotations

import re
import shlex
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_train import __version__
from accel_train.commands import diff, places
from accel_train.commands.tensor_files import new_directory, temporary_directory, unused_directory, write_collection
from accel_train.config import UsageError, expand_path
from accel_train.store import atomic_files, commit, strict_json, weights
from accel_train.store.exports.pickles import is_pickle
from accel_train.store.manifest import checkpoint_name
from accel_train.store.weights import TensorInfo

# Accelerate's model and model_1, transformers' model, diffusers' diffusion_pytorch_model, variants such as .fp16.
MODEL_STEM = re.compile(r"(?:diffusion_pytorch_)?model(?:_\d+)?(?:\..+)?")
# Keys of config.json that are not copied, with the reason.
DROPPED_KEYS = {
    "auto_map": "it names code for other tools to run",
    "custom_pipelines": "it names code for other tools to run",
    "trust_remote_code": "it makes other tools run code",
    "_name_or_path": "the path of its origin",
    "_attn_implementation": "depends on the machine, not on the weights",
    "_attn_implementation_internal": "depends on the machine, not on the weights",
}


def convert(source: str, destination: str, *, stem: str | None = None) -> int:
    """Write ``destination/checkpoint_00000000`` from weights of another tool, in fp32 and without optimizer state.

    ``source`` is a directory written by ``Accelerator.save_state`` or ``save_pretrained`` (diffusers, transformers),
    with one file or shards. ``stem`` selects one of several collections, such as ``model_1``. Prints everything left
    out with its reason. Raises ``UsageError`` for damaged files, NaN, and weights stored only in pickles.
    """
    path = _source(source)
    target = _new_checkpoint(destination)
    chosen = _choose(path, stem)
    tensors = weights.find_tensors(path, chosen)
    config, notes = _clean_config(path / "config.json")
    # The name of an unfinished save, so that every reader of checkpoints ignores it.
    temporary = target.parent / commit.temporary_name(0, atomic_files.new_nonce())
    with temporary_directory(temporary):
        write_collection(temporary, "model", tensors, "fp32")
        if config is not None:
            atomic_files.write_json_in_place(temporary / "config.json", config)
        files = [file for file in sorted(temporary.rglob("*")) if file.is_file()]
        sealed: dict[str, Any] = {}
        for file in files:
            name = file.relative_to(temporary).as_posix()
            sealed[name] = commit.seal_file(file)
        commit.commit(temporary, target, _manifest(sealed, converted_from=f"{chosen} of {path}"))
    elements = sum(info.elements for info in tensors.values())
    print(f"{target}: {len(tensors)} tensors, {elements / 1e6:.1f} million elements in fp32, from {chosen} of {path}")
    left_out = _left_out(path, tensors, chosen) | notes
    for name, reason in sorted(left_out.items()):
        print(f"left out: {name}: {reason}")
    print(f"start a run from these weights with --init_from {shlex.quote(str(target))}")
    return 0


def convert_adapters(source: str, base: str, destination: str, stem: str | None = None) -> int:
    """Write the adapters in a LoRA file of safetensors to ``destination``, as folders of peft for ``--init_from``.

    ``base`` is the Hub id or folder of their diffusers pipeline. Raises ``UsageError`` as ``convert_file`` does, and
    for ``stem``, which is for ``convert``.
    """
    # Imported late, because other conversions do not need diffusers.
    from accel_train.domains.images.kohya.foreign_adapters import convert_file
    from accel_train.domains.images.pipelines.loading import BaseConfig, DiffusersBase, find_base

    if stem is not None:
        raise UsageError(f"--stem {stem}: a LoRA file has one collection of weights; leave --stem out")
    file = expand_path(source)
    if file.suffix != ".safetensors" or not file.is_file():
        raise UsageError(f"{file}: with --base, the path of a LoRA file in safetensors is required")
    target = unused_directory(destination)
    found = find_base(BaseConfig(source=base))
    if not isinstance(found, DiffusersBase):
        raise UsageError(f"--base {base}: is {found.family.name}; a diffusers pipeline is required")
    with new_directory(target) as temporary:
        lines = convert_file(file, found, temporary)
    print(f"{target}: adapters of {file}, in peft's layout")
    for line in lines:
        print(line.replace(str(temporary), str(target)))
    return 0


def _source(source: str) -> Path:
    path = expand_path(source)
    if path.is_file() and is_pickle(path):
        raise weights.pickle_error([path])
    if path.is_file() and path.suffix == ".safetensors":
        raise UsageError(
            f"{path}: is a file; a directory is required, because its config.json is copied too: give {path.parent} "
            f"with --stem {shlex.quote(path.stem)}. For a LoRA file of diffusers or kohya, add --base with its pipeline"
        )
    if not path.is_dir():
        # A checkpoint of a run, chosen by its step. For any other, this raises with a list of what is there.
        path = places.find_place(source).checkpoints[0]
    if (path / "manifest.json").is_file() or (path / "run.json").is_file():
        raise UsageError(f"{path}: is already accel_train's own; give it to --init_from, or `export` it as plain files")
    return path


def _new_checkpoint(destination: str) -> Path:
    path = expand_path(destination)
    name = checkpoint_name(0)
    target = path if path.name == name else path / name
    # Among the checkpoints of a run it would be the oldest, and the run's retention would delete it.
    for folder in (target.parent, target.parent.parent):
        if (folder / "run.json").exists():
            raise UsageError(f"{path}: is inside the run {folder}; give a directory outside it")
    if target.exists():
        raise UsageError(f"{target}: exists already; give another directory")
    if target.parent.is_file():
        raise UsageError(f"{target.parent}: is a file; give another directory")
    return target


def _choose(path: Path, stem: str | None) -> str:
    """Choose the collection. Raises ``UsageError`` if there are several, or pickles only."""
    stems = diff.stems_in(path)
    if stem is not None:
        if stem not in stems:
            raise UsageError(f"--stem {stem}: {path} has no such weights; it has {', '.join(stems) or 'none'}")
        return stem
    models = [name for name in stems if MODEL_STEM.fullmatch(name)]
    # A plain name wins over variants such as .fp16.
    plain = [name for name in models if name in diff.WEIGHTS]
    for candidates in (plain, models):
        if len(candidates) == 1:
            return candidates[0]
    if models:
        raise UsageError(f"{path}: contains {', '.join(models)}; choose one with --stem {shlex.quote(models[0])}")
    _refuse_pickles(path)
    raise UsageError(
        f"{path}: contains no model*.safetensors or diffusion_pytorch_model*.safetensors, but "
        f"{places.contents(path)}; give the directory with the weights, or name them with --stem NAME"
    )


def _refuse_pickles(path: Path) -> None:
    """Refuse weights in pickles, with the command of a tool to convert them."""
    # Accelerate writes a distributed checkpoint into a folder below the directory that people name.
    inside = sorted(entry for entry in path.iterdir() if entry.is_dir())
    for folder in (path, *inside):
        if _is_distributed(folder):
            raise UsageError(
                f"{folder}: a distributed checkpoint of torch. Its .metadata is a pickle, and reading a pickle runs "
                "the code in it. If you trust it: accelerate merge-weights "
                f"{shlex.quote(str(folder))} OUT writes safetensors; convert OUT"
            )
    # DeepSpeed writes this script beside its checkpoints.
    script = path / "zero_to_fp32.py"
    if script.is_file():
        command = shlex.join(["python", str(script), str(path)])
        raise UsageError(
            f"{path}: a DeepSpeed checkpoint. Its files are pickles, and reading a pickle runs the code in it. If you "
            f"trust it: {command} OUT --safe_serialization; convert OUT"
        )
    pickles = [file for file in path.iterdir() if is_pickle(file)]
    if pickles:
        raise weights.pickle_error(pickles)


def _is_distributed(folder: Path) -> bool:
    return (folder / ".metadata").is_file() or any(folder.glob("*.distcp"))


def _clean_config(file: Path) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """Return config.json without ``DROPPED_KEYS``, and the reason for each dropped key."""
    if not file.is_file():
        return None, {}
    try:
        config = strict_json.read_object(file)
    except ValueError as error:
        return None, {file.name: f"cannot be read as JSON ({error})"}
    notes: dict[str, str] = {}
    for key, reason in DROPPED_KEYS.items():
        if key in config:
            del config[key]
            notes[f"{file.name}: {key}"] = reason
    return config, notes


def _left_out(path: Path, taken: Mapping[str, TensorInfo], chosen: str) -> dict[str, str]:
    """Return the reason for each entry of the directory that is left out."""
    files = {info.file for info in taken.values()}
    reasons: dict[str, str] = {}
    for entry in sorted(path.iterdir()):
        # An index has no weights of its own, and config.json is reported key by key.
        if entry in files or entry.name == "config.json" or ".safetensors.index." in entry.name:
            continue
        name = f"{entry.name}/" if entry.is_dir() else entry.name
        reasons[name] = _reason(entry, chosen)
    return reasons


def _reason(entry: Path, chosen: str) -> str:
    if entry.is_dir():
        if _is_distributed(entry) or any(is_pickle(file) for file in entry.iterdir()):
            return "it contains pickles"
        return "not weights of this model"
    if is_pickle(entry):
        reason = "a pickle, and reading one runs the code in it"
        if entry.stem.startswith("optimizer"):
            reason += "; the optimizer starts from zero"
        return reason
    if shard := diff.SHARD.fullmatch(entry.name):
        if shard["stem"] == chosen:
            return "no index names it; if it belongs to these weights, save them again"
        return f"other weights; take them with --stem {shlex.quote(shard['stem'])}"
    return "not weights"


def _manifest(files: Mapping[str, Any], *, converted_from: str) -> dict[str, Any]:
    return {
        "accel_train": __version__,
        "run_id": uuid.uuid4().hex[:12],
        "step": 0,
        "samples_seen": 0,
        "epoch": 0.0,
        "state": False,  # no run resumes from it
        "world_size": 1,
        "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": 0.0,
        "layout": {},
        "experiment": {},
        "metrics": {},
        "files": dict(files),
        "converted_from": converted_from,
    }

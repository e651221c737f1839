"""``accel-train checkpoints convert``: weights that another tool saved, as a checkpoint to start from.

Safetensors only. What is a pickle is named and left where it is.
"""

from __future__ import annotations

import re
import shlex
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_train import __version__, strict_json
from accel_train.commands import diff, places
from accel_train.commands.export import building, write_collection
from accel_train.config import UsageError, expand_path
from accel_train.store import commit, weights
from accel_train.store.weights import TensorInfo

OF_A_MODEL = re.compile(r"(?:diffusion_pytorch_)?model(?:_\d+)?(?:\..+)?")
"""Accelerate's model and model_1, transformers' model, diffusers' diffusion_pytorch_model, variants such as .fp16."""
NOT_TAKEN = {
    "auto_map": "it names code for other tools to run",
    "custom_pipelines": "it names code for other tools to run",
    "trust_remote_code": "it has other tools run code",
    "_name_or_path": "a path of where it was saved",
    "_attn_implementation": "of the machine, not of the weights",
    "_attn_implementation_internal": "of the machine, not of the weights",
}
"""Keys of a config.json that stay behind, and why."""


def convert(source: str, destination: str, *, stem: str | None = None) -> int:
    """Make ``destination/checkpoint_00000000`` from weights of another tool: fp32, without optimizer state.

    ``source`` is a directory of ``Accelerator.save_state`` or of ``save_pretrained`` (diffusers, transformers), with
    one file or shards. ``stem`` names the collection where there are several, such as ``model_1``. Prints what is left
    out and why. Raises ``UsageError`` for what is not sound, for NaN, and for what only a pickle has.
    """
    path, target = _source(source), _new_checkpoint(destination)
    chosen = _choose(path, stem)
    tensors = weights.find_tensors(path, chosen)
    config, notes = _clean_config(path / "config.json")
    temporary = target.parent / commit.temporary_name(0, commit.new_nonce())
    with building(temporary):
        write_collection(temporary, "model", tensors, "fp32")
        if config is not None:
            commit.write_json(temporary / "config.json", config)
        files = [file for file in sorted(temporary.rglob("*")) if file.is_file()]
        sealed = {file.relative_to(temporary).as_posix(): commit.seal_file(file) for file in files}
        commit.commit(temporary, target, _manifest(sealed) | {"converted_from": f"{chosen} of {path}"})
    millions = sum(info.elements for info in tensors.values()) / 1e6
    print(f"{target}: {len(tensors)} tensors, {millions:.1f} million elements in fp32, from {chosen} of {path}")
    for name, reason in sorted((_left_out(path, tensors) | notes).items()):
        print(f"left out: {name}: {reason}")
    print(f"start a run from these weights with --init_from {shlex.quote(str(target))}")
    return 0


def _source(source: str) -> Path:
    path = expand_path(source)
    if path.is_file() and weights.is_pickle(path):
        raise weights.pickle_refusal([path])
    if not path.is_dir():
        places.find_place(source)  # which says what is there instead
    if (path / "manifest.json").is_file() or (path / "run.json").is_file():
        raise UsageError(f"{path}: is accel_train's own already; --init_from takes it, and `export` makes plain files")
    return path


def _new_checkpoint(destination: str) -> Path:
    path, name = expand_path(destination), commit.checkpoint_name(0)
    target = path if path.name == name else path / name
    if any((folder / "run.json").exists() for folder in (target.parent, target.parent.parent)):
        raise UsageError(f"{path}: lies in a run, whose checkpoints are its own; give a directory outside of it")
    if target.exists() or target.parent.is_file():
        raise UsageError(f"{target if target.exists() else target.parent}: is there already; give another directory")
    return target


def _choose(path: Path, stem: str | None) -> str:
    """The collection to take. Raises ``UsageError`` where it is not clear, or where there are pickles only."""
    stems = diff.stems_in(path)
    models = [name for name in stems if OF_A_MODEL.fullmatch(name)]
    plain = [name for name in models if name in diff.WEIGHTS]
    if stem is not None:
        if stem not in stems:
            raise UsageError(f"--stem {stem}: {path} has no such weights; it has {', '.join(stems) or 'none'}")
        return stem
    for candidates in (plain, models):
        if len(candidates) == 1:
            return candidates[0]
    if models:
        raise UsageError(f"{path}: holds {', '.join(models)}; say which with --stem {shlex.quote(models[0])}")
    _refuse_pickles(path)
    raise UsageError(
        f"{path}: holds no model*.safetensors or diffusion_pytorch_model*.safetensors, but {places.contents(path)}; "
        "give the directory that holds the weights, or say which they are with --stem NAME"
    )


def _refuse_pickles(path: Path) -> None:
    """Where the weights are in pickles only: the reason, and the way that fits the tool which wrote them."""
    for folder in (path, *sorted(p for p in path.iterdir() if p.is_dir())):
        if _is_distributed(folder):
            raise UsageError(
                f"{folder}: a distributed checkpoint of torch, whose .metadata is a pickle, and to read a pickle is to "
                "run the program in it. Where you trust it: accelerate merge-weights "
                f"{shlex.quote(str(folder))} OUT writes safetensors; convert OUT"
            )
    if (script := path / "zero_to_fp32.py").is_file():
        command = shlex.join(["python", str(script), str(path)])
        raise UsageError(
            f"{path}: a DeepSpeed checkpoint, whose files are pickles, and to read a pickle is to run the program in "
            f"it. Where you trust it: {command} OUT --safe_serialization; convert OUT"
        )
    if pickles := [file for file in path.iterdir() if weights.is_pickle(file)]:
        raise weights.pickle_refusal(pickles)


def _is_distributed(folder: Path) -> bool:
    return (folder / ".metadata").is_file() or any(folder.glob("*.distcp"))


def _clean_config(file: Path) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """config.json without what would run code or belongs to another machine, and notes of what stayed behind."""
    if not file.is_file():
        return None, {}
    try:
        config = strict_json.read_object(file)
    except ValueError as error:
        return None, {file.name: f"cannot be read as JSON ({error})"}
    notes = {f"{file.name}: {key}": why for key, why in NOT_TAKEN.items() if key in config}
    return {key: value for key, value in config.items() if key not in NOT_TAKEN}, notes


def _left_out(path: Path, taken: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Everything else in the directory, with the reason."""
    files = {info.file for info in taken.values()}
    reasons: dict[str, str] = {}
    for entry in sorted(path.iterdir()):
        stem = diff.SHARD.fullmatch(entry.name)
        if entry in files or entry.name == "config.json" or ".safetensors.index." in entry.name:
            continue
        if entry.is_dir():
            pickles = _is_distributed(entry) or any(weights.is_pickle(file) for file in entry.iterdir())
            reasons[f"{entry.name}/"] = "it holds pickles" if pickles else "not weights of this model"
        elif weights.is_pickle(entry):
            anew = "; the optimizer starts anew" if entry.stem.startswith("optimizer") else ""
            reasons[entry.name] = f"a pickle, and to read one is to run the program in it{anew}"
        elif stem:
            reasons[entry.name] = f"other weights; take them with --stem {shlex.quote(stem['stem'])}"
        else:
            reasons[entry.name] = "not weights"
    return reasons


def _manifest(files: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "accel_train": __version__,
        "run_id": uuid.uuid4().hex[:12],
        "step": 0,
        "samples_seen": 0,
        "epoch": 0.0,
        "state": False,
        "world_size": 1,
        "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": 0.0,
        "layout": {},
        "experiment": {},
        "metrics": {},
        "files": dict(files),
    }

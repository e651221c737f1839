"""``accel-train export``: write the weights of a checkpoint as plain files for other tools, with a proof."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from accel_train import loading
from accel_train.commands import diff, places
from accel_train.commands.tensor_files import new_directory, unused_directory, write_collection
from accel_train.config import UsageError
from accel_train.export import verify_adapter_script
from accel_train.export.proof import NotRepeatedError, Outputs, packages, write_proof
from accel_train.pipeline import ADAPTER_DESCRIPTION, Convertible, WrittenModel
from accel_train.precision import Precision, dtype_of
from accel_train.store import atomic_files, commit, strict_json, weights
from accel_train.store.exports import peft_layout
from accel_train.store.manifest import Checkpoint
from accel_train.store.weights import FLOATS, TensorInfo
from accel_train.wording import readable_size

Source = Literal["model", "ema"]
BARE = ("torch", "safetensors")
"""Packages that every model.py needs."""
DESCRIBING = 'docs/use.md, "A pipeline for a recipe of your own"'
LEFT_OUT = re.compile(r"(model|ema)(-\d+-of-\d+)?\.safetensors(\.index\.json)?|optimizer/.*|trainer_state\.json")
"""Files that are not copied: the two collections, which are written separately, and the training state."""
DTYPE_KEYS = {"dtype", "torch_dtype"}
"""Keys of the dtype in a config.json of transformers. The second is that of older versions."""


def export(
    checkpoint: str,
    destination: str,
    *,
    precision: Precision = "fp32",
    source: Source | None = None,
    merged: bool = False,
) -> int:
    """Write the weights or their EMA as ``destination/model.safetensors``, with its other files and the options.

    ``source`` None takes the EMA if there is one, as evaluations and ``load`` do. Adapters are written in the layout of
    peft, with the sha256 of each file of their base, and also for other programs if the pipeline of their recipe can
    convert them. With ``merged`` they are written as the whole model with their base, built in memory in fp32.

    Beside the weights are model.py, which rebuilds the model with torch alone, an example of inputs and outputs, and
    verify.py, which repeats the example and is run once here. They require that the checkpoint's config.json names the
    recipe's pipeline. For adapters, verify.py compares files but no outputs. experiment.json has the options of the
    experiment. Weights above 2 GB are shards with an index. A run stands for its newest verified checkpoint. If
    ``save_precision`` is lower than fp32, the exact fp32 tensors are taken. Raises ``UsageError`` for a destination in
    use, a damaged checkpoint, NaN, and values out of the range of ``precision``, and ``ProofError`` if the outputs of
    model.py differ from those of the library's model.
    """
    found, skipped = places.newest_at(checkpoint)
    source = source or weights.best_stem(found.path)
    target = unused_directory(destination)
    tensors = _best_copy(found, source)
    is_adapter = peft_layout.CONFIG_FILE in found.manifest["files"]
    if merged:
        _refuse_unmergeable(found, is_adapter)
    written = WrittenModel()
    with new_directory(target) as temporary:
        if merged:
            written = _write_merged(found, temporary, tensors, precision)
        elif is_adapter:
            write_collection(temporary, peft_layout.WEIGHTS_STEM, peft_layout.by_key_of_peft(tensors), precision)
            _copy_extras(found, temporary)
        else:
            write_collection(temporary, "model", tensors, precision, found.manifest.get("buffers", ()))
            _copy_extras(found, temporary)
            _name_precision(temporary, precision)
        atomic_files.write_json_in_place(temporary / "experiment.json", _experiment(found, source))
        lines = _write_for_others(temporary)
        # Proven under the temporary name, so that an export that fails its proof never appears.
        proof = written.line or _proof(found, temporary, is_adapter and not merged, written.outputs)
    for reason in skipped:
        print(f"skipped: {reason}")
    stored = sorted({info.dtype for info in tensors.values() if info.dtype in FLOATS} - {"F32"})
    if precision == "fp32" and stored:
        print(f"note: the checkpoint has these weights in {', '.join(stored)}; fp32 adds no digits to them")
    size = readable_size(places.disk_bytes(target))
    print(f"{target}: {_label(source, merged)} of {found.path} (step {found.step}) in {precision}, {size}")
    for line in [*lines, proof]:
        print(line)
    return 0


def _label(source: Source, merged: bool) -> str:
    label = "weights" if source == "model" else "EMA weights"
    return f"base and merged {label}" if merged else label


def _refuse_unmergeable(checkpoint: Checkpoint, is_adapter: bool) -> None:
    if not is_adapter:
        raise UsageError(f"{checkpoint.path}: contains no adapters, so there is nothing to merge; leave --merged out")
    if not hasattr(loading.pipeline_of(checkpoint.path), "write_merged"):
        raise UsageError(
            f"{checkpoint.path}: its recipe merges no adapters; leave --merged out, and merge them with peft"
        )


def _write_merged(
    checkpoint: Checkpoint, directory: Path, tensors: Mapping[str, TensorInfo], precision: Precision
) -> WrittenModel:
    """Write the whole model of adapters and their base, and return its pipeline's account of it."""
    kind: Any = loading.pipeline_of(checkpoint.path)
    staged = directory / "adapters"
    staged.mkdir()
    # Exactly the weights that were asked for, as a checkpoint without others.
    write_collection(staged, "model", tensors, "fp32", checkpoint.manifest.get("buffers", ()))
    _copy_extras(checkpoint, staged)
    _describe_base(checkpoint, staged)
    try:
        written = kind.write_merged(staged, directory, precision)
    except UsageError as error:
        # The staged folder is gone when the message is read.
        raise UsageError(str(error).replace(str(staged), str(checkpoint.path))) from None
    shutil.rmtree(staged)
    return written


def _describe_base(checkpoint: Checkpoint, directory: Path) -> dict[str, Any]:
    """Add the base's files, from the manifest, to the adapters' description in ``directory``, and return it."""
    path = directory / ADAPTER_DESCRIPTION
    described: dict[str, Any] = {}
    if path.is_file():
        described = strict_json.read_object(path)
    described["base"] = described.get("base", {}) | (checkpoint.manifest.get("base") or {})
    atomic_files.write_json_in_place(path, described)
    return described


def _proof(checkpoint: Checkpoint, directory: Path, is_adapter: bool, outputs: Outputs) -> str:
    """Write the proof that suits the kind of export, and return a line about it for the user."""
    if is_adapter:
        return _prove_adapter(checkpoint, directory)
    return _prove(directory, outputs)


def _prove_adapter(checkpoint: Checkpoint, directory: Path) -> str:
    """Write verify.py, the base and the sha256 of every file, and return a line about them for the user.

    Without the base there are no outputs to repeat, so verify.py compares files only.
    """
    script = Path(str(verify_adapter_script.__file__)).read_text("utf-8")
    (directory / "verify.py").write_text(script, "utf-8")
    described = _describe_base(checkpoint, directory)
    # The description cannot hold its own hash.
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != ADAPTER_DESCRIPTION]
    hashes = {path.relative_to(directory).as_posix(): commit.hash_file(path) for path in files}
    atomic_files.write_json_in_place(directory / ADAPTER_DESCRIPTION, described | {"files": hashes})
    base = described["base"]
    if "files" not in base:
        return "without the files of their base, which the checkpoint does not name"
    count = len(base["files"])
    return f"adapters of {base['source']}, with the sha256 of its {count} file(s); check these with verify.py"


def _write_for_others(directory: Path) -> list[str]:
    """Let the pipeline named beside the weights write these for other programs too, and return lines about them."""
    if not any((directory / name).is_file() for name in loading.DESCRIPTIONS):
        return []
    if not loading.is_allowed(loading.read_description(directory).get("pipeline")):
        return []
    kind = loading.pipeline_of(directory)
    return kind.write_for_others(directory) if isinstance(kind, Convertible) else []


def _prove(directory: Path, outputs: Outputs) -> str:
    """Write model.py, the example and verify.py, run it, and return a line about it for the user."""
    if not (directory / "config.json").is_file():
        return (
            "without model.py and verify.py, which are made only for pipelines of this package; weights and options "
            f"are complete, and a pipeline of your own loads them: {DESCRIBING}"
        )
    named = loading.read_description(directory).get("pipeline")
    if named is None:
        return "without model.py and verify.py: config.json names no pipeline of this package"
    if not loading.is_allowed(named):
        return "without model.py and verify.py: config.json names the pipeline of a recipe outside this package"
    kind = loading.pipeline_of(directory)
    try:
        pipeline = kind.from_directory(directory, "cpu")
    # Such as an encoder that is not on this machine. The weights are still useful elsewhere.
    except UsageError as error:
        return f"without model.py and verify.py, because the model cannot be used here: {error}"
    if pipeline.standalone is None:
        return "without model.py and verify.py: its pipeline has nothing to write them from"
    try:
        printed = write_proof(directory, pipeline, outputs).splitlines()
    except NotRepeatedError as error:
        return f"model.py and verify.py were written but not run here ({error}); run verify.py where they are used"
    # Packages that every model.py needs are not listed.
    needed = [name for name in packages((directory / "model.py").read_text("utf-8")) if name not in BARE]
    others = f"and {', '.join(needed)}" if needed else "alone"
    return f"model.py with torch {others} reproduces {len(printed) - 2} examples of this model; check it with verify.py"


def _best_copy(checkpoint: Checkpoint, source: Source) -> dict[str, TensorInfo]:
    """Find the exact fp32 weights beside the optimizer state, or else the weights of the collection.

    Untrained tensors, such as buffers and embedded frozen parameters, are in ``model.safetensors`` alone.
    """
    if source == "ema" and not weights.has_ema(checkpoint.path):
        raise UsageError(
            f"{checkpoint.path}: has no {source}.safetensors, so there are no EMA weights (ema.decay was 0); "
            "export --weights model"
        )
    # Weights saved in bf16 and exported in fp16 would be rounded twice. Asked of the manifest, because files that it
    # does not list, such as those of an interrupted strip, are not verified.
    if "optimizer/index.json" in checkpoint.manifest["files"]:
        key = "master" if source == "model" else "master_ema"
        exact = diff.optimizer_state(checkpoint.path, [key])
        if key in exact:
            return weights.find_tensors(checkpoint.path, "model") | exact[key]
    return weights.find_tensors(checkpoint.path, "model") | weights.find_tensors(checkpoint.path, source)


def _experiment(checkpoint: Checkpoint, source: Source) -> dict[str, Any]:
    return {
        "run_id": checkpoint.manifest.get("run_id"),
        "step": checkpoint.manifest.get("step"),
        "weights": source,
        "options": checkpoint.manifest.get("experiment") or {},
    }


def _copy_extras(checkpoint: Checkpoint, directory: Path) -> None:
    """Copy a recipe's files beside the weights, as listed in the manifest, since only those were verified.

    These are config.json, assets, and all other files but the weights and the training state, such as a tokenizer
    where transformers looks for it.
    """
    for name in checkpoint.manifest["files"]:
        path = PurePosixPath(name)
        is_inside = ".." not in path.parts and not path.is_absolute()
        if is_inside and not LEFT_OUT.fullmatch(name):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint.file(name), directory / name)


def _name_precision(directory: Path, precision: Precision) -> None:
    """Set the dtype in config.json of a transformers model, in which its library loads the weights, to ``precision``.

    The config.json of a checkpoint names the dtype of the training.
    """
    path = directory / "config.json"
    if not path.is_file():
        return
    described = loading.read_description(directory)
    if "model_type" not in described:
        return
    named = str(dtype_of(precision)).removeprefix("torch.")
    # A model of pictures and texts has a nested config for each.
    nested = [part for part in described.values() if isinstance(part, dict) and "model_type" in part]
    for part in (described, *nested):
        for name in DTYPE_KEYS & part.keys():
            part[name] = named
    atomic_files.write_json_in_place(path, described)

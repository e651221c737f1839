"""Check this export: files, model and outputs. Needs torch, safetensors, and what model.py imports.

    python verify.py

Compares the sha256 of every file with example.json, builds the model of model.py, loads the weights, repeats the calls
of example.json and compares the outputs with those in example.safetensors. Exit code 0: all is as it was exported;
1: something differs; 2: a package is missing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

DIRECTORY = Path(__file__).resolve().parent


def main() -> int:
    """Run all checks and print what was found. Returns the exit code."""
    proof: dict[str, Any] = json.loads((DIRECTORY / "example.json").read_text("utf-8"))
    changed = changed_files(proof["files"])
    if changed:
        print(f"FAILED: changed since the export, or missing: {', '.join(changed)}")
        return 1
    print(f"{len(proof['files'])} files have the sha256 of the export")
    try:
        failed = compare_outputs(proof)
    except ModuleNotFoundError as error:
        print(f"FAILED: not compared, because {error.name} is not installed: pip install {error.name}")
        return 2
    if failed:
        print(f"FAILED: the outputs of {', '.join(failed)} differ from those of the export")
        return 1
    print("verified: this model gives the outputs of the export")
    return 0


def changed_files(files: dict[str, str]) -> list[str]:
    """List the files whose sha256 is not the given one."""
    changed: list[str] = []
    for name, digest in files.items():
        path = DIRECTORY / name
        if not path.is_file() or sha256(path) != digest:
            changed.append(name)
    return changed


def sha256(path: Path) -> str:
    """Hash a file, piece by piece."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def load_module() -> ModuleType:
    """Import model.py of this directory, and no other of this name."""
    spec = importlib.util.spec_from_file_location("exported_model", DIRECTORY / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their annotations up there
    spec.loader.exec_module(module)
    return module


def compare_outputs(proof: dict[str, Any]) -> list[str]:
    """Repeat every example and return the names of those with other outputs."""
    import torch
    from safetensors.torch import load_file

    module = load_module()
    model = module.load(DIRECTORY)
    described = json.loads((DIRECTORY / "config.json").read_text("utf-8"))
    tensors = load_file(DIRECTORY / "example.safetensors")
    failed: list[str] = []
    for example in proof["examples"]:
        given = example["arguments"]
        arguments = {name: decode(value, tensors, module) for name, value in given.items()}
        call = model
        if example["function"] is not None:
            call = partial(getattr(module, example["function"]), model, described)
        with torch.no_grad():
            result = call(**arguments)
        found = result._asdict() if hasattr(result, "_asdict") else {"output": result}
        expected = {name: tensors[key] for name, key in example["outputs"].items()}
        present = {name for name, value in found.items() if value is not None}
        errors = [relative_error(found[name], value) for name, value in expected.items() if name in present]
        if present != expected.keys() or max(errors) > proof["tolerance"]:
            failed.append(example["name"])
        print(f"{example['name']}: largest difference {max(errors, default=float('nan')):.1e} of the largest output")
    return failed


def decode(value: dict[str, Any], tensors: dict[str, Any], module: ModuleType) -> Any:
    """Return an argument: a tensor, a plain value, or a named tuple of model.py."""
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "tuple" in value:
        parts = {name: decode(part, tensors, module) for name, part in value["parts"].items()}
        return getattr(module, value["tuple"])(**parts)
    return value["value"]


def relative_error(found: Any, expected: Any) -> float:
    """Return the largest difference relative to the largest expected value, infinite for another shape and for NaN."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():  # tokens are equal or not
        return 0.0 if bool((found == expected).all()) else float("inf")
    largest = expected.double().abs().max().clamp(min=1e-12)
    error = float((found.double() - expected.double()).abs().max() / largest)
    # max() drops a NaN that does not come first, and every comparison with one is false.
    if math.isnan(error):
        return float("inf")
    return error


if __name__ == "__main__":
    sys.exit(main())

"""Write model.py, a stored example and verify.py beside exported weights, and run them once.

model.py is cut out of the library's sources, or loads a model of another library by that library. The example holds
fixed inputs with the outputs of the library's own model, computed from the exported weights. verify.py repeats them
with model.py.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from accel_train import __version__
from accel_train.export import standalone, verify_script
from accel_train.export.single_file import single_file
from accel_train.pipeline import Pipeline
from accel_train.store.commit import hash_file

Outputs = Sequence[Mapping[str, Any]] | None
"""Outputs of each example by name, if the files must reproduce those of another model, else None."""
TOLERANCE = 1e-4
"""Largest difference allowed, relative to the largest output. Rounding causes 1e-6, a wrong weight far more."""
FORMAT = 1
MISSING_PACKAGE = 2
"""Exit code of verify.py if a package is not installed."""
NOT_COMPARED = re.compile("^FAILED: not compared, because (.*)$", re.MULTILINE)
WITHOUT_LIBRARY = f"""
import runpy, sys
class Absent:
    def find_spec(name, *rest):
        if name.split(".")[0] == "{__name__.split(".")[0]}":
            raise ImportError("an export must not import " + name)
sys.meta_path.insert(0, Absent)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script as on a machine without the library, however that is installed here."""

HEADER = '''"""{name} of recipe {recipe}, in one file that needs torch, and safetensors to read the weights.

    model = load("{directory}")  # the folder with config.json and model.safetensors

Cut out of the sources of accel_train {version}, licensed under the Apache License 2.0. config.json says which objective
the outputs belong to, with which settings to sample, and the normalisation of inputs and outputs.
"""

from __future__ import annotations

'''
LOADER = '''

# loading --------------------------------------------------------------------------------------------------------------


def load(directory: str | Path = Path(__file__).parent) -> {name}:
    """Build the model of config.json in a directory and load its weights, in fp32 on the CPU, for inference."""
    return build_model({name}, {config}, Path(directory))
'''


class ProofError(RuntimeError):
    """The exported files do not give the outputs of the library's model. An error of accel_train, not of the user."""


class NotRepeatedError(RuntimeError):
    """verify.py lacked a package in its own process, so nothing was compared. The files are complete all the same."""


def write_proof(directory: Path, pipeline: Pipeline, outputs: Outputs = None) -> str:
    """Write model.py, example.json, example.safetensors and verify.py into an export, and run verify.py.

    ``pipeline`` was loaded from ``directory``, so its outputs are those of the exported weights. ``outputs``, if given,
    are stored instead: those of its examples before the weights were written. Returns the output of verify.py. Raises
    ``ProofError`` if it found a difference, and ``NotRepeatedError`` if it could not compare.
    """
    (directory / "model.py").write_text(model_source(pipeline), "utf-8")
    # A copy of the module itself, which imports nothing of the library. No test would run a template.
    script = Path(str(verify_script.__file__)).read_text("utf-8")
    (directory / "verify.py").write_text(script, "utf-8")
    _write_example(directory, pipeline, outputs)
    return _run(directory / "verify.py")


def model_source(pipeline: Pipeline) -> str:
    """Return model.py for the models of a pipeline."""
    assert pipeline.standalone is not None, "nothing to write model.py from"
    if isinstance(pipeline.standalone, ModuleType):
        return inspect.getsource(pipeline.standalone)
    model, config, *functions = pipeline.standalone
    recipe = pipeline.recipe
    header = HEADER.format(name=model.__name__, recipe=recipe, directory=".", version=__version__)
    body = single_file(model, config, standalone.build_model, *functions)
    return header + body + LOADER.format(name=model.__name__, config=config.__name__)


def packages(source: str) -> list[str]:
    """List the packages imported by a model.py, except for the standard library."""
    found: set[str] = set()
    # Also inside of functions: the loader imports safetensors in its body.
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).split(".")[0])
    return sorted(found - sys.stdlib_module_names)


def _write_example(directory: Path, pipeline: Pipeline, known: Outputs) -> None:
    tensors: dict[str, Tensor] = {}
    examples: list[dict[str, Any]] = []
    text = (directory / "config.json").read_text("utf-8")
    description: dict[str, Any] = json.loads(text)
    for number, example in enumerate(pipeline.examples()):
        arguments: dict[str, Any] = {}
        for name, value in example.arguments.items():
            arguments[name] = _encode(f"{number}.{name}", value, tensors)
        outputs: dict[str, str] = {}
        if known is None:
            with torch.no_grad():
                # Computed by the library's own model, with which the copy in model.py has to agree.
                found = example.call(pipeline.model, description)
        else:
            found = known[number]
        for name, value in found.items():
            outputs[name] = f"{number}.output.{name}"
            # Outputs may be views of one tensor, and a file cannot have them twice.
            tensors[outputs[name]] = value.contiguous().clone()
        function = None if example.function is None else example.function.__name__
        # By name, because verify.py finds it in the model.py beside it.
        examples.append({"name": example.name, "function": function, "arguments": arguments, "outputs": outputs})
    save_file(tensors, directory / "example.safetensors")
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    # All except for the list itself.
    files = [path for path in paths if path.name != "example.json"]
    proof = {
        "format": FORMAT,
        "accel_train": __version__,
        # Kernels of another release may round differently, which explains a difference near the tolerance.
        "torch": torch.__version__,
        "tolerance": TOLERANCE,
        "examples": examples,
        "files": {path.relative_to(directory).as_posix(): hash_file(path) for path in files},
    }
    (directory / "example.json").write_text(json.dumps(proof, indent=1), "utf-8")


def _encode(key: str, value: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Describe an argument as ``verify_script.decode`` reads it, with its tensors in ``tensors``."""
    if isinstance(value, Tensor):
        tensors[key] = value.contiguous().clone()  # two arguments may share memory, a file cannot
        return {"tensor": key}
    if hasattr(value, "_asdict"):
        parts: dict[str, Any] = {}
        for name, part in value._asdict().items():
            parts[name] = _encode(f"{key}.{name}", part, tensors)
        return {"tuple": type(value).__name__, "parts": parts}
    return {"value": value}


def _run(script: Path) -> str:
    # -P leaves out the working directory. PYTHONPATH stays: torch may come from there, and nothing but the library is
    # kept out.
    # -B writes no __pycache__ into the export.
    command = [sys.executable, "-P", "-B", "-c", WITHOUT_LIBRARY, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # It ran in a fresh process, as on the machine of whoever gets the export.
    if done.returncode == MISSING_PACKAGE and (reason := NOT_COMPARED.search(done.stdout)):
        raise NotRepeatedError(reason[1])
    if done.returncode:
        raise ProofError(
            f"{script.parent}: verify.py of the export failed; nothing was exported:\n{done.stdout}{done.stderr}"
        )
    return done.stdout

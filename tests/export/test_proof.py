"""An export proves itself: with torch and safetensors alone, and not with other weights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Collection, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import accel_train
from accel_train import cli
from accel_train.export import proof, verify_script
from accel_train.pipeline import Example
from accel_train.store import commit
from tests.trained import PLAIN, REFINED, TEXTS, field_run, language_run, picture_run, text_run

RUNS = {
    "language": language_run,
    "text": text_run,
    "pictures": picture_run,
    "operator": lambda run: field_run(run, PLAIN),
    "operator with a residual": lambda run: field_run(run, REFINED),
}
STDLIB_ONLY = (
    "torch",
    "safetensors",
    "numpy",
    "typing_extensions",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "markupsafe",
    "filelock",
    "fsspec",
    "functorch",
    "torchgen",
    "packaging",
)
"""What torch itself imports, and safetensors."""


QUICK = {"text", "operator"}
"""Pictures are of the model of texts, a residual is one more layer, and tests/domains/language/test_pipeline.py exports
a language model every day."""


def kinds(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module", params=kinds(RUNS, QUICK))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exported")
    assert cli._main(["export", str(RUNS[request.param](directory / "run")), str(directory / "out")]) == 0
    return directory / "out"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of packages with torch and safetensors alone."""
    directory = tmp_path_factory.mktemp("site")
    for name in STDLIB_ONLY:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            continue
        origin = Path(spec.origin)
        source = origin.parent if origin.name == "__init__.py" else origin
        (directory / source.name).symlink_to(source)
        libraries = source.parent / f"{name}.libs"
        if libraries.is_dir():
            (directory / libraries.name).symlink_to(libraries)
    return directory


def verify(directory: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Run verify.py where nothing but ``site`` can be imported."""
    code = (
        "import runpy, sys; sys.path.append(sys.argv[1]); script = sys.argv[2];"
        "import importlib.util as u; assert u.find_spec('accel_train') is None and u.find_spec('pydantic') is None;"
        "sys.argv = [script]; runpy.run_path(script, run_name='__main__')"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(site), str(directory / "verify.py")]
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd="/", env=given, capture_output=True, text=True, check=False)


def test_torch_and_safetensors_alone_rebuild_the_model(exported: Path, site: Path) -> None:
    done = verify(exported, site)
    assert done.returncode == 0, done.stdout + done.stderr
    examples = json.loads((exported / "example.json").read_text())["examples"]
    assert examples
    differences = [float(found) for found in re.findall(r"largest difference (\S+) of the largest output", done.stdout)]
    assert len(differences) == len(examples)
    assert max(differences) < 1e-5  # another process may round otherwise
    assert done.stdout.endswith("verified: this model gives the outputs of the export\n")


def test_model_py_names_nothing_of_the_library(exported: Path) -> None:
    text = (exported / "model.py").read_text()
    imported = {line.split()[1].split(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imported <= sys.stdlib_module_names | {"torch"}
    assert "transformers import" not in text
    assert "from_pretrained(" not in text  # needs the Hub's mixin
    assert "attention_needs" not in text  # of the mechanism


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.fixture
def bare_python(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter without packages. Returns ``site``, for PYTHONPATH."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return site


def test_torch_may_come_through_pythonpath(exported: Path, bare_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(proof.NotRepeatedError, match="torch is not installed: pip install torch"):
        proof._run(exported / "verify.py")
    monkeypatch.setenv("PYTHONPATH", str(bare_python))
    assert "verified: this model" in proof._run(exported / "verify.py")


def test_an_export_that_is_not_run_here_is_written_and_says_so(
    bare_python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli._main(["export", str(field_run(tmp_path / "run")), str(tmp_path / "out")]) == 0
    assert "were written but not run here (torch is not installed" in capsys.readouterr().out
    assert (tmp_path / "out" / "verify.py").is_file()


def test_the_library_cannot_be_imported_however_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(accel_train.__file__).parents[1]))
    (tmp_path / "verify.py").write_text("import accel_train.rng\n")
    with pytest.raises(proof.ProofError, match="an export must not import accel_train"):
        proof._run(tmp_path / "verify.py")


@pytest.mark.slow  # tests/domains/language/test_pipeline.py flips bits of an export every day
@pytest.mark.parametrize("name", ["model.safetensors", "model.py", "config.json", "example.safetensors"])
def test_a_flipped_bit_fails(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli._main(["export", str(field_run(tmp_path / "run")), str(tmp_path / "out")])
    capsys.readouterr()
    flip(tmp_path / "out" / name, -2)
    with pytest.raises(proof.ProofError, match=f"changed since the export, or missing: {name}"):
        proof._run(tmp_path / "out" / "verify.py")


@pytest.mark.slow  # tests/domains/language/test_pipeline.py has other weights with the right hashes
def test_other_outputs_fail_even_if_all_hashes_are_right(tmp_path: Path) -> None:
    out = tmp_path / "out"
    cli._main(["export", str(text_run(tmp_path / "run")), str(out)])
    tensors = load_file(out / "example.safetensors")
    tensors["0.output.latents"] += 1e-3 * tensors["0.output.latents"].abs().max()
    save_file(tensors, out / "example.safetensors")
    proven = json.loads((out / "example.json").read_text())
    proven["files"]["example.safetensors"] = commit.hash_file(out / "example.safetensors")
    (out / "example.json").write_text(json.dumps(proven))
    with pytest.raises(proof.ProofError, match="FAILED: the outputs of padded texts differ"):
        proof._run(out / "verify.py")


TWO_OUTPUTS = """
from typing import NamedTuple
import torch

class Outputs(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor

def load(directory):
    return lambda x: Outputs(x, x * float("{factor}"))
"""


@pytest.mark.parametrize(("factor", "code"), [("2", 0), ("2.1", 1), ("nan", 1)])
def test_an_output_that_is_not_a_number_fails_in_any_place(
    factor: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_script, "DIRECTORY", tmp_path)
    (tmp_path / "model.py").write_text(TWO_OUTPUTS.format(factor=factor))
    (tmp_path / "config.json").write_text("{}")
    x = torch.arange(1.0, 4.0)
    save_file({"x": x, "first": x.clone(), "second": 2 * x}, tmp_path / "example.safetensors")
    example = {
        "name": "numbers",
        "function": None,
        "arguments": {"x": {"tensor": "x"}},
        "outputs": {"first": "first", "second": "second"},
    }
    proven = {"files": {}, "examples": [example], "tolerance": proof.TOLERANCE}
    (tmp_path / "example.json").write_text(json.dumps(proven))
    assert verify_script.main() == code
    assert ("FAILED: the outputs of numbers differ" in capsys.readouterr().out) == (code == 1)


def test_an_export_whose_model_differs_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a definition had been cut out wrongly."""
    right = proof.model_source

    def wrong(pipeline: proof.Pipeline) -> str:
        return right(pipeline).replace("NORM_EPS = 1e-6", "NORM_EPS = 1.0")

    monkeypatch.setattr(proof, "model_source", wrong)
    with pytest.raises(proof.ProofError, match=r"(?s)nothing was exported.*FAILED: the outputs of"):
        cli._main(["export", str(field_run(tmp_path / "run")), str(tmp_path / "out")])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_outputs_are_those_of_the_exported_precision(tmp_path: Path) -> None:
    run = text_run(tmp_path / "run")
    cli._main(["export", str(run), str(tmp_path / "out"), "--precision", "bf16"])
    stored = load_file(tmp_path / "out" / "example.safetensors")["1.output.text_logits"]
    for place, same in ((tmp_path / "out", True), (run, False)):
        pipeline = accel_train.load(place)
        example: Example = pipeline.examples()[1]
        with torch.no_grad():
            assert torch.equal(pipeline.model(**example.arguments).text_logits, stored) == same


@pytest.mark.slow
def test_both_names_of_the_command_write_the_same_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = text_run(tmp_path / "run")
    for name, words in (("new", ["export"]), ("old", ["checkpoints", "export"])):
        assert cli._main([*words, str(run), str(tmp_path / name)]) == 0
        assert "model.py with torch alone reproduces 4 examples" in capsys.readouterr().out
    for path in (tmp_path / "new").rglob("*"):
        twin = tmp_path / "old" / path.relative_to(tmp_path / "new")
        assert path.is_dir() or path.read_bytes() == twin.read_bytes(), path


@pytest.mark.slow
def test_a_fresh_environment_with_torch_and_safetensors_verifies(exported: Path, site: Path, tmp_path: Path) -> None:
    """Run as its user would, in a virtual environment with nothing else in it."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    for path in site.iterdir():
        (packages / path.name).symlink_to(path.resolve())
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [tmp_path / "venv" / "bin" / "python", "verify.py"]
    done = subprocess.run(command, cwd=exported, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    flip(exported / "model.safetensors", -1)
    done = subprocess.run(command, cwd=exported, env=given, capture_output=True, text=True, check=False)
    flip(exported / "model.safetensors", -1)
    assert (done.returncode, done.stdout) == (1, "FAILED: changed since the export, or missing: model.safetensors\n")


# Of a language model: tests/domains/language/test_pipeline.py.
@pytest.mark.parametrize("kind", kinds(sorted(RUNS.keys() - {"language"}), {*QUICK, "pictures"}))
def test_the_examples_reach_every_weight(kind: str, tmp_path: Path) -> None:
    """A definition that was cut out wrongly shows in an output, wherever it is."""
    pipeline = accel_train.load(RUNS[kind](tmp_path / "run"))
    examples = pipeline.examples()

    def outputs() -> list[torch.Tensor]:
        with torch.no_grad():
            calls = [example.call(pipeline.model, {}) for example in examples if example.function is None]
        return [value for found in calls for value in found.values()]

    before = outputs()
    for name, parameter in pipeline.model.named_parameters():
        saved = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter))
        assert any(not torch.equal(new, old) for new, old in zip(outputs(), before, strict=True)), name
        with torch.no_grad():
            parameter.copy_(saved)


def test_transformers_reads_the_tokenizer_with_its_special_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    cli._main(["export", str(text_run(tmp_path / "run")), str(tmp_path / "out")])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "assets")
    assets = accel_train.load(tmp_path / "out").assets
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == (assets.tokenizer.pad_id, assets.tokenizer.mask_id)
    row = assets.tokenise([TEXTS[0]])
    assert tokenizer(TEXTS[0])["input_ids"] == row["tokens"][row["text_mask"]].tolist()

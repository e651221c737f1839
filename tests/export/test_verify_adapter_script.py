"""verify.py of adapters, with the places of a base that people have."""

from __future__ import annotations

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from accel_train.export import verify_adapter_script

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An export of an adapter on a denoiser alone, beside its pipeline."""
    for name in ("unet", "vae"):
        (tmp_path / "pipeline" / name).mkdir(parents=True)
        (tmp_path / "pipeline" / name / WEIGHTS).write_text(name)
    out = tmp_path / "out"
    out.mkdir()
    facts = {"size": 4, "sha256": sha256(b"unet").hexdigest()}
    base = {"source": "pipeline", "files": {WEIGHTS: facts}}
    (out / "pipeline.json").write_text(json.dumps({"base": base, "files": {}}))
    (out / "verify.py").write_text(Path(str(verify_adapter_script.__file__)).read_text("utf-8"))
    return out


def verified(out: Path, base: Path) -> tuple[int, str]:
    command = [sys.executable, "-I", "-S", str(out / "verify.py"), str(base)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("place", ["pipeline", "pipeline/unet"])
def test_the_pipeline_and_its_denoiser_are_the_base(place: str, out: Path) -> None:
    code, printed = verified(out, out.parent / place)
    assert (code, printed.endswith(f"{out.parent / place} has the weights that it was trained on\n")) == (0, True)


@pytest.mark.parametrize("place", ["pipeline", "pipeline/unet", "pipeline/vae", "nowhere"])
def test_another_base_is_refused(place: str, out: Path) -> None:
    (out.parent / "pipeline" / "unet" / WEIGHTS).write_text("other")
    code, printed = verified(out, out.parent / place)
    assert code == 1
    assert printed.endswith(f"is another base than pipeline, or incomplete: {WEIGHTS}\n")

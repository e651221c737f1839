"""The pairs of presets for GPUs: their memory in docs/optimizations.md is what a simulation finds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny_encoders
from tests.distributed.launching import ROOT, environment

PAGE = ROOT / "docs" / "optimizations.md"
ROW = re.compile(r"\| `((?:pde|mmdit)_\w+_(?:baseline|optimized))` \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \|")
ROWS = {found[1]: found for found in ROW.finditer(PAGE.read_text())}


def encoder(folder: Path) -> list[str]:
    """In place of Qwen3-Embedding: as wide, with one layer of random weights."""
    from transformers import Qwen3Config, Qwen3Model

    tiny_encoders.tokenizer_folder(folder, ["<end>"], "$A <end>", eos_token="<end>", padding_side="left")
    words = 1 + len(tiny_encoders.WORDS)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    Qwen3Model(Qwen3Config(vocab_size=words, hidden_size=1024, intermediate_size=16, **sizes)).save_pretrained(folder)
    return ["--data.encoder", str(folder), "--data.encoder_max_length", "64"]


def test_the_table_has_each_pair() -> None:
    kinds = ("baseline", "optimized")
    assert list(ROWS) == [f"{stem}_{kind}" for stem in ("pde_stack", "mmdit_small", "mmdit_base") for kind in kinds]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize("name", ROWS)
def test_the_memory_is_that_of_a_simulation(name: str, processes: int, tmp_path: Path) -> None:
    launch_file = ROOT / "accelerate_configs" / ("single_gpu.yaml" if processes == 1 else "ddp.yaml")
    command = [sys.executable, "-m", "accel_train.cli", "simulate", f"recipes/{name.split('_')[0]}.py", name, "--json"]
    command += ["--config_file", str(launch_file), "--num_processes", str(processes), "--compile.mode", "off"]
    command += encoder(tmp_path) if name.startswith("mmdit") else []
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    _, _, parameters, one, eight = (ROWS[name][number] for number in range(5))
    assert found["values"] == int(parameters.replace(",", ""))
    peak = found["peak"]["total"] / 1e9
    # Two digits after the point below 1 GB, one above; sizes depend on the micro-batch that rank 0 happens to read.
    assert peak == pytest.approx(float(one if processes == 1 else eight), rel=0.02)

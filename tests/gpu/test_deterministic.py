"""A resume with deterministic algorithms, on a GPU: the same bits as without an interruption."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recipes import mmdit
from tests.distributed.launching import SMALL, Finished

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resume_has_the_bits_of_an_undisturbed_run(precision: str, tmp_path: Path) -> None:
    def train(name: str, steps: int) -> Finished:
        flags = [*SMALL, "--deterministic", "--precision", precision, "--schedule.decay_steps", "6"]
        folder = tmp_path / name
        assert mmdit.main(["demo", *flags, "--max_steps", str(steps), "--output_dir", str(folder)]) == 0
        return Finished(folder, "", 0)

    whole = train("whole", 6)
    train("stopped", 3)
    resumed = train("stopped", 6)
    for stem in ("model", "ema", "optimizer/exp_avg"):
        expected, found = whole.tensors(6, stem), resumed.tensors(6, stem)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert "bit-exact: the same layout" in (tmp_path / "stopped" / "logs" / "rank_0.log").read_text()

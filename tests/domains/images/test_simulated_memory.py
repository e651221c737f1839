"""Figures of ``memory_need``: those of the committed simulation, complete, and simulated again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from accel_train.domains.images.memory.memory_need import nearest
from accel_train.domains.images.memory.simulated_memory import MODELS, VAES
from accel_train.domains.images.pipelines.loading import FAMILIES
from accel_train.simulation.tensors.cuda_casts import cuda_casts
from benchmarks.method import RESULTS
from tests import lora_memory_tables, zygote
from tests.waiting import PATIENCE_SECONDS

RESULT = RESULTS / "lora_memory.json"
ROOT = Path(__file__).parents[3]
AGAIN = """
import json, sys
from pathlib import Path
from benchmarks import lora_bases, lora_memory
model, mode, side, rows, folder = sys.argv[1:]
task = lora_memory.Task(model, mode, int(side), int(rows))
lora_bases.save(lora_bases.MODELS[model], Path(folder) / model)
lora_bases.save_pictures(Path(folder) / "pictures")
print("RESULT " + json.dumps(lora_memory.simulate(Path(folder), task)))
"""


def committed() -> dict[str, Any]:
    return json.loads(RESULT.read_text())["details"]


def test_the_table_is_that_of_the_committed_simulation() -> None:
    simulated = committed()["models"]
    listed = [model for models in MODELS.values() for model in models]
    assert sorted(model.name for model in listed) == sorted(simulated)
    for model in listed:
        found = simulated[model.name]
        assert (model.values, model.fixed) == (found["values"], found["fixed"]), model.name
        for mode in ("none", "selective", "full"):
            assert getattr(model, mode)._asdict() == found[mode], (model.name, mode)


def test_the_vaes_are_those_of_the_committed_simulation() -> None:
    simulated = committed()["vaes"]
    assert VAES.keys() == simulated.keys()
    for name, vae in VAES.items():
        assert vae._asdict() == {work: figures["megapixel"] for work, figures in simulated[name].items()}
        for figures in simulated[name].values():
            # Linear in the pixels: no map of attention is kept.
            assert figures["megapixel_at_512"] == pytest.approx(figures["megapixel"], rel=0.01)


def test_a_step_of_another_size_takes_what_the_figures_say() -> None:
    models = committed()["models"]
    checked = [model["elsewhere"] for model in models.values() if "elsewhere" in model]
    assert checked
    for elsewhere in checked:
        assert elsewhere["simulated"] == pytest.approx(elsewhere["expected"], rel=0.03, abs=0.1)
    for name, model in models.items():
        # Each mode keeps more than the next one.
        assert model["none"]["megapixel"] > model["selective"]["megapixel"] > model["full"]["megapixel"] > 0, name


def test_every_family_has_figures() -> None:
    assert {family.name for family in FAMILIES} == MODELS.keys()
    for models in MODELS.values():
        assert [model.values for model in models] == sorted(model.values for model in models)


def test_the_nearest_model_is_the_next_larger_one() -> None:
    small, large, largest = MODELS["Stable Diffusion 3"]
    assert nearest("Stable Diffusion 3", small.values) is small
    assert nearest("Stable Diffusion 3", small.values + 1) is large
    assert nearest("Stable Diffusion 3", 10 * largest.values) is largest


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "rms_norm with a weight": lambda x: F.rms_norm(x, (8,), x[0]),
    "rms_norm with a weight in fp32": lambda x: F.rms_norm(x, (8,), x[0].float()),
    "softmax": lambda x: F.softmax(x, dim=-1),
    "method softmax": lambda x: x.softmax(-1),
    "sum": lambda x: x.sum(-1),
    "power": lambda x: x**2,
    "square": torch.square,
    "rsqrt": torch.rsqrt,
    "mse_loss": lambda x: F.mse_loss(x, x),
    "silu": F.silu,
    "gelu": F.gelu,
    "mean": lambda x: x.mean(-1),
    "product": lambda x: x * x,
    "linear": lambda x: F.linear(x.float(), x.float()),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # before torch 2.12
@pytest.mark.parametrize("name", CALLS)
def test_casts_are_those_of_cuda(name: str) -> None:
    """torch computes shapes and dtypes of a GPU's tensors without one."""
    if "weight" in name and not torch.backends.cuda.is_built():
        pytest.skip("a torch without CUDA does not take two tensors of a GPU")
    if name.startswith("rms_norm") and Version(torch.__version__).release < (2, 12):
        pytest.skip("torch 2.11 casts no RMSNorm of tensors without values; peaks of an H200 with it had the cast")
    expected = dtype_on("cuda", name)
    with cuda_casts():
        assert dtype_on("cpu", name) == expected


def dtype_on(device: str, name: str) -> torch.dtype:
    """Of a result under autocast. ``torch.autocast`` itself refuses a device that is not there."""
    with torch.no_grad(), FakeTensorMode():
        x = torch.empty(8, 8, dtype=torch.bfloat16, device=device)
        torch.set_autocast_dtype(device, torch.bfloat16)
        torch.set_autocast_enabled(device, True)
        try:
            return CALLS[name](x).dtype
        finally:
            torch.set_autocast_enabled(device, False)


def test_casts_hold_where_a_forward_is_computed_again() -> None:
    seen: list[torch.dtype] = []

    def norm(x: Tensor) -> Tensor:
        found = F.layer_norm(x, (8,))
        seen.append(found.dtype)
        # Kept for the backward too: torch stops the second forward behind the last of what it keeps.
        return found.exp()

    x = torch.ones(2, 8, dtype=torch.bfloat16, requires_grad=True)
    with cuda_casts(), torch.autocast("cpu", torch.bfloat16):
        checkpoint(norm, x, use_reentrant=False).sum().backward()
    assert seen == [torch.float32, torch.float32]


def test_the_page_has_the_figures() -> None:
    text = lora_memory_tables.PAGE.read_text()
    table = lora_memory_tables.figures()
    assert text == lora_memory_tables.replaced(text, "figures", table), "run: python -m tests.lora_memory_tables"


@pytest.mark.slow  # builds every published model in three precisions; the figures that it adds up are tested above
def test_the_page_has_the_needs() -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("bitsandbytes")
    text = lora_memory_tables.PAGE.read_text()
    table = lora_memory_tables.needs()
    assert text == lora_memory_tables.replaced(text, "needs", table), "run: python -m tests.lora_memory_tables"


@pytest.mark.slow  # each simulates a step of a model of full size
@pytest.mark.parametrize(
    ("model", "mode", "side", "rows"),
    [
        ("Sana 1.6B", "full", 512, 1),
        ("Stable Diffusion XL", "none", 768, 2),
        ("Stable Diffusion 3 medium", "selective", 768, 2),
        ("FLUX.1-dev", "full", 768, 2),
    ],
)
def test_simulated_again_it_takes_what_the_table_says(
    model: str, mode: str, side: int, rows: int, tmp_path: Path
) -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("peft")
    words = [sys.executable, "-c", AGAIN, model, mode, str(side), str(rows), str(tmp_path)]
    done = zygote.run(words, cwd=ROOT, timeout=PATIENCE_SECONDS)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, (done.stdout[-2000:], done.stderr[-2000:])
    step = json.loads(lines[-1].removeprefix("RESULT "))
    (listed,) = [each for models in MODELS.values() for each in models if each.name == model]
    figures = getattr(listed, mode)
    assert step["values"] == listed.values
    expected = listed.fixed + rows * (figures.picture + figures.megapixel * side**2 / (1 << 20))
    assert step["gib"] == pytest.approx(expected, rel=0.03, abs=0.1)

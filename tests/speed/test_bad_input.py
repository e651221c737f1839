"""Bad input to the speed options, through the real recipe: rows I36 to I38 of the bad-input matrix.

Here the model is built, a tiny one, for these options are applied to it; nothing is trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.config import UsageError
from accel_train.domains.models.sd3_blocks import build
from accel_train.reporting import reports
from accel_train.speed.attention import selection as attention
from accel_train.speed.attention.table import AttentionNeeds, Machine
from recipes import mmdit as recipe
from tests.test_bad_input import ModelReachedError, cache, here, names, outcome, plain, words

__all__ = ["cache", "here"]  # fixtures: a fresh directory and environment
TINY = "--model.width 16 --model.depth 1 --model.heads 2 "
pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own, of inductor


@dataclass(frozen=True)
class Row:
    """What is given, and what must come of it."""

    id: str
    argv: str
    says: str
    code: int | None = 2
    """None: accepted, training would begin."""
    spoiled: str = ""
    """What this machine is made to lack."""


ROWS = [
    Row(
        "I36-unknown",
        "--attention sdpa_flas",
        r"attention 'sdpa_flas': is not known \(did you mean 'sdpa_flash'\?.*auto",
    ),
    Row("I36-name-of-others", "--attention flash_attention_2", r"attention flash_attention_2: .*Use flash, or"),
    Row("I36-replaced", "--attention xformers", r"attention xformers: .*Use sdpa_efficient"),
    Row(
        "I36-device",
        "--attention sdpa_cudnn",
        r"attention sdpa_cudnn: cannot be used: it needs a cuda device, and this one is cpu\. Needed: cpu, float32, "
        r".*Use auto, or one that can: sdpa, sdpa_math, sdpa_flash\.",
    ),
    Row("I36-own", "--attention nowhere:f", r"attention nowhere:f: cannot be .*cannot be imported.*module:function"),
    Row(
        "I36-own-wrong",
        "--attention tests.speed.test_attention:deaf_to_masks",
        r"deaf_to_masks: cannot be used: .*fp64 reference with a mask.*one that can: sdpa",
    ),
    Row("I36-auto", "--attention auto", r"attention sdpa \(auto: first of the table for cpu, float32", None),
    Row("I37-fp8", "--precision fp8", r"precision: .fp8. is refused: .*fp32.*bf16.*fp16.*--precision"),
    Row("I37-fp16", "--precision fp16", r"precision: fp16 needs a GPU.*use --precision bf16 or fp32"),
    Row(
        "I37-bf16",
        "--precision bf16",
        r"precision: bf16 is not supported by Tesla T4 \(compute capability \(7, 5\); 8\.0 is needed\); use "
        r"--precision fp16 or fp32",
        spoiled="bf16",
    ),
    Row("I38-mode", "--compile.mode always", r"compile\.mode: .*off.*auto.*on.*--compile\.mode"),
    Row("I38-optimize", "--compile.optimize fastest", r"compile\.optimize: .*default.*max-autotune-no-cudagraphs"),
    Row(
        "I38-no-compiler",
        "--compile.mode on",
        r"compile\.mode on: cannot compile: there is no working C\+\+ compiler: .*no-such-compiler.*apt install g\+\+.*"
        r"set compile\.mode to auto or off",
        spoiled="compiler",
    ),
    Row(
        "I38-no-compiler-auto",
        "--compile.mode auto",
        r"compile: off \(auto: there is no working C\+\+ compiler: .*apt install g\+\+",
        None,
        spoiled="compiler",
    ),
    Row(
        "I38-switched-off",
        "--compile.mode on",
        r"compile\.mode on: cannot compile: it is switched off in the environment \(unset TORCHDYNAMO_DISABLE",
        spoiled="dynamo",
    ),
    Row(
        "I38-cuda-graphs",
        "--compile.mode auto --compile.optimize reduce-overhead",
        r"compile\.optimize reduce-overhead: replays CUDA graphs, but the device is cpu\. Set it to default",
    ),
]


@pytest.fixture
def spoiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine without what the row says."""
    what: AbstractContextManager[Any] = nullcontext()
    if request.param == "compiler":
        import torch._inductor.config as inductor

        what = inductor.patch({"cpp.cxx": ("no-such-compiler",)})
    elif request.param == "dynamo":
        import torch._dynamo.config as dynamo

        what = dynamo.patch(disable=True)
    elif request.param == "bf16":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with what:
        yield


@pytest.mark.parametrize(
    ("row", "spoiled"), [(row, row.spoiled) for row in ROWS], ids=[row.id for row in ROWS], indirect=["spoiled"]
)
@pytest.mark.usefixtures("spoiled")
def test_the_recipe_answers(
    row: Row,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if row.id == "I37-fp16" and torch.accelerator.is_available():
        pytest.skip("this machine has what the row misses")

    def would_train(*_: object, **__: object) -> None:
        raise ModelReachedError

    monkeypatch.setattr(recipe.sd3_blocks, "build", build)
    monkeypatch.setattr(reports, "Recorder", would_train)
    before = names(here)
    code, text = outcome(words(TINY + row.argv, here))
    captured = capsys.readouterr()
    said = plain(f"{captured.out} {captured.err} {text}")
    assert (code, said) == (row.code, said)
    assert re.search(row.says, said), said
    assert "Traceback" not in said
    assert (names(here) == before) == (code is not None), "a start that is refused leaves nothing, even after open_run"


H100 = Machine("cuda", (9, 0), lambda module: module.startswith("torch"))
NEEDS = AttentionNeeds(torch.device("cuda"), torch.bfloat16, 64, heads=4, length=33, batch=4)


@pytest.mark.parametrize(
    ("name", "machine", "needs", "reason"),
    [
        ("flash", H100, NEEDS, r"flash_attn cannot be imported: install 'accel-train\[flash\]'"),
        ("sdpa_flash", H100, replace(NEEDS, head_size=20), r"must be a multiple of 8, here 20"),
        ("sdpa_flash", H100, replace(NEEDS, dtype=torch.float32), r"bfloat16 or float16, not float32"),
        ("varlen", replace(H100, capability=(7, 5)), NEEDS, r"capability 8\.0 or higher, this device has 7\.5"),
    ],
)
def test_on_a_gpu_a_kernel_that_cannot_run_is_refused_with_those_that_can(
    name: str, machine: Machine, needs: AttentionNeeds, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I36 for machines that are not here: nothing is run for a refusal."""
    monkeypatch.setattr(attention, "machine_of", lambda _: machine)
    with pytest.raises(UsageError) as caught:
        attention.resolve_attention(name, needs)
    said = str(caught.value)
    assert re.search(rf"^attention {name}: cannot be used: .*{reason}", said), said
    able = said.rpartition("Use auto, or one that can: ")[2]
    assert "sdpa" in re.findall(r"\w+", able)
    assert name not in re.findall(r"\w+", able)

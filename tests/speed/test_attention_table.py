"""What the table says for machines that are not here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from accel_train.speed.attention.kernels import build_attention
from accel_train.speed.attention.table import (
    BACKENDS,
    NAMES,
    AttentionNeeds,
    Machine,
    able,
    machine_of,
    preferred,
    why_not,
)

H100 = Machine("cuda", (9, 0), lambda module: True)
A100 = replace(H100, capability=(8, 0))
B200 = replace(H100, capability=(10, 0))
T4 = replace(H100, capability=(7, 5))
BARE = replace(H100, importable=lambda module: module.startswith("torch"))
CPU = Machine("cpu")
BF16 = AttentionNeeds(torch.device("cuda"), torch.bfloat16, 64, heads=24, length=1178, batch=32)
PLAIN = replace(BF16, mask=False)


def test_the_names_are_these() -> None:
    assert set(NAMES) == {
        *("sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math"),
        *("flash", "flash_hub", "flash3", "flash4", "flex", "varlen"),
    }
    assert len({(row.name, row.device) for row in BACKENDS}) == len(BACKENDS)


@pytest.mark.parametrize(
    ("machine", "needs", "first"),
    [
        (H100, PLAIN, "sdpa_cudnn"),
        (H100, BF16, "sdpa_flash"),  # with a mask cuDNN's gradients can be NaN
        (H100, replace(PLAIN, head_size=192), "sdpa_flash"),
        (H100, replace(PLAIN, dtype=torch.float32), "sdpa_efficient"),
        (H100, replace(PLAIN, dtype=torch.float64), "sdpa"),
        (H100, replace(PLAIN, deterministic=True), "sdpa_flash"),
        (A100, PLAIN, "sdpa_flash"),
        (B200, PLAIN, "sdpa_flash"),
        (T4, replace(PLAIN, dtype=torch.float16), "sdpa_efficient"),
        (replace(H100, importable=lambda module: False), BF16, "sdpa_efficient"),  # torch before 2.10
        (CPU, BF16, "sdpa"),
        (Machine("mps"), PLAIN, "sdpa"),
    ],
)
def test_auto(machine: Machine, needs: AttentionNeeds, first: str) -> None:
    found = preferred(needs, machine)
    assert found[0] == first
    assert found[-1] == "sdpa"  # runs everywhere
    assert set(found) <= set(able(needs, machine))


@pytest.mark.parametrize(
    ("name", "needs", "machine", "words"),
    [
        ("flash", BF16, CPU, "it needs a cuda device, and this one is cpu"),
        ("flash", BF16, T4, "compute capability 8.0 or higher, this device has 7.5"),
        ("flash", BF16, BARE, "flash_attn cannot be imported: install 'accel-train[flash]'"),
        ("flash_hub", BF16, CPU, "it needs a cuda device, and this one is cpu"),
        ("flash_hub", BF16, T4, "compute capability 8.0 or higher, this device has 7.5"),
        ("flash_hub", BF16, BARE, "kernels cannot be imported: install 'accel-train[kernels]'"),
        ("flash_hub", replace(BF16, compiled=True), H100, "it cannot be part of a compiled block"),
        ("flash_hub", replace(BF16, head_size=264), H100, "at most 256 channels, here 264"),
        ("flash3", BF16, A100, "compute capability 9.x, this device has 8.0"),
        ("flash3", BF16, B200, "compute capability 9.x, this device has 10.0"),
        ("flash3", BF16, BARE, "flash_attn_interface cannot be imported"),
        ("flash4", BF16, A100, "compute capability 9.x or 10.x"),
        ("flash4", BF16, BARE, "flash_attn.cute cannot be imported: install flash-attn-4"),
        ("flash4", replace(BF16, head_size=136), H100, "at most 128 channels, here 136"),
        ("flash", replace(BF16, dtype=torch.float32), H100, "bfloat16 or float16, not float32"),
        ("flash", replace(BF16, head_size=264), H100, "at most 256 channels, here 264"),
        ("sdpa_cudnn", replace(BF16, head_size=256), H100, "at most 128 channels, here 256"),
        ("sdpa_flash", replace(BF16, head_size=20), H100, "multiple of 8, here 20"),
        ("sdpa_cudnn", replace(BF16, length=704), H100, "pytorch#196678"),
        ("sdpa_cudnn", replace(BF16, deterministic=True), H100, "not deterministic"),
        ("flex", BF16, CPU, "it has no backward on cpu"),
    ],
)
def test_reasons(name: str, needs: AttentionNeeds, machine: Machine, words: str) -> None:
    assert words in (why_not(name, needs, machine) or "")
    assert name not in able(needs, machine)


def test_what_is_refused_is_only_refused_for_its_reason() -> None:
    assert why_not("sdpa_cudnn", replace(PLAIN, length=704), H100) is None
    assert why_not("sdpa_cudnn", replace(BF16, length=705), H100) is None
    assert why_not("flex", replace(BF16, backward=False), CPU) is None
    assert why_not("flash4", PLAIN, B200) is None
    assert able(BF16, H100) == NAMES


def test_this_machine_is_read() -> None:
    machine = machine_of(torch.device("cpu"))
    assert (machine.device, machine.capability) == ("cpu", None)
    assert machine.importable("torch.nn.attention.flex_attention")
    assert not machine.importable("no_such_package")
    assert not machine.importable("no_such_package.below")


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own, of torch.compile
@pytest.mark.parametrize("name", NAMES)
def test_every_name_can_be_built_where_its_package_is(name: str) -> None:
    row = next(row for row in BACKENDS if row.name == name)
    there = all(machine_of(torch.device("cpu")).importable(module) for module in row.requires)
    if there and name == "flash_hub":
        pytest.skip("what it does with its package is tested in test_attention_kernels.py")
    if there:
        assert build_attention(name).name == name
    else:
        with pytest.raises(ImportError, match=row.requires[0].partition(".")[0]):
            build_attention(name)

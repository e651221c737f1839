"""A simulated step equals a real one of as many processes: every byte, every collective, every FLOP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import Layout
from tests.simulation.counting import TO_THE_SYSTEM, by_machine, counted, real, total_work

pytestmark = pytest.mark.distributed
FULL = ("--activation_checkpointing.mode", "full")
SELECTIVE = ("--activation_checkpointing.mode", "selective")
NO_EMA = ("--ema.decay", "0")
RAGGED = ("--micro_batch_size", "3")
BF16 = ("--precision", "bf16")
MUON = ("--optimizer.name", "muon")
ADAPTERS = ("--lora.rank", "4")
UNPACKED = ("--data.packing", "false")

DAILY = [
    (Layout("fsdp2", 2), (*RAGGED, *FULL)),
    (Layout("zero1", 2), NO_EMA),
]
WEEKLY = [
    (Layout("ddp", 2), (*RAGGED, *FULL)),
    (Layout("fsdp2", 2), RAGGED),
    (Layout("zero3", 2), (*RAGGED, *BF16)),
    (Layout("single", 1), ()),
    (Layout("single", 1), (*RAGGED, *FULL)),
    (Layout("single", 1), (*BF16, *NO_EMA)),
    (Layout("single", 1, "pde"), FULL),
    (Layout("ddp", 2), ()),
    (Layout("ddp", 2), (*RAGGED, *NO_EMA, "--sync", "every")),
    (Layout("ddp", 2), (*SELECTIVE, *BF16)),
    (Layout("ddp", 2), (*MUON, *FULL)),
    (Layout("ddp", 2, "pde"), ()),
    (Layout("ddp", 2, "causal_lm"), ()),
    (Layout("ddp", 2, "causal_lm"), UNPACKED),
    (Layout("fsdp2", 2), (*FULL, *NO_EMA)),
    (Layout("fsdp2", 2), (*RAGGED, *FULL, *BF16)),
    (Layout("fsdp2", 2), (*RAGGED, "--sync", "every")),
    (Layout("fsdp2", 2), MUON),
    (Layout("fsdp2", 4), (*SELECTIVE, *RAGGED)),
    (Layout("hsdp", 4), RAGGED),
    (Layout("hsdp", 4), (*FULL, *BF16, *NO_EMA)),
    (Layout("fsdp2", 2, "pde"), FULL),
    (Layout("fsdp2", 2, "causal_lm"), FULL),
    (Layout("zero1", 2), (*RAGGED, *BF16)),
    (Layout("zero2", 2), (*RAGGED, *FULL)),
    (Layout("zero2", 4), BF16),
    (Layout("zero2", 2), (*RAGGED, "--sync", "last")),
    (Layout("zero2", 2, "causal_lm"), UNPACKED),
    (Layout("zero2_offload", 2), (*RAGGED, *BF16)),
    (Layout("zero2_offload", 2), RAGGED),
    (Layout("zero2_offload", 1), (*RAGGED, *BF16)),
    (Layout("zero3_offload", 1), BF16),
    (Layout("zero3", 2), FULL),
    (Layout("zero3_offload", 2), (*RAGGED, *BF16)),
    (Layout("zero3", 2, "pde"), ()),
    (Layout("zero3", 2, "lora"), NO_EMA),
    (Layout("single", 1, "lora"), ()),
    (Layout("ddp", 2, "lora"), ("--lora.base_precision", "bf16", *BF16)),
    (Layout("fsdp2", 2, "lora"), NO_EMA),
    (Layout("single", 1, "causal_lm"), (*UNPACKED, *ADAPTERS)),
    (Layout("ddp", 2, "causal_lm"), (*UNPACKED, *ADAPTERS, *FULL)),
    (Layout("fsdp2", 2, "causal_lm"), ADAPTERS),
]


# Slow: the two of every day contain everything that is own code here; these cover options of torch's strategies, and
# closed forms of each strategy are compared every day (test_closed_forms.py).
@pytest.mark.parametrize(
    ("layout", "flags"), [*DAILY, *(pytest.param(*case, marks=pytest.mark.slow) for case in WEEKLY)], ids=str
)
def test_simulated_equals_real(layout: Layout, flags: tuple[str, ...], tmp_path: Path) -> None:
    if "--lora.rank" in flags:
        flags = (*flags, *pretrained(tmp_path / "base"))
    fake = counted(layout, tmp_path, *flags)
    truth = real(layout, tmp_path, *flags)
    # transformers makes masks unless it can read that none are needed, which fake tensors do not tell.
    margin = 0.03 if layout.recipe == "causal_lm" else 1e-3
    assert fake["peak"]["total"] == pytest.approx(truth["peak"]["total"], rel=margin)
    if layout.strategy.startswith("zero") and layout.recipe != "causal_lm":
        # Its bucket of 2 GB would hide everything else in the total.
        assert fake["peak"]["by_category"] == pytest.approx(truth["peak"]["by_category"], rel=margin, abs=1024)
    for name in ("values", "trained", "held", "host", "micro_batches", "rows", "flops"):
        assert fake[name] == truth[name], name
    assert collectives(fake) == collectives(truth)
    for name in ("on_host", "copied", "copies"):
        assert total_work(fake, name) == total_work(truth, name), name
    assert bool(total_work(fake, "copied")) == ("offload" in layout.strategy)
    # DeepSpeed calls them with one process as well, which sends nothing.
    assert any(row["sent"] for row in fake["collectives"]) == (layout.processes > 1)


# Slow: the bytes of single layers are compared every day (tests/domains/models/test_simulated_layers.py).
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (Layout("single", 1, "lora"), ("--lora.base_precision", "nf4", *BF16)),
        (Layout("ddp", 2, "lora"), ("--lora.base_precision", "nf4", *FULL)),
        (Layout("single", 1, "lora"), ("--lora.base_precision", "int8", *BF16)),
    ],
    ids=str,
)
def test_a_base_of_8_and_4_bits(layout: Layout, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Of what bitsandbytes allocates within its kernels nothing is seen, on either side, and its scales are in no
    category of the real run. The peak is that of a CPU, whose kernels are others than those of a GPU."""
    fake = counted(layout, tmp_path, *flags)
    truth = real(layout, tmp_path, *flags)
    assert fake["peak"]["total"] == pytest.approx(truth["peak"]["total"], rel=0.01)
    for name in ("values", "trained", "micro_batches", "rows"):
        assert fake[name] == truth[name], name
    for name in ("gradients", "optimizer state", "EMA"):
        assert fake["held"].get(name) == truth["held"].get(name), name
    assert collectives(fake) == collectives(truth)


def pretrained(folder: Path) -> list[str]:
    """A small model to put adapters on, and the flags that take it in place of the preset's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(sizes).save_pretrained(folder)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
    left_out = [word for name in names for word in (f"--model.{name}", "None")]
    return ["--model.source", str(folder), "--data.tokenizer", "trained", *left_out]


def collectives(found: dict[str, Any]) -> dict[tuple[str, int], tuple[int, int]]:
    return {(row["kind"], row["group_size"]): (row["count"], row["size"]) for row in found["collectives"]}


QUARTERS = ("--global_batch_size", "64")
"""More micro-batches than one, where their size is 16."""
OF_ALLOCATOR = [
    (Layout("single", 1), ()),
    (Layout("single", 1), (*RAGGED, *SELECTIVE)),
    (Layout("single", 1), (*QUARTERS, *NO_EMA)),
    (Layout("single", 1), (*FULL, *BF16)),
    (Layout("ddp", 2), (*RAGGED, *FULL)),
    (Layout("ddp", 2), (*NO_EMA, *BF16)),
    (Layout("fsdp2", 2), (*RAGGED, *FULL)),
    (Layout("fsdp2", 2), (*BF16, *NO_EMA)),
    (Layout("fsdp2", 4), RAGGED),
    (Layout("hsdp", 4), RAGGED),
    (Layout("single", 1, "lora"), FULL),
    (Layout("ddp", 2, "lora"), NO_EMA),
    (Layout("fsdp2", 2, "lora"), ()),
    (Layout("single", 1, "causal_lm"), (*UNPACKED, *ADAPTERS, *FULL)),
    (Layout("ddp", 2, "pde"), ()),
]
DAILY_OF_ALLOCATOR = (1,)


# Slow: of each strategy one would do every day, and the ledger's count of all is compared above.
@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        pytest.param(*case, marks=() if number in DAILY_OF_ALLOCATOR else pytest.mark.slow)
        for number, case in enumerate(OF_ALLOCATOR)
    ],
    ids=str,
)
def test_the_peak_is_that_of_the_allocator(layout: Layout, flags: tuple[str, ...], tmp_path: Path) -> None:
    """The events of torch's own allocator, without the ledger, which sees nothing of what kernels allocate inside."""
    if "--lora.rank" in flags:
        flags = (*flags, *pretrained(tmp_path / "base"))
    fake = counted(layout, tmp_path, *flags)
    # The thread of gloo holds a collective's tensors a little longer than the process that waits for it, by luck.
    counts = [by_machine(layout, tmp_path, "allocator", *flags) for _ in range(min(3, 2 * layout.processes - 1))]
    truth = min(counts, key=lambda count: count["peak"])
    print(f"{layout} {flags}: simulated {fake['peak']['total']:,}, allocator {truth['peak']:,}")
    # Some models have a megabyte, and what a kernel allocates inside is of its own size.
    assert fake["peak"]["total"] == pytest.approx(truth["peak"], rel=0.05, abs=64 << 10)
    held = sum(size for name, size in fake["held"].items() if name != "gradients")
    if layout.strategy == "ddp":
        # Its buckets outlive the step.
        held += fake["held"]["gradients"]
    if layout.recipe in ("mmdit", "pde"):
        # Of pretrained models the weights are mapped from their file, and no allocator has them.
        assert held == pytest.approx(truth["before"], rel=0.01)


WIDE = ("--model.size", "demo", "--model.width", "768", "--model.depth", "4", "--micro_batch_size", "16")
"""97 million parameters, so that libraries and Python's heap do not dominate a process."""
MEDIUM = ("--model.size", "demo", "--model.width", "512", "--model.depth", "4", *QUARTERS, "--micro_batch_size", "16")


# Slow: minutes of real models, and the other tests compare what torch allocates.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (Layout("single", 1), WIDE),
        (Layout("single", 1), (*WIDE, *NO_EMA, *FULL)),
        (Layout("single", 1), MEDIUM),
        (Layout("ddp", 2), WIDE),
        (Layout("fsdp2", 2), (*WIDE, *NO_EMA)),
    ],
    ids=str,
)
def test_the_peak_is_what_a_process_grows_by(layout: Layout, flags: tuple[str, ...], tmp_path: Path) -> None:
    """From before its model to the step's peak, as the system counts it, and from before the step."""
    fake = counted(layout, tmp_path, *flags)
    grown = by_machine(layout, tmp_path, "resident", *flags, **TO_THE_SYSTEM)
    peak = fake["peak"]["total"]
    print(f"{layout} {flags}: simulated {peak:,}, {grown}")
    assert peak == pytest.approx(grown["growth"], rel=0.1)
    assert peak == pytest.approx(grown["at_rest"] + grown["growth_in_step"], rel=0.1)

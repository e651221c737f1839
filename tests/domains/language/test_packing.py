"""Packed rows: every text once, none sees another, and the loss is that of the texts alone."""

from __future__ import annotations

import itertools
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from accel_train.config import UsageError
from accel_train.domains.language import packing, perplexity, row_checks, templates
from accel_train.domains.language.language_model import LanguageModel
from accel_train.domains.language.packing import IGNORED, Encoded
from accel_train.domains.language.pretrained import ModelConfig
from accel_train.domains.language.rows.forms import Row
from accel_train.speed.attention.other_libraries import apply_library_attention
from tests.domains.language import tiny
from tests.domains.language.in_memory import shard_of

S = 64
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def encoded() -> list[Encoded]:
    rows = [Row(str(number), text=text) for number, text in enumerate(tiny.TEXTS)]
    rows += [Row(str(number), prompt=text, completion=f" {text}") for number, text in enumerate(tiny.TEXTS)]
    return [text for row in rows for text in templates.encode(row, tiny.tokenizer()).texts]


@pytest.mark.parametrize("seed", range(20))
def test_every_text_is_in_one_row_that_it_fits_in(seed: int) -> None:
    draw = random.Random(seed)
    capacity = draw.randint(2, 100)
    lengths = [draw.randint(1, capacity) for _ in range(draw.randint(1, 300))]
    rows = packing.pack(lengths, capacity)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    filled = [sum(lengths[index] for index in row) for row in rows]
    assert max(filled) <= capacity
    # Best-fit decreasing needs at most 11/9 of the best number of rows and one more (Johnson 1974).
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // capacity) + max(4, sum(x > capacity / 2 for x in lengths))
    # No two rows could be one: the text that opened the later one would have gone into the earlier.
    least = sorted(filled)[:2]
    assert len(rows) == 1 or sum(least) > capacity


def test_the_fullest_row_with_room_is_taken() -> None:
    assert packing.pack([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    assert packing.pack([7, 6, 3], 10) == [[0, 2], [1]]


@pytest.mark.parametrize("length", [2, 5, 8, 9, 10, 15, 16, 40])
def test_a_split_text_has_every_token_as_a_target_once(length: int) -> None:
    whole = Encoded(list(range(length)), [False] + [True] * (length - 1))
    pieces = list(packing.fit(whole, 8, split=True))
    targets = [token for ids, trained in pieces for token, flag in zip(ids, trained, strict=True) if flag]
    assert targets == list(range(1, length))
    assert all(1 < len(ids) <= 8 and not trained[0] for ids, trained in pieces)
    # The token before a target is the one before it in the text.
    assert all(b == a + 1 for ids, _ in pieces for a, b in itertools.pairwise(ids))
    (cut,) = packing.fit(whole, 8, split=False)
    assert cut.ids == list(range(min(8, length)))


def test_rows_hold_tokens_labels_and_positions(tmp_path: Path) -> None:
    texts = [Encoded([5, 6, 7], [False, True, True]), Encoded([8, 9], [False, True])]
    packed = shard_of(texts, 8, tmp_path, packs=True)
    assert len(packed) == 1
    row = packed[0]
    assert row["input_ids"].tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert row["labels"].tolist() == [IGNORED, 6, 7, IGNORED, 9, IGNORED, IGNORED, IGNORED]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert int(row["length"]) == packed.length(0) == 5
    trimmed = packed.trim(packed.batch([0]), 5)
    assert {name: tuple(values.shape) for name, values in trimmed.items()} == {
        "input_ids": (1, 5),
        "labels": (1, 5),
        "position_ids": (1, 5),
        "length": (1,),
    }
    apart = shard_of(texts, 8, tmp_path, packs=False)
    assert len(apart) == 2
    assert [apart[index]["input_ids"][:2].tolist() for index in range(2)] == [[5, 6], [8, 9]]


def test_a_fingerprint_is_that_of_tokens_targets_and_their_division() -> None:
    texts = [Encoded([5, 6, 7], [False, True, True]), Encoded([8, 9], [False, True])]

    def found(texts: list[Encoded] = texts, max_length: int = 8, packs: bool = True) -> str:
        tokens = np.concatenate([packing.marked(text) for text in texts])
        lengths = np.array([len(text.ids) for text in texts])
        return packing.fingerprint(tokens, lengths, max_length, packing=packs)

    others = [
        found([Encoded([5, 6, 7], [False, False, True]), texts[1]]),
        found([Encoded([5, 6, 10], [False, True, True]), texts[1]]),
        found([Encoded([5, 6], [False, True]), Encoded([7, 8, 9], [False, True, True])]),
        found(max_length=9),
        found(packs=False),
    ]
    assert found() == found()
    assert len({found(), *others}) == 6


MODELS = {
    "llama": tiny.LLAMA,
    "learned positions": ModelConfig(config="gpt2", **SIZES),
    "windows of attention": ModelConfig(config="gemma3_text", **SIZES),
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_losses_of_packed_texts_are_those_of_the_texts_alone(
    name: str, attention: Any, tmp_path: Path
) -> None:
    model = tiny.model(MODELS[name])
    if name == "windows of attention":
        model.config.sliding_window = 4
    model.set_attn_implementation(attention)
    texts = encoded()
    data = shard_of(texts, S, tmp_path, packs=True)
    assert len(data) < len(texts)
    batch = data.batch(list(range(len(data)))) | {"weight": torch.ones(len(data))}
    with torch.no_grad():
        logits = LanguageModel(model, packing=True, attention=attention).logits(batch)
        leaking = LanguageModel(model, packing=False, attention=attention).logits(batch)
        alone = {tuple(ids): model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids, _ in texts}
    losses: list[torch.Tensor] = []
    worst_leak = 0.0
    for row, indices in enumerate(packing.pack([len(text.ids) for text in texts], S)):
        place = 0
        for index in indices:
            ids, trained = texts[index]
            expected = alone[tuple(ids)]
            torch.testing.assert_close(logits[row, place : place + len(ids)], expected, rtol=1e-5, atol=1e-5)
            worst_leak = max(worst_leak, float((leaking[row, place : place + len(ids)] - expected).abs().max()))
            nll = F.cross_entropy(expected[:-1], torch.tensor(ids[1:]), reduction="none")
            losses.append(nll[torch.tensor(trained[1:])].double().sum())
            place += len(ids)
    assert worst_leak > 1e-2  # without the positions the comparison fails
    total = torch.stack(losses).sum()
    found = perplexity.losses(logits.flatten(0, 1), perplexity.targets(batch).flatten()).sum()
    assert float(found) == pytest.approx(float(total), rel=1e-5)
    assert int(perplexity.trained_tokens(batch).sum()) == sum(sum(trained) for _, trained in texts)


def test_rows_one_after_another_have_the_same_logits(tmp_path: Path) -> None:
    """As flash_attention_2 gets them, whose kernel for varying lengths takes one row."""
    model = tiny.model()
    data = shard_of(encoded(), S, tmp_path, packs=True)
    batch = data.batch(list(range(len(data))))
    assert len(data) > 1
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda *given: shapes.append(tuple(given[2]["input_ids"].shape)), with_kwargs=True)
    with torch.no_grad():
        expected = LanguageModel(model, packing=True, attention="sdpa").logits(batch)
        found = LanguageModel(model, packing=True, attention="flash_attention_2").logits(batch)
    assert shapes == [(len(data), S), (1, len(data) * S)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_model_that_can_pack_is_proven() -> None:
    model = tiny.model().train()
    assert "packing: proven" in row_checks.check_packing(model)
    assert model.training


@pytest.mark.parametrize(
    ("config", "message"),
    [("mamba", "MambaForCausalLM keeps a state|takes no position_ids"), ("bloom", "takes no position_ids")],
)
def test_a_model_that_cannot_pack_is_refused_by_name(config: str, message: str) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1} | ({"num_attention_heads": 4} if config == "bloom" else {})
    with pytest.raises(UsageError, match=rf"--data.packing: .*({message}).* --data.no_packing"):
        row_checks.check_packing(tiny.model(ModelConfig(config=config, **sizes)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_takes_positions_and_does_not_mask_is_refused(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of a new architecture would be whose attention does not ask for the mask of packed texts."""
    from transformers.models.llama import modeling_llama

    model = tiny.model().to(dtype)
    real = modeling_llama.create_causal_mask
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **named: real(**{**named, "position_ids": None}))
    with pytest.raises(UsageError, match=r"LlamaForCausalLM: two texts in one row have different logits than alone"):
        row_checks.check_packing(model)


def test_attention_is_proven_on_a_packed_row_so_that_a_kernel_that_leaks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def prove(packing: bool) -> str:
        example = partial(row_checks.attention_example, packing=packing)
        return apply_library_attention(tiny.model(), "sdpa", torch.device("cpu"), torch.float32, example).notice

    assert "attention sdpa of LlamaForCausalLM (as asked): 2 calls" in prove(True)
    right = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def causal_alone(module: Any, q: Any, k: Any, v: Any, attention_mask: Any = None, **named: Any) -> Any:
        return right(module, q, k, v, None, **named)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", causal_alone)
    prove(False)  # one text in a row is right
    with pytest.raises(UsageError, match=r"attention sdpa of LlamaForCausalLM: differs from fp64 in LlamaAttention"):
        prove(True)

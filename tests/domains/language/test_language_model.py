"""The loss by chunks of tokens, against transformers' own logits of all tokens at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from accel_train.config import UsageError
from accel_train.domains.language import language_model, perplexity, pretrained, row_checks
from accel_train.domains.language.language_model import LanguageModel
from accel_train.domains.language.packing import IGNORED
from accel_train.domains.language.pretrained import ModelConfig

VOCABULARY, ROWS, LENGTH = 300, 3, 14
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
LLAMA_SIZES = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA_SIZES, "tie_word_embeddings": True},
    "gpt2": SIZES,
    # Logits behind the head: capped, scaled, divided.
    "gemma2": {**LLAMA_SIZES, "final_logit_softcapping": 0.1},
    "cohere": {**LLAMA_SIZES, "logit_scale": 3.0},
    "granite": {**LLAMA_SIZES, "logits_scaling": 5.0},
    # Experts.
    "qwen3_moe": {**LLAMA_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    # The blocks lie a module deeper.
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
}


def built(name: str, loss_chunk: int = 0) -> Any:
    from transformers import AutoConfig

    torch.manual_seed(0)
    options = ModelConfig(config=name, loss_chunk=loss_chunk)
    return pretrained.build(options, AutoConfig.for_model(name, **ARCHITECTURES[name]), load_source=False).eval()


def batch_of(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, IGNORED)
    return {"input_ids": ids, "labels": labels, "weight": torch.ones(ROWS)}


@pytest.mark.parametrize(
    ("name", "tokens"), [*((name, 5) for name in ARCHITECTURES), ("llama", 1), ("llama", 14), ("llama", 1000)]
)
def test_losses_and_gradients_by_chunks_are_those_of_all_tokens(name: str, tokens: int) -> None:
    batch = batch_of()
    expected = perplexity.targets(batch)
    whole, chunked = built(name), built(name, tokens)
    logits = whole(input_ids=batch["input_ids"], use_cache=False).logits
    reference = F.cross_entropy(logits.flatten(0, 1), expected.flatten(), ignore_index=IGNORED, reduction="none")
    scale = torch.arange(1.0, ROWS + 1)
    (reference.view_as(expected).sum(-1) * scale).sum().backward()
    model = LanguageModel(chunked, packing=False, attention="sdpa", loss_chunk=tokens)
    found = model.of_tokens(batch, expected, perplexity.losses)
    torch.testing.assert_close(found.flatten(), reference, rtol=1e-6, atol=1e-6)
    (found.sum(-1) * scale).sum().backward()
    theirs, ours = (dict(each.named_parameters()) for each in (whole, chunked))
    assert theirs.keys() == ours.keys()
    largest = max(float(right.grad.abs().max()) for right in theirs.values() if right.grad is not None)
    for parameter, right in theirs.items():
        if right.grad is None:
            assert ours[parameter].grad is None
        else:
            torch.testing.assert_close(ours[parameter].grad, right.grad, rtol=0, atol=1e-6 * largest)


def test_metrics_by_chunks_are_those_of_all_tokens() -> None:
    batch = batch_of()
    expected = perplexity.targets(batch)
    unigram = torch.full((VOCABULARY,), -5.0)
    sums: list[dict[str, Tensor]] = []
    with torch.no_grad():
        for tokens in (0, 5):
            model = LanguageModel(built("llama", tokens), packing=False, attention="sdpa", loss_chunk=tokens)
            found = model.of_tokens(batch, expected, perplexity.losses_and_hits)
            sums.append(perplexity.metric_sums(found, expected, unigram))
    assert sums[0].keys() == sums[1].keys()
    torch.testing.assert_close(*sums, rtol=1e-6, atol=0)


def test_the_backward_keeps_no_logits() -> None:
    batch = batch_of()
    kept: dict[int, int] = {}
    for tokens in (0, 5):
        model = LanguageModel(built("llama", tokens), packing=False, attention="sdpa", loss_chunk=tokens)
        sizes: list[int] = []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.of_tokens(batch, perplexity.targets(batch), perplexity.losses)
        kept[tokens] = max(sizes)
    assert kept[0] == ROWS * LENGTH * VOCABULARY
    # The embeddings.
    assert kept[5] <= VOCABULARY * 32


def test_a_chunked_model_generates_and_returns_logits_as_before() -> None:
    plain, chunked = built("llama"), built("llama", 5)
    ids = batch_of()["input_ids"]
    assert torch.equal(plain(input_ids=ids).logits, chunked(input_ids=ids).logits)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(plain.generate(ids, **options), chunked.generate(ids, **options))


def test_the_loss_by_chunks_is_proven_at_the_start() -> None:
    model = built("llama", 5)
    assert row_checks.check_rows(model, packing=False, loss_chunk=5)[1].startswith(
        "loss by chunks: proven, tokens have"
    )
    forward = model.model.forward
    calls: list[int] = []

    def other(*args: Any, **named: Any) -> Any:
        calls.append(1)
        output = forward(*args, **named)
        # Of the second forward alone: all at once comes first.
        output.last_hidden_state = output.last_hidden_state * len(calls)
        return output

    model.model.forward = other
    with pytest.raises(UsageError, match=r"--model.loss_chunk 5: LlamaForCausalLM has a different loss by chunks, by "):
        row_checks.check_chunks(model, 5)


def with_head(head: Callable[[Any, Tensor, Any], Tensor], loss_chunk: int = 0) -> Any:
    """Return a Llama whose logits are those of ``head(model, ids, output of the blocks)``."""
    from transformers.modeling_outputs import CausalLMOutput

    model = built("llama")

    def forward(input_ids: Tensor, **named: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=head(model, input_ids, model.model(input_ids=input_ids, **named)))

    model.forward = forward
    if loss_chunk:
        language_model.by_chunks(model, loss_chunk)
    return model


@pytest.mark.parametrize(
    ("index", "error"), [(1, "IndexError: tuple index out of range"), ("hidden_states", "KeyError: 'hidden_states'")]
)
def test_a_head_that_reads_more_than_the_last_states_is_refused_by_name(index: int | str, error: str) -> None:
    def head(model: Any, ids: Tensor, output: Any) -> Tensor:
        # The output of a chunk has the last states alone.
        return model.lm_head(output[0] if ids.shape[1] > 5 else output[index])

    with pytest.raises(UsageError, match=rf"--model.loss_chunk 5: LlamaForCausalLM cannot compute .*: {error}. Give 0"):
        row_checks.check_chunks(with_head(head, 5), 5)


def test_an_error_that_has_nothing_to_do_with_chunks_is_not_blamed_on_them() -> None:
    def head(model: Any, ids: Tensor, output: Any) -> Tensor:
        raise IndexError("no such expert")

    with pytest.raises(IndexError, match="no such expert"):
        row_checks.check_chunks(with_head(head, 5), 5)


def test_a_head_that_embeds_its_ids_gets_ids_and_no_ignored_targets() -> None:
    def head(model: Any, ids: Tensor, output: Any) -> Tensor:
        # Embeddings of -100, the target that counts in no loss, do not exist.
        return model.lm_head(output[0] + 0 * model.model.embed_tokens(ids))

    batch = batch_of()
    expected = perplexity.targets(batch)
    assert (expected == IGNORED).any()
    whole, chunked = (
        LanguageModel(with_head(head, tokens), False, "sdpa", tokens).of_tokens(batch, expected, perplexity.losses)
        for tokens in (0, 5)
    )
    torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=1e-6)


def test_logits_of_many_bytes_are_said() -> None:
    model = built("llama")
    model.config.vocab_size = 2**17
    (notice,) = language_model.notices(model, 0, 2**14, "bf16")
    assert notice.startswith("the logits of a micro-batch, up to 16,384 tokens, take 8.0 GiB with their gradient")
    assert language_model.notices(model, 0, 2**13, "bf16") == []
    assert len(language_model.notices(model, 0, 2**13, "fp32")) == 1
    assert language_model.notices(model, 1024, 2**14, "bf16") == []


def test_a_model_that_does_not_name_its_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "get_decoder", lambda self: self)
    with pytest.raises(UsageError, match=r"--model.loss_chunk 5: LlamaForCausalLM does not say which of its modules"):
        built("llama", 5)

"""Continuations of held-out texts: what is given, what is drawn, and what is written down."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.domains.language import prepare, samples
from accel_train.domains.language.generation.continuing import Drawing, KeyedDraw, continue_tokens
from accel_train.domains.language.prepare import DataConfig, LanguageData
from accel_train.domains.language.pretrained import ModelConfig
from accel_train.domains.language.samples import EvaluationConfig, Sample
from accel_train.watching.html_report.samples import markdown_html
from tests.domains.language import tiny

OPTIONS = EvaluationConfig(shown=3, prompt_tokens=4, max_new_tokens=6)


def data_of(folder: Path, *rows: Any, special: Sequence[str] = ()) -> LanguageData:
    """Held-out rows as given; the training rows do not matter."""
    (folder / "held.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "train.txt").write_text("\n".join(tiny.TEXTS))
    tokenizer = tiny.tokenizer(tiny.CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.save_pretrained(folder / "tokenizer")
    options = DataConfig(
        path=str(folder / "train.txt"), heldout_path=str(folder / "held.jsonl"), tokenizer=str(folder / "tokenizer"),
        max_length=64, cache_dir=str(folder / "cache"),
    )  # fmt: skip
    return prepare.prepare_data(options, tiny.LLAMA)


@pytest.fixture
def data(tmp_path: Path) -> LanguageData:
    return data_of(tmp_path, *({"text": f"{text} More words after it."} for text in tiny.TEXTS))


def write(data: LanguageData, options: EvaluationConfig = OPTIONS, seed: int = 0, weights: int = 0) -> list[Sample]:
    return samples.write(tiny.model(seed=weights), data, options, seed, processes=1)


def test_draws_repeat_and_are_those_of_the_seed_and_the_text(data: LanguageData) -> None:
    first = write(data)
    model = tiny.model()
    torch.manual_seed(12345)  # training has drawn in between
    state = torch.get_rng_state()
    assert samples.write(model, data, OPTIONS, 0, processes=1) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert write(data, seed=1) != first
    assert write(data, dataclasses.replace(OPTIONS, shown=1)) == first[:1]


@pytest.mark.parametrize("change", [{"temperature": 0.05}, {"max_new_tokens": 3}, {"prompt_tokens": 5}])
def test_an_option_changes_what_is_written(change: dict[str, Any], data: LanguageData) -> None:
    assert write(data, dataclasses.replace(OPTIONS, **change)) != write(data)


def test_without_temperature_the_likeliest_token_is_written(data: LanguageData) -> None:
    greedy = dataclasses.replace(OPTIONS, temperature=0.0, max_new_tokens=2, shown=1)
    (found,) = write(data, greedy)
    assert write(data, greedy, seed=5) == [found]
    model = tiny.model()
    ids = data.heldout.text(0)[0][:4].tolist()
    with torch.no_grad():
        for _ in range(2):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert found.written == data.tokenizer.decode(ids[4:], skip_special_tokens=True)


def drawn(prompt_length: int, length: int, sample: int = 0) -> int:
    """The token that is left after ``length`` tokens."""
    draw = KeyedDraw(Drawing(0, "samples", sample, temperature=1.0), prompt_length)
    (left,) = draw(torch.zeros(1, length, dtype=torch.long), torch.zeros(1, 1000)).isfinite().nonzero()[:, 1]
    return int(left)


def test_each_new_token_has_a_draw_of_its_own_whatever_the_prompt() -> None:
    tokens = [drawn(3, 3 + number) for number in range(8)]
    assert len(set(tokens)) > 5
    assert [drawn(40, 40 + number) for number in range(8)] == tokens
    assert [drawn(3, 3 + number, sample=1) for number in range(8)] != tokens


def test_of_a_small_top_p_the_likeliest_token_is_drawn() -> None:
    model, prompt = tiny.model(), [3, 4, 5]
    drawings = [Drawing(0, "samples", 0, *how) for how in ((0.0,), (1.0, 1e-6), (1.0,))]
    greedy, narrow, wide = (continue_tokens(model, prompt, drawing, 6, pad_id=0) for drawing in drawings)
    assert narrow == greedy
    assert wide != greedy


@pytest.mark.parametrize("synced", [False, True])
def test_a_process_of_a_sharded_model_computes_until_all_are_done(synced: bool) -> None:
    class Recording(torch.nn.Linear):
        def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
            self.options = options
            return input_ids

    model = Recording(1, 1)
    continue_tokens(model, [3], Drawing(0, "samples", 0, 1.0), 6, pad_id=0, synced=synced)
    assert model.options["synced_gpus"] is synced


def test_of_a_chat_all_that_is_not_learned_is_given(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Who is there?"}, {"role": "assistant", "content": "Friends."}]
    (found,) = write(data_of(tmp_path, {"messages": chat}))
    assert found.prompt.strip() == "<|user|>Who is there?\n<|assistant|>"
    assert found.original.strip() == "Friends."


def test_the_turns_of_a_chat_are_told_apart_and_its_first_answer_is_shown_alone(tmp_path: Path) -> None:
    chat = [{"role": role, "content": f"{role} speaks."} for role in ("user", "assistant") * 2]
    data = data_of(tmp_path, {"messages": chat}, special=["<|user|>", "<|assistant|>"])
    model = tiny.model()
    model.resize_token_embeddings(len(data.tokenizer))
    (found,) = samples.write(model, data, OPTIONS, 0, processes=1)
    assert found.prompt.split() == ["<|user|>", "user", "speaks.", "<|assistant|>"]
    assert found.original.strip() == "assistant speaks."


@pytest.mark.parametrize("config", ["gpt2", "opt"])
def test_no_more_is_written_than_the_model_has_positions(config: str, tmp_path: Path) -> None:
    """Learned positions end in an index error."""
    from transformers import AutoConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64}
    AutoConfig.for_model(config, word_embed_proj_dim=32, ffn_dim=32, **sizes).save_pretrained(tmp_path / "config")
    data = data_of(tmp_path, {"text": " ".join(tiny.TEXTS)})
    model = tiny.model(ModelConfig(config=str(tmp_path / "config")))
    # Never the end of the text, at which it would stop by itself.
    model.generation_config.suppress_tokens = [data.tokenizer.eos_token_id]
    options = dataclasses.replace(OPTIONS, prompt_tokens=60, max_new_tokens=48, shown=1)
    (found,) = samples.write(model, data, options, 0, processes=1)
    assert found.written


def test_samples_are_written_for_people(tmp_path: Path) -> None:
    samples.report(
        tmp_path / "report", [Sample("Nay,", " answer\nme", " answer me: stand"), Sample("<s>", "<think>", "")], 3
    )
    text = (tmp_path / "report" / "samples.md").read_text()
    assert "- given: > Nay,\n- written by the model: > answer me\n- the text itself: > answer me: stand" in text
    # Markdown takes a tag for HTML, and shows nothing of it. The page of `accel-train report` shows both the same.
    assert "- given: > &lt;s>\n- written by the model: > &lt;think>\n- the text itself: > (empty)" in text
    assert "<li>given: <q>&lt;s&gt;</q></li>" in markdown_html(text)


def test_an_evaluation_is_due_at_its_steps_and_at_the_end() -> None:
    assert [step for step in range(1, 8) if EvaluationConfig(every=3).due(step, 7)] == [3, 6, 7]
    assert [step for step in range(1, 8) if EvaluationConfig().due(step, 7)] == [7]

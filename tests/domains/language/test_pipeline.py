"""A trained language model: texts continued, chats answered, its files in transformers, and its proof."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import accel_train
from accel_train import cli, rng
from accel_train.config import UsageError
from accel_train.domains.language import pipeline as language_pipeline
from accel_train.domains.language import templates
from accel_train.domains.language.generation import continuing
from accel_train.domains.language.generation.continuing import Drawing
from accel_train.domains.language.pipeline import LanguagePipeline
from accel_train.domains.language.pretrained import ModelConfig
from accel_train.domains.language.rows.forms import Row
from accel_train.domains.language.samples import EvaluationConfig
from accel_train.export import proof
from accel_train.hub.model_card import CardFacts, build_card
from accel_train.precision import Precision, dtype_of
from accel_train.store import commit
from tests.domains.language import tiny
from tests.trained import language_run

CHAT = [{"role": "user", "content": "Who is there?"}]
GPT2 = ModelConfig(config="gpt2", hidden_size=32, num_attention_heads=4, num_hidden_layers=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language_run(tmp_path_factory.mktemp("language") / "run")


@pytest.fixture(scope="module")
def pipeline(run: Path) -> LanguagePipeline:
    return accel_train.load(run, pipeline=LanguagePipeline)


def checkpoint_of(run: Path) -> Path:
    return run / "checkpoints" / "checkpoint_00000003"


# ---------------------------------------------------------------------------------------------------------- answers
def test_one_prompt_has_one_answer_in_any_company(pipeline: LanguagePipeline) -> None:
    alone = pipeline("Stand, ho!", seed=5, max_new_tokens=12)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    among = pipeline.answers(["Have you", CHAT, "Stand, ho!", "Have you"], seed=5, max_new_tokens=12)
    assert among[2] == alone
    assert pipeline.answers("Stand, ho!", seed=5, max_new_tokens=12) == [alone]
    assert among[0] == among[3]
    assert len(set(among)) == 3
    assert torch.equal(torch.get_rng_state(), state)
    assert pipeline("Stand, ho!", seed=6, max_new_tokens=12) != alone


def test_without_temperature_it_is_what_transformers_writes(run: Path, pipeline: LanguagePipeline) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint_of(run))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_of(run))
    for prompt, encoded in (
        ("Stand, ho!", tokenizer("Stand, ho!", return_tensors="pt")),
        (CHAT, tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)),
    ):
        ids = encoded["input_ids"]
        written = model.generate(input_ids=ids, max_new_tokens=9, do_sample=False, pad_token_id=2)[0]
        expected = tokenizer.decode(written[ids.shape[1] :], skip_special_tokens=True)
        assert pipeline(prompt, temperature=0.0, max_new_tokens=9) == expected


def test_a_prompt_has_the_tokens_that_a_row_of_training_begins_with(pipeline: LanguagePipeline) -> None:
    [row] = templates.encode(Row("here", text="Stand, ho! Who is there?"), pipeline.tokenizer).texts
    assert row.ids[: len(row.ids) - 1] == templates.encode_prompt("Stand, ho! Who is there?", pipeline.tokenizer)
    chat = [*CHAT, {"role": "assistant", "content": "Friends."}]
    [whole] = templates.encode(Row("here", messages=chat), pipeline.tokenizer).texts
    assert whole.ids[: whole.trained.index(True)] == templates.encode_prompt(CHAT, pipeline.tokenizer)


def test_draws_follow_the_probabilities_of_temperature_and_top_p() -> None:
    """Frequencies of 1000 keys, against the distribution computed by hand."""
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0, -4.0]])
    ids = torch.zeros(1, 3, dtype=torch.int64)
    for temperature, top_p, kept in ((1.0, 1.0, 5), (0.5, 1.0, 5), (1.0, 0.8, 2)):
        probabilities = (scores[0] / temperature).softmax(0)
        probabilities[kept:] = 0
        counts = torch.zeros(5)
        for sample in range(1000):
            processors = continuing._processors(Drawing(0, "test", sample, temperature, top_p), 3)
            counts[int(processors(ids, scores).argmax())] += 1
        # Three standard deviations of a frequency of 1/2 are 0.047.
        torch.testing.assert_close(counts / 1000, probabilities / probabilities.sum(), rtol=0, atol=0.047)


def test_each_position_has_its_own_draw() -> None:
    scores = torch.zeros(1, 1000)
    draw = continuing.KeyedDraw(Drawing(3, "test", 7, 1.0), 2)
    found = [int(draw(torch.zeros(1, 2 + position, dtype=torch.int64), scores).argmax()) for position in range(20)]
    assert len(set(found)) > 15
    keys = [rng.sample_keys(3, "test", position, torch.tensor([7])) for position in range(20)]
    assert found == [int(rng.categorical(key, torch.ones(1000))) for key in keys]


@pytest.mark.parametrize("change", [{"temperature": 0.1}, {"top_p": 0.2}, {"max_new_tokens": 4}, {"seed": 3}])
def test_an_option_changes_the_answer(change: dict[str, Any], pipeline: LanguagePipeline) -> None:
    given: dict[str, Any] = {"max_new_tokens": 12, **change}
    assert pipeline("Stand, ho!", **given) != pipeline("Stand, ho!", max_new_tokens=12)


def test_an_answer_follows_the_prompt_and_ends_where_the_text_ends(pipeline: LanguagePipeline) -> None:
    tokenizer = pipeline.tokenizer
    ids = templates.encode_prompt("Stand,", tokenizer)
    rest = tokenizer("Stand, ho!")["input_ids"][len(ids) :]
    assert pipeline._written(ids, [*rest, tokenizer.eos_token_id]) == " ho!"
    # Whatever the prompt, the next token is the end of the text.
    model = tiny.model(seed=4)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[tokenizer.eos_token_id] = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
    assert LanguagePipeline(model, tokenizer, 0.0)("Stand,") == ""
    assert continuing.continue_tokens(model, ids, Drawing(0, "test", 0, 0.0), 9, pad_id=2) == [tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("prompt", "options", "reason"),
    [
        ("Stand", {"temperature": -1.0}, "a temperature of 0 or more"),
        ("Stand", {"top_p": 0.0}, "a top_p above 0, at most 1"),
        ("Stand", {"max_new_tokens": 0}, "max_new_tokens 0: the prompt has"),
        ("Stand", {"max_new_tokens": 9999}, "max_new_tokens 9999: .* tokens and the model 2048 positions, so up to"),
        ("Stand", {"seed": -1}, "seed=-1"),
        ([], {}, "messages \\[\\]: a list such as"),
        (["Who?"], {}, "messages .*Who.*: a list such as"),
        ([*CHAT, {"role": "assistant", "content": "I"}], {}, "the last one is the assistant's"),
    ],
)
def test_wrong_inputs_are_refused(prompt: Any, options: Any, reason: str, pipeline: LanguagePipeline) -> None:
    with pytest.raises(UsageError, match=reason):
        pipeline(prompt, **options)


def test_what_a_tokenizer_cannot_take_is_refused(pipeline: LanguagePipeline) -> None:
    without = LanguagePipeline(pipeline.model, tiny.tokenizer(), 1.0)
    with pytest.raises(UsageError, match="no chat template"):
        without(CHAT)
    without.tokenizer.chat_template = "{{ raise_exception('no user may speak') }}"
    with pytest.raises(UsageError, match=r"the chat template refuses them .*no user may speak"):
        without(CHAT)
    without.tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(UsageError, match="finds no token in it"):
        without("")
    without.tokenizer.chat_template = tiny.CHATML + "{{ mood }}"
    with pytest.raises(UsageError, match=r"the chat template refuses them .*surrogates not allowed"):
        without(CHAT, chat_template_kwargs={"mood": "\ud83d"})
    wrong: Any = 3
    with pytest.raises(UsageError, match=r"messages 3: a list such as"):
        without(wrong)


def test_without_a_number_the_answer_fills_the_positions_that_are_left() -> None:
    model = tiny.model()
    model.config.max_position_embeddings = 20
    short = LanguagePipeline(model, tiny.tokenizer(), 1.0)
    assert short._new_tokens(15, None) == 5
    model.config.max_position_embeddings = 2048
    assert short._new_tokens(15, None) == 128
    assert short._new_tokens(15, 300) == 300


# ---------------------------------------------------------------------------------------------------------- command
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def sample(*words: str | Path) -> int:
    return cli._main(["sample", *map(str, words)])


def test_the_command_answers_as_the_pipeline_does(
    run: Path, pipeline: LanguagePipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("Have you\n\nGet thee\n")
    drawn = ["--max_new_tokens", "7", "--temperature", "0.7", "--top_p", "0.9", "--seed", "4"]
    assert sample(run, "--text", "Stand,", "--text_file", file, "--messages", json.dumps(CHAT), *drawn) == 0
    expected = pipeline.answers(
        ["Stand,", "Have you", "Get thee", CHAT], max_new_tokens=7, temperature=0.7, top_p=0.9, seed=4
    )
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in expected)
    out = tmp_path / "out.jsonl"
    assert sample(run, "--messages", json.dumps(CHAT), *drawn, "--output", out) == 0
    assert json.loads(out.read_text("utf-8")) == {"prompt": CHAT, "answer": expected[3]}
    (tmp_path / "chat.json").write_text(json.dumps(CHAT))
    assert sample(run, "--messages", tmp_path / "chat.json", *drawn, "--output", out) == 0
    assert json.loads(out.read_text("utf-8")) == {"prompt": CHAT, "answer": expected[3]}
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    named = {"tools": TOOLS, "chat_template_kwargs": {"mood": "grave"}}
    for tools in (json.dumps(TOOLS), str(tmp_path / "tools.json")):
        offered = ["--tools", tools, "--chat_template_kwargs", '{"mood": "grave"}']
        assert sample(run, "--messages", json.dumps(CHAT), *drawn, "--output", out, *offered) == 0
        answer = pipeline(CHAT, max_new_tokens=7, temperature=0.7, top_p=0.9, seed=4, **named)
        assert json.loads(out.read_text("utf-8"))["answer"] == answer
    capsys.readouterr()
    # Without --temperature it is that of the run.
    assert sample(run, "--text", "Stand,", "--max_new_tokens", "7") == 0
    assert capsys.readouterr().out == pipeline("Stand,", temperature=1.0, max_new_tokens=7) + "\n"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "nothing to continue: give --text"),
        (["--messages", "[{"], "not JSON"),
        (["--messages", "hello"], r"messages 'hello': not JSON .*; give '\[{.* file .json of it, or .* with --text"),
        (["--messages", "none.json"], "messages 'none.json' cannot be read .* a file with a list of messages"),
        (["--messages", '{"role": "user"}'], "a list of messages is required"),
        (["--text_file", "none.txt"], "text_file none.txt: cannot be read"),
        (["--text", "a", "--top_p", "0"], "top_p"),
        (["--text", "a", "--tools", "[{"], r"tools '\[{': not JSON"),
        (["--messages", "[" * 100_000], "not JSON .*recursion"),
        (["--text", "a", "--tools", "[" * 100_000], "not JSON .*recursion"),
        (["--text", "a", "--chat_template_kwargs", '{"x": "\\ud83d"}'], "not JSON .*surrogates not allowed"),
        (["--text", "a", "--tools", "none.json"], "tools 'none.json' cannot be read"),
        (["--text", "a", "--tools", "{}"], "tools '{}': a list is required, not dict"),
        (["--text", "a", "--chat_template_kwargs", "[]"], r"chat_template_kwargs '\[\]': an object is required"),
        (["--text", "a", "--tools", "[{}]"], "are for chat templates, but 'a' is a text"),
    ],
)
def test_wrong_flags_are_refused(words: list[str], reason: str, run: Path) -> None:
    with pytest.raises(UsageError, match=reason):
        sample(run, *words)


# ------------------------------------------------------------------------------------------------------------ files
def test_averaged_weights_are_used_where_there_are_any(tmp_path: Path) -> None:
    run = language_run(tmp_path / "run", dataclasses.replace(tiny.LLAMA, tie_word_embeddings=True), ema=True)
    found = dict(accel_train.load(run).model.named_parameters())
    averaged = load_file(checkpoint_of(run) / "ema.safetensors")
    assert found.keys() == averaged.keys()
    assert all(torch.equal(found[name], averaged[name]) for name in found)


@pytest.mark.parametrize("options", [tiny.LLAMA, GPT2], ids=["llama", "gpt2"])
def test_the_description_leaves_transformers_alone(options: ModelConfig, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = tiny.model(options)
    (tmp_path / "plain").mkdir()
    model.config.save_pretrained(tmp_path / "plain")
    run = language_run(tmp_path / "run", options)
    plain = AutoConfig.from_pretrained(tmp_path / "plain").to_dict()
    described = AutoConfig.from_pretrained(checkpoint_of(run)).to_dict()
    assert {name: described[name] for name in plain} == plain | {"_name_or_path": str(checkpoint_of(run))}
    assert described["pipeline"] == "accel_train.domains.language.pipeline:LanguagePipeline"
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint_of(run))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_a_model_tuned_from_one_of_these_has_its_own_description(tmp_path: Path) -> None:
    source = str(checkpoint_of(language_run(tmp_path / "run")))
    options = ModelConfig(source=source)
    tuned = tiny.model(options)
    (tmp_path / "tuned").mkdir()
    evaluation = EvaluationConfig(temperature=0.3)
    language_pipeline.write_files(tuned, tiny.tokenizer(), options, evaluation, ["demo"], "fp32", tmp_path / "tuned")
    described = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert described["sampler"] == {"temperature": 0.3}
    assert described["card"]["base_model"] is None  # a folder
    assert described["card"]["datasets"] == []


def test_a_run_of_before_is_recognised_by_its_architecture(tmp_path: Path, pipeline: LanguagePipeline) -> None:
    tiny.save(tmp_path)
    assert "pipeline" not in json.loads((tmp_path / "config.json").read_text())
    found = accel_train.load(tmp_path)
    assert isinstance(found, LanguagePipeline)
    again = pipeline("Stand,", temperature=found.temperature, max_new_tokens=5)
    assert found("Stand,", max_new_tokens=5) == again


def test_a_folder_does_not_choose_the_kernel_or_bring_code(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path)
    described = json.loads((folder / "config.json").read_text())
    described |= {"attn_implementation": "strangers/kernel", "auto_map": {"AutoModelForCausalLM": "model.Stranger"}}
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "model.py").write_text("raise SystemExit('imported')")
    model: Any = accel_train.load(folder).model
    assert (type(model).__name__, model.config._attn_implementation) == ("LlamaForCausalLM", "sdpa")


def test_weights_that_are_missing_are_refused(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"weights that are not in the files: model\.norm\.weight"):
        accel_train.load(folder)


def test_the_card_names_base_model_and_task(tmp_path: Path) -> None:
    run = language_run(tmp_path / "run")
    options = ModelConfig(source="org/base")
    language_pipeline.write_files(
        tiny.model(),
        tiny.tokenizer(),
        options,
        EvaluationConfig(),
        ["org/texts:plain", "mine.jsonl", "org/more"],
        "fp32",
        tmp_path,
    )
    description = json.loads((tmp_path / "config.json").read_text())
    card = build_card(commit.verify(checkpoint_of(run)), {}, CardFacts("me/mine", "main"), description)
    for line in ("pipeline_tag: text-generation", "base_model: org/base", "datasets:\n- org/texts\n- org/more\n"):
        assert line in card, line
    assert 'print(pipeline("A text to continue"))' in card


# ----------------------------------------------------------------------------------------------------------- export
@pytest.mark.parametrize(
    ("options", "source"),
    [
        pytest.param(tiny.LLAMA, "ema", id="ema-llama"),
        pytest.param(GPT2, "model", id="model-gpt2"),
        # Implied by the two above: which weights and which architecture meet nowhere in an export.
        pytest.param(tiny.LLAMA, "model", id="model-llama", marks=pytest.mark.slow),
        pytest.param(GPT2, "ema", id="ema-gpt2", marks=pytest.mark.slow),
    ],
)
def test_an_export_is_read_by_transformers_and_proves_itself(
    options: ModelConfig, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = language_run(tmp_path / "run", options, ema=True)
    out = tmp_path / "out"
    assert cli._main(["export", str(run), str(out), "--weights", source]) == 0
    needed = "alone" if options == tiny.LLAMA else "and transformers"
    assert f"model.py with torch {needed} reproduces 1 examples of this model" in capsys.readouterr().out
    expected = tiny.model(options)
    expected.load_state_dict(load_file(checkpoint_of(run) / f"{source}.safetensors"), strict=False)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits = expected(ids).logits
        torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(out)(ids).logits, logits)
        torch.testing.assert_close(accel_train.load(out).model(ids).logits, logits)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("Stand, ho!")["input_ids"] == tiny.tokenizer()("Stand, ho!")["input_ids"]
    assert tokenizer.chat_template == tiny.CHATML


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_transformers_loads_an_export_in_its_precision(precision: Precision, run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert cli._main(["export", str(run), str(tmp_path / "out"), "--precision", precision]) == 0
    loader: Any = AutoModelForCausalLM
    assert loader.from_pretrained(tmp_path / "out").dtype == dtype_of(precision)


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "out"
    assert cli._main(["export", str(run), str(out)]) == 0
    return out


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "example.safetensors"])
def test_a_flipped_bit_fails(name: str, exported: Path) -> None:
    content = (exported / name).read_bytes()
    try:
        (exported / name).write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
        with pytest.raises(proof.ProofError, match=f"changed since the export, or missing: {name}"):
            proof._run(exported / "verify.py")
    finally:
        (exported / name).write_bytes(content)


def test_other_weights_fail_even_if_all_hashes_are_right(exported: Path) -> None:
    weights = exported / "model.safetensors"
    proven = exported / "example.json"
    before = weights.read_bytes(), proven.read_text()
    tensors = load_file(weights)
    tensors["model.norm.weight"] *= 1.001
    try:
        save_file(tensors, weights, {"format": "pt"})
        changed = json.loads(before[1])
        changed["files"]["model.safetensors"] = commit.hash_file(weights)
        proven.write_text(json.dumps(changed))
        with pytest.raises(proof.ProofError, match="FAILED: the outputs of logits of the next token differ"):
            proof._run(exported / "verify.py")
    finally:
        weights.write_bytes(before[0])
        proven.write_text(before[1])


@pytest.mark.slow
def test_without_transformers_the_check_of_another_architecture_says_so(tmp_path: Path) -> None:
    exported = tmp_path / "out"
    cli._main(["export", str(language_run(tmp_path / "run", GPT2)), str(exported)])
    blocked = f"import sys, runpy; sys.modules['transformers'] = None; runpy.run_path({str(exported / 'verify.py')!r}, "
    done = subprocess.run(
        [sys.executable, "-I", "-c", blocked + "run_name='__main__')"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout.endswith("transformers is not installed: pip install transformers\n")


def test_the_example_reaches_every_weight(pipeline: LanguagePipeline) -> None:
    (example,) = pipeline.examples()

    def output() -> torch.Tensor:
        with torch.no_grad():
            return example.call(pipeline.model, {})["output"]

    before = output()
    for name, parameter in pipeline.model.named_parameters():
        saved = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter))
            assert not torch.equal(output(), before), name
            parameter.copy_(saved)

"""Adapters in use: on their verified base, several side by side, and exported as peft and transformers read them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import accel_train
from accel_train import cli
from accel_train.config import UsageError
from accel_train.domains.language import adapted
from accel_train.domains.language.pipeline import LanguagePipeline, write_files
from accel_train.domains.language.pretrained import ModelConfig
from accel_train.domains.language.samples import EvaluationConfig
from accel_train.domains.models import lora, quantised
from accel_train.export.proof import ProofError
from accel_train.precision import dtype_of
from recipes import causal_lm
from tests.domains.language import tiny
from tests.trained import adapter_run, language_run

peft = pytest.importorskip("peft")
# peft reads a property that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
IDS = torch.arange(3, 11)[None]
PROMPT = "Stand, ho!"


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def load(place: Path, **given: Any) -> LanguagePipeline:
    return accel_train.load(place, pipeline=LanguagePipeline, **given)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter_run(tmp_path_factory.mktemp("adapters") / "run", base)


@pytest.fixture(scope="module")
def other_run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter_run(tmp_path_factory.mktemp("others") / "run", base, seed=2, targets=("attention",))


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "out"
    assert cli._main(["export", str(run), str(out)]) == 0
    return out


def with_peft(base: Path, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    plain: Any = AutoModelForCausalLM.from_pretrained(base)
    with warnings.catch_warnings():
        # Of an adapter on a tied head.
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
        return peft.PeftModel.from_pretrained(plain, folder).eval()


@pytest.mark.parametrize(
    ("source", "revision", "expected"),
    [("model", None, "{folder}/model"), ("org/name", "0" * 40, "org/name")],
    ids=["folder", "Hub"],
)
def test_the_base_is_named_as_others_find_it(
    source: str, revision: str | None, expected: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.parent)
    model = tiny.model()
    lora.apply_lora(model, lora.LoraConfig(rank=2))
    about = (ModelConfig(source=source, revision=revision), EvaluationConfig(), ["demo"], "fp32")
    write_files(model, tiny.tokenizer(), *about, tmp_path)
    config: Any = peft.PeftConfig.from_pretrained(str(tmp_path))
    assert config.base_model_name_or_path == expected.format(folder=base.parent)
    assert config.revision == revision


def test_peft_and_our_loader_know_the_class_and_where_an_answer_ends(base: Path, tmp_path: Path) -> None:
    """Of a base that ends texts in another way than a chat template its answers."""
    run = adapter_run(tmp_path / "run", base, answer_end=7)
    outs = {"adapters": tmp_path / "out", "merged": tmp_path / "merged"}
    assert cli._main(["export", str(run), str(outs["adapters"])]) == 0
    assert cli._main(["export", str(run), str(outs["merged"]), "--merged"]) == 0
    before = tiny.model().generation_config.eos_token_id
    for place in (run, *outs.values()):
        assert load(place).model.generation_config.eos_token_id == [before, 7]
    assert load(base, adapters={"mine": run}).model.generation_config.eos_token_id == [before, 7]
    whole = peft.AutoPeftModelForCausalLM.from_pretrained(str(outs["adapters"]))
    assert torch.equal(logits(whole.eval()), logits(load(run).model))


# -------------------------------------------------------------------------------------------------------------- using
def test_an_answer_ends_as_its_own_adapter_has_it(base: Path, run: Path, tmp_path: Path) -> None:
    """Whichever others are on the model, and with the base as without any."""
    given: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0}
    alone = load(run)
    end = alone.tokenizer(alone(PROMPT, **given), add_special_tokens=False)["input_ids"][2]
    other = adapter_run(tmp_path / "run", base, answer_end=end)
    before = load(base).model.generation_config.eos_token_id
    pipeline = load(run, adapters={"other": other})
    ends = {"default": before, "other": [before, end], "base": before}
    for name in ("other", "default", "base", "other"):
        with pipeline.using(name):
            assert pipeline.model.generation_config.eos_token_id == ends[name]
    assert pipeline(PROMPT, **given) == alone(PROMPT, **given)
    assert pipeline(PROMPT, adapter="other", **given) == load(other)(PROMPT, **given)
    assert load(other)(PROMPT, adapter="base", **given) == load(base)(PROMPT, **given)


@pytest.mark.parametrize(
    ("content", "says"), [("{", "cannot be read"), ("[]", "cannot be read"), ('{"eos_token_id": "x"}', r"is \['x'\]")]
)
def test_damaged_ends_are_refused(content: str, says: str, base: Path, exported: Path, tmp_path: Path) -> None:
    """Of a folder that lists no hashes of its files, as peft's."""
    folder = tmp_path / "out"
    shutil.copytree(exported, folder)
    (folder / "pipeline.json").unlink()
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(UsageError, match=rf"generation_config.json: .*{says}"):
        load(base, adapters={"mine": folder})


def test_calls_inside_using_answer_with_its_adapter(run: Path, other_run: Path) -> None:
    pipeline = load(run, adapters={"other": other_run})
    expected: dict[str, Tensor] = {}
    for name in ("default", "other", "base"):
        with pipeline.using(name):
            expected[name] = logits(pipeline.model)
    with pipeline.using("other"):
        pipeline(PROMPT, max_new_tokens=1)
        assert torch.equal(logits(pipeline.model), expected["other"])
        with pipeline.using("base"):
            pipeline(PROMPT, max_new_tokens=1)
            assert torch.equal(logits(pipeline.model), expected["base"])
        assert torch.equal(logits(pipeline.model), expected["other"])
    assert torch.equal(logits(pipeline.model), expected["default"])


@pytest.mark.parametrize("variant", ["lora", "dora", "rslora"])
def test_run_and_export_give_what_peft_gives(variant: Any, base: Path, tmp_path: Path) -> None:
    run = adapter_run(tmp_path / "run", base, variant=variant)
    assert cli._main(["export", str(run), str(tmp_path / "out")]) == 0
    expected = logits(with_peft(base, tmp_path / "out"))
    assert not torch.allclose(expected, logits(tiny.model()), atol=1e-3)
    for place in (run, tmp_path / "out"):
        assert torch.equal(logits(load(place).model), expected)


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_an_export_of_dora_names_the_reader_that_drops_its_magnitudes(
    variant: Any, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failure of "dora" alone means that transformers reads them now: drop the notice, and the line in use.md."""
    from transformers import AutoModelForCausalLM

    run = adapter_run(tmp_path / "run", base, variant=variant)
    assert cli._main(["export", str(run), str(tmp_path / "out")]) == 0
    says = "AutoModelForCausalLM of transformers drops DoRA's magnitudes"
    assert (says in capsys.readouterr().out) == (variant == "dora")
    alone: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found = logits(alone.eval())
    expected = logits(with_peft(base, tmp_path / "out"))
    assert torch.allclose(found, expected, atol=1e-3) == (variant == "lora")
    assert cli._main(["export", str(run), str(tmp_path / "merged"), "--merged"]) == 0
    assert says not in capsys.readouterr().out


def test_averaged_adapters_are_used_where_there_are_any(base: Path, tmp_path: Path) -> None:
    run = adapter_run(tmp_path / "run", base, ema=True)
    assert cli._main(["export", str(run), str(tmp_path / "out"), "--weights", "ema"]) == 0
    assert torch.equal(logits(load(run).model), logits(with_peft(base, tmp_path / "out")))
    plain = adapter_run(tmp_path / "plain", base)
    assert not torch.allclose(logits(load(run).model), logits(load(plain).model), atol=1e-3)


def test_adapters_off_is_the_base_bit_for_bit(base: Path, run: Path) -> None:
    plain = load(base)
    adapted = load(run)
    with adapted.using("base"):
        assert torch.equal(logits(adapted.model), logits(plain.model))
    # The next call has them again.
    assert torch.equal(logits(adapted.model), logits(load(run).model))
    given: dict[str, Any] = {"max_new_tokens": 12, "seed": 3, "temperature": 1.0}
    assert adapted(PROMPT, adapter="base", **given) == plain(PROMPT, **given)
    assert adapted(PROMPT, **given) != plain(PROMPT, **given)


@pytest.mark.parametrize("of_run", [True, False])
def test_several_adapters_answer_side_by_side(of_run: bool, base: Path, run: Path, other_run: Path) -> None:
    """Each as if it were alone, on a run of adapters or on the base itself."""
    place = run if of_run else base
    pipeline = load(place, adapters={"a": run, "b": other_run})
    assert pipeline.adapters == (("default", "a", "b") if of_run else ("a", "b"))
    expected = {"a": logits(load(run).model), "b": logits(load(other_run).model), "base": logits(load(base).model)}
    for _ in range(2):
        for name, alone in expected.items():
            with pipeline.using(name):
                assert torch.equal(logits(pipeline.model), alone), name
    assert torch.equal(logits(pipeline.model), expected["a"])
    given: dict[str, Any] = {"max_new_tokens": 12, "seed": 3}
    assert pipeline(PROMPT, adapter="b", **given) == load(other_run)(PROMPT, **given)


def test_the_base_of_adapters_is_never_an_average(run: Path, tmp_path: Path) -> None:
    """A run of a whole model is used with its EMA weights, but adapters are trained on the others."""
    whole = language_run(tmp_path / "whole", ema=True)
    checkpoint = whole / "checkpoints" / "checkpoint_00000003"
    adapters = adapter_run(tmp_path / "adapters", checkpoint)
    assert torch.equal(logits(load(whole, adapters={"a": adapters}).model), logits(load(adapters).model))


def test_an_embedded_base_needs_no_other_files(base: Path, run: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "base")
    embedded = adapter_run(tmp_path / "run", tmp_path / "base", embedded=True)
    shutil.rmtree(tmp_path / "base")
    assert torch.equal(logits(load(embedded).model), logits(load(run).model))
    assert cli._main(["export", str(embedded), str(tmp_path / "out"), "--merged"]) == 0
    torch.testing.assert_close(logits(load(tmp_path / "out").model), logits(load(run).model), rtol=1e-4, atol=1e-5)


def test_the_command_chooses_by_name(
    base: Path, run: Path, other_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--text", PROMPT, "--max_new_tokens", "24", "--seed", "3", "--adapters", f"a={run}", f"b={other_run}"]
    printed: dict[str, str] = {}
    for name in ("base", "a", "b"):
        assert cli._main(["sample", str(base), *words, "--adapter", name]) == 0
        printed[name] = capsys.readouterr().out
    expected = load(other_run)(PROMPT, max_new_tokens=24, seed=3, temperature=0.8)
    assert expected in printed["b"]
    assert len(set(printed.values())) == 3


# ---------------------------------------------------------------------------------------------------------- exporting
# Slow: a factor, and a norm that the first test of this file has.
@pytest.mark.parametrize(
    "variant", ["lora", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dora", "rslora"))]
)
def test_a_merged_export_is_a_model_of_transformers(variant: Any, base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = adapter_run(tmp_path / "run", base, variant=variant)
    out = tmp_path / "out"
    assert cli._main(["export", str(run), str(out), "--merged"]) == 0
    assert not list(out.glob("adapter*"))
    assert (out / "verify.py").is_file()
    expected = logits(load(run).model)
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(logits(model.eval()), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(load(out).model), expected, rtol=1e-4, atol=1e-5)
    assert AutoTokenizer.from_pretrained(out).chat_template == tiny.CHATML
    described = json.loads((out / "config.json").read_text())
    assert described["pipeline"] == "accel_train.domains.language.pipeline:LanguagePipeline"
    assert described["sampler"] == {"temperature": 1.0}


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), pytest.param("fp16", torch.float16, marks=pytest.mark.slow)]
)
def test_a_merged_export_has_the_precision_asked_for(
    precision: str, dtype: torch.dtype, run: Path, tmp_path: Path
) -> None:
    assert cli._main(["export", str(run), str(tmp_path / "out"), "--merged", "--precision", precision]) == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {dtype}


TIED = {
    "llama": replace(tiny.LLAMA, tie_word_embeddings=True),
    "qwen2": replace(tiny.LLAMA, config="qwen2", tie_word_embeddings=True),
    "gpt2": ModelConfig(config="gpt2", hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    "gemma2": replace(tiny.LLAMA, config="gemma2", tie_word_embeddings=True),
}
"""The third has linear layers of its own kind, and the last two are exported with transformers' class."""


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("llama", "fp32"),
        ("qwen2", "bf16"),
        ("gpt2", "fp32"),
        pytest.param("gemma2", "fp32", marks=pytest.mark.slow),
        pytest.param("gpt2", "bf16", marks=pytest.mark.slow),
    ],
)
def test_a_merged_head_is_untied_from_the_embeddings(
    name: str, precision: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An adapter on the head changes the output alone, and the files say so to transformers."""
    from transformers import AutoModelForCausalLM

    base = tiny.save(tmp_path / "base", TIED[name])
    run = adapter_run(tmp_path / "run", base, targets=("lm_head",))
    assert cli._main(["export", str(run), str(tmp_path / "adapters")]) == 0
    expected = logits(with_peft(base, tmp_path / "adapters"))
    assert torch.equal(logits(load(run).model), expected)
    capfd.readouterr()
    out = tmp_path / "out"
    assert cli._main(["export", str(run), str(out), "--merged", "--precision", precision]) == 0
    assert capfd.readouterr().err == ""
    assert not json.loads((out / "config.json").read_text())["tie_word_embeddings"]
    before: Any = AutoModelForCausalLM.from_pretrained(base)
    merged: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    embeddings = [model.get_input_embeddings().weight for model in (before, merged)]
    assert torch.equal(embeddings[1], embeddings[0].to(dtype_of(precision)).float())
    error = float((logits(merged.eval()) - expected).abs().max() / expected.abs().max())
    assert error < (1e-5 if precision == "fp32" else 0.02)
    stored = load_file(out / "example.safetensors")
    tokens = stored["0.input_ids"]
    with torch.no_grad():
        unmerged = load(run).model(input_ids=tokens, use_cache=False).logits
    assert torch.equal(stored["0.output.output"], unmerged) == (precision == "fp32")


def test_a_tied_head_of_an_embedded_base_is_merged_too(tmp_path: Path) -> None:
    """Of which the checkpoint has the shared weight once."""
    base = tiny.save(tmp_path / "base", TIED["llama"])
    run = adapter_run(tmp_path / "run", base, targets=("q_proj", "lm_head"), embedded=True)
    assert cli._main(["export", str(run), str(tmp_path / "out"), "--merged"]) == 0
    torch.testing.assert_close(logits(load(tmp_path / "out").model), logits(load(run).model), rtol=1e-4, atol=1e-5)


def test_a_wrong_merge_is_refused(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any precision, by the outputs of base and adapters side by side."""
    run = adapter_run(tmp_path / "run", base)
    merge = adapted.merge_adapter

    def wrong(model: Any, name: str) -> None:
        merge(model, name)
        model.get_input_embeddings().weight.data += 0.1

    monkeypatch.setattr(adapted, "merge_adapter", wrong)
    with pytest.raises(UsageError, match=r"the outputs of the merged model differ from those of the base"):
        cli._main(["export", str(run), str(tmp_path / "out"), "--merged", "--precision", "bf16"])
    assert not (tmp_path / "out").exists()


def test_weights_that_are_read_back_otherwise_are_no_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples are of the model before it was written, or a head that is tied again would prove itself."""
    run = adapter_run(tmp_path / "run", tiny.save(tmp_path / "base", TIED["llama"]), targets=("lm_head",))
    save = adapted.save_whole

    def tied_again(model: Any, directory: Path, precision: Any) -> None:
        save(model, directory, precision)
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
        tensors = load_file(directory / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(adapted, "save_whole", tied_again)
    with pytest.raises(ProofError, match=r"differ from those of the export"):
        cli._main(["export", str(run), str(tmp_path / "out"), "--merged"])


def test_a_head_that_is_always_tied_is_not_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    run = adapter_run(tmp_path / "run", tiny.save(tmp_path / "base", TIED["llama"]), targets=("lm_head",))
    always = {"lm_head.weight": "model.embed_tokens.weight"}
    monkeypatch.setattr(LlamaForCausalLM, "get_expanded_tied_weights_keys", lambda *_, **__: always)
    with pytest.raises(UsageError, match=r"^LlamaForCausalLM always ties its head to its embeddings.*--merged out"):
        cli._main(["export", str(run), str(tmp_path / "out"), "--merged"])


def test_the_start_says_what_an_adapter_on_a_tied_head_changes() -> None:
    for name, count in {"llama": 2, "untied": 1}.items():
        model = tiny.model(TIED.get(name, tiny.LLAMA))
        config = lora.LoraConfig(rank=2, targets=("lm_head",))
        lora.apply_lora(model, config)
        notices = lora.describe_lora(model, config)
        assert len(notices) == count
        assert (count == 1) or "not the input embeddings tied to it" in notices[1]


def test_merging_needs_adapters(tmp_path: Path) -> None:
    whole = language_run(tmp_path / "run")
    with pytest.raises(UsageError, match=r"contains no adapters, so there is nothing to merge; leave --merged out"):
        cli._main(["export", str(whole), str(tmp_path / "out"), "--merged"])
    assert not (tmp_path / "out").exists()


def test_an_export_of_adapters_notices_a_flipped_bit(exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "out")
    path = tmp_path / "out" / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"adapter_model.safetensors changed since the export"):
        load(tmp_path / "out")


def verified(out: Path, *arguments: str) -> tuple[int, str]:
    """Run verify.py where no package can be imported. Returns the exit code, and what it printed."""
    command = [sys.executable, "-I", "-S", str(out / "verify.py"), *arguments]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_verify_py_of_adapters_compares_them_and_their_base(base: Path, exported: Path, tmp_path: Path) -> None:
    out = shutil.copytree(exported, tmp_path / "out")
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    found = f"{len(files) - 1} files have the sha256 of the export\n"  # all but pipeline.json itself
    alone = f"verified: this adapter is as it was exported; its base, {base}, was not compared\n"
    assert verified(out) == (0, found + alone)
    code, printed = verified(out, str(base))
    assert (code, printed.endswith(f"{base} has the weights that it was trained on\n")) == (0, True)
    other = shutil.copytree(base, tmp_path / "base")
    flip(other / "model.safetensors")
    code, printed = verified(out, str(other))
    assert code == 1
    assert "is another base than" in printed
    assert printed.endswith("or incomplete: model.safetensors\n")
    for name in ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json"):
        flip(out / name)
        assert verified(out) == (1, f"FAILED: changed since the export, or missing: {name}\n")
        flip(out / name)


# ----------------------------------------------------------------------------------------------------------- the base
def moved(base: Path, folder: Path) -> tuple[Path, Path]:
    """A base of its own, with adapters on it."""
    shutil.copytree(base, folder / "base")
    return folder / "base", adapter_run(folder / "run", folder / "base")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


USES: dict[str, Callable[[Path, Path], Any]] = {
    "load": lambda run, out: accel_train.load(run),
    "sample": lambda run, out: cli._main(["sample", str(run), "--text", PROMPT]),
    "merge": lambda run, out: cli._main(["export", str(run), str(out), "--merged"]),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.fault(
    "R7", injected="the base of adapters is deleted", outcome="load, sample and export name the missing base"
)
def test_a_base_that_is_gone_is_named(use: str, base: Path, tmp_path: Path) -> None:
    folder, run = moved(base, tmp_path)
    shutil.rmtree(folder)
    says = rf"^{run}/checkpoints/checkpoint_00000003: its base, {folder}, does not exist; restore it"
    with pytest.raises(UsageError, match=says):
        USES[use](run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("use", USES)
@pytest.mark.fault(
    "R7",
    injected="a bit of the base of adapters flips",
    outcome="load, sample and export name the file and both sha256",
)
def test_a_base_that_has_changed_is_named(use: str, base: Path, tmp_path: Path) -> None:
    folder, run = moved(base, tmp_path)
    flip(folder / "model.safetensors")
    with pytest.raises(UsageError, match=r"has another model\.safetensors \(sha256 [0-9a-f]{12}, not [0-9a-f]{12}\)"):
        USES[use](run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["run", "exported"])
@pytest.mark.fault("R7", injected="adapters on another base than theirs", outcome="refused; both bases are named")
def test_adapters_of_another_base_are_refused(kind: str, run: Path, exported: Path, tmp_path: Path) -> None:
    another = tmp_path / "another"
    tiny.model(seed=5).save_pretrained(another)
    tiny.tokenizer().save_pretrained(another)
    with pytest.raises(UsageError, match=rf"its frozen weights are those of .*/base.*, and {another} has another"):
        load(another, adapters={"a": run if kind == "run" else exported})


def test_a_base_may_lie_elsewhere(base: Path, run: Path, tmp_path: Path) -> None:
    folder, adapters = moved(base, tmp_path)
    folder.rename(tmp_path / "new")
    pipeline = load(tmp_path / "new", adapters={"mine": adapters})
    assert torch.equal(logits(pipeline.model), logits(load(run).model))


def test_adapters_of_peft_are_taken_without_a_reference(
    base: Path, exported: Path, run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        tmp_path.joinpath(name).write_bytes((exported / name).read_bytes())
    pipeline = load(base, adapters={"theirs": tmp_path})
    assert torch.equal(logits(pipeline.model), logits(load(run).model))
    assert "does not record the files of its base" in caplog.text
    with pytest.raises(UsageError, match=r"do not record the files of their base \(peft writes none\); give the base"):
        load(tmp_path)


# --------------------------------------------------------------------------------------------------------- bad inputs
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--adapter", "polite"], r"adapter 'polite': this model has no adapter of that name; it has base, default"),
        (["--adapter", "defualt"], r"did you mean 'default'\?"),
        (["--adapters", "a"], r"adapters 'a': NAME=PLACE is required"),
        (["--adapters", "=x"], r"adapters '=x': NAME=PLACE is required"),
        (["--adapters", "a=RUN", "a=RUN"], r"the name 'a' is given twice"),
        (["--adapters", "base=RUN"], r"adapters 'base': 'base' stands for the base alone"),
        (["--adapters", "default=RUN"], r"adapters 'default': is in use, or not a plain name"),
        (["--adapters", "a.b=RUN"], r"adapters 'a.b': is in use, or not a plain name"),
        (["--adapters", "a=/nowhere"], r"/nowhere: does not exist"),
    ],
)
def test_wrong_names_and_places_are_refused(words: list[str], says: str, run: Path) -> None:
    given = [word.replace("RUN", str(run)) for word in words]
    with pytest.raises(UsageError, match=says):
        cli._main(["sample", str(run), "--text", PROMPT, *given])


def test_a_whole_model_is_no_adapter(base: Path, tmp_path: Path) -> None:
    whole = language_run(tmp_path / "run")
    with pytest.raises(UsageError, match=r"adapters a=.*: contains a whole model, not adapters; give a run"):
        load(base, adapters={"a": whole})
    with pytest.raises(UsageError, match=r"adapter 'a': this model has no adapter of that name.*; it has base"):
        load(whole)(PROMPT, adapter="a")


def changed_config(change: dict[str, Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    return apply


def changed_tensors(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return apply


def remove_one(tensors: dict[str, Tensor]) -> None:
    del tensors[min(tensors)]


def spoil_one(tensors: dict[str, Tensor]) -> None:
    tensors[min(tensors)].fill_(torch.nan)


OURS = '{"pipeline": "accel_train.domains.language.pipeline:LanguagePipeline", "base": '


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "another kind": (changed_config({"peft_type": "IA3"}), r"is of peft's type 'IA3'; adapters of its type 'LORA'"),
    "no kind": (changed_config({"peft_type": None}), r"is of peft's type 'None'"),
    "a changed base": (changed_config({"init_lora_weights": "pissa"}), r"init_lora_weights 'pissa' changes the base"),
    "no layer": (changed_config({"target_modules": ["nothing"]}), r"does not fit LlamaForCausalLM"),
    "rank": (changed_config({"r": 3}), r"in the file, .* on this base"),
    "negative rank": (changed_config({"r": -1}), r"rank|positive|does not fit|not read"),
    "unknown option": (changed_config({"newer": 1}), r"not read by the installed peft"),
    "no JSON": (
        lambda folder: (folder / "adapter_config.json").write_text("{"),
        r"adapter_config.json: cannot be read",
    ),
    "a tensor less": (changed_tensors(remove_one), r"lora_A.weight: not in the file"),
    "a tensor more": (
        changed_tensors(lambda t: t.update(more=torch.zeros(1))),
        r"more: this base has no layer",
    ),
    "NaN": (changed_tensors(spoil_one), r"NaN or infinite"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), r"is not there|no adapters"),
    "torn": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}"),
        r"adapter_model.safetensors: ",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_adapters_are_refused(damage: str, base: Path, exported: Path, tmp_path: Path) -> None:
    """As of peft: a folder of ours notices each of them by its sha256 before."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        tmp_path.joinpath(name).write_bytes((exported / name).read_bytes())
    apply, says = DAMAGES[damage]
    apply(tmp_path)
    with pytest.raises(UsageError, match=says):
        load(base, adapters={"a": tmp_path})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", r"pipeline.json: cannot be read"),
        ('{"format": 99, "pipeline": "accel_train.domains.language.pipeline:LanguagePipeline"}', r"format 99"),
        (
            '{"pipeline": "os:system"}',
            r"pipeline.json: names the pipeline 'os:system', which is not part of this package",
        ),
        ('{"files": 3}', r"pipeline.json: cannot be read"),
        ('{"files": {"../x": "0"}}', r"\.\./x changed since the export"),
        (OURS + '{"source": "x", "files": {"model.safetensors": {}}}}', r"does not record the source and the sha256"),
        (OURS + '{"source": "x", "files": {"a": {"sha256": "0"}}}}', r"its base, x, does not exist"),
    ],
)
def test_a_foreign_description_is_refused(
    content: str, says: str, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shutil.copytree(exported, tmp_path / "out")
    (tmp_path / "out" / "pipeline.json").write_text(content)
    with pytest.raises(UsageError, match=says):
        accel_train.load(tmp_path / "out")


# ----------------------------------------------------------------------------------------------------- quantised bases
@pytest.mark.parametrize(
    "bits", [pytest.param("int8", marks=pytest.mark.slow), "fp8", "nf4"]
)  # int8 as nf4, by one library
def test_adapters_of_a_quantised_base_are_used_on_it(bits: Any, base: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    run = adapter_run(tmp_path / "run", base, base_precision=bits)
    pipeline = load(run)
    assert any(quantised.is_quantised(module) for module in pipeline.model.modules())
    full = adapter_run(tmp_path / "full", base)
    difference = (logits(pipeline.model) - logits(load(full).model)).abs().max()
    assert 0 < float(difference) < 0.3
    # Merged is on the values that the bits stand for, so closer than that to what was trained.
    assert cli._main(["export", str(run), str(tmp_path / "out"), "--merged"]) == 0
    merged = (logits(pipeline.model) - logits(load(tmp_path / "out").model)).abs().max()
    assert float(merged) < (0.02 if bits == "int8" else 1e-4)


@pytest.mark.parametrize("embedded", [False, True])
def test_a_resume_without_the_folder_of_its_base_says_what_is_missing(embedded: bool, tmp_path: Path) -> None:
    base = tiny.save(tmp_path / "base")
    run = adapter_run(tmp_path / "run", base, embedded=embedded)
    digest = sha256((base / "model.safetensors").read_bytes()).hexdigest()
    base.rename(tmp_path / "moved")
    records = "records no files" if embedded else f"records source {base}, .*model.safetensors with sha256 {digest}"
    says = rf"--model.source '{base}': .* {base} is not there. {run}\S+checkpoint_\d+ .*{records}.*--allow model.source"
    (checkpoint,) = (run / "checkpoints").iterdir()
    for place in ((run, "auto"), (tmp_path / "other", str(checkpoint))):
        argv = ["--model.source", str(base), "--lora.rank", "4", "--data.path", str(tmp_path / "none.txt")]
        argv += ["--output_dir", str(place[0]), "--resume", place[1]]
        with pytest.raises(UsageError, match=says):
            causal_lm.main(["causal_lm_tune", *argv])

"""The recipe of causal language models in real processes: gradient, evaluation, files, pretrained weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import accel_train
from accel_train import cli
from tests.distributed.launching import (
    DEMOS,
    ROOT,
    Finished,
    Layout,
    command,
    few_texts,
    fork,
    relative_difference,
    run_recipe,
)
from tests.domains.language import tiny

pytestmark = pytest.mark.distributed
ONE = Layout("single", 1, "causal_lm")
TWO = Layout("ddp", 2, "causal_lm")
IN_MEMORY = ROOT / "tests" / "domains" / "language" / "in_memory.py"
LONG, SHORT = " ".join(tiny.TEXTS), "Friends."


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Completions of one word and of fifty, so that a mean of means is far from the mean over tokens."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {"prompt": f"{number}: {tiny.TEXTS[number % 5]}", "completion": f" {LONG if number % 3 else SHORT}"}
        for number in range(60)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def one_step(layout: Layout, folder: Path, pairs: Path, micro_batch_size: int, *flags: str) -> Finished:
    unpacked = ("--data.path", str(pairs), "--data.no_packing", "--data.max_length", "96", "--data.vocab_size", "300")
    micro = ("--micro_batch_size", str(micro_batch_size))
    # Not clipped: a clip would hide a wrong scale.
    once = ("--max_steps", "1", "--optimizer.max_grad_norm", "0")
    return run_recipe(layout, folder / "run", *unpacked, *micro, *once, *flags)


def test_the_bundled_rows_train_as_the_readme_has_it(tmp_path: Path) -> None:
    """Every other quick test of this recipe has rows of its own."""
    argv = ["causal_lm_smoke", "--smoke", "--output_dir", str(tmp_path / "run")]
    done = fork(ONE, command(ONE, argv, tmp_path))
    assert done.returncode == 0, done.stdout[-3000:]
    assert json.loads((tmp_path / "run" / "report" / "evaluation.json").read_text())["perplexity"] > 1


@pytest.fixture(scope="module")
def whole(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One process with the whole batch of 16."""
    return one_step(ONE, tmp_path_factory.mktemp("whole"), pairs, 16)


@pytest.mark.parametrize(
    ("layout", "micro_batch_size"),
    [
        pytest.param(ONE, 8, id="1 process, 2 micro-batches", marks=pytest.mark.slow),
        pytest.param(ONE, 4, id="1 process, 4 micro-batches", marks=pytest.mark.slow),
        pytest.param(TWO, 8, id="2 processes, 1 micro-batch", marks=pytest.mark.slow),
        pytest.param(TWO, 4, id="2 processes, 2 micro-batches", marks=pytest.mark.slow),
        pytest.param(TWO, 2, id="2 processes, 4 micro-batches"),
    ],
)
def test_the_gradient_of_any_split_is_that_of_the_whole_batch(
    layout: Layout, micro_batch_size: int, whole: Finished, pairs: Path, tmp_path: Path
) -> None:
    has_the_gradient_of(whole, one_step(layout, tmp_path, pairs, micro_batch_size))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TWO, id="DDP", marks=pytest.mark.slow),
        pytest.param(Layout("fsdp2", 2, "causal_lm"), id="FSDP2"),
        pytest.param(Layout("zero2_offload", 2, "causal_lm"), id="ZeRO-2", marks=pytest.mark.slow),
        pytest.param(Layout("zero3_offload", 2, "causal_lm"), id="ZeRO-3", marks=pytest.mark.slow),
    ],
)
def test_the_gradient_of_a_loss_by_chunks_is_that_of_the_whole_batch(
    layout: Layout, whole: Finished, pairs: Path, tmp_path: Path
) -> None:
    """The head has the weights of the embeddings, and sharded weights are gathered again in the backward."""
    has_the_gradient_of(whole, one_step(layout, tmp_path, pairs, 4, "--model.loss_chunk", "100"))


def has_the_gradient_of(whole: Finished, run: Finished) -> None:
    """After one step Adam's first moment is a tenth of the gradient."""
    gradient, expected = (found.tensors(1, "optimizer/exp_avg") for found in (run, whole))
    assert relative_difference(expected, gradient) < 1e-6
    assert run.train_lines()[1]["grad_norm"] == pytest.approx(whole.train_lines()[1]["grad_norm"], rel=1e-6)
    assert run.losses() == pytest.approx(whole.losses(), rel=1e-6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run_recipe(ONE, tmp_path_factory.mktemp("trained") / "run", "--max_steps", "6")


def test_a_checkpoint_loads_with_transformers(trained: Finished) -> None:
    """Weights, tied embeddings, tokenizer and generation config from the directory alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = trained.checkpoint(6)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    saved = trained.tensors(6, "model")
    assert "lm_head.weight" not in saved
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert dict(model.named_parameters()).keys() == saved.keys()
    assert all(torch.equal(p, saved[name]) for name, p in model.named_parameters())
    ids = tokenizer(tiny.TEXTS[0], return_tensors="pt")["input_ids"]
    written = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    assert written.shape[1] <= ids.shape[1] + 4
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.slow  # tests/domains/language/test_pipeline.py exports an average that transformers reads
def test_an_export_of_the_average_loads_with_transformers(trained: Finished, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert cli._main(["checkpoints", "export", str(trained.directory), str(tmp_path / "out"), "--weights", "ema"]) == 0
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    average = trained.tensors(6, "ema")
    assert all(torch.equal(p, average[name]) for name, p in model.named_parameters())
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer) == model.config.vocab_size


def test_a_run_is_loaded_with_its_average_and_continues_as_its_export_does(trained: Finished, tmp_path: Path) -> None:
    from accel_train.domains.language.pipeline import LanguagePipeline

    pipeline = accel_train.load(trained.directory)
    assert isinstance(pipeline, LanguagePipeline)
    average = trained.tensors(6, "ema")
    assert all(torch.equal(p, average[name]) for name, p in pipeline.model.named_parameters())
    assert cli._main(["export", str(trained.directory), str(tmp_path / "out"), "--weights", "ema"]) == 0
    assert accel_train.load(tmp_path / "out")("Stand,", seed=3) == pipeline("Stand,", seed=3)


def test_evaluation_is_the_same_on_two_processes_and_any_batch(trained: Finished, tmp_path: Path) -> None:
    def figures(directory: Path) -> tuple[dict[str, float], str]:
        report = directory / "report"
        return json.loads((report / "evaluation.json").read_text()), (report / "samples.md").read_text()

    expected, written = figures(trained.directory)
    shutil.copytree(trained.directory, tmp_path / "run")
    flags = ("--max_steps", "6", "--evaluate_only", "--evaluation.batch_size", "3")
    again = run_recipe(TWO, tmp_path / "run", *flags)
    metrics, samples = figures(again.directory)
    assert metrics == pytest.approx(expected, rel=1e-6)
    assert samples == written
    assert "given: >" in written
    assert metrics["perplexity"] > 1


def test_pretrained_weights_are_tuned_on_chats_and_resume_without_their_source(tmp_path: Path) -> None:
    """The first loss is that of the weights of the folder. A resume needs its config and tokenizer, not its weights."""
    # Answers end with another special token than texts.
    ending = tiny.CHATML.replace("{{ message['content'] }}", "{{ message['content'] }}<pad>")
    folder = tiny.save(tmp_path / "pretrained", template=ending)
    rows = [
        {"messages": [{"role": "user", "content": f"{n} {text}"}, {"role": "assistant", "content": SHORT}]}
        for n in range(20)
        for text in tiny.TEXTS
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = tmp_path / "tune.yaml"
    settings.write_text(
        "global_batch_size: 4\nmicro_batch_size: 4\nmax_steps: 2\nlog: {log_every: 1}\n"
        f"model: {{source: {folder}}}\ndata: {{path: {tmp_path / 'chats.jsonl'}, max_length: 64}}\n"
        "optimizer: {lr: 1e-3}\nschedule: {kind: constant, warmup_steps: 0}\n"
        "evaluation: {shown: 1, max_new_tokens: 4}\n"
    )

    def run(steps: int, *flags: str, name: str = "run") -> str:
        argv = [str(settings), "--output_dir", str(tmp_path / name), "--max_steps", str(steps), *flags]
        done = fork(ONE, command(ONE, argv, tmp_path))
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    shown = run(2)
    assert "packing: proven" in shown
    assert "generation also ends at '<pad>'" in shown
    saved = json.loads(
        (tmp_path / "run" / "checkpoints" / "checkpoint_00000002" / "generation_config.json").read_text()
    )
    assert saved["eos_token_id"] == [1, 2]
    # That is for who has tried the demo.
    assert "train it on your own rows" not in shown
    lines = Finished(tmp_path / "run", shown, 0).train_lines()
    assert lines[1]["loss"] == pytest.approx(torch.log(torch.tensor(320.0)).item(), rel=0.05)  # of random weights
    run(2, "--evaluate_only", "--resume", "never", name="before")
    before = json.loads((tmp_path / "before" / "report" / "evaluation.json").read_text())
    assert before["step"] == 0
    assert before["nll"] == pytest.approx(torch.log(torch.tensor(320.0)).item(), rel=0.05)
    (folder / "model.safetensors").unlink()
    assert "at step 2" in run(3)


# That the rows are the same bits is tested quickly in test_token_cache.py.
@pytest.mark.slow
@pytest.mark.parametrize("layout", [ONE, TWO], ids=str)
def test_losses_are_those_of_the_reader_in_memory(layout: Layout, tmp_path: Path) -> None:
    """Bit for bit, with tokens computed by this start and with those of the cache. DDP adds nothing to what is read."""
    _, small = DEMOS["causal_lm"]

    def losses(name: str, recipe: Path | None = None) -> list[float]:
        flags = ("--data.cache_dir", str(tmp_path / "cache"), "--max_steps", "4")
        words = ["causal_lm_smoke", *small, "--output_dir", str(tmp_path / name), *flags]
        done = fork(layout, command(layout, words, tmp_path, recipe))
        assert done.returncode == 0, done.stdout[-4000:]
        return Finished(tmp_path / name, done.stdout, 0).losses()

    found = losses("computed")
    assert len(found) == 4
    assert losses("cached") == found
    assert losses("in memory", IN_MEMORY) == found


@pytest.mark.slow  # the gradient is compared with the whole batch's
def test_losses_are_those_of_the_trainer_of_transformers(tmp_path: Path) -> None:
    """The same weights, packed rows and order, fp32, four micro-batches a step."""
    from benchmarks import causal_lm

    path = str(few_texts())
    causal_lm.write_model(tmp_path, path, tiny.LLAMA)
    found = causal_lm.ours(tmp_path, path, 8)["losses"]
    expected = causal_lm.trainer(tmp_path, path, 8)["losses"]
    assert len(found) == len(expected) == 8
    assert found[-1] < found[0]
    assert causal_lm.largest_difference(found, expected) < 1e-4

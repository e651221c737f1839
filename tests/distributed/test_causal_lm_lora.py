"""LoRA on a causal language model in real processes: only adapters are trained, saved and exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import accel_train
from accel_train import cli
from accel_train.store import commit
from tests.distributed.launching import Finished, Layout, command, few_texts, fork
from tests.domains.language import tiny

pytest.importorskip("peft")
# peft reads a property that transformers has renamed.
pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")]
STEPS = 6
STRATEGIES = ["ddp", "fsdp2", "zero2", "zero3"]
DAILY = {"fsdp2"}

Train = Callable[..., Finished]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights in two files with an index, as large models have them."""
    folder = tmp_path_factory.mktemp("source")
    model = tiny.model()
    model.save_pretrained(folder, max_shard_size="40KB")
    tiny.tokenizer().save_pretrained(folder)
    assert (folder / "model.safetensors.index.json").exists()
    return folder


@pytest.fixture(scope="module")
def train(source: Path) -> Train:
    def run(strategy: str, folder: Path, *flags: str, ok: bool = True) -> Finished:
        folder.mkdir(parents=True, exist_ok=True)
        settings = folder / "tune.yaml"
        settings.write_text(
            f"global_batch_size: 8\nmicro_batch_size: 4\nmax_steps: {STEPS}\nlog: {{log_every: 1, progress_bar: off}}\n"
            f"model: {{source: {source}}}\ndata: {{path: {few_texts()}, max_length: 48}}\n"
            "lora: {rank: 4}\noptimizer: {lr: 1e-2}\nschedule: {kind: constant, warmup_steps: 0}\n"
            "evaluation: {samples: 4, shown: 1, max_new_tokens: 4}\ncheckpoints: {save_every: 3, keep_last: 0}\n"
        )
        layout = Layout(strategy, 1 if strategy == "single" else 2, "causal_lm")
        words = command(layout, [str(settings), "--output_dir", str(folder / "run"), *flags], folder)
        done = fork(layout, words)
        assert not ok or done.returncode == 0, done.stdout[-4000:]
        return Finished(folder / "run", done.stdout, done.returncode)

    return run


@pytest.fixture(scope="module")
def single(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return train("single", tmp_path_factory.mktemp("single"))


def test_only_adapters_are_trained_and_saved(single: Finished, source: Path) -> None:
    assert "lora of rank 4 on 14 layers" in single.output
    assert single.losses()[-1] < single.losses()[0]
    for stem in ("model", "ema", "optimizer/exp_avg"):
        assert all(".lora_" in name for name in single.tensors(STEPS, stem)), stem
    assert any(float(t.abs().max()) > 0 for name, t in single.tensors(STEPS, "model").items() if "lora_B" in name)
    named = commit.verify(single.checkpoint(STEPS)).manifest["base"]
    assert named["source"] == str(source)
    assert named["files"] == {
        file.name: {"size": file.stat().st_size, "sha256": commit.hash_file(file)}
        for file in source.glob("model-*.safetensors")
    }


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=() if name in DAILY else pytest.mark.slow) for name in STRATEGIES]
)
def test_every_strategy_trains_the_same_adapters(strategy: str, single: Finished, train: Train, tmp_path: Path) -> None:
    run = train(strategy, tmp_path)
    assert run.losses() == pytest.approx(single.losses(), rel=1e-5)
    expected = single.tensors(STEPS, "model")
    for name, tensor in run.tensors(STEPS, "model").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow  # test_foreign_models.py kills and resumes a frozen base
def test_a_resume_has_the_same_bits(single: Finished, train: Train, tmp_path: Path) -> None:
    train("single", tmp_path, "--max_steps", "3")
    resumed = train("single", tmp_path)
    assert "at step 3" in resumed.output
    assert [x.hex() for x in resumed.losses()] == [x.hex() for x in single.losses()]
    expected = single.tensors(STEPS, "model")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.tensors(STEPS, "model").items())


@pytest.mark.parametrize("weights", ["model", "ema"])
def test_peft_and_transformers_load_the_export(weights: str, single: Finished, source: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    assert cli._main(["checkpoints", "export", str(single.directory), str(out), "--weights", weights]) == 0
    assert not (out / "model.safetensors").exists()
    ids = torch.arange(3, 11)[None]
    base: Any = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, out).eval()(ids).logits
    assert not torch.allclose(plain, adapted, atol=1e-3)
    saved = single.tensors(STEPS, weights)
    for name, tensor in load_file(out / "adapter_model.safetensors").items():
        assert torch.equal(tensor, saved[name.removeprefix("base_model.model.").replace(".weight", ".default.weight")])
    # transformers finds the base by the name in adapter_config.json, and reads no half of a model from a checkpoint.
    with pytest.raises(OSError, match=r"adapter_model"):
        AutoModelForCausalLM.from_pretrained(single.checkpoint(STEPS))
    model: Any = AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, adapted)


@pytest.mark.parametrize(
    ("bits", "strategy"),
    [
        pytest.param("nf4", "single", marks=pytest.mark.slow),
        pytest.param("nf4", "ddp", marks=pytest.mark.slow),
        pytest.param("nf4", "zero2", marks=pytest.mark.slow),
        pytest.param("int8", "single", marks=pytest.mark.slow),
        pytest.param("fp8", "single", marks=pytest.mark.slow),
        pytest.param("fp8", "ddp", marks=pytest.mark.slow),
    ],
)
def test_a_quantised_base_is_named_and_not_saved(
    bits: str, strategy: str, single: Finished, source: Path, train: Train, tmp_path: Path
) -> None:
    """QLoRA, with a resume in the middle; tests/domains/models/test_lora.py has what the base is."""
    pytest.importorskip("bitsandbytes")
    train(strategy, tmp_path, "--lora.base_precision", bits, "--max_steps", "3")
    run = train(strategy, tmp_path, "--lora.base_precision", bits)
    assert f"on a base in {bits}" in run.output
    assert run.losses()[-1] < run.losses()[0]
    assert run.losses() == pytest.approx(single.losses(), rel=0.05)
    assert run.losses() != pytest.approx(single.losses(), rel=1e-5)
    saved = run.tensors(STEPS, "model")
    assert all(".lora_" in name for name in saved)
    manifest = commit.verify(run.checkpoint(STEPS)).manifest
    assert manifest["base"] == commit.verify(single.checkpoint(STEPS)).manifest["base"]
    assert accel_train.load(run.directory)("To be", max_new_tokens=4, adapter="base") is not None


@pytest.mark.parametrize("strategy", [pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp2", "zero3")])
def test_a_quantised_base_is_not_sharded(strategy: str, train: Train, tmp_path: Path) -> None:
    """Every day by itself: tests/domains/models/test_lora.py."""
    pytest.importorskip("bitsandbytes")
    run = train(strategy, tmp_path, "--lora.base_precision", "nf4", ok=False)
    assert run.code == 2
    assert f"the frozen weights are quantised (uint8), and {strategy} would shard them" in run.output


def test_adapters_need_a_trained_model(train: Train, tmp_path: Path) -> None:
    run = train("single", tmp_path, "--model.source", "None", ok=False)
    assert run.code == 2
    assert "--lora.rank 4: adapters tune a trained model, but this one is trained from scratch" in run.output

"""Adapters on text encoders: against diffusers' encode_prompt, plain torch with peft, and diffusers' loaders."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import accel_train
from accel_train import cli
from accel_train.config import UsageError
from accel_train.domains.diffusion.timesteps import TimeConfig
from accel_train.domains.images.kohya.metadata import kohya_facts
from accel_train.domains.images.pipelines import adapter_files, encoding, loading
from accel_train.domains.images.pipelines.components import quiet
from accel_train.domains.images.pipelines.objective import Denoising, ObjectiveConfig
from accel_train.domains.images.trained_text import adapters
from accel_train.domains.images.trained_text.adapters import TextEncoderConfig, with_frozen_text, with_trained_text
from accel_train.domains.images.trained_text.joint import DenoiserWithText
from accel_train.domains.models import lora
from accel_train.domains.models.lora import LoraConfig
from accel_train.store import commit
from accel_train.store.exports import peft_layout
from accel_train.store.exports.peft_layout import PREFIX
from tests.domains.images import tiny_pipelines as tiny
from tests.domains.images.test_lora_recipe import STEPS, drawn_by_diffusers, pictures, settings, train, weights_of
from tests.domains.images.test_objective import Made

pytest.importorskip("diffusers")
pytest.importorskip("peft")
# Of diffusers itself, when it reads transformers' classes.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.usefixtures("fresh")]
CPU = torch.device("cpu")
RANK, ALPHA = 3, 6.0
TEXT = TextEncoderConfig(rank=2, alpha=5.0, targets=("all-linear",))
CAPTIONS = ["a red flag", "", "two dogs in a wood"]
WORDS = [f"a {word} flag" for word in "red big new old wet dry".split()]
"""Captions of the batch that test_objective.py makes."""
ENCODERS = {"sd1": ("text_encoder",), "sd2": ("text_encoder",), "sdxl": ("text_encoder", "text_encoder_2")}
FLAGS = ("--text_encoders.rank", "2", "--text_encoders.alpha", "5", "--text_encoders.lr_factor", "0.5")


def trained(base: Any) -> Any:
    found = with_trained_text(base, TEXT)
    assert found.trained_text
    return found


def with_values(model: nn.Module) -> nn.Module:
    """Second matrices that are not zero, and magnitudes that are not the base's, as after training."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
            if ".lora_magnitude_vector." in name:
                parameter.mul_(0.5 + torch.rand_like(parameter))
    return model


def built(base: Any, text: TextEncoderConfig = TEXT, **options: Any) -> DenoiserWithText:
    torch.manual_seed(0)
    model = base.denoiser("fp32")
    adapters.apply_adapters(model, base, LoraConfig(rank=RANK, alpha=ALPHA, **options), text, "fp32", CPU)
    return with_values(model)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("name", ENCODERS)
def test_tokens_are_embedded_as_encode_prompt_does(name: str, tmp_path: Path) -> None:
    base = loading.find_base(loading.BaseConfig(source=str(tiny.save(name, tmp_path))))
    ours = trained(base)
    pipeline = base.components(CPU)
    tokens = encoding.encode_texts(pipeline, ours, CAPTIONS)
    assert tuple(tokens) == ENCODERS[name]
    model = ours.denoiser("fp32").eval()
    with torch.no_grad():
        found = model(tokens=tokens)
    expected = encoding.encode_texts(pipeline, base, CAPTIONS)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=0)


def reference(made: Made, model: DenoiserWithText, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by torch and peft alone, with the loss of diffusers' scripts and its encode_prompt."""
    import peft

    pipeline = tiny.make(name)
    parts = {"unet": pipeline.unet, **{each: getattr(pipeline, each) for each in ENCODERS[name]}}
    mine = dict(model.named_parameters())
    last = "encoder.layers.1."
    for part, module in parts.items():
        module.requires_grad_(False).train()
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        kind: dict[str, Any] = {"r": RANK, "lora_alpha": ALPHA}
        if part != "unet":
            targets = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
            kind = {"r": TEXT.rank, "lora_alpha": TEXT.alpha}
        # The penultimate layer of XL's first encoder is the last that it reads.
        left_out = [f".*{last}.*"] if (name, part) == ("sdxl", "text_encoder") else None
        if left_out:
            targets = [p for p, m in module.named_modules() if p.endswith(tuple(targets)) and last not in p]
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=targets, **kind), module)
        for path, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.data.copy_(mine[f"{part}.{path}"].data)
    inputs = made.process.noised(made.batch, 3, 5, 6)
    found = pipeline.encode_prompt(WORDS, CPU, 1, False) if name == "sd1" else pipeline.encode_prompt(WORDS, device=CPU)
    added: Any = None
    if name == "sdxl":
        sizes = torch.cat([inputs[key] for key in ("original_size", "crop_top_left", "target_size")], 1)
        added = {"text_embeds": found[2], "time_ids": sizes}
    predicted = pipeline.unet(
        inputs["noisy"], inputs["timestep"], encoder_hidden_states=found[0], added_cond_kwargs=added
    ).sample
    loss = torch.nn.functional.mse_loss(predicted, inputs["target"])
    loss.backward()
    gradients = {
        f"{part}.{path}": parameter.grad
        for part, module in parts.items()
        for path, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    assert all(gradient is not None for gradient in gradients.values())
    return loss, gradients  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("name", ["sd1", "sdxl"])
def test_loss_and_gradients_are_those_of_torch_and_peft(name: str, tmp_path: Path) -> None:
    made = Made(name, tmp_path, ObjectiveConfig(), TimeConfig())
    base = trained(loading.find_base(loading.BaseConfig(source=str(tmp_path))))
    tokens = encoding.encode_texts(made.pipeline, base, WORDS)
    empty = encoding.encode_texts(made.pipeline, base, [""])
    model = built(base)
    batch = {key: value for key, value in made.batch.items() if key not in made.captions} | tokens
    process = Denoising(
        base.family, base.levels(), made.pipeline.vae, model.config, empty, ObjectiveConfig(), TimeConfig()
    )
    loss = process.errors(model, process.noised(batch, 3, 5, 6)).mean()
    loss.backward()
    expected, gradients = reference(made, model, name)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    found = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.requires_grad}
    # DDP refuses a parameter without a gradient.
    assert not [key for key, gradient in found.items() if gradient is None or not gradient.any()]
    assert found.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # gradients, files and refusals of text encoders are tested one by one above and below
@pytest.mark.parametrize("name", ["sd1", "sdxl"])
def test_text_encoders_are_trained_resumed_exported_and_loaded(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.save(name, tmp_path / "base")
    pictures(tmp_path / "photos")
    settings(tmp_path, name)
    before = {file: file.read_bytes() for file in (tmp_path / "base").rglob("*.safetensors")}
    flags = (*FLAGS, "--evaluation.heldout_prompts", "2")
    run = train(tmp_path, "whole", *flags)
    printed = capsys.readouterr().out
    assert f"captions are tokenised, and no embedding is cached: {' and '.join(ENCODERS[name])} change" in printed
    trained_weights = weights_of(run)
    for encoder in ENCODERS[name]:
        second = [value for key, value in trained_weights.items() if key.startswith(encoder) and ".lora_B." in key]
        assert second
        assert all(bool(value.any()) for value in second)
    assert all(".lora_" in key for key in trained_weights)
    assert {file: file.read_bytes() for file in before} == before
    recorded = commit.verify(run / "checkpoints" / f"checkpoint_{STEPS:08d}").manifest["base"]["files"]
    assert sum(path.startswith("text_encoder") for path in recorded) == len(ENCODERS[name])

    # A run that was ended after five steps continues to the same bits.
    resumed = train(tmp_path, "halves", *flags, "--max_steps", "5")
    train(tmp_path, "halves", *flags)
    again = weights_of(resumed)
    assert all(torch.equal(again[key], value) for key, value in trained_weights.items())

    assert cli._main(["checkpoints", "export", str(run), str(tmp_path / "out")]) == 0
    assert sorted(path.parent.name for path in (tmp_path / "out").rglob("adapter_model.safetensors")) == sorted(
        ("unet", *ENCODERS[name])
    )
    of_run = np.asarray(Image.open(run / "report" / "pictures" / f"step_{STEPS:08d}.png"), np.float64)
    exported = drawn_by_diffusers(tmp_path, name, adapter_files.DIFFUSERS_FILE)
    # The picture of the run is in whole levels.
    assert np.abs(of_run - exported).max() < 0.6
    assert np.abs(drawn_by_diffusers(tmp_path, name, adapter_files.KOHYA_FILE) - exported).max() < 1e-2
    assert np.abs(drawn_by_diffusers(tmp_path, name, None) - exported).max() > 3
    assert cli._main(["export", str(run), str(tmp_path / "merged"), "--merged", "--precision", "bf16"]) == 0
    half = load_file(tmp_path / "merged" / "text_encoder" / "model.safetensors")
    assert {value.dtype for value in half.values() if value.is_floating_point()} == {torch.bfloat16}
    assert not [key for key in half if "lora" in key]
    assert cli._main(["export", str(run), str(tmp_path / "fused"), "--merged"]) == 0
    assert np.abs(drawn_by_diffusers(tmp_path, name, None, "fused") - exported).max() < 0.6

    loaded = accel_train.load(run)
    mine = np.asarray(loaded("a cat", seed=7), np.float64)
    assert np.array_equal(mine, np.asarray(accel_train.load(tmp_path / "out")("a cat", seed=7)))
    without = np.asarray(loaded("a cat", seed=7, adapter="base"), np.float64)
    assert np.array_equal(without, drawn_by_the_base(tmp_path / "base", loaded.sampler))
    assert np.abs(mine - without).max() > 3


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_a_run_begins_from_an_export_as_from_the_run(tmp_path: Path) -> None:
    """With magnitudes and text encoders."""
    tiny.save("sd1", tmp_path / "base")
    pictures(tmp_path / "photos")
    settings(tmp_path, "sd1")
    flags = (*FLAGS, "--lora.variant", "dora", "--max_steps", "2", "--evaluation.every", "0")
    run = train(tmp_path, "first", *flags)
    out = tmp_path / "out"
    assert cli._main(["export", str(run), str(out)]) == 0
    expected = losses(train(tmp_path, "of_run", *flags, "--init_from", str(run)))
    assert expected != losses(run)
    assert losses(train(tmp_path, "of_export", *flags, "--init_from", str(out))) == expected
    with pytest.raises(UsageError, match=r"^--text_encoders\.rank 3: the adapters of --init_from, .*out, were trained"):
        train(tmp_path, "other", *flags, "--text_encoders.rank", "3", "--init_from", str(out))
    with pytest.raises(UsageError, match=r"^--lora\.targets to_q: .*; give --lora\.targets to_q to_k to_v to_out\.0$"):
        train(tmp_path, "other", *flags, "--lora.targets", "to_q", "--init_from", str(out))
    with pytest.raises(
        UsageError, match=r"^--text_encoders\.targets all-linear: .* give --text_encoders\.targets attention$"
    ):
        train(tmp_path, "other", *flags, "--text_encoders.targets", "all-linear", "--init_from", str(out))
    shutil.copytree(tmp_path / "base", tmp_path / "another")
    file = tmp_path / "another" / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({key: 2 * value for key, value in load_file(file).items()}, file)
    with pytest.raises(UsageError, match=r"out: its frozen weights are those of .*base, and .*another has another"):
        train(tmp_path, "other", *flags, "--base.source", str(tmp_path / "another"), "--init_from", str(out))
    (out / "unet" / "adapter_model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"out: unet/adapter_model\.safetensors changed since the export"):
        train(tmp_path, "other", *flags, "--init_from", str(out))


def after_its_advice(error: UsageError) -> list[list[str]]:
    """The options that a refused start from adapters says to give, and those of the other way that it names."""
    advice = str(error).partition("; give ")[2]
    return [shlex.split(part) for part in advice.split("; or, without those of text_encoders, ")]


@pytest.mark.parametrize("name", ["sd1", "sdxl"])
def test_the_advice_of_a_refused_start_is_followed_at_once(name: str, tmp_path: Path) -> None:
    tiny.save(name, tmp_path / "base")
    pictures(tmp_path / "photos")
    settings(tmp_path, name)
    short = ("--max_steps", "1", "--evaluation.every", "0")
    both = ("--lora.variant", "rslora", "--lora.targets", "all-linear", "--text_encoders.targets", "all-linear")
    run = train(tmp_path, "first", *short, *FLAGS, *both, "--lora.alpha", "7")
    out = tmp_path / "out"
    assert cli._main(["export", str(run), str(out)]) == 0
    # As a preset for a small device.
    plain = ("--lora.rank", "1", "--base.encoder_precision", "bf16", "--precision", "bf16")
    with pytest.raises(UsageError, match=r"^--lora\.rank 1, .* --text_encoders\.targets all-linear") as refused:
        train(tmp_path, "other", *short, *plain, "--init_from", str(out))
    together, alone = after_its_advice(refused.value)
    with_text = train(tmp_path, "with_text", *short, *plain, "--init_from", str(out), *together)
    assert any("text_encoder." in key for key in weights_of(with_text, 1))
    without = train(tmp_path, "without", *short, *plain, *alone)
    assert not any("text_encoder." in key for key in weights_of(without, 1))
    with pytest.raises(UsageError, match=r"give --text_encoders\.rank 0, without other options of text_encoders$"):
        train(tmp_path, "more", *short, *FLAGS, *alone)


def drawn_by_the_base(base: Path, sampler: Mapping[str, Any]) -> Any:
    """What diffusers draws of a cat with the base alone."""
    from diffusers import DiffusionPipeline

    pipeline: Any = DiffusionPipeline.from_pretrained(base)
    pipeline.set_progress_bar_config(disable=True)
    side, generator = sampler["side"], torch.Generator().manual_seed(7)
    found = pipeline("a cat", height=side, width=side, num_inference_steps=sampler["steps"], generator=generator)
    return np.asarray(found.images[0], np.float64)


def changes_of(model: nn.Module) -> dict[str, Tensor]:
    """What adapters add to each weight, by path."""
    found: dict[str, Tensor] = {}
    for path, layer in model.named_modules():
        scaling: Any = getattr(layer, "scaling", None)
        if scaling is not None:
            delta: Any = layer
            found[path] = delta.get_delta_weight(next(iter(scaling)))
    return {path: change for path, change in found.items() if change.any()}


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        # With a factor, or without; and both of them are quick with smaller encoders.
        pytest.param(name, variant, marks=pytest.mark.slow if name == "sdxl" and variant != "dora" else ())
        for name in ENCODERS
        for variant in ("lora", "rslora", "dora")
    ],
)
def test_diffusers_reads_every_layer_of_every_encoder(name: str, variant: str, tmp_path: Path) -> None:
    base: Any = trained(loading.find_base(loading.BaseConfig(source=str(tiny.save(name, tmp_path / "base")))))
    model = built(base, variant=variant)
    tensors = peft_layout.by_key_of_peft(dict(model.state_dict()))
    about = lora.adapter_config(model, "base")
    adapter_files.write_diffusers(tmp_path, tensors, about, "unet")
    files = [adapter_files.DIFFUSERS_FILE]
    if variant != "dora":
        facts = kohya_facts(base.family.pipelines[0], "epsilon", model.config, "base", tiny.SIDE)
        assert facts is not None
        adapter_files.write_kohya(tmp_path, tensors, about, facts)
        files.append(adapter_files.KOHYA_FILE)
    for file in files:
        pipeline = with_frozen_text(base).pipeline(CPU)
        with quiet():
            pipeline.load_lora_weights(tmp_path, weight_name=file)
        if file == adapter_files.DIFFUSERS_FILE:
            assert_same_adapter(pipeline, model, "default_0")
        for part in ("unet", *ENCODERS[name]):
            expected = changes_of(model.get_submodule(part))
            found = changes_of(getattr(pipeline, part))
            assert expected
            assert found.keys() == expected.keys()
            for path, change in expected.items():
                torch.testing.assert_close(found[path], change, rtol=1e-5, atol=1e-5)
    with safe_open(tmp_path / files[-1], "pt") as opened:
        names = set(opened.keys())
    if variant == "dora":
        assert f"{ENCODERS[name][-1]}.text_model.encoder.layers.0.mlp.fc1.lora_magnitude_vector.weight" in names
    else:
        prefixes = ("lora_te1_", "lora_te2_") if name == "sdxl" else ("lora_te_",)
        for prefix in prefixes:
            stem = f"{prefix}text_model_encoder_layers_0_self_attn_q_proj"
            assert {f"{stem}.lora_down.weight", f"{stem}.lora_up.weight", f"{stem}.alpha"} <= names


def assert_same_adapter(pipeline: Any, model: nn.Module, adapter: str) -> None:
    """Assert that a pipeline has each tensor of the trained adapter of a model, with its very values."""
    for part in ("unet", *(name for name in pipeline.components if name.startswith("text_encoder"))):
        expected = peft_layout.by_key_of_peft(dict(model.get_submodule(part).named_parameters()))
        found = peft_layout.by_key_of_peft(dict(getattr(pipeline, part).named_parameters()), adapter)
        assert expected
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_trained_magnitudes_of_text_encoders_are_loaded_and_merged(tmp_path: Path) -> None:
    base: Any = trained(loading.find_base(loading.BaseConfig(source=str(tiny.save("sd1", tmp_path / "base")))))
    model = built(base, variant="dora")
    tensors = {key: value.contiguous() for key, value in peft_layout.by_key_of_peft(dict(model.state_dict())).items()}
    about = lora.adapter_config(model, "base")
    out = tmp_path / "out"
    out.mkdir()
    (out / peft_layout.CONFIG_FILE).write_text(json.dumps(about))
    save_file(tensors, out / f"{peft_layout.WEIGHTS_STEM}.safetensors")
    adapter_files.write_diffusers(out, tensors, about, "unet")
    pipeline = with_frozen_text(base).pipeline(CPU)
    adapter_files.write_components(out, tensors, about)
    adapter_files.load_directory(pipeline, "unet", out, "trained")
    assert_same_adapter(pipeline, model, "trained")
    layer: Any = model.get_submodule("text_encoder.encoder.layers.0.mlp.fc1")
    inputs = torch.randn(2, layer.in_features)
    expected = layer(inputs)
    pipeline.fuse_lora(safe_fusing=True)
    pipeline.unload_lora_weights()
    merged = pipeline.text_encoder.get_submodule("encoder.layers.0.mlp.fc1")
    torch.testing.assert_close(merged(inputs), expected)
    assert (expected - layer.base_layer(inputs)).abs().max() > 0.1


def test_a_file_whose_tensors_are_not_found_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Magnitudes too, of which diffusers warns alone."""
    base: Any = trained(loading.find_base(loading.BaseConfig(source=str(tiny.save("sd1", tmp_path / "base")))))
    model = built(base, variant="dora")
    monkeypatch.setattr(adapter_files, "_key_of_diffusers", lambda _, path: path)
    tensors = peft_layout.by_key_of_peft(dict(model.state_dict()))
    adapter_files.write_diffusers(tmp_path, tensors, lora.adapter_config(model, "base"), "unet")
    pipeline = with_frozen_text(base).pipeline(CPU)
    message = r"diffusers found 120 of its 132 tensors in StableDiffusionPipeline, but not text_encoder\..*magnitude"
    with pytest.raises(UsageError, match=message):
        adapter_files.load_into(pipeline, "unet", tmp_path / adapter_files.DIFFUSERS_FILE, "trained")


@pytest.mark.parametrize(("name", "variant"), [("sd1", "dora"), ("sdxl", "lora")])
def test_peft_reads_the_folder_of_each_component(name: str, variant: str, tmp_path: Path) -> None:
    import peft

    base: Any = trained(loading.find_base(loading.BaseConfig(source=str(tiny.save(name, tmp_path / "base")))))
    model = built(base, variant=variant).eval()
    tensors = {key: value.contiguous() for key, value in peft_layout.by_key_of_peft(dict(model.state_dict())).items()}
    about = lora.adapter_config(model, "base")
    out = tmp_path / "out"
    out.mkdir()
    adapter_files.write_settings(out, about)
    save_file(tensors, out / f"{peft_layout.WEIGHTS_STEM}.safetensors")
    older = adapter_files.read_adapter(out)
    adapter_files.write_components(out, tensors, about)
    found = adapter_files.read_adapter(out)
    assert found.keys() == older.keys() == tensors.keys()
    assert all(torch.equal(found[key], value) for key, value in tensors.items())
    pipeline = with_frozen_text(base).pipeline(CPU)
    for part in ("unet", *ENCODERS[name]):
        loaded = peft.PeftModel.from_pretrained(getattr(pipeline, part), out / part)
        expected = peft_layout.by_key_of_peft(dict(model.get_submodule(part).named_parameters()))
        of_peft = peft_layout.by_key_of_peft(dict(loaded.base_model.model.named_parameters()))
        assert of_peft.keys() == expected.keys()
        assert all(torch.equal(of_peft[key], value) for key, value in expected.items())
        if part != "unet":
            ids = torch.arange(1, 8)[None]
            ours = model.get_submodule(part)(input_ids=ids).last_hidden_state
            assert torch.equal(loaded(input_ids=ids).last_hidden_state, ours)
            with loaded.disable_adapter():
                assert (loaded(input_ids=ids).last_hidden_state - ours).abs().max() > 1e-2
    # A whole on one component would leave the initial values there, with a warning alone.
    assert not list(out.glob(f"{peft_layout.WEIGHTS_STEM}*"))


def test_peft_reads_its_own_files(tmp_path: Path) -> None:
    """adapter_config.json describes the ranks of all components."""
    import peft

    base: Any = trained(loading.find_base(loading.BaseConfig(source=str(tiny.save("sdxl", tmp_path / "base")))))
    model = built(base)
    about = lora.adapter_config(model, "base")
    other = base.denoiser("fp32")
    peft.inject_adapter_in_model(peft.LoraConfig(**about), other)
    tensors = peft_layout.by_key_of_peft(dict(model.state_dict()))
    peft.set_peft_model_state_dict(other, {key.removeprefix(PREFIX): value for key, value in tensors.items()})
    found = changes_of(other)
    expected = changes_of(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[path], change) for path, change in expected.items())


def test_the_base_takes_its_precision(tmp_path: Path) -> None:
    base: Any = trained(loading.find_base(loading.BaseConfig(source=str(tiny.save("sdxl", tmp_path)))))
    model = built(base, base_precision="bf16")
    for part in ("unet", *ENCODERS["sdxl"]):
        kinds = {(p.dtype, p.requires_grad) for p in model.get_submodule(part).parameters()}
        assert kinds == {(torch.bfloat16, False), (torch.float32, True)}


def test_the_learning_rate_has_a_factor(tmp_path: Path) -> None:
    from accel_train.training.optimizers import OptimizerConfig, build_optimizer, set_learning_rate

    base: Any = trained(loading.find_base(loading.BaseConfig(source=str(tiny.save("sdxl", tmp_path)))))
    model = built(base)
    optimizer, _ = build_optimizer(model, OptimizerConfig(lr=0.5), CPU, adapters.groups(base))
    adapters.scale_learning_rate(optimizer, TextEncoderConfig(rank=2, lr_factor=0.25))
    set_learning_rate(optimizer, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            is_text = names[id(parameter)].startswith("text_encoder")
            assert group["lr"] == pytest.approx(0.0125 if is_text else 0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 2.0}, "text_encoders.alpha: text_encoders.rank is 0"),
        ({"lr_factor": 0.5}, "text_encoders.lr_factor: text_encoders.rank is 0"),
        ({"rank": 2, "targets": ()}, "names no layer"),
    ],
)
def test_options_without_effect_are_refused(options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TextEncoderConfig(**options)


@pytest.mark.parametrize(
    ("name", "reason"), [("sd3", "share the prompt with a T5"), ("flux", "one vector"), ("sana", "a language model")]
)
def test_bases_with_other_text_encoders_are_refused(name: str, reason: str, tmp_path: Path) -> None:
    base = loading.find_base(loading.BaseConfig(source=str(tiny.save(name, tmp_path))))
    with pytest.raises(UsageError, match=rf"text_encoders.rank 2: .*{reason}.*Stable Diffusion XL have it"):
        with_trained_text(base, TEXT)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--train_text_encoder", "--text_encoders.rank"),
        ("--text_encoder_lr", "--text_encoders.lr_factor, a multiple of --optimizer.lr"),
    ],
)
def test_names_of_other_scripts_are_refused_with_ours(flag: str, message: str, tmp_path: Path) -> None:
    settings(tmp_path, "sd1")
    with pytest.raises((UsageError, SystemExit), match=message):
        train(tmp_path, "wrong", flag, "1")


def test_a_dropped_caption_has_the_tokens_of_an_empty_one(tmp_path: Path) -> None:
    """The same captions are dropped as where embeddings are cached."""
    options = ObjectiveConfig(caption_dropout=0.5)
    made = Made("sd1", tmp_path, options, TimeConfig())
    base = trained(loading.find_base(loading.BaseConfig(source=str(tmp_path))))
    tokens = encoding.encode_texts(made.pipeline, base, WORDS)
    empty = encoding.encode_texts(made.pipeline, base, [""])
    process = Denoising(base.family, base.levels(), made.pipeline.vae, None, empty, options, TimeConfig())
    dropped = process.noised({**made.batch, **tokens}, 3, 5, 6)["text_encoder"]
    cached = made.process.noised(made.batch, 3, 5, 6)["prompt"]
    where = [not torch.equal(row, whole) for row, whole in zip(cached, made.captions["prompt"], strict=True)]
    assert 0 < sum(where) < len(where)
    for row, is_dropped in enumerate(where):
        expected = empty["text_encoder"][0] if is_dropped else tokens["text_encoder"][row]
        assert torch.equal(dropped[row], expected)


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    source = str(tiny.save("sd1", tmp_path))
    base = loading.find_base(loading.BaseConfig(source=source, encoder_precision="bf16"))
    with pytest.raises(UsageError, match=r"base.encoder_precision bf16: .* lora.base_precision"):
        with_trained_text(base, TEXT)
    base = loading.find_base(loading.BaseConfig(source=source))
    with pytest.raises(UsageError, match=r"text_encoders.rank 2 under zero3: .* FSDP2"):
        with_trained_text(base, TEXT, "zero3")
    for target in ("to_q", "text_projection"):
        text = TextEncoderConfig(rank=2, targets=(target,))
        with pytest.raises(UsageError, match=f"text_encoders.targets: '{target}' is not a linear layer"):
            built(trained(base), text)
    config = tmp_path / "text_encoder" / "config.json"
    config.write_text(config.read_text().replace("CLIPTextModel", "T5EncoderModel"))
    with pytest.raises(UsageError, match="its text_encoder is T5EncoderModel"):
        with_trained_text(base, TEXT)


def test_adapters_to_start_from_have_the_scale_of_their_options(tmp_path: Path) -> None:
    """Refused before a model is built."""
    base = trained(loading.find_base(loading.BaseConfig(source=str(tiny.save("sdxl", tmp_path / "base")))))
    model = built(base)
    values = lora.adapter_config(model, "some/base")
    (tmp_path / peft_layout.CONFIG_FILE).write_text(json.dumps(values))
    tensors = peft_layout.by_key_of_peft({name: value.detach() for name, value in model.named_parameters()})
    save_file(tensors, tmp_path / f"{peft_layout.WEIGHTS_STEM}.safetensors")
    config = LoraConfig(rank=RANK, alpha=ALPHA)
    adapters.build(base, config, TEXT, "fp32", CPU, tmp_path)
    # Without the last block of the first encoder, which has none here either.
    with pytest.raises(UsageError, match=r"^--text_encoders\.targets q_proj: .* --text_encoders\.targets all-linear$"):
        adapters.build(base, config, replace(TEXT, targets=("q_proj",)), "fp32", CPU, tmp_path)
    with pytest.raises(UsageError, match=r"^--text_encoders\.alpha 2: .*; give --text_encoders\.alpha 5$"):
        adapters.build(base, config, replace(TEXT, alpha=2.0), "fp32", CPU, tmp_path)
    with pytest.raises(
        UsageError, match=r"^--text_encoders\.rank 0, .*; give --text_encoders\.rank 2 --text_encoders\.alpha 5"
    ):
        adapters.build(with_frozen_text(base), config, TextEncoderConfig(), "fp32", CPU, tmp_path)

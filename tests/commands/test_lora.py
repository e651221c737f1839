"""``accel-train lora``: the plan for a machine, and the six steps, together and one by one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from accel_train import cli
from accel_train.commands import lora, lora_plan
from accel_train.commands.bundled import find_recipe, import_recipe
from accel_train.config import UsageError
from accel_train.domains.images.memory import memory_need
from accel_train.domains.images.memory.simulated_memory import MODELS, VAES
from accel_train.domains.images.pipelines.loading import BaseConfig, find_base
from accel_train.options.loading import read_tree
from accel_train.speed.memory.fitting import GIB, Size
from accel_train.store import run_file
from tests.domains.images import tiny_pipelines as tiny

pytest.importorskip("diffusers")
pytest.importorskip("peft")
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.usefixtures("fresh")]
TINY = (
    "--global_batch_size 2 --micro_batch_size 1 --max_steps 2 --schedule.warmup_steps 0 --data.resolutions 16 "
    "--data.bucket_step 4 --data.heldout_fraction 0.2 --evaluation.samples 1 --evaluation.steps 1 --evaluation.every 1 "
    "--log.progress_bar off --min_dataset_quality 0"
).split()
PROMPTS = ("--evaluation.prompts", "a red flag")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    tiny.save("sd1", folder / "base")
    photos = folder / "photos"
    photos.mkdir()
    noise = np.random.default_rng(0)
    for number in range(6):
        Image.fromarray(noise.integers(0, 255, (24, 24, 3), dtype=np.uint8)).save(photos / f"{number}.png")
        (photos / f"{number}.txt").write_text(("a red flag", "a cat")[number % 2])
    return folder


def call(folder: Path, run: Path, *flags: str) -> int:
    places = ("--base", str(folder / "base"), "--output_dir", str(run), "--data.cache_dir", str(folder / "cache"))
    return cli._main(["lora", str(folder / "photos"), *places, *TINY, *flags])


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Flux with the sizes of FLUX.1-dev: 12 billion values, which a plan counts and does not load."""
    folder = tiny.save("flux", tmp_path_factory.mktemp("flux"))
    path = folder / "transformer" / "config.json"
    sizes = {"num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24}
    sizes |= {"joint_attention_dim": 4096, "pooled_projection_dim": 768, "in_channels": 64}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes | {"axes_dims_rope": [16, 56, 56]}))
    return folder


def plan(base: Path, run: Path, *flags: str) -> dict[str, Any]:
    words = ["lora", "photos", "--base", str(base), "--output_dir", str(run), "--steps", "plan", *flags]
    assert cli._main(words) == 0
    return read_tree(run / "plan.yaml")


def test_a_plan_takes_the_largest_preset_that_fits(
    flux: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bitsandbytes")
    made = plan(flux, tmp_path / "run", "--memory_gib", "23.6", "--max_steps", "7")
    shown = capsys.readouterr().out
    assert "machine: as --memory_gib says, 23.6 GiB" in shown
    tried = {line.split(":")[0].strip(): line for line in shown.splitlines() if line.startswith("  lora_")}
    assert list(tried) == ["lora_141gb", "lora_80gb", "lora_48gb", "lora_24gb"]
    # 11.9 billion values of two bytes.
    assert "weights 22.3, optimizer 0.3" in tried["lora_48gb"]
    assert "too much" in tried["lora_48gb"]
    assert "weights 11.2" in tried["lora_24gb"]
    assert "chosen: lora_24gb, the largest that fits (activations simulated, the rest by" in shown
    assert made["lora"]["base_precision"] == "int8"
    assert made["data"] == {"resolutions": [1024], "path": "photos"}
    assert made["max_steps"] == 7  # of the command line
    # The 50 steps of the preset would be refused beside it.
    assert made["schedule"] == {"kind": "constant", "warmup_steps": 0}
    assert "  with schedule.warmup_steps 0, because the run has 7 steps" in shown
    with pytest.raises(
        UsageError, match=r"no preset fits:\n  lora_141gb: (.*\n)*  lora_6gb: needs 2.*too much\nTake a smaller"
    ):
        plan(flux, tmp_path / "small", "--memory_gib", "8", "--lora.base_precision", "bf16", "--no_offload_frozen")
    with pytest.raises(UsageError, match=r"4.0 GiB of memory; at least 5.4 GiB are required, for lora_6gb"):
        plan(flux, tmp_path / "small", "--memory_gib", "4")
    assert not (tmp_path / "small").exists()


def test_trained_text_encoders_are_planned_in_their_own_precision(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The presets by memory have bf16 for frozen ones."""
    flags = ("--memory_gib", "24", "--data.resolutions", "64", "--text_encoders.rank", "4")
    planned = plan(made / "base", tmp_path / "run", *flags)
    assert planned["base"]["encoder_precision"] == "fp32"
    capsys.readouterr()
    with pytest.raises(
        UsageError, match=r"no preset fits:\n  lora_141gb: .*leave it out, or give fp32 instead of .*'s\n"
    ):
        plan(made / "base", tmp_path / "refused", *flags, "--base.encoder_precision", "bf16")


@pytest.mark.slow
def test_a_base_that_does_not_fit_is_offloaded(flux: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bitsandbytes")
    made = plan(flux, tmp_path / "run", "--memory_gib", "6")
    shown = capsys.readouterr().out
    tried = [line.split(":")[0].strip() for line in shown.splitlines() if line.startswith("  lora_")]
    presets = [f"lora_{gb}gb" for gb in reversed(lora_plan.presets_by_memory())]
    # A larger picture than without offload.
    offloaded = presets[: presets.index("lora_16gb") + 1]
    assert tried == [*presets, *(f"{name} with offload_frozen" for name in offloaded)]
    # 4 bits of 11.9 billion values, and what stays on the device of 8: two of 57 blocks, and what is no block.
    assert "weights 5.6," in shown
    assert "weights 0.8," in shown
    assert made["offload_frozen"] is True
    assert made["base"]["offload_encoders"] is True
    assert made["lora"]["base_precision"] == "fp8"
    plan(flux, tmp_path / "other", "--memory_gib", "8", "--lora.base_precision", "bf16")
    assert "chosen: lora_16gb with offload_frozen" in capsys.readouterr().out


def test_memory_is_the_sum_of_its_parts(made: Path) -> None:
    base = find_base(BaseConfig(source=str(made / "base"), encoder_precision="bf16", encoder_batch_size=3))
    pipeline = base.components(torch.device("cpu"))
    count = sum(parameter.numel() for parameter in pipeline.text_encoder.parameters())
    assert base.values_of("text_encoder") == count
    vae = 4 * base.values_of("vae") / GIB
    (known,) = MODELS["Stable Diffusion 1.x and 2.x"]
    load = memory_need.Load(Size(0, GIB, 5 * GIB), known.values, 2, 0.5, "full", "bf16", "adamw")
    need = memory_need.estimate(base, load)
    assert need.texts == pytest.approx(2 * count / GIB + vae)
    assert need.pictures == pytest.approx(vae + 3 * 0.5 * VAES["AutoencoderKL"].encode)
    # Weights; gradient and two moments; a fixed part, and two pictures of half a megapixel.
    activations = known.fixed + 2 * (known.full.picture + 0.5 * known.full.megapixel)
    assert need.training == pytest.approx(5 + 12 + activations + vae)
    assert need.drawing == 0
    assert need.most == pytest.approx(need.training + 1)
    assert need.most > memory_need.estimate(base, load._replace(micro_batch_size=1)).most
    average = memory_need.estimate(base, load._replace(has_ema=True))
    assert average.training == pytest.approx(need.training + 4)
    drawn = memory_need.estimate(base, load._replace(drawn_megapixels=4.0))
    assert drawn.drawing == pytest.approx(5 + 12 + vae + 4 * VAES["AutoencoderKL"].decode)
    assert drawn.most == pytest.approx(drawn.drawing + 1)


def test_activations_are_those_of_the_mode_and_the_nearest_model(made: Path) -> None:
    base = find_base(BaseConfig(source=str(made / "base")))
    (known,) = MODELS["Stable Diffusion 1.x and 2.x"]
    load = memory_need.Load(Size(0, 0, 0), known.values, 1, 1.0, "none", "bf16", "adamw")
    vae = 4 * base.values_of("vae") / GIB

    def activations(**changes: Any) -> float:
        return memory_need.estimate(base, load._replace(**changes)).training - vae

    for mode in ("none", "selective", "full"):
        figures = getattr(known, mode)
        assert activations(checkpointing=mode) == pytest.approx(known.fixed + figures.picture + figures.megapixel)
    # Modes between them are counted as none.
    assert activations(checkpointing="attention") == activations()
    assert activations(precision="fp32") == pytest.approx(2 * activations())
    assert activations(values=3 * known.values) == pytest.approx(3 * activations())
    assert activations(values=1) == activations()


def test_a_plan_counts_what_is_drawn_and_the_pictures_of_a_prior(made: Path, tmp_path: Path) -> None:
    recipe = import_recipe(find_recipe("lora"))
    flags = {"base.source": str(made / "base"), "data.path": "photos", "lora.base_precision": "bf16"}

    def lines(**further: Any) -> str:
        named = {name.replace("__", "."): value for name, value in further.items()}
        return "\n".join(lora_plan.make(recipe, flags | named, "balanced", 80.0)[1])

    assert "drawing" not in lines()
    assert "drawing 3." in lines(evaluation__prompts=["a red flag"])
    one, two = (_training(lines(**given)) for given in ({}, {"data__prior__path": "class"}))
    assert two > 1.9 * one


def _training(lines: str) -> float:
    return float(lines.partition("training ")[2].partition(":")[0])


def test_the_quality_of_a_base_is_that_of_its_objective(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(made, tmp_path / "run", "--steps", "plan", "--intent", "quality", "--memory_gib", "24") == 0
    assert "with objective.snr_weighting min_snr, because the base predicts epsilon" in capsys.readouterr().out
    assert read_tree(tmp_path / "run" / "plan.yaml")["objective"]["snr_weighting"] == "min_snr"
    # What a later command is compared with.
    assert "\n# Made with --intent quality --memory_gib 24\n" in (tmp_path / "run" / "plan.yaml").read_text()
    recipe = import_recipe(find_recipe("lora"))
    flow = tiny.save("sd3", tmp_path / "flow")
    flags = {"base.source": str(flow), "data.path": "photos"}
    tree, _ = lora_plan.make(recipe, flags, "quality", 24.0)
    assert tree["times"]["density"] == "logit_normal"
    tree, _ = lora_plan.make(recipe, flags | {"times.density": "mode"}, "quality", 24.0)
    assert tree["times"]["density"] == "mode"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--steps", "train"), r"plan.yaml: there is no plan yet; run the step plan first"),
        (("--steps", "bake"), r"steps: 'bake' is refused"),
        (
            ("--data.path", "elsewhere"),
            r"--data.path elsewhere: in this command it is the word after `accel-train lora`",
        ),
        (("--network_dim", "3"), r"use --lora.rank"),
    ],
)
def test_wrong_usage(flags: tuple[str, ...], says: str, made: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        call(made, tmp_path / "run", *flags)
    assert not (tmp_path / "run").exists()


def test_a_poor_dataset_is_not_trained_on(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grey = tmp_path / "photos"
    grey.mkdir()
    for number in range(4):
        Image.new("RGB", (20, 20), "grey").save(grey / f"{number}.png")
    flags = ("--base", str(made / "base"), "--output_dir", str(tmp_path / "run"))
    assert cli._main(["lora", str(grey), *flags]) == 1
    shown = capsys.readouterr().out
    assert "[1/6] check" in shown
    assert "check ended with exit code 1; the steps after it were not run" in shown
    assert not (tmp_path / "run").exists()


def in_this_process(request: Any) -> int:
    recipe: Any = import_recipe(find_recipe(request.recipe))
    return recipe.main(list(request.arguments))


def test_the_steps_one_after_the_other(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the recipe called here; as processes in the slow test below."""
    monkeypatch.setattr("accel_train.commands.launch.launch", in_this_process)
    monkeypatch.setattr(lora_plan, "find_machine", lambda given: lora_plan.Machine("a card", 24.0))
    run = tmp_path / "run"
    assert call(made, run, *PROMPTS) == 0
    shown = capsys.readouterr().out
    for number, name in enumerate(lora.STEPS, 1):
        assert f"[{number}/6] {name}" in shown
    # A small base fits with the preset of the largest device.
    assert "chosen: lora_141gb, the largest that fits" in shown
    assert "at step 1, " in shown
    assert "pictures.png: the prompts, a row for each of up to 10 evaluations" in shown
    exported = run / "exported-00000002" / "pytorch_lora_weights.safetensors"
    first = load_file(exported)
    assert first
    # Again: nothing is done twice. More steps: the run continues by the plan that it began with.
    before = (run / "plan.yaml").read_text()
    assert call(made, run, *PROMPTS, "--steps", "plan", "train", "export") == 0
    shown = capsys.readouterr().out
    assert "kept, because training has begun" in shown
    assert "exported-00000002: there already" in shown
    assert (run / "plan.yaml").read_text() == before
    assert call(made, run, *PROMPTS, "--max_steps", "3", "--steps", "plan", "train", "export") == 0
    assert (run / "exported-00000003").is_dir()
    shutil.rmtree(run / "report")
    longer = (*PROMPTS, "--max_steps", "3")
    assert call(made, run, *longer, "--steps", "validate") == 0
    assert (run / "report" / "evaluation.json").is_file()
    # Begun again once: the export of the deleted run is not that of the new one, which the next start continues.
    with pytest.raises(UsageError, match=r"exported-00000003: is the export of another run"):
        call(made, run, *longer, "--overwrite", "--steps", "plan", "train", "export")
    begun = run_file.load(run)["run_id"]
    assert call(made, run, *longer, "--steps", "plan", "train") == 0
    assert run_file.load(run)["run_id"] == begun


@pytest.mark.slow  # the test above takes the same steps in one process
def test_the_steps_as_processes(made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert call(made, run, *PROMPTS, "--memory_gib", "24") == 0
    assert "[6/6] export" in capfd.readouterr().out
    assert (run / "exported-00000002" / "kohya_lora.safetensors").is_file()


def test_learning_by_heart_is_said(tmp_path: Path) -> None:
    lines = [
        f'{{"event": "evaluation", "step": {step}, "loss": {loss}}}\n' for step, loss in ((1, 0.5), (2, 0.4), (3, 0.6))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    found = lora._findings(tmp_path / "metrics.jsonl")
    assert found[0] == "held-out loss: 0.5000 at step 1, 0.4000 at step 2, 0.6000 at step 3"
    assert "50% above its lowest value, at step 2" in found[1]
    spoiled = '{"event": "evaluation", "step": %d, "loss": "NaN"}\n'
    (tmp_path / "metrics.jsonl").write_text(spoiled % 0 + "".join(lines))
    assert "50% above its lowest value, at step 2" in lora._findings(tmp_path / "metrics.jsonl")[1]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + spoiled % 4)
    assert "WARNING: nan at step 4" in lora._findings(tmp_path / "metrics.jsonl")[1]
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:2]))
    assert len(lora._findings(tmp_path / "metrics.jsonl")) == 1

"""Tiny trained models with random weights, as checkpoints that a run of each recipe would write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from accel_train.domains.diffusion.latents import LatentDiffusionConfig
from accel_train.domains.diffusion.masked_text import TextDiffusionConfig
from accel_train.domains.diffusion.sampling import LatentSamplingConfig, TextSamplingConfig
from accel_train.domains.language import pipeline as language_pipeline
from accel_train.domains.language import pretrained
from accel_train.domains.language.generation import ends
from accel_train.domains.language.pretrained import ModelConfig as LanguageModelConfig
from accel_train.domains.language.samples import EvaluationConfig as LanguageEvaluation
from accel_train.domains.language.sources import find_base
from accel_train.domains.models.lora import LoraConfig
from accel_train.domains.models.mmdit import ModelConfig, MultimodalMMDiT
from accel_train.domains.models.vae import VaeReference
from accel_train.domains.pde import pipeline as pde_pipeline
from accel_train.domains.pde.data.assets import FieldAssets, FieldTask
from accel_train.domains.pde.fields import Scale
from accel_train.domains.pde.operator_learning import model_shape
from accel_train.domains.pde.options import ObjectiveConfig
from accel_train.domains.pde.shape import PdeModelConfig
from accel_train.domains.pde.transformer import PdeTransformer
from accel_train.domains.text import pipeline as text_pipeline
from accel_train.domains.text import tfidf
from accel_train.domains.text.both_ways import EvaluationConfig
from accel_train.domains.text.dataset import DataAssets
from accel_train.domains.text.lengths import LengthEstimate
from accel_train.domains.text.modes import ModeConfig
from accel_train.domains.text.tokenizer import train_tokenizer
from accel_train.store import atomic_files, commit
from tests.domains.language import tiny

TEXTS = ["the sun on the sea", "a bird in a tree", "wind and rain and snow", "stone hill river", "fire light road"] * 3


def commit_checkpoint(
    run: Path,
    model: nn.Module,
    description: dict[str, Any],
    save: Callable[[Path], None],
    base: dict[str, Any] | None = None,
    experiment: dict[str, Any] | None = None,
) -> Path:
    """Commit weights, config.json and assets as step 3 of ``run``. Returns the checkpoint's directory.

    What ``save`` writes over them stays, and a description of nothing is none. ``base`` is that of frozen weights.
    """
    temporary = run / "checkpoints" / commit.temporary_name(3, atomic_files.new_nonce())
    temporary.mkdir(parents=True)
    save_file(dict(model.state_dict()), temporary / "model.safetensors")
    if description:
        (temporary / "config.json").write_text(json.dumps(description))
    save(temporary / "assets")
    files = {
        path.relative_to(temporary).as_posix(): commit.seal_file(path)
        for path in sorted(temporary.rglob("*"))
        if path.is_file()
    }
    final = run / "checkpoints" / commit.checkpoint_name(3)
    facts = {"run_id": "abc", "state": False, "metrics": {}, "experiment": experiment or {"seed": 7}, "files": files}
    if base is not None:
        facts["base"] = base
    commit.commit(temporary, final, {"step": 3} | facts)
    return final


def randomise(model: nn.Module) -> None:
    """Move every weight away from its start, where whole blocks are the identity."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def text_run(run: Path) -> Path:
    """Write a run of recipes/mmdit.py with texts of at most 24 tokens and latents of 8 dimensions."""
    tokenizer = train_tokenizer(TEXTS, 300)
    encoder = tfidf.fit(TEXTS, 8, True)
    latents = torch.from_numpy(encoder.encode(TEXTS))
    weights = torch.zeros(9, dtype=torch.float64)
    weights[0] = 0.5
    estimate = LengthEstimate(weights, 2.0, 1.0, 3, 20)
    assets = DataAssets(tokenizer, encoder, 24, latents.mean(0), float(latents.std()), estimate, 1)
    shape = ModelConfig(width=8, depth=2, heads=2).multimodal(tokenizer.vocab_size, 24, (1, 8))
    model = MultimodalMMDiT(shape)
    randomise(model)
    sampling = EvaluationConfig(
        text=TextSamplingConfig(steps=4, guidance=1.5), latent=LatentSamplingConfig(steps=3, guidance=2.0)
    )
    latent = LatentDiffusionConfig(kind="ddpm", schedule="cosine", prediction="v")
    objective = ModeConfig(), TextDiffusionConfig("uniform"), latent
    description = text_pipeline.describe_model(shape, *objective, sampling, 7, assets, "org/texts")
    commit_checkpoint(run, model, description, assets.save)
    return run


CAPTIONS = ["red apple, food fruit", "dog face, animal mammal", "fire engine, transport ground"] * 5


def picture_run(
    run: Path,
    latent: LatentDiffusionConfig | None = None,
    side: int = 8,
    times: dict[str, Any] | None = None,
    vae: VaeReference | None = None,
    modes: ModeConfig = ModeConfig(),  # noqa: B008
) -> Path:
    """Write a run of recipes/mmdit.py on pictures of ``side`` pixels in patches of 4. ``times`` are options of it.

    With ``vae``, of 12 channels and a reduction of 2, in patches of 2 latents.
    """
    tokenizer = train_tokenizer(CAPTIONS, 300)
    grid = (side // 4, side // 4)
    tokens = grid[0] * grid[1]
    torch.manual_seed(2)
    mean = 0.3 * torch.randn(48)
    estimate = LengthEstimate(torch.zeros(49, dtype=torch.float64), 1.8, 1.0, 3, 12)
    assets = DataAssets(tokenizer, None, 12, mean, 0.6, estimate, tokens, vae)
    shape = ModelConfig(width=16, depth=2, heads=2).multimodal(tokenizer.vocab_size, 12, (tokens, 48), grid)
    model = MultimodalMMDiT(shape)
    randomise(model)
    sampling = EvaluationConfig(latent=LatentSamplingConfig(steps=3, guidance=2.0, shift=3.0))
    latent = latent or LatentDiffusionConfig(prediction="x0")
    objective = modes, TextDiffusionConfig("uniform"), latent
    description = text_pipeline.describe_model(shape, *objective, sampling, 7, assets, "emoji")
    experiment = {f"times.{name}": value for name, value in (times or {"shift": 3.0}).items()}
    commit_checkpoint(run, model, description, assets.save, experiment=experiment)
    return run


ADVECTION = FieldTask(
    name="advection",
    input_channels=1,
    target_channels=1,
    grid=(1, 16),
    parameters=("speed",),
    boundary="periodic",
    conserved=True,
    has_time=True,
    dt=0.1,
    input=Scale((0.1,), (2.0,)),
    target=Scale((0.1,), (2.0,)),
    parameter=Scale((0.5,), (0.2,)),
)
DARCY = FieldTask(
    name="darcy",
    input_channels=1,
    target_channels=1,
    grid=(8, 8),
    parameters=(),
    boundary="dirichlet",
    conserved=False,
    has_time=False,
    dt=0.0,
    input=Scale((0.1,), (2.0,)),
    target=Scale((0.3,), (0.5,)),
    parameter=Scale((), ()),
)
PLAIN = PdeModelConfig(width=8, depth=1, heads=2, decoder_width=8, octaves=2, stem_width=2)
REFINED = PdeModelConfig(
    operator="pdet_unet",
    width=8,
    latent_width=4,
    depths=(1, 1, 1),
    heads=2,
    attention="channel_separated",
    group_width=4,
    decoder_width=8,
    octaves=2,
    stem_width=2,
    residual_depth=1,
)


def field_run(run: Path, model_config: PdeModelConfig = PLAIN) -> Path:
    """Write a run of recipes/pde.py with two tasks, and a residual network if ``model_config`` has one."""
    assets = FieldAssets((ADVECTION, DARCY))
    shape = model_shape(model_config, assets.tasks)
    model = PdeTransformer(shape)
    randomise(model)
    objective = ObjectiveConfig()
    if model_config.residual_depth:
        objective = ObjectiveConfig(residual_from=10, residual_steps=2)
    commit_checkpoint(run, model, pde_pipeline.describe_model(shape, objective, assets, "demo"), assets.save)
    return run


def language_run(run: Path, options: LanguageModelConfig = tiny.LLAMA, *, ema: bool = False) -> Path:
    """Write a run of recipes/causal_lm.py, with a chat template and, if asked, averaged weights."""
    model = tiny.model(options)

    def save(assets: Path) -> None:
        directory = assets.parent
        tokenizer = tiny.tokenizer(tiny.CHATML)
        language_pipeline.write_files(
            model, tokenizer, options, LanguageEvaluation(temperature=1.0), ["org/texts:plain"], "fp32", directory
        )
        # Tied embeddings are saved once, as the saver does.
        parameters = dict(model.named_parameters())
        save_file(parameters, directory / "model.safetensors", {"format": "pt"})
        if ema:
            save_file({name: 0.5 * value for name, value in parameters.items()}, directory / "ema.safetensors")

    commit_checkpoint(run, torch.nn.Identity(), {}, save)
    return run


def adapter_run(
    run: Path,
    base: Path,
    *,
    seed: int = 1,
    embedded: bool = False,
    ema: bool = False,
    answer_end: int | None = None,
    **options: Any,
) -> Path:
    """Write a run of recipes/causal_lm.py with trained adapters on the model in ``base``. ``options`` are of lora."""
    adapters = LoraConfig(rank=4, **options)
    source = LanguageModelConfig(source=str(base))
    config = pretrained.resolve_config(source, tiny.tokenizer(), 64)
    torch.manual_seed(seed)
    model = pretrained.build(source, config, load_source=True, adapters=adapters).eval()
    ends.end_answers(model, answer_end, tiny.tokenizer())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    saved = dict(model.named_parameters()) if embedded else trained

    def save(assets: Path) -> None:
        directory = assets.parent
        about = (source, LanguageEvaluation(temperature=1.0), ["org/texts:plain"])
        language_pipeline.write_files(model, tiny.tokenizer(tiny.CHATML), *about, adapters.base_precision, directory)
        save_file(saved, directory / "model.safetensors", {"format": "pt"})
        if ema:
            save_file({name: 0.5 * value for name, value in trained.items()}, directory / "ema.safetensors")

    reference = None if embedded else find_base(str(source.source), None).reference()
    commit_checkpoint(run, torch.nn.Identity(), {}, save, reference)
    return run

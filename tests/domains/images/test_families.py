"""Families of pipelines against the pipelines themselves: what the denoiser is given, and the units of latents."""

from __future__ import annotations

import gc
import json
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from accel_train.config import UsageError
from accel_train.domains.diffusion.noise_levels import snr_weight
from accel_train.domains.images.memory.memory_need import encoder_bytes
from accel_train.domains.images.pipelines import encoding
from accel_train.domains.images.pipelines.drawing import draw_picture, prompt_arguments, refuse_size
from accel_train.domains.images.pipelines.encoding import identity_of_texts
from accel_train.domains.images.pipelines.family import Predicting, text_encoders
from accel_train.domains.images.pipelines.loading import Base, BaseConfig, DiffusersBase, find_base
from accel_train.domains.images.trained_text.adapters import refuse_unknown_targets
from accel_train.domains.models.lora import LoraConfig
from tests.domains.images import tiny_pipelines as tiny

pytest.importorskip("diffusers")
NAMES = list(tiny.PIPELINES)
PREDICTIONS = {"sd1": "epsilon", "sd2": "v_prediction", "sdxl": "epsilon"}
CAPTIONS = ["a red flag", "two cats sit"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Base]:
    return {name: find_base(BaseConfig(source=str(tiny.save(name, tmp_path_factory.mktemp(name))))) for name in NAMES}


def conditioning(base: Base, pipeline: Any, captions: list[str]) -> dict[str, Tensor]:
    length = tiny.LENGTH if base.family.prompt_tokens else None
    with torch.no_grad():
        return base.family.encode(pipeline, captions, length)


def sizes(side: int) -> Tensor:
    return torch.tensor([[side, side, 0, 0, side, side]])


@pytest.mark.parametrize("name", NAMES)
def test_the_denoiser_is_called_as_the_pipeline_calls_it(name: str, bases: dict[str, Base]) -> None:
    """Each step of a run of the pipeline: what it steps with is what we predict from what it steps from."""
    base = bases[name]
    side = tiny.SIDES.get(name, tiny.SIDE)
    pipeline = base.components(torch.device("cpu"))
    if name == "sdxl":
        # As Playground's: a mean and a deviation for each channel, which diffusers' XL pipelines undo.
        pipeline.vae.register_to_config(latents_mean=[-1.6, 1.1, 0.3, -0.7], latents_std=[8.4, 5.9, 3.0, 5.2])
    model: Any = base.denoiser("fp32").eval()
    setattr(pipeline, base.family.denoiser, model)
    # Padded by the longer caption, where prompts have a mask.
    both = conditioning(base, pipeline, ["a red flag", "a red flag that is longer"])
    prompt = {key: value[:1] for key, value in both.items()}
    empty = conditioning(base, pipeline, [""])
    steps: list[tuple[Tensor, Tensor, Tensor]] = []
    decoded: list[Tensor] = []
    step, decode = pipeline.scheduler.step, pipeline.vae.decode

    def spy(prediction: Tensor, t: Tensor, sample: Tensor, *rest: Any, **named: Any) -> Any:
        found = step(prediction, t, sample, *rest, **named)
        steps.append((prediction, t, sample))
        steps.append((prediction, t, found[0]))
        return found

    pipeline.scheduler.step = spy
    pipeline.vae.decode = lambda z, *rest, **named: decoded.append(z) or decode(z, *rest, **named)
    weaker: dict[str, Any] = {base.family.guidance_argument: 0.0 if name == "z_image" else 1.0}
    if name == "flux":
        weaker = {"guidance_scale": 2.5}
    arguments = dict(base.family.call or {}) | base.family.sample(prompt, empty) | weaker
    pipeline(
        height=side,
        width=side,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        **arguments,
    )
    assert len(steps) == 6
    for expected, t, sample in steps[::2]:
        like = torch.zeros(1, *latent_shape(pipeline, base, side))
        given = Predicting(
            noisy=as_picture(name, sample, like),
            timestep=t.expand(1).float(),
            conditioning=prompt,
            sizes=sizes(side),
            config=model.config,
            guidance=2.5,
        )
        with torch.no_grad():
            found = base.family.predict(model, given)
        torch.testing.assert_close(found, as_picture(name, expected, like), rtol=1e-4, atol=1e-5)
    last = as_picture(name, steps[-1][2], like)
    (z,) = decoded
    encoded = z[:, :, 0] if z.dim() == 5 else z
    torch.testing.assert_close(base.family.normalise(pipeline.vae, encoded), last, rtol=1e-4, atol=1e-5)


def latent_shape(pipeline: Any, base: Base, side: int) -> tuple[int, int, int]:
    with torch.no_grad():
        channels, small = 4, side // 2
        z = torch.zeros(1, channels, small, small)
        return tuple(base.family.normalise(pipeline.vae, z).shape[1:])


def as_picture(name: str, latents: Tensor, like: Tensor) -> Tensor:
    """The pipeline's own unpacking."""
    from diffusers import FluxPipeline

    if name in ("flux", "qwen_image"):
        side = 2 * like.shape[-1]
        return FluxPipeline._unpack_latents(latents, side, side, 2)
    if name == "flux2":
        return latents.transpose(1, 2).reshape(like.shape)
    return latents


@pytest.mark.parametrize("name", NAMES)
def test_text_encoders_in_bf16_condition_a_denoiser_in_fp32(name: str, bases: dict[str, Base]) -> None:
    """Their outputs are cast, in training and in drawing, whose noise stays that of fp32."""
    length = tiny.LENGTH if bases[name].family.prompt_tokens else None
    base = find_base(replace(bases[name].config, encoder_precision="bf16", prompt_tokens=length))
    assert isinstance(base, DiffusersBase)
    side = tiny.SIDES.get(name, tiny.SIDE)
    pipeline = base.pipeline(torch.device("cpu"))
    prompts = prompt_arguments(pipeline, base, "a red flag", None, None)
    drawn = draw_picture(pipeline, base.family, prompts, 3, (side, side), 2, None)
    encoders = text_encoders(pipeline)
    assert sorted(encoders) == sorted(base.text_encoders())
    assert all(weight.dtype == torch.bfloat16 for part in encoders.values() for weight in part.parameters())
    encoded = encoding.encode_texts(pipeline, base, ["a red flag"])
    assert encoded["prompt"].dtype == torch.bfloat16

    # As an evaluation draws: text encoders are gone, and the denoiser is that of the training.
    encoding.drop_text_encoders(pipeline)
    model: Any = base.denoiser("fp32").eval()
    setattr(pipeline, base.family.denoiser, model)
    assert torch.equal(draw_picture(pipeline, base.family, prompts, 3, (side, side), 2, None), drawn)

    def predicted(conditioning: dict[str, Tensor]) -> Tensor:
        noisy = torch.randn(1, *latent_shape(pipeline, base, side), generator=torch.Generator().manual_seed(0))
        given = Predicting(noisy, torch.tensor([500.0]), conditioning, sizes(side), model.config, 2.5)
        with torch.no_grad():
            return base.family.predict(model, given)

    in_fp32 = {key: value.float() if value.is_floating_point() else value for key, value in encoded.items()}
    assert torch.equal(predicted(encoded), predicted(in_fp32))


@pytest.mark.parametrize("name", NAMES)
def test_the_objective_is_that_of_the_scheduler(name: str, bases: dict[str, Base]) -> None:
    levels = bases[name].levels()
    assert levels.prediction == PREDICTIONS.get(name, "flow")
    assert len(levels) == 1000
    assert float(levels.timesteps[-1]) == (1000.0 if levels.prediction == "flow" else 999.0)
    assert bool(torch.isfinite(snr_weight(levels.snr(torch.arange(999)), "epsilon", "min_snr", 5.0)).all())


def test_a_solver_of_flow_is_trained_as_flow(bases: dict[str, Base]) -> None:
    """Sana's own scheduler; diffusers' script makes a FlowMatchEulerDiscreteScheduler of its config."""
    from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler

    from accel_train.domains.diffusion.noise_levels import levels_of

    solver = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    expected = FlowMatchEulerDiscreteScheduler.from_config(solver.config)
    assert torch.equal(levels_of(solver, "x").b, expected.sigmas[:1000].flip(0))


def test_a_scheduler_that_does_not_say_is_refused() -> None:
    from diffusers import EDMEulerScheduler

    from accel_train.domains.diffusion.noise_levels import levels_of

    with pytest.raises(UsageError, match=r"EDMEulerScheduler has prediction_type 'epsilon' and no alphas_cumprod"):
        levels_of(EDMEulerScheduler(), "x")


def write_index(folder: Path, text: str) -> BaseConfig:
    (folder / "model_index.json").write_text(text)
    return BaseConfig(source=str(folder))


def test_a_family_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    config = write_index(tmp_path, '{"_class_name": "AudioLDMPipeline", "vae": ["diffusers", "AutoencoderKL"]}')
    expected = r"is a AudioLDMPipeline: .* no scheduler and no unet or transformer. Known: .*Flux \(FluxPipeline\)"
    with pytest.raises(UsageError, match=expected):
        find_base(config)


def test_code_of_a_pipeline_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "my_code.py").write_text("raise SystemExit('it ran')")
    config = write_index(tmp_path, '{"_class_name": "FluxPipeline", "vae": ["my_code", "VAE"]}')
    with pytest.raises(UsageError, match=r"its vae is my_code.VAE, code outside diffusers and transformers"):
        find_base(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BaseConfig(), r"base.source: adapters need a pretrained diffusers pipeline"),
        (BaseConfig(source="nobody/nothing"), r"base.source 'nobody/nothing' cannot be loaded"),
    ],
)
def test_a_base_that_is_not_there(config: BaseConfig, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_base(config)


def test_a_folder_of_a_component_is_refused_with_that_of_its_pipeline(bases: dict[str, Base], tmp_path: Path) -> None:
    folder = str(bases["sd1"].config.source)
    message = rf"unet': the folder has no model_index.json, .*; give --base.source {re.escape(folder)}$"
    with pytest.raises(UsageError, match=message):
        find_base(BaseConfig(source=f"{folder}/unet"))
    with pytest.raises(UsageError, match=r"no model_index.json, so it is not a diffusers pipeline; give a folder that"):
        find_base(BaseConfig(source=str(tmp_path)))


def test_a_mistyped_folder_is_named_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bases" / "sdxl").mkdir(parents=True)
    says = rf"base.source 'bases/sdlx': there is no folder {tmp_path}/bases/sdlx \(did you mean 'bases/sdxl'\?\). As"
    with pytest.raises(UsageError, match=says):
        find_base(BaseConfig(source="bases/sdlx"))
    with pytest.raises(UsageError, match=r"base.source 'other/sdxl' cannot be loaded"):
        find_base(BaseConfig(source="other/sdxl"))


@pytest.mark.parametrize("mark", ["", "assets/assets.json"])
def test_adapters_given_as_a_base_are_refused_as_such(mark: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "me/base"}))
    if mark:
        # As in an export of a run.
        (tmp_path / mark).parent.mkdir()
        (tmp_path / mark).write_text("{}")
    says = rf"{tmp_path} holds adapters .*give --base.source me/base --init_from {tmp_path}; or .*RUN FOLDER --merged"
    with pytest.raises(UsageError, match=says):
        find_base(BaseConfig(source=str(tmp_path)))


def test_options_without_effect_are_refused(bases: dict[str, Base]) -> None:
    source = bases["sd1"].config.source
    with pytest.raises(UsageError, match="fixed length"):
        find_base(BaseConfig(source=source, prompt_tokens=8))
    with pytest.raises(UsageError, match="has no revisions"):
        find_base(BaseConfig(source=source, revision="main"))


@pytest.mark.parametrize("name", NAMES)
def test_offloaded_text_encoders_give_the_same_embeddings(name: str, bases: dict[str, Base]) -> None:
    base = bases[name]
    assert isinstance(base, DiffusersBase)
    offloading = replace(base, config=replace(base.config, offload_encoders=True))
    plain = base.components(torch.device("cpu"))
    pipeline = offloading.components(torch.device("cpu"))
    for _ in range(2):
        expected = conditioning(base, plain, CAPTIONS)
        found = conditioning(offloading, pipeline, CAPTIONS)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    # Cached embeddings are those of either.
    assert identity_of_texts(pipeline, offloading) == identity_of_texts(plain, base)
    # That two blocks are held is in tests/speed/test_frozen_offload.py.
    assert encoder_bytes(offloading) <= encoder_bytes(base)


def test_memory_of_offloaded_text_encoders_is_that_of_two_blocks(bases: dict[str, Base], tmp_path: Path) -> None:
    from transformers import T5Config, T5EncoderModel

    base = bases["flux"]
    assert isinstance(base, DiffusersBase)
    folder = tmp_path / "deep"
    shutil.copytree(base.directory, folder)
    T5EncoderModel(T5Config(vocab_size=300, d_model=64, d_kv=16, d_ff=128, num_layers=12, num_heads=4)).save_pretrained(
        folder / "text_encoder_2"
    )
    config = BaseConfig(source=str(folder), encoder_precision="bf16")
    plain = find_base(config)
    offloading = find_base(replace(config, offload_encoders=True))
    assert isinstance(plain, DiffusersBase)
    assert isinstance(offloading, DiffusersBase)
    each = 2 * (4 * 64 * 64 + 2 * 64 * 128 + 2 * 64)
    saved = encoder_bytes(plain) - encoder_bytes(offloading)
    # The first block has the table of positions too.
    assert saved == pytest.approx(10 * each, rel=0.05)
    encoder = offloading.components(torch.device("cpu")).text_encoder_2
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in encoder.parameters()}
    whole = sum(p.nbytes for p in plain.components(torch.device("cpu")).text_encoder_2.parameters())
    assert whole - sum(held.values()) == pytest.approx(saved, rel=0.05)


def test_memory_falls_by_the_size_of_the_text_encoder_when_it_is_dropped(tmp_path: Path) -> None:
    """By the pages of the process: its captions are encoded, and nothing holds on to the encoder."""
    from transformers import CLIPTextConfig, CLIPTextModel

    pipeline = tiny.make("sd1")
    # Wide enough that its tensors are pages of their own, which go back to the system when they are freed. In bf16 on
    # the disk, since weights of the precision in use would be pages of the file, read where they are touched.
    sizes: Any = {"hidden_size": 1024, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    small = pipeline.text_encoder.config
    wide = CLIPTextConfig(vocab_size=50_000, max_position_embeddings=small.max_position_embeddings, **sizes)
    pipeline.register_modules(text_encoder=CLIPTextModel(wide).bfloat16())
    pipeline.save_pretrained(tmp_path / "base")
    del pipeline
    gc.collect()
    base = find_base(BaseConfig(source=str(tmp_path / "base"), encoder_precision="fp32"))
    loaded = base.components(torch.device("cpu"))
    embeddings = encoding.encode_texts(loaded, base, ["a red flag", "a cat"])
    before = psutil.Process().memory_info().rss
    freed = encoding.drop_text_encoders(loaded)
    after = psutil.Process().memory_info().rss
    assert freed > 200 << 20
    # More, where what earlier tests of this process held goes with it.
    assert before - after >= 0.9 * freed
    assert loaded.text_encoder is None
    assert embeddings


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.mark.parametrize("name", NAMES)
def test_long_captions_are_named_and_not_printed(
    name: str, bases: dict[str, Base], caplog: pytest.LogCaptureFixture
) -> None:
    found = bases[name]
    length = tiny.LENGTH if found.family.prompt_tokens else None
    base = find_base(replace(found.config, prompt_tokens=length))
    pipeline = base.components(torch.device("cpu"))
    captions = {"short.png": "a red flag", "book.png": "zebra " * 500}
    heard = Heard()
    # Without propagation: diffusers has a handler of its own.
    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    for logger in loggers:
        logger.addHandler(heard)
    try:
        encoding.encode_texts(pipeline, base, list(captions.values()))
        silent = list(heard.texts)
        base.family.encode(pipeline, list(captions.values()), length)
    finally:
        for logger in loggers:
            logger.removeHandler(heard)
    assert not [text for text in silent if "zebra" in text or "indexing errors" in text]
    if "CLIPTokenizer" in str(pipeline.config):
        # As diffusers says it otherwise, and afterwards.
        assert [text for text in heard.texts if "zebra" in text]
    notices = encoding.describe_cut(pipeline, base, captions.items())
    assert notices
    assert all("1 captions are longer than" in notice and notice.endswith(": book.png") for notice in notices)
    assert not [line for line in caplog.messages if "more than half" in line]
    encoding.describe_cut(pipeline, base, [("book.png", captions["book.png"])])
    assert any("more than half of the captions are cut to" in line for line in caplog.messages)


def test_a_pipeline_with_positions_has_a_largest_picture(bases: dict[str, Base]) -> None:
    """SD3 has them for 8 x 8 patches here, of 2 latents of 2 pixels a side. Others draw any."""
    largest = {name: base.largest for name, base in bases.items()}
    assert largest.pop("sd3") == (32, 32)
    assert set(largest.values()) == {None}
    pipeline = bases["sd3"].components(torch.device("cpu"))
    refuse_size((16, 32), pipeline, bases["sd3"])
    for size, given in (((36, 32), "height 36"), ((16, 36), "width 36"), ((36, 36), "side 36")):
        with pytest.raises(UsageError, match=rf"{given}: .* at most 32x32; give 32 or less, a multiple of 4"):
            refuse_size(size, pipeline, bases["sd3"])


@pytest.mark.parametrize("name", NAMES)
def test_targets_that_the_denoiser_lacks_are_refused_without_its_weights(name: str, bases: dict[str, Base]) -> None:
    with pytest.raises(UsageError, match=r"lora\.targets: 'to_zz' is not a linear layer of "):
        refuse_unknown_targets(bases[name], LoraConfig(rank=2, targets=("to_zz",)))
    for targets in (None, ("attention",), ("all-linear",)):
        refuse_unknown_targets(bases[name], LoraConfig(rank=2, targets=targets))

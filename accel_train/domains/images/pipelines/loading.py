"""Bases by path or Hub id. Pipelines of diffusers: their family, components and files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import nn

from accel_train import simulated
from accel_train.config import PositiveFloat, PositiveInt, UsageError, expand_path
from accel_train.domains.diffusion.noise_levels import NoiseLevels, levels_of
from accel_train.domains.images.pipelines import components, flow_transformers, unets
from accel_train.domains.images.pipelines.components import quiet
from accel_train.domains.images.pipelines.family import INDEX, UNREAD, UNUSED, Family, defining_files, text_encoders
from accel_train.domains.models.input_dtypes import cast_inputs
from accel_train.precision import Precision, dtype_of
from accel_train.speed.memory.frozen_offload import offload_frozen_blocks
from accel_train.store import strict_json
from accel_train.store.pretrained_base import PretrainedBase, refuse_missing_folder
from accel_train.store.weights import find_tensors

if TYPE_CHECKING:
    from accel_train.domains.images.trained_mmdit.run_base import MMDiTBase

MAX_INDEX_BYTES = 1 << 20
WEIGHTS = "diffusion_pytorch_model"
FAMILIES = (
    unets.STABLE_DIFFUSION,
    unets.STABLE_DIFFUSION_XL,
    flow_transformers.SD3,
    flow_transformers.FLUX,
    flow_transformers.FLUX2,
    flow_transformers.FLUX2_KLEIN,
    flow_transformers.SANA,
    flow_transformers.QWEN_IMAGE,
    flow_transformers.Z_IMAGE,
)


@dataclass(frozen=True)
class BaseConfig:
    """Pretrained text-to-image model that the adapters are trained on."""

    source: str | None = None
    """Hub id or folder of a diffusers pipeline, with model_index.json; or a run of recipes/mmdit.py on pictures, one
    of its checkpoints or exports, or hub:org/name of one that was pushed."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    variant: str | None = None
    """Variant of the weight files, such as fp16."""
    encoder_precision: Precision = "fp32"
    """Dtype of the text encoders. They and the VAE are only needed until captions and pictures are encoded."""
    offload_encoders: bool = False
    """Keep the blocks of the text encoders in host memory and two at a time on the device, while captions are encoded.
    For a T5 or language model that does not fit. Each batch of captions reads them over the bus."""
    encoder_batch_size: PositiveInt = 8
    """Pictures or captions that are encoded at once, per process. Affects speed and memory only."""
    prompt_tokens: PositiveInt | None = None
    """Longest prompt in tokens, cut there. None: as the pipeline does. CLIP's length is fixed."""
    guidance: PositiveFloat = 1.0
    """Guidance scale given to a denoiser distilled from guidance (FLUX.1-dev), while it is trained."""


@dataclass(frozen=True, eq=False)
class DiffusersBase:
    """A pipeline on the disk, identified by its model_index.json."""

    config: BaseConfig
    directory: Path
    family: Family
    revision: str | None
    """Commit of a Hub id."""
    trained_text: tuple[str, ...] = ()
    """Trained text encoders. They belong to the denoiser, and the rest of the pipeline has none."""

    @property
    def source(self) -> str:
        assert self.config.source is not None
        return self.config.source

    @property
    def location(self) -> str:
        """Hub id or path by which it is found from any directory."""
        return self.source if self.revision else str(self.directory)

    @property
    def prompt_tokens(self) -> int | None:
        """Longest prompt in tokens. None if the text encoders have a fixed length."""
        return self.config.prompt_tokens or self.family.prompt_tokens

    @property
    def largest(self) -> tuple[int, int] | None:
        """Height and width of the largest picture in pixels. None if any size is possible."""
        return components.largest_picture(self.directory, self.family.denoiser)

    def components(self, device: torch.device) -> Any:
        """Load everything but the denoiser, as a pipeline in eval mode on ``device``. The VAE is fp32."""
        return self._load({self.family.denoiser: None}, device)

    def pipeline(self, device: torch.device) -> Any:
        """Load the whole pipeline in eval mode on ``device``, fp32 but for the text encoders."""
        return self._load({}, device)

    def denoiser(self, precision: Precision) -> nn.Module:
        """Load the denoiser in ``precision``, in training mode. On the meta device it has no weights.

        With trained text encoders it is a ``DenoiserWithText``.
        """
        model = self.component(self.family.denoiser, precision)
        model.register_forward_pre_hook(cast_inputs, with_kwargs=True)
        if not self.trained_text:
            return model
        # Imported late, because only trained text encoders need it.
        from accel_train.domains.images.trained_text.joint import DenoiserWithText

        encoders = {name: self.component(name, precision) for name in self.trained_text}
        return DenoiserWithText(self.family.name, self.family.denoiser, model, encoders)

    def component(self, component: str, precision: Precision) -> nn.Module:
        """Load a component in training mode. On the meta device it has no weights."""
        _build_whole()
        # A simulation has no values to read, and builds the component from its config alone.
        if not simulated.weights_have_no_values():
            return self._model(component, precision).train()
        kind = self._class(component)
        folder = self.directory / component
        components.require_config(self.source, folder, components.CONFIG)
        with components.reading(self.source, folder, components.CONFIG):
            if hasattr(kind, "load_config"):
                return kind.from_config(kind.load_config(folder)).train()
            return kind(kind.config_class.from_pretrained(folder)).train()

    def _model(self, component: str, precision: Precision) -> Any:
        """Load a denoiser, VAE or text encoder in eval mode, with all of its weights."""
        options = {"dtype": dtype_of(precision), "variant": self.variant_of(component)}
        return components.load_model(self._class(component), self.source, self.directory / component, **options)

    def _class(self, component: str) -> Any:
        kind = _index(self.directory).get(component, (None, None))
        return components.find_class(self.source, self.directory / INDEX, component, kind)

    def levels(self) -> NoiseLevels:
        """Return the noise levels of its scheduler, and with them the objective. Raises ``UsageError``."""
        kind = self._class("scheduler")
        return levels_of(components.load_scheduler(kind, self.source, self.directory / "scheduler"), self.source)

    def files(self) -> PretrainedBase:
        """Return the weight files of the trained components, and all others in use, for checkpoints to name."""
        denoiser = self.family.denoiser
        directory = self.directory
        parts = (denoiser, *self.trained_text)
        defining = defining_files(directory, _index(directory), parts, self._weight_files)
        names = [f"{part}/{name}" for part in parts for name in self._weight_files(part)]
        if not self.trained_text:
            directory /= denoiser
            names = self._weight_files(denoiser)
        return PretrainedBase(self.source, directory, tuple(names), self.revision, defining, self.directory, UNREAD)

    def _weight_files(self, component: str) -> list[str]:
        return self._weights_of(component, self.variant_of(component))

    def _weights_of(self, component: str, variant: str | None) -> list[str]:
        """Return the names of the files, one or several, from which a component may be loaded."""
        dotted = rf"\.{re.escape(variant)}" if variant else ""
        part = r"(-\d{5}-of-\d{5})?"
        # Older releases of diffusers write the variant after the number.
        pattern = re.compile(rf"{_stem(component)}({dotted}{part}|{part}{dotted})\.safetensors")
        return sorted(path.name for path in (self.directory / component).glob("*") if pattern.fullmatch(path.name))

    def variant_of(self, component: str) -> str | None:
        """Return the variant of a component's files. None if it has no such files, which only a denoiser must have."""
        variant = self.config.variant
        is_missing = not self._weights_of(component, variant)
        if variant and is_missing and component == self.family.denoiser:
            raise UsageError(
                f"base.variant {variant!r}: {self.directory / component} has no such safetensors; leave it out"
            )
        return None if is_missing else variant

    def attach(self, pipeline: Any, directory: Path, name: str) -> None:
        """Put the adapter of a checkpoint or an export on the denoiser, and select it.

        Raises ``UsageError`` if it does not fit.
        """
        # Imported late, because that module imports this one.
        from accel_train.domains.images.pipelines.adapter_files import load_directory

        load_directory(pipeline, self.family.denoiser, directory, name)

    def choose(self, pipeline: Any, name: str | None) -> None:
        """Draw with the adapter ``name`` from now on, or for None with the base alone."""
        if name is None:
            pipeline.disable_lora()
            return
        pipeline.enable_lora()
        pipeline.set_adapters(name)

    def values_of(self, component: str) -> int:
        """Return the number of values in the weights of a component, from the headers of its files. Reads no tensor."""
        stem = _stem(component)
        variant = self.config.variant
        folder = self.directory / component
        if variant and any(folder.glob(f"{stem}.{variant}*")):
            stem = f"{stem}.{variant}"
        return sum(info.elements for info in find_tensors(folder, stem).values())

    def class_of(self, component: str) -> str:
        """Return the name of a component's class."""
        return _index(self.directory)[component][1]

    def text_encoders(self) -> list[str]:
        """Return the names of the pipeline's text encoders."""
        index = _index(self.directory)
        return [name for name, kind in index.items() if name.startswith("text_encoder") and kind[0] is not None]

    def _load(self, replaced: dict[str, Any], device: torch.device) -> Any:
        with quiet():
            from diffusers import DiffusionPipeline

        _build_whole()
        index = _index(self.directory)
        unused = {name: None for name in UNUSED if name in index}
        parts = self._parts(replaced)
        with quiet():
            try:
                pipeline: Any = DiffusionPipeline.from_pretrained(
                    self.directory,
                    use_safetensors=True,
                    **unused,
                    **parts,
                )
            except (OSError, ValueError, RuntimeError, ImportError, AttributeError, TypeError) as error:
                raise UsageError(components.not_loaded(self.source, error)) from None
        pipeline.set_progress_bar_config(disable=True)
        if self.config.offload_encoders:
            for encoder in text_encoders(pipeline).values():
                # Before `to` would move them as a whole.
                offload_frozen_blocks(encoder.requires_grad_(False), device)
        pipeline.to(device)
        _accept_any_dtype(pipeline.vae)
        return pipeline

    def _parts(self, replaced: dict[str, Any]) -> dict[str, Any]:
        """Load what is not ``replaced``: denoiser, VAE, text encoders, their tokenizers and the scheduler."""
        parts = dict(replaced)
        encoders = self.text_encoders()
        for name in (self.family.denoiser, "vae", *encoders):
            self._class(name)
            components.require_config(self.source, self.directory / name, components.CONFIG)
            if name not in parts:
                parts[name] = self._model(name, self.config.encoder_precision if name in encoders else "fp32")
        for name, kind in _index(self.directory).items():
            if name.startswith("tokenizer") and kind[0] is not None:
                encoder = parts.get(name.replace("tokenizer", "text_encoder"))
                folder = self.directory / name
                parts[name] = components.load_tokenizer(self._class(name), self.source, folder, encoder)
        scheduler = self.directory / "scheduler"
        parts["scheduler"] = components.load_scheduler(self._class("scheduler"), self.source, scheduler)
        return parts


Base: TypeAlias = "DiffusersBase | MMDiTBase"


def _build_whole() -> None:
    """Make transformers build whole text encoders under ZeRO-3 too: unprepared ones would stay empty shards."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def _stem(component: str) -> str:
    return "model" if component.startswith("text_encoder") else WEIGHTS


def _accept_any_dtype(vae: Any) -> None:
    """Let the VAE decode latents of any dtype, because pipelines pass it those of the denoiser."""
    decode = vae.decode

    def cast(latents: torch.Tensor, *rest: Any, **named: Any) -> Any:
        return decode(latents.to(vae.dtype), *rest, **named)

    vae.decode = cast


def find_base(config: BaseConfig) -> Base:
    """Find the base, downloading a Hub id, and return it with its family.

    A pipeline of diffusers is known by its model_index.json. Raises ``UsageError`` for a folder without a pipeline, one
    of another family, one with code of its own, and a run of recipes/mmdit.py that is gone or has no pictures.
    """
    from accel_train.domains.images.trained_mmdit import finding

    if config.source is not None and finding.is_meant(config.source):
        return finding.find(config)
    if config.source is None:
        raise UsageError(
            "base.source: adapters need a pretrained diffusers pipeline, and none is given; give "
            "--base.source with a Hub id, such as stable-diffusion-v1-5/stable-diffusion-v1-5, or a folder that "
            "save_pretrained wrote"
        )
    _require_diffusers()
    path = expand_path(config.source)
    revision = config.revision
    if path.is_dir():
        if revision is not None:
            raise UsageError(f"base.revision {revision!r}: {path} is a folder and has no revisions; leave it out")
        components.refuse_other_folder(path, config.source)
    else:
        refuse_missing_folder("--base.source", config.source)
        path = _download(config)
        revision = path.name
    index = _index(path, config.source)
    family = _family(index, config.source)
    # diffusers would import such a class from the repository, and run its code.
    foreign = {name: kind for name, kind in index.items() if _is_foreign(kind)}
    if foreign:
        name, kind = next(iter(foreign.items()))
        raise UsageError(
            f"base.source {config.source!r}: its {name} is {kind[0]}.{kind[1]}, code outside diffusers and "
            "transformers, which is not run; give a pipeline that uses only these two"
        )
    if config.prompt_tokens is not None and family.prompt_tokens is None:
        raise UsageError(
            f"base.prompt_tokens {config.prompt_tokens}: the text encoders of {family.name} have a fixed length; "
            "leave it out"
        )
    base = DiffusersBase(config, path, family, revision)
    # Before anything is encoded.
    base.variant_of(family.denoiser)
    return base


def _require_diffusers() -> None:
    if find_spec("diffusers") is None:
        raise UsageError("base.source: a pipeline needs diffusers; run pip install 'accel-train[diffusers]'")


def _is_foreign(kind: Sequence[Any]) -> bool:
    # stable_diffusion is where diffusers keeps its safety checker.
    return kind[0] is not None and kind[0] not in (*components.LIBRARIES, "stable_diffusion")


def _download(config: BaseConfig) -> Path:
    from diffusers import DiffusionPipeline

    source = str(config.source)
    try:
        found = DiffusionPipeline.download(
            source, revision=config.revision, variant=config.variant, use_safetensors=True
        )
    except Exception as error:  # failures of hub, network and format have no common type
        raise UsageError(components.not_loaded(source, error)) from None
    return Path(found)


def _index(directory: Path, source: str | None = None) -> dict[str, Sequence[Any]]:
    """Return library and class of each component, and the class of the pipeline under ``_class_name``."""
    try:
        found = strict_json.read_object(directory / INDEX, MAX_INDEX_BYTES)
    except (OSError, ValueError) as error:
        raise UsageError(components.not_loaded(source or str(directory), error)) from None
    index: dict[str, Sequence[Any]] = {}
    for name, kind in found.items():
        if isinstance(kind, list) and len(cast("list[Any]", kind)) == 2:
            index[name] = cast("list[Any]", kind)
    index["_class_name"] = ("diffusers", str(found.get("_class_name")))
    return index


def _family(index: dict[str, Sequence[Any]], source: str) -> Family:
    class_name = index["_class_name"][1]
    for family in FAMILIES:
        if class_name in family.pipelines:
            return family
    known = "; ".join(f"{family.name} ({', '.join(family.pipelines)})" for family in FAMILIES)
    missing = [name for name in ("vae", "scheduler") if name not in index]
    if not {"unet", "transformer"} & index.keys():
        missing.append("unet or transformer")
    lacks = f", and it has no {' and no '.join(missing)}" if missing else ""
    raise UsageError(
        f"base.source {source!r} is a {class_name}: the inputs of its denoiser are unknown here{lacks}. Known: {known}"
    )

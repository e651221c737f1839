"""Pipeline of adapters on a text-to-image base: pictures of prompts."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import nn

from accel_train.config import NonNegativeFloat, PositiveInt, Seed, UsageError, expand_path
from accel_train.data.artifacts import cache_if_usable
from accel_train.domains.images.kohya.metadata import kohya_facts
from accel_train.domains.images.options import PictureDataConfig
from accel_train.domains.images.pipelines import adapter_files
from accel_train.domains.images.pipelines.drawing import draw_picture, refuse_side
from accel_train.domains.images.pipelines.loading import Base, BaseConfig, DiffusersBase, find_base
from accel_train.domains.images.trained_mmdit.run_base import ASSETS, MMDiTBase
from accel_train.domains.images.trained_mmdit.text_to_picture import MMDIT
from accel_train.domains.models import lora
from accel_train.domains.models.adapters import (
    BASE,
    compare_bases,
    merge_adapter,
    refuse_names,
    refuse_out_of_range,
    refuse_unknown,
    refuse_whole_model,
)
from accel_train.pipeline import Example, describe, read_lines, settings
from accel_train.precision import Precision, dtype_of
from accel_train.store import atomic_files, manifest
from accel_train.store.pretrained_base import at_recorded_revision, refuse_other_base

if TYPE_CHECKING:
    from PIL import Image

    from accel_train.domains.images.pipelines.validation import EvaluationConfig

SIDE = 512


@dataclass(frozen=True)
class PictureOptions:
    """Draw pictures of prompts. One prompt with one seed gives one picture, whatever else is asked for with it."""

    prompt: tuple[str, ...] = ()
    """What to draw."""
    prompt_file: str | None = None
    """File with a prompt per line, beside or instead of --prompt."""
    steps: PositiveInt | None = None
    """Denoising steps. None: those of the evaluation in training."""
    guidance: NonNegativeFloat | None = None
    """Scale of guidance. None: the default of the base."""
    side: PositiveInt | None = None
    """Height and width in pixels. None: those of the evaluation in training."""
    adapters: tuple[str, ...] = ()
    """Further adapters of the same base, each as NAME=PLACE with a run, a checkpoint or an export."""
    adapter: str | None = None
    """Name of the adapter to draw with; base: none. None: that of the model itself."""
    seed: Seed = 0
    """Another seed gives another picture of the same prompt."""
    device: str = "cpu"
    """Device of torch."""
    output: str | None = None
    """Folder for the pictures. None: pictures, in the current directory."""

    def __post_init__(self) -> None:
        if not (self.prompt or self.prompt_file):
            raise UsageError("nothing to draw: give --prompt 'a red flag' or --prompt_file prompts.txt")


class PicturePipeline:
    """Pictures of prompts, by a base with an adapter trained on it."""

    recipe: ClassVar[str] = "lora"
    tag: ClassVar[str | None] = "text-to-image"
    usage: ClassVar[str] = 'pipeline("a red flag").save("flag.png")'
    standalone: tuple[Any, ...] | ModuleType | None = None
    options: ClassVar[type] = PictureOptions

    def __init__(self, base: Base, pipeline: Any, sampler: Mapping[str, Any], directory: Path) -> None:
        self.base = base
        self.pipeline = pipeline
        """Pipeline of diffusers or of our own MMDiT, with the adapter."""
        self.sampler = sampler
        self.directory = directory
        """The checkpoint or export."""
        self.adapters: tuple[str, ...] = (lora.ADAPTER,)
        """Names of adapters to choose from in a call; ``default`` is the run's."""

    @property
    def model(self) -> nn.Module:
        return getattr(self.pipeline, self.base.family.denoiser)

    @classmethod
    def recognises(cls, description: Mapping[str, Any]) -> bool:
        """Return False: no older version has written such a model."""
        return False

    @classmethod
    def from_directory(cls, directory: Path, device: str = "cpu") -> PicturePipeline:
        """Read a checkpoint or an export. Raises ``UsageError``, also if the base is not on this machine."""
        described = _described(directory)
        return cls._load(_base_config(described, directory), described, directory, device)

    @classmethod
    def _load(cls, config: BaseConfig, described: Mapping[str, Any], directory: Path, device: str) -> PicturePipeline:
        base = find_base(config)
        if isinstance(base, DiffusersBase):
            base = replace(base, trained_text=tuple(described.get("text_encoders", ())))
        # Before the pipeline is loaded, which takes minutes for a large base.
        _refuse_other_files(base, described, directory)
        pipeline = base.pipeline(torch.device(device))
        base.attach(pipeline, directory, lora.ADAPTER)
        return cls(base, pipeline, described["sampler"], directory)

    def attach(self, adapters: Mapping[str, Path]) -> None:
        """Put further adapters beside the first, by name: directories of checkpoints or exports, verified already.

        Raises ``UsageError`` for adapters of another base, for misfitting ones, and for names in use.
        """
        refuse_names(adapters, self.adapters)
        reference = self.base.files().reference(cache_if_usable())
        for name, directory in adapters.items():
            refuse_whole_model(name, directory)
            compare_bases(_base_files(_description(directory), directory), reference, directory, self.directory)
            self.base.attach(self.pipeline, directory, name)
        self.base.choose(self.pipeline, self.adapters[0])
        self.adapters += tuple(adapters)

    @contextmanager
    def using(self, adapter: str | None) -> Generator[None]:
        """Draw with an adapter, or with the base alone for ``base``. None: the first of ``adapters``."""
        name = adapter or self.adapters[0]
        refuse_unknown(name, self.adapters)
        # Switched and not taken off: the same pipeline draws all, from the same noise.
        self.base.choose(self.pipeline, None if name == BASE else name)
        try:
            yield
        finally:
            self.base.choose(self.pipeline, self.adapters[0])

    @classmethod
    def write_merged(cls, adapters: Path, directory: Path, precision: Precision) -> str | None:
        """Write the base of a checkpoint with its adapter merged, and return a line about it, None for our own MMDiT.

        It is a pipeline as diffusers saves it, or an export of recipes/mmdit.py. Merged in fp32 and rounded once.
        Raises ``UsageError`` for a missing or different base, and for values out of the range of ``precision``.
        """
        described = _described(adapters)
        # Text encoders too: what training has rounded for its embeddings would stay rounded.
        whole = replace(_base_config(described, adapters), encoder_precision="fp32")
        if isinstance(find_base(whole), DiffusersBase):
            found = cls._load(whole, described, adapters, "cpu")
            pipeline = found.pipeline
            # Safe: values that are not finite are an error before they are in the weights.
            pipeline.fuse_lora(safe_fusing=True)
            # What has been fused stays in the weights.
            pipeline.unload_lora_weights()
            parts = {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
            for name, part in parts.items():
                refuse_out_of_range(part.to(dtype_of(precision)), name, precision)
            pipeline.save_pretrained(directory)
            return f"a diffusers pipeline: {type(pipeline).__name__}.from_pretrained reads it"
        found = cls.from_directory(adapters)
        merge_adapter(found.model, lora.ADAPTER)
        refuse_out_of_range(found.model.to(dtype_of(precision)), found.base.family.denoiser, precision)
        assert isinstance(found.base, MMDiTBase)
        save_file(found.model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
        of_base = _description(found.base.directory)
        # The options of its run, where times are found otherwise, stay behind.
        objective = {**of_base["objective"], "times": asdict(found.base.times)}
        atomic_files.write_json(directory / "config.json", {**of_base, "objective": objective})
        shutil.copytree(found.base.directory / ASSETS, directory / ASSETS)
        return None

    def __call__(
        self,
        prompt: str,
        *,
        steps: int | None = None,
        guidance: float | None = None,
        side: int | None = None,
        seed: int = 0,
        adapter: str | None = None,
    ) -> Image.Image:
        """Return the picture of a prompt. ``adapter`` is one of ``adapters``, by default the first, or ``base``."""
        from accel_train.domains.images.buckets import to_image

        drawn = self.draw(prompt, steps=steps, guidance=guidance, side=side, seed=seed, adapter=adapter)
        return to_image(drawn)

    def draw(
        self,
        prompt: str,
        *,
        steps: int | None = None,
        guidance: float | None = None,
        side: int | None = None,
        seed: int = 0,
        adapter: str | None = None,
    ) -> torch.Tensor:
        """Return the picture of a prompt, (3, H, W) from -1 to 1. Raises ``UsageError`` for a ``side`` not drawn."""
        pixels = side or int(self.sampler.get("side", SIDE))
        refuse_side(f"side {pixels}", pixels, self.pipeline, self.base)
        with self.using(adapter):
            return draw_picture(
                self.pipeline,
                self.base.family,
                self._prompts(prompt),
                seed,
                pixels,
                steps or int(self.sampler["steps"]),
                self.sampler.get("guidance") if guidance is None else guidance,
            )

    def _prompts(self, prompt: str) -> dict[str, Any]:
        family = self.base.family
        length = self.base.prompt_tokens
        with torch.no_grad():
            given = family.encode(self.pipeline, [prompt], length)
            empty = family.encode(self.pipeline, [""], length)
        return family.sample(given, family.empty(self.pipeline, empty))

    def sample(self, options: PictureOptions) -> list[str]:
        """Draw as ``accel-train sample`` is asked to, and return the lines to print."""
        prompts = [*options.prompt, *read_lines(options.prompt_file)]
        folder = expand_path(options.output or "pictures")
        folder.mkdir(parents=True, exist_ok=True)
        lines: list[str] = []
        for prompt in prompts:
            image = self(
                prompt,
                steps=options.steps,
                guidance=options.guidance,
                side=options.side,
                seed=options.seed,
                adapter=options.adapter,
            )
            # A prompt may be longer than a file name and have characters that no file name takes.
            name = hashlib.blake2b(prompt.encode(), digest_size=4).hexdigest()
            file = folder / f"{name}-{options.seed}.png"
            image.save(file)
            lines.append(f"{file}: {prompt}")
        return lines

    def examples(self) -> Sequence[Example]:
        """Return none: the base is not part of an export, so nothing in it can be repeated alone."""
        return []

    @classmethod
    def write_for_others(cls, directory: Path) -> list[str]:
        """Write the adapter of an export as diffusers, kohya's scripts and ComfyUI read it. Return lines about it.

        ``directory`` holds peft's files and config.json.
        """
        described: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
        if described["family"] == MMDIT.name:
            return [f"without {adapter_files.DIFFUSERS_FILE}: diffusers has no {MMDIT.name}; peft reads its own files"]
        tensors = adapter_files.read_adapter(directory)
        found = adapter_files.peft_settings(directory)
        lines = [adapter_files.write_diffusers(directory, tensors, found, described["denoiser"])]
        facts = described.get("kohya")
        if facts is None:
            reason = f"{described['family']} has no names in kohya's scripts; use {adapter_files.DIFFUSERS_FILE}"
        elif found.get("use_dora"):
            reason = f"its readers do not agree on how DoRA is written; use {adapter_files.DIFFUSERS_FILE}"
        else:
            try:
                return [*lines, adapter_files.write_kohya(directory, tensors, found, facts)]
            except UsageError as error:
                reason = str(error)
        return [*lines, f"without {adapter_files.KOHYA_FILE}: {reason}"]


def _described(directory: Path) -> Mapping[str, Any]:
    described = settings(_description(directory), directory)
    assert described is not None, "every version of this pipeline has written a description"
    return described


def _description(directory: Path) -> Mapping[str, Any]:
    """Read config.json; empty for a folder written by peft alone."""
    path = directory / "config.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def _base_config(described: Mapping[str, Any], directory: Path) -> BaseConfig:
    """Return the options of an adapter's base, at the commit that its run began with."""
    return at_recorded_revision(BaseConfig(**described["base"]), _base_files(described, directory))


def _base_files(described: Mapping[str, Any], directory: Path) -> Mapping[str, Any] | None:
    """Return the files of an adapter's base, with their sha256. None if they are not recorded."""
    recorded = None
    if (directory / manifest.MANIFEST).is_file():
        # Those that the run began with. The description has those of the save.
        recorded = manifest.read(directory).get("base")
    return recorded or described.get("base_files")


def _refuse_other_files(base: Base, described: Mapping[str, Any], directory: Path) -> None:
    """Raise ``UsageError`` unless the base has the files recorded with the adapter, by their sha256."""
    recorded = _base_files(described, directory)
    if recorded is not None:
        refuse_other_base(recorded, base.files().reference(cache_if_usable()), directory)


def write_files(
    model: nn.Module,
    base: Base,
    base_files: Mapping[str, Any] | None,
    prediction: str,
    evaluation: EvaluationConfig,
    data: PictureDataConfig,
    directory: Path,
) -> None:
    """Write the files beside the weights of a checkpoint: peft's config, and the description of the pipeline.

    ``base_files`` are those of the start. Reads no file of the base, which may be gone or updated by now.
    """
    adapted: Any = model
    atomic_files.write_json(directory / lora.CONFIG_FILE, lora.adapter_config(model, base.location, base.revision))
    family = base.family
    side = evaluation.pixels(data)
    facts = kohya_facts(family.pipelines[0], prediction, adapted.config, base.source, side)
    described = describe(
        PicturePipeline,
        {
            "base": asdict(base.config) | {"source": base.location},
            "base_files": base_files,
            "denoiser": family.denoiser,
            "family": family.name,
            "kohya": facts,
            "text_encoders": list(base.trained_text),
        },
        objective={"prediction": prediction},
        sampler={"steps": evaluation.steps, "guidance": evaluation.guidance, "side": side},
        normalisation={},
        units={"picture": "sRGB, 0 to 255"},
        card={
            # A folder on this machine is no model that a card on the Hub could name.
            "base_model": None if base.revision is None else base.source,
            "datasets": [],
            "measured_on": f"held-out pictures of {data.path}",
        },
    )
    atomic_files.write_json(directory / "config.json", described)

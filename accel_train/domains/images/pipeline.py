"""Pipeline of adapters on a text-to-image base: pictures of prompts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch
from safetensors.torch import save_file
from torch import nn

from accel_train.config import NonNegativeFloat, PositiveInt, Seed, UsageError, expand_path
from accel_train.data.artifacts import cache_if_usable
from accel_train.domains.images.kohya.metadata import kohya_facts
from accel_train.domains.images.options import PictureDataConfig
from accel_train.domains.images.pipelines import adapter_files
from accel_train.domains.images.pipelines.drawing import (
    Drawing,
    draw_picture,
    prompt_arguments,
    refuse_both,
    refuse_size,
    resolve_drawing,
)
from accel_train.domains.images.pipelines.loading import Base, BaseConfig, DiffusersBase, find_base
from accel_train.domains.images.recorded_base import (
    base_config,
    base_files,
    is_pipeline_folder,
    read_described,
    read_description,
    refuse_other_files,
    with_trained_text,
)
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
    scaled_adapter,
)
from accel_train.pipeline import Example, WrittenModel, describe, file_stem, one_text, read_lines
from accel_train.precision import Precision, dtype_of
from accel_train.store import atomic_files

if TYPE_CHECKING:
    from PIL import Image

    from accel_train.domains.images.pipelines.validation import EvaluationConfig


@dataclass(frozen=True)
class PictureOptions:
    """Draw pictures of prompts. One prompt with one seed gives one picture, whatever else is asked for with it."""

    prompt: tuple[str, ...] = ()
    """Prompts to draw."""
    prompt_file: str | None = None
    """File with a prompt per line, beside or instead of --prompt."""
    steps: PositiveInt | None = None
    """Denoising steps. None: those of the evaluation in training."""
    guidance: NonNegativeFloat | None = None
    """Scale of guidance. None: the default of the base."""
    negative_prompt: str | None = None
    """Text that guidance leads away from."""
    side: PositiveInt | None = None
    """Height and width in pixels. None: those of the evaluation in training."""
    height: PositiveInt | None = None
    """Height alone in pixels, for pictures that are not square. Not with side."""
    width: PositiveInt | None = None
    """Width alone in pixels. Not with side."""
    adapters: tuple[str, ...] = ()
    """Further adapters of the same base, each as NAME=PLACE with a run, a checkpoint or an export."""
    adapter: str | None = None
    """Name of the adapter to draw with; base: none. None: that of the model itself."""
    scale: NonNegativeFloat = 1.0
    """Strength of the adapter: 0 draws as the base, 1 as trained. DoRA has no others."""
    seed: Seed = 0
    """Another seed gives another picture of the same prompt."""
    device: str = "cpu"
    """Device of torch."""
    output: str | None = None
    """Folder for the pictures. None: pictures, in the current directory."""

    def __post_init__(self) -> None:
        if not (self.prompt or self.prompt_file):
            raise UsageError("nothing to draw: give --prompt 'a red flag' or --prompt_file prompts.txt")
        refuse_both(self.side, self.height, self.width)


class PicturePipeline:
    """Pictures of prompts, by a base with an adapter trained on it."""

    recipe: ClassVar[str] = "lora"
    tag: ClassVar[str | None] = "text-to-image"
    usage: ClassVar[str] = 'pipeline("a red flag").save("flag.png")'
    standalone: tuple[Any, ...] | ModuleType | None = None
    options: ClassVar[type] = PictureOptions

    def __init__(self, base: Base, sampler: Mapping[str, Any], directory: Path, device: torch.device) -> None:
        self.base = base
        self.sampler = sampler
        self.directory = directory
        """The checkpoint or export, or the folder of the base."""
        self.device = device
        self.adapters: tuple[str, ...] = ()
        """Names of adapters to choose from in a call; ``default`` is the run's."""
        self._chosen = BASE

    @cached_property
    def pipeline(self) -> Any:
        """Pipeline of diffusers or of our own MMDiT, with the adapters."""
        return self.base.pipeline(self.device)

    @property
    def model(self) -> nn.Module:
        return getattr(self.pipeline, self.base.family.denoiser)

    @classmethod
    def recognises(cls, description: Mapping[str, Any]) -> bool:
        """Return True for the model_index.json of a diffusers pipeline, which adapters can be put on."""
        return str(description.get("_class_name")).endswith("Pipeline")

    @classmethod
    def from_directory(cls, directory: Path, device: str = "cpu") -> PicturePipeline:
        """Read a checkpoint, an export, or a base alone: the folder of a diffusers pipeline to attach adapters to.

        Raises ``UsageError``, also if the base is not on this machine.
        """
        if is_pipeline_folder(directory):
            base = find_base(BaseConfig(source=str(directory)))
            return cls(base, {}, directory, torch.device(device))
        described = read_described(directory)
        return cls._load(base_config(described, directory), described, directory, device)

    @classmethod
    def _load(cls, config: BaseConfig, described: Mapping[str, Any], directory: Path, device: str) -> PicturePipeline:
        base = with_trained_text(find_base(config), described)
        # Before the pipeline is loaded, which takes minutes for a large base.
        refuse_other_files(base, described, directory)
        found = cls(base, described["sampler"], directory, torch.device(device))
        base.attach(found.pipeline, directory, lora.ADAPTER)
        found.adapters = (lora.ADAPTER,)
        found._chosen = lora.ADAPTER
        return found

    def attach(self, adapters: Mapping[str, Path]) -> None:
        """Add further adapters by name, from directories of checkpoints or exports that are already verified.

        Raises ``UsageError`` for adapters of another base, for adapters that do not fit, and for names in use.
        """
        refuse_names(adapters, self.adapters)
        if not self.adapters:
            self._take_options(next(iter(adapters.values())))
        reference = self.base.files().reference(cache_if_usable())
        for name, directory in adapters.items():
            refuse_whole_model(name, directory)
            compare_bases(base_files(read_description(directory), directory), reference, directory, self.directory)
            self.base.attach(self.pipeline, directory, name)
        if not self.adapters:
            self._chosen = next(iter(adapters))
        self.adapters += tuple(adapters)
        self._choose(self._chosen)

    def _take_options(self, adapter: Path) -> None:
        """Give a base alone the options of its first adapter's training: variant, dtypes and trained text encoders."""
        refuse_whole_model("", adapter)
        described = read_description(adapter)
        if "base" not in described or "pipeline" in self.__dict__:
            return
        # From the folder that was given: the one of the training may be on another machine.
        config = replace(BaseConfig(**described["base"]), source=str(self.directory), revision=None)
        self.base = with_trained_text(find_base(config), described)
        self.sampler = described["sampler"]

    @contextmanager
    def using(self, adapter: str | None) -> Generator[None]:
        """Draw with an adapter in the body, or for ``base`` with the base alone. None keeps the one in use."""
        before = self._chosen
        name = before if adapter is None else adapter
        refuse_unknown(name, self.adapters)
        self._choose(name)
        try:
            yield
        finally:
            self._choose(before)

    def _choose(self, name: str) -> None:
        self._chosen = name
        if self.adapters:
            # Switched, not removed: the same pipeline draws with all of them, from the same noise.
            self.base.choose(self.pipeline, None if name == BASE else name)

    @classmethod
    def write_merged(cls, adapters: Path, directory: Path, precision: Precision) -> WrittenModel:
        """Write the base of a checkpoint with its adapter merged. Return a line about it, or none for our own MMDiT.

        It is a pipeline as diffusers saves it, or an export of recipes/mmdit.py. Merged in fp32 and rounded once.
        Raises ``UsageError`` for a missing or different base, and for values out of the range of ``precision``.
        """
        described = read_described(adapters)
        # Text encoders in fp32 too: the rounding of encoder_precision in training would stay in the weights.
        whole = replace(base_config(described, adapters), encoder_precision="fp32")
        if isinstance(find_base(whole), DiffusersBase):
            found = cls._load(whole, described, adapters, "cpu")
            pipeline = found.pipeline
            # safe_fusing raises for values that are not finite before they are in the weights.
            pipeline.fuse_lora(safe_fusing=True)
            # Removes the adapter layers. What has been fused stays in the weights.
            pipeline.unload_lora_weights()
            parts = {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
            for name, part in parts.items():
                refuse_out_of_range(part.to(dtype_of(precision)), name, precision)
            pipeline.save_pretrained(directory)
            return WrittenModel(f"a diffusers pipeline: {type(pipeline).__name__}.from_pretrained reads it")
        found = cls.from_directory(adapters)
        merge_adapter(found.model, lora.ADAPTER)
        refuse_out_of_range(found.model.to(dtype_of(precision)), found.base.family.denoiser, precision)
        assert isinstance(found.base, MMDiTBase)
        # Older transformers refuse a file without it.
        save_file(found.model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
        of_base = read_description(found.base.directory)
        # Recorded here, because the options of the base's run, which usually hold the times, are not copied.
        objective = {**of_base["objective"], "times": asdict(found.base.times)}
        atomic_files.write_json_in_place(directory / "config.json", {**of_base, "objective": objective})
        shutil.copytree(found.base.directory / ASSETS, directory / ASSETS)
        return WrittenModel()

    def __call__(
        self,
        prompt: str,
        *,
        seed: int = 0,
        adapter: str | None = None,
        scale: float = 1.0,
        negative_prompt: str | None = None,
        **drawing: Unpack[Drawing],
    ) -> Image.Image:
        """Return the picture of a prompt. ``draw`` has the arguments."""
        from accel_train.domains.images.buckets import to_image

        drawn = self.draw(prompt, seed=seed, adapter=adapter, scale=scale, negative_prompt=negative_prompt, **drawing)
        return to_image(drawn)

    def draw(
        self,
        prompt: str,
        *,
        seed: int = 0,
        adapter: str | None = None,
        scale: float = 1.0,
        negative_prompt: str | None = None,
        **drawing: Unpack[Drawing],
    ) -> torch.Tensor:
        """Return the picture of a prompt, (3, H, W) from -1 to 1.

        ``drawing`` may have steps, guidance, and height and width in pixels, or side for both. ``adapter`` is one of
        ``adapters``, by default the one in use, and ``scale`` its strength: 0 draws as the base, 1 as trained. Guidance
        leads away from ``negative_prompt``. Raises ``UsageError`` for a size that the base cannot draw, for values out
        of range or without effect, and for any other ``scale`` of DoRA than 0 and 1.
        """
        one_text(prompt, "prompt")
        count, strength, size = resolve_drawing(self.sampler, **drawing)
        refuse_size(size, self.pipeline, self.base)
        with self.using(adapter), self._scaled(scale):
            prompts = prompt_arguments(self.pipeline, self.base, prompt, negative_prompt, strength)
            return draw_picture(self.pipeline, self.base.family, prompts, seed, size, count, strength)

    @contextmanager
    def _scaled(self, scale: float) -> Generator[None]:
        if not 0 <= scale < float("inf"):
            raise UsageError(f"scale {scale}: a finite number of 0 or more is required")
        if scale != 1 and self._chosen == BASE:
            raise UsageError(f"scale {scale:g}: belongs to an adapter, but only the base is drawn; leave it out")
        parts = [part for part in self.pipeline.components.values() if isinstance(part, nn.Module)]
        with scaled_adapter(parts, self._chosen, scale):
            yield

    def sample(self, options: PictureOptions) -> list[str]:
        """Draw the pictures of ``accel-train sample`` into files, and return the lines to print."""
        prompts = [*options.prompt, *read_lines(options.prompt_file, "prompt_file")]
        folder = expand_path(options.output or "pictures")
        folder.mkdir(parents=True, exist_ok=True)
        lines: list[str] = []
        for prompt in prompts:
            image = self(
                prompt,
                steps=options.steps,
                guidance=options.guidance,
                side=options.side,
                height=options.height,
                width=options.width,
                seed=options.seed,
                adapter=options.adapter,
                scale=options.scale,
                negative_prompt=options.negative_prompt,
            )
            file = folder / f"{file_stem(prompt, options.seed, image.tobytes())}.png"
            image.save(file)
            lines.append(f"{file}: {prompt}")
        return lines

    def examples(self) -> Sequence[Example]:
        """Return no examples: an export does not contain the base, so it cannot reproduce a picture by itself."""
        return []

    @classmethod
    def write_for_others(cls, directory: Path) -> list[str]:
        """Write the adapter of an export in the formats of diffusers, kohya and ComfyUI. Return lines about it.

        ``directory`` holds peft's files and config.json.
        """
        described: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
        if described["family"] == MMDIT.name:
            return [f"without {adapter_files.DIFFUSERS_FILE}: diffusers has no {MMDIT.name}; peft reads its own files"]
        tensors = adapter_files.read_adapter(directory)
        found = adapter_files.peft_settings(directory)
        lines = adapter_files.write_components(directory, tensors, found)
        lines.append(adapter_files.write_diffusers(directory, tensors, found, described["denoiser"]))
        facts = described.get("kohya")
        if facts is None:
            reason = f"kohya's scripts have no names for {described['family']}; use {adapter_files.DIFFUSERS_FILE}"
        elif found.get("use_dora"):
            reason = f"its readers do not agree on how DoRA is written; use {adapter_files.DIFFUSERS_FILE}"
        else:
            try:
                return [*lines, adapter_files.write_kohya(directory, tensors, found, facts)]
            except UsageError as error:
                reason = str(error)
        return [*lines, f"without {adapter_files.KOHYA_FILE}: {reason}"]


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

    ``base_files`` are those recorded at the start. Reads no file of the base, which may be gone or updated by now.
    """
    adapted: Any = model
    adapter_files.write_settings(directory, lora.adapter_config(model, base.location, base.revision))
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
            "other_programs": [] if family.name == MMDIT.name else [adapter_files.code_for_diffusers(base)],
        },
    )
    atomic_files.write_json_in_place(directory / "config.json", described)

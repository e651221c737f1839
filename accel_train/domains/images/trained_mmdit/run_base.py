"""A trained MMDiT as a base of adapters: its parts, its weights, and the noise levels of its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from accel_train import simulated
from accel_train.domains.diffusion.latents import LatentDiffusionConfig, coefficients
from accel_train.domains.diffusion.noise_levels import NoiseLevels, Prediction
from accel_train.domains.diffusion.sampling import LatentSamplingConfig
from accel_train.domains.diffusion.timesteps import TimeConfig, loss_weight, shifted, with_density
from accel_train.domains.images.pipelines.family import Family
from accel_train.domains.images.pipelines.loading import BaseConfig
from accel_train.domains.images.trained_mmdit.text_to_picture import MMDIT, CaptionTokens, MMDiTPipeline, Patches
from accel_train.domains.models.adapters import add_adapter, choose_adapter
from accel_train.domains.models.mmdit import MultimodalMMDiT, MultimodalMMDiTConfig
from accel_train.domains.models.pretrained import load_directory
from accel_train.domains.models.vae import VaeReference, load_vae
from accel_train.precision import Precision
from accel_train.store import strict_json
from accel_train.store.pretrained_base import PretrainedBase
from accel_train.store.weights import best_stem, find_tensors

HUB = "hub:"
LEVELS = 1000
"""Number of times of the loss. They are the middles of as many equal parts, because 0 and 1 mean clean and absent."""
PREDICTIONS: dict[str, Prediction] = {
    "velocity": "flow",
    "x0": "sample",
    "epsilon": "epsilon",
    "v": "v_prediction",
}
ASSETS = "assets"


@dataclass(frozen=True, eq=False)
class MMDiTBase:
    """A checkpoint or an export of recipes/mmdit.py on pictures, with verified files."""

    config: BaseConfig
    directory: Path
    shape: MultimodalMMDiTConfig
    diffusion: LatentDiffusionConfig
    sampler: LatentSamplingConfig
    """Sampler of its own evaluation."""
    times: TimeConfig
    """Times drawn in its own training."""

    @property
    def source(self) -> str:
        assert self.config.source is not None
        return self.config.source

    @property
    def location(self) -> str:
        """Path of this checkpoint, or Hub id, by which the base is found from any directory."""
        return self.source if self.source.startswith(HUB) else str(self.directory)

    @property
    def revision(self) -> str | None:
        """Always None: ``location`` alone identifies the base."""
        return None

    @property
    def trained_text(self) -> tuple[str, ...]:
        """Always empty: the base has no text encoders."""
        return ()

    @property
    def family(self) -> Family:
        """The family, with the guidance of its own evaluation."""
        return replace(MMDIT, guidance_scale=self.sampler.guidance)

    @property
    def prompt_tokens(self) -> int:
        """Longest caption in tokens. All are padded to it."""
        return self.shape.max_text_length

    @property
    def patch(self) -> int:
        """Pixels, or latents of its autoencoder, along a side of a patch."""
        channels = 3 if self._vae is None else self._vae.channels
        return round((self.shape.latent_dim / channels) ** 0.5)

    @property
    def largest(self) -> tuple[int, int]:
        """Height and width of the largest picture, in pixels."""
        assert self.shape.latent_grid is not None, "refused when it was found"
        rows, columns = self.shape.latent_grid
        side = self.patch if self._vae is None else self.patch * self._vae.reduction
        return rows * side, columns * side

    def components(self, device: torch.device) -> MMDiTPipeline:
        """Return everything but the denoiser on ``device``."""
        facts = self._assets
        folder = self.directory / ASSETS
        captions = CaptionTokens(folder / "tokenizer.json", self.prompt_tokens, **facts["tokenizer"])
        mean = load_file(folder / "latent.safetensors")["mean"]
        vae = None
        if self._vae is not None:
            vae = load_vae(self._vae.source, self._vae.revision, "the base's autoencoder", self._vae)
        patches = Patches(self.patch, mean, facts["latent_std"], vae)
        return MMDiTPipeline(captions.to(device), patches.to(device), None, self.diffusion, self.sampler)

    def pipeline(self, device: torch.device) -> MMDiTPipeline:
        """Return the whole pipeline in eval mode on ``device``, in fp32."""
        found = self.components(device)
        found.transformer = self.denoiser("fp32").to(device).eval()
        return found

    def denoiser(self, precision: Precision) -> nn.Module:
        """Load the EMA weights, or the trained ones of a base without EMA, in training mode. None on the meta device.

        They are fp32. ``apply_lora`` gives the frozen ones their precision.
        """
        model = MultimodalMMDiT(self.shape)
        if not simulated.weights_have_no_values():
            load_directory(model, self.directory, self._stem)
        return model.train()

    def attach(self, pipeline: MMDiTPipeline, directory: Path, name: str) -> None:
        """Put the adapter of a checkpoint or an export on the denoiser, and select it.

        Raises ``UsageError`` if it does not fit.
        """
        assert pipeline.transformer is not None
        add_adapter(pipeline.transformer, name, directory)
        pipeline.transformer.eval()

    def choose(self, pipeline: MMDiTPipeline, name: str | None) -> None:
        """Draw with the adapter ``name`` from now on, or for None with the base alone."""
        assert pipeline.transformer is not None
        choose_adapter(pipeline.transformer, name)

    def levels(self) -> NoiseLevels:
        """Return the noise levels of its process, spread and weighted like the times of its training."""
        # A fixed list of levels, as a diffusers scheduler has: the recipe draws an index, for all families alike.
        middles = (torch.arange(LEVELS) + 0.5) / LEVELS
        times = shifted(with_density(middles, self.times), self.times.shift)
        a, b = coefficients(times, self.diffusion)
        weight = None if self.times.weighting == "none" else loss_weight(times, self.times.weighting)
        prediction = PREDICTIONS[self.diffusion.prediction]
        return NoiseLevels(a, b, times, prediction, weight, straight=self.diffusion.kind == "flow")

    def files(self) -> PretrainedBase:
        """Return the weight files of the base, and all other files that give them their meaning."""
        weights = sorted(path.name for path in self.directory.glob(f"{self._stem}*.safetensors"))
        # With another tokenizer or scale the same weights would be another base.
        beside = [f"{ASSETS}/{name}" for name in ("assets.json", "latent.safetensors", "tokenizer.json")]
        return PretrainedBase(self.location, self.directory, (*weights, "config.json", *beside))

    def text_encoders(self) -> list[str]:
        """Return an empty list: the denoiser embeds the tokens of captions itself."""
        return []

    def values_of(self, component: str) -> int:
        """Return the number of values in the weights of a component, from file headers. 0 for all but the denoiser."""
        if component != self.family.denoiser:
            return 0
        return sum(info.elements for info in find_tensors(self.directory, self._stem).values())

    @property
    def _stem(self) -> str:
        # EMA weights draw better pictures, and are what the base itself was evaluated with.
        return best_stem(self.directory)

    @property
    def _vae(self) -> VaeReference | None:
        found = self._assets.get("vae")
        return None if found is None else VaeReference(**found)

    @cached_property
    def _assets(self) -> Mapping[str, Any]:
        return strict_json.read_object(self.directory / ASSETS / "assets.json")

"""Metadata of adapters in files of kohya's sd-scripts, with modelspec's fields (Stability-AI/ModelSpec 1.0.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GENERATIVE_MODELS = "https://github.com/Stability-AI/generative-models"
FLUX = "https://github.com/black-forest-labs/flux"
TRANSFORMERS = {
    "StableDiffusion3Pipeline": "sd3",
    "FluxPipeline": "flux",
    "Flux2Pipeline": "flux2",
    "Flux2KleinPipeline": "flux2",
    "QwenImagePipeline": "qwen_image",
    "ZImagePipeline": "z_image",
}
"""Tables of names, by the class of the pipeline."""
VERSIONS = {"flux": "flux1", "sd3": "sd3", "qwen_image": "qwen_image", "z_image": "z_image"}
MODULES = {"flux": "networks.lora_flux", "sd3": "networks.lora_sd3"}
UNETS = {
    "sd_v1": "stable-diffusion-v1",
    "sd_v2": "stable-diffusion-v2-512",
    "sd_v2_v": "stable-diffusion-v2-768-v",
    "sdxl_base_v1-0": "stable-diffusion-xl-v1-base",
}
"""modelspec's architecture, by kohya's version."""
PREDICTIONS = {"epsilon": "epsilon", "v_prediction": "v"}
MEDIUM_LAYERS = 24
LARGE_LAYERS = 38


def kohya_facts(
    family: str, prediction: str, config: Mapping[str, Any], source: str, side: int
) -> dict[str, str] | None:
    """Return metadata of the base, and the facts behind the names of its layers. None if no names are known.

    ``family`` is the class of the pipeline, ``prediction`` the prediction type of its scheduler, ``config`` the
    denoiser's, ``side`` the resolution in pixels. Keys without a prefix are for ``layer_names`` and not written.
    """
    # By the class, since a folder or fork may have any name.
    if family in TRANSFORMERS:
        facts = _of_transformer(TRANSFORMERS[family], config)
    elif family in ("StableDiffusionPipeline", "StableDiffusionXLPipeline"):
        facts = _of_unet(family, prediction, config)
    else:
        return None
    if prediction in PREDICTIONS:
        facts["modelspec.prediction_type"] = PREDICTIONS[prediction]
    return {
        **facts,
        "ss_sd_model_name": source,
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.title": f"LoRA on {source}",
        "modelspec.resolution": f"{side}x{side}",
    }


def written(facts: Mapping[str, str]) -> dict[str, str]:
    """Return the facts to write into the file."""
    return {name: value for name, value in facts.items() if name.startswith(("ss_", "modelspec."))}


def _of_unet(family: str, prediction: str, config: Mapping[str, Any]) -> dict[str, str]:
    version = "sdxl_base_v1-0" if family == "StableDiffusionXLPipeline" else "sd_v1"
    # Stable Diffusion 2 has text embeddings of width 1024.
    if version == "sd_v1" and config["cross_attention_dim"] == 1024:
        version = "sd_v2_v" if prediction == "v_prediction" else "sd_v2"
    return {
        "ss_network_module": "networks.lora",
        "ss_base_model_version": version,
        "ss_v2": str(version.startswith("sd_v2")),
        "layers_per_block": str(config["layers_per_block"]),
        "modelspec.architecture": f"{UNETS[version]}/lora",
        "modelspec.implementation": GENERATIVE_MODELS if version.startswith("sdxl") else "diffusers",
    }


def _of_transformer(names: str, config: Mapping[str, Any]) -> dict[str, str]:
    facts = {"names": names, "layers": str(config.get("num_layers") or config.get("n_layers"))}
    # Z-Image's config has the width itself.
    facts["width"] = str(config.get("dim") or config["num_attention_heads"] * config["attention_head_dim"])
    if names in VERSIONS:
        facts["ss_base_model_version"] = VERSIONS[names]
    if names in MODULES:
        facts["ss_network_module"] = MODULES[names]
        facts["ss_v2"] = "False"
        facts["modelspec.architecture"] = f"{_architecture(names, config)}/lora"
        facts["modelspec.implementation"] = FLUX if names == "flux" else "diffusers"
    return facts


def _architecture(names: str, config: Mapping[str, Any]) -> str:
    if names == "flux":
        return "flux-1-dev" if config["guidance_embeds"] else "flux-1-schnell"
    if config.get("dual_attention_layers"):
        return "stable-diffusion-3-5-medium"
    # The config of diffusers does not name the model, and only the depth tells the sizes apart.
    sizes = {MEDIUM_LAYERS: "stable-diffusion-3-m", LARGE_LAYERS: "stable-diffusion-3-5-large"}
    return sizes.get(config["num_layers"], "stable-diffusion-3")

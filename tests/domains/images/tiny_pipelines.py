"""Pipelines of diffusers with a few thousand random weights: real classes, saved as a person would have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SIDE = 16
"""Side of a picture in pixels."""
SIDES = {"sana": 32}
"""Where the pipeline wants a larger one."""
LENGTH = 16
"""Tokens of a prompt."""
WIDTH = 16
"""Width of the text encoders."""


def _bytes() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def clip_tokenizer() -> Any:
    from transformers import CLIPTokenizer

    letters = _bytes()
    names = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[], model_max_length=LENGTH)


def t5_tokenizer() -> Any:
    from transformers import T5Tokenizer

    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    words += [(letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    return T5Tokenizer(vocab=words, extra_ids=0, model_max_length=LENGTH)


def qwen_tokenizer() -> Any:
    from transformers import Qwen2Tokenizer

    names = [*_bytes(), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made = Qwen2Tokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[], model_max_length=512)
    made.chat_template = "{% for message in messages %}user {{ message['content'] }}{% endfor %}"
    return made


def clip_text(projection: bool, width: int = WIDTH) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    sizes: Any = {"hidden_size": width, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPTextConfig(
        vocab_size=514,
        max_position_embeddings=LENGTH,
        projection_dim=width,
        bos_token_id=512,
        eos_token_id=513,
        pad_token_id=513,
        **sizes,
    )
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config)


def t5_encoder() -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(vocab_size=30, d_model=WIDTH, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0)
    )


def vae(channels: int, shift: float | None = None, use_quant_conv: bool = True) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=SIDE,
        scaling_factor=0.7,
        shift_factor=shift,
        use_quant_conv=use_quant_conv,
        use_post_quant_conv=use_quant_conv,
    )


def _unet(**changes: Any) -> Any:
    from diffusers import UNet2DConditionModel

    sizes: dict[str, Any] = {
        "sample_size": 8,
        "block_out_channels": (8, 16),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": 1,
        "cross_attention_dim": WIDTH,
        "attention_head_dim": 4,
        "norm_num_groups": 4,
    }
    return UNet2DConditionModel(**sizes | changes)


def _ddpm(prediction: str) -> Any:
    from diffusers import DDIMScheduler

    return DDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        prediction_type=prediction,
        clip_sample=False,
        steps_offset=1,
    )


def stable_diffusion(prediction: str = "epsilon") -> Any:
    from diffusers import StableDiffusionPipeline

    return StableDiffusionPipeline(
        vae=vae(4),
        text_encoder=clip_text(False),
        tokenizer=clip_tokenizer(),
        unet=_unet(),
        scheduler=_ddpm(prediction),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def stable_diffusion_2() -> Any:
    """Predicts v, with linear projections in the transformer blocks."""
    pipeline = stable_diffusion("v_prediction")
    pipeline.unet = _unet(use_linear_projection=True)
    return pipeline


def sdxl() -> Any:
    from diffusers import StableDiffusionXLPipeline

    # As in SDXL itself: three levels, of which the first has no attention.
    unet = _unet(
        block_out_channels=(8, 16, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=2,
        cross_attention_dim=2 * WIDTH,
        transformer_layers_per_block=(1, 1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + WIDTH,
    )
    return StableDiffusionXLPipeline(
        vae=vae(4),
        text_encoder=clip_text(False),
        text_encoder_2=clip_text(True),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        unet=unet,
        scheduler=_ddpm("epsilon"),
    )


def sd3() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=2 * WIDTH,
        caption_projection_dim=16,
        pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=8,
    )
    encoder = t5_encoder()
    # As T5-XXL is wider than the two CLIP models together.
    encoder = type(encoder)(type(encoder.config)(**encoder.config.to_dict() | {"d_model": 2 * WIDTH}))
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(4, shift=0.1, use_quant_conv=False),
        text_encoder=clip_text(True),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip_text(True),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=encoder,
        tokenizer_3=t5_tokenizer(),
    )


def flux(guidance: bool = True) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=guidance,
        axes_dims_rope=(4, 6, 6),
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae(4, shift=0.1, use_quant_conv=False),
        text_encoder=clip_text(False),
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5_encoder(),
        tokenizer_2=t5_tokenizer(),
        transformer=transformer,
    )


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes: Any = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 28, "num_attention_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=259, num_key_value_heads=1, head_dim=8, **sizes))


def flux2() -> Any:
    """The smaller one, with Qwen3 as text encoder."""
    from diffusers import (
        AutoencoderKLFlux2,
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinPipeline,
        Flux2Transformer2DModel,
    )

    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * WIDTH,
        axes_dims_rope=(4, 4, 4, 4),
        timestep_guidance_channels=16,
        guidance_embeds=False,
    )
    autoencoder = AutoencoderKLFlux2(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=SIDE,
    )
    autoencoder.bn.running_mean.normal_(0, 0.3)
    autoencoder.bn.running_var.uniform_(0.5, 2.0)
    return Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=autoencoder,
        text_encoder=_qwen3(),
        tokenizer=qwen_tokenizer(),
        transformer=transformer,
    )


def z_image() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[64, 16, 16],
    )
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(4, shift=0.1, use_quant_conv=False),
        text_encoder=_qwen3(),
        tokenizer=qwen_tokenizer(),
        transformer=transformer,
    )


def qwen_image() -> Any:
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    autoencoder = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.5, 0.8, 1.1, 2.0],
    )
    text: Any = {
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 259,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6},
    }
    vision: Any = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": WIDTH}
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=autoencoder,
        text_encoder=Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision)),
        tokenizer=qwen_tokenizer(),
        transformer=transformer,
    )


def sana() -> Any:
    from diffusers import AutoencoderDC, FlowMatchEulerDiscreteScheduler, SanaPipeline, SanaTransformer2DModel
    from transformers import Gemma2Config, Gemma2Model

    transformer = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=WIDTH,
        sample_size=8,
        patch_size=1,
    )
    autoencoder = AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=[1, 1],
        upsample_block_type="interpolate",
        downsample_block_type="stride_conv",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41,
    )
    sizes: Any = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    encoder = Gemma2Model(Gemma2Config(vocab_size=259, num_key_value_heads=1, head_dim=8, **sizes))
    return SanaPipeline(
        tokenizer=qwen_tokenizer(),
        text_encoder=encoder,
        vae=autoencoder,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


PIPELINES: dict[str, Callable[[], Any]] = {
    "sd1": stable_diffusion,
    "sd2": stable_diffusion_2,
    "sdxl": sdxl,
    "sd3": sd3,
    "flux": flux,
    "flux2": flux2,
    "sana": sana,
    "qwen_image": qwen_image,
    "z_image": z_image,
}


def make(name: str) -> Any:
    """A new pipeline with weights that differ from zero, where an initialisation would have zeros."""
    torch.manual_seed(3)
    pipeline = PIPELINES[name]()
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval()
    denoiser = getattr(pipeline, "unet", None) or pipeline.transformer
    with torch.no_grad():
        for parameter in denoiser.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def save(name: str, folder: Path) -> Path:
    make(name).save_pretrained(folder)
    return folder

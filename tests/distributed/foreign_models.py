"""Models of other libraries with frozen or tied parts, trained like a recipe: a Llama, an SD3 transformer, a T5.

``--kind`` selects the model. With ``--base DIR`` its weights come from DIR/model.safetensors, which checkpoints name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from accel_train import experiment, loop, preparation, startup
from accel_train.data import sampler
from accel_train.options.loading import load_config
from accel_train.precision import Precision, dtype_of
from accel_train.runtime.exiting import one_run, run_main
from accel_train.store.pretrained_base import PretrainedBase
from accel_train.training import optimizers

VOCABULARY, LENGTH, ROWS = 61, 12, 48
Kind = Literal["llama", "sd3", "resnet", "gpt", "unet", "t5", "bert"]


def llama() -> nn.Module:
    """The embedding and the first block are frozen."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "max_position_embeddings": 32}
    heads: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager"}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


def gpt() -> nn.Module:
    """Input and output embedding are one tensor, which is trained; the middle block is frozen."""
    from transformers import GPT2Config, GPT2LMHeadModel

    no_dropout: Any = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attn_implementation": "eager"}
    no_ends: Any = {"bos_token_id": None, "eos_token_id": None}
    sizes: Any = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, **no_ends))
    assert model.lm_head.weight is model.transformer.wte.weight
    model.transformer.h[1].requires_grad_(False)
    return model


def t5() -> nn.Module:
    """The embeddings of encoder and decoder and the head are one tensor; the first block is frozen."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: Any = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    ends: Any = {"pad_token_id": 0, "decoder_start_token_id": 0, "dropout_rate": 0.0, "attn_implementation": "eager"}
    model: Any = T5ForConditionalGeneration(T5Config(**sizes, **ends))
    assert model.lm_head.weight is model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight
    model.encoder.block[0].requires_grad_(False)
    return model


def bert() -> nn.Module:
    """Embedding and head are one tensor, as are two biases, and the class around the embedding is named as a block."""
    from transformers import BertConfig, BertForMaskedLM

    sizes: Any = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    dropout: Any = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "eager"}
    model: Any = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes, **dropout))
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert model.cls.predictions.decoder.bias is model.cls.predictions.bias
    model.bert.encoder.layer[1].requires_grad_(False)
    return model


def resnet() -> nn.Module:
    """The stem and the first stage are frozen, with their statistics."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes: Any = {"embedding_size": 8, "hidden_sizes": [8, 12, 16], "depths": [1, 1, 1], "num_labels": 5}
    model: Any = ResNetForImageClassification(ResNetConfig(num_channels=3, layer_type="basic", **sizes))
    model._no_split_modules = ["ResNetStage"]
    model.resnet.embedder.requires_grad_(False)
    model.resnet.encoder.stages[0].requires_grad_(False)
    return model


def sd3() -> nn.Module:
    """Only attention is trained."""
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=8,
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".attn." in name)
    return model


def unet() -> nn.Module:
    """Attention and the last layer are trained. It has no UpBlock2D, which its class names to be sharded by."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".attn" in name or name.startswith("conv_out"))
    return model


MODELS: dict[Kind, Callable[[], nn.Module]] = {
    "llama": llama,
    "sd3": sd3,
    "resnet": resnet,
    "gpt": gpt,
    "unet": unet,
    "t5": t5,
    "bert": bert,
}
OF_TEXT = ("llama", "gpt", "t5", "bert")


def rows(kind: Kind) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=generator)
    found: list[dict[str, Tensor]] = []
    for _ in range(ROWS):
        if kind in OF_TEXT:
            found.append({"tokens": torch.randint(VOCABULARY, (LENGTH,), generator=generator)})
        elif kind == "resnet":
            found.append({"image": draw(3, 32, 32), "label": torch.randint(5, (), generator=generator)})
        else:
            found.append({"latent": draw(4, 8, 8), "target": draw(4, 8, 8), "text": draw(6, 16), "pooled": draw(16)})
    return found


def losses(model: nn.Module, kind: Kind, batch: dict[str, Tensor]) -> Tensor:
    """Loss of each sample, (B,)."""
    if kind in ("llama", "gpt"):
        logits = model(input_ids=batch["tokens"], use_cache=False).logits[:, :-1].float()
        return F.cross_entropy(logits.transpose(1, 2), batch["tokens"][:, 1:], reduction="none").mean(1)
    if kind == "t5":
        tokens = batch["tokens"]
        logits = model(input_ids=tokens, labels=tokens, use_cache=False).logits.float()
        return F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none").mean(1)
    if kind == "bert":
        logits = model(input_ids=batch["tokens"]).logits.float()
        return F.cross_entropy(logits.transpose(1, 2), batch["tokens"].flip(1), reduction="none").mean(1)
    if kind == "resnet":
        return F.cross_entropy(model(batch["image"]).logits.float(), batch["label"], reduction="none")
    time = torch.full((len(batch["latent"]),), 500.0)
    if kind == "unet":
        return (model(batch["latent"], time, batch["text"]).sample.float() - batch["target"]).square().mean((1, 2, 3))
    output = model(batch["latent"], batch["text"], batch["pooled"], time, return_dict=False)[0]
    return (output.float() - batch["target"]).square().mean((1, 2, 3))


def few(data: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Two rows, as an example of the inputs."""
    return {name: torch.stack([row[name] for row in data[:2]]) for name in data[0]}


def build(kind: Kind, directory: str | None, dtype: torch.dtype) -> nn.Module:
    """Frozen parameters in ``dtype``, as a base in half precision has them."""
    model = MODELS[kind]()
    if directory is not None:
        load_model(model, Path(directory) / "model.safetensors")
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


@dataclass(frozen=True)
class Config(experiment.ExperimentConfig):
    """A foreign model."""

    output_dir: str = "runs/foreign"
    kind: Kind = "llama"
    """Which one."""
    base: str | None = None
    """Directory with its model.safetensors."""
    base_precision: Precision = "fp32"
    """Dtype of the frozen parameters."""

    recipe: ClassVar = experiment.Recipe(free_to_change=("base",))


@one_run
def main(argv: Sequence[str]) -> int:
    """Train it."""
    config = load_config(Config, argv, presets=Path(__file__).parent, default_preset="foreign_models").config
    accelerator = startup.start(config)
    data = rows(config.kind)
    order = sampler.StepSampler(len(data), config.global_batch_size, config.seed)
    opened = experiment.open_experiment(config, accelerator, dataset_size=len(data), fingerprint=config.kind)
    if opened.finished:
        return experiment.nothing_to_do(opened)
    dtype = dtype_of(config.base_precision)
    model = preparation.build_model(opened, build, config.kind, None, dtype)
    base = None
    if config.base is not None:
        model = build(config.kind, config.base, dtype)
        base = PretrainedBase(config.base, Path(config.base), ("model.safetensors",))
    prepared = preparation.prepare(opened, model, base=base, example=partial(losses, kind=config.kind, batch=few(data)))
    model, optimizer = prepared.model, prepared.optimizer
    with loop.training(opened, prepared, data, order) as training:
        for batches in training:
            optimizers.set_learning_rate(optimizer, opened.learning_rate_factor(batches.step))
            weighted = [(batch, batch["weight"].sum()) for batch in batches.micro_batches]
            window = prepared.window(weighted, {"main": 1.0}, batches.step)
            for inputs in window:
                window.backward({"main": (losses(model, config.kind, inputs) * inputs["weight"]).sum()})
            result = window.finish(config.optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            prepared.ema.update(batches.step)
            training.report(batches, result)
            training.save_if_due(result)
    return loop.finish(training)


def save_base(kind: Kind, directory: Path, change: Callable[[Any], None] = lambda _: None) -> Path:
    """Write the weights of a new model as a base."""
    torch.manual_seed(7)
    model = MODELS[kind]()
    change(model)
    directory.mkdir(parents=True, exist_ok=True)
    save_model(model, str(directory / "model.safetensors"))
    return directory


if __name__ == "__main__":
    run_main(main)

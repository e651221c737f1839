"""The language model of this folder, in one file that needs torch, and safetensors to read the weights.

    model = load()
    scores = model(tokens)  # (B, S) -> (B, S, V), logits of the next token
    continued = continue_greedily(model, tokens, 40)

Llama (arXiv:2302.13971), and models that differ from it only in biases, query and key norms, and attention windows:
Mistral, Qwen2 and Qwen3. Parameters have the names of transformers. Copied whole from the sources of accel_train,
licensed under the Apache License 2.0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


def is_supported(config: Mapping[str, Any]) -> bool:
    """Return True for the config.json of a model that this file implements."""
    if config.get("model_type") not in MODEL_TYPES:
        return False
    if config.get("hidden_act") not in ACTIVATIONS:
        return False
    # Packed weights have names and shapes of their own, which the layers below do not.
    if config.get("quantization_config") is not None:
        return False
    rope = _rope(config)
    has_whole_heads = float(rope.get("partial_rotary_factor") or 1) == 1
    return has_whole_heads and rope["rope_type"] in ROPE_TYPES


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the rotary embedding: under one name since transformers 5, in two places before."""
    given = config.get("rope_parameters") or config.get("rope_scaling")
    found: dict[str, Any] = dict(given or {})
    theta = found.get("rope_theta") or config.get("rope_theta")
    found["rope_theta"] = theta or 10000.0
    kind = found.get("rope_type") or found.get("type")
    found["rope_type"] = kind or "default"
    return found


def frequencies(config: Mapping[str, Any], head_dim: int) -> Tensor:
    """Return the angles per position of the rotary embedding (arXiv:2104.09864), (head_dim / 2,)."""
    rope = _rope(config)
    even = torch.arange(0, head_dim, 2, dtype=torch.int64)
    exponents = even.float() / head_dim
    plain = 1.0 / float(rope["rope_theta"]) ** exponents
    if rope["rope_type"] == "default":
        return plain
    factor = float(rope["factor"])
    if rope["rope_type"] == "linear":
        return plain / factor
    # Llama 3.1: long waves are stretched, short ones stay, and those between are mixed.
    low = float(rope["low_freq_factor"])
    high = float(rope["high_freq_factor"])
    context = float(rope["original_max_position_embeddings"])
    waves = 2 * math.pi / plain
    # At most `low` of them are stretched, at least `high` stay.
    waves_per_context = context / waves
    share = ((waves_per_context - low) / (high - low)).clamp(0, 1)
    return (1 - share) * plain / factor + share * plain


def windows(config: Mapping[str, Any]) -> list[int | None]:
    """Return for each layer how many positions a token sees, itself included; None for all."""
    layers = int(config["num_hidden_layers"])
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if kinds is not None:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    if config["model_type"] == "mistral":
        return [window] * layers
    if not config.get("use_sliding_window"):
        return [None] * layers
    first = int(config.get("max_window_layers", 0))
    return [window if layer >= first else None for layer in range(layers)]


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: Mapping[str, Any], window: int | None) -> None:
        super().__init__()
        width = int(config["hidden_size"])
        heads = int(config["num_attention_heads"])
        groups = int(config.get("num_key_value_heads") or heads)
        self.head_dim = int(config.get("head_dim") or width // heads)
        self.window = window
        kind = config["model_type"]
        # Qwen2 has these biases whatever its config says, and none at the output.
        bias = kind == "qwen2" or bool(config.get("attention_bias", False))
        output_bias = kind != "qwen2" and bias
        query_width = heads * self.head_dim
        key_width = groups * self.head_dim
        self.q_proj = nn.Linear(width, query_width, bias=bias)
        self.k_proj = nn.Linear(width, key_width, bias=bias)
        self.v_proj = nn.Linear(width, key_width, bias=bias)
        self.o_proj = nn.Linear(query_width, width, bias=output_bias)
        if kind == "qwen3":
            eps = float(config["rms_norm_eps"])
            self.q_norm = nn.RMSNorm(self.head_dim, eps=eps)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, S, D)
        batch, length, _ = x.shape
        by_head = (batch, length, -1, self.head_dim)
        q = self.q_proj(x).view(by_head)  # (B, S, H, head_dim)
        k = self.k_proj(x).view(by_head)  # (B, S, groups, head_dim)
        v = self.v_proj(x).view(by_head)
        # Per head, and before the rotation: the norm's weights belong to positions within a head.
        if hasattr(self, "q_norm"):
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = rotate(q.transpose(1, 2), cos, sin)  # (B, H, S, head_dim)
        k = rotate(k.transpose(1, 2), cos, sin)
        v = v.transpose(1, 2)
        mask = visible(length, self.window, x.device)  # (S, S), True where seen
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        joined = mixed.transpose(1, 2).reshape(batch, length, -1)  # (B, S, H * head_dim)
        return self.o_proj(joined)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + half) of each head by the angles of their position."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)  # by a right angle
    return x * cos + turned * sin


def visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return which positions each position sees, (S, S)."""
    places = torch.arange(length, device=device)  # (S,)
    distance = places[:, None] - places[None, :]  # (S, S), how far back the key lies
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


class FeedForward(nn.Module):
    """Gated feed-forward layer (arXiv:2002.05202)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = int(config["hidden_size"])
        inner = int(config["intermediate_size"])
        bias = config["model_type"] == "llama" and bool(config.get("mlp_bias", False))
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.activation = ACTIVATIONS[config["hidden_act"]]

    def forward(self, x: Tensor) -> Tensor:
        gate = self.activation(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


class Block(nn.Module):
    """Attention and feed-forward layer, each on normalised inputs and added to them."""

    def __init__(self, config: Mapping[str, Any], window: int | None) -> None:
        super().__init__()
        width = int(config["hidden_size"])
        eps = float(config["rms_norm_eps"])
        self.self_attn = Attention(config, window)
        self.mlp = FeedForward(config)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normalised = self.input_layernorm(x)
        x = x + self.self_attn(normalised, cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Embeddings, blocks and the last norm."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = int(config["hidden_size"])
        vocabulary = int(config["vocab_size"])
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(config, window) for window in windows(config))
        eps = float(config["rms_norm_eps"])
        self.norm = nn.RMSNorm(width, eps=eps)
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or width // heads)
        # No buffer, which .bfloat16() would round: at position 1,000 the angle would be off by radians.
        self.frequencies = frequencies(config, head_dim)  # (head_dim / 2,), fp32

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)  # (B, S, D)
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device).float()
        angles = positions[:, None] * self.frequencies.to(tokens.device)  # (S, head_dim / 2)
        angles = torch.cat([angles, angles], dim=-1)  # (S, head_dim)
        cos = angles.cos().to(x.dtype)
        sin = angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class CausalLM(nn.Module):
    """Logits of the next token, (B, S, V), for tokens (B, S) that begin at position 0."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = Body(config)
        width = int(config["hidden_size"])
        vocabulary = int(config["vocab_size"])
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if config.get("tie_word_embeddings"):
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens))


def load(directory: str | Path = Path(__file__).parent) -> CausalLM:
    """Build the model of config.json and load model*.safetensors, in fp32 on the CPU, for inference.

    Raises ``ValueError`` for a model that this file does not implement, ``RuntimeError`` for weights that do not fit.
    """
    from safetensors.torch import load_file

    config = json.loads((Path(directory) / "config.json").read_text("utf-8"))
    if not is_supported(config):
        raise ValueError(f"{directory}: the model {config.get('model_type')!r} or its settings are not in this file")
    model = CausalLM(config)
    weights: dict[str, Tensor] = {}
    for file in sorted(Path(directory).glob("model*.safetensors")):
        weights.update(load_file(file))
    if config.get("tie_word_embeddings"):
        # Tied weights are stored once, under the name of the embedding.
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    model.load_state_dict(weights, strict=True)
    return model.eval()


def logits(model: CausalLM, description: Mapping[str, Any], input_ids: Tensor) -> Tensor:
    """Return the logits of the next token, (B, S, V), for tokens (B, S). ``description`` is config.json."""
    del description
    return model(input_ids)


@torch.no_grad()
def continue_greedily(model: CausalLM, tokens: Tensor, count: int) -> Tensor:
    """Append the most likely token ``count`` times to tokens (B, S). Recomputes the whole text for each token."""
    for _ in range(count):
        following = model(tokens)[:, -1].argmax(dim=-1)
        tokens = torch.cat([tokens, following[:, None]], dim=1)
    return tokens

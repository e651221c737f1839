"""FLOPs of a causal language model: 6 N D, and attention (Chowdhery et al. 2022, PaLM, appendix B)."""

from __future__ import annotations

from typing import Any

from torch import nn


def training_flops_per_token(model: nn.Module, length: int) -> int:
    """Return the FLOPs in matrix products of one token in a training step: three forwards without frozen gradients.

    Recomputation by activation checkpointing is not counted, and lowers MFU.
    """
    forward = forward_flops_per_token(model, length)
    frozen = _matrix_parameters(model) - _matrix_parameters(model, trained_only=True)
    # A frozen weight has no gradient of its own: one product less, of 2 FLOPs for each parameter.
    return round(3 * forward - 2 * frozen)


def forward_flops_per_token(model: nn.Module, length: int) -> int:
    """Return the FLOPs in matrix products of one token's forward in rows of ``length`` tokens, padding included.

    2 N for the weights and 4 L H Q T for attention over the whole row, as a kernel without a sparse mask computes it. N
    are the parameters without the input embeddings, used by lookup only. Of a layer's experts only the active ones
    count.
    """
    plain: Any = model
    config = plain.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 0)
    head_dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    parameters = _matrix_parameters(model)
    return round(2 * parameters + 4 * config.num_hidden_layers * heads * head_dim * length)


def _matrix_parameters(model: nn.Module, *, trained_only: bool = False) -> float:
    """Count the parameters multiplied with each token."""
    plain: Any = model
    share = _share_of_experts(plain.config.get_text_config())
    looked_up = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    named = dict(model.named_parameters())
    counted = [(name, p) for name, p in named.items() if p.requires_grad or not trained_only]
    parameters = 0.0
    for name, parameter in counted:
        if parameter.dim() > 1 and parameter not in looked_up:
            parameters += parameter.numel() * (share if ".experts." in name else 1)
    output = plain.get_output_embeddings()
    # Tied: the same weights are looked up and multiplied.
    if output is not None and output.weight in looked_up and (output.weight.requires_grad or not trained_only):
        parameters += output.weight.numel()
    return parameters


def _share_of_experts(config: Any) -> float:
    active = getattr(config, "num_experts_per_tok", None)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        total = getattr(config, name, None)
        if active and total:
            return active / total
    return 1.0

"""MMDiT (Esser et al., 2024, arXiv 2403.03206): transformer streams, one per modality, that attend jointly.

`MMDiT` is the transformer alone. `MultimodalMMDiT` puts text and continuous latents in front of it and a head
behind each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

from accel_train.config import PositiveInt, UsageError
from accel_train.domains.models.layers import (
    NORM_EPS,
    FeedForward,
    Float32Linear,
    Modulation,
    RMSNorm,
    TimestepEmbedder,
    modulated_norm,
)
from accel_train.domains.models.pretrained import DOWNLOAD_OPTIONS, load_pretrained
from accel_train.speed.attention import TORCH_CHOICE
from accel_train.speed.attention_table import AttentionNeeds

SIZES: dict[str, dict[str, int]] = {
    "demo": {"width": 192, "depth": 4, "heads": 4},
    "tiny": {"width": 512, "depth": 8, "heads": 8},
    "small": {"width": 768, "depth": 12, "heads": 12},
    "base": {"width": 1024, "depth": 24, "heads": 16},
    "1b": {"width": 2048, "depth": 24, "heads": 32},
}
Tensors = tuple[Tensor, ...]
MODALITIES = 2
WEIGHT_STD = 0.02
EMBEDDING_STD = 0.002
"""A tenth of the usual start. Adam moves every value by about the learning rate, however small its gradient: from here
a rare token turns far enough in the few steps that see it, and the norm of the first block takes the size out."""


@dataclass(frozen=True)
class MMDiTConfig:
    """The shape of a transformer: what `MMDiT` needs, and nothing of the data."""

    width: int = 192
    depth: int = 4
    heads: int = 4
    conditioning_width: int | None = None
    ffn_ratio: int = 4
    qk_norm: bool = True
    bias: bool = False
    tanh_gelu: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads", "ffn_ratio"):
            _require_positive(name, getattr(self, name))
        if self.conditioning_width is not None:
            _require_positive("conditioning_width", self.conditioning_width)
        if self.width % (2 * self.heads):
            nearest = max(2 * self.heads, round(self.width / (2 * self.heads)) * 2 * self.heads)
            raise UsageError(
                f"width {self.width} with heads {self.heads}: the width must be a multiple of 2 * heads = "
                f"{2 * self.heads}, so that each head has the same even number of channels. "
                f"Set width to {nearest}, or change heads."
            )

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def modulation_width(self) -> int:
        """Width of the conditioning vector: `conditioning_width`, or the width where that is None."""
        return self.conditioning_width or self.width


@dataclass(frozen=True)
class MultimodalMMDiTConfig:
    """Everything needed to build a `MultimodalMMDiT`; saved as config.json. The lengths are maxima."""

    transformer: MMDiTConfig
    vocabulary_size: int
    latent_dim: int
    max_text_length: int
    max_latent_length: int = 1

    def __post_init__(self) -> None:
        for name in ("vocabulary_size", "latent_dim", "max_text_length", "max_latent_length"):
            _require_positive(name, getattr(self, name))
        if isinstance(self.transformer, dict):  # as it comes from config.json
            object.__setattr__(self, "transformer", MMDiTConfig(**self.transformer))

    def attention_needs(self, device: torch.device, precision: str, batch: int) -> AttentionNeeds:
        """What a kernel must do for this model: texts are padded, `precision` is fp32, bf16 or fp16."""
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        length = self.max_text_length + self.max_latent_length
        deterministic = torch.are_deterministic_algorithms_enabled()
        shape = self.transformer
        return AttentionNeeds(device, dtype, shape.head_width, shape.heads, length, batch, deterministic=deterministic)


@dataclass(frozen=True)
class ModelConfig:
    """The model's options in a run. What the size names can be replaced value by value."""

    size: Literal["demo", "tiny", "small", "base", "1b"] = "demo"
    """Named width/blocks/heads and parameters of the transformer: demo 192/4/4 (5 M, trains on 2 CPU cores),
    tiny 512/8/8 (76 M), small 768/12/12 (255 M), base 1024/24/16 (0.9 B), 1b 2048/24/32 (3.6 B: one billion
    per stream, and the modulation)."""
    width: PositiveInt | None = None
    """Channels per token, a multiple of 2 * heads. None: by size. Cost grows with its square."""
    depth: PositiveInt | None = None
    """Number of blocks. None: by size."""
    heads: PositiveInt | None = None
    """Attention heads; each has width / heads channels, best 64 or 128 on a GPU. None: by size."""
    conditioning_width: PositiveInt | None = None
    """Channels of the vector made of the two times, from which every block takes its shifts, scales and
    gates. None: the width. At the default these layers are a third of the parameters, but almost no time."""
    ffn_ratio: PositiveInt = 4
    """Hidden channels of a feed-forward layer, as a multiple of the width."""
    qk_norm: bool = True
    """RMSNorm on queries and keys of each head: keeps attention logits bounded, so that bf16 stays stable."""
    bias: bool = False
    """Biases in the linear layers of the blocks: 5 % slower, and modulation shifts what they would shift."""

    def transformer(self) -> MMDiTConfig:
        """Size and replacements resolved into numbers."""
        named = SIZES[self.size]
        return MMDiTConfig(
            width=self.width or named["width"],
            depth=self.depth or named["depth"],
            heads=self.heads or named["heads"],
            conditioning_width=self.conditioning_width,
            ffn_ratio=self.ffn_ratio,
            qk_norm=self.qk_norm,
            bias=self.bias,
        )

    def multimodal(
        self, vocabulary_size: int, max_text_length: int, latent_shape: tuple[int, int]
    ) -> MultimodalMMDiTConfig:
        """The whole model for data of this vocabulary, text length and latent shape (L, Dz)."""
        max_latent_length, latent_dim = latent_shape
        return MultimodalMMDiTConfig(
            self.transformer(), vocabulary_size, latent_dim, max_text_length, max_latent_length
        )


class MMDiTOutput(NamedTuple):
    text_logits: Tensor  # (B, S, V)
    latents: Tensor  # (B, L, Dz)


class Stream(nn.Module):
    """One modality's part of a block. With `context_only` it gives keys and values and is then finished."""

    checkpoint_parts: ClassVar[dict[str, str]] = {"ffn": "feed_forward"}

    def __init__(self, config: MMDiTConfig, context_only: bool) -> None:
        super().__init__()
        width, bias = config.width, config.bias
        self.head_width = config.head_width
        self.context_only = context_only
        self.modulation = Modulation(config.modulation_width, width, parts=2 if context_only else 6)
        self.qkv = nn.Linear(width, (2 if context_only else 3) * width, bias=bias)
        self.q_norm = RMSNorm(config.head_width) if config.qk_norm and not context_only else None
        self.k_norm = RMSNorm(config.head_width) if config.qk_norm else None
        self.out = None if context_only else nn.Linear(width, width, bias=bias)
        self.ffn = None if context_only else FeedForward(width, config.ffn_ratio, bias, config.tanh_gelu)

    def project(self, x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """x (B, n, D) -> queries (None where context only), keys, values, each (B, n, H, D/H)."""
        heads = self.qkv(modulated_norm(x, shift, scale)).unflatten(-1, (-1, self.head_width))
        *q, k, v = heads.chunk(2 if self.context_only else 3, dim=2)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if self.q_norm is not None:
            q = [self.q_norm(q[0])]
        return q[0] if q else None, k, v

    def receive(self, x: Tensor, attended: Tensor, gate: Tensor) -> Tensor:
        """Adds what attention gave (B, n, D), behind its gate."""
        return x if self.out is None else x + gate * self.out(attended)

    def feed_forward(self, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        """Adds the feed-forward layer, behind its gate."""
        return x if self.ffn is None else x + gate * self.ffn(modulated_norm(x, shift, scale))


class MMDiTBlock(nn.Module):
    """Joint attention over all streams, then a feed-forward layer for each.

    `context_only` names streams, by position, that give keys and values and leave as they came, like the text
    in SD3's last block.
    """

    checkpoint_parts: ClassVar[dict[str, str]] = {"attention": "attend_jointly"}

    def __init__(self, config: MMDiTConfig, streams: int = MODALITIES, context_only: Sequence[int] = ()) -> None:
        super().__init__()
        self.attend = TORCH_CHOICE
        self.streams = nn.ModuleList(Stream(config, context_only=i in context_only) for i in range(streams))

    def forward(self, tokens: Sequence[Tensor], conditioning: Tensor, mask: Any) -> list[Tensor]:
        """tokens: (B, n_i, D) per stream; conditioning (B, C) after SiLU; mask: None or of `self.attend.mask`."""
        streams = cast("list[Stream]", list(self.streams))
        modulations = [stream.modulation(conditioning) for stream in streams]
        tokens = self.attend_jointly(tokens, modulations, mask)
        parts = zip(streams, tokens, modulations, strict=True)
        return [x if s.context_only else s.feed_forward(x, *m[3:]) for s, x, m in parts]

    def attend_jointly(self, tokens: Sequence[Tensor], modulations: list[Tensors], mask: Any) -> list[Tensor]:
        """The first half of the block: every stream's tokens and what it took from all of them."""
        streams = cast("list[Stream]", list(self.streams))
        projected = [s.project(x, m[0], m[1]) for s, x, m in zip(streams, tokens, modulations, strict=True)]
        q, k, v = (_join(parts) for parts in zip(*projected, strict=True))
        attended = self.attend(q, k, v, mask).transpose(1, 2).flatten(2)  # (B, N, D)
        lengths = [0 if s.context_only else x.shape[1] for s, x in zip(streams, tokens, strict=True)]
        pieces = attended.split(lengths, dim=1)
        parts = zip(streams, tokens, pieces, modulations, strict=True)
        return [x if s.context_only else s.receive(x, piece, m[2]) for s, x, piece, m in parts]


def _join(parts: Sequence[Tensor | None]) -> Tensor:
    """Streams' (B, n_i, H, d) -> (B, H, N, d), a view: torch's kernels read it without another copy."""
    return torch.cat([part for part in parts if part is not None], dim=1).transpose(1, 2)


class MMDiT(nn.Module):
    """The transformer alone: streams of tokens in, the same streams out, each behind a final RMSNorm.

    `context_only` streams are finished in the last block: they come back without its update and without a
    norm, for nothing is meant to read them.
    """

    def __init__(self, config: MMDiTConfig, streams: int = MODALITIES, context_only: Sequence[int] = ()) -> None:
        super().__init__()
        if len(set(context_only)) >= streams or not set(context_only) <= set(range(streams)):
            raise UsageError(
                f"context_only {tuple(context_only)}: must name fewer than all of the {streams} streams, by "
                f"position 0 to {streams - 1}. Leave at least one stream out of it."
            )
        last = config.depth - 1
        self.blocks = nn.ModuleList(
            MMDiTBlock(config, streams, context_only if i == last else ()) for i in range(config.depth)
        )
        self.norms = nn.ModuleList(
            nn.Identity() if i in context_only else RMSNorm(config.width) for i in range(streams)
        )
        self.attend = TORCH_CHOICE
        self.apply(initialise)

    def forward(self, tokens: Sequence[Tensor], conditioning: Tensor, key_mask: Tensor | None) -> list[Tensor]:
        """tokens: one (B, n_i, D) per stream; conditioning (B, C); key_mask (B, N), True = attended."""
        conditioning = F.silu(conditioning).to(tokens[0].dtype)
        mask = self.attend.mask(key_mask)
        tokens = list(tokens)  # what blocks return: of a tuple in the first one a compiler makes a second graph
        for block in self.blocks:
            tokens = block(tokens, conditioning, mask)
        return [norm(x) for norm, x in zip(self.norms, tokens, strict=True)]


class TimeConditioning(nn.Module):
    """Two times (B,) -> one conditioning vector (B, width), in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.text = TimestepEmbedder(width)
        self.latent = TimestepEmbedder(width)
        self.expand = Float32Linear(2 * width, 4 * width)
        self.project = Float32Linear(4 * width, width)

    def forward(self, text_time: Tensor, latent_time: Tensor) -> Tensor:
        both = torch.cat((self.text(text_time), self.latent(latent_time)), dim=-1)
        return self.project(F.silu(self.expand(F.silu(both))))


class LatentEncoder(nn.Module):
    """(B, L, Dz) of any float dtype -> (B, L, D)."""

    def __init__(self, latent_dim: int, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(latent_dim, 2 * width)
        self.norm = nn.LayerNorm(2 * width, eps=NORM_EPS)
        self.project = nn.Linear(2 * width, width)

    def forward(self, latents: Tensor) -> Tensor:
        x = self.expand(latents.to(self.expand.weight.dtype))
        return self.project(F.gelu(self.norm(x)))


class LatentHead(nn.Module):
    """(B, L, D) -> (B, L, Dz)."""

    def __init__(self, width: int, latent_dim: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 2 * width)
        self.project = nn.Linear(2 * width, latent_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(F.gelu(self.expand(x)))


class MultimodalMMDiT(nn.Module, PyTorchModelHubMixin):
    """Text tokens and continuous latents, each with its own time, through one MMDiT to one head each.

    Every forward runs every part, so that every parameter takes part in every step under every strategy.
    `save_pretrained` writes config.json and model.safetensors; `from_pretrained` refuses weights that do not
    fit.
    """

    _no_split_modules: ClassVar[list[str]] = ["MMDiTBlock"]  # what FSDP2 shards as one unit

    def __init__(self, config: MultimodalMMDiTConfig) -> None:
        super().__init__()
        width = config.transformer.width
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary_size, width)
        self.text_positions = nn.Embedding(config.max_text_length, width)
        self.latent_encoder = LatentEncoder(config.latent_dim, width)
        self.latent_positions = nn.Embedding(config.max_latent_length, width)
        self.conditioning = TimeConditioning(config.transformer.modulation_width)
        self.text_head = nn.Linear(width, config.vocabulary_size)
        self.latent_head = LatentHead(width, config.latent_dim)
        self.apply(initialise)
        for head in (self.text_head, self.latent_head.project):
            nn.init.normal_(head.weight, std=WEIGHT_STD)
        self.transformer = MMDiT(config.transformer)  # initialises itself

    def forward(
        self,
        tokens: Tensor,
        latents: Tensor,
        text_time: Tensor,
        latent_time: Tensor,
        text_mask: Tensor | None,
    ) -> MMDiTOutput:
        """tokens (B, S) int64, latents (B, L, Dz), times (B,) fp32 in [0, 1], text_mask (B, S) True = token.

        `text_mask` None says that no row is padded, which leaves torch faster attention kernels. Outputs have
        the dtype of the computation: it is for losses to turn them into fp32.
        """
        self._check_lengths(tokens, latents)
        text = self.token_embedding(tokens) + self.text_positions(_positions(tokens))
        latent = self.latent_encoder(latents)
        latent = latent + self.latent_positions(_positions(latents))
        mask = None if text_mask is None else F.pad(text_mask, (0, latent.shape[1]), value=True)  # (B, S + L)
        text, latent = self.transformer((text, latent), self.conditioning(text_time, latent_time), mask)
        return MMDiTOutput(self.text_head(text), self.latent_head(latent))

    def _check_lengths(self, tokens: Tensor, latents: Tensor) -> None:
        config = self.config
        for name, length, limit in (
            ("text", tokens.shape[1], config.max_text_length),
            ("latent", latents.shape[1], config.max_latent_length),
        ):
            if length > limit:
                raise UsageError(
                    f"{name} length {length}: the model was built for at most {limit} positions. "
                    f"Shorten the data, or build the model with max_{name}_length {length}."
                )

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, map_location: str = "cpu", strict: bool = True, **options: Any
    ) -> "MultimodalMMDiT":
        of_the_hub = {name: options.pop(name) for name in DOWNLOAD_OPTIONS if name in options}
        model = cls(**options)
        load_pretrained(model, model_id, map_location, strict, **of_the_hub)
        return model.eval()


def initialise(module: nn.Module) -> None:
    """Starting values of one layer, for `Module.apply`. Deterministic given `torch.manual_seed`.

    Xavier keeps the variance of a signal whatever the width. Embeddings, and the heads (set by their owner),
    start small, so that the first predictions are near uniform and near zero. Modulation starts at zero, so
    that every block starts as the identity.
    """
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=EMBEDDING_STD)
    elif isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, Modulation):  # after its own linear layer: apply visits children first
        nn.init.zeros_(module.linear.weight)


def _positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{name} {value}: must be at least 1. Set {name} to a positive whole number.")

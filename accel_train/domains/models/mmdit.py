"""MMDiT (Esser et al., 2024, arXiv 2403.03206): one transformer stream per modality, with joint attention.

`MMDiT` is the transformer alone. `MultimodalMMDiT` adds embeddings and a head for text and for continuous latents.
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
from accel_train.domains.models.positions import centred_places, sincos_2d
from accel_train.domains.models.pretrained import DOWNLOAD_OPTIONS, load_pretrained
from accel_train.precision import Precision, dtype_of
from accel_train.speed.attention.kernels import TORCH_CHOICE
from accel_train.speed.attention.table import AttentionNeeds

SIZES: dict[str, dict[str, int]] = {
    "demo": {"width": 192, "depth": 4, "heads": 4},
    "tiny": {"width": 512, "depth": 8, "heads": 8},
    "small": {"width": 768, "depth": 12, "heads": 12},
    "base": {"width": 1024, "depth": 24, "heads": 16},
    "1b": {"width": 2048, "depth": 24, "heads": 32},
    "sd3_medium": {"width": 1536, "depth": 24, "heads": 24},
}
Tensors = tuple[Tensor, ...]
MODALITIES = 2
WEIGHT_STD = 0.02
EMBEDDING_STD = 0.002
"""A tenth of the usual value. Adam moves each weight by about the learning rate, however small its gradient. From a
small start a rare token still changes direction in its few steps. The norm of the first block removes the scale."""


@dataclass(frozen=True)
class MMDiTConfig:
    """Shape of an `MMDiT`, independent of the data."""

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
        unit = 2 * self.heads
        if self.width % unit:
            nearest = max(unit, round(self.width / unit) * unit)
            raise UsageError(
                f"width {self.width} with heads {self.heads}: the width must be a multiple of 2 * heads = "
                f"{unit}, so that each head has the same even number of channels. "
                f"Set width to {nearest}, or change heads."
            )

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def modulation_width(self) -> int:
        """Width of the conditioning vector: `conditioning_width`, by default the width."""
        return self.conditioning_width or self.width


@dataclass(frozen=True)
class MultimodalMMDiTConfig:
    """Everything needed to build a `MultimodalMMDiT`. Saved as config.json. The lengths are maxima."""

    transformer: MMDiTConfig
    vocabulary_size: int
    latent_dim: int
    max_text_length: int
    max_latent_length: int = 1
    latent_grid: tuple[int, int] | None = None
    """Rows and columns of a picture's tokens, `max_latent_length` in all. Their positions are then 2-D."""

    def __post_init__(self) -> None:
        for name in ("vocabulary_size", "latent_dim", "max_text_length", "max_latent_length"):
            _require_positive(name, getattr(self, name))
        if isinstance(self.transformer, dict):  # as read from config.json
            object.__setattr__(self, "transformer", MMDiTConfig(**self.transformer))
        if self.latent_grid is not None:
            self._check_grid(self.latent_grid)

    def _check_grid(self, grid: Sequence[int]) -> None:
        rows, columns = grid
        object.__setattr__(self, "latent_grid", (rows, columns))  # config.json holds a list
        if rows * columns != self.max_latent_length or self.transformer.width % 4:
            raise UsageError(
                f"latent_grid {rows} x {columns} with max_latent_length {self.max_latent_length} and width "
                f"{self.transformer.width}: rows * columns tokens and a width that is a multiple of 4 are required"
            )

    def attention_needs(self, device: torch.device, precision: Precision, batch: int) -> AttentionNeeds:
        """Return the requirements on an attention kernel. Texts are padded."""
        length = self.max_text_length + self.max_latent_length
        deterministic = torch.are_deterministic_algorithms_enabled()
        shape = self.transformer
        dtype = dtype_of(precision)
        return AttentionNeeds(device, dtype, shape.head_width, shape.heads, length, batch, deterministic=deterministic)


@dataclass(frozen=True)
class ModelConfig:
    """Model options. Each value that `size` implies can be overridden."""

    size: Literal["demo", "tiny", "small", "base", "1b", "sd3_medium"] = "demo"
    """Width/depth/heads, and parameters of the whole model with a vocabulary of 16,384 (demo: 2,048): demo 192/4/4
    (7 M, trains on 2 CPU cores), tiny 512/8/8 (98 M), small 768/12/12 (0.29 B), base 1024/24/16 (0.96 B), 1b
    2048/24/32 (3.8 B: 1.2 B per stream, 1.2 B of modulation), sd3_medium 1536/24/24 (2.1 B) with the tanh GELU of
    SD3."""
    blocks_from: str | None = None
    """Folder or Hub id of SD3 in diffusers' form: the blocks start from its weights, and the rest is newly initialised.
    Needs size sd3_medium, bias true and qk_norm as in the source, false for SD3."""
    width: PositiveInt | None = None
    """Channels per token, a multiple of 2 * heads. None: by size. Cost grows with the square of the width."""
    depth: PositiveInt | None = None
    """Number of blocks. None: by size."""
    heads: PositiveInt | None = None
    """Attention heads, each of width / heads channels, best 64 or 128 on a GPU. None: by size."""
    conditioning_width: PositiveInt | None = None
    """Channels of the conditioning vector. Every block derives its shifts, scales and gates from it. None: the
    width. These layers then hold a third of the parameters, but take almost no time."""
    ffn_ratio: PositiveInt = 4
    """Hidden channels of a feed-forward layer, as a multiple of the width."""
    qk_norm: bool = True
    """RMSNorm on queries and keys of each head: keeps attention logits bounded, so that bf16 stays stable."""
    bias: bool = False
    """Biases in the linear layers of the blocks. 5 % slower, and redundant beside the shifts of the modulation."""

    def transformer(self) -> MMDiTConfig:
        """Resolve the size and its overrides into numbers."""
        named = SIZES[self.size]
        return MMDiTConfig(
            width=self.width or named["width"],
            depth=self.depth or named["depth"],
            heads=self.heads or named["heads"],
            conditioning_width=self.conditioning_width,
            ffn_ratio=self.ffn_ratio,
            qk_norm=self.qk_norm,
            bias=self.bias,
            tanh_gelu=self.size == "sd3_medium",
        )

    def multimodal(
        self,
        vocabulary_size: int,
        max_text_length: int,
        latent_shape: tuple[int, int],
        latent_grid: tuple[int, int] | None = None,
    ) -> MultimodalMMDiTConfig:
        """Return the config of the whole model for this vocabulary, text length and latent shape (L, Dz).

        `latent_grid` are the rows and columns of a picture's tokens, None for latents that are no picture.
        """
        max_latent_length, latent_dim = latent_shape
        return MultimodalMMDiTConfig(
            transformer=self.transformer(),
            vocabulary_size=vocabulary_size,
            latent_dim=latent_dim,
            max_text_length=max_text_length,
            max_latent_length=max_latent_length,
            latent_grid=latent_grid,
        )


class MMDiTOutput(NamedTuple):
    text_logits: Tensor  # (B, S, V)
    latents: Tensor  # (B, L, Dz)


class Stream(nn.Module):
    """One modality's part of a block. A `context_only` stream contributes keys and values and has no output."""

    checkpoint_parts: ClassVar[dict[str, str]] = {"ffn": "feed_forward"}

    def __init__(self, config: MMDiTConfig, context_only: bool) -> None:
        super().__init__()
        width = config.width
        # Without an output: only keys and values, and one shift and scale.
        projections = 2 if context_only else 3
        modulations = 2 if context_only else 6
        self.head_width = config.head_width
        self.context_only = context_only
        self.modulation = Modulation(config.modulation_width, width, modulations)
        self.qkv = nn.Linear(width, projections * width, bias=config.bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.out: nn.Linear | None = None
        self.ffn: FeedForward | None = None
        if config.qk_norm and not context_only:
            self.q_norm = RMSNorm(config.head_width)
        if config.qk_norm:
            self.k_norm = RMSNorm(config.head_width)
        if not context_only:
            self.out = nn.Linear(width, width, bias=config.bias)
            self.ffn = FeedForward(width, config.ffn_ratio, config.bias, config.tanh_gelu)

    def project(self, x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Project x (B, n, D) to queries (None if context only), keys, values, each (B, n, H, D/H)."""
        qkv = self.qkv(modulated_norm(x, shift, scale))
        heads = qkv.unflatten(-1, (-1, self.head_width))  # (B, n, 3 H, D/H), or 2 H if context only
        if self.context_only:
            k, v = heads.chunk(2, dim=2)
            return None, self._normalise_keys(k), v
        q, k, v = heads.chunk(3, dim=2)
        k = self._normalise_keys(k)
        if self.q_norm is not None:
            q = self.q_norm(q)
        return q, k, v

    def _normalise_keys(self, k: Tensor) -> Tensor:
        if self.k_norm is None:
            return k
        return self.k_norm(k)

    def add_attention(self, x: Tensor, attended: Tensor, gate: Tensor) -> Tensor:
        """Return x plus the gated, projected attention output (B, n, D)."""
        if self.out is None:
            return x
        return x + gate * self.out(attended)

    def feed_forward(self, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        """Return x plus the gated feed-forward layer."""
        if self.ffn is None:
            return x
        return x + gate * self.ffn(modulated_norm(x, shift, scale))


class MMDiTBlock(nn.Module):
    """Joint attention over all streams, then a feed-forward layer per stream.

    `context_only` names streams by position. They contribute keys and values and leave unchanged, like the text in
    SD3's last block.
    """

    checkpoint_parts: ClassVar[dict[str, str]] = {"attention": "attend_jointly"}

    def __init__(self, config: MMDiTConfig, streams: int = MODALITIES, context_only: Sequence[int] = ()) -> None:
        super().__init__()
        self.attend = TORCH_CHOICE
        self.streams = nn.ModuleList(Stream(config, context_only=i in context_only) for i in range(streams))

    def forward(self, tokens: Sequence[Tensor], conditioning: Tensor, mask: Any) -> list[Tensor]:
        """tokens: (B, n_i, D) per stream. conditioning (B, C) after SiLU. mask: None or from `self.attend.mask`."""
        streams = cast("list[Stream]", list(self.streams))
        modulations = [stream.modulation(conditioning) for stream in streams]
        tokens = self.attend_jointly(tokens, modulations, mask)
        outputs: list[Tensor] = []
        for stream, x, modulation in zip(streams, tokens, modulations, strict=True):
            if not stream.context_only:
                _, _, _, shift, scale, gate = modulation
                x = stream.feed_forward(x, shift, scale, gate)
            outputs.append(x)
        return outputs

    def attend_jointly(self, tokens: Sequence[Tensor], modulations: list[Tensors], mask: Any) -> list[Tensor]:
        """Compute the attention half of the block: each stream's tokens attend to the tokens of all streams."""
        streams = cast("list[Stream]", list(self.streams))
        projections: list[tuple[Tensor | None, Tensor, Tensor]] = []
        lengths: list[int] = []
        for stream, x, modulation in zip(streams, tokens, modulations, strict=True):
            shift, scale = modulation[:2]
            projections.append(stream.project(x, shift, scale))
            # A context-only stream has no queries, so nothing comes back for it.
            lengths.append(0 if stream.context_only else x.shape[1])
        q, k, v = (_join(parts) for parts in zip(*projections, strict=True))
        attended = self.attend(q, k, v, mask)  # (B, H, N, D/H)
        per_stream = attended.transpose(1, 2).flatten(2).split(lengths, dim=1)  # (B, n_i, D) each
        outputs: list[Tensor] = []
        for stream, x, output, modulation in zip(streams, tokens, per_stream, modulations, strict=True):
            if not stream.context_only:
                gate = modulation[2]
                x = stream.add_attention(x, output, gate)
            outputs.append(x)
        return outputs


def _join(parts: Sequence[Tensor | None]) -> Tensor:
    """Concatenate the streams' (B, n_i, H, d) to (B, H, N, d), a view that torch's kernels read without a copy."""
    present = [part for part in parts if part is not None]
    return torch.cat(present, dim=1).transpose(1, 2)


class MMDiT(nn.Module):
    """The transformer alone: streams of tokens in, the same streams out, each after a final RMSNorm.

    `context_only` streams end in the last block. They return without its update and without a norm, and are not
    meant to be read.
    """

    def __init__(self, config: MMDiTConfig, streams: int = MODALITIES, context_only: Sequence[int] = ()) -> None:
        super().__init__()
        named = set(context_only)
        if len(named) >= streams or not named <= set(range(streams)):
            raise UsageError(
                f"context_only {tuple(context_only)}: must name fewer than all of the {streams} streams, by "
                f"position 0 to {streams - 1}. Leave at least one stream out of it."
            )
        last = config.depth - 1
        self.blocks = nn.ModuleList(MMDiTBlock(config, streams) for _ in range(last))
        self.blocks.append(MMDiTBlock(config, streams, context_only))
        self.norms = nn.ModuleList()
        for i in range(streams):
            self.norms.append(nn.Identity() if i in named else RMSNorm(config.width))
        self.attend = TORCH_CHOICE
        self.apply(initialise)

    def forward(self, tokens: Sequence[Tensor], conditioning: Tensor, key_mask: Tensor | None) -> list[Tensor]:
        """tokens: (B, n_i, D) per stream. conditioning (B, C). key_mask (B, N), True = attended."""
        conditioning = F.silu(conditioning).to(tokens[0].dtype)
        mask = self.attend.mask(key_mask)
        # Blocks return lists. A tuple into the first block would compile a second graph.
        tokens = list(tokens)
        for block in self.blocks:
            tokens = block(tokens, conditioning, mask)
        return [norm(x) for norm, x in zip(self.norms, tokens, strict=True)]


class TimeConditioning(nn.Module):
    """Map two times (B,) to one conditioning vector (B, width), in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.text = TimestepEmbedder(width)
        self.latent = TimestepEmbedder(width)
        self.expand = Float32Linear(2 * width, 4 * width)
        self.project = Float32Linear(4 * width, width)

    def forward(self, text_time: Tensor, latent_time: Tensor) -> Tensor:
        both = torch.cat((self.text(text_time), self.latent(latent_time)), dim=-1)  # (B, 2 * width)
        hidden = self.expand(F.silu(both))  # (B, 4 * width)
        return self.project(F.silu(hidden))


class LatentEncoder(nn.Module):
    """Map latents (B, L, Dz) of any float dtype to tokens (B, L, D)."""

    def __init__(self, latent_dim: int, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(latent_dim, 2 * width)
        self.norm = nn.LayerNorm(2 * width, eps=NORM_EPS)
        self.project = nn.Linear(2 * width, width)

    def forward(self, latents: Tensor) -> Tensor:
        # The norm's dtype, because a quantised linear layer stores bits of another dtype than its input.
        x = self.expand(latents.to(self.norm.weight.dtype))  # (B, L, 2 D)
        return self.project(F.gelu(self.norm(x)))


class LatentHead(nn.Module):
    """Map tokens (B, L, D) to latents (B, L, Dz)."""

    def __init__(self, width: int, latent_dim: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 2 * width)
        self.project = nn.Linear(2 * width, latent_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(F.gelu(self.expand(x)))


class MultimodalMMDiT(nn.Module, PyTorchModelHubMixin):
    """Text tokens and continuous latents, each with its own time, through one MMDiT to one head each.

    Every forward runs every part, so every parameter has a gradient in every step under every strategy.
    `save_pretrained` writes config.json and model.safetensors. `from_pretrained` refuses mismatched weights.
    """

    # FSDP2 shards each of these modules as one unit.
    _no_split_modules: ClassVar[list[str]] = ["MMDiTBlock"]

    def __init__(self, config: MultimodalMMDiTConfig) -> None:
        super().__init__()
        width = config.transformer.width
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary_size, width)
        self.text_positions = nn.Embedding(config.max_text_length, width)
        self.latent_encoder = LatentEncoder(config.latent_dim, width)
        self.latent_positions = nn.Embedding(config.max_latent_length, width)
        if config.latent_grid is not None:
            # Learned positions start near zero and are added. Not saved: they follow from the config.
            self.register_buffer("grid_positions", sincos_2d(width, config.latent_grid), persistent=False)
        self.conditioning = TimeConditioning(config.transformer.modulation_width)
        self.text_head = nn.Linear(width, config.vocabulary_size)
        self.latent_head = LatentHead(width, config.latent_dim)
        self.apply(initialise)
        for head in (self.text_head, self.latent_head.project):
            nn.init.normal_(head.weight, std=WEIGHT_STD)
        # Initialises itself, so it comes after `apply`.
        self.transformer = MMDiT(config.transformer)

    def forward(
        self,
        tokens: Tensor,
        latents: Tensor,
        text_time: Tensor,
        latent_time: Tensor,
        text_mask: Tensor | None,
        grid: tuple[int, int] | None = None,
    ) -> MMDiTOutput:
        """tokens (B, S) int64, latents (B, L, Dz), times (B,) fp32 in [0, 1], text_mask (B, S) True = token.

        Pass `text_mask` None if no row is padded: torch then has faster attention kernels. Outputs keep the
        compute dtype. Losses convert them to fp32. `grid` are the rows and columns of pictures smaller than the
        config's `latent_grid`, from whose centre their positions are cut.
        """
        self._check_lengths(tokens, latents)
        text = self.token_embedding(tokens) + self.text_positions(_positions(tokens))  # (B, S, D)
        latent = self.latent_encoder(latents)
        latent = latent + self._latent_positions(latents, grid)  # (B, L, D)
        mask = None
        if text_mask is not None:
            mask = F.pad(text_mask, (0, latent.shape[1]), value=True)  # (B, S + L)
        conditioning = self.conditioning(text_time, latent_time)  # (B, C)
        text, latent = self.transformer((text, latent), conditioning, mask)
        return MMDiTOutput(self.text_head(text), self.latent_head(latent))

    def _latent_positions(self, latents: Tensor, grid: tuple[int, int] | None) -> Tensor:
        """Return the positions (L, D): learned ones, and of a picture's tokens also the sinusoids."""
        whole = self.config.latent_grid
        if whole is None:
            return self.latent_positions(_positions(latents))
        places = centred_places(grid or whole, whole, latents.device)
        fixed = cast(Tensor, self.grid_positions)
        learned = self.latent_positions(places)
        return learned + fixed[places].to(learned.dtype)

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
        # The mixin passes its own options together with the model's.
        download_options = {name: options.pop(name) for name in DOWNLOAD_OPTIONS if name in options}
        model = cls(**options)
        load_pretrained(model, model_id, map_location, strict, **download_options)
        return model.eval()


def initialise(module: nn.Module) -> None:
    """Initialise one layer, for `Module.apply`. Deterministic given `torch.manual_seed`.

    Xavier keeps the variance of a signal at any width. Embeddings start small. So do the heads, initialised by
    their owner: the first predictions are near uniform and near zero. Modulation starts at zero, so every block
    starts as the identity.
    """
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=EMBEDDING_STD)
    elif isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, Modulation):
        # Overrides the Xavier values of its linear layer: `apply` visits children first.
        nn.init.zeros_(module.linear.weight)


def _positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{name} {value}: must be at least 1. Set {name} to a positive whole number.")

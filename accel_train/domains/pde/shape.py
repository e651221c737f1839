"""Shape of a `PdeTransformer`: its tasks, its options and the configuration saved with it."""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

from accel_train.config import NonNegativeInt, PositiveInt, UsageError, refuse_without_effect
from accel_train.domains.models.token_blocks import BlockShape
from accel_train.domains.pde.tokens import DecoderShape, FieldGrid, divide
from accel_train.precision import Precision, dtype_of
from accel_train.speed.attention.table import AttentionNeeds


@dataclass(frozen=True)
class TaskShape:
    """Shape of one task: an equation and its fields."""

    name: str
    input_channels: int
    target_channels: int
    grid: tuple[int, int]
    """(H, W); 1-D fields have H = 1."""
    parameters: int = 0
    """Number of equation parameters per sample, such as speed or viscosity, of order one."""
    periodic: bool = False
    same_fields: bool = True
    """True: the target has the input's fields at a later time. One encoder and one set of heads serve both."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", tuple(self.grid))  # a list in config.json
        if self.same_fields and self.input_channels != self.target_channels:
            raise UsageError(
                f"task {self.name}: same_fields with {self.input_channels} input and {self.target_channels} target "
                "channels: equal numbers are required. Set same_fields to false."
            )

    @property
    def heads(self) -> int:
        """Number of decoded fields: the target's, then the input's if they differ."""
        return self.target_channels + (0 if self.same_fields else self.input_channels)


@dataclass(frozen=True)
class PdeModelConfig:
    """Sizes of operator, encoder and decoder."""

    operator: Literal["pdet_stack", "pdet_unet"] = "pdet_stack"
    """pdet_stack: `depth` blocks on all tokens. pdet_unet: `depths` blocks, with fewer tokens in the middle."""
    width: PositiveInt = 128
    """Channels per token inside the operator, a multiple of 2 * heads."""
    latent_width: PositiveInt | None = None
    """Channels of the latent tokens. None: the width, without a projection between the two."""
    depth: PositiveInt = 4
    """Blocks of pdet_stack."""
    depths: tuple[PositiveInt, ...] = (2, 2, 2)
    """Blocks of each stage of pdet_unet, an odd number of stages: tokens halve up to the middle one, then double."""
    heads: PositiveInt = 4
    """Attention heads of the operator. The decoder's heads have the same size, width / heads."""
    attention: Literal["standard", "channel_separated"] = "standard"
    """channel_separated: channel groups attend separately with shared weights. Only feed-forward layers mix them."""
    group_width: PositiveInt = 32
    """channel_separated: channels per group, a multiple of the head size and a divisor of the width."""
    ffn_ratio: PositiveInt = 4
    """Hidden channels of the operator's feed-forward layers, as a multiple of the width."""
    qk_norm: bool = True
    """RMSNorm on queries and keys of each of the operator's heads."""
    patch_1d: PositiveInt = 4
    """Points per patch of a 1-D field. A patch is a token."""
    patch_2d: PositiveInt = 4
    """Points per patch of a 2-D field along each side."""
    max_tokens: PositiveInt = 1024
    """Largest number of tokens. Neighbouring tokens are averaged until there are no more."""
    stem_width: PositiveInt = 8
    """Hidden channels per field in the convolutions before the patches."""
    octaves: PositiveInt = 6
    """Frequencies of coordinates: 1, 2, 4, ... waves over the domain."""
    decoder_width: PositiveInt = 64
    """Channels per query point, a multiple of the head size. There are more points than tokens, so this width
    dominates the cost of decoding."""
    decoder_layers: NonNegativeInt = 1
    """Cross-attentions from query points to tokens. 0: a point sees its own token only."""
    residual_depth: NonNegativeInt = 0
    """Blocks of the residual network, with the operator's width and heads. It refines a prediction on its grid and is
    trained from `objective.residual_from` on. 0: none."""

    def __post_init__(self) -> None:
        # At least 1: with more heads than channels the head width is 0, which is refused below without dividing by it.
        head, group = max(1, self.head_width), self.group
        faults = (
            (
                self.width % (2 * self.heads),
                f"width {self.width} with heads {self.heads}: a multiple of 2 * heads = {2 * self.heads} is required. "
                "Change one of them.",
            ),
            (
                self.decoder_width % head,
                f"decoder_width {self.decoder_width}: a multiple of the head size {head} (width / heads) is required. "
                f"Set it to {max(1, round(self.decoder_width / head)) * head}, or change heads.",
            ),
            (
                group % head or self.width % group,
                f"group_width {group}: a multiple of the head size {head} (width / heads) that divides the width "
                f"{self.width} is required. Set it to {head}.",
            ),
            (
                len(self.depths) % 2 == 0,
                f"depths {self.depths}: an odd number of stages is required, the middle one with the fewest tokens. "
                "Set for example 2 2 2.",
            ),
        )
        for wrong, message in faults:
            if wrong:
                raise UsageError(message)

    def refuse_unread(self) -> None:
        """Refuse options that have no effect in a run. The config of a checkpoint is not checked for this."""
        unread = {"depths": "pdet_unet"}
        if self.operator == "pdet_unet":
            unread = {"depth": "pdet_stack"}
        for name, other in unread.items():
            because = f"with model.operator: {self.operator}"
            refuse_without_effect(self, "model", [name], because, f"choose {other}")
        if self.attention == "standard":
            because = "with model.attention: standard"
            refuse_without_effect(self, "model", ["group_width"], because, "choose channel_separated")

    @property
    def stages(self) -> tuple[int, ...]:
        """Blocks of each stage of the operator. A stack has one stage."""
        return (self.depth,) if self.operator == "pdet_stack" else self.depths

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def group(self) -> int:
        """Channels per attention group."""
        return self.width if self.attention == "standard" else self.group_width

    def block(self) -> BlockShape:
        return BlockShape(self.width, self.head_width, self.group, self.ffn_ratio, self.qk_norm)

    def decoder(self) -> DecoderShape:
        return DecoderShape(self.latent, self.decoder_width, self.head_width, self.decoder_layers, self.octaves)

    @property
    def latent(self) -> int:
        return self.latent_width or self.width


DECIDE_SHAPES = tuple(f"model.{option.name}" for option in fields(PdeModelConfig) if option.name != "max_tokens")
"""Options that determine the shapes of the weights, some only together with others, such as heads with qk_norm. The
averaging of tokens down to max_tokens has no weights."""


@dataclass(frozen=True)
class PdeTransformerConfig:
    """Configuration of a `PdeTransformer`, saved as config.json."""

    tasks: tuple[TaskShape, ...]
    model: PdeModelConfig = field(default_factory=PdeModelConfig)

    def __post_init__(self) -> None:
        tasks: Any = self.tasks  # config.json gives plain dicts and lists
        model: Any = self.model
        tasks = tuple(TaskShape(**task) if isinstance(task, dict) else task for task in tasks)
        object.__setattr__(self, "tasks", tasks)
        if isinstance(model, dict):
            # JSON has no tuples, but a config must be comparable and hashable.
            values: dict[str, Any] = {**model, "depths": tuple(model["depths"])}
            object.__setattr__(self, "model", PdeModelConfig(**values))
        for task in tasks:
            self.grid(task)  # refuses a grid without a division into tokens

    def grid(self, task: TaskShape) -> FieldGrid:
        """Divide the task's fields into at most `max_tokens` tokens."""
        side = self.model.patch_1d if task.grid[0] == 1 else self.model.patch_2d
        return divide(task.name, task.grid, side, self.model.max_tokens, task.periodic)

    def attention_needs(self, device: torch.device, precision: Precision, batch: int) -> AttentionNeeds:
        """Describe the operator's attention for the largest task, from which a kernel is chosen."""
        model = self.model
        # One kernel serves all tasks, so it is chosen for the one with the most tokens.
        tokens = max(math.prod(self.grid(task).cells) for task in self.tasks)
        head = model.head_width
        heads = model.group // head
        groups = model.width // model.group  # attend as if they were samples
        dtype = dtype_of(precision)
        deterministic = torch.are_deterministic_algorithms_enabled()
        return AttentionNeeds(
            device, dtype, head, heads, tokens, batch * groups, False, deterministic=deterministic, cross=True
        )

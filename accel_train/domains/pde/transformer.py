"""A neural PDE operator: fields to latent tokens, a transformer that advances the tokens, fields at any points.

One model holds several tasks (equations on grids of their own) and a batch holds one. Encoders, embeddings of
parameters, places and query points, and heads belong to a task; the blocks of operator and decoder are shared.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

from accel_train.config import NonNegativeInt, PositiveInt, UsageError
from accel_train.domains.models.layers import NORM_EPS, Float32Linear, TimestepEmbedder
from accel_train.domains.models.mmdit import initialise
from accel_train.domains.models.pretrained import DOWNLOAD_OPTIONS, load_pretrained
from accel_train.domains.models.token_blocks import BlockShape, ModulatedBlock, double, halve
from accel_train.domains.pde.residual_network import FieldResidual, ResidualGuess
from accel_train.domains.pde.tokens import (
    IDLE_TOKENS,
    AnyPointDecoder,
    DecoderShape,
    FieldGrid,
    GridEncoder,
    wave_features,
    waves,
)
from accel_train.precision import Precision, dtype_of
from accel_train.speed.attention_table import AttentionNeeds

PARAMETER_OCTAVES = 4
PARAMETER_RANGE = 4.0
"""Length of the longest half wave over a parameter: normalised ones lie within -4 and 4."""


# ---------------------------------------------------------------------------------------------------------- options
@dataclass(frozen=True)
class TaskShape:
    """What a model must know of one equation and its fields."""

    name: str
    input_channels: int
    target_channels: int
    grid: tuple[int, int]
    """(H, W); 1-D fields have H = 1."""
    parameters: int = 0
    """Numbers of the equation that come with each sample, of order one: speed, viscosity."""
    periodic: bool = False
    same_fields: bool = True
    """The target is the input's fields later on: one encoder and one set of heads serve both."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", tuple(self.grid))  # a list in config.json
        if self.same_fields and self.input_channels != self.target_channels:
            raise UsageError(
                f"task {self.name}: same_fields with {self.input_channels} input and {self.target_channels} target "
                "channels: as many are required. Set same_fields to false."
            )

    @property
    def heads(self) -> int:
        """Fields that are decoded: the target's, then the input's where those are others."""
        return self.target_channels + (0 if self.same_fields else self.input_channels)


@dataclass(frozen=True)
class PdeModelConfig:
    """The shape of the operator, of what encodes for it and of what decodes."""

    operator: Literal["pdet_stack", "pdet_unet"] = "pdet_stack"
    """pdet_stack: `depth` blocks on all tokens. pdet_unet: `depths`, with fewer tokens in the middle."""
    width: PositiveInt = 128
    """Channels per token inside the operator, a multiple of 2 * heads."""
    latent_width: PositiveInt | None = None
    """Channels of the latent tokens. None: the width, without a projection between the two."""
    depth: PositiveInt = 4
    """Blocks of pdet_stack."""
    depths: tuple[PositiveInt, ...] = (2, 2, 2)
    """Blocks of each stage of pdet_unet, an odd number of stages: tokens halve up to the middle one, then double."""
    heads: PositiveInt = 4
    """Attention heads of the operator. Their size, width / heads, is that of the decoder's heads as well."""
    attention: Literal["standard", "channel_separated"] = "standard"
    """channel_separated: groups of channels attend apart, with the same weights; only feed-forward layers mix them."""
    group_width: PositiveInt = 32
    """Channels of a group of channel_separated: a multiple of the head size, and a divisor of the width."""
    ffn_ratio: PositiveInt = 4
    """Hidden channels of the operator's feed-forward layers, as a multiple of the width."""
    qk_norm: bool = True
    """RMSNorm on queries and keys of each of the operator's heads."""
    patch_1d: PositiveInt = 4
    """Points of a patch of a 1-D field. A patch is a token."""
    patch_2d: PositiveInt = 4
    """Points of a patch of a 2-D field along each side."""
    max_tokens: PositiveInt = 1024
    """Neighbouring tokens are averaged until there are no more than this."""
    stem_width: PositiveInt = 8
    """Hidden channels for each field in the convolutions before the patches."""
    octaves: PositiveInt = 6
    """Frequencies of coordinates: 1, 2, 4, ... waves over the domain."""
    decoder_width: PositiveInt = 64
    """Channels per query point, a multiple of the head size. There are more points than tokens, so this is what
    decoding costs."""
    decoder_layers: NonNegativeInt = 1
    """Cross-attentions from query points to tokens. 0: a point sees its own token only."""
    residual_depth: NonNegativeInt = 0
    """Blocks of the network that refines a prediction on its grid, of the operator's width and heads. 0: none. It
    learns from `objective.residual_from` on."""

    def __post_init__(self) -> None:
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
        """Raise ``UsageError`` for options that this operator or attention does not read.

        Of a run, not of a checkpoint, which was saved with whatever it had.
        """
        stack, plain = self.operator == "pdet_stack", self.attention == "standard"
        faults = (
            (stack, "depths", (2, 2, 2), "operator pdet_stack, which has depth", "pdet_unet"),
            (not stack, "depth", 4, "operator pdet_unet, which has depths", "pdet_stack"),
            (plain, "group_width", 32, "attention standard", "channel_separated"),
        )
        for unread, name, default, where, other in faults:
            if unread and (value := getattr(self, name)) != default:
                raise UsageError(
                    f"model.{name} {value}: has no effect on {where}. Leave it at {default}, or choose {other}."
                )

    @property
    def stages(self) -> tuple[int, ...]:
        """Blocks of each stage of the operator; a stack has one."""
        return (self.depth,) if self.operator == "pdet_stack" else self.depths

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def group(self) -> int:
        """Channels that attend together."""
        return self.width if self.attention == "standard" else self.group_width

    def block(self) -> BlockShape:
        return BlockShape(self.width, self.head_width, self.group, self.ffn_ratio, self.qk_norm)

    def decoder(self) -> DecoderShape:
        return DecoderShape(self.latent, self.decoder_width, self.head_width, self.decoder_layers, self.octaves)

    @property
    def latent(self) -> int:
        return self.latent_width or self.width


@dataclass(frozen=True)
class PdeTransformerConfig:
    """Everything needed to build a `PdeTransformer`; saved as config.json."""

    tasks: tuple[TaskShape, ...]
    model: PdeModelConfig = field(default_factory=PdeModelConfig)

    def __post_init__(self) -> None:
        given: Any = (self.tasks, self.model)
        tasks = tuple(TaskShape(**task) if isinstance(task, dict) else task for task in given[0])  # of config.json
        object.__setattr__(self, "tasks", tasks)
        if isinstance(given[1], dict):
            object.__setattr__(self, "model", PdeModelConfig(**given[1] | {"depths": tuple(given[1]["depths"])}))
        for task in tasks:
            self.grid(task)

    def grid(self, task: TaskShape) -> FieldGrid:
        """How the task's fields are cut into tokens, no more than `max_tokens`."""
        side = self.model.patch_1d if task.grid[0] == 1 else self.model.patch_2d
        option, patch = (f"patch_{1 if task.grid[0] == 1 else 2}d", (1 if task.grid[0] == 1 else side, side))
        cells, merged = [n // p for n, p in zip(task.grid, patch, strict=True)], [1, 1]
        if any(n % p for n, p in zip(task.grid, patch, strict=True)):
            raise UsageError(
                f"{option} {side}: the {task.grid[0]} x {task.grid[1]} points of task {task.name} must be a whole "
                f"number of patches. Set {option} to a divisor of the sides."
            )
        while math.prod(cells) > self.model.max_tokens:
            axis = int(cells[1] >= cells[0])
            if cells[axis] % 2:
                raise UsageError(
                    f"max_tokens {self.model.max_tokens}: the {cells[0]} x {cells[1]} tokens of task {task.name} are "
                    f"more and cannot be halved. Raise max_tokens or {option}."
                )
            cells[axis], merged[axis] = cells[axis] // 2, merged[axis] * 2
        return FieldGrid(task.grid, patch, (merged[0], merged[1]), task.periodic)

    def attention_needs(self, device: torch.device, precision: Precision, batch: int) -> AttentionNeeds:
        """What a kernel must do in the operator, by the largest task; `precision` is fp32, bf16 or fp16."""
        deterministic, model = torch.are_deterministic_algorithms_enabled(), self.model
        tokens = max(math.prod(self.grid(task).cells) for task in self.tasks)
        heads, rows = model.group // model.head_width, batch * (model.width // model.group)
        return AttentionNeeds(
            device,
            dtype_of(precision),
            model.head_width,
            heads,
            tokens,
            rows,
            False,
            deterministic=deterministic,
            cross=True,
        )


@dataclass(frozen=True)
class Parts:
    """What a forward computes: the same on every process. What is left out has gradients of zero."""

    reconstruction: bool = True
    """Decode the encoded input and target."""
    reencoding: bool = True
    """Decode the encoded target on its whole grid and encode that again."""
    operator: bool = True
    """Advance the tokens."""
    prediction: bool = True
    """Decode the advanced tokens; runs the operator."""
    train_encoder: bool = True
    """False: the operator reads the latents behind a stop-gradient, and its losses train nothing before it."""


ALL_PARTS = Parts()
PREDICTION = Parts(reconstruction=False, reencoding=False)
"""What evaluation needs."""


class PdeOutput(NamedTuple):
    """Latents and fields at the query points. None where `Parts` leaves it out, or where no target was given."""

    latent: Tensor | None  # (B, N, D), of the input
    target_latent: Tensor | None  # (B, N, D)
    input_reconstruction: Tensor | None  # (B, C, Q)
    target_reconstruction: Tensor | None  # (B, C', Q)
    reencoded: Tensor | None  # (B, N, D); the encoding that it should equal is behind a stop-gradient
    predicted_latent: Tensor | None  # (B, N, D)
    prediction: Tensor | None  # (B, C', Q)
    residual: Tensor | None = None  # (B, C', H, W), what a `ResidualGuess` lacks; then all there is but the size
    residual_size: Tensor | None = None  # (C',): logarithm of the size of what the prediction misses


NOTHING = PdeOutput(*[None] * 7)


# --------------------------------------------------------------------------------------------------------- operator
class Conditioning(nn.Module):
    """Time step (B,) and the equation's parameters (B, P) -> one vector (B, width), in fp32."""

    def __init__(self, config: PdeTransformerConfig) -> None:
        super().__init__()
        width = config.model.width
        self.time = TimestepEmbedder(width)
        self.counts = [task.parameters for task in config.tasks]
        self.parameters_of = nn.ModuleList(Float32Linear(parameter_features(count), width) for count in self.counts)
        self.project = Float32Linear(width, width)

    def forward(self, dt: Tensor, parameters: Tensor, task: int) -> Tensor:
        """Columns of `parameters` beyond the task's own are not read."""
        own = parameters[:, : self.counts[task]].float() / PARAMETER_RANGE
        # The constant is for tasks without parameters; its weights also tell the tasks apart.
        features = torch.cat((torch.ones_like(dt)[:, None], waves(own, PARAMETER_OCTAVES, periodic=False)), dim=-1)
        return self.project(F.silu(self.time(dt) + self.parameters_of[task](features)))


def parameter_features(count: int) -> int:
    return 1 + wave_features(count, PARAMETER_OCTAVES, periodic=False)


class LatentOperator(nn.Module):
    """Latent tokens (B, N, D) -> what is added to them: one step in time, or the way to the solution. Starts at zero.

    Tokens are told their places again: latents that were trained to be decoded need not keep them, for the decoder
    knows where each token lies, and attention would have to learn from tokens without order.
    """

    def __init__(self, config: PdeTransformerConfig) -> None:
        super().__init__()
        model = config.model
        self.stages, self.octaves = model.stages, model.octaves
        self.grids = [config.grid(task) for task in config.tasks]
        self.enter = nn.Identity() if model.latent == model.width else nn.Linear(model.latent, model.width)
        self.places = nn.ModuleList(nn.Linear(g.wave_features(model.octaves), model.width) for g in self.grids)
        self.blocks = nn.ModuleList(ModulatedBlock(model.block()) for _ in range(sum(self.stages)))
        self.skips = nn.ModuleList(nn.Linear(model.width, model.width) for _ in range(len(self.stages) // 2))
        self.leave = nn.Linear(model.width, model.latent)

    def forward(self, z: Tensor, conditioning: Tensor, task: int, keep: Tensor | None) -> Tensor:
        """conditioning (B, width) before SiLU; keep (B, blocks) of `drop_path`, or None."""
        x = self.enter(z)
        x = x + self.place(task).to(x.dtype)[: x.shape[1]]
        conditioning = F.silu(conditioning).to(x.dtype)
        skips: list[Tensor] = []
        blocks, middle = enumerate(self.blocks), len(self.stages) // 2
        for stage, depth in enumerate(self.stages):
            if stage > middle:
                skip = skips.pop()
                x = double(x, skip.shape[1]) + self.skips[stage - middle - 1](skip)
            for _, (number, block) in zip(range(depth), blocks):  # noqa: B905  the range ends it
                x = block(x, conditioning, None if keep is None else keep[:, number])
            if stage < middle:
                skips.append(x)
                x = halve(x)
        return self.leave(F.layer_norm(x, x.shape[-1:], eps=NORM_EPS))

    def place(self, task: int) -> Tensor:
        """Embedding (N, width) of where each of the task's tokens lies."""
        grid, layer = self.grids[task], cast(nn.Linear, self.places[task])
        points = grid.coordinates(layer.weight.device, of_tokens=True)
        return layer(waves(points, self.octaves, grid.periodic).to(layer.weight.dtype))


# ------------------------------------------------------------------------------------------------------------ model
class PdeTransformer(nn.Module, PyTorchModelHubMixin):
    """Encode, advance, decode.

    Every parameter takes part in every backward, whatever the task and the parts: DDP and ZeRO wait for the gradient
    of each, FSDP2 would leave none where they fill zeros, and an optimizer treats the two differently. What a forward
    does not use runs on a few zeros, and that times zero is added to the outputs. The sum over a parameter
    would not do: where weights are sharded they exist inside the forward of their own module only.
    """

    _no_split_modules: ClassVar[list[str]] = ["ModulatedBlock", "DecoderLayer"]  # what FSDP2 shards as one unit

    def __init__(self, config: PdeTransformerConfig) -> None:
        super().__init__()
        model = config.model
        self.config = config
        self.grids = [config.grid(task) for task in config.tasks]

        def encoder(channels: int, grid: FieldGrid) -> nn.Module:
            return GridEncoder(channels, grid, model.latent, model.stem_width, model.octaves)

        shapes = list(zip(config.tasks, self.grids, strict=True))
        self.encoders = nn.ModuleList(encoder(task.input_channels, grid) for task, grid in shapes)
        self.target_encoders = nn.ModuleList(
            nn.Identity() if task.same_fields else encoder(task.target_channels, grid) for task, grid in shapes
        )
        self.conditioning = Conditioning(config)
        self.operator = LatentOperator(config)
        self.decoder = AnyPointDecoder(self.grids, [task.heads for task in config.tasks], model.decoder())
        self.apply(initialise)
        nn.init.zeros_(self.operator.leave.weight)
        self.residual = self._build_residual() if model.residual_depth else None  # last: the rest starts as without it

    def _build_residual(self) -> FieldResidual:
        tasks, model = self.config.tasks, self.config.model
        counts = [task.input_channels for task in tasks], [task.target_channels for task in tasks]
        shape = model.block(), model.residual_depth, model.stem_width, model.octaves
        residual = FieldResidual(self.grids, *counts, *shape).apply(initialise)
        residual.start_at_zero()
        return residual

    def forward(
        self,
        input: Tensor | ResidualGuess,
        target: Tensor | None,
        parameters: Tensor,
        dt: Tensor,
        task: int,
        queries: Tensor | None = None,
        parts: Parts = ALL_PARTS,
        keep: Tensor | None = None,
    ) -> PdeOutput:
        """input (B, C, H, W), target (B, C', H, W) or None, parameters (B, P), dt (B,), all of one task, by its number.

        queries (B, Q, d) from 0 to 1 as in `FieldGrid.coordinates`, None for every point of the grid; keep (B, blocks)
        of `drop_path`. A `ResidualGuess` in place of the input is corrected, and nothing else is done; the conditioning
        is then behind a stop-gradient. All that is trained goes through here: what wraps a model for several processes
        sees nothing but its forward. Outputs have the dtype of the computation.
        """
        if isinstance(input, ResidualGuess):
            output = self._correct(input, self.conditioning(dt, parameters, task).detach(), task)
        else:
            points = self.grids[task].coordinates(input.device)[None] if queries is None else queries
            latent = self.encoders[task](input)
            target_latent = None if target is None else self._target_encoder(task)(target)
            predicted = None
            if parts.operator or parts.prediction:
                start = latent if parts.train_encoder else latent.detach()
                predicted = start + self.operator(start, self.conditioning(dt, parameters, task), task, keep)
            wanted = [latent, target_latent] if parts.reconstruction else [None, None]
            fields = self._decode([*wanted, predicted if parts.prediction else None], points, task)
            again = None if target_latent is None or not parts.reencoding else self._reencode(target_latent, task)
            size = None if self.residual is None or not parts.prediction else self.residual.size(task)
            output = PdeOutput(
                latent, target_latent, fields[0], fields[1], again, predicted, fields[2], residual_size=size
            )
        return self._with_all(output, task) if torch.is_grad_enabled() else output

    def _with_all(self, output: PdeOutput, task: int) -> PdeOutput:
        """The same numbers; the gradient reaches every parameter by whichever output a loss is made of."""
        every = (*self._unused(task, output), *(x for x in output if x is not None))
        zero = torch.stack([x.float().sum() for x in every]).sum() * 0
        return PdeOutput._make(None if x is None else x + zero.to(x.dtype) for x in output)

    def _correct(self, fields: ResidualGuess, conditioning: Tensor, task: int) -> PdeOutput:
        if self.residual is None:
            raise UsageError(
                "model.residual_depth 0: there is no network that corrects a residual. Set it to 1 or more."
            )
        return NOTHING._replace(
            residual=self.residual(fields, conditioning, task), residual_size=self.residual.size(task)
        )

    def _target_encoder(self, task: int) -> nn.Module:
        return (self.encoders if self.config.tasks[task].same_fields else self.target_encoders)[task]

    def _decode(self, latents: Sequence[Tensor | None], points: Tensor, task: int) -> list[Tensor | None]:
        """Fields of the latents of input, target and prediction, by one run of the decoder."""
        shape, given = self.config.tasks[task], [z for z in latents if z is not None]
        if not given:
            return [None, None, None]
        decoded = iter(self.decoder(torch.cat(given), points, task).chunk(len(given)))
        of_target = slice(0, shape.target_channels)
        of_input = of_target if shape.same_fields else slice(shape.target_channels, None)
        parts = zip(latents, (of_input, of_target, of_target), strict=True)
        return [None if z is None else next(decoded)[:, own] for z, own in parts]

    def _reencode(self, target_latent: Tensor, task: int) -> Tensor:
        shape, grid = self.config.tasks[task], self.grids[task]
        points = grid.coordinates(target_latent.device)[None]
        fields = self.decoder(target_latent.detach(), points, task)[:, : shape.target_channels]
        return self._target_encoder(task)(fields.unflatten(-1, shape.grid))

    def _unused(self, task: int, output: PdeOutput) -> Iterator[Tensor]:
        """What every module makes of zeros that has made nothing of this output."""
        like = next(x for x in output if x is not None)
        tokens = min(IDLE_TOKENS << len(self.config.model.stages) // 2, math.prod(self.grids[task].cells))
        token = like.new_zeros(1, tokens, self.config.model.latent)
        for other, (shape, grid) in enumerate(zip(self.config.tasks, self.grids, strict=True)):
            point = torch.zeros(1, 1, grid.dimensions, device=like.device)
            sides = [p * m for p, m in zip(grid.patch, grid.merged, strict=True)]
            numbers = torch.zeros(1, 1 + shape.parameters, device=like.device)
            if other != task or output.latent is None:
                yield self.encoders[other](torch.zeros(1, shape.input_channels, *sides, device=like.device))
            if other != task:
                yield self.decoder.read(self.decoder.embed(token, point, other), other)
                yield self.operator.place(other)
            if not shape.same_fields and (other != task or output.target_latent is None):
                target = torch.zeros(1, shape.target_channels, *sides, device=like.device)
                yield self._target_encoder(other)(target)
            if other != task or output.predicted_latent is None:
                conditioning = self.conditioning(numbers[:, 0], numbers[:, 1:], other)
                yield conditioning if other != task else self.operator(token, conditioning, task, None)
            if other == task and all(x is None for x in output[2:5]) and output.prediction is None:
                yield self.decoder(token, point, task)
        if self.residual is not None:
            yield from self.residual.idle(None if output.residual is None else task, like)

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, map_location: str = "cpu", strict: bool = True, **options: Any
    ) -> "PdeTransformer":
        of_the_hub = {name: options.pop(name) for name in DOWNLOAD_OPTIONS if name in options}
        model = cls(**options)
        load_pretrained(model, model_id, map_location, strict, **of_the_hub)
        return model.eval()

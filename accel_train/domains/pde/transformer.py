"""A neural PDE operator: an encoder to latent tokens, a transformer on the tokens, a decoder at any points.

One model holds several tasks, equations on their own grids. A batch holds one task. Encoders, heads and the embeddings
of parameters, positions and query points belong to a task. The blocks of operator and decoder are shared.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.domains.models.layers import NORM_EPS, Float32Linear, TimestepEmbedder
from accel_train.domains.models.mmdit import initialise
from accel_train.domains.models.pretrained import DOWNLOAD_OPTIONS, load_pretrained
from accel_train.domains.models.token_blocks import ModulatedBlock, double, halve
from accel_train.domains.pde.residual_network import FieldResidual, ResidualGuess
from accel_train.domains.pde.shape import PdeTransformerConfig
from accel_train.domains.pde.tokens import (
    IDLE_TOKENS,
    AnyPointDecoder,
    FieldGrid,
    GridEncoder,
    wave_features,
    waves,
)

PARAMETER_OCTAVES = 4
PARAMETER_RANGE = 4.0
"""Length of the longest half wave over a parameter. Normalised parameters lie between -4 and 4."""


@dataclass(frozen=True)
class Parts:
    """Parts of a forward, the same on every process. Parts left out have gradients of zero."""

    reconstruction: bool = True
    """Decode the encoded input and target."""
    reencoding: bool = True
    """Decode the encoded target on its whole grid and encode the result again."""
    operator: bool = True
    """Advance the tokens."""
    prediction: bool = True
    """Advance the tokens and decode them."""
    train_encoder: bool = True
    """False: the operator's input is behind a stop-gradient, so its losses do not train the encoder."""


ALL_PARTS = Parts()
PREDICTION = Parts(reconstruction=False, reencoding=False)
"""Parts for evaluation."""


class PdeOutput(NamedTuple):
    """Latents and fields at the query points. None for parts left out, and for all of the target without a target."""

    latent: Tensor | None  # (B, N, D), of the input
    target_latent: Tensor | None  # (B, N, D)
    input_reconstruction: Tensor | None  # (B, C, Q)
    target_reconstruction: Tensor | None  # (B, C', Q)
    reencoded: Tensor | None  # (B, N, D), to equal the target latent, which is behind a stop-gradient
    predicted_latent: Tensor | None  # (B, N, D)
    prediction: Tensor | None  # (B, C', Q)
    residual: Tensor | None = None  # (B, C', H, W), correction of a `ResidualGuess`, alone with the size
    residual_size: Tensor | None = None  # (C',), logarithm of the residual's size


NOTHING = PdeOutput(*[None] * 7)


# --------------------------------------------------------------------------------------------------------- operator
class Conditioning(nn.Module):
    """Embedding of time step (B,) and equation parameters (B, P) to one vector (B, width), in fp32."""

    def __init__(self, config: PdeTransformerConfig) -> None:
        super().__init__()
        width = config.model.width
        self.time = TimestepEmbedder(width)
        self.counts = [task.parameters for task in config.tasks]
        self.parameters_of = nn.ModuleList(Float32Linear(parameter_features(count), width) for count in self.counts)
        self.project = Float32Linear(width, width)

    def forward(self, dt: Tensor, parameters: Tensor, task: int) -> Tensor:
        """Embed a batch. Columns of `parameters` beyond the task's own are not read."""
        # In fp32: two neighbouring parameters of a fine range would be one number in bf16.
        own = parameters[:, : self.counts[task]].float() / PARAMETER_RANGE
        # The constant serves tasks without parameters. Its weights also distinguish the tasks.
        constant = torch.ones_like(dt)[:, None]  # (B, 1)
        own_waves = waves(own, PARAMETER_OCTAVES, periodic=False)  # (B, features)
        features = torch.cat((constant, own_waves), dim=-1)
        embedded = self.time(dt) + self.parameters_of[task](features)
        return self.project(F.silu(embedded))


def parameter_features(count: int) -> int:
    return 1 + wave_features(count, PARAMETER_OCTAVES, periodic=False)


class LatentOperator(nn.Module):
    """Operator on latent tokens (B, N, D): returns their change in one time step, or to the solution.

    Starts at zero. Token positions are embedded again, because latents trained for the decoder need not contain them:
    the decoder knows the place of each token.
    """

    def __init__(self, config: PdeTransformerConfig) -> None:
        super().__init__()
        model = config.model
        self.stages = model.stages
        self.octaves = model.octaves
        self.grids = [config.grid(task) for task in config.tasks]
        # Blocks may be wider than the latents, which the decoder reads and the data is compressed to.
        self.enter = nn.Identity()
        if model.latent != model.width:
            self.enter = nn.Linear(model.latent, model.width)
        width = model.width
        features = [grid.wave_features(model.octaves) for grid in self.grids]
        self.places = nn.ModuleList(nn.Linear(count, width) for count in features)
        self.blocks = nn.ModuleList(ModulatedBlock(model.block()) for _ in range(sum(self.stages)))
        pairs = len(self.stages) // 2
        self.skips = nn.ModuleList(nn.Linear(width, width) for _ in range(pairs))
        self.leave = nn.Linear(model.width, model.latent)

    def forward(self, z: Tensor, conditioning: Tensor, task: int, keep: Tensor | None) -> Tensor:
        """Advance tokens. conditioning (B, width) is before SiLU, keep (B, blocks) is of `drop_path` or None."""
        x = self.enter(z)  # (B, N, width)
        place = self.place(task).to(x.dtype)  # (N, width)
        # Idle runs have fewer tokens than the grid.
        x = x + place[: x.shape[1]]
        conditioning = F.silu(conditioning).to(x.dtype)
        skips: list[Tensor] = []
        middle = len(self.stages) // 2
        first = 0
        for stage, depth in enumerate(self.stages):
            if stage > middle:
                # The last stage before the middle meets the first one behind it, as in a U-Net.
                skip = skips.pop()
                doubled = double(x, skip.shape[1])
                # Halving lost the difference between neighbours, and the skip brings it back.
                x = doubled + self.skips[stage - middle - 1](skip)
            for number in range(first, first + depth):
                kept = None if keep is None else keep[:, number]
                x = self.blocks[number](x, conditioning, kept)
            first += depth
            if stage < middle:
                skips.append(x)
                x = halve(x)
        normalised = F.layer_norm(x, x.shape[-1:], eps=NORM_EPS)
        return self.leave(normalised)

    def place(self, task: int) -> Tensor:
        """Embed the positions of the task's tokens: (N, width)."""
        grid = self.grids[task]
        layer = cast(nn.Linear, self.places[task])
        points = grid.coordinates(layer.weight.device, of_tokens=True)
        features = waves(points, self.octaves, grid.periodic)
        return layer(features.to(layer.weight.dtype))


# ------------------------------------------------------------------------------------------------------------ model
class PdeTransformer(nn.Module, PyTorchModelHubMixin):
    """Neural operator: encode, advance, decode.

    Every parameter takes part in every backward, whatever the task and the parts. DDP and ZeRO wait for each gradient.
    FSDP2 would leave no gradient where they fill in zeros, and an optimizer treats the two differently.
    """

    _no_split_modules: ClassVar[list[str]] = ["ModulatedBlock", "DecoderLayer"]  # sharded as one unit by FSDP2

    def __init__(self, config: PdeTransformerConfig) -> None:
        super().__init__()
        model = config.model
        self.config = config
        self.grids = [config.grid(task) for task in config.tasks]

        def encoder(channels: int, grid: FieldGrid) -> nn.Module:
            return GridEncoder(channels, grid, model.latent, model.stem_width, model.octaves)

        shapes = list(zip(config.tasks, self.grids, strict=True))
        self.encoders = nn.ModuleList(encoder(task.input_channels, grid) for task, grid in shapes)
        # Where the target has the input's fields, the input's encoder serves both.
        self.target_encoders = nn.ModuleList(
            nn.Identity() if task.same_fields else encoder(task.target_channels, grid) for task, grid in shapes
        )
        self.conditioning = Conditioning(config)
        self.operator = LatentOperator(config)
        heads = [task.heads for task in config.tasks]
        self.decoder = AnyPointDecoder(self.grids, heads, model.decoder())
        # After all parts exist: every linear layer starts by one rule, and the exceptions follow.
        self.apply(initialise)
        nn.init.zeros_(self.operator.leave.weight)  # it starts as persistence
        # Built last, so the other weights start with the same values with and without it.
        self.residual = self._build_residual() if model.residual_depth else None

    def _build_residual(self) -> FieldResidual:
        model = self.config.model
        inputs = [task.input_channels for task in self.config.tasks]
        targets = [task.target_channels for task in self.config.tasks]
        residual = FieldResidual(
            self.grids, inputs, targets, model.block(), model.residual_depth, model.stem_width, model.octaves
        )
        residual.apply(initialise)
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
        """Run the model on input (B, C, H, W), target (B, C', H, W) or None, parameters (B, P) and dt (B,) of one task.

        queries (B, Q, d) are from 0 to 1 as in `FieldGrid.coordinates`, None for every point of the grid. keep
        (B, blocks) is of `drop_path`. A `ResidualGuess` as input is corrected, with the conditioning behind a
        stop-gradient, and nothing else is computed. All training goes through this function: a wrapper for several
        processes sees only the forward. Outputs have the compute dtype.
        """
        if isinstance(input, ResidualGuess):
            output = self._correct(input, self.conditioning(dt, parameters, task).detach(), task)
        else:
            points = self.grids[task].coordinates(input.device)[None] if queries is None else queries
            latent = self.encoders[task](input)
            target_latent = None if target is None else self._target_encoder(task)(target)
            predicted = None
            if parts.operator or parts.prediction:
                # The stage that learns the operator alone keeps the latents where the decoder knows them.
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
        """Connect every output to every parameter, without changing a value."""
        # Zero times the outputs of the unused modules. A sum over the parameters would not do, because sharded weights
        # exist only inside the forward of their own module.
        present = [x for x in output if x is not None]
        tensors = [*self._unused(task, output), *present]
        sums = [x.float().sum() for x in tensors]
        zero = torch.stack(sums).sum() * 0
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
        encoders = self.encoders if self.config.tasks[task].same_fields else self.target_encoders
        return encoders[task]

    def _decode(self, latents: Sequence[Tensor | None], points: Tensor, task: int) -> list[Tensor | None]:
        """Decode the latents of input, target and prediction in one run of the decoder."""
        shape = self.config.tasks[task]
        present = [z for z in latents if z is not None]
        if not present:
            return [None, None, None]
        together = self.decoder(torch.cat(present), points, task)  # (k * B, fields, Q)
        decoded = iter(together.chunk(len(present)))
        of_target = slice(0, shape.target_channels)
        # Fields that are in input and target alike share a head.
        of_input = of_target if shape.same_fields else slice(shape.target_channels, None)
        channels = (of_input, of_target, of_target)
        fields: list[Tensor | None] = []
        for latent, own in zip(latents, channels, strict=True):
            fields.append(None if latent is None else next(decoded)[:, own])
        return fields

    def _reencode(self, target_latent: Tensor, task: int) -> Tensor:
        shape = self.config.tasks[task]
        points = self.grids[task].coordinates(target_latent.device)[None]
        # Detached: the loss asks the decoder and the encoder to agree, not the latent to move to where they do.
        fields = self.decoder(target_latent.detach(), points, task)[:, : shape.target_channels]
        return self._target_encoder(task)(fields.unflatten(-1, shape.grid))

    def _unused(self, task: int, output: PdeOutput) -> Iterator[Tensor]:
        """Run the modules unused by this output on zeros and yield their outputs."""
        like = next(x for x in output if x is not None)
        # The operator halves them once per stage on the way to its middle, where IDLE_TOKENS have to be left.
        halvings = len(self.config.model.stages) // 2
        tokens = min(IDLE_TOKENS << halvings, math.prod(self.grids[task].cells))
        token = like.new_zeros(1, tokens, self.config.model.latent)
        for other in range(len(self.grids)):
            if other == task:
                yield from self._unused_parts(task, token, output)
            else:
                yield from self._unused_task(other, token)
        if self.residual is not None:
            yield from self.residual.idle(None if output.residual is None else task, like)

    def _unused_task(self, task: int, token: Tensor) -> Iterator[Tensor]:
        """Run the modules of a task that has no sample in this batch."""
        input, target, point, numbers = self._zeros(task, token.device)
        # A field of one token is the least that every weight of the encoder takes part in.
        yield self.encoders[task](input)
        yield self.decoder.read(self.decoder.embed(token, point, task), task)
        yield self.operator.place(task)
        if not self.config.tasks[task].same_fields:
            yield self._target_encoder(task)(target)
        yield self.conditioning(numbers[:, 0], numbers[:, 1:], task)

    def _unused_parts(self, task: int, token: Tensor, output: PdeOutput) -> Iterator[Tensor]:
        """Run the modules of the batch's own task that its terms of the loss leave out."""
        input, target, point, numbers = self._zeros(task, token.device)
        if output.latent is None:
            yield self.encoders[task](input)
        if not self.config.tasks[task].same_fields and output.target_latent is None:
            yield self._target_encoder(task)(target)
        if output.predicted_latent is None:
            conditioning = self.conditioning(numbers[:, 0], numbers[:, 1:], task)
            yield self.operator(token, conditioning, task, None)
        if all(x is None for x in output[2:5]) and output.prediction is None:  # nothing was decoded
            yield self.decoder(token, point, task)

    def _zeros(self, task: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return an input and a target of one token, a query point, and a time step with its parameters."""
        shape = self.config.tasks[task]
        grid = self.grids[task]
        sides = (grid.patch[0] * grid.merged[0], grid.patch[1] * grid.merged[1])
        shapes = (shape.input_channels, *sides), (shape.target_channels, *sides), (1, grid.dimensions)
        input, target, point = (torch.zeros(1, *sizes, device=device) for sizes in shapes)
        return input, target, point, torch.zeros(1, 1 + shape.parameters, device=device)

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, map_location: str = "cpu", strict: bool = True, **options: Any
    ) -> "PdeTransformer":
        download_options = {name: options.pop(name) for name in DOWNLOAD_OPTIONS if name in options}
        model = cls(**options)
        load_pretrained(model, model_id, map_location, strict, **download_options)
        return model.eval()

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
from accel_train.domains.models.layers import NORM_EPS
from accel_train.domains.models.mmdit import initialise
from accel_train.domains.models.pretrained import DOWNLOAD_OPTIONS, load_pretrained
from accel_train.domains.models.token_blocks import ModulatedBlock, double, halve
from accel_train.domains.pde.conditioning import Conditioning
from accel_train.domains.pde.residual.network import FieldResidual, ResidualGuess
from accel_train.domains.pde.shape import PdeTransformerConfig
from accel_train.domains.pde.tokens import (
    IDLE_TOKENS,
    AnyPointDecoder,
    FieldGrid,
    GridEncoder,
    waves,
)


@dataclass(frozen=True)
class Parts:
    """Parts of a forward, the same on every process. The parameters of omitted parts get zero gradients."""

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
"""Parts of a forward for evaluation."""


class PdeOutput(NamedTuple):
    """Latents and fields at the query points. None for omitted parts, and for those of the target if there is none."""

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
class LatentOperator(nn.Module):
    """Operator on latent tokens (B, N, D). It returns their change over one time step, or from input to solution.

    The change is zero at initialisation. Token positions are embedded again, because the latents need not contain them:
    the decoder, which they are trained for, knows the position of each token.
    """

    def __init__(self, config: PdeTransformerConfig) -> None:
        super().__init__()
        model = config.model
        self.stages = model.stages
        self.octaves = model.octaves
        self.grids = [config.grid(task) for task in config.tasks]
        # Blocks may be wider than the latents, to which the data are compressed and which the decoder reads.
        self.enter = nn.Identity()
        if model.latent != model.width:
            self.enter = nn.Linear(model.latent, model.width)
        width = model.width
        features = [grid.wave_features(model.octaves) for grid in self.grids]
        self.places = nn.ModuleList(nn.Linear(count, width) for count in features)
        depth = sum(self.stages)
        self.blocks = nn.ModuleList(ModulatedBlock(model.block()) for _ in range(depth))
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
                # As in a U-Net, the last stage before the middle connects to the first one after it.
                skip = skips.pop()
                doubled = double(x, skip.shape[1])
                # Halving lost the differences between neighbours, which the skip connection restores.
                merge = self.skips[stage - middle - 1]
                x = doubled + merge(skip)
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
class _Zeros(NamedTuple):
    """Zero arguments for modules that a batch does not use: one sample of one token."""

    input: Tensor  # (1, C, p, q)
    target: Tensor  # (1, C', p, q)
    point: Tensor  # (1, 1, d)
    dt: Tensor  # (1,)
    parameters: Tensor  # (1, P)


class PdeTransformer(nn.Module, PyTorchModelHubMixin):
    """Neural operator: encode, advance, decode.

    Every parameter takes part in every backward, whatever the task and the parts. DDP and ZeRO wait for every gradient.
    For an unused parameter they fill in zeros, where FSDP2 leaves None, which an optimizer treats differently.
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
        self.target_encoders = nn.ModuleList()
        for task, grid in shapes:
            own = nn.Identity()
            # If the target has the same fields as the input, one encoder serves both.
            if not task.same_fields:
                own = encoder(task.target_channels, grid)
            self.target_encoders.append(own)
        parameters = [task.parameters for task in config.tasks]
        self.conditioning = Conditioning(model.width, parameters)
        self.operator = LatentOperator(config)
        heads = [task.heads for task in config.tasks]
        self.decoder = AnyPointDecoder(self.grids, heads, model.decoder())
        # Once all parts exist, all linear layers are initialised by one rule. The exceptions follow.
        self.apply(initialise)
        nn.init.zeros_(self.operator.leave.weight)  # it starts as persistence
        # Built last, so that the other weights get the same initial values with and without it.
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
        (B, blocks) is of `drop_path`. For a `ResidualGuess` as input, only its correction is computed, with the
        conditioning detached. All training goes through this function, because wrappers such as DDP only see the
        forward. Outputs have the compute dtype.
        """
        if isinstance(input, ResidualGuess):
            conditioning = self.conditioning(dt, parameters, task)
            output = self._correct(input, conditioning.detach(), task)
        else:
            latent = self.encoders[task](input)
            target_latent = None
            if target is not None:
                target_latent = self._target_encoder(task)(target)
            predicted = None
            if parts.operator or parts.prediction:
                # A frozen encoder's latents are detached, so that they stay as the decoder learned them.
                start = latent if parts.train_encoder else latent.detach()
                conditioning = self.conditioning(dt, parameters, task)
                predicted = start + self.operator(start, conditioning, task, keep)
            output = self._read_out(latent, target_latent, predicted, queries, task, parts)
        if torch.is_grad_enabled():
            output = self._with_all(output, task)
        return output

    def _read_out(
        self,
        latent: Tensor,
        target_latent: Tensor | None,
        predicted: Tensor | None,
        queries: Tensor | None,
        task: int,
        parts: Parts,
    ) -> PdeOutput:
        """Decode the latents that ``parts`` select, and build the output."""
        points = queries
        if points is None:
            points = self.grids[task].coordinates(latent.device)[None]
        decoded: list[Tensor | None] = [None, None, None]
        if parts.reconstruction:
            decoded[:2] = [latent, target_latent]
        if parts.prediction:
            decoded[2] = predicted
        of_input, of_target, of_prediction = self._decode(decoded, points, task)
        again = None
        if target_latent is not None and parts.reencoding:
            again = self._reencode(target_latent, task)
        size = None
        if self.residual is not None and parts.prediction:
            size = self.residual.size(task)
        return PdeOutput(
            latent=latent,
            target_latent=target_latent,
            input_reconstruction=of_input,
            target_reconstruction=of_target,
            reencoded=again,
            predicted_latent=predicted,
            prediction=of_prediction,
            residual_size=size,
        )

    def _with_all(self, output: PdeOutput, task: int) -> PdeOutput:
        """Make every output depend on every parameter without changing its value, so that all get gradients."""
        # Zero times the outputs of the unused modules. A sum over the parameters would not do, because sharded weights
        # exist only inside the forward of their own module.
        present = [x for x in output if x is not None]
        tensors = [*self._unused(task, output), *present]
        sums = [x.float().sum() for x in tensors]
        zero = torch.stack(sums).sum() * 0
        connected = [None if x is None else x + zero.to(x.dtype) for x in output]
        return PdeOutput._make(connected)

    def _correct(self, fields: ResidualGuess, conditioning: Tensor, task: int) -> PdeOutput:
        if self.residual is None:
            raise UsageError(
                "model.residual_depth 0: there is no network that corrects a residual. Set it to 1 or more."
            )
        correction = self.residual(fields, conditioning, task)
        return NOTHING._replace(residual=correction, residual_size=self.residual.size(task))

    def _target_encoder(self, task: int) -> nn.Module:
        if self.config.tasks[task].same_fields:
            return self.encoders[task]
        return self.target_encoders[task]

    def _decode(self, latents: Sequence[Tensor | None], points: Tensor, task: int) -> list[Tensor | None]:
        """Decode the latents of input, target and prediction in one run of the decoder."""
        shape = self.config.tasks[task]
        present = [z for z in latents if z is not None]
        if not present:
            return [None, None, None]
        together = self.decoder(torch.cat(present), points, task)  # (k * B, fields, Q)
        decoded = iter(together.chunk(len(present)))
        of_target = slice(0, shape.target_channels)
        # A field that is in both input and target has one head for both.
        of_input = of_target if shape.same_fields else slice(shape.target_channels, None)
        channels = (of_input, of_target, of_target)
        fields: list[Tensor | None] = []
        for latent, own in zip(latents, channels, strict=True):
            if latent is None:
                fields.append(None)
                continue
            every_field = next(decoded)
            fields.append(every_field[:, own])
        return fields

    def _reencode(self, target_latent: Tensor, task: int) -> Tensor:
        shape = self.config.tasks[task]
        points = self.grids[task].coordinates(target_latent.device)[None]
        # Detached: the loss should make decoder and encoder agree, not move the latent to where they do.
        decoded = self.decoder(target_latent.detach(), points, task)  # (B, fields, H * W)
        fields = decoded[:, : shape.target_channels].unflatten(-1, shape.grid)
        return self._target_encoder(task)(fields)

    def _unused(self, task: int, output: PdeOutput) -> Iterator[Tensor]:
        """Run the modules unused by this output on zeros and yield their outputs."""
        like = next(x for x in output if x is not None)
        # Each stage before the middle halves the tokens, and IDLE_TOKENS must be left at the middle.
        halvings = len(self.config.model.stages) // 2
        cells = math.prod(self.grids[task].cells)
        tokens = min(IDLE_TOKENS << halvings, cells)
        token = like.new_zeros(1, tokens, self.config.model.latent)
        for other in range(len(self.grids)):
            if other == task:
                yield from self._unused_parts(task, token, output)
            else:
                yield from self._unused_task(other, token)
        if self.residual is not None:
            ran = None if output.residual is None else task
            yield from self.residual.idle(ran, like)

    def _unused_task(self, task: int, token: Tensor) -> Iterator[Tensor]:
        """Run the modules of a task that has no sample in this batch."""
        zeros = self._zeros(task, token.device)
        # A field of one token is the smallest that uses every weight of the encoder.
        yield self.encoders[task](zeros.input)
        query = self.decoder.embed(token, zeros.point, task)
        yield self.decoder.read(query, task)
        yield self.operator.place(task)
        if not self.config.tasks[task].same_fields:
            yield self._target_encoder(task)(zeros.target)
        yield self.conditioning(zeros.dt, zeros.parameters, task)

    def _unused_parts(self, task: int, token: Tensor, output: PdeOutput) -> Iterator[Tensor]:
        """Run the modules of the batch's own task that its loss terms do not use."""
        zeros = self._zeros(task, token.device)
        same_fields = self.config.tasks[task].same_fields
        if output.latent is None:
            yield self.encoders[task](zeros.input)
        if not same_fields and output.target_latent is None:
            yield self._target_encoder(task)(zeros.target)
        if output.predicted_latent is None:
            conditioning = self.conditioning(zeros.dt, zeros.parameters, task)
            yield self.operator(token, conditioning, task, None)
        # Re-encoding runs the decoder as well, so any of these outputs means that it has run.
        decoded = (
            output.input_reconstruction,
            output.target_reconstruction,
            output.reencoded,
            output.prediction,
        )
        if all(x is None for x in decoded):
            yield self.decoder(token, zeros.point, task)

    def _zeros(self, task: int, device: torch.device) -> _Zeros:
        shape = self.config.tasks[task]
        grid = self.grids[task]

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(1, *sizes, device=device)

        return _Zeros(
            input=zeros(shape.input_channels, *grid.points_per_token),
            target=zeros(shape.target_channels, *grid.points_per_token),
            point=zeros(1, grid.dimensions),
            dt=zeros(),
            parameters=zeros(shape.parameters),
        )

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, map_location: str = "cpu", strict: bool = True, **options: Any
    ) -> "PdeTransformer":
        download_options = {name: options.pop(name) for name in DOWNLOAD_OPTIONS if name in options}
        model = cls(**options)
        load_pretrained(model, model_id, map_location, strict, **download_options)
        return model.eval()

"""Pipeline of a neural PDE operator: predicted fields in physical units, one step or a rollout."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel_train import rng
from accel_train.config import PositiveInt, Seed, UsageError, expand_path
from accel_train.data.datasets import Batch
from accel_train.domains.models.pretrained import load_directory, read_config
from accel_train.domains.pde import losses, pictures
from accel_train.domains.pde.data.assets import FieldAssets, FieldTask, load_field_assets
from accel_train.domains.pde.options import ObjectiveConfig
from accel_train.domains.pde.residual import refinement
from accel_train.domains.pde.residual.network import ResidualGuess
from accel_train.domains.pde.shape import PdeTransformerConfig
from accel_train.domains.pde.transformer import PdeTransformer
from accel_train.pipeline import Example, describe, numbers, settings
from accel_train.store.weights import has_ema

BATCH = 64
"""Samples of one forward."""
UNITS = {
    "fields": "those of the data; the model reads (field - mean) / std of each channel",
    "parameters": "those of the data, or their logarithms where logarithmic; the model reads (value - mean) / std",
    "dt": "time of the data from input to target, 0 for tasks without time",
}


@dataclass(frozen=True)
class FieldOptions:
    """Predict fields from fields, in physical units, and draw the first sample."""

    input: str | None = None
    """File .safetensors or .npy with input fields (B, C, H, W), 1-D fields also (B, C, W). A .safetensors file holds
    them as `input`, and may hold `parameters` (B, P). Without --input, the error names the shapes of each task."""
    task: str | None = None
    """Task to predict, required if the model has several."""
    parameters: tuple[float, ...] = ()
    """Parameters of the equation, the same for all samples. The error without them names their order."""
    steps: PositiveInt = 1
    """Steps in time. The prediction of one step is the input of the next."""
    refine: bool = True
    """Add the residual that a model with residual_depth has learned, in every step."""
    seed: Seed = 0
    """Seed of the residual's noise. It matters if the residual has more than one denoising step."""
    device: str = "cpu"
    """Device of torch."""
    output: str = "fields.safetensors"
    """File for the predicted fields. The picture is written beside it, with the ending .png."""

    def __post_init__(self) -> None:
        if self.output.lower().endswith(".png"):
            raise UsageError(
                f"output {self.output}: is the name of the picture beside the predicted fields; give the fields "
                "another name, such as fields.safetensors"
            )


class FieldPipeline:
    """Predicts fields from fields. Inputs and outputs are in the units of the data."""

    recipe: ClassVar[str] = "pde"
    tag: ClassVar[str | None] = None
    usage: ClassVar[str] = "predicted = pipeline(fields, parameters, task=name)  # in the units of the data"
    standalone: tuple[Any, ...] | ModuleType | None = (
        PdeTransformer,
        PdeTransformerConfig,
        losses.predict_refined,
    )
    options: ClassVar[type] = FieldOptions

    def __init__(self, model: PdeTransformer, assets: FieldAssets, residual_steps: int, device: str = "cpu") -> None:
        self.model = model
        self.assets = assets
        self.residual_steps = residual_steps
        self.device = device

    @classmethod
    def from_directory(cls, directory: Path, device: str = "cpu") -> FieldPipeline:
        """Load a checkpoint or an export. Raises ``UsageError`` if its assets or sampler settings are missing."""
        residual_steps = _residual_steps(directory)
        model = PdeTransformer.from_pretrained(directory)
        # Predict with the EMA weights, as evaluations during training do.
        if has_ema(directory):
            load_directory(model, directory, "ema")
        assets = load_field_assets(directory / "assets")
        return cls(model.to(device).eval(), assets, residual_steps, device)

    @torch.no_grad()
    def __call__(
        self,
        fields: Tensor,
        parameters: Tensor | None = None,
        *,
        task: str | None = None,
        steps: int = 1,
        refine: bool = True,
        seed: int = 0,
    ) -> Tensor:
        """Predict from ``fields`` (B, C, H, W), 1-D ones also (B, C, W), with ``parameters`` (B, P) or (P,).

        Returns (B, steps, C, H, W) for a task with time, one field for each step, and (B, C', H, W) for one without,
        on the CPU. ``task`` may be left out if the model has one. Raises ``UsageError`` for wrong shapes and numbers.
        """
        own = self._task(task)
        number = self.assets.tasks.index(own)
        state = self._checked(own, fields)
        own_parameters = self._parameters(own, parameters, len(state))
        if not isinstance(steps, Integral) or steps < 1 or (steps > 1 and not own.has_time):
            raise UsageError(
                f"steps {steps}: a whole number, 1 or more, is required, and 1 for {own.name} if it has no time"
            )
        # Keyed by content: a sample gets the same noise in any batch.
        contents = [sample.numpy().tobytes() for sample in state]
        # 8 bytes, read as a signed number, because the keys of `rng` are int64.
        digests = [hashlib.blake2b(content, digest_size=8).digest() for content in contents]
        keys = torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests])
        predicted: list[Tensor] = []
        normalised = own.input.normalise(state)
        for step in range(steps):
            # Each step of a sample has noise of its own.
            sample = rng.sample_keys(seed, "pipeline", step, keys)
            parts: list[Tensor] = []
            for rows in torch.arange(len(state)).split(BATCH):
                batch = {"input": normalised[rows], "parameters": own_parameters[rows], "sample": sample[rows]}
                # Fields stay normalised between steps, so that rounding errors do not accumulate.
                parts.append(self._predict(own, number, batch, refine, seed))
            # It is the next input as it is: a task with time has one scale for input and target.
            normalised = torch.cat(parts)
            predicted.append(own.target.denormalise(normalised))
            _refuse_not_finite(own, state, predicted[-1], step)
        # A steady task has one answer and no axis of time.
        return torch.stack(predicted, dim=1) if own.has_time else predicted[0]

    def sample(self, options: FieldOptions) -> list[str]:
        """Predict with the options of ``accel-train sample``, write the files and return the lines to print."""
        from safetensors.torch import save

        if options.input is None:
            raise UsageError(
                "input: no file with fields to predict from; give --input fields.safetensors, with a tensor `input` of "
                f"the shape of a task: {self._shapes()}"
            )
        own = self._task(options.task)
        fields, parameters = _read_fields(options.input, self._shapes())
        if options.parameters:
            if parameters is not None:
                raise UsageError(f"parameters: {options.input} contains parameters as well; leave one of the two out")
            parameters = torch.tensor(options.parameters)
        predicted = self(
            fields, parameters, task=own.name, steps=options.steps, refine=options.refine, seed=options.seed
        )
        path = expand_path(options.output)
        path.write_bytes(save({"fields": predicted.contiguous()}))
        picture = path.with_suffix(".png")
        first = self._checked(own, fields)[0]
        panels = self._panels(own, first, predicted[0])
        pictures.write_fields(picture, [(own.name, panels)])
        return [f"{path}: {own.name}, fields {tuple(predicted.shape)}", f"{picture}: the first sample"]

    def examples(self) -> list[Example]:
        """Return example forwards of each task: with and without a target, refined, and of the residual network."""
        found: list[Example] = []
        for number, task in enumerate(self.assets.tasks):
            fields = _noise(f"example/{task.name}", (2, task.input_channels, *task.grid))
            target = _noise(f"example/target/{task.name}", (2, task.target_channels, *task.grid))
            values = {
                "parameters": _noise("example/parameters", (2, self.assets.parameter_count)),
                "dt": torch.full((2,), task.dt),
                "task": number,
            }
            found.append(Example(f"{task.name}: prediction", {"input": fields, "target": None} | values))
            sampled = {"input": fields, "sample": torch.arange(2)} | values
            found.append(Example(f"{task.name}: refined prediction", sampled, losses.predict_refined))
            found.append(Example(f"{task.name}: training", {"input": fields, "target": target} | values))
            if self.model.residual is not None:
                # One time at pure noise and one in between, which the network treats differently.
                guess = ResidualGuess(target, torch.tensor([1.0, 0.25]), target.flip(0), fields)
                found.append(Example(f"{task.name}: residual", {"input": guess, "target": None} | values))
        return found

    # ------------------------------------------------------------------------------------------------------------ parts
    def _predict(self, task: FieldTask, number: int, batch: Batch, refine: bool, seed: int) -> Tensor:
        """Predict normalised fields (B, C', H, W) from normalised ones."""
        on_device = {name: values.to(self.device) for name, values in batch.items()}
        count = len(batch["input"])
        on_device["dt"] = torch.full((count,), task.dt, device=self.device)
        fields, log_size, correct = losses.predict(self.model, on_device, number, task.grid)
        if refine and log_size is not None:
            fields = refinement.refine(correct, fields, log_size, self.residual_steps, seed, on_device["sample"])
        return fields.float().cpu()

    def _task(self, name: str | None) -> FieldTask:
        tasks = {task.name: task for task in self.assets.tasks}
        if name is None and len(tasks) == 1:
            return self.assets.tasks[0]
        if name not in tasks:
            raise UsageError(f"task {name}: this model was trained on {', '.join(tasks)}; name one of them")
        return tasks[name]

    def _shapes(self) -> str:
        """Describe the required input tensors of each task."""
        shapes: list[str] = []
        for task in self.assets.tasks:
            channels, height, width = (task.input_channels, *task.grid)
            flat = f" or (B, {channels}, {width})" if height == 1 else ""
            names = ", ".join(task.parameters)
            own = f", and `parameters` (B, {len(task.parameters)}): {names}" if names else ""
            shapes.append(f"{task.name} (B, {channels}, {height}, {width}){flat}{own}")
        return "; ".join(shapes)

    def _checked(self, task: FieldTask, fields: Tensor) -> Tensor:
        """Return fields as (B, C, H, W) fp32 on the CPU."""
        checked = _real("input", fields)
        shape = tuple(checked.shape)
        height, width = task.grid
        if checked.dim() == 3 and height == 1:
            checked = checked[:, :, None]
        required = (task.input_channels, height, width)
        fits = checked.dim() == 4 and tuple(checked.shape[1:]) == required
        if not fits or len(checked) == 0:
            flat = f", or (B, {task.input_channels}, {width})" if height == 1 else ""
            raise UsageError(
                f"input of shape {shape}: {task.name} reads (B, {', '.join(map(str, required))}){flat}, "
                "on the grid that it was trained on"
            )
        return checked.contiguous()

    def _parameters(self, task: FieldTask, values: Tensor | None, count: int) -> Tensor:
        """Return normalised parameters (B, P)."""
        names = ", ".join(task.parameters)
        width = len(task.parameters)
        given = torch.zeros(count, 0)
        if values is not None:
            given = _real("parameters", values)
        if given.dim() == 1:
            given = given.expand(count, -1)
        if tuple(given.shape) != (count, width):
            shape = "none" if values is None else f"shape {tuple(torch.as_tensor(values).shape)}"
            required = "no parameters, so leave them out"
            if names:
                required = f"shape ({count}, {width}), a row of {names} for each sample, or ({width},) for all"
            raise UsageError(f"parameters: {shape} given; {task.name} takes {required}")
        return self.assets.normalise_parameters(task.name, given)

    def _panels(self, task: FieldTask, first: Tensor, predicted: Tensor) -> list[pictures.Panel]:
        """Show the first sample: all times of a 1-D task, or the input and the last prediction."""
        if task.has_time and task.grid[0] == 1:
            times = torch.cat((first[None, :1, 0], predicted[:, :1, 0]))
            times = times.squeeze(1)  # (steps + 1, W)
            title = pictures.titled("prediction", 0, task.target_channels)
            return [pictures.Panel(title, times, "u", pictures.STEPS)]
        # Channels are numbered as in the files, where a steady equation's target follows its input.
        last, scale, channel = predicted, "a", task.input_channels
        if task.has_time:
            last, scale, channel = predicted[-1], "u", 0
        input = pictures.titled("input", 0, task.input_channels)
        title = pictures.titled("prediction", channel, task.target_channels)
        return [pictures.Panel(input, first[0], scale), pictures.Panel(title, last[0], "u")]


def describe_model(
    shape: PdeTransformerConfig, objective: ObjectiveConfig, assets: FieldAssets, path: str
) -> dict[str, Any]:
    """Return config.json of a checkpoint: architecture, objective, normalisation, units. ``path`` is ``data.path``."""
    names = ("input", "target", "parameter", "parameters", "logarithmic", "dt", "boundary", "has_time")
    tasks = {task.name: asdict(task) for task in assets.tasks}
    return describe(
        FieldPipeline,
        shape,
        objective=asdict(objective),
        sampler={"residual_steps": objective.residual_steps, "seed": 0},
        normalisation={task: {name: values[name] for name in names} for task, values in tasks.items()},
        units=UNITS,
        card={"measured_on": f"held-out fields of {path}"},
    )


def _residual_steps(directory: Path) -> int:
    """Return the denoising steps of the residual, from config.json. Raises ``UsageError`` if it lacks them."""
    described = settings(read_config(directory), directory) or {}
    try:
        return int(described["sampler"]["residual_steps"])
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            f"{directory / 'config.json'}: sampler.residual_steps: a whole number is required, as recipes/pde.py "
            "writes it; export the model again"
        ) from None


def _noise(stream: str, shape: Sequence[int]) -> Tensor:
    keys = rng.sample_keys(0, stream, 0, torch.arange(shape[0]))
    return rng.normal(keys, shape[1:])


def _real(what: str, values: Tensor) -> Tensor:
    """Return finite values as fp32 on the CPU."""
    found = numbers(what, values).detach()
    if found.is_complex():
        # `float` would drop the imaginary part.
        raise UsageError(f"{what}: complex numbers ({found.dtype}); real ones are required, as in the training data")
    found = found.float().cpu()
    if not found.isfinite().all():
        raise UsageError(f"{what}: NaN or infinity among the values; finite numbers are required")
    return found


def _refuse_not_finite(task: FieldTask, inputs: Tensor, predicted: Tensor, step: int) -> None:
    """Raise ``UsageError`` for a prediction (B, C', H, W) with NaN or infinity, which names its sample."""
    finite = predicted.isfinite().flatten(1).all(1)
    if finite.all():
        return
    sample = int((~finite).nonzero()[0])
    size = float(task.input.normalise(inputs)[sample].abs().max())
    fewer = ""
    if step:
        fewer = f", or at most {step} steps"
    raise UsageError(
        f"input: the prediction of step {step + 1} from sample {sample} contains NaN or infinity; its values are up to "
        f"{size:.3g} standard deviations from the mean of the fields that {task.name} was trained on. Give fields of "
        f"similar size{fewer}"
    )


def _read_fields(file: str, shapes: str) -> tuple[Tensor, Tensor | None]:
    """Read input fields and, if the file has them, parameters. ``shapes`` describes the required input."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = expand_path(file)
    try:
        if path.suffix == ".npy":
            import numpy as np

            # A pickle may run code, and this file may come from anywhere.
            return torch.from_numpy(np.load(path, allow_pickle=False)), None
        tensors = load_file(path)
    # EOFError: an empty .npy file. TypeError: one of strings, or several arrays.
    except (OSError, EOFError, TypeError, ValueError, SafetensorError) as error:
        raise UsageError(f"input {file}: cannot be read ({error}); a .safetensors or .npy file is required") from None
    if "input" not in tensors:
        names = ", ".join(sorted(tensors)[:6]) or "nothing"
        raise UsageError(f"input {file}: contains {names}; a tensor `input` is required: {shapes}")
    return tensors["input"], tensors.get("parameters")

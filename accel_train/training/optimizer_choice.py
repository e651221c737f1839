"""Table of the supported optimizers, strategies and precisions, and optimizer classes of the user's own.

A combination that trains wrong, or differently from its name, is refused with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from accel_train.config import UsageError
from accel_train.options.flags import WORDS
from accel_train.options.strict_yaml import read_number
from accel_train.training.parameters import ParamGroup
from accel_train.wording import did_you_mean, nearest

OWN = "module:Class"
"""Row of the table for every optimizer class that is named by its module."""

STRATEGIES = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3")
PRECISIONS = ("fp32", "bf16", "fp16")
BITSANDBYTES = Version("0.50")
"""First version with a tested 8-bit AdamW. Older ones have no CPU kernels."""


@dataclass(frozen=True)
class Row:
    """One optimizer under one strategy."""

    precisions: tuple[str, ...]
    """Supported precisions. Empty: refused."""
    reason: str = ""
    """Reason for the refusal, with the remedy."""
    run: tuple[str, ...] = ()
    """Precisions trained by the project's own tests, on CPU processes. fp16 needs a GPU: not run."""


_RUNS = Row(PRECISIONS, run=("fp32", "bf16"))
_MUON_UNDER_ZERO = Row(
    (),
    "ZeRO hands the optimizer one flat vector of each group's parameters, cut across matrices, but Muon needs whole "
    "ones; use FSDP2 (accelerate_configs/fsdp2.yaml), which shards by rows, or --optimizer.name adamw",
)
_EIGHT_BIT_UNDER_FSDP = Row(
    (),
    "the kernels of bitsandbytes do not accept sharded tensors (bitsandbytes#89, #1633); FSDP2 already divides the "
    "state by the number of GPUs: use --optimizer.name adamw",
)
_EIGHT_BIT_UNDER_ZERO = Row(
    (),
    "ZeRO keeps the state of flat vectors, whose 8-bit blocks belong to no single parameter, so no checkpoint could "
    "name them; use --optimizer.name adamw, whose state ZeRO divides by the number of GPUs",
)
_OWN_UNDER_FSDP = Row(
    (),
    "a class may compute norms and sums of whole parameters, and here it would silently get those of this rank's rows "
    "only; use --optimizer.name adamw or muon",
)
_OWN_UNDER_ZERO = Row(
    (),
    "ZeRO hands the optimizer one flat vector of each group's parameters, whose state belongs to no parameter by name; "
    "use --optimizer.name adamw",
)
_ONE_GPU = "it keeps the whole state of one GPU in host memory"
_OFFLOAD_ELSEWHERE = Row((), f"{_ONE_GPU}; for several use accelerate_configs/zero2_offload.yaml with adamw")
_OFFLOAD_UNDER_FSDP = Row(
    (), f"{_ONE_GPU}; use accelerate_configs/fsdp2_offload.yaml or zero2_offload.yaml with --optimizer.name adamw"
)
_OFFLOAD_UNDER_ZERO = Row(
    (), "ZeRO offloads by itself; use accelerate_configs/zero2_offload.yaml with --optimizer.name adamw"
)

TABLE: dict[str, dict[str, Row]] = {
    "adamw": dict.fromkeys(STRATEGIES, _RUNS),
    "muon": {"single": _RUNS, "ddp": _RUNS, "fsdp2": _RUNS}
    | dict.fromkeys(("zero1", "zero2", "zero3"), _MUON_UNDER_ZERO),
    "adamw8bit": {"single": _RUNS, "ddp": _RUNS, "fsdp2": _EIGHT_BIT_UNDER_FSDP}
    | dict.fromkeys(("zero1", "zero2", "zero3"), _EIGHT_BIT_UNDER_ZERO),
    "adamw_offload": {"single": Row(PRECISIONS), "ddp": _OFFLOAD_ELSEWHERE, "fsdp2": _OFFLOAD_UNDER_FSDP}
    | dict.fromkeys(("zero1", "zero2", "zero3"), _OFFLOAD_UNDER_ZERO),
    OWN: {"single": _RUNS, "ddp": _RUNS, "fsdp2": _OWN_UNDER_FSDP}
    | dict.fromkeys(("zero1", "zero2", "zero3"), _OWN_UNDER_ZERO),
}
"""Optimizer -> strategy -> row. ``adamw_offload`` trains on a GPU only; its arithmetic is tested on CPU tensors."""


def check_name(name: str) -> None:
    """Refuse an unknown optimizer, before anything is built or imported."""
    known = [one for one in TABLE if one != OWN]
    module, colon, attribute = name.partition(":")
    if name in known or (colon and module and attribute):
        return
    raise UsageError(
        f"optimizer.name: {name!r} is not known{did_you_mean(nearest(name, known))}; give one of {', '.join(known)}, "
        "or module:Class for any torch.optim.Optimizer, such as torch.optim:NAdam"
    )


def is_own(name: str) -> bool:
    """Return True for ``module:Class``."""
    return ":" in name


def refuse_outside_table(name: str, strategy: str, precision: str) -> None:
    """Raise ``UsageError`` for a combination outside the table, on whatever machine."""
    row = TABLE[OWN if is_own(name) else name][strategy]
    if precision not in row.precisions:
        raise UsageError(f"optimizer.name: {name} does not run under {strategy} in {precision}: {row.reason}")


def refuse_combination(name: str, strategy: str, precision: str, device: torch.device) -> None:
    """Raise ``UsageError`` for a combination outside the table, a missing package, or an unsupported device."""
    refuse_outside_table(name, strategy, precision)
    if name == "adamw8bit":
        _refuse_eight_bit(device)
    if name == "adamw_offload" and device.type != "cuda":
        raise UsageError(
            f"optimizer.name: adamw_offload needs a CUDA device, and this is {device.type}, which has no device "
            "memory to save; use --optimizer.name adamw"
        )


def _refuse_eight_bit(device: torch.device) -> None:
    try:
        installed = Version(version("bitsandbytes"))
    except PackageNotFoundError:
        installed = None
    if installed is None or installed < BITSANDBYTES:
        raise UsageError(
            f"optimizer.name: adamw8bit needs bitsandbytes {BITSANDBYTES} or newer, and "
            f"{'it is not installed' if installed is None else f'{installed} is installed'}; run "
            f"pip install 'bitsandbytes>={BITSANDBYTES}', or use --optimizer.name adamw"
        )
    if device.type not in ("cuda", "cpu", "xpu"):
        raise UsageError(
            f"optimizer.name: adamw8bit runs on cuda, xpu and cpu, and this is {device.type}; use --optimizer.name "
            "adamw"
        )


# ------------------------------------------------------------------------------------- classes of the user's own
def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Import the class of ``module:Class``. Raises ``UsageError`` unless it is an optimizer the loop can use."""
    module, _, attribute = name.partition(":")
    try:
        imported: Any = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            f"optimizer.name: {name}: cannot be imported ({error}); give module:Class, where the module is installed "
            "or on PYTHONPATH"
        ) from None
    if not (isinstance(imported, type) and issubclass(imported, torch.optim.Optimizer)):
        raise UsageError(f"optimizer.name: {name}: is not a torch.optim.Optimizer; name a subclass of it")
    return imported


def averages_weights(optimizer: object) -> bool:
    """Return True for a schedule-free optimizer or its class. Its ``eval()`` writes the weights' average over them.

    ``train()`` writes the trained ones again. torch's own optimizers have neither method.
    """
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def keyword_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Parse ``KEY=VALUE`` texts. A value is a number, true, false, none, text, or a list of these: ``[0.9, 0.99]``.

    Lists become tuples, as torch's optimizers take betas.
    """
    arguments: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        problem = None
        if not equals or not key.isidentifier():
            problem = "must be KEY=VALUE, such as d_coef=0.5"
        elif key in _OPTION_OF_ARGUMENT:
            problem = f"is an option of its own: give {_OPTION_OF_ARGUMENT[key]}"
        elif key in arguments:
            problem = "is given twice: leave one out"
        if problem:
            raise UsageError(f"optimizer.arguments: {text!r} {problem}")
        arguments[key] = _argument(value.strip())
    return arguments


_OPTION_OF_ARGUMENT = {
    "lr": "--optimizer.lr, which the schedule multiplies",
    "weight_decay": "--optimizer.weight_decay, which spares norms, biases and embeddings",
    "params": "no parameters, because those of the model are used",
}


def _argument(text: str) -> Any:
    if text[:1] in ("[", "(") and text[-1:] in ("]", ")"):
        parts = [part.strip() for part in text[1:-1].split(",")]
        return tuple(_argument(part) for part in parts if part)
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    # The rules of YAML files, so that 1e-3 is a number here as there.
    number = read_number(text)
    return text if number is None else number


@dataclass(frozen=True)
class OwnOptimizer:
    """An optimizer named ``module:Class``, with its options."""

    name: str
    keywords: Mapping[str, Any]
    lr: float
    weight_decay: float

    @property
    def call(self) -> str:
        """The call of the class, for messages."""
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in {'lr': self.lr, **self.keywords}.items())})"

    def build(self, groups: list[ParamGroup]) -> torch.optim.Optimizer:
        """Call the class. Raises ``UsageError`` if its constructor fails, and for options without effect."""
        own: Any = optimizer_class(self.name)
        try:
            optimizer: Any = own(groups, lr=self.lr, **self.keywords)
        except Exception as error:  # of foreign code, which may raise anything for a bad argument
            raise UsageError(
                f"optimizer.arguments: {self.call} failed ({type(error).__name__}: {error}). Its constructor must take "
                "lr; correct the rest"
            ) from error
        if averages_weights(optimizer):
            # Once and for all: the loop reads the average where the others have their EMA.
            optimizer.train()
        # A group may have any key, and a class that does not read it would silently ignore the option.
        if "weight_decay" not in optimizer.defaults and self.weight_decay:
            raise UsageError(
                f"optimizer.weight_decay: {self.weight_decay}: {self.name} has no weight decay, so 0 is required. "
                "Give --optimizer.weight_decay 0"
            )
        return optimizer


# ------------------------------------------------------------------- a trial of an optimizer of the user's own
TRIAL_STEPS = 12


def try_saving(
    name: str,
    build: Callable[[list[ParamGroup]], torch.optim.Optimizer],
    lr: float,
    weight_decay: float,
    device: torch.device,
) -> bool:
    """Train a few values with the optimizer of `build` twice, once with a restore in between, and compare the bits.

    ``name`` is the value of ``optimizer.name``. Returns True if parameters stay unchanged while the learning rate and
    weight decay of their group are 0, as frozen parts must. Raises ``UsageError`` for a class that needs what the loop
    does not provide, that ignores the learning rate, or that keeps state where no checkpoint finds it. Each process
    runs it by itself, in milliseconds.
    """
    # In the middle, when running means and step counts are neither new nor settled.
    half = TRIAL_STEPS // 2
    try:
        first, second = _Trial(build, lr, weight_decay, device), _Trial(build, lr, weight_decay, device)
        first.train(range(half))
        second.restore(first, half)
        for trial in (first, second):
            trial.train(range(half, TRIAL_STEPS))
        survives = first.equals(second)
        # After the comparison, because `holds` leaves the rates and decays of its groups at 0.
        holds_frozen = first.holds("decay")
        reads_rate = first.holds("decay", "no_decay") or first.holds("decay", "no_decay")  # some are a step behind
        if not reads_rate and averages_weights(first.optimizer):
            # Its trained weights follow their average, so only a rate that was 0 from the start holds them.
            reads_rate = _Trial(build, lr, weight_decay, device).holds("decay", "no_decay")
    except UsageError:
        raise
    except Exception as error:  # of foreign code
        raise UsageError(
            f"optimizer.name: {name}: a trial of {TRIAL_STEPS} steps failed "
            f"({type(error).__name__}: {error}). The loop calls step() without a closure, with a learning rate "
            "that may be 0; choose a class that takes both"
        ) from error
    if not survives:
        raise UsageError(
            f"optimizer.name: {name}: a trial that was saved and restored after {half} of {TRIAL_STEPS} steps did not "
            "continue bit for bit: the class draws random numbers, or keeps state outside of `state` and "
            "`param_groups`, where no checkpoint can find it. Choose another class"
        )
    if not reads_rate:
        raise UsageError(
            f"optimizer.name: {name}: moves parameters while the learning rate is 0, so --optimizer.lr and "
            "the schedule would be ignored. Choose another class"
        )
    return holds_frozen


class _Trial:
    """A few parameters and an optimizer of the class under trial."""

    def __init__(
        self,
        build: Callable[[list[ParamGroup]], torch.optim.Optimizer],
        lr: float,
        weight_decay: float,
        device: torch.device,
    ) -> None:
        # Imported here, because most users of this module need its tables only.
        from accel_train.training.shards import OWN_KEY, Shards

        self.model = nn.Module()
        # Zeros like newly initialised heads and modulations: some optimizers keep different state for them.
        values = {
            "matrix": torch.linspace(-1, 1, 20).view(4, 5),
            "scale": torch.ones(3),
            "zeros": torch.zeros(4),
        }
        for name, value in values.items():
            self.model.register_parameter(name, nn.Parameter(value.to(device)))
        groups: list[ParamGroup] = []
        for name, members in (("decay", ["matrix"]), ("no_decay", ["scale", "zeros"])):
            decay = weight_decay if name == "decay" else 0.0
            parameters = [self.model.get_parameter(member) for member in members]
            group = {"params": parameters, "name": name, OWN_KEY: True}
            groups.append(group | {"lr": lr, "base_lr": lr, "weight_decay": decay})
        self.optimizer = build(groups)
        self.shards = Shards(self.model, self.optimizer)

    def train(self, steps: range) -> None:
        """Step with gradients that are a function of the step. The first learning rate is 0, as in a warm-up."""
        for step in steps:
            for index, parameter in enumerate(self.model.parameters()):
                angles = torch.linspace(-1, 1, parameter.numel(), device=parameter.device)
                angles = angles.view(parameter.shape)
                # Much the same direction in every step, so that optimizers that estimate a distance see one.
                parameter.grad = torch.sin(2 * angles + index + 0.1 * step)
            for group in self.optimizer.param_groups:
                group["lr"] = group["base_lr"] * min(step / 2, 1.0)
            self.optimizer.step()

    def restore(self, other: _Trial, step: int) -> None:
        """Take over weights and state as from a checkpoint: by parameter name and key, in fp32 and JSON."""
        self.model.load_state_dict(other.model.state_dict())
        numbers = json.loads(json.dumps(other.shards.numbers()))
        self.shards.create_state()
        for key, names in other.shards.state_names().items():
            for name in names:
                self.shards.set_state(name, key, other.shards.state(name, key).float())
        self.shards.set_step(step)
        self.shards.set_numbers(numbers)

    def holds(self, *groups: str) -> bool:
        """Step with learning rate and weight decay 0 in these groups; return whether their parameters stayed."""
        members: list[torch.Tensor] = []
        for group in self.optimizer.param_groups:
            if group["name"] in groups:
                group["base_lr"] = group["weight_decay"] = 0.0
                members += group["params"]
        before = [parameter.detach().clone() for parameter in members]
        # Not step 0, whose warm-up factor of 0 would hold every group.
        self.train(range(1, 2))
        return all(torch.equal(a, b) for a, b in zip(members, before, strict=True))

    def equals(self, other: _Trial) -> bool:
        """Compare the bits of all parameters."""
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        return all(torch.equal(ours, theirs) for ours, theirs in pairs)

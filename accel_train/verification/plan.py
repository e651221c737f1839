"""The runs of a verification: the user's config, shrunk, and the deviation of each run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_train.config import UsageError
from accel_train.verification.facts import Deviation, Outcome, Spec

if TYPE_CHECKING:
    from accel_train.launch_files.machine_config import MachineConfig

LARGEST_BATCH = 15
"""Most samples of a step. Odd, for unequal shares of two processes: one repeats a sample with weight 0."""
SET_HERE = (
    *("output_dir", "max_steps", "max_epochs", "micro_batch_size", "resume", "overwrite", "evaluate_only", "init_from"),
    *("checkpoints.save_every", "log.log_every"),
)
"""Options set by the runs of a verification."""
WARMUP = 2
"""Steps of the warm-up: the fewest that expose a learning rate that counts anything but steps."""
REFERENCE = "reference"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the runs."""

    steps: int
    middle: int
    """Step of the save and of the evaluation in the middle."""
    batch: int
    even: int | None
    """Micro-batch size dividing the batch. None: no smaller one does."""
    ragged: int | None
    """Micro-batch size for micro-batches of unequal size. None: with every size they are equal."""
    is_whole: bool = False
    """Each process has one micro-batch in every run."""

    @property
    def on_layouts(self) -> int:
        """Micro-batch size of the runs with two processes."""
        return self.ragged or self.even or self.batch


def refuse_options_set_here(arguments: Sequence[str]) -> None:
    """Raise ``UsageError`` for flags set by the runs themselves."""
    refuse_given(arguments, SET_HERE, "verify")


def refuse_given(arguments: Sequence[str], names: Collection[str], command: str) -> None:
    """Raise ``UsageError`` for all flags of ``names`` at once, which a command sets in its runs."""
    given = [name for name in dict.fromkeys(given_flags(arguments)) if name in names]
    if not given:
        return
    # All at once, or each would cost the user another start.
    listed = ", ".join(f"--{name}" for name in given)
    them = "it" if len(given) == 1 else "them"
    remedies = [f"leave {them} out"] if given != ["max_steps"] else []
    if "max_steps" in given:
        remedies.append("give --steps N instead of --max_steps")
    raise UsageError(f"{listed}: `accel-train {command}` sets {them} in each of its runs; {', and '.join(remedies)}")


def given_flags(arguments: Sequence[str]) -> list[str]:
    """List the names of the options on the command line, with the underscores that ``read_flags`` makes of dashes."""
    flags = [word.removeprefix("--") for word in arguments if word.startswith("--")]
    return [flag.partition("=")[0].replace("-", "_") for flag in flags]


def choose_sizes(options: Mapping[str, Any], arguments: Sequence[str], steps: int) -> Sizes:
    """Return the sizes for a recipe with these options, as resolved with the user's flags."""
    batch = int(options["global_batch_size"])
    if "global_batch_size" not in given_flags(arguments):
        batch = min(batch, LARGEST_BATCH)
        batch -= 1 - batch % 2
        # Two unequal micro-batches need three samples.
        batch = max(batch, 3)
    divisors = [size for size in range(1, batch) if batch % size == 0]
    # Samples are divided evenly over the micro-batches, so only an indivisible batch makes them unequal.
    uneven = [size for size in range(2, batch) if batch % _pieces(batch, size)]
    # About four micro-batches: few enough to be quick, and enough to put a mean of means far off.
    ragged = min(uneven, key=lambda size: abs(_pieces(batch, size) - 4), default=None)
    return Sizes(steps, steps // 2, batch, max(divisors, default=None), ragged)


def choose_whole_sizes(options: Mapping[str, Any], arguments: Sequence[str], steps: int) -> Sizes:
    """Return the sizes where each process has one micro-batch, and two processes have equal shares.

    Raises ``UsageError`` for an odd ``--global_batch_size``.
    """
    batch = int(options["global_batch_size"])
    if "global_batch_size" not in given_flags(arguments):
        batch = max(2, min(batch, LARGEST_BATCH) // 2 * 2)
    if batch % 2:
        raise UsageError(
            f"global_batch_size: {batch} with --one_micro_batch: an even number is required, or one of the two "
            "processes has one more sample; give an even one, or leave it out"
        )
    return Sizes(steps, steps // 2, batch, None, None, is_whole=True)


def _pieces(batch: int, size: int) -> int:
    return -(-batch // size)


def common_flags(options: Mapping[str, Any], arguments: Sequence[str], sizes: Sizes) -> dict[str, str]:
    """Return the flags of every run. ``--smoke`` comes before them and shortens the rest of the recipe."""
    flags = {
        "max_steps": str(sizes.steps),
        "max_epochs": "None",
        "global_batch_size": str(sizes.batch),
        "micro_batch_size": str(sizes.batch),
        # The tolerances are those of fp32.
        "precision": "fp32",
        "log.log_every": "1",
        "log.progress_bar": "off",
        "checkpoints.save_every": str(sizes.middle),
        # More than a run saves: the resume needs the middle one, the comparisons the last.
        "checkpoints.keep_last": "9",
        "checkpoints.keep_best": "0",
        "checkpoints.keep_state_last": "0",
        # Most runs skip the evaluation that has the metric.
        "checkpoints.best_metric": "None",
        "checkpoints.best_mode": "min",
        "checkpoints.patience": "None",
        **_schedule(options, sizes),
    }
    given = given_flags(arguments)
    if "checkpoints.best_mode" in given:
        # It would have no effect without a metric.
        del flags["checkpoints.best_metric"]
    # The file of the run, its length and its saves are refused before; anything else is the user's to choose.
    return {name: value for name, value in flags.items() if name not in given}


def words_of(flags: Mapping[str, str]) -> list[str]:
    """Return the flags as words of a command line. Each value is one word, even a path with spaces."""
    return [word for name, value in flags.items() for word in (f"--{name}", value)]


def _schedule(options: Mapping[str, Any], sizes: Sizes) -> dict[str, str]:
    """Return a schedule of the user's kind, with a short warm-up, that does not reach its end."""
    kind = str(options["schedule.kind"])
    flags = {"schedule.kind": kind, "schedule.warmup_steps": str(WARMUP)}
    if kind not in ("constant", "inverse_sqrt"):
        flags["schedule.decay_steps"] = str(4 * sizes.steps)
        flags["schedule.floor"] = str(options["schedule.floor"])
    if kind == "cosine_restarts":
        # Two cycles, so that a multiplier of the user has an effect.
        flags["schedule.cycles"] = "2"
    return flags


def all_specs(sizes: Sizes, launch_file: MachineConfig | None) -> dict[str, Spec]:
    """Return every run by its name. The reference is one process with the whole batch."""
    micro = str(sizes.on_layouts)
    specs = [
        Spec(REFERENCE, {}),
        Spec("again", {}),
        Spec("other_generators", {}, Deviation(disturbs_generators=True)),
        Spec("reversed", {}, Deviation(reverses_samples=True)),
        Spec(
            "evaluated",
            {"max_steps": str(sizes.middle)},
            Deviation(evaluates=True, continues_to=sizes.steps),
        ),
        Spec("two_processes", {"micro_batch_size": micro}, layout="two_processes"),
        Spec("fsdp2", {"micro_batch_size": micro}, layout="fsdp2"),
        Spec("zero2", {"micro_batch_size": micro}, layout="zero2"),
    ]
    if sizes.even is not None:
        specs.append(Spec("accumulated", {"micro_batch_size": str(sizes.even)}))
    if sizes.ragged is not None:
        specs.append(Spec("ragged", {"micro_batch_size": str(sizes.ragged)}))
    if launch_file is not None:
        # The file may be for more devices than this machine has cores.
        processes = 1 if launch_file.strategy == "single" else 2
        specs.append(Spec("launch_file", {"micro_batch_size": micro}, file=launch_file.path, processes=processes))
    return {spec.name: spec for spec in specs}


def resumed(sizes: Sizes, reference: Outcome) -> Spec:
    """Return the run from the reference's checkpoint in the middle."""
    return Spec("resumed", {"resume": str(reference.checkpoint(sizes.middle))})


def probe() -> Spec:
    """Return a run of one step, to measure the norm of the gradient."""
    return Spec("probe", {"max_steps": "1", "schedule.warmup_steps": "1"})

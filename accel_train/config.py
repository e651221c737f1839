"""Building blocks of options: value ranges, paths, the origin of each option, and the error that a user can correct.

Every package imports this module, so it imports none of them. ``options`` reads a config.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeGuard

from annotated_types import Interval

MACHINE_FILE_VARIABLE = "ACCEL_TRAIN_MACHINE_FILE"
REHEARSAL_VARIABLE = "ACCEL_TRAIN_REHEARSAL"
OF_LAUNCHERS = {
    *("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_WORLD_SIZE", "GROUP_RANK", "ROLE_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME"),  # torchrun
    *("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),  # Intel MPI and MPICH
    *(MACHINE_FILE_VARIABLE, REHEARSAL_VARIABLE),
}
"""Variables set by launchers, by full name: a user's own variable, such as LOCAL_SCRATCH, may share a prefix."""
LAUNCHERS = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_")
"""Name prefixes of all other variables set by launchers."""


class UsageError(ValueError):
    """Error that the user can correct: exit code 2, no traceback.

    The message names the option and its value, the requirement with numbers, and the remedy.
    """

    exit_code = 2
    summary = "wrong usage, exit code 2"


class MachineError(UsageError):
    """A condition of the machine, such as a full disk: exit code 1, because the same command may succeed later."""

    exit_code = 1
    summary = "exit code 1"


class MendedError(UsageError):
    """A defect that the next start of the same command repairs: the run ends with exit code 75, not 2."""


class WithoutEffectError(UsageError):
    """Error for options that another option leaves without effect, such as settings of a feature that is off.

    Options of a preset or file give way to the flag that causes this. Options of the command line are refused.
    """

    def __init__(self, text: str, options: Mapping[str, object], *, parts: Iterable[WithoutEffectError] = ()) -> None:
        super().__init__(text)
        self.options = options
        """Dotted names of these options, each with its default value."""
        self.parts = tuple(parts) or (self,)
        """One error for each cause, if several groups were refused at once."""

    def __reduce__(self) -> tuple[object, ...]:
        # Pickle would rebuild it from its message alone.
        return type(self), (str(self), self.options), vars(self)


def refuse_without_effect(
    options: object, group: str, names: Iterable[str], because: str, instead: str | None = None
) -> None:
    """Raise ``WithoutEffectError`` for those of ``names`` in ``group`` that differ from their defaults.

    ``because`` completes the sentence "has no effect ...". It names the cause with its group, as the notice about
    options that give way does. ``instead`` says how to make them effective. ``group`` is empty outside groups.
    """
    defaults = type(options)
    given = [name for name in names if getattr(options, name) != getattr(defaults, name)]
    if not given:
        return
    verb, them, default = "has", "it", "default is"
    if len(given) > 1:
        verb, them, default = "have", "them", "defaults are"
    dotted = [f"{group}.{name}".removeprefix(".") for name in given]
    values = ", ".join(
        f"{option}: {as_written(getattr(options, name))}" for option, name in zip(dotted, given, strict=True)
    )
    remedy = f"leave {them} out (the {default} {', '.join(as_written(getattr(defaults, name)) for name in given)})"
    if instead:
        remedy = f"{instead}, or {remedy}"
    idle = {option: getattr(defaults, name) for option, name in zip(dotted, given, strict=True)}
    raise WithoutEffectError(f"{values}: {verb} no effect {because}; {remedy}", idle)


def as_written(value: object) -> str:
    """Format the value of an option as on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        values: tuple[object, ...] = value
        return " ".join(map(as_written, values)) or "[]"
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return str(value)


WRITABLE = "a directory with write access and free space is required; give another"
"""Remedy for a place that cannot be written."""


OF_THE_MACHINE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO),
    *(errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT),  # a network disk that is away
}


def disk_error(error: Exception) -> type[UsageError]:
    """Return the error type for a disk error: wrong usage for permissions and paths, while the rest may pass."""
    return MachineError if error_number(error) in OF_THE_MACHINE else UsageError


def error_number(error: Exception) -> int | None:
    """Return the ``errno`` of an error, or None. Rust libraries, such as safetensors, give it only in the message."""
    if isinstance(error, OSError):
        return error.errno
    said = re.search(r"\(os error (\d+)\)", str(error))
    if said:
        return int(said[1])
    return None


@contextmanager
def refuse_unwritable(place: str, remedy: str = WRITABLE) -> Generator[None]:
    """Turn an ``OSError`` into the type of ``disk_error``. ``place`` is the path, preceded by its option if any."""
    try:
        yield
    except OSError as error:
        raise disk_error(error)(f"{place}: cannot be written ({error.strerror or error}); {remedy}") from None


def refuse_unusable_folder(place: str, folder: Path) -> None:
    """Raise ``UsageError`` unless a file can be created in ``folder``. Removes all that it creates, parents included.

    Creates a file to find out: permissions let a superuser write anywhere, but /proc or a full disk still refuse.
    """
    missing: list[Path] = []
    # A name for each process, since several may try at once.
    trial = folder / f".accel-train-trial-{os.getpid()}"
    with refuse_unwritable(place):
        try:
            missing += [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            trial.touch()
            trial.unlink()
        finally:
            for path in missing:
                with suppress(OSError):
                    path.rmdir()


def refuse_impossible(arguments: Mapping[str, object]) -> None:
    """Raise ``UsageError`` for an argument of a command: empty text, an unset variable, or more than a path can hold.

    Arguments passed on to a recipe, gates and common settings of a comparison are not checked, nor is a webhook's URL.
    """
    for name, value in arguments.items():
        if name in ("arguments", "common", "gates", "webhook"):
            continue
        values = value if isinstance(value, list) else [value]
        if "" in values:
            raise UsageError(
                f"{name}: '': empty text is refused, because it usually comes from a variable that is not set; give a "
                "value, or leave it out"
            )
        for text in filter(_is_text, values):
            if reason := too_long(text) or unset_variable(text):
                raise UsageError(f"{name}: {reason}")


def flags_behind(
    command: str, add_flags: Callable[[ArgumentParser], None], words: Sequence[str], earlier: Namespace
) -> tuple[Namespace, list[str]]:
    """Take a command's own flags out of the words after the recipe. ``earlier`` holds those before it.

    Returns all flags, of which those after the recipe win, and the other words. Raises like ``refuse_impossible``.
    """
    # No abbreviations: a flag of the recipe may begin like one of these. Its --help is the recipe's.
    parser = ArgumentParser(prog=f"accel-train {command}", allow_abbrev=False, add_help=False)
    add_flags(parser)
    # Parsed into the values read before the recipe: defaults replace none of them.
    flags, rest = parser.parse_known_args(list(words), earlier)
    refuse_impossible(vars(flags))
    return flags, rest


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


def too_long(path: str) -> str | None:
    """Return why the file system rejects a path as too long, and what is required. None if it may accept the path."""
    try:
        os.lstat(expand_path(path))
    except OSError as error:
        # Any other error may be solved by creating what is missing.
        if error.errno == errno.ENAMETOOLONG:
            return (
                f"{cut(path)} is refused: the path is too long for the file system; most accept up to 255 bytes per "
                "name and 4095 in all"
            )
    return None


def unset_variable(path: str) -> str | None:
    """Return why a path with ``$NAME`` or ``${NAME}`` is refused: no such variable, whose name would become a folder's.

    None if each variable is set on this host, or if a file really has this name.
    """
    names = [first or second for first, second in re.findall(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", path)]
    unset = [name for name in names if name not in os.environ]
    if not unset or os.path.lexists(expand_path(path)):
        return None
    return (
        f"{cut(path)}: the variable {unset[0]} is not set on {socket.gethostname()}; set it there, or give the path "
        "without it"
    )


def launched_processes(environment: Mapping[str, str]) -> int:
    """Return ``WORLD_SIZE``, the number of processes that a launcher started, or 1 without a launcher."""
    text = environment.get("WORLD_SIZE", "1")
    if not (text.isdecimal() and int(text) > 0):
        raise UsageError(
            f"WORLD_SIZE: {text!r}: a whole number, 1 or more, is required, the number of processes; unset the "
            "variable for one process, or start several with `accelerate launch` or torchrun, which set it"
        )
    return int(text)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that belongs to no launcher, even if this command runs under one."""
    return {
        name: value
        for name, value in environment.items()
        if name not in OF_LAUNCHERS and not name.startswith(LAUNCHERS)
    }


@contextmanager
def in_one_process() -> Generator[None]:
    """Hide the variables of a launcher, which a shell next to a run may have set."""
    alone = without_launcher(os.environ)
    # The choice of the device holds for one process as well.
    removed = os.environ.keys() - alone.keys() - {"ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE"}
    before = {name: os.environ.pop(name) for name in removed}
    try:
        yield
    finally:
        os.environ.update(before)


def cut(text: str, limit: int = 40) -> str:
    """Return a text in quotes, cut to ``limit`` characters and followed by its full length if it is longer."""
    if len(text) <= limit:
        return repr(text)
    return f"{text[:limit]!r}... ({len(text)} characters)"


# Infinite upper bounds are exclusive, so .inf is refused.
# Counts stay in the range where a float holds every integer: other programs may read JSON numbers as floats.
PositiveInt = Annotated[int, Interval(gt=0, le=2**53)]
NonNegativeInt = Annotated[int, Interval(ge=0, le=2**53)]
PositiveFloat = Annotated[float, Interval(gt=0, lt=float("inf"))]
NonNegativeFloat = Annotated[float, Interval(ge=0, lt=float("inf"))]
Fraction = Annotated[float, Interval(ge=0, le=1)]
"""0 to 1, both ends included."""
PositiveFraction = Annotated[float, Interval(gt=0, le=1)]
"""0 excluded, 1 included."""
FractionBelowOne = Annotated[float, Interval(ge=0, lt=1)]
"""0 included, 1 excluded: betas, decays."""
Seed = Annotated[int, Interval(ge=0, lt=2**32)]
"""The range of numpy's seeds."""
TimeoutSeconds = Annotated[int, Interval(gt=0, le=365 * 24 * 3600)]
"""Up to a year. torch stores timeouts as integers, which larger values may overflow."""
if TYPE_CHECKING:
    # A config replaces `auto` by a number as soon as it is built.
    MicroBatchSize = int
else:
    MicroBatchSize = PositiveInt | Literal["auto"]

_ORIGINS = "_origins"
GIVES_WAY = " gives way to "
"""Part of the origin of an option that a flag has replaced: ``500 of demo gives way to --max_epochs``."""
_requested: dict[str, object] = {}
"""``output_dir`` of the most recently read config."""


def set_origins(config: object, origins: Mapping[str, str]) -> None:
    """Attach the origin of each dotted option to a frozen config."""
    # Not a field, so that equality and the saved YAML leave it out.
    object.__setattr__(config, _ORIGINS, origins)


def origin_of(config: object, option: str) -> str:
    """Return ``default``, the preset or file, or ``command line``. Always ``default`` for a config built in Python."""
    origins: Mapping[str, str] = getattr(config, _ORIGINS, {})
    return origins.get(option, "default")


def replaced_options(config: object) -> dict[str, str]:
    """Return the options of a preset or file that gave way to flags, each with its origin."""
    origins: Mapping[str, str] = getattr(config, _ORIGINS, {})
    return {option: origin for option, origin in origins.items() if GIVES_WAY in origin}


def set_requested_output_dir(output_dir: object) -> None:
    """Remember the output directory of a command line, before the rest of it is validated."""
    _requested["output_dir"] = output_dir


def requested_output_dir() -> Path | None:
    """Return the output directory of the config read last, even if the rest of its command line was refused."""
    output_dir = _requested.get("output_dir")
    if isinstance(output_dir, str):
        return expand_path(output_dir)
    return None


def default_cache() -> str:
    """Return the default directory for files that can be recomputed."""
    return os.environ.get("ACCEL_TRAIN_CACHE") or "~/.cache/accel_train"


def bundled_folder(name: str) -> Path | None:
    """Return ``recipes`` or ``accelerate_configs``: inside the package in a wheel, else beside it."""
    package = Path(__file__).parent
    return next((place for place in (package / "bundled" / name, package.parent / name) if place.is_dir()), None)


def expand_path(text: str | os.PathLike[str]) -> Path:
    """Expand ``~`` and ``$VAR``, and make the path absolute against the working directory."""
    expanded = os.path.expandvars(os.path.expanduser(os.fspath(text)))
    return Path(os.path.abspath(expanded))

"""``--help`` of a recipe: the first options and the names of the groups, one group, or everything.

    --help              the first options, then a line for each group
    --help optimizer    one group
    --help all          everything

tyro writes the options from their types and from the docstrings below the fields. It is imported in this file only.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Annotated, Any, NoReturn, cast

from accel_train.config import UsageError
from accel_train.options.tree import field_types, is_group, option_names, option_types
from accel_train.wording import did_you_mean, nearest

FLAGS = ("--help", "-h")
ALL = "all"
GENERAL = "general"
"""Topic of the options outside groups."""


def requested_topic(arguments: Sequence[str]) -> str | None:
    """Return the word after ``--help``, empty if there is none. None if no help is asked for."""
    for index, word in enumerate(arguments):
        flag, equals, attached = word.partition("=")
        if flag not in FLAGS:
            continue
        if equals:
            return attached
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        return "" if following.startswith("-") else following
    return None


def topics(cls: type) -> list[str]:
    """Return every topic of ``--help``: ``all``, ``general`` and the groups, with those inside them."""
    groups: list[str] = []
    for name in option_names(cls):
        parts = name.split(".")[:-1]
        for depth in range(len(parts)):
            group = parts[: depth + 1]
            groups.append(".".join(group))
    return [ALL, GENERAL, *dict.fromkeys(groups)]


def print_help(cls: type, base: object, presets: Sequence[str], topic: str) -> NoReturn:
    """Print the options of ``cls`` with the values of ``base`` as defaults, and exit with code 0.

    Only the first process of a host prints. Raises ``UsageError`` for an unknown topic.
    """
    known = topics(cls)
    # Options are written with underscores, and many tools write them with dashes.
    topic = topic.replace("-", "_")
    if topic in option_names(cls):
        raise UsageError(f"--help {topic}: it is an option; give --help {topic.rpartition('.')[0] or GENERAL}")
    if topic and topic not in known:
        raise UsageError(
            f"--help {topic}: there is no such group; there are {', '.join(known)}{did_you_mean(nearest(topic, known))}"
        )
    first = option_names(cls)
    if hasattr(cls, "first_options"):
        first = cast("Any", cls).first_options()
    shown: Any
    if topic in ("", GENERAL):
        names = first if not topic else [name for name in option_names(cls) if "." not in name]
        shown = _flat(cls, base, names)
    elif topic == ALL:
        shown = _in_one_line_each(cls, base)
    else:
        shown = _alone(base, topic)
    _print_options(shown, shown(), _description(cls, presets))
    if not topic and _prints():
        print("\n".join(_overview(cls, first)))
    raise SystemExit(0)


def _prints() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _description(cls: type, presets: Sequence[str]) -> str:
    return (
        f"{inspect.getdoc(cls) or ''}\n\n"
        f"First argument: a preset ({', '.join(presets)}) or a YAML file. Flags override it. "
        "--print_config shows the result. --smoke tries everything in seconds, in OUTPUT_DIR-smoke unless --output_dir "
        "is given."
    )


def _print_options(cls: type, values: object, description: str) -> None:
    import tyro

    # tyro exits after it has printed.
    with suppress(SystemExit):
        tyro.cli(
            cls,
            args=["--help"],
            default=values,
            description=description,
            use_underscores=True,
            console_outputs=_prints(),
        )


def _flat(cls: type, base: object, names: Sequence[str]) -> type:
    """Make a dataclass with options ``names`` of ``cls`` and their values in ``base`` as defaults."""
    from tyro.conf import arg

    kinds = option_types(cls)
    texts = option_texts(cls)
    fields: list[tuple[str, Any, Any]] = []
    for name in names:
        text = texts.get(name, "")
        kind = Annotated[kinds[name], arg(name=name, help=text)]
        default = dataclasses.field(default=attrgetter(name)(base))
        # A field cannot have a dot in its name. tyro shows the name given to `arg`.
        fields.append((name.replace(".", "__"), kind, default))
    return dataclasses.make_dataclass("Options", fields)


def _alone(base: object, group: str) -> type:
    """Make a dataclass with one group of a config, under its own name."""
    from tyro.conf import arg

    value = attrgetter(group)(base)
    kind = _in_one_line_each(type(value), value)
    default: Any = dataclasses.field(default_factory=kind)
    return dataclasses.make_dataclass("Options", [("group", Annotated[kind, arg(name=group)], default)])


def _in_one_line_each(cls: type, values: object) -> type:
    """Copy a dataclass with each text on one line, for tyro to wrap, and ``values`` as defaults."""
    from tyro.conf import arg

    texts = field_texts(cls)
    fields: list[tuple[str, Any, Any]] = []
    for name, kind in field_types(cls).items():
        value = getattr(values, name)
        if is_group(kind):
            copy = _in_one_line_each(type(value), value)
            fields.append((name, copy, dataclasses.field(default_factory=copy)))
        else:
            shown = Annotated[kind, arg(help=texts.get(name, ""))]
            fields.append((name, shown, dataclasses.field(default=value)))
    namespace = {"__doc__": inspect.getdoc(cls)}
    return dataclasses.make_dataclass(cls.__name__, fields, namespace=namespace)


def _overview(cls: type, shown: Sequence[str]) -> list[str]:
    """Return a line for each group with options not in ``shown``."""
    rest = [name for name in option_names(cls) if name not in shown]
    lines = ["More options, by group: --help GROUP shows one, --help all everything.", ""]
    general = [name for name in rest if "." not in name]
    rows: list[tuple[str, int, str]] = []
    if general:
        rows.append((GENERAL, len(general), ", ".join(general)))
    for name, kind in field_types(cls).items():
        count = sum(option.startswith(f"{name}.") for option in rest)
        if is_group(kind) and count:
            rows.append((name, count, _first_sentence(kind)))
    width = max((len(name) for name, _, _ in rows), default=0)
    return lines + [f"  {name:<{width}} {count:>3}  {textwrap.shorten(text, 100)}" for name, count, text in rows]


def _first_sentence(cls: type) -> str:
    text = " ".join((inspect.getdoc(cls) or "").split())
    # Not at the period of "et al. 2024" or "e.g. this".
    return re.split(r"(?<!\bal)(?<!\b[a-z]\.[a-z])\. ", text, maxsplit=1)[0].rstrip(".")


def option_texts(cls: type, prefix: str = "") -> dict[str, str]:
    """Map each dotted option to the docstring below its field, on one line."""
    texts = {f"{prefix}{name}": text for name, text in field_texts(cls).items()}
    for name, kind in field_types(cls).items():
        if is_group(kind):
            texts |= option_texts(kind, f"{prefix}{name}.")
    return texts


def field_texts(cls: type) -> dict[str, str]:
    """Map each field of one dataclass to the docstring below it, inherited fields included."""
    texts: dict[str, str] = {}
    # Base classes first, so that its own texts win.
    for part in reversed(cls.__mro__[:-1]):
        texts |= _own_texts(part)
    return texts


@functools.cache  # all recipes share most groups of options
def _own_texts(cls: type) -> Mapping[str, str]:
    texts: dict[str, str] = {}
    # From the source, because Python does not keep the text below a field.
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    for field, after in itertools.pairwise(definition.body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            texts[field.target.id] = " ".join(str(after.value.value).split())
    return texts


def print_command_help(cls: type, program: str) -> NoReturn:
    """Print every option of a command without a config file, and exit with code 0."""
    import tyro

    tyro.cli(cls, args=["--help"], prog=program, description=inspect.getdoc(cls), use_underscores=True)
    raise SystemExit(0)

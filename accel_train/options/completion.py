"""Shell completion of a recipe's presets and options, from the types of its config.

shtab generates the script of a shell from an ``argparse`` parser. Parsers built here serve completion only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from accel_train.config import UsageError
from accel_train.options import help_text
from accel_train.options.flags import is_list, scalar_types, union_members
from accel_train.options.tree import option_types

SHELLS = ("bash", "zsh", "fish")
FLAG = "--print_completion"
PATHS = ("path", "dir", "from", "resume")
"""Last words in the names of path options."""


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script of ``parser``. Raises ``UsageError`` for an unknown shell."""
    import shtab

    if shell not in SHELLS:
        raise UsageError(f"{FLAG} {shell}: there are scripts for {', '.join(SHELLS)}; give one of them")
    return shtab.complete(parser, shell)


def print_completion(cls: type, presets: Sequence[str], arguments: Sequence[str]) -> NoReturn:
    """Print the completion script of ``accelerate launch RECIPE`` for the recipe of this process, and exit."""
    after = list(arguments)[list(arguments).index(FLAG) + 1 :]
    recipe = sys.argv[0]
    parser = argparse.ArgumentParser(prog="accelerate", add_help=False)
    launch = parser.add_subparsers().add_parser("launch", add_help=False, help="start a recipe")
    launch.add_argument("--config_file", help="launch file")
    launch.add_argument("--num_processes", help="processes over all machines")
    recipes = launch.add_subparsers()
    # By the path as typed here, and by its bare name for a start from its own folder.
    for name in dict.fromkeys([recipe, Path(recipe).name]):
        add_options(recipes.add_parser(name, add_help=False, help="recipe"), cls, presets)
    print(script(parser, after[0] if after else ""))
    raise SystemExit(0)


def add_options(parser: argparse.ArgumentParser, cls: type, presets: Sequence[str]) -> None:
    """Add the presets and options of a recipe with config ``cls`` to ``parser``."""
    from shtab import FILE

    parser.add_argument("preset", nargs="?", choices=list(presets), help="preset, or a YAML file")
    parser.add_argument(
        "--help", "-h", nargs="?", choices=help_text.topics(cls), help="options: those of a group, or all"
    )
    parser.add_argument("--print_config", action="store_true", help="show every option and where it comes from")
    parser.add_argument("--smoke", action="store_true", help="try everything in seconds")
    texts = help_text.option_texts(cls)
    for name, kind in option_types(cls).items():
        sentence = texts.get(name, "").partition(". ")[0]
        # argparse formats help texts with %.
        text = sentence.replace("%", "%%")
        if kind is bool:
            group, dot, leaf = name.rpartition(".")
            parser.add_argument(f"--{name}", f"--{group}{dot}no_{leaf}", action="store_true", help=text)
            continue
        nargs = "*" if is_list(kind) else None
        action: Any = parser.add_argument(f"--{name}", help=text, nargs=nargs)
        action.choices = _choices(kind)
        last_word = name.replace(".", "_").rpartition("_")[2]
        if str in scalar_types(kind) and last_word in PATHS:
            action.complete = FILE


def _choices(kind: Any) -> list[str] | None:
    """Return the words allowed by a type: members of its ``Literal``. None without any."""
    words: list[str] = []
    for part in union_members(kind):
        members = get_args(part) if get_origin(part) is tuple else (part,)
        for member in members:
            if get_origin(member) is Literal:
                words += [str(value) for value in get_args(member)]
    return words or None

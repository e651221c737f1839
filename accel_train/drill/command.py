"""The command line of ``accel-train drill``."""

from __future__ import annotations

from typing import Any

from accel_train.drill.flags import read_arguments


def run(arguments: Any) -> int:
    """Call ``drill`` with the parsed arguments."""
    # Read first, so that a wrong flag is refused without heavy imports.
    rest, options = read_arguments(arguments.arguments, arguments)
    from accel_train.drill.drill import drill

    return drill(arguments.recipe, rest, options)

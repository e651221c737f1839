"""A program: run a recipe as ``python RECIPE ARGUMENTS`` does, with a fault from the environment.

    ACCEL_TRAIN_DRILL='{"events": PATH, "action": "kill", ...}' python observed_run.py RECIPE ARGUMENTS

The launchers start it in the place of the recipe.
"""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path


def main() -> None:
    """Run the recipe named on the command line as ``__main__``."""
    # It imports what every recipe does.
    from accel_train import loop
    from accel_train.drill.inside.injection import injecting
    from accel_train.drill.inside.request import Request

    recipe = sys.argv[1]
    sys.argv = sys.argv[1:]
    # As Python itself has it for a script, so that a recipe can import the files beside it.
    sys.path[0] = str(Path(recipe).resolve().parent)
    with loop.observed(partial(injecting, Request.read())):
        runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    main()

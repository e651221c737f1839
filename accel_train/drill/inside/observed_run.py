"""Program that runs a recipe as ``python RECIPE ARGUMENTS`` does, with a fault from the environment.

    ACCEL_TRAIN_DRILL='{"events": PATH, "action": "kill", ...}' python observed_run.py RECIPE ARGUMENTS

Launchers start it in place of the recipe.
"""

from __future__ import annotations

import sys
from functools import partial


def main() -> None:
    """Run the recipe named on the command line as ``__main__``."""
    # Heavy imports, which every recipe makes too.
    from accel_train import loop
    from accel_train.commands.bundled import run_recipe
    from accel_train.drill.inside.injection import injecting
    from accel_train.drill.inside.request import Request

    run_recipe(sys.argv[1:], loop.observed(partial(injecting, Request.read())))


if __name__ == "__main__":
    main()

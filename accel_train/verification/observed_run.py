"""A program: run a recipe as ``python RECIPE ARGUMENTS`` does, with its training loop observed.

    python observed_run.py '{"facts": PATH, "deviation": {...}}' RECIPE ARGUMENTS

The launchers start it in the place of the recipe.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from accel_train.verification.facts import Deviation


def main() -> None:
    """Run the recipe named on the command line as ``__main__``."""
    # It imports what every recipe does.
    from accel_train import loop
    from accel_train.commands.bundled import run_recipe
    from accel_train.verification.observer import observing

    request = json.loads(sys.argv[1])
    observer = partial(observing, Deviation(**request["deviation"]), Path(request["facts"]))
    run_recipe(sys.argv[2:], loop.observed(observer))


if __name__ == "__main__":
    main()

"""Program that runs a recipe as ``python RECIPE ARGUMENTS`` does, with its training loop observed.

    python observed_run.py '{"facts": PATH, "deviation": {...}}' RECIPE ARGUMENTS

Launchers start it in place of the recipe.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from accel_train.verification.facts import Deviation


def main() -> None:
    """Run the recipe named on the command line as ``__main__``."""
    # Heavy imports, which every recipe makes too.
    from accel_train import loop
    from accel_train.commands.bundled import run_recipe
    from accel_train.verification.observer import observing

    request = json.loads(sys.argv[1])
    observer = partial(observing, Deviation(**request["deviation"]), Path(request["facts"]))
    run_recipe(sys.argv[2:], loop.observed(observer))


if __name__ == "__main__":
    main()

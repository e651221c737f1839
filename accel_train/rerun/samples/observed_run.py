"""Program that runs a recipe as ``python RECIPE ARGUMENTS`` does, and observes it.

python observed_run.py '{"measuring": {"step": 400, ...}}' RECIPE ARGUMENTS
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any


def main() -> None:
    """Run the recipe named on the command line as ``__main__``."""
    # Heavy imports, which every recipe makes too.
    from accel_train import loop
    from accel_train.commands.bundled import run_recipe
    from accel_train.rerun.better import recording
    from accel_train.rerun.samples import first_use, measuring
    from accel_train.rerun.upgrade import fingerprints, operators

    request = json.loads(sys.argv[1])
    words = sys.argv[2:]
    if "by_sample" in request:
        run_recipe(words, recording.recording(recording.Request(**request["by_sample"])))
        return
    observers: dict[str, tuple[Any, Any]] = {
        "measuring": (measuring.measuring, measuring.Request),
        "first_use": (first_use.finding, first_use.Request),
        "fingerprints": (fingerprints.recording, fingerprints.Request),
        "operators": (operators.recording, operators.Request),
    }
    (name,) = request
    enter, kind = observers[name]
    observer = partial(enter, kind(**request[name]))
    run_recipe(words, loop.observed(observer))


if __name__ == "__main__":
    main()

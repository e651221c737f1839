"""A program: run a recipe as ``python RECIPE ARGUMENTS`` does, observed.

python observed_run.py '{"measuring": {"step": 400, ...}}' RECIPE ARGUMENTS
"""

from __future__ import annotations

import json
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the recipe named on the command line as ``__main__``."""
    # It imports what every recipe does.
    from accel_train import loop
    from accel_train.rerun.better import recording
    from accel_train.rerun.samples import first_use, measuring
    from accel_train.rerun.upgrade import fingerprints, operators

    request = json.loads(sys.argv[1])
    recipe = sys.argv[2]
    sys.argv = sys.argv[2:]
    # As Python itself has it for a script, so that a recipe can import the files beside it.
    sys.path[0] = str(Path(recipe).resolve().parent)
    if "by_sample" in request:
        with recording.recording(recording.Request(**request["by_sample"])):
            runpy.run_path(recipe, run_name="__main__")
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
    with loop.observed(observer):
        runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    main()

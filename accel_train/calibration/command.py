"""``accel-train calibrate``: start one process per device, or measure in the processes of a launcher."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

from accel_train.calibration.flags import STOPPED, is_launched, options_of
from accel_train.config import UsageError

PROGRAM = Path(__file__).with_name("program.py")
OF_LAUNCH = ("config_file", "num_processes", "machine_rank", "main_process_ip", "main_process_port")


def run(arguments: argparse.Namespace) -> int:
    """Measure, and return the exit code."""
    options = options_of(arguments)
    given = [name for name in OF_LAUNCH if getattr(arguments, name) is not None]
    if is_launched(os.environ):
        if given:
            raise UsageError(
                f"{given[0]}: {getattr(arguments, given[0])}: a launcher has started this process, and decides this; "
                f"leave --{given[0]} out, or run accel-train calibrate without the launcher"
            )
        from accel_train.calibration import program

        return program.run(options)
    # Late: a launch imports Accelerate.
    from accel_train.commands.launch import Early, Launch, launch
    from accel_train.cost_model.record import refuse_other_file

    refuse_other_file(options.output)
    launched = {name: getattr(arguments, name) for name in OF_LAUNCH}
    request = Launch(recipe=str(PROGRAM), arguments=tuple(options.words()), **launched)
    return launch(request, early=Early(STOPPED, 128 + signal.SIGINT))

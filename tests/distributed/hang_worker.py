"""The recipe of tests/faults/evaluator.py, in whose third step rank 1 waits until the main process has named it."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_train.options.loading import load_config
from accel_train.runtime.exiting import run_main
from tests.faults import evaluator


def wait_until_named(log: Path) -> None:
    """Do what a process does that is stuck, up to the last of the lines that say so."""
    while "flight_recorder_N" not in log.read_text():
        time.sleep(0.05)


def main(argv: Sequence[str]) -> int:
    config = load_config(evaluator.Config, argv, presets=evaluator.PRESETS, default_preset="evaluator").config
    log = Path(config.output_dir) / "logs" / "rank_0.log"
    steps = itertools.count(1)
    set_learning_rate = evaluator.optimizers.set_learning_rate

    def stuck_in_the_third(*arguments: Any) -> None:
        if next(steps) == 3 and os.environ["RANK"] == "1":
            wait_until_named(log)
        set_learning_rate(*arguments)

    evaluator.optimizers.set_learning_rate = stuck_in_the_third
    return evaluator.main(argv)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    run_main(main)

"""A recipe whose blocks' inputs leave the device, with a stand-in for the copies of a GPU.

RECIPE: the recipe's name. LOG: a file for what was copied by the process of rank 0.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_train.runtime.exiting import run_main
from accel_train.speed import apply
from accel_train.speed.memory import activation_offload
from accel_train.speed.memory.activation_offload import InputOffload
from tests.speed.late_transfers import LateTransfers


def main(argv: Sequence[str]) -> int:
    transfers = LateTransfers()

    def offload(*_arguments: Any) -> InputOffload:
        return InputOffload(transfers)

    setattr(activation_offload, "LEAST_BYTES", 64)  # noqa: B010
    setattr(apply, "input_offload", offload)  # noqa: B010
    code = importlib.import_module(f"recipes.{os.environ['RECIPE']}").main(argv)
    if os.environ.get("RANK", "0") == "0":
        Path(os.environ["LOG"]).write_text("\n".join([*transfers.log, f"overwritten {transfers.overwritten}"]))
    return code


if __name__ == "__main__":
    run_main(main)

"""Trained parameters and samples that a start tells the linter: ``python -m tests.linting.sizes RECIPE [flags]``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

from accel_train import experiment, preparation
from accel_train.commands.bundled import find_recipe, import_recipe


class Known(BaseException):
    """Leaves a recipe's ``main`` before its model is built."""


def sizes(recipe: str, flags: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}

    def note(config: Any, accelerator: Any, stage: str, **named: int) -> None:
        found.update(named)
        if stage == "model":
            raise Known

    module = import_recipe(find_recipe(recipe))
    with mock.patch.object(experiment, "log_findings", note), mock.patch.object(preparation, "log_findings", note):
        try:
            module.main(list(flags))
        except Known:
            return found
    raise AssertionError("its main ended before the model was counted")


if __name__ == "__main__":
    print("RESULT " + json.dumps(sizes(sys.argv[1], sys.argv[2:])))

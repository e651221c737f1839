"""Options of an experiment, read back by the code that loads its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel_train.config import UsageError
from accel_train.store.run_file import experiment_options


def test_a_group_of_options_is_answered_with_the_dotted_names(tmp_path: Path) -> None:
    values = {"model.width": 8, "model.depth": 2, "modelled": 1, "seed": 0}
    (tmp_path / "experiment.json").write_text(json.dumps({"options": values}))
    options = experiment_options(tmp_path)
    assert options["model.width"] == 8
    dotted = r"'model' is a group of options, whose names are dotted: model\.width, model\.depth; .*\['model\.width'\]"
    with pytest.raises(UsageError, match=rf"experiment\.json: {dotted}$"):
        options["model"]["width"]
    with pytest.raises(UsageError, match=r"its run had no option 'mod'"):
        options["mod"]

"""What one real run leaves of its saves and its evaluation: in its training lines and in a tracker."""

from __future__ import annotations

import json
from pathlib import Path

from accel_train.metrics.records import read_metrics
from tests import compiling
from tests.distributed.launching import Layout, run_recipe


def test_saves_are_in_the_next_line_and_samples_in_the_tracker(tmp_path: Path) -> None:
    compiling.skip_without("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = "--max_steps 4 --checkpoints.save_every 2 --checkpoints.no_asynchronous --log.trackers tensorboard".split()
    directory = run_recipe(Layout("single", 1), tmp_path / "run", *flags).directory
    lines = [record for record in read_metrics(directory / "metrics.jsonl") if record["event"] == "train"]
    assert [line["step"] for line in lines if "save_stall_seconds" in line] == [
        3
    ]  # of a save after the last step: none
    stall = lines[2]["save_stall_seconds"]
    manifest = json.loads((directory / "checkpoints" / "checkpoint_00000002" / "manifest.json").read_text())
    # The save was waited for: at least the time from its beginning to its commit, and no more than between the lines.
    assert manifest["seconds"] - 0.001 <= stall <= lines[2]["elapsed_seconds"] - lines[1]["elapsed_seconds"]

    events = EventAccumulator(str(directory / "trackers" / "accel_train"), {"tensors": 0}).Reload()
    (sent,) = events.Tensors("report/samples/text_summary")
    assert sent.step == 4
    assert sent.tensor_proto.string_val[0].decode() == (directory / "report" / "samples.md").read_text()
    assert events.Tags()["images"] == []  # curves.png alone

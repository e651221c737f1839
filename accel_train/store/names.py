"""Names of the files in a run directory."""

from __future__ import annotations

import re
from pathlib import Path

RUN_FILE = "run.json"
CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
SAMPLE_LOSSES_FILE = "sample_losses.jsonl"
"""A line for each sample of each step, with ``log.per_sample``."""
LOCK_FILE = ".lock"
LOADING_FILE = "loading.json"
"""Counts the starts that died while they read a checkpoint."""
MICRO_BATCH_FILE = "micro_batch.json"
"""The smaller micro-batch of a run after it ran out of memory."""
LEFT_OUT_FILE = "left_out.json"
"""Samples left out of a run since it went back because of non-finite steps."""
OF_A_START = (METRICS_FILE, CONFIG_FILE, RUN_FILE, LOCK_FILE)
"""Files written by the main process before the first step, in addition to its log."""
OF_A_RUN = (LOADING_FILE, MICRO_BATCH_FILE, LEFT_OUT_FILE, RUN_FILE, CONFIG_FILE, METRICS_FILE, SAMPLE_LOSSES_FILE)
"""Files deleted by ``overwrite``, in addition to checkpoints, report and pushes waiting for the Hub."""
DATA_FINGERPRINT = "data_fingerprint"
"""Key in ``RUN_FILE``, among the options: the fingerprint of the data, compared at a resume like an option."""
DATA_CHANGED = "data.changed"
"""Option of recipes whose resume may continue with other data: ``refuse`` or ``allow``."""
INIT_FROM = "init_from"
"""Key in ``RUN_FILE``, beside the options: the commit of initial weights from the Hub."""
REPORT = "report"
"""Directory of pages and pictures for people: pushed to the Hub as a whole, and emptied by ``overwrite``."""
STEP = "step_"
"""In folders of the report: prefix of the names of each evaluation's pages, before the step."""
OTHER_DATA = "other_data"
"""In the report: folder of the last evaluation on data that the checkpoint was not trained on."""
EVALUATION_FILE = "evaluation.json"
"""In the report: the metrics of the last evaluation, with their step."""

UNFINISHED = (".tmp-", ".trash-")
"""Name prefixes of a save, an export or a deletion in progress."""


def files_of_steps(folder: Path, suffix: str) -> dict[int, Path]:
    """Map steps, in rising order, to the files ``step_STEP`` with this suffix. Ignores other files."""
    found: dict[int, Path] = {}
    for path in folder.glob(f"{STEP}*"):
        match = re.fullmatch(rf"{STEP}([0-9]+){re.escape(suffix)}", path.name)
        if match:
            found[int(match[1])] = path
    return dict(sorted(found.items()))

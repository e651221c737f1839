"""Names of the files in a run directory."""

from __future__ import annotations

RUN_FILE = "run.json"
CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
REPORT = "report"
"""Directory of what people look at: pushed to the Hub as a whole, and emptied by ``overwrite``."""
EVALUATION_FILE = "evaluation.json"
"""In the report: the metrics of the last evaluation, with their step."""

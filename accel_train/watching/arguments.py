"""Arguments of ``accel-train monitor`` and ``accel-train report``."""

from __future__ import annotations

import argparse


def add_monitor(monitor: argparse.ArgumentParser) -> None:
    """Add the arguments of the monitor to its parser."""
    monitor.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run, on this machine or a shared disk")
    monitor.add_argument("--once", action="store_true", help="print one page and end")
    monitor.add_argument("--json", action="store_true", help="print one JSON object and end")
    monitor.add_argument(
        "--every", type=float, default=2.0, metavar="SECONDS", help="time between two pages; default: 2"
    )
    monitor.add_argument(
        "--webhook",
        metavar="URL",
        help="send a message for each run that ends and each new alert, in the format of Slack",
    )


def add_report(report: argparse.ArgumentParser) -> None:
    """Add the arguments of the report to its parser."""
    report.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run; several are drawn over each other")
    report.add_argument("--output", default="report.html", metavar="FILE", help="default: report.html")
